"""Benchmark of the steps in front of attention that are one launch here, in their chains.

The norms behind the first projection stand beside a Triton kernel; the query front beside separate
kernels of ours, with cold weights. A small kernel writes their input, one that waits reads their
output, and what counts is the time that they add.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import k3cupy
from k3cupy.bench import document, floor, public
from k3cupy.bench.linear import best_of_table
from k3cupy.choose.gemm import FUSED_A
from k3cupy.choose.table import MLA_QUERY
from k3cupy.constants import KV_LORA_RANK, Q_LORA_RANK, QK_HEAD_DIM
from k3cupy.kernels import mla_query
from k3cupy.ops.mla_separate import Product
from k3cupy.runtime import devices, instances
from k3cupy.runtime.instances import instantiation
from k3cupy.timing import cold
from k3cupy.timing.chain import Body, Chain, empty
from k3cupy.timing.decode_step import LAUNCHES
from k3cupy.timing.graphs import Effort, Recorded, in_turns
from k3cupy.timing.mla_steps import EPSILON, NormStep, QueryStep, layer_shape
from k3cupy.tuning.entries import Candidate
from k3cupy.tuning.targets import GemmTarget, MlaTarget

NORM = "norm"
QUERY_KINDS = ("16bit+same", "fp8+fp8", "16bit+ds_mla")
KINDS = (NORM, *QUERY_KINDS)
"""The norms, and the query front with formats of query and cache."""

NORM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (1, 2, 4, 8, 16, 64)
"""Of the norms, and of the query front, which runs separate kernels beyond its limit."""

OURS, FLOOR = "ours", "floor"
ONE_LAUNCH, SEPARATE = mla_query.KERNEL, mla_query.SEPARATE
TRITON, WITH_PDL, TWO_BLOCKS = "Triton", "PDL", "two blocks a row"

_BEST_OF_Q_B = 3
_EFFORT = Effort(rounds=5, replays=5)

Call = Callable[[torch.Tensor], Any]
"""It takes the weights of a layer."""


@dataclass
class Entry:
    """One step with a number of tokens; times in microseconds.

    Attributes:
        kind: one of ``KINDS``.
        tokens: B.
        heads: H.
        chain_us: the producer and the consumer.
        floor_us: what streaming the weights adds to them; of the norms what an empty kernel adds.
        ours_us: what the public function adds.
        ran: what that is.
        beside_us: what else computes the same, by name.
        errors: of mqa_q against float64, relative (Frobenius): as chosen, and of separate kernels.
    """

    kind: str
    tokens: int
    heads: int
    chain_us: float
    floor_us: float
    ours_us: float
    ran: str
    beside_us: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)

    def best(self, begins: str = "") -> float | None:
        """Return the least time of what else computes it, of what bears a name; None without."""
        of_these = [us for name, us in self.beside_us.items() if name.startswith(begins)]
        return min(of_these, default=None)


# --- The norms -----------------------------------------------------------------------------------


def run_norm(tokens: int, heads: int) -> Entry:
    """Check, then time the norms.

    Raises:
        RuntimeError: they are wrong; nothing was timed.
    """
    step = NormStep(tokens)
    ran = k3cupy.explain_q_kv_rmsnorm(**step.inputs, eps=EPSILON, weight_is_static=True)
    calls: dict[str, Callable[[], Any]] = {OURS: step.run, TWO_BLOCKS: _two_blocks(step)}
    if importlib.util.find_spec("triton") is not None:
        from k3cupy.bench import triton_norms

        calls |= {f"{TRITON}, {name}": call for name, call in triton_norms.calls(step)}
    for name, call in calls.items():
        wrong = step.check(call)
        if wrong is not None:
            raise RuntimeError(f"norms, B = {tokens}, {name}: {wrong}, not timed")
    cases = {NORM: (step.chain(), {**calls, FLOOR: empty()})}
    (chain_us, added) = _measured(cases, LAUNCHES)[NORM]
    return _entry(NORM, tokens, heads, chain_us, added, str(Candidate(ran.kernel, ran.config)))


def _two_blocks(step: NormStep) -> Callable[[], Any]:
    """Return the kernel that stands between the products of windows: a block a norm and row."""
    x, (q, kv) = step.inputs["qkv_a"], step.outs
    name = instantiation("rms_norms", Q_LORA_RANK, KV_LORA_RANK)
    run = public.queue("between_products.cu", name, 2 * len(x))
    outs = q.data_ptr(), kv.data_ptr()
    arguments = [x.data_ptr(), x.stride(0), step.gains.data_ptr(), *outs, np.float32(EPSILON)]
    return lambda: run(arguments)


# --- The query front -----------------------------------------------------------------------------


def run_query(
    tokens: int,
    heads: int,
    kinds: Sequence[str],
    layers: Sequence[torch.Tensor],
    streams: Sequence[Call],
) -> Iterator[Entry]:
    """Check, then time the query front with several formats, all in the same turns.

    Args:
        tokens: B.
        heads: H.
        kinds: formats.
        layers: weights of layers that take turns, each of ``layer_shape``.
        streams: what streams one the fastest.

    Raises:
        RuntimeError: a call is wrong; nothing was timed.
    """
    steps = {kind: QueryStep(kind, tokens, heads) for kind in kinds}
    cases: dict[str, tuple[Chain, dict[str, Body]]] = {}
    errors = {}
    for kind, step in steps.items():
        calls = {OURS: step.run, **dict(_in_one_launch(step, kind, tokens, heads))}
        calls |= dict(_separate(step, tokens, heads))
        for name, call in calls.items():
            wrong = step.check(call, layers[0])
            if wrong is not None:
                raise RuntimeError(f"query {kind}, B = {tokens}, {name}: {wrong}, not timed")
        errors[kind] = {
            name: step.error(call, layers[0])
            for name, call in ((OURS, step.run), (SEPARATE, step.separate))
        }
        calls |= {f"{FLOOR} {i}": stream for i, stream in enumerate(streams)}
        turns = {name: in_turns(call, layers) for name, call in calls.items()}
        cases[kind] = step.chain(), turns
    measured = _measured(cases, cold.launches_of(layers))
    for kind, step in steps.items():
        weights = step.cut(layers[0])
        ran = k3cupy.explain_mla_decode_query(
            **step.arguments, **weights, out=step.out, weight_is_static=True
        )
        what = str(Candidate(ran.kernel, ran.config))
        yield _entry(kind, tokens, heads, *measured[kind], what, errors[kind])


def _in_one_launch(
    step: QueryStep, kind: str, tokens: int, heads: int
) -> Iterator[tuple[str, Call]]:
    """Yield each configuration of the query kernel, where it can run."""
    if tokens > mla_query.MAX_TOKENS:
        return
    gpu = devices.info(torch.cuda.current_device())
    target = MlaTarget(MLA_QUERY, kind, tokens, heads)
    candidates = target.candidates({}, gpu)
    instances.load_all([target.instance(candidate) for candidate in candidates], gpu.index)
    for candidate in candidates:
        yield str(candidate), functools.partial(step.run, config=candidate.config)


def _separate(step: QueryStep, tokens: int, heads: int) -> Iterator[tuple[str, Call]]:
    """Yield the separate kernels: as chosen, and with what may be better for two of them."""
    gpu = devices.info(torch.cuda.current_device())
    target = GemmTarget(heads * QK_HEAD_DIM, Q_LORA_RANK, tokens)
    products: dict[str, Product | None] = {"": None, ", q_b linear": torch.nn.functional.linear}
    for candidate in best_of_table(target, gpu, _BEST_OF_Q_B):
        products[f", q_b {candidate}"] = _product(candidate)
    for name, product in products.items():
        for bmm in (False, True):
            call = functools.partial(step.separate, q_b=product, bmm=bmm)
            yield f"{SEPARATE}{name}{', bmm' if bmm else ''}", call


def _product(candidate: Candidate) -> Product:
    """Return a kernel of ours as a linear layer calls it."""
    run = k3cupy.fused_a_gemm if candidate.kernel == FUSED_A else k3cupy.skinny_gemm
    options: dict[str, Any] = {"config": candidate.config, "weight_is_static": True}
    return functools.partial(run, **options)


# --- A run ---------------------------------------------------------------------------------------


def _measured(
    cases: Mapping[str, tuple[Chain, Mapping[str, Body]]], launches: int
) -> dict[str, tuple[float, dict[str, float]]]:
    """Return the time of each case's chain, and what each of its calls adds, all in turns."""
    recorded = Recorded(launches)
    bodies = {
        (case, name): chain.around(call)
        for case, (chain, calls) in cases.items()
        for name, call in {"": None, **calls}.items()
    }
    for name, body in bodies.items():
        recorded.record(name, body)
    times = dict(zip(bodies, recorded.measure(list(bodies), _EFFORT), strict=True))
    found = {}
    for case, (_, calls) in cases.items():
        base = times[case, ""]
        found[case] = base, {name: round(times[case, name] - base, 4) for name in calls}
    return found


