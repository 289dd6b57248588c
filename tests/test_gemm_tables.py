"""The GEMM tables: what ships is sound, and the first source that knows a product answers."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from fake_device import H200
from gemm_table_helpers import K, N, measured, second, user_cache

from k3cupy import projections
from k3cupy.ops import fused_a_gemm_choice, gemm_tables, skinny_gemm_choice
from k3cupy.ops.gemm_entry import Choice, config_of, entry_of, fastest_of, key_of
from k3cupy.ops.gemm_tables import PUBLIC, SHIPPED, TOKEN_CLASSES, TOKENS, USER
from k3cupy.runtime.devices import DeviceInfo

B200 = DeviceInfo(0, "NVIDIA B200", (10, 0), 148, 232_448)
B300 = DeviceInfo(0, "NVIDIA B300", (10, 3), 148, 232_448)
H100 = DeviceInfo(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448)
A100 = DeviceInfo(0, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912)


def documents() -> dict[str, dict[str, Any]]:
    folder = resources.files("k3cupy.ops").joinpath("tables/gemm")
    return {file.name: json.loads(file.read_text("utf-8")) for file in folder.iterdir()}


# What ships


def test_a_shipped_table_never_lists_a_slower_choice() -> None:
    """Read as plain JSON: what is chosen is the minimum, and below the framework's linear."""
    checked = 0
    for document in documents().values():
        for row in document["entries"] if document["measured_by_us"] else ():
            every = [us for times in row["us"].values() for us in times.values()]
            if row["chosen"] is None:
                assert row["linear_us"] <= min(every), row
            else:
                us = row["us"][row["chosen"]["backend"]][row["chosen"]["config"]]
                assert us == min(every), row
                assert us < row["linear_us"], row
            checked += 1
    assert checked >= len(projections.shapes()) * len(TOKEN_CLASSES)


@pytest.mark.parametrize("name", documents())
def test_a_shipped_table_says_where_it_comes_from(name: str) -> None:
    document = documents()[name]
    assert document["schema"] == 1
    assert document["about"]
    measured_by_us = document["measured_by_us"]
    facts = ("num_sms", "driver", "nvrtc", "packages", "commit", "date")
    assert all(document.get(fact) for fact in facts) == measured_by_us
    assert (document["gpu"] is not None) == measured_by_us
    assert ("not measured by us" in document["about"]) != measured_by_us
    keys = [(row["n"], row["k"], row["tokens"], row["residual"]) for row in document["entries"]]
    assert keys == sorted(set(keys))
    assert {tokens for _, _, tokens, _ in keys} <= set(TOKENS if measured_by_us else range(1, 17))


def test_public_tables_hold_no_times() -> None:
    public = [table for table in gemm_tables.shipped() if table.source == PUBLIC]
    assert {table.arch for table in public} == {"sm_100", "sm_103"}
    for table in public:
        for entry in table.entries:
            assert entry.linear_us is None
            assert entry.times == {}
            assert entry.chosen is not None
            if entry.chosen.config is not None:
                assert entry.chosen.backend == "skinny"
                assert entry.chosen.config.num_rows == entry.tokens


def test_the_measured_table_knows_every_projection() -> None:
    (table,) = (t for t in gemm_tables.shipped() if t.source == SHIPPED)
    assert table.gpu == "NVIDIA H200"
    for p in projections.shapes():
        assert set(TOKEN_CLASSES) <= set(table.of_shape(p.n, p.k))


def test_an_entry_survives_json() -> None:
    for table in gemm_tables.shipped():
        for entry in table.entries[:40]:
            again = entry_of(
                json.loads(json.dumps(entry.fields())),
                entry.source,
                measured=entry.source == SHIPPED,
            )
            assert again == entry


# Looking up


@pytest.mark.parametrize(
    ("num_tokens", "tokens"),
    [(1, 1), (2, 8), (7, 8), (8, 8), (9, 16), (17, 32), (33, 64), (64, 64)],
)
def test_a_number_of_tokens_takes_the_next_one_listed(num_tokens: int, tokens: int) -> None:
    for kind in (SHIPPED, USER):
        entries = tuple(measured(t, source=kind) for t in TOKEN_CLASSES)
        table = gemm_tables.GemmTable(kind, H200.name, "sm_90", entries)
        found = table.entry(N, K, num_tokens, residual=False)
        assert found is not None and found.tokens == tokens


def test_no_call_takes_an_entry_from_beyond_its_class() -> None:
    table = gemm_tables.GemmTable(USER, H200.name, "sm_90", (measured(4), measured(64)))
    assert table.entry(N, K, 1, residual=False) is None
    assert table.entry(N, K, 3, residual=False) == measured(4)
    assert table.entry(N, K, 5, residual=False) is None
    assert table.entry(N, K, 32, residual=False) is None
    assert table.entry(N, K, 33, residual=False) == measured(64)
    assert table.entry(N, K + 16, 4, residual=False) is None


def test_public_figures_hold_for_the_listed_numbers_only() -> None:
    """What a shape does not list is the framework's; a shape that is not there is unknown."""
    listed = gemm_tables.entry(2112, 7168, 4, B200)
    assert listed is not None and listed.chosen == Choice("fused_a", None)
    for num_tokens in (3, 5, 17, 64):
        other = gemm_tables.entry(2112, 7168, num_tokens, B200)
        assert other is not None
        assert (other.chosen, other.source, other.tokens) == (None, PUBLIC, num_tokens)
    one = gemm_tables.entry(2112, 7168, 1, B200)
    assert one is not None and one.chosen is not None and one.chosen.backend == "skinny"
    assert gemm_tables.entry(7168, 14336, 1, B200) is None
    assert gemm_tables.entry(7168, 14336, 1, B300) is not None


