"""The fused-A GEMM under test: inputs in NaN guard bands, and the product in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oracle
import torch
from helpers import BF16, Guarded, check_guards, guarded

import k3cupy

TOKENS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64)
FROBENIUS = 2.5e-3
ROUNDING = 2**-8
_ENOUGH_COLUMNS = 200
"""From here on the error of a row is an average: rounding alone gives 1.7e-3."""

_ROWS_AT_ONCE = 8192


def op(*args: Any, **kwargs: Any) -> Any:
    """The operation under test, looked up at call time."""
    return k3cupy.fused_a_gemm(*args, **kwargs)


def transposed_op(mat_a: Any, mat_b: Any, output: Any, enable_pdl: Any = False) -> None:
    """The public signature by name."""
    k3cupy.dsv3_fused_a_gemm(output, mat_a, mat_b, enable_pdl)


def normal(shape: Sequence[int], seed: int, device: str = "cpu") -> torch.Tensor:
    """Random values, made on the device."""
    rng = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=rng, device=device, dtype=torch.float32).to(BF16)


def inputs(
    tokens: int, n: int, k: int, device: str = "cpu", *, seed: int = 0, **x_layout: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, weight) with NaN around them, x in the layout that `guarded` is given."""
    x = guarded(normal((tokens, k), 2 * seed), device, **x_layout)
    return x, guarded(normal((n, k), 2 * seed + 1), device)


def residual_of(
    tokens: int, n: int, device: str = "cpu", *, seed: int = 0, **layout: Any
) -> torch.Tensor:
    """A residual with NaN around it, of values as large as a sum over some hundred columns."""
    values = (normal((tokens, n), 1000 + seed).float() * 20).to(BF16)
    return guarded(values, device, **layout)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The float64 product of the same values."""
    wide = x.double()
    parts = [wide @ part.double().T for part in weight.split(_ROWS_AT_ONCE)]
    return torch.cat(parts, dim=1)


def assert_product(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """Finite, each row close as a whole, each element within rounding and accumulation."""
    added = torch.zeros_like(out) if residual is None else residual
    want, got = product(x, weight) + added, out.double()
    assert tuple(out.shape) == tuple(want.shape)
    assert out.dtype == BF16
    assert torch.isfinite(got).all(), "an element is not finite"
    error = (got - want).abs()
    # One error in fp32 for each of the K / 16 steps, and some for the sums of warps and blocks.
    steps = x.shape[1] / 16 + 64
    largest = product(x.abs(), weight.abs()) + added.abs()
    limit = want.abs() * ROUNDING + largest * steps * 2**-23
    worst = int((error - limit).argmax())
    place = divmod(worst, want.shape[1])
    assert (error <= limit).all(), f"element {place}: {got[place]} for {want[place]}"
    if want.shape[1] >= _ENOUGH_COLUMNS:
        relative = error.norm(dim=1) / want.norm(dim=1)
        assert relative.max() < FROBENIUS, f"row {int(relative.argmax())}: {relative.max()}"


def same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "out") -> None:
    oracle.assert_same_bits(oracle.bits(got), oracle.bits(want), what)


def run_and_check(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    out_strides: Sequence[int] | None = None,
    shift: int = 0,
    **options: Any,
) -> torch.Tensor:
    """Run twice, once into a guarded `out`; compare everything, the inputs' bits included."""
    shape = (x.shape[0], weight.shape[0])
    box = Guarded(shape, BF16, x.device.type, strides=out_strides, shift=shift)
    read = [x, weight] if residual is None else [x, weight, residual]
    before, saved = box.snapshot(), [oracle.bits(t).clone() for t in read]
    assert op(x, weight, box.tensor, residual=residual, **options) is box.tensor
    check_guards(box, before)
    out = op(x, weight, residual=residual, **options)
    assert out.is_contiguous()
    assert out.device == x.device
    assert_product(out, x, weight, residual)
    same_bits(box.tensor, out, "out= and a new output")
    for tensor, bits in zip(read, saved, strict=True):
        oracle.assert_same_bits(oracle.bits(tensor), bits, "input")
    return out
