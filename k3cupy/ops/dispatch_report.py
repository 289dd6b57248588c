"""What ran and what fell back: a count for each choice, and a log line for each new one."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from k3cupy.call.choice import RULE, Choice
from k3cupy.kernels.fused_a_gemm import MAX_TOKENS
from k3cupy.runtime.text import Shown, name_pattern, plain, table_of

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger("k3cupy.dispatch")

_MOST_ROWS, _OTHERS = 1000, "whatever came after the process's first 1000 rows"


Layers = Mapping[tuple[int, int], Collection[str]]
"""Names of layers by (N, K) of their weight."""


class Counter:
    """How often a choice was met."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


@dataclass(frozen=True)
class ReportRow:
    """One line of a report.

    Attributes:
        choice: what ran, and why, without the instance, which differs from layout to layout.
        n: rows of the weight; 0 where the tensors do not say, or where rows are counted together.
        k: its columns; 0 where the tensors do not say.
        num_tokens: rows of x, 65 for any number above 64; 0 where the tensors do not say.
        calls: how often.
    """

    choice: Choice
    n: int
    k: int
    num_tokens: int
    calls: int

    @property
    def tokens(self) -> str:
        """The number of tokens in words."""
        return f">{MAX_TOKENS}" if self.num_tokens > MAX_TOKENS else str(self.num_tokens)


