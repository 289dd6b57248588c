"""Measured times: one schema for every kernel, from the package and from the user's own cache.

A table is a JSON file for one family of kernels on one kind of GPU: facts about the measurement,
then for each problem a list of entries, one a size. A problem is parsed when it is asked for.

| family        | problem                                    | size                       |
| ------------- | ------------------------------------------ | -------------------------- |
| gemm          | ``bfloat16 2112x7168``, ``... + residual`` | tokens                     |
| mla_decode    | formats, as ``16bit+same``                 | tokens times (heads + 1)   |
| mla_prefill   | the operation's name                       | tokens times heads         |
| mla_norm      | ``norm``                                   | tokens                     |
| mla_query     | ``12 heads``                               | tokens                     |
| mla_value     | ``value``, ``value+gate``, ``absorb``      | tokens times heads         |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3cupy.call.choice import LINEAR, PUBLIC, SHIPPED, USER
from k3cupy.call.plans import tables as tables_state
from k3cupy.kernels import (
    fused_a_gemm,
    mla_decode,
    mla_norm,
    mla_prefill,
    mla_query,
    mla_value,
    skinny_gemm,
)
from k3cupy.runtime import sources
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import shown

SCHEMA = 2

GEMM, MLA_DECODE, MLA_PREFILL = "gemm", "mla_decode", "mla_prefill"
MLA_NORM, MLA_QUERY, MLA_VALUE = "mla_norm", "mla_query", "mla_value"
FAMILIES: Mapping[str, tuple[Any, ...]] = {
    GEMM: (fused_a_gemm, skinny_gemm),
    MLA_DECODE: (mla_decode,),
    MLA_PREFILL: (mla_prefill,),
    MLA_NORM: (mla_norm,),
    MLA_QUERY: (mla_query,),
    MLA_VALUE: (mla_value,),
}
"""Family -> the modules of its kernels."""

KERNELS = {module.KERNEL: module for modules in FAMILIES.values() for module in modules}
"""Kernel -> its module."""

WITHOUT_CONFIG = (LINEAR, mla_query.SEPARATE)
"""What is measured beside a family's kernels, and has the configuration None: the framework's
linear, and the separate kernels that compute what the query kernel does."""

Times = Mapping[str, Mapping[Any, float]]
"""Kernel -> configuration -> microseconds."""

AS_GOOD = 1.01
"""Times that differ by less are the same: two runs differ by as much, and each configuration that
is named is one more to compile."""

UNITS = {
    GEMM: "us added to the chain, cold weights",
    MLA_DECODE: "us added to the chain",
    MLA_PREFILL: "us added to the chain",
    MLA_NORM: "us added to the chain",
    MLA_QUERY: "us added to the first projection and a consumer, cold weights",
    MLA_VALUE: "us added to the chain, cold weights",
}
"""How the entries of a file were measured; those of two ways are never compared."""

_SHIPPED = Path(__file__).parent / "tables"
_KEPT = 8192
"""Configurations whose names are kept: tables name the same ones again and again."""

_MOST = 10**12
"""Microseconds or rows: what is more nobody measured, and arithmetic might not take it."""

_READERS: Mapping[Any, Any] = {"bool": {"0": False, "1": True}.__getitem__, "str": str}
"""Type of a field -> what reads it; all others are integers."""


@dataclass(frozen=True)
class Entry:
    """What is known of one problem of one size on one kind of GPU.

    Attributes:
        problem: as tables name it.
        size: tokens or rows.
        times: what was measured; empty for figures that others published.
        kernel: the fastest.
        config: its configuration, or of those as good as the fastest the one that was preferred;
            None where the kernel's own choice is to be taken, and for what has none.
        date: of the measurement, as 2026-11-29.
        sources: digest of the sources that were measured.
    """

    problem: str
    size: int
    times: Times
    kernel: str
    config: Any
    date: str = ""
    sources: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """What names it: two entries of one key say different things of the same."""
        return self.problem, self.size

    @property
    def us(self) -> float | None:
        """The time of what is chosen, where it was measured."""
        return self.times.get(self.kernel, {}).get(self.config)

    @property
    def linear_us(self) -> float | None:
        """The time of the framework's linear, where it was measured."""
        return self.times.get(LINEAR, {}).get(None)

    def fields(self) -> dict[str, Any]:
        """Return the entry as JSON has it; ``entry_of`` reads it."""
        found: dict[str, Any] = {"size": self.size}
        if self.times:
            found["us"] = {
                kernel: times[None]
                if kernel in WITHOUT_CONFIG
                else {key_of(c): us for c, us in times.items()}
                for kernel, times in self.times.items()
            }
            if self.us != min(us for times in self.times.values() for us in times.values()):
                found["preferred"] = key_of(self.config)
        else:
            found["kernel"] = self.kernel
            found["config"] = self.config and key_of(self.config)
        return found | {n: text for n in ("date", "sources") if (text := getattr(self, n))}


