"""The instances of the skinny GEMM that calls of given shapes will need."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from k3cupy.constants import CTYPES
from k3cupy.ops import gemm_warmup
from k3cupy.ops.skinny_gemm_choice import choose
from k3cupy.ops.skinny_gemm_config import K_MULTIPLE, MAX_TOKENS, SkinnyGemmVariant
from k3cupy.ops.skinny_gemm_validate import check_config
from k3cupy.ops.warmup_options import Wanted, WarmupOptions, dtypes_of, several
from k3cupy.runtime import devices
from k3cupy.runtime.instances import Instance

OPS = ("skinny_gemm",)
TAKES = ("dtype", "vector", "config", "shapes", "tokens", "weight_is_static", "residual")


def wanted(op: str, options: WarmupOptions) -> Wanted:
    """Check the options of ``warmup`` and return what calls will need.

    Raises:
        TypeError, ValueError: one names what no call can have.
    """
    shapes = gemm_warmup.shapes_of(options.shapes, K_MULTIPLE)
    config = check_config(options.config)
    asked = config.num_rows if config is not None and options.tokens is None else options.tokens
    tokens = gemm_warmup.tokens_of(asked, MAX_TOKENS)
    for count in tokens:
        check_config(config, count)
    variants = [
        SkinnyGemmVariant(dtype, wide, adds, static)
        for dtype, wide, adds, static in itertools.product(
            dtypes_of(options, CTYPES.__contains__),
            several(options.vector),
            several(options.residual),
            several(options.weight_is_static),
        )
    ]

    def instances(ordinal: int) -> Sequence[Instance]:
        device = devices.info(ordinal)
        configs = dict.fromkeys(
            config or choose(n, k, count, device)[0]
            for (n, k), count in itertools.product(shapes, tokens)
        )
        return [each.instance(variant) for each in configs for variant in variants]

    return instances
