"""The MLA decode epilogue: strides, slices, offsets and odd addresses, NaN around each input."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from helpers import (
    BF16,
    CACHE_KINDS,
    FP16,
    Call,
    Guarded,
    cache_dtype,
    guarded,
    make_call,
    poisoned_out,
    random_values,
    run_and_check,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import k3cupy

INPUTS = ("ql_nope", "q_pe", "kv_c_normed", "k_pe")


def row_stride(call: Call, name: str, stride: int, device: str, shift: int = 0) -> Call:
    """The same call with one input's rows `stride` elements apart, NaN in between."""
    tensor = getattr(call, name).cpu()
    strides = (stride, 1)
    if tensor.ndim == 3:
        strides = (stride * tensor.shape[1], stride, 1)
    return call.with_tensors(**{name: guarded(tensor, device, strides=strides, shift=shift)})


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_case11_the_real_models_layouts(device: str, kind: str) -> None:
    """Transposed batched matmul, a slice of q, a column slice of a GEMM output, [B, 1, 64]."""
    tokens, heads = 17, 12
    for dtype in (BF16, FP16):
        call = make_call(
            tokens, heads, dtype=dtype, cache=kind, q_fp8=kind == "fp8", rope=True, device=device
        )
        matmul = random_values((heads, tokens, 512), dtype, 1).to(device)
        q = random_values((tokens, heads, 192), dtype, 2).to(device)
        gemm = random_values((tokens, 2112), dtype, 3).to(device)
        q[..., :128] = gemm[:, : 2112 - 64] = float("nan")
        call = call.with_tensors(ql_nope=matmul.transpose(0, 1), q_pe=q[..., 128:])
        run_and_check(call.with_tensors(k_pe=gemm[:, 2048:]))
        run_and_check(call.with_tensors(k_pe=gemm[:, None, 2048:]))


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_k_pe_of_two_and_three_dimensions(device: str, tokens: int) -> None:
    call = make_call(tokens, 2, rope=True, device=device)
    run_and_check(call)
    run_and_check(call.with_tensors(k_pe=call.k_pe[:, None]))


@pytest.mark.parametrize("name", INPUTS)
def test_case02_free_row_strides(device: str, name: str) -> None:
    width = 64 if name in ("q_pe", "k_pe") else 512
    call = make_call(8, 3, device=device)
    for stride in (width + 1, width + 4, width + 8, width + 63, 7175):
        run_and_check(row_stride(call, name, stride, device))


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_all_rows_odd_at_once(device: str, kind: str) -> None:
    call = make_call(9, 3, cache=kind, q_fp8=kind == "fp8", rope=True, device=device)
    for name, stride in (("ql_nope", 513), ("q_pe", 65), ("kv_c_normed", 577), ("k_pe", 65)):
        call = row_stride(call, name, stride, device, shift=2)
    run_and_check(call)


@pytest.mark.parametrize("shift", [2, 4, 8, 14])
@pytest.mark.parametrize("name", INPUTS)
def test_case03_bases_off_by_a_few_bytes(device: str, name: str, shift: int) -> None:
    for kind in ("same", "fp8"):
        call = make_call(8, 3, cache=kind, q_fp8=kind == "fp8", rope=True, device=device)
        moved = guarded(getattr(call, name).cpu(), device, shift=shift)
        call = call.with_tensors(**{name: moved})
        assert moved.data_ptr() % 16 == shift
        run_and_check(call)


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_case03_misaligned_cache(device: str, kind: str) -> None:
    for shift in (1, 2, 4, 8) if kind in ("uint8", "ds_mla") else (2, 4, 8):
        call = make_call(8, 3, cache=kind, device=device, cache_layout={"shift": shift})
        run_and_check(call)


