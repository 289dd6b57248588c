"""The GEMMs that the dispatcher picks from, behind one set of functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from k3cupy.ops import (
    fused_a_gemm_choice,
    fused_a_gemm_config,
    fused_a_gemm_plan,
    skinny_gemm_choice,
    skinny_gemm_config,
    skinny_gemm_plan,
)
from k3cupy.ops.arguments import Values
from k3cupy.ops.gemm_entry import FUSED_A, SKINNY
from k3cupy.ops.gemm_validate import FRIENDLY
from k3cupy.ops.plan_cache import Plan
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance


class Backend(Protocol):
    """A GEMM: what it can compute, which configuration it takes, and a call of it made ready."""

    name: str

    def why_not(self, n: int, k: int, num_tokens: int) -> str | None:
        """Return in words why it cannot compute a product, or None where it can."""

    def candidates(self, n: int, k: int, num_tokens: int, device: DeviceInfo) -> tuple[Any, ...]:
        """Return the configurations worth measuring."""

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
        self, config: Any, *, weight_is_static: bool, has_residual: bool, one_row: bool = False
    ) -> Iterator[Instance]:
        """Yield what calls with a configuration run: packed x and, but for one row, rows apart."""


class _FusedA:
    name = FUSED_A

    def why_not(self, n: int, k: int, num_tokens: int) -> str | None:
        config = fused_a_gemm_config
        return _limits(k, num_tokens, config.K_MULTIPLE, config.MAX_TOKENS)

    def candidates(self, n: int, k: int, num_tokens: int, device: DeviceInfo) -> tuple[Any, ...]:
        return fused_a_gemm_choice.candidates(n, k, num_tokens, device)

    def choose(
        self, n: int, k: int, num_tokens: int, device: DeviceInfo, *, batch_invariant: bool = False
    ) -> tuple[Any, str]:
        return fused_a_gemm_choice.choose(n, k, num_tokens, device, batch_invariant=batch_invariant)

    def fitted(self, config: Any, num_tokens: int, device: DeviceInfo) -> Any:
        return config if config is not None and config.fits(num_tokens, device) else None

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
        return fused_a_gemm_plan.make_plan(FRIENDLY, values, options, stream)

    def instances(
        self, config: Any, *, weight_is_static: bool, has_residual: bool, one_row: bool = False
    ) -> Iterator[Instance]:
        for packed in (True,) if one_row else (True, False):
            variant = fused_a_gemm_config.FusedAGemmVariant(
                packed, True, weight_is_static, has_residual
            )
            yield config.instance(variant)


class _Skinny:
    name = SKINNY

    def why_not(self, n: int, k: int, num_tokens: int) -> str | None:
        config = skinny_gemm_config
        return _limits(k, num_tokens, config.K_MULTIPLE, config.MAX_TOKENS)

    def candidates(self, n: int, k: int, num_tokens: int, device: DeviceInfo) -> tuple[Any, ...]:
        return skinny_gemm_choice.candidates(n, k, num_tokens, device)

    def choose(
        self, n: int, k: int, num_tokens: int, device: DeviceInfo, *, batch_invariant: bool = False
    ) -> tuple[Any, str]:
        return skinny_gemm_choice.choose(n, k, num_tokens, device)

    def fitted(self, config: Any, num_tokens: int, device: DeviceInfo) -> Any:
        return skinny_gemm_choice.for_tokens(config, num_tokens)

    def make_plan(
        self,
        values: Values,
        config: Any,
        stream: Any,
        *,
        weight_is_static: bool,
        batch_invariant: bool,
    ) -> Plan:
        options = skinny_gemm_plan.Options(None, weight_is_static, config)
        return skinny_gemm_plan.make_plan(values, options, stream)

    def instances(
        self, config: Any, *, weight_is_static: bool, has_residual: bool, one_row: bool = False
    ) -> Iterator[Instance]:
        variant = skinny_gemm_config.SkinnyGemmVariant(
            has_residual=has_residual, weight_is_static=weight_is_static
        )
        yield config.instance(variant)


def _limits(k: int, num_tokens: int, k_multiple: int, most_tokens: int) -> str | None:
    if k % k_multiple:
        return f"K = {k:,} is not a multiple of {k_multiple}"
    if num_tokens > most_tokens:
        return f"x has more than {most_tokens} rows"
    return None


_BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (_FusedA(), _Skinny())}


def get(name: str) -> Backend:
    """Return a backend by its name in tables and decisions."""
    return _BACKENDS[name]


def names() -> tuple[str, ...]:
    """Return the names of all."""
    return tuple(_BACKENDS)
