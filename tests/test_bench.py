"""The benchmark's arithmetic and files, without a GPU; one small run with one."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_helpers import ROOT, Small, document, on_no_gpu, timed_as
from click.testing import CliRunner
from cuda_signatures import signatures

from k3cupy import projections
from k3cupy.bench import forms, host, report
from k3cupy.choose.gemm import TOKEN_CLASSES
from k3cupy.choose.mla import choose
from k3cupy.choose.table import (
    MLA_DECODE,
    MLA_PREFILL,
    Entry,
    config_of,
    measured,
    parts_of,
    table_text,
)
from k3cupy.cli import main
from k3cupy.kernels import mla_decode, mla_prefill
from k3cupy.kernels.mla_prefill import INSERTS, OPS, MlaPrefillConfig
from k3cupy.runtime import launch, sources
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.timing import environment
from k3cupy.timing.decode_step import DecodeStep
from k3cupy.timing.prefill_step import PrefillStep, bytes_moved, launches_of, sets_of
from k3cupy.tuning.targets import TOKENS


def candidate(split: int, threads: int, chunks: int, us: float) -> dict[str, Any]:
    return {"split": split, "block_size": threads, "chunks_per_thread": chunks, "us": us}


def entry(times: dict[str, float], tokens: int = 4, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "16bit+same",
        "tokens": tokens,
        "heads": 12,
        "scenario": "chain",
        "pdl": True,
        "chain_us": 4.0,
        "empty_us": 0.5,
        "torch_us": 6.0,
        "public_us": {"1": 1.5, "3": 1.2},
        "dispatched": {"split": 0, "block_size": 288, "chunks_per_thread": 1},
        "candidates": [
            candidate(*map(int, name.split("/")), us)  # type: ignore[arg-type]
            for name, us in times.items()
        ],
        **changes,
    }


TIMES = {"0/288/1": 1.0, "1/256/3": 1.1, "3/256/1": 1.25}


def test_summary_names_the_figures_that_decide() -> None:
    s = forms.decode_summary(entry({"0/288/1": 1.0, "1/256/3": 0.8, "3/256/1": 1.25}))
    assert (s["best"], s["best_us"], s["dispatched_us"]) == ("1/256/3", 0.8, 1.0)
    assert s["dispatched_over_best"] == pytest.approx(1.25)
    assert s["public_us"] == 1.2
    assert s["dispatched_over_sglang"] is None
    assert s["dispatched_over_public"] == pytest.approx(1.0 / 1.2)
    assert s["dispatched_over_split"] == pytest.approx(1.25)
    assert s["over_empty_us"] == pytest.approx(0.5)


def test_summary_without_a_comparison_kernel() -> None:
    assert forms.decode_summary(entry(TIMES, public_us={}))["dispatched_over_public"] is None
    assert forms.decode_summary(entry(TIMES, sglang_us=0.8))["dispatched_over_sglang"] == 1.25


PREFILL = {
    "kind": "fused_mla_kv_concat",
    "tokens": 4096,
    "heads": 12,
    "rope": False,
    "bytes": 32_000_000,
    "copy_us": 8.0,
    "row_copy_us": 10.0,
    "torch_us": 60.0,
    "dispatched": {"tasks_per_block": 8, "heads_per_task": 1},
    "candidates": [
        {"tasks_per_block": 8, "heads_per_task": 1, "us": 10.0},
        {"tasks_per_block": 8, "heads_per_task": 4, "us": 8.0},
    ],
}


def prefill_document(**changes: Any) -> dict[str, Any]:
    return {**document({**PREFILL, **changes}), "benchmark": "prefill"}


def test_prefill_summary_names_the_bars() -> None:
    s = forms.prefill_summary(PREFILL)
    assert (s["best"], s["best_us"], s["dispatched"], s["dispatched_us"]) == ("8/4", 8, "8/1", 10)
    assert s["gigabytes_a_second"] == pytest.approx(3200)
    assert s["of_copy_bandwidth"] == pytest.approx(0.8)
    assert (s["over_row_copy"], s["over_torch"], s["over_public"]) == (1.0, 6.0, None)
    assert forms.prefill_summary({**PREFILL, "public_us": 12.5})["over_public"] == 0.8


def test_prefill_results_make_a_page() -> None:
    line = "| kv_concat | 4096 | 12 | 32.00 | 8.00 | 10.00 | - | 60.00 | 8.00 (8/4) | 10.00 (8/1) |"
    assert line in report.markdown(prefill_document())
    report.print_table(prefill_document())


def test_the_prefill_page_shows_the_choice_of_the_shipped_table() -> None:
    every = [{**asdict(config), "us": 9.0} for config in mla_prefill.CANDIDATES]
    with_all = prefill_document(candidates=every)
    (renewed,) = report.with_shipped_choice(with_all)["entries"]
    chosen = MlaPrefillConfig(**renewed["dispatched"])
    device = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 0)
    variant = mla_prefill.Variant("fused_mla_kv_concat")
    assert chosen == choose("mla_prefill", variant, 4096, 12, device).config


def test_bytes_are_counted_once() -> None:
    latent, slot = 2 * 576, 8
    per_head, k_pe = 2 * (128 + 192), 2 * 64
    key = "fused_mla_key_concat_kv_cache_insert"
    assert bytes_moved("fused_mla_kv_concat", 10, 12) == 10 * (12 * per_head + k_pe)
    plain = 10 * (12 * per_head + 2 * latent + slot)
    assert bytes_moved(key, 10, 12) == plain
    assert bytes_moved(key, 10, 12, rope=True) == plain + 10 * (12 * 2 * 2 * 64 + 4 * 64 + 8)
    fp8 = 12 * (2 * (192 + 128 + 128) + 192 + 192 + 128) + latent + 576 + slot
    assert bytes_moved("fused_mla_qkv_quant_kv_cache_fp8_insert", 10, 12) == 10 * fp8
    context = 12 * (2 * (128 + 128) + 192 + 128) + k_pe
    assert bytes_moved("fused_mla_kv_concat_quant_fp8", 10, 12) == 10 * context


@pytest.mark.parametrize("size", [10_000, 7_000_000, 50 << 20, 5 << 30])
def test_sets_take_turns_equally(size: int) -> None:
    assert sets_of(512, size) == 1
    sets = sets_of(4096, size)
    assert sets * size >= 200 << 20
    launches = launches_of(size, sets)
    assert launches % sets == 0
    assert launches >= sets


def test_markdown_stands_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n<!-- results:begin -->\nold\n<!-- results:end -->\nrest\n")
    report.insert_markdown(page, report.markdown(document(entry(TIMES))))
    text = page.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("<!-- results:end -->\nrest\n")
    assert "old" not in text
    assert "| 16bit+same | chain | on | 4 | 0.50 | 6.00 | 1.50 / 1.20 |" in text
    assert "commit 0123456789ab" in text


def test_the_page_shows_the_choice_of_the_shipped_table() -> None:
    names = {"0/288/1", "1/256/3", "3/256/1", "1/128/3"}
    old = document(entry(dict.fromkeys(names, 1.0), tokens=16))
    assert old["entries"][0]["dispatched"]["split"] == 0
    (renewed,) = report.with_shipped_choice(old)["entries"]
    assert forms.key_of(renewed["dispatched"]) == "1/128/3"


def test_the_page_shows_no_choice_that_has_no_time() -> None:
    """Configurations are added; a run from before them keeps what ran then."""
    old = document(entry(TIMES, tokens=512))
    assert "1/128/6" not in TIMES
    assert report.with_shipped_choice(old)["entries"] == old["entries"]
    new = document(entry({**TIMES, "1/128/6": 1.0}, tokens=512))
    (renewed,) = report.with_shipped_choice(new)["entries"]
    assert forms.key_of(renewed["dispatched"]) == "1/128/6"


@pytest.mark.parametrize("kind", ["16bit+same", "fp8+fp8", "16bit+ds_mla", "16bit+fp8", "fp8+same"])
def test_a_kind_and_its_variant_are_each_others_names(kind: str) -> None:
    variant = mla_decode.Variant.of_kind(kind)
    assert variant.is_valid()
    assert variant.kind == kind


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(ValueError, match="expected the markers"):
        report.insert_markdown(page, "text")


def apply(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["bench", "apply", *map(str, arguments)])
    return done.exit_code, done.output


def test_apply_writes_the_page_of_the_last_results(tmp_path: Path) -> None:
    first, last, page = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "p.md"
    first.write_text(json.dumps(document(entry(TIMES, empty_us=7.77))))
    times = dict.fromkeys([*TIMES, "1/128/3"], 2.0)
    last.write_text(json.dumps(document(entry(times, tokens=16, empty_us=0.66))))
    page.write_text("<!-- results:begin --><!-- results:end -->")
    assert apply(first, last, "--page", page) == (0, "")
    assert "| 16bit+same | chain | on | 16 | 0.66 | 6.00 |" in page.read_text()
    assert "7.77" not in page.read_text()


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "[" * 100_000, '"x"', '{"environment": 3}'])
def test_apply_names_a_file_that_has_no_results(text: str, tmp_path: Path) -> None:
    result, page = tmp_path / "r.json", tmp_path / "p.md"
    result.write_text(text)
    page.write_text("<!-- results:begin -->as it was<!-- results:end -->")
    code, output = apply(result, "--page", page)
    assert code == 1
    assert output.startswith("Error: results: expected a file made by `python -m k3cupy bench")
    assert str(result) in output
    assert "as it was" in page.read_text()


def test_apply_takes_prefill_results(tmp_path: Path) -> None:
    result, page = tmp_path / "r.json", tmp_path / "p.md"
    every = [{**asdict(c), "us": 9.0 + i} for i, c in enumerate(mla_prefill.CANDIDATES)]
    result.write_text(json.dumps(prefill_document(candidates=every)))
    page.write_text(
        "<!-- results:begin -->decode<!-- results:end -->"
        "<!-- prefill-results:begin --><!-- prefill-results:end -->"
    )
    assert apply(result, "--page", page) == (0, "")
    assert "<!-- results:begin -->decode<!-- results:end -->" in page.read_text()
    assert "| kv_concat | 4096 |" in page.read_text()


def as_export(path: Path) -> str:
    """A run of `bench decode` as the tuner would have kept it: the rows that count for tables."""
    document = json.loads(path.read_text(encoding="utf-8"))
    e = document["environment"]
    header = {"schema": 2, "family": MLA_DECODE, "gpu": e["gpu"], "arch": "sm_90", "sources": ""}
    found = []
    for row in document["entries"]:
        if (row["scenario"], row["pdl"]) == ("chain", True):
            keys = {forms.key_of(c): c["us"] for c in row["candidates"]}
            found.append(decode_entry(row["kind"], row["tokens"], keys))
    return table_text(header | {"date": e["date"]}, found)


def decode_entry(kind: str, tokens: int, times: dict[str, float]) -> Entry:
    """Of 12 heads, as every run in benchmarks/results."""
    of_kernel = {config_of(MLA_DECODE, key): us for key, us in times.items()}
    return measured(kind, tokens * 13, {MLA_DECODE: of_kernel})


RESULTS = ROOT / "benchmarks/results"
SHIPPED = ROOT / "k3cupy/choose/tables/nvidia_h200"
of_the_repository = pytest.mark.skipif(
    not RESULTS.is_dir(), reason="the results are kept in the repository, not in the package"
)


@of_the_repository
def test_the_shipped_prefill_table_is_what_the_committed_run_gives(tmp_path: Path) -> None:
    table = tmp_path / "nvidia_h200/mla_prefill.json"
    run = RESULTS / "tune_prefill_h200_chain.json"
    assert apply(run, "--tables", tmp_path) == (0, f"wrote {table}\n")
    assert table.read_text() == (SHIPPED / table.name).read_text(encoding="utf-8")


@of_the_repository
def test_the_shipped_decode_table_is_what_the_committed_results_give(tmp_path: Path) -> None:
    """The runs of the benchmark, and of large batches two formats from the search after them."""
    runs = sorted(RESULTS.glob("decode_h200_run*.json"))
    exports = [tmp_path / run.name for run in runs]
    for path, run in zip(exports, runs, strict=True):
        path.write_text(as_export(run))
    table = tmp_path / "nvidia_h200/mla_decode.json"
    assert apply(*exports, "--tables", tmp_path) == (0, f"wrote {table}\n")
    given = parts_of(table.read_text())[1]
    for kind, rows in large_batches().items():
        given[kind] = [row for row in given[kind] if row["size"] < rows[0]["size"]] + rows
    assert given == parts_of((SHIPPED / table.name).read_text(encoding="utf-8"))[1]


def large_batches() -> dict[str, list[Any]]:
    """What the table has of the search: from 512 tokens on, the variant with all four mappings.

    What ships has the ways of few and of many tokens in two functions; the search did not time that
    from 512 tokens on.
    """
    path = RESULTS / "experiments/epilogues_search.json"
    search = json.loads(path.read_text(encoding="utf-8"))
    variant = "one function, one load of slots "
    found: dict[str, list[Any]] = {}
    for name, row in search["decode"]["large batches"].items():
        kind, tokens = name.split()
        if int(tokens) >= 512:
            keys = {key.removeprefix(variant): us for key, us in row.items() if variant in key}
            listed = decode_entry(kind, int(tokens), keys)
            dated = replace(listed, date=search["environment"]["date"])
            found.setdefault(kind, []).append(dated.fields())
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*_h200_bars*.json")))
def test_the_committed_results_can_be_shown(path: Path) -> None:
    """With the choices of today's tables: the figures of the documentation are made so."""
    committed = json.loads(path.read_text(encoding="utf-8"))
    chosen = report.with_shipped_choice(committed)
    form = forms.form_of(committed)
    shown = sum(map(form.is_for_page, committed["entries"]))
    assert report.markdown(chosen).count("\n| ") == shown + 2 > 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
