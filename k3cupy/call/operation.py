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
from k3cupy.runtime import devices, env
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance

Options = tuple[Any, ...]
"""What a call asks for beside its tensors, in the order of an operation's ``options``."""


@dataclass(frozen=True)
class Operation:
    """One public function.

    Attributes:
        kernel: the name of its kernel in choices and tables.
        arguments: its tensors.
        options: names of everything else that decides what runs, ``config`` and ``pdl`` among them.
        sources: the CUDA sources of its kernels.
        accept: (values, *options) -> the validated call.
        choose: (problem, GPU, *options) -> what runs; not asked for a call without tokens.
        launches: (problem, choice, GPU) -> what is queued.
        instance: (problem, configuration) -> what is compiled.
        reference: what computes it on a CPU.
        verify: what K3CUPY_CHECK looks at; None for nothing.
    """

    kernel: str
    arguments: Arguments
    options: tuple[str, ...]
    sources: tuple[str, ...]
    accept: Callable[..., Problem]
    choose: Callable[..., Choice]
    launches: Callable[[Any, Choice, DeviceInfo], Sequence[Launch]]
    instance: Callable[[Any, Any], Instance]
    reference: Reference
    verify: Verify | None = None
    plans: PlanCache = field(default_factory=PlanCache)

    def __call__(self, values: Values, options: Options, stream: Any) -> Any:
        """Compute a call.

        Args:
            values: its tensors, in the order of ``arguments``.
            options: in the order of ``options``, each of its right type.
            stream: the one that was given; None for the current one.
        """
        addresses, signature, owners = self.arguments.probe(values, stream)
        key = (signature, options, stamp(self.sources))
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plan(values, options, stream)
            self.plans.remember(key, plan)
        result = plan.run(values, addresses, stream)
        del owners  # memory that exists only for this call has been used, or queued to be
        return result

    def plan(self, values: Values, options: Options, stream: Any) -> Plan:
        """Validate a call and prepare everything that does not depend on its addresses.

        Raises:
            TypeError, ValueError: an argument does not fit.
            CaptureError: a kernel would have to be compiled or loaded while a graph is captured.
        """
        problem = self.accept(values, *options)
        return self.plan_of(problem, self.choice(problem, options), stream)

    def plan_of(self, problem: Problem, choice: Choice, stream: Any) -> Plan:
        """Prepare a validated call for which the choice was made."""
        checks = env.CHECK in env.values and env.check_enabled()
        verify = self.verify if checks else None
        if choice.runs_on == "cpu":
            return ReferencePlan(self.arguments, problem, self.reference, verify)
        launches: Sequence[Launch] = ()
        if problem.num_tokens:
            launches = self.launches(problem, choice, devices.info(problem.first.device_index))
        return CudaPlan(
            self.arguments, problem, launches, pdl=choice.pdl, verify=verify, stream=stream
        )

    def choice(self, problem: Problem, options: Options) -> Choice:
        """Say what runs for a validated call, and why.

        Raises:
            ValueError: the caller's configuration cannot compute it on this GPU.
        """
        first = problem.first
        if not first.is_cuda:
            return Choice(self.kernel, None, "the tensors are on the CPU", runs_on="cpu")
        gpu = devices.info(first.device_index)
        pdl = gpu.has_pdl and options[self.options.index("pdl")] is not False
        if problem.num_tokens == 0:
            return Choice(self.kernel, None, "no tokens: nothing is launched", pdl=pdl)
        return self.complete(problem, self.choose(problem, gpu, *options), pdl)

    def complete(self, problem: Problem, choice: Choice, pdl: bool) -> Choice:
        """Return a choice with the instance and the launch attribute of a call."""
        name = self.instance(problem, choice.config).name_expression
        return replace(choice, name_expression=name, pdl=pdl)

    def explain(self, given: Mapping[str, Any]) -> Choice:
        """Validate a call and say what it would run; launch nothing.

        Args:
            given: the arguments by name.
        """
        values = tuple(given[name] for name in self.arguments.names)
        options = tuple(given[name] for name in self.options)
        return self.choice(self.accept(values, *options), options)


def bound(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a public function's arguments by name, defaults filled in.

    Raises:
        TypeError: the function does not take these.
    """
    found = inspect.signature(function).bind(*args, **kwargs)
    found.apply_defaults()
    return found.arguments
