"""Every operation, whatever it is called with: the right values, or an error that names the fault.

The judge is the second oracle (oracle.py), and for products float64 with the rules of arithmetic
for what is not finite. Whole buffers are compared, guard bands included. `make fuzz` runs all of
this long, on the CPU and on a GPU; in the suite it is a sample, the same every time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import spoils
import torch
from gemm_helpers import assert_any_product, same_bits
from helpers import BF16, CASES, DEVICES, FP16, check_guards, whole_memory
from hypothesis import given, note
from hypothesis import strategies as st
from mla_helpers import (
    FORMS,
    Form,
    as_out,
    each_form,
    poisoned_outs,
    run_and_check,
    run_into_guarded_outs,
)
from mla_layer_helpers import LAYER_FORMS, OPERATIONS
from mla_layer_strategies import layer_cases
from spoils import Args, Spoil
from strategies import (
    DSV3_OP,
    FUSED_A_CONFIGS,
    FUSED_A_OP,
    LINEAR_OPS,
    SGLANG,
    SKINNY_OP,
    GemmCase,
    MlaCase,
    gemm_cases,
    mla_cases,
)

import k3cupy

each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
PRODUCTS = [
    *(pytest.param(FUSED_A_OP, BF16, name, id=f"fused_a-{name}") for name in FUSED_A_CONFIGS),
    pytest.param(DSV3_OP, BF16, "rule", id="dsv3"),
    *(
        pytest.param(SKINNY_OP, dtype, "rule", id=f"skinny-{name}")
        for name, dtype in (("bf16", BF16), ("fp16", FP16))
    ),
]


def settle(case: MlaCase | GemmCase, device: str) -> None:
    """Keep the promises: what a call reads was written before the kernel in front of it."""
    if device == "cuda" and {"kv_inputs_ready", "weight_is_static", "enable_pdl"} & {*case.options}:
        torch.cuda.synchronize()


# --- Good calls ----------------------------------------------------------------------------------


def counts_of(tensors: dict[str, Any]) -> dict[str, int]:
    """How often PyTorch was told that each tensor was written."""
    return {name: t._version for name, t in tensors.items() if isinstance(t, torch.Tensor)}


def check_counts(before: dict[str, int], tensors: dict[str, Any], *written: str) -> None:
    """What was written was counted, and nothing else was. Without tokens nobody asks."""
    for name, count in counts_of(tensors).items():
        assert (count > before[name]) == (name in written), f"the count of writes of {name}"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the memory that a tensor lies in, on the CPU."""
    return whole_memory(tensor).cpu().clone()


def run_mla(case: MlaCase, device: str) -> None:
    settle(case, device)
    counts = counts_of(case.call.args)
    if case.out_shift is None:
        run_and_check(case.call, **case.options)
    else:
        run_into_guarded_outs(case.call, shift=case.out_shift, **case.options)
    if case.call.tokens:
        check_counts(counts, case.call.args, *case.form.written(rope=case.call.rope))


