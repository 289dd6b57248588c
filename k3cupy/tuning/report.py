"""What a user sees of tuning: a bar while it goes on, and a table at the end."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3cupy.call.choice import LINEAR
from k3cupy.choose.gemm import FUSED_A, SKINNY
from k3cupy.choose.table import GEMM, Entry, key_of
from k3cupy.runtime.text import plain, printable
from k3cupy.tuning.engine import Measured
from k3cupy.tuning.targets import Target

_MARKS = {FUSED_A: "F", SKINNY: "S"}


def speed_up(entry: Entry) -> float:
    """Return how many times faster than the framework's linear the choice is; 1 where it is it."""
    us, linear_us = entry.us, entry.linear_us
    return linear_us / us if us and linear_us else 1.0


def mean_speed_up(entries: Iterable[Entry]) -> str:
    """Return the geometric mean over several products in words; nothing of others."""
    found = [speed_up(entry) for entry in entries if entry.linear_us is not None]
    return f"{statistics.geometric_mean(found):.2f} x the framework's linear" if found else ""


@dataclass(frozen=True)
class TuneReport:
    """What tuning found; prints as a table.

    Attributes:
        gpu: the name of the GPU.
        family: of kernels, as files of tables are named.
        entries: one a problem and size, measured now or before.
        num_measured: how many of them were measured now; the others were there already.
        refused: a line for each candidate that failed its check and was not recorded.
        path: the file that keeps the measurements; None where none could be written.
    """

    gpu: str
    family: str
    entries: tuple[Entry, ...]
    num_measured: int
    refused: tuple[str, ...]
    path: Path | None

    def __str__(self) -> str:
        """The choice for each problem and size, then what was refused, then where it is kept."""
        before, mean = len(self.entries) - self.num_measured, mean_speed_up(self.entries)
        lines = [
            plain(self._table(), 200),
            f"{self.num_measured} measured now, {before} before with the same kernels"
            + (f"; {mean} on average (geometric mean)" if mean else ""),
            *(f"refused, not recorded: {line}" for line in self.refused),
            f"kept in {self.path}" if self.path else "kept nowhere: see the warning",
        ]
        return printable("\n".join(lines))

    def _table(self) -> Any:
        from rich.table import Table

        title, caption, unit = "microseconds and configuration", "", "{} rows"
        if self.family == GEMM:
            title, unit = "speed-up over the framework's linear", "M={}"
            caption = "F: fused_a, S: skinny, -: the framework's linear is the fastest"
        table = Table(title=f"{self.gpu}: {title}", caption=caption)
        sizes = sorted({entry.size for entry in self.entries})
        table.add_column("problem", no_wrap=True)
        for size in sizes:
            table.add_column(unit.format(size), justify="right")
        found = {entry.key: entry for entry in self.entries}
        for name in dict.fromkeys(entry.problem for entry in self.entries):
            table.add_row(name, *(_cell(found.get((name, size))) for size in sizes))
        return table


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return ""
    if entry.kernel == LINEAR:
        return "-"
    if entry.kernel in _MARKS:
        return f"{_MARKS[entry.kernel]} {speed_up(entry):.2f}"
    if entry.config is None:
        return f"{entry.us:.2f} ({entry.kernel})"
    return f"{entry.us:.2f} ({key_of(entry.config)})"


@contextlib.contextmanager
def watch(
    targets: Sequence[Target], *, quiet: bool = False
) -> Iterator[Callable[[Measured], None]]:
    """Show on standard error how far tuning has come: a bar, or a line a problem in a file.

    Yields:
        What takes note of each target that was measured, in their order.
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    bar = progress.Progress(
        progress.TextColumn("measuring {task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
    )
    task = bar.add_task(str(targets[0]), total=len(targets))
    done: list[Measured] = []

    def note(measured: Measured) -> None:
        done.append(measured)
        for line in measured.refusals:
            console.print(f"refused, not recorded: {line}", markup=False, soft_wrap=True)
        rest, problem = targets[len(done) :], measured.target.problem
        bar.update(task, advance=1, description=str(rest[0]) if rest else "done")
        if bar.disable and (not rest or rest[0].problem != problem):
            found = [m.entry for m in done if m.target.problem == problem and m.entry]
            mean = mean_speed_up(found)
            told = f"{problem}: {len(found)} measured{f', {mean}' if mean else ''}"
            console.print(told, soft_wrap=True)

    with bar:
        yield note
