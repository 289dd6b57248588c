"""Compiling the fused-A GEMM ahead, from Python and from the shell, with a fake compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from toolchain_helpers import FakeGpu, fake_gpu

import k3cupy
from k3cupy import projections
from k3cupy.cli import main
from k3cupy.ops.fused_a_gemm_choice import choose
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo

H200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
CONFIG = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)
SHAPE = (2112, 7168)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(devices, "info", lambda _: H200)
    return fake_gpu(monkeypatch)


def warmup(**options: Any) -> int:
    return k3cupy.warmup("fused_a_gemm", progress=False, **options)


def names_of(
    tokens: range | list[int], *variants: k3cupy.FusedAGemmVariant, invariant: bool = False
) -> set[str]:
    chosen = [choose(*SHAPE, count, H200, batch_invariant=invariant)[0] for count in tokens]
    return {config.name_expression(variant) for config in chosen for variant in variants}


def test_warmup_compiles_what_calls_of_a_shape_will_get(gpu: FakeGpu) -> None:
    packed, strided = k3cupy.FusedAGemmVariant(), k3cupy.FusedAGemmVariant(packed=False)
    count = warmup(shapes=[SHAPE], tokens=[1, 16])
    assert set(gpu.compiled) == names_of([1, 16], packed, strided)
    assert count == len(gpu.compiled)


def test_warmup_of_every_number_of_tokens(gpu: FakeGpu) -> None:
    warmup(shapes=[SHAPE], strided=False)
    assert set(gpu.compiled) == names_of(range(1, 65), k3cupy.FusedAGemmVariant())


def test_warmup_of_promises_and_layouts(gpu: FakeGpu) -> None:
    variant = k3cupy.FusedAGemmVariant
    warmup(shapes=[SHAPE], tokens=5, strided=True, weight_is_static=True)
    assert set(gpu.compiled) == names_of([5], variant(False, True, True))
    gpu.compiled.clear()
    warmup(shapes=[SHAPE], tokens=5, vector=False)
    assert set(gpu.compiled) == names_of([5], variant(False, False, False))
    gpu.compiled.clear()
    warmup(shapes=[SHAPE], tokens=5, strided=False, residual=[False, True])
    assert set(gpu.compiled) == names_of([5], variant(), variant(has_residual=True))
    gpu.compiled.clear()
    warmup(shapes=[SHAPE], tokens=64, strided=False, weight_is_static=True, batch_invariant=True)
    assert set(gpu.compiled) <= names_of([64], variant(True, True, True), invariant=True)


def test_warmup_of_the_model(gpu: FakeGpu) -> None:
    """By default every projection; each has what its calls need."""
    warmup(tokens=[1, 9], strided=False)
    for p in projections.shapes():
        for tokens in (1, 9):
            config, _ = choose(p.n, p.k, tokens, H200)
            assert config.name_expression(k3cupy.FusedAGemmVariant()) in gpu.compiled


def test_warmup_of_a_configuration(gpu: FakeGpu) -> None:
    assert warmup(shapes=[SHAPE], tokens=9, strided=False, config=CONFIG) == 1
    assert gpu.compiled == [CONFIG.name_expression(k3cupy.FusedAGemmVariant())]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shapes": []}, "shapes: expected at least one, got none"),
        ({"shapes": [(16,)]}, r"shapes: expected pairs .*, got \(16,\)"),
        ({"shapes": [(16, 16.0)]}, "shapes: expected pairs"),
        ({"shapes": [16]}, "shapes: expected pairs .*, got 16"),
        ({"shapes": [(16, 100)]}, "shapes: expected K a multiple of 16"),
        ({"shapes": [(0, 64)]}, "shapes: expected pairs"),
        ({"tokens": 65}, "tokens: expected numbers from 1 to 64, got 65"),
        ({"tokens": [1, 0]}, "tokens: expected .*, got 0"),
        ({"tokens": []}, "tokens: expected at least one"),
        ({"config": 3}, "config: expected None or a FusedAGemmConfig, got 3"),
        ({"config": CONFIG, "tokens": 17}, "config: expected tile_m of at least the 17 rows"),
        ({"config": replace(CONFIG, stages=60), "tokens": 1}, "config: expected at most 232448"),
        ({"dtype": "float16"}, "dtype: expected nothing with op='fused_a_gemm'"),
        ({"kv_cache": "fp8"}, "kv_cache: expected nothing"),
        ({"rope": True}, "rope: expected nothing"),
        ({"split": 1}, "split: expected nothing"),
        ({"query_fp8": False}, "query_fp8: expected nothing"),
        ({"device": 7}, "device: expected .*, got 7"),
    ],
    ids=str,
)
def test_arguments(options: dict[str, Any], text: str, gpu: FakeGpu) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        warmup(**options)
    assert gpu.compiled == []


@pytest.mark.parametrize(
    "options",
    [
        {"shapes": [SHAPE]},
        {"tokens": 1},
        {"strided": False},
        {"weight_is_static": True},
        {"batch_invariant": True},
        {"residual": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["mla_decode", "mla_prefill"])
def test_other_operations_refuse_them(op: str, options: dict[str, Any], gpu: FakeGpu) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}: expected nothing with op='{op}'"):
        k3cupy.warmup(op, **options, progress=False)
    assert gpu.compiled == []


# From the shell


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["warmup", "--op", "fused_a_gemm", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command(gpu: FakeGpu) -> None:
    code, output = run(
        "--shape", "2112x7168", "--tokens", "1", "--tokens", "16", "--packed", "--weight-is-static"
    )
    assert code == 0
    names = names_of([1, 16], k3cupy.FusedAGemmVariant(True, True, True))
    assert set(gpu.compiled) == names
    assert f"{len(names)} kernels are ready" in output


def test_the_command_for_a_residual(gpu: FakeGpu) -> None:
    code, _ = run("--shape", "2112x7168", "--tokens", "1", "--packed", "--residual")
    assert code == 0
    assert set(gpu.compiled) == names_of([1], k3cupy.FusedAGemmVariant(has_residual=True))


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--shape", "2112"), 2, "'2112' is no shape; write N x K as 2112x7168"),
        (("--shape", "16x100"), 1, "shapes: expected K a multiple of 16"),
        (("--tokens", "65"), 1, "tokens: expected numbers from 1 to 64"),
        (("--rope",), 1, "rope: expected nothing with op='fused_a_gemm'"),
    ],
)
def test_the_command_with_wrong_options(
    arguments: tuple[str, ...], code: int, text: str, gpu: FakeGpu
) -> None:
    status, output = run(*arguments)
    assert status == code
    assert text in output
    assert "Traceback" not in output
    assert gpu.compiled == []
