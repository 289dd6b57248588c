"""Benchmark of the host's time of a call: ours beside C++ operators, a layer beside ``nn.Linear``.

The C++ extension of PyTorch is compiled here and now. Its operators have the same arguments, and
launch a kernel with programmatic dependent launch; for a new output Python calls ``torch.empty``
before. Without a compiler there is nothing to compare with, and the run says so.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import k3cupy
from k3cupy.bench import document
from k3cupy.runtime import instances, launch, sources
from k3cupy.runtime.instances import Instance
from k3cupy.timing import graphs
from k3cupy.timing.decode_step import DecodeStep

TOKENS, N, K = 4, 2304, 1536
_MANY_TOKENS = 300
_HEADS = 12
_CALLS, _BATCHES = 200, 25
_DECODE = "k3cupy::public_structure<__nv_bfloat16, false, false, 1>"

_FORMS = tuple(
    f"{kind}{output} output"
    for kind in ("", "prepared, ", "unchecked, ")
    for output in ("new", "given")
)
"""A new output or one that is given, of the operation, of a prepared call, of its ``unchecked``."""

Body = Callable[[], Any]


@dataclass
class Entry:
    """A call; times are the host's, in microseconds.

    Attributes:
        kind: the operation, or ``"layer"``.
        form: new output, given output or a prepared call; of a layer, what is special about x.
        beside: what it is compared with.
        beside_us: its time; None where there was no compiler.
        ours_us: ours.
    """

    kind: str
    form: str
    beside: str
    beside_us: float | None
    ours_us: float


def operators() -> tuple[Any, str]:
    """Return the C++ operators, built and told of their kernels; or None, and why not."""
    from torch.utils import cpp_extension

    driver = launch.driver_launch()
    compiler = cpp_extension.get_cxx_compiler()
    if driver is None:
        return None, "the driver's launch was not found by its name"
    if shutil.which(compiler) is None:
        return None, f"there is no C++ compiler ({compiler})"
    try:
        cpp_extension.load(
            name="k3cupy_bench",
            sources=[str(sources.directory() / "bench/host_operators.cpp")],
            extra_cflags=["-O2"],
            is_python_module=False,
        )
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"they could not be built: {str(error).splitlines()[0]}"
    device, found = torch.cuda.current_device(), torch.ops.k3cupy_bench
    kernels = [
        instances.load(Instance(f"bench/{file}.cu", name), device).kernel
        for file, name in (
            ("public_structure", _DECODE),
            ("host_arguments", "k3cupy::public_gemm_arguments"),
        )
    ]
    address = ctypes.cast(driver, ctypes.c_void_p).value
    found.use(address, *(int(kernel.handle) for kernel in kernels))
    return found, ""


def _with_empty(run: Callable[..., Any], like: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return a call that makes its output as C++ extensions' callers do, in Python."""
    shape, dtype, device = tuple(like.shape), like.dtype, like.device

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype, device=device)
        run(*tensors, out)
        return out

    return call


def _entries(kind: str, beside: str, times: Sequence[float], theirs: bool) -> Iterator[Entry]:
    """Yield the forms of a call, beside the operator with an output in the same way.

    Args:
        kind: of the entries.
        beside: what stands beside them.
        times: in the order of ``_FORMS``, then theirs with a new output and a given one.
        theirs: whether those are there.
    """
    for i, (form, us) in enumerate(zip(_FORMS, times, strict=False)):
        yield Entry(kind, form, beside, times[len(_FORMS) + i % 2] if theirs else None, us)


def _run_decode(theirs: Any) -> Iterator[Entry]:
    step = DecodeStep("16bit+same", TOKENS, _HEADS)
    operation = k3cupy.fused_mla_decode_q_concat_kv_cache_insert
    names = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping")
    tensors = [step.arguments[name] for name in names]
    new = k3cupy.prepare(operation, *tensors)
    given = k3cupy.prepare(operation, *tensors, out=step.out)
    bodies: list[Body] = [
        lambda: operation(*tensors),
        lambda: operation(*tensors, out=step.out),
        lambda: new(*tensors),
        lambda: given(*tensors, step.out),
        lambda: new.unchecked(*tensors),
        lambda: given.unchecked(*tensors, step.out),
    ]
    if theirs:
        run = theirs.decode
        wrong = step.check(lambda: run(*tensors, step.out))
        if wrong is not None:
            raise RuntimeError(f"decode, C++ operator: {wrong}, not timed")
        made = _with_empty(run, step.out)
        bodies += [lambda: made(*tensors), lambda: run(*tensors, step.out)]
    times = graphs.host_times(bodies, calls=_CALLS, batches=_BATCHES)
    yield from _entries("decode", "C++ operator", times, bool(theirs))


