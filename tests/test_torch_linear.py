"""The low-latency linear in the layers of a model: which ones, the report, undoing it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import BF16, refused
from torch import nn
from torch.nn.utils import prune
from torch_linear_helpers import K, N, linear, mixed_model

import k3cupy
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.torch import modules, torch_linear
from k3cupy.torch.linear_report import FRAMEWORK, LayerReport, LinearReport, Span, spans
from k3cupy.torch.torch_linear import LowLatencyLinear

ON_CPU = "on the CPU: framework linear until it moves to a GPU"


def names_of(report: LinearReport) -> list[str]:
    return [row.name for row in report if row.installed]


# Which layers


def test_every_eligible_layer_at_any_depth() -> None:
    model = mixed_model()
    report = k3cupy.enable_low_latency_gemm(model)
    blocks = [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")]
    assert names_of(report) == [*blocks, "head"]
    assert (len(report), report.installed) == (8, 7)
    assert report["blocks.1.down"] == LayerReport("blocks.1.down", (K, N), "cpu", True, (), ON_CPU)
    for name, layer in model.named_modules():
        assert isinstance(layer, LowLatencyLinear) == (name in names_of(report)), name


def test_the_module_may_be_the_layer_itself() -> None:
    layer = linear()
    report = k3cupy.enable_low_latency_gemm(layer)
    assert type(layer) is LowLatencyLinear
    assert report[""].installed
    assert "(itself)" in str(report)


def test_a_model_without_linear_layers() -> None:
    report = k3cupy.enable_low_latency_gemm(nn.Sequential(nn.ReLU()))
    assert (len(report), report.installed, list(report)) == (0, 0, [])
    assert "0 of 0" in str(report)


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class FarLinear(nn.Module):
    """As parallel frameworks have them: a linear layer that is no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(N, K, dtype=BF16))


class TaggedTensor(torch.Tensor):
    pass


def with_tagged_weight() -> nn.Module:
    layer = linear()
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(TaggedTensor), False)
    return layer


def with_sparse_weight() -> nn.Module:
    layer = linear()
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse(), False)
    return layer


def weight_normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(linear())


def empty(n: int, k: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's initialisation says that there is nothing
        return linear(n, k)


def quantized() -> nn.Module:
    from torch.ao.nn.quantized.dynamic import Linear

    return Linear(K, N)


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bias": (lambda: linear(bias=True), "it has a bias"),
    "float32": (lambda: linear(dtype=torch.float32), "its weight is float32, not bfloat16"),
    "float16": (lambda: linear(dtype=torch.float16), "its weight is float16, not bfloat16"),
    "subclass": (lambda: OwnForward(K, N, bias=False, dtype=BF16), "it is a OwnForward, not an"),
    "no subclass": (FarLinear, "it is a FarLinear, not an nn.Linear itself"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(linear()),
        "its weight is parametrized",
    ),
    "weight norm": (weight_normed, "a hook computes it"),
    "pruned": (lambda: prune.random_unstructured(linear(), "weight", 0.5), "a hook computes it"),
    "tensor subclass": (with_tagged_weight, "its weight is a TaggedTensor, not a plain tensor"),
    "sparse": (with_sparse_weight, "its weight is sparse_coo, not dense"),
    "quantized": (quantized, "it is a Linear of torch.ao.nn.quantized.dynamic"),
    "no columns": (lambda: empty(N, 0), "its weight [48, 0] has no elements"),
    "no rows": (lambda: empty(0, K), "its weight [0, 128] has no elements"),
    "lazy": (lambda: nn.LazyLinear(N, bias=False, dtype=BF16), "it is a LazyLinear"),
}


