"""The fused-A GEMM by products of a warpgroup, which sm_90 alone has: values, layouts, bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

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
    """7168 rows are 112 tiles of 64, and 128 shares of 56; four rows are stored together."""
    found = candidates(7168, 1536, 64, H200)
    spread = {(c.tile_n, c.block_rows, c.blocks(7168)) for c in found if c.block_rows}
    assert (64, 56, 128) in spread
    even = {(c.tile_n, c.split_k, c.blocks(4608)) for c in candidates(4608, 1536, 64, H200)}
    assert (72, 2, 128) in even, "64 clusters of two; 66 fit"
    assert all(c.is_valid(H200) for c in found)
    assert len(set(found)) == len(found)


def test_products_share_the_order_of_sums() -> None:
    """Four partial sums of an element, whoever multiplies, where a warp has registers for them."""
    warps = replace(BASE, product="warp", warps_k=4, warps_n=1)
    assert {c.order for c in (BASE, replace(BASE, warps_k=2), WIDE_TOKENS, warps)} == {(4, 1)}
    assert replace(WIDE_TOKENS, split_k=2).order == (4, 2)
    assert replace(warps, warps_k=2, warps_n=2).order == (2, 1)
    assert replace(BASE, tile_n=128).order == (2, 1)
    assert replace(WIDE_TOKENS, tile_n=256, warps_n=8).order == (1, 1)
    for config in (BASE, replace(WIDE_TOKENS, warps_k=2, tile_n=128, stages=3)):
        assert replace(config, mapped_x=True).order == config.order, "whatever threads are saved"


@pytest.mark.parametrize("p", projections.shapes(), ids=lambda p: f"{p.n}x{p.k}")
def test_64_tokens_have_candidates_in_the_order_of_one(p: projections.Projection) -> None:
    """Those of warpgroups among them, which 64 tokens want where columns are more than a few."""
    orders = [{c.order for c in candidates(p.n, p.k, m, H200)} for m in (1, 8, 16, 32)]
    common = set.intersection(*orders)
    many = {c.order for c in candidates(p.n, p.k, 64, H200) if c.needs_warpgroups}
    assert (4, 1) in common & many


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
WARPS = [
    k3cupy.FusedAGemmConfig(64, 32, 256, 3, 3, 4, 1, 1, 2),
    k3cupy.FusedAGemmConfig(64, 64, 64, 6, 6, 4, 2, 1, 2),
    k3cupy.FusedAGemmConfig(64, 96, 128, 3, 3, 2, 3, 1, 2),
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


def assert_orders_agree(
    configs: Iterable[k3cupy.FusedAGemmConfig], x: Any, weight: Any, **options: Any
) -> None:
    """Each is right, and has the bits of the others of its order."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for config in configs:
        out = run_and_check(x, weight, config=config, **options)
        same_bits(out, found.setdefault(config.order, out), str(config))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 31, 32, 33, 63, 64])
def test_values(tokens: int, sm_90: None) -> None:
    """Also where columns and rows end inside a stage and a tile."""
    for n, k in ((64, 64), (100, 16), (7, 80), (200, 2064), (65, 7168), (528, 1536)):
        x, weight = inputs(tokens, n, k, "cuda", seed=n + k)
        fewer = [replace(BASE, tile_m=32)] if tokens <= 32 else []
        assert_orders_agree((*CONFIGS, *fewer, *WIDE_TOKENS_CONFIGS, *WARPS), x, weight)


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
    fourth = replace(first, product="warp", warps_k=4, warps_n=1)
    for n, k in ((100, 16), (7, 80), (200, 2064), (130, 4096)):
        x, weight = inputs(37, n, k, "cuda", strides=(k + 8, 1))
        residual = residual_of(37, n, "cuda", strides=(n + 1, 1))
        assert_orders_agree((first, second, third, fourth), x, weight, residual=residual)


INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "far apart": lambda t: t * torch.exp2(torch.randint_like(t, -18, 18)),
    "cancelling": lambda t: torch.stack([t, -t], -1).flatten(1)[:, : t.shape[1]] + 1e-3 * t,
    "subnormal": lambda t: t * torch.where(torch.rand_like(t) < 0.5, 2.0**-66, 2.0**-131),
    "signed zeros": lambda t: t * torch.randint_like(t, 0, 2),
    "not finite": lambda t: t / (torch.rand_like(t) > 3e-4),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", INPUTS)
def test_a_warp_and_a_warpgroup_add_alike(kind: str, sm_90: None) -> None:
    """What every promise across products rests on: of a step they make the same bits."""
    for split, k in itertools.product((1, 2, 4), (592, 1024, 1552)):
        torch.manual_seed(split * k)
        x, weight = (
            INPUTS[kind](torch.randn(rows, k, device="cuda")).to(BF16) for rows in (64, 384)
        )
        warps = replace(BASE, product="warp", warps_k=4, warps_n=1)
        wide = replace(WIDE_TOKENS, tile_n=80)
        configs = (warps, BASE, replace(BASE, warps_k=2), wide, WARPS[0], WARPS[1])
        found: dict[tuple[int, int], torch.Tensor] = {}
        for config in (replace(config, split_k=split, stages=3) for config in configs):
            out = op(x, weight, config=config)
            same_bits(out, found.setdefault(config.order, out), f"{config}, K = {k}")
        assert len(found) == 1


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
