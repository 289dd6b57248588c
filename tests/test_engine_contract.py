"""What we recorded of vLLM and SGLang, against their real sources where those are at hand.

The checker itself is tried on small trees with planted changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_helpers
from engine_contract import differences, imported_by_value

from k3cupy.engines import sglang_facts, sources, vllm_facts

# --- The real sources ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "facts"),
    [("K3CUPY_VLLM_SOURCE", vllm_facts), ("K3CUPY_SGLANG_SOURCE", sglang_facts)],
)
def test_an_engine_is_what_we_know_of_it(variable: str, facts: Any) -> None:
    if not os.environ.get(variable):
        version = facts.VERSION
        pytest.skip(f"{variable} names no source tree of the engine; {version} was read")
    root = Path(os.environ[variable])
    assert root.is_dir(), f"{variable}: expected a folder, got {root}"
    found = differences(root, facts)
    assert not found, f"{root} is not the {facts.VERSION} that was read:\n" + "\n".join(found)


# --- The checker ---------------------------------------------------------------------------------

BINDINGS = """
  // Two operators of the engine.
  ops.def(
      "skinny(Tensor! out, Tensor x, "
      "Tensor weight, bool enable_pdl=False) -> ()");
  ops.def("other(Tensor x) -> Tensor");
"""
DISPATCH = """
import torch

LIMIT = 16

def run(plan, x: torch.Tensor, weight: torch.Tensor, *, pdl: bool = True) -> torch.Tensor | None:
    return None

class Method:
    @classmethod
    def apply(cls, layer, x, bias=None): ...
"""
USER = """
from typing import TYPE_CHECKING

from .dispatch import Method

if TYPE_CHECKING:
    from engine.dispatch import run

def later():
    from engine.dispatch import run
    return run
"""
FACTS = SimpleNamespace(
    OPERATORS_FILE="csrc/bindings.cpp",
    OPERATORS={
        "skinny": "skinny(Tensor! out, Tensor x, Tensor weight, bool enable_pdl=False) -> ()",
    },
    FUNCTIONS={
        "engine.dispatch:run": "(plan, x, weight, *, pdl=True)",
        "engine.dispatch:Method.apply": "(cls, layer, x, bias=None)",
    },
    IMPORTERS={"engine.dispatch:run": (), "engine.dispatch:Method": ("engine.user",)},
    WORDS={"engine.dispatch": ("LIMIT",)},
)


def tree(
    folder: Path, bindings: str = BINDINGS, dispatch: str = DISPATCH, user: str = USER
) -> Path:
    for name, text in {
        "csrc/bindings.cpp": bindings,
        "engine/__init__.py": "",
        "engine/dispatch.py": dispatch,
        "engine/user.py": user,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_tree_that_is_as_recorded(tmp_path: Path) -> None:
    assert differences(tree(tmp_path), FACTS) == []


PLANTED: dict[str, tuple[dict[str, tuple[str, str]], str]] = {
    "a changed schema": (
        {"bindings": ("bool enable_pdl=False", "bool enable_pdl=True")},
        f"operator skinny: expected {FACTS.OPERATORS['skinny']}, got "
        "skinny(Tensor! out, Tensor x, Tensor weight, bool enable_pdl=True) -> ()",
    ),
    "an operator that is gone": (
        {"bindings": ("skinny(", "slim(")},
        f"operator skinny: expected {FACTS.OPERATORS['skinny']}, got no such operator in "
        "csrc/bindings.cpp",
    ),
    "a renamed function": (
        {"dispatch": ("def run(", "def run_plan(")},
        "engine.dispatch:run: expected (plan, x, weight, *, pdl=True), got no such function",
    ),
    "another default": (
        {"dispatch": ("pdl: bool = True", "pdl: bool = False")},
        "engine.dispatch:run: expected (plan, x, weight, *, pdl=True), "
        "got (plan, x, weight, *, pdl=False)",
    ),
    "an argument that came": (
        {"dispatch": ("bias=None", "bias=None, residual=None")},
        "engine.dispatch:Method.apply: expected (cls, layer, x, bias=None), "
        "got (cls, layer, x, bias=None, residual=None)",
    ),
    "a new importer by value": (
        {"user": ("import Method", "import Method, run as first")},
        "engine.dispatch:run imported by value: expected by nobody, got by engine.user",
    ),
    "an importer that is gone": (
        {"user": ("from .dispatch import Method", "from . import dispatch")},
        "engine.dispatch:Method imported by value: expected by engine.user, got by nobody",
    ),
    "a name that is gone": (
        {"dispatch": ("LIMIT", "LIMITS")},
        "engine.dispatch: expected the name LIMIT in it, got none",
    ),
}


@pytest.mark.parametrize("change", PLANTED)
def test_a_planted_change_is_named(change: str, tmp_path: Path) -> None:
    edits, expected = PLANTED[change]
    texts = {"bindings": BINDINGS, "dispatch": DISPATCH, "user": USER}
    changed = {name: texts[name].replace(*edit) for name, edit in edits.items()}
    assert all(changed[name] != texts[name] for name in changed)
    assert differences(tree(tmp_path, **changed), FACTS) == [expected]


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    (tree(tmp_path) / "engine/dispatch.py").unlink()
    told = "\n".join(differences(tmp_path, FACTS))
    assert "engine.dispatch:run: expected (plan, x, weight, *, pdl=True), got no such" in told
    assert "expected the name LIMIT in it, got none" in told


@pytest.mark.parametrize(
    ("text", "importer", "is_package", "expected"),
    [
        ("from a.b import c, d as e", "x.y", False, {("a.b", "c"), ("a.b", "d")}),
        ("from .b import c", "a.x", False, {("a.b", "c")}),
        ("from .b import c", "a", True, {("a.b", "c")}),
        ("from ..b import c", "a.x.y", False, {("a.b", "c")}),
        ("from . import b", "a.x", False, {("a", "b")}),
        ("try:\n    from a import b\nexcept ImportError:\n    b = None", "x", False, {("a", "b")}),
        ("class C:\n    from a import b", "x", False, {("a", "b")}),
        ("import a.b", "x", False, set()),
        ("async def f():\n    from a import b", "x", False, set()),
        ("if not TYPE_CHECKING:\n    pass\nelse:\n    from a import b", "x", False, {("a", "b")}),
    ],
)
def test_imports_by_value(text: str, importer: str, is_package: bool, expected: Any) -> None:
    assert set(imported_by_value(text, importer, is_package)) == expected


def test_the_stand_in_for_sglang_is_as_recorded(tmp_path: Path) -> None:
    """What the other tests run on has the real one's names and signatures."""
    assert differences(sglang_helpers.written(tmp_path), sglang_facts) == []


def test_of_two_definitions_the_last_counts(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def f(a): ...\ndef f(b, /, *c, d=1, **e): ...\n")
    assert sources.parameters(tmp_path, "m:f") == "(b, /, *c, d=1, **e)"
