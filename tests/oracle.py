"""What the MLA epilogues must compute, written a second time for the tests.

Nothing here comes from `k3cupy`: the package's own reference is one of the things under test. Every
function takes CPU tensors. Copies and casts are described by their exact bits. RoPE is described by
its exact value in float64 and the error that fp32 arithmetic may add, which gives each output
element the smallest and the largest value it may have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LATENT = 512
ROPE = 64
ROW = LATENT + ROPE
DS_MLA_BYTES = 656
DS_MLA_TILE = 128
DS_MLA_ROPE_AT = 528
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_NAN = 0x7F

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Within:
    """Exact results, and the error allowed on either side (float64)."""

    exact: torch.Tensor
    error: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Expected rows: `bits` for all columns, `rotated` where RoPE makes the last 64 inexact."""

    bits: torch.Tensor
    rotated: Within | None


def codes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor seen as integers of the same width, in its own memory."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same width, on the CPU."""
    return codes(tensor).cpu()


def fp32(scale: float | torch.Tensor) -> torch.Tensor:
    """A scale as one fp32 number on the CPU."""
    if isinstance(scale, torch.Tensor):
        return scale.detach().cpu().reshape(()).to(torch.float32)
    return torch.tensor(scale, dtype=torch.float64).to(torch.float32)


def e4m3_codes(values: torch.Tensor) -> torch.Tensor:
    """fp32 values as e4m3 codes: saturating, round to nearest even, every NaN is 0x7F."""
    assert values.dtype == torch.float32
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8)
    return torch.where(values.isnan(), torch.tensor(E4M3_NAN, dtype=torch.uint8), codes)


def scaled_codes(x: torch.Tensor, scale_inv: float | torch.Tensor) -> torch.Tensor:
    """`clamp(x * scale_inv, -448, 448)` as e4m3 codes, the product rounded once to fp32."""
    product = x.to(torch.float64) * fp32(scale_inv).to(torch.float64)
    return e4m3_codes(product.to(torch.float32))


def plain_codes(x: torch.Tensor) -> torch.Tensor:
    """The unscaled cast of PyTorch from 2.12 on: it saturates, and NaN keeps its sign."""
    sign = x.signbit().to(torch.uint8) << 7
    return e4m3_codes(x.to(torch.float32)) | sign


def rotate(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    scale_inv: float | torch.Tensor = 1.0,
) -> Within:
    """GPT-J RoPE of `x` [B, ..., 64] at clamped positions, times a scale, with its error bound."""
    where = positions.to(torch.int64).clamp(0, table.shape[0] - 1)
    rows = table[where].to(torch.float64).reshape(x.shape[0], *([1] * (x.ndim - 2)), ROPE)
    cos, sin = rows[..., : ROPE // 2], rows[..., ROPE // 2 :]
    wide = x.to(torch.float64)
    x0, x1 = wide[..., 0::2], wide[..., 1::2]
    first = x0 * cos - x1 * sin
    second = x0 * sin + x1 * cos
    exact = torch.stack((first, second), dim=-1).flatten(-2)
    size = torch.stack(
        ((x0 * cos).abs() + (x1 * sin).abs(), (x0 * sin).abs() + (x1 * cos).abs()), dim=-1
    ).flatten(-2)
    scale = fp32(scale_inv).to(torch.float64)
    error = (size * 2.0**-22 + 2.0**-147) * scale.abs() + 2.0**-147
    return Within(exact * scale, torch.where(error.isfinite(), error, 0.0))


def ds_mla_scale(tile: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(max(amax / 448, 1e-4))) of each 128-wide tile, from the exponent alone.

    NaN has no part in amax; an infinite amax gives an infinite scale.
    """
    size = tile.to(torch.float64).abs()
    ratio = (torch.where(size.isnan(), 0.0, size).amax(-1) / E4M3_MAX).clamp_min(1e-4)
    mantissa, exponent = torch.frexp(ratio)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(ratio), exponent)
    return torch.where(ratio.isinf(), ratio, scale).to(torch.float32)


def joined_rows(
    nope: torch.Tensor,
    rope: torch.Tensor,
    scale_inv: float | torch.Tensor | None,
    positions: torch.Tensor | None,
    table: torch.Tensor | None,
) -> Rows:
    """`[nope | rope]` as integers: e4m3 codes with a scale, else the inputs' own bits."""
    whole = torch.cat((nope, rope), dim=-1)
    rotated = None
    if positions is not None and table is not None:
        rotated = rotate(rope, positions, table, 1.0 if scale_inv is None else scale_inv)
    return Rows(bits(whole) if scale_inv is None else scaled_codes(whole, scale_inv), rotated)


def cache_rows(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    cache_scale_inv: float | torch.Tensor | None,
    positions: torch.Tensor | None,
    table: torch.Tensor | None,
    *,
    ds_mla: bool,
) -> Rows:
    """The rows for the cache: [B, 576] of the cache's elements, or [B, 656] bytes with ds_mla."""
    k_pe = k_pe.reshape(k_pe.shape[0], ROPE)
    rotated = None
    if positions is not None and table is not None:
        rotated = rotate(
            k_pe, positions, table, 1.0 if cache_scale_inv is None else cache_scale_inv
        )
    if not ds_mla:
        whole = torch.cat((kv_c, k_pe), dim=-1)
        if cache_scale_inv is None:
            return Rows(bits(whole), rotated)
        return Rows(scaled_codes(whole, cache_scale_inv), rotated)
    tiles = kv_c.reshape(kv_c.shape[0], LATENT // DS_MLA_TILE, DS_MLA_TILE)
    scales = ds_mla_scale(tiles)
    quotient = tiles.to(torch.float64) / scales.to(torch.float64).unsqueeze(-1)
    codes = e4m3_codes(quotient.to(torch.float32)).flatten(1)
    rope = k_pe.contiguous().view(torch.uint8)
    return Rows(torch.cat((codes, scales.view(torch.uint8), rope), dim=-1), rotated)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 values rounded to an output type (e4m3 saturates), as float64."""
    narrow = values.to(torch.float32)
    if dtype == E4M3:
        return e4m3_codes(narrow).view(E4M3).to(torch.float64)
    return narrow.to(dtype).to(torch.float64)


def assert_within(got: torch.Tensor, want: Within, what: str) -> None:
    """`got` (a float tensor on the CPU) is the rounding of a value within the error bound."""
    found = got.to(torch.float64)
    nan = want.exact.isnan()
    assert torch.equal(found.isnan(), nan), f"{what}: NaN in the wrong places"
    low = rounded(want.exact - want.error, got.dtype)
    high = rounded(want.exact + want.error, got.dtype)
    wrong = ~((found >= low) & (found <= high)) & ~nan
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} elements are off, the first at {at}: "
            f"expected {low[at]} to {high[at]}, got {found[at]}"
        )


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Two integer tensors are equal; the message says where the first difference is."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    if torch.equal(got, want):
        return
    wrong = (got != want).nonzero()
    at = tuple(wrong[0].tolist())
    raise AssertionError(
        f"{what}: {len(wrong)} elements differ, the first at {at}: "
        f"expected {want[at].item():#x}, got {got[at].item():#x}"
    )
