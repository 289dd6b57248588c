"""The decode kernel: configurations, the measured table, and what is chosen from it."""

from __future__ import annotations

import itertools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toolchain_helpers import variants

from k3cupy.ops import mla_decode_config
from k3cupy.ops.measured_table import MeasuredTable
from k3cupy.kernels.mla_decode import (
    CANDIDATES,
    DEFAULTS,
    MlaDecodeConfig,
    MlaDecodeVariant,
    choose,
    dispatched_configs,
)
from k3cupy.runtime.devices import DeviceInfo

KINDS = sorted({variant.kind for variant in variants()})

# --- Configurations ------------------------------------------------------------------------------


def test_candidates_and_defaults_are_valid() -> None:
    assert all(config.is_valid() for config in (*CANDIDATES, *DEFAULTS.values()))
    assert len(set(CANDIDATES)) == len(CANDIDATES)
    assert {split: config.split for split, config in DEFAULTS.items()} == {0: 0, 1: 1, 3: 3}


@pytest.mark.parametrize(
    "fields",
    [
        (0, 100, 1),
        (0, 144, 3),
        (0, 144, 8),
        (0, 18, 4),
        (0, 1080, 1),
        (0, 0, 1),
        (0, -72, 1),
        (1, 128, 1),
        (1, 100, 3),
        (2, 256, 1),
        (3, 256, 3),
        (3, 4096, 1),
        (-1, 256, 1),
    ],
)
def test_configurations_that_no_kernel_has(fields: tuple[int, int, int]) -> None:
    assert not MlaDecodeConfig(*fields).is_valid()


@given(st.sampled_from(CANDIDATES), st.integers(1, 200_000))
def test_blocks_cover_every_row_and_none_is_idle(config: MlaDecodeConfig, rows: int) -> None:
    chunks = 72 if config.split == 0 else 96
    threads_a_row = chunks // config.chunks_per_thread
    per_block = config.block_size // threads_a_row
    blocks = config.query_blocks(rows)
    if config.block_size % threads_a_row == 0:
        assert (blocks - 1) * per_block < rows <= blocks * per_block
    warps = config.block_size // 32
    if config.split:
        assert (blocks - 1) * warps < rows * config.split <= blocks * warps
    cache_blocks = config.cache_blocks(rows)
    assert (cache_blocks - 1) * warps < rows <= cache_blocks * warps


def test_name_expressions_are_unique() -> None:
    configs = {*CANDIDATES, *DEFAULTS.values()}
    names = [c.name_expression(v) for c, v in itertools.product(configs, variants())]
    assert len(set(names)) == len(names)


def test_name_expression_and_words() -> None:
    variant = MlaDecodeVariant("float16", True, "fp8", True, False, True)
    config = MlaDecodeConfig(1, 128, 3)
    assert config.name_expression(variant) == (
        "k3cupy::mla_decode_epilogue<__half, true, k3cupy::CacheFormat::kFp8, true, false, true, "
        "1, 128, 3>"
    )
    assert config.instance(variant).source == "mla_decode.cu"
    assert str(config) == "split 1, 128 threads, 3 chunks a thread"
    assert str(MlaDecodeConfig(3, 256, 1)) == "split 3, 256 threads, 1 chunk a thread"


def test_variants() -> None:
    assert len(variants()) == 2 * 5 * 8
    assert KINDS == ["16bit+ds_mla", "16bit+fp8", "16bit+same", "fp8+fp8", "fp8+same"]
    assert not MlaDecodeVariant("bfloat16", query_fp8=True, cache="ds_mla").is_valid()
    assert not MlaDecodeVariant("float32").is_valid()
    assert not MlaDecodeVariant("bfloat16", cache="fp4").is_valid()


# --- The table and the choice --------------------------------------------------------------------

TABLES = sorted(Path(str(resources.files("k3cupy.ops"))).joinpath("tables").rglob("*.json"))
TABLE = json.loads(resources.files("k3cupy.ops").joinpath("tables/mla_decode.json").read_text())
GPUS = list(TABLE["gpus"])


def gpu(name: str, num_sms: int) -> DeviceInfo:
    return DeviceInfo(0, name, (9, 0), num_sms, 232_448)


def entries(name: str, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in TABLE["gpus"][name]["entries"] if entry["kind"] == kind]


def test_tables_are_json() -> None:
    for path in TABLES:
        text = path.read_text(encoding="utf-8")
        assert json.loads(text)
        assert text.endswith("}\n")


@pytest.mark.parametrize("name", GPUS)
def test_every_kind_has_entries(name: str) -> None:
    facts = TABLE["gpus"][name]
    assert isinstance(facts["num_sms"], int)
    assert facts["num_sms"] > 0
    assert sorted({entry["kind"] for entry in facts["entries"]}) == KINDS
    for kind in KINDS:
        rows = [entry["num_rows"] for entry in entries(name, kind)]
        assert all(isinstance(n, int) and n > 0 for n in rows)
        assert len(set(rows)) == len(rows), "one entry for a number of rows"


