"""Start-up under fire: many processes on one disk cache, killed, in bad company, with no place.

Real processes and files; the compilers are stubs (startup_child.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import startup_child
from toolchain_helpers import copy_of_sources, edit

from k3cupy.runtime import binaries, sources

Process = subprocess.Popen[str]


def begin(
    cache: Path | str | None,
    *words: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    **how: Any,
) -> Process:
    """Start a process with a cache folder, or None for none that is named."""
    search = [str(Path(__file__).parent), *(entry for entry in sys.path if entry)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), **(env or {})}
    environment.pop("CUPY_CACHE_IN_MEMORY", None)
    environment.pop("CUPY_CACHE_DIR", None)
    if cache is not None:
        environment["CUPY_CACHE_DIR"] = str(cache)
    return subprocess.Popen(
        [sys.executable, startup_child.__file__, json.dumps(how), *words],
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: Process, count: int = 2, digest: str | None = None) -> dict[str, Any]:
    """What a process did; each instance that it loaded must be the right one."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    digest = digest or sources.load(startup_child.SOURCE).digest
    names = [instance.name_expression for instance in startup_child.wanted(count)]
    assert sorted(found["loaded"]) == sorted(f"{name} {digest} " for name in names)
    return found


def end_all(processes: Iterable[Process], **how: Any) -> list[dict[str, Any]]:
    return [end(process, **how) for process in processes]


def kernels_of(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.name != "k3cupy.lock")


def check_folder(cache: Path, count: int) -> None:
    """One whole file an instance, and nothing else but one lock for them all."""
    kept = kernels_of(cache)
    assert set(cache.iterdir()) - set(kept) == {cache / "k3cupy.lock"}
    assert len(kept) == count, kept
    assert all(binaries._read(path) is not None for path in kept)


def quiet(found: Sequence[dict[str, Any]]) -> bool:
    return all(each["said"] == [] for each in found)


def compiled_by(found: Sequence[dict[str, Any]]) -> list[str]:
    """What all processes together compiled."""
    return sorted(name for each in found for name in each["compiled"])


def names(count: int) -> list[str]:
    return sorted(instance.name_expression for instance in startup_child.wanted(count))


def test_case21_16_cold_processes_on_one_empty_cache(tmp_path: Path) -> None:
    cache = tmp_path / "made by the first"
    found = end_all([begin(cache) for _ in range(16)])
    assert quiet(found)
    assert compiled_by(found) == names(2), "each once"
    check_folder(cache, 2)
    later = end(begin(cache))
    assert later["compiled"] == []
    assert later["said"] == []


def test_8_ranks_at_once_share_the_work(tmp_path: Path) -> None:
    """Each loads the same 24 instances on four threads, and compiles what no other does."""
    found = end_all([begin(tmp_path, count=24) for _ in range(8)], count=24)
    assert quiet(found)
    assert compiled_by(found) == names(24)
    check_folder(tmp_path, 24)
    found = end_all([begin(tmp_path, count=24) for _ in range(2)], count=24)
    assert compiled_by(found) == []
    check_folder(tmp_path, 24)


def test_what_another_compiles_comes_last(tmp_path: Path) -> None:
    """And when that one is killed, who waits for it compiles."""
    holder = begin(tmp_path, stall="compiling", threads=1)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "compiling\n"
    others = [begin(tmp_path, count=6, threads=1) for _ in range(2)]
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("*.cubin"))) < 5:
        assert time.monotonic() < deadline, "nobody did the others meanwhile"
        time.sleep(0.02)
    assert all(process.poll() is None for process in others), "they wait"
    holder.kill()
    holder.communicate()
    found = end_all(others, count=6)
    assert compiled_by(found) == names(6)
    (last,) = (each["compiled"][-1] for each in found if "kernel<0>" in each["compiled"])
    assert last == "kernel<0>"
    check_folder(tmp_path, 6)


def test_one_that_was_stopped_is_not_waited_for_without_end(tmp_path: Path) -> None:
    holder = begin(tmp_path, stall="compiling", threads=1)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "compiling\n"
    found = end(begin(tmp_path, "no patience"))
    assert sorted(found["compiled"]) == names(2)
    holder.kill()
    holder.communicate()


def test_without_locks_each_compiles_for_itself(tmp_path: Path) -> None:
    found = end_all([begin(tmp_path, "no locks") for _ in range(3)])
    assert quiet(found)
    assert set(compiled_by(found)) == set(names(2))
    check_folder(tmp_path, 2)


@pytest.mark.parametrize("moment", ["compiling", "renaming"])
def test_killed_in_the_middle(moment: str, tmp_path: Path) -> None:
    process = begin(tmp_path, stall=moment, threads=1)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{moment}\n"
    process.kill()
    process.communicate()
    left = kernels_of(tmp_path)
    assert [path.suffix for path in left] == [".tmp"] * (moment == "renaming")
    for path in left:
        with path.open("r+b") as file:
            file.truncate(100)
    first, second = end(begin(tmp_path)), end(begin(tmp_path))
    assert quiet([first, second])
    assert len(first["compiled"]) == 2
    assert second["compiled"] == []
    for path in left:
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    end(begin(tmp_path, count=3), count=3)
    check_folder(tmp_path, 3)


def test_killed_at_any_time(tmp_path: Path) -> None:
    """Whenever it is, the next one starts right, and a file in the folder is whole."""
    processes = [begin(tmp_path, count=6, threads=1) for _ in range(10)]
    for process in processes:
        time.sleep(0.04)
        process.kill()
    for process in processes:
        process.communicate()
    kept = [path for path in tmp_path.iterdir() if path.suffix == ".cubin"]
    assert all(binaries._read(path) is not None for path in kept)
    assert quiet([end(begin(tmp_path, count=6), count=6)])
    assert len([path for path in tmp_path.iterdir() if path.suffix == ".cubin"]) == 6


