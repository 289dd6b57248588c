"""`python -m k3cupy`: what it prints, and that a failure is one clear line."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from fake_device import H200
from toolchain_helpers import FakeGpu, FakeRuntimeError, fake_gpu

import k3cupy
from k3cupy import bundling, projections
from k3cupy.cli import main
from k3cupy.projections import preset_shapes
from k3cupy.runtime import config, devices, env, offline, toolchain
from k3cupy.runtime.devices import DeviceInfo

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")

KEYS = {
    "backend",
    "why",
    "gpus",
    "problems",
    "driver",
    "nvrtc",
    "headers",
    "cache",
    "bundles",
    "variables",
    "sources",
    "python",
    "platform",
    "packages",
}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_python_m_runs_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "k3cupy", "--version"]
    path = str(Path(k3cupy.__file__).parents[1])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": path}
    )
    assert (done.returncode, done.stdout) == (0, f"k3cupy, version {k3cupy.__version__}\n")


def test_help_names_every_command() -> None:
    code, output = run("--help")
    assert code == 0
    for name in ("show-config", "warmup"):
        assert name in main.commands
        assert name in output


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_help(name: str) -> None:
    code, output = run(name, "--help")
    assert code == 0
    text = output.split("\n\n")[1].strip()
    assert text.endswith("."), f"{name} has no sentence that says what it does"


def test_unknown_command() -> None:
    code, output = run("no-such-thing")
    assert code == 2
    assert "No such command" in output


def test_a_name_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an hour of measuring, the last line of it must not be an error."""
    monkeypatch.setattr(k3cupy, "show_config", lambda: click.echo("wrote größe-名.json"))
    result = CliRunner(charset="cp1252").invoke(main, ["show-config"])
    assert (result.exit_code, result.output) == (0, "wrote größe-\\u540d.json\n")


# show-config


def test_show_config_prints_the_report() -> None:
    code, output = run("show-config")
    assert code == 0
    for word in ("CUDA tensors run", "CPU tensors run", "headers", "cache", "packages", "numpy"):
        assert word in output
    assert f"k3cupy {k3cupy.__version__}" in output


def test_show_config_into_a_file() -> None:
    file = io.StringIO()
    k3cupy.show_config(file)
    assert "CUDA tensors run" in file.getvalue()


def test_show_config_does_not_break_paths_into_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file or a pipe there is no width to keep: what was found can be copied and searched."""
    long = tmp_path / ("a" * 60) / ("b" * 60)
    long.mkdir(parents=True)
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", str(long))
    file = io.StringIO()
    k3cupy.show_config(file)
    assert str(long.resolve()) in file.getvalue()


def test_config_info_keys_and_packages() -> None:
    info = k3cupy.config_info()
    assert set(info) == KEYS
    assert info["backend"] in ("cuda", "nothing")
    assert info["why"]
    assert isinstance(info["gpus"], list)
    assert info["packages"]["numpy"]
    assert Path(info["sources"]).is_dir()
    assert info["python"] == sys.version.split()[0]


@needs_no_gpu
def test_config_info_says_why_nothing_runs_without_a_gpu() -> None:
    info = k3cupy.config_info()
    assert info["backend"] == "nothing"
    assert info["gpus"] == []
    assert "GPU" in info["why"] or "CuPy" in info["why"]


def test_config_info_reports_a_wrong_source_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report must not fail where something is wrong: it is asked for then."""
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", "/no/such/folder")
    assert "/no/such/folder" in k3cupy.config_info()["sources"]
    assert k3cupy.config_info()["sources"].startswith("unknown: ")


def cupy_of(
    monkeypatch: pytest.MonkeyPatch, *gpus: DeviceInfo, driver: int = 12090, runtime: int = 12090
) -> FakeGpu:
    """A fake CuPy on a machine with some GPUs; of no driver and an old one CUDA says the same."""
    fake = fake_gpu(monkeypatch)
    fake.driver = driver
    cupy = fake.cupy()

    def count() -> int:
        if driver < runtime:
            raise FakeRuntimeError(
                "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
            )
        return len(gpus)

    cupy.cuda.runtime.getDeviceCount = count
    cupy.cuda.runtime.runtimeGetVersion = lambda: runtime
    monkeypatch.setattr(toolchain, "cupy", lambda: cupy)
    monkeypatch.setattr(devices, "info", lambda index: gpus[index])
    return fake


def shown() -> str:
    file = io.StringIO()
    k3cupy.show_config(file)
    return file.getvalue()


def test_show_config_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_of(monkeypatch, H200)
    monkeypatch.setattr(config, "_cuda_of_torch", lambda: 12)  # this machine's may be another
    text = shown()
    assert re.search(r"^CUDA tensors run +cuda: 1 GPU, compiler and headers found$", text, re.M)
    assert re.search(r"^gpus +0: NVIDIA H200, sm_90, 132 SMs, PDL yes$", text, re.M)
    assert "problems" not in text


