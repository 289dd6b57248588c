"""Low-latency linear on a GPU: real views, every plan, graphs, streams, devices, and its cost."""

from __future__ import annotations

import gc
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from array_helpers import cupy_of
from dispatch_helpers import says
from gemm_helpers import assert_product, inputs, normal, residual_of, same_bits
from helpers import BF16, FP16, run_child
from stream_helpers import SLEEP_CYCLES, STREAM_FORMS, captured

import k3cupy
from k3cupy import projections
from k3cupy.choose.gemm import ALL, TOKENS, choose, why_not
from k3cupy.runtime import devices

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_counts")]

N, K = 1536, 1536
NAN = float("nan")
_MOST_COST_US = 10.0
"""Far above what it is, so that a busy machine does not fail; the benchmark holds the real bar."""

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def ours(x: Any, weight: Any, residual: Any = None, **options: Any) -> Any:
    """The result of a kernel of ours, which must be the one that ran."""
    out = k3cupy.try_low_latency_gemm(x, weight, residual, **options)
    assert out is not None, k3cupy.explain_low_latency_gemm(x, weight, residual)
    return out


def warm_up(**options: Any) -> int:
    return k3cupy.warmup("low_latency_linear", progress=False, **options)


def framework(x: torch.Tensor, weight: torch.Tensor) -> None:
    """The framework's linear runs, with the very bits that it gives by itself."""
    assert k3cupy.try_low_latency_gemm(x, weight) is None
    out = k3cupy.low_latency_linear(x, weight)
    assert torch.isfinite(out).all()
    same_bits(out, torch.nn.functional.linear(x, weight))


# Real views


def sliced(case: projections.StridedCase, tokens: int) -> torch.Tensor:
    """The founding slice of a wide tensor that is NaN everywhere else."""
    wide = torch.full((tokens, case.source_row_width), NAN, dtype=BF16, device="cuda")
    x = wide[:, case.offset : case.offset + case.k]
    x.copy_(normal((tokens, case.k), tokens, "cuda"))
    return x


