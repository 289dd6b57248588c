"""Every kernel under the tools of compute-sanitizer, and faults that they must notice.

`make sanitize` runs it. Each tool watches `test_every_kernel_gpu.py`, or the tests that the command
line names: they must pass, and whatever the tool reports is a failure. Each planted fault, an edit
in a copy of the CUDA sources, must be reported by its tool. What the tools cannot follow is in
docs/kernel_notes.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from toolchain_helpers import copy_of_sources, edit

TESTS = Path(__file__).resolve().parent
EVERY_KERNEL = "test_every_kernel_gpu.py"

OURS = ("--kernel-name", "kns=k3cupy")
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),  # a library asks the driver for what it may lack
    "racecheck": (*OURS, "--num-cuda-barriers", "64"),
    "initcheck": (),
    "synccheck": (*OURS, "--num-cuda-barriers", "64"),
}

OLDEST = (2026, 4)
"""Older ones report races at asynchronous copies that are none, and miss a planted fault."""

HOW_TO_GET_IT = 'Install it: pip install "nvidia-cuda-sanitizer-api>=13.5"'

_SECONDS = 3600
_SECONDS_OF_A_FAULT = 300
_SHOWN_LINES = 40
_WIDTH = 240


@dataclass(frozen=True)
class Edit:
    """A change of one source."""

    file: str
    old: str
    new: str


EVERY_LANE_ARRIVES = (
    Edit(
        "gemm/math_warps.cuh",
        "    __syncwarp();\n    if (lane == 0) {",
        "    __syncwarp();\n    {",
    ),
    Edit("gemm/math_warps.cuh", "if (i > 0 && lane == 0) {", "if (i > 0) {"),
    Edit(
        "fused_a_gemm.cu",
        "memory.weight.init(Tile::kCopyThreads, Tile::kMathWarps);",
        "memory.weight.init(Tile::kCopyThreads, 32 * Tile::kMathWarps);",
    ),
    Edit(
        "fused_a_gemm.cu",
        "memory.x.init(Tile::kMappedX ? 1 : Tile::kCopyThreads, Tile::kMathWarps);",
        "memory.x.init(Tile::kMappedX ? 1 : Tile::kCopyThreads, 32 * Tile::kMathWarps);",
    ),
)
"""racecheck does not see that a warp's barrier orders the reads of its other lanes before the one
lane that arrives. For it alone each lane arrives; nothing else differs."""

ALWAYS = {"racecheck": EVERY_LANE_ARRIVES}


@dataclass(frozen=True)
class Fault:
    """A fault, the case of `test_every_kernel_gpu.py` that meets it, and what the tool must say."""

    tool: str
    what: str
    edits: tuple[Edit, ...]
    case: str
    report: str


_BARRIER = "  __syncthreads();\n"
_STRAY_BARRIER = "\n  if (threadIdx.x != 5) __syncthreads();"
_OF_THREAD = "const int thread = static_cast<int>(threadIdx.x);"
_HEAD_OF_BLOCK = "const unsigned int head = blockIdx.x / kCluster;"
_VALUES = "  for_pairs([&](unsigned int row, unsigned int n, unsigned int word) {"
_MMA_SUMS = "\n  if constexpr (kSplitK == 1) {\n    for_own_elements"
FAULTS = (
    Fault(
        "memcheck",
        "skinny: a row past the last one is stored",
        (Edit("skinny_gemm.cu", "threadIdx.x < kSums && row < n;", "threadIdx.x < kSums;"),),
        "skinny-1x64x2-bfloat16-packed",
        r"Invalid __global__ write.*\n.*skinny_gemm",
    ),
    Fault(
        "memcheck",
        "skinny on tensor cores: a row past the last one is stored",
        (Edit("skinny_gemm.cu", "if (exists && first_row + row < n) visit", "if (exists) visit"),),
        "skinny-mma-1x64x8-bfloat16-packed",
        r"Invalid __global__ write.*\n.*skinny_gemm_mma",
    ),
    Fault(
        "memcheck",
        "fused-A: rows past the last one are stored",
        (
            Edit("gemm/epilogue.cuh", "is_aligned && row + kWidth <= share.rows", "is_aligned"),
            Edit("gemm/epilogue.cuh", "if (row + j < share.rows) {", "{"),
        ),
        "fused_a-warps-packed",
        r"Invalid __global__ write.*\n.*fused_a_gemm",
    ),
    Fault(
        "memcheck",
        "decode: a block's idle threads store",
        (Edit("mla_decode.cu", "    if (token[0] >= num_tokens) return;\n", ""),),
        "decode-9-0-288-1",
        r"Invalid __global__ (read|write).*\n.*mla_decode_epilogue",
    ),
    Fault(
        "memcheck",
        "prefill: heads past the last one are stored",
        (
            Edit(
                "mla_prefill.cu",
                "if (h < task.count) store_chunk<kVector>(target + h * 2 * kHeadWidth, chunk[h]);",
                "store_chunk<kVector>(target + h * 2 * kHeadWidth, chunk[h]);",
            ),
        ),
        "concat-9-8-4",
        r"Invalid __global__ write.*\n.*mla_kv_concat",
    ),
    Fault(
        "racecheck",
        "skinny: no barrier between the sums of the warps and their reader",
        (Edit("skinny_gemm.cu", _BARRIER + "  if (finishes) {", "  if (finishes) {"),),
        "skinny-3x64x5-bfloat16-aligned-residual",
        r"[Rr]ace.*\n?.*skinny_gemm",
    ),
    Fault(
        "racecheck",
        "skinny on tensor cores: no barrier between the sums of the warps and their reader",
        (Edit("skinny_gemm.cu", _BARRIER + _MMA_SUMS, _MMA_SUMS),),
        "skinny-mma-12x96x14-bfloat16-aligned-residual",
        r"[Rr]ace.*\n?.*skinny_gemm_mma",
    ),
    Fault(
        "racecheck",
        "fused-A: no barrier between the sums of the warps and their reader",
        (Edit("fused_a_gemm.cu", _BARRIER + "  store_sums(", "  store_sums("),),
        "fused_a-warps-packed",
        r"[Rr]ace.*\n?.*fused_a_gemm",
    ),
    Fault(
        "racecheck",
        "fused-A: a stage of the weight is read before it is full",
        (
            Edit(
                "gemm/math_warps.cuh",
                "    memory.weight.wait_until_full(at_weight);\n"
                "    memory.x.wait_until_full(at_x);\n    const unsigned int steps",
                "    memory.x.wait_until_full(at_x);\n    const unsigned int steps",
            ),
        ),
        "fused_a-warps-packed",
        r"[Rr]ace.*\n?.*fused_a_gemm",
    ),
    Fault(
        "racecheck",
        "prefill: no barrier between the slots that threads have read and who looks them up",
        (
            Edit(
                "mla/last_writers.cuh", "    __syncthreads();\n    while (next", "    while (next"
            ),
            Edit("mla/last_writers.cuh", "    }\n    __syncthreads();\n  }", "    }\n  }"),
        ),
        "insert-4100-rope",
        r"[Rr]ace.*\n?.*mla_key_concat",
    ),
    Fault(
        "initcheck",
        "skinny: x is read past its columns",
        (Edit("skinny_gemm.cu", "x + m * x_row_stride", "x + m * x_row_stride + 8"),),
        "skinny-3x64x5-bfloat16-aligned-residual",
        r"Uninitialized __global__ memory read.*\n.*skinny_gemm",
    ),
    Fault(
        "initcheck",
        "skinny on tensor cores: x is read past its columns",
        (
            Edit(
                "skinny_gemm.cu",
                "token * x_row_stride + column",
                "token * x_row_stride + column + 8",
            ),
        ),
        "skinny-mma-12x96x14-bfloat16-aligned-residual",
        r"Uninitialized __global__ memory read.*\n.*skinny_gemm_mma",
    ),
    Fault(
        "initcheck",
        "fused-A: the residual is read past its columns",
        (Edit("gemm/epilogue.cuh", "first_row + row));", "first_row + row + 4));"),),
        "fused_a-warps-aligned-residual",
        r"Uninitialized __global__ memory read.*\n.*fused_a_gemm",
    ),
    Fault(
        "initcheck",
        "fused-A: x is copied from before its columns",
        (
            Edit(
                "gemm/copy_warps.cuh",
                "data + share.k_begin + i *",
                "data - 8 + share.k_begin + i *",
            ),
        ),
        "fused_a-warps-aligned-residual",
        r"Uninitialized __global__ memory read.*\n.*fused_a_gemm",
    ),
    Fault(
        "initcheck",
        "decode: k_pe and q_pe are read past their columns",
        (
            Edit(
                "mla/latent_copy.cuh",
                "rope_row + (c - kNopeChunks) * kChunkBytes",
                "rope_row + (c - kNopeChunks + 1) * kChunkBytes",
            ),
        ),
        "decode-9-0-288-1",
        r"Uninitialized __global__ memory read.*\n.*mla_decode_epilogue",
    ),
    Fault(
        "initcheck",
        "prefill: k_pe is read past its columns",
        (
            Edit(
                "mla_prefill.cu",
                "k_pe_stride) + c * kChunkBytes",
                "k_pe_stride) + (c + 1) * kChunkBytes",
            ),
        ),
        "concat-9-8-4",
        r"Uninitialized __global__ memory read.*\n.*mla_kv_concat",
    ),
    Fault(
        "synccheck",
        "skinny: one thread passes a block barrier by",
        (
            Edit(
                "skinny_gemm.cu",
                _BARRIER + "  if (finishes) {",
                "  if (threadIdx.x != 5) __syncthreads();\n  if (finishes) {",
            ),
        ),
        "skinny-3x64x5-bfloat16-aligned-residual",
        r"Divergent thread.*\n.*skinny_gemm",
    ),
    Fault(
        "synccheck",
        "skinny on tensor cores: one thread passes a block barrier by",
        (
            Edit(
                "skinny_gemm.cu",
                _BARRIER + _MMA_SUMS,
                "  if (threadIdx.x != 5) __syncthreads();\n" + _MMA_SUMS,
            ),
        ),
        "skinny-mma-12x96x14-bfloat16-aligned-residual",
        r"Divergent thread.*\n.*skinny_gemm_mma",
    ),
    Fault(
        "synccheck",
        "fused-A: the barriers of a ring are set up twice",
        (
            Edit(
                "gemm/ring.cuh",
                "      init_barrier(empty(s), arrivals_empty);\n",
                "      init_barrier(empty(s), arrivals_empty);\n"
                "      init_barrier(empty(s), arrivals_empty);\n",
            ),
        ),
        "fused_a-warps-packed",
        r"(?i)barrier.*\n.*fused_a_gemm",
    ),
    Fault(
        "synccheck",
        "decode: a block barrier that one thread passes by",
        (
            Edit(
                "mla_decode.cu",
                "    Chunk chunk[kRows][kChunksPerThread / kRows];\n",
                "    if (threadIdx.x != 5) __syncthreads();\n"
                "    Chunk chunk[kRows][kChunksPerThread / kRows];\n",
            ),
        ),
        "decode-9-0-288-1",
        r"Divergent thread.*\n.*mla_decode_epilogue",
    ),
    Fault(
        "synccheck",
        "prefill: one thread passes a block barrier by",
        (
            Edit(
                "mla/last_writers.cuh",
                "    }\n    __syncthreads();\n  }",
                "    }\n    if (threadIdx.x != 5) __syncthreads();\n  }",
            ),
        ),
        "insert-4100-rope",
        r"Divergent thread.*\n.*mla_key_concat",
    ),
    Fault(
        "memcheck",
        "norm: a row far behind the last one is stored",
        (
            Edit(
                "mla_norm.cu",
                "q + static_cast<unsigned long long>(token)",
                # The next row may lie in another tensor, which memcheck cannot tell from its own.
                "q + static_cast<unsigned long long>(token + (1u << 20))",
            ),
        ),
        "norm-5-6",
        r"Invalid __global__ write.*\n.*q_kv_rms_norms",
    ),
    Fault(
        "racecheck",
        "norm: no barrier between the squares of the warps and their reader",
        (Edit("mla_norm.cu", "  sync_threads<kThreads>();\n", ""),),
        "norm-5-6",
        r"[Rr]ace.*\n?.*q_kv_rms_norms",
    ),
    Fault(
        "initcheck",
        "norm: qkv_a is read past its columns",
        (
            Edit(
                "mla_norm.cu", "row + 2 * kQueryRank + first", "row + 2 * (kQueryRank + 72) + first"
            ),
        ),
        "norm-5-6",
        r"Uninitialized __global__ memory read.*\n.*q_kv_rms_norms",
    ),
    Fault(
        "synccheck",
        "norm: one thread passes a block barrier by",
        (Edit("mla_norm.cu", _OF_THREAD, _OF_THREAD + _STRAY_BARRIER),),
        "norm-5-6",
        r"Divergent thread.*\n.*q_kv_rms_norms",
    ),
    Fault(
        "memcheck",
        "query: tokens past the last one are stored",
        (
            Edit(
                "mla_query.cu",
                "      if (token >= num_tokens) continue;\n      store_two(",
                "      store_two(",
            ),
        ),
        "query-5",
        r"Invalid __global__ write.*\n.*mla_decode_query",
    ),
    Fault(
        "racecheck",
        "query: no barrier between the sums of the warps and their reader",
        (Edit("mla_query.cu", "  wait_copies<0>();\n  sync_threads<kThreads>();\n", ""),),
        "query-5",
        r"[Rr]ace.*\n?.*mla_decode_query",
    ),
    Fault(
        "initcheck",
        "query: qkv_a is read past its columns",
        (
            Edit(
                "mla_query.cu",
                "offset_of(token, qkv_a_stride) + column;",
                "offset_of(token, qkv_a_stride) + column + 2 * (576 + 8);",
            ),
        ),
        "query-5",
        r"Uninitialized __global__ memory read.*\n.*mla_decode_query",
    ),
    Fault(
        "synccheck",
        "query: one thread passes a block barrier by",
        (Edit("mla_query.cu", _HEAD_OF_BLOCK, _HEAD_OF_BLOCK + _STRAY_BARRIER),),
        "query-5",
        r"Divergent thread.*\n.*mla_decode_query",
    ),
    Fault(
        "memcheck",
        "value: tokens past the last one are stored",
        (Edit("mla_value.cu", "pair < kPairs && first_token + row < num_tokens", "pair < kPairs"),),
        "value-5",
        r"Invalid __global__ write.*\n.*head_product",
    ),
    Fault(
        "racecheck",
        "value: no barrier between the sums of the warps and their reader",
        (Edit("mla_value.cu", _BARRIER + _VALUES, _VALUES),),
        "value-5",
        r"[Rr]ace.*\n?.*head_product",
    ),
    Fault(
        "initcheck",
        "value: the latent is read past its columns",
        (
            Edit(
                "mla_value.cu",
                "+ offset_of(head, x_head_stride);",
                "+ offset_of(head, x_head_stride) + 16;",
            ),
        ),
        "value-5",
        r"Uninitialized __global__ memory read.*\n.*head_product",
    ),
    Fault(
        "synccheck",
        "value: one thread passes a block barrier by",
        (
            Edit(
                "mla_value.cu",
                _BARRIER + _VALUES,
                "  if (threadIdx.x != 5) __syncthreads();\n" + _VALUES,
            ),
        ),
        "value-5",
        r"Divergent thread.*\n.*head_product",
    ),
)


@dataclass(frozen=True)
class Result:
    """What a tool said of a run, and whether the tests passed in it.

    Attributes:
        output: of pytest.
        passed: the tests passed.
        watched: the tool came to its summary, or said something before.
        reports: all that it said beyond a summary without errors.
        seconds: the whole run.
    """

    output: str
    passed: bool
    watched: bool
    reports: str
    seconds: float

    @property
    def is_clean(self) -> bool:
        return self.passed and self.watched and not self.reports


_NO_REPORT = re.compile(
    r"=+\s*($|COMPUTE-SANITIZER|ERROR SUMMARY: 0 errors"
    r"|RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)"
    r"|Target application (returned an error|terminated before first instrumented API call))"
)


def reports_in(log: str) -> str:
    """The lines of a tool's log that are reports."""
    return "\n".join(line for line in log.splitlines() if line and not _NO_REPORT.match(line))


