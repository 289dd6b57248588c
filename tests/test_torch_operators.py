"""Operators for PyTorch's compiler, and the plain functions in what it compiles or exports."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from gemm_helpers import normal
from helpers import BF16, FP16
from mla_helpers import FORMS as EPILOGUES
from mla_helpers import Form, MlaCall, as_list, as_out
from mla_layer_helpers import LAYER_FORMS
from operator_helpers import Called, Counting, each_strictness, ours_in, same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import k3cupy
from k3cupy.call.operation import operations
from k3cupy.torch import operators
from k3cupy.torch.compiled import OUTPUTS as GIVEN

OURS = torch.ops.k3cupy
M, N, K = 4, 64, 128
LAYERS = ("norm", "query", "query-fp8", "query-ds_mla", "value", "value-gate")
FORMS: dict[str, Any] = EPILOGUES | {name: LAYER_FORMS[name] for name in LAYERS}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=str)
ALONG_TOKENS = (
    *("ql_nope", "q", "q_pe", "k_nope", "v", "kv_c_normed", "k_pe"),
    *("slot_mapping", "positions", "qkv_a", "latent", "gate"),
)


class Product(NamedTuple):
    """A product by its public function, and how it is called.

    Attributes:
        run: (x, weight, residual, output) -> the result.
        dtype: of the tensors.
    """

    run: Callable[..., Any]
    dtype: torch.dtype = BF16


PRODUCTS = {
    "fused_a_gemm": Product(lambda x, w, r, o: k3cupy.fused_a_gemm(x, w)),
    "fused_a_gemm residual": Product(
        lambda x, w, r, o: k3cupy.fused_a_gemm(x, w, r, pdl=False, batch_invariant=True)
    ),
    "fused_a_gemm float32": Product(
        lambda x, w, r, o: k3cupy.fused_a_gemm(x, w, out_dtype=torch.float32)
    ),
    "fused_a_gemm out": Product(lambda x, w, r, o: k3cupy.fused_a_gemm(x, w, r, out=o)),
    "fused_a_gemm in place": Product(lambda x, w, r, o: k3cupy.fused_a_gemm(x, w, o, out=o)),
    "dsv3 of vLLM": Product(lambda x, w, r, o: k3cupy.dsv3_fused_a_gemm(o, x, w.t(), True)),
    "dsv3 of SGLang": Product(lambda x, w, r, o: k3cupy.dsv3_fused_a_gemm(x, w.t())),
    "dsv3 of SGLang out": Product(lambda x, w, r, o: k3cupy.dsv3_fused_a_gemm(x, w.t(), o)),
    "skinny_gemm": Product(lambda x, w, r, o: k3cupy.skinny_gemm(x, w, r), FP16),
    "skinny_gemm out": Product(
        lambda x, w, r, o: k3cupy.skinny_gemm(x, w, out=o, weight_is_static=True)
    ),
    "linear": Product(lambda x, w, r, o: k3cupy.low_latency_linear(x, w)),
    "linear residual": Product(
        lambda x, w, r, o: k3cupy.low_latency_linear(x, w, r, batch_invariant=True)
    ),
    "linear float32": Product(
        lambda x, w, r, o: k3cupy.low_latency_linear(x, w, r, out_dtype="float32")
    ),
    "linear of fp16": Product(lambda x, w, r, o: k3cupy.low_latency_linear(x, w, r), FP16),
    "linear of fp16 in float32": Product(
        lambda x, w, r, o: k3cupy.low_latency_linear(x, w, r, out_dtype=torch.float32), FP16
    ),
    "linear of a sequence": Product(
        lambda x, w, r, o: k3cupy.low_latency_linear(x[None], w, r[None])
    ),
}
each_product = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)


def product_arguments(
    tokens: int = M, device: str = "cpu", dtype: torch.dtype = BF16, n: int = N, k: int = K
) -> tuple[torch.Tensor, ...]:
    """x, a column slice; weight, residual, and an output."""
    shapes = ((tokens, 2 * k), (n, k), (tokens, n), (tokens, n))
    wide, *rest = (normal(s, i, device, dtype) for i, s in enumerate(shapes, tokens))
    return wide[:, :k], *rest


def mla_call(form: Form, tokens: int = M, device: str = "cpu", **options: Any) -> MlaCall:
    """The same call for the same number of tokens, in memory of its own, with RoPE."""
    blocks = {"num_blocks": 3} if form.has_cache else {}
    return form.make(tokens, 3, rope=True, device=device, seed=tokens, **blocks, **options)


def of_operator(call: MlaCall) -> dict[str, Any]:
    """The arguments of a call as the operator takes them: numbers beside the tensors."""
    numbers = {n for n, v in call.args.items() if n.endswith("scale_inv") and isinstance(v, float)}
    return {f"{n}_value" if n in numbers else n: value for n, value in call.args.items()}


# The operators


def test_every_operation_has_an_operator_of_its_own_arguments() -> None:
    """All but `stream`, `config` and `out`, in the order of the function, with its defaults."""
    others = {"dsv3_fused_a_gemm"}
    public = {name for f in operations if (name := f.__name__) in k3cupy.__all__}
    assert {*operators.SCHEMAS, *others} == public
    for name in operators.SCHEMAS:
        schema = getattr(OURS, name).default._schema
        found = {a.name: a for a in schema.arguments if not a.name.endswith("_value")}
        wanted = dict(inspect.signature(getattr(k3cupy, name)).parameters)
        for left_out in ("stream", "config", "out"):
            del wanted[left_out]
        assert {*found} == {*wanted}, name
        positional = [n for n, p in wanted.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [n for n, a in found.items() if not a.kwarg_only] == positional, name
        for argument, parameter in wanted.items():
            if parameter.default is not parameter.empty:
                assert found[argument].default_value == parameter.default, (name, argument)
        scales = {n for n in wanted if n.endswith("scale_inv")}
        numbers = {a.name for a in schema.arguments} - {*found}
        assert numbers == {f"{n}_value" for n in scales}, name


@each_form
def test_what_is_written_stands_in_the_schema(form: Form) -> None:
    operator = getattr(OURS, form.function)
    written = {a.name for a in operator.default._schema.arguments if a.alias_info is not None}
    assert written == {*form.written(rope=True)}
    written = {a.name for a in operator.out._schema.arguments if a.alias_info is not None}
    assert written == {*form.written(rope=True), *GIVEN.get(form.function, ("out",))}
    assert operator.out._schema.returns == []


UNTRACED = ("test_schema", "test_autograd_registration", "test_faketensor")
"""Tests of opcheck; tracing, the fourth, is `test_one_graph_for_every_number_of_tokens`."""


@each_form
def test_opcheck(form: Form, device: str) -> None:
    """Caches and outputs that are written come as bytes: opcheck cannot compare e4m3."""
    options = {"cache": "uint8"} if form.name in ("decode-fp8", "query-fp8") else {}
    options |= {"cache": torch.uint8} if form.kind == "fp8" else {}
    name = form.function
    call = mla_call(form, device=device, **options)
    outs = [
        out.view(torch.uint8) if out.element_size() == 1 else out for out in as_list(call.run())
    ]
    given = of_operator(call)
    torch.library.opcheck(getattr(OURS, name).default, (), given, test_utils=UNTRACED)
    given |= zip(GIVEN.get(name, ("out",)), outs, strict=True)
    torch.library.opcheck(getattr(OURS, name).out, (), given)


@pytest.mark.parametrize("name", ["fused_a_gemm", "skinny_gemm", "dsv3_fused_a_gemm"])
def test_opcheck_of_products(name: str, device: str) -> None:
    x, weight, residual, out = product_arguments(device=device)
    operator = getattr(OURS, name)
    if name == "dsv3_fused_a_gemm":
        torch.library.opcheck(operator, (out, x, weight.t()))
        torch.library.opcheck(operator, (out, x, weight.t(), True))
        return
    for given in ((), (residual,)):
        torch.library.opcheck(operator.default, (x, weight, *given))
        torch.library.opcheck(operator.out, (x, weight, *given), {"out": out})
    torch.library.opcheck(operator.out, (x, weight, None, torch.cat((out, out), 1)[:, N:]))
    torch.library.opcheck(operator.default, (x, weight), {"out_dtype": torch.float32})


def test_schemas_of_others_are_vllms() -> None:
    """What an engine's own operator of this name takes, ours takes."""
    schema = str(OURS.dsv3_fused_a_gemm.default._schema)
    arguments = "Tensor(a!) output, Tensor mat_a, Tensor mat_b, bool enable_pdl=False"
    assert schema == f"k3cupy::dsv3_fused_a_gemm({arguments}) -> ()"


