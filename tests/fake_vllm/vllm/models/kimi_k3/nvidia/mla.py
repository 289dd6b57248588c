from types import SimpleNamespace
from typing import Any

import torch


class MultiHeadLatentAttention(torch.nn.Module):
    def __init__(
        self, kv_cache_dtype: str, kv_cache: Any, fp8_query: bool = True, rope: bool = False
    ) -> None:
        super().__init__()
        self.kv_cache_dtype, self.kv_cache = kv_cache_dtype, kv_cache
        self.impl = SimpleNamespace(supports_quant_query_input=fp8_query)
        self.rotary_emb = object() if rope else None
        self._gate_events = self.fused_qkv_a_g_proj = None
        self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim = 1536, 512, 64
        self._q_scale = torch.tensor(2.0)
        self._q_scale_inv, self._k_scale_inv = torch.tensor([0.5]), torch.tensor([0.25])

    def _decode_concat_cache(
        self,
        ql_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        positions: torch.Tensor | None,
        cos_sin_cache: torch.Tensor | None,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Quantise the query, write the cache, and undo the first: vLLM's way with such a cache."""
        cache = self.kv_cache.view(torch.float8_e4m3fn)
        mqa_q = torch.empty((*ql_nope.shape[:2], 576), dtype=torch.float8_e4m3fn)
        torch.ops._C.fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert(
            ql_nope,
            q_pe,
            kv_c_normed,
            k_pe.reshape(k_pe.shape[0], -1),
            mqa_q,
            cache,
            slot_mapping,
            self._q_scale_inv,
            self._k_scale_inv,
            cache.shape[1],
            positions,
            cos_sin_cache,
        )
        if not self.impl.supports_quant_query_input:
            return (mqa_q.to(torch.float32) * self._q_scale).to(ql_nope.dtype)
        return mqa_q
