"""Options that several commands take."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from k3cupy.projections import MODELS, Shapes, preset_names, preset_shapes
from k3cupy.runtime.errors import shown

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
    found = [re.fullmatch(r"(\d{1,18})x(\d{1,18})", text) for text in texts]
    for text, match in zip(texts, found, strict=True):
        if match is None:
            message = f"{shown(text)} is no shape; write N x K as 2112x7168"
            raise click.BadParameter(message, context, parameter)
    return tuple((int(match[1]), int(match[2])) for match in found if match)
