"""The MLA decode epilogue on CPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from k3cupy.reference.fp8 import tile_scales, to_e4m3

_ROPE_PAIRS = 32
_TILE = 128

Array = npt.NDArray[Any]


def mla_decode_reference(
    ql_nope: Array,
    q_pe: Array,
    kv_c_normed: Array,
    k_pe: Array,
    kv_cache: Array,
    slot_mapping: Array,
    out: Array,
    *,
    ds_mla: bool = False,
    q_scale_inv: float | None = None,
    cache_scale_inv: float | None = None,
    positions: Array | None = None,
    cos_sin_cache: Array | None = None,
) -> None:
    """Compute ``mqa_q`` into ``out`` and write the latent rows into ``kv_cache``.

    Inputs are trusted: the operation validates before it comes here.

    Args:
        ql_nope: [B, H, 512], ``ml_dtypes.bfloat16`` or ``float16``.
        q_pe: [B, H, 64], same type.
        kv_c_normed: [B, 512], same type.
        k_pe: [B, 64], same type.
        kv_cache: [num_blocks, block_size, 576] of the inputs' type, of uint8 (e4m3 codes) with
            ``cache_scale_inv``, or [.., .., 656] uint8 with ``ds_mla``. Written in place.
        slot_mapping: [B] integers; a slot below 0 or past the cache is skipped.
        out: [B, H, 576] of the inputs' type, or uint8 (e4m3 codes) with ``q_scale_inv``. Written.
        ds_mla: the cache has 656-byte rows.
        q_scale_inv: multiplies the query before e4m3.
        cache_scale_inv: multiplies the cache row before e4m3.
        positions: [B] integers, clamped to the table.
        cos_sin_cache: [max_position, 64] float32, cosines then sines.
    """
    rank = ql_nope.shape[-1]
    angles = None
    if positions is not None and cos_sin_cache is not None and len(positions):
        angles = cos_sin_cache[np.clip(positions, 0, len(cos_sin_cache) - 1)]
    query_angles = None if angles is None else angles[:, None, :]
    with np.errstate(invalid="ignore", over="ignore"):
        if q_scale_inv is None:
            _store_same(out, ql_nope, q_pe, query_angles)
        else:
            scale = np.float32(q_scale_inv)
            out[..., :rank] = to_e4m3(ql_nope.astype(np.float32) * scale)
            out[..., rank:] = to_e4m3(_rotated(q_pe, query_angles) * scale)

        kept, blocks, offsets = _places(slot_mapping, kv_cache)
        latent, rope = kv_c_normed[kept], k_pe[kept]
        row_angles = None if angles is None else angles[kept]
        rows = np.empty((len(latent), kv_cache.shape[-1]), kv_cache.dtype)
        if ds_mla:
            _fill_ds_mla(rows, latent, rope, row_angles)
        elif cache_scale_inv is None:
            _store_same(rows, latent, rope, row_angles)
        else:
            scale = np.float32(cache_scale_inv)
            rows[:, :rank] = to_e4m3(latent.astype(np.float32) * scale)
            rows[:, rank:] = to_e4m3(_rotated(rope, row_angles) * scale)
    kv_cache[blocks, offsets] = rows


def _rotated(values: Array, angles: Array | None) -> npt.NDArray[np.float32]:
    """Turn neighbouring pairs by their angles in float32; without angles only widen."""
    wide = values.astype(np.float32)
    if angles is None:
        return wide
    cosine, sine = angles[..., :_ROPE_PAIRS], angles[..., _ROPE_PAIRS:]
    first, second = wide[..., 0::2], wide[..., 1::2]
    turned = np.empty_like(wide)
    turned[..., 0::2] = first * cosine - second * sine
    turned[..., 1::2] = first * sine + second * cosine
    return turned


def _store_same(target: Array, nope: Array, rope: Array, angles: Array | None) -> None:
    """Join two parts without a change of type; what is not rotated is copied bit by bit."""
    rank = nope.shape[-1]
    target[..., :rank] = nope
    target[..., rank:] = rope if angles is None else _rotated(rope, angles).astype(target.dtype)


def _places(slot_mapping: Array, kv_cache: Array) -> tuple[Array, Array, Array]:
    """Return which tokens are written, and their block and offset."""
    num_blocks, block_size = kv_cache.shape[:2]
    kept = np.flatnonzero((slot_mapping >= 0) & (slot_mapping < num_blocks * block_size))
    slots = slot_mapping[kept].astype(np.int64)
    divisor = max(block_size, 1)
    return kept, slots // divisor, slots % divisor


def _fill_ds_mla(rows: Array, latent: Array, rope: Array, angles: Array | None) -> None:
    """Fill 656-byte rows: 512 codes, four tile scales, 64 values of the inputs' type."""
    count, rank = latent.shape
    tiles = latent.astype(np.float32).reshape(count, rank // _TILE, _TILE)
    scales = tile_scales(tiles)
    rows[:, :rank] = to_e4m3(tiles / scales).reshape(count, rank)
    scale_bytes = np.ascontiguousarray(scales[..., 0]).view(np.uint8)
    rope_start = rank + scale_bytes.shape[1]
    rows[:, rank:rope_start] = scale_bytes
    turned = rope if angles is None else _rotated(rope, angles).astype(rope.dtype)
    rows[:, rope_start:] = np.ascontiguousarray(turned).view(np.uint8)