def test_show_config_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = cupy_of(monkeypatch, H200)
    monkeypatch.setattr(type(fake), "nvrtc", property(no_nvrtc), raising=False)
    del fake.__dict__["nvrtc"]
    info = k3cupy.config_info()
    assert info["backend"] == "nothing"
    assert "NVRTC" in info["why"] and 'pip install "k3cupy[cu12]"' in info["why"]
    assert "to compile without a GPU either will do, and no driver is needed" in info["why"]
    assert "found" not in info["why"]
    assert shown().count("no libnvrtc.so here") == 1, "one reason is told once"


def test_show_config_with_a_gpu_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: int) -> DeviceInfo:
        raise FakeRuntimeError("cudaErrorDevicesUnavailable")

    cupy_of(monkeypatch, H200)
    monkeypatch.setattr(devices, "info", lost)
    assert re.search(r"^CUDA tensors run +nothing: cudaErrorDevicesUnavailable", shown(), re.M)


def test_show_config_with_damaged_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installation that was cut off leaves."""
    cupy_of(monkeypatch, H200)
    (tmp_path / "cupy-9.dist-info").mkdir()
    (tmp_path / "cupy-9.dist-info/METADATA").write_bytes(b"\xff\xfe")
    monkeypatch.syspath_prepend(tmp_path)
    packages = k3cupy.config_info()["packages"]
    assert "numpy" in packages
    assert "cupy" not in packages


def no_nvrtc(_: FakeGpu) -> Any:
    raise RuntimeError("no libnvrtc.so here")


@pytest.mark.parametrize(
    ("driver", "told", "row"),
    [(0, "there is no NVIDIA driver here", "none"), (11040, "is insufficient", "CUDA 11.4")],
    ids=["none", "old"],
)
def test_show_config_tells_no_driver_from_an_old_one(
    driver: int, told: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy_of(monkeypatch, H200, driver=driver)
    text = shown()
    assert re.search(rf"^CUDA tensors run +nothing: .*{told}", text, re.M)
    assert re.search(rf"^driver +{row}$", text, re.M)
    assert ("insufficient" in text) is (driver > 0)


def test_show_config_names_gpus_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    old = DeviceInfo(0, "Tesla T4", (7, 5), 40, 65_536)
    cupy_of(monkeypatch, old)
    info = k3cupy.config_info()
    assert info["gpus"] == ["0: Tesla T4, sm_75, 40 SMs, too old: needs sm_80"]
    assert (info["backend"], info["why"]) == (
        "nothing",
        "the kernels need a GPU of sm_80 or newer",
    )
    cupy_of(monkeypatch, old, replace(H200, index=1))
    info = k3cupy.config_info()
    assert (info["backend"], info["why"]) == ("cuda", "1 GPU, compiler and headers found")
    assert [line.partition("SMs, ")[2] for line in info["gpus"]] == [
        "too old: needs sm_80",
        "PDL yes",
    ]


@pytest.mark.parametrize(
    ("of_torch", "of_cupy", "told"),
    [("13.0", 12, True), ("12.8", 13, True), ("12.8", 12, False), (None, 12, False)],
)
def test_show_config_compares_the_cuda_of_torch_and_cupy(
    of_torch: str | None, of_cupy: int, told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = repr(of_torch)
    (tmp_path / "version.py").write_text(f"__version__ = '2'\ncuda: Optional[str] = {value}\n")
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    cupy_of(monkeypatch, H200, driver=13000, runtime=of_cupy * 1000)
    info = k3cupy.config_info()
    assert info["backend"] == "cuda"
    words = f"PyTorch is built for CUDA {(of_torch or '')[:2]}, CuPy for CUDA {of_cupy}"
    assert [words in problem for problem in info["problems"]] == [True] * told
    assert shown().count(words) == told


def test_show_config_names_two_cupys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    two = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: two.get(name) or real(name))
    cupy_of(monkeypatch, H200)
    fake = toolchain.cupy

    @functools.cache
    def cupy() -> Any:
        """CuPy warns while it is imported."""
        warnings.warn(f"\n{'-' * 80}\n\n  CuPy may not function correctly because", stacklevel=2)
        return fake()

    monkeypatch.setattr(toolchain, "cupy", cupy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = shown()
    assert "unknown" not in text
    assert text.count("cupy-cuda12x and cupy-cuda13x are installed over each other") == 1


def test_show_config_judges_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every call would be refused for, and what nobody reads, with CuPy and without."""
    cupy_of(monkeypatch, H200)
    monkeypatch.setattr(config, "_cuda_of_torch", lambda: 12)
    for name in list(env.settings()):
        monkeypatch.delenv(name)
    for name in ("K3CUPY_CHECK", "K3CUPY_BATCH_INVARIANT", "K3CUPY_VLLM_KV_READY"):
        monkeypatch.setenv(name, " 1")
    monkeypatch.setenv("K3CUPY_VLLM", "dsv3*")
    assert k3cupy.config_info()["problems"] == []
    flags = ("BATCH_INVARIANT", "CHECK", "NO_COMPILE", "VLLM_KV_READY")
    for name in flags:
        monkeypatch.setenv(f"K3CUPY_{name}", "maybe")
    monkeypatch.setenv("K3CUPY_CHEK", "1")
    monkeypatch.setenv("K3CUPY_OF_THE_TESTS", "1")
    told = "expected 0, false, off, no or 1, true, on, yes, got 'maybe'"
    expected = [f"K3CUPY_{name}: {told}" for name in flags]
    variables = env.__doc__ or ""
    for _ in range(2):
        problems = k3cupy.config_info()["problems"]
        (unknown,) = set(problems) - set(expected)
        assert [each for each in problems if each != unknown] == expected
        assert unknown == "K3CUPY_CHEK is no variable of k3cupy: K3CUPY_CHECK is"
        named = set(re.findall(r"^\| (K3CUPY_\w+)", variables, re.M))
        assert {*env._FLAGS, *env._OTHERS} == named
        monkeypatch.setattr(toolchain, "cupy", functools.partial(no_nvrtc, None))


