"""Refusals of MLA calls as tables: an argument, what takes its place, and what the message says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import torch
from helpers import BF16, FP16, every_other, exactly, moved, padded
from mla_helpers import MlaCall, as_out, poisoned_outs, refused, run_and_check

FLOATS_OF_8_BITS = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_SCALED = ("decode", "query")
"""The kinds whose cache has the format that scales and a flag name."""


class Refusal(NamedTuple):
    """An argument, what takes its place, and what the message says it got.

    `change` gets what the argument was. `got` is a pattern, or makes one of what took its place.
    `blamed` is another pattern of names where the message may name others.
    """

    label: str
    name: str
    change: Callable[[Any], Any]
    got: str | Callable[[Any], str]
    blamed: str = ""


# What a message says of a tensor


def its_shape(tensor: torch.Tensor) -> str:
    return exactly(f"shape {list(tensor.shape)}")


def its_dtype(tensor: torch.Tensor) -> str:
    return exactly(name_of(tensor.dtype))


def its_strides(tensor: torch.Tensor) -> str:
    return exactly(f"strides {tuple(tensor.stride())}")


def its_length(tensor: torch.Tensor) -> str:
    return exactly(str(tensor.shape[0]))


def its_type(value: Any) -> str:
    return exactly(type(value).__name__)


def its_value(value: Any) -> str:
    return exactly(repr(value))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def put(label: str, name: str, value: Any, got: Any, blamed: str = "") -> Refusal:
    return Refusal(label, name, lambda _: value, got, blamed)


def of_no_tensors(form: Any) -> Iterator[Refusal]:
    for name in form.tensors:
        if name not in (*form.scales, "positions", "cos_sin_cache", "gate"):
            yield put("None", name, None, exactly("NoneType"))
        for junk in (object(), [1, 2, 3], "text", 1 + 0j, True):
            yield put(f"a {type(junk).__name__}", name, junk, its_type)
    for name in (*form.inputs, *(("kv_cache",) if form.has_cache else ())):
        yield Refusal("on meta", name, lambda t: t.to("meta"), exactly("device meta"))
        sparse = exactly("layout torch.sparse_coo")
        yield Refusal("sparse", name, lambda t: t.to(BF16).to_sparse(), sparse)


# What operations with a cache have in common, of calls of eight tokens


def of_the_cache(form: Any) -> Iterator[Refusal]:
    width = form.cache_width
    for other in (FP16, torch.float32, torch.int16, torch.int8, *FLOATS_OF_8_BITS):
        told = name_of(other) + (f" rows of {width}" if form.kind not in _SCALED else "")
        yield Refusal(
            f"case16, case23 {other}", "kv_cache", lambda t, d=other: t.to(d), exactly(told)
        )
    yield Refusal("narrow", "kv_cache", lambda t: t[..., :-1], its_shape)
    yield Refusal("wide", "kv_cache", lambda t: padded(t, 64), its_shape)
    yield Refusal("2d", "kv_cache", lambda t: t[0], its_shape)
    yield Refusal("4d", "kv_cache", lambda t: t[None], its_shape)
    yield Refusal("inner stride", "kv_cache", every_other, exactly("inner stride 2"))
    yield Refusal("expanded", "kv_cache", lambda t: t[:1].expand(t.shape), its_strides)
    yield Refusal(
        "rows that overlap",
        "kv_cache",
        lambda t: t.as_strided(t.shape, (16 * width, width - 1, 1)),
        its_strides,
    )
    if form.kind in _SCALED and "ds_mla" in form.name:
        narrow = torch.zeros(2, 16, 576, dtype=torch.uint8)
        yield put("narrow rows", "kv_cache", narrow, its_shape)
        wide = torch.zeros(2, 16, 656, dtype=BF16)
        yield put("rows of the inputs' type", "kv_cache", wide, its_dtype)


def of_slots_and_positions(form: Any) -> Iterator[Refusal]:
    wrong = (torch.int16, torch.uint8, torch.int8, torch.uint64, torch.float32, torch.bool)
    for name in ("slot_mapping", "positions"):
        for dtype in wrong:
            yield Refusal(
                f"case10 {dtype}", name, lambda t, d=dtype: t.clamp(0, 1).to(d), its_dtype
            )
        yield Refusal("case09 few", name, lambda t: t[:-1], its_length)
        yield Refusal("case09 none", name, lambda t: t[:0], its_length)
        yield Refusal("2d", name, lambda t: t[:, None], its_shape)
    table = "cos_sin_cache"
    for dtype in (BF16, FP16, torch.float64):
        yield Refusal(f"case23 {dtype}", table, lambda t, d=dtype: t.to(d), its_dtype)
    yield Refusal("narrow", table, lambda t: t[:, :63], its_shape)
    yield Refusal("wide", table, lambda t: padded(t, 64), its_shape)
    yield Refusal("1d", table, lambda t: t[0], its_shape)
    yield Refusal("case12 no rows", table, lambda t: t[:0], exactly("0"))
    yield Refusal("inner stride", table, every_other, exactly("inner stride 2"))
    for name in ("positions", table):
        yield put("alone", name, None, exactly("None"), f"positions|{table}")


def of_scales(form: Any) -> Iterator[Refusal]:
    for name in form.scales:
        for value in (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.5, 1e39, 1e-50):
            yield put(f"{value}", name, value, its_value)
        for value in (10**400, 10**5000, Fraction(10**400)):  # the second has no repr
            yield put("case40 an integer", name, value, exactly("one beyond every float"))
        for dtype in (torch.float64, BF16, torch.int32):
            yield Refusal(f"{dtype}", name, lambda t, d=dtype: t.to(d), its_dtype)
        yield Refusal("two", name, lambda t: t.repeat(2), its_shape)
        yield Refusal("empty", name, lambda t: t[:0], its_shape)
        yield Refusal("one a token", name, lambda t: t.repeat(8), its_shape)
        if form.kind not in _SCALED or name == "cache_scale_inv":
            yield put("None", name, None, exactly("None"))
    if form.kind in _SCALED and not {"cache_scale_inv"} & {*form.scales}:
        yield put("not asked for", "cache_scale_inv", 1.5, exactly("a scale"))
    if form.kind in _SCALED and "ds_mla" in form.name:
        yield put("not asked for", "q_scale_inv", 1.5, exactly("a scale"))


def of_epsilon() -> Iterator[Refusal]:
    for value in (math.nan, math.inf, -1e-6, 1e39, -1, np.float64(-1.0), Fraction(-1, 3)):
        yield put(repr(value), "eps", value, its_value)
    for junk in (None, "1e-6", True, [1e-6], torch.tensor(1e-6), np.array([1e-6])):
        yield put(repr(junk), "eps", junk, ".")


def by_argument(refusals: Iterable[Refusal]) -> dict[str, list[Refusal]]:
    """Refusals by the argument that is changed."""
    found: dict[str, list[Refusal]] = {}
    for refusal in refusals:
        found.setdefault(refusal.name, []).append(refusal)
    return found


def check_refused(call: MlaCall, refusals: list[Refusal]) -> None:
    """Also after a good call: a plan that is kept hides nothing, and a refusal spoils no plan."""
    problems = problems_of(call, refusals)
    run_and_check(call)
    problems += problems_of(call, refusals)
    run_and_check(call)
    assert not problems, "\n".join(problems)


def problems_of(call: MlaCall, refusals: list[Refusal]) -> list[str]:
    """Try each of the refusals; what is wrong with them."""
    boxes = poisoned_outs(call)
    saved = [box.snapshot() for box in boxes]
    outs = as_out([box.tensor for box in boxes])
    problems = []
    for refusal in refusals:
        before = outs if refusal.name == "out" else call.args.get(refusal.name)
        value = moved(refusal.change(before), call.device)
        got = refusal.got if isinstance(refusal.got, str) else refusal.got(value)
        changes = {"out": outs, refusal.name: value}
        try:
            refused(call, refusal.blamed or refusal.name, got, **changes)
        except (AssertionError, pytest.fail.Exception) as error:
            problems.append(f"{refusal.name}, {refusal.label}: {error}")
    for box, bytes_before in zip(boxes, saved, strict=True):
        oracle.assert_same_bits(box.snapshot(), bytes_before, "out after refused calls")
    return problems


def with_shared_memory(
    call: MlaCall, written: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(like `written`, like the argument) in one buffer: the last 16 bytes of one are shared."""
    tensor = call.args[name]
    out_bytes = written.numel() * written.element_size()
    size = tensor.numel() * tensor.element_size()
    buffer = torch.zeros(out_bytes + size, dtype=torch.uint8, device=call.device)
    at = out_bytes - 16
    inside = buffer[at : at + size].view(tensor.dtype).view(tensor.shape)
    inside.flatten().view(torch.uint8).copy_(tensor.contiguous().flatten().view(torch.uint8))
    return buffer[:out_bytes].view(written.dtype).view(written.shape), inside


OVERLAP = exactly("tensors that overlap")


def check_outs_overlap(call: MlaCall, names: Iterable[str]) -> None:
    """Refused, also when a call of the same shapes and alignment was fine before."""
    outs = [box.tensor for box in poisoned_outs(call)]
    run_and_check(call, out=as_out(outs))
    for index in range(len(outs)):
        for name in names:
            changed, inside = with_shared_memory(call, outs[index], name)
            given = as_out([*outs[:index], changed, *outs[index + 1 :]])
            text = refused(call, rf"out(\[\d\])?|{name}", OVERLAP, out=given, **{name: inside})
            assert name in text
            assert "out" in text
            assert not changed.view(torch.uint8).flatten()[:-16].any()
    run_and_check(call, out=as_out(outs))
