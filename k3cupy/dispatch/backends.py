"""The GEMMs that the dispatcher picks from, behind one set of functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from k3cupy.ops import fused_a_gemm_choice, fused_a_gemm_plan
from k3cupy.ops.arguments import Values
from k3cupy.ops.fused_a_gemm_config import K_MULTIPLE, MAX_TOKENS, FusedAGemmVariant
from k3cupy.ops.fused_a_gemm_validate import FRIENDLY
from k3cupy.ops.plan_cache import Plan
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance


class Backend(Protocol):
    """A GEMM: what it can compute, which configuration it takes, and a call of it made ready."""

    name: str
    source: str

    def why_not(self, n: int, k: int, num_tokens: int) -> str | None:
        """Return in words why it cannot compute a product, or None where it can."""

    def choose(
        self, n: int, k: int, num_tokens: int, device: DeviceInfo, *, batch_invariant: bool = False
    ) -> tuple[Any, str]:
        """Return its own choice of a configuration and the reason in words."""

    def fitted(self, config: Any, num_tokens: int, device: DeviceInfo) -> Any:
        """Return a table's configuration for a number of tokens; None where it does not fit."""

    def make_plan(
        self,
        values: Values,
        config: Any,
        stream: Any,
        *,
        weight_is_static: bool,
        batch_invariant: bool,
    ) -> Plan:
        """Prepare a call of (x, weight, out, residual)."""

    def instances(
        self, config: Any, *, weight_is_static: bool, has_residual: bool
    ) -> Iterator[Instance]:
        """Yield what calls with a configuration run: packed x, and x with rows apart."""


class _FusedA:
    name = "fused_a"
    source = "fused_a_gemm.cu"

    def why_not(self, n: int, k: int, num_tokens: int) -> str | None:
        if k % K_MULTIPLE:
            return f"K = {k:,} is not a multiple of {K_MULTIPLE}"
        if num_tokens > MAX_TOKENS:
            return f"x has more than {MAX_TOKENS} rows"
        return None

    def choose(
        self, n: int, k: int, num_tokens: int, device: DeviceInfo, *, batch_invariant: bool = False
    ) -> tuple[Any, str]:
        return fused_a_gemm_choice.choose(n, k, num_tokens, device, batch_invariant=batch_invariant)

    def fitted(self, config: Any, num_tokens: int, device: DeviceInfo) -> Any:
        fits = config is not None and config.tile_m >= num_tokens and config.is_valid(device)
        return config if fits else None

    def make_plan(
        self,
        values: Values,
        config: Any,
        stream: Any,
        *,
        weight_is_static: bool,
        batch_invariant: bool,
    ) -> Plan:
        options = fused_a_gemm_plan.Options(None, weight_is_static, batch_invariant, config)
        return fused_a_gemm_plan.make_plan(FRIENDLY, values[:3], options, stream)

    def instances(
        self, config: Any, *, weight_is_static: bool, has_residual: bool
    ) -> Iterator[Instance]:
        for packed in (True, False):
            yield config.instance(FusedAGemmVariant(packed, True, weight_is_static))


_BACKENDS: dict[str, Backend] = {"fused_a": _FusedA()}


def get(name: str) -> Backend:
    """Return a backend by its name in tables and decisions."""
    return _BACKENDS[name]


def names() -> tuple[str, ...]:
    """Return the names of all."""
    return tuple(_BACKENDS)
