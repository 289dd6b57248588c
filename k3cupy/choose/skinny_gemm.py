"""Candidates of the skinny GEMM, ranked by a model of their time."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

from k3cupy.choose.table import config_of
from k3cupy.kernels.skinny_gemm import (
    KERNEL,
    MAX_FMA_TOKENS,
    MMA,
    VECTOR_WIDTHS,
    SkinnyGemmConfig,
)
from k3cupy.runtime.devices import DeviceInfo

_BLOCK_SIZES = tuple(range(32, 513, 32))
_OUTPUTS = (1, 2, 3, 4, 6, 8)
_UNROLLS = (1, 2, 3, 4)

_PUBLIC = {
    1: "224/2/4/8 224/3/4/8 224/4/2/8 96/4/2/8 96/2/4/8 96/4/2/4 64/4/2/8 32/4/4/8 128/4/2/8 "
    "256/2/1/4",
    2: "128/4/2/8 128/2/2/8 96/4/1/8 64/4/2/8 224/4/2/8 32/4/4/8",
}
_PUBLIC_OF_MORE = "128/2/1/8 64/4/1/8 128/3/1/8 128/6/1/8 64/2/2/8 64/3/2/8"
"""By number of rows, what public packages found fast on GPUs of other kinds: block_size,
outputs_per_block, k_unroll and vector_width, as tables write them."""

_MOST_DOTS = {1: 16, 2: 16, 3: 12, 4: 12}
"""By number of tokens, how many dot products are measured: the more tokens, the more a weight costs
so. Of tensor cores it is the other way round."""

_MOST_DOTS_OF_MORE, _MOST_TILES, _MOST_TILES_OF_ONE = 4, 16, 4
_WORTH_A_TRY = 1.3
"""A public setting is one up to this many times the model's best time."""

_OF_ONE_BLOCK_SIZE, _OF_ONE_OUTPUTS = 2, 3

_FEW_TOKENS = 2
"""Up to here a weight costs few enough instructions as a dot product: measured on an H200."""

_MMA_BLOCK_SIZES = (64, 96, 128, 192, 224, 256, 320, 384, 448, 512)
_MMA_OUTPUTS = (8, 12, 14, 16, 18, 20, 24, 27, 28, 32, 35, 40, 48, 56)
_MMA_UNROLLS = (1, 2, 3, 4, 6, 7, 8)
_EVEN = 0.8
"""Blocks of tensor cores are spread over the multiprocessors at least this evenly."""


@functools.lru_cache(maxsize=4096)
def candidates(n: int, k: int, num_tokens: int, device: DeviceInfo) -> tuple[SkinnyGemmConfig, ...]:
    """Return the configurations worth measuring for a product on a GPU, the likeliest first.

    Dot products come first up to two tokens, where they were faster on every shape, tensor cores
    beyond. Of each form the model's best, then what follows in its order: of the first half not
    more than two of one block size and three of one number of outputs, as long as there are others.
    The public settings that the model does not put far behind come before the rest. Near its
    optimum the model knows less than a measurement.
    """
    dots: list[SkinnyGemmConfig] = []
    if num_tokens <= MAX_FMA_TOKENS:
        times = {c: estimate_us(c, n, k, device) for c in _possible(n, k, num_tokens)}
        ranked = sorted(times, key=times.__getitem__)
        settings = _PUBLIC.get(num_tokens, _PUBLIC_OF_MORE).split()
        public = {config_of(KERNEL, f"{num_tokens}/{setting}") for setting in settings}
        limit = _WORTH_A_TRY * times[ranked[0]]
        known = [c for c in ranked if c in public and times[c] < limit]
        dots = _of_many_kinds(ranked, known, _MOST_DOTS.get(num_tokens, _MOST_DOTS_OF_MORE))
    tile_m = SkinnyGemmConfig(num_tokens, 64, 8, 1, 8, MMA).tile_m
    tiles = [replace(c, num_rows=num_tokens) for c in _mma_candidates(n, k, tile_m, device)]
    if num_tokens == 1:
        tiles = tiles[:_MOST_TILES_OF_ONE]
    return tuple(dots + tiles if num_tokens <= _FEW_TOKENS else tiles + dots)


