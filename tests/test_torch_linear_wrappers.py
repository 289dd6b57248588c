"""Whatever is put around linear layers, before they are enabled and after: the same numbers.

Each wrapper goes around two models of the same weights, one of which is enabled, in either order.
Both compute the same, with weights that are written later too, and the report says what is served.
"""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_helpers import normal
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch_linear_helpers import Calls, K, N, linear

import k3cupy
from k3cupy.torch.torch_linear import LowLatencyLinear

BOTH_ORDERS = pytest.mark.parametrize("enabled_first", [True, False], ids=["first", "after"])
ON_CPU = "on the CPU: framework linear until it moves to a GPU"
ON_META = "on the meta device: framework linear until it has values on a GPU"
REPLACED = "its forward was replaced, by a wrapper or a hook: enable before that is done"
ADAPTED = "an adapter may be merged into its weight, for which each call waits"


class Tied(nn.Module):
    """Three layers, the last of which has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, K, dtype=torch.bfloat16)
        self.up, self.down, self.head = linear(), linear(K, N), linear(32, K)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embedding(tokens))))


TOKENS = torch.tensor([3, 1, 4, 1, 5])


def made() -> nn.Module:
    torch.manual_seed(7)
    return Tied()


def each(wrap: Callable[[nn.Linear], nn.Module | None]) -> Callable[[nn.Module], nn.Module]:
    """Wrap two of the layers in place, or put what comes back there."""

    def around(model: nn.Module) -> nn.Module:
        torch.manual_seed(11)
        for name in ("up", "down"):
            found = wrap(model.get_submodule(name))
            if found is not None:
                setattr(model, name, found)
        return model

    return around


# Forwards in the place of the layer's own


class Hook:
    """As accelerate puts one on a layer; it may keep the weight elsewhere between the calls."""

    def __init__(self, layer: nn.Linear, offload: bool) -> None:
        self.execution_device, self.offload, self.weight = "cpu", offload, layer.weight
        layer._old_forward, layer._hf_hook = layer.forward, self

        def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            module._hf_hook.load(module)
            out = module._old_forward(*args, **kwargs)
            module._hf_hook.unload(module)
            return out

        layer.forward = functools.update_wrapper(
            functools.partial(new_forward, layer), layer._old_forward
        )
        self.unload(layer)

    def unload(self, layer: nn.Module) -> None:
        if self.offload:
            layer._parameters["weight"] = nn.Parameter(self.weight.detach().to("meta"))

    def load(self, layer: nn.Module) -> None:
        if self.offload:
            layer._parameters["weight"] = nn.Parameter(self.weight.detach().clone())


def hooked(layer: nn.Linear, offload: bool = False) -> None:
    Hook(layer, offload)


def closed_over(layer: nn.Linear) -> None:
    """As tensor parallelism in transformers puts it on a layer: its own forward in a closure."""
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return 2 * own(*args, **kwargs)

    layer.forward = forward


def closed_over_and_hooked(layer: nn.Linear) -> None:
    closed_over(layer)
    hooked(layer)


def computed_anew(layer: nn.Linear) -> None:
    layer.forward = (lambda self, input: 2 * F.linear(input, self.weight)).__get__(layer)


# Other weights, other classes


class LoraLinear(nn.Module):
    """As PEFT wraps a layer: a product of low rank beside it, or merged into its weight."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = linear(8, base.in_features), linear(base.out_features, 8)
        self.merged = False

    def delta(self) -> torch.Tensor:
        return self.lora_B.weight @ self.lora_A.weight

    def merge(self, write: Callable[..., Any], sign: int = 1) -> None:
        write(self.base_layer.weight, self.delta() * sign)
        self.merged = sign > 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        return out if self.merged else out + self.lora_B(self.lora_A(x))


class Packed(nn.Parameter):
    """As bitsandbytes replaces a weight: a parameter that the product unpacks."""

    def __new__(cls, weight: torch.Tensor) -> Packed:
        return torch.Tensor._make_subclass(cls, weight.detach() / 4, False)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.linear:
                args = (args[0], args[1].as_subclass(torch.Tensor) * 4)
            return function(*args, **(kwargs or {}))


