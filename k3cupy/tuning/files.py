"""Measurements as a file to share: written with what it was measured on, read with suspicion."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3cupy.ops import checks, gemm_cache
from k3cupy.ops.gemm_entry import USER, GemmEntry, entry_of
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.timing import environment

_ABOUT = "Measured by `python -m k3cupy tune`."


def write_export(
    path: Path, entries: Iterable[GemmEntry], device: DeviceInfo, commit: str | None = None
) -> None:
    """Write measurements of this machine with GPU, driver, versions, commit and date.

    Args:
        path: of the file; its folder is made.
        entries: measured with the present kernels.
        device: the GPU.
        commit: of the sources, where they are not in a git checkout.
    """
    facts = environment.describe(device.index, commit)
    named = ("num_sms", "driver", "nvrtc", "packages", "commit", "date")
    header = {
        "schema": gemm_cache.SCHEMA,
        "unit": gemm_cache.UNIT,
        "gpu": device.name,
        "arch": device.arch,
        "measured_by_us": True,
        "about": _ABOUT,
        **{name: facts[name] for name in named},
        "sources": gemm_cache.sources_digest(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(gemm_cache.table_text(header, map(undated, entries)), encoding="utf-8")


def undated(entry: GemmEntry) -> GemmEntry:
    """Return an entry for a file whose header says when and with which kernels it was measured."""
    return dataclasses.replace(entry, date="", sources="")


def read_export(path: Path) -> tuple[Mapping[str, Any], tuple[GemmEntry, ...]]:
    """Return header and entries of a file that ``write_export`` wrote, every entry checked.

    Raises:
        ValueError: it is none, or an entry is wrong; the text names the file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != gemm_cache.SCHEMA:
            raise ValueError(f"schema {document['schema']!r} instead of {gemm_cache.SCHEMA}")
        if not document["measured_by_us"]:
            raise ValueError("figures that nobody measured")
        rows = list(document.pop("entries"))
        entries = tuple(entry_of(row, USER) for row in rows)
        header = {name: document[name] for name in ("gpu", "sources")} | document
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        told = f"{path}, which is not one ({type(error).__name__}: {error})"
        checks.reject("import", "a file made by `python -m k3cupy tune --export`", told)
    return header, entries


def import_file(path: Path, device: DeviceInfo) -> Sequence[GemmEntry]:
    """Add the entries of an exported file to the user cache; they replace those of their products.

    Raises:
        ValueError: the file is none, or of another GPU, or of other kernels.
    """
    header, entries = read_export(path)
    if header["gpu"] != device.name:
        checks.reject(
            "import",
            f"measurements of {device.name}",
            f"those of {header['gpu']} in {path}",
            "Another GPU is measured anew: python -m k3cupy tune",
        )
    if header["sources"] != gemm_cache.sources_digest():
        checks.reject(
            "import",
            "measurements of the kernels of this version",
            f"those of another in {path}",
            "Measure anew: python -m k3cupy tune",
        )
    gemm_cache.add(map(undated, entries), device)
    return entries
