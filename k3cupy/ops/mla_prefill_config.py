"""Instances of the MLA prefill and context epilogues: what is tuned, the grid, and the choice."""

from __future__ import annotations

from dataclasses import dataclass

from k3cupy.constants import CTYPES
from k3cupy.ops.measured_table import MeasuredTable
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, template_flag

SOURCE = "mla_prefill.cu"

KEY_CONCAT = "fused_mla_key_concat_kv_cache_insert"
KEY_CONCAT_DS_MLA = "fused_mla_key_concat_ds_mla_insert"
QKV_QUANT = "fused_mla_qkv_quant_kv_cache_fp8_insert"
KV_CONCAT = "fused_mla_kv_concat"
KV_CONCAT_QUANT = "fused_mla_kv_concat_quant_fp8"

OPS = (KEY_CONCAT, KEY_CONCAT_DS_MLA, QKV_QUANT, KV_CONCAT, KV_CONCAT_QUANT)
INSERTS = OPS[:3]
"""The operations that write the cache, and take positions."""

_KERNELS = {
    KEY_CONCAT: "mla_key_concat",
    KEY_CONCAT_DS_MLA: "mla_key_concat",
    QKV_QUANT: "mla_qkv_quant",
    KV_CONCAT: "mla_kv_concat",
    KV_CONCAT_QUANT: "mla_kv_concat_quant",
}
_CACHE_FORMATS = {KEY_CONCAT: "kSame", KEY_CONCAT_DS_MLA: "kDsMla"}

# Threads of one task (`kCopyWidth` and its siblings in the kernel): a 16-bit key is 24 chunks, and
# 8 more turn q; an e4m3 key or query is 12 pieces, a value 8.
_THREADS_OF_A_TASK = {
    KEY_CONCAT: 24,
    KEY_CONCAT_DS_MLA: 24,
    QKV_QUANT: 32,
    KV_CONCAT: 24,
    KV_CONCAT_QUANT: 20,
}
_TURNING_THREADS = 8

_SEARCH_TOKENS = 256
"""Up to here each token's warp looks through the later slots by itself (``cache_insert.cuh``)."""

_MAX_TOKENS_OF_A_BLOCK = 512
"""``LastWriters::kMaxTokens``."""

_CACHE_BLOCKS_AN_SM = 2


@dataclass(frozen=True)
class MlaPrefillVariant:
    """The part of an instance that the call's arguments decide.

    Attributes:
        op: the operation's public name.
        dtype: ``"bfloat16"`` or ``"float16"``, the inputs' type.
        rope: positions are given; only for operations that write the cache.
        k_pe_fp8: k_pe is e4m3 already; only for ``fused_mla_kv_concat_quant_fp8``.
        vector: every row begins at a multiple of 16 bytes, so 128-bit accesses are possible.
    """

    op: str
    dtype: str = "bfloat16"
    rope: bool = False
    k_pe_fp8: bool = False
    vector: bool = True

    def is_valid(self) -> bool:
        """Return whether the kernel exists for this combination."""
        return (
            self.op in OPS
            and self.dtype in CTYPES
            and (self.op in INSERTS or not self.rope)
            and (self.op == KV_CONCAT_QUANT or not self.k_pe_fp8)
        )

    @property
    def kind(self) -> str:
        """The name under which tables list it."""
        return self.op

    @property
    def threads_of_a_task(self) -> int:
        """Threads that one task takes."""
        turns_query = self.rope and self.op in _CACHE_FORMATS
        return _THREADS_OF_A_TASK[self.op] + (_TURNING_THREADS if turns_query else 0)


@dataclass(frozen=True)
class MlaPrefillGrid:
    """The numbers of one launch.

    Attributes:
        groups: tasks that a token's heads make.
        num_tasks: tasks of all tokens.
        row_blocks: blocks that work on tasks.
        cache_blocks: blocks that write cache rows.
        tokens_per_block: tokens of a cache block; as many as its warps where each has one.
    """

    groups: int
    num_tasks: int
    row_blocks: int
    cache_blocks: int
    tokens_per_block: int


