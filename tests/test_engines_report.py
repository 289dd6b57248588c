"""The report of an engine's targets, and standing in for functions and modules to come."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from k3cupy.engines.imports import ImportWatch
from k3cupy.engines.overrides import NotOverridableError, Replacement, parameters_of
from k3cupy.engines.report import OF_VARIABLE, EngineReport, Target, TargetRow, named_targets


def some_report() -> EngineReport:
    gone, there = Target("gone", "the engine has no such [operator]"), Target("there")
    there.install()
    there.served += 12
    for reason in ("65 tokens", "a bias", "65 tokens"):
        there.hand_back(reason)
    return EngineReport("vLLM", [gone.row(), there.row()])


def test_it_prints_as_a_table() -> None:
    lines = str(some_report()).splitlines()
    assert lines[0] == "k3cupy in vLLM: 1 of 2 targets installed, 12 calls served, 3 handed back"
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[0] == "|"]
    assert cells == [
        ["target", "served", "handed back", "why"],
        ["gone", "0", "", "not installed: the engine has no such [operator]"],
        ["there", "12", "2", "65 tokens"],
        ["", "", "1", "a bias"],
    ]
    assert repr(some_report()) == str(some_report())


def test_rich_prints_the_same_words() -> None:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as shown:
        console.print(some_report())
    assert "the engine has no such [operator]" in shown.get()


def test_it_is_a_sequence_of_rows() -> None:
    report = some_report()
    assert (len(report), report.installed, report.served, report.handed_back) == (2, 1, 12, 3)
    assert [row.name for row in report] == ["gone", "there"]
    assert report["there"] == TargetRow("there", True, "", 12, {"65 tokens": 2, "a bias": 1})
    with pytest.raises(KeyError, match="name: expected a target of vLLM: gone, there, got 'other'"):
        report["other"]


def test_it_is_plain_values() -> None:
    found = json.loads(json.dumps(some_report().to_dict()))
    assert found["engine"] == "vLLM"
    assert found["targets"]["there"]["handed_back"] == {"65 tokens": 2, "a bias": 1}
    assert found["targets"]["gone"] == {
        "installed": False,
        "why_not": "the engine has no such [operator]",
        "served": 0,
        "handed_back": {},
    }


def test_a_report_does_not_change_with_its_targets() -> None:
    target = Target("x")
    row = target.row()
    target.hand_back("late")
    target.leave("gone")
    assert (row.handed_back, row.why_not) == ({}, "")
    assert target.row().handed_back == {"late": 1}, "what was counted stays"


def test_reasons_have_an_end() -> None:
    target = Target("x")
    for i in range(1000):
        target.hand_back(f"reason {i}")
        target.hand_back("reason 0")
    assert len(target.handed_back) == 51
    assert target.handed_back["reason 0"] == 1001
    assert sum(target.handed_back.values()) == 2000


def test_targets_are_named_by_one_or_several_and_by_patterns() -> None:
    names = ("first", "second", "third")
    for asked, found in (
        (None, names),
        ("second", ("second",)),
        (["third", "*r*"], ("third", "first")),
        (iter(()), ()),
    ):
        assert named_targets("targets", asked, names) == found


@pytest.mark.parametrize(
    ("asked", "error"), [(5, TypeError), ("2", ValueError), ([None], ValueError), ("", ValueError)]
)
def test_what_names_no_target_is_told_those_that_there_are(
    asked: Any, error: type[Exception]
) -> None:
    told = f"got {asked[0] if isinstance(asked, list) else asked!r}. {OF_VARIABLE}"
    expected = re.escape(f"ENGINE: expected names of targets: first, second, {told}")
    with pytest.raises(error, match=f"^{expected}$"):
        named_targets("ENGINE", asked, ["first", "second"], OF_VARIABLE)


# --- Functions -----------------------------------------------------------------------------------


def module_of(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    return module


def twice(value: int, *, by: int = 2) -> int:
    """Multiply."""
    return value * by


def test_a_function_is_replaced_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    home, user = module_of("home", twice=twice), module_of("user", twice=twice)
    other = module_of("other", twice=len)
    make = lambda own: lambda value, *, by=2: own(value, by=by) + 1  # noqa: E731
    for module in (user, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = ["user", "other", "later", "never"]
    replaced = Replacement(home, "twice", "(value, *, by=2)", make, names)
    assert (home.twice(3), user.twice(3, by=3)) == (7, 10)
    assert home.twice.__doc__ == "Multiply."
    assert other.twice is len
    behind = module_of("later", twice=home.twice)
    monkeypatch.setitem(sys.modules, "later", behind)
    home.twice = other_one = lambda value: value
    replaced.undo()
    assert user.twice is behind.twice is twice
    assert home.twice is other_one, "who came after us stays"


def test_what_differs_is_not_replaced() -> None:
    home = module_of("home", twice=twice, number=3)
    for name, parameters, told in (
        ("once", "()", "home has no function once"),
        ("number", "()", "home has no function number"),
        ("twice", "(value)", r"its parameters are not those that we know: \(value, \*, by=2\)"),
    ):
        with pytest.raises(NotOverridableError, match=told):
            Replacement(home, name, parameters, lambda own: own)
    assert home.twice is twice
    assert parameters_of(twice) == "(value, *, by=2)"


# --- Modules to come -----------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose module `user` takes a name of `home` by value."""
    folder = tmp_path / "engine_of_tests"
    folder.mkdir()
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / "home.py").write_text("name = 'own'\n", encoding="utf-8")
    user = "from engine_of_tests.home import name\n"
    (folder / "user.py").write_text(user, encoding="utf-8")
    (folder / "broken.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("", ".home", ".user", ".broken"):
        monkeypatch.delitem(sys.modules, f"{folder.name}{name}", raising=False)
    return folder.name


def test_a_module_is_met_behind_its_code_and_before_its_importers(package: str) -> None:
    met: list[str] = []

    def act(module: Any) -> None:
        met.append(module.name)
        module.name = "ours"

    name = f"{package}.home"
    watches = [ImportWatch({name: act}), ImportWatch({name: act})]
    for watch in watches:
        watch.start()
    try:
        assert importlib.import_module(f"{package}.user").name == "ours"
        importlib.reload(sys.modules[name])
    finally:
        for watch in watches:
            watch.stop()
    assert met == ["own", "ours"], "each watch acts once"
    assert not any(isinstance(finder, ImportWatch) for finder in sys.meta_path)


def test_a_module_that_is_there_is_met_at_once(package: str) -> None:
    module, met = importlib.import_module(f"{package}.home"), []
    watch = ImportWatch({module.__name__: met.append})
    watch.start()
    watch.stop()
    assert met == [module]


def test_a_watch_that_has_stopped_meets_nothing(package: str) -> None:
    met: list[Any] = []
    watch = ImportWatch({f"{package}.home": met.append})
    watch.start()
    watch.stop()
    importlib.import_module(f"{package}.home")
    assert met == []


def test_a_module_that_fails_is_met_when_it_succeeds(package: str, tmp_path: Path) -> None:
    met: list[Any] = []
    watch = ImportWatch({f"{package}.broken": met.append, f"{package}.missing": met.append})
    watch.start()
    try:
        with pytest.raises(ZeroDivisionError):
            importlib.import_module(f"{package}.broken")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{package}.missing")
        assert met == []
        (tmp_path / package / "broken.py").write_text("fine = True\n", encoding="utf-8")
        importlib.invalidate_caches()
        assert importlib.import_module(f"{package}.broken").fine
    finally:
        watch.stop()
    assert len(met) == 1
