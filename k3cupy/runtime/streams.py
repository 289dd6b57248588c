"""The caller's stream: PyTorch's current one, CuPy's current one, or the one that was given."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from k3cupy.runtime import toolchain

_LEGACY_DEFAULT = 1
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
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    for attribute in ("cuda_stream", "ptr"):
        value = getattr(stream, attribute, None)
        if isinstance(value, int):
            return value
    raise TypeError(
        "stream: expected an int handle or an object with __cuda_stream__, got "
        f"{type(stream).__name__}"
    )


def current_of(framework: str, device: int) -> Callable[[], int]:
    """Return a function that gives the stream on which a framework's next operation would run."""
    if framework == "torch":
        return functools.partial(sys.modules["torch"]._C._cuda_getCurrentRawStream, device)
    cupy = toolchain.cupy()

    def current() -> int:
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)

    return current


def wrap(handle: int) -> Any:
    """Return cuda-core's stream object for a handle; kept, because making one costs 2 us."""
    stream = _wrapped.get(handle)
    if stream is None:
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
    torch = sys.modules["torch"]
    if handle in (0, _LEGACY_DEFAULT):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=f"cuda:{device}")
