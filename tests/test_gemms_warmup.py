"""Compiling both GEMMs ahead, from Python, with a fake compiler: the model, and wrong arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from fake_device import H200
from gemm_helpers import FUSED_A, Gemm, fresh_plans, taken_for, unread
from helpers import refused
from toolchain_helpers import FakeGpu, fake_h200

import k3cupy
from k3cupy import projections
from k3cupy.ops.warmup import wanted_of

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
    ("residual", 1, "1"),
    ("vector", "yes", "'yes'"),
    ("weight_is_static", None, "None"),
    ("residual", [True, 0], r"\[True, 0\]"),
    ("residual", [], "none"),
    ("shapes", 5, "5"),
    ("shapes", "kimi", "'kimi'"),
    ("tokens", 1.5, r"1\.5"),
    ("progress", "no", "'no'"),
]
NOT_THEIRS = {"kv_cache", "rope", "split", "query_fp8"}


def kernels_of_the_model(gemm: Gemm, tokens: int) -> set[str]:
    """What calls with the model's weights get."""
    return {gemm.chosen((p.n, p.k), tokens).name_expression for p in projections.shapes()}


def test_warmup_of_the_model(fake_h200: FakeGpu, gemm: Gemm) -> None:
    """By default every projection; each has what its calls need."""
    options = {"strided": False} if gemm is FUSED_A else {}
    k3cupy.warmup(gemm.name, tokens=[1, gemm.odd_tokens], progress=False, **options)
    wanted = [kernels_of_the_model(gemm, tokens) for tokens in (1, gemm.odd_tokens)]
    assert set(fake_h200.compiled) == set().union(*wanted)


def test_what_is_explained_runs_and_was_compiled_ahead(
    fake_h200: FakeGpu, gemm: Gemm, tmp_path: Path
) -> None:
    """For every layout of x, with a residual and without."""
    (n, k), tokens = SHAPE, gemm.odd_tokens
    both = {"residual": [False, True], "vector": [False, True]}
    k3cupy.warmup(gemm.name, shapes=[SHAPE], tokens=[tokens], progress=False, **both)
    wide, odd, weight = unread(tokens, k + 8), unread(tokens, k + 9), unread(n, k)
    layouts = {
        "packed": unread(tokens, k),
        "rows apart": wide[:, :k],
        "rows that overlap": wide.as_strided((tokens, k), (8, 1)),
        "rows that are not aligned": odd[:, :k],
        "a slice that is not aligned": wide[:, 1 : k + 1],
    }
    with fresh_plans(tmp_path):
        for layout, x in layouts.items():
            for residual in (None, unread(tokens, n)):
                explained = gemm.explain_on_a_gpu(x, weight, residual=residual).name_expression
                assert explained in fake_h200.compiled, layout
                with taken_for(H200) as device:
                    gemm(x, weight, residual=residual)
                assert device.loaded == [explained], layout


def test_arguments(fake_h200: FakeGpu, gemm: Gemm) -> None:
    most = gemm.max_tokens
    for name, value, found in (*WRONG_FOR_BOTH, ("tokens", most + 1, str(most + 1))):
        arguments = {"op": gemm.name, "progress": False, name: value}
        text = refused(arguments, name, f"^{found}$", operation=k3cupy.warmup)
        assert (f"config with op='{gemm.name}'" in text) == (name in NOT_THEIRS)
    assert fake_h200.compiled == []


def test_case42_shapes_and_tokens_as_integers_of_numpy(gemm: Gemm) -> None:
    n, k, most = np.array([*SHAPE, 4])
    for tokens in (most, [most], np.arange(1, 5)):
        of_numpy = wanted_of(gemm.name, {"shapes": [(n, k)], "tokens": tokens})
        plain = np.atleast_1d(tokens).tolist()
        want = wanted_of(gemm.name, {"shapes": [SHAPE], "tokens": plain})
        assert list(of_numpy(H200)) == list(want(H200)) != []


def test_other_configurations_belong_to_other_operations(fake_h200: FakeGpu) -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("fused_a_gemm", SKINNY_CONFIG, "FusedAGemmConfig"),
        ("fused_a_gemm", 3, "FusedAGemmConfig"),
        ("skinny_gemm", FUSED_A_CONFIG, "SkinnyGemmConfig"),
        ("skinny_gemm", 3, "SkinnyGemmConfig"),
        ("mla_prefill", SKINNY_CONFIG, "MlaPrefillConfig"),
        ("mla_decode", SKINNY_CONFIG, "MlaDecodeConfig"),
    ]
    for op, config, expected in wrong:
        arguments = {"op": op, "config": config, "progress": False}
        found = f"^{re.escape(repr(config))}$"
        text = refused(arguments, "config", found, operation=k3cupy.warmup)
        assert expected in text.partition(", got ")[0]
    assert fake_h200.compiled == []