def test_in_bad_company(tmp_path: Path) -> None:
    """Files cut short, of something else, and what an older release has left."""
    end(begin(tmp_path))
    for path, content in zip(kernels_of(tmp_path), (b"", b"\x7fELF of half a"), strict=True):
        path.write_bytes(content)
    strangers = {
        tmp_path / ("f" * 40 + ".cubin"): b"CuPy's own",
        tmp_path / "k3cupy.abc.def._Z6kernel.cubin": b"an older release's",
        tmp_path / "k3cupy-of-nobody.cubin": b"",
        tmp_path / "tmp1234": b"half a file of CuPy's",
    }
    for path, content in strangers.items():
        path.write_bytes(content)
    os.mkfifo(tmp_path / "k3cupy-pipe.cubin")
    found = end_all([begin(tmp_path) for _ in range(4)])
    assert quiet(found)
    assert end(begin(tmp_path))["compiled"] == []
    assert all(path.read_bytes() == content for path, content in strangers.items())


def test_two_versions_of_the_package_on_one_cache(tmp_path: Path) -> None:
    """Each finds its own, and neither takes the other's place."""
    cache, newer = tmp_path / "cache", copy_of_sources(tmp_path)
    edit(newer / "common/pdl.cuh", "#pragma once", "#pragma once\n// of the next version")
    with sources.source_dir(newer):
        digest = sources.load(startup_child.SOURCE).digest
    new = {"K3CUPY_SOURCE_DIR": str(newer)}
    for compiled in (True, False):
        old_ones = [begin(cache) for _ in range(2)]
        new_ones = [begin(cache, env=new) for _ in range(2)]
        found = end_all(old_ones), end_all(new_ones, digest=digest)
        assert quiet([*found[0], *found[1]])
        assert [any(each["compiled"] for each in ones) for ones in found] == [compiled] * 2
        check_folder(cache, 4)


# No place to write (case 36)

LIKE_CUPY = """
import os
os.makedirs(os.environ["CUPY_CACHE_DIR"], exist_ok=True)
cuda = None
"""
"""What importing CuPy does to folders, without the second that all the rest of it takes."""


@pytest.fixture
def like_cupy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which that is what `import cupy` finds."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "cupy.py").write_text(LIKE_CUPY, encoding="utf-8")
    search = [str(folder), str(Path(__file__).parent), *(entry for entry in sys.path if entry)]
    return {"PYTHONPATH": os.pathsep.join(search)}


@pytest.mark.parametrize(
    ("words", "cache", "told", "is_real"),
    [
        (["no home"], None, "~/.cupy/kernel_cache cannot be used (", False),
        (["no home"], "", "~/.cupy/kernel_cache cannot be used (", False),
        (["no home", "read-only"], None, "~/.cupy/kernel_cache cannot be used (", True),
        (["read-only"], "/nowhere/kernels", "/nowhere/kernels cannot be used (", False),
        ([], "~nosuchuser/x", "~nosuchuser/x cannot be used (", True),
        ([], "/dev/null/x", "/dev/null/x cannot be used (", False),
        ([], None, "~/.cupy/kernel_cache cannot be used (", False),
    ],
    ids=[
        "no home",
        "no home, empty",
        "no home, read-only",
        "read-only",
        "nobody's home",
        "below a file",
        "home is a file",
    ],
)
def test_case36_no_place_is_one_warning(
    words: list[str],
    cache: str | None,
    told: str,
    is_real: bool,
    like_cupy: dict[str, str],
    tmp_path: Path,
) -> None:
    """With CuPy itself where it could make a folder of that name, and where all is forbidden."""
    if is_real:
        pytest.importorskip("cupy")
    env = {"HOME": "/dev/null"} | ({} if is_real else like_cupy)
    process = begin(cache, "cupy", *words, env=env, cwd=tmp_path, count=4)
    found = end(process, count=4)
    (text,) = found["said"]
    assert text.startswith(f"kernel cache: {told}")
    assert "compiled in memory" in text
    assert "Set CUPY_CACHE_DIR" in text
    assert list(tmp_path.iterdir()) == [], "no folder that is called ~"
    assert found["CUPY_CACHE_IN_MEMORY"] == "1", "for what CuPy compiles for others, too"
    assert found["CUPY_CACHE_DIR"] == cache


def test_case36_read_only_with_a_filled_cache(tmp_path: Path) -> None:
    """What is there is read; the rest is compiled in memory, also without temporary files."""
    end(begin(tmp_path))
    before = sorted(tmp_path.iterdir())
    assert end(begin(tmp_path, "read-only"))["said"] == []
    found = end(begin(tmp_path, "read-only", count=6, threads=1), count=6)
    assert len(found["compiled"]) == 4
    (text,) = found["said"]
    assert text.startswith(f"kernel cache: {tmp_path} cannot be used (")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("cache", ["", "~/kernels"])
def test_case36_a_home_is_named_by_nothing_or_a_tilde(cache: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    found = end(begin(cache, "cupy", env={"HOME": str(tmp_path)}))
    assert found["said"] == []
    assert (found["CUPY_CACHE_DIR"], found["CUPY_CACHE_IN_MEMORY"]) == (cache, None)
    check_folder(tmp_path / (".cupy/kernel_cache" if not cache else "kernels"), 2)
