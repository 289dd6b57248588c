"""Compiling what the plans of low-latency linear name, before it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from k3cupy.dispatch import backends, mode, plans
from k3cupy.dispatch.slices import slices
from k3cupy.ops import checks
from k3cupy.ops.fused_a_gemm_config import MAX_TOKENS
from k3cupy.runtime import devices, instances
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance


def warmup_low_latency_gemm(
    shapes: Iterable[tuple[int, int]],
    tokens: int | Iterable[int] | None = None,
    *,
    device: int | None = None,
    residual: bool = False,
    batch_invariant: bool | None = None,
    weight_is_static: bool = False,
) -> int:
    """Compile and load now what low-latency linear will run, so that calls can be captured.

    Each shape and number of tokens gets the kernel that its plan names, for packed x and for x with
    rows apart. Products that the plans leave to the framework need nothing.

    Args:
        shapes: (N, K) of the weights.
        tokens: every M that will come; None: 1 to 64. Above 64 only batch-invariant mode has a
            kernel.
        device: GPU ordinal; by default the current one.
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
    pairs = [_pair(pair) for pair in shapes]
    if tokens is None:
        counts: Sequence[int] = range(1, MAX_TOKENS + 1)
    else:
        counts = [tokens] if isinstance(tokens, int) else list(tokens)
    for count in counts:
        if not _is_count(count):
            checks.reject("tokens", "integers above 0", repr(count))
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
                        plan.config, weight_is_static=weight_is_static, has_residual=residual
                    )
                )
    return tuple(found)


def _launched(num_tokens: int) -> Iterator[int]:
    return (rows.stop - rows.start for rows in slices(num_tokens))


def _pair(value: object) -> tuple[int, int]:
    if not (isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_count, value))):
        checks.reject("shapes", "pairs (N, K) of integers above 0", repr(value))
    n, k = value
    return n, k


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
