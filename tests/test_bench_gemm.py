"""Benchmarks of the GEMMs, and the table that the tuner makes; small runs need a GPU."""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import ROOT, document, on_no_gpu, timed_as
from click.testing import CliRunner
from tune_helpers import FakeMeter, made_up_us, use_fake_gpu, write_export
from tune_helpers import run as tune_with

from k3cupy.bench import floor, forms, report
from k3cupy.bench.plots import PLOTS
from k3cupy.choose.gemm import candidates
from k3cupy.choose.table import FAMILIES, GEMM, entry_of, parts_of, table_text
from k3cupy.cli import main
from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.tuning.entries import LINEAR, Candidate, entry_from, times_of
from k3cupy.tuning.targets import GemmTarget, Target

# --- The fused-A GEMM ---

GEMM_GPU = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)


def gemm_entry(n: int = 2112, k: int = 7168, tokens: int = 16) -> dict[str, Any]:
    """An entry whose candidates take 8.0, 8.1, ... us in the order in which they are made."""
    configs = candidates("fused_a", n, k, tokens, GEMM_GPU)
    return {
        "kind": f"{n}x{k}",
        "n": n,
        "k": k,
        "tokens": tokens,
        "floor_us": 8.0,
        "linear_us": 16.0,
        "linear_hot_us": 10.0,
        "hot_us": 5.0,
        "strided_us": 8.4,
        "waiting_us": 12.6,
        "invariant_us": 8.82,
        "dispatched": asdict(configs[4]),
        "candidates": [{**asdict(c), "us": 8 + i / 10} for i, c in enumerate(configs)],
    }


def gemm_document(*entries: dict[str, Any]) -> dict[str, Any]:
    found = document(*entries)
    environment = {**found["environment"], "shared_memory_optin": 232_448}
    return {**found, "benchmark": "gemm", "environment": environment}


def test_gemm_summary_names_the_bars() -> None:
    s = forms.gemm_summary(gemm_entry())
    assert s["best_us"] == 8.0 and s["dispatched_us"] == pytest.approx(8.4)
    assert s["over_floor"] == pytest.approx(1.05)
    assert s["over_linear"] == pytest.approx(0.525)
    assert s["hot_over_linear"] == pytest.approx(0.5)
    assert s["strided_over_packed"] == pytest.approx(1.0)
    assert s["waiting_over_static"] == pytest.approx(1.5)
    assert s["invariant_over_dispatched"] == pytest.approx(1.05)


def test_the_gemm_page_shows_what_was_measured() -> None:
    measured = gemm_document(gemm_entry())
    assert report.with_shipped_choice(measured)["entries"] == measured["entries"]


def test_the_gemm_page_shows_the_shapes_that_matter() -> None:
    text = report.markdown(gemm_document(gemm_entry(), gemm_entry(n=3216)))
    assert "| 2112x7168 | 16 | 8.00 | 16.00 |" in text
    assert "3216x7168" not in text


def test_a_gemm_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from k3cupy.bench.plots import plot_gemm

    path = tmp_path / "folder/gemm.png"
    plot_gemm(gemm_document(gemm_entry(tokens=1), gemm_entry(tokens=64)), path)
    assert path.read_bytes()[:4] == b"\x89PNG"


RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"


