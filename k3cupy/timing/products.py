"""A product with its tensors, and whether what a kernel computed of it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import k3cupy
from k3cupy.call.choice import LINEAR
from k3cupy.choose.gemm import FUSED_A, SKINNY
from k3cupy.timing.chain import END, NONE, Chain, consumer_of, producer_of

_ROUNDING = 2**-8
_EXTRA_COLUMNS = 64


class Product:
    """One product of a few tokens with a weight, inputs random, weights given call by call.

    Attributes:
        n: rows of the weight.
        k: its columns.
        tokens: rows of x.
        x: [tokens, k], packed.
        strided: the same values, a column slice of a wider tensor.
        residual: [tokens, n], or None.
        out: [tokens, n], for kernels to write.
    """

    def __init__(
        self,
        n: int,
        k: int,
        tokens: int,
        *,
        residual: bool = False,
        row_width: int | None = None,
        offset: int = 0,
        device: str = "cuda",
    ) -> None:
        """Make the tensors.

        Args:
            n: rows of the weight.
            k: its columns.
            tokens: rows of x.
            residual: make one.
            row_width: columns of the tensor that ``strided`` is a slice of; None: some more than k.
            offset: the first column of the slice.
            device: of all tensors.
        """
        self.n, self.k, self.tokens = n, k, tokens
        wide = _random(tokens, row_width or k + _EXTRA_COLUMNS, device)
        self.strided = wide[:, offset : offset + k]
        self.x = self.strided.contiguous()
        self.residual = _random(tokens, n, device) if residual else None
        self.out = torch.empty(tokens, n, device=device, dtype=torch.bfloat16)
        self._expected: tuple[torch.Tensor, torch.Tensor] | None = None

    def linear(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what the framework gives."""
        if self.residual is None:
            return torch.nn.functional.linear(self.x, weight)
        return torch.addmm(self.residual, self.x, weight.T)

    def call(self, kernel: str, config: Any) -> Callable[[torch.Tensor], Any]:
        """Return the call of a kernel as a linear layer makes it: the weight is static.

        A kernel of ours writes ``out``.
        """
        if kernel == LINEAR:
            return self.linear
        runs: dict[str, Callable[..., Any]] = {
            FUSED_A: k3cupy.fused_a_gemm,
            SKINNY: k3cupy.skinny_gemm,
        }
        run = runs[kernel]
        options: dict[str, Any] = {"out": self.out, "config": config, "weight_is_static": True}
        return lambda weight: run(self.x, weight, self.residual, **options)

    def chain(
        self, producer: str = END, consumer: str = NONE, *, x: torch.Tensor | None = None
    ) -> Chain:
        """Return what writes x, or the given one in its place, and what reads ``out``."""
        written = self.x if x is None else x
        return Chain(producer_of(written, producer), consumer_of(self.out, consumer))

    def check(self, body: Callable[[torch.Tensor], Any], weight: torch.Tensor) -> str | None:
        """Let a body write ``out``, which held NaN, and say what is wrong with it, or None.

        Args:
            body: a call that takes the weight and writes ``out``.
            weight: the same one in every check.
        """
        self.out.fill_(float("nan"))
        body(weight)
        got = self.out.float()
        if not torch.isfinite(got).all():
            return "an element is not finite"
        if self._expected is None:
            self._expected = self._expect(weight)
        want, limit = self._expected
        beyond = (got - want).abs() / limit
        worst = int(beyond.argmax())
        if float(beyond.flatten()[worst]) <= 1:
            return None
        row, column = divmod(worst, self.n)
        return f"element ({row}, {column}) is {got[row, column]:g}, not {want[row, column]:g}"

    def _expect(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the product in float32, and how far rounding may take each element from it."""
        x, wide = self.x.float(), weight.float()
        want, size = x @ wide.T, x.abs() @ wide.abs().T
        if self.residual is not None:
            want += self.residual.float()
            size += self.residual.float().abs()
        steps = self.k / 16 + 64  # one error in fp32 each, and some for the sums of warps
        return want, want.abs() * _ROUNDING + size * steps * 2**-23


def _random(rows: int, columns: int, device: str) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
