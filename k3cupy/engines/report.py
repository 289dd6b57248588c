"""What an engine's calls came to: for each target, calls that we served and calls handed back."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.text import Shown, table_of

if TYPE_CHECKING:
    from rich.table import Table

_MOST_REASONS, _OTHERS = 50, "a reason that came after the first 50"


class Target:
    """One thing of an engine that we stand in for, and what became of its calls.

    Counting is what a call pays for it: ``target.served += 1``, or ``target.hand_back(reason)``.

    Attributes:
        name: as users name it and the report shows it.
        installed: calls come to us now.
        why_not: why they do not, in words; ``""`` while it is installed.
        served: calls that a kernel of ours computed.
        handed_back: calls that went to the engine's own code, by reason.
    """

    __slots__ = ("handed_back", "installed", "name", "served", "why_not")

    def __init__(self, name: str, why_not: str = "") -> None:
        self.name = name
        self.installed = False
        self.why_not = why_not
        self.served = 0
        self.handed_back: dict[str, int] = {}

    def install(self) -> None:
        """Say that calls come to us from now on."""
        self.installed, self.why_not = True, ""

    def leave(self, why_not: str) -> None:
        """Say that calls do not come to us, and why; what was counted stays."""
        self.installed, self.why_not = False, why_not

    def hand_back(self, reason: str) -> None:
        """Count a call that the engine's own code computes. Texts have no end, reasons have."""
        counts = self.handed_back
        if reason not in counts and len(counts) >= _MOST_REASONS:
            reason = _OTHERS
        counts[reason] = counts.get(reason, 0) + 1

    def row(self) -> TargetRow:
        """Return what is known now, as a row that does not change."""
        handed_back = dict(self.handed_back)
        return TargetRow(self.name, self.installed, self.why_not, self.served, handed_back)


OF_VARIABLE = "1 stands for all of them, 0 for none"
"""What else the variable of an engine may be, for messages."""


def named_targets(
    argument: str, asked: Any, targets: Collection[str], hint: str = ""
) -> tuple[str, ...]:
    """Return the targets that a user asks for.

    Args:
        argument: where, for messages.
        asked: a name, in which ``*`` stands for anything, or several; None for all.
        targets: the names that there are.
        hint: of messages.

    Raises:
        TypeError: it is neither.
        ValueError: a name is none of the targets'.
    """
    if asked is None:
        return tuple(targets)
    known, found = f"names of targets: {', '.join(targets)}", dict[str, None]()
    if not isinstance(asked, Iterable):
        reject(argument, known, shown(asked), hint, TypeError)
    for pattern in [asked] if isinstance(asked, str) else asked:
        is_text = isinstance(pattern, str)
        fitting = [name for name in targets if is_text and fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            reject(argument, known, shown(pattern), hint)
        found |= dict.fromkeys(fitting)
    return tuple(found)


@dataclass(frozen=True)
class TargetRow:
    """One target of a report.

    Attributes:
        name: as users name it.
        installed: calls came to us when the report was made.
        why_not: why they did not, in words; ``""`` where they did.
        served: calls that a kernel of ours computed.
        handed_back: calls that went to the engine's own code, by reason.
    """

    name: str
    installed: bool
    why_not: str = ""
    served: int = 0
    handed_back: Mapping[str, int] = field(default_factory=dict)


class EngineReport(Shown):
    """The targets of an engine in this process, and what became of their calls.

    It has a length, can be iterated and indexed by name (``TargetRow``), and prints as a table.
    Calls that a CUDA graph replays are not calls: they count once, at the capture.

    Attributes:
        engine: its name.
    """

    def __init__(self, engine: str, rows: Sequence[TargetRow]) -> None:
        self.engine = engine
        self._rows = tuple(rows)

    @property
    def installed(self) -> int:
        """The number of targets whose calls come to us."""
        return sum(row.installed for row in self._rows)

    @property
    def served(self) -> int:
        """All calls that a kernel of ours computed."""
        return sum(row.served for row in self._rows)

    @property
    def handed_back(self) -> int:
        """All calls that came to us and went to the engine's own code."""
        return sum(sum(row.handed_back.values()) for row in self._rows)

    def __len__(self) -> int:
        """The number of targets, installed or not."""
        return len(self._rows)

    def __iter__(self) -> Iterator[TargetRow]:
        """The targets in the engine's order."""
        return iter(self._rows)

    def __getitem__(self, name: str) -> TargetRow:
        """The target of a name.

        Raises:
            KeyError: the engine has none of that name; the text says which it has.
        """
        for row in self._rows:
            if row.name == name:
                return row
        known = f"a target of {self.engine}: {', '.join(row.name for row in self._rows)}"
        reject("name", known, shown(name), error=KeyError)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for a log or a file.

        Returns:
            ``engine``, and ``targets``: by name ``installed``, ``why_not``, ``served`` and
            ``handed_back``, the last by reason.
        """
        targets = {
            row.name: {
                "installed": row.installed,
                "why_not": row.why_not,
                "served": row.served,
                "handed_back": dict(row.handed_back),
            }
            for row in self._rows
        }
        return {"engine": self.engine, "targets": targets}

    def __rich__(self) -> Table:
        """The table, for ``rich.print``."""
        title = (
            f"k3cupy in {self.engine}: {self.installed} of {len(self)} targets installed, "
            f"{self.served} calls served, {self.handed_back} handed back"
        )
        lines = [line for row in self._rows for line in _lines(row)]
        table = table_of(("target", " served", " handed back", "why"), lines, title)
        table.min_width = len(title)
        return table


def _lines(row: TargetRow) -> list[tuple[str, str, str, str]]:
    """Return the lines of a target: the first with its name, one for each further reason."""
    backs = sorted(row.handed_back.items(), key=lambda item: -item[1])
    notes = [(str(count), reason) for reason, count in backs]
    if not row.installed:
        notes.insert(0, ("", f"not installed: {row.why_not}"))
    (count, why), *rest = notes or [("0", "")]
    return [(row.name, str(row.served), count, why), *(("", "", *note) for note in rest)]