@pytest.mark.parametrize("name", [str(p.relative_to(RESULTS)) for p in RESULTS.rglob("*.json")])
def test_committed_results_are_drawn(name: str, tmp_path: Path) -> None:
    """Of earlier runs too, without what was not measured then; or it is told what they are not."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "folder/picture.svg"
    done = CliRunner().invoke(main, ["bench", "plot", str(RESULTS / name), str(path)])
    can_be = json.loads((RESULTS / name).read_text(encoding="utf-8")).get("benchmark") in PLOTS
    assert done.exit_code == (not can_be), done.output
    if can_be:
        assert "NVIDIA H200" in path.read_text(encoding="utf-8")
    else:
        assert "RESULT: expected results of decode, gemm, linear" in done.output


@pytest.mark.parametrize(
    ("document", "lacks"),
    [
        ({"benchmark": "decode", "results": 3}, "KeyError: 'entries'"),
        ({"benchmark": "decode", "entries": []}, "ValueError: no entry is of the chain with PDL"),
        ({"benchmark": "gemm", "entries": [{"kind": "8x8"}]}, "KeyError: 'tokens'"),
        ({"benchmark": "gemm", "entries": [1]}, "AttributeError: 'int' object"),
        ([], "TypeError: list indices"),
    ],
)
def test_a_result_that_lacks_something_is_told(document: Any, lacks: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "some.json", tmp_path / "x.png"
    file.write_text(json.dumps(document))
    done = CliRunner().invoke(main, ["bench", "plot", str(file), str(picture)])
    assert done.exit_code == 1 and not picture.exists()
    assert f"got {file}, which is not one ({lacks}" in done.output


@pytest.mark.parametrize("name", ["x", "x.jpg", "x.txt"])
def test_a_picture_of_another_format_is_refused(name: str, tmp_path: Path) -> None:
    result = str(RESULTS / "gemm_h200_chain.json")
    for words in (["plot", result], ["gemm", "--plot"], ["window", "--plot"]):
        done = CliRunner().invoke(main, ["bench", *words, str(tmp_path / name)], terminal_width=300)
        assert done.exit_code == 2
        assert "expected a name that ends in .png, .svg, .pdf, got" in done.output
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = str(tmp_path / "x.png")
    done = CliRunner().invoke(main, ["bench", "plot", str(RESULTS / "start_h200.json"), picture])
    assert "RESULT: expected results of decode, gemm, linear, prefill, window" in done.output
    window = str(RESULTS / "window_h200_chain.json")
    done = CliRunner().invoke(main, ["bench", "plot", window, picture, "--kind", "mla"])
    assert "--kind: expected some of mla-front, kda-front" in done.output
    done = CliRunner().invoke(main, ["bench", "plot", window, picture, "--tokens", "3"])
    assert "--tokens: expected some of 1, 2, 4, 8, 16, 64, got 3" in done.output


def test_a_plot_without_matplotlib_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = str(RESULTS / "gemm_h200_chain.json")
    for words, who in ((["gemm", "--plot"], "--plot"), (["plot", result], "bench plot")):
        done = CliRunner().invoke(main, ["bench", *words, "x.png"])
        assert done.exit_code == 1
        assert done.output == f'Error: {who} needs matplotlib: pip install "k3cupy[bench]"\n'


@pytest.mark.gpu
def test_a_small_gemm_run_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.bench import gemm
    from k3cupy.timing import cold

    monkeypatch.setattr(cold, "COLD_BYTES", 4 << 20)
    (found,) = gemm.run([(1536, 128)], [4])
    times = [found.floor_us, found.linear_us, found.hot_us, found.strided_us, found.waiting_us]
    assert all(0 < us < 1000 for us in (*times, found.invariant_us, found.candidates[0]["us"]))
    assert forms.gemm_summary(asdict(found))["over_floor"] > 0


@pytest.mark.gpu
def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.bench import gemm
    from k3cupy.timing.products import Product

    monkeypatch.setattr(gemm, "body", lambda product, *_, **__: lambda _: product.out.fill_(0))
    weight = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"64 x 128, M = 4, .* is 0, not .*, not timed"):
        gemm.run_entry(Product(64, 128, 4), [weight], 1.0)


# --- Low-latency linear, and the table that the tuner makes ---


def linear_entry(kind: str = "2112x7168", tokens: int = 4, **changes: Any) -> dict[str, Any]:
    n, k = map(int, kind.split()[0].split("x"))
    return {
        "kind": kind,
        "n": n,
        "k": k,
        "tokens": tokens,
        "floor_us": 8.0,
        "linear_us": 12.0,
        "plan_us": 10.5,
        "plan": "fused_a",
        "alone_us": {"linear": 11.0, "plan": 9.0, "ours": 7.0},
        "dispatched_us": 8.4,
        "dispatched": "fused_a 8/16/512/8/8/8/1/1/4",
        "reason": "measured",
        "candidates": {"fused_a 8/16/512/8/8/8/1/1/4": 8.4, "skinny 4/128/2/1/8": 8.0},
        **changes,
    }


def test_linear_summary_names_the_bars() -> None:
    s = forms.linear_summary(linear_entry())
    assert (s["best"], s["best_us"]) == ("skinny 4/128/2/1/8", 8.0)
    assert s["over_best"] == pytest.approx(1.05)
    assert s["over_floor"] == pytest.approx(1.05)
    assert s["speed_up"] == pytest.approx(12 / 8.4)
    assert s["over_plan"] == pytest.approx(0.8)
    assert forms.linear_summary(linear_entry(candidates={}))["best"] == "linear"


def test_linear_results_make_a_page_with_means() -> None:
    from k3cupy.bench import linear

    entries = [
        linear_entry(tokens=1, linear_us=16.8),
        linear_entry("7168x768", tokens=1, linear_us=4.2, plan_us=8.0, plan="linear"),
        linear_entry("3216x7168", tokens=1),
        linear_entry("1536x128 of 6288", candidates={}),
    ]
    told = linear.remarks([linear.Entry(**entry) for entry in entries])
    mean, over, some = "Geometric mean of ", "over all M; ", "2 shapes of a decode step: "
    assert told == [
        f"{mean}the speed-up over F.linear, {some}1.000 {over}1.000 at M = 1.",
        f"{mean}ours over the public plan, {some}0.917 {over}0.917 at M = 1.",
        f"{mean}the speed-up over F.linear, all 3 shapes: 1.126 {over}1.126 at M = 1.",
        f"{mean}ours over the public plan, all 3 shapes: 0.876 {over}0.876 at M = 1.",
        "Slower than the public plan in 1 of 4: 7168x768 at M = 1 (1.050 x).",
        "Furthest from the best measured beside it: 2.000 x, 7168x768 at M = 1.",
        "A floor that a product beats is none: 1 here, "
        "7168x768 at M = 1 (4.20 us, streaming 8.00).",
    ]
    result = {
        **document(*entries),
        "benchmark": "linear",
        "remarks": told,
        "host_us": {"2112x7168": {"low_latency_linear": 9.5, "F.linear": 11.25}},
    }
    text = report.markdown(result)
    ours = "8.40 | 10.50 (fused_a) | 0.800 |"
    alone = "11.00 / 9.00 / 7.00"
    assert f"| 2112x7168 | 1 | 8.00 | 16.80 | {ours} 2.00 | 1.05 | {alone} | 1.050 | fus" in text
    assert f"| 1536x128 of 6288 | 4 | 8.00 | 12.00 | {ours} 1.43 | 1.05 | {alone} | - | fu" in text
    assert "| 8.40 | 8.00 (linear) | 1.050 slower | 0.50 |" in text
    assert "3216x7168" not in text
    assert told[0] in text and "low_latency_linear 9.5 us, F.linear 11.2 us" in text
    assert report.with_shipped_choice(result)["entries"] == entries
    report.print_table(result)


def test_a_run_of_before_the_public_plan_is_shown_without_it() -> None:
    older = linear_entry()
    for name in ("plan_us", "plan", "alone_us"):
        del older[name]
    cells = forms.FORMS["linear"].cells(older)
    names = [column.name for column in forms.FORMS["linear"].columns]
    told = dict(zip(names, cells, strict=True))
    assert told["public plan"] == told["x plan"] == told["alone: linear / plan / ours"] == "-"


def test_the_best_of_the_tables_fit_the_number_of_tokens() -> None:
    from k3cupy.bench.linear import best_of_table

    for tokens in (1, 3, 9, 16):
        found = best_of_table(GemmTarget(2112, 7168, tokens), GEMM_GPU)
        assert len(found) == 3
        for each in found:
            rows = each.config.tile_m if each.kernel == "fused_a" else each.config.num_rows
            assert rows >= tokens
    unknown = DeviceInfo(0, "Unknown GPU", (9, 0), 100, 232_448)
    assert best_of_table(GemmTarget(2112, 7168, 4), unknown) == ()


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two runs of the tuner, the second slower and with other candidates ahead."""
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path / "cache"))
    use_fake_gpu(monkeypatch)
    paths = [tmp_path / "run1.json", tmp_path / "run2.json"]
    for path, meter in zip(paths, (FakeMeter(), FakeMeter(us=slower)), strict=True):
        found = tune_with(meter, tokens=[1, 8], again=True)
        write_export(path, GEMM, found.entries)
    return paths


