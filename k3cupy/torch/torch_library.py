"""The low-latency linear as a PyTorch operator, ``torch.ops.k3cupy.low_latency_linear``.

Importing this module registers it. The operator is opaque to ``torch.compile``: which kernel runs
is decided when it runs, for the number of tokens, the layout and the device of that call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from k3cupy.accept.gemm import out_dtype_of
from k3cupy.call.plans import PlanCache, stamp
from k3cupy.call.repeat import MISS
from k3cupy.ops import linear
from k3cupy.ops.batch_invariance import resolved
from k3cupy.runtime import storages, streams, tracing
from k3cupy.runtime.errors import reject


@tracing.unseen
def linear_of_any_rank(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    weight_is_static: bool = False,
    batch_invariant: bool | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``x @ weight.T (+ residual)`` over the last dimension of x, as the operator does.

    Args:
        x: [..., K].
        weight: [N, K].
        residual: [..., N], or None.
        weight_is_static: nothing but PyTorch's in-place operations writes the weight. It is
            fetched ahead of the preceding kernel's end, but not in the first call behind a write.
        batch_invariant: as for ``low_latency_linear``.
        out_dtype: as for it.

    Returns:
        A new contiguous [..., N] tensor.
    """
    out = MISS
    if residual is None is out_dtype:
        out = repeated(x, weight, weight_is_static, batch_invariant)
    if out is not MISS:
        return out
    static = weight_is_static and is_settled(weight)
    rank = x.dim()
    if rank == 2 or not rank:
        out = linear.low_latency_linear(
            x,
            weight,
            residual,
            batch_invariant=batch_invariant,
            weight_is_static=static,
            out_dtype=out_dtype,
        )
    else:
        shape = (*x.shape[:-1], *weight.shape[:-1])
        if residual is not None:
            _check_matrix(weight)
            if residual.shape != shape:
                residual = _expanded(residual, shape)
        rows = _rows_of("x", x)
        out = linear.low_latency_linear(
            rows,
            weight,
            None if residual is None else _rows_of("residual", residual),
            batch_invariant=batch_invariant,
            weight_is_static=static,
            out_dtype=out_dtype,
        ).view(shape)
        if residual is None is out_dtype:
            linear.keep_rank(x, rows, weight, batch_invariant, static)
    if weight_is_static and not static and out.numel():
        settle(weight)
    return out


@tracing.unseen
def repeated(
    x: Tensor, weight: Tensor, weight_is_static: bool, batch_invariant: bool | None
) -> Any:
    """Compute a call of ``linear_of_any_rank`` that is like an earlier one; MISS for any other."""
    if type(batch_invariant) is not bool:
        batch_invariant = resolved(batch_invariant)
    now = stamp(linear.SOURCES)
    latest = _latest.get(weight._cdata)
    if latest is not None and not x.is_nested:  # PyTorch compares those at its peril
        of_now, of_invariant, static, counter, run, is_ours = latest
        if (
            now == of_now
            and batch_invariant is of_invariant
            and (not is_ours or (static is weight_is_static and (not static or is_settled(weight))))
        ):
            out = run(x, weight, None, None)
            if out is not MISS:
                counter.calls += 1
                return F.linear(x, weight) if out is None else out
    static, values = weight_is_static and is_settled(weight), (x, weight, None, None)
    done = linear.again(values, (now, batch_invariant), static)
    if done is None:
        return MISS
    out, found = done
    _latest.remember(weight._cdata, (now, batch_invariant, static, *found))
    if out is None:
        out = F.linear(x, weight)
    if weight_is_static and not static and out.numel():
        settle(weight)
    return out


_latest = PlanCache()
"""By a weight's identity: stamp, mode and promise of a call with it; what that counts, what repeats
it, and whether that is a kernel of ours."""


def is_settled(weight: Tensor) -> bool:
    """Return whether an earlier call has read the weight as it is now.

    Then whatever wrote it lies behind that call's kernel, and the promise of ``weight_is_static``
    holds. PyTorch counts in-place writes to a tensor, but not those through ``tensor.data``, and
    none to a tensor that was made in inference mode: that one never settles. A call that a graph
    captures reads when the graph is replayed: it settles for calls in captures, because a graph
    begins behind whatever was written before it.
    """
    known = _read_weights.get(weight._cdata)
    if known is None:
        return False
    storage, address, version, captured = known
    return (
        storage.cdata == weight.untyped_storage()._cdata
        and address == weight.data_ptr()
        and version == weight._version
        and (not captured or _is_captured(weight))
    )


def settle(weight: Tensor) -> None:
    """Remember that a call has read the weight as it is now."""
    if weight.is_inference():
        return
    _read_weights[weight._cdata] = (
        StorageWeakRef(weight.untyped_storage()),
        weight.data_ptr(),
        weight._version,
        _is_captured(weight),
    )
    if len(_read_weights) > _most_weights:
        _forget()


def unsettle(weight: Tensor) -> None:
    """Forget what calls have read: somebody may have written the weight where nobody counts."""
    _read_weights.pop(weight._cdata, None)