@functools.lru_cache(maxsize=1024)
def _mma_candidates(n: int, k: int, tile_m: int, device: DeviceInfo) -> list[SkinnyGemmConfig]:
    """Return those with tensor cores, for which all tokens of a tile are alike."""
    possible = _possible_mma(n, k, tile_m, device)
    possible.sort(key=lambda config: estimate_mma_us(config, n, k, device))
    return _of_many_kinds(possible, [], _MOST_TILES)


def _of_many_kinds(
    ranked: list[SkinnyGemmConfig], known: list[SkinnyGemmConfig], most: int
) -> list[SkinnyGemmConfig]:
    found: list[SkinnyGemmConfig] = []
    for config in ranked:
        if len(found) == most // 2:
            break
        sizes = sum(c.block_size == config.block_size for c in found)
        outputs = sum(c.outputs_per_block == config.outputs_per_block for c in found)
        if sizes < _OF_ONE_BLOCK_SIZE and outputs < _OF_ONE_OUTPUTS:
            found.append(config)
    every = dict.fromkeys((*found, *known, *ranked))
    return sorted(list(every)[:most], key=ranked.index)


def _possible(n: int, k: int, num_tokens: int) -> list[SkinnyGemmConfig]:
    """Return what is valid and has something to do for most threads, vectors and outputs."""
    every = itertools.product(_BLOCK_SIZES, _OUTPUTS, _UNROLLS, VECTOR_WIDTHS)
    found = [
        config
        for config in itertools.starmap(functools.partial(SkinnyGemmConfig, num_tokens), every)
        if config.is_valid()
        and config.outputs_per_block <= n
        and config.block_size * config.vector_width <= 2 * k
        and config.block_size * config.vector_width * (config.k_unroll - 1) < k
    ]
    return found or [SkinnyGemmConfig(num_tokens, 32, 1, 1, 8)]  # it fits any product


