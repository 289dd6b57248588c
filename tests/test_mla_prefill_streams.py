"""The prefill and context epilogues in time: streams, CUDA graphs, chains of dependent launches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from helpers import BF16, E4M3, FP16, random_values, run_child
from mla_helpers import (
    CONCATS,
    INPUTS,
    INSERTS,
    KINDS,
    NOPE,
    MlaCall,
    as_list,
    as_out,
    make_prefill,
    run_and_check,
)
from stream_helpers import SLEEP_CYCLES, STREAM_FORMS, captured

import k3cupy

pytestmark = pytest.mark.gpu

ROUNDS = 60


def new_values(call: MlaCall, seed: int) -> torch.Tensor:
    return random_values(call.args["k_nope"].shape, call.dtype, 1000 + seed).cuda()


# Streams


@pytest.mark.parametrize("kind", ["insert", "concat"])
def test_case17_current_stream_is_used_without_any_synchronisation(kind: str) -> None:
    """Sleep, write the input, call, read: all on a side stream, nothing waits on the host."""
    call = make_prefill(kind, 16, 3, device="cuda")
    call.run()
    values = [new_values(call, i) for i in range(ROUNDS)]
    torch.cuda.synchronize()
    seen = []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for value in values:
            torch.cuda._sleep(SLEEP_CYCLES)
            call.args["k_nope"].copy_(value)
            seen.append(call.run()[..., :NOPE].clone())
    torch.cuda.synchronize()
    for i, (got, want) in enumerate(zip(seen, values, strict=True)):
        assert torch.equal(oracle.bits(got), oracle.bits(want)), f"stale input in round {i}"


@pytest.mark.parametrize("give", STREAM_FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_case17_explicit_stream(kind: str, give: Callable[[torch.cuda.Stream], Any]) -> None:
    call = make_prefill(kind, 16, 3, rope=kind in INSERTS, device="cuda")
    run_and_check(call)
    side = torch.cuda.Stream()
    stream = give(side)
    for i in range(4):
        value = new_values(call, i)
        before = call.snapshot()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            call.args["k_nope"].copy_(value)
        result = call.run(stream=stream)
        side.synchronize()
        call.check(before, result)


@pytest.mark.parametrize("handle", [0, 1, 2], ids=["default", "legacy", "per-thread"])
def test_case17_special_stream_handles(handle: int) -> None:
    for kind in KINDS:
        call = make_prefill(kind, 16, 3, device="cuda")
        before = call.snapshot()
        torch.cuda.synchronize()
        result = call.run(stream=handle)
        torch.cuda.synchronize()
        call.check(before, result)


def test_case17_cupy_stream() -> None:
    cupy = pytest.importorskip("cupy")
    call = make_prefill("concat", 16, 3, dtype=FP16, device="cuda")
    arrays = {name: cupy.from_dlpack(value) for name, value in call.args.items()}
    call.run(**arrays)
    values = [cupy.from_dlpack(new_values(call, i)) for i in range(20)]
    torch.cuda.synchronize()
    seen = []
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        for value in values:
            with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
                torch.cuda._sleep(SLEEP_CYCLES)
            arrays["k_nope"][...] = value
            seen.append(call.run(**arrays)[..., :NOPE].copy())
    side.synchronize()
    for got, want in zip(seen, values, strict=True):
        assert bool((got.view(cupy.int16) == want.view(cupy.int16)).all())


@pytest.mark.parametrize("kind", ["insert", "fp8", "concat_fp8"])
def test_case29_inputs_dropped_right_after_a_call_on_an_explicit_stream(kind: str) -> None:
    """Their memory is not given to another tensor before the kernel has read it."""
    call = make_prefill(kind, 64, 12, device="cuda")
    call.run()
    side = torch.cuda.Stream()
    names = [name for name in ("k_nope", "k_pe", "v") if name in call.args]
    for _ in range(8):
        inputs = {name: call.args[name].clone() for name in names}
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20 * SLEEP_CYCLES)
        result = call.run(**inputs, stream=side.cuda_stream)
        shapes = [tensor.shape for tensor in inputs.values()]
        del inputs
        reused = [torch.full(shape, float("nan"), dtype=BF16, device="cuda") for shape in shapes]
        torch.cuda.synchronize()
        call.check_outputs(result)
        del reused


def test_two_streams_at_the_same_time() -> None:
    calls = [make_prefill(kind, 64, 12, device="cuda", seed=7) for kind in KINDS]
    before = [call.snapshot() for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    results: list[list[Any]] = [[] for _ in calls]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for call, stream, into in zip(calls, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(call.run())
    torch.cuda.synchronize()
    for call, into, saved in zip(calls, results, before, strict=True):
        for result in into[:: ROUNDS // 4]:
            call.check(saved, result)


# Graphs


@pytest.mark.parametrize("kind", KINDS)
def test_graph_replay_sees_new_inputs(kind: str) -> None:
    """Values, slots, positions and scales are read when the graph runs, and q is turned again."""
    for rope in (False, True) if kind in INSERTS else (False,):
        call = make_prefill(kind, 33, 3, rope=rope, scale_tensors=True, device="cuda")
        call.run()
        graph, result = captured(call.run)
        for seed in range(1, 4):
            fresh = make_prefill(
                kind, 33, 3, rope=rope, scale_tensors=True, device="cuda", seed=seed,
                scales=(0.3 * seed, 2.0 / seed, 0.7, 1.0 + seed),
            )  # fmt: skip
            for name, value in fresh.args.items():
                if name != "kv_cache":
                    call.args[name].copy_(value)
            before = call.snapshot()
            for tensor in as_list(result):
                tensor.view(torch.uint8).fill_(0xEE)
            graph.replay()
            call.check(before, result)


@pytest.mark.parametrize("kind", KINDS)
def test_case15_no_tokens_in_a_graph(kind: str) -> None:
    call = make_prefill(kind, 0, 12, rope=kind in INSERTS, device="cuda")
    nothing = torch.zeros(1, device="cuda")

    def run() -> Any:
        nothing.add_(1)
        return call.run()

    run()
    graph, result = captured(run)
    before = call.snapshot()
    graph.replay()
    call.check(before, result)


def test_graph_with_outs() -> None:
    call = make_prefill("fp8", 16, 3, device="cuda")
    outs = tuple(torch.zeros_like(tensor) for tensor in call.run())
    call.run(out=outs)
    graph, _ = captured(lambda: call.run(out=outs))
    before = call.snapshot()
    for tensor in outs:
        tensor.view(torch.uint8).zero_()
    graph.replay()
    call.check(before, outs)


def _captures_from_cold() -> None:
    def attempt(call: MlaCall, must_fail: bool) -> None:
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
        assert error is None or "warmup" in error
        assert error is not None or not must_fail
        graph.replay()
        torch.cuda.synchronize()
        run_and_check(call)
        graph, result = captured(call.run)
        before = call.snapshot()
        graph.replay()
        call.check(before, result)

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    for kind in KINDS:
        attempt(make_prefill(kind, 1, 12, device="cuda"), must_fail=True)
        attempt(make_prefill(kind, 1, 12, device="cuda", seed=1), must_fail=False)
    attempt(make_prefill("fp8", 1, 12, scale_tensors=True, device="cuda"), must_fail=False)
    attempt(make_prefill("insert", 1, 12, rope=True, device="cuda"), must_fail=True)


def test_case18_capture_of_what_was_never_compiled() -> None:
    run_child(_captures_from_cold)


def _warmup_then_capture() -> None:
    assert k3cupy.warmup("mla_prefill", dtype="bfloat16", progress=False) > 0
    for kind, k_pe in (*((kind, None) for kind in KINDS), ("concat_fp8", E4M3)):
        for tokens in (1, 200):
            call = make_prefill(kind, tokens, 12, k_pe=k_pe, device="cuda")
            torch.cuda.synchronize()
            graph, result = captured(call.run)
            before = call.snapshot()
            graph.replay()
            call.check(before, result)


def test_case18_warmup_makes_capture_possible() -> None:
    run_child(_warmup_then_capture)


# The chain of case 5


def framework_result(call: MlaCall) -> list[torch.Tensor]:
    """The outputs as PyTorch makes them, without RoPE."""
    args = call.args
    k_pe = args["k_pe"].reshape(call.tokens, 1, 64).expand(-1, call.heads, -1)
    k = torch.cat((args["k_nope"], k_pe), -1)
    if call.kind in ("insert", "ds_mla", "concat"):
        return [k]
    if call.kind == "concat_fp8":
        return [k.clamp(-448, 448).to(E4M3), args["v"].clamp(-448, 448).to(E4M3)]
    scaled = [
        (x.float() * args[f"{name}_scale_inv"]).clamp(-448, 448).to(E4M3)
        for name, x in (("q", args["q"]), ("k", k), ("v", args["v"]))
    ]
    return scaled


@pytest.mark.parametrize("padding_only", [False, True], ids=["rows", "all-padding"])
@pytest.mark.parametrize("kind", KINDS)
def test_case05_chain_of_dependent_launches(kind: str, padding_only: bool) -> None:
    """GEMM, epilogue, framework op; 500 replays with poisoned buffers and new input each time.

    Counted on the device: elements that the consumer saw and the producer did not write.
    """
    if padding_only and kind in CONCATS:
        pytest.skip("has no slots")
    tokens, heads = 24, 12
    slots = torch.full((tokens,), -1) if padding_only else torch.arange(tokens)
    call = make_prefill(kind, tokens, heads, slots=slots, scale_tensors=True, device="cuda")
    latent = torch.randn(tokens, 512, device="cuda").to(BF16)
    weight = torch.randn(512, heads * 256, device="cuda").to(BF16)
    product = torch.empty(tokens, heads * 256, dtype=BF16, device="cuda")
    halves = product.view(tokens, heads, 256)
    parts = {"k_nope": halves[..., :128], "v": halves[..., 128:]}
    call = call.given(**{name: t for name, t in parts.items() if name in INPUTS[kind]})
    outs = as_list(call.run())
    code = {1: torch.uint8, 2: torch.int16}[outs[0].element_size()]
    seen = [torch.empty_like(t.view(code)) for t in outs]
    rows = None
    if kind in INSERTS:
        rows = call.cache.tensor[:1].view(torch.int16 if kind == "insert" else torch.uint8)
    rows_seen = None if rows is None else torch.empty_like(rows)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def step() -> None:
        torch.mm(latent, weight, out=product)
        call.run(out=as_out(outs))
        for copy, out in zip(seen, outs, strict=True):
            torch.add(out.view(code), 0, out=copy)
        if rows is not None:
            call.run(out=as_out(outs))
            torch.add(rows, 0, out=rows_seen)

    step()
    torch.cuda.synchronize()
    graph, _ = captured(step)
    poison = None if rows is None else call.cache.storage.clone()
    for i in range(500):
        latent.copy_(latent.roll(1, 1) if i % 7 else -latent)
        product.fill_(float("nan"))
        for out in outs:
            out.view(torch.uint8).fill_(0x55)
        if poison is not None:
            call.args["kv_c_normed"].copy_(call.args["kv_c_normed"].roll(1, 0))
            call.cache.storage.copy_(poison)
        graph.replay()
        for got, want in zip(seen, framework_result(call), strict=True):
            wrong += (got != want.view(code)).sum()
    assert int(wrong) == 0
    if poison is not None:
        call.check_cache(poison.cpu())
        assert torch.equal(rows_seen, rows)


def test_pdl_off_and_on_give_the_same() -> None:
    for kind in KINDS:
        call = make_prefill(kind, 70, 3, rope=kind in INSERTS, device="cuda")
        for pdl in (None, False) + ((True,) if torch.cuda.get_device_capability()[0] >= 9 else ()):
            run_and_check(call, pdl=pdl)
        assert not call.explain(pdl=False).pdl
        assert call.explain().pdl == (torch.cuda.get_device_capability()[0] >= 9)


def test_prefill_then_decode_over_one_cache_in_one_graph() -> None:
    """The row that prefill writes is what decode's neighbour finds, launch after launch."""
    prefill = make_prefill("insert", 20, 3, slots=range(20), num_blocks=4, device="cuda")
    cache = prefill.args["kv_cache"]
    ql_nope, q_pe = torch.randn(2, 3, 512, device="cuda"), torch.randn(2, 3, 64, device="cuda")
    latent, k_pe = torch.randn(2, 512, device="cuda"), torch.randn(2, 64, device="cuda")
    slots = torch.tensor([20, 5], device="cuda")
    inputs = [t.to(BF16) for t in (ql_nope, q_pe, latent, k_pe)]

    def step() -> torch.Tensor:
        prefill.run()
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(*inputs, cache, slots)
        return cache.clone()

    step()
    torch.cuda.synchronize()
    graph, rows = captured(step)
    for _ in range(50):
        cache.zero_()
        graph.replay()
    torch.cuda.synchronize()
    want = torch.cat((prefill.args["kv_c_normed"], prefill.args["k_pe"]), -1)
    flat = rows.view(-1, 576)
    new = torch.cat((inputs[2], inputs[3]), -1)
    kept = [token for token in range(20) if token != 5]
    assert torch.equal(flat[kept], want[kept])
    assert torch.equal(flat[[20, 5]], new)
    assert not flat[21:].any()
