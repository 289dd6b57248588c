"""The same tensors as arrays of NumPy, JAX and CuPy, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import BF16, E4M3, Producer
from mla_helpers import as_list, as_out, poisoned_outs
from oracle import codes


def wrapped(call: Any, wrap: Callable[[Any], Any], *names: str) -> dict[str, Any]:
    """The call's arguments with the named tensors (all of them by default) wrapped."""
    return {
        name: wrap(value)
        if isinstance(value, torch.Tensor) and (not names or name in names)
        else value
        for name, value in call.arguments().items()
    }


def as_torch(call: Any, result: Any) -> Any:
    """Outputs of any CPU framework as tensors."""
    pairs = zip(as_list(result), call.outputs, strict=True)
    return as_out([torch_of(array, call.output_dtype(name)) for array, name in pairs])


def check_outs_are_returned(call: Any, producer: Callable[[Any], Any]) -> None:
    """A call of one producer's objects, outputs among them: those come back, written."""
    before = call.snapshot()
    outs = [box.tensor for box in poisoned_outs(call)]
    given = [producer(out) for out in outs]
    result = call.run(**wrapped(call, producer), out=as_out(given))
    assert all(a is b for a, b in zip(as_list(result), given, strict=True))
    call.check(before, as_out(outs))


def check_one_bare_object(call: Any, name: str) -> None:
    """The same of one argument; the others are tensors."""
    before = call.snapshot()
    outs = as_out([box.tensor for box in poisoned_outs(call)])
    call.check(before, call.run(**wrapped(call, Producer, name), out=outs))


def check_numpy_arrays(call: Any) -> None:
    before = call.snapshot()
    result = call.run(**wrapped(call, numpy_of))
    for array in as_list(result):
        assert isinstance(array, np.ndarray)
    call.check(before, as_torch(call, result))


def torch_of(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """Any CPU array as a tensor of the same bits."""
    if isinstance(array, torch.Tensor):
        return array
    host = np.asarray(array)
    integers = np.ascontiguousarray(host).view({1: np.uint8, 2: np.int16}[host.dtype.itemsize])
    return torch.from_numpy(integers.copy()).view(dtype)


def numpy_of(tensor: torch.Tensor) -> Any:
    """The same memory as a NumPy array, bf16 and e4m3 through ml_dtypes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    special = {BF16: ml_dtypes.bfloat16, E4M3: ml_dtypes.float8_e4m3fn}
    if tensor.dtype not in special:
        return tensor.numpy()
    return codes(tensor).numpy().view(special[tensor.dtype])


def jax_of(tensor: torch.Tensor) -> Any:
    jax = pytest.importorskip("jax")
    array = jax.numpy.asarray(numpy_of(tensor.contiguous()))
    assert array.dtype.itemsize == tensor.element_size()
    return array


def cupy_of(tensor: torch.Tensor) -> Any:
    """The same GPU memory as a CuPy array, bf16 through ml_dtypes."""
    cupy = pytest.importorskip("cupy")
    if tensor.dtype == BF16:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        return cupy.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    if tensor.dtype == E4M3:
        return cupy.from_dlpack(tensor.view(torch.uint8))
    return cupy.from_dlpack(tensor)
