"""A bundle on a real GPU: a process without a compiler computes with it, and says what it lacks."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from helpers import make_call, run_and_check, run_child

import k3cupy
from k3cupy import bundling
from k3cupy.ops.warmup import wanted_of
from k3cupy.runtime import devices

pytestmark = pytest.mark.gpu

TOKENS, N, K = 4, 2304, 1536
WANTED: dict[str, dict[str, Any]] = {
    "mla_decode": {"kv_cache": "bf16"},
    "low_latency_linear": {"shapes": [(N, K)], "tokens": TOKENS},
}


def block_nvrtc() -> None:
    """Have NVRTC be nowhere, as on a machine that has a driver alone."""
    pathfinder = importlib.import_module("cuda.pathfinder")
    loader = importlib.import_module("cuda.pathfinder._dynamic_libs.load_nvidia_dynamic_lib")
    real = pathfinder.load_nvidia_dynamic_lib

    def load(name: str) -> Any:
        if name == "nvrtc":
            raise pathfinder.DynamicLibNotFoundError("libnvrtc is nowhere")
        return real(name)

    def nowhere(*_: Any, **__: Any) -> None:
        return None

    pathfinder.load_nvidia_dynamic_lib = loader.load_nvidia_dynamic_lib = load
    pathfinder.find_nvidia_header_directory = nowhere
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        os.environ.pop(variable, None)


def _compute_without_a_compiler() -> None:
    block_nvrtc()
    run_and_check(make_call(5, 3, device="cuda"))
    x = torch.randn(TOKENS, K, device="cuda").bfloat16()
    weight = torch.randn(N, K, device="cuda").bfloat16()
    out = k3cupy.low_latency_linear(x, weight)
    exact = x.double() @ weight.double().T
    assert torch.isfinite(out).all()
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 0.05).all()
    assert k3cupy.explain_low_latency_gemm(x, weight).runs_on == "cuda"
    other = make_call(5, 3, cache="fp8", device="cuda")
    before = other.cache.snapshot()
    with pytest.raises(k3cupy.ToolchainError, match=r"K3CUPY_NO_COMPILE: expected k3cupy::mla_dec"):
        other.run()
    oracle.assert_same_bits(other.cache.snapshot(), before, "cache after a miss")
    print(k3cupy.config_info()["why"])


def test_a_process_without_a_compiler_computes_with_a_bundle(tmp_path: Path) -> None:
    gpu = devices.info(0)
    wanted = [i for name, options in WANTED.items() for i in wanted_of(name, options)(gpu)]
    bundling.make(list(dict.fromkeys(wanted)), "two calls", gpu, tmp_path / "bundle")
    environment = {
        "K3CUPY_BUNDLE": str(tmp_path / "bundle"),
        "K3CUPY_NO_COMPILE": "1",
        "CUPY_CACHE_DIR": str(tmp_path / "cache"),
    }
    printed = run_child(_compute_without_a_compiler, env=environment)
    assert "kernels of a bundle alone, for there is no compiler" in printed
    assert list((tmp_path / "cache").glob("k3cupy*")) == []


def _compute_without_a_bundle() -> None:
    call = make_call(5, 3, device="cuda")
    with pytest.raises(k3cupy.ToolchainError, match="there is no bundle of it, and "):
        call.run()
    x = torch.randn(TOKENS, K, device="cuda").bfloat16()
    with pytest.raises(k3cupy.ToolchainError, match="K3CUPY_NO_COMPILE"):
        k3cupy.fused_a_gemm(x, torch.randn(N, K, device="cuda").bfloat16())
    os.environ["K3CUPY_NO_COMPILE"] = "0"
    run_and_check(call)
    os.environ["K3CUPY_NO_COMPILE"] = "1"
    run_and_check(make_call(5, 3, device="cuda"))


def test_no_compile_is_an_error_until_it_is_lifted(tmp_path: Path) -> None:
    environment = {"K3CUPY_NO_COMPILE": "1", "CUPY_CACHE_DIR": str(tmp_path / "cache")}
    run_child(_compute_without_a_bundle, env=environment)
