"""Every report can be printed wherever it is printed, and says the same there."""

from __future__ import annotations

import builtins
import io
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
from k3cupy.ops.dispatch_report import ReportRow
from k3cupy.runtime import config
from k3cupy.runtime.errors import shown
from k3cupy.runtime.text import printable
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
