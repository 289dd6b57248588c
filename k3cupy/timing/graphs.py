"""Timing short kernels: a CUDA graph of many launches, replayed; and the host's share of a call."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def capture(body: Callable[[], Any], launches: int) -> torch.cuda.CUDAGraph:
    """Record ``launches`` calls of ``body`` one after the other, after one call to warm up.

    Other threads may load kernels meanwhile: only what this thread does is captured or refused.
    """
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(launches):
            body()
    return graph


def measure(
    graphs: Sequence[torch.cuda.CUDAGraph],
    launches: int,
    *,
    rounds: int = 3,
    replays: int = 9,
    warm: int = 2,
) -> list[float]:
    """Return the median microseconds of one launch for each graph.

    The graphs take turns, ``rounds`` times, so that a drift of the machine meets all of them. A
    turn is ``warm`` replays (a graph's own arguments are cold after another graph ran) and
    ``replays`` timed ones.

    Args:
        graphs: what to time.
        launches: calls that each graph holds.
        rounds: turns of each graph.
        replays: timed replays a turn.
        warm: replays before them, not timed.
    """
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, found in zip(graphs, times, strict=True):
            for _ in range(warm):
                graph.replay()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
            torch.cuda.synchronize()
            found += [
                start.elapsed_time(end) * 1000 / launches
                for start, end in itertools.pairwise(marks)
            ]
    return [statistics.median(found) for found in times]


def host_us(body: Callable[[], Any], *, calls: int = 500, batches: int = 5) -> float:
    """Return the host's microseconds for one repeated eager call, the best of several batches."""
    body()
    found = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            body()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return round(min(found), 2)
