"""Preparing a call: what does not change is settled once, and each call brings its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from k3cupy.call.choice import Choice
from k3cupy.call.operation import operations
from k3cupy.ops import linear
from k3cupy.ops.fused_a_gemm import dsv3_fused_a_gemm
from k3cupy.runtime.errors import reject


class PreparedCall(Protocol):
    """What ``prepare`` returns: a function of the tensors that the call was prepared with.

    Attributes:
        tensors: their names, in the order in which it takes them; ``out[1]`` by name is ``out1``.
        choice: what runs, and why.
        unchecked: the same function for tensors that you promise to be like those of the
            preparation: of them it looks at the addresses alone. See ``prepare``.
    """

    tensors: tuple[str, ...]
    choice: Choice
    unchecked: Callable[..., Any]

    def __call__(self, *tensors: Any, **named: Any) -> Any:
        """Compute the call with these tensors."""


def prepare(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> PreparedCall:
    """Settle everything of a call but its tensors, and return a function of those.

    The call is validated, its configuration chosen and its kernel loaded; nothing is launched. The
    function that comes back takes the tensors of the call, by position in the order of the
    operation's own arguments or by name, and nothing else: what was left out stays out, numbers,
    flags and the configuration stay as they are. An output that was given is one of its tensors;
    otherwise each call makes a new one. It may be called from several threads, and in a capture.

    It saves the host the look for a plan, not the checks that keep a kernel within memory. Each
    call of PyTorch's tensors on a GPU checks that

    - class, shape, strides, type, device and ``requires_grad`` are those of the preparation, and so
      are autocast, inference mode and transforms;
    - there is memory, at addresses as far from a multiple of 16 bytes as then;
    - an output shares none with another tensor.

    Not looked at is what the operation itself looks at on every call: whether a storage was freed
    or shrunk behind a tensor. The function's ``unchecked``, which takes the same tensors, leaves
    out the first of the three as well, and whoever calls it promises that: a tensor of another
    shape, type or device is read and written as if it were one of these.

    Tables, modes and edited sources that change later change nothing. Calls of low-latency linear
    are not counted in ``dispatch_report``.

    On other tensors (of the CPU, of CuPy, JAX and others), with a stream of its own, with
    K3CUPY_CHECK, or where the framework's linear or separate kernels run, the function is the
    operation itself with its arguments filled in: it checks what that checks, and costs as much.

    Args:
        function: an operation of this package; of the two names of the fused-A GEMM,
            ``fused_a_gemm``.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError, ValueError, CaptureError, CompileError, ToolchainError: as the operation; and
            what is no operation.

    Example:
        >>> import torch, k3cupy
        >>> x, weight = torch.ones(4, 128).bfloat16(), torch.ones(256, 128).bfloat16()
        >>> call = k3cupy.prepare(k3cupy.fused_a_gemm, x, weight, weight_is_static=True)
        >>> call.tensors
        ('x', 'weight')
        >>> call(2 * x, weight)[0, 0]
        tensor(256., dtype=torch.bfloat16)
    """
    prepared: Callable[..., Any]
    named = function if callable(function) else None  # what can be no operation may have no hash
    hint = "Give the function itself, as k3cupy.fused_a_gemm"
    if named in (linear.low_latency_linear, linear.try_low_latency_gemm):
        prepared = linear.prepared
    elif named in operations and named is not dsv3_fused_a_gemm:
        prepared = operations[named].prepared
    else:
        if named is dsv3_fused_a_gemm:
            hint = "Of its two names take fused_a_gemm, which computes the same"
        reject("function", "an operation of k3cupy", repr(function), hint, TypeError)
    run, tensors, choice = prepared(function, args, kwargs)
    vars(run).update(tensors=tensors, choice=choice)
    vars(run).setdefault("unchecked", run)
    for each in (run, vars(run)["unchecked"]):
        each.__name__ = each.__qualname__ = f"prepared_{function.__name__}"  # errors tell it
        each.__doc__ = f"Run {function.__name__} on new tensors: {', '.join(tensors)}."
    return cast(PreparedCall, run)
