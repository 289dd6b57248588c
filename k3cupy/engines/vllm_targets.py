"""What vLLM's operators and functions become: a call of ours, or, for what we do not take, its own.

Every function here makes one: (the target, which counts; vLLM's own; the modes) -> ours. Ours runs
on each call, so that what can be settled is settled when it is made.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from k3cupy.choose.gemm import ALL, TOKENS, choose
from k3cupy.engines import vllm_facts as facts
from k3cupy.engines.report import Target
from k3cupy.kernels.fused_a_gemm import MAX_TOKENS
from k3cupy.ops import linear, mla_decode, mla_prefill
from k3cupy.ops.fused_a_gemm import dsv3_fused_a_gemm, fused_a_gemm
from k3cupy.runtime import devices
from k3cupy.runtime.devices import OLDEST, OLDEST_ARCH
from k3cupy.runtime.errors import CaptureError, CompileError, ToolchainError

Call = Callable[..., Any]

importlib.import_module("k3cupy.torch.torch_library")  # makes the operator for compiled code


@dataclass(frozen=True)
class Modes:
    """What holds for all targets of a process.

    Attributes:
        batch_invariant: vLLM's own mode, VLLM_BATCH_INVARIANT.
        kv_inputs_ready: the promise of that name in decode.
        key: the dispatch key of the operators, which is also the type of their device.
    """

    batch_invariant: bool = False
    kv_inputs_ready: bool = False
    key: str = "CUDA"


class NotTakenError(Exception):
    """A call is for vLLM's own code; the text is the reason that the report gives."""


_NOT_OURS = (NotTakenError, TypeError, ValueError, CaptureError)
"""What a call of ours raises before anything was written: the next one may be ours."""

_NEVER_OURS = (CompileError, ToolchainError)
"""What the next call would run into as well, perhaps after seconds of compiling."""


def serving(target: Target, run: Call, own: Call, leading: int = 0) -> Call:
    """Return a function that serves calls by ``run``, and by ``own`` what that refuses.

    Args:
        target: counts.
        run: what we compute, or an error of those above.
        own: vLLM's own.
        leading: arguments that only vLLM's own takes, the dispatch keys of an operator.
    """
    why_never = ""
    known: set[int] = set()

    def ours(*args: Any) -> Any:
        nonlocal why_never
        reason = why_never
        if not reason:
            given = args[leading:]
            try:
                device = given[0].get_device()
                if device not in known:
                    reason = why_never = _why_no_gpu(device)
                    known.add(device)
                if not reason:
                    out = run(*given)
                    target.served += 1
                    return out
            except _NOT_OURS as error:
                reason = str(error)
            except _NEVER_OURS as error:
                reason = why_never = str(error)
        # Behind the handlers: an error of vLLM's own is no consequence of ours.
        target.hand_back(reason)
        return own(*args)

    return ours


def _why_no_gpu(device: int) -> str:
    """Return why no kernel of ours runs on a device, or ``""``; the CPU runs the references."""
    if device < 0:
        return ""
    gpu = devices.info(device)
    if gpu.compute_capability >= OLDEST:
        return ""
    return f"{gpu.name} is {gpu.arch}; our kernels need {OLDEST_ARCH}"


# --- Operators -----------------------------------------------------------------------------------


def operator(name: str, target: Target, own: Call, modes: Modes) -> Call:
    """Return our kernel of an operator: the dispatch keys first, then the schema's arguments."""
    return serving(target, _RUNS[name](modes), own, leading=1)


def _gemm(modes: Modes) -> Call:
    def run(output: Any, mat_a: Any, mat_b: Any, enable_pdl: bool = False) -> None:
        fused_a_gemm(
            mat_a,
            mat_b.t(),
            out=output,
            pdl=enable_pdl,
            weight_is_static=enable_pdl,
            batch_invariant=True,
        )

    return run if modes.batch_invariant else dsv3_fused_a_gemm


_DECODE: Call = mla_decode.fused_mla_decode_q_concat_kv_cache_insert
_QKV_QUANT: Call = mla_prefill.fused_mla_qkv_quant_kv_cache_fp8_insert


_OTHER_BLOCK = "cache_block_size is not that of the cache's shape"
"""Ours takes the size of a block from the cache, where vLLM's is told."""


