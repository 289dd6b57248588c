"""The tuner without a GPU: what it measures, what it stops early, what it refuses to record."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tune_helpers import GPU, H200, LINEAR_US, FakeMeter, made_up_us, run, use_fake_gpu

import k3cupy
from k3cupy import projections
from k3cupy.choose import cache, gemm
from k3cupy.choose.gemm import FUSED_A, SKINNY
from k3cupy.choose.table import Entry
from k3cupy.kernels import skinny_gemm
from k3cupy.timing.products import Product
from k3cupy.tuning import tune as tuning
from k3cupy.tuning.engine import Effort, measure, measure_all
from k3cupy.tuning.entries import LINEAR, Candidate, entry_from, times_of
from k3cupy.tuning.targets import GemmTarget, Target, gemm_targets, mla_targets

SHAPE = (2112, 7168)
HERE = GemmTarget(*SHAPE, 8)


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path))
    if request.node.get_closest_marker("gpu") is None:
        use_fake_gpu(monkeypatch)
    yield
    cache.reload()


# Which weights


def test_presets_take_their_degree_and_what_every_gpu_holds_whole() -> None:
    tp8 = projections.preset_shapes("kimi-k3-tp8")
    assert len(tp8) == 18
    assert (2112, 7168) in tp8, "replicated"
    assert (7168, 14336) in tp8, "nothing is said of its degree"
    assert (7168, 768) in tp8 and (7168, 768) in projections.preset_shapes("kimi-k3-tp16")
    assert (4608, 1536) not in tp8 and (4608, 1536) in projections.preset_shapes("kimi-k3-tp4")
    assert [len(projections.preset_shapes(model)) for model in projections.MODELS] == [33, 20, 8]
    for model in projections.MODELS:
        names = [n for n in projections.preset_names() if n.startswith(f"{model}-")]
        every = {shape for name in names for shape in projections.preset_shapes(name)}
        assert every == set(projections.preset_shapes(model))


def test_layers_of_a_degree_that_every_gpu_may_hold_too() -> None:
    assert (4096, 2048) in projections.preset_shapes("glm-5.2-tp8"), "the indexer's, replicated"
    assert (2048, 2048) not in projections.preset_shapes("glm-5.2-tp4")
    for name in ("deepseek-v3-tp8", "deepseek-v3-tp16"):
        found = projections.preset_shapes(name)
        assert (256, 7168) in found, "the router's, and at TP16 the shared expert's"
        assert len(found) == len(set(found))


@pytest.mark.parametrize("model", projections.MODELS)
def test_every_weight_has_a_name_and_every_kernel_takes_it(model: str) -> None:
    shapes = projections.shapes(model)
    assert all(p.name and p.n > 0 and p.k % 16 == 0 for p in shapes)
    assert len({(p.n, p.k, p.name) for p in shapes}) == len(shapes)
    assert projections._read(model)["source"]


def test_an_unknown_preset_is_refused_with_the_names() -> None:
    told = "model: expected kimi-k3 or deepseek-v3 or glm-5.2, got "
    for model, more in (
        ("kimi-k2", "'kimi-k2'"),
        (None, "None"),
        ("glm-5.2-tp8", "'glm-5.2-tp8'. preset_shapes('glm-5.2-tp8') has those of a preset"),
    ):
        for of in (projections.shapes, projections.degrees):
            with pytest.raises(ValueError, match=f"^{re.escape(told + more)}$"):
                of(model)
    with pytest.raises(ValueError, match=r"preset: expected kimi-k3 or .*-tp8, got 'kimi-k2'"):
        projections.preset_shapes("kimi-k2")


class Block(torch.nn.Module):
    """Two layers of one shape, and some that no kernel of ours takes."""

    def __init__(self) -> None:
        super().__init__()
        kinds: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "device": "meta"}
        self.first = torch.nn.Linear(256, 96, **kinds)
        self.second = torch.nn.Linear(256, 96, **kinds)
        self.down = torch.nn.Linear(96, 256, **kinds)
        self.biased = torch.nn.Linear(96, 64, **{**kinds, "bias": True})
        self.wide = torch.nn.Linear(96, 64, **{**kinds, "dtype": torch.float32})
        self.odd = torch.nn.Linear(100, 64, **kinds)


a_block = Block()


def make_block() -> Block:
    return Block()


def no_module() -> int:
    return 3


@pytest.mark.parametrize("name", ["Block", "a_block", "make_block"])
def test_the_shapes_of_a_module(name: str) -> None:
    assert projections.module_shapes(f"test_tune:{name}") == ((96, 256), (256, 96))
    assert projections.module_shapes(a_block) == ((96, 256), (256, 96))


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        ("test_tune", ValueError, "module: expected package.module:name, got 'test_tune'"),
        ("no_such_package:x", ValueError, "module: expected .*, got 'no_such_package:x'"),
        ("test_tune:no_such", ValueError, "module: expected .*, got 'test_tune:no_such'"),
        ("test_tune:no_module", TypeError, r"module: expected a torch.nn.Module, got int"),
        ("torch.nn:Linear", TypeError, "expected .* without arguments, got 'torch.nn:Linear': m"),
        ("builtins:type", TypeError, "expected .* without arguments, got 'builtins:type': "),
        (torch.nn.ReLU(), ValueError, "at least one bfloat16 nn.Linear without bias, got none in"),
    ],
)
def test_what_is_no_module_is_refused(module: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        projections.module_shapes(module)


def test_shapes_are_named_in_one_way() -> None:
    with pytest.raises(ValueError, match="one of shapes, preset and module, got none of them"):
        tuning.targets_of("low_latency_linear")
    with pytest.raises(ValueError, match="got shapes and preset"):
        tuning.targets_of("low_latency_linear", shapes=[SHAPE], preset="kimi-k3")
    (found,) = tuning.targets_of(
        "low_latency_linear", shapes=[SHAPE], tokens=[8], residual=False, module=None
    )
    assert found == HERE
    of_module = tuning.targets_of("low_latency_linear", module=a_block, tokens=[8])
    assert [t.problem for t in of_module] == [
        "bfloat16 96x256",
        "bfloat16 256x96",
        "bfloat16 96x256 + residual",
        "bfloat16 256x96 + residual",
    ]


# What is measured


def test_classes_come_first_and_residuals_last() -> None:
    found = products([SHAPE, (96, 256)], (2, 8, 12, 16), residual=True)
    plain = [(t.n, t.tokens) for t in found if not t.residual]
    assert plain == [(n, m) for n in (2112, 96) for m in (8, 16, 2, 12)]
    assert [t.residual for t in found] == [False] * 8 + [True] * 8
    assert len(products([SHAPE, SHAPE], (8, 8))) == 1


def test_case42_integers_of_numpy_are_named_like_others() -> None:
    """They end in a file of JSON, which has no others."""
    of_numpy = products([tuple(np.array(SHAPE))], np.array([8, 16]), residual=True)
    assert repr(of_numpy) == repr(products([SHAPE], [8, 16], residual=True))
    of_numpy = mla_targets("mla_decode", ["fp8+fp8"], np.array([4]), np.int64(12))
    assert repr(of_numpy) == repr(mla_targets("mla_decode", ["fp8+fp8"], [4], 12))


@pytest.mark.parametrize(
    ("shapes", "tokens", "text"),
    [
        ([(2112, 7168)], [9], r"tokens: expected some of 1, 2, .*, 64, got 9. A call with another"),
        ([(2112, 7168)], [], "tokens: expected at least one, got none"),
        ([], [8], "shapes: expected at least one, got none"),
        ([(2112, 100)], [8], r"shapes: expected K a multiple of 8, got \(2112, 100\)"),
        ([(0, 128)], [8], r"shapes: expected pairs .*, got \(0, 128\)"),
        ([(True, 128)], [8], r"shapes: expected pairs .*, got \(True, 128\)"),
        ([2112], [8], "shapes: expected pairs .*, got 2112"),
    ],
)
def test_what_no_table_can_list_is_refused(shapes: Any, tokens: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        products(shapes, tokens)


def products(shapes: Any, tokens: Any, *, residual: bool = False) -> list[GemmTarget]:
    found = gemm_targets(shapes, tokens, residual=residual)
    return [target for target in found if isinstance(target, GemmTarget)]


def candidates(target: Target, known: Any = None) -> tuple[Candidate, ...]:
    return target.candidates(known or {}, GPU)


def entry_of(target: GemmTarget, order: int = 1) -> Entry:
    """An entry in which the candidates take 10, 11, ... us in their order, or backwards."""
    given = candidates(target)[::order]
    return entry_from(*target.key, {LINEAR: LINEAR_US} | {c: 10.0 + i for i, c in enumerate(given)})


def test_a_class_has_every_candidate() -> None:
    fused = gemm.candidates(FUSED_A, *SHAPE, 8, GPU)
    skinny = gemm.candidates(SKINNY, *SHAPE, 8, GPU)
    want = {Candidate(FUSED_A, c) for c in fused} | {Candidate(SKINNY, c) for c in skinny}
    assert set(candidates(HERE)) == want
    beyond = candidates(GemmTarget(*SHAPE, 16))
    dots = [c for c in beyond if c.kernel == SKINNY and not c.config.is_mma]
    assert not dots, "dot products end at 8 tokens"
    assert {c.kernel for c in candidates(GemmTarget(*SHAPE, 24))} == {FUSED_A}


def test_between_classes_only_the_best_of_the_neighbours_are_measured() -> None:
    one, eight = GemmTarget(*SHAPE, 1), GemmTarget(*SHAPE, 8)
    known = {one.key: entry_of(one), eight.key: entry_of(eight, order=-1)}
    found = [c for c in candidates(GemmTarget(*SHAPE, 4), known) if c.kernel == FUSED_A]
    fused = _of_kernel(FUSED_A, eight)
    assert found == [*fused[:-5:-1], *fused[:4]]
    twelve = GemmTarget(*SHAPE, 12)
    sixteen = GemmTarget(*SHAPE, 16)
    known[sixteen.key] = entry_of(sixteen)
    assert list(candidates(twelve, known))[:4] == list(candidates(sixteen))[:4]
    tiles = [replace(c.config, num_rows=12) for c in _of_kernel(SKINNY, sixteen)]
    assert [c.config for c in candidates(twelve, known)[4:]] == tiles[:6]
    assert [c.config for c in candidates(twelve) if c.kernel == SKINNY] == tiles
    fused = [c for c in candidates(twelve) if c.kernel == FUSED_A]
    assert fused == _of_kernel(FUSED_A, sixteen), "nothing is known"


def test_with_a_residual_the_two_best_of_each_kernel_are_measured() -> None:
    known = {HERE.key: entry_of(HERE)}
    found = candidates(GemmTarget(*SHAPE, 8, residual=True), known)
    assert [c.kernel for c in found] == [FUSED_A, FUSED_A, SKINNY, SKINNY]
    every = candidates(HERE)
    assert found[:2] == every[:2]


def test_a_depth_that_only_skinny_takes() -> None:
    found = candidates(GemmTarget(96, 24, 2))
    assert {c.kernel for c in found} == {SKINNY}
    assert candidates(GemmTarget(96, 24, 32)) == ()
    report = run(FakeMeter(), [(96, 24)], [2, 32], residual=False)
    assert [e.kernel for e in report.entries] == ["linear", SKINNY], "classes come first"


@pytest.mark.parametrize("residual", [False, True])
def test_instances_are_those_of_a_linear_layer(residual: bool) -> None:
    """Packed x, the weight static: what the modules run."""
    target = GemmTarget(*SHAPE, 8, residual)
    for candidate in candidates(HERE):
        name = target.instance(candidate).name_expression
        flags = name.rsplit(", ", 3)[1:]
        told = str(residual).lower()
        if candidate.kernel == FUSED_A:
            assert flags == ["true", "true", f"{told}>"]
        else:
            assert flags == ["true", told, "true>"]
            variant = skinny_gemm.Variant("bfloat16", True, residual, True, k=SHAPE[1])
            assert name == candidate.config.name_expression(variant), "K is known"


def test_the_preset_needs_few_instances() -> None:
    """Each is compiled, half a second to a second on one core: that is what tuning takes longest
    for."""
    wanted = products(projections.preset_shapes("kimi-k3-tp8"), None)
    assert len(wanted) == 18 * 14
    assert len({t.instance(c) for t in wanted for c in t.candidates({}, H200)}) < 2200


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_a_candidates_call_computes_the_product(device: str, tokens: int, residual: bool) -> None:
    """On the CPU the kernels' reference."""
    product = Product(96, 256, tokens, residual=residual, device=device)
    weights = [torch.randn(96, 256, device=device, dtype=torch.bfloat16) for _ in range(2)]
    for kernel in (FUSED_A, SKINNY):
        for candidate in _of_kernel(kernel, GemmTarget(96, 256, tokens))[:2]:
            call = product.call(*candidate)
            call(weights[1])  # the plan is made for one weight and used for all
            assert product.check(call, weights[0]) is None


