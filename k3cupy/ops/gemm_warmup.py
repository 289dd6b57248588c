"""What the warm-ups of the GEMMs share: weights by shape, and numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from k3cupy import projections
from k3cupy.ops import checks
from k3cupy.ops.warmup_options import several


def shapes_of(
    shapes: Iterable[tuple[int, int]] | None, k_multiple: int
) -> tuple[tuple[int, int], ...]:
    """Return (N, K) of each weight; None stands for every projection of Kimi-K3.

    Args:
        shapes: what the caller gave.
        k_multiple: K is a multiple of this.

    Raises:
        ValueError: there is none, or one that no call can have.
    """
    pairs = [(p.n, p.k) for p in projections.shapes()] if shapes is None else list(shapes)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_is_count, pair))):
            checks.reject("shapes", "pairs (N, K) of integers above 0", repr(pair))
        if pair[1] % k_multiple:
            checks.reject("shapes", f"K a multiple of {k_multiple}", repr(pair))
    if not pairs:
        checks.reject("shapes", "at least one", "none")
    return tuple((n, k) for n, k in pairs)


def tokens_of(tokens: int | Iterable[int] | None, most: int) -> tuple[int, ...]:
    """Return the numbers of tokens; None stands for all.

    Args:
        tokens: what the caller gave.
        most: the most that one call can have.

    Raises:
        ValueError: there is none, or one that no call can have.
    """
    counts = range(1, most + 1) if tokens is None else several(tokens)
    for count in counts:
        if not _is_count(count) or count > most:
            checks.reject("tokens", f"numbers from 1 to {most}", repr(count))
    if not counts:
        checks.reject("tokens", "at least one", "none")
    return tuple(counts)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
