"""The MLA decode epilogue on a GPU: mappings, huge tensors, threads, processes and devices."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from helpers import (
    BF16,
    CACHE_KINDS,
    FP16,
    Call,
    exactly,
    guarded,
    make_call,
    op,
    random_values,
    refused,
    rope_table,
    run_and_check,
    run_child,
)
from memory_helpers import before_unmapped_gpu_memory, gibibytes
from toolchain_helpers import MAPPINGS

import k3cupy

pytestmark = pytest.mark.gpu

FORMATS = [(False, kind) for kind in CACHE_KINDS] + [(True, "same"), (True, "uint8")]
# (split, threads a block, chunks a thread): 72 chunks a row over whole rows, 32 lanes or 96.
CONFIGS = [
    (0, 144, 1),
    (0, 288, 1),
    (0, 576, 1),
    (0, 144, 2),
    (0, 288, 2),
    (1, 128, 3),
    (1, 256, 3),
    (1, 256, 6),
    (3, 192, 1),
    (3, 256, 1),
]


def results(call: Call, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of the output and of the cache's allocation, the latter put back afterwards."""
    saved = call.cache.storage.clone()
    mqa_q = oracle.bits(call.run(**settings))
    after = call.cache.snapshot()
    call.cache.storage.copy_(saved)
    return mqa_q, after


def assert_same_results(call: Call, variants: list[dict[str, Any]]) -> None:
    first = results(call, **variants[0])
    for variant in variants[1:]:
        for got, want, what in zip(
            results(call, **variant), first, ("mqa_q", "cache"), strict=True
        ):
            oracle.assert_same_bits(got, want, f"{what} with {variant}")


# Mappings


