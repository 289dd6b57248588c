"""Plans of the skinny GEMM: a validated call with its kernel, ready to repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from k3cupy.ops import checks, gemm_plan
from k3cupy.ops.arguments import Values
from k3cupy.ops.decision import Decision
from k3cupy.ops.gemm_plan import Kernel, row_stride
from k3cupy.ops.plan_cache import Plan
from k3cupy.ops.skinny_gemm_choice import choose
from k3cupy.ops.skinny_gemm_config import SkinnyGemmConfig
from k3cupy.ops.skinny_gemm_validate import SkinnyGemmProblem, check_config, validate
from k3cupy.reference.skinny_gemm import skinny_gemm_reference
from k3cupy.runtime.devices import DeviceInfo


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its tensors; part of a plan's key.

    Attributes:
        pdl: programmatic dependent launch; None for on where the GPU has it.
        weight_is_static: the promise.
        config: None for the table.
    """

    pdl: bool | None
    weight_is_static: bool
    config: SkinnyGemmConfig | None


def decide(problem: SkinnyGemmProblem, options: Options) -> Decision:
    """Choose backend and configuration for a validated call.

    Raises:
        ValueError: the caller's configuration cannot compute it.
    """
    config = check_config(options.config, problem.num_tokens)

    def choice(device: DeviceInfo) -> tuple[SkinnyGemmConfig, str]:
        return choose(problem.n, problem.k, problem.num_tokens, device)

    return gemm_plan.decide(problem, problem.variant, options.pdl, config, choice)


def make_plan(values: Values, options: Options, stream: Any) -> Plan:
    """Validate a call and prepare everything that does not depend on its addresses.

    Args:
        values: its tensors.
        options: everything else.
        stream: the one that was given, to see whether it captures; None for the current one.

    Raises:
        TypeError, ValueError: an argument does not fit.
        CaptureError: the kernel would have to be compiled or loaded while a graph is captured.
    """
    problem = validate(values, weight_is_static=options.weight_is_static)
    checks.check_grad(problem.views)
    return gemm_plan.plan_of(
        problem,
        decide(problem, options),
        skinny_gemm_reference,
        lambda config: _kernel(problem, config),
        stream,
    )


def _kernel(problem: SkinnyGemmProblem, config: SkinnyGemmConfig) -> Kernel:
    return Kernel(
        instance=config.instance(problem.variant),
        arguments=(
            0,
            np.uint32(problem.n),
            np.uint32(problem.k),
            0,
            row_stride(problem.x),
            0,
            row_stride(problem.residual),
            0,
            row_stride(problem.out, problem.n),
        ),
        pointers=(3, 0, 7, 5),
        grid=config.blocks(problem.n),
        block=config.block_size,
    )
