"""The decode kernel: configurations, the measured table, and what is chosen from it."""

from __future__ import annotations

import functools
import itertools
import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toolchain_helpers import MAPPINGS, variants

from k3cupy.choose import cache
from k3cupy.choose.mla import choose, configs
from k3cupy.choose.table import AS_GOOD, Table, measured, shipped
from k3cupy.kernels.mla_decode import CANDIDATES, UNTUNED, MlaDecodeConfig, Variant
from k3cupy.runtime.devices import DeviceInfo

choose_decode = functools.partial(choose, "mla_decode")

KINDS = sorted({variant.kind for variant in variants()})

# --- Configurations ------------------------------------------------------------------------------


def test_candidates_are_valid() -> None:
    assert all(config.is_valid() for config in (*CANDIDATES, *MAPPINGS))
    assert len(set(CANDIDATES)) == len(CANDIDATES)
    assert {config.split for config in CANDIDATES} == {0, 1, 3}


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
        (1, 128, 9),
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
    if config.split:  # three warps of one chunk a lane are a row
        in_thirds = warps * config.chunks_per_thread
        assert (blocks - 1) * in_thirds < 3 * rows <= blocks * in_thirds
    cache_blocks = config.cache_blocks(rows)
    assert (cache_blocks - 1) * warps < rows <= cache_blocks * warps


def test_name_expressions_are_unique() -> None:
    every = {*CANDIDATES, *MAPPINGS}
    names = [c.name_expression(v) for c, v in itertools.product(every, variants())]
    assert len(set(names)) == len(names)


def test_name_expression_and_words() -> None:
    variant = Variant("float16", True, "fp8", True, False, True)
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
    assert not Variant("bfloat16", query_fp8=True, cache="ds_mla").is_valid()
    assert not Variant("float32").is_valid()
    assert not Variant("bfloat16", cache="fp4").is_valid()


# --- The table and the choice --------------------------------------------------------------------

TABLES = shipped("mla_decode")
NAMES = [table.header["gpu"] for table in TABLES]
(TABLE,) = (table for table in TABLES if table.header["gpu"] == "NVIDIA H200")
H200_SMS = TABLE.header["num_sms"]


def gpu(name: str, num_sms: int) -> DeviceInfo:
    return DeviceInfo(0, name, (9, 0), num_sms, 232_448)


H200 = gpu("NVIDIA H200", H200_SMS)


def test_tables_are_json() -> None:
    folder = Path(str(resources.files("k3cupy.choose"))) / "tables"
    for path in folder.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert json.loads(text)
        assert text.endswith("}\n")


@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_a_table_is_sound(table: Table) -> None:
    """Every format has entries, every candidate was timed, what is chosen is as fast as any."""
    assert sorted(table.problems) == KINDS
    for kind in KINDS:
        entries = table.entries(kind)
        assert entries
        for entry in entries.values():
            assert entry.kernel == "mla_decode"
            assert set(entry.times["mla_decode"]) == set(CANDIDATES)
            assert entry.config in CANDIDATES
            assert entry.config in configs("mla_decode", kind)
            assert entry.us is not None
            assert entry.us <= AS_GOOD * min(entry.times["mla_decode"].values()), entry.key


@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_a_table_says_where_its_numbers_come_from(table: Table) -> None:
    assert {"num_sms", "driver", "nvrtc", "commit", "packages", "unit"} <= set(table.header)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", table.header["date"])
    assert table.header["num_sms"] > 0


def test_choice_for_a_listed_gpu() -> None:
    """At a measured number of rows it is the measured winner."""
    for variant in filter(lambda v: v.vector, variants()):
        for entry in TABLE.entries(variant.kind).values():
            found = choose_decode(variant, entry.size, 0, H200)
            assert (found.kernel, found.config, found.origin) == (
                "mla_decode",
                entry.config,
                "shipped",
            )
            told = f"measured on NVIDIA H200 at {entry.size} rows, here {entry.size}"
            assert found.reason.partition("; in ")[0] == told


def check_nearest(kind: str, rows: float, measured_rows: int) -> None:
    """No entry of the H200 is nearer, as a ratio, than the one that was taken."""
    ratio = {size: max(size / rows, rows / size) for size in TABLE.entries(kind)}
    assert ratio[measured_rows] == pytest.approx(min(ratio.values()))


VECTOR = [variant for variant in variants() if variant.vector]


@given(st.sampled_from(VECTOR), st.integers(0, 70_000), st.integers(1, 128))
def test_choice_takes_the_nearest_entry(variant: Variant, tokens: int, heads: int) -> None:
    rows = tokens * (heads + 1)
    choice = choose_decode(variant, tokens, heads, H200)
    found = re.match(rf"measured on NVIDIA H200 at (\d+) rows, here {rows}(;|$)", choice.reason)
    assert found
    check_nearest(variant.kind, max(rows, 1), int(found[1]))
    assert choice.config in configs("mla_decode", variant.kind)


@given(st.sampled_from(VECTOR), st.integers(0, 70_000), st.integers(1, 300))
def test_choice_for_an_unknown_gpu(variant: Variant, tokens: int, num_sms: int) -> None:
    """The rows a multiprocessor decide, by rule, and the reason says so."""
    choice = choose_decode(variant, tokens, 12, gpu("Some New GPU", num_sms))
    rows = tokens * 13
    found = re.match(
        rf"Some New GPU has no measured table; {rows} rows on {num_sms} SMs take the choice of "
        rf"NVIDIA H200 at (\d+) rows \({H200_SMS} SMs\)",
        choice.reason,
    )
    assert found
    assert choice.origin == "rule"
    check_nearest(variant.kind, max(rows * H200_SMS / num_sms, 1), int(found[1]))
    assert choice.config in configs("mla_decode", variant.kind)


def test_large_batches_are_said_to_go_in_slices() -> None:
    few, many = (choose_decode(VECTOR[0], tokens, 12, H200).reason for tokens in (4096, 4097))
    assert "launches" not in few
    assert many.endswith("; in 2 launches")


def test_what_no_table_decides() -> None:
    named = MlaDecodeConfig(1, 128, 3)
    assert choose_decode(VECTOR[0], 4, 12, H200, named).config == named
    slow = choose_decode(replace(VECTOR[0], vector=False), 4, 12, H200)
    assert (slow.config, slow.origin) == (UNTUNED, "rule")
    assert "element-wise" in slow.reason


def test_what_was_measured_here_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epilogues have a user cache as the GEMMs do, and a warm-up compiles what it names."""
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path))
    slow, fast = MlaDecodeConfig(0, 144, 1), MlaDecodeConfig(0, 72, 4)
    entry = measured("16bit+same", 52, {"mla_decode": {slow: 2.0, fast: 1.0}})
    (variant,) = (v for v in VECTOR if v == Variant("bfloat16"))
    for machine in (H200, gpu("Some New GPU", 20)):
        assert choose_decode(variant, 4, 12, machine).origin != "user"
        assert cache.add("mla_decode", [entry], machine) is not None
        cache.reload()
        found = choose_decode(variant, 4, 12, machine)
        assert (found.config, found.origin) == (fast, "user")
        assert fast in configs("mla_decode", "16bit+same", machine)
    monkeypatch.undo()
    cache.reload()
    assert choose_decode(variant, 4, 12, H200).origin == "shipped"
