"""The prefill and context epilogues: values, slots and shapes. Copies are compared bit for bit."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import oracle
import pytest
import torch
from helpers import BF16, E4M3, FP16, run_child, run_program
from memory_helpers import before_a_forbidden_page
from mla_helpers import (
    CONCATS,
    INPUTS,
    INSERTS,
    KINDS,
    NAMES,
    NOPE,
    OUTPUTS,
    POSITIONAL,
    MlaCall,
    as_halves,
    as_list,
    as_out,
    make_prefill,
    poisoned_outs,
    run_and_check,
    run_into_guarded_outs,
)

import k3cupy

TOKENS = (0, 1, 2, 7, 63, 64, 65, 300)
HEADS = (1, 3, 12, 96)
INDEX_TYPES = pytest.mark.parametrize(
    "slot_dtype", [torch.int64, torch.int32], ids=["int64", "int32"]
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_token_counts(device: str, tokens: int, kind: str) -> None:
    block_size = (1, 16, 24, 64)[tokens % 4]
    heads = HEADS[tokens % 3]
    run_and_check(
        make_prefill(kind, tokens, heads, block_size=block_size, any_bits=True, device=device)
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_types_and_head_counts(device: str, kind: str, heads: int) -> None:
    tokens = 3 if heads == 96 else 33
    turns = (False, True) if kind in INSERTS else (False,)
    for dtype, rope in itertools.product((BF16, FP16), turns):
        run_and_check(
            make_prefill(kind, tokens, heads, dtype=dtype, rope=rope, device=device, seed=heads)
        )


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8, 12, 16, 24, 31, 96, 128])
def test_case13_any_head_count(device: str, heads: int) -> None:
    for kind, tokens in itertools.product(KINDS, (1, 17)):
        run_and_check(
            make_prefill(kind, tokens, heads, rope=kind == "insert", device=device, seed=tokens)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_case15_no_tokens_still_validates(device: str, kind: str) -> None:
    call = make_prefill(kind, 0, 12, rope=kind in INSERTS, device=device)
    run_and_check(call)
    run_into_guarded_outs(call)
    with pytest.raises(ValueError, match="k_pe: expected"):
        call.run(k_pe=torch.empty(0, 63, dtype=BF16, device=device))


@pytest.mark.parametrize("kind", INSERTS)
def test_a_cache_without_blocks_takes_no_rows(device: str, kind: str) -> None:
    run_and_check(make_prefill(kind, 3, 2, num_blocks=0, slots=[0, -1, 5], device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_more_than_65535_rows(kind: str) -> None:
    run_and_check(make_prefill(kind, 700, 96, block_size=64, device="cuda"))


# The query


@pytest.mark.parametrize("kind", ["insert", "ds_mla"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_the_query_is_turned_in_place_in_its_last_columns(
    device: str, kind: str, dtype: torch.dtype
) -> None:
    call = make_prefill(kind, 9, 3, dtype=dtype, rope=True, device=device)
    before = call.args["q"].clone()
    run_and_check(call)
    same = oracle.bits(call.args["q"]) == oracle.bits(before)
    assert same[..., :NOPE].all()
    assert not same[..., NOPE:].all()


@pytest.mark.parametrize(("kind", "rope"), [("insert", False), ("ds_mla", False), ("fp8", True)])
def test_the_query_is_left_alone(device: str, kind: str, rope: bool) -> None:
    """Without positions, and by the fp8 operation: not even its own bits are written again."""
    call = make_prefill(kind, 9, 3, rope=rope, any_bits=not rope, device=device)
    expanded = call.args["q"][:1].expand(9, 3, 192)
    run_and_check(call)
    run_and_check(call.given(q=expanded))


@pytest.mark.parametrize("kind", ["insert", "ds_mla"])
def test_turning_twice_turns_twice(device: str, kind: str) -> None:
    """The query is an output: a second call starts from what the first one left."""
    call = make_prefill(kind, 5, 2, rope=True, device=device)
    for _ in range(3):
        run_and_check(call)


def test_padding_tokens_get_keys_and_a_turned_query(device: str) -> None:
    for kind in INSERTS:
        run_and_check(make_prefill(kind, 20, 3, rope=True, slots=[-1] * 20, device=device))


# Slots


@pytest.mark.parametrize("kind", INSERTS)
@INDEX_TYPES
def test_case07_negative_slots_are_padding(device: str, kind: str, slot_dtype: torch.dtype) -> None:
    smallest = torch.iinfo(slot_dtype).min
    for slots in (
        [5, -1, 17, -1, -1, 0, -1, 63],
        [-1] * 8,
        [-2, smallest, -(2**31), -64, 9, -16, -65, 62],
    ):
        run_and_check(
            make_prefill(
                kind, 8, 2, num_blocks=4, slots=slots, slot_dtype=slot_dtype, device=device
            )
        )


@pytest.mark.parametrize("kind", INSERTS)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_case08_slots_past_the_end_are_skipped(device: str, kind: str, block_size: int) -> None:
    end = 4 * block_size
    slots = [end - 1, end, end + 1, 2**31, 2**31 - 1, 2**32 + 1, 2**62, 2**63 - 1]
    run_and_check(
        make_prefill(kind, 8, 2, block_size=block_size, num_blocks=4, slots=slots, device=device)
    )


def test_case08_int32_slots_past_the_end(device: str) -> None:
    slots = [63, 64, 2**31 - 1, -(2**31)]
    for kind in INSERTS:
        run_and_check(
            make_prefill(
                kind, 4, 2, num_blocks=4, slots=slots, slot_dtype=torch.int32, device=device
            )
        )


@INDEX_TYPES
def test_case09_only_the_first_entries_are_read(device: str, slot_dtype: torch.dtype) -> None:
    """Entries past the token count name good slots, which must stay untouched."""
    slots = torch.arange(40) * 3 % 80
    for kind, tokens in itertools.product(INSERTS, (0, 16)):
        call = make_prefill(
            kind, tokens, 2, num_blocks=5, rope=True, slots=slots, slot_dtype=slot_dtype,
            device=device,
        )  # fmt: skip
        longer = torch.cat((call.args["positions"], call.args["positions"][:3]))
        run_and_check(call.given(positions=longer))


@INDEX_TYPES
def test_case10_slots_as_a_column(device: str, slot_dtype: torch.dtype) -> None:
    table = torch.full((20, 4), 7, dtype=slot_dtype)
    table[:, 2] = torch.randperm(80, generator=torch.Generator().manual_seed(1))[:20]
    for kind in INSERTS:
        call = make_prefill(kind, 20, 2, num_blocks=5, device=device)
        run_and_check(call.given(slot_mapping=table.to(device)[:, 2]))


# Duplicate slots: the row is whole, and it is the last token's


@pytest.mark.parametrize("kind", INSERTS)
@pytest.mark.parametrize("tokens", [2, 3, 8, 9, 33, 257, 300])
def test_case28_all_tokens_name_one_slot(device: str, kind: str, tokens: int) -> None:
    run_and_check(
        make_prefill(
            kind, tokens, 1, rope=kind == "insert", slots=[9] * tokens, num_blocks=2, device=device
        )
    )


@pytest.mark.parametrize("kind", INSERTS)
@INDEX_TYPES
def test_case28_many_tokens_share_few_slots(
    device: str, kind: str, slot_dtype: torch.dtype
) -> None:
    """Random slots with every kind of neighbour: duplicates, padding, past the end."""
    for tokens, seed in ((40, 0), (300, 1)):
        rng = torch.Generator().manual_seed(seed)
        slots = torch.randint(-3, 40, (tokens,), generator=rng)
        run_and_check(
            make_prefill(
                kind, tokens, 1, num_blocks=2, slots=slots, slot_dtype=slot_dtype, device=device
            )
        )


def spread_duplicates(tokens: int, distances: list[int]) -> torch.Tensor:
    """Distinct slots in random order, but for pairs of tokens at the given distances."""
    rng = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(tokens + 8, generator=rng)[:tokens].clone()
    for i, distance in enumerate(distances):
        slots[11 * i + distance] = slots[11 * i]
    return slots


@pytest.mark.parametrize("kind", INSERTS)
def test_case28_duplicates_far_apart(device: str, kind: str) -> None:
    slots = spread_duplicates(300, [1, 7, 8, 31, 64, 127, 128, 150, 210])
    run_and_check(make_prefill(kind, 300, 1, block_size=64, slots=slots, device=device, seed=3))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [257, 1_000, 5_000, 20_000])
@INDEX_TYPES
def test_case28_duplicates_in_a_long_prompt(tokens: int, slot_dtype: torch.dtype) -> None:
    """Pairs from neighbours to first-and-last; then a quarter of all tokens share their slots."""
    distances = [1, 2, 255, 256, 257, 511, 4096, 8191, tokens // 2, tokens - 100]
    slots = spread_duplicates(tokens, [d for d in distances if d + 100 <= tokens])
    rng = torch.Generator().manual_seed(4)
    crowded = torch.randint(0, tokens, (tokens,), generator=rng)
    for kind, chosen in itertools.product(INSERTS, (slots, crowded)):
        call = make_prefill(
            kind, tokens, 1, block_size=64, slots=chosen, slot_dtype=slot_dtype, device="cuda"
        )
        run_and_check(call)


def test_case28_slots_that_agree_in_their_lower_half(device: str) -> None:
    """9 and 9 + 2^32: the second is past the cache and must not displace the first."""
    slots = [9, 9 + 2**32, 5, 5 - 2**32, 7, 7 + 2**63 - 2**32, 3, 3]
    for kind in INSERTS:
        run_and_check(make_prefill(kind, 8, 1, num_blocks=1, slots=slots, device=device))


# Inputs as the layers have them


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_k_nope_and_v_are_halves_of_one_buffer(device: str, kind: str, dtype: torch.dtype) -> None:
    for tokens in (1, 17):
        call = make_prefill(kind, tokens, 12, dtype=dtype, rope=kind in INSERTS, device=device)
        run_and_check(as_halves(call))


@pytest.mark.parametrize("kind", KINDS)
def test_k_pe_of_two_and_three_dimensions(device: str, kind: str) -> None:
    for tokens in (1, 9):
        call = make_prefill(kind, tokens, 2, rope=kind in INSERTS, device=device)
        run_and_check(call.given(k_pe=call.args["k_pe"][:, None]))


# Outputs


@pytest.mark.parametrize("kind", KINDS)
def test_out_is_filled_and_returned(device: str, kind: str) -> None:
    run_into_guarded_outs(make_prefill(kind, 17, 3, rope=kind in INSERTS, device=device))


@pytest.mark.parametrize("kind", ["fp8", "concat_fp8"])
def test_fp8_outs_may_be_passed_as_bytes(device: str, kind: str) -> None:
    call = make_prefill(kind, 9, 3, device=device)
    boxes = poisoned_outs(call, as_bytes=True)
    given = tuple(box.tensor for box in boxes)
    result = call.run(out=given)
    assert all(a is b for a, b in zip(result, given, strict=True))
    call.check_outputs(tuple(tensor.view(E4M3) for tensor in given))


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_returns_fresh_memory(device: str, kind: str) -> None:
    call = make_prefill(kind, 4, 3, device=device)
    results = [call.run() for _ in range(2)]
    flat = [tensor for result in results for tensor in as_list(result)]
    assert len({t.data_ptr() for t in flat}) == 2 * len(OUTPUTS[kind])
    call.check_outputs(results[0])


def test_the_inputs_may_alias_each_other(device: str) -> None:
    """Reading one buffer through several arguments is fine; only outputs must not overlap."""
    call = make_prefill("concat_fp8", 6, 1, device=device)
    shared = call.args["k_nope"]
    run_and_check(call.given(v=shared, k_pe=shared[:, 0, 64:]))
    call = make_prefill("fp8", 6, 1, device=device)
    q = call.args["q"]
    run_and_check(call.given(q=q, k_nope=q[..., :128], v=q[..., 64:], k_pe=q[:, 0, 128:]))


def test_repeated_calls_with_other_shapes_and_addresses(device: str) -> None:
    """What was learned from one call must not leak into the next."""
    for kind, tokens, heads, dtype, rope in [
        ("insert", 4, 3, BF16, False),
        ("insert", 4, 3, FP16, False),
        ("ds_mla", 4, 3, BF16, False),
        ("insert", 5, 3, BF16, False),
        ("insert", 4, 3, BF16, True),
        ("fp8", 4, 3, BF16, True),
        ("concat", 4, 3, BF16, False),
        ("concat_fp8", 4, 3, BF16, False),
        ("insert", 4, 2, BF16, False),
        ("insert", 4, 3, BF16, False),
    ]:
        run_and_check(make_prefill(kind, tokens, heads, dtype=dtype, rope=rope, device=device))


def test_threads_share_the_operations(device: str) -> None:
    def work(seed: int) -> None:
        for tokens in (1, 7, 7, 16):
            kind = KINDS[seed % 5]
            run_and_check(make_prefill(kind, tokens, 3, device=device, seed=seed))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(10)))


# Names and arguments


@pytest.mark.parametrize("kind", KINDS)
def test_positional_arguments_are_vllms(kind: str) -> None:
    call = make_prefill(kind, 2, 1, rope=kind in INSERTS)
    before = call.snapshot()
    given = [call.args[name] for name in POSITIONAL[kind]]
    call.check(before, call.operation(*given))
    with pytest.raises(TypeError):
        call.operation(*given, None)


@pytest.mark.parametrize("kind", KINDS)
def test_explain_takes_the_arguments_of_the_call(device: str, kind: str) -> None:
    call = make_prefill(kind, 8, 3, rope=kind in INSERTS, device=device)
    before = call.snapshot()
    decision = call.explain()
    assert decision.backend == ("reference" if device == "cpu" else "cuda")
    assert decision.reason
    assert "\n" not in str(decision)
    given = [call.args[name] for name in POSITIONAL[kind]]
    assert k3cupy.explain_mla_prefill(NAMES[kind], *given) == decision
    for name, saved in before.items():
        oracle.assert_same_bits(call.boxes[name].snapshot(), saved, f"{name} after explain")
    with pytest.raises(ValueError, match="k_pe: expected"):
        call.explain(k_pe=call.args["k_pe"][..., :63])


# Processes


def _reads_nothing_past_the_end() -> None:
    """Every input ends at a page that may not be touched."""
    for kind in KINDS:
        call = make_prefill(kind, 16, 3, rope=kind in INSERTS, scale_tensors=True)
        args = {
            name: before_a_forbidden_page(value)
            for name, value in call.args.items()
            if isinstance(value, torch.Tensor) and name not in call.boxes
        }
        if "positions" in args:
            args["positions"].copy_(torch.arange(16) * 1000 - 3000)
        run_and_check(call.given(**args))
    os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages with mprotect")
def test_case09_case12_nothing_is_read_past_an_allocation() -> None:
    run_child(_reads_nothing_past_the_end)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
import k3cupy
k_nope, v = np.ones((2, 3, 128), np.float16), np.full((2, 3, 128), 0.5, np.float16)
k = np.asarray(k3cupy.fused_mla_kv_concat(k_nope, np.full((2, 64), 2, np.float16)))
assert k.shape == (2, 3, 192) and k[1, 2, 127] == 1 and k[1, 2, 128] == 2
k8, v8 = k3cupy.fused_mla_kv_concat_quant_fp8(k_nope, np.full((2, 64), 0x7F, np.uint8), v)
k8, v8 = np.asarray(k8).view(np.uint8), np.asarray(v8).view(np.uint8)
assert (k8[..., :128] == 0x38).all() and (k8[..., 128:] == 0x7F).all() and (v8 == 0x30).all()
"""


