"""What pages say of a result besides its whole table, so that no figure is copied by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from k3cupy.bench.forms import window_summary

_WINDOWS = {
    "mla-front": "MLA front: qkv_a to attention",
    "kda-front": "KDA front: in_proj, f_b",
    "mla-back": "MLA back: W_UV, gate, o_proj",
    "moe-front": "MoE front: router, shared expert",
}
_GAIN_TOKENS = (1, 16)
_FEW = 16

Document = Mapping[str, Any]


def digests_of(document: Document) -> dict[str, str]:
    """Return the Markdown of each digest that a benchmark's document has, by its marker."""
    return {
        name: of(document) for name, of in DIGESTS.get(document.get("benchmark", ""), {}).items()
    }


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _window_gain(document: Document) -> str:
    """Return a few rows for people who have not heard of us."""
    rows = []
    for entry in document["entries"]:
        if entry["tokens"] not in _GAIN_TOKENS:
            continue
        found = window_summary(entry)
        fewer = found["fewer"]
        times = entry["floor_us"], *(found[name] for name in ("cublas", "plan", "ours"))
        rows.append(
            (
                _WINDOWS[entry["kind"]],
                str(entry["tokens"]),
                *(f"{us:.2f}" for us in times),
                f"{found['over_plan']:.3f}",
                _figure(fewer, ".2f"),
                _figure(fewer and fewer / found["plan"], ".3f"),
            )
        )
    headers = ["window", "tokens", "weights only read", "cuBLAS", "vLLM's plan"]
    headers += ["k3cupy", "x vLLM's plan", "in fewer launches", "x vLLM's plan"]
    return _table(headers, rows)


def _window_means(document: Document) -> str:
    """Return the geometric means over the public plan."""
    rows = []
    for kind in dict.fromkeys(entry["kind"] for entry in document["entries"]):
        few = [e for e in document["entries"] if e["kind"] == kind and e["tokens"] <= _FEW]
        found = [window_summary(entry) for entry in few]
        fewer = [s["fewer"] / s["plan"] for s in found if s["fewer"] is not None]
        mean = statistics.geometric_mean
        over = mean(s["over_plan"] for s in found) if found else None
        rows.append(
            (f"`{kind}`", *(_figure(x, ".3f") for x in (over, mean(fewer) if fewer else None)))
        )
    return _table(("window", "x public plan", "in fewer launches"), rows)


def _window_losses(document: Document) -> str:
    """Return the rows in which we lose, as a list."""
    lost = []
    for entry in document["entries"]:
        found = window_summary(entry)
        where = f"`{entry['kind']}` with {entry['tokens']} token{'s' * (entry['tokens'] > 1)}"
        if found["over_plan"] > 1:
            lost.append(f"{where}: {found['over_plan']:.3f} x the public plan")
        if (found["fewer_over_ours"] or 0) > 1:
            lost.append(
                f"{where}, in fewer launches: {found['fewer_over_ours']:.3f} x ours, separate"
            )
    told = lost or [f"in no row of {len(document['entries'])}"]
    return "".join(f"- {line}\n" for line in told)


DIGESTS: dict[str, dict[str, Callable[[Document], str]]] = {
    "window": {
        "window-gain": _window_gain,
        "window-means": _window_means,
        "window-losses": _window_losses,
    }
}
"""Benchmark -> marker on a page -> what stands there."""
