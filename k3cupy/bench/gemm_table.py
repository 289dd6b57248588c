"""The GEMM table that the package ships for a GPU, from several runs of the tuner."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from k3cupy.dispatch.tuning import files
from k3cupy.dispatch.tuning.candidates import LINEAR, Candidate, Target, entry_from, times_of
from k3cupy.ops import gemm_cache
from k3cupy.ops.gemm_entry import GemmEntry

_WORTH_KEEPING = 1.02
"""How much further ahead of the framework's linear an earlier entry must be to stay: more than two
runs differ by."""


def write_mean(exports: Sequence[Path], table: Path) -> None:
    """Write the mean of exported runs as a table to ship.

    Runs of later kernels replace what those of earlier kernels say of the same product, unless the
    fastest of the earlier ones was clearly further ahead of the framework's linear: the tuner's
    candidates change, too. What stays keeps the date and the digest of its kernels.

    Args:
        exports: files of ``tune --export``; those of the latest kernels last.
        table: the file to write; its folder is made.

    Raises:
        ValueError: a file is none, or they are not of one GPU.
    """
    headers, runs = zip(*map(files.read_export, exports), strict=True)
    for fact in ("gpu", "arch"):
        facts = {header[fact] for header in headers}
        if len(facts) != 1:
            raise ValueError(f"expected runs of one {fact}, got {', '.join(sorted(facts))}")
    newest = headers[-1]["sources"]
    found: dict[tuple[int, int, int, bool], GemmEntry] = {}
    kernels = list(dict.fromkeys(header["sources"] for header in headers))
    for digest in kernels:
        of_these = [i for i, header in enumerate(headers) if header["sources"] == digest]
        date = headers[of_these[-1]]["date"]
        for entry in mean_of([runs[i] for i in of_these]):
            earlier = found.get(entry.key)
            if earlier is None or _lead(earlier) < _lead(entry) * _WORTH_KEEPING:
                dated = replace(entry, date=date, sources=digest)
                found[entry.key] = entry if digest == newest else dated
    about = "Measured by `python -m k3cupy tune`"
    if len(kernels) > 1:
        about += f", {len(runs)} runs of {len(kernels)} versions of the kernels"
    elif len(runs) > 1:
        about += f", the mean of {len(runs)} runs"
    header = {**headers[-1], "about": f"{about}."}
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(gemm_cache.table_text(header, found.values()), encoding="utf-8")


def _lead(entry: GemmEntry) -> float:
    """Return how far the fastest kernel of ours is ahead of the framework's linear."""
    times = times_of(entry)
    linear_us = times.pop(LINEAR)
    return linear_us / min(times.values(), default=linear_us)


def mean_of(runs: Sequence[Sequence[GemmEntry]]) -> list[GemmEntry]:
    """Return one entry a product, its times the mean over the runs that measured it.

    Each run counts relative to its own fastest, because machines differ from run to run.
    """
    found: dict[tuple[int, int, int, bool], list[GemmEntry]] = {}
    for run in runs:
        for entry in run:
            found.setdefault(entry.key, []).append(entry)
    return [_mean(entries) for entries in found.values()]


def _mean(entries: Sequence[GemmEntry]) -> GemmEntry:
    measured = [times_of(entry) for entry in entries]
    level = statistics.fmean(min(times.values()) for times in measured)
    means = {
        candidate: round(level * statistics.fmean(_relative(measured, candidate)), 4)
        for candidate in dict.fromkeys(c for times in measured for c in times)
    }
    return entry_from(Target(*entries[0].key), means)


def _relative(measured: Sequence[Mapping[Candidate, float]], candidate: Candidate) -> list[float]:
    return [times[candidate] / min(times.values()) for times in measured if candidate in times]
