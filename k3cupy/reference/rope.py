"""RoPE on the CPU, and joining a part without position with a part that RoPE turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from k3cupy.reference.fp8 import to_e4m3

_ROPE_PAIRS = 32

Array = npt.NDArray[Any]


def angles_of(positions: Array | None, cos_sin_cache: Array | None) -> Array | None:
    """Return the table's rows for positions, clamped to the table; None without RoPE."""
    if positions is None or cos_sin_cache is None or not len(positions):
        return None
    rows: Array = cos_sin_cache[np.clip(positions, 0, len(cos_sin_cache) - 1)]
    return rows


def rotated(values: Array, angles: Array | None) -> npt.NDArray[np.float32]:
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


def concat(target: Array, nope: Array, rope: Array, angles: Array | None) -> None:
    """Join two parts without a change of type; what is not rotated is copied bit by bit."""
    width = nope.shape[-1]
    target[..., :width] = nope
    target[..., width:] = rope if angles is None else rotated(rope, angles).astype(target.dtype)


def concat_quant(
    target: Array, nope: Array, rope: Array, angles: Array | None, scale_inv: float
) -> None:
    """Join two parts as e4m3 codes of ``x * scale_inv``, rounded once, after RoPE."""
    width, scale = nope.shape[-1], np.float32(scale_inv)
    target[..., :width] = to_e4m3(nope.astype(np.float32) * scale)
    target[..., width:] = to_e4m3(rotated(rope, angles) * scale)
