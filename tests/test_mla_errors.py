"""The MLA epilogues: every refusal. It names the argument, and nothing is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
import torch
from fake_device import CudaTensor, FakeDevice
from helpers import (
    BF16,
    E4M3,
    FP16,
    Guarded,
    every_other,
    exactly,
    moved,
    padded,
    rope_table,
)
from mla_helpers import (
    FORMS,
    INSERTS,
    NAMES,
    Form,
    MlaCall,
    as_out,
    each_form,
    each_form_with_a_cache,
    make_decode,
    make_prefill,
    poisoned_outs,
    refused,
    run_and_check,
    run_into_guarded_outs,
)
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
    name_of,
    of_no_tensors,
    of_scales,
    of_slots_and_positions,
    of_the_cache,
    put,
    with_shared_memory,
)

import k3cupy

TOKENS, HEADS = 8, 3


# The table


def base(form: Form, device: str = "cpu") -> MlaCall:
    """The call that is spoiled: whatever can be a tensor is one."""
    return form.make(
        TOKENS, HEADS, num_blocks=2, rope=True, scale_tensors=True, device=device, seed=2
    )


def of_inputs(form: Form) -> Iterator[Refusal]:
    call = base(form)
    first = form.inputs[0]
    # When the first input changes, one that then disagrees with it is blamed, as it is.
    others = {name: call.args[name] for name in form.inputs[1:]}
    outs = [
        torch.empty(call.output_shape(name), dtype=call.output_dtype(name), device="meta")
        for name in form.outputs
    ]
    all_others = [*others.values(), *outs]
    others_blamed = "|".join((*others, r"out(\[0\])?"))

    def like_the_others(describe: Callable[[torch.Tensor], str]) -> str:
        return "|".join(map(describe, all_others))

    for name in form.inputs:
        is_first = name == first
        yield Refusal(
            "case23 float16",
            name,
            lambda t: t.to(FP16),
            like_the_others(its_dtype) if is_first else its_dtype,
            others_blamed if is_first else name,
        )
        for dtype in (
            torch.float32,
            torch.float64,
            torch.int16,
            E4M3,
            torch.uint8,
            *FLOATS_OF_8_BITS,
        ):
            if (form.kind, name) != ("concat_fp8", "k_pe") or dtype not in (E4M3, torch.uint8):
                yield Refusal(f"case23 {dtype}", name, lambda t, d=dtype: t.to(d), its_dtype)
        yield Refusal("narrow", name, lambda t: t[..., :-1], its_shape)
        yield Refusal("wide", name, lambda t: padded(t, 8), its_shape)
        yield Refusal("flat", name, lambda t: t.flatten(), its_shape)
        yield Refusal("deep", name, lambda t: t[None, None], its_shape)
        changes = {"short": lambda t: t[:-1]}
        if call.args[name].ndim == 3:
            changes["heads"] = lambda t: t[:, :2]
        for label, change in changes.items():
            yield Refusal(
                label,
                name,
                change,
                like_the_others(its_shape) if is_first else its_shape,
                others_blamed if is_first else name,
            )
        yield Refusal("inner stride", name, every_other, exactly("inner stride 2"))
    yield Refusal("no heads", first, lambda t: t[:, :0], its_shape)
    yield Refusal("two heads", "k_pe", lambda t: t[:, None].repeat(1, 2, 1), its_shape)


def of_outputs(form: Form) -> Iterator[Refusal]:
    """One of the outputs does not fit."""
    call = base(form)
    for index, output in enumerate(form.outputs):
        blamed = "out" if len(form.outputs) == 1 else rf"out\[{index}\]"
        shape, dtype = call.output_shape(output), call.output_dtype(output)

        def among(
            label: str, bad: Any, got: Callable[[Any], str], i: int = index, name: str = blamed
        ) -> Refusal:
            def change(outs: Any) -> Any:
                every = list(outs) if isinstance(outs, tuple) else [outs]
                return as_out([*every[:i], moved(bad, every[i].device.type), *every[i + 1 :]])

            return Refusal(f"{name} {label}", "out", change, got(bad), name)

        wrong = (torch.float32, torch.int8, FP16, torch.float8_e5m2)
        for other in (*wrong, *((BF16,) if dtype == E4M3 else (E4M3, torch.uint8))):
            yield among(f"{other}", torch.zeros(shape).to(other), its_dtype)
        for axis, delta in ((0, 1), (0, -1), (1, -1), (2, -1), (2, 8)):
            size = list(shape)
            size[axis] += delta
            yield among(f"{size}", torch.zeros(size).to(dtype), its_shape)
        for size in ((TOKENS * HEADS, shape[2]), (1, *shape)):
            yield among(f"{size}", torch.zeros(size).to(dtype), its_shape)
        wide = torch.zeros(*shape[:2], shape[2] + 8).to(dtype)
        yield among("strided", wide[..., : shape[2]], its_strides)
        yield among("expanded", torch.zeros(1, *shape[1:]).to(dtype).expand(shape), its_strides)
        turned = torch.zeros(HEADS, TOKENS, shape[2]).to(dtype).transpose(0, 1)
        yield among("transposed", turned, its_strides)
        yield among("a list", [1.0], its_type)
    if len(form.outputs) > 1:
        count = len(form.outputs)
        yield Refusal("one tensor", "out", lambda outs: outs[0], exactly("Tensor"))
        yield Refusal("too few", "out", lambda outs: outs[:-1], exactly(f"{count - 1} of them"))
        yield Refusal(
            "too many", "out", lambda outs: (*outs, outs[0]), exactly(f"{count + 1} of them")
        )
        none_inside = lambda outs: (None, *outs[1:])  # noqa: E731
        yield Refusal("None inside", "out", none_inside, exactly("None"), r"out\[0\]")


def of_settings(form: Form) -> Iterator[Refusal]:
    flags = ("pdl", "ds_mla", "kv_inputs_ready") if form.kind == "decode" else ("pdl",)
    for flag in flags:
        for junk in ([1], "no", 1, 0, *(() if flag == "pdl" else (None,))):
            yield put(repr(junk), flag, junk, its_value)
    invalid: list[Any]
    if form.kind == "decode":
        fields = [(0, 100, 1), (0, 144, 3), (1, 128, 1), (2, 256, 1), (3, 100, 1), (3, 4096, 1)]
        fields += [(0, 288.0, 1), (False, 288, 1), (0, 288, True)]
        invalid = [k3cupy.MlaDecodeConfig(*numbers) for numbers in fields]
        invalid.append(k3cupy.MlaPrefillConfig(8, 1))
    else:
        invalid = [k3cupy.MlaPrefillConfig(*pair) for pair in ((4, 1), (8, 5), (0, 0), (8.0, 1))]
        invalid.append(k3cupy.MlaDecodeConfig(0, 288, 1))
    for junk in (5, 2, -1, "3", "fast", 1.0, (1, 2), *invalid):
        yield put(repr(junk), "config", junk, its_value)


def table_of(form: Form) -> dict[str, list[Refusal]]:
    """Every refusal of a form by the argument that is changed."""
    parts = [of_inputs, of_no_tensors, of_outputs, of_scales, of_settings]
    parts += [of_the_cache, of_slots_and_positions] if form.has_cache else []
    return by_argument(itertools.chain.from_iterable(part(form) for part in parts))


TABLE = {form.name: table_of(form) for form in FORMS.values()}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, id=f"{form}-{name}")
        for form in FORMS.values()
        for name in TABLE[form.name]
    ],
)
def test_refused(device: str, form: Form, name: str) -> None:
    check_refused(base(form, device), TABLE[form.name][name])


def test_the_tables_are_whole() -> None:
    """Each argument of each form is there, with hundreds of cases in all."""
    for form in FORMS.values():
        assert set(TABLE[form.name]) >= {*form.tensors, "out", "pdl"}
    assert sum(len(cases) for table in TABLE.values() for cases in table.values()) > 1500


def test_the_judge_looks_only_at_what_was_got() -> None:
    """What is expected, and advice, do not count; nor does a value that contains another."""
    call = base(FORMS["decode"])
    wrong = {"kv_c_normed": call.args["kv_c_normed"][:7]}
    refused(call, "kv_c_normed", exactly("shape [7, 512]"), **wrong)
    for found in (r"\[8, 512\]", "like ql_nope", exactly("shape [7, 51]"), exactly("[7, 512]")):
        with pytest.raises(AssertionError, match="missing behind 'got'"):
            refused(call, "kv_c_normed", found, **wrong)
    with pytest.raises(AssertionError, match="does not start as agreed"):
        refused(call, "k_pe", r"\[7, 512\]", **wrong)
    with pytest.raises(AssertionError, match="missing behind 'got'"):
        refused(call, "q_pe", "contiguous", q_pe=every_other(call.args["q_pe"]))
    with pytest.raises(pytest.fail.Exception):
        refused(call, "q_pe", "", q_pe=call.args["q_pe"])


# What fits another operation, or another setting

WRONG_CACHES = [
    ("insert", E4M3, 576, "fp8"),
    ("insert", torch.uint8, 576, "fp8"),
    ("insert", torch.uint8, 656, "ds_mla"),
    ("ds_mla", BF16, 576, "insert"),
    ("ds_mla", E4M3, 576, "fp8"),
    ("fp8", BF16, 576, "insert"),
    ("fp8", torch.uint8, 656, "ds_mla"),
]


def test_a_cache_of_another_operation_is_told_apart(device: str) -> None:
    for kind, dtype, width, fitting in WRONG_CACHES:
        cache = torch.zeros(2, 16, width).to(dtype).to(device)
        told = exactly(f"{name_of(dtype)} rows of {width}")
        text = refused(base(FORMS[kind], device), "kv_cache", told, kv_cache=cache)
        assert NAMES[fitting] in text


def test_a_decode_cache_of_656_bytes_asks_for_the_flag(device: str) -> None:
    call = base(FORMS["decode-ds_mla"], device)
    text = refused(call, "kv_cache", exactly("rows of 656"), ds_mla=False)
    assert "ds_mla=True" in text


def test_explain_names_an_unknown_operation() -> None:
    for junk in ("fused_mla_concat", 3, None, [], k3cupy.fused_q_kv_rmsnorm):
        with pytest.raises((TypeError, ValueError), match=r"op: expected .*, got "):
            k3cupy.explain_mla_prefill(junk)


# Overlap


@each_form
def test_an_out_that_overlaps_an_argument(device: str, form: Form) -> None:
    check_outs_overlap(base(form, device), form.tensors)


@pytest.mark.parametrize("kind", ["fp8", "concat_fp8"])
def test_outs_that_overlap_one_another(device: str, kind: str) -> None:
    call = base(FORMS[kind], device)
    outs = [box.tensor for box in poisoned_outs(call)]
    buffer = torch.zeros(TOKENS * HEADS * 192 + 16, dtype=torch.uint8, device=device)
    for other in range(1, len(outs)):
        again = list(outs)
        again[0] = buffer[: outs[0].numel()].view(E4M3).view(outs[0].shape)
        again[other] = buffer[16 : 16 + outs[other].numel()].view(E4M3).view(outs[other].shape)
        refused(call, r"out\[\d\]", OVERLAP, out=tuple(again))


@each_form_with_a_cache
def test_what_is_written_in_place_overlaps_an_argument(device: str, form: Form) -> None:
    call = base(form, device)
    for written in form.written(rope=True):
        for name in form.tensors:
            if name == written or name in form.scales:
                continue
            target, inside = with_shared_memory(call, call.args[written], name)
            target.view(torch.uint8).copy_(call.args[written].view(torch.uint8))
            changed = call.given(**{written: target, name: inside})
            kept = target.view(torch.uint8).clone()
            text = refused(changed, f"{written}|{name}", OVERLAP)
            assert written in text
            assert name in text
            assert torch.equal(target.view(torch.uint8), kept)


def test_a_query_that_is_only_read_may_overlap(device: str) -> None:
    """Without positions, and in the fp8 operation, q is an input like any other."""
    for kind in INSERTS:
        call = make_prefill(kind, TOKENS, 1, rope=kind == "fp8", device=device)
        q = call.args["q"]
        run_and_check(call.given(q=q.clone(), k_nope=q[..., 64:], k_pe=q[:, 0, :64]))
        run_and_check(call.given(q=q, k_nope=q[..., 64:], k_pe=q[:, 0, :64]))


def test_neighbours_in_one_buffer_do_not_overlap(device: str) -> None:
    """q and k side by side in the heads of one buffer; k_nope in q's own gaps."""
    call = base(FORMS["insert"], device)
    box = Guarded((TOKENS, HEADS, 192 + 128), BF16, device)
    q, k_nope = box.tensor[..., :192], box.tensor[..., 192:]
    k_nope.copy_(call.args["k_nope"])
    q.copy_(call.args["q"])
    part = Guarded(q.shape, BF16, device)
    part.tensor, part.storage = q, box.storage
    part.strides, part.offset = q.stride(), q.storage_offset()
    run_into_guarded_outs(call.given(k_nope=k_nope).boxed(q=part))


