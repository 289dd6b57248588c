"""The GEMM tables: what ships is sound, and the first source that knows a product answers."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from fake_device import H200
from gemm_table_helpers import (
    K,
    N,
    measured,
    measured_table,
    product_of,
    second,
    user_cache,
)

from k3cupy import projections
from k3cupy.call.choice import PUBLIC, RULE, SHIPPED, USER
from k3cupy.call.plans import tables as tables_state
from k3cupy.choose import cache, table
from k3cupy.choose.gemm import ALL, TOKEN_CLASSES, TOKENS, choose, problem_of
from k3cupy.choose.table import (
    Entry,
    Table,
    config_of,
    entry_of,
    key_of,
    shipped,
    tables_of,
    why_unknown,
)
from k3cupy.runtime.devices import DeviceInfo

B200 = DeviceInfo(0, "NVIDIA B200", (10, 0), 148, 232_448)
B300 = DeviceInfo(0, "NVIDIA B300", (10, 3), 148, 232_448)
H100 = DeviceInfo(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448)
A100 = DeviceInfo(0, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912)


PROBLEM = problem_of(N, K)


def documents() -> dict[str, dict[str, Any]]:
    folders = resources.files("k3cupy.choose").joinpath("tables").iterdir()
    files = {folder.name: folder.joinpath("gemm.json") for folder in folders}
    return {name: json.loads(f.read_text("utf-8")) for name, f in files.items() if f.is_file()}


def table_with(*entries: Entry, origin: str = USER) -> Table:
    """A table of the H200 with some entries, as they would be read from a file."""
    _, problems = table.parts_of(table.table_text({"schema": 2, "gpu": H200.name}, entries))
    return Table(origin, {"gpu": H200.name}, problems)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets calls on any GPU choose from one table alone."""

    def use(known: Table) -> None:
        monkeypatch.setattr("k3cupy.choose.gemm.tables_of", lambda *_: (known,))
        cache.reload()

    yield use
    monkeypatch.undo()
    cache.reload()


def size_taken(num_tokens: int, n: int = N, k: int = K) -> int | None:
    """The size of the entry that a direct call takes, as its reason says; None for none."""
    found = choose(("fused_a",), n, k, num_tokens, H200)
    said = re.search(r"measured on NVIDIA H200 at M = (\d+)", found.reason)
    return int(said[1]) if said else None


# What ships


def test_a_shipped_table_never_names_a_slower_choice() -> None:
    """Read as plain JSON: what an entry names is the minimum of all that was measured.

    A linear layer takes it; where it is the framework's linear, no kernel of ours.
    """
    checked = 0
    for document in documents().values():
        gpu = document["gpu"]
        if gpu is None:
            continue
        assert gpu == H200.name
        for problem, rows in document["problems"].items():
            n, k = map(int, re.findall(r"(\d+)x(\d+)", problem)[0])
            for row in rows:
                every = {
                    (kernel, key): us
                    for kernel, times in row["us"].items()
                    for key, us in ({None: times} if kernel == "linear" else times).items()
                }
                assert "preferred" not in row, row
                found = choose(
                    ALL, n, k, row["size"], H200, residual=problem.endswith(" + residual")
                )
                key = None if found.config is None else key_of(found.config)
                assert every[found.kernel, key] == min(every.values()), (problem, row)
                if found.kernel != "linear":
                    assert every[found.kernel, key] < row["us"]["linear"], (problem, row)
                checked += 1
    assert checked == len(list(measured_table()))


@pytest.mark.parametrize("tokens", [1, 16, 32, 64])
def test_the_rule_holds_against_what_was_measured(tokens: int) -> None:
    """Had a GPU like the table's none, the kernel of the rule would seldom be far from the best."""
    lost = []
    for entry in measured_table():
        if entry.size == tokens and not entry.problem.endswith("residual"):
            found = choose(ALL, *product_of(entry), tokens, H100)
            assert found.origin == RULE
            every = [us for times in entry.times.values() for us in times.values()]
            lost.append(min(entry.times[found.kernel].values()) / min(every))
    assert len(lost) >= 50
    assert statistics.geometric_mean(lost) < 1.08
    assert max(lost) < 1.25


@pytest.mark.parametrize("name", documents())
def test_a_shipped_table_says_where_it_comes_from(name: str) -> None:
    document = documents()[name]
    assert (document["schema"], document["family"]) == (2, "gemm")
    assert document["about"]
    measured_by_us = document["gpu"] is not None
    assert name == (table.slug(document["gpu"]) if measured_by_us else document["arch"])
    facts = ("num_sms", "driver", "nvrtc", "packages", "commit", "date")
    assert all(document.get(fact) for fact in facts) == measured_by_us
    assert ("not measured by us" in document["about"].lower()) != measured_by_us
    keys = []
    for problem, rows in document["problems"].items():
        known = re.fullmatch(r"bfloat16 (\d+)x(\d+)( \+ residual)?", problem)
        assert known is not None, problem
        keys += [(int(known[1]), int(known[2]), known[3] or "", row["size"]) for row in rows]
    assert keys == sorted(set(keys))
    assert {size for *_, size in keys} <= set(TOKENS if measured_by_us else range(1, 17))


