"""The kernel of the skinny GEMM, ``cuda_src/skinny_gemm.cu``."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from k3cupy.call.launch import Launch, Parameters
from k3cupy.constants import CTYPES
from k3cupy.kernels import FLOAT, Tuned
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.runtime.tensors import row_stride

KERNEL, SOURCE = "skinny", "skinny_gemm.cu"

PARAMETERS = Parameters(
    "pointer weight; u32 n, k; pointer x; i64 x_row_stride; pointer residual;"
    "i64 residual_row_stride; pointer out; i64 out_row_stride"
)

MAX_TOKENS = 8
"""The most rows of x that one launch takes."""

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
_REGISTERS_BESIDE_VALUES = 14


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
    """

    dtype: str = "bfloat16"
    aligned_x: bool = True
    has_residual: bool = False
    weight_is_static: bool = False
    float32_out: bool = False


@dataclass(frozen=True)
class SkinnyGemmConfig(Tuned):
    """How the product is cut into blocks, threads and loads.

    Attributes:
        num_rows: tokens, exactly those of the call: 1 to 8.
        block_size: threads a block, which walk along K side by side; a multiple of 32.
        outputs_per_block: rows of the weight (columns of the output) a block.
        k_unroll: vectors of each row that a thread has in flight.
        vector_width: elements of a vector, 4 (64-bit loads) or 8 (128-bit loads).
    """

    num_rows: int
    block_size: int
    outputs_per_block: int
    k_unroll: int
    vector_width: int

    @property
    def order(self) -> tuple[int, int]:
        """What decides the order of a sum: equal orders give equal bits, whatever else differs."""
        return self.block_size, self.vector_width

    @property
    def registers(self) -> int:
        """Registers that a thread needs: vectors in flight, sums, addresses and the rest.

        Rounded up to the steps in which a GPU gives them out.
        """
        words = self.vector_width // 2
        values = self.k_unroll * words * (self.outputs_per_block + self.num_rows)
        sums = self.num_rows * self.outputs_per_block
        addresses = 3 * self.outputs_per_block + 2 * self.num_rows
        needed = values + sums + addresses + _REGISTERS_BESIDE_VALUES
        return -(-needed // _REGISTER_STEP) * _REGISTER_STEP

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit a multiprocessor; the compiler sees to the registers for it."""
        warps = _SCHEDULERS * (_REGISTERS_OF_LANE // self.registers)
        by_registers = warps * _WARP // self.block_size
        return min(by_registers, _THREADS_PER_SM // self.block_size, _BLOCKS_PER_SM)

    def is_valid(self, device: DeviceInfo | None = None) -> bool:
        """Return whether the kernel can be compiled with these numbers, without spilling.

        Args:
            device: the GPU; every configuration runs on every GPU.
        """
        return (
            self.is_typed
            and 1 <= self.num_rows <= MAX_TOKENS
            and self.block_size % _WARP == 0
            and 0 < self.block_size <= _MAX_THREADS
            and self.outputs_per_block >= 1
            and self.num_rows * self.outputs_per_block <= self.block_size
            and self.k_unroll >= 1
            and self.vector_width in VECTOR_WIDTHS
            and self.registers <= _MAX_REGISTERS
            and self.blocks_per_sm >= 1
        )

    def blocks(self, n: int) -> int:
        """Return how many blocks compute N output columns."""
        return -(-n // self.outputs_per_block)

    def name_expression(self, variant: Variant) -> str:
        """Return the C++ name of the instance."""
        flags = variant.aligned_x, variant.has_residual, variant.weight_is_static
        resident = self.blocks_per_sm if variant.aligned_x else 1
        dtype = CTYPES[variant.dtype]
        out = FLOAT * variant.float32_out
        return instantiation("skinny_gemm", dtype, *astuple(self), resident, *flags, *out)

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
        )


Config = SkinnyGemmConfig


def variant_of(problem: Any) -> Variant:
    """Return what a validated call decides."""
    has_residual = problem.residual is not None
    aligned = problem.slow_reason is None
    static, float32 = problem.weight_is_static, problem.float32_out
    return Variant(problem.x.dtype, aligned, has_residual, static, float32)


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
    launch = Launch(
        instance=config.instance(variant_of(problem)),
        parameters=PARAMETERS,
        values={
            "n": problem.n,
            "k": problem.k,
            "x_row_stride": row_stride(x),
            "residual_row_stride": row_stride(residual) if residual is not None else 0,
            "out_row_stride": row_stride(out) if out is not None else problem.n,
        },
        addresses=addresses,
        grid=config.blocks(problem.n),
        block=config.block_size,
    )
    return [launch]
