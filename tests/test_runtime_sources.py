"""Where the CUDA sources come from, and the digest that tells one state of them from another."""

from __future__ import annotations

import contextvars
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_helpers import DispatchDevice
from fake_device import CudaTensor
from toolchain_helpers import copy_of_sources, edit, write

import k3cupy
from k3cupy.ops import batch_invariance
from k3cupy.runtime import env, instances, sources

SOURCE = "mla_decode.cu"
KERNELS = ("mla_decode.cu", "mla_prefill.cu", "fused_a_gemm.cu", "skinny_gemm.cu")
HEADERS = sorted(path.name for path in (sources.shipped() / "common").glob("*.cuh"))


@pytest.fixture(autouse=True)
def no_source_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K3CUPY_SOURCE_DIR", raising=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_of_sources(tmp_path)


def digest_of(folder: Path, name: str = SOURCE) -> str:
    with sources.source_dir(folder):
        return sources.load(name).digest


# The shipped sources


def test_shipped_sources_are_there() -> None:
    assert (sources.shipped() / SOURCE).is_file()
    assert HEADERS
    assert sources.directory() == sources.shipped()
    assert sources.overridden() is None
    assert sources.epoch(SOURCE) is None


def test_text_is_the_digest_and_a_whole_path() -> None:
    """Compilers see the digest, so CuPy's key covers it, and look for includes beside the file."""
    source = sources.load(SOURCE)
    path = sources.shipped() / SOURCE
    assert path.is_absolute()
    assert source.text == f'// k3cupy {source.digest}\n#include "{path}"\n'
    assert source.directory == sources.shipped()
    assert len(source.digest) == 64


def test_shipped_sources_are_read_once() -> None:
    assert sources.load(SOURCE) is sources.load(SOURCE)


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["k3cupy/cuda_src"], "k3cupy/cuda_src"),
        (["cuda_src"], "cuda_src"),
        (["cuda_src", "k3cupy/cuda_src"], "k3cupy/cuda_src"),
    ],
    ids=["wheel", "checkout", "both: the package's own"],
)
def test_layouts(
    folders: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "k3cupy/runtime/sources.py"))
    assert sources.shipped() == (tmp_path / expected).resolve()


def test_incomplete_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "k3cupy/runtime/sources.py"))
    with pytest.raises(k3cupy.ToolchainError, match="reinstall k3cupy"):
        sources.shipped()


# The digest


def test_a_copy_has_the_same_digest(tree: Path, tmp_path: Path) -> None:
    """Contents count; names of folders and times do not."""
    assert digest_of(tree) == sources.load(SOURCE).digest
    for path in tree.rglob("*.cu*"):
        write(path, path.read_text(encoding="utf-8"))
    assert digest_of(tree) == sources.load(SOURCE).digest


@pytest.mark.parametrize("header", HEADERS)
def test_every_header_of_a_kernel_counts(header: str, tree: Path) -> None:
    before = {name: digest_of(tree, name) for name in KERNELS}
    path = tree / "common" / header
    text = path.read_text(encoding="utf-8")
    write(path, text + "// edited\n")
    changed = {name for name in KERNELS if digest_of(tree, name) != before[name]}
    included = f'#include "common/{header}"'
    assert changed >= {k for k in KERNELS if included in (tree / k).read_text(encoding="utf-8")}
    assert changed
    write(path, text)
    assert {name: digest_of(tree, name) for name in KERNELS} == before


def test_the_source_itself_counts(tree: Path) -> None:
    before = digest_of(tree)
    edit(tree / SOURCE, "namespace k3cupy", "namespace  k3cupy")
    assert digest_of(tree) != before


def test_files_that_are_not_included_do_not_count(tree: Path) -> None:
    before = digest_of(tree)
    write(tree / "common/unused.cuh", "#error nobody includes this\n")
    write(tree / "other.cu", "#error nor this\n")
    assert digest_of(tree) == before


