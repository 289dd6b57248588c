"""Windows of a layer of Kimi-K3: its kernels in order, with the strides that they have there.

A window has a column for each kind of kernels. What differs between columns is what computes the
products and the epilogue; what stands between them is the same.

| window | the kernels, in order |
| --- | --- |
| mla-front | qkv_a, both RMSNorms in one kernel, q_b, bmm with W_UK, decode epilogue |
| kda-front | in_proj, f_b on its slice |
| mla-back | bmm with W_UV, the output gate, o_proj |
| moe-front | RMSNorm, router gate and routed_expert_down in one, gate_up, SiTU, shared_down |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

import k3cupy
from k3cupy.bench import public
from k3cupy.choose.gemm import FUSED_A, SKINNY
from k3cupy.constants import (
    KV_LORA_RANK,
    LATENT_DIM,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    V_HEAD_DIM,
)
from k3cupy.runtime.instances import instantiation
from k3cupy.timing.cold import Body
from k3cupy.timing.decode_step import BLOCK_SIZE
from k3cupy.tuning.entries import LINEAR, Candidate

CUBLAS, STRUCTURE, PLAN, OURS = "cublas", "public", "plan", "ours"
COLUMNS = (CUBLAS, STRUCTURE, PLAN, OURS)
"""Who computes the products: the framework; the public fused-A structure, up to 16 tokens, beyond
them the framework; what vLLM's table for an H200 names; ours, as the table chooses."""

_HIDDEN, _HEADS, _Q_LORA_RANK, _QKV_A = 7168, 12, 1536, 2112
_KDA_IN, _F_A, _F_B = 6288, slice(6144, 6272), 1536
_GATE_AND_DOWN, _SHARED = 4480, 768
"""Widths of a GPU at tensor parallelism 8."""

_BETWEEN = "between_products.cu"
_EPSILON = 1e-6
_CHUNK, _THREADS = 8, 256
_CACHE_BLOCKS = 64
_TOLERANCE = 1e-2
"""Of a row, relative: bf16 is rounded to several times on the way, 1.7e-3 each time."""

Weights = Mapping[str, torch.Tensor]
"""By name, those of one layer; layers take turns."""


class Step(NamedTuple):
    """One kernel of a window.

    Attributes:
        name: what the model calls it.
        run: the call; it takes the weights of a layer.
        out: what it writes.
        ran: the kernel with its configuration, where columns differ.
    """

    name: str
    run: Callable[[Weights], Any]
    out: torch.Tensor
    ran: str = ""


@dataclass(frozen=True)
class Window:
    """The kernels of a layer in order.

    Attributes:
        shapes: of the weights, in the order in which they are read; a row of the first dimensions
            is what a product sums over, but for weights of heads, where a column is.
        steps: column -> the kernels.
        outputs: what the window leaves, by name; the last kernel's output last.
        expected: weights -> the same in float64, without a rounding on the way; NaN is what must
            stay as it was.
    """

    shapes: Mapping[str, tuple[int, ...]]
    steps: Callable[[str], list[Step]]
    outputs: Mapping[str, torch.Tensor]
    expected: Callable[[Weights], Mapping[str, torch.Tensor]]

    def check(self, steps: Sequence[Step], weights: Weights) -> str | None:
        """Run the steps into poisoned memory and say what is wrong with what is left, or None."""
        for out in (*(step.out for step in steps), *self.outputs.values()):
            out.fill_(float("nan"))
        for step in steps:
            step.run(weights)
        expected = self.expected(weights)
        for name, found in self.outputs.items():
            got, want = found.double(), expected[name]
            if not torch.equal(got.isnan(), want.isnan()):
                return f"{name} is not written where it should be, and only there"
            off = (got - want).nan_to_num().norm(dim=-1) / want.nan_to_num().norm(dim=-1)
            worst = float(off.nan_to_num().max())
            if not worst <= _TOLERANCE:
                return f"a row of {name} is off by {worst:.1%}"
        return None


# --- What computes a product ---------------------------------------------------------------------


def _ours(candidate: Candidate, x: torch.Tensor, out: torch.Tensor) -> Body:
    """Return the call of what our table chooses; the weight is static, as in a linear layer."""
    run: Any = {FUSED_A: k3cupy.fused_a_gemm, SKINNY: k3cupy.skinny_gemm}[candidate.kernel]
    options: dict[str, Any] = {"config": candidate.config, "weight_is_static": True}
    return lambda weight: run(x, weight, out=out, **options)


def product(name: str, column: str, x: torch.Tensor, out: torch.Tensor) -> Step:
    """Return the step of a product, weight by ``name``, by what a column has for it."""
    tokens, k = x.shape
    n = out.shape[1]
    chosen = LINEAR
    if column == STRUCTURE and public.has_fused_a(n, k, tokens):
        chosen = public.FUSED_A
    elif column == PLAN:
        chosen = public.planned(n, k, tokens, packed=x.is_contiguous())
    elif column == OURS:
        weight = torch.empty(n, k, device=x.device, dtype=x.dtype)
        found = k3cupy.explain_low_latency_gemm(x, weight)
        chosen = Candidate(found.kernel, found.config)
    if column == OURS and chosen != LINEAR:
        body = _ours(chosen, x, out)
    else:
        body = public.call(chosen, x, n, out)
    return Step(f"{name} {n}x{k}", lambda weights: body(weights[name]), out, str(chosen))


