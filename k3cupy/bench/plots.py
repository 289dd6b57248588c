"""Drawings of results; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3cupy.bench.forms import PAGE_SHAPES, gemm_summary, window_summary

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


_WINDOW_COLUMNS = {
    "cublas": "cuBLAS",
    "public": "structure",
    "plan": "plan",
    "ours": "ours",
    "fewer": "fewer",
}
"""As the entries name the columns, and as they stand below the bars."""

_BAR = 0.8


def plot_windows(document: Mapping[str, Any], path: Path) -> None:
    """Draw one panel a window: a bar a column, one kernel on the other, and the floor.

    Args:
        document: of ``bench window``.
        path: of the picture; its ending names the format.
    """
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(entry["kind"] for entry in document["entries"]))
    groups = max(len([e for e in document["entries"] if e["kind"] == kind]) for kind in kinds)
    size = 3 + 3 * groups, 4 * len(kinds)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(kinds), 1, squeeze=False).flat
    for panel, kind in zip(panels, kinds, strict=True):
        _draw_window(panel, [entry for entry in document["entries"] if entry["kind"] == kind])
        panel.set(title=kind, ylabel="us a layer")
    e = document["environment"]
    figure.suptitle(
        f"Windows of a layer, cold weights, {e['gpu']}, {e['date']}, commit {e['commit'][:12]}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_window(panel: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    """Draw the entries of one window side by side, a group a number of tokens."""
    columns = [column for column in _WINDOW_COLUMNS if column in entries[0]["added_us"]]
    step = len(columns) + 1
    places, names = [], []
    colors: dict[str, str] = {}
    for group, entry in enumerate(entries):
        first, summary = group * step, window_summary(entry)
        for place, column in enumerate(columns, first):
            bottom, name = 0.0, _WINDOW_COLUMNS[column]
            for kernel, us in entry["added_us"][column].items():
                label = None if kernel in colors else kernel
                color = colors.setdefault(kernel, f"C{len(colors)}")
                panel.bar(place, us, _BAR, bottom, color=color, label=label)
                bottom += us
            panel.text(place, bottom, f"{summary[column]:.1f}", ha="center", va="bottom", size=7)
            places.append(place)
            names.append(f"{name}\nB = {entry['tokens']}" if column == "public" else name)
        ends = first - _BAR / 2, first + len(columns) - 1 + _BAR / 2
        line: dict[str, Any] = {"colors": "black", "linestyles": "dashed", "linewidth": 0.8}
        panel.hlines(entry["floor_us"], *ends, **line, label=None if group else "floor")
    panel.set_xticks(places, names, size=7)
    panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
