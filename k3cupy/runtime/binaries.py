"""The disk cache: what either compiler made, kept for the next process.

One file is one instance, ``k3cupy-<key>.cubin`` in CuPy's cache folder: the SHA-256 digest of its
name and of the rest, then the rest. Who can write such a file decides what runs on the GPU, so
folders and files that others can write are refused, and a file is loaded when its digest is right.
A file that cannot be used is written again. Nothing here raises: without a cache, kernels are
compiled in memory, with one warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3cupy.runtime import toolchain

_PREFIX = "k3cupy-"  # another layout of the files needs another one
_DIGEST_SIZE = hashlib.sha256().digest_size
_MOST_BYTES = 1 << 26
"""Of a file: kernels have some 100 KB."""

_STALE_SECONDS = 3600
"""A file that was half written this long ago is of a process that was killed."""


def find(key: str) -> bytes | None:
    """Return what was kept under a key, or None."""
    if toolchain.in_memory():
        return None
    try:
        return _read(_trusted(toolchain.cache_directory()) / _name(key))
    except FileNotFoundError:
        return None
    except OSError as error:
        toolchain.warn_of_cache(error)
        return None


def keep(key: str, content: bytes) -> None:
    """Keep the content under a key for the next process that asks."""
    if toolchain.in_memory():
        return
    try:
        folder = toolchain.cache_directory()
        toolchain.make_private(folder)
        _write(_trusted(folder) / _name(key), content)
    except OSError as error:
        toolchain.warn_of_cache(error)


def _name(key: str) -> str:
    return f"{_PREFIX}{key}.cubin"


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _trusted(folder: Path) -> Path:
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    problem = _problem(status)
    if problem:
        raise PermissionError(f"{folder} {problem}")
    return folder


def _problem(status: os.stat_result) -> str:
    """Return why somebody else could have written it, or nothing."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user, {status.st_uid}, who could put any code there"
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        hint = "" if mode & stat.S_ISVTX else ": `chmod go-w` it"  # /tmp is everybody's
        return f"has mode {mode:04o}, so that others could put any code there{hint}"
    return ""


def _read(path: Path) -> bytes | None:
    try:
        # What stands there may be anything: opening a named pipe would wait for a writer.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or _problem(status):
                return None
            if status.st_size > _MOST_BYTES:
                return None
            data = file.read()
    except OSError:
        return None
    content = data[_DIGEST_SIZE:]
    return content if data[:_DIGEST_SIZE] == _digest(path.name, content) else None


def _write(path: Path, content: bytes) -> None:
    """Write a new file and rename it, so that readers see the whole file or none."""
    _remove_stale(path.parent)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        # Mode 0644, less what the umask takes: for the next user to read.
        with open(partial, "xb", opener=lambda p, flags: os.open(p, flags, 0o644)) as file:
            file.write(_digest(path.name, content) + content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@functools.cache
def _remove_stale(folder: Path) -> None:
    for partial in folder.glob(f"{_PREFIX}*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                partial.unlink()


@dataclass
class Asked:
    """What CuPy asked for.

    Attributes:
        found: it was here; else CuPy compiled.
        made: what it gave to be kept, by key; nothing where it compiles in memory.
    """

    found: bool = False
    made: dict[str, bytes] = field(default_factory=dict)


_asked: ContextVar[Asked | None] = ContextVar("k3cupy_asked", default=None)


class _Backend:
    """What CuPy keeps binaries by: this cache while it compiles for us, else what it had."""

    def __init__(self, others: Any) -> None:
        self._others = others

    def load(self, name: str) -> Any:
        asked = _asked.get()
        if asked is None:
            return self._others.load(name)
        content = find(_key(name))
        asked.found = content is not None
        return content

    def save(self, name: str, content: bytes, source: str) -> None:
        asked = _asked.get()
        if asked is None:
            self._others.save(name, content, source)
        else:
            asked.found, asked.made[_key(name)] = False, content


def _key(name: str) -> str:
    """Return CuPy's key, which covers text, name expressions, options, compiler, architecture."""
    return name.removesuffix(".cubin")


@contextlib.contextmanager
def in_place_of_cupys(compiler: Any) -> Iterator[Asked]:
    """Have CuPy ask this cache in place of its own, in the present thread.

    Raises:
        OSError: this CuPy has no place for another cache.
    """
    install = getattr(compiler, "_set_kernel_cache_backend", None)
    if install is None:
        raise OSError("this release of CuPy has no place for another cache")
    if not isinstance(compiler._kernel_cache_backend, _Backend):
        install(_Backend(compiler._kernel_cache_backend))
    asked, before = Asked(), _asked.get()
    try:
        _asked.set(asked)
        yield asked
    finally:
        _asked.set(before)