def packed(layer: nn.Linear) -> None:
    layer.weight = Packed(layer.weight)


class Replicas(nn.Module):
    """As DataParallel computes on several GPUs: replicas whose weights are no parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        replica = copy.copy(self.module)
        replica._modules = {}
        for name, child in self.module.named_children():
            twin = child._replicate_for_data_parallel()
            twin.weight = child.weight * 1
            if isinstance(child, nn.Linear):
                twin._parameters["bias"] = None
            replica._modules[name] = twin
        return replica(tokens)


class Functional(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = {name: p * 2 for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, weights, (tokens,))


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=True)


def compiled_in_place(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    model.compile(backend="eager", fullgraph=True)
    return model


def emptied(model: nn.Module, assign: bool) -> nn.Module:
    state = copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state, assign=assign)
    if assign:
        model.head.weight = model.embedding.weight
    return model


@dataclass(frozen=True)
class Wrapper:
    """What is put around a model.

    Attributes:
        around: puts it there.
        served: how many of the model's three layers come to our dispatcher in a call, enabled
            before and after.
        told: of the layers in it, once it is there: what the report says after where they are.
        alone: they are left alone, and that is why.
        trains: gradients are compared.
    """

    around: Callable[[nn.Module], nn.Module]
    served: tuple[int, int] = (3, 3)
    told: str = ""
    alone: str = ""
    trains: bool = True


HERE = f"called by the forward that {__name__} put on it"
PARAMETRIZED = "its weight is parametrized: it is computed anew on each call"
COMPUTED = "its weight is no parameter: a hook computes it, by pruning or weight norm"
WRAPPERS: dict[str, Wrapper] = {
    "nothing": Wrapper(lambda model: model),
    "hook": Wrapper(each(hooked), told=HERE),
    "closure": Wrapper(each(closed_over), told=HERE),
    "hook over closure": Wrapper(each(closed_over_and_hooked), told=HERE),
    "method": Wrapper(each(computed_anew), (1, 1), alone=REPLACED),
    "LoRA": Wrapper(each(LoraLinear), (3, 7), told=ADAPTED),
    "weight_norm": Wrapper(each(parametrizations.weight_norm), (1, 1), alone=PARAMETRIZED),
    "spectral_norm": Wrapper(each(parametrizations.spectral_norm), (1, 1), alone=PARAMETRIZED),
    "old weight_norm": Wrapper(each(nn.utils.weight_norm), (1, 1), alone=COMPUTED),
    "old spectral_norm": Wrapper(each(nn.utils.spectral_norm), (1, 1), alone=COMPUTED),
    "pruned": Wrapper(
        each(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)), (1, 1), alone=COMPUTED
    ),
    "packed": Wrapper(
        each(packed), (1, 1), alone="its weight is a Packed, not a plain tensor", trains=False
    ),
    "DataParallel": Wrapper(nn.DataParallel),
    "replicas": Wrapper(Replicas, (0, 0)),
    "functional_call": Wrapper(Functional),
    "torch.compile": Wrapper(compiled),
    "Module.compile": Wrapper(compiled_in_place),
    "deepcopy": Wrapper(copy.deepcopy),
    "pickle": Wrapper(lambda model: pickle.loads(pickle.dumps(model))),
    "to": Wrapper(lambda model: model.double().bfloat16()),
    "to_empty": Wrapper(functools.partial(emptied, assign=False)),
    "to_empty, assign": Wrapper(functools.partial(emptied, assign=True)),
}


def wrapped(around: Callable[[nn.Module], nn.Module], enabled_first: bool | None) -> nn.Module:
    """A model with something around it, enabled before, after, or (None) never."""
    model = made()
    if enabled_first:
        assert k3cupy.enable_low_latency_gemm(model).installed == 3
    model = around(model)
    if enabled_first is False:
        k3cupy.enable_low_latency_gemm(model)
    return model


def layers_of(report: Any) -> dict[str, Any]:
    """The rows of the two layers that are wrapped, by their short names."""
    rows = {row.name: row for row in report if not row.name.endswith(("lora_A", "lora_B"))}
    return {name: next(r for full, r in rows.items() if name in full) for name in ("up", "down")}


@BOTH_ORDERS
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_in_either_order(name: str, enabled_first: bool, calls: Calls) -> None:
    wrapper = WRAPPERS[name]
    plain, mine = (wrapped(wrapper.around, first) for first in (None, enabled_first))
    with torch.no_grad():
        for _ in range(2):
            calls.clear()
            assert torch.equal(mine(TOKENS), plain(TOKENS))
            assert len(calls) == wrapper.served[not enabled_first]
        for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            for each_of in (ours, theirs):
                each_of.mul_(-2)
        calls.clear()
        want = plain(TOKENS)
        assert torch.equal(mine(TOKENS), want)
        # Right behind a write; but one weight may be read by two.
        assert not any(calls.promises)
    rows = layers_of(k3cupy.enable_low_latency_gemm(mine))
    for row in rows.values():
        assert row.installed == (not wrapper.alone)
        assert row.reason == (wrapper.alone or "; ".join(filter(None, [ON_CPU, wrapper.told])))
    if wrapper.trains:
        for model in (mine, plain):
            model(TOKENS).float().square().sum().backward()
        for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    calls.clear()
    k3cupy.disable_low_latency_gemm(mine)
    assert not any(type(module) is LowLatencyLinear for module in mine.modules())
    with torch.no_grad():
        assert torch.equal(mine(TOKENS), plain(TOKENS) if wrapper.trains else want)
    assert calls == []


@pytest.mark.parametrize("name", ["hook", "closure", "hook over closure"])
def test_disable_puts_back_what_wrappers_kept(name: str) -> None:
    model = WRAPPERS[name].around(made())
    before = {at: dict(vars(layer)) for at, layer in model.named_modules()}
    kept = [cell.cell_contents for cell in getattr(model.up.forward, "__closure__", None) or ()]
    k3cupy.enable_low_latency_gemm(model)
    k3cupy.disable_low_latency_gemm(model)
    assert {at: dict(vars(layer)) for at, layer in model.named_modules()} == before
    now = getattr(model.up.forward, "__closure__", None) or ()
    assert [cell.cell_contents for cell in now] == kept


@pytest.mark.parametrize("partly", [False, True])
def test_a_forward_that_is_kept_but_not_called_is_no_wrapper(partly: bool) -> None:
    """What accelerate's hooks would call lies there, and another forward stands before it."""
    layer = linear()
    layer._old_forward = layer.forward
    computed_anew(layer)
    if partly:
        layer.forward = functools.partial(F.linear, weight=layer.weight)
    assert k3cupy.enable_low_latency_gemm(layer)[""].reason == REPLACED
    assert layer._old_forward.__func__ is nn.Linear.forward


