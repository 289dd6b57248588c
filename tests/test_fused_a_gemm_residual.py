"""The fused-A GEMM with a residual: values, layouts, bits, other producers, chains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import cupy_of, jax_of, numpy_of, torch_of
from gemm_helpers import (
    TOKENS,
    inputs,
    op,
    residual_of,
    run_and_check,
    same_bits,
)
from helpers import BF16, Producer, guarded, refused
from memory_helpers import (
    gibibytes,
)
from stream_helpers import captured

import k3cupy

SHAPES = [(48, 128), (2096, 192), (7, 80), (1, 16), (1152, 1536), (33, 7168)]


# Values: on the CPU, any shape is a property in the tests of both GEMMs


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS)
def test_values(tokens: int) -> None:
    for n, k in SHAPES:
        x, weight = inputs(tokens, n, k, "cuda", seed=n + k)
        run_and_check(x, weight, residual=residual_of(tokens, n, "cuda"))


def test_a_poisoned_row_of_x_stays_alone(device: str) -> None:
    x, weight = inputs(9, 48, 1536, device)
    residual = residual_of(9, 48, device)
    clean = op(x, weight, residual=residual)
    x[4, 777] = float("nan")
    out = op(x, weight, residual=residual)
    assert out[4].isnan().all()
    out[4] = clean[4]
    same_bits(out, clean)


# Layouts


def test_with_every_layout_of_x(device: str) -> None:
    x, weight = inputs(9, 48, 128, device)
    residual = residual_of(9, 48, device)
    want = run_and_check(x, weight, residual=residual)
    for stride, shift in ((136, 0), (129, 0), (128, 2)):
        other = guarded(x.cpu(), device, strides=(stride, 1), shift=shift)
        same_bits(run_and_check(other, weight, residual=residual, out_strides=(51, 1)), want)


# Bits


def test_batch_invariant(device: str) -> None:
    every = range(1, 65) if device == "cuda" else (1, 2, 8, 9, 33, 64)
    for n, k in ((528, 2048), (40, 7168)) if device == "cuda" else ((100, 512),):
        x, weight = inputs(64, n, k, device)
        residual = residual_of(64, n, device)

        def rows(start: int, stop: int) -> torch.Tensor:
            part = slice(start, stop)
            return op(x[part], weight, residual=residual[part], batch_invariant=True)  # noqa: B023

        alone = torch.cat([rows(i, i + 1) for i in range(64)])
        for tokens in every:
            same_bits(rows(64 - tokens, 64), alone[64 - tokens :], f"M = {tokens}")


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_clusters_add_it_once(split: int) -> None:
    """Also where a block finishes no row, and where it has no column."""
    base = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, split, 2)
    wide = k3cupy.FusedAGemmConfig(64, 64, 128, 2, 2, 4, 2, split, 2)
    for n, k in ((100, 16), (7, 80), (100, 2064)):
        x, weight = inputs(13, n, k, "cuda", strides=(k + 8, 1))
        residual = residual_of(13, n, "cuda", strides=(n + 1, 1))
        results = [run_and_check(x, weight, residual=residual, config=c) for c in (base, wide)]
        same_bits(results[0], results[1])
        for config in (base, wide):
            out = residual.clone()
            same_bits(op(x, weight, out=out, residual=out, config=config), results[0])


# Producers and huge strides


def test_arrays_of_other_libraries() -> None:
    x, weight = inputs(9, 48, 128)
    residual = residual_of(9, 48)
    want = op(x, weight, residual=residual)
    frozen = numpy_of(residual.clone())
    frozen.flags.writeable = False
    for one in (Producer(residual), frozen, jax_of(residual)):
        same_bits(op(x, weight, residual=one), want)
    out = numpy_of(residual.clone())
    assert op(numpy_of(x), numpy_of(weight), out, out=out) is out
    same_bits(torch_of(out, BF16), want)
    flipped = np.flip(numpy_of(residual), 0)
    refused({"x": x, "weight": weight, "residual": flipped}, "residual", "stride -", operation=op)


@pytest.mark.gpu
def test_cupy_arrays_in_place() -> None:
    cupy = pytest.importorskip("cupy")
    x, weight = inputs(9, 48, 128, "cuda")
    residual = residual_of(9, 48, "cuda")
    want = op(x, weight, residual=residual)
    torch.cuda.synchronize()
    out = cupy_of(residual)
    assert op(cupy_of(x), cupy_of(weight), out, out=out) is out
    cupy.cuda.Device().synchronize()
    same_bits(torch.from_dlpack(out.view(cupy.int16)).view(BF16), want)


@pytest.mark.gpu
@gibibytes(3)
def test_rows_more_than_2_31_bytes_apart(needs_memory: None) -> None:
    far = 2**30 + 1
    buffer = torch.zeros(far + 4096, dtype=BF16, device="cuda")
    x, weight = inputs(2, 48, 128, "cuda")
    residual = residual_of(2, 48, "cuda")
    wide = buffer.as_strided((2, 48), (far, 1))
    wide.copy_(residual)
    want = op(x, weight, residual=residual)
    same_bits(op(x, weight, residual=wide), want)
    same_bits(op(x, weight, out=wide, residual=wide).contiguous(), want)


# Graphs


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_chain_that_adds_in_place(tokens: int, static: bool) -> None:
    """Every product reads what the one before it added, in a graph, dependent launches on."""
    x, weight = inputs(tokens, 528, 1536, "cuda")
    start = residual_of(tokens, 528, "cuda")
    out = torch.empty_like(start)
    options: dict[str, Any] = {"weight_is_static": static}

    def chain() -> None:
        out.copy_(start)
        for _ in range(8):
            op(x, weight, out=out, residual=out, **options)

    options["pdl"] = False
    chain()
    want = out.clone()
    options["pdl"] = None
    chain()
    same_bits(out, want)
    graph, _ = captured(chain)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        wrong += (out.view(torch.int16) != want.view(torch.int16)).sum()
    assert int(wrong) == 0
