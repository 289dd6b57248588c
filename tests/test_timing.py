"""What the tuner and the benchmarks share: products checked before they are timed, and graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.timing import cold, environment, graphs
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
    assert all(0 < us < 1000 for us in (*timer.cold([product.linear] * 2), *timer.hot([torch.abs])))


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
