"""Headers of DLPack capsules: of real producers, and of capsules made by hand to be unusual."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import helpers
import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import k3cupy
from k3cupy.runtime import dlpack, producers, tensors

# --- Capsules made by hand, after the published dlpack.h -----------------------------------------


class CTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class CVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", CTensor),
    ]


class COld(ctypes.Structure):
    _fields_ = [("tensor", CTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def int64s(values: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


@dataclass
class Handmade:
    """A producer whose capsule says what the test wants."""

    shape: tuple[int, ...] = (2, 3)
    strides: tuple[int, ...] | None = (3, 1)
    dtype: tuple[int, int, int] = (2, 32, 1)
    device: tuple[int, int] = (1, 0)
    data: int | None = 0x1000
    byte_offset: int = 0
    version: tuple[int, int] | None = (1, 1)
    flags: int = 0
    name: bytes | None = None
    alive: list[Any] = field(default_factory=list)

    def capsule(self) -> Any:
        shape = int64s(self.shape)
        strides = None if self.strides is None else int64s(self.strides)
        tensor = CTensor(
            self.data, *self.device, len(self.shape), *self.dtype, shape, strides, self.byte_offset
        )
        managed: Any
        if self.version is None:
            managed, name = COld(tensor, None, None), b"dltensor"
        else:
            managed = CVersioned(*self.version, None, None, self.flags, tensor)
            name = b"dltensor_versioned"
        name = self.name or name
        self.alive += [shape, strides, managed, name]
        return _new_capsule(ctypes.addressof(managed), name, None)

    def header(self) -> dlpack.Header:
        return dlpack.read_header(self.capsule())


VERSIONS = pytest.mark.parametrize("version", [None, (1, 0), (1, 3)], ids=str)


@VERSIONS
def test_every_field(version: tuple[int, int] | None) -> None:
    made = Handmade((4, 5), (7, 1), (4, 16, 1), (2, 3), 0x7F0000000000, 48, version)
    assert made.header() == dlpack.Header(
        address=0x7F0000000000 + 48,
        shape=(4, 5),
        strides=(7, 1),
        dtype="bfloat16",
        device_type="cuda",
        device_index=3,
        readonly=False,
    )


@VERSIONS
def test_no_strides_means_packed(version: tuple[int, int] | None) -> None:
    assert Handmade((2, 3, 4), None, version=version).header().strides == (12, 4, 1)
    assert Handmade((), None, version=version).header().strides == ()
    assert Handmade((3, 0, 4), None, version=version).header().shape == (3, 0, 4)


def test_address_of_empty_tensors() -> None:
    assert Handmade((0, 3), data=None).header().address == 0
    assert Handmade((0, 3), byte_offset=16).header().address == 0x1010


@VERSIONS
def test_case30_an_offset_into_nothing_is_no_address(version: tuple[int, int] | None) -> None:
    made = Handmade((8, 128), None, (4, 16, 1), data=None, byte_offset=64, version=version)
    assert made.header().address == 0
    weight = torch.zeros(16, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"\Ax: expected a tensor with memory of its own, got "):
        k3cupy.fused_a_gemm(Exporter(made), weight)


@pytest.mark.parametrize(
    "change", [{"byte_offset": 2**64 - 16}, {"strides": (2**62, 1)}], ids=["address", "reach"]
)
def test_case30_an_end_that_is_no_address(change: dict[str, Any]) -> None:
    made = Handmade((8, 128), **{"strides": None, "dtype": (4, 16, 1), **change})
    weight = torch.zeros(16, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"\Ax: expected a tensor that ends below 2\^63, got "):
        k3cupy.fused_a_gemm(Exporter(made), weight)


@pytest.mark.parametrize(("flags", "readonly"), [(0, False), (1, True), (2, True), (3, True)])
def test_read_only_and_copied_flags(flags: int, readonly: bool) -> None:
    """What is written into a copy never reaches the caller, so it counts as read-only."""
    assert Handmade(flags=flags).header().readonly is readonly


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ((0, 8), "int8"),
        ((0, 32), "int32"),
        ((0, 64), "int64"),
        ((1, 8), "uint8"),
        ((1, 64), "uint64"),
        ((2, 16), "float16"),
        ((2, 32), "float32"),
        ((4, 16), "bfloat16"),
        ((6, 8), "bool"),
        ((10, 8), "float8_e4m3fn"),
        ((11, 8), "float8_e4m3fnuz"),
        ((12, 8), "float8_e5m2"),
        ((13, 8), "float8_e5m2fnuz"),
    ],
)
def test_types(dtype: tuple[int, int], name: str) -> None:
    assert Handmade(dtype=(*dtype, 1)).header().dtype == name
    assert tensors.itemsize(name) * 8 == dtype[1]


@pytest.mark.parametrize("dtype", [(5, 64), (17, 4), (99, 8)])
def test_unknown_types_have_a_name_that_no_operation_accepts(dtype: tuple[int, int]) -> None:
    name = Handmade(dtype=(*dtype, 1)).header().dtype
    assert name == f"dlpack_{dtype[0]}_{dtype[1]}bit"
    assert tensors.itemsize(name) == 0


@pytest.mark.parametrize(
    ("device", "name"), [(1, "cpu"), (2, "cuda"), (3, "cuda_host"), (13, "cuda_managed")]
)
def test_devices(device: int, name: str) -> None:
    assert Handmade(device=(device, 1)).header().device_type == name


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": (2, 32, 4)}, "4 lanes, expected 1"),
        ({"shape": (-8, 3)}, r"\(-8, 3\) of rank 2, expected none negative"),
        ({"device": (10, 0)}, "device type 10, expected CPU or CUDA"),
        ({"device": (4, 0), "version": None}, "device type 4"),
        ({"version": (2, 0)}, "version 2.0, expected 1.x"),
        ({"version": (0, 9)}, "version 0.9"),
        ({"name": b"used_dltensor"}, "used_dltensor"),
        ({"name": b"used_dltensor_versioned"}, "expected an unused DLPack capsule"),
        ({"name": b"arrow_array"}, "arrow_array"),
    ],
)
def test_capsules_that_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(BufferError, match=text):
        Handmade(**change).header()


def test_what_is_no_capsule_is_refused() -> None:
    for thing in (None, 5, np.zeros(3)):
        with pytest.raises((BufferError, ValueError)):
            dlpack.read_header(thing)


@dataclass
class Exporter:
    """A tensor-like object around a hand-made capsule."""

    made: Handmade

    def __dlpack__(self, **_: Any) -> Any:
        return self.made.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.made.device


@pytest.mark.parametrize(
    "change", [{"dtype": (2, 32, 2)}, {"version": (2, 1)}, {"name": b"used_dltensor"}], ids=str
)
def test_a_refused_export_names_the_argument(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"^k_pe: expected a tensor with an exportable layout, got"):
        producers.view(Exporter(Handmade(**change)), "k_pe")


@dataclass
class Failing:
    """A producer whose own code fails."""

    error: Exception

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AttributeError("gone"), "gone"),
        (KeyError(7), "7"),
        (AssertionError(), "AssertionError"),
        (TypeError("no export"), "no export"),
    ],
    ids=repr,
)
def test_whatever_a_producer_raises_names_the_argument(error: Exception, told: str) -> None:
    expected = "x: expected a tensor with an exportable layout, got "
    with pytest.raises(TypeError) as caught:
        k3cupy.fused_a_gemm(Failing(error), torch.zeros(16, 128, dtype=torch.bfloat16))
    assert str(caught.value) == expected + told
    assert caught.value.__cause__ is error


# --- Real producers ------------------------------------------------------------------------------

TORCH_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)


def check_header(header: dlpack.Header, t: torch.Tensor) -> None:
    assert header.address == t.data_ptr()
    assert header.shape == tuple(t.shape)
    if t.numel():
        used = [n > 1 for n in t.shape]
        got = [s for s, u in zip(header.strides, used, strict=True) if u]
        assert got == [s for s, u in zip(t.stride(), used, strict=True) if u]
    assert header.dtype == str(t.dtype).removeprefix("torch.")
    assert header.device_type == t.device.type
    assert not header.readonly


@pytest.mark.parametrize("dtype", [*TORCH_TYPES, *FLOAT8], ids=str)
def test_torch(dtype: torch.dtype) -> None:
    """Slices carry their offset in the address; empty tensors are everyday input."""
    base = torch.zeros(6, 8, 16).to(dtype)
    for t in (base, base[2:, 1:, 3:], base.transpose(0, 1), base[:, :, ::2], base[0:0], base[1, 1]):
        try:
            capsule = dlpack.export(t, None)
        except (BufferError, RuntimeError, ValueError) as error:
            assert dtype in FLOAT8, "only old releases of PyTorch do not export float8"
            pytest.skip(f"this PyTorch does not export it: {error}")
        check_header(dlpack.read_header(capsule), t)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*TORCH_TYPES, *FLOAT8], ids=str)
def test_torch_on_the_gpu(dtype: torch.dtype) -> None:
    base = torch.zeros(6, 8, 16, device="cuda").to(dtype)
    for t in (base, base[2:, 1:, 3:], base[0:0]):
        try:
            capsule = dlpack.export(t, torch.cuda.current_stream().cuda_stream or 1)
        except (BufferError, RuntimeError, ValueError) as error:
            pytest.skip(f"this PyTorch does not export it: {error}")
        check_header(dlpack.read_header(capsule), t)


def test_numpy() -> None:
    base = np.zeros((6, 8), np.float16)
    header = dlpack.read_header(dlpack.export(base[1:, 3:], None))
    assert header.address == base.ctypes.data + 2 * (8 + 3)
    assert (header.shape, header.strides, header.dtype) == ((5, 5), (8, 1), "float16")
    assert not header.readonly
    assert dlpack.read_header(dlpack.export(base[0:0], None)).shape == (0, 8)


def test_numpy_that_is_read_only() -> None:
    """The flag needs the newer protocol; the older one refuses to export."""
    base = np.zeros((6, 8), np.float16)
    base.flags.writeable = False
    try:
        capsule = dlpack.export(base, None)
    except BufferError:
        pytest.skip("this NumPy does not export read-only arrays")
    assert dlpack.read_header(capsule).readonly


def test_the_older_protocol() -> None:
    t = torch.zeros(3, 5, dtype=torch.bfloat16)[1:, 2:]
    check_header(dlpack.read_header(dlpack.export(helpers.OldProducer(t), None)), t)


def test_reading_leaves_the_capsule_usable() -> None:
    t = torch.arange(6.0)
    capsule = dlpack.export(t, None)
    first = dlpack.read_header(capsule)
    assert dlpack.read_header(capsule) == first
    again = torch.utils.dlpack.from_dlpack(capsule)
    assert again.data_ptr() == t.data_ptr()
    with pytest.raises(BufferError, match="used_dltensor"):
        dlpack.read_header(capsule)


def test_reading_frees_nothing_and_keeps_nothing() -> None:
    """The capsule owns a reference to the tensor; reading takes none and drops none."""
    array = np.zeros(1000)
    for _ in range(100):
        dlpack.read_header(dlpack.export(array, None))
    array[:] = 1
    assert array.sum() == 1000


@given(st.lists(st.integers(0, 9), max_size=5))
def test_packed_strides(shape: list[int]) -> None:
    """As NumPy lays out an array of bytes; extents of 0 leave the strides of the others finite."""
    got = dlpack.packed_strides(tuple(shape))
    if 0 in shape:
        assert len(got) == len(shape)
        assert all(stride > 0 for stride in got)
    else:
        assert got == np.zeros(shape, np.uint8).strides
