"""`make sanitize` judges rightly, and what it runs is every kernel. No GPU is needed."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers
import pytest
import sanitize
import test_every_kernel_gpu as every_kernel
import torch
from cuda_signatures import template_arguments
from fake_device import FakeDevice, Launch
from toolchain_helpers import copy_of_sources, edit, write

from k3cupy.runtime import sources
from k3cupy.runtime.offline import compile_cubin

CASES = {case.name: case for case in every_kernel.CASES}


@pytest.fixture(scope="module")
def launches() -> Iterator[dict[str, list[Launch]]]:
    """What each case launches, on a GPU that is none: one kernel, but where they are separate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "GUARD_BYTES", 0)
        device, found = FakeDevice(patch), {}
        for name, case in CASES.items():
            before = len(device.records)
            case.launch("cpu")
            found[name] = device.records[before:]
            assert len(found[name]) == (4 if name.endswith("separate") else 1), name
        yield found


# What runs


def kernels_of(source: Path) -> set[str]:
    """The names of a source's kernels."""
    text = source.read_text(encoding="utf-8")
    launch_bounds = r"(?:__launch_bounds__\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*)?"
    return set(re.findall(rf"__global__\s+void\s+{launch_bounds}(\w+)\(", text))


def test_every_kernel_of_every_shipped_source_runs(launches: dict[str, list[Launch]]) -> None:
    """Those of the benchmarks are not in the package, and not here."""
    folder = sources.shipped()
    files = [path for path in folder.rglob("*.cu") if path.parent.name != "bench"]
    wanted = {(str(path.relative_to(folder)), name) for path in files for name in kernels_of(path)}
    assert len(wanted) == 15
    assert all(path.read_text().count("__global__") == len(kernels_of(path)) for path in files)
    instances = [launch.instance for launch in itertools.chain(*launches.values())]
    ran = {(i.source, re.split(r"[:<]", i.name_expression)[2]) for i in instances}
    assert ran == wanted


def test_every_form_of_a_kernel_runs(launches: dict[str, list[Launch]]) -> None:
    """Each value of each flag and each kind, of each kernel; of the fused-A GEMM in combination."""
    found: dict[str, list[set[str]]] = {}
    products, wide = set(), set()
    for launch in itertools.chain(*launches.values()):
        name, values = template_arguments(launch.instance.name_expression)
        if values[-1] == "float":  # the type of the output, where it is not that of x
            wide.add(name)
            values = values[:-1]
        columns = found.setdefault(name, [set() for _ in values])
        for column, value in zip(columns, values, strict=True):
            column.add(value)
        if name.startswith("fused_a_gemm"):
            products.add((name, values[10], values[7] != "1", values[-1]))
    assert wide == {"fused_a_gemm", "fused_a_gemm_mapped_x", "skinny_gemm", "skinny_gemm_mma"}
    flags = {"true", "false"}
    for name, columns in found.items():
        for i, column in enumerate(columns):
            assert not column & flags or column == flags, f"{name}: {column} at {i}"
    for name in ("mla_decode_epilogue", "mla_decode_query"):
        assert found[name][2] == {f"k3cupy::CacheFormat::{f}" for f in CACHES}
    assert found["mla_decode_epilogue"][6] == {"0", "1", "3"}
    kinds = [f"k3cupy::Product::{kind}" for kind in ("kWarp", "kWarpgroup", "kWarpgroupTokens")]
    pointed = {
        ("fused_a_gemm", k, split, r) for k in kinds for split in (True, False) for r in flags
    }
    mapped = {("fused_a_gemm_mapped_x", k, False, r) for k in kinds for r in flags}
    assert pointed | mapped <= products
    assert found["skinny_gemm_mma"][1] == {"8", "16"}
    assert {"1"} < found["skinny_gemm_mma"][5], "alone and in clusters"
    assert found["mla_decode_query"][5] == {"8", "16"}, "tiles of few tokens and of more"
    assert found["head_product"][1] == {"128", "512"}, "the absorbed query, and values"


CACHES = ("kSame", "kFp8", "kDsMla")


# Planted faults


