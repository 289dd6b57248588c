"""Bundles: made without a GPU, used without a compiler, refused where they do not fit."""

from __future__ import annotations

import base64
import errno
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fake_device import A100, H200, CudaTensor, FakeDevice
from toolchain_helpers import FakeGpu, copy_of_sources, edit, fake_gpu

import k3cupy
from k3cupy import bundling, projections
from k3cupy.cli import main
from k3cupy.kernels.mla_decode import UNTUNED, Variant
from k3cupy.runtime import (
    binaries,
    bundles,
    config,
    devices,
    instances,
    offline,
    sources,
    toolchain,
)
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import MissingError, ToolchainError
from k3cupy.runtime.instances import Instance

ONE = UNTUNED.instance(Variant("bfloat16"))
OWN = replace(ONE, own_arch=True)
ABSENT = replace(ONE, name_expression="k3cupy::of_no_bundle")


def text_of(source: str, name: str, arch: str) -> bytes:
    """What stands for a binary where the compiler does not matter."""
    return f"symbol\0{arch} {name} of {source}".encode()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles are made by a compiler that takes no time."""
    monkeypatch.setattr(offline, "binary_of", text_of)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (12, 9))


@pytest.fixture
def folder(quick: None, tmp_path: Path) -> Path:
    """A bundle of two instances for an H200."""
    bundling.make([ONE, OWN], "tiny tp1", H200, tmp_path / "bundle")
    return tmp_path / "bundle"


def refuse(*_: Any, **__: Any) -> Any:
    raise ToolchainError("there is no compiler here")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    """An H200 with a driver and nothing else: no NVRTC, no headers, and nothing may compile."""
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    fake = fake_gpu(monkeypatch, tmp_path / "cache")
    fake.on_compile = refuse
    for name in ("nvrtc_version", "include_directory", "header_version"):
        monkeypatch.setattr(toolchain, name, refuse)
    bundles._known.cache_clear()
    bundles._warn_once.cache_clear()
    return fake


def named(monkeypatch: pytest.MonkeyPatch, *folders: Path | str) -> None:
    monkeypatch.setenv("K3CUPY_BUNDLE", os.pathsep.join(map(str, folders)))


def warned(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if w.category is RuntimeWarning]


def load(*wanted: Instance) -> list[str]:
    """Load instances as a new process does, and return what was said; all else passes through."""
    instances._attempts.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for instance in wanted:
            instances.load(instance, 0)
    return warned(caught)


# Made without a GPU, used without a compiler


def test_made_offline_and_used_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The real compiler makes it; then nothing compiles, and NVRTC and headers are missing."""
    pytest.importorskip("cuda.core")
    done: list[Instance] = []
    bundling.make([ONE, OWN], "tiny tp1", H200, tmp_path / "bundle", on_done=done.append)
    assert set(done) == {ONE, OWN}
    gpu = request.getfixturevalue("gpu")
    named(monkeypatch, tmp_path / "bundle")
    monkeypatch.setenv("K3CUPY_NO_COMPILE", "1")
    assert load(ONE, OWN) == []
    assert len(gpu.loaded) == 2
    assert all(code.startswith(b"\x7fELF") for code in gpu.loaded)
    mangled = re.compile(r"_ZN6k3cupy19mla_decode_epilogueI\w+")
    assert all(mangled.fullmatch(symbol) for symbol in gpu.compiled), "symbols, as the files say"
    assert instances.load(ONE, 0).function.num_regs == 32
    assert not (tmp_path / "cache").exists(), "nor is the disk cache asked"


