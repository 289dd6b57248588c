"""Benchmark of low-latency linear: what it chooses, against the best candidates and ``F.linear``.

Weights are cold, as in ``bench gemm``. The calls are those of a linear layer: the output is new,
the weight is static. The candidates are the fastest that the tables list for the product; measured
again in the same run they show whether the choice still holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import k3cupy
from k3cupy import projections
from k3cupy.bench import document, floor
from k3cupy.bench.forms import PAGE_SHAPES
from k3cupy.choose import gemm
from k3cupy.choose.gemm import ALL, FUSED_A, SKINNY
from k3cupy.choose.table import GEMM, tables_of
from k3cupy.projections import StridedCase
from k3cupy.runtime import devices, instances
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.timing import graphs
from k3cupy.timing.cold import COLD_BYTES, Body, Timer, pool_of, weights_of
from k3cupy.timing.graphs import Effort
from k3cupy.timing.products import Product
from k3cupy.tuning.entries import LINEAR, Candidate, times_of
from k3cupy.tuning.targets import GemmTarget

TOKENS = tuple(range(1, 17))
_STRIDED_TOKENS = (1, 4, 16)
_BEST_OF_TABLE = 3
_EFFORT = Effort(rounds=5, replays=5)


@dataclass
class Entry:
    """One row of results; times in microseconds a launch, weights cold.

    Attributes:
        kind: the shape, ``"2112x7168"``; of a strided case also the columns of the wider tensor.
        n: rows of the weight.
        k: its columns.
        tokens: M.
        floor_us: a kernel that only streams the weight.
        linear_us: ``torch.nn.functional.linear``, on the same slice in a strided case.
        dispatched_us: ``low_latency_linear``.
        dispatched: the kernel that it runs, with its configuration as tables write it.
        reason: why that one, in words.
        candidates: times of the best candidates of the table, by name.
    """

    kind: str
    n: int
    k: int
    tokens: int
    floor_us: float
    linear_us: float
    dispatched_us: float
    dispatched: str
    reason: str
    candidates: dict[str, float] = field(default_factory=dict)


def best_of_table(target: GemmTarget, gpu: DeviceInfo) -> tuple[Candidate, ...]:
    """Return the candidates that are the fastest for a product by the tables, the best first."""
    numbers = (target.n, target.k, target.tokens)
    listed = (gemm.entry_at(table, *numbers, residual=False)[0] for table in tables_of(GEMM, gpu))
    entry = next((found for found in listed if found is not None), None)
    times: dict[Candidate, float] = {}
    for (kernel, config), us in times_of(entry).items() if entry else ():
        if kernel != LINEAR.kernel and gemm.why_not(kernel, target.k, target.tokens) is None:
            fitted = gemm.fits(kernel, config, target.tokens, gpu)
            if fitted is not None:
                times[Candidate(kernel, fitted)] = us
    return tuple(sorted(times, key=times.__getitem__)[:_BEST_OF_TABLE])


def ours(x: torch.Tensor) -> Body:
    """Return the call as a linear layer makes it."""
    return lambda weight: k3cupy.low_latency_linear(x, weight, weight_is_static=True)


def run_entry(
    product: Product,
    weights: Sequence[torch.Tensor],
    floors: Sequence[Body],
    candidates: Sequence[Candidate],
    strided: StridedCase | None = None,
) -> Entry:
    """Check, then time one product.

    Raises:
        RuntimeError: it is wrong; nothing was timed.
    """
    n, k, tokens = product.n, product.k, product.tokens
    x = product.x if strided is None else product.strided
    kind = f"{n}x{k}" if strided is None else f"{n}x{k} of {strided.source_row_width}"
    ran = k3cupy.explain_low_latency_gemm(x, weights[0])
    dispatched = Candidate(ran.kernel, ran.config)
    calls = {str(candidate): product.call(*candidate) for candidate in candidates}
    checked: dict[str, Body] = {
        f"low_latency_linear ({dispatched})": lambda w: product.out.copy_(ours(x)(w)),
        **calls,
    }
    for name, call in checked.items():
        wrong = product.check(call, weights[0])
        if wrong is not None:
            raise RuntimeError(f"{kind}, M = {tokens}, {name}: {wrong}, not timed")

    def linear(weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    timer, chain = Timer(weights, _EFFORT), product.chain(x=x)
    *times, linear_us, us = timer.added([*calls.values(), *floors, linear, ours(x)], chain)
    return Entry(
        kind=kind,
        n=n,
        k=k,
        tokens=tokens,
        floor_us=min(times[len(calls) :]),
        linear_us=linear_us,
        dispatched_us=us,
        dispatched=str(dispatched),
        reason=ran.reason,
        candidates=dict(zip(calls, times, strict=False)),
    )


def run(shapes: Sequence[tuple[int, int]], tokens: Sequence[int] = TOKENS) -> Iterator[Entry]:
    """Yield the entries of packed x, then those of the two strided projections.

    Args:
        shapes: (n, k) of the weights.
        tokens: M; the strided projections have their own.
    """
    device = devices.info(torch.cuda.current_device())
    targets = [GemmTarget(n, k, count) for n, k in shapes for count in tokens]
    best = {target: best_of_table(target, device) for target in targets}
    cases = projections.strided_cases()
    every = [*shapes, *((case.n, case.k) for case in cases)]
    planned = {t: gemm.choose(ALL, t.n, t.k, t.tokens, device) for t in targets}
    wanted = [t.instance(c) for t, found in best.items() for c in found]
    wanted += [
        t.instance(Candidate(choice.kernel, choice.config))
        for t, choice in planned.items()
        if not choice.is_fallback
    ]
    instances.load_all(wanted, device.index)
    pool = pool_of(every)
    for n, k in shapes:
        weights = weights_of(n, k, pool)
        products = [Product(n, k, count) for count in tokens]
        floors = floor.fastest(weights, products[0].chain())
        for product in products:
            candidates = best[GemmTarget(n, k, product.tokens)]
            yield run_entry(product, weights, floors, candidates)
    for case in cases:
        weights = weights_of(case.n, case.k, pool)
        width, offset = case.source_row_width, case.offset
        products = [
            Product(case.n, case.k, count, row_width=width, offset=offset)
            for count in _STRIDED_TOKENS
        ]
        floors = floor.fastest(weights, products[0].chain())
        for product in products:
            yield run_entry(product, weights, floors, (), case)


def remarks(entries: Sequence[Entry]) -> list[str]:
    """Return the figures over many entries, as sentences."""
    found = []
    shown = [entry for entry in entries if entry.kind in PAGE_SHAPES]
    if shown:
        means = {
            count: _mean_speed_up([e for e in shown if e.tokens == count])
            for count in dict.fromkeys(entry.tokens for entry in shown)
        }
        told = ", ".join(f"{mean:.2f} at M = {count}" for count, mean in means.items())
        shapes = len({entry.kind for entry in shown})
        found.append(
            f"Geometric mean of the speed-up over F.linear, {shapes} shapes: "
            f"{_mean_speed_up(shown):.2f} over all M; {told}."
        )
    worst = max(entries, key=_over_best)
    found.append(
        f"Furthest from the best measured beside it: {_over_best(worst):.3f} x, {worst.kind} at "
        f"M = {worst.tokens}."
    )
    return found


def _mean_speed_up(entries: Sequence[Entry]) -> float:
    return statistics.geometric_mean(entry.linear_us / entry.dispatched_us for entry in entries)


def _over_best(entry: Entry) -> float:
    return entry.dispatched_us / min([entry.linear_us, *entry.candidates.values()])


def host_time(n: int = 2112, k: int = 7168, tokens: int = 4) -> dict[str, float]:
    """Return the host's microseconds for one repeated eager call.

    ``low_latency_linear``, the kernel that it runs called directly, and ``F.linear``.
    """
    product = Product(n, k, tokens)
    weight = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16)
    x = product.x
    ran = k3cupy.explain_low_latency_gemm(x, weight)
    kernels: dict[str, Callable[..., Any]] = {
        FUSED_A: k3cupy.fused_a_gemm,
        SKINNY: k3cupy.skinny_gemm,
    }
    kernel = kernels.get(ran.kernel)
    found = {"low_latency_linear": graphs.host_us(lambda: ours(x)(weight))}
    if kernel is not None:
        found[f"{kernel.__name__} called directly"] = graphs.host_us(
            lambda: kernel(x, weight, weight_is_static=True)
        )
    found["F.linear"] = graphs.host_us(lambda: torch.nn.functional.linear(x, weight))
    return found


def as_document(entries: Sequence[Entry], commit: str | None = None) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "linear",
        entries,
        commit,
        method={
            "statistic": "median of 5 rounds of 5 replays of a CUDA graph, microseconds a launch",
            "weights": f"cold: {COLD_BYTES >> 20} MiB of weights take turns",
            "floor": f"16-byte loads of the weight, the best of {len(floor.FORMS)} forms, PDL on",
            "ours": "low_latency_linear with weight_is_static; candidates: PDL on, the same "
            "promise, output given",
        },
        host_us={"2112x7168, M = 4": host_time()},
        remarks=remarks(entries),
    )
