"""A call that is no launch of its own: other public functions compute it, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from k3cupy.call.arguments import Arguments, Problem, Values, scale_number
from k3cupy.call.plans import CudaPlan, Verify
from k3cupy.call.repeat import Step
from k3cupy.runtime import streams, tensors
from k3cupy.runtime.errors import CaptureError


@dataclass(frozen=True)
class Separate:
    """The other functions of an operation.

    Attributes:
        load: (problem, pdl, stream) -> None; loads what they will launch, and launches nothing.
        compute: (problem, pdl, tensors and numbers by argument name, stream) -> the result. They
            are PyTorch's, or all of them CuPy's; what was left out is None.
    """

    load: Callable[[Any, bool, Any], None]
    compute: Callable[[Any, bool, Mapping[str, Any], Any], Any]


class SeparatePlan(CudaPlan):
    """A call on CUDA tensors whose functions queue their launches, and allocate in between.

    PyTorch's tensors they get as they are, so that its allocator knows what a captured graph uses.
    Tensors of others, or of several, they get as CuPy's arrays over the same memory.
    """

    def __init__(
        self,
        arguments: Arguments,
        problem: Problem,
        separate: Separate,
        *,
        pdl: bool,
        verify: Verify | None,
        stream: Any,
    ) -> None:
        """Load the kernels; the arguments are those of ``CudaPlan``."""
        super().__init__(arguments, problem, (), pdl=pdl, verify=verify, stream=stream)
        separate.load(problem, pdl, stream)
        self._compute, self._pdl = separate.compute, pdl
        self._are_torchs = all(v.framework == "torch" for v in problem.views.values())
        places = arguments.places
        named = [*problem.views, *(each.argument for each in problem.outputs)]
        self._tensors = tuple(dict.fromkeys(named))
        self._numbers = tuple(name for name in arguments.scales if name not in problem.views)
        self._steps = (
            Step(
                tuple((places[name], None) for name in self._tensors),
                tuple((places[name], name, _number) for name in self._numbers),
                self._on_arrays,
            ),
        )

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        """Queue a call."""
        if not self._are_torchs:
            return super().run(values, addresses, stream)
        if self._check is not None:
            self._check(values, addresses)
        self._arguments.numbers(values)
        if self._verify is not None:
            handle = self._current_stream() if stream is None else streams.handle_of(stream)
            self._verify(self._problem, self._arguments.views(values), handle)
        given = dict(zip(self._arguments.names, values, strict=True))
        torch = tensors.pytorch()
        casts = torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", enabled=False) if casts else contextlib.nullcontext():
            return self._compute(self._problem, self._pdl, given, stream)

    def _on_arrays(self, handle: int, *told: Any) -> None:
        if streams.is_capturing(handle):
            raise CaptureError(
                "Separate kernels need tensors in between, and CuPy cannot keep these for a CUDA "
                "graph. Capture the call with PyTorch's tensors"
            )
        problem = self._problem
        views = problem.views | {
            each.argument: tensors.packed_view(problem.first, each.shape, each.dtype)
            for each in problem.outputs
        }
        given: dict[str, Any] = dict.fromkeys(self._arguments.names)
        for name, value in zip((*self._tensors, *self._numbers), told, strict=True):
            given[name] = value
            if name in self._tensors:
                v = replace(views[name], address=value)
                codes = "uint8" if v.dtype.startswith("float8") else v.dtype
                given[name] = tensors.as_cupy(replace(v, dtype=codes), None)
        self._compute(problem, self._pdl, given, handle)


def _number(name: str, value: Any) -> float | None:
    return None if value is None else scale_number(name, value)
