"""What PyTorch's compiler is told of this package: call it, and do not trace into it.

A call of ours reads addresses, keeps plans and loads kernels. Traced, that turns into guards on
``sys.modules`` and on our dictionaries, which change while the compiler walks through them. So
``torch.compile`` leaves its graph for a call and goes on behind it. The layers in ``k3cupy.torch``
are made to be traced, and become an operator.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SKIPPED = (
    *("accept", "call", "choose", "kernels", "ops", "reference", "runtime", "tuning"),
    "torch.torch_library",
)
_GENERATED = "<k3cupy"
"""How the file names of generated code begin."""

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
    told = True


def untraced(function: _Function) -> _Function:
    """Mark a function that asks for no stamp, so that the compiler may meet it before it is told.

    What is opaque is called, and then looked at by itself, with what it calls: not this one. The
    public name of that imports the compiler.
    """
    with contextlib.suppress(Exception):
        frames = sys.modules["torch"]._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return opaque(function)


def opaque(function: _Function) -> _Function:
    """Mark a function that the compiler must call: the mark is read without its being imported."""
    vars(function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="k3cupy's functions choose and launch kernels, call by call",
    )
    return function
