"""Text that any terminal, file and notebook shows."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table


def printable(text: str, file: IO[str] | None = None) -> str:
    """Return a text with an escape in place of each character that a file cannot take.

    Args:
        text: may hold names and paths of any kind.
        file: where it goes; by default standard output.
    """
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Shown:
    """What shows well wherever it is shown: each kind of it says how it is a table, once.

    ``str`` and ``repr`` are lines of ASCII, ``rich.print`` takes the table, and a notebook gets it
    in HTML.
    """

    def __rich__(self) -> Table:
        """The table."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The table as plain text."""
        return plain(self.__rich__())

    def __repr__(self) -> str:
        """What ``str`` gives, for a prompt."""
        return str(self)

    def _repr_html_(self) -> str:
        return html(self.__rich__())


def table_of(
    headers: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", caption: str = ""
) -> Table:
    """Return a table of texts as they are: in a string rich would look for markup.

    Args:
        headers: of the columns; one that begins with a blank is of numbers, to the right. Lines
            are broken in the last two columns alone, not in names.
        rows: the cells.
        title: what stands above.
        caption: what stands below.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(printable(title), "table.title"),
        caption=Text(printable(caption), "table.caption"),
        title_justify="left",
        caption_justify="left",
    )
    lines = [[printable(cell) for cell in row] for row in rows]
    for place, header in enumerate(headers):
        texts = [header.strip(), *(line[place] for line in lines)]
        is_name = place < len(headers) - 2
        side: Literal["left", "right"] = "right" if header.startswith(" ") else "left"
        table.add_column(
            texts[0],
            justify=side,
            no_wrap=is_name,
            overflow="fold",
            min_width=_longest(texts, str.splitlines)
            if is_name
            else max(_longest(texts, str.split), min(_LEAST, _longest(texts, str.splitlines))),
        )
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _longest(texts: Iterable[str], parts: Callable[[str], list[str]]) -> int:
    return max((len(part) for text in texts for part in parts(text)), default=0)


_LEAST = 30
"""Characters of a column whose lines are broken, where it has as many and the line has room."""

_WIDTH = 120
"""Characters of a line where no terminal says how many it has."""


def plain(table: Table) -> str:
    """Return a table as lines of ASCII, with what stands in its cells as it is.

    It is as wide as the terminal, or wider where a word would not fit: names are never cut.
    COLUMNS counts where there is none, but in a notebook, which has it of whoever started it.
    A text cannot know where it will be printed. rich would write colours into it where the
    environment forces them, and in a notebook display it and leave the text empty.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement

    table.box = box.ASCII2
    for column in table.columns:
        column.overflow = "fold"  # the other ways put an ellipsis, which is no ASCII
    console = Console(
        file=io.StringIO(),
        width=_width(),
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
    )
    endless = console.options.update_width(1 << 20)
    if Measurement.get(console, endless, table).minimum > console.width < _WIDTH:
        for column in table.columns:
            if not column.no_wrap:
                column.min_width = _longest(map(str, [column.header, *column.cells]), str.split)
    console.width = max(console.width, Measurement.get(console, endless, table).minimum)
    with console.capture() as shown:
        console.print(table)
    return printable("\n".join(map(str.rstrip, shown.get().splitlines())))


def _width() -> int:
    from rich.console import Console

    try:
        is_terminal = sys.stdout.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        is_terminal = False
    if is_terminal:
        return shutil.get_terminal_size((_WIDTH, 24)).columns
    told = "" if Console().is_jupyter else os.environ.get("COLUMNS", "")
    return (int(told) if told.isdecimal() else 0) or _WIDTH


def html(table: Table) -> str:
    """Return a table of texts as HTML, for a notebook."""
    from html import escape

    def broken(text: object) -> str:
        return escape(str(text)).replace("\n", "<br>")

    def line(cells: Iterable[object], tag: str) -> str:
        told = map(broken, cells)
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in told) + "</tr>"

    head = [column.header for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = [line(head, "th"), *(line(row, "td") for row in rows)]
    title = f"<caption>{broken(table.title)}</caption>" if table.title else ""
    note = f"<p>{broken(table.caption)}</p>" if table.caption else ""
    body = "\n".join(lines)
    return f"<table style='text-align: left'>{title}\n{body}\n</table>{note}"


def name_pattern(name: str) -> str:
    """Return a layer's name with ``*`` for each number: layers of one name are alike."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


NEEDS_WIDGETS = 'a progress bar in a notebook needs ipywidgets: pip install "k3cupy[notebook]"'


@functools.cache
def _say_once(text: str) -> None:
    """Write a line on standard error, once a process."""
    print(text, file=sys.stderr)


def progress_bar(*columns: Any, quiet: bool = False) -> Progress:
    """Return a progress bar on standard error; a notebook without widgets gets none.

    It is told, once, what it needs: a bar would be a line there for each of its states.

    Args:
        columns: as of ``rich.progress.Progress``.
        quiet: show nothing.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, quiet=quiet)
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
        console = Console(stderr=True, quiet=quiet, force_jupyter=False)
        if not quiet:
            _say_once(NEEDS_WIDGETS)
        quiet = True
    return Progress(*columns, console=console, disable=quiet)


@contextlib.contextmanager
def compiling(
    *, quiet: bool = False
) -> Iterator[tuple[Callable[[int], None], Callable[[Any], None]]]:
    """Show a progress bar on standard error, unless it is to be quiet.

    Yields:
        What to call with the number of kernels, and what to call whenever one is done.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    columns = "compiling kernels", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with progress_bar(*columns, quiet=quiet) as bar:
        task = bar.add_task("", total=None)
        yield lambda count: bar.update(task, total=count), lambda _: bar.advance(task)
