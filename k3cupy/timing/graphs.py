"""Timing short kernels: a CUDA graph of many launches, replayed; and the host's share of a call."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

_HOLD_CYCLES, _MOST_CYCLES = 1 << 18, 1 << 24
"""Cycles of the GPU, a little more than half a nanosecond each."""

_LEAST_US = 0.0001
"""What hides behind its neighbours adds no time; a table has no times of 0."""


def capture(
    body: Callable[[], Any], launches: int, first: Callable[[], Any] | None = None
) -> torch.cuda.CUDAGraph:
    """Record ``launches`` calls of ``body`` one after the other, after one call to warm up.

    Before them comes ``first``, if anything. Other threads may load kernels meanwhile: only what
    this thread does is captured or refused.
    """
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        # Not `torch.cuda.graph`: it gives all free memory back first, which takes longer than this.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            if first is not None:
                first()
            for _ in range(launches):
                body()
        finally:
            graph.capture_end()
    return graph


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


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
            found += [us / launches for us in _turn(graph, replays, warm)]
    return [statistics.median(found) for found in times]


def _turn(graph: torch.cuda.CUDAGraph, replays: int, warm: int) -> list[float]:
    """Return the microseconds of each timed replay, none of which waited for the host.

    A short graph is over before the host has queued the next replay, the more so while other
    threads compile. Where a replay, or the last mark, was queued too late, the turn is taken again,
    and the GPU is held back first, for longer each time.
    """
    hold = 0
    while True:
        for _ in range(warm):
            graph.replay()
        if hold:
            torch.cuda._sleep(hold)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        marks[0].record()
        was_late = False
        for begin, end in itertools.pairwise(marks):
            graph.replay()
            was_late |= begin.query()
            end.record()
        was_late |= marks[-1].query()  # else the last mark may have come behind a break
        torch.cuda.synchronize()
        if not was_late or hold >= _MOST_CYCLES:
            return [a.elapsed_time(b) * 1000 for a, b in itertools.pairwise(marks)]
        hold = 4 * hold or _HOLD_CYCLES


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
    """Bodies as graphs of many launches, to be timed again and again.

    Each graph begins with ``first``, if anything, which counts where nothing is subtracted.
    """

    def __init__(self, launches: int, first: Callable[[], Any] | None = None) -> None:
        self._launches, self._first = launches, first
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def record(self, name: Hashable, body: Callable[[], Any]) -> None:
        """Keep a body under a name."""
        self._graphs[name] = capture(body, self._launches, self._first)

    def added(
        self, names: Sequence[Hashable], bases: Sequence[Hashable], effort: Effort
    ) -> list[float]:
        """Return the microseconds that each body adds to its base, measured in the same turns."""
        every = list(dict.fromkeys((*bases, *names)))
        us = dict(zip(every, self.measure(every, effort), strict=True))
        pairs = zip(names, bases, strict=True)
        return [max(round(us[name] - us[base], 4), _LEAST_US) for name, base in pairs]

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
