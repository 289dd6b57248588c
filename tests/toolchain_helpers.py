"""For the tests of the runtime layer: instances, machine code, edited sources, a fake CuPy."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import pytest
from fake_device import H200

from k3cupy.choose.mla import configs
from k3cupy.kernels.mla_decode import UNTUNED, MlaDecodeConfig, Variant
from k3cupy.runtime import binaries, devices, instances, offline, sources, toolchain
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.offline import ARCHITECTURES, Cubin, compile_cubin

# --- The instances that a call can reach ---------------------------------------------------------


MAPPINGS = (UNTUNED, MlaDecodeConfig(1, 256, 3), MlaDecodeConfig(3, 256, 1))
"""One configuration for each mapping of threads to a row, whatever tables name."""


@dataclass(frozen=True)
class Shipped:
    """One instance that a call can reach."""

    variant: Variant
    config: MlaDecodeConfig

    @property
    def name(self) -> str:
        return self.config.name_expression(self.variant)

    @property
    def chosen(self) -> bool:
        """Whether a table or a rule chooses it; else only a caller who names it gets it."""
        tuned = configs("mla_decode", self.variant.kind) if self.variant.vector else ()
        return self.config in (UNTUNED, *tuned)


def variants() -> list[Variant]:
    """Every combination of flags that the kernel exists for."""
    flags = (False, True)
    found = itertools.starmap(
        Variant,
        itertools.product(
            ("bfloat16", "float16"), flags, ("same", "fp8", "ds_mla"), flags, flags, flags
        ),
    )
    return [variant for variant in found if variant.is_valid()]


def shipped_instances() -> list[Shipped]:
    """Every variant with every mapping, and with what a table may name for it."""
    found = []
    for variant in variants():
        tuned = configs("mla_decode", variant.kind) if variant.vector else ()
        found += [Shipped(variant, c) for c in dict.fromkeys((*MAPPINGS, *tuned))]
    return found


def known_to_nvrtc(arch: str) -> bool:
    """Whether the installed compiler can make code for an architecture."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, numbers = nvrtc.nvrtcGetSupportedArchs()
    return int(arch.removeprefix("sm_")) in numbers


# --- Reading machine code ------------------------------------------------------------------------


def _find_tool(name: str) -> Path | None:
    """A binary of NVIDIA's wheels, or one on the PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(f"nvidia-cuda-{name}") or ():
            if file.stem == name and "bin" in file.parts:
                path = Path(str(file.locate()))
                if os.access(path, os.X_OK):
                    return path
    found = shutil.which(name)
    return Path(found) if found else None


CUOBJDUMP = _find_tool("cuobjdump")
NVDISASM = _find_tool("nvdisasm")
HAS_DISASSEMBLER = CUOBJDUMP is not None and NVDISASM is not None
NO_DISASSEMBLER = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, which are not here"
needs_disassembler = pytest.mark.skipif(not HAS_DISASSEMBLER, reason=NO_DISASSEMBLER)


def _cuobjdump(option: str, code: bytes) -> str:
    assert CUOBJDUMP is not None
    assert NVDISASM is not None
    folders = [str(NVDISASM.parent), os.environ.get("PATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.cubin")
        path.write_bytes(code)
        done = subprocess.run(
            [str(CUOBJDUMP), option, str(path)],
            env={**os.environ, "PATH": os.pathsep.join(folders)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers a thread, and bytes of the rest."""

    registers: int
    stack: int
    shared: int
    local: int


def resources_of(code: bytes) -> dict[str, Resources]:
    """Resources of every kernel of a binary, by symbol."""
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    return {
        symbol: Resources(*map(int, numbers))
        for symbol, *numbers in re.findall(pattern, _cuobjdump("-res-usage", code))
    }


