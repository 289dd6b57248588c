"""The prefill and context epilogues: what they alone promise. See test_mla.py for the rest."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch
from helpers import BF16, FP16
from mla_helpers import INSERTS, NOPE, make_prefill, run_and_check

INDEX_TYPES = pytest.mark.parametrize(
    "slot_dtype", [torch.int64, torch.int32], ids=["int64", "int32"]
)


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


# Duplicate slots: the row is whole, and it is the last token's


@pytest.mark.parametrize("kind", INSERTS)
@pytest.mark.parametrize("tokens", [2, 3, 8, 9, 33, 129, 130, 256, 257, 300, 385, 512, 513])
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
    for tokens, seed in ((40, 0), (256, 2), (300, 1)):
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
    """The limits of a warp's search alone, of its batches, and of the blocks' one together."""
    distances = [1, 7, 8, 31, 64, 127, 128, 129, 150, 255, 256, 257, 384, 400]
    for tokens in (250, 256, 257, 300, 512, 513):
        there = [d for i, d in enumerate(distances) if 11 * i + d < tokens]
        slots = spread_duplicates(tokens, there)
        run_and_check(
            make_prefill(kind, tokens, 1, block_size=64, slots=slots, device=device, seed=3)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [257, 400, 512, 513, 1_000, 4_096, 4_097, 20_000])
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
