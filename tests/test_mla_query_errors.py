"""The MLA query front: every refusal names the argument and writes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from array_helpers import numpy_of, wrapped
from fake_device import CudaTensor, FakeDevice
from helpers import BF16, E4M3, FP16, every_other, exactly, padded
from mla_helpers import as_out, poisoned_outs, refused, run_and_check
from mla_layer_helpers import QUERY, QUERY_FORMS, LayerCall, LayerForm, make_query
from refusal_helpers import (
    FLOATS_OF_8_BITS,
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
    of_scales,
    of_slots_and_positions,
    of_the_cache,
    put,
    with_shared_memory,
)

import k3cupy

TOKENS, HEADS = 8, 3
each_form = pytest.mark.parametrize("form", QUERY_FORMS, ids=str)
FORMS = {form.name: form for form in QUERY_FORMS}


def base(form: LayerForm, device: str = "cpu") -> LayerCall:
    """The call that is spoiled: whatever can be a tensor is one."""
    options = {"num_blocks": 2, "rope": True, "scale_tensors": True}
    return form.make(TOKENS, HEADS, device=device, seed=2, **options)


def of_inputs(form: LayerForm) -> Iterator[Refusal]:
    first, *others = form.inputs
    # When the first input changes, one that then disagrees with it is blamed, as it is.
    anyone = "|".join((*others, "kv_cache", "slot_mapping", "positions", "out"))
    for name in form.inputs:
        is_first = name == first
        told = exactly("bfloat16") if is_first else its_dtype
        half = Refusal("case23 float16", name, lambda t: t.to(FP16), told, anyone * is_first)
        yield half
        for kind in (torch.float32, torch.float64, torch.int16, E4M3, *FLOATS_OF_8_BITS):
            yield Refusal(f"case23 {kind}", name, lambda t, d=kind: t.to(d), its_dtype)
        yield Refusal(
            "narrow", name, lambda t: t[..., :-1], exactly("2111") if is_first else its_shape
        )
        yield Refusal("flat", name, lambda t: t.flatten() if t.ndim > 1 else t[None], its_shape)
        yield Refusal("deep", name, lambda t: t[None, None], its_shape)
        yield Refusal("inner stride", name, every_other, exactly("inner stride 2"))
        if not is_first:
            yield Refusal("wide", name, lambda t: padded(t, 8), its_shape)
            yield Refusal(
                "short", name, lambda t: t[:-1], "shape", "w_q_b|q_norm_weight|kv_norm_weight"
            )
    yield Refusal("more tokens", first, lambda t: t.repeat(2, 1), "8|shape", anyone)
    yield Refusal("fewer tokens", first, lambda t: t[:-1], "shape", "out")
    yield Refusal("no heads", "w_uk", lambda t: t[:0], its_shape)
    yield Refusal("as in kv_b", "w_uk", lambda t: t.transpose(1, 2), its_shape)
    yield Refusal("a head more", "w_q_b", lambda t: t.repeat(2, 1)[: 4 * 192], its_shape)
    apart = lambda t: padded(t, 8)[:, :1536]  # noqa: E731
    yield Refusal("rows apart", "w_q_b", apart, its_strides)
    yield Refusal(
        "transposed", "w_q_b", lambda t: t.t().contiguous().t(), exactly("inner stride 576")
    )


def of_outputs(form: LayerForm) -> Iterator[Refusal]:
    call = base(form)
    shape, dtype = call.output_shape("mqa_q"), call.output_dtype("mqa_q")
    wrong = (torch.float32, torch.int8, FP16, torch.float8_e5m2)
    for other in (*wrong, *((BF16,) if dtype == E4M3 else (E4M3, torch.uint8))):
        yield Refusal(f"{other}", "out", lambda t, d=other: torch.zeros(shape).to(d), its_dtype)
    for axis, delta in ((0, 1), (0, -1), (1, -1), (2, -1), (2, 8)):
        size = list(shape)
        size[axis] += delta
        yield put(f"{size}", "out", torch.zeros(size).to(dtype), its_shape)
    for size in ((TOKENS * HEADS, shape[2]), (1, *shape)):
        yield put(f"{size}", "out", torch.zeros(size).to(dtype), its_shape)
    wide = torch.zeros(*shape[:2], shape[2] + 8).to(dtype)
    yield put("strided", "out", wide[..., : shape[2]], its_strides)
    turned = torch.zeros(HEADS, TOKENS, shape[2]).to(dtype).transpose(0, 1)
    yield put("transposed", "out", turned, its_strides)
    yield put("a list", "out", [1.0], its_type)


def of_settings(_: LayerForm) -> Iterator[Refusal]:
    for flag in ("pdl", "ds_mla", "weight_is_static"):
        for junk in ([1], "no", 1, 0, *(() if flag == "pdl" else (None,))):
            yield put(repr(junk), flag, junk, its_value)
    yield from of_epsilon()
    fields = ((4, 0, 1), (8, 7, 1), (16, 4, 1), (8, -1, 1), (8, 0, 3), (8.0, 0, 1))
    invalid = [k3cupy.MlaQueryConfig(*numbers) for numbers in fields]
    for junk in (5, "fast", (1, 2), k3cupy.MlaNormConfig(6), *invalid):
        yield put(repr(junk), "config", junk, its_value)


def table_of(form: LayerForm) -> dict[str, list[Refusal]]:
    """Every refusal of a form by the argument that is changed."""
    parts = (of_inputs, of_no_tensors, of_outputs, of_settings)
    shared = (of_the_cache, of_slots_and_positions, of_scales)
    return by_argument(itertools.chain.from_iterable(part(form) for part in (*parts, *shared)))


TABLE = {form.name: table_of(form) for form in QUERY_FORMS}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, id=f"{form}-{name}")
        for form in QUERY_FORMS
        for name in TABLE[form.name]
    ],
)
def test_refused(device: str, form: LayerForm, name: str) -> None:
    check_refused(base(form, device), TABLE[form.name][name])


def test_the_tables_are_whole() -> None:
    """Each argument is there, with hundreds of cases in all."""
    options = ("out", "pdl", "ds_mla", "weight_is_static", "eps", "config")
    for form in QUERY_FORMS:
        assert set(TABLE[form.name]) >= {*form.tensors, *options}
    assert sum(len(cases) for table in TABLE.values() for cases in table.values()) > 700


def test_messages_say_what_to_do() -> None:
    call = base(FORMS["query"])
    text = refused(call, "qkv_a", exactly("2048"), qkv_a=call.first[:, :2048])
    assert "1536 q_a | 512 kv_c | 64 k_pe" in text
    text = refused(call, "w_q_b", exactly("shape [384, 1536]"), w_q_b=call.args["w_q_b"][:384])
    assert "192 rows a head, and w_uk has 3" in text
    eight = torch.zeros(2, 16, 656, dtype=torch.uint8)
    text = refused(call, "kv_cache", exactly("rows of 656"), kv_cache=eight)
    assert "ds_mla=True" in text


@each_form
def test_an_out_or_a_cache_that_overlaps_an_argument(device: str, form: LayerForm) -> None:
    call = base(form, device)
    check_outs_overlap(call, form.tensors)
    for name in form.tensors:
        if name == "kv_cache" or name in form.scales:
            continue
        target, inside = with_shared_memory(call, call.args["kv_cache"], name)
        kept = target.view(torch.uint8).clone()
        text = refused(call.given(kv_cache=target, **{name: inside}), f"kv_cache|{name}", OVERLAP)
        assert name in text
        assert torch.equal(target.view(torch.uint8), kept)
    run_and_check(call, out=as_out([box.tensor for box in poisoned_outs(call)]))


def test_case25_tensors_that_require_grad(device: str) -> None:
    told = exactly("one that requires grad while grad mode is on")
    call = base(FORMS["query"], device)
    for name in (*FORMS["query"].inputs, "kv_cache", "cos_sin_cache"):
        changed = call.given(**{name: call.args[name].detach().clone().requires_grad_()})
        refused(changed, name, told)
        with torch.no_grad():
            changed.check({}, changed.run())
        refused(changed, name, told)


def test_read_only_arrays_and_strides_that_are_negative() -> None:
    """What is only read may be read-only."""
    call = FORMS["query"].make(TOKENS, HEADS, dtype=FP16)
    arguments = wrapped(call, numpy_of)
    for name in (*FORMS["query"].inputs, "slot_mapping"):
        reversed_ = {**arguments, name: arguments[name][::-1]}
        refused(call, name, "^stride -", **reversed_)
        arguments[name].flags.writeable = False
    call.check({}, torch.from_numpy(np.asarray(call.run(**arguments))))
    arguments["kv_cache"].flags.writeable = False
    refused(call, "kv_cache", exactly("a read-only tensor"), **arguments)


def test_more_rows_than_a_launch_can_number() -> None:
    """Of one row that stands for all, so that it costs no memory."""
    call = make_query(1, 1)
    tokens = 1 << 29
    many = {"qkv_a": call.first.expand(tokens, -1)}
    many["slot_mapping"] = call.args["slot_mapping"].expand(tokens)
    assert "Split" in refused(call, "qkv_a", exactly(str(2 * tokens)), **many)


def test_case15_no_tokens(device: str) -> None:
    """Engines make such a call before they have a cache; all else is looked at."""
    call = make_query(0, HEADS, device=device)
    assert run_and_check(call).shape == (0, HEADS, 576)
    assert call.run(kv_cache=torch.zeros(0, device=device)).shape == (0, HEADS, 576)
    told = "shape \\[3\\]"
    with pytest.raises(ValueError, match=f"w_uk: expected .*got {told}"):
        call.run(w_uk=torch.zeros(3, dtype=BF16, device=device))


def test_epsilons_are_numbers_of_any_kind(device: str) -> None:
    call = base(FORMS["query"], device)
    for eps in (0, 1, np.float32(1e-5), np.float64(1e-5), np.int64(2), Fraction(1, 3)):
        want = call.run(eps=float(eps))
        for _ in range(2):
            assert torch.equal(call.run(eps=eps), want), eps
    with pytest.raises(TypeError, match="eps"):
        call.operation(**{name: value for name, value in call.args.items() if name != "eps"})


def test_k3cupy_check_names_bad_values(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one launch, and of separate kernels, of which none has run then."""
    for tokens in (6, 20):
        monkeypatch.setenv("K3CUPY_CHECK", "1")
        call = make_query(tokens, 2, rope=True, num_blocks=2, device=device)
        run_and_check(call)
        slots, positions = (call.args[name].clone() for name in ("slot_mapping", "positions"))
        slots[2], positions[3] = 32, 128
        refused(call, "slot_mapping", exactly("32 for token 2"), slot_mapping=slots)
        refused(call, "positions", exactly("128 for token 3"), positions=positions)
        monkeypatch.setenv("K3CUPY_CHECK", "0")
        run_and_check(call.given(slot_mapping=slots))


