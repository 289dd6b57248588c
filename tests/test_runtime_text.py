"""Every report can be printed wherever it is printed, and says the same there."""

from __future__ import annotations

import builtins
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich
import torch
from fake_device import H200
from gemm_table_helpers import measured

import k3cupy
from k3cupy import Choice, DispatchReport, LinearReport
from k3cupy.compiling.report import CompileReport
from k3cupy.engines.report import EngineReport
from k3cupy.ops.dispatch_report import ReportRow
from k3cupy.runtime import config, text
from k3cupy.runtime.errors import shown
from k3cupy.runtime.text import compiling, plain, printable, table_of
from k3cupy.torch.linear_report import LayerReport, Span
from k3cupy.tuning.report import TuneReport

UNUSUAL = "größe/名/\udcff"
"""As a layer may be called, or a folder; the last is a byte that is no UTF-8."""


def choice(name: str) -> Choice:
    return Choice("linear", None, f"the kernel is not in {name}")


def linear(name: str) -> LinearReport:
    left = LayerReport(name, (16, 32), "cuda:0", False, reason="x: got [M, K] in [/here] :warning:")
    return LinearReport(
        [
            LayerReport("blocks.0.proj", (2112, 7168), "cuda:0", True, (Span(1, 8, "fused_a"),)),
            left,
        ]
    )


REPORTS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "choice": (choice, ("linear: the kernel is not in ",)),
    "dispatch": (
        lambda name: DispatchReport((ReportRow(choice(name), 2112, 7168, 8, 3),)),
        ("2112 x 7168", "0 of 3 calls"),
    ),
    "linear": (
        linear,
        (
            "1 of 2 linear layers",
            "blocks.0.proj",
            "2112 x 7168",
            "fused_a 1-8",
            "[/here] :warning:",
        ),
    ),
    "tune": (
        lambda name: TuneReport(
            H200.name, "gemm", (measured(8),), 1, ("[bold]x",), Path(f"/home/{name}/gemm.json")
        ),
        (H200.name, "bfloat16 2112x7168", "M=8", "refused, not recorded: [bold]x", "kept in /home"),
    ),
}


