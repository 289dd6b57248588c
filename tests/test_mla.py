"""The MLA epilogues: values, slots, shapes, outputs. Copies and casts are compared bit for bit."""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import oracle
import pytest
import torch
from fake_device import T4, TOO_OLD
from helpers import BF16, E4M3, FP16, check_guards, run_child, run_program
from memory_helpers import before_a_forbidden_page
from mla_helpers import (
    FORMS,
    INPUTS,
    KINDS,
    NAMES,
    OUTPUTS,
    POSITIONAL,
    Form,
    MlaCall,
    as_list,
    as_out,
    each_form,
    each_form_with_a_cache,
    make_decode,
    make_prefill,
    poisoned_outs,
    run_and_check,
    run_into_guarded_outs,
)

import k3cupy

TOKENS = (0, 1, 2, 7, 63, 64, 65, 128, 300)
HEADS = (1, 3, 12, 96)
INDEX_TYPES = (torch.int64, torch.int32)


@each_form
def test_token_counts_and_block_sizes(device: str, form: Form) -> None:
    for i, tokens in enumerate(TOKENS):
        for block_size in (1, 16, 24, 64) if tokens in (1, 63, 64, 65) else (16,):
            heads = HEADS[(i + block_size) % 3]
            run_and_check(
                form.make(tokens, heads, block_size=block_size, any_bits=True, device=device)
            )


@each_form
def test_types_and_head_counts(device: str, form: Form) -> None:
    for heads, dtype, rope in itertools.product(HEADS, (BF16, FP16), (False, True)):
        tokens = 3 if heads == 96 else 33
        run_and_check(form.make(tokens, heads, dtype=dtype, rope=rope, device=device, seed=heads))


@each_form
def test_case13_any_head_count(device: str, form: Form) -> None:
    for heads in (1, 2, 3, 5, 7, 8, 12, 16, 24, 31, 96, 128):
        for tokens in (1, 16, 17):
            run_and_check(form.make(tokens, heads, rope=heads % 2 == 0, device=device, seed=tokens))


@each_form
def test_case15_no_tokens_still_validates(device: str, form: Form) -> None:
    call = form.make(0, 12, rope=True, device=device)
    result = run_and_check(call)
    assert [tensor.shape[:2] for tensor in as_list(result)] == [(0, 12)] * len(form.outputs)
    run_into_guarded_outs(call)
    with pytest.raises(ValueError, match=r"k_pe: expected .*, got shape \[0, 63\]"):
        call.run(k_pe=torch.empty(0, 63, dtype=BF16, device=device))


@each_form_with_a_cache
def test_case49_no_tokens_whatever_the_cache(device: str, form: Form) -> None:
    """Engines run their model for nobody before they allocate a cache, which is none on the CPU."""
    call = form.make(0, 12, rope=True, device=device)
    for cache in (torch.tensor([]), torch.empty(2, 3, dtype=torch.int16, device=device)):
        for result in (call.run(kv_cache=cache), call.run(kv_cache=cache)):
            assert [t.shape[:2] for t in as_list(result)] == [(0, 12)] * len(form.outputs)
        assert "no tokens" in call.explain(kv_cache=cache).reason or device == "cpu"
    with pytest.raises(TypeError, match="kv_cache: expected a tensor"):
        call.run(kv_cache=None)
    with pytest.raises((TypeError, ValueError), match="kv_cache: expected"):
        form.make(1, 12, device=device).run(kv_cache=torch.tensor([]))


@pytest.mark.parametrize("name", ["decode-ds_mla", "ds_mla"])
def test_case49_a_cache_of_656_bytes_typed_as_float8(device: str, name: str) -> None:
    call = FORMS[name].make(9, 3, rope=True, device=device)
    before = call.snapshot()
    typed = call.cache.tensor.view(E4M3)
    result = call.run(kv_cache=typed)
    call.check(before, result)


@each_form_with_a_cache
def test_a_cache_without_blocks_takes_no_rows(device: str, form: Form) -> None:
    run_and_check(form.make(3, 2, num_blocks=0, slots=[0, -1, 5], device=device))


def test_more_than_65535_rows(device: str) -> None:
    for form in FORMS.values() if device == "cuda" else (FORMS["decode"],):
        run_and_check(form.make(700, 96, block_size=64, device=device))


# Slots


@each_form_with_a_cache
def test_case07_negative_slots_are_padding(device: str, form: Form) -> None:
    for slot_dtype in INDEX_TYPES:
        smallest = torch.iinfo(slot_dtype).min
        for slots in (
            [5, -1, 17, -1, -1, 0, -1, 63],
            [-1] * 8,
            [-2, smallest, -(2**31), -64, 9, -16, -65, 62],
        ):
            run_and_check(
                form.make(8, 2, num_blocks=4, slots=slots, slot_dtype=slot_dtype, device=device)
            )


