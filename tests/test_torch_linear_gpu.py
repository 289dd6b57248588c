"""Layers that run the low-latency linear on a GPU: kernels, graphs, compiler, late weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_helpers import says
from gemm_helpers import assert_product, normal, same_bits
from helpers import BF16, run_child
from pdl_helpers import CopyLate, copy_late, wrong_values
from stream_helpers import SLEEP_CYCLES, captured
from torch import nn
from torch_linear_helpers import Calls

import k3cupy
from k3cupy.call.choice import LINEAR
from k3cupy.torch import torch_library  # noqa: F401  (registers the operator)

pytestmark = pytest.mark.gpu

__all__ = ["copy_late"]

N, K = 528, 1536
TOKENS = (1, 4, 16)
STRIDED = {"f_b": (1536, 128, 6288, 6144), "q_b": (2304, 1536, 2112, 0)}
each_strided = pytest.mark.parametrize(
    ("n", "k", "width", "offset"), STRIDED.values(), ids=STRIDED.keys()
)


def linear(n: int = N, k: int = K, device: str = "cuda", **options: Any) -> nn.Linear:
    """A layer with a weight that needs no gradient, enabled."""
    layer = nn.Linear(k, n, bias=False, dtype=BF16, device=device).requires_grad_(False)
    k3cupy.enable_low_latency_gemm(layer, warmup=False, **options)
    return layer


def choices(run: Callable[[], Any]) -> list[k3cupy.Choice]:
    """What the dispatcher chose in a call."""
    k3cupy.reset_dispatch_report()
    run()
    return [row.choice for row in k3cupy.dispatch_report()]


def kernels(run: Callable[[], Any]) -> list[str]:
    return [choice.kernel for choice in choices(run)]


def planned(tokens: int, n: int = N, k: int = K) -> str:
    return k3cupy.select_backend(tokens, n, k) or LINEAR


# Kernels


@each_strided
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_founding_slices_run_the_planned_kernel(
    n: int, k: int, width: int, offset: int, tokens: int
) -> None:
    layer = linear(n, k)
    x = normal((tokens, width), tokens, "cuda")[:, offset : offset + k]
    out = layer(x)
    assert_product(out, x, layer.weight)
    assert kernels(lambda: layer(x)) == [planned(tokens, n, k)]
    if torch.cuda.get_device_name() == "NVIDIA H200":
        assert planned(tokens, n, k) in ("fused_a", "skinny")


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1), (0,), (2, 0)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    layer = linear()
    x = normal((*shape, 2112), 1, "cuda")[..., :K]
    out = layer(x)
    assert out.shape == (*shape, N)
    if x.numel():
        assert_product(out.reshape(-1, N), x.reshape(-1, K), layer.weight)


@pytest.mark.parametrize("tokens", [(1,), (4,), (2, 3), (32,)], ids=str)
def test_one_residual_for_all_rows(tokens: tuple[int, ...]) -> None:
    """The operator takes what can be expanded, whose rows then are 0 apart."""
    x, weight, row = (normal(s, i, "cuda") for i, s in enumerate([(*tokens, K), (N, K), (N,)]))
    with torch.no_grad():
        out = torch.ops.k3cupy.low_latency_linear(x, weight, row)
    whole = row.expand(*tokens, N).contiguous()
    assert_product(out.flatten(0, -2), x.flatten(0, -2), weight, whole.flatten(0, -2))


@pytest.mark.parametrize("off", [1, 4])
def test_misaligned_slices_fall_back_and_are_right(off: int) -> None:
    layer = linear()
    x = normal((4, 2112), 1, "cuda")[:, off : off + K]
    assert kernels(lambda: layer(x)) == [LINEAR]
    assert_product(layer(x), x, layer.weight)


def test_the_report_names_what_runs() -> None:
    layer = nn.Linear(K, N, bias=False, dtype=BF16, device="cuda")
    report = k3cupy.enable_low_latency_gemm(layer, warmup=False)
    row = report[""]
    assert row.installed
    assert row.device == f"cuda:{torch.cuda.current_device()}"
    for span in row.plan:
        for tokens in range(span.first, span.last + 1):
            assert span.kernel.replace("F.", "") == planned(tokens)
    assert row.plan[0].first == 1
    assert row.plan[-1].last == 64


def test_a_layer_without_a_plan_is_left_alone() -> None:
    layer = nn.Linear(250, 64, bias=False, dtype=BF16, device="cuda")
    report = k3cupy.enable_low_latency_gemm(layer)
    assert says(report[""].reason, "x", "^250")
    assert type(layer) is nn.Linear


# Moving and changing


def test_enabled_on_the_cpu_and_moved_to_the_gpu() -> None:
    layer = linear(device="cpu")
    twin = copy.deepcopy(layer)
    layer.to("cuda")
    x = normal((4, K), 1, "cuda")
    assert kernels(lambda: layer(x)) == [planned(4)]
    assert_product(layer(x), x, layer.weight)
    assert kernels(lambda: twin(x.cpu())) == [LINEAR]
    layer.cpu()
    assert torch.equal(layer(x.cpu()), twin(x.cpu()))


def test_other_types_fall_back_with_a_reason() -> None:
    layer = linear().half()
    x = normal((4, K), 1, "cuda").half()
    (choice,) = choices(lambda: layer(x))
    assert says(choice.reason, "x", "float16")
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    layer.bfloat16()
    assert kernels(lambda: layer(x.bfloat16())) == [planned(4)]


@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_while_in_use(assign: bool) -> None:
    layer, x = linear(), normal((4, K), 1, "cuda")
    for seed in range(20):
        layer.load_state_dict({"weight": normal((N, K), seed, "cuda")}, assign=assign)
        for _ in range(2):
            assert_product(layer(x), x, layer.weight)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(twin_of: Callable[[nn.Module], nn.Module]) -> None:
    layer, x = linear(), normal((4, K), 1, "cuda")
    want = layer(x)
    twin = twin_of(layer)
    layer.weight.zero_()
    same_bits(twin(x), want)
    assert kernels(lambda: twin(x)) == [planned(4)]


def test_a_head_tied_to_an_embedding() -> None:
    embedding = nn.Embedding(N, K, dtype=BF16, device="cuda").requires_grad_(False)
    head = linear()
    head.weight = embedding.weight
    for _ in range(10):
        embedding.weight.normal_()
        # A row times itself would carry its row's norm alone, and its rounding is no average.
        x = embedding(torch.arange(4, device="cuda")).roll(1, dims=-1)
        assert_product(head(x), x, embedding.weight)


# Gradients and autocast


def test_gradients_come_from_the_framework() -> None:
    layer = linear().requires_grad_(True)
    x = normal((4, K), 1, "cuda")
    (choice,) = choices(lambda: layer(x).float().sum().backward())
    assert choice.is_fallback
    assert "requires grad" in choice.reason
    want = x.float().sum(0).expand(N, K)
    torch.testing.assert_close(layer.weight.grad.float(), want, rtol=2**-6, atol=2**-6)
    with torch.no_grad():
        assert kernels(lambda: layer(x)) == [planned(4)]


@pytest.mark.parametrize("x_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    layer, x = linear(), normal((4, K), 1, "cuda").to(x_dtype)
    with torch.autocast("cuda", dtype):
        out = layer(x)
    assert out.dtype == dtype
    want = F.linear(x.to(dtype), layer.weight.to(dtype))
    torch.testing.assert_close(out, want, rtol=2**-6, atol=2**-6)


# Batch invariance


@pytest.mark.parametrize("by", ["layer", "process"])
def test_batch_invariance(by: str) -> None:
    layer = linear(batch_invariant=True if by == "layer" else None)
    x = normal((200, K), 1, "cuda")
    with k3cupy.batch_invariant_mode(by == "process"):
        want = layer(x)
        for tokens in (1, 7, 64, 65, 130):
            same_bits(layer(x[:tokens]), want[:tokens])
        same_bits(layer(x.view(4, 50, K)).view(200, N), want)


# The promise about the weight


def test_a_weight_that_is_written_late(copy_late: CopyLate) -> None:
    """Its writer lets the layer's kernel begin early; PyTorch is told of the write."""
    layer, x = linear(), normal((4, K), 1, "cuda")
    weights = [normal((N, K), seed, "cuda") for seed in (2, 3)]

    def step(i: int) -> torch.Tensor:
        copy_late(weights[i], layer.weight)
        torch.autograd.graph.increment_version(layer.weight)
        return layer(x)

    wants = [k3cupy.low_latency_linear(x, weight) for weight in weights]
    assert wrong_values(step, wants) == 0


