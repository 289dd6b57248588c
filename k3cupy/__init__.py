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
    "Choice",
    "CompileError",
    "CompileReport",
    "DispatchReport",
    "FusedAGemmConfig",
    "LinearReport",
    "MlaDecodeConfig",
    "MlaNormConfig",
    "MlaPrefillConfig",
    "MlaQueryConfig",
    "MlaValueConfig",
    "PreparedCall",
    "SkinnyGemmConfig",
    "ToolchainError",
    "batch_invariant_mode",
    "compile",
    "config_info",
    "disable_low_latency_gemm",
    "dispatch_report",
    "dsv3_fused_a_gemm",
    "enable_low_latency_gemm",
    "explain_fused_a_gemm",
    "explain_low_latency_gemm",
    "explain_mla_decode",
    "explain_mla_decode_query",
    "explain_mla_decode_value",
    "explain_mla_prefill",
    "explain_q_kv_rmsnorm",
    "explain_skinny_gemm",
    "fused_a_gemm",
    "fused_mla_decode_q_concat_kv_cache_insert",
    "fused_mla_decode_query",
    "fused_mla_decode_value",
    "fused_mla_key_concat_ds_mla_insert",
    "fused_mla_key_concat_kv_cache_insert",
    "fused_mla_kv_concat",
    "fused_mla_kv_concat_quant_fp8",
    "fused_mla_qkv_quant_kv_cache_fp8_insert",
    "fused_q_kv_rmsnorm",
    "is_batch_invariant",
    "low_latency_linear",
    "prepare",
    "reset_dispatch_report",
    "select_backend",
    "set_batch_invariant",
    "show_config",
    "skinny_gemm",
    "source_dir",
    "try_low_latency_gemm",
    "tune",
    "warmup",
]

_HOMES = {
    "CaptureError": "k3cupy.runtime.errors",
    "Choice": "k3cupy.call.choice",
    "CompileError": "k3cupy.runtime.errors",
    "CompileReport": "k3cupy.compiling.report",
    "DispatchReport": "k3cupy.ops.dispatch_report",
    "FusedAGemmConfig": "k3cupy.kernels.fused_a_gemm",
    "LinearReport": "k3cupy.torch.linear_report",
    "MlaDecodeConfig": "k3cupy.kernels.mla_decode",
    "MlaNormConfig": "k3cupy.kernels.mla_norm",
    "MlaPrefillConfig": "k3cupy.kernels.mla_prefill",
    "MlaQueryConfig": "k3cupy.kernels.mla_query",
    "MlaValueConfig": "k3cupy.kernels.mla_value",
    "PreparedCall": "k3cupy.ops.prepare",
    "SkinnyGemmConfig": "k3cupy.kernels.skinny_gemm",
    "ToolchainError": "k3cupy.runtime.errors",
    "batch_invariant_mode": "k3cupy.ops.batch_invariance",
    "compile": "k3cupy.compiling.compile",
    "config_info": "k3cupy.runtime.config",
    "disable_low_latency_gemm": "k3cupy.torch.modules",
    "dispatch_report": "k3cupy.ops.dispatch_report",
    "dsv3_fused_a_gemm": "k3cupy.ops.fused_a_gemm",
    "enable_low_latency_gemm": "k3cupy.torch.modules",
    "explain_fused_a_gemm": "k3cupy.ops.fused_a_gemm",
    "explain_low_latency_gemm": "k3cupy.ops.linear",
    "explain_mla_decode": "k3cupy.ops.mla_decode",
    "explain_mla_decode_query": "k3cupy.ops.mla_query",
    "explain_mla_decode_value": "k3cupy.ops.mla_value",
    "explain_mla_prefill": "k3cupy.ops.mla_prefill",
    "explain_q_kv_rmsnorm": "k3cupy.ops.mla_norm",
    "explain_skinny_gemm": "k3cupy.ops.skinny_gemm",
    "fused_a_gemm": "k3cupy.ops.fused_a_gemm",
    "fused_mla_decode_q_concat_kv_cache_insert": "k3cupy.ops.mla_decode",
    "fused_mla_decode_query": "k3cupy.ops.mla_query",
    "fused_mla_decode_value": "k3cupy.ops.mla_value",
    "fused_mla_key_concat_ds_mla_insert": "k3cupy.ops.mla_prefill",
    "fused_mla_key_concat_kv_cache_insert": "k3cupy.ops.mla_prefill",
    "fused_mla_kv_concat": "k3cupy.ops.mla_prefill",
    "fused_mla_kv_concat_quant_fp8": "k3cupy.ops.mla_prefill",
    "fused_mla_qkv_quant_kv_cache_fp8_insert": "k3cupy.ops.mla_prefill",
    "fused_q_kv_rmsnorm": "k3cupy.ops.mla_norm",
    "is_batch_invariant": "k3cupy.ops.batch_invariance",
    "low_latency_linear": "k3cupy.ops.linear",
    "prepare": "k3cupy.ops.prepare",
    "reset_dispatch_report": "k3cupy.ops.dispatch_report",
    "select_backend": "k3cupy.ops.select_backend",
    "set_batch_invariant": "k3cupy.ops.batch_invariance",
    "show_config": "k3cupy.runtime.config",
    "skinny_gemm": "k3cupy.ops.skinny_gemm",
    "source_dir": "k3cupy.runtime.sources",
    "try_low_latency_gemm": "k3cupy.ops.linear",
    "tune": "k3cupy.tuning.tune",
    "warmup": "k3cupy.ops.warmup",
}
"""The module of each public name; type checkers read the imports below instead."""

