"""What an engine's own source says of its functions, read without importing it."""

from __future__ import annotations

import ast
from pathlib import Path


def file_of(root: Path, module: str) -> Path | None:
    """Return the file of a module below the folder that its package lies in, or None."""
    path = root.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.is_file()), None)


def parameters(root: Path, dotted: str) -> str | None:
    """Return a function's parameters as its source has them, without their types.

    Args:
        root: the folder that the engine's package lies in.
        dotted: ``"package.module:Class.method"``.

    Returns:
        For example ``"(x, weight, *, backend=None)"``; None where there is no such function.
    """
    module, _, name = dotted.partition(":")
    file = file_of(root, module)
    if file is None:
        return None
    node: ast.AST | None = ast.parse(file.read_text(encoding="utf-8"), str(file))
    for part in name.split("."):
        node = _last_of(getattr(node, "body", []), part)
    if not isinstance(node, ast.FunctionDef):
        return None
    given = node.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    return f"({ast.unparse(given)})"


def _last_of(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """Return what a name means at the end of a body: its last definition there."""
    kinds = ast.FunctionDef | ast.ClassDef
    found = [node for node in body if isinstance(node, kinds) and node.name == name]
    return found[-1] if found else None


def difference(root: Path, dotted: str, known: str) -> str:
    """Return how a function differs from what is known of it; ``""`` where it does not."""
    found = parameters(root, dotted)
    if found is None:
        return f"{dotted}: expected {known}, got no such function"
    return "" if found == known else f"{dotted}: expected {known}, got {found}"
