"""Plans of the MLA decode epilogue: a validated call with its kernel, ready to repeat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np

from k3cupy.constants import LATENT_DIM, QK_ROPE_HEAD_DIM
from k3cupy.ops import checks, mla_decode_arguments, outputs
from k3cupy.ops.decision import Decision
from k3cupy.ops.mla_decode_config import (
    DEFAULTS,
    MlaDecodeConfig,
    MlaDecodeVariant,
    choose,
)
from k3cupy.ops.mla_decode_validate import (
    TENSORS,
    MlaDecodeCall,
    MlaDecodeProblem,
    check_grad,
    validate,
    views_of,
)
from k3cupy.reference.mla_decode import mla_decode_reference
from k3cupy.runtime import devices, env, instances, launch, producers, streams, tensors
from k3cupy.runtime.errors import CaptureError
from k3cupy.runtime.tensors import TensorView

_UNTUNED = DEFAULTS[0]
"""The configuration of the element-wise kernel, which has no table."""

_MAX_TOKENS_PER_LAUNCH = 4096
"""A token's warp looks through the later slots of its launch (see the kernel), so larger batches
are launched in slices, one after the other."""

_INDEX = {name: i for i, name in enumerate(TENSORS)}
_CACHE, _OUT = _INDEX["kv_cache"], _INDEX["out"]
_Q_SCALE, _CACHE_SCALE = _INDEX["q_scale_inv"], _INDEX["cache_scale_inv"]

Values = tuple[Any, ...]


class Plan(Protocol):
    """What repeats a call for other tensors of the same layout."""

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        """Compute a call; values and addresses are in the order of TENSORS."""


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
        pdl=device.has_pdl if pdl is None else pdl and device.has_pdl,
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
    check_grad(problem.views)
    decision = decide(problem, split, pdl)
    if decision.backend == "reference":
        return _ReferencePlan(problem)
    return _CudaPlan(problem, decision, stream)


class _Layout:
    """What only the addresses decide, checked on each call: outputs apart from inputs."""

    def __init__(self, problem: MlaDecodeProblem) -> None:
        spans = {_INDEX[name]: v.span for name, v in problem.views.items()}
        written = []
        for target in (_CACHE, _OUT):
            if target in spans:
                span = spans.pop(target)  # a pair is looked at once, from its first member
                written.append((target, span, tuple(spans.items())))
        self._written = tuple(written)

    def check(self, values: Values, addresses: list[int]) -> None:
        """Refuse a cache or an output that shares memory with another argument."""
        suspicious = False
        for target, length, others in self._written:
            start = addresses[target]
            end = start + length
            for index, span in others:
                other = addresses[index]
                if other < end and start < other + span:
                    suspicious = True
        if suspicious:
            views = views_of(values)
            read = {name: v for name, v in views.items() if name not in ("kv_cache", "out")}
            written = {name: v for name, v in views.items() if name not in read}
            checks.check_no_overlap(written, read)


def _out_dtype(problem: MlaDecodeProblem) -> str:
    return "float8_e4m3fn" if problem.variant.query_fp8 else problem.variant.dtype


class _ReferencePlan:
    """A call on CPU tensors."""

    def __init__(self, problem: MlaDecodeProblem) -> None:
        self._problem = problem
        self._layout = _Layout(problem)
        self._framework = problem.views["ql_nope"].framework
        shape = (problem.num_tokens, problem.num_heads, LATENT_DIM)
        self._allocate = outputs.allocator(self._framework, shape, _out_dtype(problem), None)

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        problem, variant = self._problem, self._problem.variant
        self._layout.check(values, addresses)
        out = self._allocate() if values[_OUT] is None else values[_OUT]
        views = views_of(values)
        element = np.dtype(variant.dtype)
        cache_element = element if variant.cache == "same" else np.uint8
        out_element = np.uint8 if variant.query_fp8 else element
        count = problem.num_tokens
        slots = _as_array(views["slot_mapping"])[:count]
        positions = _as_array(views["positions"])[:count] if variant.rope else None
        if env.check_enabled():
            _check_indices(slots, positions, problem)
        mla_decode_reference(
            tensors.as_numpy(views["ql_nope"], element),
            tensors.as_numpy(views["q_pe"], element),
            tensors.as_numpy(views["kv_c_normed"], element),
            tensors.as_numpy(views["k_pe"], element).reshape(count, QK_ROPE_HEAD_DIM),
            tensors.as_numpy(views["kv_cache"], cache_element),
            slots,
            tensors.as_numpy(producers.view(out, "out"), out_element),
            ds_mla=variant.cache == "ds_mla",
            q_scale_inv=_scale_on_cpu("q_scale_inv", values, views),
            cache_scale_inv=_scale_on_cpu("cache_scale_inv", values, views),
            positions=positions,
            cos_sin_cache=_as_array(views["cos_sin_cache"]) if variant.rope else None,
        )
        if values[_OUT] is not None:
            return out
        return outputs.finish(self._framework, out, _out_dtype(problem))


def _as_array(v: TensorView) -> Any:
    return tensors.as_numpy(v, np.dtype(v.dtype))


def _scale_on_cpu(name: str, values: Values, views: dict[str, TensorView]) -> float | None:
    """Return a scale given as a CPU tensor or as a number, which is checked; None for none."""
    if name in views:
        return float(tensors.as_numpy(views[name], np.float32).reshape(-1)[0])
    value = values[_INDEX[name]]
    return None if value is None else checks.scale_value(name, value)


def _check_indices(slots: Any, positions: Any, problem: MlaDecodeProblem) -> None:
    """Verify slots and positions (NumPy or CuPy arrays) against the cache and the table.

    Raises:
        ValueError: one is out of range; negative slots are padding and fine.
    """
    high = slots >= problem.num_slots
    if high.any():
        token = int(high.argmax())
        checks.reject(
            "slot_mapping",
            f"slots below {problem.num_slots}",
            f"{int(slots[token])} for token {token}",
        )
    if positions is None:
        return
    limit = problem.views["cos_sin_cache"].shape[0]
    outside = (positions < 0) | (positions >= limit)
    if outside.any():
        token = int(outside.argmax())
        checks.reject(
            "positions",
            f"positions from 0 to {limit - 1}",
            f"{int(positions[token])} for token {token}",
        )


class _CudaPlan:
    """A call on CUDA tensors."""

    def __init__(self, problem: MlaDecodeProblem, decision: Decision, stream: Any) -> None:
        views = problem.views
        self._problem = problem
        self._layout = _Layout(problem)
        self._framework = views["ql_nope"].framework
        self._device = views["ql_nope"].device_index
        torch_is_there = any(v.framework == "torch" for v in views.values())
        stream_framework = "torch" if torch_is_there else "cupy"
        self._current_stream = streams.current_of(stream_framework, self._device)
        self._allocates_in_order = self._framework == stream_framework
        shape = (problem.num_tokens, problem.num_heads, LATENT_DIM)
        self._allocate = outputs.allocator(
            self._framework, shape, _out_dtype(problem), self._device
        )
        self._q_scale_is_number = problem.variant.query_fp8 and "q_scale_inv" not in views
        self._cache_scale_is_number = (
            problem.variant.cache == "fp8" and "cache_scale_inv" not in views
        )
        self._has_scale_numbers = self._q_scale_is_number or self._cache_scale_is_number
        self._address_of = outputs.address_of(self._framework)
        self._slices = self._make_slices(decision, stream) if problem.num_tokens else ()

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        self._layout.check(values, addresses)
        handle = self._current_stream() if stream is None else streams.handle_of(stream)
        if env.check_enabled():
            self._check_indices(values, handle)
        scales = self._scale_numbers(values) if self._has_scale_numbers else ()
        out = values[_OUT]
        if out is not None:
            out_address = addresses[_OUT]
        else:
            if stream is None and self._allocates_in_order:
                out = self._allocate()
            else:
                with outputs.allocated_for(self._framework, self._device, handle):
                    out = self._allocate()
            out_address = self._address_of(out)
        for part in self._slices:
            arguments = part.arguments.copy()
            for place, index, offset in part.pointers:
                arguments[place] = addresses[index] + offset
            for place, scale in scales:
                arguments[place] = scale
            arguments[mla_decode_arguments.MQA_Q] = out_address + part.out_offset
            part.launch(handle, arguments)
        if stream is not None:
            outputs.keep_for_stream([*values, out], self._device, handle)
        if self._framework == "jax" and values[_OUT] is None:
            # JAX makes its own stream wait for the one that is current at the hand-over.
            with streams.current_for_cupy(handle, self._device):
                return outputs.finish(self._framework, out, _out_dtype(self._problem))
        return out

    def _scale_numbers(self, values: Values) -> list[tuple[int, np.float32]]:
        found = []
        if self._q_scale_is_number:
            number = checks.scale_value("q_scale_inv", values[_Q_SCALE])
            found.append((mla_decode_arguments.Q_SCALE_VALUE, np.float32(number)))
        if self._cache_scale_is_number:
            number = checks.scale_value("cache_scale_inv", values[_CACHE_SCALE])
            found.append((mla_decode_arguments.CACHE_SCALE_VALUE, np.float32(number)))
        return found

    def _make_slices(self, decision: Decision, stream: Any) -> tuple[_Slice, ...]:
        problem = self._problem
        config: MlaDecodeConfig = decision.config
        kernel = self._load(config.instance(_kernel_variant(problem)), stream)
        slices = []
        for start in range(0, problem.num_tokens, _MAX_TOKENS_PER_LAUNCH):
            count = min(_MAX_TOKENS_PER_LAUNCH, problem.num_tokens - start)
            cache_blocks = config.cache_blocks(count)
            launcher = launch.make_launcher(
                self._device,
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

    def _load(self, instance: instances.Instance, stream: Any) -> instances.LoadedKernel:
        if not instances.is_loaded(instance, self._device):
            handle = self._current_stream() if stream is None else streams.handle_of(stream)
            if streams.is_capturing(handle):
                raise CaptureError(
                    f"{instance.name_expression} is not loaded and stream 0x{handle:x} is "
                    "capturing a CUDA graph, where nothing can be compiled or loaded. Before the "
                    "capture call k3cupy.warmup(...), or run this call once with the same shapes "
                    "and types"
                )
        return instances.load(instance, self._device)

    def _check_indices(self, values: Values, handle: int) -> None:
        if streams.is_capturing(handle):
            raise CaptureError(
                "K3CUPY_CHECK=1 reads slots and positions back, which a CUDA graph capture "
                "forbids. Unset it for the capture"
            )
        views, count = views_of(values), self._problem.num_tokens
        with streams.current_for_cupy(handle, self._device):
            slots = tensors.as_cupy(views["slot_mapping"], values)[:count]
            positions = None
            if self._problem.variant.rope:
                positions = tensors.as_cupy(views["positions"], values)[:count]
            _check_indices(slots, positions, self._problem)


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
