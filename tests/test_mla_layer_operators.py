"""The operations around an MLA layer's epilogue as operators of PyTorch, and in compiled code."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import BF16, FP16
from mla_helpers import as_list, as_out
from mla_layer_helpers import LAYER_FORMS, QUERY, LayerCall, LayerForm, each_layer_form
from operator_helpers import Called, Counting, each_strictness, ours_in, same
from torch import nn

import k3cupy
import k3cupy.torch.operators
from k3cupy.torch.compiled import OUTPUTS as GIVEN

OURS = torch.ops.k3cupy
HEADS = 2
ALONG_TOKENS = ("qkv_a", "latent", "gate", "slot_mapping", "positions")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def call_of(form: LayerForm, tokens: int = 4, device: str = "cpu", **options: Any) -> LayerCall:
    """The same call for the same number of tokens, in memory of its own, with RoPE."""
    more = {"rope": True, "num_blocks": 3} if form.kind == QUERY else {}
    return form.make(tokens, HEADS, device=device, seed=tokens, **more, **options)


def of_operator(call: LayerCall) -> dict[str, Any]:
    """The arguments of a call as the operator takes them: scales that are numbers beside those."""
    return {
        f"{n}_value" if n.endswith("scale_inv") and isinstance(v, float) else n: v
        for n, v in call.args.items()
    }


def out_names(call: LayerCall) -> tuple[str, ...]:
    return GIVEN.get(call.name, ("out",))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """opcheck cannot compare e4m3."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def step_of(call: LayerCall) -> Callable[..., Any]:
    """A call, and what comes behind it in the graph: what it has written is read."""

    def step(given: dict[str, Any]) -> Any:
        out = getattr(k3cupy, call.name)(**given)
        cache = given.get("kv_cache")
        return (*as_list(out), None if cache is None else cache.view(torch.uint8).clone())

    return step


@each_layer_form
def test_opcheck(form: LayerForm, device: str) -> None:
    call = call_of(form, device=device)
    given = {
        name: as_bytes(v) if name == "kv_cache" else v for name, v in of_operator(call).items()
    }
    outs = list(map(as_bytes, as_list(call.run())))
    operator = getattr(OURS, call.name)
    written = {a.name for a in operator.default._schema.arguments if a.alias_info is not None}
    assert written == {*call.boxes}
    torch.library.opcheck(operator.default, (), given)
    named = dict(zip(out_names(call), outs, strict=True))
    written = {a.name for a in operator.out._schema.arguments if a.alias_info is not None}
    assert written == {*call.boxes, *named}
    torch.library.opcheck(operator.out, (), given | named)


@each_layer_form
def test_an_operator_is_its_function(form: LayerForm, device: str) -> None:
    first, second, third = (call_of(form, device=device) for _ in range(3))
    want, operator = first.run(), getattr(OURS, first.name)
    same(operator(**of_operator(second)), want, first.name)
    outs = dict(zip(out_names(first), map(torch.empty_like, as_list(want)), strict=True))
    assert operator.out(**of_operator(third), **outs) is None
    same(as_out(list(outs.values())), want, first.name)
    for name in first.boxes:
        for call in (second, third):
            same(call.args[name], first.args[name], name)


@pytest.mark.parametrize("name", ["query-fp8", "value-gate", "norm"])
def test_operators_on_the_meta_device(name: str) -> None:
    call = call_of(LAYER_FORMS[name])
    want = as_list(call.run())
    given = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in call.args.items()}
    found = as_list(getattr(OURS, call.name)(**of_operator(call.given(**given))))
    for out, like in zip(found, want, strict=True):
        assert (out.shape, out.dtype, out.device.type) == (like.shape, like.dtype, "meta")


@each_layer_form
def test_derivatives_and_transforms_are_refused(form: LayerForm) -> None:
    call = call_of(form)
    operator, given = getattr(OURS, call.name), of_operator(call)
    first = call.names_first
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.dtype in (BF16, FP16):
            mine = {**given, name: value.detach().clone().requires_grad_()}
            with pytest.raises(ValueError, match=f"{name}: expected a tensor without gradient"):
                operator(**mine)
            with pytest.raises(ValueError, match=f"{name}: expected a tensor without gradient"):
                getattr(k3cupy, call.name)(**{**call.args, name: mine[name]})
            with torch.no_grad():
                operator(**mine)
    run = functools.partial(lambda value: operator(**{**given, first: value}))
    value = given[first].clone()
    with pytest.raises(TypeError, match=f"{first}: expected a call outside of torch.func.vmap"):
        torch.func.vmap(run)(value.expand(2, *value.shape))
    with pytest.raises(TypeError, match=f"{first}: expected a call outside of forward-mode"):
        torch.func.jvp(run, (value,), (value,))


@each_layer_form
def test_one_graph_for_every_number_of_tokens(form: LayerForm, device: str) -> None:
    """Same bits, whole cache included, by one operator that is compiled once."""
    counting = Counting()
    step = step_of(call_of(form))
    compiled = torch.compile(step, fullgraph=True, backend=counting)
    for tokens in (4, 5, 17):
        mine, theirs = (call_of(form, tokens, device) for _ in range(2))
        for name in ALONG_TOKENS:
            if name in mine.args:
                torch._dynamo.mark_dynamic(mine.args[name], 0)
        with torch.no_grad():
            same(compiled(mine.args), step(theirs.args), f"{tokens} tokens")
        for name in theirs.boxes:
            same(mine.args[name], theirs.args[name], name)
    assert counting.graphs == [[mine.name]]


