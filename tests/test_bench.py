"""The benchmark's arithmetic and files, without a GPU; one small run with one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import ROOT, document
from click.testing import CliRunner
from fake_device import H200

from k3cupy.bench import forms, report
from k3cupy.choose.mla import choose
from k3cupy.choose.table import key_of
from k3cupy.cli import main
from k3cupy.kernels import mla_decode, mla_prefill
from k3cupy.kernels.mla_prefill import MlaPrefillConfig
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.timing.prefill_step import bytes_moved, launches_of, sets_of


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


def test_the_remarks_of_the_epilogues_name_every_miss() -> None:
    from k3cupy.bench import decode, prefill

    beside: dict[str, Any] = {"alone_us": {}, "sglang_us": 0.8}
    given = [
        entry(TIMES, **beside),
        entry(TIMES, 8, **{**beside, "sglang_us": None, "public_us": {}}),
        entry(TIMES, 16, **{**beside, "public_us": {"1": 0.5}}),
        entry(TIMES, 32, **{**beside, "pdl": False}),
    ]
    assert decode.remarks([decode.Entry(**each) for each in given]) == [
        "Slower than the public structure in 1 of 2: 16bit+same at B = 16 (2.000 x).",
        "Slower than SGLang's structure in 2 of 2: 16bit+same at B = 4 (1.250 x), "
        "16bit+same at B = 16 (1.250 x).",
    ]
    rows = [
        prefill.Entry(**{**PREFILL, "alone_us": {}, "tokens": tokens, "public_us": us})
        for tokens, us in ((1, None), (2, 8.0), (4, 12.0))
    ]
    assert prefill.remarks(rows) == [
        "Slower than the public structure in 1 of 2: fused_mla_kv_concat at T = 2 (1.250 x)."
    ]
    assert prefill.remarks(rows[:1]) == []


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


def shipped_key(tokens: int) -> str:
    """What the shipped table chooses for a batch, which is none of ``TIMES``."""
    variant = mla_decode.Variant.of_kind("16bit+same")
    key = key_of(choose("mla_decode", variant, tokens, 12, H200).config)
    assert key not in TIMES
    return key


def test_the_page_shows_the_choice_of_the_shipped_table() -> None:
    key = shipped_key(16)
    old = document(entry(dict.fromkeys([*TIMES, key], 1.0), tokens=16))
    assert old["entries"][0]["dispatched"]["split"] == 0
    (renewed,) = report.with_shipped_choice(old)["entries"]
    assert forms.key_of(renewed["dispatched"]) == key


def test_the_page_shows_no_choice_that_has_no_time() -> None:
    """Configurations are added; a run from before them keeps what ran then."""
    old = document(entry(TIMES, tokens=512))
    key = shipped_key(512)
    assert report.with_shipped_choice(old)["entries"] == old["entries"]
    new = document(entry({**TIMES, key: 1.0}, tokens=512))
    (renewed,) = report.with_shipped_choice(new)["entries"]
    assert forms.key_of(renewed["dispatched"]) == key


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
    times = dict.fromkeys([*TIMES, shipped_key(16)], 2.0)
    last.write_text(json.dumps(document(entry(times, tokens=16, empty_us=0.66))))
    page.write_text("<!-- results:begin --><!-- results:end -->")
    assert apply(first, last, "--page", page) == (0, f"wrote results of {page}\n")
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
    assert apply(result, "--page", page) == (0, f"wrote prefill-results of {page}\n")
    assert "<!-- results:begin -->decode<!-- results:end -->" in page.read_text()
    assert "| kv_concat | 4096 |" in page.read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*_h200_bars*.json")))
def test_the_committed_results_can_be_shown(path: Path) -> None:
    """With the choices of today's tables: the figures of the documentation are made so."""
    committed = json.loads(path.read_text(encoding="utf-8"))
    chosen = report.with_shipped_choice(committed)
    form = forms.form_of(committed)
    shown = sum(map(form.is_for_page, committed["entries"]))
    assert report.markdown(chosen).count("\n| ") == shown + 2 > 2


def test_a_time_alone_is_of_the_choice_that_was_measured() -> None:
    """Where today's choice is another one, only its time in the chain is known."""
    alone = {"ours": 2.5, "public": 3.5}
    old = document(entry({**TIMES, shipped_key(16): 1.0}, tokens=16, alone_us=alone))
    assert "| 2.50 / 3.50 |" in report.markdown(old)
    new = report.with_shipped_choice(old)
    assert "| - / 3.50 |" in report.markdown(new)
    assert report.with_shipped_choice(new) == new
