"""The user cache: measurements of this machine's GPUs, one table a family of kernels and GPU.

A file that cannot be used is ignored with one warning that names it, and so are bad entries.
Writers take a lock beside the file, read it again, add to it, and put a whole new file in its
place, so that readers need no lock and several processes may measure at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from k3cupy.call.choice import USER
from k3cupy.call.plans import tables_changed
from k3cupy.choose.table import (
    SCHEMA,
    UNITS,
    Entry,
    Table,
    entry_of,
    header_of,
    kernels_digest,
    parts_of,
    slug,
    table_text,
)
from k3cupy.runtime import env
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import shown
from k3cupy.runtime.warn import warn_user

_LOCK_SECONDS = 60
_MOST_BYTES = 1 << 26
_NOWHERE = Path(os.devnull)
"""The folder of a user without a home: ``~`` would be one of the working directory."""


def directory() -> Path:
    """Return the folder of the measurements: K3CUPY_CACHE_DIR, or the user's cache folder."""
    named = env.cache_dir()
    if not named:
        import platformdirs  # only here, because a process that names a folder need not wait for it

        try:
            named = platformdirs.user_cache_dir("k3cupy")
        except RuntimeError:  # there is no home; older versions return the "~" of it
            return _NOWHERE
    return _NOWHERE if named.startswith("~") else Path(named, f"tables-v{SCHEMA}")


def path_of(family: str, gpu: str) -> Path:
    """Return the file of a family on a kind of GPU, whether it exists or not."""
    return directory() / slug(gpu) / f"{family}.json"


def table(family: str, gpu: str) -> Table:
    """Return what was measured on this machine with the kernels of this package.

    No file is no entries. A file or an entry that cannot be used is left out, with one warning that
    names the file and says what is wrong.
    """
    path = path_of(family, gpu)
    try:
        problems = _problems(path, family, gpu)
    except OSError as error:
        _warn(path, f"the file is ignored, it cannot be read ({error})")
        problems = {}
    digest = kernels_digest(family) if problems else ""
    every = [row for rows in problems.values() for row in rows if isinstance(row, dict)]
    if every and not any(row.get("sources") == digest for row in every):
        _warn(path, "all entries are ignored, they are of the kernels of another version")

    def read(problem: str, rows: Iterable[Any]) -> dict[int, Entry]:
        found = _entries(path, problem, rows)
        return {entry.size: entry for entry in found if entry.sources == digest}

    return Table(USER, {"gpu": gpu}, problems, read)


def add(family: str, entries: Iterable[Entry], gpu: DeviceInfo) -> Path | None:
    """Add entries to the file of a GPU; a new entry takes the place of an older one of its key.

    They count in this process after ``reload()``. An empty ``date`` or ``sources`` becomes that of
    today.

    Returns:
        The file, or None where it cannot be written; then one warning says why.
    """
    from filelock import FileLock  # slow to import, and most processes only read

    path = path_of(family, gpu.name)
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    digest = kernels_digest(family)
    dated = [
        dataclasses.replace(entry, date=entry.date or today, sources=entry.sources or digest)
        for entry in entries
    ]
    header = header_of(family, gpu, "Measured on this machine by `python -m k3cupy tune`.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):
            problems = _problems(path, family, gpu.name)
            known = [entry for each in problems for entry in _entries(path, each, problems[each])]
            merged = {entry.key: entry for entry in (*known, *dated)}
            replace_file(path, table_text(header, merged.values()))
    except OSError as error:  # a lock that nobody lets go is an OSError too
        told = f"nothing was kept, the file cannot be written ({error})"
        _warn(path, told, "Set K3CUPY_CACHE_DIR to a folder that can")
        return None
    return path


def reload() -> None:
    """Forget what was read, so that the next call reads it as it is now."""
    tables_changed()


def _problems(path: Path, family: str, gpu: str) -> dict[str, list[Any]]:
    """Return what a file has of each problem: nothing where there is none, or of something else."""
    if _NOWHERE in path.parents:
        return {}
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"expected at most {_MOST_BYTES} bytes")
        if not path.is_file():  # reading from a pipe or a device might never end
            raise OSError("it is no regular file")
        header, problems = parts_of(path.read_text("utf-8", "replace"))  # no text is no JSON either
        if header["gpu"] != gpu:
            raise ValueError(f"expected measurements of {gpu}, got {shown(header['gpu'])}")
        if header.get("unit") != UNITS[family]:
            told = f"in {shown(header.get('unit'))}, not in {UNITS[family]!r}"
            _warn(path, f"all entries are ignored, they were measured in another way ({told})")
            return {}
    except FileNotFoundError:
        return {}
    except ValueError as error:
        _warn(path, f"the file is ignored, it is no table of this version ({error})")
        return {}
    return problems


def _entries(path: Path, problem: str, rows: Iterable[Any]) -> list[Entry]:
    """Return the entries of a problem that can be used, those of other kernels too."""
    found = []
    for row in rows:
        try:
            found.append(entry_of(problem, row))
        except ValueError as error:
            _warn(path, f"bad entries are ignored, as one of {problem:.80} ({error})")
    return found


def replace_file(path: Path, text: str) -> None:
    """Put a whole new file in the place of another one, or of none."""
    import tempfile  # only here

    descriptor, new = tempfile.mkstemp(".tmp", dir=path.parent)  # follows no link
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(new, 0o644)  # a service may read what its owner measured
        os.replace(new, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)


_warned: set[tuple[Path, str]] = set()


def _warn(path: Path, problem: str, hint: str = "`python -m k3cupy tune` measures anew") -> None:
    """Warn of a file, once for what becomes of it: the problem up to its first comma."""
    key = path, problem.partition(",")[0]
    if key not in _warned:
        _warned.add(key)
        warn_user(f"measurements in {path}: {problem}. {hint}")
