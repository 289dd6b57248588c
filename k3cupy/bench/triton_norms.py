"""The two RMSNorms behind the first projection as a Triton kernel, to compare with; needs Triton.

A program normalises one part of one row, as vLLM's kernel of that name does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import triton
import triton.language as tl

from k3cupy.timing.mla_steps import EPSILON, NormStep

_WARPS = (1, 2, 4, 8)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, gains, out, epsilon, width: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr
):
    column = tl.arange(0, block)
    inside = column < width
    gain = tl.load(gains + column, mask=inside, other=0.0).to(tl.float32)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + epsilon)
    tl.store(out + column, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norms(  # type: ignore[no-untyped-def]
    x,
    row_stride,
    q_gains,
    kv_gains,
    q,
    kv,
    epsilon,
    q_width: tl.constexpr,
    kv_width: tl.constexpr,
    q_block: tl.constexpr,
    kv_block: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = x + row * row_stride
    if tl.program_id(1) == 0:
        _norm(source, q_gains, q + row * q_width, epsilon, q_width, q_block, pdl)
    else:
        target = kv + row * kv_width
        _norm(source + q_width, kv_gains, target, epsilon, kv_width, kv_block, pdl)


def calls(step: NormStep) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and calls: with several numbers of warps, and with dependent launch and without.

    Triton launches without it unless it is asked to; older versions cannot.
    """
    q, kv = step.outs
    x, q_gains, kv_gains = (step.inputs[name] for name in ("qkv_a", "q_weight", "kv_weight"))
    widths = q.shape[1], kv.shape[1]
    blocks = (triton.next_power_of_2(width) for width in widths)
    arguments = (x, x.stride(0), q_gains, kv_gains, q, kv, EPSILON, *widths, *blocks)

    def call(warps: int, pdl: bool) -> Callable[[], Any]:
        options: dict[str, Any] = {"num_warps": warps, **({"launch_pdl": True} if pdl else {})}
        return lambda: _norms[(len(q), 2)](*arguments, pdl, **options)

    for pdl in (False, True):
        for warps in _WARPS:
            yield f"{warps} warps{', PDL' if pdl else ''}", call(warps, pdl)
