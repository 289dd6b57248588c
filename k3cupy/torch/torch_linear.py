"""``nn.Linear`` with the low-latency linear inside, and the exchange of the two in a model.

A layer keeps its parameters, its hooks and its name; only its class changes. Nothing about a kernel
is stored in it: each call asks the dispatcher, with the weight as it is then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_compiling
from torch.nn.modules.linear import Linear  # itself: nn.Linear is a name that others assign to

from k3cupy.call.repeat import MISS
from k3cupy.runtime import tracing
from k3cupy.torch import shards, wrappers
from k3cupy.torch.torch_library import linear_of_any_rank, repeated, unsettle
from k3cupy.torch.wrappers import ADAPTED, ADAPTED_NAME

_PLAIN = (Tensor, nn.Parameter)
"""Classes whose data is what it looks like: no quantised, sharded or fake tensors."""

_TRACED = (FakeTensor, FunctionalTensor)
"""Classes of tensors that stand for plain ones while ``torch.export`` or ``make_fx`` traces."""

_NONE = type(None)
"""What no transform is. The compiler traces a look at its class; `is None` it takes for false."""

_own_forward: Any = None
"""``Linear.forward`` as PyTorch has it; None until it was seen without a replacement."""

_own_linear = torch._C._nn.linear
"""``F.linear`` as PyTorch has it."""

_function_modes = torch._C._len_torch_function_stack
"""Counts the modes that see PyTorch's functions; a name of ours, which each call would look up."""


exchanged: weakref.WeakSet[Any] = weakref.WeakSet()
"""Layers that were given the class, and copies that were made with it."""


class LowLatencyLinear(Linear):  # type: ignore[misc]
    """An ``nn.Linear`` without bias that runs k3cupy's kernels where they are the fastest.

    Layers become one by ``k3cupy.enable_low_latency_gemm``.

    Attributes:
        batch_invariant: as for ``k3cupy.low_latency_linear``; None for the process-wide mode.
    """

    batch_invariant: bool | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy of a layer, or what was pickled, which is known like the layer itself."""
        super().__setstate__(state)
        exchanged.add(self)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T``, [..., K] to [..., N]."""
        parameters = self._parameters
        weight = parameters.get("weight")
        # A weight that a hook computes is no parameter. A class made from this one, as PyTorch's
        # parametrizations and sharding make them, has plans of its own for the weight; a layer that
        # was given back, whose forward somebody has kept, is a Linear again. Whoever replaces
        # PyTorch's linear for all layers wants to be called.
        if (
            weight is not None
            and parameters.get("bias", weight) is None
            and type(self) is LowLatencyLinear
            and Linear.forward is _own_forward
            and F.linear is _own_linear
        ):
            # PyTorch counts no writes where FSDP gathers a weight into the same memory, where an
            # adapter is merged into one, and to a plain tensor that is a view of a DTensor's share.
            own = self.__dict__
            static = (
                "_is_fsdp_managed_module" not in own
                and ADAPTED not in own
                and type(weight) is not Tensor
            )
            if is_compiling():
                # The compiler guards what it asks in this way, not what it looks up in `own`.
                static = static and not (
                    hasattr(self, "_is_fsdp_managed_module") or hasattr(self, ADAPTED)
                )
                if may_be_operator(input, weight):
                    return torch.ops.k3cupy.low_latency_linear(
                        input, weight, None, static, self.batch_invariant
                    )
                part = None if is_plain(weight) else shards.part_of(input, weight)
                if part is not None and may_be_operator(part.x, part.weight):
                    return part.whole(
                        torch.ops.k3cupy.low_latency_linear(
                            part.x, part.weight, None, False, self.batch_invariant
                        )
                    )
            else:
                if (
                    type(input) in _PLAIN
                    and type(weight) in _PLAIN
                    and not (_function_modes() and _functions_are_watched())
                ):
                    # A call that is like an earlier one of ours may be ours.
                    out = repeated(input, weight, static, self.batch_invariant)
                    if out is not MISS:
                        return out
                if not _may_be_ours(input, weight):
                    part = shards.part_of(input, weight)
                    if part is None or not _may_be_ours(part.x, part.weight):
                        return Linear.forward(self, input)
                    return part.whole(
                        linear_of_any_rank(part.x, part.weight, None, False, self.batch_invariant)
                    )
                return linear_of_any_rank(input, weight, None, static, self.batch_invariant)
        return Linear.forward(self, input)  # not super(): self may be no instance of this any more


