"""The MLA epilogues: numbers. e4m3 codes, the 656-byte row, and RoPE."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from helpers import BF16, E4M3, FP16, Guarded, guarded, random_values, rope_table
from mla_helpers import (
    FORMS,
    Form,
    MlaCall,
    as_halves,
    as_list,
    each_form,
    each_form_with_a_cache,
    make_decode,
    make_prefill,
    run_and_check,
)

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
EVERY_CODE = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
SUBNORMAL = {
    BF16: [2.0**-133, -(2.0**-133), 2.0**-127, -(2.0**-127), 1.75 * 2.0**-127, 0.0, -0.0],
    FP16: [2.0**-24, -(2.0**-24), 2.0**-15, -(2.0**-15), 1.5 * 2.0**-15, 0.0, -0.0],
}


def forms(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("form", [FORMS[name] for name in names], ids=str)


with_scales = forms("decode-fp8", "decode-uint8", "fp8")
ds_mla = forms("decode-ds_mla", "ds_mla")


def scales_of(form: Form, value: float) -> dict[str, Any]:
    """Options of a call whose scales are all the same."""
    return {"scales": [value] * (2 if form.kind == "decode" else 4)} if form.scales else {}


def fill(call: MlaCall, values: list[float]) -> None:
    """Repeat a few values through all inputs."""
    for tensor in inputs_of(call).values():
        count = tensor.numel()
        repeated = torch.tensor(values, dtype=torch.float64).repeat(-(-count // len(values)))
        tensor.copy_(repeated[:count].reshape(tensor.shape).to(tensor.dtype))


def inputs_of(call: MlaCall) -> dict[str, torch.Tensor]:
    names = ("ql_nope", "q_pe", "q", "k_nope", "k_pe", "kv_c_normed", "v")
    return {name: call.args[name] for name in names if name in call.args}


def rotated_inputs(call: MlaCall) -> list[torch.Tensor]:
    """The parts of the inputs that RoPE turns."""
    query = call.args["q_pe"] if call.kind == "decode" else call.args["q"][..., 128:]
    return [query, call.args["k_pe"]]


# Every value there is


def test_oracle_rounds_to_the_nearest_code() -> None:
    """The oracle's e4m3 against a search through all 256 codes."""
    codes = torch.arange(127, dtype=torch.uint8)
    grid = codes.view(oracle.E4M3).to(torch.float64)
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16).to(torch.float64)
    size = values.abs().clamp_max(448.0).nan_to_num(0.0)
    distance = (size[:, None] - grid).abs()
    nearest = distance.amin(-1, keepdim=True)
    even_first = torch.where(distance == nearest, codes % 2, 2)
    want = codes[even_first.argmin(-1)] | (values.signbit().to(torch.uint8) << 7)
    want[values.isnan()] = oracle.E4M3_NAN
    oracle.assert_same_bits(oracle.e4m3_codes(values.to(torch.float32)), want, "e4m3 codes")


