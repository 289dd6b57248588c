"""The linear projections of Kimi-K3: the shapes that matter, and what they are called."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


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


@functools.cache
def _read() -> Any:
    place = resources.files("k3cupy").joinpath("data/kimi_k3_projections.json")
    return json.loads(place.read_text(encoding="utf-8"))
