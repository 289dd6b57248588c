"""Compiling, checking and timing on a GPU: CUDA graphs, cold weights, as a linear layer calls."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from k3cupy.dispatch import backends
from k3cupy.dispatch.presets import Shapes
from k3cupy.dispatch.tuning.candidates import LINEAR, Candidate, Target
from k3cupy.dispatch.tuning.engine import Effort
from k3cupy.ops.gemm_validate import FRIENDLY
from k3cupy.ops.plan_cache import Plan
from k3cupy.runtime import devices, instances
from k3cupy.runtime.errors import CompileError
from k3cupy.runtime.instances import Instance
from k3cupy.timing import cold
from k3cupy.timing.products import Product

_EFFORTS = {
    Effort.GLANCE: cold.Effort(rounds=1, replays=3, warm=1),
    Effort.FULL: cold.Effort(rounds=3, replays=3),
    Effort.EXTRA: cold.Effort(rounds=9, replays=3),
}
_MAX_THREADS = 16


class CudaMeter:
    """The meter of one GPU, for ``engine.measure_all``.

    Attributes:
        device: the GPU.
    """

    def __init__(self, shapes: Shapes, device: int) -> None:
        """Take memory for the weights of all shapes and start the compiling threads.

        Args:
            shapes: (N, K) of every product to come.
            device: GPU ordinal, the current one of PyTorch.
        """
        self.device = devices.info(device)
        self._threads = ThreadPoolExecutor(
            min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="k3cupy-tune"
        )
        self._compiled: dict[Instance, Future[Any]] = {}
        self._memory = cold.pool_of(shapes)
        self._work: _Work | None = None

    def compile(self, target: Target, candidates: Sequence[Candidate]) -> None:
        """Queue what is not queued yet."""
        for candidate in candidates:
            instance = candidate.instance(target)
            if instance not in self._compiled:
                # Each task runs in a copy of this context, which holds `source_dir`.
                run = contextvars.copy_context().run
                self._compiled[instance] = self._threads.submit(
                    run, instances.load, instance, self.device.index
                )

    def check(self, target: Target, candidate: Candidate) -> str | None:
        """Wait for the kernel, run it into poisoned memory and compare."""
        self.compile(target, [candidate])
        try:
            self._compiled[candidate.instance(target)].result()
            return self._at(target).check(candidate)
        except CompileError as error:
            return f"does not compile: {error}"
        except ValueError as error:
            return f"is refused: {error}"

    def time(self, target: Target, candidates: Sequence[Candidate], effort: Effort) -> list[float]:
        """Replay the graphs of the candidates in turns; each is recorded once."""
        return self._at(target).time(candidates, _EFFORTS[effort])

    def close(self) -> None:
        """Drop what is queued and wait for what is being compiled."""
        self._threads.shutdown(cancel_futures=True)
        self._work = None
        del self._memory
        torch.cuda.empty_cache()

    def _at(self, target: Target) -> _Work:
        if self._work is None or self._work.target != target:
            self._work = None  # the graphs of the last product go before new ones come
            self._work = _Work(target, self._memory)
        return self._work


class _Work:
    """One product with its tensors and graphs."""

    def __init__(self, target: Target, memory: torch.Tensor) -> None:
        self.target = target
        self._product = Product(target.n, target.k, target.tokens, residual=target.residual)
        self._weights = cold.weights_of(target.n, target.k, memory)
        self._recorded = cold.Recorded(self._weights)

    def check(self, candidate: Candidate) -> str | None:
        return self._product.check(call_of(self._product, candidate), self._weights[0])

    def time(self, candidates: Sequence[Candidate], effort: cold.Effort) -> list[float]:
        for candidate in candidates:
            if candidate not in self._recorded:
                self._recorded.record(candidate, call_of(self._product, candidate))
        return self._recorded.measure(candidates, effort)


def call_of(product: Product, candidate: Candidate) -> cold.Body:
    """Return a candidate's call as a linear layer makes it: the weight is static.

    A kernel of ours writes ``product.out``.
    """
    return product.linear if candidate == LINEAR else _Call(product, candidate)


class _Call:
    """A call of one of our kernels that takes the weight; weights differ in their address only."""

    def __init__(self, product: Product, candidate: Candidate) -> None:
        self._product, self._candidate = product, candidate
        self._plan: Plan | None = None

    def __call__(self, weight: torch.Tensor) -> None:
        """Queue the kernel.

        Raises:
            ValueError: the configuration cannot compute the product.
        """
        p = self._product
        values = (p.x, weight, p.out, p.residual)
        if self._plan is None:
            self._plan = backends.get(self._candidate.backend).make_plan(
                values, self._candidate.config, None, weight_is_static=True, batch_invariant=False
            )
        addresses, _, owners = FRIENDLY.arguments.probe(values, None)
        self._plan.run(values, addresses, None)
        del owners  # memory that exists only for this call has been used, or queued to be
