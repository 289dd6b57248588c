"""One Kimi-K3 MLA decode layer: around the fused epilogue, in fewer launches, and in plain PyTorch.

MLA ("multi-head latent attention") keeps one short row per past token in its cache: 512 numbers
of latent keys-and-values, and 64 numbers of positional key. All heads read that same row. A decode
step projects the new token, puts its query and its row in place, and attends over the rows:

    hidden --qkv_a--> [ q_a | kv_c | k_pe ] --norms, q_b, W_UK--> ql_nope, q_pe, kv_c_normed, k_pe
           --EPILOGUE--> mqa_q and one new row in the paged cache
           --attention over the cache--> latent --W_UV, o_proj--> output

The epilogue (join the two query parts, join the two key parts, rotate, quantise, write to the
cache) is what k3cupy does in one kernel. It has one too for all from the norms to mqa_q and the new
row, and one for W_UV. Shapes: B tokens (one a sequence), H heads.

This file holds the widths, the weights, the cache formats, the plain epilogue and the three layers,
in that order. `mla_decode_step.py` runs them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import k3cupy

# The widths of Kimi-K3. With tensor parallelism over 8 GPUs, a GPU has 12 of the 96 heads.
HIDDEN_SIZE = 7168
Q_LORA_RANK = 1536
KV_LORA_RANK = 512
NOPE_DIM = 128  # query and key width without position, per head
ROPE_DIM = 64  # query and key width with position, per head
VALUE_DIM = 128
NUM_HEADS = 12
LATENT_DIM = KV_LORA_RANK + ROPE_DIM
QKV_A_WIDTH = Q_LORA_RANK + LATENT_DIM  # 2112

BLOCK_SIZE = 64  # tokens a block of the paged cache
SOFTMAX_SCALE = (NOPE_DIM + ROPE_DIM) ** -0.5
NORM_EPS = 1e-6
ROPE_BASE = 50_000.0

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
DS_MLA_TILES = 4  # the 656-byte row: four tiles of 128 fp8 values, each with its own scale
DS_MLA_ROW_BYTES = KV_LORA_RANK + 4 * DS_MLA_TILES + 2 * ROPE_DIM
POISON_BYTE = 0xFF  # NaN in bf16, fp32 and fp8 alike

Epilogue = Callable[..., Tensor]
Linear = Callable[[Tensor, Tensor], Tensor]
EpilogueCall = dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """The layer's bf16 weights, scaled so that every intermediate value is about 1."""

    qkv_a: Tensor  # [2112, 7168]
    q_a_norm: Tensor  # [1536]
    kv_c_norm: Tensor  # [512]
    q_b: Tensor  # [H * 192, 1536]
    w_uk: Tensor  # [H, 128, 512], the key up-projection, applied to the query instead
    w_uv: Tensor  # [H, 512, 128], the value up-projection
    o_proj: Tensor  # [7168, H * 128]

    @classmethod
    def random(
        cls, generator: torch.Generator, device: torch.device, heads: int = NUM_HEADS
    ) -> Weights:
        def normal(*shape: int, fan_in: int) -> Tensor:
            values = torch.randn(shape, generator=generator) * fan_in**-0.5
            return values.to(device, torch.bfloat16)

        def norm_weight(width: int) -> Tensor:
            values = 1.0 + 0.1 * torch.randn(width, generator=generator)
            return values.to(device, torch.bfloat16)

        return cls(
            qkv_a=normal(QKV_A_WIDTH, HIDDEN_SIZE, fan_in=HIDDEN_SIZE),
            q_a_norm=norm_weight(Q_LORA_RANK),
            kv_c_norm=norm_weight(KV_LORA_RANK),
            q_b=normal(heads * (NOPE_DIM + ROPE_DIM), Q_LORA_RANK, fan_in=Q_LORA_RANK),
            w_uk=normal(heads, NOPE_DIM, KV_LORA_RANK, fan_in=KV_LORA_RANK),
            w_uv=normal(heads, KV_LORA_RANK, VALUE_DIM, fan_in=KV_LORA_RANK),
            o_proj=normal(HIDDEN_SIZE, heads * VALUE_DIM, fan_in=heads * VALUE_DIM),
        )

    def shard(self, rank: int, ranks: int) -> Weights:
        """One rank's part under tensor parallelism: its heads of everything that has heads.

        q_b, W_UK and W_UV (kv_b, absorbed) are split by columns of their products, o_proj by rows:
        the sum of all ranks' outputs is the layer's. What has no heads, each rank has whole.
        """
        return replace(
            self,
            q_b=self.q_b.chunk(ranks)[rank].contiguous(),
            w_uk=self.w_uk.chunk(ranks)[rank].contiguous(),
            w_uv=self.w_uv.chunk(ranks)[rank].contiguous(),
            o_proj=self.o_proj.chunk(ranks, dim=1)[rank].contiguous(),
        )


