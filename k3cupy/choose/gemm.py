"""Which kernel and configuration a product of a few tokens with a weight gets, asked once.

The only answer there is: a direct call of one of the GEMMs, a linear layer, their explanations, a
warm-up and a report all ask ``choose``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from k3cupy.call.choice import LINEAR, NAMED, PUBLIC, RULE, Choice
from k3cupy.call.plans import tables as tables_state
from k3cupy.choose import fused_a_gemm as fused_a_model
from k3cupy.choose import skinny_gemm as skinny_model
from k3cupy.choose.table import GEMM, KERNELS, Entry, Table, tables_of, why_unknown
from k3cupy.kernels import fused_a_gemm, skinny_gemm
from k3cupy.kernels.fused_a_gemm import MAX_TOKENS, FusedAGemmConfig
from k3cupy.runtime.devices import DeviceInfo

FUSED_A, SKINNY = fused_a_gemm.KERNEL, skinny_gemm.KERNEL
OURS = (FUSED_A, SKINNY)
ALL = (*OURS, LINEAR)
"""What a linear layer may run."""

_CANDIDATES: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    FUSED_A: fused_a_model.candidates,
    SKINNY: skinny_model.candidates,
}

NOT_INVARIANT = "; so batch invariance does not hold for this call"

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, MAX_TOKENS)
"""Numbers of tokens that are measured; a call takes the next one from its own upwards."""

TOKEN_CLASSES = (1, 8, 16, 32, MAX_TOKENS)
"""Numbers of tokens that differ in kind; no call takes an entry from beyond its own class."""

_LARGE_WEIGHT = 32_000_000
"""Bytes of a weight from which on the rule of thumb leaves more than 16 tokens to cuBLAS."""


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
    """
    if config is not None:
        found = Choice(kernels[0], config, NAMED)
    else:
        found = _chosen(
            tuple(kernels), n, k, num_tokens, gpu, residual, batch_invariant, tables_state()
        )
    if found.kernel != FUSED_A or not found.config.mapped_x:
        return found
    fused: FusedAGemmConfig = found.config
    if why_not_mapped is None and not fused.can_map(k):
        why_not_mapped = f"K = {k} is no multiple of {fused.split_k * fused.tile_k}"
    if why_not_mapped is None:
        return found
    told = f"; x by copy warps, because {why_not_mapped}" if why_not_mapped else ""
    return replace(found, config=fused.with_copy_warps(), reason=found.reason + told)


@functools.lru_cache(maxsize=4096)
def _chosen(
    kernels: tuple[str, ...],
    n: int,
    k: int,
    num_tokens: int,
    gpu: DeviceInfo,
    residual: bool,
    batch_invariant: bool,
    _state: int,
) -> Choice:
    if LINEAR in kernels:
        refusal = _why_none(n, k, num_tokens, gpu, batch_invariant)
        if refusal is not None:
            return _linear(refusal + (NOT_INVARIANT if batch_invariant else ""))
    if batch_invariant:
        return _invariant(n, k, num_tokens, gpu)
    for table in tables_of(GEMM, gpu):
        entry, told = entry_at(table, n, k, num_tokens, residual)
        if entry is not None:
            found = _known(kernels, table, entry, (n, k, num_tokens), gpu, told)
            if found is not None:
                return found
    return _by_rule(kernels, n, k, num_tokens, gpu)


def _why_none(
    n: int, k: int, num_tokens: int, gpu: DeviceInfo, batch_invariant: bool
) -> str | None:
    """Return in words why none of our kernels can compute a product, or None where one can."""
    if gpu.compute_capability < (8, 0):
        return f"{gpu.name} is {gpu.arch}; our kernels need sm_80"
    if batch_invariant:
        return why_not(FUSED_A, k, min(num_tokens, MAX_TOKENS))
    if num_tokens > MAX_TOKENS:
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
    return fitted if fitted.is_valid() else None


def _known(
    kernels: Sequence[str],
    table: Table,
    entry: Entry,
    product: tuple[int, int, int],
    gpu: DeviceInfo,
    told: str,
) -> Choice | None:
    """Return the fastest of the kernels by an entry; None where it knows none of them."""
    if table.origin == PUBLIC:
        return _published(entry, product, gpu, told) if LINEAR in kernels else None
    ranked = [
        (us, kernel, config)
        for kernel in sorted(kernels, key=lambda kernel: kernel != LINEAR)
        for config, us in entry.times.get(kernel, {}).items()
    ]
    ranked.sort(key=lambda found: found[0])  # of equal times the framework's linear comes first
    where = f"on {gpu.name} at M = {entry.size}{told}"
    for us, kernel, config in ranked:
        if kernel == LINEAR:
            best = f" ({us:.2f} against {ranked[1][0]:.2f} us)" if len(ranked) > 1 else ""
            return _linear(f"F.linear was faster {where}{best}", table.origin)
        fitted = fits(kernel, config, product[2], gpu)
        if fitted is not None:
            beside = f", F.linear {entry.linear_us:.2f} us" if entry.linear_us else ""
            return Choice(kernel, fitted, f"measured {where}: {us:.2f} us{beside}", table.origin)
    return None


