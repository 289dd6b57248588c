"""Instances: a source file and a name expression, compiled by CuPy at first use, per GPU.

One instance is one module, so that the first call waits for one kernel only (about 0.1 s). The
binary is kept on disk by ``binaries``, or is in one of the ``bundles``; what is loaded stays here.
However many threads and processes ask, one compiles.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from k3cupy.runtime import devices, env, sources, toolchain
from k3cupy.runtime.errors import (
    BusyError,
    MissingError,
    ToolchainError,
    refused_by_nvrtc,
    reject,
    shown,
)
from k3cupy.runtime.tensors import is_integer

if TYPE_CHECKING:
    from concurrent.futures import Future

    from k3cupy.runtime import bundles

_PAUSE = 0.02
"""Seconds before a warm-up asks again for what another process compiles."""


@dataclass(frozen=True)
class Instance:
    """A kernel to be: ``source`` is a file of ``cuda_src``, ``name_expression`` picks the template.

    With ``own_arch`` it uses instructions that only one architecture has, and is compiled for that
    of the GPU alone, as ``sm_90a``. ``dynamic_shared_bytes`` is what a launch adds to the shared
    memory of a block; it is no part of what is compiled.

    Example:
        >>> Instance("mla_decode.cu", "k3cupy::mla_decode_epilogue<__nv_bfloat16, ...>").source
        'mla_decode.cu'
    """

    source: str
    name_expression: str
    own_arch: bool = False
    dynamic_shared_bytes: int = field(default=0, compare=False, repr=False)

    def arch_on(self, arch: str) -> str:
        """Return what it is compiled for on GPUs of an architecture such as ``"sm_90"``."""
        return f"{arch}a" if self.own_arch else arch


def instantiation(name: str, *arguments: Any) -> str:
    """Return the C++ name of an instance of a template; of flags, numbers and names."""
    told = [str(a).lower() if isinstance(a, bool) else str(a) for a in arguments]
    return f"k3cupy::{name}<{', '.join(told)}>"


def supported(
    wanted: Callable[[devices.DeviceInfo], Iterable[Instance]], gpu: devices.DeviceInfo
) -> Iterable[Instance]:
    """Return what is wanted on a GPU, once it is known to run kernels: to choose may take long.

    Raises:
        ToolchainError: it is too old for every kernel.
    """
    devices.check_supported(gpu)
    return wanted(gpu)


@dataclass(frozen=True)
class LoadedKernel:
    """An instance on a GPU.

    Attributes:
        kernel: cuda-core's kernel object, ready to launch.
        device: GPU ordinal.
        function: CuPy's function object, or one that reads like it.
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


