"""Measuring one product after the other: first correctness, then a glance, then full rounds."""

from __future__ import annotations

import enum
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from k3cupy.dispatch.tuning.candidates import (
    LINEAR,
    Candidate,
    Known,
    Target,
    candidates,
    entry_from,
)
from k3cupy.ops.gemm_entry import GemmEntry
from k3cupy.runtime.devices import DeviceInfo

_CLEARLY_BEHIND = 1.15
"""A candidate that is as far behind at the first glance is not looked at again."""

_CLOSE = 1.03
"""Where the framework's linear and a kernel are as near, both get more rounds."""


class Effort(enum.Enum):
    """How thoroughly candidates are timed."""

    GLANCE = "glance"
    FULL = "full"
    EXTRA = "extra"


class Meter(Protocol):
    """What compiles, checks and times; a GPU, or a stand-in.

    Attributes:
        device: the GPU that the numbers are of.
    """

    device: DeviceInfo

    def compile(self, target: Target, candidates: Sequence[Candidate]) -> None:
        """Begin to compile what candidates need, behind what was asked for before; do not wait."""

    def check(self, target: Target, candidate: Candidate) -> str | None:
        """Say in words why a candidate cannot be used for a product, or None where it is right."""

    def time(self, target: Target, candidates: Sequence[Candidate], effort: Effort) -> list[float]:
        """Return microseconds a launch; the candidates take turns."""

    def close(self) -> None:
        """Stop compiling and let go of the memory."""


@dataclass(frozen=True)
class Measured:
    """One product, measured.

    Attributes:
        target: which.
        entry: its times and what they choose.
        refused: what failed the check, and why; none of it is in the entry.
    """

    target: Target
    entry: GemmEntry
    refused: Mapping[Candidate, str]


def measure_all(
    wanted: Sequence[Target], known: Known, meter: Meter
) -> Generator[Measured, None, None]:
    """Yield one product after the other, each as soon as it has been measured.

    What the later ones need is compiled while the earlier ones are measured.

    Args:
        wanted: in order, from ``targets``.
        known: what was measured before; it narrows what is measured.
        meter: see there. It is closed at the end, also after an error or an interruption.
    """
    found = dict(known)
    try:
        plain = {target.key for target in wanted if not target.residual}
        for target in wanted:
            if not target.residual or (target.n, target.k, target.tokens, False) not in plain:
                meter.compile(target, candidates(target, found, meter.device))
        added = {target.key: target for target in wanted if target.residual}
        for target in wanted:
            measured = measure(target, candidates(target, found, meter.device), meter)
            found[target.key] = measured.entry
            later = added.get((target.n, target.k, target.tokens, True))
            if later is not None and later is not target:
                meter.compile(later, candidates(later, found, meter.device))
            yield measured
    finally:
        meter.close()


def measure(target: Target, given: Sequence[Candidate], meter: Meter) -> Measured:
    """Check and time the candidates of one product, the framework's linear beside them."""
    refused = {c: why for c in given if (why := meter.check(target, c)) is not None}
    sound = [LINEAR, *(candidate for candidate in given if candidate not in refused)]
    glance = dict(zip(sound, meter.time(target, sound, Effort.GLANCE), strict=True))
    times = {**glance, **_timed_in_full(target, glance, meter)}
    return Measured(target, entry_from(target, times), refused)


def _timed_in_full(
    target: Target, glance: Mapping[Candidate, float], meter: Meter
) -> dict[Candidate, float]:
    """Return thorough times of all that may be the fastest, of the best of each backend too.

    In the end nothing that was only glanced at is as fast as the fastest.
    """
    limit = _CLEARLY_BEHIND * min(glance.values())
    best_of = {c.backend: c for c in sorted(glance, key=glance.__getitem__, reverse=True)}
    times: dict[Candidate, float] = {}

    def time(due: Sequence[Candidate], effort: Effort) -> None:
        while due:
            times.update(zip(due, meter.time(target, due, effort), strict=True))
            fastest = min(times.values())
            due = [c for c, us in glance.items() if c not in times and us <= fastest]

    time([c for c, us in glance.items() if us <= limit or c is best_of[c.backend]], Effort.FULL)
    close = [c for c, us in times.items() if us <= _CLOSE * min(times.values())]
    if LINEAR in close and len(close) > 1:
        time(close, Effort.EXTRA)
    return times
