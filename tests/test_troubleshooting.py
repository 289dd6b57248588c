"""The messages that the troubleshooting page quotes are those that people see."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_helpers import differs, prose
from fake_device import CudaTensor, FakeDevice
from test_cli import run
from toolchain_helpers import copy_of_sources, edit

import k3cupy
from k3cupy.runtime import toolchain

PAGE = Path(__file__).resolve().parents[1] / "docs/troubleshooting.md"
QUOTED = re.findall(r"^\| `([^`]+)` \|", prose(PAGE.read_text(encoding="utf-8")), re.MULTILINE)
BF16 = torch.bfloat16


def decode(change: Callable[[dict[str, torch.Tensor]], Any] = lambda given: None) -> Any:
    """A call of the decode epilogue, with some of its tensors changed."""
    given = {
        "ql_nope": torch.zeros(2, 12, 512, dtype=BF16),
        "q_pe": torch.zeros(2, 12, 64, dtype=BF16),
        "kv_c_normed": torch.zeros(2, 512, dtype=BF16),
        "k_pe": torch.zeros(2, 64, dtype=BF16),
        "kv_cache": torch.zeros(1, 64, 576, dtype=BF16),
        "slot_mapping": torch.tensor([0, 1]),
    }
    change(given)
    return k3cupy.fused_mla_decode_q_concat_kv_cache_insert(**given)


def changed(name: str, to: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda *_: decode(lambda given: given.update({name: to(given[name])}))


def reason(rows: int, n: int, k: int, gpu: str | None = "h200", stride: int = 0) -> str:
    x = torch.empty(rows, k + stride, dtype=BF16)[:, :k]
    found = k3cupy.explain_low_latency_gemm(x, torch.empty(n, k, dtype=BF16), gpu=gpu)
    return str(found.reason)


def without_cupy(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    toolchain.cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    toolchain.cupy()


def in_a_capture(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    FakeDevice(monkeypatch).capturing = True
    decode(lambda given: given.update({n: CudaTensor.of(t, 0) for n, t in given.items()}))


def slip_of_the_pen(_: pytest.MonkeyPatch, folder: Path) -> None:
    pytest.importorskip("cuda.core")
    copy = copy_of_sources(folder)
    edit(copy / "mla/rope.cuh", "angles.sine[i]", "angle.sine[i]")
    k3cupy.compile(copy, "mla_decode", gpu="sm_90", rope=True, kv_cache="bf16", progress=False)


def renamed_kernel(_: pytest.MonkeyPatch, folder: Path) -> str:
    pytest.importorskip("cuda.core")
    copy = copy_of_sources(folder)
    edit(copy / "mla_norm.cu", "q_kv_rms_norms(", "q_kv_norms(")
    with pytest.raises(k3cupy.CompileError) as caught:
        k3cupy.compile(copy, "mla_norm", gpu="sm_90", progress=False)
    return str(caught.value).splitlines()[-1]


def edit_on_the_cpu(_: pytest.MonkeyPatch, folder: Path) -> str:
    with pytest.warns(UserWarning) as told, k3cupy.source_dir(copy_of_sources(folder)):
        decode()
    return str(told[0].message)


def cpu_build_of_torch(*_: Any) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch is built for CUDA")
    torch.empty(1, device="cuda")


def no_gpu(*_: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("PyTorch finds a GPU")
    k3cupy.warmup("mla_decode")


def benchmark(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return run("bench", "host")[1].removeprefix("Error: ")


MAKERS: dict[str, Callable[[pytest.MonkeyPatch, Path], str | None]] = {
    "CuPy does not import": without_cupy,
    "the driver gives no GPU": no_gpu,
    "Torch not compiled": cpu_build_of_torch,
    "bench needs": benchmark,
    "gpu: expected": lambda *_: k3cupy.select_backend(4, 64, 64, gpu="h2"),
    "slot_mapping: ": changed("slot_mapping", torch.Tensor.float),
    "kv_cache: ": changed("kv_cache", torch.Tensor.float),
    "cache_scale_inv: ": changed("kv_cache", lambda t: t.to(torch.float8_e4m3fn)),
    "ql_nope: ": changed("ql_nope", lambda t: t.requires_grad_()),
    "x: expected at most 16": lambda *_: k3cupy.skinny_gemm(
        torch.zeros(17, 64, dtype=BF16), torch.zeros(64, 64, dtype=BF16)
    ),
    "source_dir: ": lambda _, folder: k3cupy.compile(folder / "none"),
    "...mla_decode.cu: ": slip_of_the_pen,
    "A call asks for a kernel": renamed_kernel,
    "... is not loaded": in_a_capture,
    "x: expected a CUDA tensor": lambda *_: reason(4, 2112, 7168, gpu=None),
    "x: expected a row stride": lambda *_: reason(4, 2112, 7168, stride=5),
    "x: expected at most 64": lambda *_: reason(100, 2112, 7168),
    "F.linear was faster": lambda *_: reason(64, 4608, 1536),
    "not measured here": lambda *_: reason(4, 2112, 7168, gpu="a100"),
    "CPU tensors run": edit_on_the_cpu,
}
"""The beginning of a message -> what makes it: it raises, or returns the text."""


@pytest.mark.parametrize("quoted", QUOTED)
def test_messages_of_the_page_are_real(
    quoted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (make,) = (make for beginning, make in MAKERS.items() if quoted.startswith(beginning))
    try:
        told = make(monkeypatch, tmp_path)
    except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
        told = str(error)
    assert told is not None, "nothing was refused"
    assert not differs(quoted, told), told


def test_every_message_is_on_the_page() -> None:
    assert len(QUOTED) == len(MAKERS)
