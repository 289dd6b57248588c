"""A public function as an object: what it takes, accepts, chooses, launches, and computes on a CPU.

The skeleton of a call stands here and nowhere else: probe, look the plan up, make it where it is
missing, run it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from k3cupy.call.arguments import Arguments, Problem, Values
from k3cupy.call.choice import Choice
from k3cupy.call.launch import Launch
from k3cupy.call.plans import CudaPlan, Plan, PlanCache, Reference, ReferencePlan, Verify, stamp
from k3cupy.call.repeat import MISS, Repeat, filled
from k3cupy.call.separate import Separate, SeparatePlan
from k3cupy.runtime import devices, env, sources, tracing
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.tensors import is_traced

Given = Mapping[str, Any]
"""What a call asks for beside its tensors, by name."""


operations: dict[Callable[..., Any], Operation] = {}
"""By their public functions."""


@dataclass(frozen=True)
class Operation:
    """One public function.

    Attributes:
        function: it, for its signature.
        kernel: the module of its kernel: ``KERNEL``, ``SOURCE``, ``variant_of``, ``launches``.
        arguments: its tensors.
        options: names of everything else that decides what runs, ``config`` and ``pdl`` among them.
        accept: (values, options) -> the validated call.
        choose: (problem, GPU, options) -> what runs; not asked for a call without tokens.
        reference: what computes it on a CPU.
        check: refuses what of its arguments by name is wrong and no tensor, and adds what
            ``arguments`` name otherwise.
        verify: what K3CUPY_CHECK looks at; None for nothing.
        launches: (problem, configuration, GPU) -> what is queued; None for the kernel's own.
        separate: what computes a call whose choice has no configuration.
        plans: by the signature of their calls.
        repeats: what repeats the last calls of each shape, by shapes and options.
        sources: the CUDA sources of its kernel.
    """

    function: Callable[..., Any]
    kernel: Any
    arguments: Arguments
    options: tuple[str, ...]
    accept: Callable[[Values, Given], Problem]
    choose: Callable[[Any, DeviceInfo, Given], Choice]
    reference: Reference
    check: Callable[[dict[str, Any]], None]
    verify: Verify | None = None
    launches: Callable[[Any, Any, DeviceInfo], Sequence[Launch]] | None = None
    separate: Separate | None = None
    plans: PlanCache = field(default_factory=PlanCache)
    repeats: PlanCache = field(default_factory=PlanCache)
    sources: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Name the sources once, which counts on every call, and be found by the function."""
        object.__setattr__(self, "sources", (self.kernel.SOURCE,))
        operations[self.function] = self

    @tracing.instead("operation")
    def __call__(self, values: Values, options: tuple[Any, ...], stream: Any) -> Any:
        """Compute a call.

        Args:
            values: its tensors, in the order of ``arguments``.
            options: in the order of ``options``, each of its right type.
            stream: the one that was given; None for the current one.
        """
        now = stamp(self.sources)
        near: Any = None
        if stream is None:
            try:
                near = (values[0].shape, values[1].shape, options, now)
                known = self.repeats.get(near, ())
            except Exception:  # of no shape, or of one that has no hash: told below, by its name
                near, known = None, ()
            for again in known:
                result = again(*values)
                if result is not MISS:
                    return result
        try:
            addresses, signature, owners = self.arguments.probe(values, stream)
        except TypeError:
            return tracing.run_instead(Operation.__call__, self, values, options, stream)
        key = (signature, options, now)
        plan = self.plans.get(key)
        comes_again = plan is not None
        if plan is None:
            if is_traced(values):
                return tracing.run_instead(Operation.__call__, self, values, options, stream)
            given = dict(zip(self.options, options, strict=True))
            problem = self.accept(values, given)
            plan = self.plan_of(problem, self.choice(problem, given), stream)
            self.plans.remember(key, plan)
        result = plan.run(values, addresses, stream)
        del owners  # memory that exists only for this call has been used, or queued to be
        if comes_again and near is not None and (made := plan.repeat(values)) is not None:
            self.repeats.put_first(near, made)  # not for a length that comes once
        return result

    def plan_of(self, problem: Problem, choice: Choice, stream: Any) -> Plan:
        """Prepare everything of a validated call that does not depend on its addresses.

        Raises:
            CaptureError: a kernel would have to be compiled or loaded while a graph is captured.
        """
        checks = env.CHECK in env.values and env.check_enabled()
        verify = self.verify if checks else None
        if choice.runs_on == "cpu":
            sources.warn_unused()
            return ReferencePlan(self.arguments, problem, self.reference, verify)
        if choice.config is None and problem.num_tokens and self.separate:
            how: Any = {"pdl": choice.pdl, "verify": verify, "stream": stream}
            return SeparatePlan(self.arguments, problem, self.separate, **how)
        launches: Sequence[Launch] = ()
        if problem.num_tokens:
            make = self.launches or self.kernel.launches
            launches = make(problem, choice.config, devices.info(problem.first.device_index))
        return CudaPlan(
            self.arguments, problem, launches, pdl=choice.pdl, verify=verify, stream=stream
        )

    def choice(self, problem: Problem, given: Given, gpu: DeviceInfo | None = None) -> Choice:
        """Say what runs for a validated call, and why; on a named GPU, or that of its tensors.

        Raises:
            ValueError: the caller's configuration cannot compute it on this GPU.
            ToolchainError: the GPU is too old for every kernel.
        """
        first, name = problem.first, self.kernel.KERNEL
        if gpu is None and not first.is_cuda:
            return Choice(name, None, "the tensors are on the CPU", runs_on="cpu")
        gpu = gpu or devices.info(first.device_index)
        pdl = gpu.has_pdl and given["pdl"] is not False
        if problem.num_tokens == 0:
            return Choice(name, None, "no tokens: nothing is launched", pdl=pdl)
        devices.check_supported(gpu)
        return self.complete(problem, self.choose(problem, gpu, given), pdl)

    def complete(self, problem: Problem, choice: Choice, pdl: bool) -> Choice:
        """Return a choice with the call's instance, launch attribute, and what makes it slower.

        One without a configuration is that of functions which have their own.
        """
        if choice.config is None:
            return replace(choice, pdl=pdl)
        reason = choice.reason
        if problem.slow_reason is not None:
            reason += f"; element by element, not 128-bit, because {problem.slow_reason}"
        name = choice.config.name_expression(self.kernel.variant_of(problem))
        return replace(choice, reason=reason, name_expression=name, pdl=pdl)

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, those among them that are no tensors checked."""
        found = inspect.signature(self.function).bind(*args, **kwargs)
        found.apply_defaults()
        self.check(found.arguments)
        return found.arguments

    def explain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Choice:
        """Validate a call and say what it would run; launch nothing.

        Args:
            args: positional arguments of the function.
            kwargs: its keyword arguments; and ``gpu``, one that need not be here, as
                ``devices.named`` takes it.
        """
        kwargs = dict(kwargs)
        gpu = kwargs.pop("gpu", None)
        gpu = None if gpu is None else devices.named(gpu)
        given = self.bound(args, kwargs)
        problem = self.accept(tuple(given[name] for name in self.arguments.names), given)
        return self.choice(problem, given, gpu)

    def prepared(
        self, _: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Repeat, tuple[str, ...], Choice]:
        """Validate a call of the function and load what it runs; launch nothing.

        Returns:
            What runs it for other tensors, the names of those, and the choice.
        """
        given = self.bound(args, kwargs)
        stream, names = given.get("stream"), self.arguments.names
        values = tuple(given[name] for name in names)
        problem = self.accept(values, given)
        choice = self.choice(problem, given)
        plan = self.plan_of(problem, choice, stream)
        run = plan.prepared(values) if stream is None else None
        if run is None:
            options = tuple(given[name] for name in self.options)
            run = filled(values, names, problem.views, lambda every: self(every, options, stream))
        return run, tuple(problem.views), choice


@tracing.instead("check_options")
def check_options(operation: Operation, options: tuple[Any, ...]) -> None:
    """Refuse options of a wrong type, which are in the order of the operation's."""
    operation.check(dict(zip(operation.options, options, strict=True)))
