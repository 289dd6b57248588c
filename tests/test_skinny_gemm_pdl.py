"""The skinny GEMM among dependent launches: predecessors that write late, and real chains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemm_helpers import assert_product, normal, residual_of
from helpers import BF16
from pdl_helpers import ROUNDS, CopyLate, copy_late, wrong_values
from skinny_helpers import op
from stream_helpers import captured

import k3cupy

pytestmark = pytest.mark.gpu

__all__ = ["copy_late"]

N = 528


@pytest.mark.parametrize("late", ["x", "weight", "both"])
@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("k", [1536, 7168])
def test_a_predecessor_that_writes_late(
    k: int, tokens: int, late: str, copy_late: CopyLate
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
        return op(x, weight, weight_is_static=static)

    wants = [
        op(xs[i if late != "weight" else 0], weights[i if late != "x" else 0], pdl=False)
        for i in (0, 1)
    ]
    assert wrong_values(step, wants) == 0


def test_unaligned_x_that_comes_late(copy_late: CopyLate) -> None:
    weight = normal((N, 1536), 1, "cuda")
    storages = [normal((4, 1544), seed, "cuda") for seed in (3, 4)]
    storage = storages[0].clone()

    def step(i: int) -> torch.Tensor:
        copy_late(storages[i], storage)
        return op(storage[:, 3:1539], weight, weight_is_static=True)

    wants = [op(each[:, 3:1539], weight, pdl=False) for each in storages]
    assert wrong_values(step, wants) == 0


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_residual_that_comes_late(
    tokens: int, in_place: bool, static: bool, copy_late: CopyLate
) -> None:
    """It waits for its producer, whatever was promised about the weight."""
    x, weight = normal((tokens, 1536), 1, "cuda"), normal((N, 1536), 2, "cuda")
    residuals = [residual_of(tokens, N, "cuda", seed=seed) for seed in (3, 4)]
    residual = residuals[0].clone()

    def step(i: int) -> torch.Tensor:
        copy_late(residuals[i], residual)
        out = residual if in_place else None
        return op(x, weight, residual, out, weight_is_static=static).clone()

    wants = [op(x, weight, each, pdl=False) for each in residuals]
    assert wrong_values(step, wants) == 0


def test_a_promise_about_the_preceding_kernel_is_enough(copy_late: CopyLate) -> None:
    """The weight is written late two kernels before: the product between lets nothing overtake."""
    weights = [normal((N, 1536), seed, "cuda") for seed in (1, 2)]
    weight, x = weights[0].clone(), normal((4, 1536), 3, "cuda")
    between = (normal((4, 64), 4, "cuda"), normal((16, 64), 5, "cuda"))

    def step(i: int) -> torch.Tensor:
        copy_late(weights[i], weight)
        op(*between, weight_is_static=True)
        return op(x, weight, weight_is_static=True)

    wants = [op(x, each, pdl=False) for each in weights]
    assert wrong_values(step, wants) == 0


def test_products_that_feed_products_of_both_kinds() -> None:
    """Each begins before its predecessor ends; a result is an x, a residual, and then a weight."""
    first, second = normal((2048, 512), 1, "cuda"), normal((512, 2048), 2, "cuda")
    x = normal((8, 512), 3, "cuda")
    a, b, c, d = (torch.empty(8, n, dtype=BF16, device="cuda") for n in (2048, 512, 512, 8))
    scale = 2**-5

    def chain(**options: Any) -> None:
        op(x, first, out=a, **options)
        op(a, second, x, b, **options)
        k3cupy.fused_a_gemm(a, second, c, residual=b, **options)
        op(b, c, out=d, **options)  # what the product before wrote is the weight here

    chain()
    graph, _ = captured(chain)
    outs = (a, b, c, d)
    wants = [torch.empty_like(t) for t in outs]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for seed in range(ROUNDS):
        x.copy_(normal(x.shape, seed, "cuda") * scale)
        chain(pdl=False)
        for want, tensor in zip(wants, outs, strict=True):
            want.copy_(tensor)
            tensor.fill_(float("nan"))
        graph.replay()
        for want, tensor in zip(wants, outs, strict=True):
            wrong += (want.view(torch.int16) != tensor.view(torch.int16)).sum()
    assert int(wrong) == 0
    assert_product(a, x, first)
    assert_product(b, a, second, x)
    assert_product(c, a, second, b)
    assert_product(d, b, c)


def test_case05_chain_of_gemm_epilogue_and_framework() -> None:
    """2,000 replays with poisoned buffers and new input each time, counted on the device.

    A framework op writes x, the product goes into a [T, 2112] row, the epilogue reads column slices
    of it, a second product adds to a residual in place, and a framework op reads that.
    """
    tokens, heads, k = 8, 4, 1024
    x, weight = normal((tokens, k), 1, "cuda"), normal((2112, k), 2, "cuda")
    back = normal((k, heads * 576), 3, "cuda")
    rows = torch.empty(tokens, 2112, dtype=BF16, device="cuda")
    ql_nope = normal((tokens, heads, 512), 4, "cuda")
    cache = torch.zeros(2, 16, 576, dtype=BF16, device="cuda")
    slots = torch.arange(tokens, device="cuda")
    q_pe = rows[:, : heads * 64].view(tokens, heads, 64)
    mqa_q = torch.empty(tokens, heads, 576, dtype=BF16, device="cuda")
    stream = torch.empty(tokens, k, dtype=BF16, device="cuda")
    seen = torch.empty(tokens, k, dtype=torch.int16, device="cuda")

    def step(**options: Any) -> None:
        torch.mul(x, 0.5, out=stream)
        op(stream, weight, out=rows, weight_is_static=True, **options)
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
            ql_nope, q_pe, rows[:, 1536:2048], rows[:, 2048:], cache, slots, out=mqa_q
        )
        op(mqa_q.view(tokens, -1), back, stream, stream, weight_is_static=True, **options)
        torch.add(stream.view(torch.int16), 0, out=seen)

    step()
    graph, _ = captured(step)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    want = torch.empty_like(seen)
    for i in range(2000):
        x.copy_(x.roll(1, 1) if i % 7 else -x)
        step(pdl=False)
        want.copy_(seen)
        for tensor in (rows, mqa_q, stream):
            tensor.fill_(float("nan"))
        seen.zero_()
        graph.replay()
        wrong += (seen != want).sum()
    assert int(wrong) == 0
