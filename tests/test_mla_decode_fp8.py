"""The MLA decode epilogue: numbers. e4m3 codes, the 656-byte row, and RoPE."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from helpers import (
    BF16,
    FP16,
    Call,
    Guarded,
    guarded,
    make_call,
    random_values,
    rope_table,
    run_and_check,
)

SUBNORMAL_BF16 = [2.0**-133, -(2.0**-133), 2.0**-127, -(2.0**-127), 1.75 * 2.0**-127, 0.0, -0.0]
SUBNORMAL_FP16 = [2.0**-24, -(2.0**-24), 2.0**-15, -(2.0**-15), 1.5 * 2.0**-15, 0.0, -0.0]


def fill(call: Call, values: list[float]) -> None:
    """Repeat a few values through all four inputs."""
    for name in ("ql_nope", "q_pe", "kv_c_normed", "k_pe"):
        tensor = getattr(call, name)
        count = tensor.numel()
        repeated = torch.tensor(values, dtype=torch.float64).repeat(-(-count // len(values)))
        tensor.copy_(repeated[:count].reshape(tensor.shape).to(tensor.dtype))


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


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scale", [1.0, 0.1, 37.5, 3e38, 1e-38])
def test_fp8_of_every_16_bit_value(device: str, dtype: torch.dtype, scale: float) -> None:
    """All 65,536 inputs: NaN is 0x7F, infinities are the largest codes, nothing is flushed."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    tokens = 2**16 // 512
    call = make_call(
        tokens, 1, dtype=dtype, q_fp8=True, cache="uint8", slots=torch.arange(tokens),
        q_scale_inv=scale, cache_scale_inv=scale, device=device,
    )  # fmt: skip
    call = call.with_tensors(
        ql_nope=guarded(values.reshape(tokens, 1, 512), device),
        kv_c_normed=guarded(values.reshape(tokens, 512), device),
    )
    run_and_check(call)


