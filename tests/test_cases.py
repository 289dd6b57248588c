"""The page of cases, `CASES.md`: what broke packages of this kind, and the tests that hold it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.xdist_group("cases")  # the tests of all files are read once
PAGE = (HERE / "CASES.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(test_\w+)::(test_\w+)`")
_NAMED_BY_CASE = re.compile(r"case(\d\d)(?=_)")


def tables(page: str) -> list[dict[int, list[tuple[str, str]]]]:
    """The rows of each table of the page: number -> (file, test) of each test that it names."""
    return [
        {int(row[1]): _TEST.findall(row[3]) for row in _ROW.finditer(part)}
        for part in page.split("\n## ")[1:]
    ]


def defined_in(path: Path) -> set[str]:
    """The tests that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def wrong_rows(page: str, defined: dict[str, set[str]]) -> dict[int, list[tuple[str, str]]]:
    """Rows without a test, and rows that name one that is not there."""
    found = {}
    for table in tables(page):
        for number, named in table.items():
            missing = [(file, test) for file, test in named if test not in defined.get(file, ())]
            if missing or not named:
                found[number] = missing
    return found


@pytest.fixture(scope="module")
def defined() -> dict[str, set[str]]:
    """The tests of each file."""
    return {path.stem: defined_in(path) for path in sorted(HERE.glob("test_*.py"))}


def test_every_case_has_its_tests_and_they_exist(defined: dict[str, set[str]]) -> None:
    cases, faults = tables(PAGE)
    assert list(cases) == list(range(1, 51))
    assert list(faults) == list(range(1, 22))
    assert wrong_rows(PAGE, defined) == {}


def test_a_test_that_bears_a_case_stands_in_its_row(defined: dict[str, set[str]]) -> None:
    cases, _ = tables(PAGE)
    named = {(number, *test) for number, tests in cases.items() for test in tests}
    borne = {
        (int(number), file, test)
        for file, tests in defined.items()
        for test in tests
        for number in _NAMED_BY_CASE.findall(test)
    }
    assert borne
    assert borne - named == set()


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        ("| 1 | slice | `test_house::test_that_is_gone` |", [("test_house", "test_that_is_gone")]),
        ("| 1 | a slice | none yet |", []),
    ],
)
def test_a_wrong_row_is_found(row: str, missing: list[tuple[str, str]]) -> None:
    defined = {"test_house": {"test_that_is_there"}}
    assert wrong_rows(f"# Cases\n\n## First\n\n{row}\n", defined) == {1: missing}
