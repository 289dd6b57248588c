"""The MLA decode epilogue on CPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from k3cupy.reference.latent_row import insert_rows
from k3cupy.reference.rope import angles_of, concat, concat_quant

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
    angles = angles_of(positions, cos_sin_cache)
    query_angles = None if angles is None else angles[:, None, :]
    with np.errstate(invalid="ignore", over="ignore"):
        if q_scale_inv is None:
            concat(out, ql_nope, q_pe, query_angles)
        else:
            concat_quant(out, ql_nope, q_pe, query_angles, q_scale_inv)
        insert_rows(
            kv_cache,
            slot_mapping,
            kv_c_normed,
            k_pe,
            angles,
            ds_mla=ds_mla,
            scale_inv=cache_scale_inv,
        )
