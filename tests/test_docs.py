"""The documents say what is true: examples run, code compiles, links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

import k3cupy

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "examples", ROOT / "tests")
    for path in folder.glob("*.md")
)
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(k3cupy.__path__, prefix="k3cupy.")
    if not module.name.endswith("__main__")
)  # fmt: skip

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FOLDERS = ("k3cupy/", "cuda_src/", "tests/", "examples/", "docs/", ".ci/")

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def prose(path: Path) -> str:
    """The text without its code blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [textwrap.dedent(m[3]) for m in FENCE.finditer(text) if m[2] == language]


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Docstrings


@pytest.mark.parametrize("name", ["k3cupy", *MODULES])
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_every_public_function_has_an_example_or_needs_none() -> None:
    """What a newcomer calls shows how; a class of data, an error and a report need no example."""
    operations = [name for name in k3cupy.__all__ if name.startswith("fused_")]
    assert len(operations) >= 6
    for name in (*operations, "explain_mla_prefill", "warmup", "source_dir"):
        assert ">>>" in (getattr(k3cupy, name).__doc__ or ""), name
    for name in k3cupy.__all__:
        assert getattr(k3cupy, name).__doc__, f"{name} has no docstring"


# Documents


def test_there_are_documents() -> None:
    assert ROOT / "README.md" in DOCUMENTS


@each_document
def test_python_in_documents_is_python(path: Path) -> None:
    for code in blocks(path, "python"):
        if ">>>" in code:
            parser = doctest.DocTestParser()
            code = "".join(example.source for example in parser.get_examples(code))
        ast.parse(code)


@each_document
def test_names_of_the_package_in_documents_exist(path: Path) -> None:
    """Whatever a document calls as `k3cupy.name` is public, or a module."""
    for code in blocks(path, "python"):
        for name in re.findall(r"\bk3cupy\.(\w+)", code):
            assert hasattr(k3cupy, name) or f"k3cupy.{name}" in MODULES, f"k3cupy.{name}"


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {link}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{path.name} links to {link}"


@each_document
def test_paths_in_documents_exist(path: Path) -> None:
    """A path in backquotes that begins like one of ours names a file or a pattern of files."""
    for quoted in re.findall(r"`([^`\s]+)`", prose(path)):
        if quoted.startswith(FOLDERS) and "<" not in quoted:
            found = list(ROOT.glob(quoted.rstrip("/")))
            assert found, f"{path.name} names {quoted}"


@each_document
def test_documents_have_one_title(path: Path) -> None:
    assert len(re.findall(r"^# ", prose(path), re.MULTILINE)) == 1
