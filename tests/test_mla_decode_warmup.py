"""Compiling the decode kernel ahead, with a fake compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_device import H200
from helpers import refused
from toolchain_helpers import FakeGpu, fake_gpu

import k3cupy
from k3cupy.choose.mla import configs
from k3cupy.kernels.mla_decode import UNTUNED, Variant
from k3cupy.ops.warmup import wanted_of
from k3cupy.runtime import devices


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(devices, "info", lambda _: H200)
    return fake_gpu(monkeypatch)


WRONG_FOR_WARMUP: list[tuple[dict[str, Any], str, str]] = [
    ({"op": "prefill"}, "op", "'prefill'"),
    ({"op": ["mla_decode"]}, "op", r"\['mla_decode'\]"),
    ({"dtype": "float32"}, "dtype", "'float32'"),
    ({"dtype": ["bfloat16", "half"]}, "dtype", "'half'"),
    ({"dtype": torch.bfloat16}, "dtype", r"torch\.bfloat16"),
    ({"dtype": [torch.bfloat16]}, "dtype", r"torch\.bfloat16"),
    ({"dtype": [["bfloat16"]]}, "dtype", r"\['bfloat16'\]"),
    ({"dtype": None}, "dtype", "None"),
    ({"dtype": []}, "dtype", "none"),
    ({"kv_cache": "fp4"}, "kv_cache", "'fp4'"),
    ({"kv_cache": ()}, "kv_cache", "none"),
    ({"kv_cache": "fp8_ds_mla", "query_fp8": True}, "query_fp8", "True"),
    ({"kv_cache": ["fp8", "fp8_ds_mla"], "query_fp8": [False, True]}, "query_fp8", "True"),
    ({"rope": []}, "rope", "none"),
    ({"progress": "no"}, "progress", "'no'"),
    ({"split": 1}, "split", "1"),
    ({"config": [1]}, "config", r"\[1\]"),
    ({"device": 7}, "device", "7"),
    ({"config": 2}, "config", "2"),
    ({"config": k3cupy.MlaDecodeConfig(2, 100, 1)}, "config", "MlaDecodeConfig"),
]


@pytest.mark.parametrize(("arguments", "name", "found"), WRONG_FOR_WARMUP, ids=str)
def test_warmup_arguments(arguments: dict[str, Any], name: str, found: str, gpu: FakeGpu) -> None:
    refused({"progress": False, **arguments}, name, f"^{found}", operation=k3cupy.warmup)
    assert gpu.compiled == []


def test_an_option_of_another_operation_is_said_to_be_none_of_this() -> None:
    """And which there are."""
    expected = "dtype, kv_cache, query_fp8, rope, kv_inputs_ready, vector, config"
    told = f"heads: expected one of {expected} with op='mla_decode', got 12"
    hint = "Leave it out: mla_decode has no option heads"
    with pytest.raises(TypeError, match=rf"^{told}\. {hint}$"):
        k3cupy.warmup("mla_decode", heads=12, tokens=[1, 2])


def test_warmup_compiles_what_a_call_may_choose(gpu: FakeGpu) -> None:
    """By default the query is fp8 where the cache is, as in serving."""
    count = k3cupy.warmup(kv_cache=["bf16", "fp8"], rope=[False, True], progress=False)
    expected = {
        config.name_expression(Variant("bfloat16", fp8, cache, rope))
        for fp8, cache, kind in ((False, "same", "16bit+same"), (True, "fp8", "fp8+fp8"))
        for config in configs("mla_decode", kind)
        for rope in (False, True)
    }
    assert count == len(expected)
    assert set(gpu.compiled) == expected
    assert len(gpu.compiled) == len(expected)
    assert k3cupy.warmup(kv_cache="bf16", vector=False, progress=False) == 1
    assert gpu.compiled[-1] == UNTUNED.name_expression(Variant("bfloat16", vector=False))


@pytest.mark.parametrize("op", ["mla_decode", "mla_query"])
def test_an_fp8_query_leaves_out_the_cache_that_has_none(op: str) -> None:
    """Where the caches are the default: every combination that there is."""
    default, none, named = (
        list(wanted_of(op, {"query_fp8": [False, True], **caches})(H200))
        for caches in ({}, {"kv_cache": None}, {"kv_cache": ["bf16", "fp8"]})
    )
    alone = wanted_of(op, {"query_fp8": False, "kv_cache": "fp8_ds_mla"})(H200)
    assert default == none
    assert set(default) == {*named, *alone}
    only_fp8 = set(wanted_of(op, {"query_fp8": True})(H200))
    assert only_fp8 == set(wanted_of(op, {"query_fp8": True, "kv_cache": ["bf16", "fp8"]})(H200))


def test_warmup_shows_its_progress(gpu: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    assert k3cupy.warmup(kv_cache="bf16", config=UNTUNED) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "compiling kernels" in captured.err
    assert "1/1" in captured.err