def _entry(
    kind: str,
    tokens: int,
    heads: int,
    chain_us: float,
    added: Mapping[str, float],
    ran: str,
    errors: Mapping[str, float] | None = None,
) -> Entry:
    floors = [us for name, us in added.items() if name.startswith(FLOOR)]
    beside = {n: us for n, us in added.items() if n != OURS and not n.startswith(FLOOR)}
    ours = added[OURS]
    return Entry(kind, tokens, heads, chain_us, min(floors), ours, ran, beside, dict(errors or {}))


def run(
    kinds: Sequence[str] = KINDS, tokens: Sequence[int] | None = None, heads: int = 12
) -> Iterator[Entry]:
    """Yield the entries of a whole run.

    Args:
        kinds: from ``KINDS``.
        tokens: batch sizes; None for ``NORM_TOKENS`` and ``TOKENS``.
        heads: of the query front.
    """
    if NORM in kinds:
        for count in tokens or NORM_TOKENS:
            yield run_norm(count, heads)
    formats = [kind for kind in kinds if kind != NORM]
    if not formats:
        return
    shape = layer_shape(heads)
    layers = cold.weights_of(*shape, cold.pool_of([shape]))
    counts = tokens or TOKENS
    streams = floor.fastest(layers, QueryStep(formats[0], counts[0], heads).chain())
    for count in counts:
        yield from run_query(count, heads, formats, layers, streams)


