"""Launching: cuda-core sets the PDL attribute, which CuPy's own launcher cannot."""

from __future__ import annotations

from typing import Any

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


class Launcher:
    """A kernel with its launch configuration on one GPU.

    Args:
        device: GPU ordinal.
        kernel: ``LoadedKernel.kernel``.
        grid: blocks.
        block: threads a block.
        pdl: set the attribute for programmatic dependent launch, with which the kernel may start
            before its predecessor ends.
    """

    def __init__(self, device: int, kernel: Any, *, grid: int, block: int, pdl: bool) -> None:
        core = toolchain.cuda_core()
        self._device = device
        self._kernel = kernel
        self._config = core.LaunchConfig(
            grid=grid, block=block, programmatic_stream_serialization=pdl
        )
        self._launch = core.launch

    def __call__(self, stream: int, arguments: list[Any]) -> None:
        """Queue the kernel; the caller's current device is as before afterwards.

        Args:
            stream: driver handle of a stream on the device.
            arguments: Python ints for pointers and 64-bit values, NumPy scalars for the rest.
        """
        if devices.is_current(self._device):
            self._launch(streams.wrap(stream), self._config, self._kernel, *arguments)
            return
        with devices.current(self._device):
            self._launch(streams.wrap(stream), self._config, self._kernel, *arguments)
