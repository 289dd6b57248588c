"""The skinny GEMM: refusals of types that differ, of too many rows, of configurations."""

from __future__ import annotations

from dataclasses import replace

import torch
from gemm_helpers import assert_product, inputs, normal
from helpers import BF16, FP16, refused
from skinny_helpers import op, run_and_check

import k3cupy

M, N, K = 8, 48, 128
CONFIG = k3cupy.SkinnyGemmConfig(M, 64, 4, 2, 8)


def test_too_many_tokens_says_what_to_do(device: str) -> None:
    x = torch.zeros(17, K, dtype=BF16, device=device)
    weight = normal((N, K), 1).to(device)
    text = refused({"x": x, "weight": weight}, "x", "17", operation=op)
    assert "at most 16 rows" in text
    assert "fused_a_gemm" in text
    assert_product(k3cupy.fused_a_gemm(x, weight), x, weight)


def test_another_type_says_which_it_should_be(device: str) -> None:
    x, weight = inputs(M, N, K, device, dtype=FP16)
    text = refused({"x": x, "weight": weight.to(BF16)}, "weight", "bfloat16", operation=op)
    assert "expected float16, got bfloat16" in text
    run_and_check(x, weight)


# Configurations


def test_a_configuration_for_other_rows_is_refused(device: str) -> None:
    x, weight = inputs(M, N, K, device)
    for rows in (1, 7):
        arguments = {"x": x[:rows], "weight": weight, "config": CONFIG}
        text = refused(arguments, "config", "8", operation=op)
        assert f"exactly the {rows} rows of x" in text
        assert "dataclasses.replace" in text
        fitting = replace(CONFIG, num_rows=rows)
        assert_product(op(x[:rows], weight, config=fitting), x[:rows], weight)
    assert op(x[:0], weight, config=CONFIG).shape == (0, N), "no rows suit every configuration"
    assert_product(op(x, weight, config=CONFIG), x, weight)
