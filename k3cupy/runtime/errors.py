"""Errors that are not the caller's arguments, and the text of those that are."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

_MOST_CHARACTERS = 400


class ToolchainError(RuntimeError):
    """CuPy, NVRTC, cuda-core, the CUDA headers or a usable GPU is missing; the text says which."""


class CompileError(RuntimeError):
    """NVRTC refused a source. The text holds the compiler's own log."""


class CaptureError(RuntimeError):
    """A call inside CUDA graph capture would have had to compile, load or synchronise."""


class BusyError(Exception):
    """Another process compiles the instance: who warms up does another one first."""


class MissingError(ToolchainError):
    """A binary is not kept here, and K3CUPY_NO_COMPILE forbids to make it."""


def reject(
    name: str, expected: str, got: str, hint: str = "", error: type[Exception] = ValueError
) -> NoReturn:
    """Raise the error of one argument: every message is ``argument: expected ..., got ...``.

    Args:
        name: the argument.
        expected: what is accepted.
        got: what was found; of a very long text the beginning and the end are told.
        hint: what to do about it, a phrase without a full stop.
        error: ValueError, or TypeError for a wrong type.
    """
    if len(got) > _MOST_CHARACTERS:
        got = f"{got[: _MOST_CHARACTERS // 2]} ... {got[-_MOST_CHARACTERS // 4 :]}"
    raise error(f"{name}: expected {expected}, got {got}" + (f". {hint}" if hint else ""))


_NO_HEADER = (
    r'cannot open source file "'
    r'(?:\w+|cuda/std/[^"]*|(?:std\w+|assert|float|limits|math|string)\.h)"'
)
_RULES = (
    (
        r"__nv_name_map\(\d+\): error",
        "A call asks for a kernel by its name and the arguments of its template: those must stay "
        "as the package has them",
    ),
    (
        _NO_HEADER,
        "NVRTC has none of the headers that come with a host compiler or with CCCL; printf and the "
        "mathematical functions need no include",
    ),
    (
        "\ufeff",
        "A file begins with a byte order mark, which NVRTC does not read: save it as UTF-8 without",
    ),
)
"""What the log shows of a rule that an edited source has broken, and the rule."""


def refused_by_nvrtc(path: object, what: str, log: str, hint: str = "") -> CompileError:
    """Return the error of a source that does not compile; raise it ``from None``.

    The compiler's exception holds the same log, which a traceback would show a second time.

    Args:
        path: of the source.
        what: was refused.
        log: of NVRTC.
        hint: what else may be the reason.
    """
    log = re.sub(r"^\d+: NVRTC_ERROR\w+(, compilation log:)?", "", log.strip("\0 \n")).strip()
    log = re.sub(r'in the compilation of "[^"\n]*"', f'in the compilation of "{path}"', log)
    rules = [rule for pattern, rule in _RULES if re.search(pattern, log)]
    lines = [f"{path}: NVRTC refused {what}", log, *rules, hint]
    return CompileError("\n".join(filter(None, lines)))


class _Short(reprlib.Repr):
    """Quotes anything in bounded time and length, however large or deep."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = 80
        self.maxother = 200  # a configuration is told whole
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write out more than 4,300 digits."""
        many = x.bit_length() > 10_000
        return f"an integer of {x.bit_length()} bits" if many else super().repr_int(x, level)


shown: Callable[[Any], str] = _Short().repr
"""Returns a value as a message quotes it: ``repr``, shortened where it is long."""
