"""The fused-A GEMM: every refusal. It names the argument, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import numpy_of
from gemm_helpers import (
    assert_product,
    inputs,
    normal,
    op,
    residual_of,
    run_and_check,
    same_bits,
    transposed_op,
)
from helpers import BF16, E4M3, FP16, Guarded, every_other, moved, padded, refused

import k3cupy
from k3cupy import projections
from k3cupy.ops.fused_a_gemm_choice import choose
from k3cupy.ops.fused_a_gemm_validate import check_config
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo

M, N, K = 8, 48, 128
CONFIG = k3cupy.FusedAGemmConfig(8, 16, 128, 4, 2, 2, 1, 1, 2)
HUGE = replace(CONFIG, stages=60)
H200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
SMALL_GPUS = [101_376, 49_152]

Change = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Refusal:
    """An argument, what takes its place, who is blamed and what the message must mention."""

    name: str
    change: Change
    found: str
    blamed: str


CASES: dict[str, Refusal] = {}


def make(case: str, name: str, change: Change, found: str, blamed: str = "") -> None:
    CASES[case] = Refusal(name, change, found, blamed or name)


def put(case: str, name: str, value: Any, found: str, blamed: str = "") -> None:
    make(case, name, lambda _: value, found, blamed)


# Types
for n in ("x", "weight", "out", "residual"):
    for wrong in (FP16, torch.float32, torch.float64, torch.int16, torch.uint8, E4M3):
        make(f"case23-{n}-{wrong}", n, lambda t, d=wrong: t.to(d), str(wrong)[6:])
    make(f"meta-{n}", n, lambda t: t.to("meta"), "meta", ".*")
    make(f"sparse-{n}", n, lambda t: t.to_sparse(), "sparse|layout|stride")
    put(f"list-{n}", n, [[1.0]], "list")
for n in ("x", "weight"):
    put(f"none-{n}", n, None, "None")
    put(f"number-{n}", n, 1.0, "float")

# Shapes
make("x-1d", "x", lambda t: t[0], r"\[128\]")
make("x-3d", "x", lambda t: t[None], r"\[1, 8, 128\]")
make("weight-1d", "weight", lambda t: t[0], r"\[128\]")
make("weight-3d", "weight", lambda t: t[None], r"\[1, 48, 128\]")
make("weight-narrow", "weight", lambda t: t[:, :-16], "112")
make("weight-wide", "weight", lambda t: padded(t, 16), "144")
make("weight-transposed", "weight", lambda t: t.T.contiguous(), r"\[128, 48\]")
make("x-narrow", "x", lambda t: t[:, :112], "128", "weight")
make("no-columns", "weight", lambda t: t[:0], "N = 0")
put("too-many-rows", "x", torch.zeros(65, K, dtype=BF16), "65")
for shape in ((M, N - 1), (M, N + 1), (M - 1, N), (M + 1, N), (M * N,), (1, M, N), (N, M)):
    for n in ("out", "residual"):
        put(f"{n}-{shape}", n, torch.zeros(shape, dtype=BF16), re.escape(str(list(shape))))

# Strides
make("x-inner-stride", "x", every_other, "inner stride 2")
make("weight-inner-stride", "weight", every_other, "256, 2")
make("weight-row-stride", "weight", lambda t: padded(t, 8)[:, :K], "136, 1")
make("weight-expanded", "weight", lambda t: t[:1].expand(N, K), "0, 1")
for n in ("out", "residual"):
    make(f"{n}-inner-stride", n, every_other, "inner stride 2")
    make(f"{n}-transposed", n, lambda t: t.T.contiguous().T, "inner stride 8")
make("out-expanded", "out", lambda t: t[:1].expand(M, N), "0, 1")
make("out-rows-overlap", "out", lambda t: t.flatten().as_strided((M, N), (N - 1, 1)), "47, 1")

# Settings
for flag in ("pdl", "weight_is_static", "batch_invariant"):
    for junk in ([1], "no", 1, 0):
        put(f"{flag}-{junk!r}", flag, junk, re.escape(repr(junk)))
for flag in ("weight_is_static", "batch_invariant"):
    put(f"{flag}-None", flag, None, "None")
for junk in (1, "fast", (8, 16, 128)):
    put(f"config-{junk!r}", "config", junk, re.escape(repr(junk)))
for wrong_config in (
    replace(CONFIG, tile_m=24),
    replace(CONFIG, tile_m=128),
    replace(CONFIG, tile_n=24),
    replace(CONFIG, tile_k=32),
    replace(CONFIG, stages=1),
    replace(CONFIG, warps_k=0),
    replace(CONFIG, split_k=16),
    replace(CONFIG, copy_warps=40),
    replace(CONFIG, mma_rows=32),
    replace(CONFIG, block_rows=17),
    replace(CONFIG, block_rows=-1),
):
    put(f"config-{wrong_config}", "config", wrong_config, "FusedAGemmConfig")


@pytest.mark.parametrize("name", CASES)
def test_refused(device: str, name: str) -> None:
    case = CASES[name]
    x, weight = inputs(M, N, K, device)
    out = Guarded((M, N), BF16, device)
    arguments = {"x": x, "weight": weight, "out": out.tensor, "residual": residual_of(M, N, device)}
    for operation in (op, k3cupy.explain_fused_a_gemm):
        value = moved(case.change(arguments.get(case.name)), device)
        wrong = {**arguments, case.name: value}
        refused(wrong, case.blamed, case.found, box=out, operation=operation)
    run_and_check(x, weight)


@pytest.mark.parametrize("name", ["case23-x-torch.float16", "x-inner-stride", "pdl-1", "none-x"])
def test_refused_after_a_good_call(device: str, name: str) -> None:
    """A plan kept from an earlier call with the same shapes hides nothing."""
    case = CASES[name]
    x, weight = inputs(M, N, K, device)
    arguments = {"x": x, "weight": weight, "pdl": True, "batch_invariant": True}
    op(**arguments)
    for _ in range(2):
        value = case.change(arguments[case.name])
        refused({**arguments, case.name: value}, case.blamed, case.found, operation=op)


@pytest.mark.parametrize("k", [1, 8, 15, 17, 100, 136])
def test_k_that_is_no_multiple_of_16(device: str, k: int) -> None:
    x = torch.zeros(2, k, dtype=BF16, device=device)
    weight = torch.zeros(16, k, dtype=BF16, device=device)
    text = refused({"x": x, "weight": weight}, "x", f"K = {k}", operation=op)
    assert "multiple of 16" in text


def test_k_of_zero(device: str) -> None:
    x, weight = (torch.zeros(rows, 0, dtype=BF16, device=device) for rows in (2, 16))
    refused({"x": x, "weight": weight}, "x", "K = 0", operation=op)


def test_too_many_tokens_says_what_to_do(device: str) -> None:
    x = torch.zeros(65, K, dtype=BF16, device=device)
    weight = normal((N, K), 1).to(device)
    text = refused({"x": x, "weight": weight}, "x", "65", operation=op)
    assert "at most 64 rows" in text
    assert "linear" in text
    run_and_check(normal((64, K), 2).to(device), weight)


# The public signature: the same checks under its own names

PUBLIC_CASES: dict[str, tuple[str, Change, str]] = {
    "fp16-mat_a": ("mat_a", lambda t: t.to(FP16), "float16"),
    "fp32-mat_b": ("mat_b", lambda t: t.to(torch.float32), "float32"),
    "fp16-output": ("output", lambda t: t.to(FP16), "float16"),
    "none-output": ("output", lambda _: None, "None"),
    "none-mat_a": ("mat_a", lambda _: None, "None"),
    "mat_b-not-transposed": ("mat_b", lambda t: t.T.contiguous(), r"\[48, 128\]"),
    "mat_b-row-major": ("mat_b", lambda t: t.contiguous(), r"strides \(48, 1\)"),
    "mat_b-padded": ("mat_b", lambda t: padded(t.T, 8)[:, :K].T, r"strides \(1, 136\)"),
    "output-narrow": ("output", lambda t: t[:, :-1], r"\[8, 47\]"),
    "mat_a-65": ("mat_a", lambda t: t[:1].repeat(65, 1), "65"),
    "enable_pdl-1": ("enable_pdl", lambda _: 1, "1"),
    "enable_pdl-None": ("enable_pdl", lambda _: None, "None"),
}


@pytest.mark.parametrize("name", PUBLIC_CASES)
def test_the_public_signature_refuses_by_its_own_names(device: str, name: str) -> None:
    blamed, change, found = PUBLIC_CASES[name]
    x, weight = inputs(M, N, K, device)
    box = Guarded((M, N), BF16, device)
    arguments: dict[str, Any] = {"mat_a": x, "mat_b": weight.T, "output": box.tensor}
    wrong = {**arguments, blamed: change(arguments.get(blamed))}
    refused(wrong, blamed, found, box=box, operation=transposed_op)
    transposed_op(**arguments)
    assert_product(box.tensor, x, weight)


# Overlap


@pytest.mark.parametrize("name", ["x", "weight"])
def test_out_that_overlaps_an_input(device: str, name: str) -> None:
    """Refused, also when a call of the same shapes and alignment was fine before."""
    x, weight = inputs(M, N, K, device)
    size = M * N
    other = {"x": x, "weight": weight}[name]
    buffer = torch.zeros(size + other.numel(), dtype=BF16, device=device)
    out, part = buffer[:size].view(M, N), buffer[size - 8 : size - 8 + other.numel()]
    part.copy_(other.flatten())
    arguments = {"x": x, "weight": weight, name: part.view(other.shape)}
    op(**arguments, out=out.clone())
    text = refused({**arguments, "out": out}, "out", "overlap", operation=op)
    assert name in text
    assert not out.flatten()[:-8].any()
    public = {"x": "mat_a", "weight": "mat_b"}
    text = refused(
        {"mat_a": arguments["x"], "mat_b": arguments["weight"].T, "output": out},
        "output",
        "overlap",
        operation=transposed_op,
    )
    assert public[name] in text


def test_neighbours_in_one_buffer_do_not_overlap(device: str) -> None:
    x, weight = inputs(M, N, K, device)
    buffer = torch.zeros(M * K + M * N + N * K, dtype=BF16, device=device)
    before, out, after = buffer.split((M * K, M * N, N * K))
    before.copy_(x.flatten())
    after.copy_(weight.flatten())
    x_there, weight_there = before.view(M, K), after.view(N, K)
    assert_product(op(x_there, weight_there, out.view(M, N)), x, weight)


def test_read_only_out() -> None:
    x, weight = (numpy_of(t) for t in inputs(M, N, K))
    out = np.zeros((M, N), x.dtype)
    out.flags.writeable = False
    refused({"x": x, "weight": weight, "out": out}, "out", "read-only", operation=op)
    assert not out.any()


# Gradients


@pytest.mark.parametrize("name", ["x", "weight", "out", "residual"])
def test_case25_tensors_that_require_grad(device: str, name: str) -> None:
    x, weight = inputs(M, N, K, device)
    out, residual = torch.zeros(M, N, dtype=BF16, device=device), residual_of(M, N, device)
    arguments = {"x": x, "weight": weight, "out": out, "residual": residual}
    arguments[name] = arguments[name].clone().requires_grad_()
    for _ in range(2):
        text = refused(arguments, name, "grad", operation=op)
        assert "no_grad" in text
        assert not out.any()
        with torch.no_grad():
            op(**arguments)
        assert_product(arguments["out"].detach(), x, weight, residual)
        out.detach().zero_()
    with torch.inference_mode():
        op(**arguments)


def test_case25_a_parameter_as_the_weight(device: str) -> None:
    x, weight = inputs(M, N, K, device)
    parameter = torch.nn.Parameter(weight.clone())
    refused({"x": x, "weight": parameter}, "weight", "grad", operation=op)
    out = torch.zeros(M, N, dtype=BF16, device=device)
    arguments = {"mat_a": x, "mat_b": parameter.T, "output": out}
    refused(arguments, "mat_b", "grad", operation=transposed_op)
    with torch.no_grad():
        got = op(x, parameter)
        transposed_op(x, parameter.T, out)
    assert not got.requires_grad
    assert_product(got, x, weight)
    same_bits(out, got)
    frozen = torch.nn.Parameter(weight.clone(), requires_grad=False)
    same_bits(op(x, frozen), got)


# Devices


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", ["x", "weight", "out", "residual"])
def test_case20_one_argument_on_the_cpu(name: str, pinned: bool) -> None:
    x, weight = inputs(M, N, K, "cuda")
    box = Guarded((M, N), BF16, "cuda")
    residual = residual_of(M, N, "cuda")
    arguments = {"x": x, "weight": weight, "out": box.tensor, "residual": residual}
    there = arguments[name].cpu()
    wrong = {**arguments, name: there.pin_memory() if pinned else there}
    blamed = ".*" if name == "x" else name
    refused(wrong, blamed, "(?i)cpu|cuda", box=box, operation=op)
    run_and_check(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", "out", "residual"])
def test_case20_one_argument_on_the_gpu(name: str) -> None:
    x, weight = inputs(M, N, K)
    out, residual = torch.zeros(M, N, dtype=BF16), residual_of(M, N)
    arguments = {"x": x, "weight": weight, "out": out, "residual": residual}
    refused({**arguments, name: arguments[name].cuda()}, name, "(?i)cuda|cpu", operation=op)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["weight", "out", "residual"])
def test_case19_mixed_devices_are_refused(name: str) -> None:
    x, weight = inputs(M, N, K, "cuda:0")
    out, residual = torch.zeros(M, N, dtype=BF16, device="cuda:0"), residual_of(M, N, "cuda:0")
    arguments = {"x": x, "weight": weight, "out": out, "residual": residual}
    refused({**arguments, name: arguments[name].to("cuda:1")}, name, "cuda:1", operation=op)


# Shared memory and clusters

EDGES = (1, 8, 9, 16, 17, 32, 33, 64)
"""The ends of what one tile of tokens serves; between them nothing changes."""


@pytest.mark.parametrize("limit", [232_448, 166_912, *SMALL_GPUS])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=str)
def test_case04_every_choice_fits_the_gpu(capability: tuple[int, int], limit: int) -> None:
    gpu = DeviceInfo(0, "a GPU", capability, 100, limit)
    pairs = [(p.n, p.k) for p in projections.shapes()] + [(1, 16), (7, 80), (16, 64), (100, 20000)]
    for n, k in pairs:
        for tokens in EDGES:
            for invariant in (False, True):
                config, reason = choose(n, k, tokens, gpu, batch_invariant=invariant)
                assert config.is_valid(gpu), f"{config} for {n} x {k}, M = {tokens}"
                assert config.tile_m >= tokens
                assert reason


@pytest.mark.parametrize("limit", [232_448, *SMALL_GPUS])
def test_batch_invariant_choices_sum_in_one_order(limit: int) -> None:
    gpu = replace(H200, shared_memory_optin=limit)
    for p in projections.shapes():
        orders = {choose(p.n, p.k, tokens, gpu, batch_invariant=True)[0].order for tokens in EDGES}
        assert len(orders) == 1, f"{p}: {orders}"


def test_case04_a_configuration_that_does_not_fit_names_both_numbers() -> None:
    for limit in SMALL_GPUS:
        gpu = replace(H200, shared_memory_optin=limit)
        with pytest.raises(ValueError, match=r"^config: expected at most") as caught:
            check_config(HUGE, 4, gpu)
        assert str(limit) in str(caught.value)
        assert f"{HUGE.shared_bytes} bytes" in str(caught.value)
        assert "fewer stages" in str(caught.value)
    assert check_config(CONFIG, 8, gpu) is CONFIG


def test_a_configuration_for_fewer_tokens_is_refused(device: str) -> None:
    x, weight = inputs(9, N, K, device)
    arguments = {"x": x, "weight": weight, "config": CONFIG}
    text = refused(arguments, "config", "8", operation=op)
    assert "9 rows" in text
    assert_product(op(x[:8], weight, config=CONFIG), x[:8], weight)


def test_clusters_need_sm_90() -> None:
    split = replace(CONFIG, split_k=2)
    assert check_config(split, 8, H200) is split
    with pytest.raises(ValueError, match=r"^config: expected split_k of 1 on sm_86.*got 2"):
        check_config(split, 8, replace(H200, compute_capability=(8, 6)))


@pytest.mark.gpu
@pytest.mark.parametrize("limit", SMALL_GPUS)
def test_case04_on_a_gpu_that_says_it_is_small(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K sets this call's plan apart from those of other tests."""
    small = replace(devices.info(0), shared_memory_optin=limit)
    monkeypatch.setattr(devices, "info", lambda _: small)
    x, weight = inputs(5, N, 16 * limit // 1024, "cuda")
    config = k3cupy.explain_fused_a_gemm(x, weight).config
    assert config.shared_bytes <= limit
    run_and_check(x, weight)
    box = Guarded((5, N), BF16, "cuda")
    arguments = {"x": x, "weight": weight, "out": box.tensor, "config": HUGE}
    refused(arguments, "config", str(limit), box=box, operation=op)


@pytest.mark.gpu
def test_a_stream_that_is_none_is_named() -> None:
    x, weight = inputs(M, N, K, "cuda")
    for junk in ("side", 1.5, object()):
        arguments = {"x": x, "weight": weight, "stream": junk}
        refused(arguments, "stream", type(junk).__name__, operation=op)
    run_and_check(x, weight)