def _epilogue(
    column: str, inputs: Mapping[str, torch.Tensor], out: torch.Tensor, cache: torch.Tensor
) -> Step:
    """Return the decode epilogue: ours, or the public structure."""
    if column == OURS:
        call = k3cupy.fused_mla_decode_q_concat_kv_cache_insert
        arguments: dict[str, Any] = {**inputs, "kv_cache": cache, "out": out}
        found = k3cupy.explain_mla_decode(**arguments)
        ran = str(Candidate(found.kernel, found.config))
        return Step("epilogue", lambda _: call(**arguments), out, ran)
    run = public.decode_epilogue(inputs, out, cache)
    return Step("epilogue", lambda _: run(), out, "public structure")


# --- What stands between products ----------------------------------------------------------------


def _norms(
    x: torch.Tensor, gains: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None
) -> Step:
    """Return RMSNorm of the first columns of x, and of the columns behind them where asked for."""
    widths = first.shape[1], 0 if second is None else second.shape[1]
    grid = len(x) * (1 if second is None else 2)
    run = public.queue(_BETWEEN, instantiation("rms_norms", *widths), grid)
    arguments = [
        *(x.data_ptr(), x.stride(0), gains.data_ptr(), first.data_ptr()),
        *(0 if second is None else second.data_ptr(), np.float32(_EPSILON)),
    ]
    name = "norm" if second is None else "norms"
    return Step(name, lambda _: run(arguments), first)


