"""Low-latency linear: ``x @ weight.T`` by the fastest kernel known for the shape and the GPU."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from k3cupy.accept import checks, gemm
from k3cupy.accept.gemm import LINEAR, OURS, GemmProblem
from k3cupy.call.arguments import Values
from k3cupy.call.choice import LINEAR as FRAMEWORK
from k3cupy.call.choice import Choice
from k3cupy.call.plans import Plan, PlanCache, stamp
from k3cupy.call.repeat import MISS, Repeat, filled
from k3cupy.choose.gemm import ALL, FUSED_A, NOT_INVARIANT, SKINNY, choose
from k3cupy.kernels.fused_a_gemm import why_not_mapped
from k3cupy.ops import batch_invariance, framework_linear, fused_a_gemm, skinny_gemm
from k3cupy.ops.dispatch_report import Counter, counter_of, counters
from k3cupy.runtime import devices, producers, sources, storages, tracing
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import CaptureError, MissingError, ToolchainError
from k3cupy.runtime.tensors import ALIGNMENT, is_traced, pytorch, span
from k3cupy.runtime.warn import warn_user

_probe = OURS.arguments.probe
_OPERATIONS = {FUSED_A: fused_a_gemm.OPERATION, SKINNY: skinny_gemm.OPERATION}
SOURCES = tuple(operation.kernel.SOURCE for operation in _OPERATIONS.values())
"""Of what may run."""


def try_low_latency_gemm(
    x: Any,
    weight: Any,
    residual: Any = None,
    *,
    batch_invariant: bool | None = None,
    weight_is_static: bool = False,
    out_dtype: Any = None,
    stream: Any = None,
) -> Any:
    """Return ``x @ weight.T (+ residual)`` from a kernel of ours, or None where none should run.

    None is no error: ``explain_low_latency_gemm`` says why, and ``dispatch_report`` counts it.

    Args:
        x: [M, K] bfloat16 on a CUDA device. Inner stride 1; for more than one row the row stride is
            a multiple of 8; the address is a multiple of 16 bytes. A column slice of a wider tensor
            is fine.
        weight: [N, K] bfloat16 on that device, contiguous, at a multiple of 16 bytes.
        residual: [M, N] bfloat16 on that device, inner stride 1, row stride and address free; added
            in float32 before the only rounding.
        batch_invariant: the bits of a row depend neither on M nor on the other rows. None: as
            ``is_batch_invariant`` says.
        weight_is_static: a promise: the preceding kernel does not write the weight, which may then
            be fetched before that kernel has ended.
        out_dtype: None for that of x, or float32: the sums as they are, without a rounding.
        stream: as for ``fused_a_gemm``.

    Returns:
        A new contiguous [M, N] tensor of x's framework, or None.

    Raises:
        TypeError: an argument is no tensor, or a flag no bool.
        ValueError: the storage of a tensor was freed, or ends before the tensor does; or one is on
            the meta device beside others that are not.
        CaptureError: the kernel is not loaded and the stream is capturing a graph.
        CompileError: the compiler refused the kernel; the text says why.
        ToolchainError: the edited sources are not there, or K3CUPY_NO_COMPILE forbids to compile.

    Example:
        >>> import torch, k3cupy
        >>> x, weight = torch.ones(4, 128).bfloat16(), torch.ones(256, 128).bfloat16()
        >>> k3cupy.try_low_latency_gemm(x, weight) is None  # on the CPU no kernel of ours runs
        True
    """
    return _run((x, weight, residual, None), batch_invariant, weight_is_static, stream, out_dtype)


def low_latency_linear(
    x: Any,
    weight: Any,
    residual: Any = None,
    *,
    batch_invariant: bool | None = None,
    weight_is_static: bool = False,
    out_dtype: Any = None,
    stream: Any = None,
) -> Any:
    """Return ``x @ weight.T (+ residual)``: from a kernel of ours, else by the framework's linear.

    The framework's is ``torch.nn.functional.linear``, with a residual ``torch.addmm``, which on a
    GPU may round the product before it adds; for CuPy, NumPy and JAX a product in float32 with one
    rounding. It runs where it was measured to be faster, and for whatever our kernels do not take:
    other types, shapes, layouts and devices, and tensors that autograd follows.

    Args:
        x: [..., K].
        weight: [N, K].
        residual: [..., N], added.
        batch_invariant: this and the other keyword arguments as for ``try_low_latency_gemm``.
        weight_is_static: a promise.
        out_dtype: None for that of x, or float32. The framework's is then ``torch.mm`` with that
            ``out_dtype`` where PyTorch has it (2.8 and newer, on CUDA, without autograd), elsewhere
            the product of what is widened to float32 first.
        stream: where to run.

    Returns:
        A new [..., N] tensor of x's framework.

    Raises:
        TypeError, ValueError, CaptureError, CompileError, ToolchainError: as
            ``try_low_latency_gemm``.
        Exception: what the framework's linear raises for shapes and types that it does not take;
            from Python 3.11 on a note says why no kernel of ours took them.

    Example:
        >>> import torch, k3cupy
        >>> k3cupy.low_latency_linear(torch.ones(4, 128), torch.ones(256, 128)).shape
        torch.Size([4, 256])
    """
    out = _run((x, weight, residual, None), batch_invariant, weight_is_static, stream, out_dtype)
    if out is not None:
        return out
    try:
        return framework_linear.linear(x, weight, residual, stream, out_dtype is not None)
    except Exception as error:
        _note_reason(error, (x, weight, residual, None), out_dtype is not None)
        raise


def explain_low_latency_gemm(
    x: Any,
    weight: Any,
    residual: Any = None,
    *,
    batch_invariant: bool | None = None,
    out_dtype: Any = None,
    gpu: Any = None,
) -> Choice:
    """Say what ``try_low_latency_gemm`` would run, and why; launch and count nothing.

    Takes the tensors, the mode and the type of that function, and a ``gpu`` that need not be here,
    as ``select_backend`` does: then tensors of the CPU are taken as if they were on it.

    Returns:
        Kernel, configuration, and the reason: of a fall-back what keeps the call from our kernels.

    Raises:
        TypeError, ValueError: as ``try_low_latency_gemm`` for its tensors.

    Example:
        >>> import torch, k3cupy
        >>> x, weight = torch.ones(4, 128).bfloat16(), torch.ones(256, 128).bfloat16()
        >>> print(k3cupy.explain_low_latency_gemm(x, weight))
        linear on the CPU: x: expected a CUDA tensor, got one on the cpu
    """
    stamp(SOURCES)  # a compiler that meets this first is told here where not to look
    values = (x, weight, residual, None)
    invariant = batch_invariance.resolved(batch_invariant)
    if out_dtype is not None:
        out_dtype = gemm.out_dtype_of(out_dtype)
    there = None if gpu is None else devices.named(gpu)
    return _completed(*_decide(values, invariant, False, out_dtype, there), there)


# --- A call --------------------------------------------------------------------------------------


class _Route(NamedTuple):
    """What calls of one signature come to.

    Attributes:
        counter: of what runs.
        run: (values, addresses, stream) -> the output; None where the framework's linear is to run.
        repeat: (values, shapes of new outputs) -> what computes further calls like one, or None.
        plan: of a kernel of ours; None where the framework's linear runs.
    """

    counter: Counter
    run: Callable[..., Any]
    repeat: Callable[..., Any]
    plan: Plan | None


_routes = PlanCache()

_Repeated = tuple[Counter, Repeat, bool]
"""What a repeated call counts, what repeats it, and whether that is a kernel of ours."""

_repeats = PlanCache()
"""Those of the last calls of each shape, by shapes and modes."""


def again(
    values: Values, of_call: tuple[Any, bool], weight_is_static: bool
) -> tuple[Any, _Repeated] | None:
    """Compute a call that is like an earlier one.

    Args:
        values: x, weight, residual and None; x of any rank that ``keep_rank`` was told of.
        of_call: its stamp, and whether it is batch invariant.
        weight_is_static: as for ``low_latency_linear``.

    Returns:
        The output, or None where the framework's linear is to run, and what gave it; None for any
        other call.
    """
    try:
        known = _repeats.get((values[0].shape, values[1].shape, weight_is_static, *of_call), ())
    except Exception:  # of no shape, or of one that has no hash
        return None
    for found in known:
        result = found[1](*values)
        if result is not MISS:
            found[0].calls += 1
            return result, found
    return None


def prepared(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Repeat, tuple[str, ...], Choice]:
    """Do for the two functions of this module what ``Operation.prepared`` does for others."""
    found = inspect.signature(function).bind(*args, **kwargs)
    found.apply_defaults()
    x, weight, residual, *_ = found.arguments.values()
    given, values = found.arguments, (x, weight, residual, None)
    checks.check_flags(given, "weight_is_static")
    stream, static = given["stream"], given["weight_is_static"]
    invariant = batch_invariance.resolved(given["batch_invariant"])
    out_dtype = None if given["out_dtype"] is None else gemm.out_dtype_of(given["out_dtype"])
    problem, choice = _decide(values, invariant, static, out_dtype)
    run = None
    if stream is None and problem is not None and choice.kernel != FRAMEWORK:
        plan = make_route(values, invariant, static, stream, out_dtype).plan
        run = None if plan is None else plan.prepared(values)
    tensors = tuple(
        name for name, value in zip(OURS.arguments.names, values, strict=True) if value is not None
    )
    if run is None:
        modes = {"batch_invariant": invariant, "weight_is_static": static, "stream": stream}
        modes["out_dtype"] = given["out_dtype"]
        run = filled(
            values, OURS.arguments.names, tensors, lambda every: function(*every[:3], **modes)
        )
    return run, tensors, _completed(problem, choice)


def keep_rank(
    x: Any, rows: Any, weight: Any, batch_invariant: bool | None, weight_is_static: bool
) -> None:
    """Let calls of any rank be repeated, where those of the rows of such an x are.

    Args:
        x: [..., K].
        rows: the same memory as [M, K].
        weight: [N, K].
        batch_invariant: as in that call.
        weight_is_static: the same.
    """
    values = (rows, weight, None, None)
    key = (weight_is_static, stamp(SOURCES), batch_invariance.resolved(batch_invariant))
    if x.data_ptr() != rows.data_ptr() or (rows.shape, weight.shape, *key) not in _repeats:
        return
    try:
        route = _routes.get((_probe(values, None)[1], *key, None))
    except TypeError:  # a tangent, or a negative bit: the framework has computed with it
        return
    if route is not None:
        _keep((x, *values[1:]), key, route, ((*x.shape[:-1], *weight.shape[:-1]),))


def _keep(values: Values, of_call: tuple[Any, ...], route: _Route, shapes: Any = None) -> None:
    repeat = route.repeat(values, shapes)
    if repeat is not None:
        key = (values[0].shape, values[1].shape, *of_call)
        _repeats.put_first(key, (route.counter, repeat, route.plan is not None))


@tracing.instead("linear")
def _run(
    values: Values, batch_invariant: Any, weight_is_static: Any, stream: Any, out_dtype: Any
) -> Any:
    now, asked = stamp(SOURCES), batch_invariant
    if type(batch_invariant) is not bool:
        batch_invariant = batch_invariance.resolved(batch_invariant)
    if type(weight_is_static) is not bool:
        checks.check_flags(locals(), "weight_is_static")
    if out_dtype is not None:
        out_dtype = gemm.out_dtype_of(out_dtype)
    # An x of another rank is the framework's here, and may be ours in a layer.
    is_repeated = stream is None is out_dtype and type(values[0]) in producers.torch_types
    is_repeated = is_repeated and values[0].ndim == 2
    if is_repeated and (done := again(values, (now, batch_invariant), weight_is_static)):
        return done[0]
    of_call = (weight_is_static, now, batch_invariant)
    try:
        addresses, signature, owners = _probe(values, stream)
    except TypeError:
        if is_traced(values):
            return tracing.run_instead(_run, values, asked, weight_is_static, stream, out_dtype)
        _, choice = _decide(values, batch_invariant, weight_is_static, out_dtype)
        if stream is not None or not choice.is_fallback:
            raise
        _counter_of(choice, values).calls += 1
        return None
    key = (signature, *of_call, out_dtype)
    route = _routes.get(key)
    if route is None and is_traced(values):
        return tracing.run_instead(_run, values, asked, weight_is_static, stream, out_dtype)
    is_repeated = is_repeated and route is not None
    if route is None:
        route = make_route(values, batch_invariant, weight_is_static, stream, out_dtype)
        _routes.remember(key, route)
    route.counter.calls += 1
    try:
        result = route.run(values, addresses, stream)
    except TypeError as error:
        if stream is not None or not producers.in_transform():
            raise  # otherwise PyTorch wraps what it makes: the framework can compute it
        route.counter.calls -= 1
        _counter_of(_fallback(error, batch_invariant, values), values).calls += 1
        return None
    del owners  # memory that exists only for this call has been used, or queued to be
    if is_repeated:
        _keep(values, of_call, route)
    return result


def make_route(
    values: Values,
    batch_invariant: bool,
    weight_is_static: bool,
    stream: Any,
    out_dtype: str | None,
) -> _Route:
    """Return what calls of one signature count, and run: a plan, or for the framework a check."""
    problem, choice = _decide(values, batch_invariant, weight_is_static, out_dtype)
    if problem is None or choice.kernel == FRAMEWORK:
        return _framework_route(choice, values)
    try:
        plan = _OPERATIONS[choice.kernel].plan_of(problem, _completed(problem, choice), stream)
    except CaptureError as error:
        kind = f", out_dtype={out_dtype!r}" if out_dtype else ""
        raise CaptureError(
            f"{error}. For low-latency linear that is k3cupy.warmup('low_latency_linear', "
            f"shapes=[({problem.n}, {problem.k})], tokens=[{problem.num_tokens}], "
            f"residual={problem.residual is not None}, batch_invariant={batch_invariant}, "
            f"weight_is_static={weight_is_static}{kind})"
        ) from error
    except MissingError:
        raise
    except ToolchainError as error:
        if sources.overridden() is not None:  # an edited copy that is not there is raised
            sources.load(_OPERATIONS[choice.kernel].kernel.SOURCE)
        warn_user(f"low-latency linear: {choice.kernel} cannot run: {error}")
        return _framework_route(_fallback(error, batch_invariant, values), values)
    return _Route(_counter_of(choice, values), plan.run, plan.repeat, plan)


def _framework_route(choice: Choice, values: Values) -> _Route:
    if choice.runs_on == "cpu":
        sources.warn_unused()
    check = storages.storage_check(OURS.arguments.names, values)
    return _Route(_counter_of(choice, values), check, _repeat_of_framework, None)


def _repeat_of_framework(values: Values, _: Any = None) -> Repeat | None:
    """Return what says of calls like one that the framework's linear computes them: None."""
    *given, residual, _ = values
    alike = producers.likeness(tuple(given)) if residual is None else None
    if alike is None:
        return None
    torch = pytorch()
    is_grad_enabled = torch.is_grad_enabled
    grad_mode = is_grad_enabled() if any(t.requires_grad for t in given) else None
    (size, weight_size), (room, weight_room) = zip(
        *[(t.element_size(), span(t.shape, t.stride(), t.element_size())) for t in given],
        strict=True,
    )
    if any(t.data_ptr() % ALIGNMENT for t in given):
        return None  # where they are aligned our kernel may run

    def repeat(x: Any, weight: Any, residual: Any, _: Any) -> Any:
        if (
            residual is not None
            or not alike(x, weight)
            or (grad_mode is not None and is_grad_enabled() is not grad_mode)
            or x.storage_offset() * size + room > len(x.untyped_storage())
            or weight.storage_offset() * weight_size + weight_room > len(weight.untyped_storage())
        ):
            return MISS  # a storage that is too short is told there
        return None

    return repeat


