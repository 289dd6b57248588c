"""CuPy, cuda-core, NVRTC, the CUDA headers and optional packages.

They are found late, and missed with a sentence that helps.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from k3cupy.runtime.errors import ToolchainError
from k3cupy.runtime.warn import warn_user

INSTALL_HINT = (
    'install the GPU stack with `pip install "k3cupy[cu12]"` (driver for CUDA 12) or '
    '`pip install "k3cupy[cu13]"` (driver for CUDA 13); to compile without a GPU either will do, '
    "and no driver is needed"
)

_OPTIONAL = {
    "matplotlib": ("matplotlib", 'pip install "k3cupy[bench]"'),
    "torch": ("PyTorch", "pip install torch"),
}
"""Package -> how people call it, and what installs it."""


@contextlib.contextmanager
def optional(who: str) -> Iterator[None]:
    """Say what installs an optional package that an import inside does not find.

    Args:
        who: needs it, in words.

    Raises:
        ToolchainError: it is not there.
    """
    try:
        yield
    except ImportError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        name, command = _OPTIONAL[package]
        raise ToolchainError(f"{who} needs {name}: {command}") from missing


_import_lock = threading.Lock()


@functools.cache
def cupy() -> Any:
    """Import CuPy.

    CuPy makes its cache folder while it is imported, and does not import where that is impossible.
    There everything is compiled in memory, by CuPy too, with one warning.

    Raises:
        ToolchainError: CuPy is not installed or does not load.
    """
    with _import_lock, _folder_for_cupy():
        try:
            module = importlib.import_module("cupy")
            _ = module.cuda  # an empty folder of that name, which pip may leave behind, has none
            return module
        except Exception as error:  # whatever else fails in there, as NumPy of another release
            raise ToolchainError(f"CuPy does not import ({error}); {INSTALL_HINT}") from error


def _named_folder() -> str:
    return os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache"


def cache_directory() -> Path:
    """Return the folder of compiled binaries, which is CuPy's; it need not be there.

    Raises:
        OSError: there is none, because nobody's home is known.
    """
    named = _named_folder()
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{error}") from error


def in_memory() -> bool:
    """Return whether CUPY_CACHE_IN_MEMORY keeps binaries off the disk, read as CuPy reads it."""
    try:
        return int(os.environ.get("CUPY_CACHE_IN_MEMORY") or 0) == 1
    except ValueError:
        return False


@contextlib.contextmanager
def _folder_for_cupy() -> Iterator[None]:
    """Name a folder that is there while CuPy is imported: it takes "" and "~" as they are."""
    if "cupy" in sys.modules:
        yield
        return
    try:
        folder = cache_directory()
        make_private(folder)
    except OSError as error:
        warn_of_cache(error)
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        folder = Path("/")  # which is everywhere, and not used then
    with environment("CUPY_CACHE_DIR", str(folder)):
        yield


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment, and put back at the end what was there."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def make_private(folder: Path) -> None:
    """Make a folder where there is none, in which nobody else may write, whatever the umask.

    Those above it that are missing are made in the same way: who may write there can replace it.
    """
    for above in reversed(folder.parents):
        if not above.exists():
            above.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o755, exist_ok=True)


_warn_lock = threading.Lock()
_warned: dict[str, str] = {}
"""Folder, as it is named -> what is wrong with it."""


def warn_of_cache(problem: object) -> None:
    """Warn, once for the folder, that compiled kernels are not kept."""
    named = _named_folder()
    with _warn_lock:
        if named in _warned:
            return
        _warned[named] = str(problem)
    warn_user(
        f"kernel cache: {named} cannot be used ({problem}); kernels are compiled in memory, by "
        "each process for itself. Set CUPY_CACHE_DIR to a folder with room that you alone may "
        "write, or TMPDIR where a temporary file is meant",
        RuntimeWarning,
    )


@functools.cache
def cuda_core() -> Any:
    """Import cuda-core, one thread at a time: it replaces its own module while it is imported.

    Raises:
        ToolchainError: cuda-core is not installed or does not load.
    """
    with _import_lock:
        try:
            module = importlib.import_module("cuda.core")
            _ = module.Program
            return module
        except Exception as error:
            raise ToolchainError(f"cuda-core does not import ({error}); {INSTALL_HINT}") from error


@functools.cache
def include_directory() -> str:
    """Return the directory of the CUDA headers: the wheel's, or that of a CUDA installation.

    Raises:
        ToolchainError: neither is there.
    """
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        found = pathfinder.find_nvidia_header_directory("cudart")
    except ImportError:
        found = None
    if found is None:
        for variable in ("CUDA_PATH", "CUDA_HOME"):
            root = os.environ.get(variable)
            if root and Path(root, "include", "cuda_bf16.h").is_file():
                return os.path.abspath(Path(root, "include"))
    if found is None or not Path(found, "cuda_bf16.h").is_file():
        raise ToolchainError(
            "the CUDA headers (cuda_bf16.h) were not found in a wheel, CUDA_PATH or CUDA_HOME; "
            'install them with `pip install "cuda-toolkit[cudart]==12.*"` (or ==13.*, the CUDA '
            "release of your CuPy)"
        )
    return os.path.abspath(str(found))  # what is compiled must not hang on the working directory


def release(number: int) -> tuple[int, int]:
    """Return the CUDA release behind the number that headers and driver use: 13000 is (13, 0)."""
    return number // 1000, number % 1000 // 10


def cache_problem() -> str | None:
    """Return why compiled kernels are not kept in their folder; None where nobody found it so."""
    return _warned.get(_named_folder())


def need_compiler() -> None:
    """Raise unless sources can be compiled here, before somebody begins to.

    Raises:
        ToolchainError: CuPy, cuda-core, NVRTC or the headers are missing.
    """
    cuda_core()
    nvrtc_version()
    include_directory()


@functools.cache
def header_version() -> tuple[int, int] | None:
    """Return the CUDA release that the headers belong to, or None where they do not say."""
    for name in ("cuda_runtime_api.h", "cuda.h"):
        path = Path(include_directory(), name)
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            match = re.search(r"#define\s+(?:CUDART_VERSION|CUDA_VERSION)\s+(\d+)", text)
            if match:
                return release(int(match.group(1)))
    return None


class Option(NamedTuple):
    """An option of NVRTC, in the words of both compilers.

    Attributes:
        flags: what NVRTC reads; CuPy takes it as it is.
        field: the same as a field of cuda-core's ``ProgramOptions``.
        value: of that field.
        cupy_adds: CuPy says it by itself, and NVRTC may refuse to be told twice.
    """

    flags: tuple[str, ...]
    field: str
    value: object
    cupy_adds: bool = False


FLAGS = (
    Option(("--std=c++17",), "std", "c++17"),
    Option(("-ftz=true",), "ftz", True, cupy_adds=True),
    Option(
        ("--device-as-default-execution-space",),
        "device_as_default_execution_space",
        True,
        cupy_adds=True,
    ),
)
"""What is the same on every machine."""


def every_option(source_directory: Path) -> tuple[Option, ...]:
    """Return the one list of options; the architecture comes from each compiler's own caller."""
    folders = [str(source_directory), include_directory()]
    return (*FLAGS, Option(tuple(f"-I{folder}" for folder in folders), "include_path", folders))


