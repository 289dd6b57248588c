"""Which weights there are: the linear projections of named models, and of a model of the user."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from k3cupy.kernels.skinny_gemm import K_MULTIPLE
from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.tensors import pytorch

Shapes = tuple[tuple[int, int], ...]
"""(N, K) of weights, each once."""

MODELS = ("kimi-k3", "deepseek-v3", "glm-5.2")
"""The models whose projections are known; the first is meant where none is named."""

_DEGREE = re.compile(r"\bTP(\d+)\b")
_REPLICATED = "(replicated)"


@dataclass(frozen=True)
class Projection:
    """One local weight, tensor parallelism already applied.

    Attributes:
        n: rows of the weight, which are the columns of the output.
        k: columns of the weight, which are the columns of the input.
        name: what the model calls it.
        residual: whether the model adds something to its output.
    """

    n: int
    k: int
    name: str
    residual: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class StridedCase(Projection):
    """A projection whose input is a column slice of a wider tensor.

    Attributes:
        source_row_width: columns of that tensor.
        offset: its column at which the slice begins.
    """

    source_row_width: int
    offset: int


def shapes(model: str = MODELS[0]) -> tuple[Projection, ...]:
    """Return every projection shape of a model at the usual degrees of tensor parallelism.

    Args:
        model: one of ``MODELS``; Kimi-K3 by default.

    Raises:
        ValueError: there is no such model.

    Example:
        >>> {(p.n, p.k): p.name for p in shapes()}[2112, 7168]
        'fused_qkv_a_proj (replicated)'
    """
    if model not in MODELS:
        hint = f"preset_shapes({model!r}) has those of a preset" if model in preset_names() else ""
        reject("model", " or ".join(MODELS), shown(model), hint)
    return tuple(Projection(**fields) for fields in _read(model)["shapes"])


def strided_cases() -> tuple[StridedCase, ...]:
    """Return the projections of Kimi-K3 that read a slice of a wider tensor.

    Example:
        >>> [case.source_row_width for case in strided_cases()]
        [6288, 2112]
    """
    return tuple(StridedCase(**fields) for fields in _read(MODELS[0])["strided_cases"])


def preset_names() -> tuple[str, ...]:
    """Return the names that ``preset_shapes`` takes.

    Example:
        >>> preset_names()[:5]
        ('kimi-k3', 'kimi-k3-tp4', 'kimi-k3-tp8', 'kimi-k3-tp16', 'deepseek-v3')
    """
    return tuple(name for model in MODELS for name in _presets(model))


def preset_shapes(name: str) -> Shapes:
    """Return (N, K) of the local weights of a model at one degree of tensor parallelism.

    Layers that every GPU holds whole belong to every degree; ``kimi-k3`` is all of them together,
    and so is each model's name.

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
    return next(presets[name] for presets in map(_presets, MODELS) if name in presets)


def degrees(model: str) -> tuple[int, ...]:
    """Return the degrees of tensor parallelism at which a model's projections are known.

    Raises:
        ValueError: there is no such model.

    Example:
        >>> degrees("kimi-k3")
        (4, 8, 16)
    """
    return tuple(sorted({int(text) for p in shapes(model) for text in _DEGREE.findall(p.name)}))


def of_degree(model: str, degree: int) -> tuple[Projection, ...]:
    """Return the local projections of a model at a degree, with those that every GPU holds whole.

    Raises:
        ValueError: there is no such model, or nothing is known of it at this degree.
    """
    known = degrees(model)
    if degree not in known:
        reject("tp", f"{' or '.join(map(str, known))} for {model}", shown(degree))
    named = [(p, set(map(int, _DEGREE.findall(p.name)))) for p in shapes(model)]
    return tuple(p for p, of in named if not of or degree in of or _REPLICATED in p.name)


@functools.cache
def _presets(model: str) -> dict[str, Shapes]:
    """Return the presets of a model by their names, all degrees together first."""
    found = {model: shapes(model)}
    found |= {f"{model}-tp{degree}": of_degree(model, degree) for degree in degrees(model)}
    return {name: tuple(dict.fromkeys((p.n, p.k) for p in of)) for name, of in found.items()}


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
    if not callable(found) or (torch is not None and isinstance(found, torch.nn.Module)):
        return found
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError) as error:  # a builtin may have no signature
        expected = "a torch.nn.Module, or what makes one without arguments"
        reject("module", expected, f"{path!r}: {error}", error=TypeError)
    return found()


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
def _read(model: str) -> Any:
    file = f"data/{re.sub('[-.]', '_', model)}_projections.json"
    place = resources.files("k3cupy").joinpath(file)
    return json.loads(place.read_text(encoding="utf-8"))
