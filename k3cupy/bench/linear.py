"""Benchmark of low-latency linear: what it chooses, against what the public plan would run.

That plan is vLLM's own table for an H200. ``F.linear`` and the best candidates stand beside it.

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
from k3cupy.bench import document, floor, public
from k3cupy.bench.forms import PAGE_SHAPES
from k3cupy.choose import gemm
from k3cupy.choose.gemm import ALL, FUSED_A, SKINNY
from k3cupy.choose.table import GEMM, tables_of
from k3cupy.projections import StridedCase
from k3cupy.runtime import devices, instances
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.timing import graphs
from k3cupy.timing.chain import NEIGHBOURS, told
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
    """One row of results; microseconds that the product adds to its chain, weights cold.

    Attributes:
        kind: the shape, ``"2112x7168"``; of a strided case also the columns of the wider tensor.
        n: rows of the weight.
        k: its columns.
        tokens: M.
        floor_us: a kernel that only streams the weight.
        linear_us: ``torch.nn.functional.linear``, on the same slice in a strided case.
        plan_us: what vLLM's table for an H200 names, by kernels of ours in the public structures.
        plan: its name, with a configuration where it has one.
        dispatched_us: ``low_latency_linear``.
        alone_us: ``"linear"``, ``"plan"`` and ``"ours"`` after themselves.
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
    plan_us: float
    plan: str
    dispatched_us: float
    alone_us: dict[str, float]
    dispatched: str
    reason: str
    candidates: dict[str, float] = field(default_factory=dict)


def best_of_table(
    target: GemmTarget, gpu: DeviceInfo, count: int | None = _BEST_OF_TABLE
) -> tuple[Candidate, ...]:
    """Return the candidates that are the fastest for a product by the tables, the best first.

    Args:
        target: the product.
        gpu: whose tables.
        count: how many; None for all.
    """
    numbers = (target.n, target.k, target.tokens)
    listed = (gemm.entry_at(table, *numbers, residual=False)[0] for table in tables_of(GEMM, gpu))
    entry = next((found for found in listed if found is not None), None)
    times: dict[Candidate, float] = {}
    for (kernel, config), us in times_of(entry).items() if entry else ():
        if kernel != LINEAR.kernel and gemm.why_not(kernel, target.k, target.tokens) is None:
            fitted = gemm.fits(kernel, config, target.tokens, gpu)
            if fitted is not None:
                times[Candidate(kernel, fitted)] = us
    return tuple(sorted(times, key=times.__getitem__)[:count])


def ours(x: torch.Tensor) -> Body:
    """Return the call as a linear layer makes it."""
    return lambda weight: k3cupy.low_latency_linear(x, weight, weight_is_static=True)


