"""Launching with the PDL attribute, which CuPy's own launcher cannot set.

By cuda-core, with every argument; or by the driver itself, with a block of arguments that is ready
but for a few, which takes less of the host's time.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from types import CodeType
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


# --- A block of arguments that is ready but for a few --------------------------------------------

PackedLauncher = Callable[..., None]
"""Queues a kernel: (stream handle, the values of the arguments that change)."""

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
"""The driver's numbers of launch attributes."""

_CODES: dict[type, str] = {np.uint32: "I4x", np.float32: "f4x", np.int64: "q", int: "q"}
"""By type of an argument, how it is written; each has eight bytes to itself."""

_CONFIG_WORDS, _STREAM_AT = 7, 32
"""``CUlaunchConfig`` in words of eight bytes, and the byte where its stream is; the attributes and
their count come behind it."""


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = [("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16)]


@functools.cache
def driver_launch() -> Any:
    """Return the driver's ``cuLaunchKernelEx``, or None where the driver has another name."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None


def make_packed_launcher(
    device: int,
    kernel: Any,
    arguments: Sequence[Any],
    places: Sequence[int],
    *,
    grid: int,
    block: int,
    pdl: bool,
    shared_bytes: int = 0,
    cluster: int = 1,
) -> PackedLauncher:
    """Return the launch of a kernel most of whose arguments stay as they are.

    Each call in flight has a block of its own, because the driver reads it outside Python's lock.

    Args:
        device: this, kernel and the numbers of the launch as for ``make_launcher``.
        kernel: as there.
        arguments: all of the kernel's, typed.
        places: of those whose values come with each call, in that order. A tensor map is none that
            can be packed: with one among them cuda-core launches.
        grid: as there.
        block: as there.
        pdl: as there.
        shared_bytes: as there.
        cluster: as there.
    """
    whole = make_launcher(
        device,
        kernel,
        grid=grid,
        block=block,
        pdl=pdl,
        shared_bytes=shared_bytes,
        cluster=cluster,
    )

    def launch_whole(stream: int, *values: Any) -> None:
        every = list(arguments)
        for place, value in zip(places, values, strict=True):
            every[place] = value
        whole(stream, every)

    queue = driver_launch()
    codes = [_CODES.get(type(argument)) for argument in arguments]
    if queue is None or None in codes:
        return launch_whole
    attributes = (_Attribute * 2)()
    count = 0
    for is_set, number, value in (
        (pdl, _PROGRAMMATIC_STREAM_SERIALIZATION, (1, 0, 0)),
        (cluster > 1, _CLUSTER_DIMENSION, (cluster, 1, 1)),
    ):
        if is_set:
            attributes[count].id, attributes[count].value[:3] = number, value
            count += 1
    attributes_at = ctypes.addressof(attributes)
    order = [*places, *[place for place in range(len(arguments)) if place not in places]]
    write = struct.Struct("<QQQ" + "".join([f"{codes[place]}" for place in places])).pack_into
    handle = ctypes.c_void_p(int(kernel.handle))

    def make_block() -> tuple[Any, Any, Any]:
        """Return the memory of a launch, and pointers to its configuration and its arguments."""
        memory = (ctypes.c_uint64 * (_CONFIG_WORDS + len(order)))()
        struct.pack_into("<7I", memory, 0, grid * cluster, 1, 1, block, 1, 1, shared_bytes)
        memory[5], memory[6] = ctypes.addressof(attributes), count
        start = ctypes.addressof(memory)
        parameters = (ctypes.c_void_p * max(len(order), 1))()
        for word, place in enumerate(order, _CONFIG_WORDS):
            parameters[place] = start + 8 * word
            struct.pack_into(f"<{codes[place]}", memory, 8 * word, arguments[place])
        return memory, ctypes.byref(memory), ctypes.byref(parameters)

    free = [make_block()]
    told = "".join([f", v{i}" for i in range(len(places))])
    scope = {
        "attributes_at": attributes_at,
        "count": count,
        "device": device,
        "free": free,
        "get_device": toolchain.cupy().cuda.runtime.getDevice,
        "handle": handle,
        "launch_whole": launch_whole,
        "make_block": make_block,
        "queue": queue,
        "thread": threading.local(),
        "write": write,
    }
    module: dict[str, Any] = {}
    exec(_launch_code(", ".join(scope), told), module)
    launch: PackedLauncher = module["make"](**scope)
    return launch


@functools.lru_cache(maxsize=64)
def _launch_code(scope: str, values: str) -> CodeType:
    """Return what makes a launch of some values: to pass them on as a tuple takes longer."""
    text = f"""
def make({scope}):
    def launch(stream{values}):
        if get_device() == device and hasattr(thread, "bound"):
            try:
                ready = free.pop()
            except IndexError:  # asking first would let another thread take the last one
                ready = make_block()
            memory, config, parameters = ready
            write(memory, {_STREAM_AT}, stream, attributes_at, count{values})
            failed = queue(config, handle, parameters, None)
            free.append(ready)
            if not failed:
                return
        # The first launch of a thread, or one that the driver refused: cuda-core says why in words.
        launch_whole(stream{values})
        thread.bound = True
    return launch
"""
    return compile(text, "<k3cupy launch>", "exec")