_MODULES = ("projections",)
"""Modules that pages name as ``k3cupy.x``, without an import of their own."""

if TYPE_CHECKING:
    from k3cupy.call.choice import Choice
    from k3cupy.compiling.compile import compile
    from k3cupy.compiling.report import CompileReport
    from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig
    from k3cupy.kernels.mla_decode import MlaDecodeConfig
    from k3cupy.kernels.mla_norm import MlaNormConfig
    from k3cupy.kernels.mla_prefill import MlaPrefillConfig
    from k3cupy.kernels.mla_query import MlaQueryConfig
    from k3cupy.kernels.mla_value import MlaValueConfig
    from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig
    from k3cupy.ops.batch_invariance import (
        batch_invariant_mode,
        is_batch_invariant,
        set_batch_invariant,
    )
    from k3cupy.ops.dispatch_report import DispatchReport, dispatch_report, reset_dispatch_report
    from k3cupy.ops.fused_a_gemm import dsv3_fused_a_gemm, explain_fused_a_gemm, fused_a_gemm
    from k3cupy.ops.linear import (
        explain_low_latency_gemm,
        low_latency_linear,
        try_low_latency_gemm,
    )
    from k3cupy.ops.mla_decode import explain_mla_decode, fused_mla_decode_q_concat_kv_cache_insert
    from k3cupy.ops.mla_norm import explain_q_kv_rmsnorm, fused_q_kv_rmsnorm
    from k3cupy.ops.mla_prefill import (
        explain_mla_prefill,
        fused_mla_key_concat_ds_mla_insert,
        fused_mla_key_concat_kv_cache_insert,
        fused_mla_kv_concat,
        fused_mla_kv_concat_quant_fp8,
        fused_mla_qkv_quant_kv_cache_fp8_insert,
    )
    from k3cupy.ops.mla_query import explain_mla_decode_query, fused_mla_decode_query
    from k3cupy.ops.mla_value import explain_mla_decode_value, fused_mla_decode_value
    from k3cupy.ops.prepare import PreparedCall, prepare
    from k3cupy.ops.select_backend import select_backend
    from k3cupy.ops.skinny_gemm import explain_skinny_gemm, skinny_gemm
    from k3cupy.ops.warmup import warmup
    from k3cupy.runtime.config import config_info, show_config
    from k3cupy.runtime.errors import CaptureError, CompileError, ToolchainError
    from k3cupy.runtime.sources import source_dir
    from k3cupy.torch.linear_report import LinearReport
    from k3cupy.torch.modules import disable_low_latency_gemm, enable_low_latency_gemm
    from k3cupy.tuning.tune import tune
else:

    def __getattr__(name):
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        try:
            home = _HOMES[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        value = globals()[name] = getattr(import_module(home), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__, *_MODULES})
