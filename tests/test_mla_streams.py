"""The MLA epilogues in time: streams, CUDA graphs, and chains of dependent launches."""

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
    FORMS,
    INPUTS,
    INSERTS,
    KINDS,
    Form,
    MlaCall,
    as_list,
    as_out,
    each_form,
    make_decode,
    make_prefill,
    run_and_check,
)
from stream_helpers import SLEEP_CYCLES, STREAM_FORMS, captured
from toolchain_helpers import MAPPINGS

import k3cupy

pytestmark = pytest.mark.gpu

ROUNDS = 60


def forms(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("form", [FORMS[name] for name in names], ids=str)


def watched(form: Form) -> str:
    """The input whose values are new each time; they are the first columns of the output."""
    return "ql_nope" if form.kind == "decode" else "k_nope"


def new_values(call: MlaCall, name: str, seed: int) -> torch.Tensor:
    return random_values(call.args[name].shape, call.dtype, 1000 + seed).cuda()


# Streams


@forms("decode", "insert", "concat")
def test_case17_current_stream_is_used_without_any_synchronisation(form: Form) -> None:
    """Sleep, write the input, call, read: all on a side stream, nothing waits on the host."""
    call, name = form.make(16, 3, device="cuda"), watched(form)
    call.run()
    values = [new_values(call, name, i) for i in range(ROUNDS)]
    width = values[0].shape[-1]
    torch.cuda.synchronize()
    seen = []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for value in values:
            torch.cuda._sleep(SLEEP_CYCLES)
            call.args[name].copy_(value)
            seen.append(call.run()[..., :width].clone())
    torch.cuda.synchronize()
    for i, (got, want) in enumerate(zip(seen, values, strict=True)):
        assert torch.equal(oracle.bits(got), oracle.bits(want)), f"stale input in round {i}"


@pytest.mark.parametrize("give", STREAM_FORMS)
@each_form
def test_case17_explicit_stream(form: Form, give: Callable[[torch.cuda.Stream], Any]) -> None:
    call, name = form.make(16, 3, rope=True, device="cuda"), watched(form)
    run_and_check(call)
    side = torch.cuda.Stream()
    stream = give(side)
    for i in range(4):
        value = new_values(call, name, i)
        before = call.snapshot()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            call.args[name].copy_(value)
        result = call.run(stream=stream)
        side.synchronize()
        call.check(before, result)


@pytest.mark.parametrize("handle", [0, 1, 2], ids=["default", "legacy", "per-thread"])
def test_case17_special_stream_handles(handle: int) -> None:
    for form in FORMS.values():
        call = form.make(16, 3, device="cuda")
        before = call.snapshot()
        torch.cuda.synchronize()
        result = call.run(stream=handle)
        torch.cuda.synchronize()
        call.check(before, result)


@forms("decode", "concat")
def test_case17_cupy_stream(form: Form) -> None:
    cupy = pytest.importorskip("cupy")
    call, name = form.make(16, 3, dtype=FP16, device="cuda"), watched(form)
    arrays = {
        key: cupy.from_dlpack(value) if isinstance(value, torch.Tensor) else value
        for key, value in call.args.items()
    }
    call.run(**arrays)
    values = [cupy.from_dlpack(new_values(call, name, i)) for i in range(20)]
    width = values[0].shape[-1]
    torch.cuda.synchronize()
    seen = []
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        for value in values:
            with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
                torch.cuda._sleep(SLEEP_CYCLES)
            arrays[name][...] = value
            seen.append(call.run(**arrays)[..., :width].copy())
    side.synchronize()
    for got, want in zip(seen, values, strict=True):
        assert bool((got.view(cupy.int16) == want.view(cupy.int16)).all())


@forms("decode", "insert", "fp8", "concat_fp8")
def test_case29_inputs_dropped_right_after_a_call_on_an_explicit_stream(form: Form) -> None:
    """Their memory is not given to another tensor before the kernel has read it."""
    call = form.make(64, 12, device="cuda")
    call.run()
    side = torch.cuda.Stream()
    names = [n for n in ("ql_nope", "q_pe", "k_nope", "k_pe", "v") if n in form.inputs]
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


def test_streams_at_the_same_time() -> None:
    calls = [form.make(64, 12, device="cuda", seed=7) for form in FORMS.values()]
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


@each_form
def test_graph_replay_sees_new_inputs(form: Form) -> None:
    """Values, slots, positions and scales are read when the graph runs, and q is turned again."""
    for rope in (False, True) if form.has_cache else (False,):
        call = form.make(33, 3, rope=rope, scale_tensors=True, device="cuda")
        call.run()
        graph, result = captured(call.run)
        for seed in range(1, 4):
            scales = (0.3 * seed, 2.0 / seed, 0.7, 1.0 + seed)
            fresh = form.make(
                33, 3, rope=rope, scale_tensors=True, device="cuda", seed=seed,
                **({"scales": scales[: 2 if form.kind == "decode" else 4]} if form.scales else {}),
            )  # fmt: skip
            for name, value in fresh.args.items():
                if name != "kv_cache" and isinstance(value, torch.Tensor):
                    call.args[name].copy_(value)
            before = call.snapshot()
            for tensor in as_list(result):
                tensor.view(torch.uint8).fill_(0xEE)
            graph.replay()
            call.check(before, result)


@each_form
def test_case15_no_tokens_in_a_graph(form: Form) -> None:
    call = form.make(0, 12, rope=True, device="cuda")
    nothing = torch.zeros(1, device="cuda")

    def run() -> Any:
        nothing.add_(1)
        return call.run()

    run()
    graph, result = captured(run)
    before = call.snapshot()
    graph.replay()
    call.check(before, result)


@each_form
def test_graph_with_outs(form: Form) -> None:
    call = form.make(16, 3, device="cuda")
    outs = [torch.zeros_like(tensor) for tensor in as_list(call.run())]
    for config in MAPPINGS if form.name == "decode" else (None,):
        extra = {} if config is None else {"config": config}
        call.run(out=as_out(outs), **extra)
        graph, _ = captured(lambda extra=extra: call.run(out=as_out(outs), **extra))
        before = call.snapshot()
        for tensor in outs:
            tensor.view(torch.uint8).zero_()
        graph.replay()
        call.check(before, as_out(outs))


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
    attempt(make_decode(1, 12, device="cuda"), must_fail=True)
    attempt(make_decode(16, 12, device="cuda"), must_fail=False)
    attempt(make_decode(16, 12, cache="fp8", device="cuda"), must_fail=True)
    attempt(make_decode(16, 12, cache="fp8", scale_tensors=True, device="cuda"), must_fail=False)
    attempt(make_decode(1, 12, q_fp8=True, q_scale_inv=0.5, device="cuda"), must_fail=True)
    for kind in KINDS:
        attempt(make_prefill(kind, 1, 12, device="cuda"), must_fail=True)
        attempt(make_prefill(kind, 1, 12, device="cuda", seed=1), must_fail=False)
    attempt(make_prefill("fp8", 1, 12, scale_tensors=True, device="cuda"), must_fail=False)
    attempt(make_prefill("insert", 1, 12, rope=True, device="cuda"), must_fail=True)
    assert issubclass(k3cupy.CaptureError, RuntimeError)


def test_case18_capture_of_what_was_never_compiled() -> None:
    run_child(_captures_from_cold)


def _warmup_then_capture() -> None:
    assert k3cupy.warmup("mla_decode", dtype="bfloat16", kv_cache="bf16", progress=False) > 0
    assert k3cupy.warmup("mla_prefill", dtype="bfloat16", progress=False) > 0
    calls = [make_decode(tokens, 12, device="cuda") for tokens in (1, 16)]
    for kind, k_pe in (*((kind, None) for kind in KINDS), ("concat_fp8", E4M3)):
        calls += [make_prefill(kind, tokens, 12, k_pe=k_pe, device="cuda") for tokens in (1, 200)]
    for call in calls:
        torch.cuda.synchronize()
        graph, result = captured(call.run)
        before = call.snapshot()
        graph.replay()
        call.check(before, result)


def test_case18_warmup_makes_capture_possible() -> None:
    run_child(_warmup_then_capture)


# The chain of case 5


@pytest.mark.parametrize("padding_only", [False, True], ids=["rows", "all-padding"])
@forms("decode", "decode-fp8")
def test_case05_chain_of_decode(form: Form, padding_only: bool) -> None:
    """GEMM, epilogue, framework op, 2,000 replays with poisoned buffers and new input each time.

    Counted on the device: elements that the consumer saw and the producer did not write.
    """
    tokens, heads = 16, 12
    slots = torch.full((tokens,), -1) if padding_only else torch.arange(tokens)
    call = form.make(tokens, heads, slots=slots, scale_tensors=True, device="cuda")
    q_scale, cache_scale = call.args.get("q_scale_inv"), call.args.get("cache_scale_inv")
    q = torch.randn(heads, tokens, 128, device="cuda").to(BF16)
    weight = torch.randn(heads, 128, 512, device="cuda").to(BF16)
    product = torch.empty(heads, tokens, 512, dtype=BF16, device="cuda")
    call = call.given(ql_nope=product.transpose(0, 1))
    code = torch.int8 if form.scales else torch.int16
    width = E4M3 if form.scales else BF16
    mqa_q = torch.empty(tokens, heads, 576, dtype=width, device="cuda")
    seen = torch.empty(tokens, heads, 576, dtype=code, device="cuda")
    rows_seen = torch.empty(tokens, 576, dtype=code, device="cuda")
    cache_rows = call.cache.tensor.view(code).view(-1, 576)[:tokens]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def step() -> None:
        torch.bmm(q, weight, out=product)
        call.run(out=mqa_q)
        torch.add(mqa_q.view(code), 0, out=seen)
        call.run(out=mqa_q)
        torch.add(cache_rows, 0, out=rows_seen)

    def expected(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return x.view(code)
        return (x.float() * scale).clamp(-448, 448).to(E4M3).view(code)

    step()
    graph, _ = captured(step)
    poison = cache_rows.clone()
    for i in range(2000):
        q.copy_(q.roll(1, 1) if i % 7 else -q)
        call.args["kv_c_normed"].copy_(call.args["kv_c_normed"].roll(1, 0))
        mqa_q.view(code).fill_(0x55)
        product.fill_(float("nan"))
        cache_rows.copy_(poison)
        graph.replay()
        query = torch.cat((call.args["ql_nope"], call.args["q_pe"]), -1)
        wrong += (seen != expected(query, q_scale)).sum()
        row = torch.cat((call.args["kv_c_normed"], call.args["k_pe"]), -1)
        rows = expected(row, cache_scale)
        wrong += (rows_seen != (poison if padding_only else rows)).sum()
    assert int(wrong) == 0


def test_promise_in_the_chain() -> None:
    """With kv_inputs_ready the cache rows may be early, and the query rows still wait."""
    tokens, heads = 16, 12
    call = make_decode(tokens, heads, slots=torch.arange(tokens), device="cuda")
    product = torch.empty(heads, tokens, 512, dtype=BF16, device="cuda")
    q = torch.randn(heads, tokens, 128, device="cuda").to(BF16)
    weight = torch.randn(heads, 128, 512, device="cuda").to(BF16)
    call = call.given(ql_nope=product.transpose(0, 1))
    before = call.snapshot()

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
        wrong += (mqa_q[..., :512] != call.args["ql_nope"]).sum()
    assert int(wrong) == 0
    call.check(before, mqa_q)


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


@each_form
def test_pdl_off_and_on_give_the_same(form: Form) -> None:
    has_pdl = torch.cuda.get_device_capability()[0] >= 9
    call = form.make(70, 3, rope=True, device="cuda")
    for pdl in (None, False, *((True,) if has_pdl else ())):
        run_and_check(call, pdl=pdl)
    assert not call.explain(pdl=False).pdl
    assert call.explain().pdl == has_pdl


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