@pytest.mark.parametrize("q_fp8", [False, True], ids=["q16", "q8"])
def test_case03_misaligned_out(device: str, q_fp8: bool) -> None:
    for shift in (1, 2, 4, 8) if q_fp8 else (2, 4, 8):
        call = make_call(8, 3, q_fp8=q_fp8, device=device)
        out = poisoned_out(call, shift=shift)
        before = out.snapshot()
        run_and_check(call, out=out.tensor)
        oracle.bits(out.view_of(before)).copy_(oracle.bits(out.tensor))
        oracle.assert_same_bits(out.snapshot(), before, "guard bands of out")


def test_case03_slices_of_a_wider_buffer(device: str) -> None:
    """The literal inputs of the public failures, one token and several."""
    for tokens in (1, 4):
        wide = random_values((tokens, 6289), BF16, 1).to(device)
        call = make_call(tokens, 1, device=device)
        run_and_check(call.with_tensors(kv_c_normed=wide[:, 5633:6145], k_pe=wide[:, 6145:6209]))
        run_and_check(call.with_tensors(ql_nope=wide[:, None, 5632:6144], q_pe=wide[:, None, 6:70]))


def test_case01_slices_after_a_dlpack_round_trip(device: str) -> None:
    """A round trip rewrites the strides of size-1 dimensions."""
    for tokens in (1, 4):
        wide = random_values((tokens, 6288), BF16, 1).to(device)
        call = make_call(tokens, 1, device=device)
        slices = {
            "ql_nope": wide[:, None, 1024:1536],
            "q_pe": wide[:, None, 64:128],
            "kv_c_normed": wide[:, 5632:6144],
            "k_pe": wide[:, 6144:6208],
        }
        run_and_check(call.with_tensors(**slices))
        run_and_check(
            call.with_tensors(**{name: torch.from_dlpack(t) for name, t in slices.items()})
        )


@pytest.mark.parametrize("stride", [0, 1, 3, 10**9])
def test_case01_strides_of_size_one_dimensions(device: str, stride: int) -> None:
    """With one token (or one head) the stride says nothing and may be anything."""
    call = make_call(1, 1, device=device, num_blocks=1, block_size=1, slots=[0])
    for name in INPUTS:
        tensor = getattr(call, name)
        odd = tensor.as_strided(tensor.shape, (stride,) * (tensor.ndim - 1) + (1,))
        call = call.with_tensors(**{name: odd})
    k_pe = call.k_pe.as_strided((1, 1, 64), (stride, 7, 1))
    call = call.with_tensors(k_pe=k_pe, slot_mapping=call.slot_mapping.as_strided((1,), (stride,)))
    row = call.cache.tensor
    assert row.shape[:2] == (1, 1)
    out = torch.zeros(576, dtype=BF16, device=device)
    mqa_q = call.run(
        kv_cache=row.as_strided(row.shape, (stride, 5, 1)),
        out=out.as_strided((1, 1, 576), (7, stride, 1)),
    )
    call.check_query(mqa_q.as_strided((1, 1, 576), (576, 576, 1)))
    oracle.assert_same_bits(
        oracle.bits(row)[0],
        call.expected_rows().bits,
        "cache with odd strides of size-1 dimensions",
    )


def test_k_pe_middle_dimension_of_any_stride(device: str) -> None:
    call = make_call(6, 2, device=device)
    for stride in (0, 1, 64, 999):
        run_and_check(call.with_tensors(k_pe=call.k_pe.as_strided((6, 1, 64), (64, stride, 1))))


def test_expanded_inputs(device: str) -> None:
    """Row stride 0: every token reads the same row."""
    call = make_call(6, 4, rope=True, device=device)
    run_and_check(
        call.with_tensors(
            ql_nope=call.ql_nope[:, :1].expand(6, 4, 512),
            q_pe=call.q_pe[:1].expand(6, 4, 64),
            kv_c_normed=call.kv_c_normed[:1].expand(6, 512),
            k_pe=call.k_pe[:1].expand(6, 64),
        )
    )