def slower(target: Target, candidate: Candidate, effort: object) -> float:
    crc = zlib.crc32(f"{candidate} again".encode()) % 100
    return 1.5 * made_up_us(target, candidate) * (1 + crc / 1000)


def apply(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["bench", "apply", *map(str, arguments)])
    return done.exit_code, done.output


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a table, each with the name of its problem."""
    problems = parts_of(path.read_text(encoding="utf-8"))[1]
    return [{"problem": name, **row} for name, rows in problems.items() for row in rows]


def test_exports_of_the_tuner_make_the_shipped_table(exports: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "tables/test_gpu/gemm.json"
    assert apply(*exports, "--tables", tmp_path / "tables") == (0, f"wrote {table}\n")
    told = "tune`, 2 runs: their mean where several measured the same."
    assert parts_of(table.read_text())[0]["about"].endswith(told)
    made, one, two = map(rows_of, (table, *exports))
    assert len(made) == len(one) == 4
    for row, a, b in zip(made, one, two, strict=True):
        runs = [list(_all_us(found)) for found in (a, b)]
        level = sum(map(min, runs)) / 2
        slower = [r["us"]["linear"] / min(us) for r, us in zip((a, b), runs, strict=True)]
        assert row["us"]["linear"] == pytest.approx(level * sum(slower) / 2, abs=1e-3)
        assert "preferred" not in row


def _all_us(row: dict[str, Any]) -> list[float]:
    linear, *kernels = row["us"].values()
    return [linear, *(us for found in kernels for us in found.values())]


def test_one_export_is_the_table(exports: list[Path], tmp_path: Path) -> None:
    """Of each kernel its fastest, and of each order of sums the fastest that is not far behind."""
    assert apply(exports[0], "--tables", tmp_path)[0] == 0
    (header, _), (made, _) = (parts_of(p.read_text()) for p in (exports[0], tmp_path / TABLE))
    assert made == header
    left_out = 0
    for row, all_of_it in zip(rows_of(tmp_path / TABLE), rows_of(exports[0]), strict=True):
        entry, whole = (entry_of(r["problem"], r) for r in (row, all_of_it))
        assert (entry.kernel, entry.config, entry.us) == (whole.kernel, whole.config, whole.us)
        for kernel, times in whole.times.items():
            kept, ranked = entry.times[kernel], sorted(times, key=times.__getitem__)
            assert kept == {config: times[config] for config in kept}
            assert set(ranked[:6]) <= set(kept)
            left_out += len(times) - len(kept)
            near = [c for c in ranked if kernel != "linear" and times[c] <= 1.6 * times[ranked[0]]]
            assert {c.order for c in near} <= {c.order for c in kept if c is not None}
    assert left_out > 10


TABLE = "test_gpu/gemm.json"


def later_run(path: Path, tokens: int, faster: float) -> None:
    """Make a run one of later kernels, of some of its products, with ours so much faster."""
    header, _ = parts_of(path.read_text())
    rows = rows_of(path)
    kept = [entry_of(row["problem"], row) for row in rows if row["size"] == tokens]
    assert 0 < len(kept) < len(rows)
    entries = []
    for entry in kept:
        times = {c: us if c == LINEAR else us / faster for c, us in times_of(entry).items()}
        entries.append(entry_from(*entry.key, times))
    path.write_text(table_text({**header, "sources": "later", "date": "2027-01-01"}, entries))


@pytest.mark.parametrize("faster", [2.0, 0.25])
def test_runs_of_later_kernels(exports: list[Path], tmp_path: Path, faster: float) -> None:
    """They replace what they measured, unless that was clearly faster; what stays is dated."""
    later_run(exports[1], 8, faster)
    assert apply(*exports, "--tables", tmp_path)[0] == 0
    table = tmp_path / "test_gpu/gemm.json"
    header, before = parts_of(table.read_text())[0], parts_of(exports[0].read_text())[0]
    assert header["about"].endswith(", 2 runs of 2 versions of the kernels.")
    assert (header["sources"], header["date"]) == ("later", "2027-01-01")
    made, first, second = map(rows_of, (table, *exports))
    assert len(made) == len(first)
    after = {row["problem"]: row for row in second}
    for row, earlier in zip(made, first, strict=True):
        is_later = row["size"] == 8 and faster > 1
        want = after[row["problem"]] if is_later else earlier
        (entry, whole) = (entry_of(r["problem"], r) for r in (row, want))
        for kernel, times in entry.times.items():
            rest = {config: whole.times[kernel][config] for config in times}
            assert times == pytest.approx(rest, abs=1e-4)
        stamp = (None, None) if is_later else (before["date"], before["sources"])
        assert (row.get("date"), row.get("sources")) == stamp


def test_every_family_gets_its_table(exports: list[Path], tmp_path: Path) -> None:
    """Without the framework's linear beside it, later kernels always replace the earlier."""
    options: dict[str, Any] = {"op": "mla_decode", "kinds": ["fp8+fp8"], "again": True}
    paths = [tmp_path / "decode1.json", tmp_path / "decode2.json"]
    for path, slower_by in zip(paths, (1, 4), strict=True):
        meter = FakeMeter(us=lambda t, c, effort, f=slower_by: f * made_up_us(t, c))
        found = tune_with(meter, **options)
        write_export(path, "mla_decode", found.entries)
    paths[1].write_text(paths[1].read_text().replace('"sources": "', '"sources": "later'))
    code, output = apply(*exports, *paths, "--tables", tmp_path)
    names = ("gemm", "mla_decode")
    assert code == 0
    assert output.split() == [w for n in names for w in ("wrote", f"{tmp_path}/test_gpu/{n}.json")]
    made, second = rows_of(tmp_path / "test_gpu/mla_decode.json"), rows_of(paths[1])
    assert made == second


