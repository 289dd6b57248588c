"""What the assembler made of a kernel: numbers and warnings of its log, parameters in the code."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from k3cupy.runtime.errors import ToolchainError

_KPARAM_INFO = 0x17
"""The attribute of ``.nv.info.<kernel>`` that describes a parameter."""

_SIZED = 4
"""The format of an attribute that is followed by as many bytes as its value says."""

_NO_NUMBERS = "this NVRTC does not say what kernels take: install one of CUDA 12.9 or newer"

_DIAGNOSTIC = re.compile(
    r"^\S.*\(\d+\): (?:warning|remark)\b.*(?:\n(?!\n|ptxas ).*)*", re.MULTILINE
)
_OF_PTXAS = re.compile(r"^ptxas (?:warning *:|\w+ *: \(C\d+\)).*$", re.MULTILINE)
_IN_FUNCTION = re.compile(r",? (?:in|for)(?: the)?(?: entry)? function:? '[^']*'")


class Taken(NamedTuple):
    """What a kernel takes: registers a thread, bytes a thread, and bytes of a block."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int


def taken(log: str, symbol: str) -> Taken:
    """Return what a kernel takes, with the functions that it calls.

    Args:
        log: of ``offline.compile_cubin(..., verbose=True)``.
        symbol: of the kernel. What the log says of others, and of the source, is not read.

    Raises:
        ToolchainError: the log does not say it.
    """
    _, found, rest = log.rpartition(f"Compiling entry function '{symbol}'")
    lines = re.findall(r"^ptxas .*$", rest.partition("Compiling entry function")[0], re.MULTILINE)
    used = next((line for line in lines if re.search(r": Used \d+ registers", line)), None)
    if not found or used is None:
        raise ToolchainError(_NO_NUMBERS)

    def numbers(what: str, *told: str) -> list[int]:
        return [int(n) for line in told for n in re.findall(rf"(\d+) {what}", line)]

    # The stack of the kernel's own frame, unless the assembler adds up those of what it calls.
    frames = numbers("bytes cumulative stack", used) or numbers("bytes stack frame", *lines)
    return Taken(
        registers=sum(numbers("registers", used)),
        spill_stores=sum(numbers("bytes spill stores", *lines)),
        spill_loads=sum(numbers("bytes spill loads", *lines)),
        stack_bytes=frames[0] if frames else 0,
        shared_bytes=sum(numbers("bytes smem", used)),
    )


def warnings_of(log: str) -> tuple[str, ...]:
    """Return the warnings and remarks of the compiler and of the assembler, each once."""
    told = [match[0].rstrip() for match in _DIAGNOSTIC.finditer(log)]
    told += [_IN_FUNCTION.sub("", line).rstrip() for line in _OF_PTXAS.findall(log)]
    return tuple(dict.fromkeys(told))


def parameter_sizes(code: bytes, symbol: str) -> tuple[tuple[int, int], ...]:
    """Return place and size in bytes of each parameter of a kernel, in order, from its ELF file."""
    found = []
    for kind, value in _attributes(_section(code, f".nv.info.{symbol}")):
        if kind == _KPARAM_INFO:
            _, ordinal, place, packed = struct.unpack_from("<IHHI", value)
            found.append((ordinal, place, packed >> 18))  # the lower bits say how it is aligned
    return tuple((place, size) for _, place, size in sorted(found))


def _section(code: bytes, wanted: str) -> bytes:
    table, each, count, names = (
        *struct.unpack_from("<Q", code, 0x28),
        *struct.unpack_from("<HHH", code, 0x3A),
    )
    headers = [struct.unpack_from("<IIQQQQ", code, table + i * each) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, size in headers:
        start = strings + name
        if code[start : code.index(0, start)].decode() == wanted:
            return code[offset : offset + size]
    return b""


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(section):
        form, kind, size = struct.unpack_from("<BBH", section, place)
        end = place + 4 + (size if form == _SIZED else 0)
        yield kind, section[place + 4 : end]
        place = end
