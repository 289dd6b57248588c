"""Binaries for one architecture alone: compiled once, found again, never a broken one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from toolchain_helpers import FakeGpu, fake_gpu

from k3cupy.runtime import devices, instances, offline, sources
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import CompileError
from k3cupy.runtime.instances import Instance
from k3cupy.runtime.offline import Cubin

ONE = Instance("fused_a_gemm.cu", "k3cupy::fused_a_gemm<1>", own_arch=True)
OTHER = Instance("fused_a_gemm.cu", "k3cupy::fused_a_gemm<2>", own_arch=True)


class Compiler:
    """Takes the place of `offline`; the binary of an instance is text about it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __call__(self, source: str, names: list[str], arch: str) -> Cubin:
        (name,) = names
        self.asked.append((name, arch))
        code = f"{arch} {name} {sources.load(source).digest}"
        return Cubin(code.encode(), {name: f"_Z{len(self.asked)}kernel"})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    fake = fake_gpu(monkeypatch)
    info = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
    monkeypatch.setattr(devices, "info", lambda _: info)
    return fake


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(offline, "compile_cubin", compiler)
    return compiler


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(instances, "_loaded", {})


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def test_compiled_for_the_architecture_with_its_letter(gpu: FakeGpu, compiler: Compiler) -> None:
    seen: list[str] = []
    gpu.on_compile = seen.append
    instances.load(ONE, 0)
    instances.load(ONE, 0)
    assert compiler.asked == [(ONE.name_expression, "sm_90a")]
    assert gpu.compiled == ["_Z1kernel"], "the symbol in the file, not the name in C++"
    assert seen[0].startswith(f"sm_90a {ONE.name_expression}")


def test_found_by_the_next_process(
    gpu: FakeGpu, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    instances.load(ONE, 0)
    instances.load(OTHER, 0)
    kept = files(tmp_path)
    assert len(kept) == 2
    forget(monkeypatch)
    gpu.compiled.clear()
    instances.load(ONE, 0)
    instances.load(OTHER, 0)
    assert gpu.compiled == ["_Z1kernel", "_Z2kernel"]
    assert len(compiler.asked) == 2
    assert files(tmp_path) == kept


@pytest.mark.parametrize("content", [b"", b"sm_90a k3cupy"], ids=["empty", "truncated"])
def test_a_broken_file_is_compiled_anew(
    gpu: FakeGpu,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: bytes,
) -> None:
    instances.load(ONE, 0)
    (path,) = files(tmp_path)
    good = path.read_bytes()
    path.write_bytes(content)
    forget(monkeypatch)
    compiler.asked.clear()
    instances.load(ONE, 0)
    assert len(compiler.asked) == 1
    assert path.read_bytes() == good
    assert files(tmp_path) == [path]


def test_another_compiler_another_file(
    gpu: FakeGpu, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    instances.load(ONE, 0)
    gpu.nvrtc = (13, 0)
    forget(monkeypatch)
    instances.load(ONE, 0)
    assert len(compiler.asked) == 2
    assert len(files(tmp_path)) == 2


def test_an_unusable_cache_directory_warns_and_compiles_in_memory(
    gpu: FakeGpu, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="kernel cache: .*cannot be used"):
        instances.load(ONE, 0)
    assert gpu.in_memory == ["1"]
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ


def test_in_memory_leaves_nothing(
    gpu: FakeGpu, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    instances.load(ONE, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_source_is_told(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise CompileError("fused_a_gemm.cu: NVRTC refused it for sm_90a")

    monkeypatch.setattr(offline, "compile_cubin", refuse)
    with pytest.raises(CompileError, match="sm_90a"):
        instances.load(ONE, 0)
    assert not instances.is_loaded(ONE, 0)
