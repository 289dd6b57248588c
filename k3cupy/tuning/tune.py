"""``k3cupy.tune``: measure on this machine's GPU which configuration each call is to take."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3cupy import projections
from k3cupy.choose import cache
from k3cupy.choose.table import GEMM, Entry
from k3cupy.runtime import devices, sources, toolchain
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import ToolchainError, reject, shown
from k3cupy.tuning import files
from k3cupy.tuning.engine import measure_all
from k3cupy.tuning.entries import Known, settled
from k3cupy.tuning.report import TuneReport, watch
from k3cupy.tuning.targets import KINDS, Target, gemm_targets, mla_targets

if TYPE_CHECKING:  # it imports PyTorch
    from k3cupy.tuning.cuda_meter import CudaMeter

FAMILY_OF = {"low_latency_linear": GEMM, **{name: name for name in KINDS}}
"""Operation -> its family of kernels."""

_NUM_HEADS = 12
"""Of a GPU where eight share the model."""


def tune(
    shapes: Sequence[tuple[int, int]] | None = None,
    *,
    op: str = "low_latency_linear",
    preset: str | None = None,
    module: Any = None,
    kinds: Sequence[str] | None = None,
    num_heads: int | None = None,
    tokens: Sequence[int] | None = None,
    residual: bool = True,
    again: bool = False,
    export: str | Path | None = None,
    device: int | None = None,
    progress: bool = True,
) -> TuneReport:
    """Measure the configurations of an operation on this GPU, and keep the result for later.

    What each one computes is checked first; what is wrong is reported and never recorded. Then they
    are timed in CUDA graphs by what they add to their chain: products beside PyTorch's own linear,
    with cold weights. Every finished size of a problem is written to the user cache at once, and to
    ``export``: an interrupted run loses nothing, and the next one goes on from there. The rest of
    this process uses the new choices from the end of this call on.

    Args:
        shapes: products: (N, K) of the weights.
        op: ``"low_latency_linear"``, ``"mla_decode"``, ``"mla_prefill"`` for the prefill and the
            context epilogues, ``"mla_norm"``, ``"mla_query"`` or ``"mla_value"``.
        preset: products: or the name of a model, for example ``"kimi-k3-tp8"``.
        module: products: or a ``torch.nn.Module``, or where one is found, as
            ``"package.module:name"``; its bfloat16 ``nn.Linear`` layers without bias are measured.
        kinds: MLA: formats of query and cache, as ``"fp8+fp8"``, names of the prefill operations,
            or ``"value+gate"``, ``"value"`` and ``"absorb"``; None: all.
        num_heads: MLA: local heads; None: 12.
        tokens: numbers of tokens. Of products those that tables list, from 1 to 64. None: all that
            the shipped tables have.
        residual: products: measure also with a residual, against ``torch.addmm``.
        again: measure also what has been measured with the same kernels.
        export: write the measurements there too, to share them.
        device: GPU ordinal; by default PyTorch's current one.
        progress: show a bar on standard error; where that is no terminal, a line a problem.

    Returns:
        The choices and their times; prints as a table.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it.
        ToolchainError: there is no GPU, or no PyTorch, or the kernels cannot be built here.

    Example:
        >>> print(k3cupy.tune([(2112, 7168)], tokens=[1, 8]))             # doctest: +SKIP
        >>> print(k3cupy.tune(preset="kimi-k3-tp8"))                      # doctest: +SKIP
        >>> print(k3cupy.tune(op="mla_decode", kinds=["fp8+fp8"]))        # doctest: +SKIP
    """
    named = dict(shapes=shapes, preset=preset, module=module, kinds=kinds, num_heads=num_heads)
    targets = targets_of(op, tokens=tokens, residual=residual, **named)
    job = prepare(targets, again=again, device=device)
    with toolchain.optional("tuning"):
        import torch
    if not torch.cuda.is_available():
        raise ToolchainError("tuning needs a CUDA GPU; PyTorch sees none")
    with torch.cuda.device(job.gpu.index), torch.no_grad():
        return run(job, progress=progress, export=export)


def targets_of(
    op: str, *, tokens: Sequence[int] | None = None, residual: bool = True, **named: Any
) -> tuple[Target, ...]:
    """Return what the arguments of ``tune`` name, in the order in which it is measured.

    Raises:
        TypeError, ValueError: one does not fit, or is of another operation.
    """
    if op not in FAMILY_OF:
        reject("op", " or ".join(map(repr, FAMILY_OF)), shown(op))
    family = FAMILY_OF[op]
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in given.items():
        if (name in ("kinds", "num_heads")) is (family == GEMM):
            reject(name, f"None with op={op!r}", shown(value))
    if family != GEMM:
        heads = given.get("num_heads", _NUM_HEADS)
        return mla_targets(family, given.get("kinds"), tokens, heads)
    if len(given) != 1:
        told = " and ".join(given) or "none of them"
        hint = "The command's options are --shape, --preset and --from-module"
        reject("shapes", "one of shapes, preset and module", told, hint)
    ((name, value),) = given.items()
    made = {"preset": projections.preset_shapes, "module": projections.module_shapes}
    return gemm_targets(made[name](value) if name in made else value, tokens, residual=residual)


@dataclass(frozen=True)
class Job:
    """What is to be measured.

    Attributes:
        gpu: the GPU.
        targets: all that was asked for, in order, of one family.
        known: what is kept from before, of the same kernels.
        todo: those of the targets that are to be measured: not known, and run by the GPU.
    """

    gpu: DeviceInfo
    targets: tuple[Target, ...]
    known: Known
    todo: tuple[Target, ...]

    @property
    def family(self) -> str:
        """The family of kernels."""
        return self.targets[0].family

    @property
    def num_known(self) -> int:
        """How many of the targets are known."""
        return sum(target.key in self.known for target in self.targets)

    @property
    def left_out(self) -> tuple[str, ...]:
        """A line for each problem that the GPU leaves nothing to measure of, and why."""
        why = {target.problem: target.why_not(self.gpu) for target in self.targets}
        return tuple(f"{problem}: {reason}" for problem, reason in why.items() if reason)

    def __str__(self) -> str:
        """A line a problem: what would be measured, and a line for each reason not to."""
        lines = [f"{self.gpu.name}: {len(self.todo)} to measure, {self.num_known} are known"]
        for problem in dict.fromkeys(target.problem for target in self.todo):
            here = [target for target in self.todo if target.problem == problem]
            some = {c for t in here for c in t.candidates(self.known, self.gpu)}
            told = "the best of these" if here[0].follows else f"{len(some)} candidates"
            counts = ", ".join(str(target.tokens) for target in here)
            lines.append(f"  {problem}: M = {counts}; {told}")
        return "\n".join([*lines, *(f"  not measured: {line}" for line in self.left_out)])


def prepare(
    targets: Sequence[Target],
    *,
    again: bool = False,
    device: int | None = None,
    gpu: DeviceInfo | None = None,
) -> Job:
    """Return what ``tune`` would measure of some targets; the other arguments are the same.

    With a ``gpu``, which need not be here, it is what would be measured there.

    Raises:
        ValueError: the kernels are not those of the package.
        ToolchainError: there is no GPU, or it is too old for them.
    """
    if sources.overridden() is not None:
        reject(
            "sources",
            "the kernels of the package, which a measurement is kept for",
            f"edited ones in {sources.overridden()}",
            "Unset K3CUPY_SOURCE_DIR or leave source_dir(), or compare with `python -m k3cupy "
            "bench linear`",
        )
    gpu = gpu or devices.info(devices.ordinal_of(device))
    devices.check_supported(gpu)
    asked = {target.key for target in targets}
    entries = cache.table(targets[0].family, gpu.name)
    known = {e.key: e for e in entries if not (again and e.key in asked)}
    todo = tuple(t for t in targets if t.key not in known and t.why_not(gpu) is None)
    return Job(gpu, tuple(targets), known, todo)


def run(
    job: Job,
    meter: CudaMeter | None = None,
    *,
    progress: bool = True,
    export: str | Path | None = None,
) -> TuneReport:
    """Measure a job, by a meter or that of its GPU, and keep every entry as soon as it is done."""
    header = None if export is None else files.export_header(job.family, job.gpu)
    path: Path | None = cache.path_of(job.family, job.gpu.name)
    found, unsaved = dict(job.known), dict[tuple[str, int], Entry]()
    refused = list(job.left_out)
    last_of = {target.problem: target for target in job.todo}

    def entries() -> tuple[Entry, ...]:
        return tuple(found[target.key] for target in job.targets if target.key in found)

    def save() -> None:
        nonlocal path
        found.update(unsaved)
        if unsaved:
            path = cache.add(job.family, unsaved.values(), job.gpu)
            unsaved.clear()
        if export is not None and header is not None and (some := entries()):
            files.write_table(Path(export), header, map(files.undated, some))

    try:
        if job.todo:
            if meter is None:
                from k3cupy.tuning.cuda_meter import CudaMeter

                meter = CudaMeter(job.todo, job.gpu.index)
            measuring = measure_all(job.todo, job.known, meter)
            with contextlib.closing(measuring), watch(job.todo, quiet=not progress) as note:
                for measured in measuring:
                    target = measured.target
                    if measured.entry is not None:
                        unsaved[target.key] = measured.entry
                    if target is last_of[target.problem]:
                        every = (found | unsaved).values()
                        unsaved |= settled(e for e in every if e.problem == target.problem)
                    save()
                    refused += measured.refusals
                    note(measured)
    finally:
        save()  # an interruption may have come between
        cache.reload()
    count = sum(target.key in found for target in job.todo)
    return TuneReport(job.gpu.name, job.family, entries(), count, tuple(refused), path)
