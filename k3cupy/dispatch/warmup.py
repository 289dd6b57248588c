"""Compiling what the plans of low-latency linear name, before it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from k3cupy.dispatch import backends, mode, plans
from k3cupy.dispatch.slices import slices
from k3cupy.ops import checks
from k3cupy.ops.fused_a_gemm_config import MAX_TOKENS
from k3cupy.ops.gemm_warmup import shapes_of, tokens_of
from k3cupy.runtime import devices, instances
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance

_MOST_ROWS = (1 << 31) - 1


def warmup_low_latency_gemm(
    shapes: Iterable[tuple[int, int]] | None = None,
    tokens: int | Iterable[int] | None = None,
    *,
    device: Any = None,
    residual: bool = False,
    batch_invariant: bool | None = None,
    weight_is_static: bool = False,
) -> int:
    """Compile and load now what low-latency linear will run, so that calls can be captured.

    Each shape and number of tokens gets the kernel that its plan names, for packed x and for x with
    rows apart. Products that the plans leave to the framework need nothing.

    Args:
        shapes: (N, K) of the weights; None: every projection of Kimi-K3.
        tokens: every M that will come; None: 1 to 64. Above 64 only batch-invariant mode has a
            kernel.
        device: GPU ordinal, ``"cuda:1"`` or a ``torch.device``; by default the current GPU.
        residual: for calls with one.
        batch_invariant: for calls with that flag; None: as ``is_batch_invariant`` says.
        weight_is_static: for calls with that promise.

    Returns:
        The number of kernels that are ready.

    Raises:
        TypeError, ValueError: an argument names nothing that exists.
        ToolchainError, CompileError: the kernels cannot be built here.

    Example:
        >>> k3cupy.warmup_low_latency_gemm([(2112, 7168)], tokens=[1, 4])    # doctest: +SKIP
        4
    """
    checks.check_flags(residual=residual, weight_is_static=weight_is_static)
    pairs = shapes_of(shapes, k_multiple=1)
    counts = tokens_of(range(1, MAX_TOKENS + 1) if tokens is None else tokens, _MOST_ROWS)
    invariant = mode.resolved(batch_invariant)
    ordinal = devices.ordinal_of(device)
    wanted = planned_instances(
        pairs,
        counts,
        devices.info(ordinal),
        residual=residual,
        batch_invariant=invariant,
        weight_is_static=weight_is_static,
    )
    return instances.load_all(wanted, ordinal)


def planned_instances(
    shapes: Iterable[tuple[int, int]],
    tokens: Iterable[int],
    device: DeviceInfo,
    *,
    residual: bool,
    batch_invariant: bool,
    weight_is_static: bool,
) -> tuple[Instance, ...]:
    """Return what the plans for some products name, each once.

    Args:
        shapes: (N, K) of the weights.
        tokens: numbers of rows of x.
        device: the GPU.
        residual: for calls with one.
        batch_invariant: for calls with that flag.
        weight_is_static: for calls with that promise.
    """
    counts = dict.fromkeys(
        size for count in tokens for size in (_launched(count) if batch_invariant else [count])
    )
    found: dict[Instance, None] = {}
    for n, k in shapes:
        for count in counts:
            plan = plans.plan(
                n, k, count, device, has_residual=residual, batch_invariant=batch_invariant
            )
            if not plan.is_fallback:
                backend = backends.get(plan.backend)
                found |= dict.fromkeys(
                    backend.instances(
                        plan.config,
                        weight_is_static=weight_is_static,
                        has_residual=residual,
                        one_row=count == 1,
                    )
                )
    return tuple(found)


def _launched(num_tokens: int) -> Iterator[int]:
    return (rows.stop - rows.start for rows in slices(num_tokens))
