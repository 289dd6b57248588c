"""Both GEMMs among dependent launches: predecessors that write late."""

from __future__ import annotations

import pytest
import torch
from gemm_helpers import GEMMS_AND_TOKENS, Gemm, normal, residual_of
from pdl_helpers import CopyLate, copy_late, wrong_values

pytestmark = pytest.mark.gpu

__all__ = ["copy_late"]

N = 528


@pytest.mark.parametrize("late", ["x", "weight", "both"])
@pytest.mark.parametrize("k", [1536, 7168])
@pytest.mark.parametrize(("gemm", "tokens"), GEMMS_AND_TOKENS)
def test_a_predecessor_that_writes_late(
    gemm: Gemm, tokens: int, k: int, late: str, copy_late: CopyLate
) -> None:
    """x may always come late, the weight unless it was promised."""
    weights = [normal((N, k), seed, "cuda") for seed in (1, 2)]
    xs = [normal((tokens, k), seed, "cuda") for seed in (3, 4)]
    x, weight = xs[0].clone(), weights[0].clone()
    static = late == "x"

    def step(i: int) -> torch.Tensor:
        if late != "x":
            copy_late(weights[i], weight)
        if late != "weight":
            copy_late(xs[i], x)
        return gemm(x, weight, weight_is_static=static)

    wants = [
        gemm(xs[i if late != "weight" else 0], weights[i if late != "x" else 0], pdl=False)
        for i in (0, 1)
    ]
    assert wrong_values(step, wants) == 0


def test_unaligned_x_that_comes_late(gemm: Gemm, copy_late: CopyLate) -> None:
    weight = normal((N, 1536), 1, "cuda")
    storages = [normal((4, 1544), seed, "cuda") for seed in (3, 4)]
    storage = storages[0].clone()

    def step(i: int) -> torch.Tensor:
        copy_late(storages[i], storage)
        return gemm(storage[:, 3:1539], weight, weight_is_static=True)

    wants = [gemm(each[:, 3:1539], weight, pdl=False) for each in storages]
    assert wrong_values(step, wants) == 0


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("gemm", "tokens"), GEMMS_AND_TOKENS)
def test_a_residual_that_comes_late(
    gemm: Gemm, tokens: int, in_place: bool, static: bool, copy_late: CopyLate
) -> None:
    """It waits for its producer, whatever was promised about the weight."""
    x, weight = normal((tokens, 1536), 1, "cuda"), normal((N, 1536), 2, "cuda")
    residuals = [residual_of(tokens, N, "cuda", seed=seed) for seed in (3, 4)]
    residual = residuals[0].clone()

    def step(i: int) -> torch.Tensor:
        copy_late(residuals[i], residual)
        out = residual if in_place else None
        return gemm(x, weight, residual=residual, out=out, weight_is_static=static).clone()

    wants = [gemm(x, weight, residual=each, pdl=False) for each in residuals]
    assert wrong_values(step, wants) == 0


def test_a_promise_about_the_preceding_kernel_is_enough(gemm: Gemm, copy_late: CopyLate) -> None:
    """The weight is written late two kernels before: the product between lets nothing overtake."""
    weights = [normal((N, 1536), seed, "cuda") for seed in (1, 2)]
    weight, x = weights[0].clone(), normal((4, 1536), 3, "cuda")
    between = (normal((4, 64), 4, "cuda"), normal((16, 64), 5, "cuda"))

    def step(i: int) -> torch.Tensor:
        copy_late(weights[i], weight)
        gemm(*between, weight_is_static=True)
        return gemm(x, weight, weight_is_static=True)

    wants = [gemm(x, each, pdl=False) for each in weights]
    assert wrong_values(step, wants) == 0
