"""What the tuner times of each family: a call with its tensors, its check and what is replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from k3cupy.runtime import devices
from k3cupy.timing import cold, graphs, prefill_step
from k3cupy.timing.decode_step import LAUNCHES, DecodeStep, Neighbours
from k3cupy.timing.prefill_step import PrefillStep
from k3cupy.timing.products import Product

Body = Callable[[], Any]


class Bench(Protocol):
    """A call with its tensors.

    Attributes:
        launches: of one graph.
        replays: timed ones a round.
        base: what its times are counted from; None for nothing.
    """

    launches: int
    replays: int
    base: Body | None

    def check(self, kernel: str, config: Any) -> str | None:
        """Run a configuration into poisoned memory and say what is wrong, or None."""

    def body(self, kernel: str, config: Any) -> Body:
        """Return what is timed."""


class GemmBench:
    """A product with cold weights, cut from one pool of memory for all products."""

    replays = 3
    base: Body | None = None

    def __init__(self, n: int, k: int, tokens: int, residual: bool, pool: Any) -> None:
        self._product = Product(n, k, tokens, residual=residual)
        self._weights = cold.weights_of(n, k, pool)
        self.launches = cold.launches_of(self._weights)

    def check(self, kernel: str, config: Any) -> str | None:
        """Compare with the product in float32."""
        return self._product.check(self._product.call(kernel, config), self._weights[0])

    def body(self, kernel: str, config: Any) -> Body:
        """Return the call of a linear layer."""
        return graphs.in_turns(self._product.call(kernel, config), self._weights)


class DecodeBench:
    """The chain around the decode epilogue; what counts is what that adds to it."""

    launches, replays = LAUNCHES, 9

    def __init__(self, problem: str, tokens: int, heads: int) -> None:
        device = torch.cuda.current_device()
        self._step = DecodeStep(problem, tokens, heads)
        self._neighbours = Neighbours(device, pdl=devices.info(device).has_pdl)
        self.base: Body | None = self._neighbours.chain(self._step)

    def check(self, kernel: str, config: Any) -> str | None:
        """Compare all bits with the CPU reference."""
        return self._step.check(lambda: self._step.run(config))

    def body(self, kernel: str, config: Any) -> Body:
        """Return the chain with the epilogue."""
        return self._neighbours.chain(self._step, lambda: self._step.run(config))


class PrefillBench:
    """A prefill epilogue; for long prompts several sets of tensors take turns."""

    replays = 5
    base: Body | None = None

    def __init__(self, problem: str, tokens: int, heads: int) -> None:
        named = (problem, tokens, heads)
        size = prefill_step.bytes_moved(*named)
        sets = prefill_step.sets_of(tokens, size)
        self._steps = [PrefillStep(*named, seed=seed) for seed in range(sets)]
        self.launches = prefill_step.launches_of(size, sets)

    def check(self, kernel: str, config: Any) -> str | None:
        """Compare with the CPU reference, or with what was right before."""
        return self._steps[0].check(config)

    def body(self, kernel: str, config: Any) -> Body:
        """Return the call."""
        run = functools.partial(PrefillStep.run, config=config)
        return graphs.in_turns(run, self._steps)
