"""The user cache: kept, merged, and ignored with one warning where it cannot be used."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_device import H200
from gemm_table_helpers import K, N, measured, second
from helpers import run_program

from k3cupy.call.choice import SHIPPED, USER
from k3cupy.choose import cache
from k3cupy.choose.gemm import TOKENS, choose, problem_of
from k3cupy.choose.mla import configs
from k3cupy.choose.table import Entry, kernels_digest, shipped, slug

NAME = H200.name
PROBLEM = problem_of(N, K)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file of a GPU in an empty cache; nothing of it stays behind."""
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path / "cache"))
    cache._warned.clear()
    cache.reload()
    yield cache.path_of("gemm", NAME)
    monkeypatch.undo()
    cache.reload()


def written(path: Path, *entries: Entry) -> dict[str, Any]:
    assert cache.add("gemm", entries or (measured(8), measured(16)), H200) == path
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def quiet_read() -> tuple[Entry, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tuple(cache.table("gemm", NAME))


# Keeping


def test_what_is_added_is_read(path: Path) -> None:
    entries = [
        measured(8, skinny_us=4.0),
        measured(16, fused_us=9.5),
        measured(4, residual=True),
    ]
    document = written(path, *entries)
    assert path == path.parents[2] / "tables-v2" / "nvidia_h200" / "gemm.json"
    assert (document["schema"], document["family"]) == (2, "gemm")
    assert (document["gpu"], document["arch"], document["num_sms"]) == (NAME, "sm_90", 132)
    found = {entry.key: entry for entry in quiet_read()}
    assert len(found) == 3
    assert cache.table("gemm", NAME).origin == USER
    for entry in entries:
        again = found[entry.key]
        assert again.sources == kernels_digest("gemm")
        assert len(again.date) == 10
        assert replace(again, date="", sources="") == entry
    assert found[PROBLEM, 16].kernel == "linear"
    assert list(path.parent.glob("*.tmp")) == []
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_newer_entry_of_a_product_counts(path: Path) -> None:
    written(path, measured(8, linear_us=9.0), measured(16))
    written(path, measured(8, linear_us=8.0), measured(32))
    found = {entry.size: entry for entry in quiet_read()}
    assert sorted(found) == [8, 16, 32]
    assert found[8].linear_us == 8.0


def test_nothing_there_is_no_entries(path: Path) -> None:
    assert quiet_read() == ()
    assert not path.parent.exists()


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import platformdirs

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("K3CUPY_CACHE_DIR", "~/measured")
    assert cache.directory() == tmp_path / "measured/tables-v2"
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("K3CUPY_CACHE_DIR")
        else:
            monkeypatch.setenv("K3CUPY_CACHE_DIR", value)
        assert cache.directory() == Path(platformdirs.user_cache_dir("k3cupy")) / "tables-v2"
    monkeypatch.delenv("HOME")
    assert cache.directory().name == "tables-v2"
    assert slug("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == "nvidia_h100_80gb_hbm3_mig_1g_10gb"


# Files that cannot be used: ignored with one warning that names the file


def truncated(path: Path, _: dict[str, Any]) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def with_fields(**changes: Any) -> Callable[[Path, dict[str, Any]], None]:
    def change(path: Path, document: dict[str, Any]) -> None:
        path.write_text(json.dumps({**document, **changes}))

    return change


def with_text(text: bytes) -> Callable[[Path, dict[str, Any]], None]:
    def change(path: Path, _: dict[str, Any]) -> None:
        path.write_bytes(text)

    return change


def a_directory(path: Path, _: dict[str, Any]) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path, _: dict[str, Any]) -> None:
    path.unlink()
    os.mkfifo(path)


def huge(path: Path, _: dict[str, Any]) -> None:
    os.truncate(path, 1 << 27)


def a_name_twice(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document).replace("{", '{"gpu": "another", ', 1))


