"""The benchmark's arithmetic and files, without a GPU; one small run with one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import ROOT, document
from click.testing import CliRunner

from k3cupy.bench import forms, report
from k3cupy.cli import main
from k3cupy.kernels.mla_decode import CANDIDATES, MlaDecodeConfig, Variant
from k3cupy.kernels.mla_prefill import CANDIDATES as PREFILL_CANDIDATES
from k3cupy.kernels.mla_prefill import (
    INSERTS,
    OPS,
    MlaPrefillConfig,
    Variant,
    choose,
)
from k3cupy.runtime.devices import DeviceInfo


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
    assert s["dispatched_over_public"] == pytest.approx(1.0 / 1.2)
    assert s["dispatched_over_split"] == pytest.approx(1.25)
    assert s["over_empty_us"] == pytest.approx(0.5)


def test_summary_without_a_comparison_kernel() -> None:
    assert forms.decode_summary(entry(TIMES, public_us={}))["dispatched_over_public"] is None


def test_runs_are_averaged_relative_to_their_fastest() -> None:
    fast = document(entry({"0/288/1": 1.0, "1/256/3": 1.2, "3/256/1": 2.0}))
    slow = document(entry({"0/288/1": 2.0, "1/256/3": 2.0, "3/256/1": 4.0}))
    merged = report.averaged([fast, slow])["entries"][0]["candidates"]
    assert [c["us"] for c in merged] == pytest.approx([1.5, 1.65, 3.0])


def test_an_entry_that_only_some_runs_have_is_kept() -> None:
    other = {**entry(TIMES), "kind": "fp8+fp8"}
    merged = report.averaged([document(entry(TIMES)), document(other)])["entries"]
    assert [found["kind"] for found in merged] == [entry(TIMES)["kind"], "fp8+fp8"]
    assert [c["us"] for c in merged[1]["candidates"]] == [c["us"] for c in other["candidates"]]


def test_runs_of_two_gpus_are_not_averaged() -> None:
    with pytest.raises(ValueError, match="one GPU"):
        report.averaged([document(entry(TIMES)), document(entry(TIMES), gpu="NVIDIA B200")])


def test_the_table_takes_the_fastest_and_settles_ties_over_all_sizes() -> None:
    table = report.shipped_table(
        document(
            entry({"0/288/1": 1.000, "1/256/3": 1.005, "3/256/1": 1.2}, tokens=1),
            entry({"0/288/1": 1.300, "1/256/3": 1.000, "3/256/1": 1.2}, tokens=8),
            entry({"0/288/1": 1.000, "1/256/3": 1.200, "3/256/1": 1.2}, tokens=64),
            entry({"0/288/1": 9.0, "1/256/3": 9.0, "3/256/1": 1.0}, tokens=2, pdl=False),
        )
    )
    rows = table["gpus"]["NVIDIA H200"]["entries"]
    assert [row["num_rows"] for row in rows] == [13, 104, 832]
    chosen = [MlaDecodeConfig(**row["chosen"]) for row in rows]
    assert [c.split for c in chosen] == [1, 1, 0]
    assert rows[0]["us"] == {"0/288/1": 1.0, "1/256/3": 1.005, "3/256/1": 1.2}


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
    assert (s["over_row_copy"], s["over_torch"]) == (1.0, 6.0)


def test_prefill_results_make_a_table_and_a_page() -> None:
    merged = report.averaged([prefill_document(), prefill_document()])
    (row,) = report.shipped_table(merged)["gpus"]["NVIDIA H200"]["entries"]
    assert (row["kind"], row["num_rows"]) == ("fused_mla_kv_concat", 4096 * 12)
    assert row["chosen"] == {"tasks_per_block": 8, "heads_per_task": 4}
    assert row["us"] == {"8/1": 10.0, "8/4": 8.0}
    line = "| kv_concat | 4096 | 12 | 32.00 | 8.00 | 10.00 | 60.00 | 8.00 (8/4) | 10.00 (8/1) |"
    assert line in report.markdown(merged)
    turned = report.shipped_table(prefill_document(rope=True))
    assert turned["gpus"]["NVIDIA H200"]["entries"] == []
    report.print_table(merged)


def test_the_prefill_page_shows_the_choice_of_the_shipped_table() -> None:
    (renewed,) = report.with_shipped_choice(prefill_document())["entries"]
    chosen = MlaPrefillConfig(**renewed["dispatched"])
    device = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 0)
    assert chosen == choose(Variant("fused_mla_kv_concat"), 4096, 12, device)[0]


def test_results_of_two_benchmarks_are_not_averaged() -> None:
    with pytest.raises(ValueError, match="one benchmark"):
        report.averaged([prefill_document(), document(entry(TIMES))])


def test_bytes_are_counted_once() -> None:
    from k3cupy.bench.prefill import bytes_moved

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
    from k3cupy.bench.prefill import launches_of, sets_of

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


@pytest.mark.parametrize("kind", ["16bit+same", "fp8+fp8", "16bit+ds_mla", "16bit+fp8", "fp8+same"])
def test_a_kind_and_its_variant_are_each_others_names(kind: str) -> None:
    variant = Variant.of_kind(kind)
    assert variant.is_valid()
    assert variant.kind == kind


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(ValueError, match="expected the markers"):
        report.insert_markdown(page, "text")


def test_apply_writes_table_and_page(tmp_path: Path) -> None:
    result, table, page = tmp_path / "r.json", tmp_path / "new" / "t.json", tmp_path / "p.md"
    result.write_text(json.dumps(document(entry(TIMES))))
    page.write_text("<!-- results:begin --><!-- results:end -->")
    arguments = ["bench", "apply", str(result), "--table", str(table), "--page", str(page)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(table.read_text())["gpus"]["NVIDIA H200"]["num_sms"] == 132
    assert "16bit+same" in page.read_text()


def test_apply_takes_prefill_results(tmp_path: Path) -> None:
    result, table, page = tmp_path / "r.json", tmp_path / "t.json", tmp_path / "p.md"
    every = [{**asdict(c), "us": 9.0 + i} for i, c in enumerate(PREFILL_CANDIDATES)]
    result.write_text(json.dumps(prefill_document(candidates=every)))
    page.write_text(
        "<!-- results:begin -->decode<!-- results:end -->"
        "<!-- prefill-results:begin --><!-- prefill-results:end -->"
    )
    arguments = ["bench", "apply", str(result), "--table", str(table), "--page", str(page)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(table.read_text())["gpus"]["NVIDIA H200"]["entries"]
    assert row["kind"] == "fused_mla_kv_concat"
    assert "<!-- results:begin -->decode<!-- results:end -->" in page.read_text()
    assert "| kv_concat | 4096 |" in page.read_text()


@pytest.mark.parametrize(("name", "table"), [("decode", "mla_decode"), ("prefill", "mla_prefill")])
def test_the_shipped_table_is_what_the_committed_results_give(name: str, table: str) -> None:
    files = sorted((ROOT / "benchmarks/results").glob(f"{name}_h200_run*.json"))
    if not files:
        pytest.skip("the results are kept in the repository, not in the package")
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    shipped = (ROOT / f"k3cupy/ops/tables/{table}.json").read_text(encoding="utf-8")
    assert report.shipped_table(report.averaged(documents)) == json.loads(shipped)


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
@pytest.mark.parametrize("which", ["decode", "prefill", "gemm", "linear"])
def test_bench_without_a_gpu_is_one_clear_line(which: str) -> None:
    done = CliRunner().invoke(main, ["bench", which])
    assert done.exit_code == 1
    assert done.output.strip() == "Error: bench needs a CUDA GPU; PyTorch sees none"


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", ["chain", "alone"])
def test_a_small_run_on_the_gpu(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.bench import decode

    monkeypatch.setattr(decode, "LAUNCHES", 20)
    some = [config for config in CANDIDATES if config.block_size == 256]
    found = decode.run_entry("fp8+fp8", 4, 12, scenario, True, some)
    times = [*(c["us"] for c in found.candidates), *found.public_us.values(), found.torch_us]
    assert len(found.candidates) == 2 and len(found.public_us) == 2
    assert all(0 < time < 1000 for time in times)


@pytest.mark.gpu
def test_a_wrong_result_is_not_timed() -> None:
    from k3cupy.bench import decode

    problem = decode.Problem("16bit+same", 4, 12)
    with pytest.raises(RuntimeError, match="nothing: mqa_q differs from the reference, not timed"):
        problem.check("nothing", lambda: None)


@pytest.mark.parametrize("command", ["warmup", "tune", "bench gemm", "bench linear"])
@pytest.mark.parametrize("shape", ["2112", "2112x", "ax7168"])
def test_a_shape_that_is_none_is_refused(command: str, shape: str) -> None:
    done = CliRunner().invoke(main, [*command.split(), "--shape", shape])
    assert done.exit_code == 2
    assert f"{shape!r} is no shape; write N x K as 2112x7168" in done.output


@pytest.mark.gpu
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_a_small_prefill_run_on_the_gpu(op: str, rope: bool) -> None:
    from k3cupy.bench import prefill

    if rope and op not in INSERTS:
        pytest.skip("context is turned already")
    some = PREFILL_CANDIDATES[:2]
    found = prefill.run_entry(op, 16, 12, rope, some)
    times = [*(c["us"] for c in found.candidates), found.copy_us, found.row_copy_us]
    assert all(0 < time < 1000 for time in (*times, found.torch_us))


@pytest.mark.gpu
def test_a_wrong_prefill_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.bench import prefill

    problem = prefill.Problem("fused_mla_kv_concat", 4, 12, False)
    monkeypatch.setattr(problem, "run", lambda config: None)
    with pytest.raises(RuntimeError, match="differs from the reference, not timed"):
        problem.check(PREFILL_CANDIDATES[:1])
