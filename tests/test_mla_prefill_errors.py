"""The prefill and context epilogues: every refusal. It names the argument, nothing is written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from helpers import BF16, E4M3, FP16, Guarded, every_other, moved, padded
from prefill_helpers import (
    FIRST,
    INPUTS,
    INSERTS,
    KINDS,
    NAMES,
    OUTPUTS,
    SCALES,
    PrefillCall,
    as_out,
    make_prefill,
    poisoned_outs,
    refused,
    run_and_check,
    run_into_guarded_outs,
    width_of,
)

import k3cupy

TOKENS, HEADS = 8, 3


@dataclass(frozen=True)
class Refusal:
    """What is changed in a call, who is blamed and what the message must mention."""

    kind: str
    change: Callable[[PrefillCall], dict[str, Any]]
    blamed: str
    found: str


CASES: dict[str, Refusal] = {}


def make(
    kind: str,
    label: str,
    name: str,
    alter: Callable[[torch.Tensor], Any],
    found: str,
    blamed: str = "",
) -> None:
    """Replace one tensor argument by something made from it."""
    CASES[f"{kind}-{name}-{label}"] = Refusal(
        kind, lambda call: {name: alter(call.args[name])}, blamed or name, found
    )


def put(kind: str, label: str, name: str, value: Any, found: str, blamed: str = "") -> None:
    """Replace one argument by a value."""
    CASES[f"{kind}-{name}-{label}"] = Refusal(
        kind, lambda call: {name: value}, blamed or name, found
    )


for k in KINDS:
    # When the first input changes, those that then disagree with it may be blamed instead.
    others = "|".join((*INPUTS[k], "kv_cache", "out"))
    for n in INPUTS[k]:
        width, blamed = width_of(n), others if n == FIRST[k] else n
        make(k, "case23-fp16", n, lambda t: t.to(FP16), "float16", blamed)
        for wrong in (torch.float32, torch.int16, E4M3, torch.uint8, torch.float8_e5m2):
            if (k, n) != ("concat_fp8", "k_pe") or wrong not in (E4M3, torch.uint8):
                make(k, str(wrong), n, lambda t, d=wrong: t.to(d), str(wrong)[6:], blamed)
        make(k, "narrow", n, lambda t: t[..., :-1], str(width - 1))
        make(k, "wide", n, lambda t: padded(t, 8), str(width + 8))
        make(k, "flat", n, lambda t: t.flatten(), r"\d")
        make(k, "deep", n, lambda t: t[None, None], r"\d")
        make(k, "short", n, lambda t: t[:-1], "7|8", others if n in (FIRST[k], "k_nope") else n)
        make(k, "inner-stride", n, every_other, "2")
        put(k, "none", n, None, "None")
        make(k, "meta", n, lambda t: t.to("meta"), "meta", blamed)
        make(k, "sparse", n, lambda t: t.to_sparse(), "sparse|layout|stride")
        if n in ("q", "k_nope", "v"):
            make(k, "heads", n, lambda t: t[:, :2], "2|3", others if n == FIRST[k] else n)
    make(k, "no-heads", FIRST[k], lambda t: t[:, :0], "0")
    make(k, "two-heads", "k_pe", lambda t: t[:, None].repeat(1, 2, 1), "2")

    # Settings
    for junk in ([1], "no", 1, 0):
        put(k, repr(junk), "pdl", junk, re.escape(repr(junk)))
    for junk in (3, "fast", (1, 2)):
        put(k, repr(junk), "config", junk, re.escape(repr(junk)))


def add_output_cases(kind: str, index: int) -> None:
    """One of the outputs does not fit."""
    good = fitting_outs(kind)
    shape, dtype = good[index].shape, good[index].dtype
    blamed = rf"out\[{index}\]" if len(good) > 1 else "out"

    def case(label: str, bad: Any, found: str) -> None:
        outs = as_out([*good[:index], bad, *good[index + 1 :]])
        put(kind, f"{index}-{label}", "out", outs, found, blamed)

    for wrong in (torch.float32, torch.int8, FP16, BF16 if dtype == E4M3 else E4M3):
        case(str(wrong), torch.zeros(shape).to(wrong), str(wrong)[6:])
    for axis, delta in ((0, 1), (0, -1), (1, -1), (2, -1), (2, 8)):
        size = list(shape)
        size[axis] += delta
        case(f"shape-{axis}-{delta}", torch.zeros(size).to(dtype), str(size[axis]))
    wide = torch.zeros(*shape[:2], 200).to(dtype)
    case("strided", wide[..., : shape[2]], "200|600|stride")
    case("transposed", torch.zeros(HEADS, TOKENS, shape[2]).to(dtype).transpose(0, 1), "stride")
    case("list", [1.0], "list")


def fitting_outs(kind: str) -> list[torch.Tensor]:
    dtype = E4M3 if len(OUTPUTS[kind]) > 1 else BF16
    widths = [128 if name == "v8" else 192 for name in OUTPUTS[kind]]
    return [torch.zeros(TOKENS, HEADS, width).to(dtype) for width in widths]


for k in KINDS:
    for place in range(len(OUTPUTS[k])):
        add_output_cases(k, place)
for k in ("fp8", "concat_fp8"):
    outs = fitting_outs(k)
    put(k, "one-tensor", "out", outs[0], "Tensor|tensor")
    put(k, "too-few", "out", tuple(outs[:-1]), str(len(outs) - 1))
    put(k, "too-many", "out", (*outs, outs[0]), str(len(outs) + 1))
    put(k, "none-inside", "out", (None, *outs[1:]), "None", r"out\[0\]")

for k in INSERTS:
    width = 656 if k == "ds_mla" else 576
    # The cache: its type and width tell the operations apart, and the message says which one fits.
    put(k, "none", "kv_cache", None, "None")
    make(k, "narrow", "kv_cache", lambda t: t[..., :-1], str(width - 1))
    make(k, "wide", "kv_cache", lambda t: padded(t, 64), str(width + 64))
    make(k, "2d", "kv_cache", lambda t: t[0], r"\d")
    make(k, "4d", "kv_cache", lambda t: t[None], r"\d")
    make(k, "inner-stride", "kv_cache", every_other, "2")
    make(k, "expanded", "kv_cache", lambda t: t[:1].expand(t.shape), "overlap|stride")
    for wrong in (FP16, torch.float32, torch.int16, torch.int8, torch.float8_e5m2):
        make(k, f"case23-{wrong}", "kv_cache", lambda t, d=wrong: t.to(d), str(wrong)[6:])
    # Slots, positions, table
    for n in ("slot_mapping", "positions"):
        for wrong in (torch.int16, torch.uint8, torch.uint64, torch.float32, torch.bool):
            make(k, f"case10-{wrong}", n, lambda t, d=wrong: t.clamp(0, 1).to(d), str(wrong)[6:])
        make(k, "case09-few", n, lambda t: t[:7], "7")
        make(k, "case09-empty", n, lambda t: t[:0], "0")
        make(k, "2d", n, lambda t: t[:, None], r"\d")
    put(k, "none", "slot_mapping", None, "None")
    for wrong in (BF16, FP16, torch.float64):
        make(k, f"case23-{wrong}", "cos_sin_cache", lambda t, d=wrong: t.to(d), str(wrong)[6:])
    make(k, "narrow", "cos_sin_cache", lambda t: t[:, :63], "63")
    make(k, "wide", "cos_sin_cache", lambda t: padded(t, 64), "128")
    make(k, "1d", "cos_sin_cache", lambda t: t[0], r"\d")
    make(k, "case12-no-rows", "cos_sin_cache", lambda t: t[:0], "0|empty")
    make(k, "inner-stride", "cos_sin_cache", every_other, "2")
    put(k, "alone", "positions", None, "None", "cos_sin_cache|positions")
    put(k, "alone", "cos_sin_cache", None, "None", "cos_sin_cache|positions")
for k in ("insert", "ds_mla"):
    # With positions the query is written.
    make(k, "expanded", "q", lambda t: t[:1].expand(t.shape), "overlap|stride")
    make(k, "window", "q", lambda t: t.as_strided(t.shape, (576, 191, 1)), "overlap|stride")

for n in SCALES:
    put("fp8", "none", n, None, "None")
    for value in (math.nan, math.inf, -math.inf, 0.0, -1.5, 1e39, 1e-50):
        put("fp8", str(value), n, value, str(value).replace("+", r"\+"))
    for junk in (True, "1.0", 1 + 0j, [1.0]):
        put("fp8", repr(junk), n, junk, type(junk).__name__)
    for wrong in (torch.float64, BF16, torch.int32):
        put("fp8", str(wrong), n, torch.ones(1).to(wrong), str(wrong)[6:])
    put("fp8", "two", n, torch.ones(2), "2")
    put("fp8", "empty", n, torch.ones(0), "0")
    put("fp8", "per-token", n, torch.ones(TOKENS), "8")

WRONG_CACHES = [
    ("insert", E4M3, 576, "fp8"),
    ("insert", torch.uint8, 576, "fp8"),
    ("insert", torch.uint8, 656, "ds_mla"),
    ("ds_mla", BF16, 576, "insert"),
    ("ds_mla", E4M3, 576, "fp8"),
    ("fp8", BF16, 576, "insert"),
    ("fp8", torch.uint8, 656, "ds_mla"),
]


def base(kind: str, device: str) -> PrefillCall:
    """The call that is spoiled: whatever can be a tensor is one."""
    return make_prefill(
        kind, TOKENS, HEADS, num_blocks=2, rope=kind in INSERTS, scale_tensors=True,
        device=device, seed=2,
    )  # fmt: skip


def on_device(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return moved(value, device)


@pytest.mark.parametrize("name", CASES)
def test_refused(device: str, name: str) -> None:
    case = CASES[name]
    call = base(case.kind, device)
    boxes = poisoned_outs(call)
    saved = [box.snapshot() for box in boxes]
    changes = {key: on_device(value, device) for key, value in case.change(call).items()}
    given = {"out": as_out([box.tensor for box in boxes]), **changes}
    refused(call, case.blamed, case.found, **given)
    for box, before in zip(boxes, saved, strict=True):
        oracle.assert_same_bits(box.snapshot(), before, "out after a refused call")


@pytest.mark.parametrize("kind", KINDS)
def test_refused_after_a_good_call(device: str, kind: str) -> None:
    """A plan kept from an earlier call hides nothing, and a refused call spoils no plan."""
    call = base(kind, device)
    run_and_check(call)
    for name in [name for name in CASES if name.startswith(f"{kind}-")][::7]:
        case = CASES[name]
        changes = {key: on_device(value, device) for key, value in case.change(call).items()}
        refused(call, case.blamed, case.found, **changes)
    run_and_check(call)


@pytest.mark.parametrize(("kind", "dtype", "width", "fitting"), WRONG_CACHES)
def test_a_cache_of_another_operation_is_told_apart(
    device: str, kind: str, dtype: torch.dtype, width: int, fitting: str
) -> None:
    cache = torch.zeros(2, 16, width).to(dtype).to(device)
    text = refused(
        base(kind, device), "kv_cache", str(width) + "|" + str(dtype)[6:], kv_cache=cache
    )
    assert NAMES[fitting] in text


def test_explain_names_an_unknown_operation() -> None:
    for junk in ("fused_mla_concat", 3, None):
        with pytest.raises((TypeError, ValueError), match=r"op: expected .*, got "):
            k3cupy.explain_mla_prefill(junk)


# Overlap


def with_shared_memory(
    call: PrefillCall, written: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(like `written`, like the argument) in one buffer, the second 16 bytes into the first."""
    tensor = call.args[name]
    out_bytes = written.numel() * written.element_size()
    size = tensor.numel() * tensor.element_size()
    buffer = torch.zeros(out_bytes + size, dtype=torch.uint8, device=call.device)
    at = out_bytes - 16
    inside = buffer[at : at + size].view(tensor.dtype).view(tensor.shape)
    inside.flatten().view(torch.uint8).copy_(tensor.contiguous().flatten().view(torch.uint8))
    return buffer[:out_bytes].view(written.dtype).view(written.shape), inside