def test_torch_is_optional() -> None:
    run_program(WITHOUT_TORCH)


# The judge itself


def spoil_output(call: MlaCall, result: tuple[torch.Tensor, ...]) -> None:
    oracle.bits(result[-1])[0, 0, 5] ^= 1


def spoil_query(call: MlaCall, result: tuple[torch.Tensor, ...]) -> None:
    oracle.bits(call.args["q"])[1, 0, 127] ^= 1


def spoil_rotated_query(call: MlaCall, result: tuple[torch.Tensor, ...]) -> None:
    oracle.bits(call.args["q"])[1, 0, 140] += 3


def spoil_cache(call: MlaCall, result: tuple[torch.Tensor, ...]) -> None:
    call.cache.storage[7] += 1


@pytest.mark.parametrize("spoil", [spoil_output, spoil_query, spoil_rotated_query, spoil_cache])
def test_the_judge_notices(spoil: Callable[..., None]) -> None:
    call = make_prefill("insert", 2, 1, rope=True, slots=[3, 4])
    before = call.snapshot()
    result = call.run()
    spoil(call, (result,))
    with pytest.raises(AssertionError):
        call.check(before, result)


def test_the_judge_notices_a_swapped_pair() -> None:
    call = make_prefill("concat_fp8", 2, 1)
    k8, v8 = call.run()
    with pytest.raises(AssertionError):
        call.check({}, as_out([v8, k8]))


def test_every_operation_is_tested() -> None:
    assert set(NAMES) == set(INPUTS) == set(OUTPUTS) == {*INSERTS, *CONCATS}
    for name in NAMES.values():
        assert name in k3cupy.__all__
