"""Compiling both GEMMs ahead, from Python, with a fake compiler: the model, and wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
from fake_device import H200
from gemm_helpers import FUSED_A, SKINNY, Gemm
from toolchain_helpers import FakeGpu, fake_h200

import k3cupy
from k3cupy import projections
from k3cupy.ops import fused_a_gemm_choice, skinny_gemm_choice

__all__ = ["fake_h200"]

SHAPE = (2112, 7168)
FUSED_A_CONFIG = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)
SKINNY_CONFIG = k3cupy.SkinnyGemmConfig(3, 64, 2, 2, 8)
WRONG_FOR_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"shapes": []}, "shapes: expected at least one, got none"),
    ({"shapes": [(16,)]}, r"shapes: expected pairs .*, got \(16,\)"),
    ({"shapes": [(16, 16.0)]}, "shapes: expected pairs"),
    ({"shapes": [16]}, "shapes: expected pairs .*, got 16"),
    ({"shapes": [(0, 64)]}, "shapes: expected pairs"),
    ({"tokens": [1, 0]}, "tokens: expected .*, got 0"),
    ({"tokens": []}, "tokens: expected at least one"),
    ({"kv_cache": "fp8"}, "kv_cache: expected nothing with op='{op}'"),
    ({"rope": True}, "rope: expected nothing with op='{op}'"),
    ({"split": 1}, "split: expected nothing with op='{op}'"),
    ({"query_fp8": False}, "query_fp8: expected nothing with op='{op}'"),
    ({"device": 7}, "device: expected .*, got 7"),
]


def kernels_of_the_model(gemm: Gemm, tokens: int) -> set[str]:
    """What calls with the model's weights get."""
    names = set()
    for p in projections.shapes():
        if gemm is SKINNY:
            skinny, _ = skinny_gemm_choice.choose(p.n, p.k, tokens, H200)
            names.add(skinny.name_expression(k3cupy.SkinnyGemmVariant()))
        else:
            fused, _ = fused_a_gemm_choice.choose(p.n, p.k, tokens, H200)
            names.add(fused.name_expression(k3cupy.FusedAGemmVariant()))
    return names


def test_warmup_of_the_model(fake_h200: FakeGpu, gemm: Gemm) -> None:
    """By default every projection; each has what its calls need."""
    options = {"strided": False} if gemm is FUSED_A else {}
    k3cupy.warmup(gemm.name, tokens=[1, gemm.odd_tokens], progress=False, **options)
    wanted = [kernels_of_the_model(gemm, tokens) for tokens in (1, gemm.odd_tokens)]
    assert set(fake_h200.compiled) == set().union(*wanted)


@pytest.mark.parametrize(("options", "text"), WRONG_FOR_BOTH, ids=str)
def test_arguments(fake_h200: FakeGpu, gemm: Gemm, options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{text.format(op=gemm.name)}"):
        k3cupy.warmup(gemm.name, progress=False, **options)
    assert fake_h200.compiled == []


def test_limits(fake_h200: FakeGpu, gemm: Gemm) -> None:
    most = gemm.max_tokens
    text = f"^tokens: expected numbers from 1 to {most}, got {most + 1}"
    with pytest.raises(ValueError, match=text):
        k3cupy.warmup(gemm.name, tokens=most + 1, progress=False)
    text = f"^shapes: expected K a multiple of {gemm.k_multiple}"
    with pytest.raises(ValueError, match=text):
        k3cupy.warmup(gemm.name, shapes=[(16, 100)], progress=False)
    assert fake_h200.compiled == []


def test_other_configurations_belong_to_other_operations(fake_h200: FakeGpu) -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("fused_a_gemm", SKINNY_CONFIG, "FusedAGemmConfig"),
        ("fused_a_gemm", 3, "FusedAGemmConfig, got 3"),
        ("skinny_gemm", FUSED_A_CONFIG, "SkinnyGemmConfig"),
        ("skinny_gemm", 3, "SkinnyGemmConfig, got 3"),
        ("mla_prefill", SKINNY_CONFIG, "MlaPrefillConfig"),
    ]
    for op, config, text in wrong:
        with pytest.raises(TypeError, match=rf"^config: expected None or an? {text}"):
            k3cupy.warmup(op, config=config, progress=False)
    with pytest.raises(ValueError, match=r"^config: expected nothing with op='mla_decode'"):
        k3cupy.warmup(config=SKINNY_CONFIG, progress=False)
    assert fake_h200.compiled == []
