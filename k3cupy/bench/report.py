"""Results as tables: for the terminal, for the docs, and the table that the package ships."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3cupy.bench.forms import Form, form_of, key_of
from k3cupy.runtime.devices import DeviceInfo


def print_table(document: Mapping[str, Any]) -> None:
    """Print a document's entries to the terminal; times in microseconds."""
    form = form_of(document)
    table = Table(title=form.title)
    for column in form.columns:
        table.add_column(column.name, justify="left" if column.is_words else "right")
    for entry in document["entries"]:
        table.add_row(*form.cells(entry))
    console = Console(soft_wrap=True)
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
        f"commit {e['commit'][:12]}, {e['date']}. Microseconds a launch.",
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

    A run from before a table recorded the choice of the older one. A benchmark from which no table
    is made keeps what it measured.
    """
    table = form_of(document).table
    if table is None:
        return dict(document)
    e = document["environment"]
    gpu = DeviceInfo(
        index=0,
        name=e["gpu"],
        compute_capability=tuple(e["compute_capability"]),
        num_sms=e["num_sms"],
        shared_memory_optin=e.get("shared_memory_optin", 0),
    )
    entries = [
        {**entry, "dispatched": dict(table.choice(entry, gpu))} for entry in document["entries"]
    ]
    return {**document, "entries": entries}


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


def averaged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one document whose candidate times are the mean over several runs of the same GPU.

    Each run counts relative to its own fastest candidate, because machines differ from run to run.
    An entry that only some runs have is the mean of those.

    Raises:
        ValueError: the runs are not of one GPU.
    """
    first = documents[0]
    identity = _identity_of(form_of(first))
    if len({document["environment"]["gpu"] for document in documents}) != 1:
        raise ValueError("expected results of one GPU, got several")
    if len({document.get("benchmark") for document in documents}) != 1:
        raise ValueError("expected results of one benchmark, got several")
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    first_of: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for document in documents:
        for entry in document["entries"]:
            times = {key_of(candidate): candidate["us"] for candidate in entry["candidates"]}
            found.setdefault(identity(entry), []).append(times)
            first_of.setdefault(identity(entry), entry)
    entries = []
    for key, entry in first_of.items():
        runs = found[key]
        fastest = [min(times.values()) for times in runs]
        level = sum(fastest) / len(fastest)
        candidates = []
        for candidate in entry["candidates"]:
            name = key_of(candidate)
            slower = [times[name] / best for times, best in zip(runs, fastest, strict=True)]
            candidates.append({**candidate, "us": round(level * sum(slower) / len(slower), 4)})
        entries.append({**entry, "candidates": candidates})
    return {**first, "entries": entries}


def _identity_of(form: Form) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    return lambda entry: tuple(entry[name] for name in form.identity)


def shipped_table(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table that a document's GPU ships with.

    Per row count the fastest configuration; of those within 1%, less than two runs differ by, the
    one that is best over all row counts, so that few instances have to be compiled.

    Raises:
        ValueError: no table is made from this benchmark.
    """
    e, form = document["environment"], form_of(document).table
    if form is None:
        raise ValueError(f"no table is made from results of bench {document['benchmark']}")
    measured = [x for x in document["entries"] if form.is_for_table(x)]
    favour = {kind: _mean_slowdown(measured, kind) for kind in {x["kind"] for x in measured}}
    entries = [
        {
            **form.place(entry),
            "chosen": _choice(entry, favour[entry["kind"]]),
            "us": {key_of(candidate): candidate["us"] for candidate in entry["candidates"]},
        }
        for entry in measured
    ]
    facts = {
        name: e[name]
        for name in (
            "compute_capability",
            "num_sms",
            "driver",
            "nvrtc",
            "packages",
            "commit",
            "date",
        )
    }
    return {
        "schema": 1,
        "unit": form.unit,
        "gpus": {e["gpu"]: {**facts, "entries": entries}},
    }


_CLOSE = 1.01


def _mean_slowdown(entries: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float]:
    """Return per configuration how much slower than the fastest it is, on average."""
    ratios: dict[str, list[float]] = {}
    for entry in entries:
        if entry["kind"] == kind:
            fastest = min(candidate["us"] for candidate in entry["candidates"])
            for candidate in entry["candidates"]:
                ratios.setdefault(key_of(candidate), []).append(candidate["us"] / fastest)
    return {name: sum(found) / len(found) for name, found in ratios.items()}


def _choice(entry: Mapping[str, Any], slowdown: Mapping[str, float]) -> dict[str, Any]:
    fastest = min(candidate["us"] for candidate in entry["candidates"])
    close = [c for c in entry["candidates"] if c["us"] <= fastest * _CLOSE]
    chosen = min(close, key=lambda candidate: slowdown[key_of(candidate)])
    return {name: value for name, value in chosen.items() if name != "us"}


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
