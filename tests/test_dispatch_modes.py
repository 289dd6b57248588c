"""Low-latency linear: batch-invariant mode, and compiling ahead. No GPU is needed."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from dispatch_helpers import DispatchDevice, only_row
from fake_device import H200
from gemm_helpers import inputs, normal
from helpers import BF16, Producer, refused
from toolchain_helpers import fake_gpu

import k3cupy
from k3cupy.runtime import devices

pytestmark = pytest.mark.usefixtures("fresh_counts")

N, K = 1536, 128


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> DispatchDevice:
    return DispatchDevice(monkeypatch)


# Batch-invariant mode


def enter_batch_invariant_mode(enabled: Any) -> None:
    with k3cupy.batch_invariant_mode(enabled):
        pass


def test_modes_and_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3cupy.ops.batch_invariance._of_process", None)
    assert not k3cupy.is_batch_invariant()
    for value, wanted in (("1", True), ("0", False), ("", False), ("yes", True)):
        monkeypatch.setenv("K3CUPY_BATCH_INVARIANT", value)
        assert k3cupy.is_batch_invariant() == wanted
    k3cupy.set_batch_invariant(False)
    assert not k3cupy.is_batch_invariant()
    with k3cupy.batch_invariant_mode():
        assert k3cupy.is_batch_invariant()
        with k3cupy.batch_invariant_mode(False):
            assert not k3cupy.is_batch_invariant()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(k3cupy.is_batch_invariant).result(), "the block's thread only"
    k3cupy.set_batch_invariant(True)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(k3cupy.is_batch_invariant).result(), "the whole process"
    with pytest.raises(RuntimeError), k3cupy.batch_invariant_mode(False):
        raise RuntimeError
    assert k3cupy.is_batch_invariant()
    for junk in (1, None, "on"):
        found = f"^{re.escape(repr(junk))}$"
        for set_it in (k3cupy.set_batch_invariant, enter_batch_invariant_mode):
            refused({"enabled": junk}, "enabled", found, operation=set_it)


def test_the_mode_of_a_call(gpu: DispatchDevice) -> None:
    """Where a table has the framework's linear, the mode still has our kernel."""
    x, weight = inputs(60, 4608, 1536)
    assert k3cupy.try_low_latency_gemm(x, weight) is None
    with k3cupy.batch_invariant_mode():
        assert k3cupy.try_low_latency_gemm(x, weight) is not None
        assert k3cupy.try_low_latency_gemm(x, weight, batch_invariant=False) is None
        assert "batch-invariant" in k3cupy.explain_low_latency_gemm(x, weight).reason
    assert k3cupy.try_low_latency_gemm(x, weight, batch_invariant=True) is not None
    assert len(gpu.loaded) == 1


@pytest.mark.parametrize("with_residual", [False, True])
def test_many_rows_go_in_slices(gpu: DispatchDevice, with_residual: bool) -> None:
    x, weight = inputs(150, N, K, strides=(136, 1))
    residual = normal((150, N), 3) if with_residual else None
    out = k3cupy.try_low_latency_gemm(x, weight, residual, batch_invariant=True)
    assert out.shape == (150, N)
    assert out.is_contiguous()
    assert len(gpu.launches) == 3
    for i, (_, arguments) in enumerate(gpu.launches):
        assert arguments[0] == weight.data_ptr()
        assert arguments[3] == x.data_ptr() + 2 * 136 * 64 * i
        assert arguments[4] == (64, 64, 22)[i]
        assert arguments[5] == 136
        assert arguments[6] == out.data_ptr() + 2 * N * 64 * i
        at = residual.data_ptr() + 2 * N * 64 * i if residual is not None else 0
        assert arguments[8] == at
    row = only_row()
    assert row.tokens == ">64"
    assert "in slices of 64 rows" in row.choice.reason
    assert k3cupy.try_low_latency_gemm(x, weight, residual) is None


