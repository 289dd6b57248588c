"""``k3cupy.compile``: what the compiler makes of kernels, edited or not, for any GPU."""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3cupy.choose.gemm import FUSED_A, SKINNY, choose
from k3cupy.kernels import (
    fused_a_gemm,
    mla_decode,
    mla_norm,
    mla_prefill,
    mla_query,
    mla_value,
    skinny_gemm,
)
from k3cupy.ops.warmup import OPERATIONS, wanted_of
from k3cupy.runtime import devices, offline, sources
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import ToolchainError, reject, shown
from k3cupy.runtime.instances import Instance
from k3cupy.runtime.text import Shown, compiling, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from k3cupy.tuning.entries import Candidate
    from k3cupy.tuning.targets import Target

_ONE_PRODUCT = {"shapes": ((2112, 7168),), "tokens": (1, 16), "weight_is_static": True}
_OF_SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    mla_decode.SOURCE: ("mla_decode", {"rope": (False, True), "config": mla_decode.UNTUNED}),
    mla_prefill.SOURCE: ("mla_prefill", {"rope": (False, True), "config": mla_prefill.FEW_ROWS}),
    mla_norm.SOURCE: ("mla_norm", {"config": mla_norm.UNTUNED, "weight_is_static": True}),
    mla_query.SOURCE: ("mla_query", {"config": mla_query.UNTUNED, "weight_is_static": True}),
    mla_value.SOURCE: ("mla_value", {"config": mla_value.UNTUNED, "weight_is_static": True}),
    fused_a_gemm.SOURCE: ("fused_a_gemm", _ONE_PRODUCT),
    skinny_gemm.SOURCE: ("skinny_gemm", _ONE_PRODUCT),
}
"""Source -> the operation that an edit of it is looked at by, with its options."""

_WITHOUT_GPU = "h200"
_TIMED, _TIMED_OF = 32, {"mla_prefill": 1024, "mla_query": 8}
"""Tokens of a timed call of a kernel of an MLA layer, and of some of them."""


@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler made of one instance.

    Attributes:
        source: its file.
        name_expression: the instance.
        arch: what it was compiled for.
        registers: a thread.
        spill_stores, spill_loads: bytes a thread that found no register.
        stack_bytes: local memory of a thread, spills among it.
        shared_bytes: static shared memory of a block.
        dynamic_shared_bytes: what a launch adds to it.
        code: the ELF file.
        us: microseconds that it adds to its chain; None where it was not timed.
        timed: the call that was timed, or why it was not.
        shipped: the same of the sources of the package; None where those are what was compiled, or
            have no such instance.
    """

    source: str
    name_expression: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int
    dynamic_shared_bytes: int
    code: bytes = field(repr=False)
    us: float | None = None
    timed: str = ""
    shipped: CompiledKernel | None = field(default=None, repr=False)

    @property
    def sass(self) -> str:
        """The machine code as text.

        Raises:
            ToolchainError: nvdisasm is not here.
        """
        return offline.disassembled(self.code)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain values, of the code its size."""
        found = {**asdict(replace(self, shipped=None)), "code": len(self.code)}
        return {**found, "shipped": None if self.shipped is None else self.shipped.to_dict()}


