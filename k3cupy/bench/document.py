"""A run of a benchmark as the JSON document that is kept under ``benchmarks/results``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from k3cupy.timing import environment

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def slower_than(what: str, ratios: Mapping[str, float]) -> str:
    """Return a sentence on where ours was slower than something, of the ratio of each cell."""
    slower = [f"{cell} ({ratio:.3f} x)" for cell, ratio in ratios.items() if ratio > 1]
    cells = f": {', '.join(slower)}" if slower else ""
    return f"Slower than {what} in {len(slower)} of {len(ratios)}{cells}."


def of(
    benchmark: str,
    entries: Iterable[DataclassInstance],
    commit: str | None,
    *,
    method: Mapping[str, object],
    **beside: object,
) -> dict[str, Any]:
    """Return the document.

    Args:
        benchmark: its name, as ``forms`` lists it.
        entries: rows of results.
        commit: of the sources, where they are not in a git checkout.
        method: how it was measured, in words.
        **beside: what else the benchmark tells of the run.
    """
    return {
        "benchmark": benchmark,
        "environment": environment.describe(torch.cuda.current_device(), commit),
        "method": dict(method),
        **beside,
        "entries": [asdict(entry) for entry in entries],
    }
