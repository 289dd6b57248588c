"""The example `examples/edit_a_kernel.py`: it runs, with and without a GPU, and shows the edit."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "edit_a_kernel.py"
LINE = re.compile(r"^(as shipped|edited|repaired): +sources (\w{12}), (.*)$", re.MULTILINE)

has_compiler = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core")


BOTH = """
import runpy, sys, tempfile
import torch
torch.cuda.is_available = lambda: False
tempfile.tempdir = sys.argv[2]
sys.modules["cuda.core"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
print("with the GPU stack")
del sys.modules["cuda.core"]
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""The example where cuda-core does not import, and then where it does."""

pytestmark = pytest.mark.xdist_group("edit_a_kernel")


def run_child(cwd: Path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for temporary files of the child."""
    return tmp_path_factory.mktemp("edit")


@pytest.fixture(scope="module")
def printed(temporary: Path) -> tuple[str, str]:
    """What the example prints on a machine without a GPU, first without cuda-core; one child."""
    both = BOTH if has_compiler else BOTH.partition("del ")[0]
    output = run_child(temporary, "-c", both, str(EXAMPLE), str(temporary))
    without, _, with_stack = output.partition("with the GPU stack\n")
    return without, with_stack


def check_the_digests(printed: str) -> None:
    digest = {state: digest for state, digest, _ in LINE.findall(printed)}
    assert set(digest) == {"as shipped", "edited", "repaired"}, printed
    assert digest["edited"] != digest["as shipped"]
    assert digest["repaired"] == digest["as shipped"]


def check_the_compilers_answers(printed: str) -> None:
    check_the_digests(printed)
    for state, _, result in LINE.findall(printed):
        assert re.fullmatch(r"sm_\d+: .+ registers a thread, \d+ bytes", result), state
    assert re.search(r'rope\.cuh\(\d+\): error: identifier "angle" is undefined', printed)


@pytest.mark.skipif(not has_compiler, reason="cuda.core is not installed here")
def test_without_a_gpu_it_compiles_every_edit(printed: tuple[str, str]) -> None:
    _, with_stack = printed
    check_the_compilers_answers(with_stack)
    assert with_stack.count("sm_90: ") == 3
    assert "No GPU here" in with_stack


def test_without_the_gpu_stack_it_says_what_to_install(printed: tuple[str, str]) -> None:
    without, _ = printed
    check_the_digests(without)
    assert without.count("not compiled: cuda-core does not import") == 4
    assert 'pip install "k3cupy[cu12]"' in without


def test_nothing_is_left_behind(printed: tuple[str, str], temporary: Path) -> None:
    assert list(temporary.glob("k3cupy-edit-*")) == []


@pytest.mark.gpu
def test_with_a_gpu_the_edited_kernel_runs(tmp_path: Path) -> None:
    on_gpu = run_child(tmp_path, str(EXAMPLE))
    check_the_compilers_answers(on_gpu)
    assert "The edited kernel ran, and turned the other way." in on_gpu
