"""The site of these pages: `make docs`. Warnings are errors there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import k3cupy

project = "k3cupy"
author = "The k3cupy authors"
copyright = f"2026, {author}"
version = release = k3cupy.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "contents"
html_theme = "furo"
html_title = f"k3cupy {version}"
html_show_sourcelink = False

myst_heading_anchors = 4
nb_execution_mode = "off"  # tests/test_notebooks.py runs them; their outputs are committed
nb_merge_streams = True

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_rtype = False

_FOLDER = re.compile(r"\[([^\]]*)\]\(notebooks\)")
_API = re.compile(r"\[([^\]]*)\]\(api\.rst#([\w-]+)\)")
_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
_ROOT = Path(__file__).resolve().parents[1]


def _outside(match: re.Match[str]) -> str:
    """A link that leaves this folder: the file comes with the site, a folder is named."""
    text, target = match[1].strip("`"), match[2]
    if (_ROOT / target).is_file():
        return f"{{download}}`{text} <../{target}>`"
    return f"{text} (`{target}`)"


def _read(app: object, name: str, source: list[str]) -> None:
    if name.startswith("notebooks/"):  # their links stay in this folder; their text is JSON
        return
    text = _API.sub(r"{ref}`\1 <\2>`", _FOLDER.sub(r"[\1](notebooks/first_steps)", source[0]))
    source[0] = _LINK.sub(_outside, text)


def setup(app: Any) -> None:
    app.connect("source-read", _read)
