"""What the MLA decode epilogue accepts. Runs once per set of shapes, strides, types and devices."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from k3cupy.constants import DS_MLA_ROW_BYTES, KV_LORA_RANK, LATENT_DIM, QK_ROPE_HEAD_DIM
from k3cupy.ops import checks
from k3cupy.ops.mla_decode_config import MlaDecodeConfig, MlaDecodeVariant
from k3cupy.runtime import producers, tensors
from k3cupy.runtime.tensors import TensorView

_INDEX_TYPES = ("int64", "int32")
_MAX_ROWS = (1 << 31) // 4
"""Rows of one launch: their warps (three a row at most) and numbers must fit 31 bits."""


REQUIRED = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping")
TENSORS = (
    *REQUIRED,
    "q_scale_inv",
    "cache_scale_inv",
    "positions",
    "cos_sin_cache",
    "out",
)
"""The arguments that are tensors, in the order in which a call carries them."""


@dataclass(frozen=True)
class MlaDecodeCall:
    """The arguments of one call, as given.

    Attributes:
        values: in the order of ``TENSORS``; None for what was left out.
        ds_mla: the cache format flag.
        kv_inputs_ready: the promise.
    """

    values: tuple[Any, ...]
    ds_mla: bool
    kv_inputs_ready: bool

    def __getitem__(self, name: str) -> Any:
        """Return an argument by name."""
        return self.values[TENSORS.index(name)]


def views_of(values: tuple[Any, ...]) -> dict[str, TensorView]:
    """Describe the tensors among a call's values, by argument name.

    Raises:
        TypeError: a value that must be a tensor is none.
    """
    return {
        name: producers.view(value, name)
        for name, value in zip(TENSORS, values, strict=True)
        if (value is not None or name in REQUIRED)
        and not (name.endswith("scale_inv") and tensors.is_number(value))
    }


@dataclass(frozen=True)
class MlaDecodeProblem:
    """A call that passed validation.

    Attributes:
        views: the tensors by argument name.
        variant: which kernel the arguments ask for.
        num_tokens: B.
        num_heads: H.
        num_slots: tokens that the cache holds.
        slow_reason: why the element-wise kernel is needed, or None.
    """

    views: dict[str, TensorView]
    variant: MlaDecodeVariant
    num_tokens: int
    num_heads: int
    num_slots: int
    slow_reason: str | None


def validate(call: MlaDecodeCall) -> MlaDecodeProblem:
    """Check everything that the host can see.

    Raises:
        TypeError, ValueError: the text names the argument, what was expected and what was found.
    """
    for name in ("q_scale_inv", "cache_scale_inv"):
        value = call[name]
        if tensors.is_number(value):
            checks.scale_value(name, value)
    views = views_of(call.values)
    dtype = views["ql_nope"].dtype
    _check_types(call, views, dtype)
    num_tokens, num_heads = _check_shapes(call, views)
    for name, v in views.items():
        checks.check_strides(name, v, inner=name not in ("slot_mapping", "positions"))
    checks.check_devices(views)
    _check_outputs(views)
    cache = "ds_mla" if call.ds_mla else "same" if views["kv_cache"].dtype == dtype else "fp8"
    slow_reason = _slow_reason(views)
    variant = MlaDecodeVariant(
        dtype=dtype,
        query_fp8=call["q_scale_inv"] is not None,
        cache=cache,
        rope=call["positions"] is not None,
        kv_inputs_ready=call.kv_inputs_ready,
        vector=slow_reason is None,
    )
    num_blocks, block_size, _ = views["kv_cache"].shape
    _check_limits(num_tokens, num_heads, num_blocks * block_size)
    return MlaDecodeProblem(
        # A problem outlives its call, so it must not keep a caller's memory alive.
        views={name: replace(v, owner=None) for name, v in views.items()},
        variant=variant,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_slots=num_blocks * block_size,
        slow_reason=slow_reason,
    )


def check_grad(views: dict[str, TensorView]) -> None:
    """Refuse tensors that autograd follows, while it does: the operation has no backward.

    Raises:
        ValueError: a tensor requires grad and grad mode is on.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, v in views.items():
        if v.requires_grad:
            checks.reject(
                name,
                "a tensor without gradient",
                "one that requires grad while grad mode is on",
                "Call inside torch.no_grad() or torch.inference_mode()",
            )


