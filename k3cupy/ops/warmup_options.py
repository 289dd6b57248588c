"""The arguments of ``warmup`` that say what will be called; which of them an operation takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from k3cupy.ops import checks
from k3cupy.runtime.instances import Instance

EVERY_CACHE = ("bf16", "fp8", "fp8_ds_mla")

Wanted = Callable[[int], Sequence[Instance]]
"""Gives the instances that calls will need on a GPU, by its ordinal."""


@dataclass(frozen=True)
class WarmupOptions:
    """What the caller of ``warmup`` asks for; its docstring says what each field means."""

    dtype: str | Sequence[str] = "bfloat16"
    kv_cache: str | Sequence[str] = EVERY_CACHE
    query_fp8: bool | Sequence[bool] | None = None
    rope: bool | Sequence[bool] = False
    kv_inputs_ready: bool | Sequence[bool] = False
    vector: bool | Sequence[bool] = True
    split: Any = None
    config: Any = None
    shapes: Sequence[tuple[int, int]] | None = None
    tokens: int | Sequence[int] | None = None
    strided: bool | Sequence[bool] | None = None
    weight_is_static: bool | Sequence[bool] = False
    batch_invariant: bool | Sequence[bool] = False
    residual: bool | Sequence[bool] = False

    def refuse_all_but(self, names: Collection[str], op: str) -> None:
        """Refuse options that mean nothing to an operation.

        Args:
            names: those that it takes.
            op: its name.

        Raises:
            ValueError: another one is not at its default.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            plain = tuple(value) if isinstance(value, list) else value
            if field.name not in names and plain not in (field.default, (field.default,)):
                checks.reject(field.name, f"nothing with op={op!r}", repr(value))


def several(value: Any) -> Sequence[Any]:
    """Return the values of an option that takes one or several: texts, flags, numbers."""
    return [value] if isinstance(value, str | bool | int) else list(value)


def dtypes_of(options: WarmupOptions, is_valid: Callable[[str], bool]) -> Sequence[str]:
    """Return the types of the inputs.

    Raises:
        ValueError: the kernels do not exist for one of them.
    """
    names: Sequence[str] = several(options.dtype)
    for name in names:
        if not is_valid(name):
            checks.reject("dtype", "'bfloat16' or 'float16'", repr(name))
    return names