def rope_table(max_position: int, device: torch.device) -> Tensor:
    """[max_position, 64] fp32: 32 cosines, then 32 sines, for every position."""
    frequencies = ROPE_BASE ** -(torch.arange(0, ROPE_DIM, 2, dtype=torch.float64) / ROPE_DIM)
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device, torch.float32)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """RoPE on neighbouring pairs, in fp32. `cos_sin` [..., 64] must broadcast against `x`."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def to_fp8(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Scale, saturate at +-448, round to fp8."""
    return (x.float() * scale_inv).clamp(-FP8_MAX, FP8_MAX).to(FP8)


@dataclass(frozen=True)
class CacheFormat:
    """How a latent row [..., 576] is stored, in plain PyTorch: `encode` and its inverse `decode`.

    `bf16` keeps the values, `fp8` divides all of them by one scale, and `fp8_ds_mla` packs 512 fp8
    values, four fp32 tile scales and 64 bf16 values into 656 bytes. With `fp8` the query is
    quantised too, with a scale of its own, as an fp8 attention kernel wants it.
    """

    name: str
    q_scale_inv: Tensor | None = None  # fp32 [1] on the device, as the cache's below
    cache_scale_inv: Tensor | None = None

    @classmethod
    def named(cls, name: str, device: torch.device) -> CacheFormat:
        if name != "fp8":
            return cls(name)
        # The data is about N(0, 1): these scales use the fp8 range up to 5.6 and 7.5 sigma.
        q_scale, cache_scale = torch.tensor([[1 / 80], [1 / 60]], device=device)
        return cls(name, 1 / q_scale, 1 / cache_scale)

    def empty(self, *shape: int, device: torch.device) -> Tensor:
        """A cache full of NaN, so that a row that nobody wrote cannot pass for a real one."""
        row_bytes = {"bf16": 2 * LATENT_DIM, "fp8": LATENT_DIM, "fp8_ds_mla": DS_MLA_ROW_BYTES}
        cache = torch.full(
            (*shape, row_bytes[self.name]), POISON_BYTE, dtype=torch.uint8, device=device
        )
        return cache.view(torch.bfloat16) if self.name == "bf16" else cache

    def encode(self, row: Tensor) -> Tensor:
        if self.name == "bf16":
            return row.to(torch.bfloat16)
        if self.cache_scale_inv is not None:
            return to_fp8(row, self.cache_scale_inv).view(torch.uint8)
        latent, k_pe = row.split([KV_LORA_RANK, ROPE_DIM], dim=-1)
        tiles = latent.float().unflatten(-1, (DS_MLA_TILES, -1))
        amax = tiles.abs().amax(dim=-1, keepdim=True)
        scale = torch.exp2(torch.ceil(torch.log2((amax / FP8_MAX).clamp(min=1e-4))))
        codes = to_fp8(tiles, 1 / scale).flatten(-2)
        parts = [codes, scale.squeeze(-1), k_pe.to(torch.bfloat16)]
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)

    def decode(self, stored: Tensor) -> Tensor:
        if self.name == "bf16":
            return stored.float()
        if self.cache_scale_inv is not None:
            return stored.view(FP8).float() / self.cache_scale_inv
        sizes = [KV_LORA_RANK, 4 * DS_MLA_TILES, 2 * ROPE_DIM]
        codes, scale, k_pe = stored.split(sizes, dim=-1)
        tiles = codes.view(FP8).float().unflatten(-1, (DS_MLA_TILES, -1))
        latent = (tiles * scale.view(torch.float32)[..., None]).flatten(-2)
        return torch.cat([latent, k_pe.view(torch.bfloat16).float()], dim=-1)

    def decode_query(self, mqa_q: Tensor) -> Tensor:
        return mqa_q.float() if self.q_scale_inv is None else mqa_q.float() / self.q_scale_inv

    def epilogue_options(self) -> EpilogueCall:
        """The arguments that tell the epilogue about this format."""
        if self.name == "fp8_ds_mla":
            return {"ds_mla": True}
        if self.name == "fp8":
            return {"q_scale_inv": self.q_scale_inv, "cache_scale_inv": self.cache_scale_inv}
        return {}