def printed(what: Any, encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What stands on a terminal of an encoding after printing something, or after a call."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        what() if callable(what) else print(what)
    terminal.seek(0)
    return terminal.read()


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "cp1252", "utf-8"])
def test_a_report_is_printed_on_any_terminal(
    name: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, told = REPORTS[name]
    text = printed(make(UNUSUAL), encoding, monkeypatch)
    for words in (*told, r"\udcff"):
        assert words in text
    assert ("größe" in text) is (encoding != "ascii"), "what can be shown is shown"
    assert printed(make("proj"), encoding, monkeypatch).isascii(), "boxes too"


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_a_text_in_a_notebook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are there colours in it where the environment forces them."""
    make, _ = REPORTS[name]
    expected = str(make("proj"))
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    assert rich.console.Console().is_jupyter
    assert str(make("proj")) == expected
    assert "\x1b" not in expected


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_a_table_in_a_notebook_and_plain_values(name: str) -> None:
    """In HTML a name is text, and a prompt shows what ``print`` does."""
    make, told = REPORTS[name]
    report = make("proj<b>")
    html = report._repr_html_()
    assert html.startswith("<table") and html.count("<tr>") == html.count("</tr>") > 1
    assert "<b>" not in html
    if name != "linear":
        assert "proj&lt;b&gt;" in html
    assert repr(report) == str(report)
    assert told[0].partition(":")[0] in html
    assert json.loads(json.dumps(report.to_dict()))


def test_a_report_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """But words are whole; where nobody says how wide it is 120 characters have to do."""
    row = ReportRow(choice("proj " * 60), 2112, 7168, 8, 3)
    report = DispatchReport((row,), {(2112, 7168): ["blocks.proj"]})
    monkeypatch.delenv("COLUMNS", raising=False)
    assert 115 <= max(map(len, str(report).splitlines())) <= 120
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "90")
    assert 85 <= max(map(len, str(report).splitlines())) <= 90
    monkeypatch.setenv("COLUMNS", "10")
    assert "blocks.proj" in str(report) and "2112 x 7168" in str(report)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_table_fits_a_narrow_line(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """COLUMNS counts in a pipe too; what is no width does not."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    table = ("kind", " tokens", "what would run", "why"), [("fp8", "8", "one two " * 9, "why " * 9)]
    for columns, least, most in (("60", 50, 60), ("40", 30, 40)):
        monkeypatch.setenv("COLUMNS", columns)
        assert least < max(map(len, plain(table_of(*table)).splitlines())) <= most
    if not is_terminal:
        for columns in ("0", "-5", "wide"):
            monkeypatch.setenv("COLUMNS", columns)
            assert 110 < max(map(len, plain(table_of(*table)).splitlines())) <= 120


def test_a_bar_in_a_notebook_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    text._say_once.cache_clear()
    with compiling(quiet=True):
        pass
    assert capsys.readouterr().err == ""
    for _ in range(3):
        with compiling() as (found, done):
            found(1)
            done(None)
    told = capsys.readouterr().err
    assert told.count('pip install "k3cupy[notebook]"') == 1
    assert told.count("\n") == 1, "once a process, and no bar"


@pytest.mark.usefixtures("fresh_counts")
def test_the_dispatch_report_is_grouped_by_layers() -> None:
    """Layers that are alike, and numbers of tokens, share a line; no name is cut."""
    model = torch.nn.ModuleDict({f"h{i}": torch.nn.Linear(128, 96, bias=False) for i in range(2)})
    model["deep"] = torch.nn.ModuleList([torch.nn.Linear(128, 80, bias=False) for _ in range(3)])
    k3cupy.enable_low_latency_gemm(model.bfloat16())
    for tokens in (1, 2, 3, 9):
        for layer in (model["h0"], model["h1"], *model["deep"]):
            layer(torch.ones(tokens, 128).bfloat16())
    report = k3cupy.dispatch_report()
    told = [[cell.strip() for cell in line.split("|")[1:-1]] for line in str(report).splitlines()]
    assert [cells[:4] for cells in told if len(cells) > 3 and cells[1]][1:] == [
        ["deep.*", "80 x 128", "1-3, 9", "12"],
        ["h0", "96 x 128", "1-3, 9", "8"],
    ]
    assert ["h1"] in [cells[:1] for cells in told]
    assert "deep.*" in report._repr_html_()
    assert report.to_dict()["rows"][0]["layers"] == ["deep.0", "deep.1", "deep.2"]
    rows = [
        ReportRow(Choice("skinny", None, f"measured at M = {m}: {m}.25 us", "shipped"), 8, 8, m, 1)
        for m in (4, 8)
    ]
    long = "layer" * 60
    text = str(DispatchReport(tuple(rows), {(8, 8): [long]}))
    assert long in text
    assert "measured at M = *: * us" in text and "[shipped]" in text


def test_nothing_of_a_report_is_cut_off() -> None:
    text = str(linear("g" * 200))
    assert text.count("g") >= 200
    assert "…" not in text


def test_rich_prints_the_same_report_with_its_own_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not take a name for markup, which it would swallow or refuse."""
    console = rich.console.Console(file=io.StringIO(), width=120, force_jupyter=False)
    with console.capture() as shown:
        console.print(linear("proj"))
    assert "[/here] :warning:" in shown.get()
    assert not shown.get().isascii()


@pytest.mark.parametrize("folder", ["run[/old]", "v1[bold]x", ":smile:x"])
def test_a_folders_name_is_no_markup_above_and_below_a_table(folder: str) -> None:
    """Nor in a notebook, which shows what stands there as it is."""
    for report in (
        REPORTS["tune"][0](folder),
        CompileReport(H200, Path(folder), is_edited=True, kernels=[]),
        EngineReport(folder, []),
    ):
        console = rich.console.Console(file=io.StringIO(), width=200, force_jupyter=False)
        with console.capture() as shown:
            console.print(report)
        assert folder in shown.get()
        assert folder in str(report) and folder in report._repr_html_()


@pytest.mark.parametrize("encoding", ["ascii", "cp437", "utf-8"])
def test_show_config_is_printed_on_any_terminal(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "config_info", lambda: {"backend": "", "why": "", **INFO})
    text = printed(k3cupy.show_config, encoding, monkeypatch)
    assert r"\udcff" in text
    assert ("größe" in text) is (encoding != "ascii")


INFO = {"cache": f"/home/{UNUSUAL}", "packages": {"k3cupy": "0"}}


def test_a_text_is_for_the_file_that_it_goes_to() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    assert printable("ü名", file) == "ü\\u540d"
    assert printable("ü名", io.StringIO()) == "ü名"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("short", "'short'"),
        ("x" * 5_000_000, "'xxx"),
        (10**400, "1000"),
        (10**5000, "an integer of 16610 bits"),
        (None, "None"),
        ([[[[[[10**5000]]]]]], "[[[[...]]]]"),
        ({"a": ["b" * 5_000_000] * 100}, "{'a': ['bbb"),
    ],
    ids=["text", "5 MB", "400 digits", "5000 digits", "None", "nested", "many"],
)
def test_a_value_is_quoted_in_bounded_length(value: Any, expected: str) -> None:
    assert shown(value).startswith(expected)
    assert len(shown(value)) < 700


def test_no_message_quotes_a_long_value_whole() -> None:
    long = "x" * 5_000_000
    with pytest.raises(ValueError, match=r"^op: expected 'mla_decode' or .*, got 'x+\.\.\.x+'$"):
        k3cupy.warmup(long)
    with pytest.raises(ValueError, match=r"^dtype: expected .*, got 'xxx") as caught:
        k3cupy.warmup(dtype=long)
    assert len(str(caught.value)) < 500


def test_a_number_that_python_does_not_write_out_is_named() -> None:
    many = 10**5000
    x, weight = torch.ones(4, 128, dtype=torch.bfloat16), torch.ones(256, 128, dtype=torch.bfloat16)
    config = k3cupy.SkinnyGemmConfig(many, 32, 1, 1, 1)
    calls: dict[str, Callable[[], Any]] = {
        "n": lambda: k3cupy.select_backend(4, many, 128),
        "tokens": lambda: k3cupy.warmup("fused_a_gemm", shapes=[(16, 16)], tokens=many),
        "shapes": lambda: k3cupy.warmup("fused_a_gemm", shapes=[(-many, 16)]),
        "stream": lambda: k3cupy.fused_a_gemm(x, weight, stream=many),
        "pdl": lambda: k3cupy.fused_a_gemm(x, weight, pdl=many),
        "config": lambda: k3cupy.skinny_gemm(x, weight, config=config),
    }
    for name, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=f"^{name}: expected "):
            call()