def test_neighbours_of_an_output_do_not_overlap(device: str) -> None:
    """An input that ends where the output begins, and one that begins where it ends."""
    call = make_decode(TOKENS, 1, device=device)
    count = TOKENS * 512
    buffer = torch.zeros(count + TOKENS * 576 + count, dtype=BF16, device=device)
    before, out, after = buffer.split((count, TOKENS * 576, count))
    ql_nope, kv_c = before.view(TOKENS, 1, 512), after.view(TOKENS, 512)
    ql_nope.copy_(call.args["ql_nope"])
    kv_c.copy_(call.args["kv_c_normed"])
    call = call.given(ql_nope=ql_nope, kv_c_normed=kv_c)
    run_and_check(call, out=out.view(TOKENS, 1, 576))


# Gradients

FOLLOWED = exactly("one that requires grad while grad mode is on")


@each_form
def test_case25_tensors_that_require_grad(device: str, form: Form) -> None:
    for name in (*form.tensors, "out"):
        call = base(form, device)
        outs = [box.tensor for box in poisoned_outs(call)]
        tensors = outs if name == "out" else [call.args[name]]
        for index, tensor in enumerate(tensors):
            if not tensor.dtype.is_floating_point:
                continue
            followed = tensor.clone().requires_grad_()
            given: Any = followed
            if name == "out":
                given = as_out([*outs[:index], followed, *outs[index + 1 :]])
            changed = call if name == "out" else call.given(**{name: followed})
            extra = {"out": given} if name == "out" else {}
            blamed = rf"out(\[{index}\])?" if name == "out" else name
            text = refused(changed, blamed, FOLLOWED, **extra)
            assert "no_grad" in text or "detach" in text
            before = changed.snapshot()
            with torch.no_grad():
                result = changed.run(**extra)
            changed.check(before, detached(result))
            refused(changed, blamed, FOLLOWED, **extra)
            before = changed.snapshot()
            with torch.inference_mode():
                result = detached(changed.run(**extra))
                changed.check(before, result)