@each_form
def test_an_operator_is_its_function(form: Form, device: str) -> None:
    name, (first, second) = form.function, (mla_call(form, device=device) for _ in range(2))
    want, got = first.run(), getattr(OURS, name)(**of_operator(second))
    same(got, want, name)
    outs = dict(zip(GIVEN.get(name, ("out",)), map(torch.empty_like, as_list(want)), strict=True))
    third = mla_call(form, device=device)
    assert getattr(OURS, name).out(**of_operator(third), **outs) is None
    same(tuple(outs.values()), as_out(as_list(want)) if len(outs) > 1 else (want,), name)
    for argument in form.tensors:
        if isinstance(first.args.get(argument), torch.Tensor):
            for call in (second, third):
                same(call.args[argument], first.args[argument], argument)


def test_scales_as_tensors_and_as_numbers() -> None:
    form = FORMS["fp8"]
    name = form.function
    want = mla_call(form).run()
    call = mla_call(form, scale_tensors=True)
    same(getattr(OURS, name)(**call.args), want, "tensors")
    given = of_operator(mla_call(form))
    with pytest.raises(ValueError, match="q_scale_inv: expected None beside q_scale_inv_value"):
        getattr(OURS, name)(**given, q_scale_inv=torch.ones(1))
    del given["k_scale_inv_value"]
    with pytest.raises(TypeError, match="k_scale_inv: expected a scale, got None"):
        getattr(OURS, name)(**given)


def test_operators_on_the_meta_device() -> None:
    call = mla_call(FORMS["decode-fp8"]).on("meta")
    out = OURS.fused_mla_decode_q_concat_kv_cache_insert(**of_operator(call))
    assert (out.shape, out.dtype, out.device.type) == ((M, 3, 576), torch.float8_e4m3fn, "meta")
    with pytest.raises(ValueError, match=r"weight: expected shape \[N, 128\] like x, got"):
        OURS.fused_a_gemm(torch.empty(3, K, dtype=BF16), torch.empty(N, K + 1).to("meta", BF16))


def test_meta_tensors_beside_others() -> None:
    """The error of the function; else PyTorch would return memory that nobody wrote."""
    for label, operator, given, _ in each_operator_once():
        tensors = {n: t for n, t in given.items() if isinstance(t, torch.Tensor)}
        before = {n: oracle.bits(t.clone()) for n, t in tensors.items()}
        for name, tensor in tensors.items():
            all_others = {n: t if n == name else t.to("meta") for n, t in tensors.items()}
            for changed in ({name: tensor.to("meta")}, all_others):
                on_meta = [n for n, t in changed.items() if t.is_meta]
                with pytest.raises(ValueError, match=r"\A\w+: .* got device meta\Z") as caught:
                    getattr(operator, "out" if "out" in given else "default")(
                        **{**given, **changed}
                    )
                assert str(caught.value).partition(":")[0] in on_meta, label
        for name, tensor in tensors.items():
            oracle.assert_same_bits(oracle.bits(tensor), before[name], f"{name} of {label}")


