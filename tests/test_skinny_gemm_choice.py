"""Configurations of the skinny GEMM: what is valid, what is worth measuring, what is chosen."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_device import H200
from gemm_helpers import SKINNY, taken_for
from hypothesis import given, settings
from hypothesis import strategies as st

import k3cupy
from k3cupy import projections
from k3cupy.choose.gemm import fits
from k3cupy.choose.skinny_gemm import candidates, estimate_mma_us, estimate_us
from k3cupy.choose.table import config_of, key_of
from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig, Variant
from k3cupy.runtime.devices import DeviceInfo

SHAPES = [(p.n, p.k) for p in projections.shapes()]
ODD = [(1, 8), (3, 16), (7, 80), (1, 20_000), (100_000, 8), (257, 104), (5, 1 << 20)]
FUSED_QKV_A = (2112, 7168)
MMA = SkinnyGemmConfig(4, 448, 16, 4, 8, "mma")
GPUS = [
    H200,
    DeviceInfo(0, "small", (8, 6), 16, 101_376),
    DeviceInfo(0, "large", (10, 3), 160, 232_448),
]


@given(st.sampled_from(SHAPES + ODD), st.integers(1, 16), st.sampled_from(GPUS))
@settings(max_examples=150)
def test_every_choice_is_valid_and_for_these_rows(
    shape: tuple[int, int], tokens: int, gpu: DeviceInfo
) -> None:
    choice = SKINNY.chosen(shape, tokens, gpu)
    assert choice.config.is_valid(gpu)
    assert choice.config.num_rows == tokens
    assert choice.reason
    found = candidates(*shape, tokens, gpu)
    assert len(set(found)) == len(found)
    assert all(c.is_valid(gpu) and c.num_rows == tokens for c in found)
    forms = [[c for c in found if c.is_mma is is_mma] for is_mma in (True, False)]
    assert list(found) == [*itertools.chain(*(forms if tokens > 2 else reversed(forms)))]
    for of_form, model in zip(forms, (estimate_mma_us, estimate_us), strict=True):
        assert (1 if model is estimate_mma_us or tokens <= 8 else 0) <= len(of_form) <= 16
        times = [model(c, *shape, gpu) for c in of_form]
        assert times == sorted(times)
        assert all(time > 0 for time in times)


def test_candidates_differ_and_hold_public_settings() -> None:
    """Not sixteen of one kind: a measurement finds what the model does not know."""
    for n, k in SHAPES:
        for tokens in range(1, 9):
            found = [c for c in candidates(n, k, tokens, H200) if not c.is_mma]
            most = {1: 16, 2: 16, 3: 12, 4: 12}.get(tokens, 4)
            if k < 768:
                assert most // 2 <= len(found) <= most
                continue
            assert len(found) == most
            if most < 12:
                continue
            assert len({c.block_size for c in found}) >= 3, f"{n} x {k}, M = {tokens}"
            assert len({c.outputs_per_block for c in found}) >= 2, f"{n} x {k}, M = {tokens}"
    settings = [
        (c.block_size, c.outputs_per_block, c.k_unroll) for c in candidates(*FUSED_QKV_A, 1, H200)
    ]
    assert (224, 2, 4) in settings, "it covers K = 7168 with one round"
    assert {(224, 4, 2), (128, 4, 2)} <= set(settings), "public ones that the model puts behind"


def test_candidates_with_tensor_cores_differ() -> None:
    """Those of a tile, whatever its number of tokens; clusters only where there are any."""
    for n, k in SHAPES:
        few, many = ([c for c in candidates(n, k, m, H200) if c.is_mma] for m in (2, 16))
        assert len(few) == len(many) == 16
        assert [replace(c, num_rows=8) for c in few] == [
            c for c in candidates(n, k, 8, H200) if c.is_mma
        ]
        if min(n, k) >= 768:  # a narrow weight is cut into as many blocks as there are
            assert len({c.block_size for c in few}) >= 4, f"{n} x {k}"
            assert len({c.outputs_per_block for c in few}) >= 3, f"{n} x {k}"
    assert any(c.split_k > 1 for c in candidates(*FUSED_QKV_A, 4, H200))
    assert all(c.split_k == 1 for c in candidates(*FUSED_QKV_A, 4, GPUS[1]))


def test_little_work_gets_few_threads() -> None:
    """K = 128 has 16 vectors of 8 values: a second warp would have nothing to do."""
    for tokens in range(1, 9):
        dots = [c for c in candidates(1536, 128, tokens, H200) if not c.is_mma]
        assert dots[0].block_size == 32
    for tokens in range(1, 17):
        tiles = [c for c in candidates(1536, 128, tokens, H200) if c.is_mma]
        assert max(c.block_size * c.split_k for c in tiles) <= 256, "K = 128 has four steps"


def test_a_configuration_in_words() -> None:
    config = SkinnyGemmConfig(1, 224, 2, 4, 8)
    assert str(config) == "1 row, 224 threads, 2 outputs a block, 4 x 128 bits in flight"
    other = SkinnyGemmConfig(8, 32, 1, 1, 4)
    assert str(other) == "8 rows, 32 threads, 1 output a block, 1 x 64 bits in flight"
    assert k3cupy.SkinnyGemmConfig is SkinnyGemmConfig
    assert str(MMA) == (
        "4 rows, 448 threads, 16 outputs a block, 4 x 128 bits in flight, tensor cores, split 1"
    )


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
    for change in ({"num_rows": 16}, {"outputs_per_block": 9}, {"k_unroll": 1}):
        assert replace(MMA, **change).order == MMA.order
    for change in ({"block_size": 224}, {"split_k": 2}, {"product": "fma"}):
        assert replace(MMA, **change).order != MMA.order


@pytest.mark.parametrize(
    "change",
    [
        {"num_rows": 0},
        {"num_rows": 9},
        {"num_rows": 17},
        {"split_k": 2},
        {"split_k": 0},
        {"product": "wgmma"},
        {"product": "mma", "vector_width": 4},
        {"product": "mma", "num_rows": 17},
        {"product": "mma", "split_k": 9},
        {"product": "mma", "split_k": 0},
        {"product": "mma", "num_rows": 16, "block_size": 992},
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
def test_what_is_not_valid(change: dict[str, Any]) -> None:
    config = SkinnyGemmConfig(1, 224, 2, 4, 8)
    assert config.is_valid()
    assert not replace(config, **change).is_valid()


def test_clusters_need_a_gpu_that_has_them() -> None:
    split = replace(MMA, split_k=2)
    assert split.is_valid() and split.is_valid(H200)
    assert not split.is_valid(GPUS[1])
    assert fits("skinny", split, 16, H200) == replace(split, num_rows=16)
    assert fits("skinny", split, 16, GPUS[1]) is None, "a table of a cache that moved"
    assert fits("skinny", replace(MMA, product="fma"), 9, H200) is None
    assert MMA.is_valid(GPUS[1])


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (SkinnyGemmConfig(1, 224, 2, 4, 8), "1/224/2/4/8"),
        (MMA, "4/448/16/4/8/mma"),
        (replace(MMA, num_rows=16, split_k=8), "16/448/16/4/8/mma/8"),
    ],
    ids=str,
)
def test_how_tables_write_a_configuration(config: SkinnyGemmConfig, key: str) -> None:
    assert key_of(config) == key
    assert config_of("skinny", key) == config
    with pytest.raises(ValueError, match=r"no configuration|cannot run"):
        config_of("skinny", f"{key}/9")


@pytest.mark.parametrize("split", [1, 2])
def test_what_is_known_of_k_when_an_instance_is_built(split: int) -> None:
    """Whether one round covers it, and whether it ends with a step of 32 columns."""
    config = replace(MMA, block_size=64, k_unroll=3, split_k=split)
    edge = 32 * config.steps_of_round()
    assert edge == 32 * 2 * 3 * split
    for k, one_round, whole in (
        (edge, "true", "true"),
        (edge + 32, "false", "true"),
        (edge + 8, "false", "false"),
        (edge - 24, "true", "false"),
        (8, "true", "false"),
        (0, "false", "false"),
    ):
        name = config.name_expression(Variant(k=k))
        blocks = config.blocks_per_sm
        assert name == (
            f"k3cupy::skinny_gemm_mma<__nv_bfloat16, 8, 64, 16, 3, {split}, {blocks}, "
            f"{one_round}, {whole}, true, false, false>"
        )


def test_half_as_much_is_in_flight_where_x_comes_element_by_element() -> None:
    for unroll, want in ((1, 1), (2, 1), (7, 4), (8, 4)):
        config = replace(MMA, block_size=64, k_unroll=unroll)
        edge = 32 * 2 * want
        for k, one_round in ((edge, "true"), (edge + 32, "false")):
            name = config.name_expression(Variant(aligned_x=False, k=k))
            assert name == (
                f"k3cupy::skinny_gemm_mma<__nv_bfloat16, 8, 64, 16, {want}, 1, 1, "
                f"{one_round}, true, false, false, false>"
            )


def test_one_instance_serves_the_tokens_of_a_tile() -> None:
    names = {
        tokens: replace(MMA, num_rows=tokens).name_expression(Variant(k=7168))
        for tokens in range(1, 17)
    }
    assert len({names[tokens] for tokens in range(1, 9)}) == 1
    assert len({names[tokens] for tokens in range(9, 17)}) == 1
    assert names[8] != names[9]


def test_the_model_knows_what_costs_tensor_cores() -> None:
    """Few bytes in flight, blocks for few multiprocessors, and clusters cost something."""
    n, k = FUSED_QKV_A
    for worse in (
        replace(MMA, block_size=64, k_unroll=1),
        replace(MMA, outputs_per_block=48, block_size=256, k_unroll=1),
        replace(MMA, split_k=8),
        replace(MMA, outputs_per_block=12),
    ):
        assert estimate_mma_us(worse, n, k, H200) > estimate_mma_us(MMA, n, k, H200), worse
    half = replace(H200, num_sms=66)
    assert estimate_mma_us(MMA, n, k, half) > 1.5 * estimate_mma_us(MMA, n, k, H200)


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