def _of_kernel(kernel: str, target: Target) -> list[Candidate]:
    return [c for c in candidates(target) if c.kernel == kernel]


# How it is measured


def chosen(entry: Entry | None) -> Candidate:
    assert entry is not None
    return Candidate(entry.kernel, entry.config)


def us_of(times: dict[Candidate, float], linear: float = LINEAR_US) -> Any:
    return lambda target, candidate, effort: {LINEAR: linear, **times}[candidate]


def some(count: int) -> list[Candidate]:
    return _of_kernel(FUSED_A, HERE)[:count]


def test_what_is_clearly_behind_is_glanced_at_once() -> None:
    a, b, c = some(3)
    meter = FakeMeter(us=us_of({a: 10.0, b: 10.9, c: 11.1}))
    found = measure(HERE, [a, b, c], meter)
    assert meter.timed_with(Effort.GLANCE) == {LINEAR, a, b, c}
    assert meter.timed_with(Effort.FULL) == {a, b, LINEAR}, "the framework's linear always"
    want = {LINEAR: LINEAR_US, a: 10.0, b: 10.9, c: 11.1}
    assert found.entry == entry_from(*HERE.key, want)
    assert chosen(found.entry) == a
    assert found.entry.linear_us == LINEAR_US


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_fastest_of_what_was_measured(seed: int) -> None:
    """However far a glance is off: nothing in the entry is faster, and no glance alone decides."""

    def noisy(target: Target, candidate: Candidate, effort: Effort) -> float:
        off = zlib.crc32(f"{seed} {candidate} {effort}".encode()) % 100 / 1000
        return made_up_us(target, candidate) * (1 + off)

    meter = FakeMeter(us=noisy)
    for tokens in (1, 8, 16):
        target = GemmTarget(2112, 7168, tokens)
        entry = measure(target, target.candidates({}, H200), meter).entry
        times = times_of(entry)
        assert times[chosen(entry)] == entry.us == min(times.values())
        assert chosen(entry) in meter.timed_with(Effort.FULL)
        meter.timed.clear()