def _decode(modes: Modes, *, ds_mla: bool = False, fp8: bool = False) -> Call:
    """Return ours for one of the three formats; with fp8 the scales stand before the size."""
    ready = modes.kv_inputs_ready

    def run(
        ql_nope: Any,
        q_pe: Any,
        kv_c_normed: Any,
        k_pe: Any,
        mqa_q: Any,
        k_cache: Any,
        slot_mapping: Any,
        *rest: Any,
    ) -> None:
        scales, others = (rest[:2], rest[2:]) if fp8 else ((None, None), rest)
        cache_block_size, positions, cos_sin_cache = (*others, None, None)[:3]
        if cache_block_size != k_cache.shape[1]:
            raise NotTakenError(_OTHER_BLOCK)
        _DECODE(
            ql_nope,
            q_pe,
            kv_c_normed,
            k_pe,
            k_cache,
            slot_mapping,
            ds_mla=ds_mla,
            q_scale_inv=scales[0],
            cache_scale_inv=scales[1],
            positions=positions,
            cos_sin_cache=cos_sin_cache,
            out=mqa_q,
            kv_inputs_ready=ready,
        )

    return run


def _key_concat(epilogue: Call) -> Call:
    def run(*args: Any) -> None:
        *inputs, k_out, k_cache, slot_mapping, cache_block_size = args[:8]
        if cache_block_size != k_cache.shape[1]:
            raise NotTakenError(_OTHER_BLOCK)
        epilogue(*inputs, k_cache, slot_mapping, *args[8:], out=k_out)

    return run


def _qkv_quant(*args: Any) -> None:
    *inputs, q_fp8, k_fp8, v_fp8, k_cache, slot_mapping = args[:10]
    if args[14] != k_cache.shape[1]:
        raise NotTakenError(_OTHER_BLOCK)
    _QKV_QUANT(*inputs, k_cache, slot_mapping, *args[10:14], *args[15:], out=(q_fp8, k_fp8, v_fp8))


def _kv_concat(k_nope: Any, k_pe: Any, k_out: Any) -> None:
    mla_prefill.fused_mla_kv_concat(k_nope, k_pe, out=k_out)


def _kv_concat_quant(k_nope: Any, k_pe: Any, v: Any, k_fp8: Any, v_fp8: Any) -> None:
    mla_prefill.fused_mla_kv_concat_quant_fp8(k_nope, k_pe, v, out=(k_fp8, v_fp8))


_RUNS: dict[str, Callable[[Modes], Call]] = {
    facts.GEMM: _gemm,
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert": _decode,
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert": functools.partial(_decode, fp8=True),
    "fused_kimi_k3_mla_decode_q_concat_ds_mla_insert": functools.partial(_decode, ds_mla=True),
    "fused_kimi_k3_mla_key_concat_kv_cache_insert": lambda _: _key_concat(
        mla_prefill.fused_mla_key_concat_kv_cache_insert
    ),
    "fused_kimi_k3_mla_key_concat_ds_mla_insert": lambda _: _key_concat(
        mla_prefill.fused_mla_key_concat_ds_mla_insert
    ),
    "fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert": lambda _: _qkv_quant,
    "fused_kimi_k3_mla_kv_concat": lambda _: _kv_concat,
    "fused_kimi_k3_mla_kv_concat_quant_fp8": lambda _: _kv_concat_quant,
}


# --- Functions -----------------------------------------------------------------------------------


def function(dotted: str, target: Target, own: Call, modes: Modes) -> Call:
    """Return our function in place of one of vLLM's."""
    return _MAKERS[dotted](target, own, modes)


def _product(modes: Modes) -> Call:
    """Return (x, weight, residual) -> what the plans take, or an error with the reason.

    A weight of vLLM is of a class of its own, of which each look at an attribute would cost a
    microsecond or two; inside it is read as a plain tensor.
    """
    plain, invariant = torch._C.DisableTorchFunctionSubclass, modes.batch_invariant
    reasons: dict[Any, str] = {}

    def run(x: Any, weight: Any, residual: Any = None) -> Any:
        if not invariant and x.shape[0] > MAX_TOKENS:
            raise NotTakenError(f"more than {MAX_TOKENS} tokens")
        with plain():
            out = linear.try_low_latency_gemm(
                x, weight, residual, weight_is_static=True, batch_invariant=invariant
            )
            if out is not None:
                return out
            key = (x.shape, x.stride(), x.dtype, weight.shape, weight.dtype, residual is None)
            reason = reasons.get(key)
            if reason is None:
                if len(reasons) >= _MOST_REASONS:
                    reasons.clear()
                explain = linear.explain_low_latency_gemm
                reason = explain(x, weight, residual, batch_invariant=invariant).reason
                reasons[key] = reason
        raise NotTakenError(reason)

    return run


_MOST_REASONS = 4096


def _run_plan(target: Target, own: Call, modes: Modes) -> Call:
    product = _product(modes)

    def run(x: Any, _plan: Any, weight: Any) -> Any:
        return product(x, weight)

    def back(x: Any, plan: Any, weight: Any) -> Any:
        return own(plan, x, weight)

    serve = serving(target, run, back)

    def ours(plan: Any, x: Any, weight: Any) -> Any:
        return own(plan, x, weight) if is_compiling() else serve(x, plan, weight)

    return ours


