"""Code blocks of the documents: read, run in order, and compared with what they print.

    python docs_helpers.py RESULTS.json PAGE.md...

runs all blocks of all pages in one process. A page has one namespace and an empty folder, and runs
twice, the second time in the folder that the first left behind: a cell of a notebook runs again
too.

Words behind the language of a block are marks (`MARKS`): what a `python` block needs, and when a
`text` block is what the `python` block above it prints. A block that needs a GPU runs without one
too, until it is told so: arguments are looked at before.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import io
import json
import os
import re
import sys
import textwrap
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3cupy.runtime.errors import ToolchainError

FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
ARROW = "  # -> "
MARKS = {"python": {"gpu", "compiler", "transformers"}, "text": {"output", "cpu", "gpu"}}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block: ```language marks, its text, and the line of the file where it begins."""

    language: str
    marks: frozenset[str]
    line: int
    text: str


@dataclass(frozen=True)
class Outcome:
    """What became of a block: why it did not run, or what was wrong, or neither."""

    skipped: str = ""
    failed: str = ""


def blocks(text: str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a document, all or those of one language."""
    found = [
        Block(m[2], frozenset(m[3].split()), text.count("\n", 0, m.start()) + 1,
              textwrap.dedent(m[4]))
        for m in FENCE.finditer(text)
    ]  # fmt: skip
    return [block for block in found if language in (None, block.language)]


def prose(text: str) -> str:
    """A document without its code blocks."""
    return FENCE.sub("", text)


def this_machine() -> frozenset[str]:
    """The marks that hold here."""
    import torch

    found = {"output", "gpu" if torch.cuda.is_available() else "cpu"}
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
        found.add("compiler")
    if importlib.util.find_spec("transformers"):
        found.add("transformers")
    return frozenset(found)


def differs(want: str, got: str) -> str:
    """Nothing, or how what was printed differs from what the page says. `...` is anything."""
    if doctest.OutputChecker().check_output(want.strip() + "\n", got.strip() + "\n", FLAGS):
        return ""
    return f"the page says:\n{want}\nbut it prints:\n{got}"


def run_block(block: Block, namespace: dict[str, Any], file: str) -> tuple[str, str]:
    """Run a block; return what it printed, and how that differs from its `# ->` comments."""
    lines = block.text.splitlines()
    body = ast.increment_lineno(ast.parse(block.text), block.line).body
    printed, wrong = "", ""
    for statement in body:
        code = compile(ast.Module([statement], []), file, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        printed += out.getvalue()
        _, arrow, want = lines[(statement.end_lineno or 0) - block.line - 1].partition(ARROW)
        if arrow:
            wrong += differs(want, out.getvalue())
    return printed, wrong


def run_page(text: str, file: str, machine: frozenset[str]) -> dict[int, Outcome]:
    """Run the `python` blocks of a page in order, in one namespace: an outcome for each line."""
    outcomes: dict[int, Outcome] = {}
    namespace: dict[str, Any] = {"__name__": "__main__"}
    line, printed = 0, ""
    for block in blocks(text):
        if block.language == "python":
            line = block.line
            needs_gpu = "gpu" in (missing := block.marks - machine)
            if missing - {"gpu"}:
                outcomes[line] = Outcome(skipped=f"needs {', '.join(sorted(missing))}")
                continue
            try:
                printed, wrong = run_block(block, namespace, file)
                wrong = "it needs no GPU" if needs_gpu else wrong
            except Exception as error:
                is_refused = needs_gpu and isinstance(error, ToolchainError)
                printed, wrong = "", "" if is_refused else traceback.format_exc()
            outcomes[line] = Outcome(failed=wrong)
        elif block.language == "text" and block.marks & machine and outcomes[line] == Outcome():
            outcomes[line] = Outcome(failed=differs(block.text, printed))
    return outcomes


def run_twice(page: Path, machine: frozenset[str]) -> dict[int, Outcome]:
    """Both runs of a page, in the working directory; what fails only in the second says so."""
    import k3cupy

    text = page.read_text(encoding="utf-8")
    runs = []
    for _ in range(2):
        k3cupy.reset_dispatch_report()
        runs.append(run_page(text, str(page), machine))
    first, second = runs
    return {
        line: Outcome(failed=f"in the second run of the page:\n{second[line].failed}")
        if second[line].failed and not first[line].failed
        else first[line]
        for line in first
    }


def main(results: str, *pages: str) -> None:
    """Run pages, each in a folder of its own below the results."""
    machine = this_machine()
    found = {}
    for number, page in enumerate(pages):
        folder = Path(results).with_suffix("") / str(number)
        folder.mkdir(parents=True)
        os.chdir(folder)
        outcomes = run_twice(Path(page), machine)
        found[page] = {line: asdict(outcome) for line, outcome in outcomes.items()}
    Path(results).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
