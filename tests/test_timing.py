"""What the tuner and the benchmarks share: products checked before they are timed, and graphs."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_helpers import Small, on_no_gpu

from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.timing import benches, chain, cold, environment, graphs
from k3cupy.timing.decode_step import DecodeStep
from k3cupy.timing.prefill_step import PrefillStep
from k3cupy.timing.products import Product

BF16 = torch.bfloat16


def product_and_weight(device: str, *, residual: bool = False) -> tuple[Product, torch.Tensor]:
    product = Product(96, 256, 5, residual=residual, device=device)
    return product, torch.randn(96, 256, device=device, dtype=BF16)


def test_the_frameworks_product_is_right(device: str) -> None:
    product, weight = product_and_weight(device)
    assert product.check(lambda w: product.out.copy_(product.linear(w)), weight) is None


def test_the_frameworks_sum_is_right_but_for_a_second_rounding(device: str) -> None:
    """On a GPU it may round the product before it adds the residual."""
    product, weight = product_and_weight(device, residual=True)
    assert product.residual is not None
    want = product.x.double() @ weight.double().T + product.residual.double()
    off = product.linear(weight).double() - want
    assert float(off.norm() / want.norm()) < 5e-3


def test_the_strided_input_has_the_same_values(device: str) -> None:
    product, _ = product_and_weight(device)
    assert product.strided.stride() == (256 + 64, 1)
    assert torch.equal(product.strided, product.x)


def test_an_element_that_was_not_written_is_wrong(device: str) -> None:
    product, weight = product_and_weight(device)

    def almost(w: torch.Tensor) -> None:
        product.out[:, :-1] = product.linear(w)[:, :-1]

    assert product.check(almost, weight) == "an element is not finite"


@pytest.mark.parametrize("residual", [False, True])
def test_one_wrong_element_is_named(device: str, residual: bool) -> None:
    product, weight = product_and_weight(device, residual=residual)

    def slip(w: torch.Tensor) -> None:
        product.out.copy_(product.linear(w))
        product.out[3, 70] += 4

    assert (product.check(slip, weight) or "").startswith("element (3, 70) is ")


def test_a_residual_that_was_left_out_is_wrong(device: str) -> None:
    product, weight = product_and_weight(device, residual=True)
    wrong = product.check(lambda w: product.out.copy_(product.x @ w.T), weight)
    assert (wrong or "").startswith("element (")


def test_an_environment_has_what_a_number_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
    monkeypatch.setattr(devices, "info", lambda index: gpu)
    found = environment.describe(0, commit="0123")
    assert (found["gpu"], found["num_sms"], found["commit"]) == ("NVIDIA H200", 132, "0123")
    assert found["packages"]["numpy"] and found["date"]


def test_a_package_inside_somebodys_checkout_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_output", lambda *command: str(tmp_path))
    assert environment._commit() == "unknown"


@pytest.mark.gpu
def test_recorded_bodies_are_timed_again_and_again() -> None:
    weights = [torch.randn(96, 256, device="cuda", dtype=BF16) for _ in range(3)]
    product = Product(96, 256, 5)
    recorded = graphs.Recorded(cold.launches_of(weights))
    recorded.record("linear", graphs.in_turns(product.linear, weights))
    assert "linear" in recorded and "ours" not in recorded
    for effort in (graphs.Effort(rounds=1, replays=1, warm=0), graphs.Effort()):
        (us,) = recorded.measure(["linear"], effort)
        assert 0 < us < 1000
    timer = cold.Timer(weights, graphs.Effort(rounds=1))
    times = *timer.alone([product.linear] * 2), *timer.hot([torch.abs])
    assert all(0 < us < 1000 for us in times)
    for kinds in itertools.product(chain.KINDS, chain.KINDS):
        assert all(0 < us < 1000 for us in timer.added([product.linear], product.chain(*kinds)))


def test_sets_of_tensors_take_turns() -> None:
    met: list[str] = []
    body = graphs.in_turns(met.append, ["a", "b", "c"])
    for _ in range(4):
        body()
    assert met == ["a", "b", "c", "a"]


def test_a_graph_holds_every_weight() -> None:
    assert cold.launches_of([torch.empty(96, 256)] * 3) == 60
    assert cold.launches_of([torch.empty(96, 256)] * 700) == 700
    assert cold.launches_of([torch.empty(7168, 14336, device="meta")] * 2) == 16


def test_a_chain_is_producer_middle_consumer() -> None:
    met: list[str] = []
    link = chain.Chain(lambda: met.append("write"), lambda: met.append("read"))
    link.around(lambda: met.append("product"))()
    link.around()()
    assert met == ["write", "product", "read", "write", "read"]


def test_what_is_added_is_counted_from_the_chain_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each name from its own base; what hides behind its neighbours adds next to nothing, not 0."""
    us = {"base": 1.5, "other": 3.0, "a": 10.0, "b": 4.0, "hidden": 1.25}
    recorded = graphs.Recorded(60)
    asked: list[list[str]] = []

    def measure(names: list[str], effort: graphs.Effort) -> list[float]:
        asked.append(names)
        return [us[name] for name in names]

    monkeypatch.setattr(recorded, "measure", measure)
    names, bases = ["a", "b", "hidden"], ["base", "other", "base"]
    assert recorded.added(names, bases, graphs.Effort()) == [8.5, 1.0, 0.0001]
    assert asked == [["base", "other", "a", "b", "hidden"]], "in the same turns"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Small]:
    return on_no_gpu(monkeypatch)