@dataclass(frozen=True)
class Instruction:
    """A line of SASS, for example `/*0d40*/ @P1 STG.E.128 [R2.64], R8 ;`."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def is_store(self) -> bool:
        return self.base in ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG", "STAS", "UBLKCP")

    @property
    def is_load(self) -> bool:
        return self.base in ("LDG", "LD", "LDGSTS", "ATOM", "ATOMG")

    @property
    def is_local(self) -> bool:
        return self.base in ("LDL", "STL")

    @property
    def is_wait(self) -> bool:
        """`griddepcontrol.wait`"""
        return self.base == "ACQBULK"

    @property
    def flushes(self) -> bool:
        """A subnormal number that comes in or out becomes zero."""
        return ".FTZ" in self.opcode

    @property
    def is_release(self) -> bool:
        """`griddepcontrol.launch_dependents`"""
        return self.base == "PREEXIT"

    def __str__(self) -> str:
        return f"{self.address:#x}: {self.predicate} {self.opcode} {self.operands}"


_LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[0-9T]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE
)


def sass_of(code: bytes) -> dict[str, list[Instruction]]:
    """The instructions of every kernel of a binary, by symbol."""
    parts = re.split(r"^\s*Function : (\S+)$", _cuobjdump("-sass", code), flags=re.MULTILINE)
    return {
        symbol: [Instruction(int(a, 16), p, o, rest) for a, p, o, rest in _LINE.findall(text)]
        for symbol, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def reached(
    program: Sequence[Instruction],
    start: Iterable[int],
    stop: Callable[[Instruction], bool] = lambda _: False,
) -> list[Instruction]:
    """The instructions that can run after control comes to one of `start`, in program order.

    Paths end behind an instruction for which `stop` is true. Where a jump depends on run-time
    values every way is followed, so that the answer is rather too large than too small.
    """
    index_of = {instruction.address: i for i, instruction in enumerate(program)}

    def target(instruction: Instruction) -> int | None:
        named = re.search(r"(?:^|[\s,(`])0x([0-9a-f]+)\)?$", instruction.operands)
        return index_of.get(int(named[1], 16)) if named else None

    def barrier(instruction: Instruction) -> str:
        return instruction.operands.partition(",")[0]

    seen: set[int] = set()
    pending = list(start)
    # Where threads meet again, by barrier; what was set up before the start still holds.
    meeting_points: dict[str, list[int | None]] = {}
    for here in program[: max(pending, default=0)]:
        if here.base == "BSSY":
            meeting_points.setdefault(barrier(here), []).append(target(here))
    synced: set[str] = set()
    while pending:
        at = pending.pop()
        if at in seen or at >= len(program):
            continue
        seen.add(at)
        here = program[at]
        if stop(here):
            continue
        always = not here.predicate
        if not (always and (here.base in ("EXIT", "RET") or here.opcode == "BRA")):
            pending.append(at + 1)
        if here.base in ("BRA", "WARPSYNC", "CALL", "JMP"):
            pending += [i for i in [target(here)] if i is not None]
        if here.base == "BSSY":
            meeting_points.setdefault(barrier(here), []).append(target(here))
            if barrier(here) in synced:
                pending += [i for i in [target(here)] if i is not None]
        if here.base == "BSYNC":
            synced.add(barrier(here))
            pending += [i for i in meeting_points.get(barrier(here), ()) if i is not None]
    return [program[i] for i in sorted(seen)]


def order_problems(
    program: Sequence[Instruction],
    *,
    has_pdl: bool,
    may_skip_the_wait: bool,
    may_release_early: bool = False,
) -> list[str]:
    """What is wrong with a kernel's order between its predecessor and its consumer.

    Args:
        may_skip_the_wait: some threads read and write without having waited themselves.
        may_release_early: the consumer may come before the last store, never before the wait.
    """
    problems = []
    waits = [i for i in program if i.is_wait]
    releases = [n for n, i in enumerate(program) if i.is_release]
    if has_pdl and not waits:
        problems.append("no dependency wait")
    if not has_pdl and (waits or releases):
        problems.append("instructions for PDL on a GPU that has none")
    if has_pdl:
        early = reached(program, [0], lambda i: i.is_wait)
        problems += [f"a release before the wait: {i}" for i in early if i.is_release]
        if not may_skip_the_wait:
            problems += [f"before the wait: {i}" for i in early if i.is_load or i.is_store]
    if not may_release_early:
        late = reached(program, [n + 1 for n in releases])
        problems += [f"a store after the release of the consumer: {i}" for i in late if i.is_store]
    return problems


# --- Every instance for every architecture --------------------------------------------------------


def spills(used: Resources) -> list[str]:
    """What of an instance's variables does not lie in registers."""
    return [
        f"{value} bytes of {what}"
        for what, value in (("stack", used.stack), ("local memory", used.local))
        if value
    ]


