"""Calls of low-latency linear: what runs, what falls back, what is counted. No GPU is needed."""

from __future__ import annotations

import functools
import logging
import re
import time
import timeit
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import jax_of, numpy_of, torch_of
from dispatch_helpers import DispatchDevice, only_row, says
from fake_device import H200, TensorMap
from gemm_helpers import fresh_plans, inputs, normal, unread
from gemm_table_helpers import measured, second, user_cache
from helpers import BF16, FP16, Producer, refused

import k3cupy
from k3cupy.choose.gemm import ALL, choose
from k3cupy.kernels import fused_a_gemm, skinny_gemm
from k3cupy.ops import dispatch_report, framework_linear, linear
from k3cupy.ops.warmup import wanted_of
from k3cupy.runtime import devices, instances
from k3cupy.runtime.errors import MissingError

pytestmark = pytest.mark.usefixtures("fresh_counts")

N, K = 1536, 128
CALLS = (k3cupy.try_low_latency_gemm, k3cupy.low_latency_linear, k3cupy.explain_low_latency_gemm)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> DispatchDevice:
    return DispatchDevice(monkeypatch)


# The framework's linear


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, K), (K,), (2, 3, K), (0, K), (70, K), (2, 0, K)])
def test_on_the_cpu_it_is_the_frameworks_own(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(shape, 1).to(dtype), normal((48, K), 2).to(dtype)
    assert k3cupy.try_low_latency_gemm(x, weight) is None
    assert torch.equal(k3cupy.low_latency_linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("shape", [(4, K), (K,), (2, 3, K), (0, K)])
def test_a_residual_on_the_cpu(shape: tuple[int, ...]) -> None:
    x, weight = normal(shape, 1), normal((48, K), 2)
    residual = normal((*shape[:-1], 48), 3)
    out = k3cupy.low_latency_linear(x, weight, residual)
    assert out.shape == residual.shape
    exact = x.double() @ weight.double().T + residual.double()
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("wrap", [lambda t: t, numpy_of], ids=["torch", "numpy"])
@pytest.mark.parametrize(("stride", "offset"), [(51, 1), (0, 0), (5, 3), (96, 2)])
@pytest.mark.parametrize("run", [k3cupy.low_latency_linear, k3cupy.skinny_gemm])
def test_a_residual_of_any_row_stride_on_the_cpu(
    run: Callable[..., Any], stride: int, offset: int, wrap: Callable[[Any], Any]
) -> None:
    x, weight, memory = normal((4, K), 1), normal((48, K), 2), normal((400,), 3)
    residual = memory.as_strided((4, 48), (stride, 1), offset)
    got = torch_of(run(wrap(x), wrap(weight), wrap(residual)), BF16)
    exact = x.double() @ weight.double().T + residual.double()
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("wrap", [lambda t: t, numpy_of], ids=["torch", "numpy"])
@pytest.mark.parametrize(("n", "k"), [(48, 0), (0, K), (0, 0)])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3), (2, 0, 3)], ids=str)
def test_a_linear_without_columns_or_rows(
    wrap: Callable[[Any], Any], n: int, k: int, shape: tuple[int, ...]
) -> None:
    """An empty sum is zero, whatever the number of dimensions, and the residual is added to it."""
    x, weight, residual = normal((*shape, k), 1), normal((n, k), 2), normal((*shape, n), 3)
    plain = k3cupy.low_latency_linear(wrap(x), wrap(weight))
    added = k3cupy.low_latency_linear(wrap(x), wrap(weight), wrap(residual))
    assert torch.equal(torch_of(plain, BF16), torch.zeros_like(residual))
    assert torch.equal(torch_of(added, BF16), residual)


