"""``k3cupy.tune``: measure on this machine's GPU which kernel each linear layer is to take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3cupy.dispatch import presets
from k3cupy.dispatch.tuning import files
from k3cupy.dispatch.tuning.candidates import Known, Target, candidates, targets
from k3cupy.dispatch.tuning.engine import Meter, measure_all
from k3cupy.dispatch.tuning.report import TuneReport, Watch, refusals
from k3cupy.ops import checks, gemm_cache, gemm_tables
from k3cupy.ops.gemm_entry import GemmEntry
from k3cupy.runtime import devices, sources
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import ToolchainError


def tune(
    shapes: Sequence[tuple[int, int]] | None = None,
    *,
    preset: str | None = None,
    module: Any = None,
    tokens: Sequence[int] | None = None,
    residual: bool = True,
    again: bool = False,
    export: str | Path | None = None,
    device: int | None = None,
    progress: bool = True,
) -> TuneReport:
    """Measure the kernels for given weights on this GPU, and keep the result for later processes.

    Each kernel's product is checked first; what is wrong is reported and never recorded. Then the
    kernels and PyTorch's own linear are timed in CUDA graphs with cold weights. Every finished
    product is written to the user cache at once: an interrupted run loses nothing, and the next one
    goes on from there. ``low_latency_linear`` and the rest of this process use the new choices from
    the end of this call on.

    Args:
        shapes: (N, K) of the weights.
        preset: or the name of a model, for example ``"kimi-k3-tp8"``.
        module: or a ``torch.nn.Module``, or where one is found, as ``"package.module:name"``; its
            bfloat16 ``nn.Linear`` layers without bias are measured.
        tokens: numbers of rows, of those that tables list; None: all of them, from 1 to 64.
        residual: measure also with a residual, against ``torch.addmm``.
        again: measure also what has been measured with the same kernels.
        export: write the measurements there too, to share them.
        device: GPU ordinal; by default PyTorch's current one.
        progress: show a bar on standard error; where that is no terminal, a line a shape.

    Returns:
        The choices and their times; prints as a table.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it.
        ToolchainError: there is no GPU, or no PyTorch, or the kernels cannot be built here.

    Example:
        >>> print(k3cupy.tune([(2112, 7168)], tokens=[1, 8]))    # doctest: +SKIP
        >>> print(k3cupy.tune(preset="kimi-k3-tp8"))             # doctest: +SKIP
    """
    job = prepare(
        shapes_of(shapes, preset, module), tokens, residual=residual, again=again, device=device
    )
    with _on(job.device):
        report = run(job, progress=progress)
    if export is not None:
        files.write_export(Path(export), report.entries, job.device)
    return report


def shapes_of(
    shapes: Sequence[tuple[int, int]] | None = None, preset: str | None = None, module: Any = None
) -> presets.Shapes:
    """Return the weights that one of the three ways to name them means.

    Raises:
        TypeError, ValueError: none or several are given, or one does not fit.
    """
    given = [
        name
        for name, value in (("shapes", shapes), ("preset", preset), ("module", module))
        if value is not None
    ]
    if len(given) != 1:
        checks.reject(
            "shapes", "one of shapes, preset and module", " and ".join(given) or "none of them"
        )
    if preset is not None:
        return presets.preset_shapes(preset)
    return tuple(shapes) if shapes is not None else presets.module_shapes(module)


@dataclass(frozen=True)
class Job:
    """What is to be measured.

    Attributes:
        device: the GPU.
        targets: every product that was asked for, in order.
        known: what is kept from before, of the same kernels.
        todo: those of the targets that are to be measured.
    """

    device: DeviceInfo
    targets: tuple[Target, ...]
    known: Known
    todo: tuple[Target, ...]

    def __str__(self) -> str:
        """A line a shape: what would be measured."""
        done = len(self.targets) - len(self.todo)
        lines = [f"{self.device.name}: {len(self.todo)} products to measure, {done} are known"]
        for row in dict.fromkeys(target.row for target in self.todo):
            here = [target for target in self.todo if target.row == row]
            some = {c for t in here for c in candidates(t, self.known, self.device)}
            told = "the best of these" if here[0].residual else f"{len(some)} candidates"
            counts = ", ".join(str(target.tokens) for target in here)
            lines.append(f"  {row}: M = {counts}; {told}")
        return "\n".join(lines)


def prepare(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int] | None = None,
    *,
    residual: bool = True,
    again: bool = False,
    device: int | None = None,
) -> Job:
    """Return what ``tune`` would measure; the arguments are the same.

    Raises:
        TypeError, ValueError: an argument does not fit.
        ToolchainError: there is no GPU.
    """
    counts = gemm_tables.TOKENS if tokens is None else tokens
    wanted = targets(tuple(shapes), counts, residual=residual)
    if sources.overridden() is not None:
        checks.reject(
            "sources",
            "the kernels of the package, which a measurement is kept for",
            f"edited ones in {sources.overridden()}",
            "Unset K3CUPY_SOURCE_DIR or leave source_dir(), or compare with `python -m k3cupy "
            "bench linear`",
        )
    gpu = devices.info(devices.ordinal_of(device))
    entries = gemm_cache.read(gemm_cache.path_of(gpu), gpu.name)
    asked = {target.key for target in wanted}
    known = {e.key: e for e in entries if not (again and e.key in asked)}
    return Job(gpu, wanted, known, tuple(t for t in wanted if t.key not in known))


def run(job: Job, meter: Meter | None = None, *, progress: bool = True) -> TuneReport:
    """Measure a job, and keep every product as soon as it is done.

    Args:
        job: from ``prepare``.
        meter: what measures; None for the job's GPU.
        progress: as for ``tune``.
    """
    path: Path | None = gemm_cache.path_of(job.device)
    found: dict[tuple[int, int, int, bool], GemmEntry] = dict(job.known)
    refused: list[str] = []
    unsaved: list[GemmEntry] = []

    def save() -> None:
        nonlocal path
        if unsaved:
            path = gemm_cache.add(unsaved, job.device)
            unsaved.clear()

    try:
        if job.todo:
            measuring = measure_all(job.todo, job.known, meter or _cuda_meter(job))
            with contextlib.closing(measuring), Watch(job.todo, quiet=not progress) as watch:
                for measured in measuring:
                    unsaved.append(measured.entry)
                    save()
                    found[measured.target.key] = measured.entry
                    refused += refusals(measured)
                    watch(measured)
    finally:
        save()  # an interruption may have come between
        gemm_tables.reload()
    entries = tuple(found[target.key] for target in job.targets)
    return TuneReport(job.device.name, entries, len(job.todo), tuple(refused), path)


def _cuda_meter(job: Job) -> Meter:
    from k3cupy.dispatch.tuning.cuda_meter import CudaMeter

    shapes = dict.fromkeys((target.n, target.k) for target in job.todo)
    return CudaMeter(tuple(shapes), job.device.index)


@contextlib.contextmanager
def _on(device: DeviceInfo) -> Iterator[None]:
    """Make a GPU PyTorch's current one.

    Raises:
        ToolchainError: PyTorch is missing, or sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise ToolchainError("tuning needs PyTorch: pip install torch") from error
    if not torch.cuda.is_available():
        raise ToolchainError("tuning needs a CUDA GPU; PyTorch sees none")
    with torch.cuda.device(device.index), torch.no_grad():
        yield
