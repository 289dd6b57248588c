"""Edit a CUDA kernel and run it at the next call: no build step, no restart.

    python examples/edit_a_kernel.py

The lines that begin with `# %%` cut this file into cells. VS Code, Spyder, PyCharm and Jupytext
open it as a notebook: run a cell, change a file in an editor, run the cell again.

With a GPU the edited kernel runs, and its result is checked. Without one it is compiled for an
H200 all the same, so you see what the compiler makes of your edit. (CPU tensors run a reference in
NumPy, which an edit of the CUDA sources does not touch, and a warning says so.)
"""

# %% Imports, and one small decode step to try things with.
from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

import k3cupy
from k3cupy.kernels.mla_decode import SOURCE
from k3cupy.runtime import sources

HAS_GPU = torch.cuda.is_available()
TOKENS, HEADS = 4, 12
CONFIG = k3cupy.MlaDecodeConfig(split=0, block_size=288, chunks_per_thread=1)

torch.manual_seed(0)
device = "cuda" if HAS_GPU else "cpu"
inputs = [
    torch.randn(*shape, dtype=torch.bfloat16, device=device)
    for shape in [(TOKENS, HEADS, 512), (TOKENS, HEADS, 64), (TOKENS, 512), (TOKENS, 64)]
]
positions = torch.arange(TOKENS, device=device)
angles = torch.rand(TOKENS, 32, device=device) * 6
table = torch.cat([angles.cos(), angles.sin()], dim=-1)
table_backwards = torch.cat([angles.cos(), -angles.sin()], dim=-1)


def call(cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """The operation, on a fresh cache: query and cache rows in one tensor, to compare them."""
    cache = torch.zeros(1, 64, 576, dtype=torch.bfloat16, device=device)
    query = k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
        *inputs,
        cache,
        torch.arange(TOKENS, device=device),
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        config=CONFIG,
    )
    return torch.cat([query, cache[0, :TOKENS, None]], dim=1)


def describe() -> str:
    """The present sources and what the compiler makes of them. Needs NVRTC, but no GPU."""
    digest = sources.load(SOURCE).digest[:12]  # of mla_decode.cu and every file it includes
    options = {"kv_cache": "bf16", "rope": True, "config": CONFIG}
    try:
        (kernel,) = k3cupy.compile("mla_decode", time=False, progress=False, **options)
    except k3cupy.ToolchainError as error:
        return f"sources {digest}, not compiled: {error}"
    size = f"{kernel.registers} registers a thread, {len(kernel.code)} bytes"
    return f"sources {digest}, {kernel.arch}: {size}"


# %% The kernel as it comes with the package.
print(f"as shipped:  {describe()}")
shipped = call(table)

# %% A copy of the CUDA sources, yours to edit. It goes when Python ends; name a folder to keep it.
scratch = tempfile.TemporaryDirectory(prefix="k3cupy-edit-")
folder = Path(scratch.name, "cuda_src")
shutil.copytree(sources.shipped(), folder)


def edit(file: str, old: str, new: str) -> None:
    """What you would do in an editor: replace a text that is there once."""
    path = folder / file
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"{path}: expected {old!r} once, got it {text.count(old)} times")
    path.write_text(text.replace(old, new), encoding="utf-8")


# %% The edit: let RoPE turn the other way. A header counts as much as the .cu file itself.
SINE = "const float s = angles.sine[i];"
SINE_BACKWARDS = "const float s = -angles.sine[i];"
edit("mla/rope.cuh", SINE, SINE_BACKWARDS)

with k3cupy.source_dir(folder):
    print(f"edited:      {describe()}")
    edited = call(table)

if HAS_GPU:
    # Turning by minus the angle is what the shipped kernel does with negative sines.
    assert torch.equal(edited, call(table_backwards)), "the edited kernel should turn backwards"
    assert not torch.equal(edited, shipped), "the edit should show"
    print("The edited kernel ran, and turned the other way.")
else:
    print("No GPU here: on one, the edited kernel would have run in that call.")

# %% A slip of the pen. The error holds the compiler's log, with the file and the line.
SINE_MISSPELT = "const float s = -angle.sine[i];"
edit("mla/rope.cuh", SINE_BACKWARDS, SINE_MISSPELT)

with k3cupy.source_dir(folder):
    try:
        if HAS_GPU:
            call(table)
        print(f"with a slip: {describe()}")
    except k3cupy.CompileError as error:
        print(f"A slip of the pen gives:\n{error}")

# %% Repaired: the next call works. Outside the `with` block nothing ever changed.
edit("mla/rope.cuh", SINE_MISSPELT, SINE)

with k3cupy.source_dir(folder):
    print(f"repaired:    {describe()}")
    assert torch.equal(call(table), shipped), "the repaired kernel should give the same bits"
assert torch.equal(call(table), shipped), "outside the block the shipped kernel runs"
