"""The fused-A GEMM: which kernel a layout of x gets, and layouts under the public names."""

from __future__ import annotations

import pytest
import torch
from gemm_helpers import inputs, normal, op, poisoned_slice, same_bits, transposed_op
from helpers import BF16, OldProducer, Producer, guarded, refused

from k3cupy import projections
from k3cupy.ops.fused_a_gemm_validate import validate
from k3cupy.ops.gemm_validate import FRIENDLY


def path_of(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Which kernel a call asks for; known on the CPU too, where none runs."""
    variant = validate(FRIENDLY, (x, weight, None, None), weight_is_static=False).variant
    name = "packed" if variant.packed else "strided"
    return name if variant.aligned_x else "element-wise"


# Which kernel: that it is the one which runs, and is right, the tests of both GEMMs say


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 17, 64])
@pytest.mark.parametrize("case", projections.strided_cases(), ids=lambda c: c.name)
def test_strided_projections(device: str, case: projections.StridedCase, tokens: int) -> None:
    x, weight = inputs(tokens, case.n, case.k, device)
    view = poisoned_slice(x, case.source_row_width, case.offset, device)
    assert path_of(view, weight) == ("packed" if tokens == 1 else "strided")


def test_case01_a_slice_of_one_token_is_packed(device: str) -> None:
    x, weight = inputs(1, 48, 128, device)
    view = poisoned_slice(x, 6288, 6144, device)
    strides = [view.as_strided((1, 128), (stride, 1)) for stride in (0, 1, 7, 128, 6288, 2**40)]
    for one in (view, torch.from_dlpack(view), *strides):
        assert path_of(one, weight) == "packed"


@pytest.mark.parametrize("stride", [128, 129, 130, 132, 136, 144, 192, 6288, 0, 1, 8, 16])
def test_row_strides_of_x(device: str, stride: int) -> None:
    weight = guarded(normal((48, 128), 1), device)
    x = guarded(normal((8 * stride + 128,), 2), device).as_strided((9, 128), (stride, 1))
    expected = "element-wise" if stride % 8 else "packed" if stride == 128 else "strided"
    assert path_of(x, weight) == expected


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("shift", [2, 4, 6, 8, 14, 16])
def test_case03_addresses_of_x(device: str, shift: int, tokens: int) -> None:
    x, weight = inputs(tokens, 48, 128, device, strides=(136, 1), shift=shift)
    aligned = "packed" if tokens == 1 else "strided"
    assert path_of(x, weight) == (aligned if shift == 16 else "element-wise")


# The public signature


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