def find_sanitizer() -> Path | None:
    """The tool of NVIDIA's wheel, else one on the PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-sanitizer-api") or ():
            if file.name == "compute-sanitizer":
                return Path(str(file.locate()))
    found = shutil.which("compute-sanitizer")
    return None if found is None else Path(found)


def version_of(sanitizer: Path) -> tuple[int, ...]:
    """Such as (2026, 4, 0, 0); zeros where it does not say."""
    command = [str(sanitizer), "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"Version (\d+(?:\.\d+)+)", told)
    return tuple(map(int, found[1].split("."))) if found else (0, 0)


def why_not(tools: Sequence[str], sanitizer: Path | None) -> str | None:
    """What keeps the tools from running here, or None."""
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown or not tools:
        return f"tools: expected some of {', '.join(TOOLS)}, got {', '.join(unknown) or 'none'}"
    wanted = f"compute-sanitizer: expected {OLDEST[0]}.{OLDEST[1]} or newer, got "
    if sanitizer is None:
        return f"{wanted}none. {HOW_TO_GET_IT}"
    version = version_of(sanitizer)
    if version < OLDEST:
        return f"{wanted}{'.'.join(map(str, version))} ({sanitizer}). {HOW_TO_GET_IT}"
    if not torch.cuda.is_available():
        return "device: expected a CUDA GPU, got none. Nothing was checked"
    return None


def run_for(
    seconds: float, command: Sequence[str], environment: Mapping[str, str], output: Path
) -> int | None:
    """Run a command in the folder of the tests; return its status, or None where it took longer."""
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=TESTS,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {seconds} s")
            return None
        finally:
            if process.poll() is None:  # what it watches, too: a kernel may wait for ever
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def watch(
    sanitizer: Path,
    tool: str,
    tests: Sequence[str],
    edits: Sequence[Edit] = (),
    *,
    seconds: float = _SECONDS,
) -> Result:
    """Run tests under a tool, with edited sources where there are edits."""
    environment = dict(os.environ)
    if all(test.startswith(EVERY_KERNEL) for test in tests):
        # One allocation a tensor: a cache of memory would hide where it ends, and who wrote it.
        # Tests that capture graphs need the cache.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="k3cupy-sanitize-") as name:
        folder = Path(name)
        if edits:
            tree = copy_of_sources(folder)
            for each in edits:
                edit(tree / each.file, each.old, each.new)
            environment["K3CUPY_SOURCE_DIR"] = str(tree)
        command = [str(sanitizer), "--tool", tool, "--target-processes", "all", *TOOLS[tool]]
        command += ["--log-file", str(folder / "%p.log")]
        command += [sys.executable, "-m", "pytest", "-c", "../pyproject.toml", "--rootdir", ".."]
        command += ["-q", "-p", "no:cacheprovider", "-p", "no:timeout", *tests]
        output = folder / "output.txt"
        passed = run_for(seconds, command, environment, output) == 0
        told = output.read_text(errors="replace").strip()
        log = "\n".join(path.read_text(errors="replace") for path in folder.glob("*.log"))
    return Result(
        output=told or "pytest printed nothing",
        passed=passed,
        watched="SUMMARY" in log or bool(reports_in(log)),
        reports=reports_in(log),
        seconds=time.monotonic() - started,
    )


def clean_run(sanitizer: Path, tool: str, tests: Sequence[str]) -> bool:
    """Run tests under a tool, and say whether they pass and it has nothing to say."""
    result = watch(sanitizer, tool, tests, ALWAYS.get(tool, ()))
    verdict = "clean" if result.is_clean else "FAILED"
    unseen = "" if result.watched else "The tool did not watch.\n"
    told = "" if result.is_clean else f"{unseen}{result.reports}\n{result.output}"
    say(tool, verdict, result, result.output.splitlines()[-1], told)
    return result.is_clean


def fault_run(sanitizer: Path, fault: Fault) -> bool:
    """Plant a fault, and say whether its tool reports it."""
    test = f"{EVERY_KERNEL}::test_kernel[{fault.case}]"
    edits = (*ALWAYS.get(fault.tool, ()), *fault.edits)
    result = watch(sanitizer, fault.tool, [test], edits, seconds=_SECONDS_OF_A_FAULT)
    found = re.search(fault.report, result.reports)
    told = found[0].splitlines()[0] if found else f"{result.reports}\n{result.output}"
    say(fault.tool, "reported" if found else "NOT SEEN", result, fault.what, told)
    return found is not None


def say(tool: str, verdict: str, result: Result, what: str, told: str) -> None:
    """Print a line, and below it the beginning of what a tool has told."""
    lines = [f"{tool:10} {verdict:9} {result.seconds:4.0f} s  {what}"]
    lines += [f"    {line[:_WIDTH]}" for line in told.splitlines()[:_SHOWN_LINES]]
    print("\n".join(lines), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where everything is as it must be, 1 where not, 2 where nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=" ".join(TOOLS), help="some of them")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("tests", nargs="*", help="behind --, for pytest")
    given = parser.parse_args(arguments)
    tools, tests = given.tools.replace(",", " ").split(), given.tests or [EVERY_KERNEL]
    sanitizer = find_sanitizer()
    problem = why_not(tools, sanitizer)
    if problem is not None or sanitizer is None:
        print(problem)
        return 2
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = [pool.submit(clean_run, sanitizer, tool, tests) for tool in tools]
        runs += [pool.submit(fault_run, sanitizer, f) for f in FAULTS if f.tool in tools]
        wrong = [run.result() for run in runs].count(False)
    print(f"{wrong} of {len(runs)} runs are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
