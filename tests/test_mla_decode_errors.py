"""The MLA decode epilogue: every refusal. It names the argument, and nothing is written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from helpers import (
    BF16,
    E4M3,
    FP16,
    Call,
    every_other,
    make_call,
    moved,
    padded,
    poisoned_out,
    refused,
    rope_table,
    run_and_check,
)

Change = Callable[[Call], dict[str, Any]]
TOKENS, HEADS = 8, 3
BASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope": {"rope": True},
    "fp8": {"q_fp8": True, "cache": "fp8"},
    "uint8": {"q_fp8": True, "cache": "uint8"},
    "ds_mla": {"cache": "ds_mla"},
    "all": {"q_fp8": True, "cache": "fp8", "rope": True, "scale_tensors": True},
}


@dataclass(frozen=True)
class Refusal:
    """A base call, what is changed in it, who is blamed and what the message must mention."""

    base: str
    change: Change
    blamed: str
    found: str


def make(
    name: str,
    alter: Callable[[torch.Tensor], Any],
    found: str,
    base: str = "plain",
    blamed: str = "",
) -> Refusal:
    """Replace one tensor argument by something made from it."""
    return Refusal(base, lambda call: {name: alter(call.arguments()[name])}, blamed or name, found)


def put(name: str, value: Any, found: str, base: str = "plain", blamed: str = "") -> Refusal:
    """Replace one argument by a value."""
    return Refusal(base, lambda call: {name: value}, blamed or name, found)


INPUTS = ("ql_nope", "q_pe", "kv_c_normed", "k_pe")
ARRAYS = (*INPUTS, "kv_cache")
CASES: dict[str, Refusal] = {}

# Types
for n in INPUTS:
    # One tensor of another type: it is blamed, or the first one that then disagrees with ql_nope.
    other = "ql_nope|q_pe" if n == "ql_nope" else n
    CASES[f"case23-{n}-fp16"] = make(n, lambda t: t.to(FP16), "float16", blamed=other)
    for wrong in (torch.float32, torch.float64, torch.int16, torch.uint8, E4M3):
        CASES[f"case23-{n}-{wrong}"] = make(n, lambda t, d=wrong: t.to(d), str(wrong)[6:])
for wrong in (FP16, torch.float32, torch.int16, torch.int8):
    CASES[f"case23-cache-{wrong}"] = make("kv_cache", lambda t, d=wrong: t.to(d), str(wrong)[6:])
for wrong in (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8):
    CASES[f"case16-cache-{wrong}"] = make(
        "kv_cache", lambda t, d=wrong: t.view(torch.uint8).view(d), str(wrong)[6:], base="fp8"
    )
for wrong in (torch.int16, torch.uint8, torch.int8, torch.uint64, torch.float32, torch.bool):
    for n in ("slot_mapping", "positions"):
        CASES[f"case10-{n}-{wrong}"] = make(
            n, lambda t, d=wrong: t.clamp(0, 1).to(d), str(wrong)[6:], base="rope"
        )
for wrong in (BF16, FP16, torch.float64):
    CASES[f"case23-table-{wrong}"] = make(
        "cos_sin_cache", lambda t, d=wrong: t.to(d), str(wrong)[6:], base="rope"
    )
for n in ARRAYS:
    CASES[f"none-{n}"] = put(n, None, "None")
    CASES[f"meta-{n}"] = make(n, lambda t: t.to("meta"), "meta", blamed=f"{n}|ql_nope|q_pe")
    CASES[f"sparse-{n}"] = make(n, lambda t: t.to(BF16).to_sparse(), "sparse|layout|stride")
CASES["none-slots"] = put("slot_mapping", None, "None")

# Shapes
for n in INPUTS:
    width = 64 if n in ("q_pe", "k_pe") else 512
    CASES[f"narrow-{n}"] = make(n, lambda t: t[..., :-1], str(width - 1))
    CASES[f"wide-{n}"] = make(n, lambda t: padded(t, 8), str(width + 8))
    CASES[f"flat-{n}"] = make(n, lambda t: t.flatten(), r"\[?\(?\d|1-D|dim|rank")
    CASES[f"deep-{n}"] = make(n, lambda t: t[None, None], r"\[?\(?\d|D|dim|rank")
    other = "ql_nope|q_pe" if n == "ql_nope" else n
    CASES[f"short-{n}"] = make(n, lambda t: t[:-1], "7|8", blamed=other)
    CASES[f"inner-stride-{n}"] = make(n, every_other, "2")
CASES["q_pe-heads"] = make("q_pe", lambda t: t[:, :2], "2")
CASES["k_pe-two-heads"] = make("k_pe", lambda t: t[:, None].repeat(1, 2, 1), "2")
CASES["cache-narrow"] = make("kv_cache", lambda t: t[..., :575], "575")
CASES["cache-wide"] = make("kv_cache", lambda t: padded(t, 64), "640")
CASES["cache-2d"] = make("kv_cache", lambda t: t[0], r"\d")
CASES["cache-4d"] = make("kv_cache", lambda t: t[None], r"\d")
CASES["cache-inner-stride"] = make("kv_cache", every_other, "2")
CASES["cache-expanded"] = make("kv_cache", lambda t: t[:1].expand(2, 16, 576), "overlap|stride")
CASES["case09-no-slots"] = make("slot_mapping", lambda t: t[:0], "0")
CASES["case09-few-slots"] = make("slot_mapping", lambda t: t[:7], "7")
CASES["slots-2d"] = make("slot_mapping", lambda t: t[:, None], r"\d")
CASES["positions-few"] = make("positions", lambda t: t[:7], "7", base="rope")
CASES["positions-2d"] = make("positions", lambda t: t[:, None], r"\d", base="rope")
CASES["table-narrow"] = make("cos_sin_cache", lambda t: t[:, :63], "63", base="rope")
CASES["table-wide"] = make("cos_sin_cache", lambda t: padded(t, 64), "128", base="rope")
CASES["table-1d"] = make("cos_sin_cache", lambda t: t[0], r"\d", base="rope")
CASES["case12-table-without-rows"] = make("cos_sin_cache", lambda t: t[:0], "0|empty", base="rope")
CASES["table-inner-stride"] = make("cos_sin_cache", every_other, "2", base="rope")

# Arguments that belong together
CASES["positions-alone"] = put("cos_sin_cache", None, "None", "rope", "cos_sin_cache|positions")
CASES["table-alone"] = put("positions", None, "None", "rope", "cos_sin_cache|positions")
CASES["fp8-cache-without-scale"] = put("cache_scale_inv", None, "None", "fp8")
CASES["uint8-cache-without-scale"] = put("cache_scale_inv", None, "None", "uint8")
CASES["plain-cache-with-scale"] = put("cache_scale_inv", 1.5, "1.5|float|scale")
CASES["ds_mla-q-scale"] = put("q_scale_inv", 1.5, "1.5|float|scale", "ds_mla")
CASES["ds_mla-cache-scale"] = put("cache_scale_inv", 1.5, "1.5|float|scale", "ds_mla")
CASES["ds_mla-forgotten"] = put("ds_mla", False, "656", "ds_mla", "kv_cache")
CASES["ds_mla-narrow"] = put(
    "kv_cache", torch.zeros(2, 16, 576, dtype=torch.uint8), "576", "ds_mla"
)
CASES["ds_mla-of-bf16"] = put("kv_cache", torch.zeros(2, 16, 656, dtype=BF16), "bfloat16", "ds_mla")
CASES["ds_mla-of-e4m3"] = make("kv_cache", lambda t: t.view(E4M3), "e4m3", "ds_mla")

# Scales
for n in ("q_scale_inv", "cache_scale_inv"):
    for value in (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.5, 1e39, 1e-50):
        CASES[f"{n}-{value}"] = put(n, value, str(value).replace("+", r"\+"), "fp8")
    for junk in (True, "1.0", 1 + 0j, [1.0]):
        CASES[f"{n}-{junk!r}"] = put(n, junk, type(junk).__name__, "fp8")
    for wrong in (torch.float64, BF16, torch.int32):
        CASES[f"{n}-{wrong}"] = make(n, lambda t, d=wrong: t.to(d), str(wrong)[6:], "all")
    CASES[f"{n}-two"] = make(n, lambda t: t.repeat(2), "2", "all")
    CASES[f"{n}-none"] = make(n, lambda t: t[:0], "0", "all")
    CASES[f"{n}-per-token"] = make(n, lambda t: t.repeat(TOKENS), "8", "all")

# Outputs
for wrong in (FP16, torch.float32, torch.uint8, E4M3):
    CASES[f"out-{wrong}"] = put("out", torch.zeros(TOKENS, HEADS, 576).to(wrong), str(wrong)[6:])
for wrong in (BF16, torch.float32, torch.int8, torch.float8_e5m2):
    CASES[f"fp8-out-{wrong}"] = put(
        "out", torch.zeros(TOKENS, HEADS, 576).to(wrong), str(wrong)[6:], "fp8"
    )
for shape in ((8, 3, 575), (8, 2, 576), (7, 3, 576), (9, 3, 576), (24, 576), (1, 8, 3, 576)):
    CASES[f"out-{shape}"] = put("out", torch.zeros(shape, dtype=BF16), str(shape[-2]))
CASES["out-strided"] = put("out", torch.zeros(8, 3, 600, dtype=BF16)[..., :576], "1800|600|stride")
CASES["out-expanded"] = put(
    "out", torch.zeros(1, HEADS, 576, dtype=BF16).expand(TOKENS, HEADS, 576), "stride"
)
CASES["out-transposed"] = put(
    "out", torch.zeros(3, 8, 576, dtype=BF16).transpose(0, 1), "4608|stride"
)

# Settings
for junk in (2, -1, 5, "3", 1.0):
    CASES[f"split-{junk!r}"] = put("split", junk, str(junk))


for flag in ("ds_mla", "kv_inputs_ready", "pdl"):
    for junk in ([1], "no", 1, 0):
        CASES[f"{flag}-{junk!r}"] = put(flag, junk, re.escape(repr(junk)))


@pytest.mark.parametrize("name", CASES)
def test_refused(device: str, name: str) -> None:
    case = CASES[name]
    call = make_call(TOKENS, HEADS, num_blocks=2, device=device, seed=2, **BASES[case.base])
    out = poisoned_out(call)
    before = out.snapshot()
    changes = {key: moved(value, device) for key, value in case.change(call).items()}
    arguments = {**call.arguments(), "out": out.tensor, **changes}
    text = refused(arguments, case.blamed, case.found, box=call.cache)
    oracle.assert_same_bits(out.snapshot(), before, "out after a refused call")
    if name == "ds_mla-forgotten":
        assert "ds_mla=True" in text
    run_and_check(call, out=out.tensor)


@pytest.mark.parametrize(
    "name",
    [
        "out-torch.float16",
        "narrow-k_pe",
        "case10-positions-torch.int16",
        "q_scale_inv-nan",
        "cache_scale_inv-True",
        "meta-kv_c_normed",
        "meta-kv_cache",
    ],
)
def test_refused_after_a_good_call(device: str, name: str) -> None:
    """A plan kept from an earlier call with the same shapes hides nothing."""
    case = CASES[name]
    call = make_call(TOKENS, HEADS, num_blocks=2, device=device, **BASES[case.base])
    run_and_check(call)
    changes = {key: moved(value, device) for key, value in case.change(call).items()}
    for _ in range(2):
        refused({**call.arguments(), **changes}, case.blamed, case.found, box=call.cache)
    run_and_check(call)


# Overlap


def overlapping(call: Call, name: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, argument) in one buffer: the argument begins 16 bytes before the end of out."""
    tensor = call.arguments()[name]
    out_bytes = TOKENS * HEADS * 576
    size = tensor.numel() * tensor.element_size()
    buffer = torch.zeros(out_bytes + size, dtype=torch.uint8, device=device)
    at = out_bytes - 16
    moved = buffer[at : at + size].view(tensor.dtype).view(tensor.shape)
    content = tensor.contiguous().flatten().view(torch.uint8)
    moved.flatten().view(torch.uint8).copy_(content)
    return buffer[:out_bytes].view(TOKENS, HEADS, 576), moved


