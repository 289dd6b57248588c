"""What the prefill and context epilogues accept. Runs once per set of shapes, types and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3cupy.constants import (
    DS_MLA_ROW_BYTES,
    KV_LORA_RANK,
    LATENT_DIM,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
    V_HEAD_DIM,
)
from k3cupy.ops import checks, mla_checks
from k3cupy.ops.arguments import Arguments, Values
from k3cupy.ops.mla_prefill_config import (
    INSERTS,
    KEY_CONCAT,
    KEY_CONCAT_DS_MLA,
    KV_CONCAT,
    KV_CONCAT_QUANT,
    QKV_QUANT,
    MlaPrefillConfig,
    MlaPrefillVariant,
)
from k3cupy.runtime.tensors import TensorView

_FP8 = ("float8_e4m3fn", "uint8")
_MAX_ROWS = 1 << 30
"""Rows of one launch: their numbers, and those of the last block's threads, must fit 31 bits."""

_CACHE_WIDTHS = {
    KEY_CONCAT: LATENT_DIM,
    KEY_CONCAT_DS_MLA: DS_MLA_ROW_BYTES,
    QKV_QUANT: LATENT_DIM,
}
_HEAD_WIDTHS = {"q": QK_HEAD_DIM, "k_nope": QK_NOPE_HEAD_DIM, "v": V_HEAD_DIM}


class Operation:
    """One of the five: its arguments and its outputs.

    Attributes:
        name: public name.
        inputs: positional arguments, in order.
        outputs: name -> width of each output.
        is_fp8: the outputs are e4m3.
        out_names: how messages name ``out``, one name an output.
        arguments: all tensor arguments, ``out`` last.
        first: the input that the others must be like.
    """

    def __init__(
        self, name: str, inputs: Sequence[str], outputs: Mapping[str, int], *, is_fp8: bool
    ) -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = dict(outputs)
        self.is_fp8 = is_fp8
        several = len(outputs) > 1
        self.out_names = tuple(f"out[{i}]" for i in range(len(outputs))) if several else ("out",)
        scales = [name for name in inputs if name.endswith("scale_inv")]
        optional = {*scales, "positions", "cos_sin_cache"}
        self.arguments = Arguments(
            (*inputs, *self.out_names), [n for n in inputs if n not in optional], scales
        )
        self.first = inputs[0]

    def split_out(self, out: Any) -> Values:
        """Return what was given as ``out``, one value an output.

        Raises:
            TypeError, ValueError: several outputs and no tuple of as many tensors.
        """
        count = len(self.out_names)
        if out is None or count == 1:
            return (out,) + (None,) * (count - 1)
        wanted = f"a tuple of {count} tensors ({', '.join(self.outputs)})"
        if not isinstance(out, tuple | list):
            checks.reject("out", wanted, type(out).__name__, error=TypeError)
        if len(out) != count:
            checks.reject("out", wanted, f"{len(out)} of them")
        for name, value in zip(self.out_names, out, strict=True):
            if value is None:
                checks.reject(name, "a tensor like the others", "None", error=TypeError)
        return tuple(out)


_LATENT = ("q", "k_nope", "k_pe", "kv_c_normed")
_PLACES = ("kv_cache", "slot_mapping")
_ROPE = ("positions", "cos_sin_cache")
_SCALES = ("q_scale_inv", "k_scale_inv", "v_scale_inv", "cache_scale_inv")
_KEY = {"k": QK_HEAD_DIM}
_KV8 = {"k8": QK_HEAD_DIM, "v8": V_HEAD_DIM}

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(KEY_CONCAT, (*_LATENT, *_PLACES, *_ROPE), _KEY, is_fp8=False),
        Operation(KEY_CONCAT_DS_MLA, (*_LATENT, *_PLACES, *_ROPE), _KEY, is_fp8=False),
        Operation(
            QKV_QUANT,
            (*_LATENT, "v", *_PLACES, *_SCALES, *_ROPE),
            {"q8": QK_HEAD_DIM, **_KV8},
            is_fp8=True,
        ),
        Operation(KV_CONCAT, ("k_nope", "k_pe"), _KEY, is_fp8=False),
        Operation(KV_CONCAT_QUANT, ("k_nope", "k_pe", "v"), _KV8, is_fp8=True),
    )
}


@dataclass(frozen=True)
class MlaPrefillProblem:
    """A call that passed validation.

    Attributes:
        operation: which of the five.
        views: the tensors by argument name.
        variant: which kernel the arguments ask for.
        num_tokens: T.
        num_heads: H.
        num_slots: tokens that the cache holds; 0 without one.
        written: names of the arguments that the call writes.
        slow_reason: why the element-wise kernel is needed, or None.
    """

    operation: Operation
    views: dict[str, TensorView]
    variant: MlaPrefillVariant
    num_tokens: int
    num_heads: int
    num_slots: int
    written: tuple[str, ...]
    slow_reason: str | None

    @property
    def out_dtype(self) -> str:
        """Type of the outputs, the field's name."""
        return "float8_e4m3fn" if self.operation.is_fp8 else self.variant.dtype


