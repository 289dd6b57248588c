"""The operator for PyTorch's compiler, and compiled models: no graph break, right results."""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_helpers import normal
from helpers import BF16, FP16
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import k3cupy
from k3cupy.torch import torch_library

PACKAGE = Path(k3cupy.__file__).parent
N, K = 48, 128
OPERATOR = torch.ops.k3cupy.low_latency_linear
each_tracer = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
TOKENS = [(1,), (16,), (17,), (300,), (0,)]
SEQUENCES = [(2, 3), (1, 4), (0, 3)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)


# The operator


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("wants_grad", [False, True])
def test_opcheck(has_residual: bool, wants_grad: bool) -> None:
    """Schema, fake tensor, autograd registration and tracing with dynamic shapes agree."""
    for shape in ((3,), (), (0,), (2, 3), (0, 3)):
        x = normal((*shape, K), 1).requires_grad_(wants_grad)
        weight = normal((N, K), 2).requires_grad_(wants_grad)
        residual = normal((*shape, N), 3).requires_grad_(wants_grad) if has_residual else None
        torch.library.opcheck(OPERATOR, (x, weight, residual, True, None), rtol=2**-7, atol=2**-3)


@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
def test_the_operator_in_float32(shape: tuple[int, ...]) -> None:
    """Its fake tensor, its sums without a rounding, and gradients of the inputs' own type."""
    x, weight = normal((*shape, K), 1).requires_grad_(), normal((N, K), 2).requires_grad_()
    residual = normal((*shape, N), 3).requires_grad_()
    named = {"out_dtype": torch.float32}
    torch.library.opcheck(OPERATOR, (x, weight, residual), named, rtol=2**-7, atol=2**-3)
    out = OPERATOR(x, weight, residual, **named)
    assert out.dtype == torch.float32
    exact = x.double() @ weight.double().T + residual.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-4)
    grad = normal((*shape, N), 4).float()
    got = torch.autograd.grad(out, (x, weight, residual), grad)
    want = torch.autograd.grad(exact, (x, weight, residual), grad.double())
    for found, wanted in zip(got, want, strict=True):
        close(found, wanted)
    with pytest.raises(TypeError, match="out_dtype: expected None or float32"):
        OPERATOR(x.to("meta"), weight.to("meta"), out_dtype=torch.float64)


