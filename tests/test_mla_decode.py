"""The MLA decode epilogue: values, slots and shapes. Copies and casts are compared bit for bit."""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import oracle
import pytest
import torch
from helpers import (
    BF16,
    CACHE_KINDS,
    E4M3,
    FP16,
    Guarded,
    check_guards,
    guarded,
    make_call,
    op,
    poisoned_out,
    run_and_check,
    run_child,
    run_program,
)
from memory_helpers import before_a_forbidden_page

TOKENS = (0, 1, 2, 63, 64, 65, 128, 500)
HEADS = (1, 3, 12, 96)
FORMATS = [
    (q_fp8, kind)
    for q_fp8 in (False, True)
    for kind in CACHE_KINDS
    if not (q_fp8 and kind == "ds_mla")
]


def format_id(value: tuple[bool, str]) -> str:
    return f"{'q8' if value[0] else 'q16'}-{value[1]}"


@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
@pytest.mark.parametrize("tokens", TOKENS)
def test_token_counts_and_block_sizes(device: str, tokens: int, block_size: int) -> None:
    heads = HEADS[(tokens + block_size) % 2]
    run_and_check(make_call(tokens, heads, block_size=block_size, any_bits=True, device=device))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("fmt", FORMATS, ids=format_id)
def test_formats_and_head_counts(device: str, fmt: tuple[bool, str], heads: int) -> None:
    q_fp8, kind = fmt
    tokens = 5 if heads == 96 else 33
    for dtype, rope in itertools.product((BF16, FP16), (False, True)):
        call = make_call(
            tokens,
            heads,
            dtype=dtype,
            cache=kind,
            q_fp8=q_fp8,
            rope=rope,
            device=device,
            seed=heads,
        )
        run_and_check(call)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=format_id)
@pytest.mark.parametrize("heads", HEADS)
def test_every_token_count_in_every_format(heads: int, fmt: tuple[bool, str]) -> None:
    q_fp8, kind = fmt
    for tokens, block_size in itertools.product(TOKENS, (1, 64)):
        call = make_call(
            tokens,
            heads,
            dtype=(BF16, FP16)[tokens % 2],
            cache=kind,
            q_fp8=q_fp8,
            rope=block_size == 1,
            block_size=block_size,
            device="cuda",
        )
        run_and_check(call)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8, 12, 16, 24, 31, 96, 128])
