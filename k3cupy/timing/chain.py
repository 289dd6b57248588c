"""The place where a kernel sits in a model: something writes what it reads, something reads it.

Nothing follows itself there. What counts is the time that a kernel adds to producer -> consumer.
Both are small and launched as our kernels are, with programmatic dependent launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from k3cupy.runtime import devices, instances, launch
from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.instances import Instance

Body = Callable[[], Any]

END, EARLY, NONE, GEMM = "end", "early", "none", "gemm"
KINDS = (END, EARLY, NONE, GEMM)
"""Neighbours: small kernels that let the next one in behind their work, behind their wait, or not
before they end; and a product by the framework."""

NEIGHBOURS = END, NONE
"""The producer and the consumer where nobody names others."""

_TRIGGERS = {END: "kEnd", EARLY: "kEarly", NONE: "kNone"}
_THREADS = 256
_CHUNK_BYTES = 16
_GEMM_WIDTH = 512
_MOST_BYTES = 8 << 20
"""Of a larger tensor a neighbour touches only so much: it is there for the place, not its time."""


_WORDS = {
    END: "that lets the next one in behind its work",
    EARLY: "that lets the next one in behind its wait",
    NONE: "that lets the next one in when it ends",
    GEMM: "that is a product by the framework",
}


def told(producer: str, consumer: str) -> str:
    """Return a chain in words."""
    return (
        f"time added to a producer {_WORDS[producer]} and a consumer {_WORDS[consumer]}, which "
        "waits and reads the output"
    )


class Chain:
    """A producer and a consumer, and room for something between them."""

    def __init__(self, before: Body, after: Body) -> None:
        self._before, self._after = before, after

    def around(self, middle: Body | None = None) -> Body:
        """Return one link: the producer, something or nothing, and the consumer."""

        def link() -> None:
            self._before()
            if middle is not None:
                middle()
            self._after()

        return link


def producer_of(x: torch.Tensor, kind: str = END, *, pdl: bool = True) -> Body:
    """Return what writes a tensor: the values that it has; as a product of the framework, others.

    Each row begins at a multiple of 16 bytes; a matrix may have rows that lie apart.
    """
    rows = _rows(x)
    if kind == GEMM:
        out = rows.view(torch.bfloat16)
        left, right = _random(len(out), _GEMM_WIDTH, x), _random(_GEMM_WIDTH, out.shape[1], x)
        return lambda: torch.mm(left, right, out=out)
    source = rows.clone(memory_format=torch.contiguous_format)
    chunks, of_row = (np.uint32(size // _CHUNK_BYTES) for size in (rows.numel(), rows.shape[1]))
    arguments = [chunks, of_row, rows.data_ptr(), rows.stride(0)]
    grid = -(-int(chunks) // _THREADS)
    queue = _launcher(f"write_rows<{_trigger(kind)}>", pdl, grid)
    return lambda: queue([source.data_ptr(), *arguments])


def consumer_of(out: torch.Tensor, kind: str = NONE, *, pdl: bool = True) -> Body:
    """Return what reads a tensor whose rows follow one another."""
    rows = _rows(out)
    if kind == GEMM:
        left = rows.view(torch.bfloat16)
        right, result = (
            _random(left.shape[1], _GEMM_WIDTH, out),
            _random(len(left), _GEMM_WIDTH, out),
        )
        return lambda: torch.mm(left, right, out=result)
    sink = torch.zeros(1, device=out.device, dtype=torch.int32)
    queue = _launcher(f"read_all<{_trigger(kind)}>", pdl)
    return lambda: queue([rows.data_ptr(), rows.numel() // _CHUNK_BYTES, sink.data_ptr()])


def empty(*, pdl: bool = True) -> Body:
    """Return what does nothing in the place of a kernel but wait for its predecessor."""
    queue = _launcher("empty_kernel", pdl)
    return lambda: queue([])


def _trigger(kind: str) -> str:
    if kind not in _TRIGGERS:
        reject("kind", f"one of {', '.join(KINDS)}", shown(kind))
    return f"k3cupy::Trigger::{_TRIGGERS[kind]}"


def _random(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(rows, columns, device=like.device, dtype=torch.bfloat16)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a matrix of bytes, of as many of its rows as a neighbour touches."""
    rows = tensor.flatten(0, -2).view(torch.uint8)
    return rows[: max(1, _MOST_BYTES // rows.shape[1])]


def _launcher(name: str, pdl: bool, grid: int = 0) -> Callable[[list[Any]], None]:
    """Return what launches a kernel of the chain, with a block a multiprocessor by default."""
    device = torch.cuda.current_device()
    kernel = instances.load(Instance("tuning/chain.cu", f"k3cupy::{name}"), device)
    gpu = devices.info(device)
    grid, pdl = grid or gpu.num_sms, pdl and gpu.has_pdl
    queue = launch.make_launcher(device, kernel.kernel, grid=grid, block=_THREADS, pdl=pdl)
    return lambda arguments: queue(torch.cuda.current_stream().cuda_stream, arguments)
