"""The skinny GEMM on a GPU: configurations, and graphs that are captured from cold."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable

import pytest
import torch
from gemm_helpers import assert_product, inputs, normal, residual_of, same_bits
from helpers import FP16, run_child
from memory_helpers import before_unmapped_gpu_memory
from skinny_helpers import DTYPES, TOKENS, op, run_and_check
from stream_helpers import assert_capture_asks_for_a_warmup, captured

import k3cupy
from k3cupy.choose.skinny_gemm import candidates
from k3cupy.kernels import skinny_gemm
from k3cupy.runtime import devices, instances

pytestmark = pytest.mark.gpu

BASE = k3cupy.SkinnyGemmConfig(1, 64, 2, 2, 8)
VARIANT = skinny_gemm.Variant


# Configurations


def load(
    configs: Iterable[k3cupy.SkinnyGemmConfig], *variants: skinny_gemm.Variant
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


@pytest.mark.parametrize("tokens", [*TOKENS, 12, 16])
def test_candidates_of_some_shapes(tokens: int) -> None:
    """What a tuner may measure is right, not only what is chosen."""
    gpu = devices.info(torch.cuda.current_device())
    for n, k in ((1536, 128), (2112, 7168), (333, 4224), (100, 1544)):
        x, weight = normal((tokens, k), 1, "cuda"), normal((n, k), 2, "cuda")
        residual = residual_of(tokens, n, "cuda")
        static = VARIANT(has_residual=True, weight_is_static=True, k=k)
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
        assert loaded.function.local_size_bytes == 0
        assert loaded.function.num_regs <= config.registers


# Sizes, and the ends of allocations


def test_more_outputs_than_a_grid_has_rows() -> None:
    x, weight = inputs(2, 200_001, 8, "cuda")
    run_and_check(x, weight, config=k3cupy.SkinnyGemmConfig(2, 32, 1, 1, 8))


def _reads_nothing_past_device_memory() -> None:
    """In a child: a stray read is a fault."""
    for tokens, n, k in ((1, 48, 128), (3, 7, 80), (8, 33, 1544), (5, 1, 8), (2, 5, 24)):
        tensors = (*inputs(tokens, n, k), residual_of(tokens, n))
        three = [before_unmapped_gpu_memory(t.cuda()) for t in tensors]
        for block_size, outputs, unroll, width in ((32, 3, 4, 8), (128, 2, 1, 4), (256, 8, 2, 8)):
            config = k3cupy.SkinnyGemmConfig(tokens, block_size, outputs, unroll, width)
            for static in (False, True):
                out = op(*three, config=config, weight_is_static=static)
                assert_product(out, *three)
    torch.cuda.synchronize()
    os._exit(0)


def test_configurations_read_nothing_past_device_memory() -> None:
    run_child(_reads_nothing_past_device_memory)


# Graphs


def _captures_from_cold() -> None:
    x, weight = inputs(4, 528, 1536, "cuda", dtype=FP16)
    residual = residual_of(4, 528, "cuda", dtype=FP16)
    assert_capture_asks_for_a_warmup(lambda: op(x, weight))
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
