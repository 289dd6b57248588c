"""Compiling ahead: before a graph capture, before serving, or once for a shared disk cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from k3cupy.ops import checks
from k3cupy.ops.fused_a_gemm_config import FusedAGemmConfig
from k3cupy.ops.fused_a_gemm_warmup import gemm_calls
from k3cupy.ops.mla_decode_config import (
    DEFAULTS,
    MlaDecodeConfig,
    MlaDecodeVariant,
    dispatched_configs,
)
from k3cupy.ops.mla_decode_validate import check_split
from k3cupy.ops.mla_prefill_config import (
    INSERTS,
    KEY_CONCAT,
    KEY_CONCAT_DS_MLA,
    KV_CONCAT,
    KV_CONCAT_QUANT,
    QKV_QUANT,
    MlaPrefillConfig,
    MlaPrefillVariant,
)
from k3cupy.ops.mla_prefill_config import OPS as PREFILL_OPS
from k3cupy.ops.mla_prefill_config import dispatched_configs as dispatched_prefill_configs
from k3cupy.ops.mla_prefill_validate import check_config
from k3cupy.runtime import devices, instances
from k3cupy.runtime.instances import Instance

_CACHES = {"bf16": "same", "fp16": "same", "same": "same", "fp8": "fp8", "fp8_ds_mla": "ds_mla"}
_EVERY_CACHE = ("bf16", "fp8", "fp8_ds_mla")
_DECODE, _PREFILL, _GEMM = "mla_decode", "mla_prefill", "fused_a_gemm"
_OPS = (_DECODE, _PREFILL, *PREFILL_OPS, _GEMM)
_INSERT_OF = {"same": KEY_CONCAT, "fp8": QKV_QUANT, "ds_mla": KEY_CONCAT_DS_MLA}


def warmup(
    op: str = _DECODE,
    *,
    dtype: str | Sequence[str] = "bfloat16",
    kv_cache: str | Sequence[str] = _EVERY_CACHE,
    query_fp8: bool | Sequence[bool] | None = None,
    rope: bool | Sequence[bool] = False,
    kv_inputs_ready: bool | Sequence[bool] = False,
    vector: bool | Sequence[bool] = True,
    split: int | MlaDecodeConfig | None = None,
    config: MlaPrefillConfig | FusedAGemmConfig | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
    tokens: int | Sequence[int] | None = None,
    strided: bool | Sequence[bool] | None = None,
    weight_is_static: bool | Sequence[bool] = False,
    batch_invariant: bool | Sequence[bool] = False,
    residual: bool | Sequence[bool] = False,
    device: int | None = None,
    max_workers: int | None = None,
    progress: bool = True,
) -> int:
    """Compile and load instances now, on threads, so that later calls and captures need not.

    Every argument that takes one value also takes several, and all combinations are compiled.

    Args:
        op: ``"mla_decode"``; ``"mla_prefill"`` for the prefill operations of the caches named by
            ``kv_cache`` and both context operations; or the name of one of those; or
            ``"fused_a_gemm"``, which takes ``vector`` and the arguments from ``config`` on.
        dtype: of the inputs, ``"bfloat16"`` or ``"float16"``.
        kv_cache: ``"bf16"`` (or ``"fp16"``: the inputs' type), ``"fp8"``, ``"fp8_ds_mla"``.
        query_fp8: decode: e4m3 query; None: with an fp8 cache, as in serving.
        rope: with positions.
        kv_inputs_ready: decode: instances for that promise.
        vector: True for rows at multiples of 16 bytes, False for the element-wise instance.
        split: decode: as for the operation; None compiles every configuration that the table may
            choose.
        config: prefill and GEMM: the same.
        shapes: GEMM: (N, K) of each weight; None: every projection of Kimi-K3.
        tokens: GEMM: every M that will come; None: 1 to 64.
        strided: GEMM: rows of x apart from one another; None: both, packed and apart.
        weight_is_static: GEMM: instances for that promise, which ``dsv3_fused_a_gemm`` makes with
            ``enable_pdl=True``.
        batch_invariant: GEMM: instances for that flag.
        residual: GEMM: instances that add one.
        device: GPU ordinal; by default the current one.
        max_workers: compiling threads; by default one per CPU core, 16 at most.
        progress: show a progress bar on standard error.

    Returns:
        The number of instances that are ready.

    Raises:
        ValueError: an argument names nothing that exists, or is for the other kind of operation.
        ToolchainError, CompileError: the kernels cannot be built here.

    Example:
        >>> k3cupy.warmup(kv_cache="fp8", rope=[False, True])    # doctest: +SKIP
        8
        >>> k3cupy.warmup("fused_a_gemm", shapes=[(2112, 7168)], tokens=[1, 16])  # doctest: +SKIP
        4
    """
    if op not in _OPS:
        checks.reject("op", " or ".join(map(repr, _OPS)), repr(op))
    if op == _GEMM:
        _refuse(
            op,
            dtype=None if dtype == "bfloat16" or list(dtype) == ["bfloat16"] else dtype,
            kv_cache=None if tuple(kv_cache) == _EVERY_CACHE else kv_cache,
            split=split,
            query_fp8=query_fp8,
            rope=rope or None,
            kv_inputs_ready=kv_inputs_ready or None,
        )
        calls = gemm_calls(
            shapes,
            tokens,
            (False, True) if strided is None else _flags(strided),
            _flags(vector),
            _flags(weight_is_static),
            _flags(batch_invariant),
            _flags(residual),
            config,
        )
        ordinal = devices.ordinal_of(device)
        return _load(calls.instances(devices.info(ordinal)), ordinal, max_workers, progress)
    _refuse(
        op,
        shapes=shapes,
        tokens=tokens,
        strided=strided,
        weight_is_static=weight_is_static or None,
        batch_invariant=batch_invariant or None,
        residual=residual or None,
    )
    check_split(split)
    prefill_config = check_config(config)
    for name in _names(kv_cache):
        if name not in _CACHES:
            checks.reject("kv_cache", " or ".join(map(repr, _CACHES)), repr(name))
    for name in _names(dtype):
        if not MlaDecodeVariant(name).is_valid():
            checks.reject("dtype", "'bfloat16' or 'float16'", repr(name))
    caches = [_CACHES[name] for name in _names(kv_cache)]
    if op == _DECODE:
        _refuse(op, config=config)
        chosen = tuple(
            decode_config.instance(variant)
            for variant in _variants(dtype, caches, query_fp8, rope, kv_inputs_ready, vector)
            for decode_config in _configs(variant, split)
        )
    else:
        ready = kv_inputs_ready if kv_inputs_ready is not False else None
        _refuse(op, split=split, query_fp8=query_fp8, kv_inputs_ready=ready)
        inserts = [_INSERT_OF[cache] for cache in caches]
        wanted = (*inserts, KV_CONCAT, KV_CONCAT_QUANT) if op == _PREFILL else (op,)
        chosen = tuple(
            chosen_config.instance(variant)
            for variant in _prefill_variants(wanted, dtype, rope, vector)
            for chosen_config in (
                [prefill_config] if prefill_config else dispatched_prefill_configs(variant)
            )
        )
    return _load(chosen, devices.ordinal_of(device), max_workers, progress)


def _load(chosen: Sequence[Instance], device: int, max_workers: int | None, progress: bool) -> int:
    if not progress:
        return instances.load_all(chosen, device, max_workers=max_workers)
    return _load_with_bar(chosen, device, max_workers)


def _names(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _flags(value: bool | Sequence[bool]) -> Sequence[bool]:
    return [value] if isinstance(value, bool) else value


def _refuse(op: str, **options: Any) -> None:
    """Refuse options that mean nothing to an operation."""
    for name, value in options.items():
        if value is not None:
            checks.reject(name, f"nothing with op={op!r}", repr(value))


def _variants(
    dtype: str | Sequence[str],
    caches: Sequence[str],
    query_fp8: bool | Sequence[bool] | None,
    rope: bool | Sequence[bool],
    kv_inputs_ready: bool | Sequence[bool],
    vector: bool | Sequence[bool],
) -> Iterator[MlaDecodeVariant]:
    for kind, cache, turned, ready, wide in itertools.product(
        _names(dtype), caches, _flags(rope), _flags(kv_inputs_ready), _flags(vector)
    ):
        for query in [cache == "fp8"] if query_fp8 is None else _flags(query_fp8):
            variant = MlaDecodeVariant(kind, query, cache, turned, ready, wide)
            if not variant.is_valid():
                checks.reject("query_fp8", "False with an fp8_ds_mla cache", "True")
            yield variant


def _prefill_variants(
    ops: Sequence[str],
    dtype: str | Sequence[str],
    rope: bool | Sequence[bool],
    vector: bool | Sequence[bool],
) -> Iterator[MlaPrefillVariant]:
    """Yield what exists; the context operations have no RoPE, and one takes k_pe in e4m3 too."""
    for op, kind, turned, wide in itertools.product(
        ops, _names(dtype), _flags(rope), _flags(vector)
    ):
        for k_pe_fp8 in (False, True):
            turns = turned and op in INSERTS
            variant = MlaPrefillVariant(op, kind, turns, k_pe_fp8, wide)
            if variant.is_valid():
                yield variant


def _configs(
    variant: MlaDecodeVariant, split: int | MlaDecodeConfig | None
) -> Sequence[MlaDecodeConfig]:
    if isinstance(split, MlaDecodeConfig):
        return [split]
    if split is not None:
        return [DEFAULTS[split]]
    return dispatched_configs(variant.kind) if variant.vector else [DEFAULTS[0]]


def _load_with_bar(chosen: Sequence[Instance], device: int, max_workers: int | None) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("compiling kernels"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(set(chosen)))
        return instances.load_all(
            chosen, device, max_workers=max_workers, on_done=lambda _: bar.advance(task)
        )