def options(source_directory: Path) -> tuple[str, ...]:
    """Return the options of every instance for CuPy, which adds the rest and the architecture."""
    found = every_option(source_directory)
    return tuple(flag for option in found if not option.cupy_adds for flag in option.flags)


def program_options(source_directory: Path, arch: str, **more: object) -> Any:
    """Return the same options for cuda-core's ``Program``, with an architecture as ``"sm_90"``.

    ``more`` are fields that change what is told, not what is compiled.
    """
    fields = {option.field: option.value for option in every_option(source_directory)}
    return cuda_core().ProgramOptions(arch=arch, **fields, **more)


def nvrtc_version() -> tuple[int, int]:
    """Return the release of NVRTC.

    Raises:
        ToolchainError: there is no NVRTC.
    """
    try:
        major, minor = cupy().cuda.nvrtc.getVersion()
    except ToolchainError:
        raise
    except Exception as error:  # a class of cuda-pathfinder, or CuPy's RuntimeError
        raise no_nvrtc(error) from error
    return major, minor


def no_nvrtc(error: Exception) -> ToolchainError:
    """Return the error of a machine without NVRTC."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ToolchainError(
        f"NVRTC, the compiler of CUDA sources, does not load ({lines[0]}); {INSTALL_HINT}"
    )


NO_DRIVER = (
    "there is no NVIDIA driver here; install one, or give the container its GPUs "
    "(`docker run --gpus all`)"
)


def driver_release() -> tuple[int, int] | None:
    """Return the CUDA release of the driver, or None where there is no driver."""
    number = cupy().cuda.runtime.driverGetVersion()
    return release(number) if number else None


def describe_versions(nvrtc: tuple[int, int]) -> str:
    """Return one sentence on NVRTC and header releases, for a compile error."""
    headers = header_version()
    if headers is None:
        return ""
    text = f"NVRTC {nvrtc[0]}.{nvrtc[1]} with CUDA {headers[0]}.{headers[1]} headers from "
    text += include_directory()
    if nvrtc != headers:
        text += (
            ": the releases differ, which is a common cause of errors inside CUDA's own headers; "
            "install matching `nvidia-cuda-nvrtc` and `nvidia-cuda-runtime` wheels"
        )
    return text
