"""Benchmark of the prefill and context epilogues: every configuration, by the bytes it moves.

With few tokens the time is latency: the measure is a kernel that copies as many bytes, one warp a
row. With many it is bandwidth: the measure is PyTorch's device-to-device copy of as many bytes, and
the tensors of one launch after the other are different ones, so that none is found in L2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

import k3cupy
from k3cupy.bench import document
from k3cupy.constants import (
    DS_MLA_ROW_BYTES,
    KV_LORA_RANK,
    LATENT_DIM,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    V_HEAD_DIM,
)
from k3cupy.ops.mla_prefill_config import (
    CANDIDATES,
    INSERTS,
    KEY_CONCAT,
    KEY_CONCAT_DS_MLA,
    KV_CONCAT,
    OPS,
    QKV_QUANT,
    MlaPrefillConfig,
    MlaPrefillVariant,
)
from k3cupy.ops.mla_prefill_validate import OPERATIONS
from k3cupy.runtime import instances, launch
from k3cupy.runtime.instances import Instance
from k3cupy.timing import graphs

TOKENS = (1, 4, 16, 64, 512, 4096, 16_384, 65_536)

_BLOCK_SIZE = 64
_POSITIONS = 4096
_QKV_A_WIDTH = 2112
_THREADS = 256
_ROW_BYTES = 1152  # of a row of bench/row_copy.cu

_GRAPH_US = 1500.0
_MAX_LAUNCHES = 200
_ASSUMED_BYTES_A_US = 4e6
_ROTATE_FROM = 4096
_ROTATED_BYTES = 200 << 20
_SAMPLES = 64


_T = TypeVar("_T")


@dataclass
class Entry:
    """One row of results; times in microseconds a launch.

    Attributes:
        kind: the operation, one of ``OPS``.
        tokens: T.
        heads: H.
        rope: with positions.
        bytes: read and written, each counted once.
        copy_us: ``Tensor.copy_`` that moves as many bytes.
        row_copy_us: a kernel that copies as many bytes, one warp a row.
        torch_us: the unfused PyTorch operations.
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
    torch_us: float
    dispatched: dict[str, int]
    candidates: list[dict[str, Any]] = field(default_factory=list)


def bytes_moved(op: str, tokens: int, heads: int, rope: bool = False) -> int:
    """Return the bytes that an operation must read and write, each counted once."""
    latent = 2 * KV_LORA_RANK + 8  # and the slot
    row = {KEY_CONCAT: 2 * LATENT_DIM, KEY_CONCAT_DS_MLA: DS_MLA_ROW_BYTES, QKV_QUANT: LATENT_DIM}
    token = 2 * QK_ROPE_HEAD_DIM
    if op in INSERTS:
        token += latent + row[op] + (8 + 4 * QK_ROPE_HEAD_DIM if rope else 0)
    head = 2 * QK_NOPE_HEAD_DIM
    if op in (KEY_CONCAT, KEY_CONCAT_DS_MLA, KV_CONCAT):
        head += 2 * QK_HEAD_DIM + (4 * QK_ROPE_HEAD_DIM if rope else 0)
    else:
        head += 2 * V_HEAD_DIM + QK_HEAD_DIM + V_HEAD_DIM
        head += 3 * QK_HEAD_DIM if op == QKV_QUANT else 0
    return tokens * (token + heads * head)


