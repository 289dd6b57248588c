"""The tensor arguments of an operation, and a validated call of them."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3cupy.call.prober import Probe, make_prober
from k3cupy.runtime import producers, tensors
from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.tensors import TensorView, may_overlap

Values = tuple[Any, ...]
"""A call's arguments in the order of its ``Arguments``; None for what was left out."""


class Arguments:
    """The arguments of one operation that are tensors, or numbers where a scale may be one.

    Attributes:
        names: in the order in which a call carries them.
        required: those that a call must give; any other may be None.
        scales: those that may be a number.
        places: of the arguments among a call's values and addresses.
        probe: gives a call's addresses, signature and what must live until the memory was used.
    """

    def __init__(self, names: Iterable[str], required: Iterable[str], scales: Iterable[str] = ()):
        self.names = tuple(names)
        self.required = frozenset(required)
        self.scales = tuple(scales)
        self.probe: Probe = make_prober(self.names, self.required, self.views)
        self.places = {name: i for i, name in enumerate(self.names)}

    def views(self, values: Values) -> dict[str, TensorView]:
        """Describe the tensors among a call's values, by argument name.

        Raises:
            TypeError: a value that must be a tensor is none, or a scale neither that nor a number.
        """
        found = {}
        for name, value in zip(self.names, values, strict=True):
            if value is None and name not in self.required:
                continue
            if name in self.scales:
                if tensors.is_number(value):
                    continue
                try:
                    producers.handlers(value)
                except TypeError as error:
                    expected = "a number or a tensor with one fp32 element"
                    reject(name, expected, str(error), error=TypeError)
            found[name] = producers.view(value, name)
        return found

    def numbers(self, values: Values) -> dict[str, float]:
        """Return the scales that are numbers; what ``scale_number`` refuses is an error."""
        return {
            name: scale_number(name, value)
            for name in self.scales
            if tensors.is_number(value := values[self.places[name]])
        }


@functools.lru_cache(maxsize=256)  # one comes again and again, and errstate is slow
def scale_number(name: str, value: Any) -> float:
    """Return a scale given as a number.

    Raises:
        ValueError: it is not finite and positive, or not so any more in fp32.
    """
    expected = "a finite number above 0 (in fp32)"
    try:
        with np.errstate(over="ignore", under="ignore"):
            rounded = float(np.float32(value))
    except OverflowError:
        reject(name, expected, "one beyond every float")
    if not (math.isfinite(rounded) and rounded > 0):
        reject(name, expected, shown(value))
    return rounded


@dataclass(frozen=True)
class Output:
    """A tensor that a call returns: the caller's, or a new one.

    Attributes:
        argument: the name under which it may be given.
        name: what the kernel calls it.
        shape: of it.
        dtype: the field's name.
    """

    argument: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Problem:
    """A call that passed validation.

    Attributes:
        views: the tensors by argument name; the first is the input that names framework and device.
        num_tokens: of the call; with 0 nothing is launched.
        outputs: in the order in which they are returned.
        updated: names of inputs that the call writes.
        in_place: names of inputs that may be an output itself, element by element, because what
            writes an element is what read it.
        slow_reason: why rows are read element by element, or None.
    """

    views: dict[str, TensorView]
    num_tokens: int
    outputs: tuple[Output, ...]
    updated: tuple[str, ...]
    in_place: tuple[str, ...]
    slow_reason: str | None

    @property
    def first(self) -> TensorView:
        """The input that names framework and device."""
        return next(iter(self.views.values()))