@dataclass(frozen=True, repr=False)
class DispatchReport(Shown):
    """What low-latency linear did in this process; prints as a table, a line a layer and kernel.

    Attributes:
        rows: by weight and number of tokens.
        layers: names of the layers by (N, K), as ``enable_low_latency_gemm`` has met them.
    """

    rows: tuple[ReportRow, ...]
    layers: Layers = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[ReportRow]:
        """Go through the rows."""
        return iter(self.rows)

    @property
    def calls(self) -> int:
        """All calls."""
        return sum(row.calls for row in self.rows)

    @property
    def fallbacks(self) -> tuple[ReportRow, ...]:
        """The rows in which the framework's linear ran."""
        return tuple(row for row in self.rows if row.choice.is_fallback)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for a log or a file.

        Returns:
            ``calls``, and ``rows``: of each ``layers`` (names), ``n``, ``k``, ``num_tokens``,
            ``calls`` and ``choice``, as ``Choice.to_dict`` has it.
        """
        rows = [
            {
                **vars(r),
                "choice": r.choice.to_dict(),
                "layers": list(self.layers.get((r.n, r.k), ())),
            }
            for r in self.rows
        ]
        return {"calls": self.calls, "rows": rows}

    def __rich__(self) -> Table:
        """The table, for ``rich.print`` and notebooks."""
        ours = self.calls - sum(row.calls for row in self.fallbacks)
        caption = f"{ours} of {self.calls} calls ran a kernel of k3cupy"
        return layer_table(self.rows, self.layers, caption=caption)

    def __str__(self) -> str:
        """The table as plain text."""
        return plain(self.__rich__()) if self.rows else "no call of low-latency linear yet"


def layer_table(
    rows: Sequence[ReportRow], layers: Layers, *, apart: bool = False, **around: str
) -> Table:
    """Return rows as a table: those of one weight that one kernel computes share a line.

    With ``apart`` each row has a line. A column that says nothing is left out. ``around`` is the
    title or caption.
    """
    groups: dict[tuple[Any, ...], list[ReportRow]] = {}
    for row in rows:
        alike = (row.num_tokens,) if apart else _alike(row.choice)
        groups.setdefault((row.n, row.k, *alike), []).append(row)
    lines = []
    for of_line in groups.values():
        first = of_line[0]
        shape = f"{first.n} x {first.k}" if first.n else "-"
        names: dict[str, str] = {}
        for name in layers.get((first.n, first.k), ()):
            pattern = name_pattern(name)
            names[pattern] = pattern if pattern in names else name
        calls = sum(row.calls for row in of_line)
        ran, why = _told(of_line)
        lines.append(("\n".join(names.values()), shape, _tokens(of_line), str(calls), ran, why))
    headers = ("layer", "N x K", "M", " calls", "what ran", "why")
    hidden = {0: not any(line[0] for line in lines), 3: not any(row.calls for row in rows)}
    kept = [i for i in range(len(headers)) if not hidden.get(i)]
    cells = [[line[i] for i in kept] for line in lines]
    return table_of([headers[i] for i in kept], cells, **around)


def _alike(choice: Choice) -> tuple[str, ...]:
    """Return what choices share a line by: of those that were measured not the numbers."""
    exact = choice.is_fallback and choice.origin == RULE
    reason = choice.reason if exact else _NUMBER.sub("*", choice.reason)
    return choice.kernel, choice.runs_on, choice.origin, reason


_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]\d)")
"""In a reason: a time, a number of tokens."""


def _told(rows: Sequence[ReportRow]) -> tuple[str, str]:
    """Return what ran and why, of several rows in which only numbers differ."""
    whats = dict.fromkeys(row.choice.what for row in rows)
    reasons = dict.fromkeys(row.choice.reason for row in rows)
    first = rows[0].choice
    ran = first.what if len(whats) == 1 else f"{first.kernel}, {len(whats)} configurations"
    why = first.reason if len(reasons) == 1 else _alike(first)[-1]
    return ran, f"{why} [{first.origin}]"


def _tokens(rows: Sequence[ReportRow]) -> str:
    """Return numbers of tokens in words: ``1-8, 16, >64``."""
    spans: list[list[int]] = []
    for number in sorted({row.num_tokens for row in rows}):
        if spans and number == spans[-1][-1] + 1 and number <= MAX_TOKENS:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    told = ("-".join(map(str, span)) for span in spans if span[0] <= MAX_TOKENS)
    more = [row.tokens for row in rows if row.num_tokens > MAX_TOKENS]
    return ", ".join([*told, *more[:1]])


counters: dict[tuple[Choice, int, int, int], Counter] = {}
"""By choice, n, k and number of tokens."""

_layers: WeakKeyDictionary[Any, tuple[str, tuple[int, int]]] = WeakKeyDictionary()

_lock = threading.Lock()


def name_layers(layers: Iterable[tuple[Any, str, tuple[int, int]]]) -> None:
    """Take note of layers, their names and their (N, K), for reports, as long as they live."""
    with _lock:
        for layer, name, shape in layers:
            _layers[layer] = (name or "(itself)", shape)


def counter_of(choice: Choice, n: int, k: int, num_tokens: int) -> Counter:
    """Return the counter of a choice for a product; one that is new is logged at debug level.

    Shapes have no end, rows have.
    """
    key = choice, n, k, min(num_tokens, MAX_TOKENS + 1)
    with _lock:
        if key not in counters and len(counters) >= _MOST_ROWS:
            key = Choice(choice.kernel, None, _OTHERS, runs_on=choice.runs_on), 0, 0, 0
        if key in counters:
            return counters[key]
        counter = counters[key] = Counter()
    new = ReportRow(*key, calls=0)
    logger.debug("%d x %d, M = %s: %s", new.n, new.k, new.tokens, new.choice)
    return counter


def dispatch_report() -> DispatchReport:
    """Return what low-latency linear ran in this process, what fell back, and why.

    Calls that a CUDA graph replays are not calls: they count once, at the capture. Behind 1,000
    rows what is new is counted together, in a row for each kernel. Where
    ``enable_low_latency_gemm`` met layers of a weight's shape, their names stand beside it; in a
    line, and in names, ``*`` stands for numbers that differ.

    Example:
        >>> import torch, k3cupy
        >>> k3cupy.reset_dispatch_report()
        >>> _ = k3cupy.low_latency_linear(torch.zeros(1, 16), torch.zeros(32, 16))
        >>> print(k3cupy.dispatch_report())
        +---------+---+-------+----------+------------------------------------------+
        | N x K   | M | calls | what ran | why                                      |
        +---------+---+-------+----------+------------------------------------------+
        | 32 x 16 | 1 |     1 | linear   | x: expected bfloat16, got float32 [rule] |
        +---------+---+-------+----------+------------------------------------------+
        0 of 1 calls ran a kernel of k3cupy
    """
    with _lock:
        found = [ReportRow(*key, calls=c.calls) for key, c in counters.items() if c.calls]
        layers: dict[tuple[int, int], list[str]] = {}
        for name, shape in _layers.values():
            layers.setdefault(shape, []).append(name)
    found.sort(key=lambda row: (row.n, row.k, row.num_tokens))
    return DispatchReport(tuple(found), layers)


def reset_dispatch_report() -> None:
    """Set every count to zero.

    Example:
        >>> import k3cupy
        >>> k3cupy.reset_dispatch_report()
        >>> len(k3cupy.dispatch_report())
        0
    """
    with _lock:
        for counter in counters.values():
            counter.calls = 0
