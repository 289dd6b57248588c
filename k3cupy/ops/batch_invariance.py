"""Batch-invariant mode: for a call, for a block of code, for the process, or by the environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from k3cupy.accept import checks
from k3cupy.runtime import env
from k3cupy.runtime.errors import reject, shown

_of_process: bool | None = None
_of_block: ContextVar[bool | None] = ContextVar("k3cupy_batch_invariant", default=None)


def set_batch_invariant(enabled: bool) -> None:
    """Turn batch-invariant mode on or off for the whole process.

    While it is on, every product of low-latency linear that our kernels can compute goes to the
    batch-invariant fused-A GEMM, whatever tables say: the bits of a row depend neither on the
    number of rows nor on the other rows. It goes before the environment variable
    K3CUPY_BATCH_INVARIANT; ``batch_invariant_mode`` and a call's own argument go before it.

    Raises:
        TypeError: not a bool.

    Example:
        >>> import k3cupy
        >>> k3cupy.set_batch_invariant(True)
        >>> k3cupy.is_batch_invariant()
        True
        >>> k3cupy.set_batch_invariant(False)
    """
    global _of_process
    checks.check_flags(locals(), "enabled")
    _of_process = enabled


def is_batch_invariant() -> bool:
    """Return whether a call that says nothing of its own is batch invariant here and now.

    Example:
        >>> import k3cupy
        >>> k3cupy.is_batch_invariant()
        False
    """
    return resolved(None)


@contextlib.contextmanager
def batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """Turn batch-invariant mode on, or off, inside a ``with`` block.

    It holds for the present thread, or for the present asyncio task and those that it starts.

    Args:
        enabled: False turns it off inside a process that has it on.

    Raises:
        TypeError: not a bool.

    Example:
        >>> import k3cupy
        >>> with k3cupy.batch_invariant_mode():
        ...     k3cupy.is_batch_invariant()
        True
    """
    checks.check_flags(locals(), "enabled")
    token = _of_block.set(enabled)
    try:
        yield
    finally:
        _of_block.reset(token)


def resolved(batch_invariant: Any) -> bool:
    """Return what a call's argument means: None for the mode.

    Raises:
        TypeError: neither None nor a bool.
    """
    if batch_invariant is None:
        found = _of_block.get()
        if found is None:
            found = _of_process
        if found is None and env.BATCH_INVARIANT not in env.values:
            return False  # the everyday case, without another call
        return env.batch_invariant() if found is None else found
    if not isinstance(batch_invariant, bool):
        reject("batch_invariant", "None, True or False", shown(batch_invariant), error=TypeError)
    return batch_invariant
