"""What both GEMMs promise on a GPU: huge strides, streams, threads, graphs, devices."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gemm_helpers import (
    GEMMS_AND_TOKENS,
    Gemm,
    assert_product,
    inputs,
    normal,
    residual_of,
    same_bits,
)
from helpers import BF16
from memory_helpers import gibibytes
from stream_helpers import SLEEP_CYCLES, STREAM_FORMS, captured

import k3cupy

pytestmark = pytest.mark.gpu

ROUNDS = 100
COLD = {
    "fused_a_gemm": (9, k3cupy.FusedAGemmConfig(16, 48, 128, 9, 2, 4, 1, 1, 2)),
    "skinny_gemm": (1, k3cupy.SkinnyGemmConfig(1, 160, 5, 2, 8)),
}
"""Numbers of rows, and configurations that nothing else has loaded.

The one of the fused-A GEMM needs shared memory above the default limit: no thread may launch
before the limit is raised.
"""

with_and_without_residual = pytest.mark.parametrize(
    "has_residual", [False, True], ids=["product", "residual"]
)


@with_and_without_residual
def test_pdl_and_the_promise_do_not_change_the_bits(gemm: Gemm, has_residual: bool) -> None:
    x, weight = inputs(gemm.odd_tokens, 528, 2048, "cuda")
    residual = residual_of(gemm.odd_tokens, 528, "cuda") if has_residual else None
    want = gemm(x, weight, residual=residual, pdl=False)
    for pdl in (None, False, True):
        for static in (False, True):
            out = gemm(x, weight, residual=residual, pdl=pdl, weight_is_static=static)
            same_bits(out, want)


# Huge strides


@gibibytes(5)
@pytest.mark.parametrize("off", [8, 1], ids=["aligned", "element-wise"])
def test_rows_more_than_2_31_bytes_apart(gemm: Gemm, off: int, needs_memory: None) -> None:
    far = 2**30 + off
    buffer = torch.zeros(far + 4096, dtype=BF16, device="cuda")
    x, weight = inputs(2, 48, 128, "cuda")
    values = residual_of(2, 48, "cuda")
    product, want = gemm(x, weight), gemm(x, weight, residual=values)
    wide = buffer.as_strided((2, 128), (far, 1))
    residual = buffer.as_strided((2, 48), (far, 1), 512)
    out = buffer.as_strided((2, 48), (far, 1), 256)
    wide.copy_(x)
    residual.copy_(values)
    same_bits(gemm(wide, weight), product)
    same_bits(gemm(wide, weight, out=out), product)
    same_bits(gemm(wide, weight, residual=residual), want)
    same_bits(gemm(wide, weight, residual=residual, out=out), want)
    same_bits(wide, x)
    same_bits(residual, values)
    for tensor in (out, residual, wide):
        tensor.zero_()
    assert torch.count_nonzero(buffer) == 0, "bytes outside the rows were written"


@gibibytes(6)
def test_a_weight_of_more_than_2_31_elements(gemm: Gemm, needs_memory: None) -> None:
    n, k = 131_080, 16_384
    weight = torch.zeros(n, k, dtype=BF16, device="cuda")
    assert weight.numel() > 2**31
    x = normal((3, k), 1, "cuda")
    rows = [0, 65_535, 131_071, n - 1]
    weight[rows] = normal((len(rows), k), 2, "cuda")
    out = gemm(x, weight)
    assert_product(out[:, rows].contiguous(), x, weight[rows])
    out[:, rows] = 0
    assert torch.count_nonzero(out) == 0


# Streams


def test_case17_current_stream_is_used_without_any_synchronisation(gemm: Gemm) -> None:
    """Sleep, write the input, call, read: all on a side stream, nothing waits on the host."""
    tokens = min(16, gemm.max_tokens)
    x, weight = inputs(tokens, 528, 1536, "cuda")
    values = [normal((tokens, 1536), 100 + i, "cuda") for i in range(ROUNDS)]
    wants = [gemm(value, weight) for value in values]
    torch.cuda.synchronize()
    seen = []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for value in values:
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(value)
            seen.append(gemm(x, weight).clone())
    torch.cuda.synchronize()
    for i, (got, want) in enumerate(zip(seen, wants, strict=True)):
        same_bits(got, want, f"round {i}")


@with_and_without_residual
@pytest.mark.parametrize("give", STREAM_FORMS)
def test_case17_explicit_stream(
    gemm: Gemm, give: Callable[[torch.cuda.Stream], Any], has_residual: bool
) -> None:
    tokens = min(16, gemm.max_tokens)
    x, weight = inputs(tokens, 528, 1536, "cuda")
    residual = residual_of(tokens, 528, "cuda")
    side = torch.cuda.Stream()
    stream = give(side)
    for i in range(10):
        value = normal((tokens, 1536), i, "cuda")
        added = residual_of(tokens, 528, "cuda", seed=i)
        want = gemm(value, weight, residual=added if has_residual else None)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(value)
            residual.copy_(added)
        out = gemm(x, weight, residual=residual if has_residual else None, stream=stream)
        side.synchronize()
        same_bits(out, want)


@pytest.mark.parametrize("handle", [0, 1, 2], ids=["default", "legacy", "per-thread"])
def test_case17_special_stream_handles(gemm: Gemm, handle: int) -> None:
    x, weight = inputs(gemm.max_tokens, 48, 128, "cuda")
    torch.cuda.synchronize()
    out = gemm(x, weight, stream=handle)
    torch.cuda.synchronize()
    assert_product(out, x, weight)


def test_case17_cupy_stream(gemm: Gemm) -> None:
    cupy = pytest.importorskip("cupy")
    from array_helpers import cupy_of

    tokens = min(16, gemm.max_tokens)
    x, weight = inputs(tokens, 48, 1536, "cuda")
    arrays = [cupy_of(x), cupy_of(weight)]
    values = [normal((tokens, 1536), i, "cuda") for i in range(20)]
    wants = [gemm(value, weight) for value in values]
    seen = []
    torch.cuda.synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        for value in values:
            with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
                torch.cuda._sleep(SLEEP_CYCLES)
                x.copy_(value)
            seen.append(gemm(*arrays))
    side.synchronize()
    for got, want in zip(seen, wants, strict=True):
        same_bits(torch.from_dlpack(got.view(cupy.int16)).view(BF16), want)


@with_and_without_residual
def test_case29_inputs_dropped_right_after_a_call_on_an_explicit_stream(
    gemm: Gemm, has_residual: bool
) -> None:
    tokens = gemm.max_tokens
    x, weight = inputs(tokens, 528, 1536, "cuda")
    read = {"x": x, "weight": weight}
    if has_residual:
        read["residual"] = residual_of(tokens, 528, "cuda")
    want = gemm(**read)
    side = torch.cuda.Stream()
    for _ in range(10):
        mine = {name: tensor.clone() for name, tensor in read.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20 * SLEEP_CYCLES)
        out = gemm(**mine, stream=side.cuda_stream)
        shapes = [tensor.shape for tensor in mine.values()]
        del mine
        reused = [torch.full(shape, float("nan"), dtype=BF16, device="cuda") for shape in shapes]
        torch.cuda.synchronize()
        same_bits(out, want)
        del reused


def test_threads_that_share_a_cold_kernel(gemm: Gemm) -> None:
    tokens, config = COLD[gemm.name]
    x, weight = inputs(tokens, 96, 1024, "cuda")
    torch.cuda.synchronize()

    def work(_: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            out = gemm(x, weight, config=config)
            torch.cuda.current_stream().synchronize()
            return out

    with ThreadPoolExecutor(8) as pool:
        for out in pool.map(work, range(32)):
            assert_product(out, x, weight)


# Neighbours on two streams

LINEARS: tuple[Callable[..., Any], ...] = (k3cupy.low_latency_linear, k3cupy.fused_a_gemm)


@pytest.mark.parametrize("linear", LINEARS, ids=lambda linear: linear.__name__)
def test_case44_two_streams_inside_one_capture(linear: Callable[..., Any]) -> None:
    """A wide projection beside a narrow one, whose first columns the next projection reads."""
    shapes = {"qkvg": (6144, 7168), "f_ab": (144, 7168), "f_b": (1536, 128)}
    weights = {name: normal(shape, i, "cuda") for i, (name, shape) in enumerate(shapes.items())}
    side = torch.cuda.Stream()

    def layer(x: torch.Tensor) -> dict[str, torch.Tensor]:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        out = {"qkvg": linear(x, weights["qkvg"], weight_is_static=True)}
        with torch.cuda.stream(side):
            out["f_ab"] = linear(x, weights["f_ab"], weight_is_static=True)
            out["f_b"] = linear(out["f_ab"][:, :128], weights["f_b"], weight_is_static=True)
        main.wait_stream(side)
        return out

    for tokens in range(1, 15):
        x = normal((tokens, 7168), tokens, "cuda")
        layer(x)
        torch.cuda.synchronize()
        graph, got = captured(lambda: layer(x))  # noqa: B023
        assert got["f_ab"].stride() == (144, 1)
        for seed in range(5):
            x.copy_(normal(x.shape, 100 + seed, "cuda"))
            want = layer(x)
            for out in got.values():
                out.fill_(float("nan"))
            graph.replay()
            read = {"qkvg": x, "f_ab": x, "f_b": got["f_ab"][:, :128]}
            for name, out in got.items():
                assert_product(out, read[name], weights[name])
                same_bits(out, want[name], f"{name}, M = {tokens}, captured and eager")


@pytest.mark.parametrize("linear", LINEARS, ids=lambda linear: linear.__name__)
def test_case46_rows_of_one_weight_on_two_streams(linear: Callable[..., Any]) -> None:
    weight = normal((3648, 7168), 1, "cuda")
    parts = (weight[:2112], weight[2112:])
    side = torch.cuda.Stream()

    def layer(x: torch.Tensor) -> list[torch.Tensor]:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        first = linear(x, parts[0], weight_is_static=True)
        with torch.cuda.stream(side):
            second = linear(x, parts[1], weight_is_static=True)
        main.wait_stream(side)
        return [first, second]

    for tokens in (1, 4, 8, 16, 64):
        x = normal((tokens, 7168), tokens, "cuda")
        want = [linear(x, part.clone()) for part in parts]
        eager = layer(x)
        torch.cuda.synchronize()
        graph, replayed = captured(lambda: layer(x))  # noqa: B023
        for _ in range(5):
            for out in replayed:
                out.fill_(float("nan"))
            graph.replay()
            for i, part in enumerate(parts):
                same_bits(replayed[i], want[i])
                same_bits(eager[i], want[i])
                assert_product(replayed[i], x, part)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
def test_case45_x_and_residual_in_one_buffer(tokens: int) -> None:
    """The kernel that the dispatcher chooses for packed tensors takes these, with the same bits."""
    weight = normal((7168, 3584), 1, "cuda")
    both = normal((tokens, 10752), 2, "cuda")
    x, residual = both[:, :3584], both[:, 3584:]
    packed = (x.contiguous(), weight, residual.contiguous())
    choice = k3cupy.explain_low_latency_gemm(x, weight, residual)
    assert choice.kernel == k3cupy.explain_low_latency_gemm(*packed).kernel
    out = k3cupy.low_latency_linear(x, weight, residual)
    assert (k3cupy.try_low_latency_gemm(x, weight, residual) is None) is choice.is_fallback
    if not choice.is_fallback:
        assert_product(out, x, weight, residual)
        same_bits(out, k3cupy.low_latency_linear(*packed))
    same_bits(k3cupy.fused_a_gemm(x, weight, residual), k3cupy.fused_a_gemm(*packed))


# Graphs


@with_and_without_residual
@pytest.mark.parametrize(("gemm", "tokens"), GEMMS_AND_TOKENS)
def test_graph_replay_sees_new_inputs(gemm: Gemm, tokens: int, has_residual: bool) -> None:
    for dtype in gemm.dtypes:
        x, weight = inputs(tokens, 528, 1536, "cuda", strides=(2112, 1), dtype=dtype)
        residual = residual_of(tokens, 528, "cuda", dtype=dtype)
        options = {"residual": residual} if has_residual else {}
        gemm(x, weight, **options)
        graph, out = captured(lambda: gemm(x, weight, **options))  # noqa: B023
        for seed in range(5):
            x.copy_(normal(x.shape, seed, "cuda"))
            weight.copy_(normal(weight.shape, 50 + seed, "cuda"))
            residual.copy_(normal(residual.shape, 90 + seed, "cuda"))
            out.fill_(float("nan"))
            graph.replay()
            assert_product(out, x, weight, **options)


def test_case15_no_tokens_in_a_graph(gemm: Gemm) -> None:
    x, weight = inputs(0, 48, 128, "cuda")
    nothing = torch.zeros(1, device="cuda")

    def run() -> Any:
        nothing.add_(1)
        return gemm(x, weight)

    graph, out = captured(run)
    graph.replay()
    assert out.shape == (0, 48)


# Devices

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_the_current_device_stays(gemm: Gemm) -> None:
    before = torch.cuda.current_device()
    x, weight = inputs(4, 48, 128, "cuda")
    gemm.run_and_check(x, weight)
    with pytest.raises(ValueError, match="weight"):
        gemm(x, weight[:, :112])
    assert torch.cuda.current_device() == before


@two_gpus
def test_case19_tensors_on_a_device_that_is_not_current(gemm: Gemm) -> None:
    pairs = [[t.to(f"cuda:{i}") for t in inputs(gemm.odd_tokens, 48, 1536)] for i in (1, 0)]
    with torch.cuda.device(0):
        for _ in range(25):
            for x, weight in pairs:
                out = gemm(x, weight)
                assert out.device == x.device
                assert_product(out, x, weight)
                assert torch.cuda.current_device() == 0


@two_gpus
def test_case19_two_threads_on_two_devices(gemm: Gemm) -> None:
    def work(index: int) -> None:
        for seed in range(25):
            pair = inputs(gemm.odd_tokens, 48, 1536, seed=seed)
            x, weight = (t.to(f"cuda:{index}") for t in pair)
            assert_product(gemm(x, weight), x, weight)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
