"""The tuner on a GPU: small products, candidates that are wrong or cannot run, the choices used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import k3cupy
from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig
from k3cupy.ops import gemm_cache, gemm_tables
from k3cupy.runtime import devices
from k3cupy.timing import cold
from k3cupy.tuning import cuda_meter
from k3cupy.tuning.candidates import LINEAR, Candidate, Target, candidates
from k3cupy.tuning.cuda_meter import CudaMeter
from k3cupy.tuning.engine import Effort, measure

pytestmark = pytest.mark.gpu

SHAPE = (1536, 128)


@pytest.fixture(autouse=True)
def small_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few weights, and a cache of the test's own."""
    monkeypatch.setattr(cold, "COLD_BYTES", 4 << 20)
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path))
    gemm_tables.reload()
    yield
    monkeypatch.undo()
    gemm_tables.reload()


@pytest.fixture
def meter() -> Iterator[CudaMeter]:
    found = CudaMeter((SHAPE,), torch.cuda.current_device())
    yield found
    found.close()


def test_tuning_keeps_what_it_measures_and_uses_it() -> None:
    report = k3cupy.tune([SHAPE], tokens=[2, 8, 16], progress=False)
    assert report.num_measured == 6 and report.refused == ()
    gpu = devices.info(torch.cuda.current_device())
    assert report.path == gemm_cache.path_of(gpu)
    for entry in report.entries:
        every = [us for times in entry.times.values() for us in times.values()]
        assert all(0 < us < 1000 for us in (*every, entry.linear_us or 0))
        assert entry.chosen_us == min([*every, entry.linear_us])
        assert "fused_a" in entry.times and ("skinny" in entry.times) is (entry.tokens <= 8)
    again = k3cupy.tune([SHAPE], tokens=[2, 8, 16], progress=False)
    assert again.num_measured == 0 and again.entries[0].chosen == report.entries[0].chosen
    x = torch.randn(2, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(*SHAPE, device="cuda", dtype=torch.bfloat16)
    ran = k3cupy.explain_low_latency_gemm(x, weight)
    assert ran.source == "user cache"
    chosen = next(e.chosen for e in report.entries if e.tokens == 2 and not e.residual)
    assert ran.backend == (chosen.backend if chosen else "linear")
    assert ran.config == (chosen.config if chosen else None)


def test_a_module_is_tuned(tmp_path: Path) -> None:
    layer = torch.nn.Linear(128, 96, bias=False, dtype=torch.bfloat16, device="cuda")
    path = tmp_path / "export.json"
    report = k3cupy.tune(module=layer, tokens=[1], residual=False, export=path, progress=False)
    assert [(e.n, e.k, e.tokens) for e in report.entries] == [(96, 128, 1)]
    assert f'"gpu": "{report.gpu}"' in path.read_text()


@pytest.mark.parametrize("residual", [False, True])
def test_every_candidate_is_right(meter: CudaMeter, residual: bool) -> None:
    for tokens in (1, 5, 16, 64):
        target = Target(*SHAPE, tokens, residual)
        for candidate in candidates(Target(*SHAPE, tokens), {}, meter.device):
            assert meter.check(target, candidate) is None


def test_a_wrong_kernel_is_refused(meter: CudaMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(*SHAPE, 4)
    given = candidates(target, {}, meter.device)[:2]
    call_of = cuda_meter.call_of

    def spoilt(product: Any, candidate: Candidate) -> cold.Body:
        call = call_of(product, candidate)
        if candidate != given[0]:
            return call

        def slip(weight: torch.Tensor) -> None:
            call(weight)
            product.out[2, 77] += 8

        return slip

    monkeypatch.setattr(cuda_meter, "call_of", spoilt)
    found = measure(target, given, meter)
    (why,) = found.refused.values()
    assert given[0] in found.refused and why.startswith("element (2, 77) is ")
    assert [*found.entry.times["fused_a"]] == [given[1].config]


def test_what_cannot_run_is_refused(meter: CudaMeter) -> None:
    target = Target(*SHAPE, 16)
    too_few_tokens = FusedAGemmConfig(8, 16, 64, 2, 2, 4, 1, 1, 1)
    odd = FusedAGemmConfig(16, 16, 96, 2, 2, 4, 1, 1, 1)
    why = meter.check(target, Candidate("fused_a", too_few_tokens))
    assert why is not None and why.startswith("is refused: config: expected ")
    why = meter.check(target, Candidate("fused_a", odd))
    assert why is not None and why.startswith(("does not compile: ", "is refused: "))


def test_graphs_are_recorded_once_and_compiling_goes_on_meanwhile(meter: CudaMeter) -> None:
    """Kernels are loaded by other threads while this one captures."""
    target = Target(*SHAPE, 8)
    every = candidates(target, {}, meter.device)
    meter.compile(target, every)
    meter.compile(Target(*SHAPE, 64), candidates(Target(*SHAPE, 64), {}, meter.device))
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
    assert "2 products measured now, 0 before" in done.output
    assert (tmp_path / "e").is_file()
