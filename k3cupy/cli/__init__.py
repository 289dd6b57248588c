"""The command line, a file a command: ``k3cupy --help``."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

import click

import k3cupy
from k3cupy.cli import bench, bundle, cache, compile, demo, explain, tune, warmup
from k3cupy.cli.options import json_option, show_json

_EXPECTED = (OSError, RuntimeError, TypeError, ValueError, ImportError)
"""What the package and the system raise with a text for people."""


class _Commands(click.Group):
    """Commands whose errors are told in words; ``python -X dev -m k3cupy`` shows tracebacks."""

    def invoke(self, context: click.Context) -> Any:
        """Run a command."""
        before = warnings.formatwarning
        if not sys.flags.dev_mode:
            warnings.formatwarning = _in_words
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if sys.flags.dev_mode:
                raise
            told = str(error) if isinstance(error, _EXPECTED) else ""
            if not told:
                told = f"{type(error).__name__}: {error}. `python -X dev -m k3cupy` shows where"
            raise click.ClickException(told) from error
        finally:
            warnings.formatwarning = before


def _in_words(message: Warning | str, *_: Any, **__: Any) -> str:
    """Return a warning without the line of Python that it names, which is none of the user's."""
    return f"Warning: {message}\n"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(k3cupy.__version__, prog_name="k3cupy")
def main() -> None:
    """Kimi-K3 decode kernels, compiled at run time."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name or a path may hold what it cannot show
        sys.stdout.reconfigure(errors="backslashreplace")


main.add_command(bench.bench)
main.add_command(bundle.bundle)
main.add_command(cache.cache)
main.add_command(compile.compile_command)
main.add_command(demo.demo)
main.add_command(explain.explain)
main.add_command(tune.tune)
main.add_command(warmup.warmup)


@main.command("show-config")
@json_option
def show_config(as_json: bool) -> None:
    """GPUs, versions, paths, and which backend will run and why."""
    if as_json:
        show_json(k3cupy.config_info())
    else:
        k3cupy.show_config()