def test_a_scalar_of_the_cpu_beside_meta_tensors() -> None:
    """PyTorch takes those on any device."""
    call = mla_call(FORMS["decode-fp8"]).on("meta")
    given = {n: t for n, t in of_operator(call).items() if not n.endswith("_value")}
    scales = {"q_scale_inv": torch.tensor(0.5), "cache_scale_inv": torch.tensor(0.5)}
    out = OURS.fused_mla_decode_q_concat_kv_cache_insert(**given, **scales)
    assert (out.shape, out.device.type) == ((M, 3, 576), "meta")


def test_importing_the_operators_again_registers_nothing_twice() -> None:
    before = OURS.fused_a_gemm.default
    assert importlib.import_module("k3cupy.torch.operators") is operators
    assert OURS.fused_a_gemm.default is before


# Derivatives and transforms


def each_operator_once() -> Iterator[tuple[str, Any, dict[str, Any], str]]:
    """An operator's name, it, the arguments of a call, and the first of them."""
    for form in (FORMS["decode"], *(FORMS[kind] for kind in ("insert", "ds_mla"))):
        given = of_operator(mla_call(form))
        yield str(form), getattr(OURS, form.function), given, next(iter(form.inputs))
    for kind in ("fp8", "concat", "concat_fp8", "norm", "query", "value-gate"):
        given = of_operator(mla_call(FORMS[kind]))
        yield kind, getattr(OURS, FORMS[kind].function), given, next(iter(FORMS[kind].inputs))
    x, weight, _, out = product_arguments()
    for name in ("fused_a_gemm", "skinny_gemm"):
        yield name, getattr(OURS, name), {"x": x, "weight": weight}, "x"
        yield name, getattr(OURS, name), {"x": x, "weight": weight, "out": out}, "x"
    given = {"output": out, "mat_a": x, "mat_b": weight.t()}
    yield "dsv3_fused_a_gemm", OURS.dsv3_fused_a_gemm, given, "output"


def floats_of(given: dict[str, Any]) -> list[str]:
    return [n for n, v in given.items() if isinstance(v, torch.Tensor) and v.dtype == BF16]


def test_gradients_are_refused_and_never_zero() -> None:
    """Whichever argument requires grad; without grad mode the call is one like any other."""
    for name, operator, given, _ in each_operator_once():
        for followed in floats_of(given):
            mine = {**given, followed: given[followed].detach().clone().requires_grad_()}
            with pytest.raises(ValueError, match=f"{followed}: expected a tensor without gradient"):
                operator(**mine)
            if followed in ("x", "ql_nope", "k_nope", "qkv_a", "latent"):
                with torch.no_grad():
                    operator(**mine)
        followed = floats_of(given)[-1]
        through = functools.partial(_summed, operator, given, followed)
        with pytest.raises(ValueError, match=f"{followed}: expected a tensor without gradient"):
            torch.func.grad(through)(given[followed])
        assert name


def _summed(operator: Any, given: dict[str, Any], name: str, value: torch.Tensor) -> Any:
    out = operator(**{**given, name: value})
    return as_list(out)[0].float().sum() if out is not None else value.float().sum()


def test_vmap_and_forward_mode_are_refused() -> None:
    for name, operator, given, first in each_operator_once():
        mapped = floats_of(given)[-1]
        run = lambda value, f=operator, g=given, n=mapped: f(**{**g, n: value})  # noqa: E731
        many = given[mapped].expand(2, *given[mapped].shape)
        with pytest.raises(TypeError, match=f"{first}: expected a call outside of torch.func.vmap"):
            torch.func.vmap(run)(many)
        value = given[mapped].clone()
        with pytest.raises(TypeError, match=f"{first}: expected a call outside of forward-mode"):
            torch.func.jvp(run, (value,), (value,))
        assert name


def test_the_linear_in_functional_gradients() -> None:
    """The function has them; of an operator that is made in Python PyTorch has none."""
    x, weight = normal((3, K), 1), normal((N, K), 2)

    def gradient(run: Callable[..., Any]) -> Any:
        return torch.func.grad(lambda rows: run(rows, weight).float().sum())(x)

    same(gradient(k3cupy.low_latency_linear), gradient(F.linear), "the gradient")
    with pytest.raises(RuntimeError, match="functorch transforms"):
        gradient(OURS.low_latency_linear)


def test_the_linear_under_vmap_is_a_loop() -> None:
    x, weight = normal((2, 3, K), 1), normal((N, K), 2)
    mapped = torch.func.vmap(lambda rows: OURS.low_latency_linear(rows, weight))(x)
    same(mapped, torch.stack([OURS.low_latency_linear(rows, weight) for rows in x]), "rows")


# The plain functions in compiled code


def follow(call: MlaCall) -> Callable[..., Any]:
    """A call, and what comes behind it in the graph: what it has written is read."""
    run = getattr(k3cupy, call.name)

    def step(given: dict[str, Any]) -> Any:
        out = run(**given)
        cache, q = given.get("kv_cache"), given.get("q")
        return (
            *as_list(out),
            None if cache is None else cache.view(torch.uint8).clone(),
            None if q is None else q + 1,
        )

    return step


@each_form
def test_one_graph_for_every_number_of_tokens(form: Form, device: str) -> None:
    """Same bits, whole cache and turned query included, by one operator that is compiled once."""
    counting = Counting()
    step = follow(mla_call(form))
    compiled = torch.compile(step, fullgraph=True, backend=counting)
    for tokens in (4, 5, 17):
        mine, theirs = (mla_call(form, tokens, device) for _ in range(2))
        for name in ALONG_TOKENS:
            if name in mine.args:
                torch._dynamo.mark_dynamic(mine.args[name], 0)
        with torch.no_grad():
            same(compiled(mine.args), step(theirs.args), f"{tokens} tokens")
        for name in form.tensors:
            if isinstance(theirs.args.get(name), torch.Tensor):
                same(mine.args[name], theirs.args[name], name)
    assert counting.graphs == [[form.function]]


