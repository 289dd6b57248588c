"""Benchmark of the MLA decode epilogue: every configuration, alone and where it really sits.

The chain is absorbed-query matmul (``torch.bmm``) -> epilogue -> a consumer that waits and reads
mqa_q, with the strides of the model: ql_nope a transposed matmul output, q_pe a slice of q, kv_c
and k_pe slices of the 2112-wide projection. What is reported for the chain is the time that the
epilogue adds: the chain's time less that of the same chain without it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

import k3cupy
from k3cupy.bench import document
from k3cupy.constants import DS_MLA_ROW_BYTES, KV_LORA_RANK, LATENT_DIM, QK_ROPE_HEAD_DIM
from k3cupy.ops.mla_decode_config import CANDIDATES, MlaDecodeConfig, MlaDecodeVariant
from k3cupy.runtime import devices, instances, launch
from k3cupy.runtime.instances import Instance
from k3cupy.timing import graphs

KINDS = ("16bit+same", "fp8+fp8", "16bit+ds_mla", "16bit+fp8", "fp8+same")
"""Query format + cache format."""

TABLE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 65, 128, 256, 512, 1024)
LAUNCHES = 200

_BLOCK_SIZE = 64
_NUM_BLOCKS = 64
_NOPE_HEAD_DIM = 128
_QKV_A_WIDTH = 2112
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
    empty_us: float
    torch_us: float
    public_us: dict[str, float]
    dispatched: dict[str, int]
    candidates: list[dict[str, Any]] = field(default_factory=list)


class Problem:
    """Tensors of one decode step with the strides of the model."""

    def __init__(self, kind: str, tokens: int, heads: int) -> None:
        random = torch.Generator(device="cuda").manual_seed(tokens)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=random)

        variant = MlaDecodeVariant.of_kind(kind)
        self.query_fp8, self.cache = variant.query_fp8, variant.cache
        q = normal(tokens, heads, _NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM)
        self.q_nope = q[..., :_NOPE_HEAD_DIM].transpose(0, 1)
        self.w_uk = normal(heads, _NOPE_HEAD_DIM, KV_LORA_RANK)
        self.absorbed = torch.empty(
            heads, tokens, KV_LORA_RANK, device="cuda", dtype=torch.bfloat16
        )
        qkv_a = normal(tokens, _QKV_A_WIDTH)
        latent = _QKV_A_WIDTH - LATENT_DIM
        self.inputs = {
            "ql_nope": self.absorbed.transpose(0, 1),
            "q_pe": q[..., _NOPE_HEAD_DIM:],
            "kv_c_normed": qkv_a[:, latent : latent + KV_LORA_RANK],
            "k_pe": qkv_a[:, latent + KV_LORA_RANK :],
            "slot_mapping": torch.randperm(
                _NUM_BLOCKS * _BLOCK_SIZE, device="cuda", generator=random
            )[:tokens],
        }
        width = DS_MLA_ROW_BYTES if self.cache == "ds_mla" else LATENT_DIM
        cache_type = torch.bfloat16 if self.cache == "same" else torch.uint8
        self.kv_cache = torch.zeros(
            _NUM_BLOCKS, _BLOCK_SIZE, width, device="cuda", dtype=cache_type
        )
        self.scales: dict[str, torch.Tensor] = {}
        if self.query_fp8:
            self.scales["q_scale_inv"] = torch.tensor([0.5], device="cuda")
        if self.cache == "fp8":
            self.scales["cache_scale_inv"] = torch.tensor([2.0], device="cuda")
        self.out = torch.empty(
            tokens,
            heads,
            LATENT_DIM,
            device="cuda",
            dtype=torch.float8_e4m3fn if self.query_fp8 else torch.bfloat16,
        )
        self.arguments = {
            **self.inputs,
            **self.scales,
            "kv_cache": self.kv_cache,
            "ds_mla": self.cache == "ds_mla",
        }
        self.absorb()

    def absorb(self) -> None:
        """Run the predecessor."""
        torch.bmm(self.q_nope, self.w_uk, out=self.absorbed)

    def epilogue(self, config: MlaDecodeConfig, *, pdl: bool) -> None:
        """Run the kernel."""
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
            **self.arguments, out=self.out, split=config, pdl=pdl
        )

    def dispatched(self) -> MlaDecodeConfig:
        """Return the configuration that the table chooses."""
        config: MlaDecodeConfig = k3cupy.explain_mla_decode(**self.arguments, out=self.out).config
        return config

    def unfused(self) -> None:
        """Run the same in PyTorch operations; a ds_mla cache is written in its RoPE part only."""
        query = torch.cat([self.inputs["ql_nope"], self.inputs["q_pe"]], -1)
        row = torch.cat([self.inputs["kv_c_normed"], self.inputs["k_pe"]], -1)
        if self.query_fp8:
            query = (query * self.scales["q_scale_inv"]).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.out.copy_(query)
        rows = self.kv_cache.view(-1, self.kv_cache.shape[-1])
        if self.cache == "fp8":
            scaled = (row * self.scales["cache_scale_inv"]).clamp(-448, 448)
            row = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        elif self.cache == "ds_mla":
            rows, row = rows[:, -2 * QK_ROPE_HEAD_DIM :], self.inputs["k_pe"].view(torch.uint8)
        rows.index_copy_(0, self.inputs["slot_mapping"], row)

    def public_structure(self, split: int, *, pdl: bool) -> Callable[[], None]:
        """Return the launch of the comparison kernel with ``split`` warps a row."""
        device = torch.cuda.current_device()
        flags = ", ".join(
            "true" if flag else "false" for flag in (self.query_fp8, self.cache == "fp8")
        )
        name = f"k3cupy::public_structure<__nv_bfloat16, {flags}, {split}>"
        kernel = instances.load(Instance("bench/public_structure.cu", name), device)
        tokens, heads, _ = self.out.shape
        warps = tokens * (heads + 1) * split
        queue = launch.make_launcher(
            device, kernel.kernel, grid=-(-warps // (_THREADS // 32)), block=_THREADS, pdl=pdl
        )
        i = self.inputs
        size = self.kv_cache.element_size()
        arguments = [
            *(i["ql_nope"].data_ptr(), i["ql_nope"].stride(0), i["ql_nope"].stride(1)),
            *(i["q_pe"].data_ptr(), i["q_pe"].stride(0), i["q_pe"].stride(1)),
            *(i["kv_c_normed"].data_ptr(), i["kv_c_normed"].stride(0)),
            *(i["k_pe"].data_ptr(), i["k_pe"].stride(0)),
            *(self.out.data_ptr(), self.kv_cache.data_ptr()),
            *(self.kv_cache.stride(0) * size, self.kv_cache.stride(1) * size),
            i["slot_mapping"].data_ptr(),
            *(
                self.scales[name].data_ptr() if name in self.scales else 0
                for name in ("q_scale_inv", "cache_scale_inv")
            ),
            *(np.int32(tokens), np.int32(heads), np.int32(_BLOCK_SIZE)),
        ]
        return lambda: queue(torch.cuda.current_stream().cuda_stream, arguments)

    def check(self, what: str, body: Callable[[], None]) -> None:
        """Compare what a body computes, bit by bit, with the CPU reference on the same tensors.

        Raises:
            RuntimeError: one bit differs; such a body is not timed.
        """
        self.kv_cache.zero_()
        self.out.view(torch.uint8).fill_(0x55)
        body()
        out, cache = self._expected
        for name, got, want in (("mqa_q", self.out, out), ("kv_cache", self.kv_cache, cache)):
            if not torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)):
                raise RuntimeError(f"{what}: {name} differs from the reference, not timed")

    @functools.cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.zeros(self.kv_cache.shape, dtype=self.kv_cache.dtype)
        out = torch.empty(self.out.shape, dtype=self.out.dtype)
        read = {name: t.cpu() for name, t in {**self.inputs, **self.scales}.items()}
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
            **{**self.arguments, **read, "kv_cache": cache}, out=out
        )
        return out, cache


class Neighbours:
    """The empty kernel and the consumer, launched as the epilogue is."""

    def __init__(self, device: int, *, pdl: bool) -> None:
        def launcher(name: str) -> launch.Launcher:
            kernel = instances.load(Instance("bench/chain.cu", f"k3cupy::{name}"), device)
            return launch.make_launcher(
                device,
                kernel.kernel,
                grid=devices.info(device).num_sms,
                block=_THREADS,
                pdl=pdl,
            )

        self._empty = launcher("empty_kernel")
        self._read_all = launcher("read_all")
        self._sink = torch.zeros(1, device="cuda", dtype=torch.int32)

    def empty(self) -> None:
        """Launch the empty kernel."""
        self._empty(torch.cuda.current_stream().cuda_stream, [])

    def consume(self, out: torch.Tensor) -> None:
        """Launch the consumer of mqa_q."""
        count = out.numel() * out.element_size() // 16
        stream = torch.cuda.current_stream().cuda_stream
        self._read_all(stream, [out.data_ptr(), count, self._sink.data_ptr()])


def run_entry(
    kind: str,
    tokens: int,
    heads: int,
    scenario: str,
    pdl: bool,
    candidates: Sequence[MlaDecodeConfig] = CANDIDATES,
) -> Entry:
    """Check, then time every candidate, an empty kernel and PyTorch for one problem.

    Raises:
        RuntimeError: a candidate gives a wrong bit.
    """
    problem = Problem(kind, tokens, heads)
    neighbours = Neighbours(torch.cuda.current_device(), pdl=pdl)

    def run(config: MlaDecodeConfig) -> Callable[[], None]:
        return lambda: problem.epilogue(config, pdl=pdl)

    public = {}
    if problem.cache != "ds_mla":
        public = {split: problem.public_structure(split, pdl=pdl) for split in _PUBLIC_SPLITS}
    for split, body in public.items():
        problem.check(f"public structure, split {split}", body)
    for config in candidates:
        problem.check(str(config), run(config))

    def chain(middle: Callable[[], None] | None) -> Callable[[], None]:
        def body() -> None:
            if scenario == "chain":
                problem.absorb()
            if middle is not None:
                middle()
            if scenario == "chain":
                neighbours.consume(problem.out)

        return body

    middles = [neighbours.empty, problem.unfused, *public.values(), *map(run, candidates)]
    bodies = [chain(middle) for middle in middles]
    if scenario == "chain":
        bodies.insert(0, chain(None))
    times = graphs.measure([graphs.capture(body, LAUNCHES) for body in bodies], LAUNCHES)
    base = times.pop(0) if scenario == "chain" else 0.0
    added = [round(time - base, 4) for time in times]
    return Entry(
        kind=kind,
        tokens=tokens,
        heads=heads,
        scenario=scenario,
        pdl=pdl,
        chain_us=round(base, 4),
        empty_us=added[0],
        torch_us=added[1],
        public_us={str(split): time for split, time in zip(public, added[2:], strict=False)},
        dispatched=asdict(problem.dispatched()),
        candidates=[
            {**asdict(config), "us": time}
            for config, time in zip(candidates, added[2 + len(public) :], strict=True)
        ],
    )


def compile_all(kinds: Iterable[str], candidates: Iterable[MlaDecodeConfig], device: int) -> int:
    """Compile what a run will launch, on threads; return how many instances there are."""
    wanted = []
    for kind, config in itertools.product(kinds, candidates):
        wanted.append(config.instance(MlaDecodeVariant.of_kind(kind)))
    return instances.load_all(wanted, device)


def run(
    kinds: Sequence[str] = KINDS,
    tokens: Sequence[int] = TABLE_TOKENS,
    heads: int = 12,
    scenarios: Sequence[tuple[str, bool]] = (("chain", True),),
) -> Iterator[Entry]:
    """Yield the entries of a whole run.

    Args:
        kinds: formats, from ``KINDS``.
        tokens: batch sizes.
        heads: H.
        scenarios: (``"chain"`` or ``"alone"``, with PDL).
    """
    compile_all(kinds, CANDIDATES, torch.cuda.current_device())
    for (scenario, pdl), kind, count in itertools.product(scenarios, kinds, tokens):
        yield run_entry(kind, count, heads, scenario, pdl)


def host_time(kind: str, tokens: int = 16, heads: int = 12) -> dict[str, float]:
    """Return the host's microseconds for one repeated eager call.

    Returns:
        ``"new output"`` and ``"out given"``: the call that allocates mqa_q, and the one that does
        not.
    """
    problem = Problem(kind, tokens, heads)

    def call(**extra: torch.Tensor) -> None:
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**problem.arguments, **extra)

    return {
        "new output": graphs.host_us(call),
        "out given": graphs.host_us(lambda: call(out=problem.out)),
    }


def as_document(entries: Sequence[Entry], commit: str | None = None) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "decode",
        entries,
        commit,
        method={
            "launches_a_graph": LAUNCHES,
            "statistic": "median of 3 rounds of 9 replays, microseconds a launch",
            "chain": "time added to torch.bmm -> consumer; strides of the model",
        },
        host_us={kind: host_time(kind) for kind in ("16bit+same", "fp8+fp8")},
    )
