"""``python -m k3cupy tune``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from k3cupy.cli.options import shape_option
from k3cupy.dispatch import tune as tuning
from k3cupy.dispatch.presets import preset_names
from k3cupy.dispatch.tuning import files
from k3cupy.runtime import devices
from k3cupy.runtime.errors import CompileError, ToolchainError

_INTERRUPTED = 130


@click.command()
@click.option("--preset", type=click.Choice(preset_names()), help="Weights of a named model.")
@shape_option("N x K of a weight, as 2112x7168.")
@click.option(
    "--from-module",
    "module",
    metavar="PACKAGE.MODULE:NAME",
    help="Linear layers of a model of yours: a module, or what makes one.",
)
@click.option("--tokens", multiple=True, type=int, help="A number of rows; all that tables list.")
@click.option("--residual/--no-residual", default=True, help="With a residual too; the default.")
@click.option("--again", is_flag=True, help="Measure also what is measured already.")
@click.option("--dry-run", is_flag=True, help="Only say what would be measured.")
@click.option("--export", type=click.Path(path_type=Path), help="Write a file to share.")
@click.option(
    "--import",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Add such a file to what is measured here; measure nothing.",
)
@click.option("--device", type=int, default=None, help="GPU ordinal; the current one by default.")
def tune(
    preset: str | None,
    shapes: tuple[tuple[int, int], ...],
    module: str | None,
    tokens: tuple[int, ...],
    residual: bool,
    again: bool,
    dry_run: bool,
    export: Path | None,
    source: Path | None,
    device: int | None,
) -> None:
    """Measure on this GPU which kernel each linear layer is to take, and keep it.

    Name the weights by one of --preset, --shape and --from-module. Ctrl-C loses nothing: the same
    command goes on from there.
    """
    try:
        if source is not None:
            gpu = devices.info(devices.ordinal_of(device))
            count = len(files.import_file(source, gpu))
            click.echo(f"{count} measurements of {gpu.name} were added")
            return
        if sum(map(bool, (preset, shapes, module))) != 1:
            raise click.UsageError("name the weights by one of --preset, --shape and --from-module")
        wanted = tuning.shapes_of(shapes or None, preset, module)
        counts = tokens or None
        if dry_run:
            job = tuning.prepare(wanted, counts, residual=residual, again=again, device=device)
            click.echo(job)
            return
        report = tuning.tune(
            wanted, tokens=counts, residual=residual, again=again, export=export, device=device
        )
    except (TypeError, ValueError, ToolchainError, CompileError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo(
            "\nInterrupted. What was measured so far is kept; the same command goes on from there.",
            err=True,
        )
        sys.exit(_INTERRUPTED)
    click.echo(report)
    if export is not None:
        click.echo(f"wrote {export}")
