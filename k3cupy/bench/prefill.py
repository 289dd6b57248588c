"""Benchmark of the prefill and context epilogues: every configuration, by the bytes it moves.

A producer writes the source of keys and values, the epilogue runs, a consumer reads the keys; what
counts is the time that the epilogue adds.

With few tokens the time is latency: the measure is a kernel that copies as many bytes, one warp a
row. With many it is bandwidth: the measure is PyTorch's device-to-device copy of as many bytes, and
the tensors of one launch after the other are different ones, so that none is found in L2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

import k3cupy
from k3cupy.accept.mla_prefill import SIGNATURES
from k3cupy.bench import document
from k3cupy.bench.forms import prefill_summary
from k3cupy.choose.table import MLA_PREFILL
from k3cupy.constants import QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM
from k3cupy.kernels.mla_prefill import (
    CANDIDATES,
    INSERTS,
    KEY_CONCAT,
    KEY_CONCAT_DS_MLA,
    KV_CONCAT,
    KV_CONCAT_QUANT,
    OPS,
    QKV_QUANT,
    MlaPrefillConfig,
    Variant,
)
from k3cupy.runtime import instances, launch
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.timing import graphs
from k3cupy.timing.chain import NEIGHBOURS, Body, told
from k3cupy.timing.prefill_step import (
    BLOCK_SIZE,
    ROTATE_FROM,
    ROTATED_BYTES,
    PrefillStep,
    bytes_moved,
    launches_of,
    sets_of,
)
from k3cupy.tuning import targets

TOKENS = targets.TOKENS[MLA_PREFILL]

_THREADS = 256
_ROW_BYTES = 1152  # of a row of bench/row_copy.cu
_PUBLIC = {
    KEY_CONCAT: (1, False, True, "kSame"),
    KEY_CONCAT_DS_MLA: (1, False, True, "kDsMla"),
    QKV_QUANT: (3, True, True, "kFp8"),
    KV_CONCAT: (1, False, False, "kSame"),
    KV_CONCAT_QUANT: (2, True, False, "kSame"),
}
"""Operation -> the rows of a head, whether they are codes, whether there is a cache, its format."""


@dataclass
class Entry:
    """One row of results; microseconds added to the chain.

    Attributes:
        kind: the operation, one of ``OPS``.
        tokens: T.
        heads: H.
        rope: with positions.
        bytes: read and written, each counted once.
        copy_us: ``Tensor.copy_`` that moves as many bytes.
        row_copy_us: a kernel that copies as many bytes, one warp a row.
        public_us: a kernel in the public structure (``bench/public_prefill.cu``), which takes no
            positions; None with them.
        torch_us: the unfused PyTorch operations.
        alone_us: after themselves: ``"ours"``, the dispatched configuration, and
            ``"warp a row"``, the copy, and ``"public"``.
        dispatched: the configuration that a call would choose.
        candidates: time of every configuration.
    """

    kind: str
    tokens: int
    heads: int
    rope: bool
    bytes: int
    copy_us: float
    row_copy_us: float
    public_us: float | None
    torch_us: float
    alone_us: dict[str, float]
    dispatched: dict[str, int]
    candidates: list[dict[str, Any]] = field(default_factory=list)


def unfused(step: PrefillStep) -> None:
    """Run the same in PyTorch operations; a ds_mla cache is written in its RoPE part only."""
    a = step.arguments
    k_pe = _turned(step, a["k_pe"][:, None])
    k = torch.cat([a["k_nope"], k_pe.expand(-1, step.heads, -1)], -1)
    if step.op in INSERTS:
        row = torch.cat([a["kv_c_normed"], k_pe[:, 0]], -1)
        rows = a["kv_cache"].view(-1, a["kv_cache"].shape[-1])
        if step.op == KEY_CONCAT_DS_MLA:
            rows, row = rows[:, -2 * QK_ROPE_HEAD_DIM :], k_pe[:, 0].contiguous()
        if step.op == QKV_QUANT:
            row = _cast(row, a["cache_scale_inv"])
        if step.op != KEY_CONCAT:
            row = row.view(torch.uint8)
        rows.index_copy_(0, a["slot_mapping"], row)
        q_pe = a["q"][..., QK_NOPE_HEAD_DIM:]
        if step.turns_query:
            q_pe.copy_(_turned(step, q_pe))
    if step.op == QKV_QUANT:
        query = torch.cat([a["q"][..., :QK_NOPE_HEAD_DIM], _turned(step, q_pe)], -1)
        _cast(query if step.rope else a["q"], a["q_scale_inv"])
        _cast(k, a["k_scale_inv"])
        _cast(a["v"], a["v_scale_inv"])
    elif SIGNATURES[step.op].is_fp8:
        k.to(torch.float8_e4m3fn)
        a["v"].to(torch.float8_e4m3fn)


def _turned(step: PrefillStep, x: torch.Tensor) -> torch.Tensor:
    if not step.rope:
        return x
    angles = step.arguments["cos_sin_cache"][step.arguments["positions"]][:, None]
    cosine, sine = angles.chunk(2, -1)
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    pairs = (first * cosine - second * sine, first * sine + second * cosine)
    return torch.stack(pairs, -1).flatten(-2).to(x.dtype)


def _cast(x: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    return (x * scale_inv).clamp(-448, 448).to(torch.float8_e4m3fn)


class Copies:
    """As many bytes as an operation moves, half of them read and half of them written."""

    def __init__(self, size: int) -> None:
        self._rows = -(-size // (2 * _ROW_BYTES))
        self._source = torch.ones(self._rows * _ROW_BYTES, device="cuda", dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)
        kernel = instances.load(
            Instance("bench/row_copy.cu", "k3cupy::copy_rows"), torch.cuda.current_device()
        )
        self._queue = launch.make_launcher(
            torch.cuda.current_device(),
            kernel.kernel,
            grid=-(-self._rows // (_THREADS // 32)),
            block=_THREADS,
            pdl=True,
        )
        self.one_warp_a_row()
        if not torch.equal(self._source, self._target):
            raise RuntimeError("the comparison kernel copied something else, not timed")

    def device_to_device(self) -> None:
        """Copy by PyTorch."""
        self._target.copy_(self._source)

    def one_warp_a_row(self) -> None:
        """Copy by the comparison kernel."""
        stream = torch.cuda.current_stream().cuda_stream
        arguments = [self._source.data_ptr(), self._target.data_ptr(), np.uint32(self._rows)]
        self._queue(stream, arguments)


def public_name(op: str) -> str:
    """Return the C++ name of the comparison kernel in the public structure."""
    rows, codes, inserts, cache = _PUBLIC[op]
    cache = f"k3cupy::CacheFormat::{cache}"
    return instantiation("public_prefill", "__nv_bfloat16", rows, codes, inserts, cache)


def public_structure(step: PrefillStep) -> Body:
    """Return the launch of the comparison kernel for a step without positions."""
    a, device = step.arguments, torch.cuda.current_device()
    rows_of_head, _, inserts, _ = _PUBLIC[step.op]
    rows = step.tokens * (step.heads * rows_of_head + inserts)
    kernel = instances.load(Instance("bench/public_prefill.cu", public_name(step.op)), device)
    queue = launch.make_launcher(
        device, kernel.kernel, grid=-(-rows // (_THREADS // 32)), block=_THREADS, pdl=True
    )
    outs = dict(zip(SIGNATURES[step.op].outputs, step.outs, strict=True))

    def given(name: str, dims: int = 0) -> list[int]:
        tensor = a.get(name, outs.get(name))
        if tensor is None:
            return [0] * (1 + dims)
        size = tensor.element_size()
        return [tensor.data_ptr(), *(size * stride for stride in tensor.stride()[:dims])]

    arguments = [
        *(*given("k_nope", 2), *given("k_pe", 1), *(given("k") if "k" in outs else given("k8"))),
        *(*given("v", 2), *given("v8"), *given("q", 2), *given("q8"), *given("kv_c_normed", 1)),
        *(*given("slot_mapping"), *given("kv_cache", 2)),
        *(given(f"{each}_scale_inv")[0] for each in ("k", "v", "q", "cache")),
        *(np.uint32(step.tokens), np.uint32(step.heads), np.uint32(BLOCK_SIZE)),
    ]
    return lambda: queue(torch.cuda.current_stream().cuda_stream, arguments)


def run_entry(
    op: str,
    tokens: int,
    heads: int,
    rope: bool = False,
    candidates: Sequence[MlaPrefillConfig] = CANDIDATES,
    around: tuple[str, str] = NEIGHBOURS,
) -> Entry:
    """Check, then time every candidate, two copies and PyTorch for one problem.

    Raises:
        RuntimeError: a candidate gives a wrong bit.
    """
    size = bytes_moved(op, tokens, heads, rope)
    sets = sets_of(tokens, size)
    launches = launches_of(size, sets)
    steps = [PrefillStep(op, tokens, heads, rope, seed=seed) for seed in range(sets)]
    public = [] if rope else [public_structure(step) for step in steps]
    checked: dict[str, Body] = {str(c): functools.partial(steps[0].run, c) for c in candidates}
    if public:
        checked["public structure"] = public[0]
    for name, body in checked.items():
        wrong = steps[0].check(body)
        if wrong is not None:
            raise RuntimeError(f"{op}, {name}: {wrong}, not timed")
    copies = [Copies(size) for _ in range(sets)]
    dispatched = k3cupy.explain_mla_prefill(op, **steps[0].arguments).config

    def ours(config: MlaPrefillConfig) -> list[Body]:
        return [functools.partial(step.run, config) for step in steps]

    row_copy: list[Body] = [copy.one_warp_a_row for copy in copies]
    middles: list[list[Body]] = [
        [copy.device_to_device for copy in copies],
        row_copy,
        [functools.partial(unfused, step) for step in steps],
        *([public] if public else []),
        *map(ours, candidates),
    ]
    chains = [step.chain(*around) for step in steps]
    links = [[chain.around() for chain in chains]]
    links += [[c.around(m) for c, m in zip(chains, each, strict=True)] for each in middles]
    alone = {"ours": ours(dispatched), "warp a row": row_copy}
    if public:
        alone["public"] = public
    every = [*alone.values(), *links]
    recorded = [graphs.capture(graphs.in_turns(_run, each), launches) for each in every]
    found = [round(us, 4) for us in graphs.measure(recorded, launches, replays=5)]
    base, *links_us = found[len(alone) :]
    copied, row_copied, unfused_us, *times = (round(us - base, 4) for us in links_us)
    return Entry(
        kind=op,
        tokens=tokens,
        heads=heads,
        rope=rope,
        bytes=size,
        copy_us=copied,
        row_copy_us=row_copied,
        public_us=times.pop(0) if public else None,
        torch_us=unfused_us,
        alone_us=dict(zip(alone, found, strict=False)),
        dispatched=asdict(dispatched),
        candidates=[
            {**asdict(config), "us": us} for config, us in zip(candidates, times, strict=True)
        ],
    )


def run(
    ops: Sequence[str] = OPS,
    tokens: Sequence[int] = TOKENS,
    heads: int = 12,
    rope: bool = False,
    around: tuple[str, str] = NEIGHBOURS,
) -> Iterator[Entry]:
    """Yield the entries of a whole run.

    Args:
        ops: operations, from ``OPS``.
        tokens: prompt lengths.
        heads: H.
        rope: with positions, for the operations that have them.
        around: kinds of the producer and of the consumer.
    """
    wanted = [
        config.instance(Variant(op, rope=rope and op in INSERTS))
        for op, config in itertools.product(ops, CANDIDATES)
    ]
    instances.load_all(wanted, torch.cuda.current_device())
    for op, count in itertools.product(ops, tokens):
        yield run_entry(op, count, heads, rope and op in INSERTS, around=around)


def _run(body: Body) -> None:
    body()


def remarks(entries: Sequence[Entry]) -> list[str]:
    """Return where ours was slower than the public structure, as a sentence."""
    every = {f"{e.kind} at T = {e.tokens}": prefill_summary(asdict(e)) for e in entries}
    over = {cell: summary["over_public"] for cell, summary in every.items()}
    known = {cell: ratio for cell, ratio in over.items() if ratio is not None}
    return [document.slower_than("the public structure", known)] if known else []


def as_document(
    entries: Sequence[Entry], commit: str | None = None, around: tuple[str, str] = NEIGHBOURS
) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "prefill",
        entries,
        commit,
        method={
            "chain": told(*around),
            "statistic": "median of 3 rounds of 5 replays of a CUDA graph, microseconds a launch",
            "tensors": f"from {ROTATE_FROM} tokens on several sets take turns, "
            f"{ROTATED_BYTES >> 20} MiB at least",
            "bytes": "each byte read and written, counted once",
        },
        remarks=remarks(entries),
    )
