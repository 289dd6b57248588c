"""A process in which the fake vLLM of ``tests/fake_vllm`` can be imported, and calls of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import oracle
import pytest
import slow_kernels
import torch
from helpers import BF16, rope_table

from k3cupy.engines import vllm as engine
from k3cupy.engines import vllm_facts as facts
from k3cupy.engines.report import Target

FAKE = Path(__file__).parent / "fake_vllm"
E4M3 = torch.float8_e4m3fn
TOKENS, HEADS, BLOCK = 3, 2, 16


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``k3cupy.engines.vllm`` in a process that has not imported vLLM yet; its operators are on the
    CPU."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.delenv("K3CUPY_VLLM", raising=False)
    monkeypatch.setattr(engine, "_KEY", "CPU")
    fresh = {name: Target(name, engine._NOT_ASKED) for name in facts.TARGETS}
    monkeypatch.setattr(engine, "_targets", fresh)
    slow_kernels.CALLS.clear()
    finders = list(sys.meta_path)
    yield engine
    engine.uninstall()
    assert sys.meta_path == finders
    operators = sys.modules.get(facts.CUSTOM_OPS)
    if operators is not None:
        operators.LIBRARY._destroy()
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def imported(name: str = facts.CUSTOM_OPS) -> Any:
    """Import a module of the fake vLLM, as it would itself."""
    return importlib.import_module(name.partition(":")[0])


class Call(NamedTuple):
    """One call of an operator.

    Attributes:
        name: of the operator.
        args: its arguments.
        written: those of them that it may write.
    """

    name: str
    args: tuple[Any, ...]
    written: tuple[torch.Tensor, ...]

    def run(self) -> None:
        """Call the operator."""
        getattr(torch.ops._C, self.name)(*self.args)

    def __call__(self) -> list[torch.Tensor]:
        """Call the operator and return the bits of what it may have written."""
        self.run()
        return [oracle.bits(t) for t in self.written]


def call_of(name: str, *, rope: bool = False, device: str = "cpu", seed: int = 3) -> Call:
    """A call of an operator on random values; its outputs hold zeros, its cache ones."""
    rng = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(BF16).to(device)

    def out(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def scale(value: float) -> torch.Tensor:
        return torch.tensor([value], device=device)

    t, h = TOKENS, HEADS
    slots = torch.tensor([17, -1, 4], device=device)
    fp8, ds_mla = "fp8" in name, "ds_mla" in name
    kind = E4M3 if fp8 else torch.uint8 if ds_mla else BF16
    width = 656 if ds_mla else 576
    cache = torch.ones((2, BLOCK, width), device=device).to(kind)
    turns = (torch.tensor([0, 2, 1], device=device), quarter_turns().to(device)) if rope else ()
    if name == facts.GEMM:
        output = out(t, 48)
        return Call(name, (output, rand(t, 64), rand(48, 64).t(), True), (output,))
    if "_decode_" in name:
        mqa_q = out(t, h, 576, dtype=E4M3 if fp8 else BF16)
        inputs = (rand(t, h, 512), rand(t, h, 64), rand(t, 512), rand(t, 64))
        scales = (scale(0.5), scale(0.25)) if fp8 else ()
        args = (*inputs, mqa_q, cache, slots, *scales, BLOCK, *turns)
        return Call(name, args, (mqa_q, cache))
    k_nope, k_pe, v = rand(t, h, 128), rand(t, 64), rand(t, h, 128)
    if name.endswith("kv_concat"):
        k_out = out(t, h, 192)
        return Call(name, (k_nope, k_pe, k_out), (k_out,))
    outs = [out(t, h, width, dtype=E4M3) for width in (192, 192, 128)]
    if name.endswith("kv_concat_quant_fp8"):
        return Call(name, (k_nope, k_pe, v, *outs[1:]), tuple(outs[1:]))
    q, kv_c = rand(t, h, 192), rand(t, 512)
    if fp8:
        inputs = (q, k_nope, k_pe, kv_c, v, *outs, cache, slots)
        scales = tuple(map(scale, (0.5, 1.5, 2.0, 0.25)))
        return Call(name, (*inputs, *scales, BLOCK, *turns), (q, *outs, cache))
    k_out = out(t, h, 192)
    args = (q, k_nope, k_pe, kv_c, k_out, cache, slots, BLOCK, *turns)
    return Call(name, args, (q, k_out, cache))


def quarter_turns() -> torch.Tensor:
    """A table whose results have no rounding: cosines and sines are 0, 1 and -1."""
    table = rope_table(4)
    cos = torch.tensor([1.0, 0.0, -1.0, 0.0]).repeat_interleave(32).reshape(4, 32)
    sin = torch.tensor([0.0, 1.0, 0.0, -1.0]).repeat_interleave(32).reshape(4, 32)
    return torch.cat((cos, sin), -1).to(table.dtype)


class Worker:
    """What vLLM's warm-up is given."""

    def __init__(self, model: torch.nn.Module, sizes: Any) -> None:
        compilation = SimpleNamespace(cudagraph_capture_sizes=sizes)
        model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.vllm_config = SimpleNamespace(
            compilation_config=compilation, model_config=model_config
        )
        self._model = model

    def get_model(self) -> torch.nn.Module:
        return self._model
