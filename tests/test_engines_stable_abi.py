"""Kernels as vLLM registers them: through PyTorch's stable ABI, from a binary of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from k3cupy.engines import vllm_facts as facts
from k3cupy.engines.overrides import Override

NAMESPACE = "stable_abi_of_tests"
SOURCE = f"""
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

void gemm(Tensor& output, Tensor const& a, Tensor const& b, bool enable_pdl) {{
  float* out = reinterpret_cast<float*>(output.data_ptr());
  for (int i = 0; i < output.numel(); ++i) out[i] = enable_pdl ? 2.f : 1.f;
}}

STABLE_TORCH_LIBRARY_FRAGMENT({NAMESPACE}, ops) {{ ops.def("{facts.OPERATORS[facts.GEMM]}"); }}
STABLE_TORCH_LIBRARY_IMPL({NAMESPACE}, CPU, ops) {{ ops.impl("{facts.GEMM}", TORCH_BOX(&gemm)); }}
"""
TORCH = Path(torch.__file__).parent
BOX = TORCH / "include/torch/csrc/stable/library.h"


@pytest.fixture(scope="session")  # a process registers an operator once
def operator(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    if not BOX.exists() or "TORCH_BOX" not in BOX.read_text(encoding="utf-8"):
        pytest.skip(f"PyTorch {torch.__version__} has no TORCH_BOX")
    folder = tmp_path_factory.mktemp("stable_abi")
    (folder / "op.cpp").write_text(SOURCE, encoding="utf-8")
    folders = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}"]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", *folders, "op.cpp", "-o", "op.so"]
    command += ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    torch.ops.load_library(str(folder / "op.so"))
    return getattr(getattr(torch.ops, NAMESPACE), facts.GEMM)


@pytest.mark.parametrize("enable_pdl", [None, False, True])
def test_it_is_handed_back_to(enable_pdl: bool | None, operator: Any) -> None:
    """With the arguments as they came, default values left out, and ours is gone afterwards."""
    seen: list[int] = []

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        def ours(keys: Any, *args: Any) -> None:
            seen.append(len(args))
            own(keys, *args)

        return ours

    tensors = [torch.zeros(2, 2) for _ in range(3)]
    flags = () if enable_pdl is None else (enable_pdl,)
    override = Override(f"{NAMESPACE}::{facts.GEMM}", facts.OPERATORS[facts.GEMM], make, "CPU")
    operator(*tensors, *flags)
    override.undo()
    assert len(seen) == 1
    assert tensors[0].unique().tolist() == [2.0 if enable_pdl else 1.0]
    operator(*tensors, True)
    assert len(seen) == 1
    assert tensors[0].unique().tolist() == [2.0]
