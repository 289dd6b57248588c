"""What the tests of PyTorch's operators share: comparing results, and looking into graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from mla_helpers import as_list
from torch import nn


def same(got: Any, want: Any, what: str) -> None:
    """Compare two results, tensor by tensor: type, layout and bits."""
    for left, right in zip(as_list(got), as_list(want), strict=True):
        if isinstance(right, torch.Tensor):
            assert (left.dtype, left.shape, left.stride()) == (
                right.dtype,
                right.shape,
                right.stride(),
            ), what
            oracle.assert_same_bits(oracle.bits(left.cpu()), oracle.bits(right.cpu()), what)
        else:
            assert left is right is None, what


class Counting:
    """A backend that counts what it compiles, and keeps the operators of ours in each graph."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs: list[list[str]] = []
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(ours_in(graph.graph))
        return self._compile(graph, inputs)


def ours_in(graph: torch.fx.Graph) -> list[str]:
    """The operators of ours in a graph, without their overloads where that is the default."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name.removeprefix("k3cupy.") for name in called if name.startswith("k3cupy.")]


class Called(nn.Module):
    """A function as a module, which is what is exported."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, given: dict[str, Any]) -> Any:
        return self.run(**given)


each_strictness = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
