"""The norms and the value up-projection: every refusal names the argument and writes nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import numpy_of, wrapped
from fake_device import T4, TOO_OLD
from helpers import BF16, E4M3, FP16, every_other, exactly, moved, padded
from mla_helpers import as_list, as_out, poisoned_outs, refused, run_and_check
from mla_layer_helpers import LAYER_FORMS, NORM, LayerCall, LayerForm
from refusal_helpers import (
    OVERLAP,
    Refusal,
    by_argument,
    check_outs_overlap,
    check_refused,
    its_dtype,
    its_shape,
    its_strides,
    its_type,
    its_value,
    of_epsilon,
    of_no_tensors,
    put,
)

import k3cupy

TOKENS, HEADS = 8, 3
FORMS = [LAYER_FORMS[name] for name in ("norm", "value", "value-gate", "value-packed")]
each_form = pytest.mark.parametrize("form", FORMS, ids=str)


def base(form: LayerForm, device: str = "cpu", dtype: torch.dtype = BF16) -> LayerCall:
    return form.make(TOKENS, HEADS, device=device, seed=2, dtype=dtype)


def of_inputs(form: LayerForm) -> Iterator[Refusal]:
    first, outs = form.inputs[0], r"out(\[0\])?"
    # When the first input changes, one that then disagrees with it is blamed, as it is.
    anyone = "|".join((*form.inputs[1:], outs))
    for name in form.inputs:
        changed = name == first
        dtype = exactly("bfloat16") if changed else its_dtype
        yield Refusal(
            "case23 float16", name, lambda t: t.to(FP16), dtype, anyone if changed else ""
        )
        for kind in (torch.float32, torch.float64, torch.int16, E4M3, torch.uint8):
            yield Refusal(f"case23 {kind}", name, lambda t, d=kind: t.to(d), its_dtype)
        yield Refusal("flat", name, lambda t: t.flatten() if t.ndim > 1 else t[None], its_shape)
        yield Refusal("deep", name, lambda t: t[None, None], its_shape)
        if name == "w_uv":
            continue
        columns = form.kind == NORM and changed
        narrow = exactly("2111") if columns else its_shape
        yield Refusal("narrow", name, lambda t: t[..., :-1], narrow)
        yield Refusal("inner stride", name, every_other, exactly("inner stride 2"))
        if not columns:
            yield Refusal("wide", name, lambda t: padded(t, 8), its_shape)
    yield Refusal("short", first, lambda t: t[:-1], r"shape \[", anyone)
    if form.kind == NORM:
        return
    yield Refusal("short", "w_uv", lambda t: t[:-1], its_shape)
    yield Refusal("fewer heads", "latent", lambda t: t[:, :2], r"shape \[", anyone)
    yield Refusal("no heads", "latent", lambda t: t[:, :0], its_shape)
    yield Refusal("axes exchanged", "w_uv", lambda t: t.transpose(1, 2), its_shape)
    far = lambda t: torch.zeros(*t.shape, 2, dtype=t.dtype)[..., 0]  # noqa: E731
    yield Refusal("no axis of stride 1", "w_uv", far, its_strides)


def of_outputs(form: LayerForm) -> Iterator[Refusal]:
    call = base(form)
    for index, output in enumerate(form.outputs):
        name = "out" if len(form.outputs) == 1 else rf"out\[{index}\]"
        rows, width = shape = call.output_shape(output)
        wide = torch.zeros(rows, width + 8, dtype=BF16)
        for bad, got in (
            *((torch.zeros(shape).to(d), its_dtype) for d in (torch.float32, FP16, E4M3)),
            *(
                (torch.zeros(size, dtype=BF16), its_shape)
                for size in ((rows + 1, width), (rows, width - 1), (1, *shape), (rows * width,))
            ),
            (wide[:, :width], its_strides),
            (wide[:1, :width].expand(shape), its_strides),
            (torch.zeros(width, rows, dtype=BF16).t(), exactly(f"inner stride {rows}")),
            ([1.0], its_type),
        ):

            def change(outs: Any, i: int = index, bad: Any = bad) -> Any:
                every = as_list(outs)
                return as_out([*every[:i], moved(bad, every[i].device.type), *every[i + 1 :]])

            told = got if isinstance(got, str) else got(bad)
            yield Refusal(f"{name} {told}", "out", change, told, name)
    if len(form.outputs) > 1:
        yield Refusal("one tensor", "out", lambda outs: outs[0], exactly("Tensor"))
        yield Refusal("too few", "out", lambda outs: outs[:1], exactly("1 of them"))
        yield Refusal("too many", "out", lambda outs: (*outs, outs[0]), exactly("3 of them"))
        none_inside = lambda outs: (None, outs[1])  # noqa: E731
        yield Refusal("None inside", "out", none_inside, exactly("None"), r"out\[0\]")


def of_settings(form: LayerForm) -> Iterator[Refusal]:
    for flag in ("pdl", "weight_is_static"):
        for junk in ([1], "no", 1, 0, *(() if flag == "pdl" else (None,))):
            yield put(repr(junk), flag, junk, its_value)
    invalid: list[Any] = [k3cupy.MlaPrefillConfig(8, 1)]
    if form.kind == NORM:
        invalid += [k3cupy.MlaNormConfig(n) for n in (0, 4, 12, -1)]
        yield from of_epsilon()
    else:
        sizes = ((8, 8, 8), (12, 16, 8), (16, 256, 8), (16, 16, 3), (16.0, 16, 8))
        invalid += [k3cupy.MlaValueConfig(*each) for each in sizes]
    for junk in (5, "fast", (1, 2), *invalid):
        yield put(repr(junk), "config", junk, its_value)


def table_of(form: LayerForm) -> dict[str, list[Refusal]]:
    """Every refusal of a form by the argument that is changed."""
    parts = (of_inputs, of_no_tensors, of_outputs, of_settings)
    return by_argument(itertools.chain.from_iterable(part(form) for part in parts))


TABLE = {form.name: table_of(form) for form in FORMS}


@pytest.mark.parametrize(
    ("form", "name"),
    [pytest.param(form, name, id=f"{form}-{name}") for form in FORMS for name in TABLE[form.name]],
)
def test_refused(device: str, form: LayerForm, name: str) -> None:
    check_refused(base(form, device), TABLE[form.name][name])


def test_the_tables_are_whole() -> None:
    for form in FORMS:
        assert set(TABLE[form.name]) >= {*form.tensors, "out", "pdl", "weight_is_static", "config"}
    assert "eps" in TABLE["norm"]
    assert sum(len(cases) for table in TABLE.values() for cases in table.values()) > 250


def test_epsilons_are_numbers_of_any_kind(device: str) -> None:
    call = base(LAYER_FORMS["norm"], device)
    for eps in (0, 1, 0.0, np.float32(1e-5), np.float64(1e-5), np.int64(2), Fraction(1, 3)):
        want = call.run(eps=float(eps))
        for _ in range(2):
            for got, same in zip(call.run(eps=eps), want, strict=True):
                assert torch.equal(got, same), eps
    with pytest.raises(TypeError, match="eps"):
        k3cupy.fused_q_kv_rmsnorm(*(call.args[name] for name in LAYER_FORMS["norm"].inputs))


@each_form
def test_an_out_that_overlaps_an_argument(device: str, form: LayerForm) -> None:
    call = base(form, device)
    check_outs_overlap(call, form.tensors)
    if len(form.outputs) > 1:
        both = torch.zeros(TOKENS * 2048, dtype=BF16, device=device)
        q, kv = both[: TOKENS * 1536].view(-1, 1536), both[-TOKENS * 512 - 8 : -8].view(-1, 512)
        refused(call, r"out\[\d\]", OVERLAP, out=(q, kv))
        run_and_check(call, out=as_out([box.tensor for box in poisoned_outs(call)]))


@each_form
def test_case25_tensors_that_require_grad(device: str, form: LayerForm) -> None:
    told = exactly("one that requires grad while grad mode is on")
    call = base(form, device)
    for name in form.tensors:
        changed = call.given(**{name: call.args[name].clone().requires_grad_()})
        for mode in (torch.no_grad, torch.inference_mode):
            refused(changed, name, told)
            with mode():
                changed.check({}, changed.run())
        refused(changed, name, told)
    for index, box in enumerate(poisoned_outs(call)):
        outs = [box.tensor for box in poisoned_outs(call)]
        outs[index] = box.tensor.clone().requires_grad_()
        refused(call, r"out(\[\d\])?", told, out=as_out(outs))


@each_form
def test_read_only_arrays_and_strides_that_are_negative(form: LayerForm) -> None:
    call = base(form, dtype=FP16)
    arguments = wrapped(call, numpy_of)
    for name in form.tensors:
        reversed_ = {**arguments, name: arguments[name][::-1]}
        refused(call, name, "^stride -", **reversed_)
        arguments[name].flags.writeable = False
    before = [torch.from_numpy(np.asarray(out)) for out in as_list(call.run(**arguments))]
    call.check({}, as_out(before))
    for index in range(len(form.outputs)):
        outs = [numpy_of(box.tensor) for box in poisoned_outs(call)]
        outs[index].flags.writeable = False
        told = exactly("a read-only tensor")
        refused(call, r"out(\[\d\])?", told, **arguments, out=as_out(outs))


@each_form
def test_more_rows_than_a_launch_can_number(form: LayerForm) -> None:
    """Of one row that stands for all, so that it costs no memory."""
    call = form.make(1, 1)
    if form.kind == NORM:
        many = {"qkv_a": call.first.expand(1 << 31, -1)}
    else:
        many = {"latent": call.first.expand(1 << 20, 1 << 9, -1)}
    rows = math.prod(many[form.inputs[0]].shape[:-1])
    assert "Split" in refused(call, form.inputs[0], exactly(str(rows)), **many)


@pytest.mark.gpu
@each_form
def test_case20_one_argument_on_the_cpu(form: LayerForm) -> None:
    call = base(form, "cuda")
    for name in form.tensors:
        host = call.args[name].cpu()
        blamed = ".*" if len(form.tensors) < 4 else name
        for tensor in (host, host.pin_memory()):
            refused(call, blamed, "^device (cpu|cuda)", **{name: tensor})
    outs = [box.tensor.cpu() for box in poisoned_outs(call)]
    refused(call, ".*", "^device (cpu|cuda)", out=as_out(outs))
    run_and_check(call)


# What would run


@each_form
def test_explain_says_what_runs_and_validates(device: str, form: LayerForm) -> None:
    call = base(form, device)
    told = call.explain()
    assert told.kernel == {NORM: "mla_norm"}.get(form.kind, "mla_value")
    assert told.runs_on == device
    first = form.inputs[0]
    wide = call.first.new_zeros(*call.first.shape[:-1], call.first.shape[-1] + 1)
    odd = call.explain(**{first: wide[..., :-1]})
    if device == "cuda":
        assert odd.name_expression != told.name_expression
        assert f"because {first} is not aligned" in odd.reason
    else:
        assert str(odd) == f"{told.kernel} on the CPU: the tensors are on the CPU"
    with pytest.raises(TypeError, match=f"{form.inputs[1]}: expected bfloat16 like {first}"):
        call.explain(**{form.inputs[1]: call.args[form.inputs[1]].to(FP16)})


@each_form
def test_explain_refuses_a_gpu_that_is_too_old(form: LayerForm) -> None:
    """As the call there would."""
    with pytest.raises(k3cupy.ToolchainError, match=f"^{TOO_OLD}"):
        base(form, "cpu").explain(gpu=T4)


@each_form
def test_case15_no_tokens(device: str, form: LayerForm) -> None:
    call = form.make(0, HEADS, device=device)
    for out in as_list(run_and_check(call)):
        assert out.shape[0] == 0
    outs = [box.tensor for box in poisoned_outs(call)]
    assert as_list(call.run(out=as_out(outs)))[0] is outs[0]
    with pytest.raises((TypeError, ValueError), match=f"{form.inputs[1]}: expected"):
        call.run(**{form.inputs[1]: torch.zeros(3, dtype=BF16, device=device)})