def test_a_residual_takes_its_own_entry_or_that_without() -> None:
    with_one = gemm_tables.entry(7168, 3584, 4, B300, residual=True)
    assert with_one is not None and with_one.residual and with_one.chosen is not None
    without = gemm_tables.entry(7168, 3584, 4, B300)
    assert without is not None and without.chosen is None
    plain = gemm_tables.entry(3072, 7168, 4, H200, residual=True)
    assert plain is not None and not plain.residual


def test_a_table_holds_for_its_own_gpu_only() -> None:
    assert gemm_tables.entry(2112, 7168, 8, H200) is not None
    for gpu in (H100, A100):
        assert gemm_tables.entry(2112, 7168, 8, gpu) is None
    assert gemm_tables.why_unknown(2112, 7168, H100) == (
        "NVIDIA H100 80GB HBM3 has no measured table (that of NVIDIA H200 does not hold for it)"
    )
    assert gemm_tables.why_unknown(2112, 7168, A100) == (
        "NVIDIA A100-SXM4-80GB has no measured table"
    )
    assert gemm_tables.why_unknown(48, 7168, H200) == "48 x 7168 is not in the table of NVIDIA H200"


def test_the_user_cache_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = gemm_tables.entry(N, K, 8, H200)
    assert shipped is not None and shipped.source == SHIPPED
    before = gemm_tables.generation()
    with user_cache(tmp_path, monkeypatch, measured(8)):
        assert gemm_tables.generation() > before
        found = gemm_tables.entry(N, K, 8, H200)
        assert found is not None
        assert (found.source, found.chosen) == (USER, Choice("fused_a", second(8)))
        assert found.date and found.sources
        beside = gemm_tables.entry(N, K, 16, H200)
        assert beside is not None and beside.source == SHIPPED
        assert gemm_tables.entry(N, K, 8, B200) != found
    assert gemm_tables.entry(N, K, 8, H200) == shipped


def test_a_user_cache_of_another_gpu_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured figures go before public ones, and a GPU without any gets some."""
    from k3cupy.ops import gemm_cache

    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path))
    for gpu in (B200, A100):
        gemm_cache.add([measured(4)], gpu)
    gemm_tables.reload()
    for gpu in (B200, A100):
        found = gemm_tables.entry(N, K, 4, gpu)
        assert found is not None and found.source == USER
    monkeypatch.undo()
    gemm_tables.reload()


# The GEMMs choose from the same tables


def test_the_gemms_take_the_fastest_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = measured(8, fused_us=5.0, skinny_us=4.0, linear_us=4.5)
    with user_cache(tmp_path, monkeypatch, entry):
        config, reason = fused_a_gemm_choice.choose(N, K, 5, H200)
        assert config == second(8)
        assert reason == (
            "measured on NVIDIA H200 for 2112 x 7168, M = 8; F.linear was faster, 4.50 against "
            "5.00 us"
        )
        skinny, reason = skinny_gemm_choice.choose(N, K, 5, H200)
        assert skinny == replace(second(8, "skinny"), num_rows=5)
        assert reason == "measured on NVIDIA H200 for 2112 x 7168, M = 8"
    assert fused_a_gemm_choice.choose(N, K, 5, H200)[0] != second(8)


def test_a_choice_that_does_not_fit_the_gpu_is_passed_over() -> None:
    small = replace(H200, shared_memory_optin=101_376)
    for tokens in (1, 16, 64):
        config, _ = fused_a_gemm_choice.choose(N, K, tokens, small)
        assert config.is_valid(small)


def test_batch_invariance_takes_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user cache that lacks a class of tokens decides nothing, or orders would mix."""
    before = fused_a_gemm_choice.choose(N, K, 8, H200, batch_invariant=True)[0]
    with user_cache(tmp_path, monkeypatch, measured(8)):
        for tokens in (1, 8, 40):
            config, _ = fused_a_gemm_choice.choose(N, K, tokens, H200, batch_invariant=True)
            assert config.order == before.order


# Entries


def test_fastest_of() -> None:
    fused, skinny = second(8), second(8, "skinny")
    times = {"fused_a": {fused: 3.0}, "skinny": {skinny: 2.0}}
    assert fastest_of(4.0, times) == Choice("skinny", skinny)
    assert fastest_of(None, times) == Choice("skinny", skinny)
    assert fastest_of(2.0, times) is None
    assert fastest_of(4.0, {}) is None


def test_keys_of_configurations() -> None:
    for backend in ("fused_a", "skinny"):
        config = second(8, backend)
        assert config_of(backend, key_of(config)) == config
    assert key_of(config_of("skinny", "1/224/2/4/8")) == "1/224/2/4/8"


@pytest.mark.parametrize(
    ("backend", "key"),
    [
        ("fused_a", "8/16/512"),
        ("fused_a", "8/16/512/8/8/8/1/1/4/9/9/9"),
        ("fused_a", "8/16/512/8/8/8/1/1/x"),
        ("fused_a", "8/16/500/8/8/8/1/1/4"),
        ("fused_a", "0/0/0/0/0/0/0/0/0"),
        ("fused_a", ""),
        ("skinny", "9/224/2/4/8"),
        ("skinny", "1/224/2/4/3"),
        ("cutlass", "1/224/2/4/8"),
    ],
)
def test_keys_of_nothing_that_runs(backend: str, key: str) -> None:
    with pytest.raises(ValueError, match=backend):
        config_of(backend, key)
