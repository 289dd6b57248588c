"""What every operation does about the memory of its tensors: is it there, is it theirs, who knows.

Each argument of each operation loses its memory, or carries what memory does not hold, before and
behind a cached plan; and what an operation writes is counted. On CPU tensors, on those of a GPU,
and on those of a fake one, where a kept plan reads them as on a GPU and launches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import oracle
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from array_helpers import cupy_of
from dispatch_helpers import DispatchDevice
from fake_device import CudaTensor
from gemm_helpers import normal
from helpers import BF16, Producer, got_in
from mla_helpers import FORMS, Form, poisoned_outs
from mla_layer_helpers import LAYER_FORMS, LayerForm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_linear_helpers import Calls

import k3cupy
import k3cupy.torch.torch_library  # the operator
from k3cupy.runtime import dlpack, producers

M, N, K = 8, 96, 128
PLACES = ["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Call:
    """An operation with all its arguments as tensors, those that may be left out too.

    Attributes:
        function: the operation.
        tensors: argument -> tensor; `out[1]` is the second of several outputs.
        options: other arguments.
        written: arguments that it writes.
    """

    function: Callable[..., Any]
    tensors: dict[str, Any]
    options: dict[str, Any]
    written: tuple[str, ...]

    def __call__(self, **changes: Any) -> Any:
        given = {**self.tensors, **changes}
        outs = [given.pop(name) for name in list(given) if name.startswith("out[")]
        if outs:
            given["out"] = tuple(outs)
        return self.function(**given, **self.options)

    def moved(self, move: Callable[[torch.Tensor], Any]) -> Call:
        return replace(self, tensors={name: move(t) for name, t in self.tensors.items()})


def product(function: Callable[..., Any]) -> Call:
    tensors = {
        "x": normal((M, K), 1),
        "weight": normal((N, K), 2),
        "residual": normal((M, N), 3),
        "out": torch.zeros(M, N, dtype=BF16),
    }
    return Call(function, tensors, {}, ("out",))


def transposed_product() -> Call:
    tensors = {
        "output": torch.zeros(M, N, dtype=BF16),
        "mat_a": normal((M, K), 1),
        "mat_b": normal((N, K), 2).T,
    }
    return Call(k3cupy.dsv3_fused_a_gemm, tensors, {}, ("output",))


def epilogue(form: Form | LayerForm) -> Call:
    """With RoPE where the operation has it, and scales as tensors."""
    call = form.make(5, 2, rope=True)
    outs = [box.tensor for box in poisoned_outs(call)]
    names = ["out"] if len(outs) == 1 else [f"out[{i}]" for i in range(len(outs))]
    scales = {name: torch.tensor([0.5]) for name in form.scales}
    given = {**call.args, **scales, **dict(zip(names, outs, strict=True))}
    tensors = {name: t.clone() for name, t in given.items() if isinstance(t, torch.Tensor)}
    options = {name: value for name, value in given.items() if name not in tensors}
    written = (*form.written(rope=True), *names)
    return Call(call.operation, tensors, options, written)


LAYERS = ("norm", "query", "query-fp8", "query-ds_mla", "value-gate", "value-packed")
CALLS: dict[str, Callable[[], Call]] = {
    "fused_a_gemm": lambda: product(k3cupy.fused_a_gemm),
    "skinny_gemm": lambda: product(k3cupy.skinny_gemm),
    "dsv3_fused_a_gemm": transposed_product,
    **{name: lambda f=form: epilogue(f) for name, form in FORMS.items()},
    **{name: lambda f=LAYER_FORMS[name]: epilogue(f) for name in LAYERS},
}
each_operation = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.no_grad():
        yield request.param


@dataclass
class Machine:
    """Where calls run, and how many launches there were."""

    place: str
    gpu: DispatchDevice | None

    def move(self, tensor: torch.Tensor) -> Any:
        if self.place == "fake":
            return CudaTensor.of(tensor, 0)
        return tensor.to(self.place)

    def launches(self) -> int:
        return 0 if self.gpu is None else len(self.gpu.records)

    def plans(self) -> int:
        return 0 if self.gpu is None else self.gpu.launchers


@pytest.fixture
def machine(place: str, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(place, DispatchDevice(monkeypatch) if place == "fake" else None)


def problems_of(
    machine: Machine, call: Call, damages: dict[str, Callable[[torch.Tensor], Any]], said: str
) -> list[str]:
    """Damage each argument in each way, and tell where a call is not refused as agreed."""
    problems = []
    before = {name: oracle.bits(t.cpu().clone()) for name, t in call.tensors.items()}
    launches = machine.launches()
    for name, tensor in call.tensors.items():
        for label, damage in damages.items():
            try:
                call(**{name: damage(tensor)})
            except (TypeError, ValueError) as error:
                told = str(error)
                if not (told.startswith(f"{name}: expected ") and re.search(said, got_in(told))):
                    problems.append(f"{name} {label}: {told}")
            else:
                problems.append(f"{name} {label}: taken")
    assert machine.launches() == launches
    for name, tensor in call.tensors.items():
        found = oracle.bits(tensor.cpu())
        oracle.assert_same_bits(found, before[name], f"{name} after refused calls")
    return problems


def refused_throughout(
    machine: Machine, name: str, damages: dict[str, Callable[[torch.Tensor], Any]], said: str
) -> None:
    """Before any good call, and behind one; and nothing bad is remembered."""
    call = CALLS[name]().moved(machine.move)
    problems = problems_of(machine, call, damages, said)
    call()
    plans = machine.plans()
    problems += problems_of(machine, call, damages, said)
    call()
    assert machine.plans() == plans, "the plan was kept"
    assert not problems, "\n".join(problems)


# Case 30: memory that is gone


def beside(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Put a new CPU tensor where another one is."""
    return CudaTensor.of(made, 0) if type(tensor) is CudaTensor else made.to(tensor.device)


