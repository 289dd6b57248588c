"""``k3cupy warmup``."""

from __future__ import annotations

from typing import Any

import click

import k3cupy
from k3cupy import projections
from k3cupy.cli.options import json_option, named_options, operation_options, show_json
from k3cupy.runtime.text import compiling


@click.command()
@click.option(
    "--model",
    help=f"All that a model needs, as in its bundle, with --tp: {', '.join(projections.MODELS)}.",
)
@click.option("--tp", type=int, help="--model: degree of tensor parallelism.")
@click.option(
    "--op",
    help="mla_decode (the default), mla_norm, mla_query, mla_value, mla_prefill, one of the "
    "prefill operations, fused_a_gemm, skinny_gemm or low_latency_linear. What is not named below "
    "is the operation's default.",
)
@operation_options
@click.option("--device", type=int, default=None, help="GPU ordinal; the current one by default.")
@json_option
def warmup(
    op: str | None,
    device: int | None,
    model: str | None,
    tp: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile the kernels that calls will need, into CuPy's disk cache."""
    named = named_options(options)
    if (model is None) != (tp is None) or (model is not None and (op or named)):
        told = "--model and --tp go together, and without --op and its options"
        raise click.UsageError(told)
    if model is not None and tp is not None:
        count = _of_model(model, tp, device)
    else:
        count = k3cupy.warmup(op or "mla_decode", device=device, **named)
    if as_json:
        show_json({"kernels": count})
    else:
        click.echo(f"{count} kernels are ready")


def _of_model(model: str, tp: int, device: int | None) -> int:
    from k3cupy import bundling
    from k3cupy.runtime import devices, instances

    projections.of_degree(model, tp)
    ordinal = devices.ordinal_of(device)
    wanted = bundling.instances_of(model, tp, devices.info(ordinal))
    with compiling() as (found, done):
        return instances.load_all(wanted, ordinal, on_found=found, on_done=done)
