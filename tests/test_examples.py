"""The demo, `examples/mla_decode_step.py`: passes with a right epilogue, fails with a wrong one."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import k3cupy

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
OPERATION = "fused_mla_decode_q_concat_kv_cache_insert"
FORMATS = ["bf16", "fp8", "fp8_ds_mla"]
SMALL = ["--tokens", "3", "--steps", "2", "--device", "cpu"]


def run_demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "mla_decode_step.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo as a module, so that a test can break the operation under it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("mla_decode_step")


@pytest.mark.parametrize(
    "options",
    [("--kv-cache", name) for name in FORMATS] + [("--rope", "--kv-cache", "fp8"), ("--rope",)],
    ids=" ".join,
)
def test_demo_passes_on_the_cpu(options: tuple[str, ...], tmp_path: Path) -> None:
    result = run_demo(*SMALL, *options, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All outputs agree with plain PyTorch" in result.stdout
    assert "Why this epilogue: " in result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("rope", [(), ("--rope",)], ids=["no rope", "rope"])
@pytest.mark.parametrize("kv_cache", FORMATS)
def test_demo_passes_on_the_gpu(kv_cache: str, rope: tuple[str, ...], tmp_path: Path) -> None:
    result = run_demo("--device", "cuda", "--kv-cache", kv_cache, *rope, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the epilogue alone" in result.stdout
    assert "All outputs agree with plain PyTorch" in result.stdout


def drop_one_write(operation: Any, call: dict[str, Any]) -> Any:
    slots = call["slot_mapping"].clone()
    slots[-1] = -1
    return operation(**{**call, "slot_mapping": slots})


def write_zeros_for_one_row(operation: Any, call: dict[str, Any]) -> Any:
    rows = call["kv_cache"].view(-1, call["kv_cache"].shape[-1])
    mqa_q = operation(**call)
    rows[call["slot_mapping"][0]] = 0
    return mqa_q


def swap_two_rows(operation: Any, call: dict[str, Any]) -> Any:
    return operation(**{**call, "slot_mapping": call["slot_mapping"].flip(0)})


def return_nan(operation: Any, call: dict[str, Any]) -> Any:
    mqa_q = operation(**call)
    mqa_q.view(torch.uint8).fill_(0xFF)
    return mqa_q


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize(
    "fault", [drop_one_write, write_zeros_for_one_row, swap_two_rows, return_nan]
)
def test_demo_fails_when_the_epilogue_is_wrong(
    fault: Any, kv_cache: str, demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = getattr(k3cupy, OPERATION)
    monkeypatch.setattr(k3cupy, OPERATION, lambda **call: fault(operation, call))
    result = CliRunner().invoke(demo.main, [*SMALL, "--kv-cache", kv_cache])
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
def test_demo_says_when_there_is_no_gpu(demo: ModuleType) -> None:
    result = CliRunner().invoke(demo.main, ["--device", "cuda"])
    assert result.exit_code == 2
    assert "expected a GPU that PyTorch can use, got none" in result.output
