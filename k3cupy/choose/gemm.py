"""Which kernel and configuration a product of a few tokens with a weight gets, asked once.

The only answer there is: a direct call of one of the GEMMs, a linear layer, their explanations, a
warm-up and a report all ask ``choose``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from k3cupy.call.choice import LINEAR, NAMED, PUBLIC, RULE, Choice
from k3cupy.call.plans import tables as tables_state
from k3cupy.choose import fused_a_gemm as fused_a_model
from k3cupy.choose import skinny_gemm as skinny_model
from k3cupy.choose.table import GEMM, KERNELS, Entry, Table, tables_of, why_unknown
from k3cupy.kernels import fused_a_gemm, skinny_gemm
from k3cupy.kernels.fused_a_gemm import MAX_TOKENS, FusedAGemmConfig
from k3cupy.runtime.devices import OLDEST, OLDEST_ARCH, DeviceInfo

FUSED_A, SKINNY = fused_a_gemm.KERNEL, skinny_gemm.KERNEL
OURS = (FUSED_A, SKINNY)
ALL = (*OURS, LINEAR)
"""What a linear layer may run."""

_Candidates = Mapping[str, Callable[..., tuple[Any, ...]]]
_CANDIDATES: _Candidates = {FUSED_A: fused_a_model.candidates, SKINNY: skinny_model.candidates}
_RANKED: _Candidates = {**_CANDIDATES, FUSED_A: fused_a_model.ranked}
"""Kernel -> what is worth measuring; and what its cost model knows, the likeliest first."""

NOT_INVARIANT = "; so batch invariance does not hold for this call"

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, MAX_TOKENS)
"""Numbers of tokens that are measured; a call takes the next one from its own upwards."""

TOKEN_CLASSES = (1, 8, 16, 32, MAX_TOKENS)
"""Numbers of tokens that differ in kind; no call takes an entry from beyond its own class."""

_ROWS_AN_SM = 32
"""Rows of a weight, a multiprocessor, from which on the rule of thumb leaves more than 32 tokens to
cuBLAS, which may be faster than the cost model's configuration. Held against what was measured of
the H200's 58 weights at 64 tokens, that loses 7% on average, any number from 28 on the same."""


def class_of(num_tokens: int) -> int:
    """Return the token class of a number of tokens from 1 to 64."""
    return next(size for size in TOKEN_CLASSES if size >= num_tokens)


def problem_of(n: int, k: int, *, residual: bool = False) -> str:
    """Return a product as tables name it."""
    return f"bfloat16 {n}x{k}{' + residual' if residual else ''}"


def choose(
    kernels: Sequence[str],
    n: int,
    k: int,
    num_tokens: int,
    gpu: DeviceInfo,
    *,
    residual: bool = False,
    batch_invariant: bool = False,
    config: Any = None,
    why_not_mapped: str | None = None,
    measured_as: str = "",
) -> Choice:
    """Return what runs for a product that the kernels accept.

    Args:
        kernels: which may run, of ``ALL``. Without ``"linear"`` one of ours is named even where the
            framework's linear was faster.
        n: rows of the weight.
        k: its columns.
        num_tokens: rows of x, at least 1.
        gpu: the GPU.
        residual: a residual is added. It is a problem of its own, with measurements of its own: the
            same configuration gives the same bits with a residual of zeros, another one may sum in
            another order.
        batch_invariant: the bits of a row may not depend on the other rows, nor on their number.
        config: what the caller named, checked; it decides.
        why_not_mapped: what keeps the copy engine from fetching x, empty where that is told
            already; None for nothing.
        measured_as: how measurements differ from this call, empty where they do not.
    """
    if config is not None:
        found = Choice(kernels[0], config, NAMED)
    else:
        of = _Product(n, k, num_tokens, gpu)
        found = _chosen(tuple(kernels), of, residual, batch_invariant, tables_state())
        if measured_as and found.origin != RULE:
            found = replace(found, reason=f"{found.reason}, {measured_as}")
    if found.kernel != FUSED_A or not found.config.mapped_x:
        return found
    fused: FusedAGemmConfig = found.config
    if why_not_mapped is None and not fused.can_map(k):
        why_not_mapped = f"K = {k} is no multiple of {fused.split_k * fused.tile_k}"
    if why_not_mapped is None:
        return found
    told = f"; x by copy warps, because {why_not_mapped}" if why_not_mapped else ""
    return replace(found, config=fused.with_copy_warps(), reason=found.reason + told)


class _Product(NamedTuple):
    """What is asked for, on which GPU."""

    n: int
    k: int
    num_tokens: int
    gpu: DeviceInfo

    @property
    def unknown(self) -> str:
        """Why no measurement decides."""
        last = class_of(self.num_tokens)
        first = max((size for size in TOKEN_CLASSES if size < last), default=0) + 1
        rows = f"{first} to {last} rows" if first < last else "1 row"
        return why_unknown(GEMM, f"{self.n} x {self.k} with {rows}", self.gpu)


