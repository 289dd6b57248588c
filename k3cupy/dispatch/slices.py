"""Batch-invariant products of more rows than one launch takes, in slices of 64 rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from k3cupy.dispatch import backends
from k3cupy.ops.arguments import Values
from k3cupy.ops.cuda_call import CudaOutput, CudaPlace
from k3cupy.ops.fused_a_gemm_config import MAX_TOKENS
from k3cupy.ops.gemm_entry import FUSED_A
from k3cupy.ops.gemm_validate import FRIENDLY, OUT, RESIDUAL, WEIGHT, X
from k3cupy.ops.plan_cache import Plan
from k3cupy.runtime.tensors import TensorView, byte_stride

_DTYPE = "bfloat16"
_FRAMEWORKS = ("torch", "cupy")


def can_be_sliced(views: Mapping[str, TensorView]) -> bool:
    """Return whether slices of the rows are views of the same memory, also of a new output."""
    return all(v.framework in _FRAMEWORKS for v in views.values())


def slices(num_tokens: int) -> Iterator[slice]:
    """Yield the rows of each launch."""
    for start in range(0, num_tokens, MAX_TOKENS):
        yield slice(start, min(start + MAX_TOKENS, num_tokens))


class SlicedPlan:
    """A call of any number of rows, whose slices are batch-invariant calls of the fused-A GEMM."""

    def __init__(self, values: Values, stream: Any, *, weight_is_static: bool) -> None:
        views = FRIENDLY.arguments.views(values)
        x, weight = views["x"], views["weight"]
        self._place = CudaPlace(views, "x")
        self._output = CudaOutput(self._place, (x.shape[0], weight.shape[0]), _DTYPE)
        self._row_bytes = {X: byte_stride(x, 0), OUT: weight.shape[0] * weight.itemsize}
        if values[RESIDUAL] is not None:
            self._row_bytes[RESIDUAL] = byte_stride(views["residual"], 0)
        out = self._output.make(stream, self._place.stream(stream))
        of_count: dict[int, Plan] = {}
        self._launches: list[tuple[int, Plan]] = []
        for rows in slices(x.shape[0]):
            count = rows.stop - rows.start
            if count not in of_count:
                residual = values[RESIDUAL] if values[RESIDUAL] is None else values[RESIDUAL][rows]
                of_count[count] = backends.get(FUSED_A).make_plan(
                    (values[X][rows], values[WEIGHT], out[rows], residual),
                    None,
                    stream,
                    weight_is_static=weight_is_static,
                    batch_invariant=True,
                )
            self._launches.append((rows.start, of_count[count]))

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        """Compute a call; values and addresses are in the order of (x, weight, out, residual)."""
        out = self._output.make(stream, self._place.stream(stream))
        whole = (values[X], values[WEIGHT], out, values[RESIDUAL])
        starts = list(addresses)
        starts[OUT] = self._output.address_of(out)
        for first, plan in self._launches:
            places = starts.copy()
            for index, size in self._row_bytes.items():
                places[index] += first * size
            plan.run(whole, places, stream)
        return out
