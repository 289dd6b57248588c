"""What we recorded of an engine, compared with its source tree, which is read and never run.

    python -m pytest tests/test_engine_contract.py

with K3CUPY_VLLM_SOURCE and K3CUPY_SGLANG_SOURCE naming the folders that the packages ``vllm`` and
``sglang`` lie in: the root of vLLM's source archive, a folder with SGLang's unpacked wheel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from k3cupy.engines import sources

_DEFINITION = re.compile(r'\bdef\(\s*((?:"[^"]*"\s*)+)')
_PIECE = re.compile(r'"([^"]*)"')


def differences(root: Path, facts: Any) -> list[str]:
    """Every difference between a source tree and the module of what we know of it, in words."""
    return [
        *operators(root, facts),
        *filter(None, (sources.difference(root, *fact) for fact in facts.FUNCTIONS.items())),
        *importers(root, facts.IMPORTERS),
        *words(root, facts.WORDS),
    ]


def operators(root: Path, facts: Any) -> Iterator[str]:
    """The operators of which the C++ source has another schema, or none."""
    if not hasattr(facts, "OPERATORS"):
        return
    text = (root / facts.OPERATORS_FILE).read_text(encoding="utf-8")
    declared = {}
    for pieces in _DEFINITION.findall(text):
        schema = " ".join("".join(_PIECE.findall(pieces)).split())
        declared[schema.partition("(")[0]] = schema
    for name, known in facts.OPERATORS.items():
        found = declared.get(name, f"no such operator in {facts.OPERATORS_FILE}")
        if found != known:
            yield f"operator {name}: expected {known}, got {found}"


def importers(root: Path, known: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The functions that other modules import by value than we know of."""
    wanted = {tuple(dotted.split(":")): dotted for dotted in known}
    names = {name for _, name in wanted}
    found: dict[str, set[str]] = {dotted: set() for dotted in known}
    for package in {module.partition(".")[0] for module, _ in wanted}:
        for file in sorted((root / package).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if not any(name in text for name in names):
                continue
            importer = _module_of(root, file)
            for module, name in imported_by_value(text, importer, file.name == "__init__.py"):
                if (module, name) in wanted:
                    found[wanted[module, name]].add(importer)
    for dotted, expected in known.items():
        if found[dotted] != set(expected):
            told = [", ".join(sorted(some)) or "nobody" for some in (expected, found[dotted])]
            yield f"{dotted} imported by value: expected by {told[0]}, got by {told[1]}"


def imported_by_value(text: str, importer: str, is_package: bool) -> Iterator[tuple[str, str]]:
    """(module, name) of what a module has names of its own for, once it is imported.

    An import inside a function looks up at each call, and one for type checkers never happens.
    """
    waiting: list[ast.AST] = list(ast.parse(text).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.ImportFrom):
            base = importer.split(".")[: len(importer.split(".")) - node.level + is_package]
            parts = [*(base if node.level else ()), *((node.module,) if node.module else ())]
            yield from ((".".join(parts), alias.name) for alias in node.names)
        else:
            waiting += ast.iter_child_nodes(node)


def words(root: Path, known: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The names that a module no longer has anywhere."""
    for module, names in known.items():
        file = sources.file_of(root, module)
        text = "" if file is None else file.read_text(encoding="utf-8")
        for name in names:
            if not re.search(rf"\b{re.escape(name)}\b", text):
                yield f"{module}: expected the name {name} in it, got none"


def _module_of(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
