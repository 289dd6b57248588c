"""A view of a tensor, whoever made it: where it is and how it is laid out."""

from __future__ import annotations

import ctypes
import numbers
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from k3cupy.runtime import toolchain
from k3cupy.runtime.dlpack import packed_strides
from k3cupy.runtime.errors import reject

if TYPE_CHECKING:
    import numpy.typing as npt

ALIGNMENT = 16
"""Bytes of the widest access of the kernels; a signature holds the address modulo this."""


@dataclass(frozen=True)
class TensorView:
    """A tensor's place and layout; strides count elements.

    Attributes:
        address: of the first element, byte offset included; 0 is fine for an empty tensor.
        shape: extents.
        strides: in elements, one per extent.
        dtype: the field's name for the type, for example ``"bfloat16"`` or ``"float8_e4m3fn"``.
        itemsize: bytes of an element, 0 for a type without a known size.
        device_type: ``"cpu"``, ``"cuda"``, ``"cuda_host"`` (pinned) or ``"cuda_managed"``.
        device_index: ordinal of the CUDA device, 0 on the CPU.
        readonly: the producer forbids writing.
        requires_grad: autograd follows this tensor.
        framework: ``"torch"``, ``"cupy"``, ``"numpy"``, ``"jax"`` or ``"dlpack"``.
        room: bytes from the address to the end of the storage, which PyTorch lets shrink below its
            tensors; None where nothing can.
        owner: what keeps the memory alive where the tensor itself may not: its DLPack capsule, for
            a producer that exports a copy.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device_type: str
    device_index: int
    readonly: bool
    requires_grad: bool
    framework: str
    room: int | None = None
    owner: object = field(default=None, compare=False, repr=False)

    @property
    def is_cuda(self) -> bool:
        """Whether kernels can read it."""
        return self.device_type in ("cuda", "cuda_managed")

    @property
    def device(self) -> str:
        """The device in words, ``"cpu"`` or ``"cuda:1"``."""
        if self.device_type == "cpu":
            return "cpu"
        if self.device_type == "cuda_host":
            return "cpu (pinned)"
        return f"cuda:{self.device_index}"

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last; strides must not be negative."""
        return span(self.shape, self.strides, self.itemsize)


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes from the first element of a layout to the end of the last."""
    if 0 in shape:
        return 0
    return (sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1) * itemsize


def packed_view(like: TensorView, shape: tuple[int, ...], dtype: str) -> TensorView:
    """Describe a new, contiguous tensor of the framework and the device of another one."""
    return TensorView(
        address=ALIGNMENT,
        shape=shape,
        strides=packed_strides(shape),
        dtype=dtype,
        itemsize=itemsize(dtype),
        device_type=like.device_type,
        device_index=like.device_index,
        readonly=False,
        requires_grad=False,
        framework=like.framework,
    )


def columns(v: TensorView, start: int, stop: int) -> TensorView:
    """Describe some columns of a tensor, that is of its last axis."""
    address = v.address + start * v.strides[-1] * v.itemsize
    return replace(v, address=address, shape=(*v.shape[:-1], stop - start), room=None, owner=None)


def layout(v: TensorView) -> str:
    """Say in words what two tensors must agree on to be taken by one plan."""
    past = "no memory" if not v.address else f"an address {v.address % ALIGNMENT} past a multiple"
    grad = ", requires grad" if v.requires_grad else ""
    return (
        f"{v.dtype} {list(v.shape)} with strides {list(v.strides)} on {v.device} at {past} of "
        f"{ALIGNMENT}{grad}"
    )


_ITEM_SIZES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}


_NO_ADDRESS = 1 << 63
"""Beyond what a process or a GPU has, and what an index of NumPy can be."""


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of the named type, 0 when unknown."""
    return _ITEM_SIZES.get(dtype, 0)