@dataclass(frozen=True)
class MlaPrefillConfig:
    """How threads are mapped to the rows.

    Attributes:
        tasks_per_block: tasks of a block, 8 or 16.
        heads_per_task: heads of one token whose rows a thread serves (1, 2, 3, 4 or 6), which are
            its loads under way.
    """

    tasks_per_block: int
    heads_per_task: int

    def is_valid(self) -> bool:
        """Return whether the kernels can be compiled with these numbers."""
        return self.tasks_per_block in (8, 16) and self.heads_per_task in (1, 2, 3, 4, 6)

    def threads(self, variant: MlaPrefillVariant) -> int:
        """Return the threads of a block."""
        return self.tasks_per_block * variant.threads_of_a_task

    def grid(
        self, variant: MlaPrefillVariant, num_tokens: int, num_heads: int, num_sms: int
    ) -> MlaPrefillGrid:
        """Return the numbers of a launch.

        Many tokens are spread over two cache blocks a multiprocessor; a block reads every later
        slot, so there should not be many more.
        """
        groups = -(-num_heads // self.heads_per_task)
        num_tasks = num_tokens * groups
        warps = self.threads(variant) // 32
        tokens = warps
        if num_tokens > _SEARCH_TOKENS:
            spread = -(-num_tokens // (_CACHE_BLOCKS_AN_SM * num_sms))
            tokens = min(max(-(-spread // warps), 2) * warps, _MAX_TOKENS_OF_A_BLOCK)
        return MlaPrefillGrid(
            groups=groups,
            num_tasks=num_tasks,
            row_blocks=-(-num_tasks // self.tasks_per_block),
            cache_blocks=-(-num_tokens // tokens) if variant.op in INSERTS else 0,
            tokens_per_block=tokens,
        )

    def name_expression(self, variant: MlaPrefillVariant) -> str:
        """Return the C++ name of the instance."""
        arguments = []
        if variant.op != KV_CONCAT:  # which copies 16-bit values of either type
            arguments.append(CTYPES[variant.dtype])
        if variant.op in _CACHE_FORMATS:
            arguments.append(f"k3cupy::CacheFormat::{_CACHE_FORMATS[variant.op]}")
        if variant.op in INSERTS:
            arguments.append(template_flag(variant.rope))
        if variant.op == KV_CONCAT_QUANT:
            arguments.append(template_flag(variant.k_pe_fp8))
        arguments += [
            template_flag(variant.vector),
            str(self.tasks_per_block),
            str(self.heads_per_task),
        ]
        return f"k3cupy::{_KERNELS[variant.op]}<{', '.join(arguments)}>"

    def instance(self, variant: MlaPrefillVariant) -> Instance:
        """Return what ``runtime.instances`` compiles."""
        return Instance(SOURCE, self.name_expression(variant))

    def __str__(self) -> str:
        """For people: ``8 tasks a block, 4 heads a task``."""
        plural = "" if self.heads_per_task == 1 else "s"
        return f"{self.tasks_per_block} tasks a block, {self.heads_per_task} head{plural} a task"


CANDIDATES = tuple(MlaPrefillConfig(tasks, heads) for tasks in (8, 16) for heads in (1, 2, 3, 4, 6))
"""What the benchmark measures and the tables choose from: every valid configuration."""

FEW_ROWS = MlaPrefillConfig(8, 1)
MANY_ROWS = MlaPrefillConfig(8, 4)
"""Where no table has measured: few rows are spread over the GPU, many keep loads under way."""

_ROWS_AN_SM = 16
"""Rows that give every multiprocessor two blocks of ``FEW_ROWS``."""

TABLE = MeasuredTable.shipped("mla_prefill.json", MlaPrefillConfig)


def choose(
    variant: MlaPrefillVariant, num_tokens: int, num_heads: int, device: DeviceInfo
) -> tuple[MlaPrefillConfig, str]:
    """Return the configuration for a call and the reason in words.

    The measured table decides by the number of rows, which is tokens times heads. Without an entry
    there is a rule with two answers.

    Args:
        variant: what the arguments decide.
        num_tokens: T.
        num_heads: H.
        device: the GPU.
    """
    if not variant.vector:
        return FEW_ROWS, "the element-wise kernel has one configuration"
    num_rows = num_tokens * num_heads
    found = TABLE.choose(variant.kind, num_rows, device)
    if found is not None:
        return found
    few = num_rows <= _ROWS_AN_SM * device.num_sms
    return FEW_ROWS if few else MANY_ROWS, (
        f"no measured table has this operation; {num_rows} rows on {device.num_sms} SMs are "
        f"{'few' if few else 'many'}"
    )


def dispatched_configs(variant: MlaPrefillVariant) -> tuple[MlaPrefillConfig, ...]:
    """Return every configuration that ``choose`` may give for a variant."""
    if not variant.vector:
        return (FEW_ROWS,)
    return TABLE.configs(variant.kind) or (FEW_ROWS, MANY_ROWS)
