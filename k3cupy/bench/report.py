"""Results as tables: for the terminal, for the docs, and the table that the package ships."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3cupy.ops.mla_decode_config import MlaDecodeVariant, choose
from k3cupy.runtime.devices import DeviceInfo

HEADER = (
    "formats",
    "scenario",
    "PDL",
    "B",
    "empty",
    "torch",
    "public 1 / 3",
    "split 1 / 3",
    "best",
    "dispatched",
)


def key_of(config: Mapping[str, Any]) -> str:
    """Return a configuration as ``split/threads/chunks``."""
    return f"{config['split']}/{config['block_size']}/{config['chunks_per_thread']}"


def summary(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of an entry that decide: best, dispatched, and what they compare with.

    ``split1_us`` and ``split3_us`` are our kernel with one or three warps a row in blocks of 256
    threads; ``public_us`` is the better of the two comparison kernels, or None.
    """
    times = {key_of(candidate): candidate["us"] for candidate in entry["candidates"]}
    best = min(times, key=lambda name: times[name])
    dispatched = key_of(entry["dispatched"])
    public = min(entry["public_us"].values(), default=None)
    return {
        "best": best,
        "best_us": times[best],
        "dispatched": dispatched,
        "dispatched_us": times[dispatched],
        "split1_us": times["1/256/3"],
        "split3_us": times["3/256/1"],
        "dispatched_over_best": times[dispatched] / times[best],
        "public_us": public,
        "dispatched_over_public": None if public is None else times[dispatched] / public,
        "dispatched_over_split": times[dispatched] / min(times["1/256/3"], times["3/256/1"]),
        "over_empty_us": times[dispatched] - entry["empty_us"],
    }


def _cells(entry: Mapping[str, Any]) -> list[str]:
    s = summary(entry)
    return [
        entry["kind"],
        entry["scenario"],
        "on" if entry["pdl"] else "off",
        str(entry["tokens"]),
        f"{entry['empty_us']:.2f}",
        f"{entry['torch_us']:.2f}",
        " / ".join(f"{us:.2f}" for us in entry["public_us"].values()) or "-",
        f"{s['split1_us']:.2f} / {s['split3_us']:.2f}",
        f"{s['best_us']:.2f} ({s['best']})",
        f"{s['dispatched_us']:.2f} ({s['dispatched']})",
    ]


def print_table(entries: Sequence[Mapping[str, Any]]) -> None:
    """Print entries to the terminal; times in microseconds."""
    table = Table(title="MLA decode epilogue, microseconds a launch")
    for name in HEADER:
        table.add_column(name, justify="left" if name in HEADER[:3] else "right")
    for entry in entries:
        table.add_row(*_cells(entry))
    Console(soft_wrap=True).print(table)


def markdown(document: Mapping[str, Any]) -> str:
    """Return a document's entries as a Markdown table with its environment above."""
    e = document["environment"]
    packages = ", ".join(
        f"{name} {e['packages'][name]}"
        for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "cuda-core")
        if name in e["packages"]
    )
    lines = [
        f"{e['gpu']} ({e['num_sms']} SMs), driver {e['driver']}, NVRTC {e['nvrtc']}, {packages}, "
        f"commit {e['commit'][:12]}, {e['date']}. Microseconds a launch.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + " --- |" * len(HEADER),
    ]
    lines += ["| " + " | ".join(_cells(entry)) + " |" for entry in document["entries"]]
    for kind, times in document.get("host_us", {}).items():
        told = ", ".join(f"{name} {us:.1f} us" for name, us in times.items())
        lines += ["", f"Host time of a repeated eager call, {kind}: {told}."]
    return "\n".join(lines) + "\n"


def with_shipped_choice(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document whose ``dispatched`` is what the table that ships today would choose.

    A run from before a table recorded the choice of the older one.
    """
    e = document["environment"]
    gpu = DeviceInfo(0, e["gpu"], tuple(e["compute_capability"]), e["num_sms"], 0)
    entries = []
    for entry in document["entries"]:
        variant = MlaDecodeVariant.of_kind(entry["kind"])
        config, _ = choose(variant, entry["tokens"], entry["heads"], gpu)
        entries.append({**entry, "dispatched": asdict(config)})
    return {**document, "entries": entries}


def insert_markdown(path: Path, text: str) -> None:
    """Replace what stands between the result markers of a documentation page.

    Raises:
        ValueError: the page has no markers.
    """
    begin, end = "<!-- results:begin -->", "<!-- results:end -->"
    page = path.read_text(encoding="utf-8")
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{path}: expected the markers {begin} and {end}")
    path.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def averaged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one document whose candidate times are the mean over several runs of the same GPU.

    Each run counts relative to its own fastest candidate, because machines differ from run to run.

    Raises:
        ValueError: the runs are not of one GPU.
    """
    first = documents[0]
    if len({document["environment"]["gpu"] for document in documents}) != 1:
        raise ValueError("expected results of one GPU, got several")
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for document in documents:
        for entry in document["entries"]:
            times = {key_of(candidate): candidate["us"] for candidate in entry["candidates"]}
            found.setdefault(_identity(entry), []).append(times)
    entries = []
    for entry in first["entries"]:
        runs = found[_identity(entry)]
        fastest = [min(times.values()) for times in runs]
        level = sum(fastest) / len(fastest)
        candidates = []
        for candidate in entry["candidates"]:
            name = key_of(candidate)
            slower = [times[name] / best for times, best in zip(runs, fastest, strict=True)]
            candidates.append({**candidate, "us": round(level * sum(slower) / len(slower), 4)})
        entries.append({**entry, "candidates": candidates})
    return {**first, "entries": entries}


def _identity(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in ("kind", "tokens", "heads", "scenario", "pdl"))


def shipped_table(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decode table for a document's GPU, from the chain with PDL.

    Per row count the fastest configuration; of those within 1%, less than two runs differ by, the
    one that is best over all row counts, so that few instances have to be compiled.
    """
    e = document["environment"]
    measured = [x for x in document["entries"] if x["scenario"] == "chain" and x["pdl"]]
    favour = {kind: _mean_slowdown(measured, kind) for kind in {x["kind"] for x in measured}}
    entries = [
        {
            "kind": entry["kind"],
            "num_rows": entry["tokens"] * (entry["heads"] + 1),
            "tokens": entry["tokens"],
            "num_heads": entry["heads"],
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
        "unit": "us added to the chain, PDL on",
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