def test_public_tables_hold_no_times() -> None:
    public = [known for known in shipped("gemm") if known.origin == PUBLIC]
    assert {known.header["arch"] for known in public} == {"sm_100", "sm_103"}
    for known in public:
        for entry in known:
            assert entry.linear_us is None
            assert entry.times == {}
            assert entry.kernel != "linear"
            if entry.config is not None:
                assert entry.kernel == "skinny"
                assert entry.config.num_rows == entry.size


def test_the_measured_table_knows_every_projection() -> None:
    known = measured_table()
    assert known.header["gpu"] == "NVIDIA H200"
    for model in projections.MODELS:
        for n, k in projections.preset_shapes(model):
            assert set(TOKEN_CLASSES) <= set(known.entries(problem_of(n, k)))


def test_an_entry_survives_json() -> None:
    for known in shipped("gemm"):
        for entry in list(known)[:40]:
            again = entry_of(entry.problem, json.loads(json.dumps(entry.fields())))
            assert again == entry


# Looking up


@pytest.mark.parametrize(
    ("num_tokens", "tokens"),
    [(1, 1), (2, 8), (7, 8), (8, 8), (9, 16), (17, 32), (33, 64), (64, 64)],
)
def test_a_number_of_tokens_takes_the_next_one_listed(
    num_tokens: int, tokens: int, only: Any
) -> None:
    for origin in (SHIPPED, USER):
        only(table_with(*(measured(t) for t in TOKEN_CLASSES), origin=origin))
        assert size_taken(num_tokens) == tokens
        found = choose(ALL, N, K, num_tokens, H200)
        assert (found.origin, found.config) == (origin, second(tokens))


def test_no_call_takes_an_entry_from_beyond_its_class(only: Any) -> None:
    only(table_with(measured(4), measured(64)))
    taken = {m: size_taken(m) for m in (1, 3, 5, 32, 33)}
    assert taken == {1: None, 3: 4, 5: None, 32: None, 33: 64}
    assert size_taken(4, N, K + 16) is None


def test_public_figures_hold_for_the_listed_numbers_only() -> None:
    """What a shape does not list is the framework's; a shape that is not there is unknown."""
    listed = choose(ALL, 2112, 7168, 4, B200)
    assert (listed.kernel, listed.origin) == ("fused_a", PUBLIC)
    for num_tokens in (3, 5, 17, 64):
        other = choose(ALL, 2112, 7168, num_tokens, B200)
        assert (other.kernel, other.origin) == ("linear", PUBLIC)
        assert other.reason.endswith(f"at M = {num_tokens}")
    one = choose(ALL, 2112, 7168, 1, B200)
    assert (one.kernel, one.origin) == ("skinny", PUBLIC)
    assert choose(ALL, 7168, 14336, 1, B200).origin == "rule"
    assert choose(ALL, 7168, 14336, 1, B300).origin == PUBLIC


def test_a_residual_takes_its_own_entry_or_that_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_one = choose(ALL, 7168, 3584, 4, B300, residual=True)
    assert (with_one.kernel, with_one.origin) == ("skinny", PUBLIC)
    assert choose(ALL, 7168, 3584, 4, B300).kernel == "linear"
    with user_cache(tmp_path, monkeypatch, measured(4, n=3656)):
        plain = choose(ALL, 3656, 7168, 4, H200, residual=True)
        assert ", without the residual" in plain.reason
        assert plain.config == choose(ALL, 3656, 7168, 4, H200).config


def test_a_table_holds_for_its_own_gpu_only() -> None:
    assert choose(ALL, 2112, 7168, 8, H200).origin == SHIPPED
    for gpu in (H100, A100):
        assert tables_of("gemm", gpu) == ()
        assert choose(ALL, 2112, 7168, 8, gpu).origin == "rule"
    assert why_unknown("gemm", "2112 x 7168", H100) == (
        "NVIDIA H100 80GB HBM3 has no measured table (that of NVIDIA H200 does not hold for it)"
    )
    assert "NVIDIA A100-SXM4-80GB has no measured table" in why_unknown("gemm", "any", A100)
    told = "48 x 7168 is not in the table of NVIDIA H200"
    assert why_unknown("gemm", "48 x 7168", H200) == told


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(1, "1 row"), (2, "2 to 8 rows"), (16, "9 to 16 rows"), (40, "33 to 64 rows")],
)
def test_a_reason_says_which_measurement_is_missing(
    tokens: int, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other numbers of rows may be in the table."""
    missing = f" with {rows} is not in the table of NVIDIA H200: the rule"
    other = replace(measured(32), problem=problem_of(3656, 7168))
    with user_cache(tmp_path, monkeypatch, other):
        assert f"3656 x 7168{missing}" in choose(ALL, 3656, 7168, tokens, H200).reason


def test_the_user_cache_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = choose(ALL, N, K, 8, H200)
    assert before.origin == SHIPPED
    state = tables_state()
    with user_cache(tmp_path, monkeypatch, measured(8)):
        assert tables_state() > state
        found = choose(ALL, N, K, 8, H200)
        assert (found.origin, found.kernel, found.config) == (USER, "fused_a", second(8))
        kept = cache.table("gemm", H200.name).entries(PROBLEM)[8]
        assert kept.date and kept.sources
        assert choose(ALL, N, K, 16, H200).origin == SHIPPED
        assert choose(ALL, N, K, 8, B200) != found
    assert choose(ALL, N, K, 8, H200) == before


def test_a_user_cache_of_another_gpu_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured figures go before public ones, and a GPU without any gets some."""
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path))
    for gpu in (B200, A100):
        cache.add("gemm", [measured(4)], gpu)
    cache.reload()
    for gpu in (B200, A100):
        assert choose(ALL, N, K, 4, gpu).origin == USER
    monkeypatch.undo()
    cache.reload()


