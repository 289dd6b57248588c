"""The caller's stream: PyTorch's current one, CuPy's current one, or the one that was given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from k3cupy.runtime import tensors, toolchain
from k3cupy.runtime.errors import reject

_LEGACY_DEFAULT = 1
_MOST_STREAMS = 4096
_wrapped: dict[int, Any] = {}
known = _wrapped.get
"""What ``wrap`` returned for a handle before, or None."""


def handle_of(stream: Any) -> int:
    """Return the driver handle of a stream given by a caller.

    Args:
        stream: an int, or an object with ``__cuda_stream__`` (or PyTorch's ``cuda_stream``, or
            CuPy's ``ptr``).

    Raises:
        TypeError: anything else.
        ValueError: no handle can be this number.
    """
    handle = stream
    if type(stream) is not int:  # the everyday case, without another look
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            try:
                handle = (protocol() if callable(protocol) else protocol)[1]
            except (TypeError, IndexError):  # of a class, or no pair: refused below
                handle = None
        else:
            handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
        if not tensors.is_integer(handle):
            expected = "an int handle or an object with __cuda_stream__"
            reject("stream", expected, type(stream).__name__, error=TypeError)
    if handle >> 64:  # one that is negative, or too large for a pointer
        hint = "Leave it out for the current stream"
        reject("stream", "a handle from 0 to 2^64 - 1", f"{hex(handle):.40}", hint)
    return int(handle)


def current_of(framework: str, device: int) -> Callable[[], int]:
    """Return a function that gives the stream on which a framework's next operation would run."""
    if framework == "torch":
        return functools.partial(tensors.pytorch()._C._cuda_getCurrentRawStream, device)
    cupy = toolchain.cupy()

    def current() -> int:
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)

    return current


def wrap(handle: int) -> Any:
    """Return cuda-core's stream object for a handle; kept, because making one costs 2 us."""
    stream = _wrapped.get(handle)
    if stream is None:
        if len(_wrapped) >= _MOST_STREAMS:
            _wrapped.clear()
        stream = _wrapped[handle] = toolchain.cuda_core().Stream.from_handle(handle)
    return stream


def is_capturing(handle: int) -> bool:
    """Return whether the stream is recording a CUDA graph, also one that an error has spoilt."""
    if handle in (0, _LEGACY_DEFAULT):
        return False
    runtime = toolchain.cupy().cuda.runtime
    try:
        return bool(runtime.streamIsCapturing(handle))
    except RuntimeError:
        return True  # the runtime answers a spoilt capture with an error


@contextlib.contextmanager
def current_for_cupy(handle: int, device: int) -> Iterator[None]:
    """Make a stream and its GPU current for CuPy operations."""
    cupy = toolchain.cupy()
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(wrap(handle)):
        yield


def of_torch(handle: int, device: int) -> Any:
    """Return PyTorch's stream object for a handle.

    PyTorch knows the legacy default stream only as its own default stream.
    """
    torch = tensors.pytorch()
    if handle in (0, _LEGACY_DEFAULT):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=f"cuda:{device}")
