"""Descriptors of tensors that exist nowhere, and what a linear layer does with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_device import H200, FakeDevice
from gemm_helpers import taken_for, unread

import k3cupy
from k3cupy import Choice
from k3cupy.call import plans
from k3cupy.call.plans import PlanCache
from k3cupy.choose import cache
from k3cupy.ops import linear
from k3cupy.ops.dispatch_report import ReportRow
from k3cupy.runtime import devices, producers
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.dlpack import packed_strides
from k3cupy.runtime.tensors import TensorView, itemsize

ADDRESS = 0x7F00_0000_0000
N, K = 2112, 7168


def view(*shape: int, **changes: Any) -> TensorView:
    """A packed bf16 tensor of PyTorch on GPU 0, with some facts changed."""
    v = TensorView(
        address=ADDRESS,
        shape=shape,
        strides=packed_strides(shape),
        dtype="bfloat16",
        itemsize=2,
        device_type="cuda",
        device_index=0,
        readonly=False,
        requires_grad=False,
        framework="torch",
    )
    v = replace(v, **changes)
    return replace(v, itemsize=itemsize(v.dtype))


def decided(
    x: TensorView | None = None,
    weight: TensorView | None = None,
    residual: TensorView | None = None,
    *,
    grad_mode: bool = False,
    batch_invariant: bool = False,
    device: DeviceInfo = H200,
) -> Choice:
    """What a call of 4 rows with a known weight would do, some of it given as descriptors."""
    x, weight = x or view(4, K), weight or view(N, K)
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(grad_mode):
        patch.setattr(producers, "view", lambda value, _: value)
        patch.setattr(producers, "check", lambda *_: None)
        patch.setattr(devices, "info", lambda _: device)
        return k3cupy.explain_low_latency_gemm(x, weight, residual, batch_invariant=batch_invariant)


def planned(
    n: int,
    k: int,
    num_tokens: int,
    gpu: DeviceInfo = H200,
    *,
    has_residual: bool = False,
    batch_invariant: bool = False,
) -> Choice:
    """What a call with packed tensors does on a GPU."""
    x, weight = unread(num_tokens, k), unread(n, k)
    residual = unread(num_tokens, n) if has_residual else None
    with taken_for(gpu):
        return k3cupy.explain_low_latency_gemm(x, weight, residual, batch_invariant=batch_invariant)


def says(reason: str, blamed: str, found: str) -> bool:
    """Whether a reason to fall back names an argument and what was found.

    A reason in the form of an error, `argument: expected ..., got ...`, is taken at its word; any
    other has to hold what was found, with the digits of its numbers together.
    """
    error = re.match(r"(\w+): expected .*?, got (.*)", reason)
    if error is not None:
        return error[1] == blamed and re.search(found, error[2]) is not None
    return re.search(found, re.sub(r"(?<=\d),(?=\d{3})", "", reason)) is not None


class DispatchDevice(FakeDevice):
    """The fake GPU with no route or plan kept from another test, whose device is another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        plans.tables_changed()
        monkeypatch.setattr(linear, "_routes", PlanCache())
        monkeypatch.setattr(linear, "_repeats", PlanCache())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[DispatchDevice]:
    """Plans of before fit no more inside, nor those made inside afterwards."""
    cache.reload()
    with torch.no_grad():
        yield DispatchDevice(monkeypatch)
    cache.reload()


def only_row() -> ReportRow:
    """The one line of the report."""
    (row,) = k3cupy.dispatch_report()
    return row
