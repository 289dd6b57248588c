"""Both GEMMs: values against float64, residuals, special values, and bits that must not move."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gemm_helpers import (
    GEMMS,
    GEMMS_AND_DTYPES,
    TOKENS,
    Gemm,
    assert_product,
    devices_and_tokens,
    gemms_and_tokens,
    inputs,
    normal,
    product,
    residual_of,
    same_bits,
)
from helpers import BF16, FP16, guarded
from hypothesis import given, settings
from hypothesis import strategies as st

import k3cupy
from k3cupy import projections
from k3cupy.reference import fused_a_gemm as reference

LARGEST_RUN = {BF16: 256.0, FP16: 2048.0}
"""Up to here a type has every integer; from here on every other one."""

each_gemm_and_dtype = pytest.mark.parametrize(("gemm", "dtype"), GEMMS_AND_DTYPES)
each_number_of_tokens = pytest.mark.parametrize(
    ("device", "gemm", "tokens"), devices_and_tokens((1, 2, 16, 33, 64, 8), range(1, 9))
)
POISONS = (float("nan"), float("inf"), -float("inf"))


# Values


@given(st.sampled_from(list(GEMMS.values())), st.data())
@settings(max_examples=150)
def test_any_shape_and_any_layout(gemm: Gemm, data: st.DataObject) -> None:
    """On the CPU; on a GPU the grids below and beside, each of whose points is a kernel."""
    tokens = data.draw(st.integers(1, gemm.max_tokens))
    wide, deep = st.integers(1, 2200), st.sampled_from((7168, 8448))
    few, short = st.integers(1, 50), st.integers(1, 40).map(lambda i: gemm.k_multiple * i)
    n, k = data.draw(st.one_of(*map(st.tuples, (few, wide, few), (short, short, deep))))
    dtype = data.draw(st.sampled_from(gemm.dtypes))
    bytes_off = st.integers(0, 8).map(lambda i: 2 * i)

    def layout(width: int) -> dict[str, Any]:
        between = data.draw(st.sampled_from((0, 1, 7, 8, 512)))
        return {"strides": (width + between, 1), "shift": data.draw(bytes_off)}

    x, weight = inputs(tokens, n, k, seed=n + k, dtype=dtype, **layout(k))
    out, residual = layout(n), None
    if data.draw(st.booleans()):
        residual = residual_of(tokens, n, dtype=dtype, **layout(n))
    gemm.run_and_check(x, weight, residual=residual, out_strides=out["strides"], shift=out["shift"])


@pytest.mark.gpu
@pytest.mark.parametrize(("gemm", "tokens"), gemms_and_tokens(TOKENS, range(1, 9)))
def test_every_projection_of_the_model(gemm: Gemm, tokens: int) -> None:
    """One pool of values serves as every weight."""
    shapes = projections.shapes()
    pool = normal((max(p.n * p.k for p in shapes),), tokens, "cuda")
    tall = normal((tokens, max(p.k for p in shapes)), 99, "cuda")
    for p in shapes:
        weight = pool[: p.n * p.k].view(p.n, p.k)
        x = tall[:, : p.k].contiguous()
        assert_product(gemm(x, weight), x, weight)
        residual = residual_of(tokens, p.n, "cuda")
        assert_product(gemm(x, weight, residual=residual), x, weight, residual)


@each_gemm_and_dtype
def test_sums_that_are_exact(device: str, gemm: Gemm, dtype: torch.dtype) -> None:
    """Small integers: every order of summation gives the same number, which both types have."""
    rng = torch.Generator().manual_seed(3)
    tokens = min(16, gemm.max_tokens)
    x = torch.randint(-1, 2, (tokens, 128), generator=rng).to(dtype).to(device)
    weight = torch.randint(-1, 2, (48, 128), generator=rng).to(dtype).to(device)
    residual = torch.randint(-128, 129, (tokens, 48), generator=rng).to(dtype).to(device)
    want = product(x, weight)
    assert (want.abs() + residual.abs()).max() <= 256
    assert torch.equal(gemm(x, weight).double(), want)
    assert torch.equal(gemm(x, weight, residual=residual).double(), want + residual.double())


@each_gemm_and_dtype
def test_each_column_of_k_counts_once(device: str, gemm: Gemm, dtype: torch.dtype) -> None:
    """One-hot rows of x pick single columns of the weight, bit by bit."""
    n, k = 40, 320 + gemm.k_multiple
    weight = guarded(normal((n, k), 1, dtype=dtype), device)
    for start in range(0, k, gemm.max_tokens):
        count = min(gemm.max_tokens, k - start)
        x = torch.zeros(count, k, dtype=dtype, device=device)
        x[range(count), range(start, start + count)] = 1
        assert torch.equal(gemm(x, weight), weight[:, start : start + count].T)


@each_gemm_and_dtype
def test_one_rounding_to_nearest_even(device: str, gemm: Gemm, dtype: torch.dtype) -> None:
    """Ties that fp32 holds exactly: halfway between two neighbours, and so on."""
    big = LARGEST_RUN[dtype]
    weight = torch.zeros(16, 16, dtype=dtype, device=device)
    weight[:, 0], weight[:, 1] = big, torch.arange(16)
    x = torch.zeros(1, 16, dtype=dtype, device=device)
    x[0, :2] = 1
    want = (big + torch.arange(16)).to(dtype)
    assert torch.equal(gemm(x, weight).cpu()[0], want)


@each_gemm_and_dtype
def test_the_residual_is_added_before_the_only_rounding(
    device: str, gemm: Gemm, dtype: torch.dtype
) -> None:
    """A sum halfway between two neighbours goes where the residual pulls it."""
    big = LARGEST_RUN[dtype]
    weight = torch.zeros(16, 16, dtype=dtype, device=device)
    weight[:, 0], weight[:, 1] = big, torch.arange(16)
    x = torch.zeros(2, 16, dtype=dtype, device=device)
    x[:, :2] = 1
    residual = torch.tensor([0.5, -0.5]).to(dtype).to(device)[:, None].expand(2, 16).contiguous()
    sums = big + torch.arange(16)
    got = gemm(x, weight, residual=residual).cpu()
    assert torch.equal(got, (sums + residual.cpu().float()).to(dtype))
    assert not torch.equal(got, (sums.to(dtype).float() + residual.cpu().float()).to(dtype))


def test_each_output_gets_its_own_residual(device: str, gemm: Gemm) -> None:
    """A product of zeros leaves the residual, bit by bit."""
    for tokens, n in zip(gemm.tokens, (7, 48, 101, 2096), strict=True):
        x, weight = inputs(tokens, n, 64, device)
        residual = residual_of(tokens, n, device)
        same_bits(gemm(torch.zeros_like(x), weight, residual=residual), residual)


@each_gemm_and_dtype
def test_case15_no_tokens(device: str, gemm: Gemm, dtype: torch.dtype) -> None:
    weight = normal((48, 128), 0, dtype=dtype).to(device)
    x, out = (torch.empty(0, width, dtype=dtype, device=device) for width in (128, 48))
    part = torch.empty(9, 200, dtype=dtype, device=device)[:0, 3:131]
    assert gemm(x, weight).shape == (0, 48)
    assert gemm(x, weight).dtype == dtype
    assert gemm(part, weight).shape == (0, 48)
    assert gemm(x, weight, residual=out).shape == (0, 48)
    assert gemm(x, weight, out=out) is out
    assert gemm(x, weight, residual=out, out=out) is out
    decision = gemm.explain(x, weight)
    assert decision.config is None
    assert "no tokens" in decision.reason or decision.runs_on == "cpu"


# Special values


def test_a_poisoned_row_stays_alone(device: str, gemm: Gemm) -> None:
    x, weight = inputs(gemm.odd_tokens, 48, 1536 + gemm.k_multiple, device)
    clean = gemm(x, weight)
    for row, poison in itertools.product((0, 5, gemm.odd_tokens - 1), POISONS):
        poisoned = x.clone()
        poisoned[row, 777] = poison
        out = gemm(poisoned, weight)
        others = [i for i in range(gemm.odd_tokens) if i != row]
        same_bits(out[others], clean[others], f"beside {poison} in row {row}")
        want = product(poisoned[row : row + 1], weight)[0]
        assert torch.equal(out[row].isnan(), want.isnan())
        assert torch.equal(out[row].double()[~want.isnan()], want[~want.isnan()])


def test_a_poisoned_row_of_the_weight_stays_alone(device: str, gemm: Gemm) -> None:
    """Also the last one, which fills up a block whose outputs are past the end."""
    x, weight = inputs(gemm.odd_tokens, 49, 1536, device)
    clean = gemm(x, weight)
    for row in (17, 48):
        poisoned = weight.clone()
        poisoned[row, 1535] = float("nan")
        out = gemm(x, poisoned)
        assert out[:, row].isnan().all()
        others = [i for i in range(49) if i != row]
        same_bits(out[:, others], clean[:, others])


@pytest.mark.parametrize(("device", "gemm", "tokens"), devices_and_tokens((1, 33, 9), (1, 5)))
def test_a_poisoned_residual_stays_alone(device: str, gemm: Gemm, tokens: int) -> None:
    x, weight = inputs(tokens, 100, 1536, device)
    residual = residual_of(tokens, 100, device)
    clean = gemm(x, weight, residual=residual)
    places = ((0, 0), (tokens - 1, 99), (tokens // 2, 17))
    for (row, column), poison in itertools.product(places, POISONS):
        poisoned = residual.clone()
        poisoned[row, column] = poison
        out = gemm(x, weight, residual=poisoned)
        torch.testing.assert_close(
            out[row, column].cpu(), torch.tensor(poison).to(BF16), equal_nan=True
        )
        out[row, column] = clean[row, column]
        same_bits(out, clean)


@each_gemm_and_dtype
def test_infinities_are_those_of_the_reference(device: str, gemm: Gemm, dtype: torch.dtype) -> None:
    """inf times 0 and inf - inf are NaN, sums past the largest number are infinite."""
    x, weight = torch.ones(4, 64).to(dtype), torch.ones(8, 64).to(dtype)
    x[0, 3], weight[0, 3] = float("inf"), 0
    x[1, 0], x[1, 63] = float("inf"), -float("inf")
    x[2, :2] = 0.9 * torch.finfo(dtype).max
    out = gemm(x.to(device), weight.to(device)).cpu()
    assert out[0, 0].isnan()
    assert (out[0, 1:] == float("inf")).all()
    assert out[1].isnan().all()
    assert (out[2] == float("inf")).all()
    assert torch.equal(out[3, 1:], torch.full((7,), 64.0, dtype=dtype))


@each_gemm_and_dtype
def test_case47_subnormals_are_kept(device: str, gemm: Gemm, dtype: torch.dtype) -> None:
    """A residual on a product of zeros, and a product of their size, alone and with a residual."""
    least = {BF16: 2.0**-133, FP16: 2.0**-24}[dtype]
    x = torch.zeros(3, 64, dtype=dtype, device=device)
    weight = torch.zeros(16, 64, dtype=dtype, device=device)
    residual = (torch.arange(1, 49).reshape(3, 16) * least).to(dtype).to(device)
    same_bits(gemm(x, weight, residual=residual), residual)
    factor = {BF16: 2.0**-65, FP16: 2.0**-11}[dtype]
    x[:, 5], weight[:, 5] = factor, 8 * least / factor
    want = torch.full((3, 16), 8 * least, dtype=dtype, device=device)
    same_bits(gemm(x, weight), want)
    want = ((torch.arange(1, 49).reshape(3, 16) + 8) * least).to(dtype)
    same_bits(gemm(x, weight, residual=residual), want)


# Bits


@pytest.mark.parametrize(("device", "gemm", "tokens"), devices_and_tokens((1, 33, 9), (1, 8, 3)))
def test_run_to_run(device: str, gemm: Gemm, tokens: int) -> None:
    """What may differ from run to run on a GPU, the order of blocks, the CPU has not."""
    for dtype in gemm.dtypes:
        x, weight = inputs(tokens, 528, 2048, device, dtype=dtype)
        residual = residual_of(tokens, 528, device, dtype=dtype)
        for added in (None, residual):
            first = gemm(x, weight, residual=added)
            for _ in range(20 if device == "cuda" else 1):
                same_bits(gemm(x, weight, residual=added), first)


@each_number_of_tokens
def test_packed_strided_and_unaligned_x_give_the_same_bits(
    device: str, gemm: Gemm, tokens: int
) -> None:
    x, weight = inputs(tokens, 528, 1536, device)
    packed = gemm(x, weight)
    for stride, shift in ((1544, 0), (1537, 0), (1536, 2), (1536, 16), (3072, 8)):
        other = guarded(x.cpu(), device, strides=(stride, 1), shift=shift)
        same_bits(gemm(other, weight), packed, f"row stride {stride}, {shift} bytes off")


@each_number_of_tokens
def test_a_residual_of_zeros_changes_nothing(device: str, gemm: Gemm, tokens: int) -> None:
    """The same configuration sums in the same order, with a residual or without."""
    x, weight = inputs(tokens, 528, 1536, device)
    zeros = torch.zeros(tokens, 528, dtype=BF16, device=device)
    same_bits(gemm(x, weight, residual=zeros), gemm(x, weight))


def test_the_reference_gives_the_same_bits_for_every_number_of_tokens(
    gemm: Gemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without being asked, and where the weight is widened in several parts."""
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 50 * 1024)
    x, weight = normal((gemm.max_tokens, 1024), 1), normal((120, 1024), 2)
    whole = gemm(x, weight)
    assert_product(whole, x, weight)
    for tokens in sorted({*range(1, 9), *TOKENS}):
        if tokens <= gemm.max_tokens:
            same_bits(gemm(x[:tokens], weight), whole[:tokens], f"M = {tokens}")


def test_the_residual_follows_the_weight_and_the_rest_is_named(device: str, gemm: Gemm) -> None:
    x, weight = inputs(3, 48, 128, device)
    residual, out = residual_of(3, 48, device), torch.zeros(3, 48, dtype=BF16, device=device)
    run, explain = getattr(k3cupy, gemm.name), getattr(k3cupy, f"explain_{gemm.name}")
    assert run(x, weight, residual, out=out) is out
    assert_product(out, x, weight, residual)
    for function in (run, explain):
        with pytest.raises(TypeError, match="positional argument"):
            function(x, weight, residual, out)
