"""The fused-A GEMM on CPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BLOCK_ELEMENTS = 1 << 22
"""Elements of the weight that are widened at a time, 32 MiB in float64."""


def fused_a_gemm_reference(
    x: Array, weight: Array, out: Array, residual: Array | None = None
) -> None:
    """Compute ``out[m, n] = sum_k x[m, k] * weight[n, k]``, plus ``residual[m, n]`` where given.

    The sums are taken in float64 and rounded to float32, as which the kernel has them. The residual
    is added in float32, and the result rounded once to the type of ``out``. Each row of x is
    multiplied by itself, so that its bits depend on no other row, nor on how many there are. Inputs
    are trusted: the operation validates before it comes here.

    Args:
        x: [M, K], ``ml_dtypes.bfloat16``, any row stride.
        weight: [N, K], same type.
        out: [M, N], same type, any row stride. Written.
        residual: [M, N], same type, any row stride. May be ``out`` itself.
    """
    rows = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    wide_x = x.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, weight.shape[0], rows):
            block = slice(start, start + rows)
            wide_weight = weight[block].astype(np.float64)
            for token, row in enumerate(wide_x):
                sums = (wide_weight @ row).astype(np.float32)
                if residual is not None:
                    sums += residual[token, block].astype(np.float32)
                out[token, block] = sums
