"""Plans of the fused-A GEMM: a validated call with its kernel, ready to repeat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from k3cupy.ops import checks, gemm_plan
from k3cupy.ops.arguments import Values
from k3cupy.ops.decision import Decision
from k3cupy.ops.fused_a_gemm_choice import choose
from k3cupy.ops.fused_a_gemm_config import FusedAGemmConfig
from k3cupy.ops.fused_a_gemm_validate import FusedAGemmProblem, check_config, validate
from k3cupy.ops.gemm_plan import Kernel, row_stride
from k3cupy.ops.gemm_validate import Form
from k3cupy.ops.plan_cache import Plan
from k3cupy.reference.fused_a_gemm import fused_a_gemm_reference
from k3cupy.runtime import devices, tensor_maps
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.tensor_maps import Box

_MAX_MAPPED_STRIDE = 1 << 39
"""Elements between two rows: a tensor map's limit of 2^40 bytes."""


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its tensors; part of a plan's key.

    Attributes:
        pdl: programmatic dependent launch; None for on where the GPU has it.
        weight_is_static: the promise.
        batch_invariant: a row's bits do not depend on the number of rows.
        config: None for the table.
    """

    pdl: bool | None
    weight_is_static: bool
    batch_invariant: bool
    config: FusedAGemmConfig | None


def decide(problem: FusedAGemmProblem, options: Options) -> Decision:
    """Choose backend and configuration for a validated call.

    Raises:
        ValueError: the caller's configuration cannot compute it on this GPU.
    """
    x = problem.x
    device = devices.info(x.device_index) if x.is_cuda else None
    config = check_config(options.config, problem.num_tokens, device)

    def choice(device: DeviceInfo) -> tuple[FusedAGemmConfig, str]:
        invariant = options.batch_invariant
        return choose(problem.n, problem.k, problem.num_tokens, device, batch_invariant=invariant)

    decision = gemm_plan.decide(problem, problem.variant, options.pdl, config, choice)
    return _mapped_or_not(problem, decision)


def _mapped_or_not(problem: FusedAGemmProblem, decision: Decision) -> Decision:
    """Return the decision with copy warps in place of the copy engine, where x needs them."""
    config, x = decision.config, problem.x
    if config is None or not config.mapped_x:
        return decision
    if problem.slow_reason is not None:
        why = None  # the reason tells that already
    elif problem.num_tokens > 1 and not problem.k <= x.strides[0] < _MAX_MAPPED_STRIDE:
        why = f"its rows are {x.strides[0]} elements apart, not {problem.k} to 2^39"
    elif not config.can_map(problem.k):
        why = f"K = {problem.k} is no multiple of {config.split_k * config.tile_k}"
    else:
        return decision
    config = config.with_copy_warps()
    return replace(
        decision,
        config=config,
        name_expression=config.name_expression(problem.variant),
        reason=decision.reason + (f"; x by copy warps, because {why}" if why else ""),
    )


def make_plan(form: Form, values: Values, options: Options, stream: Any) -> Plan:
    """Validate a call and prepare everything that does not depend on its addresses.

    Args:
        form: which function was called.
        values: its tensors.
        options: everything else.
        stream: the one that was given, to see whether it captures; None for the current one.

    Raises:
        TypeError, ValueError: an argument does not fit.
        CaptureError: the kernel would have to be compiled or loaded while a graph is captured.
    """
    problem = validate(form, values, weight_is_static=options.weight_is_static)
    checks.check_grad(problem.views)
    return gemm_plan.plan_of(
        problem,
        decide(problem, options),
        fused_a_gemm_reference,
        lambda config: _kernel(problem, config),
        stream,
    )


def _kernel(problem: FusedAGemmProblem, config: FusedAGemmConfig) -> Kernel:
    x = problem.x
    x_strides = [] if config.mapped_x else [row_stride(x)]
    x_argument = None
    if config.mapped_x:
        box = Box(problem.num_tokens, problem.k, row_stride(x) or problem.k, config.tile_m)
        x_argument = tensor_maps.mapper(box, x.device_index)
    before_out = (0, np.uint32(problem.n), np.uint32(problem.k), 0, np.uint32(problem.num_tokens))
    out_at = len(before_out) + len(x_strides)
    return Kernel(
        instance=config.instance(problem.variant),
        arguments=(
            *before_out,
            *x_strides,
            0,
            row_stride(problem.out, problem.n),
            0,
            row_stride(problem.residual),
            np.uint32(config.rows),
        ),
        pointers=(3, 0, out_at, out_at + 2),
        grid=config.blocks(problem.n) // config.split_k,
        block=config.block_size,
        shared_bytes=config.shared_bytes,
        cluster=config.split_k,
        x_argument=x_argument,
    )
