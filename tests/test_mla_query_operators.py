"""The MLA query front in compiled code: what it has beside `test_torch_operators.py`."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from helpers import BF16
from mla_helpers import as_list, as_out
from mla_layer_helpers import LAYER_FORMS, LayerCall, LayerForm
from operator_helpers import Called, each_strictness, same
from torch import nn

import k3cupy

HEADS = 2


def call_of(form: LayerForm, tokens: int = 4) -> LayerCall:
    """The same call for the same number of tokens, in memory of its own, with RoPE."""
    more = {"num_blocks": 3} if form.has_cache else {}
    return form.make(tokens, HEADS, rope=form.has_cache, seed=tokens, **more)


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