class CompileReport(Shown):
    """Instances and what they take; prints as a table.

    It has a length, can be iterated, and indexed by place (``CompiledKernel``).

    Attributes:
        gpu: what they are for.
        folder: of the sources.
        is_edited: the sources differ from those of the package.
    """

    def __init__(
        self, gpu: DeviceInfo, folder: Path, is_edited: bool, kernels: Sequence[CompiledKernel]
    ) -> None:
        self.gpu, self.folder, self.is_edited = gpu, folder, is_edited
        self._kernels = tuple(kernels)

    def __len__(self) -> int:
        """The number of instances."""
        return len(self._kernels)

    def __iter__(self) -> Iterator[CompiledKernel]:
        """Go through the instances."""
        return iter(self._kernels)

    def __getitem__(self, place: int) -> CompiledKernel:
        """The instance at a place."""
        return self._kernels[place]

    def to_dict(self) -> dict[str, Any]:
        """Return ``gpu``, ``arch``, ``folder``, ``is_edited`` and ``kernels`` as plain values."""
        return {
            "gpu": self.gpu.name,
            "arch": self.gpu.arch,
            "folder": str(self.folder),
            "is_edited": self.is_edited,
            "kernels": [kernel.to_dict() for kernel in self._kernels],
        }

    def __rich__(self) -> Table:
        """The table, for ``rich.print``; what differs from the shipped kernel names both."""
        kind = "edited sources" if self.is_edited else "sources"
        plural = "" if len(self) == 1 else "s"
        title = f"{len(self)} instance{plural} for {self.gpu.name} ({self.gpu.arch}), {kind} in "
        title += f"{self.folder}"
        was_timed = any(kernel.timed for kernel in self._kernels)
        headers = (*_COLUMNS, *([" us", "call"] if was_timed else []), "instance")
        rows = []
        for kernel in self._kernels:
            numbers = [_beside(kernel, name) for name in _COLUMNS.values()]
            if was_timed:
                numbers += ["" if kernel.us is None else _beside(kernel, "us"), kernel.timed]
            name = kernel.name_expression.replace("k3cupy::", "")
            rows.append((*numbers, f"{kernel.source}: {name}"))
        return table_of(headers, rows, title)


_COLUMNS = {
    " registers": "registers",
    " spilled": "spill_stores",
    " stack": "stack_bytes",
    " shared": "shared_bytes",
    " dynamic": "dynamic_shared_bytes",
}
"""Header -> attribute; bytes, but for the registers."""


def _beside(kernel: CompiledKernel, name: str) -> str:
    """Return a number, and beside it that of the shipped kernel where it is another one."""
    here, there = getattr(kernel, name), getattr(kernel.shipped, name, None)
    form = "{:.2f}" if name == "us" else "{}"
    told = form.format(here)
    return told if there in (None, here) else f"{told} (shipped {form.format(there)})"


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
            difference from the sources of the package touches, in one configuration, GEMMs for one
            product; where there is none, or with options, ``"mla_decode"``.
        gpu: ``"h200"``, the name that a GPU's driver gives, an architecture, or a ``DeviceInfo``;
            None: the GPU of this machine, or an H200 where there is none.
        time: time what can be timed, beside the kernel of the package, and check its results: calls
            in bfloat16 without RoPE, with aligned rows, products with static weights. It needs
            PyTorch and the GPU, and is the default where ``gpu`` is None and both are here.
        max_workers: compiling threads; by default one per CPU core.
        progress: show a bar on standard error.
        options: which instances, as of ``warmup``: ``kv_cache="fp8"``, ``shapes``, ``tokens``,
            ``config`` and so on.

    Returns:
        Registers, spills, stack and shared memory of each instance; its ``sass`` is the machine
        code. It prints as a table.

    Raises:
        TypeError, ValueError: an argument names nothing that exists.
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
    here = _gpu_here() if gpu is None else None
    there = devices.named(_WITHOUT_GPU if gpu is None else gpu) if here is None else here
    wants_times = here is not None and _has_torch_gpu() if time is None else time
    if wants_times and here is None:
        reject("time", "False for a GPU that is not this machine's", shown(time))
    with contextlib.nullcontext() if source_dir is None else sources.source_dir(source_dir):
        folder, changed = sources.directory(), _changed()
        asked = [(op or "mla_decode", options)] if op or options or not changed else changed
        found = [instance for name, of in asked for instance in wanted_of(name, of)(there)]
        instances = list(dict.fromkeys(found))
        with compiling(quiet=not progress) as (count, done):
            count(len(instances) * (2 if changed else 1))

            def look() -> list[CompiledKernel]:
                made = _compiled(instances, there, max_workers, done)
                return _timed(made, instances, asked, there) if wants_times else made

            made = look()
            if changed:
                with sources.source_dir(sources.shipped()):
                    shipped = look()
                made = [replace(k, shipped=s) for k, s in zip(made, shipped, strict=True)]
    return CompileReport(there, folder, bool(changed), made)


def _gpu_here() -> DeviceInfo | None:
    try:
        return devices.info(devices.ordinal_of(None))
    except ToolchainError:
        return None


def _has_torch_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _changed() -> list[tuple[str, dict[str, Any]]]:
    """Return the operations whose sources are not those of the package, with their options."""
    if sources.overridden() is None:
        return []
    return [
        found
        for source, found in _OF_SOURCES.items()
        if sources.load(source).digest != sources.shipped_digest(source)
    ]