def test_case13_any_head_count(device: str, heads: int) -> None:
    for tokens in (1, 16, 17):
        run_and_check(make_call(tokens, heads, device=device, any_bits=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_copies_keep_every_bit_pattern(device: str, dtype: torch.dtype) -> None:
    """NaN payloads, infinities and subnormals are copied, not computed."""
    run_and_check(make_call(64, 3, dtype=dtype, any_bits=True, device=device))


def test_no_tokens_still_validates_case15(device: str) -> None:
    for q_fp8, kind in FORMATS:
        call = make_call(0, 12, cache=kind, q_fp8=q_fp8, rope=True, device=device)
        mqa_q = run_and_check(call)
        assert tuple(mqa_q.shape) == (0, 12, 576)
    call = make_call(0, 12, device=device)
    with pytest.raises(ValueError, match="kv_c_normed: expected"):
        call.run(kv_c_normed=torch.empty(0, 511, dtype=BF16, device=device))


def test_a_cache_without_blocks_takes_no_rows(device: str) -> None:
    call = make_call(3, 2, num_blocks=0, slots=[0, -1, 5], device=device)
    run_and_check(call)


def test_more_than_65535_rows(device: str) -> None:
    run_and_check(make_call(700, 96, block_size=64, device=device))


@pytest.mark.parametrize("ready", [False, True], ids=["safe", "kv_inputs_ready"])
def test_more_tokens_than_one_launch_takes(device: str, ready: bool) -> None:
    """Two launches, and a slot that tokens of both name: its row is the later token's."""
    tokens, slots = 4500, torch.randperm(4600, generator=torch.Generator().manual_seed(1))
    slots = slots[:4500].clone()
    slots[[4200, 4499, 12]] = slots[[10, 4100, 11]]
    call = make_call(tokens, 2, num_blocks=100, block_size=46, device=device, seed=3)
    cache = torch.zeros(100, 46, 576, dtype=BF16, device=device)
    mqa_q = call.run(kv_cache=cache, slot_mapping=slots.to(device), kv_inputs_ready=ready)
    query = torch.cat([call.ql_nope, call.q_pe], -1)
    assert torch.equal(mqa_q.view(torch.int16), query.view(torch.int16))
    rows = torch.cat([call.kv_c_normed, call.k_pe], -1).view(torch.int16)
    expected = torch.zeros(4600, 576, dtype=torch.int16, device=device)
    for token in range(tokens):
        expected[slots[token]] = rows[token]
    assert torch.equal(cache.view(torch.int16).view(-1, 576), expected)


# Slots


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_case07_negative_slots_are_padding(device: str, kind: str, slot_dtype: torch.dtype) -> None:
    smallest = torch.iinfo(slot_dtype).min
    for slots in (
        [5, -1, 17, -1, -1, 0, -1, 63],
        [-1] * 8,
        [-2, smallest, -(2**31), -64, 9, -16, -65, 62],
    ):
        call = make_call(
            8, 2, cache=kind, num_blocks=4, slots=slots, slot_dtype=slot_dtype, device=device
        )
        run_and_check(call)


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_case08_slots_past_the_end_are_skipped(device: str, kind: str, block_size: int) -> None:
    capacity = 4 * block_size
    slots = [capacity - 1, capacity, capacity + 1, 2**31, 2**31 - 1, 2**32 + 1, 2**62, 2**63 - 1]
    run_and_check(
        make_call(8, 2, cache=kind, block_size=block_size, num_blocks=4, slots=slots, device=device)
    )


def test_case08_int32_slots_past_the_end(device: str) -> None:
    slots = [63, 64, 2**31 - 1, -(2**31)]
    run_and_check(make_call(4, 2, num_blocks=4, slots=slots, slot_dtype=torch.int32, device=device))


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_case09_only_the_first_slots_are_read(device: str, slot_dtype: torch.dtype) -> None:
    """Entries past the token count name good slots, which must stay untouched."""
    slots = torch.arange(40) * 3 % 80
    run_and_check(
        make_call(16, 2, num_blocks=5, slots=slots[:17], slot_dtype=slot_dtype, device=device)
    )
    run_and_check(make_call(16, 2, num_blocks=5, slots=slots, slot_dtype=slot_dtype, device=device))
    run_and_check(make_call(0, 2, num_blocks=5, slots=slots, slot_dtype=slot_dtype, device=device))


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_case10_slots_as_a_column(device: str, slot_dtype: torch.dtype) -> None:
    table = torch.full((20, 4), 7, dtype=slot_dtype)
    table[:, 2] = torch.randperm(80, generator=torch.Generator().manual_seed(1))[:20]
    call = make_call(20, 2, num_blocks=5, device=device)
    run_and_check(call.with_tensors(slot_mapping=table.to(device)[:, 2]))


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_case28_duplicate_slots_keep_one_whole_row(device: str, kind: str) -> None:
    rope = kind == "same"
    for seed in range(3):
        tokens = 3 + 30 * seed
        call = make_call(
            tokens, 2, cache=kind, rope=rope, slots=[9] * tokens, device=device, seed=seed
        )
        before = call.cache.snapshot()
        call.check_query(call.run())
        row, rows = oracle.bits(call.cache.tensor)[0, 9], call.expected_rows().bits
        whole = [t for t in range(tokens) if torch.equal(row[:512], rows[t, :512])]
        assert len(whole) == 1, "the row is not one token's"
        winner = call.with_tensors(
            slot_mapping=torch.tensor([9 if t == whole[0] else -1 for t in range(tokens)])
        )
        winner.check_cache(before)


def test_permuted_slots_in_a_permuted_cache(device: str) -> None:
    call = make_call(65, 3, slots=torch.arange(64, -1, -1), num_blocks=5, device=device)
    run_and_check(call)


# Outputs


@pytest.mark.parametrize("fmt", FORMATS, ids=format_id)
def test_out_is_filled_and_returned(device: str, fmt: tuple[bool, str]) -> None:
    q_fp8, kind = fmt
    call = make_call(17, 3, cache=kind, q_fp8=q_fp8, rope=True, device=device)
    out = poisoned_out(call)
    before = out.snapshot()
    assert run_and_check(call, out=out.tensor) is out.tensor
    check_guards(out, before)


def test_fp8_out_may_be_passed_as_bytes(device: str) -> None:
    call = make_call(9, 3, q_fp8=True, device=device)
    out = Guarded((9, 3, 576), torch.uint8, device)
    before = out.snapshot()
    assert call.run(out=out.tensor) is out.tensor
    call.check_query(out.tensor.view(E4M3))
    check_guards(out, before)


def test_each_call_returns_fresh_memory(device: str) -> None:
    call = make_call(4, 3, device=device)
    first, second = call.run(), call.run()
    assert first.data_ptr() != second.data_ptr()
    call.check_query(first)


def test_the_inputs_may_alias_each_other(device: str) -> None:
    """Reading one buffer through two arguments is fine; only outputs must not overlap."""
    call = make_call(6, 1, device=device)
    shared = call.ql_nope[:, 0]
    run_and_check(call.with_tensors(kv_c_normed=shared, k_pe=shared[:, 64:128]))


def test_repeated_calls_with_other_shapes_and_addresses(device: str) -> None:
    """What was learned from one call must not leak into the next."""
    for tokens, heads, dtype, rope in [
        (4, 3, BF16, False),
        (4, 3, FP16, False),
        (5, 3, BF16, False),
        (4, 3, BF16, True),
        (4, 2, BF16, False),
        (4, 3, BF16, False),
    ]:
        run_and_check(make_call(tokens, heads, dtype=dtype, rope=rope, device=device))


def test_threads_share_the_operation(device: str) -> None:
    def work(seed: int) -> None:
        for tokens in (1, 7, 7, 16):
            call = make_call(tokens, 3, cache=CACHE_KINDS[seed % 4], device=device, seed=seed)
            run_and_check(call)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


# Scales


@pytest.mark.parametrize("as_tensors", [False, True], ids=["floats", "tensors"])
def test_case14_constants(device: str, as_tensors: bool) -> None:
    """1.0 times 4.0 is the code 0x48, 1.0 times 0.25 is 0x28: written down, not computed."""
    call = make_call(
        3, 2, q_fp8=True, cache="uint8", slots=[0, 1, 2], q_scale_inv=4.0, cache_scale_inv=0.25,
        scale_tensors=as_tensors, device=device,
    )  # fmt: skip
    for tensor in (call.ql_nope, call.q_pe, call.kv_c_normed, call.k_pe):
        tensor.fill_(1.0)
    mqa_q = run_and_check(call)
    assert (oracle.bits(mqa_q) == 0x48).all()
    assert (oracle.bits(call.cache.tensor)[0, :3] == 0x28).all()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_scale_tensor_has_one_element_of_any_rank(device: str, shape: tuple[int, ...]) -> None:
    call = make_call(5, 2, q_fp8=True, cache="fp8", device=device)
    call.options["q_scale_inv"] = torch.full(shape, 0.3, device=device)
    call.options["cache_scale_inv"] = torch.full(shape, 2.7, device=device)
    run_and_check(call)


def test_scales_as_float_and_tensor_agree(device: str) -> None:
    results = []
    for as_tensors in (False, True):
        call = make_call(
            33, 3, q_fp8=True, cache="fp8", q_scale_inv=0.1, cache_scale_inv=7.7,
            scale_tensors=as_tensors, device=device,
        )  # fmt: skip
        results.append((oracle.bits(run_and_check(call)), call.cache.snapshot()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_scale_tensor_is_read_at_the_call(device: str) -> None:
    call = make_call(4, 2, q_fp8=True, cache="fp8", scale_tensors=True, device=device)
    run_and_check(call)
    call.options["q_scale_inv"].fill_(16.0)
    call.options["cache_scale_inv"].fill_(0.01)
    run_and_check(call)


# Processes


def _reads_nothing_past_the_end(dtype_name: str, fp8: bool) -> None:
    """Every input ends at a page that may not be touched."""
    call = make_call(
        16, 3, dtype=getattr(torch, dtype_name), rope=True, q_fp8=fp8,
        cache="fp8" if fp8 else "same", scale_tensors=True,
    )  # fmt: skip
    for name in ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping"):
        setattr(call, name, before_a_forbidden_page(getattr(call, name)))
    call.options = {k: before_a_forbidden_page(v) for k, v in call.options.items()}
    call.options["positions"].copy_(torch.arange(16) * 1000 - 3000)
    run_and_check(call)
    os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages with mprotect")
@pytest.mark.parametrize("fp8", [False, True], ids=["copy", "fp8"])
def test_case09_case12_nothing_is_read_past_an_allocation(fp8: bool) -> None:
    run_child(_reads_nothing_past_the_end, "bfloat16", fp8)


def _import_then_fork() -> None:
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    assert "libcuda.so" not in loaded, "an import of k3cupy loaded the driver"
    child = os.fork()
    if child == 0:
        try:
            run_and_check(make_call(3, 2))
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    run_and_check(make_call(3, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and forks")
def test_import_makes_no_driver_call_and_fork_works() -> None:
    run_child(_import_then_fork)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
import k3cupy
cache = np.zeros((2, 4, 576), np.float16)
mqa_q = np.asarray(k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
    np.ones((2, 3, 512), np.float16), np.full((2, 3, 64), 2, np.float16),
    np.full((2, 512), 3, np.float16), np.full((2, 64), 4, np.float16),
    cache, np.array([6, -1])))
assert mqa_q.shape == (2, 3, 576) and mqa_q[1, 2, 511] == 1 and mqa_q[0, 0, 512] == 2
assert cache[1, 2, 511] == 3 and cache[1, 2, 512] == 4
assert np.count_nonzero(cache) == 576
"""


def test_torch_is_optional() -> None:
    run_program(WITHOUT_TORCH)


def test_positional_arguments_are_vllms() -> None:
    """The first six arguments are positional and everything else is a keyword."""
    call = make_call(2, 1)
    before = call.cache.snapshot()
    names = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping")
    given = [call.arguments()[name] for name in names]
    call.check(before, op(*given))
    with pytest.raises(TypeError):
        op(*given, False)


def test_guards_notice_a_stray_byte() -> None:
    """The judge itself: one changed byte outside the row is an error."""
    call = make_call(2, 1, slots=[3, 4])
    before = call.cache.snapshot()
    mqa_q = call.run()
    call.cache.storage[7] += 1
    with pytest.raises(AssertionError, match="allocation"):
        call.check(before, mqa_q)
    shifted = guarded(mqa_q)
    oracle.bits(shifted)[0, 0, 5] ^= 1
    with pytest.raises(AssertionError, match="mqa_q"):
        call.check_query(shifted)
