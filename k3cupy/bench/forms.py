"""What the benchmarks' entries look like in tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from k3cupy.choose.mla import choose
from k3cupy.choose.table import MLA_DECODE, MLA_PREFILL
from k3cupy.kernels import mla_decode, mla_prefill
from k3cupy.runtime.devices import DeviceInfo

Entry = Mapping[str, Any]


class Column(NamedTuple):
    """A column of a benchmark's table.

    Attributes:
        name: its header.
        cell: its text, from an entry and its summary.
        is_words: written from the left; numbers are not.
    """

    name: str
    cell: Callable[[Entry, Entry], str]
    is_words: bool = False


def _measured(field: str, form: str = ".2f", name: str | None = None) -> Column:
    """Return the column of a field of an entry, under its own name without the unit."""
    return Column(name or field.removesuffix("_us"), lambda e, _: format(e[field], form))


def _derived(name: str, field: str, form: str = ".2f") -> Column:
    """Return the column of a figure of a summary."""
    return Column(name, lambda _, s: format(s[field], form))


def _alone(*names: str) -> Column:
    """Return the column of times after themselves; runs of before the chain have none beside it."""

    def cell(entry: Entry, _: Entry) -> str:
        alone = entry.get("alone_us", {})
        return " / ".join(_us(alone.get(name)) for name in names) if alone else "-"

    return Column(f"alone: {' / '.join(names)}", cell)


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:.2f}"


def _slashed(times: Iterable[float]) -> str:
    return " / ".join(f"{us:.2f}" for us in times)


def _configured(which: str) -> Column:
    """Return the column of the best or the dispatched configuration with its time."""
    return Column(which, lambda _, s: f"{s[f'{which}_us']:.2f} ({s[which]})")


@dataclass(frozen=True)
class Form:
    """How one benchmark's entries are shown and used.

    Attributes:
        title: of its table.
        marker: names the place of its results on a documentation page.
        summary: the figures of an entry that decide.
        columns: of its table.
        is_for_page: whether the docs show an entry.
        choice: the configuration that ships for an entry on a GPU; None where entries keep theirs.
        unit: of its times.
    """

    title: str
    marker: str
    summary: Callable[[Entry], Entry]
    columns: tuple[Column, ...]
    is_for_page: Callable[[Entry], bool] = lambda entry: True
    choice: Callable[[Entry, DeviceInfo], Any] | None = None
    unit: str = "Microseconds a launch"

    def cells(self, entry: Entry) -> list[str]:
        """Return an entry's row."""
        summary = self.summary(entry)
        return [column.cell(entry, summary) for column in self.columns]


def form_of(document: Mapping[str, Any]) -> Form:
    """Return the form of a document's entries; the oldest documents do not name it."""
    return FORMS[document.get("benchmark", "decode")]


def key_of(config: Mapping[str, Any]) -> str:
    """Return a configuration, or a candidate with its time, as ``8/4`` or ``0/288/1``."""
    return "/".join(str(value) for name, value in config.items() if name != "us")


def fastest(entry: Entry) -> dict[str, Any]:
    """Return the best and the dispatched configuration with their times."""
    times = {key_of(candidate): candidate["us"] for candidate in entry["candidates"]}
    best = min(times, key=lambda name: times[name])
    dispatched = key_of(entry["dispatched"])
    return {
        "best": best,
        "best_us": times[best],
        "dispatched": dispatched,
        "dispatched_us": times[dispatched],
        "dispatched_over_best": times[dispatched] / times[best],
    }


# --- The decode epilogue -------------------------------------------------------------------------


def decode_summary(entry: Entry) -> dict[str, Any]:
    """Return the figures of an entry that decide: best, dispatched, and what they compare with.

    ``split1_us`` and ``split3_us`` are our kernel with one or three warps a row in blocks of 256
    threads; ``public_us`` is the better of the two comparison kernels, or None.
    """
    times = {key_of(candidate): candidate["us"] for candidate in entry["candidates"]}
    found = fastest(entry)
    dispatched_us = found["dispatched_us"]
    public = min(entry["public_us"].values(), default=None)
    sglang = entry.get("sglang_us")
    return {
        **found,
        "split1_us": times["1/256/3"],
        "split3_us": times["3/256/1"],
        "public_us": public,
        "dispatched_over_public": None if public is None else dispatched_us / public,
        "dispatched_over_sglang": None if sglang is None else dispatched_us / sglang,
        "dispatched_over_split": dispatched_us / min(times["1/256/3"], times["3/256/1"]),
        "over_empty_us": dispatched_us - entry["empty_us"],
    }


