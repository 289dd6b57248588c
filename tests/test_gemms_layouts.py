"""Both GEMMs: strides, slices, offsets and odd addresses, adding in place, NaN all around."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from gemm_helpers import (
    GEMMS,
    Gemm,
    assert_product,
    devices_and_tokens,
    inputs,
    normal,
    poisoned_slice,
    residual_of,
    same_bits,
)
from helpers import BF16, Guarded, check_guards, guarded, refused, run_child
from memory_helpers import before_a_forbidden_page, before_unmapped_gpu_memory

import k3cupy
from k3cupy import projections

COPIED = {
    "fused_a_gemm": k3cupy.FusedAGemmConfig(64, 32, 128, 4, 2, 4, 1, 1, 2),
    "skinny_gemm": None,
}
"""Configurations whose instances show how x comes: not by the copy engine, which has its own."""


def is_fast(gemm: Gemm, x: Any, weight: Any) -> bool:
    """Whether a GPU reads x by wide loads, and not element by element."""
    decision = gemm.explain_on_a_gpu(x, weight, config=COPIED[gemm.name])
    flags = gemm.flags_of(decision.name_expression)
    chosen = gemm.explain_on_a_gpu(x, weight)
    for each in (decision, chosen):
        assert ("x is not aligned" in each.reason) != flags["aligned_x"]
    by_copy_engine = "mapped_x" in chosen.name_expression
    assert (by_copy_engine or gemm.flags_of(chosen.name_expression)["aligned_x"]) == flags[
        "aligned_x"
    ]
    return flags["aligned_x"]


# The model's own views


@pytest.mark.parametrize(
    ("device", "gemm", "tokens"), devices_and_tokens((1, 2, 8, 16, 17, 64, 9), (1, 2, 8, 5))
)
@pytest.mark.parametrize("case", projections.strided_cases(), ids=lambda c: c.name)
def test_strided_projections(
    device: str, case: projections.StridedCase, gemm: Gemm, tokens: int
) -> None:
    for dtype in gemm.dtypes:
        x, weight = inputs(tokens, case.n, case.k, device, dtype=dtype)
        view = poisoned_slice(x, case.source_row_width, case.offset, device)
        assert is_fast(gemm, view, weight)
        same_bits(gemm.run_and_check(view, weight), gemm(x, weight))
        residual = residual_of(tokens, case.n, device, dtype=dtype)
        out = gemm.run_and_check(view, weight, residual=residual)
        same_bits(out, gemm(x, weight, residual=residual))


def test_case01_a_slice_of_one_token_is_fast(device: str, gemm: Gemm) -> None:
    """Whatever its row stride says, also 0 and 1, and after a round trip through DLPack."""
    x, weight = inputs(1, 48, 128, device)
    want = gemm(x, weight)
    view = poisoned_slice(x, 6288, 6144, device)
    assert not view.is_contiguous() or view.stride(0) == 6288
    strides = [view.as_strided((1, 128), (stride, 1)) for stride in (0, 1, 7, 128, 6288, 2**40)]
    for one in (view, torch.from_dlpack(view), *strides):
        assert is_fast(gemm, one, weight)
        same_bits(gemm.run_and_check(one, weight), want)


# Row strides


def test_case02_rows_of_7175_for_7168(device: str, gemm: Gemm) -> None:
    """In each argument in turn, what lies between the rows is NaN, or must not change."""
    for tokens in (2, gemm.odd_tokens):
        x, weight = inputs(tokens, 48, 7168, device)
        want = gemm(x, weight)
        wide = guarded(x.cpu(), device, strides=(7175, 1))
        assert not is_fast(gemm, wide, weight)
        same_bits(gemm.run_and_check(wide, weight), want)
        far = guarded(weight.cpu(), device, strides=(7175, 1))
        refused({"x": x, "weight": far}, "weight", "7175", operation=gemm)
        gemm.run_and_check(x, weight, out_strides=(55, 1))
        residual = residual_of(tokens, 48, device, strides=(55, 1))
        gemm.run_and_check(x, weight, residual=residual, out_strides=(53, 1))


def test_row_strides_of_x(device: str, gemm: Gemm) -> None:
    """Also rows that overlap one another, and one row for all tokens."""
    tokens = gemm.odd_tokens
    weight = guarded(normal((48, 128), 1), device)
    for stride in (128, 129, 130, 132, 136, 144, 192, 6288, 0, 1, 8, 16):
        flat = guarded(normal(((tokens - 1) * stride + 128,), 2), device)
        x = flat.as_strided((tokens, 128), (stride, 1))
        assert is_fast(gemm, x, weight) == (stride % 8 == 0), stride
        gemm.run_and_check(x, weight)


def test_row_strides_of_out(device: str, gemm: Gemm) -> None:
    x, weight = inputs(gemm.odd_tokens, 48, 128, device)
    for stride, shift in itertools.product((48, 49, 64, 1000), (0, 2, 4, 8)):
        gemm.run_and_check(x, weight, out_strides=(stride, 1), shift=shift)


def test_an_output_of_one_row_or_one_column_has_any_stride(device: str, gemm: Gemm) -> None:
    x, weight = inputs(gemm.odd_tokens, 1, 64, device)
    gemm.run_and_check(x, weight, out_strides=(5, 3))
    x, weight = inputs(1, 48, 64, device)
    gemm.run_and_check(x, weight, out_strides=(0, 1))


@pytest.mark.parametrize("shift", [0, 2, 4, 8])
def test_rows_of_a_residual(device: str, gemm: Gemm, shift: int) -> None:
    """Also rows that overlap one another, and one row for all tokens."""
    tokens = gemm.odd_tokens
    x, weight = inputs(tokens, 48, 128, device)
    for stride in (48, 49, 50, 64, 1000, 0, 1, 47):
        flat = guarded(normal(((tokens - 1) * stride + 48,), 3), device, shift=shift)
        residual = flat.as_strided((tokens, 48), (stride, 1))
        out = gemm.run_and_check(x, weight, residual=residual)
        same_bits(gemm(x, weight, residual=residual.contiguous()), out, f"stride {stride}")


def test_a_residual_of_one_row_or_one_column_has_any_stride(device: str, gemm: Gemm) -> None:
    for tokens, n in ((1, 48), (gemm.odd_tokens, 1)):
        x, weight = inputs(tokens, n, 64, device)
        values = residual_of(tokens, n)
        for strides in ((0, 1), (7, 1), (2**40, 1)) if tokens == 1 else ((5, 3), (1, 9)):
            residual = guarded(values, device, strides=strides)
            gemm.run_and_check(x, weight, residual=residual)


def test_out_and_residual_as_columns_of_the_buffer_of_x(device: str, gemm: Gemm) -> None:
    """Neighbours between whose columns no byte is shared do not overlap."""
    x, weight = inputs(gemm.odd_tokens, 48, 128, device)
    buffer = torch.full((gemm.odd_tokens, 128 + 48 + 48 + 16), 7.0, dtype=BF16, device=device)
    buffer[:, :128] = x
    there, out, residual = buffer[:, :128], buffer[:, 128:176], buffer[:, 176:224]
    same_bits(gemm(there, weight, out=out), gemm(x, weight))
    want = gemm(x, weight, residual=residual.contiguous())
    same_bits(gemm(there, weight, residual=residual, out=out), want)
    assert (buffer[:, 176:] == 7).all()
    same_bits(there, x)


def test_a_residual_that_shares_memory_with_inputs(device: str, gemm: Gemm) -> None:
    """Both are only read."""
    x, _ = inputs(gemm.odd_tokens, 48, 128, device)
    weight = guarded(normal((128, 128), 5), device)
    gemm.run_and_check(x, weight, residual=x)
    gemm.run_and_check(x, weight, residual=weight[3 : 3 + gemm.odd_tokens])


# In place


@pytest.mark.parametrize("strides", [None, (2101, 1)], ids=["packed", "strided"])
def test_in_place(device: str, gemm: Gemm, strides: tuple[int, int] | None) -> None:
    for tokens in (1, 3, gemm.odd_tokens, gemm.max_tokens):
        if device == "cpu" and tokens == gemm.max_tokens:
            continue
        x, weight = inputs(tokens, 2096, 192, device)
        values = residual_of(tokens, 2096, device)
        want = gemm(x, weight, residual=values)
        for shift in (0, 2):
            box = Guarded((tokens, 2096), BF16, device, strides=strides, shift=shift)
            before = box.snapshot()
            for same in (box.tensor, box.tensor[:], box.tensor.view(tokens, 2096)):
                box.tensor.copy_(values)
                assert gemm(x, weight, residual=same, out=box.tensor) is box.tensor
                check_guards(box, before)
                same_bits(box.tensor, want)


def test_in_place_again_and_again(device: str, gemm: Gemm) -> None:
    """Each call adds once more: exact in small integers."""
    x, weight = torch.ones(5, 16).to(BF16).to(device), torch.ones(40, 16).to(BF16).to(device)
    out = torch.zeros(5, 40, dtype=BF16, device=device)
    for i in range(1, 9):
        gemm(x, weight, residual=out, out=out)
        assert (out == 16 * i).all()


# Addresses


@pytest.mark.parametrize("tokens", [1, 4])
def test_case03_addresses_of_x(device: str, gemm: Gemm, tokens: int) -> None:
    for shift in (2, 4, 6, 8, 14, 16):
        x, weight = inputs(tokens, 48, 128, device, strides=(136, 1), shift=shift)
        assert is_fast(gemm, x, weight) == (shift == 16), f"{shift} bytes off"
        gemm.run_and_check(x, weight)


def test_case03_slices_off_a_multiple_of_16_bytes(device: str, gemm: Gemm) -> None:
    for dtype in gemm.dtypes:
        for k in (128, 1536 + gemm.k_multiple):
            weight = guarded(normal((48, k), 1, dtype=dtype), device)
            for width, offset, rows in (
                (6288, 4609, 4),
                (6289, 4608, 4),
                (k + 8, 3, 2),
                (6288, 4609, 1),
            ):
                x = poisoned_slice(normal((rows, k), 2, dtype=dtype), width, offset, device)
                assert not is_fast(gemm, x, weight)
                gemm.run_and_check(x, weight)


def test_the_decision_says_what_is_not_aligned(device: str, gemm: Gemm) -> None:
    weight = normal((48, 128), 1).to(device)
    storage = torch.zeros(4, 6285, dtype=BF16, device=device)
    for x, words in ((storage[:, :128], "6285"), (storage[:1, 1:129], "2 bytes past")):
        reason = gemm.explain_on_a_gpu(x, weight).reason
        assert "x is not aligned" in reason
        assert words in reason


@pytest.mark.parametrize("shift", [2, 4, 8])
def test_case03_addresses_of_the_weight(device: str, gemm: Gemm, shift: int) -> None:
    x, weight = inputs(4, 48, 128, device)
    off = guarded(weight.cpu(), device, shift=shift)
    text = refused({"x": x, "weight": off}, "weight", "address 0x", operation=gemm)
    assert "16" in text
    gemm.run_and_check(x, guarded(weight.cpu(), device, shift=16))


def test_rows_of_a_larger_weight(device: str, gemm: Gemm) -> None:
    """A shard: rows 16 to 64 of a weight, at an offset."""
    x, weight = inputs(4, 80, 128 + gemm.k_multiple, device)
    same_bits(gemm.run_and_check(x, weight[16:64]), gemm(x, weight)[:, 16:64])


# The ends of allocations, in a child: a stray read is a fault

ENDS = {
    "fused_a_gemm": [(1, 48, 128), (3, 7, 80), (9, 33, 1536), (64, 16, 16), (64, 33, 80)],
    "skinny_gemm": [(1, 48, 128), (3, 7, 80), (8, 33, 1544), (5, 1, 8), (2, 5, 24)],
}


def _reads_nothing_past_host_memory() -> None:
    for name, gemm in GEMMS.items():
        for tokens, n, k in ENDS[name]:
            print(name, tokens, n, k, flush=True)
            tensors = (*inputs(tokens, n, k), residual_of(tokens, n))
            x, weight, residual = (before_a_forbidden_page(t) for t in tensors)
            assert_product(gemm(x, weight), x, weight)
            assert_product(gemm(x, weight, residual=residual), x, weight, residual)
    os._exit(0)


def test_nothing_is_read_past_host_memory() -> None:
    """One child for both: whose read it was, the last line of its output says."""
    done = run_child(_reads_nothing_past_host_memory)
    assert len(done.splitlines()) == sum(map(len, ENDS.values()))


def _reads_nothing_past_device_memory(name: str) -> None:
    gemm = GEMMS[name]
    for tokens, n, k in ENDS[name]:
        tensors = (*inputs(tokens, n, k), residual_of(tokens, n))
        x, weight, residual = (before_unmapped_gpu_memory(t.cuda()) for t in tensors)
        wide_x = before_unmapped_gpu_memory(normal((tokens, k + 5), 3).cuda())[:, 5:]
        wide = before_unmapped_gpu_memory(normal((tokens, n + 5), 3).cuda())[:, 5:]
        for one in (x, wide_x):
            assert_product(gemm(one, weight), one, weight)
            for added in (residual, wide):
                assert_product(gemm(one, weight, residual=added), one, weight, added)
    torch.cuda.synchronize()
    os._exit(0)


@pytest.mark.gpu
def test_nothing_is_read_past_device_memory(gemm: Gemm) -> None:
    run_child(_reads_nothing_past_device_memory, gemm.name)