def tensor_arguments(kind: str) -> list[str]:
    rest = ["kv_cache", "slot_mapping", "positions", "cos_sin_cache"] if kind in INSERTS else []
    return [*INPUTS[kind], *rest, *(SCALES if kind == "fp8" else ())]


OUT_PAIRS = [
    (kind, index, name)
    for kind in KINDS
    for index in range(len(OUTPUTS[kind]))
    for name in tensor_arguments(kind)
]


@pytest.mark.parametrize(("kind", "index", "name"), OUT_PAIRS)
def test_an_out_that_overlaps_an_argument(device: str, kind: str, index: int, name: str) -> None:
    """Refused, also when a call of the same shapes and alignment was fine before."""
    call = make_prefill(
        kind, TOKENS, HEADS, rope=kind in INSERTS, scale_tensors=True, device=device
    )
    outs = [box.tensor for box in poisoned_outs(call)]
    run_and_check(call, out=as_out(outs))
    outs[index], inside = with_shared_memory(call, outs[index], name)
    text = refused(call, rf"out(\[\d\])?|{name}", "overlap", out=as_out(outs), **{name: inside})
    assert name in text
    assert "out" in text
    assert not outs[index].view(torch.uint8).flatten()[:-16].any()


@pytest.mark.parametrize("kind", ["fp8", "concat_fp8"])
def test_outs_that_overlap_one_another(device: str, kind: str) -> None:
    call = base(kind, device)
    outs = [box.tensor for box in poisoned_outs(call)]
    buffer = torch.zeros(TOKENS * HEADS * 192 + 16, dtype=torch.uint8, device=device)
    for other in range(1, len(outs)):
        again = list(outs)
        again[0] = buffer[: outs[0].numel()].view(E4M3).view(outs[0].shape)
        again[other] = buffer[16 : 16 + outs[other].numel()].view(E4M3).view(outs[other].shape)
        refused(call, r"out\[\d\]", "overlap", out=tuple(again))


