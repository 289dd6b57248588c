"""What a call of the fused-A GEMM hands to the GPU, seen without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import STREAM, FakeDevice
from gemm_helpers import inputs

import k3cupy
from k3cupy.ops.fused_a_gemm_plan import Options, make_plan
from k3cupy.ops.fused_a_gemm_validate import PUBLIC
from k3cupy.ops.gemm_validate import FRIENDLY, Form

CONFIG = k3cupy.FusedAGemmConfig(16, 32, 128, 8, 2, 4, 1, 4, 2)


class GemmDevice(FakeDevice):
    """Runs one call of the fused-A GEMM."""

    def run(
        self, form: Form, *tensors: torch.Tensor | None, config: Any = CONFIG, pdl: Any = None
    ) -> Any:
        """Plan and run a call of (x, weight, out) and perhaps the residual."""
        tensors += (None,) * (4 - len(tensors))
        plan = make_plan(form, tensors, Options(pdl, True, False, config), None)
        return plan.run(tensors, [0 if t is None else t.data_ptr() for t in tensors], None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> GemmDevice:
    return GemmDevice(monkeypatch)


def test_a_launch(device: GemmDevice) -> None:
    """The grid counts clusters; the arguments are in the kernel's order, with its types."""
    x, weight = inputs(9, 100, 128, strides=(136, 1))
    out = device.run(FRIENDLY, x, weight, None)
    assert out.shape == (9, 100)
    assert device.loaded == [CONFIG.name_expression(k3cupy.FusedAGemmVariant(False, True, True))]
    assert device.loaded[0].endswith("false, true, true, false>")
    assert device.limits == [CONFIG.shared_bytes]
    assert device.settings == {
        "grid": 4,
        "block": CONFIG.block_size,
        "pdl": True,
        "shared_bytes": CONFIG.shared_bytes,
        "cluster": 4,
    }
    ((stream, arguments),) = device.launches
    assert stream == STREAM
    pointers = (weight.data_ptr(), x.data_ptr(), out.data_ptr())
    w, n, k, x_at, tokens, x_stride, out_at, out_stride, *residual, rows = arguments
    assert residual == [0, 0]
    assert (rows, type(rows)) == (32, np.uint32)
    assert (w, x_at, out_at) == pointers
    assert (n, k, tokens) == (100, 128, 9)
    assert {type(value) for value in (n, k, tokens)} == {np.uint32}
    assert (x_stride, out_stride) == (136, 100)
    assert {type(value) for value in (x_stride, out_stride)} == {int}


def test_the_public_form_and_strides_of_out(device: GemmDevice) -> None:
    x, weight = inputs(9, 100, 128)
    wide = torch.zeros(9, 160, dtype=x.dtype)
    device.run(PUBLIC, x, weight.T, wide[:, 16:116], pdl=False)
    assert not device.settings["pdl"]
    ((_, arguments),) = device.launches
    assert arguments[0] == weight.data_ptr()
    assert arguments[6:-1] == [wide.data_ptr() + 32, 160, 0, 0]
    assert "true, true, true, false>" in device.loaded[0]


def test_a_residual(device: GemmDevice) -> None:
    """Its instance, its address and its row stride; a plan serves another address."""
    x, weight = inputs(9, 100, 128)
    residual = torch.zeros(9, 107, dtype=x.dtype)[:, 3:103]
    out = device.run(FRIENDLY, x, weight, None, residual)
    assert device.loaded == [
        CONFIG.name_expression(k3cupy.FusedAGemmVariant(True, True, True, True))
    ]
    assert device.loaded[0].endswith("true, true, true, true>")
    ((_, arguments),) = device.launches
    assert arguments[6:-1] == [out.data_ptr(), 100, residual.data_ptr(), 107]


def test_a_residual_in_place(device: GemmDevice) -> None:
    """Equal addresses are launched; a plan of the same layouts refuses what overlaps in part."""
    x, weight = inputs(9, 100, 128)
    rows = torch.zeros(10, 100, dtype=x.dtype)
    out = rows[:9]
    assert device.run(FRIENDLY, x, weight, out, out) is out
    ((_, arguments),) = device.launches
    assert arguments[6:-1] == [out.data_ptr(), 100, out.data_ptr(), 100]
    with pytest.raises(ValueError, match=r"^out: .* apart from residual, got .* overlap"):
        device.run(FRIENDLY, x, weight, out, rows[1:])
    assert len(device.launches) == 1


def test_one_row_has_no_stride(device: GemmDevice) -> None:
    x, weight = inputs(1, 100, 128)
    device.run(FRIENDLY, x.as_strided((1, 128), (2**62, 1)), weight, None)
    ((_, arguments),) = device.launches
    assert arguments[5] == 0
    assert "true, true, true, false>" in device.loaded[0], "packed"


def test_blocks_of_fewer_rows_than_the_tile_has(device: GemmDevice) -> None:
    """The same instance, more blocks; the kernel is told how many rows are whose."""
    x, weight = inputs(9, 100, 128)
    fewer = replace(CONFIG, block_rows=27)
    device.run(FRIENDLY, x, weight, None, config=fewer)
    device.run(FRIENDLY, x, weight, None, config=replace(CONFIG, block_rows=9))
    assert device.settings["grid"] == 12
    assert (
        device.loaded[0]
        == device.loaded[1]
        == CONFIG.name_expression(k3cupy.FusedAGemmVariant(True, True, True))
    )
    assert [arguments[-1] for _, arguments in device.launches] == [27, 9]
    assert "(27 rows)" in str(fewer)


def test_a_plan_serves_other_addresses(device: GemmDevice) -> None:
    first, second = inputs(9, 100, 128), inputs(9, 100, 128)
    plan = make_plan(FRIENDLY, (*first, None, None), Options(None, False, False, None), None)
    outs = [
        plan.run((x, weight, None, None), [x.data_ptr(), weight.data_ptr(), 0, 0], None)
        for x, weight in (first, second)
    ]
    assert len(outs) == 2, "both are kept, so that they are not one piece of memory"
    assert len(device.loaded) == 1
    (_, before), (_, after) = device.launches
    assert [a == b for a, b in zip(before, after, strict=True)].count(False) == 3


def test_no_tokens_no_kernel(device: GemmDevice) -> None:
    x, weight = inputs(0, 100, 128)
    assert device.run(FRIENDLY, x, weight, None, config=None).shape == (0, 100)
    assert device.loaded == []
    assert device.launches == []


def test_the_element_wise_instance_says_why(device: GemmDevice) -> None:
    x, weight = inputs(2, 48, 128, strides=(6285, 1))
    decision = k3cupy.explain_fused_a_gemm(x, weight, config=CONFIG)
    assert decision.backend == "cuda"
    assert decision.pdl
    variant = k3cupy.FusedAGemmVariant(packed=False, aligned_x=False)
    assert decision.name_expression == CONFIG.name_expression(variant)
    assert decision.reason == (
        "the caller named the configuration; x element by element, not 128-bit, because x is not "
        "aligned: a stride of 6285 elements is no multiple of 16 bytes"
    )


def test_a_configuration_that_does_not_fit_is_refused_before_anything_is_loaded(
    device: GemmDevice,
) -> None:
    x, weight = inputs(2, 48, 128)
    huge = replace(CONFIG, stages=60)
    with pytest.raises(ValueError, match=rf"^config: .*232448 .*got {huge.shared_bytes} bytes"):
        device.run(FRIENDLY, x, weight, None, config=huge)
    assert device.loaded == []