@dataclass
class _Attempt:
    """An instance on a GPU that somebody has asked for; the lock is held while it is compiled."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: LoadedKernel | None = None
    error: Exception | None = None


_lock = threading.Lock()
_limit_lock = threading.Lock()
_memory_cache_lock = threading.Lock()
_attempts: dict[tuple[int, int, Instance, str], _Attempt] = {}
"""By process too: a fork has neither the GPU of its parent nor the thread that compiles there."""


def load(instance: Instance, device: int) -> LoadedKernel:
    """Return an instance for a GPU; where it is not loaded yet, of a bundle, of the disk, compiled.

    Threads that wait for another's compilation get its error too. An interrupt is nobody's but the
    thread's that it came to: then the next one compiles.

    Raises:
        CompileError: NVRTC refused the source.
        ToolchainError: CuPy, cuda-core, NVRTC, the headers or a driver are missing, the GPU is too
            old, the driver refused the binary, or K3CUPY_NO_COMPILE forbids to compile it.
    """
    source = sources.load(instance.source)
    key = (os.getpid(), device, instance, source.digest)
    with _lock:
        attempt = _attempts.setdefault(key, _Attempt())
    with attempt.lock:
        if attempt.error is not None:
            raise attempt.error
        if attempt.loaded is None:
            try:
                attempt.loaded = _ready(instance, source, device)
            except BusyError:  # of a warm-up alone, which comes back; other threads wait
                raise
            except Exception as error:
                # The next call tries again. In this order an interrupt leaves no error behind.
                with _lock:
                    _attempts.pop(key, None)
                attempt.error = error
                raise
        return attempt.loaded


def is_loaded(instance: Instance, device: int) -> bool:
    """Return whether ``load`` would neither compile nor touch the driver."""
    digest = sources.load(instance.source).digest
    attempt = _attempts.get((os.getpid(), device, instance, digest))
    return attempt is not None and attempt.loaded is not None


def threads_of(max_workers: Any, most: int | None = None) -> int:
    """Return how many threads compile: as many as are named, or one per CPU core.

    Args:
        max_workers: what a caller named, or None.
        most: of CPU cores.

    Raises:
        TypeError, ValueError: it is no number above 0.
    """
    if max_workers is None:
        return min(most or 1 << 16, os.cpu_count() or 1)
    if not is_integer(max_workers) or max_workers < 1:
        kind = ValueError if is_integer(max_workers) else TypeError
        reject("max_workers", "None, or threads from 1 on", shown(max_workers), error=kind)
    return int(max_workers)


def load_all(
    instances: Iterable[Instance],
    device: int,
    *,
    max_workers: int | None = None,
    on_found: Callable[[int], None] = lambda _: None,
    on_done: Callable[[Instance], None] = lambda _: None,
) -> int:
    """Load many instances at once, on threads: NVRTC works outside Python's lock.

    What another process compiles comes last, so that several share the work.

    Args:
        instances: what to load; repeats are fine. To choose them takes time too, and the first are
            compiled meanwhile.
        device: GPU ordinal.
        max_workers: threads, by default one per CPU core up to 16.
        on_found: called with the number of instances so far.
        on_done: called with each instance that became ready.

    Returns:
        How many instances are ready.
    """
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    workers = threads_of(max_workers, 16)
    finished: SimpleQueue[Future[bool]] = SimpleQueue()
    futures: dict[Future[bool], Instance] = {}
    wanted: set[Instance] = set()
    with ThreadPoolExecutor(workers, thread_name_prefix="k3cupy-compile") as pool:

        def begin(instance: Instance, pause: float = 0.0) -> None:
            # Each task runs in a copy of this context, which holds `source_dir`.
            run = contextvars.copy_context().run
            future = pool.submit(run, _load_if_free, instance, device, pause)
            futures[future] = instance
            future.add_done_callback(finished.put)

        def settle(future: Future[bool]) -> None:
            instance = futures.pop(future)
            if not future.result():
                begin(instance, _PAUSE)  # behind all others
            else:
                on_done(instance)

        try:
            for instance in instances:
                if instance not in wanted:
                    wanted.add(instance)
                    begin(instance)
                    on_found(len(wanted))
                while not finished.empty():
                    settle(finished.get())
            while futures:
                settle(finished.get())
        except BaseException:  # an interrupt too must not wait for what nobody has begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return len(wanted)


def _load_if_free(instance: Instance, device: int, pause: float) -> bool:
    """Load an instance, unless another process compiles it: return whether it is ready."""
    from k3cupy.runtime import binaries

    time.sleep(pause)
    binaries.patient.set(False)
    try:
        load(instance, device)
    except BusyError:
        return False
    return True


def _ready(instance: Instance, source: sources.Source, device: int) -> LoadedKernel:
    from k3cupy.runtime import bundles  # these are slow to import, and CPU tensors need none

    cupy = toolchain.cupy()
    core = toolchain.cuda_core()
    if bundles.known() == bundles.NONE and not env.no_compile():
        toolchain.nvrtc_version()  # there is no way without, whatever GPU this is
    found = None
    try:
        with devices.current(device):
            info = devices.info(device)
            devices.check_supported(info)
            found = bundles.find(instance, source.digest, info)
            if found is not None:
                module, function = _of_binary(cupy, found.content)
            else:
                module, function = _kept_or_compiled(cupy, instance, source, info.arch)
            # Reading an attribute makes the driver load the code now, not at the first launch,
            # which may happen inside a graph capture.
            _ = function.num_regs
            kernel = core.Kernel.from_handle(function.kernel.ptr)
    except cupy.cuda.compiler.CompileException as error:
        versions = toolchain.describe_versions(toolchain.nvrtc_version())
        path = source.directory / instance.source
        raise refused_by_nvrtc(path, instance.name_expression, str(error), versions) from None
    except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
        driver = toolchain.driver_release()
        if driver is None:  # CUDA's own words for that are those for an old one
            raise ToolchainError(f"GPU {device}: {toolchain.NO_DRIVER}") from error
        raise ToolchainError(
            f"the driver refused {instance.name_expression} ({error}). Driver {_dotted(driver)}, "
            f"{_compiler(found)}: the driver must be at least as new as NVRTC's major "
            f"release; {toolchain.INSTALL_HINT}"
        ) from error
    return LoadedKernel(kernel=kernel, device=device, function=function, module=module)


def _compiler(found: bundles.Found | None) -> str:
    """Return what made a binary, in words."""
    if found is not None:
        return f"{found.bundle.compiler} of the bundle {found.bundle.folder}"
    return f"NVRTC {_dotted(toolchain.nvrtc_version())}"


def _kept_or_compiled(
    cupy: Any, instance: Instance, source: sources.Source, arch: str
) -> tuple[Any, Any]:
    """Return a module and a function of the disk cache, or compile it where that is allowed."""
    # With its precompiled headers CuPy reads what lies in the working directory.
    has_pch = getattr(cupy.cuda.compiler, "_use_pch", False)
    build = _by_cuda_core if instance.own_arch or has_pch else _by_cupy
    try:
        toolchain.nvrtc_version()
        return build(cupy, instance, source, arch)
    except ToolchainError as error:  # without NVRTC nobody can ask the disk cache
        if not env.no_compile():
            raise
        from k3cupy.runtime import bundles

        raise MissingError(
            f"K3CUPY_NO_COMPILE: expected {instance.name_expression} of {instance.source} for "
            f"{instance.arch_on(arch)} to be ready, got none: it is not loaded, "
            f"{bundles.known().described()}, and not in the disk cache. Make a bundle that has it "
            "with `k3cupy bundle`, fill the disk cache with `k3cupy warmup`, or unset "
            "K3CUPY_NO_COMPILE"
        ) from error


def _by_cupy(cupy: Any, instance: Instance, source: sources.Source, _: str) -> tuple[Any, Any]:
    """Return CuPy's module and function, from the disk cache where they are there."""
    from k3cupy.runtime import binaries  # slow to import, and CPU tensors need none of this

    name = instance.name_expression
    options = toolchain.options(source.directory)

    def build() -> tuple[Any, Any]:
        module = cupy.RawModule(code=source.text, options=options, name_expressions=(name,))
        return module, module.get_function(name)

    if env.no_compile() and toolchain.in_memory():  # CuPy does not even ask
        raise MissingError
    try:
        with binaries.in_place_of_cupys(cupy.cuda.compiler) as asked:
            built = build()
            if not asked.found:
                _check_unchanged(source, instance.source)
            for key, content in asked.made.items():
                binaries.keep(key, content)
    except OSError as error:  # CuPy writes the text to a temporary file
        if env.no_compile():
            raise MissingError from error
        toolchain.warn_of_cache(error)
        with _memory_cache_lock, toolchain.environment("CUPY_CACHE_IN_MEMORY", "1"):
            built = build()
        _check_unchanged(source, instance.source)
    return built


