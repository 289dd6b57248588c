"""The MLA decode epilogue in time: streams, CUDA graphs, and the chain of dependent launches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from helpers import (
    BF16,
    CACHE_KINDS,
    FP16,
    Call,
    guarded,
    make_call,
    op,
    random_values,
    run_and_check,
    run_child,
)
from stream_helpers import SLEEP_CYCLES, STREAM_FORMS, captured

import k3cupy

pytestmark = pytest.mark.gpu

ROUNDS = 100


def new_values(call: Call, seed: int) -> torch.Tensor:
    return random_values(call.ql_nope.shape, call.ql_nope.dtype, 1000 + seed).cuda()


# Streams


def test_case17_current_stream_is_used_without_any_synchronisation() -> None:
    """Sleep, write the input, call, read: all on a side stream, nothing waits on the host."""
    call = make_call(16, 3, device="cuda")
    call.run()
    values = [new_values(call, i) for i in range(ROUNDS)]
    torch.cuda.synchronize()
    seen = []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for value in values:
            torch.cuda._sleep(SLEEP_CYCLES)
            call.ql_nope.copy_(value)
            seen.append(call.run()[..., :512].clone())
    torch.cuda.synchronize()
    for i, (got, want) in enumerate(zip(seen, values, strict=True)):
        assert torch.equal(oracle.bits(got), oracle.bits(want)), f"stale input in round {i}"


@pytest.mark.parametrize("give", STREAM_FORMS)
def test_case17_explicit_stream(give: Callable[[torch.cuda.Stream], Any]) -> None:
    call = make_call(16, 3, device="cuda")
    call.run()
    side = torch.cuda.Stream()
    stream = give(side)
    for i in range(10):
        value = new_values(call, i)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            call.ql_nope.copy_(value)
        mqa_q = call.run(stream=stream)
        side.synchronize()
        assert torch.equal(oracle.bits(mqa_q)[..., :512], oracle.bits(value))


@pytest.mark.parametrize("handle", [0, 1, 2], ids=["default", "legacy", "per-thread"])
def test_case17_special_stream_handles(handle: int) -> None:
    call = make_call(16, 3, device="cuda")
    before = call.cache.snapshot()
    torch.cuda.synchronize()
    mqa_q = call.run(stream=handle)
    torch.cuda.synchronize()
    call.check(before, mqa_q)


def test_case17_cupy_stream() -> None:
    cupy = pytest.importorskip("cupy")
    call = make_call(16, 3, dtype=FP16, device="cuda")
    arrays = {
        name: cupy.from_dlpack(value) if isinstance(value, torch.Tensor) else value
        for name, value in call.arguments().items()
    }
    op(**arrays)
    values = [cupy.from_dlpack(new_values(call, i)) for i in range(20)]
    torch.cuda.synchronize()
    seen = []
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        for value in values:
            with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
                torch.cuda._sleep(SLEEP_CYCLES)
            arrays["ql_nope"][...] = value
            seen.append(op(**arrays)[..., :512].copy())
    side.synchronize()
    for got, want in zip(seen, values, strict=True):
        assert bool((got.view(cupy.int16) == want.view(cupy.int16)).all())


def test_case29_inputs_dropped_right_after_a_call_on_an_explicit_stream() -> None:
    """Their memory is not given to another tensor before the kernel has read it."""
    call = make_call(64, 12, device="cuda")
    call.run()
    want = call.expected_query().bits
    side = torch.cuda.Stream()
    for _ in range(10):
        inputs = {name: getattr(call, name).clone() for name in ("ql_nope", "q_pe")}
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20 * SLEEP_CYCLES)
        mqa_q = call.run(**inputs, stream=side.cuda_stream)
        shapes = [tensor.shape for tensor in inputs.values()]
        del inputs
        reused = [torch.full(shape, float("nan"), dtype=BF16, device="cuda") for shape in shapes]
        torch.cuda.synchronize()
        oracle.assert_same_bits(oracle.bits(mqa_q), want, "mqa_q")
        del reused


def test_two_streams_at_the_same_time() -> None:
    calls = [make_call(64, 12, cache=kind, device="cuda", seed=7) for kind in ("same", "ds_mla")]
    before = [call.cache.snapshot() for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    outputs: list[list[torch.Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for call, stream, into in zip(calls, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                into.append(call.run())
    torch.cuda.synchronize()
    for call, into, saved in zip(calls, outputs, before, strict=True):
        call.check_cache(saved)
        for mqa_q in into[:: ROUNDS // 4]:
            call.check_query(mqa_q)


# Graphs


@pytest.mark.parametrize("rope", [False, True], ids=["copy", "rope"])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_graph_replay_sees_new_inputs(kind: str, rope: bool) -> None:
    """Values, slots, positions and scales are read when the graph runs."""
    call = make_call(
        33, 3, cache=kind, q_fp8=kind == "fp8", rope=rope, scale_tensors=True, device="cuda"
    )
    call.run()
    graph, mqa_q = captured(call.run)
    for seed in range(1, 4):
        fresh = make_call(
            33, 3, cache=kind, q_fp8=kind == "fp8", rope=rope, scale_tensors=True, device="cuda",
            seed=seed, q_scale_inv=0.3 * seed, cache_scale_inv=2.0 / seed,
        )  # fmt: skip
        for name in ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping"):
            getattr(call, name).copy_(getattr(fresh, name))
        for name, value in call.options.items():
            if isinstance(value, torch.Tensor):
                value.copy_(fresh.options[name])
        before = call.cache.snapshot()
        mqa_q.view(torch.uint8).fill_(0xEE)
        graph.replay()
        call.check(before, mqa_q)


def test_case15_no_tokens_in_a_graph() -> None:
    call = make_call(0, 12, device="cuda")
    call.run()
    nothing = torch.zeros(1, device="cuda")

    def run() -> Any:
        nothing.add_(1)
        return call.run()

    graph, mqa_q = captured(run)
    before = call.cache.snapshot()
    graph.replay()
    call.check(before, mqa_q)


def test_graph_with_out_and_an_explicit_configuration() -> None:
    call = make_call(16, 3, device="cuda")
    out = torch.zeros(16, 3, 576, dtype=BF16, device="cuda")
    for split in (0, 1, 3):
        call.run(out=out, split=split)
        graph, _ = captured(lambda split=split: call.run(out=out, split=split))
        before = call.cache.snapshot()
        out.zero_()
        graph.replay()
        call.check(before, out)


def _captures_from_cold() -> None:
    call = make_call(1, 12, device="cuda")

    def attempt(call: Call, must_fail: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        # A graph that the collector frees during a capture would spoil it.
        gc.collect()
        error = None
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")
            try:
                call.run()
            except k3cupy.CaptureError as caught:
                error = str(caught)
        if error is not None:
            assert "warmup" in error
        assert error is not None or not must_fail
        graph.replay()
        torch.cuda.synchronize()
        run_and_check(call)
        graph, mqa_q = captured(call.run)
        before = call.cache.snapshot()
        graph.replay()
        call.check(before, mqa_q)

    torch.cuda.synchronize()
    attempt(call, must_fail=True)
    attempt(make_call(16, 12, device="cuda"), must_fail=False)
    attempt(make_call(16, 12, cache="fp8", device="cuda"), must_fail=True)
    attempt(make_call(16, 12, cache="fp8", scale_tensors=True, device="cuda"), must_fail=False)
    attempt(make_call(1, 12, q_fp8=True, q_scale_inv=0.5, device="cuda"), must_fail=True)
    assert issubclass(k3cupy.CaptureError, RuntimeError)


def test_case18_capture_of_what_was_never_compiled() -> None:
    run_child(_captures_from_cold)


def _warmup_then_capture() -> None:
    k3cupy.warmup("mla_decode", dtype="bfloat16", kv_cache="bf16", progress=False)
    call = make_call(16, 12, device="cuda")
    torch.cuda.synchronize()
    graph, mqa_q = captured(call.run)
    before = call.cache.snapshot()
    graph.replay()
    call.check(before, mqa_q)


def test_case18_warmup_makes_capture_possible() -> None:
    run_child(_warmup_then_capture)


# The chain of case 5


@pytest.mark.parametrize("padding_only", [False, True], ids=["rows", "all-padding"])
@pytest.mark.parametrize("kind", ["same", "fp8"])
def test_case05_chain_of_dependent_launches(kind: str, padding_only: bool) -> None:
    """GEMM, epilogue, framework op, 2,000 replays with poisoned buffers and new input each time.

    Counted on the device: elements that the consumer saw and the producer did not write.
    """
    tokens, heads = 16, 12
    call = make_call(tokens, heads, cache=kind, q_fp8=kind == "fp8", device="cuda")
    slots = torch.full((tokens,), -1) if padding_only else torch.arange(tokens)
    call.slot_mapping.copy_(slots)
    q = torch.randn(heads, tokens, 128, device="cuda").to(BF16)
    weight = torch.randn(heads, 128, 512, device="cuda").to(BF16)
    product = torch.empty(heads, tokens, 512, dtype=BF16, device="cuda")
    call = call.with_tensors(ql_nope=product.transpose(0, 1))
    code = torch.int8 if kind == "fp8" else torch.int16
    width = torch.float8_e4m3fn if kind == "fp8" else BF16
    mqa_q = torch.empty(tokens, heads, 576, dtype=width, device="cuda")
    seen = torch.empty(tokens, heads, 576, dtype=code, device="cuda")
    rows_seen = torch.empty(tokens, 576, dtype=code, device="cuda")
    cache_rows = call.cache.tensor.view(code).view(-1, 576)[:tokens]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    call.options = {
        name: guarded(torch.tensor([value]), "cuda") for name, value in call.options.items()
    }

    def step() -> None:
        torch.bmm(q, weight, out=product)
        call.run(out=mqa_q)
        torch.add(mqa_q.view(code), 0, out=seen)
        call.run(out=mqa_q)
        torch.add(cache_rows, 0, out=rows_seen)

    def expected(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return x.view(code)
        return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(code)

    step()
    graph, _ = captured(step)
    poison = cache_rows.clone()
    for i in range(2000):
        q.copy_(q.roll(1, 1) if i % 7 else -q)
        call.kv_c_normed.copy_(call.kv_c_normed.roll(1, 0))
        mqa_q.view(code).fill_(0x55)
        product.fill_(float("nan"))
        cache_rows.copy_(poison)
        graph.replay()
        want = expected(torch.cat((call.ql_nope, call.q_pe), -1), call.options.get("q_scale_inv"))
        wrong += (seen != want).sum()
        rows = expected(
            torch.cat((call.kv_c_normed, call.k_pe), -1), call.options.get("cache_scale_inv")
        )
        wrong += (rows_seen != (poison if padding_only else rows)).sum()
    assert int(wrong) == 0


def test_promise_in_the_chain() -> None:
    """With kv_inputs_ready the cache rows may be early, and the query rows still wait."""
    tokens, heads = 16, 12
    call = make_call(tokens, heads, slots=torch.arange(tokens), device="cuda")
    product = torch.empty(heads, tokens, 512, dtype=BF16, device="cuda")
    q = torch.randn(heads, tokens, 128, device="cuda").to(BF16)
    weight = torch.randn(heads, 128, 512, device="cuda").to(BF16)
    call = call.with_tensors(ql_nope=product.transpose(0, 1))
    before = call.cache.snapshot()

    def step() -> Any:
        torch.bmm(q, weight, out=product)
        return call.run(kv_inputs_ready=True)

    step()
    torch.cuda.synchronize()
    graph, mqa_q = captured(step)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        q.mul_(-1)
        product.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        wrong += (mqa_q[..., :512] != call.ql_nope).sum()
    assert int(wrong) == 0
    call.check(before, mqa_q)
