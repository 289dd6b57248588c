"""The prefill and context epilogues: strides, slices, offsets and odd addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from helpers import BF16, E4M3, FP16, Guarded, guarded, random_values
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_helpers import (
    INPUTS,
    INSERTS,
    KINDS,
    QK,
    MlaCall,
    as_halves,
    make_prefill,
    run_and_check,
    run_into_guarded_outs,
    width_of,
)

EACH_INPUT = [(kind, name) for kind in KINDS for name in INPUTS[kind]]
each_input = pytest.mark.parametrize(("kind", "name"), EACH_INPUT, ids=map("-".join, EACH_INPUT))


def laid_out(call: MlaCall, name: str, strides: Any = None, shift: int = 0) -> MlaCall:
    """The same call with one input elsewhere, NaN (around q: a pattern) in its gaps."""
    values = call.args[name].cpu()
    if name not in call.boxes:
        return call.given(**{name: guarded(values, call.device, strides=strides, shift=shift)})
    box = Guarded(values.shape, values.dtype, call.device, strides=strides, shift=shift)
    box.tensor.view(torch.int16).copy_(values.view(torch.int16))
    return call.boxed(**{name: box})


def rows_apart(call: MlaCall, name: str, stride: int, shift: int = 0) -> MlaCall:
    tensor = call.args[name]
    strides = (stride, 1) if tensor.ndim == 2 else (stride * tensor.shape[1], stride, 1)
    return laid_out(call, name, strides, shift)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_case11_the_real_models_layouts(device: str, kind: str, dtype: torch.dtype) -> None:
    """Halves of one GEMM output, a column slice of another, [T, 1, 64]."""
    tokens, heads = 17, 12
    call = make_prefill(kind, tokens, heads, dtype=dtype, rope=kind in INSERTS, device=device)
    gemm = random_values((tokens, 2112), dtype, 3).to(device)
    gemm[:, :2048] = float("nan")
    for k_pe in (gemm[:, 2048:], gemm[:, None, 2048:]):
        run_and_check(as_halves(call.given(k_pe=k_pe)))


@each_input
def test_case02_free_row_strides(device: str, kind: str, name: str) -> None:
    width = width_of(name)
    call = make_prefill(kind, 8, 3, rope=kind in INSERTS, device=device)
    for stride in (width + 1, width + 4, width + 8, 7175):
        run_and_check(rows_apart(call, name, stride))


@each_input
def test_heads_outside_of_tokens(device: str, kind: str, name: str) -> None:
    """[H, T, width] seen transposed: the head stride is the larger one."""
    call = make_prefill(kind, 9, 3, rope=kind in INSERTS, device=device)
    if call.args[name].ndim == 3:
        width = width_of(name)
        for gap in (0, 1, 8):
            run_and_check(laid_out(call, name, (width + gap, 9 * (width + gap) + 8 * gap, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_odd_at_once(device: str, kind: str) -> None:
    call = make_prefill(kind, 9, 3, rope=kind in INSERTS, device=device)
    for name in INPUTS[kind]:
        call = rows_apart(call, name, width_of(name) + 1, shift=2)
    run_and_check(call)
    run_into_guarded_outs(call, shift=2)


@each_input
def test_case03_bases_off_by_a_few_bytes(device: str, kind: str, name: str) -> None:
    for shift in (2, 4, 8, 14):
        call = make_prefill(kind, 8, 3, rope=kind in INSERTS, device=device)
        call = laid_out(call, name, shift=shift)
        assert call.args[name].data_ptr() % 16 == shift
        run_and_check(call)


@pytest.mark.parametrize("kind", KINDS)
def test_case03_misaligned_outs(device: str, kind: str) -> None:
    for shift in (1, 2, 4, 8) if kind in ("fp8", "concat_fp8") else (2, 4, 8):
        call = make_prefill(kind, 8, 3, rope=kind in INSERTS, device=device)
        run_into_guarded_outs(call, shift=shift)


@pytest.mark.parametrize("kind", ["fp8", "concat_fp8"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_case03_one_misaligned_out_of_several(device: str, kind: str, odd: int) -> None:
    call = make_prefill(kind, 8, 3, device=device)
    shapes = [(8, 3, 192), (8, 3, 128)] if kind == "concat_fp8" else [(8, 3, 192)] * 2
    shapes += [(8, 3, 128)] if kind == "fp8" else []
    boxes = [Guarded(shape, E4M3, device, shift=3 * (i == odd)) for i, shape in enumerate(shapes)]
    run_and_check(call, out=tuple(box.tensor for box in boxes))


@pytest.mark.parametrize("kind", INSERTS)
def test_case03_misaligned_cache(device: str, kind: str) -> None:
    for shift in (2, 4, 8) if kind == "insert" else (1, 2, 4, 8):
        run_and_check(make_prefill(kind, 8, 3, device=device, cache_layout={"shift": shift}))


def test_case03_slices_of_a_wider_buffer(device: str) -> None:
    """The literal inputs of the public failures, one token and several."""
    for tokens in (1, 4):
        wide = random_values((tokens, 6289), BF16, 1).to(device)
        call = make_prefill("concat_fp8", tokens, 1, device=device)
        for at in (6144, 6145):
            halves = {"k_nope": wide[:, None, at : at + 128], "v": wide[:, None, 5 : 5 + 128]}
            run_and_check(call.given(**halves, k_pe=wide[:, at - 64 : at]))
        call = make_prefill("insert", tokens, 1, device=device)
        run_and_check(call.given(kv_c_normed=wide[:, 5633:6145], k_pe=wide[:, None, 6145:6209]))


def test_case01_slices_after_a_dlpack_round_trip(device: str) -> None:
    """A round trip rewrites the strides of size-1 dimensions."""
    for tokens in (1, 4):
        wide = random_values((tokens, 6288), BF16, 1).to(device)
        slices = {
            "k_nope": wide[:, None, 6144:6272],
            "k_pe": wide[:, 6144:6208],
            "v": wide[:, None, 128:256],
        }
        call = make_prefill("concat_fp8", tokens, 1, device=device)
        run_and_check(call.given(**slices))
        run_and_check(call.given(**{k: torch.from_dlpack(t) for k, t in slices.items()}))


@pytest.mark.parametrize("stride", [0, 1, 3, 10**9])
def test_case01_strides_of_size_one_dimensions(device: str, stride: int) -> None:
    """With one token and one head the stride says nothing and may be anything."""
    for kind in KINDS:
        call = make_prefill(kind, 1, 1, device=device, num_blocks=1, block_size=1, slots=[0])
        for name in INPUTS[kind]:
            tensor = call.args[name]
            odd = tensor.as_strided(tensor.shape, (stride,) * (tensor.ndim - 1) + (1,))
            call.args[name] = odd
        if kind in INSERTS:
            call.args["slot_mapping"] = call.args["slot_mapping"].as_strided((1,), (stride,))
            cache = call.args["kv_cache"]
            call.args["kv_cache"] = cache.as_strided(cache.shape, (stride, 5, 1))
        run_and_check(call)
        call.args["k_pe"] = call.args["k_pe"].as_strided((1, 1, 64), (stride, 7, 1))
        run_and_check(call)


def test_case01_outs_with_odd_strides_of_size_one_dimensions(device: str) -> None:
    call = make_prefill("concat", 1, 1, device=device)
    out = torch.zeros(QK, dtype=BF16, device=device)
    assert call.run(out=out.as_strided((1, 1, QK), (7, 3, 1))) is not None
    call.check_outputs(out.view(1, 1, QK))


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_inputs(device: str, kind: str) -> None:
    """Row stride 0: every token, or every head, reads the same row."""
    call = make_prefill(kind, 6, 4, device=device)
    for name in INPUTS[kind]:
        tensor = call.args[name]
        run_and_check(call.given(**{name: tensor[:1].expand(tensor.shape)}))
        if tensor.ndim == 3:
            run_and_check(call.given(**{name: tensor[:, :1].expand(tensor.shape)}))


def test_overlapping_rows_of_an_input(device: str) -> None:
    """Rows one element apart: a sliding window over one buffer."""
    buffer = random_values((4096,), BF16, 3).to(device)
    for kind in KINDS:
        call = make_prefill(kind, 6, 2, rope=kind in INSERTS, device=device)
        windows = {
            "k_nope": buffer.as_strided((6, 2, 128), (8, 3, 1), 11),
            "v": buffer.as_strided((6, 2, 128), (1, 1, 1)),
            "kv_c_normed": buffer.as_strided((6, 512), (1, 1), 5),
            "k_pe": buffer.as_strided((6, 64), (8, 1), 16),
        }
        run_and_check(call.given(**{k: t for k, t in windows.items() if k in INPUTS[kind]}))


def test_q_inside_a_wider_buffer_keeps_its_neighbours(device: str) -> None:
    """q as a slice of [T, H, 256] and of [T, 3 * H, 192]: what lies between its rows stays."""
    for kind in INSERTS:
        call = make_prefill(kind, 9, 3, rope=True, device=device)
        run_and_check(laid_out(call, "q", (3 * 256, 256, 1)))
        run_and_check(laid_out(call, "q", (9 * 192, 192, 1)))
        run_and_check(laid_out(call, "q", (3 * 199, 199, 1), shift=2))


# The cache


@pytest.mark.parametrize("kind", INSERTS)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_cache_with_gaps_between_rows_and_blocks(device: str, kind: str, block_size: int) -> None:
    width = 656 if kind == "ds_mla" else 576
    for extra in (1, 8, 64):
        row = width + extra
        strides = (row * block_size + 3 * extra, row, 1)
        run_and_check(
            make_prefill(
                kind, 21, 2, rope=extra == 8, block_size=block_size, device=device,
                cache_layout={"strides": strides},
            )
        )  # fmt: skip


@pytest.mark.parametrize("kind", INSERTS)
def test_cache_seen_transposed(device: str, kind: str) -> None:
    """Blocks inside, tokens outside: the block stride is the smaller one."""
    width = 656 if kind == "ds_mla" else 576
    layout = {"strides": (width, 5 * width, 1)}
    run_and_check(make_prefill(kind, 20, 2, num_blocks=5, device=device, cache_layout=layout))


@pytest.mark.parametrize("kind", INSERTS)
def test_case22_cache_is_one_layer_of_a_larger_tensor(device: str, kind: str) -> None:
    """[num_blocks, layers, block_size, width][:, 1]; the other layers stay as they are."""
    call = make_prefill(kind, 20, 2, num_blocks=4, device=device)
    _, block_size, width = call.cache.shape
    whole = Guarded((4, 3, block_size, width), call.cache.dtype, device)
    layer = Guarded((4, block_size, width), call.cache.dtype, device)
    layer.tensor = whole.tensor[:, 1]
    layer.storage = whole.storage
    layer.strides, layer.offset = layer.tensor.stride(), layer.tensor.storage_offset()
    run_and_check(call.boxed(kv_cache=layer))


def test_more_than_2_31_elements_on_the_cpu() -> None:
    """Lazily zeroed memory: only two rows of a 2.4 GB cache are ever touched."""
    blocks = 2**31 // (64 * 576) + 100
    cache = torch.from_numpy(np.zeros((blocks, 64, 576), np.uint8))
    call = make_prefill("fp8", 3, 2)
    slots = torch.tensor([blocks * 64 - 1, 5, blocks * 64])
    call.run(kv_cache=cache, slot_mapping=slots)
    want = call.expected_rows().bits
    oracle.assert_same_bits(cache[-1, 63], want[0], "the last row")
    oracle.assert_same_bits(cache[0, 5], want[1], "row 5")
    assert not cache[-1, :63].any()
    assert not cache[0, 6:].any()


# The decision


@each_input
def test_aligned_and_misaligned_rows_are_told_apart(device: str, kind: str, name: str) -> None:
    call = make_prefill(kind, 8, 3, rope=kind in INSERTS, device=device)
    if device == "cuda":
        odd = rows_apart(call, name, width_of(name) + 1).explain()
        assert odd.name_expression != call.explain().name_expression
        assert "align" in odd.reason
        assert name in odd.reason
    else:
        assert "CPU" in call.explain().reason


# Any layout at all


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """A shape, a stride and a byte offset for each tensor, and slots of every kind."""
    tokens = draw(st.integers(0, 9))
    blocks, block_size = draw(st.integers(0, 3)), draw(st.integers(1, 5))
    end = blocks * block_size
    inside = st.integers(0, max(end - 1, 0))
    outside = st.sampled_from([-1, -2, -(2**63), end, end + 1, 2**31, 2**40, 2**63 - 1])
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "tokens": tokens,
        "heads": draw(st.integers(1, 4)),
        "num_blocks": blocks,
        "block_size": block_size,
        "slots": draw(st.lists(st.one_of(inside, outside), min_size=tokens, max_size=tokens + 2)),
        "rope": draw(st.booleans()),
        "dtype": draw(st.sampled_from([BF16, FP16])),
        "gaps": draw(st.lists(st.integers(0, 9), min_size=8, max_size=8)),
        "shifts": draw(st.lists(st.sampled_from([0, 2, 4, 6, 8]), min_size=6, max_size=6)),
        "heads_outside": draw(st.booleans()),
    }


@settings(max_examples=120, deadline=None)
@given(layout=layouts())
def test_any_shape_stride_and_slot(layout: dict[str, Any]) -> None:
    tokens, heads, gaps = layout["tokens"], layout["heads"], layout["gaps"]
    row = (656 if layout["kind"] == "ds_mla" else 576) + gaps[0]
    rope = layout["rope"] and layout["kind"] in INSERTS
    fields = ("kind", "tokens", "heads", "num_blocks", "block_size", "slots", "dtype")
    call = make_prefill(
        **{name: layout[name] for name in fields},
        rope=rope,
        any_bits=not rope,
        cache_layout={
            "strides": (row * layout["block_size"] + gaps[1], row, 1),
            "shift": layout["shifts"][0],
        },
    )
    names = INPUTS[layout["kind"]]
    for name, gap, shift in zip(names, gaps[2:], layout["shifts"][1:], strict=False):
        width = width_of(name) + gap
        strides: tuple[int, ...] = (width, 1)
        if call.args[name].ndim == 3:
            inside = (width * heads + gaps[7], width, 1)
            strides = (width, width * tokens + gaps[7], 1) if layout["heads_outside"] else inside
        call = laid_out(call, name, strides, shift)
    run_and_check(call)
