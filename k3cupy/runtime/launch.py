"""Launching: cuda-core sets the PDL attribute, which CuPy's own launcher cannot."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3cupy.runtime import devices, streams, toolchain


def divisor_constants(divisor: int) -> tuple[int, int]:
    """Return (magic, shift) so that ``n // divisor == (n * magic) >> shift`` for 0 <= n < 2^31.

    With s = ceil(log2(divisor)), magic = ceil(2^(31+s) / divisor) exceeds the true quotient by less
    than 1 / divisor, and n times that error stays below 2^(31+s): the floor is exact. magic fits
    32 bits.

    Args:
        divisor: from 1 to 2^31 - 1.
    """
    bits = (divisor - 1).bit_length()
    return -(-(1 << (31 + bits)) // divisor), 31 + bits


def uint32(value: int) -> np.uint32:
    """Return a value that the launcher passes as 32 bits (a Python int is passed as 64)."""
    return np.uint32(value)


def make_config(grid: int, block: int, *, pdl: bool) -> Any:
    """Return a launch configuration; with ``pdl`` the kernel may start before its predecessor ends.

    Args:
        grid: blocks.
        block: threads a block.
        pdl: set the attribute for programmatic dependent launch.
    """
    return toolchain.cuda_core().LaunchConfig(
        grid=grid, block=block, programmatic_stream_serialization=pdl
    )


def launch(
    device: int, stream: int, config: Any, kernel: Any, arguments: tuple[Any, ...] | list[Any]
) -> None:
    """Queue a kernel. The caller's current device is as before afterwards.

    Args:
        device: GPU on which the stream and the kernel are.
        stream: driver handle.
        config: from ``make_config``.
        kernel: ``LoadedKernel.kernel``.
        arguments: Python ints for pointers and 64-bit values, NumPy scalars for the rest.
    """
    if devices.is_current(device):
        toolchain.cuda_core().launch(streams.wrap(stream), config, kernel, *arguments)
        return
    with devices.current(device):
        toolchain.cuda_core().launch(streams.wrap(stream), config, kernel, *arguments)