def test_operator_takes_slices() -> None:
    x, weight = normal((4, 6288), 1)[:, 6144 : 6144 + K], normal((N, K), 2)
    torch.library.opcheck(OPERATOR, (x, weight))
    assert torch.equal(OPERATOR(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("shape", [(3,), (), (2, 3), (0,)], ids=str)
def test_residual_is_added(shape: tuple[int, ...]) -> None:
    x, weight, residual = normal((*shape, K), 1), normal((N, K), 2), normal((*shape, N), 3)
    close(OPERATOR(x, weight, residual), F.linear(x, weight) + residual)


def test_residual_and_x_in_one_buffer_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The column halves of one tensor of three dimensions."""
    seen: list[torch.Tensor] = []
    linear = torch_library.linear.low_latency_linear
    told = lambda x, w, residual, **named: seen.append(residual) or linear(x, w, residual, **named)  # noqa: E731
    monkeypatch.setattr(torch_library.linear, "low_latency_linear", told)
    both, weight = normal((2, 3, K + N), 1), normal((N, K), 2)
    x, residual = both.split((K, N), dim=2)
    close(OPERATOR(x, weight, residual), F.linear(x, weight) + residual)
    assert seen[0].data_ptr() == residual.data_ptr()
    assert seen[0].stride() == (K + N, 1)


def test_residual_of_another_shape() -> None:
    x, weight = normal((2, 3, K), 1), normal((N, K), 2)
    with pytest.raises(ValueError, match=r"residual: expected shape \[2, 3, 48\], got shape"):
        OPERATOR(x, weight, normal((6, N), 3))


@pytest.mark.parametrize("of_residual", [(), (N,), (1, N), (3, N), (3, 1), (2, 1, N)], ids=str)
@pytest.mark.parametrize("of_x", [(3,), (2, 3)], ids=str)
def test_a_residual_for_several_rows_as_the_function_takes_it(
    of_x: tuple[int, ...], of_residual: tuple[int, ...]
) -> None:
    x, weight = normal((*of_x, K), 1), normal((N, K), 2)
    residual = torch.full(of_residual, 0.5, dtype=BF16)
    if len(of_residual) <= x.dim():
        assert torch.equal(
            OPERATOR(x, weight, residual), k3cupy.low_latency_linear(x, weight, residual)
        )
        residual.requires_grad_()
        OPERATOR(x, weight, residual).float().sum().backward()
        assert residual.grad.shape == of_residual


FP32 = torch.float32
CALLS: dict[str, tuple[Any, ...]] = {
    "plain": (((3, K), BF16), ((N, K), BF16)),
    "of a sequence": (((2, 3, K), BF16), ((N, K), BF16), ((2, 3, N), BF16)),
    "a row": (((K,), BF16), ((N, K), BF16), ((N,), BF16)),
    "of no rows": (((0, K), BF16), ((N, K), BF16), ((0, N), BF16)),
    "of float32": (((3, K), FP32), ((N, K), FP32), ((3, N), FP32)),
    "a scalar": (((2, 3, K), BF16), ((N, K), BF16), ((), BF16)),
    "one row for all": (((2, 3, K), BF16), ((N, K), BF16), ((N,), BF16)),
    "rows for each": (((2, 3, K), BF16), ((N, K), BF16), ((3, N), BF16)),
    "a column": (((3, K), BF16), ((N, K), BF16), ((3, 1), BF16)),
    "a weight of one dimension": (((3, K), BF16), ((K,), BF16)),
    "of a sequence, a weight of one dimension": (((2, 3, K), BF16), ((K,), BF16)),
    "a product of two rows": (((K,), BF16), ((K,), BF16)),
    "another type": (((3, K), FP16), ((N, K), BF16)),
    "a wide residual": (((3, K), BF16), ((N, K), BF16), ((3, N + 1), BF16)),
    "a residual of more rows": (((3, K), BF16), ((N, K), BF16), ((2, 3, N), BF16)),
    "a residual of another type": (((3, K), BF16), ((N, K), BF16), ((3, N), FP32)),
    "a residual of other rows": (((2, 3, K), BF16), ((N, K), BF16), ((3, 2, N), BF16)),
    "another width": (((3, K), BF16), ((N, K + 1), BF16)),
    "another width of one dimension": (((3, K), BF16), ((K + 1,), BF16)),
    "a residual and one dimension": (((3, K), BF16), ((K,), BF16), ((3,), BF16)),
    "a residual and one dimension of a sequence": (((2, 3, K), BF16), ((K,), BF16), ((2, 3), BF16)),
    "a residual and one dimension each": (((K,), BF16), ((K,), BF16), ((), BF16)),
    "a weight of three dimensions": (((3, K), BF16), ((2, N, K), BF16)),
    "a weight of none": (((3, K), BF16), ((), BF16)),
    "an x of none": (((), BF16), ((N, K), BF16)),
}


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_without_values_it_takes_and_refuses_what_it_does_with_them(
    name: str, out_dtype: Any
) -> None:
    """Of meta tensors and of fake ones: the layout of the result, or an error."""

    def seen(device: str) -> Any:
        given = [torch.ones(shape, dtype=kind, device=device) for shape, kind in CALLS[name]]
        try:
            out = OPERATOR(*given, out_dtype=out_dtype)
        except (RuntimeError, TypeError, ValueError):
            return "refused"
        return out.shape, out.dtype, out.stride()

    want = seen("cpu")
    assert seen("meta") == want
    with FakeTensorMode():
        assert seen("cpu") == want


@pytest.mark.parametrize("changed", ["weight", "residual"])
def test_without_values_it_refuses_another_device(changed: str) -> None:
    shapes = {"x": (3, K), "weight": (N, K), "residual": (3, N)}
    with FakeTensorMode():
        given = {n: torch.ones(s, dtype=BF16, device="cuda") for n, s in shapes.items()}
        assert OPERATOR(**given).device == torch.device("cuda:0")
        given[changed] = torch.ones(shapes[changed], dtype=BF16)
        with pytest.raises(
            ValueError, match=rf"{changed}: expected device cuda:0 like x, got .*cpu"
        ):
            OPERATOR(**given)
    for on_meta in ("x", changed):
        given = {n: normal(s, 1).to("meta" if n == on_meta else "cpu") for n, s in shapes.items()}
        with pytest.raises(ValueError, match=rf"\A{on_meta}: expected .* got device meta"):
            OPERATOR(**given)


@pytest.mark.parametrize("shape", [(3,), (), (2, 3)], ids=str)
def test_gradients_of_the_operator(shape: tuple[int, ...]) -> None:
    inputs = [normal((*shape, K), 1), normal((N, K), 2), normal((*shape, N), 3)]
    mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    OPERATOR(*mine).float().square().sum().backward()
    (F.linear(*theirs[:2]) + theirs[2]).float().square().sum().backward()
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=2**-5, atol=2)


FORMS: dict[str, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "left out": lambda x, weight, _: ((x, weight), {}),
    "no residual": lambda x, weight, _: ((x, weight, None), {}),
    "a default": lambda x, weight, _: ((x, weight, None, False), {}),
    "every default": lambda x, weight, _: ((x, weight, None, False, None), {}),
    "by name": lambda x, weight, _: ((), {"x": x, "weight": weight}),
    "a flag": lambda x, weight, _: ((x, weight), {"weight_is_static": True}),
    "residual": lambda x, weight, residual: ((x, weight, residual), {}),
    "residual by name": lambda x, weight, residual: ((x, weight), {"residual": residual}),
    "residual, defaults": lambda x, weight, residual: ((x, weight, residual, False, None), {}),
    "residual, flags": lambda x, weight, residual: ((x, weight, residual, True, True), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_case34_gradients_whatever_is_left_out(form: str) -> None:
    """Autograd leaves out the arguments at the end that have their defaults."""
    has_residual = form.startswith("residual")
    for shape, k in (((3,), K), ((2, 3), 0)):
        inputs = [normal((*shape, k), 1), normal((N, k), 2), normal((*shape, N), 3)]
        mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
        args, named = FORMS[form](*mine)
        OPERATOR(*args, **named).float().square().sum().backward()
        want = F.linear(*theirs[:2]) + (theirs[2] if has_residual else 0)
        want.float().square().sum().backward()
        for got, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(got.grad, right.grad, rtol=2**-5, atol=2)
    torch.library.opcheck(OPERATOR, args, named, rtol=2**-7, atol=2**-3)


@pytest.mark.parametrize("wanted", range(2))
def test_case34_the_gradient_of_one_argument(wanted: int) -> None:
    x, weight = normal((3, K), 1), normal((N, K), 2)
    given = [x, weight]
    given[wanted].requires_grad_()
    OPERATOR(x, weight).float().sum().backward()
    assert [t.grad is not None for t in given] == [i == wanted for i in range(2)]


def test_a_weight_of_another_width_is_an_error_while_tracing() -> None:
    compiled = torch.compile(OPERATOR, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"weight: expected shape \[N, K\].*, got \[48, 129\]"):
        compiled(normal((3, K), 1), normal((N, K + 1), 2))


# Compiled models


class Block(nn.Module):
    """Two layers: one reads a slice of what the other wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(K, 2 * K + 16, bias=False, dtype=BF16)
        self.second = nn.Linear(K, N, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.relu())[..., 16 : 16 + K]).float() + 1


@pytest.fixture
def blocks() -> tuple[Block, Block]:
    """An enabled block, and a plain one with the same weights."""
    torch.manual_seed(0)
    mine, plain = Block().requires_grad_(False), Block().requires_grad_(False)
    plain.load_state_dict(mine.state_dict())
    assert k3cupy.enable_low_latency_gemm(mine).installed == 2
    return mine, plain


class Graphs:
    """A backend that keeps what it was given and runs it as it is."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.seen.append(called)
        return graph.forward

    def operators(self) -> list[int]:
        """How many of ours each graph has."""
        return [sum("low_latency_linear" in name for name in graph) for graph in self.seen]


def test_each_layer_becomes_one_operator_of_one_graph(blocks: tuple[Block, Block]) -> None:
    graphs = Graphs()
    compiled = torch.compile(blocks[0], fullgraph=True, backend=graphs, dynamic=True)
    for tokens in (2, 16, 17, 300):
        x = normal((tokens, K), tokens)
        close(compiled(x), blocks[1](x))
    assert graphs.operators() == [2]


@each_tracer
@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize(
    ("mode", "shapes"), [(torch.no_grad, TOKENS), (torch.inference_mode, SEQUENCES)]
)
def test_case22_compiled_with_any_number_of_tokens(
    blocks: tuple[Block, Block],
    backend: str,
    dynamic: bool | None,
    mode: Any,
    shapes: list[tuple[int, ...]],
) -> None:
    compiled = torch.compile(blocks[0], fullgraph=True, backend=backend, dynamic=dynamic)
    for shape in shapes:
        x = normal((*shape, K), 1)
        with mode():
            close(compiled(x), blocks[1](x))


@pytest.fixture
def quick_inductor() -> Iterator[None]:
    """Inductor takes no vector instructions for granted: it compiles programs to find out."""
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        yield


def give_new_weights(blocks: tuple[Block, Block], run: Any) -> None:
    """Load weights into both models, in place and by assignment; code that was compiled runs on."""
    mine, plain = blocks
    x = normal((3, K), 1)
    new = {name: normal(t.shape, i) for i, (name, t) in enumerate(plain.state_dict().items())}
    for assign in (False, True):
        state = {name: t * (1 + assign) for name, t in new.items()}
        plain.load_state_dict(state)
        mine.load_state_dict(state, assign=assign)
        mine.requires_grad_(False)
        with torch.no_grad():
            close(run(x) / 128, plain(x) / 128)


@each_tracer
def test_compiled_code_sees_new_weights(blocks: tuple[Block, Block], backend: str) -> None:
    compiled = torch.compile(blocks[0], fullgraph=True, backend=backend)
    compiled(normal((3, K), 1))
    give_new_weights(blocks, compiled)


@pytest.mark.parametrize(
    ("mode", "shapes", "dynamic"),
    [(torch.no_grad, [(3,)], False), (torch.inference_mode, [(2, 3), (0, 3), (100, 3)], True)],
)
def test_case22_compiled_by_inductor(
    blocks: tuple[Block, Block],
    quick_inductor: None,
    mode: Any,
    shapes: list[tuple[int, ...]],
    dynamic: bool | None,
) -> None:
    """Static and dynamic graphs, whose kernels are what takes long; then new weights."""
    compiled = torch.compile(blocks[0], fullgraph=True, backend="inductor", dynamic=dynamic)
    for shape in shapes:
        x = normal((*shape, K), 1)
        with mode():
            close(compiled(x), blocks[1](x))
    give_new_weights(blocks, compiled)


def test_a_compiled_model_follows_enable_and_disable(blocks: tuple[Block, Block]) -> None:
    mine, plain = blocks
    graphs, x = Graphs(), normal((3, K), 1)
    compiled = torch.compile(mine, fullgraph=True, backend=graphs)
    for change in (lambda _: None, k3cupy.disable_low_latency_gemm, k3cupy.enable_low_latency_gemm):
        change(mine)
        close(compiled(x), plain(x))
    # The third call may reuse the first one's graph.
    assert graphs.operators() in ([2, 0], [2, 0, 2])
    assert sum(graphs.operators()) >= 2


def test_compiled_code_follows_what_forbids_the_promise() -> None:
    """An adapter or FSDP may come after the layer was compiled, and go again."""
    layer = nn.Linear(K, N, bias=False, dtype=BF16).requires_grad_(False)
    k3cupy.enable_low_latency_gemm(layer)
    promised: list[bool] = []

    def told(graph: torch.fx.GraphModule, _: Any) -> Any:
        (node,) = (n for n in graph.graph.nodes if "low_latency_linear" in str(n.target))

        def run(*given: Any) -> Any:
            promised.append(node.args[3])
            return graph.forward(*given)

        return run

    compiled, x = torch.compile(layer, fullgraph=True, backend=told), normal((3, K), 1)
    compiled(x)
    adapter = nn.Module()
    adapter.base_layer = layer
    compiled(x)
    nn.Module().layer = layer  # gone again
    compiled(x)
    layer._is_fsdp_managed_module = layer._fsdp_use_orig_params = True
    compiled(x)
    # For the third call either graph is right; which one runs differs by release.
    assert [promised[i] for i in (0, 1, 3)] == [True, False, False]


def test_a_module_may_be_enabled_behind_the_compiler(blocks: tuple[Block, Block]) -> None:
    compiled = torch.compile(blocks[1], fullgraph=True, backend="eager")
    report = k3cupy.enable_low_latency_gemm(compiled)
    assert report.installed == 2
    x = normal((3, K), 1)
    close(compiled(x), blocks[0](x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training(blocks: tuple[Block, Block], backend: str) -> None:
    """Gradients are traced through the framework's linear: what compiles sees nothing of ours."""
    grads = []
    for i, model in enumerate(blocks):
        model.requires_grad_(True)
        run = torch.compile(model, fullgraph=True, backend=backend) if i == 0 else model
        run(normal((3, K), 1)).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-5, atol=2)


