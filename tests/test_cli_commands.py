"""`k3cupy ...`: commands for people without a GPU, options that are looked at first, and JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fake_device import H200, T4, TOO_OLD
from test_cli import needs_no_gpu, run
from toolchain_helpers import copy_of_sources, edit

import k3cupy
from k3cupy.choose.gemm import ALL, TOKENS, choose
from k3cupy.cli import explain, main
from k3cupy.runtime import devices, offline
from k3cupy.tuning.targets import KINDS

ROOT = Path(k3cupy.__file__).parents[1]

ASKED = [
    "demo",
    "show-config",
    *(f"bench {name}" for name in ("decode", "gemm", "apply")),
    "tune",
    "warmup",
    "explain",
    "compile",
    "bundle",
    "cache info",
    "cache clear",
]


@pytest.mark.parametrize("command", ["", *ASKED])
def test_help_of_every_command(command: str) -> None:
    texts = {run(*command.split(), option) for option in ("-h", "--help")}
    ((code, text),) = texts
    assert code == 0
    assert "Usage: " in text and "-h, --help" in text


@pytest.mark.parametrize("command", sorted(set(main.commands) - {"bench", "cache", "demo"}))
def test_every_answer_can_be_read_by_a_program(command: str) -> None:
    (option,) = (each for each in main.commands[command].params if each.name == "as_json")
    assert option.opts == ["--json"]


def read(*arguments: str) -> Any:
    """What a command prints as JSON: on standard output is nothing else."""
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_show_config_as_json() -> None:
    found = read("show-config")
    assert found["python"] == sys.version.split()[0]
    assert found["packages"]["k3cupy"] == k3cupy.__version__


# explain


def test_explain_on_a_gpu_that_is_not_here() -> None:
    code, text = run("explain", "--shape", "2112x7168", "--tokens", "4", "--gpu", "NVIDIA H200")
    assert code == 0, text
    expected = choose(ALL, 2112, 7168, 4, H200)
    assert "Linear layers on NVIDIA H200 (sm_90)" in text
    assert "fused_qkv_a_proj" in text, "a layer by its name"
    for word in expected.reason.split():
        assert word in text
    found = read("explain", "--shape", "2112x7168", "--gpu", "sm_90")
    assert (found["gpu"], found["arch"]) == ("NVIDIA H200", "sm_90")
    assert [each["tokens"] for each in found["choices"]] == list(TOKENS)
    assert found["choices"][3]["kernel"] == expected.kernel
    assert found["choices"][3]["reason"] == expected.reason
    assert all("pdl" not in each and "name_expression" not in each for each in found["choices"])


def test_explain_groups_what_is_alike() -> None:
    """A model has hundreds of numbers; nobody reads as many lines."""
    code, text = run("explain", "--preset", "kimi-k3-tp8", "--gpu", "h200")
    assert code == 0, text
    assert "measured on NVIDIA H200 at M = *" in re.sub(r"[|\n ]+", " ", text)
    assert "1-8" in text


def test_explain_of_the_epilogues() -> None:
    assert set(explain._MLA) == set(KINDS)
    words = ("explain", "--op", "mla_decode", "--kind", "fp8+fp8", "--tokens", "8", "--heads", "24")
    code, text = run(*words, "--gpu", "b200")
    assert code == 0, text
    assert "mla_decode with 24 heads on NVIDIA B200 (sm_100)" in text
    assert "NVIDIA B200 has no measured table" in text
    (choice,) = read(*words, "--gpu", "h200")["choices"]
    assert "pdl" not in choice and "name_expression" not in choice, "which hang on the tensors"
    assert (choice["kind"], choice["tokens"], choice["origin"]) == ("fp8+fp8", 8, "shipped")
    words = ("--tokens", "64", "--gpu", "h200")
    found = {
        op: read("explain", "--op", op, *words)["choices"]
        for op in ("mla_prefill", "mla_norm", "mla_query", "mla_value")
    }
    assert len(found["mla_prefill"]) == 5
    assert [len(found[op]) for op in ("mla_norm", "mla_value")] == [1, 3]
    (query,) = found["mla_query"]
    assert query["kernel"] == "separate" and "more than 16" in query["reason"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("explain --gpu h2", 1, "gpu: expected a100, h100, "),
        ("explain --heads 8 --gpu h200", 2, "--kind and --heads are of --op mla_decode"),
        ("explain --op mla_decode --shape 8x8", 2, "are of --op low_latency_linear"),
        ("explain --op mla_decode --kind fp4", 1, "kind: expected 16bit+same or "),
        ("explain --shape 8", 2, "write N x K as 2112x7168"),
        ("explain --gpu h200 --shape 0x7168", 2, "'0x7168' is no shape; write N x K as "),
        ("explain --gpu h200 --shape 5x00", 2, "as 2112x7168, both above 0"),
        ("compile --op mla_decode --kv-cache fp4 --gpu h200", 1, "kv_cache: expected "),
        ("compile /no/such/folder", 2, "does not exist"),
        ("compile mla_dec", 2, "Expected a folder, or one of mla_decode, mla_norm"),
        ("compile mla_query --gpu a100 --tokens 0", 1, "tokens: expected "),
        (
            "compile low_latency_linear --shape 2112x7168 --tokens 64 --gpu a10",
            1,
            "gpu: expected a GPU that has kernels of low_latency_linear, got NVIDIA A10",
        ),
        ("compile --gpu h2", 1, "gpu: expected a100, h100, "),
        ("tune --op mla_decode --no-residual --dry-run --gpu h200", 2, "--residual and --no-res"),
        ("tune --gpu h200 --shape 16x16", 2, "--gpu is of --dry-run and --import"),
        ("tune --dry-run --gpu h2 --shape 16x16", 1, "gpu: expected a100, h100, "),
        ("tune --dry-run", 1, "options are --shape, --preset and --from-module"),
        ("tune --dry-run --from-module torch.nn:Linear", 1, "makes one without arguments, got"),
        ("tune --shape 16x16 --export {file}/out.json", 2, "cannot be written"),
        ("warmup --op nope", 1, "op: expected "),
        ("warmup --model nope --tp 8", 1, "model: expected "),
        ("bundle --model nope --tp 8 --out out", 1, "model: expected "),
        ("bench decode --kind fp4", 2, "'fp4' is none of 16bit+same"),
        ("bench prefill --op kv", 2, "'kv' is none of "),
        ("bench start --model nope", 1, "model: expected "),
        ("bench gemm --shape 8x8 --preset kimi-k3", 2, "one of --shape and --preset"),
        ("bench host --json {file}/out.json", 2, "cannot be written"),
        ("bench apply", 2, "Missing argument"),
        ("bench apply {file}", 2, "say --tables with files of `tune --export`, or --page"),
        ("bench apply {file} --tables {file}", 2, "is a file"),
        ("bench apply {file} --tables {file}/tables", 2, "cannot be written"),
        ("bench apply {file} --page {folder}", 2, "is a directory"),
        ("bundle --model kimi-k3 --tp 8 --gpu h200 --out {file}/out", 2, "cannot be written"),
        ("bench apply {file} --page {file}", 1, "results: expected a file made by"),
    ],
)
def test_options_are_looked_at_before_a_gpu(
    words: str, code: int, told: str, tmp_path: Path
) -> None:
    """Here is none, and nobody hears of that first."""
    file = tmp_path / "some.json"
    file.write_text("{}")
    found, text = run(*words.format(file=file, folder=tmp_path).split())
    assert (found, told in text) == (code, True), text
    assert "Traceback" not in text and "GPU sees" not in text


@needs_no_gpu
@pytest.mark.parametrize(
    "words", ["explain", "tune --dry-run --shape 16x16", "warmup", "bench host"]
)
def test_without_a_gpu_one_line_says_so(words: str) -> None:
    """And names the option, where there is one."""
    code, text = run(*words.split())
    assert code == 1
    (line,) = (line for line in text.splitlines() if line.startswith("Error: "))
    assert "GPU" in line
    named = "--gpu: expected the name of a GPU, as h200, for none is found here"
    assert (named in line) is words.startswith(("explain", "tune"))


def test_explain_on_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of epilogues it says what the call says; linear layers have the framework's."""
    monkeypatch.setitem(devices.NAMED, "t4", T4)
    for op in explain._MLA:
        code, text = run("explain", "--op", op, "--gpu", "t4")
        assert code == 1 and TOO_OLD in text
    code, text = run("explain", "--shape", "16x16", "--gpu", "t4")
    assert code == 0 and "our kernels need sm_80" in " ".join(text.split())
    code, text = run("tune", "--dry-run", "--shape", "16x16", "--gpu", "t4")
    assert code == 1 and TOO_OLD in text


