"""Layers whose forward others keep, replace or watch: the right numbers, and a word."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_helpers import normal
from helpers import run_program
from torch import nn
from torch_linear_helpers import Calls, K, linear

import k3cupy
from k3cupy.torch.torch_linear import LowLatencyLinear

REPLACED = "its forward was replaced, by a wrapper or a hook: enable before that is done"
BOTH_ORDERS = pytest.mark.parametrize("enabled_first", [True, False], ids=["first", "after"])


@pytest.fixture
def layer() -> nn.Linear:
    return linear().requires_grad_(False)


@pytest.fixture
def x() -> torch.Tensor:
    return normal((3, K), 1)


def enable(module: nn.Module) -> str:
    """Enable a layer and return what the report says."""
    (row,) = k3cupy.enable_low_latency_gemm(module)
    (found,) = [each for each in module.modules() if isinstance(each, nn.Linear)]
    assert row.installed == (type(found) is LowLatencyLinear)
    return row.reason


# A forward that was kept


@pytest.mark.parametrize("again", [False, True])
def test_case35_a_forward_that_was_kept_outlives_disable(
    layer: nn.Linear, x: torch.Tensor, calls: Calls, again: bool
) -> None:
    """It runs ours while the layer is enabled, and the framework's while it is not."""
    k3cupy.enable_low_latency_gemm(layer)
    kept, want = layer.forward, F.linear(x, layer.weight)
    assert torch.equal(kept(x), want)
    k3cupy.disable_low_latency_gemm(layer)
    assert torch.equal(kept(x), want)
    assert len(calls) == 1
    if again:
        k3cupy.enable_low_latency_gemm(layer)
        assert torch.equal(kept(x), want)
        assert len(calls) == 2


def test_case35_a_kept_forward_of_a_layer_that_became_something_else(
    layer: nn.Linear, x: torch.Tensor
) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    k3cupy.enable_low_latency_gemm(layer)
    kept = layer.forward
    layer.__class__ = Doubled
    assert torch.equal(kept(x), F.linear(x, layer.weight))
    assert torch.equal(layer(x), 2 * F.linear(x, layer.weight))


# A forward that was replaced on the layer


def doubled(layer: nn.Linear) -> None:
    """A wrapper of the layer's own forward."""
    own = layer.forward
    layer.forward = functools.wraps(own)(lambda input: 2 * own(input))


def bound(layer: nn.Linear) -> None:
    """A method in place of the layer's own."""
    layer.forward = (lambda self, input: 2 * F.linear(input, self.weight)).__get__(layer)


@BOTH_ORDERS
@pytest.mark.parametrize("replace", [doubled, bound])
def test_case35_a_replaced_forward_is_called_and_reported(
    layer: nn.Linear,
    x: torch.Tensor,
    calls: Calls,
    replace: Callable[..., None],
    enabled_first: bool,
) -> None:
    """One that calls the layer's own forward calls ours; another is left alone."""
    want = 2 * F.linear(x, layer.weight)
    if enabled_first:
        assert enable(layer) != REPLACED
    replace(layer)
    assert torch.equal(layer(x), want)
    assert (enable(layer) == REPLACED) == (replace is bound)
    calls.clear()
    assert torch.equal(layer(x), want)
    assert len(calls) == (replace is doubled)
    k3cupy.disable_low_latency_gemm(layer)
    assert torch.equal(layer(x), want)
    assert len(calls) == (replace is doubled)


def test_case35_a_wrapper_that_came_later_runs_ours(
    layer: nn.Linear, x: torch.Tensor, calls: Calls
) -> None:
    k3cupy.enable_low_latency_gemm(layer)
    doubled(layer)
    assert torch.equal(layer(x), 2 * F.linear(x, layer.weight))
    assert len(calls) == 1


@BOTH_ORDERS
def test_a_forward_that_a_hook_left_behind_is_the_layers_own(
    layer: nn.Linear, x: torch.Tensor, calls: Calls, enabled_first: bool
) -> None:
    """Hooks that go put back what they found, on the layer itself."""
    if enabled_first:
        k3cupy.enable_low_latency_gemm(layer)
    layer.forward = layer.forward
    assert enable(layer) != REPLACED
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert len(calls) == 1
    k3cupy.disable_low_latency_gemm(layer)
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert len(calls) == 1


