"""What the fused-A GEMM accepts. Runs once per set of shapes, strides, types and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3cupy.ops import checks
from k3cupy.ops.arguments import Values
from k3cupy.ops.fused_a_gemm_config import (
    K_MULTIPLE,
    MAX_TOKENS,
    FusedAGemmConfig,
    FusedAGemmVariant,
)
from k3cupy.ops.gemm_validate import Form, GemmProblem, Limits, validate_tensors
from k3cupy.runtime.devices import DeviceInfo

PUBLIC = Form("mat_a", "mat_b", "output", is_transposed=True)

LIMITS = Limits(
    dtypes=("bfloat16",),
    dtype_hint="The product is computed in bfloat16 only",
    max_tokens=MAX_TOKENS,
    rows_hint="Call it for slices of the rows, or use your framework's linear, which is made for "
    "many rows",
    k_multiple=K_MULTIPLE,
)


@dataclass(frozen=True)
class FusedAGemmProblem(GemmProblem):
    """A call that passed validation.

    Attributes:
        variant: which kernel the arguments ask for.
    """

    variant: FusedAGemmVariant


def validate(form: Form, values: Values, *, weight_is_static: bool) -> FusedAGemmProblem:
    """Check everything that the host can see.

    Args:
        form: which function was called.
        values: its tensors, in the order of ``gemm_validate``.
        weight_is_static: the promise.

    Raises:
        TypeError, ValueError: the text names the argument, what was expected and what was found.
    """
    problem = validate_tensors(form, values, LIMITS)
    aligned = problem.slow_reason is None
    packed = aligned and checks.is_packed(problem.x)
    has_residual = problem.residual is not None
    variant = FusedAGemmVariant(packed, aligned, weight_is_static, has_residual)
    return FusedAGemmProblem(**vars(problem), variant=variant)


def check_config(
    config: Any, num_tokens: int | None = None, device: DeviceInfo | None = None
) -> FusedAGemmConfig | None:
    """Accept None, or a configuration that can compute a call.

    Args:
        config: what the caller gave.
        num_tokens: M, where it is known.
        device: the GPU, where it is known.

    Raises:
        TypeError, ValueError: anything else.
    """
    if config is None:
        return None
    if not isinstance(config, FusedAGemmConfig):
        checks.reject("config", "None or a FusedAGemmConfig", repr(config), error=TypeError)
    if not config.is_valid():
        checks.reject("config", "a configuration that the kernel has", repr(config))
    if num_tokens is not None and num_tokens > config.tile_m:
        checks.reject("config", f"tile_m of at least the {num_tokens} rows", str(config.tile_m))
    if device is None:
        return config
    if config.shared_bytes > device.shared_memory_optin:
        checks.reject(
            "config",
            f"at most {device.shared_memory_optin} bytes of shared memory a block, which "
            f"{device.name} has",
            f"{config.shared_bytes} bytes",
            "Take fewer stages or a smaller tile",
        )
    if config.needs_warpgroups and not device.has_warpgroups:
        checks.reject(
            "config",
            f"mma_rows of 16 on {device.arch}, for products of a warpgroup exist on sm_90 alone",
            str(config.mma_rows),
        )
    if config.split_k > 1 and not device.has_clusters:
        checks.reject(
            "config",
            f"split_k of 1 on {device.arch}, for clusters exist from sm_90 on",
            str(config.split_k),
        )
    if config.mapped_x and not device.has_tensor_maps:
        checks.reject(
            "config",
            f"mapped_x of False on {device.arch}, for tensor maps are used from sm_90 to sm_103",
            str(config.mapped_x),
        )
    return config
