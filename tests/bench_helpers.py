"""A document of results, as the benchmarks write it; and what they do where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fake_device import H200

from k3cupy.runtime import devices, instances, launch
from k3cupy.runtime.instances import Instance
from k3cupy.timing import graphs

ROOT = Path(__file__).parent.parent


def document(*entries: dict[str, Any], gpu: str = "NVIDIA H200") -> dict[str, Any]:
    environment = {
        "gpu": gpu,
        "compute_capability": [9, 0],
        "num_sms": 132,
        "driver": "580.0",
        "nvrtc": "13.0",
        "packages": {"torch": "2.11.0"},
        "commit": "0123456789abcdef",
        "date": "2026-11-29",
    }
    return {"environment": environment, "entries": list(entries)}


class Small(NamedTuple):
    """A launch of a small kernel: a neighbour, or what a benchmark compares with."""

    name: str
    grid: int
    pdl: bool
    arguments: list[Any]


def on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Small]:
    """Let neighbours be launched on an H200 that is none; what is launched, in order."""
    found: list[Small] = []

    def make(device: int, kernel: str, *, grid: int, block: int, pdl: bool) -> Any:
        return lambda stream, arguments: found.append(Small(kernel, grid, pdl, list(arguments)))

    def load(instance: Instance, device: int) -> Any:
        return SimpleNamespace(kernel=instance.name_expression)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(instances, "load", load)
    monkeypatch.setattr(launch, "make_launcher", make)
    monkeypatch.setattr(devices, "info", lambda index: H200)
    return found


def timed_as(
    monkeypatch: pytest.MonkeyPatch, launches: Sequence[Small], us: Callable[[list[str]], float]
) -> None:
    """Let a body take what ``us`` says of the small kernels that it launches, each time anew."""

    def capture(body: Callable[[], Any], count: int, first: Any = None) -> float:
        before = len(launches)
        body()
        return us([small.name for small in launches[before:]])

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "measure", lambda every, count, **_: list(every))