def check_flags(ds_mla: Any, kv_inputs_ready: Any, pdl: Any) -> None:
    """Accept only bools, and None for pdl: a truthy value of another type is a mistake.

    Raises:
        TypeError: a flag is something else.
    """
    for name, value in (("ds_mla", ds_mla), ("kv_inputs_ready", kv_inputs_ready)):
        if not isinstance(value, bool):
            checks.reject(name, "True or False", repr(value), error=TypeError)
    if pdl is not None and not isinstance(pdl, bool):
        checks.reject("pdl", "None, True or False", repr(pdl), error=TypeError)


def check_split(split: Any) -> MlaDecodeConfig | int | None:
    """Accept None, 0, 1, 3 or a valid configuration.

    Raises:
        TypeError, ValueError: anything else.
    """
    if split is None or (
        isinstance(split, int) and not isinstance(split, bool) and split in (0, 1, 3)
    ):
        return split
    if isinstance(split, MlaDecodeConfig):
        if not split.is_valid():
            checks.reject("split", "a configuration that the kernel has", repr(split))
        return split
    checks.reject("split", "None, 0, 1, 3 or an MlaDecodeConfig", repr(split))


def _check_types(call: MlaDecodeCall, views: dict[str, TensorView], dtype: str) -> None:
    checks.check_dtype("ql_nope", views["ql_nope"], ("bfloat16", "float16"))
    for name in ("q_pe", "kv_c_normed", "k_pe"):
        if views[name].dtype != dtype:
            checks.reject(name, f"{dtype} like ql_nope", views[name].dtype, error=TypeError)
    _check_cache_type(call, views["kv_cache"], dtype)
    checks.check_dtype("slot_mapping", views["slot_mapping"], _INDEX_TYPES)
    for name in ("q_scale_inv", "cache_scale_inv"):
        if call.ds_mla and call[name] is not None:
            checks.reject(
                name,
                "None with ds_mla=True",
                "a scale",
                "The query keeps its type and every cache tile has its own scale",
            )
        if name in views:
            checks.check_scale_tensor(name, views[name])
    if (call["positions"] is None) != (call["cos_sin_cache"] is None):
        missing = "positions" if call["positions"] is None else "cos_sin_cache"
        other = "cos_sin_cache" if call["positions"] is None else "positions"
        checks.reject(
            missing,
            f"a tensor, because {other} is given",
            "None",
            "RoPE needs both, no RoPE needs neither",
        )
    if call["positions"] is not None:
        checks.check_dtype("positions", views["positions"], _INDEX_TYPES)
        checks.check_dtype("cos_sin_cache", views["cos_sin_cache"], ("float32",))
    if "out" in views:
        accepted = (dtype,) if call["q_scale_inv"] is None else ("float8_e4m3fn", "uint8")
        checks.check_dtype("out", views["out"], accepted)


def _check_cache_type(call: MlaDecodeCall, cache: TensorView, dtype: str) -> None:
    if call.ds_mla:
        checks.check_dtype("kv_cache", cache, ("uint8",), "A ds_mla cache is bytes, 656 a row")
        return
    if cache.shape and cache.shape[-1] == DS_MLA_ROW_BYTES:
        checks.reject(
            "kv_cache",
            f"rows of {LATENT_DIM}",
            f"rows of {DS_MLA_ROW_BYTES}",
            "Pass ds_mla=True for the 656-byte format",
        )
    checks.check_dtype("kv_cache", cache, (dtype, "float8_e4m3fn", "uint8"))
    if cache.dtype == dtype and call["cache_scale_inv"] is not None:
        checks.reject(
            "cache_scale_inv",
            f"None with a {dtype} kv_cache",
            "a scale",
            "Only an fp8 cache is scaled",
        )
    if cache.dtype != dtype and call["cache_scale_inv"] is None:
        checks.reject(
            "cache_scale_inv",
            "a scale, because kv_cache is fp8",
            "None",
            "Pass 1.0 for an unscaled cast",
        )


