"""What the operations around an MLA layer's epilogue must compute, in float64, for the tests.

As in `oracle.py` nothing here comes from `k3cupy`. Norms and values have one rounding: each element
may be the rounding of any number within the error of fp32. The query has roundings on its way, so
its error counts: at most that of the same steps one by one, each rounded to its type.
"""

from __future__ import annotations

from typing import Any

import oracle
import torch
from oracle import LATENT, ROPE, Within

Q_RANK, NOPE, V = 1536, 128, 128
QKV_A = Q_RANK + LATENT + ROPE
HEAD_ROWS, KV_B_ROWS = NOPE + ROPE, NOPE + V

_FLOAT32_MAX = torch.finfo(torch.float32).max


def normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> Within:
    """`x * rsqrt(mean(x^2) + eps) * gain` of rows [B, N]; a sum too large for fp32 is infinite."""
    wide, factor = x.double(), gain.double()
    squares = wide.square().sum(-1, keepdim=True)
    squares = torch.where(squares > _FLOAT32_MAX, torch.inf, squares)
    mean = squares / x.shape[-1] + float(torch.tensor(eps, dtype=torch.float32))
    exact = wide * mean.rsqrt() * factor
    lost = 2.0**-149 / mean  # of a square that is subnormal
    error = exact.abs() * (2.0**-19 + lost) + (1 + factor.abs()) * 2.0**-148
    return Within(exact, torch.where(error.isfinite(), error, 0.0))


def values(latent: torch.Tensor, w_uv: torch.Tensor, gate: torch.Tensor | None) -> Within:
    """`latent @ w_uv` [B, H * 128], times the gate's sigmoid."""
    wide, weight = latent.double(), w_uv.double()
    exact = torch.einsum("bhk,hkn->bhn", wide, weight).flatten(1)
    largest = torch.einsum("bhk,hkn->bhn", wide.abs(), weight.abs()).flatten(1)
    error = (LATENT / 16 + 64) * (largest * 2.0**-23 + 2.0**-149)
    if gate is not None:
        open_ = gate.double().sigmoid()
        # A fast exponential is off by more units the larger its argument is, and ends at 2^-126.
        of_gate = exact.abs() * (open_ * (8 + 2 * gate.double().abs()) * 2.0**-23 + 2.0**-125)
        error, exact = error * open_ + of_gate, exact * open_
    return Within(exact, torch.where(error.isfinite(), error, 0.0))


def query(args: dict[str, Any], out_dtype: torch.dtype, *, in_steps: bool) -> torch.Tensor:
    """mqa_q as float64 on the CPU, without a rounding; `in_steps` with one behind each step."""
    qkv_a, w_q_b, w_uk = (args[name] for name in ("qkv_a", "w_q_b", "w_uk"))
    tokens, heads = qkv_a.shape[0], w_uk.shape[0]

    def step(exact: torch.Tensor) -> torch.Tensor:
        return oracle.rounded(exact, qkv_a.dtype) if in_steps else exact

    x = step(normed(qkv_a[:, :Q_RANK], args["q_norm_weight"], args["eps"]).exact)
    q = step(x @ w_q_b.double().T).view(tokens, heads, HEAD_ROWS)
    nope = step(torch.einsum("bhk,hkn->bhn", q[..., :NOPE], w_uk.double())).cpu()
    turned, scale = q[..., NOPE:].cpu(), args.get("q_scale_inv")
    if args.get("positions") is not None:
        positions = args["positions"][:tokens].cpu()
        turned = oracle.rotate(turned, positions, args["cos_sin_cache"].cpu()).exact
    whole = torch.cat((nope, turned), -1)
    if scale is not None:
        whole = (whole * oracle.fp32(scale).double()).clamp(-oracle.E4M3_MAX, oracle.E4M3_MAX)
    return oracle.rounded(whole, out_dtype) if in_steps else whole


AN_ELEMENT, A_ROW, ALL, SPREAD = 8.0, 1.4, 1.01, 0.45
"""By how much an error may pass that of the steps. Both are sums of independent roundings: a row's
is off by some 6%, that of R rows by 6% over the root of R, or of the heads alone where tokens are
alike. An element's is counted in averages of its row, beside its own rounding."""

OF_FRAMEWORK = 1.5
"""The same where a product of the framework in float16 is among the steps: PyTorch lets cuBLAS keep
parts of its sums in float16. A call of 15 tokens and a head, in separate kernels, was off by 1.18
times the error of the steps on an H200; three partial sums of q_b that are kept so give 1.19."""

_ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10, oracle.E4M3: 2**-4}


def assert_as_good(
    got: torch.Tensor,
    exact: torch.Tensor,
    steps: torch.Tensor,
    what: str = "mqa_q",
    *,
    slack: float = 1.0,
) -> None:
    """NaN where it must be and nowhere else; the errors of a row, and of all, are no larger."""
    found = got.cpu().double()
    assert torch.equal(found.isnan(), exact.isnan()), f"{what}: NaN in the wrong places"
    error, of_steps = (
        (rows - exact).nan_to_num(0.0, torch.inf, torch.inf).flatten(0, -2).abs()
        for rows in (found, steps)
    )
    ours, limit = error.norm(dim=-1), slack * of_steps.norm(dim=-1)
    if not len(ours):
        return
    of_element = AN_ELEMENT * limit[:, None] * exact.shape[-1] ** -0.5
    wrong = error > of_element + exact.flatten(0, -2).abs().nan_to_num() * _ROUNDING[got.dtype]
    assert not wrong.any(), f"{what}: {int(wrong.sum())} elements are off, {wrong.nonzero()[0]}"
    worst = int((ours / (limit + 1e-300)).argmax())
    assert (ours <= A_ROW * limit).all(), (
        f"{what}: row {worst} is off by {ours[worst]}, in separate steps by {limit[worst]}"
    )
    assert ours.norm() <= (ALL + SPREAD * len(ours) ** -0.5) * limit.norm(), (
        f"{what}: off by {ours.norm()}, in separate steps by {limit.norm()}"
    )
