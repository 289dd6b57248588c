"""The instances of the prefill and context operations that calls of given formats will need."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from k3cupy.ops.mla_prefill_config import (
    INSERTS,
    KEY_CONCAT,
    KEY_CONCAT_DS_MLA,
    KV_CONCAT,
    KV_CONCAT_QUANT,
    QKV_QUANT,
    MlaPrefillVariant,
    dispatched_configs,
)
from k3cupy.ops.mla_prefill_config import OPS as PREFILL_OPS
from k3cupy.ops.mla_prefill_validate import check_config
from k3cupy.ops.mla_warmup import caches_and_dtypes
from k3cupy.ops.warmup_options import Wanted, WarmupOptions, several

_ALL = "mla_prefill"
OPS = (_ALL, *PREFILL_OPS)
TAKES = ("dtype", "kv_cache", "rope", "vector", "config")

_INSERT_OF = {"same": KEY_CONCAT, "fp8": QKV_QUANT, "ds_mla": KEY_CONCAT_DS_MLA}


def wanted(op: str, options: WarmupOptions) -> Wanted:
    """Check the options of ``warmup`` and return what calls will need.

    Raises:
        TypeError, ValueError: one names what no call can have.
    """
    config = check_config(options.config)
    caches, dtypes = caches_and_dtypes(options)
    inserts = [_INSERT_OF[cache] for cache in caches]
    ops = (*inserts, KV_CONCAT, KV_CONCAT_QUANT) if op == _ALL else (op,)
    chosen = tuple(
        each.instance(variant)
        for variant in _variants(ops, dtypes, options)
        for each in ([config] if config else dispatched_configs(variant))
    )
    return lambda _: chosen


def _variants(
    ops: Sequence[str], dtypes: Sequence[str], options: WarmupOptions
) -> Iterator[MlaPrefillVariant]:
    """Yield what exists; the context operations have no RoPE, and one takes k_pe in e4m3 too."""
    for op, dtype, turned, wide in itertools.product(
        ops, dtypes, several(options.rope), several(options.vector)
    ):
        for k_pe_fp8 in (False, True):
            turns = turned and op in INSERTS
            variant = MlaPrefillVariant(op, dtype, turns, k_pe_fp8, wide)
            if variant.is_valid():
                yield variant
