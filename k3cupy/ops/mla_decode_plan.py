"""Plans of the MLA decode epilogue: a validated call with its kernel, ready to repeat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np

from k3cupy.constants import LATENT_DIM, QK_ROPE_HEAD_DIM
from k3cupy.ops import checks, cuda_call, mla_checks, mla_decode_arguments, outputs
from k3cupy.ops.arguments import Layout, Values
from k3cupy.ops.cuda_call import CudaOutput, CudaPlace, ScaleNumbers
from k3cupy.ops.decision import Decision
from k3cupy.ops.mla_decode_config import (
    DEFAULTS,
    MlaDecodeConfig,
    MlaDecodeVariant,
    choose,
)
from k3cupy.ops.mla_decode_validate import (
    ARGUMENTS,
    WRITTEN,
    MlaDecodeCall,
    MlaDecodeProblem,
    validate,
)
from k3cupy.ops.plan_cache import Plan
from k3cupy.reference.mla_decode import mla_decode_reference
from k3cupy.runtime import devices, env, launch, producers, streams, tensors

_UNTUNED = DEFAULTS[0]
"""The configuration of the element-wise kernel, which has no table."""

_MAX_TOKENS_PER_LAUNCH = 4096
"""A token's warp looks through the later slots of its launch (see the kernel), so larger batches
are launched in slices, one after the other."""

_OUT = ARGUMENTS.index("out")
_SCALE_PLACES = {
    "q_scale_inv": mla_decode_arguments.Q_SCALE_VALUE,
    "cache_scale_inv": mla_decode_arguments.CACHE_SCALE_VALUE,
}


def decide(
    problem: MlaDecodeProblem, split: int | MlaDecodeConfig | None, pdl: bool | None
) -> Decision:
    """Choose backend and configuration for a validated call.

    Args:
        problem: from ``validate``.
        split: None for the measured table, a mapping, or a whole configuration.
        pdl: None for on where the GPU has it.
    """
    query = problem.views["ql_nope"]
    if not query.is_cuda:
        return Decision("reference", None, None, False, "the tensors are on the CPU")
    device = devices.info(query.device_index)
    if isinstance(split, MlaDecodeConfig):
        config, reason = split, "the caller named the configuration"
    elif split is not None:
        config, reason = DEFAULTS[split], f"the caller named split={split}"
    elif problem.slow_reason is not None:
        config, reason = _UNTUNED, "the element-wise kernel has one configuration"
    else:
        config, reason = choose(problem.variant, problem.num_tokens, problem.num_heads, device)
    if problem.slow_reason is not None:
        reason += f"; element by element, not 128-bit, because of {problem.slow_reason}"
    if problem.num_tokens > _MAX_TOKENS_PER_LAUNCH:
        reason += f"; in {-(-problem.num_tokens // _MAX_TOKENS_PER_LAUNCH)} launches"
    if problem.num_tokens == 0:
        reason = "no tokens: nothing is launched"
    return Decision(
        backend="cuda",
        config=config,
        name_expression=config.name_expression(_kernel_variant(problem)),
        pdl=cuda_call.has_pdl(device.index, pdl),
        reason=reason,
    )


def _kernel_variant(problem: MlaDecodeProblem) -> MlaDecodeVariant:
    """Return the variant to compile.

    A batch in slices cannot use the promise of ``kv_inputs_ready``: the kernel before a slice is
    the slice before it, which may write the same cache rows.
    """
    sliced = problem.num_tokens > _MAX_TOKENS_PER_LAUNCH
    return replace(problem.variant, kv_inputs_ready=False) if sliced else problem.variant


def make_plan(
    call: MlaDecodeCall, split: int | MlaDecodeConfig | None, pdl: bool | None, stream: Any
) -> Plan:
    """Validate a call and prepare everything that does not depend on its addresses.

    Args:
        call: the arguments.
        split: as ``check_split`` accepts it.
        pdl: None for on where the GPU has it.
        stream: the one that was given, to see whether it captures; None for the current one.

    Raises:
        TypeError, ValueError: an argument does not fit.
        CaptureError: the kernel would have to be compiled or loaded while a graph is captured.
    """
    problem = validate(call)
    checks.check_grad(problem.views)
    decision = decide(problem, split, pdl)
    if decision.backend == "reference":
        return _ReferencePlan(problem)
    return _CudaPlan(problem, decision, stream)


def _out_dtype(problem: MlaDecodeProblem) -> str:
    return "float8_e4m3fn" if problem.variant.query_fp8 else problem.variant.dtype


class _ReferencePlan:
    """A call on CPU tensors."""

    def __init__(self, problem: MlaDecodeProblem) -> None:
        self._problem = problem
        self._layout = Layout(ARGUMENTS, problem.views, WRITTEN)
        self._framework = problem.views["ql_nope"].framework
        shape = (problem.num_tokens, problem.num_heads, LATENT_DIM)
        self._allocate = outputs.allocator(self._framework, shape, _out_dtype(problem), None)

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        problem, variant = self._problem, self._problem.variant
        self._layout.check(values, addresses)
        out = self._allocate() if values[_OUT] is None else values[_OUT]
        views = ARGUMENTS.views(values)
        element = np.dtype(variant.dtype)
        cache_element = element if variant.cache == "same" else np.uint8
        out_element = np.uint8 if variant.query_fp8 else element
        count = problem.num_tokens
        slots, positions = mla_checks.indices_on_cpu(views, count)
        if env.check_enabled():
            mla_checks.check_index_values(
                slots, positions, problem.num_slots, mla_checks.max_position_of(views)
            )
        mla_decode_reference(
            tensors.as_numpy(views["ql_nope"], element),
            tensors.as_numpy(views["q_pe"], element),
            tensors.as_numpy(views["kv_c_normed"], element),
            tensors.as_numpy(views["k_pe"], element).reshape(count, QK_ROPE_HEAD_DIM),
            tensors.as_numpy(views["kv_cache"], cache_element),
            slots,
            tensors.as_numpy(producers.view(out, "out"), out_element),
            ds_mla=variant.cache == "ds_mla",
            q_scale_inv=mla_checks.scale_on_cpu("q_scale_inv", ARGUMENTS, values, views),
            cache_scale_inv=mla_checks.scale_on_cpu("cache_scale_inv", ARGUMENTS, values, views),
            positions=positions,
            cos_sin_cache=mla_checks.as_array(views["cos_sin_cache"]) if variant.rope else None,
        )
        if values[_OUT] is not None:
            return out
        return outputs.finish(self._framework, out, _out_dtype(problem))


class _CudaPlan:
    """A call on CUDA tensors."""

    def __init__(self, problem: MlaDecodeProblem, decision: Decision, stream: Any) -> None:
        self._problem = problem
        self._layout = Layout(ARGUMENTS, problem.views, WRITTEN)
        self._place = CudaPlace(problem.views, "ql_nope")
        self._current_stream = self._place.current_stream
        shape = (problem.num_tokens, problem.num_heads, LATENT_DIM)
        self._output = CudaOutput(self._place, shape, _out_dtype(problem))
        variant = problem.variant
        scaled = {"q_scale_inv": variant.query_fp8, "cache_scale_inv": variant.cache == "fp8"}
        numbers = ScaleNumbers(
            ARGUMENTS,
            problem.views,
            {name: place for name, place in _SCALE_PLACES.items() if scaled[name]},
        )
        self._numbers = numbers.of if numbers else None
        self._slices = self._make_slices(decision, stream) if problem.num_tokens else ()

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        self._layout.check(values, addresses)
        handle = self._current_stream() if stream is None else streams.handle_of(stream)
        if env.check_enabled():
            self._check_indices(values, handle)
        scales = () if self._numbers is None else self._numbers(values)
        out = values[_OUT]
        if out is not None:
            out_address = addresses[_OUT]
        else:
            out = self._output.make(stream, handle)
            out_address = self._output.address_of(out)
        for part in self._slices:
            arguments = part.arguments.copy()
            for place, index, offset in part.pointers:
                arguments[place] = addresses[index] + offset
            for place, scale in scales:
                arguments[place] = scale
            arguments[mla_decode_arguments.MQA_Q] = out_address + part.out_offset
            part.launch(handle, arguments)
        if stream is not None:
            outputs.keep_for_stream([*values, out], self._place.device, handle)
        if self._output.is_handed_over and values[_OUT] is None:
            return self._output.hand_over(out, handle)
        return out

    def _make_slices(self, decision: Decision, stream: Any) -> tuple[_Slice, ...]:
        problem = self._problem
        config: MlaDecodeConfig = decision.config
        kernel = self._place.load(config.instance(_kernel_variant(problem)), stream)
        slices = []
        for start in range(0, problem.num_tokens, _MAX_TOKENS_PER_LAUNCH):
            count = min(_MAX_TOKENS_PER_LAUNCH, problem.num_tokens - start)
            cache_blocks = config.cache_blocks(count)
            launcher = launch.make_launcher(
                self._place.device,
                kernel.kernel,
                grid=cache_blocks + config.query_blocks(count * problem.num_heads),
                block=config.block_size,
                pdl=decision.pdl,
            )
            row_bytes = LATENT_DIM * (1 if problem.variant.query_fp8 else 2)
            slices.append(
                _Slice(
                    launch=launcher,
                    arguments=mla_decode_arguments.fixed_arguments(problem, count, cache_blocks),
                    pointers=mla_decode_arguments.pointers_of(problem, start),
                    out_offset=start * problem.num_heads * row_bytes,
                )
            )
        return tuple(slices)

    def _check_indices(self, values: Values, handle: int) -> None:
        problem = self._problem
        mla_checks.check_index_values_on_gpu(
            ARGUMENTS,
            values,
            handle,
            self._place.device,
            problem.num_tokens,
            problem.num_slots,
            mla_checks.max_position_of(problem.views),
        )


@dataclass(frozen=True)
class _Slice:
    """One launch of a call.

    Attributes:
        launch: queues the kernel with its grid and block.
        arguments: all of them, pointers still 0.
        pointers: (place among the arguments, index into the addresses, bytes to add).
        out_offset: bytes to add to the output's address.
    """

    launch: launch.Launcher
    arguments: list[Any]
    pointers: tuple[tuple[int, int, int], ...]
    out_offset: int
