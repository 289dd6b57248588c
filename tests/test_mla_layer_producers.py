"""Norms, query and value called with the arrays of other libraries, and bare DLPack objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import (
    as_torch,
    check_numpy_arrays,
    check_one_bare_object,
    check_outs_are_returned,
    cupy_of,
    jax_of,
    numpy_of,
    wrapped,
)
from helpers import BF16, FP16, OldProducer, Producer, exactly
from mla_helpers import as_list, as_out, poisoned_outs, refused, run_and_check
from mla_layer_helpers import LAYER_FORMS, LayerCall, LayerForm

FORMS = [LAYER_FORMS[n] for n in ("norm", "query", "query-fp8", "value-gate", "value-packed")]
each_form = pytest.mark.parametrize("form", FORMS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def base(form: LayerForm, device: str = "cpu", **options: Any) -> LayerCall:
    return form.make(9, 3, rope=True, scale_tensors=True, device=device, **options)


@pytest.mark.parametrize("producer", [Producer, OldProducer])
@each_form
def test_bare_dlpack_objects(device: str, producer: type[Producer], form: LayerForm) -> None:
    check_outs_are_returned(base(form, device), producer)


@each_form
def test_one_bare_object_among_tensors(device: str, form: LayerForm) -> None:
    for name in form.tensors:
        check_one_bare_object(base(form, device), name)


@each_dtype
@each_form
def test_case16_numpy_arrays(form: LayerForm, dtype: torch.dtype) -> None:
    check_numpy_arrays(base(form, dtype=dtype))


@each_form
def test_jax_inputs_and_outputs(form: LayerForm) -> None:
    """All but what is written; its integers are 32 bits wide. Outputs are JAX's own."""
    jax = pytest.importorskip("jax")
    call = base(form, **({"slot_dtype": torch.int32} if form.has_cache else {}))
    if form.has_cache:
        call.args["positions"] = call.args["positions"].to(torch.int32)
    names = [name for name in form.tensors if name not in form.written(rope=True)]
    before = call.snapshot()
    result = call.run(**wrapped(call, jax_of, *names))
    assert all(isinstance(array, jax.Array) for array in as_list(result))
    call.check(before, as_torch(call, result))
    outs = [jax_of(box.tensor) for box in poisoned_outs(call)]
    refused(call, r"out(\[\d\])?", exactly("an immutable JAX array"), out=as_out(outs))


@each_form
def test_torch_parameters_and_masked_arrays(form: LayerForm) -> None:
    """A parameter that asks for no gradient is a tensor like any other; a masked array is none."""
    call = base(form)
    for name in form.inputs:
        frozen = torch.nn.Parameter(call.args[name].clone(), requires_grad=False)
        run_and_check(call.given(**{name: frozen}))
    half = base(form, dtype=FP16)
    for name in form.tensors:
        arguments = wrapped(half, numpy_of)
        arguments[name] = np.ma.masked_array(arguments[name], mask=True)
        refused(half, name, exactly("MaskedArray"), **arguments)


@pytest.mark.gpu
@each_dtype
@each_form
def test_case16_cupy_arrays(form: LayerForm, dtype: torch.dtype) -> None:
    """CuPy has no float8 and gets the codes as bytes."""
    cupy = pytest.importorskip("cupy")
    call = base(form, "cuda", dtype=dtype)
    before = call.snapshot()
    torch.cuda.synchronize()
    result = call.run(**wrapped(call, cupy_of))
    cupy.cuda.get_current_stream().synchronize()
    found = []
    for name, array in zip(form.outputs, as_list(result), strict=True):
        assert isinstance(array, cupy.ndarray)
        bits = array.view({1: cupy.uint8, 2: cupy.int16}[array.dtype.itemsize])
        found.append(torch.from_dlpack(bits).view(call.output_dtype(name)))
    call.check(before, as_out(found))
