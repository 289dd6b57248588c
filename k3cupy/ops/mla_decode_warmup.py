"""The instances of the MLA decode epilogue that calls of given formats will need."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from k3cupy.ops import checks
from k3cupy.ops.mla_decode_config import (
    DEFAULTS,
    MlaDecodeConfig,
    MlaDecodeVariant,
    dispatched_configs,
)
from k3cupy.ops.mla_decode_validate import check_split
from k3cupy.ops.mla_warmup import caches_and_dtypes
from k3cupy.ops.warmup_options import Wanted, WarmupOptions, several

OPS = ("mla_decode",)
TAKES = ("dtype", "kv_cache", "query_fp8", "rope", "kv_inputs_ready", "vector", "split")


def wanted(op: str, options: WarmupOptions) -> Wanted:
    """Check the options of ``warmup`` and return what calls will need.

    Raises:
        TypeError, ValueError: one names what no call can have.
    """
    check_split(options.split)
    chosen = tuple(
        config.instance(variant)
        for variant in _variants(options)
        for config in _configs(variant, options.split)
    )
    return lambda _: chosen


def _variants(options: WarmupOptions) -> Iterator[MlaDecodeVariant]:
    caches, dtypes = caches_and_dtypes(options)
    for dtype, cache, turned, ready, wide in itertools.product(
        dtypes,
        caches,
        several(options.rope),
        several(options.kv_inputs_ready),
        several(options.vector),
    ):
        given = options.query_fp8
        for query in [cache == "fp8"] if given is None else several(given):
            variant = MlaDecodeVariant(dtype, query, cache, turned, ready, wide)
            if not variant.is_valid():
                checks.reject("query_fp8", "False with an fp8_ds_mla cache", "True")
            yield variant


def _configs(
    variant: MlaDecodeVariant, split: int | MlaDecodeConfig | None
) -> Sequence[MlaDecodeConfig]:
    if isinstance(split, MlaDecodeConfig):
        return [split]
    if split is not None:
        return [DEFAULTS[split]]
    return dispatched_configs(variant.kind) if variant.vector else [DEFAULTS[0]]
