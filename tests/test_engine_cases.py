"""Cases of the engines' own kernel tests: what is launched, for whom and where, and what comes out.

What comes out of two streams and of one buffer for x and residual is looked at in
``test_gemms_gpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatch_helpers import planned
from fake_device import A100, B200, GB300, GPUS, H200, FakeDevice
from gemm_helpers import assert_product, normal, unread
from helpers import BF16
from stream_helpers import captured

import k3cupy
from k3cupy.runtime import streams
from k3cupy.runtime.devices import DeviceInfo

MAIN, SIDE = 5, 6
LINEARS: tuple[Callable[..., Any], ...] = (k3cupy.low_latency_linear, k3cupy.fused_a_gemm)
both_linears = pytest.mark.parametrize("linear", LINEARS, ids=lambda linear: linear.__name__)


class Streams:
    """Which stream is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = MAIN
        monkeypatch.setattr(streams, "current_of", lambda *_: lambda: self.current)

    def on(self, stream: int, run: Callable[[], Any]) -> Any:
        self.current = stream
        try:
            return run()
        finally:
            self.current = MAIN


@both_linears
def test_case44_each_product_goes_to_the_stream_of_its_call(
    linear: Callable[..., Any], fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QKVG beside F_AB, and F_B on the first columns of F_AB: once, then inside a capture.

    The first two weights are rows of one.
    """
    side = Streams(monkeypatch)
    packed, f_b = unread(6288, 7168), unread(1536, 128)
    qkvg, f_ab = packed[:6144], packed[6144:]

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = linear(x, qkvg, weight_is_static=True)
        narrow = side.on(SIDE, lambda: linear(x, f_ab, weight_is_static=True))
        first = narrow[:, :128]
        gate = side.on(SIDE, lambda: linear(first, f_b, weight_is_static=True))
        return x, wide, narrow, gate

    with torch.no_grad():
        for tokens in (1, 2, 8, 14):
            layer(unread(tokens, 7168))
            loaded, fake_device.capturing = list(fake_device.loads), True
            fake_device.records.clear()
            x, wide, narrow, gate = layer(unread(tokens, 7168))
            fake_device.capturing = False
            assert fake_device.loads == loaded, "nothing is loaded in a capture"
            expected = [(MAIN, x, qkvg, wide), (SIDE, x, f_ab, narrow), (SIDE, narrow, f_b, gate)]
            expected = [row for row in expected if runs_ours(linear, row[2], tokens)]
            launches = fake_device.launches
            assert expected
            for (stream, *tensors), (where, arguments) in zip(expected, launches, strict=True):
                assert where == stream
                for tensor in tensors:
                    assert tensor.data_ptr() in arguments
            if tokens > 1 and launches[-1][0] == SIDE and runs_ours(linear, f_b, tokens):
                assert 144 in launches[-1][1], "the row stride of F_B's x"


def runs_ours(linear: Callable[..., Any], weight: torch.Tensor, tokens: int) -> bool:
    """Whether a call launches a kernel of ours: the linear asks its tables."""
    if linear is k3cupy.fused_a_gemm:
        return True
    return k3cupy.select_backend(tokens, *weight.shape, device=H200) is not None


@both_linears
def test_case46_rows_of_one_weight_are_weights_of_their_own(
    linear: Callable[..., Any], fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its address, on its stream, by the kernel that a packed copy gets."""
    side = Streams(monkeypatch)
    weight = unread(3648, 7168)
    parts = {MAIN: weight[:2112], SIDE: weight[2112:]}
    with torch.no_grad():
        for tokens in (1, 4, 16):
            x = unread(tokens, 7168)
            for _ in range(3):  # the later ones are found to come again
                fake_device.records.clear()
                for stream, part in parts.items():
                    side.on(stream, lambda: linear(x, part))  # noqa: B023
                ours = [s for s in parts if runs_ours(linear, parts[s], tokens)]
                assert [where for where, _ in fake_device.launches] == ours
                for stream, (_, arguments) in zip(ours, fake_device.launches, strict=True):
                    assert parts[stream].data_ptr() in arguments
            for part in parts.values():
                copy = unread(*part.shape)
                want = k3cupy.explain_low_latency_gemm(x, copy)
                assert k3cupy.explain_low_latency_gemm(x, part) == want


SHAPES = ((1536, 128), (2112, 7168), (2304, 1536), (3584, 7168), (7168, 3584), (6288, 7168))
PUBLIC: dict[DeviceInfo, dict[tuple[int, int], tuple[set[int], set[int]]]] = {
    B200: {
        (1536, 128): (set(), {1, 16}),
        (2112, 7168): ({1, 2}, {4, 16}),
        (2304, 1536): (set(), set(range(1, 17))),
        (3584, 7168): ({1, 2, 3}, set()),
        (7168, 3584): ({1, 2}, set()),
        (6288, 7168): ({1}, set()),
    },
    GB300: {
        (1536, 128): (set(), set(range(1, 17))),
        (2112, 7168): (set(), set(range(1, 17))),
        (2304, 1536): (set(), set(range(1, 17))),
        (3584, 7168): ({1}, set(range(2, 9))),
        (7168, 3584): ({1, 2}, set()),
        (6288, 7168): ({1, 2, 3, 4}, set()),
    },
}
"""vLLM's selection: numbers of tokens of the skinny GEMM, and of the fused-A GEMM."""


@pytest.mark.parametrize("gpu", PUBLIC, ids=lambda gpu: gpu.arch)
def test_the_selector_of_a_gpu_with_public_figures(gpu: DeviceInfo) -> None:
    for (n, k), (skinny, fused_a) in PUBLIC[gpu].items():
        for tokens in range(1, 17):
            want = "skinny" if tokens in skinny else "fused_a" if tokens in fused_a else None
            assert k3cupy.select_backend(tokens, n, k, device=gpu) == want, (n, k, tokens)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("has_residual", [False, True])
def test_the_selector_names_what_a_call_runs(gpu: DeviceInfo, has_residual: bool) -> None:
    for n, k in SHAPES:
        for tokens in (1, 9, 64):
            named = k3cupy.select_backend(tokens, n, k, device=gpu, has_residual=has_residual)
            choice = planned(n, k, tokens, gpu, has_residual=has_residual)
            assert (named or "linear") == choice.kernel, (n, k, tokens)


def test_the_selector_knows_where_its_answer_is_from() -> None:
    origins = {gpu.arch: planned(2112, 7168, 4, gpu).origin for gpu in (A100, H200, B200, GB300)}
    assert origins == {"sm_80": "rule", "sm_90": "shipped", "sm_100": "public", "sm_103": "public"}
    assert planned(1234, 5680, 1, GB300).origin == "rule"


# --- On a GPU ------------------------------------------------------------------------------------

TINY = ((256, 7168), (384, 7168), (256, 4096), (896, 7168), (144, 7168), (1536, 128))
"""The weights of SGLang's tiny GEMM: routers, and the gate projections of Kimi-K3."""

FUSED_A = ((2112, 7168), (2624, 6144), (4096, 2048))
"""Those of its fused-A GEMM: q_a and kv_a of DeepSeek-V3 and GLM-5.2, and one of the widest."""


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), TINY)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_weights_of_the_tiny_gemm(n: int, k: int, out_dtype: Any) -> None:
    """By the fused-A GEMM, and by the linear, where that is a kernel of ours."""
    weight = normal((n, k), 1, "cuda")
    modes = {"weight_is_static": True, "out_dtype": out_dtype}
    for tokens in (1, 2, 4, 7, 8, 16):
        x = normal((tokens, k), tokens, "cuda")
        outs = [k3cupy.fused_a_gemm(x, weight, **modes)]
        outs.append(k3cupy.try_low_latency_gemm(x, weight, **modes))
        for out in outs:
            assert out is None or out.dtype == (out_dtype or BF16)
            if out is not None:
                assert_product(out, x, weight, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), FUSED_A)
def test_the_fused_a_gemm_in_sglangs_order_and_in_a_graph(n: int, k: int) -> None:
    """On both sides of 8 tokens, where its kernel changes its tile."""
    weight = normal((n, k), 1, "cuda")
    for tokens in (1, 8, 9, 16):
        x = normal((tokens, k), tokens, "cuda")
        assert_product(k3cupy.dsv3_fused_a_gemm(x, weight.T), x, weight)
        graph, out = captured(lambda: k3cupy.dsv3_fused_a_gemm(x, weight.T))  # noqa: B023
        x.copy_(normal(x.shape, 100 + tokens, "cuda"))
        out.fill_(float("nan"))
        graph.replay()
        assert_product(out, x, weight)
