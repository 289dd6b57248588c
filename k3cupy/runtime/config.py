"""What this machine has and which backend will run on it."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from typing import IO, Any

from k3cupy.runtime import devices, sources, toolchain
from k3cupy.runtime.errors import ToolchainError

_PACKAGES = (
    "k3cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
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
        with SM counts and architectures; ``driver``, ``nvrtc``, ``headers``, ``cache``,
        ``sources``, ``python``, ``platform``; and ``packages`` (name -> version). What is missing
        is a sentence that says why.
    """
    backend, why, gpus = _backend()
    return {
        "backend": backend,
        "why": why,
        "gpus": gpus,
        "driver": _ask(_driver),
        "nvrtc": _ask(_nvrtc),
        "headers": _ask(_headers),
        "cache": _ask(lambda: str(toolchain.cache_directory())),
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
        lines = value if isinstance(value, list) else [value]
        for label, line in zip([name, *[""] * len(lines)], lines or [""], strict=False):
            print(f"{label:<18}{line}".rstrip(), file=file or sys.stdout)


def _backend() -> tuple[str, str, list[str]]:
    try:
        found = [devices.info(index) for index in range(devices.count())]
    except ToolchainError as error:
        return "nothing", str(error), []
    names = [
        f"{i.index}: {i.name}, {i.arch}, {i.num_sms} SMs, PDL {'yes' if i.has_pdl else 'no'}"
        for i in found
    ]
    try:
        toolchain.cuda_core()
        toolchain.include_directory()
    except ToolchainError as error:
        return "nothing", str(error), names
    return (
        "cuda",
        f"{len(found)} GPU{'s' if len(found) != 1 else ''}, compiler and headers found",
        names,
    )


def _driver() -> str:
    number = toolchain.cupy().cuda.runtime.driverGetVersion()
    major, minor = toolchain.release(number)
    return f"CUDA {major}.{minor}" if number else "none"


def _nvrtc() -> str:
    return ".".join(str(part) for part in toolchain.cupy().cuda.nvrtc.getVersion())


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
    except importlib.metadata.PackageNotFoundError:
        return None