def test_overlapping_rows_of_an_input(device: str) -> None:
    """Rows one element apart: a sliding window over one buffer."""
    buffer = random_values((4096,), BF16, 3).to(device)
    call = make_call(6, 2, device=device)
    run_and_check(
        call.with_tensors(
            kv_c_normed=buffer.as_strided((6, 512), (1, 1)),
            ql_nope=buffer.as_strided((6, 2, 512), (8, 3, 1), 11),
        )
    )


# The cache


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_cache_with_gaps_between_rows_and_blocks(device: str, kind: str, block_size: int) -> None:
    width = 656 if kind == "ds_mla" else 576
    for extra in (1, 8, 64):
        token_stride = width + extra
        strides = (token_stride * block_size + 3 * extra, token_stride, 1)
        call = make_call(
            21,
            2,
            cache=kind,
            block_size=block_size,
            device=device,
            cache_layout={"strides": strides},
        )
        run_and_check(call)


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_case22_cache_is_one_layer_of_a_larger_tensor(device: str, kind: str) -> None:
    """[num_blocks, layers, block_size, width][:, 1]; the other layers stay as they are."""
    width = 656 if kind == "ds_mla" else 576
    whole = Guarded((4, 3, 16, width), cache_dtype(kind, BF16), device)
    call = make_call(20, 2, cache=kind, num_blocks=4, device=device)
    layer = whole.tensor[:, 1]
    call.cache.tensor = layer
    call.cache.storage = whole.storage
    call.cache.strides = layer.stride()
    call.cache.offset = layer.storage_offset()
    run_and_check(call)


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_cache_seen_transposed(device: str, kind: str) -> None:
    """Blocks inside, tokens outside: the block stride is the smaller one."""
    width = 656 if kind == "ds_mla" else 576
    call = make_call(
        20,
        2,
        cache=kind,
        num_blocks=5,
        device=device,
        cache_layout={"strides": (width, 5 * width, 1)},
    )
    run_and_check(call)


def test_case02_guards_around_every_output_of_every_format(device: str) -> None:
    """Both outputs in one allocation, back to back, each intact outside its own bytes."""
    for kind in CACHE_KINDS:
        call = make_call(
            7, 2, cache=kind, num_blocks=1, slots=[15, 0, 1, 14, -1, 3, 16], device=device
        )
        whole = Guarded((2**16,), torch.uint8, device)
        width = call.cache.shape[2] * call.cache.tensor.element_size()
        rows = whole.tensor[: 16 * width]
        call.cache.storage, call.cache.offset = whole.storage, 0
        call.cache.tensor = rows.view(call.cache.dtype).view(call.cache.shape)
        call.cache.offset = call.cache.tensor.storage_offset()
        out = whole.tensor[16 * width : 16 * width + 7 * 2 * 576 * 2].view(BF16).view(7, 2, 576)
        before = whole.snapshot()
        mqa_q = call.run(out=out)
        call.check_query(mqa_q)
        start = 256 + 16 * width
        before[start : start + out.numel() * 2] = whole.snapshot()[start : start + out.numel() * 2]
        call.check_cache(before)


def test_more_than_2_31_elements_on_the_cpu() -> None:
    """Lazily zeroed memory: only two rows of a 2.4 GB cache are ever touched."""
    np = pytest.importorskip("numpy")
    blocks = 2**31 // (64 * 576) + 100
    cache = torch.from_numpy(np.zeros((blocks, 64, 576), np.uint8))
    call = make_call(3, 2, cache="uint8")
    slots = torch.tensor([blocks * 64 - 1, 5, blocks * 64])
    call.run(kv_cache=cache, slot_mapping=slots)
    want = call.expected_rows().bits
    oracle.assert_same_bits(cache[-1, 63], want[0], "the last row")
    oracle.assert_same_bits(cache[0, 5], want[1], "row 5")
    assert not cache[-1, :63].any()
    assert not cache[0, 6:].any()


