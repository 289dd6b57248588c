"""What the MLA prefill and context epilogues accept."""

from __future__ import annotations

from k3cupy.accept import checks, mla
from k3cupy.accept.mla import Signature
from k3cupy.call.arguments import Output, Values
from k3cupy.constants import (
    DS_MLA_ROW_BYTES,
    LATENT_DIM,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
    V_HEAD_DIM,
)
from k3cupy.kernels import mla_prefill as kernel
from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import TensorView

_MAX_ROWS = 1 << 30
"""Rows of one launch: their numbers, and those of the last block's threads, must fit 31 bits."""

_CACHE_WIDTHS = dict.fromkeys(kernel.INSERTS, LATENT_DIM)
_CACHE_WIDTHS[kernel.KEY_CONCAT_DS_MLA] = DS_MLA_ROW_BYTES
_HEAD_WIDTHS = {"q": QK_HEAD_DIM, "k_nope": QK_NOPE_HEAD_DIM, "v": V_HEAD_DIM}


_LATENT = ("q", "k_nope", "k_pe", "kv_c_normed")
_PLACES = ("kv_cache", "slot_mapping")
_SCALES = ("q_scale_inv", "k_scale_inv", "v_scale_inv", "cache_scale_inv")
_KEY = {"k": QK_HEAD_DIM}
_KV8 = {"k8": QK_HEAD_DIM, "v8": V_HEAD_DIM}

SIGNATURES = {
    signature.op: signature
    for signature in (
        Signature(kernel.KEY_CONCAT, (*_LATENT, *_PLACES, *mla.ROPE), _KEY, is_fp8=False),
        Signature(kernel.KEY_CONCAT_DS_MLA, (*_LATENT, *_PLACES, *mla.ROPE), _KEY, is_fp8=False),
        Signature(
            kernel.QKV_QUANT,
            (*_LATENT, "v", *_PLACES, *_SCALES, *mla.ROPE),
            {"q8": QK_HEAD_DIM, **_KV8},
            is_fp8=True,
        ),
        Signature(kernel.KV_CONCAT, ("k_nope", "k_pe"), _KEY, is_fp8=False),
        Signature(kernel.KV_CONCAT_QUANT, ("k_nope", "k_pe", "v"), _KV8, is_fp8=True),
    )
}


def accept(signature: Signature, values: Values) -> mla.MlaProblem:
    """Check everything that the host can see of values in the order of ``signature.arguments``."""
    op, first = signature.op, signature.inputs[0]
    signature.arguments.numbers(values)
    views = signature.arguments.views(values)
    dtype = views[first].dtype
    mla.drop_unread_cache(views, views[first])
    _check_types(signature, values, views, dtype)
    widths = {name: _HEAD_WIDTHS[name] for name in (first, "k_nope", "v") if name in views}
    outs = dict(zip(signature.out_names, signature.outputs.values(), strict=True))
    num_tokens, num_heads = mla.check_shapes(views, widths, _CACHE_WIDTHS.get(op, 0), outs)
    num_rows = num_tokens * num_heads
    if num_rows >= _MAX_ROWS:
        expected = f"num_tokens * num_heads below {_MAX_ROWS}"
        reject(first, expected, f"{num_rows}", "Split the tokens")
    rope, out_dtype = "positions" in views, "float8_e4m3fn" if signature.is_fp8 else dtype
    k_pe_fp8 = op == kernel.KV_CONCAT_QUANT and views["k_pe"].dtype in mla.FP8
    turns_query = rope and not signature.is_fp8
    return mla.problem_of(
        views,
        kernel.Variant(op=op, dtype=dtype, rope=rope, k_pe_fp8=k_pe_fp8),
        tuple(
            Output(argument, name, (num_tokens, num_heads, width), out_dtype)
            for argument, (name, width) in zip(outs, signature.outputs.items(), strict=True)
        ),
        updated=("kv_cache", *(["q"] * turns_query)) if op in kernel.INSERTS else (),
        untouched=() if rope or signature.is_fp8 else ("q",),
        num_heads=num_heads,
    )


def _check_types(signature: Signature, values: Values, views: mla.Views, dtype: str) -> None:
    op, first, arguments = signature.op, signature.inputs[0], signature.arguments
    checks.check_dtype(first, views[first], ("bfloat16", "float16"))
    for name in signature.inputs:
        if name == "k_pe" and op == kernel.KV_CONCAT_QUANT:
            checks.check_dtype(name, views[name], (dtype, *mla.FP8))
        elif name in ("k_nope", "k_pe", "kv_c_normed", "v") and views[name].dtype != dtype:
            reject(name, f"{dtype} like {first}", views[name].dtype, error=TypeError)
    if op in kernel.INSERTS:
        if "kv_cache" in views:
            _check_cache(op, views["kv_cache"], dtype)
        checks.check_dtype("slot_mapping", views["slot_mapping"], mla.INDEX_TYPES)
        mla.check_rope_types(views)
    for name in arguments.scales:
        if values[arguments.places[name]] is None:
            reject(name, "a scale", "None", "Pass 1.0 for an unscaled cast", TypeError)
        if name in views:
            checks.check_scale_tensor(name, views[name])
    for name in signature.out_names:
        if name in views:
            checks.check_dtype(name, views[name], mla.FP8 if signature.is_fp8 else (dtype,))


def _check_cache(op: str, cache: TensorView, dtype: str) -> None:
    """Accept the cache that the operation writes; for another name the operation that does."""
    width = cache.shape[-1] if cache.shape else 0
    fitting = op
    if cache.dtype == dtype:
        fitting = kernel.KEY_CONCAT
    elif cache.dtype in mla.FP8 and width == DS_MLA_ROW_BYTES:
        fitting = kernel.KEY_CONCAT_DS_MLA
    elif cache.dtype in mla.FP8 and width == LATENT_DIM:
        fitting = kernel.QKV_QUANT
    accepted = (dtype,) if op == kernel.KEY_CONCAT else mla.FP8
    if fitting != op or cache.dtype not in accepted:
        expected = f"{' or '.join(accepted)} rows of {_CACHE_WIDTHS[op]}"
        hint = "" if fitting == op else f"Call {fitting} for such a cache"
        reject("kv_cache", expected, f"{cache.dtype} rows of {width}", hint, TypeError)