def test_a_forward_of_another_layer_is_a_replaced_one(layer: nn.Linear, x: torch.Tensor) -> None:
    """As a copy has it of a layer whose hooks have gone."""
    layer.forward = layer.forward
    twin = copy.deepcopy(layer)
    twin.forward = layer.forward
    assert enable(twin) == REPLACED


# PyTorch's linear, replaced for every layer


@BOTH_ORDERS
@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (nn.Linear, "forward", "nn.Linear.forward"),
        (F, "linear", "torch.nn.functional.linear"),
    ],
    ids=["forward", "F.linear"],
)
def test_case35_a_replacement_for_all_layers_is_not_bypassed(
    layer: nn.Linear,
    x: torch.Tensor,
    owner: Any,
    name: str,
    told: str,
    enabled_first: bool,
    calls: Calls,
) -> None:
    """As libraries that quantise, trace or count do it; without it, everything is as before."""
    own, want = getattr(owner, name), F.linear(x, layer.weight)
    if enabled_first:
        enable(layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, functools.wraps(own)(lambda *args: 2 * own(*args)))
        assert torch.equal(layer(x), 2 * want)
        says = f"{told} was replaced for all layers: that runs, and no kernel of ours"
        assert enable(layer) == says
        assert torch.equal(layer(x), 2 * want)
    assert calls == []
    enable(layer)
    assert torch.equal(layer(x), want)
    assert len(calls) == 1


def test_case35_a_replacement_for_all_layers_in_compiled_code(
    layer: nn.Linear, x: torch.Tensor
) -> None:
    enable(layer)
    own, want = nn.Linear.forward, F.linear(x, layer.weight)
    run = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(run(x), want)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, input: 2 * own(self, input))
        assert torch.equal(run(x), 2 * want)
    assert torch.equal(run(x), want)


def test_case35_a_replacement_that_was_there_before_us() -> None:
    program = """
import functools, torch
from torch import nn
own = nn.Linear.forward
nn.Linear.forward = functools.wraps(own)(lambda self, input: 2 * own(self, input))
import k3cupy
layer = nn.Linear(128, 48, bias=False, dtype=torch.bfloat16)
x = torch.ones(3, 128, dtype=torch.bfloat16)
for _ in range(2):
    print(k3cupy.enable_low_latency_gemm(layer)[""].reason)
    print(torch.equal(layer(x), own(layer, x) * 2), torch.equal(layer(x), own(layer, x)))
    nn.Linear.forward = own
"""
    assert run_program(program).splitlines() == [
        "nn.Linear.forward was replaced for all layers: that runs, and no kernel of ours",
        "True False",
        "on the CPU: framework linear until it moves to a GPU",
        "False True",
    ]


class Watching(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_case35_a_mode_that_watches_pytorchs_functions_sees_the_layer(
    layer: nn.Linear, x: torch.Tensor, calls: Calls
) -> None:
    enable(layer)
    with Watching() as mode:
        layer(x)
    assert F.linear in mode.seen
    assert calls == []
    with torch.device("cpu"):  # a mode too, which every program may have
        layer(x)
    assert len(calls) == 1


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = function(*args, **(kwargs or {}))
        return 2 * out if function is F.linear else out


def test_case35_a_mode_that_changes_pytorchs_linear_in_compiled_code(
    layer: nn.Linear, x: torch.Tensor
) -> None:
    enable(layer)

    @functools.partial(torch.compile, backend="eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        with Doubling():
            return layer(x)

    assert torch.equal(run(x), 2 * F.linear(x, layer.weight))


def test_fx_traces_the_frameworks_linear(layer: nn.Linear, x: torch.Tensor) -> None:
    enable(layer)
    traced = torch.fx.symbolic_trace(nn.Sequential(layer))
    assert torch.equal(traced(x), F.linear(x, layer.weight))