@each_form_with_a_cache
def test_case08_slots_past_the_end_are_skipped(device: str, form: Form) -> None:
    for block_size in (1, 16, 24):
        end = 4 * block_size
        slots = [end - 1, end, end + 1, 2**31, 2**31 - 1, 2**32 + 1, 2**62, 2**63 - 1]
        run_and_check(
            form.make(8, 2, block_size=block_size, num_blocks=4, slots=slots, device=device)
        )
    slots = [63, 64, 2**31 - 1, -(2**31)]
    run_and_check(form.make(4, 2, num_blocks=4, slots=slots, slot_dtype=torch.int32, device=device))


@each_form_with_a_cache
def test_case08_slots_that_agree_in_their_lower_half(device: str, form: Form) -> None:
    """9 and 9 + 2^32: the second is past the cache and must not displace the first."""
    slots = [9, 9 + 2**32, 5, 5 - 2**32, 7, 7 + 2**63 - 2**32, 3, -1]
    run_and_check(form.make(8, 1, num_blocks=1, slots=slots, device=device))


@each_form_with_a_cache
def test_case09_only_the_first_entries_are_read(device: str, form: Form) -> None:
    """Entries past the token count name good slots, which must stay untouched."""
    slots = torch.arange(40) * 3 % 80
    for slot_dtype, tokens, count in itertools.product(INDEX_TYPES, (0, 16), (17, 40)):
        call = form.make(
            tokens, 2, num_blocks=5, rope=True, slots=slots[:count], slot_dtype=slot_dtype,
            device=device,
        )  # fmt: skip
        longer = torch.cat((call.args["positions"], call.args["positions"][:3]))
        run_and_check(call.given(positions=longer))


@each_form_with_a_cache
def test_case10_slots_as_a_column(device: str, form: Form) -> None:
    for slot_dtype in INDEX_TYPES:
        table = torch.full((20, 4), 7, dtype=slot_dtype)
        table[:, 2] = torch.randperm(80, generator=torch.Generator().manual_seed(1))[:20]
        call = form.make(20, 2, num_blocks=5, device=device)
        run_and_check(call.given(slot_mapping=table.to(device)[:, 2]))


@each_form_with_a_cache
def test_permuted_slots_in_a_permuted_cache(device: str, form: Form) -> None:
    run_and_check(form.make(65, 3, slots=torch.arange(64, -1, -1), num_blocks=5, device=device))


@each_form_with_a_cache
def test_padding_tokens_get_their_rows_too(device: str, form: Form) -> None:
    """Queries and keys of tokens without a slot; q is turned as well."""
    run_and_check(form.make(20, 3, rope=True, slots=[-1] * 20, device=device))


# Outputs


@each_form
def test_out_is_filled_and_returned(device: str, form: Form) -> None:
    run_into_guarded_outs(form.make(17, 3, rope=True, device=device))


@pytest.mark.parametrize("name", ["decode-fp8", "fp8", "concat_fp8"])
def test_fp8_outs_may_be_passed_as_bytes(device: str, name: str) -> None:
    call = FORMS[name].make(9, 3, device=device)
    boxes = poisoned_outs(call, as_bytes=True)
    before = [box.snapshot() for box in boxes]
    given = [box.tensor for box in boxes]
    result = call.run(out=as_out(given))
    assert all(a is b for a, b in zip(as_list(result), given, strict=True))
    call.check_outputs(as_out([tensor.view(E4M3) for tensor in given]))
    for box, saved in zip(boxes, before, strict=True):
        check_guards(box, saved)


@each_form
def test_each_call_returns_fresh_memory(device: str, form: Form) -> None:
    call = form.make(4, 3, device=device)
    results = [call.run() for _ in range(2)]
    flat = [tensor for result in results for tensor in as_list(result)]
    assert len({t.data_ptr() for t in flat}) == 2 * len(form.outputs)
    call.check_outputs(results[0])


def test_the_inputs_may_alias_each_other(device: str) -> None:
    """Reading one buffer through several arguments is fine; only outputs must not overlap."""
    call = make_decode(6, 1, device=device)
    shared = call.args["ql_nope"][:, 0]
    run_and_check(call.given(kv_c_normed=shared, k_pe=shared[:, 64:128]))
    call = make_prefill("concat_fp8", 6, 1, device=device)
    shared = call.args["k_nope"]
    run_and_check(call.given(v=shared, k_pe=shared[:, 0, 64:]))
    call = make_prefill("fp8", 6, 1, device=device)
    q = call.args["q"]
    run_and_check(call.given(q=q, k_nope=q[..., :128], v=q[..., 64:], k_pe=q[:, 0, 128:]))


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
        for form in FORMS.values():
            run_and_check(form.make(tokens, heads, dtype=dtype, rope=rope, device=device))


def test_threads_share_the_operations(device: str) -> None:
    forms = list(FORMS.values())

    def work(seed: int) -> None:
        for tokens in (1, 7, 7, 16):
            form = forms[seed % len(forms)]
            run_and_check(form.make(tokens, 3, device=device, seed=seed))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(2 * len(forms))))


