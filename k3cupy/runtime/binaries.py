"""The disk cache: what either compiler made, kept for the next process.

One file is one instance, ``k3cupy-<key>.cubin`` in CuPy's cache folder: the SHA-256 digest of its
name and of the rest, then the rest. Who can write such a file decides what runs on the GPU, so
folders and files that others can write are refused, and a file is loaded when its digest is right.
A file that cannot be used is written again. Without a cache, kernels are compiled in memory, with
one warning.

Of several processes that miss the same binary one compiles it. It locks a byte of one file,
``k3cupy.lock``, at a place that the key decides: the system lets go of it when the process ends,
however it ends, and there is one such file however many kernels there are. (A library's lock is of
a whole file, so it would take one a kernel, or have kernels wait for others.) Where a file cannot
be locked, each process compiles for itself.
"""

from __future__ import annotations

import contextlib
import errno
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

from k3cupy.runtime import env, toolchain
from k3cupy.runtime.errors import BusyError, MissingError

_PREFIX = "k3cupy-"  # another layout of the files needs another one
_DIGEST_SIZE = hashlib.sha256().digest_size
_MOST_BYTES = 1 << 26
"""Of a file: kernels have some 100 KB."""

_STALE_SECONDS = 3600
"""A file that was half written this long ago is of a process that was killed."""

_LOCK = "k3cupy.lock"
_POLL_SECONDS = 0.01
_LONGEST_WAIT = 120
"""Seconds: whoever has not finished by then was stopped, and the next one compiles too."""

patient: ContextVar[bool] = ContextVar("k3cupy_patient", default=True)
"""Whether to wait for another process that compiles the same, or to raise ``BusyError``."""


def find(key: str) -> bytes | None:
    """Return what was kept under a key, or None."""
    if toolchain.in_memory():
        return None
    try:
        return read(toolchain.cache_directory(), key)
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
        write(folder, key, content)
    except OSError as error:
        toolchain.warn_of_cache(error)


def read(folder: Path, key: str) -> bytes | None:
    """Return what a folder has under a key, or None.

    Raises:
        OSError: there is no such folder, or others can write there.
    """
    return _read(path_in(trusted(folder), key))


def write(folder: Path, key: str, content: bytes) -> Path:
    """Write a file of a folder that is there, and return it.

    Raises:
        OSError: it cannot be written, or others can write there.
    """
    path = path_in(trusted(folder), key)
    _write(path, content)
    return path


@contextlib.contextmanager
def claimed(key: str) -> Iterator[bytes | None]:
    """Give what was kept under a key, or None to the one process that is to make and keep it.

    Raises:
        BusyError: another process makes it, and the present thread is not ``patient``.
        MissingError: it is not there, and K3CUPY_NO_COMPILE forbids to make it.
    """
    content = find(key)
    if content is None and env.no_compile():
        raise MissingError
    lock = None if content is not None or toolchain.in_memory() else _Lock(key)
    if lock is None:
        yield content
        return
    while not lock.acquire():
        if not patient.get():
            raise BusyError
        time.sleep(_POLL_SECONDS)
    try:
        yield find(key)  # who had the lock before may have made it
    finally:
        lock.release()


_lock_files: dict[tuple[int, Path], int] = {}
"""Open files by process and folder. None is ever closed: with the first one that is, a process
loses all locks of that file. A fork has none of its parent's locks, and opens its own."""

_busy_since: dict[str, float] = {}


class _Lock:
    """The right of one process to compile an instance, where the file system knows locks."""

    def __init__(self, key: str) -> None:
        self._key, self._file = key, -1
        # A place among 2**56 is nobody else's.
        self._place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")

    def acquire(self) -> bool:
        """Return whether to go on: with the lock, without any, or after too long a wait."""
        import fcntl

        try:
            file = self._opened()
        except OSError:  # nobody can keep anything here, and `keep` says why
            return True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):  # this file system has no locks
                return True
            since = _busy_since.setdefault(self._key, time.monotonic())
            return time.monotonic() - since > _LONGEST_WAIT
        _busy_since.pop(self._key, None)
        self._file = file
        return True

    def release(self) -> None:
        import fcntl

        if self._file >= 0:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place)

    def _opened(self) -> int:
        folder = toolchain.cache_directory()
        known = _lock_files.get((os.getpid(), folder))
        if known is not None:
            return known
        toolchain.make_private(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        opened = os.open(trusted(folder) / _LOCK, flags, 0o644)
        return _lock_files.setdefault((os.getpid(), folder), opened)


def path_in(folder: Path, key: str) -> Path:
    """Return the file of a folder that is kept under a key, whether it is there or not."""
    return folder / f"{_PREFIX}{key}.cubin"


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def trusted(folder: Path) -> Path:
    """Return the folder, if it is one into which nobody else can have put code.

    Raises:
        OSError: it is none, or others can write there.
    """
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    if why := problem(status):
        raise PermissionError(f"{folder} {why}")
    return folder


def problem(status: os.stat_result) -> str:
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
            if not stat.S_ISREG(status.st_mode) or problem(status):
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
        claims: what ``claimed`` gave, until all is kept.
        found: it was here; else CuPy compiled.
        made: what it gave to be kept, by key; nothing where it compiles in memory.
    """

    claims: contextlib.ExitStack
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
        content = asked.claims.enter_context(claimed(_key(name)))
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

    What it has to compile is claimed until the end: keep it before.

    Raises:
        OSError: this CuPy has no place for another cache.
    """
    install = getattr(compiler, "_set_kernel_cache_backend", None)
    if install is None:
        raise OSError("this release of CuPy has no place for another cache")
    if not isinstance(compiler._kernel_cache_backend, _Backend):
        install(_Backend(compiler._kernel_cache_backend))
    with contextlib.ExitStack() as claims:
        asked, before = Asked(claims), _asked.get()
        try:
            _asked.set(asked)
            yield asked
        finally:
            _asked.set(before)