@each_product
def test_one_graph_for_every_product(product: Product, device: str) -> None:
    """Same bits, in what is returned, and in an output that was given and is read behind it."""
    counting = Counting()

    def step(x: Any, weight: Any, residual: Any, out: Any) -> Any:
        return product.run(x, weight, residual, out), out * 2

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    for tokens in (3, 4, 16):
        mine, theirs = (product_arguments(tokens, device, product.dtype) for _ in range(2))
        for i in (0, 2, 3):
            torch._dynamo.mark_dynamic(mine[i], 0)
        same(compiled(*mine), step(*theirs), f"{tokens} tokens")
        for left, right in zip(mine, theirs, strict=True):
            same(left, right, "an argument")
    assert len(counting.graphs) == 1


@pytest.mark.parametrize("side", [N, K], ids=["wide", "square"])
def test_the_orders_of_dsv3_in_compiled_code(side: int) -> None:
    """Three squares of one size fit both: the layout of the weight tells."""
    x, weight, _, out = product_arguments(side if side == N else M, n=side, k=side)
    want = k3cupy.fused_a_gemm(x, weight)
    for order in (lambda: (out, x, weight.t()), lambda: (x, weight.t(), out)):
        out.fill_(7)
        compiled = torch.compile(
            lambda *given: k3cupy.dsv3_fused_a_gemm(*given), fullgraph=True, backend="eager"
        )
        result = compiled(*order())
        assert (result is out) == (order()[2] is out)
        same(out, want, "output")


def test_try_low_latency_gemm_in_compiled_code_always_gives_an_output() -> None:
    """Whether a kernel of ours runs is decided when the graph does; then the framework's may."""
    x, weight, *_ = product_arguments()
    assert k3cupy.try_low_latency_gemm(x, weight) is None
    compiled = torch.compile(
        lambda *t: k3cupy.try_low_latency_gemm(*t), fullgraph=True, backend="eager"
    )
    same(compiled(x, weight), F.linear(x, weight), "the linear")


@pytest.mark.parametrize("name", ["decode-ds_mla", "concat_fp8", "norm", "value-gate"])
def test_an_output_that_is_given_comes_back_itself(name: str) -> None:
    form = FORMS[name]
    mine, theirs = mla_call(form), mla_call(form)
    want = theirs.run()
    outs = [torch.empty_like(out) for out in as_list(want)]
    compiled = torch.compile(
        lambda given, outs: mine.operation(**given, out=as_out(outs)),
        fullgraph=True,
        backend="eager",
    )
    got = compiled(mine.args, outs)
    assert all(a is b for a, b in zip(as_list(got), outs, strict=True))
    same(got, want, "outputs")


@pytest.mark.parametrize("name", ["fused_a_gemm", "skinny_gemm"])
@pytest.mark.parametrize("way", ["compiled", "exported", "exported strictly"])
def test_an_output_may_be_columns_of_a_wider_tensor(name: str, way: str) -> None:
    """It is written where it lies, in one graph; what is beside it stays."""
    x, weight, residual, _ = product_arguments()

    def step(**given: Any) -> Any:
        wide = given["wide"]
        out = getattr(k3cupy, name)(given["x"], given["weight"], residual, out=wide[:, N:])
        return out, wide + 1

    mine, theirs = ({"x": x, "weight": weight, "wide": normal((M, 2 * N), 5)} for _ in range(2))
    want = step(**theirs)
    if way == "compiled":
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        got = compiled(**mine)
        assert got[0].data_ptr() == mine["wide"][:, N:].data_ptr()
    else:
        example = {**mine, "wide": mine["wide"].clone()}
        program = torch.export.export(Called(step), (example,), strict="strictly" in way)
        assert ours_in(program.graph) == [f"{name}.out"]
        got = program.module()(mine)
    same(got, want, name)
    same(mine["wide"], theirs["wide"], "the wider tensor")


def test_an_overload_out_wants_its_output() -> None:
    x, weight, *_ = product_arguments()
    for given in (x, weight), (x.to("meta"), weight.to("meta")):
        for name in ("fused_a_gemm", "skinny_gemm"):
            with pytest.raises(TypeError, match="out: expected a tensor, got None"):
                getattr(OURS, name).out(*given)


def test_scales_that_are_numbers_change_from_call_to_call() -> None:
    """PyTorch makes a symbol of a number that has changed."""
    run = k3cupy.fused_mla_decode_q_concat_kv_cache_insert
    compiled = torch.compile(
        lambda given, scale: run(**{**given, "cache_scale_inv": scale}),
        fullgraph=True,
        backend="aot_eager",
    )
    for scale in (0.5, 1.25, 2.0, 3):
        mine, theirs = (mla_call(FORMS["decode-uint8"]) for _ in range(2))
        run(**{**theirs.args, "cache_scale_inv": scale})
        compiled(mine.args, scale)
        same(mine.args["kv_cache"], theirs.args["kv_cache"], f"a scale of {scale}")


