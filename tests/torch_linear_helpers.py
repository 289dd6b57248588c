"""Layers and models for the tests of the low-latency linear in PyTorch modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from helpers import BF16
from torch import nn

N, K = 48, 128
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
"""Of PyTorch."""


class Calls(list[dict[str, Any]]):
    """What came to the dispatcher."""

    @property
    def promises(self) -> list[bool]:
        return [call["weight_is_static"] for call in self]


def linear(n: int = N, k: int = K, **options: Any) -> nn.Linear:
    return nn.Linear(k, n, **{"bias": False, "dtype": BF16, **options})


def mixed_model() -> nn.Module:
    """Eligible layers at two depths, and one that is not."""
    blocks = nn.ModuleList(nn.ModuleDict({"up": linear(), "down": linear(K, N)}) for _ in range(3))
    return nn.ModuleDict({"blocks": blocks, "head": linear(7, K), "gate": linear(bias=True)})


@contextlib.contextmanager
def process_group(backend: str, rank: int, ranks: int, store: Any) -> Iterator[None]:
    """The group of processes in which a model is sharded."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
