"""What others put around a linear layer: a forward in place of its own, hooks, adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

ADAPTED = "_k3cupy_adapted"
"""What a layer's ``__dict__`` holds while an adapter is around it."""

ADAPTED_NAME = "base_layer"
"""Under which adapters, PEFT's and those of engines, keep the layer that they are around."""


def places_of(layer: nn.Module, is_own: Callable[[Any], bool]) -> Iterator[Callable[[Any], None]]:
    """Yield what puts another forward where wrappers of a layer's forward keep the layer's own.

    A wrapper keeps it in a closure, or as accelerate's hooks do, on the layer.

    Args:
        layer: whose ``forward`` was replaced on the layer itself.
        is_own: tells the layer's own forward.
    """
    own, seen = vars(layer), set()
    waiting = [own.get("forward")]
    while waiting:
        wrapper = waiting.pop()
        if id(wrapper) in seen:
            continue
        seen.add(id(wrapper))
        if isinstance(wrapper, functools.partial):
            waiting.append(wrapper.func)
            if "_old_forward" in own and any(value is layer for value in wrapper.args):
                if is_own(own["_old_forward"]):
                    yield functools.partial(own.__setitem__, "_old_forward")
                waiting.append(own["_old_forward"])
        elif isinstance(wrapper, FunctionType):
            for cell in wrapper.__closure__ or ():
                try:
                    kept = cell.cell_contents
                except ValueError:  # empty
                    continue
                if is_own(kept):
                    yield functools.partial(setattr, cell, "cell_contents")
                elif isinstance(kept, (FunctionType, functools.partial)):
                    waiting.append(kept)


def wrapper_of(layer: nn.Module) -> str:
    """Return the module in which the code of a layer's replaced forward is, or ``""``."""
    forward = vars(layer).get("forward")
    while isinstance(forward, functools.partial):
        forward = forward.func
    code = getattr(forward, "__globals__", {})
    return str(code.get("__name__", ""))


def offloaded_to(layer: nn.Module) -> torch.device | None:
    """Return the device to which accelerate's hook brings a layer's weight for each call."""
    hook = vars(layer).get("_hf_hook")
    for each in getattr(hook, "hooks", (hook,)):
        device = getattr(each, "execution_device", None)
        if getattr(each, "offload", False) and device is not None:
            found = (
                torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            )
            if found.type == "cuda" and found.index is None:
                return torch.device("cuda", torch.cuda.current_device())
            return found
    return None


def adapted_in(module: nn.Module) -> set[nn.Module]:
    """Return the layers around which adapters are, or were when a module took them in."""
    below = {parent._modules.get(ADAPTED_NAME) for parent in module.modules()}
    return {layer for layer in module.modules() if layer in below or ADAPTED in vars(layer)}
