"""What the operations of an MLA layer share of what they accept, and what K3CUPY_CHECK looks at."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from k3cupy.accept import checks
from k3cupy.call.arguments import Arguments, Output, Problem, Values
from k3cupy.constants import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from k3cupy.runtime import streams, tensors, tracing
from k3cupy.runtime.errors import CaptureError, reject
from k3cupy.runtime.tensors import TensorView

Views = Mapping[str, TensorView]

ROPE = ("positions", "cos_sin_cache")
INDEX_TYPES = ("int64", "int32")
FP8 = ("float8_e4m3fn", "uint8")
_INDICES = ("slot_mapping", "positions")


class Signature:
    """The arguments and outputs of an operation.

    Attributes:
        op: public name.
        inputs: arguments that are tensors, in order; the others must be like the first.
        outputs: name -> width of each output.
        is_fp8: the outputs are e4m3.
        out_names: how messages name ``out``, one name an output.
        arguments: all tensor arguments, ``out`` last.
    """

    def __init__(
        self, op: str, inputs: Sequence[str], outputs: Mapping[str, int], *, is_fp8: bool = False
    ) -> None:
        self.op, self.inputs, self.outputs, self.is_fp8 = op, tuple(inputs), dict(outputs), is_fp8
        several = len(outputs) > 1
        self.out_names = tuple(f"out[{i}]" for i in range(len(outputs))) if several else ("out",)
        scales = [name for name in inputs if name.endswith("scale_inv")]
        optional = {*scales, *ROPE}
        self.arguments = Arguments(
            (*inputs, *self.out_names), [n for n in inputs if n not in optional], scales
        )


@tracing.instead("split_out")
def split_out(signature: Signature, out: Any) -> Values:
    """Return what was given as ``out``, one value an output.

    Raises:
        TypeError, ValueError: several outputs and no tuple of as many tensors.
    """
    count = len(signature.out_names)
    if out is None or count == 1:
        return (out,) + (None,) * (count - 1)
    wanted = f"a tuple of {count} tensors ({', '.join(signature.outputs)})"
    if not isinstance(out, tuple | list):
        reject("out", wanted, type(out).__name__, error=TypeError)
    if len(out) != count:
        reject("out", wanted, f"{len(out)} of them")
    for name, value in zip(signature.out_names, out, strict=True):
        if value is None:
            reject(name, "a tensor like the others", "None", error=TypeError)
    return tuple(out)


@dataclass(frozen=True)
class MlaProblem(Problem):
    """A call that passed validation.

    Attributes:
        variant: which kernel the arguments ask for.
        num_heads: H.
        num_slots: tokens that the cache holds; 0 without one.
        epsilon: what a norm adds to the mean of the squares.
    """

    variant: Any
    num_heads: int
    num_slots: int
    epsilon: float = 0.0


def drop_unread_cache(views: dict[str, TensorView], first: TensorView) -> None:
    """Leave the cache out of a call without tokens: engines make such before they have one."""
    if first.shape[:1] == (0,):
        views.pop("kv_cache", None)


def check_alike(views: Views, names: Sequence[str]) -> str:
    """Accept inputs of one type with 16 bits, and return that."""
    first, *others = names
    dtype = views[first].dtype
    checks.check_dtype(first, views[first], ("bfloat16", "float16"))
    for name in others:
        if name in views and views[name].dtype != dtype:
            reject(name, f"{dtype} like {first}", views[name].dtype, error=TypeError)
    return dtype


def check_rope_types(views: Views) -> None:
    """Accept positions and table together or not at all, of the right types."""
    for missing, other in (ROPE, ROPE[::-1]):
        if missing not in views and other in views:
            hint = "RoPE needs both, no RoPE needs neither"
            reject(missing, f"a tensor, because {other} is given", "None", hint)
    if "positions" in views:
        checks.check_dtype("positions", views["positions"], INDEX_TYPES)
        checks.check_dtype("cos_sin_cache", views["cos_sin_cache"], ("float32",))


def check_shapes(
    views: Views, widths: Mapping[str, int], cache_width: int, outs: Mapping[str, int]
) -> tuple[int, int]:
    """Check all shapes, and return num_tokens and num_heads.

    Args:
        views: the tensors.
        widths: of the inputs [num_tokens, num_heads, width]; the others must be like the first.
        cache_width: of a cache row.
        outs: the same of the outputs.
    """
    first = next(iter(widths))
    checks.check_shape(first, views[first], ("num_tokens", "num_heads", widths[first]))
    num_tokens, num_heads, _ = views[first].shape
    if num_heads == 0:
        reject(first, "at least one head", f"shape {list(views[first].shape)}")
    like = f" like {first}"
    one = (1,) * (len(views["k_pe"].shape) == 3)  # k_pe is [T, 64] or [T, 1, 64]
    wanted: dict[str, tuple[int | str, ...]] = {
        **{name: (num_tokens, num_heads, width) for name, width in widths.items()},
        "kv_c_normed": (num_tokens, KV_LORA_RANK),
        "k_pe": (num_tokens, *one, QK_ROPE_HEAD_DIM),
    }
    for name, shape in wanted.items():
        if name in views:
            checks.check_shape(name, views[name], shape, like)
    check_places(views, num_tokens, cache_width)
    for name, width in outs.items():
        if name in views:
            checks.check_shape(name, views[name], (num_tokens, num_heads, width))
    return num_tokens, num_heads


def check_places(views: Views, num_tokens: int, cache_width: int) -> None:
    """Check the shapes of the cache, of slots and positions, and of the RoPE table."""
    if "kv_cache" in views:
        checks.check_shape("kv_cache", views["kv_cache"], ("num_blocks", "block_size", cache_width))
    for name in _INDICES:
        if name in views:
            checks.check_shape(name, views[name], (f">= {num_tokens}",))
            count = views[name].shape[0]
            if count < num_tokens:
                reject(name, f"at least {num_tokens} entries, one a token", f"{count}")
    if "cos_sin_cache" in views:
        table = views["cos_sin_cache"]
        checks.check_shape("cos_sin_cache", table, ("max_position", QK_ROPE_HEAD_DIM))
        if table.shape[0] == 0 and num_tokens:
            reject("cos_sin_cache", "at least 1 position", "0")


def problem_of(
    views: dict[str, TensorView],
    variant: Any,
    outputs: tuple[Output, ...],
    updated: tuple[str, ...] = (),
    untouched: Collection[str] = (),
    *,
    num_heads: int = 1,
    epsilon: float = 0.0,
) -> MlaProblem:
    """Check where and how tensors of the right types and shapes lie, and return the call.

    Args:
        views: the tensors.
        variant: what they ask for, but for ``vector``, where it has that.
        outputs: each [num_tokens, ...].
        updated: names of inputs that are written.
        untouched: names of inputs that are neither read nor written.
        num_heads: of the call, where it has heads.
        epsilon: of its norms.
    """
    for name, v in views.items():
        checks.check_strides(name, v, inner=name not in _INDICES)
    checks.check_devices(views)
    updated = tuple([name for name in updated if name in views])
    given = [output.argument for output in outputs if output.argument in views]
    for name in (*updated, *given):
        checks.check_writable(name, views[name])
    for name in updated:
        if views[name].size:
            checks.check_rows_apart(name, views[name])
    for name in given:
        checks.check_packed(name, views[name])
    blocks, block_size, *_ = views["kv_cache"].shape if "kv_cache" in views else (0, 0)
    if blocks * block_size >= 1 << 31:
        reject("kv_cache", "fewer than 2^31 slots", f"{blocks * block_size}")
    checks.check_grad(views)
    reasons = [
        checks.misalignment(name, v)
        for name, v in views.items()
        if name not in (*_INDICES, *untouched) and not name.endswith("scale_inv")
    ]
    slow_reason = next(filter(None, reasons), None)
    if hasattr(variant, "vector"):
        variant = replace(variant, vector=slow_reason is None)
    return MlaProblem(
        views=checks.without_owners(views),
        num_tokens=outputs[0].shape[0],
        outputs=outputs,
        updated=updated,
        in_place=(),
        slow_reason=slow_reason,
        variant=variant,
        num_heads=num_heads,
        num_slots=blocks * block_size,
        epsilon=epsilon,
    )


def reference_arrays(problem: MlaProblem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arrays as the CPU functions take them: an entry a token, k_pe [T, 64]."""
    count = problem.num_tokens
    found = {name: array[:count] if name in _INDICES else array for name, array in arrays.items()}
    if "k_pe" in found:
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
    for name in _INDICES:
        if name not in views:
            continue
        entries = array_of(views[name])[: problem.num_tokens]
        if name == "slot_mapping":
            wrong, expected = entries >= problem.num_slots, f"slots below {problem.num_slots}"
        else:
            most = views["cos_sin_cache"].shape[0]
            wrong = (entries < 0) | (entries >= most)
            expected = f"positions from 0 to {most - 1}"
        if wrong.any():
            token = int(wrong.argmax())
            reject(name, expected, f"{int(entries[token])} for token {token}")