def _check_shapes(call: MlaDecodeCall, views: dict[str, TensorView]) -> tuple[int, int]:
    checks.check_shape("ql_nope", views["ql_nope"], ("num_tokens", "num_heads", KV_LORA_RANK))
    num_tokens, num_heads, _ = views["ql_nope"].shape
    if num_heads == 0:
        checks.reject("ql_nope", "at least one head", f"shape {list(views['ql_nope'].shape)}")
    like = " like ql_nope"
    checks.check_shape("q_pe", views["q_pe"], (num_tokens, num_heads, QK_ROPE_HEAD_DIM), like)
    checks.check_shape("kv_c_normed", views["kv_c_normed"], (num_tokens, KV_LORA_RANK), like)
    shape: tuple[int, ...] = (num_tokens, QK_ROPE_HEAD_DIM)
    if len(views["k_pe"].shape) == 3:
        shape = (num_tokens, 1, QK_ROPE_HEAD_DIM)
    checks.check_shape("k_pe", views["k_pe"], shape, like)
    width = DS_MLA_ROW_BYTES if call.ds_mla else LATENT_DIM
    checks.check_shape("kv_cache", views["kv_cache"], ("num_blocks", "block_size", width))
    for name in ("slot_mapping", "positions"):
        if name in views:
            checks.check_shape(name, views[name], (f">= {num_tokens}",))
            if views[name].shape[0] < num_tokens:
                checks.reject(
                    name, f"at least {num_tokens} entries, one a token", f"{views[name].shape[0]}"
                )
    if "cos_sin_cache" in views:
        checks.check_shape(
            "cos_sin_cache", views["cos_sin_cache"], ("max_position", QK_ROPE_HEAD_DIM)
        )
        if views["cos_sin_cache"].shape[0] == 0 and num_tokens:
            checks.reject("cos_sin_cache", "at least 1 position", "0")
    if "out" in views:
        checks.check_shape("out", views["out"], (num_tokens, num_heads, LATENT_DIM))
    return num_tokens, num_heads


def _check_outputs(views: dict[str, TensorView]) -> None:
    written = {name: views[name] for name in ("kv_cache", "out") if name in views}
    for name, v in written.items():
        checks.check_writable(name, v)
    if views["kv_cache"].size:
        checks.check_rows_apart("kv_cache", views["kv_cache"])
    out = views.get("out")
    if out is not None and out.size:
        _, num_heads, width = out.shape
        packed = (num_heads * width, width, 1)
        odd = any(e > 1 and s != p for e, s, p in zip(out.shape, out.strides, packed, strict=True))
        if odd:
            checks.reject("out", f"a contiguous tensor, strides {packed}", f"strides {out.strides}")


def _slow_reason(views: dict[str, TensorView]) -> str | None:
    for name, v in views.items():
        if name in ("slot_mapping", "positions") or name.endswith("scale_inv"):
            continue
        reason = checks.misalignment(name, v)
        if reason is not None:
            return reason
    return None


def _check_limits(num_tokens: int, num_heads: int, num_slots: int) -> None:
    if num_tokens * (num_heads + 1) >= _MAX_ROWS:
        checks.reject(
            "ql_nope",
            f"num_tokens * (num_heads + 1) below {_MAX_ROWS}",
            f"{num_tokens * (num_heads + 1)}",
            "Split the batch",
        )
    if num_slots >= 1 << 31:
        checks.reject("kv_cache", "fewer than 2^31 slots", f"{num_slots}")
