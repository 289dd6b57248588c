"""Instances: a source file and a name expression, compiled by CuPy at first use, per GPU.

One instance is one module, so that the first call waits for one kernel only (about 0.1 s). CuPy
keeps the binary on disk; what is loaded stays here. However many threads ask, one compiles.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3cupy.runtime import devices, sources, toolchain
from k3cupy.runtime.errors import CompileError, ToolchainError
from k3cupy.runtime.warn import warn_user

if TYPE_CHECKING:
    from concurrent.futures import Future


@dataclass(frozen=True)
class Instance:
    """A kernel to be: ``source`` is a file of ``cuda_src``, ``name_expression`` picks the template.

    With ``own_arch`` it uses instructions that only one architecture has, and is compiled for that
    of the GPU alone, as ``sm_90a``.

    Example:
        >>> Instance("mla_decode.cu", "k3cupy::mla_decode_epilogue<__nv_bfloat16, ...>").source
        'mla_decode.cu'
    """

    source: str
    name_expression: str
    own_arch: bool = False


TEMPLATE_FLAGS = {False: "false", True: "true"}
"""A bool as an argument of a template."""


@dataclass(frozen=True)
class LoadedKernel:
    """An instance on a GPU.

    Attributes:
        kernel: cuda-core's kernel object, ready to launch.
        device: GPU ordinal.
        function: CuPy's function object.
        module: CuPy's module, which owns the code.
    """

    kernel: Any
    device: int
    function: Any
    module: Any

    def allow_shared_memory(self, size: int) -> None:
        """Let a block have ``size`` bytes of dynamic shared memory; the limit only ever grows."""
        with _limit_lock, devices.current(self.device):
            if size > self.function.max_dynamic_shared_size_bytes:
                self.function.max_dynamic_shared_size_bytes = size


_lock = threading.Lock()
_limit_lock = threading.Lock()
_memory_cache_lock = threading.Lock()
_loaded: dict[tuple[int, Instance, str], Future[LoadedKernel]] = {}
_warned: set[tuple[Path, int | None]] = set()


def load(instance: Instance, device: int) -> LoadedKernel:
    """Return an instance for a GPU; compile or read it from disk where it is not loaded yet.

    Raises:
        CompileError: NVRTC refused the source.
        ToolchainError: CuPy, cuda-core or the headers are missing, or the driver refused the
            binary.
    """
    from concurrent.futures import Future  # slow to import, and CPU tensors need none of this

    source = sources.load(instance.source)
    key = (device, instance, source.digest)
    with _lock:
        future = _loaded.get(key)
        owner = future is None
        if future is None:
            future = _loaded[key] = Future()
    if owner:
        try:
            future.set_result(_compile(instance, source, device))
        except BaseException as error:
            with _lock:
                del _loaded[key]
            future.set_exception(error)
    return future.result()


def is_loaded(instance: Instance, device: int) -> bool:
    """Return whether ``load`` would neither compile nor touch the driver."""
    key = (device, instance, sources.load(instance.source).digest)
    with _lock:
        future = _loaded.get(key)
    return future is not None and future.done() and future.exception() is None


def load_all(
    instances: Iterable[Instance],
    device: int,
    *,
    max_workers: int | None = None,
    on_done: Callable[[Instance], None] | None = None,
) -> int:
    """Load many instances at once, on threads: NVRTC works outside Python's lock.

    Args:
        instances: what to load; repeats are fine.
        device: GPU ordinal.
        max_workers: threads, by default one per CPU core up to 16.
        on_done: called with each instance that became ready.

    Returns:
        How many instances are ready.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    wanted = list(dict.fromkeys(instances))
    workers = max_workers or min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="k3cupy-compile") as pool:
        # Each task runs in a copy of this context, which holds `source_dir`.
        futures = {
            pool.submit(contextvars.copy_context().run, load, instance, device): instance
            for instance in wanted
        }
        for future in as_completed(futures):
            future.result()
            if on_done is not None:
                on_done(futures[future])
    return len(wanted)


def _compile(instance: Instance, source: sources.Source, device: int) -> LoadedKernel:
    cupy = toolchain.cupy()
    core = toolchain.cuda_core()
    with devices.current(device):
        try:
            module, function = _build(cupy, instance, source, device)
        except cupy.cuda.compiler.CompileException as error:
            versions = toolchain.describe_versions(tuple(cupy.cuda.nvrtc.getVersion()))
            raise CompileError(
                f"{source.directory / instance.source}: NVRTC refused "
                f"{instance.name_expression}\n{error}\n{versions}"
            ) from error
        except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
            raise ToolchainError(
                f"the driver refused {instance.name_expression} ({error}). Driver "
                f"{_dotted(toolchain.release(cupy.cuda.runtime.driverGetVersion()))}, NVRTC "
                f"{_dotted(cupy.cuda.nvrtc.getVersion())}: the driver must be at least "
                f"as new as NVRTC's major release; {toolchain.INSTALL_HINT}"
            ) from error
        return LoadedKernel(
            kernel=core.Kernel.from_handle(function.kernel.ptr),
            device=device,
            function=function,
            module=module,
        )


def _build(cupy: Any, instance: Instance, source: sources.Source, device: int) -> tuple[Any, Any]:
    """Return CuPy's module and function; compile in memory where the disk cannot be used."""
    try:
        return _build_once(cupy, instance, source, device)
    except OSError as error:
        _warn_of_cache(error)
        with _memory_cache_lock:
            before = os.environ.get("CUPY_CACHE_IN_MEMORY")
            os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
            try:
                return _build_once(cupy, instance, source, device)
            finally:
                if before is None:
                    del os.environ["CUPY_CACHE_IN_MEMORY"]
                else:
                    os.environ["CUPY_CACHE_IN_MEMORY"] = before


def _warn_of_cache(error: OSError) -> None:
    """Warn once for a directory and a kind of error: each error names another temporary file."""
    directory = toolchain.cache_directory()
    if (directory, error.errno) in _warned:
        return
    _warned.add((directory, error.errno))
    warn_user(
        f"kernel cache: {directory} cannot be used ({error}); compiling in memory. Free space "
        "there, remove the entry that the error names, or set CUPY_CACHE_DIR to a writable "
        "directory.",
        RuntimeWarning,
    )


def _build_once(
    cupy: Any, instance: Instance, source: sources.Source, device: int
) -> tuple[Any, Any]:
    name = instance.name_expression
    if not instance.own_arch:
        options = toolchain.options(source.directory)
        module = cupy.RawModule(code=source.text, options=options, name_expressions=(name,))
        return module, _loaded_function(module, name)
    from k3cupy.runtime import binaries

    arch, nvrtc = f"{devices.info(device).arch}a", tuple(cupy.cuda.nvrtc.getVersion())
    with binaries.binary(source, instance.source, name, arch, nvrtc) as (path, symbol):
        module = cupy.RawModule(path=str(path))
        return module, _loaded_function(module, symbol)


def _loaded_function(module: Any, name: str) -> Any:
    function = module.get_function(name)
    # Reading an attribute makes the driver load the code now, not at the first launch, which may
    # happen inside a graph capture.
    _ = function.num_regs
    return function


def _dotted(release: Iterable[int]) -> str:
    return ".".join(map(str, release))
