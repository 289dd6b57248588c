"""The instances of the fused-A GEMM that calls of given shapes will need."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from k3cupy.ops import gemm_warmup
from k3cupy.ops.fused_a_gemm_choice import choose
from k3cupy.ops.fused_a_gemm_config import K_MULTIPLE, MAX_TOKENS, FusedAGemmVariant
from k3cupy.ops.fused_a_gemm_validate import check_config
from k3cupy.ops.warmup_options import Wanted, WarmupOptions, several
from k3cupy.runtime import devices
from k3cupy.runtime.instances import Instance

OPS = ("fused_a_gemm",)
TAKES = (
    "vector",
    "config",
    "shapes",
    "tokens",
    "strided",
    "weight_is_static",
    "batch_invariant",
    "residual",
)


def wanted(op: str, options: WarmupOptions) -> Wanted:
    """Check the options of ``warmup`` and return what calls will need.

    Raises:
        TypeError, ValueError: one names what no call can have; on a GPU also a configuration that
            does not fit it.
    """
    shapes = gemm_warmup.shapes_of(options.shapes, K_MULTIPLE)
    tokens = gemm_warmup.tokens_of(options.tokens, MAX_TOKENS)
    config = check_config(options.config, max(tokens))
    strided = (False, True) if options.strided is None else several(options.strided)
    variants = dict.fromkeys(
        FusedAGemmVariant(wide and not apart, wide, static, adds)
        for apart, wide, static, adds in itertools.product(
            strided,
            several(options.vector),
            several(options.weight_is_static),
            several(options.residual),
        )
    )
    orders = several(options.batch_invariant)

    def instances(ordinal: int) -> Sequence[Instance]:
        device = devices.info(ordinal)
        check_config(config, max(tokens), device)
        configs = dict.fromkeys(
            config or choose(n, k, count, device, batch_invariant=invariant)[0]
            for (n, k), count, invariant in itertools.product(shapes, tokens, orders)
        )
        return [each.instance(variant) for each in configs for variant in variants]

    return instances
