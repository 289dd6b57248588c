"""The tensor arguments of an operation: their names and order, probing, views, and overlap."""

from __future__ import annotations

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
    """

    def __init__(
        self, arguments: Arguments, views: Mapping[str, TensorView], written: Iterable[str]
    ) -> None:
        self._arguments = arguments
        self._names = tuple(name for name in written if name in views)
        spans = {arguments.index(name): v.span for name, v in views.items()}
        pairs = []
        for name in self._names:
            target = arguments.index(name)
            span = spans.pop(target)  # a pair is looked at once, from its first member
            pairs.append((target, span, tuple(spans.items())))
        self._written = tuple(pairs)

    def check(self, values: Values, addresses: list[int]) -> None:
        """Refuse an output that shares memory with another argument."""
        suspicious = False
        for target, length, others in self._written:
            start = addresses[target]
            end = start + length
            for index, span in others:
                other = addresses[index]
                if other < end and start < other + span:
                    suspicious = True
        if suspicious:
            views = self._arguments.views(values)
            read = {name: v for name, v in views.items() if name not in self._names}
            written = {name: v for name, v in views.items() if name in self._names}
            checks.check_no_overlap(written, read)
