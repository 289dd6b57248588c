"""Layers that others wrap, patch, shard, offload or merge into: the right numbers, and a word."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_helpers import normal
from helpers import run_program
from torch import nn
from torch_linear_helpers import Calls, K, N, linear

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
    layer: nn.Linear, x: torch.Tensor, replace: Callable[..., None], enabled_first: bool
) -> None:
    want = 2 * F.linear(x, layer.weight)
    if enabled_first:
        assert enable(layer) != REPLACED
    replace(layer)
    assert torch.equal(layer(x), want)
    assert enable(layer) == REPLACED
    assert torch.equal(layer(x), want)
    k3cupy.disable_low_latency_gemm(layer)
    assert torch.equal(layer(x), want)


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
    torch._dynamo.reset()
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
    torch._dynamo.reset()
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


# Sharded models


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def two_layers() -> nn.Sequential:
    return nn.Sequential(linear(), linear(16, N)).requires_grad_(False)


def sharded_whole(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh)


def sharded_by_layer(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in list(model):
        sharded_whole(layer, mesh)
    return sharded_whole(model, mesh)


def parallelized(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


A_DTENSOR = "its weight is a DTensor, not a plain tensor"
SHARDED = {
    "whole": (sharded_whole, A_DTENSOR),
    "by layer": (sharded_by_layer, "it is a FSDP"),
    "parallel": (parallelized, A_DTENSOR),
}


@BOTH_ORDERS
@pytest.mark.parametrize(("shard", "reason"), SHARDED.values(), ids=SHARDED.keys())
def test_case50_sharded_models_are_right_and_say_why_they_are_left_alone(
    mesh: Any, x: torch.Tensor, calls: Calls, shard: Any, reason: str, enabled_first: bool
) -> None:
    model = two_layers()
    want = model(x)
    if enabled_first:
        assert k3cupy.enable_low_latency_gemm(model).installed == 2
        assert torch.equal(model(x), want)
    model = shard(model, mesh)
    if enabled_first:
        for _ in range(2):
            assert torch.equal(model(x), want)
        if shard is sharded_whole:
            model.reshard()
    report = k3cupy.enable_low_latency_gemm(model)
    assert report.installed == 0
    assert all(row.reason.startswith(reason) for row in report), report
    for change in (lambda _: None, k3cupy.disable_low_latency_gemm):
        change(model)
        assert torch.equal(model(x), want)


@BOTH_ORDERS
def test_case50_a_weight_that_is_gathered_for_each_call_is_never_promised(
    mesh: Any, x: torch.Tensor, calls: Calls, enabled_first: bool
) -> None:
    """FSDP writes it behind PyTorch's back, right before the layer reads it."""
    model = two_layers()
    want = model(x)
    if enabled_first:
        k3cupy.enable_low_latency_gemm(model)
    model = sharded_whole(model, mesh)
    if not enabled_first:
        model.unshard()
        assert k3cupy.enable_low_latency_gemm(model).installed == 2
    for _ in range(3):
        assert torch.equal(model(x), want)
        model.reshard()
    assert calls.promises == [False] * 6


def test_case50_compiled_a_gathered_weight_is_never_promised(
    mesh: Any, x: torch.Tensor, calls: Calls
) -> None:
    torch._dynamo.reset()
    model = two_layers()
    want = model(x)
    k3cupy.enable_low_latency_gemm(model)
    model = torch.compile(sharded_whole(model, mesh), backend="eager")
    for _ in range(2):
        assert torch.equal(model(x), want)
    assert calls.promises == [False] * 4


def test_case50_distributed_layers(mesh: Any, x: torch.Tensor) -> None:
    from torch.distributed.tensor import distribute_module, distribute_tensor

    assert enable(distribute_module(linear(), mesh)) == A_DTENSOR
    model = two_layers()
    want = model(x)
    k3cupy.enable_low_latency_gemm(model)
    distributed = distribute_module(copy.deepcopy(model), mesh)
    assert torch.equal(distributed(distribute_tensor(x, mesh)).to_local(), want)


# Weights that come and go