def _replaced() -> str:
    """Return the name of what somebody has replaced of PyTorch's linear for all layers, or ``""``.

    PyTorch's forward is told by the file that its code comes from.
    """
    global _own_forward
    now = Linear.forward
    code = getattr(now, "__code__", None)
    if code is not None and code.co_filename == nn.Bilinear.extra_repr.__code__.co_filename:
        _own_forward = now
    if now is not _own_forward:
        return "nn.Linear.forward"
    return "" if F.linear is _own_linear else "torch.nn.functional.linear"


_replaced()


@tracing.unseen
def _may_be_ours(x: Tensor, weight: Tensor) -> bool:
    """Return whether the dispatcher may look at an eager call.

    No for calls that PyTorch must see itself: those that it traces, counts or transforms, and
    tensors without plain memory. Gradients, types and layouts are the dispatcher's own matter.
    """
    return (
        type(x) in _PLAIN
        and type(weight) in _PLAIN
        and (x.is_cuda or x.is_cpu)
        and (weight.is_cuda or weight.is_cpu)
        and x.layout is weight.layout is torch.strided
        and not x.is_nested
        and x.dim() > 0
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not (torch._C._len_torch_function_stack() and _functions_are_watched())
        and not torch._C._are_functorch_transforms_active()
        and not (torch.is_autocast_enabled("cuda") and _autocast_changes(x))
    )


@tracing.unseen
def _functions_are_watched() -> bool:
    """Return whether a mode sees PyTorch's functions, other than the one of the default device."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(type(mode) is not torch.utils._device.DeviceContext for mode in modes)


def is_plain(t: Any) -> bool:
    """Return whether a value in code that is traced is a plain tensor, or stands for one."""
    return type(t) in _PLAIN or isinstance(t, _TRACED)


def may_be_operator(x: Tensor, weight: Tensor) -> bool:
    """Return whether a call that is being compiled may become the operator.

    No where the framework's linear does more than the product, or is not the only one to see it:
    transforms, autocast, modes, and gradients, which what is exported has by the operator too.
    """
    return (
        is_plain(x)
        and is_plain(weight)
        and x.device.type in ("cuda", "cpu")
        and x.dtype == weight.dtype == torch.bfloat16
        and x.dim() > 0
        and weight.dim() == 2
        and isinstance(torch._C._functorch.peek_interpreter_stack(), _NONE)
        and torch.autograd.forward_ad._current_level < 0
        and (
            isinstance(x, _TRACED)  # an exporter has modes of its own
            or not (torch._C._len_torch_function_stack() and _functions_are_watched())
        )
        and (
            # Not by its function: that is true in all that PyTorch 2.11 compiles.
            getattr(torch.compiler, "_is_exporting_flag", False)
            or not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        )
        and not (torch.is_autocast_enabled(x.device.type) and _autocast_changes(x))
    )


def _autocast_changes(x: Tensor) -> bool:
    """Return whether autocast, which is on, would compute in another type than that of x."""
    return bool(torch.get_autocast_dtype(x.device.type) != x.dtype)


# --- The layers of a model -----------------------------------------------------------------------


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) of everything that calls itself a linear layer, each layer once."""
    for name, layer in module.named_modules():
        if isinstance(layer, Linear) or (
            _is_called_linear(layer) and not any(map(_is_called_linear, list(layer.modules())[1:]))
        ):
            yield name, layer


def _is_called_linear(layer: nn.Module) -> bool:
    return type(layer).__name__.endswith("Linear")


def why_not(layer: nn.Module) -> str | None:
    """Return in words why a layer must stay as it is, or None where it may be exchanged."""
    kind = type(layer)
    if torch.nn.utils.parametrize.is_parametrized(layer):
        return "its weight is parametrized: it is computed anew on each call"
    if kind not in (Linear, LowLatencyLinear):
        if shards.is_gathered(layer) and kind.__name__.startswith("FSDP"):
            return (
                f"it is a {kind.__name__}, sharded on its own: shard the module around it instead"
            )
        where = f" of {kind.__module__}" if kind.__name__ == "Linear" else ""
        return f"it is a {kind.__name__}{where}, not an nn.Linear itself"
    if _is_wrapped(layer) and not any(_places_of(layer)):
        return "its forward was replaced, by a wrapper or a hook: enable before that is done"
    if replaced := _replaced():
        return f"{replaced} was replaced for all layers: that runs, and no kernel of ours"
    weight = layer._parameters.get("weight")
    if weight is None:
        if shards.is_gathered(layer):
            return "FSDP keeps its weight in a flat parameter: use_orig_params=True, or fully_shard"
        return "its weight is no parameter: a hook computes it, by pruning or weight norm"
    if layer._parameters.get("bias", weight) is not None:
        return "it has a bias"
    if shards.is_shard(weight):
        if not shards.is_gathered(layer):
            if why := shards.why_not_local(weight):
                return why
            weight = weight_of(layer)
    elif type(weight) not in _PLAIN:
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    if not (weight.is_cuda or weight.is_cpu or weight.is_meta):
        return f"its weight is on {weight.device}, neither a CUDA GPU nor the CPU"
    if weight.layout is not torch.strided:
        return f"its weight is {str(weight.layout).removeprefix('torch.')}, not dense"
    if weight.dtype != torch.bfloat16:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, not bfloat16"
    if weight.dim() != 2 and shards.is_gathered(layer):
        return "its weight is a part of FSDP's flat parameter: enable before it is sharded"
    if weight.dim() != 2:
        return f"its weight has shape {list(weight.shape)}, not [N, K]"
    if not weight.numel():
        return f"its weight {list(weight.shape)} has no elements: there is nothing to compute"
    return None


