"""What products are compared with, and windows of a layer; their values need a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bench_helpers import Small, on_no_gpu, timed_as
from fake_device import H200, STREAM, FakeDevice
from helpers import BF16

from k3cupy.bench import layers, public, window
from k3cupy.bench import step as steps_of_attention
from k3cupy.bench.layers import (
    COLUMNS,
    CUBLAS,
    FEWER,
    OURS,
    PLAN,
    STRUCTURE,
    WINDOWS,
    WITH_FEWER,
    Step,
    Weights,
    Window,
)
from k3cupy.call.choice import PUBLIC
from k3cupy.cli import bench
from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig
from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig
from k3cupy.runtime import instances
from k3cupy.timing import cold
from k3cupy.tuning.entries import LINEAR, Candidate

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
def device(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    stream = type("Stream", (), {"cuda_stream": STREAM})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return fake_device


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
    "mla-front": ("norms", "W_UK", "epilogue"),
    "kda-front": (),
    "mla-back": ("W_UV", "gate"),
    "moe-front": ("norm", "SiTU"),
}
"""Window -> the kernels that are no products; the epilogue is one of two."""


@pytest.mark.parametrize("kind", WINDOWS)
def test_columns_differ_in_products_and_ours_around_them(kind: str, device: FakeDevice) -> None:
    made = WINDOWS[kind](4, "cpu")
    weights = {name: torch.empty(shape, dtype=BF16) for name, shape in made.shapes.items()}
    launched: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    for column in COLUMNS:
        steps = made.steps(column, None)
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
    assert launched[CUBLAS] == launched[STRUCTURE] == launched[PLAN]
    if kind == "mla-front":
        (norms,), (absorbed,) = launched[OURS]
        assert "q_kv_rms_norms<" in norms[0] and "head_product<" in absorbed[0]
    else:
        assert launched[OURS] == launched[CUBLAS]
    assert len(made.shapes) + len(BETWEEN[kind]) == len(names[OURS]) + sum(
        name.startswith("W_") for name in names[OURS]
    )


@pytest.mark.parametrize(
    ("kind", "tokens", "name", "kernel"),
    [
        ("mla-front", 4, "query", "mla_decode_query<"),
        ("mla-front", 16, "query", "mla_decode_query<"),
        ("mla-back", 64, "value", "head_product<"),
    ],
)
def test_around_attention_ours_are_also_in_fewer_launches(
    kind: str, tokens: int, name: str, kernel: str, device: FakeDevice
) -> None:
    made = WINDOWS[kind](tokens, "cpu")
    assert made.columns == WITH_FEWER
    weights = {name: torch.empty(shape, dtype=BF16) for name, shape in made.shapes.items()}
    ran = {}
    for step in made.steps(FEWER, None):
        device.records.clear()
        step.run(weights)
        (record,) = device.records
        assert record.pdl
        ran[step.name.split()[0]] = record.instance.name_expression
    assert set(ran) == {name, {"query": "qkv_a", "value": "o_proj"}[name]}
    assert kernel in ran[name]


def test_beyond_its_limit_the_query_front_is_told_to_be_separate(device: FakeDevice) -> None:
    _, query = layers.mla_front(64, "cpu").steps(FEWER, None)
    assert query.ran == "separate"


FEW_STAGES = Candidate("fused_a", FusedAGemmConfig(8, 16, 512, 4, 4, 8, 1, 1, 2))


@pytest.mark.parametrize("kind", ["mla-front", "mla-back"])
def test_fewer_launches_compute_the_window(kind: str) -> None:
    """On the CPU, where each operation is its reference; the candidate makes no difference."""
    made = WINDOWS[kind](2, "cpu")
    (weights,) = window.layers_of(made.shapes, "cpu", 1)[1]
    assert made.check(made.steps(FEWER, FEW_STAGES), weights) is None


def test_a_window_tries_what_tables_list_and_fewer_stages(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(instances, "load_all", lambda wanted, _: loaded.extend(wanted))
    for tokens in (1, 8, 16):
        loaded.clear()
        found = window.candidates_of(layers.mla_front(tokens, "cpu"), tokens)
        assert len(found) == len(set(found)) == len(loaded)
        assert {candidate.kernel for candidate in found} == {"fused_a", "skinny"}
        fused = [candidate.config for candidate in found if candidate.kernel == "fused_a"]
        assert all(config.fits(tokens, H200) for config in fused)
        listed = [config for config in fused if config.stages > max(window._FEW_STAGES)]
        fewer = {replace(c, stages=3, stages_x=min(3, c.stages_x)) for c in listed}
        assert fewer and {config for config in fewer if config.fits(tokens, H200)} <= set(fused)
    assert window.candidates_of(layers.mla_back(1, "cpu"), 1) == ()


def test_the_best_candidate_in_the_window_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = on_no_gpu(monkeypatch)
    timed_as(monkeypatch, launches, lambda names: float(names[0]))
    out = torch.zeros(2, 8, dtype=BF16)

    def steps(column: str, candidate: Candidate | None) -> list[Step]:
        assert column == FEWER and candidate is not None
        us, value = candidate.config

        def run(_: Weights) -> None:
            launches.append(Small(str(us), 1, True, []))
            out.fill_(value)

        return [Step("a", run, out, str(us))]

    want = torch.ones(2, 8, dtype=torch.float64)
    made = Window({}, steps, {"out": out}, lambda weights: {"out": want}, tried="a")
    given = [Candidate("fused_a", (us, 1.0)) for us in (9.5, 7.25, 8.0)]
    monkeypatch.setattr(Candidate, "__str__", lambda self: f"us {self.config[0]}")
    (step,), times = window.fastest_of(made, given, [{}])
    assert step.ran == "7.25" and times == {"us 9.5": 9.5, "us 7.25": 7.25, "us 8.0": 8.0}
    with pytest.raises(RuntimeError, match=r"us 6.0 for a: a row of out is off by .*, not timed"):
        window.fastest_of(made, [*given, Candidate("fused_a", (6.0, 2.0))], [{}])


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_each_column_runs_what_it_is_named_for(tokens: int, device: FakeDevice) -> None:
    made = layers.mla_front(tokens, "cpu")
    ran = {c: {each.name: each.ran for each in made.steps(c, None)} for c in COLUMNS}
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
    return Window({}, lambda column, _: [step], {"out": step.out}, lambda weights: {"out": want})


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


def test_the_remarks_say_what_fewer_launches_are_worth() -> None:
    found = []
    for tokens, us in ((1, 12.0), (4, 15.0)):
        added = {column: {"consumer": 1.0, "a": us, "b": 4.0} for column in COLUMNS}
        added |= {PLAN: {"consumer": 1.0, "a": us, "b": 3.0}, FEWER: {"consumer": 1.0, "c": us}}
        found.append(replace(entry(tokens, 22.5, "mla-back"), added_us=added))
    told = [line for line in window.remarks(found) if "fewer launches" in line]
    assert told == [
        "mla-back in fewer launches, over the public structure: 0.765 at B = 1, 0.800 at B = 4.",
        "mla-back in fewer launches, over the public plan: 0.812 at B = 1, 0.842 at B = 4.",
        "mla-back in fewer launches, over ours, separate: 0.765 at B = 1, 0.800 at B = 4.",
        "mla-back in fewer launches, over the best of the other columns: 0.812 at B = 1, 0.842 at "
        "B = 4; without the consumer 0.800 at B = 1, 0.833 at B = 4.",
    ]


def test_the_command_line_knows_every_window_and_step() -> None:
    assert tuple(WINDOWS) == bench._WINDOWS
    assert steps_of_attention.KINDS == bench._STEPS


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
    for column in made.columns:
        assert made.check(made.steps(column, None), weights) is None, column


@pytest.mark.gpu
def test_a_small_window_run_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "COLD_BYTES", 4 << 20)
    monkeypatch.setattr(window, "_LAYERS", 4)
    monkeypatch.setattr(cold, "COLD_BYTES", 4 << 20)
    (found,) = window.run(["mla-front"], [4], [FEW_STAGES])
    assert list(found.added_us) == list(WITH_FEWER)
    for column, added in found.added_us.items():
        assert next(iter(added)) == window.CONSUMER and len(added) == (3 if column == FEWER else 6)
        assert 0 < found.floor_us < 1000 and 0 < window.total(added) < 1000


@pytest.mark.gpu
def test_a_wrong_window_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers.kda_front(4)
    wrong = replace(made, steps=lambda column, _: made.steps(column, None)[:1])
    monkeypatch.setitem(WINDOWS, "kda-front", lambda tokens: wrong)
    with pytest.raises(RuntimeError, match="cublas: f_b is not written where it should be"):
        next(window.run(["kda-front"], [4]))