def test_an_input_that_is_written_late(copy_late: CopyLate) -> None:
    layer = linear()
    xs = [normal((4, K), seed, "cuda") for seed in (1, 2)]
    x = xs[0].clone()

    def step(i: int) -> torch.Tensor:
        copy_late(xs[i], x)
        return layer(x)

    wants = [k3cupy.low_latency_linear(value, layer.weight) for value in xs]
    for _ in range(2):  # the first call goes without the promise, so that two kernels get loaded
        layer(x)
    assert wrong_values(step, wants) == 0


def test_the_promise_does_not_change_the_bits() -> None:
    layer, x = linear(), normal((4, K), 1, "cuda")
    first, second = layer(x), layer(x)
    same_bits(first, second)


def test_case32_a_product_of_ours_into_the_weight(calls: Calls) -> None:
    """Eager and captured: the layer's kernel begins early, and does not fetch the weight early."""
    layer, x = linear(64), normal((4, K), 1, "cuda")
    b, a = normal((64, 128), 2, "cuda") / 16, normal((K, 128), 3, "cuda") / 16
    starts = [normal((64, K), seed, "cuda") for seed in (4, 5)]

    def step(i: int) -> torch.Tensor:
        layer.weight.copy_(starts[i])
        k3cupy.fused_a_gemm(b, a, layer.weight, out=layer.weight)
        return layer(x)

    wants = [k3cupy.low_latency_linear(x, k3cupy.fused_a_gemm(b, a, start)) for start in starts]
    assert wrong_values(step, wants) == 0
    assert calls
    assert not any(calls.promises)


