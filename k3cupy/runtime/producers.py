"""Reading the tensors of PyTorch, CuPy, NumPy, JAX and any DLPack producer.

Two functions per producer:

- a probe gives the address and a hashable signature of everything else. It runs on every call
  and is the key of the plan cache, so it reads attributes where the producer has them: PyTorch's
  cost 0.8 us a tensor, its DLPack export with an importer behind it 1 to 18 us.
- a view gives the full description, for validation; only a plan-cache miss needs it.

Other producers go through their DLPack capsule (see ``dlpack``).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from k3cupy.runtime import dlpack, streams
from k3cupy.runtime.tensors import (
    ALIGNMENT,
    TensorView,
    is_number,
    itemsize,
    pytorch,
)

Probe = tuple[int, Hashable, object]
"""Address, signature, and what must live until the memory was used (None: only the tensor)."""


def _past(address: int) -> int | None:
    """Return what of an address belongs to a signature; None for no memory at all."""
    return address % ALIGNMENT if address else None


# --- PyTorch ------------------------------------------------------------------------------------


def _check_values(t: Any) -> None:
    """Refuse a tensor whose memory does not hold its values, or not all that belongs to them.

    Raises:
        BufferError: the text says what it is, and what to pass.
    """
    torch = sys.modules["torch"]  # which is whole where there are tensors of it
    if t.is_nested:
        raise BufferError("a nested tensor. Pass its rows in one dense tensor")
    if t.layout is not torch.strided:
        raise BufferError(f"layout {t.layout}. Pass its to_dense()")
    if t.is_neg():
        raise BufferError("a view that carries the negative bit. Pass its resolve_neg()")
    forward_ad, library = torch.autograd.forward_ad, torch._C
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        raise BufferError(
            "a dual tensor of forward-mode AD, of which the operations have no derivative. Pass "
            "its primal, as torch.autograd.forward_ad.unpack_dual gives it"
        )
    if in_transform() and library._functorch.is_functorch_wrapped_tensor(t):
        raise BufferError("a tensor inside a transform of torch.func. Call outside of it")


def in_transform() -> bool:
    """Return whether a transform of torch.func, as ``grad``, is under way in this thread."""
    torch = pytorch()
    return torch is not None and bool(torch._C._are_functorch_transforms_active())


def _view_torch(t: Any) -> TensorView:
    _check_values(t)
    dtype = str(t.dtype).removeprefix("torch.")
    return TensorView(
        address=t.data_ptr(),
        shape=tuple(t.shape),
        strides=tuple(t.stride()),
        dtype=dtype,
        itemsize=t.element_size(),
        device_type=t.device.type,
        device_index=t.device.index or 0,
        readonly=False,
        requires_grad=t.requires_grad,
        framework="torch",
        room=max(t.untyped_storage().nbytes() - t.storage_offset() * t.element_size(), 0),
    )


def _probe_jagged(*_: Any) -> Probe:
    raise BufferError("a nested tensor, some of whose sizes are no numbers")


@functools.cache
def write_counter() -> Callable[[Any], None]:
    """Return what counts a write of a tuple of tensors, as PyTorch's own operations do.

    Then autograd sees it, and whoever asks for a tensor's version. PyTorch has no count for what
    was made in inference mode; newer versions know that, and take several tensors at once.
    """
    torch = pytorch()
    increment = torch.autograd.graph.increment_version
    with contextlib.suppress(Exception), torch.inference_mode():
        at_once: Callable[[Any], None] = torch._C._increment_version  # no frame of Python
        uncounted = torch.empty(0, device="cpu")
        with torch.inference_mode(False):
            at_once((uncounted, tried := torch.empty(0, device="cpu")))
            if tried._version == 1:
                return at_once

    def count(written: tuple[Any, ...]) -> None:
        for tensor in written:
            if not tensor.is_inference():
                increment(tensor)

    return count


@functools.cache
def _guards() -> Any:
    """Return PyTorch's class that compares tensors with others in one call of C, or None.

    Its compiler guards its code with it; it has no public name. So it is looked at first: whether
    it tells apart what a plan does not take alike. In a thread of its own, which has no modes.
    """
    found: list[Any] = []

    def look() -> None:
        torch = pytorch()
        with contextlib.suppress(Exception):
            kind = torch._C._dynamo.guards.TensorGuards
            like = torch.empty(2, 3, device="cpu")
            sizes, strides = [[2, 3]], [[3, 1]]
            check = kind(like, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
            others = [
                torch.empty(3, 3, device="cpu"),
                torch.empty(3, 2, device="cpu").t(),
                torch.empty(2, 3, device="cpu", dtype=torch.int32),
                torch.empty(2, 3, device="meta"),
                torch.empty(2, 3, device="cpu", requires_grad=True),
                torch._neg_view(like),
                torch.nn.Parameter(like, requires_grad=False),
                None,
            ]
            told = [check(torch.empty(2, 3, device="cpu")), *[not check(t) for t in others]]
            for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
                with mode:
                    told.append(not check(like))
            if all(told):
                found.append(kind)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0] if found else None


def likeness(given: tuple[Any, ...]) -> Callable[..., bool] | None:
    """Return what tells whether tensors are like those of PyTorch that are given.

    Alike are class, shape, strides, type, device, whether they require grad, autocast, inference
    mode and transforms. Not looked at are addresses and storages, grad mode, and modes in Python.

    Returns:
        None where it cannot be told, as inside autocast, whose types it does not know.
    """
    kind, torch = _guards(), pytorch()
    if kind is None or any(type(t) not in torch_types for t in given):
        return None
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return None
    sizes, strides = [list(t.shape) for t in given], [list(t.stride()) for t in given]
    guards = kind(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards.check if guards.check(*given) else None


# --- NumPy and CuPy -----------------------------------------------------------------------------


def _probe_numpy(a: Any) -> Probe:
    address = a.__array_interface__["data"][0] if a.size else 0
    key = ("numpy", a.shape, a.strides, a.dtype, a.flags.writeable, _past(address))
    return address, key, None


def _probe_cupy(a: Any) -> Probe:
    address = a.data.ptr
    key = ("cupy", a.shape, a.strides, a.dtype, a.data.device_id, _past(address))
    return address, key, None


def _element_strides(a: Any) -> tuple[int, ...]:
    size = max(a.dtype.itemsize, 1)
    if a.size and any(stride % size for n, stride in zip(a.shape, a.strides, strict=True) if n > 1):
        raise BufferError(f"strides {a.strides} bytes are not multiples of the {size}-byte element")
    return tuple(stride // size for stride in a.strides)


def _view_numpy(a: Any) -> TensorView:
    return TensorView(
        address=a.__array_interface__["data"][0] if a.size else 0,
        shape=tuple(a.shape),
        strides=_element_strides(a),
        dtype=a.dtype.name if a.dtype.isnative else f"{a.dtype.name} in foreign byte order",
        itemsize=a.dtype.itemsize,
        device_type="cpu",
        device_index=0,
        readonly=not a.flags.writeable,
        requires_grad=False,
        framework="numpy",
    )


def _view_cupy(a: Any) -> TensorView:
    return TensorView(
        address=a.data.ptr,
        shape=tuple(a.shape),
        strides=_element_strides(a),
        dtype=a.dtype.name,
        itemsize=a.dtype.itemsize,
        device_type="cuda",
        device_index=a.data.device_id,
        readonly=False,
        requires_grad=False,
        framework="cupy",
    )


# --- Any other DLPack producer ------------------------------------------------------------------


def _view_dlpack(obj: Any, stream: int | None = None, beside: tuple[Any, ...] = ()) -> TensorView:
    """Describe a bare producer; ``beside`` are the arguments whose framework names the stream."""
    device_type, index = obj.__dlpack_device__()
    if int(device_type) not in dlpack.CUDA_DEVICES:
        stream = None
    elif stream is None:
        stream = streams.current_of(_stream_framework(beside), int(index))()
    capsule = dlpack.export(obj, stream)
    header = dlpack.read_header(capsule)
    framework = "jax" if _is_jax(obj) else "dlpack"
    return TensorView(
        address=header.address,
        shape=header.shape,
        strides=header.strides,
        dtype=header.dtype,
        itemsize=itemsize(header.dtype),
        device_type=header.device_type,
        device_index=header.device_index,
        readonly=header.readonly or framework == "jax",
        requires_grad=False,
        framework=framework,
        owner=capsule,
    )


def _probe_dlpack(obj: Any, stream: int | None, beside: tuple[Any, ...]) -> Probe:
    v = _view_dlpack(obj, stream, beside)
    key = (v.framework, v.shape, v.strides, v.dtype, v.device_type, v.device_index, v.readonly)
    return v.address, (*key, _past(v.address)), v.owner


def _is_jax(obj: Any) -> bool:
    return type(obj).__module__.partition(".")[0] in ("jax", "jaxlib")


# --- Which producer -----------------------------------------------------------------------------


class Handlers(NamedTuple):
    """How a producer's tensors are read.

    Attributes:
        probe: None for PyTorch's, which ``probe_all`` reads in line.
        view: the full description.
    """

    probe: Callable[..., Probe] | None
    view: Callable[[Any], TensorView]


_TORCH = Handlers(None, _view_torch)
_NUMPY = Handlers(_probe_numpy, _view_numpy)
_CUPY = Handlers(_probe_cupy, _view_cupy)
_DLPACK = Handlers(_probe_dlpack, _view_dlpack)
_JAGGED = Handlers(_probe_jagged, _view_torch)
"""Of a class that is known as none of PyTorch's, so that nobody reads its tensors in line."""

