"""The floor of a product of a few tokens: reading its weight once, and nothing else.

Which form of the streaming kernel is the fastest depends on the weight, so many are tried. Where a
product is faster than all of them, the floor is none, and a report says so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from k3cupy.runtime import devices, instances, launch
from k3cupy.runtime.instances import Instance
from k3cupy.timing.chain import Chain
from k3cupy.timing.cold import Body, Timer
from k3cupy.timing.graphs import Effort

_VECTOR_BYTES = 16
_KEPT, _GLANCE = 4, Effort(rounds=2, replays=3, warm=1)


class Form(NamedTuple):
    """A form of the streaming kernel.

    Attributes:
        block_size: threads a block.
        in_flight: loads that a thread has on their way.
        blocks_per_sm: of a grid that stays, whose blocks read side by side; 0 for one pass: each
            block has a part of its own, and a thread loads no more than it has in flight.
    """

    block_size: int
    in_flight: int
    blocks_per_sm: int = 0

    @property
    def instance(self) -> Instance:
        """What is compiled."""
        name = f"k3cupy::stream_bytes<{self.block_size}, {self.in_flight}>"
        return Instance("bench/stream.cu", name)

    def numbers(self, vectors: int, num_sms: int) -> tuple[int, int, int, int]:
        """Return blocks, the step between blocks, that of a thread, and the vectors of a block."""
        if self.blocks_per_sm:
            blocks = self.blocks_per_sm * num_sms
            return blocks, self.block_size, blocks * self.block_size, vectors
        of_block = self.block_size * self.in_flight
        return -(-vectors // of_block), of_block, self.block_size, of_block


_ONE_PASS = ((64, 2), (64, 4), (128, 2), (128, 4), (128, 8), (256, 2), (256, 4), (256, 8), (512, 2))
_RESIDENT = ((64, 8, 16), (128, 2, 16), (128, 4, 16), (256, 2, 8), (256, 4, 8), (256, 8, 4))

FORMS = tuple(Form(*numbers) for numbers in (*_ONE_PASS, *_RESIDENT))
"""Of a hundred and eight those that were the fastest for some weight; they fit one measurement."""


def body_of(form: Form, like: torch.Tensor) -> Body:
    """Return what streams a weight, of a GPU like that of another one."""
    device = torch.cuda.current_device()
    kernel = instances.load(form.instance, device)
    sink = torch.zeros(1, device=like.device, dtype=torch.int32)

    @functools.cache
    def launcher(vectors: int) -> tuple[launch.Launcher, tuple[int, ...]]:
        blocks, *steps = form.numbers(vectors, devices.info(device).num_sms)
        queue = launch.make_launcher(
            device, kernel.kernel, grid=blocks, block=form.block_size, pdl=True
        )
        return queue, (vectors, *steps)

    def stream(weight: torch.Tensor) -> None:
        queue, numbers = launcher(weight.numel() * weight.element_size() // _VECTOR_BYTES)
        stream = torch.cuda.current_stream().cuda_stream
        queue(stream, [weight.data_ptr(), *numbers, sink.data_ptr()])

    return stream


def fastest(weights: Sequence[torch.Tensor], chain: Chain) -> list[Body]:
    """Return what streams a weight the fastest in a chain, to be measured again beside products."""
    instances.load_all([form.instance for form in FORMS], torch.cuda.current_device())
    bodies = [body_of(form, weights[0]) for form in FORMS]
    times = Timer(weights, _GLANCE).added(bodies, chain)
    return [bodies[i] for i in sorted(range(len(FORMS)), key=times.__getitem__)[:_KEPT]]


def remark(found: Iterable[tuple[str, float, float]]) -> str:
    """Return a sentence on where a product was faster than streaming its weight.

    Args:
        found: what was measured, in words; the time of streaming; that of the fastest product.
    """
    beaten = [
        f"{what} ({us:.2f} us, streaming {floor:.2f})" for what, floor, us in found if us < floor
    ]
    if not beaten:
        return "No product was faster than the floor."
    return f"A floor that a product beats is none: {len(beaten)} here, {', '.join(beaten)}."
