"""What low-latency linear runs for a call, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LINEAR = "linear"
"""The backend of a fall-back: the framework's own linear."""


@dataclass(frozen=True)
class LinearDecision:
    """The answer of ``explain_low_latency_gemm``.

    Attributes:
        backend: ``"fused_a"``, ``"skinny"``, or ``"linear"`` for the framework's own.
        config: the kernel's launch configuration; None for the framework's linear.
        reason: why, in words; of a fall-back exactly what keeps from our kernels.
        source: what decided: ``"user cache"`` and ``"shipped"`` are measurements of this kind of
            GPU, ``"public"`` figures that we did not measure, ``"heuristic"`` a rule of thumb,
            ``"rule"`` what the kernels accept or the caller asked for.
        n: rows of the weight; 0 where the tensors do not say.
        k: its columns; 0 where the tensors do not say.
        num_tokens: rows of x; 0 where the tensors do not say.
    """

    backend: str
    config: Any
    reason: str
    source: str
    n: int = 0
    k: int = 0
    num_tokens: int = 0

    @property
    def is_fallback(self) -> bool:
        """Whether the framework's linear runs, and no kernel of ours."""
        return self.backend == LINEAR

    @property
    def kernel(self) -> str:
        """Backend and configuration in words."""
        return self.backend if self.config is None else f"{self.backend}, {self.config}"

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.kernel}: {self.reason}"