@pytest.mark.parametrize("case", projections.strided_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_case01_the_founding_slices_run_a_kernel_of_ours(
    case: projections.StridedCase, tokens: int
) -> None:
    weight = normal((case.n, case.k), 7, "cuda")
    x = sliced(case, tokens)
    choice = k3cupy.explain_low_latency_gemm(x, weight)
    if choice.is_fallback and choice.origin != "rule":
        pytest.skip(choice.reason)
    assert choice.kernel in ("fused_a", "skinny")
    packed = ours(x.contiguous(), weight)
    for view in (x, torch.from_dlpack(x)):
        out = ours(view, weight)
        assert_product(out, x, weight)
        same_bits(out, packed)
    (row,) = k3cupy.dispatch_report()
    assert (row.choice.kernel, row.calls) == (choice.kernel, 3)


@pytest.mark.parametrize("stride", [0, 1, 6285])
def test_case01_one_row_of_any_stride(stride: int) -> None:
    x, weight = normal((1, K), 1, "cuda"), normal((N, K), 2, "cuda")
    out = ours(x.as_strided((1, K), (stride, 1)), weight)
    assert_product(out, x, weight)


def test_case02_padding_is_never_read() -> None:
    """Rows apart by a multiple of 8 run our kernel, others the framework's: both right."""
    weight = normal((N, K), 2, "cuda")
    for width, kernel_runs in ((K + 8, True), (K + 7, False)):
        wide = torch.full((4, width), NAN, dtype=BF16, device="cuda")
        x = wide[:, :K]
        x.copy_(normal((4, K), 1, "cuda"))
        choice = k3cupy.explain_low_latency_gemm(x, weight)
        assert choice.is_fallback != kernel_runs
        if kernel_runs:
            assert_product(ours(x, weight), x, weight)
        else:
            assert says(choice.reason, "x", "1543")
            framework(x, weight)
    wide = torch.full((N, K + 8), NAN, dtype=BF16, device="cuda")
    padded = wide[:, :K]
    padded.copy_(weight)
    x = normal((4, K), 1, "cuda")
    assert says(k3cupy.explain_low_latency_gemm(x, padded).reason, "weight", r"\(1544, 1\)")
    framework(x, padded)


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_case03_addresses_off_16_bytes(offset: int) -> None:
    """The check that looks at strides only lets these pass, and faults."""
    storage = normal((4, 6288), 1, "cuda")
    weight = normal((N, 128), 2, "cuda")
    x = storage[:, 6144 + offset : 6272 + offset]
    past = 2 * offset
    assert says(k3cupy.explain_low_latency_gemm(x, weight).reason, "x", f"{past} bytes past")
    framework(x, weight)
    buffer = normal((N * 128 + 8,), 3, "cuda")
    shifted = buffer[offset : offset + N * 128].view(N, 128)
    packed = x.contiguous()
    reason = k3cupy.explain_low_latency_gemm(packed, shifted).reason
    assert says(reason, "weight", f"the address of weight|0x{shifted.data_ptr():x}")
    framework(packed, shifted)


def test_a_transposed_weight() -> None:
    x, stored = normal((4, K), 1, "cuda"), normal((K, N), 2, "cuda")
    weight = stored.t()
    assert says(k3cupy.explain_low_latency_gemm(x, weight).reason, "weight", r"\(1, 1536\)")
    framework(x, weight)


@pytest.mark.parametrize("dtype", [FP16, torch.float32])
def test_case23_other_types_run_the_frameworks_linear(dtype: torch.dtype) -> None:
    x, weight = normal((4, K), 1, "cuda").to(dtype), normal((N, K), 2, "cuda").to(dtype)
    framework(x, weight)
    mixed = k3cupy.explain_low_latency_gemm(x, weight.to(BF16))
    assert says(mixed.reason, "x", str(dtype)[6:])
    with pytest.raises(RuntimeError, match="dtype"):
        k3cupy.low_latency_linear(x, weight.to(BF16))


def test_case20_a_tensor_on_the_cpu() -> None:
    x, weight = normal((4, K), 1, "cuda"), normal((N, K), 2, "cuda")
    for host in (x.cpu(), x.cpu().pin_memory()):
        reason = k3cupy.explain_low_latency_gemm(host, weight).reason
        assert says(reason, "weight", "the weight on cuda:0|device cuda:0")
        with pytest.raises(RuntimeError, match="device"):
            k3cupy.low_latency_linear(host, weight)


def test_case25_gradients() -> None:
    x = normal((4, K), 1, "cuda")
    layer = torch.nn.Linear(K, N, bias=False, device="cuda", dtype=BF16)
    out = k3cupy.low_latency_linear(x, layer.weight)
    out.float().sum().backward()
    assert layer.weight.grad is not None
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_product(ours(x, layer.weight), x, layer.weight)


def test_no_rows_and_many_rows() -> None:
    weight = normal((N, K), 2, "cuda")
    for tokens in (0, 65, 300):
        x = normal((tokens, K), 1, "cuda")
        framework(x, weight)
        assert k3cupy.low_latency_linear(x, weight).shape == (tokens, N)


def test_more_dimensions() -> None:
    x, weight = normal((2, 3, K), 1, "cuda"), normal((N, K), 2, "cuda")
    residual = residual_of(6, N, "cuda").contiguous().view(2, 3, N)
    out = k3cupy.low_latency_linear(x, weight, residual)
    want = torch.addmm(residual.view(6, N), x.view(6, K), weight.t())
    same_bits(out, want.view(2, 3, N))


# Every plan


@pytest.mark.parametrize("p", projections.shapes(), ids=lambda p: f"{p.n}x{p.k}")
def test_every_plan_is_right(p: projections.Projection) -> None:
    """Whatever a table names for this GPU against float64.

    Without a residual x is packed, with one its rows are apart.
    """
    gpu = devices.info(torch.cuda.current_device())
    plans = {
        (tokens, residual): found
        for tokens in TOKENS
        for residual in (False, True)
        if not (found := choose(ALL, p.n, p.k, tokens, gpu, residual=residual)).is_fallback
    }
    warm_up(
        shapes=[(p.n, p.k)],
        tokens=TOKENS,
        residual=[False, True],
        weight_is_static=True,
        device=gpu.index,
    )
    weight = normal((p.n, p.k), 1, "cuda")
    for tokens, has_residual in plans:
        wide = torch.full((tokens, p.k + 8), NAN, dtype=BF16, device="cuda")
        x = wide[:, : p.k]
        x.copy_(normal((tokens, p.k), tokens, "cuda"))
        residual = residual_of(tokens, p.n, "cuda") if has_residual else None
        x = x if has_residual else x.contiguous()
        out = ours(x, weight, residual, weight_is_static=True)
        assert_product(out, x, weight, residual)


@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 40])
def test_a_residual_is_added_before_the_only_rounding(tokens: int) -> None:
    """Products that are exact in fp32: the result must be the float64 sum rounded once."""
    rng = torch.Generator("cuda").manual_seed(tokens)
    shapes = ((tokens, 128), (N, 128), (tokens, N))
    limits = (8, 8, 4096)
    x, weight, residual = (
        torch.randint(-m, m + 1, s, generator=rng, device="cuda").float().to(BF16)
        for s, m in zip(shapes, limits, strict=True)
    )
    exact = x.double() @ weight.double().T + residual.double()
    once, twice = exact.to(BF16), (exact - residual.double()).to(BF16) + residual
    assert not torch.equal(once, twice), "the test tells"
    same_bits(ours(x, weight, residual, batch_invariant=True), once)
    planned = k3cupy.try_low_latency_gemm(x, weight, residual)
    if planned is not None:
        same_bits(planned, once)
    for kernel, run in (("fused_a", k3cupy.fused_a_gemm), ("skinny", k3cupy.skinny_gemm)):
        if why_not(kernel, 128, tokens) is None:
            same_bits(run(x, weight, residual), once, kernel)


