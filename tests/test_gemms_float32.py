"""Outputs in float32: the sums as they are, of both GEMMs, of low-latency linear and everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import jax_of, numpy_of
from dispatch_helpers import DispatchDevice
from fake_device import A100, H200
from gemm_helpers import (
    FLOAT32,
    FUSED_A,
    GEMMS_AND_DTYPES,
    SKINNY,
    Gemm,
    assert_product,
    devices_and_tokens,
    inputs,
    normal,
    product,
    residual_of,
    same_bits,
    taken_for,
    unread,
)
from helpers import BF16, FP16, refused

import k3cupy
from k3cupy.ops.warmup import wanted_of

N, K = 1536, 128
TYPES = (torch.float32, "float32", np.float32, np.dtype("float32"), "<f4")
NO_TYPES = (torch.bfloat16, torch.float64, "float64", np.float16, float, 32, "?!", [1], {}, True)

each_linear = pytest.mark.parametrize(
    "run", [k3cupy.low_latency_linear, k3cupy.fused_a_gemm, k3cupy.skinny_gemm]
)


@pytest.mark.parametrize(
    ("device", "gemm", "tokens"), devices_and_tokens((1, 16, 33, 64), (1, 4, 8, 16))
)
def test_the_sums_without_a_rounding(device: str, gemm: Gemm, tokens: int) -> None:
    """Rounded afterwards they are the bits of the other output: the same sums in the same order."""
    for dtype in gemm.dtypes:
        for n, k in ((48, 128), (528, 1536)):
            x, weight = inputs(tokens, n, k, device, dtype=dtype, strides=(k + 8, 1))
            residual = residual_of(tokens, n, device, dtype=dtype, strides=(n + 3, 1), shift=2)
            for added in (None, residual):
                options = {"residual": added, "out_dtype": FLOAT32}
                wide = gemm.run_and_check(x, weight, out_strides=(n + 5, 1), shift=4, **options)
                same_bits(wide.to(dtype), gemm(x, weight, residual=added))


@pytest.mark.gpu
@pytest.mark.parametrize("product_of", ["warp", "warpgroup", "warpgroup_tokens"])
def test_every_kind_of_product(product_of: str) -> None:
    warps = (4, 1) if product_of == "warp" else (1, 4)
    for split, mapped in ((1, False), (2, True)):
        config = k3cupy.FusedAGemmConfig(
            64, 64, 128, 3, 3, *warps, split, 2, product_of, mapped_x=mapped
        )
        x, weight = inputs(50, 200, 1024, "cuda")
        residual = residual_of(50, 200, "cuda")
        for added in (None, residual):
            wide = k3cupy.fused_a_gemm(x, weight, added, config=config, out_dtype=FLOAT32)
            assert_product(wide, x, weight, added, FLOAT32)
            same_bits(wide.to(BF16), k3cupy.fused_a_gemm(x, weight, added, config=config))


@pytest.mark.gpu
def test_the_linear_in_float32_on_a_gpu() -> None:
    """From a kernel of ours, in slices, and by the framework's own, with PyTorch's TF32 on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        for tokens, invariant in ((1, False), (4, False), (64, False), (70, False), (130, True)):
            x, weight = inputs(tokens, 528, 1536, "cuda")
            residual = residual_of(tokens, 528, "cuda", strides=(531, 1), shift=2)
            for added in (None, residual):
                out = k3cupy.low_latency_linear(
                    x, weight, added, batch_invariant=invariant, out_dtype=FLOAT32
                )
                assert_product(out, x, weight, added, FLOAT32)
        x = x.float().requires_grad_()
        assert k3cupy.low_latency_linear(x, weight.float(), out_dtype=FLOAT32).requires_grad
        half = x.detach().half().requires_grad_()
        assert k3cupy.low_latency_linear(half, weight.half(), out_dtype=FLOAT32).requires_grad


@pytest.mark.parametrize(("gemm", "dtype"), GEMMS_AND_DTYPES)
def test_small_parts_of_a_sum_stay(device: str, gemm: Gemm, dtype: torch.dtype) -> None:
    """What a rounding to 16 bits would lose is there, with a residual too."""
    x = torch.zeros(2, 128, dtype=dtype, device=device)
    weight = torch.zeros(16, 128, dtype=dtype, device=device)
    x[:, :2], weight[:, 0], weight[:, 1] = 1, 1024, 2.0**-10
    residual = torch.full((2, 16), 2.0**-8, dtype=dtype, device=device)
    out = gemm(x, weight, out_dtype=FLOAT32)
    assert (out == 1024 + 2.0**-10).all()
    assert (gemm(x, weight, residual=residual, out_dtype=FLOAT32) == out + 2.0**-8).all()
    assert (gemm(x, weight) == 1024).all()


@each_linear
def test_the_type_by_any_name(run: Any) -> None:
    x, weight = inputs(2, N, K)
    for name in TYPES:
        assert run(x, weight, out_dtype=name).dtype == FLOAT32
    for junk in NO_TYPES:
        wrong = {"x": x, "weight": weight, "out_dtype": junk}
        text = refused(wrong, "out_dtype", "", operation=run)
        assert "None or float32" in text
    assert run(x, weight, out_dtype=None).dtype == BF16


