"""What the MLA decode epilogue accepts. Runs once per set of shapes, strides, types and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3cupy.constants import DS_MLA_ROW_BYTES, KV_LORA_RANK, LATENT_DIM, QK_ROPE_HEAD_DIM
from k3cupy.ops import checks, mla_checks
from k3cupy.ops.arguments import Arguments, Values
from k3cupy.ops.mla_decode_config import MlaDecodeConfig, MlaDecodeVariant
from k3cupy.runtime.tensors import TensorView

_MAX_ROWS = (1 << 31) // 4
"""Rows of one launch: their warps (three a row at most) and numbers must fit 31 bits."""

_REQUIRED = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping")
_SCALES = ("q_scale_inv", "cache_scale_inv")
ARGUMENTS = Arguments(
    (*_REQUIRED, *_SCALES, "positions", "cos_sin_cache", "out"), _REQUIRED, _SCALES
)
WRITTEN = ("kv_cache", "out")


@dataclass(frozen=True)
class MlaDecodeCall:
    """The arguments of one call, as given.

    Attributes:
        values: in the order of ``ARGUMENTS``; None for what was left out.
        ds_mla: the cache format flag.
        kv_inputs_ready: the promise.
    """

    values: Values
    ds_mla: bool
    kv_inputs_ready: bool

    def __getitem__(self, name: str) -> Any:
        """Return an argument by name."""
        return self.values[ARGUMENTS.index(name)]


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
    ARGUMENTS.check_scale_numbers(call.values)
    views = ARGUMENTS.views(call.values)
    dtype = views["ql_nope"].dtype
    _check_types(call, views, dtype)
    num_tokens, num_heads = _check_shapes(call, views)
    mla_checks.check_layouts(views)
    mla_checks.check_written(views, updated=("kv_cache",), outs=("out",))
    cache = "ds_mla" if call.ds_mla else "same" if views["kv_cache"].dtype == dtype else "fp8"
    slow_reason = mla_checks.slow_reason(views)
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
        views=mla_checks.without_owners(views),
        variant=variant,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_slots=num_blocks * block_size,
        slow_reason=slow_reason,
    )


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
    checks.check_dtype("slot_mapping", views["slot_mapping"], mla_checks.INDEX_TYPES)
    for name in _SCALES:
        if call.ds_mla and call[name] is not None:
            checks.reject(
                name,
                "None with ds_mla=True",
                "a scale",
                "The query keeps its type and every cache tile has its own scale",
            )
        if name in views:
            checks.check_scale_tensor(name, views[name])
    mla_checks.check_rope_types(views)
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
    mla_checks.check_k_pe_shape(views["k_pe"], num_tokens, like)
    width = DS_MLA_ROW_BYTES if call.ds_mla else LATENT_DIM
    checks.check_shape("kv_cache", views["kv_cache"], ("num_blocks", "block_size", width))
    mla_checks.check_index_shapes(views, num_tokens)
    if "out" in views:
        checks.check_shape("out", views["out"], (num_tokens, num_heads, LATENT_DIM))
    return num_tokens, num_heads


def _check_limits(num_tokens: int, num_heads: int, num_slots: int) -> None:
    if num_tokens * (num_heads + 1) >= _MAX_ROWS:
        checks.reject(
            "ql_nope",
            f"num_tokens * (num_heads + 1) below {_MAX_ROWS}",
            f"{num_tokens * (num_heads + 1)}",
            "Split the batch",
        )
    mla_checks.check_slot_count(num_slots)
