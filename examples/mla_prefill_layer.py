"""The same MLA layer in prefill, twice: around the fused epilogues, and in plain PyTorch.

In prefill many tokens of a prompt arrive at once, and the layer works with real keys and values for
every head instead of the absorbed form of decode. A long prompt comes in chunks: a chunk's tokens
attend to one another, and to the context, which is what earlier chunks left in the cache.

    hidden --qkv_a--> [ q_a | kv_c | k_pe ] --norms, q_b, kv_b--> q, [ k_nope | v ], kv_c, k_pe
           --EPILOGUE 1--> keys, the query turned or cast, and one new row a token in the cache
           --attention among the chunk's tokens--------------------+
    cache  --gather--> kv_c, k_pe --kv_b--> [ k_nope | v ]         +--merge--> output
           --EPILOGUE 2--> keys (and values) of the context        |
           --attention over the context----------------------------+

Epilogue 1 is one of three operations, for the three formats of the cache; epilogue 2 is one of two.
Shapes: T tokens of all prompts side by side, H heads, S rows of one prompt's context.

`mla_layer.py` has the weights, the cache and decode; `mla_prefill_decode.py` runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from mla_layer import (
    FP8,
    KV_LORA_RANK,
    NOPE_DIM,
    NORM_EPS,
    NUM_HEADS,
    Q_LORA_RANK,
    ROPE_DIM,
    SOFTMAX_SCALE,
    VALUE_DIM,
    CacheFormat,
    PagedCache,
    Weights,
    rotate,
    to_fp8,
)
from torch import Tensor

import k3cupy

INSERT_OPERATIONS = {
    "bf16": "fused_mla_key_concat_kv_cache_insert",
    "fp8": "fused_mla_qkv_quant_kv_cache_fp8_insert",
    "fp8_ds_mla": "fused_mla_key_concat_ds_mla_insert",
}
CONTEXT_ROWS = 64  # rows of the context that are read back at a time: the size of a workspace

# Values about N(0, 1): these scales use the fp8 range up to 5.6 sigma.
KEY_SCALE, VALUE_SCALE = 1 / 80, 1 / 80

Arguments = dict[str, Any]
Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Span:
    """The tokens of one prompt in a chunk: `count` of them, the first at position `start`."""

    sequence: int
    start: int
    count: int


@dataclass(frozen=True)
class Chunk:
    """A prefill step: the next tokens of several prompts, side by side."""

    hidden: Tensor  # [T, 7168] bf16
    positions: Tensor  # [T] int64
    sequences: Tensor  # [T] int64: the prompt of each token
    spans: tuple[Span, ...]

    def parts(self) -> Iterator[tuple[Span, slice]]:
        """Each prompt's span and where its tokens lie among the T."""
        first = 0
        for span in self.spans:
            yield span, slice(first, first + span.count)
            first += span.count


@dataclass(frozen=True)
class Epilogues:
    """The two epilogues, fused or plain: the arguments are those of the fused operations.

    `insert(kv, arguments)` returns (q, k, v) for attention and writes the cache; `context(kv,
    arguments)` returns (k, v).
    """

    insert: Callable[[CacheFormat, Arguments], Triple]
    context: Callable[[CacheFormat, Arguments], tuple[Tensor, Tensor]]


def insert_call(kv: CacheFormat, arguments: Arguments) -> tuple[str, Arguments]:
    """The operation that fits the cache, and its arguments: 16-bit values stay where they are."""
    if kv.name == "fp8":
        return INSERT_OPERATIONS[kv.name], arguments
    return INSERT_OPERATIONS[kv.name], {k: v for k, v in arguments.items() if k != "v"}


def context_call(kv: CacheFormat, arguments: Arguments) -> tuple[str, Arguments]:
    if kv.name == "fp8":
        return "fused_mla_kv_concat_quant_fp8", arguments
    return "fused_mla_kv_concat", {k: v for k, v in arguments.items() if k != "v"}


