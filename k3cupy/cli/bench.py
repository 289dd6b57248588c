"""``k3cupy bench``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from k3cupy.cli.options import OutFile, named_shapes, preset_option, shape_option
from k3cupy.projections import MODELS, of_degree
from k3cupy.runtime.errors import reject
from k3cupy.runtime.toolchain import optional

_WINDOWS = ("mla-front", "kda-front", "mla-back", "moe-front")
_STEPS = ("norm", "16bit+same", "fp8+fp8", "16bit+ds_mla")
"""As ``bench.layers`` and ``bench.step`` have them; to import those takes PyTorch."""

_COUNT = click.IntRange(1)

_PICTURES = (".png", ".svg", ".pdf")

_Entry = TypeVar("_Entry")


class _Picture(OutFile):
    """A file that is drawn: without an ending, or with another, matplotlib writes another one."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        """Return the path."""
        path = super().convert(value, parameter, context)
        if path.suffix.lower() not in _PICTURES:
            told = f"expected a name that ends in {', '.join(_PICTURES)}, got {path}"
            self.fail(told, parameter, context)
        return path


@click.group()
def bench() -> None:
    """Measure on this GPU; needs PyTorch."""


def _result_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add where the results go and which commit they are of."""
    for option in (
        click.option(
            "--commit", default=None, help="The commit, where the sources are no git checkout."
        ),
        click.option("--json", "path", type=OutFile(), help="Write the results there."),
    ):
        command = option(command)
    return command