def detached(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(tensor.detach() for tensor in result)
    return result.detach()


# Values on the device


@each_form_with_a_cache
def test_k3cupy_check_names_bad_values(
    device: str, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3CUPY_CHECK", "1")
    call = form.make(6, 2, rope=True, num_blocks=2, device=device)
    run_and_check(call)
    for slot in (32, 2**31, 2**62):
        slots = torch.tensor([0, -1, slot, 3, -(2**63), 5], device=device)
        refused(call, "slot_mapping", exactly(f"{slot} for token 2"), slot_mapping=slots)
    for position in (128, -1, 2**31):
        positions = torch.tensor([0, 127, 5, position, 6, 7], device=device)
        refused(call, "positions", exactly(f"{position} for token 3"), positions=positions)
    good = torch.tensor([31, -1, -2, -(2**63), 0, 9, 99], device=device)
    run_and_check(call.given(slot_mapping=good))
    monkeypatch.setenv("K3CUPY_CHECK", "0")
    wild = torch.tensor([31, 32, -2, 2**62, 0, 9], device=device)
    run_and_check(call.given(slot_mapping=wild))


def test_k3cupy_check_in_a_capture_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have to read values back. The kernel is loaded, so nothing else is in the way."""
    device, given = FakeDevice(monkeypatch), base(FORMS["decode"]).args
    tensors = {name: CudaTensor.of(t, 0) for name, t in given.items()}
    call = MlaCall("decode", tensors)
    call.run()
    monkeypatch.setenv("K3CUPY_CHECK", "1")
    device.capturing = True
    for _ in range(2):
        with pytest.raises(k3cupy.CaptureError, match="Unset it for the capture"):
            call.run()
    assert len(device.records) == 1
    monkeypatch.delenv("K3CUPY_CHECK")
    call.run()
    assert len(device.records) == 2


@each_form
def test_more_rows_than_a_launch_can_number(form: Form) -> None:
    """Of one row that stands for all, so that it costs no memory."""
    call = form.make(1, 1)
    tokens, heads = 1 << 20, 1 << 10
    many = {
        name: call.args[name].expand(tokens, *(heads,) * (call.args[name].ndim - 2), -1)
        for name in form.inputs
    }
    if form.has_cache:
        many["slot_mapping"] = call.args["slot_mapping"].expand(tokens)
    rows = tokens * (heads + (form.kind == "decode"))
    text = refused(call, form.inputs[0], exactly(str(rows)), **many)
    assert "Split" in text


def test_integer_types_of_slots_and_positions_are_independent(device: str) -> None:
    for name in ("decode", "insert"):
        for slots, positions in ((torch.int64, torch.int32), (torch.int32, torch.int64)):
            call = FORMS[name].make(TOKENS, HEADS, rope=True, slot_dtype=slots, device=device)
            table = rope_table(128).to(device)
            positions_there = call.args["positions"].to(positions)
            run_and_check(call.given(positions=positions_there, cos_sin_cache=table))


# Devices


@pytest.mark.gpu
@each_form
def test_case20_one_argument_on_the_cpu(form: Form) -> None:
    call = base(form, "cuda")
    for name in form.tensors:
        host = call.args[name].cpu()
        blamed = ".*" if len(form.tensors) < 4 or name == form.inputs[0] else name
        for tensor in (host, host.pin_memory()):
            refused(call, blamed, "^device (cpu|cuda)", **{name: tensor})
    for i, box in enumerate(poisoned_outs(call)):
        outs = [other.tensor for other in poisoned_outs(call)]
        for tensor in (box.tensor.cpu(), box.tensor.cpu().pin_memory()):
            outs[i] = tensor
            refused(call, r"out.*|k_.*|q", "^device (cpu|cuda)", out=as_out(outs))
    run_and_check(call)


@pytest.mark.parametrize("junk", [True, "2", [1.0], Decimal(2)], ids=repr)
def test_a_wrong_scale_is_told_that_numbers_are_taken(junk: Any) -> None:
    told = f"expected a number or a tensor with one fp32 element, got {type(junk).__name__}"
    for kind in ("decode-fp8", "fp8"):
        call = base(FORMS[kind])
        for name in FORMS[kind].scales:
            with pytest.raises(TypeError, match=rf"\A{name}: {told}\Z"):
                call.operation(**{**call.args, name: junk})


@pytest.mark.gpu
def test_case20_cuda_arguments_among_cpu_tensors() -> None:
    call = base(FORMS["decode-fp8"])
    for name in ("q_pe", "kv_cache", "slot_mapping", "cos_sin_cache", "q_scale_inv"):
        refused(call, name, "^device cuda", **{name: call.args[name].cuda()})


@pytest.mark.gpu
@each_form
def test_a_stream_that_is_none_is_named(form: Form) -> None:
    call = form.make(TOKENS, HEADS, device="cuda")
    for junk in ("side", 1.5, object()):
        refused(call, "stream", rf"\b{type(junk).__name__}\b", stream=junk)
