"""What a call of the skinny GEMM hands to the GPU, seen without one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fake_device import A100, STREAM, FakeDevice
from gemm_helpers import inputs, residual_of, taken_for
from helpers import FP16

import k3cupy
from k3cupy.kernels import skinny_gemm

CONFIG = k3cupy.SkinnyGemmConfig(5, 64, 3, 2, 8)
run = partial(k3cupy.skinny_gemm, config=CONFIG, weight_is_static=True)


def test_a_launch(fake_device: FakeDevice) -> None:
    """The arguments are in the kernel's order, with its types; strides are 64-bit."""
    x, weight = inputs(5, 100, 128, strides=(136, 1))
    out = run(x, weight)
    assert out.shape == (5, 100)
    variant = skinny_gemm.Variant("bfloat16", True, False, True)
    assert fake_device.loaded == [CONFIG.name_expression(variant)]
    assert fake_device.limits == []
    assert fake_device.settings == {
        "grid": 34,
        "block": 64,
        "pdl": True,
        "shared_bytes": 0,
        "cluster": 1,
    }
    ((stream, arguments),) = fake_device.launches
    assert stream == STREAM
    w, n, k, x_at, x_stride, residual_at, residual_stride, out_at, out_stride = arguments
    assert (w, x_at, out_at) == (weight.data_ptr(), x.data_ptr(), out.data_ptr())
    assert (n, k) == (100, 128)
    assert {type(value) for value in (n, k)} == {np.uint32}
    assert (x_stride, out_stride) == (136, 100)
    assert (residual_at, residual_stride) == (0, 0)
    strides = (x_stride, residual_stride, out_stride)
    assert all(type(value) is int for value in strides), "Python ints are 64-bit arguments"


@pytest.mark.parametrize("split", [1, 4])
def test_a_launch_with_tensor_cores(fake_device: FakeDevice, split: int) -> None:
    """The number of tokens is an argument; a grid is counted in clusters."""
    config = k3cupy.SkinnyGemmConfig(11, 64, 12, 2, 8, "mma", split)
    x, weight = inputs(11, 100, 128, strides=(136, 1))
    out = residual_of(11, 100)
    assert run(x, weight, out, out=out, config=config) is out
    variant = skinny_gemm.Variant("bfloat16", True, True, True, k=128)
    assert fake_device.loaded == [config.name_expression(variant)]
    assert fake_device.settings == {
        "grid": 9,
        "block": 64,
        "pdl": True,
        "shared_bytes": 0,
        "cluster": split,
    }
    ((_, arguments),) = fake_device.launches
    out_at = out.data_ptr()
    assert arguments == [
        *(weight.data_ptr(), 100, 128, x.data_ptr(), 11, 136),
        *(out_at, 100, out_at, 100),
    ]
    assert {type(arguments[place]) for place in (1, 2, 4)} == {np.uint32}
    assert {type(arguments[place]) for place in (5, 7, 9)} == {int}


def test_clusters_are_refused_where_there_are_none() -> None:
    """By the GPU's architecture, in a call, in its explanation and in a warm-up."""
    config = k3cupy.SkinnyGemmConfig(5, 64, 12, 2, 8, "mma", 2)
    x, weight = inputs(5, 100, 128)
    text = r"^config: expected split_k of 1 on sm_80, for clusters exist from sm_90 on, got 2"
    with taken_for(A100) as device:
        for call in (k3cupy.skinny_gemm, k3cupy.explain_skinny_gemm):
            with pytest.raises(ValueError, match=text):
                call(x, weight, config=config)
        assert device.loaded == []
        k3cupy.skinny_gemm(x, weight, config=replace(config, split_k=1))
        assert "skinny_gemm_mma" in device.loaded[0]
    assert k3cupy.skinny_gemm(x, weight, config=config).shape == (5, 100), "the CPU has no clusters"


def test_a_launch_with_a_residual_and_an_output(fake_device: FakeDevice) -> None:
    x, weight = inputs(5, 100, 128, dtype=FP16)
    residual = residual_of(5, 100, dtype=FP16, strides=(107, 1))
    wide = torch.zeros(5, 160, dtype=FP16)
    out = wide[:, 16:116]
    assert run(x, weight, residual, out=out, pdl=False) is out
    assert not fake_device.settings["pdl"]
    ((_, arguments),) = fake_device.launches
    assert arguments[5:] == [residual.data_ptr(), 107, wide.data_ptr() + 32, 160]
    variant = skinny_gemm.Variant("float16", True, True, True)
    assert fake_device.loaded == [CONFIG.name_expression(variant)]


def test_in_place(fake_device: FakeDevice) -> None:
    x, weight = inputs(5, 100, 128)
    out = residual_of(5, 100)
    assert run(x, weight, out, out=out) is out
    ((_, arguments),) = fake_device.launches
    assert arguments[5] == arguments[7] == out.data_ptr()


def test_one_row_has_no_stride(fake_device: FakeDevice) -> None:
    x, weight = inputs(1, 100, 128)
    run(x.as_strided((1, 128), (2**62, 1)), weight, config=None)
    ((_, arguments),) = fake_device.launches
    assert arguments[4] == 0
    assert fake_device.loaded[0].endswith(", true, false, true>"), "aligned"


def test_a_plan_serves_other_addresses(fake_device: FakeDevice) -> None:
    first, second = ((*inputs(5, 100, 128), residual_of(5, 100)) for _ in range(2))
    outs = [run(*tensors, weight_is_static=False) for tensors in (first, second)]
    assert len(outs) == 2, "both are kept, so that they are not one piece of memory"
    assert len(fake_device.loaded) == 1
    (_, before), (_, after) = fake_device.launches
    assert [a == b for a, b in zip(before, after, strict=True)].count(False) == 4


def test_no_tokens_no_kernel(fake_device: FakeDevice) -> None:
    x, weight = inputs(0, 100, 128)
    for config in (None, CONFIG):
        assert run(x, weight, config=config).shape == (0, 100)
    assert fake_device.loaded == []
    assert fake_device.launches == []


def test_the_element_wise_instance_says_why(fake_device: FakeDevice) -> None:
    x, weight = inputs(5, 48, 128, strides=(6285, 1))
    decision = k3cupy.explain_skinny_gemm(x, weight, config=CONFIG)
    assert decision.runs_on == "cuda"
    assert decision.pdl
    variant = skinny_gemm.Variant(aligned_x=False)
    assert decision.name_expression == CONFIG.name_expression(variant)
    assert decision.reason == (
        "the caller named the configuration; element by element, not 128-bit, because x is not "
        "aligned: a stride of 6285 elements is no multiple of 16 bytes"
    )


def test_the_grid_covers_every_output(fake_device: FakeDevice) -> None:
    for n, blocks in ((1, 1), (3, 1), (4, 2), (300, 100), (301, 101)):
        run(*inputs(5, n, 8))
        assert fake_device.settings["grid"] == blocks


def test_a_configuration_for_other_rows_is_refused_before_anything_is_loaded(
    fake_device: FakeDevice,
) -> None:
    x, weight = inputs(4, 48, 128)
    with pytest.raises(ValueError, match=r"^config: expected num_rows of exactly the 4 .*got 5"):
        run(x, weight)
    assert fake_device.loaded == []
