"""``python -m k3cupy warmup``."""

from __future__ import annotations

from typing import Any

import click

import k3cupy
from k3cupy import projections
from k3cupy.cli.options import named_shapes, preset_option, shape_option
from k3cupy.runtime.text import compiling


@click.command()
@click.option(
    "--model",
    help=f"All that a model needs, as in its bundle, with --tp: {', '.join(projections.MODELS)}.",
)
@click.option("--tp", type=int, help="--model: degree of tensor parallelism.")
@click.option(
    "--op",
    default="mla_decode",
    show_default=True,
    help="mla_decode, mla_norm, mla_query, mla_value, mla_prefill, one of the prefill operations, "
    "fused_a_gemm, skinny_gemm or low_latency_linear. What is not named below is the operation's "
    "default.",
)
@click.option("--dtype", multiple=True, help="bfloat16 (the default) or float16.")
@click.option("--kv-cache", multiple=True, help="MLA: bf16, fp8, fp8_ds_mla; by default all.")
@click.option("--query-fp8/--query-16bit", default=None, help="Decode: fp8 with an fp8 cache.")
@click.option("--rope/--no-rope", default=None, help="MLA: with positions; by default without.")
@click.option("--gate", flag_value=True, default=None, help="Value: with a gate.")
@click.option(
    "--transposed/--not-transposed", default=None, help="Value: order of w_uv; both by default."
)
@click.option("--kv-inputs-ready", flag_value=True, default=None, help="Decode: that promise.")
@click.option("--unaligned", "vector", flag_value=False, default=None, help="Rows off 16 bytes.")
@shape_option("GEMM: N x K of a weight, as 2112x7168; all of Kimi-K3 by default.")
@preset_option("GEMM: the weights of a named model.")
@click.option("--tokens", multiple=True, type=int, help="GEMM: a number of tokens; by default all.")
@click.option("--strided/--packed", default=None, help="Fused-A: layout of x; both by default.")
@click.option("--weight-is-static", flag_value=True, default=None, help="Weights: that promise.")
@click.option("--batch-invariant", flag_value=True, default=None, help="GEMM: for that flag.")
@click.option("--residual", flag_value=True, default=None, help="GEMM: for calls that add one.")
@click.option("--out-dtype", type=click.Choice(["float32"]), help="GEMM: of outputs; x's.")
@click.option("--device", type=int, default=None, help="GPU ordinal; the current one by default.")
def warmup(
    op: str,
    device: int | None,
    preset: str | None,
    model: str | None,
    tp: int | None,
    **options: Any,
) -> None:
    """Compile the kernels that calls will need, into CuPy's disk cache."""
    if preset:
        options["shapes"] = named_shapes(options["shapes"], preset)
    named = {name: value for name, value in options.items() if value not in (None, ())}
    if (model is None) != (tp is None) or (model is not None and named):
        raise click.UsageError("--model and --tp go together, and without options of one operation")
    try:
        if model is not None and tp is not None:
            count = _of_model(model, tp, device)
        else:
            count = k3cupy.warmup(op, device=device, **named)
    except (TypeError, ValueError, k3cupy.ToolchainError, k3cupy.CompileError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{count} kernels are ready")


def _of_model(model: str, tp: int, device: int | None) -> int:
    from k3cupy import bundling
    from k3cupy.runtime import devices, instances

    ordinal = devices.ordinal_of(device)
    wanted = bundling.instances_of(model, tp, devices.info(ordinal))
    with compiling() as (found, done):
        return instances.load_all(wanted, ordinal, on_found=found, on_done=done)