@pytest.mark.parametrize("wrap", [lambda t: t, numpy_of], ids=["torch", "numpy"])
@pytest.mark.parametrize(
    ("of_x", "of_residual"),
    [((2, 3), (3, 2)), ((2, 3), (6,)), ((2, 3), (2, 2, 3)), ((1,), (3,)), ((), (3,))],
    ids=str,
)
def test_a_residual_whose_rows_are_not_those_of_the_product(
    wrap: Callable[[Any], Any], of_x: tuple[int, ...], of_residual: tuple[int, ...]
) -> None:
    """Though it has as many elements, or could be added if the result were larger."""
    x, weight = wrap(normal((*of_x, K), 1).float()), wrap(normal((8, K), 2).float())
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        k3cupy.low_latency_linear(x, weight, wrap(normal((*of_residual, 8), 3).float()))


@pytest.mark.parametrize("wrap", [lambda t: t, numpy_of], ids=["torch", "numpy"])
def test_a_residual_for_every_row(wrap: Callable[[Any], Any]) -> None:
    weight, residual = normal((8, K), 2).float(), normal((8,), 3).float()
    for shape in ((), (3,), (2, 3)):
        x = normal((*shape, K), 1).float()
        out = k3cupy.low_latency_linear(wrap(x), wrap(weight), wrap(residual))
        want = torch.nn.functional.linear(x, weight, residual)
        torch.testing.assert_close(torch.as_tensor(out), want)


def test_a_weight_of_one_dimension_and_a_residual() -> None:
    with pytest.raises(RuntimeError, match="mat"):
        k3cupy.low_latency_linear(normal((2, 3, K), 1), normal((K,), 2), normal((2, 3), 3))


