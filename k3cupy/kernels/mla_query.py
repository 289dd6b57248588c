"""The kernel of the MLA query front, ``cuda_src/mla_query.cu``."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

from k3cupy.call.launch import Launch, Parameters
from k3cupy.constants import (
    CTYPES,
    KV_LORA_RANK,
    Q_LORA_RANK,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
)
from k3cupy.kernels import Rules, Tuned, mla_decode
from k3cupy.kernels.cache_rows import cache_values, rope_values, scale_numbers
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.runtime.tensors import byte_stride

KERNEL, SOURCE = "mla_query", "mla_query.cu"

SEPARATE = "separate"
"""What runs in its place where it cannot, or where it is measured to be slower."""

PARAMETERS = Parameters(
    "pointer w_q_b, w_uk; u32 w_uk_head_stride, w_uk_row_stride; pointer q_norm_weight, qkv_a;"
    "u32 qkv_a_stride, num_tokens; f32 epsilon;"
    "pointer mqa_q, q_scale_inv; f32 q_scale_value; pointer kv_norm_weight, slot_mapping;"
    "i64 slot_stride; u32 slot_is_wide;"
    "pointer kv_cache; u32 cache_block_stride, cache_token_stride;"
    "u32 num_slots, block_size, block_size_magic, block_size_shift;"
    "pointer cache_scale_inv; f32 cache_scale_value; u32 position_is_wide;"
    "pointer positions, cos_sin_cache; i64 position_stride, table_stride, max_position"
)

TILES = (8, 16)
"""Tokens of a product, the narrow side of the tensor cores once or twice."""

MAX_TOKENS = TILES[-1]
"""The most tokens of a launch."""

CLUSTER = 8
"""Blocks of a head."""

_LANES, _INBOX_PADDING, _SUM_PADDING = 32, 16, 2
_STEPS, _STEP_BYTES = 48, 64
"""Along K, of a block, and bytes of a row in one."""


@dataclass(frozen=True)
class Variant:
    """The part of an instance that the call's arguments decide.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        query_fp8: mqa_q is e4m3.
        cache: ``"same"``, ``"fp8"`` or ``"ds_mla"``.
        rope: positions are given.
        weight_is_static: the promise that the weights are older than the preceding kernel.
        tile_m: tokens of a product, 8 or 16; so many are computed at most.
    """

    dtype: str
    query_fp8: bool = False
    cache: str = "same"
    rope: bool = False
    weight_is_static: bool = False
    tile_m: int = 8

    def is_valid(self) -> bool:
        """Return whether the kernel exists for this combination."""
        formats = mla_decode.Variant(self.dtype, self.query_fp8, self.cache)
        return formats.is_valid() and self.tile_m in TILES

    @classmethod
    def of_kind(cls, kind: str, dtype: str = "bfloat16") -> Variant:
        """Return the variant of a kind that is measured: static weights, no RoPE."""
        plain = mla_decode.Variant.of_kind(kind, dtype)
        return cls(dtype, plain.query_fp8, plain.cache, weight_is_static=True)

    @property
    def kind(self) -> str:
        """The name under which tables list it: the formats."""
        return mla_decode.Variant(self.dtype, self.query_fp8, self.cache).kind


@dataclass(frozen=True)
class MlaQueryConfig(Tuned):
    """How a head is shared out.

    Attributes:
        warps: of a block that multiply (8 or 16); one more writes cache rows.
        shared_steps: of a warp's steps along K those whose weights wait in shared memory, not in
            registers; all are 48 a block.
        blocks_per_sm: blocks for which a multiprocessor's registers must do (1 or 2).
    """

    warps: int
    shared_steps: int
    blocks_per_sm: int

    def rules(self) -> Rules:
        """Give what the kernel can be compiled with."""
        steps = self.shared_steps
        yield self.warps in (8, 16), "warps", "8 or 16"
        yield 0 <= steps <= _STEPS // self.warps, "shared_steps", f"0 to {_STEPS} / warps"
        yield self.blocks_per_sm in (1, 2), "blocks_per_sm", "1 or 2"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _LANES * (self.warps + 1)

    def shared_bytes(self, tile_m: int) -> int:
        """Return the dynamic shared memory of a block; the layout is that of the source."""
        weights = 2 * QK_NOPE_HEAD_DIM * KV_LORA_RANK // CLUSTER
        inbox = tile_m * (2 * QK_NOPE_HEAD_DIM + _INBOX_PADDING)
        sums = QK_HEAD_DIM // CLUSTER * (tile_m + _SUM_PADDING) + tile_m
        waiting = self.shared_steps * self.warps * QK_HEAD_DIM // CLUSTER * _STEP_BYTES
        return weights + inbox + 4 * self.warps * sums + 2 * Q_LORA_RANK + waiting

    def name_expression(self, variant: Variant) -> str:
        """Return the C++ name of the instance."""
        cache = f"k3cupy::CacheFormat::{mla_decode.CACHE_FORMATS[variant.cache]}"
        formats = CTYPES[variant.dtype], variant.query_fp8, cache
        flags = variant.rope, variant.weight_is_static
        sizes = variant.tile_m, *astuple(self)
        return instantiation("mla_decode_query", *formats, *flags, *sizes)

    def instance(self, variant: Variant) -> Instance:
        """Return what ``runtime.instances`` compiles."""
        name = self.name_expression(variant)
        shared = self.shared_bytes(variant.tile_m)
        return Instance(SOURCE, name, dynamic_shared_bytes=shared)

    def __str__(self) -> str:
        """For people: ``8 warps, 0 of 6 steps in shared memory``."""
        blocks = f", {self.blocks_per_sm} blocks an SM" if self.blocks_per_sm > 1 else ""
        return (
            f"{self.warps} warps, {self.shared_steps} of {_STEPS // self.warps} steps in shared "
            f"memory{blocks}"
        )


CANDIDATES = tuple(
    MlaQueryConfig(*numbers) for numbers in ((8, 0, 1), (8, 2, 1), (8, 5, 2), (16, 0, 1))
)
"""What the tables choose from."""

UNTUNED = MlaQueryConfig(8, 2, 1)

TWO_AN_SM = MlaQueryConfig(8, 5, 2)
"""For more heads than clusters run at once with a block a multiprocessor."""

Config = MlaQueryConfig


def why_not(num_tokens: int, slow_reason: str | None, gpu: DeviceInfo) -> str | None:
    """Return why a call cannot be one launch on a GPU, or None.

    Args:
        num_tokens: of the call.
        slow_reason: what is wrong with the addresses or strides of its tensors, or None.
        gpu: where it is to run.
    """
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens are more than {MAX_TOKENS}"
    if not gpu.has_clusters:
        return f"{gpu.name} has no clusters of blocks"
    return slow_reason


def variant_of(problem: Any) -> Variant:
    """Return what a validated call decides, the tile by its number of tokens."""
    variant: Variant = problem.variant
    return replace(variant, tile_m=tile_of(problem.num_tokens))


def tile_of(num_tokens: int) -> int:
    """Return the tile that takes a number of tokens."""
    return next(tile for tile in TILES if num_tokens <= tile)


def launches(problem: Any, config: MlaQueryConfig, _gpu: DeviceInfo) -> list[Launch]:
    """Return the launch of a validated call: a cluster a head."""
    views, variant = problem.views, variant_of(problem)
    values = {
        "w_uk_head_stride": byte_stride(views["w_uk"], 0),
        "w_uk_row_stride": byte_stride(views["w_uk"], 1),
        "qkv_a_stride": byte_stride(views["qkv_a"], 0),
        "epsilon": problem.epsilon,
        "q_scale_value": 1,
        "cache_scale_value": 1,
        **cache_values(problem, problem.num_tokens),
        **rope_values(problem),
    }
    addresses = {name: (name, 0) for name in views if name != "out"}
    addresses["mqa_q"] = ("out", 0)
    return [
        Launch(
            instance=config.instance(variant),
            parameters=PARAMETERS,
            values=values,
            addresses=addresses,
            numbers=scale_numbers(problem),
            grid=problem.num_heads,
            block=config.threads,
            shared_bytes=config.shared_bytes(variant.tile_m),
            cluster=CLUSTER,
        )
    ]
