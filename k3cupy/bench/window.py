"""Benchmark of windows: the kernels of a layer in order, and where the time goes.

The kernels stand in one CUDA graph under programmatic dependent launch, layer after layer, each
with cold weights of its own, and a consumer behind them. What a kernel is charged with is what the
window takes longer with it than without: every prefix is measured, with a consumer of its own.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from k3cupy.bench import document, floor
from k3cupy.bench.layers import (
    COLUMNS,
    CUBLAS,
    FEWER,
    OURS,
    PLAN,
    STRUCTURE,
    WINDOWS,
    Step,
    Weights,
    Window,
)
from k3cupy.bench.linear import best_of_table
from k3cupy.choose import gemm
from k3cupy.choose.gemm import FUSED_A
from k3cupy.runtime import devices, instances
from k3cupy.timing.chain import Chain, consumer_of
from k3cupy.timing.cold import COLD_BYTES, Body
from k3cupy.timing.graphs import Effort, Recorded, in_turns
from k3cupy.tuning.entries import LINEAR, Candidate
from k3cupy.tuning.targets import GemmTarget

TOKENS = (1, 2, 4, 8, 16, 64)
CONSUMER = "consumer"

_LAYERS = 60
_EFFORT, _GLANCE = Effort(rounds=5, replays=5), Effort(rounds=3, replays=5)
_FEW_STAGES = (3, 4, 5)
"""Of the fused-A GEMM, so that it leaves shared memory to the kernel behind it."""


@dataclass
class Entry:
    """One window with a number of tokens; times in microseconds a layer, weights cold.

    Attributes:
        kind: the window.
        tokens: B.
        bytes: of the weights.
        floor_us: streaming the weights in one go, and the consumer.
        added_us: column -> what each kernel adds, by name, in order; the first is the consumer
            alone. Together they are the window.
        ran: column -> which kernel ran, by name, where columns differ.
        tried_us: the whole window of fewer launches with each candidate for its first product; the
            best of them is what ran.
    """

    kind: str
    tokens: int
    bytes: int
    floor_us: float
    added_us: dict[str, dict[str, float]]
    ran: dict[str, dict[str, str]] = field(default_factory=dict)
    tried_us: dict[str, float] = field(default_factory=dict)


def layers_of(
    shapes: Mapping[str, tuple[int, ...]], device: str = "cuda", count: int | None = None
) -> tuple[list[torch.Tensor], list[Weights]]:
    """Return the weights of layers that take turns, of one layer in one piece, and cut by name.

    A sum over K values keeps the size of its inputs. There are as many layers as are cold, or
    ``count``.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    count = count or max(2, -(-COLD_BYTES // (2 * sum(sizes))))
    pieces: list[torch.Tensor] = []
    cut: list[Weights] = []
    for _ in range(count):
        piece = torch.randn(sum(sizes), device=device, dtype=torch.bfloat16)
        parts = zip(shapes.items(), piece.split(sizes), strict=True)
        cut.append({name: part.view(s).mul_(s[1] ** -0.5) for (name, s), part in parts})
        pieces.append(piece)
    return pieces, cut


def prefixes(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """Return the beginnings of a window, by their last kernel; the consumer alone first."""
    names = [CONSUMER, *(step.name for step in steps)]
    return {name: list(steps[:count]) for count, name in enumerate(names)}


def added(times: Mapping[str, float]) -> dict[str, float]:
    """Return what each kernel adds, of the times of the prefixes."""
    pairs = itertools.pairwise([0.0, *times.values()])
    return {name: round(us - before, 4) for name, (before, us) in zip(times, pairs, strict=True)}


def candidates_of(window: Window, tokens: int) -> tuple[Candidate, ...]:
    """Return what may compute the product that a window tries, all of it compiled.

    That is what the tables list, and of it the fused-A GEMM with fewer stages.
    """
    if not window.tried:
        return ()
    gpu = devices.info(torch.cuda.current_device())
    n, k = window.shapes[window.tried]
    target = GemmTarget(n, k, tokens)
    listed = best_of_table(target, gpu, None)
    fewer = [
        Candidate(FUSED_A, replace(config, stages=count, stages_x=min(count, config.stages_x)))
        for kernel, config in listed
        for count in _FEW_STAGES
        if kernel == FUSED_A and count < config.stages
    ]
    fitting = [candidate for candidate in fewer if candidate.config.fits(tokens, gpu)]
    found = tuple(dict.fromkeys((*listed, *fitting)))
    instances.load_all([target.instance(candidate) for candidate in found], gpu.index)
    return found


def fastest_of(
    window: Window, candidates: Sequence[Candidate], weights: Sequence[Weights]
) -> tuple[list[Step], dict[str, float]]:
    """Return the window of fewer launches with the best of some candidates, and all times.

    Raises:
        RuntimeError: a window with one of them is wrong; nothing was timed.
    """
    recorded = Recorded(max(_LAYERS, len(weights)))
    tried = {candidate: window.steps(FEWER, candidate) for candidate in candidates}
    for candidate, steps in tried.items():
        wrong = window.check(steps, weights[0])
        if wrong is not None:
            raise RuntimeError(f"{candidate} for {window.tried}: {wrong}, not timed")
        recorded.record(candidate, in_turns(_layer(steps), weights))
    times = dict(zip(tried, recorded.measure(list(tried), _GLANCE), strict=True))
    best = min(times, key=times.__getitem__)
    return tried[best], {str(candidate): us for candidate, us in times.items()}


def _layer(steps: Sequence[Step], last: Step | None = None) -> Callable[[Weights], None]:
    """Return a layer: its kernels, and what reads the output of the last, or of a given one."""
    consume = consumer_of((last or steps[-1]).out)

    def layer(of: Weights) -> None:
        for step in steps:
            step.run(of)
        consume()

    return layer


def run_entry(
    kind: str,
    tokens: int,
    window: Window,
    pieces: Sequence[torch.Tensor],
    weights: Sequence[Weights],
    streams: Sequence[Body],
    candidates: Sequence[Candidate] = (),
) -> Entry:
    """Check, then time one window in all its columns.

    Args:
        kind: its name.
        tokens: B.
        window: its kernels.
        pieces: the weights of layers that take turns, each in one piece.
        weights: the same by name.
        streams: what streams a piece the fastest.
        candidates: for the product that the window tries; none for what the table chooses.

    Raises:
        RuntimeError: a column is wrong; nothing was timed.
    """
    columns = {column: window.steps(column, None) for column in window.columns}
    tried_us: dict[str, float] = {}
    if candidates:
        columns[FEWER], tried_us = fastest_of(window, candidates, weights)
    for column, steps in columns.items():
        wrong = window.check(steps, weights[0])
        if wrong is not None:
            raise RuntimeError(f"{kind}, B = {tokens}, {column}: {wrong}, not timed")

    recorded = Recorded(max(_LAYERS, len(weights)))
    names: list[tuple[str, str]] = []
    for column, steps in columns.items():
        for name, some in prefixes(steps).items():
            names.append((column, name))
            recorded.record(names[-1], in_turns(_layer(some, (some or steps)[-1]), weights))
    for i, stream in enumerate(streams):
        recorded.record(i, _last(window).around(in_turns(stream, pieces)))
    times = recorded.measure([*names, *range(len(streams))], _EFFORT)
    of_names = dict(zip(names, times, strict=False))
    return Entry(
        kind=kind,
        tokens=tokens,
        bytes=2 * pieces[0].numel(),
        floor_us=min(times[len(names) :]),
        added_us={
            column: added({name: us for (of, name), us in of_names.items() if of == column})
            for column in columns
        },
        ran={column: {s.name: s.ran for s in steps if s.ran} for column, steps in columns.items()},
        tried_us=tried_us,
    )


def run(
    kinds: Sequence[str] = tuple(WINDOWS),
    tokens: Sequence[int] = TOKENS,
    qkv_a: Sequence[Candidate] | None = None,
) -> Iterator[Entry]:
    """Yield the entries of a whole run.

    Args:
        kinds: windows, from ``WINDOWS``.
        tokens: batch sizes.
        qkv_a: what may compute that product in front of the query front in one launch; None for
            ``candidates_of``.
    """
    for kind in kinds:
        windows = {count: WINDOWS[kind](count) for count in tokens}
        first = next(iter(windows.values()))
        pieces, weights = layers_of(first.shapes)
        streams = floor.fastest(pieces, _last(first))
        for count, window in windows.items():
            tried = candidates_of(window, count) if qkv_a is None else qkv_a
            candidates = _fitting(tried, count) if window.tried else ()
            yield run_entry(kind, count, window, pieces, weights, streams, candidates)


def _fitting(candidates: Sequence[Candidate], tokens: int) -> list[Candidate]:
    """Return those candidates that can compute a number of tokens."""
    gpu = devices.info(torch.cuda.current_device())
    fitted = (Candidate(c.kernel, gemm.fits(*c, tokens, gpu)) for c in candidates if c != LINEAR)
    return [candidate for candidate in fitted if candidate.config is not None]


def _last(window: Window) -> Chain:
    """Return the end of a window as a chain that nothing begins."""
    return Chain(lambda: None, consumer_of([*window.outputs.values()][-1]))


def remarks(entries: Sequence[Entry]) -> list[str]:
    """Return the figures over many entries, as sentences."""
    found = []
    for kind in dict.fromkeys(entry.kind for entry in entries):
        few = [entry for entry in entries if entry.kind == kind and entry.tokens <= 16]
        if few:
            ratios = [total(e.added_us[OURS]) / total(e.added_us[STRUCTURE]) for e in few]
            found.append(
                f"{kind}, ours over the public structure, up to 16 tokens: geometric mean "
                f"{statistics.geometric_mean(ratios):.3f}, worst {max(ratios):.3f}."
            )
    others = {CUBLAS: "cuBLAS", STRUCTURE: "the public structure", PLAN: "the public plan"}
    for column, name in others.items():
        over = {
            f"{e.kind} at B = {e.tokens}": total(e.added_us[OURS]) / total(e.added_us[column])
            for e in entries
        }
        found.append(document.slower_than(name, over))
    found += _of_fewer([entry for entry in entries if FEWER in entry.added_us])
    beaten = [e for e in entries if min(map(total, e.added_us.values())) < e.floor_us]
    if beaten:
        cells = ", ".join(f"{e.kind} at B = {e.tokens}" for e in beaten)
        found.append(f"A floor that a window beats is none: {cells}.")
    return found


def _of_fewer(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield how the windows of fewer launches compare, at each number of tokens.

    The best of the other columns takes the best of each product that was measured, with the same
    kernels between; without the consumer it is what the kernels add.
    """
    others = {STRUCTURE: "the public structure", PLAN: "the public plan", OURS: "ours, separate"}
    for kind in dict.fromkeys(entry.kind for entry in entries):
        here = [entry for entry in entries if entry.kind == kind]
        for column, name in others.items():
            ratios = (total(e.added_us[FEWER]) / total(e.added_us[column]) for e in here)
            yield f"{kind} in fewer launches, over {name}: {_at_each(here, ratios)}."
        best = {id(e): min((e.added_us[c] for c in COLUMNS), key=total) for e in here}
        whole = (total(e.added_us[FEWER]) / total(best[id(e)]) for e in here)
        yield (
            f"{kind} in fewer launches, over the best of the other columns: "
            f"{_at_each(here, whole)}; without the consumer "
            + _at_each(here, (_kernels(e.added_us[FEWER]) / _kernels(best[id(e)]) for e in here))
            + "."
        )


def _at_each(entries: Sequence[Entry], ratios: Iterable[float]) -> str:
    pairs = zip(entries, ratios, strict=True)
    return ", ".join(f"{ratio:.3f} at B = {entry.tokens}" for entry, ratio in pairs)


def _kernels(added_us: Mapping[str, float]) -> float:
    return total(added_us) - added_us[CONSUMER]


def total(added_us: Mapping[str, float]) -> float:
    """Return the time of the whole window."""
    return math.fsum(added_us.values())


def as_document(entries: Sequence[Entry], commit: str | None = None) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "window",
        entries,
        commit,
        method={
            "statistic": "median of 5 rounds of 5 replays of a CUDA graph, microseconds a layer",
            "weights": f"cold: layers of {COLD_BYTES >> 20} MiB take turns, all promised static",
            "added": "the time of a prefix, with a consumer behind it, less that of the one before",
            "floor": "the weights of a layer streamed in one go, the best of many forms, and the "
            "consumer",
        },
        remarks=remarks(entries),
    )
