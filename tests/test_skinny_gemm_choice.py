"""Configurations of the skinny GEMM: what is valid, what is worth measuring, what is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_device import H200
from gemm_helpers import SKINNY, taken_for
from hypothesis import given, settings
from hypothesis import strategies as st

import k3cupy
from k3cupy import projections
from k3cupy.choose.skinny_gemm import candidates, estimate_us
from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig, Variant
from k3cupy.runtime.devices import DeviceInfo

SHAPES = [(p.n, p.k) for p in projections.shapes()]
ODD = [(1, 8), (3, 16), (7, 80), (1, 20_000), (100_000, 8), (257, 104), (5, 1 << 20)]
FUSED_QKV_A = (2112, 7168)
GPUS = [
    H200,
    DeviceInfo(0, "small", (8, 6), 16, 101_376),
    DeviceInfo(0, "large", (10, 3), 160, 232_448),
]


@given(st.sampled_from(SHAPES + ODD), st.integers(1, 8), st.sampled_from(GPUS))
@settings(max_examples=300)
def test_every_choice_is_valid_and_for_these_rows(
    shape: tuple[int, int], tokens: int, gpu: DeviceInfo
) -> None:
    choice = SKINNY.chosen(shape, tokens, gpu)
    assert choice.config.is_valid(gpu)
    assert choice.config.num_rows == tokens
    assert choice.reason
    found = candidates(*shape, tokens, gpu)
    assert 1 <= len(found) <= 16
    assert len(set(found)) == len(found)
    assert all(c.is_valid(gpu) and c.num_rows == tokens for c in found)
    times = [estimate_us(c, *shape, gpu) for c in found]
    assert times == sorted(times)
    assert times[0] > 0


def test_candidates_differ_and_hold_public_settings() -> None:
    """Not sixteen of one kind: a measurement finds what the model does not know."""
    for n, k in SHAPES:
        for tokens in range(1, 9):
            found = candidates(n, k, tokens, H200)
            if k < 768:
                assert 8 <= len(found) <= 16
                continue
            assert len(found) == 16
            assert len({c.block_size for c in found}) >= 3, f"{n} x {k}, M = {tokens}"
            assert len({c.outputs_per_block for c in found}) >= 3, f"{n} x {k}, M = {tokens}"
    settings = [
        (c.block_size, c.outputs_per_block, c.k_unroll) for c in candidates(*FUSED_QKV_A, 1, H200)
    ]
    assert (224, 2, 4) in settings, "it covers K = 7168 with one round"
    assert {(224, 4, 2), (128, 4, 2)} <= set(settings), "public ones that the model puts behind"


def test_little_work_gets_few_threads() -> None:
    """K = 128 has 16 vectors of 8 values: a second warp would have nothing to do."""
    for tokens in range(1, 9):
        assert SKINNY.chosen((1536, 128), tokens).config.block_size == 32


def test_a_configuration_in_words() -> None:
    config = SkinnyGemmConfig(1, 224, 2, 4, 8)
    assert str(config) == "1 row, 224 threads, 2 outputs a block, 4 x 128 bits in flight"
    other = SkinnyGemmConfig(8, 32, 1, 1, 4)
    assert str(other) == "8 rows, 32 threads, 1 output a block, 1 x 64 bits in flight"
    assert k3cupy.SkinnyGemmConfig is SkinnyGemmConfig


def test_the_name_of_an_instance() -> None:
    config = SkinnyGemmConfig(1, 224, 2, 4, 8)
    assert config.blocks_per_sm == 4
    assert config.name_expression(Variant(weight_is_static=True)) == (
        "k3cupy::skinny_gemm<__nv_bfloat16, 1, 224, 2, 4, 8, 4, true, false, true>"
    )
    assert config.name_expression(Variant("float16", False, True)) == (
        "k3cupy::skinny_gemm<__half, 1, 224, 2, 4, 8, 1, false, true, false>"
    )


def test_orders_that_give_equal_bits() -> None:
    config = SkinnyGemmConfig(1, 224, 2, 4, 8)
    for change in ({"num_rows": 3}, {"outputs_per_block": 3}, {"k_unroll": 1}):
        assert replace(config, **change).order == config.order
    for change in ({"block_size": 128}, {"vector_width": 4}):
        assert replace(config, **change).order != config.order


@pytest.mark.parametrize(
    "change",
    [
        {"num_rows": 0},
        {"num_rows": 9},
        {"block_size": 0},
        {"block_size": 48},
        {"block_size": 1056},
        {"outputs_per_block": 0},
        {"outputs_per_block": 225},
        {"k_unroll": 0},
        {"vector_width": 2},
        {"vector_width": 16},
        {"k_unroll": 32},
        {"block_size": 1024, "outputs_per_block": 8},
    ],
    ids=str,
)
def test_what_is_not_valid(change: dict[str, int]) -> None:
    config = SkinnyGemmConfig(1, 224, 2, 4, 8)
    assert config.is_valid()
    assert not replace(config, **change).is_valid()


def test_the_model_knows_what_costs() -> None:
    """Bytes in flight, whole rounds, few blocks' ends, and enough warps are worth something."""
    n, k = FUSED_QKV_A
    best = SkinnyGemmConfig(1, 224, 4, 2, 8)
    for worse in (
        replace(best, block_size=32, outputs_per_block=1, k_unroll=1),
        replace(best, block_size=64, outputs_per_block=8, k_unroll=4),
        replace(best, num_rows=8),
    ):
        assert estimate_us(worse, n, k, H200) > estimate_us(best, n, k, H200), worse
    assert estimate_us(best, n, k, replace(H200, num_sms=66)) > 1.5 * estimate_us(best, n, k, H200)


def test_times_of_bfloat16_are_not_told_as_those_of_float16() -> None:
    n, k = FUSED_QKV_A
    with taken_for(H200):
        of, with_fp16 = (
            k3cupy.explain_skinny_gemm(torch.empty(2, k, dtype=d), torch.empty(n, k, dtype=d))
            for d in (torch.bfloat16, torch.float16)
        )
    assert of.reason.startswith("measured on NVIDIA H200 at M = 2: ")
    assert with_fp16.reason == f"{of.reason}, with bfloat16"
    assert (with_fp16.config, with_fp16.origin) == (of.config, of.origin)
