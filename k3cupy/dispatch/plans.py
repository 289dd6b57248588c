"""Which kernel a product gets on a GPU: by measurement, by public figures, by a rule of thumb.

Pure functions over numbers and facts about a GPU: nothing is launched or compiled.
"""

from __future__ import annotations

from k3cupy.dispatch import backends
from k3cupy.dispatch.decision import LINEAR, LinearDecision
from k3cupy.ops import gemm_tables
from k3cupy.ops.fused_a_gemm_config import MAX_TOKENS
from k3cupy.ops.gemm_entry import FUSED_A, PUBLIC, SKINNY, GemmEntry
from k3cupy.runtime.devices import DeviceInfo

NOT_INVARIANT = "; so batch invariance does not hold for this call"

_LARGE_WEIGHT = 32_000_000
"""Bytes of a weight from which on the rule of thumb leaves more than 16 tokens to cuBLAS."""


def plan(
    n: int,
    k: int,
    num_tokens: int,
    device: DeviceInfo,
    *,
    has_residual: bool = False,
    batch_invariant: bool = False,
) -> LinearDecision:
    """Return the kernel for a product whose tensors our kernels accept.

    Args:
        n: rows of the weight.
        k: its columns.
        num_tokens: rows of x, at least 1.
        device: the GPU.
        has_residual: a residual is added.
        batch_invariant: the bits of a row may not depend on the other rows.
    """
    backend, config, reason, source = _plan(n, k, num_tokens, device, has_residual, batch_invariant)
    if batch_invariant and backend == LINEAR:
        reason += NOT_INVARIANT
    return LinearDecision(backend, config, reason, source, n, k, num_tokens)


_Answer = tuple[str, object, str, str]


def _plan(
    n: int, k: int, num_tokens: int, device: DeviceInfo, has_residual: bool, batch_invariant: bool
) -> _Answer:
    if device.compute_capability < (8, 0):
        return LINEAR, None, f"{device.name} is {device.arch}; our kernels need sm_80", "rule"
    if batch_invariant:
        return _invariant(n, k, num_tokens, device)
    if num_tokens > MAX_TOKENS:
        return LINEAR, None, f"x has more than {MAX_TOKENS} rows", "rule"
    entry = gemm_tables.entry(n, k, num_tokens, device, residual=has_residual)
    if entry is not None:
        return _known(entry, num_tokens, device, has_residual)
    return _heuristic(n, k, num_tokens, device)


def _invariant(n: int, k: int, num_tokens: int, device: DeviceInfo) -> _Answer:
    backend = backends.get(FUSED_A)
    problem = backend.why_not(n, k, MAX_TOKENS)
    if problem is not None:
        return LINEAR, None, problem, "rule"
    config, reason = backend.choose(n, k, min(num_tokens, MAX_TOKENS), device, batch_invariant=True)
    slices = f" in slices of {MAX_TOKENS} rows" if num_tokens > MAX_TOKENS else ""
    return FUSED_A, config, f"batch-invariant mode{slices}; {reason}", "rule"


def _known(entry: GemmEntry, num_tokens: int, device: DeviceInfo, has_residual: bool) -> _Answer:
    public = entry.source == PUBLIC
    what = ", without the residual" if has_residual and not entry.residual else ""
    if entry.chosen is None:
        return LINEAR, None, _why_linear(entry, device, what), entry.source
    backend = backends.get(entry.chosen.backend)
    problem = backend.why_not(entry.n, entry.k, num_tokens)
    if problem is not None:
        return LINEAR, None, problem, "rule"
    config = backend.fitted(entry.chosen.config, num_tokens, device)
    chosen_words = ""
    if config is None:
        config, why = backend.choose(entry.n, entry.k, num_tokens, device)
        chosen_words = f"; configuration: {why}"
    if public:
        reason = (
            f"public figures for {device.arch}, not measured by us, name {backend.name} at "
            f"M = {entry.tokens}{what}"
        )
    else:
        reason = (
            f"measured on {device.name} at M = {entry.tokens}{what}: {entry.chosen_us:.2f} us, "
            f"F.linear {entry.linear_us:.2f} us"
        )
    return backend.name, config, reason + chosen_words, entry.source


def _why_linear(entry: GemmEntry, device: DeviceInfo, what: str) -> str:
    if entry.source == PUBLIC:
        return (
            f"public figures for {device.arch}, not measured by us, name no kernel for "
            f"{entry.n} x {entry.k} at M = {entry.tokens}{what}"
        )
    best = min((us for times in entry.times.values() for us in times.values()), default=None)
    times = "" if best is None else f" ({entry.linear_us:.2f} against {best:.2f} us)"
    return f"F.linear was faster on {device.name} at M = {entry.tokens}{what}{times}"


def _heuristic(n: int, k: int, num_tokens: int, device: DeviceInfo) -> _Answer:
    """Return the rule of thumb for a product that nobody measured on such a GPU."""
    if device.compute_capability >= (9, 0):
        most = 32 if 2 * n * k < _LARGE_WEIGHT else 16
        name = FUSED_A if num_tokens <= most else LINEAR
        rule = "the rule for sm_90 and newer takes fused_a up to 16 tokens, 32 for weights < 32 MB"
    else:
        name = SKINNY if num_tokens <= 2 else FUSED_A if num_tokens <= 8 else LINEAR
        rule = "the rule for sm_80 to sm_89 takes skinny up to 2 tokens, fused_a up to 8"
    reason = (
        f"not measured here, {gemm_tables.why_unknown(n, k, device)}: {rule}. `python -m k3cupy "
        "tune` measures it"
    )
    if name == LINEAR:
        return LINEAR, None, reason, "heuristic"
    backend = backends.get(name)
    problem = backend.why_not(n, k, num_tokens)
    if problem is not None:
        return LINEAR, None, problem, "rule"
    config, _ = backend.choose(n, k, num_tokens, device)
    return name, config, reason, "heuristic"