def test_case32_a_captured_call_reads_when_the_graph_runs(calls: Calls) -> None:
    """A call outside the graph may come before: it is promised nothing of what a capture did."""
    layer, x = linear(), normal((4, K), 1, "cuda")
    for _ in range(2):  # both kernels are loaded before the capture
        layer(x)
    torch.autograd.graph.increment_version(layer.weight)
    graph, out = captured(lambda: (layer(x), layer(x))[1])
    want, _ = layer(x), layer(x)
    assert calls.promises == [False, True, False, True, False, True]
    graph.replay()
    same_bits(out, want)


# Streams and graphs


def test_the_current_stream_is_used() -> None:
    layer = linear()
    x = normal((4, K), 0, "cuda")
    values = [normal((4, K), seed, "cuda") for seed in range(50)]
    wants = [layer(value) for value in values]
    torch.cuda.synchronize()
    seen = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for value in values:
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(value)
            seen.append(layer(x).clone())
    torch.cuda.synchronize()
    for i, (got, want) in enumerate(zip(seen, wants, strict=True)):
        same_bits(got, want, f"call {i}")


def _captures_right_after_enabling() -> None:
    layer = nn.Linear(K, N, bias=False, dtype=BF16, device="cuda").requires_grad_(False)
    wide = normal((16, 2112), 1, "cuda")
    packed = wide[:, :K].contiguous()
    k3cupy.enable_low_latency_gemm(layer, tokens=TOKENS)
    for _ in range(2):
        for x in (packed, wide[:, :K]):
            for tokens in TOKENS:
                part = x[:tokens]
                graph, out = captured(lambda part=part: layer(part))
                part.copy_(normal(part.shape, tokens, "cuda"))
                graph.replay()
                assert_product(out, part, layer.weight)
        layer.weight.copy_(normal((N, K), 9, "cuda"))


def test_case18_capture_right_after_enabling() -> None:
    run_child(_captures_right_after_enabling)


def _captures_without_warmup() -> None:
    layer, x = linear(), normal((4, K), 1, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
        with pytest.raises(k3cupy.CaptureError, match="low_latency_linear"):
            layer(x)
    torch.cuda.synchronize()
    assert_product(layer(x), x, layer.weight)


def test_case18_capture_without_warmup_says_what_to_do() -> None:
    if planned(4) == LINEAR:
        pytest.skip("the plan is the framework's linear here")
    run_child(_captures_without_warmup)


# The compiler


class Block(nn.Module):
    """Two layers: one reads a slice of what the other wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 2112, bias=False, dtype=BF16)
        self.second = nn.Linear(K, N, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[..., :K].relu()).float() + 1


@pytest.fixture
def blocks() -> tuple[nn.Module, nn.Module]:
    """An enabled block on the GPU, and a plain one with the same weights."""
    torch.manual_seed(0)
    plain = Block().requires_grad_(False).cuda()
    mine = copy.deepcopy(plain)
    assert k3cupy.enable_low_latency_gemm(mine).installed == 2
    return mine, plain


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_case22_compiled(
    blocks: tuple[nn.Module, nn.Module], mode: str, dynamic: bool | None
) -> None:
    """One graph for each set of shapes, and kernels of ours inside it."""
    mine, plain = blocks
    compiled = torch.compile(mine, fullgraph=True, dynamic=dynamic, mode=mode)
    for tokens in (1, 16, 17, 300):
        x = normal((tokens, 1024), tokens, "cuda")
        want = plain(x)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x), want, rtol=2**-6, atol=2**-6)
    x = normal((3, 1024), 1, "cuda")
    if mode == "default":
        assert kernels(lambda: compiled(x)) == [planned(3), planned(3, 2112, 1024)]


def test_operator_on_the_gpu() -> None:
    x, weight = normal((4, 2112), 1, "cuda")[:, :K], normal((N, K), 2, "cuda")
    operator = torch.ops.k3cupy.low_latency_linear
    assert_product(operator(x, weight), x, weight)
    torch.library.opcheck(operator, (x, weight, None, True, None))
    residual = normal((4, N), 3, "cuda")
    torch.library.opcheck(operator, (x, weight, residual))


# Devices


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_case19_the_weights_device_decides() -> None:
    layers = nn.ModuleList(nn.Linear(K, N, bias=False, dtype=BF16) for _ in range(2))
    for i, layer in enumerate(layers.requires_grad_(False)):
        layer.to(f"cuda:{i}")
    report = k3cupy.enable_low_latency_gemm(layers, tokens=4)
    assert [row.device for row in report] == ["cuda:0", "cuda:1"]
    with torch.cuda.device(0):
        for i in (1, 0, 1):
            x = normal((4, K), i, f"cuda:{i}")
            graph, out = captured_on(i, lambda i=i, x=x: layers[i](x))
            with torch.cuda.device(i):
                graph.replay()
            assert_product(out, x, layers[i].weight)
            assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="device"):
        layers[0](normal((4, K), 1, "cuda:1"))


def captured_on(device: int, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    with torch.cuda.device(device):
        return captured(run)