# The GEMMs choose from the same tables


def test_the_gemms_take_the_fastest_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = measured(8, fused_us=5.0, skinny_us=4.0, linear_us=4.5)
    with user_cache(tmp_path, monkeypatch, entry):
        fused = choose(("fused_a",), N, K, 5, H200)
        assert (fused.kernel, fused.config) == ("fused_a", second(8))
        said = "measured on NVIDIA H200 at M = 8: {:.2f} us, F.linear 4.50 us"
        assert fused.reason == said.format(5)
        skinny = choose(("skinny",), N, K, 5, H200)
        assert skinny.config == replace(second(8, "skinny"), num_rows=5)
        assert skinny.reason == said.format(4)
    assert choose(("fused_a",), N, K, 5, H200).origin == SHIPPED


def test_a_choice_that_does_not_fit_the_gpu_is_passed_over() -> None:
    small = replace(H200, shared_memory_optin=101_376)
    for tokens in (1, 16, 64):
        assert choose(("fused_a",), N, K, tokens, small).config.is_valid(small)


@pytest.mark.parametrize("num_sms", [1, 2, 7])
def test_a_small_part_of_a_gpu_gets_choices_that_fit(num_sms: int) -> None:
    """As a process under MPS sees one, with fewer multiprocessors than a cluster has blocks."""
    part = replace(H200, num_sms=num_sms, name="A part")
    for n, k, tokens in ((8, 16, 1), (144, 7168, 16), (2112, 7168, 40)):
        for invariant in (False, True):
            found = choose(("fused_a",), n, k, tokens, part, batch_invariant=invariant).config
            assert found.fits(tokens, part)
        if tokens <= 16:
            assert choose(("skinny",), n, k, tokens, part).config.is_valid(part)


def test_batch_invariance_takes_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user cache that lacks a class of tokens decides nothing, or orders would mix."""
    before = choose(("fused_a",), N, K, 8, H200, batch_invariant=True).config
    with user_cache(tmp_path, monkeypatch, measured(8)):
        for tokens in (1, 8, 40):
            found = choose(("fused_a",), N, K, tokens, H200, batch_invariant=True)
            assert found.config.order == before.order


# Entries


def test_the_fastest_of_an_entry() -> None:
    fused, skinny = second(8), second(8, "skinny")
    ours = {"fused_a": {fused: 3.0}, "skinny": {skinny: 2.0}}

    def fastest(times: Any) -> tuple[str, Any, float | None]:
        entry = table.measured(PROBLEM, 8, times)
        return entry.kernel, entry.config, entry.us

    assert fastest({"linear": {None: 4.0}, **ours}) == ("skinny", skinny, 2.0)
    assert fastest(ours) == ("skinny", skinny, 2.0)
    assert fastest({"linear": {None: 2.0}, **ours}) == ("linear", None, 2.0)
    assert fastest({"linear": {None: 4.0}}) == ("linear", None, 4.0)


def test_what_is_as_good_as_the_fastest_may_be_preferred() -> None:
    """Within 1%, as two runs differ; what is clearly slower, or was not measured, may not."""
    first, other = second(8), second(16)
    for us, is_refused in ((3.02, False), (3.1, True)):
        times = {"fused_a": {first: 3.0, other: us}}
        if is_refused:
            with pytest.raises(ValueError, match="not as good as the fastest"):
                table.measured(PROBLEM, 8, times, preferred=other)
        else:
            entry = table.measured(PROBLEM, 8, times, preferred=other)
            assert (entry.config, entry.us) == (other, us)
            assert entry_of(PROBLEM, json.loads(json.dumps(entry.fields()))) == entry
    with pytest.raises(ValueError, match="not as good as the fastest"):
        table.measured(PROBLEM, 8, {"fused_a": {first: 3.0}}, preferred=other)


def test_keys_of_configurations() -> None:
    for kernel in ("fused_a", "skinny"):
        config = second(8, kernel)
        assert config_of(kernel, key_of(config)) == config
    assert key_of(config_of("skinny", "1/224/2/4/8")) == "1/224/2/4/8"


@pytest.mark.parametrize(
    ("kernel", "key"),
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
def test_keys_of_nothing_that_runs(kernel: str, key: str) -> None:
    with pytest.raises(ValueError, match=kernel):
        config_of(kernel, key)
