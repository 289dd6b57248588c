"""What is measured, in which order, and with which candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3cupy.choose import gemm, mla
from k3cupy.choose.fused_a_gemm import tile_m_of
from k3cupy.choose.gemm import FUSED_A, OURS, SKINNY, TOKEN_CLASSES
from k3cupy.choose.table import (
    GEMM,
    KERNELS,
    MLA_DECODE,
    MLA_NORM,
    MLA_PREFILL,
    MLA_QUERY,
    MLA_VALUE,
)
from k3cupy.kernels import (
    fused_a_gemm,
    mla_norm,
    mla_prefill,
    mla_query,
    mla_value,
    skinny_gemm,
)
from k3cupy.ops.warmup import shapes_of
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.instances import Instance
from k3cupy.runtime.tensors import is_integer
from k3cupy.tuning.entries import LINEAR, SEPARATE, Candidate, Known

_FORMATS = ("16bit+same", "fp8+fp8", "16bit+ds_mla", "16bit+fp8", "fp8+same")
KINDS = {
    MLA_DECODE: _FORMATS,
    MLA_PREFILL: mla_prefill.OPS,
    MLA_NORM: (mla_norm.Variant("bfloat16").kind,),
    MLA_QUERY: _FORMATS[:1],
    MLA_VALUE: (mla_value.GATED, mla_value.VALUE, mla_value.ABSORB),
}
"""Problems of the kernels of an MLA layer: query format + cache format, or what is computed."""

_FEW_TO_MANY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

TOKENS = {
    GEMM: gemm.TOKENS,
    MLA_DECODE: (1, 2, 4, 8, 16, 32, 64, 65, 128, 256, 512, 1024, 2048, 4096),
    MLA_PREFILL: (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 16_384, 65_536),
    MLA_NORM: _FEW_TO_MANY,
    MLA_QUERY: (1, 2, 3, 4, 5, 6, 8, 12, mla_query.MAX_TOKENS),
    MLA_VALUE: _FEW_TO_MANY,
}
"""Numbers of tokens that are measured where nobody names any."""

_BEST_OF_NEIGHBOUR, _BEST_TILES = 4, 6
"""Between the token classes only as many of the neighbours' best are measured, of fused-A, and of
skinny with tensor cores."""


class _Target:
    """One problem of one size, as tables name them: what both kinds of targets share."""

    problem: Any
    size: Any
    tokens: int

    @property
    def key(self) -> tuple[str, int]:
        """What names it, as ``Entry.key``."""
        return self.problem, self.size

    def why_not(self, _gpu: DeviceInfo) -> str | None:
        """Return in words why a GPU leaves nothing to measure, or None."""
        return None

    def __str__(self) -> str:
        """For people: ``bfloat16 2112x7168, M = 4``."""
        return f"{self.problem}, M = {self.tokens}"


@dataclass(frozen=True)
class GemmTarget(_Target):
    """A product: [tokens, k] times [n, k] transposed, a residual added or not.

    It is timed beside the framework's linear, which needs no check.
    """

    n: int
    k: int
    tokens: int
    residual: bool = False

    family = GEMM
    beside = (LINEAR,)

    @property
    def problem(self) -> str:
        """The weight."""
        return gemm.problem_of(self.n, self.k, residual=self.residual)

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.tokens

    @property
    def follows(self) -> tuple[str, int] | None:
        """The product without a residual: only its best are measured with one."""
        return replace(self, residual=False).key if self.residual else None

    def candidates(self, known: Known, gpu: DeviceInfo) -> tuple[Candidate, ...]:
        """Return what is worth measuring; what is known narrows it.

        Without a residual that is all that the kernels have, and between the classes of tokens the
        best of the neighbours and all dot products, which know no tile of tokens.
        """
        if self.residual:
            plain = replace(self, residual=False)
            return tuple(c for kernel in OURS for c in _best(known, plain, kernel, 2))
        fused = self._best_of_neighbours(known) or self._every(FUSED_A, gpu)
        skinny = self._every(SKINNY, gpu)
        best = self._best_tiles_of_class(known)
        if best:
            skinny = [*best, *(c for c in skinny if not c.config.is_mma)]
        return (*fused, *skinny)

    def _every(self, kernel: str, gpu: DeviceInfo) -> list[Candidate]:
        found = gemm.candidates(kernel, self.n, self.k, self.tokens, gpu)
        return [Candidate(kernel, config) for config in found]

    def _best_of_neighbours(self, known: Known) -> list[Candidate]:
        """Return the best of fused-A in the classes around a number of tokens that is no class."""
        above = gemm.class_of(self.tokens)
        if self.tokens == above:
            return []
        best = _best(known, replace(self, tokens=above), FUSED_A, _BEST_OF_NEIGHBOUR)
        below = max(count for count in TOKEN_CLASSES if count < self.tokens)
        if best and tile_m_of(below) == tile_m_of(self.tokens):
            best += _best(known, replace(self, tokens=below), FUSED_A, _BEST_OF_NEIGHBOUR)
        return list(dict.fromkeys(best))

    def _best_tiles_of_class(self, known: Known) -> list[Candidate]:
        """Return the best of skinny with tensor cores at the class of a number that is no class."""
        above = gemm.class_of(self.tokens)
        if self.tokens == above:
            return []
        ranked = _best(known, replace(self, tokens=above), SKINNY)
        tiles = [replace(c.config, num_rows=self.tokens) for c in ranked if c.config.is_mma]
        return [Candidate(SKINNY, config) for config in tiles[:_BEST_TILES]]

    def instance(self, candidate: Candidate) -> Instance:
        """Return what has to be compiled to run a candidate as a linear layer does, x packed."""
        variants = {
            FUSED_A: fused_a_gemm.Variant(True, True, self.residual),
            SKINNY: skinny_gemm.Variant("bfloat16", True, self.residual, True, k=self.k),
        }
        found: Instance = candidate.config.instance(variants[candidate.kernel])
        return found


def _best(
    known: Known, target: GemmTarget, kernel: str, count: int | None = None
) -> list[Candidate]:
    """Return the fastest of a kernel, or nothing where they were not measured."""
    entry = known.get(target.key)
    times = entry.times.get(kernel, {}) if entry else {}
    return [Candidate(kernel, config) for config in sorted(times, key=times.__getitem__)[:count]]


@dataclass(frozen=True)
class MlaTarget(_Target):
    """A call of a kernel of an MLA layer, without RoPE, rows at multiples of 16 bytes.

    The query front is timed in 16 bits, beside the separate kernels that compute the same.
    """

    family: str
    kind: str
    tokens: int
    heads: int

    follows = None

    @property
    def problem(self) -> str:
        """What tables list it as."""
        return mla.problem_of(self.family, self.kind, self.heads)

    @property
    def beside(self) -> tuple[Candidate, ...]:
        """What needs no check, and what a kernel has to beat."""
        return (SEPARATE,) if self.family == MLA_QUERY else ()

    @property
    def size(self) -> int:
        """The rows by which tables list it."""
        return mla.size_of(self.family, self.tokens, self.heads)

    def why_not(self, gpu: DeviceInfo) -> str | None:
        """Return in words why separate kernels run on a GPU in any case, or None."""
        return mla_query.why_not(self.tokens, None, gpu) if self.family == MLA_QUERY else None

    def candidates(self, known: Known, gpu: DeviceInfo) -> tuple[Candidate, ...]:
        """Return every configuration, of what runs on a GPU."""
        if self.why_not(gpu) is not None:
            return ()
        return tuple(Candidate(self.family, c) for c in KERNELS[self.family].CANDIDATES)

    def instance(self, candidate: Candidate) -> Instance:
        """Return what bfloat16 inputs run."""
        of_kernel: Any = KERNELS[self.family].Variant
        make = of_kernel if self.family == MLA_PREFILL else of_kernel.of_kind
        variant = make(self.kind, "bfloat16")
        if self.family == MLA_QUERY:
            variant = replace(variant, tile_m=mla_query.tile_of(self.tokens))
        found: Instance = candidate.config.instance(variant)
        return found


Target = GemmTarget | MlaTarget


def gemm_targets(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int] | None, *, residual: bool
) -> tuple[Target, ...]:
    """Return products in order.

    The token classes of a shape come first, as what lies between takes their best; residuals come
    last, when their kernels have been compiled behind everything else.

    Raises:
        ValueError: a shape or a number of tokens that no table can list.
    """
    counts = _several("tokens", TOKENS[GEMM] if tokens is None else tokens)
    for count in counts:
        if count not in TOKENS[GEMM]:
            listed = ", ".join(map(str, TOKENS[GEMM]))
            hint = "A call with another number takes the next one upwards"
            reject("tokens", f"some of {listed}", shown(count), hint)
    pairs = dict.fromkeys(shapes_of(list(shapes), skinny_gemm.K_MULTIPLE))
    ordered = sorted(counts, key=lambda count: (count not in TOKEN_CLASSES, count))
    plain = [GemmTarget(n, k, count) for n, k in pairs for count in ordered]
    return (*plain, *(replace(t, residual=True) for t in plain if residual))


def mla_targets(
    family: str, kinds: Sequence[str] | None, tokens: Sequence[int] | None, heads: int
) -> tuple[Target, ...]:
    """Return calls of a kernel of an MLA layer in order.

    Raises:
        ValueError: a kind that does not exist, or a number of tokens or heads that no call has.
    """
    named = _several("kinds", KINDS[family] if kinds is None else kinds)
    for kind in named:
        if kind not in KINDS[family]:
            reject("kinds", f"some of {', '.join(KINDS[family])}", shown(kind))
    counts = _several("tokens", TOKENS[family] if tokens is None else tokens)
    (heads,) = _several("num_heads", [heads])
    for name, number in (("num_heads", heads), *(("tokens", count) for count in counts)):
        if type(number) is not int or number < 1:
            reject(name, "integers above 0", shown(number))
    if family == MLA_QUERY and max(counts) > mla_query.MAX_TOKENS:
        hint = "More tokens run in separate kernels"
        reject("tokens", f"at most {mla_query.MAX_TOKENS}", shown(max(counts)), hint)
    return tuple(MlaTarget(family, kind, count, heads) for kind in named for count in counts)


def _several(name: str, values: Sequence[Any]) -> list[Any]:
    found = dict.fromkeys(int(value) if is_integer(value) else value for value in values)
    if not found:
        reject(name, "at least one", "none")
    return list(found)
