"""The command line, a file a command: ``python -m k3cupy --help``."""

from __future__ import annotations

import io
import sys

import click

import k3cupy
from k3cupy.cli import bench, bundle, tune, warmup


@click.group()
@click.version_option(k3cupy.__version__, prog_name="k3cupy")
def main() -> None:
    """Kimi-K3 decode kernels, compiled at run time."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name or a path may hold what it cannot show
        sys.stdout.reconfigure(errors="backslashreplace")


main.add_command(bench.bench)
main.add_command(bundle.bundle)
main.add_command(tune.tune)
main.add_command(warmup.warmup)


@main.command("show-config")
def show_config() -> None:
    """GPUs, versions, paths, and which backend will run and why."""
    k3cupy.show_config()
