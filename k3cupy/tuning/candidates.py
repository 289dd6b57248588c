"""What is measured, in which order, and with which candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3cupy.dispatch import backends
from k3cupy.dispatch.decision import LINEAR as FRAMEWORK
from k3cupy.dispatch.presets import Shapes
from k3cupy.ops import checks, gemm_tables
from k3cupy.ops.fused_a_gemm_choice import tile_m_of
from k3cupy.ops.gemm_entry import FUSED_A, GemmEntry, fastest_of, key_of
from k3cupy.ops.gemm_tables import TOKEN_CLASSES, class_of
from k3cupy.ops.skinny_gemm_config import K_MULTIPLE
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance

_BEST_OF_NEIGHBOUR = 4
"""Between the token classes only as many of the neighbours' best are measured."""

_BEST_FOR_RESIDUAL = 2


@dataclass(frozen=True)
class Target:
    """One product to measure: [tokens, k] times [n, k] transposed, a residual added or not."""

    n: int
    k: int
    tokens: int
    residual: bool = False

    @property
    def key(self) -> tuple[int, int, int, bool]:
        """What names the product, as ``GemmEntry.key``."""
        return self.n, self.k, self.tokens, self.residual

    @property
    def row(self) -> str:
        """The weight, for people: ``2112x7168`` or ``2112x7168 + residual``."""
        return f"{self.n}x{self.k}{' + residual' if self.residual else ''}"

    def __str__(self) -> str:
        """For people: ``2112x7168, M = 4`` or ``2112x7168 + residual, M = 4``."""
        return f"{self.row}, M = {self.tokens}"


@dataclass(frozen=True)
class Candidate:
    """A kernel with its configuration, or the framework's linear.

    Attributes:
        backend: ``"fused_a"``, ``"skinny"`` or ``"linear"``.
        config: its configuration; None for the framework's.
    """

    backend: str
    config: Any = None

    def instance(self, target: Target) -> Instance:
        """Return what has to be compiled to run it, as a linear layer calls it with packed x."""
        backend = backends.get(self.backend)
        return next(
            backend.instances(self.config, weight_is_static=True, has_residual=target.residual)
        )

    def __str__(self) -> str:
        """As tables name it: ``fused_a 8/16/512/8/8/8/1/1/4``."""
        return self.backend if self.config is None else f"{self.backend} {key_of(self.config)}"


LINEAR = Candidate(FRAMEWORK)

Known = Mapping[tuple[int, int, int, bool], GemmEntry]
"""What was measured so far, by ``Target.key``."""


def entry_from(target: Target, times: Mapping[Candidate, float]) -> GemmEntry:
    """Return the entry of a table for a product whose candidates take so long, in microseconds.

    Args:
        target: the product.
        times: with that of the framework's linear.
    """
    by_backend: dict[str, dict[Any, float]] = {}
    for candidate, us in times.items():
        if candidate != LINEAR:
            by_backend.setdefault(candidate.backend, {})[candidate.config] = us
    chosen = fastest_of(times[LINEAR], by_backend)
    return GemmEntry(*target.key, times[LINEAR], by_backend, chosen)


def times_of(entry: GemmEntry) -> dict[Candidate, float]:
    """Return what ``entry_from`` made an entry of."""
    times = {
        Candidate(backend, config): us
        for backend, of_backend in entry.times.items()
        for config, us in of_backend.items()
    }
    return times if entry.linear_us is None else {LINEAR: entry.linear_us, **times}


def targets(shapes: Shapes, tokens: Sequence[int], *, residual: bool) -> tuple[Target, ...]:
    """Return what is measured, in order.

    The token classes of a shape come first, as what lies between takes their best; residuals come
    last, when their kernels have been compiled behind everything else.

    Raises:
        TypeError, ValueError: a shape or a number of tokens that no table can list.
    """
    counts = _checked_tokens(tokens)
    ordered = sorted(counts, key=lambda count: (count not in TOKEN_CLASSES, count))
    plain = [Target(n, k, count) for n, k in _checked_shapes(shapes) for count in ordered]
    added = [Target(t.n, t.k, t.tokens, residual=True) for t in plain] if residual else []
    return (*plain, *added)


def _checked_shapes(shapes: Iterable[Any]) -> list[tuple[int, int]]:
    found = []
    for shape in shapes:
        try:
            n, k = shape
            is_pair = type(n) is int and type(k) is int and min(n, k) > 0
        except (TypeError, ValueError):
            is_pair = False
        if not is_pair:
            checks.reject("shapes", "pairs (N, K) of integers above 0", repr(shape))
        if k % K_MULTIPLE:
            checks.reject("shapes", f"K a multiple of {K_MULTIPLE}", repr(shape))
        found.append((n, k))
    if not found:
        checks.reject("shapes", "at least one", "none")
    return list(dict.fromkeys(found))


def _checked_tokens(tokens: Iterable[Any]) -> list[int]:
    found = list(dict.fromkeys(tokens))
    for count in found:
        if count not in gemm_tables.TOKENS:
            checks.reject(
                "tokens",
                "some of " + ", ".join(map(str, gemm_tables.TOKENS)),
                repr(count),
                "A call with another number takes the next one upwards",
            )
    if not found:
        checks.reject("tokens", "at least one", "none")
    return found


def candidates(target: Target, known: Known, device: DeviceInfo) -> tuple[Candidate, ...]:
    """Return what is worth measuring for a product, the framework's linear aside.

    Args:
        target: the product.
        known: what has been measured; it narrows the choice.
        device: the GPU.
    """
    if target.residual:
        return _best_for_residual(target, known)
    found = [c for name in backends.names() for c in _every(name, target, device)]
    neighbours = _best_of_neighbours(target, known)
    if neighbours:
        found = [*neighbours, *(c for c in found if c.backend != FUSED_A)]
    return tuple(found)


def _every(name: str, target: Target, device: DeviceInfo) -> list[Candidate]:
    """Return all that a backend has to offer for a product."""
    backend, numbers = backends.get(name), (target.n, target.k, target.tokens)
    if backend.why_not(*numbers) is not None:
        return []
    return [Candidate(name, config) for config in backend.candidates(*numbers, device)]


def _best_of_neighbours(target: Target, known: Known) -> Iterable[Candidate]:
    """Return the best of fused-A in the classes around a number of tokens that is none itself."""
    here, above = target.tokens, class_of(target.tokens)
    if here == above:
        return ()
    best = _best(known, Target(target.n, target.k, above), FUSED_A, _BEST_OF_NEIGHBOUR)
    below = max(count for count in TOKEN_CLASSES if count < here)
    if best and tile_m_of(below) == tile_m_of(here):
        best += _best(known, Target(target.n, target.k, below), FUSED_A, _BEST_OF_NEIGHBOUR)
    return dict.fromkeys(best)


def _best_for_residual(target: Target, known: Known) -> tuple[Candidate, ...]:
    plain = Target(target.n, target.k, target.tokens)
    return tuple(
        candidate
        for name in backends.names()
        for candidate in _best(known, plain, name, _BEST_FOR_RESIDUAL)
    )


def _best(known: Known, target: Target, backend: str, count: int) -> list[Candidate]:
    """Return the fastest of a backend, or nothing where they were not measured."""
    entry = known.get(target.key)
    times = entry.times.get(backend, {}) if entry else {}
    return [Candidate(backend, config) for config in sorted(times, key=times.__getitem__)[:count]]
