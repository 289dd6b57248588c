"""The MLA epilogues: strides, slices, offsets and odd addresses, NaN around each input."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from helpers import BF16, E4M3, FP16, Guarded, guarded, random_values
from mla_helpers import (
    FORMS,
    QK,
    Form,
    MlaCall,
    as_halves,
    as_list,
    as_out,
    each_form,
    each_form_with_a_cache,
    poisoned_outs,
    run_and_check,
    run_into_guarded_outs,
    width_of,
)

NEIGHBOURS = pytest.mark.parametrize("name", ["decode", "insert", "concat_fp8"])


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


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@each_form
def test_case11_the_real_models_layouts(device: str, form: Form, dtype: torch.dtype) -> None:
    """A transposed batched matmul, halves of one GEMM output, a column slice of another, and so on.

    k_pe is [T, 64] and [T, 1, 64].
    """
    tokens, heads = 17, 12
    call = form.make(tokens, heads, dtype=dtype, rope=True, device=device)
    gemm = random_values((tokens, 2112), dtype, 3).to(device)
    gemm[:, :2048] = float("nan")
    if form.kind == "decode":
        matmul = random_values((heads, tokens, 512), dtype, 1).to(device)
        q = random_values((tokens, heads, 192), dtype, 2).to(device)
        q[..., :128] = float("nan")
        call = call.given(ql_nope=matmul.transpose(0, 1), q_pe=q[..., 128:])
    else:
        call = as_halves(call)
    for k_pe in (gemm[:, 2048:], gemm[:, None, 2048:]):
        run_and_check(call.given(k_pe=k_pe))


@each_form
def test_case02_free_row_strides(device: str, form: Form) -> None:
    call = form.make(8, 3, rope=True, device=device)
    for name in form.inputs:
        width = width_of(name)
        for stride in (width + 1, width + 4, width + 8, width + 63, 7175):
            run_and_check(rows_apart(call, name, stride))


@each_form
def test_heads_outside_of_tokens(device: str, form: Form) -> None:
    """[H, T, width] seen transposed: the head stride is the larger one."""
    call = form.make(9, 3, rope=True, device=device)
    for name in form.inputs:
        if call.args[name].ndim == 3:
            width = width_of(name)
            for gap in (0, 1, 8):
                strides = (width + gap, 9 * (width + gap) + 8 * gap, 1)
                run_and_check(laid_out(call, name, strides))


@each_form
def test_all_rows_odd_at_once(device: str, form: Form) -> None:
    call = form.make(9, 3, rope=True, device=device)
    for name in form.inputs:
        call = rows_apart(call, name, width_of(name) + 1, shift=2)
    run_and_check(call)
    run_into_guarded_outs(call, shift=2)


@each_form
def test_case03_bases_off_by_a_few_bytes(device: str, form: Form) -> None:
    for name in form.inputs:
        for shift in (2, 4, 8, 14):
            call = laid_out(form.make(8, 3, rope=True, device=device), name, shift=shift)
            assert call.args[name].data_ptr() % 16 == shift
            run_and_check(call)


@each_form
def test_case03_misaligned_outs(device: str, form: Form) -> None:
    """All of them, and one of several."""
    call = form.make(8, 3, rope=True, device=device)
    for shift in (1, 2, 4, 8):
        if shift > 1 or all(call.output_dtype(name) == E4M3 for name in form.outputs):
            run_into_guarded_outs(call, shift=shift)
    if len(form.outputs) > 1:
        for odd in range(len(form.outputs)):
            boxes = [
                Guarded(call.output_shape(name), E4M3, device, shift=3 * (i == odd))
                for i, name in enumerate(form.outputs)
            ]
            run_and_check(call, out=tuple(box.tensor for box in boxes))


@each_form_with_a_cache
def test_case03_misaligned_cache(device: str, form: Form) -> None:
    one_byte = form.make().cache.tensor.element_size() == 1
    for shift in (1, 2, 4, 8) if one_byte else (2, 4, 8):
        run_and_check(form.make(8, 3, device=device, cache_layout={"shift": shift}))


def wide_slices(form: Form, wide: torch.Tensor, at: int) -> dict[str, torch.Tensor]:
    """Every input as columns of one buffer, one after the other."""
    slices = {}
    for name in form.inputs:
        width = width_of(name)
        columns = wide[:, at : at + width]
        slices[name] = columns if name in ("kv_c_normed", "k_pe") else columns[:, None]
        at += width
    return slices


@NEIGHBOURS
def test_case03_slices_of_a_wider_buffer(device: str, name: str) -> None:
    """The literal inputs of the public failures, one token and several."""
    form = FORMS[name]
    for tokens in (1, 4):
        wide = random_values((tokens, 6289), BF16, 1).to(device)
        call = form.make(tokens, 1, device=device)
        for at in (6144, 6145, 5632, 5633):
            if at + 576 <= 6289 or "kv_c_normed" not in form.inputs:
                run_and_check(call.given(k_pe=wide[:, at - 64 : at]))
        if "kv_c_normed" in form.inputs:
            run_and_check(call.given(kv_c_normed=wide[:, 5633:6145], k_pe=wide[:, None, 6145:6209]))
            run_and_check(call.given(kv_c_normed=wide[:, 5633:6145], k_pe=wide[:, 6145:6209]))
        if form.kind == "decode":
            run_and_check(call.given(ql_nope=wide[:, None, 5632:6144], q_pe=wide[:, None, 6:70]))
        if "v" in form.inputs:
            for at in (6144, 6145):
                halves = {"k_nope": wide[:, None, at : at + 128], "v": wide[:, None, 5:133]}
                run_and_check(call.given(**halves, k_pe=wide[:, at - 64 : at]))
        for at in (0, 1, 64):
            run_and_check(call.given(**wide_slices(form, wide, at)))


@each_form
def test_case01_slices_after_a_dlpack_round_trip(device: str, form: Form) -> None:
    """A round trip rewrites the strides of size-1 dimensions."""
    for tokens in (1, 4):
        wide = random_values((tokens, 6288), BF16, 1).to(device)
        slices = wide_slices(form, wide, 64)
        call = form.make(tokens, 1, device=device)
        run_and_check(call.given(**slices))
        run_and_check(call.given(**{k: torch.from_dlpack(t) for k, t in slices.items()}))


@pytest.mark.parametrize("stride", [0, 1, 3, 10**9])
@each_form
def test_case01_strides_of_size_one_dimensions(device: str, form: Form, stride: int) -> None:
    """With one token and one head the stride says nothing and may be anything."""
    call = form.make(1, 1, device=device, num_blocks=1, block_size=1, slots=[0])
    for name in form.inputs:
        tensor = call.args[name]
        call.args[name] = tensor.as_strided(tensor.shape, (stride,) * (tensor.ndim - 1) + (1,))
    if form.has_cache:
        call.args["slot_mapping"] = call.args["slot_mapping"].as_strided((1,), (stride,))
        cache = call.args["kv_cache"]
        call.args["kv_cache"] = cache.as_strided(cache.shape, (stride, 5, 1))
    run_and_check(call)
    call.args["k_pe"] = call.args["k_pe"].as_strided((1, 1, 64), (stride, 7, 1))
    run_and_check(call)
    boxes = poisoned_outs(call)
    given = [
        box.tensor.as_strided(box.shape, (7, stride, 1), box.tensor.storage_offset())
        for box in boxes
    ]
    before = call.snapshot()
    result = call.run(out=as_out(given))
    assert all(a is b for a, b in zip(as_list(result), given, strict=True))
    call.check(before, as_out([box.tensor for box in boxes]))


@each_form
def test_k_pe_middle_dimension_of_any_stride(device: str, form: Form) -> None:
    for tokens in (1, 6):
        call = form.make(tokens, 2, rope=True, device=device)
        for stride in (0, 1, 64, 999):
            k_pe = call.args["k_pe"].as_strided((tokens, 1, 64), (64, stride, 1))
            run_and_check(call.given(k_pe=k_pe))


@each_form
def test_expanded_inputs(device: str, form: Form) -> None:
    """Row stride 0: every token, or every head, reads the same row."""
    call = form.make(6, 4, device=device)
    expanded = {}
    for name in form.inputs:
        tensor = call.args[name]
        expanded[name] = tensor[:1].expand(tensor.shape)
        run_and_check(call.given(**{name: expanded[name]}))
        if tensor.ndim == 3:
            run_and_check(call.given(**{name: tensor[:, :1].expand(tensor.shape)}))
    run_and_check(call.given(**expanded))


@each_form
def test_overlapping_rows_of_an_input(device: str, form: Form) -> None:
    """Rows one element apart: a sliding window over one buffer."""
    buffer = random_values((4096,), BF16, 3).to(device)
    call = form.make(6, 2, rope=True, device=device)
    windows = {
        "ql_nope": buffer.as_strided((6, 2, 512), (8, 3, 1), 11),
        "k_nope": buffer.as_strided((6, 2, 128), (8, 3, 1), 11),
        "v": buffer.as_strided((6, 2, 128), (1, 1, 1)),
        "kv_c_normed": buffer.as_strided((6, 512), (1, 1), 5),
        "k_pe": buffer.as_strided((6, 64), (8, 1), 16),
    }
    run_and_check(call.given(**{k: t for k, t in windows.items() if k in form.inputs}))


@pytest.mark.parametrize("name", ["insert", "ds_mla", "fp8"])
def test_q_inside_a_wider_buffer_keeps_its_neighbours(device: str, name: str) -> None:
    """q as a slice of [T, H, 256] and of [T, 3 * H, 192]: what lies between its rows stays."""
    call = FORMS[name].make(9, 3, rope=True, device=device)
    run_and_check(laid_out(call, "q", (3 * 256, 256, 1)))
    run_and_check(laid_out(call, "q", (9 * QK, QK, 1)))
    run_and_check(laid_out(call, "q", (3 * 199, 199, 1), shift=2))


# The cache


@pytest.mark.parametrize("block_size", [1, 16, 24])
@each_form_with_a_cache
def test_cache_with_gaps_between_rows_and_blocks(device: str, form: Form, block_size: int) -> None:
    for extra in (1, 8, 64):
        row = form.cache_width + extra
        layout = {"strides": (row * block_size + 3 * extra, row, 1)}
        run_and_check(
            form.make(
                21, 2, rope=extra == 8, block_size=block_size, device=device, cache_layout=layout
            )
        )


@each_form_with_a_cache
def test_cache_seen_transposed(device: str, form: Form) -> None:
    """Blocks inside, tokens outside: the block stride is the smaller one."""
    layout = {"strides": (form.cache_width, 5 * form.cache_width, 1)}
    run_and_check(form.make(20, 2, num_blocks=5, device=device, cache_layout=layout))


@each_form_with_a_cache
def test_case22_cache_is_one_layer_of_a_larger_tensor(device: str, form: Form) -> None:
    """[num_blocks, layers, block_size, width][:, 1]; the other layers stay as they are."""
    call = form.make(20, 2, num_blocks=4, device=device)
    _, block_size, width = call.cache.shape
    whole = Guarded((4, 3, block_size, width), call.cache.dtype, device)
    layer = Guarded((4, block_size, width), call.cache.dtype, device)
    layer.tensor = whole.tensor[:, 1]
    layer.storage = whole.storage
    layer.strides, layer.offset = layer.tensor.stride(), layer.tensor.storage_offset()
    run_and_check(call.boxed(kv_cache=layer))


@each_form_with_a_cache
def test_case02_guards_around_every_output_of_every_format(device: str, form: Form) -> None:
    """Cache and outputs in one allocation, back to back, each intact outside its own bytes."""
    call = form.make(7, 2, num_blocks=1, slots=[15, 0, 1, 14, -1, 3, 16], device=device)
    whole = Guarded((2**17,), torch.uint8, device)
    bytes_of_cache = call.cache.tensor.numel() * call.cache.tensor.element_size()
    cache = Guarded(call.cache.shape, call.cache.dtype, device)
    part = whole.tensor[:bytes_of_cache]
    cache.tensor, cache.storage = part.view(cache.dtype).view(cache.shape), whole.storage
    cache.offset = cache.tensor.storage_offset()
    call = call.boxed(kv_cache=cache)
    outs, end = [], bytes_of_cache
    for name in form.outputs:
        dtype, shape = call.output_dtype(name), call.output_shape(name)
        size = dtype.itemsize * shape[0] * shape[1] * shape[2]
        outs.append(whole.tensor[end : end + size].view(dtype).view(shape))
        end += size
    before = call.snapshot()
    call.check_outputs(call.run(out=as_out(outs)))
    written = slice(256 + bytes_of_cache, 256 + end)
    before["kv_cache"][written] = whole.snapshot()[written]
    call.check_cache(before["kv_cache"])


@pytest.mark.parametrize("name", ["decode-uint8", "fp8"])
def test_more_than_2_31_elements_on_the_cpu(name: str) -> None:
    """Lazily zeroed memory: only two rows of a 2.4 GB cache are ever touched."""
    blocks = 2**31 // (64 * 576) + 100
    cache = torch.from_numpy(np.zeros((blocks, 64, 576), np.uint8))
    call = FORMS[name].make(3, 2)
    slots = torch.tensor([blocks * 64 - 1, 5, blocks * 64])
    call.run(kv_cache=cache, slot_mapping=slots)
    want = call.expected_rows().bits
    oracle.assert_same_bits(cache[-1, 63], want[0], "the last row")
    oracle.assert_same_bits(cache[0, 5], want[1], "row 5")
    assert not cache[-1, :63].any()
    assert not cache[0, 6:].any()


# The decision


@each_form
def test_aligned_and_misaligned_rows_are_told_apart(device: str, form: Form) -> None:
    call = form.make(8, 3, rope=True, device=device)
    decision = call.explain()
    assert decision.runs_on == device
    assert decision.reason
    assert "\n" not in str(decision)
    for name in form.inputs:
        odd = rows_apart(call, name, width_of(name) + 1).explain()
        if device == "cuda":
            assert odd.name_expression != decision.name_expression
            assert "align" in odd.reason
            assert name in odd.reason
        else:
            assert "CPU" in odd.reason


@each_form
def test_explain_validates_and_writes_nothing(device: str, form: Form) -> None:
    call = form.make(8, 3, rope=True, device=device)
    before = call.snapshot()
    call.explain()
    for name, saved in before.items():
        oracle.assert_same_bits(call.boxes[name].snapshot(), saved, f"{name} after explain")
    with pytest.raises(ValueError, match=r"k_pe: expected .*, got shape \[8, 63\]"):
        call.explain(k_pe=call.args["k_pe"][..., :63])
