"""Options that several commands take, and how they show what they found."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from k3cupy.projections import MODELS, Shapes, preset_names, preset_shapes
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import ToolchainError, shown

if TYPE_CHECKING:
    from rich.table import Table

_Command = TypeVar("_Command", bound=Callable[..., Any])


def shape_option(text: str) -> Callable[[_Command], _Command]:
    """Return the option ``--shape``, which may be repeated and gives pairs (N, K).

    Args:
        text: its help.
    """
    return click.option(
        "--shape", "shapes", multiple=True, callback=_shapes, metavar="NxK", help=text
    )


def preset_option(text: str) -> Callable[[_Command], _Command]:
    """Return the option ``--preset``, the weights of a named model.

    Args:
        text: its help.
    """
    return click.option("--preset", type=click.Choice(preset_names()), help=text)


def named_shapes(shapes: Shapes, preset: str | None) -> Shapes:
    """Return what ``--shape`` or ``--preset`` named; without either, every weight of Kimi-K3."""
    if shapes and preset:
        raise click.UsageError("one of --shape and --preset, not both")
    return shapes or preset_shapes(preset or MODELS[0])


def _shapes(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    found = [re.fullmatch(r"0*([1-9]\d{0,17})x0*([1-9]\d{0,17})", text) for text in texts]
    for text, match in zip(texts, found, strict=True):
        if match is None:
            message = f"{shown(text)} is no shape; write N x K as 2112x7168, both above 0"
            raise click.BadParameter(message, context, parameter)
    return tuple((int(match[1]), int(match[2])) for match in found if match)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print plain values as JSON, for a program."
)


def show_json(found: Any) -> None:
    """Print plain values."""
    click.echo(json.dumps(found, indent=1))


def show_table(table: Table) -> None:
    """Print a table, as wide as the terminal."""
    from k3cupy.runtime.text import plain

    click.echo(plain(table))


gpu_option = click.option(
    "--gpu",
    metavar="NAME",
    help=f"{', '.join(devices.NAMED)}, the full name of a GPU, or an architecture as sm_90; by "
    "default this machine's.",
)


def gpu_of(name: str | None, device: int | None = None) -> DeviceInfo:
    """Return the GPU that ``--gpu`` names, or one of this machine, by its ordinal or the current.

    Raises:
        ValueError: no such GPU is known.
        ToolchainError: none is named, and none is here.
    """
    if name is not None:
        return devices.named(name)
    try:
        return devices.info(devices.ordinal_of(device))
    except ToolchainError as error:
        told = f"--gpu: expected the name of a GPU, as h200, for none is found here: {error}"
        raise ToolchainError(told) from error


class OutFile(click.Path):
    """A file or folder that will be written: whether it can be is known before the work."""

    def __init__(self, *, is_folder: bool = False) -> None:
        super().__init__(file_okay=not is_folder, dir_okay=is_folder, path_type=Path)

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        """Return the path."""
        path = Path(str(super().convert(value, parameter, context)))
        above = next(each for each in path.absolute().parents if each.exists())
        if not above.is_dir() or not os.access(path if path.exists() else above, os.W_OK):
            self.fail(f"{path} cannot be written", parameter, context)
        return path


def operation_options(command: _Command) -> _Command:
    """Add the options that name instances of an operation, as ``k3cupy.warmup`` takes them."""
    gemm_tokens = "GEMM: a number of tokens; by default all."
    for option in reversed(
        (
            click.option("--dtype", multiple=True, help="bfloat16 (the default) or float16."),
            click.option(
                "--kv-cache", multiple=True, help="MLA: bf16, fp8, fp8_ds_mla; by default all."
            ),
            click.option(
                "--query-fp8/--query-16bit", default=None, help="Decode: fp8 with an fp8 cache."
            ),
            click.option(
                "--rope/--no-rope", default=None, help="MLA: with positions; by default without."
            ),
            click.option("--gate", flag_value=True, default=None, help="Value: with a gate."),
            click.option(
                "--transposed/--not-transposed",
                default=None,
                help="Value: order of w_uv; both by default.",
            ),
            click.option(
                "--kv-inputs-ready", flag_value=True, default=None, help="Decode: that promise."
            ),
            click.option(
                "--unaligned", "vector", flag_value=False, default=None, help="Rows off 16 bytes."
            ),
            shape_option("GEMM: N x K of a weight, as 2112x7168; all of Kimi-K3 by default."),
            preset_option("GEMM: the weights of a named model."),
            click.option(
                "--heads", multiple=True, type=int, help="Query: local heads; 12 by default."
            ),
            click.option("--tokens", multiple=True, type=int, help=gemm_tokens),
            click.option(
                "--strided/--packed", default=None, help="Fused-A: layout of x; both by default."
            ),
            click.option(
                "--weight-is-static", flag_value=True, default=None, help="Weights: that promise."
            ),
            click.option(
                "--batch-invariant", flag_value=True, default=None, help="GEMM: for that flag."
            ),
            click.option(
                "--residual", flag_value=True, default=None, help="GEMM: for calls that add one."
            ),
            click.option(
                "--out-dtype", type=click.Choice(["float32"]), help="GEMM: of outputs; x's."
            ),
        )
    ):
        command = option(command)
    return command


def named_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``operation_options`` that were named, a preset as its shapes."""
    preset = options.pop("preset")
    if preset:
        options["shapes"] = named_shapes(options["shapes"], preset)
    return {name: value for name, value in options.items() if value not in (None, ())}
