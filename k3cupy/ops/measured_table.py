"""Measured choices of configurations: one JSON file an operation, from ``bench apply``."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Generic, TypeVar

from k3cupy.runtime.devices import DeviceInfo

Config = TypeVar("Config")


def shipped_text(file: str) -> str:
    """Return the JSON text of a table that the package ships under ``tables/``."""
    return resources.files("k3cupy.ops").joinpath(f"tables/{file}").read_text("utf-8")


@dataclass(frozen=True)
class _Row(Generic[Config]):
    num_rows: int
    config: Config


class MeasuredTable(Generic[Config]):
    """The configurations that were fastest, by GPU, kind of call and number of rows."""

    def __init__(self, read: Callable[[], str], make: Callable[..., Config]) -> None:
        """Read nothing yet.

        Args:
            read: gives the JSON text.
            make: a configuration from the fields of an entry's ``chosen``.
        """
        self._read, self._make = read, make
        self._of_kind: dict[tuple[str, str], tuple[_Row[Config], ...]] = {}

    @classmethod
    def shipped(cls, file: str, make: Callable[..., Config]) -> MeasuredTable[Config]:
        """Return the table that the package ships under ``tables/``."""
        return cls(lambda: shipped_text(file), make)

    def choose(self, kind: str, num_rows: int, device: DeviceInfo) -> tuple[Config, str] | None:
        """Return the configuration for a number of rows and the reason in words.

        A GPU that the table lists gets the entry with the nearest number of rows. Another GPU gets
        the entry of the first listed GPU with the nearest number of rows a multiprocessor. None:
        the table has no entry of this kind.
        """
        if self._rows(device.name, kind):
            row = _nearest(self._rows(device.name, kind), num_rows)
            return row.config, f"measured on {device.name} at {row.num_rows} rows, here {num_rows}"
        for known, facts in self._gpus.items():
            if not self._rows(known, kind):
                continue
            equivalent = num_rows * facts["num_sms"] / device.num_sms
            row = _nearest(self._rows(known, kind), equivalent)
            return row.config, (
                f"{device.name} has no measured table; {num_rows} rows on {device.num_sms} SMs "
                f"take the choice of {known} at {row.num_rows} rows ({facts['num_sms']} SMs)"
            )
        return None

    def configs(self, kind: str) -> tuple[Config, ...]:
        """Return every configuration that some GPU's entries name for a kind of call."""
        found = (row.config for gpu in self._gpus for row in self._rows(gpu, kind))
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def _gpus(self) -> dict[str, Any]:
        gpus: dict[str, Any] = json.loads(self._read())["gpus"]
        return gpus

    def _rows(self, gpu: str, kind: str) -> tuple[_Row[Config], ...]:
        found = self._of_kind.get((gpu, kind))
        if found is None:
            entries = self._gpus.get(gpu, {"entries": ()})["entries"]
            found = tuple(
                _Row(entry["num_rows"], self._make(**entry["chosen"]))
                for entry in entries
                if entry["kind"] == kind
            )
            self._of_kind[gpu, kind] = found
        return found


def _nearest(rows: tuple[_Row[Config], ...], num_rows: float) -> _Row[Config]:
    return min(rows, key=lambda row: abs(math.log(row.num_rows / max(num_rows, 1.0))))
