"""k3cupy inside a package that stands for SGLang, on a GPU: graphs, streams, the host's time."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_helpers import assert_product, normal, product
from helpers import BF16, random_values
from sglang_helpers import DECODE, DECODE_FP8, F_B, GEMM, PAGES, Decode, Engine, engine, load
from stream_helpers import captured
from torch import nn

import k3cupy
from k3cupy.engines import sglang

pytestmark = pytest.mark.gpu

__all__ = ["engine"]


def as_sglang_captures(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run twice, then capture: its backend of full graphs does so for every size of batch."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    return captured(run)


def test_the_front_of_a_kda_layer(engine: Engine) -> None:
    """As the model runs it: [f_a | b] and f_b on a side stream, beside the wide projection."""
    calls = engine().calls
    sglang.install()
    gemm = load(GEMM).kimi_k3_tiny_gemm
    qkvg, bfa, f_b = (
        normal(shape, seed, "cuda") for seed, shape in enumerate([(6144, 7168), (144, 7168), F_B])
    )
    side = torch.cuda.Stream()

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        wide = nn.functional.linear(x, qkvg)
        with torch.cuda.stream(side):
            narrow = gemm(x, bfa)
            gate = gemm(narrow[:, :128], f_b)
        main.wait_stream(side)
        return wide, narrow, gate

    for tokens in (16, 8, 4, 1):
        x = normal((tokens, 7168), tokens, "cuda")
        graph, out = as_sglang_captures(lambda: layer(x))  # noqa: B023
        for seed in range(3):
            x.copy_(normal(x.shape, 100 + seed, "cuda"))
            for each in out:
                each.fill_(float("nan"))
            graph.replay()
            for got, given, weight in zip(
                out, (x, x, out[1][:, :128]), (qkvg, bfa, f_b), strict=True
            ):
                want = product(given, weight)  # cuBLAS may round its partial sums
                assert (got.double() - want).norm() < 0.01 * want.norm()
    row = sglang.report()["kimi_k3_tiny_gemm"]
    assert row.served + calls.total() == 4 * 3 * 2
    assert row.served, "no call ran a kernel of ours"
    assert not any("capturing" in reason for reason in row.handed_back)


def test_no_capture_compiles_behind_the_first_call(engine: Engine) -> None:
    """The largest batch comes first, and smaller ones only in a capture."""
    calls = engine().calls
    sglang.install()
    run = load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm
    weight = normal((176, 512), 1, "cuda")
    run(normal((16, 512), 0, "cuda"), weight.T)
    for tokens in range(16, 0, -1):
        x = normal((tokens, 512), tokens, "cuda")
        graph, out = captured(lambda: run(x, weight.T))  # noqa: B023
        graph.replay()
        assert_product(out, x, weight)
    row = sglang.report()["dsv3_fused_a_gemm"]
    assert (row.served, row.handed_back, calls.total()) == (17, {}, 0)


@pytest.mark.parametrize("fp8", [False, True])
def test_the_decode_epilogue_in_a_graph(fp8: bool, engine: Engine) -> None:
    engine()
    sglang.install()
    batch = Decode(32, fp8=fp8, device="cuda")
    graph, query = as_sglang_captures(batch.run)
    for seed in range(3):
        batch.q.copy_(random_values(batch.q.shape, BF16, 10 + seed))
        batch.loc.copy_(torch.randperm(PAGES)[: len(batch.loc)])
        before = batch.storage.clone()
        query.view(torch.uint8).fill_(0xFF)
        graph.replay()
        batch.check(query, before)
    assert sglang.report()[DECODE_FP8 if fp8 else DECODE].handed_back == {}


def test_what_a_hook_costs_on_the_host(engine: Engine) -> None:
    """On top of the direct call, SGLang's own wrapper around the hook included."""
    engine()
    sglang.install()
    load("sglang.srt.runtime_context").publish(False)
    hooked = load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm
    x, weight = normal((4, 128), 1, "cuda"), normal(F_B, 2, "cuda")
    calls = {
        "direct": lambda: k3cupy.fused_a_gemm(x, weight.T.T, weight_is_static=True),
        "hooked": lambda: hooked(x, weight.T),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(20):  # in turn, so that both see the same machine
        for name, call in calls.items():
            torch.cuda.synchronize()
            best[name] = min(best[name], timeit.timeit(call, number=100) / 100 * 1e6)
    print({name: f"{us:.2f} us" for name, us in best.items()})
    assert best["hooked"] - best["direct"] < 8