class Inspectable(Protocol):
    """An instance that knows what it may take, and how its machine code must look."""

    @property
    def name(self) -> str: ...

    def resource_problems(self, used: Resources, arch: str) -> list[str]: ...

    def code_problems(self, program: list[Instruction], arch: str) -> list[str]: ...


@dataclass(frozen=True)
class Inspected:
    """An instance and what it may take."""

    name: str
    max_registers: int
    max_shared: int = 0
    may_skip_the_wait: bool = False

    def resource_problems(self, used: Resources, arch: str) -> list[str]:
        problems = spills(used)
        if used.shared > self.max_shared:
            problems.append(f"{used.shared} bytes of shared memory, more than {self.max_shared}")
        if used.registers > self.max_registers:
            problems.append(f"{used.registers} registers, more than {self.max_registers}")
        return problems

    def code_problems(self, program: list[Instruction], arch: str) -> list[str]:
        spills = [f"local memory: {i}" for i in program if i.is_local]
        has_pdl = int(arch.removeprefix("sm_")) >= 90
        return spills + order_problems(
            program, has_pdl=has_pdl, may_skip_the_wait=self.may_skip_the_wait
        )


AnyInstance = TypeVar("AnyInstance")

COMPILE_ALL = os.environ.get("K3CUPY_COMPILE_ALL") == "1"
"""`make compile-all` sets it: every instance for every architecture, however long it takes."""

OTHERS = 2
"""How many instances of a source are compiled for an architecture that is not sm_90."""

READ = 12
"""Of how many instances of a program the code is read too: that takes a sixth of compiling them."""


