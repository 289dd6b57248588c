"""The fused-A GEMM on a GPU: configurations, huge strides, streams, graphs, devices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from gemm_helpers import assert_product, inputs, normal, op, run_and_check, same_bits, transposed_op
from helpers import BF16, run_child
from memory_helpers import gibibytes
from stream_helpers import SLEEP_CYCLES, STREAM_FORMS, captured

import k3cupy
from k3cupy.runtime import devices, instances

pytestmark = pytest.mark.gpu

ROUNDS = 100
BASE = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)


# Configurations


def assert_configs_agree(configs: list[k3cupy.FusedAGemmConfig], tokens: int, n: int) -> None:
    """Right, and with the same bits, where the columns end inside a stage, too."""
    assert all(config.is_valid() for config in configs)
    gpu = devices.info(torch.cuda.current_device())
    for k in (16, 80, 2064):
        x, weight = inputs(tokens, n, k, "cuda", strides=(k + 8, 1))
        fitting = [config for config in configs if config.is_valid(gpu)]
        results = [run_and_check(x, weight, config=config) for config in fitting]
        for result in results[1:]:
            same_bits(result, results[0])


def test_configurations_of_one_order_give_the_same_bits() -> None:
    changes = [
        {},
        {"tile_m": 32},
        {"tile_m": 64},
        {"tile_n": 16},
        {"tile_n": 64},
        {"tile_k": 64},
        {"tile_k": 256, "stages": 2},
        {"stages": 7, "stages_x": 5},
        {"warps_n": 2},
        {"copy_warps": 1},
        {"copy_warps": 4},
        {"block_rows": 1},
        {"block_rows": 27},
        {"tile_n": 64, "block_rows": 35},
    ]
    assert_configs_agree([replace(BASE, **change) for change in changes], 9, 100)


@pytest.mark.parametrize("split", [2, 4, 8])
def test_clusters(split: int) -> None:
    """Blocks that share the columns, also where there are fewer columns than blocks."""
    clustered = replace(BASE, split_k=split)
    wide = replace(clustered, tile_m=64, tile_n=64)
    fewer = [replace(wide, block_rows=rows) for rows in (5, 35)]
    assert_configs_agree([clustered, wide, *fewer], 13, 100)


def test_a_configuration_of_the_caller_is_the_one_that_runs() -> None:
    x, weight = inputs(9, 48, 256, "cuda")
    decision = k3cupy.explain_fused_a_gemm(x, weight, config=BASE, weight_is_static=True)
    assert decision.config == BASE
    assert decision.reason == "the caller named the configuration"
    variant = k3cupy.FusedAGemmVariant(True, True, True)
    assert decision.name_expression == BASE.name_expression(variant)
    assert decision.pdl == devices.info(0).has_pdl
    assert not k3cupy.explain_fused_a_gemm(x, weight, pdl=False).pdl


def test_more_than_48_kib_of_shared_memory_in_any_order() -> None:
    """A smaller need after a larger one leaves the limit of the function alone."""
    x, weight = inputs(9, 48, 1024, "cuda")
    deep = replace(BASE, stages=8)
    assert deep.shared_bytes > 49_152
    for config in (BASE, deep, BASE, deep):
        run_and_check(x, weight, config=config)
    loaded = instances.load(deep.instance(k3cupy.FusedAGemmVariant()), 0)
    limit = loaded.function.max_dynamic_shared_size_bytes
    assert limit >= deep.shared_bytes
    loaded.allow_shared_memory(1024)
    assert loaded.function.max_dynamic_shared_size_bytes == limit


def test_pdl_and_the_promise_do_not_change_the_bits() -> None:
    x, weight = inputs(9, 528, 2048, "cuda")
    want = op(x, weight, pdl=False)
    for pdl in (None, False, True):
        for static in (False, True):
            same_bits(op(x, weight, pdl=pdl, weight_is_static=static), want)


# Huge strides


@gibibytes(5)
@pytest.mark.parametrize("off", [8, 1], ids=["aligned", "element-wise"])
def test_rows_more_than_2_31_bytes_apart(off: int, needs_memory: None) -> None:
    far = 2**30 + off
    buffer = torch.zeros(far + 4096, dtype=BF16, device="cuda")
    x, weight = inputs(2, 48, 128, "cuda")
    wide = buffer.as_strided((2, 128), (far, 1))
    wide.copy_(x)
    same_bits(op(wide, weight), op(x, weight))
    out = buffer.as_strided((2, 48), (far, 1), 256)
    same_bits(op(wide, weight, out), op(x, weight))
    same_bits(wide, x)
    out.zero_()
    wide.zero_()
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


# Streams


def test_case17_current_stream_is_used_without_any_synchronisation() -> None:
    """Sleep, write the input, call, read: all on a side stream, nothing waits on the host."""
    x, weight = inputs(16, 528, 1536, "cuda")
    values = [normal((16, 1536), 100 + i, "cuda") for i in range(ROUNDS)]
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
    x, weight = inputs(16, 528, 1536, "cuda")
    side = torch.cuda.Stream()
    stream = give(side)
    for i in range(10):
        value = normal((16, 1536), i, "cuda")
        want = op(value, weight)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(value)
        out = op(x, weight, stream=stream)
        side.synchronize()
        same_bits(out, want)


@pytest.mark.parametrize("handle", [0, 1, 2], ids=["default", "legacy", "per-thread"])
def test_case17_special_stream_handles(handle: int) -> None:
    x, weight = inputs(16, 48, 128, "cuda")
    torch.cuda.synchronize()
    out = op(x, weight, stream=handle)
    torch.cuda.synchronize()
    assert_product(out, x, weight)


def test_case17_cupy_stream() -> None:
    cupy = pytest.importorskip("cupy")
    from array_helpers import cupy_of

    x, weight = inputs(16, 48, 1536, "cuda")
    arrays = [cupy_of(x), cupy_of(weight)]
    values = [normal((16, 1536), i, "cuda") for i in range(20)]
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
    x, weight = inputs(64, 528, 1536, "cuda")
    want = op(x, weight)
    side = torch.cuda.Stream()
    for _ in range(10):
        pair = [x.clone(), weight.clone()]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20 * SLEEP_CYCLES)
        out = op(*pair, stream=side.cuda_stream)
        shapes = [tensor.shape for tensor in pair]
        del pair
        reused = [torch.full(shape, float("nan"), dtype=BF16, device="cuda") for shape in shapes]
        torch.cuda.synchronize()
        same_bits(out, want)
        del reused


def test_threads_that_share_a_cold_kernel() -> None:
    """Shared memory above the default limit: no thread launches before the limit is raised."""
    config = replace(BASE, stages=9, tile_n=48)
    x, weight = inputs(9, 96, 1024, "cuda")
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


@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_graph_replay_sees_new_inputs(tokens: int) -> None:
    x, weight = inputs(tokens, 528, 1536, "cuda", strides=(2112, 1))
    op(x, weight)
    graph, out = captured(lambda: op(x, weight))
    for seed in range(5):
        x.copy_(normal(x.shape, seed, "cuda"))
        weight.copy_(normal(weight.shape, 50 + seed, "cuda"))
        out.fill_(float("nan"))
        graph.replay()
        assert_product(out, x, weight)


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
    x, weight = inputs(16, 528, 1536, "cuda")
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
        with pytest.raises(k3cupy.CaptureError, match="warmup"):
            op(x, weight)
    torch.cuda.synchronize()
    static = k3cupy.explain_fused_a_gemm(x, weight, weight_is_static=True)
    count = k3cupy.warmup(
        "fused_a_gemm",
        shapes=[(528, 1536)],
        tokens=[16],
        strided=False,
        weight_is_static=[False, True],
        progress=False,
    )
    assert count == 2
    graph, out = captured(lambda: op(x, weight))
    graph.replay()
    assert_product(out, x, weight)
    target = torch.empty_like(out)
    graph, _ = captured(lambda: transposed_op(x, weight.T, target, True))
    graph.replay()
    same_bits(target, out)
    assert instances.is_loaded(
        static.config.instance(k3cupy.FusedAGemmVariant(True, True, True)), 0
    )


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
    pairs = [[t.to(f"cuda:{i}") for t in inputs(9, 48, 1536)] for i in (1, 0)]
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
            x, weight = (t.to(f"cuda:{index}") for t in inputs(9, 48, 1536, seed=seed))
            assert_product(op(x, weight), x, weight)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
