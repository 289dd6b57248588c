"""The skinny GEMM: strides, slices, offsets and odd addresses, other producers, NaN all around."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import cupy_of, jax_of, numpy_of, torch_of
from gemm_helpers import assert_product, inputs, normal, residual_of, same_bits
from helpers import (
    BF16,
    FP16,
    Guarded,
    OldProducer,
    Producer,
    check_guards,
    guarded,
    refused,
    run_child,
)
from memory_helpers import before_a_forbidden_page, before_unmapped_gpu_memory
from skinny_helpers import DTYPES, op, run_and_check

import k3cupy
from k3cupy import projections
from k3cupy.ops.skinny_gemm_validate import validate


def is_fast(x: Any, weight: Any) -> bool:
    """Whether x comes by wide loads; known on the CPU too, where no kernel runs."""
    problem = validate((x, weight, None, None), weight_is_static=False)
    decision = k3cupy.explain_skinny_gemm(x, weight)
    if decision.backend == "cuda":
        assert decision.name_expression == decision.config.name_expression(problem.variant)
        assert ("x is not aligned" in decision.reason) != problem.variant.aligned_x
    return problem.variant.aligned_x


def poisoned_slice(values: torch.Tensor, width: int, offset: int, device: str) -> torch.Tensor:
    """The values as columns of a wider tensor that is NaN everywhere else."""
    storage = torch.full((values.shape[0], width), float("nan"), dtype=values.dtype, device=device)
    part = storage[:, offset : offset + values.shape[1]]
    part.copy_(values)
    return part


# The model's own views


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("case", projections.strided_cases(), ids=lambda c: c.name)
def test_strided_projections(
    device: str, case: projections.StridedCase, tokens: int, dtype: torch.dtype
) -> None:
    x, weight = inputs(tokens, case.n, case.k, device, dtype=dtype)
    view = poisoned_slice(x, case.source_row_width, case.offset, device)
    assert is_fast(view, weight)
    same_bits(run_and_check(view, weight), op(x, weight))
    residual = residual_of(tokens, case.n, device, dtype=dtype)
    same_bits(run_and_check(view, weight, residual=residual), op(x, weight, residual))


def test_case01_a_slice_of_one_token_is_fast(device: str) -> None:
    """Whatever its row stride says, also 0 and 1, and after a round trip through DLPack."""
    x, weight = inputs(1, 48, 128, device)
    want = op(x, weight)
    view = poisoned_slice(x, 6288, 6144, device)
    strides = [view.as_strided((1, 128), (stride, 1)) for stride in (0, 1, 7, 128, 6288, 2**40)]
    for one in (view, torch.from_dlpack(view), *strides):
        assert is_fast(one, weight)
        same_bits(run_and_check(one, weight), want)


# Row strides


@pytest.mark.parametrize("tokens", [2, 8])
def test_case02_rows_of_7175_for_7168(device: str, tokens: int) -> None:
    """In each argument in turn, what lies between the rows is NaN, or must not change."""
    x, weight = inputs(tokens, 48, 7168, device)
    want = op(x, weight)
    wide = guarded(x.cpu(), device, strides=(7175, 1))
    assert not is_fast(wide, weight)
    same_bits(run_and_check(wide, weight), want)
    far = guarded(weight.cpu(), device, strides=(7175, 1))
    refused({"x": x, "weight": far}, "weight", "7175", operation=op)
    residual = residual_of(tokens, 48, device, strides=(55, 1))
    run_and_check(x, weight, residual=residual, out_strides=(53, 1))


@pytest.mark.parametrize("stride", [128, 129, 130, 132, 136, 144, 192, 6288, 0, 1, 8, 16])
def test_row_strides_of_x(device: str, stride: int) -> None:
    """Also rows that overlap one another, and one row for all tokens."""
    weight = guarded(normal((48, 128), 1), device)
    x = guarded(normal((7 * stride + 128,), 2), device).as_strided((8, 128), (stride, 1))
    assert is_fast(x, weight) == (stride % 8 == 0)
    run_and_check(x, weight)


@pytest.mark.parametrize("strides", [(48, 1), (49, 1), (64, 1), (1000, 1)], ids=str)
def test_row_strides_of_out(device: str, strides: Sequence[int]) -> None:
    x, weight = inputs(7, 48, 128, device)
    for shift in (0, 2, 4, 8):
        run_and_check(x, weight, out_strides=strides, shift=shift)


def test_an_output_of_one_row_or_one_column_has_any_stride(device: str) -> None:
    x, weight = inputs(7, 1, 64, device)
    run_and_check(x, weight, out_strides=(5, 3))
    x, weight = inputs(1, 48, 64, device)
    run_and_check(x, weight, out_strides=(0, 1))


@pytest.mark.parametrize("stride", [48, 49, 50, 64, 1000, 0, 1, 47])
@pytest.mark.parametrize("shift", [0, 2, 8])
def test_rows_of_a_residual(device: str, stride: int, shift: int) -> None:
    """Also rows that overlap one another, and one row for all tokens."""
    x, weight = inputs(8, 48, 128, device)
    flat = guarded(normal((7 * stride + 48,), 3), device, shift=shift)
    residual = flat.as_strided((8, 48), (stride, 1))
    out = run_and_check(x, weight, residual=residual)
    same_bits(op(x, weight, residual.contiguous()), out)


def test_a_residual_of_one_row_or_one_column_has_any_stride(device: str) -> None:
    for tokens, n in ((1, 48), (8, 1)):
        x, weight = inputs(tokens, n, 64, device)
        values = residual_of(tokens, n)
        for strides in ((0, 1), (7, 1), (2**40, 1)) if tokens == 1 else ((5, 3), (1, 9)):
            run_and_check(x, weight, residual=guarded(values, device, strides=strides))


def test_out_and_residual_as_columns_of_the_buffer_of_x(device: str) -> None:
    """Neighbours between whose columns no byte is shared do not overlap."""
    x, weight = inputs(8, 48, 128, device)
    buffer = torch.full((8, 128 + 48 + 48 + 16), 7.0, dtype=BF16, device=device)
    buffer[:, :128] = x
    out, residual = buffer[:, 128:176], buffer[:, 176:224]
    same_bits(op(buffer[:, :128], weight, residual, out), op(x, weight, residual.contiguous()))
    assert (buffer[:, 176:] == 7).all()
    same_bits(buffer[:, :128], x)


def test_a_residual_that_shares_memory_with_inputs(device: str) -> None:
    """Both are only read."""
    x, _ = inputs(8, 48, 128, device)
    weight = guarded(normal((128, 128), 5), device)
    run_and_check(x, weight, residual=x)
    run_and_check(x, weight, residual=weight[3:11])


# In place


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("strides", [None, (2101, 1)], ids=["packed", "strided"])
def test_in_place(device: str, tokens: int, strides: tuple[int, int] | None) -> None:
    x, weight = inputs(tokens, 2096, 192, device)
    values = residual_of(tokens, 2096, device)
    want = op(x, weight, values)
    for shift in (0, 2):
        box = Guarded((tokens, 2096), BF16, device, strides=strides, shift=shift)
        before = box.snapshot()
        for same in (box.tensor, box.tensor[:], box.tensor.view(tokens, 2096)):
            box.tensor.copy_(values)
            assert op(x, weight, same, box.tensor) is box.tensor
            check_guards(box, before)
            same_bits(box.tensor, want)


def test_in_place_again_and_again(device: str) -> None:
    """Each call adds once more: exact in small integers."""
    x, weight = torch.ones(5, 16).to(BF16).to(device), torch.ones(40, 16).to(BF16).to(device)
    out = torch.zeros(5, 40, dtype=BF16, device=device)
    for i in range(1, 9):
        op(x, weight, out, out)
        assert (out == 16 * i).all()


# Addresses


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("shift", [2, 4, 6, 8, 14, 16])
def test_case03_addresses_of_x(device: str, shift: int, tokens: int) -> None:
    x, weight = inputs(tokens, 48, 128, device, strides=(136, 1), shift=shift)
    assert is_fast(x, weight) == (shift == 16)
    run_and_check(x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_case03_slices_off_a_multiple_of_16_bytes(device: str, dtype: torch.dtype) -> None:
    for k in (128, 1544):
        weight = guarded(normal((48, k), 1, dtype=dtype), device)
        for width, offset, rows in ((6288, 4609, 4), (6289, 4608, 4), (k + 8, 3, 2), (6288, 1, 1)):
            x = poisoned_slice(normal((rows, k), 2, dtype=dtype), width, offset, device)
            assert not is_fast(x, weight)
            run_and_check(x, weight)


def test_the_decision_says_what_is_not_aligned(device: str) -> None:
    weight = normal((48, 128), 1).to(device)
    storage = torch.zeros(4, 6285, dtype=BF16, device=device)
    for x, words in ((storage[:, :128], "6285"), (storage[:1, 1:129], "2 bytes past")):
        problem = validate((x, weight, None, None), weight_is_static=False)
        assert problem.slow_reason is not None
        assert problem.slow_reason.startswith("x is not aligned")
        assert words in problem.slow_reason
        decision = k3cupy.explain_skinny_gemm(x, weight)
        if decision.backend == "cuda":
            assert problem.slow_reason in decision.reason


@pytest.mark.parametrize("shift", [2, 4, 8])
def test_case03_addresses_of_the_weight(device: str, shift: int) -> None:
    x, weight = inputs(4, 48, 128, device)
    off = guarded(weight.cpu(), device, shift=shift)
    text = refused({"x": x, "weight": off}, "weight", "address 0x", operation=op)
    assert "16" in text
    run_and_check(x, guarded(weight.cpu(), device, shift=16))


def test_rows_of_a_larger_weight(device: str) -> None:
    """A shard: rows 16 to 64 of a weight, at an offset."""
    x, weight = inputs(4, 80, 136, device)
    same_bits(run_and_check(x, weight[16:64]), op(x, weight)[:, 16:64])


# The ends of allocations, in a child: a stray read is a fault

_ENDS = [(1, 48, 128), (3, 7, 80), (8, 33, 1544), (5, 1, 8), (2, 5, 24)]


def _reads_nothing_past_host_memory() -> None:
    for tokens, n, k in _ENDS:
        tensors = (*inputs(tokens, n, k), residual_of(tokens, n))
        x, weight, residual = (before_a_forbidden_page(t) for t in tensors)
        assert_product(op(x, weight, residual), x, weight, residual)
    os._exit(0)


def test_nothing_is_read_past_host_memory() -> None:
    run_child(_reads_nothing_past_host_memory)


def _reads_nothing_past_device_memory() -> None:
    for tokens, n, k in _ENDS:
        tensors = (*inputs(tokens, n, k), residual_of(tokens, n))
        three = [before_unmapped_gpu_memory(t.cuda()) for t in tensors]
        for block_size, outputs, unroll, width in ((32, 3, 4, 8), (128, 2, 1, 4), (256, 8, 2, 8)):
            config = k3cupy.SkinnyGemmConfig(tokens, block_size, outputs, unroll, width)
            for static in (False, True):
                out = op(*three, config=config, weight_is_static=static)
                assert_product(out, *three)
        wide = normal((tokens, k + 5), 3)
        x = before_unmapped_gpu_memory(wide.cuda())[:, 5:]
        assert_product(op(x, three[1]), x, three[1])
    torch.cuda.synchronize()
    os._exit(0)


@pytest.mark.gpu
def test_nothing_is_read_past_device_memory() -> None:
    run_child(_reads_nothing_past_device_memory)


# Producers


@pytest.mark.parametrize("producer", [Producer, OldProducer])
def test_case16_bare_dlpack_objects(device: str, producer: type[Producer]) -> None:
    x, weight = inputs(7, 48, 128, device)
    residual = residual_of(7, 48, device)
    view = poisoned_slice(x, 6288, 6144, device)
    want = op(x, weight, residual)
    box = Guarded((7, 48), BF16, device)
    before, given = box.snapshot(), producer(box.tensor)
    assert op(producer(view), producer(weight), producer(residual), given) is given
    check_guards(box, before)
    same_bits(box.tensor, want)
    same_bits(op(view, producer(weight), producer(residual)), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_case16_numpy_arrays(dtype: torch.dtype) -> None:
    x, weight = inputs(7, 48, 128, dtype=dtype)
    residual = residual_of(7, 48, dtype=dtype)
    want = op(x, weight, residual)
    arrays = [numpy_of(t) for t in (x, weight, residual)]
    out = op(*arrays)
    assert isinstance(out, np.ndarray)
    assert out.dtype.name == str(dtype)[6:]
    same_bits(torch_of(out, dtype), want)
    given = numpy_of(torch.zeros(7, 48, dtype=dtype))
    assert op(*arrays, given) is given
    same_bits(torch_of(given, dtype), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_case16_jax_arrays(dtype: torch.dtype) -> None:
    x, weight = inputs(7, 48, 128, dtype=dtype)
    residual = residual_of(7, 48, dtype=dtype)
    arrays = [jax_of(t) for t in (x, weight, residual)]
    out = op(*arrays)
    assert type(out).__module__.startswith("jax")
    same_bits(torch_of(out, dtype), op(x, weight, residual))
    wrong = dict(zip(("x", "weight", "residual", "out"), (*arrays, out), strict=True))
    refused(wrong, "out", "immutable", operation=op)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_case16_cupy_arrays(dtype: torch.dtype) -> None:
    cupy = pytest.importorskip("cupy")
    x, weight = inputs(7, 48, 128, "cuda", dtype=dtype)
    residual = residual_of(7, 48, "cuda", dtype=dtype)
    out = op(*(cupy_of(t) for t in (x, weight, residual)))
    assert isinstance(out, cupy.ndarray)
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    got = torch.from_dlpack(out.view(cupy.int16)).view(dtype)
    same_bits(got, op(x, weight, residual))


def test_case26_negative_strides() -> None:
    x, weight = numpy_of(normal((4, 128), 1)), numpy_of(normal((48, 128), 2))
    for wrong in (x[::-1], x[:, ::-1]):
        refused({"x": wrong, "weight": weight}, "x", "stride -", operation=op)
    for wrong in (weight[::-1], weight[:, ::-1]):
        refused({"x": x, "weight": wrong}, "weight", "-128|-1", operation=op)
    out = numpy_of(torch.zeros(4, 48, dtype=BF16))
    for wrong in (out[::-1], out[:, ::-1]):
        refused({"x": x, "weight": weight, "out": wrong}, "out", "stride -", operation=op)
        arguments = {"x": x, "weight": weight, "residual": wrong}
        refused(arguments, "residual", "stride -", operation=op)
    assert (op(x[:1][::-1], weight) == op(x[:1], weight)).all(), "one row has no order"


@pytest.mark.gpu
def test_case26_flipped_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    x, weight = (cupy_of(t) for t in inputs(4, 48, 128, "cuda", dtype=FP16))
    for wrong in (cupy.flip(x, 1), x[::-1]):
        refused({"x": wrong, "weight": weight}, "x", "stride -", operation=op)
    refused({"x": x, "weight": weight[::-1]}, "weight", "-128", operation=op)