def test_an_empty_cell_in_a_closure_is_passed_over() -> None:
    layer, late = linear(), None

    def forward(input: torch.Tensor) -> torch.Tensor:
        return late(input)

    del late
    layer.forward = forward
    assert k3cupy.enable_low_latency_gemm(layer)[""].reason == REPLACED
    late = None


def test_dynamic_quantization_and_enabled_layers() -> None:
    """It looks for the exact class: it takes plain layers, and passes over enabled ones."""
    x, layers = torch.ones(2, K), {nn.Linear}
    quantize = torch.ao.quantization.quantize_dynamic
    with pytest.warns(DeprecationWarning):
        model = quantize(nn.Sequential(linear(dtype=torch.float32)), layers)
    (row,) = k3cupy.enable_low_latency_gemm(model)
    assert row.reason.startswith("it is a Linear of torch.ao.nn.quantized.dynamic")
    assert model(x).shape == (2, N)
    model = nn.Sequential(linear())
    k3cupy.enable_low_latency_gemm(model)
    with pytest.warns(DeprecationWarning):
        model = quantize(model, layers)
    assert type(model[0]) is LowLatencyLinear
    assert torch.equal(model(x.bfloat16()), F.linear(x.bfloat16(), model[0].weight))


# Weights on the meta device, offloaded


