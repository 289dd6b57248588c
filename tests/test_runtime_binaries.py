"""The disk cache: compiled once, found again, by the next user too; never what others put there."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toolchain_helpers import FakeGpu, copy_of_sources, edit, fake_gpu, real_compilers

from k3cupy.runtime import binaries, instances, offline, sources, toolchain
from k3cupy.runtime.errors import CompileError, ToolchainError
from k3cupy.runtime.instances import Instance
from k3cupy.runtime.offline import Cubin

ONE = Instance("mla_decode.cu", "k3cupy::mla_decode_epilogue<1>")
OWN = Instance("fused_a_gemm.cu", "k3cupy::fused_a_gemm<1>", own_arch=True)
OTHER = replace(OWN, name_expression="k3cupy::fused_a_gemm<2>")
EACH_COMPILER = pytest.mark.parametrize("instance", [ONE, OWN], ids=["CuPy", "cuda-core"])


class Compiler:
    """Takes the place of `offline`; the binary of an instance is text about it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __call__(self, source: str, names: list[str], arch: str) -> Cubin:
        (name,) = names
        self.asked.append((name, arch))
        code = f"{arch} {name} {sources.load(source).digest}"
        return Cubin(code.encode(), {name: f"_Z{len(self.asked)}kernel"})


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakeGpu:
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    return fake_gpu(monkeypatch, cache)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(offline, "compile_cubin", compiler)
    return compiler


@pytest.fixture
def next_process(
    gpu: FakeGpu, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Instance], int]:
    """Load an instance as a new process does; say how often it was compiled."""

    def load(instance: Instance) -> int:
        monkeypatch.setattr(instances, "_attempts", {})
        before = len(gpu.in_memory) + len(compiler.asked)
        instances.load(instance, 0)
        return len(gpu.in_memory) + len(compiler.asked) - before

    return load


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    assert all(w.category is RuntimeWarning for w in caught)
    return [str(w.message) for w in caught]


def files(folder: Path) -> list[Path]:
    """All but the lock, of which there is one a folder."""
    return sorted(path for path in folder.iterdir() if path.name != "k3cupy.lock")


# Kept and found


def test_compiled_for_the_architecture_with_its_letter(gpu: FakeGpu, compiler: Compiler) -> None:
    instances.load(OWN, 0)
    instances.load(OWN, 0)
    assert compiler.asked == [(OWN.name_expression, "sm_90a")]
    assert gpu.compiled == ["_Z1kernel"], "the symbol in the file, not the name in C++"
    (code,) = gpu.loaded
    assert code.decode().startswith(f"sm_90a {OWN.name_expression}")


def test_its_attributes_are_the_drivers(gpu: FakeGpu, compiler: Compiler) -> None:
    loaded = instances.load(OWN, 0)
    assert loaded.function.num_regs == 32
    loaded.allow_shared_memory(100_000)
    loaded.allow_shared_memory(60_000)
    assert loaded.function.max_dynamic_shared_size_bytes == 100_000
    assert loaded.kernel.handle["shared"] == 100_000


@EACH_COMPILER
def test_found_by_the_next_process(
    instance: Instance, gpu: FakeGpu, next_process: Callable[[Instance], int], cache: Path
) -> None:
    assert next_process(instance) == 1
    kept = [(path, path.read_bytes()) for path in files(cache)]
    assert len(kept) == 1
    assert next_process(instance) == 0
    first, second = gpu.loaded
    assert first == second
    assert [(path, path.read_bytes()) for path in files(cache)] == kept


@pytest.mark.parametrize("instance", [OTHER, replace(ONE, name_expression="k3cupy::other")])
def test_each_instance_has_its_file(
    instance: Instance, next_process: Callable[[Instance], int], cache: Path
) -> None:
    assert [next_process(each) for each in (ONE, OWN, instance)] == [1, 1, 1]
    assert len(files(cache)) == 3
    assert [next_process(each) for each in (ONE, OWN, instance)] == [0, 0, 0]


@EACH_COMPILER
def test_another_compiler_another_file(
    instance: Instance, gpu: FakeGpu, next_process: Callable[[Instance], int], cache: Path
) -> None:
    assert next_process(instance) == 1
    gpu.nvrtc = (13, 0)
    assert next_process(instance) == 1
    assert len(files(cache)) == 2


