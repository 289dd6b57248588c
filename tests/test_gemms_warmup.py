"""Compiling both GEMMs ahead, from Python, with a fake compiler: the model, and wrong arguments."""

from __future__ import annotations

import re
from typing import Any

from fake_device import H200
from gemm_helpers import FUSED_A, SKINNY, Gemm
from helpers import refused
from toolchain_helpers import FakeGpu, fake_h200

import k3cupy
from k3cupy import projections
from k3cupy.ops import fused_a_gemm_choice, skinny_gemm_choice

__all__ = ["fake_h200"]

SHAPE = (2112, 7168)
FUSED_A_CONFIG = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)
SKINNY_CONFIG = k3cupy.SkinnyGemmConfig(3, 64, 2, 2, 8)
WRONG_FOR_BOTH: list[tuple[str, Any, str]] = [
    ("shapes", [], "none"),
    ("shapes", [(16,)], r"\(16,\)"),
    ("shapes", [(16, 16.0)], r"\(16, 16\.0\)"),
    ("shapes", [16], "16"),
    ("shapes", [(0, 64)], r"\(0, 64\)"),
    ("shapes", [(16, 100)], r"\(16, 100\)"),
    ("tokens", [1, 0], "0"),
    ("tokens", [], "none"),
    ("kv_cache", "fp8", "'fp8'"),
    ("rope", True, "True"),
    ("split", 1, "1"),
    ("query_fp8", False, "False"),
    ("device", 7, "7"),
]
NOT_THEIRS = {"kv_cache", "rope", "split", "query_fp8"}


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


def test_arguments(fake_h200: FakeGpu, gemm: Gemm) -> None:
    most = gemm.max_tokens
    for name, value, found in (*WRONG_FOR_BOTH, ("tokens", most + 1, str(most + 1))):
        arguments = {"op": gemm.name, name: value, "progress": False}
        text = refused(arguments, name, f"^{found}$", operation=k3cupy.warmup)
        assert (f"nothing with op='{gemm.name}'" in text) == (name in NOT_THEIRS)
    assert fake_h200.compiled == []


def test_other_configurations_belong_to_other_operations(fake_h200: FakeGpu) -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("fused_a_gemm", SKINNY_CONFIG, "FusedAGemmConfig"),
        ("fused_a_gemm", 3, "FusedAGemmConfig"),
        ("skinny_gemm", FUSED_A_CONFIG, "SkinnyGemmConfig"),
        ("skinny_gemm", 3, "SkinnyGemmConfig"),
        ("mla_prefill", SKINNY_CONFIG, "MlaPrefillConfig"),
        ("mla_decode", SKINNY_CONFIG, "nothing with op='mla_decode'"),
    ]
    for op, config, expected in wrong:
        arguments = {"op": op, "config": config, "progress": False}
        found = f"^{re.escape(repr(config))}$"
        text = refused(arguments, "config", found, operation=k3cupy.warmup)
        assert expected in text.partition(", got ")[0]
    assert fake_h200.compiled == []
