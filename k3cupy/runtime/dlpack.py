"""Reading the header of a DLPack capsule: where a tensor is and how it is laid out.

The libraries that import DLPack build an array of their own, which refuses the types that this
project lives on (cupy.from_dlpack and cuda.core both refuse float8, numpy also bfloat16) and which
needs a GPU stack even for CPU tensors. k3cupy only needs the numbers, so it reads the published
structure (dlpack.h 1.1) and lets the capsule free itself: the memory belongs to the tensor that the
caller holds.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

CPU_DEVICES = {1: "cpu", 3: "cuda_host"}
CUDA_DEVICES = {2: "cuda", 13: "cuda_managed"}
_READ_ONLY = 1
_COPIED = 2

# (type code, bits) -> the name used everywhere in k3cupy.
_DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype = ctypes.c_char_p
_get_name.argtypes = [ctypes.py_object]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class Header:
    """What a DLPack capsule says. Strides count elements; what is written into a copy is lost, so a
    copy counts as read-only."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_type: str
    device_index: int
    readonly: bool


def export(obj: Any, stream: int | None) -> Any:
    """Ask a producer for a capsule, newest protocol first.

    Args:
        obj: an object with ``__dlpack__`` and ``__dlpack_device__``.
        stream: the CUDA stream that will use the memory, which the producer makes wait for its own
            pending work; None for memory on the CPU.
    """
    # DLPack's number for the legacy default stream, whose handle is 0, is 1.
    keywords: dict[str, Any] = {} if stream is None else {"stream": stream or 1}
    try:
        return obj.__dlpack__(max_version=(1, 1), **keywords)
    except TypeError:
        return obj.__dlpack__(**keywords)


def read_header(capsule: Any) -> Header:
    """Read a capsule that nobody has consumed yet; the capsule stays valid.

    Raises:
        BufferError: the capsule is not DLPack, has lanes or a device that k3cupy does not know.
    """
    name = _get_name(capsule)
    readonly = False
    if name == b"dltensor_versioned":
        managed = _ManagedVersioned.from_address(_get_pointer(capsule, name))
        if managed.major != 1:
            raise BufferError(f"DLPack version {managed.major}.{managed.minor}, expected 1.x")
        readonly = bool(managed.flags & (_READ_ONLY | _COPIED))
        tensor = managed.tensor
    elif name == b"dltensor":
        tensor = _Managed.from_address(_get_pointer(capsule, name)).tensor
    else:
        raise BufferError(f"capsule named {name!r}, expected an unused DLPack capsule")
    kind = (tensor.dtype.code, tensor.dtype.bits)
    if tensor.dtype.lanes != 1:
        raise BufferError(f"DLPack type with {tensor.dtype.lanes} lanes, expected 1")
    device = tensor.device.type
    device_type = CPU_DEVICES.get(device) or CUDA_DEVICES.get(device)
    if device_type is None:
        raise BufferError(f"DLPack device type {device}, expected CPU or CUDA")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.ndim < 0 or any(extent < 0 for extent in shape):
        raise BufferError(f"DLPack shape {shape} of rank {tensor.ndim}, expected none negative")
    if tensor.strides:
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
    else:
        strides = packed_strides(shape)
    return Header(
        address=tensor.data + tensor.byte_offset if tensor.data else 0,
        shape=shape,
        strides=strides,
        dtype=_DTYPES.get(kind, f"dlpack_{kind[0]}_{kind[1]}bit"),
        device_type=device_type,
        device_index=tensor.device.index,
        readonly=readonly,
    )


def packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a packed row-major array."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