def test_gradients_and_autocast_are_traced_through_the_frameworks_linear(
    blocks: tuple[Block, Block],
) -> None:
    mine, plain = blocks
    graphs, x = Graphs(), normal((3, K), 1)
    compiled = torch.compile(mine, fullgraph=True, backend=graphs)
    mine.requires_grad_(True)
    compiled(x)
    with torch.no_grad():
        compiled(x)
        with torch.autocast("cpu", torch.float16):
            close(compiled(x), plain(x))
        with torch.autocast("cpu", BF16):
            close(compiled(x), plain(x))
            close(compiled(x.float()), plain(x.float()))
    # Under bfloat16 autocast a float32 x goes to PyTorch, and its result to the operator.
    assert graphs.operators() == [0, 2, 0, 2, 1]


def test_strict_export_has_the_operator(blocks: tuple[Block, Block]) -> None:
    x = normal((3, K), 1)
    with torch.no_grad():
        program = torch.export.export(blocks[0], (x,), strict=True)
    assert str(program.graph).count("k3cupy.low_latency_linear") == 2
    close(program.module()(x), blocks[1](x))


def test_export_gives_the_same_numbers(blocks: tuple[Block, Block]) -> None:
    x = normal((3, K), 1)
    with torch.no_grad():
        program = torch.export.export(blocks[0], (x,), strict=False)
    close(program.module()(x), blocks[1](x))


