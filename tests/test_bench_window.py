"""What products are compared with, and windows of a layer; their values need a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import STREAM, FakeDevice
from helpers import BF16

from k3cupy.bench import layers, public, window
from k3cupy.bench.layers import COLUMNS, CUBLAS, OURS, PLAN, STRUCTURE, WINDOWS, Step, Window
from k3cupy.call.choice import PUBLIC
from k3cupy.cli import bench
from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig
from k3cupy.timing import cold
from k3cupy.tuning.entries import LINEAR

# --- What vLLM runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "tokens", "named"),
    [
        (2112, 7168, 1, "skinny 1/224/2/4/8"),
        (2112, 7168, 4, "skinny 4/128/2/1/8"),
        (2112, 7168, 5, "fused_a"),
        (2304, 1536, 16, "linear"),  # listed up to eight tokens
        (1536, 128, 8, "fused_a"),
        (4608, 1536, 1, "skinny 1/96/4/2/4"),
        (6288, 7168, 4, "linear"),
        (4480, 7168, 1, "linear"),  # not listed
    ],
)
def test_the_plan_is_what_the_public_table_lists(n: int, k: int, tokens: int, named: str) -> None:
    assert str(public.planned(n, k, tokens)) == named


def test_rows_that_lie_apart_are_left_to_the_framework() -> None:
    assert public.planned(1536, 128, 4, packed=False) == LINEAR
    assert public.planned(1536, 128, 1, packed=False) == public.FUSED_A, "one row is packed"


def test_every_kernel_of_the_plan_can_run_here() -> None:
    listed = [(entry, *map(int, entry.problem.split()[1].split("x"))) for entry in public._table()]
    assert len(listed) == 90 and public._table().origin == PUBLIC
    for entry, n, k in listed:
        if entry.kernel == public.FUSED_A.kernel:
            assert entry.config is None and public.has_fused_a(n, k, entry.size)
        else:
            assert isinstance(entry.config, SkinnyGemmConfig)
            assert entry.config.num_rows == entry.size and entry.config.is_valid()


# --- What is launched ----------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    stream = type("Stream", (), {"cuda_stream": STREAM})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return FakeDevice(monkeypatch)


@pytest.mark.parametrize(
    ("n", "k", "tokens", "width", "name", "shared_bytes"),
    [
        (2112, 7168, 1, 7168, "2112, 7168, 8, true", (1 << 10) + 16 * 24 * 512),
        (2112, 7168, 9, 7168, "2112, 7168, 16, true", (1 << 10) + 12 * 32 * 512),
        (1536, 128, 8, 6288, "1536, 128, 8, false", (1 << 10) + 24 * 256),
        (7168, 384, 8, 384, "7168, 384, 8, true", (1 << 10) + 3 * 24 * 256),
    ],
)
def test_the_comparison_kernel_is_launched_as_the_public_one(
    n: int, k: int, tokens: int, width: int, name: str, shared_bytes: int, device: FakeDevice
) -> None:
    x, out = torch.zeros(tokens, width, dtype=BF16)[:, :k], torch.zeros(tokens, n, dtype=BF16)
    weight = torch.zeros(n, k, dtype=BF16)
    public.fused_a(x, n, out)(weight)
    assert device.loaded == [f"k3cupy::public_gemm<{name}>"]
    assert device.settings == {
        **{"grid": n // 16, "block": 256, "pdl": True, "cluster": 1},
        "shared_bytes": shared_bytes,
    }
    assert device.records[0].shared_limit == shared_bytes
    assert device.launches == [
        (STREAM, [weight.data_ptr(), x.data_ptr(), width, out.data_ptr(), np.int32(tokens)])
    ]


BETWEEN = {
    "mla-front": ("norms", "bmm W_UK", "epilogue"),
    "kda-front": (),
    "mla-back": ("bmm W_UV", "gate"),
    "moe-front": ("norm", "SiTU"),
}
"""Window -> the kernels that are no products; the epilogue is one of two."""


@pytest.mark.parametrize("kind", WINDOWS)
def test_columns_differ_in_products_and_epilogue_alone(kind: str, device: FakeDevice) -> None:
    made = WINDOWS[kind](4, "cpu")
    weights = {name: torch.empty(shape, dtype=BF16) for name, shape in made.shapes.items()}
    launched: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    for column in COLUMNS:
        steps = made.steps(column)
        names[column] = [step.name for step in steps]
        launched[column] = []
        for step in steps:
            device.records.clear()
            step.run(weights)
            assert all(record.pdl for record in device.records)
            if step.name in BETWEEN[kind] and step.name != "epilogue":
                found = [(r.instance.name_expression, r.grid, r.arguments) for r in device.records]
                launched[column].append(found)
    assert names[CUBLAS] == names[STRUCTURE] == names[PLAN] == names[OURS]
    assert launched[CUBLAS] == launched[STRUCTURE] == launched[PLAN] == launched[OURS]
    assert len(made.shapes) + len(BETWEEN[kind]) == len(names[OURS]) + sum(
        name.startswith("bmm") for name in names[OURS]
    )


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_each_column_runs_what_it_is_named_for(tokens: int, device: FakeDevice) -> None:
    ran = {c: {s.name: s.ran for s in layers.mla_front(tokens, "cpu").steps(c)} for c in COLUMNS}
    q_a, q_b = "qkv_a 2112x7168", "q_b 2304x1536"
    assert {ran[CUBLAS][q_a], ran[CUBLAS][q_b]} == {"linear"}
    assert {ran[STRUCTURE][q_a], ran[STRUCTURE][q_b]} == {"fused_a" if tokens <= 16 else "linear"}
    for name, n, k in ((q_a, 2112, 7168), (q_b, 2304, 1536)):
        assert ran[PLAN][name] == str(public.planned(n, k, tokens))
        assert ran[OURS][name].split()[0] in ("skinny", "fused_a")
    assert ran[OURS]["epilogue"].startswith("mla_decode ")
    assert {ran[c]["epilogue"] for c in COLUMNS if c != OURS} == {"public structure"}


# --- What is measured ----------------------------------------------------------------------------


def small_window(step: Step) -> Window:
    """A window of one kernel, which is to double the first two of three rows."""
    want = torch.tensor([[2.0, 4.0], [6.0, 8.0], [float("nan")] * 2], dtype=torch.float64)
    return Window({}, lambda column: [step], {"out": step.out}, lambda weights: {"out": want})


def test_a_window_is_checked_row_by_row_and_where_nothing_belongs() -> None:
    out = torch.zeros(3, 2)

    def write(row: int, *values: float) -> Any:
        def run(weights: Any) -> None:
            out[:2] = torch.tensor([[2.0, 4.0], [6.0, 8.0]])
            out[row] = torch.tensor(values)

        return run

    right = Step("double", write(1, 6.0, 8.05), out)
    made = small_window(right)
    assert made.check([right], {}) is None
    wrong = [write(1, 6.0, 8.2), write(2, 1.0, 1.0), write(0, float("nan"), 4.0), lambda _: None]
    told = [made.check([right._replace(run=run)], {}) or "" for run in wrong]
    assert told[0] == "a row of out is off by 2.0%"
    assert set(told[1:]) == {"out is not written where it should be, and only there"}


def test_a_kernel_is_charged_with_what_the_window_takes_longer() -> None:
    steps = [Step(name, lambda _: None, torch.empty(0)) for name in ("a", "b")]
    found = window.prefixes(steps)
    assert {name: [s.name for s in some] for name, some in found.items()} == {
        "consumer": [],
        "a": ["a"],
        "b": ["a", "b"],
    }
    added = window.added({"consumer": 0.75, "a": 9.5, "b": 13.0})
    assert added == {"consumer": 0.75, "a": 8.75, "b": 3.5}
    assert window.total(added) == 13.0


def test_layers_take_turns_with_weights_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "COLD_BYTES", 3 * 2 * (64 * 256 + 4 * 16 * 8))
    pieces, cut = window.layers_of({"q_b": (64, 256), "w_uk": (4, 16, 8)}, "cpu")
    assert len(pieces) == len(cut) == 3
    for piece, weights in zip(pieces, cut, strict=True):
        assert weights["q_b"].data_ptr() == piece.data_ptr()
        assert weights["w_uk"].shape == (4, 16, 8)
        assert weights["w_uk"].data_ptr() == piece[64 * 256 :].data_ptr()
        assert float(weights["q_b"].float().std()) == pytest.approx(1 / 16, rel=0.05)


def entry(tokens: int, ours: float, kind: str = "kda-front") -> window.Entry:
    added = {"consumer": 1.0, "in_proj 6288x7168": 20.0}
    columns = {column: {**added, "f_b 1536x128": 4.0} for column in COLUMNS}
    columns[OURS] = {**added, "f_b 1536x128": ours - 21}
    return window.Entry(kind, tokens, 90_000_000, 20.0, columns, {OURS: {"f_b 1536x128": "skinny"}})


def test_the_remarks_say_how_far_ahead_of_the_public_structure() -> None:
    told = window.remarks([entry(1, 22.5), entry(16, 24.0), entry(64, 99.0)])
    assert told == [
        "kda-front, ours over the public structure, up to 16 tokens: geometric mean 0.930, "
        "worst 0.960.",
        "Slower than cuBLAS in 1 of 3: kda-front at B = 64 (3.960 x).",
        "Slower than the public structure in 1 of 3: kda-front at B = 64 (3.960 x).",
        "Slower than the public plan in 1 of 3: kda-front at B = 64 (3.960 x).",
    ]
    assert window.remarks([entry(64, 24.0)]) == [
        f"Slower than {other} in 0 of 1."
        for other in ("cuBLAS", "the public structure", "the public plan")
    ]


def test_a_floor_that_a_window_beats_is_reported_as_none() -> None:
    told = window.remarks([entry(64, 19.5), entry(1, 22.5)])
    assert told[-1] == "A floor that a window beats is none: kda-front at B = 64."


def test_the_command_line_knows_every_window() -> None:
    assert tuple(WINDOWS) == bench._WINDOWS


# --- On a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (2304, 1536), (1536, 128), (7168, 384)])
def test_the_comparison_kernel_computes_the_product(n: int, k: int, tokens: int) -> None:
    wide = torch.randn(tokens, k + 64, device="cuda", dtype=BF16)
    weight = torch.randn(n, k, device="cuda", dtype=BF16)
    for x in (wide[:, :k], wide[:, :k].contiguous()):
        out = torch.full((tokens + 1, n), float("nan"), device="cuda", dtype=BF16)
        public.fused_a(x, n, out[:tokens])(weight)
        want = x.double() @ weight.double().T
        off = (out[:tokens].double() - want).norm(dim=-1) / want.norm(dim=-1)
        assert float(off.max()) < 2.5e-3
        assert out[tokens].isnan().all(), "a row behind the last one"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", WINDOWS)
def test_every_column_of_a_window_is_right(kind: str, tokens: int) -> None:
    made = WINDOWS[kind](tokens)
    (weights, _) = window.layers_of(made.shapes)[1][:2]
    for column in COLUMNS:
        assert made.check(made.steps(column), weights) is None, column


@pytest.mark.gpu
def test_a_small_window_run_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "COLD_BYTES", 4 << 20)
    monkeypatch.setattr(window, "_LAYERS", 4)
    monkeypatch.setattr(cold, "COLD_BYTES", 4 << 20)
    (found,) = window.run(["mla-front"], [4])
    assert list(found.added_us) == list(COLUMNS)
    for added in found.added_us.values():
        assert next(iter(added)) == window.CONSUMER and len(added) == 6
        assert 0 < found.floor_us < 1000 and 0 < window.total(added) < 1000


@pytest.mark.gpu
def test_a_wrong_window_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers.kda_front(4)
    wrong = replace(made, steps=lambda column: made.steps(column)[:1])
    monkeypatch.setitem(WINDOWS, "kda-front", lambda tokens: wrong)
    with pytest.raises(RuntimeError, match="cublas: f_b is not written where it should be"):
        next(window.run(["kda-front"], [4]))
