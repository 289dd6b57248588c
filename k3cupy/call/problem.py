"""A validated call: what every operation's problem says to the plan."""

from __future__ import annotations

from dataclasses import dataclass

from k3cupy.runtime.tensors import TensorView


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
        in_place: names of inputs that may be an output itself.
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

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that the call writes, where they are given."""
        return (*self.updated, *(output.argument for output in self.outputs))
