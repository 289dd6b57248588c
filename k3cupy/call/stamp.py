"""The stamp: what a cached plan must agree on beside its call: tables, modes, edited sources."""

from __future__ import annotations

from typing import Any

from k3cupy.runtime import env, sources

_tables = 0
_overrides, _values = sources.override, env.values
_SOURCE_DIR, _CHECK = env.SOURCE_DIR, env.CHECK


def stamp(names: tuple[str, ...]) -> Any:
    """Return what plans must agree on; it runs on every call.

    Args:
        names: the CUDA sources of an operation.
    """
    if _overrides.get() is None and _SOURCE_DIR not in _values and _CHECK not in _values:
        return _tables
    return _tables, env.check_enabled(), tuple(map(sources.epoch, names))


def tables_changed() -> None:
    """Let no plan of before fit any more: what is known of times has changed."""
    global _tables
    _tables += 1


def tables() -> int:
    """Return a number that changes when what is known of times does."""
    return _tables