def _published(entry: Entry, product: tuple[int, int, int], gpu: DeviceInfo, told: str) -> Choice:
    """Return what others found to be the fastest, by a configuration of ours where it has none."""
    n, k, num_tokens = product
    told = f"public figures for {gpu.arch}, not measured by us, name {{}} at M = {entry.size}{told}"
    if entry.kernel == LINEAR:
        return _linear(told.format(f"no kernel for {entry.problem}"), PUBLIC)
    refusal = why_not(entry.kernel, k, num_tokens)
    if refusal is not None:
        return _linear(refusal)
    reason = told.format(entry.kernel)
    config = fits(entry.kernel, entry.config, num_tokens, gpu)
    if config is None:
        config, why = _modelled(entry.kernel, n, k, num_tokens, gpu)
        reason += f"; configuration: {why}"
    return Choice(entry.kernel, config, reason, PUBLIC)


def _invariant(n: int, k: int, num_tokens: int, gpu: DeviceInfo) -> Choice:
    """Return the fused-A GEMM with one summation order for every number of tokens."""
    slices = f" in slices of {MAX_TOKENS} rows" if num_tokens > MAX_TOKENS else ""
    count = min(num_tokens, MAX_TOKENS)
    for table in tables_of(GEMM, gpu):
        config = invariant_config(table, n, k, count, gpu)
        if config is not None:
            where = f"measured on {gpu.name} for {n} x {k}, M = {class_of(count)}"
            reason = f"batch-invariant{slices}; {where}, one summation order for all M"
            return Choice(FUSED_A, config, reason, table.origin)
    config, why = _modelled(FUSED_A, n, k, count, gpu, batch_invariant=True)
    return Choice(FUSED_A, config, f"batch-invariant{slices}; {why}")


def invariant_config(
    table: Table, n: int, k: int, num_tokens: int, gpu: DeviceInfo
) -> FusedAGemmConfig | None:
    """Return the fastest of one summation order, the order with the least worst loss.

    None where some number of tokens has no valid configuration of a common order: then no
    number of tokens may take its order from the table.
    """
    entries = table.entries(problem_of(n, k))
    if not set(TOKEN_CLASSES) <= set(entries):
        return None
    of_orders: dict[Any, dict[int, tuple[float, FusedAGemmConfig]]] = {}
    for tokens in TOKEN_CLASSES:
        for config, us in entries[tokens].times.get(FUSED_A, {}).items():
            if config.fits(tokens, gpu):
                fastest = of_orders.setdefault(config.order, {})
                if tokens not in fastest or us < fastest[tokens][0]:
                    fastest[tokens] = us, config
    common = [of for _, of in sorted(of_orders.items()) if len(of) == len(TOKEN_CLASSES)]
    if not common:
        return None
    least = {t: min(of[t][0] for of in of_orders.values() if t in of) for t in TOKEN_CLASSES}
    best = min(common, key=lambda of: max(us / least[t] for t, (us, _) in of.items()))
    return best[class_of(num_tokens)][1]


# --- By rule -------------------------------------------------------------------------------------


def _by_rule(kernels: Sequence[str], n: int, k: int, num_tokens: int, gpu: DeviceInfo) -> Choice:
    """Return the rule's answer for a product that nobody measured on such a GPU."""
    if LINEAR not in kernels:
        config, why = _modelled(kernels[0], n, k, num_tokens, gpu)
        return Choice(kernels[0], config, why)
    if gpu.compute_capability >= (9, 0):
        most = 32 if 2 * n * k < _LARGE_WEIGHT else 16
        kernel = FUSED_A if num_tokens <= most else LINEAR
        rule = "the rule for sm_90 and newer takes fused_a up to 16 tokens, 32 for weights < 32 MB"
    else:
        kernel = SKINNY if num_tokens <= 2 else FUSED_A if num_tokens <= 8 else LINEAR
        rule = "the rule for sm_80 to sm_89 takes skinny up to 2 tokens, fused_a up to 8"
    unknown = why_unknown(GEMM, f"{n} x {k}", gpu)
    reason = f"not measured here, {unknown}: {rule}. `python -m k3cupy tune` measures it"
    if kernel == LINEAR:
        return _linear(reason)
    refusal = why_not(kernel, k, num_tokens)
    if refusal is not None:
        return _linear(refusal)
    config, _ = _modelled(kernel, n, k, num_tokens, gpu)
    return Choice(kernel, config, reason)


def _modelled(
    kernel: str, n: int, k: int, num_tokens: int, gpu: DeviceInfo, *, batch_invariant: bool = False
) -> tuple[Any, str]:
    """Return the best configuration of a kernel by its cost model, and the reason in words."""
    possible: Sequence[Any]
    if kernel == FUSED_A:
        possible = fused_a_model.ranked(n, k, num_tokens, gpu, batch_invariant=batch_invariant)
    else:
        possible = skinny_model.candidates(n, k, num_tokens, gpu)
    unknown = why_unknown(GEMM, f"{n} x {k}", gpu)
    return possible[0], f"{unknown}: the best of {len(possible)} candidates by the cost model"


# --- To be measured ------------------------------------------------------------------------------


def candidates(kernel: str, n: int, k: int, num_tokens: int, gpu: DeviceInfo) -> tuple[Any, ...]:
    """Return the configurations of a kernel that are worth measuring; none where it cannot run."""
    if why_not(kernel, k, num_tokens) is not None:
        return ()
    return _CANDIDATES[kernel](n, k, num_tokens, gpu)
