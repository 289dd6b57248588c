"""Calls of layers that run the low-latency linear: shapes, gradients, modes, the promise."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_helpers import normal
from helpers import BF16
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch_linear_helpers import Calls, K, N

import k3cupy
from k3cupy.torch import torch_library


@pytest.fixture
def layer() -> nn.Linear:
    """An enabled layer with a weight that needs no gradient."""
    made = nn.Linear(K, N, bias=False, dtype=BF16).requires_grad_(False)
    k3cupy.enable_low_latency_gemm(made)
    return made


def same(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    want = F.linear(x, weight)
    assert (out.shape, out.dtype) == (want.shape, want.dtype)
    assert out.is_contiguous()
    torch.testing.assert_close(out, want, rtol=2**-8, atol=0)


# Shapes


SHAPES = [(1,), (7,), (65,), (0,), (), (2, 3), (2, 1), (0, 3), (3, 0), (2, 3, 4), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_dimensions(layer: nn.Linear, calls: Calls, shape: tuple[int, ...]) -> None:
    x = normal((*shape, K), 1)
    same(layer(x), x, layer.weight)
    assert [call["x"].dim() for call in calls] == [2]


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "slice": lambda: normal((4, 6288), 1)[:, 6144 : 6144 + K],
    "slice of one token": lambda: normal((1, 6288), 1)[:, 6144 : 6144 + K],
    "slice of [B, T, ..]": lambda: normal((3, 4, 2112), 1)[..., :K],
    "one token a sequence": lambda: normal((3, 4, 2112), 1)[:, -1:, :K],
    "last tokens": lambda: normal((3, 4, 2112), 1)[:, -2:, :K],
    "transposed": lambda: normal((K, 5), 1).t(),
    "transposed in front": lambda: normal((2, 3, K), 1).transpose(0, 1),
    "expanded": lambda: normal((1, K), 1).expand(5, K),
    "every other value": lambda: normal((5, 2 * K), 1)[:, ::2],
    "off by one": lambda: normal((5, K + 1), 1)[:, 1:],
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_layout(layer: nn.Linear, make: Callable[[], torch.Tensor]) -> None:
    x = make()
    same(layer(x), x, layer.weight)


@pytest.mark.parametrize("name", ["slice", "slice of [B, T, ..]", "one token a sequence"])
def test_a_slice_reaches_the_dispatcher_without_a_copy(
    layer: nn.Linear, calls: Calls, name: str
) -> None:
    x = LAYOUTS[name]()
    layer(x)
    (call,) = calls
    assert call["x"].data_ptr() == x.data_ptr()
    assert call["weight"] is layer.weight


@pytest.mark.parametrize(
    "x",
    [torch.zeros((), dtype=BF16), torch.zeros(3, K + 1, dtype=BF16), torch.zeros(3, K)],
    ids=["no dimension", "another width", "another type"],
)
def test_errors_are_those_of_pytorch(layer: nn.Linear, x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError) as ours:
        layer(x)
    with pytest.raises(RuntimeError) as theirs:
        F.linear(x, layer.weight)
    assert str(ours.value) == str(theirs.value)


# Gradients


@pytest.mark.parametrize("shape", [(3,), (), (2, 3)], ids=str)
@pytest.mark.parametrize("wants", [(True, False), (False, True), (True, True)], ids=str)
def test_gradients_are_those_of_the_framework(
    layer: nn.Linear, shape: tuple[int, ...], wants: tuple[bool, bool]
) -> None:
    x = normal((*shape, K), 1).requires_grad_(wants[0])
    layer.requires_grad_(wants[1])
    out = layer(x)
    assert out.requires_grad
    out.float().square().sum().backward()
    got = [t.grad for t in (x, layer.weight)]
    twin_x = x.detach().requires_grad_(wants[0])
    twin_weight = layer.weight.detach().requires_grad_(wants[1])
    F.linear(twin_x, twin_weight).float().square().sum().backward()
    for mine, theirs in zip(got, (twin_x.grad, twin_weight.grad), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def test_training_goes_on(layer: nn.Linear) -> None:
    layer.requires_grad_(True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    x, losses = normal((16, K), 1), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = layer(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


# Modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_modes_without_gradient(layer: nn.Linear, calls: Calls, mode: Any) -> None:
    layer.requires_grad_(mode is not contextlib.nullcontext)
    x = normal((3, K), 1)
    with mode():
        for _ in range(2):
            same(layer(x), x, layer.weight)
    assert calls.promises == [False, True]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("x_dtype", [BF16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_autocast_computes_in_its_type(
    layer: nn.Linear, dtype: torch.dtype, x_dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = normal((*shape, K), 1).to(x_dtype)
    with torch.autocast("cpu", dtype):
        out = layer(x)
    assert out.dtype == dtype
    assert torch.equal(out, F.linear(x.to(dtype), layer.weight.to(dtype)))


def test_what_pytorch_must_see_goes_to_its_own_linear(layer: nn.Linear, calls: Calls) -> None:
    """Traces, transforms, counts, and tensors that are not what they look like."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    x = normal((3, K), 1)
    want = F.linear(x, layer.weight)

    traced = torch.jit.trace(layer, x, check_trace=False)
    assert torch.equal(traced(x), want)
    assert "linear" in str(traced.graph)

    batched = torch.func.vmap(layer)(x)
    torch.testing.assert_close(batched, want, rtol=2**-8, atol=0)

    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 3 * N * K

    graph = make_fx(layer)(x)
    assert torch.equal(graph(x), want)
    assert torch.equal(graph(2 * x), 2 * want)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (3, N)
    assert layer.to("meta")(x.to("meta")).shape == (3, N)
    assert calls == []


