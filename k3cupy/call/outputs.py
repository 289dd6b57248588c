"""Outputs made by the caller's framework, so that they come back as its own tensors."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np

from k3cupy.runtime import streams, tensors, toolchain

Allocator = Callable[[], Any]


def address_of(framework: str) -> Callable[[Any], int]:
    """Return the function that gives the address of what a GPU ``allocator`` made."""
    if framework == "torch":
        data_ptr: Callable[[Any], int] = tensors.pytorch().Tensor.data_ptr
        return data_ptr
    return lambda array: int(array.data.ptr)


def allocator(framework: str, shape: tuple[int, ...], dtype: str, device: int | None) -> Allocator:
    """Return a function that makes an uninitialised, packed tensor.

    A framework without a way to make one (a bare DLPack producer, JAX) gets a CuPy array on a GPU
    and a NumPy array on the CPU; JAX's is handed over as a JAX array by ``finish``.

    Args:
        framework: of the first input.
        shape: of the output.
        dtype: the field's name. CuPy has no float8 and gets the codes as uint8.
        device: GPU ordinal, or None for the CPU.
    """
    if framework == "torch":
        torch = tensors.pytorch()
        place = torch.device("cpu" if device is None else f"cuda:{device}")
        kind = getattr(torch, dtype)  # PyTorch reads a shape as single numbers 0.3 us sooner
        return functools.partial(torch.empty, *shape, dtype=kind, device=place)
    if device is None:
        return lambda: np.empty(shape, np.dtype(dtype))
    cupy = toolchain.cupy()
    element = np.dtype("uint8" if dtype.startswith("float8") else dtype)

    def allocate() -> Any:
        with cupy.cuda.Device(device):
            return cupy.empty(shape, element)

    return allocate


def repeater(shape: tuple[int, ...], dtype: str, device: int) -> Allocator:
    """Return what makes PyTorch's tensors on a GPU again and again, like one that has no memory.

    ``empty_like`` takes less time than ``empty``, which reads shape, type and device anew.
    """
    # All elements are one: there may be no room for a second output, not even for a moment.
    model = allocator("torch", (1,) * len(shape), dtype, device)().expand(shape)
    model.untyped_storage().resize_(0)
    return functools.partial(tensors.pytorch().empty_like, model)


def finish(framework: str, out: Any, dtype: str) -> Any:
    """Return what an ``allocator`` made, for the same framework and type, as that one's own."""
    if framework != "jax":
        return out
    jax = importlib.import_module("jax")
    if isinstance(out, np.ndarray):
        return jax.numpy.asarray(out)
    bits = {1: "uint8", 2: "uint16", 4: "uint32"}[out.dtype.itemsize]
    array = jax.dlpack.from_dlpack(out.view(bits))
    return jax.lax.bitcast_convert_type(array, jax.numpy.dtype(dtype))


@contextlib.contextmanager
def allocated_for(framework: str, device: int, stream: int) -> Iterator[None]:
    """Let a framework's allocator know that what it makes inside belongs to ``stream``.

    Without it memory that an earlier operation of the current stream still uses could be handed to
    a kernel on another stream.
    """
    if framework == "torch":
        torch = tensors.pytorch()
        with torch.cuda.stream(streams.of_torch(stream, device)):
            yield
        return
    with streams.current_for_cupy(stream, device):
        yield


def keep_for_stream(values: list[Any], device: int, stream: int) -> None:
    """Tell PyTorch's allocator that tensors are in use on a stream other than their own.

    Then the caller may drop them right after the call: their memory is not given to another tensor
    before the kernel has read it. CuPy has no such record; its arrays must outlive the kernel.
    """
    torch = tensors.pytorch()
    if torch is None:
        return
    held = [value for value in values if isinstance(value, torch.Tensor) and value.is_cuda]
    if held:
        external = streams.of_torch(stream, device)
        for value in held:
            value.record_stream(external)
