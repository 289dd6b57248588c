"""What is timed against each other, and the entries that tables make of the times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from k3cupy.call import choice
from k3cupy.choose.table import AS_GOOD, Entry, key_of, measured
from k3cupy.kernels import mla_query


class Candidate(NamedTuple):
    """A kernel with its configuration, or the framework's linear, or separate kernels.

    Attributes:
        kernel: as tables name it.
        config: its configuration; None for what has none.
    """

    kernel: str
    config: Any = None

    def __str__(self) -> str:
        """As tables name it: ``fused_a 8/16/512/8/8/8/1/1/4``."""
        return self.kernel if self.config is None else f"{self.kernel} {key_of(self.config)}"


LINEAR, SEPARATE = Candidate(choice.LINEAR), Candidate(mla_query.SEPARATE)

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
    only where one kernel was measured, beside separate kernels or not, and is the fastest.
    """
    alone = [
        (entry, entry.times[entry.kernel])
        for entry in entries
        if entry.us
        and entry.config is not None
        and not entry.times.keys() - {entry.kernel, SEPARATE.kernel}
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
