"""Instances of the MLA decode epilogue: what the call decides, what is tuned, and the choice."""

from __future__ import annotations

from dataclasses import dataclass

from k3cupy.constants import CHUNK_ELEMENTS, CTYPES, KV_LORA_RANK, LATENT_DIM
from k3cupy.ops.measured_table import MeasuredTable
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, template_flag

SOURCE = "mla_decode.cu"

_ROW_CHUNKS = LATENT_DIM // CHUNK_ELEMENTS
_NOPE_CHUNKS = KV_LORA_RANK // CHUNK_ELEMENTS
_TILE_LANES = 16
_MAX_THREADS = 1024

_CACHE_FORMATS = {"same": "kSame", "fp8": "kFp8", "ds_mla": "kDsMla"}


@dataclass(frozen=True)
class MlaDecodeVariant:
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
            and self.cache in _CACHE_FORMATS
            and not (self.query_fp8 and self.cache == "ds_mla")
        )

    @classmethod
    def of_kind(cls, kind: str, dtype: str = "bfloat16") -> MlaDecodeVariant:
        """Return the plain variant of a kind, as tables and results name it."""
        query, _, cache = kind.partition("+")
        return cls(dtype, query_fp8=query == "fp8", cache=cache)

    @property
    def kind(self) -> str:
        """The name under which tables list it: the formats, which decide the bytes moved."""
        query = "fp8" if self.query_fp8 else "16bit"
        return f"{query}+{self.cache}"


@dataclass(frozen=True)
class MlaDecodeConfig:
    """How threads are mapped to the 72 chunks of a query row.

    Attributes:
        split: 0 for the flat mapping, else warps that share a row (1 or 3).
        block_size: threads a block.
        chunks_per_thread: for split 0 a choice (1, 2 or 4); 3 for split 1 and 1 for split 3.
    """

    split: int
    block_size: int
    chunks_per_thread: int

    def is_valid(self) -> bool:
        """Return whether the kernel can be compiled with these numbers."""
        threads, chunks = self.block_size, self.chunks_per_thread
        if not 32 <= threads <= _MAX_THREADS:
            return False
        if self.split == 0:
            lanes_hold_tiles = chunks in (1, 2, 4, 8) and _NOPE_CHUNKS // chunks % _TILE_LANES == 0
            return lanes_hold_tiles and threads * chunks % _ROW_CHUNKS == 0
        return threads % 32 == 0 and (self.split, chunks) in ((1, 3), (3, 1))

    def query_blocks(self, num_rows: int) -> int:
        """Return how many blocks write a number of query rows (tokens times heads)."""
        if self.split == 0:
            return -(-num_rows // (self.block_size * self.chunks_per_thread // _ROW_CHUNKS))
        return -(-num_rows * self.split // (self.block_size // 32))

    def cache_blocks(self, num_tokens: int) -> int:
        """Return how many blocks write the cache rows, one warp a row."""
        return -(-num_tokens // (self.block_size // 32))

    def name_expression(self, variant: MlaDecodeVariant) -> str:
        """Return the C++ name of the instance."""
        flags = [variant.rope, variant.kv_inputs_ready, variant.vector]
        arguments = [
            CTYPES[variant.dtype],
            template_flag(variant.query_fp8),
            f"k3cupy::CacheFormat::{_CACHE_FORMATS[variant.cache]}",
            *(template_flag(flag) for flag in flags),
            *(str(n) for n in (self.split, self.block_size, self.chunks_per_thread)),
        ]
        return f"k3cupy::mla_decode_epilogue<{', '.join(arguments)}>"

    def instance(self, variant: MlaDecodeVariant) -> Instance:
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
    *(MlaDecodeConfig(3, threads, 1) for threads in (96, 192, 256, 384)),
)
"""What the benchmark measures and the tables choose from."""

DEFAULTS = {
    0: MlaDecodeConfig(0, 288, 1),
    1: MlaDecodeConfig(1, 256, 3),
    3: MlaDecodeConfig(3, 256, 1),
}
"""The configuration meant by ``split=0``, ``1`` or ``3``."""


TABLE = MeasuredTable.shipped("mla_decode.json", MlaDecodeConfig)


def choose(
    variant: MlaDecodeVariant, num_tokens: int, num_heads: int, device: DeviceInfo
) -> tuple[MlaDecodeConfig, str]:
    """Return the configuration for a call and the reason in words.

    A GPU that the table lists gets the entry with the nearest number of rows, which is tokens times
    (heads + 1). Another GPU gets the entry of the first listed GPU with the nearest number of rows
    a multiprocessor.

    Args:
        variant: what the arguments decide.
        num_tokens: B.
        num_heads: H.
        device: the GPU.
    """
    found = TABLE.choose(variant.kind, num_tokens * (num_heads + 1), device)
    if found is None:
        return DEFAULTS[0], f"no measured table has {variant.kind}"
    return found


def dispatched_configs(kind: str) -> tuple[MlaDecodeConfig, ...]:
    """Return every configuration that some shipped table names for a kind of variant."""
    return TABLE.configs(kind)