@pytest.mark.parametrize("with_residual", [False, True])
def test_batch_invariance(with_residual: bool) -> None:
    """The bits of a row are those that it has among any others, above 64 rows too."""
    x, weight = normal((150, K), 1, "cuda"), normal((N, K), 2, "cuda")
    residual = residual_of(150, N, "cuda").contiguous() if with_residual else None

    def part(rows: slice) -> Any:
        return None if residual is None else residual[rows]

    with k3cupy.batch_invariant_mode():
        whole = ours(x, weight, residual)
        assert_product(whole, x, weight, residual)
        for tokens in (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 149):
            for start in (0, 150 - tokens):
                rows = slice(start, start + tokens)
                same_bits(ours(x[rows], weight, part(rows)), whole[rows], f"{rows}")
    wide = torch.full((150, K + 8), NAN, dtype=BF16, device="cuda")
    wide[:, :K] = x
    same_bits(ours(wide[:, :K], weight, residual, batch_invariant=True), whole)


def test_the_process_wide_mode() -> None:
    x, weight = normal((16, K), 1, "cuda"), normal((N, K), 2, "cuda")
    want = ours(x, weight, batch_invariant=True)
    k3cupy.set_batch_invariant(True)
    try:
        same_bits(ours(x[:1], weight), want[:1])
        same_bits(ours(x, weight), want)
    finally:
        k3cupy.set_batch_invariant(False)


# Graphs


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_a_warmed_call_in_a_graph(tokens: int) -> None:
    x, weight = normal((tokens, K), 1, "cuda"), normal((N, K), 2, "cuda")
    warm_up(shapes=[(N, K)], tokens=tokens)
    graph, out = captured(lambda: k3cupy.low_latency_linear(x, weight))
    assert not k3cupy.dispatch_report().fallbacks
    for seed in range(3):
        x.copy_(normal(x.shape, seed, "cuda"))
        weight.copy_(normal(weight.shape, 50 + seed, "cuda"))
        out.fill_(NAN)
        graph.replay()
        assert_product(out, x, weight)
    assert k3cupy.dispatch_report().calls == 1, "a replay is no call"


def test_slices_in_a_graph() -> None:
    x, weight = normal((150, K), 1, "cuda"), normal((N, K), 2, "cuda")
    warm_up(shapes=[(N, K)], tokens=150, batch_invariant=True)
    graph, out = captured(lambda: ours(x, weight, batch_invariant=True))
    x.copy_(normal(x.shape, 9, "cuda"))
    out.fill_(NAN)
    graph.replay()
    assert_product(out, x, weight)


def _captures_from_cold() -> None:
    x, weight = normal((8, K), 1, "cuda"), normal((N, K), 2, "cuda")
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
        with pytest.raises(k3cupy.CaptureError, match=r"shapes=\[\(1536, 1536\)\]"):
            k3cupy.low_latency_linear(x, weight)
    torch.cuda.synchronize()
    assert warm_up(shapes=[(N, K)], tokens=[8]) == 1
    graph, out = captured(lambda: k3cupy.low_latency_linear(x, weight))
    graph.replay()
    assert_product(out, x, weight)


def test_case18_capture_from_cold_and_after_warm_up() -> None:
    run_child(_captures_from_cold)


# Streams


def test_case17_current_stream_is_used_without_any_synchronisation() -> None:
    x, weight = normal((8, K), 1, "cuda"), normal((N, K), 2, "cuda")
    values = [normal((8, K), 100 + i, "cuda") for i in range(30)]
    wants = [ours(value, weight) for value in values]
    torch.cuda.synchronize()
    seen = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for value in values:
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(value)
            seen.append(k3cupy.low_latency_linear(x, weight).clone())
    torch.cuda.synchronize()
    for got, want in zip(seen, wants, strict=True):
        same_bits(got, want)


