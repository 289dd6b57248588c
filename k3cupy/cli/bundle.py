"""``k3cupy bundle``."""

from __future__ import annotations

from pathlib import Path

import click

from k3cupy import projections
from k3cupy.cli.options import OutFile, gpu_of, gpu_option, json_option, show_json
from k3cupy.runtime import toolchain
from k3cupy.runtime.instances import Instance
from k3cupy.runtime.text import compiling


@click.command()
@click.option("--model", required=True, help=f"One of {', '.join(projections.MODELS)}.")
@click.option("--tp", type=int, required=True, help="Degree of tensor parallelism, as 8.")
@gpu_option
@click.option("--out", type=OutFile(is_folder=True), required=True, help="The folder.")
@click.option("--wheel", is_flag=True, help="Write a wheel there, which pip installs.")
@click.option("--batch-invariant", is_flag=True, help="Also for that mode of linear layers.")
@click.option("--kv-inputs-ready", is_flag=True, help="Also for decode calls with that promise.")
@click.option("--max-workers", type=click.IntRange(1), help="Compiling threads; one a core.")
@json_option
def bundle(
    model: str,
    tp: int,
    gpu: str | None,
    out: Path,
    wheel: bool,
    batch_invariant: bool,
    kv_inputs_ready: bool,
    max_workers: int | None,
    as_json: bool,
) -> None:
    """Compile all that a model needs into one folder or wheel; needs no GPU, but an extra.

    The extra, cu12 or cu13, brings the compiler. With K3CUPY_BUNDLE naming the folder, or the wheel
    installed, nothing of it is compiled later.
    """
    from k3cupy import bundling

    projections.of_degree(model, tp)
    there = gpu_of(gpu)
    toolchain.need_compiler()
    bundling.take_folder(out.absolute(), for_wheels=wheel)
    of_calls = bundling.instances_of(
        model, tp, there, batch_invariant=batch_invariant, kv_inputs_ready=kv_inputs_ready
    )
    wanted: dict[Instance, None] = {}
    with compiling() as (found, done):
        for instance in of_calls:  # to choose them takes seconds too
            wanted[instance] = None
            found(len(wanted))
        made = (bundling.make_wheel if wheel else bundling.make)(
            list(wanted),
            f"{model} tp{tp}",
            there,
            out.absolute(),
            max_workers=max_workers,
            on_done=done,
        )
    path = str(made) if wheel else str(out.absolute())
    if as_json:
        show_json({"gpu": there.name, "arch": there.arch, "kernels": len(wanted), "path": path})
        return
    click.echo(f"{len(wanted)} kernels for {model} tp{tp} on {there.name} ({there.arch})")
    if wheel:
        click.echo(f"wrote {path}; pip install it where k3cupy is")
    else:
        click.echo(f"wrote {out}; set K3CUPY_BUNDLE={path}")
