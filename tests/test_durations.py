"""`make test` says how long it took, all of it, and which tests take long; CI runs the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_make_test_asks_for_the_slowest_tests() -> None:
    command = ["make", "-n", "test", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if "-m pytest" in line)
    assert "--durations=15" in line
    assert "make test" in (ROOT / ".ci/run").read_text("utf-8")


def test_the_summary_tells_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    reporter = SimpleNamespace(write_line=lines.append)
    monkeypatch.setattr(conftest, "CASES", {})
    monkeypatch.setattr(conftest, "LEFT_OUT", set())
    monkeypatch.delenv("TEST_BEGAN", raising=False)
    conftest.pytest_terminal_summary(reporter)
    assert lines == [], "pytest was called by hand"
    monkeypatch.setenv("TEST_BEGAN", str(time.time() - 150))
    monkeypatch.setattr(conftest, "_PYTEST_BEGAN", time.time() - 90)
    conftest.pytest_terminal_summary(reporter)
    (line,) = lines
    assert line.startswith("make test took 2.5 minutes, 1.0 of them before the tests")