@pytest.mark.parametrize("which", ["decode", "prefill", "gemm", "linear", "window", "host"])
def test_bench_without_a_gpu_is_one_clear_line(which: str) -> None:
    done = CliRunner().invoke(main, ["bench", which])
    assert done.exit_code == 1
    assert done.output.strip() == "Error: bench needs a CUDA GPU; PyTorch sees none"


OF_DECODE, OF_PREFILL, OF_GEMM = "decode_h200_bars", "prefill_h200_bars", "gemm_h200_bars"
KINDS = ("16bit+same", "fp8+fp8")
SMALL, MODEL = ("end", "none"), ("gemm", "none")
"""Neighbours: small kernels, and the model's product before it."""

ASKED = [
    # The options, the committed results that stand for the measured ones, what each run is given
    (
        "decode --kind fp8+fp8 --tokens 4 --heads 6 --chain-only",
        OF_DECODE,
        [(("fp8+fp8",), (4,), 6, [("chain", True)], MODEL)],
    ),
    (
        "decode --kind 16bit+same --kind fp8+fp8",
        OF_DECODE,
        [
            (KINDS, TOKENS[MLA_DECODE], 12, [("chain", True)], MODEL),
            (
                KINDS,
                (1, 4, 16, 64, 65, 128, 512),
                12,
                [("chain", False), ("alone", True), ("alone", False)],
                MODEL,
            ),
        ],
    ),
    (
        "prefill --op kv_concat --tokens 7 --rope",
        OF_PREFILL,
        [(["fused_mla_kv_concat"], (7,), 12, True, SMALL)],
    ),
    (
        "prefill --producer gemm --consumer early",
        OF_PREFILL,
        [(OPS, TOKENS[MLA_PREFILL], 12, False, ("gemm", "early"))],
    ),
    ("gemm --shape 2112x7168 --tokens 3", OF_GEMM, [(((2112, 7168),), (3,), SMALL)]),
    ("gemm", OF_GEMM, [(projections.preset_shapes("kimi-k3"), TOKEN_CLASSES, SMALL)]),
    (
        "linear --shape 2112x7168 --producer early",
        "linear_h200_bars",
        [(((2112, 7168),), tuple(range(1, 17)), ("early", "none"))],
    ),
    (
        "gemm --preset glm-5.2",
        OF_GEMM,
        [(projections.preset_shapes("glm-5.2"), TOKEN_CLASSES, SMALL)],
    ),
    (
        "linear --preset deepseek-v3-tp8",
        "linear_h200_bars",
        [(projections.preset_shapes("deepseek-v3-tp8"), tuple(range(1, 17)), SMALL)],
    ),
]


