"""Candidates of the fused-A GEMM, and the cost model for products that no table lists."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from k3cupy.kernels.fused_a_gemm import (
    UNIT_OF_ROWS,
    WARP,
    WARPGROUP,
    WARPGROUP_TOKENS,
    WIDE_TOKENS,
    FusedAGemmConfig,
)
from k3cupy.runtime.devices import DeviceInfo


def _shape(
    tile_n: int, tile_k: int, warps_k: int, warps_n: int, copy_warps: int, product: str = WARP
) -> FusedAGemmConfig:
    """Return how a tile is cut, before anyone knows its tokens and how deep its rings are."""
    return FusedAGemmConfig(8, tile_n, tile_k, 2, 2, warps_k, warps_n, 1, copy_warps, product)


_FEW_TILE_N, _FEW_WARPS_K = (16, 32, 48, 64), (4, 8)
_FEW_COPY_WARPS = {8: (2,), 16: (2, 4)}
"""For few tokens, copy_warps by tile_m: combined with each tile_n and warps_k above."""

_SHAPES: dict[int, tuple[FusedAGemmConfig, ...]] = {
    16: (_shape(64, 256, 4, 2, 2),),
    32: (
        _shape(16, 512, 8, 1, 2),
        _shape(32, 512, 8, 1, 4),
        _shape(32, 256, 8, 1, 4),
        _shape(32, 256, 4, 1, 2),
        _shape(32, 256, 4, 2, 2),
        _shape(48, 512, 4, 1, 2),
        _shape(48, 256, 4, 1, 2),
        _shape(64, 256, 4, 1, 2),
        _shape(64, 256, 4, 2, 2),
        _shape(64, 256, 2, 2, 2),
        _shape(64, 128, 4, 2, 2),
        _shape(80, 128, 4, 1, 2),
        _shape(96, 128, 2, 3, 2),
        _shape(96, 128, 4, 1, 2),
        _shape(96, 128, 4, 2, 2),
        _shape(160, 64, 2, 5, 2),
        _shape(64, 128, 1, 4, 2, WARPGROUP),
        _shape(128, 64, 1, 8, 2, WARPGROUP),
    ),
    64: (
        _shape(32, 256, 4, 1, 4),
        _shape(48, 256, 4, 1, 2),
        _shape(64, 256, 4, 2, 2),
        _shape(64, 128, 4, 2, 2),
        _shape(64, 128, 4, 1, 2),
        _shape(80, 128, 4, 1, 2),
        _shape(96, 128, 2, 3, 2),
        replace(_shape(64, 128, 1, 4, 2, WARPGROUP), mapped_x=True),
        replace(_shape(64, 128, 2, 4, 2, WARPGROUP), mapped_x=True),
        _shape(64, 128, 2, 4, 2, WARPGROUP),
        _shape(192, 64, 1, 4, 2, WARPGROUP),
    ),
}
"""By tile_m, what is worth a look beside that: fast somewhere, or one even wave for some N."""

_EVEN_WARPS_K, _EVEN_TILE_K, _ROWS_OF_A_TEAM = (1, 2), 128, 128
"""Where a product of a warpgroup has 64 tokens as its wide side, a tile may have any multiple of
8 rows: just enough for an even wave, and the next. Two warpgroups share more than one takes."""

_OF_MANY_ROWS = _shape(64, 128, 2, 4, 2)
"""For few tokens, where every multiprocessor has 64 rows: it sums in the order of tiles of 128 rows
and more, so that with batch invariance 64 tokens may have those."""

_SPLITS = (1, 2, 4)
_MAX_STAGES, _FEW_TOKENS = 12, 16
_MOST_OF_FEW_TOKENS, _MOST_OF_AN_ORDER = 24, 2
_UNIT_OF_SPREAD = 4
_ORDER_OF_ALL = (4, 1)
"""A summation order that every tile_m has candidates for, so that batch invariance is possible."""

_TILES_M = (8, 16, 32, 64)

_SMALLEST = _shape(16, 64, 4, 1, 1)
"""What fits any GPU, should nothing else."""


def tile_m_of(num_tokens: int) -> int:
    """Return the number of tokens that a block computes for a call's."""
    return next(tile for tile in _TILES_M if tile >= num_tokens)