_LAYOUT = Handlers(_probe_dlpack, lambda v: v)
"""Of a view itself, which may be validated. It has no memory, and no export to be probed."""

_by_type: dict[type, Handlers] = {}

torch_types: set[type] = set()
"""Classes known as PyTorch's tensors, each from its first use on."""

torch_names: dict[str, Any] = {"torch_types": torch_types}
"""Names of generated code that reads PyTorch's tensors: its functions too, once there is one."""

_MOST_TYPES = 1024
"""Classes may be made without end, one a call."""


def _resolve(cls: type) -> Handlers | None:
    """Find the producer of a class without importing any framework: its base classes tell."""
    torch = pytorch()
    if torch is not None and issubclass(cls, torch.Tensor):
        nested = sys.modules.get("torch.nested._internal.nested_tensor")
        return _JAGGED if nested and issubclass(cls, nested.NestedTensor) else _TORCH
    if cls is TensorView:
        return _LAYOUT
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root == "cupy" and base.__name__ == "ndarray":
            return _CUPY
        if root == "numpy" and base.__name__ == "ndarray":
            return _NUMPY
        if root == "numpy" and base.__name__ == "MaskedArray":
            return None  # its memory does not tell which values count
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        return _DLPACK
    return None


def handlers(obj: Any) -> Handlers:
    """Return how tensors of an object's class are read.

    Raises:
        TypeError: the object is no tensor; the text is the class's name only, for the caller to
            put the argument's name before it.
    """
    cls = type(obj)
    found = _by_type.get(cls)
    if found is None:
        found = _resolve(cls)
        if found is None:
            raise TypeError(cls.__name__)
        if len(_by_type) >= _MOST_TYPES:
            _by_type.clear()
            torch_types.clear()
        _by_type[cls] = found
    if found is _TORCH and cls not in torch_types:
        torch = sys.modules["torch"]
        torch_names["is_grad_enabled"] = torch.is_grad_enabled
        torch_names["forward_ad"] = torch.autograd.forward_ad
        torch_types.add(cls)
    return found