def test_show_config_says_one_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise k3cupy.ToolchainError("CuPy does not import\n  (no such module)")

    monkeypatch.setattr(toolchain, "cupy", missing)
    text = shown()
    assert text.count("CuPy does not import") == 1
    assert re.search(r"^ {18}  \(no such module\)$", text, re.M), "each line of it in its column"
    for name in ("driver", "nvrtc"):
        assert re.search(rf"^{name} +unknown, for that reason$", text, re.M)


def test_show_config_where_there_is_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.cupy()  # or the first import would choose memory for the whole process
    monkeypatch.setenv("CUPY_CACHE_DIR", "~nobody-of-this-name/cache")
    assert k3cupy.config_info()["cache"].startswith("unknown: ")


def test_show_config_tells_that_kernels_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    assert k3cupy.config_info()["problems"] == [], "it will be made"
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    (told,) = k3cupy.config_info()["problems"]
    assert told.startswith("compiled kernels are not kept: ") and "`chmod go-w` it" in told
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert k3cupy.config_info()["problems"] == []
    monkeypatch.setattr(toolchain, "_warned", {})
    monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/of/nobody")
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        toolchain.warn_of_cache("no such folder")  # as the import of CuPy does
    (told,) = k3cupy.config_info()["problems"]
    assert told.startswith("compiled kernels are not kept: no such folder. Set")


