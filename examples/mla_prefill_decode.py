"""Prefill prompts of different lengths through one Kimi-K3 MLA layer, then decode, and check it.

    python examples/mla_prefill_decode.py
    python examples/mla_prefill_decode.py --kv-cache fp8 --rope --prompts 8 --chunk 64

The weights are random and have the real sizes. Prompts arrive in chunks; from the second chunk on
a prompt has a context, which is read back from the paged cache and attended to in pieces. When all
prompts are in, every sequence makes a few tokens over the same cache, by the decode epilogue. Each
step also runs through a plain PyTorch layer with a cache of its own, and the two outputs must
agree, or the exit status is 1. On a GPU a last table says what the fused epilogues gain. Without a
GPU the operations run their CPU reference: the same numbers, no speed.

`mla_prefill_layer.py`, beside this file, has the prefill layers: read `FusedPrefill.project` and
`FusedPrefill.gather` to see the calls' arguments arise. `mla_layer.py` has decode.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from mla_layer import CacheFormat, FusedLayer, PagedCache, PlainLayer, Weights, rope_table
from mla_prefill_layer import (
    CONTEXT_ROWS,
    FUSED,
    PLAIN,
    Arguments,
    Chunk,
    FusedPrefill,
    PlainPrefill,
    Span,
    context_call,
    insert_call,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor

import k3cupy


@click.command()
@click.option(
    "--kv-cache",
    "kv_cache",
    type=click.Choice(["bf16", "fp8", "fp8_ds_mla"]),
    default="bf16",
    show_default=True,
    help="How the cache stores a row. With fp8 attention runs on fp8 too.",
)
@rope_option
@click.option(
    "--prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Sequences."
)
@click.option(
    "--longest",
    type=click.IntRange(min=1),
    default=90,
    show_default=True,
    help="Tokens of the longest prompt; the others have 1 to that many.",
)
@click.option(
    "--chunk",
    "chunk_size",
    type=click.IntRange(min=1),
    default=36,
    show_default=True,
    help="Tokens of a prompt that a prefill step takes.",
)
@click.option(
    "--steps", type=click.IntRange(min=0), default=2, show_default=True, help="Decode steps."
)
@device_option
@seed_option
@click.pass_context
def main(
    ctx: click.Context,
    kv_cache: str,
    rope: bool,
    prompts: int,
    longest: int,
    chunk_size: int,
    steps: int,
    device_name: str | None,
    seed: int,
) -> None:
    """Prefill, then decode one Kimi-K3 MLA layer with k3cupy's fused epilogues, and check it."""
    console = Console()
    device = choose_device(device_name)
    demo = Demo.random(kv_cache, rope, prompts, longest, steps, device, seed)
    lengths = demo.lengths.tolist()
    console.print(
        f"One Kimi-K3 MLA layer on {describe(device)}: {prompts} prompts of {min(lengths)} to "
        f"{longest} tokens, {kv_cache} cache, {'RoPE' if rope else 'no RoPE'}"
    )
    chunks = list(demo.chunks(chunk_size))
    errors = run_prefill(demo, chunks, console)
    errors += run_decode(demo, steps, console)
    if device.type == "cuda":
        time_on_gpu(demo, chunks, console)
    else:
        console.print("No times: the CPU path is the reference, made to be right, not fast.")
    if not all_agree(errors):
        console.print(f"FAILED: an error is above {TOLERANCE:g} or NaN.", style="bold red")
        ctx.exit(1)
    console.print(f"All outputs agree with plain PyTorch to {TOLERANCE:g}.", style="green")