def test_an_epsilon_that_changes_and_heads_that_are_a_symbol() -> None:
    norm, value = FORMS["norm"], FORMS["value-gate"]
    call = mla_call(norm)
    compiled = torch.compile(
        lambda qkv_a, q, kv, eps: k3cupy.fused_q_kv_rmsnorm(qkv_a, q, kv, eps=eps),
        fullgraph=True,
        backend="aot_eager",
    )
    tensors = [call.args[name] for name in norm.inputs]
    for eps in (0.5, 1e-6, 2.0, 1):
        same(compiled(*tensors, eps), call.run(eps=eps), f"an epsilon of {eps}")
    broken = torch.compile(k3cupy.fused_q_kv_rmsnorm, backend="eager")
    for wrong in (None, True, "1"):
        with pytest.raises(TypeError, match="eps: expected a number, got"):
            broken(*tensors, eps=wrong)
    compiled = torch.compile(
        k3cupy.fused_mla_decode_value, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for heads in (2, 3, 12):
        call = value.make(5, heads)
        same(compiled(*(call.args[name] for name in value.inputs)), call.run(), f"{heads} heads")


def test_caches_that_are_views_and_two_writes_of_one() -> None:
    """One layer of a larger cache, written twice in a graph and read in between."""
    form = FORMS["decode"]

    def step(pool: torch.Tensor, first: dict[str, Any], second: dict[str, Any]) -> Any:
        run = k3cupy.fused_mla_decode_q_concat_kv_cache_insert
        layer = pool[1]
        a = run(**first, kv_cache=layer)
        between = layer.clone()
        b = run(**second, kv_cache=layer)
        return a, between, b, pool + 1

    calls = [mla_call(form, tokens) for tokens in (3, 5)]
    given = [{n: v for n, v in c.args.items() if n != "kv_cache"} for c in calls]
    mine, theirs = (torch.ones(3, 2, 16, 576, dtype=BF16) for _ in range(2))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    same(compiled(mine, *given), step(theirs, *given), "outputs")
    same(mine, theirs, "the pool")
    assert not torch.equal(theirs[1], torch.ones_like(theirs[1]))


def test_a_query_that_is_turned_in_place_in_the_graph_that_made_it() -> None:
    call = mla_call(FORMS["insert"])
    given = {n: v for n, v in call.args.items() if n not in ("q", "kv_cache")}

    def step(x: torch.Tensor, cache: torch.Tensor, given: dict[str, Any]) -> Any:
        q = (x * 2).view(M, 3, 256)[..., :192]
        k = k3cupy.fused_mla_key_concat_kv_cache_insert(q=q, kv_cache=cache, **given)
        return q @ k.transpose(-1, -2), cache * 2

    x = normal((M, 3 * 256), 3)
    mine, theirs = (torch.zeros(3, 16, 576, dtype=BF16) for _ in range(2))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    same(compiled(x, mine, given), step(x, theirs, given), "scores")
    same(mine, theirs, "the cache")


def test_an_operation_compiled_itself() -> None:
    x, weight, residual, _ = product_arguments()
    want = k3cupy.fused_a_gemm(x, weight, residual)
    compiled = torch.compile(k3cupy.fused_a_gemm, fullgraph=True, backend="eager")
    same(compiled(x, weight, residual), want, "the operation")
    compiled = torch.compile(k3cupy.low_latency_linear, fullgraph=True, backend="eager")
    same(compiled(x, weight), F.linear(x, weight), "the linear")


def test_a_wrapper_of_an_operation_is_not_taken_for_it() -> None:
    """``functools.wraps`` copies what a function carries: marks of ours stand elsewhere."""

    @functools.wraps(k3cupy.fused_a_gemm)
    def doubled(*given: Any) -> Any:
        return 2 * k3cupy.fused_a_gemm(*given)

    x, weight, *_ = product_arguments()
    compiled = torch.compile(lambda *t: doubled(*t), fullgraph=True, backend="eager")
    same(compiled(x, weight), doubled(x, weight), "the wrapper")


def test_gradients_in_compiled_code() -> None:
    """The linear has them, as outside; of the others the error is that of the call."""
    x, weight, residual, _ = (t.clone() for t in product_arguments())
    mine, theirs = ([t.clone().requires_grad_() for t in (x, weight, residual)] for _ in range(2))
    compiled = torch.compile(k3cupy.low_latency_linear, fullgraph=True, backend="aot_eager")
    for run, given in ((compiled, mine), (k3cupy.low_latency_linear, theirs)):
        run(*given).float().square().sum().backward()
    for left, right in zip(mine, theirs, strict=True):
        same(left.grad, right.grad, "a gradient")
    refused = torch.compile(lambda *t: k3cupy.fused_a_gemm(*t), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="weight: expected a tensor without gradient"):
        refused(x, mine[1])
    with torch.no_grad():
        same(refused(x, mine[1]), k3cupy.fused_a_gemm(x, weight), "without grad mode")


def test_transforms_in_compiled_code() -> None:
    """The linear goes through the framework's; of the others the error is the operator's."""
    x, weight, *_ = product_arguments()

    def linear(x: torch.Tensor) -> Any:
        return k3cupy.low_latency_linear(x, weight)

    def summed(x: torch.Tensor) -> Any:
        return linear(x).float().sum()

    for run, given in ((torch.func.vmap(linear), x[None]), (torch.func.grad(summed), x)):
        same(torch.compile(run, backend="aot_eager")(given), run(given), "the linear")
    mapped = torch.func.vmap(lambda x: k3cupy.fused_a_gemm(x, weight))
    compiled = torch.compile(lambda x: mapped(x), backend="eager")
    with pytest.raises(Exception, match="x: expected a call outside of torch"):
        compiled(x[None])


def test_what_does_not_fit_is_told_while_the_graph_is_made() -> None:
    """In the words of the call, and for a number of tokens that is a symbol too."""
    x, weight, *_ = product_arguments()
    compiled = torch.compile(lambda *t: k3cupy.fused_a_gemm(*t), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"weight: expected shape \[N, 128\] like x, got shape"):
        compiled(x, normal((N, K + 8), 1))
    for tokens in (4, 5):
        compiled(normal((tokens, K), 1), weight)
    with pytest.raises(Exception, match="x: expected at most 64 rows, got 65"):
        compiled(normal((65, K), 1), weight)
    given = mla_call(FORMS["decode-uint8"]).args
    run = torch.compile(
        lambda **named: k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**named),
        fullgraph=True,
        backend="eager",
    )
    with pytest.raises(Exception, match="cache_scale_inv: expected a finite number above 0"):
        run(**{**given, "cache_scale_inv": -1.0})
    with pytest.raises(Exception, match="q_pe: expected bfloat16 like ql_nope, got float16"):
        run(**{**given, "q_pe": given["q_pe"].half()})


