"""The RMSNorms behind the first projection of an MLA layer, on CPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Return ``x * rsqrt(mean(x^2) + epsilon) * weight`` over the last axis, in the type of x.

    In float32, rounded once. Each row is summed by itself, so that its bits depend on no other.

    Args:
        x: [B, width], ``ml_dtypes.bfloat16`` or float16.
        weight: [width], same type.
        epsilon: added to the mean.
    """
    wide = x.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        mean = np.mean(wide * wide, axis=-1, keepdims=True, dtype=np.float32)
        scale = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
        normed: Array = (wide * scale * weight.astype(np.float32)).astype(x.dtype)
    return normed


def q_kv_rmsnorm_reference(
    qkv_a: Array, q_weight: Array, kv_weight: Array, q: Array, kv_c_normed: Array, epsilon: float
) -> None:
    """Norm the two parts of each row; inputs are trusted.

    Args:
        qkv_a: [B, >= 2112], ``ml_dtypes.bfloat16`` or float16, any row stride.
        q_weight: [1536], same type.
        kv_weight: [512], same type.
        q: [B, 1536], same type. Written.
        kv_c_normed: [B, 512], same type. Written.
        epsilon: of both norms.
    """
    split = q.shape[1]
    q[...] = rms_norm(qkv_a[:, :split], q_weight, epsilon)
    latent = qkv_a[:, split : split + kv_c_normed.shape[1]]
    kv_c_normed[...] = rms_norm(latent, kv_weight, epsilon)
