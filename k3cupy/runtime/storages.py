"""Whether what PyTorch's own linear is to compute with is there: a GPU, or a process, dies of it.

Of a tensor that our kernels take, validation and each call's check of memory tell. These are for
the others, of any class.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from k3cupy.runtime.errors import reject
from k3cupy.runtime.producers import torch_types
from k3cupy.runtime.tensors import pytorch, refuse_short, span


def check_values(names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    """Refuse values of which some cannot be read.

    Raises:
        ValueError: the storage of a tensor ends before it does, or it is on the meta device beside
            tensors that are not; the text names the argument.
    """
    check_meta(names, values)
    storage_check(names, values)(values)


def check_meta(names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    """Refuse meta tensors of PyTorch beside others: the result would be memory that nobody wrote.

    Not so beside scalars, which PyTorch takes on any device.
    """
    torch = pytorch()
    given = [
        (name, value)
        for name, value in zip(names, values, strict=True)
        if torch is not None and isinstance(value, torch.Tensor)
    ]
    meta = [name for name, value in given if value.is_meta]
    if meta and any(not value.is_meta and value.dim() for _, value in given):
        hint = "Beside tensors that have values it needs its own"
        reject(meta[0], "a tensor on the CPU or a CUDA device", "device meta", hint)


def storage_check(names: tuple[str, ...], values: tuple[Any, ...]) -> Callable[..., None]:
    """Return what refuses tensors of PyTorch that reach beyond their storage.

    Those without one of their own go on: nested and sparse tensors, and those of a transform, have
    none to ask; of a wrapper, such as a DTensor, PyTorch says that it is as large as need be.

    Args:
        names: of the arguments.
        values: of one call; the check is for all that have its signature.
    """
    spans = []
    for i, t in enumerate(values):
        if type(t) in torch_types:
            try:
                size = t.element_size()
                if needed := span(t.shape, t.stride(), size):
                    spans.append((i, size, needed))
            except Exception:  # of no strides, as a nested one: it shares no signature either
                continue
    torch = sys.modules.get("torch")
    plain = (torch.Tensor, torch.nn.Parameter) if torch and spans else ()

    def check(values: tuple[Any, ...], *_: Any) -> None:
        """Raise a ValueError whose text names the argument."""
        for i, size, needed in spans:
            t = values[i]
            if type(t) not in plain:
                room = _room(t, size)
            else:
                try:
                    room = len(t.untyped_storage()) - t.storage_offset() * size
                except NotImplementedError:  # it is sparse, or of a transform
                    continue
            if room < needed:
                refuse_short(names[i], needed, max(int(room), 0))

    return check


def _room(t: Any, size: int) -> float:
    """Ask PyTorch itself about a tensor of another class, not what that makes of its functions."""
    try:
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
            return len(t.untyped_storage()) - int(t.storage_offset()) * size
    except Exception:  # it has none, or sizes that are symbols
        return math.inf