def _by_cuda_core(
    cupy: Any, instance: Instance, source: sources.Source, arch: str
) -> tuple[Any, Any]:
    """Return a module and function of cuda-core's compiler.

    It can name one architecture alone; CuPy names the architecture by itself, without the letter.
    """
    import hashlib  # these are slow to import, and CPU tensors need none

    from k3cupy.runtime import binaries, offline

    name, arch = instance.name_expression, instance.arch_on(arch)
    options = toolchain.every_option(source.directory)
    facts = (source.digest, instance, arch, toolchain.nvrtc_version(), options)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:40]
    with binaries.claimed(key) as content:
        if content is None:
            content = offline.binary_of(instance.source, name, arch)
            _check_unchanged(source, instance.source)
            binaries.keep(key, content)
    return _of_binary(cupy, content)


def _of_binary(cupy: Any, content: bytes) -> tuple[Any, Any]:
    """Return a module and function of what ``offline.binary_of`` made."""
    symbol, _, code = content.partition(b"\0")
    module = cupy.cuda.Module()
    module.load(code)
    return module, _Function(cupy.cuda.driver, module.get_function(symbol.decode()))


class _Function:
    """A function with its attributes, by the names that they have in a function of RawModule."""

    def __init__(self, driver: Any, kernel: Any) -> None:
        vars(self).update(driver=driver, kernel=kernel)

    def __getattr__(self, name: str) -> Any:
        return self.driver.funcGetAttribute(self._number(name), self.kernel.ptr)

    def __setattr__(self, name: str, value: int) -> None:
        self.driver.funcSetAttribute(self.kernel.ptr, self._number(name), value)

    def _number(self, name: str) -> Any:
        return getattr(self.driver, f"CU_FUNC_ATTRIBUTE_{name.upper()}")


def _check_unchanged(source: sources.Source, file: str) -> None:
    """Refuse what was compiled while the sources changed: it would be kept as another's."""
    edited = sources.overridden() is not None
    now = sources.load(file).digest if edited else sources.shipped_digest(file)
    if now != source.digest:
        toolchain.cupy().clear_memo()  # or RawModule would give it to whoever has the old text
        raise ToolchainError(
            f"{source.directory}: the sources changed while {file} was compiled. Call again, or "
            "restart the process where the package itself was replaced"
        )


def _dotted(release: Iterable[int]) -> str:
    return ".".join(map(str, release))