def test_layers_on_the_meta_device_are_enabled_until_they_have_values(calls: Calls) -> None:
    with torch.device("meta"):
        model = made()
    report = k3cupy.enable_low_latency_gemm(model)
    assert {row.reason for row in report} == {ON_META}
    assert [row.device for row in report] == ["meta"] * 3
    plain = made()
    model.load_state_dict(plain.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain(TOKENS))
    assert calls.promises == [False] * 3


@BOTH_ORDERS
def test_case50_offloaded_layers(enabled_first: bool, calls: Calls) -> None:
    """Every call has a new weight, unpromised; outside of calls it is on the meta device."""
    plain, offload = made(), each(functools.partial(hooked, offload=True))
    mine = wrapped(offload, enabled_first)
    with torch.no_grad():
        for _ in range(2):
            calls.clear()
            assert torch.equal(mine(TOKENS), plain(TOKENS))
            assert len(calls) == 3
            assert calls.promises[:2] == [False, False]
    row = k3cupy.enable_low_latency_gemm(mine)["up"]
    assert (row.installed, row.device, row.reason) == (True, "cpu", f"{ON_CPU}; {HERE}")
    k3cupy.disable_low_latency_gemm(mine)
    with torch.no_grad():
        assert torch.equal(mine(TOKENS), plain(TOKENS))


@pytest.mark.parametrize(
    ("device", "named"), [(1, "cuda:1"), ("cuda:2", "cuda:2"), (torch.device("cuda", 0), "cuda:0")]
)
def test_an_offloaded_layer_has_the_plan_of_the_gpu_that_it_goes_to(
    device: Any, named: str, fake_device: Any
) -> None:
    layer = linear(2304, 1536)
    hooked(layer, offload=True)
    layer._hf_hook.execution_device = device
    row = k3cupy.enable_low_latency_gemm(layer)[""]
    assert (row.installed, row.device, row.reason) == (True, named, HERE)
    assert row.plan[0].kernel == "skinny"
    assert type(layer) is LowLatencyLinear
    assert fake_device.loads, "its kernels are compiled before it is called"


def accelerated(name: str, model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    cpu, folder = torch.device("cpu"), tempfile.mkdtemp()
    if name == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=cpu)
    if name == "disk_offload":
        return accelerate.disk_offload(model, folder, execution_device=cpu)
    places = dict.fromkeys(["embedding", "head", "up", "down"], "cpu")
    if name == "dispatch_model, disk":
        places["up"] = "disk"
    return accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=folder, force_hooks=True
    )


@BOTH_ORDERS
@pytest.mark.parametrize(
    "name", ["cpu_offload", "disk_offload", "dispatch_model", "dispatch_model, disk"]
)
def test_case50_accelerate(name: str, enabled_first: bool, calls: Calls) -> None:
    around = functools.partial(accelerated, name)
    plain, mine = made(), wrapped(around, enabled_first)
    told = f"{ON_CPU}; called by the forward that accelerate.hooks put on it"
    with torch.no_grad():
        for _ in range(2):
            calls.clear()
            assert torch.equal(mine(TOKENS), plain(TOKENS))
            assert len(calls) == 3
            if name.endswith("offload"):
                assert calls.promises == [False] * 3
        report = k3cupy.enable_low_latency_gemm(mine)
        assert [row.reason for row in report] == [told] * 3
        assert torch.equal(copy.deepcopy(mine)(TOKENS), plain(TOKENS))
        assert k3cupy.disable_low_latency_gemm(mine) == 3
        assert torch.equal(mine(TOKENS), plain(TOKENS))
        pytest.importorskip("accelerate.hooks").remove_hook_from_module(mine, recurse=True)
        assert [row.reason for row in k3cupy.enable_low_latency_gemm(mine)] == [ON_CPU] * 3
        assert torch.equal(mine(TOKENS), plain(TOKENS))


# Adapters


def through_data(weight: torch.Tensor, delta: torch.Tensor) -> None:
    weight.data += delta


def new_data(weight: torch.Tensor, delta: torch.Tensor) -> None:
    weight.data = weight.data + delta


