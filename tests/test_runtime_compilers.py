"""CuPy and cuda-core compile the same: one list of options, compared at the door of NVRTC.

Most calls run what CuPy compiled, machine code is read from what cuda-core compiled. No GPU is
needed: CuPy is told its architecture, and what NVRTC gives back is never loaded.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from toolchain_helpers import copy_of_sources, fake_gpu, real_compilers, write

from k3cupy.kernels.mla_decode import UNTUNED, Variant
from k3cupy.runtime import instances, offline, sources, toolchain
from k3cupy.runtime.errors import CompileError, ToolchainError
from k3cupy.runtime.instances import Instance
from k3cupy.runtime.offline import Cubin

ONE = UNTUNED.instance(Variant.of_kind("fp8+fp8"))
ARCH = "sm_90"

_LONG = {
    "-arch=": "--gpu-architecture=",
    "-I": "--include-path=",
    "-ftz=": "--ftz=",
    "-std=": "--std=",
}
"""NVRTC's short spellings."""


def meaning(options: Iterable[str]) -> list[str]:
    """Options in their long spelling, by name; folders stay in the order of the search."""
    found = []
    for option in options:
        short = next((short for short in _LONG if option.startswith(short)), "")
        found.append(_LONG.get(short, "") + option.removeprefix(short))
    return sorted(found, key=lambda option: option.partition("=")[0])


@dataclass
class Compiled(Exception):
    """What one compiler handed to NVRTC, and what it got; raised to end the call there."""

    text: str
    options: list[str]
    code: bytes


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """The instructions of each kernel; the rest of a binary holds names of temporary files."""
    table, size, count, names = (
        *struct.unpack_from("<Q", cubin, 0x28),
        *struct.unpack_from("<HHH", cubin, 0x3A),
    )

    def header(i: int) -> tuple[int, ...]:
        """Name, offset and size of a section."""
        name, _, _, _, offset, length = struct.unpack_from("<IIQQQQ", cubin, table + i * size)
        return name, offset, length

    _, strings, _ = header(names)
    found = {}
    for name, offset, length in map(header, range(count)):
        text = cubin[strings + name : cubin.index(0, strings + name)].decode()
        if text.startswith(".text."):
            found[text] = cubin[offset : offset + length]
    assert any(map(any, found.values()))
    return found


def by_cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiled:
    """Load an instance with CuPy's own chain behind `RawModule`, as far as NVRTC's answer."""
    compiler = pytest.importorskip("cupy").cuda.compiler
    nvrtc = compiler.nvrtc

    class Nvrtc:
        def __getattr__(self, name: str) -> Any:
            return getattr(nvrtc, name)

        def createProgram(self, text: str, *others: Any) -> Any:
            self.text = text
            return nvrtc.createProgram(text, *others)

        def compileProgram(self, program: Any, options: tuple[str, ...]) -> None:
            self.options = list(options)
            nvrtc.compileProgram(program, options)

        def getCUBIN(self, program: Any) -> bytes:
            raise Compiled(self.text, self.options, nvrtc.getCUBIN(program))

    with monkeypatch.context() as patch:
        real_compilers(patch, tmp_path)
        patch.setattr(compiler, "nvrtc", Nvrtc())
        with pytest.raises(Compiled) as caught:
            instances.load(ONE, 0)
    return caught.value


