"""`k3cupy.compile`: what the compiler makes of kernels, for any GPU, on a machine without one."""

from __future__ import annotations

import contextlib
import json
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import H200
from helpers import BF16
from toolchain_helpers import HAS_DISASSEMBLER, NO_DISASSEMBLER, copy_of_sources, edit

import k3cupy
from k3cupy import compiling
from k3cupy.choose.table import KERNELS
from k3cupy.kernels.mla_decode import UNTUNED
from k3cupy.ops.warmup import wanted_of
from k3cupy.runtime import devices, offline, sources
from k3cupy.tuning import cuda_meter

ONE: dict[str, Any] = {"kv_cache": "bf16", "config": UNTUNED}
SINE = "const float s = angles.sine[i];"


@pytest.fixture(autouse=True)
def compiler() -> None:
    pytest.importorskip("cuda.core")


def test_what_an_instance_takes_on_any_gpu() -> None:
    for gpu, arch in (("h200", "sm_90"), ("NVIDIA A10", "sm_86"), ("sm_120", "sm_120")):
        report = k3cupy.compile("mla_decode", gpu=gpu, progress=False, **ONE)
        (kernel,) = report
        assert kernel.arch == arch and 16 <= kernel.registers <= 255
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack_bytes == 0
        assert kernel.code.startswith(b"\x7fELF") and "ELF" not in repr(kernel)
        assert kernel.shipped is None and not report.is_edited
        assert report.gpu.arch == arch in str(report)
        assert (
            str(kernel.registers) in str(report) and "<td>mla_decode.cu: " in report._repr_html_()
        )
        assert json.loads(json.dumps(report.to_dict()))["kernels"][0]["code"] == len(kernel.code)


def test_shared_memory_is_what_a_block_has() -> None:
    options = {"shapes": [(2112, 7168)], "tokens": 4, "strided": False}
    (fused,) = k3cupy.compile("fused_a_gemm", gpu="h200", progress=False, **options)
    config = k3cupy.explain_fused_a_gemm(
        torch.zeros(4, 7168, dtype=BF16), torch.zeros(2112, 7168, dtype=BF16), gpu="h200"
    ).config
    assert fused.dynamic_shared_bytes == config.shared_bytes > 0
    report = k3cupy.compile("mla_prefill", gpu="h200", progress=False, kv_cache="bf16")
    assert any(kernel.shared_bytes for kernel in report)


def test_every_source_has_an_operation_to_look_at_it_by() -> None:
    assert set(compiling._OF_SOURCES) == {module.SOURCE for module in KERNELS.values()}
    for op, options in compiling._OF_SOURCES.values():
        assert list(wanted_of(op, options)(H200))


def test_spills_are_told() -> None:
    log = "0 bytes gmem\n 8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
    log += "ptxas info : Used 40 registers, used 1 barriers, 8 bytes stack, 10240 bytes smem"
    assert compiling._taken(log) == (40, 12, 16, 8, 10240)
    with pytest.raises(k3cupy.ToolchainError, match="does not say what kernels take"):
        compiling._taken("")


def test_an_edit_stands_beside_what_was_shipped(tmp_path: Path) -> None:
    folder = copy_of_sources(tmp_path)
    same = k3cupy.compile(folder, gpu="h200", op="mla_decode", progress=False, **ONE)
    assert not same.is_edited and same[0].shipped is None and same.folder == folder
    more = "__shared__ volatile float kept[64]; kept[i] = angles.sine[i]; const float s = kept[i];"
    edit(folder / "mla/rope.cuh", SINE, more)
    options = {"gpu": "h200", "rope": True, "progress": False, **ONE}
    report = k3cupy.compile(str(folder), "mla_decode", **options)
    (kernel,) = report
    assert report.is_edited and "edited sources" in str(report)
    assert kernel.shipped is not None and kernel.shipped.code != kernel.code
    assert kernel.shipped.name_expression == kernel.name_expression
    assert (kernel.shipped.shared_bytes, kernel.shared_bytes) == (0, 256)
    assert "256 (shipped 0)" in str(report)
    assert sources.overridden() is None


def test_without_a_word_it_looks_at_what_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def compile_cubin(source: str, names: Sequence[str], arch: str, **_: Any) -> offline.Cubin:
        seen.append(source)
        return offline.Cubin(b"", {}, "Used 8 registers")

    monkeypatch.setattr(offline, "compile_cubin", compile_cubin)
    folder = copy_of_sources(tmp_path)
    k3cupy.compile(folder, gpu="h200", progress=False)
    assert set(seen) == {"mla_decode.cu"}, "nothing is edited"
    (folder / "skinny_gemm.cu").write_text("// edited")
    seen.clear()
    k3cupy.compile(folder, gpu="h200", progress=False)
    assert set(seen) == {"skinny_gemm.cu"}
    edit(folder / "mla/rope.cuh", SINE, f"{SINE} ")
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", str(folder))
    report = k3cupy.compile(progress=False, gpu="h200")
    assert set(seen) >= {"mla_decode.cu", "mla_prefill.cu", "mla_query.cu", "skinny_gemm.cu"}
    assert report.folder == folder


