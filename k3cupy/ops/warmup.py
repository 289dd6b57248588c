"""Compiling ahead: before a graph capture, before serving, or once for a shared disk cache."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from k3cupy.ops import (
    checks,
    fused_a_gemm_warmup,
    mla_decode_warmup,
    mla_prefill_warmup,
    skinny_gemm_warmup,
)
from k3cupy.ops.fused_a_gemm_config import FusedAGemmConfig
from k3cupy.ops.mla_decode_config import MlaDecodeConfig
from k3cupy.ops.mla_prefill_config import MlaPrefillConfig
from k3cupy.ops.skinny_gemm_config import SkinnyGemmConfig
from k3cupy.ops.warmup_options import EVERY_CACHE, Wanted, WarmupOptions
from k3cupy.runtime import devices, instances
from k3cupy.runtime.instances import Instance

_MODULES: dict[str, ModuleType] = {
    op: module
    for module in (mla_decode_warmup, mla_prefill_warmup, fused_a_gemm_warmup, skinny_gemm_warmup)
    for op in module.OPS
}


def warmup(
    op: str = "mla_decode",
    *,
    dtype: str | Sequence[str] = "bfloat16",
    kv_cache: str | Sequence[str] = EVERY_CACHE,
    query_fp8: bool | Sequence[bool] | None = None,
    rope: bool | Sequence[bool] = False,
    kv_inputs_ready: bool | Sequence[bool] = False,
    vector: bool | Sequence[bool] = True,
    split: int | MlaDecodeConfig | None = None,
    config: MlaPrefillConfig | FusedAGemmConfig | SkinnyGemmConfig | None = None,
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
            ``"fused_a_gemm"`` or ``"skinny_gemm"``.
        dtype: of the inputs, ``"bfloat16"`` or ``"float16"``; the fused-A GEMM has only the first.
        kv_cache: ``"bf16"`` (or ``"fp16"``: the inputs' type), ``"fp8"``, ``"fp8_ds_mla"``.
        query_fp8: decode: e4m3 query; None: with an fp8 cache, as in serving.
        rope: with positions.
        kv_inputs_ready: decode: instances for that promise.
        vector: True for rows at multiples of 16 bytes, False for the element-wise instance.
        split: decode: as for the operation; None compiles every configuration that the table may
            choose.
        config: prefill and GEMM: the same.
        shapes: GEMM: (N, K) of each weight; None: every projection of Kimi-K3.
        tokens: GEMM: every M that will come; None: all that the operation takes, 1 to 64 or to 8.
        strided: fused-A: rows of x apart from one another; None: both, packed and apart.
        weight_is_static: GEMM: instances for that promise, which ``dsv3_fused_a_gemm`` makes with
            ``enable_pdl=True``.
        batch_invariant: fused-A: instances for that flag.
        residual: GEMM: instances that add one.
        device: GPU ordinal; by default the current one.
        max_workers: compiling threads; by default one per CPU core, 16 at most.
        progress: show a progress bar on standard error.

    Returns:
        The number of instances that are ready.

    Raises:
        ValueError: an argument names nothing that exists, or is for another operation.
        ToolchainError, CompileError: the kernels cannot be built here.

    Example:
        >>> k3cupy.warmup(kv_cache="fp8", rope=[False, True])    # doctest: +SKIP
        8
        >>> k3cupy.warmup("fused_a_gemm", shapes=[(2112, 7168)], tokens=[1, 16])  # doctest: +SKIP
        4
    """
    if op not in _MODULES:
        checks.reject("op", " or ".join(map(repr, _MODULES)), repr(op))
    options = WarmupOptions(
        dtype=dtype,
        kv_cache=kv_cache,
        query_fp8=query_fp8,
        rope=rope,
        kv_inputs_ready=kv_inputs_ready,
        vector=vector,
        split=split,
        config=config,
        shapes=shapes,
        tokens=tokens,
        strided=strided,
        weight_is_static=weight_is_static,
        batch_invariant=batch_invariant,
        residual=residual,
    )
    options.refuse_all_but(_MODULES[op].TAKES, op)
    wanted: Wanted = _MODULES[op].wanted(op, options)
    ordinal = devices.ordinal_of(device)
    chosen = wanted(ordinal)
    if not progress:
        return instances.load_all(chosen, ordinal, max_workers=max_workers)
    return _load_with_bar(chosen, ordinal, max_workers)


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