def test_each_tool_has_a_fault_in_each_kernel_that_it_can_watch() -> None:
    planted = {(fault.tool, fault.what.partition(":")[0]) for fault in sanitize.FAULTS}
    every = {(tool, name) for tool in sanitize.TOOLS for name in KINDS}
    assert every - planted == {("racecheck", "decode")}, "which has no shared memory"
    assert planted <= every


KINDS = (
    *("skinny", "skinny on tensor cores", "fused-A", "decode", "prefill"),
    *("norm", "query", "value"),
)


@pytest.mark.parametrize("fault", sanitize.FAULTS, ids=lambda f: f"{f.tool}-{f.what}")
def test_a_fault_is_an_edit_of_what_its_case_runs(
    fault: sanitize.Fault, launches: dict[str, list[Launch]], tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC and cuda-core")
    tree = copy_of_sources(tmp_path)
    for each in (*sanitize.ALWAYS.get(fault.tool, ()), *fault.edits):
        assert (tree / each.file).read_text().count(each.old) == 1
        edit(tree / each.file, each.old, each.new)
    (launch,) = launches[fault.case]
    instance = launch.instance
    with sources.source_dir(tree):
        assert sources.load(instance.source).digest != sources.shipped_digest(instance.source)
        assert compile_cubin(instance.source, [instance.name_expression], "sm_90").code


# The judge

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at void k3cupy::skinny_gemm<__nv_bfloat16, 1>(...)+0x1230
=========     by thread (5,0,0) in block (25,0,0)
========= ERROR SUMMARY: 1 error
"""
RACES = """========= COMPUTE-SANITIZER
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
WARNING = """========= COMPUTE-SANITIZER
========= Warning: Race reported between Read access at k3cupy::skinny_gemm
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""


def stand_in(folder: Path, log: str, status: int = 0, version: str = "2026.4.0.0") -> Path:
    """A program in the place of compute-sanitizer, which writes a log and runs nothing."""
    path = folder / "compute-sanitizer"
    lines = [
        f"#!{sys.executable}",
        "import pathlib, sys",
        f"if '--version' in sys.argv: sys.exit(print('Version {version} (build 1)'))",
        "place = sys.argv[sys.argv.index('--log-file') + 1].replace('%p', '7')",
        f"pathlib.Path(place).write_text({log!r})",
        f"print('3 passed'); sys.exit({status})",
    ]
    write(path, "\n".join(lines))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("log", "status", "problem"),
    [
        (CLEAN, 0, None),
        (RACES, 0, None),
        (INVALID, 0, "Invalid __global__ write"),
        (WARNING, 0, "Race reported"),
        (CLEAN, 1, "3 passed"),
        ("", 0, "did not watch"),
        ("========= COMPUTE-SANITIZER\n", 0, "did not watch"),
        ("========= Error: Device not supported\n", 0, "Device not supported"),
    ],
    ids=["clean", "no-races", "report", "warning", "test", "nothing", "no-summary", "refused"],
)
def test_what_is_clean(
    log: str, status: int, problem: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = stand_in(tmp_path, log, status)
    assert sanitize.clean_run(tool, "memcheck", ["test_x.py"]) is (problem is None)
    told = capsys.readouterr().out
    assert told.startswith("memcheck   clean " if problem is None else "memcheck   FAILED")
    assert (problem or "3 passed") in told


def test_a_fault_must_be_reported_in_its_kernel(tmp_path: Path) -> None:
    fault = sanitize.FAULTS[0]
    assert sanitize.fault_run(stand_in(tmp_path, INVALID, 1), fault)
    for log in (CLEAN, INVALID.replace("skinny_gemm", "another_kernel")):
        assert not sanitize.fault_run(stand_in(tmp_path, log, 1), fault)


def test_the_tool_gets_edited_sources_and_no_cache_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def run_for(_: float, command: list[str], env: dict[str, str], output: Path) -> int:
        tree = Path(env.get("K3CUPY_SOURCE_DIR", "nowhere"))
        text = (tree / "skinny_gemm.cu").read_text() if tree.is_dir() else ""
        given.append((command, env.get("PYTORCH_NO_CUDA_MEMORY_CACHING"), text))
        write(output, "1 passed")
        return 0

    monkeypatch.setattr(sanitize, "run_for", run_for)
    fault = sanitize.FAULTS[0]
    sanitize.fault_run(Path("the-tool"), fault)
    sanitize.clean_run(Path("the-tool"), "initcheck", ["-m", "gpu"])
    (command, caching, text), (other, other_caching, other_text) = given
    assert command[:3] == ["the-tool", "--tool", "memcheck"] and caching == "1"
    assert command[-1] == f"{sanitize.EVERY_KERNEL}::test_kernel[{fault.case}]"
    (planted,) = fault.edits
    assert planted.new in text and planted.old not in text
    assert other[-2:] == ["-m", "gpu"] and other_caching is None and not other_text


def test_a_run_that_hangs_is_stopped(tmp_path: Path) -> None:
    """With what it started, which would keep the output open."""
    output = tmp_path / "output.txt"
    command = ["sh", "-c", "echo begun; sleep 60 & sleep 60"]
    started = time.monotonic()
    assert sanitize.run_for(0.2, command, {}, output) is None
    assert time.monotonic() - started < 20
    assert output.read_text() == "begun\n\nstopped after 0.2 s"


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command with a tool and a GPU, and returns its status and what it prints."""

    def run(tool: Path | None, *arguments: str, gpu: bool = True) -> tuple[int, str]:
        monkeypatch.setattr(sanitize, "find_sanitizer", lambda: tool)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        status = sanitize.main(arguments)
        return status, capsys.readouterr().out

    return run


def test_without_a_tool_or_a_gpu(main: Any, tmp_path: Path) -> None:
    good = stand_in(tmp_path, CLEAN)
    status, told = main(good, "--tools", "memcheck leaks")
    assert status == 2
    assert told.startswith("tools: expected some of memcheck, racecheck, initcheck, synccheck, ")
    assert "got leaks" in told
    status, told = main(None)
    assert status == 2
    assert told.startswith("compute-sanitizer: expected 2026.4 or newer, got none. Install")
    status, told = main(good, gpu=False)
    assert status == 2 and told.startswith("device: expected a CUDA GPU, got none")
    status, told = main(stand_in(tmp_path, CLEAN, version="2025.3.1.0"))
    assert status == 2
    assert told.startswith("compute-sanitizer: expected 2026.4 or newer, got 2025.3.1.0 (/")


def test_the_tool_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the wheel first."""
    tool = stand_in(tmp_path, CLEAN)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize.importlib.metadata, "files", lambda _: None)
    assert sanitize.find_sanitizer() == tool
    assert sanitize.version_of(tool) == (2026, 4, 0, 0)
    wheel = [type("File", (), {"name": n, "locate": lambda self: f"/wheel/{self.name}"})() for n in
             ("sanitizer.h", "compute-sanitizer")]  # fmt: skip
    monkeypatch.setattr(sanitize.importlib.metadata, "files", lambda _: wheel)
    assert sanitize.find_sanitizer() == Path("/wheel/compute-sanitizer")


def test_faults_that_nobody_reports_fail_the_whole(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = stand_in(tmp_path, CLEAN)
    planted = tuple(fault for fault in sanitize.FAULTS if fault.tool == "memcheck")
    monkeypatch.setattr(sanitize, "FAULTS", planted[:2])
    status, told = main(tool, "--tools", "memcheck,synccheck", "--jobs", "1")
    assert status == 1 and told.count("NOT SEEN") == 2 and told.count(" clean ") == 2
    assert told.endswith("2 of 4 runs are wrong\n")
    monkeypatch.setattr(sanitize, "FAULTS", ())
    ran: list[Any] = []
    monkeypatch.setattr(sanitize, "clean_run", lambda *given: ran.append(given) or True)
    status, told = main(tool, "--tools", "memcheck", "--", "-m", "gpu", "-k", "some thing")
    assert status == 0 and told == "0 of 1 runs are wrong\n"
    assert ran == [(tool, "memcheck", ["-m", "gpu", "-k", "some thing"])]