def _elementwise(name: str, kernel: str, arguments: Sequence[Any], out: torch.Tensor) -> Step:
    """Return a kernel that gives each thread one chunk of its output."""
    run = public.queue(_BETWEEN, kernel, -(-out.numel() // (_CHUNK * _THREADS)))
    return Step(name, lambda _: run(arguments), out)


# --- The windows ---------------------------------------------------------------------------------


def mla_front(tokens: int, device: str = "cuda") -> Window:
    """Return the way from the hidden states to the absorbed query and the cache row, bf16."""
    random, empty = _makers(device)
    x, gains = random(tokens, _HIDDEN), random(_Q_LORA_RANK + KV_LORA_RANK)
    qkv_a, q_a = empty(tokens, _QKV_A), empty(tokens, _Q_LORA_RANK)
    kv_c = empty(tokens, KV_LORA_RANK)
    q, absorbed = empty(tokens, _HEADS, QK_HEAD_DIM), empty(_HEADS, tokens, KV_LORA_RANK)
    mqa_q = empty(tokens, _HEADS, LATENT_DIM)
    blocks = max(_CACHE_BLOCKS, -(-tokens // BLOCK_SIZE))
    cache = empty(blocks, BLOCK_SIZE, LATENT_DIM)
    q_nope = q[..., :QK_NOPE_HEAD_DIM].transpose(0, 1)
    inputs = {
        "ql_nope": absorbed.transpose(0, 1),
        "q_pe": q[..., QK_NOPE_HEAD_DIM:],
        "kv_c_normed": kv_c,
        "k_pe": qkv_a[:, -QK_ROPE_HEAD_DIM:],
        "slot_mapping": torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens],
    }

    def steps(column: str) -> list[Step]:
        return [
            product("qkv_a", column, x, qkv_a),
            _norms(qkv_a, gains, q_a, kv_c),
            product("q_b", column, q_a, q.flatten(1)),
            Step("bmm W_UK", lambda w: torch.bmm(q_nope, w["w_uk"], out=absorbed), absorbed),
            _epilogue(column, inputs, mqa_q, cache),
        ]

    def expected(weights: Weights) -> dict[str, torch.Tensor]:
        a = x.double() @ weights["qkv_a"].double().T
        q_part, kv_part, k_pe = a.split([_Q_LORA_RANK, KV_LORA_RANK, QK_ROPE_HEAD_DIM], 1)
        of_q, of_kv = gains.double().split([_Q_LORA_RANK, KV_LORA_RANK])
        b = (_rms_norm(q_part, of_q) @ weights["q_b"].double().T).view(q.shape)
        nope, rope = b.split([QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM], -1)
        query = torch.einsum("bhd,hdr->bhr", nope, weights["w_uk"].double())
        rows = torch.full_like(cache, float("nan"), dtype=torch.float64)
        row = torch.cat([_rms_norm(kv_part, of_kv), k_pe], -1)
        rows.view(-1, LATENT_DIM)[inputs["slot_mapping"]] = row
        return {"mqa_q": torch.cat([query, rope], -1), "cache": rows}

    return Window(
        shapes={
            "qkv_a": (_QKV_A, _HIDDEN),
            "q_b": (_HEADS * QK_HEAD_DIM, _Q_LORA_RANK),
            "w_uk": (_HEADS, QK_NOPE_HEAD_DIM, KV_LORA_RANK),
        },
        steps=steps,
        outputs={"cache": cache, "mqa_q": mqa_q},
        expected=expected,
    )


def kda_front(tokens: int, device: str = "cuda") -> Window:
    """Return the input projection of linear attention, and f_b on its slice of that."""
    random, empty = _makers(device)
    x, projected, decay = random(tokens, _HIDDEN), empty(tokens, _KDA_IN), empty(tokens, _F_B)

    def steps(column: str) -> list[Step]:
        return [
            product("in_proj", column, x, projected),
            product("f_b", column, projected[:, _F_A], decay),
        ]

    def expected(weights: Weights) -> dict[str, torch.Tensor]:
        wide = x.double() @ weights["in_proj"].double().T
        return {"in_proj": wide, "f_b": wide[:, _F_A] @ weights["f_b"].double().T}

    return Window(
        shapes={"in_proj": (_KDA_IN, _HIDDEN), "f_b": (_F_B, _F_A.stop - _F_A.start)},
        steps=steps,
        outputs={"in_proj": projected, "f_b": decay},
        expected=expected,
    )


def mla_back(tokens: int, device: str = "cuda") -> Window:
    """Return the way from what attention leaves, over the output gate, to the hidden states."""
    random, empty = _makers(device)
    width = _HEADS * V_HEAD_DIM
    latent = random(tokens, _HEADS, KV_LORA_RANK)
    gate = random(tokens, _QKV_A + width)[:, _QKV_A:]  # qkv_a and the gate are one product
    value, gated = empty(_HEADS, tokens, V_HEAD_DIM), empty(tokens, width)
    out = empty(tokens, _HIDDEN)
    of_heads = latent.transpose(0, 1)

    def steps(column: str) -> list[Step]:
        sizes = np.int32(tokens), np.int32(_HEADS)
        of_gate = gate.data_ptr(), gate.stride(0)
        arguments = [value.data_ptr(), *of_gate, gated.data_ptr(), *sizes]
        kernel = instantiation("gate_heads", V_HEAD_DIM)
        return [
            Step("bmm W_UV", lambda w: torch.bmm(of_heads, w["w_uv"], out=value), value),
            _elementwise("gate", kernel, arguments, gated),
            product("o_proj", column, gated, out),
        ]

    def expected(weights: Weights) -> dict[str, torch.Tensor]:
        heads = torch.einsum("bhr,hrd->bhd", latent.double(), weights["w_uv"].double())
        through = heads.flatten(1) * gate.double().sigmoid()
        return {"o_proj": through @ weights["o_proj"].double().T}

    return Window(
        shapes={"w_uv": (_HEADS, KV_LORA_RANK, V_HEAD_DIM), "o_proj": (_HIDDEN, width)},
        steps=steps,
        outputs={"o_proj": out},
        expected=expected,
    )


def moe_front(tokens: int, device: str = "cuda") -> Window:
    """Return what stands before the routed experts, and the shared expert, in one stream.

    Its output is added to that of the routed experts by a later product, so there is no residual
    here.
    """
    random, empty = _makers(device)
    x, gains, normed = random(tokens, _HIDDEN), random(_HIDDEN), empty(tokens, _HIDDEN)
    routed, gate_up = empty(tokens, _GATE_AND_DOWN), empty(tokens, 2 * _SHARED)
    act, out = empty(tokens, _SHARED), empty(tokens, _HIDDEN)

    def steps(column: str) -> list[Step]:
        sizes = np.int32(tokens), np.int32(_SHARED)
        arguments = [gate_up.data_ptr(), act.data_ptr(), *sizes]
        return [
            _norms(x, gains, normed),
            product("gate_and_down", column, normed, routed),
            product("gate_up", column, normed, gate_up),
            _elementwise("SiTU", "k3cupy::situ_and_multiply", arguments, act),
            product("shared_down", column, act, out),
        ]

    def expected(weights: Weights) -> dict[str, torch.Tensor]:
        rows = _rms_norm(x.double(), gains.double())
        gate, up = (rows @ weights["gate_up"].double().T).chunk(2, 1)
        shared = gate.tanh() * gate.sigmoid() * up
        return {
            "gate_and_down": rows @ weights["gate_and_down"].double().T,
            "shared_down": shared @ weights["shared_down"].double().T,
        }

    return Window(
        shapes={
            "gate_and_down": (_GATE_AND_DOWN, _HIDDEN),
            "gate_up": (2 * _SHARED, _HIDDEN),
            "shared_down": (_HIDDEN, _SHARED),
        },
        steps=steps,
        outputs={"gate_and_down": routed, "shared_down": out},
        expected=expected,
    )


WINDOWS = {
    "mla-front": mla_front,
    "kda-front": kda_front,
    "mla-back": mla_back,
    "moe-front": moe_front,
}


def _makers(device: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Return what makes random and uninitialised tensors in bf16."""
    where: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    return functools.partial(torch.randn, **where), functools.partial(torch.empty, **where)


def _rms_norm(x: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + _EPSILON).rsqrt() * gains