def _shapes(
    tile_m: int, n: int, k: int, split_k: int, device: DeviceInfo
) -> Iterable[FusedAGemmConfig]:
    """Return the shapes to try for a product, its columns shared by ``split_k`` blocks."""
    yield from _SHAPES.get(tile_m, ())
    if tile_m in _FEW_COPY_WARPS:
        # Three stages or more in a row of the weight, and not so many that barriers take the time.
        tile_ks = (512, 256) if k >= 1024 else (256, 128) if k >= 512 else (128,)
        for tile_n, tile_k, warps_k, copy_warps in itertools.product(
            _FEW_TILE_N, tile_ks, _FEW_WARPS_K, _FEW_COPY_WARPS[tile_m]
        ):
            yield _shape(tile_n, tile_k, warps_k, 1, copy_warps)
        if split_k == 1 and n >= _OF_MANY_ROWS.tile_n * device.num_sms:
            yield _OF_MANY_ROWS
    if tile_m == WIDE_TOKENS and device.has_warpgroups:
        # Tiles of a multiple of the rows that the blocks of a cluster can share.
        alone = split_k == 1
        for waves in (1, 2, 3) if alone else (1,):
            rows = _even_rows(n, split_k, waves, device)
            if waves > 1 and rows < _ROWS_OF_A_TEAM // 2:
                break
            teams = 1 if rows <= _ROWS_OF_A_TEAM else 2
            unit = math.lcm(UNIT_OF_ROWS * teams, 4 * split_k)
            least, tile_k = -(-rows // unit) * unit, _EVEN_TILE_K // teams
            for tile_n, warps_k in itertools.product((least, least + unit), _EVEN_WARPS_K):
                even = _shape(tile_n, tile_k, warps_k, 4 * teams, 2, WARPGROUP_TOKENS)
                yield replace(even, mapped_x=alone)
                if alone and tile_n == least:  # who fetches x better is close
                    yield even


def _even_rows(n: int, split_k: int, waves: int, device: DeviceInfo) -> int:
    """Return the rows a block with which clusters of ``split_k`` blocks fill the GPU evenly."""
    return -(-n // (waves * max(device.clusters_at_once(split_k), 1)))


def candidates(n: int, k: int, num_tokens: int, device: DeviceInfo) -> tuple[FusedAGemmConfig, ...]:
    """Return the configurations worth measuring for a product on a GPU.

    Rings are as deep as shared memory allows with all blocks just resident, or else with as many as
    fit, and for few tokens also with room for one more block a multiprocessor, where the next
    kernel's blocks can begin. Where there are too many blocks to be resident at once, a few of them
    on each multiprocessor take turns.

    Few tokens mostly get the skinny kernel. So of theirs only those are left that the model puts
    first: of each order of sums, which batch invariance needs, and of all.
    """
    tile_m = tile_m_of(num_tokens)
    found: dict[FusedAGemmConfig, None] = {}
    for split_k in _SPLITS:
        for shape in _shapes(tile_m, n, k, split_k, device):
            blocks = -(-n // shape.tile_n) * split_k
            if split_k > 1 and (blocks > 2 * device.num_sms or k < 1024):
                continue
            tile_k = shape.tile_k
            while tile_k > max(k, 64):
                tile_k //= 2
            draft = replace(shape, tile_m=tile_m, tile_k=tile_k, split_k=split_k)
            resident = -(-blocks // device.num_sms)
            counts = range(resident, resident + 2) if resident <= 3 else range(2, 5)
            if tile_m > _FEW_TOKENS:
                counts = range(counts[0], 0, -1)
            fitting = filter(None, (_deepened(draft, k, device, count) for count in counts))
            for config in itertools.islice(fitting, 1 if tile_m > _FEW_TOKENS else None):
                if not config.mapped_x or config.can_map(k):
                    found |= dict.fromkeys([config, *_spread(config, n, device)])
    likely = list(found)
    if tile_m <= _FEW_TOKENS:
        likely = _likeliest(likely, lambda config: estimate_us(config, n, k, device))
    return tuple(likely) or (replace(_SMALLEST, tile_m=tile_m),)


def _likeliest(
    found: list[FusedAGemmConfig], time: Callable[[FusedAGemmConfig], float]
) -> list[FusedAGemmConfig]:
    ranked = sorted(found, key=time)
    orders = Counter[Any]()
    first = []
    for config in ranked:
        orders[config.order] += 1
        if orders[config.order] <= _MOST_OF_AN_ORDER:
            first.append(config)
    kept = list(dict.fromkeys((*first, *ranked)))[:_MOST_OF_FEW_TOKENS]
    return [config for config in found if config in kept]


def _spread(config: FusedAGemmConfig, n: int, device: DeviceInfo) -> tuple[FusedAGemmConfig, ...]:
    """Return a configuration with fewer rows a block, so that no multiprocessor is left out.

    Empty where that is no other one, where a smaller tile has room for these rows, and with few
    tokens where it would be less than an eighth of them.
    """
    waves = -(-config.blocks(n) // device.num_sms)
    rows = _even_rows(n, config.split_k, waves, device)
    rows = -(-rows // _UNIT_OF_SPREAD) * _UNIT_OF_SPREAD  # what is stored together
    most = config.tile_n if config.tile_m > _FEW_TOKENS else config.tile_n * 7 // 8 + 1
    is_other = config.tile_n - config.product_rows < rows < most
    return (replace(config, block_rows=rows),) if is_other else ()


def _deepened(
    config: FusedAGemmConfig, k: int, device: DeviceInfo, blocks_per_sm: int
) -> FusedAGemmConfig | None:
    """Return a configuration with the deepest rings that fit, or None where none does."""
    useful = max(2, -(-k // (config.split_k * config.tile_k)))
    for stages in range(min(useful, _MAX_STAGES), 1, -1):
        deeper = replace(config, stages=stages, stages_x=stages)
        if deeper.is_valid(device) and deeper.blocks_per_sm(device) >= blocks_per_sm:
            return deeper
    return None


# --- The cost model: for products and GPUs that no table lists ------------------------------------
# Fitted to times of 28 weights on an H200, each product after itself. Of 58 weights in the chain
# what it names is on average 3% slower than the best of these candidates, and at most 24%.

_BYTES_A_US_AN_SM = 3.1e4
_SHARE_FETCHED_AHEAD, _SHARE_OF_X = 0.62, 0.038
_PART_WAVE = 4.9
_STEP_OF_16_ROWS_US, _STEP_OF_8_TOKENS_US = 1.5e-3, 1.1e-3
_ENOUGH_WARPS = 8
_OVERLAP = 3.2
_SPLIT_US, _SUMS_US_A_BYTE, _THREAD_US = 1.3, 1e-5, 8e-7
_ENDS_AT_ONCE = 4
_SHARE_FOR_FOUR = 10 / 11
"""Of the multiprocessors, what clusters of four fill: an H200 runs 30 of them at once, and more
than 120 blocks took half as long again, whatever the weight."""


def estimate_us(config: FusedAGemmConfig, n: int, k: int, device: DeviceInfo) -> float:
    """Return the model's time, to compare configurations by.

    The bytes that the busiest multiprocessor fetches, without most of what its rings hold, for that
    comes while the predecessor ends, and longer by a part wave; the work of its warps beside it;
    and what blocks, clusters and warps add at their ends.
    """
    blocks = config.blocks(n)
    resident = config.blocks_per_sm(device)
    num_sms = int(device.num_sms * (_SHARE_FOR_FOUR if config.split_k == 4 else 1)) or 1
    per_sm = -(-blocks // num_sms)
    columns = k / config.split_k
    weight = per_sm * config.tile_n * 2 * columns
    ring = config.stages * config.tile_n * 2 * config.tile_k
    ahead = min(min(per_sm, resident) * ring, weight)
    x = per_sm * config.tile_m * 2 * columns
    fetch = (weight - _SHARE_FETCHED_AHEAD * ahead + _SHARE_OF_X * x) / _BYTES_A_US_AN_SM
    if per_sm > resident:
        fetch *= 1 + _PART_WAVE * (per_sm * num_sms / blocks - 1)
    step = _STEP_OF_16_ROWS_US + _STEP_OF_8_TOKENS_US * config.tile_m / 8
    warps = min(config.warps_k * config.warps_n, _ENOUGH_WARPS) / _ENOUGH_WARPS
    work = per_sm * math.ceil(columns / 16) * step * config.tile_n / 16 / math.sqrt(warps)
    sums = 4 * config.warps_k * config.tile_m * config.tile_n
    together: float = (fetch**_OVERLAP + work**_OVERLAP) ** (1 / _OVERLAP)
    return (
        together
        + _SPLIT_US * (config.split_k - 1)
        + _SUMS_US_A_BYTE * sums * min(per_sm, _ENDS_AT_ONCE)
        + _THREAD_US * config.block_size
    )


def ranked(
    n: int, k: int, num_tokens: int, device: DeviceInfo, *, batch_invariant: bool = False
) -> tuple[FusedAGemmConfig, ...]:
    """Return the candidates that the model was fitted to, the likeliest first; at least one.

    ``batch_invariant``: only those that sum in one order whatever the number of tokens.
    """
    possible = [
        config
        for config in candidates(n, k, num_tokens, device)
        if not (config.needs_warpgroups or config.block_rows or config.mapped_x)
        and (config.order == _ORDER_OF_ALL or not batch_invariant)
    ]
    possible.sort(key=lambda config: estimate_us(config, n, k, device))
    return tuple(possible) or (replace(_SMALLEST, tile_m=tile_m_of(num_tokens)),)