def test_an_error_that_nobody_foresaw_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise KeyError("x")

    monkeypatch.setattr(k3cupy, "config_info", broken)
    code, text = run("show-config", "--json")
    assert code == 1
    assert text.strip() == "Error: KeyError: 'x'. `python -X dev -m k3cupy` shows where"
    program = (
        "from k3cupy.cli import main; import k3cupy; k3cupy.config_info = dict.popitem; main()"
    )
    command = [sys.executable, "-X", "dev", "-c", program, "show-config", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "Traceback" in done.stderr


# tune


def test_what_would_be_tuned_on_a_gpu_that_is_not_here() -> None:
    code, text = run("tune", "--dry-run", "--shape", "2112x7168", "--tokens", "8", "--gpu", "h200")
    assert code == 0, text
    assert text.startswith("NVIDIA H200: 2 to measure, 0 are known")
    found = read("tune", "--dry-run", "--op", "mla_decode", "--tokens", "8", "--gpu", "b200")
    assert found["gpu"] == "NVIDIA B200" and found["known"] == 0
    assert {"problem": "fp8+fp8", "tokens": 8} in found["todo"]


# compile


def test_compile_shows_what_instances_take(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    words = ("compile", "--op", "mla_decode", "--kv-cache", "bf16", "--unaligned", "--gpu", "sm_80")
    code, text = run(*words)
    assert code == 0, text
    assert "1 instance for NVIDIA A100-SXM4-80GB (sm_80)" in text
    assert "mla_decode_epilogue" in text and "registers" in text
    (kernel,) = read(*words)["kernels"]
    assert kernel["registers"] > 0 == kernel["spill_stores"] and "sass" not in kernel
    assert read("compile", "mla_decode", *words[3:])["kernels"] == [kernel]
    folder = copy_of_sources(tmp_path)
    edit(folder / "mla/rope.cuh", "angles.sine[i];", "angle.sine[i];")
    code, text = run("compile", str(folder))
    assert code == 1
    assert text.count("is undefined") == 1 and "rope.cuh(" in text and "Traceback" not in text


def test_compile_prints_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setattr(offline, "disassembled", lambda code: f"SASS of {code[:4]!r}")
    words = ("compile", "--op", "mla_decode", "--kv-cache", "bf16", "--unaligned", "--gpu", "h200")
    assert "\nSASS of b'\\x7fELF'" in run(*words, "--sass")[1]
    (kernel,) = read(*words, "--sass")["kernels"]
    assert kernel["sass"].startswith("SASS of")


# cache


def test_the_cache_is_told_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, tables = tmp_path / "kernels", tmp_path / "tables"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(kernels))
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tables))
    found = read("cache", "info")
    assert {name: fact["files"] for name, fact in found.items()} == {
        "kernels": 0,
        "measurements": 0,
    }
    assert "removed 0 files of kernels" in run("cache", "clear")[1], "also nothing is said"
    kernels.mkdir()
    ours, other = kernels / "k3cupy-abc.cubin", kernels / "cupys.cubin"
    ours.write_bytes(b"x" * 2**20)
    other.write_bytes(b"y")
    table = Path(found["measurements"]["folder"], "nvidia-h200/gemm.json")
    table.parent.mkdir(parents=True)
    table.write_text("{}")
    code, text = run("cache", "info")
    assert code == 0
    assert re.search(rf"^kernels +1 files, 1.0 MiB, in {kernels}$", text, re.MULTILINE)
    assert re.search(r"^measurements +1 files, ", text, re.MULTILINE)
    assert f"removed 1 files of kernels, 1.0 MiB, in {kernels}" in run("cache", "clear")[1]
    assert not ours.exists() and other.exists() and table.exists()
    assert read("cache", "clear", "--measurements")["measurements"]["files"] == 1
    assert not table.exists()


