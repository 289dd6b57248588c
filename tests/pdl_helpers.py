"""Neighbours under programmatic dependent launch that are late or early, and what differs then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gemm_helpers import normal
from helpers import whole_memory
from oracle import codes
from stream_helpers import captured
from toolchain_helpers import write

from k3cupy.runtime import devices, instances, launch, sources
from k3cupy.runtime.instances import Instance

ROUNDS = 100

CopyLate = Callable[[torch.Tensor, torch.Tensor], None]
Tensors = dict[str, torch.Tensor]

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

__device__ void copy(const uint4* source, uint4* target, unsigned int count) {
  for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x) {
    __stcg(target + i, __ldcg(source + i));
  }
}

// As copy_late, of two ranges, but its dependents start when its own predecessor has ended: nothing
// that is two kernels back is still at work beside them.
__global__ void copy_two_late(const uint4* source0, uint4* target0, unsigned int count0,
                              const uint4* source1, uint4* target1, unsigned int count1,
                              unsigned int cycles) {
  wait_for_predecessor(source0, target0);
  release_dependents();
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
  copy(source0, target0, count0);
  copy(source1, target1, count1);
}

// Three ranges as soon as it runs, one behind the wait.
__global__ void copy_early(const uint4* source0, uint4* target0, unsigned int count0,
                           const uint4* source1, uint4* target1, unsigned int count1,
                           const uint4* source2, uint4* target2, unsigned int count2,
                           const uint4* source3, uint4* target3, unsigned int count3) {
  copy(source0, target0, count0);
  copy(source1, target1, count1);
  copy(source2, target2, count2);
  wait_for_predecessor(source3, target3);
  copy(source3, target3, count3);
}

}  // namespace k3cupy
"""


def load_neighbour(folder: Path, name: str, *, grid: int) -> launch.Launcher:
    """A kernel of the source above, to be queued on PyTorch's stream with the PDL attribute."""
    header = Path("common", "pdl.cuh")
    if not (folder / header).exists():
        (folder / "common").mkdir()
        write(folder / header, (sources.shipped() / header).read_text(encoding="utf-8"))
        write(folder / "late.cu", LATE)
    device = torch.cuda.current_device()
    with sources.source_dir(folder):
        loaded = instances.load(Instance("late.cu", f"k3cupy::{name}"), device)
    has_pdl = devices.info(device).has_pdl
    return launch.make_launcher(device, loaded.kernel, grid=grid, block=256, pdl=has_pdl)


@pytest.fixture(scope="module")
def copy_late(tmp_path_factory: pytest.TempPathFactory) -> CopyLate:
    """A predecessor that writes late, although what follows it may begin early."""
    queue = load_neighbour(tmp_path_factory.mktemp("late"), "copy_late", grid=8)

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


# --- The race hunt -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hunted:
    """A call, and its tensors by when they may be touched.

    `run` gets all tensors by name, inputs and outputs, and the options of the call. `older` are the
    inputs that a promise covers: they are complete before the preceding kernel begins. `early` are
    outputs that the promise lets it write while that kernel runs. With `ends_without_a_trigger`,
    whoever follows may read the outputs without waiting, for the kernel is over by then.
    """

    run: Callable[..., Any]
    inputs: Tensors
    outputs: Tensors
    older: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    ends_without_a_trigger: bool = False


@dataclass(frozen=True)
class Neighbours:
    """The kernels around: `late` ends late, `early` is as early as it may be."""

    late: launch.Launcher
    early: launch.Launcher


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory: pytest.TempPathFactory) -> Neighbours:
    folder = tmp_path_factory.mktemp("neighbours")
    return Neighbours(
        load_neighbour(folder, "copy_two_late", grid=16),
        load_neighbour(folder, "copy_early", grid=16),
    )


