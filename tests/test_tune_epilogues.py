"""The tuner of the MLA epilogues without a GPU: targets, ties over all sizes, choices used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fake_device import A100, H200, FakeDevice
from tune_helpers import GPU, FakeMeter, job, made_up_us, run, use_fake_gpu, write_export

import k3cupy
from k3cupy.choose import cache
from k3cupy.choose.table import AS_GOOD, FAMILIES, KERNELS, Entry, shipped
from k3cupy.cli import main
from k3cupy.kernels.mla_prefill import INSERTS, OPS
from k3cupy.runtime import instances
from k3cupy.timing import graphs
from k3cupy.timing.decode_step import DecodeStep
from k3cupy.timing.mla_steps import (
    NormStep,
    QueryStep,
    ValueStep,
    halves,
    kv_b_shape,
    layer_shape,
)
from k3cupy.timing.prefill_step import PrefillStep
from k3cupy.tuning import files
from k3cupy.tuning.cuda_meter import CudaMeter
from k3cupy.tuning.engine import Effort, measure
from k3cupy.tuning.entries import LINEAR, SEPARATE, Candidate, entry_from, settled
from k3cupy.tuning.targets import KINDS, MlaTarget, Target, mla_targets

EPILOGUES = ["mla_decode", "mla_prefill"]
FAMILIES_OF_LAYER = [*EPILOGUES, "mla_norm", "mla_query", "mla_value"]
DECODE = KERNELS["mla_decode"].CANDIDATES
PREFILL = KERNELS["mla_prefill"].CANDIDATES


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path / "cache"))
    use_fake_gpu(monkeypatch)
    yield
    cache.reload()


def kept(family: str, gpu: Any = GPU) -> dict[tuple[str, int], Entry]:
    return {entry.key: entry for entry in cache.table(family, gpu.name)}


# What is measured


@pytest.mark.parametrize("op", EPILOGUES)
def test_by_default_everything_that_the_shipped_table_lists(op: str) -> None:
    """With the heads of one of eight GPUs."""
    (table,) = shipped(op)
    targets = {target.key for target in job(op=op).targets}
    listed = {entry.key for entry in table}
    assert listed <= targets
    sizes = {size for _, size in listed}
    assert targets == {(kind, size) for kind in KINDS[op] for size in sizes}
    if op == "mla_prefill":  # of decode some formats were measured before the largest batches were
        assert listed == targets


def test_kinds_one_after_the_other() -> None:
    found = mla_targets("mla_decode", ["fp8+fp8", "16bit+same"], [8, 1, 8], 16)
    assert [(t.problem, t.tokens, t.size) for t in found] == [
        ("fp8+fp8", 8, 136),
        ("fp8+fp8", 1, 17),
        ("16bit+same", 8, 136),
        ("16bit+same", 1, 17),
    ]
    (context,) = mla_targets("mla_prefill", ["fused_mla_kv_concat"], [10], 3)
    assert (context.size, str(context)) == (30, "fused_mla_kv_concat, M = 10")


@pytest.mark.parametrize(
    ("kind", "config"), [(kind, config) for kind in KINDS["mla_decode"] for config in DECODE[::5]]
)
def test_decode_instances_are_those_of_a_call(
    kind: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = MlaTarget("mla_decode", kind, 3, 2)
    assert Candidate("mla_decode", config) in target.candidates({}, GPU)
    FakeDevice(monkeypatch)
    step = DecodeStep(kind, 3, 2, device="cpu")
    ran = k3cupy.explain_mla_decode(**step.arguments, out=step.out, config=config)
    assert target.instance(Candidate("mla_decode", config)).name_expression == ran.name_expression


@pytest.mark.parametrize("op", OPS)
def test_prefill_instances_are_those_of_a_call(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = MlaTarget("mla_prefill", op, 3, 2)
    assert target.candidates({}, GPU) == tuple(Candidate("mla_prefill", c) for c in PREFILL)
    FakeDevice(monkeypatch)
    step = PrefillStep(op, 3, 2, device="cpu")
    for config in PREFILL:
        ran = k3cupy.explain_mla_prefill(op, **step.arguments, config=config)
        found = target.instance(Candidate("mla_prefill", config))
        assert found.name_expression == ran.name_expression


@pytest.mark.parametrize("tokens", [8, 9])
@pytest.mark.parametrize("kind", KINDS["mla_decode"])
def test_query_instances_are_those_of_a_call(
    kind: str, tokens: int, fake_device: FakeDevice
) -> None:
    """The tile is that of the tokens."""
    target = MlaTarget("mla_query", kind, tokens, 2)
    step = QueryStep(kind, tokens, 2, device="cpu")
    layer = torch.empty(layer_shape(2), dtype=torch.bfloat16)
    given = target.candidates({}, GPU)
    assert [c.config for c in given] == list(KERNELS["mla_query"].CANDIDATES)
    for candidate in given:
        step.run(layer, candidate.config)
        assert fake_device.loads[-1] == target.instance(candidate)
    fake_device.loads.clear()
    step.separate(layer)
    assert [instance.source for instance in fake_device.loads if "gemm" not in instance.source] == [
        *("mla_norm.cu", "mla_value.cu", "mla_decode.cu")
    ]


@pytest.mark.parametrize("kind", KINDS["mla_value"])
def test_value_instances_are_those_of_a_call(kind: str, fake_device: FakeDevice) -> None:
    target = MlaTarget("mla_value", kind, 3, 2)
    step = ValueStep(kind, 3, 2, device="cpu")
    for candidate in target.candidates({}, GPU):
        step.run(torch.empty(kv_b_shape(2), dtype=torch.bfloat16), candidate.config)
        assert fake_device.loads[-1] == target.instance(candidate)


def test_norm_instances_are_those_of_a_call(fake_device: FakeDevice) -> None:
    (target,) = mla_targets("mla_norm", None, [3], 12)
    assert target.key == ("norm", 3)
    for candidate in target.candidates({}, GPU):
        NormStep(3, "cpu").run(candidate.config)
        assert fake_device.loads[-1] == target.instance(candidate)


# What becomes of the times


@pytest.mark.parametrize("op", FAMILIES_OF_LAYER)
def test_a_whole_run(op: str) -> None:
    meter = FakeMeter()
    report = run(meter, op=op)
    targets = job(op=op).targets
    assert meter.targets == list(targets)
    assert report.num_measured == len(report.entries) == len(targets)
    for target, entry in zip(targets, report.entries, strict=True):
        times = entry.times[op]
        assert len(times) == len(KERNELS[op].CANDIDATES)
        assert (SEPARATE.kernel in entry.times) is (op == "mla_query")
        if entry.kernel == SEPARATE.kernel:
            assert entry.us is not None and entry.us <= min(times.values())
            continue
        assert entry.us is not None and entry.us <= AS_GOOD * min(times.values())
        assert entry.us == made_up_us(target, Candidate(op, entry.config))
    assert LINEAR not in meter.timed_with(Effort.GLANCE)
    assert kept(op) == {e.key: kept(op)[e.key] for e in report.entries}
    text = str(report)
    assert f"{len(targets)} measured now, 0 before" in text and "framework" not in text
    assert all(f"{target.problem} " in text for target in targets)
    assert run(FakeMeter(), op=op).num_measured == 0, "nothing twice"


def test_separate_kernels_are_what_the_query_front_has_to_beat() -> None:
    """They need no check; where they are nearly as fast, both get more rounds."""
    given = [Candidate("mla_query", config) for config in KERNELS["mla_query"].CANDIDATES]
    times = {1: (5.0, 9.0), 8: (9.0, 8.0), 16: (7.05, 7.0)}

    def us(target: Target, candidate: Candidate, effort: Effort) -> float:
        fused, separate = times[target.tokens]
        return separate if candidate == SEPARATE else fused + given.index(candidate) / 1000

    meter = FakeMeter(gpu=H200, us=us)
    report = run(meter, op="mla_query", kinds=["16bit+same"], tokens=[1, 8, 16])
    assert [e.kernel for e in report.entries] == ["mla_query", "separate", "separate"]
    assert SEPARATE not in {candidate for _, candidate in (*meter.checked, *meter.compiled)}
    assert [t.tokens for t, some, effort in meter.timed if effort is Effort.EXTRA] == [16]
    assert "8.00 (separate)" in str(report) and "5.00 (" in str(report)
    with pytest.raises(ValueError, match=r"tokens: expected at most 16, got 17"):
        mla_targets("mla_query", None, [1, 17], 12)


def test_ties_of_the_query_front_are_settled_beside_separate_kernels() -> None:
    one, other = (Candidate("mla_query", c) for c in KERNELS["mla_query"].CANDIDATES[:2])
    entries = [
        entry_from("12 heads", 1, {SEPARATE: 9.0, one: 5.0, other: 5.02}),
        entry_from("12 heads", 2, {SEPARATE: 9.0, one: 6.0, other: 5.0}),
        entry_from("12 heads", 16, {SEPARATE: 4.0, one: 5.0, other: 5.0}),
    ]
    found = settled(entries)
    assert {key: entry.config for key, entry in found.items()} == {("12 heads", 1): other.config}


A, B, C = (Candidate("mla_decode", config) for config in DECODE[:3])


def us_of(*sizes: dict[Candidate, float]) -> Callable[[Target, Candidate, Effort], float]:
    """Times by the place of a target among 1, 8 and 64 tokens; all others are slow."""
    places = {1: 0, 8: 1, 64: 2}
    return lambda target, candidate, effort: sizes[places[target.tokens]].get(candidate, 50.0)


TIED = us_of({A: 10.0, B: 10.05, C: 10.2}, {A: 13.0, B: 10.0, C: 10.2}, {A: 10.0, B: 12.0, C: 12})


def test_ties_are_settled_over_all_sizes() -> None:
    found = run(FakeMeter(us=TIED), op="mla_decode", kinds=["fp8+fp8"], tokens=[1, 8, 64])
    assert [e.config for e in found.entries] == [B.config, B.config, A.config]
    assert [e.us for e in found.entries] == [10.05, 10.0, 10.0]
    assert [e.config for e in kept("mla_decode").values()] == [B.config, B.config, A.config]


def test_ties_are_settled_once_more_when_a_size_comes_later() -> None:
    options: dict[str, Any] = {"op": "mla_decode", "kinds": ["fp8+fp8"]}
    (alone,) = run(FakeMeter(us=TIED), tokens=[1], **options).entries
    assert alone.config == A.config
    run(FakeMeter(us=TIED), tokens=[8], **options)
    assert {e.size: e.config for e in kept("mla_decode").values()} == {13: B.config, 104: B.config}


def test_products_are_not_settled() -> None:
    one = Candidate("fused_a", "a"), Candidate("skinny", "b")
    entries = [entry_from("p", size, {LINEAR: 9.0, one[0]: 1.0, one[1]: 1.001}) for size in (1, 2)]
    assert settled(entries) == {}
    assert settled([entry_from("p", 1, {LINEAR: 9.0})]) == {}


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_an_interrupted_run_goes_on_and_settles(calls: int) -> None:
    options: dict[str, Any] = {"op": "mla_decode", "kinds": ["fp8+fp8"], "tokens": [1, 8, 64]}
    meter = FakeMeter(us=TIED, interrupt_at=calls)
    with pytest.raises(KeyboardInterrupt):
        run(meter, **options)
    assert len(kept("mla_decode")) == calls // 2 and meter.closed == 1
    rest = FakeMeter(us=TIED)
    report = run(rest, **options)
    assert len(rest.targets) == 3 - calls // 2
    assert [e.config for e in report.entries] == [B.config, B.config, A.config]
    assert [e.config for e in kept("mla_decode").values()] == [B.config, B.config, A.config]


@pytest.mark.parametrize("op", FAMILIES_OF_LAYER)
def test_what_is_wrong_is_refused(op: str) -> None:
    wrong = Candidate(op, KERNELS[op].CANDIDATES[0])
    kind = KINDS[op][0]
    report = run(
        FakeMeter(
            us=lambda t, c, effort: 1.0 if c == wrong else made_up_us(t, c),
            why_wrong=lambda t, c: "result 0 differs" if c == wrong else None,
        ),
        op=op,
        kinds=[kind],
        tokens=[4],
    )
    problem = "12 heads" if op == "mla_query" else kind
    assert report.refused == (f"{problem}, M = 4, {wrong}: result 0 differs",)
    (entry,) = report.entries
    assert wrong.config not in entry.times[op]


def test_where_everything_is_wrong_nothing_is_recorded() -> None:
    meter = FakeMeter(why_wrong=lambda t, c: "wrong" if t.tokens == 1 else None)
    report = run(meter, op="mla_decode", kinds=["fp8+fp8"], tokens=[1, 8])
    assert [e.size for e in report.entries] == [104] and report.num_measured == 1
    assert len(report.refused) == len(DECODE)
    (target,) = mla_targets("mla_decode", ["fp8+fp8"], [1], 12)
    assert measure(target, target.candidates({}, GPU), meter).entry is None
    assert len(job(op="mla_decode", kinds=["fp8+fp8"], tokens=[1, 8]).todo) == 1


# What calls take


def test_the_choices_of_decode_count_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch)
    step = DecodeStep("fp8+fp8", 8, 12, device="cpu")
    before = k3cupy.explain_mla_decode(**step.arguments)
    assert before.origin == "shipped"
    favourite = next(c for c in DECODE if c != before.config)
    meter = FakeMeter(gpu=H200, us=lambda t, c, effort: 1.0 if c.config == favourite else 2.0)
    run(meter, op="mla_decode", kinds=["fp8+fp8"], tokens=[8])
    found = k3cupy.explain_mla_decode(**step.arguments)
    assert (found.origin, found.config) == ("user", favourite)
    other = DecodeStep("16bit+same", 8, 12, device="cpu")
    assert k3cupy.explain_mla_decode(**other.arguments).origin == "shipped", "not measured"


def test_the_choices_of_prefill_count_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch)
    for op in OPS:
        step = PrefillStep(op, 16, 3, device="cpu")
        before = k3cupy.explain_mla_prefill(op, **step.arguments)
        favourite = next(c for c in PREFILL if c != before.config)
        meter = FakeMeter(
            gpu=H200, us=lambda t, c, effort, f=favourite: 1.0 if c.config == f else 2.0
        )
        run(meter, op="mla_prefill", kinds=[op], tokens=[16], num_heads=3)
        found = k3cupy.explain_mla_prefill(op, **step.arguments)
        assert (before.origin, found.origin, found.config) == ("shipped", "user", favourite)


def test_the_choices_of_a_layer_count_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch)
    favourites = {}
    for op in ("mla_norm", "mla_value", "mla_query"):
        favourites[op] = KERNELS[op].CANDIDATES[-1]
        meter = FakeMeter(
            gpu=H200, us=lambda t, c, effort, f=favourites[op]: 1.0 if c.config == f else 2.0
        )
        run(meter, op=op, tokens=[8], num_heads=2)
    queries, norms = QueryStep("16bit+same", 8, 2, device="cpu"), NormStep(8, "cpu")
    layer = torch.empty(layer_shape(2), dtype=torch.bfloat16)
    values, (_, w_uv) = ValueStep("value", 8, 2, device="cpu"), halves(layer[-512:])
    weights = {"weight_is_static": True}
    query = k3cupy.explain_mla_decode_query(
        **queries.arguments, **queries.cut(layer), out=queries.out, **weights
    )
    found = {
        "mla_norm": k3cupy.explain_q_kv_rmsnorm(**norms.inputs, eps=1e-6, **weights),
        "mla_value": k3cupy.explain_mla_decode_value(values.x, w_uv, **weights),
        "mla_query": query,
    }
    assert {op: (ran.origin, ran.config) for op, ran in found.items()} == {
        op: ("user", favourite) for op, favourite in favourites.items()
    }
    assert "one launch 1.00 us, separate kernels 2.00 us" in query.reason


# Files and commands


@pytest.mark.parametrize("op", FAMILIES_OF_LAYER)
def test_an_import_gives_what_was_exported(op: str, tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    meter = FakeMeter(
        us=lambda t, c, effort: 9 + made_up_us(t, c) / 500 + (c == SEPARATE) * (t.tokens < 12)
    )
    report = run(meter, op=op, kinds=KINDS[op][:2])
    before = kept(op)
    assert any("preferred" in entry.fields() for entry in before.values())
    write_export(path, op, report.entries)
    cache.path_of(op, GPU.name).unlink()
    cache.reload()
    assert kept(op) == {}
    found = {entry.key: entry for entry in files.import_file(path, GPU)}
    assert found == {entry.key: files.undated(entry) for entry in report.entries}
    assert kept(op) == before
    assert [f for f in FAMILIES if cache.path_of(f, GPU.name).exists()] == [op]


def test_a_dry_run_of_the_command() -> None:
    run(FakeMeter(), op="mla_decode", kinds=["fp8+fp8"], tokens=[8], num_heads=16)
    arguments = "tune --device 0 --op mla_decode --kind fp8+fp8 --kind 16bit+fp8 --heads 16"
    done = CliRunner().invoke(
        main, [*arguments.split(), "--tokens", "8", "--tokens=2", "--dry-run"]
    )
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "Test GPU: 3 to measure, 1 are known",
        "  fp8+fp8: M = 2; 18 candidates",
        "  16bit+fp8: M = 8, 2; 18 candidates",
    ]
    arguments = "tune --device 0 --op mla_value --kind absorb --tokens 4 --dry-run"
    done = CliRunner().invoke(main, arguments.split())
    count = len(KERNELS["mla_value"].CANDIDATES)
    assert done.output.splitlines()[1:] == [f"  absorb: M = 4; {count} candidates"]


def test_where_separate_kernels_run_in_any_case_the_query_front_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = "12 heads: NVIDIA A100-SXM4-80GB has no clusters of blocks"
    arguments = "tune --dry-run --op mla_query --gpu a100"
    done = CliRunner().invoke(main, arguments.split())
    assert done.output.splitlines() == [
        "NVIDIA A100-SXM4-80GB: 0 to measure, 0 are known",
        f"  not measured: {told}",
    ]
    use_fake_gpu(monkeypatch, A100)
    meter = FakeMeter(gpu=A100)
    report = run(meter, op="mla_query")
    assert (report.entries, report.refused) == ((), (told,)) and told in str(report)
    assert not meter.compiled and not meter.timed
    (here,) = mla_targets("mla_query", None, [8], 12)
    assert here.candidates({}, A100) == ()
    every = KERNELS["mla_query"].CANDIDATES
    assert here.candidates({}, H200) == tuple(Candidate("mla_query", c) for c in every)


# How a GPU measures them


@pytest.mark.parametrize("kind", KINDS["mla_decode"])
def test_a_step_of_decode_tells_right_from_wrong(kind: str, device: str) -> None:
    step = DecodeStep(kind, 4, 2, device=device)
    assert step.check(lambda: step.run(DECODE[0])) is None
    assert step.check(lambda: None) == "mqa_q differs from the reference"

    def slip() -> None:
        step.run(DECODE[0])
        step.kv_cache.view(torch.uint8)[-1, -1, -1] += 1

    assert step.check(slip) == "kv_cache differs from the reference"


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_a_step_of_prefill_tells_right_from_wrong(
    op: str, rope: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = PrefillStep(op, 5, 2, rope and op in INSERTS, device=device)
    run = step.run

    def slip(config: Any) -> None:
        run(config)
        step.outs[-1].view(torch.uint8)[-1, -1, -1] += 1

    monkeypatch.setattr(step, "run", slip)
    told = step.check(partial(step.run, PREFILL[0]))
    assert told == f"result {len(step.outs) - 1} differs from the reference"
    monkeypatch.setattr(step, "run", run)
    known = step.check(partial(step.run, PREFILL[1]))
    assert known is None, "the next one is compared with the reference again"
    assert step.check(partial(step.run, PREFILL[2])) is None
    monkeypatch.setattr(step, "run", slip)
    told = step.check(partial(step.run, PREFILL[3]))
    assert told == f"result {len(step.outs) - 1} differs from what was right before"


def test_a_step_of_norms_tells_right_from_wrong(device: str) -> None:
    step = NormStep(4, device)
    assert step.check(step.run) is None
    assert step.check(lambda: None) == "an element of q is not finite"

    def slip() -> None:
        step.run()
        step.outs[1][2, 5] += 0.1

    assert str(step.check(slip)).startswith("element (2, 5) of kv_c_normed is ")


@pytest.mark.parametrize("kind", KINDS["mla_decode"])
def test_a_step_of_the_query_front_tells_right_from_wrong(kind: str, device: str) -> None:
    step = QueryStep(kind, 4, 2, device)
    layer = torch.randn(layer_shape(2), device=device).to(torch.bfloat16)
    bmm = partial(step.separate, q_b=torch.nn.functional.linear, bmm=True)
    for right in (step.run, step.separate, bmm):
        assert step.check(right, layer) is None
    assert step.check(lambda _: None, layer) == "an element of mqa_q is not finite"
    assert step.error(step.separate, layer) < (0.05 if kind.startswith("fp8") else 5e-3)
    slot = int(step.arguments["slot_mapping"][1])
    places = [(slot, "of kv_cache"), ((slot + 1) % 64, "is written where it should not be")]
    for place, told in places:

        def slip(_: torch.Tensor, place: int = place) -> None:
            step.run(layer)
            step.kv_cache.flatten(0, 1)[place].view(torch.uint8)[40:44] ^= 0x43

        assert told in str(step.check(slip, layer))


@pytest.mark.parametrize("kind", KINDS["mla_value"])
def test_a_step_of_the_value_tells_right_from_wrong(kind: str, device: str) -> None:
    step = ValueStep(kind, 4, 2, device)
    weight = torch.randn(kv_b_shape(2), device=device).to(torch.bfloat16)
    assert step.check(step.run, weight) is None
    assert step.check(lambda _: None, weight) == "an element of out is not finite"

    def slip(kv_b: torch.Tensor) -> None:
        step.run(kv_b)
        step.out.view(-1)[77] += 1

    assert " of out is " in str(step.check(slip, weight))


class FakeBench:
    """A chain of 3 us; the epilogues add their number, one of them hides behind its neighbours."""

    launches, replays, first = 7, 9, None

    def base(self) -> Callable[[], float]:
        return lambda: 3.0

    def check(self, kernel: str, config: int) -> str | None:
        return None

    def body(self, kernel: str, config: int) -> Callable[[], float]:
        return lambda: 3.0 + config


def test_a_chain_counts_what_the_epilogue_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []

    def measure(every: list[Callable[[], float]], launches: int, **effort: int) -> list[float]:
        assert (launches, effort["replays"]) == (7, 9)
        return [body() for body in every]

    def capture(body: Callable[[], float], launches: int, first: None) -> Callable[[], float]:
        recorded.append(body())
        return body

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "measure", measure)
    monkeypatch.setattr(instances, "load", lambda instance, device: instance)
    monkeypatch.setattr(CudaMeter, "_made", lambda self, target: FakeBench())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    (target,) = mla_targets("mla_decode", ["fp8+fp8"], [1], 12)
    meter = CudaMeter([target], 0)
    three = [Candidate("mla_decode", added) for added in (2, 1, -1)]
    assert meter.time(target, three, Effort.GLANCE) == [2.0, 1.0, 0.0001]
    assert meter.time(target, three[:1], Effort.FULL) == [2.0]
    assert recorded == [3.0, 5.0, 4.0, 2.0], "each is recorded once"
    assert meter.check(target, Candidate("mla_decode", DECODE[0])) is None
    meter.close()
