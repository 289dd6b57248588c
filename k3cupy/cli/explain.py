"""``k3cupy explain``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from k3cupy.call.choice import Choice
from k3cupy.cli.options import (
    gpu_of,
    gpu_option,
    json_option,
    named_shapes,
    preset_option,
    shape_option,
    show_json,
    show_table,
)
from k3cupy.projections import MODELS, Shapes
from k3cupy.projections import shapes as known_shapes
from k3cupy.runtime import devices
from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.text import table_of

_FEW = 32
"""Rows, of which each gets a line with its very reason; of more those that are alike share one."""

_LINEAR, *_MLA = _OPERATIONS = (
    *("low_latency_linear", "mla_decode", "mla_prefill", "mla_norm", "mla_query", "mla_value"),
)


@click.command()
@click.option("--op", type=click.Choice(_OPERATIONS), default=_LINEAR, show_default=True)
@shape_option("Linear: N x K of a weight, as 2112x7168; all of Kimi-K3's by default.")
@preset_option("Linear: the weights of a named model.")
@click.option("--residual", is_flag=True, help="Linear: for calls that add one.")
@click.option("--kind", "kinds", multiple=True, help="MLA: formats, or an operation; all.")
@click.option("--heads", type=click.IntRange(1), help="MLA: local heads; 12 by default.")
@click.option("--tokens", multiple=True, type=click.IntRange(1), help="A number of tokens.")
@gpu_option
@json_option
def explain(
    op: str,
    shapes: Any,
    preset: str | None,
    residual: bool,
    kinds: tuple[str, ...],
    heads: int | None,
    tokens: tuple[int, ...],
    gpu: str | None,
    as_json: bool,
) -> None:
    """Which kernel and configuration calls get on a GPU that need not be here, and why."""
    if op == _LINEAR:
        if kinds or heads:
            raise click.UsageError(f"--kind and --heads are of --op {', '.join(_MLA)}")
        of = [m for m in MODELS if (preset or "").startswith(m)] or MODELS
        _explain_linear(named_shapes(shapes, preset), of, tokens, residual, gpu, as_json)
    else:
        if shapes or preset or residual:
            raise click.UsageError(f"--shape, --preset and --residual are of --op {_LINEAR}")
        _explain_mla(op, kinds, heads or 12, tokens, gpu, as_json)


def _told(choice: Choice) -> dict[str, Any]:
    """Return a choice as plain values, without what hangs on a call's tensors."""
    found = choice.to_dict()
    for name in ("name_expression", "pdl"):
        del found[name]
    return found


def _explain_linear(
    shapes: Shapes,
    models: Sequence[str],
    tokens: tuple[int, ...],
    residual: bool,
    gpu: str | None,
    as_json: bool,
) -> None:
    from k3cupy.choose.gemm import TOKENS
    from k3cupy.ops.dispatch_report import ReportRow, layer_table
    from k3cupy.ops.select_backend import choice_of

    there = gpu_of(gpu)
    names: dict[tuple[int, int], list[str]] = {}
    for model in models:
        for known in known_shapes(model):
            names.setdefault((known.n, known.k), []).append(known.name)
    rows = [
        ReportRow(choice_of(count, n, k, there, has_residual=residual), n, k, count, 0)
        for n, k in shapes
        for count in tokens or TOKENS
    ]
    if as_json:
        found = [{"n": r.n, "k": r.k, "tokens": r.num_tokens, **_told(r.choice)} for r in rows]
        show_json({"gpu": there.name, "arch": there.arch, "choices": found})
        return
    title = f"Linear layers on {there.name} ({there.arch})"
    table = layer_table(rows, names, apart=len(rows) <= _FEW, title=title)
    table.columns[-2].header = "what would run"
    show_table(table)


def _explain_mla(
    op: str,
    kinds: tuple[str, ...],
    heads: int,
    tokens: tuple[int, ...],
    gpu: str | None,
    as_json: bool,
) -> None:
    from k3cupy.choose.mla import choose
    from k3cupy.choose.table import KERNELS, MLA_QUERY
    from k3cupy.kernels import mla_query
    from k3cupy.tuning.targets import KINDS, TOKENS

    for kind in kinds:
        if kind not in KINDS[op]:
            reject("kind", " or ".join(KINDS[op]), shown(kind))
    there = gpu_of(gpu)
    devices.check_supported(there)

    def choices() -> Iterator[tuple[str, int, Any]]:
        variant: Any = KERNELS[op].Variant
        make = getattr(variant, "of_kind", variant)
        for kind in kinds or KINDS[op]:
            for count in tokens or TOKENS[op]:
                why = mla_query.why_not(count, None, there) if op == MLA_QUERY else None
                if why is not None:
                    yield kind, count, Choice(mla_query.SEPARATE, None, f"{why}: several kernels")
                else:
                    yield kind, count, choose(op, make(kind, "bfloat16"), count, heads, there)

    if as_json:
        found = [{"kind": kind, "tokens": m, **_told(choice)} for kind, m, choice in choices()]
        show_json({"gpu": there.name, "arch": there.arch, "heads": heads, "choices": found})
        return
    rows = [
        (
            kind,
            str(count),
            choice.what.removeprefix(f"{op}, "),
            f"{choice.reason} [{choice.origin}]",
        )
        for kind, count, choice in choices()
    ]
    title = f"{op} with {heads} heads on {there.name} ({there.arch})"
    show_table(table_of(("kind", " tokens", "what would run", "why"), rows, title))