@functools.cache
def commit() -> str:
    """What decides which share is compiled: the commit, or without git the sources.

    A commit that is green today is green tomorrow, and the next one looks at other instances.
    """
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()
    digest = hashlib.sha256()
    for path in sorted(sources.shipped().rglob("*.cu*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def share_of(items: Sequence[AnyInstance], what: str, size: int) -> list[AnyInstance]:
    """About `size` of the items, evenly spread; the commit says which. All for `compile-all`."""
    parts = 1 if COMPILE_ALL else -(-len(items) // size)
    chosen = int(hashlib.sha256(f"{commit()} {what}".encode()).hexdigest(), 16) % max(parts, 1)
    print(f"{what}: part {chosen + 1} of {parts}")
    return list(items[chosen::parts]) if items else []


def in_programs(*, sm_90: int, everything: int) -> pytest.MarkDecorator:
    """Run a test for each architecture and each part of its instances, a slice.

    Args:
        sm_90: programs into which the instances of sm_90 are cut, some hundred in each.
        everything: the same for each architecture when all instances are compiled.
    """

    def count(arch: str) -> int:
        if COMPILE_ALL:
            return everything
        return sm_90 if arch == "sm_90" else 1

    cases = [(arch, part, count(arch)) for arch in ARCHITECTURES for part in range(count(arch))]
    return pytest.mark.parametrize(
        ("arch", "part"),
        [
            pytest.param(arch, slice(part, None, parts), id=f"{arch}-{part}")
            for arch, part, parts in cases
        ],
    )


@dataclass(frozen=True)
class Code:
    """What the compiler made of an instance."""

    used: Resources
    program: list[Instruction]


_compiled: dict[tuple[str, str, str], dict[str, Code]] = {}


def compiled(source: str, names: Sequence[str], arch: str) -> Cubin:
    """One program of instances, each of which is in it once."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC and cuda-core")
    if not known_to_nvrtc(arch.removesuffix("a")):
        pytest.skip(f"this NVRTC does not know {arch}")
    cubin = compile_cubin(source, names, arch)
    assert cubin.code[:4] == b"\x7fELF"
    assert set(cubin.symbols) == set(names)
    assert len(set(cubin.symbols.values())) == len(names)
    return cubin


def code_of(source: str, names: Iterable[str], arch: str) -> dict[str, Code]:
    """The machine code of instances by name, each compiled once for all tests of this process.

    Those that nobody asked for before become one program, which is read in one go.
    """
    wanted = list(dict.fromkeys(names))
    known = _compiled.setdefault((sources.load(source).digest, source, arch), {})
    missing = [name for name in wanted if name not in known]
    if missing:
        cubin = compiled(source, missing, arch)
        if not HAS_DISASSEMBLER:
            pytest.skip(f"compiled but not inspected: {NO_DISASSEMBLER}")
        resources, programs = resources_of(cubin.code), sass_of(cubin.code)
        assert set(resources) == set(programs) == set(cubin.symbols.values())
        for name, symbol in cubin.symbols.items():
            known[name] = Code(resources[symbol], programs[symbol])
    return {name: known[name] for name in wanted}


def resources_and_code_of(
    source: str, names: Iterable[str], arch: str
) -> tuple[dict[str, Resources], dict[str, Code]]:
    """What all of some instances take, by name, and the machine code of the commit's share."""
    wanted = list(dict.fromkeys(names))
    read = share_of(wanted, f"code of {source} for {arch}", READ)
    rest = [name for name in wanted if name not in read]
    cubin = compiled(source, rest, arch) if rest else Cubin(b"", {})
    code = code_of(source, read, arch)
    resources = resources_of(cubin.code) if rest else {}
    assert set(resources) == set(cubin.symbols.values())
    used = {name: resources[symbol] for name, symbol in cubin.symbols.items()}
    return used | {name: each.used for name, each in code.items()}, code


def inspect(source: str, wanted: Sequence[Inspectable], arch: str) -> None:
    """Compile instances; look at what they take, and at the code of a share."""
    used, found = resources_and_code_of(source, [instance.name for instance in wanted], arch)
    problems = []
    for instance in wanted:
        told = instance.resource_problems(used[instance.name], arch)
        if instance.name in found:
            program = found[instance.name].program
            told += instance.code_problems(program, arch)
            may_flush = getattr(instance, "may_flush", lambda _: False)
            flushing = [i for i in program if i.flushes and not may_flush(i)]
            told += [f"flushes subnormal numbers: {i}" for i in flushing]
        problems += [f"{instance.name}: {problem}" for problem in told]
    assert not problems, f"{arch}:\n" + "\n".join(problems)


# --- Edited sources ------------------------------------------------------------------------------


def copy_of_sources(folder: Path) -> Path:
    """A writable copy of the shipped `cuda_src`."""
    return Path(shutil.copytree(sources.shipped(), folder / "cuda_src"))


def edit(path: Path, old: str, new: str) -> None:
    """Replace text that must be there, and make sure that the file's time moves on."""
    before = path.read_text(encoding="utf-8")
    assert old in before, f"{old!r} is not in {path.name}: this test needs another edit"
    write(path, before.replace(old, new))


def write(path: Path, text: str) -> None:
    """Write a file whose modification time differs from the one before, on any file system."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if path.stat().st_mtime_ns == before:
        os.utime(path, ns=(before, before + 1_000_000))


# --- A CuPy and a cuda-core without a GPU --------------------------------------------------------


class FakeCompileError(Exception):
    """Stands for cupy.cuda.compiler.CompileException."""


class FakeDriverError(RuntimeError):
    """Stands for cupy.cuda.driver.CUDADriverError."""


class FakeRuntimeError(RuntimeError):
    """Stands for cupy.cuda.runtime.CUDARuntimeError."""


@dataclass
class FakeGpu:
    """The parts of CuPy and cuda-core that `runtime.instances` uses, with a scripted compiler.

    `on_compile` gets the text of a source and decides: it returns, or raises what CuPy would raise.
    Whatever it does stands for NVRTC, and for CuPy's own files around it.
    """

    on_compile: Callable[[str], None] = lambda _: None
    nvrtc: tuple[int, int] = (12, 9)
    driver: int = 12090
    gpu: DeviceInfo = H200
    compiled: list[str] = field(default_factory=list)
    in_memory: list[str | None] = field(default_factory=list)
    loaded: list[bytes] = field(default_factory=list)
    current_device: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    others: dict[str, bytes] = field(default_factory=dict)
    forgotten: int = 0

    def __post_init__(self) -> None:
        self.compiler = SimpleNamespace(
            CompileException=FakeCompileError,
            _kernel_cache_backend=SimpleNamespace(
                load=self.others.get, save=lambda name, code, _: self.others.update({name: code})
            ),
        )
        self.compiler._set_kernel_cache_backend = lambda backend: setattr(
            self.compiler, "_kernel_cache_backend", backend
        )

    def cupy(self) -> Any:
        def set_device(index: int) -> None:
            self.current_device = index

        def clear_memo() -> None:
            self.forgotten += 1

        return SimpleNamespace(
            RawModule=self.raw_module,
            clear_memo=clear_memo,
            cuda=SimpleNamespace(
                Module=self.module,
                compiler=self.compiler,
                driver=SimpleNamespace(
                    CUDADriverError=FakeDriverError,
                    CU_FUNC_ATTRIBUTE_NUM_REGS="registers",
                    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared",
                    funcGetAttribute=lambda name, kernel: kernel[name],
                    funcSetAttribute=lambda kernel, name, value: kernel.update({name: value}),
                ),
                nvrtc=SimpleNamespace(getVersion=lambda: self.nvrtc),
                runtime=SimpleNamespace(
                    CUDARuntimeError=FakeRuntimeError,
                    getDevice=lambda: self.current_device,
                    setDevice=set_device,
                    getDeviceCount=lambda: 1,
                    driverGetVersion=lambda: self.driver,
                ),
            ),
        )

    def raw_module(
        self, *, code: str, options: tuple[str, ...], name_expressions: tuple[str, ...]
    ) -> Any:
        """As CuPy's: building the object does nothing, asking it for a function compiles.

        Or finds a binary in the cache, unless CUPY_CACHE_IN_MEMORY says not to look.
        """
        assert len(name_expressions) == 1, "one instance a module"
        assert "--std=c++17" in options
        path = re.fullmatch(r'// k3cupy [0-9a-f]{64}\n#include "(/[^"\n]+)"\n', code)
        assert path is not None, "NVRTC gets whole paths alone"

        def get_function(name: str) -> Any:
            assert (name,) == name_expressions
            in_memory = os.environ.get("CUPY_CACHE_IN_MEMORY")
            facts = repr((code, options, name, self.nvrtc)).encode()
            key = f"{hashlib.sha1(facts).hexdigest()}.cubin"
            backend = self.compiler._kernel_cache_backend
            binary = None if in_memory == "1" else backend.load(key)
            if binary is None:
                with self.lock:
                    self.compiled.append(name)
                    self.in_memory.append(in_memory)
                self.on_compile(f"{code}{Path(path[1]).read_text(encoding='utf-8')}")
                binary = name.encode()
                if in_memory != "1":
                    backend.save(key, binary, code)
            with self.lock:
                self.loaded.append(binary)
                number = len(self.loaded)
            return SimpleNamespace(
                num_regs=32,
                kernel=SimpleNamespace(ptr=number),
                max_dynamic_shared_size_bytes=49_152,
            )

        return SimpleNamespace(get_function=get_function)

    def module(self) -> Any:
        """A module of a binary that somebody else has compiled."""

        def get_function(symbol: str) -> Any:
            self.compiled.append(symbol)
            return SimpleNamespace(ptr={"registers": 32, "shared": 49_152})

        return SimpleNamespace(load=self.loaded.append, get_function=get_function)

    def cuda_core(self) -> Any:
        return SimpleNamespace(
            Kernel=SimpleNamespace(from_handle=lambda ptr: SimpleNamespace(handle=ptr))
        )


def fake_gpu(monkeypatch: pytest.MonkeyPatch, cache: Path | None = None) -> FakeGpu:
    """Put a fake in the place of CuPy and cuda-core; nothing that it "compiled" is kept.

    Or it is, in a folder.
    """
    fake = FakeGpu()
    if cache is None:
        monkeypatch.setattr(binaries, "claimed", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(binaries, "keep", lambda *_: None)
    else:
        monkeypatch.setenv("CUPY_CACHE_DIR", str(cache))
    monkeypatch.setattr(toolchain, "cupy", fake.cupy)
    monkeypatch.setattr(toolchain, "cuda_core", fake.cuda_core)
    monkeypatch.setattr(toolchain, "include_directory", lambda: "/headers")
    monkeypatch.setattr(toolchain, "header_version", lambda: (12, 9))
    monkeypatch.setattr(toolchain, "_warned", {})
    monkeypatch.setattr(instances, "_attempts", {})
    monkeypatch.setattr(devices, "info", lambda _: fake.gpu)
    return fake


def real_compilers(monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakeGpu:
    """CuPy's own compiler and cuda-core's on a GPU that is none: told that it is an H200.

    All is real as far as the driver: what would be loaded is in `loaded`.
    """
    compiler = pytest.importorskip("cupy").cuda.compiler
    pytest.importorskip("cuda.core")
    names = ("cuda_core", "include_directory", "header_version")
    real = {name: getattr(toolchain, name) for name in names}
    fake = fake_gpu(monkeypatch, cache)
    for name, question in real.items():
        monkeypatch.setattr(toolchain, name, question)
    monkeypatch.setattr(toolchain.cuda_core(), "Kernel", fake.cuda_core().Kernel)
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)

    class Module:
        mapping: dict[str, str]

        def load(self, code: bytes) -> None:
            fake.loaded.append(code)

        def _set_mapping(self, mapping: dict[str, str]) -> None:
            self.mapping = mapping

    def raw_module(*, code: str, options: Any, name_expressions: Any) -> Any:
        def get_function(name: str) -> Any:
            module = compile_it(code, options, name_expressions=name_expressions)
            assert name in module.mapping
            return SimpleNamespace(num_regs=32, kernel=SimpleNamespace(ptr=1))

        return SimpleNamespace(get_function=get_function)

    compile_it = compiler._compile_module_with_cache
    arch_options = compiler._get_arch_for_options_for_nvrtc.__wrapped__
    monkeypatch.setattr(compiler, "_get_arch", lambda: "90")
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", arch_options)
    monkeypatch.setattr(compiler, "function", SimpleNamespace(Module=Module))
    monkeypatch.setattr(compiler, "_kernel_cache_backend", compiler._kernel_cache_backend)
    fake.compiler, fake.nvrtc = compiler, compiler.nvrtc.getVersion()
    fake.raw_module = raw_module  # type: ignore[method-assign]
    return fake


@pytest.fixture
def fake_h200(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A fake compiler for a GPU that says it is an H200; also for its own instructions."""

    def compile_cubin(_: str, names: list[str], arch: str) -> Cubin:
        assert arch == "sm_90a"
        return Cubin(b"", {name: name for name in names})

    monkeypatch.setattr(offline, "compile_cubin", compile_cubin)
    return fake_gpu(monkeypatch)
