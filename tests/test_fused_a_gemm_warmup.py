"""Compiling the fused-A GEMM ahead, from Python and from the shell, with a fake compiler."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from gemm_helpers import FUSED_A, unread
from helpers import refused
from toolchain_helpers import FakeGpu, fake_h200

import k3cupy
from k3cupy.cli import main
from k3cupy.kernels import fused_a_gemm

__all__ = ["fake_h200"]

CONFIG = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)
SHAPE = (2112, 7168)


def warmup(**options: Any) -> int:
    return k3cupy.warmup("fused_a_gemm", progress=False, **options)


def names_of(
    tokens: range | list[int], *variants: fused_a_gemm.Variant, invariant: bool = False
) -> set[str]:
    def config(count: int, residual: bool) -> Any:
        added = unread(count, SHAPE[0]) if residual else None
        return FUSED_A.chosen(SHAPE, count, residual=added, batch_invariant=invariant).config

    return {config(t, v.has_residual).name_expression(v) for t in tokens for v in variants}


def test_warmup_compiles_what_calls_of_a_shape_will_get(fake_h200: FakeGpu) -> None:
    count = warmup(shapes=[SHAPE], tokens=[1, 16])
    assert set(fake_h200.compiled) == names_of([1, 16], fused_a_gemm.Variant())
    assert count == len(fake_h200.compiled)


def test_warmup_of_every_number_of_tokens(fake_h200: FakeGpu) -> None:
    warmup(shapes=[SHAPE], strided=False)
    assert set(fake_h200.compiled) == names_of(range(1, 65), fused_a_gemm.Variant())


def test_warmup_of_promises_and_layouts(fake_h200: FakeGpu) -> None:
    variant = fused_a_gemm.Variant
    warmup(shapes=[SHAPE], tokens=5, strided=True, weight_is_static=True)
    assert set(fake_h200.compiled) == names_of([5], variant(True, True))
    fake_h200.compiled.clear()
    warmup(shapes=[SHAPE], tokens=5, vector=False)
    assert set(fake_h200.compiled) == names_of([5], variant(False, False))
    fake_h200.compiled.clear()
    warmup(shapes=[SHAPE], tokens=5, strided=False, residual=[False, True])
    assert set(fake_h200.compiled) == names_of([5], variant(), variant(has_residual=True))
    fake_h200.compiled.clear()
    warmup(shapes=[SHAPE], tokens=64, strided=False, weight_is_static=True, batch_invariant=True)
    assert set(fake_h200.compiled) <= names_of([64], variant(True, True), invariant=True)


def test_warmup_of_a_configuration(fake_h200: FakeGpu) -> None:
    assert warmup(shapes=[SHAPE], tokens=9, strided=False, config=CONFIG) == 1
    assert fake_h200.compiled == [CONFIG.name_expression(fused_a_gemm.Variant())]


HUGE = replace(CONFIG, stages=60)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("config", {"config": CONFIG, "tokens": 17}, "16"),
    ("config", {"config": HUGE, "tokens": 1}, f"{HUGE.shared_bytes} bytes"),
    ("dtype", {"dtype": "float16"}, "'float16'"),
]


def test_arguments(fake_h200: FakeGpu) -> None:
    for name, options, found in WRONG:
        refused(options, name, f"^{found}", operation=warmup)
    assert fake_h200.compiled == []


@pytest.mark.parametrize("op", ["mla_decode", "mla_prefill"])
def test_other_operations_refuse_them(op: str, fake_h200: FakeGpu) -> None:
    for name, value in (
        ("shapes", [SHAPE]),
        ("tokens", 1),
        ("strided", False),
        ("weight_is_static", True),
        ("batch_invariant", True),
        ("residual", True),
    ):
        arguments = {"op": op, name: value, "progress": False}
        text = refused(arguments, name, f"^{re.escape(repr(value))}$", operation=k3cupy.warmup)
        assert f"config with op='{op}', got" in text
    assert fake_h200.compiled == []


# From the shell


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["warmup", "--op", "fused_a_gemm", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command(fake_h200: FakeGpu) -> None:
    code, output = run(
        "--shape", "2112x7168", "--tokens", "1", "--tokens", "16", "--packed", "--weight-is-static"
    )
    assert code == 0
    names = names_of([1, 16], fused_a_gemm.Variant(True, True))
    assert set(fake_h200.compiled) == names
    assert f"{len(names)} kernels are ready" in output


def test_the_command_for_a_residual(fake_h200: FakeGpu) -> None:
    code, _ = run("--shape", "2112x7168", "--tokens", "1", "--packed", "--residual")
    assert code == 0
    assert set(fake_h200.compiled) == names_of([1], fused_a_gemm.Variant(has_residual=True))


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--shape", "2112"), 2, "'2112' is no shape; write N x K as 2112x7168"),
        (("--shape", "16x100"), 1, "shapes: expected K a multiple of 16, got (16, 100)"),
        (("--tokens", "65"), 1, "tokens: expected numbers from 1 to 64, got 65"),
        (("--rope",), 1, "rope: expected one of shapes, tokens, residual, "),
    ],
)
def test_the_command_with_wrong_options(
    arguments: tuple[str, ...], code: int, text: str, fake_h200: FakeGpu
) -> None:
    status, output = run(*arguments)
    assert status == code
    assert text in output
    assert "Traceback" not in output
    assert fake_h200.compiled == []
