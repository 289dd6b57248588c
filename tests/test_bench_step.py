"""The steps in front of attention beside what they replace; their times need a GPU."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import Small, document, on_no_gpu, timed_as
from click.testing import CliRunner
from helpers import BF16

from k3cupy.bench import forms, report, step
from k3cupy.bench.step import FLOOR, NORM, ONE_LAUNCH, OURS, SEPARATE, TRITON, TWO_BLOCKS
from k3cupy.cli import main
from k3cupy.kernels import mla_query
from k3cupy.runtime import instances
from k3cupy.timing import cold, environment
from k3cupy.timing.mla_steps import NormStep, QueryStep, layer_shape

HEADS = 2


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Small]:
    """What small kernels were launched; a chain takes a microsecond for each of them."""
    found = on_no_gpu(monkeypatch)
    timed_as(monkeypatch, found, lambda names: float(len(names)))
    monkeypatch.setattr(instances, "load_all", lambda *_: None)
    monkeypatch.setattr(step, "NormStep", lambda tokens: NormStep(tokens, "cpu"))
    monkeypatch.setattr(step, "QueryStep", lambda *named: QueryStep(*named, device="cpu"))
    return found


def marked(launches: list[Small], call: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A call that takes some microseconds more."""

    def marked_call(*args: Any, **options: Any) -> Any:
        launches.extend([Small("work", 1, True, [])] * times)
        return call(*args, **options)

    return marked_call


