"""What stays in a model with the low-latency linear: names, weights, hooks, copies."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from helpers import BF16
from torch import nn
from torch.nn.utils import parametrize, prune
from torch_linear_helpers import K, N, linear, mixed_model

import k3cupy
from k3cupy.torch.torch_linear import LowLatencyLinear


def state_of(model: nn.Module) -> tuple[Any, ...]:
    return (
        list(model.state_dict()),
        [(name, id(p)) for name, p in model.named_parameters()],
        [(name, id(m)) for name, m in model.named_modules()],
        [id(b) for b in model.buffers()],
    )


def test_names_parameters_and_state_dict_stay() -> None:
    model = mixed_model()
    before = state_of(model)
    k3cupy.enable_low_latency_gemm(model)
    assert state_of(model) == before
    assert isinstance(model["head"], nn.Linear)
    k3cupy.disable_low_latency_gemm(model)
    assert state_of(model) == before


def test_hooks_stay() -> None:
    layer, seen = linear(), []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    k3cupy.enable_low_latency_gemm(layer)
    layer.register_forward_hook(lambda module, args, out: out * 2)
    x = torch.randn(3, K).to(BF16)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight) * 2)
    assert seen == ["before", "after"]


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded],
    ids=["deepcopy", "copy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("invariant", [None, True])
def test_copies_are_enabled_and_right(copied: Any, invariant: bool | None) -> None:
    model = nn.Sequential(linear(), linear(7, N))
    x = torch.randn(3, K).to(BF16)
    k3cupy.enable_low_latency_gemm(model, batch_invariant=invariant)
    want = model(x)
    twin = copied(model)
    assert [type(layer) for layer in twin] == [LowLatencyLinear] * 2
    assert twin[0].batch_invariant is invariant
    assert torch.equal(twin(x), want)
    if copied is not copy.copy:
        with torch.no_grad():
            model[0].weight.zero_()
        assert torch.equal(twin(x), want)
        assert k3cupy.disable_low_latency_gemm(twin) == 2
        assert type(model[0]) is LowLatencyLinear


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_between_enabled_and_plain(assign: bool) -> None:
    models = [nn.Sequential(linear(), linear(7, N)) for _ in range(2)]
    x = torch.randn(3, K).to(BF16)
    want = models[0](x)
    k3cupy.enable_low_latency_gemm(models[1])
    models[1](x)
    models[1].load_state_dict(models[0].state_dict(), assign=assign)
    assert torch.equal(models[1](x), want)
    with torch.no_grad():
        models[1][0].weight.mul_(2)
    models[0].load_state_dict(models[1].state_dict(), assign=assign)
    assert torch.equal(models[0](x), models[1](x))


def test_other_types_and_back() -> None:
    layer = linear()
    k3cupy.enable_low_latency_gemm(layer)
    for dtype in (torch.float16, torch.float32, BF16):
        layer.to(dtype)
        x = torch.randn(3, K).to(dtype)
        out = layer(x)
        assert out.dtype == dtype
        assert torch.equal(out, nn.functional.linear(x, layer.weight))
    assert type(layer) is LowLatencyLinear


class Tied(nn.Module):
    """A head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N, K, dtype=BF16)
        self.lm_head = linear()
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.embedding(tokens))


def test_tied_weights_stay_tied() -> None:
    model, tokens = Tied(), torch.arange(5)
    k3cupy.enable_low_latency_gemm(model)
    assert model.lm_head.weight is model.embedding.weight
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.embedding.weight
    with torch.no_grad():
        model.embedding.weight.normal_()
    rows = model.embedding.weight[:5]
    assert torch.equal(model(tokens), nn.functional.linear(rows, model.embedding.weight))


def test_a_bias_that_comes_later_is_added() -> None:
    layer, x = linear(), torch.randn(3, K).to(BF16)
    k3cupy.enable_low_latency_gemm(layer)
    layer.bias = nn.Parameter(torch.ones(N, dtype=BF16))
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert "bias" in k3cupy.enable_low_latency_gemm(layer)[""].reason
    assert type(layer) is nn.Linear


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_a_parametrization_that_comes_later_counts() -> None:
    layer, x = linear(), torch.randn(3, K).to(BF16)
    plain = layer.weight.detach().clone()
    k3cupy.enable_low_latency_gemm(layer)
    parametrize.register_parametrization(layer, "weight", Doubled())
    assert torch.equal(layer(x), nn.functional.linear(x, plain * 2))
    assert "parametrized" in k3cupy.enable_low_latency_gemm(layer)[""].reason
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert torch.equal(layer(x), nn.functional.linear(x, plain))


def test_pruning_that_comes_later_counts() -> None:
    layer, x = linear(), torch.randn(3, K).to(BF16)
    k3cupy.enable_low_latency_gemm(layer)
    prune.l1_unstructured(layer, "weight", 0.5)
    out = layer(x)
    assert (layer.weight == 0).float().mean() == 0.5
    assert torch.equal(out, nn.functional.linear(x, layer.weight))
