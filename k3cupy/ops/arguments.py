"""The tensor arguments of an operation: their names and order, probing, views, and overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from k3cupy.ops import checks
from k3cupy.runtime import producers, streams, tensors
from k3cupy.runtime.tensors import TensorView

Values = tuple[Any, ...]
"""A call's arguments in the order of its ``Arguments``; None for what was left out."""


class Arguments:
    """The arguments of one operation that are tensors, or numbers where a scale may be one.

    Attributes:
        names: in the order in which a call carries them.
        required: those that a call must give; any other may be None.
        scales: those that may be a number.
    """

    def __init__(self, names: Iterable[str], required: Iterable[str], scales: Iterable[str] = ()):
        self.names = tuple(names)
        self.required = frozenset(required)
        self.scales = tuple(scales)
        self._index = {name: i for i, name in enumerate(self.names)}

    def index(self, name: str) -> int:
        """Return the place of an argument among a call's values and addresses."""
        return self._index[name]

    def views(self, values: Values) -> dict[str, TensorView]:
        """Describe the tensors among a call's values, by argument name.

        Raises:
            TypeError: a value that must be a tensor is none.
        """
        return {
            name: producers.view(value, name)
            for name, value in zip(self.names, values, strict=True)
            if (value is not None or name in self.required)
            and not (name in self.scales and tensors.is_number(value))
        }

    def probe(self, values: Values, stream: Any) -> tuple[list[int], list[Any], list[Any]]:
        """Return addresses, signature and what must live until the memory has been used.

        Raises:
            TypeError: a value is no tensor, or cannot be read; the text names the argument.
        """
        try:
            handle = None if stream is None else streams.handle_of(stream)
            return producers.probe_all(values, handle)
        except Exception:
            self.views(values)  # says in words what cannot be read
            raise

    def check_scale_numbers(self, values: Values) -> None:
        """Refuse a scale number that is not finite and positive."""
        for name in self.scales:
            value = values[self._index[name]]
            if tensors.is_number(value):
                checks.scale_value(name, value)


class Layout:
    """What only the addresses decide, checked on each call: outputs apart from inputs.

    Args:
        arguments: of the operation.
        views: the tensors of a validated call.
        written: names of the tensors that the call writes.
        in_place: names of inputs that may be an output itself, element by element, because what
            writes an element is what read it.
    """

    def __init__(
        self,
        arguments: Arguments,
        views: Mapping[str, TensorView],
        written: Iterable[str],
        in_place: Iterable[str] = (),
    ) -> None:
        self._arguments = arguments
        self._names = tuple(name for name in written if name in views)
        self._in_place = {
            (arguments.index(target), arguments.index(name))
            for target, name in itertools.product(self._names, in_place)
            if name in views and checks.are_laid_out_alike(views[target], views[name])
        }
        spans = {arguments.index(name): v.span for name, v in views.items()}
        pairs = []
        for name in self._names:
            target = arguments.index(name)
            span = spans.pop(target)  # a pair is looked at once, from its first member
            pairs.append((target, span, tuple(spans.items())))
        self._written = tuple(pairs)

    def check(self, values: Values, addresses: list[int]) -> None:
        """Refuse an output that shares memory with another argument, but for one that may be it."""
        suspicious = False
        for target, length, others in self._written:
            start = addresses[target]
            end = start + length
            for index, span in others:
                other = addresses[index]
                if other < end and start < other + span:
                    same = other == start and (target, index) in self._in_place
                    suspicious = suspicious or not same
        if suspicious:
            views = self._arguments.views(values)
            read = {name: v for name, v in views.items() if name not in self._names}
            for target, index in self._in_place:
                if addresses[target] == addresses[index]:
                    del read[self._arguments.names[index]]
            written = {name: v for name, v in views.items() if name in self._names}
            checks.check_no_overlap(written, read)