class Layout:
    """Tensors in one buffer, `first` ones first, each with its strides and what lies around it."""

    def __init__(self, tensors: Tensors, first: Sequence[str], last: str) -> None:
        rest = [name for name in tensors if name not in (*first, last)]
        self.tensors = {name: tensors[name] for name in (*first, *rest, last)}
        self.place: dict[str, int] = {}
        self.size = self.cut = 0
        for name, tensor in self.tensors.items():
            self.place[name] = self.size
            self.size += -(-tensor.untyped_storage().nbytes() // 256) * 256
            if name in first:
                self.cut = self.size
        self.tail = self.place[last]

    def new(self) -> torch.Tensor:
        """A buffer with the values that the tensors have."""
        buffer = torch.zeros(self.size, dtype=torch.uint8, device="cuda")
        for name, tensor in self.tensors.items():
            flat = whole_memory(tensor)
            buffer[self.place[name] : self.place[name] + flat.numel()] = flat
        return buffer

    def views(self, buffer: torch.Tensor) -> Tensors:
        found = {}
        for name, tensor in self.tensors.items():
            offset = self.place[name] // tensor.element_size() + tensor.storage_offset()
            typed = buffer.view(tensor.dtype)
            found[name] = typed.as_strided(tensor.shape, tensor.stride(), offset)
        return found


NAN, OLD, NEW = 0xFF, 0x55, 0xAA
"""What inputs hold before their late writer, outputs before the call, and what `early` writes."""


def hunt(
    hunted: Hunted, neighbours: Neighbours, replays: int, *, cycles: int = 30_000, **options: Any
) -> dict[str, int]:
    """Replay the call among its neighbours with new inputs; return what differed, and how often.

    In each replay, in stream order: new inputs; the call without PDL, on copies, which says what
    must come out; poison in everything. Then, each launched dependently: a late writer of what was
    promised, which also reads late what the promise lets the call overwrite; a late writer of all
    other inputs, which also reads late what the call overwrites; the call; an early consumer. That
    one reads without waiting a tensor that the late writer wrote, overwrites without waiting one
    that the late writer reads, and copies the outputs, behind its wait unless it may do without.
    """
    far = torch.arange(4096, dtype=torch.int32, device="cuda")
    ins = Layout({**hunted.inputs, "far": far}, hunted.older, "far")
    outs = Layout({**hunted.outputs, "over": torch.empty_like(far)}, hunted.early, "over")
    source, expected_ins, live_ins = (ins.new() for _ in range(3))
    expected_outs, live_outs, before, after = (outs.new() for _ in range(4))
    seen = torch.empty_like(source[ins.tail :])
    new = torch.full_like(live_outs[outs.tail :], NEW)
    sources, wants, lives = ins.views(source), ins.views(expected_ins), ins.views(live_ins)
    wants |= outs.views(expected_outs)
    lives |= outs.views(live_outs)
    late = {"inputs": slice(ins.cut, None), "outputs": slice(outs.cut, None)}
    older = {"inputs": slice(ins.cut), "outputs": slice(outs.cut)}
    poisoned = torch.full_like(before, OLD)
    overwritten = torch.full_like(new, NEW)

    def queue(launcher: launch.Launcher, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        arguments: list[Any] = []
        for read, written in pairs:
            arguments += [read.data_ptr(), written.data_ptr(), np.uint32(read.numel() // 16)]
        if launcher is neighbours.late:
            arguments.append(np.uint32(cycles))
        launcher(torch.cuda.current_stream().cuda_stream, arguments)

    def queue_late(part: dict[str, slice]) -> None:
        read, written = source[part["inputs"]], live_ins[part["inputs"]]
        queue(
            neighbours.late,
            (read, written),
            (live_outs[part["outputs"]], before[part["outputs"]]),
        )

    def call(tensors: Tensors, **given: Any) -> None:
        hunted.run({name: t for name, t in tensors.items() if name not in ("far", "over")}, **given)

    pairs = {
        "the outputs": (live_outs[: outs.tail], expected_outs[: outs.tail]),
        "the inputs, some of which are outputs": (live_ins[: ins.tail], expected_ins[: ins.tail]),
        "outputs that the consumer read": (after[: outs.tail], expected_outs[: outs.tail]),
        "outputs that the predecessor read before": (before, poisoned),
        "what was written two kernels before the consumer": (seen, source[ins.tail :]),
        "what the consumer overwrote": (live_outs[outs.tail :], overwritten),
    }
    counts = torch.zeros(len(pairs), dtype=torch.int64, device="cuda")

    def step() -> None:
        for i, tensor in enumerate(sources.values(), 1):
            values = codes(tensor)
            values.copy_(values.roll(1, i % values.ndim))
        expected_ins.copy_(source)
        expected_outs.fill_(OLD)
        call(wants, pdl=False)
        live_ins.fill_(NAN)
        live_outs.fill_(OLD)
        for buffer in (before, after, seen):
            buffer.zero_()
        if ins.cut:
            queue_late(older)
        queue_late(late)
        call(lives, **options)
        read, nothing = (live_outs[: outs.tail], after[: outs.tail]), (seen[:0], seen[:0])
        queue(
            neighbours.early,
            read if hunted.ends_without_a_trigger else nothing,
            (live_ins[ins.tail :], seen),
            (new, live_outs[outs.tail :]),
            nothing if hunted.ends_without_a_trigger else read,
        )
        for i, (got, want) in enumerate(pairs.values()):
            counts[i] += (got.view(torch.int32) != want.view(torch.int32)).sum()

    call(lives, **options)
    call(wants, pdl=False)
    torch.cuda.synchronize()
    graph, _ = captured(step)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return {what: n for what, n in zip(pairs, counts.tolist(), strict=True) if n}
