"""Checks that operations share. Every message is ``argument: expected ..., got ...``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from k3cupy.kernels import Tuned
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.dlpack import packed_strides
from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.tensors import ALIGNMENT, TensorView, check_memory, is_number, pytorch

Config = TypeVar("Config", bound=Tuned)
OPTIONAL_BOOL = (type(None), bool)
"""The types of ``pdl``, for the look on the way of a call that spares it ``check_flags``."""

_COPY = "Make a contiguous copy first"
_MOST_FLOAT32 = 3.4e38


def check_dtype(name: str, v: TensorView, accepted: tuple[str, ...], hint: str = "") -> None:
    """Accept only the named element types."""
    if v.dtype not in accepted:
        reject(name, " or ".join(accepted), v.dtype, hint, TypeError)


def check_shape(
    name: str, v: TensorView, shape: tuple[int | str, ...], note: str = "", hint: str = ""
) -> None:
    """Accept only a shape; a string stands for any extent and is shown in the message."""
    fits = len(v.shape) == len(shape)
    if fits:
        for want, have in zip(shape, v.shape, strict=True):
            fits = fits and (isinstance(want, str) or want == have)
    if not fits:
        wanted = ", ".join(str(extent) for extent in shape)
        reject(name, f"shape [{wanted}]{note}", f"shape {list(v.shape)}", hint)


def check_strides(name: str, v: TensorView, *, inner: bool = True) -> None:
    """Refuse negative strides, an inner stride other than 1, and addresses off the element size."""
    if v.size == 0:
        return
    for axis, (extent, stride) in enumerate(zip(v.shape, v.strides, strict=True)):
        if extent > 1 and stride < 0:
            found = f"stride {stride} at axis {axis}"
            reject(name, "strides that are not negative", found, _COPY)
    if inner and v.shape and v.shape[-1] > 1 and v.strides[-1] != 1:
        reject(name, "inner stride 1", f"inner stride {v.strides[-1]}", _COPY)
    if v.itemsize and v.address % v.itemsize:
        expected = f"an address that is a multiple of its {v.itemsize}-byte element"
        reject(name, expected, f"address 0x{v.address:x}")


def check_writable(name: str, v: TensorView) -> None:
    """Refuse memory that its producer forbids to write."""
    if v.readonly:
        who = "an immutable JAX array" if v.framework == "jax" else "a read-only tensor"
        reject(name, "a tensor that may be written", who)


def check_devices(views: Mapping[str, TensorView]) -> None:
    """Accept CPU tensors or tensors of one GPU, with memory; name the one that stands apart."""
    for name, v in views.items():
        if not v.is_cuda and v.device_type not in ("cpu", "cuda_host"):
            reject(name, "a tensor on the CPU or a CUDA device", f"device {v.device_type}")
    places = {name: v.device if v.is_cuda else "cpu" for name, v in views.items()}
    common = Counter(places.values()).most_common(1)[0][0]
    for name, place in places.items():
        if place != common:
            expected, found = f"device {common} like the other tensors", views[name].device
            reject(name, expected, f"device {found}", "Move it there first")
    for name, v in views.items():
        check_memory(name, v)


def check_rows_apart(name: str, v: TensorView) -> None:
    """Refuse a tensor to be written whose rows (the last axis) overlap one another."""
    width = reach = v.shape[-1]
    for stride, extent in sorted(zip(v.strides[:-1], v.shape[:-1], strict=True)):
        if extent > 1:
            if stride < reach:
                expected = f"rows of {width} elements that do not overlap"
                reject(name, expected, f"strides {v.strides}")
            reach += (extent - 1) * stride


def is_packed(v: TensorView) -> bool:
    """Return whether a tensor is contiguous; an axis of one element may carry any stride."""
    step = 1
    for extent, stride in zip(reversed(v.shape), reversed(v.strides), strict=True):
        if extent != 1 and stride != step:
            return v.size == 0
        step *= max(extent, 1)
    return True


def check_packed(name: str, v: TensorView) -> None:
    """Accept only a contiguous tensor."""
    if not is_packed(v):
        expected = f"a contiguous tensor, strides {packed_strides(v.shape)}"
        reject(name, expected, f"strides {v.strides}")


def check_grad(views: Mapping[str, TensorView]) -> None:
    """Refuse tensors that autograd follows, while it does: the operations have no backward."""
    torch = pytorch()
    if torch is None or not torch.is_grad_enabled():
        return
    for name, v in views.items():
        if v.requires_grad:
            found = "one that requires grad while grad mode is on"
            hint = "Call inside torch.no_grad() or torch.inference_mode()"
            reject(name, "a tensor without gradient", found, hint)


def without_owners(views: Mapping[str, TensorView]) -> dict[str, TensorView]:
    """Return views that may outlive their call: they keep no caller's memory alive."""
    return {name: replace(v, owner=None) if v.owner is not None else v for name, v in views.items()}


def check_flags(given: Mapping[str, Any], *names: str) -> None:
    """Accept only bools, and None for ``pdl``: a truthy value of another type is a mistake."""
    for name in names:
        value, may_be_none = given[name], name == "pdl"
        if not (isinstance(value, bool) or (may_be_none and value is None)):
            accepted = "None, True or False" if may_be_none else "True or False"
            reject(name, accepted, shown(value), error=TypeError)


def epsilon_of(value: Any) -> float:
    """Return what a norm adds to the mean of the squares: a number from 0 on, finite in fp32."""
    if not is_number(value):
        reject("eps", "a number", shown(value), error=TypeError)
    if not 0 <= value <= _MOST_FLOAT32:
        reject("eps", "a finite number of at least 0 (in fp32)", shown(value))
    return float(value)


def check_scale_tensor(name: str, v: TensorView) -> None:
    """Accept one fp32 element."""
    if v.size != 1:
        reject(name, "exactly one fp32 element", f"shape {list(v.shape)}")
    check_dtype(name, v, ("float32",))


def misalignment(name: str, v: TensorView) -> str | None:
    """Return in words why a tensor's rows cannot be moved by 128-bit accesses, or None."""
    if v.size == 0:
        return None
    if v.address % ALIGNMENT:
        past = v.address % ALIGNMENT
        return f"{name} is not aligned: its address is {past} bytes past a multiple of 16"
    for extent, stride in zip(v.shape[:-1], v.strides[:-1], strict=True):
        step = stride * v.itemsize
        if extent > 1 and step % ALIGNMENT:
            what = f"a stride of {stride} elements is no multiple of 16 bytes"
            return f"{name} is not aligned: {what}"
        if extent > 1 and step >= 1 << 32:
            return f"{name} has rows {step} bytes apart, past the 4 GiB of the 128-bit kernel"
    return None


def lack_of_shared_memory(config: Any, needed: int, gpu: DeviceInfo) -> str | None:
    """Say that a configuration takes more shared memory a block than a GPU has, or None."""
    most = gpu.shared_memory_optin
    if needed <= most:
        return None
    return f"{config} takes {needed} bytes of shared memory a block, {gpu.name} has {most}"


def check_config(config: Any, kind: type[Config]) -> Config | None:
    """Accept None, or a valid configuration of a kernel; tell what of it does not fit."""
    if config is None:
        return None
    if not isinstance(config, kind):
        reject("config", f"None or {kind.__name__}", shown(config), error=TypeError)
    if misfit := config.misfit():
        reject("config", misfit, shown(config))
    return config