def sets_of(tokens: int, size: int) -> int:
    """Return how many sets of tensors take turns, so that a long prompt is not found in L2."""
    return 1 if tokens < _ROTATE_FROM else max(1, -(-_ROTATED_BYTES // size))


def launches_of(size: int, sets: int) -> int:
    """Return the launches of one graph: as many of each set, about a millisecond and a half."""
    wanted = _GRAPH_US / (2 + size / _ASSUMED_BYTES_A_US)
    return max(1, round(min(wanted, _MAX_LAUNCHES) / sets)) * sets


class Problem:
    """Tensors of one prefill step with the strides of the model."""

    def __init__(self, op: str, tokens: int, heads: int, rope: bool, seed: int = 0) -> None:
        random = torch.Generator(device="cuda").manual_seed(tokens + seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=random)

        self.op, self.tokens, self.heads, self.rope = op, tokens, heads, rope
        kv = normal(tokens, heads, QK_NOPE_HEAD_DIM + V_HEAD_DIM)
        qkv_a = normal(tokens, _QKV_A_WIDTH)
        latent = _QKV_A_WIDTH - LATENT_DIM
        num_blocks = -(-tokens // _BLOCK_SIZE)
        is_ds_mla = op == KEY_CONCAT_DS_MLA
        tensors: dict[str, Any] = {
            "k_nope": kv[..., :QK_NOPE_HEAD_DIM],
            "v": kv[..., QK_NOPE_HEAD_DIM:],
            "k_pe": qkv_a[:, latent + KV_LORA_RANK :],
            "kv_c_normed": qkv_a[:, latent : latent + KV_LORA_RANK],
        }
        if op in INSERTS:
            tensors["q"] = normal(tokens, heads, QK_HEAD_DIM)
            tensors["kv_cache"] = torch.zeros(
                num_blocks,
                _BLOCK_SIZE,
                DS_MLA_ROW_BYTES if is_ds_mla else LATENT_DIM,
                device="cuda",
                dtype=torch.bfloat16 if op == KEY_CONCAT else torch.uint8,
            )
            # A prompt's tokens stand side by side in blocks that may be anywhere.
            blocks = torch.randperm(num_blocks, device="cuda", generator=random)
            token = torch.arange(tokens, device="cuda")
            tensors["slot_mapping"] = (
                blocks[token // _BLOCK_SIZE] * _BLOCK_SIZE + token % _BLOCK_SIZE
            )
            if rope:
                tensors["positions"] = token % _POSITIONS
                angle = torch.rand(_POSITIONS, 32, device="cuda", generator=random) * 6.28
                tensors["cos_sin_cache"] = torch.cat([angle.cos(), angle.sin()], -1)
        for i, name in enumerate(OPERATIONS[op].arguments.scales):
            tensors[name] = torch.tensor([0.5 * 2**i], device="cuda")
        self.arguments = {name: tensors[name] for name in OPERATIONS[op].inputs if name in tensors}
        self.outs = [
            torch.empty(
                tokens,
                heads,
                width,
                device="cuda",
                dtype=torch.float8_e4m3fn if OPERATIONS[op].is_fp8 else torch.bfloat16,
            )
            for width in OPERATIONS[op].outputs.values()
        ]
        self._query = self.arguments["q"].clone() if self._turns_query else None

    @property
    def _turns_query(self) -> bool:
        return self.rope and not OPERATIONS[self.op].is_fp8

    def run(self, config: MlaPrefillConfig | None) -> None:
        """Run the kernel."""
        out = self.outs[0] if len(self.outs) == 1 else tuple(self.outs)
        getattr(k3cupy, self.op)(**self.arguments, out=out, config=config)

    def dispatched(self) -> MlaPrefillConfig:
        """Return the configuration that the table chooses."""
        config: MlaPrefillConfig = k3cupy.explain_mla_prefill(self.op, **self.arguments).config
        return config

    def unfused(self) -> None:
        """Run the same in PyTorch operations; a ds_mla cache is written in its RoPE part only."""
        a = self.arguments
        k_pe = self._turned(a["k_pe"][:, None])
        k = torch.cat([a["k_nope"], k_pe.expand(-1, self.heads, -1)], -1)
        if self.op in INSERTS:
            row = torch.cat([a["kv_c_normed"], k_pe[:, 0]], -1)
            rows = a["kv_cache"].view(-1, a["kv_cache"].shape[-1])
            if self.op == KEY_CONCAT_DS_MLA:
                rows, row = rows[:, -2 * QK_ROPE_HEAD_DIM :], k_pe[:, 0].contiguous()
            if self.op == QKV_QUANT:
                row = _cast(row, a["cache_scale_inv"])
            if self.op != KEY_CONCAT:
                row = row.view(torch.uint8)
            rows.index_copy_(0, a["slot_mapping"], row)
            q_pe = a["q"][..., QK_NOPE_HEAD_DIM:]
            if self._turns_query:
                q_pe.copy_(self._turned(q_pe))
        if self.op == QKV_QUANT:
            query = torch.cat([a["q"][..., :QK_NOPE_HEAD_DIM], self._turned(q_pe)], -1)
            _cast(query if self.rope else a["q"], a["q_scale_inv"])
            _cast(k, a["k_scale_inv"])
            _cast(a["v"], a["v_scale_inv"])
        elif OPERATIONS[self.op].is_fp8:
            k.to(torch.float8_e4m3fn)
            a["v"].to(torch.float8_e4m3fn)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rope:
            return x
        angles = self.arguments["cos_sin_cache"][self.arguments["positions"]][:, None]
        cosine, sine = angles.chunk(2, -1)
        first, second = x[..., 0::2].float(), x[..., 1::2].float()
        pairs = (first * cosine - second * sine, first * sine + second * cosine)
        return torch.stack(pairs, -1).flatten(-2).to(x.dtype)

    def results(self, config: MlaPrefillConfig) -> list[torch.Tensor]:
        """Run on fresh memory and return copies of what was written, as bytes."""
        written = [*self.outs]
        if "kv_cache" in self.arguments:
            self.arguments["kv_cache"].zero_()
            written.append(self.arguments["kv_cache"])
        for out in self.outs:
            out.view(torch.uint8).fill_(0x55)
        if self._query is not None:
            self.arguments["q"].copy_(self._query)
            written.append(self.arguments["q"])
        self.run(config)
        return [t.contiguous().view(torch.uint8).clone() for t in written]

    def expected(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return what some tokens must give by the CPU reference, in the order of ``results``.

        The cache comes as the rows of those tokens.
        """
        whole = ("kv_cache", "cos_sin_cache")
        taken = {
            name: t.cpu() if name in whole or name.endswith("inv") else t[tokens].cpu()
            for name, t in self.arguments.items()
            if name != "kv_cache"
        }
        if self._query is not None:
            taken["q"] = self._query[tokens].cpu()
        if "kv_cache" in self.arguments:
            cache = self.arguments["kv_cache"]
            taken["kv_cache"] = torch.zeros(1, len(tokens), cache.shape[-1], dtype=cache.dtype)
            taken["slot_mapping"] = torch.arange(len(tokens))
        outs = getattr(k3cupy, self.op)(**taken)
        found = [outs] if isinstance(outs, torch.Tensor) else list(outs)
        if "kv_cache" in taken:
            found.append(taken["kv_cache"][0])
        if self._query is not None:
            found.append(taken["q"])
        return [t.contiguous().view(torch.uint8) for t in found]

    def check(self, candidates: Sequence[MlaPrefillConfig]) -> None:
        """Compare the first candidate with the CPU reference, and every other one with the first.

        A sample of tokens goes through the reference, among them the first and the last; the
        candidates are compared bit by bit everywhere.

        Raises:
            RuntimeError: one bit differs; nothing is timed.
        """
        first = self.results(candidates[0])
        count = min(self.tokens, _SAMPLES)
        sample = torch.linspace(0, self.tokens - 1, count, device="cuda").round().long()
        cache_place = len(self.outs) if "kv_cache" in self.arguments else None
        for place, (got, want) in enumerate(zip(first, self.expected(sample), strict=True)):
            if place == cache_place:
                picked = got.view(-1, got.shape[-1])[self.arguments["slot_mapping"][sample]]
            else:
                picked = got[sample]
            if not torch.equal(picked.cpu(), want):
                raise RuntimeError(
                    f"{self.op}, {candidates[0]}: result {place} differs from the reference, not "
                    "timed"
                )
        for config in candidates[1:]:
            for place, (got, want) in enumerate(zip(self.results(config), first, strict=True)):
                if not torch.equal(got, want):
                    raise RuntimeError(
                        f"{self.op}, {config}: result {place} differs from that of "
                        f"{candidates[0]}, not timed"
                    )


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


def run_entry(
    op: str,
    tokens: int,
    heads: int,
    rope: bool = False,
    candidates: Sequence[MlaPrefillConfig] = CANDIDATES,
) -> Entry:
    """Check, then time every candidate, two copies and PyTorch for one problem.

    Raises:
        RuntimeError: a candidate gives a wrong bit.
    """
    size = bytes_moved(op, tokens, heads, rope)
    sets = sets_of(tokens, size)
    launches = launches_of(size, sets)
    problems = [Problem(op, tokens, heads, rope, seed) for seed in range(sets)]
    problems[0].check(candidates)
    copies = [Copies(size) for _ in range(sets)]

    def in_turns(run: Callable[[_T], None], of: Sequence[_T]) -> Callable[[], None]:
        turn = itertools.cycle(of)
        return lambda: run(next(turn))

    bodies = [
        in_turns(Copies.device_to_device, copies),
        in_turns(Copies.one_warp_a_row, copies),
        in_turns(Problem.unfused, problems),
        *(
            in_turns(functools.partial(Problem.run, config=config), problems)
            for config in candidates
        ),
    ]
    recorded = [graphs.capture(body, launches) for body in bodies]
    times = [round(us, 4) for us in graphs.measure(recorded, launches, replays=5)]
    return Entry(
        kind=op,
        tokens=tokens,
        heads=heads,
        rope=rope,
        bytes=size,
        copy_us=times[0],
        row_copy_us=times[1],
        torch_us=times[2],
        dispatched=asdict(problems[0].dispatched()),
        candidates=[
            {**asdict(config), "us": us} for config, us in zip(candidates, times[3:], strict=True)
        ],
    )


def run(
    ops: Sequence[str] = OPS,
    tokens: Sequence[int] = TOKENS,
    heads: int = 12,
    rope: bool = False,
) -> Iterator[Entry]:
    """Yield the entries of a whole run.

    Args:
        ops: operations, from ``OPS``.
        tokens: prompt lengths.
        heads: H.
        rope: with positions, for the operations that have them.
    """
    wanted = [
        config.instance(MlaPrefillVariant(op, rope=rope and op in INSERTS))
        for op, config in itertools.product(ops, CANDIDATES)
    ]
    instances.load_all(wanted, torch.cuda.current_device())
    for op, count in itertools.product(ops, tokens):
        yield run_entry(op, count, heads, rope and op in INSERTS)


def as_document(entries: Sequence[Entry], commit: str | None = None) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "prefill",
        entries,
        commit,
        method={
            "statistic": "median of 3 rounds of 5 replays of a CUDA graph, microseconds a launch",
            "tensors": f"from {_ROTATE_FROM} tokens on several sets take turns, "
            f"{_ROTATED_BYTES >> 20} MiB at least",
            "bytes": "each byte read and written, counted once",
        },
    )
