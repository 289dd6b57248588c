"""Plans of the prefill and context epilogues: a validated call with its kernel, ready to repeat."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np

from k3cupy.constants import QK_ROPE_HEAD_DIM
from k3cupy.ops import checks, cuda_call, mla_checks, mla_prefill_arguments, outputs
from k3cupy.ops.arguments import Layout, Values
from k3cupy.ops.cuda_call import CudaOutput, CudaPlace, ScaleNumbers
from k3cupy.ops.decision import Decision
from k3cupy.ops.mla_prefill_config import (
    KEY_CONCAT_DS_MLA,
    KV_CONCAT,
    KV_CONCAT_QUANT,
    QKV_QUANT,
    MlaPrefillConfig,
    choose,
)
from k3cupy.ops.mla_prefill_validate import MlaPrefillProblem, Operation, validate
from k3cupy.ops.plan_cache import Plan
from k3cupy.reference import mla_prefill as reference
from k3cupy.runtime import devices, env, launch, producers, streams, tensors


def decide(
    problem: MlaPrefillProblem, config: MlaPrefillConfig | None, pdl: bool | None
) -> Decision:
    """Choose backend and configuration for a validated call.

    Args:
        problem: from ``validate``.
        config: None for the measured table.
        pdl: None for on where the GPU has it.
    """
    first = problem.views[problem.operation.first]
    if not first.is_cuda:
        return Decision("reference", None, None, False, "the tensors are on the CPU")
    device = devices.info(first.device_index)
    if config is not None:
        reason = "the caller named the configuration"
    else:
        config, reason = choose(problem.variant, problem.num_tokens, problem.num_heads, device)
    if problem.slow_reason is not None:
        reason += f"; element by element, not 128-bit, because of {problem.slow_reason}"
    if problem.num_tokens == 0:
        reason = "no tokens: nothing is launched"
    return Decision(
        backend="cuda",
        config=config,
        name_expression=config.name_expression(problem.variant),
        pdl=cuda_call.has_pdl(device.index, pdl),
        reason=reason,
    )


def make_plan(
    operation: Operation,
    values: Values,
    config: MlaPrefillConfig | None,
    pdl: bool | None,
    stream: Any,
) -> Plan:
    """Validate a call and prepare everything that does not depend on its addresses.

    Args:
        operation: which of the five.
        values: its tensor arguments.
        config: None for the measured table.
        pdl: None for on where the GPU has it.
        stream: the one that was given, to see whether it captures; None for the current one.

    Raises:
        TypeError, ValueError: an argument does not fit.
        CaptureError: the kernel would have to be compiled or loaded while a graph is captured.
    """
    problem = validate(operation, values)
    checks.check_grad(problem.views)
    decision = decide(problem, config, pdl)
    if decision.backend == "reference":
        return _ReferencePlan(problem)
    return _CudaPlan(problem, decision, stream)


def _shapes(problem: MlaPrefillProblem) -> list[tuple[int, ...]]:
    widths = problem.operation.outputs.values()
    return [(problem.num_tokens, problem.num_heads, width) for width in widths]


def _result(outs: list[Any]) -> Any:
    return outs[0] if len(outs) == 1 else tuple(outs)


class _ReferencePlan:
    """A call on CPU tensors."""

    def __init__(self, problem: MlaPrefillProblem) -> None:
        operation, views = problem.operation, problem.views
        self._problem = problem
        self._layout = Layout(operation.arguments, views, problem.written)
        self._framework = views[operation.first].framework
        self._allocators = [
            outputs.allocator(self._framework, shape, problem.out_dtype, None)
            for shape in _shapes(problem)
        ]

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        problem, operation = self._problem, self._problem.operation
        self._layout.check(values, addresses)
        given = values[len(operation.inputs) :]
        outs = [
            allocate() if out is None else out
            for allocate, out in zip(self._allocators, given, strict=True)
        ]
        views = operation.arguments.views(values)
        arrays = self._arrays(views)
        if env.check_enabled():
            mla_checks.check_index_values(
                arrays.get("slot_mapping"),
                arrays.get("positions"),
                problem.num_slots,
                mla_checks.max_position_of(views),
            )
        out_element = np.uint8 if operation.is_fp8 else np.dtype(problem.variant.dtype)
        for name, key, out in zip(operation.out_names, operation.outputs, outs, strict=True):
            arrays[key] = tensors.as_numpy(producers.view(out, name), out_element)
        if operation.name == KV_CONCAT:
            reference.kv_concat_reference(**arrays)
        elif operation.name == KV_CONCAT_QUANT:
            reference.kv_concat_quant_reference(**arrays)
        elif operation.name == QKV_QUANT:
            for name in operation.arguments.scales:
                arrays[name] = mla_checks.scale_on_cpu(name, operation.arguments, values, views)
            reference.qkv_quant_reference(**arrays)
        else:
            reference.key_concat_reference(**arrays, ds_mla=operation.name == KEY_CONCAT_DS_MLA)
        return _result(
            [
                outputs.finish(self._framework, out, problem.out_dtype) if own is None else out
                for own, out in zip(given, outs, strict=True)
            ]
        )

    def _arrays(self, views: dict[str, tensors.TensorView]) -> dict[str, Any]:
        """Return the inputs by the reference's names; e4m3 as its codes."""
        count = self._problem.num_tokens
        found = {}
        for name in self._problem.operation.inputs:
            if name not in views or name.endswith("scale_inv"):
                continue
            v = views[name]
            is_fp8 = v.dtype == "float8_e4m3fn"
            found[name] = tensors.as_numpy(v, np.dtype("uint8" if is_fp8 else v.dtype))
        found["k_pe"] = found["k_pe"].reshape(count, QK_ROPE_HEAD_DIM)
        for name in mla_checks.INDICES:
            if name in found:
                found[name] = found[name][:count]
        return found