@pytest.mark.parametrize(
    "name",
    [*ARRAYS, "slot_mapping", "positions", "cos_sin_cache", "q_scale_inv", "cache_scale_inv"],
)
def test_out_that_overlaps_an_argument(device: str, name: str) -> None:
    """Refused, also when a call of the same shapes and alignment was fine before."""
    call = make_call(TOKENS, HEADS, device=device, **BASES["all"])
    out, moved = overlapping(call, name, device)
    call.run(out=out.clone())
    text = refused({**call.arguments(), name: moved, "out": out}, f"out|{name}", "overlap")
    assert name in text
    assert "out" in text
    assert not out.flatten()[:-16].any()


@pytest.mark.parametrize("name", [*INPUTS, "slot_mapping", "positions", "cos_sin_cache"])
def test_a_cache_that_overlaps_an_input(device: str, name: str) -> None:
    call = make_call(TOKENS, HEADS, device=device, rope=True)
    tensor = call.arguments()[name]
    size = tensor.numel() * tensor.element_size()
    call.cache.storage[512 : 512 + size] = tensor.contiguous().flatten().view(torch.uint8)
    moved = call.cache.storage[512 : 512 + size].view(tensor.dtype).view(tensor.shape)
    text = refused({**call.arguments(), name: moved}, f"kv_cache|{name}", "overlap", box=call.cache)
    assert name in text
    assert "kv_cache" in text