@pytest.mark.parametrize(
    ("kind", "trigger"), [("end", "kEnd"), ("early", "kEarly"), ("none", "kNone")]
)
def test_the_ends_of_a_chain(kind: str, trigger: str, launches: list[Small]) -> None:
    """A chunk a thread of the rows of x, wherever they lie; a block an SM that reads the output."""
    product = Product(96, 256, 5, row_width=640, offset=64, device="cpu")
    product.chain(kind, kind, x=product.strided).around()()
    (wrote, grid, pdl, arguments), (read, readers, _, of) = launches
    assert wrote == f"k3cupy::write_rows<k3cupy::Trigger::{trigger}>"
    assert read == f"k3cupy::read_all<k3cupy::Trigger::{trigger}>"
    assert (grid, readers, pdl) == (1, 132, True)
    assert arguments[1:] == [5 * 256 // 8, 256 // 8, product.strided.data_ptr(), 2 * 640]
    assert of[:2] == [product.out.data_ptr(), 5 * 96 // 8]


def test_a_product_may_come_before_and_behind(launches: list[Small]) -> None:
    product = Product(96, 256, 5, device="cpu")
    before = product.x.clone()
    product.out.zero_()
    product.chain("gemm", "gemm").around()()
    assert not launches
    assert product.x.isfinite().all() and not torch.equal(product.x, before)


def test_a_neighbour_touches_a_part_of_what_is_large(launches: list[Small]) -> None:
    """It is there for the place: a long prompt's neighbours would hide what stands between them."""
    large = torch.empty(40_000, 4, 192, device="cpu", dtype=BF16)
    chain.consumer_of(large)()
    assert launches[0].arguments[1] <= (8 << 20) // 16 < large.numel() // 8


def test_a_neighbour_that_does_not_exist_is_refused(launches: list[Small]) -> None:
    with pytest.raises(ValueError, match="kind: expected one of end, early, none, gemm, got 'x'"):
        chain.consumer_of(torch.empty(2, 8, dtype=BF16), "x")


def test_a_tuners_graphs_are_short_and_their_weights_as_cold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many small weights some that lie far apart, and something that empties L2 before them."""
    monkeypatch.setattr(cold, "COLD_BYTES", 1 << 20)
    small = cold.weights_of(16, 128, torch.zeros(1 << 19))
    few, launches, first = cold.in_short(small)
    assert (len(small), len(few), launches) == (256, 52, 52)
    assert few[1] is small[5] and first is not None
    first()
    large = [torch.empty(7168, 1536, device="meta")] * 14
    few, launches, first = cold.in_short(large)
    assert (few, launches, first) == (large, 32, None)


def test_a_last_mark_behind_a_break_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stopped between the last replay and its mark: the GPU had ended long before."""
    made: list[Event] = []
    held: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            made.append(self)
            self.place = len(made)

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return self.place == 4 and not held

        def elapsed_time(self, other: Event) -> float:
            return 1.0 if held else 100.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", held.append, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graph: Any = SimpleNamespace(replay=lambda: None)
    assert graphs.measure([graph], 10, rounds=1, replays=3) == [100.0]
    assert len(held) == 1


@pytest.mark.parametrize("late", [0, 2, 100])
def test_a_replay_that_waited_for_the_host_is_not_counted(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is held back for longer, until the host has queued all; once and for all at last."""
    held: list[int] = []
    clock = itertools.count()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def query(self) -> bool:
            return len(held) <= late

        def elapsed_time(self, other: Event) -> float:
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", held.append, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graph: Any = SimpleNamespace(replay=lambda: None)
    assert graphs.measure([graph], 10, rounds=1, replays=3) == [100.0]
    assert len(held) == min(late, 3) + 1
    assert held == [held[0] * 4**i for i in range(len(held))]


def test_the_tuner_times_a_product_in_its_chain(
    launches: list[Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(benches, "Product", functools.partial(Product, device="cpu"))
    bench = benches.GemmBench(64, 128, 3, True, torch.randn(1 << 19).to(BF16))
    assert bench.first is not None and bench.launches == 32
    bench.base()()
    bench.body("linear", None)()
    assert ["write_rows" in each.name for each in launches] == [True, False] * 2
    assert bench.check("skinny", SkinnyGemmConfig(3, 32, 2, 1, 8)) is None
    bench.body("skinny", SkinnyGemmConfig(3, 32, 2, 1, 8))()
    assert len(launches) == 6


@pytest.mark.parametrize("family", ["mla_decode", "mla_prefill"])
def test_the_tuner_times_an_epilogue_in_its_chain(
    family: str, launches: list[Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benches, "PrefillStep", functools.partial(PrefillStep, device="cpu"))
    monkeypatch.setattr(DecodeStep, "run", lambda *_: None)
    monkeypatch.setattr(PrefillStep, "run", lambda *_: None)
    bench: Any
    if family == "mla_decode":
        bench = benches.StepBench(DecodeStep("16bit+same", 3, 2, device="cpu"))
    else:
        bench = benches.PrefillBench("fused_mla_kv_concat", 3, 2)
    before = 0 if family == "mla_decode" else 1
    for body in (bench.base(), bench.body(family, None)):
        launches.clear()
        body()
        assert len(launches) == before + 1, "the model's own product stands before decode"
        assert "read_all" in launches[-1].name
