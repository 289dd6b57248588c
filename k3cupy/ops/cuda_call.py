"""What the plan of every operation does on a GPU: stream, outputs, kernel, scale numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from k3cupy.ops import checks, outputs
from k3cupy.ops.arguments import Arguments, Values
from k3cupy.runtime import devices, instances, streams
from k3cupy.runtime.errors import CaptureError
from k3cupy.runtime.tensors import TensorView


class CudaPlace:
    """Where the calls of a plan run.

    Attributes:
        device: GPU ordinal.
        framework: of the first input, which makes the outputs.
        current_stream: gives the handle of the stream on which a call without ``stream=`` runs.
        allocates_in_order: the framework's allocator follows that very stream.
    """

    def __init__(self, views: Mapping[str, TensorView], first: str) -> None:
        """Take the framework and the GPU from one of the tensors.

        Args:
            views: the tensors of a validated call.
            first: the name of the first input.
        """
        self.device = views[first].device_index
        self.framework = views[first].framework
        torch_is_there = any(v.framework == "torch" for v in views.values())
        stream_framework = "torch" if torch_is_there else "cupy"
        self.current_stream = streams.current_of(stream_framework, self.device)
        self.allocates_in_order = self.framework == stream_framework

    def stream(self, stream: Any) -> int:
        """Return the handle of the stream that a call was given, or of the current one."""
        return self.current_stream() if stream is None else streams.handle_of(stream)

    def load(self, instance: instances.Instance, stream: Any) -> instances.LoadedKernel:
        """Load a kernel.

        Raises:
            CaptureError: it is not loaded and the stream is capturing a graph.
        """
        if not instances.is_loaded(instance, self.device):
            handle = self.stream(stream)
            if streams.is_capturing(handle):
                raise CaptureError(
                    f"{instance.name_expression} is not loaded and stream 0x{handle:x} is "
                    "capturing a CUDA graph, where nothing can be compiled or loaded. Before the "
                    "capture call k3cupy.warmup(...), or run this call once with the same shapes "
                    "and types"
                )
        return instances.load(instance, self.device)


class CudaOutput:
    """A tensor that a call makes, on the call's stream, for the caller's framework.

    Attributes:
        address_of: gives the address of what ``make`` made.
        is_handed_over: what ``make`` made goes through ``hand_over`` at the end of the call.
    """

    def __init__(self, place: CudaPlace, shape: tuple[int, ...], dtype: str) -> None:
        self._place, self._dtype = place, dtype
        self._allocate = outputs.allocator(place.framework, shape, dtype, place.device)
        self._in_order = place.allocates_in_order
        self.address_of = outputs.address_of(place.framework)
        self.is_handed_over = place.framework == "jax"

    def make(self, stream: Any, handle: int) -> Any:
        """Return a new tensor; ``stream`` is what the call was given and ``handle`` its handle."""
        if stream is None and self._in_order:
            return self._allocate()
        with outputs.allocated_for(self._place.framework, self._place.device, handle):
            return self._allocate()

    def hand_over(self, out: Any, handle: int) -> Any:
        """Return a new tensor, the kernel queued, as a framework has it that takes it over."""
        # JAX makes its own stream wait for the one that is current at the hand-over.
        with streams.current_for_cupy(handle, self._place.device):
            return outputs.finish(self._place.framework, out, self._dtype)


class ScaleNumbers:
    """Scales that are numbers: kernel arguments whose value comes with each call."""

    def __init__(
        self,
        arguments: Arguments,
        views: Mapping[str, TensorView],
        places: Mapping[str, int],
    ) -> None:
        """Find the scales that are no tensors.

        Args:
            arguments: of the operation.
            views: the tensors of a validated call.
            places: scale argument -> place of its value among the kernel's arguments, for the
                scales that the kernel uses.
        """
        self._found = tuple(
            (name, arguments.index(name), place)
            for name, place in places.items()
            if name not in views
        )

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def of(self, values: Values) -> Sequence[tuple[int, np.float32]]:
        """Return (place among the kernel's arguments, value) for a call."""
        return [
            (place, np.float32(checks.scale_value(name, values[index])))
            for name, index, place in self._found
        ]


def refuse_checks_in_capture(handle: int) -> None:
    """Raise where K3CUPY_CHECK=1 meets a stream that captures.

    Raises:
        CaptureError: it does.
    """
    if streams.is_capturing(handle):
        raise CaptureError(
            "K3CUPY_CHECK=1 reads slots and positions back, which a CUDA graph capture "
            "forbids. Unset it for the capture"
        )


def has_pdl(device: int, pdl: bool | None) -> bool:
    """Return whether a launch carries the attribute; None for where the GPU has it."""
    there = devices.info(device).has_pdl
    return there if pdl is None else pdl and there
