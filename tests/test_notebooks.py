"""The notebooks of the docs run from top to bottom, and show what they printed.

    python test_notebooks.py --record

runs them and writes their outputs, as they are on a machine without a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted(Path(__file__).resolve().parents[1].glob("docs/notebooks/*.ipynb"))
BETWEEN = "%reset -f"
MOST_BYTES = 40_000
VARIES = "nbval-ignore-output"
"""The tag, of pytest's plug-in nbval, of a cell that shows registers or paths of this machine."""


def run(notebooks: dict[Path, Any]) -> None:
    """Run all cells of all notebooks, each with names of its own, in one kernel: it starts once."""
    import nbformat
    from nbclient import NotebookClient

    both = nbformat.v4.new_notebook()
    for notebook in notebooks.values():
        both.cells += [nbformat.v4.new_code_cell(BETWEEN), *notebook.cells]
    folder = {"metadata": {"path": str(NOTEBOOKS[0].parent)}}
    NotebookClient(both, timeout=170, kernel_name="python3", resources=folder).execute()
    for notebook in notebooks.values():
        number = 0
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # when it ran
            if cell.cell_type == "code":
                cell.execution_count = number = number + 1
                for output in cell.outputs:
                    if "execution_count" in output:
                        output.execution_count = number


def cells_of(notebook: Any) -> list[Any]:
    """Its cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook: Any) -> list[str]:
    """What each cell of code shows."""
    return [
        "".join(o.get("text", "") or o.data["text/plain"] for o in cell.outputs)
        for cell in cells_of(notebook)
    ]


@pytest.mark.xdist_group("notebooks")
def test_notebooks_run_and_show_what_they_print(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("cuda.core", reason="one of them compiles")
    for name in [name for name in os.environ if name.startswith("K3CUPY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    committed = {path: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
    before = {path: shown(notebook) for path, notebook in committed.items()}
    assert len(committed) >= 4
    run(committed)
    for path, notebook in committed.items():
        for cell, want, got in zip(cells_of(notebook), before[path], shown(notebook), strict=True):
            if VARIES in cell.metadata.get("tags", ()):
                assert got, "it shows something"
                continue
            assert got == want, f"{path.name}, {cell.source}\nRecord it: python {__file__} --record"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES


if __name__ == "__main__" and sys.argv[1:] == ["--record"]:
    import nbformat

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    read = {path: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
    run(read)
    for path, notebook in read.items():
        nbformat.write(notebook, path)