def test_neighbours_in_one_buffer_do_not_overlap(device: str) -> None:
    """An input that ends where the output begins, and one that begins where it ends."""
    call = make_call(TOKENS, 1, device=device)
    count = TOKENS * 512
    buffer = torch.zeros(count + TOKENS * 576 + count, dtype=BF16, device=device)
    before, out, after = buffer.split((count, TOKENS * 576, count))
    ql_nope, kv_c = before.view(TOKENS, 1, 512), after.view(TOKENS, 512)
    ql_nope.copy_(call.ql_nope)
    kv_c.copy_(call.kv_c_normed)
    call = call.with_tensors(ql_nope=ql_nope, kv_c_normed=kv_c)
    run_and_check(call, out=out.view(TOKENS, 1, 576))


# Gradients


@pytest.mark.parametrize("name", [*INPUTS, "kv_cache", "cos_sin_cache", "out", "q_scale_inv"])
def test_case25_tensors_that_require_grad(device: str, name: str) -> None:
    base = {"rope": True, "q_fp8": name == "q_scale_inv", "scale_tensors": True}
    call = make_call(TOKENS, HEADS, device=device, **base)
    arguments = {**call.arguments(), "out": poisoned_out(call).tensor}
    arguments[name] = arguments[name].clone().requires_grad_()
    text = refused(arguments, name, "grad", box=call.cache)
    assert "no_grad" in text or "detach" in text
    before = call.cache.snapshot()
    with torch.no_grad():
        mqa_q = call.run(**arguments)
    call.check_query(mqa_q.detach())
    if name != "kv_cache":
        call.check_cache(before)
    refused(arguments, name, "grad", box=call.cache)
    with torch.inference_mode():
        call.check_query(call.run(**arguments).detach())