@pytest.mark.parametrize(("options", "results", "wanted"), ASKED, ids=[o for o, *_ in ASKED])
def test_bench_measures_what_is_asked_for(
    options: str, results: str, wanted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's part is left out; the table is shown and the file written, with the commit."""
    name, *words = options.split()
    module = importlib.import_module(f"k3cupy.bench.{name}")
    measured_there = json.loads((ROOT / f"benchmarks/results/{results}.json").read_text("utf-8"))
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "run", lambda *args: asked.append(args) or ["an entry"])
    monkeypatch.setattr(
        module,
        "as_document",
        lambda entries, commit, *_: {**measured_there, "commit": f"{commit} of {len(entries)}"},
    )
    path = tmp_path / "folder/found.json"
    done = CliRunner().invoke(main, ["bench", name, *words, "--json", str(path), "--commit", "abc"])
    assert done.exit_code == 0, done.output
    assert asked == wanted
    found = json.loads(path.read_text("utf-8"))
    assert found == {**measured_there, "commit": f"abc of {len(wanted)}"}
    assert done.output.endswith(f"wrote {path}\n")
    assert len(done.output.splitlines()) > 5, "the table"


HOST = [
    host.Entry("decode", "new output", "C++ operator", 12.0, 9.0),
    host.Entry("layer", "3-D", "nn.Linear", 17.0, 17.5),
]