@DTYPES
@forms("decode", "decode-ds_mla", "insert", "ds_mla", "concat")
def test_copies_keep_every_bit_pattern(device: str, form: Form, dtype: torch.dtype) -> None:
    """NaN payloads, infinities and subnormals are copied, not computed."""
    name = form.inputs[0] if form.kind == "decode" else "k_nope"
    width = 512 if form.kind == "decode" else 128
    call = form.make(2**16 // width, 1, dtype=dtype, any_bits=True, device=device)
    whole = guarded(EVERY_CODE.view(dtype).reshape(-1, 1, width), device)
    run_and_check(call.given(**{name: whole}))


@DTYPES
@with_scales
def test_scaled_cast_of_every_16_bit_value(device: str, form: Form, dtype: torch.dtype) -> None:
    """NaN is 0x7F, infinities are the largest codes, nothing is flushed; in every output."""
    tokens = 2**16 // (512 if form.kind == "decode" else 64)
    values = EVERY_CODE.view(dtype)
    slots = torch.arange(tokens)
    slots[128:] = -1  # 128 rows of the cache see every value
    for scale in (1.0, 0.1, 37.5, 3e38, 1e-38):
        call = form.make(
            tokens, 1, dtype=dtype, slots=slots, num_blocks=9, device=device,
            **scales_of(form, scale),
        )  # fmt: skip
        changes = {}
        for i, (name, tensor) in enumerate(inputs_of(call).items()):
            count = tensor.numel()
            repeated = (values.flip(0) if i % 2 else values).repeat(-(-count // 2**16))
            if name == "q":
                tensor.copy_(repeated[:count].reshape(tensor.shape))
            else:
                changes[name] = guarded(repeated[:count].reshape(tensor.shape), device)
        run_and_check(call.given(**changes))


@DTYPES
def test_plain_cast_of_every_16_bit_value(device: str, dtype: torch.dtype) -> None:
    """As PyTorch casts: saturating, to nearest even, and NaN keeps its sign."""
    tokens = 2**16 // 64
    values = EVERY_CODE.view(dtype)
    call = make_prefill("concat_fp8", tokens, 1, dtype=dtype, device=device).given(
        k_nope=guarded(values.repeat(2).reshape(tokens, 1, 128), device),
        v=guarded(values.flip(0).repeat(2).reshape(tokens, 1, 128), device),
        k_pe=guarded(values.reshape(tokens, 64), device),
    )
    run_and_check(call)


@DTYPES
def test_plain_cast_is_pytorchs(device: str, dtype: torch.dtype) -> None:
    """All 65,536 patterns against `.to`; before 2.12 PyTorch made NaN of what does not fit."""
    values = EVERY_CODE.view(dtype)
    want = values.to(E4M3).view(torch.uint8)
    comparable = torch.ones(2**16, dtype=torch.bool)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12):
        comparable = values.isnan() | (values.abs() <= oracle.E4M3_MAX)
    packed = guarded(values.reshape(-1, 1, 128), device)
    call = make_prefill("concat_fp8", 512, 1, dtype=dtype, device=device)
    k8, v8 = call.given(k_nope=packed, v=packed).run()
    for got in (oracle.bits(k8)[..., :128].flatten(), oracle.bits(v8).flatten()):
        oracle.assert_same_bits(got[comparable], want[comparable], "codes against PyTorch's")


def test_plain_cast_constants(device: str) -> None:
    """Codes written down by hand: ties to even at 464, saturation above, the sign of NaN."""
    given = [1.0, -0.0, 448.0, 464.0, 466.0, 480.0, math.inf, -math.inf, -500.0, 2.0**-10, 0.07]
    codes = [0x38, 0x80, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x00, 0x19]
    call = make_prefill("concat_fp8", 1, 1, device=device)
    v = call.args["v"]
    v[0, 0, : len(given)] = torch.tensor(given).to(BF16)
    v.view(torch.int16)[0, 0, 11:13] = torch.tensor([0x7FC0, -0x40], dtype=torch.int16)
    _, v8 = run_and_check(call)
    assert oracle.bits(v8)[0, 0, :13].tolist() == [*codes, 0x7F, 0xFF]


@pytest.mark.parametrize("form", [E4M3, torch.uint8], ids=["e4m3", "uint8"])
@DTYPES
def test_k_pe_that_is_e4m3_already_is_copied(
    device: str, dtype: torch.dtype, form: torch.dtype
) -> None:
    """All 256 codes, in two and in three dimensions, and as a slice of a wider row."""
    call = make_prefill("concat_fp8", 9, 3, dtype=dtype, k_pe=form, device=device)
    codes = torch.arange(9 * 64).remainder(256).to(torch.uint8).view(9, 64)
    run_and_check(call.given(k_pe=guarded(codes.view(form), device)))
    run_and_check(call.given(k_pe=guarded(codes.view(form), device)[:, None]))
    for shift, stride in ((0, 80), (1, 64), (4, 96), (8, 576), (0, 67), (16, 0)):
        k_pe = guarded(codes.view(form), device, strides=(stride or 64, 1), shift=shift)
        run_and_check(as_halves(call.given(k_pe=k_pe)))


# Scales


@pytest.mark.parametrize("as_tensors", [False, True], ids=["floats", "tensors"])
def test_case14_constants(device: str, as_tensors: bool) -> None:
    """1.0 times 4.0, 0.25, 2.0 and 0.5: the codes are written down, and no scale is confused."""
    settings = {"slots": [0, 1, 2], "scale_tensors": as_tensors, "device": device}
    call = make_decode(3, 2, q_fp8=True, cache="uint8", scales=(4.0, 0.25), **settings)
    fill(call, [1.0])
    assert (oracle.bits(run_and_check(call)) == 0x48).all()
    assert (oracle.bits(call.cache.tensor)[0, :3] == 0x28).all()
    call = make_prefill("fp8", 3, 2, cache=torch.uint8, scales=(4.0, 0.25, 2.0, 0.5), **settings)
    fill(call, [1.0])
    for got, code in zip(run_and_check(call), (0x48, 0x28, 0x40), strict=True):
        assert (oracle.bits(got) == code).all()
    assert (oracle.bits(call.cache.tensor)[0, :3] == 0x30).all()


@with_scales
def test_each_scale_has_its_own_output(device: str, form: Form) -> None:
    call = form.make(5, 2, rope=True, device=device, **scales_of(form, 1.0))
    for name in form.scales:
        there = [guarded(torch.tensor([value]), device) for value in (300.0, 1.0)]
        for value in (0.125, there[0], 2, there[1]):
            run_and_check(call.given(**{name: value}))


@with_scales
def test_a_scale_tensor_has_one_element_of_any_rank(device: str, form: Form) -> None:
    call = form.make(5, 2, device=device)
    for shape in ((), (1,), (1, 1)):
        scales = {
            name: torch.full(shape, 0.3 + i, device=device) for i, name in enumerate(form.scales)
        }
        run_and_check(call.given(**scales))


@with_scales
def test_scales_as_float_and_tensor_agree(device: str, form: Form) -> None:
    results = []
    scales = (0.1, 7.7, 0.3, 1e-3)[: 2 if form.kind == "decode" else 4]
    for as_tensors in (False, True):
        call = form.make(33, 3, scales=scales, scale_tensors=as_tensors, device=device)
        outputs = as_list(run_and_check(call))
        results.append([*map(oracle.bits, outputs), call.cache.snapshot()])
    for got, want in zip(*results, strict=True):
        oracle.assert_same_bits(got, want, "tensor scales against numbers")


@with_scales
def test_a_scale_is_read_at_the_call(device: str, form: Form) -> None:
    call = form.make(4, 2, scale_tensors=True, device=device)
    run_and_check(call)
    for i, name in enumerate(form.scales):
        call.args[name].fill_(16.0 / (i + 1))
    run_and_check(call)


# Special values


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
@forms("decode-fp8", "decode-uint8", "decode-ds_mla", "fp8", "ds_mla", "concat_fp8")
def test_nan_stays_nan_and_infinity_saturates(device: str, form: Form, value: float) -> None:
    call = form.make(4, 2, slots=[3, 2, 1, 0], device=device)
    for tensor in inputs_of(call).values():
        tensor[1, ..., 7] = value
    result = as_list(run_and_check(call))
    code = {math.inf: 0x7E, -math.inf: 0xFE}.get(value, 0x7F)
    signs = {0x7F, 0xFF} if form.kind == "concat_fp8" and code == 0x7F else {code}
    for name, tensor in zip(form.outputs, result, strict=True):
        if call.output_dtype(name) == E4M3:
            # q_pe and k_pe stand behind 512 columns, or behind 128.
            places = {"mqa_q": [7, 519], "k8": [7, 135]}.get(name, [7])
            assert set(oracle.bits(tensor)[1][:, places].flatten().tolist()) <= signs
    if form.has_cache:
        row = oracle.bits(call.cache.tensor)[0, 2]
        if form.cache_width == oracle.DS_MLA_BYTES:
            assert row[7] == 0x7F
        else:
            assert row[[7, 519]].tolist() == [code, code]


@DTYPES
@pytest.mark.parametrize("rope", [False, True], ids=["copy", "rope"])
@each_form_with_a_cache
def test_subnormal_inputs_are_not_flushed(
    device: str, form: Form, dtype: torch.dtype, rope: bool
) -> None:
    scale = 3e38 if dtype == BF16 else 2.0**18
    call = form.make(
        6, 2, dtype=dtype, rope=rope, slots=range(6), device=device, **scales_of(form, scale)
    )
    fill(call, SUBNORMAL[dtype])
    result = as_list(run_and_check(call))
    # The query of decode, the keys of prefill.
    name = form.outputs[0] if form.kind != "fp8" else "k8"
    first = result[form.outputs.index(name)]
    nope = call.args["ql_nope" if form.kind == "decode" else "k_nope"]
    magnitude = 0x7F if call.output_dtype(name) == E4M3 else 0x7FFF
    kept = (oracle.bits(first) & magnitude) != 0
    width = nope.shape[-1]
    assert torch.equal(kept[..., :width], (oracle.bits(nope) & 0x7FFF) != 0)
    assert kept[..., width:].float().mean() > 0.5, "the rotated part was flushed to zero"


@pytest.mark.parametrize("scale_tensors", [False, True], ids=["number", "tensor"])
@with_scales
def test_a_subnormal_scale_is_not_flushed(device: str, form: Form, scale_tensors: bool) -> None:
    """Large values times 2^-130, down to the smallest code."""
    call = form.make(
        3, 2, slots=range(3), device=device, scale_tensors=scale_tensors,
        **scales_of(form, 2.0**-130),
    )  # fmt: skip
    fill(call, [2.0**121, -(2.0**122), 1.5 * 2.0**127])
    run_and_check(call)
    codes = oracle.bits(call.cache.tensor)[0, 0]
    assert set(codes.tolist()) == {0x01, 0x82, 0x24}


@each_form
def test_signs_of_zero_are_kept(device: str, form: Form) -> None:
    call = form.make(3, 2, slots=[0, 1, 2], device=device)
    fill(call, [0.0, -0.0])
    result = as_list(run_and_check(call))
    rows = [tensor[0, 0] for tensor in result]
    rows += [call.cache.tensor[0, 0]] if form.has_cache else []
    for row in rows:
        codes = oracle.bits(row)[:2].tolist()
        assert codes == ([0, -(2**15)] if row.element_size() == 2 else [0, 0x80])


@DTYPES
@each_form
def test_wide_ranges_of_magnitude(device: str, form: Form, dtype: torch.dtype) -> None:
    """Codes of every exponent appear."""
    call = form.make(40, 4, dtype=dtype, device=device)
    for i, name in enumerate(n for n in form.inputs if n in ("k_nope", "v", "kv_c_normed")):
        shape = call.args[name].shape
        power = torch.randint(-12, 9, shape, generator=torch.Generator().manual_seed(i))
        values = random_values(shape, torch.float32, 4) * torch.exp2(power)
        call = call.given(**{name: guarded(values.to(dtype), device)})
    run_and_check(call)


# The 656-byte row


@DTYPES
@ds_mla
def test_ds_mla_scale_of_every_amax(device: str, form: Form, dtype: torch.dtype) -> None:
    """Each finite positive input value as the amax of a tile, at a random place and sign."""
    largest = {BF16: 0x7F7F, FP16: 0x7BFF}[dtype]
    amax = torch.arange(0, largest + 1, dtype=torch.int16).view(dtype)
    amax = amax[: len(amax) // 4 * 4]
    rng = torch.Generator().manual_seed(3)
    part = torch.rand(len(amax), 128, generator=rng) * 2 - 1
    tiles = (amax.to(torch.float32)[:, None] * part).to(dtype)
    sign = torch.where(torch.rand(len(amax), generator=rng) < 0.5, 1.0, -1.0).to(dtype)
    place = torch.randint(0, 128, (len(amax),), generator=rng)
    tiles[torch.arange(len(amax)), place] = amax * sign
    tokens = len(amax) // 4
    call = form.make(
        tokens, 1, dtype=dtype, block_size=64, slots=torch.arange(tokens), device=device
    )
    run_and_check(call.given(kv_c_normed=guarded(tiles.reshape(tokens, 512), device)))


@ds_mla
def test_ds_mla_constants(device: str, form: Form) -> None:
    """Scales written down by hand: the floor is 2^-13, 448 gives 1, the next value gives 2."""
    call = form.make(1, 1, slots=[2], device=device)
    latent = call.args["kv_c_normed"].zero_()
    latent[0, [133, 262, 391]] = torch.tensor([448.0, -450.0, 3.5], device=device).to(BF16)
    run_and_check(call)
    row = oracle.bits(call.cache.tensor)[0, 2]
    assert row[512:528].clone().view(torch.float32).tolist() == [2.0**-13, 1.0, 2.0, 2.0**-7]
    assert row[[0, 133, 262, 391]].tolist() == [0, 0x7E, 0xF6, 0x7E]


@ds_mla
def test_ds_mla_tiles_do_not_share_a_scale(device: str, form: Form) -> None:
    call = form.make(9, 2, device=device)
    for tile in range(4):
        call.args["kv_c_normed"][:, 128 * tile : 128 * (tile + 1)] *= 2.0 ** (5 * tile - 8)
    run_and_check(call)


@ds_mla
def test_the_rope_part_of_ds_mla_keeps_every_bit(device: str, form: Form) -> None:
    call = form.make(20, 2, device=device)
    run_and_check(call.given(k_pe=guarded(random_values((20, 64), BF16, 8, any_bits=True), device)))


# RoPE


@DTYPES
@each_form_with_a_cache
def test_rope_within_one_unit_in_the_last_place(
    device: str, form: Form, dtype: torch.dtype
) -> None:
    heads = 12 if form.name == "decode-fp8" else 3
    run_and_check(form.make(128, heads, dtype=dtype, rope=True, scale_tensors=True, device=device))


@forms("decode", "insert")
def test_rope_turns_neighbours_by_the_first_and_second_half_of_the_row(
    device: str, form: Form
) -> None:
    """A hand-made table: pair 0 turns by 90 degrees, pair 1 is mirrored, pair 2 doubles."""
    call = form.make(2, 2, rope=True, slots=[0, 1], device=device)
    table = torch.zeros(4, 64)
    table[:, :32] = 1.0
    table[3, [0, 32]] = torch.tensor([0.0, 1.0])
    table[3, 1] = -1.0
    table[3, 2] = 2.0
    call.args["cos_sin_cache"] = guarded(table, device)
    call.args["positions"] = guarded(torch.tensor([3, 0]), device)
    for tensor in rotated_inputs(call):
        tensor.copy_(torch.arange(1, 65, dtype=BF16).expand(tensor.shape))
    written = [run_and_check(call)[..., -64:]]
    if form.kind == "insert":
        written.append(call.args["q"][..., -64:])
    turned = [-2.0, 1.0, -3.0, -4.0, 10.0, 12.0]
    for got in written:
        assert got[0, 1, :6].tolist() == turned
        assert got[1, 0].tolist() == list(range(1, 65))
    assert call.cache.tensor[0, 0, 512:518].tolist() == turned


@pytest.mark.parametrize("position_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@each_form_with_a_cache
def test_case12_positions_are_clamped_to_the_table(
    device: str, form: Form, position_dtype: torch.dtype
) -> None:
    positions = [0, 127, 128, -1, 2**31 - 1, -(2**31), 64]
    if position_dtype == torch.int64:
        positions[4:6] = [2**31, -(2**63)]
    call = form.make(7, 3, rope=True, device=device)
    call.args["positions"] = guarded(torch.tensor(positions, dtype=position_dtype), device)
    run_and_check(call)


@each_form_with_a_cache
def test_rope_tables_of_any_layout(device: str, form: Form) -> None:
    """One row; strides of any kind; addresses off by a few elements."""
    layouts: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        *((50, {"strides": (stride, 1)}) for stride in (64, 65, 72, 128)),
        (50, {"shift": 4}),
        (50, {"shift": 8}),
        (50, {"shift": 8, "strides": (128, 1)}),
    ]
    call = form.make(9, 2, rope=True, device=device)
    for rows, layout in layouts:
        call.args["cos_sin_cache"] = guarded(rope_table(rows, seed=9), device, **layout)
        run_and_check(call)


@each_form_with_a_cache
def test_rope_of_nan_and_infinity(device: str, form: Form) -> None:
    call = form.make(4, 2, rope=True, slots=range(4), device=device)
    for tensor in rotated_inputs(call):
        tensor[0, ..., 4] = math.nan
        tensor[1, ..., 9] = math.inf
        tensor[2, ..., 20:22] = -math.inf
    run_and_check(call)


@forms("decode-fp8", "decode", "fp8")
def test_rope_cancellation(device: str, form: Form) -> None:
    """x0 cos - x1 sin near zero: the error is that of the products, not of the difference."""
    call = form.make(64, 3, rope=True, device=device, **scales_of(form, 1e4))
    call.args["cos_sin_cache"] = guarded(torch.full((128, 64), 0.70710678), device)
    for tensor in rotated_inputs(call):
        tensor[..., 1::2] = tensor[..., 0::2]
    run_and_check(call)


@each_form_with_a_cache
def test_a_wrong_byte_in_a_rotated_row_is_noticed(form: Form) -> None:
    """The judge itself: a rotated value some units off is an error, and it says where."""
    call = form.make(2, 1, rope=True, slots=[0, 1])
    before = call.snapshot()
    call.run()
    if form.cache_width == oracle.ROW:
        oracle.bits(call.cache.tensor)[0, 1, 540] += 2
    else:
        call.cache.tensor[0, 1, oracle.DS_MLA_ROPE_AT + 56] ^= 2
    with pytest.raises(AssertionError, match=r"cache rows by slot.*\(1, 28\)"):
        call.check_cache(before["kv_cache"])


def test_fp8_rows_of_a_guarded_one_row_cache(device: str) -> None:
    """A cache of a single row, at odd addresses, between guard bands."""
    for name in ("decode-uint8", "fp8"):
        for shift in (1, 2, 3, 8):
            call = FORMS[name].make(1, 1, num_blocks=1, block_size=1, slots=[0], device=device)
            run_and_check(
                call.boxed(kv_cache=Guarded((1, 1, 576), torch.uint8, device, shift=shift))
            )
