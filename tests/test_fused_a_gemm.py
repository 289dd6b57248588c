"""The fused-A GEMM: values against float64, special values, and bits that must not move."""

from __future__ import annotations

import pytest
import torch
from gemm_helpers import (
    TOKENS,
    assert_product,
    inputs,
    normal,
    op,
    product,
    run_and_check,
    same_bits,
    transposed_op,
)
from helpers import BF16, Guarded, check_guards, guarded

import k3cupy
from k3cupy import projections

ODD_SHAPES = [
    (16, 64),
    (48, 128),
    (2096, 192),
    (7, 8448),
    (16, 8448),
    (48, 16),
    (7, 80),
    (1, 16),
    (2096, 64),
    (33, 7168),
]
SMALL_PROJECTIONS = [(1536, 128), (768, 128), (1152, 1536)]


# Values


@pytest.mark.parametrize("tokens", TOKENS)
def test_odd_shapes(device: str, tokens: int) -> None:
    for n, k in ODD_SHAPES:
        x, weight = inputs(tokens, n, k, device, seed=n + k)
        run_and_check(x, weight)


@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_a_shape_that_no_tile_divides(device: str, tokens: int) -> None:
    x, weight = inputs(tokens, 2096, 8448, device)
    run_and_check(x, weight)


@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_small_projections(device: str, tokens: int) -> None:
    for n, k in SMALL_PROJECTIONS:
        x, weight = inputs(tokens, n, k, device, seed=n)
        run_and_check(x, weight)


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


def test_sums_that_are_exact(device: str) -> None:
    """Small integers: every order of summation gives the same number, which bf16 has."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randint(-1, 2, (16, 128), generator=rng).to(BF16).to(device)
    weight = torch.randint(-1, 2, (48, 128), generator=rng).to(BF16).to(device)
    want = product(x, weight)
    assert want.abs().max() <= 256
    assert torch.equal(op(x, weight).double(), want)


def test_each_column_of_k_counts_once(device: str) -> None:
    """One-hot rows of x pick single columns of the weight, bit by bit."""
    n, k = 40, 336
    weight = guarded(normal((n, k), 1), device)
    for start in range(0, k, 64):
        count = min(64, k - start)
        x = torch.zeros(count, k, dtype=BF16, device=device)
        x[range(count), range(start, start + count)] = 1
        got = op(x, weight)
        assert torch.equal(got, weight[:, start : start + count].T)


def test_one_rounding_to_nearest_even(device: str) -> None:
    """Ties that fp32 holds exactly: 256 + 1 is halfway between 256 and 258, and so on."""
    weight = torch.zeros(16, 16, dtype=BF16, device=device)
    weight[:, 0], weight[:, 1] = 256, torch.arange(16)
    x = torch.zeros(1, 16, dtype=BF16, device=device)
    x[0, :2] = 1
    want = (256.0 + torch.arange(16)).to(BF16)
    assert torch.equal(op(x, weight).cpu()[0], want)


def test_case15_no_tokens(device: str) -> None:
    weight = normal((48, 128), 0).to(device)
    x = torch.empty(0, 128, dtype=BF16, device=device)
    assert op(x, weight).shape == (0, 48)
    assert op(torch.empty(9, 200, dtype=BF16, device=device)[:0, 3:131], weight).shape == (0, 48)
    out = torch.empty(0, 48, dtype=BF16, device=device)
    assert op(x, weight, out) is out
    assert transposed_op(x, weight.T, out) is None
    decision = k3cupy.explain_fused_a_gemm(x, weight)
    assert decision.config is None
    assert "no tokens" in decision.reason or decision.backend == "reference"


# Special values


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 5, 8])
def test_a_poisoned_row_stays_alone(device: str, row: int, poison: float) -> None:
    x, weight = inputs(9, 48, 1536, device)
    clean = op(x, weight)
    x[row, 777] = poison
    out = op(x, weight)
    others = [i for i in range(9) if i != row]
    same_bits(out[others], clean[others])
    want = product(x[row : row + 1], weight)[0]
    assert torch.equal(out[row].isnan(), want.isnan())
    assert torch.equal(out[row].double()[~want.isnan()], want[~want.isnan()])


def test_a_poisoned_row_of_the_weight_stays_alone(device: str) -> None:
    x, weight = inputs(9, 48, 1536, device)
    clean = op(x, weight)
    weight[17, 1535] = float("nan")
    out = op(x, weight)
    assert out[:, 17].isnan().all()
    others = [i for i in range(48) if i != 17]
    same_bits(out[:, others], clean[:, others])


def test_infinities_are_those_of_the_reference(device: str) -> None:
    """inf times 0 and inf - inf are NaN, sums past the largest bf16 are infinite."""
    x, weight = torch.ones(4, 64).to(BF16), torch.ones(8, 64).to(BF16)
    x[0, 3], weight[0, 3] = float("inf"), 0
    x[1, 0], x[1, 63] = float("inf"), -float("inf")
    x[2, :2] = 3e38
    out = op(x.to(device), weight.to(device)).cpu()
    assert out[0, 0].isnan()
    assert (out[0, 1:] == float("inf")).all()
    assert out[1].isnan().all()
    assert (out[2] == float("inf")).all()
    assert torch.equal(out[3, 1:], torch.full((7,), 64.0, dtype=BF16))


def test_subnormal_and_tiny_values(device: str) -> None:
    """bf16 subnormals among the inputs: nothing but the flush of a sum below 2^-126 may differ."""
    x = torch.full((3, 64), 2.0**-130).to(BF16).to(device)
    weight = torch.full((16, 64), 2.0**20).to(BF16).to(device)
    assert torch.equal(op(x, weight).double(), product(x, weight))


# Bits


@pytest.mark.parametrize("tokens", [1, 9, 33])
def test_run_to_run(device: str, tokens: int) -> None:
    x, weight = inputs(tokens, 528, 2048, device)
    first = op(x, weight)
    for _ in range(20):
        same_bits(op(x, weight), first)


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 33, 64])
def test_packed_strided_and_unaligned_x_give_the_same_bits(device: str, tokens: int) -> None:
    x, weight = inputs(tokens, 528, 1536, device)
    packed = op(x, weight)
    for stride, shift in ((1544, 0), (1537, 0), (1536, 2), (1536, 16), (3072, 8)):
        other = guarded(x.cpu(), device, strides=(stride, 1), shift=shift)
        same_bits(op(other, weight), packed, f"row stride {stride}, {shift} bytes off")


def test_batch_invariant(device: str) -> None:
    """A row's bits depend neither on M, nor on its place, nor on the other rows."""
    for n, k in ((528, 2048), (40, 7168)):
        x, weight = inputs(64, n, k, device)
        alone = torch.cat([op(x[i : i + 1], weight, batch_invariant=True) for i in range(64)])
        for tokens in range(1, 65):
            some = x[64 - tokens :]
            same_bits(op(some, weight, batch_invariant=True), alone[64 - tokens :], f"M = {tokens}")


