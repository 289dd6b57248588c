"""Decode a few tokens through one Kimi-K3 MLA layer, in two fused forms, and check every step.

    python examples/mla_decode_step.py
    python examples/mla_decode_step.py --kv-cache fp8 --rope --tokens 16

The weights are random and have the real sizes. A batch of sequences, each with a past of its own
length, makes one token a step. It runs around the fused epilogue, in fewer launches, and through a
plain PyTorch layer, each with a cache of its own, and the outputs must agree, or the exit status is
1. On a GPU a second table says what the fused forms gain. Without a GPU the operations run their
CPU reference: the same numbers, no speed.

`mla_layer.py`, beside this file, has the layers: read `FusedLayer.project` and
`FewerLaunchesLayer.query_call` to see the calls' arguments arise. `mla_prefill_decode.py` fills the
cache by real prefill instead of random rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
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
    rope_option,
    seed_option,
    show_error,
)
from mla_layer import (
    LATENT_DIM,
    POISON_BYTE,
    CacheFormat,
    EpilogueCall,
    FewerLaunchesLayer,
    FusedLayer,
    PagedCache,
    PlainLayer,
    Weights,
    plain_epilogue,
    rope_table,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor

import k3cupy

LONGEST_PAST = 256  # the random pasts have 1 to 256 tokens


@click.command()
@click.option(
    "--kv-cache",
    "kv_cache",
    type=click.Choice(["bf16", "fp8", "fp8_ds_mla"]),
    default="bf16",
    show_default=True,
    help="How the cache stores a row. fp8 quantises the query too.",
)
@rope_option
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Sequences in the batch; each makes one token a step.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=4, show_default=True, help="Decode steps."
)
@device_option
@seed_option
@click.pass_context
def main(
    ctx: click.Context,
    kv_cache: str,
    rope: bool,
    tokens: int,
    steps: int,
    device_name: str | None,
    seed: int,
) -> None:
    """Run one Kimi-K3 MLA decode layer with k3cupy's fused operations, and check it."""
    console = Console()
    device = choose_device(device_name)
    demo = Demo.random(kv_cache, rope, tokens, steps, device, seed)

    console.print(
        f"One Kimi-K3 MLA layer on {describe(device)}: {tokens} sequences, "
        f"{kv_cache} cache, {'RoPE' if rope else 'no RoPE'}"
    )
    errors = run_steps(demo, steps, console)
    if device.type == "cuda":
        errors += time_on_gpu(demo, console)
    else:
        console.print("No times: the CPU path is the reference, made to be right, not fast.")

    if not all_agree(errors):
        console.print(f"FAILED: an error is above {TOLERANCE:g} or NaN.", style="bold red")
        ctx.exit(1)
    console.print(f"All outputs agree with plain PyTorch to {TOLERANCE:g}.", style="green")


@dataclass
class Demo:
    """All layers with the same weights and the same past, and where each sequence stands."""

    fused: FusedLayer
    fewer: FewerLaunchesLayer
    plain: PlainLayer
    positions: Tensor  # [B] int64: tokens in the cache = position of the next one
    hidden: Tensor  # [B, 7168] bf16: the layer's input of the present step
    generator: torch.Generator

    @classmethod
    def random(
        cls, kv_cache: str, rope: bool, tokens: int, steps: int, device: torch.device, seed: int
    ) -> Demo:
        # All random numbers come from the CPU: the same ones whatever the device.
        generator = torch.Generator().manual_seed(seed)
        max_len = LONGEST_PAST + steps
        kv = CacheFormat.named(kv_cache, device)
        weights = Weights.random(generator, device)
        cos_sin_cache = rope_table(max_len, device) if rope else None
        paged = PagedCache(tokens, max_len, kv, generator, device)
        dense = kv.empty(tokens, max_len, device=device)

        # The past: random rows, in both caches. Every other row stays NaN.
        lengths = torch.randint(1, LONGEST_PAST + 1, (tokens,), generator=generator).to(device)
        past = torch.randn(tokens, LONGEST_PAST, LATENT_DIM, generator=generator).to(device)
        stored = kv.encode(past.to(torch.bfloat16))
        for b, length in enumerate(lengths.tolist()):
            dense[b, :length] = stored[b, :length]
            paged.rows()[paged.slot_table[b, :length]] = stored[b, :length]

        of_both = fused_epilogue, cos_sin_cache
        return cls(
            fused=FusedLayer(weights, kv, paged, *of_both),
            fewer=FewerLaunchesLayer(weights, kv, paged.copy(), *of_both),
            plain=PlainLayer(weights, kv, dense, cos_sin_cache),
            positions=lengths,
            hidden=random_hidden(tokens, generator, device),
            generator=generator,
        )

    def advance(self) -> None:
        """On to the next token of every sequence."""
        self.positions += 1
        self.hidden = random_hidden(len(self.hidden), self.generator, self.hidden.device)


