"""What the MLA decode epilogue accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3cupy.accept import checks, mla
from k3cupy.call.arguments import Arguments, Output, Values
from k3cupy.constants import DS_MLA_ROW_BYTES, KV_LORA_RANK, LATENT_DIM, QK_ROPE_HEAD_DIM
from k3cupy.kernels.mla_decode import Variant
from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import TensorView

_MAX_ROWS = 1 << 29
"""Rows of one launch: their warps (three a row at most) and numbers must fit 31 bits."""

_HEAD_WIDTHS = {"ql_nope": KV_LORA_RANK, "q_pe": QK_ROPE_HEAD_DIM}
_REQUIRED = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping")
_SCALES = ("q_scale_inv", "cache_scale_inv")
ARGUMENTS = Arguments((*_REQUIRED, *_SCALES, *mla.ROPE, "out"), _REQUIRED, _SCALES)


def accept(values: Values, *, ds_mla: bool, kv_inputs_ready: bool) -> mla.MlaProblem:
    """Check everything that the host can see of values in the order of ``ARGUMENTS``."""
    ARGUMENTS.numbers(values)
    given = {name: v for name, v in zip(ARGUMENTS.names, values, strict=True) if v is not None}
    views = ARGUMENTS.views(values)
    dtype = views["ql_nope"].dtype
    mla.drop_unread_cache(views, views["ql_nope"])
    check_types(given, views, ("ql_nope", "q_pe", "kv_c_normed", "k_pe"), ds_mla)
    width = DS_MLA_ROW_BYTES if ds_mla else LATENT_DIM
    num_tokens, num_heads = mla.check_shapes(views, _HEAD_WIDTHS, width, {"out": LATENT_DIM})
    check_rows("ql_nope", num_tokens, num_heads)
    variant = Variant(
        dtype=dtype,
        query_fp8="q_scale_inv" in given,
        cache=cache_of(given, ds_mla),
        rope="positions" in given,
        kv_inputs_ready=kv_inputs_ready,
    )
    out_dtype = "float8_e4m3fn" if variant.query_fp8 else dtype
    out = Output("out", "mqa_q", (num_tokens, num_heads, LATENT_DIM), out_dtype)
    return mla.problem_of(views, variant, (out,), updated=("kv_cache",), num_heads=num_heads)


def check_rows(first: str, num_tokens: int, num_heads: int) -> None:
    """Refuse a call of more rows than a launch can have, by the name of its first input."""
    num_rows = num_tokens * (num_heads + 1)
    if num_rows >= _MAX_ROWS:
        expected = f"num_tokens * (num_heads + 1) below {_MAX_ROWS}"
        reject(first, expected, f"{num_rows}", "Split the batch")


def cache_of(given: Mapping[str, Any], ds_mla: bool) -> str:
    """Return what kernels call the format of the cache."""
    return "ds_mla" if ds_mla else "fp8" if "cache_scale_inv" in given else "same"


def check_types(
    given: Mapping[str, Any], views: mla.Views, inputs: Sequence[str], ds_mla: bool
) -> None:
    """Check the types of a call that makes an absorbed query and writes cache rows.

    Args:
        given: what was given, numbers too.
        views: the tensors among it.
        inputs: names of those of one type with 16 bits.
        ds_mla: the cache has 656-byte rows.
    """
    dtype = mla.check_alike(views, inputs)
    if "kv_cache" in views:
        _check_cache(given, views["kv_cache"], dtype, ds_mla)
    checks.check_dtype("slot_mapping", views["slot_mapping"], mla.INDEX_TYPES)
    for name in _SCALES:
        if ds_mla and name in given:
            hint = "The query keeps its type and every cache tile has its own scale"
            reject(name, "None with ds_mla=True", "a scale", hint)
        if name in views:
            checks.check_scale_tensor(name, views[name])
    mla.check_rope_types(views)
    if "out" in views:
        checks.check_dtype("out", views["out"], mla.FP8 if "q_scale_inv" in given else (dtype,))


def _check_cache(given: Mapping[str, Any], cache: TensorView, dtype: str, ds_mla: bool) -> None:
    if ds_mla:
        checks.check_dtype("kv_cache", cache, mla.FP8, "A ds_mla cache is bytes, 656 a row")
        return
    if cache.shape and cache.shape[-1] == DS_MLA_ROW_BYTES:
        expected, got = f"rows of {LATENT_DIM}", f"rows of {DS_MLA_ROW_BYTES}"
        reject("kv_cache", expected, got, "Pass ds_mla=True for the 656-byte format")
    checks.check_dtype("kv_cache", cache, (dtype, *mla.FP8))
    name, is_scaled = "cache_scale_inv", "cache_scale_inv" in given
    if cache.dtype == dtype and is_scaled:
        reject(name, f"None with a {dtype} kv_cache", "a scale", "Only an fp8 cache is scaled")
    if cache.dtype != dtype and not is_scaled:
        hint = "Pass 1.0 for an unscaled cast"
        reject(name, "a scale, because kv_cache is fp8", "None", hint)
