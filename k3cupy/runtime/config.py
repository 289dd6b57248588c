"""What this machine has and which backend will run on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from k3cupy.runtime import binaries, bundles, devices, env, sources, toolchain
from k3cupy.runtime.errors import ToolchainError
from k3cupy.runtime.text import printable

_CUPYS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
"""Packages that put the same module there."""

_PACKAGES = (
    "k3cupy",
    *_CUPYS,
    "cuda-core",
    "cuda-bindings",
    "cuda-pathfinder",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "torch",
    "numpy",
    "ml_dtypes",
)


def config_info() -> dict[str, Any]:
    """Return what ``show_config`` prints.

    Returns:
        ``backend`` ("cuda" or "nothing") and ``why``, for CUDA tensors; ``gpus``, a list of names
        with SM counts and architectures; ``problems``, a list of what does not fit together;
        ``driver``, ``nvrtc``, ``headers``, ``cache``, ``bundles`` (what is used, and what is not
        and why), ``variables`` (those of k3cupy that are set), ``sources``, ``python``,
        ``platform``; and ``packages`` (name -> version). What is missing is a sentence that says
        why.
    """
    with warnings.catch_warnings():  # CuPy warns of a second one while it is imported
        warnings.filterwarnings("ignore", r"\s*-+\s*CuPy may not function correctly")
        backend, why, gpus = _backend()
    return {
        "backend": backend,
        "why": why,
        "gpus": gpus,
        "problems": list(_problems()),
        "driver": _ask(_driver),
        "nvrtc": _ask(_nvrtc),
        "headers": _ask(_headers),
        "cache": _ask(lambda: str(toolchain.cache_directory())),
        "bundles": _bundles(),
        "variables": [f"{name}={value}" for name, value in env.settings().items()],
        "sources": _ask(lambda: str(sources.directory())),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _installed(name))},
    }


def show_config(file: IO[str] | None = None) -> None:
    """Print the GPUs, versions and paths in use, and which backend will run and why.

    Args:
        file: where to print; standard output by default.
    """
    info = config_info()
    rows: list[tuple[str, Any]] = [
        ("CUDA tensors run", f"{info['backend']}: {info['why']}"),
        ("CPU tensors run", "reference: NumPy, same functions and errors"),
        *((name, info[name]) for name in info if name not in ("backend", "why", "packages")),
        ("packages", [f"{name} {version}" for name, version in info["packages"].items()]),
    ]
    for name, value in rows:
        if name in ("problems", "bundles", "variables") and not value:
            continue
        values = value or ["none"] if isinstance(value, list) else [value]
        # CuPy's reasons are several lines, and one is behind many a row.
        same = f"unknown: {info['why']}"
        told = ("unknown, for that reason" if text == same else text for text in values)
        lines = [line for text in told for line in text.splitlines()]
        for label, line in zip([name, *[""] * len(lines)], lines or [""], strict=False):
            print(printable(f"{label:<18}{line}".rstrip(), file), file=file or sys.stdout)


def _backend() -> tuple[str, str, list[str]]:
    try:
        found = [devices.info(index) for index in range(devices.count())]
    except Exception as error:  # a GPU that is lost raises CuPy's
        return "nothing", str(error), []
    needed = devices.OLDEST_ARCH
    usable = [i for i in found if i.compute_capability >= devices.OLDEST]
    names = [
        f"{i.index}: {i.name}, {i.arch}, {i.num_sms} SMs, "
        + (f"PDL {'yes' if i.has_pdl else 'no'}" if i in usable else f"too old: needs {needed}")
        for i in found
    ]
    try:
        if not usable:
            raise ToolchainError(f"the kernels need a GPU of {needed} or newer")
        toolchain.cuda_core()
        how = _how_kernels_come({gpu.arch for gpu in usable})
    except Exception as error:
        return "nothing", str(error), names
    return "cuda", f"{len(usable)} GPU{'s' if len(usable) != 1 else ''}, {how}", names


def _how_kernels_come(archs: set[str]) -> str:
    """Return in words what gives kernels for GPUs: compiler and headers, or a bundle alone."""
    try:
        toolchain.nvrtc_version()
        toolchain.include_directory()
    except ToolchainError as error:
        if not any(bundle.arch in archs for bundle in bundles.known().bundles):
            raise
        return f"kernels of a bundle alone, for there is no compiler: {error}"
    if env.no_compile():
        return "and K3CUPY_NO_COMPILE: kernels of bundles and of the disk cache alone"
    return "compiler and headers found"


def _problems() -> Iterator[str]:
    """Yield what is set and means nothing, and what is installed and does not fit together."""
    yield from env.problems()
    if why := toolchain.cache_problem() or _why_not_kept():
        yield f"compiled kernels are not kept: {why}. Set CUPY_CACHE_DIR to a folder of your own"
    cupys = [name for name in _CUPYS if _installed(name)]
    if len(cupys) > 1:
        yield (
            f"{' and '.join(cupys)} are installed over each other. Uninstall them all, then "
            f"{toolchain.INSTALL_HINT}"
        )
    try:
        of_cupy = toolchain.cupy().cuda.runtime.runtimeGetVersion() // 1000
    except Exception:  # it does not import: that is told already
        return
    of_torch = _cuda_of_torch()
    if of_torch not in (None, of_cupy):
        yield (
            f"PyTorch is built for CUDA {of_torch}, CuPy for CUDA {of_cupy}: in one process they "
            f"load libraries of both. Install both for the same: {toolchain.INSTALL_HINT}, and "
            "PyTorch for the same CUDA"
        )


def _why_not_kept() -> str | None:
    try:
        if not toolchain.in_memory():
            binaries.trusted(toolchain.cache_directory())
    except FileNotFoundError:  # it will be made
        return None
    except OSError as error:
        return str(error)
    return None


def _cuda_of_torch() -> int | None:
    """Return the major CUDA release that PyTorch is built for, without importing it for that."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    except (OSError, ValueError):
        return None
    match = re.search(r"^cuda\b[^=\n]*= *['\"](\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def _bundles() -> list[str]:
    known = bundles.known()
    return [*map(str, known.bundles), *(f"not used: {why}" for why in known.refused)]


def _driver() -> str:
    release = toolchain.driver_release()
    return f"CUDA {release[0]}.{release[1]}" if release else "none"


def _nvrtc() -> str:
    return ".".join(map(str, toolchain.nvrtc_version()))


def _headers() -> str:
    version = toolchain.header_version()
    release = f" (CUDA {version[0]}.{version[1]})" if version else ""
    return toolchain.include_directory() + release


def _ask(question: Callable[[], str]) -> str:
    """Return an answer, or why there is none: a report must not fail where a part is missing."""
    try:
        return question()
    except Exception as error:
        return f"unknown: {error}"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except Exception:  # it is not there, or what pip wrote of it is damaged
        return None
