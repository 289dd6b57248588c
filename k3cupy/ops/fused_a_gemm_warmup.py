"""The instances of the fused-A GEMM that calls of given shapes will need."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k3cupy import projections
from k3cupy.ops import checks
from k3cupy.ops.fused_a_gemm_choice import choose
from k3cupy.ops.fused_a_gemm_config import (
    K_MULTIPLE,
    MAX_TOKENS,
    FusedAGemmConfig,
    FusedAGemmVariant,
)
from k3cupy.ops.fused_a_gemm_validate import check_config
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance


@dataclass(frozen=True)
class GemmCalls:
    """Calls to come.

    Attributes:
        shapes: (N, K) of the weights.
        tokens: every M.
        variants: layouts of x, the promise and the residual, in all their combinations.
        batch_invariant: both values may be there.
        config: None for the table.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    variants: tuple[FusedAGemmVariant, ...]
    batch_invariant: tuple[bool, ...]
    config: FusedAGemmConfig | None

    def instances(self, device: DeviceInfo) -> tuple[Instance, ...]:
        """Return what these calls run on a GPU.

        Raises:
            ValueError: the configuration does not fit the GPU.
        """
        check_config(self.config, max(self.tokens), device)
        found = dict.fromkeys(
            (self.config or choose(n, k, count, device, batch_invariant=invariant)[0], variant)
            for (n, k), count, invariant, variant in itertools.product(
                self.shapes, self.tokens, self.batch_invariant, self.variants
            )
        )
        return tuple(config.instance(variant) for config, variant in found)


def gemm_calls(
    shapes: Any,
    tokens: Any,
    strided: Sequence[bool],
    vector: Sequence[bool],
    weight_is_static: Sequence[bool],
    batch_invariant: Sequence[bool],
    residual: Sequence[bool],
    config: Any,
) -> GemmCalls:
    """Check the arguments of ``warmup``.

    Raises:
        TypeError, ValueError: one names what no call can have.
    """
    pairs = [(p.n, p.k) for p in projections.shapes()] if shapes is None else list(shapes)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_is_count, pair))):
            checks.reject("shapes", "pairs (N, K) of integers above 0", repr(pair))
        if pair[1] % K_MULTIPLE:
            checks.reject("shapes", f"K a multiple of {K_MULTIPLE}", repr(pair))
    if tokens is None:
        counts = list(range(1, MAX_TOKENS + 1))
    else:
        counts = [tokens] if isinstance(tokens, int) else list(tokens)
    for count in counts:
        if not _is_count(count) or count > MAX_TOKENS:
            checks.reject("tokens", f"numbers from 1 to {MAX_TOKENS}", repr(count))
    for name, given in (("shapes", pairs), ("tokens", counts)):
        if not given:
            checks.reject(name, "at least one", "none")
    variants = dict.fromkeys(
        FusedAGemmVariant(wide and not apart, wide, static, adds)
        for apart, wide, static, adds in itertools.product(
            strided, vector, weight_is_static, residual
        )
    )
    return GemmCalls(
        shapes=tuple((n, k) for n, k in pairs),
        tokens=tuple(counts),
        variants=tuple(variants),
        batch_invariant=tuple(batch_invariant),
        config=check_config(config, max(counts)),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
