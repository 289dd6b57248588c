"""The MLA query front: formats, slots, positions and layouts; on the CPU too, and on a GPU more."""

from __future__ import annotations

import copy
from typing import Any

import oracle
import pytest
import torch
from helpers import BF16, FP16, Guarded
from memory_helpers import gibibytes
from mla_helpers import run_and_check, run_into_guarded_outs
from mla_layer_helpers import (
    QUERY_FORMS,
    Change,
    LayerCall,
    LayerForm,
    in_layout,
    in_one_launch,
    make_query,
    qkv_a_of,
)
from oracle import LATENT

each_format = pytest.mark.parametrize("form", QUERY_FORMS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])

WILD_SLOTS = (17, -1, 5, 5, 31, 2**40 + 3, -(2**63), 2**62, 0, 17, 32, 8, -2, 5, 30, 1)
"""Padding, outside, twice and three times, in a cache of two blocks of sixteen."""

WILD_POSITIONS = (0, 127, 128, -1, 2**31, 2**62, -(2**63), 5)


def wild(form: LayerForm, tokens: int, **options: Any) -> LayerCall:
    """A call with slots and positions of every kind."""
    slots = [WILD_SLOTS[i % len(WILD_SLOTS)] for i in range(tokens)]
    call = form.make(tokens, 6, slots=slots, num_blocks=2, **options)
    if call.rope:
        some = [WILD_POSITIONS[i % len(WILD_POSITIONS)] for i in range(tokens)]
        call.args["positions"].copy_(torch.tensor(some))
    return call


@pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
@each_dtype
@each_format
def test_every_format(device: str, form: LayerForm, dtype: torch.dtype, rope: bool) -> None:
    """The RoPE part has the bits of the epilogue that is fed with the query before RoPE."""
    for tokens in (5, 16, 17):
        scales = {"scale_tensors": tokens == 16}
        call = wild(form, tokens, dtype=dtype, rope=rope, device=device, **scales)
        run_into_guarded_outs(call)
        # All formats sum up in one order, whatever tables name for each.
        options = {"config": in_one_launch(device)} if tokens <= 16 else {}
        plain = call.given(positions=None, cos_sin_cache=None, q_scale_inv=None).run(**options)
        parts = {"ql_nope": plain[..., :LATENT], "q_pe": plain[..., LATENT:]}
        want = oracle.bits(call.epilogue(kv_cache=call.cache.tensor, **parts))[..., LATENT:]
        got = oracle.bits(call.run(**options))[..., LATENT:]
        oracle.assert_same_bits(got, want, "the RoPE part")


@pytest.mark.parametrize("power", [-12, -5, 7])
@each_dtype
def test_gains_of_any_size(device: str, dtype: torch.dtype, power: int) -> None:
    """One launch multiplies weights with them, and must not lose places of what is small."""
    call = make_query(9, 2, dtype=dtype, device=device)
    gain = (call.args["q_norm_weight"].double() * 2.0**power).to(dtype)
    for tokens in (5, 9):
        part = {"qkv_a": call.first[:tokens], "slot_mapping": call.args["slot_mapping"][:tokens]}
        some = call.given(q_norm_weight=gain, **part)
        run_and_check(some, config=in_one_launch(device))


def test_slots_and_positions_of_32_bits_and_columns(device: str) -> None:
    """What is longer than the tokens is not read."""
    call = make_query(6, 2, rope=True, device=device)
    table = torch.full((9, 4), -7, dtype=torch.int32, device=device)
    for column, name in ((1, "slot_mapping"), (3, "positions")):
        table[:6, column] = call.args[name].to(torch.int32)
        call = call.given(**{name: table[:, column]})
    run_into_guarded_outs(call)


# Layouts


def with_cache(call: LayerCall, gap: int, shift: int = 0) -> LayerCall:
    shape, dtype = call.cache.shape, call.cache.dtype
    row = shape[2] + gap
    strides = (shape[1] * row + 8 * gap, row, 1)
    box = Guarded(shape, dtype, call.device, strides=strides, shift=shift)
    return call.boxed(kv_cache=box)


