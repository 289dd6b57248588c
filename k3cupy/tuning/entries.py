"""What is timed against each other, and the entries that tables make of the times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from k3cupy.call import choice
from k3cupy.choose.table import AS_GOOD, Entry, key_of, measured


class Candidate(NamedTuple):
    """A kernel with its configuration, or the framework's linear.

    Attributes:
        kernel: as tables name it.
        config: its configuration; None for the framework's linear.
    """

    kernel: str
    config: Any = None

    def __str__(self) -> str:
        """As tables name it: ``fused_a 8/16/512/8/8/8/1/1/4``."""
        return self.kernel if self.config is None else f"{self.kernel} {key_of(self.config)}"


LINEAR = Candidate(choice.LINEAR)

Known = Mapping[tuple[str, int], Entry]
"""What was measured so far, by ``Entry.key``."""


def times_of(entry: Entry) -> dict[Candidate, float]:
    """Return the time of each candidate."""
    times = entry.times.items()
    return {Candidate(kernel, c): us for kernel, of in times for c, us in of.items()}


def entry_from(problem: str, size: int, times: Mapping[Candidate, float]) -> Entry:
    """Return the entry that ``times_of`` takes apart, of candidates in microseconds."""
    of_kernels: dict[str, dict[Any, float]] = {}
    for (kernel, config), us in times.items():
        of_kernels.setdefault(kernel, {})[config] = us
    return measured(problem, size, of_kernels)


def settled(entries: Iterable[Entry]) -> dict[tuple[str, int], Entry]:
    """Return those entries of one problem that choose otherwise when all sizes are looked at.

    Of the configurations as good as the fastest of a size, the one that is best over all sizes is
    preferred, so that few instances have to be compiled. Products are as they are: a table prefers
    only where one kernel was measured.
    """
    alone = [
        (entry, times)
        for entry in entries
        for kernel, times in entry.times.items()
        if len(entry.times) == 1 and kernel != LINEAR.kernel
    ]
    slower: dict[Any, list[float]] = {}
    for _, times in alone:
        for config, us in times.items():
            slower.setdefault(config, []).append(us / min(times.values()))
    changed = {}
    for entry, times in alone:
        close = [c for c, us in times.items() if us <= AS_GOOD * min(times.values())]
        best = min(close, key=lambda config: statistics.fmean(slower[config]))
        if best != entry.config:
            changed[entry.key] = replace(entry, config=best)
    return changed