class Memory:
    """What a signature cannot tell, checked on each call: all memory is there, outputs are apart.

    Attributes:
        check: (values, addresses) -> None, or an error that names the argument; None where there is
            nothing to check.
        beyond: the test for a storage that ends before its tensor, of tensors ``t0`` and their
            spans ``s0``; empty where none can.
        shared: the test for outputs that are not apart, of addresses ``a0`` and ends ``e0``.
        spans: bytes from the first to the last element, by place.
        written: places of PyTorch's tensors that are written.
        counted: (values) -> those of PyTorch's that are written; None where there are none.
        count: (what is counted) -> None, as PyTorch's own operations do.
    """

    def __init__(self, arguments: Arguments, problem: Problem) -> None:
        views, places = problem.views, arguments.places
        written = [*problem.updated, *[output.argument for output in problem.outputs]]
        self._arguments = arguments
        self._names = tuple([name for name in written if name in views])
        counted: list[Any] = [places[n] for n in self._names if views[n].framework == "torch"]
        self.written = tuple(counted)
        if len(counted) == 1:  # of a slice a tuple is made as well
            counted = [slice(counted[0], counted[0] + 1)]
        self.counted: Any = operator.itemgetter(*counted) if counted else None
        self.count = producers.write_counter() if counted else None
        self._in_place: set[tuple[int, int]] = set()
        self.spans = spans = {places[name]: v.span for name, v in views.items()}
        beyond = [_beyond(places[n], v.itemsize) for n, v in views.items() if v.room is not None]
        for target, name in itertools.product(self._names, problem.in_place):
            if name in views and _are_laid_out_alike(views[target], views[name]):
                self._in_place.add((places[target], places[name]))
        shared, others = [], dict(spans)
        for place in map(places.__getitem__, self._names):
            del others[place]  # a pair is looked at once, from its first member
            for other in others:
                may_be_it = _ELSEWHERE if (place, other) in self._in_place else ""
                shared.append(f"({_SHARED.format(place, other)}{may_be_it.format(place, other)})")
        self.beyond, self.shared = " or ".join(beyond), " or ".join(shared)
        self.check: Any = None
        if tests := beyond + shared:
            make = _check_maker(" or ".join(tests), len(places), tuple(spans), bool(shared))
            self.check = make(*spans.values(), self.refuse)

    def refuse(self, values: Values, addresses: list[int]) -> None:
        """Look again, byte by byte: spans may interleave and share none."""
        views = self._arguments.views(values)
        for name, v in views.items():
            tensors.check_memory(name, v)
        others = {name: v for name, v in views.items() if name not in self._names}
        for target, index in self._in_place:
            if addresses[target] == addresses[index]:
                del others[self._arguments.names[index]]
        for name in self._names:
            for other_name, other in others.items():
                if may_overlap(views[name], other):
                    reject(name, f"memory apart from {other_name}", "tensors that overlap")
            others[name] = views[name]


_SHARED = "a{1} < e{0} and a{0} < e{1}"
_ELSEWHERE = " and a{0} != a{1}"


def _beyond(i: int, itemsize: int) -> str:
    return f"t{i}.storage_offset() * {itemsize} + s{i} > len(t{i}.untyped_storage())"


@functools.lru_cache
def _check_maker(suspicious: str, count: int, placed: tuple[int, ...], ends: bool) -> Any:
    """Return what makes the check of a call, in line: a loop would cost as much as its tests.

    Args:
        suspicious: what to look at again, of tensors ``t0``, addresses ``a0`` and spans ``s0``.
        count: arguments of the operation.
        placed: the places whose spans are given.
        ends: it asks for ends ``e0`` too.
    """
    values, addresses = (", ".join(f"{x}{i}" for i in range(count)) for x in "ta")
    lines = [
        f"def make({', '.join([*(f's{i}' for i in placed), 'refuse'])}):",
        "    def check(values, addresses):",
        f"        {values}, = values",
        *([f"        {addresses}, = addresses"] if ends else []),
        *(f"        e{i} = a{i} + s{i}" for i in placed if ends),
        f"        if {suspicious}:",
        "            refuse(values, addresses)",
        "    return check",
    ]
    scope: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<k3cupy memory check>", "exec"), scope)
    return scope["make"]


def _are_laid_out_alike(a: TensorView, b: TensorView) -> bool:
    """Return whether equal addresses make two tensors the same elements at the same places."""
    axes = zip(a.shape, a.strides, b.strides, strict=True)
    return a.shape == b.shape and all(extent == 1 or left == right for extent, left, right in axes)
