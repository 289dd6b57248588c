"""Timing short kernels: a CUDA graph of many launches, replayed; and the host's share of a call."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


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


@dataclass(frozen=True)
class Effort:
    """How long a body is timed.

    Attributes:
        rounds: turns of each graph.
        replays: timed replays a turn.
        warm: replays before them, not timed.
    """

    rounds: int = 3
    replays: int = 5
    warm: int = 2


class Recorded:
    """Bodies as graphs of many launches, to be timed again and again."""

    def __init__(self, launches: int) -> None:
        self._launches = launches
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def record(self, name: Hashable, body: Callable[[], Any]) -> None:
        """Keep a body under a name."""
        self._graphs[name] = capture(body, self._launches)

    def __contains__(self, name: Hashable) -> bool:
        """Whether a body was recorded under a name."""
        return name in self._graphs

    def measure(self, names: Sequence[Hashable], effort: Effort) -> list[float]:
        """Return the microseconds of one launch of each recorded body."""
        found = [self._graphs[name] for name in names]
        return [round(us, 4) for us in measure(found, self._launches, **asdict(effort))]


def in_turns(run: Callable[[_T], Any], of: Sequence[_T]) -> Callable[[], Any]:
    """Return a body that gives each launch the next one of several sets of tensors."""
    turn = itertools.cycle(of)
    return lambda: run(next(turn))


def host_us(body: Callable[[], Any], *, calls: int = 500, batches: int = 5) -> float:
    """Return the host's microseconds for one repeated eager call, the best of several batches."""
    return host_times([body], calls=calls, batches=batches)[0]


def host_times(
    bodies: Sequence[Callable[[], Any]], *, calls: int = 500, batches: int = 5
) -> list[float]:
    """Return the host's microseconds of one call of each body, which take turns batch by batch."""
    best = [math.inf] * len(bodies)
    for body in [*bodies] * 3:  # the third call is as all that follow
        body()
    for _ in range(batches):
        for i, body in enumerate(bodies):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                body()
            best[i] = min(best[i], (time.perf_counter() - start) / calls * 1e6)
    return [round(us, 2) for us in best]
