"""Plans of the MLA decode epilogue: a validated call, its kernel and its launch, ready to repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np

from k3cupy.constants import LATENT_DIM, QK_ROPE_HEAD_DIM
from k3cupy.ops import checks, outputs
from k3cupy.ops.decision import Decision
from k3cupy.ops.mla_decode_config import DEFAULTS, MlaDecodeConfig, choose
from k3cupy.ops.mla_decode_validate import (
    MlaDecodeCall,
    MlaDecodeProblem,
    check_grad,
    check_split,
    validate,
)
from k3cupy.reference.mla_decode import mla_decode_reference
from k3cupy.runtime import devices, env, instances, launch, streams, tensors
from k3cupy.runtime.errors import CaptureError
from k3cupy.runtime.tensors import TensorView

_UNTUNED = DEFAULTS[0]
"""The configuration of the element-wise kernel, which has no table."""

_INDEX = {name: i for i, name in enumerate(MlaDecodeCall.TENSORS)}
_WRITTEN = ("kv_cache", "out")


class Plan(Protocol):
    """What repeats a call for other tensors of the same layout."""

    def run(self, call: MlaDecodeCall, addresses: list[int], stream: Any) -> Any:
        """Compute the call whose tensors have these addresses, in the order of TENSORS."""


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
    if problem.num_tokens == 0:
        reason = "no tokens: nothing is launched"
    return Decision(
        backend="cuda",
        config=config,
        name_expression=config.name_expression(problem.variant),
        pdl=device.has_pdl if pdl is None else pdl and device.has_pdl,
        reason=reason,
    )


def make_plan(
    call: MlaDecodeCall, split: int | MlaDecodeConfig | None, pdl: bool | None, stream: Any
) -> Plan:
    """Validate a call and prepare everything that does not depend on its addresses.

    Raises:
        TypeError, ValueError: an argument does not fit.
        CaptureError: the kernel would have to be compiled or loaded while a graph is captured.
    """
    problem = validate(call)
    check_grad(problem.views)
    decision = decide(problem, check_split(split), pdl)
    frameworks = {v.framework for v in problem.views.values()}
    layout = _Layout(
        framework=problem.views["ql_nope"].framework,
        stream_framework="torch" if "torch" in frameworks else "cupy",
        follows_grad=any(v.requires_grad for v in problem.views.values()),
        spans=tuple((name, _INDEX[name], v.span) for name, v in problem.views.items()),
    )
    if decision.backend == "reference":
        return _ReferencePlan(problem, layout)
    kernel = None
    if problem.num_tokens:
        kernel = _load(decision.config, problem, layout, stream)
    return _CudaPlan(problem, layout, decision, kernel)


@dataclass(frozen=True)
class _Layout:
    """What a plan knows of its tensors besides the problem."""

    framework: str
    stream_framework: str
    follows_grad: bool
    spans: tuple[tuple[str, int, int], ...]

    def check(self, problem: MlaDecodeProblem, call: MlaDecodeCall, addresses: list[int]) -> None:
        """Check what varies between calls of one plan: grad mode, and outputs apart from inputs."""
        if self.follows_grad:
            check_grad(problem.views)
        cache = addresses[_INDEX["kv_cache"]]
        out = addresses[_INDEX["out"]]
        cache_end, out_end = cache, out
        for name, _, span in self.spans:
            if name == "kv_cache":
                cache_end += span
            elif name == "out":
                out_end += span
        for name, index, span in self.spans:
            start = addresses[index]
            end = start + span
            near_cache = name != "kv_cache" and start < cache_end and cache < end
            near_out = name != "out" and start < out_end and out < end
            if near_cache or near_out:
                views = {key: tensors.view(value, key) for key, value in call.tensors().items()}
                checks.check_no_overlap(
                    {key: v for key, v in views.items() if key in _WRITTEN},
                    {key: v for key, v in views.items() if key not in _WRITTEN},
                )
                return


def _load(
    config: MlaDecodeConfig, problem: MlaDecodeProblem, layout: _Layout, stream: Any
) -> instances.LoadedKernel:
    device = problem.views["ql_nope"].device_index
    instance = config.instance(problem.variant)
    if not instances.is_loaded(instance, device):
        handle = _stream_handle(layout.stream_framework, device, stream)
        if streams.is_capturing(handle):
            raise CaptureError(
                f"{instance.name_expression} is not loaded and stream 0x{handle:x} is capturing a "
                "CUDA graph, where nothing can be compiled or loaded. Before the capture call "
                "k3cupy.warmup(...), or run this call once with the same shapes and types"
            )
    return instances.load(instance, device)


def _stream_handle(framework: str, device: int, stream: Any) -> int:
    return streams.current(framework, device) if stream is None else streams.handle_of(stream)


def _out_dtype(problem: MlaDecodeProblem) -> str:
    return "float8_e4m3fn" if problem.variant.query_fp8 else problem.variant.dtype


class _ReferencePlan:
    """A call on CPU tensors."""

    def __init__(self, problem: MlaDecodeProblem, layout: _Layout) -> None:
        self._problem = problem
        self._layout = layout
        shape = (problem.num_tokens, problem.num_heads, LATENT_DIM)
        self._allocate = outputs.allocator(layout.framework, shape, _out_dtype(problem), None)

    def run(self, call: MlaDecodeCall, addresses: list[int], stream: Any) -> Any:
        problem = self._problem
        self._layout.check(problem, call, addresses)
        out = self._allocate() if call.out is None else call.out
        views = {name: tensors.view(value, name) for name, value in call.tensors().items()}
        element = np.dtype(problem.variant.dtype)
        count = problem.num_tokens
        slots = _as_array(views["slot_mapping"])[:count]
        positions = _as_array(views["positions"])[:count] if "positions" in views else None
        table = _as_array(views["cos_sin_cache"]) if "cos_sin_cache" in views else None
        if env.check_enabled():
            _check_indices(slots, positions, problem)
        mqa_q = tensors.view(out, "out")
        cache = views["kv_cache"]
        mla_decode_reference(
            tensors.as_numpy(views["ql_nope"], element),
            tensors.as_numpy(views["q_pe"], element),
            tensors.as_numpy(views["kv_c_normed"], element),
            tensors.as_numpy(views["k_pe"], element).reshape(count, QK_ROPE_HEAD_DIM),
            tensors.as_numpy(cache, element if cache.dtype == problem.variant.dtype else np.uint8),
            slots,
            tensors.as_numpy(mqa_q, np.uint8 if problem.variant.query_fp8 else element),
            ds_mla=call.ds_mla,
            q_scale_inv=_scale_number(call.q_scale_inv, views.get("q_scale_inv")),
            cache_scale_inv=_scale_number(call.cache_scale_inv, views.get("cache_scale_inv")),
            positions=positions,
            cos_sin_cache=table,
        )
        return outputs.finish(self._layout.framework, out) if call.out is None else out


def _as_array(v: TensorView) -> Any:
    return tensors.as_numpy(v, np.dtype(v.dtype))


def _scale_number(value: Any, v: TensorView | None) -> float | None:
    if v is not None:
        return float(tensors.as_numpy(v, np.float32).reshape(-1)[0])
    return None if value is None else float(value)


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

    def __init__(
        self,
        problem: MlaDecodeProblem,
        layout: _Layout,
        decision: Decision,
        kernel: instances.LoadedKernel | None,
    ) -> None:
        self._problem = problem
        self._layout = layout
        self._device = problem.views["ql_nope"].device_index
        shape = (problem.num_tokens, problem.num_heads, LATENT_DIM)
        self._allocate = outputs.allocator(
            layout.framework, shape, _out_dtype(problem), self._device
        )
        self._kernel = None if kernel is None else kernel.kernel
        if kernel is not None:
            config: MlaDecodeConfig = decision.config
            num_query_rows = problem.num_tokens * problem.num_heads
            cache_blocks = config.blocks(problem.num_tokens)
            self._config = launch.make_config(
                cache_blocks + config.blocks(num_query_rows), config.block_size, pdl=decision.pdl
            )
            self._arguments = _fixed_arguments(problem, cache_blocks)

    def run(self, call: MlaDecodeCall, addresses: list[int], stream: Any) -> Any:
        layout = self._layout
        layout.check(self._problem, call, addresses)
        handle = _stream_handle(layout.stream_framework, self._device, stream)
        if env.check_enabled():
            self._check_indices(call, handle)
        out = call.out
        if out is None:
            if stream is None:
                out = self._allocate()
            else:
                with outputs.allocated_for(layout.framework, self._device, handle):
                    out = self._allocate()
            out_address = tensors.handlers(out)[1](out)[0]
        else:
            out_address = addresses[_INDEX["out"]]
        if self._kernel is not None:
            arguments = self._arguments.copy()
            for place, index in _POINTERS:
                arguments[place] = addresses[index]
            arguments[_MQA_Q] = out_address
            if checks.is_number(call.q_scale_inv):
                arguments[_Q_SCALE_VALUE] = np.float32(call.q_scale_inv)
            if checks.is_number(call.cache_scale_inv):
                arguments[_CACHE_SCALE_VALUE] = np.float32(call.cache_scale_inv)
            launch.launch(self._device, handle, self._config, self._kernel, arguments)
            if stream is not None:
                outputs.keep_for_stream([*call.tensors().values(), out], self._device, handle)
        return outputs.finish(layout.framework, out) if call.out is None else out

    def _check_indices(self, call: MlaDecodeCall, handle: int) -> None:
        if streams.is_capturing(handle):
            raise CaptureError(
                "K3CUPY_CHECK=1 reads slots and positions back, which a CUDA graph capture forbids. "
                "Unset it for the capture"
            )
        count = self._problem.num_tokens
        with streams.current_for_cupy(handle, self._device):
            slots = tensors.as_cupy(tensors.view(call.slot_mapping, "slot_mapping"), call)
            positions = None
            if call.positions is not None:
                positions = tensors.as_cupy(tensors.view(call.positions, "positions"), call)[:count]
            _check_indices(slots[:count], positions, self._problem)


# --- The kernel's arguments, in its order (cuda_src/mla_decode.cu) -------------------------------

_ARGUMENTS = (
    "cache_blocks",
    "num_query_rows",
    "num_heads",
    "num_heads_magic",
    "ql_nope",
    "q_pe",
    "mqa_q",
    "ql_nope_token_stride",
    "ql_nope_head_stride",
    "q_pe_token_stride",
    "q_pe_head_stride",
    "num_heads_shift",
    "q_scale_value",
    "q_scale_inv",
    "kv_c_normed",
    "k_pe",
    "slot_mapping",
    "kv_cache",
    "kv_c_stride",
    "k_pe_stride",
    "cache_block_stride",
    "cache_token_stride",
    "num_tokens",
    "num_slots",
    "block_size",
    "block_size_magic",
    "block_size_shift",
    "slot_is_wide",
    "slot_stride",
    "cache_scale_inv",
    "cache_scale_value",
    "position_is_wide",
    "positions",
    "cos_sin_cache",
    "position_stride",
    "table_stride",
    "max_position",
)
_POINTERS = tuple(
    (_ARGUMENTS.index(name), index) for name, index in _INDEX.items() if name in _ARGUMENTS
)
_MQA_Q = _ARGUMENTS.index("mqa_q")
_Q_SCALE_VALUE = _ARGUMENTS.index("q_scale_value")
_CACHE_SCALE_VALUE = _ARGUMENTS.index("cache_scale_value")


def _fixed_arguments(problem: MlaDecodeProblem, cache_blocks: int) -> list[Any]:
    """Return the kernel's arguments with 0 in the place of every pointer."""
    views = problem.views
    wide = np.int64 if not problem.variant.vector else np.uint32

    def stride(name: str, axis: int) -> Any:
        return wide(_byte_stride(views[name], axis))

    block_size = max(views["kv_cache"].shape[1], 1)
    heads_magic, heads_shift = launch.divisor_constants(problem.num_heads)
    block_magic, block_shift = launch.divisor_constants(block_size)
    values: dict[str, Any] = {
        "cache_blocks": np.uint32(cache_blocks),
        "num_query_rows": np.uint32(problem.num_tokens * problem.num_heads),
        "num_heads": np.uint32(problem.num_heads),
        "num_heads_magic": np.uint32(heads_magic),
        "num_heads_shift": np.uint32(heads_shift),
        "ql_nope_token_stride": stride("ql_nope", 0),
        "ql_nope_head_stride": stride("ql_nope", 1),
        "q_pe_token_stride": stride("q_pe", 0),
        "q_pe_head_stride": stride("q_pe", 1),
        "q_scale_value": np.float32(1),
        "kv_c_stride": stride("kv_c_normed", 0),
        "k_pe_stride": stride("k_pe", 0),
        "cache_block_stride": stride("kv_cache", 0),
        "cache_token_stride": stride("kv_cache", 1),
        "num_tokens": np.uint32(problem.num_tokens),
        "num_slots": np.uint32(problem.num_slots),
        "block_size": np.uint32(block_size),
        "block_size_magic": np.uint32(block_magic),
        "block_size_shift": np.uint32(block_shift),
        "slot_is_wide": np.uint32(views["slot_mapping"].dtype == "int64"),
        "slot_stride": _byte_stride(views["slot_mapping"], 0),
        "cache_scale_value": np.float32(1),
        "position_is_wide": np.uint32(0),
    }
    if problem.variant.rope:
        values["position_is_wide"] = np.uint32(views["positions"].dtype == "int64")
        values["position_stride"] = _byte_stride(views["positions"], 0)
        values["table_stride"] = _byte_stride(views["cos_sin_cache"], 0)
        values["max_position"] = views["cos_sin_cache"].shape[0]
    return [values.get(name, 0) for name in _ARGUMENTS]


def _byte_stride(v: TensorView, axis: int) -> int:
    """Return a stride in bytes; an axis of one element may carry any stride and gets 0."""
    return v.strides[axis] * v.itemsize if v.shape[axis] > 1 else 0