@pytest.mark.parametrize("give", STREAM_FORMS)
@pytest.mark.parametrize("tokens", [8, 65])
def test_case17_explicit_stream(give: Callable[[torch.cuda.Stream], Any], tokens: int) -> None:
    """Our kernel and the framework's linear run on the stream that was given."""
    x, weight = normal((tokens, K), 1, "cuda"), normal((N, K), 2, "cuda")
    side = torch.cuda.Stream()
    stream = give(side)
    for i in range(5):
        value = normal((tokens, K), i, "cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(value)
        out = k3cupy.low_latency_linear(x, weight, stream=stream)
        side.synchronize()
        want = value.float() @ weight.float().T
        torch.testing.assert_close(out.float(), want, rtol=2**-6, atol=0.5)


def test_batch_invariant_slices_on_an_explicit_stream() -> None:
    x, weight = normal((150, K), 1, "cuda"), normal((N, K), 2, "cuda")
    want = ours(x, weight, batch_invariant=True)
    side = torch.cuda.Stream()
    for _ in range(3):
        torch.cuda.synchronize()
        pair = [x.clone(), weight.clone()]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(10 * SLEEP_CYCLES)
        out = ours(*pair, batch_invariant=True, stream=side.cuda_stream)
        del pair
        reused = torch.full((N, K), NAN, dtype=BF16, device="cuda")
        torch.cuda.synchronize()
        same_bits(out, want)
        del reused


# Other producers


@pytest.mark.parametrize("tokens", [4, 65])
@pytest.mark.parametrize("with_residual", [False, True])
def test_cupy_arrays(tokens: int, with_residual: bool) -> None:
    cupy = pytest.importorskip("cupy")
    x, weight = normal((tokens, K), 1, "cuda"), normal((N, K), 2, "cuda")
    residual = residual_of(tokens, N, "cuda").contiguous()
    torch.cuda.synchronize()
    given = [cupy_of(t) for t in (x, weight, residual)[: 2 + with_residual]]
    out = k3cupy.low_latency_linear(*given)
    assert isinstance(out, cupy.ndarray)
    assert (k3cupy.try_low_latency_gemm(*given) is None) == (tokens > 64)
    cupy.cuda.get_current_stream().synchronize()
    got = torch.from_dlpack(out.view(cupy.int16)).view(BF16)
    assert_product(got, x, weight, residual if with_residual else None)


# Threads and devices


def test_concurrent_first_calls() -> None:
    """Threads that meet at a cold kernel: one compiles, all are right, every call is counted."""
    weights = [normal((n, K), n, "cuda") for n in (208, 224, 240)]
    x = normal((5, K), 1, "cuda")
    torch.cuda.synchronize()

    def work(_: int) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [k3cupy.low_latency_linear(x, weight) for weight in weights]
            torch.cuda.current_stream().synchronize()
            return found

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(16)):
            for out, weight in zip(found, weights, strict=True):
                assert_product(out, x, weight)
    assert k3cupy.dispatch_report().calls == 48


@two_gpus
def test_case19_devices_that_are_not_current() -> None:
    pairs = [[t.to(f"cuda:{i}") for t in inputs(8, N, K)] for i in (1, 0)]
    with torch.cuda.device(0):
        for _ in range(25):
            for x, weight in pairs:
                for out in (ours(x, weight), ours(x, weight, batch_invariant=True)):
                    assert out.device == x.device
                    assert_product(out, x, weight)
                assert torch.cuda.current_device() == 0
    (x, weight), (_, other) = pairs
    reason = k3cupy.explain_low_latency_gemm(x, other).reason
    assert says(reason, "weight", "the weight on cuda:0|device cuda:0")
    reason = k3cupy.explain_low_latency_gemm(x, weight, residual_of(8, N, "cuda")).reason
    assert says(reason, "residual", "residual on cuda:0|device cuda:0")


@two_gpus
def test_case19_two_threads_on_two_devices() -> None:
    def work(index: int) -> None:
        for seed in range(25):
            x, weight = (t.to(f"cuda:{index}") for t in inputs(8, N, K, seed=seed))
            assert_product(ours(x, weight), x, weight)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))


# Cost


def test_what_dispatching_costs_on_the_host() -> None:
    """On top of the direct call of the kernel that it picks."""
    x, weight = normal((4, 128), 1, "cuda"), normal((N, 128), 2, "cuda")
    choice = k3cupy.explain_low_latency_gemm(x, weight)
    direct = {"fused_a": k3cupy.fused_a_gemm, "skinny": k3cupy.skinny_gemm}[choice.kernel]

    def best_us(call: Callable[[], Any]) -> float:
        call()

        def some() -> None:
            for _ in range(200):
                call()
            torch.cuda.synchronize()

        return min(timeit.repeat(some, number=1, repeat=15)) / 200 * 1e6

    with torch.inference_mode():
        alone = best_us(lambda: direct(x, weight))
        dispatched = best_us(lambda: k3cupy.low_latency_linear(x, weight))
    print(f"{choice.kernel}: {alone:.2f} us alone, {dispatched:.2f} us dispatched")
    assert dispatched - alone < _MOST_COST_US
