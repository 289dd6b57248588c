"""A step of MLA prefill, and whether what a kernel wrote of it is right.

With many tokens the tensors of one launch after the other are different ones, so that none is found
in L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import k3cupy
from k3cupy.accept.mla_prefill import SIGNATURES
from k3cupy.constants import (
    DS_MLA_ROW_BYTES,
    KV_LORA_RANK,
    LATENT_DIM,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    V_HEAD_DIM,
)
from k3cupy.kernels.mla_prefill import (
    INSERTS,
    KEY_CONCAT,
    KEY_CONCAT_DS_MLA,
    KV_CONCAT,
    QKV_QUANT,
    MlaPrefillConfig,
)
from k3cupy.timing.chain import END, NONE, Chain, consumer_of, producer_of

_BLOCK_SIZE = 64
_POSITIONS = 4096
_QKV_A_WIDTH = 2112

_GRAPH_US = 1500.0
_MAX_LAUNCHES = 200
_ASSUMED_BYTES_A_US = 4e6
ROTATE_FROM = 4096
ROTATED_BYTES = 200 << 20
_SAMPLES = 64


def bytes_moved(op: str, tokens: int, heads: int, rope: bool = False) -> int:
    """Return the bytes that an operation must read and write, each counted once."""
    latent = 2 * KV_LORA_RANK + 8  # and the slot
    row = {KEY_CONCAT: 2 * LATENT_DIM, KEY_CONCAT_DS_MLA: DS_MLA_ROW_BYTES, QKV_QUANT: LATENT_DIM}
    token = 2 * QK_ROPE_HEAD_DIM
    if op in INSERTS:
        token += latent + row[op] + (8 + 4 * QK_ROPE_HEAD_DIM if rope else 0)
    head = 2 * QK_NOPE_HEAD_DIM
    if op in (KEY_CONCAT, KEY_CONCAT_DS_MLA, KV_CONCAT):
        head += 2 * QK_HEAD_DIM + (4 * QK_ROPE_HEAD_DIM if rope else 0)
    else:
        head += 2 * V_HEAD_DIM + QK_HEAD_DIM + V_HEAD_DIM
        head += 3 * QK_HEAD_DIM if op == QKV_QUANT else 0
    return tokens * (token + heads * head)


def sets_of(tokens: int, size: int) -> int:
    """Return how many sets of tensors take turns, so that a long prompt is not found in L2."""
    return 1 if tokens < ROTATE_FROM else max(1, -(-ROTATED_BYTES // size))


def launches_of(size: int, sets: int) -> int:
    """Return the launches of one graph: as many of each set, about a millisecond and a half."""
    wanted = _GRAPH_US / (2 + size / _ASSUMED_BYTES_A_US)
    return max(1, round(min(wanted, _MAX_LAUNCHES) / sets)) * sets


class PrefillStep:
    """Tensors of one prefill step with the strides of the model.

    Attributes:
        op: the operation, one of ``OPS``.
        tokens: T.
        heads: H.
        rope: with positions.
        arguments: of the call, ``out`` aside.
        outs: what the operation returns.
    """

    def __init__(
        self,
        op: str,
        tokens: int,
        heads: int,
        rope: bool = False,
        *,
        seed: int = 0,
        device: str = "cuda",
    ) -> None:
        random = torch.Generator(device=device).manual_seed(tokens + seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=random)

        self.op, self.tokens, self.heads, self.rope = op, tokens, heads, rope
        kv = normal(tokens, heads, QK_NOPE_HEAD_DIM + V_HEAD_DIM)
        qkv_a = normal(tokens, _QKV_A_WIDTH)
        latent = _QKV_A_WIDTH - LATENT_DIM
        num_blocks = -(-tokens // _BLOCK_SIZE)
        is_ds_mla = op == KEY_CONCAT_DS_MLA
        tensors: dict[str, Any] = {
            "k_nope": kv[..., :QK_NOPE_HEAD_DIM],
            "v": kv[..., QK_NOPE_HEAD_DIM:],
            "k_pe": qkv_a[:, latent + KV_LORA_RANK :],
            "kv_c_normed": qkv_a[:, latent : latent + KV_LORA_RANK],
        }
        if op in INSERTS:
            tensors["q"] = normal(tokens, heads, QK_HEAD_DIM)
            tensors["kv_cache"] = torch.zeros(
                num_blocks,
                _BLOCK_SIZE,
                DS_MLA_ROW_BYTES if is_ds_mla else LATENT_DIM,
                device=device,
                dtype=torch.bfloat16 if op == KEY_CONCAT else torch.uint8,
            )
            # A prompt's tokens stand side by side in blocks that may be anywhere.
            blocks = torch.randperm(num_blocks, device=device, generator=random)
            token = torch.arange(tokens, device=device)
            tensors["slot_mapping"] = (
                blocks[token // _BLOCK_SIZE] * _BLOCK_SIZE + token % _BLOCK_SIZE
            )
            if rope:
                tensors["positions"] = token % _POSITIONS
                angle = torch.rand(_POSITIONS, 32, device=device, generator=random) * 6.28
                tensors["cos_sin_cache"] = torch.cat([angle.cos(), angle.sin()], -1)
        for i, name in enumerate(SIGNATURES[op].arguments.scales):
            tensors[name] = torch.tensor([0.5 * 2**i], device=device)
        self.arguments = {name: tensors[name] for name in SIGNATURES[op].inputs if name in tensors}
        self.outs = [
            torch.empty(
                tokens,
                heads,
                width,
                device=device,
                dtype=torch.float8_e4m3fn if SIGNATURES[op].is_fp8 else torch.bfloat16,
            )
            for width in SIGNATURES[op].outputs.values()
        ]
        self._kv = kv
        self._sound: list[torch.Tensor] | None = None
        self._query = self.arguments["q"].clone() if self.turns_query else None

    @property
    def turns_query(self) -> bool:
        """Whether q is turned in place."""
        return self.rope and not SIGNATURES[self.op].is_fp8

    def chain(self, producer: str = END, consumer: str = NONE) -> Chain:
        """Return what writes the source of keys and values and what reads the keys."""
        return Chain(producer_of(self._kv, producer), consumer_of(self.outs[0], consumer))

    def run(self, config: MlaPrefillConfig | None) -> None:
        """Run the kernel."""
        out = self.outs[0] if len(self.outs) == 1 else tuple(self.outs)
        getattr(k3cupy, self.op)(**self.arguments, out=out, config=config)

    def check(self, config: MlaPrefillConfig) -> str | None:
        """Let a configuration compute everything, and say what is wrong with it, or None.

        The first one is compared with the CPU reference, a sample of tokens, among them the first
        and the last; every other one with the first that was right, all bits.
        """
        found = self._results(config)
        if self._sound is None:
            wrong = self._differs_from_reference(found)
            self._sound = found if wrong is None else None
            return wrong
        for place, (got, want) in enumerate(zip(found, self._sound, strict=True)):
            if not torch.equal(got, want):
                return f"result {place} differs from that of another configuration"
        return None

    def _differs_from_reference(self, found: Sequence[torch.Tensor]) -> str | None:
        count = min(self.tokens, _SAMPLES)
        sample = torch.linspace(0, self.tokens - 1, count).round().long().to(found[0].device)
        cache_place = len(self.outs) if "kv_cache" in self.arguments else None
        for place, (got, want) in enumerate(zip(found, self._expected(sample), strict=True)):
            if place == cache_place:
                picked = got.view(-1, got.shape[-1])[self.arguments["slot_mapping"][sample]]
            else:
                picked = got[sample]
            if not torch.equal(picked.cpu(), want):
                return f"result {place} differs from the reference"
        return None

    def _results(self, config: MlaPrefillConfig) -> list[torch.Tensor]:
        """Run on fresh memory and return copies of what was written, as bytes."""
        written = [*self.outs]
        if "kv_cache" in self.arguments:
            self.arguments["kv_cache"].zero_()
            written.append(self.arguments["kv_cache"])
        for out in self.outs:
            out.view(torch.uint8).fill_(0x55)
        if self._query is not None:
            self.arguments["q"].copy_(self._query)
            written.append(self.arguments["q"])
        self.run(config)
        return [t.contiguous().view(torch.uint8).clone() for t in written]

    def _expected(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return what some tokens must give by the CPU reference, in the order of ``results``.

        The cache comes as the rows of those tokens.
        """
        whole = ("kv_cache", "cos_sin_cache")
        taken = {
            name: t.cpu() if name in whole or name.endswith("inv") else t[tokens].cpu()
            for name, t in self.arguments.items()
            if name != "kv_cache"
        }
        if self._query is not None:
            taken["q"] = self._query[tokens].cpu()
        if "kv_cache" in self.arguments:
            cache = self.arguments["kv_cache"]
            taken["kv_cache"] = torch.zeros(1, len(tokens), cache.shape[-1], dtype=cache.dtype)
            taken["slot_mapping"] = torch.arange(len(tokens))
        outs = getattr(k3cupy, self.op)(**taken)
        found = [outs] if isinstance(outs, torch.Tensor) else list(outs)
        if "kv_cache" in taken:
            found.append(taken["kv_cache"][0])
        if self._query is not None:
            found.append(taken["q"])
        return [t.contiguous().view(torch.uint8) for t in found]
