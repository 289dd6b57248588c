"""Benchmark of the MLA decode epilogue: every configuration where it really sits, and alone.

The chain is absorbed-query matmul (``torch.bmm``) -> epilogue -> a consumer that waits and reads
mqa_q, with the strides of the model: ql_nope a transposed matmul output, q_pe a slice of q, kv_c
and k_pe slices of the 2112-wide projection. What is reported for the chain is the time that the
epilogue adds: the chain's time less that of the same chain without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import k3cupy
from k3cupy.bench import document
from k3cupy.bench.forms import decode_summary
from k3cupy.bench.public import decode_epilogue, sglang_epilogue
from k3cupy.choose.table import MLA_DECODE
from k3cupy.constants import QK_ROPE_HEAD_DIM
from k3cupy.kernels.mla_decode import CANDIDATES, MlaDecodeConfig, Variant
from k3cupy.runtime import instances
from k3cupy.timing import graphs
from k3cupy.timing.chain import GEMM, NONE, Body, empty, told
from k3cupy.timing.decode_step import LAUNCHES, DecodeStep
from k3cupy.tuning import targets

KINDS, TOKENS = targets.KINDS[MLA_DECODE], targets.TOKENS[MLA_DECODE]

NEIGHBOURS = GEMM, NONE
"""The absorbed-query matmul of the framework, and a small kernel that reads mqa_q."""

_PUBLIC_SPLITS = (1, 3)
_SGLANG_KINDS = ("16bit+same", "fp8+fp8")


@dataclass
class Entry:
    """One row of results; times in microseconds a launch.

    Attributes:
        kind: formats, one of ``KINDS``.
        tokens: B.
        heads: H.
        scenario: ``"chain"`` (time added to the chain) or ``"alone"`` (the kernel after itself).
        pdl: launched with programmatic dependent launch.
        chain_us: the chain without the epilogue; 0 alone.
        alone_us: ``"ours"``, the dispatched configuration after itself, and ``"public"``, the
            better of the public structure so.
        empty_us: an empty kernel in the epilogue's place.
        torch_us: the unfused PyTorch operations in its place.
        public_us: a kernel in the public structure (``bench/public_structure.cu``) with one and
            with three warps a row; empty for a ds_mla cache, which it does not have.
        sglang_us: a kernel in the structure of SGLang's (``bench/sglang_structure.cu``), which has
            no scale; None for the formats that it does not have.
        dispatched: the configuration that a call would choose.
        candidates: time of every configuration.
    """

    kind: str
    tokens: int
    heads: int
    scenario: str
    pdl: bool
    chain_us: float
    alone_us: dict[str, float]
    empty_us: float
    torch_us: float
    public_us: dict[str, float]
    sglang_us: float | None
    dispatched: dict[str, int]
    candidates: list[dict[str, Any]] = field(default_factory=list)


def unfused(step: DecodeStep) -> None:
    """Run the same in PyTorch operations; a ds_mla cache is written in its RoPE part only."""
    query = torch.cat([step.inputs["ql_nope"], step.inputs["q_pe"]], -1)
    row = torch.cat([step.inputs["kv_c_normed"], step.inputs["k_pe"]], -1)
    if step.query_fp8:
        query = (query * step.scales["q_scale_inv"]).clamp(-448, 448).to(torch.float8_e4m3fn)
    step.out.copy_(query)
    rows = step.kv_cache.view(-1, step.kv_cache.shape[-1])
    if step.cache == "fp8":
        scaled = (row * step.scales["cache_scale_inv"]).clamp(-448, 448)
        row = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    elif step.cache == "ds_mla":
        rows, row = rows[:, -2 * QK_ROPE_HEAD_DIM :], step.inputs["k_pe"].view(torch.uint8)
    rows.index_copy_(0, step.inputs["slot_mapping"], row)


def run_entry(
    kind: str,
    tokens: int,
    heads: int,
    scenario: str,
    pdl: bool,
    candidates: Sequence[MlaDecodeConfig] = CANDIDATES,
    around: tuple[str, str] = NEIGHBOURS,
) -> Entry:
    """Check, then time every candidate, an empty kernel and PyTorch for one problem.

    Raises:
        RuntimeError: a candidate gives a wrong bit.
    """
    step = DecodeStep(kind, tokens, heads)

    def run(config: MlaDecodeConfig) -> Callable[[], None]:
        return lambda: step.run(config, pdl=pdl)

    public = {}
    if step.cache != "ds_mla":
        written = step.inputs, step.out, step.kv_cache
        public = {
            split: decode_epilogue(*written, split, scales=step.scales, pdl=pdl)
            for split in _PUBLIC_SPLITS
        }
    unscaled, sglang = DecodeStep(kind, tokens, heads, scales=(1.0, 1.0)), None
    if kind in _SGLANG_KINDS:
        sglang = sglang_epilogue(unscaled.inputs, unscaled.out, unscaled.kv_cache, pdl=pdl)
    checked = {f"public structure, split {split}": (step, body) for split, body in public.items()}
    checked |= {str(config): (step, run(config)) for config in candidates}
    if sglang is not None:
        checked["SGLang's structure"] = unscaled, sglang
    for name, (its, body) in checked.items():
        wrong = its.check(body)
        if wrong is not None:
            raise RuntimeError(f"{name}: {wrong}, not timed")

    dispatched = k3cupy.explain_mla_decode(**step.arguments, out=step.out).config
    alone: list[Body] = [run(dispatched), *public.values()]
    bodies: list[Body] = [
        empty(pdl=pdl),
        lambda: unfused(step),
        *public.values(),
        *map(run, candidates),
    ]
    beside: list[Body] = [] if sglang is None else [sglang]
    if scenario == "chain":
        chain = step.chain(*around, pdl=pdl)
        bodies = [chain.around(), *map(chain.around, bodies)]
        beside = [unscaled.chain(*around, pdl=pdl).around(each) for each in beside]
    recorded = [graphs.capture(body, LAUNCHES) for body in (*alone, *bodies, *beside)]
    ours, *others = (round(us, 4) for us in graphs.measure(recorded, LAUNCHES))
    others, times = others[: len(public)], others[len(public) :]
    base = times.pop(0) if scenario == "chain" else 0.0
    added = [round(time - base, 4) for time in times]
    return Entry(
        kind=kind,
        tokens=tokens,
        heads=heads,
        scenario=scenario,
        pdl=pdl,
        chain_us=base,
        alone_us={"ours": ours} | ({"public": min(others)} if others else {}),
        empty_us=added[0],
        torch_us=added[1],
        public_us={str(split): time for split, time in zip(public, added[2:], strict=False)},
        sglang_us=added.pop() if beside else None,
        dispatched=asdict(dispatched),
        candidates=[
            {**asdict(config), "us": time}
            for config, time in zip(candidates, added[2 + len(public) :], strict=True)
        ],
    )


def run(
    kinds: Sequence[str] = KINDS,
    tokens: Sequence[int] = TOKENS,
    heads: int = 12,
    scenarios: Sequence[tuple[str, bool]] = (("chain", True),),
    around: tuple[str, str] = NEIGHBOURS,
) -> Iterator[Entry]:
    """Yield the entries of a whole run.

    Args:
        kinds: formats, from ``KINDS``.
        tokens: batch sizes.
        heads: H.
        scenarios: (``"chain"`` or ``"alone"``, with PDL).
        around: kinds of the producer and of the consumer.
    """
    wanted = [c.instance(Variant.of_kind(kind)) for kind in kinds for c in CANDIDATES]
    instances.load_all(wanted, torch.cuda.current_device())
    for (scenario, pdl), kind, count in itertools.product(scenarios, kinds, tokens):
        yield run_entry(kind, count, heads, scenario, pdl, around=around)


def host_time(kind: str, tokens: int = 16, heads: int = 12) -> dict[str, float]:
    """Return the host's microseconds for one repeated eager call.

    Returns:
        ``"new output"`` and ``"out given"``: the call that allocates mqa_q, and the one that does
        not.
    """
    step = DecodeStep(kind, tokens, heads)

    def call(**extra: torch.Tensor) -> None:
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**step.arguments, **extra)

    return {
        "new output": graphs.host_us(call),
        "out given": graphs.host_us(lambda: call(out=step.out)),
    }


def remarks(entries: Sequence[Entry]) -> list[str]:
    """Return where ours was slower than others in the chain, as sentences."""
    of_chain = [e for e in entries if e.scenario == "chain" and e.pdl]
    every = {f"{e.kind} at B = {e.tokens}": decode_summary(asdict(e)) for e in of_chain}
    found = []
    for name, what in (("public", "the public structure"), ("sglang", "SGLang's structure")):
        over = {cell: summary[f"dispatched_over_{name}"] for cell, summary in every.items()}
        known = {cell: ratio for cell, ratio in over.items() if ratio is not None}
        if known:
            found.append(document.slower_than(what, known))
    return found


def as_document(
    entries: Sequence[Entry], commit: str | None = None, around: tuple[str, str] = NEIGHBOURS
) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "decode",
        entries,
        commit,
        method={
            "launches_a_graph": LAUNCHES,
            "statistic": "median of 3 rounds of 9 replays, microseconds a launch",
            "chain": f"{told(*around)}; strides of the model",
        },
        host_us={kind: host_time(kind) for kind in ("16bit+same", "fp8+fp8")},
        remarks=remarks(entries),
    )
