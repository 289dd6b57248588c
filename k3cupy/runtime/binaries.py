"""Binaries for the instructions of one architecture alone, as sm_90a has them.

CuPy names the architecture by itself, without that letter, so these are compiled by ``offline``.
They are kept in CuPy's cache directory: one place to keep, to share and to clear.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from k3cupy.runtime import offline, toolchain
from k3cupy.runtime.sources import Source

_PREFIX = "k3cupy"


@contextlib.contextmanager
def binary(
    source: Source, file: str, name_expression: str, arch: str, nvrtc: tuple[int, int]
) -> Iterator[tuple[Path, str]]:
    """Find the binary of an instance on disk, or compile it.

    With ``CUPY_CACHE_IN_MEMORY=1`` it is written to a temporary directory, for the length of the
    ``with`` block.

    Args:
        source: what is compiled.
        file: its name inside ``cuda_src``.
        name_expression: the instance.
        arch: for example ``"sm_90a"``.
        nvrtc: the compiler's release; another one compiles anew.

    Yields:
        The file, and the kernel's symbol in it.

    Raises:
        CompileError: NVRTC refused the source.
        OSError: the cache directory cannot be used.
    """
    if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1":
        with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-") as temporary:
            yield _compiled(Path(temporary), "memory", file, name_expression, arch)
        return
    options = toolchain.every_option(source.directory)
    facts = (source.digest, file, name_expression, arch, nvrtc, options)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    folder = toolchain.cache_directory()
    yield _found(folder, key) or _compiled(folder, key, file, name_expression, arch)


def _found(folder: Path, key: str) -> tuple[Path, str] | None:
    """Return a file whose content is what its name says, and the symbol."""
    for path in folder.glob(f"{_PREFIX}.{key}.*.cubin"):
        _, _, check, symbol, _ = path.name.split(".")
        if check == _check(path.read_bytes()):
            return path, symbol
    return None


def _compiled(
    folder: Path, key: str, file: str, name_expression: str, arch: str
) -> tuple[Path, str]:
    cubin = offline.compile_cubin(file, [name_expression], arch)
    symbol = cubin.symbols[name_expression]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_PREFIX}.{key}.{_check(cubin.code)}.{symbol}.cubin"
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as partial:
        partial.write(cubin.code)
    os.replace(partial.name, path)
    return path, symbol


def _check(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:16]
