"""Where the CUDA sources are, and a digest of a source with everything it includes.

CuPy's binary cache knows a source's text and the options but not the headers behind ``-I``: after
an edit to a ``.cuh`` it would run the old binary. The digest, put into the source as a comment,
covers them.

``K3CUPY_SOURCE_DIR`` or ``source_dir`` name an edited copy of ``cuda_src``. While one is named,
every call looks at the modification times, so that an edit takes effect at the next call.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from k3cupy.runtime import env
from k3cupy.runtime.errors import ToolchainError

_OF_BENCHMARKS = "bench"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
override: ContextVar[str | None] = ContextVar("k3cupy_source_dir", default=None)


@dataclass(frozen=True)
class Source:
    """A source file ready to compile.

    Attributes:
        text: the file's text behind a comment that holds the digest.
        digest: of the file and of all files it includes, by content.
        directory: the folder that ``#include "common/..."`` is relative to.
    """

    text: str
    digest: str
    directory: Path


@contextlib.contextmanager
def source_dir(path: str | Path) -> Iterator[Path]:
    """Compile kernels from an edited copy of ``cuda_src`` inside a ``with`` block.

    Args:
        path: a folder laid out like ``cuda_src``; ``k3cupy.runtime.sources.shipped()`` is the one
            to copy. Edits are seen at the next call.

    Yields:
        The folder as a ``Path``.

    Raises:
        FileNotFoundError: the folder does not exist.

    Example:
        >>> with k3cupy.source_dir("my_cuda_src"):            # doctest: +SKIP
        ...     k3cupy.fused_mla_decode_q_concat_kv_cache_insert(...)
    """
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise FileNotFoundError(f"source_dir: expected an existing folder, got {folder}")
    token = override.set(str(folder))
    try:
        yield folder
    finally:
        override.reset(token)


def shipped() -> Path:
    """Return the folder of the sources that came with the package.

    Raises:
        ToolchainError: the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise ToolchainError(f"the CUDA sources are missing beside {package}; reinstall k3cupy")


def overridden() -> str | None:
    """Return the folder that replaces the shipped sources, or None."""
    return override.get() or env.source_dir()


def directory() -> Path:
    """Return the folder that the next compilation reads."""
    folder = overridden()
    if folder is None:
        return shipped()
    path = Path(folder).resolve()
    if not path.is_dir():
        raise ToolchainError(
            f"K3CUPY_SOURCE_DIR: expected a folder with CUDA sources, got {folder!r}. "
            "Unset it to use the sources that came with the package"
        )
    return path


class _Stamp(NamedTuple):
    """What tells an edited file from the one that was read."""

    path: Path
    mtime_ns: int
    size: int


class _Read(NamedTuple):
    """A source, and the stamps of the files that it was made of."""

    stamps: tuple[_Stamp, ...]
    source: Source


_lock = threading.Lock()
_loaded: dict[tuple[Path, str], _Read] = {}


def load(name: str) -> Source:
    """Read a source file and digest it with its includes.

    Args:
        name: file name inside the source folder, for example ``"mla_decode.cu"``.

    Raises:
        ToolchainError: the file or one of its includes is missing.
    """
    folder = directory()
    with _lock:
        known = _loaded.get((folder, name))
        if known is not None and (overridden() is None or _stamps_hold(known.stamps)):
            return known.source
        files = _closure(folder, name)
        digest = _digest(files, folder)
        stamps = tuple(map(_stamp, files))
        text = f"// k3cupy {digest}\n#line 1\n{files[folder / name]}"
        source = Source(text=text, digest=digest, directory=folder)
        _loaded[folder, name] = _Read(stamps, source)
        return source


def epoch(name: str) -> str | None:
    """Return what a plan must agree on: None for the shipped sources, else the present digest."""
    if override.get() is None and env.source_dir() is None:
        return None
    return load(name).digest


def shipped_digest(*names: str) -> str:
    """Return a digest of sources of the package, whatever edited copy is named.

    Raises:
        ToolchainError: the installation is incomplete.
    """
    folder = shipped()
    files: dict[Path, str] = {}
    for name in names:
        files |= _closure(folder, name)
    return _digest(files, folder)


def _digest(files: Mapping[Path, str], folder: Path) -> str:
    import hashlib  # loads OpenSSL, which a call on CPU tensors does not need

    digest = hashlib.sha256()
    for path, text in files.items():
        digest.update(f"{path.relative_to(folder)}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return _Stamp(path, status.st_mtime_ns, status.st_size)


def _stamps_hold(stamps: Iterable[_Stamp]) -> bool:
    try:
        return all(_stamp(stamp.path) == stamp for stamp in stamps)
    except OSError:
        return False


def _closure(folder: Path, name: str) -> dict[Path, str]:
    """Return the texts of a file and of everything it includes by quotes, in order of discovery."""
    files: dict[Path, str] = {}
    pending = [folder / name]
    while pending:
        path = pending.pop()
        if path in files:
            continue
        try:
            files[path] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = ""
            if path.parent == folder / _OF_BENCHMARKS:
                hint = (
                    "; the kernels of benchmarks come with a checkout of k3cupy, not with a wheel"
                )
            raise ToolchainError(f"CUDA source {path} cannot be read ({error}){hint}") from error
        for included in _INCLUDE.findall(files[path]):
            beside = path.parent / included
            found = beside if beside.is_file() else folder / included
            # Links stay links: a folder may hold some.
            pending.append(Path(os.path.normpath(found)))
    return files
