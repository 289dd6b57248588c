"""vLLM's operators on a GPU, in a fake vLLM with slow kernels of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import slow_kernels
import torch
from gemm_helpers import fresh_plans
from vllm_helpers import Worker, call_of, imported, vllm

import k3cupy
from k3cupy.engines import vllm_facts as facts

__all__ = ["vllm"]  # the fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not hasattr(torch.library, "get_kernel"), reason="this PyTorch keeps no kernel to hand back"
    ),
]
INSERTS = [name for name in facts.OPERATORS if name.endswith("insert")]
FORMS = [(name, False) for name in facts.OPERATORS] + [(name, True) for name in INSERTS]
DECODE = "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert"
LINEAR = facts.target_of(facts.LINEAR)


@pytest.fixture
def on_gpu(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine, with operators that have kernels for CUDA alone."""
    monkeypatch.setattr(vllm, "_KEY", "CUDA")
    monkeypatch.setattr(slow_kernels, "KEYS", ["CUDA"])
    return vllm


@pytest.mark.parametrize(("name", "rope"), FORMS)
def test_an_operator_is_served(name: str, rope: bool, on_gpu: Any) -> None:
    imported()
    call = call_of(name, rope=rope, device="cuda")
    want = call()
    on_gpu.install(name)
    again = call_of(name, rope=rope, device="cuda")
    got = again()
    assert slow_kernels.CALLS[name] == 1
    if name == facts.GEMM:  # sums in another order
        torch.testing.assert_close(again.written[0], call.written[0], rtol=2**-7, atol=2**-4)
    else:
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)
    row = on_gpu.report()[name]
    assert (row.served, dict(row.handed_back)) == (1, {})


def test_a_capture_before_and_behind_the_first_call(on_gpu: Any, tmp_path: Path) -> None:
    """Before, vLLM's own kernel is captured and counted; behind it ours is. Replays read anew."""
    imported()
    on_gpu.install(facts.GEMM)
    call = call_of(facts.GEMM, device="cuda")
    output, mat_a, mat_b, _ = call.args
    (mat_a.float() @ mat_b.float()).to(output.dtype)  # cuBLAS is ready
    with fresh_plans(tmp_path):
        for served in (0, 2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call.run()
            output.zero_()
            mat_a.mul_(2)
            graph.replay()
            torch.cuda.synchronize()
            want = (mat_a.float() @ mat_b.float()).to(output.dtype)
            torch.testing.assert_close(output, want, rtol=2**-7, atol=2**-3)
            row = on_gpu.report()[facts.GEMM]
            assert row.served == served
            assert sum(row.handed_back.values()) == 1
            call.run()
    assert "captur" in next(iter(on_gpu.report()[facts.GEMM].handed_back))


@pytest.mark.usefixtures("fresh_counts")
def test_a_compiled_layer_runs_our_kernel(on_gpu: Any) -> None:
    on_gpu.install(LINEAR)
    base = imported(facts.LINEAR).LinearBase
    layer = base(torch.randn(2304, 1536).bfloat16()).cuda()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for count in (4, 65):
            x = torch.randn(count, 1536, device="cuda").bfloat16()
            want = torch.nn.functional.linear(x, layer.weight)
            torch.testing.assert_close(compiled(x), want, rtol=2**-6, atol=2**-2)
    kernels = {row.num_tokens: row.choice.kernel for row in k3cupy.dispatch_report() if row.calls}
    assert set(kernels) == {4, 65}
    assert kernels[65] == "linear"


def test_a_worker_that_was_warmed_up_captures_our_kernels(on_gpu: Any, tmp_path: Path) -> None:
    """Without any call before: the sizes that graphs are captured of are ready, and the decode."""
    imported()
    decode = call_of(DECODE, rope=True, device="cuda")
    want = decode()
    on_gpu.install()
    base, mla = imported(facts.LINEAR).LinearBase, imported(facts.DECODE_CONCAT)
    worker = imported("vllm.v1.worker.gpu_worker")
    layer = base(torch.randn(2304, 1536).bfloat16()).cuda()
    attention = mla.MultiHeadLatentAttention("auto", torch.empty(0), rope=True)
    x = torch.randn(4, 1536, device="cuda").bfloat16()
    with fresh_plans(tmp_path), torch.inference_mode():
        worker.start(Worker(torch.nn.ModuleList([layer, attention]), [512, 4, 1]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
            decode.run()
        for written in decode.written:
            written.zero_()
        graph.replay()
        torch.cuda.synchronize()
        expected = torch.nn.functional.linear(x, layer.weight)
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-2)
    report = on_gpu.report()
    assert (report[LINEAR].served, dict(report[LINEAR].handed_back)) == (1, {})
    assert (report[DECODE].served, dict(report[DECODE].handed_back)) == (1, {})
    query, cache = map(oracle.bits, decode.written)
    assert torch.equal(query, want[0])
    assert torch.equal(cache[0, 4], want[1][0, 4])
    assert torch.equal(cache[1, 1], want[1][1, 1])


def test_the_override_costs_at_most_8_us(on_gpu: Any) -> None:
    """Of the host, beside the same call of ours without the operator between."""
    imported()
    on_gpu.install(facts.GEMM)
    output, mat_a, mat_b, _ = call_of(facts.GEMM, device="cuda").args
    operator = torch.ops._C.dsv3_fused_a_gemm
    direct = host_time(lambda: k3cupy.dsv3_fused_a_gemm(output, mat_a, mat_b, True))
    through = host_time(lambda: operator(output, mat_a, mat_b, True))
    print(f"directly {direct * 1e6:.1f} us, through vLLM's operator {through * 1e6:.1f} us")
    assert through - direct < 8e-6


def host_time(call: Callable[[], Any]) -> float:
    """The least time of a call, in seconds, without the wait for the GPU."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call()
        times.append((time.perf_counter() - start) / 100)
    torch.cuda.synchronize()
    return min(times)