@pytest.mark.gpu
@pytest.mark.parametrize("projection", projections.shapes()[::5], ids=lambda p: f"{p.n}x{p.k}")
def test_batch_invariant_projections(projection: projections.Projection) -> None:
    x = normal((64, projection.k), 1, "cuda")
    weight = normal((projection.n, projection.k), 2, "cuda")
    whole = op(x, weight, batch_invariant=True)
    assert_product(whole, x, weight)
    for tokens in TOKENS:
        same_bits(op(x[:tokens], weight, batch_invariant=True), whole[:tokens], f"M = {tokens}")


def test_the_reference_gives_the_same_bits_for_every_number_of_tokens() -> None:
    """Also without being asked, and where the weight is widened in several parts."""
    x, weight = normal((64, 7168), 1), normal((1200, 7168), 2)
    whole = op(x, weight)
    for tokens in TOKENS:
        same_bits(op(x[:tokens], weight), whole[:tokens], f"M = {tokens}")


# The public signature


@pytest.mark.parametrize("enable_pdl", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 17])
def test_the_public_signature(device: str, tokens: int, enable_pdl: bool) -> None:
    x, weight = inputs(tokens, 528, 1536, device)
    box = Guarded((tokens, 528), BF16, device)
    before = box.snapshot()
    assert k3cupy.dsv3_fused_a_gemm(box.tensor, x, weight.T, enable_pdl) is None
    check_guards(box, before)
    same_bits(box.tensor, op(x, weight))


def test_the_public_signature_has_its_own_plans(device: str) -> None:
    """A square weight fits both signatures, and means another product in each."""
    x, weight = inputs(4, 64, 64, device)
    out = torch.empty(4, 64, dtype=BF16, device=device)
    want = op(x, weight, out).clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^mat_b: expected"):
            transposed_op(x, weight, out)
    transposed_op(x, weight.T, out)
    same_bits(out, want)
