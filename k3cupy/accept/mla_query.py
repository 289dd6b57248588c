"""What the MLA query front accepts."""

from __future__ import annotations

from k3cupy.accept import checks, mla, mla_decode
from k3cupy.accept.mla_norm import check_first_projection
from k3cupy.call.arguments import Arguments, Output, Values
from k3cupy.constants import (
    DS_MLA_ROW_BYTES,
    KV_LORA_RANK,
    LATENT_DIM,
    Q_LORA_RANK,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
)
from k3cupy.kernels import mla_query as kernel
from k3cupy.kernels.mla_query import MlaQueryConfig, Variant
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import reject

_INPUTS = ("qkv_a", "q_norm_weight", "kv_norm_weight", "w_q_b", "w_uk")
_REQUIRED = (*_INPUTS, "kv_cache", "slot_mapping")
_SCALES = ("q_scale_inv", "cache_scale_inv")
ARGUMENTS = Arguments((*_REQUIRED, *_SCALES, *mla.ROPE, "out"), _REQUIRED, _SCALES)


def accept(values: Values, *, eps: float, ds_mla: bool, weight_is_static: bool) -> mla.MlaProblem:
    """Check everything that the host can see of values in the order of ``ARGUMENTS``."""
    ARGUMENTS.numbers(values)
    given = {name: v for name, v in zip(ARGUMENTS.names, values, strict=True) if v is not None}
    views = ARGUMENTS.views(values)
    dtype = views["qkv_a"].dtype
    mla.drop_unread_cache(views, views["qkv_a"])
    mla_decode.check_types(given, views, _INPUTS, ds_mla)
    num_tokens, num_heads = _check_shapes(views, DS_MLA_ROW_BYTES if ds_mla else LATENT_DIM)
    mla_decode.check_rows("qkv_a", num_tokens, num_heads)
    variant = Variant(
        dtype=dtype,
        query_fp8="q_scale_inv" in given,
        cache=mla_decode.cache_of(given, ds_mla),
        rope="positions" in given,
        weight_is_static=weight_is_static,
    )
    out_dtype = "float8_e4m3fn" if variant.query_fp8 else dtype
    out = Output("out", "mqa_q", (num_tokens, num_heads, LATENT_DIM), out_dtype)
    epsilon = checks.epsilon_of(eps)
    updated = ("kv_cache",)
    problem = mla.problem_of(views, variant, (out,), updated, num_heads=num_heads, epsilon=epsilon)
    checks.check_packed("w_q_b", views["w_q_b"])
    return problem


def _check_shapes(views: mla.Views, cache_width: int) -> tuple[int, int]:
    """Check all shapes, and return num_tokens and num_heads."""
    num_tokens = check_first_projection(views["qkv_a"])
    checks.check_shape("q_norm_weight", views["q_norm_weight"], (Q_LORA_RANK,))
    checks.check_shape("kv_norm_weight", views["kv_norm_weight"], (KV_LORA_RANK,))
    w_uk = views["w_uk"]
    checks.check_shape("w_uk", w_uk, ("num_heads", QK_NOPE_HEAD_DIM, KV_LORA_RANK))
    num_heads = w_uk.shape[0]
    if num_heads == 0:
        reject("w_uk", "at least one head", f"shape {list(w_uk.shape)}")
    rows = num_heads * QK_HEAD_DIM
    note = f" ({QK_HEAD_DIM} rows a head, and w_uk has {num_heads})"
    checks.check_shape("w_q_b", views["w_q_b"], (rows, Q_LORA_RANK), note)
    mla.check_places(views, num_tokens, cache_width)
    if "out" in views:
        checks.check_shape("out", views["out"], (num_tokens, num_heads, LATENT_DIM))
    return num_tokens, num_heads


def why_not(problem: mla.MlaProblem, config: MlaQueryConfig, gpu: DeviceInfo) -> str | None:
    """Return why a configuration cannot compute a call in one launch, or None."""
    found = kernel.why_not(problem.num_tokens, problem.slow_reason, gpu)
    if found is not None:
        return found
    needed = config.shared_bytes(kernel.variant_of(problem).tile_m)
    return checks.lack_of_shared_memory(config, needed, gpu)


def check_config(problem: mla.MlaProblem, config: MlaQueryConfig, gpu: DeviceInfo) -> None:
    """Refuse a configuration that the caller named and that cannot compute a call on a GPU."""
    if (why := why_not(problem, config, gpu)) is not None:
        hint = "Leave it out, and separate kernels run"
        reject("config", "None, because the call cannot be one launch", why, hint)
