"""Low-latency linear: ``x @ weight.T`` by the fastest kernel known for the shape and the GPU."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from typing import Any

from k3cupy.dispatch import backends, eligibility, fallback, mode, plans
from k3cupy.dispatch.decision import LINEAR, LinearDecision
from k3cupy.dispatch.report import Counter, counter_of
from k3cupy.dispatch.slices import SlicedPlan, can_be_sliced
from k3cupy.ops import checks, gemm_cache, gemm_tables
from k3cupy.ops.arguments import Values
from k3cupy.ops.fused_a_gemm_config import MAX_TOKENS
from k3cupy.ops.gemm_validate import FRIENDLY, OUT, RESIDUAL, WEIGHT, X
from k3cupy.ops.plan_cache import Plan, PlanCache
from k3cupy.runtime import devices, sources
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import CaptureError, ToolchainError
from k3cupy.runtime.tensors import TensorView

_ARGUMENTS = FRIENDLY.arguments


def try_low_latency_gemm(
    x: Any,
    weight: Any,
    residual: Any = None,
    *,
    batch_invariant: bool | None = None,
    weight_is_static: bool = False,
    stream: Any = None,
) -> Any:
    """Return ``x @ weight.T (+ residual)`` from a kernel of ours, or None where none should run.

    None is no error: ``explain_low_latency_gemm`` says why, and ``dispatch_report`` counts it.

    Args:
        x: [M, K] bfloat16 on a CUDA device. Inner stride 1; for more than one row the row stride is
            a multiple of 8; the address is a multiple of 16 bytes. A column slice of a wider tensor
            is fine.
        weight: [N, K] bfloat16 on that device, contiguous, at a multiple of 16 bytes.
        residual: [M, N] bfloat16 on that device, contiguous; added in float32 before the only
            rounding.
        batch_invariant: the bits of a row depend neither on M nor on the other rows. None: as
            ``is_batch_invariant`` says.
        weight_is_static: a promise: the preceding kernel does not write the weight, which may then
            be fetched before that kernel has ended.
        stream: as for ``fused_a_gemm``.

    Returns:
        A new contiguous [M, N] tensor of x's framework, or None.

    Raises:
        TypeError: an argument is no tensor, or a flag no bool.
        CaptureError: the kernel is not loaded and the stream is capturing a graph.
        CompileError: the compiler refused the kernel; the text says why.
        ToolchainError: an edited copy of the sources was named, and is not there.

    Example:
        >>> import torch, k3cupy
        >>> x, weight = torch.ones(4, 128).bfloat16(), torch.ones(256, 128).bfloat16()
        >>> k3cupy.try_low_latency_gemm(x, weight) is None  # on the CPU no kernel of ours runs
        True
    """
    return _run((x, weight, None, residual), batch_invariant, weight_is_static, stream)


def low_latency_linear(
    x: Any,
    weight: Any,
    residual: Any = None,
    *,
    batch_invariant: bool | None = None,
    weight_is_static: bool = False,
    stream: Any = None,
) -> Any:
    """Return ``x @ weight.T (+ residual)``: from a kernel of ours, else by the framework's linear.

    The framework's is ``torch.nn.functional.linear``, with a residual ``torch.addmm``, which on a
    GPU may round the product before it adds; for CuPy, NumPy and JAX a product in float32 with one
    rounding. It runs where it was measured to be
    faster, and for whatever our kernels do not take: other types, shapes, layouts and devices, and
    tensors that autograd follows.

    Args:
        x: [..., K].
        weight: [N, K].
        residual: [..., N], added.
        batch_invariant: as for ``try_low_latency_gemm``.
        weight_is_static: the same.
        stream: the same.

    Returns:
        A new [..., N] tensor of x's framework.

    Raises:
        TypeError: an argument is no tensor, or a flag no bool.
        CaptureError: the kernel is not loaded and the stream is capturing a graph.
        CompileError: the compiler refused the kernel; the text says why.
        ToolchainError: an edited copy of the sources was named, and is not there.
        Exception: what the framework's linear raises for shapes and types that it does not take.

    Example:
        >>> import torch, k3cupy
        >>> k3cupy.low_latency_linear(torch.ones(4, 128), torch.ones(256, 128)).shape
        torch.Size([4, 256])
    """
    values = (x, weight, None, residual)
    out = _run(values, batch_invariant, weight_is_static, stream)
    return fallback.linear(x, weight, residual, stream) if out is None else out


def explain_low_latency_gemm(
    x: Any, weight: Any, residual: Any = None, *, batch_invariant: bool | None = None
) -> LinearDecision:
    """Say what ``try_low_latency_gemm`` would run, and why; launch and count nothing.

    Args:
        x: as for that function.
        weight: the same.
        residual: the same.
        batch_invariant: the same.

    Returns:
        Backend, configuration, and the reason in words: of a fall-back exactly what keeps the call
        from our kernels.

    Raises:
        TypeError: an argument is no tensor.

    Example:
        >>> import torch, k3cupy
        >>> x, weight = torch.ones(4, 128).bfloat16(), torch.ones(256, 128).bfloat16()
        >>> print(k3cupy.explain_low_latency_gemm(x, weight))
        linear: x and the weight are on the CPU
    """
    return _decide((x, weight, None, residual), mode.resolved(batch_invariant))


def select_backend(
    num_tokens: int, n: int, k: int, *, device: Any = None, has_residual: bool = False
) -> str | None:
    """Return the kernel that the plans have for a product: ``"fused_a"``, ``"skinny"`` or None.

    Args:
        num_tokens: rows of x.
        n: rows of the weight.
        k: its columns.
        device: GPU ordinal, ``"cuda:1"``, a ``torch.device`` or a ``DeviceInfo``; None: the current
            GPU.
        has_residual: a residual is added.

    Returns:
        None: the framework's linear; also where there is no GPU, and for no tokens.

    Raises:
        ValueError: a number is negative, or there is no such device.

    Example:
        >>> import k3cupy
        >>> from k3cupy.runtime.devices import DeviceInfo
        >>> h200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
        >>> k3cupy.select_backend(300, 2112, 7168, device=h200) is None
        True
    """
    for name, value in (("num_tokens", num_tokens), ("n", n), ("k", k)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            checks.reject(name, "an integer of at least 0", repr(value))
    gpu = _device_of(device)
    if gpu is None or 0 in (num_tokens, n, k):
        return None
    batch_invariant = mode.is_batch_invariant()
    found = plans.plan(
        n, k, num_tokens, gpu, has_residual=has_residual, batch_invariant=batch_invariant
    )
    return None if found.is_fallback else found.backend


# --- A call --------------------------------------------------------------------------------------


class _Route:
    """What calls of one signature do."""

    __slots__ = ("counter", "plan")

    def __init__(self, plan: Plan | None, counter: Counter) -> None:
        self.plan, self.counter = plan, counter

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        """Count the call and compute it; None for the framework to do so."""
        self.counter.calls += 1
        return None if self.plan is None else self.plan.run(values, addresses, stream)


_routes = PlanCache()


def _run(values: Values, batch_invariant: Any, weight_is_static: Any, stream: Any) -> Any:
    if type(batch_invariant) is not bool:
        batch_invariant = mode.resolved(batch_invariant)
    if type(weight_is_static) is not bool:
        checks.check_flags(weight_is_static=weight_is_static)
    try:
        addresses, signature, owners = _ARGUMENTS.probe(values, stream)
    except TypeError:
        # A tensor without memory, such as one of a compiler's tracing, is for the framework.
        decision = _decide(values, batch_invariant)
        if not decision.is_fallback or stream is not None:
            raise
        return _Route(None, counter_of(decision)).run(values, [], None)
    key = (*signature, batch_invariant, weight_is_static, gemm_tables.generation(), _epoch())
    route = _routes.get(key)
    # The signature does not tell a tensor without memory from one that has some.
    readable = addresses[X] and addresses[WEIGHT]
    if route is None or not readable:
        route = _make_route(values, batch_invariant, weight_is_static, stream)
        if readable:
            _routes.remember(key, route)
    result = route.run(values, addresses, stream)
    del owners  # memory that exists only for this call has been used, or queued to be
    return result


def _epoch() -> tuple[str | None, ...] | None:
    """Return what plans must agree on: None for the shipped sources, else the present digests."""
    if sources.overridden() is None:
        return None
    return tuple(sources.epoch(source) for source in gemm_cache.SOURCES)


def _make_route(
    values: Values, batch_invariant: bool, weight_is_static: bool, stream: Any
) -> _Route:
    decision = _decide(values, batch_invariant)
    if decision.is_fallback:
        return _Route(None, counter_of(decision))
    try:
        plan = _make_plan(decision, values, batch_invariant, weight_is_static, stream)
    except (ToolchainError, TypeError, ValueError) as error:
        reason = f"{error}{plans.NOT_INVARIANT if batch_invariant else ''}"
        refused = replace(decision, backend=LINEAR, config=None, source="rule", reason=reason)
        warnings.warn(f"low-latency linear: {decision.backend} cannot run: {error}", stacklevel=4)
        return _Route(None, counter_of(refused))
    return _Route(plan, counter_of(decision))


def _make_plan(
    decision: LinearDecision,
    values: Values,
    batch_invariant: bool,
    weight_is_static: bool,
    stream: Any,
) -> Plan:
    try:
        if decision.num_tokens > MAX_TOKENS:
            return SlicedPlan(values, stream, weight_is_static=weight_is_static)
        return backends.get(decision.backend).make_plan(
            values,
            decision.config,
            stream,
            weight_is_static=weight_is_static,
            batch_invariant=batch_invariant,
        )
    except CaptureError as error:
        tokens, residual = decision.num_tokens, values[RESIDUAL] is not None
        raise CaptureError(
            f"{error}. For low-latency linear that is k3cupy.warmup_low_latency_gemm("
            f"[({decision.n}, {decision.k})], tokens=[{tokens}], residual={residual}, "
            f"batch_invariant={batch_invariant}, weight_is_static={weight_is_static})"
        ) from error


def _decide(values: Values, batch_invariant: bool) -> LinearDecision:
    torch = sys.modules.get("torch")
    try:
        views = _ARGUMENTS.views(values)
    except TypeError as error:
        given = [values[X], values[WEIGHT], *(v for v in values[OUT:] if v is not None)]
        if torch is None or not all(isinstance(value, torch.Tensor) for value in given):
            raise
        return LinearDecision(LINEAR, None, f"a tensor has no memory to read ({error})", "rule")
    return decide(
        views,
        grad_mode=torch is not None and torch.is_grad_enabled(),
        batch_invariant=batch_invariant,
    )


def decide(
    views: dict[str, TensorView],
    *,
    grad_mode: bool,
    batch_invariant: bool,
    device: DeviceInfo | None = None,
) -> LinearDecision:
    """Decide for tensors that are described by views.

    Args:
        views: of ``x``, ``weight`` and, where there is one, ``residual``.
        grad_mode: whether autograd is recording.
        batch_invariant: the bits of a row may not depend on the other rows.
        device: facts about the GPU; None: asked of the driver, once the tensors are on one.
    """
    x, weight = views["x"], views["weight"]
    num_tokens, k = x.shape if len(x.shape) == 2 else (0, 0)
    n = weight.shape[0] if len(weight.shape) == 2 else 0
    reason = eligibility.why_not(views, grad_mode=grad_mode)
    if reason is None and num_tokens > MAX_TOKENS and batch_invariant and not can_be_sliced(views):
        reason = f"x has more than {MAX_TOKENS} rows, and tensors of {x.framework} are not cut here"
    if reason is None and device is None:
        try:
            device = devices.info(x.device_index)
        except ToolchainError as error:
            reason = str(error)
            warnings.warn(f"low-latency linear: no kernel of ours can run: {error}", stacklevel=5)
    if reason is not None or device is None:
        lost = plans.NOT_INVARIANT if batch_invariant and x.size else ""
        return LinearDecision(LINEAR, None, f"{reason}{lost}", "rule", n, k, num_tokens)
    return plans.plan(
        n,
        k,
        num_tokens,
        device,
        has_residual="residual" in views,
        batch_invariant=batch_invariant,
    )


def _device_of(device: Any) -> DeviceInfo | None:
    if isinstance(device, DeviceInfo):
        return device
    try:
        return devices.info(devices.ordinal_of(device))
    except ToolchainError:
        return None
