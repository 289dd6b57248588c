"""Bundles: binaries that were made beforehand, so that nothing is compiled where they are used.

A bundle is a folder of files as the disk cache has them, with a manifest that says what they are
of. ``K3CUPY_BUNDLE`` names some; a wheel of a bundle is found by its package, ``k3cupy_bundles``.
To use one takes the driver, CuPy and cuda-core, and neither NVRTC nor headers. A bundle that does
not fit is not used, and one warning says why.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3cupy.runtime import binaries, devices, env, sources, toolchain
from k3cupy.runtime.errors import shown
from k3cupy.runtime.tensors import is_integer
from k3cupy.runtime.warn import warn_user

if TYPE_CHECKING:
    from k3cupy.runtime.devices import DeviceInfo
    from k3cupy.runtime.instances import Instance

MANIFEST = "manifest.json"
PACKAGE = "k3cupy_bundles"
"""Of wheels: each adds a folder to this namespace package."""

_SCHEMA = 1
_MOST_BYTES = 1 << 24
_MOST_CHARACTERS = 80


@dataclass(frozen=True)
class Bundle:
    """A bundle that may be used.

    Attributes:
        folder: where it is.
        package: the version of k3cupy that made it.
        model: whose calls it is for.
        gpu: the GPU whose choices it has.
        arch: what it is compiled for, for example ``"sm_90"``.
        compiler: what compiled it.
        kernels: source -> digest, of all sources that it has binaries of.
        instances: how many it was made with.
        missing: how many files of them are not there, as after an interrupted copy.
    """

    folder: Path
    package: str
    model: str
    gpu: str
    arch: str
    compiler: str
    kernels: dict[str, str]
    instances: int
    missing: int = 0

    def __str__(self) -> str:
        made = f"{self.instances} kernels for {self.model} on {self.gpu} ({self.arch})"
        how = f"by k3cupy {self.package} with {self.compiler}"
        return ", ".join(filter(None, (f"{self.folder}: {made}", how, self.lack)))

    @property
    def lack(self) -> str:
        """How many files are missing, in words; nothing where all are there."""
        return f"{self.missing} of {self.instances} files are missing" if self.missing else ""


@dataclass(frozen=True)
class Known:
    """The bundles of this process, and why others are not used, a sentence each."""

    bundles: tuple[Bundle, ...]
    refused: tuple[str, ...]

    def described(self) -> str:
        """Return where a kernel was looked for, as part of a sentence."""
        facts = [(b.folder, ", ".join(filter(None, (b.arch, b.lack)))) for b in self.bundles]
        names = [f"{folder} ({fact})" for folder, fact in facts]
        told = f"not in the bundle {', '.join(names)}" if names else "there is no bundle of it"
        return told + (f" (not used: {'; '.join(self.refused)})" if self.refused else "")


NONE = Known((), ())


@dataclass(frozen=True)
class Found:
    """What a bundle has of an instance."""

    bundle: Bundle
    content: bytes


def known() -> Known:
    """Return the bundles that K3CUPY_BUNDLE names, then those that are installed."""
    return _known(env.bundles(), tuple(map(str, sys.path)))


def find(instance: Instance, digest: str, gpu: DeviceInfo) -> Found | None:
    """Return the binary of an instance, of sources with a digest; None where no bundle has it."""
    given = known()
    for why in given.refused:
        _warn_once(f"kernel bundle: not used, {why}; {_hint(gpu)}")
    fitting = [bundle for bundle in given.bundles if bundle.arch == gpu.arch]
    for bundle in fitting:
        if bundle.missing:
            _warn_once(f"kernel bundle: {bundle.folder}: {bundle.lack}; copy it again")
        content = _read(bundle, key_of(instance, digest, gpu.arch))
        if content is not None:
            return Found(bundle, content)
    if given.bundles and not fitting:
        told = ", ".join(f"{bundle.folder} is for {bundle.arch}" for bundle in given.bundles)
        hint = _hint(gpu, given.bundles[0].model)
        _warn_once(f"kernel bundle: {told}, and not used on {gpu.name}, {gpu.arch}; {hint}")
    return None


def _hint(gpu: DeviceInfo, made_for: str = "") -> str:
    """Return what makes a bundle for a GPU, of the model that another one was made for."""
    match = re.fullmatch(r"([\w.-]+) tp(\d+)", made_for, re.ASCII)
    model, tp = match.groups() if match else ("kimi-k3", "8")
    name = devices.option_of(gpu)
    return f"make one with `k3cupy bundle --model {model} --tp {tp} --gpu {name} --out FOLDER`"


def key_of(instance: Instance, digest: str, arch: str) -> str:
    """Return the name of a binary, which covers all that decides what it is but the compiler."""
    arch = instance.arch_on(arch)
    facts = (digest, instance.source, instance.name_expression, arch, toolchain.FLAGS)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:40]


def write_manifest(bundle: Bundle, names: dict[str, dict[str, str]]) -> None:
    """Write what a bundle has into its folder.

    Args:
        bundle: the facts.
        names: file -> its instance, for people.
    """
    facts = asdict(bundle)
    del facts["folder"], facts["missing"]
    text = json.dumps({"schema": _SCHEMA, **facts, "files": names}, indent=1)
    path = bundle.folder / MANIFEST
    partial = path.with_suffix(".tmp")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.chmod(0o644)
    os.replace(partial, path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder.

    Raises:
        OSError: it cannot be read, or others can write it or its folder.
        ValueError: it is none of this version.
    """
    path = binaries.trusted(folder) / MANIFEST
    status = path.stat()
    if problem := binaries.problem(status):
        raise PermissionError(f"its {MANIFEST} {problem}")
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        raise ValueError(f"its {MANIFEST} is no manifest")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"its {MANIFEST} is no JSON ({error})") from error
    if not isinstance(found, dict) or found.get("schema") != _SCHEMA:
        raise ValueError(f"its {MANIFEST} is of another version of k3cupy")
    return found


