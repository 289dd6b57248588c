"""Which calls our GEMMs take: each rule with the sentence that a fall-back gives as its reason.

Pure functions over tensor views: no GPU is asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from k3cupy.ops import checks
from k3cupy.runtime.dlpack import packed_strides
from k3cupy.runtime.tensors import ALIGNMENT, TensorView

_DTYPE = "bfloat16"
_STRIDE_MULTIPLE = 8


def why_not(views: Mapping[str, TensorView], *, grad_mode: bool) -> str | None:
    """Return in words what keeps a call from our kernels, or None where nothing does.

    How many tokens are too many, and which K a kernel takes, is for the plan to say.

    Args:
        views: of ``x``, ``weight`` and, where there is one, ``residual``.
        grad_mode: whether autograd is recording.
    """
    x, weight, residual = views["x"], views["weight"], views.get("residual")
    return (
        _shape(x, weight)
        or _dtype(x, weight)
        or _device(x, weight)
        or _layout_of_x(x)
        or _layout_of_weight(weight)
        or (residual and _residual(residual, x, weight))
        or (_grad(views) if grad_mode else None)
        or (None if x.shape[0] else "x has no rows: there is nothing to compute")
    )


def _shape(x: TensorView, weight: TensorView) -> str | None:
    for name, v in (("x", x), ("weight", weight)):
        if len(v.shape) != 2:
            return f"{name} is {len(v.shape)}-dimensional, not 2-dimensional"
    if x.shape[1] != weight.shape[1]:
        return f"x has {x.shape[1]:,} columns and the weight {weight.shape[1]:,}"
    if 0 in weight.shape:
        return f"the weight is empty: shape {list(weight.shape)}"
    return None


def _dtype(x: TensorView, weight: TensorView) -> str | None:
    if x.dtype != weight.dtype:
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if x.dtype != _DTYPE:
        return f"x and the weight are {x.dtype}, not {_DTYPE}"
    return None


def _device(x: TensorView, weight: TensorView) -> str | None:
    if x.is_cuda and weight.is_cuda and x.device_index == weight.device_index:
        return None
    if _place(x) == _place(weight):
        return f"x and the weight are on {_place(x)}"
    return f"x is on {_place(x)} and the weight on {_place(weight)}"


def _layout_of_x(x: TensorView) -> str | None:
    rows, columns = x.shape
    if columns > 1 and x.strides[1] != 1:
        return f"x has inner stride {x.strides[1]:,}, not 1"
    stride = x.strides[0]
    if rows > 1 and stride < 0:
        return f"row stride {stride:,} is negative"
    if rows > 1 and stride % _STRIDE_MULTIPLE:
        return f"row stride {stride:,} is not a multiple of {_STRIDE_MULTIPLE}"
    return _address("x", x)


def _layout_of_weight(weight: TensorView) -> str | None:
    if not checks.is_packed(weight):
        what = "transposed" if weight.strides[0] == 1 else "not packed"
        packed = packed_strides(weight.shape)
        return f"weight is {what}: strides {weight.strides}, expected packed {packed}"
    return _address("weight", weight)


def _residual(residual: TensorView, x: TensorView, weight: TensorView) -> str | None:
    wanted = (x.shape[0], weight.shape[0])
    if residual.shape != wanted:
        return f"the residual has shape {list(residual.shape)}, not {list(wanted)}"
    if residual.dtype != _DTYPE:
        return f"the residual is {residual.dtype}, not {_DTYPE}"
    if not residual.is_cuda or residual.device_index != x.device_index:
        return f"x is on {_place(x)} and the residual on {_place(residual)}"
    if not checks.is_packed(residual):
        packed = packed_strides(wanted)
        return f"the residual is not contiguous: strides {residual.strides}, expected {packed}"
    if residual.size and not residual.address:
        return "the residual has no memory of its own"
    return None


def _address(name: str, v: TensorView) -> str | None:
    if v.size and not v.address:
        return f"{name} has no memory of its own, as a wrapper of other tensors"
    if v.size and v.address % ALIGNMENT:
        past = v.address % ALIGNMENT
        return (
            f"the address of {name} is not a multiple of {ALIGNMENT} bytes: it is {past} bytes "
            "past one"
        )
    return None


def _grad(views: Mapping[str, TensorView]) -> str | None:
    for name, v in views.items():
        if v.requires_grad:
            return f"{name} requires grad while grad mode is on, and our kernels have no backward"
    return None


def _place(v: TensorView) -> str:
    if v.is_cuda:
        return v.device
    return {"cpu": "the CPU", "cuda_host": "the CPU (pinned)"}.get(v.device_type, v.device_type)
