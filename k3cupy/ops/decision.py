"""What an operation will run for given arguments, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decision:
    """The answer of an ``explain_*`` function.

    Attributes:
        backend: ``"cuda"`` or, for CPU tensors, ``"reference"``.
        config: the launch configuration, where a kernel runs.
        name_expression: the template instance, where a kernel runs.
        pdl: whether the launch carries the attribute for programmatic dependent launch.
        reason: why this configuration, in words; a slower path says what keeps from the faster.
    """

    backend: str
    config: Any
    name_expression: str | None
    pdl: bool
    reason: str

    def __str__(self) -> str:
        """One line for people."""
        what = self.backend if self.config is None else f"{self.backend} {self.config}"
        return f"{what}{', PDL' if self.pdl else ''}: {self.reason}"
