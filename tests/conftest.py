"""Fixtures shared by all tests: the device, and the rule for tests that need a GPU."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

# Before anything imports distutils, which it replaces: PyTorch's compiler needs the new one.
with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401

# The workers of one run share the cores: PyTorch must not start a thread a core in each.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from fake_device import FakeDevice
from gemm_helpers import GEMMS, Gemm, fresh_plans
from helpers import CASES, DEVICES
from hypothesis import settings
from torch_linear_helpers import Calls

import k3cupy
from k3cupy.call.plans import PlanCache
from k3cupy.ops import dispatch_report, linear

# The same examples every time; `make fuzz` looks for new ones, and for many more.
settings.register_profile("suite", max_examples=25, derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_configure() -> None:
    """Prepare the environment of the tests and of their child processes.

    PYTHONPATH becomes absolute, for children start in folders of their own. What the user of this
    machine has measured or set does not count, nor the width that readline tells child processes.
    """
    nothing = Path(tempfile.gettempdir(), f"k3cupy-no-measurements-{os.getpid()}")
    os.environ["K3CUPY_CACHE_DIR"] = str(nothing)
    for name in ("K3CUPY_BATCH_INVARIANT", "COLUMNS"):
        os.environ.pop(name, None)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(e).resolve()) for e in entries if e)


LEFT_OUT: set[str] = set()
"""Names of the tests that this machine cannot run."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, tests that need one are left out, unless nothing else was asked for.

    They are four in ten, and to skip one takes a worker and its report as long as a small test.
    """
    of_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if of_gpu and len(of_gpu) < len(items) and not torch.cuda.is_available():
        LEFT_OUT.update(item.nodeid for item in of_gpu)
        config.hook.pytest_deselected(items=of_gpu)
        items[:] = [item for item in items if item.nodeid not in LEFT_OUT]


def pytest_collection_finish() -> None:
    """What is there by now, thousands of tests and large libraries, is no garbage to look for."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands over what it has counted."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["cases"] = [(*key, count) for key, count in CASES.items()]
        output["left_out"] = sorted(LEFT_OUT)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The counts of a worker are added up; all of them have left out the same tests."""
    output = getattr(node, "workeroutput", {})
    for what, device, count in output.get("cases", ()):
        CASES[what, device] += count
    LEFT_OUT.update(output.get("left_out", ()))


_PYTEST_BEGAN = time.time()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was left out, how many cases were generated, and how long `make test` took."""
    if LEFT_OUT:
        terminalreporter.write_line(f"{len(LEFT_OUT):,} tests need a GPU and were left out")
    if "TEST_BEGAN" in os.environ:
        began = float(os.environ["TEST_BEGAN"])
        total, before = time.time() - began, _PYTEST_BEGAN - began
        terminalreporter.write_line(
            f"make test took {total / 60:.1f} minutes, {before / 60:.1f} of them before the tests: "
            "environment, style, types"
        )
    for device in dict.fromkeys(device for _, device in CASES):
        counts = {what: count for (what, where), count in CASES.items() if where == device}
        told = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        terminalreporter.write_line(
            f"generated cases on {device}: {sum(counts.values()):,} ({told})"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each behaviour test runs on the CPU and, where there is a GPU, on it."""
    return str(request.param)


@pytest.fixture(params=GEMMS)
def gemm(request: pytest.FixtureRequest) -> Gemm:
    """Each of the GEMMs in turn, for what both of them promise."""
    return GEMMS[request.param]


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDevice]:
    """A GPU that is none, and of which no earlier test has plans."""
    with fresh_plans(tmp_path):
        yield FakeDevice(monkeypatch)


@pytest.fixture(autouse=True)
def gpu_is_healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Report an illegal access in the test that caused it, not in a later one."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test finds what PyTorch's compiler made of our functions, or gave up, in another.

    It never looks again into a function that it gave up once.
    """
    yield
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is not None and convert_frame.input_codes.seen:
        torch.compiler.reset()


@pytest.fixture
def needs_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip where the GPU has too little free memory, and free it afterwards."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < request.param * 1.2 * 2**30:
        pytest.skip(f"needs {request.param} GiB of GPU memory")
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def fresh_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The counts of low-latency linear begin at zero, and end so; no layer has a name as yet."""
    k3cupy.reset_dispatch_report()
    monkeypatch.setattr(dispatch_report, "_layers", WeakKeyDictionary())
    yield
    k3cupy.reset_dispatch_report()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every call that comes to the dispatcher from a layer or the operator; it runs as ever."""
    seen, run = Calls(), k3cupy.low_latency_linear  # by its public name, which is kept

    def spy(x: Any, weight: Any, residual: Any = None, **options: Any) -> Any:
        seen.append({"x": x, "weight": weight, **options})
        return run(x, weight, residual, **options)

    again = linear.again

    def spy_on_repeats(values: Any, of_call: Any, weight_is_static: bool) -> Any:
        done = again(values, of_call, weight_is_static)
        if done is not None:
            modes = {"batch_invariant": of_call[1], "weight_is_static": weight_is_static}
            seen.append({"x": values[0], "weight": values[1], **modes})
        return done

    def spy_on_calls(*args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(linear, "again", again)
            return spy(*args, **kwargs)

    monkeypatch.setattr(linear, "low_latency_linear", spy_on_calls)
    monkeypatch.setattr(linear, "again", spy_on_repeats)
    monkeypatch.setattr(linear, "_repeats", PlanCache())  # of no other test
    latest = importlib.import_module("k3cupy.torch.torch_library")._latest
    monkeypatch.setattr(latest, "get", lambda _: None)
    return seen
