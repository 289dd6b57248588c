"""Prepared calls of every operation: they launch what the operation launches, and check their own.

On tensors of a GPU that is none; on the CPU, where a prepared call is the operation filled in; and
on a GPU, for the values.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from dispatch_helpers import DispatchDevice, gpu
from fake_device import CudaTensor
from gemm_helpers import normal
from helpers import BF16
from mla_helpers import FORMS
from test_call_memory import CALLS, Call, K, M, N, beside, each_operation, wrapper

import k3cupy
from k3cupy.runtime import producers

__all__ = ["gpu"]

PREPARED = {name: make for name, make in CALLS.items() if name != "dsv3_fused_a_gemm"}
each_prepared = pytest.mark.parametrize("name", PREPARED)


def on_gpu(tensor: torch.Tensor) -> CudaTensor:
    return CudaTensor.of(tensor, 0)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and layout at another address."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    return beside(tensor, made)


def arguments_of(call: Call) -> dict[str, Any]:
    given = dict(call.tensors)
    outs = [given.pop(name) for name in list(given) if name.startswith("out[")]
    if outs:
        given["out"] = tuple(outs)
    return {**given, **call.options}


def function_of(call: Call) -> Callable[..., Any]:
    """The public function, which a call of an epilogue looks up when it runs."""
    of = getattr(call.function, "__self__", None)
    return call.function if of is None else getattr(k3cupy, of.name)  # type: ignore[no-any-return]


def prepared(call: Call, **options: Any) -> Any:
    return k3cupy.prepare(function_of(call), **arguments_of(call), **options)


def without_outputs(call: Call) -> Call:
    inputs = {n: t for n, t in call.tensors.items() if not n.startswith("out")}
    return Call(call.function, inputs, call.options, ())


@each_prepared
@pytest.mark.parametrize("given", [True, False], ids=["given", "new"])
@pytest.mark.parametrize("unchecked", [False, True], ids=["checked", "unchecked"])
def test_it_launches_what_the_operation_launches(
    gpu: DispatchDevice, name: str, given: bool, unchecked: bool
) -> None:
    call = PREPARED[name]().moved(on_gpu)
    call = call if given else without_outputs(call)
    run = prepared(call)
    assert not gpu.records, "nothing is launched by preparing"
    assert set(run.tensors) == set(call.tensors)
    assert run.choice.runs_on == "cuda"
    for _ in range(3):  # the first launch of a thread is not packed
        moved = call.moved(elsewhere)
        before = len(gpu.records)
        outs = moved()
        launched = gpu.records[before:]
        results = (run.unchecked if unchecked else run)(*[moved.tensors[n] for n in run.tensors])
        again = gpu.records[before + len(launched) :]
        if given:
            assert again == launched
            returned = results if isinstance(results, tuple) else (results,)
            assert all(any(r is t for t in moved.tensors.values()) for r in returned)
        else:  # but for the new outputs
            made = [t.data_ptr() for t in _each(outs)], [t.data_ptr() for t in _each(results)]
            for ours, theirs in zip(again, launched, strict=True):
                swapped = dict(zip(*made[::-1], strict=True))
                arguments = [swapped.get(a, a) if type(a) is int else a for a in ours.arguments]
                assert arguments == theirs.arguments
            assert [(t.shape, t.dtype) for t in _each(outs)] == [
                (t.shape, t.dtype) for t in _each(results)
            ]


def _each(outs: Any) -> tuple[Any, ...]:
    return outs if isinstance(outs, tuple) else (outs,)


@each_prepared
def test_what_it_writes_is_counted(gpu: DispatchDevice, name: str) -> None:
    call = PREPARED[name]().moved(on_gpu)
    run = prepared(call)
    versions = {n: t._version for n, t in call.tensors.items()}
    run(*[call.tensors[n] for n in run.tensors])
    counted = {n for n, t in call.tensors.items() if t._version != versions[n]}
    assert counted == set(call.written)


def resized(t: Any) -> Any:
    return on_gpu(torch.zeros(*(n + 1 for n in t.shape)).to(t.dtype))


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "no tensor": lambda t: None,
    "another shape": resized,
    "another type": lambda t: on_gpu(torch.zeros(t.shape, dtype=torch.float64)),
    "without memory": wrapper,
    "freed": lambda t: (made := elsewhere(t), made.untyped_storage().resize_(0))[0],
    "negated": torch._neg_view,
    "misaligned": lambda t: on_gpu(
        torch.zeros(t.numel() * t.element_size() + 1, dtype=torch.uint8)[1:]
        .view(torch.uint8)
        .as_strided(t.shape, t.stride())
        if t.element_size() == 1
        else torch.zeros(t.numel() + 1024, dtype=t.dtype).as_strided(t.shape, t.stride(), 1)
    ),
    "on another GPU": lambda t: CudaTensor.of(elsewhere(t).as_subclass(torch.Tensor), 1),
}


@each_prepared
def test_tensors_that_are_not_like_those_are_refused_by_name(
    gpu: DispatchDevice, name: str
) -> None:
    call = PREPARED[name]().moved(on_gpu)
    run = prepared(call)
    for changed in run.tensors:
        for label, damage in DAMAGES.items():
            given = {**call.tensors, changed: damage(call.tensors[changed])}
            with pytest.raises((TypeError, ValueError), match=r"\A\w+(\[\d\])?: expected ") as e:
                run(*[given[n] for n in run.tensors])
            assert str(e.value).startswith(f"{changed}: expected "), (label, str(e.value))
    assert not gpu.records
    run(*[call.tensors[n] for n in run.tensors])
    assert gpu.records


@each_prepared
def test_what_the_unchecked_one_still_refuses(gpu: DispatchDevice, name: str) -> None:
    """What the addresses tell: none at all, and one that is not aligned like the other."""
    call = PREPARED[name]().moved(on_gpu)
    run = prepared(call).unchecked
    for changed, tensor in call.tensors.items():
        for damage in ("without memory", "misaligned"):
            given = {**call.tensors, changed: DAMAGES[damage](tensor)}
            words = {n.replace("[", "").replace("]", ""): t for n, t in given.items()}
            with pytest.raises((TypeError, ValueError)) as e:
                run(**words)
            assert str(e.value).startswith(f"{changed}: expected "), (damage, str(e.value))
    assert not gpu.records


@pytest.mark.parametrize("unchecked", [False, True], ids=["checked", "unchecked"])
def test_an_output_over_an_input_is_refused(gpu: DispatchDevice, unchecked: bool) -> None:
    x, weight, out = (on_gpu(t) for t in (normal((M, K), 1), normal((K, K), 2), normal((M, K), 3)))
    run = k3cupy.prepare(k3cupy.fused_a_gemm, x, weight, out=out)
    run = run.unchecked if unchecked else run  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"\Aout: expected memory apart from x"):
        run(x, weight, x)
    assert not gpu.records


@each_prepared
@pytest.mark.parametrize("on", ["cpu", "gpu"])
def test_its_errors_name_it(name: str, on: str, request: pytest.FixtureRequest) -> None:
    call = PREPARED[name]()
    if on == "gpu":
        request.getfixturevalue("gpu")
        call = call.moved(on_gpu)
    run = prepared(call)
    named = f"prepared_{function_of(call).__name__}"
    assert run.__name__ == run.unchecked.__name__ == named and run.tensors[0] in run.__doc__
    with pytest.raises(TypeError, match=rf"^{named}\(\) missing .*'{run.tensors[0]}'"):
        run()


def test_a_residual_in_place_stays_in_place(gpu: DispatchDevice) -> None:
    x, weight, out = (on_gpu(t) for t in (normal((M, K), 1), normal((N, K), 2), normal((M, N), 3)))
    run = k3cupy.prepare(k3cupy.fused_a_gemm, x, weight, out, out=out)
    assert run(x, weight, out, out) is out
    with pytest.raises(ValueError, match=r"as prepared|such as were"):
        run(x, weight, out, elsewhere(out))


def test_grad_mode_is_looked_at(gpu: DispatchDevice) -> None:
    x, weight = on_gpu(normal((M, K), 1)), on_gpu(normal((N, K), 2)).requires_grad_()
    run = k3cupy.prepare(k3cupy.fused_a_gemm, x, weight)
    run(x, weight)
    with torch.enable_grad(), pytest.raises(ValueError, match="such as were prepared"):
        run(x, weight)


@pytest.mark.parametrize("way", ["without guards", "on a stream"])
def test_where_it_is_the_operation_filled_in(
    gpu: DispatchDevice, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "without guards":
        monkeypatch.setattr(producers, "_guards", lambda: None)
    options = {"stream": 99} if way == "on a stream" else {}
    call = PREPARED["decode"]().moved(on_gpu)
    run = prepared(call, **options)
    for _ in range(2):
        run(*[call.tensors[n] for n in run.tensors])
        run.unchecked(**call.tensors)
    assert [r.stream for r in gpu.records] == [options.get("stream", 77)] * 4
    with pytest.raises(ValueError, match=r"\Aslot_mapping: expected a storage of"):
        run(**{**call.tensors, "slot_mapping": DAMAGES["freed"](call.tensors["slot_mapping"])})
    with pytest.raises(TypeError, match="ql_nope"):
        run()


def test_with_checks_it_is_the_operation_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose values are looked at on each call."""
    monkeypatch.setenv("K3CUPY_CHECK", "1")
    call = PREPARED["decode"]()
    run = prepared(call)
    call.tensors["slot_mapping"][0] = 1 << 40
    with pytest.raises(ValueError, match=r"\Aslot_mapping: expected "):
        run(**call.tensors)