def _decide(
    values: Values,
    batch_invariant: bool,
    weight_is_static: bool,
    out_dtype: str | None,
    gpu: DeviceInfo | None = None,
) -> tuple[GemmProblem | None, Choice]:
    """Return what our kernels would compute, where they take the call, and what is to run.

    The choice is that of the product, the same for every layout and promise.
    """
    try:
        static = weight_is_static
        limits = LINEAR if gpu is None else replace(LINEAR, anywhere=True)
        problem = gemm.accept(OURS, limits, values, weight_is_static=static, out_dtype=out_dtype)
    except (TypeError, ValueError) as error:
        for name, value in zip(OURS.arguments.names, values, strict=True):
            if value is not None or name in OURS.arguments.required:
                producers.check(value, name)  # what is no tensor at all is the caller's mistake
        storages.check_values(OURS.arguments.names, values)  # so is what nobody can read
        return None, _fallback(error, batch_invariant, values, elsewhere=gpu is not None)
    try:
        gpu = gpu or devices.info(problem.x.device_index)
    except ToolchainError as error:
        warn_user(f"low-latency linear: no kernel of ours can run: {error}")
        return None, _fallback(error, batch_invariant, values)
    choice = choose(
        ALL,
        *problem.size,
        gpu,
        residual=problem.residual is not None,
        batch_invariant=batch_invariant,
        why_not_mapped=why_not_mapped(problem, slice(0, problem.num_tokens)),
        measured_as=problem.measured_as,
    )
    return problem, choice


