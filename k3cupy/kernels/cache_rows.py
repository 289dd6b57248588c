"""Arguments that the kernels which write latent cache rows share."""

from __future__ import annotations

from typing import Any

from k3cupy.runtime.launch import divisor_constants
from k3cupy.runtime.tensors import byte_stride


def cache_values(problem: Any, num_tokens: int) -> dict[str, int]:
    """Return what tells where a token's cache row is, for a launch of some tokens of a call."""
    views = problem.views
    block_size = max(views["kv_cache"].shape[1], 1)
    magic, shift = divisor_constants(block_size)
    return {
        "cache_block_stride": byte_stride(views["kv_cache"], 0),
        "cache_token_stride": byte_stride(views["kv_cache"], 1),
        "num_tokens": num_tokens,
        "num_slots": problem.num_slots,
        "block_size": block_size,
        "block_size_magic": magic,
        "block_size_shift": shift,
        "slot_is_wide": views["slot_mapping"].dtype == "int64",
        "slot_stride": byte_stride(views["slot_mapping"], 0),
    }


def scale_numbers(problem: Any) -> dict[str, str]:
    """Return which numbers come with each call of an absorbed query and its cache rows.

    That is, of the scales which the formats have, those that are no tensors: parameter -> argument.
    """
    views, variant = problem.views, problem.variant
    scales = {"q_scale_inv": variant.query_fp8, "cache_scale_inv": variant.cache == "fp8"}
    return {
        name.replace("_inv", "_value"): name
        for name, is_used in scales.items()
        if is_used and name not in views
    }


def rope_values(problem: Any) -> dict[str, int]:
    """Return what tells where a token's row of the RoPE table is; nothing without one."""
    views = problem.views
    if "positions" not in views:
        return {"position_is_wide": 0}
    return {
        "position_is_wide": views["positions"].dtype == "int64",
        "position_stride": byte_stride(views["positions"], 0),
        "table_stride": byte_stride(views["cos_sin_cache"], 0),
        "max_position": views["cos_sin_cache"].shape[0],
    }