def run_entry(
    product: Product,
    weights: Sequence[torch.Tensor],
    floors: Sequence[Body],
    candidates: Sequence[Candidate],
    strided: StridedCase | None = None,
    around: tuple[str, str] = NEIGHBOURS,
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
    planned = public.planned(n, k, tokens, packed=x.is_contiguous())
    plan = public.call(planned, x, n, product.out)
    checked: dict[str, Body] = {
        f"low_latency_linear ({dispatched})": lambda w: product.out.copy_(ours(x)(w)),
        f"the public plan ({planned})": plan,
        **calls,
    }
    for name, call in checked.items():
        wrong = product.check(call, weights[0])
        if wrong is not None:
            raise RuntimeError(f"{kind}, M = {tokens}, {name}: {wrong}, not timed")

    def linear(weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    timer, three = Timer(weights, _EFFORT), (linear, plan, ours(x))
    bodies = [*calls.values(), *floors, *three]
    *times, linear_us, plan_us, us = timer.added(bodies, product.chain(*around, x=x))
    alone = dict(zip(("linear", "plan", "ours"), timer.alone(three), strict=True))
    return Entry(
        kind=kind,
        n=n,
        k=k,
        tokens=tokens,
        floor_us=min(times[len(calls) :]),
        linear_us=linear_us,
        plan_us=plan_us,
        plan=str(planned),
        dispatched_us=us,
        alone_us=alone,
        dispatched=str(dispatched),
        reason=ran.reason,
        candidates=dict(zip(calls, times, strict=False)),
    )


def run(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int] = TOKENS,
    around: tuple[str, str] = NEIGHBOURS,
) -> Iterator[Entry]:
    """Yield the entries of packed x, then those of the two strided projections.

    Args:
        shapes: (n, k) of the weights.
        tokens: M; the strided projections have their own.
        around: kinds of the producer and of the consumer.
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
        floors = floor.fastest(weights, products[0].chain(*around))
        for product in products:
            candidates = best[GemmTarget(n, k, product.tokens)]
            yield run_entry(product, weights, floors, candidates, around=around)
    for case in cases:
        weights = weights_of(case.n, case.k, pool)
        width, offset = case.source_row_width, case.offset
        products = [
            Product(case.n, case.k, count, row_width=width, offset=offset)
            for count in _STRIDED_TOKENS
        ]
        floors = floor.fastest(weights, products[0].chain(*around))
        for product in products:
            yield run_entry(product, weights, floors, (), case, around)


def remarks(entries: Sequence[Entry]) -> list[str]:
    """Return the figures over many entries, as sentences."""
    found = []
    packed = [entry for entry in entries if " of " not in entry.kind]
    shown = [entry for entry in packed if entry.kind in PAGE_SHAPES]
    for some, which in ((shown, "{} shapes of a decode step"), (packed, "all {} shapes")):
        shapes = which.format(len({entry.kind for entry in some}))
        for what, ratio in (
            ("the speed-up over F.linear", _speed_up),
            ("ours over the public plan", _over_plan),
        ):
            if some:
                found.append(f"Geometric mean of {what}, {shapes}: {_means(some, ratio)}.")
    over_plan = {f"{e.kind} at M = {e.tokens}": _over_plan(e) for e in entries}
    found.append(document.slower_than("the public plan", over_plan))
    worst = max(entries, key=_over_best)
    found.append(
        f"Furthest from the best measured beside it: {_over_best(worst):.3f} x, {worst.kind} at "
        f"M = {worst.tokens}."
    )
    fastest = [
        min(e.dispatched_us, e.plan_us, e.linear_us, *e.candidates.values()) for e in entries
    ]
    cells_and_floors = (
        (f"{e.kind} at M = {e.tokens}", e.floor_us, us)
        for e, us in zip(entries, fastest, strict=True)
    )
    return [*found, floor.remark(cells_and_floors)]


def _means(entries: Sequence[Entry], ratio: Callable[[Entry], float]) -> str:
    of_tokens = {
        count: statistics.geometric_mean(ratio(e) for e in entries if e.tokens == count)
        for count in dict.fromkeys(entry.tokens for entry in entries)
    }
    each = ", ".join(f"{mean:.3f} at M = {count}" for count, mean in of_tokens.items())
    return f"{statistics.geometric_mean(map(ratio, entries)):.3f} over all M; {each}"


def _speed_up(entry: Entry) -> float:
    return entry.linear_us / entry.dispatched_us


def _over_plan(entry: Entry) -> float:
    return entry.dispatched_us / entry.plan_us


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


def as_document(
    entries: Sequence[Entry], commit: str | None = None, around: tuple[str, str] = NEIGHBOURS
) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "linear",
        entries,
        commit,
        method={
            "statistic": "median of 5 rounds of 5 replays of a CUDA graph, microseconds",
            "chain": told(*around),
            "weights": f"cold: {COLD_BYTES >> 20} MiB of weights take turns",
            "floor": f"16-byte loads of the weight, the best of {len(floor.FORMS)} forms, PDL on",
            "public plan": "vLLM's own table for an H200, its kernels by ours in their structures",
            "ours": "low_latency_linear with weight_is_static; candidates: PDL on, the same "
            "promise, output given",
        },
        host_us={"2112x7168, M = 4": host_time()},
        remarks=remarks(entries),
    )