def _compiled(
    instances: Sequence[Instance],
    gpu: DeviceInfo,
    max_workers: int | None,
    on_done: Callable[[Any], None],
) -> list[CompiledKernel]:
    def one(instance: Instance) -> CompiledKernel:
        arch, name = instance.arch_on(gpu.arch), instance.name_expression
        cubin = offline.compile_cubin(instance.source, [name], arch, verbose=True)
        on_done(instance)
        taken = _taken(cubin.log)
        dynamic = instance.dynamic_shared_bytes
        code = cubin.code
        return CompiledKernel(instance.source, name, arch, *taken, dynamic, code)

    with ThreadPoolExecutor(max_workers or os.cpu_count()) as pool:
        # Each task runs in a copy of this context, which holds the folder.
        futures = [pool.submit(contextvars.copy_context().run, one, each) for each in instances]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _taken(log: str) -> tuple[int, int, int, int, int]:
    """Return registers, spilled bytes stored and loaded, stack and static shared memory."""

    def number(pattern: str) -> int:
        match = re.search(rf"(\d+) {pattern}", log) or re.search(rf"{pattern} (\d+)", log)
        return int(match[1]) if match else 0

    if "registers" not in log:
        raise ToolchainError(
            "this NVRTC does not say what kernels take: install one of CUDA 12.9 or newer"
        )
    of_thread = number("bytes spill stores"), number("bytes spill loads")
    return number("registers"), *of_thread, number("bytes stack frame"), number("bytes smem")


# --- Times ---------------------------------------------------------------------------------------


def _timed(
    made: Sequence[CompiledKernel],
    instances: Sequence[Instance],
    asked: Sequence[tuple[str, dict[str, Any]]],
    gpu: DeviceInfo,
) -> list[CompiledKernel]:
    """Return kernels with the times of calls that run them, as the tuner takes them."""
    import torch

    from k3cupy.tuning.cuda_meter import CudaMeter
    from k3cupy.tuning.engine import Effort

    calls: dict[Instance, tuple[Target, Candidate]] = {}
    for op, options in asked:
        for target, candidate in _calls_of(op, options, gpu):
            calls.setdefault(target.instance(candidate), (target, candidate))
    found = []
    for kernel, instance in zip(made, instances, strict=True):
        if instance not in calls:
            found.append(replace(kernel, timed="no call of the tuner's runs it"))
            continue
        target, candidate = calls[instance]
        with torch.cuda.device(gpu.index), torch.no_grad():
            meter = CudaMeter([target], gpu.index)
            try:
                wrong = meter.check(target, candidate)
                if wrong is None:
                    (us,) = meter.time(target, [candidate], Effort.FULL)
                    found.append(replace(kernel, us=us, timed=str(target)))
                else:
                    found.append(replace(kernel, timed=f"not timed, it is wrong: {wrong}"))
            finally:
                meter.close()
    return found


def _calls_of(
    op: str, options: dict[str, Any], gpu: DeviceInfo
) -> Iterator[tuple[Target, Candidate]]:
    """Yield calls that the tuner could time, with the configurations that they may get."""
    from k3cupy.ops.warmup import shapes_of, tokens_of
    from k3cupy.tuning.entries import Candidate
    from k3cupy.tuning.targets import KINDS, GemmTarget
    from k3cupy.tuning.tune import targets_of

    config = options.get("config")
    if op in KINDS:
        for target in targets_of(op, tokens=[_TIMED_OF.get(op, _TIMED)]):
            every = target.candidates({}, gpu) if config is None else [Candidate(op, config)]
            for candidate in every:
                yield target, candidate
        return
    gemms = {"fused_a_gemm": (FUSED_A, fused_a_gemm), "skinny_gemm": (SKINNY, skinny_gemm)}
    if op not in gemms:
        return
    kernel, module = gemms[op]
    for n, k in shapes_of(options.get("shapes"), module.K_MULTIPLE):
        for count in tokens_of(options.get("tokens"), module.MAX_TOKENS):
            chosen = config or choose((kernel,), n, k, count, gpu).config
            yield GemmTarget(n, k, count), Candidate(kernel, chosen)
