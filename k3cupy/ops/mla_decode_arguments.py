"""The decode kernel's arguments, in its order (``cuda_src/mla_decode.cu``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3cupy.ops import mla_decode_validate
from k3cupy.ops.mla_decode_validate import MlaDecodeProblem
from k3cupy.runtime import launch
from k3cupy.runtime.tensors import byte_stride

ARGUMENTS = (
    "cache_blocks",
    "num_query_rows",
    "num_heads",
    "num_heads_magic",
    "ql_nope",
    "q_pe",
    "mqa_q",
    "ql_nope_token_stride",
    "ql_nope_head_stride",
    "q_pe_token_stride",
    "q_pe_head_stride",
    "num_heads_shift",
    "q_scale_value",
    "q_scale_inv",
    "kv_c_normed",
    "k_pe",
    "slot_mapping",
    "kv_cache",
    "kv_c_stride",
    "k_pe_stride",
    "cache_block_stride",
    "cache_token_stride",
    "num_tokens",
    "num_slots",
    "block_size",
    "block_size_magic",
    "block_size_shift",
    "slot_is_wide",
    "slot_stride",
    "cache_scale_inv",
    "cache_scale_value",
    "position_is_wide",
    "positions",
    "cos_sin_cache",
    "position_stride",
    "table_stride",
    "max_position",
)
MQA_Q = ARGUMENTS.index("mqa_q")
Q_SCALE_VALUE = ARGUMENTS.index("q_scale_value")
CACHE_SCALE_VALUE = ARGUMENTS.index("cache_scale_value")


_ONE_PER_TOKEN = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping", "positions")


def pointers_of(problem: MlaDecodeProblem, start: int) -> tuple[tuple[int, int, int], ...]:
    """Return where the tensors' addresses go, moved to a slice's first token."""
    return tuple(
        (
            ARGUMENTS.index(name),
            mla_decode_validate.ARGUMENTS.index(name),
            start * byte_stride(v, 0) if name in _ONE_PER_TOKEN else 0,
        )
        for name, v in problem.views.items()
        if name != "out"
    )


def fixed_arguments(problem: MlaDecodeProblem, num_tokens: int, cache_blocks: int) -> list[Any]:
    """Return the kernel's arguments for some tokens, with 0 in the place of every pointer."""
    views = problem.views
    wide = np.int64 if not problem.variant.vector else np.uint32

    def stride(name: str, axis: int) -> Any:
        return wide(byte_stride(views[name], axis))

    block_size = max(views["kv_cache"].shape[1], 1)
    heads_magic, heads_shift = launch.divisor_constants(problem.num_heads)
    block_magic, block_shift = launch.divisor_constants(block_size)
    values: dict[str, Any] = {
        "cache_blocks": np.uint32(cache_blocks),
        "num_query_rows": np.uint32(num_tokens * problem.num_heads),
        "num_heads": np.uint32(problem.num_heads),
        "num_heads_magic": np.uint32(heads_magic),
        "num_heads_shift": np.uint32(heads_shift),
        "ql_nope_token_stride": stride("ql_nope", 0),
        "ql_nope_head_stride": stride("ql_nope", 1),
        "q_pe_token_stride": stride("q_pe", 0),
        "q_pe_head_stride": stride("q_pe", 1),
        "q_scale_value": np.float32(1),
        "kv_c_stride": stride("kv_c_normed", 0),
        "k_pe_stride": stride("k_pe", 0),
        "cache_block_stride": stride("kv_cache", 0),
        "cache_token_stride": stride("kv_cache", 1),
        "num_tokens": np.uint32(num_tokens),
        "num_slots": np.uint32(problem.num_slots),
        "block_size": np.uint32(block_size),
        "block_size_magic": np.uint32(block_magic),
        "block_size_shift": np.uint32(block_shift),
        "slot_is_wide": np.uint32(views["slot_mapping"].dtype == "int64"),
        "slot_stride": byte_stride(views["slot_mapping"], 0),
        "cache_scale_value": np.float32(1),
        "position_is_wide": np.uint32(0),
    }
    if problem.variant.rope:
        values["position_is_wide"] = np.uint32(views["positions"].dtype == "int64")
        values["position_stride"] = byte_stride(views["positions"], 0)
        values["table_stride"] = byte_stride(views["cos_sin_cache"], 0)
        values["max_position"] = views["cos_sin_cache"].shape[0]
    return [values.get(name, 0) for name in ARGUMENTS]
