"""Where the CUDA sources come from, and the digest that tells one state of them from another."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from toolchain_helpers import copy_of_sources, edit, write

import k3cupy
from k3cupy.runtime import env, sources

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


def test_text_is_the_file_behind_its_digest() -> None:
    """Compilers see the digest, so CuPy's key covers it, and count lines as in the file."""
    source = sources.load(SOURCE)
    comment, line, text = source.text.split("\n", 2)
    assert comment == f"// k3cupy {source.digest}"
    assert line == "#line 1"
    assert text == (sources.shipped() / SOURCE).read_text(encoding="utf-8")
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
        third = sources.load(SOURCE)
        assert third.text.endswith("// alone\n")
    assert sources.load(SOURCE).digest == first.digest


def test_a_header_that_goes_and_comes_back(tree: Path) -> None:
    header = tree / "mla/rope.cuh"
    text = header.read_text(encoding="utf-8")
    with k3cupy.source_dir(tree):
        before = sources.load(SOURCE).digest
        header.unlink()
        with pytest.raises(k3cupy.ToolchainError, match=r"rope\.cuh cannot be read"):
            sources.load(SOURCE)
        write(header, text)
        assert sources.load(SOURCE).digest == before


# Errors


def test_missing_folder_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3CUPY_SOURCE_DIR", "/no/such/folder")
    with pytest.raises(k3cupy.ToolchainError) as caught:
        sources.load(SOURCE)
    assert str(caught.value).startswith("K3CUPY_SOURCE_DIR: expected ")
    assert "'/no/such/folder'" in str(caught.value)
    assert "Unset it" in str(caught.value)


def test_missing_folder_of_the_context_manager(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with (
        pytest.raises(FileNotFoundError, match=f"source_dir: expected .*, got {missing}"),
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


def test_missing_include(tmp_path: Path) -> None:
    write(tmp_path / "a.cu", '#include "common/none.cuh"\n')
    with (
        k3cupy.source_dir(tmp_path),
        pytest.raises(k3cupy.ToolchainError, match=r"none\.cuh cannot be read"),
    ):
        sources.load("a.cu")


def test_a_source_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_bytes(b"// gr\xfc\xdfe\n")
    with (
        k3cupy.source_dir(tmp_path),
        pytest.raises(k3cupy.ToolchainError, match=r"a\.cu cannot be read"),
    ):
        sources.load("a.cu")


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
            return all(f"number_{number};" in sources.load("a.cu").text for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# The environment variables


def test_check_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K3CUPY_CHECK", raising=False)
    assert not env.check_enabled()
    for value, expected in (("1", True), ("0", False), ("", False), ("yes", True)):
        monkeypatch.setenv("K3CUPY_CHECK", value)
        assert env.check_enabled() is expected


def test_source_dir_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.source_dir() is None
    for value, expected in (("/somewhere", "/somewhere"), ("", None)):
        monkeypatch.setenv("K3CUPY_SOURCE_DIR", value)
        assert env.source_dir() == expected