@functools.lru_cache(maxsize=4096)
def _chosen(
    kernels: tuple[str, ...], of: _Product, residual: bool, batch_invariant: bool, _state: int
) -> Choice:
    if LINEAR in kernels:
        refusal = _why_none(of, batch_invariant)
        if refusal is not None:
            return _linear(refusal + (NOT_INVARIANT if batch_invariant else ""))
    if batch_invariant:
        return _invariant(of)
    for table in tables_of(GEMM, of.gpu):
        entry, told = entry_at(table, of.n, of.k, of.num_tokens, residual)
        if entry is not None:
            found = _known(kernels, table, entry, of, told)
            if found is not None:
                return found
    return _by_rule(kernels, of)


def _why_none(of: _Product, batch_invariant: bool) -> str | None:
    """Return in words why none of our kernels can compute a product, or None where one can."""
    if of.gpu.compute_capability < OLDEST:
        return f"{of.gpu.name} is {of.gpu.arch}; our kernels need {OLDEST_ARCH}"
    if batch_invariant:
        return why_not(FUSED_A, of.k, min(of.num_tokens, MAX_TOKENS))
    if of.num_tokens > MAX_TOKENS:
        return f"x: expected at most {MAX_TOKENS} rows, got more"  # one line of the report for all
    return None


def _linear(reason: str, origin: str = RULE) -> Choice:
    return Choice(LINEAR, None, reason, origin)


def why_not(kernel: str, k: int, num_tokens: int) -> str | None:
    """Return in words why a kernel of ours cannot compute a product, or None where it can."""
    module = KERNELS[kernel]
    if k % module.K_MULTIPLE:
        return f"x: expected K a multiple of {module.K_MULTIPLE}, got {k}"
    if num_tokens > module.MAX_TOKENS:
        return f"x: expected at most {module.MAX_TOKENS} rows, got {num_tokens}"
    return None


# --- Measured ------------------------------------------------------------------------------------


def entry_at(
    table: Table, n: int, k: int, num_tokens: int, residual: bool
) -> tuple[Entry | None, str]:
    """Return what a table says of a product, and what is to be told of that.

    Where it knows no residual, what it knows without one stands in.
    """
    found = table.entries(problem_of(n, k, residual=residual))
    told = ""
    if residual and not found:
        found, told = table.entries(problem_of(n, k)), ", without the residual"
    if table.origin == PUBLIC:
        # Published figures list the numbers of tokens at which a kernel won, and no other.
        lost = Entry(problem_of(n, k), num_tokens, {}, LINEAR, None)
        return (found.get(num_tokens, lost) if found else None), told
    fitting = [t for t in found if num_tokens <= t <= class_of(num_tokens)]
    return (found[min(fitting)] if fitting else None), told


def fits(kernel: str, config: Any, num_tokens: int, gpu: DeviceInfo) -> Any:
    """Return a table's configuration for a number of tokens; None where it does not fit."""
    if config is None:
        return None
    if kernel == FUSED_A:
        return config if config.fits(num_tokens, gpu) else None
    fitted = replace(config, num_rows=num_tokens)
    return fitted if fitted.is_valid(gpu) else None


def _known(
    kernels: Sequence[str], table: Table, entry: Entry, of: _Product, told: str
) -> Choice | None:
    """Return the fastest of the kernels by an entry; None where it knows none of them."""
    if table.origin == PUBLIC:
        return _published(entry, of, told) if LINEAR in kernels else None
    ranked = [
        (us, kernel, config)
        for kernel in sorted(kernels, key=lambda kernel: kernel != LINEAR)
        for config, us in entry.times.get(kernel, {}).items()
    ]
    ranked.sort(key=lambda found: found[0])  # of equal times the framework's linear comes first
    where = f"on {of.gpu.name} at M = {entry.size}{told}"
    for us, kernel, config in ranked:
        if kernel == LINEAR:
            best = f" ({us:.2f} against {ranked[1][0]:.2f} us)" if len(ranked) > 1 else ""
            return _linear(f"F.linear was faster {where}{best}", table.origin)
        fitted = fits(kernel, config, of.num_tokens, of.gpu)
        if fitted is not None:
            beside = f", F.linear {entry.linear_us:.2f} us" if entry.linear_us else ""
            return Choice(kernel, fitted, f"measured {where}: {us:.2f} us{beside}", table.origin)
    return None


def _published(entry: Entry, of: _Product, told: str) -> Choice:
    """Return what others found to be the fastest, by a configuration of ours where it has none."""
    where = f"at M = {entry.size}{told}"
    told = f"public figures for {of.gpu.arch}, not measured by us, name"
    if entry.kernel == LINEAR:
        return _linear(f"{told} no kernel for {of.n} x {of.k} {where}", PUBLIC)
    config = fits(entry.kernel, entry.config, of.num_tokens, of.gpu)
    return _ours(entry.kernel, of, f"{told} {entry.kernel} {where}", PUBLIC, config)