def _stream_framework(values: tuple[Any, ...]) -> str:
    """Return whose current stream a call runs on: PyTorch's where one of its tensors takes part."""
    torch = pytorch()
    if torch is None:
        return "cupy"
    if any(type(value) in torch_types for value in values):
        return "torch"
    return "torch" if not values and torch.cuda.is_initialized() else "cupy"


def probe_all(
    values: tuple[Any, ...], stream: int | None = None
) -> tuple[list[int], list[Any], list[Any]]:
    """Probe arguments that may be tensors, numbers or None.

    PyTorch's tensors are read in line: this loop is a good part of a call's host time. A tensor
    that requires grad is marked while grad mode is on, so that a plan made without it does not fit.

    Args:
        values: what was passed.
        stream: the stream that will use the memory, for producers that order an export behind their
            own work; None for the current one.

    Returns:
        Addresses (0 for what is no tensor), the signature of them all, and what must live until the
        memory has been used.

    Raises:
        Exception: a value is none of the three, or cannot be read; ``view`` says so in words.
    """
    addresses: list[int] = []
    signature: list[Any] = []
    owners: list[Any] = []
    torch = sys.modules["torch"] if torch_types else None
    grad_mode = torch is not None and torch.is_grad_enabled()
    tangents = torch is not None and torch.autograd.forward_ad._current_level >= 0
    add_address = addresses.append
    for value in values:
        if type(value) in torch_types:
            if tangents or value.is_neg():
                _check_values(value)
            address = value.data_ptr()
            add_address(address)
            # Off the GPU the ordinal says too little: a tensor without memory has -1 as well.
            ordinal = value.get_device()
            signature += (
                value.shape,
                value.stride(),
                value.dtype,
                ordinal if ordinal >= 0 else value.device,
                address % ALIGNMENT if address else None,
            )
            if grad_mode and value.requires_grad:
                signature.append("grad")
        elif value is None:
            add_address(0)
            signature.append(None)
        elif is_number(value):
            add_address(0)
            signature.append("number")
        else:
            probe, _ = handlers(value)
            if probe is None:
                # The first of its class: known as PyTorch's from now on.
                return probe_all(values, stream)
            if probe is _probe_dlpack:
                address, layout, owner = probe(value, stream, values)
            else:
                address, layout, owner = probe(value)
            add_address(address)
            signature.append(layout)
            owners.append(owner)
    return addresses, signature, owners


def is_on_cpu(obj: Any) -> bool:
    """Return whether the memory of a tensor of any producer is the CPU's, as far as it tells."""
    try:
        return int(obj.__dlpack_device__()[0]) in dlpack.CPU_DEVICES
    except Exception:  # of a producer's own kind: the device is none of DLPack's
        return False


def check(obj: Any, name: str) -> None:
    """Accept a tensor of any producer, whether it has memory or not.

    Raises:
        TypeError: not a tensor; the text begins with ``name``.
    """
    try:
        handlers(obj)
    except TypeError as error:
        wanted = "a tensor (PyTorch, CuPy, NumPy, JAX or DLPack)"
        raise TypeError(f"{name}: expected {wanted}, got {error}") from error


def view(obj: Any, name: str) -> TensorView:
    """Describe a tensor.

    Args:
        obj: a tensor of any producer.
        name: the argument's name, for the message.

    Raises:
        TypeError: not a tensor, or one whose export fails; the text begins with ``name``.
    """
    check(obj, name)
    try:
        return handlers(obj).view(obj)
    except Exception as error:  # a producer's own code may raise anything
        got = str(error) or type(error).__name__
        raise TypeError(f"{name}: expected a tensor with an exportable layout, got {got}") from (
            error
        )