def _possible_mma(n: int, k: int, num_tokens: int, device: DeviceInfo) -> list[SkinnyGemmConfig]:
    """Return what is valid on tensor cores, has work for its warps, and is spread over the GPU."""
    steps, sms = -(-k // 32), device.num_sms
    found = []
    for outputs, split in itertools.product(_MMA_OUTPUTS, (1, 2, 4, 8)):
        smallest = SkinnyGemmConfig(num_tokens, 64, outputs, 1, 8, MMA, split)
        blocks = smallest.blocks(n)
        if blocks < _EVEN * sms * -(-blocks // sms) and (blocks > sms or outputs > 8):
            continue
        for size, unroll in itertools.product(_MMA_BLOCK_SIZES, _MMA_UNROLLS):
            warps = size // 32 * split
            if warps <= 2 * steps and warps * (unroll - 1) < steps:
                config = SkinnyGemmConfig(num_tokens, size, outputs, unroll, 8, MMA, split)
                if config.is_valid(device):
                    found.append(config)
    return found or [SkinnyGemmConfig(num_tokens, 64, 8, 1, 8, MMA)]


# --- The model -----------------------------------------------------------------------------------

_BYTES_A_NS_AN_SM = 32.0
_MOST_BYTES_A_NS_OF_ONE_SM = 64.0
_L1_BYTES_A_NS = 110.0
_LANES_A_NS = 150.0
_BEGIN_NS, _LATENCY_NS, _END_NS = 150.0, 750.0, 250.0
_SUM_NS, _WARP_NS = 4.0, 6.0
_START_NS = 45.0
_FEW_WARPS = 2.0
_OVERLAP = 4


def estimate_us(config: SkinnyGemmConfig, n: int, k: int, device: DeviceInfo) -> float:
    """Return the model's time, to compare configurations by.

    A multiprocessor has four things to do at once, and the slowest counts most: its share of the
    weight at the speed of memory; the same with as many bytes in flight as its blocks hold, each
    block for as long as its rounds take, and the longer the fewer warps have columns to load;
    instructions; and what comes through L1. To that come the start of the resident blocks, one
    after the other, and what a block takes at its ends.
    """
    rows, outputs, width = config.num_rows, config.outputs_per_block, config.vector_width
    blocks = config.blocks(n)
    per_sm = -(-blocks // device.num_sms)
    resident = min(per_sm, config.blocks_per_sm)
    rounds = -(-k // (width * config.block_size * config.k_unroll))
    ends = _BEGIN_NS + _END_NS + _SUM_NS * rows * outputs + _WARP_NS * config.block_size / 32
    weight = 2 * outputs * k
    memory = blocks * weight / device.num_sms / _BYTES_A_NS_AN_SM
    in_flight = resident * weight / (rounds * _LATENCY_NS + ends)
    warps = resident * min(config.block_size, -(-k // width)) / 32
    stream = per_sm * weight / min(in_flight, _MOST_BYTES_A_NS_OF_ONE_SM)
    stream *= 1 + _FEW_WARPS / warps
    slots = per_sm * rounds * config.k_unroll * config.block_size
    lanes = outputs * (width * (rows + 1) + 2) + rows * (width + 2) + 8
    work = slots * lanes / _LANES_A_NS
    near = per_sm * 2 * k * (rows + outputs) / _L1_BYTES_A_NS
    together: float = sum(t**_OVERLAP for t in (memory, stream, work, near)) ** (1 / _OVERLAP)
    return (together + ends + _START_NS * resident) / 1000


_MMA_BYTES_A_NS_AN_SM, _MMA_ENDS_NS = 30.0, 900.0
_MMA_BYTES_IN_FLIGHT, _MMA_THREADS = 60_000, 512
"""What is enough for a multiprocessor."""

_WAVE, _FLIGHT, _THREADS, _TAIL, _ODD = 0.094, 0.144, 0.041, 0.037, 0.049
_SPLIT, _FEW, _DEEP, _ONE_ROUND = 0.031, 0.125, 0.008, 0.02
"""What is lost, in parts of the time: by twice the waves; by an e-th of the bytes in flight, or of
the threads, that are enough; by a last round of idle warps; by rows of a product that no output
has; by a cluster twice as large; by blocks for an e-th of the multiprocessors only; by a
step more in flight; and won where one round is enough. Fitted to 2,300 times in the chain, H200."""


def estimate_mma_us(config: SkinnyGemmConfig, n: int, k: int, device: DeviceInfo) -> float:
    """Return the model's time of the form with tensor cores: that of memory, and what is lost."""
    sms, steps, at_once = device.num_sms, -(-k // 32), config.steps_of_round()
    weight, blocks, outputs = 2 * n * k / sms, config.blocks(n), config.outputs_per_block
    per_sm = -(-blocks // sms)
    resident = min(per_sm, config.blocks_per_sm)
    threads = resident * config.block_size
    rounds = -(-steps // at_once)
    in_flight = 2 * threads * config.k_unroll * outputs
    enough = min(_MMA_BYTES_IN_FLIGHT, 0.9 * weight)
    lost = (
        _WAVE * math.log2(-(-per_sm // resident))
        + _FLIGHT * max(0.0, math.log(enough / in_flight))
        + _THREADS * max(0.0, math.log(_MMA_THREADS / threads))
        + _TAIL * (rounds * at_once / steps - 1)
        + _ODD * (-(-outputs // 8) * 8 / outputs - 1)
        + _SPLIT * math.log2(config.split_k)
        + _FEW * max(0.0, math.log(sms / blocks))
        + _DEEP * config.k_unroll
        - _ONE_ROUND * (rounds == 1)
    )
    return (weight / _MMA_BYTES_A_NS_AN_SM + _MMA_ENDS_NS) * math.exp(lost) / 1000
