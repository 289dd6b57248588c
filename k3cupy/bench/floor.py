"""The floor of a product of a few tokens: reading its weight once, and nothing else."""

from __future__ import annotations

import torch

from k3cupy.runtime import devices, instances, launch
from k3cupy.runtime.instances import Instance
from k3cupy.timing.cold import Body, Timer

_FLOOR_GRIDS = ((1, 512), (2, 256), (2, 512), (4, 256), (4, 512), (8, 256))
"""Blocks a multiprocessor and threads a block of the floor kernel; the fastest counts."""


def floor_us(timer: Timer) -> float:
    """Return the time of streaming a weight, with the best of several grids."""
    device = torch.cuda.current_device()
    kernel = instances.load(Instance("bench/stream.cu", "k3cupy::stream_bytes"), device)
    sink = torch.zeros(1, device="cuda", dtype=torch.int32)

    def body(blocks_per_sm: int, block: int) -> Body:
        queue = launch.make_launcher(
            device,
            kernel.kernel,
            grid=blocks_per_sm * devices.info(device).num_sms,
            block=block,
            pdl=True,
        )

        def stream(weight: torch.Tensor) -> None:
            arguments = [weight.data_ptr(), weight.numel() // 8, sink.data_ptr()]
            queue(torch.cuda.current_stream().cuda_stream, arguments)

        return stream

    return min(timer.cold([body(*grid) for grid in _FLOOR_GRIDS]))
