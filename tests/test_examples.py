"""The demos: they pass with right operations, and fail with wrong ones."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import k3cupy
from k3cupy.dispatch import linear

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
OPERATION = "fused_mla_decode_q_concat_kv_cache_insert"
INSERT_OPERATIONS = {
    "bf16": "fused_mla_key_concat_kv_cache_insert",
    "fp8": "fused_mla_qkv_quant_kv_cache_fp8_insert",
    "fp8_ds_mla": "fused_mla_key_concat_ds_mla_insert",
}
CONTEXT_OPERATIONS = {
    "bf16": "fused_mla_kv_concat",
    "fp8": "fused_mla_kv_concat_quant_fp8",
    "fp8_ds_mla": "fused_mla_kv_concat",
}
FORMATS = ["bf16", "fp8", "fp8_ds_mla"]
DECODE, PREFILL = "mla_decode_step", "mla_prefill_decode"
MODEL, FALLBACKS = "low_latency_model", "explain_fallbacks"
SMALL = {
    DECODE: ["--tokens", "3", "--steps", "2", "--device", "cpu"],
    PREFILL: ["--prompts", "2", "--longest", "9", "--chunk", "4", "--device", "cpu"],
    MODEL: ["--tokens", "2", "--device", "cpu"],
}
both_demos = pytest.mark.parametrize("name", [DECODE, PREFILL])


def run_demo(
    name: str, *arguments: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    environment = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A demo as a module, so that a test can break the operations under it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@both_demos
@pytest.mark.parametrize(
    "options",
    [("--kv-cache", name) for name in FORMATS] + [("--rope", "--kv-cache", "fp8"), ("--rope",)],
    ids=" ".join,
)
def test_demo_passes_on_the_cpu(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    result = run_demo(name, *SMALL[name], *options, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All outputs agree with plain PyTorch" in result.stdout
    assert "Why this epilogue: " in result.stdout


@pytest.mark.gpu
@both_demos
@pytest.mark.parametrize("rope", [(), ("--rope",)], ids=["no rope", "rope"])
@pytest.mark.parametrize("kv_cache", FORMATS)
def test_demo_passes_on_the_gpu(
    name: str, kv_cache: str, rope: tuple[str, ...], tmp_path: Path
) -> None:
    result = run_demo(name, "--device", "cuda", "--kv-cache", kv_cache, *rope, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "speed-up" in result.stdout
    assert "All outputs agree with plain PyTorch" in result.stdout


@pytest.mark.parametrize("name", [DECODE, PREFILL, MODEL])
@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
def test_demo_says_when_there_is_no_gpu(name: str, load: Callable[[str], ModuleType]) -> None:
    result = CliRunner().invoke(load(name).main, ["--device", "cuda"])
    assert result.exit_code == 2
    assert "expected a GPU that PyTorch can use, got none" in result.output


def fails(demo: ModuleType, *options: str) -> None:
    result = CliRunner().invoke(demo.main, [*SMALL[demo.__name__], *options])
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output


# Decode


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
    result = operation(**call)
    for tensor in result if isinstance(result, tuple) else (result,):
        tensor.view(torch.uint8).fill_(0xFF)
    return result


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize(
    "fault", [drop_one_write, write_zeros_for_one_row, swap_two_rows, return_nan]
)
def test_decode_demo_fails_when_the_epilogue_is_wrong(
    fault: Any,
    kv_cache: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operation = getattr(k3cupy, OPERATION)
    monkeypatch.setattr(k3cupy, OPERATION, lambda **call: fault(operation, call))
    fails(load(DECODE), "--kv-cache", kv_cache)


# Prefill


def turn_nothing(operation: Any, call: dict[str, Any]) -> Any:
    return operation(**{**call, "positions": torch.zeros_like(call["positions"])})


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize(
    "fault", [drop_one_write, write_zeros_for_one_row, swap_two_rows, turn_nothing, return_nan]
)
def test_prefill_demo_fails_when_an_insert_is_wrong(
    fault: Any,
    kv_cache: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = INSERT_OPERATIONS[kv_cache]
    operation = getattr(k3cupy, name)
    monkeypatch.setattr(k3cupy, name, lambda **call: fault(operation, call))
    fails(load(PREFILL), "--kv-cache", kv_cache, "--rope")


def forget_k_pe(operation: Any, call: dict[str, Any]) -> Any:
    return operation(**{**call, "k_pe": torch.zeros_like(call["k_pe"])})


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize("fault", [forget_k_pe, return_nan])
def test_prefill_demo_fails_when_the_context_is_wrong(
    fault: Any,
    kv_cache: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = CONTEXT_OPERATIONS[kv_cache]
    operation = getattr(k3cupy, name)
    monkeypatch.setattr(k3cupy, name, lambda **call: fault(operation, call))
    fails(load(PREFILL), "--kv-cache", kv_cache)


# Low-latency linear


def test_model_demo_passes_on_the_cpu(tmp_path: Path) -> None:
    result = run_demo(MODEL, "--tokens", "1", "--tokens", "16", "--device", "cpu", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "installed in 6 of 7 linear layers" in result.stdout
    assert "left alone: it has a bias" in result.stdout
    assert "0 of 12 calls ran a kernel of k3cupy" in result.stdout
    assert "All outputs agree with plain PyTorch" in result.stdout


@pytest.mark.gpu
def test_model_demo_passes_on_the_gpu(tmp_path: Path) -> None:
    result = run_demo(MODEL, "--device", "cuda", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "speed-up" in result.stdout
    assert "fused_a" in result.stdout
    assert "All outputs agree with plain PyTorch" in result.stdout


def one_element_off(out: torch.Tensor) -> None:
    out[..., 0] += out.abs().max()


def one_row_nan(out: torch.Tensor) -> None:
    out[-1] = float("nan")


@pytest.mark.parametrize("fault", [one_element_off, one_row_nan])
@pytest.mark.parametrize("shape", [(1536, 128), (2304, 1536)], ids=["f_b", "q_b"])
def test_model_demo_fails_when_a_layer_is_wrong(
    fault: Callable[[torch.Tensor], None],
    shape: tuple[int, int],
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = linear.low_latency_linear

    def faulty(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> Any:
        out = run(x, weight, *rest, **options)
        if tuple(weight.shape) == shape:
            fault(out)
        return out

    monkeypatch.setattr(linear, "low_latency_linear", faulty)
    fails(load(MODEL))


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_fallback_demo_names_each_reason(gpu: bool, tmp_path: Path) -> None:
    result = run_demo(FALLBACKS, cwd=tmp_path, env={} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stdout + result.stderr
    text = " ".join(result.stdout.replace("│", " ").split())
    for words in ("6,285", "is 6 bytes past", "inner stride 2", "transposed", "float16,", "200"):
        assert words in text, words
    assert text.count("PyTorch's linear") == 10
    assert "2 calls ran a kernel of k3cupy" in text
