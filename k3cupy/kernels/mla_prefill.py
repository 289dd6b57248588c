"""The kernels of the MLA prefill and context epilogues, ``cuda_src/mla_prefill.cu``."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from k3cupy.call.launch import Launch, Parameters
from k3cupy.constants import CTYPES
from k3cupy.kernels import Rules, Tuned
from k3cupy.kernels.cache_rows import cache_values, rope_values
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.runtime.launch import divisor_constants
from k3cupy.runtime.tensors import byte_stride

KERNEL, SOURCE = "mla_prefill", "mla_prefill.cu"

KEY_CONCAT = "fused_mla_key_concat_kv_cache_insert"
KEY_CONCAT_DS_MLA = "fused_mla_key_concat_ds_mla_insert"
QKV_QUANT = "fused_mla_qkv_quant_kv_cache_fp8_insert"
KV_CONCAT = "fused_mla_kv_concat"
KV_CONCAT_QUANT = "fused_mla_kv_concat_quant_fp8"

OPS = (KEY_CONCAT, KEY_CONCAT_DS_MLA, QKV_QUANT, KV_CONCAT, KV_CONCAT_QUANT)
INSERTS = OPS[:3]
"""The operations that write the cache, and take positions."""

FUNCTIONS = {
    KEY_CONCAT: "mla_key_concat",
    KEY_CONCAT_DS_MLA: "mla_key_concat",
    QKV_QUANT: "mla_qkv_quant",
    KV_CONCAT: "mla_kv_concat",
    KV_CONCAT_QUANT: "mla_kv_concat_quant",
}
"""Operation -> the kernel of the source that computes it."""

_TASKS = "u32 num_tasks, num_heads, groups, groups_magic, groups_shift"
_CACHE = (
    "u32 cache_blocks, tokens_per_block, num_tokens, slot_is_wide;"
    "pointer slot_mapping; i64 slot_stride; pointer kv_c_normed, k_pe;"
    "stride kv_c_normed_stride, k_pe_stride;"
    "u32 num_slots, block_size, block_size_magic, block_size_shift;"
    "stride cache_block_stride, cache_token_stride; pointer kv_cache"
)
_NOPE_STRIDES = "stride k_nope_token_stride, k_nope_head_stride"
_Q_STRIDES = "stride q_token_stride, q_head_stride"
_V_STRIDES = "stride v_token_stride, v_head_stride"
_TABLE = "pointer positions, cos_sin_cache; i64 position_stride, table_stride, max_position"
PARAMETERS = {
    "mla_key_concat": Parameters(
        f"{_CACHE}; {_TASKS}; pointer k_nope, k; {_NOPE_STRIDES}; {_Q_STRIDES};"
        f"u32 position_is_wide; pointer q; {_TABLE}"
    ),
    "mla_qkv_quant": Parameters(
        f"{_CACHE}; pointer cache_scale_inv; f32 cache_scale_value; {_TASKS};"
        f"pointer q, q8, k_nope, k8, v, v8; {_Q_STRIDES}; {_NOPE_STRIDES}; {_V_STRIDES};"
        "f32 q_scale_value; pointer q_scale_inv, k_scale_inv, v_scale_inv;"
        f"f32 k_scale_value, v_scale_value; {_TABLE}; u32 position_is_wide"
    ),
    "mla_kv_concat": Parameters(
        f"{_TASKS}; pointer k_nope, k; {_NOPE_STRIDES}; pointer k_pe; stride k_pe_stride"
    ),
    "mla_kv_concat_quant": Parameters(
        f"{_TASKS}; pointer k_nope, k8, v, v8; {_NOPE_STRIDES}; {_V_STRIDES};"
        "pointer k_pe; stride k_pe_stride"
    ),
}
"""Of each kernel of the source."""
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

_COMPARED_TOKENS = 4096
"""Up to here a cache block compares its slots with all later ones (``cache_insert.cuh``). Beyond,
where that grows with the square, it takes more rows and looks them up in a table."""

_MAX_TOKENS_OF_A_BLOCK = 512
"""``LastWriters::kMaxTokens``."""

_CACHE_BLOCKS_AN_SM = 2


@dataclass(frozen=True)
class Variant:
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


@dataclass(frozen=True)
class MlaPrefillConfig(Tuned):
    """How threads are mapped to the rows.

    Attributes:
        tasks_per_block: tasks of a block, 8 or 16.
        heads_per_task: heads of one token whose rows a thread serves (1, 2, 3, 4 or 6), which are
            its loads under way.
    """

    tasks_per_block: int
    heads_per_task: int

    def rules(self) -> Rules:
        """Give what the kernels can be compiled with."""
        yield self.tasks_per_block in (8, 16), "tasks_per_block", "8 or 16"
        yield self.heads_per_task in (1, 2, 3, 4, 6), "heads_per_task", "1, 2, 3, 4 or 6"

    def threads(self, variant: Variant) -> int:
        """Return the threads of a block."""
        turns_query = variant.rope and variant.op in _CACHE_FORMATS
        of_a_task = _THREADS_OF_A_TASK[variant.op] + (_TURNING_THREADS if turns_query else 0)
        return self.tasks_per_block * of_a_task

    def grid(
        self, variant: Variant, num_tokens: int, num_heads: int, num_sms: int
    ) -> tuple[int, dict[str, int]]:
        """Return the blocks of a launch, and its numbers by the kernel's parameters.

        Each warp of a cache block has one token. A very long prompt is spread over two cache blocks
        a multiprocessor, each of which reads every later slot.
        """
        groups = -(-num_heads // self.heads_per_task)
        num_tasks = num_tokens * groups
        row_blocks = -(-num_tasks // self.tasks_per_block)
        numbers = {"num_tasks": num_tasks, "groups": groups}
        if variant.op not in INSERTS:
            return row_blocks, numbers
        warps = self.threads(variant) // 32
        tokens = warps
        if num_tokens > _COMPARED_TOKENS:
            spread = -(-num_tokens // (_CACHE_BLOCKS_AN_SM * num_sms))
            tokens = min(max(-(-spread // warps), 2) * warps, _MAX_TOKENS_OF_A_BLOCK)
        cache_blocks = -(-num_tokens // tokens)
        numbers |= {"cache_blocks": cache_blocks, "tokens_per_block": tokens}
        return row_blocks + cache_blocks, numbers

    def name_expression(self, variant: Variant) -> str:
        """Return the C++ name of the instance."""
        arguments: list[Any] = []
        if variant.op != KV_CONCAT:  # which copies 16-bit values of either type
            arguments.append(CTYPES[variant.dtype])
        if variant.op in _CACHE_FORMATS:
            arguments.append(f"k3cupy::CacheFormat::{_CACHE_FORMATS[variant.op]}")
        if variant.op in INSERTS:
            arguments.append(variant.rope)
        if variant.op == KV_CONCAT_QUANT:
            arguments.append(variant.k_pe_fp8)
        arguments += [variant.vector, *astuple(self)]
        return instantiation(FUNCTIONS[variant.op], *arguments)

    def instance(self, variant: Variant) -> Instance:
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

Config = MlaPrefillConfig


def variant_of(problem: Any) -> Variant:
    """Return what a validated call decides."""
    return problem.variant  # type: ignore[no-any-return]


def launches(problem: Any, config: MlaPrefillConfig, gpu: DeviceInfo) -> list[Launch]:
    """Return the launch of a validated call."""
    views, variant = problem.views, problem.variant
    blocks, numbers = config.grid(variant, problem.num_tokens, problem.num_heads, gpu.num_sms)
    parameters = PARAMETERS[FUNCTIONS[variant.op]]
    names = parameters.types
    magic, shift = divisor_constants(numbers["groups"])
    values: dict[str, Any] = {
        **numbers,
        "num_heads": problem.num_heads,
        "groups_magic": magic,
        "groups_shift": shift,
        "k_pe_stride": byte_stride(views["k_pe"], 0),
    }
    for name in ("q", "k_nope", "v"):
        if f"{name}_token_stride" in names:
            values[f"{name}_token_stride"] = byte_stride(views[name], 0)
            values[f"{name}_head_stride"] = byte_stride(views[name], 1)
    if variant.op in INSERTS:
        values |= {
            "kv_c_normed_stride": byte_stride(views["kv_c_normed"], 0),
            **cache_values(problem, problem.num_tokens),
            **rope_values(problem),
        }
    scales = [name for name in names if name.endswith("_scale_inv")]
    values |= dict.fromkeys((name.replace("_inv", "_value") for name in scales), 1)
    outputs = {output.name: (output.argument, 0) for output in problem.outputs}
    return [
        Launch(
            instance=config.instance(variant),
            parameters=parameters,
            values=values,
            addresses={name: (name, 0) for name in views if name in names} | outputs,
            numbers={name.replace("_inv", "_value"): name for name in scales if name not in views},
            grid=blocks,
            block=config.threads(variant),
            strides_are_64_bit=not variant.vector,
        )
    ]