def test_the_manifest_says_what_it_is_of(folder: Path) -> None:
    found = json.loads((folder / "manifest.json").read_text("utf-8"))
    files = found.pop("files")
    assert found == {
        "schema": 1,
        "package": k3cupy.__version__,
        "model": "tiny tp1",
        "gpu": "NVIDIA H200",
        "arch": "sm_90",
        "compiler": "NVRTC 12.9",
        "kernels": {"mla_decode.cu": sources.shipped_digest("mla_decode.cu")},
        "instances": 2,
    }
    assert {path.name for path in folder.iterdir()} == {*files, "manifest.json"}
    told = [(f["source"], f["name_expression"], f["arch"]) for f in files.values()]
    assert sorted(told) == [
        ("mla_decode.cu", ONE.name_expression, "sm_90"),
        ("mla_decode.cu", ONE.name_expression, "sm_90a"),
    ]


def test_what_a_bundle_lacks_is_compiled(
    folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, folder)
    with pytest.raises(ToolchainError, match="there is no compiler here"):
        load(ABSENT)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(toolchain, "include_directory", lambda: "/headers")
    gpu.on_compile = lambda _: None
    assert load(ABSENT, ONE) == []
    assert gpu.in_memory == [None], "one was compiled"


def test_several_bundles_are_looked_through(
    folder: Path, quick: None, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    bundling.make([ABSENT], "more tp1", H200, tmp_path / "more")
    bundling.make([ONE], "other tp1", A100, tmp_path / "other")
    named(monkeypatch, tmp_path / "other", folder, "", tmp_path / "more")
    assert load(ONE, ABSENT) == []
    assert [code.split()[0] for code in gpu.loaded] == [b"sm_90"] * 2


def test_edited_sources_are_not_those_of_the_bundle(
    folder: Path, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, folder)
    tree = copy_of_sources(tmp_path)
    edit(tree / "common/pdl.cuh", "#pragma once", "#pragma once\n// edited")
    with k3cupy.source_dir(tree):
        with pytest.raises(ToolchainError, match="there is no compiler here"):
            load(ONE)
        with pytest.raises(ToolchainError, match="Unset it"):
            bundling.make([ONE], "tiny tp1", H200, tmp_path / "edited")


# Refused


def rewrite(folder: Path, **changed: Any) -> None:
    """Change fields of a manifest; None takes one out."""
    path = folder / "manifest.json"
    facts = {**json.loads(path.read_text("utf-8")), **changed}
    facts = {name: value for name, value in facts.items() if value is not None}
    path.write_text(json.dumps(facts), "utf-8")


@pytest.fixture
def listed(folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Changes fields of the bundle's manifest, and returns its line of `show-config`."""

    def line_of(**changed: Any) -> str:
        rewrite(folder, **changed)
        named(monkeypatch, folder)
        (line,) = config.config_info()["bundles"]
        return str(line)

    return line_of


def of_other_kernels(folder: Path) -> str:
    rewrite(folder, kernels={"mla_decode.cu": "0" * 64}, package="0.0.9")
    return "its binaries are of other kernels, those of k3cupy 0.0.9: mla_decode.cu is not that of"


def of_another_layout(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"schema": 2}', "utf-8")
    return "its manifest.json is of another version of k3cupy"


def cut_short(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text("utf-8")[:99], "utf-8")
    return "its manifest.json is no JSON ("


def without_a_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return f"there is no {folder / 'manifest.json'}"


def a_pipe(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    return "its manifest.json is no manifest"


def not_there(folder: Path) -> str:
    folder.rename(folder.with_name("elsewhere"))
    return f"there is no {folder}"


def for_others_to_write(folder: Path) -> str:
    folder.chmod(0o777)
    return "has mode 0777, so that others could put any code there: `chmod go-w` it"


def a_manifest_for_others_to_write(folder: Path) -> str:
    (folder / "manifest.json").chmod(0o666)
    return "its manifest.json has mode 0666, so that others could put any code there"


def a_file(folder: Path) -> str:
    folder.rename(folder.with_name("elsewhere"))
    folder.touch()
    return f"{folder} is no folder"


def below_a_file(folder: Path) -> str:
    folder.rename(folder.with_name("elsewhere"))
    folder.parent.joinpath("file").touch()
    folder.symlink_to("file/bundle")
    return f"{folder}: {os.strerror(errno.ENOTDIR)}"


def a_looping_link(folder: Path) -> str:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder)
    return f"{folder}: {os.strerror(errno.ELOOP)}"


def of_somebody_else(folder: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 4242, -1)
    return "belongs to another user, 4242"


@pytest.mark.parametrize(
    "spoil",
    [
        of_other_kernels,
        of_another_layout,
        cut_short,
        without_a_manifest,
        a_pipe,
        not_there,
        for_others_to_write,
        a_manifest_for_others_to_write,
        a_file,
        below_a_file,
        a_looping_link,
        of_somebody_else,
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    spoil: Callable[[Path], str], folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = spoil(folder)
    named(monkeypatch, folder)
    monkeypatch.setenv("K3CUPY_NO_COMPILE", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(ToolchainError) as error:
                load_quietly(ONE)
    (text,) = warned(caught)
    assert text.startswith("kernel bundle: not used, ")
    assert told in text
    assert text.count(str(folder)) == 1 and "Errno" not in text
    assert text.endswith(
        "make one with `k3cupy bundle --model kimi-k3 --tp 8 --gpu h200 --out FOLDER`"
    )
    assert told in str(error.value)
    assert gpu.loaded == []
    assert [line for line in config.config_info()["bundles"] if told in line]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"instances": -3}, "says that it has -3 instances, and lists 2 files"),
        ({"instances": 2.0}, "says that it has 2.0 instances, and lists 2 files"),
        ({"instances": True, "files": {"a": {}}}, "says that it has True instances, and lists 1 f"),
        ({"instances": None}, "says that it has None instances, and lists 2 files"),
        ({"instances": 0, "files": {}}, "does not say which kernels it has"),
        ({"files": None}, "does not say which kernels it has"),
        ({"kernels": {}}, "does not say which kernels it has"),
        ({"kernels": ["mla_decode.cu"]}, "does not say which kernels it has"),
        ({"arch": None}, "has no text arch, got None"),
        ({"model": ["\x1b"]}, r"has no text model, got ['\x1b']"),
    ],
)
def test_a_manifest_of_other_fields_is_refused(
    changed: dict[str, Any], told: str, folder: Path, listed: Callable[..., str]
) -> None:
    assert listed(**changed).startswith(f"not used: {folder}: its manifest.json {told}")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": "a\x1b[31m\nb"}, r"2 kernels for 'a\x1b[31m\nb' on NVIDIA H200 (sm_90)"),
        ({"gpu": "\u202eme"}, r"on '\u202eme' (sm_90)"),
        ({"model": "m" * 999}, "mmm...mmm"),
        ({"model": "für \u4e2d"}, "2 kernels for für \u4e2d on"),
        ({"kernels": {"\x1b.cu": "0"}}, r": '\x1b.cu' is not that of this package"),
    ],
)
def test_texts_of_a_manifest_are_shown_on_one_line(
    changed: dict[str, Any], told: str, listed: Callable[..., str]
) -> None:
    line = listed(**changed)
    assert told in line
    assert line.isprintable() and len(line) < 500