def test_the_best_of_each_kernel_is_timed_in_full() -> None:
    """A direct call of a kernel takes the best of its own."""
    (a,) = some(1)
    skinny = _of_kernel(SKINNY, HERE)[:2]
    meter = FakeMeter(us=us_of({a: 10.0, skinny[0]: 50.0, skinny[1]: 40.0}))
    measure(HERE, [a, *skinny], meter)
    assert meter.timed_with(Effort.FULL) == {a, skinny[1], LINEAR}


def test_a_lucky_glance_does_not_leave_a_faster_time_unproven() -> None:
    """Nothing that was only glanced at may be as fast as the choice."""
    a, b = some(2)
    glance, full = {LINEAR: 30.0, a: 8.0, b: 9.5}, {LINEAR: 30.0, a: 10.0, b: 9.6}
    meter = FakeMeter(us=lambda t, c, effort: (glance if effort is Effort.GLANCE else full)[c])
    entry = measure(HERE, [a, b], meter).entry
    assert entry.times[FUSED_A] == {a.config: 10.0, b.config: 9.6}
    assert chosen(entry) == b


@pytest.mark.parametrize(
    ("linear", "extra"), [(10.2, True), (9.8, True), (10.4, False), (9, False)]
)
def test_a_close_race_with_the_framework_gets_more_rounds(linear: float, extra: bool) -> None:
    a, b = some(2)
    meter = FakeMeter(us=us_of({a: 10.0, b: 11.0}, linear))
    entry = measure(HERE, [a, b], meter).entry
    assert (meter.timed_with(Effort.EXTRA) == {a, LINEAR}) is extra
    assert (chosen(entry) == LINEAR) is (linear < 10)