_read_weights: dict[int, tuple[StorageWeakRef, int, int, bool]] = {}
"""By a weight's identity: its storage, address and version when a call last read it, and whether a
CUDA graph captured that call.

A weight that went to another type and back may lie at its old address, of its old version, and be
new. So the storage is compared: a weak reference keeps no memory, but the identity from being given
out again. The weight itself gets none: PyTorch swaps no tensors to which weak references exist.
"""

_most_weights = 100


def _is_captured(weight: Tensor) -> bool:
    """Return whether a call with a weight, made now, is captured."""
    if not weight.is_cuda:
        return False
    return streams.is_capturing(streams.current_of("torch", weight.get_device())())


def _forget() -> None:
    """Drop the weights that are gone; the next time is when there are twice as many."""
    global _most_weights
    for key, known in list(_read_weights.items()):
        if known[0].expired() and _read_weights.get(key) is known:
            _read_weights.pop(key, None)
    _most_weights = max(100, 2 * len(_read_weights))


def _as_rows(t: Tensor) -> Tensor:
    """Return a tensor as [rows, width]: a view, where its strides allow one."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


def _check_matrix(weight: Tensor) -> None:
    if weight.dim() != 2:
        reject("weight", "shape [N, K] beside a residual", f"shape {list(weight.shape)}")


def _expanded(residual: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a residual in the shape of the output; it may be one for every row."""
    own = residual.shape
    pairs = zip(own[::-1], shape[::-1], strict=False)
    fits = [(type(extent) is int and extent == 1) or extent == wanted for extent, wanted in pairs]
    for is_fit in (len(own) <= len(shape), *fits):
        torch._check_value(
            is_fit, lambda: f"residual: expected shape {list(shape)}, got shape {list(own)}"
        )
    return residual.expand(shape)


def _rows_of(name: str, t: Tensor) -> Tensor:
    """Return the rows of an argument; where they have to be copied, their memory must be there."""
    try:
        return t.view(t.shape[:-1].numel(), t.shape[-1])
    except RuntimeError:
        storages.check_values((name,), (t,))
        return _as_rows(t)


def _operator(*arguments: Any) -> Tensor:
    refuse_forward_mode("x")
    return linear_of_any_rank(*arguments)


def refuse_forward_mode(name: str) -> None:
    """Refuse a call inside a level of forward-mode AD, whatever its tensors are.

    ``name`` is that of the first argument.

    PyTorch knows no such derivative of an operator made in Python: it takes the tangents away, some
    before the operator sees its tensors, and says nothing.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        hint = "k3cupy.low_latency_linear has that derivative: there PyTorch's own linear runs"
        reject(name, "a call outside of forward-mode AD", "one inside", hint, TypeError)


def _shape_of(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    weight_is_static: bool = False,
    batch_invariant: bool | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a tensor like the operator's result, for tracing; refuse what PyTorch's linear would.

    PyTorch does not, of tensors without values: it compares fewer of their types.
    """
    refuse_forward_mode("x")
    if out_dtype is not None:
        out_dtype_of(out_dtype)
    given = {"x": x, "weight": weight} | ({} if residual is None else {"residual": residual})
    storages.check_meta(tuple(given), tuple(given.values()))
    torch._check(
        x.dim() > 0 and weight.dim() in (1, 2) and x.shape[-1] == weight.shape[-1],
        lambda: f"weight: expected shape [N, K] for x {list(x.shape)}, got {list(weight.shape)}",
    )
    for name, t in given.items():
        if t.device != x.device:
            reject(name, f"device {x.device} like x", f"device {t.device}", "Move it there first")
        if t.dtype != x.dtype and (name == "weight" or out_dtype is None):
            expected, found = (str(kind).removeprefix("torch.") for kind in (x.dtype, t.dtype))
            reject(name, f"{expected} like x", found, error=TypeError)
    shape = (*x.shape[:-1], *weight.shape[:-1])
    if residual is not None:
        if x.dim() != 2 or out_dtype is None:
            _check_matrix(weight)
        _expanded(residual, shape)
    return x.new_empty(shape, dtype=out_dtype or x.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    # Arguments at the end that have their defaults do not come here.
    wanted = ctx.needs_input_grad
    kind = grad.dtype  # float32 where the output is
    grad_x = (grad @ weight.to(kind)).to(x.dtype) if wanted[0] else None
    grad_weight = None
    if wanted[1]:
        grad_weight = (_as_rows(grad).T @ _as_rows(x).to(kind)).to(weight.dtype)
    grad_residual = grad.to(x.dtype) if any(wanted[2:3]) else None
    return (grad_x, grad_weight, grad_residual, None, None, None)[: len(wanted)]


LIBRARY = torch.library.Library("k3cupy", "FRAGMENT")
"""Of all operators. Registered with it, one takes a tenth of the host's time of a ``custom_op``."""

TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)
"""Inputs come as they lie in the program: a layout that was validated stays what it is."""

_NAME = "k3cupy::low_latency_linear"
LIBRARY.define(
    "low_latency_linear(Tensor x, Tensor weight, Tensor? residual=None, bool weight_is_static=False"
    ", bool? batch_invariant=None, ScalarType? out_dtype=None) -> Tensor",
    tags=TAGS,
)
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("low_latency_linear", _operator, _device)
torch.library.register_fake(_NAME, _shape_of, lib=LIBRARY)
torch.library.register_autograd(_NAME, _backward, setup_context=_keep, lib=LIBRARY)