class _CudaPlan:
    """A call on CUDA tensors."""

    def __init__(self, problem: MlaPrefillProblem, decision: Decision, stream: Any) -> None:
        operation = problem.operation
        self._problem = problem
        self._layout = Layout(operation.arguments, problem.views, problem.written)
        self._place = CudaPlace(problem.views, operation.first)
        self._current_stream = self._place.current_stream
        self._outputs = [
            CudaOutput(self._place, shape, problem.out_dtype) for shape in _shapes(problem)
        ]
        self._first_out = len(operation.inputs)
        self._has_indices = "slot_mapping" in problem.views
        self._out_places = mla_prefill_arguments.outputs_of(problem)
        numbers = ScaleNumbers(
            operation.arguments, problem.views, mla_prefill_arguments.scales_of(problem)
        )
        self._numbers = numbers.of if numbers else None
        self._pointers = mla_prefill_arguments.pointers_of(problem)
        self._launch: launch.Launcher | None = None
        if problem.num_tokens:
            self._prepare(decision, stream)

    def _prepare(self, decision: Decision, stream: Any) -> None:
        problem = self._problem
        config: MlaPrefillConfig = decision.config
        kernel = self._place.load(config.instance(problem.variant), stream)
        grid = config.grid(
            problem.variant,
            problem.num_tokens,
            problem.num_heads,
            devices.info(self._place.device).num_sms,
        )
        self._arguments = mla_prefill_arguments.fixed_arguments(problem, grid)
        self._launch = launch.make_launcher(
            self._place.device,
            kernel.kernel,
            grid=grid.cache_blocks + grid.row_blocks,
            block=config.threads(problem.variant),
            pdl=decision.pdl,
        )

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        self._layout.check(values, addresses)
        handle = self._current_stream() if stream is None else streams.handle_of(stream)
        if env.check_enabled() and self._has_indices:
            self._check_indices(values, handle)
        scales = () if self._numbers is None else self._numbers(values)
        first_out = self._first_out
        is_given = values[first_out] is not None
        if is_given:
            outs = list(values[first_out:])
            out_addresses = addresses[first_out:]
        else:
            outs = [output.make(stream, handle) for output in self._outputs]
            out_addresses = [
                output.address_of(out) for output, out in zip(self._outputs, outs, strict=True)
            ]
        if self._launch is not None:
            arguments = self._arguments.copy()
            for place, index in self._pointers:
                arguments[place] = addresses[index]
            for place, address in zip(self._out_places, out_addresses, strict=True):
                arguments[place] = address
            for place, scale in scales:
                arguments[place] = scale
            self._launch(handle, arguments)
        if stream is not None:
            outputs.keep_for_stream([*values, *outs], self._place.device, handle)
        if not is_given and self._outputs[0].is_handed_over:
            outs = [
                output.hand_over(out, handle)
                for output, out in zip(self._outputs, outs, strict=True)
            ]
        return _result(outs)

    def _check_indices(self, values: Values, handle: int) -> None:
        problem = self._problem
        mla_checks.check_index_values_on_gpu(
            problem.operation.arguments,
            values,
            handle,
            self._place.device,
            problem.num_tokens,
            problem.num_slots,
            mla_checks.max_position_of(problem.views),
        )