def test_a_source_that_does_not_compile(tmp_path: Path) -> None:
    """The log stands in the error once, with the file and the line."""
    folder = copy_of_sources(tmp_path)
    edit(folder / "mla/rope.cuh", SINE, "const float s = angle.sine[i];")
    with pytest.raises(k3cupy.CompileError) as caught:
        k3cupy.compile(folder, gpu="h200", progress=False)
    told = "".join(traceback.format_exception(caught.value))
    assert told.count("is undefined") == 1
    assert f"{folder / 'mla/rope.cuh'}(" in told
    assert f"{folder / 'mla_decode.cu'}: NVRTC refused it for sm_90" in told
    assert "default_program" not in told and "NVRTC_ERROR" not in told


@pytest.mark.parametrize("call", ["decode", "linear"])
def test_cpu_tensors_say_that_edits_are_not_looked_at(call: str, tmp_path: Path) -> None:
    """A source that does not compile is not to be taken for one that works."""
    x, weight = torch.ones(4, 128, dtype=BF16), torch.ones(256, 128, dtype=BF16)
    run = k3cupy.low_latency_linear if call == "linear" else k3cupy.fused_a_gemm
    folder = copy_of_sources(tmp_path)
    (folder / "fused_a_gemm.cu").write_text("does not compile")
    with k3cupy.source_dir(folder):
        with pytest.warns(UserWarning, match="neither compiled nor run.*k3cupy.compile") as found:
            run(x, weight)
        assert found[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(x, weight)  # once for what is there
            (folder / "fused_a_gemm.cu").write_text("nor does this")
            with pytest.raises(UserWarning, match="edited sources in"):
                run(x, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x, weight)


@pytest.mark.skipif(not HAS_DISASSEMBLER, reason=NO_DISASSEMBLER)
def test_machine_code_as_text() -> None:
    (kernel,) = k3cupy.compile("mla_decode", gpu="h200", progress=False, **ONE)
    assert "STG.E" in kernel.sass and "EXIT" in kernel.sass


def test_without_a_disassembler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(k3cupy.ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
        offline.disassembled(b"")


@pytest.mark.parametrize(
    ("arguments", "options", "told"),
    [
        ((), {"gpu": "h2"}, "^gpu: expected a100, "),
        (
            ("mla_decode", "mla_prefill"),
            {},
            "^op: expected None where the first",
        ),
        (("mla_decode",), {"kv_cache": "fp4", "gpu": "h200"}, "^kv_cache: expected "),
        (("mla_decode",), {"time": True, "gpu": "h200"}, "^time: expected False for a GPU"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], options: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        k3cupy.compile(*arguments, progress=False, **options)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="source_dir: expected an existing folder"):
        k3cupy.compile("/no/such/folder")


class Meter:
    """In place of the GPU's: edited kernels take longer."""

    wrong: str | None = None

    def __init__(self, targets: Any, device: int) -> None:
        assert device == 0

    def check(self, target: Any, candidate: Any) -> str | None:
        return self.wrong

    def time(self, target: Any, candidates: Sequence[Any], effort: Any) -> list[float]:
        is_edited = sources.directory() != sources.shipped()
        return [3.25 if is_edited else 2.5 for _ in candidates]

    def close(self) -> None:
        return None


def test_on_a_gpu_its_time_stands_beside_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "ordinal_of", lambda _: 0)
    monkeypatch.setattr(devices, "info", lambda _: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cuda_meter, "CudaMeter", Meter)
    folder = copy_of_sources(tmp_path)
    edit(folder / "mla/rope.cuh", SINE, f"{SINE} ")
    report = k3cupy.compile(folder, "mla_decode", rope=[False, True], progress=False, **ONE)
    timed, rope = report
    assert (timed.us, timed.timed) == (3.25, "16bit+same, M = 32")
    assert timed.shipped is not None and timed.shipped.us == 2.5
    assert (rope.us, rope.timed) == (None, "no call of the tuner's runs it")
    assert "3.25 (shipped 2.50)" in str(report)
    monkeypatch.setattr(Meter, "wrong", "row 3 differs")
    options = {"shapes": [(2112, 7168)], "tokens": 1, "weight_is_static": True}
    (product,) = k3cupy.compile(None, "skinny_gemm", progress=False, **options)
    assert (product.us, product.timed) == (None, "not timed, it is wrong: row 3 differs")


@pytest.mark.gpu
def test_times_on_a_gpu(tmp_path: Path) -> None:
    folder = copy_of_sources(tmp_path)
    edit(folder / "mla/rope.cuh", SINE, f"{SINE} ")
    report = k3cupy.compile(folder, "mla_decode", progress=False, **ONE)
    (kernel,) = report
    assert kernel.us is not None and kernel.shipped is not None and kernel.shipped.us is not None
    assert kernel.us > 0 and kernel.shipped.us > 0  # other tests run on this GPU at the same time
