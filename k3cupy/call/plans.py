"""Plans: a validated call with its launches, ready to repeat; what they are kept by, the stamp."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np

from k3cupy.call import outputs
from k3cupy.call.arguments import Arguments, Memory, Problem, Values, scale_number
from k3cupy.call.launch import MAKERS, Launch
from k3cupy.call.repeat import Recipe, Repeat, Step, make_prepared, make_repeat
from k3cupy.runtime import env, instances, launch, producers, sources, streams, tensors, tracing
from k3cupy.runtime.errors import CaptureError, reject
from k3cupy.runtime.tensors import TensorView

Verify = Callable[[Any, Mapping[str, TensorView], int | None], None]
"""Looks at a call's values on its stream (None: on the CPU), and raises where one is wrong."""

Reference = Callable[[Any, dict[str, Any]], None]
"""Computes a call on NumPy arrays and numbers by argument name, outputs among them."""


# --- What a cached plan must agree on beside its call: tables, modes, edited sources ---

_tables = 0
_overrides, _values = sources.override, env.values
_SOURCE_DIR, _CHECK = env.SOURCE_DIR, env.CHECK
_modules = sys.modules


@tracing.opaque
def stamp(names: tuple[str, ...]) -> Any:
    """Return what plans must agree on; it runs first in every call, and tells the compiler of us.

    Args:
        names: the CUDA sources of an operation.
    """
    if not tracing.told and "torch._dynamo" in _modules:
        tracing.tell()
    if _overrides.get() is None and _SOURCE_DIR not in _values and _CHECK not in _values:
        return _tables
    return _tables, env.check_enabled(), tuple(map(sources.epoch, names))


def tables_changed() -> None:
    """Let no plan of before fit any more: what is known of times has changed."""
    global _tables
    _tables += 1


def tables() -> int:
    """Return a number that changes when what is known of times does."""
    return _tables


class PlanCache:
    """Plans by the signature of their calls, bounded; ``get`` is a dictionary's own look-up."""

    def __init__(self, limit: int = 4096) -> None:
        self._plans: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self._limit = limit
        self.get = self._plans.get

    def remember(self, key: Any, plan: Any) -> None:
        """Keep a plan; a full cache begins anew."""
        with self._lock:
            if len(self._plans) >= self._limit:
                self._plans.clear()
            self._plans[key] = plan

    def __contains__(self, key: Any) -> bool:
        """Return whether something is kept by a key."""
        return key in self._plans

    def put_first(self, key: Any, repeat: Any) -> None:
        """Keep what repeats a call in front of the last few of its key."""
        self.remember(key, (repeat, *self.get(key, ())[: _REPEATS_OF_A_KEY - 1]))


_REPEATS_OF_A_KEY, _REPEATS_OF_A_PLAN = 4, 16
"""Calls of one shape that differ in layout, class or mode may take turns. Where more of them do,
and push one another out, their plans soon give up."""


class ReferencePlan:
    """A call on CPU tensors; ``verify``, where given, looks at its values first."""

    def __init__(
        self, arguments: Arguments, problem: Problem, reference: Reference, verify: Verify | None
    ) -> None:
        self._arguments, self._problem = arguments, problem
        self._reference, self._verify = reference, verify
        memory = Memory(arguments, problem)
        self._check, self._count, self._counted = memory.check, memory.count, memory.counted
        self._framework = problem.first.framework
        self._outputs = {arguments.places[output.argument]: output for output in problem.outputs}

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        """Compute a call."""
        problem, arguments, framework = self._problem, self._arguments, self._framework
        if self._check is not None:
            self._check(values, addresses)
        every = list(values)
        for place, output in self._outputs.items():
            if values[place] is None:
                every[place] = outputs.allocator(framework, output.shape, output.dtype, None)()
        views, numbers = arguments.views(tuple(every)), arguments.numbers(values)
        if self._verify is not None:
            self._verify(problem, views, None)
        if problem.num_tokens:
            self._reference(problem, self._arrays(views) | numbers)
        if self._count is not None:
            self._count(self._counted(values))
        for place, output in self._outputs.items():
            if values[place] is None:
                every[place] = outputs.finish(framework, every[place], output.dtype)
        outs = [every[place] for place in self._outputs]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def repeat(self, values: Values) -> None:
        """Return what repeats a call: nothing here, the host computes it."""

    prepared = repeat

    def _arrays(self, views: Mapping[str, TensorView]) -> dict[str, Any]:
        """Return the tensors as NumPy arrays, e4m3 as its codes; a scale tensor as its number."""
        arrays: dict[str, Any] = {}
        for name, v in views.items():
            tensors.check_memory(name, v)  # a new output too
            is_fp8 = v.dtype == "float8_e4m3fn"
            array = tensors.as_numpy(v, np.dtype("uint8" if is_fp8 else v.dtype))
            is_scale = name in self._arguments.scales
            arrays[name] = float(array.reshape(-1)[0]) if is_scale else array
        return arrays


