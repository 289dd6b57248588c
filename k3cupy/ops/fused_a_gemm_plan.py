"""Plans of the fused-A GEMM: a validated call with its kernel, ready to repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from k3cupy.ops import checks, cuda_call, outputs
from k3cupy.ops.arguments import Values
from k3cupy.ops.cuda_call import CudaOutput, CudaPlace
from k3cupy.ops.decision import Decision
from k3cupy.ops.fused_a_gemm_choice import choose
from k3cupy.ops.fused_a_gemm_config import FusedAGemmConfig
from k3cupy.ops.fused_a_gemm_validate import (
    OUT,
    RESIDUAL,
    RESIDUAL_NAME,
    WEIGHT,
    Form,
    FusedAGemmProblem,
    X,
    check_config,
    validate,
)
from k3cupy.ops.plan_cache import Plan
from k3cupy.reference.fused_a_gemm import fused_a_gemm_reference
from k3cupy.runtime import devices, launch, streams, tensors
from k3cupy.runtime.tensors import TensorView

_DTYPE = "bfloat16"
_KERNEL_WEIGHT, _KERNEL_X, _KERNEL_OUT, _KERNEL_RESIDUAL = 0, 3, 6, 8
"""Places of the pointers among the kernel's arguments."""


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its tensors; part of a plan's key.

    Attributes:
        pdl: programmatic dependent launch; None for on where the GPU has it.
        weight_is_static: the promise.
        batch_invariant: a row's bits do not depend on the number of rows.
        config: None for the table.
    """

    pdl: bool | None
    weight_is_static: bool
    batch_invariant: bool
    config: FusedAGemmConfig | None


def decide(problem: FusedAGemmProblem, options: Options) -> Decision:
    """Choose backend and configuration for a validated call.

    Raises:
        ValueError: the caller's configuration cannot compute it on this GPU.
    """
    x = problem.x
    if not x.is_cuda:
        check_config(options.config, problem.num_tokens)
        return Decision("reference", None, None, False, "the tensors are on the CPU")
    device = devices.info(x.device_index)
    config = check_config(options.config, problem.num_tokens, device)
    pdl = cuda_call.has_pdl(device.index, options.pdl)
    if problem.num_tokens == 0:
        return Decision("cuda", None, None, pdl, "no tokens: nothing is launched")
    if config is not None:
        reason = "the caller named the configuration"
    else:
        config, reason = choose(
            problem.n,
            problem.k,
            problem.num_tokens,
            device,
            batch_invariant=options.batch_invariant,
        )
    if problem.slow_reason is not None:
        reason += f"; x element by element, not 128-bit, because {problem.slow_reason}"
    return Decision("cuda", config, config.name_expression(problem.variant), pdl, reason)


def make_plan(form: Form, values: Values, options: Options, stream: Any) -> Plan:
    """Validate a call and prepare everything that does not depend on its addresses.

    Args:
        form: which function was called.
        values: its tensors.
        options: everything else.
        stream: the one that was given, to see whether it captures; None for the current one.

    Raises:
        TypeError, ValueError: an argument does not fit.
        CaptureError: the kernel would have to be compiled or loaded while a graph is captured.
    """
    problem = validate(form, values, weight_is_static=options.weight_is_static)
    checks.check_grad(problem.views)
    decision = decide(problem, options)
    if decision.backend == "reference":
        return _ReferencePlan(problem)
    return _CudaPlan(problem, decision, stream)


def _row_stride(v: TensorView) -> int:
    """Return the elements between rows; of one row nobody asks for them."""
    return v.strides[0] if v.shape[0] > 1 else 0


class _ReferencePlan:
    """A call on CPU tensors."""

    def __init__(self, problem: FusedAGemmProblem) -> None:
        self._form = problem.form
        self._layout = problem.layout()
        self._framework = problem.x.framework
        shape = (problem.num_tokens, problem.n)
        self._allocate = outputs.allocator(self._framework, shape, _DTYPE, None)

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        self._layout.check(values, addresses)
        form, given = self._form, values[OUT]
        out = self._allocate() if given is None else given
        views = form.arguments.views((values[X], values[WEIGHT], out, values[RESIDUAL]))
        arrays = {name: tensors.as_numpy(v, ml_dtypes.bfloat16) for name, v in views.items()}
        weight = arrays[form.weight]
        fused_a_gemm_reference(
            arrays[form.x],
            weight.T if form.is_transposed else weight,
            arrays[form.out],
            arrays.get(RESIDUAL_NAME),
        )
        return outputs.finish(self._framework, out, _DTYPE) if given is None else out


class _CudaPlan:
    """A call on CUDA tensors."""

    def __init__(self, problem: FusedAGemmProblem, decision: Decision, stream: Any) -> None:
        form = problem.form
        self._layout = problem.layout()
        self._place = CudaPlace(problem.views, form.x)
        self._current_stream = self._place.current_stream
        self._output = CudaOutput(self._place, (problem.num_tokens, problem.n), _DTYPE)
        self._launch: launch.Launcher | None = None
        if problem.num_tokens:
            self._prepare(problem, decision, stream)

    def _prepare(self, problem: FusedAGemmProblem, decision: Decision, stream: Any) -> None:
        config: FusedAGemmConfig = decision.config
        kernel = self._place.load(config.instance(problem.variant), stream)
        kernel.allow_shared_memory(config.shared_bytes)
        out, residual = problem.out, problem.residual
        self._arguments = [
            0,
            np.uint32(problem.n),
            np.uint32(problem.k),
            0,
            np.uint32(problem.num_tokens),
            _row_stride(problem.x),
            0,
            problem.n if out is None else _row_stride(out),
            0,
            0 if residual is None else _row_stride(residual),
            np.uint32(config.rows),
        ]
        self._launch = launch.make_launcher(
            self._place.device,
            kernel.kernel,
            grid=config.blocks(problem.n) // config.split_k,
            block=config.block_size,
            pdl=decision.pdl,
            shared_bytes=config.shared_bytes,
            cluster=config.split_k,
        )

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
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
            arguments[_KERNEL_WEIGHT] = addresses[WEIGHT]
            arguments[_KERNEL_X] = addresses[X]
            arguments[_KERNEL_OUT] = out_address
            arguments[_KERNEL_RESIDUAL] = addresses[RESIDUAL]
            self._launch(handle, arguments)
        if stream is not None:
            outputs.keep_for_stream([*values, out], self._place.device, handle)
        if self._output.is_handed_over and values[OUT] is None:
            return self._output.hand_over(out, handle)
        return out
