"""Refusals of MLA calls as tables: an argument, what takes its place, and what the message says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from helpers import BF16, exactly, moved
from mla_helpers import MlaCall, as_out, poisoned_outs, refused


class Refusal(NamedTuple):
    """An argument, what takes its place, and what the message says it got.

    `change` gets what the argument was. `got` is a pattern, or makes one of what took its place.
    `blamed` is another pattern of names where the message may name others.
    """

    label: str
    name: str
    change: Callable[[Any], Any]
    got: str | Callable[[Any], str]
    blamed: str = ""


# What a message says of a tensor


def its_shape(tensor: torch.Tensor) -> str:
    return exactly(f"shape {list(tensor.shape)}")


def its_dtype(tensor: torch.Tensor) -> str:
    return exactly(name_of(tensor.dtype))


def its_strides(tensor: torch.Tensor) -> str:
    return exactly(f"strides {tuple(tensor.stride())}")


def its_length(tensor: torch.Tensor) -> str:
    return exactly(str(tensor.shape[0]))


def its_type(value: Any) -> str:
    return exactly(type(value).__name__)


def its_value(value: Any) -> str:
    return exactly(repr(value))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def put(label: str, name: str, value: Any, got: Any, blamed: str = "") -> Refusal:
    return Refusal(label, name, lambda _: value, got, blamed)


def of_no_tensors(form: Any) -> Iterator[Refusal]:
    for name in form.tensors:
        if name not in (*form.scales, "positions", "cos_sin_cache", "gate"):
            yield put("None", name, None, exactly("NoneType"))
        for junk in (object(), [1, 2, 3], "text", 1 + 0j, True):
            yield put(f"a {type(junk).__name__}", name, junk, its_type)
    for name in (*form.inputs, *(("kv_cache",) if form.has_cache else ())):
        yield Refusal("on meta", name, lambda t: t.to("meta"), exactly("device meta"))
        # PyTorch's own words.
        yield Refusal("sparse", name, lambda t: t.to(BF16).to_sparse(), "storage|sparse|layout")


def problems_of(call: MlaCall, refusals: list[Refusal]) -> list[str]:
    """Try each of the refusals; what is wrong with them."""
    boxes = poisoned_outs(call)
    saved = [box.snapshot() for box in boxes]
    outs = as_out([box.tensor for box in boxes])
    problems = []
    for refusal in refusals:
        before = outs if refusal.name == "out" else call.args.get(refusal.name)
        value = moved(refusal.change(before), call.device)
        got = refusal.got if isinstance(refusal.got, str) else refusal.got(value)
        changes = {"out": outs, refusal.name: value}
        try:
            refused(call, refusal.blamed or refusal.name, got, **changes)
        except (AssertionError, pytest.fail.Exception) as error:
            problems.append(f"{refusal.name}, {refusal.label}: {error}")
    for box, bytes_before in zip(boxes, saved, strict=True):
        oracle.assert_same_bits(box.snapshot(), bytes_before, "out after refused calls")
    return problems


def with_shared_memory(
    call: MlaCall, written: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(like `written`, like the argument) in one buffer: the last 16 bytes of one are shared."""
    tensor = call.args[name]
    out_bytes = written.numel() * written.element_size()
    size = tensor.numel() * tensor.element_size()
    buffer = torch.zeros(out_bytes + size, dtype=torch.uint8, device=call.device)
    at = out_bytes - 16
    inside = buffer[at : at + size].view(tensor.dtype).view(tensor.shape)
    inside.flatten().view(torch.uint8).copy_(tensor.contiguous().flatten().view(torch.uint8))
    return buffer[:out_bytes].view(written.dtype).view(written.shape), inside


OVERLAP = exactly("tensors that overlap")
