"""Windows of a layer of Kimi-K3: its kernels in order, with the strides that they have there.

A window has a column for each kind of kernels. What differs between columns is what computes the
products and the epilogue, and in ours the RMSNorms behind qkv_a and the product with W_UK; what
else stands between them is the same. Around attention one more column has ours in fewer launches.

| window | the kernels, in order |
| --- | --- |
| mla-front | qkv_a, both RMSNorms in one kernel, q_b, the product with W_UK, decode epilogue |
| kda-front | in_proj, f_b on its slice |
| mla-back | the product with W_UV, the output gate, o_proj |
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
    Q_LORA_RANK,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    V_HEAD_DIM,
)
from k3cupy.ops.mla_separate import absorbed_query
from k3cupy.runtime.instances import instantiation
from k3cupy.timing.cold import Body
from k3cupy.timing.decode_step import BLOCK_SIZE
from k3cupy.timing.mla_steps import EPSILON, QKV_A_WIDTH, query_front, rms_norm
from k3cupy.tuning.entries import LINEAR, Candidate

CUBLAS, STRUCTURE, PLAN, OURS, FEWER = "cublas", "public", "plan", "ours", "fewer"
COLUMNS = (CUBLAS, STRUCTURE, PLAN, OURS)
"""Who computes the products: the framework; the public fused-A structure, up to 16 tokens, beyond
them the framework; what vLLM's table for an H200 names; ours, as the table chooses."""

WITH_FEWER = (*COLUMNS, FEWER)
"""And ours, the query front and the value in one launch each."""

_HIDDEN, _HEADS = 7168, 12
_KDA_IN, _F_A, _F_B = 6288, slice(6144, 6272), 1536
_GATE_AND_DOWN, _SHARED = 4480, 768
"""Widths of a GPU at tensor parallelism 8."""