def _run_gemm(theirs: Any) -> Iterator[Entry]:
    x = torch.randn(TOKENS, K, device="cuda").bfloat16()
    weight = torch.randn(N, K, device="cuda").bfloat16()
    out = torch.empty(TOKENS, N, device="cuda", dtype=torch.bfloat16)
    new = k3cupy.prepare(k3cupy.fused_a_gemm, x, weight)
    given = k3cupy.prepare(k3cupy.fused_a_gemm, x, weight, out=out)
    bodies: list[Body] = [
        lambda: k3cupy.fused_a_gemm(x, weight),
        lambda: k3cupy.fused_a_gemm(x, weight, out=out),
        lambda: new(x, weight),
        lambda: given(x, weight, out),
        lambda: new.unchecked(x, weight),
        lambda: given.unchecked(x, weight, out),
    ]
    if theirs:
        run = theirs.gemm

        def reordered(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            run(out, x, weight)

        made = _with_empty(reordered, out)
        bodies += [lambda: made(x, weight), lambda: run(out, x, weight)]
    times = graphs.host_times(bodies, calls=_CALLS, batches=_BATCHES)
    yield from _entries("fused_a_gemm", "C++ operator", times, bool(theirs))
    bodies = [
        lambda: k3cupy.low_latency_linear(x, weight),
        lambda: torch.nn.functional.linear(x, weight),
    ]
    ours, framework = graphs.host_times(bodies, calls=_CALLS, batches=_BATCHES)
    yield Entry("low_latency_linear", "new output", "F.linear", framework, ours)


def _run_layer() -> Iterator[Entry]:
    plain, ours = (
        torch.nn.Linear(K, N, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    k3cupy.enable_low_latency_gemm(ours)
    few = torch.randn(TOKENS, K, device="cuda").bfloat16()
    many = torch.randn(_MANY_TOKENS, K, device="cuda").bfloat16()
    inputs = {
        "2-D": few,
        "3-D": few.view(2, -1, K),
        f"{_MANY_TOKENS} rows": many,
        f"{_MANY_TOKENS} rows, 3-D": many.view(3, -1, K),
    }
    for grad in (False, True):
        for name, x in inputs.items():
            with torch.set_grad_enabled(grad):
                times = graphs.host_times(
                    [lambda x=x: plain(x), lambda x=x: ours(x)],  # type: ignore[misc]
                    calls=_CALLS,
                    batches=_BATCHES,
                )
            yield Entry("layer", name + (", grad mode" if grad else ""), "nn.Linear", *times)


def run() -> tuple[list[Entry], str]:
    """Return the entries, and what keeps the C++ operators away; ``""`` where they are there."""
    theirs, why_not = operators()
    with torch.no_grad():
        entries = [*_run_decode(theirs), *_run_gemm(theirs)]
    return [*entries, *_run_layer()], why_not


def remarks(why_not: str) -> list[str]:
    """Return what a reader must know of the run."""
    return [f"Without C++ operators to compare with: {why_not}."] if why_not else []


def as_document(
    entries: Sequence[Entry], commit: str | None = None, why_not: str = ""
) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "host",
        entries,
        commit,
        method={
            "statistic": f"minimum of {_BATCHES} batches of {_CALLS} calls, in turns with what "
            "stands beside it, microseconds a call",
            "decode": f"16bit+same, B = {TOKENS}, H = {_HEADS}",
            "products": f"{N} x {K}, M = {TOKENS}; layers also M = {_MANY_TOKENS}",
        },
        remarks=remarks(why_not),
    )