def _chain_options(producer: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what adds the kinds of the chain's ends, the first one's default given."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for name, default in (("consumer", "none"), ("producer", producer)):
            command = click.option(
                f"--{name}",
                type=click.Choice(["end", "early", "none", "gemm"]),
                default=default,
                show_default=True,
                help=f"The {name}: where it lets the next kernel in, or a product.",
            )(command)
        return command

    return add


def _need_torch() -> None:
    with optional("bench"):
        import torch  # noqa: F401


def _candidates(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[Any, ...] | None:
    """Return kernels with configurations, of names as tables write them; None where none came."""
    from k3cupy.choose.table import config_of
    from k3cupy.tuning.entries import Candidate

    try:
        parts = [text.partition("/") for text in texts]
        return tuple(Candidate(kernel, config_of(kernel, key)) for kernel, _, key in parts) or None
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def _need_gpu() -> None:
    _need_torch()
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("bench needs a CUDA GPU; PyTorch sees none")


def _need_matplotlib(plot: Path | None, who: str = "--plot") -> None:
    if plot is not None:
        with optional(who):
            import matplotlib  # noqa: F401


def _measured(entries: Iterable[_Entry]) -> list[_Entry]:
    """Return all entries, or those that are there when somebody presses Ctrl-C."""
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    from k3cupy.runtime.text import progress_bar

    found: list[_Entry] = []
    bar = progress_bar(SpinnerColumn(), "{task.completed} measured", TimeElapsedColumn())
    try:
        with bar:
            task = bar.add_task("", total=None)
            for entry in entries:
                found.append(entry)
                bar.advance(task)
    except KeyboardInterrupt:
        if not found:
            raise
        click.echo(f"Interrupted; what follows are the {len(found)} that were measured.", err=True)
    return found


def _show(document: dict[str, Any], path: Path | None) -> None:
    from k3cupy.bench import report

    report.print_table(document)
    if path is not None:
        report.write_json(path, document)
        click.echo(f"wrote {path}")


@bench.command("decode")
@click.option("--kind", "kinds", multiple=True, help="Query+cache formats; all by default.")
@click.option("--tokens", multiple=True, type=_COUNT, help="Batch sizes; the table's by default.")
@click.option("--heads", type=_COUNT, default=12, show_default=True)
@click.option("--chain-only", is_flag=True, help="Only the real chain with PDL.")
@_chain_options("gemm")
@_result_options
def decode_command(
    kinds: tuple[str, ...],
    tokens: tuple[int, ...],
    heads: int,
    chain_only: bool,
    producer: str,
    consumer: str,
    path: Path | None,
    commit: str | None,
) -> None:
    """The MLA decode epilogue: every mapping and block size, in the chain and alone.

    PDL on and off. An empty kernel and the unfused PyTorch operations are measured in the same run.
    """
    _need_torch()
    from k3cupy.bench import decode

    unknown = [kind for kind in kinds if kind not in decode.KINDS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(decode.KINDS)}")
    _need_gpu()
    around = producer, consumer
    every = kinds or decode.KINDS, tokens or decode.TOKENS
    runs = [decode.run(*every, heads, [("chain", True)], around)]
    if not chain_only:
        fewer = kinds or decode.KINDS[:2], tokens or (1, 4, 16, 64, 65, 128, 512)
        scenarios = [("chain", False), ("alone", True), ("alone", False)]
        runs.append(decode.run(*fewer, heads, scenarios, around))
    entries = _measured(itertools.chain.from_iterable(runs))
    _show(decode.as_document(entries, commit, around), path)


@bench.command("prefill")
@click.option("--op", "ops", multiple=True, help="Operations; all by default.")
@click.option("--tokens", multiple=True, type=_COUNT, help="Prompt lengths; the table's.")
@click.option("--heads", type=_COUNT, default=12, show_default=True)
@click.option("--rope/--no-rope", default=False, show_default=True, help="With positions.")
@_chain_options("end")
@_result_options
def prefill_command(
    ops: tuple[str, ...],
    tokens: tuple[int, ...],
    heads: int,
    rope: bool,
    producer: str,
    consumer: str,
    path: Path | None,
    commit: str | None,
) -> None:
    """The MLA prefill and context epilogues: every configuration, and what it compares with.

    A device-to-device copy of as many bytes, a kernel that copies them one warp a row, and the
    unfused PyTorch operations are measured in the same run.
    """
    _need_torch()
    from k3cupy.bench import prefill
    from k3cupy.kernels.mla_prefill import OPS

    names = {name.removeprefix("fused_mla_"): name for name in OPS}
    wanted = [names.get(op, op) for op in ops]
    unknown = [op for op in wanted if op not in OPS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(names)}")
    _need_gpu()
    around = producer, consumer
    entries = prefill.run(wanted or OPS, tokens or prefill.TOKENS, heads, rope, around)
    _show(prefill.as_document(_measured(entries), commit, around), path)


@bench.command("gemm")
@shape_option("N x K as 2112x7168; all of Kimi-K3's by default.")
@preset_option("The weights of a named model.")
@click.option("--tokens", multiple=True, type=click.IntRange(1, 64), help="M; the table's.")
@click.option("--plot", type=_Picture(), help="Draw the times over the floor.")
@_chain_options("end")
@_result_options
def gemm_command(
    shapes: tuple[tuple[int, int], ...],
    preset: str | None,
    tokens: tuple[int, ...],
    plot: Path | None,
    producer: str,
    consumer: str,
    path: Path | None,
    commit: str | None,
) -> None:
    """The fused-A GEMM in its chain, against F.linear and the time of streaming the weight.

    Cold and hot weights, packed and strided x, with and without the promise of a static weight.
    """
    _need_matplotlib(plot)
    wanted = named_shapes(shapes, preset)
    _need_gpu()
    from k3cupy.bench import gemm
    from k3cupy.choose.gemm import TOKEN_CLASSES

    around = producer, consumer
    entries = gemm.run(wanted, tokens or TOKEN_CLASSES, around)
    document = gemm.as_document(_measured(entries), commit, around)
    _show(document, path)
    if plot is not None:
        from k3cupy.bench.plots import plot_gemm

        plot_gemm(document, plot)
        click.echo(f"wrote {plot}")


@bench.command("linear")
@shape_option("N x K as 2112x7168; all of Kimi-K3's by default.")
@preset_option("The weights of a named model.")
@click.option("--tokens", multiple=True, type=click.IntRange(1, 64), help="M; 1 to 16.")
@_chain_options("end")
@_result_options
def linear_command(
    shapes: tuple[tuple[int, int], ...],
    preset: str | None,
    tokens: tuple[int, ...],
    producer: str,
    consumer: str,
    path: Path | None,
    commit: str | None,
) -> None:
    """Low-latency linear in its chain: what it chooses, against the public plan.

    That is what vLLM's own table for an H200 names. F.linear and the best of our tables are
    measured too, and the two projections that read a slice of a wider tensor.
    """
    wanted = named_shapes(shapes, preset)
    _need_gpu()
    from k3cupy.bench import linear

    around = producer, consumer
    entries = linear.run(wanted, tokens or linear.TOKENS, around)
    _show(linear.as_document(_measured(entries), commit, around), path)


@bench.command("window")
@click.argument("kinds", nargs=-1, type=click.Choice(_WINDOWS), metavar="[WINDOW]...")
@click.option("--tokens", multiple=True, type=click.IntRange(1, 1024), help="B; 1 to 64.")
@click.option(
    "--qkv-a",
    multiple=True,
    callback=_candidates,
    metavar="KERNEL/CONFIG",
    help="mla-front in fewer launches: what may compute qkv_a, as fused_a/8/16/512/4/4/8/1/1/2; "
    "the best of these runs. By default what the tables list, and that with fewer stages.",
)
@click.option("--plot", type=_Picture(), help="Draw where the time goes.")
@_result_options
def window_command(
    kinds: tuple[str, ...],
    tokens: tuple[int, ...],
    qkv_a: tuple[Any, ...] | None,
    plot: Path | None,
    path: Path | None,
    commit: str | None,
) -> None:
    """Windows of a layer: its kernels in order, with cold weights, and where the time goes.

    WINDOW is mla-front, kda-front, mla-back or moe-front; all by default. The products by cuBLAS,
    in the public structure, by the public plan, and ours as the table chooses; around attention
    ours in fewer launches too.
    """
    _need_matplotlib(plot)
    _need_gpu()
    from k3cupy.bench import window

    entries = window.run(kinds or _WINDOWS, tokens or window.TOKENS, qkv_a)
    document = window.as_document(_measured(entries), commit)
    _show(document, path)
    if plot is not None:
        from k3cupy.bench.plots import plot_windows

        plot_windows(document, plot)
        click.echo(f"wrote {plot}")


@bench.command("step")
@click.argument("kinds", nargs=-1, type=click.Choice(_STEPS), metavar="[STEP]...")
@click.option("--tokens", multiple=True, type=_COUNT, help="B; norm 1 to 512, else 1 to 64.")
@click.option("--heads", type=_COUNT, default=12, show_default=True)
@_result_options
def step_command(
    kinds: tuple[str, ...],
    tokens: tuple[int, ...],
    heads: int,
    path: Path | None,
    commit: str | None,
) -> None:
    """Steps in front of attention in their chains, beside what they replace.

    STEP is norm, beside a Triton kernel, or formats of query and cache, 16bit+same, fp8+fp8 or
    16bit+ds_mla, of the query front beside separate kernels; all by default.
    """
    _need_gpu()
    from k3cupy.bench import step

    entries = step.run(kinds or _STEPS, tokens or None, heads)
    _show(step.as_document(_measured(entries), commit), path)


@bench.command("host")
@_result_options
def host_command(path: Path | None, commit: str | None) -> None:
    """The host's time of a call, beside C++ operators that are compiled here.

    Decode epilogue, fused-A GEMM and low-latency linear, with a new output, a given one, and
    prepared; and a layer beside nn.Linear, with x of two and three dimensions, few rows and many,
    in grad mode and outside.
    """
    _need_gpu()
    from k3cupy.bench import host

    entries, why_not = host.run()
    _show(host.as_document(entries, commit, why_not), path)


@bench.command("start")
@click.option("--model", default=MODELS[0], show_default=True, help="Whose kernels.")
@click.option("--tp", type=int, default=8, show_default=True, help="Tensor parallelism.")
@_result_options
def start_command(model: str, tp: int, path: Path | None, commit: str | None) -> None:
    """The start of a server's kernels, in fresh processes: cold, warm, of a bundle, 8 at once."""
    of_degree(model, tp)
    _need_gpu()
    from k3cupy.bench import start

    _show(start.as_document(_measured(start.run(model, tp)), commit), path)


@bench.command("plot")
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=_Picture())
@click.option("--kind", "kinds", multiple=True, help="Only these, as a window; all by default.")
@click.option("--tokens", multiple=True, type=_COUNT, help="Only these; all by default.")
def plot_command(
    result: Path, picture: Path, kinds: tuple[str, ...], tokens: tuple[int, ...]
) -> None:
    """Draw RESULT, a file of a benchmark, as PICTURE; no GPU is needed.

    Windows stacked; decode against its floor and peers; speed-up over shapes and M; bandwidth of
    prefill. The ending of PICTURE names the format: .png, .svg or .pdf.
    """
    _need_matplotlib(picture, "bench plot")
    from k3cupy.bench.plots import PLOTS

    try:
        document = json.loads(result.read_text(encoding="utf-8"))
        draw = PLOTS[document["benchmark"]]
        entries = _asked_for(document["entries"], kinds, tokens)
        draw({**document, "entries": entries}, picture)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        message = f"RESULT: expected results of {', '.join(PLOTS)}, got {result}, which is not one"
        raise click.ClickException(f"{message} ({type(error).__name__}: {error})") from error
    click.echo(f"wrote {picture}")


def _asked_for(entries: list[Any], kinds: tuple[str, ...], tokens: tuple[int, ...]) -> list[Any]:
    """Return the entries of these kinds and numbers of tokens, where those are named."""
    for option, wanted in (("kind", kinds), ("tokens", tokens)):
        known = dict.fromkeys(str(entry.get(option)) for entry in entries)
        entries = [entry for entry in entries if not wanted or entry.get(option) in wanted]
        if wanted and not entries:
            told = f"--{option}: expected some of {', '.join(known)}"
            raise click.ClickException(f"{told}, got {', '.join(map(str, wanted))}")
    return entries


@bench.command("apply")
@click.argument(
    "results",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--tables", type=OutFile(is_folder=True), help="Write shipped tables there.")
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, writable=True, path_type=Path),
    help="Renew a docs page.",
)
def apply_command(results: tuple[Path, ...], tables: Path | None, page: Path | None) -> None:
    """Make the shipped tables of exports of the tuner, or the docs' figures of results.

    Tables are the mean of several files of `tune --export`, a file a GPU and family of kernels;
    --tables names the folder of all GPUs. A page shows the last of several result files, its table
    or what is digested of it, as the page's markers say.
    """
    from k3cupy.bench import digests, forms, report
    from k3cupy.bench import tables as shipped

    if (tables is None) == (page is None):
        raise click.UsageError("say --tables with files of `tune --export`, or --page with results")
    if tables is not None:
        for path in shipped.write_means(results, tables):
            click.echo(f"wrote {path}")
    if page is not None:
        try:
            chosen = report.with_shipped_choice(json.loads(results[-1].read_text("utf-8")))
            marker = forms.form_of(chosen).marker
            parts = {marker: report.markdown(chosen), **digests.digests_of(chosen)}
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            told = f"{results[-1]}, which is not one ({type(error).__name__}: {error})"
            reject("results", "a file made by `python -m k3cupy bench --json`", told)
        there = [name for name in parts if report.has_markers(page, name)]
        for name in there or [marker]:
            report.insert_markdown(page, parts[name], name)
        click.echo(f"wrote {', '.join(there)} of {page}")
