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

import numpy as np
import torch

import k3cupy
from k3cupy.bench import document
from k3cupy.choose.table import MLA_DECODE
from k3cupy.constants import QK_ROPE_HEAD_DIM
from k3cupy.kernels.mla_decode import CANDIDATES, MlaDecodeConfig, Variant
from k3cupy.runtime import instances, launch
from k3cupy.runtime.instances import Instance
from k3cupy.timing import graphs
from k3cupy.timing.chain import GEMM, NONE, Body, empty, told
from k3cupy.timing.decode_step import BLOCK_SIZE, LAUNCHES, DecodeStep
from k3cupy.tuning import targets

KINDS, TOKENS = targets.KINDS[MLA_DECODE], targets.TOKENS[MLA_DECODE]

NEIGHBOURS = GEMM, NONE
"""The absorbed-query matmul of the framework, and a small kernel that reads mqa_q."""

_THREADS = 256
_PUBLIC_SPLITS = (1, 3)


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


def public_structure(step: DecodeStep, split: int, *, pdl: bool) -> Callable[[], None]:
    """Return the launch of the comparison kernel with ``split`` warps a row."""
    device = torch.cuda.current_device()
    flags = ", ".join("true" if flag else "false" for flag in (step.query_fp8, step.cache == "fp8"))
    name = f"k3cupy::public_structure<__nv_bfloat16, {flags}, {split}>"
    kernel = instances.load(Instance("bench/public_structure.cu", name), device)
    tokens, heads, _ = step.out.shape
    warps = tokens * (heads + 1) * split
    queue = launch.make_launcher(
        device, kernel.kernel, grid=-(-warps // (_THREADS // 32)), block=_THREADS, pdl=pdl
    )
    i = step.inputs
    size = step.kv_cache.element_size()
    arguments = [
        *(i["ql_nope"].data_ptr(), i["ql_nope"].stride(0), i["ql_nope"].stride(1)),
        *(i["q_pe"].data_ptr(), i["q_pe"].stride(0), i["q_pe"].stride(1)),
        *(i["kv_c_normed"].data_ptr(), i["kv_c_normed"].stride(0)),
        *(i["k_pe"].data_ptr(), i["k_pe"].stride(0)),
        *(step.out.data_ptr(), step.kv_cache.data_ptr()),
        *(step.kv_cache.stride(0) * size, step.kv_cache.stride(1) * size),
        i["slot_mapping"].data_ptr(),
        *(
            step.scales[name].data_ptr() if name in step.scales else 0
            for name in ("q_scale_inv", "cache_scale_inv")
        ),
        *(np.int32(tokens), np.int32(heads), np.int32(BLOCK_SIZE)),
    ]
    return lambda: queue(torch.cuda.current_stream().cuda_stream, arguments)


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
        public = {split: public_structure(step, split, pdl=pdl) for split in _PUBLIC_SPLITS}
    checked = {f"public structure, split {split}": body for split, body in public.items()}
    for name, body in (checked | {str(config): run(config) for config in candidates}).items():
        wrong = step.check(body)
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
    if scenario == "chain":
        chain = step.chain(*around, pdl=pdl)
        bodies = [chain.around(), *map(chain.around, bodies)]
    recorded = [graphs.capture(body, LAUNCHES) for body in (*alone, *bodies)]
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
    )
