"""The low-latency linear in the layers of a PyTorch model.

Importing this does not import PyTorch; the functions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3cupy.accept import checks
from k3cupy.choose.gemm import ALL, choose
from k3cupy.kernels.fused_a_gemm import MAX_TOKENS
from k3cupy.ops import batch_invariance
from k3cupy.ops.dispatch_report import name_layers
from k3cupy.ops.warmup import tokens_of
from k3cupy.ops.warmup import warmup as compile_for
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import pytorch
from k3cupy.torch.linear_report import FRAMEWORK, LayerReport, LinearReport, Span, spans

if TYPE_CHECKING:
    from torch import nn


def enable_low_latency_gemm(
    module: nn.Module,
    *,
    tokens: int | Sequence[int] | None = None,
    warmup: bool = True,
    batch_invariant: bool | None = None,
    progress: bool = True,
) -> LinearReport:
    """Let the linear layers of a model run k3cupy's kernels where those are the fastest.

    Each ``nn.Linear`` without bias and with a bfloat16 weight, whatever module it is in, then calls
    ``low_latency_linear``. On a GPU it must also have a plan for its shape; on the CPU and on the
    meta device it goes on with the framework's linear until it has values on a GPU. Offloaded,
    sharded and adapted layers are served too, whether that was done before or comes later.
    Everything else is left alone, and the report says why. Parameters, names, hooks and the state
    dict stay as they are. Calling it again brings layers up to date, those that came later and
    those that are no longer eligible.

    The layers promise that the kernel before them does not write their weight, so that it can be
    fetched early. After an in-place change, ``load_state_dict`` or ``.to(...)`` the next call goes
    without the promise, and so does every call of an adapter's base layer and of a weight that FSDP
    or tensor parallelism has sharded. PyTorch does not count other writes through ``weight.data``
    or by other libraries: behind one, call ``torch.autograd.graph.increment_version(weight)``.

    Args:
        module: any module, on any device.
        tokens: numbers of tokens (M) that will come, each from 1 to 64, for the report and for
            ``warmup``; None for all of them.
        warmup: compile the kernels that the plans name now, for the layers that are on a GPU, so
            that their first calls may come while a CUDA graph is captured.
        batch_invariant: True for kernels with which a row's bits do not depend on the number of
            tokens, False for the fastest, None for what the process-wide mode says at each call.
        progress: show a bar on standard error while kernels are compiled.

    Returns:
        One row a linear layer: name, (N, K), which kernel for which M, or why it was left alone.
        It prints as a table.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it.
        CompileError, ToolchainError: the kernels cannot be built here. The module is unchanged.

    Example:
        >>> import torch, k3cupy
        >>> model = torch.nn.Sequential(torch.nn.Linear(1536, 2304, bias=False)).bfloat16()
        >>> report = k3cupy.enable_low_latency_gemm(model)
        >>> report.installed, report["0"].reason
        (1, 'on the CPU: framework linear until it moves to a GPU')
    """
    _check_module(module)
    checks.check_flags(locals(), "warmup", "progress")
    counts = tuple(sorted(set(tokens_of(tokens, MAX_TOKENS))))
    from k3cupy.torch import torch_linear, wrappers

    adapted = wrappers.adapted_in(module)
    invariant = batch_invariance.resolved(batch_invariant)
    layers = [
        (layer, _look_at(name, layer, counts, invariant, layer in adapted))
        for name, layer in torch_linear.linear_layers(module)
    ]
    if warmup:
        warm_up([row for _, row in layers if row.installed], counts, invariant, progress)
    for layer, row in layers:
        if row.installed:
            torch_linear.exchange(layer, batch_invariant, layer in adapted)
        else:
            torch_linear.exchange_back(layer)
    name_layers(
        (layer, row.name, row.shape) for layer, row in layers if row.installed and row.shape
    )
    return LinearReport([row for _, row in layers])


def disable_low_latency_gemm(module: nn.Module) -> int:
    """Undo ``enable_low_latency_gemm``: every layer is an ``nn.Linear`` again.

    Args:
        module: any module.

    Returns:
        The number of layers that were changed back.

    Raises:
        TypeError: it is no module.

    Example:
        >>> import torch, k3cupy
        >>> model = torch.nn.Sequential(torch.nn.Linear(1536, 2304, bias=False)).bfloat16()
        >>> report = k3cupy.enable_low_latency_gemm(model)
        >>> k3cupy.disable_low_latency_gemm(model), type(model[0]).__name__
        (1, 'Linear')
    """
    _check_module(module)
    from k3cupy.torch import torch_linear

    return sum(map(torch_linear.exchange_back, module.modules()))


_NOT_YET = {
    "cpu": "on the CPU: framework linear until it moves to a GPU",
    "meta": "on the meta device: framework linear until it has values on a GPU",
}


def _check_module(module: Any) -> None:
    torch = pytorch()
    if torch is None or not isinstance(module, torch.nn.Module):
        reject("module", "a torch.nn.Module", type(module).__name__, error=TypeError)


def _look_at(
    name: str, layer: nn.Module, tokens: Sequence[int], invariant: bool, is_adapted: bool
) -> LayerReport:
    """Report on a layer as it will be, changing nothing."""
    from k3cupy.torch import torch_linear, wrappers

    weight = torch_linear.weight_of(layer)
    device = None if weight is None else weight.device
    if weight is not None and weight.is_meta:
        device = wrappers.offloaded_to(layer) or device
    row = LayerReport(
        name=name,
        shape=torch_linear.size_of(layer),
        device="" if device is None else str(device),
        installed=False,
        reason=torch_linear.why_not(layer) or "",
    )
    if row.reason or device is None or row.shape is None:
        return row
    notes = torch_linear.notes_on(layer, is_adapted)
    if device.type != "cuda":
        reason = "; ".join(filter(None, [_NOT_YET.get(device.type, ""), *notes]))
        return replace(row, installed=True, reason=reason)
    plan, why_none = plan_of(row.shape, tokens, devices.info(device.index), invariant)
    return replace(row, installed=not why_none, plan=plan, reason=why_none or "; ".join(notes))


def plan_of(
    shape: tuple[int, int], tokens: Sequence[int], device: DeviceInfo, batch_invariant: bool
) -> tuple[tuple[Span, ...], str]:
    """Return which kernel computes which M on a GPU, and why none does where none does.

    Args:
        shape: (N, K) of the weight.
        tokens: every M, in rising order.
        device: the GPU.
        batch_invariant: whether that mode holds.
    """
    n, k = shape
    found = [choose(ALL, n, k, m, device, batch_invariant=batch_invariant) for m in tokens]
    kernels = [
        (count, FRAMEWORK if choice.is_fallback else choice.kernel)
        for count, choice in zip(tokens, found, strict=True)
    ]
    reason = found[0].reason if all(choice.is_fallback for choice in found) else ""
    return spans(kernels), reason


def warm_up(
    layers: Sequence[LayerReport],
    tokens: Sequence[int],
    batch_invariant: bool,
    progress: bool = False,
) -> None:
    """Compile what layers on GPUs will run, with the promise and, for first calls, without.

    Args:
        layers: rows of installed layers.
        tokens: every M.
        batch_invariant: whether that mode holds.
        progress: show a bar.
    """
    shapes: dict[int, dict[tuple[int, int], None]] = {}
    for row in layers:
        if row.plan and row.shape is not None:
            device = int(row.device.removeprefix("cuda:"))
            shapes.setdefault(device, {})[row.shape] = None
    for device, found in shapes.items():
        compile_for(
            "low_latency_linear",
            device=device,
            progress=progress,
            shapes=tuple(found),
            tokens=tokens,
            weight_is_static=(True, False),
            batch_invariant=batch_invariant,
        )
