"""Which weights to measure: those of a named model, or those of a model that the user has."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from k3cupy import projections
from k3cupy.ops import checks
from k3cupy.ops.skinny_gemm_config import K_MULTIPLE

Shapes = tuple[tuple[int, int], ...]
"""(N, K) of weights, each once."""

_MODEL = "kimi-k3"
_DEGREE = re.compile(r"\bTP(\d+)\b")


def preset_names() -> tuple[str, ...]:
    """Return the names that ``preset_shapes`` takes.

    Example:
        >>> preset_names()
        ('kimi-k3', 'kimi-k3-tp4', 'kimi-k3-tp8', 'kimi-k3-tp16')
    """
    degrees = {degree for p in projections.shapes() for degree in _degrees(p.name)}
    return (_MODEL, *(f"{_MODEL}-tp{degree}" for degree in sorted(degrees)))


def preset_shapes(name: str) -> Shapes:
    """Return (N, K) of the local weights of a model at one degree of tensor parallelism.

    Layers that every GPU holds whole belong to every degree; ``kimi-k3`` is all of them together.

    Args:
        name: one of ``preset_names()``.

    Raises:
        ValueError: there is no such preset.

    Example:
        >>> (2304, 1536) in preset_shapes("kimi-k3-tp8")
        True
    """
    if name not in preset_names():
        checks.reject("preset", " or ".join(preset_names()), repr(name))
    wanted = name.removeprefix(_MODEL).removeprefix("-tp")
    found = (
        (p.n, p.k)
        for p in projections.shapes()
        if not wanted or not _degrees(p.name) or int(wanted) in _degrees(p.name)
    )
    return tuple(dict.fromkeys(found))


def _degrees(name: str) -> list[int]:
    return [int(degree) for degree in _DEGREE.findall(name)]


def module_shapes(module: Any) -> Shapes:
    """Return (N, K) of a model's linear layers that the low-latency kernels can take.

    Those are ``torch.nn.Linear`` without bias and with a bfloat16 weight. The model may be on any
    device, "meta" too, where it needs no memory.

    Args:
        module: a ``torch.nn.Module``, or where one is found: ``"package.module:name"``. What the
            name says may be a module, or a class or function that makes one without arguments.

    Raises:
        TypeError, ValueError: there is no module, or it has no such layer.
    """
    told = module if isinstance(module, str) else type(module).__name__
    found = _imported(module) if isinstance(module, str) else module
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(found, torch.nn.Module):
        checks.reject("module", "a torch.nn.Module", type(found).__name__, error=TypeError)
    shapes = tuple(dict.fromkeys(_linear_shapes(found, torch)))
    if not shapes:
        checks.reject("module", "at least one bfloat16 nn.Linear without bias", f"none in {told}")
    return shapes


def _imported(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not (module_name and attribute):
        checks.reject("module", "package.module:name", repr(path))
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        checks.reject("module", "something that can be imported", f"{path!r}: {error}")
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(found, torch.nn.Module)
    return found() if callable(found) and not is_module else found


def _linear_shapes(module: Any, torch: Any) -> Iterator[tuple[int, int]]:
    for layer in module.modules():
        if (
            isinstance(layer, torch.nn.Linear)
            and layer.bias is None
            and layer.weight.dtype == torch.bfloat16
            and layer.in_features % K_MULTIPLE == 0
        ):
            yield layer.out_features, layer.in_features
