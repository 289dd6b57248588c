"""The kernel of the RMSNorms behind the first projection of an MLA layer, ``mla_norm.cu``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3cupy.call.launch import Launch, Parameters
from k3cupy.constants import CTYPES
from k3cupy.kernels import Rules, Tuned
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.runtime.tensors import byte_stride

KERNEL, SOURCE = "mla_norm", "mla_norm.cu"

PARAMETERS = Parameters(
    "pointer qkv_a; stride qkv_a_stride; pointer q_weight, kv_weight; f32 epsilon; pointer q, kv"
)

_QUERY_WARPS = (1, 2, 3, 6)
"""Those that share the 192 chunks of a query row out evenly."""

_LANES = 32


@dataclass(frozen=True)
class Variant:
    """The part of an instance that the call's arguments decide.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        weight_is_static: the promise that the weights are older than the preceding kernel.
        vector: every row begins at a multiple of 16 bytes.
    """

    dtype: str
    weight_is_static: bool = False
    vector: bool = True

    def is_valid(self) -> bool:
        """Return whether the kernel exists for this combination."""
        return self.dtype in CTYPES

    @classmethod
    def of_kind(cls, kind: str, dtype: str = "bfloat16") -> Variant:
        """Return the variant that is measured, of the one kind."""
        return cls(dtype, weight_is_static=True)

    @property
    def kind(self) -> str:
        """The name under which tables list it."""
        return "norm"


@dataclass(frozen=True)
class MlaNormConfig(Tuned):
    """How the query part of a row is shared out.

    Attributes:
        query_warps: warps of a block that have it (1, 2, 3 or 6); one more has the latent part.
    """

    query_warps: int

    def rules(self) -> Rules:
        """Give what the kernel can be compiled with."""
        yield self.query_warps in _QUERY_WARPS, "query_warps", "1, 2, 3 or 6"

    def name_expression(self, variant: Variant) -> str:
        """Return the C++ name of the instance."""
        flags = variant.weight_is_static, variant.vector
        return instantiation("q_kv_rms_norms", CTYPES[variant.dtype], *flags, self.query_warps)

    def instance(self, variant: Variant) -> Instance:
        """Return what ``runtime.instances`` compiles."""
        return Instance(SOURCE, self.name_expression(variant))

    def __str__(self) -> str:
        """For people: ``6 warps a query row``."""
        return f"{self.query_warps} warp{'s' * (self.query_warps > 1)} a query row"


CANDIDATES = tuple(MlaNormConfig(warps) for warps in _QUERY_WARPS)
"""What the tables choose from."""

UNTUNED = MlaNormConfig(6)

Config = MlaNormConfig


def variant_of(problem: Any) -> Variant:
    """Return what a validated call decides."""
    variant: Variant = problem.variant
    return variant


def launches(problem: Any, config: MlaNormConfig, _gpu: DeviceInfo) -> list[Launch]:
    """Return the launch of a validated call, a block a token."""
    variant = variant_of(problem)
    values = {
        "qkv_a_stride": byte_stride(problem.views["qkv_a"], 0),
        "epsilon": problem.epsilon,
    }
    inputs = ("qkv_a", "q_weight", "kv_weight")
    q, kv = (output.argument for output in problem.outputs)
    return [
        Launch(
            instance=config.instance(variant),
            parameters=PARAMETERS,
            values=values,
            addresses={**{name: (name, 0) for name in inputs}, "q": (q, 0), "kv": (kv, 0)},
            grid=problem.num_tokens,
            block=_LANES * (config.query_warps + 1),
            strides_are_64_bit=not variant.vector,
        )
    ]
