"""The kernel that multiplies with a matrix of each head, ``cuda_src/mla_value.cu``."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from k3cupy.call.launch import Launch, Parameters
from k3cupy.constants import CTYPES, KV_LORA_RANK, QK_NOPE_HEAD_DIM, V_HEAD_DIM
from k3cupy.kernels import Rules, Tuned
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.runtime.launch import divisor_constants
from k3cupy.runtime.tensors import byte_stride

KERNEL, SOURCE = "mla_value", "mla_value.cu"

PARAMETERS = Parameters(
    "pointer weight; stride weight_head_stride, weight_row_stride; "
    "u32 num_heads, num_heads_magic, num_heads_shift, num_tokens;"
    "pointer x; stride x_token_stride, x_head_stride; pointer gate; stride gate_stride; pointer out"
)

ABSORB, VALUE, GATED = "absorb", "value", "value+gate"

_LANES, _STEP, _GROUP = 32, 32, 8


@dataclass(frozen=True)
class Variant:
    """The part of an instance that the call's arguments decide.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        gate: the product is multiplied with the gate's sigmoid.
        transposed: the dimension that is summed over has stride 1 in the weight, not the other.
        weight_is_static: the promise that the weight is older than the preceding kernel.
        vector: every row begins at a multiple of 16 bytes.
        absorb: the absorbed query, 128 to 512 wide, not the value, 512 to 128.
    """

    dtype: str
    gate: bool = False
    transposed: bool = False
    weight_is_static: bool = False
    vector: bool = True
    absorb: bool = False

    def is_valid(self) -> bool:
        """Return whether the kernel exists for this combination."""
        of_value = self.gate or self.transposed
        return self.dtype in CTYPES and not (self.absorb and of_value)

    @classmethod
    def of_kind(cls, kind: str, dtype: str = "bfloat16") -> Variant:
        """Return the variant of a kind that is measured: static weights, in the engines' order."""
        absorb = kind == ABSORB
        return cls(dtype, kind == GATED, not absorb, weight_is_static=True, absorb=absorb)

    @property
    def kind(self) -> str:
        """The name under which tables list it."""
        return ABSORB if self.absorb else GATED if self.gate else VALUE

    @property
    def widths(self) -> tuple[int, int]:
        """What is summed over, and what comes of it."""
        if self.absorb:
            return QK_NOPE_HEAD_DIM, KV_LORA_RANK
        return KV_LORA_RANK, V_HEAD_DIM


@dataclass(frozen=True)
class MlaValueConfig(Tuned):
    """How the product of a head is shared out.

    Attributes:
        tile_m: tokens of a block (8, 16, 32 or 64).
        tile_n: columns of a block (16, 32, 64 or 128).
        warps: of a block (4 or 8); those that the sums do not need share the columns.
    """

    tile_m: int
    tile_n: int
    warps: int

    def rules(self) -> Rules:
        """Give what the kernel can be compiled with, for both products."""
        yield self.tile_m in (8, 16, 32, 64), "tile_m", "8, 16, 32 or 64"
        yield self.tile_n in (16, 32, 64, 128), "tile_n", "16, 32, 64 or 128"
        yield self.warps in (4, 8), "warps", "4 or 8"

    def grid(self, variant: Variant, num_tokens: int, num_heads: int) -> int:
        """Return the number of blocks."""
        return -(-num_tokens // self.tile_m) * num_heads * (variant.widths[1] // self.tile_n)

    def shared_bytes(self, variant: Variant) -> int:
        """Return the dynamic shared memory of a block; the layout is that of the source."""
        k, _ = variant.widths
        pitch = _GROUP * (self.tile_n // _GROUP | 1)
        weights = 0 if variant.transposed else 2 * k * self.tile_n
        return weights + 4 * min(self.warps, k // _STEP) * self.tile_m * pitch

    def name_expression(self, variant: Variant) -> str:
        """Return the C++ name of the instance."""
        flags = variant.transposed, variant.gate, variant.weight_is_static, variant.vector
        sizes = variant.widths
        return instantiation("head_product", CTYPES[variant.dtype], *sizes, *flags, *astuple(self))

    def instance(self, variant: Variant) -> Instance:
        """Return what ``runtime.instances`` compiles."""
        name = self.name_expression(variant)
        return Instance(SOURCE, name, dynamic_shared_bytes=self.shared_bytes(variant))

    def __str__(self) -> str:
        """For people: ``tile of 8 tokens and 16 columns, 8 warps``."""
        return f"tile of {self.tile_m} tokens and {self.tile_n} columns, {self.warps} warps"


CANDIDATES = tuple(
    MlaValueConfig(tile_m, tile_n, 8)
    for tile_m in (16, 32, 64)
    for tile_n in (16, 32, 64)
    if tile_m * tile_n <= 64 * 32
)
"""What the tables choose from."""

UNTUNED = MlaValueConfig(16, 16, 8)

Config = MlaValueConfig


def variant_of(problem: Any) -> Variant:
    """Return what a validated call decides."""
    variant: Variant = problem.variant
    return variant


def launches(problem: Any, config: MlaValueConfig, _gpu: DeviceInfo) -> list[Launch]:
    """Return the launch of a validated call. Its tensors are ``x``, ``weight``, ``gate``."""
    views, variant = problem.views, variant_of(problem)
    x, weight = problem.x, problem.weight
    magic, shift = divisor_constants(problem.num_heads)
    values = {
        "weight_head_stride": byte_stride(views[weight], 0),
        "weight_row_stride": byte_stride(views[weight], 2 if variant.transposed else 1),
        "num_heads": problem.num_heads,
        "num_heads_magic": magic,
        "num_heads_shift": shift,
        "num_tokens": problem.num_tokens,
        "x_token_stride": byte_stride(views[x], 0),
        "x_head_stride": byte_stride(views[x], 1),
    }
    addresses = {"weight": (weight, 0), "x": (x, 0), "out": (problem.outputs[0].argument, 0)}
    if variant.gate:
        values["gate_stride"] = byte_stride(views["gate"], 0)
        addresses["gate"] = ("gate", 0)
    return [
        Launch(
            instance=config.instance(variant),
            parameters=PARAMETERS,
            values=values,
            addresses=addresses,
            grid=config.grid(variant, problem.num_tokens, problem.num_heads),
            block=_LANES * config.warps,
            shared_bytes=config.shared_bytes(variant),
            strides_are_64_bit=not variant.vector,
        )
    ]