OUTSIDE: dict[str, dict[str, Any]] = {
    "stream": {"stream": 0},
    "config": {"config": k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)},
    "a NumPy residual": {"residual": np.ones((M, N), np.float32)},
    "a wrong flag": {"pdl": 1},
    "no promise": {"weight_is_static": None},
    "no mode": {"batch_invariant": None},
    "a wrong config": {"config": False},
}


@pytest.mark.parametrize("named", OUTSIDE.values(), ids=OUTSIDE)
def test_what_no_operator_carries_leaves_the_graph(named: dict[str, Any]) -> None:
    """It is called as ever, with its errors; a whole graph is refused, and says why."""
    x, weight, *_ = product_arguments()
    run = lambda x, weight: k3cupy.fused_a_gemm(x, weight, **named) + 1  # noqa: E731
    whole = torch.compile(run, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="an operator of k3cupy carries"):
        whole(x, weight)
    broken = torch.compile(run, backend="eager")
    try:
        want = run(x, weight)
    except TypeError as error:
        with pytest.raises(TypeError, match=re.escape(str(error))):
            broken(x, weight)
        return
    same(broken(x, weight), want, "the call")


@pytest.mark.parametrize("wrong", [None, 1])
@pytest.mark.parametrize("name", ["ds_mla", "kv_inputs_ready", "enable_pdl"])
def test_a_wrong_flag_is_told_as_outside_of_compiled_code(name: str, wrong: Any) -> None:
    """None is one, where False is what is left out; a whole graph says that flags are bools."""
    if name == "enable_pdl":
        x, weight, *_ = product_arguments()
        run = functools.partial(k3cupy.dsv3_fused_a_gemm, mat_a=x, mat_b=weight.t())
    else:
        given = mla_call(FORMS["decode"]).args
        run = functools.partial(k3cupy.fused_mla_decode_q_concat_kv_cache_insert, **given)
    step = lambda: run(**{name: wrong})  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported, match="bools as flags"):
        torch.compile(step, fullgraph=True, backend="eager")()
    for function in (step, torch.compile(step, backend="eager")):
        with pytest.raises(TypeError, match=f"{name}: expected True or False, got {wrong}"):
            function()


def test_scalars_of_numpy_leave_the_graph() -> None:
    """The compiler takes them for arrays; the error of a whole graph names them."""
    calls = {"decode": {"q_scale_inv": np.float32(2.0)}, "norm": {"eps": np.float64(1e-5)}}
    for name, named in calls.items():
        call = mla_call(FORMS[name])
        step = lambda c=call, n=named: c.operation(**{**c.args, **n})  # noqa: E731
        with pytest.raises(torch._dynamo.exc.Unsupported, match="such as NumPy's scalars"):
            torch.compile(step, fullgraph=True, backend="eager")()
        same(torch.compile(step, backend="eager")(), step(), name)


def test_the_linear_leaves_the_graph_too() -> None:
    x, weight, *_ = product_arguments()
    run = lambda x, w: k3cupy.low_latency_linear(x, w, stream=0) + 1  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported, match="an operator of k3cupy carries"):
        torch.compile(run, fullgraph=True, backend="eager")(x, weight)
    same(torch.compile(run, backend="eager")(x, weight), run(x, weight), "with a stream")


def test_a_promise_about_the_order_of_kernels_is_left_out() -> None:
    """The compiler orders them; that about a weight stays, and a wrong one is refused as ever."""
    given = mla_call(FORMS["decode"]).args
    x, weight, *_ = product_arguments()

    def step(ready: Any) -> Any:
        latent = k3cupy.fused_a_gemm(x, weight, weight_is_static=True)
        named = {**given, "kv_inputs_ready": ready}
        return latent, k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**named)

    seen: list[torch.fx.Graph] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph.graph)
        return graph.forward

    torch.compile(step, fullgraph=True, backend=keep)(True)
    told = [node.kwargs for node in seen[0].nodes if "k3cupy" in str(node.target)]
    assert told[0]["weight_is_static"] is True
    assert "kv_inputs_ready" not in told[1]
    with pytest.raises(TypeError, match="kv_inputs_ready: expected True or False, got 1"):
        torch.compile(step, backend="eager")(1)


def test_a_gpu_that_is_not_there_is_traced_for() -> None:
    """Shapes, types and devices of fake CUDA tensors need no driver."""
    gpu = "cuda:0" if torch.cuda.is_available() else "cuda:1"  # a driver refuses what is not there
    with FakeTensorMode():
        x, weight = (torch.empty(s, K, dtype=BF16, device=gpu) for s in (M, N))
        for run in (OURS.fused_a_gemm, k3cupy.fused_a_gemm, k3cupy.low_latency_linear):
            out = run(x, weight)
            assert (out.shape, out.dtype, str(out.device)) == ((M, N), BF16, gpu)
        residual = torch.empty(M, N, dtype=BF16, device=gpu)
        with pytest.raises(ValueError, match=f"weight: expected device {gpu} like the other"):
            k3cupy.fused_a_gemm(x, torch.empty(N, K, dtype=BF16), residual)


def rows_of_product(t: dict[str, Any], tokens: Any) -> Any:
    return k3cupy.fused_a_gemm(t["x"][:tokens], t["weight"], t["residual"][:tokens])


def rows_into_a_whole_output(t: dict[str, Any], tokens: Any) -> Any:
    return k3cupy.fused_a_gemm(t["x"][:tokens], t["weight"], out=t["out"])


def rows_of_decode(t: dict[str, Any], tokens: Any) -> Any:
    """Of slots there may be more than tokens."""
    rows = {name: t[name][:tokens] for name in ("ql_nope", "q_pe", "kv_c_normed", "k_pe")}
    return k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**{**t, **rows})


