"""Candidates of the skinny GEMM, ranked by a model of their time."""

from __future__ import annotations

import functools
import itertools

from k3cupy.choose.table import config_of
from k3cupy.kernels.skinny_gemm import KERNEL, VECTOR_WIDTHS, SkinnyGemmConfig
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

_NUM_CANDIDATES, _DIFFERENT = 16, 8
_WORTH_A_TRY = 1.3
"""A public setting is one up to this many times the model's best time."""

_OF_ONE_BLOCK_SIZE, _OF_ONE_OUTPUTS = 2, 3


@functools.lru_cache(maxsize=4096)
def candidates(n: int, k: int, num_tokens: int, device: DeviceInfo) -> tuple[SkinnyGemmConfig, ...]:
    """Return the configurations worth measuring for a product on a GPU, the likeliest first.

    The model's best, then what follows in its order: of the first eight not more than two of one
    block size and three of one number of outputs, as long as there are others. The public settings
    that the model does not put far behind come before the rest. Near its optimum the model knows
    less than a measurement.
    """
    times = {config: estimate_us(config, n, k, device) for config in _possible(n, k, num_tokens)}
    ranked = sorted(times, key=times.__getitem__)
    settings = _PUBLIC.get(num_tokens, _PUBLIC_OF_MORE).split()
    public = {config_of(KERNEL, f"{num_tokens}/{setting}") for setting in settings}
    limit = _WORTH_A_TRY * times[ranked[0]]
    known = [c for c in ranked if c in public and times[c] < limit]
    found: list[SkinnyGemmConfig] = []
    for config in ranked:
        sizes = sum(c.block_size == config.block_size for c in found)
        outputs = sum(c.outputs_per_block == config.outputs_per_block for c in found)
        if sizes < _OF_ONE_BLOCK_SIZE and outputs < _OF_ONE_OUTPUTS:
            found.append(config)
    every = dict.fromkeys((*found[:_DIFFERENT], *known, *ranked))
    return tuple(sorted(list(every)[:_NUM_CANDIDATES], key=ranked.index))


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
