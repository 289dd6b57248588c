"""Calls that are like an earlier one: they go the short way, and what is not like it does not."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from dispatch_helpers import DispatchDevice, gpu
from fake_device import CudaTensor
from gemm_helpers import normal
from helpers import BF16
from test_call_memory import CALLS, K, M, N, each_operation
from test_house import counted
from test_prepare import arguments_of, elsewhere, function_of, on_gpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import k3cupy
from k3cupy.call import plans
from k3cupy.runtime import producers
from k3cupy.torch import torch_library

__all__ = ["gpu"]

SHORT, LONG = "<k3cupy repeat>: repeat", "<k3cupy prober>: probe"


def way_of(call: Callable[[], Any]) -> str:
    """Which way a call goes."""
    with counted() as frames, contextlib.suppress(Exception):
        call()
    assert SHORT in frames or LONG in frames
    return "long" if LONG in frames else "short"


@each_operation
def test_every_operation_is_repeated(gpu: DispatchDevice, name: str) -> None:
    call = CALLS[name]().moved(on_gpu)
    call()
    assert way_of(call) == "long", "it may have been the only one"
    again = call.moved(elsewhere)
    assert way_of(again) == "short"
    assert len(gpu.records) == 3
    first, _, second = (record.arguments for record in gpu.records)
    assert [type(a) for a in first] == [type(a) for a in second]
    assert sum(a != b for a, b in zip(first, second, strict=True)) >= len(call.tensors) - 2


def product() -> dict[str, Any]:
    return {"x": on_gpu(normal((M, K), 1)), "weight": on_gpu(normal((N, K), 2))}


OTHERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a residual": lambda a: {**a, "residual": on_gpu(normal((M, N), 3))},
    "an output": lambda a: {**a, "out": on_gpu(normal((M, N), 3))},
    "rows apart": lambda a: {**a, "x": on_gpu(normal((M, 2 * K), 1))[:, :K]},
    "no alignment": lambda a: {**a, "x": on_gpu(normal((M * K + 1,), 1)[1:].view(M, K))},
    "no PDL": lambda a: {**a, "pdl": False},
    "a promise": lambda a: {**a, "weight_is_static": True},
    "a stream": lambda a: {**a, "stream": 99},
    "a parameter": lambda a: {**a, "weight": nn.Parameter(normal((N, K), 2), requires_grad=False)},
    "another GPU": lambda a: {n: CudaTensor.of(elsewhere(t), 1) for n, t in a.items()},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_like_it_goes_the_long_way(gpu: DispatchDevice, kind: str) -> None:
    """And both are repeated after it, each as it is."""
    plain = product()
    for _ in range(2):
        k3cupy.fused_a_gemm(**plain)
    others = OTHERS[kind](product())
    assert way_of(lambda: k3cupy.fused_a_gemm(**others)) == "long"
    k3cupy.fused_a_gemm(**others)
    k3cupy.fused_a_gemm(**plain)
    first, second = gpu.records[0], gpu.records[-1]
    assert (first.instance, first.device) == (second.instance, second.device)
    made = [
        i for i, (a, b) in enumerate(zip(first.arguments, second.arguments, strict=True)) if a != b
    ]
    assert len(made) <= 1, "but for the new output"


def test_calls_of_one_shape_take_turns(gpu: DispatchDevice) -> None:
    """Layers that read slices of different tensors: each is repeated."""
    layouts = [on_gpu(normal((M, K + 8 * i), 1))[:, :K] for i in range(4)]
    weight = product()["weight"]
    for turn in range(3):
        for x in layouts:
            for run in (k3cupy.fused_a_gemm, k3cupy.try_low_latency_gemm):
                way = way_of(lambda x=x, run=run: run(x, weight))  # type: ignore[misc]
                assert way == ("long" if turn < 2 else "short")
    assert len(gpu.records) == 4 * 2 * 3


def test_too_many_layouts_of_one_shape_give_up(
    gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pushes out another is made a few times and no more: it costs more than it saves."""
    made = []
    make = plans.make_repeat
    monkeypatch.setattr(plans, "make_repeat", lambda r: made.append(r) or make(r))
    layouts = [on_gpu(normal((M, K + 8 * i), 1))[:, :K] for i in range(6)]
    weight = product()["weight"]
    for _ in range(30):
        for x in layouts:
            k3cupy.fused_a_gemm(x, weight)
    assert len(made) == 6 * 16
    assert len(gpu.records) == 6 * 30


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "forward-mode AD": forward_ad.dual_level,
    "a mode in Python": TorchDispatchMode,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_pytorch_go_the_long_way(gpu: DispatchDevice, mode: str) -> None:
    """What is repeated was seen without them."""
    plain = product()
    for _ in range(2):
        k3cupy.fused_a_gemm(**plain)
    with MODES[mode]():
        assert way_of(lambda: k3cupy.fused_a_gemm(**plain)) == "long"
    k3cupy.fused_a_gemm(**plain)
    assert way_of(lambda: k3cupy.fused_a_gemm(**plain)) == "short"


