"""What ran and what fell back: a count for each choice, and a log line for each new one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from k3cupy.call.choice import Choice
from k3cupy.kernels.fused_a_gemm import MAX_TOKENS
from k3cupy.runtime.text import printable

logger = logging.getLogger("k3cupy.dispatch")

_MOST_ROWS, _OTHERS = 1000, "whatever came after the process's first 1000 rows"


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


@dataclass(frozen=True)
class DispatchReport:
    """What low-latency linear did in this process; prints as a table.

    Attributes:
        rows: by weight and number of tokens.
    """

    rows: tuple[ReportRow, ...]

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

    def __str__(self) -> str:
        """The table."""
        if not self.rows:
            return "no call of low-latency linear yet"
        cells = [("calls", "N x K", "M", "what ran", "why")]
        for row in self.rows:
            shape = f"{row.n} x {row.k}" if row.n else "-"
            why = f"{row.choice.reason} [{row.choice.origin}]"
            cells.append((str(row.calls), shape, row.tokens, row.choice.what, why))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        sides = [f"{side}{width}" for side, width in zip(">>><<", widths, strict=True)]
        lines = ["  ".join(map(format, row, sides)).rstrip() for row in cells]
        ours = self.calls - sum(row.calls for row in self.fallbacks)
        lines.append(f"{ours} of {self.calls} calls ran a kernel of k3cupy")
        return printable("\n".join(lines))


counters: dict[tuple[Choice, int, int, int], Counter] = {}
"""By choice, n, k and number of tokens."""

_lock = threading.Lock()


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
    rows what is new is counted together, in a row for each kernel.

    Example:
        >>> import torch, k3cupy
        >>> k3cupy.reset_dispatch_report()
        >>> _ = k3cupy.low_latency_linear(torch.zeros(1, 16), torch.zeros(32, 16))
        >>> print(k3cupy.dispatch_report())
        calls    N x K  M  what ran  why
            1  32 x 16  1  linear    x: expected bfloat16, got float32 [rule]
        0 of 1 calls ran a kernel of k3cupy
    """
    with _lock:
        found = [ReportRow(*key, calls=c.calls) for key, c in counters.items() if c.calls]
    found.sort(key=lambda row: (row.n, row.k, row.num_tokens))
    return DispatchReport(tuple(found))


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