def measured(problem: str, size: int, times: Times, *, preferred: Any = None) -> Entry:
    """Return the entry of measured times; of equal times what has no configuration is the fastest.

    A configuration of the fastest kernel may be ``preferred``, where its time differs from the
    fastest by no more than two runs do.

    Raises:
        ValueError: the preferred configuration is clearly slower, or was not measured.
    """
    every = [
        (us, kernel not in WITHOUT_CONFIG, kernel, config)
        for kernel, of_kernel in times.items()
        for config, us in of_kernel.items()
    ]
    fastest, _, kernel, config = min(every, key=lambda found: found[:2])
    if preferred is not None:
        if not times[kernel].get(preferred, math.inf) <= AS_GOOD * fastest:
            raise ValueError(f"{key_of(preferred)!r} is not as good as the fastest")
        config = preferred
    return Entry(problem, size, times, kernel, config)


@functools.lru_cache(maxsize=_KEPT)
def key_of(config: Any) -> str:
    """Return a configuration as a table writes it: ``8/16/512/8/8/8/1/1/4``.

    Flags are 0 and 1; at the end, fields that have their defaults are left out.
    """
    fields = list(dataclasses.fields(config))
    while fields and getattr(config, fields[-1].name) == fields[-1].default:
        fields.pop()
    values = (getattr(config, field.name) for field in fields)
    return "/".join(str(int(v)) if isinstance(v, bool) else str(v) for v in values)


@functools.lru_cache(maxsize=_KEPT)
def config_of(kernel: str, key: str) -> Any:
    """Return the configuration that a table writes as ``key``.

    Raises:
        ValueError: there is no such kernel, or it has no such configuration.
    """
    if kernel not in KERNELS:
        raise ValueError(f"there is no kernel {shown(kernel)}")
    kind = KERNELS[kernel].Config
    fields, parts = dataclasses.fields(kind), key.split("/")
    try:
        if len(parts) > len(fields):
            raise ValueError(f"expected at most {len(fields)} numbers, got {len(parts)}")
        read = [_READERS.get(field.type, int) for field in fields]
        config = kind(*(reader(part) for reader, part in zip(read, parts, strict=False)))
        valid = config.is_valid()
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{kernel} has no configuration {shown(key)}") from error
    if not valid:
        raise ValueError(f"{kernel} cannot run the configuration {shown(key)}")
    return config


def entry_of(problem: str, fields: Any) -> Entry:
    """Return the entry that JSON holds.

    Raises:
        ValueError: it is no entry.
    """
    try:
        size = fields["size"]
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _MOST:
            raise ValueError(f"expected an integer from 1 to {_MOST}, got {shown(size)}")
        date, digest = fields.get("date", ""), fields.get("sources", "")
        if not (isinstance(date, str) and isinstance(digest, str)):
            raise TypeError
        if "us" in fields:
            times = {kernel: _times(kernel, of) for kernel, of in fields["us"].items()}
            if not any(times.values()):
                raise ValueError("expected at least one time, got none")
            preferred = fields.get("preferred")
            if preferred is not None:
                # Only where one kernel was measured are others as good.
                (kernel,) = times.keys() - {mla_query.SEPARATE}
                preferred = config_of(kernel, preferred)
            entry = measured(problem, size, times, preferred=preferred)
            return replace(entry, date=date, sources=digest)
        kernel, key, config = fields["kernel"], fields["config"], None
        if kernel not in (*WITHOUT_CONFIG, *KERNELS):
            raise ValueError(f"there is no kernel {shown(kernel)}")
        if key is not None:  # others have configurations that our kernel does not have
            with contextlib.suppress(ValueError):
                config = config_of(kernel, key)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"expected the fields of an entry, got {shown(fields)}") from error
    return Entry(problem, size, {}, kernel, config, date, digest)


def _times(kernel: str, found: Any) -> Mapping[Any, float]:
    whole = kernel in WITHOUT_CONFIG
    times = {None: found} if whole else {config_of(kernel, k): found[k] for k in found}
    for us in times.values():
        if isinstance(us, bool) or not 0 < us <= _MOST:
            raise ValueError(f"expected a time above 0, got {shown(us)}")
    return times