@pytest.mark.parametrize(("make", "reason"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_what_is_left_alone_and_why(make: Callable[[], nn.Module], reason: str) -> None:
    layer = make()
    kind = type(layer)
    report = k3cupy.enable_low_latency_gemm(nn.ModuleDict({"layer": layer, "good": linear()}))
    assert reason in report["layer"].reason
    assert not report["layer"].installed
    assert report["good"].installed
    assert type(layer) is kind
    assert "left alone: " + report["layer"].reason[:20] in str(report)


def test_sizes_and_places_in_the_report() -> None:
    model = nn.ModuleDict(
        {"far": FarLinear(), "lazy": nn.LazyLinear(N), "meta": linear(device="meta")}
    )
    report = k3cupy.enable_low_latency_gemm(model)
    assert [row.shape for row in report] == [(N, K), None, (N, K)]
    assert [row.device for row in report] == ["cpu", "", "meta"]


@pytest.mark.parametrize("name", ["LinearAttention", "BlockLinear"])
def test_a_block_with_linear_in_its_name_is_no_layer(name: str) -> None:
    block = type(name, (nn.Sequential,), {})(linear())
    assert [row.name for row in k3cupy.enable_low_latency_gemm(block)] == ["0"]


def test_attention_of_pytorch_which_reads_the_weight_itself_is_left_alone() -> None:
    attention = nn.MultiheadAttention(K, 4, bias=False, dtype=BF16)
    report = k3cupy.enable_low_latency_gemm(attention)
    assert report.installed == 0
    assert "NonDynamicallyQuantizableLinear" in report["out_proj"].reason


# Calling it


def test_calling_it_again_changes_nothing() -> None:
    model = mixed_model()
    first = k3cupy.enable_low_latency_gemm(model)
    second = k3cupy.enable_low_latency_gemm(model)
    assert list(second) == list(first)
    assert k3cupy.disable_low_latency_gemm(model) == first.installed


def test_layers_that_came_later_are_found_by_the_next_call() -> None:
    model = mixed_model()
    before = k3cupy.enable_low_latency_gemm(model).installed
    model["late"] = linear()
    assert k3cupy.enable_low_latency_gemm(model).installed == before + 1


def test_layers_that_are_no_longer_eligible_are_given_back() -> None:
    model = mixed_model()
    before = k3cupy.enable_low_latency_gemm(model).installed
    model["head"].half()
    report = k3cupy.enable_low_latency_gemm(model)
    assert report.installed == before - 1
    assert report["head"].reason == "its weight is float16, not bfloat16"
    assert type(model["head"]) is nn.Linear


def test_disable_brings_back_what_was_there() -> None:
    model = mixed_model()
    before = {name: dict(vars(layer)) for name, layer in model.named_modules()}
    shown = repr(model)
    k3cupy.enable_low_latency_gemm(model, batch_invariant=True)
    assert "LowLatencyLinear" in repr(model)
    assert k3cupy.disable_low_latency_gemm(model) == 7
    assert k3cupy.disable_low_latency_gemm(model) == 0
    assert repr(model) == shown
    for name, layer in model.named_modules():
        assert vars(layer) == before[name], name


def test_parts_may_be_enabled_and_disabled_on_their_own() -> None:
    model = mixed_model()
    k3cupy.enable_low_latency_gemm(model)
    assert k3cupy.disable_low_latency_gemm(model["blocks"][1]) == 2
    assert k3cupy.enable_low_latency_gemm(model["head"]).installed == 1
    assert type(model["blocks"][1]["up"]) is nn.Linear
    assert type(model["blocks"][2]["up"]) is LowLatencyLinear


def test_shared_modules_are_one_layer() -> None:
    shared = linear(K, K)
    model = nn.Sequential(shared, nn.Sequential(shared), shared)
    report = k3cupy.enable_low_latency_gemm(model)
    assert [row.name for row in report] == ["0"]
    assert k3cupy.disable_low_latency_gemm(model) == 1


def test_batch_invariance_follows_the_last_call() -> None:
    layer = linear()
    for value in (None, True, False, None):
        k3cupy.enable_low_latency_gemm(layer, batch_invariant=value)
        assert layer.batch_invariant is value
    k3cupy.disable_low_latency_gemm(layer)
    assert "batch_invariant" not in vars(layer)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tokens": 0}, ValueError, r"tokens: expected numbers from 1 to 64, got 0"),
        ({"tokens": [1, 65]}, ValueError, r"tokens: expected numbers from 1 to 64, got 65"),
        ({"tokens": [True]}, ValueError, r"tokens: expected .*, got True"),
        ({"tokens": []}, ValueError, r"tokens: expected at least one, got none"),
        ({"tokens": "8"}, ValueError, r"tokens: expected .*, got '8'"),
        ({"tokens": 1.5}, TypeError, r"tokens: expected numbers from 1 to 64, got 1\.5"),
        ({"warmup": 1}, TypeError, r"warmup: expected True or False, got 1"),
        ({"batch_invariant": 1}, TypeError, r"batch_invariant: expected None, .*, got 1"),
    ],
    ids=str,
)
def test_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    layer = linear()
    with pytest.raises(error, match=text):
        k3cupy.enable_low_latency_gemm(layer, **options)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("function", ["enable_low_latency_gemm", "disable_low_latency_gemm"])
def test_what_is_no_module(function: str) -> None:
    for value in (None, torch.zeros(2), nn.Linear, [nn.ReLU()]):
        found = f"^{type(value).__name__}$"
        refused({"module": value}, "module", found, operation=getattr(k3cupy, function))


