"""The kernels of the fused-A GEMM, ``cuda_src/fused_a_gemm.cu``."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

from k3cupy.call.launch import Launch, Parameters
from k3cupy.kernels import FLOAT, Rules, Tuned
from k3cupy.runtime import tensor_maps
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.runtime.tensor_maps import Box
from k3cupy.runtime.tensors import byte_stride, row_stride

KERNEL, SOURCE = "fused_a", "fused_a_gemm.cu"

PARAMETERS = Parameters(
    "pointer weight; u32 n, k; pointer x; u32 num_tokens; i64 x_row_stride; pointer out;"
    "i64 out_row_stride; pointer residual; i64 residual_row_stride; u32 block_rows"
)
MAPPED_PARAMETERS = Parameters(
    "pointer weight; u32 n, k; map x_map; u32 num_tokens; pointer out; i64 out_row_stride;"
    "pointer residual; i64 residual_row_stride; u32 block_rows"
)
"""Of the kernel whose x the copy engine fetches."""

MAX_TOKENS = 64
"""The most rows of x that one launch takes."""

K_MULTIPLE = 16
"""K is a multiple of this: one step of the tensor cores."""

WARP, WARPGROUP, WARPGROUP_TOKENS = "warp", "warpgroup", "warpgroup_tokens"
"""Products: of a warp (``mma``); of a warpgroup (``wgmma``), whose wide side is rows of the weight,
or tokens."""

_WARP_ROWS, _MMA_K = 16, 16
_WIDE, _NARROW_SIDES = 64, range(16, 129, 8)
"""Sides of a warpgroup's product; of the narrow one those that the source has."""

WIDE_TOKENS, UNIT_OF_ROWS = _WIDE, 8
"""tile_m, and the rows of a product, where the tokens are the wide side."""

_PRODUCTS = {WARP: "kWarp", WARPGROUP: "kWarpgroup", WARPGROUP_TOKENS: "kWarpgroupTokens"}
"""As the source names them."""

_ROWS = {WARP: _WARP_ROWS, WARPGROUP: _WIDE, WARPGROUP_TOKENS: UNIT_OF_ROWS}
"""Rows of the weight in one product."""

_TEAM, _PANEL = 4, 64
_PARTIALS = 4
_SUM_PADDING = 4
_MAX_THREADS = 1024
_REGISTERS_PER_SM = 65536
_MAX_REGISTERS = 255
_REGISTERS_BESIDE_SUMS, _REGISTERS_BESIDE_PARTIALS = 80, 56
"""What a math warp needs for addresses and operands, so that its sums do not spill; where it holds
several partial sums, whose operands stay in shared memory."""

_MAX_CLUSTER = 8
_RESERVED_SHARED = 1024
"""Bytes of a multiprocessor's shared memory that the system keeps for each resident block."""


@dataclass(frozen=True)
class Variant:
    """The part of an instance that the call's arguments decide.

    Attributes:
        aligned_x: every row of x begins at a multiple of 16 bytes, within 4 GiB of the next; else x
            is read element by element.
        weight_is_static: the promise that the weight is older than the preceding kernel.
        has_residual: a residual is added.
        float32_out: the sums are stored as they are.
    """

    aligned_x: bool = True
    weight_is_static: bool = False
    has_residual: bool = False
    float32_out: bool = False