def _is_own(forward: Any, layer: nn.Module) -> bool:
    """Return whether a forward is what the layer has anyway: hooks leave that when they go."""
    function = getattr(forward, "__func__", None)
    return function in (_own_forward, LowLatencyLinear.forward) and forward.__self__ is layer


def _is_wrapped(layer: nn.Module) -> bool:
    """Return whether a layer's forward was replaced on the layer itself."""
    return "forward" in vars(layer) and not _is_own(vars(layer)["forward"], layer)


def _places_of(layer: nn.Module) -> Iterator[Callable[[Any], None]]:
    """Yield what puts another forward where wrappers keep the layer's own."""
    return wrappers.places_of(layer, lambda forward: _is_own(forward, layer))


def notes_on(layer: nn.Module, is_adapted: bool) -> list[str]:
    """Return in words what else there is to say of a layer that may be exchanged."""
    notes, weight = [], layer._parameters.get("weight")
    if shards.is_gathered(layer):
        notes.append("FSDP gathers its weight for each call, which waits for it")
    elif shards.is_shard(weight):
        notes.append(shards.share_of(weight))
    if _is_wrapped(layer):
        notes.append(f"called by the forward that {wrappers.wrapper_of(layer)} put on it")
    if is_adapted:
        notes.append("an adapter may be merged into its weight, for which each call waits")
    return notes


def weight_of(layer: nn.Module) -> Tensor | None:
    """Return a layer's weight, this rank's share of a sharded one, where it has a size."""
    weight = layer._parameters.get("weight")
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return None
    if shards.is_shard(weight) and not shards.is_gathered(layer):
        return shards.local_of(weight)
    return weight


def size_of(layer: nn.Module) -> tuple[int, int] | None:
    """Return (N, K) as the weight tells it, else as the layer does, else None."""
    weight = weight_of(layer)
    if weight is not None and weight.dim() == 2:
        return int(weight.shape[0]), int(weight.shape[1])
    n, k = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    return (n, k) if isinstance(n, int) and isinstance(k, int) and n * k > 0 else None


def exchange(layer: nn.Module, batch_invariant: bool | None, is_adapted: bool) -> None:
    """Give a layer the class that runs the low-latency linear."""
    if type(layer) is not LowLatencyLinear:
        unsettle(layer._parameters["weight"])
    if is_adapted:
        vars(layer)[ADAPTED] = True
    if _is_wrapped(layer):
        for put in list(_places_of(layer)):
            put(MethodType(LowLatencyLinear.forward, layer))
    else:
        vars(layer).pop("forward", None)
    # In the layer even where it is None: compiled code of PyTorch 2.11 guards what a layer holds,
    # not its class. In one step, and first: another thread may be calling the layer.
    vars(layer)["batch_invariant"] = batch_invariant
    layer.__class__ = LowLatencyLinear
    exchanged.add(layer)


def exchange_back(layer: nn.Module) -> bool:
    """Make a layer an ``nn.Linear`` again, and return whether it was exchanged."""
    if type(layer) is not LowLatencyLinear:
        return False
    if _is_wrapped(layer):
        for put in list(_places_of(layer)):
            put(MethodType(_own_forward or Linear.forward, layer))
    layer.__class__ = Linear
    layer.__dict__.pop("batch_invariant", None)
    layer.__dict__.pop(ADAPTED, None)
    return True


def _note_adapter(_: nn.Module, name: str, layer: Any) -> None:
    """Note on an enabled layer whether it is an adapter's now, whenever a module takes one in."""
    if type(layer) is LowLatencyLinear:
        if layer.__dict__.pop(ADAPTED, False) and (weight := weight_of(layer)) is not None:
            unsettle(weight)
        if name == ADAPTED_NAME:
            layer.__dict__[ADAPTED] = True


nn.modules.module.register_module_module_registration_hook(_note_adapter)
