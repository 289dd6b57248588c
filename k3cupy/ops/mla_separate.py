"""The MLA query front in separate kernels: norms, q_b, the absorbed product, the decode epilogue.

It computes what the one launch does, with one rounding more: the absorbed query is 16-bit before
the epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from k3cupy.accept.mla import MlaProblem
from k3cupy.accept.mla_value import ABSORBED, HeadProblem, accept_absorbed
from k3cupy.call.arguments import Values
from k3cupy.call.choice import Choice
from k3cupy.call.operation import Given, Operation, operations
from k3cupy.call.separate import Separate
from k3cupy.choose.mla import choose
from k3cupy.constants import (
    KV_LORA_RANK,
    Q_LORA_RANK,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
)
from k3cupy.kernels import mla_value
from k3cupy.ops import linear
from k3cupy.ops.batch_invariance import is_batch_invariant
from k3cupy.ops.mla_decode import fused_mla_decode_q_concat_kv_cache_insert
from k3cupy.ops.mla_norm import fused_q_kv_rmsnorm
from k3cupy.reference.mla_value import mla_absorb_reference
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.tensors import TensorView, columns, packed_view

_K_PE = Q_LORA_RANK + KV_LORA_RANK, Q_LORA_RANK + KV_LORA_RANK + QK_ROPE_HEAD_DIM
"""Its columns of qkv_a."""

Product = Callable[[Any, Any], Any]
"""Of x and a weight."""

Part = tuple[Operation, Values, dict[str, Any]]
"""An operation, a call's tensors in the order of its arguments, and its options."""


def compute(problem: MlaProblem, pdl: bool, given: Mapping[str, Any], stream: Any) -> Any:
    """Compute a call by the public functions, whose results are new tensors.

    Args:
        problem: the call.
        pdl: for all that ask.
        given: its tensors and numbers by name, None for what was left out.
        stream: that of the call.
    """
    return in_steps(
        given,
        eps=problem.epsilon,
        ds_mla=problem.variant.cache == "ds_mla",
        weight_is_static=problem.variant.weight_is_static,
        stream=stream,
        pdl=pdl,
    )


def in_steps(
    given: Mapping[str, Any],
    *,
    eps: float,
    ds_mla: bool,
    weight_is_static: bool,
    q_b: Product | None = None,
    absorbed: Product | None = None,
    stream: Any = None,
    pdl: bool | None = None,
) -> Any:
    """Compute it by the public functions.

    Args:
        given: tensors and numbers of ``fused_mla_decode_query`` by name.
        eps: as for that function.
        ds_mla: the same.
        weight_is_static: the same, for all of them.
        q_b: the second projection; None for low-latency linear.
        absorbed: the product with W_UK, [B, H, 128] to [B, H, 512]; None for ours.
        stream: for all of them.
        pdl: for all that ask.
    """
    static: dict[str, Any] = {"weight_is_static": weight_is_static}
    how: dict[str, Any] = {"stream": stream, "pdl": pdl}
    qkv_a, w_q_b, w_uk = (given[name] for name in ("qkv_a", "w_q_b", "w_uk"))
    q_weight, kv_weight = given["q_norm_weight"], given["kv_norm_weight"]
    q_a, kv_c_normed = fused_q_kv_rmsnorm(qkv_a, q_weight, kv_weight, eps=eps, **static, **how)
    if q_b is None:
        q = linear.low_latency_linear(q_a, w_q_b, **static, stream=stream)
    else:
        q = q_b(q_a, w_q_b)
    q = q.reshape(qkv_a.shape[0], w_uk.shape[0], QK_HEAD_DIM)
    q_nope = q[..., :QK_NOPE_HEAD_DIM]
    if absorbed is None:
        ql_nope = absorbed_query(q_nope, w_uk, **static, **how)
    else:
        ql_nope = absorbed(q_nope, w_uk)
    rest: dict[str, Any] = {name: given.get(name) for name in _OF_EPILOGUE}
    return fused_mla_decode_q_concat_kv_cache_insert(
        ql_nope,
        q[..., QK_NOPE_HEAD_DIM:],
        kv_c_normed,
        qkv_a[:, slice(*_K_PE)],
        ds_mla=ds_mla,
        **rest,
        **how,
    )


_OF_EPILOGUE = (
    *("kv_cache", "slot_mapping", "q_scale_inv", "cache_scale_inv"),
    *("positions", "cos_sin_cache", "out"),
)


