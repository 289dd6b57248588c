"""Streams in the forms in which an operation takes them, and captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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


STREAM_FORMS = (by_handle, by_protocol, by_cuda_core)