# Names and arguments


@pytest.mark.parametrize("kind", ["decode", *KINDS])
def test_positional_arguments_are_vllms(kind: str) -> None:
    """Everything else is a keyword."""
    form = FORMS[kind]
    call = form.make(2, 1, rope=kind != "decode")
    before = call.snapshot()
    given = [call.args[name] for name in POSITIONAL[kind]]
    call.check(before, call.operation(*given))
    with pytest.raises(TypeError):
        call.operation(*given, None)
    if kind != "decode":
        assert k3cupy.explain_mla_prefill(NAMES[kind], *given) == call.explain()
        assert k3cupy.explain_mla_prefill(getattr(k3cupy, NAMES[kind]), *given) == call.explain()


@pytest.mark.parametrize("kind", ["decode", *KINDS])
def test_explanations_for_a_gpu_that_is_not_here(kind: str) -> None:
    told = FORMS[kind].make(2, 1).explain(gpu="h200")
    assert told.runs_on == "cuda"
    assert told.config is not None and told.name_expression
    assert told.origin == "shipped" and "measured on NVIDIA H200" in told.reason
    elsewhere = FORMS[kind].make(2, 1).explain(gpu="sm_80")
    assert "NVIDIA A100" in elsewhere.reason and not elsewhere.pdl
    with pytest.raises(k3cupy.ToolchainError, match=f"^{TOO_OLD}"):
        FORMS[kind].make(2, 1).explain(gpu=T4)
    assert FORMS[kind].make(0, 1).explain(gpu=T4).reason == "no tokens: nothing is launched"


def test_every_operation_is_tested() -> None:
    assert set(NAMES) == set(INPUTS) == set(OUTPUTS) == {form.kind for form in FORMS.values()}
    for name in NAMES.values():
        assert name in k3cupy.__all__
        assert callable(getattr(k3cupy, name))


# Processes


def _fork_then_read_to_the_end() -> None:
    """An import loads no driver and a forked child works; then no byte past an input is read."""
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    assert "libcuda.so" not in loaded, "an import of k3cupy loaded the driver"
    child = os.fork()
    if child == 0:
        try:
            run_and_check(make_decode(3, 2))
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    run_and_check(make_decode(3, 2))
    print("forked")

    for form in FORMS.values():
        call = form.make(16, 3, rope=True, scale_tensors=True)
        args = {
            name: before_a_forbidden_page(value)
            for name, value in call.args.items()
            if isinstance(value, torch.Tensor) and name not in call.boxes
        }
        if "positions" in args:
            args["positions"].copy_(torch.arange(16) * 1000 - 3000)
        run_and_check(call.given(**args))
        print(form, flush=True)
    os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, forks, protects pages")
def test_case09_case12_a_fork_works_and_nothing_is_read_past_an_allocation() -> None:
    assert run_child(_fork_then_read_to_the_end).split() == ["forked", *FORMS]


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


def spoil_output(call: MlaCall, result: Any) -> None:
    oracle.bits(as_list(result)[-1])[0, 0, 5] ^= 1


def spoil_rotated_output(call: MlaCall, result: Any) -> None:
    oracle.bits(as_list(result)[0])[0, 0, -5] += 3


def spoil_guard(call: MlaCall, result: Any) -> None:
    call.cache.storage[7] += 1


def spoil_row(call: MlaCall, result: Any) -> None:
    oracle.bits(call.cache.tensor)[0, 3, 100] ^= 1


def spoil_query(call: MlaCall, result: Any) -> None:
    if "q" in call.boxes:
        oracle.bits(call.args["q"])[1, 0, 127] ^= 1
    else:
        oracle.bits(as_list(result)[0])[1, 0, 127] ^= 1


def spoil_rotated_query(call: MlaCall, result: Any) -> None:
    if "q" in call.boxes:
        oracle.bits(call.args["q"])[1, 0, 140] += 3
    else:
        oracle.bits(as_list(result)[0])[1, 0, 512] += 3


@pytest.mark.parametrize(
    "spoil",
    [spoil_output, spoil_rotated_output, spoil_guard, spoil_row, spoil_query, spoil_rotated_query],
)
@each_form_with_a_cache
def test_the_judge_notices(form: Form, spoil: Any) -> None:
    """One changed byte of an output, of the cache's row or around it, or of the query."""
    call = form.make(2, 1, rope=True, slots=[3, 4])
    before = call.snapshot()
    result = call.run()
    call.check(before, result)
    spoil(call, result)
    with pytest.raises(AssertionError):
        call.check(before, result)


def test_the_judge_notices_a_swapped_pair() -> None:
    call = make_prefill("concat_fp8", 2, 1)
    k8, v8 = call.run()
    with pytest.raises(AssertionError):
        call.check({}, as_out([v8, k8]))