ALIGNED: dict[str, Change] = {
    "qkv_a in 2176 columns": in_layout("qkv_a", 64, 128),
    "qkv_a in 4224 columns": in_layout("qkv_a", 2112, 2112 * 2),
    "w_uk packed": in_layout("w_uk", 0),
    "w_uk apart": in_layout("w_uk", 24, 16),
    "cache apart": lambda call: with_cache(call, 64, 16),
}
ODD: dict[str, Change] = {
    "qkv_a by 2113": in_layout("qkv_a", 1),
    "qkv_a off 2": in_layout("qkv_a", 0, 2),
    "w_uk by 513": in_layout("w_uk", 1, 2),
    "w_q_b off 2": in_layout("w_q_b", 0, 2),
    "q_norm_weight off 2": in_layout("q_norm_weight", 0, 2),
    "kv_norm_weight off 8": in_layout("kv_norm_weight", 0, 8),
    "cache by 577": lambda call: with_cache(call, 1),
    "cache off 2": lambda call: with_cache(call, 0, 2),
}


def of_one(change: Change, device: str, **options: Any) -> LayerCall:
    return change(make_query(4, 3, rope=True, device=device, **options))


@pytest.mark.parametrize("change", ALIGNED.values(), ids=ALIGNED)
def test_aligned_rows_give_the_bits_of_packed_ones(device: str, change: Change) -> None:
    result = run_into_guarded_outs(of_one(change, device))
    want = oracle.bits(make_query(4, 3, rope=True, device=device).run())
    oracle.assert_same_bits(oracle.bits(result), want, "the query")


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_case02_case03_rows_that_are_not_aligned(device: str, change: Change) -> None:
    """They run the separate kernels, which say why."""
    call = of_one(change, device)
    run_into_guarded_outs(call)
    if device == "cuda":
        choice = call.explain()
        assert (choice.kernel, choice.config) == ("separate", None)
        assert "16 bytes" in choice.reason or "multiple" in choice.reason, choice.reason
    run_into_guarded_outs(make_query(4, 3, device=device), shift=2)


def test_case01_one_token_has_no_row_stride(device: str) -> None:
    for stride in (0, 1, 2113, 2**40):
        call = make_query(1, 3, device=device)
        part = qkv_a_of(1, BF16, device).as_strided((1, 2112), (stride, 1))
        run_and_check(call.given(qkv_a=part))


# A GPU alone


@pytest.mark.gpu
def test_the_decision_is_readable() -> None:
    for tokens in (1, 16, 17, 64):
        choice = make_query(tokens, 12, device="cuda").explain()
        assert choice.runs_on == "cuda" and choice.reason
        one_launch = torch.cuda.get_device_capability()[0] >= 9 and tokens <= 16
        assert choice.kernel in (("mla_query", "separate") if one_launch else ("separate",))
        if tokens > 16 and torch.cuda.get_device_capability()[0] >= 9:
            assert f"{tokens} tokens" in choice.reason


@pytest.mark.gpu
@gibibytes(5)
@each_format
def test_cache_of_more_than_2_31_elements(form: LayerForm, needs_memory: None) -> None:
    """In one launch, and in separate kernels."""
    for tokens in (5, 17):
        call = form.make(tokens, 2, rope=True, device="cuda")
        width = call.cache.shape[2]
        blocks = 2**31 // (64 * width) + 1000
        capacity, middle = blocks * 64, 2**31 // width + 1
        cache = torch.zeros(blocks, 64, width, dtype=call.cache.dtype, device="cuda")
        assert cache.numel() > 2**31
        slots = torch.full((tokens,), -1, device="cuda")
        slots[:4] = torch.tensor([capacity - 1, 5, capacity, middle])
        call.check_outputs(call.run(kv_cache=cache, slot_mapping=slots))
        small = copy.copy(call.cache)
        small.storage = small.storage.clone()
        small.tensor = small.view_of(small.storage)
        some = torch.full_like(slots, -1)
        some[:4] = torch.tensor([0, 1, -1, 2])
        call.epilogue(kv_cache=small.tensor, slot_mapping=some)
        want = oracle.bits(small.tensor).view(-1, width)
        rows = oracle.codes(cache).view(capacity, width)
        for slot, token in ((capacity - 1, 0), (5, 1), (middle, 2)):
            oracle.assert_same_bits(rows[slot].cpu(), want[token], f"row {slot}")
            rows[slot] = 0
        assert torch.count_nonzero(rows.view(torch.int64)) == 0, "bytes of other rows were written"
