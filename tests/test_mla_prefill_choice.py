"""Which configuration a prefill call gets: from the measured table, or by the rule without one."""

from __future__ import annotations

import itertools
import json
import re
from importlib import resources
from typing import Any

import pytest
from k3cupy.ops.measured_table import MeasuredTable

from k3cupy.kernels.mla_prefill import (
    CANDIDATES,
    FEW_ROWS,
    MANY_ROWS,
    OPS,
    MlaPrefillConfig,
    Variant,
    choose,
    dispatched_configs,
)
from k3cupy.ops import mla_prefill_config
from k3cupy.runtime.devices import DeviceInfo

SHIPPED: dict[str, Any] = json.loads(
    resources.files("k3cupy.ops").joinpath("tables/mla_prefill.json").read_text("utf-8")
)
OP = OPS[0]


def gpu(name: str = "X", num_sms: int = 100) -> DeviceInfo:
    return DeviceInfo(0, name, (9, 0), num_sms, 232_448)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU of 100 SMs, one operation, two numbers of rows."""
    entries = [
        {"kind": OP, "num_rows": rows, "chosen": vars(config)}
        for rows, config in ((12, CANDIDATES[0]), (1200, CANDIDATES[3]), (12_000, CANDIDATES[3]))
    ]
    text = json.dumps({"gpus": {"X": {"num_sms": 100, "entries": entries}}})
    monkeypatch.setattr(mla_prefill_config, "TABLE", MeasuredTable(lambda: text, MlaPrefillConfig))


@pytest.fixture
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = MeasuredTable(lambda: '{"gpus": {}}', MlaPrefillConfig)
    monkeypatch.setattr(mla_prefill_config, "TABLE", empty)


def test_the_nearest_entry(table: None) -> None:
    variant = Variant(OP, rope=True)
    assert choose(variant, 2, 12, gpu()) == (CANDIDATES[0], "measured on X at 12 rows, here 24")
    assert choose(variant, 90, 12, gpu())[0] == CANDIDATES[3]
    assert choose(variant, 0, 12, gpu())[0] == CANDIDATES[0]


def test_another_gpu_counts_rows_a_multiprocessor(table: None) -> None:
    config, reason = choose(Variant(OP), 10, 12, gpu("Y", 10))
    assert config == CANDIDATES[3]
    assert reason == (
        "Y has no measured table; 120 rows on 10 SMs take the choice of X at 1200 rows (100 SMs)"
    )


def test_dispatched_configs_follow_the_table(table: None) -> None:
    """So the tests of the machine code, and warmup, see whatever a new table names."""
    assert dispatched_configs(Variant(OP)) == (CANDIDATES[0], CANDIDATES[3])
    assert dispatched_configs(Variant(OP, vector=False)) == (FEW_ROWS,)


@pytest.mark.parametrize("op", OPS)
def test_the_rule_without_a_table(op: str, no_table: None) -> None:
    variant = Variant(op)
    few, reason = choose(variant, 1, 12, gpu())
    assert few == FEW_ROWS
    assert reason == "no measured table has this operation; 12 rows on 100 SMs are few"
    many, reason = choose(variant, 4096, 12, gpu())
    assert many == MANY_ROWS
    assert reason.endswith("49152 rows on 100 SMs are many")
    assert dispatched_configs(variant) == (FEW_ROWS, MANY_ROWS)


def test_an_operation_that_the_table_lacks_takes_the_rule(table: None) -> None:
    assert choose(Variant(OPS[1]), 1, 12, gpu())[0] == FEW_ROWS


@pytest.mark.parametrize("op", OPS)
def test_the_element_wise_kernel_has_one(op: str) -> None:
    config, reason = choose(Variant(op, vector=False), 5000, 12, gpu())
    assert config == FEW_ROWS
    assert "element-wise" in reason


def test_the_shipped_table_names_what_it_measured() -> None:
    keys = {f"{c.tasks_per_block}/{c.heads_per_task}" for c in CANDIDATES}
    for facts in SHIPPED["gpus"].values():
        assert {"driver", "nvrtc", "commit", "packages", "num_sms"} <= set(facts)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
        assert {entry["kind"] for entry in facts["entries"]} == set(OPS)
        for entry in facts["entries"]:
            chosen, times = MlaPrefillConfig(**entry["chosen"]), entry["us"]
            assert set(times) == keys
            time = times[f"{chosen.tasks_per_block}/{chosen.heads_per_task}"]
            assert time <= 1.02 * min(times.values()), (entry["kind"], entry["num_rows"])


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