# Transforms


TRANSFORMS: dict[str, Callable[[Any], Callable[[torch.Tensor], Any]]] = {
    "vmap": lambda f: torch.func.vmap(f),
    "grad": lambda f: torch.func.grad(lambda x: f(x).float().sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    "jacrev": lambda f: torch.func.jacrev(f),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_in_compiled_code_go_through_the_frameworks_linear(
    transform: str, backend: str
) -> None:
    mine = nn.Linear(K, 2, bias=False, dtype=BF16).requires_grad_(False)
    plain, x = copy.deepcopy(mine), normal((3, K), 1)
    k3cupy.enable_low_latency_gemm(mine)
    compiled = torch.compile(TRANSFORMS[transform](mine), backend=backend)
    assert torch.equal(compiled(x), TRANSFORMS[transform](plain)(x))


def test_compiled_code_keeps_a_tangent() -> None:
    layer = nn.Linear(K, N, bias=False, dtype=BF16).requires_grad_(False)
    k3cupy.enable_low_latency_gemm(layer)
    compiled, x = torch.compile(layer, backend="eager"), normal((3, K), 1)
    compiled(x)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, x))).tangent
        assert torch.equal(tangent, compiled(x))


def dual(f: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    "run",
    [
        dual,
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.compile(lambda x: torch.func.jvp(f, (x,), (x,)), backend="eager")(x),
    ],
    ids=["dual", "jvp", "compiled jvp"],
)
def test_forward_mode_of_the_operator_is_refused(run: Callable[[Any, torch.Tensor], Any]) -> None:
    """PyTorch would drop the tangent of an operator that is made in Python."""
    x, weight = normal((3, K), 1), normal((N, K), 2)
    with pytest.raises(Exception, match="x: expected a call outside of forward-mode"):
        run(lambda x: OPERATOR(x, weight), x)


