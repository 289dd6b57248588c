"""The fused-A GEMM: refusals of its public signature, and of what does not fit a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_device import H200
from gemm_helpers import (
    FUSED_A,
    assert_product,
    inputs,
    normal,
    op,
    run_and_check,
    same_bits,
    transposed_op,
)
from helpers import BF16, FP16, Guarded, padded, refused
from hypothesis import given, settings
from hypothesis import strategies as st

import k3cupy
from k3cupy import projections
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo

M, N, K = 8, 48, 128
CONFIG = k3cupy.FusedAGemmConfig(8, 16, 128, 4, 2, 2, 1, 1, 2)
HUGE = replace(CONFIG, stages=60)
SMALL_GPUS = [101_376, 49_152]

Change = Callable[[torch.Tensor], Any]


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


@pytest.mark.parametrize("name", ["mat_a", "mat_b", "output", "enable_pdl"])
def test_the_public_signature_refuses_by_its_own_names(device: str, name: str) -> None:
    x, weight = inputs(M, N, K, device)
    box = Guarded((M, N), BF16, device)
    arguments: dict[str, Any] = {"mat_a": x, "mat_b": weight.T, "output": box.tensor}
    for blamed, change, found in PUBLIC_CASES.values():
        if blamed == name:
            wrong = {**arguments, name: change(arguments.get(name))}
            refused(wrong, name, found, box=box, operation=transposed_op)
    transposed_op(**arguments)
    assert_product(box.tensor, x, weight)


@pytest.mark.parametrize("name", ["mat_a", "mat_b"])
def test_the_public_signature_names_what_overlaps_the_output(device: str, name: str) -> None:
    x, weight = inputs(M, N, K, device)
    size = M * N
    other = {"mat_a": x, "mat_b": weight}[name]
    buffer = torch.zeros(size + other.numel(), dtype=BF16, device=device)
    out, part = buffer[:size].view(M, N), buffer[size - 8 : size - 8 + other.numel()]
    part.copy_(other.flatten())
    there = part.view(other.shape)
    arguments = {"mat_a": x, "mat_b": weight.T, name: there if name == "mat_a" else there.T}
    transposed_op(**arguments, output=out.clone())
    wrong = {**arguments, "output": out}
    text = refused(wrong, "output", "overlap", operation=transposed_op)
    assert name in text
    assert not out.flatten()[:-8].any()


def test_case25_a_parameter_in_the_public_signature(device: str) -> None:
    x, weight = inputs(M, N, K, device)
    parameter = torch.nn.Parameter(weight.clone())
    out = torch.zeros(M, N, dtype=BF16, device=device)
    arguments = {"mat_a": x, "mat_b": parameter.T, "output": out}
    refused(arguments, "mat_b", "grad", operation=transposed_op)
    with torch.no_grad():
        transposed_op(x, parameter.T, out)
        same_bits(out, op(x, parameter))
    assert not out.requires_grad


# Shared memory and clusters

EDGES = (1, 8, 9, 16, 17, 32, 33, 64)
"""The ends of what one tile of tokens serves; between them nothing changes."""


SHAPES = [(p.n, p.k) for p in projections.shapes()]
ODD = [(1, 16), (7, 80), (16, 64), (100, 20000)]


@given(
    st.sampled_from(SHAPES + ODD),
    st.sampled_from(EDGES),
    st.sampled_from([(8, 0), (9, 0), (12, 0)]),
    st.sampled_from([232_448, 166_912, *SMALL_GPUS]),
    st.booleans(),
)
@settings(max_examples=150)
def test_case04_every_choice_fits_the_gpu(
    shape: tuple[int, int],
    tokens: int,
    capability: tuple[int, int],
    limit: int,
    batch_invariant: bool,
) -> None:
    gpu = DeviceInfo(0, "a GPU", capability, 100, limit)
    found = FUSED_A.chosen(shape, tokens, gpu, batch_invariant=batch_invariant)
    assert found.config.is_valid(gpu)
    assert found.config.tile_m >= tokens
    assert found.reason


@pytest.mark.parametrize("limit", [232_448, *SMALL_GPUS])
def test_batch_invariant_choices_sum_in_one_order(limit: int) -> None:
    gpu = replace(H200, shared_memory_optin=limit)
    for shape in SHAPES[::3]:
        found = [FUSED_A.chosen(shape, tokens, gpu, batch_invariant=True) for tokens in EDGES]
        assert len({choice.config.order for choice in found}) == 1, shape


def explained_on(gpu: DeviceInfo, config: k3cupy.FusedAGemmConfig) -> Any:
    """What a call with a configuration does on a GPU that is none."""
    return FUSED_A.chosen((N, K), M, gpu, config=config)


def test_case04_a_configuration_that_does_not_fit_names_both_numbers() -> None:
    for limit in SMALL_GPUS:
        gpu = replace(H200, shared_memory_optin=limit)
        text = f"^config: expected at most {limit} .*, got {HUGE.shared_bytes} bytes.*fewer stages"
        with pytest.raises(ValueError, match=text):
            explained_on(gpu, HUGE)
        assert explained_on(gpu, CONFIG).config == CONFIG


def test_a_configuration_for_fewer_tokens_is_refused(device: str) -> None:
    x, weight = inputs(9, N, K, device)
    arguments = {"x": x, "weight": weight, "config": CONFIG}
    text = refused(arguments, "config", "8", operation=op)
    assert "9 rows" in text
    assert_product(op(x[:8], weight, config=CONFIG), x[:8], weight)


def test_clusters_need_sm_90() -> None:
    split = replace(CONFIG, split_k=2)
    assert explained_on(H200, split).config == split
    with pytest.raises(ValueError, match=r"^config: expected split_k of 1 on sm_86.*, got 2$"):
        explained_on(replace(H200, compute_capability=(8, 6)), split)


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
    refused(arguments, "config", f"^{HUGE.shared_bytes} bytes", box=box, operation=op)
