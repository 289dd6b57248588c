"""Which weights there are: the linear projections of Kimi-K3, and those of a model of the user."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from k3cupy.kernels.skinny_gemm import K_MULTIPLE
from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.tensors import pytorch

Shapes = tuple[tuple[int, int], ...]
"""(N, K) of weights, each once."""

_MODEL = "kimi-k3"
_DEGREE = re.compile(r"\bTP(\d+)\b")


@dataclass(frozen=True)
class Projection:
    """One local weight, tensor parallelism already applied.

    Attributes:
        n: rows of the weight, which are the columns of the output.
        k: columns of the weight, which are the columns of the input.
        name: what the model calls it.
    """

    n: int
    k: int
    name: str


@dataclass(frozen=True)
class StridedCase(Projection):
    """A projection whose input is a column slice of a wider tensor.

    Attributes:
        source_row_width: columns of that tensor.
        offset: its column at which the slice begins.
    """

    source_row_width: int
    offset: int


def shapes() -> tuple[Projection, ...]:
    """Return every projection shape of Kimi-K3 at the usual degrees of tensor parallelism.

    Example:
        >>> {(p.n, p.k): p.name for p in shapes()}[2112, 7168]
        'fused_qkv_a_proj (replicated)'
    """
    return tuple(Projection(**fields) for fields in _read()["shapes"])


def strided_cases() -> tuple[StridedCase, ...]:
    """Return the projections that read a slice of a wider tensor.

    Example:
        >>> [case.source_row_width for case in strided_cases()]
        [6288, 2112]
    """
    return tuple(StridedCase(**fields) for fields in _read()["strided_cases"])


def preset_names() -> tuple[str, ...]:
    """Return the names that ``preset_shapes`` takes.

    Example:
        >>> preset_names()
        ('kimi-k3', 'kimi-k3-tp4', 'kimi-k3-tp8', 'kimi-k3-tp16')
    """
    degrees = {degree for p in shapes() for degree in _degrees(p.name)}
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
        reject("preset", " or ".join(preset_names()), shown(name))
    wanted = name.removeprefix(_MODEL).removeprefix("-tp")
    found = (
        (p.n, p.k)
        for p in shapes()
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
    torch = pytorch()
    if torch is None or not isinstance(found, torch.nn.Module):
        reject("module", "a torch.nn.Module", type(found).__name__, error=TypeError)
    shapes = tuple(dict.fromkeys(_of_layers(found, torch)))
    if not shapes:
        reject("module", "at least one bfloat16 nn.Linear without bias", f"none in {told}")
    return shapes


def _imported(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not (module_name and attribute):
        reject("module", "package.module:name", shown(path))
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        reject("module", "something that can be imported", f"{path!r}: {error}")
    torch = pytorch()
    is_module = torch is not None and isinstance(found, torch.nn.Module)
    return found() if callable(found) and not is_module else found


def _of_layers(module: Any, torch: Any) -> Iterator[tuple[int, int]]:
    for layer in module.modules():
        if (
            isinstance(layer, torch.nn.Linear)
            and layer.bias is None
            and layer.weight.dtype == torch.bfloat16
            and layer.in_features % K_MULTIPLE == 0
        ):
            yield layer.out_features, layer.in_features


@functools.cache
def _read() -> Any:
    place = resources.files("k3cupy").joinpath("data/kimi_k3_projections.json")
    return json.loads(place.read_text(encoding="utf-8"))
