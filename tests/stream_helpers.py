"""Streams in the forms in which an operation takes them, and captured graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import k3cupy

SLEEP_CYCLES = 300_000


class StreamLike:
    """An object of another library that has a CUDA stream."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def by_handle(stream: torch.cuda.Stream) -> Any:
    return stream.cuda_stream


def by_protocol(stream: torch.cuda.Stream) -> Any:
    return StreamLike(stream.cuda_stream)


def by_cuda_core(stream: torch.cuda.Stream) -> Any:
    core = pytest.importorskip("cuda.core")
    return core.Stream.from_handle(stream.cuda_stream)


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def assert_capture_asks_for_a_warmup(run: Callable[[], Any]) -> None:
    """A call whose kernel is not loaded is refused in a capture, which goes on without it."""
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
        with pytest.raises(k3cupy.CaptureError, match="warmup"):
            run()
    torch.cuda.synchronize()


STREAM_FORMS = (by_handle, by_protocol, by_cuda_core)
