"""The user cache: GEMM measurements of this machine's GPUs, one JSON file a kind of GPU.

A file that cannot be used is ignored with one warning that names it. Writers take a lock beside the
file, read it again, add to it, and put a whole new file in its place, so that readers need no lock
and several processes may measure at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from k3cupy.ops.fused_a_gemm_config import SOURCE as FUSED_A_SOURCE
from k3cupy.ops.gemm_entry import USER, GemmEntry, entry_of
from k3cupy.ops.skinny_gemm_config import SOURCE as SKINNY_SOURCE
from k3cupy.runtime import env, sources
from k3cupy.runtime.devices import DeviceInfo

SCHEMA = 1
UNIT = "us a launch, cold weights"
SOURCES = (FUSED_A_SOURCE, SKINNY_SOURCE)
_FOLDER = f"gemm-v{SCHEMA}"
_LOCK_SECONDS = 60
_AGAIN = "`python -m k3cupy tune` measures anew"

_warned: set[tuple[Path, str]] = set()
_warned_lock = threading.Lock()


def directory() -> Path:
    """Return the folder of the measurements: K3CUPY_CACHE_DIR, or the user's cache folder."""
    named = env.cache_dir() or platformdirs.user_cache_dir("k3cupy")
    return Path(os.path.expanduser(named)) / _FOLDER


def path_of(device: DeviceInfo) -> Path:
    """Return the file of a kind of GPU, whether it exists or not."""
    return directory() / f"{slug(device.name)}.json"


def slug(gpu: str) -> str:
    """Return a GPU's name as a file's: ``NVIDIA H200`` is ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


@functools.cache
def sources_digest() -> str:
    """Return what tells the kernels of this package from those of another version."""
    return sources.shipped_digest(*SOURCES)[:16]


def read(path: Path, gpu: str) -> tuple[GemmEntry, ...]:
    """Return the entries of a file that hold for this package and a kind of GPU.

    No file is no entries. A file or an entry that cannot be used is left out, with one warning that
    names the file and says what is wrong.

    Args:
        path: of the file.
        gpu: the name that the file must carry.
    """
    try:
        text = _text_of(path)
    except FileNotFoundError:
        return ()
    except OSError as error:
        _warn(path, f"the file is ignored, it cannot be read ({error})")
        return ()
    entries = _parsed(path, text, gpu)
    current = tuple(entry for entry in entries if entry.sources == sources_digest())
    if entries and not current:
        _warn(path, "all entries are ignored, they are of the kernels of another version")
    return current


def add(entries: Iterable[GemmEntry], device: DeviceInfo) -> Path | None:
    """Add entries to the file of a GPU; a new entry takes the place of an older one of its product.

    They count in this process after ``gemm_tables.reload()``.

    Args:
        entries: measured here; an empty ``date`` or ``sources`` becomes that of today.
        device: the GPU.

    Returns:
        The file, or None where it cannot be written; then one warning says why.
    """
    from filelock import FileLock  # slow to import, and most processes only read

    path = path_of(device)
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    dated = [
        dataclasses.replace(
            entry, date=entry.date or today, sources=entry.sources or sources_digest()
        )
        for entry in entries
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):
            text = _text_of(path) if path.exists() else ""
            known = _parsed(path, text, device.name) if text else ()
            merged = {entry.key: entry for entry in (*known, *dated)}
            _replace(path, table_text(_header(device), merged.values()))
    except OSError as error:  # a lock that nobody lets go is an OSError too
        _warn(
            path,
            f"nothing was kept, the file cannot be written ({error})",
            "Set K3CUPY_CACHE_DIR to a folder that can",
        )
        return None
    return path


def table_text(header: Mapping[str, Any], entries: Iterable[GemmEntry]) -> str:
    """Return a table as a file has it: facts first, then an entry a line, in order."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in header.items()]
    rows = [f"  {json.dumps(entry.fields())}" for entry in sorted(entries, key=lambda e: e.key)]
    return "\n".join(["{", *lines, ' "entries": [', ",\n".join(rows), " ]", "}", ""])


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")  # what is no text is no JSON either


def _header(device: DeviceInfo) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "unit": UNIT,
        "gpu": device.name,
        "arch": device.arch,
        "measured_by_us": True,
        "about": "Measured on this machine by `python -m k3cupy tune`.",
        "num_sms": device.num_sms,
    }


def _parsed(path: Path, text: str, gpu: str) -> tuple[GemmEntry, ...]:
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}, got {document['schema']!r}")
        if document["gpu"] != gpu:
            raise ValueError(f"expected measurements of {gpu}, got {document['gpu']!r}")
        rows = list(document["entries"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        _warn(path, f"the file is ignored, it is no table of this version ({what})")
        return ()
    found, problems = [], []
    for row in rows:
        try:
            found.append(entry_of(row, USER))
        except ValueError as error:
            problems.append(error)
    if problems:
        count = f"{len(problems)} of {len(rows)} entries"
        _warn(path, f"{count} are ignored, they cannot be used ({problems[0]})")
    return tuple(found)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")
    try:
        os.fchmod(handle, 0o644)  # a service may read what its owner measured
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _warn(path: Path, problem: str, hint: str = _AGAIN) -> None:
    """Warn once for a file and what is wrong with it."""
    with _warned_lock:
        if (path, problem) in _warned:
            return
        _warned.add((path, problem))
    warnings.warn(f"GEMM measurements in {path}: {problem}. {hint}", UserWarning, stacklevel=3)