def _decode_choice(entry: Entry, gpu: DeviceInfo) -> Any:
    variant = mla_decode.Variant.of_kind(entry["kind"])
    return choose(MLA_DECODE, variant, entry["tokens"], entry["heads"], gpu).config


# --- The prefill and context epilogues -----------------------------------------------------------


def prefill_summary(entry: Entry) -> dict[str, Any]:
    """Return the figures of an entry that decide.

    ``of_copy_bandwidth`` is the share of the device-to-device copy's bandwidth that the dispatched
    configuration reaches, ``over_row_copy`` its time over that of one warp a row, ``over_public``
    over that of the public structure, ``over_torch`` how many times faster than PyTorch it is.
    """
    found = fastest(entry)
    dispatched_us, public = found["dispatched_us"], entry.get("public_us")
    return {
        **found,
        "gigabytes_a_second": entry["bytes"] / dispatched_us / 1e3,
        "of_copy_bandwidth": entry["copy_us"] / dispatched_us,
        "over_row_copy": dispatched_us / entry["row_copy_us"],
        "over_public": None if public is None else dispatched_us / public,
        "over_torch": entry["torch_us"] / dispatched_us,
    }


def _prefill_operation(entry: Entry, _: Entry) -> str:
    return str(entry["kind"]).removeprefix("fused_mla_") + (" (RoPE)" if entry["rope"] else "")


def _prefill_choice(entry: Entry, gpu: DeviceInfo) -> Any:
    variant = mla_prefill.Variant(entry["kind"], rope=entry["rope"])
    return choose(MLA_PREFILL, variant, entry["tokens"], entry["heads"], gpu).config


# --- The fused-A GEMM ----------------------------------------------------------------------------

PAGE_SHAPES = (
    "2112x7168",
    "2304x1536",
    "4608x1536",
    "1536x128",
    "1536x7168",
    "7168x768",
    "3584x7168",
    "7168x1536",
    "6288x7168",
)
"""The nine projections of a decode step that matter most; result files have all of them."""


def gemm_summary(entry: Entry) -> dict[str, Any]:
    """Return the figures of an entry that decide, as ratios of times."""
    found = fastest(entry)
    us = found["dispatched_us"]
    return {
        **found,
        "over_floor": us / entry["floor_us"],
        "over_linear": us / entry["linear_us"],
        "hot_over_linear": entry["hot_us"] / entry["linear_hot_us"],
        "strided_over_packed": entry["strided_us"] / us,
        "waiting_over_static": entry["waiting_us"] / us,
        "invariant_over_dispatched": entry["invariant_us"] / us,
    }


def _gemm_tile(entry: Entry, _: Entry) -> str:
    c = entry["dispatched"]
    return f"{c['tile_m']}x{c['tile_n']}x{c['tile_k']}, {c['stages']}, split {c['split_k']}"


# --- Low-latency linear --------------------------------------------------------------------------

_PAGE_TOKENS = (1, 2, 3, 4, 8, 16)


def linear_summary(entry: Entry) -> dict[str, Any]:
    """Return the figures of an entry that decide, as ratios of times.

    ``over_best`` is against the best of ``F.linear`` and the candidates measured in the same run,
    ``speed_up`` against ``F.linear``, ``over_plan`` against the public plan; runs of before it have
    none.
    """
    times = {"linear": entry["linear_us"], **entry["candidates"]}
    best = min(times, key=lambda name: times[name])
    us = entry["dispatched_us"]
    return {
        "best": best,
        "best_us": times[best],
        "over_best": us / times[best],
        "over_floor": us / entry["floor_us"],
        "speed_up": entry["linear_us"] / us,
        "over_plan": us / entry["plan_us"] if "plan_us" in entry else None,
    }


def _public_plan(entry: Entry, _: Entry) -> str:
    return f"{entry['plan_us']:.2f} ({entry['plan']})" if "plan_us" in entry else "-"


def _over_plan(_: Entry, summary: Entry) -> str:
    ratio = summary["over_plan"]
    return "-" if ratio is None else f"{ratio:.3f}{' slower' if ratio > 1 else ''}"


# --- Windows of a layer --------------------------------------------------------------------------