@functools.cache
def _known(named: tuple[str, ...], path: tuple[str, ...]) -> Known:
    """Read each manifest once for what is named and where Python looks for packages."""
    found, refused = [], []
    for folder in dict.fromkeys([*map(Path, named), *_installed()]):
        try:
            found.append(_bundle(folder))
        except FileNotFoundError as error:
            refused.append(f"there is no {error.filename}")
        except (OSError, ValueError) as error:
            refused.append(_refusal(folder, error))
    return Known(tuple(found), tuple(refused))


def _refusal(folder: Path, error: Exception) -> str:
    """Return why a folder is not used: its path once, and no number of an error."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or folder}: {error.strerror}"
    text = str(error)
    return text if text.startswith(f"{folder} ") else f"{folder}: {text}"


def _bundle(folder: Path) -> Bundle:
    if folder.suffix == ".whl" and folder.is_file():
        raise ValueError("a wheel is used once `pip install` has installed it; leave it out here")
    facts = read_manifest(folder)
    kernels, count, files = (facts.get(name) for name in ("kernels", "instances", "files"))
    words = {name: _word(facts, name) for name in ("package", "model", "gpu", "arch", "compiler")}
    if not (isinstance(kernels, dict) and isinstance(files, dict) and kernels and files):
        raise ValueError(f"its {MANIFEST} does not say which kernels it has")
    if not is_integer(count) or count != len(files):
        counted = f"{shown(count)} instances, and lists {len(files)} files"
        raise ValueError(f"its {MANIFEST} says that it has {counted}")
    for source, digest in kernels.items():
        if source not in _sources() or digest != sources.shipped_digest(source):
            raise ValueError(
                f"its binaries are of other kernels, those of k3cupy {words['package']}: "
                f"{_on_one_line(source)} is not that of this package"
            )
    missing = 0
    with contextlib.suppress(PermissionError):  # files may be read where nobody may list them
        missing = len(files.keys() - set(os.listdir(folder)))
    return Bundle(folder, **words, kernels=kernels, instances=count, missing=missing)


def _word(facts: dict[str, Any], name: str) -> str:
    if not isinstance(facts.get(name), str):
        raise ValueError(f"its {MANIFEST} has no text {name}, got {shown(facts.get(name))}")
    return _on_one_line(facts[name])


def _on_one_line(text: str) -> str:
    """Return a manifest's text as a terminal may show it, quoted where it holds more than that."""
    return text if text.isprintable() and len(text) <= _MOST_CHARACTERS else shown(text)


def _sources() -> set[str]:
    return {path.name for path in sources.shipped().glob("*.cu")}


def _installed() -> Iterator[Path]:
    """Yield the folders of installed wheels, without importing anything."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return
    for place in map(Path, (spec and spec.submodule_search_locations) or ()):
        with contextlib.suppress(OSError):
            if not place.parent.samefile("."):  # nothing of the working directory
                yield from sorted(path.parent for path in place.glob(f"*/{MANIFEST}"))


def _read(bundle: Bundle, key: str) -> bytes | None:
    path = binaries.path_in(bundle.folder, key)
    try:
        content = binaries.read(bundle.folder, key)
        if content is None and path.exists():
            raise PermissionError(f"{path.name} is damaged, or others can write it")
        return content
    except OSError as error:
        _warn_once(f"kernel bundle: not used, {_refusal(bundle.folder, error)}")
        return None


@functools.cache
def _warn_once(text: str) -> None:
    warn_user(text, RuntimeWarning)
