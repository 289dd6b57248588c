"""A run as a document: every benchmark's entries fit the columns that show them."""

from __future__ import annotations

import importlib
import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import ROOT, document
from click.testing import CliRunner

from k3cupy.bench import digests, forms, report
from k3cupy.cli import main
from k3cupy.timing import environment

CONFIG = {
    "decode": [{"split": 1, "block_size": 256, "rows": 3}, {"split": 3, "block_size": 256, "r": 1}],
    "prefill": [{"rows": 8, "warps": 4}],
    "gemm": [{"tile_m": 8, "tile_n": 16, "tile_k": 512, "stages": 3, "split_k": 1}],
}
"""Configurations with a time each; the first is the dispatched one."""


def entry_of(which: str) -> Any:
    """An entry of a benchmark, made of its own class, with a number in every field of times."""
    made: dict[str, Any] = {"kind": "2112x7168", "tokens": 4, "heads": 12, "n": 2112, "k": 7168}
    made["alone_us"] = {"ours": 2.5, "linear": 4.5}
    made |= {"plan": "fused_a", "ran": {"ours": {"q_b 2304x1536": "skinny 1/2"}}}
    made["added_us"] = {
        column: {"consumer": 0.75, "q_b 2304x1536": 3.5}
        for column in ("cublas", "public", "plan", "ours", "fewer")
    }
    made |= {"scenario": "chain", "pdl": True, "rope": False, "bytes": 1000, "reason": "measured"}
    made |= {"public_us": {"1": 2.0, "3": 3.0}, "dispatched": "skinny 1/2", "candidates": {}}
    made |= {"form": "new output", "beside": "C++ operator"}
    made |= {"processes": 8, "kernels": 296, "compiled": 296, "files": 297}
    if which == "prefill":
        made["public_us"] = 2.0
    if which == "step":
        made |= {
            "ran": "mla_query 8/0/1",
            "errors": {"ours": 3e-3, "separate": 4e-3},
            "beside_us": {"separate": 2.0},
        }
    if which in CONFIG:
        made["candidates"] = [{**config, "us": 2.0 + i} for i, config in enumerate(CONFIG[which])]
        made["dispatched"] = CONFIG[which][0]
    cls = importlib.import_module(f"k3cupy.bench.{which}").Entry
    names = [field.name for field in fields(cls)]
    return cls(**{name: made.get(name, 1.5) for name in names})


@pytest.mark.parametrize("which", forms.FORMS)
def test_a_run_becomes_a_document_that_can_be_shown(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"k3cupy.bench.{which}")
    asked: list[Any] = []

    def describe(*given: Any) -> dict[str, Any]:
        asked.append(given)
        described: dict[str, Any] = document()["environment"]
        return described

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(environment, "describe", describe)
    monkeypatch.setattr(module, "host_time", lambda *_: {"new output": 17.25}, raising=False)
    made = json.loads(json.dumps(module.as_document([entry_of(which)], "0123")))
    assert asked == [(3, "0123")]
    assert made["benchmark"] == which
    assert list(made)[:3] == ["benchmark", "environment", "method"]
    assert list(made)[-1] == "entries"
    statistic = {"host": "minimum of ", "start": "one run "}.get(which, "median of ")
    assert made["method"]["statistic"].startswith(statistic)
    form = forms.form_of(made)
    (row,) = map(form.cells, made["entries"])
    assert len(row) == len(form.columns) == len({column.name for column in form.columns})
    assert all(isinstance(cell, str) and cell for cell in row)
    text = report.markdown(made)
    units = {
        "window": "Microseconds a layer",
        "step": "Microseconds added to the chain",
        "host": "The host's microseconds a call",
        "start": "Seconds until all kernels are loaded; first calls in milliseconds",
    }
    assert f"2026-11-29. {units.get(which, 'Microseconds a launch')}.\n" in text
    assert ("new output 17.2 us" in text) == ("host_us" in made)
    if form.is_for_page(made["entries"][0]):
        assert f"| {' | '.join(row)} |" in text


# What other pages say of a result


def window_entry(tokens: int, plan: float, ours: float, fewer: float | None) -> dict[str, Any]:
    times = {"cublas": 12.0, "public": 9.0, "plan": plan, "ours": ours, "fewer": fewer}
    added = {column: {"all": us} for column, us in times.items() if us is not None}
    return {"kind": "mla-front", "tokens": tokens, "floor_us": 4.0, "added_us": added}


def test_digests_of_windows() -> None:
    entries = [window_entry(1, 8.0, 6.0, 4.0), window_entry(16, 8.0, 9.0, 9.5)]
    made = digests.digests_of({"benchmark": "window", "entries": entries})
    name = "MLA front: qkv_a to attention"
    assert made["window-gain"].splitlines()[2:] == [
        f"| {name} | 1 | 4.00 | 12.00 | 8.00 | 6.00 | 0.750 | 4.00 | 0.500 |",
        f"| {name} | 16 | 4.00 | 12.00 | 8.00 | 9.00 | 1.125 | 9.50 | 1.188 |",
    ]
    assert made["window-means"].endswith("| `mla-front` | 0.919 | 0.771 |\n")
    assert made["window-losses"].splitlines() == [
        "- `mla-front` with 16 tokens: 1.125 x the public plan",
        "- `mla-front` with 16 tokens, in fewer launches: 1.056 x ours, separate",
    ]
    of_old = {"benchmark": "window", "entries": [window_entry(64, 8.0, 7.0, None)]}
    made = digests.digests_of(of_old)
    assert made["window-losses"] == "- in no row of 1\n"
    assert made["window-means"].endswith("| `mla-front` | - | - |\n")
    assert digests.digests_of({"benchmark": "decode", "entries": []}) == {}


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md", "docs/benchmarks.md"])
def test_pages_say_what_the_committed_windows_say(page: str, tmp_path: Path) -> None:
    """Or somebody wrote a new result, or on a page by hand: `bench apply` renews them."""
    copy = tmp_path / "page.md"
    shutil.copy(ROOT / page, copy)
    result = ROOT / "benchmarks/results/window_h200_chain.json"
    done = CliRunner().invoke(main, ["bench", "apply", str(result), "--page", str(copy)])
    assert done.exit_code == 0 and "window-" in done.output
    assert copy.read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")
