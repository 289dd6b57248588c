"""The fused-A GEMM by products of a warpgroup, which sm_90 alone has: values, layouts, bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_device import H200
from gemm_helpers import assert_product, inputs, normal, op, residual_of, run_and_check, same_bits
from helpers import BF16, guarded, refused
from stream_helpers import captured

import k3cupy
from k3cupy import projections
from k3cupy.accept.gemm import check_fused_a_config
from k3cupy.choose.fused_a_gemm import candidates
from k3cupy.choose.gemm import FUSED_A, choose
from k3cupy.kernels.fused_a_gemm import Variant
from k3cupy.runtime import devices, instances

BASE = k3cupy.FusedAGemmConfig(64, 64, 128, 4, 4, 1, 4, 1, 2, "warpgroup")
WIDE_TOKENS = replace(BASE, tile_n=72, product="warpgroup_tokens")
"""Tokens are the wide side of its products, rows of the weight the narrow one."""

both = pytest.mark.parametrize("base", [BASE, WIDE_TOKENS], ids=["wide weights", "wide tokens"])


@pytest.fixture
def sm_90() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of sm_90")


# Without a GPU


@both
def test_a_configuration_that_only_sm_90_has(base: k3cupy.FusedAGemmConfig) -> None:
    assert check_fused_a_config(base, 64, H200) is base
    for capability in ((8, 0), (8, 9), (10, 0), (10, 3), (12, 0)):
        gpu = replace(H200, compute_capability=capability)
        told = rf"^config: expected product 'warp' on sm_.*, got '{base.product}'$"
        with pytest.raises(ValueError, match=told):
            check_fused_a_config(base, 64, gpu)
        assert not any(c.needs_warpgroups for c in candidates(4608, 1536, 64, gpu))


def test_which_instances_are_compiled_for_their_own_architecture() -> None:
    variant = Variant()
    assert BASE.instance(variant).own_arch
    assert not replace(BASE, product="warp").instance(variant).own_arch


@pytest.mark.parametrize("tokens", [17, 32, 33, 64])
def test_only_a_measurement_names_them(tokens: int) -> None:
    """They are candidates for every product of that size, and the cost model leaves them out."""
    for p in projections.shapes():
        assert any(c.needs_warpgroups for c in candidates(p.n, p.k, tokens, H200))
    gpu = replace(H200, name="a GPU without a table")
    for n, k in ((4608, 1536), (20480, 7168), (7, 80)):
        for invariant in (False, True):
            config = choose((FUSED_A,), n, k, tokens, gpu, batch_invariant=invariant).config
            assert not config.needs_warpgroups
            assert not config.block_rows
            assert not config.mapped_x


def test_candidates_that_leave_no_multiprocessor_out() -> None:
    """7168 rows are 112 tiles of 64, and 131 shares of 55."""
    found = candidates(7168, 1536, 64, H200)
    spread = {(c.tile_n, c.block_rows, c.blocks(7168)) for c in found if c.block_rows}
    assert (64, 55, 131) in spread
    even = {(c.tile_n, c.split_k, c.blocks(4608)) for c in candidates(4608, 1536, 64, H200)}
    assert (72, 2, 128) in even, "64 clusters of two; 66 fit"
    assert all(c.is_valid(H200) for c in found)
    assert len(set(found)) == len(found)


def test_the_order_of_a_sum_is_another() -> None:
    assert len({c.order for c in (BASE, WIDE_TOKENS, replace(BASE, product="warp"))}) == 3
    assert BASE.order == replace(BASE, tile_m=32, tile_n=128, tile_k=64, stages=7).order


def test_on_the_cpu_a_configuration_changes_nothing() -> None:
    x, weight = inputs(33, 48, 128)
    same_bits(op(x, weight, config=BASE), op(x, weight))


# On a GPU

WIDE_TOKENS_CONFIGS = [
    WIDE_TOKENS,
    *(
        replace(WIDE_TOKENS, tile_n=tile_n, stages=3, stages_x=3, mapped_x=tile_n % 16 == 0)
        for tile_n in range(16, 129, 8)
    ),
    replace(WIDE_TOKENS, tile_k=64, stages=12, stages_x=5),
    replace(WIDE_TOKENS, tile_n=144, warps_n=8, stages=3, stages_x=2),
    replace(WIDE_TOKENS, block_rows=35),
    replace(WIDE_TOKENS, copy_warps=1, mapped_x=True),
]
CONFIGS = [
    BASE,
    replace(BASE, mapped_x=True),
    replace(BASE, tile_n=128, stages=3, mapped_x=True, copy_warps=4),
    replace(BASE, tile_k=64, stages=14, stages_x=5),
    replace(BASE, tile_k=256, stages=3, stages_x=2),
    replace(BASE, tile_n=128, stages=3),
    replace(BASE, tile_n=128, warps_n=8, stages=3),
    replace(BASE, tile_n=192, tile_k=64, stages=7, stages_x=7),
    replace(BASE, block_rows=35),
    replace(BASE, tile_n=128, stages=3, block_rows=77),
    replace(BASE, copy_warps=4),
    replace(BASE, copy_warps=1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 31, 32, 33, 63, 64])
def test_values(tokens: int, sm_90: None) -> None:
    """Also where columns and rows end inside a stage and a tile."""
    for n, k in ((64, 64), (100, 16), (7, 80), (200, 2064), (65, 7168), (528, 1536)):
        x, weight = inputs(tokens, n, k, "cuda", seed=n + k)
        results = [run_and_check(x, weight, config=config) for config in CONFIGS]
        if tokens <= 32:
            results.append(run_and_check(x, weight, config=replace(BASE, tile_m=32)))
        others = [run_and_check(x, weight, config=config) for config in WIDE_TOKENS_CONFIGS]
        for found in (results, others):
            for result in found[1:]:
                same_bits(result, found[0])


@pytest.mark.gpu
@both
@pytest.mark.parametrize("warps_k", [1, 2])
@pytest.mark.parametrize("split", [1, 2, 4])
def test_warpgroups_and_clusters_that_share_the_columns(
    split: int, warps_k: int, base: k3cupy.FusedAGemmConfig, sm_90: None
) -> None:
    first = replace(base, split_k=split, warps_k=warps_k, tile_n=64 if base is BASE else 80)
    second = replace(first, tile_n=128, stages=2, stages_x=2)
    third = replace(first, mapped_x=True)
    for n, k in ((100, 16), (7, 80), (200, 2064), (130, 4096)):
        x, weight = inputs(37, n, k, "cuda", strides=(k + 8, 1))
        residual = residual_of(37, n, "cuda", strides=(n + 1, 1))
        results = [
            run_and_check(x, weight, residual=residual, config=config)
            for config in (first, second, third)
        ]
        same_bits(results[1], results[0])
        same_bits(results[2], results[0])


@pytest.mark.gpu
def test_projections_of_the_model(sm_90: None) -> None:
    for p in projections.shapes():
        x, weight = normal((64, p.k), 1, "cuda"), normal((p.n, p.k), 2, "cuda")
        for config in candidates(p.n, p.k, 64, devices.info(0)):
            if config.needs_warpgroups:
                assert_product(op(x, weight, config=config), x, weight)


@pytest.mark.gpu
@both
def test_sums_that_are_exact(base: k3cupy.FusedAGemmConfig, sm_90: None) -> None:
    """One-hot rows of x pick single columns of the weight, bit by bit."""
    n, k = 200, 336
    weight = guarded(normal((n, k), 1), "cuda")
    for start in range(0, k, 64):
        count = min(64, k - start)
        x = torch.zeros(count, k, dtype=BF16, device="cuda")
        x[range(count), range(start, start + count)] = 1
        got = op(x, weight, config=base)
        assert torch.equal(got, weight[:, start : start + count].T)


@pytest.mark.gpu
@both
def test_layouts_of_x(base: k3cupy.FusedAGemmConfig, sm_90: None) -> None:
    x, weight = inputs(37, 200, 1552, "cuda")
    packed = op(x, weight, config=base)
    for stride, shift in ((1560, 0), (1553, 0), (1552, 2), (3104, 8)):
        other = guarded(x.cpu(), "cuda", strides=(stride, 1), shift=shift)
        same_bits(run_and_check(other, weight, config=base), packed, f"{stride}, {shift}")


@pytest.mark.gpu
@both
@pytest.mark.parametrize("mapped", [False, True], ids=["copied", "mapped"])
def test_what_is_poisoned_stays_alone(
    mapped: bool, base: k3cupy.FusedAGemmConfig, sm_90: None
) -> None:
    """A row of x, a row of the weight, and whatever an earlier kernel left in shared memory."""
    config = replace(base, mapped_x=mapped)
    x, weight = inputs(37, 200, 1552, "cuda")
    poison = torch.full((64, 1552), float("nan"), dtype=BF16, device="cuda")
    clean = op(x, weight, config=config)
    op(poison, poison, config=config)
    same_bits(op(x, weight, config=config), clean)
    x[5, 1551], weight[77, 0] = float("nan"), float("inf")
    out = op(x, weight, config=config)
    assert out[5].isnan().all()
    assert not out[:, 77].isfinite().any()
    out[5], out[:, 77] = clean[5], clean[:, 77]
    same_bits(out, clean)


@pytest.mark.gpu
@both
def test_a_row_does_not_depend_on_the_others(base: k3cupy.FusedAGemmConfig, sm_90: None) -> None:
    x, weight = inputs(64, 200, 2048, "cuda")
    whole = op(x, weight, config=base)
    for tokens in (1, 7, 8, 16, 17, 33, 63):
        same_bits(op(x[:tokens], weight, config=base), whole[:tokens], f"M = {tokens}")
        last = op(x[64 - tokens :], weight, config=base)
        same_bits(last, whole[64 - tokens :], f"the last {tokens}")
    for _ in range(50):
        same_bits(op(x, weight, config=base), whole)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("mapped", [False, True], ids=["copied", "mapped"])
def test_in_a_graph_among_dependent_launches(
    mapped: bool, base: k3cupy.FusedAGemmConfig, sm_90: None
) -> None:
    """Products that feed products: a ring may fill early, and is drained in time."""
    config = replace(base, mapped_x=mapped)
    first, second = normal((256, 512), 1, "cuda"), normal((512, 256), 2, "cuda")
    x, scale = normal((64, 512), 3, "cuda"), 2**-5
    middle = torch.empty(64, 256, dtype=BF16, device="cuda")
    out = torch.empty(64, 512, dtype=BF16, device="cuda")

    def chain(pdl: bool | None = None) -> None:
        for _ in range(4):
            op(x, first, out=middle, config=config, pdl=pdl, weight_is_static=True)
            op(middle, second, out=out, config=config, pdl=pdl, weight_is_static=True)

    chain()
    graph, _ = captured(chain)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for seed in range(100):
        x.copy_(normal(x.shape, seed, "cuda") * scale)
        chain(pdl=False)
        want = out.clone()
        out.fill_(float("nan"))
        middle.fill_(float("nan"))
        graph.replay()
        wrong += (out.view(torch.int16) != want.view(torch.int16)).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
def test_nothing_spills(sm_90: None) -> None:
    for config in (*CONFIGS, *WIDE_TOKENS_CONFIGS):
        loaded = instances.load(config.instance(Variant()), 0)
        assert loaded.function.local_size_bytes == 0
        assert loaded.function.num_regs * config.block_size <= 65_536


@pytest.mark.gpu
def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = replace(devices.info(0), compute_capability=(10, 0))
    monkeypatch.setattr(devices, "info", lambda _: newer)
    x, weight = inputs(33, 56, 272, "cuda")
    refused({"x": x, "weight": weight, "config": BASE}, "config", "^'warpgroup'$", operation=op)
