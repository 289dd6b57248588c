"""The kernels of the skinny GEMM, ``cuda_src/skinny_gemm.cu``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3cupy.call.launch import Launch, Parameters
from k3cupy.constants import CTYPES
from k3cupy.kernels import FLOAT, Rules, Tuned
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.runtime.tensors import row_stride

KERNEL, SOURCE = "skinny", "skinny_gemm.cu"

PARAMETERS = Parameters(
    "pointer weight; u32 n, k; pointer x; i64 x_row_stride; pointer residual;"
    "i64 residual_row_stride; pointer out; i64 out_row_stride"
)
MMA_PARAMETERS = Parameters(
    "pointer weight; u32 n, k; pointer x; u32 num_tokens; i64 x_row_stride; pointer residual;"
    "i64 residual_row_stride; pointer out; i64 out_row_stride"
)
"""Of the kernel with tensor cores, which is built for a tile of tokens, not for their number."""

FMA, MMA = "fma", "mma"
"""Products: dot products, value by value; of the tensor cores."""

MAX_TOKENS = 16
"""The most rows of x that one launch takes."""

MAX_FMA_TOKENS = 8
"""The same for dot products."""

K_MULTIPLE = 8
"""K is a multiple of this, so that every row of the weight begins at a multiple of 16 bytes."""

VECTOR_WIDTHS = (4, 8)
"""Elements of one load: 64 or 128 bits."""

_WARP = 32
_MAX_THREADS = 1024
_THREADS_PER_SM, _BLOCKS_PER_SM = 2048, 32
_SCHEDULERS = 4
_REGISTERS_OF_LANE = 512
"""Registers of a scheduler, a lane: its warps share them."""

_MAX_REGISTERS = 248
_REGISTER_STEP = 8
_REGISTERS_BESIDE_VALUES = {FMA: 14, MMA: 26}
_STEP, _MMA_ROWS, _MMA_TOKENS = 32, 8, 8
"""Of the form with tensor cores: columns of a step, rows of a product, half of its tokens."""

_LEAST_MMA_THREADS, _FREE_ADDENDS, _REGISTERS_OF_ADDEND = 64, 2, 3
"""With fewer threads each would finish too much; beyond so many values of the residual a thread
needs so many registers for each more."""

_MAX_CLUSTER = 8
_SHARED_BYTES = 48 * 1024
"""What a block may have without asking."""


@dataclass(frozen=True)
class Variant:
    """The part of an instance that the call's arguments decide.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``, of all inputs.
        aligned_x: every row of x begins at a multiple of 16 bytes; else x is read element by
            element.
        has_residual: a residual is added.
        weight_is_static: the promise that the weight is older than the preceding kernel.
        float32_out: the sums are stored as they are.
        k: columns of the weight, for which the form with tensor cores is built; 0 for any number.
    """

    dtype: str = "bfloat16"
    aligned_x: bool = True
    has_residual: bool = False
    weight_is_static: bool = False
    float32_out: bool = False
    k: int = 0


@dataclass(frozen=True)
class SkinnyGemmConfig(Tuned):
    """How the product is cut into blocks, threads and loads.

    Attributes:
        num_rows: tokens, exactly those of the call: 1 to 8 for dot products, 1 to 16 with tensor
            cores.
        block_size: threads a block, side by side along K; a multiple of 32, not 32 with "mma".
        outputs_per_block: rows of the weight (columns of the output) a block.
        k_unroll: vectors of each row that a thread has in flight.
        vector_width: elements of a vector, 4 (64-bit loads) or 8 (128-bit loads).
        product: ``"fma"``, dot products, or ``"mma"``, tensor cores, with vectors of 8.
        split_k: blocks of a cluster that share the columns, with tensor cores; above 1 from sm_90
            on.
    """

    num_rows: int
    block_size: int
    outputs_per_block: int
    k_unroll: int
    vector_width: int
    product: str = FMA
    split_k: int = 1

    @property
    def order(self) -> tuple[str, int, int]:
        """What decides the order of a sum: equal orders give equal bits, whatever else differs."""
        return self.product, self.block_size, self.split_k * self.vector_width

    @property
    def is_mma(self) -> bool:
        """Whether tensor cores multiply."""
        return self.product == MMA

    @property
    def tile_m(self) -> int:
        """Tokens that the form with tensor cores is built for: 8 or 16."""
        return _MMA_TOKENS if self.num_rows <= _MMA_TOKENS else 2 * _MMA_TOKENS

    @property
    def registers(self) -> int:
        """Registers that a thread needs: vectors in flight, sums, addresses and the rest.

        Rounded up to the steps in which a GPU gives them out.
        """
        return self._registers_beside(0)

    def _registers_beside(self, more: int) -> int:
        rows, tokens = self.outputs_per_block, self.num_rows
        if self.is_mma:
            rows, tokens = -(-rows // _MMA_ROWS), self.tile_m // _MMA_TOKENS
            sums, addresses = 4 * rows, 2 * (rows + tokens)
        else:
            sums, addresses = tokens * rows, 3 * rows + 2 * tokens
        values = self.k_unroll * self.vector_width // 2 * (rows + tokens)
        needed = values + sums + addresses + _REGISTERS_BESIDE_VALUES[self.product] + more
        return -(-needed // _REGISTER_STEP) * _REGISTER_STEP

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit a multiprocessor; the compiler sees to the registers for it."""
        return self._blocks_beside(0)

    @property
    def blocks_with_residual(self) -> int:
        """The same where a residual is added: with tensor cores its values wait in registers."""
        elements = self.tile_m * _MMA_ROWS * -(-self.outputs_per_block // _MMA_ROWS)
        addends = -(-elements // (self.block_size * self.split_k)) if self.is_mma else 0
        return self._blocks_beside(_REGISTERS_OF_ADDEND * max(addends - _FREE_ADDENDS, 0))

    def _blocks_beside(self, more: int) -> int:
        registers = self._registers_beside(more)
        if registers > _MAX_REGISTERS:
            return 0
        by_registers = _SCHEDULERS * (_REGISTERS_OF_LANE // registers) * _WARP // self.block_size
        return min(by_registers, _THREADS_PER_SM // self.block_size, _BLOCKS_PER_SM)

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block of the form with tensor cores, as the source declares it."""
        groups = -(-self.outputs_per_block // _MMA_ROWS)
        sums = self.block_size // _WARP * self.tile_m * _MMA_ROWS * (groups | 1)
        quads = self.split_k * -(-self.tile_m * groups * 2 // self.split_k)
        return 4 * sums + (16 * quads + 8 if self.split_k > 1 else 0)

    def steps_of_round(self) -> int:
        """Return how many steps of 32 columns all warps of a cluster have in flight together."""
        return self.block_size // _WARP * self.split_k * self.k_unroll

    def is_valid(self, device: DeviceInfo | None = None) -> bool:
        """Return whether the kernel can be compiled with these numbers, without spilling.

        Args:
            device: the GPU; without it only what holds on every GPU is looked at.
        """
        has_clusters = self.split_k == 1 or device is None or device.has_clusters
        return has_clusters and super().is_valid()

    def rules(self) -> Rules:
        """Give what the kernel can be compiled with, without spilling."""
        rows, threads, outputs = self.num_rows, self.block_size, self.outputs_per_block
        yield self.product in _REGISTERS_BESIDE_VALUES, "product", "'fma' or 'mma'"
        most = MAX_TOKENS if self.is_mma else MAX_FMA_TOKENS
        yield 1 <= rows <= most, "num_rows", "1 to 8 with product 'fma', 1 to 16 with 'mma'"
        sizes = range(_WARP, _MAX_THREADS + 1, _WARP)
        yield threads in sizes, "block_size", "32 to 1024 in steps of 32"
        yield outputs >= 1, "outputs_per_block", "at least 1"
        yield self.k_unroll >= 1, "k_unroll", "at least 1"
        yield 1 <= self.split_k <= _MAX_CLUSTER, "split_k", "1 to 8"
        yield self.vector_width in VECTOR_WIDTHS, "vector_width", "4 or 8"
        few = "few enough for block_size threads, with fewer outputs_per_block or less k_unroll"
        yield self.blocks_with_residual >= 1, "registers", few
        if self.is_mma:
            yield self.vector_width == 8, "vector_width", "8 with product 'mma'"
            yield threads >= _LEAST_MMA_THREADS, "block_size", "at least 64 with product 'mma'"
            yield self.shared_bytes <= _SHARED_BYTES, "shared_bytes", "at most 49152"
        else:
            yield self.split_k == 1, "split_k", "1 with product 'fma'"
            yield rows * outputs <= threads, "block_size", "at least num_rows * outputs_per_block"

    def blocks(self, n: int) -> int:
        """Return how many blocks compute N output columns."""
        return -(-n // self.outputs_per_block) * self.split_k

    def name_expression(self, variant: Variant) -> str:
        """Return the C++ name of the instance."""
        flags = variant.aligned_x, variant.has_residual, variant.weight_is_static
        resident = self.blocks_with_residual if variant.has_residual else self.blocks_per_sm
        resident = resident if variant.aligned_x else 1
        dtype, k = CTYPES[variant.dtype], variant.k
        of_call = *flags, *(FLOAT * variant.float32_out)
        cut = self.block_size, self.outputs_per_block
        if self.is_mma:
            # Values that come one by one need registers: then half as many steps are in flight.
            unroll = self.k_unroll if variant.aligned_x else -(-self.k_unroll // 2)
            one_round = 0 < k <= _STEP * self.steps_of_round() // self.k_unroll * unroll
            whole = k > 0 and k % _STEP == 0
            tile = self.tile_m, *cut, unroll, self.split_k, resident
            return instantiation("skinny_gemm_mma", dtype, *tile, one_round, whole, *of_call)
        rows = self.num_rows, *cut, self.k_unroll, self.vector_width, resident
        return instantiation("skinny_gemm", dtype, *rows, *of_call)

    def instance(self, variant: Variant) -> Instance:
        """Return what ``runtime.instances`` compiles."""
        return Instance(SOURCE, self.name_expression(variant))

    def __str__(self) -> str:
        """For people: ``1 row, 224 threads, 2 outputs a block, 4 x 128 bits in flight``."""
        plural_rows = "" if self.num_rows == 1 else "s"
        plural_outputs = "" if self.outputs_per_block == 1 else "s"
        return (
            f"{self.num_rows} row{plural_rows}, {self.block_size} threads, "
            f"{self.outputs_per_block} output{plural_outputs} a block, "
            f"{self.k_unroll} x {16 * self.vector_width} bits in flight"
            f"{f', tensor cores, split {self.split_k}' if self.is_mma else ''}"
        )


Config = SkinnyGemmConfig


def variant_of(problem: Any) -> Variant:
    """Return what a validated call decides."""
    has_residual = problem.residual is not None
    aligned = problem.slow_reason is None
    static, float32 = problem.weight_is_static, problem.float32_out
    return Variant(problem.x.dtype, aligned, has_residual, static, float32, problem.k)


def launches(problem: Any, config: SkinnyGemmConfig, _gpu: DeviceInfo) -> list[Launch]:
    """Return the launch of a validated call."""
    x, out, residual = problem.x, problem.out, problem.residual
    addresses = {
        "weight": (problem.signature.weight, 0),
        "x": (problem.signature.x, 0),
        "out": (problem.signature.out, 0),
    }
    if residual is not None:
        addresses["residual"] = "residual", 0
    values = {
        "n": problem.n,
        "k": problem.k,
        "x_row_stride": row_stride(x),
        "residual_row_stride": row_stride(residual) if residual is not None else 0,
        "out_row_stride": row_stride(out) if out is not None else problem.n,
    }
    if config.is_mma:
        values["num_tokens"] = problem.num_tokens
    launch = Launch(
        instance=config.instance(variant_of(problem)),
        parameters=MMA_PARAMETERS if config.is_mma else PARAMETERS,
        values=values,
        addresses=addresses,
        grid=config.blocks(problem.n) // config.split_k,
        block=config.block_size,
        cluster=config.split_k,
    )
    return [launch]
