"""Weights that PyTorch has sharded as DTensors, and the part of a product that is a rank's own.

Importing this imports no distributed part of PyTorch: where nobody did, there are no DTensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from k3cupy.runtime import tracing


class Part(NamedTuple):
    """What a rank computes of a product of DTensors, without a word to the others.

    Attributes:
        x: [..., K], or its share of the columns, in this rank's memory.
        weight: [N, K], or its share of the rows or columns, in this rank's memory.
        mesh: of both.
        placement: of the product.
        shape: of the whole product.
    """

    x: Tensor
    weight: Tensor
    mesh: Any
    placement: Any
    shape: tuple[int, ...]

    @tracing.unseen
    def whole(self, out: Tensor) -> Tensor:
        """Return the DTensor whose part on this rank is ``out``, a contiguous tensor."""
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= max(size, 1)
        made: Tensor = _kinds().DTensor.from_local(
            out,
            self.mesh,
            (self.placement,),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=tuple(reversed(strides)),
        )
        return made


def _kinds() -> Any:
    """Return the module of DTensors, of which there are some."""
    import torch.distributed.tensor

    return torch.distributed.tensor


def is_shard(weight: Any) -> bool:
    """Return whether a weight is a DTensor; PyTorch 2.4 has them elsewhere, and they count not.

    By the names of its class: compiled code, which asks as well, would walk through all modules for
    that of DTensors, and some change the list of modules when they are looked at.
    """
    kind = type(weight)
    return kind.__name__ == "DTensor" and kind.__module__ == "torch.distributed.tensor"


def is_gathered(layer: nn.Module) -> bool:
    """Return whether FSDP gathers the weight of a layer for each call.

    It writes into the same memory each time, hidden from PyTorch's count of writes.
    """
    return "_is_fsdp_managed_module" in vars(layer)


_OTHER = -1


def _split(placement: Any) -> int | None:
    """Return the dimension by which a tensor is split, None for a whole one, else ``_OTHER``.

    PyTorch's strided shards call themselves equal to others, and are not.
    """
    kinds, kind = _kinds(), type(placement)
    if kind is kinds.Replicate:
        return None
    return int(placement.dim) if kind is kinds.Shard else _OTHER


def why_not_local(weight: Any) -> str:
    """Return why a rank cannot multiply with its share of a DTensor, or ``""`` where it can."""
    if len(weight.placements) != 1:
        return (
            f"its weight is a DTensor on a mesh of {len(weight.placements)} dimensions, not of one"
        )
    (placement,) = weight.placements
    if _split(placement) in (None, 0, 1):
        return ""
    told = f"its weight is a DTensor with placement {placement}"
    return f"{told}, neither whole nor split by rows or columns"


def share_of(weight: Any) -> str:
    """Say which share of a DTensor a rank holds."""
    placement, ranks = weight.placements[0], weight.device_mesh.size()
    whole = " x ".join(map(str, weight.shape))
    if not placement.is_shard():
        return f"a copy on each of {ranks} ranks"
    by = "columns" if placement.dim else "rows"
    return f"a share of {whole}, split by {by} over {ranks} ranks"


@tracing.unseen
def part_of(x: Any, weight: Any) -> Part | None:
    """Return this rank's part of ``x @ weight.T``, or None where PyTorch has to see the whole.

    That is wherever ranks would have to talk first, autograd records, or one of them is no
    DTensor. All ranks come to the same answer: it depends on nothing that only one of them has.

    Args:
        x: [..., K].
        weight: [N, K].
    """
    if not (is_shard(weight) and is_shard(x)) or x.device_mesh != weight.device_mesh:
        return None
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return None
    if why_not_local(weight) or weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        return None
    kinds, columns, placement = _kinds(), x.dim() - 1, None
    of_x, of_weight = _split(x.placements[0]), _split(weight.placements[0])
    if of_x is None and of_weight is None:
        placement = kinds.Replicate()
    elif of_x is None and of_weight == 0:
        placement = kinds.Shard(columns)
    elif of_x == columns and of_weight == 1:
        placement = kinds.Partial()
    elif of_x not in (None, columns, _OTHER) and of_weight is None:
        placement = x.placements[0]  # tokens apart
    if placement is None:
        return None
    shape = (*x.shape[:-1], weight.shape[0])
    return Part(local_of(x), local_of(weight), x.device_mesh, placement, shape)


def local_of(t: Any) -> Tensor:
    """Return what a rank holds of a DTensor, once a collective that is under way has ended."""
    with torch.no_grad():
        local = t.to_local()
    wait = getattr(local, "wait", None)
    found: Tensor = local if wait is None else wait()
    return found
