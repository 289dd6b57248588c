"""Tensor maps: how the copy engine of sm_90 and newer finds a matrix, as a kernel argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3cupy.runtime import devices, toolchain

_BOX_COLUMNS = 64
"""Columns of a box, 128 bytes: what the swizzle of 128 bytes can have."""

_ELEMENT_BYTES = 2
_KEPT = 64
"""Maps that a plan keeps: frameworks hand out the same few addresses again and again."""


@dataclass(frozen=True)
class Box:
    """A matrix of 16-bit values, and the part of it that one copy takes.

    Attributes:
        rows: of the matrix; what lies outside arrives as zeros.
        columns: the same.
        row_stride: elements between rows.
        box_rows: rows of a copy; its columns are 64, and its rows lie in shared memory with the
            swizzle of 128 bytes.
    """

    rows: int
    columns: int
    row_stride: int
    box_rows: int


class _Matrix:
    """What cuda-core reads of a matrix in GPU memory."""

    def __init__(self, box: Box, address: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<u2",
            "shape": (box.rows, box.columns),
            "strides": (box.row_stride * _ELEMENT_BYTES, _ELEMENT_BYTES),
            "data": (address, False),
        }


def mapper(box: Box, device: int) -> Callable[[int], Any]:
    """Return what makes the map of a matrix from its address, and keeps those of late.

    Args:
        box: the matrix.
        device: GPU ordinal.
    """
    core = toolchain.cuda_core()
    defaults = core.TensorMapDescriptorOptions  # their types are the public way to the enumerations
    options = core.TensorMapDescriptorOptions(
        box_dim=(box.box_rows, _BOX_COLUMNS),
        swizzle=type(defaults.swizzle).SWIZZLE_128B,
        l2_promotion=type(defaults.l2_promotion).L2_256B,
    )

    @functools.lru_cache(maxsize=_KEPT)
    def map_at(address: int) -> Any:
        with devices.current(device):
            view = core.utils.StridedMemoryView.from_any_interface(
                _Matrix(box, address), stream_ptr=-1
            )
            return view.as_tensor_map(options=options)

    return map_at