@dataclass
class Demo:
    """All four layers with the same weights: prefill and decode, fused and plain."""

    prefill: FusedPrefill
    plain_prefill: PlainPrefill
    decode: FusedLayer
    plain_decode: PlainLayer
    lengths: Tensor  # [B] int64: tokens of each prompt
    generator: torch.Generator

    @classmethod
    def random(
        cls,
        kv_cache: str,
        rope: bool,
        prompts: int,
        longest: int,
        steps: int,
        device: torch.device,
        seed: int,
    ) -> Demo:
        # All random numbers come from the CPU: the same ones whatever the device.
        generator = torch.Generator().manual_seed(seed)
        max_len = longest + steps
        kv = CacheFormat.named(kv_cache, device)
        weights = Weights.random(generator, device)
        table = rope_table(max_len, device) if rope else None
        paged = PagedCache(prompts, max_len, kv, generator, device)
        dense = kv.empty(prompts, max_len, device=device)
        lengths = torch.randint(1, longest + 1, (prompts,), generator=generator)
        lengths[-1] = longest
        return cls(
            prefill=FusedPrefill(weights, kv, paged, table),
            plain_prefill=PlainPrefill(weights, kv, dense, table),
            decode=FusedLayer(weights, kv, paged, fused_decode, table),
            plain_decode=PlainLayer(weights, kv, dense, table),
            lengths=lengths.to(device),
            generator=generator,
        )

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Up to `size` tokens of every prompt that has some left, until none has."""
        device = self.lengths.device
        lengths = self.lengths.tolist()
        for start in range(0, max(lengths), size):
            spans = tuple(
                Span(b, start, min(size, length - start))
                for b, length in enumerate(lengths)
                if length > start
            )
            positions = [torch.arange(span.start, span.start + span.count) for span in spans]
            sequences = [torch.full((span.count,), span.sequence) for span in spans]
            yield Chunk(
                random_hidden(sum(span.count for span in spans), self.generator, device),
                torch.cat(positions).to(device),
                torch.cat(sequences).to(device),
                spans,
            )


def fused_decode(**call: Any) -> Tensor:
    return k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**call)


def run_prefill(demo: Demo, chunks: list[Chunk], console: Console) -> list[float]:
    """All prompts, chunk after chunk, and one line for each. Returns the errors."""
    table = Table(title="Prefill in chunks, against plain PyTorch")
    for column in ("step", "tokens", "context", "worst relative error", "epilogue by", "bytes"):
        table.add_column(column, justify="right")
    errors, reasons = [], []
    for step, chunk in enumerate(chunks, 1):
        # `explain` takes the operation's own arguments and says what will run, and why.
        call = demo.prefill.project(chunk)
        name, arguments = insert_call(demo.prefill.kv, call)
        choice = k3cupy.explain_mla_prefill(name, **arguments)
        q, k, v = FUSED.insert(demo.prefill.kv, call)
        moved = bytes_moved(arguments, [q, k, v] if "v" in arguments else [k])
        output = demo.prefill.attend(chunk, q, k, v)

        errors.append(relative_error(output, demo.plain_prefill(chunk)))
        reasons.append(f"{name}: {choice}")
        context = sum(span.start for span in chunk.spans)
        table.add_row(
            str(step),
            str(len(chunk.hidden)),
            str(context),
            show_error(errors[-1]),
            choice.runs_on,
            f"{moved / 1024:.1f} KiB",
        )
    console.print(table)
    for chunk in (chunk for chunk in chunks if chunk.spans[0].start):
        _, _, name, arguments = context_of(demo, chunk)
        reasons.append(f"{name}: {k3cupy.explain_mla_prefill(name, **arguments)}")
    for reason in dict.fromkeys(reasons):
        console.print(f"Why this epilogue: {reason}", markup=False, highlight=False)
    return errors


def context_of(demo: Demo, chunk: Chunk) -> tuple[Span, Arguments, str, Arguments]:
    """The first piece of a chunk's context: whose, the projected rows, operation, arguments."""
    span = chunk.spans[0]
    gathered = demo.prefill.gather(span.sequence, 0, min(CONTEXT_ROWS, span.start))
    return span, gathered, *context_call(demo.prefill.kv, gathered)


def bytes_moved(arguments: Arguments, outputs: list[Tensor]) -> int:
    """What epilogue 1 must read and write: inputs and outputs once, one cache row a token."""
    tokens = len(arguments["slot_mapping"])
    skipped = ("q", "kv_cache", "cos_sin_cache")
    moved: int = sum(
        value.nbytes
        for name, value in arguments.items()
        if isinstance(value, Tensor) and name not in skipped
    )
    moved += sum(output.nbytes for output in outputs) + tokens * arguments["kv_cache"][0, 0].nbytes
    q = arguments["q"]
    if "v" in arguments:
        moved += q.nbytes
    if "cos_sin_cache" in arguments:
        moved += tokens * arguments["cos_sin_cache"][0].nbytes
        moved += 0 if "v" in arguments else 2 * q[..., 128:].nbytes
    return moved


def run_decode(demo: Demo, steps: int, console: Console) -> list[float]:
    """A few tokens for every sequence over the cache that prefill filled. Returns the errors."""
    if not steps:
        return []
    table = Table(title="Decode over the same cache, against plain PyTorch")
    for column in ("step", "context", "worst relative error", "epilogue by"):
        table.add_column(column, justify="right")
    errors = []
    for step in range(steps):
        positions = demo.lengths + step
        hidden = random_hidden(len(positions), demo.generator, positions.device)
        choice = k3cupy.explain_mla_decode(**demo.decode.project(hidden, positions))
        output = demo.decode(hidden, positions)
        errors.append(relative_error(output, demo.plain_decode(hidden, positions)))
        lengths = (positions + 1).tolist()
        context = f"{min(lengths)} to {max(lengths)}"
        table.add_row(str(step + 1), context, show_error(errors[-1]), choice.runs_on)
    console.print(table)
    return errors


def time_on_gpu(demo: Demo, chunks: list[Chunk], console: Console) -> None:
    """Time the epilogues of the largest chunk, fused and plain, and print the table.

    The same rows go to the same slots again. q is turned again and again where there is RoPE, which
    changes its values and not the time.
    """
    kv = demo.prefill.kv
    chunk = max(chunks, key=lambda chunk: len(chunk.hidden))
    call = demo.prefill.project(chunk)
    rows = [(insert_call(kv, call)[0], len(chunk.hidden), "insert", call)]
    later = [chunk for chunk in chunks if chunk.spans[0].start]
    if later:
        _, gathered, name, _ = context_of(demo, later[-1])
        rows.append((name, len(gathered["k_nope"]), "context", gathered))

    table = Table(title=f"Time of an epilogue, median of {REPLAYS} CUDA graph replays")
    for column in ("operation", "tokens", "plain", "fused", "speed-up"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for name, tokens, which, arguments in rows:
        times = []
        for epilogues in (PLAIN, FUSED):
            graph, _ = capture(partial(getattr(epilogues, which), kv, arguments), calls=100)
            times.append(median_us(graph, calls=100))
        before, after = times
        table.add_row(
            name, str(tokens), f"{before:.2f} us", f"{after:.2f} us", f"{before / after:.2f} x"
        )
    console.print(table)


if __name__ == "__main__":
    main()
