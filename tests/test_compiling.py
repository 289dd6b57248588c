"""`k3cupy.compile`: what the compiler makes of kernels, for any GPU, on a machine without one."""

from __future__ import annotations

import contextlib
import html
import json
import re
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_signatures import signatures, template_arguments
from fake_device import H200
from helpers import BF16
from toolchain_helpers import HAS_DISASSEMBLER, NO_DISASSEMBLER, copy_of_sources, edit

import k3cupy
from k3cupy.choose.table import KERNELS
from k3cupy.compiling import assembled
from k3cupy.compiling.looks import OF_SOURCES
from k3cupy.kernels.mla_decode import UNTUNED
from k3cupy.runtime import devices, offline, sources, toolchain
from k3cupy.tuning import cuda_meter

ONE: dict[str, Any] = {"kv_cache": "bf16", "config": UNTUNED}
SINE = "const float s = angles.sine[i];"
NORM_CONFIG = KERNELS["mla_norm"].UNTUNED


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


def test_a_missing_compiler_is_told_before_the_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise k3cupy.ToolchainError("there is no compiler here")

    monkeypatch.setattr(toolchain, "cuda_core", refuse)
    with pytest.raises(k3cupy.ToolchainError, match="there is no compiler here"):
        k3cupy.compile("mla_norm", gpu="h200")
    assert capsys.readouterr().err == ""


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
    assert set(OF_SOURCES) == {module.SOURCE for module in KERNELS.values()}
    for look in OF_SOURCES.values():
        assert look.instances(H200) and not look.left_out(H200)


@pytest.mark.parametrize("source", OF_SOURCES)
def test_an_edit_is_looked_at_with_every_flag_both_ways(source: str) -> None:
    """Every kernel of the source is there, and its flags, types and formats."""
    text = (sources.shipped() / source).read_text(encoding="utf-8")
    arguments: dict[str, list[tuple[str, ...]]] = {}
    for instance in OF_SOURCES[source].instances(H200):
        kernel, values = template_arguments(instance.name_expression)
        arguments.setdefault(kernel, []).append(values)
    assert sum(map(len, arguments.values())) <= 20
    kernels = signatures(text)
    assert set(arguments) == set(kernels)
    for name, kernel in kernels.items():
        for place, parameter in enumerate(kernel.template):
            seen = {values[place] for values in arguments[name] if len(values) > place}
            if re.search(rf"\bbool {parameter}\b", text):
                assert seen == {"true", "false"}, (name, parameter)
            if parameter == "T":
                assert seen == {"__nv_bfloat16", "__half"}, name
            if parameter == "kProduct" and name == "fused_a_gemm":
                assert len(seen) == 3


PTXAS = """ptxas info : (C7520) Potential Performance Loss: serialized in function '_Zother'
ptxas info    : 73 bytes gmem
ptxas info    : Compiling entry function '_Zother' for 'sm_90'
ptxas info    : Function properties for _Zother
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 90 registers, used 1 barriers, 77 bytes smem
ptxas info    : Compiling entry function '_Zours' for 'sm_90'
ptxas info    : Function properties for _Zours
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers{}, 10240 bytes smem
ptxas info    : Compile time = 12.3 ms
{}"""
CALLED = """ptxas info    : Function properties for _Zcalled
ptxas         .     24 bytes stack frame, 100 bytes spill stores, 200 bytes spill loads
"""


def test_spills_are_told() -> None:
    """Those of this kernel alone, and of the functions that it calls."""
    log = f"/a.cu(7): remark: now with 99 registers, 5 bytes smem\n\n{PTXAS}"
    assert assembled.taken(log.format("", ""), "_Zours") == (40, 12, 16, 8, 10240)
    calls = log.format(", 32 bytes cumulative stack size", CALLED)
    assert assembled.taken(calls, "_Zours") == (40, 112, 216, 32, 10240)
    assert assembled.taken(calls, "_Zother") == (90, 4, 4, 0, 77)
    for nothing, symbol in (("", "_Zours"), (log, "_Zour")):
        with pytest.raises(k3cupy.ToolchainError, match="does not say what kernels take"):
            assembled.taken(nothing, symbol)