def test_a_wheel_that_is_named_is_to_be_installed(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "k3cupy_bundle-py3-none-any.whl"
    wheel.touch()
    named(monkeypatch, wheel)
    (told,) = config.config_info()["bundles"]
    why = "a wheel is used once `pip install` has installed it; leave it out here"
    assert told == f"not used: {wheel}: {why}"


def test_what_is_refused_is_told_also_where_there_is_no_compiler(
    folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That NVRTC is missing is not the whole story then."""
    told = of_other_kernels(folder)
    named(monkeypatch, folder)
    with (
        pytest.warns(RuntimeWarning, match=told),
        pytest.raises(ToolchainError, match="there is no compiler here"),
    ):
        load_quietly(ONE)


def load_quietly(instance: Instance) -> None:
    instances._attempts.clear()
    instances.load(instance, 0)


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def writable_by_all(path: Path) -> None:
    path.chmod(0o666)


def of_another_instance(path: Path) -> None:
    (other,) = set(path.parent.glob("*.cubin")) - {path}
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("spoil", [damaged, writable_by_all, of_another_instance])
def test_a_foreign_file_is_not_loaded(
    spoil: Callable[[Path], None], folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = sources.load(ONE.source).digest
    path = binaries.path_in(folder, bundles.key_of(ONE, digest, "sm_90"))
    spoil(path)
    named(monkeypatch, folder)
    monkeypatch.setenv("K3CUPY_NO_COMPILE", "1")
    with (
        pytest.warns(RuntimeWarning, match=f"{path.name} is damaged, or others can write it"),
        pytest.raises(ToolchainError, match="K3CUPY_NO_COMPILE"),
    ):
        load_quietly(ONE)
    assert gpu.loaded == []
    assert load(OWN) == [], "the others are as good as before"


def test_an_incomplete_copy_is_told_once_and_serves(
    folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries.path_in(folder, bundles.key_of(OWN, sources.load(ONE.source).digest, "sm_90")).unlink()
    named(monkeypatch, folder)
    told = "1 of 2 files are missing"
    assert load(ONE) == [f"kernel bundle: {folder}: {told}; copy it again"]
    assert len(gpu.loaded) == 1
    (line,) = config.config_info()["bundles"]
    assert line.startswith(f"{folder}: 2 kernels for ") and line.endswith(f", {told}")
    monkeypatch.setenv("K3CUPY_NO_COMPILE", "1")
    with pytest.raises(MissingError, match=rf"not in the bundle {folder} \(sm_90, {told}\), and"):
        load_quietly(OWN)


def test_a_folder_that_nobody_may_list_serves(
    folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, folder)
    monkeypatch.setattr(os, "listdir", raise_permission_error)
    assert load(ONE, OWN) == []


def raise_permission_error(*_: Any) -> None:
    raise PermissionError


UNNAMED = replace(A100, name="NVIDIA A100 80GB PCIe")


@pytest.mark.parametrize(
    ("model", "there", "options"),
    [
        ("glm-5.2 tp4", A100, "--model glm-5.2 --tp 4 --gpu a100"),
        ("glm-5.2 tp4", UNNAMED, "--model glm-5.2 --tp 4 --gpu sm_80"),
        ("my `own` tp4", A100, "--model kimi-k3 --tp 8 --gpu a100"),
    ],
)
def test_another_gpu_is_told_once(
    model: str,
    there: DeviceInfo,
    options: str,
    quick: None,
    gpu: FakeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the command that makes one for it, of the same model where that is a plain name."""
    folder = tmp_path / "bundle"
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (12, 9))
    bundling.make([ONE], model, H200, folder)
    monkeypatch.setattr(toolchain, "nvrtc_version", refuse)
    named(monkeypatch, folder)
    gpu.gpu = there
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(ToolchainError, match="there is no compiler"):
                load_quietly(ONE)
    (text,) = warned(caught)
    assert f"{folder} is for sm_90, and not used on {there.name}, sm_80" in text
    assert text.endswith(f"; make one with `k3cupy bundle {options} --out FOLDER`")


def test_the_driver_is_too_old_for_a_bundle(
    folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, folder)
    cupy = gpu.cupy()

    def refuse_binary(_: bytes) -> None:
        raise cupy.cuda.driver.CUDADriverError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    gpu.loaded = type("Loaded", (list,), {"append": lambda _, code: refuse_binary(code)})()
    gpu.driver = 11080
    with pytest.raises(ToolchainError, match=rf"Driver 11\.8, NVRTC 12\.9 of the bundle {folder}:"):
        load_quietly(ONE)


# K3CUPY_NO_COMPILE


EACH_COMPILER = pytest.mark.parametrize("instance", [ABSENT, replace(ABSENT, own_arch=True)])


@EACH_COMPILER
@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("in_memory", ["0", "1"])
def test_a_miss_names_the_instance(
    instance: Instance,
    has_compiler: bool,
    in_memory: str,
    folder: Path,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named(monkeypatch, folder)
    monkeypatch.setenv("K3CUPY_NO_COMPILE", "on")
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", in_memory)
    if has_compiler:
        monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (12, 9))
        monkeypatch.setattr(toolchain, "include_directory", lambda: "/headers")
    with pytest.raises(MissingError) as error:
        load(instance)
    arch = "sm_90a" if instance.own_arch else "sm_90"
    assert str(error.value) == (
        "K3CUPY_NO_COMPILE: expected k3cupy::of_no_bundle of mla_decode.cu for "
        f"{arch} to be ready, got none: it is not loaded, not in the bundle {folder} (sm_90), and "
        "not in the disk cache. Make a bundle that has it with `k3cupy bundle`, fill the disk "
        "cache with `k3cupy warmup`, or unset K3CUPY_NO_COMPILE"
    )
    assert gpu.compiled == []
    assert not instances.is_loaded(instance, 0)
    assert load(ONE) == []


@EACH_COMPILER
def test_the_disk_cache_and_what_is_loaded_still_serve(
    instance: Instance, gpu: FakeGpu, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "include_directory", lambda: "/headers")
    gpu.on_compile = lambda _: None
    load(instance)
    count = len(gpu.in_memory)
    monkeypatch.setenv("K3CUPY_NO_COMPILE", "1")
    monkeypatch.setattr(offline, "binary_of", refuse)
    gpu.on_compile = refuse
    instances.load(instance, 0)
    load(instance)
    assert len(gpu.in_memory) == count


def test_neither_on_nor_off_is_an_error(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3CUPY_NO_COMPILE", "maybe")
    with pytest.raises(ValueError, match="K3CUPY_NO_COMPILE: expected 0, false, off, no or 1"):
        load(ONE)


# What a model needs


def test_every_call_of_a_model_gets_what_the_bundle_has(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real calls on an H200 that is none: linear layers of some shapes, epilogues of each form."""
    some = ("q_b_proj", "f_b_proj", "fused_qkv_a_proj and", "routed_expert_up", "router gate (rep")
    every = projections.of_degree("kimi-k3", 8)
    local = [next(p for p in every if p.name.startswith(name)) for name in some]
    monkeypatch.setattr(projections, "of_degree", lambda *_: local)
    of_bundle = set(bundling.instances_of("kimi-k3", 8, H200))

    def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return CudaTensor.of(torch.empty(shape, dtype=dtype), 0)

    for p, m, static in itertools.product(local, (1, 7, 64), (False, True)):
        weight = cuda(p.n, p.k)
        for x in (cuda(m, p.k), CudaTensor.of(cuda(m, p.k + 64)[:, : p.k], 0)):
            k3cupy.low_latency_linear(x, weight, weight_is_static=static)
            if p.residual:
                k3cupy.low_latency_linear(x, weight, cuda(m, p.n), weight_is_static=static)
            if "float32" in p.name:
                k3cupy.low_latency_linear(
                    x, weight, weight_is_static=static, out_dtype=torch.float32
                )
    weight = cuda(3648, 7168)
    for m, static in itertools.product(range(1, 17), (False, True)):
        k3cupy.fused_a_gemm(cuda(m, 7168), weight, weight_is_static=static)
        k3cupy.fused_a_gemm(cuda(m, 3584), cuda(7168, 3584), weight_is_static=True)
    assert any(p.residual for p in local)
    for formats in ({}, {"cache_scale_inv": 1.0}, {"cache_scale_inv": 1.0, "q_scale_inv": 1.0}):
        for rope in (False, True):
            turned = {
                "positions": cuda(4, dtype=torch.int64),
                "cos_sin_cache": cuda(99, 64, dtype=torch.float32),
            }
            k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
                cuda(4, 12, 512),
                cuda(4, 12, 64),
                cuda(4, 512),
                cuda(4, 64),
                cuda(2, 64, 576, dtype=torch.uint8 if formats else torch.bfloat16),
                cuda(4, dtype=torch.int64),
                **formats,
                **(turned if rope else {}),
            )
    w_uv = CudaTensor.of(cuda(12, 256, 512)[:, 128:].transpose(1, 2), 0)
    for tokens, static in itertools.product((1, 100), (False, True)):
        weights = cuda(1536), cuda(512)
        norms = {"eps": 1e-6, "weight_is_static": static}
        k3cupy.fused_q_kv_rmsnorm(cuda(tokens, 2112), *weights, **norms)
        for gate in (None, cuda(tokens, 1536)):
            latent = cuda(tokens, 12, 512)
            k3cupy.fused_mla_decode_value(latent, w_uv, gate, weight_is_static=static)
    w_q_b, w_uk = cuda(2304, 1536), CudaTensor.of(cuda(12, 256, 512)[:, :128], 0)
    fp8 = {"cache_scale_inv": 1.0, "q_scale_inv": 1.0}
    for tokens, static, formats in itertools.product(
        (1, 9, 17, 100), (False, True), ({}, {"cache_scale_inv": 1.0}, fp8, {"ds_mla": True})
    ):
        width = 656 if "ds_mla" in formats else 576
        k3cupy.fused_mla_decode_query(
            *(cuda(tokens, 2112), *weights, w_q_b, w_uk),
            cuda(2, 64, width, dtype=torch.uint8 if formats else torch.bfloat16),
            cuda(tokens, dtype=torch.int64),
            eps=1e-6,
            weight_is_static=static,
            **formats,
        )
    loaded = set(fake_device.loads)
    assert {instance.source for instance in loaded} == {
        *("fused_a_gemm.cu", "skinny_gemm.cu", "mla_decode.cu"),
        *("mla_norm.cu", "mla_query.cu", "mla_value.cu"),
    }
    assert loaded <= of_bundle


@pytest.mark.parametrize("mode", ["batch_invariant", "kv_inputs_ready"])
def test_modes_add_to_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "of_degree", lambda *_: [projections.Projection(96, 512, "o")])
    plain = set(bundling.instances_of("glm-5.2", 8, H200))
    assert plain < set(bundling.instances_of("glm-5.2", 8, H200, **{mode: True}))


def test_one_server_needs_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other formats are left out, and nothing is added."""
    monkeypatch.setattr(projections, "of_degree", lambda *_: [projections.Projection(96, 512, "o")])
    every = set(bundling.instances_of("kimi-k3", 8, H200))
    one = set(bundling.instances_of("kimi-k3", 8, H200, **bundling.ONE_SERVER))
    assert one < every
    left_out = {i.name_expression for i in every - one}
    assert any("CacheFormat::kSame" in name for name in left_out)
    assert not any("CacheFormat::kSame" in i.name_expression for i in one)
    assert len({i.source for i in one}) > 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--model kimi --tp 8", "model: expected kimi-k3 or deepseek-v3 or glm-5.2, got 'kimi'"),
        ("--model kimi-k3 --tp 3", "tp: expected 4 or 8 or 16 for kimi-k3, got 3"),
        ("--model glm-5.2 --tp 8 --gpu h400", "gpu: expected a100, h100, h200, b200,"),
    ],
)
def test_what_is_unknown_is_refused_with_what_there_is(
    options: str, told: str, tmp_path: Path
) -> None:
    words = ["bundle", "--gpu", "h200", *options.split(), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert told in done.output
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is no folder is refused before anything is compiled, by the option's name."""
    monkeypatch.setattr(devices, "count", refuse)
    words = ["bundle", "--model", "kimi-k3", "--tp", "8", "--out"]
    done = CliRunner().invoke(main, [*words, str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "--gpu: expected the name of a GPU, as h200, for none is found here: " in done.output
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, [*words, str(tmp_path / "file"), "--gpu", "h200"])
    assert done.exit_code == 2
    assert "Invalid value for '--out'" in done.output


def test_a_missing_compiler_is_told_before_anything_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "cuda_core", refuse)
    monkeypatch.setattr(bundling, "instances_of", None)
    words = ["bundle", "--model", "kimi-k3", "--tp", "8", "--gpu", "h200"]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out")])
    assert (done.exit_code, done.output) == (1, "Error: there is no compiler here\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "full"),
    [("H200", "NVIDIA H200"), ("nvidia gb300", "NVIDIA GB300"), ("a100", "NVIDIA A100-SXM4-80GB")],
)
def test_gpus_by_name(name: str, full: str) -> None:
    assert devices.named(name).name == full


def test_the_command_makes_a_folder_or_a_wheel(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def few(*given: Any, **options: Any) -> list[Instance]:
        asked.append((*given, options))
        return [ONE, OWN, ONE]

    monkeypatch.setattr(bundling, "instances_of", few)
    options = "--model kimi-k3 --tp 8 --gpu h200 --kv-inputs-ready --out"
    words = ["bundle", *options.split()]
    for _ in range(2):  # a bundle may be replaced
        done = CliRunner().invoke(main, [*words, str(tmp_path / "folder")])
        assert done.exit_code == 0, done.output
    assert f"set K3CUPY_BUNDLE={tmp_path / 'folder'}" in done.output
    assert "2 kernels for kimi-k3 tp8 on NVIDIA H200 (sm_90)" in done.output
    assert len(list((tmp_path / "folder").glob("*.cubin"))) == 2
    modes = {"batch_invariant": False, "kv_inputs_ready": True}
    assert asked == [("kimi-k3", 8, devices.named("h200"), modes)] * 2
    done = CliRunner().invoke(main, [*words, str(tmp_path / "dist"), "--wheel"])
    assert done.exit_code == 0, done.output
    (wheel,) = (tmp_path / "dist").iterdir()
    assert str(wheel) in done.output
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").touch()
    done = CliRunner().invoke(main, [*words, str(tmp_path / "notes")])
    assert done.exit_code == 1
    assert "out: expected an empty folder or a bundle, got " in done.output


def of_others(folder: Path) -> str:
    (folder / "mine.txt").touch()
    return f"out: expected an empty folder or a bundle, got {folder}, which is none"


def open_to_others(folder: Path) -> str:
    folder.chmod(0o777)
    told = f"out: expected a folder that you alone can write, got {folder}, which has mode 0777, so"
    return f"{told} that others could put any code there: `chmod go-w` it"


def not_to_be_made(folder: Path) -> str:
    folder.rmdir()
    folder.symlink_to("nowhere/at/all")
    told = f"out: expected a folder that can be made and read, got {folder}: "
    return told + os.strerror(errno.EEXIST)


@pytest.mark.parametrize(
    ("spoil", "options"),
    [(of_others, ""), (open_to_others, ""), (not_to_be_made, ""), (not_to_be_made, "--wheel")],
)
def test_a_bad_out_is_told_before_anything_is_chosen(
    spoil: Callable[[Path], str],
    options: str,
    quick: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bundling, "instances_of", None)
    folder = tmp_path / "out"
    folder.mkdir()
    told = spoil(folder)
    words = f"bundle --model kimi-k3 --tp 8 --gpu h200 {options} --out".split()
    done = CliRunner().invoke(main, [*words, str(folder)])
    assert (done.exit_code, done.output) == (1, f"Error: {told}\n")


def test_wheels_may_lie_among_the_files_of_others(quick: None, tmp_path: Path) -> None:
    for spoil in (of_others, open_to_others):
        spoil(tmp_path)
        assert bundling.make_wheel([ONE], "tiny tp1", H200, tmp_path).parent == tmp_path


def test_a_smaller_bundle_leaves_nothing_of_the_larger_one(folder: Path) -> None:
    bundling.make([OWN], "tiny tp1", H200, folder)
    assert len(list(folder.glob("*.cubin"))) == 1


def test_a_failure_leaves_no_manifest(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "binary_of", refuse)
    with pytest.raises(ToolchainError, match="no compiler"):
        bundling.make([ONE, OWN], "tiny tp1", H200, tmp_path / "out")
    assert not list(tmp_path.rglob("manifest.json"))


def test_what_was_interrupted_is_made_again(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same command, and nothing is left of what was half made."""

    def interrupt(source: str, name: str, arch: str) -> bytes:
        if name == ABSENT.name_expression:
            raise KeyboardInterrupt
        return text_of(source, name, arch)

    with monkeypatch.context() as patched:
        patched.setattr(offline, "binary_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bundling.make([ONE, ABSENT], "tiny tp1", H200, tmp_path / "out", max_workers=1)
    assert list((tmp_path / "out").glob("*.cubin"))
    bundling.make([OWN], "tiny tp1", H200, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_file_of_somebody_in_a_bundle_stays(folder: Path) -> None:
    mine = [folder / name for name in ("mine.cubin", "notes.tmp")]
    for path in mine:
        path.touch()
    bundling.make([OWN], "tiny tp1", H200, folder)
    assert all(path.exists() for path in mine)


# Wheels


def test_a_wheel_installs_and_is_found(
    quick: None, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip")
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    wheel = bundling.make_wheel([ONE, OWN], "kimi-k3 tp8", H200, tmp_path / "dist")
    version = k3cupy.__version__
    assert wheel.name == f"k3cupy_bundle_kimi_k3_tp8_h200-{version}-py3-none-any.whl"
    site = tmp_path / "site"
    command = "-m pip install --quiet --disable-pip-version-check --no-index --no-deps --target"
    subprocess.run([sys.executable, *command.split(), str(site), str(wheel)], check=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    monkeypatch.setenv("K3CUPY_NO_COMPILE", "1")
    monkeypatch.setattr(toolchain, "nvrtc_version", refuse)
    assert load(ONE, OWN) == []
    assert len(gpu.loaded) == 2
    assert "k3cupy_bundles" not in sys.modules, "nothing of it is imported"
    (told,) = config.config_info()["bundles"]
    place = site / "k3cupy_bundles/kimi_k3_tp8_h200"
    assert told == (
        f"{place}: 2 kernels for kimi-k3 tp8 on NVIDIA H200 (sm_90), by k3cupy {version} with "
        "NVRTC 13.0"
    )


def test_a_wheel_is_what_its_record_says(quick: None, tmp_path: Path) -> None:
    """And the same kernels make the same wheel."""
    wheels = [bundling.make_wheel([ONE, OWN], "tiny tp1", H200, tmp_path / place) for place in "ab"]
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    lines = [line.split(",") for line in files[record].decode().splitlines()]
    assert [line[0] for line in lines] == list(files)
    for name, digest, size in lines[:-1]:
        made = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={made}", str(len(files[name])))
    assert lines[-1] == [record, "", ""]


def test_an_interrupted_wheel_is_none(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that was whole stays."""
    whole = bundling.make_wheel([ONE], "tiny tp1", H200, tmp_path)
    before = whole.read_bytes()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile.ZipFile, "writestr", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bundling.make_wheel([ONE, OWN], "tiny tp1", H200, tmp_path)
    assert list(tmp_path.iterdir()) == [whole]
    assert whole.read_bytes() == before


def test_nothing_of_the_working_directory_is_used(
    folder: Path, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -c` and `python -m` look for packages there too."""
    (tmp_path / "here/k3cupy_bundles").mkdir(parents=True)
    folder.rename(tmp_path / "here/k3cupy_bundles/mine")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path / "here")
    assert bundles.known().bundles == ()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "here"), *sys.path[1:]])
    monkeypatch.chdir(tmp_path)
    assert [bundle.model for bundle in bundles.known().bundles] == ["tiny tp1"]
