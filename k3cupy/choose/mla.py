"""Which configuration an MLA epilogue gets: the measured one of the nearest number of rows.

On a GPU that nobody measured, the rule takes the entry of a measured GPU with the nearest number
of rows a multiprocessor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from k3cupy.call.choice import NAMED, Choice
from k3cupy.choose.table import (
    MLA_DECODE,
    MLA_PREFILL,
    Entry,
    measured_elsewhere,
    shipped,
    tables_of,
)
from k3cupy.kernels import mla_decode, mla_prefill
from k3cupy.runtime.devices import DeviceInfo

FEW_ROWS = mla_prefill.FEW_ROWS
MANY_ROWS = mla_prefill.MANY_ROWS

_ELEMENT_WISE = "the element-wise kernel has one configuration"

_ROWS_AN_SM = 16
"""Rows that give every multiprocessor two blocks of ``FEW_ROWS``."""


def choose_decode(
    variant: mla_decode.Variant,
    num_tokens: int,
    num_heads: int,
    gpu: DeviceInfo,
    config: mla_decode.MlaDecodeConfig | None = None,
) -> Choice:
    """Return what runs for a call of the decode epilogue.

    Args:
        variant: what the arguments decide.
        num_tokens: B.
        num_heads: H.
        gpu: the GPU.
        config: what the caller named; it decides.
    """
    if config is not None:
        found: Choice | None = Choice(MLA_DECODE, config, NAMED)
    elif not variant.vector:
        found = Choice(MLA_DECODE, mla_decode.UNTUNED, _ELEMENT_WISE)
    else:
        found = _measured(MLA_DECODE, variant.kind, num_tokens * (num_heads + 1), gpu)
    if found is None:
        found = Choice(MLA_DECODE, mla_decode.UNTUNED, f"no measured table has {variant.kind}")
    count = -(-num_tokens // mla_decode.MAX_TOKENS_PER_LAUNCH)
    return replace(found, reason=f"{found.reason}; in {count} launches") if count > 1 else found


def choose_prefill(
    variant: mla_prefill.Variant,
    num_tokens: int,
    num_heads: int,
    gpu: DeviceInfo,
    config: mla_prefill.MlaPrefillConfig | None = None,
) -> Choice:
    """Return what runs for a call of a prefill or context epilogue.

    Args:
        variant: what the arguments decide.
        num_tokens: T.
        num_heads: H.
        gpu: the GPU.
        config: what the caller named; it decides.
    """
    if config is not None:
        return Choice(MLA_PREFILL, config, NAMED)
    if not variant.vector:
        return Choice(MLA_PREFILL, FEW_ROWS, _ELEMENT_WISE)
    num_rows = num_tokens * num_heads
    found = _measured(MLA_PREFILL, variant.kind, num_rows, gpu)
    if found is not None:
        return found
    few = num_rows <= _ROWS_AN_SM * gpu.num_sms
    told = f"{num_rows} rows on {gpu.num_sms} SMs are {'few' if few else 'many'}"
    reason = f"no measured table has this operation; {told}"
    return Choice(MLA_PREFILL, FEW_ROWS if few else MANY_ROWS, reason)


def _measured(family: str, kind: str, num_rows: int, gpu: DeviceInfo) -> Choice | None:
    """Return what tables say of a number of rows; None where none has such calls."""
    for table in tables_of(family, gpu):
        entries = table.entries(kind)
        if entries:
            entry = _nearest(entries, num_rows)
            reason = f"measured on {gpu.name} at {entry.size} rows, here {num_rows}"
            return Choice(family, entry.config, reason, table.origin)
    for table in measured_elsewhere(family, gpu):
        entries = table.entries(kind)
        if entries:
            known, num_sms = table.header["gpu"], table.header["num_sms"]
            entry = _nearest(entries, num_rows * num_sms / gpu.num_sms)
            return Choice(
                family,
                entry.config,
                f"{gpu.name} has no measured table; {num_rows} rows on {gpu.num_sms} SMs "
                f"take the choice of {known} at {entry.size} rows ({num_sms} SMs)",
            )
    return None


def _nearest(entries: Mapping[int, Entry], num_rows: float) -> Entry:
    distance = {size: abs(math.log(size / max(num_rows, 1.0))) for size in entries}
    return entries[min(distance, key=distance.__getitem__)]


def configs(family: str, kind: str, gpu: DeviceInfo | None = None) -> tuple[Any, ...]:
    """Return every configuration that a call of a kind may get by a table.

    Args:
        family: ``"mla_decode"`` or ``"mla_prefill"``.
        kind: of the call, as tables name it.
        gpu: with what was measured on it here; None for the shipped tables alone.
    """
    tables = (*shipped(family), *(tables_of(family, gpu) if gpu is not None else ()))
    found = dict.fromkeys(e.config for table in tables for e in table.entries(kind).values())
    fallback = (mla_decode.UNTUNED,) if family == MLA_DECODE else (FEW_ROWS, MANY_ROWS)
    return tuple(found) or fallback
