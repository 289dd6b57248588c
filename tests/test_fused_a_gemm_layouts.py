"""The fused-A GEMM: strides, slices, offsets and odd addresses, other producers, NaN all around."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import cupy_of, jax_of, numpy_of, torch_of
from gemm_helpers import (
    assert_product,
    inputs,
    normal,
    op,
    run_and_check,
    same_bits,
    transposed_op,
)
from helpers import BF16, Guarded, OldProducer, Producer, check_guards, guarded, refused, run_child
from memory_helpers import before_a_forbidden_page, before_unmapped_gpu_memory

import k3cupy
from k3cupy import projections
from k3cupy.ops.fused_a_gemm_validate import FRIENDLY, validate


def variant_of(x: Any, weight: Any) -> k3cupy.FusedAGemmVariant:
    """Which kernel a call asks for; known on the CPU too, where none runs."""
    return validate(FRIENDLY, (x, weight, None, None), weight_is_static=False).variant


def path_of(x: Any, weight: Any) -> str:
    variant = variant_of(x, weight)
    name = "packed" if variant.packed else "strided"
    path = name if variant.aligned_x else "element-wise"
    decision = k3cupy.explain_fused_a_gemm(x, weight)
    if decision.backend == "cuda":
        assert decision.name_expression is not None
        assert decision.name_expression == decision.config.name_expression(variant)
        assert ("x is not aligned" in decision.reason) == (path == "element-wise")
    return path


def poisoned_slice(values: torch.Tensor, width: int, offset: int, device: str) -> torch.Tensor:
    """The values as columns of a wider tensor that is NaN everywhere else."""
    storage = torch.full((values.shape[0], width), float("nan"), dtype=BF16, device=device)
    part = storage[:, offset : offset + values.shape[1]]
    part.copy_(values)
    return part


# The model's own views


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 17, 64])
@pytest.mark.parametrize("case", projections.strided_cases(), ids=lambda c: c.name)
def test_strided_projections(device: str, case: projections.StridedCase, tokens: int) -> None:
    x, weight = inputs(tokens, case.n, case.k, device)
    view = poisoned_slice(x, case.source_row_width, case.offset, device)
    assert path_of(view, weight) == ("packed" if tokens == 1 else "strided")
    same_bits(run_and_check(view, weight), op(x, weight))


def test_case01_a_slice_of_one_token_takes_the_packed_path(device: str) -> None:
    """Whatever its row stride says, also 0 and 1, and after a round trip through DLPack."""
    x, weight = inputs(1, 48, 128, device)
    want = op(x, weight)
    view = poisoned_slice(x, 6288, 6144, device)
    assert not view.is_contiguous() or view.stride(0) == 6288
    strides = [view.as_strided((1, 128), (stride, 1)) for stride in (0, 1, 7, 128, 6288, 2**40)]
    for one in (view, torch.from_dlpack(view), *strides):
        assert path_of(one, weight) == "packed"
        same_bits(run_and_check(one, weight), want)


# Row strides


@pytest.mark.parametrize("tokens", [2, 16])
def test_case02_rows_of_7175_for_7168(device: str, tokens: int) -> None:
    """In each argument in turn, what lies between the rows is NaN, or must not change."""
    x, weight = inputs(tokens, 48, 7168, device)
    want = op(x, weight)
    wide = guarded(x.cpu(), device, strides=(7175, 1))
    assert path_of(wide, weight) == "element-wise"
    same_bits(run_and_check(wide, weight), want)
    far = guarded(weight.cpu(), device, strides=(7175, 1))
    refused({"x": x, "weight": far}, "weight", "7175", operation=op)
    refused({"mat_a": x, "mat_b": far.T, "output": want}, "mat_b", "7175", operation=transposed_op)
    run_and_check(x, weight, out_strides=(55, 1))


@pytest.mark.parametrize("stride", [128, 129, 130, 132, 136, 144, 192, 6288, 0, 1, 8, 16])
def test_row_strides_of_x(device: str, stride: int) -> None:
    """Also rows that overlap one another, and one row for all tokens."""
    weight = guarded(normal((48, 128), 1), device)
    x = guarded(normal((8 * stride + 128,), 2), device).as_strided((9, 128), (stride, 1))
    expected = "element-wise" if stride % 8 else "packed" if stride == 128 else "strided"
    assert path_of(x, weight) == expected
    run_and_check(x, weight)


@pytest.mark.parametrize("strides", [(48, 1), (49, 1), (64, 1), (1000, 1)], ids=str)
def test_row_strides_of_out(device: str, strides: Sequence[int]) -> None:
    x, weight = inputs(9, 48, 128, device)
    for shift in (0, 2, 4, 8):
        run_and_check(x, weight, out_strides=strides, shift=shift)


def test_an_output_of_one_row_or_one_column_has_any_stride(device: str) -> None:
    x, weight = inputs(9, 1, 64, device)
    run_and_check(x, weight, out_strides=(5, 3))
    x, weight = inputs(1, 48, 64, device)
    run_and_check(x, weight, out_strides=(0, 1))


def test_out_as_columns_of_the_buffer_of_x(device: str) -> None:
    """Neighbours between whose columns no byte is shared do not overlap."""
    x, weight = inputs(9, 48, 128, device)
    buffer = torch.full((9, 128 + 48 + 16), 7.0, dtype=BF16, device=device)
    buffer[:, :128] = x
    out = buffer[:, 128:176]
    same_bits(op(buffer[:, :128], weight, out), op(x, weight))
    assert (buffer[:, 176:] == 7).all()
    same_bits(buffer[:, :128], x)


# Addresses


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("shift", [2, 4, 6, 8, 14, 16])
def test_case03_addresses_of_x(device: str, shift: int, tokens: int) -> None:
    x, weight = inputs(tokens, 48, 128, device, strides=(136, 1), shift=shift)
    aligned = "packed" if tokens == 1 else "strided"
    assert path_of(x, weight) == (aligned if shift == 16 else "element-wise")
    run_and_check(x, weight)


def test_case03_slices_off_a_multiple_of_16_bytes(device: str) -> None:
    weight = guarded(normal((48, 128), 1), device)
    for width, offset, rows in ((6288, 6145, 4), (6289, 6144, 4), (136, 3, 2), (6288, 6145, 1)):
        x = poisoned_slice(normal((rows, 128), 2), width, offset, device)
        assert path_of(x, weight) == "element-wise"
        run_and_check(x, weight)


def test_the_decision_says_what_is_not_aligned(device: str) -> None:
    weight = normal((48, 128), 1).to(device)
    storage = torch.zeros(4, 6285, dtype=BF16, device=device)
    for x, words in ((storage[:, :128], "6285"), (storage[:1, 1:129], "2 bytes past")):
        problem = validate(FRIENDLY, (x, weight, None, None), weight_is_static=False)
        assert problem.slow_reason is not None
        assert problem.slow_reason.startswith("x is not aligned")
        assert words in problem.slow_reason
        decision = k3cupy.explain_fused_a_gemm(x, weight)
        if decision.backend == "cuda":
            assert problem.slow_reason in decision.reason


@pytest.mark.parametrize("shift", [2, 4, 8])
def test_case03_addresses_of_the_weight(device: str, shift: int) -> None:
    x, weight = inputs(4, 48, 128, device)
    off = guarded(weight.cpu(), device, shift=shift)
    text = refused({"x": x, "weight": off}, "weight", "address 0x", operation=op)
    assert "16" in text
    out = torch.empty(4, 48, dtype=BF16, device=device)
    arguments = {"mat_a": x, "mat_b": off.T, "output": out}
    refused(arguments, "mat_b", "address 0x", operation=transposed_op)
    run_and_check(x, guarded(weight.cpu(), device, shift=16))


def test_rows_of_a_larger_weight(device: str) -> None:
    """A shard: rows 16 to 64 of a weight, at an offset."""
    x, weight = inputs(4, 80, 144, device)
    same_bits(run_and_check(x, weight[16:64]), op(x, weight)[:, 16:64])


# The ends of allocations, in a child: a stray read is a fault

_ENDS = [(1, 48, 128), (3, 7, 80), (9, 33, 1536), (64, 16, 16)]


def _reads_nothing_past_host_memory() -> None:
    for tokens, n, k in _ENDS:
        x, weight = (before_a_forbidden_page(t) for t in inputs(tokens, n, k))
        assert_product(op(x, weight), x, weight)
    os._exit(0)


def test_nothing_is_read_past_host_memory() -> None:
    run_child(_reads_nothing_past_host_memory)


def _reads_nothing_past_device_memory() -> None:
    for tokens, n, k in _ENDS:
        pair = [before_unmapped_gpu_memory(t.cuda()) for t in inputs(tokens, n, k)]
        assert_product(op(*pair), *pair)
        wide = normal((tokens, k + 5), 3)
        x = before_unmapped_gpu_memory(wide.cuda())[:, 5:]
        assert_product(op(x, pair[1]), x, pair[1])
    torch.cuda.synchronize()
    os._exit(0)


@pytest.mark.gpu
def test_nothing_is_read_past_device_memory() -> None:
    run_child(_reads_nothing_past_device_memory)


# Producers


@pytest.mark.parametrize("producer", [Producer, OldProducer])
def test_case16_bare_dlpack_objects(device: str, producer: type[Producer]) -> None:
    x, weight = inputs(9, 48, 128, device)
    view = poisoned_slice(x, 6288, 6144, device)
    want = op(x, weight)
    box = Guarded((9, 48), BF16, device)
    before, given = box.snapshot(), producer(box.tensor)
    assert op(producer(view), producer(weight), given) is given
    check_guards(box, before)
    same_bits(box.tensor, want)
    same_bits(op(view, producer(weight)), want)
    transposed_op(producer(view), producer(weight.T), box.tensor.zero_())
    same_bits(box.tensor, want)


def test_case16_numpy_arrays() -> None:
    x, weight = inputs(9, 48, 128)
    out = op(numpy_of(x), numpy_of(weight))
    assert isinstance(out, np.ndarray)
    assert out.dtype.name == "bfloat16"
    same_bits(torch_of(out, BF16), op(x, weight))
    given = numpy_of(torch.zeros(9, 48, dtype=BF16))
    assert op(numpy_of(x), numpy_of(weight), given) is given
    same_bits(torch_of(given, BF16), op(x, weight))


def test_case16_jax_arrays() -> None:
    x, weight = inputs(9, 48, 128)
    x_jax, weight_jax = jax_of(x), jax_of(weight)
    out = op(x_jax, weight_jax)
    assert type(out).__module__.startswith("jax")
    same_bits(torch_of(out, BF16), op(x, weight))
    refused({"x": x_jax, "weight": weight_jax, "out": out}, "out", "immutable", operation=op)


@pytest.mark.gpu
def test_case16_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    x, weight = inputs(9, 48, 128, "cuda")
    out = op(cupy_of(x), cupy_of(weight))
    assert isinstance(out, cupy.ndarray)
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    same_bits(torch.from_dlpack(out.view(cupy.int16)).view(BF16), op(x, weight))


def test_case26_negative_strides() -> None:
    x, weight = numpy_of(normal((4, 128), 1)), numpy_of(normal((48, 128), 2))
    for wrong in (x[::-1], x[:, ::-1]):
        refused({"x": wrong, "weight": weight}, "x", "stride -", operation=op)
    for wrong in (weight[::-1], weight[:, ::-1]):
        refused({"x": x, "weight": wrong}, "weight", "-128|-1", operation=op)
    out = numpy_of(torch.zeros(4, 48, dtype=BF16))
    for wrong in (out[::-1], out[:, ::-1]):
        refused({"x": x, "weight": weight, "out": wrong}, "out", "stride -", operation=op)
    assert (op(x[:1][::-1], weight) == op(x[:1], weight)).all(), "one row has no order"


@pytest.mark.gpu
def test_case26_flipped_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    x, weight = (cupy_of(t) for t in inputs(4, 48, 128, "cuda"))
    for wrong in (cupy.flip(x, 1), x[::-1]):
        refused({"x": wrong, "weight": weight}, "x", "stride -", operation=op)
    refused({"x": x, "weight": weight[::-1]}, "weight", "-128", operation=op)