class CudaPlan:
    """A call on CUDA tensors."""

    def __init__(
        self,
        arguments: Arguments,
        problem: Problem,
        launches: Sequence[Launch],
        *,
        pdl: bool,
        verify: Verify | None,
        stream: Any,
    ) -> None:
        """Load the kernels.

        Args:
            arguments: of the operation.
            problem: the validated call.
            launches: what is queued, in order; none where there are no tokens.
            pdl: with the attribute for programmatic dependent launch.
            verify: what looks at the values first; None for nothing.
            stream: the one that was given, to see whether it captures; None for the current one.
        """
        first = problem.first
        self._arguments, self._problem, self._verify = arguments, problem, verify
        memory = Memory(arguments, problem)
        self._check, self._count, self._counted = memory.check, memory.count, memory.counted
        self._device, self._framework = first.device_index, first.framework
        frameworks = [v.framework for v in problem.views.values()]
        stream_framework = "torch" if "torch" in frameworks else "cupy"
        self._current_stream = streams.current_of(stream_framework, self._device)
        self._allocates_in_order = self._framework == stream_framework
        self._address_of = outputs.address_of(self._framework)
        self._outputs = tuple(
            [
                (
                    arguments.places[output.argument],
                    output.argument in problem.views,
                    outputs.allocator(self._framework, output.shape, output.dtype, self._device),
                )
                for output in problem.outputs
            ]
        )
        self._memory = memory
        is_torchs = all(v.framework == "torch" for v in problem.views.values())
        self._repeats_left = _REPEATS_OF_A_PLAN if is_torchs and launches and not verify else 0
        self._steps = tuple([self._step(each, pdl, stream) for each in launches])

    def _step(self, launched: Launch, pdl: bool, stream: Any) -> Step:
        loaded = self._load(launched.instance, stream)
        if launched.shared_bytes:
            loaded.allow_shared_memory(launched.shared_bytes)
        parameters, places = launched.parameters, self._arguments.places
        at = parameters.places
        unknown = launched.values.keys() - at.keys()
        if unknown:
            raise KeyError(f"{launched.instance} has no parameters {', '.join(sorted(unknown))}")
        stride = "wide i64" if launched.strides_are_64_bit else "u32"
        queue = launch.make_packed_launcher(
            self._device,
            loaded.kernel,
            [
                MAKERS[stride if kind == "stride" else kind](launched.values.get(name, 0))
                for name, kind in parameters.types.items()
            ],
            [at[parameter] for parameter in (*launched.addresses, *launched.numbers)],
            grid=launched.grid,
            block=launched.block,
            pdl=pdl,
            shared_bytes=launched.shared_bytes,
            cluster=launched.cluster,
        )
        pointers = tuple(
            [
                (places[argument], _from_address(offset, launched.maps.get(parameter)))
                for parameter, (argument, offset) in launched.addresses.items()
            ]
        )
        numbers = tuple([(places[name], name, _fp32) for name in launched.numbers.values()])
        return Step(pointers, numbers, queue)

    def _load(self, instance: instances.Instance, stream: Any) -> instances.LoadedKernel:
        if not instances.is_loaded(instance, self._device):
            handle = self._current_stream() if stream is None else streams.handle_of(stream)
            if streams.is_capturing(handle):
                raise CaptureError(
                    f"{instance.name_expression} is not loaded and stream 0x{handle:x} is "
                    "capturing a CUDA graph, where nothing can be compiled or loaded. Before the "
                    "capture call k3cupy.warmup(...), or run this call once with the same shapes "
                    "and types"
                )
        return instances.load(instance, self._device)

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        """Queue a call."""
        if self._check is not None:
            self._check(values, addresses)
        handle = self._current_stream() if stream is None else streams.handle_of(stream)
        if self._verify is not None:
            self._verify(self._problem, self._arguments.views(values), handle)
        if not self._steps:
            self._arguments.numbers(values)
        outs = []
        in_order = stream is None and self._allocates_in_order
        for index, given, allocate in self._outputs:
            if given:
                out = values[index]
            else:
                out = allocate() if in_order else self._allocate_for(allocate, handle)
                try:
                    at = self._address_of(out)
                except RuntimeError:  # inside a transform of torch.func it is a wrapper
                    at = 0
                if not at and self._steps:
                    name = self._arguments.names[index]
                    tensors.check_memory(name, producers.view(out, name))
                addresses[index] = at
            outs.append(out)
        for step in self._steps:
            step.launch(handle, values, addresses)
        if self._count is not None:
            self._count(self._counted(values))
        if stream is not None:
            outputs.keep_for_stream([*values, *outs], self._device, handle)
        if self._framework == "jax":
            outs = self._handed_over(outs, handle)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def repeat(self, values: Values, shapes: Sequence[tuple[int, ...]] | None = None) -> Any:
        """Return what computes further calls like one, or None where those go the long way.

        Args:
            values: of the call, all whose tensors are PyTorch's.
            shapes: of new outputs, where they are others than the problem's.
        """
        recipe = self._recipe(values, shapes, self._memory.beyond) if self._repeats_left else None
        if recipe is None:
            return None
        self._repeats_left -= 1
        return make_repeat(recipe)

    def prepared(self, values: Values) -> Repeat | None:
        """Return what computes calls of new tensors like these, or None as ``repeat`` does."""
        recipe = self._recipe(values, None, "") if self._repeats_left else None
        if recipe is None:
            return None
        names = [self._arguments.names[place] for place in recipe.spans]
        return make_prepared(recipe, names, self._refuse_changed)

    def _recipe(
        self, values: Values, shapes: Sequence[tuple[int, ...]] | None, beyond: str
    ) -> Recipe | None:
        memory, problem = self._memory, self._problem
        each_once = {id(values[place]): values[place] for place in memory.spans}
        alike = producers.likeness(tuple(each_once.values()))
        if alike is None:
            return None
        made = [output for output in problem.outputs if output.argument not in problem.views]
        wanted = shapes or [output.shape for output in made]
        makers = {
            self._arguments.places[output.argument]: outputs.repeater(
                shape, output.dtype, self._device
            )
            for output, shape in zip(made, wanted, strict=True)
        }
        tests = [test for test in (beyond, memory.shared) if test]
        torch, follows = tensors.pytorch(), any(t.requires_grad for t in each_once.values())
        return Recipe(
            values=values,
            addresses=[t.data_ptr() if i in memory.spans else 0 for i, t in enumerate(values)],
            alike=alike,
            suspicious=" or ".join(tests),
            spans=memory.spans,
            refuse=memory.refuse,
            outputs=[(place, makers.get(place)) for place, _, _ in self._outputs],
            counted=memory.written,
            count=memory.count,
            current_stream=self._current_stream,
            steps=self._steps,
            grad_mode=torch.is_grad_enabled() if follows else None,
            torch=torch,
        )

    def _refuse_changed(self, values: Values) -> None:
        """Say what of tensors is not like those of the problem."""
        views = self._arguments.views(values)
        for name, was in self._problem.views.items():
            expected = f"{tensors.layout(was)}, as prepared"
            if name not in views:
                reject(name, expected, "None", error=TypeError)
            now = views[name]
            tensors.check_memory(name, now)
            if tensors.layout(was) != tensors.layout(now):
                reject(name, expected, tensors.layout(now))
        addresses = [getattr(views.get(name), "address", 0) for name in self._arguments.names]
        self._memory.refuse(values, addresses)
        hint = "Class, grad mode, inference mode, autocast, and which are one tensor, count too"
        reject("tensors", "such as were prepared", "others", hint)

    def _allocate_for(self, allocate: outputs.Allocator, handle: int) -> Any:
        with outputs.allocated_for(self._framework, self._device, handle):
            return allocate()

    def _handed_over(self, outs: list[Any], handle: int) -> list[Any]:
        """Return new outputs, the kernels queued, as JAX's own.

        JAX makes its own stream wait for the one that is current at the hand-over.
        """
        with streams.current_for_cupy(handle, self._device):
            return [
                out if given else outputs.finish(self._framework, out, output.dtype)
                for out, (_, given, _), output in zip(
                    outs, self._outputs, self._problem.outputs, strict=True
                )
            ]


def _from_address(offset: int, make: Callable[[int], Any] | None) -> Callable[[int], Any] | None:
    """Return what makes a kernel's argument of an address; None for the address itself."""
    if make is None:
        return partial(add, offset) if offset else None
    return (lambda address: make(address + offset)) if offset else make


@functools.lru_cache(maxsize=256)
def _fp32(name: str, value: Any) -> Any:
    return np.float32(scale_number(name, value))


Plan = ReferencePlan | CudaPlan
"""What repeats a call for other tensors of the same layout."""
