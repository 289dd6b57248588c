"""The fused-A GEMM with x by the copy engine: what it takes, what is left to copy warps, bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import H200, FakeDevice
from gemm_helpers import inputs, normal, op, residual_of, run_and_check, same_bits
from helpers import BF16, guarded, refused
from pdl_helpers import wrong_values_of_a_chain
from stream_helpers import captured

import k3cupy
from k3cupy.kernels import fused_a_gemm
from k3cupy.runtime import devices
from k3cupy.runtime.tensor_maps import Box

MAPPED = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 3, 4, 1, 1, 2, mapped_x=True)
COPIED = replace(MAPPED, mapped_x=False)
SPLIT_WARPGROUPS = k3cupy.FusedAGemmConfig(
    64, 64, 128, 4, 3, 1, 4, 2, 2, "warpgroup_tokens", mapped_x=True
)


@pytest.fixture
def has_maps() -> None:
    if not torch.cuda.is_available() or not devices.info(0).has_tensor_maps:
        pytest.skip("needs a GPU of sm_90 to sm_103")


# Without a GPU


def test_a_launch(fake_device: FakeDevice) -> None:
    """The map in place of the address and the row stride, and one warp in place of two."""
    x, weight = inputs(9, 100, 128, strides=(136, 1))
    out = op(x, weight, weight_is_static=True, config=MAPPED)
    (name,) = fake_device.loaded
    assert name.startswith(
        "k3cupy::fused_a_gemm_mapped_x<16, 32, 128, 4, 3, 4, 1, 1, 4, 2, k3cupy::Product::kWarp, "
    )
    assert fake_device.settings["block"] == 32 * (4 + 2 + 1) == MAPPED.block_size
    ((_, arguments),) = fake_device.launches
    w, n, k, x_map, tokens, out_at, out_stride, *residual, rows = arguments
    assert (w, n, k, tokens, rows) == (weight.data_ptr(), 100, 128, 9, 32)
    assert x_map == (Box(9, 128, 136, 16), x.data_ptr())
    assert (out_at, out_stride, residual) == (out.data_ptr(), 100, [0, 0])
    assert type(rows) is np.uint32


def test_one_row_has_no_stride(fake_device: FakeDevice) -> None:
    x, weight = inputs(1, 100, 128)
    op(x.as_strided((1, 128), (3, 1)), weight, weight_is_static=True, config=MAPPED)
    ((_, arguments),) = fake_device.launches
    assert arguments[3][0] == Box(1, 128, 128, 16)


def explained(x: torch.Tensor, k: int, config: k3cupy.FusedAGemmConfig = MAPPED) -> Any:
    weight = torch.zeros(100, k, dtype=BF16)
    return k3cupy.explain_fused_a_gemm(x, weight, config=config)


def test_what_the_copy_engine_takes(fake_device: FakeDevice) -> None:
    for x in (inputs(9, 1, 128)[0], inputs(9, 1, 128, strides=(136, 1))[0]):
        decision = explained(x, 128)
        assert decision.config == MAPPED
        assert "mapped_x<" in decision.name_expression
        assert str(decision.config).endswith("x mapped")


def test_rows_that_overlap(fake_device: FakeDevice) -> None:
    x = torch.zeros(4096, dtype=BF16)
    for stride in (0, 64):
        decision = explained(x.as_strided((9, 128), (stride, 1)), 128)
        assert decision.config == COPIED
        assert decision.name_expression == COPIED.name_expression(fused_a_gemm.Variant())
        assert decision.reason.endswith(
            f"; x by copy warps, because its rows are {stride} elements apart, not 128 or more"
        )


def test_rows_that_are_not_aligned(fake_device: FakeDevice) -> None:
    """The reason names the layout once."""
    decision = explained(inputs(9, 1, 128, strides=(137, 1))[0], 128)
    assert decision.config == COPIED
    assert "element by element" in decision.reason
    assert "copy warps" not in decision.reason


def test_columns_of_a_split_that_end_inside_a_stage(fake_device: FakeDevice) -> None:
    """What lies behind them would meet a weight of zeros, and might be infinite."""
    for k, mapped in ((256, True), (512, True), (384, False), (272, False)):
        decision = explained(inputs(9, 1, k)[0], k, SPLIT_WARPGROUPS)
        assert decision.config.mapped_x == mapped
        told = f"x by copy warps, because K = {k} is no multiple of 256"
        assert decision.reason.endswith(told) != mapped
    warps = replace(MAPPED, split_k=2)
    assert explained(inputs(9, 1, 272)[0], 272, warps).config == warps, "these take whole steps"


def test_a_configuration_that_other_gpus_do_not_have(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = inputs(16, 1, 128)
    assert explained(x, 128).config == MAPPED
    for capability in ((8, 0), (8, 6), (8, 9), (12, 0), (10, 0), (10, 3)):
        gpu = replace(H200, compute_capability=capability)
        monkeypatch.setattr(devices, "info", lambda _, gpu=gpu: gpu)
        if capability[0] == 10:
            assert explained(x, 128).config == MAPPED
            continue
        text = rf"^config: expected mapped_x of False on {gpu.arch}.*, got True$"
        with pytest.raises(ValueError, match=text):
            explained(x, 128)


def test_instances_and_orders() -> None:
    assert "mapped_x" in MAPPED.name_expression(fused_a_gemm.Variant())
    one_by_one = fused_a_gemm.Variant(aligned_x=False)
    assert MAPPED.name_expression(one_by_one) == COPIED.name_expression(one_by_one)
    assert MAPPED.order == COPIED.order
    assert not MAPPED.instance(fused_a_gemm.Variant()).own_arch
    assert not replace(MAPPED, tile_k=32).is_valid()


# On a GPU


CONFIGS = [
    MAPPED,
    replace(MAPPED, tile_k=512, stages=2, stages_x=2),
    replace(MAPPED, tile_k=64, stages=7, stages_x=5),
    replace(MAPPED, tile_m=64, tile_n=64, warps_n=2),
    replace(MAPPED, block_rows=27, copy_warps=4),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("split", [1, 2, 4])
def test_values_and_bits(split: int, tokens: int, has_maps: None) -> None:
    """Those of copy warps, also where tokens and columns end inside a box."""
    for n, k in ((64, 64), (100, 16), (7, 80), (200, 2064), (65, 7168)):
        x, weight = inputs(tokens, n, k, "cuda", seed=n + k, strides=(k + 8, 1))
        want = run_and_check(x, weight, config=replace(COPIED, split_k=split))
        for config in CONFIGS:
            got = run_and_check(x, weight, config=replace(config, split_k=split))
            same_bits(got, want, str(config))


@pytest.mark.gpu
def test_layouts_of_x(has_maps: None) -> None:
    """Those that the copy engine does not take come by copy warps, with the same bits."""
    x, weight = inputs(9, 200, 1552, "cuda")
    packed = run_and_check(x, weight, config=MAPPED)
    for stride, shift in ((1560, 0), (1553, 0), (1552, 2), (3104, 8), (1 << 17, 0)):
        other = guarded(x.cpu(), "cuda", strides=(stride, 1), shift=shift)
        same_bits(run_and_check(other, weight, config=MAPPED), packed, f"{stride}, {shift}")
    row = x[:1]
    for stride in (0, 3, 8):
        one = row.as_strided((1, 1552), (stride, 1))
        same_bits(op(one, weight, config=MAPPED), packed[:1])
    for stride in (0, 8):
        run_and_check(row.as_strided((9, 1552), (stride, 1)), weight, config=MAPPED)


@pytest.mark.gpu
def test_rows_further_apart_than_two_gigabytes(has_maps: None) -> None:
    stride = (1 << 30) + 64
    storage = torch.empty(2 * stride + 128, dtype=BF16, device="cuda")
    x = storage.as_strided((3, 128), (stride, 1))
    x.copy_(normal((3, 128), 1, "cuda"))
    weight = normal((100, 128), 2, "cuda")
    decision = k3cupy.explain_fused_a_gemm(x, weight, config=MAPPED)
    assert decision.config == MAPPED
    same_bits(op(x, weight, config=MAPPED), op(x.contiguous(), weight, config=COPIED))


@pytest.mark.gpu
def test_more_addresses_than_maps_are_kept(has_maps: None) -> None:
    """Each call reads the x that it was given, whatever was given before."""
    weight = normal((100, 128), 1, "cuda")
    rows = normal((9 * 200, 128), 2, "cuda")
    want = op(rows[:9], weight, config=COPIED)
    for turn in range(2):
        for i in range(200):
            x = rows[9 * i : 9 * i + 9]
            got = op(x, weight, config=MAPPED)
            if i == 0:
                same_bits(got, want, f"turn {turn}")
            elif i % 40 == 0:
                same_bits(got, op(x, weight, config=COPIED), f"turn {turn}, {i}")


@pytest.mark.gpu
def test_what_is_poisoned_stays_alone(has_maps: None) -> None:
    x, weight = inputs(9, 200, 1552, "cuda")
    residual = residual_of(9, 200, "cuda")
    clean = op(x, weight, residual=residual, config=MAPPED)
    x[5, 1551], weight[77, 0], residual[3, 4] = float("nan"), float("inf"), float("-inf")
    out = op(x, weight, residual=residual, config=MAPPED)
    assert out[5].isnan().all()
    assert not out[:, 77].isfinite().any()
    assert out[3, 4] == float("-inf")
    out[5], out[:, 77], out[3, 4] = clean[5], clean[:, 77], clean[3, 4]
    same_bits(out, clean)


@pytest.mark.gpu
def test_x_that_a_preceding_kernel_writes_late(has_maps: None) -> None:
    first, second = normal((2048, 512), 1, "cuda"), normal((64, 2048), 2, "cuda")
    x = normal((16, 512), 3, "cuda")
    a, b = (torch.empty(16, n, dtype=BF16, device="cuda") for n in (2048, 64))

    def chain(**options: Any) -> None:
        op(x, first, out=a, config=MAPPED, weight_is_static=True, **options)
        op(a, second, out=b, config=replace(MAPPED, split_k=2), weight_is_static=True, **options)

    assert wrong_values_of_a_chain(chain, x, (a, b)) == 0


@pytest.mark.gpu
def test_in_a_graph_with_changed_inputs(has_maps: None) -> None:
    """The map in a graph is that of the capture, whatever calls come between."""
    x, weight = normal((16, 512), 1, "cuda"), normal((100, 512), 2, "cuda")
    op(x, weight, config=MAPPED)
    graph, out = captured(lambda: op(x, weight, config=MAPPED))
    for seed in range(5):
        x.copy_(normal((16, 512), seed, "cuda"))
        op(normal((16, 512), 99, "cuda"), weight, config=MAPPED)
        graph.replay()
        same_bits(out, op(x, weight, config=COPIED), f"{seed}")


@pytest.mark.gpu
def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older = replace(devices.info(0), compute_capability=(8, 9))
    monkeypatch.setattr(devices, "info", lambda _: older)
    x, weight = inputs(9, 56, 272, "cuda")
    refused({"x": x, "weight": weight, "config": MAPPED}, "config", "True", operation=op)