def counted(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same for at most as many tokens as there are, of which only the data tell the number."""

    def run(t: dict[str, Any], count: torch.Tensor) -> Any:
        tokens = count.item()
        torch._check(tokens >= 0)
        torch._check(tokens <= M)
        return step(t, tokens)

    return run


@pytest.mark.parametrize("way", ["compiled", "exported"])
@pytest.mark.parametrize(
    ("step", "counts"),
    [(rows_of_product, (3, 1)), (rows_into_a_whole_output, (M,)), (rows_of_decode, (3, 1, 0))],
)
def test_a_number_of_tokens_that_only_the_data_tell(step: Any, counts: Any, way: str) -> None:
    """It has no value in the trace that could be looked at, and is no reason to refuse a call."""
    if step is rows_of_decode:
        mine, theirs = (dict(mla_call(FORMS["decode"]).args) for _ in range(2))
    else:
        names = ("x", "weight", "residual", "out")
        mine, theirs = (dict(zip(names, product_arguments(), strict=True)) for _ in range(2))
    run = counted(step)
    if way == "compiled":
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    else:
        example = {"t": copy.deepcopy(mine), "count": torch.tensor(1)}
        program = torch.export.export(Called(run), (example,), strict=False).module()
        run = lambda t, count: program({"t": t, "count": count})  # noqa: E731
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for tokens in counts:
            same(run(mine, torch.tensor(tokens)), step(theirs, tokens), f"{tokens} tokens")
            for name, value in theirs.items():
                same(mine[name], value, name)


def test_what_fits_no_number_of_tokens_is_refused_though_nobody_knows_it() -> None:
    x, weight, *_ = product_arguments()
    wrong = {
        r"weight: expected shape \[N, 96\] like x": lambda t, n: (t["x"][:n, :96], t["weight"]),
        r"residual: expected shape \[\d, 64\], got": lambda t, n: (t["x"][:n], t["weight"], t["x"]),
    }
    for told, given in wrong.items():
        run = counted(lambda t, n, given=given: k3cupy.fused_a_gemm(*given(t, n)))
        compiled = torch.compile(run, fullgraph=True, backend="eager")
        with (
            torch._dynamo.config.patch(capture_scalar_outputs=True),
            pytest.raises(RuntimeError, match=told),
        ):
            compiled({"x": x, "weight": weight}, torch.tensor(2))


def test_compiled_by_inductor() -> None:
    """The whole way: a product, an epilogue over its halves, and the cache, written in place."""
    from torch._inductor import config

    form = FORMS["decode"]
    given = {n: v for n, v in mla_call(form).args.items() if n not in ("kv_cache", "kv_c_normed")}

    def step(x: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor, given: Any) -> Any:
        latent = k3cupy.fused_a_gemm(x, weight) * 2
        named = {**given, "kv_c_normed": latent[:, :512], "kv_cache": cache}
        return k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**named), cache[0] + 1

    x, weight = normal((M, K), 1), normal((576, K), 2)
    mine, theirs = (torch.zeros(3, 16, 576, dtype=BF16) for _ in range(2))
    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        compiled = torch.compile(step, fullgraph=True, backend="inductor")
        with torch.no_grad():
            same(compiled(x, weight, mine, given), step(x, weight, theirs, given), "outputs")
    same(mine, theirs, "the cache")


PROGRAM = """
import os, sys, torch, k3cupy
x, weight = torch.ones(3, 128).bfloat16(), torch.ones(64, 128).bfloat16()
k3cupy.fused_a_gemm(x, weight)
assert "torch._dynamo" not in sys.modules
assert not hasattr(torch.ops.k3cupy, "fused_a_gemm"), "registered too soon"

def product():
    run = torch.compile(lambda x: k3cupy.fused_a_gemm(x, weight), fullgraph=True, backend="eager")
    assert run(x)[0, 0] == 128
    assert hasattr(torch.ops.k3cupy, "fused_a_gemm")

def explanation():
    for explain in (
        k3cupy.explain_low_latency_gemm, k3cupy.explain_fused_a_gemm, k3cupy.explain_skinny_gemm
    ):
        told = torch.compile(lambda x: (explain(x, weight), x + 1)[0], backend="eager")(x)
        assert told == explain(x, weight)

def saved():
    import k3cupy.torch.operators
    program = torch.export.load("{path}").module()
    assert torch.equal(program(x, weight), torch.full((3, 64), 128.0).bfloat16())

import torch._dynamo
for first in (product, explanation, saved):
    child = os.fork()
    if not child:
        first()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, first
"""


def test_a_program_that_never_names_the_operators(tmp_path: Path) -> None:
    """They are registered where the compiler first meets a function of ours, and no sooner.

    That is a product, or one that tells what would run, which stays outside of the graph. A program
    that was saved is loaded where the operators are imported. In each nothing was met before.
    """

    class Saved(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
            return k3cupy.fused_a_gemm(x, weight)

    x, weight, *_ = product_arguments(3)
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Saved(), (x.contiguous(), weight)), path)
    helpers.run_program(PROGRAM.format(path=path))


# Exports


@pytest.mark.parametrize(
    ("name", "strict"),
    [("insert", True), *((n, False) for n in ("insert", "fp8", "norm", "query-fp8", "value-gate"))],
)
def test_an_epilogue_is_exported(name: str, strict: bool) -> None:
    form = FORMS[name]
    mine, theirs = (mla_call(form) for _ in range(2))
    run = getattr(k3cupy, form.function)
    with torch.no_grad():
        program = torch.export.export(Called(run), (mine.args,), strict=strict)
    assert ours_in(program.graph) == [f"{form.function}.default"]
    got, want = program.module()(mine.args), theirs.run()
    same(tuple(as_list(got)) if len(as_list(want)) > 1 else got, want, name)
    for argument in form.tensors:
        if isinstance(theirs.args.get(argument), torch.Tensor):
            same(mine.args[argument], theirs.args[argument], argument)
    assert form.function in str(program.run_decompositions().graph), "still there"


@each_strictness
def test_products_are_exported_for_any_number_of_tokens(strict: bool) -> None:
    def run(x: Any, weight: Any, residual: Any) -> Any:
        kept = k3cupy.fused_a_gemm(x, weight, residual)
        return kept + k3cupy.low_latency_linear(x, weight, out_dtype=torch.float32)

    dim = torch.export.Dim("tokens", max=64)
    names = ("x", "weight", "residual")
    given = dict(zip(names, product_arguments(), strict=False))
    program = torch.export.export(
        Called(run),
        (given,),
        strict=strict,
        dynamic_shapes=({"x": {0: dim}, "weight": None, "residual": {0: dim}},),
    )
    assert ours_in(program.graph) == ["fused_a_gemm.default", "low_latency_linear.default"]
    for tokens in (2, 17):
        given = dict(zip(names, product_arguments(tokens), strict=False))
        same(program.module()(given), run(**given), f"{tokens} tokens")


@each_strictness
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad mode"])
def test_an_enabled_model_does_not_vanish_from_its_export(strict: bool, grad: bool) -> None:
    """Whatever the rank of x and the mode; what was exported with gradients has them."""
    layers = (nn.Linear(K, N, bias=False), nn.ReLU(), nn.Linear(N, K, bias=False))
    model = nn.Sequential(*layers).to(BF16)
    plain = copy.deepcopy(model)
    assert k3cupy.enable_low_latency_gemm(model).installed == 2
    dims = {i: torch.export.Dim(name) for i, name in enumerate(("batch", "tokens"))}
    x = normal((2, 3, K), 1)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=(dims,))
    assert ours_in(program.graph) == ["low_latency_linear.default"] * 2
    x = normal((3, 5, K), 2)
    found = program.module()
    same(found(x), plain(x), "the model")
    if grad:
        for run in (found, plain):
            run(x).float().sum().backward()
        for left, right in zip(found.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad, rtol=2**-5, atol=2)


def test_what_no_operator_carries_cannot_be_exported() -> None:
    x, weight, *_ = product_arguments()
    for run in (
        lambda **given: k3cupy.fused_a_gemm(**given, stream=0),
        lambda **given: k3cupy.low_latency_linear(**given, stream=0),
    ):
        with pytest.raises(TypeError, match="stream: expected what an operator can carry"):
            torch.export.export(Called(run), ({"x": x, "weight": weight},), strict=False)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx_finds_the_operators(mode: str) -> None:
    x, weight, *_ = product_arguments()
    run = lambda x, w: (k3cupy.fused_a_gemm(x, w), k3cupy.low_latency_linear(x, w))  # noqa: E731
    graph = make_fx(run, tracing_mode=mode)(x, weight)
    assert ours_in(graph.graph) == ["fused_a_gemm.default", "low_latency_linear.default"]
    same(graph(x, weight), run(x, weight), "the graph")


# On a GPU


class DecodeStep(nn.Module):
    """A product, the decode epilogue over its columns, and the cache as a buffer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal((576, 1536), 2, device), requires_grad=False)
        self.register_buffer("cache", torch.zeros(8, 64, 576, dtype=BF16, device=device))

    def forward(self, x: Any, ql_nope: Any, q_pe: Any, slots: Any) -> Any:
        latent = k3cupy.low_latency_linear(x, self.weight) * 2
        return k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
            ql_nope, q_pe, latent[:, :512], latent[:, 512:], self.cache, slots
        )


