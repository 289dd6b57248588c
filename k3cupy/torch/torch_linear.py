"""``nn.Linear`` with the low-latency linear inside, and the exchange of the two in a model.

A layer keeps its parameters, its hooks and its name; only its class changes. Nothing about a kernel
is stored in it: each call asks the dispatcher, with the weight as it is then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from k3cupy.torch.torch_library import linear_of_any_rank

_PLAIN = (Tensor, nn.Parameter)
"""Classes whose data is what it looks like: no quantised, sharded or fake tensors."""


class LowLatencyLinear(nn.Linear):  # type: ignore[misc]
    """An ``nn.Linear`` without bias that runs k3cupy's kernels where they are the fastest.

    Layers become one by ``k3cupy.enable_low_latency_gemm``.

    Attributes:
        batch_invariant: as for ``k3cupy.low_latency_linear``; None for the process-wide mode.
    """

    batch_invariant: bool | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T``, [..., K] to [..., N]."""
        parameters = self._parameters
        weight = parameters.get("weight")
        # A weight that a hook computes is no parameter. A class made from this one, as PyTorch's
        # parametrizations and sharding make them, has plans of its own for the weight.
        if (
            weight is not None
            and parameters.get("bias", weight) is None
            and type(self) is LowLatencyLinear
        ):
            if torch.compiler.is_compiling():
                if _may_be_operator(input, weight):
                    return torch.ops.k3cupy.low_latency_linear(
                        input, weight, None, True, self.batch_invariant
                    )
            elif _may_be_ours(input, weight):
                return linear_of_any_rank(input, weight, None, True, self.batch_invariant)
        return super().forward(input)


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
        and x.dim() > 0
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not (torch.is_autocast_enabled("cuda") and _autocast_changes(x))
    )


def _may_be_operator(x: Tensor, weight: Tensor) -> bool:
    """Return whether a call that is being compiled may become the operator.

    No where the framework's linear does more than the product: gradients and autocast.
    """
    return (
        type(x) in _PLAIN
        and type(weight) in _PLAIN
        and x.device.type in ("cuda", "cpu")
        and x.dtype == weight.dtype == torch.bfloat16
        and x.dim() > 0
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not (torch.is_autocast_enabled(x.device.type) and _autocast_changes(x))
    )


def _autocast_changes(x: Tensor) -> bool:
    """Return whether autocast, which is on, would compute in another type than that of x."""
    return bool(torch.get_autocast_dtype(x.device.type) != x.dtype)


# --- The layers of a model -----------------------------------------------------------------------


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) of everything that calls itself a linear layer, each layer once."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) or (
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
    if kind not in (nn.Linear, LowLatencyLinear):
        where = f" of {kind.__module__}" if kind.__name__ == "Linear" else ""
        return f"it is a {kind.__name__}{where}, not an nn.Linear itself"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter: a hook computes it, by pruning or weight norm"
    if layer._parameters.get("bias", weight) is not None:
        return "it has a bias"
    if type(weight) not in _PLAIN:
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    if weight.is_meta:
        return "its weight is on the meta device: enable again once it has values"
    if not (weight.is_cuda or weight.is_cpu):
        return f"its weight is on {weight.device}, neither a CUDA GPU nor the CPU"
    if weight.layout is not torch.strided:
        return f"its weight is {str(weight.layout).removeprefix('torch.')}, not dense"
    if weight.dtype != torch.bfloat16:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, not bfloat16"
    if weight.dim() == 2 and not weight.numel():
        return f"its weight {list(weight.shape)} has no elements: there is nothing to compute"
    return None


def weight_of(layer: nn.Module) -> Tensor | None:
    """Return a layer's weight where it is a parameter that has a size."""
    weight = layer._parameters.get("weight")
    return None if isinstance(weight, nn.parameter.UninitializedParameter) else weight


def size_of(layer: nn.Module) -> tuple[int, int] | None:
    """Return (N, K) as the weight tells it, else as the layer does, else None."""
    weight = weight_of(layer)
    if weight is not None and weight.dim() == 2:
        return int(weight.shape[0]), int(weight.shape[1])
    n, k = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    return (n, k) if isinstance(n, int) and isinstance(k, int) and n * k > 0 else None


def exchange(layer: nn.Linear, batch_invariant: bool | None) -> None:
    """Give a layer the class that runs the low-latency linear."""
    layer.__class__ = LowLatencyLinear
    _set_batch_invariant(layer, batch_invariant)


def exchange_back(layer: nn.Module) -> bool:
    """Make a layer an ``nn.Linear`` again, and return whether it was exchanged."""
    if type(layer) is not LowLatencyLinear:
        return False
    _set_batch_invariant(layer, None)
    layer.__class__ = nn.Linear
    return True


def _set_batch_invariant(layer: nn.Module, value: Any) -> None:
    vars(layer).pop("batch_invariant", None)
    if value is not None:
        layer.batch_invariant = value
