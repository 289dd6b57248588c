"""What the demos share: the device, errors in words, and timing by CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import click
import torch
from mla_layer import HIDDEN_SIZE
from torch import Tensor

# The largest relative error that any token may have: |fused - plain| / |plain| over its 7168
# outputs. Both layers round at the same places, so they differ only where a sum in another order
# tips a rounding: by 0.4% of a bf16 value, by 6% of an fp8 value, in few values of many. Seen with
# every format, 1 to 64 tokens and the GEMMs of one side summed in another order: 0.5% at most
# with bf16 and fp8_ds_mla, 0.9% with fp8. Twice that is allowed. A lost or misplaced row cannot
# hide below: rows that nobody wrote are NaN. (Last-bit faults are for the tests, not for a demo.)
TOLERANCE = 2e-2

REPLAYS = 15  # timings are medians over this many graph replays


device_option = click.option(
    "--device",
    "device_name",
    type=click.Choice(["cpu", "cuda"]),
    default=None,
    help="Default: cuda where PyTorch finds a GPU, else cpu.",
)
seed_option = click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of all random numbers.",
)
rope_option = click.option(
    "--rope", is_flag=True, help="Rotate by position. Kimi-K3's own layers do not."
)


def choose_device(name: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise click.BadParameter(
            "expected a GPU that PyTorch can use, got none. Use --device cpu",
            param_hint="--device",
        )
    return torch.device(name or ("cuda" if has_gpu else "cpu"))


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def random_hidden(tokens: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(tokens, HIDDEN_SIZE, generator=generator).to(device, torch.bfloat16)


def relative_error(output: Tensor, expected: Tensor) -> float:
    """The worst token's |output - expected| / |expected|; NaN if anything is NaN."""
    difference = (output.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1)).max())


def show_error(error: float) -> str:
    if error == 0:
        return "0 (same bits)"
    return f"{error:.1e}" if error <= TOLERANCE else f"[bold red]{error:.1e}[/]"


def all_agree(errors: list[float]) -> bool:
    # "a <= b" for all, and not "a > b" for none: NaN must fail too.
    return all(error <= TOLERANCE for error in errors)


def capture(
    work: Callable[[], Any], calls: int, errors: str = "global"
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `calls` calls of `work`, and what its last call returned.

    `errors` says whose forbidden calls end the capture: those of all threads, or, as NCCL's own
    thread makes some, those of this one alone, "thread_local".
    """
    # Warm up on a side stream, as PyTorch asks before a capture: kernels compile and load here.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=errors):
        for _ in range(calls):
            output = work()
    return graph, output


def median_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds for one of the graph's `calls` calls: the median over its replays."""
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)
