"""Text that any terminal, file and notebook shows."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def printable(text: str, file: IO[str] | None = None) -> str:
    """Return a text with an escape in place of each character that a file cannot take.

    Args:
        text: may hold names and paths of any kind.
        file: where it goes; by default standard output.
    """
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def plain(table: Table, width: int) -> str:
    """Return a table as lines of ASCII, with what stands in its cells as it is.

    A text cannot know where it will be printed. rich would write colours into it where the
    environment forces them, and in a notebook display it and leave the text empty.
    """
    from rich import box
    from rich.console import Console

    table.box = box.ASCII2
    for column in table.columns:
        column.overflow = "fold"  # the other ways put an ellipsis, which is no ASCII
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as shown:
        console.print(table)
    return printable("\n".join(map(str.rstrip, shown.get().splitlines())))


@contextlib.contextmanager
def compiling(
    *, quiet: bool = False
) -> Iterator[tuple[Callable[[int], None], Callable[[Any], None]]]:
    """Show a progress bar on standard error, unless it is to be quiet.

    Yields:
        What to call with the number of kernels, and what to call whenever one is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = "compiling kernels", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("", total=None)
        yield lambda count: bar.update(task, total=count), lambda _: bar.advance(task)
