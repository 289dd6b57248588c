"""The skinny GEMM: odd shapes, fp16 sums, subnormals, and agreement with the other GEMM."""

from __future__ import annotations

import pytest
import torch
from gemm_helpers import inputs, product, residual_of, same_bits
from helpers import BF16, FP16
from skinny_helpers import DTYPES, TOKENS, op, run_and_check

import k3cupy

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


# Values: on the CPU, any shape is a property in the tests of both GEMMs


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("tokens", TOKENS)
def test_odd_shapes(tokens: int, dtype: torch.dtype) -> None:
    for n, k in ODD_SHAPES:
        x, weight = inputs(tokens, n, k, "cuda", seed=n + k, dtype=dtype)
        run_and_check(x, weight)
        run_and_check(x, weight, residual=residual_of(tokens, n, "cuda", dtype=dtype))


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_small_projections(device: str, tokens: int) -> None:
    for n, k in SMALL_PROJECTIONS:
        if device == "cpu" and tokens * n * k > 1 << 21:
            continue
        x, weight = inputs(tokens, n, k, device, seed=n)
        run_and_check(x, weight, weight_is_static=True)


# Special values


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


def test_both_gemms_agree_on_the_cpu() -> None:
    x, weight = inputs(8, 100, 1536)
    residual = residual_of(8, 100)
    same_bits(op(x, weight, residual), k3cupy.fused_a_gemm(x, weight, residual=residual))