@pytest.mark.parametrize("last", [1, 22, 64])
def test_the_reason_says_what_rows_behind_whole_slices_run(gpu: DispatchDevice, last: int) -> None:
    x, weight = inputs(64 + last, N, K)
    found = k3cupy.explain_low_latency_gemm(x, weight, batch_invariant=True)
    assert ("the rest by the configuration for so many rows" in found.reason) == (last < 64)
    alone = k3cupy.explain_low_latency_gemm(x[64:], weight, batch_invariant=True)
    k3cupy.try_low_latency_gemm(x, weight, batch_invariant=True)
    launched = [record.instance.name_expression for record in gpu.records]
    assert launched == [found.name_expression, alone.name_expression]


def test_slices_need_nothing_of_the_producer(gpu: DispatchDevice) -> None:
    """A bare DLPack producer cannot be cut, but its addresses can be counted."""
    x, weight = inputs(65, N, K)
    bare = Producer(x), Producer(weight)
    found = k3cupy.explain_low_latency_gemm(*bare, batch_invariant=True)
    assert found.kernel == "fused_a"
    assert "in slices of 64 rows" in found.reason
    wanted = k3cupy.explain_low_latency_gemm(x, weight, batch_invariant=True)
    assert (found.config, found.name_expression) == (wanted.config, wanted.name_expression)


# Warming up


def warm_up(**options: Any) -> int:
    return k3cupy.warmup("low_latency_linear", progress=False, **options)


def test_warm_up_compiles_what_the_calls_will_run(gpu: DispatchDevice) -> None:
    tokens, weight = [1, 2, 8, 16, 40], normal((N, K), 1)
    count = warm_up(shapes=[(N, K)], tokens=tokens, weight_is_static=True, device=0)
    compiled = set(gpu.loaded)
    assert count == len(gpu.loaded) == len(compiled)
    for m in tokens:
        for x in (normal((m, K), 2), torch.zeros(m, 6288, dtype=BF16)[:, :K]):
            k3cupy.low_latency_linear(x, weight, weight_is_static=True)
    assert set(gpu.loaded[count:]) == compiled


@pytest.mark.parametrize("tokens", [150, 64, 5])
def test_warm_up_of_batch_invariant_slices(tokens: int, gpu: DispatchDevice) -> None:
    residual = normal((tokens, N), 3)
    with k3cupy.batch_invariant_mode():
        warm_up(shapes=[(N, K)], tokens=tokens, residual=True, device=0)
        compiled = set(gpu.loaded)
        gpu.loads.clear()
        for x in (normal((tokens, K), 2), torch.zeros(tokens, 6288, dtype=BF16)[:, :K]):
            k3cupy.low_latency_linear(x, normal((N, K), 1), residual)
    assert gpu.loaded
    assert set(gpu.loaded) <= compiled


def test_warm_up_of_what_the_framework_runs_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fake_gpu(monkeypatch)
    monkeypatch.setattr(devices, "info", lambda _: H200)
    assert warm_up(shapes=[(4608, 1536)], tokens=[64, 65, 1000]) == 0
    assert compiler.compiled == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"shapes": [(0, 16)]}, r"\(0, 16\)"),
    ({"shapes": [16]}, "16"),
    ({"shapes": [(16, 16, 16)]}, r"\(16, 16, 16\)"),
    ({"tokens": [0]}, "0"),
    ({"tokens": [1.5]}, r"1\.5"),
    ({"device": 7}, "7"),
    ({"residual": 1}, "1"),
    ({"weight_is_static": None}, "None"),
    ({"batch_invariant": 1}, "1"),
]


@pytest.mark.parametrize(("options", "found"), WRONG, ids=str)
def test_warm_up_refuses(
    options: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_gpu(monkeypatch)
    monkeypatch.setattr(devices, "info", lambda _: H200)
    (name,) = options
    arguments = {"shapes": [(N, K)], **options}
    refused(arguments, name, f"^{found}$", operation=warm_up)
    assert compiler.compiled == []
