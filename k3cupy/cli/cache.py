"""``k3cupy cache``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from k3cupy.choose import cache as measurements
from k3cupy.cli.options import json_option, show_json
from k3cupy.runtime import binaries, toolchain


@click.group()
def cache() -> None:
    """What is kept on disk: compiled kernels, and measurements of this machine's GPUs."""


@cache.command()
@json_option
def info(as_json: bool) -> None:
    """Folders, files and bytes."""
    facts = {name: _facts(*kept) for name, kept in _kept().items()}
    if as_json:
        show_json(facts)
        return
    for name, fact in facts.items():
        click.echo(f"{name:<14}{fact['files']} files, {_mib(fact['bytes'])}, in {fact['folder']}")


@cache.command()
@click.option("--measurements", "also", is_flag=True, help="What `tune` has measured, too.")
@json_option
def clear(also: bool, as_json: bool) -> None:
    """Remove compiled kernels, which are compiled again when they are needed.

    Kernels of bundles stay, and so does what is not k3cupy's in CuPy's folder.
    """
    removed: dict[str, dict[str, Any]] = {}
    for name, (folder, files) in _kept().items():
        if name == "measurements" and not also:
            continue
        removed[name] = _facts(folder, files)
        for path in files:
            path.unlink(missing_ok=True)
    if as_json:
        show_json(removed)
        return
    for name, fact in removed.items():
        click.echo(
            f"removed {fact['files']} files of {name}, {_mib(fact['bytes'])}, in {fact['folder']}"
        )


def _kept() -> dict[str, tuple[Path, list[Path]]]:
    kernels, tables = toolchain.cache_directory(), measurements.directory()
    return {
        "kernels": (kernels, sorted(kernels.glob(binaries.path_in(kernels, "*").name))),
        "measurements": (tables, sorted(tables.glob("*/*.json"))),
    }


def _facts(folder: Path, files: list[Path]) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in files if path.exists())
    return {"folder": str(folder), "files": len(files), "bytes": size}


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