@each_device
@each_dtype
@each_form
@given(data=st.data())
def test_any_epilogue(device: str, form: Form, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(mla_cases(form, dtype)).on(device)
    CASES["right", device] += 1
    run_mla(case, device)


@each_device
@pytest.mark.parametrize("kind", OPERATIONS)
@given(data=st.data())
def test_any_operation_around_the_epilogue(device: str, kind: str, data: st.DataObject) -> None:
    case = data.draw(layer_cases(kind, device)).on(device)
    CASES["right", device] += 1
    run_mla(case, device)


def run_gemm(case: GemmCase, device: str) -> None:
    """Run it and compare the product, the bytes around it, and the inputs, which nobody writes."""
    tensors = case.tensors
    added = tensors.get("residual")
    added = added.clone() if added is not None and case.in_place else added
    read = [t for name, t in tensors.items() if name != "residual" or not case.in_place]
    saved, around = [bytes_of(t) for t in read], case.out.snapshot() if case.out else None
    counts = counts_of(tensors)
    settle(case, device)
    result = case.run()
    if case.shape[0]:
        check_counts(counts, tensors, *(("residual",) if case.in_place else ()))
    if case.out is not None:
        returns_none = case.operation == DSV3_OP and case.order not in (SGLANG, SGLANG[:1])
        assert result is (None if returns_none else case.out.tensor)
        check_guards(case.out, around)
        result = case.out.tensor
    assert_any_product(
        result, tensors["x"], tensors["weight"], added, case.options.get("out_dtype")
    )
    for tensor, before in zip(read, saved, strict=True):
        oracle.assert_same_bits(bytes_of(tensor), before, "an input")


@each_device
@pytest.mark.parametrize(("operation", "dtype", "config"), PRODUCTS)
@given(data=st.data())
def test_any_product(
    device: str, operation: str, dtype: torch.dtype, config: str, data: st.DataObject
) -> None:
    chosen = FUSED_A_CONFIGS[config]
    case = data.draw(gemm_cases(operation, dtype, chosen, device=device)).on(device)
    CASES["right", device] += 1
    run_gemm(case, device)


@each_device
@given(data=st.data())
def test_any_linear_layer(device: str, data: st.DataObject) -> None:
    """Either both give the bits of a kernel of ours, or there is a reason and the framework's."""
    case = data.draw(gemm_cases("low_latency_linear", BF16, device=device)).on(device)
    CASES["right", device] += 1
    x, weight, residual = (case.tensors.get(name) for name in ("x", "weight", "residual"))
    settle(case, device)
    kind = case.options.get("out_dtype")
    explained = k3cupy.explain_low_latency_gemm(
        x, weight, residual, batch_invariant=case.options["batch_invariant"], out_dtype=kind
    )
    tried, out = k3cupy.try_low_latency_gemm(**case.arguments()), case.run()
    assert explained.is_fallback == (tried is None)
    if tried is not None:
        same_bits(tried, out)
        assert_any_product(out, x, weight, residual, kind)
        return
    assert explained.reason
    if kind is not None:
        assert_any_product(out, x, weight, residual, kind)
    elif residual is None:
        same_bits(out, torch.nn.functional.linear(x, weight))
    else:
        same_bits(out, torch.addmm(residual, x, weight.T))


@each_device
@given(data=st.data())
def test_any_enabled_layer(device: str, data: st.DataObject) -> None:
    """The product of a layer, with more axes too; and the framework's, when it is disabled."""
    case = data.draw(gemm_cases("low_latency_linear", BF16, device=device)).on(device)
    CASES["right", device] += 1
    x, weight = case.tensors["x"], case.tensors["weight"]
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    report = k3cupy.enable_low_latency_gemm(layer, tokens=1, warmup=False, batch_invariant=False)
    choice, of_torch = (
        k3cupy.explain_low_latency_gemm(x, weight),
        torch.nn.functional.linear(x, weight),
    )
    if device == "cuda":
        torch.cuda.synchronize()
    out = layer(x[None] if data.draw(st.booleans()) else x).view(case.shape)
    if report.installed and not choice.is_fallback:
        same_bits(out, k3cupy.low_latency_linear(x, weight, batch_invariant=False))
        assert_any_product(out, x, weight)
    else:
        same_bits(out, of_torch)
    k3cupy.disable_low_latency_gemm(layer)
    same_bits(layer(x), of_torch)


# --- Spoiled calls -------------------------------------------------------------------------------


def memory_of(values: list[Any]) -> list[torch.Tensor]:
    """Copies of all the memory behind arguments."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type in ("cpu", "cuda"):
            found.append(bytes_of(value))
        elif isinstance(value, np.ndarray):
            found.append(torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()))
    return found


def assert_refused(run: Callable[[Args], Any], args: Args, spoil: Spoil) -> None:
    """An error of the agreed form that blames the argument, and not one byte has changed."""
    changed = {**args, **spoil.replaced(args)}
    everything = [*args.values(), *changed.values()]
    before, counts = memory_of(everything), counts_of(changed)
    with pytest.raises(spoil.error) as caught:
        run(changed)
    text, names = str(caught.value), "|".join(map(re.escape, spoil.blamed))
    assert re.match(rf"({names}): expected .*, got ", text, re.DOTALL), f"{spoil}: {text!r}"
    for now, then in zip(memory_of(everything), before, strict=True):
        oracle.assert_same_bits(now, then, f"memory after a refused call: {spoil}")
    assert counts_of(changed) == counts, "a refused call counts no write"


def drawn(data: st.DataObject, every: tuple[Spoil, ...], args: Args, device: str) -> Spoil:
    fitting = [spoil for spoil in every if spoil.fits(args, device)]
    spoil = fitting[data.draw(st.integers(0, len(fitting) - 1))]
    note(str(spoil))
    return spoil


@each_device
@each_form
@each_dtype
@given(data=st.data())
def test_any_spoiled_epilogue(
    device: str, form: Form, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(mla_cases(form, dtype, to_be_spoiled=True)).on(device)
    refuse_mla(case, spoils.of_mla(form.name), device, data)


@each_device
@pytest.mark.parametrize("kind", OPERATIONS)
@given(data=st.data())
def test_any_spoiled_operation_around_the_epilogue(
    device: str, kind: str, data: st.DataObject
) -> None:
    case = data.draw(layer_cases(kind, device, to_be_spoiled=True)).on(device)
    refuse_mla(case, spoils.of_layer(case.form.name), device, data)


def refuse_mla(case: MlaCase, every: tuple[Spoil, ...], device: str, data: st.DataObject) -> None:
    """Also behind a plan that a good call left."""
    CASES["refused", device] += 1
    if data.draw(st.booleans()):
        run_mla(case, device)
    names, boxes = spoils.outs_of(case.form), poisoned_outs(case.call, shift=case.out_shift or 0)
    args = {
        **case.call.args,
        **case.options,
        **{n: b.tensor for n, b in zip(names, boxes, strict=True)},
    }

    def run(changed: Args) -> Any:
        rest = {name: value for name, value in changed.items() if name not in names}
        return case.call.operation(**rest, out=as_out([changed[name] for name in names]))

    assert_refused(run, args, drawn(data, every, args, device))
    run(args)
    case.call.check_outputs(as_out([box.tensor for box in boxes]))


@each_device
@pytest.mark.parametrize("operation", [FUSED_A_OP, DSV3_OP, SKINNY_OP, *LINEAR_OPS])
@given(data=st.data())
def test_any_spoiled_product(device: str, operation: str, data: st.DataObject) -> None:
    """Also behind a plan that a good call left."""
    dtype = data.draw(st.sampled_from((BF16, FP16))) if operation == SKINNY_OP else BF16
    case = data.draw(gemm_cases(operation, dtype, device=device, to_be_spoiled=True)).on(device)
    CASES["refused", device] += 1
    args = case.arguments()
    if device == "cpu" and data.draw(st.booleans()):
        case.run()
    spoil = drawn(data, spoils.of_gemm(operation), args, device)
    assert_refused(lambda changed: getattr(k3cupy, operation)(**changed), args, spoil)


# --- The judges ----------------------------------------------------------------------------------


def test_every_argument_is_spoiled_in_many_ways() -> None:
    for form in FORMS.values():
        names = {spoil.name for spoil in spoils.of_mla(form.name)}
        assert names >= {*form.tensors, *spoils.outs_of(form), "pdl", "config"}
        assert len(spoils.of_mla(form.name)) > 60
    for layer_form in LAYER_FORMS.values():
        names = {spoil.name for spoil in spoils.of_layer(layer_form.name)}
        assert names >= {*layer_form.tensors, *spoils.outs_of(layer_form), "pdl", "config"}
    names = {spoil.name for spoil in spoils.of_gemm(FUSED_A_OP)}
    assert names >= {"x", "weight", "residual", "out", "pdl", "weight_is_static", "config"}
    assert {spoil.name for spoil in spoils.of_gemm(DSV3_OP)} == {
        *("mat_a", "mat_b", "output", "enable_pdl")
    }


def test_the_judge_of_products() -> None:
    """It sees what is not finite, flushed or off by a unit; what overflows on the way is free."""
    x, weight = torch.ones(1, 16).to(BF16), torch.ones(3, 16).to(BF16)
    right = torch.full((1, 3), 16.0).to(BF16)
    assert_any_product(right, x, weight)
    for wrong in (16.125, 15.9375, 0.0, float("nan"), float("inf")):
        out = right.clone()
        out[0, 1] = wrong
        with pytest.raises(AssertionError, match=r"element \(0, 1\): expected 16"):
            assert_any_product(out, x, weight)
    tiny = torch.full((1, 3), 2.0**-133).to(BF16)
    with pytest.raises(AssertionError, match="got 0"):
        assert_any_product(torch.zeros(1, 3).to(BF16), x * 0, weight, tiny)
    weight[0, 3], weight[1, 3], weight[2, 3] = float("inf"), float("nan"), float("-inf")
    want = torch.tensor([[float("inf"), float("nan"), float("-inf")]]).to(BF16)
    assert_any_product(want, x, weight)
    x[0, 3] = 0
    assert_any_product(want.fill_(float("nan")), x, weight)
    with pytest.raises(AssertionError, match="expected NaN"):
        assert_any_product(right, x, weight)
    x, weight = torch.full((1, 16), 1e30).to(BF16), torch.full((1, 16), 1e30).to(BF16)
    weight[0, ::2] *= -1
    assert_any_product(torch.full((1, 1), float("nan")).to(BF16), x, weight)


def test_the_judge_of_refusals() -> None:
    """It asks for the name, the form, an error, memory as it was, and no write that is counted."""
    args = {"x": torch.zeros(3), "y": torch.zeros(3)}
    spoil = spoils.put("x", 5, error=TypeError)

    def refuse(changed: Args, text: str = "x: expected a tensor, got int") -> None:
        raise TypeError(text)

    def write(changed: Args) -> None:
        changed["y"].data[1] = 1  # what is written so is not counted
        refuse(changed)

    def count(changed: Args) -> None:
        changed["y"].add_(0)
        refuse(changed)

    assert_refused(refuse, args, spoil)
    for run, told in (
        (lambda changed: refuse(changed, "y: expected a tensor, got int"), "is 5"),
        (lambda changed: refuse(changed, "x is wrong"), "is 5"),
        (lambda changed: None, "DID NOT RAISE"),
        (write, "memory after a refused call"),
        (count, "counts no write"),
    ):
        with pytest.raises((AssertionError, pytest.fail.Exception), match=told):
            assert_refused(run, args, spoil)
        args["y"].zero_()
