"""torch.compile around calls of ours: it takes operators for them, or calls them, and never looks
further into the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import golden_calls
import pytest
import torch
from dispatch_helpers import DispatchDevice
from fake_device import H200, CudaTensor
from gemm_helpers import normal
from golden_recording import Tensors
from mla_helpers import make_decode, make_prefill

import k3cupy
from k3cupy.call import plans
from k3cupy.runtime import tracing

PACKAGE = Path(k3cupy.__file__).parent
ONE_OF_EACH_KIND = (
    golden_calls.DECODE,
    golden_calls.KV_CONCAT,
    "fused_a_gemm",
    "skinny_gemm",
    "low_latency_linear",
)
MOST = 4
"""A public function, what it passes a call on to, and an operation: nothing behind that. Where
operators stand for all calls nothing is looked into but the caller."""


class Traced(list[str]):
    """The functions of the package that the compiler looks into, each time that it does."""

    def note(self, code: Any) -> None:
        file = code.co_filename
        if file.startswith("<k3cupy") or Path(file).is_relative_to(PACKAGE):
            self.append(code.co_name)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    """The compiler has not been told, as in a process whose first call is a compiled one."""
    from torch._dynamo import convert_frame, trace_rules

    seen, compile_frame = Traced(), convert_frame._compile

    def spy(code: Any, *args: Any, **kwargs: Any) -> Any:
        seen.note(code)
        return compile_frame(code, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(tracing, "told", False)
        rules = [rule for rule in trace_rules.SKIP_DIRS if "k3cupy" not in rule]
        patch.setattr(trace_rules, "SKIP_DIRS", rules)
        for name in ("fake_device", "dispatch_helpers"):  # the GPU is part of no user's program
            trace_rules.add(name)
        patch.setattr(convert_frame, "_compile", spy)
        plans.tables_changed()
        torch._dynamo.reset()
        yield seen
    trace_rules._recompile_re()
    plans.tables_changed()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="eager")


@pytest.mark.parametrize("operation", ONE_OF_EACH_KIND)
def test_case43_first_calls_inside_a_compiled_function(
    operation: str, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls in one function, whose plans are made there, launch what they launch outside."""
    device, run = DispatchDevice(monkeypatch), getattr(k3cupy, operation)
    call = next(c for c in golden_calls.calls() if (c.operation, c.gpu) == (operation, H200))

    def twice(first: dict[str, Any], second: dict[str, Any]) -> Any:
        return run(**first), run(**second)

    def launched(function: Callable[..., Any]) -> list[Any]:
        before = len(device.records)
        function(*[call.arguments(Tensors(H200.index)) for _ in range(2)])
        return [(r.instance, r.grid, r.pdl, len(r.arguments)) for r in device.records[before:]]

    with torch.no_grad():
        inside = compiled(twice)
        found = launched(inside)
        seen = len(traced)
        assert found == launched(inside) == launched(twice)
    assert len(found) >= 2
    assert seen <= MOST, traced
    assert len(traced) == seen, "nothing in later calls"


@pytest.mark.parametrize("kind", ["decode", "fp8"])
def test_case43_epilogues_inside_a_compiled_function(
    device: str, kind: str, traced: Traced
) -> None:
    call = make_decode(device=device) if kind == "decode" else make_prefill(kind, device=device)
    before = call.snapshot()
    call.check(before, compiled(lambda given: call.operation(**given))(call.args))
    assert len(traced) <= MOST, traced


@pytest.mark.parametrize("name", ["low_latency_linear", "skinny_gemm", "dsv3_fused_a_gemm"])
def test_case43_products_inside_a_compiled_function(device: str, name: str, traced: Traced) -> None:
    """What comes before a call and behind it is compiled; the values are the same."""
    run = getattr(k3cupy, name)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if name == "dsv3_fused_a_gemm":
            out = x.new_zeros(x.shape[0], weight.shape[0])
            run(out, x * 2, weight.t())
            return out + 1
        return run(x * 2, weight) + 1

    inside = compiled(step)
    x, weight = normal((3, 128), 1, device), normal((64, 128), 7, device)
    for _ in range(2):
        assert torch.equal(inside(x, weight), step(x, weight))
    assert len(traced) <= MOST, traced


@pytest.mark.parametrize("way", ["checked", "unchecked"])
def test_prepared_calls_inside_a_compiled_function(
    way: str, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask for no plan, and so nobody has told the compiler of them."""
    device = DispatchDevice(monkeypatch)
    x, weight, out = (
        CudaTensor.of(normal(shape, 1), 0) for shape in ((3, 128), (64, 128), (3, 64))
    )
    with torch.no_grad():
        run = k3cupy.prepare(k3cupy.fused_a_gemm, x, weight, out=out)
        call = run if way == "checked" else run.unchecked
        inside = compiled(lambda x, out: call(x, weight, out))
        for _ in range(3):
            assert inside(x, out) is out
    assert len(device.records) == 3
    assert not traced


def test_case43_an_operation_compiled_itself_and_an_explanation(traced: Traced) -> None:
    x, weight = normal((3, 128), 1), normal((64, 128), 2)
    want = k3cupy.fused_a_gemm(x, weight)
    for _ in range(2):
        assert torch.equal(compiled(k3cupy.fused_a_gemm)(x, weight), want)
        assert compiled(lambda: k3cupy.explain_fused_a_gemm(x, weight))().runs_on == "cpu"


def test_case43_errors_inside_a_compiled_function_are_those_outside(traced: Traced) -> None:
    """PyTorch's own class, for the graph is not made; and ours for a call that leaves the graph."""
    x, weight = normal((3, 128), 1), normal((64, 129), 2)
    told = r"weight: expected shape \[N, 128\] like x, got"
    inside = compiled(lambda *given, **named: k3cupy.fused_a_gemm(*given, **named))
    with pytest.raises(ValueError, match=told):
        k3cupy.fused_a_gemm(x, weight)
    with pytest.raises(RuntimeError, match=told):
        inside(x, weight)
    with pytest.raises(ValueError, match=told):
        inside(x, weight, stream=0)


@pytest.mark.parametrize("is_told", [False, True], ids=["not told", "told"])
def test_case43_a_whole_graph_with_calls(is_told: bool, traced: Traced) -> None:
    """Also where the compiler meets ours before it was told of the package."""
    x, weight = normal((3, 128), 1), normal((64, 128), 2)
    if is_told:
        tracing.tell()
    for name in ("fused_a_gemm", "low_latency_linear"):
        run = getattr(k3cupy, name)
        whole = torch.compile(lambda *t, f=run: f(*t), fullgraph=True, backend="eager")
        assert torch.equal(whole(x, weight), run(x, weight))
    assert not traced


def test_a_compiler_that_does_not_know_the_marks_calls_ours(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before there were operators: it leaves its graph, and goes on behind the call."""
    from k3cupy.call.operation import Operation

    monkeypatch.delitem(vars(Operation.__call__), "_torchdynamo_inline")
    x, weight = normal((3, 128), 1), normal((64, 128), 2)
    step = lambda x: k3cupy.fused_a_gemm(x * 2, weight) + 1  # noqa: E731
    assert torch.equal(compiled(step)(x), step(x))
    whole = torch.compile(lambda x: k3cupy.fused_a_gemm(x, weight), fullgraph=True, backend="eager")
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"Operation\.__call__|choose and launch"
    ):
        whole(x)


def test_a_compiler_without_a_list_of_files_to_skip_is_left_alone(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import trace_rules

    monkeypatch.delattr(trace_rules, "SKIP_DIRS")
    tracing.tell()
    assert tracing.told