@each_prepared
@torch.no_grad()
def test_on_the_cpu_no_tensor_may_be_left_out(name: str) -> None:
    """An output that was given would be made, a residual not be added."""
    call = PREPARED[name]()
    run = prepared(call)
    for gone in run.tensors:
        told = rf"\A{re.escape(gone)}: expected a tensor, as prepared, got None"
        with pytest.raises(TypeError, match=told):
            run(*[None if n == gone else call.tensors[n] for n in run.tensors])


def test_numbers_stay_as_they_were(gpu: DispatchDevice) -> None:
    call = PREPARED["decode-fp8"]().moved(on_gpu)
    tensors = {n: t for n, t in call.tensors.items() if not n.endswith("scale_inv")}
    scales = {n: 0.5 for n in call.tensors if n.endswith("scale_inv")}
    run = k3cupy.prepare(function_of(call), **tensors, **scales, **call.options)
    assert set(run.tensors) == set(tensors)
    call.function(**tensors, **scales, **call.options)
    for _ in range(2):
        run(**tensors)
    assert gpu.records[0].arguments == gpu.records[1].arguments == gpu.records[2].arguments


@pytest.mark.parametrize(
    "function", [k3cupy.low_latency_linear, k3cupy.try_low_latency_gemm], ids=["linear", "try"]
)
def test_low_latency_linear(gpu: DispatchDevice, function: Callable[..., Any]) -> None:
    x, weight = (
        on_gpu(torch.zeros(4, 7168, dtype=BF16)),
        on_gpu(torch.zeros(2112, 7168, dtype=BF16)),
    )
    run = k3cupy.prepare(function, x, weight, weight_is_static=True)
    assert run.tensors == ("x", "weight")
    assert not run.choice.is_fallback
    function(x, weight, weight_is_static=True)
    run(x, weight)
    assert gpu.records[0].instance == gpu.records[1].instance
    many = on_gpu(torch.zeros(300, 7168, dtype=BF16))
    run = k3cupy.prepare(function, many, weight)
    assert run.choice.is_fallback


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@each_prepared
@torch.no_grad()
def test_the_bits_are_the_operations(place: str, name: str) -> None:
    call = PREPARED[name]().moved(lambda t: t.to(place))
    run = prepared(call)
    for _ in range(3):
        ours, theirs = call.moved(elsewhere), call.moved(elsewhere)
        run(*[ours.tensors[n] for n in run.tensors])
        theirs()
        for n, tensor in ours.tensors.items():
            want = oracle.bits(theirs.tensors[n].cpu())
            oracle.assert_same_bits(oracle.bits(tensor.cpu()), want, n)


@pytest.mark.parametrize(
    "function",
    [k3cupy.dsv3_fused_a_gemm, torch.add, None, "fused_a_gemm", [], torch.zeros(2).numpy()],
)
def test_what_is_no_operation(function: Any) -> None:
    with pytest.raises(TypeError, match=r"\Afunction: expected an operation of k3cupy") as caught:
        k3cupy.prepare(function)
    is_other_name = function is k3cupy.dsv3_fused_a_gemm
    hint = "which computes the same" if is_other_name else "Give the function itself, as k3cupy."
    assert hint in str(caught.value)


def test_it_keeps_no_tensor_alive(gpu: DispatchDevice) -> None:
    call = PREPARED["decode"]().moved(on_gpu)
    run = prepared(call)
    gone = [weakref.ref(t) for t in call.tensors.values()]
    del call
    assert not any(r() is not None for r in gone)
    assert run.tensors


def test_every_form_of_the_epilogues_is_prepared() -> None:
    assert set(FORMS) < set(PREPARED)
    assert each_operation.args[1] is CALLS
