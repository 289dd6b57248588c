"""What a call will run, and why: the answer of every ``explain_*`` and the row of every report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3cupy.runtime.text import printable

LINEAR = "linear"
"""The kernel of a fall-back: the framework's own linear."""

NAMED = "the caller named the configuration"

USER, SHIPPED, PUBLIC, RULE = "user", "shipped", "public", "rule"
"""Where a choice comes from."""


@dataclass(frozen=True)
class Choice:
    """A kernel with its configuration, and the reason.

    Attributes:
        kernel: ``"fused_a"``, ``"skinny"``, ``"mla_decode"``, ``"mla_prefill"``, ``"mla_norm"``,
            ``"mla_query"``, ``"mla_value"``; ``"separate"`` for kernels of ours that compute the
            query one after the other, or ``"linear"`` for the framework's own linear.
        config: the launch configuration; None where no kernel of ours runs, or several do.
        reason: why, in words; a slower path says what keeps from the faster, a fall-back exactly
            what keeps from our kernels.
        origin: what decided: ``"user"`` and ``"shipped"`` are measurements of this kind of GPU,
            ``"public"`` figures that we did not measure, ``"rule"`` everything else.
        runs_on: ``"cuda"`` or ``"cpu"``.
        name_expression: the template instance, where a kernel runs.
        pdl: whether the launch carries the attribute for programmatic dependent launch.
    """

    kernel: str
    config: Any
    reason: str
    origin: str = RULE
    runs_on: str = "cuda"
    name_expression: str | None = None
    pdl: bool = False

    @property
    def is_fallback(self) -> bool:
        """Whether the framework's linear runs, and no kernel of ours."""
        return self.kernel == LINEAR

    @property
    def what(self) -> str:
        """Kernel and configuration in words."""
        return self.kernel if self.config is None else f"{self.kernel}, {self.config}"

    def __str__(self) -> str:
        """One line for people."""
        where = " on the CPU" if self.runs_on == "cpu" else ""
        return printable(f"{self.what}{where}{', PDL' if self.pdl else ''}: {self.reason}")
