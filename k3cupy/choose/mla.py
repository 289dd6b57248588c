"""Which configuration a kernel of an MLA layer gets: the measured one of the nearest size.

On a GPU that nobody measured, the rule takes the entry of a measured GPU with the nearest number
of rows a multiprocessor. The query kernel is measured beside the separate kernels that compute the
same, and where these are the faster, they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from k3cupy.call.choice import NAMED, RULE, Choice
from k3cupy.choose.table import (
    MLA_DECODE,
    MLA_NORM,
    MLA_PREFILL,
    MLA_QUERY,
    MLA_VALUE,
    Entry,
    measured_elsewhere,
    shipped,
    tables_of,
)
from k3cupy.kernels import mla_decode, mla_norm, mla_prefill, mla_query, mla_value
from k3cupy.runtime.devices import DeviceInfo

_FEW_AND_MANY = {
    MLA_DECODE: (mla_decode.UNTUNED, mla_decode.UNTUNED),
    MLA_PREFILL: (mla_prefill.FEW_ROWS, mla_prefill.MANY_ROWS),
    MLA_NORM: (mla_norm.UNTUNED, mla_norm.UNTUNED),
    MLA_QUERY: (mla_query.UNTUNED, mla_query.UNTUNED),
    MLA_VALUE: (mla_value.UNTUNED, mla_value.UNTUNED),
}
"""Family -> what few rows take where no table knows a call, and many."""

_ROWS_AN_SM = 16
"""Rows that are few: of prefill they give every multiprocessor two blocks of ``FEW_ROWS``."""


def size_of(family: str, num_tokens: int, num_heads: int) -> int:
    """Return the rows of a call, by which tables list it."""
    if family == MLA_NORM:
        return num_tokens
    return num_tokens * (num_heads + (family == MLA_DECODE))


def choose(
    family: str, variant: Any, num_tokens: int, num_heads: int, gpu: DeviceInfo, config: Any = None
) -> Choice:
    """Return what runs for a call of one of the kernels of an MLA layer.

    ``variant`` is what the arguments decide; a ``config`` that the caller named decides. A call of
    the query kernel is one that it can compute: ``mla_query.why_not`` tells.
    """
    if config is not None:
        found = Choice(family, config, NAMED)
    else:
        found = _choose(family, variant, size_of(family, num_tokens, num_heads), gpu)
    count = -(-num_tokens // mla_decode.MAX_TOKENS_PER_LAUNCH) if family == MLA_DECODE else 1
    return replace(found, reason=f"{found.reason}; in {count} launches") if count > 1 else found


def _choose(family: str, variant: Any, num_rows: int, gpu: DeviceInfo) -> Choice:
    few, many = _FEW_AND_MANY[family]
    if family != MLA_QUERY and not variant.vector:
        return Choice(family, few, "the element-wise kernel has one configuration")
    for table in (*tables_of(family, gpu), *measured_elsewhere(family, gpu)):
        entries, known = table.entries(variant.kind), table.header["gpu"]
        if not entries:
            continue
        if known == gpu.name:
            entry = entries[_nearest(entries, num_rows)]
            reason = f"measured on {known} at {entry.size} rows, here {num_rows}"
            return _from(entry, reason, table.origin)
        num_sms = table.header["num_sms"]
        entry = entries[_nearest(entries, num_rows * num_sms / gpu.num_sms)]
        reason = (
            f"{gpu.name} has no measured table; {num_rows} rows on {gpu.num_sms} SMs "
            f"take the choice of {known} at {entry.size} rows ({num_sms} SMs)"
        )
        return _from(entry, reason)
    is_few = num_rows <= _ROWS_AN_SM * gpu.num_sms
    told = f"{num_rows} rows on {gpu.num_sms} SMs are {'few' if is_few else 'many'}"
    reason = f"no measured table has this operation; {told}"
    return Choice(family, few if is_few else many, reason)


def _from(entry: Entry, reason: str, origin: str = RULE) -> Choice:
    """Return what an entry names; beside the separate kernels with both times."""
    separate = entry.times.get(mla_query.SEPARATE)
    if separate is not None:
        fused = min(entry.times.get(mla_query.KERNEL, {}).values(), default=math.nan)
        reason += f": one launch {fused:.2f} us, separate kernels {separate[None]:.2f} us"
    return Choice(entry.kernel, entry.config, reason, origin)


def _nearest(sizes: Iterable[int], num_rows: float) -> int:
    return min(sizes, key=lambda size: abs(math.log(size / max(num_rows, 1.0))))


def configs(family: str, kind: str, gpu: DeviceInfo | None = None) -> tuple[Any, ...]:
    """Return every configuration that a call of a kind may get by a table.

    Of the shipped tables; for a GPU with what was measured on it here. What runs in separate
    kernels has none.
    """
    tables = (*shipped(family), *(tables_of(family, gpu) if gpu is not None else ()))
    entries = [entry for table in tables for entry in table.entries(kind).values()]
    found = dict.fromkeys(entry.config for entry in entries) or dict.fromkeys(_FEW_AND_MANY[family])
    found.pop(None, None)
    return tuple(found)