# Values on the device


@pytest.mark.parametrize("kind", ["same", "fp8"])
def test_k3cupy_check_names_bad_values(
    device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3CUPY_CHECK", "1")
    call = make_call(6, 2, cache=kind, rope=True, num_blocks=2, device=device)
    run_and_check(call)
    for slot in (32, 2**31, 2**62):
        slots = torch.tensor([0, -1, slot, 3, -(2**63), 5], device=device)
        refused(
            {**call.arguments(), "slot_mapping": slots}, "slot_mapping", str(slot), box=call.cache
        )
    for position in (128, -1, 2**31):
        positions = torch.tensor([0, 127, 5, position, 6, 7], device=device)
        arguments = {**call.arguments(), "positions": positions}
        refused(arguments, "positions", str(position), box=call.cache)
    run_and_check(
        call.with_tensors(
            slot_mapping=torch.tensor([31, -1, -2, -(2**63), 0, 9, 99], device=device)
        )
    )
    monkeypatch.setenv("K3CUPY_CHECK", "0")
    run_and_check(
        call.with_tensors(slot_mapping=torch.tensor([31, 32, -2, 2**62, 0, 9], device=device))
    )


# Devices


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize(
    "name",
    [
        *ARRAYS,
        "slot_mapping",
        "positions",
        "cos_sin_cache",
        "q_scale_inv",
        "cache_scale_inv",
        "out",
    ],
)
def test_case20_one_argument_on_the_cpu(name: str, pinned: bool) -> None:
    call = make_call(TOKENS, HEADS, device="cuda", **BASES["all"])
    arguments = {**call.arguments(), "out": poisoned_out(call).tensor}
    moved = arguments[name].cpu()
    arguments[name] = moved.pin_memory() if pinned else moved
    blamed = ".*" if name == "ql_nope" else name
    refused(arguments, blamed, "(?i)cpu|cuda|host", box=call.cache)
    run_and_check(call)


@pytest.mark.gpu
def test_case20_cuda_arguments_among_cpu_tensors() -> None:
    call = make_call(TOKENS, HEADS, **BASES["all"])
    for name in ("q_pe", "kv_cache", "slot_mapping", "cos_sin_cache", "q_scale_inv"):
        arguments = {**call.arguments(), name: call.arguments()[name].cuda()}
        refused(arguments, name, "(?i)cuda|cpu", box=call.cache)


@pytest.mark.gpu
def test_a_stream_that_is_none_is_named() -> None:
    call = make_call(TOKENS, HEADS, device="cuda")
    for junk in ("side", 1.5, object()):
        refused({**call.arguments(), "stream": junk}, "stream", type(junk).__name__, box=call.cache)


def test_integer_types_of_slots_and_positions_are_independent(device: str) -> None:
    for slots, positions in ((torch.int64, torch.int32), (torch.int32, torch.int64)):
        call = make_call(TOKENS, HEADS, rope=True, slot_dtype=slots, device=device)
        call.options["positions"] = call.options["positions"].to(positions)
        call.options["cos_sin_cache"] = rope_table(128).to(device)
        run_and_check(call)