def resized(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A copy of the same layout whose storage was resized behind it."""
    found = beside(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))
    found.untyped_storage().resize_(found.untyped_storage().nbytes() + size if size else 0)
    return found


def behind_its_storage(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A view at an offset, so that its address is not 0, of a storage that ends before it."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    wide = beside(tensor, torch.zeros(reach + 64).to(tensor.dtype))
    found = wide.as_strided(tensor.shape, tensor.stride(), 64)
    if type(wide) is CudaTensor:
        found = CudaTensor.of(found, 0)
    found.untyped_storage().resize_(size)
    return found


SHORT: dict[str, Callable[[torch.Tensor], Any]] = {
    "freed": lambda t: resized(t, 0),
    "shrunk by a byte": lambda t: resized(t, -1),
    "freed, at an offset": lambda t: behind_its_storage(t, 0),
    "shrunk, at an offset": lambda t: behind_its_storage(t, 64 * t.element_size()),
}


@each_operation
def test_case30_a_storage_smaller_than_its_tensor(machine: Machine, name: str) -> None:
    refused_throughout(machine, name, SHORT, r"^\d+$")


class Asked(Exception):
    """The framework wants to compute with a wrapper."""


class Wrapper(torch.Tensor):
    """Like a distributed or a quantised tensor: metadata of one, memory of none."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise Asked


def wrapper(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        Wrapper, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made


def zeros_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    where = "cpu" if type(tensor) is CudaTensor else tensor.device
    zeros = torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=where)
    strided = zeros.as_strided(tensor.shape, tensor.stride())
    return CudaTensor.of(strided, 0) if type(tensor) is CudaTensor else strided


@each_operation
def test_case30_a_tensor_without_memory(machine: Machine, name: str) -> None:
    damages = {"a wrapper": wrapper, "a zero tensor": zeros_without_memory}
    refused_throughout(machine, name, damages, "without any|0x0")


def test_case30_a_bare_dlpack_tensor_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = Producer(normal((M, K), 1)), normal((N, K), 2)
    k3cupy.fused_a_gemm(x, weight)
    read = dlpack.read_header
    monkeypatch.setattr(dlpack, "read_header", lambda c: replace(read(c), address=0))
    with pytest.raises(ValueError, match=r"\Ax: expected a tensor with memory of its own, got "):
        k3cupy.fused_a_gemm(x, weight)


@pytest.mark.gpu
def test_case30_a_cupy_array_without_memory() -> None:
    import cupy

    x, weight = normal((M, K), 1).cuda(), normal((N, K), 2).cuda()
    residual = cupy_of(normal((M, N), 3).cuda())
    k3cupy.fused_a_gemm(x, weight, residual)
    memory = cupy.cuda.UnownedMemory(0, 0, None, 0)
    nothing = cupy.ndarray((M, N), residual.dtype, cupy.cuda.MemoryPointer(memory, 0))
    with pytest.raises(ValueError, match=r"\Aresidual: expected a tensor with memory"):
        k3cupy.fused_a_gemm(x, weight, nothing)


def without_outputs(call: Call) -> Call:
    """The call, whose outputs are to be made."""
    inputs = {n: t for n, t in call.tensors.items() if not n.startswith("out")}
    return replace(call, tensors=inputs)


@each_operation
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_case30_an_output_that_was_made_without_memory(
    machine: Machine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mode in which PyTorch makes fake tensors: nothing may be written to address 0."""
    call = without_outputs(CALLS[name]().moved(machine.move))
    for _ in range(2):
        launches = machine.launches()
        with monkeypatch.context() as patch, FakeTensorMode():
            if machine.place == "fake":  # a fake tensor is of no other class
                patch.setattr(CudaTensor, "of", lambda made, *_: made)
            with pytest.raises(ValueError, match=r"\Aout\S*: expected a tensor with memory"):
                call()
        assert machine.launches() == launches
        call()


def test_an_empty_tensor_needs_no_memory() -> None:
    """Also where its storage was freed, and where it lies behind the end of one."""
    x, weight = torch.empty(0, K, dtype=BF16), normal((N, K), 2)
    x.untyped_storage().resize_(0)
    assert k3cupy.fused_a_gemm(x, weight).shape == (0, N)
    assert k3cupy.fused_a_gemm(normal((4, K), 1)[4:], weight).shape == (0, N)
    assert k3cupy.low_latency_linear(normal((4, K), 1)[4:], weight).shape == (0, N)


class OwnParameter(torch.nn.Parameter):
    """As libraries make their own ones, which is memory like any other."""


class OwnTensor(torch.Tensor):
    """The same, of no parameter."""


CLASSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "its own parameter": lambda t: OwnParameter(t, requires_grad=False),
    "its own tensor": lambda t: t.as_subclass(OwnTensor),
}


@pytest.mark.parametrize("of", CLASSES)
@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("changed", ["x", "weight", "residual"])
def test_case30_low_latency_linear_names_it(
    machine: Machine, changed: str, kind: str, of: str
) -> None:
    """Whoever computes: our kernel, or the framework, which would end the process."""
    tensors = {"x": normal((M, K), 1), "weight": normal((N, K), 2), "residual": normal((M, N), 3)}
    where = "cuda" if machine.place == "cuda" else "cpu"  # the fake one takes it for its own
    good = {name: t.to(where) for name, t in tensors.items()}
    bad = {**good, changed: CLASSES[of](SHORT[kind](good[changed]))}
    functions = [k3cupy.low_latency_linear, k3cupy.try_low_latency_gemm]
    functions += [k3cupy.explain_low_latency_gemm, torch.ops.k3cupy.low_latency_linear]
    for _ in range(3):
        for function in functions:
            with pytest.raises(ValueError, match=rf"\A{changed}: expected a storage of \d+ bytes"):
                function(**bad)
        for function in functions[:3]:
            function(**{**good, changed: CLASSES[of](good[changed])})


def test_case30_low_latency_linear_names_it_beside_what_the_framework_alone_reads() -> None:
    x, weight, residual = normal((M, K), 1), normal((N, K), 2), normal((M, N), 3)
    freed = resized(residual, 0)
    for _ in range(2):
        for function in (k3cupy.low_latency_linear, k3cupy.explain_low_latency_gemm):
            with pytest.raises(ValueError, match=r"\Aresidual: expected a storage of \d+ bytes"):
                function(torch._neg_view(x), weight, freed)
            with pytest.raises(ValueError, match=r"\Aresidual: expected a storage of \d+ bytes"):
                function(x, weight, torch._neg_view(freed))
        k3cupy.low_latency_linear(torch._neg_view(x), weight, residual)


@pytest.mark.parametrize("changed", ["x", "residual"])
def test_case30_rows_that_would_have_to_be_copied(changed: str) -> None:
    """Of three dimensions, in another order: before anybody computes."""
    given = {
        "x": normal((3, 2, K), 1),
        "weight": normal((N, K), 2),
        "residual": normal((3, 2, N), 3),
    }
    given |= {name: given[name].transpose(0, 1) for name in ("x", "residual")}
    layer = torch.nn.Linear(K, N, bias=False, dtype=BF16).requires_grad_(False)
    k3cupy.enable_low_latency_gemm(layer)
    runs: list[Callable[[], Any]] = [lambda: torch.ops.k3cupy.low_latency_linear(**given)]
    runs += [lambda: layer(given["x"])] if changed == "x" else []
    for run in runs:
        run()
    given[changed].untyped_storage().resize_(0)
    for run in runs:
        with pytest.raises(ValueError, match=rf"\A{changed}: expected a storage of \d+ bytes"):
            run()


def test_one_check_of_the_framework_s_calls_serves_every_class() -> None:
    """The framework's calls of a signature have one check, made of the first one's tensors."""
    weight = normal((N, K), 2)
    x = normal((M, 3 * K), 1)[:, K : 2 * K]
    made = type("Made", (torch.Tensor,), {})
    want = torch.nn.functional.linear(x, weight)
    assert torch.equal(k3cupy.low_latency_linear(x.as_subclass(made), weight), want)
    end = x.untyped_storage().nbytes() - K * x.element_size()  # of its last row
    x.untyped_storage().resize_(end)
    assert torch.equal(k3cupy.low_latency_linear(x, weight), want)
    x.untyped_storage().resize_(end - 1)
    with pytest.raises(ValueError, match=r"\Ax: expected a storage of \d+ bytes"):
        k3cupy.low_latency_linear(x, weight)


def test_case30_a_layer_whose_weight_was_freed() -> None:
    layer = torch.nn.Linear(K, N, bias=False, dtype=BF16)
    k3cupy.enable_low_latency_gemm(layer)
    x = normal((M, K), 1)
    with torch.no_grad():
        layer(x)
        layer.weight.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"\Aweight: expected a storage of \d+ bytes .* got 0"):
            layer(x)


def test_wrappers_of_tensors_go_to_the_framework() -> None:
    """They know how to compute; the address 0 is none of ours."""
    x, weight, residual = normal((M, K), 1), normal((N, K), 2), normal((M, N), 3)
    k3cupy.low_latency_linear(x, weight)
    for given in ((wrapper(x), weight), (x, wrapper(weight)), (x, weight, wrapper(residual))):
        with pytest.raises(Asked):
            k3cupy.low_latency_linear(*given)
        assert k3cupy.explain_low_latency_gemm(*given).is_fallback


# Case 33: values that memory does not hold


@each_operation
def test_case33_a_view_with_the_negative_bit(machine: Machine, name: str) -> None:
    refused_throughout(machine, name, {"negated": torch._neg_view}, "negative bit")


def test_case33_the_imaginary_part_of_a_conjugate_as_a_scale(machine: Machine) -> None:
    call = epilogue(FORMS["decode-fp8"]).moved(machine.move)
    call()
    imaginary = machine.move(torch.tensor([0.5 - 0.5j])).conj().imag
    assert imaginary.is_neg()
    with pytest.raises(TypeError, match=r"\Aq_scale_inv: expected .* negative bit"):
        call(q_scale_inv=imaginary)
    call(q_scale_inv=imaginary.resolve_neg())


def test_case33_a_conjugate_is_refused_by_its_type() -> None:
    call = transposed_product()
    conjugate = torch.zeros(M, K, dtype=torch.complex64).conj()
    with pytest.raises(TypeError, match=r"\Amat_a: expected bfloat16, got complex64"):
        call(mat_a=conjugate)


@pytest.mark.parametrize("changed", ["x", "weight", "residual"])
def test_case33_low_latency_linear_leaves_it_to_the_framework(changed: str) -> None:
    tensors = {"x": normal((M, K), 1), "weight": normal((N, K), 2), "residual": normal((M, N), 3)}
    k3cupy.low_latency_linear(**tensors)
    negated = {**tensors, changed: torch._neg_view(tensors[changed])}
    want = torch.addmm(negated["residual"], negated["x"], negated["weight"].T)
    assert torch.equal(k3cupy.low_latency_linear(**negated), want)
    reason = k3cupy.explain_low_latency_gemm(**negated).reason
    assert reason.startswith(f"{changed}: expected "), reason


# Forward-mode derivatives, and the transforms that wrap tensors


def dual(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = forward_ad.make_dual(tensor, torch.ones_like(tensor))
    return CudaTensor.of(made, 0) if type(tensor) is CudaTensor else made


@each_operation
def test_a_tangent_is_not_dropped(machine: Machine, name: str) -> None:
    """Of every argument that may have one: only floating-point tensors do."""
    call = CALLS[name]().moved(machine.move)
    floating = {n: t for n, t in call.tensors.items() if t.dtype.is_floating_point}
    floating = {n: t for n, t in floating.items() if t.element_size() > 1}
    with forward_ad.dual_level():
        call()  # plain tensors inside a level are fine
        for argument, tensor in floating.items():
            with pytest.raises(
                TypeError, match=rf"\A{re.escape(argument)}: expected .* got a dual"
            ):
                call(**{argument: dual(tensor)})
    call()


def test_low_latency_linear_keeps_a_tangent() -> None:
    x, weight = normal((M, K), 1), normal((N, K), 2)
    layer = torch.nn.Linear(K, N, bias=False, dtype=BF16)
    k3cupy.enable_low_latency_gemm(layer)
    with forward_ad.dual_level():
        for out in (k3cupy.low_latency_linear(dual(x), weight), layer(dual(x))):
            assert forward_ad.unpack_dual(out).tangent is not None


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_low_latency_linear_computes_constants_inside_a_transform(
    machine: Machine, transform: str
) -> None:
    """Where only the framework can: it wraps every output that it makes. The report says so."""
    x, weight = machine.move(normal((M, 1024), 1)), machine.move(normal((N, 1024), 2))
    k3cupy.low_latency_linear(x, weight)
    k3cupy.reset_dispatch_report()
    launches = machine.launches()
    made = []

    def computed(t: torch.Tensor) -> torch.Tensor:
        made.append(k3cupy.low_latency_linear(x, weight))
        return t.sum()

    TRANSFORMS[transform](computed, torch.ones(3))
    assert made[0].shape == (M, N)
    assert machine.launches() == launches
    rows = k3cupy.dispatch_report()
    assert sum(row.calls for row in rows) == 1
    assert all(row.choice.is_fallback for row in rows if row.calls)


TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_is_named(transform: str) -> None:
    weight, x = normal((N, K), 2), normal((M, K), 1)
    k3cupy.fused_a_gemm(x, weight)
    with pytest.raises((TypeError, ValueError)) as caught:
        TRANSFORMS[transform](lambda t: k3cupy.fused_a_gemm(t, weight), x)
    told = str(caught.value)
    assert told.startswith("x: expected ")
    assert "torch.func" in got_in(told) or "dual tensor" in got_in(told), told


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_a_transform_around_a_call_is_named(machine: Machine, transform: str) -> None:
    """There PyTorch wraps the output that it makes, though no argument is wrapped."""
    call = without_outputs(product(k3cupy.fused_a_gemm).moved(machine.move))
    call()
    launches = machine.launches()
    with pytest.raises(TypeError, match=r"\Aout: expected .* torch\.func"):
        TRANSFORMS[transform](lambda t: call().sum() + t.sum(), torch.ones(3))
    assert machine.launches() == launches


# Numbers


@pytest.mark.parametrize(
    "value", [float("nan"), -1.0, 0, pytest.param(10**400, id="1e400"), 1e-46], ids=repr
)
def test_case40_a_bad_scale_of_no_tokens(machine: Machine, value: Any) -> None:
    """Also behind a plan, of which nothing is launched."""
    form = FORMS["decode-fp8"]
    made = form.make(0, 2)
    tensors = {n: t for n, t in made.args.items() if isinstance(t, torch.Tensor)}
    options = {n: v for n, v in made.args.items() if n not in tensors}
    call = Call(made.operation, tensors, options, ()).moved(machine.move)
    call()
    for name in form.scales:
        with pytest.raises(ValueError, match=rf"\A{name}: expected a finite number above 0"):
            replace(call, options={**options, name: value})()


# Writes are counted


@each_operation
def test_writes_are_counted(machine: Machine, name: str) -> None:
    """Of what is written and of nothing else, in the first call and behind a plan."""
    call = CALLS[name]().moved(machine.move)
    for _ in range(2):
        before = {argument: t._version for argument, t in call.tensors.items()}
        call()
        counted = {a for a, t in call.tensors.items() if t._version > before[a]}
        assert counted == set(call.written)


def test_an_older_pytorch_counts_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And fails for one of inference mode."""
    several = torch._C._increment_version
    asked = []

    def older(tensor: Any) -> None:
        assert isinstance(tensor, torch.Tensor)
        assert not tensor.is_inference()
        asked.append(tensor)
        several((tensor,))

    monkeypatch.setattr(torch._C, "_increment_version", older)
    monkeypatch.setattr(torch.autograd.graph, "increment_version", older)
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    tensors = [torch.zeros(2), torch.zeros(2)]
    producers.write_counter.__wrapped__()((tensors[0], uncounted, tensors[1]))
    assert [t._version for t in tensors] == [1, 1]
    assert len(asked) == 2


def test_tensors_of_inference_mode_have_no_count(machine: Machine) -> None:
    with torch.inference_mode():
        made = product(k3cupy.fused_a_gemm).moved(machine.move)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert made() is made.tensors["out"]


def test_case32_autograd_sees_a_query_that_is_turned_in_place() -> None:
    call = epilogue(FORMS["insert"])
    q = call.tensors["q"]
    factor = torch.ones_like(q, requires_grad=True)
    with torch.enable_grad():
        kept = (q * factor).sum()  # saves q for the derivative of factor
    call()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_case32_a_product_into_a_weight_ends_its_promise(calls: Calls) -> None:
    """LoRA merged in place by ours: the layer may not fetch the weight early right after that."""
    layer = torch.nn.Linear(64, 48, bias=False, dtype=BF16)
    k3cupy.enable_low_latency_gemm(layer)
    x, b, a = normal((4, 64), 1), normal((48, 16), 2), normal((64, 16), 3)
    with torch.no_grad():
        for _ in range(2):
            layer(x)
            layer(x)
            k3cupy.fused_a_gemm(b, a, layer.weight, out=layer.weight)
    assert calls.promises == [False, True, False, True]


# What is kept of a class


def test_classes_without_end_do_not_grow_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class a call: what is kept of them stays small, and each is read right."""
    monkeypatch.setattr(producers, "_MOST_TYPES", 20, raising=False)
    x, weight = normal((4, K), 1), normal((48, K), 2)
    want = k3cupy.fused_a_gemm(x, weight)
    for _ in range(50):
        made = type("Made", (torch.Tensor,), {})
        assert torch.equal(k3cupy.fused_a_gemm(x.as_subclass(made), weight), want)
        assert max(len(producers.torch_types), len(producers._by_type)) <= 20
