"""``python -m k3cupy warmup``."""

from __future__ import annotations

import click

import k3cupy
from k3cupy.cli.options import shape_option


@click.command()
@click.option(
    "--op",
    default="mla_decode",
    show_default=True,
    help="mla_decode, mla_prefill, one of the prefill operations, fused_a_gemm or skinny_gemm.",
)
@click.option("--dtype", multiple=True, default=["bfloat16"], show_default=True)
@click.option("--kv-cache", multiple=True, default=["bf16", "fp8", "fp8_ds_mla"], show_default=True)
@click.option("--query-fp8/--query-16bit", default=None, help="By default fp8 with an fp8 cache.")
@click.option("--rope/--no-rope", default=False, show_default=True)
@click.option("--kv-inputs-ready", is_flag=True, help="For calls that make this promise.")
@click.option("--unaligned", is_flag=True, help="For rows off a multiple of 16 bytes.")
@shape_option("GEMM: N x K of a weight, as 2112x7168; all of Kimi-K3 by default.")
@click.option("--tokens", multiple=True, type=int, help="GEMM: a number of tokens; by default all.")
@click.option("--packed/--strided", default=None, help="Fused-A: layout of x; both by default.")
@click.option("--weight-is-static", is_flag=True, help="GEMM: for calls that make this promise.")
@click.option("--batch-invariant", is_flag=True, help="Fused-A: for calls with this flag.")
@click.option("--residual", is_flag=True, help="GEMM: for calls that add one.")
@click.option("--device", type=int, default=None, help="GPU ordinal; the current one by default.")
def warmup(
    op: str,
    dtype: tuple[str, ...],
    kv_cache: tuple[str, ...],
    query_fp8: bool | None,
    rope: bool,
    kv_inputs_ready: bool,
    unaligned: bool,
    shapes: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...],
    packed: bool | None,
    weight_is_static: bool,
    batch_invariant: bool,
    residual: bool,
    device: int | None,
) -> None:
    """Compile the kernels that the tables may choose, into CuPy's disk cache."""
    try:
        count = k3cupy.warmup(
            op,
            dtype=list(dtype),
            kv_cache=list(kv_cache),
            query_fp8=query_fp8,
            rope=rope,
            kv_inputs_ready=kv_inputs_ready,
            vector=not unaligned,
            shapes=shapes or None,
            tokens=tokens or None,
            strided=None if packed is None else not packed,
            weight_is_static=weight_is_static,
            batch_invariant=batch_invariant,
            residual=residual,
            device=device,
        )
    except (ValueError, k3cupy.ToolchainError, k3cupy.CompileError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{count} kernels are ready")
