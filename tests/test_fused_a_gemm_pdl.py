"""The fused-A GEMM among dependent launches: predecessors that write late, and real chains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gemm_helpers import assert_product, normal, op, residual_of
from helpers import BF16
from stream_helpers import captured
from toolchain_helpers import write

import k3cupy
from k3cupy.runtime import devices, instances, launch, sources
from k3cupy.runtime.instances import Instance

pytestmark = pytest.mark.gpu

ROUNDS = 100

LATE = """
#include "common/pdl.cuh"

namespace k3cupy {

// Lets its dependents start at once, takes its time, and copies only then.
__global__ void copy_late(const uint4* source, uint4* target, unsigned int count) {
  release_dependents();
  wait_for_predecessor(source, target);
  const long long begin = clock64();
  while (clock64() - begin < 100000) {
  }
  for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x) {
    target[i] = source[i];
  }
}

}  // namespace k3cupy
"""


@pytest.fixture(scope="module")
def copy_late(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A predecessor that writes late, although what follows it may begin early."""
    folder = tmp_path_factory.mktemp("late")
    (folder / "common").mkdir()
    write(folder / "late.cu", LATE)
    header = Path("common", "pdl.cuh")
    write(folder / header, (sources.shipped() / header).read_text(encoding="utf-8"))
    device = torch.cuda.current_device()
    with sources.source_dir(folder):
        loaded = instances.load(Instance("late.cu", "k3cupy::copy_late"), device)
    queue = launch.make_launcher(
        device, loaded.kernel, grid=8, block=256, pdl=devices.info(device).has_pdl
    )

    def run(source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.numel() == target.numel()
        assert source.is_contiguous()
        assert target.is_contiguous()
        stream = torch.cuda.current_stream().cuda_stream
        count = np.uint32(source.numel() // 8)
        queue(stream, [source.data_ptr(), target.data_ptr(), count])

    return run


def wrong_values(step: Callable[[int], torch.Tensor], wants: list[torch.Tensor]) -> int:
    """Run steps 0 and 1 in turn, as graphs and eagerly, and count what differs in one bit."""
    step(0)
    torch.cuda.synchronize()
    graphs = [captured(lambda i=i: step(i)) for i in (0, 1)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for round_ in range(ROUNDS):
        want = wants[round_ % 2].view(torch.int16)
        graph, out = graphs[round_ % 2]
        out.fill_(float("nan"))
        graph.replay()
        wrong += (out.view(torch.int16) != want).sum()
        wrong += (step(round_ % 2).view(torch.int16) != want).sum()
    return int(wrong)


@pytest.mark.parametrize("late", ["x", "weight", "both"])
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_predecessor_that_writes_late(
    tokens: int, late: str, copy_late: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """x may always come late, the weight unless it was promised."""
    n, k = 528, 1536
    weights = [normal((n, k), seed, "cuda") for seed in (1, 2)]
    xs = [normal((tokens, k), seed, "cuda") for seed in (3, 4)]
    x, weight = xs[0].clone(), weights[0].clone()
    static = late == "x"

    def step(i: int) -> torch.Tensor:
        if late != "x":
            copy_late(weights[i], weight)
        if late != "weight":
            copy_late(xs[i], x)
        return op(x, weight, weight_is_static=static)

    wants = [
        op(xs[i if late != "weight" else 0], weights[i if late != "x" else 0], pdl=False)
        for i in (0, 1)
    ]
    assert wrong_values(step, wants) == 0


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_residual_that_comes_late(
    tokens: int,
    in_place: bool,
    static: bool,
    copy_late: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """It waits for its producer, whatever was promised about the weight."""
    x, weight = normal((tokens, 1536), 1, "cuda"), normal((528, 1536), 2, "cuda")
    residuals = [residual_of(tokens, 528, "cuda", seed=seed) for seed in (3, 4)]
    residual = residuals[0].clone()

    def step(i: int) -> torch.Tensor:
        copy_late(residuals[i], residual)
        out = residual if in_place else None
        return op(x, weight, out, residual=residual, weight_is_static=static).clone()

    wants = [op(x, weight, residual=each, pdl=False) for each in residuals]
    assert wrong_values(step, wants) == 0


def test_a_promise_about_the_preceding_kernel_is_enough(
    copy_late: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """The weight is written late two kernels before: the product between lets nothing overtake."""
    weights = [normal((528, 1536), seed, "cuda") for seed in (1, 2)]
    weight, x = weights[0].clone(), normal((4, 1536), 3, "cuda")
    between = (normal((4, 64), 4, "cuda"), normal((16, 64), 5, "cuda"))

    def step(i: int) -> torch.Tensor:
        copy_late(weights[i], weight)
        op(*between, weight_is_static=True)
        return op(x, weight, weight_is_static=True)

    wants = [op(x, each, pdl=False) for each in weights]
    assert wrong_values(step, wants) == 0


def test_products_that_feed_products() -> None:
    """Each begins before its predecessor ends; a result is an x, and then a weight."""
    first, second = normal((2048, 512), 1, "cuda"), normal((64, 2048), 2, "cuda")
    x = normal((64, 512), 3, "cuda")
    a, b, c = (torch.empty(64, n, dtype=BF16, device="cuda") for n in (2048, 64, 64))
    scale = 2**-5

    def chain(**options: Any) -> None:
        op(x, first, a, **options)
        op(a, second, b, **options)
        op(second, a, c, **options)  # what the first product wrote is the weight here

    chain()
    graph, _ = captured(chain)
    wants = [torch.empty_like(t) for t in (a, b, c)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for seed in range(ROUNDS):
        x.copy_(normal(x.shape, seed, "cuda") * scale)
        chain(pdl=False)
        for want, tensor in zip(wants, (a, b, c), strict=True):
            want.copy_(tensor)
            tensor.fill_(float("nan"))
        graph.replay()
        for want, tensor in zip(wants, (a, b, c), strict=True):
            wrong += (want.view(torch.int16) != tensor.view(torch.int16)).sum()
    assert int(wrong) == 0
    assert_product(a, x, first)
    assert_product(b, a, second)
    assert_product(c, second, a)


@pytest.mark.parametrize("padding_only", [False, True], ids=["rows", "all-padding"])
def test_case05_chain_of_gemm_epilogue_and_framework(padding_only: bool) -> None:
    """2,000 replays with poisoned buffers and new input each time, counted on the device.

    The GEMM's output is a [T, 2112] row of q_a, latent and RoPE parts, of which the epilogue reads
    column slices; then a framework op reads what the epilogue wrote.
    """
    tokens, heads, k = 16, 4, 1024
    x, weight = normal((tokens, k), 1, "cuda"), normal((2112, k), 2, "cuda")
    gemm = torch.empty(tokens, 2112, dtype=BF16, device="cuda")
    ql_nope = normal((tokens, heads, 512), 3, "cuda")
    cache = torch.zeros(2, 16, 576, dtype=BF16, device="cuda")
    rows = cache.view(-1, 576)[:tokens]
    slots = torch.arange(tokens, device="cuda")
    if padding_only:
        slots.fill_(-1)
    q_pe = gemm[:, : heads * 64].view(tokens, heads, 64)
    mqa_q = torch.empty(tokens, heads, 576, dtype=BF16, device="cuda")
    seen = torch.empty(tokens, heads, 576, dtype=torch.int16, device="cuda")
    rows_seen = torch.empty(tokens, 576, dtype=torch.int16, device="cuda")

    def step() -> None:
        op(x, weight, gemm, weight_is_static=True)
        k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
            ql_nope, q_pe, gemm[:, 1536:2048], gemm[:, 2048:], cache, slots, out=mqa_q
        )
        torch.add(mqa_q.view(torch.int16), 0, out=seen)
        torch.add(rows.view(torch.int16), 0, out=rows_seen)

    step()
    graph, _ = captured(step)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    poison = rows.clone().fill_(5.0)
    want = torch.empty_like(gemm)
    for i in range(2000):
        x.copy_(x.roll(1, 1) if i % 7 else -x)
        op(x, weight, want, pdl=False)
        gemm.fill_(float("nan"))
        mqa_q.fill_(float("nan"))
        rows.copy_(poison)
        graph.replay()
        query = torch.cat((ql_nope, want[:, : heads * 64].view(tokens, heads, 64)), -1)
        wrong += (seen != query.view(torch.int16)).sum()
        inserted = poison if padding_only else want[:, 1536:]
        wrong += (rows_seen != inserted.contiguous().view(torch.int16)).sum()
    assert int(wrong) == 0
