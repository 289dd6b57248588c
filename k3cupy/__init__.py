"""k3cupy: the Kimi-K3 decode kernels as a Python package that needs no build.

CUDA sources are compiled at run time; tensors of any DLPack producer go in and come out. Importing
the package makes no driver call and loads neither CuPy nor PyTorch: each public name is imported
when it is first asked for (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CompileError",
    "Decision",
    "DispatchReport",
    "FusedAGemmConfig",
    "FusedAGemmVariant",
    "LinearDecision",
    "LinearReport",
    "MlaDecodeConfig",
    "MlaDecodeVariant",
    "MlaPrefillConfig",
    "MlaPrefillVariant",
    "SkinnyGemmConfig",
    "SkinnyGemmVariant",
    "ToolchainError",
    "batch_invariant_mode",
    "config_info",
    "disable_low_latency_gemm",
    "dispatch_report",
    "dsv3_fused_a_gemm",
    "enable_low_latency_gemm",
    "explain_fused_a_gemm",
    "explain_low_latency_gemm",
    "explain_mla_decode",
    "explain_mla_prefill",
    "explain_skinny_gemm",
    "fused_a_gemm",
    "fused_mla_decode_q_concat_kv_cache_insert",
    "fused_mla_key_concat_ds_mla_insert",
    "fused_mla_key_concat_kv_cache_insert",
    "fused_mla_kv_concat",
    "fused_mla_kv_concat_quant_fp8",
    "fused_mla_qkv_quant_kv_cache_fp8_insert",
    "is_batch_invariant",
    "low_latency_linear",
    "reset_dispatch_report",
    "select_backend",
    "set_batch_invariant",
    "show_config",
    "skinny_gemm",
    "source_dir",
    "try_low_latency_gemm",
    "tune",
    "warmup",
    "warmup_low_latency_gemm",
]

_HOMES = {
    "CaptureError": "k3cupy.runtime.errors",
    "CompileError": "k3cupy.runtime.errors",
    "Decision": "k3cupy.ops.decision",
    "DispatchReport": "k3cupy.dispatch.report",
    "FusedAGemmConfig": "k3cupy.ops.fused_a_gemm_config",
    "FusedAGemmVariant": "k3cupy.ops.fused_a_gemm_config",
    "LinearDecision": "k3cupy.dispatch.decision",
    "LinearReport": "k3cupy.integrations.linear_report",
    "MlaDecodeConfig": "k3cupy.ops.mla_decode_config",
    "MlaDecodeVariant": "k3cupy.ops.mla_decode_config",
    "MlaPrefillConfig": "k3cupy.ops.mla_prefill_config",
    "MlaPrefillVariant": "k3cupy.ops.mla_prefill_config",
    "SkinnyGemmConfig": "k3cupy.ops.skinny_gemm_config",
    "SkinnyGemmVariant": "k3cupy.ops.skinny_gemm_config",
    "ToolchainError": "k3cupy.runtime.errors",
    "batch_invariant_mode": "k3cupy.dispatch.mode",
    "config_info": "k3cupy.runtime.config",
    "disable_low_latency_gemm": "k3cupy.integrations.modules",
    "dispatch_report": "k3cupy.dispatch.report",
    "dsv3_fused_a_gemm": "k3cupy.ops.fused_a_gemm",
    "enable_low_latency_gemm": "k3cupy.integrations.modules",
    "explain_fused_a_gemm": "k3cupy.ops.fused_a_gemm",
    "explain_low_latency_gemm": "k3cupy.dispatch.linear",
    "explain_mla_decode": "k3cupy.ops.mla_decode",
    "explain_mla_prefill": "k3cupy.ops.mla_prefill",
    "explain_skinny_gemm": "k3cupy.ops.skinny_gemm",
    "fused_a_gemm": "k3cupy.ops.fused_a_gemm",
    "fused_mla_decode_q_concat_kv_cache_insert": "k3cupy.ops.mla_decode",
    "fused_mla_key_concat_ds_mla_insert": "k3cupy.ops.mla_prefill",
    "fused_mla_key_concat_kv_cache_insert": "k3cupy.ops.mla_prefill",
    "fused_mla_kv_concat": "k3cupy.ops.mla_prefill",
    "fused_mla_kv_concat_quant_fp8": "k3cupy.ops.mla_prefill",
    "fused_mla_qkv_quant_kv_cache_fp8_insert": "k3cupy.ops.mla_prefill",
    "is_batch_invariant": "k3cupy.dispatch.mode",
    "low_latency_linear": "k3cupy.dispatch.linear",
    "reset_dispatch_report": "k3cupy.dispatch.report",
    "select_backend": "k3cupy.dispatch.linear",
    "set_batch_invariant": "k3cupy.dispatch.mode",
    "show_config": "k3cupy.runtime.config",
    "skinny_gemm": "k3cupy.ops.skinny_gemm",
    "source_dir": "k3cupy.runtime.sources",
    "try_low_latency_gemm": "k3cupy.dispatch.linear",
    "tune": "k3cupy.dispatch.tune",
    "warmup": "k3cupy.ops.warmup",
    "warmup_low_latency_gemm": "k3cupy.dispatch.warmup",
}
"""The module of each public name; type checkers read the imports below instead."""

if TYPE_CHECKING:
    from k3cupy.dispatch.decision import LinearDecision
    from k3cupy.dispatch.linear import (
        explain_low_latency_gemm,
        low_latency_linear,
        select_backend,
        try_low_latency_gemm,
    )
    from k3cupy.dispatch.mode import batch_invariant_mode, is_batch_invariant, set_batch_invariant
    from k3cupy.dispatch.report import DispatchReport, dispatch_report, reset_dispatch_report
    from k3cupy.dispatch.tune import tune
    from k3cupy.dispatch.warmup import warmup_low_latency_gemm
    from k3cupy.integrations.linear_report import LinearReport
    from k3cupy.integrations.modules import disable_low_latency_gemm, enable_low_latency_gemm
    from k3cupy.ops.decision import Decision
    from k3cupy.ops.fused_a_gemm import dsv3_fused_a_gemm, explain_fused_a_gemm, fused_a_gemm
    from k3cupy.ops.fused_a_gemm_config import FusedAGemmConfig, FusedAGemmVariant
    from k3cupy.ops.mla_decode import explain_mla_decode, fused_mla_decode_q_concat_kv_cache_insert
    from k3cupy.ops.mla_decode_config import MlaDecodeConfig, MlaDecodeVariant
    from k3cupy.ops.mla_prefill import (
        explain_mla_prefill,
        fused_mla_key_concat_ds_mla_insert,
        fused_mla_key_concat_kv_cache_insert,
        fused_mla_kv_concat,
        fused_mla_kv_concat_quant_fp8,
        fused_mla_qkv_quant_kv_cache_fp8_insert,
    )
    from k3cupy.ops.mla_prefill_config import MlaPrefillConfig, MlaPrefillVariant
    from k3cupy.ops.skinny_gemm import explain_skinny_gemm, skinny_gemm
    from k3cupy.ops.skinny_gemm_config import SkinnyGemmConfig, SkinnyGemmVariant
    from k3cupy.ops.warmup import warmup
    from k3cupy.runtime.config import config_info, show_config
    from k3cupy.runtime.errors import CaptureError, CompileError, ToolchainError
    from k3cupy.runtime.sources import source_dir
else:

    def __getattr__(name):
        try:
            home = _HOMES[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        from importlib import import_module

        value = globals()[name] = getattr(import_module(home), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