def test_warnings_are_told_once() -> None:
    (remark, lost) = assembled.warnings_of(f"/a.cu(7): remark: it\n  it\n  ^\n\n{PTXAS * 2}")
    assert remark == "/a.cu(7): remark: it\n  it\n  ^"
    assert lost == "ptxas info : (C7520) Potential Performance Loss: serialized"


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


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that a compiler gets which takes everything."""
    sources_seen: list[str] = []

    def compile_cubin(source: str, names: Sequence[str], arch: str, **_: Any) -> offline.Cubin:
        sources.load(source)
        sources_seen.append(source)
        return offline.Cubin(b"", {name: "_Zours" for name in names}, PTXAS)

    monkeypatch.setattr(offline, "compile_cubin", compile_cubin)
    return sources_seen


def test_without_a_word_it_looks_at_what_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
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


def told_everywhere(report: k3cupy.CompileReport) -> str:
    """The notes of a report, which stand in its text, its HTML and its plain values."""
    assert report.to_dict()["notes"] == list(report.notes)
    for note in report.notes:
        assert "".join(note.split()) in "".join(str(report).split()), "long names are broken"
        assert html.escape(note) in report._repr_html_()
    return "\n".join(report.notes)


def test_what_is_not_looked_at_is_told(tmp_path: Path, seen: list[str]) -> None:
    folder = copy_of_sources(tmp_path)
    edit(folder / "mla/rope.cuh", SINE, f"{SINE} ")
    report = k3cupy.compile(folder, gpu="a100", progress=False)
    assert set(seen) == {"mla_decode.cu", "mla_prefill.cu"}
    assert "mla_query: NVIDIA A100-SXM4-80GB has no clusters" in told_everywhere(report)
    (folder / "mla_norm.cu").unlink()
    report = k3cupy.compile(folder, gpu="h200", progress=False)
    assert "mla_norm.cu cannot be read" in told_everywhere(report)
    edit(folder / "gemm/ring.cuh", "#pragma once", "#pragma once ")
    report = k3cupy.compile(folder, gpu="a100", progress=False)
    assert "fused_a_gemm_mapped_x, fused_a_gemm with Product::kWarpgroup" in told_everywhere(report)


@pytest.mark.parametrize(
    ("broken", "op", "options", "told"),
    [
        ("mla_query.cu", None, {"gpu": "a100"}, "got NVIDIA A100-.* mla_query: .* no clusters of"),
        (
            "mla_query.cu",
            "mla_query",
            {"gpu": "h200", "tokens": 40, "config": True},
            "40 tokens are",
        ),
        (
            "mla_norm.cu",
            "low_latency_linear",
            {"shapes": [(2112, 7168)], "tokens": [64], "gpu": "a10"},
            "got NVIDIA A10. low_latency_linear: the framework's own linear",
        ),
    ],
)
def test_nothing_looked_at_is_no_success(
    broken: str, op: str | None, options: Any, told: str, tmp_path: Path
) -> None:
    folder = copy_of_sources(tmp_path)
    (folder / broken).write_text("does not compile")
    if options.get("config"):
        options = {**options, "config": KERNELS["mla_query"].UNTUNED}
    with pytest.raises(ValueError, match=f"^gpu: expected a GPU that has kernels of .*{told}"):
        k3cupy.compile(folder, op, progress=False, **options)


def test_a_missing_source_stops_only_what_needs_it(tmp_path: Path, seen: list[str]) -> None:
    folder = copy_of_sources(tmp_path)
    (folder / "mla_norm.cu").unlink()
    assert k3cupy.compile(folder, "mla_decode", gpu="h200", progress=False, **ONE).notes == ()
    for op in (None, "mla_norm"):
        with pytest.raises(k3cupy.ToolchainError, match=r"mla_norm\.cu cannot be read"):
            k3cupy.compile(folder, op, gpu="h200", progress=False)


def test_options_do_not_lead_away_from_what_was_edited(tmp_path: Path, seen: list[str]) -> None:
    folder = copy_of_sources(tmp_path)
    (folder / "mla_norm.cu").write_text("// edited")
    (norm,) = k3cupy.compile(folder, gpu="h200", dtype="float16", progress=False)
    assert "q_kv_rms_norms<__half, true, true" in norm.name_expression
    (folder / "mla_value.cu").write_text("// edited")
    report = k3cupy.compile(folder, gpu="h200", gate=True, progress=False)
    assert {kernel.source for kernel in report} == {"mla_value.cu"}
    assert "not looked at, for want of an option gate: mla_norm" in told_everywhere(report)
    for options, told in (
        ({"dtype": "float16", "kv_cache": "bf16"}, "^kv_cache: .* of mla_norm or mla_value, got"),
        ({"gate": True, "no_such": 1}, "^no_such: expected an option of mla_norm or mla_value"),
    ):
        with pytest.raises(TypeError, match=told):
            k3cupy.compile(folder, gpu="h200", progress=False, **options)
    (folder / "skinny_gemm.cu").write_text("// edited")
    with pytest.raises(TypeError, match=r"^op: .* none of them takes all of gate, residual"):
        k3cupy.compile(folder, gpu="h200", progress=False, gate=True, residual=True)
    unedited = copy_of_sources(tmp_path / "another")
    with pytest.raises(TypeError, match=r"^weight_is_static: .* mla_decode, .* nothing is edited"):
        k3cupy.compile(unedited, gpu="h200", progress=False, weight_is_static=True)


def test_no_kernel_differs(tmp_path: Path, seen: list[str]) -> None:
    """Edits of files that are part of no operation are named, and others are not."""
    folder = copy_of_sources(tmp_path)
    report = k3cupy.compile(folder, gpu="h200", progress=False)
    assert told_everywhere(report).startswith("no kernel differs from the package's: this is mla_d")
    assert len(report.notes) == 1
    (folder / "new.cuh").write_text("// new")
    (folder / "notes.txt").write_text("none of the compiler's")
    with (folder / "tuning/chain.cu").open("a") as file:
        file.write("// edited")
    report = k3cupy.compile(folder, gpu="h200", progress=False)
    assert "part of no operation: new.cuh, tuning/chain.cu" in told_everywhere(report)
    for name in "abcdef":
        (folder / f"{name}.h").write_text("// of another package")
    report = k3cupy.compile(folder, gpu="h200", progress=False)
    assert told_everywhere(report).endswith(": a.h, b.h, c.h, d.h, e.h, and 3 more")
    with (folder / "mla_norm.cu").open("a") as file:
        file.write('#include "new.cuh"')
    for name in "abcdef":
        (folder / f"{name}.h").unlink()
    report = k3cupy.compile(folder, gpu="h200", progress=False)
    assert (
        told_everywhere(report)
        == "not as in the package, and part of no operation: tuning/chain.cu"
    )


@pytest.mark.parametrize(
    ("source", "condition"),
    [("mla_norm.cu", "kWeightIsStatic"), ("mla_value.cu", "!(kHasGate && kVector)")],
)
def test_a_mistake_in_any_branch_is_found(source: str, condition: str, tmp_path: Path) -> None:
    folder = copy_of_sources(tmp_path)
    text = (folder / source).read_text(encoding="utf-8")
    body = text.index("{", text.index("__global__"))
    planted = f'{{ static_assert({condition}, "planted"); {text[body + 1 :]}'
    (folder / source).write_text(text[:body] + planted, encoding="utf-8")
    with pytest.raises(k3cupy.CompileError, match="planted"):
        k3cupy.compile(folder, gpu="h200", progress=False)


NORM = "const unsigned int token = blockIdx.x;"


def test_what_the_compiler_says_stands_under_the_table(tmp_path: Path) -> None:
    folder = copy_of_sources(tmp_path)
    edit(folder / "mla_norm.cu", NORM, f"int unused_one; {NORM}")
    edit(
        folder / "mla_norm.cu",
        "float epsilon, char* q",
        "int more, float epsilon, char* q",
    )
    source = folder / "mla_norm.cu"
    planted = '#warning "look here"\n#pragma message("now with 99 registers, 5 bytes smem")\n'
    source.write_text(planted + source.read_text(encoding="utf-8"), encoding="utf-8")
    report = k3cupy.compile(folder, gpu="h200", progress=False, dtype=["bfloat16", "float16"])
    shipped = k3cupy.compile("mla_norm", gpu="h200", progress=False, config=NORM_CONFIG)
    for kernel in report:
        assert kernel.registers < 99 and kernel.shared_bytes == shipped[0].shared_bytes
        parameters, *warnings = kernel.warnings
        assert "8 parameters of 8, 4, 8, 8, 4, 4, 8, 8 bytes" in parameters
        assert "7 of 8, 4, 8, 8, 4, 8, 8: the list of a kernel must stay" in parameters
        assert len(warnings) == 3 and "int unused_one" in warnings[2]
    assert all(kernel.warnings == () for kernel in shipped)
    for text in (str(report), report._repr_html_(), str(report[0]), report[0]._repr_html_()):
        for told in ("look here", "99 registers", "unused_one", "must stay as it is"):
            assert text.count(told) == 1, told
    assert repr(report[0]) == str(report[0]) and "q_kv_rms_norms<" in str(report[0])


def test_the_package_may_have_no_such_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    """An instance of one's own is no fault of the shipped file."""
    takes_all = offline.compile_cubin

    def compile_cubin(source: str, names: Sequence[str], arch: str, **options: Any) -> Any:
        if sources.directory() == sources.shipped() and "kFp8" in names[0]:
            raise k3cupy.CompileError("no such instance")
        return takes_all(source, names, arch, **options)

    monkeypatch.setattr(offline, "compile_cubin", compile_cubin)
    folder = copy_of_sources(tmp_path)
    (folder / "mla_decode.cu").write_text("// edited")
    report = k3cupy.compile(folder, gpu="h200", progress=False, rope=False)
    assert [kernel.shipped is None for kernel in report] == [
        "kFp8" in kernel.name_expression for kernel in report
    ]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("q_kv_rms_norms(", "another_name(", "those must stay as the package has them"),
        ("bool kVector, int kQueryWarps>", "bool kVector>", "those must stay as the package"),
        ("#include", "#include <vector>\n#include", "none of the headers that come with a host"),
        ("#include", "#include <cuda/std/array>\n#include", "none of the headers that come with"),
        ("", "\ufeff", "save it as UTF-8 without"),
    ],
)
def test_a_rule_that_an_edit_breaks_is_named(old: str, new: str, told: str, tmp_path: Path) -> None:
    folder = copy_of_sources(tmp_path)
    path = folder / "mla_norm.cu"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(k3cupy.CompileError) as caught:
        k3cupy.compile(folder, gpu="h200", progress=False, dtype="bfloat16")
    assert told in str(caught.value).splitlines()[-1]


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
        (("mla_norm",), {"time": "yes"}, "^time: expected None, True or False, got 'yes'$"),
        *(
            (("mla_norm",), {"max_workers": many}, "^max_workers: expected None, or threads from 1")
            for many in (-1, 0, "2", 1.5, True)
        ),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], options: Any, told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        k3cupy.compile(*arguments, progress=False, **options)


def test_a_time_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count", lambda: (_ for _ in ()).throw(NO_GPU))
    with pytest.raises(k3cupy.ToolchainError, match=r"^time: expected a GPU .*: none is here$"):
        k3cupy.compile("mla_norm", time=True, progress=False)


NO_GPU = k3cupy.ToolchainError("none is here")


@pytest.mark.parametrize("name", ["/no/such/folder", "mla_dec"])
def test_a_folder_that_is_not_there(name: str) -> None:
    expected = f"source_dir: expected an existing folder, got '{name}'. Or name an operation: mla_d"
    with pytest.raises(FileNotFoundError, match=expected):
        k3cupy.compile(name)


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
