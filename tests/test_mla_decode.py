"""The MLA decode epilogue: what it alone promises. See test_mla.py for the rest."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch
from helpers import BF16, FP16
from mla_helpers import FORMS, Form, make_decode, run_and_check

TOKENS = (0, 1, 2, 63, 64, 65, 128, 500)
HEADS = (1, 3, 12, 96)
FORMATS = [
    (q_fp8, kind)
    for q_fp8 in (False, True)
    for kind in ("same", "fp8", "uint8", "ds_mla")
    if not (q_fp8 and kind == "ds_mla")
]
DECODES = [form for form in FORMS.values() if form.kind == "decode"]
each_format = pytest.mark.parametrize(
    ("q_fp8", "kind"), FORMATS, ids=[f"{'q8' if q else 'q16'}-{kind}" for q, kind in FORMATS]
)


@each_format
def test_every_pair_of_formats(device: str, q_fp8: bool, kind: str) -> None:
    for heads, dtype, rope in itertools.product(HEADS, (BF16, FP16), (False, True)):
        tokens = 5 if heads == 96 else 33
        run_and_check(
            make_decode(
                tokens, heads, dtype=dtype, cache=kind, q_fp8=q_fp8, rope=rope, device=device,
                seed=heads,
            )
        )  # fmt: skip


@pytest.mark.gpu
@each_format
def test_every_token_count_in_every_format(q_fp8: bool, kind: str) -> None:
    for heads, tokens, block_size in itertools.product(HEADS, TOKENS, (1, 64)):
        run_and_check(
            make_decode(
                tokens, heads, dtype=(BF16, FP16)[tokens % 2], cache=kind, q_fp8=q_fp8,
                rope=block_size == 1, block_size=block_size, device="cuda",
            )
        )  # fmt: skip


@pytest.mark.parametrize("ready", [False, True], ids=["safe", "kv_inputs_ready"])
def test_more_tokens_than_one_launch_takes(device: str, ready: bool) -> None:
    """Two launches, and a slot that tokens of both name: its row is the later token's."""
    tokens, slots = 4500, torch.randperm(4600, generator=torch.Generator().manual_seed(1))
    slots = slots[:4500].clone()
    slots[[4200, 4499, 12]] = slots[[10, 4100, 11]]
    call = make_decode(tokens, 2, num_blocks=100, block_size=46, device=device, seed=3)
    cache = torch.zeros(100, 46, 576, dtype=BF16, device=device)
    mqa_q = call.run(kv_cache=cache, slot_mapping=slots.to(device), kv_inputs_ready=ready)
    query = torch.cat([call.args["ql_nope"], call.args["q_pe"]], -1)
    assert torch.equal(mqa_q.view(torch.int16), query.view(torch.int16))
    rows = torch.cat([call.args["kv_c_normed"], call.args["k_pe"]], -1).view(torch.int16)
    expected = torch.zeros(4600, 576, dtype=torch.int16, device=device)
    winner = {int(slot): token for token, slot in enumerate(slots.tolist())}
    expected[list(winner)] = rows[list(winner.values())]
    assert torch.equal(cache.view(torch.int16).view(-1, 576), expected)


@pytest.mark.parametrize("form", DECODES, ids=str)
def test_case28_duplicate_slots_keep_one_whole_row(device: str, form: Form) -> None:
    """Which one is not promised."""
    for seed in range(3):
        tokens = 3 + 30 * seed
        call = form.make(
            tokens, 2, rope=form.name == "decode", slots=[9] * tokens, device=device, seed=seed
        )
        before = call.snapshot()
        call.check_outputs(call.run())
        row, rows = oracle.bits(call.cache.tensor)[0, 9], call.expected_rows().bits
        whole = [t for t in range(tokens) if torch.equal(row[:512], rows[t, :512])]
        assert len(whole) == 1, "the row is not one token's"
        slots = torch.tensor([9 if t == whole[0] else -1 for t in range(tokens)])
        call.given(slot_mapping=slots).check_cache(before["kv_cache"])


@pytest.mark.parametrize("form", DECODES, ids=str)
def test_the_promise_changes_no_bit(device: str, form: Form) -> None:
    run_and_check(form.make(33, 3, rope=True, device=device), kv_inputs_ready=True)
