"""Repeating a call: a function generated for a plan, and for which of its arguments are given.

It does in line what a call like an earlier one needs: PyTorch tells in one call of C whether the
tensors are like those of then, their addresses are read and looked at, new outputs made, and the
launches queued with what has changed. Whatever is not like it, or is not PyTorch's on a GPU, goes
the long way, which tells what is wrong as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import ALIGNMENT
from k3cupy.runtime.tracing import untraced

MISS: Any = object()
"""What a repeat returns for a call that is not like its plan's; nothing has happened then."""

Repeat = Callable[..., Any]
"""(each value) -> the result, or MISS; of a prepared call (each tensor) -> the result."""


@dataclass(frozen=True)
class Step:
    """A launch as calls repeat it.

    Attributes:
        pointers: (argument, what makes the kernel's argument of its address; None for itself).
        numbers: (argument, its name, what makes the kernel's argument of both).
        queue: takes the stream and those, in this order.
    """

    pointers: tuple[tuple[int, Callable[[int], Any] | None], ...]
    numbers: tuple[tuple[int, str, Callable[[str, Any], Any]], ...]
    queue: Callable[..., None]

    def launch(self, handle: int, values: Sequence[Any], addresses: Sequence[int]) -> None:
        """Queue it for a call."""
        arguments = [
            addresses[i] if make is None else make(addresses[i]) for i, make in self.pointers
        ]
        arguments += [make(name, values[i]) for i, name, make in self.numbers]
        self.queue(handle, *arguments)


@dataclass(frozen=True)
class Recipe:
    """What is generated of.

    Attributes:
        values: of one call, all of whose tensors are PyTorch's on one GPU.
        addresses: of them.
        alike: tells whether tensors are like those; each once, in order.
        suspicious: the test of memory, in the names of ``call.arguments.Memory``; may be empty.
        spans: by place, for that test.
        refuse: (values, addresses) -> looks again where the test finds something.
        outputs: (place, what makes one; None for the caller's), in the order of the results.
        counted: the places of what is written and counted.
        count: counts them.
        current_stream: gives the handle of the stream.
        steps: the launches.
        grad_mode: of the call, where one of its tensors requires grad; else None.
        torch: the module.
    """

    values: tuple[Any, ...]
    addresses: Sequence[int]
    alike: Callable[..., bool]
    suspicious: str
    spans: Mapping[int, int]
    refuse: Callable[..., None]
    outputs: Sequence[tuple[int, Callable[[], Any] | None]]
    counted: Sequence[int]
    count: Callable[[Any], None] | None
    current_stream: Callable[[], int]
    steps: Sequence[Step]
    grad_mode: bool | None
    torch: Any


def make_repeat(recipe: Recipe) -> Repeat:
    """Return what computes calls that are like the one of a recipe, and tells others."""
    others = []
    for i, value in enumerate(recipe.values):
        if value is None:
            others.append(f"t{i} is not None")
        elif i not in recipe.spans:  # a number
            others.append(f"type(t{i}) is not type{i}")
    others += [f"t{i} is None" for i, make in recipe.outputs if make is None]  # sooner than alike
    others += _unlike(recipe, 2)  # of the first two the shapes are known
    lines = [f"if {' or '.join(others)}:", "    return MISS"]
    return _compiled(recipe, [f"t{i}" for i in range(len(recipe.values))], lines, "return MISS")


def make_prepared(recipe: Recipe, names: Sequence[str], changed: Callable[..., None]) -> Repeat:
    """Return what computes calls of new tensors that are like those of a recipe.

    Its ``unchecked`` takes them to be like those, and looks at their addresses alone.

    Args:
        recipe: of what it is made.
        names: of its tensors.
        changed: (values) -> the error for tensors that are not like those.
    """
    every = ["None" if v is None else f"t{i}" for i, v in enumerate(recipe.values)]
    refused = f"changed(({', '.join(every)},))"
    taken = [f"t{i} = {_word(name)}" for i, name in zip(recipe.spans, names, strict=True)]
    checks = [f"if {' or '.join(_unlike(recipe, 0))}:", f"    {refused}"]
    words = [_word(name) for name in names]
    run = untraced(_compiled(recipe, words, [*taken, *checks], refused, changed))
    vars(run)["unchecked"] = untraced(_compiled(recipe, words, taken, refused, changed))
    return run


def filled(
    values: Sequence[Any], names: Sequence[str], tensors: Collection[str], call: Callable[..., Any]
) -> Repeat:
    """Return what computes calls of new tensors, as the operation itself does.

    Args:
        values: of a call.
        names: of all of them.
        tensors: of those that come anew; the others stay.
        call: (values) -> the result.
    """

    def whole(values: tuple[Any, ...]) -> Any:
        for name, value in zip(names, values, strict=True):
            if value is None and name in tensors:  # it would be left out, or made
                reject(name, "a tensor, as prepared", "None", error=TypeError)
        return call(values)

    kept = [i for i, name in enumerate(names) if name not in tensors]
    scope: dict[str, Any] = {f"t{i}": values[i] for i in kept}
    told = [_word(name) if name in tensors else f"t{i}" for i, name in enumerate(names)]
    taken = ", ".join(_word(name) for name in names if name in tensors)
    text = f"def prepared({taken}):\n    return call(({', '.join(told)},))"
    exec(_code(text), scope | {"call": whole}, scope)
    made: Repeat = scope["prepared"]
    return made


