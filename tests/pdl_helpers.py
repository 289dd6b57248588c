"""Predecessors that write late under programmatic dependent launch, and counting what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gemm_helpers import normal
from stream_helpers import captured
from toolchain_helpers import write

from k3cupy.runtime import devices, instances, launch, sources
from k3cupy.runtime.instances import Instance

ROUNDS = 100

CopyLate = Callable[[torch.Tensor, torch.Tensor], None]

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
def copy_late(tmp_path_factory: pytest.TempPathFactory) -> CopyLate:
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


def wrong_values_of_a_chain(
    chain: Callable[..., None], x: torch.Tensor, outs: Sequence[torch.Tensor]
) -> int:
    """Replay a chain with a new x each time, and count what differs from one without PDL.

    Each round begins with NaN in all that the chain writes.
    """
    scale = 2**-5
    chain()
    graph, _ = captured(chain)
    wants = [torch.empty_like(out) for out in outs]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for seed in range(ROUNDS):
        x.copy_(normal(x.shape, seed, "cuda") * scale)
        chain(pdl=False)
        for want, out in zip(wants, outs, strict=True):
            want.copy_(out)
            out.fill_(float("nan"))
        graph.replay()
        for want, out in zip(wants, outs, strict=True):
            wrong += (want.view(torch.int16) != out.view(torch.int16)).sum()
    return int(wrong)