def fused_insert(kv: CacheFormat, arguments: Arguments) -> Triple:
    name, call = insert_call(kv, arguments)
    result = getattr(k3cupy, name)(**call)
    # The 16-bit operations turn q in place, and v needs nothing.
    return result if kv.name == "fp8" else (call["q"], result, arguments["v"])


def fused_context(kv: CacheFormat, arguments: Arguments) -> tuple[Tensor, Tensor]:
    name, call = context_call(kv, arguments)
    result = getattr(k3cupy, name)(**call)
    return result if kv.name == "fp8" else (result, arguments["v"])


def plain_insert(kv: CacheFormat, arguments: Arguments) -> Triple:
    """Epilogue 1 as PyTorch would do it: rotate, cat, cast, index_copy_."""
    q, k_nope, v, k_pe = (arguments[name] for name in ("q", "k_nope", "v", "k_pe"))
    q_nope, q_pe = q.split([NOPE_DIM, ROPE_DIM], dim=-1)
    if "positions" in arguments:
        cos_sin = arguments["cos_sin_cache"][arguments["positions"]]
        q_pe, k_pe = rotate(q_pe, cos_sin[:, None]), rotate(k_pe, cos_sin)

    cache = arguments["kv_cache"]
    row = torch.cat([arguments["kv_c_normed"].to(k_pe.dtype), k_pe], dim=-1)
    cache.view(-1, cache.shape[-1]).index_copy_(0, arguments["slot_mapping"], kv.encode(row))

    q = torch.cat([q_nope.to(q_pe.dtype), q_pe], dim=-1)
    k_pe = k_pe[:, None].expand(-1, NUM_HEADS, -1)
    k = torch.cat([k_nope.to(k_pe.dtype), k_pe], dim=-1)
    if kv.name != "fp8":
        return q.to(torch.bfloat16), k.to(torch.bfloat16), v
    scales = (arguments[f"{name}_scale_inv"] for name in "qkv")
    q8, k8, v8 = (to_fp8(x, scale) for x, scale in zip((q, k, v), scales, strict=True))
    return q8, k8, v8