def _word(name: str) -> str:
    """Return what a parameter is called: ``out0`` for ``out[0]``."""
    return name.replace("[", "").replace("]", "")


def _given(recipe: Recipe) -> tuple[list[int], dict[int, int]]:
    """Return the places of the tensors, and by place the first one of those that come twice."""
    first: dict[int, int] = {}
    given, same = [], {}
    for i, value in enumerate(recipe.values):
        if i in recipe.spans:
            if (known := first.setdefault(id(value), i)) != i:
                same[i] = known
            else:
                given.append(i)
    return given, same


def _unlike(recipe: Recipe, known: int) -> list[str]:
    """Return the tests of tensors; PyTorch's ends the process where it compares a nested one."""
    given, same = _given(recipe)
    others = [f"t{i} is not t{first}" for i, first in same.items()]
    others += [f"getattr(t{i}, 'is_nested', True)" for i in given if i >= known]
    return [*others, f"not alike({_names('t', given)})"]


def _names(prefix: str, places: Any) -> str:
    return "".join(f"{prefix}{i}, " for i in places)


def _compiled(
    recipe: Recipe,
    arguments: Iterable[str],
    lines: list[str],
    otherwise: str,
    changed: Any = None,
) -> Repeat:
    scope: dict[str, Any] = {
        "MISS": MISS,
        "alike": recipe.alike,
        "changed": changed,
        "count": recipe.count,
        "len": len,
        "current_stream": recipe.current_stream,
        "forward_ad": recipe.torch.autograd.forward_ad,
        "is_grad_enabled": recipe.torch.is_grad_enabled,
        "modes": recipe.torch._C._len_torch_dispatch_stack,
        "refuse": recipe.refuse,
    }
    for i, value in enumerate(recipe.values):
        if i not in recipe.spans:
            scope |= {f"t{i}": value, f"type{i}": type(value)}
    scope |= {f"s{i}": span for i, span in recipe.spans.items()}
    lines += [f"a{i} = t{i}.data_ptr()" for i in recipe.spans]
    past = {i: recipe.addresses[i] % ALIGNMENT for i in recipe.spans}
    aligned = " | ".join(f"a{i}" for i, rest in past.items() if not rest)
    every_at = " and ".join(f"a{i}" for i in recipe.spans)
    tests = [f"not ({every_at})", "forward_ad._current_level >= 0", "modes()"]
    if recipe.grad_mode is not None:
        tests.append(f"is_grad_enabled() is not {recipe.grad_mode}")
    tests += [f"({aligned}) % {ALIGNMENT}"] if aligned else []
    tests += [f"a{i} % {ALIGNMENT} != {rest}" for i, rest in past.items() if rest]
    lines += [f"if {' or '.join(tests)}:", f"    {otherwise}"]
    if recipe.suspicious:
        lines += [f"e{i} = a{i} + s{i}" for i in recipe.spans if f"e{i}" in recipe.suspicious]
        values = ", ".join("None" if v is None else f"t{i}" for i, v in enumerate(recipe.values))
        addresses = [f"a{i}" if i in recipe.spans else "0" for i in range(len(recipe.values))]
        lines += [
            f"if {recipe.suspicious}:",
            f"    refuse(({values},), [{', '.join(addresses)}])",
        ]
    for i, make in recipe.outputs:
        if make is not None:
            scope[f"make{i}"] = make
            lines += [f"t{i} = make{i}()", f"a{i} = t{i}.data_ptr()"]
            lines += [f"if not a{i}:", f"    {otherwise}"]
    lines.append("handle = current_stream()")
    for k, step in enumerate(recipe.steps):
        scope[f"queue{k}"] = step.queue
        told = ["handle"]
        for j, (i, convert) in enumerate(step.pointers):
            scope[f"pointer{k}_{j}"] = convert
            told.append(f"a{i}" if convert is None else f"pointer{k}_{j}(a{i})")
        for j, (i, name, number) in enumerate(step.numbers):
            scope[f"number{k}_{j}"] = number
            told.append(f"number{k}_{j}({name!r}, t{i})")
        lines.append(f"queue{k}({', '.join(told)})")
    if recipe.counted:
        lines.append(f"count(({_names('t', recipe.counted)}))")
    results = [f"t{i}" for i, _ in recipe.outputs]
    lines.append(f"return {', '.join(results)}")
    # What it uses is in cells, which are read sooner than a dictionary.
    text = "\n".join(
        [
            f"def make({', '.join(scope)}):",
            f"    def repeat({', '.join(arguments)}):",
            *[f"        {line}" for line in lines],
            "    return repeat",
        ]
    )
    module: dict[str, Any] = {}
    exec(_code(text), module)
    made: Repeat = module["make"](**scope)
    return made


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> CodeType:
    return compile(text, "<k3cupy repeat>", "exec")