def _invariant(of: _Product) -> Choice:
    """Return the fused-A GEMM with one summation order for every number of tokens."""
    slices = f" in slices of {MAX_TOKENS} rows" if of.num_tokens > MAX_TOKENS else ""
    if slices and of.num_tokens % MAX_TOKENS:  # no number, or reports had a row for each
        slices += ", the rest by the configuration for so many rows"
    of = of._replace(num_tokens=min(of.num_tokens, MAX_TOKENS))
    for table in tables_of(GEMM, of.gpu):
        config = _invariant_config(table, of)
        if config is not None:
            where = f"measured on {of.gpu.name} for {of.n} x {of.k}, M = {class_of(of.num_tokens)}"
            reason = f"batch-invariant{slices}; {where}, one summation order for all M"
            return Choice(FUSED_A, config, reason, table.origin)
    config, why = _modelled(FUSED_A, of, batch_invariant=True)
    return Choice(FUSED_A, config, f"batch-invariant{slices}; {why}")


def _invariant_config(table: Table, of: _Product) -> FusedAGemmConfig | None:
    """Return the fastest of one summation order, the order with the least worst loss.

    None where some number of tokens has no valid configuration of a common order: then no
    number of tokens may take its order from the table.
    """
    entries = table.entries(problem_of(of.n, of.k))
    if not set(TOKEN_CLASSES) <= set(entries):
        return None
    of_orders: dict[Any, dict[int, tuple[float, FusedAGemmConfig]]] = {}
    for tokens in TOKEN_CLASSES:
        for config, us in entries[tokens].times.get(FUSED_A, {}).items():
            if config.fits(tokens, of.gpu):
                fastest = of_orders.setdefault(config.order, {})
                if tokens not in fastest or us < fastest[tokens][0]:
                    fastest[tokens] = us, config
    common = [by for _, by in sorted(of_orders.items()) if len(by) == len(TOKEN_CLASSES)]
    if not common:
        return None
    least = {t: min(by[t][0] for by in of_orders.values() if t in by) for t in TOKEN_CLASSES}
    best = min(common, key=lambda by: max(us / least[t] for t, (us, _) in by.items()))
    return best[class_of(of.num_tokens)][1]


# --- By rule -------------------------------------------------------------------------------------


def _by_rule(kernels: Sequence[str], of: _Product) -> Choice:
    """Return the rule's answer for a product that nobody measured on such a GPU."""
    if LINEAR not in kernels:
        return Choice(kernels[0], *_modelled(kernels[0], of))
    if of.gpu.compute_capability >= (9, 0):
        few, most = 16, MAX_TOKENS if of.n < _ROWS_AN_SM * of.gpu.num_sms else 32
        rule = (
            "the rule for sm_90 and newer takes skinny up to 16 tokens, fused_a up to 32, or 64 "
            f"for weights of less than {_ROWS_AN_SM} rows a multiprocessor"
        )
    else:
        few, most = 2, 8
        rule = "the rule for sm_80 to sm_89 takes skinny up to 2 tokens, fused_a up to 8"
    kernel = SKINNY if of.num_tokens <= few else FUSED_A if of.num_tokens <= most else LINEAR
    reason = f"not measured here, {of.unknown}: {rule}. `python -m k3cupy tune` measures it"
    return _linear(reason) if kernel == LINEAR else _ours(kernel, of, reason)


def _ours(kernel: str, of: _Product, reason: str, origin: str = RULE, config: Any = None) -> Choice:
    """Return a kernel of ours, by its cost model where no configuration is known."""
    refusal = why_not(kernel, of.k, of.num_tokens)
    if refusal is not None:
        return _linear(refusal)
    if config is None:
        config, why = _modelled(kernel, of)
        reason += f"; configuration: {why}" if origin == PUBLIC else ""
    return Choice(kernel, config, reason, origin)


def _modelled(kernel: str, of: _Product, **options: bool) -> tuple[Any, str]:
    """Return the best configuration of a kernel by its cost model, and the reason in words."""
    possible = _RANKED[kernel](*of, **options)
    return possible[0], f"{of.unknown}: the best of {len(possible)} candidates by the cost model"


# --- To be measured ------------------------------------------------------------------------------


def candidates(kernel: str, n: int, k: int, num_tokens: int, gpu: DeviceInfo) -> tuple[Any, ...]:
    """Return the configurations of a kernel that are worth measuring; none where it cannot run."""
    if why_not(kernel, k, num_tokens) is not None:
        return ()
    return _CANDIDATES[kernel](n, k, num_tokens, gpu)
