"""Rows of the paged latent cache on the CPU, in the three formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from k3cupy.reference.fp8 import tile_scales, to_e4m3
from k3cupy.reference.rope import concat, concat_quant, rotated

_TILE = 128

Array = npt.NDArray[Any]


def insert_rows(
    kv_cache: Array,
    slot_mapping: Array,
    latent: Array,
    rope: Array,
    angles: Array | None,
    *,
    ds_mla: bool,
    scale_inv: float | None,
) -> None:
    """Write one cache row a token; where tokens share a slot, the last one's row stays.

    Args:
        kv_cache: [num_blocks, block_size, row], written in place.
        slot_mapping: [B] integers; a slot below 0 or past the cache is skipped.
        latent: [B, 512], the part without position.
        rope: [B, 64], to be turned.
        angles: from ``angles_of``, or None.
        ds_mla: the cache has 656-byte rows.
        scale_inv: makes e4m3 rows of 576 codes.
    """
    num_blocks, block_size = kv_cache.shape[:2]
    kept = np.flatnonzero((slot_mapping >= 0) & (slot_mapping < num_blocks * block_size))
    slots = slot_mapping[kept].astype(np.int64)
    latent, rope = latent[kept], rope[kept]
    row_angles = None if angles is None else angles[kept]
    rows = np.empty((len(kept), kv_cache.shape[-1]), kv_cache.dtype)
    if ds_mla:
        _fill_ds_mla(rows, latent, rope, row_angles)
    elif scale_inv is None:
        concat(rows, latent, rope, row_angles)
    else:
        concat_quant(rows, latent, rope, row_angles, scale_inv)
    divisor = max(block_size, 1)
    kv_cache[slots // divisor, slots % divisor] = rows


def _fill_ds_mla(rows: Array, latent: Array, rope: Array, angles: Array | None) -> None:
    """Fill 656-byte rows: 512 codes, four tile scales, 64 values of the inputs' type."""
    count, rank = latent.shape
    tiles = latent.astype(np.float32).reshape(count, rank // _TILE, _TILE)
    scales = tile_scales(tiles)
    rows[:, :rank] = to_e4m3(tiles / scales).reshape(count, rank)
    scale_bytes = np.ascontiguousarray(scales[..., 0]).view(np.uint8)
    rope_start = rank + scale_bytes.shape[1]
    rows[:, rank:rope_start] = scale_bytes
    turned = rope if angles is None else rotated(rope, angles).astype(rope.dtype)
    rows[:, rope_start:] = np.ascontiguousarray(turned).view(np.uint8)
