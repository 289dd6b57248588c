"""Compiling the skinny GEMM ahead, from Python and from the shell, with a fake compiler."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from click.testing import CliRunner
from fake_device import H200
from toolchain_helpers import FakeGpu, fake_gpu

import k3cupy
from k3cupy import projections
from k3cupy.cli import main
from k3cupy.ops.skinny_gemm_choice import choose
from k3cupy.runtime import devices

CONFIG = k3cupy.SkinnyGemmConfig(3, 64, 2, 2, 8)
SHAPE = (2112, 7168)
VARIANT = k3cupy.SkinnyGemmVariant


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(devices, "info", lambda _: H200)
    return fake_gpu(monkeypatch)


def warmup(**options: Any) -> int:
    return k3cupy.warmup("skinny_gemm", progress=False, **options)


def names_of(
    tokens: range | list[int], *variants: k3cupy.SkinnyGemmVariant, shape: tuple[int, int] = SHAPE
) -> set[str]:
    chosen = [choose(*shape, count, H200)[0] for count in tokens]
    return {config.name_expression(variant) for config in chosen for variant in variants}


def test_warmup_compiles_what_calls_of_a_shape_will_get(gpu: FakeGpu) -> None:
    assert warmup(shapes=[SHAPE], tokens=[1, 4]) == 2
    assert set(gpu.compiled) == names_of([1, 4], VARIANT())


def test_warmup_of_every_number_of_tokens(gpu: FakeGpu) -> None:
    warmup(shapes=[SHAPE])
    assert set(gpu.compiled) == names_of(range(1, 9), VARIANT())


def test_warmup_of_types_layouts_promises_and_residuals(gpu: FakeGpu) -> None:
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
        VARIANT(dtype, *three)
        for dtype in ("bfloat16", "float16")
        for three in itertools.product(flags, repeat=3)
    ]
    assert set(gpu.compiled) == names_of([5], *every)


def test_warmup_of_the_model(gpu: FakeGpu) -> None:
    """By default every projection; each has what its calls need."""
    warmup(tokens=[1, 8], weight_is_static=True)
    wanted = [
        names_of([1, 8], VARIANT(weight_is_static=True), shape=(p.n, p.k))
        for p in projections.shapes()
    ]
    assert set(gpu.compiled) == set().union(*wanted)


def test_warmup_of_a_configuration(gpu: FakeGpu) -> None:
    """It says for how many rows it is."""
    for options in ({}, {"tokens": 3}, {"tokens": [3]}):
        gpu.compiled.clear()
        assert warmup(shapes=[SHAPE], config=CONFIG, **options) == 1
        assert gpu.compiled in ([CONFIG.name_expression(VARIANT())], []), "loaded once"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shapes": []}, "shapes: expected at least one, got none"),
        ({"shapes": [(16,)]}, r"shapes: expected pairs .*, got \(16,\)"),
        ({"shapes": [(16, 100)]}, "shapes: expected K a multiple of 8"),
        ({"shapes": [(0, 64)]}, "shapes: expected pairs"),
        ({"tokens": 9}, "tokens: expected numbers from 1 to 8, got 9"),
        ({"tokens": [1, 0]}, "tokens: expected .*, got 0"),
        ({"tokens": []}, "tokens: expected at least one"),
        ({"config": 3}, "config: expected None or a SkinnyGemmConfig, got 3"),
        ({"config": CONFIG, "tokens": 4}, "config: expected num_rows of exactly the 4 rows"),
        ({"dtype": "float32"}, "dtype: expected 'bfloat16' or 'float16', got 'float32'"),
        ({"kv_cache": "fp8"}, "kv_cache: expected nothing with op='skinny_gemm'"),
        ({"rope": True}, "rope: expected nothing"),
        ({"split": 1}, "split: expected nothing"),
        ({"query_fp8": False}, "query_fp8: expected nothing"),
        ({"strided": True}, "strided: expected nothing"),
        ({"batch_invariant": True}, "batch_invariant: expected nothing"),
        ({"device": 7}, "device: expected .*, got 7"),
    ],
    ids=str,
)
def test_arguments(options: dict[str, Any], text: str, gpu: FakeGpu) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        warmup(**options)
    assert gpu.compiled == []


def test_other_configurations_belong_to_other_operations(gpu: FakeGpu) -> None:
    fused = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)
    for op, config in (("skinny_gemm", fused), ("fused_a_gemm", CONFIG), ("mla_prefill", CONFIG)):
        with pytest.raises(TypeError, match=r"^config: expected None or a"):
            k3cupy.warmup(op, config=config, progress=False)
    with pytest.raises(ValueError, match=r"^config: expected nothing with op='mla_decode'"):
        k3cupy.warmup(config=CONFIG, progress=False)
    assert gpu.compiled == []


def test_the_command(gpu: FakeGpu) -> None:
    options = ["--op", "skinny_gemm", "--shape", "2112x7168", "--tokens", "1", "--tokens", "4"]
    options += ["--dtype", "float16", "--weight-is-static", "--residual"]
    result = CliRunner().invoke(main, ["warmup", *options])
    assert result.exit_code == 0, result.output
    assert set(gpu.compiled) == names_of([1, 4], VARIANT("float16", True, True, True))
    assert "2 kernels are ready" in result.output


def test_the_command_with_wrong_options(gpu: FakeGpu) -> None:
    for option, text in (
        (("--tokens", "9"), "tokens: expected numbers from 1 to 8"),
        (("--batch-invariant",), "batch_invariant: expected nothing with op='skinny_gemm'"),
        (("--packed",), "strided: expected nothing with op='skinny_gemm'"),
    ):
        result = CliRunner().invoke(main, ["warmup", "--op", "skinny_gemm", *option])
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: {text}")
        assert len(result.output.strip().splitlines()) == 1
    assert gpu.compiled == []
