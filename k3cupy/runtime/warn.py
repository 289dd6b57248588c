"""Warnings that name the caller's line, however deep in the package they are found."""

from __future__ import annotations

import sys
import warnings

_OURS = (__name__.partition(".")[0], "contextlib")
"""The package, and what stands between its frames where a function is a context manager."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost frame outside the package, so that nobody counts stack levels.

    Args:
        message: what is wrong, and what to do.
        category: of the warning.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals):
        frame = frame.f_back
    where = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=where.get("__name__", "<unknown>"),
        registry=where.setdefault("__warningregistry__", {}),
    )


def _is_ours(variables: dict[str, object]) -> bool:
    return str(variables.get("__name__")).partition(".")[0] in _OURS
