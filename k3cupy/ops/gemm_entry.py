"""One entry of a GEMM table: the times measured for one product, and what was chosen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3cupy.ops.fused_a_gemm_config import MAX_TOKENS, FusedAGemmConfig
from k3cupy.ops.skinny_gemm_config import SkinnyGemmConfig

FUSED_A, SKINNY = "fused_a", "skinny"
BACKENDS: Mapping[str, Callable[..., Any]] = {FUSED_A: FusedAGemmConfig, SKINNY: SkinnyGemmConfig}
"""Kernels that tables name -> the class of their configurations."""

USER, SHIPPED, PUBLIC = "user cache", "shipped", "public"
"""Where an entry comes from."""

Times = Mapping[Any, float]
"""Configuration -> microseconds a launch."""

_KEPT = 8192
"""Configurations whose names are kept: tables name the same ones again and again."""


@dataclass(frozen=True)
class Choice:
    """The kernel that an entry names.

    Attributes:
        backend: ``"fused_a"`` or ``"skinny"``.
        config: its configuration; None where the backend's own choice is to be taken.
    """

    backend: str
    config: Any


@dataclass(frozen=True)
class GemmEntry:
    """What is known of one product on one kind of GPU.

    Attributes:
        n: rows of the weight.
        k: its columns.
        tokens: rows of x.
        residual: a residual was added.
        linear_us: microseconds of the framework's linear; None where nobody measured it.
        times: backend -> configuration -> microseconds; empty where nobody measured any.
        chosen: the fastest; None where the framework's linear is.
        source: the table that it comes from: ``"user cache"``, ``"shipped"`` or ``"public"``.
        date: of the measurement, as 2026-11-29.
        sources: digest of the kernels' sources that were measured.
    """

    n: int
    k: int
    tokens: int
    residual: bool
    linear_us: float | None
    times: Mapping[str, Times]
    chosen: Choice | None
    source: str = USER
    date: str = ""
    sources: str = ""

    @property
    def key(self) -> tuple[int, int, int, bool]:
        """What names the product: two entries of one key say different things of the same."""
        return self.n, self.k, self.tokens, self.residual

    @property
    def chosen_us(self) -> float | None:
        """The time of what was chosen, where it was measured."""
        if self.chosen is None:
            return self.linear_us
        return self.times.get(self.chosen.backend, {}).get(self.chosen.config)

    def fields(self) -> dict[str, Any]:
        """Return the entry as JSON has it; ``entry_of`` reads it."""
        found: dict[str, Any] = {
            "n": self.n,
            "k": self.k,
            "tokens": self.tokens,
            "residual": self.residual,
        }
        if self.linear_us is not None:
            found["linear_us"] = self.linear_us
        if self.times:
            found["us"] = {
                backend: {key_of(config): us for config, us in times.items()}
                for backend, times in self.times.items()
            }
        found["chosen"] = self.chosen and {
            "backend": self.chosen.backend,
            "config": self.chosen.config and key_of(self.chosen.config),
        }
        found |= {name: text for name in ("date", "sources") if (text := getattr(self, name))}
        return found


def fastest_of(linear_us: float | None, times: Mapping[str, Times]) -> Choice | None:
    """Return what is the fastest; None for the framework's linear, also where it is as fast."""
    found = [
        (us, Choice(backend, config))
        for backend, of_backend in times.items()
        for config, us in of_backend.items()
    ]
    if not found:
        return None
    us, choice = min(found, key=lambda pair: pair[0])
    return choice if linear_us is None or us < linear_us else None


@functools.lru_cache(maxsize=_KEPT)
def key_of(config: Any) -> str:
    """Return a configuration as a table writes it: its fields, as ``8/16/512/8/8/8/1/1/4``."""
    return "/".join(str(int(value)) for value in dataclasses.astuple(config))


@functools.lru_cache(maxsize=_KEPT)
def config_of(backend: str, key: str) -> Any:
    """Return the configuration that a table writes as ``key``.

    Raises:
        ValueError: there is no such backend, or it has no such configuration.
    """
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}")
    try:
        config = BACKENDS[backend](*_values(BACKENDS[backend], key))
        valid = config.is_valid()
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{backend} has no configuration {key!r}") from error
    if not valid:
        raise ValueError(f"{backend} cannot run the configuration {key!r}")
    return config


def _values(kind: Any, key: str) -> list[int | bool]:
    """Return the values of a configuration's fields, in order; those left out have defaults."""
    numbers, fields = [int(part) for part in key.split("/")], dataclasses.fields(kind)
    if len(numbers) > len(fields):
        raise ValueError(f"expected at most {len(fields)} numbers, got {len(numbers)}")
    values: list[int | bool] = []
    for number, field in zip(numbers, fields, strict=False):
        is_flag = field.type == "bool"
        if is_flag and number not in (0, 1):
            raise ValueError(f"expected 0 or 1 for {field.name}, got {number}")
        values.append(bool(number) if is_flag else number)
    return values


def entry_of(fields: Any, source: str, *, measured: bool = True) -> GemmEntry:
    """Return the entry that JSON holds.

    Args:
        fields: from ``GemmEntry.fields``, by way of JSON.
        source: the table's kind.
        measured: times must be there, and the choice must be what they say. Else a configuration
            that our kernel does not have leaves the choice to the backend.

    Raises:
        ValueError: it is no entry, or its choice is not the fastest.
    """
    try:
        entry = _read(fields, source, measured)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"expected the fields of an entry, got {fields!r:.100}") from error
    if measured:
        _check_choice(entry)
    return entry


def _read(fields: Any, source: str, measured: bool) -> GemmEntry:
    n, k, tokens = (_count(fields[name]) for name in ("n", "k", "tokens"))
    if tokens > MAX_TOKENS:
        raise ValueError(f"expected at most {MAX_TOKENS} tokens, got {tokens}")
    linear_us, chosen = fields.get("linear_us"), fields["chosen"]
    return GemmEntry(
        n=n,
        k=k,
        tokens=tokens,
        residual=bool(fields["residual"]),
        linear_us=None if linear_us is None else _time(linear_us),
        times={
            backend: {config_of(backend, key): _time(us) for key, us in times.items()}
            for backend, times in fields.get("us", {}).items()
        },
        chosen=None if chosen is None else _choice(chosen, measured),
        source=source,
        date=str(fields.get("date", "")),
        sources=str(fields.get("sources", "")),
    )


def _choice(fields: Any, measured: bool) -> Choice:
    backend, key = fields["backend"], fields["config"]
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}")
    try:
        return Choice(backend, None if key is None else config_of(backend, key))
    except ValueError:
        if measured:
            raise
        return Choice(backend, None)


def _check_choice(entry: GemmEntry) -> None:
    if entry.linear_us is None:
        raise ValueError("expected the time of the framework's linear")
    if entry.chosen is None:
        return
    us = entry.chosen_us
    every = [us for times in entry.times.values() for us in times.values()]
    if us is None or us > min([entry.linear_us, *every]):
        raise ValueError(f"the choice {entry.chosen} is not the fastest of what was measured")


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"expected an integer above 0, got {value!r}")
    return value


def _time(value: Any) -> float:
    if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"expected a time above 0, got {value!r}")
    return float(value)