@pytest.mark.parametrize("rope", [False, True], ids=["copy", "rope"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_split_gives_the_same_bits(fmt: tuple[bool, str], rope: bool) -> None:
    q_fp8, kind = fmt
    for tokens, heads in ((1, 12), (65, 3), (130, 12)):
        call = make_call(
            tokens, heads, q_fp8=q_fp8, cache=kind, rope=rope, any_bits=not rope, device="cuda"
        )
        assert_same_results(call, [{"config": config} for config in MAPPINGS])
        for config in MAPPINGS:
            run_and_check(call, config=config)


def test_every_split_on_rows_that_are_not_aligned() -> None:
    for kind in ("same", "ds_mla"):
        call = make_call(33, 5, cache=kind, rope=True, device="cuda")
        odd = guarded(call.kv_c_normed.cpu(), "cuda", strides=(513, 1), shift=2)
        call = call.with_tensors(kv_c_normed=odd)
        assert_same_results(call, [{"config": config} for config in MAPPINGS])
        run_and_check(call)


def test_every_split_in_fp16() -> None:
    call = make_call(33, 5, dtype=FP16, cache="ds_mla", rope=True, device="cuda")
    assert_same_results(call, [{"config": config} for config in MAPPINGS])
    run_and_check(call)


@pytest.mark.parametrize("kind", ["same", "ds_mla"])
def test_explicit_configurations_give_the_same_bits(kind: str) -> None:
    call = make_call(70, 7, cache=kind, rope=True, device="cuda")
    configs = [k3cupy.MlaDecodeConfig(*fields) for fields in CONFIGS]
    for config in configs:
        assert k3cupy.explain_mla_decode(**call.arguments(), config=config).config == config
    assert_same_results(call, [{}, *({"config": config} for config in configs)])


@pytest.mark.parametrize("tokens", [2, 120, 129, 256, 257, 700, 1500])
def test_every_configuration_settles_duplicates_alike(tokens: int) -> None:
    """Whole rows of the last tokens, however many rows a block has: blocks of 2 to 32 warps."""
    slots = torch.randint(-3, tokens, (tokens,), generator=torch.Generator().manual_seed(tokens))
    call = make_call(tokens, 1, num_blocks=1 + tokens // 16, slots=slots, device="cuda")
    more = [(0, 72, 4), (0, 936, 1), (1, 32, 3), (1, 64, 6), (1, 1024, 3)]
    configs = [k3cupy.MlaDecodeConfig(*fields) for fields in (*CONFIGS, *more)]
    assert_same_results(call, [{"config": config} for config in configs])
    for ready in (False, True):
        run_and_check(call, kv_inputs_ready=ready)


def test_pdl_and_promises_do_not_change_the_bits() -> None:
    call = make_call(65, 3, cache="fp8", q_fp8=True, rope=True, scale_tensors=True, device="cuda")
    torch.cuda.synchronize()
    variants = [
        {"pdl": pdl, "kv_inputs_ready": ready}
        for pdl, ready in itertools.product((None, False, True), (False, True))
        if pdl is not True or torch.cuda.get_device_capability()[0] >= 9
    ]
    assert_same_results(call, variants)


def test_gpu_and_cpu_give_the_same_copies_and_casts() -> None:
    for q_fp8, kind in FORMATS:
        call = make_call(17, 3, q_fp8=q_fp8, cache=kind, any_bits=True)
        on_gpu = call.on("cuda")
        for got, want in zip(results(on_gpu), results(call), strict=True):
            oracle.assert_same_bits(got, want, f"GPU against CPU, {kind}")


def test_the_decision_is_readable() -> None:
    call = make_call(4, 2, device="cuda")
    decision = k3cupy.explain_mla_decode(**call.arguments())
    assert (decision.kernel, decision.runs_on) == ("mla_decode", "cuda")
    assert decision.config is not None
    assert decision.name_expression is not None
    assert "mla_decode_epilogue<" in decision.name_expression
    assert decision.pdl == (torch.cuda.get_device_capability()[0] >= 9)
    assert not k3cupy.explain_mla_decode(**call.arguments(), pdl=False).pdl
    for config in MAPPINGS:
        chosen = k3cupy.explain_mla_decode(**call.arguments(), config=config).config
        assert chosen is not None
        assert chosen == config


# Huge tensors


@gibibytes(5)
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_cache_of_more_than_2_31_elements(kind: str, needs_memory: None) -> None:
    call = make_call(5, 2, cache=kind, device="cuda")
    width = call.cache.shape[2]
    blocks = 2**31 // (64 * width) + 1000
    capacity = blocks * 64
    cache = torch.zeros(blocks, 64, width, dtype=call.cache.dtype, device="cuda")
    assert cache.numel() > 2**31
    middle = 2**31 // width + 1
    slots = torch.tensor([capacity - 1, 5, capacity, middle, -1], device="cuda")
    call.check_query(call.run(kv_cache=cache, slot_mapping=slots))
    want = call.expected_rows().bits
    rows = cache.view(want.dtype).view(capacity, width)
    for token, slot in ((0, capacity - 1), (1, 5), (3, middle)):
        oracle.assert_same_bits(rows[slot].cpu(), want[token], f"row {slot}")
        rows[slot] = 0
    assert torch.count_nonzero(rows.view(torch.int64)) == 0, "bytes of other rows were written"


FAR = [2**29 + 80, 2**31 + 80]
"""Elements: a product of such a stride and an index passes 4 GiB, and the stride itself does."""


@gibibytes(9)
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("axis", [0, 1], ids=["blocks", "tokens"])
def test_cache_strides_past_2_31(axis: int, far: int, needs_memory: None) -> None:
    """Few blocks of few tokens, very far apart along one axis."""
    count = 2 if far > 2**31 else 6
    shape = (count, 2, 576) if axis == 0 else (2, count, 576)
    strides = (far, 640, 1) if axis == 0 else (640, far, 1)
    buffer = torch.zeros((count - 1) * far + 4096, dtype=BF16, device="cuda")
    cache = buffer.as_strided(shape, strides)
    call = make_call(3, 2, device="cuda")
    slots = torch.tensor([2 * count - 1, -1, 1], device="cuda")
    call.check_query(call.run(kv_cache=cache, slot_mapping=slots))
    want = call.expected_rows().bits
    for token, slot in ((0, 2 * count - 1), (2, 1)):
        row = cache[slot // shape[1], slot % shape[1]]
        oracle.assert_same_bits(oracle.bits(row), want[token], f"row {slot}")
        row.zero_()
    assert torch.count_nonzero(buffer) == 0, "bytes of other rows were written"


@gibibytes(9)
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", ["ql_nope", "q_pe", "kv_c_normed", "k_pe"])
def test_input_strides_past_2_31(name: str, far: int, needs_memory: None) -> None:
    call = make_call(2 if far > 2**31 else 6, 2, device="cuda")
    tensor = getattr(call, name)
    buffer = torch.empty((call.tokens - 1) * far + 2048, dtype=BF16, device="cuda")
    wide = buffer.as_strided(tensor.shape, (far, *tensor.stride()[1:]))
    wide.copy_(tensor)
    run_and_check(call.with_tensors(**{name: wide}))


@gibibytes(9)
@pytest.mark.parametrize("far", FAR)
def test_head_strides_past_2_31(far: int, needs_memory: None) -> None:
    """The transposed matmul of very many tokens, reduced to a few of them."""
    call = make_call(3, 2 if far > 2**31 else 6, device="cuda")
    heads = call.ql_nope.shape[1]
    buffer = torch.empty((heads - 1) * far + 2048, dtype=BF16, device="cuda")
    wide = buffer.as_strided(call.ql_nope.shape, (512, far, 1))
    wide.copy_(call.ql_nope)
    run_and_check(call.with_tensors(ql_nope=wide))


@gibibytes(16)
def test_output_of_more_than_2_31_elements(needs_memory: None) -> None:
    tokens, heads = 48_000, 96
    ql_nope = torch.randint(0, 2**15, (tokens, heads, 512), dtype=torch.int16, device="cuda")
    q_pe = torch.randint(0, 2**15, (tokens, heads, 64), dtype=torch.int16, device="cuda")
    kv_c = torch.zeros(tokens, 512, dtype=BF16, device="cuda")
    cache = torch.ones(2, 16, 576, dtype=BF16, device="cuda")
    slots = torch.full((tokens,), -1, device="cuda")
    mqa_q = op(ql_nope.view(BF16), q_pe.view(BF16), kv_c, kv_c[:, :64], cache, slots)
    assert mqa_q.numel() > 2**31
    got = mqa_q.view(torch.int16)
    for start in range(0, tokens, 4000):
        part = slice(start, start + 4000)
        assert torch.equal(got[part, :, :512], ql_nope[part])
        assert torch.equal(got[part, :, 512:], q_pe[part])
    assert (cache == 1).all()


# The ends of allocations, in a child: a stray read is a fault


def _reads_nothing_past_device_allocations(q_fp8: bool, kind: str) -> None:
    call = make_call(16, 3, rope=True, q_fp8=q_fp8, cache=kind, scale_tensors=True, device="cuda")
    for name in ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping"):
        setattr(call, name, before_unmapped_gpu_memory(getattr(call, name)))
    call.options = {
        key: before_unmapped_gpu_memory(value) if isinstance(value, torch.Tensor) else value
        for key, value in call.options.items()
    }
    call.options["positions"].copy_(torch.arange(16) * 2**40 - 2**42)
    for config in MAPPINGS:
        run_and_check(call, config=config)
    torch.cuda.synchronize()
    os._exit(0)


@pytest.mark.parametrize(("q_fp8", "kind"), [(False, "same"), (True, "fp8")], ids=["copy", "fp8"])
def test_case09_case12_nothing_is_read_past_an_allocation(q_fp8: bool, kind: str) -> None:
    run_child(_reads_nothing_past_device_allocations, q_fp8, kind)


def _ignores_wild_slots() -> None:
    for kind in CACHE_KINDS:
        slots = [2**62, -(2**63), 2**31, 2**40 + 3, 2**63 - 1, -2, 31, 32]
        call = make_call(8, 2, cache=kind, rope=True, num_blocks=2, slots=slots, device="cuda")
        call.options["positions"].copy_(torch.tensor([2**62, -(2**63), 2**31, -1, 0, 127, 128, 5]))
        for config in MAPPINGS:
            run_and_check(call, config=config)
    torch.cuda.synchronize()


def test_case08_case12_wild_values_in_a_child() -> None:
    run_child(_ignores_wild_slots)


# Threads and processes


def _threads_from_cold() -> None:
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for tokens in (1, 65, 65):
                call = make_call(tokens, 3, cache="fp8", q_fp8=True, device="cuda", seed=seed)
                run_and_check(call)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_threads_that_all_need_the_same_cold_kernel(tmp_path: Path) -> None:
    run_child(_threads_from_cold, env={"CUPY_CACHE_DIR": str(tmp_path)})


def _fork_after_import() -> None:
    child = os.fork()
    if child == 0:
        run_and_check(make_call(3, 2, device="cuda"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the forked child could not use the GPU"


def test_a_forked_child_can_use_the_gpu_after_the_import() -> None:
    run_child(_fork_after_import)


# Devices

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_the_current_device_stays() -> None:
    before = torch.cuda.current_device()
    call = make_call(4, 2, device="cuda")
    run_and_check(call)
    refused(
        {**call.arguments(), "k_pe": call.k_pe[:, :63]},
        "k_pe",
        exactly("shape [4, 63]"),
        box=call.cache,
    )
    assert torch.cuda.current_device() == before


@two_gpus
def test_case19_tensors_on_a_device_that_is_not_current() -> None:
    calls = [make_call(9, 3, rope=True, device=f"cuda:{i}", seed=i) for i in (1, 0)]
    with torch.cuda.device(0):
        for _ in range(25):
            for call in calls:
                run_and_check(call)
                assert torch.cuda.current_device() == 0
        wrong = {**calls[0].arguments(), "k_pe": calls[0].k_pe[:, :63]}
        refused(wrong, "k_pe", exactly("shape [9, 63]"), box=calls[0].cache)
        assert torch.cuda.current_device() == 0


@two_gpus
def test_case19_two_threads_on_two_devices() -> None:
    def work(index: int) -> None:
        for seed in range(25):
            run_and_check(make_call(9, 3, device=f"cuda:{index}", seed=seed))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))


@two_gpus
@pytest.mark.parametrize(
    "name", ["q_pe", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "positions",
             "cos_sin_cache", "q_scale_inv", "cache_scale_inv"],
)  # fmt: skip
def test_case19_mixed_devices_are_refused(name: str) -> None:
    call = make_call(9, 3, q_fp8=True, cache="fp8", rope=True, scale_tensors=True, device="cuda:0")
    arguments = {**call.arguments(), name: call.arguments()[name].to("cuda:1")}
    refused(arguments, name, exactly("device cuda:1"), box=call.cache)


# The real layer, once, at its real width


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_the_real_layer_at_512_tokens(kind: str) -> None:
    tokens, heads = 512, 12
    call = make_call(
        tokens, heads, cache=kind, q_fp8=kind == "fp8", rope=True, block_size=64, device="cuda"
    )
    matmul = random_values((heads, tokens, 512), BF16, 1).cuda()
    q = random_values((tokens, heads, 192), BF16, 2).cuda()
    gemm = random_values((tokens, 2112), BF16, 3).cuda()
    call.options["cos_sin_cache"] = rope_table(128).cuda()
    run_and_check(
        call.with_tensors(
            ql_nope=matmul.transpose(0, 1), q_pe=q[..., 128:], k_pe=gemm[:, None, 2048:]
        )
    )
