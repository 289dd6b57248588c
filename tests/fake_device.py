"""A GPU that is none: CPU tensors count as CUDA tensors, launches are written down."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from k3cupy.ops import cuda_call, outputs
from k3cupy.runtime import devices, launch, producers, streams
from k3cupy.runtime.devices import DeviceInfo

H200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
STREAM = 77


class FakeDevice:
    """Takes CPU tensors for CUDA tensors and writes down what would be launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[str] = []
        self.limits: list[int] = []
        self.settings: dict[str, Any] = {}
        self.launches: list[tuple[int, list[Any]]] = []
        view = producers.view
        monkeypatch.setattr(producers, "view", lambda t, n: replace(view(t, n), device_type="cuda"))
        monkeypatch.setattr(devices, "info", lambda _: H200)
        monkeypatch.setattr(streams, "current_of", lambda *_: lambda: STREAM)
        monkeypatch.setattr(cuda_call.CudaPlace, "load", self.load)
        monkeypatch.setattr(launch, "make_launcher", self.make_launcher)
        allocator = outputs.allocator
        monkeypatch.setattr(
            outputs, "allocator", lambda kind, shape, dtype, _: allocator(kind, shape, dtype, None)
        )

    def load(self, instance: Any, stream: Any) -> Any:
        self.loaded.append(instance.name_expression)
        return SimpleNamespace(kernel=None, allow_shared_memory=self.limits.append)

    def make_launcher(self, device: int, kernel: Any, **settings: Any) -> Any:
        self.settings = settings
        return lambda stream, arguments: self.launches.append((stream, arguments))
