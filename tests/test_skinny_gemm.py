"""The skinny GEMM: values against float64, special values, and bits that must not move."""

from __future__ import annotations

import pytest
import torch
from gemm_helpers import assert_product, inputs, normal, product, residual_of, same_bits
from helpers import BF16, FP16, guarded
from skinny_helpers import DTYPES, TOKENS, op, run_and_check

import k3cupy
from k3cupy import projections

ODD_SHAPES = [
    (16, 64),
    (48, 128),
    (2096, 192),
    (7, 8448),
    (48, 8),
    (1, 8),
    (5, 24),
    (7, 80),
    (257, 104),
    (13, 1544),
    (33, 7168),
]
SMALL_PROJECTIONS = [(1536, 128), (768, 128), (1152, 1536)]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


# Values


@dtypes
@pytest.mark.parametrize("tokens", TOKENS)
def test_odd_shapes(device: str, tokens: int, dtype: torch.dtype) -> None:
    for n, k in ODD_SHAPES:
        x, weight = inputs(tokens, n, k, device, seed=n + k, dtype=dtype)
        run_and_check(x, weight)
        run_and_check(x, weight, residual=residual_of(tokens, n, device, dtype=dtype))


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_small_projections(device: str, tokens: int) -> None:
    for n, k in SMALL_PROJECTIONS:
        x, weight = inputs(tokens, n, k, device, seed=n)
        run_and_check(x, weight, weight_is_static=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_projection_of_the_model(tokens: int) -> None:
    """One pool of values serves as every weight."""
    shapes = projections.shapes()
    pool = normal((max(p.n * p.k for p in shapes),), tokens, "cuda")
    tall = normal((tokens, max(p.k for p in shapes)), 99, "cuda")
    for p in shapes:
        weight = pool[: p.n * p.k].view(p.n, p.k)
        x = tall[:, : p.k].contiguous()
        assert_product(op(x, weight), x, weight)
        residual = residual_of(tokens, p.n, "cuda")
        assert_product(op(x, weight, residual), x, weight, residual)


@dtypes
def test_sums_that_are_exact(device: str, dtype: torch.dtype) -> None:
    """Small integers: every order of summation gives the same number, which both types have."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randint(-1, 2, (8, 64), generator=rng).to(dtype).to(device)
    weight = torch.randint(-1, 2, (48, 64), generator=rng).to(dtype).to(device)
    residual = torch.randint(-128, 129, (8, 48), generator=rng).to(dtype).to(device)
    want = product(x, weight) + residual.double()
    assert want.abs().max() <= 256
    assert torch.equal(op(x, weight, residual).double(), want)


@dtypes
def test_each_column_of_k_counts_once(device: str, dtype: torch.dtype) -> None:
    """One-hot rows of x pick single columns of the weight, bit by bit."""
    n, k = 40, 328
    weight = guarded(normal((n, k), 1, dtype=dtype), device)
    for start in range(0, k, 8):
        x = torch.zeros(8, k, dtype=dtype, device=device)
        x[range(8), range(start, start + 8)] = 1
        assert torch.equal(op(x, weight), weight[:, start : start + 8].T)


@dtypes
def test_one_rounding_to_nearest_even(device: str, dtype: torch.dtype) -> None:
    """Ties that fp32 holds exactly: halfway between two neighbours, and so on."""
    big = {BF16: 256, FP16: 2048}[dtype]
    weight = torch.zeros(16, 16, dtype=dtype, device=device)
    weight[:, 0], weight[:, 1] = big, torch.arange(16)
    x = torch.zeros(1, 16, dtype=dtype, device=device)
    x[0, :2] = 1
    want = (float(big) + torch.arange(16)).to(dtype)
    assert torch.equal(op(x, weight).cpu()[0], want)


@dtypes
def test_the_residual_is_added_before_the_only_rounding(device: str, dtype: torch.dtype) -> None:
    """A sum halfway between two neighbours goes where the residual pulls it."""
    big = {BF16: 256, FP16: 2048}[dtype]
    weight = torch.zeros(16, 16, dtype=dtype, device=device)
    weight[:, 0], weight[:, 1] = big, torch.arange(16)
    x = torch.zeros(2, 16, dtype=dtype, device=device)
    x[:, :2] = 1
    residual = torch.tensor([0.5, -0.5]).to(dtype).to(device)[:, None].expand(2, 16).contiguous()
    sums = float(big) + torch.arange(16)
    got = op(x, weight, residual).cpu()
    assert torch.equal(got, (sums + residual.cpu().float()).to(dtype))
    assert not torch.equal(got, (sums.to(dtype).float() + residual.cpu().float()).to(dtype))


def test_each_output_gets_its_own_residual(device: str) -> None:
    """A product of zeros leaves the residual, bit by bit."""
    for tokens, n in ((1, 7), (3, 48), (8, 101), (5, 2096)):
        x, weight = inputs(tokens, n, 64, device)
        residual = residual_of(tokens, n, device)
        same_bits(op(torch.zeros_like(x), weight, residual), residual)


@dtypes
def test_case15_no_tokens(device: str, dtype: torch.dtype) -> None:
    weight = normal((48, 128), 0, dtype=dtype).to(device)
    x, residual = (torch.empty(0, width, dtype=dtype, device=device) for width in (128, 48))
    assert op(x, weight).shape == (0, 48)
    assert op(x, weight).dtype == dtype
    assert op(torch.empty(9, 200, dtype=dtype, device=device)[:0, 3:131], weight).shape == (0, 48)
    assert op(x, weight, residual).shape == (0, 48)
    assert op(x, weight, residual, residual) is residual
    decision = k3cupy.explain_skinny_gemm(x, weight)
    assert decision.config is None
    assert "no tokens" in decision.reason or decision.backend == "reference"


def test_the_residual_stands_before_out(device: str) -> None:
    x, weight = inputs(3, 48, 128, device)
    residual, out = residual_of(3, 48, device), torch.zeros(3, 48, dtype=BF16, device=device)
    assert op(x, weight, residual, out) is out
    assert_product(out, x, weight, residual)


# Special values


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 5, 7])
def test_a_poisoned_row_stays_alone(device: str, row: int, poison: float) -> None:
    x, weight = inputs(8, 48, 1544, device)
    clean = op(x, weight)
    x[row, 777] = poison
    out = op(x, weight)
    others = [i for i in range(8) if i != row]
    same_bits(out[others], clean[others])
    want = product(x[row : row + 1], weight)[0]
    assert torch.equal(out[row].isnan(), want.isnan())
    assert torch.equal(out[row].double()[~want.isnan()], want[~want.isnan()])


def test_a_poisoned_row_of_the_weight_stays_alone(device: str) -> None:
    """Also the last one, which fills up a block whose outputs are past the end."""
    x, weight = inputs(7, 49, 1536, device)
    clean = op(x, weight)
    for row in (17, 48):
        poisoned = weight.clone()
        poisoned[row, 1535] = float("nan")
        out = op(x, poisoned)
        assert out[:, row].isnan().all()
        others = [i for i in range(49) if i != row]
        same_bits(out[:, others], clean[:, others])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_poisoned_residual_stays_alone(device: str, poison: float) -> None:
    x, weight = inputs(5, 100, 1536, device)
    residual = residual_of(5, 100, device)
    clean = op(x, weight, residual)
    for row, column in ((0, 0), (4, 99), (2, 17)):
        poisoned = residual.clone()
        poisoned[row, column] = poison
        out = op(x, weight, poisoned)
        torch.testing.assert_close(
            out[row, column].cpu(), torch.tensor(poison).to(BF16), equal_nan=True
        )
        out[row, column] = clean[row, column]
        same_bits(out, clean)


@dtypes
def test_infinities_are_those_of_the_reference(device: str, dtype: torch.dtype) -> None:
    """inf times 0 and inf - inf are NaN, sums past the largest number are infinite."""
    x, weight = torch.ones(4, 64).to(dtype), torch.ones(8, 64).to(dtype)
    x[0, 3], weight[0, 3] = float("inf"), 0
    x[1, 0], x[1, 63] = float("inf"), -float("inf")
    x[2, :2] = 0.9 * torch.finfo(dtype).max
    out = op(x.to(device), weight.to(device)).cpu()
    assert out[0, 0].isnan()
    assert (out[0, 1:] == float("inf")).all()
    assert out[1].isnan().all()
    assert (out[2] == float("inf")).all()
    assert torch.equal(out[3, 1:], torch.full((7,), 64.0, dtype=dtype))


def test_half_sums_that_pass_its_range_on_the_way(device: str) -> None:
    """fp32 holds what fp16 cannot: 60000 + 60000 - 70016 is 49984."""
    x = torch.ones(1, 8, dtype=FP16, device=device)
    weight = torch.zeros(3, 8, dtype=FP16, device=device)
    weight[:, 0] = weight[:, 1] = 60000
    weight[:, 2] = weight[:, 3] = -35008
    assert (op(x, weight) == 49984).all()
    residual = torch.full((1, 3), -49984.0, dtype=FP16, device=device)
    weight[:, 2:] = 0
    assert (op(x, weight, residual) == float("inf")).all()
    weight[:, 2] = -20000
    assert (op(x, weight, residual) == 50016).all()


@pytest.mark.parametrize(
    ("dtype", "tiny", "scale"),
    [(BF16, 2.0**-130, 2.0**20), (BF16, 2.0**-100, 2.0**-30), (FP16, 2.0**-20, 2.0**10)],
    ids=str,
)
def test_subnormal_values(device: str, dtype: torch.dtype, tiny: float, scale: float) -> None:
    """Nothing is flushed: neither subnormal inputs nor sums."""
    x = torch.full((3, 8), tiny).to(dtype).to(device)
    weight = torch.full((16, 8), scale).to(dtype).to(device)
    want = product(x, weight)
    assert want.min() > 0
    assert torch.equal(op(x, weight).double(), want)


# Bits


@dtypes
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_run_to_run(device: str, tokens: int, dtype: torch.dtype) -> None:
    x, weight = inputs(tokens, 528, 2048, device, dtype=dtype)
    residual = residual_of(tokens, 528, device, dtype=dtype)
    first = op(x, weight, residual)
    for _ in range(20):
        same_bits(op(x, weight, residual), first)


@pytest.mark.parametrize("tokens", TOKENS)
def test_packed_strided_and_unaligned_x_give_the_same_bits(device: str, tokens: int) -> None:
    x, weight = inputs(tokens, 528, 1536, device)
    packed = op(x, weight)
    for stride, shift in ((1544, 0), (1537, 0), (1536, 2), (1536, 16), (3072, 8)):
        other = guarded(x.cpu(), device, strides=(stride, 1), shift=shift)
        same_bits(op(other, weight), packed, f"row stride {stride}, {shift} bytes off")


def test_a_residual_of_zeros_changes_nothing(device: str) -> None:
    x, weight = inputs(8, 528, 1536, device)
    zeros = torch.zeros(8, 528, dtype=BF16, device=device)
    same_bits(op(x, weight, zeros), op(x, weight))


def test_the_reference_gives_the_same_bits_for_every_number_of_tokens() -> None:
    """Also where the weight is widened in several parts."""
    x, weight = normal((8, 7168), 1), normal((1200, 7168), 2)
    whole = op(x, weight)
    for tokens in TOKENS:
        same_bits(op(x[:tokens], weight), whole[:tokens], f"M = {tokens}")


def test_both_gemms_agree_on_the_cpu() -> None:
    x, weight = inputs(8, 100, 1536)
    residual = residual_of(8, 100)
    same_bits(op(x, weight, residual), k3cupy.fused_a_gemm(x, weight, residual=residual))
