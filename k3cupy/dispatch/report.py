"""What ran and what fell back: a count for each decision, and a log line for each new one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from k3cupy.dispatch.decision import LinearDecision
from k3cupy.ops.fused_a_gemm_config import MAX_TOKENS

logger = logging.getLogger("k3cupy.dispatch")

_MANY = MAX_TOKENS + 1
"""Stands for every number of tokens beyond what one launch takes."""


class Counter:
    """How often a decision was met."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


@dataclass(frozen=True)
class ReportRow:
    """One line of a report.

    Attributes:
        decision: what ran, and why; its ``num_tokens`` is 65 for any number above 64.
        calls: how often.
    """

    decision: LinearDecision
    calls: int

    @property
    def tokens(self) -> str:
        """The number of tokens in words."""
        count = self.decision.num_tokens
        return f">{MAX_TOKENS}" if count > MAX_TOKENS else str(count)


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
        return tuple(row for row in self.rows if row.decision.is_fallback)

    def __str__(self) -> str:
        """The table."""
        if not self.rows:
            return "no call of low-latency linear yet"
        cells = [("calls", "N x K", "M", "what ran", "why")]
        for row in self.rows:
            d = row.decision
            shape = f"{d.n} x {d.k}" if d.n else "-"
            cells.append((str(row.calls), shape, row.tokens, d.kernel, f"{d.reason} [{d.source}]"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for calls, shape, tokens, what, why in cells:
            numbers = f"{calls:>{widths[0]}}  {shape:>{widths[1]}}  {tokens:>{widths[2]}}"
            lines.append(f"{numbers}  {what:<{widths[3]}}  {why}")
        ours = self.calls - sum(row.calls for row in self.fallbacks)
        lines.append(f"{ours} of {self.calls} calls ran a kernel of k3cupy")
        return "\n".join(lines)


_counters: dict[LinearDecision, Counter] = {}
_lock = threading.Lock()


def counter_of(decision: LinearDecision) -> Counter:
    """Return the counter of a decision; one that is new is logged at debug level."""
    if decision.num_tokens > MAX_TOKENS:
        decision = replace(decision, num_tokens=_MANY)
    with _lock:
        counter = _counters.get(decision)
        if counter is not None:
            return counter
        counter = _counters[decision] = Counter()
    logger.debug(
        "%d x %d, M = %s: %s", decision.n, decision.k, ReportRow(decision, 0).tokens, decision
    )
    return counter


def dispatch_report() -> DispatchReport:
    """Return what low-latency linear ran in this process, what fell back, and why.

    Calls that a CUDA graph replays are not calls: they count once, at the capture.

    Example:
        >>> import torch, k3cupy
        >>> k3cupy.reset_dispatch_report()
        >>> _ = k3cupy.low_latency_linear(torch.zeros(1, 16), torch.zeros(32, 16))
        >>> print(k3cupy.dispatch_report())
        calls    N x K  M  what ran  why
            1  32 x 16  1  linear    x and the weight are float32, not bfloat16 [rule]
        0 of 1 calls ran a kernel of k3cupy
    """
    with _lock:
        found = [ReportRow(decision, c.calls) for decision, c in _counters.items() if c.calls]
    found.sort(key=lambda row: (row.decision.n, row.decision.k, row.decision.num_tokens))
    return DispatchReport(tuple(found))


def reset_dispatch_report() -> None:
    """Set every count to zero.

    Example:
        >>> k3cupy.reset_dispatch_report()
        >>> len(k3cupy.dispatch_report())
        0
    """
    with _lock:
        for counter in _counters.values():
            counter.calls = 0
