"""Measuring one target after the other: first correctness, then a glance, then full rounds."""

from __future__ import annotations

import enum
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3cupy.choose.table import Entry
from k3cupy.tuning.entries import Candidate, Known, entry_from
from k3cupy.tuning.targets import Target

if TYPE_CHECKING:  # it imports PyTorch
    from k3cupy.tuning.cuda_meter import CudaMeter

_CLEARLY_BEHIND = 1.1
"""A candidate that is as far behind at the first glance is not looked at again."""

_CLOSE = 1.03
"""Where what a kernel has to beat and a kernel are as near, both get more rounds."""


class Effort(enum.Enum):
    """How thoroughly candidates are timed."""

    GLANCE = "glance"
    FULL = "full"
    EXTRA = "extra"


@dataclass(frozen=True)
class Measured:
    """One target, measured.

    Attributes:
        target: which.
        entry: its times and what they choose; None where nothing was right.
        refused: what failed the check, and why; none of it is in the entry.
    """

    target: Target
    entry: Entry | None
    refused: Mapping[Candidate, str]

    @property
    def refusals(self) -> tuple[str, ...]:
        """A line for each candidate that failed."""
        return tuple(f"{self.target}, {c}: {why}" for c, why in self.refused.items())


def measure_all(
    wanted: Sequence[Target], known: Known, meter: CudaMeter
) -> Generator[Measured, None, None]:
    """Yield one target after the other, each as soon as it has been measured.

    What the later ones need is compiled while the earlier ones are measured. The meter is closed at
    the end, also after an error or an interruption.
    """
    found = dict(known)
    try:
        keys = {target.key for target in wanted}
        following = {target.follows: target for target in wanted}
        for target in wanted:
            if target.follows not in keys:
                meter.compile(target, target.candidates(found, meter.gpu))
        for target in wanted:
            measured = measure(target, target.candidates(found, meter.gpu), meter)
            if measured.entry is not None:
                found[target.key] = measured.entry
            later = following.get(target.key)
            if later is not None:
                meter.compile(later, later.candidates(found, meter.gpu))
            yield measured
    finally:
        meter.close()


def measure(target: Target, given: Sequence[Candidate], meter: CudaMeter) -> Measured:
    """Check and time the candidates of one target."""
    refused = {c: why for c in given if (why := meter.check(target, c)) is not None}
    sound = [*target.beside, *(candidate for candidate in given if candidate not in refused)]
    if not sound:
        return Measured(target, None, refused)
    glance = dict(zip(sound, meter.time(target, sound, Effort.GLANCE), strict=True))
    times = {**glance, **_timed_in_full(target, glance, meter)}
    return Measured(target, entry_from(*target.key, times), refused)


def _timed_in_full(
    target: Target, glance: Mapping[Candidate, float], meter: CudaMeter
) -> dict[Candidate, float]:
    """Return thorough times of all that may be the fastest, of the best of each kernel too.

    In the end nothing that was only glanced at is as fast as the fastest.
    """
    limit = _CLEARLY_BEHIND * min(glance.values())
    best_of = {c.kernel: c for c in sorted(glance, key=glance.__getitem__, reverse=True)}
    times: dict[Candidate, float] = {}

    def time(due: Sequence[Candidate], effort: Effort) -> None:
        while due:
            times.update(zip(due, meter.time(target, due, effort), strict=True))
            fastest = min(times.values())
            due = [c for c, us in glance.items() if c not in times and us <= fastest]

    time([c for c, us in glance.items() if us <= limit or c is best_of[c.kernel]], Effort.FULL)
    close = [c for c, us in times.items() if us <= _CLOSE * min(times.values())]
    if len(close) > 1 and not set(close).isdisjoint(target.beside):
        time(close, Effort.EXTRA)
    return times