def test_functional_call_with_another_weight(layer: nn.Linear) -> None:
    x, other = normal((3, K), 1), normal((N, K), 2)
    out = torch.func.functional_call(layer, {"weight": other}, x)
    assert torch.equal(out, F.linear(x, other))
    assert torch.equal(layer(x), F.linear(x, layer.weight))


def test_gradients_by_transforms(layer: nn.Linear) -> None:
    x = normal((3, K), 1)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, x).float().sum()

    grad = torch.func.grad(loss)(layer.weight.detach())
    torch.testing.assert_close(grad, x.sum(0).expand(N, K), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("value", [None, True, False])
def test_batch_invariance_comes_to_the_dispatcher(
    layer: nn.Linear, calls: Calls, value: bool | None
) -> None:
    k3cupy.enable_low_latency_gemm(layer, batch_invariant=value)
    layer(normal((3, K), 1))
    layer(normal((2, 3, K), 1))
    assert [call["batch_invariant"] for call in calls] == [value, value]


# The promise that the weight is not written by the preceding kernel


def write_in_place(layer: nn.Linear) -> None:
    layer.weight.copy_(normal((N, K), 5))


def write_in_inference_mode(layer: nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight.mul_(2)


def write_a_part(layer: nn.Linear) -> None:
    layer.weight[3:5].zero_()


def load(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": normal((N, K), 5)})


def load_by_assignment(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": normal((N, K), 5)}, assign=True)


def assign_a_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(normal((N, K), 5), requires_grad=False)


def assign_data(layer: nn.Linear) -> None:
    layer.weight.data = normal((N, K), 5)


def convert_there_and_back(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.double()
    layer.bfloat16()


def add_a_product_of_ours(layer: nn.Linear) -> None:
    b, a = normal((N, 16), 6), normal((K, 16), 7)
    k3cupy.fused_a_gemm(b, a, layer.weight, out=layer.weight)


def write_some_rows_by_ours(layer: nn.Linear) -> None:
    b, a = normal((4, 16), 6), normal((K, 16), 7)
    k3cupy.skinny_gemm(b, a, out=layer.weight[8:12])


WRITES = [
    add_a_product_of_ours,
    write_some_rows_by_ours,
    write_in_place,
    write_in_inference_mode,
    write_a_part,
    load,
    load_by_assignment,
    assign_a_parameter,
    assign_data,
    convert_there_and_back,
]


@pytest.mark.parametrize("write", WRITES)
def test_the_first_call_behind_a_write_goes_without_the_promise(
    layer: nn.Linear, calls: Calls, write: Callable[[nn.Linear], None]
) -> None:
    x = normal((3, K), 1)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        write(layer)
        for _ in range(2):
            same(layer(x), x, layer.weight)
    assert calls.promises == [False, True, True, False, True]


def test_a_weight_that_comes_back_to_its_address_is_new(layer: nn.Linear, calls: Calls) -> None:
    """As an allocator gives it, of the same version: `.float()` and `.bfloat16()` do that."""
    x, memory = normal((3, K), 1), bytearray(2 * N * K)
    for _ in range(3):
        layer.weight.data = torch.frombuffer(memory, dtype=BF16).view(N, K)
        for _ in range(2):
            same(layer(x), x, layer.weight)
    assert calls.promises == [False, True] * 3


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize(
    "change",
    [
        load,
        lambda layer: layer.double().bfloat16(),
        lambda layer: torch.utils.swap_tensors(layer.weight, nn.Parameter(normal((N, K), 5))),
    ],
    ids=["load", "convert", "swap"],
)
def test_tensors_are_swapped_under_a_layer(
    layer: nn.Linear, calls: Calls, change: Callable[[nn.Linear], Any], swapping: None
) -> None:
    """PyTorch swaps no tensor to which somebody holds a weak reference."""
    x = normal((3, K), 1)
    with torch.no_grad():
        for _ in range(2):
            for _ in range(2):
                same(layer(x), x, layer.weight)
            change(layer)
    assert calls.promises == [False, True] * 2


def test_a_weight_of_one_dimension(layer: nn.Linear) -> None:
    """As the flat shard of a sharded weight is, between its uses."""
    layer.weight = nn.Parameter(normal((K,), 2), requires_grad=False)
    for shape in ((K,), (3, K), (2, 3, K)):
        x = normal(shape, 1)
        same(layer(x), x, layer.weight)
    with torch.no_grad():
        same(torch.compile(layer, backend="eager", fullgraph=True)(x), x, layer.weight)
    (row,) = k3cupy.enable_low_latency_gemm(layer)
    assert (row.installed, row.reason) == (False, f"its weight has shape [{K}], not [N, K]")


def test_case32_a_captured_call_reads_when_the_graph_runs(
    layer: nn.Linear, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call outside the graph may come before: it is promised nothing of what a capture did."""
    x, promises = normal((3, K), 1), []

    def call(*, captured: bool) -> bool:
        monkeypatch.setattr(torch_library, "_is_captured", lambda _: captured, raising=False)
        layer(x)
        return bool(calls[-1]["weight_is_static"])

    for write in (lambda: None, lambda: torch.autograd.graph.increment_version(layer.weight)):
        write()
        promises.append([call(captured=captured) for captured in (True, True, False, False, True)])
    # In a graph the promise holds behind the first call, whatever was written before the graph.
    assert promises == [[False, True, False, True, True]] * 2


def test_a_call_without_tokens_reads_no_weight(layer: nn.Linear, calls: Calls) -> None:
    for tokens in (0, 3, 0, 3):
        layer(normal((tokens, K), 1))
    assert calls.promises == [False, False, True, True]


def test_a_call_that_failed_reads_no_weight(layer: nn.Linear, calls: Calls) -> None:
    with pytest.raises(RuntimeError):
        layer(normal((3, K + 1), 1))
    layer(normal((3, K), 1))
    assert calls.promises == [False, False]


def test_tied_layers_read_the_same_weight(layer: nn.Linear, calls: Calls) -> None:
    twin = nn.Linear(K, N, bias=False, dtype=BF16)
    twin.weight = layer.weight
    k3cupy.enable_low_latency_gemm(twin)
    for each in (layer, twin, twin):
        each(normal((3, K), 1))
    assert calls.promises == [False, True, True]


def test_a_weight_made_in_inference_mode_is_never_promised(calls: Calls) -> None:
    with torch.inference_mode():
        layer = nn.Linear(K, N, bias=False, dtype=BF16)
        k3cupy.enable_low_latency_gemm(layer)
        for _ in range(3):
            layer(normal((3, K), 1))
    assert calls.promises == [False, False, False]


def test_little_is_kept_of_weights_that_are_gone() -> None:
    x = normal((3, K), 1)
    for _ in range(1000):
        layer = nn.Linear(K, 1, bias=False, dtype=BF16)
        k3cupy.enable_low_latency_gemm(layer)
        layer(x)
        gone = StorageWeakRef(layer.weight.untyped_storage())
    assert len(torch_library._read_weights) <= 200
    del layer
    gc.collect()
    assert gone.expired()  # and nothing of their memory
