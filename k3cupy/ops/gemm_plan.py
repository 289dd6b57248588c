"""Plans of products of a few tokens with a weight: a validated call, ready to repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import numpy.typing as npt

from k3cupy.ops import outputs
from k3cupy.ops.arguments import Values
from k3cupy.ops.cuda_call import CudaOutput, CudaPlace, has_pdl
from k3cupy.ops.decision import Decision
from k3cupy.ops.gemm_validate import OUT, RESIDUAL, RESIDUAL_NAME, WEIGHT, GemmProblem, X
from k3cupy.ops.plan_cache import Plan
from k3cupy.runtime import devices, launch, streams, tensors
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance
from k3cupy.runtime.tensors import TensorView

Array = npt.NDArray[Any]
Reference = Callable[[Array, Array, Array, Array | None], None]
"""Computes (x, weight [N, K], out, residual or None) in NumPy."""


@dataclass(frozen=True)
class Kernel:
    """What a configuration launches.

    Attributes:
        instance: what is compiled.
        arguments: those of the kernel; 0 in place of a pointer.
        pointers: places of x, weight, out and residual among them.
        grid: clusters; with ``cluster=1`` that is blocks.
        block: threads a block.
        shared_bytes: dynamic shared memory a block.
        cluster: blocks a cluster.
        x_argument: makes x's argument of its address; None where that is the address itself.
    """

    instance: Instance
    arguments: tuple[Any, ...]
    pointers: tuple[int, int, int, int]
    grid: int
    block: int
    shared_bytes: int = 0
    cluster: int = 1
    x_argument: Callable[[int], Any] | None = None


def row_stride(v: TensorView | None, packed: int = 0) -> int:
    """Return the elements between rows; of one row nobody asks for them.

    Args:
        v: the tensor, or None for one that is left out.
        packed: what to return without a tensor.
    """
    if v is None:
        return packed
    return v.strides[0] if v.shape[0] > 1 else 0


def decide(
    problem: GemmProblem,
    variant: Any,
    pdl: bool | None,
    config: Any,
    choose: Callable[[DeviceInfo], tuple[Any, str]],
) -> Decision:
    """Choose backend and configuration for a validated call.

    Args:
        problem: the validated call.
        variant: which kernel its arguments ask for.
        pdl: programmatic dependent launch; None for on where the GPU has it.
        config: the caller's, checked, or None.
        choose: gives the package's own choice for a GPU, and the reason in words.
    """
    if not problem.x.is_cuda:
        return Decision("reference", None, None, False, "the tensors are on the CPU")
    device = devices.info(problem.x.device_index)
    with_pdl = has_pdl(device.index, pdl)
    if problem.num_tokens == 0:
        return Decision("cuda", None, None, with_pdl, "no tokens: nothing is launched")
    if config is not None:
        reason = "the caller named the configuration"
    else:
        config, reason = choose(device)
    if problem.slow_reason is not None:
        reason += f"; x element by element, not 128-bit, because {problem.slow_reason}"
    return Decision("cuda", config, config.name_expression(variant), with_pdl, reason)


def plan_of(
    problem: GemmProblem,
    decision: Decision,
    reference: Reference,
    kernel_of: Callable[[Any], Kernel],
    stream: Any,
) -> Plan:
    """Return what repeats a call, as it was decided.

    Args:
        problem: the validated call.
        decision: from ``decide``.
        reference: what computes it on CPU tensors.
        kernel_of: gives what a configuration launches.
        stream: the one that was given, to see whether it captures; None for the current one.

    Raises:
        CaptureError: the kernel is not loaded and the stream is capturing a graph.
    """
    if decision.backend == "reference":
        return ReferencePlan(problem, reference)
    kernel = None if decision.config is None else kernel_of(decision.config)
    return CudaPlan(problem, kernel, pdl=decision.pdl, stream=stream)


class ReferencePlan:
    """A call on CPU tensors."""

    def __init__(self, problem: GemmProblem, reference: Reference) -> None:
        """Prepare the output.

        Args:
            problem: the validated call.
            reference: what computes it.
        """
        self._form, self._reference = problem.form, reference
        self._layout = problem.layout()
        self._dtype, self._framework = problem.x.dtype, problem.x.framework
        shape = (problem.num_tokens, problem.n)
        self._allocate = outputs.allocator(self._framework, shape, self._dtype, None)

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        """Compute a call."""
        self._layout.check(values, addresses)
        form, given = self._form, values[OUT]
        out = self._allocate() if given is None else given
        views = form.arguments.views((values[X], values[WEIGHT], out, values[RESIDUAL]))
        arrays = {name: tensors.as_numpy(v, np.dtype(self._dtype)) for name, v in views.items()}
        weight = arrays[form.weight]
        self._reference(
            arrays[form.x],
            weight.T if form.is_transposed else weight,
            arrays[form.out],
            arrays.get(RESIDUAL_NAME),
        )
        return outputs.finish(self._framework, out, self._dtype) if given is None else out


class CudaPlan:
    """A call on CUDA tensors."""

    def __init__(
        self, problem: GemmProblem, kernel: Kernel | None, *, pdl: bool, stream: Any
    ) -> None:
        """Load the kernel.

        Args:
            problem: the validated call.
            kernel: what is launched; None where nothing is.
            pdl: with the attribute for programmatic dependent launch.
            stream: the one that was given, to see whether it captures; None for the current one.

        Raises:
            CaptureError: the kernel is not loaded and the stream is capturing a graph.
        """
        self._layout = problem.layout()
        self._place = CudaPlace(problem.views, problem.form.x)
        self._current_stream = self._place.current_stream
        shape = (problem.num_tokens, problem.n)
        self._output = CudaOutput(self._place, shape, problem.x.dtype)
        self._launch: launch.Launcher | None = None
        if kernel is not None:
            self._prepare(kernel, pdl, stream)

    def _prepare(self, kernel: Kernel, pdl: bool, stream: Any) -> None:
        loaded = self._place.load(kernel.instance, stream)
        if kernel.shared_bytes:
            loaded.allow_shared_memory(kernel.shared_bytes)
        self._arguments = list(kernel.arguments)
        self._x_argument = kernel.x_argument
        self._x, self._weight, self._out, self._residual = kernel.pointers
        self._launch = launch.make_launcher(
            self._place.device,
            loaded.kernel,
            grid=kernel.grid,
            block=kernel.block,
            pdl=pdl,
            shared_bytes=kernel.shared_bytes,
            cluster=kernel.cluster,
        )

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        """Queue a call."""
        self._layout.check(values, addresses)
        handle = self._current_stream() if stream is None else streams.handle_of(stream)
        out = values[OUT]
        if out is not None:
            out_address = addresses[OUT]
        else:
            out = self._output.make(stream, handle)
            out_address = self._output.address_of(out)
        if self._launch is not None:
            arguments = self._arguments.copy()
            x, of_address = addresses[X], self._x_argument
            arguments[self._x] = x if of_address is None else of_address(x)
            arguments[self._weight] = addresses[WEIGHT]
            arguments[self._out] = out_address
            arguments[self._residual] = addresses[RESIDUAL]
            self._launch(handle, arguments)
        if stream is not None:
            outputs.keep_for_stream([*values, out], self._place.device, handle)
        if self._output.is_handed_over and values[OUT] is None:
            return self._output.hand_over(out, handle)
        return out