@pytest.mark.parametrize(
    "directive",
    [
        '#include "b.cuh"',
        '  #  include   "b.cuh"  // why',
        '#include"b.cuh"',
        '\t#include\t"b.cuh"',
        "#include <b.cuh>",
        '/* why */ # /* a * b */ include /**/ "b.cuh"',
        '%:include "b.cuh"',
        '#inc\\\nlude \\\n "b.cuh"',
        '#define B "b.cuh"\n#include B',
        '#if __has_include("b.cuh")\nint b;\n#endif',
        "#if __has_include(<none.h>) || __has_include( <b.cuh> )\nint b;\n#endif",
        '#define \\u00e9 "b.cuh"\n#include \\u00e9',
        '// as #include /* here\n#include "b.cuh"\nconst char* of = /* end */ "text";',
    ],
)
def test_spellings_of_include(directive: str, tmp_path: Path) -> None:
    write(tmp_path / "a.cu", f"{directive}\n")
    write(tmp_path / "b.cuh", "int one;\n")
    before = digest_of(tmp_path, "a.cu")
    write(tmp_path / "b.cuh", "int two;\n")
    assert digest_of(tmp_path, "a.cu") != before


def test_headers_of_headers_and_circles(tmp_path: Path) -> None:
    """A quoted name is looked up beside the file that has it, then in the folder of the sources."""
    (tmp_path / "x/y").mkdir(parents=True)
    write(tmp_path / "a.cu", '#include "x/b.cuh"\n#include <cuda_fp16.h>\n')
    write(tmp_path / "x/b.cuh", '#pragma once\n#include "y/c.cuh"\n#include "top.cuh"\n')
    write(tmp_path / "x/y/c.cuh", '#pragma once\n#include "../b.cuh"\nint c;\n')
    write(tmp_path / "top.cuh", "int top;\n")
    digests = {digest_of(tmp_path, "a.cu")}
    for number, name in enumerate(("x/b.cuh", "x/y/c.cuh", "top.cuh"), start=2):
        write(tmp_path / name, (tmp_path / name).read_text(encoding="utf-8") + "int edited;\n")
        digests.add(digest_of(tmp_path, "a.cu"))
        assert len(digests) == number


def test_moving_text_between_files_changes_the_digest(tmp_path: Path) -> None:
    write(tmp_path / "a.cu", '#include "b.cuh"\nint x;\n')
    write(tmp_path / "b.cuh", "int y;\n")
    before = digest_of(tmp_path, "a.cu")
    write(tmp_path / "a.cu", '#include "b.cuh"\n')
    write(tmp_path / "b.cuh", "int y;\nint x;\n")
    assert digest_of(tmp_path, "a.cu") != before


def test_a_folder_of_links_with_one_edited_file(tree: Path, tmp_path: Path) -> None:
    """A cheap way to try one change: link everything, copy what is edited."""
    links = tmp_path / "links"
    for path in tree.rglob("*.cu*"):
        link = links / path.relative_to(tree)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    assert digest_of(links) == digest_of(tree)
    edited = links / "mla/rope.cuh"
    edited.unlink()
    write(edited, (tree / "mla/rope.cuh").read_text(encoding="utf-8") + "// edited\n")
    assert digest_of(links) != digest_of(tree)


def test_above_a_folder_that_is_a_link(tmp_path: Path) -> None:
    """`..` is the folder above the one that the link names, for the compiler too."""
    (tmp_path / "theirs/parts").mkdir(parents=True)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/parts").symlink_to(tmp_path / "theirs/parts")
    write(tmp_path / "ours/a.cu", '#include "parts/b.cuh"\n#include "parts/../d.cuh"\n')
    write(tmp_path / "theirs/parts/b.cuh", '#include "../c.cuh"\n')
    for name in ("c.cuh", "d.cuh"):
        write(tmp_path / "ours" / name, "int nobody_reads_it;\n")
        write(tmp_path / "theirs" / name, "int one;\n")
        before = digest_of(tmp_path / "ours", "a.cu")
        write(tmp_path / "theirs" / name, "int two;\n")
        assert digest_of(tmp_path / "ours", "a.cu") != before


