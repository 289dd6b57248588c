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
        prepared_s: before the beginning: imports, CUDA's contexts, the tensors of the calls.
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
    prepared_s: float


def run(model: str = projections.MODELS[0], tp: int = 8) -> Iterator[Entry]:
    """Yield the entry of each scenario, for a model at a degree of tensor parallelism."""
    gpu = devices.info(torch.cuda.current_device())
    with tempfile.TemporaryDirectory(prefix="k3cupy-start-") as place:
        cold, shared, unused = (Path(place, name) for name in ("cold", "shared", "unused"))
        yield _scenario("cold", 1, cold, model=model, tp=tp)
        yield _scenario("warm", 1, cold, model=model, tp=tp)
        yield _scenario("warm, first calls alone", 1, cold)
        yield _scenario(f"cold, {RANKS} at once", RANKS, shared, model=model, tp=tp)
        yield _scenario(f"warm, {RANKS} at once", RANKS, shared, model=model, tp=tp)
        bundle = Path(place, "bundle")
        wanted = list(dict.fromkeys(bundling.instances_of(model, tp, gpu)))
        bundling.make(wanted, f"{model} tp{tp}", gpu, bundle)
        yield _scenario("bundle", 1, unused, bundle, model=model, tp=tp)
        yield _scenario("bundle, first calls alone", 1, unused, bundle)


def _scenario(
    kind: str, processes: int, cache: Path, bundle: Path | None = None, **what: Any
) -> Entry:
    """Run processes that begin together, and return what they took."""
    environment = {**os.environ, "CUPY_CACHE_DIR": str(cache)}
    for name in ("CUPY_CACHE_IN_MEMORY", env.BUNDLE, env.NO_COMPILE):
        environment.pop(name, None)
    if bundle is not None:
        environment |= {env.BUNDLE: str(bundle), env.NO_COMPILE: "1"}
    command = [*_COMMAND, json.dumps(what)]
    begun = time.perf_counter()
    children = [
        subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(processes)
    ]
    try:
        for child in children:
            if _pipe(child.stdout).readline() != "ready\n":
                raise RuntimeError(f"start, {kind}: a process ended before it began")
        prepared_s = time.perf_counter() - begun
        for child in children:
            _pipe(child.stdin).write("go\n")
            _pipe(child.stdin).flush()
        told = [child.communicate(timeout=_TIMEOUT)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise RuntimeError(f"start, {kind}: a process failed; its message is above")
    found = [json.loads(text) for text in told]
    return Entry(
        kind,
        processes,
        kernels=found[0]["kernels"],
        compiled=sum(one["compiled"] for one in found),
        files=sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0,
        prepared_s=prepared_s,
        **{
            name: max(one[name] for one in found)
            for name in ("ready_s", "chosen_s", "decode_ms", "gemm_ms")
        },
    )


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def child(model: str | None = None, tp: int = 8) -> None:
    """Be one of the processes: say when all is prepared, wait, begin, and print what it took.

    Args:
        model: whose kernels to load first; None for none.
        tp: its degree of tensor parallelism.
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
        wanted = bundling.instances_of(model, tp, devices.info(device))
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
            "first calls": f"decode {_KIND}, B = {_TOKENS}, H = {_HEADS}; linear {_N} x {_K}, "
            f"M = {_TOKENS}",
        },
        remarks=remarks(entries),
    )


if __name__ == "__main__":
    child(**json.loads(sys.argv[1]))
