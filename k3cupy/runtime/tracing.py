"""What PyTorch's compiler is told of this package: where it goes on, and into what it never looks.

A call of ours reads addresses, keeps plans and loads kernels. Traced, that turns into guards on
``sys.modules`` and on our dictionaries, which change while the compiler walks through them. So a
few functions have another one that is traced in their place, in ``k3cupy.torch.compiled``: that one
puts an operator of PyTorch's into the graph. Behind those the compiler never looks. A call that no
operator can carry leaves the graph, and is called.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from k3cupy.runtime import tensors

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SKIPPED = (
    *("accept", "call", "choose", "kernels", "reference", "runtime", "tuning"),
    *("ops.batch_invariance", "ops.dispatch_report", "ops.prepare", "ops.warmup"),
    *("torch.operators", "torch.torch_library"),
)
"""Not so the modules of the public functions, which are walked through up to what is traced."""

_GENERATED = "<k3cupy"
"""How the file names of generated code begin."""

_TRACED = "k3cupy.torch.compiled"
"""It imports nothing before it is traced, PyTorch neither."""

_WHY = "k3cupy's functions choose and launch kernels, call by call"

_replaced: list[Callable[..., Any]] = []
"""The functions in whose place others are traced. Where they are called, nobody looks into them."""

told = False
"""Whether the compiler knows."""


def tell() -> None:
    """Let the compiler know, which has been imported; it is asked for no sooner than it is there.

    Its list of files to skip has no public name. A version without that list traces as it likes:
    that is no reason for a call to fail.
    """
    global told
    with contextlib.suppress(Exception):
        from torch._dynamo import trace_rules

        trace_rules.SKIP_DIRS.append(_GENERATED)
        for name in _SKIPPED:
            trace_rules.add(f"k3cupy.{name}")
    for function in _replaced:
        unseen(function)
    told = True


def instead(name: str) -> Callable[[_Function], _Function]:
    """Let the compiler trace another function wherever it meets this one; calls are as before.

    The mark is read without the compiler's being imported, so it may come later. A version that
    does not know it traces the function itself, and leaves its graph there.

    Args:
        name: of the other, which takes the same arguments.
    """

    def mark(function: _Function) -> _Function:
        _replaced.append(function)
        vars(function)["_torchdynamo_inline"] = getattr(importlib.import_module(_TRACED), name)
        return function

    return mark


def run_instead(function: Callable[..., Any], *given: Any) -> Any:
    """Run what is traced instead of a function that has failed to read its tensors.

    Args:
        function: it.
        given: its arguments, with tuples of tensors among them.

    Raises:
        Exception: that of the failure, where they are no tensors of a trace.
    """
    if not any(isinstance(values, tuple) and tensors.is_traced(values) for values in given):
        raise  # while that is handled
    return vars(function)["_torchdynamo_inline"](*given)


def untraced(function: _Function, why: str = _WHY) -> _Function:
    """Mark a function that asks for no stamp, so that the compiler may meet it before it is told.

    What is opaque is called, and then looked at by itself, with what it calls: not this one.
    """
    return opaque(unseen(function), why)


def unseen(function: _Function) -> _Function:
    """Let the compiler never look into a function that is called, nor into what that calls.

    It goes by frames: one that it has given up runs as it is, but those that it calls are looked
    at, each by itself. Where the compiler meets the function in code that it traces, it traces it.
    """
    with contextlib.suppress(Exception):
        frames = sys.modules["torch"]._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def opaque(function: _Function, why: str = _WHY) -> _Function:
    """Mark a function that the compiler must call: the mark is read without its being imported."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=why)
    return function
