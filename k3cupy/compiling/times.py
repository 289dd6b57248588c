"""Times of compiled kernels, as the tuner takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from k3cupy.choose.gemm import FUSED_A, SKINNY, choose
from k3cupy.compiling.looks import Look, Options
from k3cupy.compiling.report import CompiledKernel
from k3cupy.kernels import fused_a_gemm, skinny_gemm
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance

if TYPE_CHECKING:
    from k3cupy.tuning.entries import Candidate
    from k3cupy.tuning.targets import Target

_TIMED, _TIMED_OF = 32, {"mla_prefill": 1024, "mla_query": 8}
"""Tokens of a timed call of a kernel of an MLA layer, and of some of them."""


def timed(
    made: dict[Instance, CompiledKernel], looks: Sequence[Look], gpu: DeviceInfo
) -> dict[Instance, CompiledKernel]:
    """Return kernels with the times of calls that run them."""
    import torch

    from k3cupy.tuning.cuda_meter import CudaMeter
    from k3cupy.tuning.engine import Effort

    calls: dict[Instance, tuple[Target, Candidate]] = {}
    for look in looks:
        for target, candidate in _calls_of(look.op, look.options, gpu):
            calls.setdefault(target.instance(candidate), (target, candidate))
    found = {}
    for instance, kernel in made.items():
        if instance not in calls:
            found[instance] = replace(kernel, timed="no call of the tuner's runs it")
            continue
        target, candidate = calls[instance]
        with torch.cuda.device(gpu.index), torch.no_grad():
            meter = CudaMeter([target], gpu.index)
            try:
                wrong = meter.check(target, candidate)
                if wrong is None:
                    (us,) = meter.time(target, [candidate], Effort.FULL)
                    found[instance] = replace(kernel, us=us, timed=str(target))
                else:
                    told = f"not timed, it is wrong: {wrong}"
                    found[instance] = replace(kernel, timed=told)
            finally:
                meter.close()
    return found


def _calls_of(op: str, options: Options, gpu: DeviceInfo) -> Iterator[tuple[Target, Candidate]]:
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