@dataclass(frozen=True)
class FusedAGemmConfig(Tuned):
    """How the product is cut into blocks, warps and stages.

    Attributes:
        tile_m: tokens that a block computes, at least those of the call: 8, or a multiple of 16.
        tile_n: rows of the weight (columns of the output) a block.
        tile_k: columns of a stage.
        stages: stages of the weight's ring in shared memory.
        stages_x: stages of the ring of x.
        warps_k: math warps that share the columns of a stage.
        warps_n: math warps that share the rows of a tile.
        split_k: blocks of a cluster that share the columns of a tile; above 1 from sm_90 on.
        copy_warps: warps that copy the weight, and as many that copy x.
        product: of the tensor cores: ``"warp"``, of 16 rows of the weight and 8 tokens;
            ``"warpgroup"``, of four warps together, which exists on sm_90 alone, of 64 rows and any
            multiple of 8 tokens; or ``"warpgroup_tokens"``, of 64 tokens and any multiple of 8
            rows.
        block_rows: rows of the tile that a block uses, where fewer than all spread the weight more
            evenly over the GPU; 0 for all.
        mapped_x: the copy engine fetches x, by a tensor map, in place of copy warps; from sm_90 to
            sm_103.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    stages_x: int
    warps_k: int
    warps_n: int
    split_k: int
    copy_warps: int
    product: str = WARP
    block_rows: int = 0
    mapped_x: bool = False

    @property
    def product_rows(self) -> int:
        """Rows of the weight in one product of the tensor cores."""
        return _ROWS[self.product]

    @property
    def rows(self) -> int:
        """Rows of the weight a block."""
        return self.block_rows or self.tile_n

    @property
    def block_size(self) -> int:
        """Threads a block."""
        warps_for_x = 1 if self.mapped_x else self.copy_warps
        return 32 * (self.warps_k * self.warps_n + self.copy_warps + warps_for_x)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block, as ``Tile`` in the source lays it out."""
        row_bytes = 2 * self.tile_k
        rings = row_bytes * (self.stages * self.tile_n + self.stages_x * self.tile_m)
        sums = 4 * self.warps_k * self.tile_m * (self.tile_n + _SUM_PADDING)
        alignment = 1024 if self.needs_warpgroups or self.mapped_x else 128
        barriers = 16 * (self.stages + self.stages_x) + (8 if self.split_k > 1 else 0)
        inbox = 4 * self.tile_m * self.tile_n if self.split_k > 1 else 0
        return -(-barriers // alignment) * alignment + max(rings, sums) + inbox

    @property
    def partials(self) -> int:
        """Partial sums that an element has in a block.

        One a warp along K, but four at least with products of a warpgroup, where there are the
        registers: then 64 tokens may share the order of a few. Who fetches x does not matter.
        """
        if self.product == WARP:
            return self.warps_k
        own = max(_PARTIALS // self.warps_k, 1)
        registers = self.with_copy_warps()._registers - _REGISTERS_BESIDE_PARTIALS
        while own > 1 and own * self._sums > registers:
            own //= 2
        return own * self.warps_k

    @property
    def order(self) -> tuple[int, int]:
        """What decides the order of a sum: equal orders give equal bits, whatever else differs."""
        return self.partials, self.split_k

    @property
    def needs_warpgroups(self) -> bool:
        """Whether the products are those of a warpgroup, which only sm_90a has."""
        return self.product != WARP

    def with_copy_warps(self) -> FusedAGemmConfig:
        """Return the configuration whose warps fetch x; it gives the same bits."""
        return replace(self, mapped_x=False)

    def can_map(self, k: int) -> bool:
        """Return whether the copy engine can fetch x for K columns.

        The copy engine fills what lies behind the last column with zeros, which a product of a
        warpgroup needs, but not what lies behind the columns of one block of a split.
        """
        split = self.needs_warpgroups and self.split_k > 1
        return self.mapped_x and not (split and k % (self.split_k * self.tile_k))

    def is_valid(self, device: DeviceInfo | None = None) -> bool:
        """Return whether the kernel can be compiled with these numbers and run on a GPU.

        Args:
            device: the GPU; without it only what holds on every GPU is looked at.
        """
        return super().is_valid() and (device is None or self._runs_on(device))

    @property
    def _sums(self) -> int:
        """Elements that a lane of a math warp sums up."""
        return self.tile_m * self.tile_n // (32 * self.warps_n)

    @property
    def _registers(self) -> int:
        """Registers that a thread may have."""
        return min(_REGISTERS_PER_SM // self.block_size // 8 * 8, _MAX_REGISTERS)

    def _runs_on(self, device: DeviceInfo) -> bool:
        return (
            self.shared_bytes <= device.shared_memory_optin
            and (self.split_k == 1 or device.has_clusters)
            and (not self.needs_warpgroups or device.has_warpgroups)
            and (not self.mapped_x or device.has_tensor_maps)
        )

    def fits(self, num_tokens: int, device: DeviceInfo) -> bool:
        """Return whether a GPU can compute a number of tokens with it."""
        return self.tile_m >= num_tokens and self.is_valid(device)

    def rules(self) -> Rules:
        """Give what the kernel can be compiled with, on some GPU."""
        tile_m, tile_n, tile_k, warps = self.tile_m, self.tile_n, self.tile_k, self.warps_n
        yield self.stages >= 2, "stages", "at least 2"
        yield self.stages_x >= 2, "stages_x", "at least 2"
        yield self.warps_k >= 1, "warps_k", "at least 1"
        yield warps >= 1, "warps_n", "at least 1"
        yield self.copy_warps >= 1, "copy_warps", "at least 1"
        yield 1 <= self.split_k <= _MAX_CLUSTER, "split_k", "1 to 8"
        yield tile_m in (8, 16, 32, 48, 64), "tile_m", "8, 16, 32, 48 or 64"
        yield tile_n > 0 and tile_n % (4 * self.split_k) == 0, "tile_n", "a multiple of 4 * split_k"
        yield 0 <= self.block_rows <= tile_n, "block_rows", "0 to tile_n"
        yield self.product in _ROWS, "product", "'warp', 'warpgroup' or 'warpgroup_tokens'"
        whole = tile_k >= 64 and tile_k % (_MMA_K * self.warps_k) == 0
        yield whole, "tile_k", "a multiple of 16 * warps_k, at least 64"
        panels = tile_k % _PANEL == 0 or not (self.mapped_x or self.needs_warpgroups)
        yield panels, "tile_k", "a multiple of 64 with mapped_x or products of a warpgroup"
        fair = "such that 32 * copy_warps and tile_k / 8 are multiples, one of the other"
        chunks, threads = tile_k // 8, 32 * self.copy_warps
        yield 0 in (chunks % threads, threads % chunks), "copy_warps", fair
        if self.needs_warpgroups:
            yield warps % _TEAM == 0, "warps_n", "a multiple of 4 for products of a warpgroup"
        if self.product == WARPGROUP_TOKENS:
            teams = warps // _TEAM
            fits = tile_n % teams == 0 and tile_n // teams in _NARROW_SIDES
            yield fits, "tile_n", "16 to 128 in steps of 8, times warps_n / 4"
            yield tile_m == WIDE_TOKENS, "tile_m", "64 with product 'warpgroup_tokens'"
        else:  # rows of a warp, and of each of the four of a warpgroup
            yield tile_n % (_WARP_ROWS * warps) == 0, "tile_n", "a multiple of 16 * warps_n"
        if self.product == WARPGROUP:
            yield tile_m in (32, 64), "tile_m", "32 or 64 with product 'warpgroup'"
        yield self.block_size <= _MAX_THREADS, "block_size", "at most 1024 threads, of all warps"
        few = "small enough that the sums of a thread stay in registers, or more warps_n"
        yield self._sums + _REGISTERS_BESIDE_SUMS <= self._registers, "tile_n", few
        copied = not self.mapped_x or self.with_copy_warps().is_valid()
        yield copied, "mapped_x", "False where the copy warps in its place would be too many"

    def blocks(self, n: int) -> int:
        """Return how many blocks compute N output columns."""
        return -(-n // self.rows) * self.split_k

    def blocks_per_sm(self, device: DeviceInfo) -> int:
        """Return how many blocks fit a multiprocessor by their shared memory and threads.

        And by their registers, where partial sums take most of these.
        """
        each = self.shared_bytes + _RESERVED_SHARED
        by_memory = (device.shared_memory_optin + _RESERVED_SHARED) // each
        most = min(by_memory, 2048 // self.block_size)
        if self.product == WARP:
            return most
        registers = self.partials // self.warps_k * self._sums + _REGISTERS_BESIDE_PARTIALS
        return min(most, _REGISTERS_PER_SM // (registers * self.block_size))

    def name_expression(self, variant: Variant) -> str:
        """Return the C++ name of the instance."""
        *template, copy_warps, product, _rows, _mapped = astuple(self)  # rows are an argument
        template += self.partials, copy_warps, f"k3cupy::Product::{_PRODUCTS[product]}"
        flags = variant.weight_is_static, variant.has_residual, *(FLOAT * variant.float32_out)
        if self.mapped_x and variant.aligned_x:
            return instantiation("fused_a_gemm_mapped_x", *template, *flags)
        return instantiation("fused_a_gemm", *template, variant.aligned_x, *flags)

    def instance(self, variant: Variant) -> Instance:
        """Return what ``runtime.instances`` compiles.

        The copy engine fetches rows of x that begin at multiples of 16 bytes; for others it is the
        kernel of ``with_copy_warps``.
        """
        name, own = self.name_expression(variant), self.needs_warpgroups
        return Instance(SOURCE, name, own_arch=own, dynamic_shared_bytes=self.shared_bytes)

    def __str__(self) -> str:
        """For people: ``tile 8x16x512, 8+8 stages, 8x1 warps, split 1, 4 copy warps``."""
        rows = f" ({self.block_rows} rows)" if self.block_rows else ""
        return (
            f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}{rows}, {self.stages}+{self.stages_x} "
            f"stages, {self.warps_k}x{self.warps_n} warps, split {self.split_k}, "
            f"{self.copy_warps} copy warps{', warpgroups' if self.needs_warpgroups else ''}"
            f"{', x mapped' if self.mapped_x else ''}"
        )


Config = FusedAGemmConfig


def why_not_mapped(problem: Any, rows: slice) -> str | None:
    """Return in words why the copy engine cannot fetch some rows of x, or None where it can.

    Empty where rows are read element by element: that has a reason of its own.
    """
    if problem.slow_reason is not None:
        return ""
    stride = problem.x.strides[0]
    if rows.stop - rows.start > 1 and stride < problem.k:
        return f"its rows are {stride} elements apart, not {problem.k} or more"
    return None


def variant_of(problem: Any) -> Variant:
    """Return what a validated call decides."""
    aligned, has_residual = problem.slow_reason is None, problem.residual is not None
    return Variant(aligned, problem.weight_is_static, has_residual, problem.float32_out)


def launch(problem: Any, config: FusedAGemmConfig, rows: slice) -> Launch:
    """Return the launch for some rows of a validated call, at most 64.

    With ``mapped_x`` only where the copy engine can fetch these rows.
    """
    x, out, residual = problem.x, problem.out, problem.residual
    num_tokens = rows.stop - rows.start
    out_step = row_stride(out) if out is not None else problem.n
    several = num_tokens > 1 or problem.num_tokens == 1  # of one row nobody asks for strides
    values = {
        "n": problem.n,
        "k": problem.k,
        "num_tokens": num_tokens,
        "out_row_stride": out_step if several else 0,
        "residual_row_stride": row_stride(residual) if several and residual is not None else 0,
        "block_rows": config.rows,
    }
    x_at = problem.signature.x, rows.start * byte_stride(x, 0)
    addresses = {
        "weight": (problem.signature.weight, 0),
        "x_map" if config.mapped_x else "x": x_at,
        "out": (
            problem.signature.out,
            rows.start * out_step * (4 if problem.float32_out else x.itemsize),
        ),
    }
    if residual is not None:
        addresses["residual"] = "residual", rows.start * byte_stride(residual, 0)
    maps = {}
    if config.mapped_x:
        box = Box(num_tokens, problem.k, row_stride(x) or problem.k, config.tile_m)
        maps["x_map"] = tensor_maps.mapper(box, x.device_index)
    else:
        values["x_row_stride"] = row_stride(x) if several else 0
    return Launch(
        instance=config.instance(variant_of(problem)),
        parameters=MAPPED_PARAMETERS if config.mapped_x else PARAMETERS,
        values=values,
        addresses=addresses,
        grid=config.blocks(problem.n) // config.split_k,
        block=config.block_size,
        shared_bytes=config.shared_bytes,
        cluster=config.split_k,
        maps=maps,
    )
