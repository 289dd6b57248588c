"""``k3cupy.compile``: what the compiler makes of kernels, edited or not, for any GPU."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3cupy.compiling import looks
from k3cupy.compiling.assembled import parameter_sizes, taken, warnings_of
from k3cupy.compiling.report import CompiledKernel, CompileReport
from k3cupy.compiling.times import timed
from k3cupy.ops.warmup import OPERATIONS
from k3cupy.runtime import devices, offline, sources, toolchain
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import CompileError, ToolchainError, reject, shown
from k3cupy.runtime.instances import Instance, threads_of
from k3cupy.runtime.text import compiling

_WITHOUT_GPU = "h200"


def compile(
    source_dir: str | Path | None = None,
    op: str | None = None,
    *,
    gpu: Any = None,
    time: bool | None = None,
    max_workers: int | None = None,
    progress: bool = True,
    **options: Any,
) -> CompileReport:
    """Compile kernels for any GPU and say what they take; on that GPU also how long they take.

    No GPU is needed, only NVRTC: edit a copy of the CUDA sources and look what the compiler makes
    of it. Nothing is loaded, and nothing is kept.

    Args:
        source_dir: a folder laid out like ``cuda_src``, as ``k3cupy.source_dir`` takes it; or the
            name of an operation, of the sources that calls use now. None: those.
        op: the operation whose instances are compiled, as ``warmup`` names it. None: those that a
            difference from the sources of the package touches, in one configuration, GEMMs for a
            few products; with options those among them that take these. Where there is no
            difference ``"mla_decode"``, for example.
        gpu: ``"h200"``, the name that a GPU's driver gives, an architecture, or a ``DeviceInfo``;
            None: the GPU of this machine, or an H200 where there is none.
        time: time what can be timed, beside the kernel of the package, and check its results: calls
            in bfloat16 without RoPE, with aligned rows, products with static weights. It needs
            PyTorch and the GPU, and is the default where ``gpu`` is None and both are here.
        max_workers: compiling threads; by default one per CPU core.
        progress: show a bar on standard error.
        options: which instances, as of ``warmup``: ``kv_cache="fp8"``, ``shapes``, ``tokens``,
            ``config`` and so on. Without ``op`` and options every kernel of an edited source is
            compiled, and every two values of its flags, types and formats, as far as the GPU runs
            them; the report names what is left.

    Returns:
        Registers, spills, stack and shared memory of each instance, and warnings of the compiler;
        its ``sass`` is the machine code. It prints as a table. Shared memory is what the kernel
        declares: ``cuobjdump`` adds the 1,024 bytes that CUDA reserves for a block from sm_90 on.

    Raises:
        TypeError, ValueError: an argument names nothing that exists, or the GPU has no kernel of
            what is asked for.
        FileNotFoundError: the folder does not exist.
        CompileError: the source does not compile; the text has the log, with file and line.
        ToolchainError: NVRTC or the CUDA headers are missing, or ``time`` lacks the GPU.

    Example:
        >>> report = k3cupy.compile("mla_decode", kv_cache="fp8", gpu="sm_90")    # doctest: +SKIP
        >>> report[0].registers, report[0].spill_stores                        # doctest: +SKIP
        (56, 0)
        >>> k3cupy.compile("my_cuda_src", gpu="h200")                          # doctest: +SKIP
    """
    if isinstance(source_dir, str) and source_dir in OPERATIONS:
        if op is not None:
            reject("op", "None where the first argument names one", shown(op))
        source_dir, op = None, source_dir
    there, wants_times = _gpu_of(gpu, time)
    threads = threads_of(max_workers)
    toolchain.need_compiler()
    with _from(source_dir):
        folder = sources.directory()
        asked, notes = looks.of_call(op, options)
        instances, lacking = looks.instances_of(asked, there)
        edited = [each for each in instances if sources.is_edited(each.source)]
        with compiling(quiet=not progress) as (count, done):
            count(len(instances) + len(edited))

            def look(at: Iterable[Instance], *, must: bool) -> dict[Instance, CompiledKernel]:
                made = _compiled(at, there, threads, done, must)
                return timed(made, asked, there) if wants_times else made

            made = look(instances, must=True)
            if edited:
                with sources.source_dir(sources.shipped()):
                    shipped = look(edited, must=False)
                made |= {each: _beside(made[each], twin) for each, twin in shipped.items()}
    return CompileReport(there, folder, bool(edited), [*made.values()], [*notes, *lacking])


@contextlib.contextmanager
def _from(source_dir: str | Path | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if source_dir is not None:
            try:
                stack.enter_context(sources.source_dir(source_dir))
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{error}. Or name an operation: {', '.join(OPERATIONS)}"
                ) from None
        yield


def _gpu_of(gpu: Any, time: bool | None) -> tuple[DeviceInfo, bool]:
    """Return what is compiled for, and whether to time it."""
    if time is not None and not isinstance(time, bool):
        reject("time", "None, True or False", shown(time), error=TypeError)
    if gpu is not None:
        if time:
            reject("time", "False for a GPU that is not this machine's", shown(time))
        return devices.named(gpu), False
    try:
        here = devices.info(devices.ordinal_of(None))
    except ToolchainError as error:
        if time:
            raise ToolchainError(
                f"time: expected a GPU on this machine, got none: {error}"
            ) from error
        return devices.named(_WITHOUT_GPU), False
    if time and not _has_torch_gpu():
        raise ToolchainError("time: expected PyTorch with this GPU, got none that sees it")
    return here, _has_torch_gpu() if time is None else time


def _has_torch_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _compiled(
    instances: Iterable[Instance],
    gpu: DeviceInfo,
    threads: int,
    on_done: Callable[[Any], None],
    must: bool,
) -> dict[Instance, CompiledKernel]:
    """Return kernels in the order of their instances; unless all must be, those that there are."""

    def one(instance: Instance) -> CompiledKernel | None:
        arch, name = instance.arch_on(gpu.arch), instance.name_expression
        try:
            cubin = offline.compile_cubin(instance.source, [name], arch, verbose=True)
        except CompileError:
            if must:
                raise
            return None
        finally:
            on_done(instance)
        symbol = cubin.symbols[name]
        return CompiledKernel(
            instance.source,
            name,
            arch,
            *taken(cubin.log, symbol),
            instance.dynamic_shared_bytes,
            symbol,
            cubin.code,
            warnings=warnings_of(cubin.log),
        )

    with ThreadPoolExecutor(threads) as pool:
        # Each task runs in a copy of this context, which holds the folder.
        futures = {
            each: pool.submit(contextvars.copy_context().run, one, each) for each in instances
        }
        try:
            made = {instance: future.result() for instance, future in futures.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {instance: kernel for instance, kernel in made.items() if kernel is not None}


def _beside(kernel: CompiledKernel, shipped: CompiledKernel) -> CompiledKernel:
    """Return a kernel with that of the package, and with a warning if no launch fits it."""
    if kernel.code == shipped.code:
        return replace(kernel, shipped=shipped)
    here, there = (parameter_sizes(each.code, each.symbol) for each in (kernel, shipped))
    told = (
        f"{kernel.source}: {len(here)} parameters of {_sizes(here)} bytes, but a launch passes the "
    )
    told += f"package's, {len(there)} of {_sizes(there)}: the list of a kernel must stay as it is"
    warnings = kernel.warnings if here == there else (told, *kernel.warnings)
    return replace(kernel, shipped=shipped, warnings=warnings)


def _sizes(parameters: Iterable[tuple[int, int]]) -> str:
    return ", ".join(str(size) for _, size in parameters)