def plain_epilogue(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    ds_mla: bool = False,
    q_scale_inv: Tensor | None = None,
    cache_scale_inv: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    kv_inputs_ready: bool = False,
) -> Tensor:
    """What the fused kernel does, as PyTorch would do it: rotate, cat, quantise, index_copy_.

    The arguments are those of the fused operation, so that the two can be swapped. The promise
    `kv_inputs_ready` means nothing here: PyTorch's kernels always wait for each other.
    """
    if positions is not None and cos_sin_cache is not None:
        cos_sin = cos_sin_cache[positions]
        q_pe, k_pe = rotate(q_pe, cos_sin[:, None]), rotate(k_pe, cos_sin)

    mqa_q = torch.cat([ql_nope.to(q_pe.dtype), q_pe], dim=-1)
    mqa_q = mqa_q.to(torch.bfloat16) if q_scale_inv is None else to_fp8(mqa_q, q_scale_inv)

    name = "fp8_ds_mla" if ds_mla else "bf16" if cache_scale_inv is None else "fp8"
    row = torch.cat([kv_c_normed.to(k_pe.dtype), k_pe], dim=-1)
    stored = CacheFormat(name, q_scale_inv, cache_scale_inv).encode(row)
    kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, slot_mapping, stored)
    return mqa_q