@pytest.mark.parametrize("name", ['a "quote"', "a line\nbreak", "not UTF-8 \udcff"])
def test_a_folder_that_no_include_can_name(name: str, tree: Path, tmp_path: Path) -> None:
    """In quotes the compiler would read a shorter name, which may be another file's."""
    folder = tmp_path / name
    shutil.copytree(tree, folder)
    with k3cupy.source_dir(folder):
        with pytest.raises(k3cupy.ToolchainError, match="Rename its folder") as caught:
            sources.load(SOURCE)
        assert ascii(name)[1:-1] in str(caught.value).encode("ascii", "backslashreplace").decode()
        assert sources.epoch(SOURCE) == str(caught.value), "tensors on the CPU need no sources"


@pytest.mark.parametrize(
    "name", ["a b", "it's", "a\\n", "a#b", "//", "\u6f22", "/".join(["x" * 200] * 9)]
)
def test_any_other_folder(name: str, tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there" / f".{name}"
    shutil.copytree(tree, folder)
    with k3cupy.source_dir(folder):
        assert f'"{folder.resolve() / SOURCE}"' in sources.load(SOURCE).text


def test_a_slow_disk_holds_up_nobody_else(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor would a process that is forked meanwhile wait for a thread that it does not have."""
    write(tmp_path / "far/away/a.cu", '#include "b.cuh"\n')
    reading, read, content = threading.Event(), threading.Event(), sources._content

    def slow(path: str) -> bytes | None:
        if "far/away" in path:
            reading.set()
            read.wait(30)
        return content(path)

    monkeypatch.setattr(sources, "_content", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(digest_of, tmp_path / "far/away", "a.cu")
        assert reading.wait(30)
        other = pool.submit(digest_of, tree)
        try:
            assert len(other.result(10)) == 64
        finally:
            read.set()
        assert len(first.result(30)) == 64


# K3CUPY_SOURCE_DIR and source_dir


def test_environment_names_the_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", str(tree))
    assert sources.directory() == tree.resolve()
    assert sources.load(SOURCE).directory == tree.resolve()
    assert sources.epoch(SOURCE) == sources.load(SOURCE).digest
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", "")
    assert sources.directory() == sources.shipped()
    monkeypatch.delenv("K3CUPY_SOURCE_DIR")
    assert sources.directory() == sources.shipped()


def test_source_dir_goes_before_the_environment(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", str(other))
    with k3cupy.source_dir(tree) as folder:
        assert folder == tree.resolve()
        assert sources.directory() == folder
    assert sources.directory() == other.resolve()


def test_source_dir_nests_and_ends_with_an_exception(tree: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    with k3cupy.source_dir(tree):
        with pytest.raises(KeyError), k3cupy.source_dir(str(inner)):
            assert sources.directory() == inner.resolve()
            raise KeyError
        assert sources.directory() == tree.resolve()
    assert sources.overridden() is None


def test_relative_folder_survives_a_change_of_directory(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree.parent)
    with k3cupy.source_dir("cuda_src"):
        monkeypatch.chdir("/")
        assert sources.directory() == tree.resolve()


def test_an_edit_is_seen_at_the_next_call(tree: Path) -> None:
    with k3cupy.source_dir(tree):
        first = sources.load(SOURCE)
        assert sources.load(SOURCE) is first, "nothing changed: nothing is read"
        write(tree / "common/fp8.cuh", "// empty\n")
        second = sources.load(SOURCE)
        assert second.digest != first.digest
        assert sources.epoch(SOURCE) == second.digest
        write(tree / SOURCE, "// alone\n")
        assert len({first.digest, second.digest, sources.load(SOURCE).digest}) == 3
    assert sources.load(SOURCE).digest == first.digest


@pytest.mark.parametrize("name", [SOURCE, "common/fp8.cuh"])
def test_an_edit_that_keeps_size_and_time_is_seen(name: str, tree: Path) -> None:
    """As `cp -p`, `rsync -t` and a version control system make them."""
    path = tree / name
    text, status = path.read_text(encoding="utf-8"), path.stat()
    with k3cupy.source_dir(tree):
        before = sources.load(SOURCE).digest
        path.write_text(text.replace("//", "/*", 1), encoding="utf-8")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert path.stat()[6:9:2] == status[6:9:2], "size and time of modification"
        assert sources.load(SOURCE).digest != before
        path.write_text(text, encoding="utf-8")
        assert sources.load(SOURCE).digest == before


def test_a_header_that_goes_and_comes_back(tree: Path) -> None:
    header = tree / "mla/rope.cuh"
    text = header.read_text(encoding="utf-8")
    with k3cupy.source_dir(tree):
        before = sources.load(SOURCE).digest
        header.unlink()
        assert sources.load(SOURCE).digest != before
        write(header, text)
        assert sources.load(SOURCE).digest == before


# Errors


@pytest.fixture(params=["one missing", "no folder"])
def incomplete(request: pytest.FixtureRequest, tree: Path) -> Path:
    """A folder of sources without that of the fused-A GEMM."""
    (tree / "fused_a_gemm.cu").unlink()
    return tree if request.param == "one missing" else tree / "none"


def test_tensors_on_the_cpu_need_no_sources(
    incomplete: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is an error of the call that has to compile it."""
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", str(incomplete))
    x, weight = torch.ones(2, 128).bfloat16(), torch.ones(16, 128).bfloat16()
    for function in (k3cupy.fused_a_gemm, k3cupy.low_latency_linear):
        assert torch.equal(function(x, weight), torch.full((2, 16), 128.0).bfloat16())
    with pytest.raises(k3cupy.ToolchainError, match=r"K3CUPY_SOURCE_DIR|a_gemm\.cu cannot"):
        sources.load("fused_a_gemm.cu")
    first = sources.epoch("fused_a_gemm.cu")
    shutil.copytree(sources.shipped(), incomplete, dirs_exist_ok=True)
    assert sources.epoch("fused_a_gemm.cu") != first, "no plan of before fits any more"


def test_a_gpu_that_needs_a_missing_source_says_so(
    incomplete: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear layer does not fall back: its user wants to run the edited kernel."""
    DispatchDevice(monkeypatch)
    monkeypatch.setattr(instances, "load", lambda instance, _: sources.load(instance.source))
    x = CudaTensor.of(torch.empty(32, 1536, dtype=torch.bfloat16), 0)
    weight = CudaTensor.of(torch.empty(2304, 1536, dtype=torch.bfloat16), 0)
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", str(incomplete))
    with pytest.raises(k3cupy.ToolchainError, match=r"K3CUPY_SOURCE_DIR|a_gemm\.cu cannot"):
        k3cupy.low_latency_linear(x, weight)


def test_missing_folder_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", "/no/such/folder")
    with pytest.raises(k3cupy.ToolchainError) as caught:
        sources.load(SOURCE)
    assert str(caught.value).startswith("K3CUPY_SOURCE_DIR: expected ")
    assert "'/no/such/folder'" in str(caught.value)
    assert "Unset it" in str(caught.value)


def test_a_folder_that_goes_while_it_is_named(tree: Path) -> None:
    """The name in the error is of what the caller has to change, and no advice is given in vain."""
    with k3cupy.source_dir(tree):
        shutil.rmtree(tree)
        expected = f"^source_dir: expected a folder with CUDA sources, got '{tree}'. It was there"
        with pytest.raises(k3cupy.ToolchainError, match=expected):
            sources.load(SOURCE)
        with pytest.warns(UserWarning, match="A call on a GPU would fail: source_dir: ") as told:
            sources.warn_unused()
        assert "k3cupy.compile(" not in str(told[0].message)


def test_a_relative_folder_of_the_environment_follows_the_working_directory(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what a warning advises is the whole path."""
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", tree.name)
    monkeypatch.chdir(tree.parent)
    with pytest.warns(UserWarning, match=re.escape(f"k3cupy.compile({str(tree.resolve())!r})")):
        sources.warn_unused()
    monkeypatch.chdir("/")
    with pytest.raises(k3cupy.ToolchainError, match=r"^K3CUPY_SOURCE_DIR: expected a folder"):
        sources.directory()


def test_missing_folder_of_the_context_manager(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with (
        pytest.raises(FileNotFoundError, match=f"source_dir: expected .*, got '{missing}'"),
        k3cupy.source_dir(missing),
    ):
        pass
    a_file = tmp_path / "file"
    a_file.touch()
    with pytest.raises(FileNotFoundError, match="file"), k3cupy.source_dir(a_file):
        pass
    assert sources.overridden() is None


def test_missing_source(tmp_path: Path) -> None:
    with (
        k3cupy.source_dir(tmp_path),
        pytest.raises(k3cupy.ToolchainError, match=rf"{SOURCE} cannot be read"),
    ):
        sources.load(SOURCE)


@pytest.mark.parametrize(
    "text",
    [
        '#include "cuda_fp16.h"',
        '// #include "none.cuh"',
        '/*\n#include "none.cuh"\n*/',
        '#if 0\n#include "none.cuh"\n#endif',
        '#if __has_include("none.cuh")\n#include "none.cuh"\n#endif',
        '#define NONE "none.cuh"\n#ifdef NEVER\n#include NONE\n#endif',
        '#include "/dev/null"',
        '#include "a\0b"',
    ],
)
def test_an_include_that_is_not_in_the_folder_is_left_to_the_compiler(
    text: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.cu", f"{text}\nint a;\n")
    before = digest_of(tmp_path, "a.cu")
    write(tmp_path / "other.cuh", "int other;\n")
    assert digest_of(tmp_path, "a.cu") == before


@pytest.mark.parametrize("kind", ["beside", "of the folder", "in angle brackets"])
def test_a_header_that_appears_where_it_was_looked_for_counts(kind: str, tmp_path: Path) -> None:
    """Also one that takes the place of another of its name."""
    write(tmp_path / "a.cu", '#include "x/b.cuh"\n')
    write(
        tmp_path / "x/b.cuh",
        "#include <c.cuh>\n" if kind.endswith("brackets") else '#include "c.cuh"\n',
    )
    if kind == "beside":
        write(tmp_path / "c.cuh", "int c;\n")
    with k3cupy.source_dir(tmp_path):
        before = sources.load("a.cu").digest
        write(tmp_path / ("x/c.cuh" if kind == "beside" else "c.cuh"), "int c;\n")
        assert sources.load("a.cu").digest != before


def test_a_header_outside_the_folder_counts(tmp_path: Path) -> None:
    write(tmp_path / "outside.cuh", "int one;\n")
    for number, named in enumerate(("../outside.cuh", str(tmp_path / "outside.cuh"))):
        folder = tmp_path / str(number)
        write(folder / "a.cu", f'#include "{named}"\n')
        with k3cupy.source_dir(folder):
            before = sources.load("a.cu").digest
            write(tmp_path / "outside.cuh", f"int edited_{number};\n")
            assert sources.load("a.cu").digest != before


@pytest.mark.parametrize("name", ["a.cu", "b.cuh"])
def test_a_file_in_another_encoding(name: str, tmp_path: Path) -> None:
    """The compiler does not mind what a comment is written in."""
    write(tmp_path / "a.cu", '#include "b.cuh"\n')
    (tmp_path / name).write_bytes(b'#include "b.cuh" // gr\xfc\xdfe\n')
    before = digest_of(tmp_path, "a.cu")
    (tmp_path / name).write_bytes(b'#include "b.cuh" // gr\xfc\xdfe!\n')
    assert digest_of(tmp_path, "a.cu") != before


# Threads


def test_source_dir_belongs_to_its_context(tree: Path) -> None:
    """Other threads keep the shipped sources; a copied context takes the folder along."""
    with ThreadPoolExecutor(1) as pool, k3cupy.source_dir(tree):
        assert pool.submit(sources.overridden).result() is None
        copied = contextvars.copy_context()
        assert pool.submit(copied.run, sources.overridden).result() == str(tree.resolve())


def test_threads_with_folders_of_their_own(tmp_path: Path) -> None:
    """Each thread loads from its own folder while the others do the same."""
    barrier = threading.Barrier(8)

    def work(number: int) -> bool:
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "a.cu", f"int number_{number};\n")
        with k3cupy.source_dir(folder):
            barrier.wait(30)
            own = f'#include "{folder / "a.cu"}"\n'
            return all(sources.load("a.cu").text.endswith(own) for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# The environment variables

FLAGS = {"K3CUPY_CHECK": env.check_enabled, "K3CUPY_BATCH_INVARIANT": env.batch_invariant}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, False) for value in (None, "", "0", "false", "False", "OFF", "no", " ", "0 ")),
        *((value, True) for value in ("1", "true", "TRUE", "On", "yes", " 1", "on\n")),
    ],
)
def test_a_flag(
    name: str, value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert FLAGS[name]() is expected


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["2", "maybe", "1 1", "-1", "ja"])
def test_a_flag_that_is_neither_on_nor_off(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error of the calls that it is for, and they run again once it is mended."""
    x, weight = torch.ones(2, 128).bfloat16(), torch.ones(16, 128).bfloat16()
    monkeypatch.setattr(batch_invariance, "_of_process", None)  # the environment decides
    monkeypatch.setenv(name, value)
    expected = f"{name}: expected 0, false, off, no or 1, true, on, yes, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        k3cupy.low_latency_linear(x, weight)
    monkeypatch.setenv(name, "off")
    assert k3cupy.low_latency_linear(x, weight)[0, 0] == 128


def test_source_dir_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.source_dir() is None
    for value, expected in (("/somewhere", "/somewhere"), ("", None)):
        monkeypatch.setenv("K3CUPY_SOURCE_DIR", value)
        assert env.source_dir() == expected


def test_home_in_the_names_of_folders(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree.parent))
    with k3cupy.source_dir("~/cuda_src") as folder:
        assert folder == tree.resolve()
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", "~/cuda_src")
    assert sources.directory() == tree.resolve()
    assert len(sources.epoch(SOURCE) or "") == 64
    monkeypatch.setenv("K3CUPY_CACHE_DIR", "~/measured")
    assert env.cache_dir() == str(tree.parent / "measured")


class OfBytes:
    """A path as `os` may give one."""

    def __fspath__(self) -> bytes:
        return b"/tmp"

    def __repr__(self) -> str:
        return "OfBytes"


@pytest.mark.parametrize(
    ("path", "error"),
    [("", ValueError), (None, TypeError), (3, TypeError), (OfBytes(), TypeError)],
)
def test_a_folder_that_is_no_path(
    path: Any, error: type[Exception], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)  # which an empty text would name
    expected = f"source_dir: expected a folder with CUDA sources, got {path!r}"
    with pytest.raises(error, match=f"^{expected}$"), k3cupy.source_dir(path):
        pass
    assert sources.overridden() is None


@pytest.mark.parametrize(
    "name", ["a\0b", "x" * 5000, "~nobody_of_that_name/x", "\ud800", "relative"]
)
def test_a_folder_that_cannot_be(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is named; from a working directory that is gone, too."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    expected = "^source_dir: expected an existing folder, got "
    with pytest.raises(FileNotFoundError, match=expected) as caught, k3cupy.source_dir(name):
        pass
    assert len(str(caught.value)) < 400
    monkeypatch.setattr(sources.env, "source_dir", lambda: name)
    with pytest.raises(k3cupy.ToolchainError, match=r"^K3CUPY_SOURCE_DIR: expected a "):
        sources.directory()