def _apply_with_residual(target: Target, own: Call, modes: Modes) -> Call:
    product = _product(modes)

    def run(x: Any, residual: Any, _method: Any, layer: Any) -> Any:
        return product(x, layer.weight, residual)

    def back(x: Any, residual: Any, method: Any, layer: Any) -> Any:
        return own(method, layer, x, residual)

    serve = serving(target, run, back)

    def ours(self: Any, layer: Any, x: Any, residual: Any) -> Any:
        return own(self, layer, x, residual) if is_compiling() else serve(x, residual, self, layer)

    return ours


def _decode_concat_cache(target: Target, own: Call, modes: Modes) -> Call:
    ready = modes.kv_inputs_ready

    def run(ql_nope: Any, layer: Any, *args: Any) -> Any:
        if layer.kv_cache_dtype not in FP8_CACHES:
            raise NotTakenError("the cache is not fp8 of e4m3: the operators serve it")
        if layer.impl.supports_quant_query_input:
            raise NotTakenError("the backend takes an fp8 query: the operators serve it")
        q_pe, kv_c_normed, k_pe, positions, cos_sin_cache, slot_mapping = args
        return _DECODE(
            ql_nope,
            q_pe,
            kv_c_normed,
            k_pe,
            layer.kv_cache,
            slot_mapping,
            cache_scale_inv=layer._k_scale_inv,
            positions=positions,
            cos_sin_cache=cos_sin_cache,
            kv_inputs_ready=ready,
        )

    def back(ql_nope: Any, layer: Any, *args: Any) -> Any:
        return own(layer, ql_nope, *args)

    serve = serving(target, run, back)

    def ours(
        self: Any,
        ql_nope: Any,
        q_pe: Any,
        kv_c_normed: Any,
        k_pe: Any,
        positions: Any,
        cos_sin_cache: Any,
        slot_mapping: Any,
    ) -> Any:
        args = (q_pe, kv_c_normed, k_pe, positions, cos_sin_cache, slot_mapping)
        return own(self, ql_nope, *args) if is_compiling() else serve(ql_nope, self, *args)

    return ours


FP8_CACHES = ("fp8", "fp8_e4m3")
"""Names under which vLLM knows a cache of e4m3 with one scale."""


def _apply(target: Target, own: Call, modes: Modes, default: Any = None) -> Call:
    """Return the method of an unquantised layer.

    In code that ``torch.compile`` traces the operator takes the place of the product, where there
    are plans for the weight; which kernel runs is decided when it runs, and ``dispatch_report``
    counts it.

    Args:
        target: counts.
        own: vLLM's own.
        modes: those of the process.
        default: vLLM's own product, where the method holds one: another one was asked for.
    """
    bfloat16, device = torch.bfloat16, modes.key.lower()
    product, invariant = _product(modes), modes.batch_invariant
    compiled = torch.ops.k3cupy.low_latency_linear.default

    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
    def is_planned(n: int, k: int) -> bool:
        return planned(n, k, invariant)

    def run(x: Any, layer: Any, method: Any, bias: Any) -> Any:
        if bias is not None:
            raise NotTakenError("the layer adds a bias")
        if default is not None and method._gemm_impl is not default:
            raise NotTakenError("another backend was asked for: --linear-backend")
        return product(x, layer.weight)

    def back(x: Any, layer: Any, method: Any, bias: Any) -> Any:
        return own(method, layer, x, bias)

    serve = serving(target, run, back)

    def apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        if not is_compiling():
            return serve(x, layer, self, bias)
        weight = layer.weight
        if (
            bias is None
            and (default is None or self._gemm_impl is default)
            and x.device.type == device
            and x.dtype == weight.dtype == bfloat16
            and weight.dim() == 2
            and is_planned(weight.shape[0], weight.shape[1])
        ):
            return compiled(x, weight, None, True, invariant)
        return own(self, layer, x, bias)

    return apply


def planned(n: int, k: int, batch_invariant: bool) -> bool:
    """Return whether a kernel of ours runs for some number of tokens, on the current GPU."""
    try:
        gpu = devices.info(devices.ordinal_of(None))
    except ToolchainError:
        return False
    return any(
        not choose(ALL, n, k, count, gpu, batch_invariant=batch_invariant).is_fallback
        for count in TOKENS
    )


def _apply_linear(target: Target, own: Call, modes: Modes) -> Call:
    utils = sys.modules["vllm.model_executor.layers.utils"]
    return _apply(target, own, modes, utils.default_unquantized_gemm)


_MAKERS: dict[str, Callable[[Target, Call, Modes], Call]] = {
    facts.RUN_PLAN: _run_plan,
    facts.WITH_RESIDUAL: _apply_with_residual,
    facts.DECODE_CONCAT: _decode_concat_cache,
    facts.LINEAR: _apply_linear,
    facts.LM_HEAD: _apply,
}
