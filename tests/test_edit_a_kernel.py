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


def run_example(cwd: Path, prelude: str = "") -> str:
    """Run the example in a child process after some lines of Python; return what it printed."""
    program = f"{prelude}\nimport runpy\nrunpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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
def test_without_a_gpu_it_compiles_every_edit(tmp_path: Path) -> None:
    printed = run_example(tmp_path, "import torch\ntorch.cuda.is_available = lambda: False")
    check_the_compilers_answers(printed)
    assert printed.count("sm_90: ") == 3
    assert "No GPU here" in printed


def test_without_the_gpu_stack_it_says_what_to_install(tmp_path: Path) -> None:
    prelude = "import sys, torch\ntorch.cuda.is_available = lambda: False\n"
    printed = run_example(tmp_path, prelude + "sys.modules['cuda.core'] = None")
    check_the_digests(printed)
    assert printed.count("not compiled: cuda-core does not import") == 4
    assert 'pip install "k3cupy[cu12]"' in printed


@pytest.mark.gpu
def test_with_a_gpu_the_edited_kernel_runs(tmp_path: Path) -> None:
    printed = run_example(tmp_path)
    check_the_compilers_answers(printed)
    assert "The edited kernel ran, and turned the other way." in printed


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    prelude = f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\nimport torch\n"
    run_example(tmp_path, prelude + "torch.cuda.is_available = lambda: False")
    assert list(tmp_path.glob("k3cupy-edit-*")) == []
