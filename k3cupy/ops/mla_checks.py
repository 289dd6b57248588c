"""Checks that the MLA epilogues share: cache, slots, positions, RoPE table, alignment, values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from k3cupy.constants import QK_ROPE_HEAD_DIM
from k3cupy.ops import checks
from k3cupy.ops.arguments import Arguments, Values
from k3cupy.ops.cuda_call import refuse_checks_in_capture
from k3cupy.runtime import streams, tensors
from k3cupy.runtime.tensors import TensorView

INDEX_TYPES = ("int64", "int32")
INDICES = ("slot_mapping", "positions")


def check_rope_types(views: Mapping[str, TensorView]) -> None:
    """Accept positions and table together or not at all, of the right types."""
    if ("positions" in views) != ("cos_sin_cache" in views):
        missing, other = ("positions", "cos_sin_cache")
        if missing in views:
            missing, other = other, missing
        checks.reject(
            missing,
            f"a tensor, because {other} is given",
            "None",
            "RoPE needs both, no RoPE needs neither",
        )
    if "positions" in views:
        checks.check_dtype("positions", views["positions"], INDEX_TYPES)
        checks.check_dtype("cos_sin_cache", views["cos_sin_cache"], ("float32",))


def check_k_pe_shape(k_pe: TensorView, num_tokens: int, note: str) -> None:
    """Accept [T, 64] and [T, 1, 64]."""
    shape: tuple[int, ...] = (num_tokens, QK_ROPE_HEAD_DIM)
    if len(k_pe.shape) == 3:
        shape = (num_tokens, 1, QK_ROPE_HEAD_DIM)
    checks.check_shape("k_pe", k_pe, shape, note)


def check_index_shapes(views: Mapping[str, TensorView], num_tokens: int) -> None:
    """Accept slots and positions for at least every token, and a table that has a row."""
    for name in INDICES:
        if name in views:
            checks.check_shape(name, views[name], (f">= {num_tokens}",))
            if views[name].shape[0] < num_tokens:
                checks.reject(
                    name, f"at least {num_tokens} entries, one a token", f"{views[name].shape[0]}"
                )
    if "cos_sin_cache" in views:
        checks.check_shape(
            "cos_sin_cache", views["cos_sin_cache"], ("max_position", QK_ROPE_HEAD_DIM)
        )
        if views["cos_sin_cache"].shape[0] == 0 and num_tokens:
            checks.reject("cos_sin_cache", "at least 1 position", "0")


def check_layouts(views: Mapping[str, TensorView]) -> None:
    """Check strides and devices of all tensors."""
    for name, v in views.items():
        checks.check_strides(name, v, inner=name not in INDICES)
    checks.check_devices(views)


def check_written(
    views: Mapping[str, TensorView], updated: Iterable[str], outs: Iterable[str]
) -> None:
    """Check tensors that are written: those updated in place, and those to be packed outputs."""
    present = {name: views[name] for name in (*updated, *outs) if name in views}
    for name, v in present.items():
        checks.check_writable(name, v)
    for name in updated:
        if name in views and views[name].size:
            checks.check_rows_apart(name, views[name])
    for name in outs:
        if name in views:
            checks.check_packed(name, views[name])


def check_slot_count(num_slots: int) -> None:
    """Refuse a cache whose slots do not fit 31 bits."""
    if num_slots >= 1 << 31:
        checks.reject("kv_cache", "fewer than 2^31 slots", f"{num_slots}")


def slow_reason(views: Mapping[str, TensorView]) -> str | None:
    """Return in words why rows cannot be moved by 128-bit accesses, or None."""
    for name, v in views.items():
        if name in INDICES or name.endswith("scale_inv"):
            continue
        reason = checks.misalignment(name, v)
        if reason is not None:
            return reason
    return None


def without_owners(views: Mapping[str, TensorView]) -> dict[str, TensorView]:
    """Return views that may outlive their call: they keep no caller's memory alive."""
    return {name: replace(v, owner=None) for name, v in views.items()}


def check_index_values(slots: Any, positions: Any, num_slots: int, max_position: int) -> None:
    """Verify slots and positions (NumPy or CuPy arrays, or None) against the cache and the table.

    Raises:
        ValueError: one is out of range; negative slots are padding and fine.
    """
    if slots is not None:
        high = slots >= num_slots
        if high.any():
            token = int(high.argmax())
            checks.reject(
                "slot_mapping", f"slots below {num_slots}", f"{int(slots[token])} for token {token}"
            )
    if positions is not None:
        outside = (positions < 0) | (positions >= max_position)
        if outside.any():
            token = int(outside.argmax())
            checks.reject(
                "positions",
                f"positions from 0 to {max_position - 1}",
                f"{int(positions[token])} for token {token}",
            )


def check_index_values_on_gpu(
    arguments: Arguments,
    values: Values,
    handle: int,
    device: int,
    num_tokens: int,
    num_slots: int,
    max_position: int,
) -> None:
    """Read a call's slots and positions back from the GPU and verify them.

    Raises:
        CaptureError: the stream is capturing a graph.
        ValueError: one is out of range.
    """
    refuse_checks_in_capture(handle)
    views = arguments.views(values)
    with streams.current_for_cupy(handle, device):
        slots, positions = (
            tensors.as_cupy(views[name], values)[:num_tokens] if name in views else None
            for name in INDICES
        )
        check_index_values(slots, positions, num_slots, max_position)


def max_position_of(views: Mapping[str, TensorView]) -> int:
    """Return the rows of the RoPE table, 0 without one."""
    return views["cos_sin_cache"].shape[0] if "cos_sin_cache" in views else 0


def as_array(v: TensorView) -> Any:
    """Return a CPU tensor as a NumPy array of its own type."""
    return tensors.as_numpy(v, np.dtype(v.dtype))


def indices_on_cpu(views: Mapping[str, TensorView], num_tokens: int) -> tuple[Any, Any]:
    """Return the first entries of slots and positions on the CPU; None for what is not there."""
    slots, positions = (
        as_array(views[name])[:num_tokens] if name in views else None for name in INDICES
    )
    return slots, positions


def scale_on_cpu(
    name: str, arguments: Arguments, values: Values, views: Mapping[str, TensorView]
) -> float | None:
    """Return a scale given as a CPU tensor or as a number, which is checked; None for none."""
    if name in views:
        return float(tensors.as_numpy(views[name], np.float32).reshape(-1)[0])
    value = values[arguments.index(name)]
    return None if value is None else checks.scale_value(name, value)