def validate(operation: Operation, values: Values) -> MlaPrefillProblem:
    """Check everything that the host can see.

    Raises:
        TypeError, ValueError: the text names the argument, what was expected and what was found.
    """
    operation.arguments.check_scale_numbers(values)
    views = operation.arguments.views(values)
    dtype = views[operation.first].dtype
    _check_types(operation, values, views, dtype)
    num_tokens, num_heads = _check_shapes(operation, views)
    mla_checks.check_layouts(views)
    rope = "positions" in views
    turns_query = rope and not operation.is_fp8
    updated = ("kv_cache", "q") if turns_query else ("kv_cache",)
    mla_checks.check_written(views, updated=updated, outs=operation.out_names)
    read_or_written = dict(views)
    if not operation.is_fp8 and not rope:
        read_or_written.pop("q", None)
    slow_reason = mla_checks.slow_reason(read_or_written)
    num_slots = 0
    if "kv_cache" in views:
        num_slots = views["kv_cache"].shape[0] * views["kv_cache"].shape[1]
        mla_checks.check_slot_count(num_slots)
    if num_tokens * num_heads >= _MAX_ROWS:
        checks.reject(
            operation.first,
            f"num_tokens * num_heads below {_MAX_ROWS}",
            f"{num_tokens * num_heads}",
            "Split the tokens",
        )
    return MlaPrefillProblem(
        operation=operation,
        views=mla_checks.without_owners(views),
        variant=MlaPrefillVariant(
            op=operation.name,
            dtype=dtype,
            rope=rope,
            k_pe_fp8=operation.name == KV_CONCAT_QUANT and views["k_pe"].dtype in _FP8,
            vector=slow_reason is None,
        ),
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_slots=num_slots,
        written=(*updated, *operation.out_names),
        slow_reason=slow_reason,
    )


def check_config(config: Any) -> MlaPrefillConfig | None:
    """Accept None or a valid configuration.

    Raises:
        ValueError: anything else.
    """
    if config is None:
        return None
    if not isinstance(config, MlaPrefillConfig):
        checks.reject("config", "None or an MlaPrefillConfig", repr(config), error=TypeError)
    if not config.is_valid():
        checks.reject("config", "a configuration that the kernel has", repr(config))
    return config


def _check_types(
    operation: Operation, values: Values, views: Mapping[str, TensorView], dtype: str
) -> None:
    checks.check_dtype(operation.first, views[operation.first], ("bfloat16", "float16"))
    for name in operation.inputs:
        if name == "k_pe" and operation.name == KV_CONCAT_QUANT:
            checks.check_dtype(name, views[name], (dtype, *_FP8))
        elif name in ("k_nope", "k_pe", "kv_c_normed", "v") and views[name].dtype != dtype:
            expected = f"{dtype} like {operation.first}"
            checks.reject(name, expected, views[name].dtype, error=TypeError)
    if operation.name in INSERTS:
        _check_cache(operation.name, views["kv_cache"], dtype)
        checks.check_dtype("slot_mapping", views["slot_mapping"], mla_checks.INDEX_TYPES)
        mla_checks.check_rope_types(views)
    for name in operation.arguments.scales:
        if values[operation.arguments.index(name)] is None:
            checks.reject(name, "a scale", "None", "Pass 1.0 for an unscaled cast", TypeError)
        if name in views:
            checks.check_scale_tensor(name, views[name])
    for name in operation.out_names:
        if name in views:
            checks.check_dtype(name, views[name], _FP8 if operation.is_fp8 else (dtype,))


def _check_cache(op: str, cache: TensorView, dtype: str) -> None:
    """Accept the cache that the operation writes; for another name the operation that does."""
    width = cache.shape[-1] if cache.shape else 0
    fitting = op
    if cache.dtype == dtype:
        fitting = KEY_CONCAT
    elif cache.dtype == "uint8" and width == DS_MLA_ROW_BYTES:
        fitting = KEY_CONCAT_DS_MLA
    elif cache.dtype in _FP8 and width == LATENT_DIM:
        fitting = QKV_QUANT
    accepted = {KEY_CONCAT: (dtype,), KEY_CONCAT_DS_MLA: ("uint8",), QKV_QUANT: _FP8}[op]
    if fitting != op or cache.dtype not in accepted:
        checks.reject(
            "kv_cache",
            f"{' or '.join(accepted)} rows of {_CACHE_WIDTHS[op]}",
            f"{cache.dtype} rows of {width}",
            "" if fitting == op else f"Call {fitting} for such a cache",
            TypeError,
        )


def _check_shapes(operation: Operation, views: Mapping[str, TensorView]) -> tuple[int, int]:
    first = operation.first
    width = _HEAD_WIDTHS[first]
    checks.check_shape(first, views[first], ("num_tokens", "num_heads", width))
    num_tokens, num_heads, _ = views[first].shape
    if num_heads == 0:
        checks.reject(first, "at least one head", f"shape {list(views[first].shape)}")
    like = f" like {first}"
    for name in ("k_nope", "v"):
        if name in views:
            shape = (num_tokens, num_heads, _HEAD_WIDTHS[name])
            checks.check_shape(name, views[name], shape, like)
    mla_checks.check_k_pe_shape(views["k_pe"], num_tokens, like)
    if operation.name in INSERTS:
        checks.check_shape("kv_c_normed", views["kv_c_normed"], (num_tokens, KV_LORA_RANK), like)
        rows = ("num_blocks", "block_size", _CACHE_WIDTHS[operation.name])
        checks.check_shape("kv_cache", views["kv_cache"], rows)
        mla_checks.check_index_shapes(views, num_tokens)
    for name, out_width in zip(operation.out_names, operation.outputs.values(), strict=True):
        if name in views:
            checks.check_shape(name, views[name], (num_tokens, num_heads, out_width))
    return num_tokens, num_heads
