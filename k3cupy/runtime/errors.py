"""Errors that are not the caller's arguments, and the text of those that are."""

from __future__ import annotations

from typing import NoReturn


class ToolchainError(RuntimeError):
    """CuPy, NVRTC, cuda-core, the CUDA headers or a usable GPU is missing; the text says which."""


class CompileError(RuntimeError):
    """NVRTC refused a source. The text holds the compiler's own log."""


class CaptureError(RuntimeError):
    """A call inside CUDA graph capture would have had to compile, load or synchronise."""


def reject(
    name: str, expected: str, got: str, hint: str = "", error: type[Exception] = ValueError
) -> NoReturn:
    """Raise the error of one argument: every message is ``argument: expected ..., got ...``.

    Args:
        name: the argument.
        expected: what is accepted.
        got: what was found.
        hint: what to do about it, a phrase without a full stop.
        error: ValueError, or TypeError for a wrong type.
    """
    raise error(f"{name}: expected {expected}, got {got}" + (f". {hint}" if hint else ""))
