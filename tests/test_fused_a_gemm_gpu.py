"""The fused-A GEMM on a GPU: configurations, and graphs that are captured from cold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gemm_helpers import assert_product, inputs, op, run_and_check, same_bits, transposed_op
from helpers import BF16, run_child
from stream_helpers import assert_capture_asks_for_a_warmup, captured
from test_every_kernel_gpu import FUSED_A

import k3cupy
from k3cupy.kernels import fused_a_gemm
from k3cupy.runtime import devices, instances

pytestmark = pytest.mark.gpu

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
    variant = fused_a_gemm.Variant(True, True)
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
    loaded = instances.load(deep.instance(fused_a_gemm.Variant()), 0)
    limit = loaded.function.max_dynamic_shared_size_bytes
    assert limit >= deep.shared_bytes
    loaded.allow_shared_memory(1024)
    assert loaded.function.max_dynamic_shared_size_bytes == limit


# Subnormal numbers


def subnormal_cases(tokens: int, n: int, k: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """x, weight and residual, exact in bf16, whose sums are exact in fp32, all below 2^-126."""
    x, weight, residual = torch.zeros(tokens, k), torch.zeros(n, k), torch.zeros(tokens, n)
    yield x, weight, residual + 5.5e-40
    for column in (0, k // 2 + 3, k - 1):
        one = x.clone(), weight.clone()
        for matrix in one:
            matrix[:, column] = 2.0**-65
        yield *one, residual
        yield *one, residual - 2.0**-132
    yield x + 2.0**-133, weight + 2.0**-4, residual
    yield x + 2.0**-70, weight + 2.0**-68, residual
    x[:, 0] = x[:, -1] = 2.0**-60
    weight[:, 0], weight[:, -1] = 2.0**-60, -(2.0**-60) * (1 - 2**-7)
    yield x, weight, residual


@pytest.mark.parametrize("name", FUSED_A)
def test_case47_no_form_flushes(name: str) -> None:
    """Neither the tensor cores nor the sums of warps and blocks nor the residual."""
    config = FUSED_A[name]
    for row, case in enumerate(subnormal_cases(5, 48, 1104)):
        x, weight, residual = (t.to(BF16) for t in case)
        want = (x.double() @ weight.double().T + residual.double()).to(BF16)
        assert 0 < want.double().abs().min() <= want.double().abs().max() < 2**-126
        x, weight, residual = (t.cuda() for t in (x, weight, residual))
        same_bits(op(x, weight, residual, config=config), want, f"case {row}")
        if not residual.any():
            same_bits(op(x, weight, config=config), want, f"case {row} without a residual")


# Graphs


def _captures_from_cold() -> None:
    x, weight = inputs(16, 528, 1536, "cuda")
    assert_capture_asks_for_a_warmup(lambda: op(x, weight))
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
    assert instances.is_loaded(static.config.instance(fused_a_gemm.Variant(True, True)), 0)


def test_case18_capture_from_cold_and_after_warmup() -> None:
    run_child(_captures_from_cold)
