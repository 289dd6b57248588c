"""What a call launches: an instance, its grid, and where each of its arguments comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3cupy.runtime.instances import Instance

MAKERS: Mapping[str, Callable[[int], Any]] = {
    "pointer": int,
    "map": lambda _: None,
    "u32": np.uint32,
    "i64": int,
    "wide i64": np.int64,
    "f32": np.float32,
}
"""By type, what makes an argument of a number; cuda-core takes Python's integers as 64 bits. A map
is none before there is an address."""


class Parameters:
    """The parameters of a kernel, in the order of its ``.cu``.

    The order is that of first use in the kernel: arguments are read from memory in lines of 64
    bytes, cold at each launch. A type is ``pointer``, ``map`` (a tensor map), ``u32``, ``i64``,
    ``f32``, or ``stride``: bytes, 32 bits wide in the kernel for aligned rows and 64 in the other.

    Attributes:
        types: name -> type.
        places: name -> place.

    Example:
        >>> Parameters("u32 n, k; pointer x").types
        {'n': 'u32', 'k': 'u32', 'x': 'pointer'}
    """

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        for group in text.split(";"):
            kind, _, names = group.strip().partition(" ")
            self.types |= dict.fromkeys(map(str.strip, names.split(",")), kind)
        self.places = {name: place for place, name in enumerate(self.types)}


@dataclass(frozen=True)
class Launch:
    """One launch of a call.

    Attributes:
        instance: what is compiled.
        parameters: of the kernel.
        values: of the parameters that are numbers.
        addresses: parameter -> (argument of the call, bytes to add to its address).
        grid: clusters; with ``cluster=1`` that is blocks.
        block: threads a block.
        shared_bytes: dynamic shared memory a block.
        cluster: blocks a cluster.
        numbers: parameter -> argument that is a number, whose value comes with each call.
        maps: parameter -> what makes a tensor map of the address.
        strides_are_64_bit: how wide the parameters of type ``stride`` are.
    """

    instance: Instance
    parameters: Parameters
    values: Mapping[str, Any]
    addresses: Mapping[str, tuple[str, int]]
    grid: int
    block: int
    shared_bytes: int = 0
    cluster: int = 1
    numbers: Mapping[str, str] = field(default_factory=dict)
    maps: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    strides_are_64_bit: bool = False