def fused_epilogue(**call: Any) -> Tensor:
    return k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**call)


def run_steps(demo: Demo, steps: int, console: Console) -> list[float]:
    """Decode `steps` tokens a sequence, and print one line a step. Returns the errors."""
    table = Table(title="Decode steps, against plain PyTorch")
    table.add_column("step", justify="right")
    for column in ("context", "relative error", "in fewer launches", "by", "bytes moved"):
        table.add_column(column, justify="right")
    errors = []
    reasons = []
    for step in range(1, steps + 1):
        if step > 1:
            demo.advance()

        # The step itself, in its three parts: before, in and after the epilogue. `explain` takes
        # the epilogue's own arguments and says what will run, and why, without running it.
        call = demo.fused.project(demo.hidden, demo.positions)
        choice = k3cupy.explain_mla_decode(**call)
        mqa_q = fused_epilogue(**call)
        output = demo.fused.attend(mqa_q, demo.positions)

        # The same in fewer launches: one operation makes mqa_q of what the first projection gives.
        front = demo.fewer.query_call(demo.hidden, demo.positions)
        query = k3cupy.explain_mla_decode_query(**front)
        output_of_fewer = demo.fewer(demo.hidden, demo.positions)

        expected = demo.plain(demo.hidden, demo.positions)
        found = [relative_error(each, expected) for each in (output, output_of_fewer)]
        errors += found
        reasons += [f"Why this epilogue: {choice}", f"Why this query front: {query}"]
        lengths = (demo.positions + 1).tolist()
        table.add_row(
            str(step),
            f"{min(lengths)} to {max(lengths)}",
            *map(show_error, found),
            choice.runs_on,
            f"{bytes_moved(call, mqa_q) / 1024:.1f} KiB",
        )
    console.print(table)
    for reason in dict.fromkeys(reasons):
        console.print(reason, markup=False, highlight=False)
    return errors


def bytes_moved(call: EpilogueCall, mqa_q: Tensor) -> int:
    """What the epilogue must read and write: each input once, mqa_q once, one cache row a token."""
    tokens = len(mqa_q)
    names = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping", "positions")
    moved: int = sum(call[name].nbytes for name in names if name in call)
    if "cos_sin_cache" in call:
        moved += tokens * call["cos_sin_cache"][0].nbytes
    moved += mqa_q.nbytes + tokens * call["kv_cache"][0, 0].nbytes
    return moved


def time_on_gpu(demo: Demo, console: Console) -> list[float]:
    """Time the last step again in all forms, and print the table. Returns the errors.

    Writing the same token to the same slot twice changes nothing, so a step may be repeated.
    """
    fused = demo.fused
    plain = FusedLayer(fused.weights, fused.kv, fused.cache, plain_epilogue, fused.cos_sin_cache)
    expected = demo.plain(demo.hidden, demo.positions)
    call = fused.project(demo.hidden, demo.positions)
    layer_us, errors = [], []
    for layer in (plain, fused, demo.fewer):
        cache_bytes = layer.cache.rows().view(torch.uint8)
        graph, output = capture(partial(layer, demo.hidden, demo.positions), calls=20)
        layer_us.append(median_us(graph, calls=20))
        # A fast wrong answer is no answer: wipe the step's rows, and a replay must restore them.
        cache_bytes[call["slot_mapping"]] = POISON_BYTE
        graph.replay()
        errors.append(relative_error(output, expected))

    epilogue_us = []
    for epilogue in (plain_epilogue, fused_epilogue):
        graph, _ = capture(partial(epilogue, **call), calls=200)
        epilogue_us.append(median_us(graph, calls=200))

    table = Table(title=f"Time a step, median of {REPLAYS} CUDA graph replays")
    for column in ("what", "plain epilogue", "fused epilogue", "fewer launches", "speed-up"):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows = {"the whole layer": layer_us, "the epilogue alone": epilogue_us}
    for what, (before, *after) in rows.items():
        times = [f"{us:.2f} us" for us in (before, *after)]
        speed_up = f"{before / after[-1]:.2f} x"
        table.add_row(what, *times, *["-"] * (2 - len(after)), speed_up)
    console.print(table)
    console.print(f"Errors of the replayed layers: {', '.join(map(show_error, errors))}")
    return errors


if __name__ == "__main__":
    main()
