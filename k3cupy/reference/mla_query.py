"""The MLA query front of a decode step on CPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from k3cupy.reference.fused_a_gemm import fused_a_gemm_reference
from k3cupy.reference.mla_decode import mla_decode_reference
from k3cupy.reference.mla_norm import q_kv_rmsnorm_reference
from k3cupy.reference.mla_value import mla_absorb_reference

Array = npt.NDArray[Any]


def mla_query_reference(
    qkv_a: Array,
    q_norm_weight: Array,
    kv_norm_weight: Array,
    w_q_b: Array,
    w_uk: Array,
    kv_cache: Array,
    slot_mapping: Array,
    out: Array,
    *,
    epsilon: float,
    ds_mla: bool = False,
    q_scale_inv: float | None = None,
    cache_scale_inv: float | None = None,
    positions: Array | None = None,
    cos_sin_cache: Array | None = None,
) -> None:
    """Compute ``mqa_q`` into ``out`` and write the latent rows into ``kv_cache``.

    Rounded to the inputs' type behind the norms and behind the first product, then float32 to the
    store. A token's bits depend on no other token. Inputs are trusted.

    Args:
        qkv_a: [B, >= 2112], ``ml_dtypes.bfloat16`` or float16, any row stride.
        q_norm_weight: [1536], same type.
        kv_norm_weight: [512], same type.
        w_q_b: [H * 192, 1536], same type.
        w_uk: [H, 128, 512], same type, any strides.
        kv_cache: [num_blocks, block_size, 576] of the inputs' type, of uint8 (e4m3 codes) with
            ``cache_scale_inv``, or [.., .., 656] uint8 with ``ds_mla``. Written in place.
        slot_mapping: [B] integers; a slot below 0 or past the cache is skipped.
        out: [B, H, 576] of the inputs' type, or uint8 (e4m3 codes) with ``q_scale_inv``. Written.
        epsilon: of both norms.
        ds_mla: the cache has 656-byte rows.
        q_scale_inv: multiplies the query before e4m3.
        cache_scale_inv: multiplies the cache row before e4m3.
        positions: [B] integers, clamped to the table.
        cos_sin_cache: [max_position, 64] float32, cosines then sines.
    """
    num_tokens, dtype = len(qkv_a), qkv_a.dtype
    num_heads, nope_dim, rank = w_uk.shape
    q_rank = len(q_norm_weight)
    q_a, kv_c_normed = np.empty((num_tokens, q_rank), dtype), np.empty((num_tokens, rank), dtype)
    q_kv_rmsnorm_reference(qkv_a, q_norm_weight, kv_norm_weight, q_a, kv_c_normed, epsilon)
    q = np.empty((num_tokens, len(w_q_b)), dtype)
    fused_a_gemm_reference(q_a, w_q_b, q)
    heads = q.reshape(num_tokens, num_heads, -1)
    ql_nope = np.empty((num_tokens, num_heads, rank), np.float32)
    mla_absorb_reference(heads[..., :nope_dim], w_uk, ql_nope)
    q_pe = heads[..., nope_dim:]
    k_pe_start = q_rank + rank
    mla_decode_reference(
        ql_nope,
        q_pe,
        kv_c_normed,
        qkv_a[:, k_pe_start : k_pe_start + q_pe.shape[-1]],
        kv_cache,
        slot_mapping,
        out,
        ds_mla=ds_mla,
        q_scale_inv=q_scale_inv,
        cache_scale_inv=cache_scale_inv,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
    )