def plain_context(kv: CacheFormat, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Epilogue 2 as PyTorch would do it."""
    k_pe = arguments["k_pe"][:, None].expand(-1, NUM_HEADS, -1)
    k, v = torch.cat([arguments["k_nope"], k_pe], dim=-1), arguments["v"]
    return (k.to(FP8), v.to(FP8)) if kv.name == "fp8" else (k, v)


FUSED = Epilogues(fused_insert, fused_context)
PLAIN = Epilogues(plain_insert, plain_context)


def attention(q: Tensor, k: Tensor, v: Tensor, first: int | None) -> tuple[Tensor, Tensor]:
    """Attention in fp32: output [T, H, 128], and the log of each row's sum, [T, H].

    With `first` token i sees the keys up to number first + i; with None it sees all of them.
    """
    scores = torch.einsum("thd,shd->ths", q, k) * SOFTMAX_SCALE
    if first is not None:
        rows = torch.arange(len(q), device=q.device)[:, None] + first
        hidden = torch.arange(len(k), device=q.device) > rows
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return torch.einsum("ths,shv->thv", scores.softmax(-1), v), scores.logsumexp(-1)


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from the attention over each: weigh by the sums."""
    total = torch.logaddexp(a[1], b[1])
    weighed = [out * (log_sum - total).exp()[..., None] for out, log_sum in (a, b)]
    return weighed[0] + weighed[1], total


class FusedPrefill:
    """Prefill as a server runs it: strided views, a paged cache, context read back in pieces."""

    def __init__(
        self,
        weights: Weights,
        kv: CacheFormat,
        cache: PagedCache,
        cos_sin_cache: Tensor | None,
        epilogues: Epilogues = FUSED,
    ) -> None:
        self.weights = weights
        self.kv = kv
        self.cache = cache
        self.cos_sin_cache = cos_sin_cache
        self.epilogues = epilogues
        # Keys and values of all heads from one GEMM, side by side: [H * (128 + 128), 512].
        kv_b = torch.cat([weights.w_uk, weights.w_uv.transpose(1, 2)], dim=1)
        self.kv_b = kv_b.reshape(NUM_HEADS * (NOPE_DIM + VALUE_DIM), KV_LORA_RANK)
        scales = torch.tensor([[1 / KEY_SCALE], [1 / VALUE_SCALE]], device=kv_b.device)
        self.k_scale_inv, self.v_scale_inv = scales

    def __call__(self, chunk: Chunk) -> Tensor:
        """hidden [T, 7168] of a chunk -> output [T, 7168]."""
        return self.attend(chunk, *self.epilogues.insert(self.kv, self.project(chunk)))

    def project(self, chunk: Chunk) -> Arguments:
        """Everything before epilogue 1. Returns its arguments; only the fp8 operation takes v."""
        w = self.weights
        qkv = F.linear(chunk.hidden, w.qkv_a)
        q_a, kv_c, k_pe = qkv.split([Q_LORA_RANK, KV_LORA_RANK, ROPE_DIM], dim=-1)
        kv_c_normed = F.rms_norm(kv_c, [KV_LORA_RANK], w.kv_c_norm, NORM_EPS)
        q_a.copy_(F.rms_norm(q_a, [Q_LORA_RANK], w.q_a_norm, NORM_EPS))
        q = F.linear(q_a, w.q_b).unflatten(-1, (NUM_HEADS, NOPE_DIM + ROPE_DIM))
        k_nope, v = self.up(kv_c_normed)

        call: Arguments = {
            "q": q,
            "k_nope": k_nope,
            "k_pe": k_pe,  # a column slice, its rows are 2112 apart
            "kv_c_normed": kv_c_normed,
            "v": v,
            "kv_cache": self.cache.blocks,
            "slot_mapping": self.cache.slot_table[chunk.sequences, chunk.positions],
        }
        if self.kv.name == "fp8":
            call |= {
                "q_scale_inv": self.kv.q_scale_inv,
                "k_scale_inv": self.k_scale_inv,
                "v_scale_inv": self.v_scale_inv,
                "cache_scale_inv": self.kv.cache_scale_inv,
            }
        if self.cos_sin_cache is not None:
            call |= {"positions": chunk.positions, "cos_sin_cache": self.cos_sin_cache}
        return call

    def up(self, kv_c: Tensor) -> tuple[Tensor, Tensor]:
        """kv_b: latent rows to k_nope and v, the two halves of one buffer [T, H, 256]."""
        both = F.linear(kv_c, self.kv_b).unflatten(-1, (NUM_HEADS, NOPE_DIM + VALUE_DIM))
        k_nope, v = both.split([NOPE_DIM, VALUE_DIM], dim=-1)
        return k_nope, v

    def attend(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each prompt by itself: among the chunk's tokens, then over its context, then merged."""
        q, k, v = self.widened(q, k, v)
        outputs = []
        for span, part in chunk.parts():
            found = attention(q[part], k[part], v[part], first=0)
            for start in range(0, span.start, CONTEXT_ROWS):
                end = min(start + CONTEXT_ROWS, span.start)
                context = self.epilogues.context(self.kv, self.gather(span.sequence, start, end))
                keys, values = (x.float() for x in context)
                found = merge(found, attention(q[part], keys, values, first=None))
            outputs.append(found[0])
        return F.linear(torch.cat(outputs).to(torch.bfloat16).flatten(1), self.weights.o_proj)

    def gather(self, sequence: int, start: int, end: int) -> Arguments:
        """Rows of the context back from the cache; returns the arguments of epilogue 2.

        They were rotated when they were written, so there is no RoPE any more.
        """
        rows = self.kv.decode(self.cache.rows()[self.cache.slot_table[sequence, start:end]])
        kv_c, k_pe = rows.to(torch.bfloat16).split([KV_LORA_RANK, ROPE_DIM], dim=-1)
        k_nope, v = self.up(kv_c)
        return {"k_nope": k_nope, "k_pe": k_pe, "v": v}

    def widened(self, q: Tensor, k: Tensor, v: Tensor) -> Triple:
        """fp32 values of what epilogue 1 returned. (The context is cast without a scale.)"""
        if self.kv.q_scale_inv is None:
            return q.float(), k.float(), v.float()
        return (
            q.float() / self.kv.q_scale_inv,
            k.float() / self.k_scale_inv,
            (v.float() / self.v_scale_inv),
        )


class PlainPrefill:
    """The same with nothing clever: the yardstick.

    Packed tensors, one dense cache [B, max_len, row], separate up-projections, and one softmax over
    context and chunk together, with nothing to merge. It rounds and casts where the fused layer
    does, which is all that the two have in common.
    """

    def __init__(
        self, weights: Weights, kv: CacheFormat, cache: Tensor, cos_sin_cache: Tensor | None
    ) -> None:
        self.weights = weights
        self.kv = kv
        self.cache = cache
        self.cos_sin_cache = cos_sin_cache

    def __call__(self, chunk: Chunk) -> Tensor:
        w = self.weights
        qkv = F.linear(chunk.hidden, w.qkv_a)
        q_a = F.rms_norm(qkv[:, :Q_LORA_RANK].contiguous(), [Q_LORA_RANK], w.q_a_norm, NORM_EPS)
        kv_c = qkv[:, Q_LORA_RANK : Q_LORA_RANK + KV_LORA_RANK].contiguous()
        kv_c = F.rms_norm(kv_c, [KV_LORA_RANK], w.kv_c_norm, NORM_EPS)
        k_nope, v = self.up(kv_c)
        call: Arguments = {
            "q": F.linear(q_a, w.q_b).view(-1, NUM_HEADS, NOPE_DIM + ROPE_DIM),
            "k_nope": k_nope,
            "k_pe": qkv[:, -ROPE_DIM:].contiguous(),
            "kv_c_normed": kv_c,
            "v": v,
            "kv_cache": self.cache,
            "slot_mapping": chunk.sequences * self.cache.shape[1] + chunk.positions,
            "q_scale_inv": self.kv.q_scale_inv,
            "k_scale_inv": 1 / KEY_SCALE,
            "v_scale_inv": 1 / VALUE_SCALE,
        }
        if self.cos_sin_cache is not None:
            call |= {"positions": chunk.positions, "cos_sin_cache": self.cos_sin_cache}
        q, k, v = (x.float() for x in plain_insert(self.kv, call))
        if self.kv.q_scale_inv is not None:
            q, k, v = q / self.kv.q_scale_inv, k * KEY_SCALE, v * VALUE_SCALE

        outputs = []
        for span, part in chunk.parts():
            rows = self.kv.decode(self.cache[span.sequence, : span.start]).to(torch.bfloat16)
            past_nope, past_v = self.up(rows[:, :KV_LORA_RANK])
            past = {"k_nope": past_nope, "k_pe": rows[:, KV_LORA_RANK:], "v": past_v}
            past_k, past_v = (x.float() for x in plain_context(self.kv, past))
            keys, values = torch.cat([past_k, k[part]]), torch.cat([past_v, v[part]])
            outputs.append(attention(q[part], keys, values, first=span.start)[0])
        return F.linear(torch.cat(outputs).to(torch.bfloat16).flatten(1), w.o_proj)

    def up(self, kv_c: Tensor) -> tuple[Tensor, Tensor]:
        w = self.weights
        k_nope = torch.einsum("tl,hnl->thn", kv_c, w.w_uk)
        return k_nope, torch.einsum("tl,hlv->thv", kv_c, w.w_uv)