def test_where_the_frameworks_linear_is_as_fast_it_stays() -> None:
    (a,) = some(1)
    assert chosen(measure(HERE, [a], FakeMeter(us=us_of({a: LINEAR_US}))).entry) == LINEAR


def test_what_fails_its_check_is_neither_timed_nor_recorded() -> None:
    a, b = some(2)
    meter = FakeMeter(
        us=us_of({a: 1.0, b: 10.0}), why_wrong=lambda t, c: "element (0, 0)" if c == a else None
    )
    found = measure(HERE, [a, b], meter)
    assert found.entry == entry_from(*HERE.key, {LINEAR: LINEAR_US, b: 10.0})
    assert chosen(found.entry) == b
    assert found.refused == {a: "element (0, 0)"}
    assert all(a not in given for _, given, _ in meter.timed)


def test_where_everything_fails_the_frameworks_linear_is_recorded() -> None:
    report = run(FakeMeter(why_wrong=lambda t, c: "not finite"), tokens=[1])
    assert all(e.times == {"linear": {None: LINEAR_US}} for e in report.entries)
    assert len(report.refused) == len(candidates(GemmTarget(*SHAPE, 1)))
    assert all(line.startswith("bfloat16 2112x7168, M = 1, ") for line in report.refused)
    assert "refused, not recorded: bfloat16 2112x7168, M = 1, fused_a " in str(report)