@EACH_COMPILER
def test_names_are_short_and_say_whose_they_are(
    instance: Instance,
    next_process: Callable[[Instance], int],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some file systems allow 143 bytes. What was kept under older keys is not found."""
    written: list[str] = []
    rename = os.replace

    def note(old: Any, new: Any) -> None:
        written.extend(Path(path).name for path in (old, new))
        rename(old, new)

    monkeypatch.setattr(os, "replace", note)
    next_process(instance)
    assert len(written) == 2
    assert max(map(len, written)) <= 80
    (path,) = files(cache)
    assert path.name.startswith("k3cupy-")
    assert path.name.endswith(".cubin")


@EACH_COMPILER
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o644), (0o077, 0o600)])
def test_the_next_user_may_read_it(
    instance: Instance,
    umask: int,
    mode: int,
    next_process: Callable[[Instance], int],
    cache: Path,
) -> None:
    before = os.umask(umask)
    try:
        next_process(instance)
    finally:
        os.umask(before)
    (path,) = files(cache)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755 & ~umask
    assert next_process(instance) == 0


def test_real_compilers_keep_and_find(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """CuPy's own code around NVRTC asks this cache, and takes what it gives."""
    gpu = real_compilers(monkeypatch, cache)
    name = "k3cupy::mla_decode_epilogue<__nv_bfloat16, false, k3cupy::CacheFormat::kSame, "
    real = Instance("mla_decode.cu", f"{name}false, false, true, 0, 288, 1>")
    for _ in range(2):
        for own_arch in (False, True):
            monkeypatch.setattr(instances, "_attempts", {})
            instances.load(replace(real, own_arch=own_arch), 0)
    assert len(files(cache)) == 2
    assert gpu.loaded[:2] == gpu.loaded[2:], "a second compilation would give other bytes"
    assert all(code.startswith(b"\x7fELF") for code in gpu.loaded)


def test_cupys_other_kernels_stay_in_its_own_cache(
    gpu: FakeGpu, next_process: Callable[[Instance], int], cache: Path
) -> None:
    next_process(ONE)
    assert gpu.others == {}, "ours are not in it"
    backend = gpu.compiler._kernel_cache_backend
    backend.save("theirs.cubin", b"code", "source")
    assert gpu.others == {"theirs.cubin": b"code"}
    assert backend.load("theirs.cubin") == b"code"
    assert len(files(cache)) == 1
    next_process(ONE)
    assert gpu.compiler._kernel_cache_backend is backend, "put there once"


def test_what_was_made_while_we_waited_is_taken(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the process that had the lock before: the file was not there when we looked first."""
    tries = [False, False, True]

    def acquire(_: Any) -> bool:
        if len(tries) == 1:
            binaries.keep("key", b"of the other one")
        return tries.pop(0)

    monkeypatch.setattr(binaries._Lock, "acquire", acquire)
    with binaries.claimed("key") as content:
        assert content == b"of the other one"
    assert tries == []


# What cannot be used


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(data)


def flipped_digest(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 0x01
    path.write_bytes(data)


def bare_binary(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(100))


def named_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def enormous(path: Path) -> None:
    """More than there is memory, and no disk needs to hold it."""
    os.truncate(path, 1 << 43)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def writable_by_all(path: Path) -> None:
    path.chmod(0o666)


@EACH_COMPILER
@pytest.mark.parametrize(
    "damage",
    [
        nothing,
        truncated,
        flipped,
        flipped_digest,
        bare_binary,
        named_pipe,
        endless,
        enormous,
        dangling,
        writable_by_all,
    ],
)
def test_case21_a_damaged_file_is_replaced(
    instance: Instance,
    damage: Callable[[Path], None],
    next_process: Callable[[Instance], int],
    cache: Path,
) -> None:
    next_process(instance)
    (path,) = files(cache)
    size = path.stat().st_size
    damage(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next_process(instance) == 1
    assert files(cache) == [path]
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.stat().st_size == size
    assert next_process(instance) == 0


def test_case21_the_file_of_another_instance_is_not_taken(
    next_process: Callable[[Instance], int], cache: Path
) -> None:
    next_process(OWN)
    (path,) = files(cache)
    next_process(OTHER)
    (other,) = set(files(cache)) - {path}
    shutil.copy(other, path)
    assert next_process(OWN) == 1


@EACH_COMPILER
def test_case21_a_folder_in_place_of_a_file(
    instance: Instance, next_process: Callable[[Instance], int], cache: Path
) -> None:
    next_process(instance)
    (path,) = files(cache)
    path.unlink()
    (path / "somebody's").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match=f"kernel cache: .*{path.name}"):
        assert next_process(instance) == 1
    assert files(cache) == [path], "it is not ours to remove"


@EACH_COMPILER
def test_case21_an_unusable_folder(
    instance: Instance, next_process: Callable[[Instance], int], cache: Path
) -> None:
    cache.write_text("a file where the folder should be", encoding="utf-8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert next_process(instance) == 1
        assert next_process(instance) == 1
    (text,) = messages(caught)
    assert text.startswith(f"kernel cache: {cache} cannot be used (")
    assert "compiled in memory" in text
    assert "Set CUPY_CACHE_DIR" in text


@EACH_COMPILER
def test_a_write_that_fails_leaves_nothing(
    instance: Instance, next_process: Callable[[Instance], int], cache: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        try:
            assert next_process(instance) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (text,) = messages(caught)
    assert os.strerror(errno.EFBIG) in text
    assert files(cache) == []


def test_what_a_killed_process_left_is_removed(
    next_process: Callable[[Instance], int], cache: Path
) -> None:
    cache.mkdir(mode=0o755)
    old, young = cache / "k3cupy-1.cubin.1.tmp", cache / "k3cupy-2.cubin.2.tmp"
    somebodys = cache / "tmp_other"
    for path in (old, young, somebodys):
        path.touch()
    for path in (old, somebodys):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    next_process(ONE)
    left = files(cache)
    assert old not in left
    assert {young, somebodys} < set(left), "another process may be about to rename it"


# Who may write


def everybody(folder: Path, _: pytest.MonkeyPatch) -> str:
    folder.chmod(0o777)
    return "has mode 0777, so that others could put any code there: `chmod go-w` it"


def the_group(folder: Path, _: pytest.MonkeyPatch) -> str:
    folder.chmod(0o775)
    return "has mode 0775"


def as_in_tmp(folder: Path, _: pytest.MonkeyPatch) -> str:
    folder.chmod(0o1777)
    return "has mode 1777"


def somebody_else(folder: Path, patch: pytest.MonkeyPatch) -> str:
    if os.geteuid() == 0:
        os.chown(folder, 4242, -1)
        return "belongs to another user, 4242"
    owner = os.geteuid()
    patch.setattr(os, "geteuid", lambda: 4242)
    return f"belongs to another user, {owner}"


@EACH_COMPILER
@pytest.mark.parametrize("change", [everybody, the_group, as_in_tmp, somebody_else])
def test_a_folder_that_others_can_write_is_refused(
    instance: Instance,
    change: Callable[[Path, pytest.MonkeyPatch], str],
    next_process: Callable[[Instance], int],
    gpu: FakeGpu,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    next_process(instance)
    good = files(cache)
    told = change(cache, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert next_process(instance) == 1, "not read, also where a file is right"
        assert next_process(replace(instance, name_expression="k3cupy::new")) == 1
    (text,) = messages(caught)
    assert text.startswith(f"kernel cache: {cache} cannot be used ({cache} {told}")
    assert ("chmod" in text) is (change in (everybody, the_group)), "never for /tmp itself"
    assert files(cache) == good, "not written"
    assert gpu.others == {}, "nor is CuPy's own cache in that folder"


def test_a_device_is_no_folder(
    next_process: Callable[[Instance], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may write to it, and nobody is to change that."""
    monkeypatch.setenv("CUPY_CACHE_DIR", os.devnull)
    with pytest.warns(RuntimeWarning, match=f"{os.devnull} is no folder") as caught:
        assert next_process(OWN) == 1
    assert "chmod" not in str(caught[0].message)


def test_folders_above_that_we_make_are_ours_alone(tmp_path: Path) -> None:
    """As `~/.cupy` on a new machine: who may write there can put another cache in place."""
    before = os.umask(0)
    try:
        toolchain.make_private(tmp_path / "home/.cupy/kernel_cache")
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o755] * 3


def test_a_folder_of_root_is_read(
    next_process: Callable[[Instance], int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an administrator fills it for all; only root can be told from others without root."""
    assert binaries.problem(SimpleNamespace(st_uid=0, st_mode=0o40755)) == ""  # type: ignore[arg-type]
    next_process(ONE)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        assert next_process(ONE) == 0


# In memory


@EACH_COMPILER
@pytest.mark.parametrize("value", ["1", " 1", "01"])
def test_in_memory_leaves_nothing(
    instance: Instance,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cache: Path,
) -> None:
    """As CuPy reads the variable."""
    gpu = real_compilers(monkeypatch, cache)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", value)
    source = tmp_path / "tree"
    source.mkdir()
    (source / "f.cu").write_text('extern "C" __global__ void f(int* x) { *x = 1; }\n')
    with sources.source_dir(source):
        instances.load(Instance("f.cu", "f", instance.own_arch), 0)
    assert len(gpu.loaded) == 1
    assert files(tmp_path) == [source]


@EACH_COMPILER
@pytest.mark.parametrize("value", ["0", "", "yes"])
def test_any_other_value_is_on_disk(
    instance: Instance,
    value: str,
    next_process: Callable[[Instance], int],
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
) -> None:
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", value)
    next_process(instance)
    assert len(files(cache)) == 1


def test_a_cupy_without_a_place_for_caches(
    gpu: FakeGpu, next_process: Callable[[Instance], int]
) -> None:
    del gpu.compiler._set_kernel_cache_backend
    with pytest.warns(RuntimeWarning, match="no place for another cache"):
        assert next_process(ONE) == 1
    assert gpu.in_memory == ["1"]
    assert gpu.others == {}


# Sources


def test_a_refused_source_is_told(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise CompileError("fused_a_gemm.cu: NVRTC refused it for sm_90a")

    monkeypatch.setattr(offline, "compile_cubin", refuse)
    with pytest.raises(CompileError, match="sm_90a"):
        instances.load(OWN, 0)
    assert not instances.is_loaded(OWN, 0)


@EACH_COMPILER
def test_an_edit_during_a_compilation_is_not_kept(
    instance: Instance,
    gpu: FakeGpu,
    compiler: Compiler,
    next_process: Callable[[Instance], int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cache: Path,
) -> None:
    """The compiler reads the files itself: what it made may be of the text before or behind."""
    tree = copy_of_sources(tmp_path)
    header = tree / "common/pdl.cuh"
    good = header.read_text(encoding="utf-8")

    def edit_meanwhile(*arguments: Any) -> Any:
        edit(header, "#pragma once", "#pragma once\n// edited")
        return compiler(*arguments) if instance.own_arch else None

    if instance.own_arch:
        monkeypatch.setattr(offline, "compile_cubin", edit_meanwhile)
    else:
        gpu.on_compile = edit_meanwhile
    with sources.source_dir(tree):
        with pytest.raises(ToolchainError, match="the sources changed while"):
            next_process(instance)
        assert files(cache) == []
        assert gpu.forgotten == 1
        header.write_text(good, encoding="utf-8")
        gpu.on_compile = lambda _: None
        monkeypatch.setattr(offline, "compile_cubin", compiler)
        assert next_process(instance) == 1
        assert next_process(instance) == 0


def test_a_package_that_was_replaced_under_the_process(
    gpu: FakeGpu,
    next_process: Callable[[Instance], int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What it compiled before is still right; the new sources are not for its Python."""
    tree = copy_of_sources(tmp_path)
    monkeypatch.setattr(sources, "shipped", lambda: tree)
    monkeypatch.setattr(sources, "_loaded", {})
    assert next_process(ONE) == 1
    edit(tree / "common/pdl.cuh", "#pragma once", "#pragma once\n// of the next version")
    assert next_process(ONE) == 0
    with pytest.raises(ToolchainError, match="restart the process"):
        next_process(replace(ONE, name_expression="k3cupy::new"))


def test_the_cache_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "")
    assert toolchain.cache_directory() == Path("~/.cupy/kernel_cache").expanduser()
    monkeypatch.setenv("CUPY_CACHE_DIR", "~/elsewhere")
    assert toolchain.cache_directory() == Path("~/elsewhere").expanduser()
    monkeypatch.setenv("CUPY_CACHE_DIR", "~nosuchuser/x")
    with pytest.raises(OSError, match="home"):
        toolchain.cache_directory()
