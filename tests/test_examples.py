"""The demos: they pass with right operations, and fail with wrong ones."""

from __future__ import annotations

import functools
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import k3cupy
from k3cupy.torch import torch_linear

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
OPERATION = "fused_mla_decode_q_concat_kv_cache_insert"
INSERT_OPERATIONS = {
    "bf16": "fused_mla_key_concat_kv_cache_insert",
    "fp8": "fused_mla_qkv_quant_kv_cache_fp8_insert",
    "fp8_ds_mla": "fused_mla_key_concat_ds_mla_insert",
}
CONTEXT_OPERATIONS = {
    "bf16": "fused_mla_kv_concat",
    "fp8": "fused_mla_kv_concat_quant_fp8",
    "fp8_ds_mla": "fused_mla_kv_concat",
}
FORMATS = ["bf16", "fp8", "fp8_ds_mla"]
DECODE, PREFILL = "mla_decode_step", "mla_prefill_decode"
MODEL, FALLBACKS = "low_latency_model", "explain_fallbacks"
SMALL = {
    DECODE: ["--tokens", "3", "--steps", "2", "--device", "cpu"],
    PREFILL: ["--prompts", "2", "--longest", "9", "--chunk", "4", "--device", "cpu"],
    MODEL: ["--tokens", "2", "--device", "cpu"],
}
# Each script as `python examples/NAME.py ...` runs it, one after the other, in one process.
RUN_SCRIPTS = """
import contextlib, io, json, runpy, sys

runs = {}
for path, *arguments in json.loads(sys.argv[1]):
    sys.argv = [path, *arguments]
    status = 0
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            status = end.code
    runs[path] = status, out.getvalue()
print(json.dumps(runs))
"""
both_demos = pytest.mark.parametrize("name", [DECODE, PREFILL])


