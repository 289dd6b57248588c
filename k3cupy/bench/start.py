"""Benchmark of a server's start: its kernels cold, warm, of a bundle, and in many processes.

Each scenario is in fresh processes, which import all, make their tensors and then wait for each
other; what is timed begins there. The kernels are those of a bundle for the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

import k3cupy
from k3cupy import bundling, projections
from k3cupy.bench import document
from k3cupy.runtime import binaries, devices, env, instances, toolchain
from k3cupy.runtime.errors import ToolchainError
from k3cupy.timing.decode_step import DecodeStep

RANKS = 8
"""Processes at once: of a server with as many GPUs. Here they share one."""

_TOKENS, _HEADS, _KIND = 4, 12, "16bit+same"
_N, _K = 2304, 1536
_TIMEOUT = 300
_COMMAND = (sys.executable, "-m", "k3cupy.bench.start")


@dataclass
class Entry:
    """What one scenario took; of several processes the last.

    Attributes:
        kind: the scenario.
        processes: how many began at once.
        kernels: that each loaded.
        compiled: of them, by all processes together.
        files: in the disk cache at the end.
        ready_s: from the beginning until all kernels are loaded.
        chosen_s: until it was known which ones; they are compiled meanwhile.
        decode_ms: from the call of the first decode epilogue to its result.
        gemm_ms: the same of the first product, right behind it.
    """

    kind: str
    processes: int
    kernels: int
    compiled: int
    files: int
    ready_s: float
    chosen_s: float
    decode_ms: float
    gemm_ms: float


class _Scenario:
    """Processes that are started, and begin together when they are told to."""

    def __init__(
        self, kind: str, count: int, cache: Path, bundle: Path | None = None, **what: Any
    ) -> None:
        self._kind, self._cache, self.bundle = kind, cache, bundle
        environment = {**os.environ, "CUPY_CACHE_DIR": str(cache)}
        for name in ("CUPY_CACHE_IN_MEMORY", env.BUNDLE, env.NO_COMPILE):
            environment.pop(name, None)
        if bundle is not None:
            environment |= {env.BUNDLE: str(bundle), env.NO_COMPILE: "1"}
        self._children = [
            subprocess.Popen(
                [*_COMMAND, json.dumps(what)],
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(count)
        ]

    def wait(self) -> None:
        """Return when all have imported what they need, and wait to begin."""
        for child in self._children:
            if _pipe(child.stdout).readline() != "ready\n":
                raise RuntimeError(f"start, {self._kind}: a process ended before it began")

    def run(self) -> Entry:
        """Let them begin, and return what they took."""
        for child in self._children:
            _pipe(child.stdin).write("go\n")
            _pipe(child.stdin).flush()
        told = [child.communicate(timeout=_TIMEOUT)[0] for child in self._children]
        if any(child.returncode for child in self._children):
            raise RuntimeError(f"start, {self._kind}: a process failed; its message is above")
        found = [json.loads(text) for text in told]
        return Entry(
            self._kind,
            len(self._children),
            kernels=found[0]["kernels"],
            compiled=sum(one["compiled"] for one in found),
            files=sum(1 for _ in self._cache.iterdir()) if self._cache.is_dir() else 0,
            **{
                name: max(one[name] for one in found)
                for name in ("ready_s", "chosen_s", "decode_ms", "gemm_ms")
            },
        )

    def end(self) -> None:
        """End what still runs."""
        for child in self._children:
            child.kill()
            child.wait()


def run(model: str = projections.MODELS[0], tp: int = 8) -> Iterator[Entry]:
    """Yield the entry of each scenario, for a model at a degree of tensor parallelism."""
    gpu = devices.info(torch.cuda.current_device())
    of_model: dict[str, Any] = {"model": model, "tp": tp}
    with tempfile.TemporaryDirectory(prefix="k3cupy-start-") as place, ExitStack() as started:
        cold, fewer, shared, unused, bundle = (
            Path(place, name) for name in ("cold", "fewer", "shared", "unused", "bundle")
        )
        scenarios = [
            _Scenario("cold", 1, cold, **of_model),
            _Scenario("warm", 1, cold, **of_model),
            _Scenario("warm, first calls alone", 1, cold),
            _Scenario("cold, one cache format", 1, fewer, **of_model, **bundling.ONE_SERVER),
            _Scenario(f"cold, {RANKS} at once", RANKS, shared, **of_model),
            _Scenario("bundle", 1, unused, bundle, **of_model),
            _Scenario("bundle, first calls alone", 1, unused, bundle),
        ]
        for scenario in scenarios:
            started.callback(scenario.end)
        for scenario in scenarios:  # all import at once, which takes seconds each
            scenario.wait()
        for scenario in scenarios:
            if scenario.bundle is not None and not bundle.exists():  # it is read behind the start
                wanted = list(dict.fromkeys(bundling.instances_of(model, tp, gpu)))
                bundling.make(wanted, f"{model} tp{tp}", gpu, bundle)
            yield scenario.run()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def child(model: str | None = None, tp: int = 8, **fewer: Any) -> None:
    """Be one of the processes: say when all is prepared, wait, begin, and print what it took.

    Args:
        model: whose kernels to load first; None for none.
        tp: its degree of tensor parallelism.
        **fewer: of them, as ``bundling.instances_of`` takes it.
    """
    toolchain.cupy()
    toolchain.cuda_core()
    if env.no_compile():  # as where there is no compiler
        toolchain.nvrtc_version = toolchain.include_directory = _refuse  # type: ignore[assignment]
    arguments = DecodeStep(_KIND, _TOKENS, _HEADS).arguments
    x = torch.randn(_TOKENS, _K, device="cuda").bfloat16()
    weight = torch.randn(_N, _K, device="cuda").bfloat16()
    decode = k3cupy.fused_mla_decode_q_concat_kv_cache_insert
    linear = k3cupy.low_latency_linear
    made: list[str] = []
    keep = binaries.keep

    def count(key: str, content: bytes) -> None:
        made.append(key)
        keep(key, content)

    binaries.keep = count
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    times = [time.perf_counter()]
    number, found_at = 0, times[0]

    def note_choice(_: int) -> None:
        nonlocal found_at
        found_at = time.perf_counter()

    if model is not None:
        device = torch.cuda.current_device()
        wanted = bundling.instances_of(model, tp, devices.info(device), **fewer)
        number = instances.load_all(wanted, device, on_found=note_choice)
    times.append(time.perf_counter())
    for operation, given in ((decode, arguments), (linear, {"x": x, "weight": weight})):
        operation(**given)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
    begun, ready, decoded, multiplied = times
    took = {
        "kernels": number,
        "compiled": len(made),
        "ready_s": ready - begun,
        "chosen_s": found_at - begun,
        "decode_ms": 1e3 * (decoded - ready),
        "gemm_ms": 1e3 * (multiplied - decoded),
    }
    print(json.dumps(took))


def _refuse() -> NoReturn:
    raise ToolchainError("a bundle must do without NVRTC and headers")


def remarks(entries: Sequence[Entry]) -> list[str]:
    """Return what the entries say of each other."""
    found = {entry.kind: entry for entry in entries}
    one, many = found.get("cold"), found.get(f"cold, {RANKS} at once")
    if one is None or many is None:
        return []
    return [
        f"{RANKS} processes at once take {many.ready_s / one.ready_s:.2f} times as long as one, "
        f"compile {many.compiled} kernels together and leave {many.files} files, of which one is "
        "the lock."
    ]


def as_document(entries: Sequence[Entry], commit: str | None = None) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "start",
        entries,
        commit,
        method={
            "statistic": "one run a scenario, in fresh processes",
            "begin": "behind the imports, CUDA's context and the tensors of the first calls",
            "cores": os.cpu_count(),
            "one cache format": "static weights, fp8, without RoPE; all else has every form",
            "first calls": f"decode {_KIND}, B = {_TOKENS}, H = {_HEADS}; linear {_N} x {_K}, "
            f"M = {_TOKENS}",
        },
        remarks=remarks(entries),
    )


if __name__ == "__main__":
    child(**json.loads(sys.argv[1]))
