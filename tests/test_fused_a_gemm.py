"""The fused-A GEMM: odd shapes, subnormals, batch invariance and the public signature."""

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
from helpers import BF16, Guarded, check_guards, refused

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


# Values: on the CPU, any shape is a property in the tests of both GEMMs


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS)
def test_odd_shapes(tokens: int) -> None:
    for n, k in ODD_SHAPES:
        x, weight = inputs(tokens, n, k, "cuda", seed=n + k)
        run_and_check(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_a_shape_that_no_tile_divides(tokens: int) -> None:
    x, weight = inputs(tokens, 2096, 8448, "cuda")
    run_and_check(x, weight)


@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_small_projections(device: str, tokens: int) -> None:
    for n, k in SMALL_PROJECTIONS:
        if device == "cpu" and tokens * n * k > 1 << 21:
            continue
        x, weight = inputs(tokens, n, k, device, seed=n)
        run_and_check(x, weight)


# Special values


def test_subnormal_and_tiny_values(device: str) -> None:
    """bf16 subnormals among the inputs."""
    x = torch.full((3, 64), 2.0**-130).to(BF16).to(device)
    weight = torch.full((16, 64), 2.0**20).to(BF16).to(device)
    assert torch.equal(op(x, weight).double(), product(x, weight))


# Bits


def test_batch_invariant(device: str) -> None:
    """A row's bits depend neither on M, nor on its place, nor on the other rows."""
    every = range(1, 65) if device == "cuda" else (1, 2, 8, 9, 33, 64)
    for n, k in ((528, 2048), (40, 7168)) if device == "cuda" else ((100, 512),):
        x, weight = inputs(64, n, k, device)
        alone = torch.cat([op(x[i : i + 1], weight, batch_invariant=True) for i in range(64)])
        for tokens in every:
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


# The public signature


@pytest.mark.parametrize("tokens", [1, 16, 17])
def test_the_public_signature(device: str, tokens: int) -> None:
    n, k = (528, 1536) if device == "cuda" else (52, 256)
    x, weight = inputs(tokens, n, k, device)
    want = op(x, weight)
    for enable_pdl in (False, True):
        box = Guarded((tokens, n), BF16, device)
        before = box.snapshot()
        assert k3cupy.dsv3_fused_a_gemm(box.tensor, x, weight.T, enable_pdl) is None
        check_guards(box, before)
        same_bits(box.tensor, want)


def test_the_public_signature_has_its_own_plans(device: str) -> None:
    """A square weight fits both signatures, and means another product in each."""
    x, weight = inputs(4, 64, 64, device)
    out = torch.empty(4, 64, dtype=BF16, device=device)
    want = op(x, weight, out=out).clone()
    for _ in range(2):
        wrong = {"mat_a": x, "mat_b": weight, "output": out}
        refused(wrong, "mat_b", r"strides \(64, 1\)", operation=transposed_op)
    transposed_op(x, weight.T, out)
    same_bits(out, want)


def test_case15_no_tokens_in_the_public_signature(device: str) -> None:
    weight = normal((48, 128), 0).to(device)
    x, out = (torch.empty(0, width, dtype=BF16, device=device) for width in (128, 48))
    assert transposed_op(x, weight.T, out) is None
