"""A stand-in for the GPU that the tuner measures on: made-up times, and a record of what it did."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from k3cupy.choose import cache
from k3cupy.choose.table import Entry
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.tuning import files
from k3cupy.tuning import tune as tuning
from k3cupy.tuning.engine import Effort
from k3cupy.tuning.entries import LINEAR, Candidate
from k3cupy.tuning.report import TuneReport
from k3cupy.tuning.targets import Target

H200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
GPU = DeviceInfo(0, "Test GPU", (9, 0), 100, 232_448)
LINEAR_US = 20.0


def made_up_us(target: Target, candidate: Candidate) -> float:
    """From 10 to 19.99, the same in every process; the framework's linear takes 20."""
    if candidate == LINEAR:
        return LINEAR_US
    return round(10 + zlib.crc32(f"{target} {candidate}".encode()) % 1000 / 100, 2)


@dataclass
class FakeMeter:
    """A meter without a GPU.

    Attributes:
        us: the time of a candidate.
        why_wrong: why a candidate fails its check, or None.
        interrupt_at: the number of the call of ``time`` in which somebody presses Ctrl-C.
        compiled: what was asked for, in order.
        checked: every check.
        timed: every call of ``time``.
    """

    gpu: DeviceInfo = GPU
    us: Callable[[Target, Candidate, Effort], float] = lambda t, c, effort: made_up_us(t, c)
    why_wrong: Callable[[Target, Candidate], str | None] = lambda target, candidate: None
    interrupt_at: int = -1
    compiled: list[tuple[Target, Candidate]] = field(default_factory=list)
    checked: list[tuple[Target, Candidate]] = field(default_factory=list)
    timed: list[tuple[Target, tuple[Candidate, ...], Effort]] = field(default_factory=list)
    closed: int = 0

    def compile(self, target: Target, candidates: Sequence[Candidate]) -> None:
        self.compiled += [(target, candidate) for candidate in candidates]

    def check(self, target: Target, candidate: Candidate) -> str | None:
        assert candidate != LINEAR
        self.checked.append((target, candidate))
        return self.why_wrong(target, candidate)

    def time(self, target: Target, candidates: Sequence[Candidate], effort: Effort) -> list[float]:
        if len(self.timed) == self.interrupt_at:
            raise KeyboardInterrupt
        self.timed.append((target, tuple(candidates), effort))
        return [self.us(target, candidate, effort) for candidate in candidates]

    def close(self) -> None:
        self.closed += 1

    @property
    def targets(self) -> list[Target]:
        """What was measured, in order."""
        return list(dict.fromkeys(target for target, *_ in self.timed))

    def timed_with(self, effort: Effort) -> set[Candidate]:
        """What was timed so thoroughly."""
        return {c for _, some, how in self.timed if how is effort for c in some}


def use_fake_gpu(monkeypatch: pytest.MonkeyPatch, gpu: DeviceInfo = GPU) -> None:
    """Let ``prepare`` find a GPU."""
    monkeypatch.setattr(devices, "count", lambda: 1)
    monkeypatch.setattr(devices, "info", lambda index: gpu)
    cache.reload()


def job(
    shapes: Any = ((2112, 7168),),
    tokens: Any = None,
    *,
    op: str = "low_latency_linear",
    again: bool = False,
    **options: Any,
) -> tuning.Job:
    """What a call of ``tune`` would measure."""
    if op == "low_latency_linear":
        options["shapes"] = shapes
    return tuning.prepare(tuning.targets_of(op, tokens=tokens, **options), again=again, device=0)


def write_export(path: Path, family: str, entries: Iterable[Entry], gpu: DeviceInfo = GPU) -> None:
    """Write entries as ``tune`` does, of a known commit."""
    header = {**files.export_header(family, gpu), "commit": "0123"}
    files.write_table(path, header, map(files.undated, entries))


def run(meter: FakeMeter, *args: Any, **options: Any) -> TuneReport:
    """Tune with a fake; the report. Arguments are those of ``job``."""
    return tuning.run(job(*args, **options), meter, progress=False)
