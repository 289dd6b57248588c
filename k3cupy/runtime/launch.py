"""Launching: cuda-core sets the PDL attribute, which CuPy's own launcher cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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


Launcher = Callable[[int, Sequence[Any]], None]
"""Queues a kernel: (stream handle, arguments). Pointers and 64-bit values are Python ints."""


def make_launcher(
    device: int,
    kernel: Any,
    *,
    grid: int,
    block: int,
    pdl: bool,
    shared_bytes: int = 0,
    cluster: int = 1,
) -> Launcher:
    """Return the launch of a kernel on one GPU; the caller's current device stays as it is.

    A closure, because it runs on every call and attributes of an object cost more.

    Args:
        device: GPU ordinal.
        kernel: ``LoadedKernel.kernel``.
        grid: clusters; with ``cluster=1`` that is blocks.
        block: threads a block.
        pdl: set the attribute for programmatic dependent launch, with which the kernel may start
            before its predecessor ends.
        shared_bytes: dynamic shared memory a block; see ``LoadedKernel.allow_shared_memory``.
        cluster: blocks a cluster; above 1 from sm_90 on.
    """
    core = toolchain.cuda_core()
    queue = core.launch
    config = core.LaunchConfig(
        grid=grid,
        block=block,
        shmem_size=shared_bytes,
        programmatic_stream_serialization=pdl,
        **({"cluster": cluster} if cluster > 1 else {}),
    )
    get_device = toolchain.cupy().cuda.runtime.getDevice
    thread = threading.local()
    known_stream = streams.known  # in C: `wrap` would be one Python frame more in every launch

    def launch(stream: int, arguments: Sequence[Any]) -> None:
        if get_device() == device and hasattr(thread, "bound"):
            queue(known_stream(stream) or streams.wrap(stream), config, kernel, *arguments)
            return
        with devices.current(device):
            queue(streams.wrap(stream), config, kernel, *arguments)
        thread.bound = True  # this thread has made the device's context its own

    return launch