@pytest.mark.parametrize("name", GPUS)
def test_every_choice_is_a_candidate(name: str) -> None:
    for entry in TABLE["gpus"][name]["entries"]:
        config = MlaDecodeConfig(**entry["chosen"])
        assert config.is_valid()
        assert config in CANDIDATES
        assert config in dispatched_configs(entry["kind"])


@pytest.mark.parametrize("name", GPUS)
def test_a_table_says_where_its_numbers_come_from(name: str) -> None:
    facts = TABLE["gpus"][name]
    assert {"driver", "nvrtc", "commit", "packages"} <= set(facts)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])


@pytest.mark.parametrize("name", GPUS)
def test_every_choice_is_as_fast_as_any_candidate(name: str) -> None:
    """By the times that the table itself holds, one for every candidate, within 2 percent."""
    keys = {f"{c.split}/{c.block_size}/{c.chunks_per_thread}" for c in CANDIDATES}
    for entry in TABLE["gpus"][name]["entries"]:
        chosen, times = MlaDecodeConfig(**entry["chosen"]), entry["us"]
        assert set(times) == keys
        time = times[f"{chosen.split}/{chosen.block_size}/{chosen.chunks_per_thread}"]
        assert time <= 1.02 * min(times.values()), (entry["kind"], entry["num_rows"])


def test_choice_for_a_listed_gpu() -> None:
    """At a measured number of rows it is the measured winner."""
    name = GPUS[0]
    every = [(variant, entry) for variant in variants() for entry in entries(name, variant.kind)]
    for variant, entry in every:
        num_rows = entry["num_rows"]
        config, reason = choose(variant, num_rows, 0, gpu(name, TABLE["gpus"][name]["num_sms"]))
        assert config == MlaDecodeConfig(**entry["chosen"])
        assert reason == f"measured on {name} at {num_rows} rows, here {num_rows}"


def check_nearest(kind: str, rows: float, measured_rows: int) -> None:
    """No entry of the first listed GPU is nearer, as a ratio, than the one that was taken."""
    ratio = {
        entry["num_rows"]: max(entry["num_rows"] / rows, rows / entry["num_rows"])
        for entry in entries(GPUS[0], kind)
    }
    assert ratio[measured_rows] == pytest.approx(min(ratio.values()))


@given(st.sampled_from(variants()), st.integers(0, 70_000), st.integers(1, 128))
def test_choice_takes_the_nearest_entry(variant: MlaDecodeVariant, tokens: int, heads: int) -> None:
    name, rows = GPUS[0], tokens * (heads + 1)
    config, reason = choose(variant, tokens, heads, gpu(name, TABLE["gpus"][name]["num_sms"]))
    found = re.fullmatch(rf"measured on {name} at (\d+) rows, here {rows}", reason)
    assert found
    check_nearest(variant.kind, max(rows, 1), int(found[1]))
    assert config in dispatched_configs(variant.kind)


@given(st.sampled_from(variants()), st.integers(0, 70_000), st.integers(1, 300))
def test_choice_for_an_unknown_gpu(variant: MlaDecodeVariant, tokens: int, num_sms: int) -> None:
    """The rows a multiprocessor decide, and the reason says so."""
    known, known_sms = GPUS[0], TABLE["gpus"][GPUS[0]]["num_sms"]
    config, reason = choose(variant, tokens, 12, gpu("Some New GPU", num_sms))
    rows = tokens * 13
    found = re.fullmatch(
        rf"Some New GPU has no measured table; {rows} rows on {num_sms} SMs take the choice of "
        rf"{known} at (\d+) rows \({known_sms} SMs\)",
        reason,
    )
    assert found
    check_nearest(variant.kind, max(rows * known_sms / num_sms, 1), int(found[1]))
    assert config in dispatched_configs(variant.kind)


def test_dispatched_configs_follow_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests of the machine code see whatever a new table names."""
    wanted = [MlaDecodeConfig(0, 144, 1), MlaDecodeConfig(0, 288, 1)]
    found = [
        {"kind": "16bit+same", "num_rows": n, "chosen": vars(config)}
        for n, config in enumerate([*wanted, wanted[0]], start=1)
    ]
    text = json.dumps({"gpus": {"X": {"num_sms": 8, "entries": found}}})
    table = MeasuredTable(lambda: text, MlaDecodeConfig)
    monkeypatch.setattr(mla_decode_config, "TABLE", table)
    assert dispatched_configs("16bit+same") == tuple(wanted)
    assert dispatched_configs("fp8+fp8") == ()