_BETWEEN = "between_products.cu"
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
        shapes: of the weights, in the order in which they are read; the second dimension is about
            as long as what a product sums over.
        steps: (column, what computes ``tried`` in the place of the table's choice) -> the kernels.
        outputs: what the window leaves, by name; the last kernel's output last.
        expected: weights -> the same in float64, without a rounding on the way; NaN is what must
            stay as it was.
        columns: those that it has.
        tried: a product of the column of fewer launches for which several candidates are measured
            in the window, as what follows it there is not what follows it elsewhere; "" for none.
    """

    shapes: Mapping[str, tuple[int, ...]]
    steps: Callable[[str, Candidate | None], list[Step]]
    outputs: Mapping[str, torch.Tensor]
    expected: Callable[[Weights], Mapping[str, torch.Tensor]]
    columns: tuple[str, ...] = COLUMNS
    tried: str = ""

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
    """Return the call of a kernel of ours; the weight is static, as in a linear layer."""
    run: Any = {FUSED_A: k3cupy.fused_a_gemm, SKINNY: k3cupy.skinny_gemm}[candidate.kernel]
    options: dict[str, Any] = {"config": candidate.config, "weight_is_static": True}
    return lambda weight: run(x, weight, out=out, **options)


def product(
    name: str, column: str, x: torch.Tensor, out: torch.Tensor, candidate: Candidate | None = None
) -> Step:
    """Return the step of a product, weight by ``name``, by what a column has for it.

    A ``candidate`` stands in the place of what our table chooses.
    """
    tokens, k = x.shape
    n = out.shape[1]
    chosen, is_ours = LINEAR, column in (OURS, FEWER)
    if column == STRUCTURE and public.has_fused_a(n, k, tokens):
        chosen = public.FUSED_A
    elif column == PLAN:
        chosen = public.planned(n, k, tokens, packed=x.is_contiguous())
    elif candidate is not None:
        chosen = candidate
    elif is_ours:
        weight = torch.empty(n, k, device=x.device, dtype=x.dtype)
        found = k3cupy.explain_low_latency_gemm(x, weight)
        chosen = Candidate(found.kernel, found.config)
    runs_ours = is_ours and chosen != LINEAR
    body = _ours(chosen, x, out) if runs_ours else public.call(chosen, x, n, out)
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
        *(0 if second is None else second.data_ptr(), np.float32(EPSILON)),
    ]
    name = "norm" if second is None else "norms"
    return Step(name, lambda _: run(arguments), first)


def _elementwise(name: str, kernel: str, arguments: Sequence[Any], out: torch.Tensor) -> Step:
    """Return a kernel that gives each thread one chunk of its output."""
    run = public.queue(_BETWEEN, kernel, -(-out.numel() // (_CHUNK * _THREADS)))
    return Step(name, lambda _: run(arguments), out)


# --- Ours around attention -----------------------------------------------------------------------


def _our_norms(
    qkv_a: torch.Tensor, gains: torch.Tensor, q_a: torch.Tensor, kv_c: torch.Tensor
) -> Step:
    """Return both RMSNorms by our kernel."""
    arguments = qkv_a, *gains.split([Q_LORA_RANK, KV_LORA_RANK])
    options: dict[str, Any] = {"eps": EPSILON, "out": (q_a, kv_c), "weight_is_static": True}
    found = k3cupy.explain_q_kv_rmsnorm(*arguments, **options)
    run = functools.partial(k3cupy.fused_q_kv_rmsnorm, *arguments, **options)
    return Step("norms", lambda _: run(), q_a, str(Candidate(found.kernel, found.config)))


def _query(
    qkv_a: torch.Tensor,
    gains: torch.Tensor,
    slots: torch.Tensor,
    mqa_q: torch.Tensor,
    cache: torch.Tensor,
) -> Step:
    """Return the query front: one launch, or what is chosen where that cannot be."""
    q_gains, kv_gains = gains.split([Q_LORA_RANK, KV_LORA_RANK])
    options: dict[str, Any] = {"eps": EPSILON, "out": mqa_q, "weight_is_static": True}
    options |= {"kv_cache": cache, "slot_mapping": slots}
    first, heads = (qkv_a, q_gains, kv_gains), mqa_q.shape[1]
    weights = (
        qkv_a.new_empty(heads * QK_HEAD_DIM, Q_LORA_RANK),
        qkv_a.new_empty(heads, QK_NOPE_HEAD_DIM, KV_LORA_RANK),
    )
    found = k3cupy.explain_mla_decode_query(*first, *weights, **options)
    run = functools.partial(k3cupy.fused_mla_decode_query, *first, **options)
    ran = str(Candidate(found.kernel, found.config))
    return Step("query", lambda w: run(w_q_b=w["q_b"], w_uk=w["w_uk"]), mqa_q, ran)


def _value(latent: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> Step:
    """Return the value and its gate in one launch."""
    heads = latent.shape[1]
    options: dict[str, Any] = {"out": out, "weight_is_static": True}
    weight = latent.new_empty(heads, V_HEAD_DIM, KV_LORA_RANK).mT
    found = k3cupy.explain_mla_decode_value(latent, weight, gate, **options)
    call, ran = k3cupy.fused_mla_decode_value, str(Candidate(found.kernel, found.config))
    return Step("value", lambda w: call(latent, w["w_uv"].mT, gate, **options), out, ran)


# --- The windows ---------------------------------------------------------------------------------


def mla_front(tokens: int, device: str = "cuda") -> Window:
    """Return the way from the hidden states to the absorbed query and the cache row, bf16."""
    random, empty = _makers(device)
    x, gains = random(tokens, _HIDDEN), random(Q_LORA_RANK + KV_LORA_RANK)
    qkv_a, q_a = empty(tokens, QKV_A_WIDTH), empty(tokens, Q_LORA_RANK)
    kv_c = empty(tokens, KV_LORA_RANK)
    q, absorbed = empty(tokens, _HEADS, QK_HEAD_DIM), empty(_HEADS, tokens, KV_LORA_RANK)
    of_ours = empty(tokens, _HEADS, KV_LORA_RANK)
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

    def steps(column: str, first: Candidate | None = None) -> list[Step]:
        qkv = product("qkv_a", column, x, qkv_a, first)
        if column == FEWER:
            return [qkv, _query(qkv_a, gains, inputs["slot_mapping"], mqa_q, cache)]
        q_b = product("q_b", column, q_a, q.flatten(1))
        if column != OURS:
            return [
                qkv,
                _norms(qkv_a, gains, q_a, kv_c),
                q_b,
                Step("W_UK", lambda w: torch.bmm(q_nope, w["w_uk"], out=absorbed), absorbed),
                _epilogue(column, inputs, mqa_q, cache),
            ]
        nope, options = q_nope.transpose(0, 1), {"out": of_ours, "weight_is_static": True}
        return [
            qkv,
            _our_norms(qkv_a, gains, q_a, kv_c),
            q_b,
            Step("W_UK", lambda w: absorbed_query(nope, w["w_uk"], **options), of_ours),
            _epilogue(column, {**inputs, "ql_nope": of_ours}, mqa_q, cache),
        ]

    def expected(weights: Weights) -> dict[str, torch.Tensor]:
        a = x.double() @ weights["qkv_a"].double().T
        query, row = query_front(a, gains, weights["q_b"], weights["w_uk"])
        rows = torch.full_like(cache, float("nan"), dtype=torch.float64)
        rows.view(-1, LATENT_DIM)[inputs["slot_mapping"]] = row
        return {"mqa_q": query, "cache": rows}

    return Window(
        shapes={
            "qkv_a": (QKV_A_WIDTH, _HIDDEN),
            "q_b": (_HEADS * QK_HEAD_DIM, Q_LORA_RANK),
            "w_uk": (_HEADS, QK_NOPE_HEAD_DIM, KV_LORA_RANK),
        },
        steps=steps,
        outputs={"cache": cache, "mqa_q": mqa_q},
        expected=expected,
        columns=WITH_FEWER,
        tried="qkv_a",
    )


def kda_front(tokens: int, device: str = "cuda") -> Window:
    """Return the input projection of linear attention, and f_b on its slice of that."""
    random, empty = _makers(device)
    x, projected, decay = random(tokens, _HIDDEN), empty(tokens, _KDA_IN), empty(tokens, _F_B)

    def steps(column: str, _: Candidate | None = None) -> list[Step]:
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
    both = random(tokens, QKV_A_WIDTH + width)  # qkv_a and the gate are one product
    gate = both[:, QKV_A_WIDTH:]
    value, gated = empty(_HEADS, tokens, V_HEAD_DIM), empty(tokens, width)
    out = empty(tokens, _HIDDEN)
    of_heads = latent.transpose(0, 1)

    def steps(column: str, _: Candidate | None = None) -> list[Step]:
        sizes = np.int32(tokens), np.int32(_HEADS)
        of_gate = gate.data_ptr(), gate.stride(0)
        arguments = [value.data_ptr(), *of_gate, gated.data_ptr(), *sizes]
        kernel = instantiation("gate_heads", V_HEAD_DIM)
        o_proj = product("o_proj", column, gated, out)
        if column == FEWER:
            return [_value(latent, gate, gated), o_proj]
        return [
            Step("W_UV", lambda w: torch.bmm(of_heads, w["w_uv"].mT, out=value), value),
            _elementwise("gate", kernel, arguments, gated),
            o_proj,
        ]

    def expected(weights: Weights) -> dict[str, torch.Tensor]:
        heads = torch.einsum("bhr,hdr->bhd", latent.double(), weights["w_uv"].double())
        through = heads.flatten(1) * gate.double().sigmoid()
        return {"o_proj": through @ weights["o_proj"].double().T}

    return Window(
        shapes={"w_uv": (_HEADS, V_HEAD_DIM, KV_LORA_RANK), "o_proj": (_HIDDEN, width)},
        steps=steps,
        outputs={"o_proj": out},
        expected=expected,
        columns=WITH_FEWER,
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

    def steps(column: str, _: Candidate | None = None) -> list[Step]:
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
        rows = rms_norm(x.double(), gains.double())
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
