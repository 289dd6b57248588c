"""Where the CUDA sources are, and a digest of a source with everything it includes.

CuPy's binary cache knows a source's text and the options but not the headers behind ``-I``: after
an edit to a ``.cuh`` it would run the old binary. The digest, put into the source as a comment,
covers them.

``K3CUPY_SOURCE_DIR`` or ``source_dir`` name an edited copy of ``cuda_src``. While one is named,
every call reads what its files hold, which takes some 0.1 ms, so that an edit takes effect at the
next call, also one that keeps size and time.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from k3cupy.runtime import env
from k3cupy.runtime.errors import ToolchainError, reject, shown
from k3cupy.runtime.warn import warn_user

_OF_BENCHMARKS = "bench"
_SUFFIXES = (".cu", ".cuh", ".h", ".hpp", ".cpp")
_SPACE = rb"(?:\s|/\*(?:[^*]|\*(?!/))*\*/)*"
_DIRECTIVE = rb"(?:#|%%:)%binclude(?:_next)?|__has_include(?:_next)?%b\(" % (_SPACE, _SPACE)
_NAMED = rb'"([^"\n\0]+)"|<([^>\n\0]+)>|([\w\\])'
"""In quotes, in angle brackets, or by a macro, whose name may begin with an escape."""

_INCLUDE = re.compile(rb"(?=(?:%b)%b(?:%b))" % (_DIRECTIVE, _SPACE, _NAMED))
"""It looks ahead only: what looks like a directive, in a comment, takes no real one with it."""

_SPLICE = re.compile(rb"\\\r?\n")
override: ContextVar[str | None] = ContextVar("k3cupy_source_dir", default=None)


@dataclass(frozen=True)
class Source:
    """A source file ready to compile.

    Attributes:
        text: what either compiler gets: the digest in a comment, and the file by its whole path.
            NVRTC looks for an include in quotes beside the file that has it, and for those of the
            text itself beside the program's *name*. That is the working directory where there is
            no name, and a temporary folder that is gone by then where CuPy gives one: whoever puts
            a header there would have it compiled in place of ours.
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
            to copy, and ``~`` is your home. Edits are seen at the next call.

    Yields:
        The folder as a ``Path``.

    Raises:
        TypeError, ValueError: no path, or an empty one.
        FileNotFoundError: the folder does not exist.

    Example:
        >>> with k3cupy.source_dir("my_cuda_src"):            # doctest: +SKIP
        ...     k3cupy.fused_mla_decode_q_concat_kv_cache_insert(...)
    """
    named = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(named, str) or not named:
        kind = ValueError if named == "" else TypeError
        reject("source_dir", "a folder with CUDA sources", shown(path), error=kind)
    folder = _folder(os.path.expanduser(named))
    if folder is None:
        raise FileNotFoundError(f"source_dir: expected an existing folder, got {named!r:.300}")
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


def warn_unused() -> None:
    """Warn, where edited sources are named, that a call on CPU tensors does not look at them.

    Nobody is to take an edit that does not compile for one that works.
    """
    if overridden() is None:
        return
    try:
        folder = str(directory())
    except ToolchainError as error:
        warn_user(f"CPU tensors run the reference in NumPy. A call on a GPU would fail: {error}")
        return
    warn_user(
        f"CPU tensors run the reference in NumPy: the edited sources in {folder} are neither "
        f"compiled nor run by this call, whether they are right or not. k3cupy.compile("
        f"{folder!r:.300}) compiles them, for any GPU and without one"
    )


def directory() -> Path:
    """Return the folder that the next compilation reads."""
    folder = overridden()
    if folder is None:
        return shipped()
    path = _folder(folder)
    if path is None:
        told = f"expected a folder with CUDA sources, got {folder!r:.300}"
        if override.get() is not None:
            raise ToolchainError(f"source_dir: {told}. It was there when the `with` block began")
        hint = "Unset it to use the sources that came with the package"
        raise ToolchainError(f"K3CUPY_SOURCE_DIR: {told}. {hint}")
    return path


def _folder(named: str) -> Path | None:
    """Return the whole path of a folder, or None where there is none of that name."""
    try:
        path = Path(os.path.realpath(named))
        return path if path.is_dir() else None
    except (OSError, ValueError):  # no file has such a name, or the working directory is gone
        return None


class _Read(NamedTuple):
    """A source, and what each file held that was looked for; None where there was none."""

    files: Mapping[str, bytes | None]
    source: Source


_loaded: dict[tuple[Path, str], _Read] = {}


def load(name: str) -> Source:
    """Read a source file and digest it with its includes.

    Args:
        name: file name inside the source folder, for example ``"mla_decode.cu"``.

    Raises:
        ToolchainError: the file cannot be read. An include that is not there is left to the
            compiler: it may be the toolkit's, or not needed.
    """
    folder = directory()
    # Without a lock: a slow disk holds up nobody else, and a fork no child. Threads may read twice.
    known = _loaded.get((folder, name))
    if known is not None and (overridden() is None or _hold(known.files)):
        return known.source
    files = _closure(folder, name)
    digest = _digest(files, folder)
    text = f'// k3cupy {digest}\n#include "{_quotable(folder / name)}"\n'
    source = Source(text=text, digest=digest, directory=folder)
    _loaded[folder, name] = _Read(files, source)
    return source


def _quotable(path: Path) -> Path:
    """Return a path that the compiler reads as it is, between quotes in a text of UTF-8."""
    if re.search('["\n\ud800-\udfff]', str(path)):
        raise ToolchainError(
            f"CUDA source {str(path)!r} cannot be compiled: expected a path in UTF-8, without "
            "quotes or line breaks. Rename its folder"
        )
    return path


def epoch(name: str) -> str | None:
    """Return what a plan must agree on: None for the shipped sources, else the present digest.

    Of a file that cannot be read it is the reason: CPU tensors need no sources, and a call on a GPU
    raises it when it loads them.
    """
    if override.get() is None and env.source_dir() is None:
        return None
    try:
        return load(name).digest
    except ToolchainError as error:
        return str(error)


def shipped_digest(*names: str) -> str:
    """Return a digest of sources of the package, whatever edited copy is named.

    Raises:
        ToolchainError: the installation is incomplete.
    """
    folder = shipped()
    files: dict[str, bytes | None] = {}
    for name in names:
        files |= _closure(folder, name)
    return _digest(files, folder)


def is_edited(name: str) -> bool:
    """Return whether a source, with all that it includes, differs from that of the package.

    Raises:
        ToolchainError: it cannot be read.
    """
    return overridden() is not None and load(name).digest != shipped_digest(name)


def unread_edits(names: Iterable[str]) -> list[str]:
    """Return the files that differ from the package's, and that none of some sources includes.

    Args:
        names: of the sources; those that cannot be read are left out.
    """
    folder, package = directory(), shipped()
    read: set[str] = set()
    for name in names:
        with contextlib.suppress(ToolchainError):
            read.update(_closure(folder, name))
    found = []
    for path in sorted(folder.rglob("*")):
        if (
            path.suffix not in _SUFFIXES
            or os.path.join(os.path.realpath(path.parent), path.name) in read
        ):
            continue
        place = path.relative_to(folder)
        content = _content(str(path))
        if content is not None and content != _content(str(package / place)):
            found.append(str(place))
    return found


def _digest(files: Mapping[str, bytes | None], folder: Path) -> str:
    import hashlib  # loads OpenSSL, which a call on CPU tensors does not need

    digest = hashlib.sha256()
    for path, content in files.items():
        if content is not None:
            name = os.fsencode(os.path.relpath(path, folder))
            digest.update(b"%b\0%d\0%b" % (name, len(content), content))
    return digest.hexdigest()


def _content(path: str) -> bytes | None:
    """Return what a regular file holds; None where there is none that can be read."""
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return None


def _hold(files: Mapping[str, bytes | None]) -> bool:
    return all(_content(path) == content for path, content in files.items())


def _closure(folder: Path, name: str) -> dict[str, bytes | None]:
    """Return what a file and all that it may include hold, in order of discovery.

    An include in quotes is looked for beside the file that has it, then in the folder. Whether the
    preprocessor comes to it is not asked: a file too many in the digest does no harm.
    """
    first = folder / name
    try:
        of_first = first.read_bytes()
    except OSError as error:
        hint = ""
        if first.parent == folder / _OF_BENCHMARKS:
            hint = "; the kernels of benchmarks come with a checkout of k3cupy, not with a wheel"
        raise ToolchainError(f"CUDA source {first} cannot be read ({error}){hint}") from error
    files: dict[str, bytes | None] = {}
    pending = [str(first)]
    while pending:
        path = pending.pop()
        if path in files:
            continue
        content = files[path] = of_first if path == str(first) else _content(path)
        for quoted, angled, macro in _INCLUDE.findall(_SPLICE.sub(b"", content or b"")):
            if macro:  # which may name any of them
                pending += sorted(map(str, folder.rglob("*")))
                continue
            for place in (os.path.dirname(path), folder) if quoted else (folder,):
                # A file that is a link stays one, as its includes are looked for beside the link.
                # `..` of a folder that is a link is the folder above that which it names.
                above, last = os.path.split(os.path.join(place, os.fsdecode(quoted or angled)))
                found = os.path.join(os.path.realpath(above), last)
                pending.append(found)
                if os.path.isfile(found):
                    break
    return files