@pytest.mark.parametrize("why_not", ["", "there is no C++ compiler (g++)"])
def test_bench_host(why_not: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler and without, which it says; the rest is there all the same."""
    entries = [replace(e, beside_us=None) if why_not and e.kind != "layer" else e for e in HOST]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(environment, "describe", lambda *_: document()["environment"])
    monkeypatch.setattr(host, "run", lambda: (entries, why_not))
    path = tmp_path / "host.json"
    done = CliRunner().invoke(main, ["bench", "host", "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text("utf-8"))
    rows = [forms.form_of(found).cells(entry) for entry in found["entries"]]
    ours = ["-", "-", "-"] if why_not else ["12.00", "0.75", "-3.00"]
    assert rows[0] == ["decode", "new output", "9.00", "C++ operator", *ours]
    assert rows[1] == ["layer", "3-D", "17.50", "nn.Linear", "17.00", "1.03", "+0.50"]
    assert (why_not in report.markdown(found)) and (why_not in done.output)


def test_bench_host_says_why_there_is_nothing_to_compare_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(launch, "driver_launch", lambda: None)
    assert host.operators() == (None, "the driver's launch was not found by its name")
    monkeypatch.setattr(launch, "driver_launch", lambda: print)
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    assert host.operators() == (None, "there is no C++ compiler (no-such-compiler)")
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "python")

    def load(**options: Any) -> None:
        (source,) = options["sources"]
        assert Path(source).is_file()
        raise RuntimeError("Ninja is required\nto load C++ extensions")

    monkeypatch.setattr(cpp_extension, "load", load)
    assert host.operators() == (None, "they could not be built: Ninja is required")


@pytest.mark.gpu
def test_a_small_host_run_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ operators are built where there is a compiler, and give the bits of ours."""
    monkeypatch.setattr(host, "_CALLS", 5)
    monkeypatch.setattr(host, "_BATCHES", 1)
    entries, why_not = host.run()
    assert {entry.kind for entry in entries} == {
        *("decode", "fused_a_gemm", "low_latency_linear", "layer")
    }
    assert all(e.beside_us for e in entries if not why_not or e.kind in ("layer", "linear"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("window mla-side", "'mla-side' is not one of 'mla-front', 'kda-front'"),
        ("decode --kind fp4", "'fp4' is none of 16bit+same"),
        ("prefill --op kv", "'kv' is none of key_concat_kv_cache_insert"),
    ],
)
def test_bench_of_what_does_not_exist(
    options: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done = CliRunner().invoke(main, ["bench", *options.split()], terminal_width=200)
    assert done.exit_code == 2
    assert told in done.output


def test_bench_plots_the_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from k3cupy.bench import gemm

    results = json.loads((ROOT / f"benchmarks/results/{OF_GEMM}.json").read_text("utf-8"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gemm, "run", lambda *_: [])
    few = {**results, "entries": results["entries"][:2]}
    monkeypatch.setattr(gemm, "as_document", lambda *_: few)
    path = tmp_path / "plot.png"
    done = CliRunner().invoke(main, ["bench", "gemm", "--plot", str(path)])
    assert done.exit_code == 0, done.output
    assert path.read_bytes()[:4] == b"\x89PNG"


WINDOW = {
    "kind": "mla-front",
    "tokens": 4,
    "bytes": 38_900_000,
    "floor_us": 10.5,
    "added_us": {
        column: {"consumer": 0.75, "qkv_a 2112x7168": us, "q_b 2304x1536": 4.0}
        for column, us in (("cublas", 12.0), ("public", 9.0), ("plan", 9.25), ("ours", 8.25))
    },
    "ran": {"ours": {"qkv_a 2112x7168": "skinny 4/2", "q_b 2304x1536": "fused_a 8/48"}},
}


def window_document() -> dict[str, Any]:
    return {**document(WINDOW, {**WINDOW, "tokens": 16}), "benchmark": "window"}


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ("", (("mla-front", "kda-front", "mla-back", "moe-front"), (1, 2, 4, 8, 16, 64))),
        ("moe-front mla-back --tokens 4", (("moe-front", "mla-back"), (4,))),
    ],
)
def test_bench_measures_and_draws_the_windows_asked_for(
    options: str, asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from k3cupy.bench import window

    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(window, "run", lambda *args: given.append(args) or [])
    monkeypatch.setattr(window, "as_document", lambda *_: window_document())
    result, picture = tmp_path / "w.json", tmp_path / "folder/w.png"
    words = [*options.split(), "--json", str(result), "--plot", str(picture)]
    done = CliRunner().invoke(main, ["bench", "window", *words])
    assert done.exit_code == 0, done.output
    assert given == [asked]
    assert json.loads(result.read_text()) == window_document()
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_window_stands_on_the_page_with_its_ratios() -> None:
    ratios = "0.776 | 0.945 | 0.929 | 1.24"
    ran = "qkv_a: skinny 4/2, q_b: fused_a 8/48"
    line = f"| mla-front | 4 | 38.9 | 10.50 | 16.75 | 13.75 | 14.00 | 13.00 | {ratios} | {ran} |"
    assert line in report.markdown(window_document())
    report.print_table(window_document())


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", ["chain", "alone"])
def test_a_small_run_on_the_gpu(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.bench import decode

    monkeypatch.setattr(decode, "LAUNCHES", 20)
    some = [config for config in mla_decode.CANDIDATES if config.block_size == 256]
    found = decode.run_entry("fp8+fp8", 4, 12, scenario, True, some)
    times = [*(c["us"] for c in found.candidates), *found.public_us.values(), found.torch_us]
    times += [found.sglang_us or 0.0]
    assert len(found.candidates) == len(some) and len(found.public_us) == 2
    assert all(0 < time < 1000 for time in times)


@pytest.mark.gpu
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.bench import decode

    monkeypatch.setattr(DecodeStep, "run", lambda step, config, pdl: None)
    with pytest.raises(RuntimeError, match="mqa_q differs from the reference, not timed"):
        decode.run_entry("16bit+same", 4, 12, "chain", True, mla_decode.CANDIDATES[:1])


@pytest.mark.parametrize("command", ["warmup", "tune", "bench gemm", "bench linear"])
@pytest.mark.parametrize("shape", ["2112", "2112x", "ax7168"])
def test_a_shape_that_is_none_is_refused(command: str, shape: str) -> None:
    done = CliRunner().invoke(main, [*command.split(), "--shape", shape])
    assert done.exit_code == 2
    assert f"{shape!r} is no shape; write N x K as 2112x7168" in done.output


def test_a_shape_that_python_does_not_read_is_refused() -> None:
    done = CliRunner().invoke(main, ["warmup", "--shape", f"{'9' * 5000}x64"])
    assert done.exit_code == 2
    assert "is no shape; write N x K as 2112x7168" in done.output
    assert len(done.output) < 500


@pytest.mark.gpu
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_a_small_prefill_run_on_the_gpu(op: str, rope: bool) -> None:
    from k3cupy.bench import prefill

    if rope and op not in INSERTS:
        pytest.skip("context is turned already")
    some = mla_prefill.CANDIDATES[:2]
    found = prefill.run_entry(op, 16, 12, rope, some)
    times = [*(c["us"] for c in found.candidates), found.copy_us, found.row_copy_us]
    assert (found.public_us is None) == rope
    times += [] if rope else [found.public_us, found.alone_us["public"]]
    assert all(0 < time < 1000 for time in (*times, found.torch_us))


@pytest.mark.gpu
def test_a_wrong_prefill_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.bench import prefill

    monkeypatch.setattr(PrefillStep, "run", lambda step, config: None)
    with pytest.raises(RuntimeError, match="differs from the reference, not timed"):
        prefill.run_entry("fused_mla_kv_concat", 4, 12, False, mla_prefill.CANDIDATES[:1])


# What a benchmark makes of the times, on a GPU that is none


def in_the_chain(names: list[str]) -> float:
    """3 us for a producer and a consumer; alone nothing but what is between them."""
    between = [name for name in names if "read_all" not in name and "write_rows" not in name]
    return 3.0 * (len(between) < len(names)) + 0.5 * len(between) + 2.0


@pytest.mark.parametrize("scenario", ["chain", "alone"])
def test_the_decode_epilogue_is_what_it_adds_and_alone_beside_it(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3cupy.bench import decode

    small = on_no_gpu(monkeypatch)
    timed_as(monkeypatch, small, in_the_chain)
    monkeypatch.setattr(decode, "DecodeStep", functools.partial(DecodeStep, device="cpu"))
    some = mla_decode.CANDIDATES[:2]
    chosen = SimpleNamespace(config=some[1])
    monkeypatch.setattr(decode.k3cupy, "explain_mla_decode", lambda **_: chosen)
    found = decode.run_entry("16bit+ds_mla", 4, 2, scenario, True, some, ("early", "end"))
    base = 5.0 if scenario == "chain" else 0.0
    assert found.chain_us == base
    assert found.alone_us == {"ours": 2.0}
    assert found.empty_us == (0.5 if base else 2.5)
    assert [c["us"] for c in found.candidates] == [0.0 if base else 2.0] * 2
    assert found.dispatched == asdict(some[1])
    triggers = {each.name.partition("Trigger::")[2] for each in small}
    assert triggers == ({"", "kEarly>", "kEnd>"} if base else {""})


def test_a_prefill_epilogue_is_what_it_adds_and_alone_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from k3cupy.bench import prefill

    class Copies:
        def __init__(self, size: int) -> None:
            assert size > 0

        def device_to_device(self) -> None:
            small.append(Small("copy", 1, True, []))

        def one_warp_a_row(self) -> None:
            small.extend([Small("copy", 1, True, [])] * 2)

    small = on_no_gpu(monkeypatch)
    timed_as(monkeypatch, small, in_the_chain)
    monkeypatch.setattr(prefill, "PrefillStep", functools.partial(PrefillStep, device="cpu"))
    monkeypatch.setattr(prefill, "Copies", Copies)
    some = mla_prefill.CANDIDATES[:2]
    chosen = SimpleNamespace(config=some[1])
    monkeypatch.setattr(prefill.k3cupy, "explain_mla_prefill", lambda *_, **__: chosen)
    monkeypatch.setattr(prefill.graphs, "in_turns", lambda run, of: lambda: run(of[0]))
    monkeypatch.setattr(PrefillStep, "run", lambda *_: None)
    monkeypatch.setattr(PrefillStep, "check", lambda *_: None)
    found = prefill.run_entry("fused_mla_kv_concat", 5, 2, False, some)
    assert (found.copy_us, found.row_copy_us, found.torch_us) == (0.5, 1.0, 0.0)
    assert [c["us"] for c in found.candidates] == [0.0, 0.0]
    assert found.alone_us == {"ours": 2.0, "warp a row": 3.0, "public": 2.5}
    assert found.public_us == 0.5


def matches_of(arguments: Sequence[Any], source: str, kernel: str) -> list[str]:
    """What of a launch does not fit the parameters of a comparison kernel."""
    text = (sources.shipped() / "bench" / source).read_text(encoding="utf-8")
    parameters = signatures(text)[kernel].parameters
    assert len(arguments) == len(parameters)
    return [
        each.name
        for value, each in zip(arguments, parameters, strict=True)
        if (each.ctype == "unsigned int") != isinstance(value, np.uint32)
        or ("*" in each.ctype and 0 < int(value) < 1 << 20)
        or ("stride" in each.name and int(value) > 1 << 20)
    ]


@pytest.mark.parametrize("op", OPS)
def test_the_public_prefill_kernel_gets_what_it_takes(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3cupy.bench import prefill

    small = on_no_gpu(monkeypatch)
    step = PrefillStep(op, 5, 2, device="cpu")
    prefill.public_structure(step)()
    (launched,) = small
    assert matches_of(launched.arguments, "public_prefill.cu", "public_prefill") == []
    rows = {mla_prefill.QKV_QUANT: 3, mla_prefill.KV_CONCAT_QUANT: 2}.get(op, 1)
    assert launched.grid == -(-5 * (2 * rows + (op in INSERTS)) // 8)
    given = {int(value) for value in launched.arguments}
    unread = {"q"} if op != mla_prefill.QKV_QUANT else set()
    read = [t for name, t in step.arguments.items() if name not in unread]
    assert {t.data_ptr() for t in (*read, *step.outs)} <= given


@pytest.mark.parametrize(("tokens", "warps"), [(59, 4), (60, 8)])
def test_sglangs_kernel_gets_what_it_takes(
    tokens: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3cupy.bench import public

    small = on_no_gpu(monkeypatch)
    step = DecodeStep("fp8+fp8", tokens, 12, "cpu", scales=(1.0, 1.0))
    public.sglang_epilogue(step.inputs, step.out, step.kv_cache)()
    (launched,) = small
    assert launched.name == f"k3cupy::sglang_structure<__nv_bfloat16, true, {warps}>"
    assert launched.grid == -(-tokens * 13 // warps)
    assert matches_of(launched.arguments, "sglang_structure.cu", "sglang_structure") == []
