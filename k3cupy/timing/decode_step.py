"""A step of MLA decode in its chain, and whether what a kernel wrote of it is right.

The chain is absorbed-query matmul (``torch.bmm``) -> epilogue -> a consumer that waits and reads
mqa_q, with the strides of the model: ql_nope a transposed matmul output, q_pe a slice of q, kv_c
and k_pe slices of the 2112-wide projection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import k3cupy
from k3cupy.constants import DS_MLA_ROW_BYTES, KV_LORA_RANK, LATENT_DIM, QK_ROPE_HEAD_DIM
from k3cupy.kernels.mla_decode import MlaDecodeConfig, Variant
from k3cupy.timing.chain import GEMM, NONE, Chain, consumer_of, producer_of

LAUNCHES = 200
"""Of one graph."""

BLOCK_SIZE = 64
_LEAST_BLOCKS = 64
_NOPE_HEAD_DIM = 128
_QKV_A_WIDTH = 2112


class DecodeStep:
    """Tensors of one decode step with the strides of the model.

    Attributes:
        query_fp8: mqa_q is e4m3.
        cache: its format.
        inputs: of the epilogue, the cache and the scales aside.
        scales: by name.
        kv_cache: what it writes beside ``out``.
        out: mqa_q.
        arguments: of the call, ``out`` aside.
    """

    def __init__(self, kind: str, tokens: int, heads: int, device: str = "cuda") -> None:
        random = torch.Generator(device=device).manual_seed(tokens)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=random)

        variant = Variant.of_kind(kind)
        self.query_fp8, self.cache = variant.query_fp8, variant.cache
        num_blocks = max(_LEAST_BLOCKS, -(-tokens // BLOCK_SIZE))
        q = normal(tokens, heads, _NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM)
        self._q_nope = q[..., :_NOPE_HEAD_DIM].transpose(0, 1)
        self._w_uk = normal(heads, _NOPE_HEAD_DIM, KV_LORA_RANK)
        self._absorbed = torch.empty(
            heads, tokens, KV_LORA_RANK, device=device, dtype=torch.bfloat16
        )
        qkv_a = normal(tokens, _QKV_A_WIDTH)
        latent = _QKV_A_WIDTH - LATENT_DIM
        self.inputs = {
            "ql_nope": self._absorbed.transpose(0, 1),
            "q_pe": q[..., _NOPE_HEAD_DIM:],
            "kv_c_normed": qkv_a[:, latent : latent + KV_LORA_RANK],
            "k_pe": qkv_a[:, latent + KV_LORA_RANK :],
            "slot_mapping": torch.randperm(
                num_blocks * BLOCK_SIZE, device=device, generator=random
            )[:tokens],
        }
        width = DS_MLA_ROW_BYTES if self.cache == "ds_mla" else LATENT_DIM
        cache_type = torch.bfloat16 if self.cache == "same" else torch.uint8
        self.kv_cache = torch.zeros(num_blocks, BLOCK_SIZE, width, device=device, dtype=cache_type)
        self.scales: dict[str, torch.Tensor] = {}
        if self.query_fp8:
            self.scales["q_scale_inv"] = torch.tensor([0.5], device=device)
        if self.cache == "fp8":
            self.scales["cache_scale_inv"] = torch.tensor([2.0], device=device)
        self.out = torch.empty(
            tokens,
            heads,
            LATENT_DIM,
            device=device,
            dtype=torch.float8_e4m3fn if self.query_fp8 else torch.bfloat16,
        )
        self.arguments = {
            **self.inputs,
            **self.scales,
            "kv_cache": self.kv_cache,
            "ds_mla": self.cache == "ds_mla",
        }
        self.absorb()

    def absorb(self) -> None:
        """Run the predecessor."""
        torch.bmm(self._q_nope, self._w_uk, out=self._absorbed)

    def chain(self, producer: str = GEMM, consumer: str = NONE, *, pdl: bool = True) -> Chain:
        """Return what writes ql_nope and what reads mqa_q; GEMM is the absorbed-query matmul."""
        is_model = producer == GEMM
        before = self.absorb if is_model else producer_of(self._absorbed, producer, pdl=pdl)
        return Chain(before, consumer_of(self.out, consumer, pdl=pdl))

    def run(self, config: MlaDecodeConfig, *, pdl: bool | None = None) -> None:
        """Run the kernel."""
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
            **self.arguments, out=self.out, config=config, pdl=pdl
        )

    def check(self, body: Callable[[], Any]) -> str | None:
        """Let a body write ``out`` and the cache, and say what is wrong with them, or None.

        Every bit is compared with what the CPU reference gives for the same tensors.
        """
        self.kv_cache.zero_()
        self.out.view(torch.uint8).fill_(0x55)
        body()
        out, cache = self._expected
        for name, got, want in (("mqa_q", self.out, out), ("kv_cache", self.kv_cache, cache)):
            if not torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)):
                return f"{name} differs from the reference"
        return None

    @functools.cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.zeros(self.kv_cache.shape, dtype=self.kv_cache.dtype)
        out = torch.empty(self.out.shape, dtype=self.out.dtype)
        read = {name: t.cpu() for name, t in {**self.inputs, **self.scales}.items()}
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
            **{**self.arguments, **read, "kv_cache": cache}, out=out
        )
        return out, cache