@pytest.mark.parametrize("tokens", [4, 20])
def test_k3cupy_check_in_a_capture_says_what_to_do(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have to read values back. The kernels are loaded, so nothing else is in the way."""
    device, given = FakeDevice(monkeypatch), make_query(tokens, 12).args
    tensors = {n: CudaTensor.of(t, 0) for n, t in given.items() if isinstance(t, torch.Tensor)}
    call = LayerCall(QUERY, {**given, **tensors})
    call.run()
    count = len(device.records)
    assert count == (1 if tokens == 4 else 4)
    monkeypatch.setenv("K3CUPY_CHECK", "1")
    device.capturing = True
    for _ in range(2):
        with pytest.raises(k3cupy.CaptureError, match="Unset it for the capture"):
            call.run()
    assert len(device.records) == count
    monkeypatch.delenv("K3CUPY_CHECK")
    call.run()
    assert len(device.records) == 2 * count


@pytest.mark.gpu
def test_case20_one_argument_on_the_cpu() -> None:
    call = base(FORMS["query-fp8"], "cuda")
    for name in FORMS["query-fp8"].tensors:
        host = call.args[name].cpu()
        for tensor in (host, host.pin_memory()):
            refused(call, name, "^device (cpu|cuda)", **{name: tensor})
    (box,) = poisoned_outs(call)
    refused(call, "out", "^device cpu", out=box.tensor.cpu())
    run_and_check(call)
