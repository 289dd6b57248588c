"""The prefill and context epilogues: numbers. e4m3 with and without a scale, 656 bytes, RoPE."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from helpers import BF16, E4M3, FP16, guarded, random_values, rope_table
from mla_helpers import INSERTS, SCALES, MlaCall, as_halves, make_prefill, run_and_check

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
EVERY_CODE = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
TURNED = pytest.mark.parametrize("rope", [False, True], ids=["copy", "rope"])


def fill(call: MlaCall, values: list[float]) -> None:
    """Repeat a few values through all inputs."""
    for name in ("q", "k_nope", "k_pe", "kv_c_normed", "v"):
        if name in call.args:
            tensor = call.args[name]
            count = tensor.numel()
            repeated = torch.tensor(values, dtype=torch.float64).repeat(-(-count // len(values)))
            tensor.copy_(repeated[:count].reshape(tensor.shape).to(tensor.dtype))


# Every value there is


@DTYPES
@pytest.mark.parametrize("kind", ["insert", "ds_mla", "concat"])
def test_copies_keep_every_bit_pattern(device: str, kind: str, dtype: torch.dtype) -> None:
    """NaN payloads, infinities and subnormals are copied, not computed."""
    call = make_prefill(kind, 2**16 // 128, 1, dtype=dtype, any_bits=True, device=device)
    whole = guarded(EVERY_CODE.view(dtype).reshape(-1, 1, 128), device)
    run_and_check(call.given(k_nope=whole))


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 0.1, 37.5, 3e38, 1e-38])
def test_scaled_cast_of_every_16_bit_value(device: str, dtype: torch.dtype, scale: float) -> None:
    """NaN is 0x7F, infinities are the largest codes, nothing is flushed; in all four outputs."""
    tokens = 2**16 // 64
    values = EVERY_CODE.view(dtype)
    slots = torch.arange(tokens)
    slots[128:] = -1  # 128 rows of the cache see every value
    call = make_prefill(
        "fp8", tokens, 1, dtype=dtype, scales=[scale] * 4, slots=slots, num_blocks=9, device=device
    )
    call.args["q"].copy_(values.repeat(3).reshape(tokens, 1, 192))
    args = {
        "k_nope": values.repeat(2).reshape(tokens, 1, 128),
        "v": values.flip(0).repeat(2).reshape(tokens, 1, 128),
        "k_pe": values.reshape(tokens, 64),
        "kv_c_normed": values.repeat(8).reshape(tokens, 512),
    }
    run_and_check(call.given(**{name: guarded(t, device) for name, t in args.items()}))


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


def test_case14_constants(device: str) -> None:
    """1.0 times 4.0, 0.25, 2.0 and 0.5: the codes are written down, and no scale is confused."""
    for as_tensors in (False, True):
        call = make_prefill(
            "fp8", 3, 2, cache=torch.uint8, slots=[0, 1, 2], scales=(4.0, 0.25, 2.0, 0.5),
            scale_tensors=as_tensors, device=device,
        )  # fmt: skip
        fill(call, [1.0])
        q8, k8, v8 = run_and_check(call)
        assert (oracle.bits(q8) == 0x48).all()
        assert (oracle.bits(k8) == 0x28).all()
        assert (oracle.bits(v8) == 0x40).all()
        assert (oracle.bits(call.cache.tensor)[0, :3] == 0x30).all()


@pytest.mark.parametrize("name", SCALES)
def test_each_scale_has_its_own_output(device: str, name: str) -> None:
    call = make_prefill("fp8", 5, 2, scales=(1.0, 1.0, 1.0, 1.0), rope=True, device=device)
    for value in (0.125, guarded(torch.tensor([300.0]), device), 2, guarded(torch.ones(1), device)):
        run_and_check(call.given(**{name: value}))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_scale_tensor_has_one_element_of_any_rank(device: str, shape: tuple[int, ...]) -> None:
    call = make_prefill("fp8", 5, 2, device=device)
    scales = {name: torch.full(shape, 0.3 + i, device=device) for i, name in enumerate(SCALES)}
    run_and_check(call.given(**scales))


def test_scales_as_float_and_tensor_agree(device: str) -> None:
    results = []
    for as_tensors in (False, True):
        call = make_prefill(
            "fp8", 33, 3, scales=(0.1, 7.7, 0.3, 1e-3), scale_tensors=as_tensors, device=device
        )
        results.append([*map(oracle.bits, run_and_check(call)), call.cache.snapshot()])
    for got, want in zip(*results, strict=True):
        oracle.assert_same_bits(got, want, "tensor scales against numbers")


def test_a_scale_is_read_at_the_call(device: str) -> None:
    call = make_prefill("fp8", 4, 2, scale_tensors=True, device=device)
    run_and_check(call)
    for i, name in enumerate(SCALES):
        call.args[name].fill_(16.0 / (i + 1))
    run_and_check(call)


# Special values


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "ds_mla", "concat_fp8"])
def test_nan_stays_nan_and_infinity_saturates(device: str, kind: str, value: float) -> None:
    call = make_prefill(kind, 4, 2, slots=[3, 2, 1, 0], device=device)
    for name in ("q", "k_nope", "k_pe", "kv_c_normed", "v"):
        if name in call.args:
            call.args[name][1, ..., 7] = value
    result = run_and_check(call)
    code = {math.inf: 0x7E, -math.inf: 0xFE}.get(value, 0x7F)
    if kind == "ds_mla":
        assert oracle.bits(call.cache.tensor)[0, 2, 7] == 0x7F
        return
    for tensor in result:
        found = set(oracle.bits(tensor)[1, :, 7].tolist())
        assert found <= ({code} if kind == "fp8" or code != 0x7F else {0x7F, 0xFF})
    if kind == "fp8":
        assert oracle.bits(call.cache.tensor)[0, 2, 7] == code


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (BF16, [2.0**-133, -(2.0**-133), 2.0**-127, 1.75 * 2.0**-127, 0.0, -0.0]),
        (FP16, [2.0**-24, -(2.0**-24), 2.0**-15, 1.5 * 2.0**-15, 0.0, -0.0]),
    ],
    ids=["bf16", "fp16"],
)
@TURNED
def test_subnormal_inputs_are_not_flushed(
    device: str, dtype: torch.dtype, values: list[float], rope: bool
) -> None:
    scale = 3e38 if dtype == BF16 else 2.0**18
    for kind in INSERTS:
        call = make_prefill(
            kind, 6, 2, dtype=dtype, rope=rope, scales=[scale] * 4, slots=range(6), device=device
        )
        fill(call, values)
        result = run_and_check(call)
        first = result if isinstance(result, torch.Tensor) else result[1]
        magnitude = 0x7F if kind == "fp8" else 0x7FFF
        kept = (oracle.bits(first) & magnitude) != 0
        assert torch.equal(kept[..., :128], (oracle.bits(call.args["k_nope"]) & 0x7FFF) != 0)
        assert kept[..., 128:].float().mean() > 0.5, "the rotated part was flushed to zero"


# The 656-byte row


@DTYPES
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
    call = make_prefill(
        "ds_mla", tokens, 1, dtype=dtype, block_size=64, slots=torch.arange(tokens), device=device
    )
    run_and_check(call.given(kv_c_normed=guarded(tiles.reshape(tokens, 512), device)))


def test_ds_mla_constants(device: str) -> None:
    """Scales written down by hand: the floor is 2^-13, 448 gives 1, the next value gives 2."""
    call = make_prefill("ds_mla", 1, 1, slots=[2], device=device)
    latent = call.args["kv_c_normed"].zero_()
    latent[0, [133, 262, 391]] = torch.tensor([448.0, -450.0, 3.5], device=device).to(BF16)
    run_and_check(call)
    row = oracle.bits(call.cache.tensor)[0, 2]
    assert row[512:528].clone().view(torch.float32).tolist() == [2.0**-13, 1.0, 2.0, 2.0**-7]
    assert row[[0, 133, 262, 391]].tolist() == [0, 0x7E, 0xF6, 0x7E]


def test_the_rope_part_of_ds_mla_keeps_every_bit(device: str) -> None:
    call = make_prefill("ds_mla", 20, 2, device=device)
    run_and_check(call.given(k_pe=guarded(random_values((20, 64), BF16, 8, any_bits=True), device)))


# RoPE


@DTYPES
@pytest.mark.parametrize("kind", INSERTS)
def test_rope_within_one_unit_in_the_last_place(device: str, kind: str, dtype: torch.dtype) -> None:
    run_and_check(
        make_prefill(kind, 128, 3, dtype=dtype, rope=True, scale_tensors=True, device=device)
    )


def test_rope_turns_neighbours_by_the_first_and_second_half_of_the_row(device: str) -> None:
    """A hand-made table: pair 0 turns by 90 degrees, pair 1 is mirrored, pair 2 doubles."""
    call = make_prefill("insert", 2, 2, rope=True, slots=[0, 1], device=device)
    table = torch.zeros(4, 64)
    table[:, :32] = 1.0
    table[3, [0, 32]] = torch.tensor([0.0, 1.0])
    table[3, 1] = -1.0
    table[3, 2] = 2.0
    call.args["cos_sin_cache"] = guarded(table, device)
    call.args["positions"] = guarded(torch.tensor([3, 0]), device)
    for tensor in (call.args["q"][..., 128:], call.args["k_pe"]):
        tensor.copy_(torch.arange(1, 65, dtype=BF16).expand(tensor.shape))
    k = run_and_check(call)
    q = call.args["q"]
    for got in (k[0, 1, 128:134], q[0, 1, 128:134], call.cache.tensor[0, 0, 512:518]):
        assert got.tolist() == [-2.0, 1.0, -3.0, -4.0, 10.0, 12.0]
    assert k[1, 0, 128:].tolist() == q[1, 0, 128:].tolist() == list(range(1, 65))


@pytest.mark.parametrize("kind", INSERTS)
@pytest.mark.parametrize("position_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_case12_positions_are_clamped_to_the_table(
    device: str, kind: str, position_dtype: torch.dtype
) -> None:
    positions = [0, 127, 128, -1, 2**31 - 1, -(2**31), 64]
    if position_dtype == torch.int64:
        positions[4:6] = [2**31, -(2**63)]
    call = make_prefill(kind, 7, 3, rope=True, device=device)
    call.args["positions"] = guarded(torch.tensor(positions, dtype=position_dtype), device)
    run_and_check(call)


@pytest.mark.parametrize(
    ("rows", "layout"),
    [(1, {}), (50, {"strides": (65, 1)}), (50, {"strides": (72, 1)}), (50, {"shift": 4}),
     (50, {"shift": 8, "strides": (128, 1)})],
    ids=["one-row", "stride-65", "stride-72", "off-4", "off-8"],
)  # fmt: skip
def test_rope_tables_of_any_layout(device: str, rows: int, layout: dict[str, object]) -> None:
    for kind in INSERTS:
        call = make_prefill(kind, 9, 2, rope=True, device=device)
        call.args["cos_sin_cache"] = guarded(rope_table(rows, seed=9), device, **layout)
        run_and_check(call)


@pytest.mark.parametrize("kind", INSERTS)
def test_rope_of_nan_and_infinity(device: str, kind: str) -> None:
    call = make_prefill(kind, 4, 2, rope=True, slots=range(4), device=device)
    for tensor in (call.args["q"][..., 128:], call.args["k_pe"]):
        tensor[0, ..., 4] = math.nan
        tensor[1, ..., 9] = math.inf
        tensor[2, ..., 20:22] = -math.inf
    run_and_check(call)


def test_rope_cancellation(device: str) -> None:
    """x0 cos - x1 sin near zero: the error is that of the products, not of the difference."""
    call = make_prefill("fp8", 64, 3, rope=True, scales=[1e4] * 4, device=device)
    call.args["cos_sin_cache"] = guarded(torch.full((128, 64), 0.70710678), device)
    for tensor in (call.args["q"][..., 128:], call.args["k_pe"]):
        tensor[..., 1::2] = tensor[..., 0::2]
    run_and_check(call)


@DTYPES
def test_wide_ranges_of_magnitude(device: str, dtype: torch.dtype) -> None:
    """Codes of every exponent appear."""
    for kind in ("fp8", "ds_mla", "concat_fp8"):
        call = make_prefill(kind, 40, 4, dtype=dtype, device=device)
        for i, name in enumerate(n for n in ("k_nope", "v", "kv_c_normed") if n in call.args):
            shape = call.args[name].shape
            power = torch.randint(-12, 9, shape, generator=torch.Generator().manual_seed(i))
            values = random_values(shape, torch.float32, 4) * torch.exp2(power)
            call = call.given(**{name: guarded(values.to(dtype), device)})
        run_and_check(call)
