"""The fused-A GEMM among dependent launches: real chains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemm_helpers import assert_product, normal, op
from helpers import BF16
from pdl_helpers import wrong_values_of_a_chain
from stream_helpers import captured

import k3cupy

pytestmark = pytest.mark.gpu


def test_products_that_feed_products() -> None:
    """Each begins before its predecessor ends; a result is an x, and then a weight."""
    first, second = normal((2048, 512), 1, "cuda"), normal((64, 2048), 2, "cuda")
    x = normal((64, 512), 3, "cuda")
    a, b, c = (torch.empty(64, n, dtype=BF16, device="cuda") for n in (2048, 64, 64))

    def chain(**options: Any) -> None:
        op(x, first, out=a, **options)
        op(a, second, out=b, **options)
        op(second, a, out=c, **options)  # what the first product wrote is the weight here

    assert wrong_values_of_a_chain(chain, x, (a, b, c)) == 0
    assert_product(a, x, first)
    assert_product(b, a, second)
    assert_product(c, second, a)


@pytest.mark.parametrize("padding_only", [False, True], ids=["rows", "all-padding"])
def test_case05_chain_of_gemm_epilogue_and_framework(padding_only: bool) -> None:
    """2,000 replays with poisoned buffers and new input each time, counted on the device.

    The GEMM's output is a [T, 2112] row of q_a, latent and RoPE parts, of which the epilogue reads
    column slices; then a framework op reads what the epilogue wrote.
    """
    tokens, heads, k = 16, 4, 1024
    x, weight = normal((tokens, k), 1, "cuda"), normal((2112, k), 2, "cuda")
    gemm = torch.empty(tokens, 2112, dtype=BF16, device="cuda")
    ql_nope = normal((tokens, heads, 512), 3, "cuda")
    cache = torch.zeros(2, 16, 576, dtype=BF16, device="cuda")
    rows = cache.view(-1, 576)[:tokens]
    slots = torch.arange(tokens, device="cuda")
    if padding_only:
        slots.fill_(-1)
    q_pe = gemm[:, : heads * 64].view(tokens, heads, 64)
    mqa_q = torch.empty(tokens, heads, 576, dtype=BF16, device="cuda")
    seen = torch.empty(tokens, heads, 576, dtype=torch.int16, device="cuda")
    rows_seen = torch.empty(tokens, 576, dtype=torch.int16, device="cuda")

    def step() -> None:
        op(x, weight, out=gemm, weight_is_static=True)
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
            ql_nope, q_pe, gemm[:, 1536:2048], gemm[:, 2048:], cache, slots, out=mqa_q
        )
        torch.add(mqa_q.view(torch.int16), 0, out=seen)
        torch.add(rows.view(torch.int16), 0, out=rows_seen)

    step()
    graph, _ = captured(step)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    poison = rows.clone().fill_(5.0)
    want = torch.empty_like(gemm)
    for i in range(2000):
        x.copy_(x.roll(1, 1) if i % 7 else -x)
        op(x, weight, out=want, pdl=False)
        gemm.fill_(float("nan"))
        mqa_q.fill_(float("nan"))
        rows.copy_(poison)
        graph.replay()
        query = torch.cat((ql_nope, want[:, : heads * 64].view(tokens, heads, 64)), -1)
        wrong += (seen != query.view(torch.int16)).sum()
        inserted = poison if padding_only else want[:, 1536:]
        wrong += (rows_seen != inserted.contiguous().view(torch.int16)).sum()
    assert int(wrong) == 0