def by_cuda_core(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Compile the same instance by cuda-core."""
    pytest.importorskip("cuda.core")
    core = toolchain.cuda_core()
    real, seen = core.Program, []

    def program(text: str, kind: str, options: Any) -> Any:
        seen.append((text, [o.decode() for o in options.as_bytes("nvrtc", "cubin")]))
        return real(text, kind, options)

    with monkeypatch.context() as patch:
        patch.setattr(core, "Program", program)
        cubin = offline.compile_cubin(ONE.source, [ONE.name_expression], ARCH)
    ((text, options),) = seen
    return Compiled(text, options, cubin.code)


def test_both_compilers_get_the_same_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, inspected = by_cupy(monkeypatch, tmp_path), by_cuda_core(monkeypatch)
    assert meaning(ours.options) == meaning(inspected.options)
    assert f"--gpu-architecture={ARCH}" in meaning(ours.options)
    assert ours.text == inspected.text
    assert machine_code(ours.code) == machine_code(inspected.code)


def test_the_list_is_what_both_are_fed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new line of the list reaches both; one that CuPy adds by itself is not said twice."""
    before = toolchain.every_option
    more = (
        toolchain.Option(("--use_fast_math",), "use_fast_math", True),
        toolchain.Option(("--restrict",), "restrict", True, cupy_adds=True),
    )
    monkeypatch.setattr(toolchain, "every_option", lambda folder: (*before(folder), *more))
    folder = Path("/src")
    assert toolchain.options(folder)[-1] == "--use_fast_math"
    pytest.importorskip("cuda.core")
    flags = meaning(o.decode() for o in toolchain.program_options(folder, ARCH).as_bytes("nvrtc"))
    assert {"--use_fast_math", "--restrict"} <= set(flags)


OWN = replace(ONE, own_arch=True)
EACH_COMPILER = pytest.mark.parametrize("instance", [ONE, OWN], ids=["CuPy", "cuda-core"])


@EACH_COMPILER
def test_case06_a_syntax_error_names_its_line_and_leaves_nothing(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_compilers(monkeypatch, tmp_path / "cache")
    path = copy_of_sources(tmp_path) / instance.source
    good = path.read_text(encoding="utf-8")
    with sources.source_dir(path.parent):
        for _ in range(2):
            write(path, f"this is no C++;\n{good}")
            with pytest.raises(
                CompileError, match=rf"(?s){instance.source}\(1\): error: .*this is"
            ):
                instances.load(instance, 0)
            left = [path.name for path in (tmp_path / "cache").iterdir()]
            assert left == ["k3cupy.lock"]
        write(path, good)
        instances.load(instance, 0)
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == 1


# Which headers are read (number 6)


def poison(folder: Path) -> None:
    """Put headers of the names of ours where the compiler must not look."""
    for header in sources.shipped().rglob("*.cuh"):
        path = folder / header.relative_to(sources.shipped())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#error this is not the header of the package\n", encoding="utf-8")


def full_temporary_folder(patch: pytest.MonkeyPatch, _: Path) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(tempfile, "TemporaryDirectory", refuse)


def somebody_takes_the_temporary_folder(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CuPy compiles as a file of a temporary folder that is gone by then."""

    class Taken:
        def __enter__(self) -> str:
            (tmp_path / "gone").mkdir()
            return str(tmp_path / "gone")

        def __exit__(self, *_: object) -> None:
            poison(tmp_path / "gone")

    patch.setattr(tempfile, "TemporaryDirectory", Taken)


def cache_is_no_folder(_: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()


def cache_takes_no_file(patch: pytest.MonkeyPatch, _: Path) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    patch.setattr(os, "replace", refuse)


def precompiled_headers(patch: pytest.MonkeyPatch, _: Path) -> None:
    """NVRTC keeps them in the working directory, and reads them there."""
    patch.setattr(pytest.importorskip("cupy").cuda.compiler, "_use_pch", True)


MODES: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    "on disk": lambda *_: None,
    "in memory": lambda patch, _: patch.setenv("CUPY_CACHE_IN_MEMORY", "1"),
    "no cache folder": cache_is_no_folder,
    "read-only cache": cache_takes_no_file,
    "full temporary folder": full_temporary_folder,
    "temporary folder taken": somebody_takes_the_temporary_folder,
    "precompiled headers": precompiled_headers,
}


@pytest.mark.filterwarnings("ignore:kernel cache:RuntimeWarning")
@pytest.mark.parametrize("mode", MODES)
@EACH_COMPILER
def test_case31_headers_never_come_from_the_working_directory(
    instance: Instance, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such a binary would be kept under the key of the right headers."""
    gpu = real_compilers(monkeypatch, tmp_path / "cache")
    elsewhere = tmp_path / "elsewhere"
    poison(elsewhere)
    monkeypatch.chdir(elsewhere)
    MODES[mode](monkeypatch, tmp_path)
    loaded = instances.load(instance, 0)
    (code,) = gpu.loaded
    assert code.startswith(b"\x7fELF")
    assert loaded.function.num_regs == 32
    assert not list(elsewhere.glob("*.pch"))


@EACH_COMPILER
def test_case31_nor_when_ours_is_not_there(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An edited copy without a header is an error, wherever such a header lies."""
    real_compilers(monkeypatch, tmp_path / "cache")
    tree = copy_of_sources(tmp_path)
    (tree / "common/pdl.cuh").unlink()
    shutil.copytree(sources.shipped(), tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with sources.source_dir(tree), pytest.raises((CompileError, ToolchainError), match=r"pdl\.cuh"):
        instances.load(instance, 0)


def test_case31_an_edited_copy_may_include_as_any_program_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the file, from the folder, the toolkit's; also theirs beside theirs."""
    pytest.importorskip("cuda.core")
    tree = tmp_path / "a folder"
    (tree / "own").mkdir(parents=True)
    (tree / "own/first.cuh").write_text('#include "second.cuh"\n#include "root.cuh"\n')
    (tree / "own/second.cuh").write_text("using Number = int;\n")
    (tree / "root.cuh").write_text("#include <cuda_fp16.h>\n")
    program = '#include "own/first.cuh"\nextern "C" __global__ void f(Number* x) { *x = 1; }\n'
    (tree / "f.cu").write_text(program)
    monkeypatch.chdir(tmp_path)
    with sources.source_dir(tree):
        assert offline.compile_cubin("f.cu", ["f"], ARCH).code.startswith(b"\x7fELF")


def test_meaning_takes_spellings_for_one_and_nothing_else() -> None:
    assert meaning(["-I/b", "-ftz=true", "-I/a"]) == [
        "--ftz=true",
        "--include-path=/b",
        "--include-path=/a",
    ]
    assert meaning(["-arch=sm_90", "--std=c++17"]) == meaning(
        ["-std=c++17", "--gpu-architecture=sm_90"]
    )
    assert meaning(["-ftz=true"]) != meaning(["-ftz=false"])
    assert meaning(["-ftz=true"]) != meaning(["-ftz=true", "-ftz=true"])


def test_a_kept_binary_is_of_todays_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Binaries for one architecture alone are kept under a key that covers the whole list."""
    fake_gpu(monkeypatch, tmp_path)
    compiled: list[str] = []

    def compile_cubin(_: str, names: list[str], arch: str) -> Cubin:
        compiled.append(arch)
        return Cubin(b"code", {names[0]: "_Z6kernel"})

    monkeypatch.setattr(offline, "compile_cubin", compile_cubin)

    def load_in_a_new_process() -> None:
        monkeypatch.setattr(instances, "_attempts", {})
        instances.load(OWN, 0)

    load_in_a_new_process()
    load_in_a_new_process()
    assert len(compiled) == 1
    before: Callable[[Path], tuple[toolchain.Option, ...]] = toolchain.every_option
    monkeypatch.setattr(
        toolchain,
        "every_option",
        lambda folder: tuple(
            o._replace(flags=("-ftz=false",), value=False) if o.field == "ftz" else o
            for o in before(folder)
        ),
    )
    load_in_a_new_process()
    assert len(compiled) == 2
