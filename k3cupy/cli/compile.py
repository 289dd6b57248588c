"""``k3cupy compile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from k3cupy.cli.options import (
    gpu_option,
    json_option,
    named_options,
    operation_options,
    show_json,
    show_table,
)


class _Sources(click.Path):
    """A folder of sources, or the name of an operation."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        """Return the name, or the path."""
        from k3cupy.ops.warmup import OPERATIONS

        if value in OPERATIONS:
            return value
        try:
            return super().convert(value, parameter, context)
        except click.BadParameter as error:
            told = f"{error.message} Expected a folder, or one of {', '.join(OPERATIONS)}"
            raise click.BadParameter(told, context, parameter) from None


@click.command("compile")
@click.argument("source_dir", required=False, type=_Sources())
@click.option("--op", help="As of warmup; by default what differs from the package, or mla_decode.")
@operation_options
@gpu_option
@click.option("--time/--no-time", default=None, help="On this GPU: beside the shipped kernels.")
@click.option("--sass", is_flag=True, help="Print the machine code of each instance, too.")
@json_option
def compile_command(
    source_dir: Path | str | None,
    op: str | None,
    gpu: str | None,
    time: bool | None,
    sass: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile kernels, of edited sources too, and show registers, spills and shared memory.

    SOURCE_DIR is a copy of cuda_src, or the name of an operation; without a folder the sources are
    those that calls use. Needs no GPU: without one, and without --gpu, it is for an H200.
    """
    from k3cupy.compiling.compile import compile

    report = compile(source_dir, op, gpu=gpu, time=time, **named_options(options))
    if as_json:
        found = report.to_dict()
        if sass:
            for kernel, facts in zip(report, found["kernels"], strict=True):
                facts["sass"] = kernel.sass
        show_json(found)
        return
    show_table(report.__rich__())
    for kernel in report if sass else ():
        click.echo(f"\n// {kernel.name_expression}\n{kernel.sass}")
