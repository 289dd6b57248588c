"""Which configuration a kernel of an MLA layer gets: the measured one of the nearest size.

On a GPU that nobody measured, the rule takes the entry of a measured GPU with the nearest number
of rows a multiprocessor. The query kernel is measured beside the separate kernels that compute the
same, for some numbers of heads, and where these are the faster, they run. Another number of heads
goes by the nearest of those whose clusters all run at once, or by the nearest of the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from k3cupy.call.choice import NAMED, Choice
from k3cupy.choose.table import (
    MLA_DECODE,
    MLA_NORM,
    MLA_PREFILL,
    MLA_QUERY,
    MLA_VALUE,
    Table,
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
    MLA_QUERY: (mla_query.UNTUNED, mla_query.TWO_AN_SM),
    MLA_VALUE: (mla_value.UNTUNED, mla_value.UNTUNED),
}
"""Family -> what few rows take where no table knows a call, and many; of the query front few heads,
whose clusters all run at once, and more."""

_ROWS_AN_SM = 16
"""Rows that are few: of prefill they give every multiprocessor two blocks of ``FEW_ROWS``."""


def size_of(family: str, num_tokens: int, num_heads: int) -> int:
    """Return the rows of a call, by which tables list it."""
    if family in (MLA_NORM, MLA_QUERY):
        return num_tokens
    return num_tokens * (num_heads + (family == MLA_DECODE))


def problem_of(family: str, kind: str, num_heads: int) -> str:
    """Return what tables list a call as: what it computes, or for how many heads."""
    return f"{num_heads} heads" if family == MLA_QUERY else kind


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
        found = _choose(family, variant, num_tokens, num_heads, gpu)
    count = -(-num_tokens // mla_decode.MAX_TOKENS_PER_LAUNCH) if family == MLA_DECODE else 1
    return replace(found, reason=f"{found.reason}; in {count} launches") if count > 1 else found


def _choose(family: str, variant: Any, num_tokens: int, num_heads: int, gpu: DeviceInfo) -> Choice:
    tables = (*tables_of(family, gpu), *measured_elsewhere(family, gpu))
    if family == MLA_QUERY:
        every = (_of_heads(table, num_tokens, num_heads, gpu) for table in tables)
        return next(filter(None, every), None) or _by_heads(num_heads, gpu)
    num_rows = size_of(family, num_tokens, num_heads)
    few, many = _FEW_AND_MANY[family]
    if not variant.vector:
        return Choice(family, few, "the element-wise kernel has one configuration")
    for table in tables:
        entries, known = table.entries(variant.kind), table.header["gpu"]
        if not entries:
            continue
        if known == gpu.name:
            entry = entries[_nearest(entries, num_rows)]
            reason = f"measured on {known} at {entry.size} rows, here {num_rows}"
            return Choice(family, entry.config, reason, table.origin)
        num_sms = table.header["num_sms"]
        entry = entries[_nearest(entries, num_rows * num_sms / gpu.num_sms)]
        reason = (
            f"{gpu.name} has no measured table; {num_rows} rows on {gpu.num_sms} SMs "
            f"take the choice of {known} at {entry.size} rows ({num_sms} SMs)"
        )
        return Choice(family, entry.config, reason)
    is_few = num_rows <= _ROWS_AN_SM * gpu.num_sms
    told = f"{num_rows} rows on {gpu.num_sms} SMs are {'few' if is_few else 'many'}"
    reason = f"no measured table has this operation; {told}"
    return Choice(family, few if is_few else many, reason)


def _at_once(num_heads: int, gpu: DeviceInfo) -> bool:
    """Return whether the clusters of all heads run at once, a block a multiprocessor."""
    return num_heads <= gpu.clusters_at_once(mla_query.CLUSTER)


def _of_heads(table: Table, num_tokens: int, num_heads: int, gpu: DeviceInfo) -> Choice | None:
    """Return what a table has of the query front, beside the separate kernels; None for nothing."""
    known = {}
    for problem in table.problems:
        named = re.fullmatch(r"([1-9]\d{0,8}) heads", problem)
        if named and (entries := table.entries(problem)):  # a file of the user's may have others
            known[int(named[1])] = entries
    alike = [heads for heads in known if _at_once(heads, gpu) == _at_once(num_heads, gpu)]
    if not alike:
        return None
    heads = _nearest(alike, num_heads)
    entries = known[heads]
    entry = entries[_nearest(entries, num_tokens)]
    fused = min(entry.times.get(MLA_QUERY, {}).values(), default=math.nan)
    separate = entry.times.get(mla_query.SEPARATE, {}).get(None, math.nan)
    name = table.header["gpu"]
    reason = (
        f"measured on {name} with {entry.size} tokens of {heads} heads, here {num_tokens} of "
        f"{num_heads}: one launch {fused:.2f} us, separate kernels {separate:.2f} us"
    )
    if name != gpu.name:
        return Choice(entry.kernel, entry.config, f"{gpu.name} has no measured table; {reason}")
    return Choice(entry.kernel, entry.config, reason, table.origin)


def _by_heads(num_heads: int, gpu: DeviceInfo) -> Choice:
    """Return what the query front runs where no table knows as many heads."""
    few, many = _FEW_AND_MANY[MLA_QUERY]
    told = f"{gpu.name} runs {gpu.clusters_at_once(mla_query.CLUSTER)} at once"
    reason = f"no measured table has {num_heads} heads, a cluster each; {told}"
    return Choice(MLA_QUERY, few if _at_once(num_heads, gpu) else many, reason)


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
