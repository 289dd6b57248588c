"""The skinny GEMM with tensor cores on a GPU: values, bits, tails, clusters and late writers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from gemm_helpers import assert_product, inputs, normal, residual_of, same_bits
from helpers import BF16, FP16, run_child
from memory_helpers import before_unmapped_gpu_memory
from pdl_helpers import wrong_values_of_a_chain
from skinny_helpers import DTYPES, op, run_and_check

import k3cupy
from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig, Variant
from k3cupy.runtime import devices, instances

pytestmark = pytest.mark.gpu

ONE = SkinnyGemmConfig(1, 64, 8, 1, 8, "mma")
EVEN = SkinnyGemmConfig(1, 96, 16, 3, 8, "mma")
ODD = SkinnyGemmConfig(1, 160, 27, 2, 8, "mma")
BASES = (ONE, EVEN, ODD)
TOKENS = range(1, 17)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def load(
    configs: Iterable[SkinnyGemmConfig], dtype: torch.dtype, *, k: int, **flags: bool
) -> list[SkinnyGemmConfig]:
    """Compile on threads what a test will run one by one; clusters only where there are any."""
    device = torch.cuda.current_device()
    found = [config for config in configs if config.is_valid(devices.info(device))]
    variant = Variant(str(dtype)[6:], k=k, **flags)
    instances.load_all([config.instance(variant) for config in found], device)
    return found


def splits_of(config: SkinnyGemmConfig) -> list[SkinnyGemmConfig]:
    return [replace(config, split_k=split) for split in range(1, 9)]


# Values


@each_dtype
@pytest.mark.parametrize("residual", [False, True])
def test_every_number_of_tokens(dtype: torch.dtype, residual: bool) -> None:
    """An instance for up to eight and one for up to 16; N fills no block, K no step."""
    n, k = 83, 1000
    for base in BASES:
        drafts = [replace(base, num_rows=tokens) for tokens in TOKENS]
        found = load(drafts, dtype, k=k, has_residual=residual)
        assert found == drafts
        for config in found:
            x, weight = inputs(config.num_rows, n, k, "cuda", seed=config.num_rows, dtype=dtype)
            added = residual_of(config.num_rows, n, "cuda", dtype=dtype) if residual else None
            run_and_check(x, weight, residual=added, config=config)


@pytest.mark.parametrize(("tokens", "dtype"), [(3, BF16), (14, FP16)], ids=str)
def test_where_k_ends(tokens: int, dtype: torch.dtype) -> None:
    """Inside a step, behind a step, behind a round, inside the next; with idle warps too."""
    for base in (EVEN, replace(EVEN, split_k=2)):
        config = replace(base, num_rows=tokens)
        whole = 32 * config.steps_of_round()
        for k in (8, 24, 32, 40, whole - 8, whole, whole + 8, whole + 32, 3 * whole + 72):
            for static in (False, True):
                if not load([config], dtype, k=k, weight_is_static=static):
                    continue
                x, weight = inputs(tokens, 20, k, "cuda", seed=k, dtype=dtype)
                run_and_check(x, weight, config=config, weight_is_static=static)


@pytest.mark.parametrize("outputs", [1, 7, 8, 9, 16, 33, 56])
def test_where_n_ends(outputs: int) -> None:
    """One row, a block less one, a block, and one more; the weight ends where memory may end."""
    for tokens in (2, 16):
        config = SkinnyGemmConfig(tokens, 64, outputs, 1, 8, "mma")
        load([config], BF16, k=136, has_residual=True)
        for n in sorted({1, max(outputs - 1, 1), outputs, outputs + 1, 3 * outputs + 5}):
            x, weight = inputs(tokens, n, 136, "cuda", seed=n)
            run_and_check(x, weight, residual=residual_of(tokens, n, "cuda"), config=config)


@each_dtype
@pytest.mark.parametrize("tokens", [8, 13])
def test_clusters(tokens: int, dtype: torch.dtype) -> None:
    """Also such whose blocks have no step at all, or quads of sums that fill no share."""
    n = 61
    for base, k in itertools.product((EVEN, ODD), (40, 1000)):
        drafts = [replace(config, num_rows=tokens) for config in splits_of(base)]
        for config in load(drafts, dtype, k=k, has_residual=True):
            x, weight = inputs(tokens, n, k, "cuda", seed=config.split_k, dtype=dtype)
            added = residual_of(tokens, n, "cuda", dtype=dtype)
            run_and_check(x, weight, residual=added, config=config)


@each_dtype
def test_layouts(dtype: torch.dtype) -> None:
    """Rows of x apart, unaligned by stride and by address, out and residual with strides."""
    n, k = 61, 520
    for tokens, split in ((5, 1), (13, 1), (13, 4)):
        config = replace(ODD, num_rows=tokens, split_k=split)
        for aligned in (True, False):
            load([config], dtype, k=k, aligned_x=aligned, has_residual=True)
        if not config.is_valid(devices.info(torch.cuda.current_device())):
            continue
        added = residual_of(tokens, n, "cuda", dtype=dtype, strides=(n + 7, 1))
        packed, weight = inputs(tokens, n, k, "cuda", dtype=dtype)
        want = op(packed, weight, added, config=config)
        for stride, shift in ((k + 8, 0), (k + 8, 16), (k + 1, 0), (k, 2), (k + 3, 6)):
            x, _ = inputs(tokens, n, k, "cuda", dtype=dtype, strides=(stride, 1), shift=shift)
            out = run_and_check(
                x, weight, residual=added, config=config, out_strides=(n + 5, 1), shift=2
            )
            same_bits(out, want, f"stride {stride}, shift {shift}")


def test_one_token_of_any_stride() -> None:
    x, weight = inputs(1, 48, 128, "cuda")
    want = op(x, weight, config=ONE)
    same_bits(op(x.as_strided((1, 128), (2**40, 1)), weight, config=ONE), want)


@each_dtype
def test_in_place(dtype: torch.dtype) -> None:
    """The thread that writes an element is the one that has read it, in a cluster too."""
    n, k = 83, 1000
    for tokens in (4, 16):
        drafts = [replace(config, num_rows=tokens) for config in splits_of(ODD)]
        for config in load(drafts, dtype, k=k, has_residual=True):
            x, weight = inputs(tokens, n, k, "cuda", dtype=dtype)
            out = residual_of(tokens, n, "cuda", dtype=dtype)
            want = op(x, weight, out.clone(), config=config)
            assert op(x, weight, out, out=out, config=config) is out
            same_bits(out, want, str(config))


def test_what_is_not_a_number_stays_where_it_is() -> None:
    """In its row of x, in its row of the weight; lanes without a row or a token hold copies."""
    n, k = 29, 200
    for tokens, base, spoilt in itertools.product((6, 11), BASES, (float("nan"), float("inf"))):
        config = replace(base, num_rows=tokens)
        x, weight = inputs(tokens, n, k, "cuda", seed=3)
        clean = op(x, weight, config=config)
        for row in (0, tokens - 1):
            bad = x.clone()
            bad[row, k - 1] = spoilt
            out = op(bad, weight, config=config)
            others = torch.arange(tokens, device="cuda") != row
            same_bits(out[others], clean[others], f"row {row} of x")
            assert not out[row].isfinite().any()
        for column in (0, n - 1):
            bad = weight.clone()
            bad[column, 0] = spoilt
            out = op(x, bad, config=config)
            others = torch.arange(n, device="cuda") != column
            same_bits(out[:, others], clean[:, others], f"row {column} of the weight")
            assert not out[:, column].isfinite().any()


def test_subnormal_values_and_large_sums() -> None:
    """Tensor cores keep subnormal inputs; fp32 sums hold what fp16 cannot."""
    config = replace(ONE, num_rows=3)
    for dtype, tiny, scale in ((BF16, 2.0**-130, 2.0**20), (FP16, 2.0**-20, 2.0**10)):
        x = torch.full((3, 8), tiny, device="cuda").to(dtype)
        weight = torch.full((16, 8), scale, device="cuda").to(dtype)
        run_and_check(x, weight, config=config)
        assert op(x, weight, config=config).min() > 0
    x = torch.ones(3, 8, dtype=FP16, device="cuda")
    weight = torch.zeros(3, 8, dtype=FP16, device="cuda")
    weight[:, 0] = weight[:, 1] = 60000
    weight[:, 2] = weight[:, 3] = -35008
    assert (op(x, weight, config=config) == 49984).all()


# Bits


@each_dtype
@pytest.mark.parametrize("split", [1, 4])
def test_a_row_has_the_same_bits_for_every_number_of_tokens(split: int, dtype: torch.dtype) -> None:
    """With equal block size and split; neither outputs a block nor the unrolling matter."""
    n, cuts = 77, ((12, 1), (27, 3), (40, 2))
    for block_size, k in ((64, 1000), (224, 7168)):
        one = SkinnyGemmConfig(1, block_size, 8, 1, 8, "mma", split)
        if not load([one], dtype, k=k, has_residual=True):
            pytest.skip("has no clusters")
        x, weight = inputs(16, n, k, "cuda", dtype=dtype)
        residual = residual_of(16, n, "cuda", dtype=dtype)
        rows = zip(x.split(1), residual.split(1), strict=True)
        alone = torch.cat([op(row, weight, added, config=one) for row, added in rows])
        drafts = [
            SkinnyGemmConfig(tokens, block_size, outputs, unroll, 8, "mma", split)
            for tokens, (outputs, unroll) in itertools.product(TOKENS, cuts)
        ]
        for config in load(drafts, dtype, k=k, has_residual=True):
            assert config.order == one.order
            some = slice(16 - config.num_rows, 16)
            out = op(x[some], weight, residual[some], config=config)
            same_bits(out, alone[some], str(config))


def test_a_sum_has_the_same_bits_again() -> None:
    x, weight = inputs(16, 400, 7168, "cuda")
    for config in splits_of(replace(EVEN, num_rows=16)):
        if config.is_valid(devices.info(torch.cuda.current_device())):
            want = op(x, weight, config=config)
            for _ in range(20):
                same_bits(op(x, weight, config=config), want, str(config))


# The predecessor, and the ends of allocations


@pytest.mark.parametrize("split", [1, 4])
def test_products_that_feed_products(split: int) -> None:
    """Each begins before its predecessor ends; a result is an x, a residual, and then a weight."""
    few = SkinnyGemmConfig(8, 128, 16, 4, 8, "mma", split)
    many = SkinnyGemmConfig(16, 96, 24, 2, 8, "mma", split)
    if not few.is_valid(devices.info(torch.cuda.current_device())):
        pytest.skip("has no clusters")
    for config in (few, many):
        rows = config.num_rows
        first, second = normal((2048, 512), 1, "cuda"), normal((512, 2048), 2, "cuda")
        x = normal((rows, 512), 3, "cuda")
        a, b, c = (torch.empty(rows, n, dtype=BF16, device="cuda") for n in (2048, 512, rows))

        def chain(
            config: SkinnyGemmConfig = config,
            x: torch.Tensor = x,
            first: torch.Tensor = first,
            second: torch.Tensor = second,
            outs: tuple[torch.Tensor, ...] = (a, b, c),
            **options: bool,
        ) -> None:
            a, b, c = outs
            op(x, first, out=a, config=config, weight_is_static=True, **options)
            op(a, second, x, out=b, config=config, weight_is_static=True, **options)
            op(x, b, out=c, config=config, **options)  # what was written before is the weight

        assert wrong_values_of_a_chain(chain, x, (a, b, c)) == 0
        assert_product(a, x, first)
        assert_product(b, a, second, x)
        assert_product(c, x, b)


def _reads_nothing_past_device_memory() -> None:
    """In a child: a stray read is a fault."""
    gpu = devices.info(torch.cuda.current_device())
    for tokens, n, k in ((1, 48, 128), (3, 7, 80), (8, 33, 1544), (16, 1, 8), (11, 5, 24)):
        tensors = (*inputs(tokens, n, k), residual_of(tokens, n))
        three = [before_unmapped_gpu_memory(t.cuda()) for t in tensors]
        for base, split, static in itertools.product(BASES, (1, 4), (False, True)):
            config = replace(base, num_rows=tokens, split_k=split)
            if config.is_valid(gpu):
                out = op(*three, config=config, weight_is_static=static)
                assert_product(out, *three)
    torch.cuda.synchronize()
    os._exit(0)


def test_configurations_read_nothing_past_device_memory() -> None:
    run_child(_reads_nothing_past_device_memory)


def test_as_many_blocks_fit_as_the_choice_counts_on() -> None:
    for config in (ONE, EVEN, SkinnyGemmConfig(4, 448, 16, 4, 8, "mma")):
        loaded = instances.load(config.instance(Variant(k=7168)), 0)
        assert loaded.function.local_size_bytes == 0
        warps = 4 * (512 // (-(-loaded.function.num_regs // 8) * 8))
        assert warps * 32 // config.block_size >= config.blocks_per_sm


def test_a_configuration_of_the_caller_is_the_one_that_runs() -> None:
    x, weight = inputs(1, 48, 256, "cuda")
    decision = k3cupy.explain_skinny_gemm(x, weight, config=ONE, weight_is_static=True)
    assert decision.config == ONE
    variant = Variant("bfloat16", True, False, True, k=256)
    assert decision.name_expression == ONE.name_expression(variant)