class Entries(Mapping[int, Entry]):
    """The entries of a problem by size, each parsed when it is asked for."""

    def __init__(self, problem: str, rows: Iterable[Any]) -> None:
        self._rows = by_size = {row["size"]: row for row in rows}
        self._entry = functools.cache(lambda size: entry_of(problem, by_size[size]))

    def __getitem__(self, size: int) -> Entry:
        return self._entry(size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Table:
    """The entries of one family on one kind of GPU.

    Attributes:
        origin: ``"user"``, ``"shipped"`` or ``"public"``.
        header: the facts of the file: ``gpu`` (None where it is for an architecture), ``arch``,
            ``num_sms``, ``unit``, and how it was measured.
        problems: the names of all problems.
        entries: problem -> its entries by size, which ``read`` makes of what JSON has, when asked.
    """

    def __init__(
        self,
        origin: str,
        header: Mapping[str, Any],
        problems: Mapping[str, Any],
        read: Callable[[str, Any], Mapping[int, Entry]] = Entries,
    ) -> None:
        self.origin, self.header, self.problems = origin, header, tuple(problems)
        self.entries = functools.cache(lambda problem: read(problem, problems.get(problem, ())))

    def __iter__(self) -> Iterator[Entry]:
        for problem in self.problems:
            yield from self.entries(problem).values()


def slug(name: str) -> str:
    """Return a GPU's name as a folder's: ``NVIDIA H200`` is ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


@functools.cache
def kernels_digest(family: str) -> str:
    """Return what tells the kernels of this package from those of another version."""
    return sources.shipped_digest(*(module.SOURCE for module in FAMILIES[family]))[:16]


def header_of(family: str, gpu: DeviceInfo, about: str) -> dict[str, Any]:
    """Return the facts with which a table of a GPU begins."""
    return {
        "schema": SCHEMA,
        "family": family,
        "unit": UNITS[family],
        "gpu": gpu.name,
        "arch": gpu.arch,
        "num_sms": gpu.num_sms,
        "about": about,
    }


def table_text(header: Mapping[str, Any], entries: Iterable[Entry]) -> str:
    """Return a table as a file has it: facts first, then an entry a line, in order."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in header.items()]
    problems: dict[str, list[str]] = {}
    for entry in sorted(entries, key=lambda e: (_numbers_first(e.problem), e.size)):
        problems.setdefault(entry.problem, []).append(f"   {json.dumps(entry.fields())}")
    rows = [
        f"  {json.dumps(name)}: [\n" + ",\n".join(of) + "\n  ]" for name, of in problems.items()
    ]
    return "\n".join(["{", *lines, ' "problems": {', ",\n".join(rows), " }", "}", ""])


def _numbers_first(problem: str) -> list[tuple[int, str]]:
    """Return what sorts ``768x128`` before ``1536x128``, of as many digits as a file may have."""
    return [(len(t) * t.isdigit(), t) for t in re.findall(r"\d+|\D+", problem)]


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def parts_of(text: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return header and problems of a file.

    Raises:
        ValueError: it is no table of this version.
    """
    try:
        document = json.loads(text, object_pairs_hook=_each_once)
        if document["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}, got {shown(document['schema'])}")
        problems: dict[str, list[Any]] = document.pop("problems")
        if not all(isinstance(rows, list) for rows in problems.values()):
            raise ValueError("a problem has no list of entries")
        _ = document["gpu"]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return document, problems


@functools.cache
def _shipped(folder: str, family: str) -> Table | None:
    file = _SHIPPED / folder / f"{family}.json"
    if not file.is_file():
        return None
    header, problems = parts_of(file.read_text("utf-8"))
    return Table(SHIPPED if header["gpu"] else PUBLIC, header, problems)


@functools.cache
def shipped(family: str) -> tuple[Table, ...]:
    """Return every table of a family that the package ships."""
    found = (_shipped(folder, family) for folder in sorted(os.listdir(_SHIPPED)))
    return tuple(table for table in found if table)


@functools.lru_cache(maxsize=64)
def _tables_of(family: str, name: str, arch: str, _state: int) -> tuple[Table, ...]:
    from k3cupy.choose import cache  # which reads and writes tables

    found = (cache.table(family, name), _shipped(slug(name), family), _shipped(arch, family))
    return tuple(table for table in found if table and table.problems)


def tables_of(family: str, gpu: DeviceInfo) -> tuple[Table, ...]:
    """Return the tables that speak of a GPU, in the order of their origins."""
    return _tables_of(family, gpu.name, gpu.arch, tables_state())


def measured_elsewhere(family: str, gpu: DeviceInfo) -> tuple[Table, ...]:
    """Return the shipped measurements of other GPUs."""
    return tuple(t for t in shipped(family) if t.origin == SHIPPED and t.header["gpu"] != gpu.name)


def why_unknown(family: str, what: str, gpu: DeviceInfo) -> str:
    """Say why no measurement of a GPU decides: none of the problem, or none at all."""
    if any(table.origin in (USER, SHIPPED) for table in tables_of(family, gpu)):
        return f"{what} is not in the table of {gpu.name}"
    others = dict.fromkeys(t.header["gpu"] for t in measured_elsewhere(family, gpu))
    does_not_hold = f" (that of {' and '.join(others)} does not hold for it)" if others else ""
    return f"{gpu.name} has no measured table{does_not_hold}"
