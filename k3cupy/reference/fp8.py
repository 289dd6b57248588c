"""fp8 e4m3 on the CPU: the kernels' rules for values that do not fit and for NaN."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

_MAX = 448.0
_NAN_CODE = 0x7F


def to_e4m3(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the e4m3 codes of fp32 values: nearest even, saturating, NaN as 0x7F."""
    codes = np.clip(values, -_MAX, _MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(_NAN_CODE), codes)


def cast_e4m3(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the e4m3 codes of PyTorch's plain cast: as ``to_e4m3``, but NaN keeps its sign.

    PyTorch saturates since 2.12; before, values past 464 became NaN.
    """
    return to_e4m3(values) | np.where(np.signbit(values), np.uint8(0x80), np.uint8(0))


def tile_scales(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return 2^ceil(log2(max(amax / 448, 1e-4))) over the last axis, kept; NaN is left out of amax.

    The exponent comes from ``frexp``, which is exact at powers of two where a logarithm is not.
    """
    amax = np.fmax.reduce(np.abs(values), axis=-1, keepdims=True, initial=np.float32(0))
    wanted = np.maximum(amax / np.float32(_MAX), np.float32(1e-4))
    mantissa, exponent = np.frexp(wanted)
    power: npt.NDArray[Any] = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    return np.where(np.isinf(amax), amax, power).astype(np.float32)
