"""The tuner on a GPU: small products, candidates that are wrong or cannot run, the choices used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import k3cupy
from k3cupy.choose import cache
from k3cupy.choose.table import GEMM, KERNELS
from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig
from k3cupy.runtime import devices
from k3cupy.timing import cold
from k3cupy.timing.decode_step import DecodeStep
from k3cupy.timing.prefill_step import PrefillStep
from k3cupy.timing.products import Product
from k3cupy.tuning.cuda_meter import CudaMeter
from k3cupy.tuning.engine import Effort, measure
from k3cupy.tuning.entries import LINEAR, Candidate
from k3cupy.tuning.targets import KINDS, GemmTarget, mla_targets

pytestmark = pytest.mark.gpu

SHAPE = (1536, 128)


@pytest.fixture(autouse=True)
def small_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few weights, and a cache of the test's own."""
    monkeypatch.setattr(cold, "COLD_BYTES", 4 << 20)
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path))
    cache.reload()
    yield
    monkeypatch.undo()
    cache.reload()


@pytest.fixture
def meter() -> Iterator[CudaMeter]:
    found = CudaMeter([GemmTarget(*SHAPE, 1)], torch.cuda.current_device())
    yield found
    found.close()


def test_tuning_keeps_what_it_measures_and_uses_it() -> None:
    report = k3cupy.tune([SHAPE], tokens=[2, 8, 16], progress=False)
    assert report.num_measured == 6 and report.refused == ()
    gpu = devices.info(torch.cuda.current_device())
    assert report.path == cache.path_of(GEMM, gpu.name)
    for entry in report.entries:
        every = [us for times in entry.times.values() for us in times.values()]
        assert all(0 < us < 1000 for us in every)
        assert entry.us == min(every)
        assert set(entry.times) == {"linear", "fused_a", "skinny"}
    again = k3cupy.tune([SHAPE], tokens=[2, 8, 16], progress=False)
    assert again.num_measured == 0 and again.entries[0].config == report.entries[0].config
    x = torch.randn(2, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(*SHAPE, device="cuda", dtype=torch.bfloat16)
    ran = k3cupy.explain_low_latency_gemm(x, weight)
    chosen = next(e for e in report.entries if e.size == 2 and "residual" not in e.problem)
    assert (ran.origin, ran.kernel, ran.config) == ("user", chosen.kernel, chosen.config)


def test_a_module_is_tuned(tmp_path: Path) -> None:
    layer = torch.nn.Linear(128, 96, bias=False, dtype=torch.bfloat16, device="cuda")
    path = tmp_path / "export.json"
    report = k3cupy.tune(module=layer, tokens=[1], residual=False, export=path, progress=False)
    assert [e.key for e in report.entries] == [("bfloat16 96x128", 1)]
    assert f'"gpu": "{report.gpu}"' in path.read_text()


@pytest.mark.parametrize("residual", [False, True])
def test_every_candidate_is_right(meter: CudaMeter, residual: bool) -> None:
    for tokens in (1, 5, 16, 64):
        target = GemmTarget(*SHAPE, tokens, residual)
        for candidate in GemmTarget(*SHAPE, tokens).candidates({}, meter.gpu):
            assert meter.check(target, candidate) is None


def test_a_wrong_kernel_is_refused(meter: CudaMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    target = GemmTarget(*SHAPE, 4)
    given = target.candidates({}, meter.gpu)[:2]
    call_of = Product.call

    def spoilt(product: Product, kernel: str, config: Any) -> cold.Body:
        call = call_of(product, kernel, config)
        if (kernel, config) != given[0]:
            return call

        def slip(weight: torch.Tensor) -> None:
            call(weight)
            product.out[2, 77] += 8

        return slip

    monkeypatch.setattr(Product, "call", spoilt)
    found = measure(target, given, meter)
    (why,) = found.refused.values()
    assert given[0] in found.refused and why.startswith("element (2, 77) is ")
    assert found.entry is not None
    assert [*found.entry.times["fused_a"]] == [given[1].config]


def test_what_cannot_run_is_refused(meter: CudaMeter) -> None:
    target = GemmTarget(*SHAPE, 16)
    too_few_tokens = FusedAGemmConfig(8, 16, 64, 2, 2, 4, 1, 1, 1)
    odd = FusedAGemmConfig(16, 16, 96, 2, 2, 4, 1, 1, 1)
    why = meter.check(target, Candidate("fused_a", too_few_tokens))
    assert why is not None and why.startswith("is refused: config: expected ")
    why = meter.check(target, Candidate("fused_a", odd))
    assert why is not None and why.startswith(("does not compile: ", "is refused: "))


def test_graphs_are_recorded_once_and_compiling_goes_on_meanwhile(meter: CudaMeter) -> None:
    """Kernels are loaded by other threads while this one captures."""
    target = GemmTarget(*SHAPE, 8)
    every = target.candidates({}, meter.gpu)
    meter.compile(target, every)
    later = GemmTarget(*SHAPE, 64)
    meter.compile(later, later.candidates({}, meter.gpu))
    some = [LINEAR, *every[:3]]
    for candidate in some[1:]:
        assert meter.check(target, candidate) is None
    first = meter.time(target, some, Effort.GLANCE)
    later = meter.time(target, some[::-1], Effort.FULL)
    assert all(0 < us < 1000 for us in (*first, *later))


def test_the_command_measures_and_shows(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from k3cupy.cli import main

    arguments = ["tune", "--shape", "1536x128", "--tokens", "4", "--export", str(tmp_path / "e")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "2 measured now, 0 before" in done.output
    assert (tmp_path / "e").is_file()


@pytest.mark.parametrize("op", ["mla_decode", "mla_prefill"])
def test_an_epilogue_is_tuned_and_uses_it(op: str) -> None:
    kind = KINDS[op][1]
    report = k3cupy.tune(op=op, kinds=[kind], tokens=[2, 16], num_heads=4, progress=False)
    assert report.num_measured == 2 and report.refused == ()
    for entry in report.entries:
        assert all(0 < us < 1000 for us in entry.times[op].values())
    if op == "mla_decode":
        ran = k3cupy.explain_mla_decode(**DecodeStep(kind, 16, 4).arguments)
    else:
        ran = k3cupy.explain_mla_prefill(kind, **PrefillStep(kind, 16, 4).arguments)
    assert (ran.origin, ran.config) == ("user", report.entries[-1].config)


@pytest.mark.parametrize("op", ["mla_norm", "mla_query", "mla_value"])
def test_a_step_of_a_layer_is_tuned(op: str) -> None:
    """Every candidate is right; the query front is timed beside separate kernels."""
    report = k3cupy.tune(op=op, tokens=[2, 16], num_heads=4, progress=False)
    assert report.num_measured == 2 * len(KINDS[op]) and report.refused == ()
    for entry in report.entries:
        assert len(entry.times[op]) == len(KERNELS[op].CANDIDATES)
        assert ("separate" in entry.times) is (op == "mla_query")
        assert all(0 < us < 1000 for of in entry.times.values() for us in of.values())


@pytest.mark.parametrize("step", [DecodeStep, PrefillStep])
def test_a_wrong_epilogue_is_refused(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    op = "mla_decode" if step is DecodeStep else "mla_prefill"
    (target,) = mla_targets(op, [KINDS[op][0]], [4], 4)
    meter = CudaMeter([target], torch.cuda.current_device())
    given = target.candidates({}, meter.gpu)[:2]
    run = step.run

    def slip(self: Any, config: Any, **options: Any) -> None:
        run(self, config, **options)
        if config == given[1].config:
            getattr(self, "out", self.arguments["kv_cache"]).view(torch.uint8).flatten()[0] += 1

    monkeypatch.setattr(step, "run", slip)
    found = measure(target, given, meter)
    meter.close()
    assert [*found.refused] == [given[1]] and "differs from" in found.refused[given[1]]
    assert found.entry is not None and [*found.entry.times[op]] == [given[0].config]


def test_long_prompts_take_turns() -> None:
    """Several sets of tensors, the graph holds launches of each."""
    (target,) = mla_targets("mla_prefill", ["fused_mla_kv_concat"], [4096], 2)
    meter = CudaMeter([target], torch.cuda.current_device())
    given = target.candidates({}, meter.gpu)[:2]
    assert [meter.check(target, candidate) for candidate in given] == [None, None]
    assert all(0 < us < 1000 for us in meter.time(target, given, Effort.FULL))
    meter.close()
