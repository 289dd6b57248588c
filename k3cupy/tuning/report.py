"""What a user sees of tuning: a bar while it goes on, and a table at the end."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from k3cupy.dispatch.tuning.candidates import Target
from k3cupy.dispatch.tuning.engine import Measured
from k3cupy.ops.gemm_entry import FUSED_A, SKINNY, GemmEntry

_MARKS = {FUSED_A: "F", SKINNY: "S"}
_WIDTH = 200


def speed_up(entry: GemmEntry) -> float:
    """Return how many times faster than the framework's linear the choice is; 1 where it is it."""
    us, linear_us = entry.chosen_us, entry.linear_us
    return linear_us / us if us and linear_us else 1.0


def mean_speed_up(entries: Iterable[GemmEntry]) -> float:
    """Return the geometric mean over several products."""
    return statistics.geometric_mean([speed_up(entry) for entry in entries] or [1.0])


@dataclass(frozen=True)
class TuneReport:
    """What tuning found; prints as a table.

    Attributes:
        gpu: the name of the GPU.
        entries: one a product, measured now or before.
        num_measured: how many of them were measured now; the others were there already.
        refused: a line for each candidate that failed its check and was not recorded.
        path: the file that keeps the measurements; None where none could be written.
    """

    gpu: str
    entries: tuple[GemmEntry, ...]
    num_measured: int
    refused: tuple[str, ...]
    path: Path | None

    def __str__(self) -> str:
        """The choice for each shape and M, then what was refused, then where it is kept."""
        from rich.console import Console

        text = io.StringIO()
        console = Console(file=text, width=_WIDTH)
        console.print(self._table())
        before = len(self.entries) - self.num_measured
        console.print(
            f"{self.num_measured} products measured now, {before} before with the same kernels; "
            f"{mean_speed_up(self.entries):.2f} x the framework's linear on average "
            "(geometric mean)"
        )
        for line in self.refused:
            console.print(f"refused, not recorded: {line}", markup=False, soft_wrap=True)
        kept = f"kept in {self.path}" if self.path else "kept nowhere: see the warning"
        console.print(kept, markup=False, soft_wrap=True)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(
            title=f"{self.gpu}: speed-up over the framework's linear",
            caption="F: fused_a, S: skinny, -: the framework's linear is the fastest",
        )
        tokens = sorted({entry.tokens for entry in self.entries})
        table.add_column("N x K")
        for count in tokens:
            table.add_column(f"M={count}", justify="right")
        rows: dict[str, dict[int, GemmEntry]] = {}
        for entry in self.entries:
            rows.setdefault(Target(*entry.key).row, {})[entry.tokens] = entry
        for name, found in rows.items():
            table.add_row(name, *(_cell(found.get(count)) for count in tokens))
        return table


def _cell(entry: GemmEntry | None) -> str:
    if entry is None:
        return ""
    if entry.chosen is None:
        return "-"
    return f"{_MARKS[entry.chosen.backend]} {speed_up(entry):.2f}"


class Watch:
    """Shows on standard error how far tuning has come: a bar, or a line a shape in a file."""

    def __init__(self, targets: Sequence[Target], *, quiet: bool = False) -> None:
        self._targets = targets
        self._done: list[GemmEntry] = []
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = Console(stderr=True, quiet=quiet)
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("measuring {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(self._next(), total=len(targets))

    def __enter__(self) -> Watch:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, measured: Measured) -> None:
        """Take note of one product."""
        self._done.append(measured.entry)
        for line in refusals(measured):
            self._console.print(f"refused, not recorded: {line}", markup=False, soft_wrap=True)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=self._next())
        elif self._is_last_of_shape():
            self._print_shape(measured.target)

    def _next(self) -> str:
        done = len(self._done)
        return str(self._targets[done]) if done < len(self._targets) else "done"

    def _is_last_of_shape(self) -> bool:
        here, rest = self._targets[len(self._done) - 1], self._targets[len(self._done) :]
        return not rest or rest[0].row != here.row

    def _print_shape(self, target: Target) -> None:
        of_shape = [e for e in self._done if Target(*e.key).row == target.row]
        self._console.print(
            f"{target.row}: {len(of_shape)} measured, "
            f"{mean_speed_up(of_shape):.2f} x the framework's linear",
            soft_wrap=True,
        )


def refusals(measured: Measured) -> tuple[str, ...]:
    """Return a line for each candidate that failed."""
    refused = measured.refused.items()
    return tuple(f"{measured.target}, {candidate}: {why}" for candidate, why in refused)
