"""The kernel of the MLA decode epilogue, ``cuda_src/mla_decode.cu``."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

from k3cupy.call.launch import Launch, Parameters
from k3cupy.constants import CHUNK_ELEMENTS, CTYPES, LATENT_DIM
from k3cupy.kernels import Rules, Tuned
from k3cupy.kernels.cache_rows import cache_values, rope_values, scale_numbers
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.runtime.launch import divisor_constants
from k3cupy.runtime.tensors import byte_stride

KERNEL, SOURCE = "mla_decode", "mla_decode.cu"

PARAMETERS = Parameters(
    "u32 num_tokens, num_heads, num_heads_magic, num_heads_shift; pointer ql_nope, q_pe;"
    "stride ql_nope_token_stride, ql_nope_head_stride, q_pe_token_stride, q_pe_head_stride;"
    "pointer mqa_q, q_scale_inv; f32 q_scale_value; u32 slot_is_wide;"
    "pointer kv_c_normed, k_pe, slot_mapping; i64 slot_stride; stride kv_c_stride, k_pe_stride;"
    "pointer kv_cache; stride cache_block_stride, cache_token_stride;"
    "u32 num_slots, block_size, block_size_magic, block_size_shift;"
    "pointer cache_scale_inv; f32 cache_scale_value; u32 position_is_wide;"
    "pointer positions, cos_sin_cache; i64 position_stride, table_stride, max_position"
)

MAX_TOKENS_PER_LAUNCH = 4096
"""A cache block compares its slots with all later ones of its launch (see the kernel), so larger
batches are launched in slices, one after the other."""

_ROW_CHUNKS = LATENT_DIM // CHUNK_ELEMENTS
_MAX_THREADS = 1024

CACHE_FORMATS = {"same": "kSame", "fp8": "kFp8", "ds_mla": "kDsMla"}


@dataclass(frozen=True)
class Variant:
    """The part of an instance that the call's arguments decide.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``, the inputs' type.
        query_fp8: mqa_q is e4m3.
        cache: ``"same"``, ``"fp8"`` or ``"ds_mla"``.
        rope: positions are given.
        kv_inputs_ready: the promise that lets the cache blocks skip the dependency wait.
        vector: every row begins at a multiple of 16 bytes, so 128-bit accesses are possible.
    """

    dtype: str
    query_fp8: bool = False
    cache: str = "same"
    rope: bool = False
    kv_inputs_ready: bool = False
    vector: bool = True

    def is_valid(self) -> bool:
        """Return whether the kernel exists for this combination."""
        return (
            self.dtype in CTYPES
            and self.cache in CACHE_FORMATS
            and not (self.query_fp8 and self.cache == "ds_mla")
        )

    @classmethod
    def of_kind(cls, kind: str, dtype: str = "bfloat16") -> Variant:
        """Return the plain variant of a kind, as tables and results name it."""
        query, _, cache = kind.partition("+")
        return cls(dtype, query_fp8=query == "fp8", cache=cache)

    @property
    def kind(self) -> str:
        """The name under which tables list it: the formats, which decide the bytes moved."""
        query = "fp8" if self.query_fp8 else "16bit"
        return f"{query}+{self.cache}"


@dataclass(frozen=True)
class MlaDecodeConfig(Tuned):
    """How threads are mapped to the 72 chunks of a query row.

    Attributes:
        split: 0 for the flat mapping, else warps that share a row (1 or 3).
        block_size: threads a block.
        chunks_per_thread: for split 0 a choice (1, 2 or 4); for split 1 3, or 6, which is two rows
            a warp; 1 for split 3.
    """

    split: int
    block_size: int
    chunks_per_thread: int

    def rules(self) -> Rules:
        """Give what the kernel can be compiled with; with split 0 the lanes hold whole tiles."""
        split, threads, chunks = self.split, self.block_size, self.chunks_per_thread
        yield split in (0, 1, 3), "split", "0, 1 or 3"
        yield 32 <= threads <= _MAX_THREADS, "block_size", f"32 to {_MAX_THREADS}"
        if split == 0:
            yield chunks in (1, 2, 4), "chunks_per_thread", "1, 2 or 4 with split 0"
            multiple = f"a multiple of {_ROW_CHUNKS} / chunks_per_thread with split 0"
            yield threads * chunks % _ROW_CHUNKS == 0, "block_size", multiple
        else:
            whole = (split, chunks) in ((1, 3), (1, 6), (3, 1))
            yield whole, "chunks_per_thread", "3 or 6 with split 1, 1 with split 3"
            yield threads % 32 == 0, "block_size", "a multiple of 32 with split 1 or 3"

    def query_blocks(self, num_rows: int) -> int:
        """Return how many blocks write a number of query rows (tokens times heads)."""
        if self.split == 0:
            return -(-num_rows // (self.block_size * self.chunks_per_thread // _ROW_CHUNKS))
        rows_of_three_warps = self.block_size // 32 * self.chunks_per_thread
        return -(-num_rows * 3 // rows_of_three_warps)

    def cache_blocks(self, num_tokens: int) -> int:
        """Return how many blocks write the cache rows, one warp a row."""
        return -(-num_tokens // (self.block_size // 32))

    def name_expression(self, variant: Variant) -> str:
        """Return the C++ name of the instance."""
        cache = f"k3cupy::CacheFormat::{CACHE_FORMATS[variant.cache]}"
        formats = CTYPES[variant.dtype], variant.query_fp8, cache
        flags = variant.rope, variant.kv_inputs_ready, variant.vector
        return instantiation("mla_decode_epilogue", *formats, *flags, *astuple(self))

    def instance(self, variant: Variant) -> Instance:
        """Return what ``runtime.instances`` compiles."""
        return Instance(SOURCE, self.name_expression(variant))

    def __str__(self) -> str:
        """For people: ``split 0, 288 threads, 1 chunk a thread``."""
        plural = "" if self.chunks_per_thread == 1 else "s"
        return (
            f"split {self.split}, {self.block_size} threads, "
            f"{self.chunks_per_thread} chunk{plural} a thread"
        )


CANDIDATES = (
    *(MlaDecodeConfig(0, threads, 1) for threads in (144, 288, 576)),
    *(MlaDecodeConfig(0, threads, 2) for threads in (144, 288, 576)),
    *(MlaDecodeConfig(0, threads, 4) for threads in (72, 144, 288)),
    *(MlaDecodeConfig(1, threads, 3) for threads in (64, 128, 256, 512)),
    *(MlaDecodeConfig(1, threads, 6) for threads in (64, 128, 256, 512)),
    MlaDecodeConfig(3, 256, 1),
)
"""What the benchmark measures and the tables choose from."""

UNTUNED = MlaDecodeConfig(0, 288, 1)
"""The configuration of the element-wise kernel, and of formats that no table has."""

Config = MlaDecodeConfig

_ONE_PER_TOKEN = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping", "positions")


def variant_of(problem: Any) -> Variant:
    """Return what a validated call decides.

    A batch in slices cannot use the promise of ``kv_inputs_ready``: the kernel before a slice is
    the slice before it, which may write the same cache rows.
    """
    variant: Variant = problem.variant
    sliced = problem.num_tokens > MAX_TOKENS_PER_LAUNCH
    return replace(variant, kv_inputs_ready=False) if sliced else variant


def launches(problem: Any, config: MlaDecodeConfig, _gpu: DeviceInfo) -> list[Launch]:
    """Return the launches of a validated call, one a slice of its tokens."""
    return [
        _launch(problem, config, start, min(MAX_TOKENS_PER_LAUNCH, problem.num_tokens - start))
        for start in range(0, problem.num_tokens, MAX_TOKENS_PER_LAUNCH)
    ]


def _launch(problem: Any, config: MlaDecodeConfig, start: int, num_tokens: int) -> Launch:
    views, variant, num_heads = problem.views, problem.variant, problem.num_heads
    magic, shift = divisor_constants(num_heads)
    values = {
        "num_heads": num_heads,
        "num_heads_magic": magic,
        "num_heads_shift": shift,
        "ql_nope_token_stride": byte_stride(views["ql_nope"], 0),
        "ql_nope_head_stride": byte_stride(views["ql_nope"], 1),
        "q_pe_token_stride": byte_stride(views["q_pe"], 0),
        "q_pe_head_stride": byte_stride(views["q_pe"], 1),
        "q_scale_value": 1,
        "kv_c_stride": byte_stride(views["kv_c_normed"], 0),
        "k_pe_stride": byte_stride(views["k_pe"], 0),
        "cache_scale_value": 1,
        **cache_values(problem, num_tokens),
        **rope_values(problem),
    }
    addresses = {
        name: (name, start * byte_stride(v, 0) if name in _ONE_PER_TOKEN else 0)
        for name, v in views.items()
        if name != "out"
    }
    row_bytes = LATENT_DIM * (1 if variant.query_fp8 else 2)
    addresses["mqa_q"] = ("out", start * num_heads * row_bytes)
    return Launch(
        instance=config.instance(variant_of(problem)),
        parameters=PARAMETERS,
        values=values,
        addresses=addresses,
        numbers=scale_numbers(problem),
        grid=config.cache_blocks(num_tokens) + config.query_blocks(num_tokens * num_heads),
        block=config.block_size,
        strides_are_64_bit=not variant.vector,
    )