class Offloaded:
    """As accelerate offloads a layer: its weight is on the meta device but for a call's length."""

    def __init__(self, layer: nn.Linear) -> None:
        self.state, self.layer = layer.weight.detach().clone(), layer
        self.own = layer.forward
        layer.forward = functools.update_wrapper(functools.partial(self.forward), self.own)
        self.unload()

    def unload(self) -> None:
        meta = self.state.to("meta")
        self.layer._parameters["weight"] = nn.Parameter(meta, requires_grad=False)

    def load(self) -> None:
        copied = self.state.clone()
        self.layer._parameters["weight"] = nn.Parameter(copied, requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.load()
        try:
            return self.own(*args, **kwargs)
        finally:
            self.unload()

    def remove(self) -> None:
        self.load()
        self.layer.forward = self.own


class Accelerated:
    """The library itself."""

    def __init__(self, layer: nn.Linear) -> None:
        self.hooks = pytest.importorskip("accelerate.hooks")
        self.layer = layer
        hook = self.hooks.AlignDevicesHook(execution_device="cpu", offload=True)
        self.hooks.add_hook_to_module(layer, hook)

    def remove(self) -> None:
        self.hooks.remove_hook_from_module(self.layer)


@BOTH_ORDERS
@pytest.mark.parametrize("offload", [Offloaded, Accelerated])
def test_case50_offloaded_layers(
    layer: nn.Linear, x: torch.Tensor, calls: Calls, offload: Any, enabled_first: bool
) -> None:
    """Enabled before it was offloaded it runs ours; every call has a new weight, unpromised."""
    want = F.linear(x, layer.weight)
    if enabled_first:
        enable(layer)
    offloaded = offload(layer)
    for _ in range(3):
        assert torch.equal(layer(x), want)
    assert calls.promises == [False] * 3 * enabled_first
    assert enable(layer) == REPLACED
    assert torch.equal(layer(x), want)
    offloaded.remove()
    calls.clear()
    assert enable(layer) == "on the CPU: framework linear until it moves to a GPU"
    for _ in range(2):
        assert torch.equal(layer(x), want)
    assert calls.promises == [False, True]


class LoraLinear(nn.Module):
    """As PEFT wraps a layer: a product of low rank beside it, or merged into its weight."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = linear(8, K).requires_grad_(False)
        self.lora_B = linear(N, 8).requires_grad_(False)
        self.merged = False

    def delta(self) -> torch.Tensor:
        return self.lora_B.weight @ self.lora_A.weight

    def merge(self, write: Callable[..., Any], sign: int = 1) -> None:
        write(self.base_layer.weight, self.delta() * sign)
        self.merged = sign > 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        return out if self.merged else out + self.lora_B(self.lora_A(x))


def through_data(weight: torch.Tensor, delta: torch.Tensor) -> None:
    weight.data += delta


def new_data(weight: torch.Tensor, delta: torch.Tensor) -> None:
    weight.data = weight.data + delta


@BOTH_ORDERS
@pytest.mark.parametrize("write", [torch.Tensor.add_, through_data, new_data])
def test_case50_lora_merged_and_unmerged(
    layer: nn.Linear, x: torch.Tensor, calls: Calls, write: Any, enabled_first: bool
) -> None:
    if enabled_first:
        enable(layer)
    model = LoraLinear(layer)
    report = k3cupy.enable_low_latency_gemm(model)
    assert [row.name for row in report] == ["base_layer", "lora_A", "lora_B"]
    assert report.installed == 3
    base, apart = layer.weight.clone(), model(x)
    for _ in range(2):
        assert torch.equal(model(x), apart)
        model.merge(write)
        assert torch.equal(model(x), F.linear(x, base + model.delta()))
        model.merge(write, -1)
        with torch.no_grad():
            layer.weight.copy_(base)  # what was added and taken away is rounded
    counted = [call["weight_is_static"] for call in calls if call["weight"] is layer.weight]
    # Writes through `data` are not counted; the loop's own ones are.
    assert counted[0] is False
    if write is not through_data:
        assert counted == [False, True, False, False, False]