def run_demo(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small take several threads longer, and the other workers want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def weights_of(
    random: Callable[..., Any], state: bytes, device: str, *heads: int
) -> tuple[Any, torch.Tensor]:
    """The weights that a generator in this state makes, and its state behind them."""
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return random(generator, torch.device(device), *heads), generator.get_state()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A demo as a module, so that a test can break the operations under it.

    The same random weights are made once, not once a test: they are most of a small run's time.
    """
    monkeypatch.syspath_prepend(str(EXAMPLES))
    weights = importlib.import_module("mla_layer").Weights
    random = weights.random

    def remembered(generator: torch.Generator, device: torch.device, *heads: int) -> Any:
        state = generator.get_state().numpy().tobytes()
        made, behind = weights_of(random, state, str(device), *heads)
        generator.set_state(behind)
        return made

    monkeypatch.setattr(weights, "random", remembered)
    return importlib.import_module


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script prints without a GPU; each has ended well."""
    commands = [
        [str(EXAMPLES / f"{name}.py"), *arguments]
        for name, arguments in (
            (DECODE, SMALL[DECODE]),
            (PREFILL, SMALL[PREFILL]),
            (MODEL, ["--tokens", "1", "--tokens", "16", "--device", "cpu"]),
            (FALLBACKS, []),
        )
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN_SCRIPTS, json.dumps(commands)],
        cwd=tmp_path_factory.mktemp("scripts"),
        env={
            **os.environ,
            "COLUMNS": "200",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            # The folder of a script is on its path; these all lie in the same one.
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ["PYTHONPATH"]]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(done.stdout)
    for path, (status, printed) in runs.items():
        assert not status, f"{path} ended with {status}:\n{printed}"
    return {Path(path).stem: printed for path, (_, printed) in runs.items()}


in_one_process = pytest.mark.xdist_group("examples")


@in_one_process
@both_demos
def test_demo_runs_as_a_script(name: str, scripts: dict[str, str]) -> None:
    assert "All outputs agree with plain PyTorch" in scripts[name]
    assert "Why this epilogue: " in scripts[name]
    assert ("Why this query front: " in scripts[name]) is (name == DECODE)


@both_demos
@pytest.mark.parametrize(
    "options",
    [("--kv-cache", name) for name in FORMATS[1:]] + [("--rope", "--kv-cache", "fp8"), ("--rope",)],
    ids=" ".join,
)
def test_demo_passes_on_the_cpu(
    name: str, options: tuple[str, ...], load: Callable[[str], ModuleType]
) -> None:
    arguments = [*SMALL[name], *options]
    result = CliRunner().invoke(load(name).main, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "All outputs agree with plain PyTorch" in result.output
    assert "Why this epilogue: " in result.output


@pytest.mark.gpu
@both_demos
@pytest.mark.parametrize("rope", [(), ("--rope",)], ids=["no rope", "rope"])
@pytest.mark.parametrize("kv_cache", FORMATS)
def test_demo_passes_on_the_gpu(
    name: str, kv_cache: str, rope: tuple[str, ...], tmp_path: Path
) -> None:
    result = run_demo(name, "--device", "cuda", "--kv-cache", kv_cache, *rope, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "speed-up" in result.stdout
    assert "All outputs agree with plain PyTorch" in result.stdout


@pytest.mark.parametrize("name", [DECODE, PREFILL, MODEL])
@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
def test_demo_says_when_there_is_no_gpu(name: str, load: Callable[[str], ModuleType]) -> None:
    result = CliRunner().invoke(load(name).main, ["--device", "cuda"])
    assert result.exit_code == 2
    assert "expected a GPU that PyTorch can use, got none" in result.output


def fails(demo: ModuleType, *options: str) -> None:
    result = CliRunner().invoke(demo.main, [*SMALL[demo.__name__], *options])
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output


# Decode


def drop_one_write(operation: Any, call: dict[str, Any]) -> Any:
    slots = call["slot_mapping"].clone()
    slots[-1] = -1
    return operation(**{**call, "slot_mapping": slots})


def write_zeros_for_one_row(operation: Any, call: dict[str, Any]) -> Any:
    rows = call["kv_cache"].view(-1, call["kv_cache"].shape[-1])
    mqa_q = operation(**call)
    rows[call["slot_mapping"][0]] = 0
    return mqa_q


def swap_two_rows(operation: Any, call: dict[str, Any]) -> Any:
    return operation(**{**call, "slot_mapping": call["slot_mapping"].flip(0)})


def return_nan(operation: Any, call: dict[str, Any]) -> Any:
    result = operation(**call)
    for tensor in result if isinstance(result, tuple) else (result,):
        tensor.view(torch.uint8).fill_(0xFF)
    return result


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize(
    "fault", [drop_one_write, write_zeros_for_one_row, swap_two_rows, return_nan]
)
def test_decode_demo_fails_when_the_epilogue_is_wrong(
    fault: Any,
    kv_cache: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operation = getattr(k3cupy, OPERATION)
    monkeypatch.setattr(k3cupy, OPERATION, lambda **call: fault(operation, call))
    fails(load(DECODE), "--kv-cache", kv_cache)


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize(
    "fault", [drop_one_write, write_zeros_for_one_row, swap_two_rows, return_nan]
)
def test_decode_demo_fails_when_the_query_front_is_wrong(
    fault: Any,
    kv_cache: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operation = k3cupy.fused_mla_decode_query
    monkeypatch.setattr(k3cupy, "fused_mla_decode_query", lambda **call: fault(operation, call))
    fails(load(DECODE), "--kv-cache", kv_cache)


def test_decode_demo_fails_when_the_values_are_wrong(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = k3cupy.fused_mla_decode_value
    monkeypatch.setattr(
        k3cupy, "fused_mla_decode_value", lambda *args, **options: values(*args, **options).flip(0)
    )
    fails(load(DECODE))


# Prefill


def turn_nothing(operation: Any, call: dict[str, Any]) -> Any:
    return operation(**{**call, "positions": torch.zeros_like(call["positions"])})


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize(
    "fault", [drop_one_write, write_zeros_for_one_row, swap_two_rows, turn_nothing, return_nan]
)
def test_prefill_demo_fails_when_an_insert_is_wrong(
    fault: Any,
    kv_cache: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = INSERT_OPERATIONS[kv_cache]
    operation = getattr(k3cupy, name)
    monkeypatch.setattr(k3cupy, name, lambda **call: fault(operation, call))
    fails(load(PREFILL), "--kv-cache", kv_cache, "--rope")


def forget_k_pe(operation: Any, call: dict[str, Any]) -> Any:
    return operation(**{**call, "k_pe": torch.zeros_like(call["k_pe"])})


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize("fault", [forget_k_pe, return_nan])
def test_prefill_demo_fails_when_the_context_is_wrong(
    fault: Any,
    kv_cache: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = CONTEXT_OPERATIONS[kv_cache]
    operation = getattr(k3cupy, name)
    monkeypatch.setattr(k3cupy, name, lambda **call: fault(operation, call))
    fails(load(PREFILL), "--kv-cache", kv_cache)


# Tensor parallelism


# A process that becomes two, each of them one of torchrun's ranks.
RUN_RANKS = """
import os, runpy, sys
import k3cupy, torch

second = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if second else "1"
sys.argv = sys.argv[1:]
status = 0
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    status = end.code or 0
if second:
    sys.exit(status or os.waitpid(second, 0)[1])
sys.stdout.flush()
os._exit(status)
"""


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """The example's ranks with gloo, in the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    example = str(EXAMPLES / "tensor_parallel_decode.py")
    options = ["--device", "cpu", "--heads", "2", "--tokens", "2"]
    done = subprocess.run(
        [sys.executable, "-c", RUN_RANKS, example, *options],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ["PYTHONPATH"]]),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 heads on 2 x the CPU, 1 a rank" in done.stdout
    assert "All ranks agree with one alone" in done.stdout


def test_a_share_that_is_lost_is_found(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process as one of two ranks, whose sum is its own part alone."""
    example = load("tensor_parallel_decode")
    monkeypatch.setattr(example.dist, "all_reduce", lambda tensor: None)
    assert example.run(2, 1, 0, torch.device("cpu"), 0, 2, None)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*module, str(EXAMPLES / "tensor_parallel_decode.py"), "--json", "times.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in a CUDA graph: worst relative error" in done.stdout
    times = json.loads((tmp_path / "times.json").read_text(encoding="utf-8"))["us"]
    assert all(0 < times[name] < 10_000 for name in ("one", "all"))


# Low-latency linear


@in_one_process
def test_model_demo_passes_on_the_cpu(scripts: dict[str, str]) -> None:
    printed = scripts[MODEL]
    assert "installed in 6 of 7 linear layers" in printed
    assert "left alone: it has a bias" in printed
    assert "0 of 12 calls ran a kernel of k3cupy" in printed
    assert "All outputs agree with plain PyTorch" in printed


@pytest.mark.gpu
def test_model_demo_passes_on_the_gpu(tmp_path: Path) -> None:
    result = run_demo(MODEL, "--device", "cuda", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "speed-up" in result.stdout
    assert "fused_a" in result.stdout
    assert "All outputs agree with plain PyTorch" in result.stdout


def one_element_off(out: torch.Tensor) -> None:
    out[..., 0] += out.abs().max()


def one_row_nan(out: torch.Tensor) -> None:
    out[-1] = float("nan")


@pytest.mark.parametrize("fault", [one_element_off, one_row_nan])
@pytest.mark.parametrize("shape", [(1536, 128), (2304, 1536)], ids=["f_b", "q_b"])
def test_model_demo_fails_when_a_layer_is_wrong(
    fault: Callable[[torch.Tensor], None],
    shape: tuple[int, int],
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = torch_linear.LowLatencyLinear
    run = layer.forward

    def faulty(self: Any, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(self, input)
        if tuple(self.weight.shape) == shape:
            fault(out)
        return out

    monkeypatch.setattr(layer, "forward", faulty)
    fails(load(MODEL))


def names_each_reason(printed: str) -> None:
    text = " ".join(printed.replace("│", " ").split())
    found = (
        "6285",
        "one 6 bytes past",
        "inner stride 2",
        "strides (1, 2304)",
        "float16",
        "float32",
    )
    for words in (*found, "more", "200", "shape [2304]", "one that requires grad"):
        assert f"got {words}" in text, words
    assert text.count("PyTorch's linear") == 10
    assert "2 calls ran a kernel of k3cupy" in text


@in_one_process
def test_fallback_demo_names_each_reason(scripts: dict[str, str]) -> None:
    names_each_reason(scripts[FALLBACKS])


@pytest.mark.gpu
def test_fallback_demo_names_each_reason_on_the_gpu(tmp_path: Path) -> None:
    result = run_demo(FALLBACKS, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    names_each_reason(result.stdout)
