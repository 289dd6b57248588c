"""One MLA decode layer on two GPUs, equal to one GPU, and what a step takes on either.

    torchrun --nproc-per-node 2 examples/tensor_parallel_decode.py
    torchrun --nproc-per-node 2 examples/tensor_parallel_decode.py --device cpu --heads 4

Tensor parallelism as engines do it, with as many ranks as torchrun starts. Each rank has its share
of the heads: q_b and kv_b (here absorbed, W_UK and W_UV) are split by columns, o_proj by rows, and
one all-reduce adds the ranks' outputs. What has no heads, qkv_a, the norms and the latent cache,
each rank has whole:

    hidden --qkv_a, norms--> q_a, latent row      the same on every rank
           --q_b, W_UK, EPILOGUE, attention, W_UV-->   the rank's own heads
           --o_proj--> a part of every output  --ALL-REDUCE--> output

k3cupy knows nothing of it: a rank calls the same operations on its heads. On GPUs the step, the
all-reduce of NCCL included, is captured in a CUDA graph, which is what is checked and timed. On the
CPU gloo adds, and nothing is timed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from demo_tools import (
    REPLAYS,
    TOLERANCE,
    all_agree,
    capture,
    choose_device,
    describe,
    device_option,
    median_us,
    random_hidden,
    relative_error,
    seed_option,
)
from mla_layer import LATENT_DIM, CacheFormat, FusedLayer, PagedCache, Weights
from torch import Tensor

import k3cupy

PAST = 64  # tokens in the cache of every sequence
CALLS = 10  # steps in the graph that is timed


@click.command()
@click.option(
    "--heads", type=click.IntRange(1), default=24, show_default=True, help="Of all ranks."
)
@click.option(
    "--tokens", type=click.IntRange(1), default=4, show_default=True, help="In the batch."
)
@device_option
@seed_option
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the times there.")
def main(
    heads: int, tokens: int, device_name: str | None, seed: int, json_file: Path | None
) -> None:
    """Decode one step of an MLA layer on all ranks of torchrun, and on each alone; compare."""
    rank, ranks, local = (int(os.environ.get(n, 0)) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not ranks:
        raise click.UsageError("expected ranks, got none. Start it by torchrun --nproc-per-node 2")
    if heads % ranks:
        raise click.UsageError(f"--heads: expected a multiple of {ranks} ranks, got {heads}")
    device = choose_device(device_name)
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise click.UsageError(
                f"expected a GPU a rank, got {torch.cuda.device_count()}. Start fewer ranks"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        failed = run(heads, tokens, seed, device, rank, ranks, json_file)
    finally:
        dist.destroy_process_group()
    if failed:
        raise SystemExit(1)


def run(
    heads: int,
    tokens: int,
    seed: int,
    device: torch.device,
    rank: int,
    ranks: int,
    json_file: Path | None,
) -> bool:
    """Run and compare. Returns whether any rank saw a difference."""
    tell = print if rank == 0 else _silent
    # All ranks draw the same numbers, on the CPU, and keep what is theirs.
    generator = torch.Generator().manual_seed(seed)
    weights = Weights.random(generator, device, heads)
    hidden = random_hidden(tokens, generator, device)
    past = torch.randn(tokens, PAST, LATENT_DIM, generator=generator).to(device, torch.bfloat16)
    positions = torch.full((tokens,), PAST, device=device)

    alone = layer_of(weights, past, seed, device)
    shared = layer_of(weights.shard(rank, ranks), past, seed, device)

    def on_all() -> Tensor:
        output = shared(hidden, positions)
        dist.all_reduce(output)
        return output

    tell(
        f"One MLA layer, {tokens} sequences, {heads} heads on {ranks} x {describe(device)}, "
        f"{heads // ranks} a rank"
    )
    expected = alone(hidden, positions)
    outputs = {"eager": on_all()}
    times = {}
    if device.type == "cuda":
        graph, outputs["in a CUDA graph"] = capture(on_all, 1, "thread_local")
        outputs["in a CUDA graph"].zero_()
        graph.replay()
        torch.cuda.synchronize()
        one = partial(alone, hidden, positions)
        times = {"one": time_us(one), "all": time_us(on_all)}

    # The sums of o_proj are those of fewer heads each, added at the end: not the same bits.
    errors = [relative_error(output, expected) for output in outputs.values()]
    for name, error in zip(outputs, errors, strict=True):
        tell(f"{name}: worst relative error {error:.1e} against one {device.type}")
    # As bytes: rows that nobody wrote are NaN.
    same_rows = torch.equal(*(layer.cache.blocks.view(torch.uint8) for layer in (shared, alone)))
    wrong = torch.tensor([float(not (all_agree(errors) and same_rows))], device=device)
    dist.all_reduce(wrong)

    for name, us in times.items():
        tell(f"a step on {name}: {us:.1f} us, median of {REPLAYS} replays of {CALLS} steps")
    if json_file is not None and rank == 0:
        write(json_file, {"heads": heads, "tokens": tokens, "ranks": ranks, "us": times}, device)
    if wrong.item():
        tell(f"FAILED: an error is above {TOLERANCE:g}, or NaN, or a cache differs.")
    else:
        tell(f"All ranks agree with one alone to {TOLERANCE:g}, and their caches bit for bit.")
    return bool(wrong.item())


def layer_of(weights: Weights, past: Tensor, seed: int, device: torch.device) -> FusedLayer:
    """A layer with a cache of its own, which holds the past."""
    kv = CacheFormat("bf16")
    generator = torch.Generator().manual_seed(seed)  # the same blocks for every layer
    cache = PagedCache(len(past), PAST + 1, kv, generator, device)
    for slots, rows in zip(cache.slot_table, past, strict=True):
        cache.rows()[slots[:PAST]] = kv.encode(rows)
    return FusedLayer(weights, kv, cache, epilogue, None, k3cupy.low_latency_linear)


def epilogue(**call: Any) -> Tensor:
    return k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**call)


def time_us(step: Callable[[], Tensor]) -> float:
    """Microseconds of a step in a CUDA graph, all ranks at once."""
    graph, _ = capture(step, CALLS, "thread_local")
    dist.barrier()
    return median_us(graph, CALLS)


def write(file: Path, found: dict[str, Any], device: torch.device) -> None:
    from k3cupy.timing import environment

    method = f"median of {REPLAYS} replays of a CUDA graph of {CALLS} steps, one layer's weights"
    where = environment.describe(device.index, None) if device.type == "cuda" else {}
    document = {"environment": where, "method": method, **found}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _silent(text: str) -> None:
    """What ranks but the first say."""


if __name__ == "__main__":
    main()
