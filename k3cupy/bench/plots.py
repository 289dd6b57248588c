"""Drawings of results; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3cupy.bench.forms import PAGE_SHAPES, gemm_summary

_COLUMNS = 3


def plot_gemm(document: Mapping[str, Any], path: Path) -> None:
    """Draw one panel a shape: time over the floor against M, ours and ``F.linear``.

    Args:
        document: of ``bench gemm``.
        path: of the picture; its ending names the format.
    """
    from matplotlib.figure import Figure  # an extra: only who draws needs it

    kinds = list(dict.fromkeys(entry["kind"] for entry in document["entries"]))
    shown = [kind for kind in PAGE_SHAPES if kind in kinds] or kinds
    rows = -(-len(shown) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 2.8 * rows), layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    for panel in panels:
        panel.set_axis_off()
    for panel, kind in zip(figure.axes, shown, strict=False):
        entries = [entry for entry in document["entries"] if entry["kind"] == kind]
        tokens = [entry["tokens"] for entry in entries]
        floors = [entry["linear_us"] / entry["floor_us"] for entry in entries]
        panel.set_axis_on()
        panel.plot(tokens, [gemm_summary(e)["over_floor"] for e in entries], "o-", label="k3cupy")
        panel.plot(tokens, floors, "s--", label="F.linear")
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set(
            title=f"{kind}, floor {entries[0]['floor_us']:.2f} us", xscale="log", ylim=(0, None)
        )
        panel.set_xticks(tokens, [str(count) for count in tokens])
        panel.set(xlabel="M", ylabel="time / floor")
    figure.axes[0].legend()
    e = document["environment"]
    figure.suptitle(
        f"Fused-A GEMM, cold weights, {e['gpu']}, {e['date']}, commit {e['commit'][:12]}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
