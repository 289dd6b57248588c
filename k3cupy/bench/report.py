"""Results as tables, for the terminal and for the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3cupy.bench.forms import form_of, key_of
from k3cupy.runtime.devices import DeviceInfo

_WIDTH_OF_FILES = 1000
"""Characters: more than any table has."""


def print_table(document: Mapping[str, Any]) -> None:
    """Print a document's entries; times in microseconds. A file or a pipe gets whole lines."""
    form = form_of(document)
    table = Table(title=form.title)
    for column in form.columns:
        table.add_column(column.name, justify="left" if column.is_words else "right")
    for entry in document["entries"]:
        table.add_row(*form.cells(entry))
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(table)
    for line in _remarks(document):
        console.print(line)


def markdown(document: Mapping[str, Any]) -> str:
    """Return a document's entries as a Markdown table with its environment above."""
    e, form = document["environment"], form_of(document)
    packages = ", ".join(
        f"{name} {e['packages'][name]}"
        for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "cuda-core")
        if name in e["packages"]
    )
    lines = [
        f"{e['gpu']} ({e['num_sms']} SMs), driver {e['driver']}, NVRTC {e['nvrtc']}, {packages}, "
        f"commit {e['commit'][:12]}, {e['date']}. {form.unit}.",
        "",
        "| " + " | ".join(column.name for column in form.columns) + " |",
        "|" + " --- |" * len(form.columns),
    ]
    shown = filter(form.is_for_page, document["entries"])
    lines += ["| " + " | ".join(form.cells(entry)) + " |" for entry in shown]
    for line in _remarks(document):
        lines += ["", line]
    return "\n".join(lines) + "\n"


def _remarks(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a run says beside its entries, sentences of the docs."""
    yield from document.get("remarks", ())
    for kind, times in document.get("host_us", {}).items():
        told = ", ".join(f"{name} {us:.1f} us" for name, us in times.items())
        yield f"Host time of a repeated eager call, {kind}: {told}."


def with_shipped_choice(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document whose ``dispatched`` is what the table that ships today would choose.

    A run from before a table recorded the choice of the older one. A benchmark that measures only
    what was chosen keeps it, and so does an entry without a time of today's choice. Alone only the
    older choice was measured, so that time goes.
    """
    choice = form_of(document).choice
    if choice is None:
        return dict(document)
    e = document["environment"]
    gpu = DeviceInfo(
        index=0,
        name=e["gpu"],
        compute_capability=tuple(e["compute_capability"]),
        num_sms=e["num_sms"],
        shared_memory_optin=e.get("shared_memory_optin", 0),
    )

    def renewed(entry: Mapping[str, Any]) -> Mapping[str, Any]:
        config = asdict(choice(entry, gpu))
        has_time = key_of(config) in map(key_of, entry["candidates"])
        if not has_time or key_of(config) == key_of(entry["dispatched"]):
            return entry
        alone = {name: us for name, us in entry.get("alone_us", {}).items() if name != "ours"}
        return {**entry, "dispatched": config, "alone_us": alone}

    return {**document, "entries": list(map(renewed, document["entries"]))}


def has_markers(path: Path, marker: str) -> bool:
    """Say whether a page has a place of that name."""
    page = path.read_text(encoding="utf-8")
    return all(f"<!-- {marker}:{end} -->" in page for end in ("begin", "end"))


def insert_markdown(path: Path, text: str, marker: str = "results") -> None:
    """Replace what stands between the result markers of a documentation page.

    Args:
        path: the page.
        text: Markdown.
        marker: the name in the markers; each benchmark has its own.

    Raises:
        ValueError: the page has no markers.
    """
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    page = path.read_text(encoding="utf-8")
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{path}: expected the markers {begin} and {end}")
    path.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