@pytest.mark.parametrize("kind", ["fp8", "uint8", "ds_mla"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_stays_nan_and_infinity_saturates(device: str, kind: str, value: float) -> None:
    call = make_call(4, 2, q_fp8=kind != "ds_mla", cache=kind, slots=[3, 2, 1, 0], device=device)
    for tensor in (call.ql_nope, call.q_pe, call.kv_c_normed, call.k_pe):
        tensor[1, ..., 7] = value
    mqa_q = run_and_check(call)
    row = oracle.bits(call.cache.tensor)[0, 2]
    code = {math.inf: 0x7E, -math.inf: 0xFE}.get(value, 0x7F)
    if kind == "ds_mla":
        code = 0x7F
    else:
        assert (oracle.bits(mqa_q)[1, :, [7, 519]] == code).all()
        assert row[519] == code
    assert row[7] == code


@pytest.mark.parametrize(("dtype", "values"), [(BF16, SUBNORMAL_BF16), (FP16, SUBNORMAL_FP16)])
@pytest.mark.parametrize("rope", [False, True], ids=["copy", "rope"])
def test_subnormal_inputs_are_not_flushed(
    device: str, dtype: torch.dtype, values: list[float], rope: bool
) -> None:
    scale = 3e38 if dtype == BF16 else 2.0**18
    for kind in ("same", "fp8", "ds_mla"):
        call = make_call(
            6, 2, dtype=dtype, cache=kind, q_fp8=kind == "fp8", rope=rope, device=device,
            slots=range(6), q_scale_inv=scale, cache_scale_inv=scale,
        )  # fmt: skip
        fill(call, values)
        mqa_q = run_and_check(call)
        magnitude = 0x7F if kind == "fp8" else 0x7FFF
        kept = (oracle.bits(mqa_q) & magnitude) != 0
        given = (oracle.bits(call.ql_nope) & 0x7FFF) != 0
        assert torch.equal(kept[..., :512], given)
        assert kept[..., 512:].float().mean() > 0.5, "the rotated part was flushed to zero"


def test_signs_of_zero_are_kept(device: str) -> None:
    for kind in ("fp8", "ds_mla", "same"):
        call = make_call(3, 2, cache=kind, q_fp8=kind == "fp8", slots=[0, 1, 2], device=device)
        fill(call, [0.0, -0.0])
        run_and_check(call)
        first_bytes = oracle.bits(call.cache.tensor)[0, 0, :2].tolist()
        assert first_bytes == [0, -(2**15)] if kind == "same" else [0, 0x80]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_ds_mla_scale_of_every_amax(device: str, dtype: torch.dtype) -> None:
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
    call = make_call(
        tokens,
        1,
        dtype=dtype,
        cache="ds_mla",
        block_size=64,
        slots=torch.arange(tokens),
        device=device,
    )
    run_and_check(call.with_tensors(kv_c_normed=guarded(tiles.reshape(tokens, 512), device)))


def test_ds_mla_constants(device: str) -> None:
    """Scales written down by hand: the floor is 2^-13, 448 gives 1, the next value gives 2."""
    call = make_call(1, 1, cache="ds_mla", slots=[2], device=device)
    call.kv_c_normed.zero_()
    call.kv_c_normed[0, 128 + 5] = 448.0
    call.kv_c_normed[0, 256 + 6] = -450.0
    call.kv_c_normed[0, 384 + 7] = 3.5
    run_and_check(call)
    row = oracle.bits(call.cache.tensor)[0, 2]
    scales = row[512:528].clone().view(torch.float32).tolist()
    assert scales == [2.0**-13, 1.0, 2.0, 2.0**-7]
    assert row[0] == 0
    assert row[128 + 5] == 0x7E
    assert row[256 + 6] == 0xF6
    assert row[384 + 7] == 0x7E


def test_ds_mla_tiles_do_not_share_a_scale(device: str) -> None:
    call = make_call(9, 2, cache="ds_mla", device=device)
    for tile in range(4):
        call.kv_c_normed[:, 128 * tile : 128 * (tile + 1)] *= 2.0 ** (5 * tile - 8)
    run_and_check(call)


# RoPE


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("q_fp8", [False, True], ids=["q16", "q8"])
def test_rope_within_one_unit_in_the_last_place(
    device: str, dtype: torch.dtype, q_fp8: bool
) -> None:
    call = make_call(
        128, 12, dtype=dtype, rope=True, q_fp8=q_fp8, cache="fp8", scale_tensors=True, device=device
    )
    run_and_check(call)


def test_rope_turns_neighbours_by_the_first_and_second_half_of_the_row(device: str) -> None:
    """A hand-made table: pair 0 turns by 90 degrees, pair 1 is mirrored, pair 2 doubles."""
    call = make_call(2, 2, rope=True, slots=[0, 1], device=device)
    table = torch.zeros(4, 64)
    table[:, :32] = 1.0
    table[3, [0, 32]] = torch.tensor([0.0, 1.0])
    table[3, 1] = -1.0
    table[3, 2] = 2.0
    call.options["cos_sin_cache"] = guarded(table, device)
    call.options["positions"] = guarded(torch.tensor([3, 0]), device)
    for tensor in (call.q_pe, call.k_pe):
        tensor.copy_(torch.arange(1, 65, dtype=BF16).expand(tensor.shape))
    mqa_q = run_and_check(call)
    for got in (mqa_q[0, 1, 512:518], call.cache.tensor[0, 0, 512:518]):
        assert got.tolist() == [-2.0, 1.0, -3.0, -4.0, 10.0, 12.0]
    assert mqa_q[1, 0, 512:].tolist() == list(range(1, 65))


@pytest.mark.parametrize("kind", ["same", "fp8", "ds_mla"])
@pytest.mark.parametrize("position_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_case12_positions_are_clamped_to_the_table(
    device: str, kind: str, position_dtype: torch.dtype
) -> None:
    positions = [0, 127, 128, -1, 2**31 - 1, -(2**31), 64]
    if position_dtype == torch.int64:
        positions[4:6] = [2**31, -(2**63)]
    call = make_call(7, 3, cache=kind, q_fp8=kind == "fp8", rope=True, device=device)
    call.options["positions"] = guarded(torch.tensor(positions, dtype=position_dtype), device)
    run_and_check(call)


def test_rope_with_a_table_of_one_row(device: str) -> None:
    call = make_call(5, 2, rope=True, device=device)
    call.options["cos_sin_cache"] = guarded(rope_table(1, seed=9), device)
    run_and_check(call)


def test_rope_table_with_free_row_stride(device: str) -> None:
    for stride in (64, 65, 72, 128):
        call = make_call(9, 2, rope=True, device=device)
        table = rope_table(50)
        call.options["cos_sin_cache"] = guarded(table, device, strides=(stride, 1))
        run_and_check(call)


def test_rope_table_of_unaligned_address(device: str) -> None:
    call = make_call(9, 2, rope=True, device=device)
    for shift in (4, 8):
        call.options["cos_sin_cache"] = guarded(rope_table(50), device, shift=shift)
        run_and_check(call)


@pytest.mark.parametrize("kind", ["same", "fp8"])
def test_rope_of_nan_and_infinity(device: str, kind: str) -> None:
    call = make_call(
        4, 2, cache=kind, q_fp8=kind == "fp8", rope=True, slots=range(4), device=device
    )
    for tensor in (call.q_pe, call.k_pe):
        tensor[0, ..., 4] = math.nan
        tensor[1, ..., 9] = math.inf
        tensor[2, ..., 20:22] = -math.inf
    run_and_check(call)


def test_rope_cancellation(device: str) -> None:
    """x0 cos - x1 sin near zero: the error is that of the products, not of the difference."""
    call = make_call(64, 3, rope=True, q_fp8=True, cache="same", q_scale_inv=1e4, device=device)
    table = torch.full((128, 64), 0.70710678)
    call.options["cos_sin_cache"] = guarded(table, device)
    for tensor in (call.q_pe, call.k_pe):
        tensor[..., 1::2] = tensor[..., 0::2]
    run_and_check(call)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_large_random_values_in_every_format(device: str, dtype: torch.dtype) -> None:
    """Wide ranges of magnitude, so that codes of every exponent appear."""
    for kind in ("fp8", "ds_mla"):
        call = make_call(40, 4, dtype=dtype, cache=kind, q_fp8=kind == "fp8", device=device)
        power = torch.randint(-12, 9, (40, 512), generator=torch.Generator().manual_seed(1))
        values = random_values((40, 512), torch.float32, 4) * torch.exp2(power)
        run_and_check(call.with_tensors(kv_c_normed=guarded(values.to(dtype), device)))


def test_the_rope_part_of_ds_mla_keeps_every_bit(device: str) -> None:
    call = make_call(20, 2, cache="ds_mla", device=device)
    odd = random_values((20, 64), BF16, 8, any_bits=True)
    run_and_check(call.with_tensors(k_pe=guarded(odd, device)))


def test_a_wrong_byte_in_a_rotated_row_is_noticed() -> None:
    """The judge itself: a rotated value two units off is an error."""
    call = make_call(2, 1, rope=True, slots=[0, 1])
    before = call.cache.snapshot()
    call.run()
    oracle.bits(call.cache.tensor)[0, 1, 540] += 2
    with pytest.raises(AssertionError, match=r"cache rows by slot.*\(1, 28\)"):
        call.check_cache(before)


def test_fp8_rows_of_a_guarded_one_row_cache(device: str) -> None:
    """A cache of a single row, at odd addresses, between guard bands."""
    for shift in (1, 2, 3, 8):
        call = make_call(1, 1, cache="uint8", num_blocks=1, block_size=1, slots=[0], device=device)
        call.cache = Guarded((1, 1, 576), torch.uint8, device, shift=shift)
        run_and_check(call)
