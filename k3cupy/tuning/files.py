"""Measurements as a file to share: written with what it was measured on, read with suspicion."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3cupy.choose import cache
from k3cupy.choose.table import (
    FAMILIES,
    UNITS,
    Entry,
    entry_of,
    header_of,
    kernels_digest,
    parts_of,
    table_text,
)
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import reject, shown
from k3cupy.timing import environment


def export_header(family: str, gpu: DeviceInfo) -> dict[str, Any]:
    """Return GPU, driver, versions, commit and date of measurements of this machine."""
    facts = environment.describe(gpu.index)
    return {
        **header_of(family, gpu, "Measured by `python -m k3cupy tune`."),
        "sources": kernels_digest(family),
        **{name: facts[name] for name in ("driver", "nvrtc", "packages", "commit", "date")},
    }


def write_table(path: Path, header: Mapping[str, Any], entries: Iterable[Entry]) -> None:
    """Write a table, making its folder. A file is whole at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = table_text(header, entries)
    if path.exists() and not path.is_file():  # a pipe, or a folder, which refuses
        path.write_text(text, encoding="utf-8")
    else:
        cache.replace_file(path.resolve(), text)


def undated(entry: Entry) -> Entry:
    """Return an entry for a file whose header says when and with which kernels it was measured."""
    return dataclasses.replace(entry, date="", sources="")


def read_export(path: Path) -> tuple[Mapping[str, Any], tuple[Entry, ...]]:
    """Return header and entries of a file that ``tune`` exported, every entry checked.

    Raises:
        ValueError: it is none, or an entry is wrong; the text names the file.
    """
    try:
        header, problems = parts_of(path.read_text(encoding="utf-8"))
        if header["family"] not in FAMILIES:
            raise ValueError(f"there is no family {shown(header['family'])}")
        _ = header["arch"], header["date"], header["sources"]
        entries = tuple(entry_of(name, row) for name, rows in problems.items() for row in rows)
        if header["gpu"] is None or not all(entry.times for entry in entries):
            raise ValueError("figures that nobody measured")
    except (OSError, KeyError, TypeError, ValueError) as error:
        told = f"{path}, which is not one ({type(error).__name__}: {error})"
        reject("import", "a file made by `python -m k3cupy tune --export`", told)
    return header, entries


def import_file(path: Path, gpu: DeviceInfo) -> tuple[Entry, ...]:
    """Add the entries of an exported file to the user cache; they replace those of their problems.

    Raises:
        ValueError: the file is none, or of another GPU, or of other kernels.
    """
    header, entries = read_export(path)
    if header["gpu"] != gpu.name:
        found = f"those of {header['gpu']} in {path}"
        hint = "Another GPU is measured anew: python -m k3cupy tune"
        reject("import", f"measurements of {gpu.name}", found, hint)
    hint = "Measure anew: python -m k3cupy tune"
    if header["sources"] != kernels_digest(header["family"]):
        wanted = "measurements of the kernels of this version"
        reject("import", wanted, f"those of another in {path}", hint)
    if header.get("unit") != UNITS[header["family"]]:
        told = f"{shown(header.get('unit'))} in {path}"
        reject("import", f"measurements in {UNITS[header['family']]!r}", told, hint)
    cache.add(header["family"], map(undated, entries), gpu)
    cache.reload()
    return entries
