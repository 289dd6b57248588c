"""Compiling, checking and timing on a GPU: CUDA graphs, tensors as a model has them."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from k3cupy.choose.table import MLA_DECODE, MLA_NORM, MLA_QUERY, MLA_VALUE
from k3cupy.runtime import devices, instances
from k3cupy.runtime.errors import CompileError
from k3cupy.runtime.instances import Instance
from k3cupy.timing import graphs
from k3cupy.timing.benches import (
    Bench,
    GemmBench,
    LayerBench,
    PrefillBench,
    StepBench,
)
from k3cupy.timing.cold import pool_of
from k3cupy.timing.decode_step import DecodeStep
from k3cupy.timing.mla_steps import NormStep, QueryStep, ValueStep, kv_b_shape, layer_shape
from k3cupy.tuning.engine import Effort
from k3cupy.tuning.entries import Candidate
from k3cupy.tuning.targets import GemmTarget, Target

_WITH_WEIGHTS: Mapping[str, tuple[Any, Callable[[int], tuple[int, int]]]] = {
    MLA_QUERY: (QueryStep, layer_shape),
    MLA_VALUE: (ValueStep, kv_b_shape),
}
"""Family -> its step, and the shape of a layer's weights for a number of heads."""

_ROUNDS = {Effort.GLANCE: 1, Effort.FULL: 3, Effort.EXTRA: 9}


class CudaMeter:
    """Compiles, checks and times on one GPU, for ``engine.measure_all``.

    Attributes:
        gpu: the GPU.
    """

    def __init__(self, targets: Sequence[Target], device: int) -> None:
        """Take memory for all weights and start the compiling threads.

        All ``targets`` are of one family; ``device`` is the current one of PyTorch.
        """
        self.gpu = devices.info(device)
        self._threads = ThreadPoolExecutor(
            min(16, os.cpu_count() or 1), thread_name_prefix="k3cupy-tune"
        )
        self._compiled: dict[Instance, Future[Any]] = {}
        shapes = [shape for target in targets if (shape := _weights_of(target))]
        self._pool = pool_of(shapes) if shapes else None
        self._target: Target | None = None
        self._bench: Bench | None = None

    def compile(self, target: Target, candidates: Sequence[Candidate]) -> None:
        """Queue what candidates need and nobody queued yet; do not wait."""
        for candidate in candidates:
            instance = target.instance(candidate)
            if instance not in self._compiled:
                # Each task runs in a copy of this context, which holds `source_dir`.
                run = contextvars.copy_context().run
                self._compiled[instance] = self._threads.submit(
                    run, instances.load, instance, self.gpu.index
                )

    def check(self, target: Target, candidate: Candidate) -> str | None:
        """Say in words why a candidate cannot be used for a target, or None where it is right."""
        self.compile(target, [candidate])
        try:
            self._compiled[target.instance(candidate)].result()
            return self._at(target).check(*candidate)
        except CompileError as error:
            return f"does not compile: {error}"
        except ValueError as error:
            return f"is refused: {error}"

    def time(self, target: Target, candidates: Sequence[Candidate], effort: Effort) -> list[float]:
        """Return microseconds added to the chain; graphs take turns, and each is recorded once."""
        bench = self._at(target)
        for candidate in candidates:
            if candidate not in self._recorded:
                self._recorded.record(candidate, bench.body(*candidate))
        warm = 1 if effort is Effort.GLANCE else 2
        how = graphs.Effort(_ROUNDS[effort], bench.replays, warm)
        return self._recorded.added(candidates, [None] * len(candidates), how)

    def close(self) -> None:
        """Drop what is queued and wait for what is being compiled."""
        self._threads.shutdown(cancel_futures=True)
        self._pool = None
        self._forget()

    def _at(self, target: Target) -> Bench:
        if self._bench is None or self._target != target:
            self._forget()
            self._bench, self._target = self._made(target), target
            self._recorded = graphs.Recorded(self._bench.launches, self._bench.first)
            self._recorded.record(None, self._bench.base())
        return self._bench

    def _made(self, target: Target) -> Bench:
        if isinstance(target, GemmTarget):
            return GemmBench(target.n, target.k, target.tokens, target.residual, self._pool)
        named = target.kind, target.tokens, target.heads
        if target.family in _WITH_WEIGHTS:
            make_step, shape_of = _WITH_WEIGHTS[target.family]
            return LayerBench(make_step(*named), shape_of(target.heads), self._pool)
        if target.family == MLA_NORM:
            return StepBench(NormStep(target.tokens))
        if target.family == MLA_DECODE:
            return StepBench(DecodeStep(*named))
        return PrefillBench(*named)

    def _forget(self) -> None:
        """Let go of tensors and graphs before those of the next target come."""
        self._bench, self._recorded = None, graphs.Recorded(0)
        torch.cuda.empty_cache()  # each graph has memory of its own


def _weights_of(target: Target) -> tuple[int, int] | None:
    """Return the shape of a layer's weights, in one piece; None where there are none."""
    if isinstance(target, GemmTarget):
        return target.n, target.k
    if target.family not in _WITH_WEIGHTS:
        return None
    _, shape_of = _WITH_WEIGHTS[target.family]
    return shape_of(target.heads)
