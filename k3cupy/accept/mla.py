"""What the MLA epilogues share of what they accept, and what K3CUPY_CHECK looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3cupy.accept import checks
from k3cupy.call.arguments import Problem
from k3cupy.constants import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from k3cupy.runtime import streams, tensors
from k3cupy.runtime.errors import CaptureError, reject
from k3cupy.runtime.tensors import TensorView

Views = Mapping[str, TensorView]

ROPE = ("positions", "cos_sin_cache")
INDEX_TYPES = ("int64", "int32")
FP8 = ("float8_e4m3fn", "uint8")
_INDICES = ("slot_mapping", "positions")


@dataclass(frozen=True)
class MlaProblem(Problem):
    """A call that passed validation.

    Attributes:
        variant: which kernel the arguments ask for.
        num_heads: H.
        num_slots: tokens that the cache holds; 0 without one.
    """

    variant: Any
    num_heads: int
    num_slots: int


def check_heads(name: str, v: TensorView) -> None:
    """Refuse a query or key without heads."""
    if v.shape[1] == 0:
        reject(name, "at least one head", f"shape {list(v.shape)}")


def check_rope_types(views: Views) -> None:
    """Accept positions and table together or not at all, of the right types."""
    if ("positions" in views) != ("cos_sin_cache" in views):
        missing, other = ("positions", "cos_sin_cache")
        if missing in views:
            missing, other = other, missing
        reject(
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


def check_latent_shapes(views: Views, num_tokens: int, cache_width: int, note: str) -> None:
    """Accept what a cache row is made of, and the cache."""
    checks.check_shape("kv_c_normed", views["kv_c_normed"], (num_tokens, KV_LORA_RANK), note)
    check_k_pe_shape(views["k_pe"], num_tokens, note)
    checks.check_shape("kv_cache", views["kv_cache"], ("num_blocks", "block_size", cache_width))
    for name in _INDICES:
        if name in views:
            checks.check_shape(name, views[name], (f">= {num_tokens}",))
            if views[name].shape[0] < num_tokens:
                reject(
                    name, f"at least {num_tokens} entries, one a token", f"{views[name].shape[0]}"
                )
    if "cos_sin_cache" in views:
        checks.check_shape(
            "cos_sin_cache", views["cos_sin_cache"], ("max_position", QK_ROPE_HEAD_DIM)
        )
        if views["cos_sin_cache"].shape[0] == 0 and num_tokens:
            reject("cos_sin_cache", "at least 1 position", "0")


def check_layouts(views: Views) -> None:
    """Check strides and devices of all tensors."""
    for name, v in views.items():
        checks.check_strides(name, v, inner=name not in _INDICES)
    checks.check_devices(views)


def check_written(views: Views, updated: Iterable[str], outs: Iterable[str]) -> None:
    """Check tensors that are written: those updated in place, and those to be packed outputs."""
    for name in (*updated, *outs):
        if name in views:
            checks.check_writable(name, views[name])
    for name in updated:
        if views[name].size:
            checks.check_rows_apart(name, views[name])
    for name in outs:
        if name in views:
            checks.check_packed(name, views[name])


def num_slots(views: Views) -> int:
    """Return the tokens that the cache holds, which fit 31 bits."""
    count = views["kv_cache"].shape[0] * views["kv_cache"].shape[1]
    if count >= 1 << 31:
        reject("kv_cache", "fewer than 2^31 slots", f"{count}")
    return count


def slow_reason(views: Views) -> str | None:
    """Return in words why rows cannot be moved by 128-bit accesses, or None."""
    for name, v in views.items():
        if name in _INDICES or name.endswith("scale_inv"):
            continue
        reason = checks.misalignment(name, v)
        if reason is not None:
            return reason
    return None


def reference_arrays(problem: MlaProblem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arrays as the CPU functions take them: an entry a token, k_pe [T, 64]."""
    count = problem.num_tokens
    found = {name: array[:count] if name in _INDICES else array for name, array in arrays.items()}
    found["k_pe"] = found["k_pe"].reshape(count, QK_ROPE_HEAD_DIM)
    return found


def verify(problem: MlaProblem, views: Views, handle: int | None) -> None:
    """Verify a call's slots and positions against the cache and the table.

    Args:
        problem: the call.
        views: its tensors.
        handle: of the stream on which they are read back; None on the CPU.

    Raises:
        CaptureError: the stream is capturing a graph.
        ValueError: one is out of range; negative slots are padding and fine.
    """
    if handle is None:
        _verify(problem, views, lambda v: tensors.as_numpy(v, np.dtype(v.dtype)))
        return
    if streams.is_capturing(handle):
        raise CaptureError(
            "K3CUPY_CHECK=1 reads slots and positions back, which a CUDA graph capture "
            "forbids. Unset it for the capture"
        )
    with streams.current_for_cupy(handle, problem.first.device_index):
        _verify(problem, views, lambda v: tensors.as_cupy(v, views))


def _verify(problem: MlaProblem, views: Views, array_of: Any) -> None:
    count = problem.num_tokens
    if "slot_mapping" in views:
        slots = array_of(views["slot_mapping"])[:count]
        high = slots >= problem.num_slots
        if high.any():
            token = int(high.argmax())
            below = f"slots below {problem.num_slots}"
            reject("slot_mapping", below, f"{int(slots[token])} for token {token}")
    if "positions" in views:
        positions = array_of(views["positions"])[:count]
        most = views["cos_sin_cache"].shape[0]
        outside = (positions < 0) | (positions >= most)
        if outside.any():
            token = int(outside.argmax())
            within = f"positions from 0 to {most - 1}"
            reject("positions", within, f"{int(positions[token])} for token {token}")
