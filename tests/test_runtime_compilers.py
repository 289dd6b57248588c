"""CuPy and cuda-core compile the same: one list of options, compared at the door of NVRTC.

Most calls run what CuPy compiled, machine code is read from what cuda-core compiled. No GPU is
needed: CuPy is told its architecture, and what NVRTC gives back is never loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toolchain_helpers import FakeGpu, fake_gpu

from k3cupy.kernels.mla_decode import UNTUNED, Variant
from k3cupy.runtime import binaries, instances, offline, sources, toolchain
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


def by_cupy(monkeypatch: pytest.MonkeyPatch) -> Compiled:
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

    class Cupy(FakeGpu):
        def raw_module(self, *, code: str, options: Any, name_expressions: Any) -> Any:  # type: ignore[override]
            compile_it = compiler._compile_module_with_cache
            return SimpleNamespace(
                get_function=lambda _: compile_it(code, options, name_expressions=name_expressions)
            )

    with monkeypatch.context() as patch:
        patch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
        patch.setattr(compiler, "nvrtc", Nvrtc())
        patch.setattr(compiler, "_kernel_cache_backend", SimpleNamespace(load=lambda _: None))
        patch.setattr(compiler, "_get_arch", lambda: ARCH.removeprefix("sm_"))
        arch_options = compiler._get_arch_for_options_for_nvrtc.__wrapped__
        patch.setattr(compiler, "_get_arch_for_options_for_nvrtc", arch_options)
        patch.setattr(toolchain, "cupy", Cupy().cupy)
        patch.setattr(instances, "_loaded", {})
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


def test_both_compilers_get_the_same_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, inspected = by_cupy(monkeypatch), by_cuda_core(monkeypatch)
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
    flags = meaning(
        o.decode() for o in toolchain.program_options(folder, "x.cu", ARCH).as_bytes("nvrtc")
    )
    assert {"--use_fast_math", "--restrict"} <= set(flags)


def test_headers_never_come_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such a binary would be kept under the key of the right headers."""
    pytest.importorskip("cuda.core")
    tree, elsewhere = tmp_path / "cuda_src", tmp_path / "elsewhere"
    for folder, line in ((tree, "using Number = int;"), (elsewhere, "#error not this one")):
        (folder / "common").mkdir(parents=True)
        (folder / "common/number.cuh").write_text(line, encoding="utf-8")
    program = '#include "common/number.cuh"\nextern "C" __global__ void f(Number* x) { *x = 1; }'
    (tree / "f.cu").write_text(program, encoding="utf-8")
    monkeypatch.chdir(elsewhere)
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
    """Binaries for one architecture alone are ours to keep: their key covers the whole list."""
    own = Instance("fused_a_gemm.cu", "k3cupy::fused_a_gemm<1>", own_arch=True)
    fake_gpu(monkeypatch)
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []

    def compile_cubin(_: str, names: list[str], arch: str) -> Cubin:
        compiled.append(arch)
        return Cubin(b"code", {names[0]: "_Z6kernel"})

    monkeypatch.setattr(offline, "compile_cubin", compile_cubin)

    def find() -> None:
        source = sources.load(own.source)
        with binaries.binary(source, own.source, own.name_expression, "sm_90a", (12, 9)):
            pass

    find()
    find()
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
    find()
    assert len(compiled) == 2