def test_compiling_runs_ahead() -> None:
    """Everything is queued before the first product is measured; residuals as they are known."""
    wanted = products([SHAPE, (96, 256)], (1, 8), residual=True)
    meter = FakeMeter()
    measuring = measure_all(wanted, {}, meter)
    first = next(measuring)
    plain = {(t, c) for t in wanted if not t.residual for c in candidates(t)}
    assert plain <= set(meter.compiled)
    later = {(t, c) for t, c in meter.compiled if t.residual}
    assert {t for t, _ in later} == {replace(first.target, residual=True)}
    rest = list(measuring)
    assert len(rest) == len(wanted) - 1
    assert meter.closed == 1
    assert set(meter.checked) <= set(meter.compiled)


def test_a_meter_is_closed_after_an_error() -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("an error of the GPU")

    meter = FakeMeter(us=fail)
    with pytest.raises(RuntimeError, match="of the GPU"):
        run(meter)
    assert meter.closed == 1


def test_a_whole_run() -> None:
    meter = FakeMeter()
    report = run(meter)
    assert len(report.entries) == report.num_measured == 28
    wanted = products([SHAPE], None, residual=True)
    for target, entry in zip(wanted, report.entries, strict=True):
        assert entry.us == min(us for of in entry.times.values() for us in of.values())
        assert chosen(entry) != LINEAR
        assert entry.us == made_up_us(target, chosen(entry))
    text = str(report)
    assert "Test GPU: speed-up over the framework's linear" in text
    assert "bfloat16 2112x7168 + residual" in text
    assert "28 measured now, 0 before with the same kernels" in text
    assert str(report.path) in text


def test_the_choices_count_from_now_on() -> None:
    report = run(FakeMeter(), tokens=[8], residual=False)
    found = gemm.choose(gemm.ALL, *SHAPE, 8, GPU)
    assert found.origin == "user"
    assert Candidate(found.kernel, found.config) == chosen(report.entries[0])


def test_edited_kernels_are_not_tuned(tmp_path: Path) -> None:
    """Their times would count for the kernels of the package."""
    with (
        k3cupy.source_dir(tmp_path),
        pytest.raises(ValueError, match=f"sources: expected .*, got edited ones in {tmp_path}"),
    ):
        tuning.prepare([HERE], device=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
def test_without_a_gpu_tuning_says_so() -> None:
    with pytest.raises(k3cupy.ToolchainError, match="tuning needs a CUDA GPU; PyTorch sees none"):
        k3cupy.tune([SHAPE], device=0)