def step_arguments(seed: int) -> tuple[torch.Tensor, ...]:
    shapes = ((M, 1536), (M, 12, 512), (M, 12, 64))
    slots = torch.arange(seed, seed + M, device="cuda") * 7
    return *(normal(shape, seed + i, "cuda") for i, shape in enumerate(shapes)), slots


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_decode_step_by_inductor_on_a_gpu(mode: str) -> None:
    """Same bits; in a CUDA graph, from its first call on, nothing has to be warmed up by hand."""
    from torch._dynamo.utils import counters

    mine = DecodeStep("cuda")
    theirs = copy.deepcopy(mine)
    counters.clear()
    compiled = torch.compile(mine, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(6):
            given = step_arguments(seed)
            torch.compiler.cudagraph_mark_step_begin()
            same(compiled(*given).clone(), theirs(*given), f"step {seed}")
            same(mine.cache, theirs.cache, f"cache of step {seed}")
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in PRODUCTS if "linear of" not in name])
def test_products_in_a_cuda_graph_of_the_compiler(name: str) -> None:
    """All that are operators: of others Inductor makes what it likes."""
    product = PRODUCTS[name]

    def step(x: Any, w: Any, r: Any) -> Any:
        out = r + 1
        return product.run(x * 2, w, r, out), out * 2

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    x, weight, residual, _ = product_arguments(device="cuda", dtype=product.dtype, n=256, k=1024)
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            got = [None if t is None else t.clone() for t in compiled(x, weight, residual)]
            same(tuple(got), step(x, weight, residual), "the product")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode", "insert", "fp8", "norm", "value-gate"])
def test_exported_epilogues_on_a_gpu(name: str) -> None:
    form = FORMS[name]
    mine, theirs = (mla_call(form, device="cuda") for _ in range(2))
    with torch.no_grad():
        run = Called(getattr(k3cupy, form.function))
        program = torch.export.export(run, (mine.args,), strict=False)
    got, want = program.module()(mine.args), theirs.run()
    same(tuple(as_list(got)) if len(as_list(want)) > 1 else got, want, name)
    for argument in form.written(rope=True):
        same(mine.args[argument], theirs.args[argument], argument)


@pytest.mark.gpu
def test_an_operator_runs_on_the_stream_of_its_caller() -> None:
    x, weight, *_ = product_arguments(device="cuda", n=256, k=1024)
    want = k3cupy.fused_a_gemm(x.mul_(2), weight)
    x.div_(2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        x.mul_(2)  # of which nothing is seen before on another stream
        got = OURS.fused_a_gemm(x, weight)
    torch.cuda.current_stream().wait_stream(side)
    same(got, want, "on a side stream")