def told(problem: MlaProblem, pdl: bool, gpu: DeviceInfo) -> str:
    """Say which kernels these are for a call on a GPU."""
    norm, absorbed, epilogue = (
        operation.choice(operation.accept(values, options), options, gpu).what
        for operation, values, options in _parts(problem, pdl)
    )
    second = linear.explain_low_latency_gemm(*_q_b(problem), gpu=gpu)
    q_b = "the framework's linear" if second.is_fallback else second.what
    parts = {"norms": norm, "q_b": q_b, "absorbed query": absorbed, "epilogue": epilogue}
    return "; ".join(f"{name} by {what}" for name, what in parts.items())


def _load(problem: MlaProblem, pdl: bool, stream: Any) -> None:
    static = problem.variant.weight_is_static
    for operation, values, options in _parts(problem, pdl):
        part = operation.accept(values, options)
        operation.plan_of(part, operation.choice(part, options), stream)
    linear.make_route((*_q_b(problem), None, None), is_batch_invariant(), static, stream, None)


SEPARATE = Separate(_load, compute)


def _q_b(problem: MlaProblem) -> tuple[TensorView, TensorView]:
    """Return what the second projection multiplies, as it will lie."""
    first = problem.first
    q_a = packed_view(first, (problem.num_tokens, Q_LORA_RANK), first.dtype)
    return q_a, problem.views["w_q_b"]


def _parts(problem: MlaProblem, pdl: bool) -> tuple[Part, Part, Part]:
    """Return the other parts, of tensors as they will lie."""
    views, first, num_tokens = problem.views, problem.first, problem.num_tokens
    static: dict[str, Any] = {"weight_is_static": problem.variant.weight_is_static}
    how: dict[str, Any] = {"pdl": pdl, "config": None}
    shape = num_tokens, problem.num_heads
    q = packed_view(first, (*shape, QK_HEAD_DIM), first.dtype)
    weights = views["q_norm_weight"], views["kv_norm_weight"]
    cast = {
        "q_scale_inv": problem.variant.query_fp8,
        "cache_scale_inv": problem.variant.cache == "fp8",
    }
    numbers = {name: 1.0 for name, is_used in cast.items() if is_used}
    of_epilogue = {
        "ql_nope": packed_view(first, (*shape, KV_LORA_RANK), first.dtype),
        "q_pe": columns(q, QK_NOPE_HEAD_DIM, QK_HEAD_DIM),
        "kv_c_normed": packed_view(first, (num_tokens, KV_LORA_RANK), first.dtype),
        "k_pe": columns(first, *_K_PE),
        **numbers,
        **{name: views[name] for name in _OF_EPILOGUE if name in views},
    }
    epilogue = operations[fused_mla_decode_q_concat_kv_cache_insert]
    return (
        (
            operations[fused_q_kv_rmsnorm],
            (first, *weights, None, None),
            {"eps": problem.epsilon, **static, **how},
        ),
        (
            _ABSORBED,
            (columns(q, 0, QK_NOPE_HEAD_DIM), views["w_uk"], None),
            {**static, **how},
        ),
        (
            epilogue,
            tuple(of_epilogue.get(name) for name in epilogue.arguments.names),
            {"ds_mla": problem.variant.cache == "ds_mla", "kv_inputs_ready": False, **how},
        ),
    )


# --- The absorbed query: the kernel of the value, of other widths --------------------------------


def absorbed_query(
    q_nope: Any,
    w_uk: Any,
    *,
    out: Any = None,
    weight_is_static: bool = False,
    stream: Any = None,
    pdl: bool | None = None,
    config: mla_value.MlaValueConfig | None = None,
) -> Any:
    """Return ``q_nope[b, h] @ w_uk[h]``, [B, H, 512]; checks no more than the query front needs.

    Args:
        q_nope: [B, H, 128], bfloat16 or float16. Inner stride 1.
        w_uk: [H, 128, 512], same type. Inner stride 1.
        out: [B, H, 512], contiguous, to be written instead of a new tensor of q_nope's framework.
        weight_is_static: the promise of the query front.
        stream: that of its call.
        pdl: programmatic dependent launch.
        config: how a head is shared out; None takes the measured one.
    """
    return _ABSORBED((q_nope, w_uk, out), (weight_is_static, pdl, config), stream)


def _accept(values: Values, given: Given) -> HeadProblem:
    return accept_absorbed(values, weight_is_static=given["weight_is_static"])


def _choose(problem: HeadProblem, gpu: DeviceInfo, given: Given) -> Choice:
    tokens, heads = problem.num_tokens, problem.num_heads
    return choose(mla_value.KERNEL, problem.variant, tokens, heads, gpu, given["config"])


_ABSORBED = Operation(
    function=absorbed_query,
    kernel=mla_value,
    arguments=ABSORBED,
    options=("weight_is_static", "pdl", "config"),
    accept=_accept,
    choose=_choose,
    reference=lambda _, arrays: mla_absorb_reference(**arrays),
    check=lambda _: None,
)