def test_the_norms_are_charged_with_what_they_add(
    launches: list[Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_two_blocks", lambda norms: marked(launches, norms.run, 3))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = step.run_norm(3, 12)
    assert (found.kind, found.tokens, found.ran) == (NORM, 3, "mla_norm")
    assert (found.chain_us, found.floor_us, found.ours_us) == (2.0, 1.0, 0.0)
    assert found.beside_us == {TWO_BLOCKS: 3.0} and found.errors == {}


def test_wrong_norms_are_not_timed(launches: list[Small], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other kernel writes nothing where there is no GPU."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"two blocks a row: an element of q is not finite, not"):
        step.run_norm(3, 12)
    assert [small.name for small in launches] == ["k3cupy::rms_norms<1536, 512>"]
    (small,) = launches
    assert (small.grid, small.pdl, small.arguments[1]) == (6, True, 2112)


@pytest.mark.parametrize("tokens", [1, 17])
def test_the_query_front_beside_separate_kernels(
    tokens: int, launches: list[Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueryStep, "run", marked(launches, QueryStep.run, 2))
    monkeypatch.setattr(QueryStep, "separate", marked(launches, QueryStep.separate, 5))
    layers = [torch.randn(layer_shape(HEADS)).to(BF16) for _ in range(2)]
    streams = [marked(launches, lambda layer: None, 1)]
    kinds = step.QUERY_KINDS
    found = list(step.run_query(tokens, HEADS, kinds, layers, streams))
    assert [entry.kind for entry in found] == list(kinds)
    for entry in found:
        assert (entry.chain_us, entry.floor_us, entry.ours_us) == (2.0, 1.0, 2.0)
        assert entry.ran == ONE_LAUNCH, "on the CPU"
        fused = [name for name in entry.beside_us if name.startswith(ONE_LAUNCH)]
        assert len(fused) == (len(mla_query.CANDIDATES) if tokens == 1 else 0)
        assert {entry.beside_us[name] for name in fused} <= {2.0}
        rest = {name: us for name, us in entry.beside_us.items() if name not in fused}
        assert set(rest.values()) == {5.0}
        assert {"separate", "separate, bmm", "separate, q_b linear, bmm"} <= set(rest)
        limit = 5e-3 if entry.kind.startswith("16bit") else 5e-2
        assert all(0 < error < limit for error in entry.errors.values())
        assert [*entry.errors] == [OURS, SEPARATE]


def test_a_wrong_query_is_not_timed(launches: list[Small], monkeypatch: pytest.MonkeyPatch) -> None:
    separate = QueryStep.separate

    def slip(self: QueryStep, *args: Any, **options: Any) -> None:
        separate(self, *args, **options)
        self.out[0, 1, 5] += 30

    monkeypatch.setattr(QueryStep, "separate", slip)
    layers = [torch.randn(layer_shape(HEADS)).to(BF16)]
    told = r"query 16bit\+same, B = 1, separate: element \(0, 1, 5\) of mqa_q is .*, not timed"
    with pytest.raises(RuntimeError, match=told):
        next(step.run_query(1, HEADS, ["16bit+same"], layers, []))
    assert launches == []


def test_a_run_has_the_norms_and_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(step, "run_norm", lambda *args: asked.append(args) or "norm")
    monkeypatch.setattr(step, "run_query", lambda *args: asked.append(args[:3]) or ["a", "b"])
    monkeypatch.setattr(step, "QueryStep", lambda *named: QueryStep(*named, device="cpu"))
    monkeypatch.setattr(QueryStep, "chain", lambda self: None)
    monkeypatch.setattr(step.floor, "fastest", lambda layers, chain: [])
    monkeypatch.setattr(cold, "pool_of", lambda shapes: torch.zeros(2 * 2816 * 512, dtype=BF16))
    assert list(step.run([NORM], None, 12)) == ["norm"] * 10
    assert asked == [(count, 12) for count in step.NORM_TOKENS]
    asked.clear()
    monkeypatch.setattr(cold, "weights_of", lambda rows, width, pool: [pool.view(-1, width)])
    assert list(step.run([NORM, *step.QUERY_KINDS], [4, 8], HEADS)) == [*["norm"] * 2, *"abab"]
    assert asked[2:] == [(count, HEADS, list(step.QUERY_KINDS)) for count in (4, 8)]


def entries() -> list[step.Entry]:
    triton = {"Triton, 1 warps": 2.0, "Triton, 4 warps": 1.6, "Triton, 4 warps, PDL": 1.25}
    norm = step.Entry(NORM, 1, 12, 1.5, 0.5, 1.0, "mla_norm 6", {**triton, TWO_BLOCKS: 0.8})
    fused, errors = {"mla_query 8/0/1": 4.0}, {OURS: 2e-3, SEPARATE: 2.5e-3}
    separate = {"separate": 8.0, "separate, bmm": 6.25}
    found = [norm]
    for kind, us in zip(step.QUERY_KINDS, (5.0, 5.25, 5.5), strict=True):
        beside = {**fused, **separate}
        found.append(step.Entry(kind, 4, 12, 1.5, 2.5, us, "mla_query 8/0/1", beside, errors))
    return found


def test_the_remarks_are_the_figures_that_decide() -> None:
    told = step.remarks(entries())
    ends = ", and with the ends of the chain: "
    assert told[:3] == [
        f"The norms over the best Triton kernel{ends}0.800 (0.909) at B = 1.",
        "The norms over the best Triton kernel without dependent launch, its default"
        f"{ends}0.625 (0.806) at B = 1.",
        f"The norms over two blocks a row{ends}1.250 (1.087) at B = 1.",
    ]
    assert told[3:6] == [
        f"16bit+same, as chosen over the best separate kernels{ends}0.800 (0.839) at B = 4.",
        f"16bit+same, as chosen over the best in one launch{ends}1.250 (1.182) at B = 4.",
        "16bit+same, error against float64 as chosen and of separate kernels: 2.000e-03 and "
        "2.500e-03 at B = 4.",
    ]
    assert told[-2:] == [
        f"fp8+fp8 over 16bit+same{ends}1.050 (1.038) at B = 4.",
        f"16bit+ds_mla over 16bit+same{ends}1.100 (1.077) at B = 4.",
    ]
    assert len(told) == 14
    assert step.remarks(entries()[2:3])[-1].startswith("fp8+fp8, error"), "nothing to compare with"


def test_the_command_shows_and_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(environment, "describe", lambda *_: document()["environment"])
    monkeypatch.setattr(step, "run", lambda *args: asked.append(args) or entries())
    path = tmp_path / "step.json"
    words = ["bench", "step", "norm", "fp8+fp8", "--tokens", "4", "--heads", "6", "--json"]
    done = CliRunner().invoke(main, [*words, str(path)])
    assert done.exit_code == 0, done.output
    assert asked == [(("norm", "fp8+fp8"), (4,), 6)]
    found = json.loads(path.read_text("utf-8"))
    rows = [forms.form_of(found).cells(entry) for entry in found["entries"]]
    assert rows[0] == [
        *("norm", "1", "12", "1.50", "0.50", "1.00"),
        *("0.80 (two blocks a row)", "1.250", "-", "mla_norm 6"),
    ]
    assert rows[1][-5:] == [
        *("5.00", "6.25 (separate, bmm)", "0.800", "2.00e-03 / 2.50e-03", "mla_query 8/0/1")
    ]
    assert "over the best separate kernels" in report.markdown(found)
    assert "over the best separate kernels" in done.output
    asked.clear()
    CliRunner().invoke(main, ["bench", "step"])
    assert asked == [(step.KINDS, None, 12)]


# --- On a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_small_run_of_the_norms_on_the_gpu() -> None:
    """With the Triton kernel, all of whose forms are right; with and without dependent launch."""
    pytest.importorskip("triton")
    found = step.run_norm(4, 12)
    names = [name for name in found.beside_us if name.startswith(TRITON)]
    assert len(names) == 8 and sum(name.endswith("PDL") for name in names) == 4
    assert all(us < 1000 for us in (found.ours_us, *found.beside_us.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 17])
def test_a_small_run_of_the_query_front_on_the_gpu(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold, "COLD_BYTES", 4 << 20)
    found = list(step.run(step.QUERY_KINDS, [tokens], 4))
    assert [entry.kind for entry in found] == list(step.QUERY_KINDS)
    for entry in found:
        assert entry.ran.split()[0] in ((ONE_LAUNCH, SEPARATE) if tokens <= 16 else (SEPARATE,))
        assert all(0 < us < 1000 for us in (entry.ours_us, *entry.beside_us.values()))
        assert all(0 < error < 0.05 for error in entry.errors.values())
    assert FLOOR not in found[0].beside_us
