"""Drawings of results; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3cupy.bench.forms import PAGE_SHAPES, gemm_summary, window_summary

_Value = Callable[[Mapping[str, Any]], float | None]
_Lines = Mapping[str, _Value]

_COLUMNS = 3

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#000000")
"""Okabe and Ito's: told apart by colour-blind readers, and by their greys in print."""

_HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo", "++")
_MARKS = "os^Dv<>P"


def _saved(figure: Any, document: Mapping[str, Any], title: str, path: Path) -> None:
    """Write a picture, with what was measured where and when above it."""
    e = document["environment"]
    figure.suptitle(f"{title}, {e['gpu']}, {e['date']}, commit {e['commit'][:12]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _by_tokens(panel: Any, entries: Sequence[Mapping[str, Any]], lines: _Lines, unit: str) -> None:
    """Draw a line a name over the numbers of tokens, none where a value is none."""
    for place, (name, value) in enumerate(lines.items()):
        points = [(entry["tokens"], value(entry)) for entry in entries]
        drawn = [point for point in points if point[1] is not None]
        if drawn:
            style: dict[str, Any] = {
                "color": _COLORS[place],
                "marker": _MARKS[place],
                "markersize": 4,
            }
            panel.plot(*zip(*drawn, strict=True), label=name, **style)
    tokens = sorted({entry["tokens"] for entry in entries})
    panel.set(xscale="log", xlabel="tokens", ylabel=unit)
    panel.set_xticks(tokens, [str(count) for count in tokens], size=7, rotation=90)
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def _kinds(document: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the entries by their kind, in order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in document["entries"]:
        found.setdefault(entry["kind"], []).append(entry)
    return found


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
        ours = [gemm_summary(e)["over_floor"] for e in entries]
        panel.plot(tokens, ours, "o-", color=_COLORS[0], label="k3cupy")
        panel.plot(tokens, floors, "s--", color=_COLORS[1], label="F.linear")
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set(
            title=f"{kind}, floor {entries[0]['floor_us']:.2f} us", xscale="log", ylim=(0, None)
        )
        panel.set_xticks(tokens, [str(count) for count in tokens])
        panel.set(xlabel="M", ylabel="time / floor")
    figure.axes[0].legend()
    _saved(figure, document, "Fused-A GEMM, cold weights", path)


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
    _saved(figure, document, "Windows of a layer, cold weights", path)


def _draw_window(panel: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    """Draw the entries of one window side by side, a group a number of tokens."""
    columns = [column for column in _WINDOW_COLUMNS if column in entries[0]["added_us"]]
    step = len(columns) + 1
    places, names = [], []
    styles: dict[str, dict[str, Any]] = {}
    for group, entry in enumerate(entries):
        first, summary = group * step, window_summary(entry)
        for place, column in enumerate(columns, first):
            bottom, name = 0.0, _WINDOW_COLUMNS[column]
            for kernel, us in entry["added_us"][column].items():
                label = None if kernel in styles else kernel
                turn = len(styles) % len(_COLORS)
                look = {"color": _COLORS[turn], "hatch": _HATCHES[turn], "edgecolor": "white"}
                panel.bar(place, us, _BAR, bottom, label=label, **styles.setdefault(kernel, look))
                bottom += us
            panel.text(place, bottom, f"{summary[column]:.1f}", ha="center", va="bottom", size=7)
            places.append(place)
            names.append(f"{name}\nB = {entry['tokens']}" if column == "public" else name)
        ends = first - _BAR / 2, first + len(columns) - 1 + _BAR / 2
        line: dict[str, Any] = {"colors": "black", "linestyles": "dashed", "linewidth": 0.8}
        panel.hlines(entry["floor_us"], *ends, **line, label=None if group else "floor")
    panel.set_xticks(places, names, size=7)
    panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _chosen_us(entry: Mapping[str, Any]) -> float:
    """Return the time of the configuration that the shipped table chose."""
    chosen = entry["dispatched"]
    times = [c["us"] for c in entry["candidates"] if chosen.items() <= c.items()]
    return float(min(times))


def plot_decode(document: Mapping[str, Any], path: Path) -> None:
    """Draw the decode epilogue in its chain against tokens: ours, the floor and the peers.

    Args:
        document: of ``bench decode``.
        path: of the picture; its ending names the format.
    """
    from matplotlib.figure import Figure

    lines: _Lines = {
        "k3cupy": _chosen_us,
        "public structure, the better": lambda e: min(e["public_us"].values(), default=None),
        "SGLang's structure": lambda e: e.get("sglang_us"),
        "unfused PyTorch": lambda e: e["torch_us"],
        "an empty kernel (floor)": lambda e: e["empty_us"],
    }
    shown = [e for e in document["entries"] if e["scenario"] == "chain" and e["pdl"]]
    if not shown:
        raise ValueError("no entry is of the chain with PDL")
    kinds = _kinds({"entries": shown})
    figure = Figure(figsize=(5.5 * len(kinds), 4.2), layout="constrained")
    for panel, kind in zip(figure.subplots(1, len(kinds), squeeze=False).flat, kinds, strict=True):
        _by_tokens(panel, kinds[kind], lines, "us added to the chain")
        panel.set(title=kind, yscale="log")
    figure.axes[0].legend(fontsize=7)
    _saved(figure, document, "MLA decode epilogue", path)


def plot_linear(document: Mapping[str, Any], path: Path) -> None:
    """Draw the speed-up of the low-latency linear over ``F.linear``: a row a shape, a column M.

    Args:
        document: of ``bench linear``.
        path: of the picture; its ending names the format.
    """
    from matplotlib.figure import Figure

    kinds = _kinds(document)
    tokens = sorted({entry["tokens"] for entry in document["entries"]})
    gains = {
        (kind, e["tokens"]): e["linear_us"] / e["dispatched_us"]
        for kind, entries in kinds.items()
        for e in entries
    }
    cells = [[gains.get((kind, m), float("nan")) for m in tokens] for kind in kinds]
    figure = Figure(
        figsize=(3.5 + 0.8 * len(tokens), 1.5 + 0.32 * len(kinds)), layout="constrained"
    )
    panel = figure.subplots()
    image = panel.imshow(cells, cmap="cividis", aspect="auto", vmin=1)
    for row, kind in enumerate(kinds):
        for column, m in enumerate(tokens):
            if (kind, m) in gains:
                gain = gains[kind, m]
                dark = gain < (1 + max(gains.values())) / 2
                style: dict[str, Any] = {"ha": "center", "va": "center", "size": 8}
                panel.text(column, row, f"{gain:.2f}", color="white" if dark else "black", **style)
    panel.set_xticks(range(len(tokens)), [str(m) for m in tokens])
    panel.set_yticks(range(len(kinds)), list(kinds), size=8)
    panel.set(xlabel="M", ylabel="N x K")
    figure.colorbar(image, label="times as fast as F.linear")
    _saved(figure, document, "Low-latency linear", path)


def plot_prefill(document: Mapping[str, Any], path: Path) -> None:
    """Draw the bandwidth of the prefill epilogues in their chain, and of the copies beside them.

    Args:
        document: of ``bench prefill``.
        path: of the picture; its ending names the format.
    """
    from matplotlib.figure import Figure

    def speed(time: _Value) -> _Value:
        def of(entry: Mapping[str, Any]) -> float | None:
            us = time(entry)
            return None if us is None else entry["bytes"] / us / 1e3

        return of

    lines: _Lines = {
        "k3cupy": speed(_chosen_us),
        "public structure": speed(lambda e: e.get("public_us")),
        "copy, a warp a row": speed(lambda e: e.get("row_copy_us")),
        "PyTorch's copy": speed(lambda e: e["copy_us"]),
        "unfused PyTorch": speed(lambda e: e["torch_us"]),
    }
    kinds = _kinds(document)
    figure = Figure(figsize=(4.5 * _COLUMNS, 7), layout="constrained")
    panels = figure.subplots(-(-len(kinds) // _COLUMNS), _COLUMNS, squeeze=False).flat
    for panel in panels:
        panel.set_axis_off()
    for panel, (kind, entries) in zip(figure.axes, kinds.items(), strict=False):
        panel.set_axis_on()
        _by_tokens(panel, entries, lines, "GB/s")
        panel.set_title(kind.removeprefix("fused_mla_"), size=9)
    figure.axes[0].legend(fontsize=7)
    _saved(figure, document, "Prefill and context epilogues, in the chain", path)


PLOTS: Mapping[str, Callable[[Mapping[str, Any], Path], None]] = {
    "decode": plot_decode,
    "gemm": plot_gemm,
    "linear": plot_linear,
    "prefill": plot_prefill,
    "window": plot_windows,
}
"""By the name of the benchmark, as its documents have it."""
