"""What a call of the fused-A GEMM hands to the GPU, seen without one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fake_device import STREAM, FakeDevice
from gemm_helpers import inputs

import k3cupy
from k3cupy.kernels import fused_a_gemm

CONFIG = k3cupy.FusedAGemmConfig(16, 32, 128, 8, 2, 4, 1, 4, 2)
run = partial(k3cupy.fused_a_gemm, config=CONFIG, weight_is_static=True)
STATIC = fused_a_gemm.Variant(weight_is_static=True)


def test_a_launch(fake_device: FakeDevice) -> None:
    """The grid counts clusters; the arguments are in the kernel's order, with its types."""
    x, weight = inputs(9, 100, 128, strides=(136, 1))
    out = run(x, weight)
    assert out.shape == (9, 100)
    assert fake_device.loaded == [CONFIG.name_expression(fused_a_gemm.Variant(True, True))]
    assert fake_device.loaded[0].endswith("kWarp, true, true, false>")
    assert fake_device.limits == [CONFIG.shared_bytes]
    assert fake_device.settings == {
        "grid": 4,
        "block": CONFIG.block_size,
        "pdl": True,
        "shared_bytes": CONFIG.shared_bytes,
        "cluster": 4,
    }
    ((stream, arguments),) = fake_device.launches
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


def test_the_public_form_and_strides_of_out(fake_device: FakeDevice) -> None:
    """The public form does not promise the weight, and names no configuration."""
    x, weight = inputs(9, 100, 128)
    wide = torch.zeros(9, 160, dtype=x.dtype)
    k3cupy.dsv3_fused_a_gemm(wide[:, 16:116], x, weight.T, False)
    run(x, weight, out=wide[:, 16:116], pdl=False)
    assert not fake_device.settings["pdl"]
    (_, public), (_, arguments) = fake_device.launches
    assert fake_device.loaded[0].endswith(", false, false>")
    for each in (public, arguments):
        assert each[0] == weight.data_ptr()
        assert each[-5:-1] == [wide.data_ptr() + 32, 160, 0, 0]
    assert fake_device.loaded[1] == CONFIG.name_expression(STATIC)


def test_a_residual(fake_device: FakeDevice) -> None:
    """Its instance, its address and its row stride; a plan serves another address."""
    x, weight = inputs(9, 100, 128)
    residual = torch.zeros(9, 107, dtype=x.dtype)[:, 3:103]
    out = run(x, weight, residual)
    variant = fused_a_gemm.Variant(True, True, True)
    assert fake_device.loaded == [CONFIG.name_expression(variant)]
    assert fake_device.loaded[0].endswith("true, true, true>")
    ((_, arguments),) = fake_device.launches
    assert arguments[6:-1] == [out.data_ptr(), 100, residual.data_ptr(), 107]


def test_a_residual_in_place(fake_device: FakeDevice) -> None:
    """Equal addresses are launched; a plan of the same layouts refuses what overlaps in part."""
    x, weight = inputs(9, 100, 128)
    rows = torch.zeros(10, 100, dtype=x.dtype)
    out = rows[:9]
    assert run(x, weight, out, out=out) is out
    ((_, arguments),) = fake_device.launches
    assert arguments[6:-1] == [out.data_ptr(), 100, out.data_ptr(), 100]
    with pytest.raises(ValueError, match=r"^out: .* apart from residual, got .* overlap"):
        run(x, weight, rows[1:], out=out)
    assert len(fake_device.launches) == 1


def test_one_row_has_no_stride(fake_device: FakeDevice) -> None:
    x, weight = inputs(1, 100, 128)
    run(x.as_strided((1, 128), (2**62, 1)), weight)
    ((_, arguments),) = fake_device.launches
    assert arguments[5] == 0
    assert "true, true, false>" in fake_device.loaded[0], "aligned"


def test_blocks_of_fewer_rows_than_the_tile_has(fake_device: FakeDevice) -> None:
    """The same instance, more blocks; the kernel is told how many rows are whose."""
    x, weight = inputs(9, 100, 128)
    fewer = replace(CONFIG, block_rows=27)
    run(x, weight, config=fewer)
    run(x, weight, config=replace(CONFIG, block_rows=9))
    assert fake_device.settings["grid"] == 12
    assert (
        fake_device.loaded[0]
        == fake_device.loaded[1]
        == CONFIG.name_expression(fused_a_gemm.Variant(True, True))
    )
    assert [arguments[-1] for _, arguments in fake_device.launches] == [27, 9]
    assert "(27 rows)" in str(fewer)


def test_a_plan_serves_other_addresses(fake_device: FakeDevice) -> None:
    first, second = inputs(9, 100, 128), inputs(9, 100, 128)
    outs = [run(x, weight, weight_is_static=False) for x, weight in (first, second)]
    assert len(outs) == 2, "both are kept, so that they are not one piece of memory"
    assert len(fake_device.loaded) == 1
    (_, before), (_, after) = fake_device.launches
    assert [a == b for a, b in zip(before, after, strict=True)].count(False) == 3


def test_no_tokens_no_kernel(fake_device: FakeDevice) -> None:
    x, weight = inputs(0, 100, 128)
    assert run(x, weight, config=None).shape == (0, 100)
    assert fake_device.loaded == []
    assert fake_device.launches == []


def test_the_element_wise_instance_says_why(fake_device: FakeDevice) -> None:
    x, weight = inputs(2, 48, 128, strides=(6285, 1))
    decision = k3cupy.explain_fused_a_gemm(x, weight, config=CONFIG)
    assert decision.runs_on == "cuda"
    assert decision.pdl
    variant = fused_a_gemm.Variant(aligned_x=False)
    assert decision.name_expression == CONFIG.name_expression(variant)
    assert decision.reason == (
        "the caller named the configuration; element by element, not 128-bit, because x is not "
        "aligned: a stride of 6285 elements is no multiple of 16 bytes"
    )


def test_a_configuration_that_does_not_fit_is_refused_before_anything_is_loaded(
    fake_device: FakeDevice,
) -> None:
    x, weight = inputs(2, 48, 128)
    huge = replace(CONFIG, stages=60)
    with pytest.raises(ValueError, match=rf"^config: .*232448 .*got {huge.shared_bytes} bytes"):
        run(x, weight, config=huge)
    assert fake_device.loaded == []
