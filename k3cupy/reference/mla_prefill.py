"""The MLA prefill and context epilogues on CPU memory.

Inputs are trusted: the operations validate before they come here. T tokens, H heads; e4m3 tensors
are uint8 arrays of their codes; 16-bit ones are ``ml_dtypes.bfloat16`` or ``float16``. What needs
float32 copies is done in slices of tokens, so that a long prompt does not need several times its
own memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from k3cupy.reference.fp8 import cast_e4m3, to_e4m3
from k3cupy.reference.latent_row import insert_rows
from k3cupy.reference.rope import angles_of, concat, concat_quant, rotated

_SLICE_ELEMENTS = 1 << 22

Array = npt.NDArray[Any]


def key_concat_reference(
    q: Array,
    k_nope: Array,
    k_pe: Array,
    kv_c_normed: Array,
    kv_cache: Array,
    slot_mapping: Array,
    k: Array,
    *,
    ds_mla: bool = False,
    positions: Array | None = None,
    cos_sin_cache: Array | None = None,
) -> None:
    """Join the keys, turn the last 64 columns of the query in place, write the cache rows.

    Args:
        q: [T, H, 192]. Written in its last 64 columns with positions, else left alone.
        k_nope: [T, H, 128].
        k_pe: [T, 64].
        kv_c_normed: [T, 512].
        kv_cache: [num_blocks, block_size, 576] of the inputs' type, or [.., .., 656] uint8 with
            ``ds_mla``. Written in place.
        slot_mapping: [T] integers; a slot below 0 or past the cache is skipped.
        k: [T, H, 192]. Written.
        ds_mla: the cache has 656-byte rows.
        positions: [T] integers, clamped to the table.
        cos_sin_cache: [max_position, 64] float32, cosines then sines.
    """
    angles = angles_of(positions, cos_sin_cache)
    nope_dim = k_nope.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        for part in _slices(q):
            turns = None if angles is None else angles[part]
            _concat_heads(k[part], k_nope[part], k_pe[part], turns)
            if turns is not None:
                q_pe = q[part, :, nope_dim:]
                q_pe[...] = rotated(q_pe, turns[:, None, :]).astype(q.dtype)
        insert_rows(
            kv_cache, slot_mapping, kv_c_normed, k_pe, angles, ds_mla=ds_mla, scale_inv=None
        )


def qkv_quant_reference(
    q: Array,
    k_nope: Array,
    k_pe: Array,
    kv_c_normed: Array,
    v: Array,
    kv_cache: Array,
    slot_mapping: Array,
    q8: Array,
    k8: Array,
    v8: Array,
    *,
    q_scale_inv: float,
    k_scale_inv: float,
    v_scale_inv: float,
    cache_scale_inv: float,
    positions: Array | None = None,
    cos_sin_cache: Array | None = None,
) -> None:
    """Cast query, key and value to e4m3, each with its own scale, and write e4m3 cache rows.

    Args:
        q: [T, H, 192], not written.
        k_nope: [T, H, 128].
        k_pe: [T, 64].
        kv_c_normed: [T, 512].
        v: [T, H, 128].
        kv_cache: [num_blocks, block_size, 576] codes. Written in place.
        slot_mapping: [T] integers; a slot below 0 or past the cache is skipped.
        q8: [T, H, 192] codes. Written.
        k8: [T, H, 192] codes. Written.
        v8: [T, H, 128] codes. Written.
        q_scale_inv: multiplies the query before the cast.
        k_scale_inv: multiplies the key.
        v_scale_inv: multiplies the value.
        cache_scale_inv: multiplies the cache row.
        positions: [T] integers, clamped to the table.
        cos_sin_cache: [max_position, 64] float32, cosines then sines.
    """
    angles = angles_of(positions, cos_sin_cache)
    nope_dim = k_nope.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        for part in _slices(q):
            turns = None if angles is None else angles[part, None, :]
            q_nope, q_pe = q[part, :, :nope_dim], q[part, :, nope_dim:]
            concat_quant(q8[part], q_nope, q_pe, turns, q_scale_inv)
            concat_quant(k8[part], k_nope[part], k_pe[part, None, :], turns, k_scale_inv)
            v8[part] = to_e4m3(v[part].astype(np.float32) * np.float32(v_scale_inv))
        insert_rows(
            kv_cache,
            slot_mapping,
            kv_c_normed,
            k_pe,
            angles,
            ds_mla=False,
            scale_inv=cache_scale_inv,
        )


def kv_concat_reference(k_nope: Array, k_pe: Array, k: Array) -> None:
    """Join the keys of a context: ``k_nope`` [T, H, 128] and ``k_pe`` [T, 64] to [T, H, 192]."""
    _concat_heads(k, k_nope, k_pe, None)


def kv_concat_quant_reference(k_nope: Array, k_pe: Array, v: Array, k8: Array, v8: Array) -> None:
    """Join the keys of a context and cast keys and values to e4m3 without a scale.

    Args:
        k_nope: [T, H, 128].
        k_pe: [T, 64], 16-bit like ``k_nope``, or codes, which are copied.
        v: [T, H, 128].
        k8: [T, H, 192] codes. Written.
        v8: [T, H, 128] codes. Written.
    """
    nope_dim = k_nope.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        codes = k_pe if k_pe.dtype == np.uint8 else cast_e4m3(k_pe.astype(np.float32))
        for part in _slices(k_nope):
            k8[part, :, :nope_dim] = cast_e4m3(k_nope[part].astype(np.float32))
            k8[part, :, nope_dim:] = codes[part, None, :]
            v8[part] = cast_e4m3(v[part].astype(np.float32))


def _concat_heads(k: Array, k_nope: Array, k_pe: Array, angles: Array | None) -> None:
    """Join every head's key with the part that all heads share."""
    concat(k, k_nope, k_pe[:, None, :], None if angles is None else angles[:, None, :])


def _slices(like: Array) -> Iterator[slice]:
    """Cut the tokens of a [T, H, width] array into parts of a bounded number of elements."""
    step = max(1, _SLICE_ELEMENTS // max(1, like[:1].size))
    for start in range(0, len(like), step):
        yield slice(start, start + step)