@pytest.mark.parametrize("wrap", [numpy_of, jax_of], ids=["numpy", "jax"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_arrays_of_other_frameworks(wrap: Callable[[Any], Any], with_residual: bool) -> None:
    """A product in float32 with one rounding at the end."""
    x, weight, residual = normal((4, K), 1), normal((48, K), 2), normal((4, 48), 3)
    given = [wrap(x), wrap(weight)] + [wrap(residual)] * with_residual
    out = k3cupy.low_latency_linear(*given)
    assert type(out) is type(given[0])
    exact = x.double() @ weight.double().T + residual.double() * with_residual
    got = torch_of(out, BF16).double()
    assert ((got - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()
    assert says(only_row().choice.reason, "x", "(?i)cpu")


def test_wide_numpy_arrays_stay_wide() -> None:
    x, weight = np.ones((2, 3)), np.full((4, 3), 1 / 3)
    out = k3cupy.low_latency_linear(x, weight)
    assert out.dtype == np.float64
    np.testing.assert_array_equal(out, x @ weight.T)


def test_tensors_of_several_frameworks_have_no_linear() -> None:
    x, weight = normal((4, K), 1), normal((48, K), 2)
    run = k3cupy.low_latency_linear
    refused({"x": numpy_of(x), "weight": weight}, "weight", "^one of torch", operation=run)
    bare = {"x": Producer(x), "weight": Producer(weight)}
    found = "^one of dlpack.*explain_low_latency_gemm"
    refused(bare, "x", found, operation=run)


@pytest.mark.parametrize("changed", ["weight", "residual"])
@pytest.mark.parametrize("of", ["torch numpy", "numpy torch", "torch jax", "jax numpy"])
def test_the_framework_of_x_is_that_of_the_others(of: str, changed: str) -> None:
    makers = {"torch": lambda t: t, "numpy": numpy_of, "jax": jax_of}
    own, other = of.split()
    tensors = {"x": normal((4, K), 1), "weight": normal((48, K), 2), "residual": normal((4, 48), 3)}
    given = {n: makers[other if n == changed else own](t) for n, t in tensors.items()}
    assert k3cupy.try_low_latency_gemm(**given) is None
    for options in ({}, {"out_dtype": "float32"}):
        call = functools.partial(k3cupy.low_latency_linear, **options)
        told = refused(given, changed, f"^one of {other}", operation=call)
        assert f"a tensor of {own} like x" in told


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("junk", [None, 1.0, [[1.0]], "x"])
def test_what_is_no_tensor(call: Callable[..., Any], junk: Any) -> None:
    x, weight = normal((4, K), 1), normal((48, K), 2)
    found = f"^{type(junk).__name__}$"
    refused({"x": junk, "weight": weight}, "x", found, operation=call)
    refused({"x": x, "weight": junk}, "weight", found, operation=call)


@pytest.mark.parametrize("junk", [1, 0, "yes", [True]])
def test_flags_are_bools(junk: Any) -> None:
    tensors = {"x": normal((4, K), 1), "weight": normal((48, K), 2)}
    found = f"^{re.escape(repr(junk))}$"
    for call in CALLS:
        wrong = {**tensors, "batch_invariant": junk}
        refused(wrong, "batch_invariant", found, operation=call)
    for call in CALLS[:2]:
        wrong = {**tensors, "weight_is_static": junk}
        refused(wrong, "weight_is_static", found, operation=call)
        refused({**tensors, "stream": object()}, "stream", "^object$", operation=call)


def test_case25_gradients_are_never_lost() -> None:
    for with_residual in (False, True):
        x, weight, residual = normal((4, K), 1), normal((48, K), 2), normal((4, 48), 3)
        leaves = [t.float().requires_grad_() for t in (x, weight, residual)]
        out = k3cupy.low_latency_linear(*leaves[: 2 + with_residual])
        out.sum().backward()
        assert all(leaf.grad is not None for leaf in leaves[: 2 + with_residual])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_the_frameworks(layout: torch.layout) -> None:
    rows, weight = [normal((2, K), 1), normal((3, K), 2)], normal((48, K), 3)
    x, linear_of = torch.nested.nested_tensor(rows, layout=layout), torch.nn.functional.linear
    want = [linear_of(row, weight) for row in rows]
    for _ in range(3):
        assert k3cupy.try_low_latency_gemm(x, weight) is None
        for found, wanted in zip(k3cupy.low_latency_linear(x, weight).unbind(), want, strict=True):
            assert torch.equal(found, wanted)
        assert k3cupy.low_latency_linear(x, weight, out_dtype="float32").dtype == torch.float32
    for residual in (linear_of(x, weight), None):
        choice = k3cupy.explain_low_latency_gemm(x, weight, residual)
        assert says(choice.reason, "x", r"^a nested tensor\b"), choice
    added = k3cupy.low_latency_linear(x, weight, linear_of(x, weight))
    for found, wanted in zip(added.unbind(), want, strict=True):
        assert torch.equal(found, wanted + wanted)
    for weight_or_residual in ((x,), (weight, x)):
        assert k3cupy.try_low_latency_gemm(rows[0], *weight_or_residual) is None


def test_the_frameworks_error_has_a_note() -> None:
    """Which says what no kernel of ours took, in words that name an argument; the text stays."""
    x, weight = normal((4, K), 1), normal((48, K), 2)
    for given, found in (((x, weight.half()), "float16"), ((x, weight[:, 1:]), r"\[48, 127\]")):
        with pytest.raises(RuntimeError) as theirs:
            torch.nn.functional.linear(*given)
        with pytest.raises(RuntimeError) as ours:
            k3cupy.low_latency_linear(*given)
        assert str(ours.value) == str(theirs.value)
        if hasattr(ours.value, "add_note"):  # from Python 3.11 on
            (note,) = ours.value.__notes__
            assert says(note.removeprefix("k3cupy ran no kernel of its own: "), "weight", found)


def test_an_error_of_the_framework_is_raised_as_it_is(
    gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no reason where the tensors were no reason, and with one note however often it comes."""
    error = MemoryError("no room")

    def no_room(*_: Any) -> Any:
        raise error

    def no_compiler(*_: Any) -> Any:
        raise k3cupy.ToolchainError("no NVRTC here")

    monkeypatch.setattr(framework_linear, "torch_linear", no_room)
    monkeypatch.setattr(instances, "load", no_compiler)
    x, weight = unread(4, 7168), unread(2112, 7168)
    for given, notes in (((x, weight), 0), ((x, weight.half()), 1)):
        for _ in range(3):
            with pytest.raises(MemoryError) as caught, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                k3cupy.low_latency_linear(*given)
            assert caught.value is error
            assert len(getattr(error, "__notes__", ())) == notes * hasattr(error, "add_note")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("on_meta", ["x", "weight", "residual", "x weight", "weight residual"])
def test_meta_tensors_beside_others(call: Callable[..., Any], on_meta: str) -> None:
    """PyTorch takes them, and returns memory that nobody wrote."""
    given = {"x": normal((4, K), 1), "weight": normal((48, K), 2), "residual": normal((4, 48), 3)}
    blamed = on_meta.split()
    for name in blamed:
        given[name] = given[name].to("meta")
    for _ in range(2):
        refused(given, blamed[0], "^device meta$", operation=call)
        call(*(normal(t.shape, 1) for t in given.values()))
        call(*(t.to("meta") for t in given.values()))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory() -> None:
    """Meta tensors are for the framework; fake ones, of a trace, for the operator: no call yet."""
    x, weight = (torch.zeros(*shape, dtype=BF16, device="meta") for shape in ((4, K), (48, K)))
    assert k3cupy.low_latency_linear(x, weight).shape == (4, 48)
    assert says(only_row().choice.reason, "x", "meta")
    k3cupy.reset_dispatch_report()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.zeros(4, K, dtype=BF16), torch.zeros(48, K, dtype=BF16)
        assert k3cupy.low_latency_linear(x, weight).shape == (4, 48)
        assert k3cupy.explain_low_latency_gemm(x, weight).is_fallback
    assert len(k3cupy.dispatch_report()) == 0


# A kernel of ours, on a GPU that is none


def test_a_call_reaches_the_kernel_of_the_plan(gpu: DispatchDevice) -> None:
    x, weight = inputs(32, N, K)
    wanted = choose(ALL, N, K, 32, H200)
    assert wanted.kernel == "fused_a"
    name = wanted.config.name_expression(fused_a_gemm.Variant())
    completed = replace(wanted, name_expression=name, pdl=True)
    assert k3cupy.explain_low_latency_gemm(x, weight) == completed
    assert len(k3cupy.dispatch_report()) == 0, "explaining counts nothing"
    out = k3cupy.try_low_latency_gemm(x, weight)
    assert out.shape == (32, N)
    assert gpu.loaded == [name]
    ((_, arguments),) = gpu.launches
    assert x.data_ptr() in arguments
    row = only_row()
    assert (row.choice, row.calls) == (wanted, 1)


def test_a_repeated_call_is_one_look_up(
    gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = inputs(4, N, K)
    k3cupy.low_latency_linear(x, weight)
    monkeypatch.setattr(linear, "make_route", None)
    for _ in range(5):
        k3cupy.low_latency_linear(x, weight)
    assert len(gpu.loaded) == 1
    assert len(gpu.launches) == 6
    assert only_row().calls == 6


def test_promises_residual_and_layout_reach_the_instance(gpu: DispatchDevice) -> None:
    x, weight = inputs(32, N, K, strides=(6288, 1))
    k3cupy.low_latency_linear(x, weight, normal((32, N), 3), weight_is_static=True)
    variant = fused_a_gemm.Variant(True, True, True)
    wanted = choose(ALL, N, K, 32, H200, residual=True)
    assert gpu.loaded == [wanted.config.name_expression(variant)]


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_case45_x_and_residual_in_one_buffer(gpu: DispatchDevice, tokens: int) -> None:
    """What is chosen for packed tensors is chosen for them, and gets their places and strides."""
    n, k = 7168, 3584
    both, weight = unread(tokens, n + k), unread(n, k)
    x, residual = both[:, :k], both[:, k:]
    packed = (unread(tokens, k), weight, unread(tokens, n))
    want = k3cupy.explain_low_latency_gemm(*packed)
    choice = k3cupy.explain_low_latency_gemm(x, weight, residual)
    assert (choice.kernel, choice.config, choice.reason) == (want.kernel, want.config, want.reason)
    assert choice.kernel in ("fused_a", "skinny")
    out = k3cupy.try_low_latency_gemm(x, weight, residual)
    assert out.shape == (tokens, n)
    ((_, arguments),) = gpu.launches
    maps = [argument for argument in arguments if isinstance(argument, TensorMap)]
    assert len(maps) == (choice.kernel == "fused_a" and choice.config.mapped_x)
    for tensor in (x, weight, residual, out):
        assert tensor.data_ptr() in [*arguments, *(of.address for of in maps)]
    if tokens > 1:
        strides = [*arguments, *(of.box.row_stride for of in maps)]
        assert strides.count(n + k) == 2, "the row strides of x and of the residual"


_ROWS_APART = ((N, 0), (N + 1, 1), (N + 7, 0), (3 * N, 5), (0, 0), (5, 3))


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 70])
def test_a_residual_of_any_row_stride_and_address(
    gpu: DispatchDevice, tokens: int, out_dtype: Any
) -> None:
    """It goes where it is to the kernel that packed tensors get, in slices too."""
    x, weight = unread(tokens, K), unread(N, K)
    options = {"batch_invariant": tokens > 64, "out_dtype": out_dtype}
    packed = k3cupy.explain_low_latency_gemm(x, weight, unread(tokens, N), **options)
    assert packed.kernel in ("fused_a", "skinny")
    for stride, offset in _ROWS_APART:
        memory = unread(offset + tokens * stride + N)
        residual = memory.as_strided((tokens, N), (stride, 1), offset)
        assert k3cupy.explain_low_latency_gemm(x, weight, residual, **options) == packed
        assert k3cupy.try_low_latency_gemm(x, weight, residual, **options) is not None
        for first, (_, arguments) in zip(range(0, tokens, 64), gpu.launches, strict=True):
            assert residual.data_ptr() + 2 * first * stride in arguments
            place = -2 if packed.kernel == "fused_a" else 7 if packed.config.is_mma else 6
            assert tokens == 1 or arguments[place] == stride
        gpu.records.clear()


def test_skinny_is_reached(
    gpu: DispatchDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new measurement takes effect once tables are read anew, and what it named goes with it."""
    n, k = 2112, 7168
    x, weight = inputs(4, n, k)
    residual = normal((4, n), 3)
    k3cupy.low_latency_linear(x, weight)
    entry = measured(4, n=n, k=k, skinny_us=1.0)
    with user_cache(tmp_path, monkeypatch, entry):
        k3cupy.low_latency_linear(x, weight, residual, weight_is_static=True)
        config = second(4, "skinny", n, k)
        variant = skinny_gemm.Variant(has_residual=True, weight_is_static=True, k=k)
        assert gpu.loaded[1:] == [config.name_expression(variant)]
        ((_, arguments),) = gpu.launches[1:]
        assert residual.data_ptr() in arguments
        k3cupy.low_latency_linear(x, weight)
        assert gpu.loaded[2] == config.name_expression(skinny_gemm.Variant(k=k))
    k3cupy.low_latency_linear(x, weight)
    assert gpu.loaded[3] == gpu.loaded[0] != gpu.loaded[2]


def test_a_fall_back_is_not_decided_again(gpu: DispatchDevice) -> None:
    wide = torch.zeros(4, 6285, dtype=BF16)
    x, weight = wide[:, :K], normal((N, K), 1)
    for _ in range(3):
        assert k3cupy.try_low_latency_gemm(x, weight) is None
    assert torch.equal(k3cupy.low_latency_linear(x, weight), x @ weight.T)
    row = only_row()
    assert row.calls == 4
    assert says(row.choice.reason, "x", "6285")
    assert gpu.launches == []


def test_alignment_is_part_of_what_is_remembered(gpu: DispatchDevice) -> None:
    storage = torch.zeros(4, 6288, dtype=BF16)
    weight = normal((N, K), 1)
    assert k3cupy.try_low_latency_gemm(storage[:, 6144:6272], weight) is not None
    assert k3cupy.try_low_latency_gemm(storage[:, 6145:6273], weight) is None
    assert k3cupy.try_low_latency_gemm(storage[:, 6152:6280], weight) is not None
    assert [row.calls for row in k3cupy.dispatch_report()] == [2, 1]


def test_grad_mode_is_part_of_what_is_remembered(gpu: DispatchDevice) -> None:
    """Case 25: a parameter runs our kernel under no_grad, and the framework's with grad on."""
    x = normal((4, K), 1)
    weight = torch.nn.Parameter(normal((N, K), 2))
    with torch.no_grad():
        assert k3cupy.try_low_latency_gemm(x, weight) is not None
    assert k3cupy.try_low_latency_gemm(x, weight) is None
    out = k3cupy.low_latency_linear(x, weight)
    assert out.requires_grad
    reason = k3cupy.explain_low_latency_gemm(x, weight).reason
    assert says(reason, "weight", "weight requires grad|one that requires grad")
    with torch.inference_mode():
        assert k3cupy.try_low_latency_gemm(x, weight) is not None


class Wrapper(torch.Tensor):
    """Like a distributed tensor: metadata of one, memory of none."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("nobody computes with it here")


def test_a_wrapper_without_memory_is_not_taken_for_a_tensor(gpu: DispatchDevice) -> None:
    """Its address is 0, and everything else is as a good tensor has it."""
    x, weight = inputs(4, N, K)
    assert k3cupy.try_low_latency_gemm(x, weight) is not None
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, x.shape, dtype=BF16)
    for _ in range(2):
        assert k3cupy.try_low_latency_gemm(wrapper, weight) is None
        assert k3cupy.try_low_latency_gemm(x, weight) is not None
    reason = k3cupy.explain_low_latency_gemm(wrapper, weight).reason
    assert says(reason, "x", "without any")


def test_a_fall_back_on_a_gpu_says_so(gpu: DispatchDevice) -> None:
    x, weight = inputs(4, N, K)
    assert k3cupy.explain_low_latency_gemm(x.float(), weight).runs_on == "cuda"


def test_a_fall_back_on_the_cpu_says_so() -> None:
    x, weight = inputs(4, N, K)
    assert k3cupy.explain_low_latency_gemm(x, weight).runs_on == "cpu"
    for tensor in (x, x.to_sparse(), torch._neg_view(x), x.float().numpy()):
        found = k3cupy.explain_low_latency_gemm(tensor, weight)
        assert (found.runs_on, found.is_fallback) == ("cpu", True)
        assert str(found).startswith("linear on the CPU: x: expected ")


def test_no_tokens(gpu: DispatchDevice) -> None:
    x, weight = torch.zeros(0, K, dtype=BF16), normal((N, K), 1)
    assert k3cupy.try_low_latency_gemm(x, weight) is None
    assert k3cupy.low_latency_linear(x, weight).shape == (0, N)
    assert gpu.launches == []


def test_a_capture_names_the_warm_up(gpu: DispatchDevice) -> None:
    gpu.capturing = True
    x, weight = inputs(4, N, K)
    with pytest.raises(k3cupy.CaptureError) as caught:
        k3cupy.low_latency_linear(x, weight, weight_is_static=True)
    assert re.match(
        r"k3cupy::skinny_gemm<.*> is not loaded and stream 0x4d is capturing", str(caught.value)
    )
    assert (
        "k3cupy.warmup('low_latency_linear', shapes=[(1536, 128)], tokens=[4], residual=False, "
        "batch_invariant=False, weight_is_static=True)" in str(caught.value)
    )
    assert gpu.loaded == []
    gpu.capturing = False
    assert k3cupy.try_low_latency_gemm(x, weight, weight_is_static=True) is not None


def test_without_the_gpu_stack_the_frameworks_linear_runs(
    gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: int) -> Any:
        raise k3cupy.ToolchainError("CuPy does not import")

    x, weight = inputs(4, N, K)
    monkeypatch.setattr(devices, "info", missing)
    with pytest.warns(UserWarning, match="CuPy does not import"):
        out = k3cupy.low_latency_linear(x, weight)
    assert torch.equal(out, torch.nn.functional.linear(x, weight))
    assert only_row().choice.reason == "CuPy does not import"


def test_a_kernel_that_cannot_be_built_here_falls_back(
    gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> Any:
        raise k3cupy.ToolchainError("the CUDA headers were not found")

    monkeypatch.setattr(instances, "load", missing)
    x, weight = inputs(4, N, K)
    with pytest.warns(UserWarning, match="cannot run: the CUDA headers"):
        assert k3cupy.try_low_latency_gemm(x, weight) is None
    assert only_row().choice.reason == "the CUDA headers were not found"


def test_what_may_not_be_compiled_is_an_error_and_does_not_fall_back(
    gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K3CUPY_NO_COMPILE promises that; once it is lifted the kernel runs."""

    def missing(*_: Any) -> Any:
        raise MissingError("K3CUPY_NO_COMPILE: expected a kernel to be ready, got none")

    x, weight = inputs(4, N, K)
    with monkeypatch.context() as patched:
        patched.setattr(instances, "load", missing)
        for call in (k3cupy.try_low_latency_gemm, k3cupy.low_latency_linear):
            with pytest.raises(k3cupy.ToolchainError, match="K3CUPY_NO_COMPILE: expected a kernel"):
                call(x, weight)
    assert len(k3cupy.dispatch_report()) == 0
    assert k3cupy.try_low_latency_gemm(x, weight) is not None


# Counting


def test_the_report() -> None:
    empty = k3cupy.dispatch_report()
    assert (len(empty), empty.calls, str(empty)) == (0, 0, "no call of low-latency linear yet")
    weight = normal((48, K), 1)
    for tokens in (1, 1, 4, 65, 300):
        k3cupy.low_latency_linear(normal((tokens, K), 2), weight)
    k3cupy.low_latency_linear(normal((2, 3, K), 2), weight)
    report = k3cupy.dispatch_report()
    assert report.calls == 6
    assert report.fallbacks == report.rows
    assert [(row.tokens, row.calls) for row in report] == [
        ("0", 1),
        ("1", 2),
        ("4", 1),
        (">64", 2),
    ]
    lines = str(report).splitlines()
    told = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert told[1] == ["N x K", "M", "calls", "what ran", "why"], "no layer is known"
    (group,) = (cells for cells in told if "linear" in cells and "48 x 128" in cells)
    assert group[:3] == ["48 x 128", "1, 4, >64", "5"], "a line a weight and reason"
    assert re.search(r"(?i)cpu.* \[rule\]$", group[4])
    assert report.to_dict()["calls"] == 6
    assert report.to_dict()["rows"][1]["choice"]["kernel"] == "linear"
    assert lines[-1] == "0 of 6 calls ran a kernel of k3cupy"
    assert report.calls == 6, "a report does not change"
    k3cupy.reset_dispatch_report()
    assert len(k3cupy.dispatch_report()) == 0
    k3cupy.low_latency_linear(normal((1, K), 2), weight)
    assert k3cupy.dispatch_report().calls == 1


def test_a_product_is_one_line_of_the_report_whatever_its_layout(gpu: DispatchDevice) -> None:
    """Its rows packed or apart, with the promise and without: nothing that a line would show."""
    weight = normal((N, K), 1)
    for x in (normal((16, K), 2), torch.zeros(16, 6288, dtype=BF16)[:, :K]):
        for promise in (False, True):
            k3cupy.low_latency_linear(x, weight, weight_is_static=promise)
    assert len(set(gpu.loaded)) == 2, "with the promise and without"
    assert only_row().calls == 4


def test_many_tokens_share_a_line_of_the_report(gpu: DispatchDevice) -> None:
    """However long prefills are: neither the report nor the log grows with their lengths."""
    weight = normal((N, K), 1)
    for tokens in (65, 66, 300):
        k3cupy.low_latency_linear(normal((tokens, K), 2), weight)
    row = only_row()
    assert (row.tokens, row.calls) == (">64", 3)
    assert says(row.choice.reason, "x", "^more$")


def test_rows_without_end_are_counted_together(
    gpu: DispatchDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call is counted, whatever shapes come; memory and log end somewhere."""
    monkeypatch.setattr(dispatch_report, "counters", counters := {})
    monkeypatch.setattr(linear, "counters", counters)
    caplog.set_level(logging.DEBUG, logger="k3cupy.dispatch")
    first = dispatch_report.counter_of(k3cupy.Choice("skinny", None, "known"), 8, 16, 1)
    weight = normal((48, K), 1)
    for n in range(1, 2001):
        dispatch_report.counter_of(k3cupy.Choice("linear", None, "met once"), n, 16, 1).calls += 1
    for _ in range(2):
        k3cupy.low_latency_linear(normal((4, K), 2), weight)
        k3cupy.try_low_latency_gemm(normal((4, K), 2), weight.float())
    first.calls += 1
    report = k3cupy.dispatch_report()
    assert report.calls == 2005
    together = [row for row in report if "first 1000 rows" in row.choice.reason]
    assert [(row.choice.kernel, row.calls) for row in together] == [
        ("linear", 1003),
        ("skinny", 2),
    ]
    assert [row.calls for row in report if row.n == 8] == [1, 1]
    assert len(report) == len(counters) == len(caplog.records) == 1002
    assert str(report).splitlines()[-1] == "3 of 2005 calls ran a kernel of k3cupy"


def test_one_log_line_for_each_new_decision(
    gpu: DispatchDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_report, "counters", counters := {})
    monkeypatch.setattr(linear, "counters", counters)
    caplog.set_level(logging.DEBUG, logger="k3cupy.dispatch")
    x, weight = inputs(4, N, K)
    for _ in range(3):
        k3cupy.low_latency_linear(x, weight)
        k3cupy.try_low_latency_gemm(x.clone(), weight.float())
    ours, fall_back = (record.getMessage() for record in caplog.records)
    assert ours == f"1536 x 128, M = 4: {choose(ALL, N, K, 4, H200)}"
    start, _, reason = fall_back.partition(": linear: ")
    assert start == "1536 x 128, M = 4"
    assert says(reason, "weight", "float32")
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_concurrent_first_calls(gpu: DispatchDevice, caplog: pytest.LogCaptureFixture) -> None:
    """Every thread gets its result, and every call is counted, however they meet."""
    caplog.set_level(logging.DEBUG, logger="k3cupy.dispatch")
    shapes = [(tokens, n) for tokens in range(1, 9) for n in (48, 64)]
    tensors = [inputs(tokens, n, K) for tokens, n in shapes]
    barrier = Barrier(8)

    def work(_: int) -> list[tuple[int, ...]]:
        barrier.wait()
        return [tuple(k3cupy.low_latency_linear(x, weight).shape) for x, weight in tensors]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(8)):
            assert found == shapes
    report = k3cupy.dispatch_report()
    assert report.calls == 8 * len(shapes)
    assert [row.calls for row in report] == [8] * len(shapes)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines))


# Cost


def test_the_look_up_costs_little(gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the direct call of the same kernel, all on a launch that does nothing."""
    monkeypatch.setattr(gpu, "records", Forgetful())
    x, weight = inputs(4, N, K)

    def us_of(call: Callable[[], Any]) -> float:  # of this process: others share the cores
        return timeit.timeit(call, number=300, timer=time.process_time) / 300 * 1e6

    calls = (
        lambda: k3cupy.fused_a_gemm(x, weight),
        lambda: k3cupy.low_latency_linear(x, weight),
    )
    with torch.no_grad():
        rounds = [[us_of(call) for call in calls] for _ in range(10)]
    direct, dispatched = map(min, zip(*rounds[1:], strict=True))
    print(f"direct {direct:.2f} us, dispatched {dispatched:.2f} us")
    assert dispatched < 2 * direct + 3


class Forgetful(list[Any]):
    """A list that stays empty."""

    def append(self, _: Any) -> None:
        return None


@pytest.mark.parametrize("op", ["fused_a_gemm", "skinny_gemm"])
def test_every_kernel_loads_what_its_warm_up_compiles(
    op: str, gpu: DispatchDevice, tmp_path: Path
) -> None:
    x, weight = inputs(4, N, K)
    wanted = wanted_of(op, {"shapes": [(N, K)], "tokens": 4})(H200)
    with fresh_plans(tmp_path):
        assert getattr(k3cupy, op)(x, weight).shape == (4, N)
    assert gpu.loaded[-1] in {instance.name_expression for instance in wanted}
