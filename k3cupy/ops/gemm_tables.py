"""What is known of GEMM times: the user's measurements, the shipped ones, public figures.

One table a kind of GPU. The first of three sources that knows a product answers: what was measured
on this machine (``gemm_cache``), what the package ships for this very GPU, and public figures for
its architecture, which we did not measure.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from k3cupy.ops import gemm_cache
from k3cupy.ops.fused_a_gemm_config import MAX_TOKENS
from k3cupy.ops.gemm_entry import PUBLIC, SHIPPED, USER, GemmEntry, entry_of
from k3cupy.runtime.devices import DeviceInfo

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, MAX_TOKENS)
"""Numbers of tokens that are measured; a call takes the next one from its own upwards."""

TOKEN_CLASSES = (1, 8, 16, 32, MAX_TOKENS)
"""Numbers of tokens that differ in kind; no call takes an entry from beyond its own class."""


def class_of(num_tokens: int) -> int:
    """Return the token class of a number of tokens from 1 to 64."""
    return next(size for size in TOKEN_CLASSES if size >= num_tokens)


@dataclass(frozen=True)
class GemmTable:
    """The entries of one source.

    Attributes:
        source: ``"user cache"``, ``"shipped"`` or ``"public"``.
        gpu: the GPU measured; None where the table is for an architecture.
        arch: its architecture, as ``"sm_90"``.
        entries: all of them.
    """

    source: str
    gpu: str | None
    arch: str
    entries: tuple[GemmEntry, ...]

    def is_for(self, device: DeviceInfo) -> bool:
        """Return whether the table speaks of a GPU."""
        return device.arch == self.arch if self.gpu is None else device.name == self.gpu

    def of_shape(self, n: int, k: int, *, residual: bool = False) -> Mapping[int, GemmEntry]:
        """Return the entries of a weight by number of tokens."""
        return self._by_shape.get((n, k, residual), {})

    def entry(self, n: int, k: int, num_tokens: int, *, residual: bool) -> GemmEntry | None:
        """Return what the table says of a product; where it knows no residual, without one."""
        found = self.of_shape(n, k, residual=residual) or self.of_shape(n, k)
        if self.source == PUBLIC:
            # Public figures list the numbers of tokens at which a kernel won, and no other.
            lost = GemmEntry(n, k, num_tokens, residual, None, {}, None, PUBLIC)
            return found.get(num_tokens, lost) if found else None
        fitting = [t for t in found if num_tokens <= t <= class_of(num_tokens)]
        return found[min(fitting)] if fitting else None

    @functools.cached_property
    def _by_shape(self) -> dict[tuple[int, int, bool], dict[int, GemmEntry]]:
        found: dict[tuple[int, int, bool], dict[int, GemmEntry]] = {}
        for entry in self.entries:
            found.setdefault((entry.n, entry.k, entry.residual), {})[entry.tokens] = entry
        return found


@functools.cache
def shipped() -> tuple[GemmTable, ...]:
    """Return the tables of the package: measured ones by GPU, public ones by architecture."""
    folder = resources.files("k3cupy.ops").joinpath("tables/gemm")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return tuple(_shipped_table(json.loads(file.read_text("utf-8"))) for file in files)


def _shipped_table(document: Mapping[str, Any]) -> GemmTable:
    measured = document["measured_by_us"]
    source = SHIPPED if measured else PUBLIC
    entries = (entry_of(row, source, measured=measured) for row in document["entries"])
    return GemmTable(source, document["gpu"], document["arch"], tuple(entries))


_user: dict[str, GemmTable] = {}
_lock = threading.Lock()
_generation = 0


def generation() -> int:
    """Return a number that changes when tables are read anew; plans of before do not fit then."""
    return _generation


def reload() -> None:
    """Forget what was read of the user cache, so that the next call reads it as it is now."""
    global _generation
    with _lock:
        _user.clear()
        _generation += 1


def entry(
    n: int, k: int, num_tokens: int, device: DeviceInfo, *, residual: bool = False
) -> GemmEntry | None:
    """Return what is known of a product, of the first source that knows it.

    A number of tokens that is not listed takes the next one of its class upwards. With a residual,
    what is known without one stands in where no table has the other.

    Args:
        n: rows of the weight.
        k: its columns.
        num_tokens: rows of x, from 1 to 64.
        device: the GPU.
        residual: a residual is added.
    """
    for table in tables_of(device):
        found = table.entry(n, k, num_tokens, residual=residual)
        if found is not None:
            return found
    return None


def tables_of(device: DeviceInfo) -> Iterator[GemmTable]:
    """Yield the tables that speak of a GPU, the first source first."""
    yield _user_table(device)
    for source in (SHIPPED, PUBLIC):
        yield from (t for t in shipped() if t.source == source and t.is_for(device))


def why_unknown(n: int, k: int, device: DeviceInfo) -> str:
    """Say why no measurement of a GPU decides: none of the shape, or none at all."""
    measured = [t for t in tables_of(device) if t.source != PUBLIC and t.entries]
    if measured:
        return f"{n} x {k} is not in the table of {device.name}"
    others = [t.gpu for t in shipped() if t.source == SHIPPED and t.arch == device.arch and t.gpu]
    does_not_hold = f" (that of {' and '.join(others)} does not hold for it)" if others else ""
    return f"{device.name} has no measured table{does_not_hold}"


def lead_of_linear(entry: GemmEntry, us: float) -> str:
    """Return in words that ``F.linear`` was faster than a kernel's time, or nothing."""
    linear = entry.linear_us
    if linear is None or linear >= us:
        return ""
    return f"; F.linear was faster, {linear:.2f} against {us:.2f} us"


def _user_table(device: DeviceInfo) -> GemmTable:
    table = _user.get(device.name)
    if table is None:
        with _lock:
            table = _user.get(device.name)
            if table is None:
                found = gemm_cache.read(gemm_cache.path_of(device), device.name)
                table = GemmTable(USER, device.name, device.arch, found)
                _user[device.name] = table
    return table
