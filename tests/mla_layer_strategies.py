"""Calls of the operations around the epilogue that nobody would think of, for property tests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from helpers import BF16, FP16, Guarded, guarded
from hypothesis import strategies as st
from mla_helpers import FORMS
from mla_layer_helpers import LAYER_FORMS, NORM, QUERY, LayerCall, gains, up_projections
from mla_layer_oracle import NOPE, QKV_A, V
from oracle import LATENT
from strategies import PDL, Layouts, MlaCase, _cache, _rope, _slots, repeated, values

_EPSILONS = (1e-6, 1e-5, 1e-3, 1, np.float32(1e-6), np.float64(1e-5))
_SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0)
_FEW, _MORE = st.integers(0, 9), st.sampled_from((15, 16, 17, 31, 33, 70))
_SHIFTS = 9
_FORMATS = {"decode": "query", "decode-fp8": "query-fp8", "decode-uint8": "query-uint8"}
_FORMATS["decode-ds_mla"] = "query-ds_mla"


@st.composite
def layer_cases(
    draw: st.DrawFn, kind: str, device: str = "cpu", *, to_be_spoiled: bool = False
) -> MlaCase:
    """A good call. One that is to be spoiled has something in each of its tensors.

    On a GPU, where each instance is compiled, only what other tests compile is drawn.
    """
    tokens = draw(st.integers(2, 5) if to_be_spoiled else st.one_of(_FEW, _FEW, _MORE))
    heads = draw(st.integers(2, 3) if to_be_spoiled else st.integers(1, 3))
    dtype, layouts = draw(st.sampled_from((BF16, FP16))), Layouts(draw(st.booleans()))
    seed, options = draw(st.integers(0, 2**16)), {"pdl": draw(PDL)}
    options["weight_is_static"] = device == "cpu" and draw(st.booleans())
    boxes: dict[str, Guarded] = {}
    if kind in (NORM, QUERY):
        first = _first(draw, kind, (tokens, QKV_A + 8 * draw(st.integers(0, 2))), dtype, seed)
        args: dict[str, Any] = {"qkv_a": guarded(first, **layouts.of_rows(draw, *first.shape))}
        args["eps"] = draw(st.sampled_from(_EPSILONS))
        names = ("q_weight", "kv_weight") if kind == NORM else ("q_norm_weight", "kv_norm_weight")
        for name, gain in zip(names, gains(dtype, "cpu"), strict=True):
            args[name] = guarded(gain, shift=_shift(draw, layouts))
        form = LAYER_FORMS[kind]
    if kind == QUERY:
        epilogue = FORMS[draw(st.sampled_from(tuple(_FORMATS)))]
        form, boxes = LAYER_FORMS[_FORMATS[epilogue.name]], {}
        w_q_b, kv_b = up_projections(heads, dtype, "cpu")
        args["w_q_b"] = guarded(w_q_b, shift=_shift(draw, layouts))
        args["w_uk"] = kv_b[:, :NOPE]
        least = 2 * to_be_spoiled
        boxes["kv_cache"] = _cache(draw, epilogue, dtype, tokens, layouts, at_least=least)
        capacity = math.prod(boxes["kv_cache"].shape[:2])
        args["slot_mapping"] = _slots(draw, epilogue, tokens, capacity, seed)
        if draw(st.booleans()):
            args |= _rope(draw, tokens, seed, layouts, at_least=1 + to_be_spoiled)
        for name in epilogue.scales:
            scale = draw(st.floats(0.125, 8, width=32))
            args[name] = guarded(torch.full((1,), scale)) if draw(st.booleans()) else scale
        if form.name == "query-ds_mla":
            args["ds_mla"] = True
    elif kind != NORM:
        form = LAYER_FORMS[draw(st.sampled_from(_VALUE_FORMS))]
        first = _first(draw, kind, (tokens, heads, LATENT), dtype, seed)
        layout, which = layouts.of_heads(draw, first.shape, may_repeat=not to_be_spoiled)  # type: ignore[arg-type]
        args = {"latent": repeated(first, which, layout)}
        w_uv = up_projections(heads, dtype, "cpu")[1][:, NOPE:].transpose(1, 2)
        packed = guarded(w_uv.contiguous(), shift=_shift(draw, layouts))
        args["w_uv"] = packed if form.settings.get("packed") else w_uv
        if "gate" in form.inputs:
            gate = values("ordinary", dtype, (tokens, heads * V), seed + 5)
            args["gate"] = guarded(gate, **layouts.of_rows(draw, tokens, heads * V))
    off = draw(st.integers(0 if to_be_spoiled else -_SHIFTS, _SHIFTS - 1))
    out_shift = None if off < 0 else (16 if layouts.aligned else 2) * off
    return MlaCase(form, LayerCall(kind, args).boxed(**boxes), options, out_shift)


_VALUE_FORMS = ("value", "value-gate", "value-packed", "value-packed-gate")


def _shift(draw: st.DrawFn, layouts: Layouts) -> int:
    return (16 if layouts.aligned else 2) * draw(st.integers(0, 8))


def _first(
    draw: st.DrawFn, kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """What comes from the kernel before: ordinary, tiny, or with a few special numbers."""
    which = draw(st.sampled_from(("ordinary", "tiny", "special")))
    found = values("tiny" if which == "tiny" else "ordinary", dtype, shape, seed)
    if which == "special" and found.numel():
        found = found.clone()
        large = (torch.finfo(dtype).max,) if kind == NORM else ()
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.integers(0, found.numel() - 1))
            found.view(-1)[place] = draw(st.sampled_from(_SPECIALS + large))
    return found
