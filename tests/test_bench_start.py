"""The benchmark of a server's start: its processes and what it makes of them; all on no GPU."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import document
from click.testing import CliRunner
from fake_device import H200

from k3cupy import bundling
from k3cupy.bench import forms, report, start
from k3cupy.cli import main
from k3cupy.runtime import devices
from k3cupy.timing import environment

CHILD = """
import json, os, sys
what = json.loads(sys.argv[1])
print("ready", flush=True)
assert sys.stdin.readline() == "go\\n"
cache = os.environ["CUPY_CACHE_DIR"]
os.makedirs(cache, exist_ok=True)
open(os.path.join(cache, f"{os.getpid()}.cubin"), "w").close()
if "fail" in what:
    sys.exit(3)
names = ("K3CUPY_BUNDLE", "K3CUPY_NO_COMPILE", "CUPY_CACHE_IN_MEMORY")
told = [os.environ.get(name) for name in names]
print(json.dumps({"kernels": 5, "compiled": 2, "ready_s": 1.5, "chosen_s": 0.5,
                  "decode_ms": 30 + len(what), "gemm_ms": 20.0, "told": told}))
"""
ENTRY = start.Entry("cold", 1, 296, 296, 297, 8.0, 1.5, 4.0, 3.0)
MANY = replace(ENTRY, kind="cold, 8 at once", processes=8, ready_s=9.2)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that need no GPU."""
    path = tmp_path / "child.py"
    path.write_text(CHILD, "utf-8")
    monkeypatch.setattr(start, "_COMMAND", (sys.executable, "-S", str(path)))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")


def one(kind: str, count: int, cache: Path, bundle: Path | None = None, **what: Any) -> start.Entry:
    scenario = start._Scenario(kind, count, cache, bundle, **what)
    try:
        scenario.wait()
        return scenario.run()
    finally:
        scenario.end()


def test_processes_begin_together(children: None, tmp_path: Path) -> None:
    found = one("cold, 3 at once", 3, tmp_path / "cache", model="kimi-k3", tp=8)
    assert found == start.Entry("cold, 3 at once", 3, 5, 6, 3, 1.5, 0.5, 32.0, 20.0)


def test_a_process_that_fails_is_an_error(
    children: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="start, cold: a process failed"):
        one("cold", 2, tmp_path / "cache", fail=True)
    monkeypatch.setattr(start, "_COMMAND", (sys.executable, "-S", "-c", "pass"))
    with pytest.raises(RuntimeError, match="start, cold: a process ended before it began"):
        one("cold", 1, tmp_path / "cache")


def test_the_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold cache is used again where it is to be warm; a bundle is made when it is needed."""
    told: list[Any] = []

    class Scenario:
        def __init__(
            self, kind: str, count: int, cache: Path, bundle: Path | None = None, **what: Any
        ) -> None:
            self.kind, self.bundle = kind, bundle
            told.append((kind, count, cache.name, bundle and bundle.name, what))

        def wait(self) -> None:
            told.append("wait")

        def run(self) -> str:
            return self.kind

        def end(self) -> None:
            told.append("end")

    def make(*given: Any) -> None:
        told.append(given[:3])
        given[3].mkdir()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "info", lambda _: H200)
    monkeypatch.setattr(bundling, "instances_of", lambda *_: ["one", "one"])
    monkeypatch.setattr(bundling, "make", make)
    monkeypatch.setattr(start, "_Scenario", Scenario)
    kinds = [told.append(kind) or kind for kind in start.run("glm-5.2", 4)]
    of_model = {"model": "glm-5.2", "tp": 4}
    asked = [
        ("cold", 1, "cold", None, of_model),
        ("warm", 1, "cold", None, of_model),
        ("warm, first calls alone", 1, "cold", None, {}),
        ("cold, one cache format", 1, "fewer", None, {**of_model, **bundling.ONE_SERVER}),
        ("cold, 8 at once", 8, "shared", None, of_model),
        ("bundle", 1, "unused", "bundle", of_model),
        ("bundle, first calls alone", 1, "unused", "bundle", {}),
    ]
    assert told == [
        *asked,
        *["wait"] * 7,
        *kinds[:5],
        (["one"], "glm-5.2 tp4", H200),
        *kinds[5:],
        *["end"] * 7,
    ]
    assert kinds == [kind for kind, *_ in asked]


def test_a_bundle_is_used_without_a_compiler(
    children: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: found.append(loads(text)) or found[-1])
    monkeypatch.setenv("K3CUPY_BUNDLE", "/of/the/user")
    one("bundle", 1, tmp_path / "cache", tmp_path / "bundle")
    one("cold", 1, tmp_path / "cache")
    assert [each["told"] for each in found] == [
        [str(tmp_path / "bundle"), "1", None],
        [None, None, None],
    ]


def test_the_command_shows_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(environment, "describe", lambda *_: document()["environment"])
    asked: list[Any] = []
    monkeypatch.setattr(start, "run", lambda *given: asked.append(given) or [ENTRY, MANY])
    path = tmp_path / "start.json"
    done = CliRunner().invoke(main, ["bench", "start", "--tp", "16", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert asked == [("kimi-k3", 16)]
    found = json.loads(path.read_text("utf-8"))
    assert found["method"]["cores"] == os.cpu_count()
    row = ["cold", "1", "296", "296", "297", "8.00", "1.50", "4.0", "3.0", "7.0"]
    assert forms.form_of(found).cells(found["entries"][0]) == row
    told = "8 processes at once take 1.15 times as long as one, compile 296 kernels together"
    assert told in done.output
    assert told in report.markdown(found)


def test_the_command_refuses_what_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done = CliRunner().invoke(main, ["bench", "start", "--tp", "3"])
    assert done.exit_code == 1
    assert "tp: expected 4 or 8 or 16 for kimi-k3, got 3" in done.output


@pytest.mark.gpu
def test_one_of_its_processes_on_the_gpu(tmp_path: Path) -> None:
    """Of first calls alone, cold and then warm."""
    cold, warm = (one(kind, 1, tmp_path / "cache") for kind in ("cold", "warm"))
    assert (cold.kernels, cold.compiled, cold.files) == (0, 2, 3)
    assert (warm.compiled, warm.files) == (0, 3)
    assert cold.decode_ms > 0
    assert warm.gemm_ms > 0
