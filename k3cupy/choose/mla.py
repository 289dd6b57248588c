"""Which configuration an MLA epilogue gets: the measured one of the nearest number of rows.

On a GPU that nobody measured, the rule takes the entry of a measured GPU with the nearest number
of rows a multiprocessor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from k3cupy.call.choice import NAMED, Choice
from k3cupy.choose.table import MLA_DECODE, MLA_PREFILL, measured_elsewhere, shipped, tables_of
from k3cupy.kernels import mla_decode, mla_prefill
from k3cupy.runtime.devices import DeviceInfo

_FEW_AND_MANY = {
    MLA_DECODE: (mla_decode.UNTUNED, mla_decode.UNTUNED),
    MLA_PREFILL: (mla_prefill.FEW_ROWS, mla_prefill.MANY_ROWS),
}
"""Family -> what few rows take where no table knows a call, and many."""

_ROWS_AN_SM = 16
"""Rows that are few: of prefill they give every multiprocessor two blocks of ``FEW_ROWS``."""


def choose(
    family: str, variant: Any, num_tokens: int, num_heads: int, gpu: DeviceInfo, config: Any = None
) -> Choice:
    """Return what runs for a call of the decode epilogue, or of a prefill or context epilogue.

    ``variant`` is what the arguments decide; a ``config`` that the caller named decides.
    """
    if family == MLA_PREFILL:
        return _choose(family, variant, num_tokens * num_heads, gpu, config)
    found = _choose(family, variant, num_tokens * (num_heads + 1), gpu, config)
    count = -(-num_tokens // mla_decode.MAX_TOKENS_PER_LAUNCH)
    return replace(found, reason=f"{found.reason}; in {count} launches") if count > 1 else found


def _choose(family: str, variant: Any, num_rows: int, gpu: DeviceInfo, config: Any) -> Choice:
    if config is not None:
        return Choice(family, config, NAMED)
    few, many = _FEW_AND_MANY[family]
    if not variant.vector:
        return Choice(family, few, "the element-wise kernel has one configuration")
    for table in (*tables_of(family, gpu), *measured_elsewhere(family, gpu)):
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


def _nearest(sizes: Iterable[int], num_rows: float) -> int:
    return min(sizes, key=lambda size: abs(math.log(size / max(num_rows, 1.0))))


def configs(family: str, kind: str, gpu: DeviceInfo | None = None) -> tuple[Any, ...]:
    """Return every configuration that a call of a kind may get by a table.

    Of the shipped tables; for a GPU with what was measured on it here.
    """
    tables = (*shipped(family), *(tables_of(family, gpu) if gpu is not None else ()))
    found = dict.fromkeys(e.config for table in tables for e in table.entries(kind).values())
    return tuple(found or dict.fromkeys(_FEW_AND_MANY[family]))
