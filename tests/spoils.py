"""Ways to spoil a good call: one argument is made wrong, and it is known who is to be blamed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from array_helpers import cupy_of, numpy_of
from helpers import BF16, E4M3, FP16, every_other, guarded, padded
from mla_helpers import FORMS, Form
from mla_layer_helpers import LAYER_FORMS, QUERY, VALUE, LayerForm
from strategies import DSV3_OP, FUSED_A_OP, LINEAR_OPS

import k3cupy

Args = dict[str, Any]
"""All arguments of a call by name, each of several outputs by its own."""

_JUNK = (object(), [1, 2, 3], "text", 1 + 0j, True)
_NO_VALUES = (torch.float32, torch.float64, torch.int16, torch.float8_e5m2)
_BYTES = (E4M3, torch.uint8)
_NO_INDICES = (torch.int16, torch.uint8, torch.float32, torch.bool)
_NO_SCALES = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.5, 1e39, 1e-50, 10**400)
_FUSED_A_CONFIG = k3cupy.FusedAGemmConfig(8, 16, 128, 4, 2, 2, 1, 1, 2)
_SKINNY_CONFIG = k3cupy.SkinnyGemmConfig(8, 64, 4, 2, 8)


@dataclass(frozen=True)
class Spoil:
    """What takes the place of an argument.

    Attributes:
        name: the argument.
        what: is wrong with it.
        replaced: gives what is passed instead, by name.
        blamed: names with one of which the message begins.
        needs: the arguments that must be there.
        device: where it can be done; anywhere if empty.
        when: looks at the argument as it was.
        error: of which kind the error is.
    """

    name: str
    what: str
    replaced: Callable[[Args], Args]
    blamed: tuple[str, ...]
    needs: tuple[str, ...] = ()
    device: str = ""
    when: Callable[[Any], bool] = lambda _: True
    error: type[Exception] = ValueError

    def fits(self, args: Args, device: str) -> bool:
        return (
            self.device in ("", device)
            and all(isinstance(args.get(name), torch.Tensor) for name in self.needs)
            and self.when(args.get(self.name))
        )

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


def change(name: str, what: str, how: Callable[[Any], Any], *others: str, **limits: Any) -> Spoil:
    """Make another tensor of a tensor; `others` may be blamed in its place."""
    replaced = lambda args: {name: how(args[name])}  # noqa: E731
    return Spoil(name, what, replaced, (name, *others), (name,), **limits)


def put(name: str, value: Any, *others: str, **limits: Any) -> Spoil:
    """Put a value in the place of an argument, which may have been left out."""
    return Spoil(name, f"is {value!r}", lambda _: {name: value}, (name, *others), **limits)


def is_wide(tensor: torch.Tensor) -> bool:
    """An element has several bytes, so that it has odd addresses."""
    return tensor.element_size() > 1


def is_number(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point


# --- What is wrong for any tensor ----------------------------------------------------------------


def flipped(tensor: torch.Tensor) -> Any:
    """The first axis runs backwards."""
    packed = tensor.contiguous()
    return (cupy_of(packed) if tensor.is_cuda else numpy_of(packed))[::-1]


def off_its_element(tensor: torch.Tensor) -> Any:
    """The same values at an odd address."""
    like = numpy_of(tensor.contiguous())
    memory = np.zeros(like.nbytes + 2, np.uint8)
    at = 1 - memory.ctypes.data % 2
    array = np.ndarray(like.shape, like.dtype, buffer=memory, offset=at)
    array[...] = like
    return array


def read_only(tensor: torch.Tensor) -> Any:
    array = numpy_of(tensor)
    array.flags.writeable = False
    return array


def freed(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    copied.untyped_storage().resize_(0)
    return copied


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    """The last element is no longer there."""
    copied = tensor.detach().clone()
    copied.untyped_storage().resize_(copied.untyped_storage().nbytes() - copied.element_size())
    return copied


def of_memory(name: str) -> Iterator[Spoil]:
    yield change(name, "is freed", freed)
    yield change(name, "is shrunk", shrunk)


def of_a_tensor(name: str, *, axes: bool = True) -> Iterator[Spoil]:
    for junk in _JUNK:
        yield put(name, junk, error=TypeError)
    yield from of_memory(name)
    negative = lambda t: torch._neg_view(t.clone())  # noqa: E731
    yield change(name, "carries the negative bit", negative, when=is_number, error=TypeError)
    yield change(name, "is on meta", lambda t: t.to("meta"))
    yield change(name, "is on the CPU", lambda t: t.cpu(), device="cuda")
    grad = lambda t: t.detach().clone().requires_grad_()  # noqa: E731
    yield change(name, "requires grad", grad, when=is_number)
    if axes:
        yield change(name, "has more axes", lambda t: t[None, None])
        yield change(name, "runs backwards", flipped)
        yield change(name, "lies at an odd address", off_its_element, device="cpu", when=is_wide)


def of_types(name: str, *wrong: torch.dtype) -> Iterator[Spoil]:
    for dtype in wrong:
        yield change(name, f"is {dtype}", lambda t, to=dtype: t.to(to), error=TypeError)


def of_half(name: str, first: str) -> Spoil:
    """The other type of 16 bits than that of the first argument."""

    def other(args: Args) -> Args:
        return {name: args[name].to(FP16 if args[first].dtype == BF16 else BF16)}

    return Spoil(name, "is the other half", other, (name,), error=TypeError)


def of_rows(name: str, *others: str) -> Iterator[Spoil]:
    yield change(name, "is flat", lambda t: t.flatten(), *others)
    yield change(name, "is narrow", lambda t: t[..., :-1], *others)
    yield change(name, "is wide", lambda t: padded(t, 8), *others)
    yield change(name, "has an inner stride", every_other, *others)


def of_what_is_written(name: str, *others: str) -> Iterator[Spoil]:
    yield change(name, "is read-only", read_only, device="cpu")
    yield change(name, "is one row", lambda t: t[:1].expand(t.shape))
    for other in others:
        yield overlap(name, other)


def overlap(written: str, other: str) -> Spoil:
    """The first element of the other covers the last byte of what is written."""

    def span(t: torch.Tensor) -> int:
        reach = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        return (reach + 1) * t.element_size()

    def both(args: Args) -> Args:
        a, b = args[written], args[other]
        begin = (span(a) - 1) // b.element_size()
        size = -(-(begin * b.element_size() + span(b)) // 16) * 16
        memory = torch.zeros(size, dtype=torch.uint8, device=a.device)
        first = memory.view(a.dtype).as_strided(a.shape, a.stride(), 0)
        return {written: first, other: memory.view(b.dtype).as_strided(b.shape, b.stride(), begin)}

    def is_apart(t: torch.Tensor) -> bool:
        """At the very same place a residual would be added in place."""
        return other != "residual" or t.numel() > 1

    return Spoil(
        written, f"overlaps {other}", both, (written, other), (written, other), when=is_apart
    )


def of_flags(*names: str) -> Iterator[Spoil]:
    for name in names:
        for junk in (1, 0, "no", [1]):
            yield put(name, junk, error=TypeError)


# --- Of each operation ---------------------------------------------------------------------------


@functools.cache
def of_mla(form_name: str) -> tuple[Spoil, ...]:
    """Of an MLA epilogue."""
    return tuple(_of_mla(FORMS[form_name]))


def outs_of(form: Form | LayerForm) -> tuple[str, ...]:
    """What messages call the outputs."""
    several = len(form.outputs) > 1
    return tuple(f"out[{i}]" for i in range(len(form.outputs))) if several else ("out",)


def _of_mla(form: Form) -> Iterator[Spoil]:
    first, outs = form.inputs[0], outs_of(form)
    for name in form.inputs:
        casts = form.kind == "concat_fp8" and name == "k_pe"
        yield from of_a_tensor(name)
        yield from of_types(name, *_NO_VALUES, *(() if casts else _BYTES))
        yield from of_rows(name)
        if name == first:
            yield change(name, "has no heads", lambda t: t[:, :0])
            continue
        yield of_half(name, first)
        yield change(name, "is short", lambda t: t[:-1])
        if name not in ("k_pe", "kv_c_normed"):
            yield change(name, "has few heads", lambda t: t[:, :-1])
    for name in outs:
        yield from of_a_tensor(name)
        yield from of_types(name, *_NO_VALUES)
        yield from of_rows(name)
        yield from of_what_is_written(
            name, *form.tensors, *(other for other in outs if other != name)
        )
        yield change(name, "is short", lambda t: t[:-1])
        yield change(name, "has rows apart", lambda t: padded(t, 8)[..., : t.shape[-1]])
        yield change(name, "is turned", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1))
    yield from of_flags("pdl")
    for junk in (5, "fast", 1.0, (1, 2), _SKINNY_CONFIG):
        yield put("config", junk, error=TypeError)
    if form.kind == "decode":
        yield from of_flags("ds_mla", "kv_inputs_ready")
    if form.has_cache:
        yield from _of_places(form)
    for name in form.scales:
        yield from _of_a_scale(name, form)
    if form.name in ("decode", "decode-ds_mla"):
        yield put("cache_scale_inv", 1.5)
    if form.name == "decode-ds_mla":
        yield put("q_scale_inv", 1.5)


@functools.cache
def of_layer(form_name: str) -> tuple[Spoil, ...]:
    """Of an operation around the epilogue."""
    return tuple(_of_layer(LAYER_FORMS[form_name]))


def _of_layer(form: LayerForm) -> Iterator[Spoil]:
    first, outs = form.inputs[0], outs_of(form)
    anyone = (*form.inputs, *outs)
    for name in (*form.inputs, *outs):
        yield from of_a_tensor(name)
        fp8 = name == "out" and "fp8" in form.name
        yield from of_types(name, *_NO_VALUES, *(() if fp8 else _BYTES))
        least = 2112 if name == "qkv_a" else None
        narrow = lambda t, least=least: t[..., : (least or t.shape[-1]) - 1]  # noqa: E731
        yield change(name, "is narrow", narrow, *anyone)
        yield change(name, "has an inner stride", every_other)
        yield change(name, "is flat", lambda t: t.flatten(), when=lambda t: t.ndim > 1)
        if name not in ("qkv_a", "kv_cache"):
            yield change(name, "is wide", lambda t: padded(t, 8), *anyone)
            yield change(name, "is short", lambda t: t[:-1], *anyone)
        if name != first and not fp8:
            yield of_half(name, first)
    for name in outs:
        others = tuple(other for other in (*form.tensors, *outs) if other != name)
        yield from of_what_is_written(name, *others)
        yield change(name, "has rows apart", lambda t: padded(t, 8)[..., : t.shape[-1]])
    yield from of_flags("pdl", "weight_is_static")
    for junk in (5, "fast", 1.0, _SKINNY_CONFIG):
        yield put("config", junk, error=TypeError)
    if form.kind != VALUE:
        for junk in ("text", None, True, 1j):
            yield put("eps", junk, error=TypeError)
        for number in (math.nan, math.inf, -1e-6, -1, 1e39, 10**400):
            yield put("eps", number)
    if form.kind == QUERY:
        yield from of_flags("ds_mla")
        yield from _of_places(form)
        yield change("w_q_b", "has rows apart", lambda t: padded(t, 8)[:, : t.shape[1]])
        for name in form.scales:
            yield from _of_a_scale(name, form)


def _of_places(form: Form | LayerForm) -> Iterator[Spoil]:
    """The cache, its slots, and RoPE."""
    yield from of_a_tensor("kv_cache")
    yield from of_types("kv_cache", torch.float32, torch.int16, torch.int8, torch.float8_e5m2)
    yield of_half("kv_cache", form.inputs[0])
    yield from of_rows("kv_cache")
    yield from of_what_is_written("kv_cache", *form.inputs, "slot_mapping", "cos_sin_cache")
    turned = ("positions",) if "q" in form.written(rope=True) else ()
    for name in turned and form.inputs[1:]:
        spoil = overlap("q", name)
        yield replace(spoil, needs=(*spoil.needs, *turned))
    for name in ("slot_mapping", "positions"):
        for spoil in (
            *of_a_tensor(name),
            *of_types(name, *_NO_INDICES),
            change(name, "is short", lambda t: t[:1]),
            change(name, "is empty", lambda t: t[:0]),
            change(name, "is a column", lambda t: t[:, None]),
        ):
            yield replace(spoil, needs=(name,))
    table = "cos_sin_cache"
    for spoil in (
        *of_a_tensor(table),
        *of_types(table, BF16, FP16, torch.float64),
        *of_rows(table),
    ):
        yield replace(spoil, needs=(table,))
    yield change(table, "is empty", lambda t: t[:0])
    for name in ("positions", table):
        yield change(name, "is left out", lambda _: None)


def _of_a_scale(name: str, form: Form | LayerForm) -> Iterator[Spoil]:
    for value in _NO_SCALES:
        yield put(name, value)
    yield from of_a_tensor(name, axes=False)
    yield from of_types(name, torch.float64, BF16, torch.int32)
    yield change(name, "is two", lambda t: t.reshape(1).repeat(2))
    yield change(name, "is empty", lambda t: t.reshape(1)[:0])
    if form.kind not in ("decode", QUERY):
        yield put(name, None, error=TypeError)
    elif name == "cache_scale_inv":
        yield put(name, None)


@functools.cache
def of_gemm(operation: str) -> tuple[Spoil, ...]:
    """Of a product."""
    return tuple(_of_dsv3() if operation == DSV3_OP else _of_gemm(operation))


def _of_gemm(operation: str) -> Iterator[Spoil]:
    if operation in LINEAR_OPS:
        for name in ("x", "weight", "residual"):
            for junk in _JUNK:
                yield put(name, junk, error=TypeError)
            yield from of_memory(name)
        for name in ("x", "weight"):
            yield put(name, None, error=TypeError)
        yield from of_flags("weight_is_static")
        for junk in ("no", [1], 1, 0):
            yield put("batch_invariant", junk, error=TypeError)
        return
    tensors, fused = ("x", "weight", "residual", "out"), operation == FUSED_A_OP
    for name in tensors:
        yield from of_a_tensor(name)
        yield from of_types(name, *_NO_VALUES, *_BYTES)
        others = ("weight",) if name == "x" else ()
        yield from of_rows(name, *others)
        if fused or name != "x":
            yield of_half(name, "x")
    for name in ("x", "weight"):
        yield put(name, None, error=TypeError)
    yield change("x", "has no columns", lambda t: t[:, :0], "weight")
    most = 64 if fused else 16
    yield change("x", "has many rows", lambda t: t[:1].repeat(most + 1, 1))
    yield from _of_a_weight("weight")
    for name in ("residual", "out"):
        yield change(name, "is short", lambda t: t[:-1])
        yield change(name, "is turned", lambda t: t.T.contiguous().T)
    yield from of_what_is_written("out", "x", "weight", "residual")
    yield from of_flags("pdl", "weight_is_static", *(("batch_invariant",) if fused else ()))
    for junk in (5, "fast", (8, 64, 4, 2, 8), _SKINNY_CONFIG if fused else _FUSED_A_CONFIG):
        yield put("config", junk, error=TypeError)


def _of_a_weight(name: str) -> Iterator[Spoil]:
    """A weight [N, K]."""
    yield change(name, "has rows apart", lambda t: padded(t, 8)[:, : t.shape[1]])
    yield change(name, "is one row", lambda t: t[:1].expand(t.shape))
    yield change(name, "is off 16 bytes", lambda t: guarded(t.cpu(), str(t.device.type), shift=2))
    yield change(name, "has no rows", lambda t: t[:0], "residual", "out")


def _of_dsv3() -> Iterator[Spoil]:
    for name in ("mat_a", "mat_b", "output"):
        yield from of_a_tensor(name)
        yield from of_types(name, *_NO_VALUES, *_BYTES)
        yield of_half(name, "mat_a")
        yield put(name, None, error=TypeError)
    yield from of_rows("mat_a", "mat_b")
    yield from of_rows("output")
    for spoil in _of_a_weight("mat_b"):
        seen = lambda args, of=spoil: {"mat_b": of.replaced({"mat_b": args["mat_b"].T})["mat_b"].T}  # noqa: E731
        yield replace(spoil, replaced=seen, blamed=("mat_b", "output"))
    yield change("mat_b", "is packed", lambda t: t.contiguous())
    yield change("mat_b", "is narrow", lambda t: t[:-1])
    yield from of_what_is_written("output", "mat_a", "mat_b")
    yield from of_flags("enable_pdl")