# demo, warmup


def test_the_demo() -> None:
    code, text = run("demo", "--tokens", "2", "--steps", "1", "--device", "cpu")
    assert code == 0, text
    assert "All outputs agree with plain PyTorch" in text
    assert not any(path.endswith("examples") for path in sys.path)
    code, text = run("demo", "--kv-cache", "fp4")
    assert code == 2
    assert "'fp4' is not one of" in text
    code, text = run("demo", "--seed", str(2**64))
    assert code == 2
    assert f"{2**64} is not in the range" in text


def test_the_demo_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run("demo") == (1, "Error: demo needs PyTorch: pip install torch\n")
    for name in ("decode", "start"):
        assert run("bench", name) == (1, "Error: bench needs PyTorch: pip install torch\n")


def test_warmup_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "info", lambda _: H200)
    monkeypatch.setattr(k3cupy, "warmup", lambda op, **options: len(options))
    assert read("warmup", "--kv-cache", "fp8", "--rope") == {"kernels": 3}


def test_a_benchmark_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.cli import bench

    @main.command("measure-it")
    def measure() -> None:
        assert bench._measured(range(3)) == [0, 1, 2]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done = CliRunner().invoke(main, ["measure-it"])
    main.commands.pop("measure-it")
    assert done.exit_code == 0
    assert "3 measured" in done.stderr and done.stdout == ""
