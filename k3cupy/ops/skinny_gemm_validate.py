"""What the skinny GEMM accepts. Runs once per set of shapes, strides, types and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3cupy.constants import CTYPES
from k3cupy.ops import checks
from k3cupy.ops.arguments import Values
from k3cupy.ops.gemm_validate import FRIENDLY, GemmProblem, Limits, validate_tensors
from k3cupy.ops.skinny_gemm_config import (
    K_MULTIPLE,
    MAX_TOKENS,
    SkinnyGemmConfig,
    SkinnyGemmVariant,
)

LIMITS = Limits(
    dtypes=tuple(CTYPES),
    dtype_hint="All tensors are bfloat16, or all are float16",
    max_tokens=MAX_TOKENS,
    rows_hint="Call fused_a_gemm, which takes up to 64, or your framework's linear",
    k_multiple=K_MULTIPLE,
)


@dataclass(frozen=True)
class SkinnyGemmProblem(GemmProblem):
    """A call that passed validation.

    Attributes:
        variant: which kernel the arguments ask for.
    """

    variant: SkinnyGemmVariant


def validate(values: Values, *, weight_is_static: bool) -> SkinnyGemmProblem:
    """Check everything that the host can see.

    Args:
        values: the tensors, in the order of ``gemm_validate``.
        weight_is_static: the promise.

    Raises:
        TypeError, ValueError: the text names the argument, what was expected and what was found.
    """
    problem = validate_tensors(FRIENDLY, values, LIMITS)
    aligned, has_residual = problem.slow_reason is None, problem.residual is not None
    variant = SkinnyGemmVariant(problem.x.dtype, aligned, has_residual, weight_is_static)
    return SkinnyGemmProblem(**vars(problem), variant=variant)


def check_config(config: Any, num_tokens: int | None = None) -> SkinnyGemmConfig | None:
    """Accept None, or a configuration that can compute a call.

    Args:
        config: what the caller gave.
        num_tokens: M, where it is known and not 0.

    Raises:
        TypeError, ValueError: anything else.
    """
    if config is None:
        return None
    if not isinstance(config, SkinnyGemmConfig):
        checks.reject("config", "None or a SkinnyGemmConfig", repr(config), error=TypeError)
    if not config.is_valid():
        checks.reject("config", "a configuration that the kernel has", repr(config))
    if num_tokens and num_tokens != config.num_rows:
        checks.reject(
            "config",
            f"num_rows of exactly the {num_tokens} rows of x",
            str(config.num_rows),
            "Make one for each number of rows, for example with dataclasses.replace",
        )
    return config
