"""Both GEMMs on arrays of other libraries, and on bare DLPack objects."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from array_helpers import cupy_of, jax_of, numpy_of, torch_of
from gemm_helpers import (
    GEMMS_AND_DTYPES,
    Gemm,
    inputs,
    normal,
    poisoned_slice,
    residual_of,
    same_bits,
)
from helpers import BF16, Guarded, OldProducer, Producer, check_guards, refused

each_gemm_and_dtype = pytest.mark.parametrize(("gemm", "dtype"), GEMMS_AND_DTYPES)


@pytest.mark.parametrize("producer", [Producer, OldProducer])
def test_case16_bare_dlpack_objects(device: str, gemm: Gemm, producer: type[Producer]) -> None:
    x, weight = inputs(gemm.odd_tokens, 48, 128, device)
    values = residual_of(gemm.odd_tokens, 48, device)
    view = poisoned_slice(x, 6288, 6144, device)
    for options in ({}, {"residual": values}):
        want = gemm(x, weight, **options)
        box = Guarded((gemm.odd_tokens, 48), BF16, device)
        before, given = box.snapshot(), producer(box.tensor)
        bare = {name: producer(tensor) for name, tensor in options.items()}
        assert gemm(producer(view), producer(weight), out=given, **bare) is given
        check_guards(box, before)
        same_bits(box.tensor, want)
        same_bits(gemm(view, producer(weight), **bare), want)


@each_gemm_and_dtype
def test_case16_numpy_arrays(gemm: Gemm, dtype: torch.dtype) -> None:
    x, weight = inputs(gemm.odd_tokens, 48, 128, dtype=dtype)
    residual = residual_of(gemm.odd_tokens, 48, dtype=dtype)
    for options in ({}, {"residual": residual}):
        want = gemm(x, weight, **options)
        arrays = {name: numpy_of(tensor) for name, tensor in options.items()}
        out = gemm(numpy_of(x), numpy_of(weight), **arrays)
        assert isinstance(out, np.ndarray)
        assert out.dtype.name == str(dtype)[6:]
        same_bits(torch_of(out, dtype), want)
        given = numpy_of(torch.zeros(gemm.odd_tokens, 48, dtype=dtype))
        assert gemm(numpy_of(x), numpy_of(weight), out=given, **arrays) is given
        same_bits(torch_of(given, dtype), want)


def test_case01_a_row_of_records(gemm: Gemm) -> None:
    """The stride of one row, or of none, is nobody's business, whatever bytes it counts."""
    x, weight = (numpy_of(t) for t in inputs(2, 48, 128))
    records = np.zeros(2, [("x", x.dtype, (128,)), ("flag", "u1")])
    records["x"] = x
    for rows in (slice(0, 1), slice(0, 0)):
        taken = gemm(records["x"][rows], weight)
        same_bits(torch_of(taken, BF16), torch_of(gemm(x[rows], weight), BF16))
    refused({"x": records["x"], "weight": weight}, "x", r"strides \(257, 2\)", operation=gemm)


def test_a_type_without_a_width(gemm: Gemm) -> None:
    _, weight = (numpy_of(t) for t in inputs(2, 48, 128))
    refused({"x": np.empty((2, 128), "V0"), "weight": weight}, "x", "void", operation=gemm)


@each_gemm_and_dtype
def test_case16_jax_arrays(gemm: Gemm, dtype: torch.dtype) -> None:
    x, weight = inputs(gemm.odd_tokens, 48, 128, dtype=dtype)
    residual = residual_of(gemm.odd_tokens, 48, dtype=dtype)
    for options in ({}, {"residual": residual}):
        tensors = {"x": x, "weight": weight, **options}
        arrays = {name: jax_of(tensor) for name, tensor in tensors.items()}
        out = gemm(**arrays)
        assert type(out).__module__.startswith("jax")
        same_bits(torch_of(out, dtype), gemm(**tensors))
        refused({**arrays, "out": out}, "out", "immutable", operation=gemm)


@pytest.mark.gpu
@each_gemm_and_dtype
def test_case16_cupy_arrays(gemm: Gemm, dtype: torch.dtype) -> None:
    cupy = pytest.importorskip("cupy")
    x, weight = inputs(gemm.odd_tokens, 48, 128, "cuda", dtype=dtype)
    residual = residual_of(gemm.odd_tokens, 48, "cuda", dtype=dtype)
    for options in ({}, {"residual": residual}):
        tensors = {"x": x, "weight": weight, **options}
        out = gemm(**{name: cupy_of(tensor) for name, tensor in tensors.items()})
        assert isinstance(out, cupy.ndarray)
        torch.cuda.synchronize()
        cupy.cuda.Device().synchronize()
        got = torch.from_dlpack(out.view(cupy.int16)).view(dtype)
        same_bits(got, gemm(**tensors))


def test_case26_negative_strides(gemm: Gemm) -> None:
    x, weight = numpy_of(normal((4, 128), 1)), numpy_of(normal((48, 128), 2))
    for wrong in (x[::-1], x[:, ::-1]):
        refused({"x": wrong, "weight": weight}, "x", "stride -", operation=gemm)
    for wrong in (weight[::-1], weight[:, ::-1]):
        refused({"x": x, "weight": wrong}, "weight", "-128|-1", operation=gemm)
    out = numpy_of(torch.zeros(4, 48, dtype=BF16))
    for wrong in (out[::-1], out[:, ::-1]):
        for name in ("out", "residual"):
            arguments = {"x": x, "weight": weight, name: wrong}
            refused(arguments, name, "stride -", operation=gemm)
    assert (gemm(x[:1][::-1], weight) == gemm(x[:1], weight)).all(), "one row has no order"


@pytest.mark.gpu
@each_gemm_and_dtype
def test_case26_flipped_cupy_arrays(gemm: Gemm, dtype: torch.dtype) -> None:
    cupy = pytest.importorskip("cupy")
    x, weight = (cupy_of(t) for t in inputs(4, 48, 128, "cuda", dtype=dtype))
    for wrong in (cupy.flip(x, 1), x[::-1]):
        refused({"x": wrong, "weight": weight}, "x", "stride -", operation=gemm)
    refused({"x": x, "weight": weight[::-1]}, "weight", "-128", operation=gemm)