def window_summary(entry: Entry) -> dict[str, Any]:
    """Return the figures of an entry that decide: each column, and ours over the others."""
    us = {column: sum(added.values()) for column, added in entry["added_us"].items()}
    over = {f"over_{column}": us["ours"] / us[column] for column in us}
    fewer = us.get("fewer")
    return {
        **us,
        **over,
        "over_floor": us["ours"] / entry["floor_us"],
        "fewer": fewer,
        "fewer_over_public": None if fewer is None else fewer / us["public"],
        "fewer_over_ours": None if fewer is None else fewer / us["ours"],
    }


def _window_kernels(entry: Entry, _: Entry) -> str:
    told = []
    for column, before in (("ours", ""), ("fewer", "fewer launches: ")):
        ran = entry["ran"].get(column, {}).items()
        if ran:
            told.append(before + ", ".join(f"{name.split()[0]}: {which}" for name, which in ran))
    return "; ".join(told)


# --- Steps in front of attention -----------------------------------------------------------------


def step_summary(entry: Entry) -> dict[str, Any]:
    """Return the figures of an entry that decide: the best of what is no form of ours, and ours.

    Of the query front that is the best of the separate kernels.
    """
    times = {n: us for n, us in entry["beside_us"].items() if not n.startswith("mla_query")}
    best = min(times, key=lambda name: times[name])
    return {
        "beside": best,
        "beside_us": times[best],
        "over_beside": entry["ours_us"] / times[best],
    }


def _errors(errors: Iterable[float]) -> str:
    return " / ".join(f"{error:.2e}" for error in errors) or "-"


# --- The host's time of a call -------------------------------------------------------------------


def host_summary(entry: Entry) -> dict[str, Any]:
    """Return the figures of an entry that decide; a prepared call has the bar of 0.5."""
    ours, beside = entry["ours_us"], entry["beside_us"]
    return {
        "ratio": None if beside is None else ours / beside,
        "difference_us": None if beside is None else ours - beside,
    }