def check_memory(name: str, v: TensorView) -> None:
    """Refuse a tensor with elements and without memory, or with less than they take."""
    if v.room is not None and v.room < v.span:
        refuse_short(name, v.span, v.room)
    if v.size and not v.address:
        hint = "Of a wrapper, such as a DTensor, pass the local tensor; a fake tensor has none"
        reject(name, "a tensor with memory of its own", "a tensor without any", hint)
    if v.address + v.span >= _NO_ADDRESS:
        reject(name, "a tensor that ends below 2^63", f"address 0x{v.address:x}, {v.span} bytes")


def refuse_short(name: str, needed: int, room: int) -> NoReturn:
    """Refuse a tensor whose storage has fewer bytes, from its first element on, than it takes."""
    expected = f"a storage of {needed} bytes from its first element on"
    hint = "It was freed or shrunk behind the tensor, for example by sharding"
    reject(name, expected, f"{room}", hint)


def pytorch() -> Any:
    """Return PyTorch's module, or None where it is not imported, or not to its end as yet."""
    module = sys.modules.get("torch")
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def is_traced(values: tuple[Any, ...]) -> bool:
    """Return whether one is a tensor without memory that ``torch.export`` and ``make_fx`` have.

    Those call a function itself, where PyTorch's compiler reads its code.
    """
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    functional = sys.modules.get("torch._subclasses.functional_tensor")
    kinds = getattr(fake, "FakeTensor", ()), getattr(functional, "FunctionalTensor", ())
    return any([isinstance(value, kinds) for value in values])


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, NumPy's among them, and no bool or time."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.timedelta64)


def is_number(value: Any) -> bool:
    """Return whether a value is a plain real number: no bool, time or array."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.timedelta64)


def as_numpy(v: TensorView, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a NumPy array over a CPU tensor's memory, which the caller must keep alive.

    Args:
        v: a tensor on the CPU with strides that are not negative.
        dtype: type of the elements, as wide as the tensor's own.
    """
    element = np.dtype(dtype)
    if v.size == 0:
        return np.empty(v.shape, element)
    memory: Any = (ctypes.c_char * v.span).from_address(v.address)
    strides = tuple(stride * element.itemsize for stride in v.strides)
    return np.ndarray(v.shape, element, buffer=memory, strides=strides)


def as_cupy(v: TensorView, owner: object) -> Any:
    """Return a CuPy array over a CUDA tensor's memory; ``owner`` is kept alive by it."""
    cupy = toolchain.cupy()
    element = np.dtype(v.dtype)
    memory = cupy.cuda.UnownedMemory(v.address, max(v.span, 1), owner, v.device_index)
    strides = tuple(stride * element.itemsize for stride in v.strides)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(v.shape, element, memptr=pointer, strides=strides)


def byte_stride(v: TensorView, axis: int) -> int:
    """Return a stride in bytes; an axis of one element may carry any stride and gets 0."""
    return v.strides[axis] * v.itemsize if v.shape[axis] > 1 else 0


def row_stride(v: TensorView) -> int:
    """Return the elements between rows; of one row nobody asks for them."""
    return v.strides[0] if v.shape[0] > 1 else 0


def may_overlap(a: TensorView, b: TensorView) -> bool:
    """Return whether two tensors share a byte.

    Exact for every layout that NumPy's solver settles within its effort bound, else True.
    """
    if a.size == 0 or b.size == 0:
        return False
    if a.address >= b.address + b.span or b.address >= a.address + a.span:
        return False

    class _Placed:
        def __init__(self, v: TensorView) -> None:
            self.__array_interface__ = {
                "version": 3,
                "shape": v.shape,
                "strides": tuple(stride * v.itemsize for stride in v.strides),
                "typestr": f"|V{v.itemsize}",
                "data": (v.address, True),
            }

    effort: Any = 10_000
    try:
        return bool(np.shares_memory(np.asarray(_Placed(a)), np.asarray(_Placed(b)), effort))
    except np.exceptions.TooHardError:
        return True