def _completed(
    problem: GemmProblem | None, choice: Choice, gpu: DeviceInfo | None = None
) -> Choice:
    """Return a choice with the instance and the launch attribute of a call."""
    if problem is None or choice.kernel == FRAMEWORK:
        return choice
    has_pdl = (gpu or devices.info(problem.x.device_index)).has_pdl
    return _OPERATIONS[choice.kernel].complete(problem, choice, has_pdl)


def _note_reason(error: Exception, values: Values, float32_out: bool) -> None:
    """Add to an error of the framework's linear what of the tensors our kernels do not take."""
    with contextlib.suppress(Exception):  # it is that error which has to be seen
        try:
            out_dtype = "float32" if float32_out else None
            gemm.accept(OURS, LINEAR, values, weight_is_static=False, out_dtype=out_dtype)
        except (TypeError, ValueError) as reason:
            note = f"k3cupy ran no kernel of its own: {reason}"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)  # from Python 3.11 on


def _fallback(
    error: Exception, batch_invariant: bool, values: Values, *, elsewhere: bool = False
) -> Choice:
    reason = str(error) + (NOT_INVARIANT if batch_invariant else "")
    on_cpu = not elsewhere and producers.is_on_cpu(values[0])
    return Choice(FRAMEWORK, None, reason, runs_on="cpu" if on_cpu else "cuda")


def _counter_of(choice: Choice, values: Values) -> Counter:
    first, second, *_ = values  # a nested one has a shape of no numbers, if any
    x: Any = () if getattr(first, "is_nested", False) else getattr(first, "shape", ())
    weight: Any = () if getattr(second, "is_nested", False) else getattr(second, "shape", ())
    num_tokens, k = x if len(x) == 2 else (0, 0)
    n = weight[0] if len(weight) == 2 else 0
    return counters.get((choice, n, k, num_tokens)) or counter_of(choice, n, k, num_tokens)
