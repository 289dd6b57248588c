"""The prefill kernels' arguments, in their order (``cuda_src/mla_prefill.cu``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3cupy.ops.mla_prefill_config import (
    KEY_CONCAT,
    KEY_CONCAT_DS_MLA,
    KV_CONCAT,
    KV_CONCAT_QUANT,
    QKV_QUANT,
    MlaPrefillGrid,
)
from k3cupy.ops.mla_prefill_validate import MlaPrefillProblem
from k3cupy.runtime import launch
from k3cupy.runtime.tensors import byte_stride

_TASKS = ("num_tasks", "num_heads", "groups", "groups_magic", "groups_shift")
_NOPE_STRIDES = ("k_nope_token_stride", "k_nope_head_stride")
_Q_STRIDES = ("q_token_stride", "q_head_stride")
_V_STRIDES = ("v_token_stride", "v_head_stride")
_TABLE = ("positions", "cos_sin_cache", "position_stride", "table_stride", "max_position")
_CACHE = (
    "cache_blocks",
    "tokens_per_block",
    "num_tokens",
    "slot_is_wide",
    "slot_mapping",
    "slot_stride",
    "kv_c_normed",
    "k_pe",
    "kv_c_normed_stride",
    "k_pe_stride",
    "num_slots",
    "block_size",
    "block_size_magic",
    "block_size_shift",
    "cache_block_stride",
    "cache_token_stride",
    "kv_cache",
)
_KEY_CONCAT = (
    *_CACHE,
    *_TASKS,
    *("k_nope", "k", *_NOPE_STRIDES, *_Q_STRIDES, "position_is_wide", "q"),
    *_TABLE,
)
_QKV_QUANT = (
    *_CACHE,
    *("cache_scale_inv", "cache_scale_value"),
    *_TASKS,
    *("q", "q8", "k_nope", "k8", "v", "v8", *_Q_STRIDES, *_NOPE_STRIDES, *_V_STRIDES),
    *("q_scale_value", "q_scale_inv", "k_scale_inv", "v_scale_inv"),
    *("k_scale_value", "v_scale_value", *_TABLE, "position_is_wide"),
)
_KV_CONCAT = (*_TASKS, "k_nope", "k", *_NOPE_STRIDES, "k_pe", "k_pe_stride")
_KV_CONCAT_QUANT = (
    *(*_TASKS, "k_nope", "k8", "v", "v8", *_NOPE_STRIDES, *_V_STRIDES, "k_pe", "k_pe_stride"),
)
NAMES = {
    KEY_CONCAT: _KEY_CONCAT,
    KEY_CONCAT_DS_MLA: _KEY_CONCAT,
    QKV_QUANT: _QKV_QUANT,
    KV_CONCAT: _KV_CONCAT,
    KV_CONCAT_QUANT: _KV_CONCAT_QUANT,
}


def pointers_of(problem: MlaPrefillProblem) -> tuple[tuple[int, int], ...]:
    """Return (place among the kernel's arguments, place among the call's) of the input tensors."""
    operation = problem.operation
    names = NAMES[operation.name]
    return tuple(
        (names.index(name), operation.arguments.index(name))
        for name in operation.inputs
        if name in problem.views
    )


def outputs_of(problem: MlaPrefillProblem) -> tuple[int, ...]:
    """Return the places of the outputs among the kernel's arguments."""
    names = NAMES[problem.operation.name]
    return tuple(names.index(name) for name in problem.operation.outputs)


def scales_of(problem: MlaPrefillProblem) -> dict[str, int]:
    """Return scale argument -> place of its number among the kernel's arguments."""
    names = NAMES[problem.operation.name]
    return {
        name: names.index(name.replace("_inv", "_value"))
        for name in problem.operation.arguments.scales
    }


def fixed_arguments(problem: MlaPrefillProblem, grid: MlaPrefillGrid) -> list[Any]:
    """Return the kernel's arguments with 0 in the place of every pointer."""
    views = problem.views
    wide = np.uint32 if problem.variant.vector else np.int64

    def stride(name: str, axis: int) -> Any:
        return wide(byte_stride(views[name], axis))

    magic, shift = launch.divisor_constants(grid.groups)
    values: dict[str, Any] = {
        "cache_blocks": np.uint32(grid.cache_blocks),
        "num_tasks": np.uint32(grid.num_tasks),
        "num_heads": np.uint32(problem.num_heads),
        "groups": np.uint32(grid.groups),
        "groups_magic": np.uint32(magic),
        "groups_shift": np.uint32(shift),
        "k_pe_stride": stride("k_pe", 0),
        "position_is_wide": np.uint32(0),
        "tokens_per_block": np.uint32(grid.tokens_per_block),
        "num_tokens": np.uint32(problem.num_tokens),
        "num_slots": np.uint32(problem.num_slots),
    }
    for name in ("q", "k_nope", "v"):
        if name in views:
            values[f"{name}_token_stride"] = stride(name, 0)
            values[f"{name}_head_stride"] = stride(name, 1)
    for name in problem.operation.arguments.scales:
        values[name.replace("_inv", "_value")] = np.float32(1)
    if "kv_cache" in views:
        block_size = max(views["kv_cache"].shape[1], 1)
        block_magic, block_shift = launch.divisor_constants(block_size)
        values |= {
            "kv_c_normed_stride": stride("kv_c_normed", 0),
            "cache_block_stride": stride("kv_cache", 0),
            "cache_token_stride": stride("kv_cache", 1),
            "block_size": np.uint32(block_size),
            "block_size_magic": np.uint32(block_magic),
            "block_size_shift": np.uint32(block_shift),
            "slot_is_wide": np.uint32(views["slot_mapping"].dtype == "int64"),
            "slot_stride": byte_stride(views["slot_mapping"], 0),
        }
    if problem.variant.rope:
        values |= {
            "position_is_wide": np.uint32(views["positions"].dtype == "int64"),
            "position_stride": byte_stride(views["positions"], 0),
            "table_stride": byte_stride(views["cos_sin_cache"], 0),
            "max_position": views["cos_sin_cache"].shape[0],
        }
    return [values.get(name, 0) for name in NAMES[problem.operation.name]]
