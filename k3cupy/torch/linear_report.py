"""What ``enable_low_latency_gemm`` did to a model, as an object that prints as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from k3cupy.runtime.text import Shown, name_pattern, table_of

if TYPE_CHECKING:
    from rich.table import Table

FRAMEWORK = "F.linear"
"""The name under which the framework's own linear stands in a report."""


@dataclass(frozen=True)
class Span:
    """Numbers of tokens that one kernel computes.

    Attributes:
        first: the smallest M.
        last: the largest, included.
        kernel: ``"fused_a"``, ``"skinny"``, or ``"F.linear"``.
    """

    first: int
    last: int
    kernel: str

    def __str__(self) -> str:
        """For example ``fused_a 1-8``."""
        tokens = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.kernel} {tokens}"


def spans(kernels: Sequence[tuple[int, str]]) -> tuple[Span, ...]:
    """Join neighbours among (M, kernel), in the order of M, where the kernel is the same."""
    found: list[Span] = []
    for tokens, kernel in kernels:
        if found and found[-1].kernel == kernel:
            found[-1] = replace(found[-1], last=tokens)
        else:
            found.append(Span(tokens, tokens, kernel))
    return tuple(found)


@dataclass(frozen=True)
class LayerReport:
    """One linear layer of a model.

    Attributes:
        name: as ``named_modules`` has it, ``""`` for the module itself.
        shape: (N, K), of this rank's share where tensor parallelism split the weight; None where
            the layer does not tell.
        device: where its weight is in a call, ``"cuda:0"``; ``""`` without one.
        installed: the layer asks k3cupy's dispatcher now.
        plan: which kernel runs for which M; empty for a layer that is not on a GPU.
        reason: why the layer was left alone, or what else there is to say, such as who is around
            it; ``""`` for nothing.
    """

    name: str
    shape: tuple[int, int] | None
    device: str
    installed: bool
    plan: tuple[Span, ...] = ()
    reason: str = ""


class LinearReport(Shown):
    """The linear layers of a model: those that were installed, and why the others were not.

    It has a length, can be iterated and indexed (``LayerReport``), and prints as a table in which
    layers that differ only in the numbers in their names share a line.
    """

    def __init__(self, layers: Sequence[LayerReport]) -> None:
        self._layers = tuple(layers)

    @property
    def installed(self) -> int:
        """The number of layers that ask k3cupy's dispatcher now."""
        return sum(layer.installed for layer in self._layers)

    def __len__(self) -> int:
        """The number of linear layers, left alone or not."""
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerReport]:
        """The layers in the order of ``named_modules``."""
        return iter(self._layers)

    def __getitem__(self, name: str) -> LayerReport:
        """The layer of a name.

        Raises:
            KeyError: no linear layer has it.
        """
        for layer in self._layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return ``installed`` and ``layers``, each with its attributes, as plain values."""
        return {"installed": self.installed, "layers": [asdict(layer) for layer in self._layers]}

    def __rich__(self) -> Table:
        """The table, for ``rich.print``."""
        title = f"Low-latency linear: installed in {self.installed} of {len(self)} linear layers"
        headers = ("layer", " count", "N x K", "on", "kernel and its numbers of tokens")
        rows = [(name, str(count), *_cells(example)) for name, example, count in self._lines()]
        return table_of(headers, rows, title)

    def _lines(self) -> list[tuple[str, LayerReport, int]]:
        """Return (name, one of the layers, how many share the line)."""
        groups: dict[tuple[str, LayerReport], list[LayerReport]] = {}
        for layer in self._layers:
            pattern = name_pattern(layer.name)
            groups.setdefault((pattern, replace(layer, name="")), []).append(layer)
        return [
            (pattern if len(group) > 1 else group[0].name or "(itself)", group[0], len(group))
            for (pattern, _), group in groups.items()
        ]


def _cells(layer: LayerReport) -> tuple[str, str, str]:
    shape = "?" if layer.shape is None else f"{layer.shape[0]} x {layer.shape[1]}"
    plan = ", ".join(map(str, layer.plan))
    if not layer.installed:
        return shape, layer.device, f"left alone: {layer.reason}"
    return shape, layer.device, "; ".join(filter(None, (plan, layer.reason)))