def test_out_agrees_with_it(device: str, gemm: Gemm) -> None:
    x, weight = inputs(2, 48, K, device)
    narrow, wide = (torch.zeros(2, 48, dtype=d, device=device) for d in (BF16, FLOAT32))
    given = {"x": x, "weight": weight}
    for operation in (gemm, gemm.explain):
        wrong = {**given, "out": narrow, "out_dtype": FLOAT32}
        assert "out_dtype" in refused(wrong, "out", "bfloat16", operation=operation)
        refused({**given, "out": wide}, "out", "float32", operation=operation)
        wrong = {**given, "residual": wide, "out_dtype": FLOAT32}
        refused(wrong, "residual", "float32", operation=operation)
    assert gemm(x, weight, out=wide, out_dtype=FLOAT32) is wide
    assert_product(wide, x, weight, out_dtype=FLOAT32)


def test_the_residual_is_no_output_of_another_type(device: str, gemm: Gemm) -> None:
    """At one address they are other elements, though as many and as far apart."""
    x, weight = inputs(2, 48, K, device)
    memory = torch.zeros(2 * 48, dtype=FLOAT32, device=device)
    residual, out = memory.view(BF16)[:96].view(2, 48), memory.view(2, 48)
    given = {"x": x, "weight": weight, "residual": residual, "out": out, "out_dtype": FLOAT32}
    assert "apart from residual" in refused(given, "out", "overlap", operation=gemm)


def test_what_a_gpu_would_run(gemm: Gemm) -> None:
    """The same choice, told to be measured with another output; another instance."""
    tensors = unread(4, 7168), unread(2112, 7168)
    with taken_for(H200):
        plain, wide = (gemm.explain(*tensors, out_dtype=kind) for kind in (None, FLOAT32))
        linear = k3cupy.explain_low_latency_gemm(*tensors, out_dtype=FLOAT32)
    assert wide.config == plain.config
    assert wide.reason == f"{plain.reason}, with a bfloat16 output"
    assert linear.reason.endswith(", with a bfloat16 output")
    assert wide.name_expression == plain.name_expression.replace(">", ", float>")
    with taken_for(A100):  # where nothing was measured, nothing is told of it
        assert "output" not in gemm.explain(*tensors, out_dtype=FLOAT32).reason


@pytest.mark.parametrize("op", ["fused_a_gemm", "skinny_gemm", "low_latency_linear"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_warm_up_compiles_what_calls_load(
    op: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = DispatchDevice(monkeypatch)
    x, weight = inputs(tokens, N, K)
    options = {"shapes": [(N, K)], "tokens": tokens, "out_dtype": "float32"}
    wanted = {instance.name_expression for instance in wanted_of(op, options)(H200)}
    assert getattr(k3cupy, op)(x, weight, out_dtype=FLOAT32).dtype == FLOAT32
    assert gpu.loaded[-1] in wanted
    assert all(name.endswith(", float>") for name in wanted)


def test_a_capture_names_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DispatchDevice(monkeypatch)
    gpu.capturing = True
    with pytest.raises(k3cupy.CaptureError, match=r"weight_is_static=False, out_dtype='float32'\)"):
        k3cupy.low_latency_linear(*inputs(4, N, K), out_dtype=FLOAT32)


# The framework's own


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, K), (K,), (2, 3, K), (0, K), (2, 0, K)])
def test_the_frameworks_linear_in_float32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(shape, 1).to(dtype), normal((48, K), 2).to(dtype)
    residual = normal((*shape[:-1], 48), 3).to(dtype)
    with torch.autocast("cpu", dtype=BF16):  # which would round
        for added in (None, residual):
            out = k3cupy.low_latency_linear(x, weight, added, out_dtype=FLOAT32)
            exact = x.double() @ weight.double().T
            exact = exact if added is None else exact + added.double()
            assert (out.dtype, out.shape) == (FLOAT32, exact.shape)
            torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("wrap", [numpy_of, jax_of], ids=["numpy", "jax"])
def test_arrays_of_other_frameworks_in_float32(wrap: Any) -> None:
    x, weight, residual = normal((4, K), 1), normal((48, K), 2), normal((4, 48), 3)
    given = [wrap(t) for t in (x, weight, residual)]
    want = product(x, weight) + residual
    for run in (k3cupy.low_latency_linear, FUSED_A, SKINNY):
        arguments = dict(zip(("x", "weight", "residual"), given, strict=True))
        out = run(**arguments, out_dtype="float32")
        assert type(out) is type(given[0])
        assert out.dtype == np.float32
        np.testing.assert_allclose(np.asarray(out), want.numpy(), rtol=1e-6, atol=1e-4)


def test_tensors_without_memory_in_float32() -> None:
    x, weight = normal((2, 3, K), 1).to("meta"), normal((48, K), 2).to("meta")
    out = k3cupy.low_latency_linear(x, weight, out_dtype=FLOAT32)
    assert (out.shape, out.dtype) == ((2, 3, 48), FLOAT32)


def test_gradients_of_the_frameworks_linear_in_float32() -> None:
    x, weight = normal((2, 3, K), 1).requires_grad_(), normal((48, K), 2).requires_grad_()
    out = k3cupy.low_latency_linear(x, weight, out_dtype=FLOAT32)
    of_x, of_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert of_x.dtype == of_weight.dtype == BF16
    torch.testing.assert_close(of_x[0, 0].float(), weight.float().sum(0), rtol=2**-7, atol=2**-4)
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        k3cupy.low_latency_linear(x, weight.float(), out_dtype=FLOAT32)