def test_a_command_warns_without_a_line_of_python(capfd: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, for pytest collects warnings."""
    code = "import warnings, k3cupy.cli as cli; "
    code += "cli.k3cupy.show_config = lambda: warnings.warn('of\\nnothing'); "
    code += "cli.main(['show-config'])"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    assert capfd.readouterr().err == "Warning: of\nnothing\n"


# warmup


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(devices, "info", lambda _: H200)
    return fake_gpu(monkeypatch)


@needs_no_gpu
@pytest.mark.parametrize("options", [(), ("--device", "0")], ids=["current device", "device 0"])
def test_warmup_without_a_gpu_is_one_clear_line(options: tuple[str, ...]) -> None:
    code, output = run("warmup", "--kv-cache", "bf16", *options)
    assert code == 1
    lines = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert "GPU" in lines[0] or "CuPy" in lines[0]
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("options", "name", "found"),
    [
        (("--kv-cache", "fp4"), "kv_cache", "'fp4'"),
        (("--dtype", "float32"), "dtype", "'float32'"),
        (("--kv-cache", "fp8_ds_mla", "--query-fp8"), "query_fp8", "True"),
        (("--op", "mla_train"), "op", "'mla_train'"),
        (("--op", "mla_query", "--heads", "0"), "heads", "0"),
        (
            ("--op", "mla_norm", "--heads", "12"),
            "heads",
            r"\(12,\)\. Leave it out: mla_norm has no option heads",
        ),
        (
            ("--op", "mla_prefill", "--query-fp8"),
            "query_fp8",
            r"True\. Leave it out: mla_prefill has no option query_fp8",
        ),
        (
            ("--op", "mla_prefill", "--kv-inputs-ready"),
            "kv_inputs_ready",
            r"True\. Leave it out: mla_prefill has no option kv_inputs_ready",
        ),
        (
            ("--out-dtype", "float32"),
            "out_dtype",
            r"'float32'\. Leave it out: mla_decode has no option out_dtype",
        ),
    ],
)
def test_warmup_with_wrong_options_is_one_clear_line(
    options: tuple[str, ...], name: str, found: str
) -> None:
    code, output = run("warmup", *options)
    assert code == 1
    assert re.fullmatch(f"Error: {name}: expected .*, got {found}", output.strip())


def test_warmup_compiles_for_promises_formats_and_layouts(gpu: FakeGpu) -> None:
    options = ("--query-fp8", "--kv-inputs-ready", "--unaligned", "--dtype", "float16")
    code, _ = run("warmup", "--kv-cache", "bf16", *options)
    assert code == 0
    (name,) = gpu.compiled
    assert name.startswith("k3cupy::mla_decode_epilogue<__half, true, k3cupy::CacheFormat::kSame")
    assert ", false, true, false, " in name, "no RoPE, the promise, not aligned"


def test_warmup_of_the_query_for_the_heads_that_are_named(gpu: FakeGpu) -> None:
    """12 are the default, and with 24 another configuration runs."""
    options = ("--op", "mla_query", "--kv-cache", "fp8", "--tokens", "4")
    heads = [(), ("--heads", "12"), ("--heads", "24"), ("--heads", "12", "--heads", "24")]
    for named, new, ready in zip(heads, (1, 0, 1, 0), (1, 1, 1, 2), strict=True):
        before = len(gpu.compiled)
        code, output = run("warmup", *options, *named)
        assert code == 0, output
        assert len(gpu.compiled) - before == new
        assert f"{ready} kernels are ready" in output


def test_warmup_compiles_for_the_weights_of_a_preset(gpu: FakeGpu) -> None:
    options = ("--op", "skinny_gemm", "--tokens", "1", "--out-dtype", "float32")
    code, _ = run("warmup", "--preset", "glm-5.2-tp8", *options)
    assert code == 0
    of_preset = set(gpu.compiled)
    assert of_preset
    assert all(name.endswith(", float>") for name in of_preset)
    shapes = [f"--shape={n}x{k}" for n, k in preset_shapes("glm-5.2-tp8")]
    gpu.compiled.clear()
    assert run("warmup", *shapes, *options)[0] == 0
    assert set(gpu.compiled) <= of_preset
    code, output = run("warmup", "--preset", "glm-5.2", *shapes, *options)
    assert code == 2
    assert "one of --shape and --preset, not both" in output


def test_warmup_of_all_that_a_model_needs(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [projections.Projection(96, 512, "o_proj TP8")]
    monkeypatch.setattr(projections, "of_degree", lambda *_: few)
    monkeypatch.setattr(offline, "binary_of", lambda source, name, arch: f"{name}\0".encode())
    wanted = set(bundling.instances_of("glm-5.2", 8, H200))
    code, output = run("warmup", "--model", "glm-5.2", "--tp", "8")
    assert code == 0, output
    assert set(gpu.compiled) == {instance.name_expression for instance in wanted}
    assert f"{len(wanted)} kernels are ready" in output
    model = ["--model=kimi-k3", "--tp=8"]
    one_op = [*model, "--op", "skinny_gemm"]
    for words in (["--model", "glm-5.2"], ["--tp", "8"], [*model, "--rope"], one_op):
        code, output = run("warmup", *words)
        assert code == 2
        assert "--model and --tp go together" in output


def test_warmup_compiles_the_prefill_kernels(gpu: FakeGpu) -> None:
    code, output = run("warmup", "--op", "mla_prefill", "--rope", "--kv-cache", "fp8")
    assert code == 0
    assert f"{len(gpu.compiled)} kernels are ready" in output
    found = {name.split("<")[0].removeprefix("k3cupy::") for name in gpu.compiled}
    assert found == {"mla_qkv_quant", "mla_kv_concat", "mla_kv_concat_quant"}
    quant = [name for name in gpu.compiled if "mla_qkv_quant" in name]
    assert all("<__nv_bfloat16, true, true, " in name for name in quant), "with RoPE, aligned"
    casts = [name for name in gpu.compiled if "mla_kv_concat_quant" in name]
    assert {name.split(", ")[1] for name in casts} == {"false", "true"}, "k_pe of both types"


def test_warmup_of_one_prefill_operation(gpu: FakeGpu) -> None:
    code, _ = run("warmup", "--op", "fused_mla_kv_concat", "--unaligned")
    assert code == 0
    (name,) = gpu.compiled
    assert name.startswith("k3cupy::mla_kv_concat<false, ")


def test_warmup_says_how_many_are_ready(gpu: FakeGpu) -> None:
    code, output = run("warmup", "--kv-cache", "bf16", "--kv-cache", "fp8", "--rope")
    assert code == 0
    assert f"{len(gpu.compiled)} kernels are ready" in output
    assert all(", true, false, true, " in name for name in gpu.compiled), "with RoPE, aligned"