@BOTH_ORDERS
@pytest.mark.parametrize("write", [torch.Tensor.add_, through_data, new_data])
def test_case50_lora_merged_and_unmerged(calls: Calls, write: Any, enabled_first: bool) -> None:
    """Nobody counts how it is written, so the base layer is never promised, nor behind it."""
    layer, x = linear().requires_grad_(False), normal((3, K), 1)
    if enabled_first:
        k3cupy.enable_low_latency_gemm(layer)
        for _ in range(2):
            layer(x)
    calls.clear()
    model = LoraLinear(layer).requires_grad_(False)
    report = k3cupy.enable_low_latency_gemm(model)
    assert [row.name for row in report if row.installed] == ["base_layer", "lora_A", "lora_B"]
    assert [row.reason for row in report] == [f"{ON_CPU}; {ADAPTED}", ON_CPU, ON_CPU]
    base, apart = layer.weight.clone(), model(x)
    for _ in range(2):
        assert torch.equal(model(x), apart)
        model.merge(write)
        assert torch.equal(model(x), F.linear(x, base + model.delta()))
        model.merge(write, -1)
        layer.weight.copy_(base)  # what was added and taken away is rounded
    assert not any(call["weight_is_static"] for call in calls if call["weight"] is layer.weight)
    model.merge(write)
    unloaded = nn.Sequential(model.base_layer)
    calls.clear()
    for _ in range(2):
        assert torch.equal(unloaded(x), F.linear(x, layer.weight))
    assert calls.promises == [False, True]
    assert k3cupy.enable_low_latency_gemm(unloaded)["0"].reason == ON_CPU


def test_an_adapter_that_was_merged_and_taken_away_before_a_call(calls: Calls) -> None:
    layer, x = linear().requires_grad_(False), normal((3, K), 1)
    k3cupy.enable_low_latency_gemm(layer)
    for _ in range(2):
        layer(x)
        layer(x)
        adapter = LoraLinear(layer).requires_grad_(False)
        adapter.merge(through_data)
        model = nn.Sequential(adapter.base_layer)
        assert torch.equal(model(x), F.linear(x, layer.weight))
    assert calls.promises == [False, True, False, True, True, False]


def test_a_weight_that_was_written_while_disabled_is_read_anew(calls: Calls) -> None:
    layer, x = linear().requires_grad_(False), normal((3, K), 1)
    for _ in range(2):
        k3cupy.enable_low_latency_gemm(layer)
        for _ in range(2):
            assert torch.equal(layer(x), F.linear(x, layer.weight))
        k3cupy.disable_low_latency_gemm(layer)
        layer.weight.data += 1  # not counted
    assert calls.promises == [False, True] * 2


@BOTH_ORDERS
def test_case50_peft(enabled_first: bool, calls: Calls) -> None:
    peft = pytest.importorskip("peft")

    def around(model: nn.Module) -> nn.Module:
        torch.manual_seed(11)
        options = {"r": 8, "target_modules": ["up", "down"], "init_lora_weights": False}
        return peft.get_peft_model(model, peft.LoraConfig(**options))

    plain, mine = (wrapped(around, first) for first in (None, enabled_first))

    def compare(promises: list[bool]) -> None:
        calls.clear()
        with torch.no_grad():
            assert torch.equal(mine(TOKENS), plain(TOKENS))
        assert calls.promises[:2] == promises

    report = k3cupy.enable_low_latency_gemm(mine)
    adapted = [row for row in report if row.name.endswith("base_layer")]
    assert [row.reason for row in adapted] == [f"{ON_CPU}; {ADAPTED}"] * 2
    for change in ("merge_adapter", "unmerge_adapter", None):
        for _ in range(2):
            compare([False, False])
        if change is not None:
            for model in (mine, plain):
                getattr(model, change)()
    for model in (mine, plain):
        model(TOKENS).float().square().sum().backward()
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    mine, plain = mine.merge_and_unload(), plain.merge_and_unload()
    compare([False, False])
    compare([True, True])
    assert [row.reason for row in k3cupy.enable_low_latency_gemm(mine)] == [ON_CPU] * 3
