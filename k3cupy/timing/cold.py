"""Cold weights: in a model every layer has its own, so a launch does not find its weight in L2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from k3cupy.timing.chain import Chain
from k3cupy.timing.graphs import Effort, Recorded, in_turns

COLD_BYTES = 300 << 20
"""Weights of as many bytes take turns, several times what L2 holds."""

_MAX_WEIGHTS = 800
_LAUNCHES, _LAUNCHES_TO_TUNE, _LAUNCHES_OF_LARGE = 60, 32, 16
_LARGE_BYTES = 80 << 20
_GRAPHS_AT_ONCE = 16

Body = Callable[[torch.Tensor], Any]
"""A call that takes the weight."""


def pool_of(shapes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return random memory on the current GPU from which the weights of each shape can be cut."""
    size = max(max(2 * n * k, COLD_BYTES // 2 + n * k) for n, k in shapes)
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def weights_of(n: int, k: int, pool: torch.Tensor) -> list[torch.Tensor]:
    """Return weights [n, k] that take turns, cut from one tensor; two at least."""
    size = n * k
    count = max(2, min(_MAX_WEIGHTS, -(-COLD_BYTES // (2 * size))))
    return [pool[i * size : (i + 1) * size].view(n, k) for i in range(count)]


def launches_of(weights: Sequence[torch.Tensor]) -> int:
    """Return the launches of one graph: every weight at least once."""
    large = 2 * weights[0].numel() > _LARGE_BYTES
    return max(_LAUNCHES_OF_LARGE if large else _LAUNCHES, len(weights))


def in_short(
    weights: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor], int, Callable[[], Any] | None]:
    """Return what a tuner's many graphs do with: fewer weights, and launches of one graph.

    Where so few small weights would be found in L2, they lie far apart, and the third is what reads
    other memory, once a graph: they are as cold as if all took turns.
    """
    few = weights[:: -(-len(weights) // _LAUNCHES)]
    launches = max(min(launches_of(few), _LAUNCHES_TO_TUNE), len(few))
    if len(few) == len(weights):
        return few, launches, None
    other = torch.zeros(COLD_BYTES // 2, device=few[0].device, dtype=torch.bfloat16)
    total = other.new_empty(())
    return few, launches, lambda: torch.sum(other, 0, out=total)


class Timer:
    """Times bodies that take a weight; every launch gets the next one."""

    def __init__(self, weights: Sequence[torch.Tensor], effort: Effort | None = None) -> None:
        self._weights, self._effort = weights, effort or Effort()

    def added(self, bodies: Sequence[Body], chains: Chain | Sequence[Chain]) -> list[float]:
        """Return the microseconds that one launch of each body adds to a chain: what counts.

        Args:
            bodies: calls that take the weight.
            chains: the chain around all of them, or one for each.
        """
        every = [chains] * len(bodies) if isinstance(chains, Chain) else list(chains)
        return self._measure(bodies, self._weights, every)

    def alone(self, bodies: Sequence[Body]) -> list[float]:
        """Return the microseconds of one launch of each body that follows itself."""
        return self._measure(bodies, self._weights)

    def hot(self, bodies: Sequence[Body]) -> list[float]:
        """The same with one weight, which stays in L2 where it fits."""
        return self._measure(bodies, self._weights[:1])

    def _measure(
        self,
        bodies: Sequence[Body],
        weights: Sequence[torch.Tensor],
        chains: Sequence[Chain] | None = None,
    ) -> list[float]:
        times: list[float] = []
        for start in range(0, len(bodies), _GRAPHS_AT_ONCE):
            some = Recorded(launches_of(self._weights))
            names = range(start, min(start + _GRAPHS_AT_ONCE, len(bodies)))
            for i in names:
                body = in_turns(bodies[i], weights)
                some.record(i, chains[i].around(body) if chains else body)
            if chains is None:
                times += some.measure(names, self._effort)
                continue
            bases = [chains[i] for i in names]
            for chain in dict.fromkeys(bases):
                some.record(chain, chain.around())
            times += some.added(names, bases, self._effort)
        return times
