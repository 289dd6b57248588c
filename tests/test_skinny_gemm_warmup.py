"""Compiling the skinny GEMM ahead, from Python and from the shell, with a fake compiler."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

from click.testing import CliRunner
from gemm_helpers import SKINNY, unread
from helpers import refused
from toolchain_helpers import FakeGpu, fake_h200

import k3cupy
from k3cupy.cli import main
from k3cupy.kernels import skinny_gemm

__all__ = ["fake_h200"]

CONFIG = k3cupy.SkinnyGemmConfig(3, 64, 2, 2, 8)
SHAPE = (2112, 7168)
MMA = k3cupy.SkinnyGemmConfig(12, 64, 16, 2, 8, "mma")
VARIANT = skinny_gemm.Variant


def warmup(**options: Any) -> int:
    return k3cupy.warmup("skinny_gemm", progress=False, **options)


def names_of(tokens: range | list[int], *variants: skinny_gemm.Variant) -> set[str]:
    def config(count: int, residual: bool) -> Any:
        added = unread(count, SHAPE[0]) if residual else None
        return SKINNY.chosen(SHAPE, count, residual=added).config

    return {config(t, v.has_residual).name_expression(v) for t in tokens for v in variants}


def test_warmup_compiles_what_calls_of_a_shape_will_get(fake_h200: FakeGpu) -> None:
    assert warmup(shapes=[SHAPE], tokens=[1, 4]) == 2
    assert set(fake_h200.compiled) == names_of([1, 4], VARIANT(k=7168))


def test_warmup_of_every_number_of_tokens(fake_h200: FakeGpu) -> None:
    warmup(shapes=[SHAPE])
    assert set(fake_h200.compiled) == names_of(range(1, 17), VARIANT(k=7168))
    assert len(fake_h200.compiled) == len(set(fake_h200.compiled)), "tokens of a tile share theirs"


def test_warmup_of_types_layouts_promises_and_residuals(fake_h200: FakeGpu) -> None:
    flags = [False, True]
    count = warmup(
        shapes=[SHAPE],
        tokens=5,
        dtype=["bfloat16", "float16"],
        vector=flags,
        residual=flags,
        weight_is_static=flags,
    )
    assert count == 16
    every = [
        VARIANT(dtype, *three, k=7168)
        for dtype in ("bfloat16", "float16")
        for three in itertools.product(flags, repeat=3)
    ]
    assert set(fake_h200.compiled) == names_of([5], *every)


def test_warmup_of_a_configuration(fake_h200: FakeGpu) -> None:
    """It says for how many rows it is."""
    for options in ({}, {"tokens": 3}, {"tokens": [3]}):
        fake_h200.compiled.clear()
        assert warmup(shapes=[SHAPE], config=CONFIG, **options) == 1
        assert fake_h200.compiled in ([CONFIG.name_expression(VARIANT())], []), "loaded once"


def test_warmup_of_a_configuration_with_tensor_cores(fake_h200: FakeGpu) -> None:
    """An instance for each K, as far as K matters: one round or more, whole steps or not."""
    shapes = [(2112, 7168), (96, 1536), (96, 64), (2112, 7176)]
    assert warmup(shapes=shapes, config=MMA) == 3
    names = {MMA.name_expression(VARIANT(k=k)) for _, k in shapes}
    assert set(fake_h200.compiled) == names
    split = replace(MMA, split_k=2)
    assert warmup(shapes=shapes[:1], config=split) == 1
    assert fake_h200.compiled[-1] == split.name_expression(VARIANT(k=7168))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("config", {"config": CONFIG, "tokens": 4}, "3"),
    ("config", {"config": MMA, "tokens": 11}, "12"),
    ("dtype", {"dtype": "float32"}, "'float32'"),
    ("strided", {"strided": True}, "True"),
    ("batch_invariant", {"batch_invariant": True}, "True"),
]


def test_arguments(fake_h200: FakeGpu) -> None:
    for name, options, found in WRONG:
        refused(options, name, f"^{found}", operation=warmup)
    assert fake_h200.compiled == []


def test_the_command(fake_h200: FakeGpu) -> None:
    options = ["--op", "skinny_gemm", "--shape", "2112x7168", "--tokens", "1", "--tokens", "4"]
    options += ["--dtype", "float16", "--weight-is-static", "--residual"]
    result = CliRunner().invoke(main, ["warmup", *options])
    assert result.exit_code == 0, result.output
    assert set(fake_h200.compiled) == names_of([1, 4], VARIANT("float16", True, True, True, k=7168))
    assert "2 kernels are ready" in result.output


def test_the_command_with_wrong_options(fake_h200: FakeGpu) -> None:
    none = r"\. Leave it out: skinny_gemm has no option (batch_invariant|strided)"
    for option, text in (
        (("--tokens", "17"), "tokens: expected numbers from 1 to 16, got 17"),
        (("--batch-invariant",), "batch_invariant: expected one of .* with .*, got True" + none),
        (("--packed",), "strided: expected one of .* with op='skinny_gemm', got False" + none),
    ):
        result = CliRunner().invoke(main, ["warmup", "--op", "skinny_gemm", *option])
        assert result.exit_code == 1
        assert re.fullmatch(f"Error: {text}", result.output.strip())
    assert fake_h200.compiled == []
