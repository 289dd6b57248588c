"""The fused-A GEMM: layouts under the public names. All others are those of both GEMMs."""

from __future__ import annotations

import pytest
import torch
from gemm_helpers import inputs, op, poisoned_slice, same_bits, transposed_op
from helpers import BF16, OldProducer, Producer, guarded, refused


@pytest.mark.parametrize("tokens", [2, 16])
def test_case02_a_transposed_weight_in_rows_of_7175(device: str, tokens: int) -> None:
    x, weight = inputs(tokens, 48, 7168, device)
    far = guarded(weight.cpu(), device, strides=(7175, 1))
    out = torch.empty(tokens, 48, dtype=BF16, device=device)
    arguments = {"mat_a": x, "mat_b": far.T, "output": out}
    refused(arguments, "mat_b", "7175", operation=transposed_op)


@pytest.mark.parametrize("shift", [2, 4, 8])
def test_case03_addresses_of_a_transposed_weight(device: str, shift: int) -> None:
    x, weight = inputs(4, 48, 128, device)
    off = guarded(weight.cpu(), device, shift=shift)
    out = torch.empty(4, 48, dtype=BF16, device=device)
    arguments = {"mat_a": x, "mat_b": off.T, "output": out}
    refused(arguments, "mat_b", "address 0x", operation=transposed_op)


@pytest.mark.parametrize("producer", [Producer, OldProducer])
def test_case16_bare_dlpack_objects(device: str, producer: type[Producer]) -> None:
    x, weight = inputs(9, 48, 128, device)
    view = poisoned_slice(x, 6288, 6144, device)
    out = torch.zeros(9, 48, dtype=BF16, device=device)
    transposed_op(producer(view), producer(weight.T), out)
    same_bits(out, op(x, weight))
