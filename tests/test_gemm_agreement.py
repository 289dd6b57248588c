"""One answer for a product: direct call, linear layer, explanation, table and what is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatch_helpers import DispatchDevice
from fake_device import H200, CudaTensor
from gemm_helpers import fresh_plans, normal, same_bits
from gemm_table_helpers import measured_table, product_of
from helpers import BF16

import k3cupy
from k3cupy import Choice
from k3cupy.choose.gemm import fits, problem_of
from k3cupy.choose.table import Entry

EXPLAIN = {"fused_a": k3cupy.explain_fused_a_gemm, "skinny": k3cupy.explain_skinny_gemm}
RUN = {"fused_a": k3cupy.fused_a_gemm, "skinny": k3cupy.skinny_gemm}
N, K = 2112, 7168


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    with fresh_plans(tmp_path):
        yield DispatchDevice(monkeypatch)


def cuda(*shape: int, strides: tuple[int, int] | None = None) -> torch.Tensor:
    """A tensor of the fake GPU, whose memory nobody touches."""
    if strides is None:
        return CudaTensor.of(torch.empty(shape, dtype=BF16), 0)
    least = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    return CudaTensor.of(torch.empty(least, dtype=BF16).as_strided(shape, strides), 0)


def measured_entries(*, residual: bool) -> list[Entry]:
    return [e for e in measured_table() if e.problem.endswith(" + residual") == residual]


def fastest(entry: Entry, *kernels: str) -> tuple[str, Any]:
    """The fastest of some kernels in an entry, found by itself: first measured, first named."""
    found = [
        (us, kernel != "linear", place, kernel, config)
        for place, (kernel, config, us) in enumerate(
            (kernel, config, us)
            for kernel in kernels
            for config, us in entry.times.get(kernel, {}).items()
            if kernel == "linear" or fits(kernel, config, entry.size, H200) is not None
        )
    ]
    *_, kernel, config = min(found, key=lambda each: each[:3])
    return kernel, None if config is None else fits(kernel, config, entry.size, H200)


def explained(explain: Callable[..., Choice], entry: Entry, **options: Any) -> Choice:
    n, k = product_of(entry)
    residual = cuda(entry.size, n) if entry.problem.endswith("residual") else None
    return explain(cuda(entry.size, k), cuda(n, k), residual, **options)


@pytest.mark.parametrize("residual", [False, True])
def test_every_measured_product_is_what_its_table_says(residual: bool, gpu: DispatchDevice) -> None:
    """By a direct call of either kernel, and by a linear layer; with a residual too."""
    entries = measured_entries(residual=residual)
    assert len(entries) > (60 if residual else 100)
    for entry in entries:
        for kernel, explain in EXPLAIN.items():
            if kernel in entry.times:
                direct = explained(explain, entry)
                assert (direct.kernel, direct.config) == fastest(entry, kernel), entry.key
                assert direct.origin == "shipped"
        layer = explained(k3cupy.explain_low_latency_gemm, entry)
        assert (layer.kernel, layer.config) == fastest(entry, *EXPLAIN, "linear"), entry.key
        assert "without the residual" not in layer.reason


LAYOUTS: dict[str, tuple[int, int] | None] = {
    "packed": None,
    "strided": (7184, 1),
    "overlapping": (8, 1),
}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_what_is_explained_is_what_is_loaded(
    tokens: int, layout: str, residual: bool, invariant: bool, gpu: DispatchDevice
) -> None:
    """And what a warm-up has compiled."""
    x, weight = cuda(tokens, K, strides=LAYOUTS[layout]), cuda(N, K)
    added = cuda(tokens, N) if residual else None
    options = {"batch_invariant": invariant}
    k3cupy.warmup(
        "low_latency_linear",
        shapes=[(N, K)],
        tokens=tokens,
        residual=residual,
        device=0,
        progress=False,
        **options,
    )
    warm = set(gpu.loaded)
    told = k3cupy.explain_low_latency_gemm(x, weight, added, **options)
    gpu.loads.clear()
    k3cupy.low_latency_linear(x, weight, added, **options)
    assert gpu.loaded == [told.name_expression]
    assert told.name_expression in warm
    for kernel, explain in EXPLAIN.items():
        mine = options if kernel == "fused_a" else {}
        if kernel == "skinny" and tokens > 8:
            continue
        direct = explain(x, weight, added, **mine)
        gpu.loads.clear()
        RUN[kernel](x, weight, added, **mine)
        assert gpu.loaded == [direct.name_expression]
        if kernel == told.kernel:
            assert direct == told


def test_overlapping_rows_take_the_plain_kernel_and_say_so(gpu: DispatchDevice) -> None:
    """The copy engine cannot fetch them: no tensor map has a row stride below a row."""
    mapped = [
        entry
        for entry in measured_entries(residual=False)
        if entry.size == 64 and entry.kernel == "fused_a" and entry.config.mapped_x
    ]
    assert mapped, "some product is measured to be the fastest with x fetched by the copy engine"
    for entry in mapped:
        n, k = product_of(entry)
        weight = cuda(n, k)
        k3cupy.warmup("low_latency_linear", shapes=[(n, k)], tokens=64, device=0, progress=False)
        warm = set(gpu.loaded)
        packed = k3cupy.explain_low_latency_gemm(cuda(64, k), weight)
        assert "mapped_x<" in packed.name_expression
        x = cuda(64, k, strides=(8, 1))
        for explain, run in (
            (k3cupy.explain_low_latency_gemm, k3cupy.low_latency_linear),
            (k3cupy.explain_fused_a_gemm, k3cupy.fused_a_gemm),
        ):
            told = explain(x, weight)
            assert told.config == packed.config.with_copy_warps()
            assert told.reason.endswith(
                f"; x by copy warps, because its rows are 8 elements apart, not {k} or more"
            )
            gpu.loads.clear()
            run(x, weight)
            assert gpu.loaded == [told.name_expression]
            assert "mapped_x<" not in told.name_expression
            assert told.name_expression in warm


# A residual of zeros


def test_a_residual_of_zeros_may_take_another_configuration(gpu: DispatchDevice) -> None:
    """It is a problem of its own: where its measurements differ, so may the order of the sums."""
    pairs = []
    known = measured_table()
    for entry in measured_entries(residual=True):
        plain = known.entries(entry.problem.removesuffix(" + residual"))[entry.size]
        pairs.append(tuple(explained(k3cupy.explain_fused_a_gemm, e) for e in (plain, entry)))
    assert any(plain.config.order != added.config.order for plain, added in pairs)


@pytest.mark.parametrize("run", ["fused_a_gemm", "low_latency_linear"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 40, 64])
def test_batch_invariant_calls_sum_in_one_order_with_a_residual_and_without(
    run: str, tokens: int, gpu: DispatchDevice
) -> None:
    """So a residual of zeros changes no bit of theirs, whatever was measured with one."""
    explain = {
        "fused_a_gemm": k3cupy.explain_fused_a_gemm,
        "low_latency_linear": k3cupy.explain_low_latency_gemm,
    }[run]
    for entry in measured_entries(residual=True):
        n, k = product_of(entry)
        if entry.size != 64 or n * k > 1 << 25:
            continue
        x, weight = cuda(tokens, k), cuda(n, k)
        plain = explain(x, weight, batch_invariant=True)
        added = explain(x, weight, cuda(tokens, n), batch_invariant=True)
        assert plain.config == added.config, problem_of(n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 33, 64])
def test_one_configuration_gives_the_same_bits_with_a_residual_of_zeros(tokens: int) -> None:
    """A direct call that names it, and any call in batch-invariant mode."""
    x, weight = normal((tokens, 1536), 1, "cuda"), normal((2304, 1536), 2, "cuda")
    zeros = torch.zeros(tokens, 2304, dtype=BF16, device="cuda")
    config = k3cupy.explain_fused_a_gemm(x, weight).config
    plain = k3cupy.fused_a_gemm(x, weight, config=config)
    same_bits(k3cupy.fused_a_gemm(x, weight, zeros, config=config), plain)
    if tokens <= 8:
        skinny = k3cupy.explain_skinny_gemm(x, weight).config
        plain = k3cupy.skinny_gemm(x, weight, config=skinny)
        same_bits(k3cupy.skinny_gemm(x, weight, zeros, config=skinny), plain)
    for run in (k3cupy.fused_a_gemm, k3cupy.low_latency_linear):
        plain = run(x, weight, batch_invariant=True)
        same_bits(run(x, weight, zeros, batch_invariant=True), plain)