@pytest.mark.parametrize("name", ["query-ds_mla", "value-gate", "norm"])
def test_an_output_that_is_given_comes_back_itself(name: str) -> None:
    form = LAYER_FORMS[name]
    mine, theirs = call_of(form), call_of(form)
    want = theirs.run()
    outs = [torch.empty_like(out) for out in as_list(want)]
    run = getattr(k3cupy, mine.name)
    compiled = torch.compile(
        lambda given, outs: run(**given, out=as_out(outs)), fullgraph=True, backend="eager"
    )
    got = compiled(mine.args, outs)
    assert all(a is b for a, b in zip(as_list(got), outs, strict=True))
    same(got, want, "outputs")


@pytest.mark.parametrize("name", ["query", "norm"])
def test_an_epsilon_and_flags_of_any_kind_stay_in_the_graph(name: str) -> None:
    form = LAYER_FORMS[name]
    run = getattr(k3cupy, call_of(form).name)
    compiled = torch.compile(
        lambda given, eps: run(**{**given, "eps": eps}, weight_is_static=True, pdl=False),
        fullgraph=True,
        backend="aot_eager",
    )
    found = []
    for eps in (1e-6, 0.5, 1, 0):
        mine, theirs = call_of(form), call_of(form)
        found.append(as_list(compiled(mine.args, eps)))
        same(as_out(found[-1]), theirs.given(eps=eps).run(), f"an epsilon of {eps}")
    assert not torch.equal(found[0][0], found[1][0]), "it counts"
    with pytest.raises(Exception, match="eps: expected a finite number of at least 0"):
        compiled(call_of(form).args, -1.0)


@each_strictness
@pytest.mark.parametrize("name", ["query-fp8", "query-ds_mla", "value-gate", "norm"])
def test_exported(name: str, strict: bool, device: str) -> None:
    form = LAYER_FORMS[name]
    mine, theirs = (call_of(form, device=device) for _ in range(2))
    run = getattr(k3cupy, mine.name)
    with torch.no_grad():
        program = torch.export.export(Called(run), (mine.args,), strict=strict)
    assert ours_in(program.graph) == [f"{mine.name}.default"]
    got, want = program.module()(mine.args), theirs.run()
    same(as_out(as_list(got)), want, name)
    for argument in theirs.boxes:
        same(mine.args[argument], theirs.args[argument], argument)
    assert mine.name in str(program.run_decompositions().graph), "still there"


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_the_query_is_exported_for_any_number_of_tokens(strict: bool) -> None:
    dim = torch.export.Dim("tokens", max=4096)
    call = LAYER_FORMS["query"].make(4, HEADS)
    names = ("qkv_a", "slot_mapping")
    given = {n: v for n, v in call.args.items() if isinstance(v, torch.Tensor)}
    run = functools.partial(k3cupy.fused_mla_decode_query, eps=1e-6)
    shapes = {n: {0: dim} if n in names else None for n in given}
    with torch.no_grad():
        program = torch.export.export(
            Called(run), (given,), strict=strict, dynamic_shapes=(shapes,)
        )
    for tokens in (2, 17):
        mine, theirs = (LAYER_FORMS["query"].make(tokens, HEADS, num_blocks=3) for _ in range(2))
        cache = {"kv_cache": given["kv_cache"].clone()}
        of_mine = {n: mine.args[n] for n in given} | cache
        got = program.module()(of_mine)
        theirs.args["kv_cache"] = given["kv_cache"].clone()
        same(got, theirs.run(), f"{tokens} tokens")
        same(of_mine["kv_cache"], theirs.args["kv_cache"], "the cache")


class Front(nn.Module):
    """The first projection, and the query front behind it, with an own cache."""

    def __init__(self, device: str) -> None:
        super().__init__()
        call = LAYER_FORMS["query"].make(4, HEADS, device=device)
        self.given = {n: v for n, v in call.args.items() if n not in ("qkv_a", "kv_cache")}
        self.register_buffer("cache", torch.zeros(3, 16, 576, dtype=BF16, device=device))
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(2112, 512, generator=generator) / 16
        self.register_buffer("weight", weight.to(BF16).to(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv_a = k3cupy.fused_a_gemm(x, self.weight)
        given = {**self.given, "weight_is_static": True}
        return k3cupy.fused_mla_decode_query(qkv_a, kv_cache=self.cache, **given) * 2


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("tokens", [4, 17])
def test_a_query_front_by_inductor_on_a_gpu(mode: str, tokens: int) -> None:
    """One launch and separate kernels, whose tensors in between belong to the graph."""
    from torch._dynamo.utils import counters

    mine = Front("cuda")
    mine.given["slot_mapping"] = torch.arange(tokens, device="cuda")
    theirs = copy.deepcopy(mine)
    counters.clear()
    compiled = torch.compile(mine, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(6):
            x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(seed))
            x = x.to(BF16).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            same(compiled(x).clone(), theirs(x), f"step {seed}")
            same(mine.cache, theirs.cache, f"cache of step {seed}")
    assert counters["inductor"]["cudagraph_skips"] == 0