@pytest.mark.parametrize("written", ["q", "kv_cache"])
@pytest.mark.parametrize("kind", INSERTS)
def test_what_is_written_in_place_overlaps_an_argument(
    device: str, kind: str, written: str
) -> None:
    call = base(kind, device)
    for name in tensor_arguments(kind):
        if name == written or name in SCALES:
            continue
        target, inside = with_shared_memory(call, call.args[written], name)
        target.copy_(call.args[written])
        changed = call.given(**{written: target, name: inside})
        if written == "q" and kind == "fp8" and name != "kv_cache":
            changed.run()
            continue
        text = refused(changed, f"{written}|{name}", "overlap")
        assert written in text
        assert name in text


def test_a_query_that_is_only_read_may_overlap(device: str) -> None:
    """Without positions q is an input like any other."""
    for kind in ("insert", "ds_mla"):
        call = make_prefill(kind, TOKENS, 1, device=device)
        q = call.args["q"]
        run_and_check(call.given(q=q.clone(), k_nope=q[..., 64:], k_pe=q[:, 0, :64]))


def test_neighbours_in_one_buffer_do_not_overlap(device: str) -> None:
    """q and k side by side in the heads of one buffer; k_nope in q's own gaps."""
    call = base("insert", device)
    box = Guarded((TOKENS, HEADS, 192 + 128), BF16, device)
    q, k_nope = box.tensor[..., :192], box.tensor[..., 192:]
    k_nope.copy_(call.args["k_nope"])
    q.copy_(call.args["q"])
    part = Guarded(q.shape, BF16, device)
    part.tensor, part.storage = q, box.storage
    part.strides, part.offset = q.stride(), q.storage_offset()
    run_into_guarded_outs(call.given(k_nope=k_nope).boxed(q=part))