# The decision


def test_aligned_and_misaligned_rows_are_told_apart(device: str) -> None:
    call = make_call(8, 3, device=device)
    decision = k3cupy.explain_mla_decode(**call.arguments())
    assert decision.backend == ("reference" if device == "cpu" else "cuda")
    assert decision.reason
    assert "\n" not in str(decision)
    if device == "cuda":
        odd = row_stride(call, "kv_c_normed", 513, device)
        other = k3cupy.explain_mla_decode(**odd.arguments())
        assert other.name_expression != decision.name_expression
        assert "align" in other.reason
        assert "kv_c_normed" in other.reason


def test_explain_validates_and_writes_nothing(device: str) -> None:
    call = make_call(8, 3, device=device)
    before = call.cache.snapshot()
    k3cupy.explain_mla_decode(**call.arguments())
    oracle.assert_same_bits(call.cache.snapshot(), before, "cache after explain")
    with pytest.raises(ValueError, match="q_pe: expected"):
        k3cupy.explain_mla_decode(**{**call.arguments(), "q_pe": call.q_pe[..., :63]})


# Any layout at all


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """A shape, a stride and a byte offset for each tensor, and slots of every kind."""
    tokens, heads = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    blocks, block_size = draw(st.integers(0, 3)), draw(st.integers(1, 5))
    capacity = blocks * block_size
    inside = st.integers(0, max(capacity - 1, 0))
    outside = st.sampled_from([-1, -2, -(2**63), capacity, capacity + 1, 2**31, 2**40, 2**63 - 1])
    slots = draw(st.lists(st.one_of(inside, outside), min_size=tokens, max_size=tokens + 2))
    used: set[int] = set()
    for i, slot in enumerate(slots):
        if slot in used:
            slots[i] = -1
        used.add(slot)
    return {
        "tokens": tokens,
        "heads": heads,
        "blocks": blocks,
        "block_size": block_size,
        "slots": slots,
        "kind": draw(st.sampled_from(CACHE_KINDS)),
        "q_fp8": draw(st.booleans()),
        "rope": draw(st.booleans()),
        "dtype": draw(st.sampled_from([BF16, FP16])),
        "gaps": draw(st.lists(st.integers(0, 9), min_size=8, max_size=8)),
        "shifts": draw(st.lists(st.sampled_from([0, 2, 4, 6, 8]), min_size=5, max_size=5)),
        "heads_outside": draw(st.booleans()),
    }


@settings(max_examples=150, deadline=None)
@given(layout=layouts())
def test_any_shape_stride_and_slot(layout: dict[str, Any]) -> None:
    tokens, heads, gaps, shifts = (layout[k] for k in ("tokens", "heads", "gaps", "shifts"))
    kind, block_size = layout["kind"], layout["block_size"]
    token_stride = (656 if kind == "ds_mla" else 576) + gaps[0]
    call = make_call(
        tokens, heads, dtype=layout["dtype"], cache=kind, rope=layout["rope"],
        q_fp8=layout["q_fp8"] and kind != "ds_mla", block_size=block_size,
        num_blocks=layout["blocks"], slots=layout["slots"], any_bits=not layout["rope"],
        cache_layout={
            "strides": (token_stride * block_size + gaps[1], token_stride, 1),
            "shift": shifts[0],
        },
    )  # fmt: skip
    for name, gap, shift in zip(INPUTS, gaps[2:6], shifts[1:], strict=True):
        tensor = getattr(call, name).cpu()
        width = tensor.shape[-1] + gap
        strides = (width, 1)
        if tensor.ndim == 3:
            outside = (width + gaps[6], (width + gaps[6]) * tokens + gaps[7], 1)
            inside = (width * heads + gaps[7], width, 1)
            strides = outside if layout["heads_outside"] else inside
        call = call.with_tensors(**{name: guarded(tensor, strides=strides, shift=shift)})
    run_and_check(call)
