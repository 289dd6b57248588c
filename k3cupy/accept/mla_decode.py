"""What the MLA decode epilogue accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3cupy.accept import checks, mla
from k3cupy.call.arguments import Arguments, Output, Values
from k3cupy.constants import DS_MLA_ROW_BYTES, KV_LORA_RANK, LATENT_DIM, QK_ROPE_HEAD_DIM
from k3cupy.kernels.mla_decode import Variant
from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import TensorView

_MAX_ROWS = 1 << 29
"""Rows of one launch: their warps (three a row at most) and numbers must fit 31 bits."""

_REQUIRED = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping")
_SCALES = ("q_scale_inv", "cache_scale_inv")
ARGUMENTS = Arguments((*_REQUIRED, *_SCALES, *mla.ROPE, "out"), _REQUIRED, _SCALES)


def accept(values: Values, *, ds_mla: bool, kv_inputs_ready: bool) -> mla.MlaProblem:
    """Check everything that the host can see of a call of the decode epilogue.

    Args:
        values: in the order of ``ARGUMENTS``.
        ds_mla: the cache format flag.
        kv_inputs_ready: the promise.

    Raises:
        TypeError, ValueError: the text names the argument, what was expected and what was found.
    """
    ARGUMENTS.numbers(values)
    given = {name: v for name, v in zip(ARGUMENTS.names, values, strict=True) if v is not None}
    views = ARGUMENTS.views(values)
    dtype = views["ql_nope"].dtype
    _check_types(given, views, dtype, ds_mla)
    num_tokens, num_heads = _check_shapes(views, ds_mla)
    mla.check_layouts(views)
    mla.check_written(views, updated=("kv_cache",), outs=("out",))
    cache = "ds_mla" if ds_mla else "same" if views["kv_cache"].dtype == dtype else "fp8"
    reason = mla.slow_reason(views)
    num_slots = mla.num_slots(views)
    if num_tokens * (num_heads + 1) >= _MAX_ROWS:
        reject(
            "ql_nope",
            f"num_tokens * (num_heads + 1) below {_MAX_ROWS}",
            f"{num_tokens * (num_heads + 1)}",
            "Split the batch",
        )
    checks.check_grad(views)
    variant = Variant(
        dtype=dtype,
        query_fp8="q_scale_inv" in given,
        cache=cache,
        rope="positions" in given,
        kv_inputs_ready=kv_inputs_ready,
        vector=reason is None,
    )
    out_dtype = "float8_e4m3fn" if variant.query_fp8 else dtype
    return mla.MlaProblem(
        views=checks.without_owners(views),
        num_tokens=num_tokens,
        outputs=(Output("out", "mqa_q", (num_tokens, num_heads, LATENT_DIM), out_dtype),),
        updated=("kv_cache",),
        in_place=(),
        slow_reason=reason,
        variant=variant,
        num_heads=num_heads,
        num_slots=num_slots,
    )


def _check_types(given: Mapping[str, Any], views: mla.Views, dtype: str, ds_mla: bool) -> None:
    checks.check_dtype("ql_nope", views["ql_nope"], ("bfloat16", "float16"))
    for name in ("q_pe", "kv_c_normed", "k_pe"):
        if views[name].dtype != dtype:
            reject(name, f"{dtype} like ql_nope", views[name].dtype, error=TypeError)
    _check_cache(given, views["kv_cache"], dtype, ds_mla)
    checks.check_dtype("slot_mapping", views["slot_mapping"], mla.INDEX_TYPES)
    for name in _SCALES:
        if ds_mla and name in given:
            reject(
                name,
                "None with ds_mla=True",
                "a scale",
                "The query keeps its type and every cache tile has its own scale",
            )
        if name in views:
            checks.check_scale_tensor(name, views[name])
    mla.check_rope_types(views)
    if "out" in views:
        checks.check_dtype("out", views["out"], mla.FP8 if "q_scale_inv" in given else (dtype,))


def _check_cache(given: Mapping[str, Any], cache: TensorView, dtype: str, ds_mla: bool) -> None:
    if ds_mla:
        checks.check_dtype("kv_cache", cache, ("uint8",), "A ds_mla cache is bytes, 656 a row")
        return
    if cache.shape and cache.shape[-1] == DS_MLA_ROW_BYTES:
        reject(
            "kv_cache",
            f"rows of {LATENT_DIM}",
            f"rows of {DS_MLA_ROW_BYTES}",
            "Pass ds_mla=True for the 656-byte format",
        )
    checks.check_dtype("kv_cache", cache, (dtype, *mla.FP8))
    if cache.dtype == dtype and "cache_scale_inv" in given:
        reject(
            "cache_scale_inv",
            f"None with a {dtype} kv_cache",
            "a scale",
            "Only an fp8 cache is scaled",
        )
    if cache.dtype != dtype and "cache_scale_inv" not in given:
        reject(
            "cache_scale_inv",
            "a scale, because kv_cache is fp8",
            "None",
            "Pass 1.0 for an unscaled cast",
        )


def _check_shapes(views: mla.Views, ds_mla: bool) -> tuple[int, int]:
    checks.check_shape("ql_nope", views["ql_nope"], ("num_tokens", "num_heads", KV_LORA_RANK))
    num_tokens, num_heads, _ = views["ql_nope"].shape
    mla.check_heads("ql_nope", views["ql_nope"])
    like = " like ql_nope"
    checks.check_shape("q_pe", views["q_pe"], (num_tokens, num_heads, QK_ROPE_HEAD_DIM), like)
    mla.check_latent_shapes(views, num_tokens, DS_MLA_ROW_BYTES if ds_mla else LATENT_DIM, like)
    if "out" in views:
        checks.check_shape("out", views["out"], (num_tokens, num_heads, LATENT_DIM))
    return num_tokens, num_heads