def _maybe(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


FORMS = {
    "decode": Form(
        title="MLA decode epilogue, microseconds",
        marker="results",
        summary=decode_summary,
        columns=(
            Column("formats", lambda e, _: e["kind"], is_words=True),
            Column("scenario", lambda e, _: e["scenario"], is_words=True),
            Column("PDL", lambda e, _: "on" if e["pdl"] else "off", is_words=True),
            _measured("tokens", "d", "B"),
            _measured("empty_us"),
            _measured("torch_us"),
            Column("public 1 / 3", lambda e, _: _slashed(e["public_us"].values()) or "-"),
            Column("SGLang's", lambda e, _: _us(e.get("sglang_us"))),
            Column("split 1 / 3", lambda _, s: _slashed((s["split1_us"], s["split3_us"]))),
            _configured("best"),
            _configured("dispatched"),
            _alone("ours", "public"),
        ),
        choice=_decode_choice,
    ),
    "prefill": Form(
        title="MLA prefill and context epilogues, microseconds",
        marker="prefill-results",
        summary=prefill_summary,
        columns=(
            Column("operation", _prefill_operation, is_words=True),
            _measured("tokens", "d", "T"),
            _measured("heads", "d", "H"),
            Column("MB", lambda e, _: f"{e['bytes'] / 1e6:.2f}"),
            _measured("copy_us"),
            _measured("row_copy_us", name="warp a row"),
            Column("public", lambda e, _: _us(e.get("public_us"))),
            _measured("torch_us"),
            _configured("best"),
            _configured("dispatched"),
            _derived("GB/s", "gigabytes_a_second", ".0f"),
            _derived("of copy", "of_copy_bandwidth", ".0%"),
            _derived("x warp a row", "over_row_copy"),
            _derived("torch x", "over_torch", ".1f"),
            _alone("ours", "warp a row", "public"),
        ),
        choice=_prefill_choice,
    ),
    "gemm": Form(
        title="Fused-A GEMM, cold weights, microseconds",
        marker="gemm-results",
        summary=gemm_summary,
        columns=(
            Column("N x K", lambda e, _: e["kind"], is_words=True),
            _measured("tokens", "d", "M"),
            _measured("floor_us"),
            _measured("linear_us", name="F.linear"),
            _derived("ours", "dispatched_us"),
            _derived("x floor", "over_floor"),
            _derived("x linear", "over_linear"),
            _alone("floor", "linear", "ours"),
            _derived("hot x linear", "hot_over_linear"),
            _derived("strided", "strided_over_packed"),
            _derived("waiting", "waiting_over_static"),
            _derived("invariant", "invariant_over_dispatched"),
            Column("tile, stages, split", _gemm_tile),
        ),
        is_for_page=lambda entry: entry["kind"] in PAGE_SHAPES,
    ),
    "linear": Form(
        title="Low-latency linear, cold weights, microseconds",
        marker="linear-results",
        summary=linear_summary,
        columns=(
            Column("N x K", lambda e, _: e["kind"], is_words=True),
            _measured("tokens", "d", "M"),
            _measured("floor_us"),
            _measured("linear_us", name="F.linear"),
            _measured("dispatched_us", name="ours"),
            Column("public plan", _public_plan),
            Column("x plan", _over_plan),
            _derived("speed-up", "speed_up"),
            _derived("x floor", "over_floor"),
            _alone("linear", "plan", "ours"),
            Column("x best", lambda e, s: f"{s['over_best']:.3f}" if e["candidates"] else "-"),
            Column("what ran", lambda e, _: e["dispatched"]),
        ),
        is_for_page=lambda entry: (
            entry["tokens"] in _PAGE_TOKENS
            and (entry["kind"] in PAGE_SHAPES or " of " in entry["kind"])
        ),
    ),
    "window": Form(
        title="Windows of a layer, cold weights, microseconds a layer",
        marker="window-results",
        unit="Microseconds a layer",
        summary=window_summary,
        columns=(
            Column("window", lambda e, _: e["kind"], is_words=True),
            _measured("tokens", "d", "B"),
            Column("MB", lambda e, _: f"{e['bytes'] / 1e6:.1f}"),
            _measured("floor_us"),
            _derived("cuBLAS", "cublas"),
            _derived("public structure", "public"),
            _derived("public plan", "plan"),
            _derived("ours", "ours"),
            _derived("x cuBLAS", "over_cublas", ".3f"),
            _derived("x structure", "over_public", ".3f"),
            _derived("x plan", "over_plan", ".3f"),
            _derived("x floor", "over_floor"),
            Column("fewer launches", lambda _, s: _us(s["fewer"])),
            Column("fewer x structure", lambda _, s: _maybe(s["fewer_over_public"], ".3f")),
            Column("fewer x ours", lambda _, s: _maybe(s["fewer_over_ours"], ".3f")),
            Column("what ran", _window_kernels),
        ),
    ),
    "step": Form(
        title="Steps in front of attention, microseconds added to the chain",
        marker="step-results",
        unit="Microseconds added to the chain",
        summary=step_summary,
        columns=(
            Column("step", lambda e, _: e["kind"], is_words=True),
            _measured("tokens", "d", "B"),
            _measured("heads", "d", "H"),
            _measured("chain_us"),
            _measured("floor_us"),
            _measured("ours_us", name="ours"),
            Column("best beside", lambda _, s: f"{s['beside_us']:.2f} ({s['beside']})"),
            _derived("x beside", "over_beside", ".3f"),
            Column("error, separate", lambda e, _: _errors(e["errors"].values())),
            Column("what ran", lambda e, _: e["ran"]),
        ),
    ),
    "start": Form(
        title="The start of a server's kernels",
        marker="start-results",
        unit="Seconds until all kernels are loaded; first calls in milliseconds",
        summary=lambda entry: {"first_ms": entry["decode_ms"] + entry["gemm_ms"]},
        columns=(
            Column("scenario", lambda e, _: e["kind"], is_words=True),
            _measured("processes", "d"),
            _measured("kernels", "d"),
            _measured("compiled", "d"),
            _measured("files", "d"),
            _measured("ready_s", name="ready, s"),
            _measured("chosen_s", name="chosen, s"),
            _measured("decode_ms", ".1f", "first decode, ms"),
            _measured("gemm_ms", ".1f", "first GEMM, ms"),
            _derived("both, ms", "first_ms", ".1f"),
        ),
    ),
    "host": Form(
        title="The host's time of a call, microseconds",
        marker="host-results",
        unit="The host's microseconds a call",
        summary=host_summary,
        columns=(
            Column("call", lambda e, _: e["kind"], is_words=True),
            Column("form", lambda e, _: str(e["form"]), is_words=True),
            _measured("ours_us", name="ours"),
            Column("beside", lambda e, _: str(e["beside"]), is_words=True),
            Column("its time", lambda e, _: _maybe(e["beside_us"], ".2f")),
            Column("ratio", lambda _, s: _maybe(s["ratio"], ".2f")),
            Column("difference", lambda _, s: _maybe(s["difference_us"], "+.2f")),
        ),
    ),
}
