"""What the operations around an MLA layer's epilogue have in common: any size, the same bits.

Most of it runs on the CPU too, where it shows that the tests themselves are right.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import mla_layer_oracle as layer_oracle
import oracle
import pytest
import torch
from helpers import BF16, FP16, run_child
from memory_helpers import before_unmapped_gpu_memory
from mla_helpers import as_list, as_out, poisoned_outs, run_and_check, run_into_guarded_outs
from mla_layer_helpers import (
    LAYER_FORMS,
    NORM,
    QUERY,
    VALUE,
    LayerCall,
    LayerForm,
    each_layer_form,
    in_one_launch,
    make_query,
    make_value,
)
from stream_helpers import captured

from k3cupy.kernels import mla_norm, mla_query, mla_value

KERNELS = {NORM: mla_norm, QUERY: mla_query, VALUE: mla_value}
TOKENS = (0, 1, 3, 4, 5, 8, 16, 17, 64)
HEADS = (1, 6, 12, 16, 24, 96)
HEADS_ON_THE_CPU = (1, 6)
SWEPT = ("norm", "query", "value-gate", "value-packed")
IN_TIME = ("norm", "query", "query-ds_mla", "value-gate")


def forms(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("form", [LAYER_FORMS[name] for name in names], ids=str)


def bits_of(call: LayerCall, **options: Any) -> list[torch.Tensor]:
    """All that a call writes; what it wrote in place is put back."""
    before = {name: box.storage.clone() for name, box in call.boxes.items()}
    found = [oracle.bits(tensor) for tensor in as_list(call.run(**options))]
    found += [box.snapshot() for box in call.boxes.values()]
    for name, saved in before.items():
        call.boxes[name].storage.copy_(saved)
    return found


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    for a, b in zip(got, want, strict=True):
        oracle.assert_same_bits(a, b, what)


# Sizes

SIZES = [
    pytest.param(device, LAYER_FORMS[name], heads, id=f"{device}-{name}-{heads}", marks=marks)
    for device, some, marks in (("cpu", HEADS_ON_THE_CPU, ()), ("cuda", HEADS, (pytest.mark.gpu,)))
    for name in SWEPT
    for heads in (some if name != "norm" else (1,))
]


@pytest.mark.parametrize(("device", "form", "heads"), SIZES)
def test_any_number_of_tokens_and_heads(device: str, form: LayerForm, heads: int) -> None:
    """Right, the same bits again, and no byte beside the outputs."""
    more = (300, 1000) if device == "cuda" and heads in (1, 12) else ()
    for tokens in (*TOKENS, *more):
        call = form.make(tokens, heads, device=device, seed=tokens)
        result = run_into_guarded_outs(call)
        again = bits_of(call)[: len(call.outputs)]
        assert_same(again, [oracle.bits(t) for t in as_list(result)], f"{tokens} tokens, again")
        if form.kind == QUERY and tokens <= mla_query.MAX_TOKENS:
            run_into_guarded_outs(call, config=in_one_launch(device))


# Configurations and options


@forms("norm", "query", "value", "value-gate", "value-packed-gate")
def test_every_configuration_is_right(device: str, form: LayerForm) -> None:
    """And gives its own bits every time."""
    for tokens in (5, 16):
        call = form.make(tokens, 2, device=device)
        for config in KERNELS[form.kind].CANDIDATES:
            run_into_guarded_outs(call, config=config)
            assert_same(bits_of(call, config=config), bits_of(call, config=config), str(config))
            if device == "cuda":
                assert call.explain(config=config).config == config


@each_layer_form
def test_promises_and_dependent_launches_do_not_change_the_bits(
    device: str, form: LayerForm
) -> None:
    call = form.make(7, 3, device=device)
    want = bits_of(call)
    may = device == "cpu" or torch.cuda.get_device_capability()[0] >= 9
    for pdl in (None, False, True)[: 2 + may]:
        for static in (False, True):
            if device == "cuda":
                torch.cuda.synchronize()
            assert_same(bits_of(call, pdl=pdl, weight_is_static=static), want, f"{pdl}, {static}")


# What is not finite


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@each_layer_form
def test_what_is_not_finite_stays_in_its_token(
    device: str, form: LayerForm, dtype: torch.dtype
) -> None:
    call = form.make(7, 2, dtype=dtype, device=device)
    clean = bits_of(call)
    first = call.first.clone()
    spoiled = ((1, 7, torch.nan), (2, 1600, torch.inf), (4, 2100, -torch.inf), (5, 3, torch.inf))
    for token, column, value in spoiled:
        first[token].view(-1)[column % first[token].numel()] = value
    changed = {call.names_first: first}
    if "gate" in call.args:
        gate = call.args["gate"].clone()
        for column, value in enumerate((torch.nan, torch.inf, -torch.inf, 200.0, -200.0, -88.9)):
            gate[6, 40 * column] = value
        changed["gate"] = gate
    bad = call.given(**changed)
    run_and_check(bad)
    for got, want in zip(bits_of(bad), clean[: len(call.outputs)], strict=False):
        for token in (0, 3):
            oracle.assert_same_bits(got[token], want[token], f"token {token}")


# Time


def other_inputs(call: LayerCall, count: int) -> torch.Tensor:
    """Values for a call's first input, its own first."""
    values = [call.first.clone()]
    for _ in range(count - 1):
        values.append(values[-1].roll(1, 0).neg() * 1.25)
    return torch.stack(values)