def of_other_kernels(path: Path, document: dict[str, Any]) -> None:
    rows = [{**row, "sources": "0" * 16} for row in document["problems"][PROBLEM]]
    path.write_text(json.dumps({**document, "problems": {PROBLEM: rows}}))


UNUSABLE: dict[str, tuple[Callable[[Path, dict[str, Any]], None], str]] = {
    "truncated": (truncated, "no table of this version"),
    "empty": (with_text(b""), "no table of this version"),
    "not-json": (with_text(b"once upon a time"), "no table of this version"),
    "not-text": (with_text(b"\xff\xfe\x00"), "no table of this version"),
    "nested": (with_text(b"[" * 100_000), "no table of this version"),
    "a-list": (with_text(b"[]"), "no table of this version"),
    "a-number": (with_text(b"3"), "no table of this version"),
    "older": (with_fields(schema=0), "expected schema 2, got 0"),
    "newer": (with_fields(schema=3), "expected schema 2, got 3"),
    "another-gpu": (with_fields(gpu="NVIDIA H100"), "expected measurements of NVIDIA H200"),
    "no-gpu": (with_fields(gpu=None), "expected measurements of NVIDIA H200, got None"),
    "no-problems": (with_fields(problems=None), "no table of this version"),
    "a-problem-of-no-entries": (with_fields(problems={"a": 3}), "no table of this version"),
    "a-problem-of-a-text": (with_fields(problems={PROBLEM: "x" * 5_000_000}), "no list of entries"),
    "a-problem-of-a-mapping": (with_fields(problems={PROBLEM: {"size": 8}}), "no list of entries"),
    "an-entry-of-no-fields": (with_fields(problems={PROBLEM: [[]]}), "expected the fields"),
    "a-name-twice": (a_name_twice, "a name stands there twice"),
    "of-400-digits": (with_fields(schema=10**400), "expected schema 2, got 1000"),
    "of-5-mb": (with_fields(gpu="x" * 5_000_000), "expected measurements of NVIDIA H200, got 'xxx"),
    "huge": (huge, "no table of this version"),
    "directory": (a_directory, "cannot be read"),
    "pipe": (a_pipe, "cannot be read"),
    "older-kernels": (of_other_kernels, "kernels of another version"),
    "alone": (
        with_fields(unit="us a launch, cold weights"),
        "measured in another way (in 'us a launch, cold weights', not in 'us added to the chain",
    ),
    "nobody-says-how": (with_fields(unit=None), "measured in another way (in None, not in"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_file_is_ignored_with_one_warning(name: str, path: Path) -> None:
    """Never a crash, never its plan: the shipped table answers instead."""
    spoil, text = UNUSABLE[name]
    spoil(path, written(path))
    cache.reload()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            cache.reload()
            assert choose(("fused_a",), N, K, 8, H200).origin == SHIPPED
            assert tuple(cache.table("gemm", NAME)) == ()
    assert [w.category for w in caught] == [UserWarning]
    message = str(caught[0].message)
    assert str(path) in message
    assert text in message
    assert "ignored" in message
    assert len(message) < 600 + len(str(path))


@pytest.mark.parametrize("name", [name for name in UNUSABLE if name not in ("directory", "pipe")])
def test_an_unusable_file_is_replaced_by_the_next_measurement(name: str, path: Path) -> None:
    UNUSABLE[name][0](path, written(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cache.add("gemm", [measured(8)], H200) == path
    assert measured(8).key in {entry.key for entry in quiet_read()}


@pytest.mark.parametrize("family", ["gemm", "mla_decode", "mla_prefill"])
def test_what_was_measured_alone_and_in_the_chain_never_stand_together(
    family: str, path: Path
) -> None:
    """One line says that the old ones are put aside; the next measurement replaces all of them."""
    table = next(t for t in shipped(family) if t.header["gpu"] == NAME)
    some = [replace(entry, date="", sources="") for entry in list(table)[:3]]
    path = path.with_name(f"{family}.json")
    assert cache.add(family, some[:2], H200) == path
    document = json.loads(path.read_text())
    assert document["unit"].startswith("us added to the chain")
    path.write_text(json.dumps({**document, "unit": "us a launch"}))
    with pytest.warns(UserWarning, match="they were measured in another way") as caught:
        cache.reload()
        assert not list(cache.table(family, NAME)) and not list(cache.table(family, NAME))
        assert cache.add(family, some[2:], H200) == path
    assert len(caught) == 1
    cache.reload()
    assert [entry.key for entry in cache.table(family, NAME)] == [some[2].key]
    assert json.loads(path.read_text())["unit"] == document["unit"]


ENTRY = measured(8).fields()
TIMES = ENTRY["us"]
FIRST, SECOND = TIMES["fused_a"]
BAD_ENTRIES: dict[str, Any] = {
    "not-a-mapping": 3,
    "no-size": {name: value for name, value in ENTRY.items() if name != "size"},
    "no-times-and-no-kernel": {"size": 8},
    "size-zero": {**ENTRY, "size": 0},
    "size-text": {**ENTRY, "size": "8"},
    "size-true": {**ENTRY, "size": True},
    "size-of-400-digits": {**ENTRY, "size": 10**400},
    "size-of-20-digits": {**ENTRY, "size": 10**19},
    "no-times": {**ENTRY, "us": {}},
    "no-time-of-a-kernel": {**ENTRY, "us": {"fused_a": {}}},
    "times-of-no-kernel": {**ENTRY, "us": [5.0]},
    "impossible-config": {**ENTRY, "us": {**TIMES, "fused_a": {"8/16/512/1/8/8/1/1/4": 5.0}}},
    "junk-config": {**ENTRY, "us": {**TIMES, "fused_a": {"fast": 5.0}}},
    "unknown-kernel": {**ENTRY, "us": {**TIMES, "cutlass": {"1": 1.0}}},
    "long-config": {**ENTRY, "us": {"fused_a": {"8/" * 2_500_000: 5.0}}},
    "long-numbers": {**ENTRY, "us": {"fused_a": {"/".join(["9" * 300] * 9): 5.0}}},
    "long-kernel": {**ENTRY, "us": {"k" * 5_000_000: {"1": 1.0}}},
    "choice-of-a-list": {"size": 8, "kernel": [], "config": None},
    "config-of-a-list": {"size": 8, "kernel": "fused_a", "config": []},
    "config-of-a-number": {"size": 8, "kernel": "fused_a", "config": 8},
    "nested-date": {**ENTRY, "date": json.loads("[" * 900 + "]" * 900)},
    "time-of-400-digits": {**ENTRY, "us": {**TIMES, "fused_a": {SECOND: 10**400}}},
    "linear-of-400-digits": {**ENTRY, "us": {**TIMES, "linear": 10**400}},
    "time-of-5-mb": {**ENTRY, "us": {**TIMES, "linear": "x" * 5_000_000}},
    "unknown-choice": {"size": 8, "kernel": "cutlass", "config": None},
    "zero-time": {**ENTRY, "us": {**TIMES, "fused_a": {SECOND: 0}}},
    "negative-time": {**ENTRY, "us": {**TIMES, "fused_a": {SECOND: -5.0}}},
    "nan-time": {**ENTRY, "us": {**TIMES, "fused_a": {SECOND: float("nan")}}},
    "true-time": {**ENTRY, "us": {**TIMES, "fused_a": {SECOND: True}}},
    "infinite-linear": {**ENTRY, "us": {**TIMES, "linear": float("inf")}},
    "text-time": {**ENTRY, "us": {**TIMES, "fused_a": {SECOND: "fast"}}},
    "slower-choice": {"size": 8, "us": {"fused_a": TIMES["fused_a"]}, "preferred": FIRST},
    "slower-than-linear": {**ENTRY, "preferred": SECOND},
    "unmeasured-choice": {
        "size": 8,
        "us": {"fused_a": TIMES["fused_a"]},
        "preferred": "8/16/64/2/2/4/1/1/1",
    },
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_a_bad_entry_is_left_out_and_the_others_stay(name: str, path: Path) -> None:
    """It is read when its problem is asked for, and then warned about, once."""
    document = written(path, measured(16))
    (good,) = document["problems"][PROBLEM]
    bad = BAD_ENTRIES[name]
    bad = {**bad, "sources": good["sources"]} if isinstance(bad, dict) else bad
    path.write_text(json.dumps({**document, "problems": {PROBLEM: [bad, good], "other": [bad]}}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = cache.table("gemm", NAME)
    with pytest.warns(
        UserWarning, match=rf"bad entries are ignored, as one of {PROBLEM} "
    ) as caught:
        for again in (table, cache.table("gemm", NAME)):
            assert list(again.entries(PROBLEM)) == [16]
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert len(str(caught[0].message)) < 600 + len(str(path)), "a long value is not quoted whole"
    cache.reload()
    assert choose(("fused_a",), N, K, 8, H200).origin == SHIPPED
    assert choose(("fused_a",), N, K, 16, H200).origin == USER


@pytest.mark.parametrize("problem", ["9" * 5000, "bfloat16 \u00b2x\u0663", "\ud800"])
def test_a_name_of_any_digits_is_kept(problem: str, path: Path) -> None:
    """The next measurement sorts the problems of the file, and writes them again."""
    document = written(path, measured(16))
    document["problems"][problem] = document["problems"][PROBLEM]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert cache.add("gemm", [measured(8)], H200) == path
    cache.reload()
    assert {entry.problem for entry in quiet_read()} == {problem, PROBLEM}


def test_many_bad_entries_are_one_warning(path: Path) -> None:
    document = written(path, measured(16))
    (good,) = document["problems"][PROBLEM]
    bad = [{**good, "size": -i} for i in range(100)]
    problems = {PROBLEM: [*bad, good], "bfloat16 16x128": bad}
    path.write_text(json.dumps({**document, "problems": problems}))
    with pytest.warns(UserWarning, match="bad entries are ignored") as caught:
        assert [entry.size for entry in cache.table("gemm", NAME)] == [16]
    assert len(caught) == 1


@pytest.mark.parametrize("family", ["mla_decode", "mla_prefill"])
def test_a_number_of_400_digits_is_no_size_of_an_epilogue(family: str, path: Path) -> None:
    (table,) = shipped(family)
    entry = next(iter(table))
    path = path.with_name(f"{family}.json")
    assert cache.add(family, [replace(entry, date="", sources="")], H200) == path
    document = json.loads(path.read_text())
    document["problems"][entry.problem][0]["size"] = 10**400
    path.write_text(json.dumps(document))
    cache.reload()
    expected = configs(family, entry.problem)
    with pytest.warns(UserWarning, match=f"ignored, as one of {re.escape(entry.problem)}"):
        assert configs(family, entry.problem, H200) == expected


def test_an_entry_of_too_many_tokens_answers_nothing(path: Path) -> None:
    document = written(path, measured(16))
    (good,) = document["problems"][PROBLEM]
    path.write_text(json.dumps({**document, "problems": {PROBLEM: [{**good, "size": 65}]}}))
    cache.reload()
    for tokens in (8, 16, 64):
        assert choose(("fused_a",), N, K, tokens, H200).origin == SHIPPED


# Places that cannot be written


@pytest.mark.parametrize("kind", ["read-only", "file-in-the-way", "directory-in-the-way"])
def test_a_place_that_cannot_be_written(kind: str, path: Path) -> None:
    """One warning that names the file, no exception, and nothing half-written."""
    if kind == "read-only":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        path.parent.mkdir(parents=True)
        path.parent.chmod(0o555)
    elif kind == "file-in-the-way":
        path.parents[2].write_text("a file")
    else:
        path.mkdir(parents=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert cache.add("gemm", [measured(8)], H200) is None
    if kind == "read-only":
        path.parent.chmod(0o755)
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert "K3CUPY_CACHE_DIR" in str(caught[0].message)
    assert not list(path.parents[2].rglob("*.tmp"))


def test_a_full_disk_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(path, measured(8))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(UserWarning, match="No space left"):
            assert cache.add("gemm", [measured(16)], H200) is None
    assert [entry.size for entry in quiet_read()] == [8]
    assert not list(path.parent.glob("*.tmp"))


def test_a_link_in_the_way_is_not_followed(path: Path) -> None:
    """Neither by the lock nor by what is written."""
    precious = path.parents[2] / "precious"
    written(path, measured(8))
    precious.write_text("as it was")
    (path.parent / f"gemm.{os.getpid()}.tmp").symlink_to(precious)
    assert cache.add("gemm", [measured(16)], H200) == path
    lock = Path(f"{path}.lock")
    lock.unlink(missing_ok=True)
    lock.symlink_to(precious)
    with pytest.warns(UserWarning, match="nothing was kept"):
        assert cache.add("gemm", [measured(32)], H200) is None
    assert precious.read_text() == "as it was"


@pytest.mark.parametrize("named", ["~nobody-of-this-name", None])
def test_a_user_without_a_home(
    named: str | None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder named `~` in the working directory is read, and none is made."""
    import pwd

    def unknown(_: int) -> Any:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "K3CUPY_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if named is not None:
        monkeypatch.setenv("K3CUPY_CACHE_DIR", named)
    folder = path.parents[3]
    monkeypatch.chdir(folder)
    home = folder / (named or "~/.cache/k3cupy")
    planted = home / "tables-v2/nvidia_h200/gemm.json"
    planted.parent.mkdir(parents=True)
    planted.write_text("not to be read")
    assert quiet_read() == ()
    with pytest.warns(UserWarning, match="nothing was kept.*Set K3CUPY_CACHE_DIR"):
        assert cache.add("gemm", [measured(32)], H200) is None
    assert [file for file in folder.rglob("*") if file.is_file()] == [planted]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everywhere")
def test_a_read_only_file_is_read(path: Path) -> None:
    written(path)
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        assert len(quiet_read()) == 2
    finally:
        path.parent.chmod(0o755)


# Many processes

CHILD = """
import warnings
from fake_device import H200
from gemm_table_helpers import in_processes, measured
from k3cupy.choose import cache
from k3cupy.choose.gemm import TOKENS, problem_of
path = cache.path_of("gemm", H200.name)

def work(mine):
    warnings.simplefilter("error")
    n = 16 * (mine + 1)
    for i, tokens in enumerate(TOKENS):
        assert cache.add("gemm", [measured(tokens, n=n)], H200) == path
        found = cache.table("gemm", H200.name).entries(problem_of(n, 7168))
        assert len(found) == i + 1

in_processes(8, work)
"""


def test_eight_processes_add_and_read_at_once(path: Path) -> None:
    """Nobody loses an entry, nobody reads half a file, nobody is warned."""
    run_program(CHILD)
    keys = {entry.key for entry in quiet_read()}
    assert keys == {(problem_of(16 * (i + 1), K), size) for i in range(8) for size in TOKENS}


def test_a_lock_that_nobody_lets_go_is_one_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    written(path)
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.1)
    with FileLock(f"{path}.lock"), pytest.warns(UserWarning, match="could not be acquired"):
        assert cache.add("gemm", [measured(32)], H200) is None
    assert len(quiet_read()) == 2


def test_the_second_candidate_is_what_the_helper_says() -> None:
    assert (measured(8).kernel, measured(8).config) == ("fused_a", second(8))
