"""The value up-projection behind MLA attention, on CPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def mla_value_reference(latent: Array, w_uv: Array, out: Array, gate: Array | None = None) -> None:
    """Compute ``latent[b, h] @ w_uv[h]``, times the sigmoid of the gate where there is one.

    The sums are taken in float64 and rounded to float32, as which the kernel has them; the gate is
    float32, and the result is rounded once to the type of ``out``. Each row is multiplied by
    itself, so that its bits depend on no other row. Inputs are trusted.

    Args:
        latent: [B, H, 512], ``ml_dtypes.bfloat16`` or float16.
        w_uv: [H, 512, 128], same type, any strides.
        out: [B, H * 128], same type. Written.
        gate: [B, H * 128], same type.
    """
    num_heads, _, width = w_uv.shape
    with np.errstate(invalid="ignore", over="ignore"):
        for head in range(num_heads):
            columns = slice(head * width, (head + 1) * width)
            weight = w_uv[head].astype(np.float64)
            for token, row in enumerate(latent[:, head].astype(np.float64)):
                value = (row @ weight).astype(np.float32)
                if gate is not None:
                    value /= 1 + np.exp(-gate[token, columns].astype(np.float32))
                out[token, columns] = value


def mla_absorb_reference(q_nope: Array, w_uk: Array, out: Array) -> None:
    """Compute ``q_nope[b, h] @ w_uk[h]``, summed as the value is, rounded to the type of ``out``.

    Args:
        q_nope: [B, H, 128], ``ml_dtypes.bfloat16`` or float16.
        w_uk: [H, 128, 512], same type, any strides.
        out: [B, H, 512], same type or float32. Written.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        for head, weight in enumerate(w_uk):
            wide = weight.astype(np.float64)
            for token, row in enumerate(q_nope[:, head].astype(np.float64)):
                out[token, head] = (row @ wide).astype(np.float32)
