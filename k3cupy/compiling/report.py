"""What ``k3cupy.compile`` found, as tables and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3cupy.runtime import offline
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.text import Shown, table_of

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, repr=False)
class CompiledKernel(Shown):
    """What the compiler made of one instance; prints as a table.

    Attributes:
        source: its file.
        name_expression: the instance.
        arch: what it was compiled for.
        registers: a thread.
        spill_stores, spill_loads: bytes a thread that found no register, with functions that the
            kernel calls.
        stack_bytes: local memory of a thread, spills among it.
        shared_bytes: shared memory of a block that the kernel declares. ``cuobjdump`` adds the
            1,024 bytes that CUDA reserves for a block from sm_90 on.
        dynamic_shared_bytes: what a launch adds to it.
        symbol: its name in the code.
        code: the ELF file.
        us: microseconds that it adds to its chain; None where it was not timed.
        timed: the call that was timed, or why it was not.
        warnings: of the compiler and the assembler; and whether a launch would pass other
            parameters than it has.
        shipped: the same of the sources of the package; None where those are what was compiled, or
            have no such instance.
    """

    source: str
    name_expression: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int
    dynamic_shared_bytes: int
    symbol: str
    code: bytes
    us: float | None = None
    timed: str = ""
    warnings: tuple[str, ...] = ()
    shipped: CompiledKernel | None = None

    @property
    def sass(self) -> str:
        """The machine code as text.

        Raises:
            ToolchainError: nvdisasm is not here.
        """
        return offline.disassembled(self.code)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain values, of the code its size."""
        found = {**asdict(replace(self, shipped=None)), "code": len(self.code)}
        return {**found, "shipped": None if self.shipped is None else self.shipped.to_dict()}

    def __rich__(self) -> Table:
        """The table, of one line."""
        return _table([self], f"compiled for {self.arch}")


class CompileReport(Shown):
    """Instances and what they take; prints as a table.

    It has a length, can be iterated, and indexed by place (``CompiledKernel``).

    Attributes:
        gpu: what they are for.
        folder: of the sources.
        is_edited: the sources of some of them differ from those of the package.
        notes: what was not looked at, and why.
    """

    def __init__(
        self,
        gpu: DeviceInfo,
        folder: Path,
        is_edited: bool,
        kernels: Sequence[CompiledKernel],
        notes: Sequence[str] = (),
    ) -> None:
        self.gpu, self.folder, self.is_edited = gpu, folder, is_edited
        self.notes = tuple(notes)
        self._kernels = tuple(kernels)

    def __len__(self) -> int:
        """The number of instances."""
        return len(self._kernels)

    def __iter__(self) -> Iterator[CompiledKernel]:
        """Go through the instances."""
        return iter(self._kernels)

    def __getitem__(self, place: int) -> CompiledKernel:
        """The instance at a place."""
        return self._kernels[place]

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes, ``arch`` and ``kernels`` as plain values."""
        return {
            "gpu": self.gpu.name,
            "arch": self.gpu.arch,
            "folder": str(self.folder),
            "is_edited": self.is_edited,
            "notes": list(self.notes),
            "kernels": [kernel.to_dict() for kernel in self._kernels],
        }

    def __rich__(self) -> Table:
        """The table, for ``rich.print``; what differs from the shipped kernel names both."""
        kind = "edited sources" if self.is_edited else "sources"
        plural = "" if len(self) == 1 else "s"
        title = f"{len(self)} instance{plural} for {self.gpu.name} ({self.gpu.arch}), {kind} in "
        return _table(self._kernels, "\n".join([f"{title}{self.folder}", *self.notes]))


_COLUMNS = {
    " registers": "registers",
    " spilled": "spill_stores",
    " stack": "stack_bytes",
    " shared": "shared_bytes",
    " dynamic": "dynamic_shared_bytes",
}
"""Header -> attribute; bytes, but for the registers."""


def _table(kernels: Sequence[CompiledKernel], title: str) -> Table:
    was_timed = any(kernel.timed for kernel in kernels)
    headers = (*_COLUMNS, *([" us", "call"] if was_timed else []), "instance")
    rows = []
    for kernel in kernels:
        numbers = [_beside(kernel, name) for name in _COLUMNS.values()]
        if was_timed:
            numbers += ["" if kernel.us is None else _beside(kernel, "us"), kernel.timed]
        name = kernel.name_expression.replace("k3cupy::", "")
        rows.append((*numbers, f"{kernel.source}: {name}"))
    # Of a warning the first line: what follows is the source, and differs by instance.
    told = [warning.partition("\n")[0] for kernel in kernels for warning in kernel.warnings]
    return table_of(headers, rows, title, "\n".join(dict.fromkeys(told)))


def _beside(kernel: CompiledKernel, name: str) -> str:
    """Return a number, and beside it that of the shipped kernel where it is another one."""
    here, there = getattr(kernel, name), getattr(kernel.shipped, name, None)
    form = "{:.2f}" if name == "us" else "{}"
    told = form.format(here)
    return told if there in (None, here) else f"{told} (shipped {form.format(there)})"