# Gradients

FOLLOWED = [
    (kind, name)
    for kind in KINDS
    for name in tensor_arguments(kind)
    if name not in ("kv_cache", "slot_mapping", "positions")
]


@pytest.mark.parametrize(("kind", "name"), FOLLOWED)
def test_case25_tensors_that_require_grad(device: str, kind: str, name: str) -> None:
    call = base(kind, device)
    call = call.given(**{name: call.args[name].clone().requires_grad_()})
    text = refused(call, name, "grad")
    assert "no_grad" in text or "detach" in text
    before = call.snapshot()
    with torch.no_grad():
        call.check(before, call.run())
    refused(call, name, "grad")


def test_case25_an_out_that_requires_grad(device: str) -> None:
    call = base("concat", device)
    out = poisoned_outs(call)[0].tensor.clone().requires_grad_()
    refused(call, "out", "grad", out=out)
    with torch.inference_mode():
        call.check_outputs(call.run(out=out).detach())


# Values on the device


@pytest.mark.parametrize("kind", INSERTS)
def test_k3cupy_check_names_bad_values(
    device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3CUPY_CHECK", "1")
    call = make_prefill(kind, 6, 2, rope=True, num_blocks=2, device=device)
    run_and_check(call)
    for slot in (32, 2**31, 2**62):
        slots = torch.tensor([0, -1, slot, 3, -(2**63), 5], device=device)
        refused(call, "slot_mapping", str(slot), slot_mapping=slots)
    for position in (128, -1, 2**31):
        positions = torch.tensor([0, 127, 5, position, 6, 7], device=device)
        refused(call, "positions", str(position), positions=positions)
    good = torch.tensor([31, -1, -2, -(2**63), 0, 9, 99], device=device)
    run_and_check(call.given(slot_mapping=good))
    monkeypatch.setenv("K3CUPY_CHECK", "0")
    wild = torch.tensor([31, 32, -2, 2**62, 0, 9], device=device)
    run_and_check(call.given(slot_mapping=wild))


# Devices


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_case20_one_argument_on_the_cpu(kind: str) -> None:
    call = make_prefill(
        kind, TOKENS, HEADS, rope=kind in INSERTS, scale_tensors=True, device="cuda"
    )
    for name in tensor_arguments(kind):
        host = call.args[name].cpu()
        blamed = ".*" if len(tensor_arguments(kind)) < 4 or name == FIRST[kind] else name
        for tensor in (host, host.pin_memory()):
            refused(call, blamed, "(?i)cpu|cuda|host", **{name: tensor})
    for i, box in enumerate(poisoned_outs(call)):
        outs = [other.tensor for other in poisoned_outs(call)]
        outs[i] = box.tensor.cpu()
        refused(call, r"out.*|k_.*|q", "(?i)cpu|cuda|host", out=as_out(outs))
    run_and_check(call)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_none_is_named(kind: str) -> None:
    call = make_prefill(kind, TOKENS, HEADS, device="cuda")
    for junk in ("side", 1.5, object()):
        refused(call, "stream", type(junk).__name__, stream=junk)