def nested() -> CudaTensor:
    return on_gpu(torch.nested.nested_tensor([torch.zeros(3, dtype=BF16)] * 2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@each_operation
def test_nested_tensors_behind_repeated_calls(gpu: DispatchDevice, name: str) -> None:
    """Their strides, asked for where PyTorch compares tensors, end the process."""
    call = CALLS[name]().moved(on_gpu)
    runs: list[Callable[..., Any]] = [call]
    if name != "dsv3_fused_a_gemm":
        ready = k3cupy.prepare(function_of(call), **arguments_of(call))
        runs.append(lambda **one: ready(*[{**call.tensors, **one}[n] for n in ready.tensors]))
    for _ in range(3):
        call()
    assert way_of(call) == "short"
    launched = len(gpu.records)
    for changed in call.tensors:
        for run in runs:
            with pytest.raises(TypeError, match=rf"\A{re.escape(changed)}: .* got a nested tensor"):
                run(**{changed: nested()})
    assert len(gpu.records) == launched


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_residual_where_x_is_the_weight(gpu: DispatchDevice) -> None:
    x = on_gpu(normal((M, K), 1))
    for _ in range(3):
        k3cupy.fused_a_gemm(x, x, on_gpu(normal((M, M), 2)))
    with pytest.raises(TypeError, match=r"\Aresidual: .* got a nested tensor"):
        k3cupy.fused_a_gemm(x, x, nested())


def test_grad_mode_is_looked_at_on_every_call(gpu: DispatchDevice) -> None:
    given = product()
    given["weight"].requires_grad_()
    for _ in range(2):
        k3cupy.fused_a_gemm(**given)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"\Aweight: "):
        k3cupy.fused_a_gemm(**given)
    assert len(gpu.records) == 2


def test_numbers_come_with_each_call(gpu: DispatchDevice) -> None:
    call = CALLS["decode-fp8"]().moved(on_gpu)
    given = {n: t for n, t in arguments_of(call).items() if not n.endswith("scale_inv")}

    def run(query: float, rows: float) -> list[Any]:
        function_of(call)(**given, q_scale_inv=query, cache_scale_inv=rows)
        return gpu.records[-1].arguments

    first = run(0.5, 0.25)
    assert run(0.5, 0.25) == first
    assert sum(a != b for a, b in zip(run(2.0, 0.25), first, strict=True)) == 1
    assert sum(a != b for a, b in zip(run(2.0, 4.0), first, strict=True)) == 2
    launched = len(gpu.records)
    for wrong in (0.0, float("nan"), 1e-60):
        with pytest.raises(ValueError, match=r"\Acache_scale_inv: expected a finite number"):
            run(2.0, wrong)
    assert len(gpu.records) == launched


def test_in_place_stays_apart_from_beside(gpu: DispatchDevice) -> None:
    given, out = product(), on_gpu(normal((M, N), 3))
    for _ in range(3):
        assert k3cupy.fused_a_gemm(**given, residual=out, out=out) is out
        assert k3cupy.fused_a_gemm(**given, residual=elsewhere(out), out=out) is out
    with pytest.raises(ValueError, match=r"\Aout: expected memory apart from x"):
        k3cupy.fused_a_gemm(given["x"], on_gpu(normal((K, K), 2)), out=given["x"])


def test_without_the_guards_every_call_goes_the_long_way(
    gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producers, "_guards", lambda: None)
    given = product()
    for _ in range(3):
        assert way_of(lambda: k3cupy.fused_a_gemm(**given)) == "long"
    assert len(gpu.records) == 3


def test_guards_that_tell_too_little_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = torch._C._dynamo.guards

    class Blind:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.check = lambda *_: True

    assert producers._guards.__wrapped__() is guards.TensorGuards
    for kind in (Blind, None):
        monkeypatch.setattr(guards, "TensorGuards", kind)
        assert producers._guards.__wrapped__() is None


def test_the_guards_are_found_in_any_mode() -> None:
    with torch.inference_mode(), torch.autocast("cpu", BF16), TorchDispatchMode():
        assert producers._guards.__wrapped__() is torch._C._dynamo.guards.TensorGuards


def test_a_repeat_needs_no_room_for_an_output(
    gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that fits into a GPU's memory fits there again."""
    made: list[int] = []

    def watched(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            made.append(tensor.untyped_storage().nbytes())
            return tensor

        return allocate

    given = product()
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, watched(getattr(torch, name)))
    for _ in range(4):
        assert k3cupy.fused_a_gemm(**given).stride() == (N, 1)
    assert sorted(made) == [2, *[2 * M * N] * 4]


@pytest.mark.parametrize("argument", ["x", "weight", "residual"])
def test_a_storage_that_was_short_once_keeps_no_other_call_from_a_kernel(
    gpu: DispatchDevice, argument: str
) -> None:
    given = {
        "x": torch.zeros(4, 1536, dtype=BF16),
        "weight": torch.zeros(2304, 1536, dtype=BF16),
        "residual": torch.zeros(4, 2304, dtype=BF16),
    }
    short = torch.zeros_like(given[argument])
    short.untyped_storage().resize_(short.untyped_storage().nbytes() - 1)
    with pytest.raises(ValueError, match=rf"\A{argument}: expected a storage of"):
        k3cupy.try_low_latency_gemm(**{**given, argument: short})
    assert k3cupy.try_low_latency_gemm(**given) is not None


def test_many_threads_each_with_its_own_tensors(gpu: DispatchDevice) -> None:
    problems: list[str] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            for i in range(30):
                x, weight = on_gpu(normal((M, K), seed)), on_gpu(normal((N, K), i))
                out = on_gpu(torch.zeros(M, N, dtype=BF16))
                if k3cupy.fused_a_gemm(x, weight, out=out) is not out:
                    problems.append(f"{seed}, {i}")
                with lock:
                    wanted.append({t.data_ptr() for t in (x, weight, out)})
                    kept.extend((x, weight, out))

    lock, wanted, kept = threading.Lock(), list[set[int]](), list[Any]()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    launched = [{a for a in r.arguments if type(a) is int and a > 1 << 20} for r in gpu.records]
    assert sorted(map(sorted, launched)) == sorted(map(sorted, wanted))


# --- Layers --------------------------------------------------------------------------------------


@pytest.fixture
def layer() -> nn.Linear:
    made = nn.Linear(K, N, bias=False, dtype=BF16)
    k3cupy.enable_low_latency_gemm(made)
    return made


def runs_short(layer: nn.Module, x: torch.Tensor) -> bool:
    with counted() as frames:
        layer(x)
    return LONG not in frames


SHAPES = [(3, K), (2, 3, K), (300, K), (3, 100, K), (2, 1, 2, K), (0, K)]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_is_repeated_where_the_framework_computes(
    layer: nn.Linear, shape: tuple[int, ...], grad: bool
) -> None:
    k3cupy.reset_dispatch_report()
    with torch.set_grad_enabled(grad):
        x = normal(shape, 1)
        for _ in range(4):
            out = layer(x)
            assert torch.equal(out, F.linear(x, layer.weight))
            assert out.requires_grad is grad
        assert runs_short(layer, x) or 0 in shape
    assert k3cupy.dispatch_report().calls == 5
    if grad:
        layer(x).float().sum().backward()
        want = F.linear(x, layer.weight)
        torch.testing.assert_close(
            layer.weight.grad, torch.autograd.grad(want.float().sum(), layer.weight)[0]
        )


def test_a_layer_goes_between_grad_modes(layer: nn.Linear) -> None:
    x = normal((3, K), 1)
    for grad in (True, False) * 3:
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                assert layer(x).requires_grad is grad


def test_a_layer_that_was_called_is_still_seen_by_pytorch(layer: nn.Linear) -> None:
    """Traces, transforms, autocast."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = normal((3, K), 1)
    layer.requires_grad_(False)
    for _ in range(3):
        want = layer(x)
    assert "linear" in str(torch.jit.trace(layer, x, check_trace=False).graph)
    torch.testing.assert_close(torch.func.vmap(layer)(x), want, rtol=2**-8, atol=0)
    graph = make_fx(layer)(x)
    assert torch.equal(graph(2 * x), 2 * want)
    for dtype in (torch.float16, BF16):
        with torch.autocast("cpu", dtype):
            for _ in range(2):
                assert layer(x).dtype == dtype
    assert torch.func.jvp(layer, (x,), (x,))[1].shape == want.shape
    assert layer.to("meta")(x.to("meta")).shape == (3, N)


def test_a_layer_that_was_called_refuses_memory_that_is_gone(layer: nn.Linear) -> None:
    x = normal((3, K), 1)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        short = normal((3, K), 1)
        short.untyped_storage().resize_(3 * K * 2 - 1)
        with pytest.raises(ValueError, match=r"\Ax: expected a storage of \d+ bytes"):
            layer(short)
        layer.weight.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"\Aweight: expected a storage of \d+ bytes .* got 0"):
            layer(x)


@pytest.mark.parametrize("shape", [(3, K), (2, 3, K)], ids=str)
def test_a_layer_that_was_called_leaves_to_pytorch_what_it_alone_reads(
    layer: nn.Linear, shape: tuple[int, ...]
) -> None:
    x = normal(shape, 1)
    with torch.no_grad():
        for _ in range(3):
            want = layer(x)
        for _ in range(2):
            assert torch.equal(layer(torch._neg_view(x)), F.linear(-x, layer.weight))
            with forward_ad.dual_level():
                found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x)))
            assert torch.equal(found.primal, want)
            assert torch.equal(found.tangent, want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_takes_nested_tensors_as_pytorch_does(layer: nn.Linear) -> None:
    rows = [normal((2, K), 1), normal((3, K), 2)]
    given = torch.nested.nested_tensor(rows)
    with torch.no_grad():
        for _ in range(3):
            layer(normal((2, 3, K), 1))
            for found, x in zip(layer(given).unbind(), rows, strict=True):
                assert torch.equal(found, F.linear(x, layer.weight))


def test_a_layer_that_was_called_still_checks_its_mode(layer: nn.Linear) -> None:
    """A number is none, although it is equal to one."""
    x = normal((3, K), 1)
    with torch.no_grad():
        for mode, wrong in ((True, 1), (False, 0)):
            layer.batch_invariant = mode  # type: ignore[assignment]
            for _ in range(3):
                layer(x)
            layer.batch_invariant = wrong  # type: ignore[assignment]
            with pytest.raises(TypeError, match=r"\Abatch_invariant: expected None, True or False"):
                layer(x)


def test_batch_invariance_of_the_process_is_seen(layer: nn.Linear) -> None:
    x = normal((3, K), 1)
    k3cupy.reset_dispatch_report()
    with torch.no_grad():
        for mode in (True, False, True):
            with k3cupy.batch_invariant_mode(mode):
                for _ in range(2):
                    layer(x)
    assert sorted(row.calls for row in k3cupy.dispatch_report()) == [2, 4]


def rows_on_gpu(shape: tuple[int, ...]) -> CudaTensor:
    return on_gpu(torch.zeros(shape, dtype=BF16))


def call_of_a_layer(x: Any, weight: Any) -> Any:
    """What a layer does with a tensor of a GPU, of which its own class check knows none here."""
    return torch_library.linear_of_any_rank(x, weight, None, True)


@pytest.mark.parametrize("shape", [(4, 1536), (2, 2, 1536), (2, 1, 1536), (1, 1536)], ids=str)
def test_a_layer_on_a_gpu_is_repeated_at_any_rank(
    gpu: DispatchDevice, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_library, "_is_captured", lambda _: False)
    weight = rows_on_gpu((2304, 1536))
    outs = []
    for turn in range(6):
        x = rows_on_gpu(shape)
        with counted() as frames:
            outs.append(call_of_a_layer(x, weight))
        assert (LONG not in frames) is (turn > 2), turn  # the first has no promise
        record = gpu.records[-1]
        assert {t.data_ptr() for t in (x, weight, outs[-1])} <= set(record.arguments)
        outs.append(x)
    assert {out.shape for out in outs[::2]} == {(*shape[:-1], 2304)}
    assert all(out.is_contiguous() for out in outs)
    static = [r.instance.name_expression for r in gpu.records]
    assert static[1:] == static[1:2] * 5
    torch._C._increment_version((weight,))
    call_of_a_layer(rows_on_gpu(shape), weight)
    assert gpu.records[-1].instance.name_expression == static[0], "not promised behind a write"


def test_a_layer_whose_rows_do_not_lie_together_is_not_repeated_by_address(
    gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are a copy, made for the call."""
    monkeypatch.setattr(torch_library, "_is_captured", lambda _: False)
    weight = rows_on_gpu((2304, 1536))
    for _ in range(4):
        x = CudaTensor.of(torch.zeros(2, 3, 1536, dtype=BF16).transpose(0, 1), 0)
        assert call_of_a_layer(x, weight).shape == (3, 2, 2304)
        assert x.data_ptr() not in gpu.records[-1].arguments
