"""``python -m k3cupy bench``."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.group()
def bench() -> None:
    """Measure on this GPU; needs PyTorch."""


@bench.command("decode")
@click.option("--kind", "kinds", multiple=True, help="Query+cache formats; all by default.")
@click.option("--tokens", multiple=True, type=int, help="Batch sizes; the table's by default.")
@click.option("--heads", default=12, show_default=True)
@click.option("--chain-only", is_flag=True, help="Only the real chain with PDL.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results there.")
@click.option("--commit", default=None, help="The commit, where the sources are no git checkout.")
def decode_command(
    kinds: tuple[str, ...],
    tokens: tuple[int, ...],
    heads: int,
    chain_only: bool,
    path: Path | None,
    commit: str | None,
) -> None:
    """The MLA decode epilogue: every mapping and block size, alone and in the chain.

    PDL on and off. An empty kernel and the unfused PyTorch operations are measured in the same run.
    """
    try:
        import torch
    except ImportError as error:
        raise click.ClickException("bench needs PyTorch: pip install torch") from error
    if not torch.cuda.is_available():
        raise click.ClickException("bench needs a CUDA GPU; PyTorch sees none")
    from k3cupy.bench import decode, report

    unknown = [kind for kind in kinds if kind not in decode.KINDS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(decode.KINDS)}")
    entries = list(
        decode.run(kinds or decode.KINDS, tokens or decode.TABLE_TOKENS, heads, [("chain", True)])
    )
    if not chain_only:
        entries += decode.run(
            kinds or decode.KINDS[:2],
            tokens or (1, 4, 16, 64, 65, 128, 512),
            heads,
            [("chain", False), ("alone", True), ("alone", False)],
        )
    document = decode.as_document(entries, commit)
    report.print_table(document["entries"])
    if path is not None:
        report.write_json(path, document)
        click.echo(f"wrote {path}")


@bench.command("apply")
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--table", type=click.Path(path_type=Path), help="Write the shipped table there.")
@click.option("--page", type=click.Path(exists=True, path_type=Path), help="Renew a docs page.")
def apply_command(results: tuple[Path, ...], table: Path | None, page: Path | None) -> None:
    """Make the shipped table, or the docs' figures, from result files.

    Of several runs the table takes the mean, the page the last.
    """
    from k3cupy.bench import report

    documents = [json.loads(result.read_text(encoding="utf-8")) for result in results]
    if table is not None:
        report.write_json(table, report.shipped_table(report.averaged(documents)))
    if page is not None:
        chosen = report.with_shipped_choice(documents[-1])
        report.insert_markdown(page, report.markdown(chosen))
