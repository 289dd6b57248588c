"""`python -m k3cupy`: what it prints, and that a failure is one clear line."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from fake_device import H200
from toolchain_helpers import FakeGpu, fake_gpu

import k3cupy
from k3cupy.cli import main
from k3cupy.runtime import devices

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")

KEYS = {
    "backend",
    "why",
    "gpus",
    "driver",
    "nvrtc",
    "headers",
    "cache",
    "sources",
    "python",
    "platform",
    "packages",
}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_python_m_runs_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "k3cupy", "--version"]
    path = str(Path(k3cupy.__file__).parents[1])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": path}
    )
    assert (done.returncode, done.stdout) == (0, f"k3cupy, version {k3cupy.__version__}\n")


def test_help_names_every_command() -> None:
    code, output = run("--help")
    assert code == 0
    for name in ("show-config", "warmup"):
        assert name in main.commands
        assert name in output


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_help(name: str) -> None:
    code, output = run(name, "--help")
    assert code == 0
    text = output.split("\n\n")[1].strip()
    assert text.endswith("."), f"{name} has no sentence that says what it does"


def test_unknown_command() -> None:
    code, output = run("no-such-thing")
    assert code == 2
    assert "No such command" in output


# show-config


def test_show_config_prints_the_report() -> None:
    code, output = run("show-config")
    assert code == 0
    for word in ("CUDA tensors run", "CPU tensors run", "headers", "cache", "packages", "numpy"):
        assert word in output
    assert f"k3cupy {k3cupy.__version__}" in output


def test_show_config_into_a_file() -> None:
    file = io.StringIO()
    k3cupy.show_config(file)
    assert "CUDA tensors run" in file.getvalue()


def test_show_config_does_not_break_paths_into_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file or a pipe there is no width to keep: what was found can be copied and searched."""
    long = tmp_path / ("a" * 60) / ("b" * 60)
    long.mkdir(parents=True)
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", str(long))
    file = io.StringIO()
    k3cupy.show_config(file)
    assert str(long.resolve()) in file.getvalue()


def test_config_info_keys_and_packages() -> None:
    info = k3cupy.config_info()
    assert set(info) == KEYS
    assert info["backend"] in ("cuda", "nothing")
    assert info["why"]
    assert isinstance(info["gpus"], list)
    assert info["packages"]["numpy"]
    assert Path(info["sources"]).is_dir()
    assert info["python"] == sys.version.split()[0]


@needs_no_gpu
def test_config_info_says_why_nothing_runs_without_a_gpu() -> None:
    info = k3cupy.config_info()
    assert info["backend"] == "nothing"
    assert info["gpus"] == []
    assert "GPU" in info["why"] or "CuPy" in info["why"]


def test_config_info_reports_a_wrong_source_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report must not fail where something is wrong: it is asked for then."""
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", "/no/such/folder")
    assert "/no/such/folder" in k3cupy.config_info()["sources"]
    assert k3cupy.config_info()["sources"].startswith("unknown: ")


# warmup


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(devices, "info", lambda _: H200)
    return fake_gpu(monkeypatch)


@needs_no_gpu
@pytest.mark.parametrize("options", [(), ("--device", "0")], ids=["current device", "device 0"])
def test_warmup_without_a_gpu_is_one_clear_line(options: tuple[str, ...]) -> None:
    code, output = run("warmup", "--kv-cache", "bf16", *options)
    assert code == 1
    lines = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert "GPU" in lines[0] or "CuPy" in lines[0]
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("options", "name", "found"),
    [
        (("--kv-cache", "fp4"), "kv_cache", "'fp4'"),
        (("--dtype", "float32"), "dtype", "'float32'"),
        (("--kv-cache", "fp8_ds_mla", "--query-fp8"), "query_fp8", "True"),
        (("--op", "mla_train"), "op", "'mla_train'"),
        (("--op", "mla_prefill", "--query-fp8"), "query_fp8", "True"),
        (("--op", "mla_prefill", "--kv-inputs-ready"), "kv_inputs_ready", "True"),
    ],
)
def test_warmup_with_wrong_options_is_one_clear_line(
    options: tuple[str, ...], name: str, found: str
) -> None:
    code, output = run("warmup", *options)
    assert code == 1
    assert re.fullmatch(f"Error: {name}: expected .*, got {found}", output.strip())


def test_warmup_compiles_for_promises_formats_and_layouts(gpu: FakeGpu) -> None:
    options = ("--query-fp8", "--kv-inputs-ready", "--unaligned", "--dtype", "float16")
    code, _ = run("warmup", "--kv-cache", "bf16", *options)
    assert code == 0
    (name,) = gpu.compiled
    assert name.startswith("k3cupy::mla_decode_epilogue<__half, true, k3cupy::CacheFormat::kSame")
    assert ", false, true, false, " in name, "no RoPE, the promise, not aligned"


def test_warmup_compiles_the_prefill_kernels(gpu: FakeGpu) -> None:
    code, output = run("warmup", "--op", "mla_prefill", "--rope", "--kv-cache", "fp8")
    assert code == 0
    assert f"{len(gpu.compiled)} kernels are ready" in output
    found = {name.split("<")[0].removeprefix("k3cupy::") for name in gpu.compiled}
    assert found == {"mla_qkv_quant", "mla_kv_concat", "mla_kv_concat_quant"}
    quant = [name for name in gpu.compiled if "mla_qkv_quant" in name]
    assert all("<__nv_bfloat16, true, true, " in name for name in quant), "with RoPE, aligned"
    casts = [name for name in gpu.compiled if "mla_kv_concat_quant" in name]
    assert {name.split(", ")[1] for name in casts} == {"false", "true"}, "k_pe of both types"


def test_warmup_of_one_prefill_operation(gpu: FakeGpu) -> None:
    code, _ = run("warmup", "--op", "fused_mla_kv_concat", "--unaligned")
    assert code == 0
    (name,) = gpu.compiled
    assert name.startswith("k3cupy::mla_kv_concat<false, ")


def test_warmup_says_how_many_are_ready(gpu: FakeGpu) -> None:
    code, output = run("warmup", "--kv-cache", "bf16", "--kv-cache", "fp8", "--rope")
    assert code == 0
    assert f"{len(gpu.compiled)} kernels are ready" in output
    assert all(", true, false, true, " in name for name in gpu.compiled), "with RoPE, aligned"