def test_what_makes_no_table_is_one_clear_line(exports: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("")
    for options in ([], ["--tables", tmp_path, "--page", page]):
        code, output = apply(exports[0], *options)
        assert code == 2 and "say --tables with files of `tune --export`, or --page" in output
    exports[1].write_text(exports[1].read_text().replace("Test GPU", "NVIDIA B200"))
    code, output = apply(*exports, "--tables", tmp_path)
    assert (code, output) == (1, "Error: expected runs of one gpu, got NVIDIA B200, Test GPU\n")
    alone = exports[0].read_text().replace("us added to the chain, cold weights", "us a launch")
    exports[1].write_text(alone)
    code, output = apply(*exports, "--tables", tmp_path)
    told = "expected runs measured in one way, got us a launch and us added to the chain, cold"
    assert code == 1 and output.startswith(f"Error: {told}")
    gemm = tmp_path / "gemm.json"
    gemm.write_text(json.dumps(gemm_document(gemm_entry())))
    code, output = apply(gemm, "--tables", tmp_path)
    assert code == 1 and output.startswith("Error: import: expected a file made by")
    assert not list(tmp_path.glob("*/*.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shipped_table_is_what_the_committed_runs_give(family: str, tmp_path: Path) -> None:
    runs = sorted((ROOT / "benchmarks/results").glob(f"tune_{family}_h200_*.json"))
    if not runs:
        pytest.skip("there are no runs of the tuner beside this package")
    assert apply(*runs, "--tables", tmp_path)[0] == 0
    made = tmp_path / f"nvidia_h200/{family}.json"
    shipped = ROOT / f"k3cupy/choose/tables/nvidia_h200/{family}.json"
    assert made.read_text() == shipped.read_text(encoding="utf-8")


@pytest.mark.gpu
def test_a_small_run_of_low_latency_linear_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.bench import linear
    from k3cupy.timing import cold

    monkeypatch.setattr(cold, "COLD_BYTES", 4 << 20)
    found = list(linear.run([(1536, 128)], [4]))
    assert [entry.kind for entry in found] == [
        "1536x128",
        *["1536x128 of 6288"] * 3,
        *["2304x1536 of 2112"] * 3,
    ]
    for entry in found:
        times = [entry.floor_us, entry.linear_us, entry.dispatched_us, *entry.candidates.values()]
        assert all(0 < us < 1000 for us in times)
        assert not entry.reason.startswith("row stride"), "the slices are taken as they are"
    assert all(us > 0 for us in linear.host_time(1536, 128).values())
    assert len(linear.remarks(found)) == 7
    assert found[0].plan == found[1].plan == "fused_a" and found[2].plan == "linear"


# The floor


@pytest.mark.parametrize("vectors", [1, 24_576, 1_892_352, 5_634_048])
@pytest.mark.parametrize("form", floor.FORMS, ids=str)
def test_every_form_of_the_floor_reads_every_byte_once(form: floor.Form, vectors: int) -> None:
    """Each block's part, each thread's steps through it: their lengths are all the vectors."""
    blocks, block_step, thread_step, of_block = form.numbers(vectors, 132)
    if thread_step == form.block_size:
        assert block_step == of_block and blocks * of_block >= vectors > (blocks - 1) * of_block
    else:
        assert (block_step, thread_step) == (form.block_size, blocks * form.block_size)
        assert of_block == vectors
    if not form.blocks_per_sm:
        assert of_block <= form.block_size * form.in_flight, "one pass"


def test_a_floor_that_a_product_beats_is_reported_as_none() -> None:
    assert floor.remark([("96x128 at M = 1", 1.3, 1.4)]) == "No product was faster than the floor."
    told = floor.remark([("96x128 at M = 1", 1.78, 1.32), ("96x128 at M = 2", 1.3, 1.3)])
    assert told.startswith("A floor that a product beats is none: 1 here, 96x128 at M = 1 (1.32 us")


def test_the_remarks_of_the_gemm_name_every_miss_and_whatever_beats_the_floor() -> None:
    from k3cupy.bench import gemm

    def made(tokens: int, us: float, **changes: float) -> gemm.Entry:
        found = {**gemm_entry(), "alone_us": {}, "tokens": tokens, **changes}
        return gemm.Entry(**{**found, "candidates": [{**found["dispatched"], "us": us}]})

    told = gemm.remarks([made(1, 9.0), made(8, 18.0), made(16, 9.0, linear_us=7.5)])
    assert told == [
        "Slower than F.linear in 2 of 3: 2112x7168 at M = 8 (1.125 x), "
        "2112x7168 at M = 16 (1.200 x).",
        "A floor that a product beats is none: 1 here, 2112x7168 at M = 16 (7.50 us, "
        "streaming 8.00).",
    ]


def test_a_product_is_what_it_adds_and_alone_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor is the best of its forms in the same place; strided x has a chain of its own."""
    from k3cupy.bench import gemm
    from k3cupy.timing.products import Product

    small = on_no_gpu(monkeypatch)

    def us(names: list[str]) -> float:
        ends = [name for name in names if "read_all" in name or "write_rows" in name]
        streams = [name for name in names if "stream_bytes" in name]
        return 3.0 * bool(ends) + 1.5 * len(streams) + 2.0

    timed_as(monkeypatch, small, us)
    config = FusedAGemmConfig(8, 16, 64, 2, 2, 4, 1, 1, 1)
    monkeypatch.setattr(gemm, "chosen", lambda *_, **__: config)
    product = Product(96, 256, 5, device="cpu")
    weights = [torch.randn(96, 256, dtype=torch.bfloat16) for _ in range(2)]
    once, _ = floors = [floor.body_of(form, weights[0]) for form in floor.FORMS[:2]]
    floors[1] = lambda weight: [once(weight), once(weight)]
    found = gemm.run_entry(product, weights, floors, ("early", "none"))
    assert found.floor_us == 1.5 and found.alone_us == {"floor": 3.5, "linear": 2.0, "ours": 2.0}
    assert found.linear_us == found.strided_us == found.waiting_us == found.invariant_us == 0.0001
    assert found.candidates[0]["us"] == 0.0001
    written = {s.arguments[3] for s in small if "write_rows" in s.name}
    assert written == {product.x.data_ptr(), product.strided.data_ptr()}
    assert all("kEarly" in s.name for s in small if "write_rows" in s.name)
