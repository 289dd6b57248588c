"""``k3cupy tune``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from k3cupy.cli.options import (
    OutFile,
    gpu_of,
    gpu_option,
    json_option,
    preset_option,
    shape_option,
    show_json,
)
from k3cupy.projections import preset_shapes
from k3cupy.runtime.errors import shown
from k3cupy.tuning import files
from k3cupy.tuning import tune as tuning

_INTERRUPTED = 130
_LINEAR = "low_latency_linear"


def _part(context: click.Context, parameter: click.Parameter, text: str | None) -> slice | None:
    """Return which of the weights ``2/3`` means: the second of three, the fifth and so on."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        message = f"{shown(text)} is no part; write the second of three as 2/3"
        raise click.BadParameter(message, context, parameter)
    return slice(int(match[1]) - 1, None, int(match[2]))


@click.command()
@click.option(
    "--op",
    type=click.Choice(list(tuning.FAMILY_OF)),
    default=_LINEAR,
    show_default=True,
    help="Whose configurations.",
)
@preset_option("Weights of a named model.")
@shape_option("N x K of a weight, as 2112x7168.")
@click.option(
    "--from-module",
    "module",
    metavar="PACKAGE.MODULE:NAME",
    help="Linear layers of a model of yours: a module, or what makes one.",
)
@click.option(
    "--part",
    callback=_part,
    metavar="I/N",
    help="Only the I-th of N parts of the weights of a preset, for several GPUs or runs.",
)
@click.option("--kind", "kinds", multiple=True, help="MLA: formats, or an operation; all.")
@click.option("--heads", "num_heads", type=int, help="MLA: local heads; 12 by default.")
@click.option("--tokens", multiple=True, type=int, help="A number of tokens; the tables'.")
@click.option("--residual/--no-residual", default=True, help="With a residual too; the default.")
@click.option("--again", is_flag=True, help="Measure also what is measured already.")
@click.option("--dry-run", is_flag=True, help="Only say what would be measured.")
@click.option("--export", type=OutFile(), help="Write a file to share.")
@click.option(
    "--import",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Add such a file to what is measured here; measure nothing.",
)
@click.option("--device", type=int, default=None, help="GPU ordinal; the current one by default.")
@gpu_option
@json_option
def tune(
    op: str,
    again: bool,
    dry_run: bool,
    export: Path | None,
    source: Path | None,
    device: int | None,
    part: slice | None,
    gpu: str | None,
    as_json: bool,
    **named: Any,
) -> None:
    """Measure on this GPU which kernel and configuration each call is to take, and keep it.

    Name the weights of linear layers by one of --preset, --shape and --from-module. Ctrl-C loses
    nothing: the same command goes on from there.
    """
    options: dict[str, Any] = {
        name: None if value == () else value for name, value in named.items()
    }
    if gpu is not None and not dry_run and source is None:
        told = "--gpu is of --dry-run and --import: what is measured is this machine's GPU"
        raise click.UsageError(told)
    source_of = click.get_current_context().get_parameter_source
    if op != _LINEAR and source_of("residual") is ParameterSource.COMMANDLINE:
        raise click.UsageError(f"--residual and --no-residual are of --op {_LINEAR}")
    try:
        if part is not None:
            if options["preset"] is None:
                raise click.UsageError("--part is of a --preset")
            options["shapes"] = preset_shapes(options.pop("preset"))[part]
        if source is not None:
            of = gpu_of(gpu, device)
            count = len(files.import_file(source, of))
            if as_json:
                show_json({"gpu": of.name, "added": count})
            else:
                click.echo(f"{count} measurements of {of.name} were added")
            return
        if dry_run:
            targets = tuning.targets_of(op, **options)
            job = tuning.prepare(targets, again=again, gpu=gpu_of(gpu, device))
            if as_json:
                todo = [{"problem": each.problem, "tokens": each.tokens} for each in job.todo]
                show_json({"gpu": job.gpu.name, "known": job.num_known, "todo": todo})
            else:
                click.echo(job)
            return
        report = tuning.tune(op=op, again=again, export=export, device=device, **options)
    except KeyboardInterrupt:
        written = "" if export is None else f" and written to {export}"
        click.echo(
            f"\nInterrupted. What was measured so far is kept{written}; the same command goes on "
            "from there.",
            err=True,
        )
        sys.exit(_INTERRUPTED)
    if as_json:
        show_json(report.to_dict())
        return
    click.echo(report)
    if export is not None and report.entries:
        click.echo(f"wrote {export}")
