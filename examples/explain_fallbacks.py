"""Ask low-latency linear about calls that no kernel of ours may take, and read why.

    python examples/explain_fallbacks.py

The lines that begin with `# %%` cut this file into cells. VS Code, Spyder, PyCharm and Jupytext
open it as a notebook.

Our kernels read x as it is, slices included, but rows must begin at multiples of 16 bytes, and the
weight must be packed bfloat16. Whatever does not fit goes to the framework's own linear, which is
right and may be slower. `explain_low_latency_gemm` says which of the two a call gets, and why.
Without a GPU the same rules are asked about an NVIDIA H200 that is not there.
"""

# %% Imports, and a way to ask that works without a GPU too.
from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import k3cupy
from k3cupy.runtime import devices, producers
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.tensors import TensorView

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
H200 = DeviceInfo(
    index=0,
    name="NVIDIA H200",
    compute_capability=(9, 0),
    num_sms=132,
    shared_memory_optin=232_448,
)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def explain(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
) -> k3cupy.Choice:
    """What `low_latency_linear(x, weight, residual)` would run, and why."""
    if HAS_GPU:
        return k3cupy.explain_low_latency_gemm(x, weight, residual)
    with (
        patch.object(producers, "view", as_if_on_a_gpu),
        patch.object(devices, "info", lambda _: H200),
    ):
        return k3cupy.explain_low_latency_gemm(x, weight, residual)


read = producers.view


def as_if_on_a_gpu(tensor: torch.Tensor, name: str) -> TensorView:
    return replace(read(tensor, name), device_type="cuda")


# %% Slices that the kernels take: MLA's q_b, KDA's f_b, and one token of anything.
wide, q_b = rand(4, 2112), rand(2304, 1536)
buffer, f_b = rand(4, 6288), rand(1536, 128)
calls = {
    "q_b on [:, :1536] of 2112": (wide[:, :1536], q_b),
    "f_b on [:, 6144:6272] of 6288": (buffer[:, 6144:6272], f_b),
    "one row of a buffer 6289 wide": (rand(1, 6289)[:, 6144:6272], f_b),
}

# %% Calls that they do not take: layouts, types, shapes, gradients.
odd = rand(4, 6285)
calls |= {
    "rows 6285 apart": (odd[:, :128], f_b),
    "a slice that begins at column 3": (buffer[:, 3:131], f_b),
    "every other column": (buffer[:, :256:2], f_b),
    "a transposed weight": (wide[:, :1536], rand(1536, 2304).t()),
    "float16": (wide[:, :1536].half(), q_b.half()),
    "float32 x": (wide[:, :1536].float(), q_b),
    "65 tokens": (rand(65, 1536), q_b),
    "20 rows of K = 200": (rand(20, 200), rand(256, 200)),
    "a residual of another shape": (wide[:, :1536], q_b, rand(2304)),
    "a weight in training": (wide[:, :1536], q_b.clone().requires_grad_()),
}

# %% What each of them gets.
table = Table(title="Low-latency linear" if HAS_GPU else "Low-latency linear, as on an NVIDIA H200")
for header in ("call", "runs", "why"):
    table.add_column(header)
for name, tensors in calls.items():
    choice = explain(*tensors)
    runs = "PyTorch's linear" if choice.is_fallback else choice.kernel
    table.add_row(name, runs, choice.reason)
Console().print(table)

# %% A fall-back is counted too. This runs two of the calls, then shows what came of all so far.
k3cupy.reset_dispatch_report()
for name in ("q_b on [:, :1536] of 2112", "rows 6285 apart"):
    k3cupy.low_latency_linear(*calls[name])
print(k3cupy.dispatch_report())