@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@forms(*IN_TIME)
def test_case05_many_replays_with_changing_inputs(
    device: str, form: LayerForm, static: bool
) -> None:
    """New inputs and poison in all that is written, then the call, then a look, in one graph."""
    call = form.make(5, 6, device=device)
    bank, boxes = other_inputs(call, 8), poisoned_outs(call)
    outs = [box.tensor for box in boxes]
    written = [box.storage for box in (*boxes, *call.boxes.values())]
    clean = [storage.clone() for storage in written]

    def run(**options: Any) -> None:
        for storage, before in zip(written, clean, strict=True):
            storage.copy_(before)
        call.run(out=as_out(outs), **options)

    wants = []
    for values in bank:
        call.first.copy_(values)
        run(pdl=False)
        wants.append([storage.clone() for storage in written])
    by_output = [torch.stack(found) for found in zip(*wants, strict=True)]
    index = torch.zeros(1, dtype=torch.int64, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def step() -> None:
        index.add_(3).remainder_(len(bank))
        call.first.copy_(bank.index_select(0, index)[0])
        run(weight_is_static=static)
        for storage, want in zip(written, by_output, strict=True):
            wrong.add_((storage != want.index_select(0, index)[0]).sum())

    step()
    replay: Callable[[], Any] = captured(step)[0].replay if device == "cuda" else step
    for _ in range(2000 if device == "cuda" else 9):
        replay()
    assert int(wrong) == 0
    assert len({tuple(found[0].tolist()) for found in wants}) == len(bank), "the inputs are alike"


@pytest.mark.gpu
@forms(*IN_TIME)
def test_two_streams_at_the_same_time(form: LayerForm) -> None:
    calls = [form.make(tokens, 12, device="cuda", seed=tokens) for tokens in (4, 5)]
    wants = [bits_of(call, pdl=False)[: len(call.outputs)] for call in calls]
    side = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    seen: list[list[Any]] = [[], []]
    for _ in range(50):
        for i, call in enumerate(calls):
            with torch.cuda.stream(side[i]):
                seen[i].append(as_list(call.run()))
    torch.cuda.synchronize()
    for found, want in zip(seen, wants, strict=True):
        for outs in found:
            assert_same([oracle.bits(out) for out in outs], want, "beside another stream")


# The ends of allocations, in a child: a stray read is a fault


def _reads_nothing_past_device_allocations() -> None:
    for form in LAYER_FORMS.values():
        more = {"rope": True, "scale_tensors": True} if form.kind == QUERY else {}
        call = form.make(5, 3, device="cuda", **more)
        whole = {}
        for name, value in call.args.items():
            if isinstance(value, torch.Tensor) and name not in call.boxes:
                whole[name] = before_unmapped_gpu_memory(value)
        if form.kind == QUERY:
            wide = before_unmapped_gpu_memory(torch.zeros(3, 256, 512, dtype=BF16, device="cuda"))
            whole["w_uk"] = wide[:, 128:].copy_(call.args["w_uk"])
        elif form.name in ("value", "value-gate"):
            whole["w_uv"] = before_unmapped_gpu_memory(call.args["w_uv"].mT.contiguous()).mT
        run_and_check(call.given(**whole))
    torch.cuda.synchronize()
    os._exit(0)


@pytest.mark.gpu
def test_case09_case12_nothing_is_read_past_an_allocation() -> None:
    run_child(_reads_nothing_past_device_allocations)


# The judge


def test_the_judge_sees_what_is_wrong() -> None:
    """Another epsilon, a weight of the wrong head, a sum that lacks a part, and bits beside."""
    call = make_query(3, 2)
    good = call.run()
    steps = [
        layer_oracle.query(call.args, good.dtype, in_steps=in_steps) for in_steps in (False, True)
    ]
    layer_oracle.assert_as_good(good, *steps)
    w_q_b, w_uk = call.args["w_q_b"], call.args["w_uk"]
    without = w_q_b.clone()
    without[:, 1024:1032] = 0
    for changed in (
        {"eps": 1.0},
        {"w_uk": w_uk.flip(0)},
        {"w_q_b": without},
        {"q_norm_weight": call.args["q_norm_weight"].roll(8)},
    ):
        with pytest.raises(AssertionError, match="mqa_q: "):
            layer_oracle.assert_as_good(call.given(**changed).run(), *steps)
    for wrong in (torch.nan, torch.inf, good[1, 1, 300] + 0.06):
        bad = good.clone()
        bad[1, 1, 300] = wrong
        with pytest.raises(AssertionError, match="mqa_q: "):
            layer_oracle.assert_as_good(bad, *steps)
    value = make_value(2, 2)
    out = value.run()
    value.check_outputs(out)
    out[1, 130] *= 1 + 2**-6
    with pytest.raises(AssertionError, match="1 elements are off"):
        value.check_outputs(out)