class PagedCache:
    """A latent cache in blocks of 64 tokens, handed out in any order, as a server does it.

    Sequence b keeps its position p in block `block_table[b, p // 64]`, row `p % 64`.
    `slot_table[b, p]` is that place as one number, block * 64 + row.
    """

    def __init__(
        self,
        num_seqs: int,
        max_len: int,
        kv: CacheFormat,
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        blocks_per_seq = -(-max_len // BLOCK_SIZE)
        num_blocks = num_seqs * blocks_per_seq
        shuffled = torch.randperm(num_blocks, generator=generator)
        self.blocks = kv.empty(num_blocks, BLOCK_SIZE, device=device)
        self.block_table = shuffled.view(num_seqs, blocks_per_seq).to(device)
        self.offsets = torch.arange(blocks_per_seq * BLOCK_SIZE, device=device)
        self.slot_table = (
            self.block_table[:, self.offsets // BLOCK_SIZE] * BLOCK_SIZE + self.offsets % BLOCK_SIZE
        )

    def copy(self) -> PagedCache:
        """The same rows at the same places, in memory of its own."""
        copied = copy.copy(self)
        copied.blocks = self.blocks.clone()
        return copied

    def rows(self) -> Tensor:
        """The whole cache as a list of rows, [number of slots, row width]: a view, not a copy."""
        return self.blocks.view(-1, self.blocks.shape[-1])


class FusedLayer:
    """The decode layer as a server runs it: strided views, a paged cache, and a chosen epilogue.

    Nothing in a step is read back by the host and no shape depends on data, so that a CUDA graph
    can record it.
    """

    def __init__(
        self,
        weights: Weights,
        kv: CacheFormat,
        cache: PagedCache,
        epilogue: Epilogue,
        cos_sin_cache: Tensor | None,
        linear: Linear = F.linear,
    ) -> None:
        self.weights = weights
        self.kv = kv
        self.cache = cache
        self.epilogue = epilogue
        self.linear = linear
        self.cos_sin_cache = cos_sin_cache

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [B, 7168], positions [B] (tokens already cached) -> output [B, 7168]."""
        mqa_q = self.epilogue(**self.project(hidden, positions))
        return self.attend(mqa_q, positions)

    def project(self, hidden: Tensor, positions: Tensor) -> EpilogueCall:
        """Everything before the epilogue. Returns the arguments of the epilogue's call."""
        w = self.weights

        # One GEMM makes all three low-rank parts, side by side in a buffer 2112 wide.
        qkv = self.linear(hidden, w.qkv_a)
        q_a, kv_c, k_pe = qkv.split([Q_LORA_RANK, KV_LORA_RANK, ROPE_DIM], dim=-1)

        # Two RMS norms. The query's is written back in place, so q_a stays a slice of the wide
        # buffer: its rows are 2112 apart, although they are 1536 long.
        kv_c_normed = F.rms_norm(kv_c, [KV_LORA_RANK], w.kv_c_norm, NORM_EPS)
        q_a.copy_(F.rms_norm(q_a, [Q_LORA_RANK], w.q_a_norm, NORM_EPS))

        # The new token's place in the paged cache.
        slot_mapping = self.cache.slot_table.gather(1, positions[:, None]).squeeze(1)

        # q_b reads the strided slice and makes every head's query, [B, H, 128 | 64].
        q = self.linear(q_a, w.q_b).unflatten(-1, (-1, NOPE_DIM + ROPE_DIM))
        q_nope, q_pe = q.split([NOPE_DIM, ROPE_DIM], dim=-1)

        # The absorbed key projection: a batched matmul over heads gives [H, B, 512], and the
        # epilogue reads it transposed, so that no copy is needed.
        ql_nope = torch.bmm(q_nope.transpose(0, 1), w.w_uk).transpose(0, 1)

        call: EpilogueCall = {
            "ql_nope": ql_nope,
            "q_pe": q_pe,
            "kv_c_normed": kv_c_normed,
            "k_pe": k_pe,
            "kv_cache": self.cache.blocks,
            "slot_mapping": slot_mapping,
            # True because the key side and the slots were made before q_b: the kernel may read
            # them while the batched matmul still runs.
            "kv_inputs_ready": True,
            **self.kv.epilogue_options(),
        }
        if self.cos_sin_cache is not None:
            call |= {"positions": positions, "cos_sin_cache": self.cos_sin_cache}
        return call

    def attend(self, mqa_q: Tensor, positions: Tensor) -> Tensor:
        """Attention over the paged cache, value up-projection, output projection."""
        latent = self.latent(mqa_q, positions)
        return self.linear(self.values(latent), self.weights.o_proj)

    def latent(self, mqa_q: Tensor, positions: Tensor) -> Tensor:
        """Attention over the paged cache, [B, H, 512]."""

        # Gather every sequence's rows, and blank those past its end: they hold anything.
        rows = self.kv.decode(self.cache.rows()[self.cache.slot_table])
        past_end = self.cache.offsets > positions[:, None]
        rows = rows.masked_fill(past_end[:, :, None], 0.0)

        # All heads share the rows: keys are the 576 numbers, values the first 512 of them.
        scores = torch.bmm(self.kv.decode_query(mqa_q), rows.transpose(1, 2)) * SOFTMAX_SCALE
        weights = scores.masked_fill(past_end[:, None, :], -torch.inf).softmax(dim=-1)
        return torch.bmm(weights, rows[..., :KV_LORA_RANK]).to(torch.bfloat16)

    def values(self, latent: Tensor) -> Tensor:
        """Latent to values, head by head, side by side: [B, H * 128]."""
        return torch.bmm(latent.transpose(0, 1), self.weights.w_uv).transpose(0, 1).flatten(1)


class FewerLaunchesLayer(FusedLayer):
    """The same layer with what stands around attention in one launch each.

    From the norms to mqa_q and the cache row it is one operation, which reads the first projection
    as it is; values are one more. Where one launch cannot be, they run separate kernels and say so.
    """

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        mqa_q = k3cupy.fused_mla_decode_query(**self.query_call(hidden, positions))
        return self.attend(mqa_q, positions)

    def query_call(self, hidden: Tensor, positions: Tensor) -> EpilogueCall:
        """The first projection. Returns the arguments of the query front's call."""
        w = self.weights
        call: EpilogueCall = {
            "qkv_a": self.linear(hidden, w.qkv_a),
            "q_norm_weight": w.q_a_norm,
            "kv_norm_weight": w.kv_c_norm,
            "w_q_b": w.q_b,
            "w_uk": w.w_uk,
            "kv_cache": self.cache.blocks,
            "slot_mapping": self.cache.slot_table.gather(1, positions[:, None]).squeeze(1),
            "eps": NORM_EPS,
            # True because no step writes weights: they are on their way before qkv_a is done.
            "weight_is_static": True,
            **self.kv.epilogue_options(),
        }
        if self.cos_sin_cache is not None:
            call |= {"positions": positions, "cos_sin_cache": self.cos_sin_cache}
        return call

    def values(self, latent: Tensor) -> Tensor:
        return k3cupy.fused_mla_decode_value(latent, self.weights.w_uv, weight_is_static=True)


class PlainLayer:
    """The same layer with nothing clever: the yardstick.

    Packed tensors, one dense cache [B, max_len, row], one sequence after the other at its exact
    length, no paging, no masks and no k3cupy.
    """

    def __init__(
        self, weights: Weights, kv: CacheFormat, cache: Tensor, cos_sin_cache: Tensor | None
    ) -> None:
        self.weights = weights
        self.kv = kv
        self.cache = cache
        self.cos_sin_cache = cos_sin_cache

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        w = self.weights
        num_seqs, max_len, _ = self.cache.shape

        qkv = F.linear(hidden, w.qkv_a)
        q_a = F.rms_norm(qkv[:, :Q_LORA_RANK].contiguous(), [Q_LORA_RANK], w.q_a_norm, NORM_EPS)
        kv_c = qkv[:, Q_LORA_RANK : Q_LORA_RANK + KV_LORA_RANK].contiguous()
        q = F.linear(q_a, w.q_b).view(num_seqs, NUM_HEADS, NOPE_DIM + ROPE_DIM)

        mqa_q = plain_epilogue(
            ql_nope=torch.einsum("bhn,hnl->bhl", q[..., :NOPE_DIM], w.w_uk),
            q_pe=q[..., NOPE_DIM:],
            kv_c_normed=F.rms_norm(kv_c, [KV_LORA_RANK], w.kv_c_norm, NORM_EPS),
            k_pe=qkv[:, -ROPE_DIM:],
            kv_cache=self.cache,
            slot_mapping=torch.arange(num_seqs, device=hidden.device) * max_len + positions,
            positions=positions,
            cos_sin_cache=self.cos_sin_cache,
            **self.kv.epilogue_options(),
        )

        latents = []
        for b, length in enumerate((positions + 1).tolist()):
            rows = self.kv.decode(self.cache[b, :length])
            scores = self.kv.decode_query(mqa_q[b]) @ rows.T * SOFTMAX_SCALE
            latents.append(scores.softmax(dim=-1) @ rows[:, :KV_LORA_RANK])
        latent = torch.stack(latents).to(torch.bfloat16)

        values = torch.einsum("bhl,hlv->bhv", latent, w.w_uv)
        return F.linear(values.reshape(num_seqs, -1), w.o_proj)
