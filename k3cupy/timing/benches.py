"""What the tuner times of each family: a call with its tensors, its check and its chain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from k3cupy.kernels.mla_query import SEPARATE
from k3cupy.timing import cold, graphs, prefill_step
from k3cupy.timing.chain import Body
from k3cupy.timing.decode_step import LAUNCHES, DecodeStep
from k3cupy.timing.mla_steps import NormStep, QueryStep, ValueStep
from k3cupy.timing.prefill_step import PrefillStep
from k3cupy.timing.products import Product


class Bench(Protocol):
    """A call with its tensors; what counts is the time that it adds to its chain.

    Attributes:
        launches: of one graph.
        replays: timed ones a round.
        first: what each graph begins with, if anything.
    """

    launches: int
    replays: int
    first: Callable[[], Any] | None

    def check(self, kernel: str, config: Any) -> str | None:
        """Run a configuration into poisoned memory and say what is wrong, or None."""

    def base(self) -> Body:
        """Return the chain without the call."""

    def body(self, kernel: str, config: Any) -> Body:
        """Return the chain with the call."""


class GemmBench:
    """A product with cold weights, cut from one pool of memory for all products."""

    replays = 3

    def __init__(self, n: int, k: int, tokens: int, residual: bool, pool: Any) -> None:
        self._product = Product(n, k, tokens, residual=residual)
        self._weights, self.launches, self.first = cold.in_short(cold.weights_of(n, k, pool))
        self._chain = self._product.chain()

    def check(self, kernel: str, config: Any) -> str | None:
        """Compare with the product in float32."""
        return self._product.check(self._product.call(kernel, config), self._weights[0])

    def base(self) -> Body:
        """Return what writes x and what reads the product."""
        return self._chain.around()

    def body(self, kernel: str, config: Any) -> Body:
        """Return the same with the call of a linear layer between them."""
        call = self._product.call(kernel, config)
        return self._chain.around(graphs.in_turns(call, self._weights))


class StepBench:
    """A step without weights in its chain: the decode epilogue, or the norms."""

    launches, replays = LAUNCHES, 9
    first: Callable[[], Any] | None = None

    def __init__(self, step: DecodeStep | NormStep) -> None:
        self._step, self._chain = step, step.chain()

    def check(self, kernel: str, config: Any) -> str | None:
        """Compare with what is right, as the step does."""
        return self._step.check(lambda: self._step.run(config))

    def base(self) -> Body:
        """Return the chain without the step."""
        return self._chain.around()

    def body(self, kernel: str, config: Any) -> Body:
        """Return the chain with the step."""
        return self._chain.around(lambda: self._step.run(config))


class PrefillBench:
    """A prefill epilogue; for long prompts several sets of tensors take turns."""

    replays = 5
    first: Callable[[], Any] | None = None

    def __init__(self, problem: str, tokens: int, heads: int) -> None:
        named = (problem, tokens, heads)
        size = prefill_step.bytes_moved(*named)
        sets = prefill_step.sets_of(tokens, size)
        self._steps = [PrefillStep(*named, seed=seed) for seed in range(sets)]
        self._chains = [step.chain() for step in self._steps]
        self.launches = prefill_step.launches_of(size, sets)

    def check(self, kernel: str, config: Any) -> str | None:
        """Compare with the CPU reference, or with what was right before."""
        return self._steps[0].check(lambda: self._steps[0].run(config))

    def base(self) -> Body:
        """Return what writes the keys' and values' source and what reads the result, in turns."""
        return graphs.in_turns(lambda link: link(), [chain.around() for chain in self._chains])

    def body(self, kernel: str, config: Any) -> Body:
        """Return the same with the call between them."""
        links = [
            chain.around(functools.partial(step.run, config))
            for chain, step in zip(self._chains, self._steps, strict=True)
        ]
        return graphs.in_turns(lambda link: link(), links)


class LayerBench:
    """The query front behind the first projection, or a product with a matrix of each head.

    Weights are cold. The separate kernels that compute what the query front does are its kernel
    ``"separate"``.
    """

    replays = 3

    def __init__(self, step: QueryStep | ValueStep, shape: tuple[int, int], pool: Any) -> None:
        self._step = step
        behind = step.behind_projection if isinstance(step, QueryStep) else step.chain
        self._chain = behind()
        self._weights, self.launches, self.first = cold.in_short(cold.weights_of(*shape, pool))

    def check(self, kernel: str, config: Any) -> str | None:
        """Compare with the same in float64."""
        return self._step.check(self._call(kernel, config), self._weights[0])

    def base(self) -> Body:
        """Return what writes the input and what reads the output."""
        return self._chain.around()

    def body(self, kernel: str, config: Any) -> Body:
        """Return the same with the call between them."""
        return self._chain.around(graphs.in_turns(self._call(kernel, config), self._weights))

    def _call(self, kernel: str, config: Any) -> cold.Body:
        step = self._step
        if kernel == SEPARATE and isinstance(step, QueryStep):
            return step.separate
        return lambda weights: step.run(weights, config)
