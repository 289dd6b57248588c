"""Which configuration a prefill call gets: from the measured table, or by the rule without one."""

from __future__ import annotations

import functools
import itertools
import re

import pytest

from k3cupy.choose.mla import choose, configs
from k3cupy.choose.table import AS_GOOD, Table, measured, parts_of, shipped, table_text
from k3cupy.kernels.mla_prefill import (
    CANDIDATES,
    FEW_ROWS,
    MANY_ROWS,
    OPS,
    MlaPrefillConfig,
    Variant,
)
from k3cupy.runtime.devices import DeviceInfo

choose_prefill = functools.partial(choose, "mla_prefill")

OP = OPS[0]


def gpu(name: str = "X", num_sms: int = 100) -> DeviceInfo:
    return DeviceInfo(0, name, (9, 0), num_sms, 232_448)


def only(monkeypatch: pytest.MonkeyPatch, *known: Table) -> None:
    """Let calls choose from these tables alone."""

    def of_a_gpu(_: str, gpu: DeviceInfo) -> tuple[Table, ...]:
        return tuple(table for table in known if table.header["gpu"] == gpu.name)

    def elsewhere(_: str, gpu: DeviceInfo) -> tuple[Table, ...]:
        return tuple(table for table in known if table.header["gpu"] != gpu.name)

    monkeypatch.setattr("k3cupy.choose.mla.tables_of", of_a_gpu)
    monkeypatch.setattr("k3cupy.choose.mla.measured_elsewhere", elsewhere)
    monkeypatch.setattr("k3cupy.choose.mla.shipped", lambda _: known)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU of 100 SMs, one operation, three numbers of rows."""
    entries = [
        measured(OP, rows, {"mla_prefill": {config: 1.0}})
        for rows, config in ((12, CANDIDATES[0]), (1200, CANDIDATES[3]), (12_000, CANDIDATES[3]))
    ]
    header, problems = parts_of(table_text({"schema": 2, "gpu": "X", "num_sms": 100}, entries))
    only(monkeypatch, Table("shipped", header, problems))


@pytest.fixture
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)


def test_the_nearest_entry(table: None) -> None:
    variant = Variant(OP, rope=True)
    found = choose_prefill(variant, 2, 12, gpu())
    assert (found.kernel, found.config, found.origin) == ("mla_prefill", CANDIDATES[0], "shipped")
    assert found.reason == "measured on X at 12 rows, here 24"
    assert choose_prefill(variant, 90, 12, gpu()).config == CANDIDATES[3]
    assert choose_prefill(variant, 0, 12, gpu()).config == CANDIDATES[0]


def test_another_gpu_counts_rows_a_multiprocessor(table: None) -> None:
    found = choose_prefill(Variant(OP), 10, 12, gpu("Y", 10))
    assert (found.config, found.origin) == (CANDIDATES[3], "rule")
    assert found.reason == (
        "Y has no measured table; 120 rows on 10 SMs take the choice of X at 1200 rows (100 SMs)"
    )


def test_configurations_follow_the_table(table: None) -> None:
    """So the tests of the machine code, and warmup, see whatever a new table names."""
    for of in (None, gpu(), gpu("Y", 10)):
        assert configs("mla_prefill", Variant(OP).kind, of) == (CANDIDATES[0], CANDIDATES[3])


@pytest.mark.parametrize("op", OPS)
def test_the_rule_without_a_table(op: str, no_table: None) -> None:
    variant = Variant(op)
    few = choose_prefill(variant, 1, 12, gpu())
    assert (few.config, few.origin) == (FEW_ROWS, "rule")
    assert few.reason == "no measured table has this operation; 12 rows on 100 SMs are few"
    many = choose_prefill(variant, 4096, 12, gpu())
    assert many.config == MANY_ROWS
    assert many.reason.endswith("49152 rows on 100 SMs are many")
    assert configs("mla_prefill", variant.kind, gpu()) == (FEW_ROWS, MANY_ROWS)


def test_an_operation_that_the_table_lacks_takes_the_rule(table: None) -> None:
    assert choose_prefill(Variant(OPS[1]), 1, 12, gpu()).config == FEW_ROWS


@pytest.mark.parametrize("op", OPS)
def test_the_element_wise_kernel_has_one(op: str, table: None) -> None:
    found = choose_prefill(Variant(op, vector=False), 5000, 12, gpu())
    assert found.config == FEW_ROWS
    assert "element-wise" in found.reason


def test_the_shipped_table_names_what_it_measured() -> None:
    assert shipped("mla_prefill")
    for table in shipped("mla_prefill"):
        facts = table.header
        assert {"driver", "nvrtc", "commit", "packages", "num_sms"} <= set(facts)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
        assert set(table.problems) == set(OPS)
        for entry in table:
            times = entry.times["mla_prefill"]
            assert set(times) == set(CANDIDATES)
            assert times[entry.config] <= AS_GOOD * min(times.values()), entry.key


@pytest.mark.parametrize(
    ("tasks", "heads"), list(itertools.product((0, 4, 8, 16, 32), (0, 1, 4, 5, 8)))
)
def test_only_the_candidates_are_valid(tasks: int, heads: int) -> None:
    config = MlaPrefillConfig(tasks, heads)
    assert config.is_valid() == (config in CANDIDATES)


def test_variants_that_do_not_exist() -> None:
    assert not Variant("fused_mla_kv_concat", rope=True).is_valid()
    assert not Variant("fused_mla_kv_concat", k_pe_fp8=True).is_valid()
    assert not Variant(OP, "float32").is_valid()
    assert not Variant("fused_mla").is_valid()


def test_for_people() -> None:
    assert str(MlaPrefillConfig(8, 1)) == "8 tasks a block, 1 head a task"
    assert str(MlaPrefillConfig(16, 4)) == "16 tasks a block, 4 heads a task"