def test_an_x_without_dimensions_is_the_frameworks_error() -> None:
    with pytest.raises(RuntimeError, match="linear"):
        OPERATOR(torch.ones((), dtype=BF16), normal((N, K), 2))


def test_a_trace_counts_no_call_and_its_graph_counts_each() -> None:
    weight, x = normal((N, K), 2), normal((3, K), 1)
    k3cupy.reset_dispatch_report()
    make = functools.partial(make_fx, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    graph = make(lambda x: k3cupy.low_latency_linear(x, weight))(x)
    assert len(k3cupy.dispatch_report()) == 0
    for _ in range(2):
        assert torch.equal(graph(x), F.linear(x, weight))
    (row,) = k3cupy.dispatch_report()
    assert (row.n, row.k, row.num_tokens, row.calls) == (N, K, 3, 2)


@pytest.mark.parametrize("shape", [(N, K), (K,)], ids=str)
def test_the_compiler_never_traces_what_an_eager_layer_runs(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """It leaves a function that met eager transforms alone, but looks at what that calls.

    In every later call too: some would fail where no break of the graph is allowed.
    """
    from torch._dynamo import convert_frame

    layer = nn.Linear(K, N, bias=False, dtype=BF16)
    k3cupy.enable_low_latency_gemm(layer)
    # Of one dimension is the flat shard of a sharded weight, between its uses.
    layer.weight = nn.Parameter(normal(shape, 2), requires_grad=False)
    x, ignored, traced = normal((2, 3, K), 1), [], set()
    compiled, compile_frame = torch.compile(layer, backend="eager"), convert_frame._compile

    def spy(code: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(code.co_filename).is_relative_to(PACKAGE):
            traced.add(code.co_name)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", spy)
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)  # of objects made half by a trace
    for run in (compiled, torch.func.vmap(compiled), TRANSFORMS["jvp"](compiled), compiled):
        for _ in range(3):  # the first, one that is remembered, and one like it
            assert torch.equal(run(x), F.linear(x, layer.weight))
    gc.collect()
    assert ignored == []
    assert traced == {"forward"}


def test_the_graph_of_a_layer_holds_the_operator_alone() -> None:
    """No question that the layer asks while it is traced stays in it."""
    layer = nn.Linear(K, N, bias=False, dtype=BF16).requires_grad_(False)
    k3cupy.enable_low_latency_gemm(layer)
    graphs = Graphs()
    torch.compile(layer, backend=graphs, fullgraph=True)(normal((3, K), 1))
    assert graphs.seen == [[str(OPERATOR)]]
