"""What the benchmarks' commands measure, show and refuse."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import ROOT, document
from click.testing import CliRunner

from k3cupy import projections
from k3cupy.bench import forms, host, report
from k3cupy.choose.gemm import TOKEN_CLASSES
from k3cupy.choose.table import (
    MLA_DECODE,
    MLA_PREFILL,
)
from k3cupy.cli import main
from k3cupy.kernels import mla_decode
from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig
from k3cupy.kernels.mla_prefill import OPS
from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig
from k3cupy.runtime import launch
from k3cupy.runtime.errors import CompileError
from k3cupy.timing import environment
from k3cupy.timing.decode_step import DecodeStep
from k3cupy.tuning.entries import Candidate
from k3cupy.tuning.targets import TOKENS


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
@pytest.mark.parametrize(
    "which", ["decode", "prefill", "gemm", "linear", "window", "step", "host", "start"]
)
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
    assert "…" not in done.output, "what is no terminal has no width to fit"


def test_an_interrupted_benchmark_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without anything measured it is an interruption like any other."""
    from k3cupy.bench import gemm

    measured_there = json.loads((ROOT / f"benchmarks/results/{OF_GEMM}.json").read_text("utf-8"))

    def run(count: int) -> Any:
        yield from ["an entry"] * count
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gemm, "as_document", lambda found, *_: {**measured_there, "n": len(found)})
    path = tmp_path / "found.json"
    for count in (0, 3):
        monkeypatch.setattr(gemm, "run", lambda *_, count=count: run(count))
        done = CliRunner().invoke(main, ["bench", "gemm", "--json", str(path)])
        assert done.exit_code == (0 if count else 1), done.output
        assert path.exists() == bool(count)
    assert "Interrupted; what follows are the 3 that were measured." in done.output
    assert json.loads(path.read_text("utf-8"))["n"] == 3


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
        ("window --qkv-a skinny/1/2", "skinny has no configuration '1/2'"),
        ("window --qkv-a cublas", "there is no kernel 'cublas'"),
        ("step mla", "'mla' is not one of 'norm', '16bit+same'"),
        ("step --heads 0", "0 is not in the range x>=1"),
        ("decode --kind fp4", "'fp4' is none of 16bit+same"),
        ("prefill --op kv", "'kv' is none of key_concat_kv_cache_insert"),
        ("prefill --tokens 0", "0 is not in the range x>=1"),
        ("decode --tokens -1", "-1 is not in the range x>=1"),
        ("decode --heads 0", "0 is not in the range x>=1"),
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


WINDOW: dict[str, Any] = {
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
FEWER = {
    **WINDOW,
    "tokens": 16,
    "added_us": {
        **WINDOW["added_us"],
        "fewer": {"consumer": 0.75, "qkv_a 2112x7168": 8.0, "query": 2.25},
    },
    "ran": {**WINDOW["ran"], "fewer": {"qkv_a 2112x7168": "fused_a 8/3", "query": "mla_query 8"}},
}
"""With the column of fewer launches, which documents of before it do not have."""


def window_document() -> dict[str, Any]:
    return {**document(WINDOW, FEWER), "benchmark": "window"}


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ("", (("mla-front", "kda-front", "mla-back", "moe-front"), (1, 2, 4, 8, 16, 64), None)),
        ("moe-front mla-back --tokens 4", (("moe-front", "mla-back"), (4,), None)),
        (
            "mla-front --tokens 1 --qkv-a skinny/1/320/8/1/8 --qkv-a fused_a/8/16/512/4/4/8/1/1/2",
            (
                ("mla-front",),
                (1,),
                (
                    Candidate("skinny", SkinnyGemmConfig(1, 320, 8, 1, 8)),
                    Candidate("fused_a", FusedAGemmConfig(8, 16, 512, 4, 4, 8, 1, 1, 2)),
                ),
            ),
        ),
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
    begin = "38.9 | 10.50 | 16.75 | 13.75 | 14.00 | 13.00"
    text = report.markdown(window_document())
    assert f"| mla-front | 4 | {begin} | {ratios} | - | - | - | {ran} |" in text
    fewer = f"11.00 | 0.800 | 0.846 | {ran}; fewer launches: qkv_a: fused_a 8/3, query: mla_query 8"
    assert f"| mla-front | 16 | {begin} | {ratios} | {fewer} |" in text
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


@pytest.mark.parametrize("error", [RuntimeError, ValueError, CompileError])
def test_what_goes_wrong_in_a_benchmark_is_one_clear_line(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3cupy.bench import gemm

    def wrong(*_: Any) -> Any:
        raise error("x: expected K a multiple of 16, got 24")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gemm, "run", wrong)
    done = CliRunner().invoke(main, ["bench", "gemm", "--shape", "64x24"])
    assert (done.exit_code, done.output) == (1, "Error: x: expected K a multiple of 16, got 24\n")


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
