"""The separate kernels of the MLA query front on a GPU: frameworks, autocast, streams, graphs."""

from __future__ import annotations

import oracle
import pytest
import torch
from array_helpers import cupy_of, wrapped
from mla_layer_helpers import QUERY_FORMS, LayerForm, make_query
from stream_helpers import captured

import k3cupy


@pytest.mark.gpu
@pytest.mark.parametrize("form", QUERY_FORMS, ids=str)
def test_separate_kernels_with_tensors_of_several_frameworks(form: LayerForm) -> None:
    """The bits of PyTorch's tensors, on the stream of the caller, with outputs made and given."""
    cupy = pytest.importorskip("cupy")
    call, mixed, alone = (form.make(20, 3, rope=True, device="cuda") for _ in range(3))
    want, written = call.run(), call.cache.snapshot()
    torch.cuda.synchronize()
    assert call.explain().kernel == "separate"
    weights = wrapped(mixed, cupy_of, "w_q_b", "q_norm_weight", "w_uk")
    assert k3cupy.explain_mla_decode_query(**weights).kernel == "separate"
    out = torch.empty_like(want)
    for given in ({}, {"out": out}):
        got = mixed.run(**weights, **given)
        assert isinstance(got, torch.Tensor)
        oracle.assert_same_bits(oracle.bits(got), oracle.bits(want), "with weights of CuPy")
    assert got is out
    oracle.assert_same_bits(mixed.cache.snapshot(), written, "the cache")
    stream = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    found = alone.run(**wrapped(alone, cupy_of), stream=stream)
    stream.synchronize()
    assert isinstance(found, cupy.ndarray)
    bits = torch.from_dlpack(found.view({1: cupy.uint8, 2: cupy.int16}[found.itemsize])).cpu()
    oracle.assert_same_bits(bits, oracle.bits(want).view(bits.dtype), "with CuPy alone")
    oracle.assert_same_bits(alone.cache.snapshot(), written, "the cache")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [20, 100])
def test_separate_kernels_under_autocast_and_on_another_stream(tokens: int) -> None:
    """Also where q_b is the framework's linear, whose types autocast would change."""
    call = make_query(tokens, 3, device="cuda")
    assert ("the framework's linear" in call.explain().reason) == (tokens == 100)
    want = call.run()
    with torch.autocast("cuda", torch.float16):
        got = call.run()
    oracle.assert_same_bits(oracle.bits(got), oracle.bits(want), "under autocast")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        got = call.run(stream=side)
    side.synchronize()
    oracle.assert_same_bits(oracle.bits(got), oracle.bits(want), "on another stream")


@pytest.mark.gpu
@pytest.mark.parametrize("form", QUERY_FORMS, ids=str)
def test_separate_kernels_in_a_captured_graph(form: LayerForm) -> None:
    """What lies between them belongs to the graph: other work in between does not touch it."""
    call = form.make(20, 12, rope=True, device="cuda")
    clean = call.cache.storage.clone()
    out = torch.empty_like(call.run())
    graph, _ = captured(lambda: call.run(out=out))
    first = call.first.clone()
    for scale in (1.0, -2.0, 0.5):
        call.first.copy_(first * scale)
        call.cache.storage.copy_(clean)
        want, written = call.run(), call.cache.snapshot()
        call.cache.storage.copy_(clean)
        out.view(torch.uint8).fill_(255)
        noise = [torch.full((1 << 18,), torch.nan, device="cuda") for _ in range(20)]
        graph.replay()
        del noise
        oracle.assert_same_bits(oracle.bits(out), oracle.bits(want), f"times {scale}")
        oracle.assert_same_bits(call.cache.snapshot(), written, "the cache")
