"""What a call will run, and why: the answer of every ``explain_*`` and the row of every report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from k3cupy.runtime.text import Shown, printable, table_of

if TYPE_CHECKING:
    from rich.table import Table

LINEAR = "linear"
"""The kernel of a fall-back: the framework's own linear."""

NAMED = "the caller named the configuration"

USER, SHIPPED, PUBLIC, RULE = "user", "shipped", "public", "rule"
"""Where a choice comes from."""


@dataclass(frozen=True, repr=False)
class Choice(Shown):
    """A kernel with its configuration, and the reason; prints as a line, in notebooks as a table.

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

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain values, the configuration by the names of its fields."""
        config = None if self.config is None else asdict(self.config)
        return {**vars(self), "config": config}

    def __rich__(self) -> Table:
        """A row a fact, for ``rich.print`` and notebooks."""
        facts = {
            "kernel": self.kernel,
            "configuration": "" if self.config is None else str(self.config),
            "why": self.reason,
            "decided by": self.origin,
            "runs on": self.runs_on + (", PDL" if self.pdl else ""),
            "instance": self.name_expression or "",
        }
        return table_of(("what", "value"), [fact for fact in facts.items() if fact[1]])

    def __str__(self) -> str:
        """One line for people."""
        where = " on the CPU" if self.runs_on == "cpu" else ""
        return printable(f"{self.what}{where}{', PDL' if self.pdl else ''}: {self.reason}")
