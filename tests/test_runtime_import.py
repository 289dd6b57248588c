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
