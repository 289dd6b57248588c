"""`import k3cupy` costs NumPy and little else, and every public name is there all the same."""

from __future__ import annotations

import ast
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from helpers import run_program

import k3cupy

HEAVY = {"cuda", "cupy", "cupy_backends", "jax", "torch"}
DRIVER = ("libcuda.so", "libcudart", "libnvrtc")
MAX_MODULES = 6
MAX_CPU_MS = 60
REPEATS = 5


PROGRAM = f"""
import json, pathlib, sys, time
import numpy

before = set(sys.modules)
times = []
for _ in range({REPEATS}):
    for name in set(sys.modules) - before:
        del sys.modules[name]
    start = time.process_time()
    import k3cupy
    times.append((time.process_time() - start) * 1000)
found = {{"cpu_ms": min(times), "brought": sorted(set(sys.modules) - before)}}
found["listed"] = dir(k3cupy)
found["missing"] = [name for name in k3cupy.__all__ if not hasattr(k3cupy, name)]
brought = {{name.partition(".")[0] for name in set(sys.modules) - before}}
found["heavy"] = sorted({HEAVY} & brought)
maps = pathlib.Path("/proc/self/maps")
mapped = maps.read_text() if maps.exists() else ""
found["driver"] = [name for name in {DRIVER} if name in mapped]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def child() -> dict[str, Any]:
    """A process of its own: what an import brings and costs, then what every public name brings."""
    found: dict[str, Any] = json.loads(run_program(PROGRAM))
    return found


HALF_MADE = """
import importlib.machinery, sys, threading, time, types
import ml_dtypes
import numpy as np
import k3cupy

cache = np.zeros((2, 4, 576), np.float16)
f16 = lambda *shape: np.ones(shape, np.float16)
x, weight = (np.ones(shape, "bfloat16") for shape in ((4, 64), (48, 64)))

def calls():
    k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
        f16(2, 3, 512), f16(2, 3, 64), f16(2, 512), f16(2, 64), cache, np.array([6, -1]))
    k3cupy.fused_a_gemm(x, weight)
    k3cupy.low_latency_linear(x, weight)
"""

CHILDREN = {
    "a module of which nothing is there": """
half = types.ModuleType("torch")
half.__spec__ = importlib.machinery.ModuleSpec("torch", None)
half.__spec__._initializing = True
sys.modules["torch"] = half
calls()
""",
    "the real one, in another thread": """
failed = []
def import_it():
    try:
        import torch
    except ImportError as error:
        failed.append(error)
thread = threading.Thread(target=import_it)
calls()
thread.start()
count = 0
while thread.is_alive():
    calls()
    count += 1
    time.sleep(0.002)
assert count > 50 and not failed, (count, failed)
import torch
calls()
assert k3cupy.fused_a_gemm(torch.ones(4, 64).bfloat16(), torch.ones(48, 64).bfloat16()).sum() > 0
""",
}


@pytest.mark.parametrize("name", CHILDREN)
def test_case37_torch_while_it_is_imported(name: str) -> None:
    """A half-made module counts as none: callers with NumPy alone do not wait for it."""
    run_program(HALF_MADE + CHILDREN[name])


def test_few_modules(child: dict[str, Any]) -> None:
    assert "k3cupy" in child["brought"]
    assert len(child["brought"]) <= MAX_MODULES, child["brought"]


def test_little_time(child: dict[str, Any]) -> None:
    assert child["cpu_ms"] <= MAX_CPU_MS


def test_every_public_name_is_listed_and_there(child: dict[str, Any]) -> None:
    assert set(k3cupy.__all__) <= set(child["listed"])
    assert child["missing"] == []


def test_no_public_name_needs_a_gpu_stack_or_a_framework(child: dict[str, Any]) -> None:
    assert (child["heavy"], child["driver"]) == ([], [])


def test_a_star_import_gives_the_public_names() -> None:
    names: dict[str, Any] = {}
    exec("from k3cupy import *", names)
    assert set(k3cupy.__all__) == set(names) - {"__builtins__"}


def test_a_name_is_the_one_of_its_module_and_looked_up_once() -> None:
    from k3cupy.runtime.sources import source_dir

    assert k3cupy.source_dir is source_dir
    assert vars(k3cupy)["source_dir"] is source_dir


def test_a_module_that_pages_name_is_there_without_an_import_of_its_own() -> None:
    program = "import k3cupy; print(len(k3cupy.projections.shapes('deepseek-v3')))"
    assert int(run_program(program)) > 10
    assert set(k3cupy._MODULES) <= set(dir(k3cupy))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'k3cupy' has no attribute 'fused_b_gemm'"):
        k3cupy.fused_b_gemm  # noqa: B018


def test_type_checkers_see_the_same_names_in_the_same_modules() -> None:
    tree = ast.parse(Path(k3cupy.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.asname or alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == k3cupy._HOMES
    assert sorted(seen) == k3cupy.__all__


def test_no_public_name_is_a_module() -> None:
    """Importing a submodule puts it into the package, where it would hide the lazy name."""
    modules = {module.name for module in pkgutil.iter_modules(k3cupy.__path__)}
    assert "runtime" in modules
    assert modules & set(k3cupy.__all__) == set()
