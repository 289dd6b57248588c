"""The skinny GEMM among dependent launches: real chains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemm_helpers import assert_product, normal
from helpers import BF16
from pdl_helpers import wrong_values_of_a_chain
from skinny_helpers import op
from stream_helpers import captured

import k3cupy

pytestmark = pytest.mark.gpu


def test_products_that_feed_products_of_both_kinds() -> None:
    """Each begins before its predecessor ends; a result is an x, a residual, and then a weight."""
    first, second = normal((2048, 512), 1, "cuda"), normal((512, 2048), 2, "cuda")
    x = normal((8, 512), 3, "cuda")
    a, b, c, d = (torch.empty(8, n, dtype=BF16, device="cuda") for n in (2048, 512, 512, 8))

    def chain(**options: Any) -> None:
        op(x, first, out=a, **options)
        op(a, second, x, out=b, **options)
        k3cupy.fused_a_gemm(a, second, out=c, residual=b, **options)
        op(b, c, out=d, **options)  # what the product before wrote is the weight here

    assert wrong_values_of_a_chain(chain, x, (a, b, c, d)) == 0
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
        op(mqa_q.view(tokens, -1), back, stream, out=stream, weight_is_static=True, **options)
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
