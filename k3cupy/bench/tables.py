"""The tables that the package ships for a GPU, from several runs of the tuner."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3cupy.choose.table import Entry, slug
from k3cupy.tuning import files
from k3cupy.tuning.entries import LINEAR, Candidate, entry_from, settled, times_of

_WORTH_KEEPING = 1.02
"""How much further ahead of the framework's linear an earlier entry must be to stay: more than two
runs differ by."""

_FASTEST, _FAR_BEHIND = 6, 1.6
"""How many times of a kernel a product's table ships, and up to how many times the fastest."""

Run = tuple[Mapping[str, Any], Sequence[Entry]]
"""Header and entries of an exported file."""


def write_means(exports: Sequence[Path], folder: Path) -> Iterator[Path]:
    """Write the mean of exported runs as tables to ship, and yield the path of each.

    Args:
        exports: files of ``tune --export``, of one GPU; those of the latest kernels last.
        folder: of the tables of all GPUs.

    Raises:
        ValueError: a file is none, or they are not of one GPU.
    """
    runs = [files.read_export(path) for path in exports]
    for fact in ("gpu", "arch"):
        facts = {header[fact] for header, _ in runs}
        if len(facts) != 1:
            raise ValueError(f"expected runs of one {fact}, got {', '.join(sorted(facts))}")
    for family in dict.fromkeys(header["family"] for header, _ in runs):
        header, entries = joined([run for run in runs if run[0]["family"] == family])
        path = folder / slug(header["gpu"]) / f"{family}.json"
        files.write_table(path, header, map(_shipped, entries))
        yield path


def joined(runs: Sequence[Run]) -> Run:
    """Return the table of several runs of one family.

    Runs of later kernels replace what those of earlier kernels say of the same problem, unless the
    fastest of the earlier ones was clearly further ahead of the framework's linear: the tuner's
    candidates change, too. What stays keeps the date and the digest of its kernels.

    Raises:
        ValueError: they were measured in two ways, as in the chain and alone.
    """
    newest = runs[-1][0]
    units = {str(header.get("unit")) for header, _ in runs}
    if len(units) != 1:
        raise ValueError(f"expected runs measured in one way, got {' and '.join(sorted(units))}")
    found: dict[tuple[str, int], Entry] = {}
    kernels = list(dict.fromkeys(header["sources"] for header, _ in runs))
    for digest in kernels:
        of_these = [run for run in runs if run[0]["sources"] == digest]
        stamp = {"date": of_these[-1][0]["date"], "sources": digest}
        for entry in mean_of([entries for _, entries in of_these]):
            earlier = found.get(entry.key)
            if earlier is None or _lead(earlier) < _lead(entry) * _WORTH_KEEPING:
                is_new = digest == newest["sources"]
                found[entry.key] = entry if is_new else replace(entry, **stamp)
    for problem in {entry.problem for entry in found.values()}:
        found |= settled(entry for entry in found.values() if entry.problem == problem)
    about = "Measured by `python -m k3cupy tune`"
    if len(kernels) > 1:
        about += f", {len(runs)} runs of {len(kernels)} versions of the kernels"
    elif len(runs) > 1:
        about += f", {len(runs)} runs: their mean where several measured the same"
    return {**newest, "about": f"{about}."}, list(found.values())


def _shipped(entry: Entry) -> Entry:
    """Return what is read of an entry in every process: of a product the fastest of each kernel.

    Of each order of sums the fastest too, of which batch invariance takes one for all numbers of
    tokens, unless it is far behind.
    """
    if LINEAR.kernel not in entry.times:
        return entry
    times = {}
    for kernel, us in entry.times.items():
        ranked = sorted(us, key=us.__getitem__)
        limit = _FAR_BEHIND * us[ranked[0]]
        of_orders = {getattr(c, "order", None): c for c in reversed(ranked) if us[c] <= limit}
        kept = {*ranked[:_FASTEST], *of_orders.values()}
        times[kernel] = {config: us[config] for config in us if config in kept}
    return replace(entry, times=times)


def _lead(entry: Entry) -> float:
    """Return how far the fastest kernel is ahead of the framework's linear; 1 where none ran."""
    times = times_of(entry)
    linear_us = times.pop(LINEAR, None)
    return 1.0 if linear_us is None else linear_us / min(times.values(), default=linear_us)


def mean_of(runs: Sequence[Sequence[Entry]]) -> list[Entry]:
    """Return one entry a problem and size, its times the mean over the runs that measured it.

    Each run counts relative to its own fastest, because machines differ from run to run.
    """
    found: dict[tuple[str, int], list[Entry]] = {}
    for run in runs:
        for entry in run:
            found.setdefault(entry.key, []).append(entry)
    return [_mean(entries) for entries in found.values()]


def _mean(entries: Sequence[Entry]) -> Entry:
    measured = [times_of(entry) for entry in entries]
    level = statistics.fmean(min(times.values()) for times in measured)
    means = {
        candidate: round(level * statistics.fmean(_relative(measured, candidate)), 4)
        for candidate in dict.fromkeys(c for times in measured for c in times)
    }
    return entry_from(*entries[0].key, means)


def _relative(measured: Sequence[Mapping[Candidate, float]], candidate: Candidate) -> list[float]:
    return [times[candidate] / min(times.values()) for times in measured if candidate in times]