def test_no_torch_is_loaded_before_it_is_needed() -> None:
    program = (
        "import sys, k3cupy\n"
        "try:\n    k3cupy.enable_low_latency_gemm(None)\n"
        "except TypeError as error:\n    print(error)\n"
        "print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert printed.stdout.splitlines() == [
        "module: expected a torch.nn.Module, got NoneType",
        "False",
    ]


# The report


def test_spans_join_neighbours() -> None:
    kernels = [(1, "skinny"), (2, "fused_a"), (3, "fused_a"), (8, "fused_a"), (9, FRAMEWORK)]
    found = spans(kernels)
    assert found == (Span(1, 1, "skinny"), Span(2, 8, "fused_a"), Span(9, 9, FRAMEWORK))
    assert [str(span) for span in found] == ["skinny 1", "fused_a 2-8", "F.linear 9"]


def test_report_prints_layers_that_differ_in_numbers_as_one_line() -> None:
    report = k3cupy.enable_low_latency_gemm(mixed_model())
    text = str(report)
    assert repr(report) == text
    assert text.startswith("Low-latency linear: installed in 7 of 8 linear layers")
    lines = [line for line in text.splitlines() if "blocks" in line]
    assert [cell.strip() for cell in lines[0].split("|")[1:3]] == ["blocks.*.up", "3"]
    assert len(lines) == 2
    assert "48 x 128" in lines[0]
    with pytest.raises(KeyError):
        report["blocks"]


def test_report_with_plans() -> None:
    plan = (Span(1, 8, "skinny"), Span(9, 64, FRAMEWORK))
    rows = [
        LayerReport("q_b", (2304, 1536), "cuda:0", True, plan),
        LayerReport("o", (8, 8), "cuda:0", False, (Span(1, 64, FRAMEWORK),), "no plan"),
    ]
    text = str(LinearReport(rows))
    assert "skinny 1-8, F.linear 9-64" in text
    assert "left alone: no plan" in text


# Plans of a GPU


H200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)


@pytest.mark.parametrize(
    ("shape", "tokens", "invariant", "plan", "why_none"),
    [
        ((64, 256), range(1, 65), False, "skinny 1-16, fused_a 17-64", ""),
        ((64, 256), [17, 32], False, "fused_a 17-32", ""),
        ((8192, 256), [33, 64], False, "F.linear 33-64", "not measured here"),
        (
            (64, 250),
            range(1, 65),
            False,
            "F.linear 1-64",
            "x: expected K a multiple of 8, got 250",
        ),
        ((64, 256), range(1, 65), True, "fused_a 1-64", ""),
        ((64, 250), range(1, 65), True, "F.linear 1-64", "x: expected K a multiple of 16, got 250"),
    ],
)
def test_plan_of_a_shape(
    shape: tuple[int, int], tokens: Sequence[int], invariant: bool, plan: str, why_none: str
) -> None:
    found, why = modules.plan_of(shape, tokens, H200, invariant)
    assert ", ".join(map(str, found)) == plan
    assert why.startswith(why_none)
    assert bool(why) == bool(why_none)


def test_warm_up_takes_each_shape_once_with_and_without_the_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        modules, "compile_for", lambda *args, **options: calls.append((args, options))
    )
    plan = (Span(1, 16, "fused_a"),)
    rows = [
        LayerReport("a", (48, 128), "cuda:1", True, plan),
        LayerReport("b", (48, 128), "cuda:1", True, plan),
        LayerReport("c", (7, 128), "cuda:1", True, plan),
        LayerReport("d", (7, 128), "cuda:0", True, plan),
        LayerReport("e", (9, 128), "cpu", True),
    ]
    modules.warm_up(rows, (1, 16), True)
    both = {"weight_is_static": (True, False), "batch_invariant": True, "progress": False}
    assert calls == [
        (("low_latency_linear",), {"device": device, "shapes": shapes, "tokens": (1, 16), **both})
        for device, shapes in ((1, ((48, 128), (7, 128))), (0, ((7, 128),)))
    ]


def test_a_failing_warmup_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise k3cupy.CompileError("no compiler")

    model = mixed_model()
    monkeypatch.setattr(modules, "warm_up", fail)
    with pytest.raises(k3cupy.CompileError):
        k3cupy.enable_low_latency_gemm(model)
    assert k3cupy.disable_low_latency_gemm(model) == 0
    k3cupy.enable_low_latency_gemm(model, warmup=False)
    assert k3cupy.disable_low_latency_gemm(model) == 7


def test_the_reason_without_a_weight_is_words() -> None:
    """Every layer that is left alone says why."""
    for make, _ in LEFT_ALONE.values():
        assert torch_linear.why_not(make())
    assert torch_linear.why_not(linear()) is None
