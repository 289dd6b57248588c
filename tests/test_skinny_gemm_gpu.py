"""The skinny GEMM on a GPU: configurations, huge strides, streams, graphs, devices."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from gemm_helpers import assert_product, inputs, normal, residual_of, same_bits
from helpers import BF16, FP16, run_child
from memory_helpers import gibibytes
from skinny_helpers import DTYPES, TOKENS, op, run_and_check
from stream_helpers import SLEEP_CYCLES, STREAM_FORMS, captured

import k3cupy
from k3cupy.ops.skinny_gemm_choice import candidates
from k3cupy.runtime import devices, instances

pytestmark = pytest.mark.gpu

ROUNDS = 100
BASE = k3cupy.SkinnyGemmConfig(1, 64, 2, 2, 8)
VARIANT = k3cupy.SkinnyGemmVariant


# Configurations


def load(
    configs: Iterable[k3cupy.SkinnyGemmConfig], *variants: k3cupy.SkinnyGemmVariant
) -> list[k3cupy.SkinnyGemmConfig]:
    """Compile on threads what a test will run one by one."""
    found = [config for config in configs if config.is_valid()]
    wanted = [config.instance(variant) for config in found for variant in variants]
    instances.load_all(wanted, torch.cuda.current_device())
    return found


@pytest.mark.parametrize("tokens", TOKENS)
def test_every_number_of_rows_and_outputs(tokens: int) -> None:
    """All ways in which a warp's sums are shared out; N is no multiple of most of them."""
    static = VARIANT(has_residual=True, weight_is_static=True)
    drafts = (k3cupy.SkinnyGemmConfig(tokens, 64, outputs, 1, 8) for outputs in range(1, 9))
    configs = load(drafts, VARIANT(), static)
    assert len(configs) == 8
    for config in configs:
        x, weight = inputs(tokens, 51, 520, "cuda", seed=config.outputs_per_block)
        run_and_check(x, weight, config=config)
        residual = residual_of(tokens, 51, "cuda")
        run_and_check(x, weight, residual=residual, config=config, weight_is_static=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("block_size", [32, 96, 224, 512])
def test_blocks_rounds_and_widths(block_size: int, dtype: torch.dtype) -> None:
    """Where K fills no round, one, and several, and ends inside one."""
    name = str(dtype)[6:]
    settings = itertools.product((1, 3), (block_size,), (3,), (1, 2, 4), (4, 8))
    drafts = itertools.starmap(k3cupy.SkinnyGemmConfig, settings)
    for config in load(drafts, VARIANT(name), VARIANT(name, weight_is_static=True)):
        whole = block_size * config.k_unroll * config.vector_width
        for k in (8, whole, whole - 8, whole + 8, 3 * whole + 40):
            x, weight = inputs(config.num_rows, 20, k, "cuda", seed=k, dtype=dtype)
            for static in (False, True):
                run_and_check(x, weight, config=config, weight_is_static=static)


@pytest.mark.parametrize("tokens", TOKENS)
def test_candidates_of_some_shapes(tokens: int) -> None:
    """What a tuner may measure is right, not only what is chosen."""
    gpu = devices.info(torch.cuda.current_device())
    for n, k in ((1536, 128), (2112, 7168), (333, 4224), (100, 1544)):
        x, weight = normal((tokens, k), 1, "cuda"), normal((n, k), 2, "cuda")
        residual = residual_of(tokens, n, "cuda")
        static = VARIANT(has_residual=True, weight_is_static=True)
        for config in load(candidates(n, k, tokens, gpu), static):
            out = op(x, weight, residual, config=config, weight_is_static=True)
            assert_product(out, x, weight, residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("width", [4, 8])
def test_a_row_has_the_same_bits_for_every_number_of_rows(width: int, dtype: torch.dtype) -> None:
    """With equal block size and width; neither outputs a block nor the unrolling matter."""
    variant = VARIANT(str(dtype)[6:], has_residual=True)
    cuts = ((1, 2), (2, 1), (3, 3), (6, 1))
    for block_size, k in ((32, 136), (64, 2048), (224, 7168)):
        x, weight = inputs(8, 77, k, "cuda", dtype=dtype)
        residual = residual_of(8, 77, "cuda", dtype=dtype)
        one = k3cupy.SkinnyGemmConfig(1, block_size, 2, 1, width)
        rows = zip(x.split(1), residual.split(1), strict=True)
        alone = torch.cat([op(row, weight, added, config=one) for row, added in rows])
        drafts = (
            k3cupy.SkinnyGemmConfig(tokens, block_size, outputs, unroll, width)
            for tokens, (outputs, unroll) in itertools.product(TOKENS, cuts)
        )
        for config in load(drafts, variant):
            assert config.order == one.order
            some = slice(8 - config.num_rows, 8)
            out = op(x[some], weight, residual[some], config=config)
            same_bits(out, alone[some], str(config))


def test_a_configuration_of_the_caller_is_the_one_that_runs() -> None:
    x, weight = inputs(1, 48, 256, "cuda")
    decision = k3cupy.explain_skinny_gemm(x, weight, config=BASE, weight_is_static=True)
    assert decision.config == BASE
    assert decision.reason == "the caller named the configuration"
    variant = VARIANT("bfloat16", True, False, True)
    assert decision.name_expression == BASE.name_expression(variant)
    assert decision.pdl == devices.info(0).has_pdl
    assert not k3cupy.explain_skinny_gemm(x, weight, pdl=False).pdl


def test_as_many_blocks_fit_as_the_choice_counts_on() -> None:
    for config in (BASE, k3cupy.SkinnyGemmConfig(1, 224, 2, 4, 8)):
        loaded = instances.load(config.instance(VARIANT()), 0)
        assert loaded.local_bytes == 0
        assert loaded.registers <= config.registers


def test_pdl_and_the_promise_do_not_change_the_bits() -> None:
    x, weight = inputs(5, 528, 2048, "cuda")
    residual = residual_of(5, 528, "cuda")
    want = op(x, weight, residual, pdl=False)
    for pdl in (None, False, True):
        for static in (False, True):
            same_bits(op(x, weight, residual, pdl=pdl, weight_is_static=static), want)


# Huge strides and sizes


@gibibytes(5)
@pytest.mark.parametrize("off", [8, 1], ids=["aligned", "element-wise"])
def test_rows_more_than_2_31_bytes_apart(off: int, needs_memory: None) -> None:
    far = 2**30 + off
    buffer = torch.zeros(far + 4096, dtype=BF16, device="cuda")
    x, weight = inputs(2, 48, 128, "cuda")
    values = residual_of(2, 48, "cuda")
    want = op(x, weight, values)
    wide = buffer.as_strided((2, 128), (far, 1))
    residual = buffer.as_strided((2, 48), (far, 1), 512)
    out = buffer.as_strided((2, 48), (far, 1), 256)
    wide.copy_(x)
    residual.copy_(values)
    same_bits(op(wide, weight, residual), want)
    same_bits(op(wide, weight, residual, out), want)
    same_bits(wide, x)
    same_bits(residual, values)
    for tensor in (out, residual, wide):
        tensor.zero_()
    assert torch.count_nonzero(buffer) == 0, "bytes outside the rows were written"


@gibibytes(6)
def test_a_weight_of_more_than_2_31_elements(needs_memory: None) -> None:
    n, k = 131_080, 16_384
    weight = torch.zeros(n, k, dtype=BF16, device="cuda")
    assert weight.numel() > 2**31
    x = normal((3, k), 1, "cuda")
    rows = [0, 65_535, 131_071, n - 1]
    weight[rows] = normal((len(rows), k), 2, "cuda")
    out = op(x, weight)
    assert_product(out[:, rows].contiguous(), x, weight[rows])
    out[:, rows] = 0
    assert torch.count_nonzero(out) == 0


def test_more_outputs_than_a_grid_has_rows() -> None:
    x, weight = inputs(2, 200_001, 8, "cuda")
    run_and_check(x, weight, config=k3cupy.SkinnyGemmConfig(2, 32, 1, 1, 8))


# Streams


def test_case17_current_stream_is_used_without_any_synchronisation() -> None:
    """Sleep, write the input, call, read: all on a side stream, nothing waits on the host."""
    x, weight = inputs(8, 528, 1536, "cuda")
    values = [normal((8, 1536), 100 + i, "cuda") for i in range(ROUNDS)]
    wants = [op(value, weight) for value in values]
    torch.cuda.synchronize()
    seen = []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for value in values:
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(value)
            seen.append(op(x, weight).clone())
    torch.cuda.synchronize()
    for i, (got, want) in enumerate(zip(seen, wants, strict=True)):
        same_bits(got, want, f"round {i}")


@pytest.mark.parametrize("give", STREAM_FORMS)
def test_case17_explicit_stream(give: Callable[[torch.cuda.Stream], Any]) -> None:
    x, weight = inputs(8, 528, 1536, "cuda")
    residual = residual_of(8, 528, "cuda")
    side = torch.cuda.Stream()
    stream = give(side)
    for i in range(10):
        value, added = normal((8, 1536), i, "cuda"), residual_of(8, 528, "cuda", seed=i)
        want = op(value, weight, added)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(value)
            residual.copy_(added)
        out = op(x, weight, residual, stream=stream)
        side.synchronize()
        same_bits(out, want)


@pytest.mark.parametrize("handle", [0, 1, 2], ids=["default", "legacy", "per-thread"])
def test_case17_special_stream_handles(handle: int) -> None:
    x, weight = inputs(8, 48, 128, "cuda")
    torch.cuda.synchronize()
    out = op(x, weight, stream=handle)
    torch.cuda.synchronize()
    assert_product(out, x, weight)


def test_case17_cupy_stream() -> None:
    cupy = pytest.importorskip("cupy")
    from array_helpers import cupy_of

    x, weight = inputs(8, 48, 1536, "cuda")
    arrays = [cupy_of(x), cupy_of(weight)]
    values = [normal((8, 1536), i, "cuda") for i in range(20)]
    wants = [op(value, weight) for value in values]
    seen = []
    torch.cuda.synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        for value in values:
            with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
                torch.cuda._sleep(SLEEP_CYCLES)
                x.copy_(value)
            seen.append(op(*arrays))
    side.synchronize()
    for got, want in zip(seen, wants, strict=True):
        same_bits(torch.from_dlpack(got.view(cupy.int16)).view(BF16), want)


def test_case29_inputs_dropped_right_after_a_call_on_an_explicit_stream() -> None:
    x, weight = inputs(8, 528, 1536, "cuda")
    residual = residual_of(8, 528, "cuda")
    want = op(x, weight, residual)
    side = torch.cuda.Stream()
    for _ in range(10):
        three = [tensor.clone() for tensor in (x, weight, residual)]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20 * SLEEP_CYCLES)
        out = op(*three, stream=side.cuda_stream)
        shapes = [tensor.shape for tensor in three]
        del three
        reused = [torch.full(shape, float("nan"), dtype=BF16, device="cuda") for shape in shapes]
        torch.cuda.synchronize()
        same_bits(out, want)
        del reused


def test_threads_that_share_a_cold_kernel() -> None:
    config = replace(BASE, block_size=160, outputs_per_block=5)
    x, weight = inputs(1, 96, 1024, "cuda")
    torch.cuda.synchronize()

    def work(_: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            out = op(x, weight, config=config)
            torch.cuda.current_stream().synchronize()
            return out

    with ThreadPoolExecutor(8) as pool:
        for out in pool.map(work, range(32)):
            assert_product(out, x, weight)


# Graphs


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_graph_replay_sees_new_inputs(tokens: int, dtype: torch.dtype) -> None:
    x, weight = inputs(tokens, 528, 1536, "cuda", strides=(2112, 1), dtype=dtype)
    residual = residual_of(tokens, 528, "cuda", dtype=dtype)
    op(x, weight, residual)
    graph, out = captured(lambda: op(x, weight, residual))
    for seed in range(5):
        x.copy_(normal(x.shape, seed, "cuda"))
        weight.copy_(normal(weight.shape, 50 + seed, "cuda"))
        residual.copy_(normal(residual.shape, 90 + seed, "cuda"))
        out.fill_(float("nan"))
        graph.replay()
        assert_product(out, x, weight, residual)


def test_case15_no_tokens_in_a_graph() -> None:
    x, weight = inputs(0, 48, 128, "cuda")
    nothing = torch.zeros(1, device="cuda")

    def run() -> Any:
        nothing.add_(1)
        return op(x, weight)

    graph, out = captured(run)
    graph.replay()
    assert out.shape == (0, 48)


def _captures_from_cold() -> None:
    x, weight = inputs(4, 528, 1536, "cuda", dtype=FP16)
    residual = residual_of(4, 528, "cuda", dtype=FP16)
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
        with pytest.raises(k3cupy.CaptureError, match="warmup"):
            op(x, weight)
    torch.cuda.synchronize()
    count = k3cupy.warmup(
        "skinny_gemm",
        dtype="float16",
        shapes=[(528, 1536)],
        tokens=[4],
        residual=[False, True],
        progress=False,
    )
    assert count == 2
    graph, out = captured(lambda: op(x, weight))
    graph.replay()
    assert_product(out, x, weight)
    graph, out = captured(lambda: op(x, weight, residual))
    graph.replay()
    assert_product(out, x, weight, residual)


def test_case18_capture_from_cold_and_after_warmup() -> None:
    run_child(_captures_from_cold)


# Devices

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_the_current_device_stays() -> None:
    before = torch.cuda.current_device()
    x, weight = inputs(4, 48, 128, "cuda")
    run_and_check(x, weight)
    with pytest.raises(ValueError, match="weight"):
        op(x, weight[:, :112])
    assert torch.cuda.current_device() == before


@two_gpus
def test_case19_tensors_on_a_device_that_is_not_current() -> None:
    pairs = [[t.to(f"cuda:{i}") for t in inputs(7, 48, 1536)] for i in (1, 0)]
    with torch.cuda.device(0):
        for _ in range(25):
            for x, weight in pairs:
                out = op(x, weight)
                assert out.device == x.device
                assert_product(out, x, weight)
                assert torch.cuda.current_device() == 0


@two_gpus
def test_case19_two_threads_on_two_devices() -> None:
    def work(index: int) -> None:
        for seed in range(25):
            x, weight = (t.to(f"cuda:{index}") for t in inputs(7, 48, 1536, seed=seed))
            assert_product(op(x, weight), x, weight)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
