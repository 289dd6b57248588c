"""The prefill and context epilogues on a GPU: configurations, huge tensors, processes, devices."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from helpers import BF16, E4M3, FP16, exactly, rope_table, run_child
from memory_helpers import before_unmapped_gpu_memory, gibibytes
from mla_helpers import (
    INPUTS,
    INSERTS,
    KINDS,
    NAMES,
    MlaCall,
    as_halves,
    as_list,
    as_out,
    make_prefill,
    refused,
    run_and_check,
)

import k3cupy
from k3cupy.kernels.mla_prefill import CANDIDATES

pytestmark = pytest.mark.gpu


def results(call: MlaCall, **settings: Any) -> list[torch.Tensor]:
    """The bits of the outputs and of what is written in place, which is put back afterwards."""
    saved = {name: box.storage.clone() for name, box in call.boxes.items()}
    found = [oracle.bits(tensor) for tensor in as_list(call.run(**settings))]
    found += call.snapshot().values()
    for name, storage in saved.items():
        call.boxes[name].storage.copy_(storage)
    return found


def assert_same_results(call: MlaCall, variants: list[dict[str, Any]]) -> None:
    first = results(call)
    for variant in variants:
        for got, want in zip(results(call, **variant), first, strict=True):
            oracle.assert_same_bits(got, want, f"{call.kind} with {variant}")


# Configurations


@pytest.mark.parametrize("config", CANDIDATES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_configuration_gives_the_same_bits(
    kind: str, config: k3cupy.MlaPrefillConfig
) -> None:
    """Whatever the grid: few tokens, many, and heads that fill no block evenly."""
    rope = kind == "insert"
    for tokens, heads in ((1, 12), (65, 5), (300, 3)):
        call = make_prefill(
            kind, tokens, heads, rope=rope, any_bits=not rope, device="cuda", seed=tokens
        )
        assert call.explain(config=config).config == config
        assert_same_results(call, [{"config": config}])
        run_and_check(call, config=config)


@pytest.mark.parametrize("kind", INSERTS)
def test_every_configuration_settles_duplicates_alike(kind: str) -> None:
    slots = torch.randint(-4, 700, (2000,), generator=torch.Generator().manual_seed(2))
    call = make_prefill(kind, 2000, 2, num_blocks=44, slots=slots, device="cuda")
    assert_same_results(call, [{"config": config} for config in CANDIDATES])
    run_and_check(call)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_aligned(kind: str) -> None:
    """The element-wise instance and the 128-bit one agree."""
    for dtype in (BF16, FP16):
        call = make_prefill(kind, 33, 5, dtype=dtype, rope=kind in INSERTS, device="cuda")
        aligned = results(call)
        wide = torch.zeros(33, 5, 129, dtype=dtype, device="cuda")
        wide[..., 1:].copy_(call.args["k_nope"])
        odd = call.given(k_nope=wide[..., 1:])
        assert "align" in odd.explain().reason
        for got, want in zip(results(odd), aligned, strict=True):
            oracle.assert_same_bits(got, want, "odd rows against aligned ones")


def test_gpu_and_cpu_give_the_same_bits() -> None:
    """Copies and casts, and RoPE too: its products and sums are rounded one by one."""
    for kind, rope in itertools.product(KINDS, (False, True)):
        if rope and kind not in INSERTS:
            continue
        call = make_prefill(kind, 17, 3, rope=rope, any_bits=not rope)
        for got, want in zip(results(call.on("cuda")), results(call), strict=True):
            oracle.assert_same_bits(got, want, f"GPU against CPU, {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_decision_is_readable(kind: str) -> None:
    decision = make_prefill(kind, 4, 2, device="cuda").explain()
    assert decision.runs_on == "cuda"
    assert isinstance(decision.config, k3cupy.MlaPrefillConfig)
    assert decision.config.is_valid()
    assert decision.name_expression is not None
    assert "k3cupy::" in decision.name_expression


# Huge tensors

one_at_a_time = pytest.mark.xdist_group("huge tensors of prefill")


@one_at_a_time
@gibibytes(40)
def test_outputs_of_more_than_2_31_elements(needs_memory: None) -> None:
    """131,072 tokens of 96 heads, made, run and compared on the GPU: all of k, samples of q8."""
    tokens, heads = 131_072, 96
    line = torch.arange(tokens, device="cuda", dtype=torch.int32)
    both = torch.empty(tokens, heads, 256, dtype=torch.int16, device="cuda")
    both[...] = (line[:, None, None] * 31).to(torch.int16)
    both += torch.arange(heads, device="cuda", dtype=torch.int16)[:, None] * 257
    both += torch.arange(256, device="cuda", dtype=torch.int16)
    both &= 0x3FFF
    k_nope, v = both.view(BF16).split(128, -1)
    k_pe = both.view(BF16)[:, 0, :64]

    k = k3cupy.fused_mla_kv_concat(k_nope, k_pe)
    assert k.numel() > 2**31
    for start in range(0, tokens, 8192):
        part = slice(start, start + 8192)
        assert torch.equal(k[part, :, :128].view(torch.int16), both[part, :, :128])
        shared = both[part, :1, :64].expand(-1, heads, -1)
        assert torch.equal(k[part, :, 128:].view(torch.int16), shared)
    del k

    k8, v8 = k3cupy.fused_mla_kv_concat_quant_fp8(k_nope, k_pe, v)
    for start in (0, 65_535, 87_381, 116_508, tokens - 64):
        part = slice(start, start + 64)
        sample = make_prefill("concat_fp8", 64, heads, device="cuda")
        sample = sample.given(k_nope=k_nope[part], k_pe=k_pe[part], v=v[part])
        sample.check_outputs((k8[part], v8[part]))


@one_at_a_time
@gibibytes(40)
@pytest.mark.parametrize("kind", INSERTS)
def test_inserting_131072_tokens_of_96_heads(kind: str, needs_memory: None) -> None:
    """q passes 2^31 elements too: it is turned in place at its very end, or read to the end."""
    tokens, heads, rope = 131_072, 96, kind == "insert"
    torch.manual_seed(0)
    call = make_prefill(kind, 1, 1, rope=rope, scale_tensors=kind == "fp8", device="cuda")
    q = torch.randn(tokens, heads, 192, device="cuda", dtype=BF16)
    both = torch.randn(tokens, heads, 256, device="cuda", dtype=BF16)
    slots = torch.randperm(tokens + 1000, device="cuda")[:tokens]
    slots[-1] = slots[0]
    args = {
        **call.args,
        "q": q,
        "k_nope": both[..., :128],
        "k_pe": torch.randn(tokens, 64, device="cuda", dtype=BF16),
        "kv_c_normed": torch.randn(tokens, 512, device="cuda", dtype=BF16),
        "kv_cache": torch.zeros(
            2064, 64, call.cache.shape[2], device="cuda", dtype=torch.uint8
        ).view(call.cache.dtype)
        if kind != "insert"
        else torch.zeros(2064, 64, 576, device="cuda", dtype=BF16),
        "slot_mapping": slots,
    }
    if kind == "fp8":
        args["v"] = both[..., 128:]
    if rope:
        args["positions"] = torch.arange(tokens, device="cuda") % 128
        args["cos_sin_cache"] = rope_table(128).cuda()
    whole = MlaCall(kind, args)
    starts = (0, 65_535, 87_381, 116_508, tokens - 64)
    per_token = [name for name in (*INPUTS[kind], "positions") if name in args]
    before = [{name: args[name][s : s + 64].clone() for name in per_token} for s in starts]
    found = as_list(whole.run())
    rows = args["kv_cache"].view(-1, args["kv_cache"].shape[-1])
    for start, saved in zip(starts, before, strict=True):
        part = slice(start, start + 64)
        sample = MlaCall(kind, {**args, **saved, "slot_mapping": slots[part]})
        sample.check_outputs(as_out([tensor[part] for tensor in found]))
        q_now = q[part].cpu()
        want = sample.expected("q") if rope else oracle.Rows(oracle.bits(saved["q"]), None)
        if want.rotated is not None:
            oracle.assert_within(q_now[..., 128:], want.rotated, "q in place")
            q_now[..., 128:] = saved["q"][..., 128:].cpu()
        oracle.assert_same_bits(oracle.bits(q_now), oracle.bits(saved["q"]), "q")
        want_rows = sample.expected_rows()
        first = 1 if start == 0 else 0  # the slot of token 0 is also the last token's
        got_rows = oracle.bits(rows[slots[part]])[first:]
        exact = 512 if rope else got_rows.shape[1]
        oracle.assert_same_bits(got_rows[:, :exact], want_rows.bits[first:, :exact], "rows")


@gibibytes(9)
@pytest.mark.parametrize("name", ["q", "k_nope", "v", "k_pe", "kv_c_normed"])
@pytest.mark.parametrize("far", [2**29 + 80, 2**31 + 80])
def test_input_strides_past_2_31(name: str, far: int, needs_memory: None) -> None:
    """A product of the stride and an index passes 4 GiB, or the stride itself does."""
    for kind in ("fp8", "insert"):
        if name not in INPUTS[kind]:
            continue
        call = make_prefill(kind, 2 if far > 2**31 else 6, 2, rope=True, device="cuda")
        tensor = call.args[name]
        buffer = torch.empty((call.tokens - 1) * far + 2048, dtype=BF16, device="cuda")
        wide = buffer.as_strided(tensor.shape, (far, *tensor.stride()[1:]))
        wide.copy_(tensor)
        if name == "q" and kind == "insert":
            before = wide.clone()
            call.args["q"] = wide
            want = call.expected("q", before.cpu())
            call.run()
            assert want.rotated is not None
            oracle.assert_within(wide[..., 128:].cpu(), want.rotated, "q in place")
            assert torch.equal(wide[..., :128], before[..., :128])
        else:
            run_and_check(call.given(**{name: wide}))
        del buffer, wide, call, tensor


@gibibytes(9)
def test_head_strides_past_2_31(needs_memory: None) -> None:
    call = make_prefill("concat_fp8", 3, 2, device="cuda")
    for name in ("k_nope", "v"):
        far = 2**31 + 80
        buffer = torch.empty(far + 2048, dtype=BF16, device="cuda")
        wide = buffer.as_strided((3, 2, 128), (128, far, 1))
        wide.copy_(call.args[name])
        run_and_check(call.given(**{name: wide}))
        del buffer, wide


@gibibytes(5)
@pytest.mark.parametrize("kind", INSERTS)
def test_cache_of_more_than_2_31_elements(kind: str, needs_memory: None) -> None:
    call = make_prefill(kind, 5, 2, device="cuda")
    width = call.cache.shape[2]
    blocks = 2**31 // (64 * width) + 1000
    capacity = blocks * 64
    cache = torch.zeros(blocks, 64, width, dtype=call.cache.dtype, device="cuda")
    middle = 2**31 // width + 1
    slots = torch.tensor([capacity - 1, 5, capacity, middle, -1], device="cuda")
    call.check_outputs(call.run(kv_cache=cache, slot_mapping=slots))
    want = call.expected_rows().bits
    rows = cache.view(want.dtype).view(capacity, width)
    for token, slot in ((0, capacity - 1), (1, 5), (3, middle)):
        oracle.assert_same_bits(rows[slot].cpu(), want[token], f"row {slot}")
        rows[slot] = 0
    assert torch.count_nonzero(rows.view(torch.int64)) == 0, "bytes of other rows were written"


# The ends of allocations, in a child: a stray read is a fault


def _reads_nothing_past_device_allocations() -> None:
    for kind in KINDS:
        call = make_prefill(kind, 17, 3, rope=kind in INSERTS, scale_tensors=True, device="cuda")
        args = {
            name: before_unmapped_gpu_memory(value)
            for name, value in call.args.items()
            if isinstance(value, torch.Tensor) and name not in call.boxes
        }
        if "positions" in args:
            args["positions"].copy_(torch.arange(17) * 2**40 - 2**42)
        call = call.given(**args)
        for config in CANDIDATES[:: max(1, len(CANDIDATES) // 4)]:
            run_and_check(call, config=config)
    torch.cuda.synchronize()
    os._exit(0)


def test_case09_case12_nothing_is_read_past_an_allocation() -> None:
    run_child(_reads_nothing_past_device_allocations)


def _ignores_wild_values() -> None:
    for kind in INSERTS:
        slots = [2**62, -(2**63), 2**31, 2**40 + 3, 2**63 - 1, -2, 31, 32]
        call = make_prefill(kind, 8, 2, rope=True, num_blocks=2, slots=slots, device="cuda")
        wild = torch.tensor([2**62, -(2**63), 2**31, -1, 0, 127, 128, 5])
        call.args["positions"].copy_(wild)
        run_and_check(call)
    torch.cuda.synchronize()


def test_case08_case12_wild_values_in_a_child() -> None:
    run_child(_ignores_wild_values)


# Threads and processes


def _threads_from_cold() -> None:
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for tokens in (1, 65, 65):
                run_and_check(make_prefill(KINDS[seed % 2], tokens, 3, device="cuda", seed=seed))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_threads_that_all_need_the_same_cold_kernel(tmp_path: Path) -> None:
    run_child(_threads_from_cold, env={"CUPY_CACHE_DIR": str(tmp_path)})


# Devices

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_the_current_device_stays() -> None:
    before = torch.cuda.current_device()
    for kind in KINDS:
        call = make_prefill(kind, 4, 2, device="cuda")
        run_and_check(call)
        refused(call, "k_pe", exactly("shape [4, 63]"), k_pe=call.args["k_pe"][:, :63])
    assert torch.cuda.current_device() == before


@two_gpus
def test_case19_tensors_on_a_device_that_is_not_current() -> None:
    calls = [
        make_prefill(kind, 9, 3, rope=kind in INSERTS, device=f"cuda:{i}")
        for i, kind in itertools.product((1, 0), KINDS)
    ]
    with torch.cuda.device(0):
        for call in calls * 5:
            run_and_check(call)
            assert torch.cuda.current_device() == 0


@two_gpus
@pytest.mark.parametrize("kind", KINDS)
def test_case19_mixed_devices_are_refused(kind: str) -> None:
    call = make_prefill(kind, 9, 3, rope=kind in INSERTS, scale_tensors=True, device="cuda:0")
    for name, value in call.args.items():
        if isinstance(value, torch.Tensor):
            blamed = ".*" if len(call.args) < 4 else name
            refused(call, blamed, r"^device cuda:[01]$", **{name: value.to("cuda:1")})


# The real layer, once, at its real width


@pytest.mark.parametrize("kind", KINDS)
def test_the_real_layer_at_4096_tokens(kind: str) -> None:
    call = make_prefill(kind, 4096, 12, rope=kind in INSERTS, block_size=64, device="cuda", seed=5)
    gemm = torch.randn(4096, 2112, device="cuda").to(BF16)
    run_and_check(as_halves(call.given(k_pe=gemm[:, None, 2048:])))
    assert NAMES[kind] in k3cupy.__all__


def test_context_that_is_e4m3_already() -> None:
    for tokens in (1, 70, 1000):
        for form in (E4M3, torch.uint8):
            call = make_prefill("concat_fp8", tokens, 12, k_pe=form, device="cuda")
            run_and_check(as_halves(call))
