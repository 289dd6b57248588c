"""What a user sees of tuning: a bar while it goes on, and a table at the end."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3cupy.call.choice import LINEAR
from k3cupy.choose.gemm import FUSED_A, SKINNY
from k3cupy.choose.table import GEMM, Entry, key_of
from k3cupy.runtime.text import Shown, plain, printable, progress_bar, table_of
from k3cupy.tuning.engine import Measured
from k3cupy.tuning.targets import Target

if TYPE_CHECKING:
    from rich.table import Table

_MARKS = {FUSED_A: "F", SKINNY: "S"}


def speed_up(entry: Entry) -> float:
    """Return how many times faster than the framework's linear the choice is; 1 where it is it."""
    us, linear_us = entry.us, entry.linear_us
    return linear_us / us if us and linear_us else 1.0


def mean_speed_up(entries: Iterable[Entry]) -> str:
    """Return the geometric mean over several products in words; nothing of others."""
    found = [speed_up(entry) for entry in entries if entry.linear_us is not None]
    return f"{statistics.geometric_mean(found):.2f} x the framework's linear" if found else ""


@dataclass(frozen=True, repr=False)
class TuneReport(Shown):
    """What tuning found; prints as a table.

    Attributes:
        gpu: the name of the GPU.
        family: of kernels, as files of tables are named.
        entries: one a problem and size, measured now or before.
        num_measured: how many of them were measured now; the others were there already.
        refused: a line for each candidate that failed its check and was not recorded, and for each
            problem that the GPU leaves nothing to measure of.
        path: the file that keeps the measurements; None where none could be written.
    """

    gpu: str
    family: str
    entries: tuple[Entry, ...]
    num_measured: int
    refused: tuple[str, ...]
    path: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain values, of each entry what was chosen and its time."""
        entries = [
            {
                "problem": entry.problem,
                "size": entry.size,
                "kernel": entry.kernel,
                "config": None if entry.config is None else asdict(entry.config),
                "us": entry.us,
                "linear_us": entry.linear_us,
            }
            for entry in self.entries
        ]
        path = None if self.path is None else str(self.path)
        return {**vars(self), "entries": entries, "refused": list(self.refused), "path": path}

    def __str__(self) -> str:
        """The choice for each problem and size, then what was refused, then where it is kept."""
        return printable("\n".join([plain(self._table()), *self._remarks()]))

    def __rich__(self) -> Table:
        """The choices, and the rest below, for ``rich.print`` and notebooks."""
        return self._table(*self._remarks())

    def _remarks(self) -> list[str]:
        before, mean = len(self.entries) - self.num_measured, mean_speed_up(self.entries)
        return [
            f"{self.num_measured} measured now, {before} before with the same kernels"
            + (f"; {mean} on average (geometric mean)" if mean else ""),
            *(f"refused, not recorded: {line}" for line in self.refused),
            f"kept in {self.path}" if self.path else "kept nowhere: see the warning",
        ]

    def _table(self, *remarks: str) -> Table:
        title, caption, unit = "microseconds and configuration", "", " {} rows"
        if self.family == GEMM:
            title, unit = "speed-up over the framework's linear", " M={}"
            caption = "F: fused_a, S: skinny, -: the framework's linear is the fastest"
        sizes = sorted({entry.size for entry in self.entries})
        found = {entry.key: entry for entry in self.entries}
        rows = [
            (name, *(_cell(found.get((name, size))) for size in sizes))
            for name in dict.fromkeys(entry.problem for entry in self.entries)
        ]
        headers = ("problem", *map(unit.format, sizes))
        below = ". ".join(filter(None, [caption, *remarks]))
        table = table_of(headers, rows, f"{self.gpu}: {title}", below)
        for place, column in enumerate(table.columns):
            column.no_wrap = place == 0
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

    bar = progress_bar(
        progress.TextColumn("measuring {task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        quiet=quiet,
    )
    console = bar.console
    bar.disable = quiet or not (console.is_terminal or console.is_jupyter)
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