def remarks(entries: Sequence[Entry]) -> list[str]:
    """Return the figures over many entries, as sentences."""
    norms = [entry for entry in entries if entry.kind == NORM]
    found = [
        *_over("The norms over the best Triton kernel", norms, lambda e: e.best(TRITON)),
        *_over(
            "The norms over the best Triton kernel without dependent launch, its default",
            norms,
            lambda e: min(
                (us for name, us in e.beside_us.items() if _is_plain_triton(name)), default=None
            ),
        ),
        *_over("The norms over two blocks a row", norms, lambda e: e.best(TWO_BLOCKS)),
    ]
    for kind in dict.fromkeys(entry.kind for entry in entries if entry.kind != NORM):
        here = [entry for entry in entries if entry.kind == kind]
        found += _over(
            f"{kind}, as chosen over the best separate kernels", here, lambda e: e.best(SEPARATE)
        )
        found += _over(
            f"{kind}, as chosen over the best in one launch", here, lambda e: e.best(ONE_LAUNCH)
        )
        pairs = ", ".join(
            f"{e.errors[OURS]:.3e} and {e.errors[SEPARATE]:.3e} at B = {e.tokens}" for e in here
        )
        found.append(f"{kind}, error against float64 as chosen and of separate kernels: {pairs}.")
    plain = {e.tokens: e.ours_us for e in entries if e.kind == QUERY_KINDS[0]}
    for kind in QUERY_KINDS[1:]:
        here = [e for e in entries if e.kind == kind]
        found += _over(f"{kind} over {QUERY_KINDS[0]}", here, lambda e: plain.get(e.tokens))
    return found


def _is_plain_triton(name: str) -> bool:
    return name.startswith(TRITON) and not name.endswith(WITH_PDL)


def _over(
    what: str, entries: Iterable[Entry], other: Callable[[Entry], float | None]
) -> Iterator[str]:
    """Yield a sentence of ratios at each number of tokens, of what is added and of the chains."""
    told = [
        f"{e.ours_us / us:.3f} ({(e.chain_us + e.ours_us) / (e.chain_us + us):.3f}) "
        f"at B = {e.tokens}"
        for e in entries
        if (us := other(e)) is not None and us > 0
    ]
    if told:
        yield f"{what}, and with the ends of the chain: {', '.join(told)}."


def as_document(entries: Sequence[Entry], commit: str | None = None) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "step",
        entries,
        commit,
        method={
            "statistic": "median of 5 rounds of 5 replays of a CUDA graph, microseconds a launch",
            "weights": f"of the query front cold: layers of {cold.COLD_BYTES >> 20} MiB take "
            "turns, promised static; of the norms the same in each launch",
            "added": "the time of producer, step and consumer, less that of producer and consumer",
            "floor": "the weights of a layer streamed; of the norms an empty kernel",
        },
        remarks=remarks(entries),
    )
