"""Compiling and loading of instances, with a scripted compiler in the place of CuPy's.

The same on a real GPU is in test_runtime_instances_gpu.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import run_program
from toolchain_helpers import (
    FakeCompileError,
    FakeDriverError,
    FakeGpu,
    FakeRuntimeError,
    copy_of_sources,
    fake_gpu,
    write,
)

import k3cupy
from k3cupy.runtime import binaries, devices, instances, sources, toolchain
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import BusyError
from k3cupy.runtime.instances import Instance

SOURCE = "mla_decode.cu"
INSTANCES = [Instance(SOURCE, f"k3cupy::mla_decode_epilogue<{i}>") for i in range(3)]
ONE = INSTANCES[0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.delenv("K3CUPY_SOURCE_DIR", raising=False)
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    return fake_gpu(monkeypatch)


def refuse(_: str) -> None:
    raise FakeCompileError("mla_decode.cu(7): error: expected a ';'")


# One compile, whoever asks


def test_one_compile_however_many_threads_ask(gpu: FakeGpu) -> None:
    asked = threading.Barrier(16)
    gpu.on_compile = lambda _: time.sleep(0.1)

    def ask(number: int) -> Any:
        asked.wait(30)
        return instances.load(INSTANCES[number % 2], 0)

    with ThreadPoolExecutor(16) as pool:
        loaded = list(pool.map(ask, range(16)))
    assert sorted(gpu.compiled) == sorted(i.name_expression for i in INSTANCES[:2])
    assert len({id(kernel) for kernel in loaded}) == 2
    assert all(kernel.function.num_regs == 32 for kernel in loaded)


def test_each_gpu_loads_its_own(gpu: FakeGpu) -> None:
    assert instances.load(ONE, 0) is not instances.load(ONE, 1)
    assert instances.load(ONE, 1) is instances.load(ONE, 1)
    assert len(gpu.compiled) == 2
    assert gpu.current_device == 0, "the caller's current device is as before"


def test_is_loaded_says_no_before_and_during_a_compile(gpu: FakeGpu) -> None:
    seen = []
    gpu.on_compile = lambda _: seen.append(instances.is_loaded(ONE, 0))
    assert not instances.is_loaded(ONE, 0)
    instances.load(ONE, 0)
    assert seen == [False]
    assert instances.is_loaded(ONE, 0)
    assert not instances.is_loaded(ONE, 1)


def test_load_all(gpu: FakeGpu) -> None:
    done: list[Any] = []
    assert instances.load_all([*INSTANCES, *INSTANCES], 0, on_done=done.append) == len(INSTANCES)
    assert sorted(gpu.compiled) == sorted(i.name_expression for i in INSTANCES)
    assert set(done) == set(INSTANCES)
    assert instances.load_all([], 0) == 0


def test_load_all_begins_while_the_rest_is_chosen(gpu: FakeGpu) -> None:
    compiled, found = threading.Event(), []
    gpu.on_compile = lambda _: compiled.set()

    def chosen() -> Iterator[Instance]:
        yield INSTANCES[0]
        assert compiled.wait(30), "the first one waits for the last"
        yield from INSTANCES

    assert instances.load_all(chosen(), 0, on_found=found.append) == 3
    assert found == [1, 2, 3]


def test_who_is_not_in_a_hurry_waits_for_another_process(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up comes back later; a call that comes meanwhile in another thread just waits."""
    busy, asked = threading.Event(), []

    @contextlib.contextmanager
    def claimed(_: str) -> Iterator[None]:
        asked.append(binaries.patient.get())
        if not binaries.patient.get():
            busy.set()
            if len(asked) < 5:
                raise BusyError
        yield

    monkeypatch.setattr(binaries, "claimed", claimed)
    with ThreadPoolExecutor(2) as pool:
        warm = pool.submit(instances.load_all, [ONE], 0)
        assert busy.wait(30)
        assert instances.load(ONE, 0) is instances.load(ONE, 0)
        assert warm.result(30) == 1
    assert asked[0] is False
    assert gpu.compiled == [ONE.name_expression]


def test_load_all_uses_the_callers_source_dir(gpu: FakeGpu, tmp_path: Path) -> None:
    tree = copy_of_sources(tmp_path)
    write(tree / "mla/rope.cuh", "// edited\n")
    with k3cupy.source_dir(tree):
        digest = sources.load(SOURCE).digest
        seen: list[str] = []
        gpu.on_compile = seen.append
        instances.load_all(INSTANCES, 0, max_workers=3)
    assert all(digest in code for code in seen)
    assert not instances.is_loaded(ONE, 0), "the shipped sources are another instance"


def test_an_edited_header_is_another_instance(gpu: FakeGpu, tmp_path: Path) -> None:
    """CuPy's own key misses headers behind -I: the text that it gets must change with them."""
    tree = copy_of_sources(tmp_path)
    seen: list[str] = []
    gpu.on_compile = seen.append
    with k3cupy.source_dir(tree):
        first = instances.load(ONE, 0)
        assert instances.load(ONE, 0) is first
        write(tree / "common/fp8.cuh", "// edited\n")
        assert not instances.is_loaded(ONE, 0)
        assert instances.load(ONE, 0) is not first
    assert len(set(seen)) == len(seen) == 2


# Failed compiles (case 6)


def test_case06_failed_compile_names_file_and_log(gpu: FakeGpu) -> None:
    gpu.on_compile = refuse
    with pytest.raises(k3cupy.CompileError) as caught:
        instances.load(ONE, 0)
    text = str(caught.value)
    assert text.startswith(str(sources.shipped() / SOURCE))
    assert ONE.name_expression in text
    assert "error: expected a ';'" in text
    assert "".join(traceback.format_exception(caught.value)).count("error: expected a ';'") == 1


def test_case06_nothing_stays_after_a_failed_compile(gpu: FakeGpu) -> None:
    gpu.on_compile = refuse
    for _ in range(2):
        with pytest.raises(k3cupy.CompileError):
            instances.load(ONE, 0)
        assert not instances.is_loaded(ONE, 0)
    gpu.on_compile = lambda _: None
    instances.load(ONE, 0)
    assert instances.is_loaded(ONE, 0)
    assert len(gpu.compiled) == 3
    assert gpu.current_device == 0


def test_case06_the_next_call_after_a_fix_works(gpu: FakeGpu, tmp_path: Path) -> None:
    tree = copy_of_sources(tmp_path)
    original = (tree / SOURCE).read_text(encoding="utf-8")

    def compile_text(code: str) -> None:
        if "syntax error here" in code:
            refuse(code)

    gpu.on_compile = compile_text
    with k3cupy.source_dir(tree):
        write(tree / SOURCE, original + "syntax error here\n")
        with pytest.raises(k3cupy.CompileError, match=re.escape(str(tree.resolve() / SOURCE))):
            instances.load(ONE, 0)
        write(tree / SOURCE, original)
        instances.load(ONE, 0)


def test_all_waiting_threads_get_the_error(gpu: FakeGpu) -> None:
    def slowly_refuse(code: str) -> None:
        time.sleep(0.2)
        refuse(code)

    gpu.on_compile = slowly_refuse

    def ask(_: int) -> str:
        with pytest.raises(k3cupy.CompileError) as caught:
            instances.load(ONE, 0)
        return str(caught.value)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1
    assert len(gpu.compiled) <= 2


class Interrupt(BaseException):
    """As KeyboardInterrupt is no Exception, but one that fails a test and does not end them all."""


def test_an_interrupt_is_nobody_elses(gpu: FakeGpu) -> None:
    """The thread that compiles gets it; of those that wait, one compiles and all have a kernel."""
    begun, released = threading.Event(), threading.Event()

    def interrupt_the_first(_: str) -> None:
        if len(gpu.compiled) == 1:
            begun.set()
            released.wait(30)
            raise Interrupt

    gpu.on_compile = interrupt_the_first
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(instances.load, ONE, 0)
        assert begun.wait(30)
        others = [pool.submit(instances.load, ONE, 0) for _ in range(7)]
        time.sleep(0.1)
        released.set()
        with pytest.raises(Interrupt):
            first.result(30)
        assert len({id(other.result(30)) for other in others}) == 1
    assert len(gpu.compiled) == 2
    assert instances.is_loaded(ONE, 0)


def test_an_interrupt_has_no_wrong_moment(gpu: FakeGpu) -> None:
    """It comes behind each call in turn, of a compilation that works and of one that fails.

    There, and where a function begins, Python looks for one.
    """

    def load_with_an_interrupt(after: int) -> bool:
        """Return whether it came; it lets so many moments go by."""
        left = after

        def look(frame: Any, event: str, _: Any) -> None:
            nonlocal left
            if frame.f_code.co_filename == instances.__file__ and event in ("call", "c_return"):
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    raise Interrupt

        sys.setprofile(look)
        try:
            instances.load(ONE, 0)
        except (Interrupt, k3cupy.CompileError):
            pass
        finally:
            sys.setprofile(None)
        return left < 0

    for compile_it in (lambda _: None, refuse):
        moment, came = 0, True
        while came:
            instances._attempts.clear()
            gpu.on_compile = compile_it
            came = load_with_an_interrupt(moment)
            gpu.on_compile = lambda _: None
            loaded: list[Any] = []  # by another thread: a lock left behind would hold it
            other = threading.Thread(
                target=lambda into=loaded: into.append(instances.load(ONE, 0)), daemon=True
            )
            other.start()
            other.join(10)
            assert [kernel.function.num_regs for kernel in loaded] == [32], moment
            moment += 1
        assert moment > 8, "in each function here, and behind what they call"


def test_an_interrupt_leaves_device_and_cache_as_they_were(gpu: FakeGpu) -> None:
    """It comes behind a call that is C, as the real ones of the driver are."""
    current = deque([0], maxlen=1)
    cupy = gpu.cupy()
    cupy.cuda.runtime.getDevice, cupy.cuda.runtime.setDevice = lambda: current[0], current.append

    def behind(function: Any) -> Any:
        def look(frame: Any, event: str, called: Any) -> None:
            if event == "c_return" and called == function:
                sys.setprofile(None)
                raise Interrupt

        return look

    def use_the_gpu() -> None:
        with devices.current(1):
            pass

    def use_the_cache() -> None:
        with binaries.in_place_of_cupys(gpu.compiler):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "cupy", lambda: cupy)
        for use, function in (
            (use_the_gpu, current.append),
            (use_the_cache, binaries._asked.set),
        ):
            sys.setprofile(behind(function))
            with pytest.raises(Interrupt):
                use()
            assert sys.getprofile() is None
            assert current[0] == 0
            assert binaries._asked.get() is None


def test_a_fork_does_not_wait_for_its_parents_thread(gpu: FakeGpu) -> None:
    compiling, compiled = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        compiling.set()
        compiled.wait(30)

    gpu.on_compile = wait
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        first = pool.submit(instances.load, ONE, 0)
        assert compiling.wait(30)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            try:
                gpu.on_compile = lambda _: None
                os._exit(0 if instances.load(ONE, 0).function.num_regs == 32 else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        compiled.set()
        assert first.result(30).device == 0
    assert status == 0


def test_load_all_refuses_what_is_no_number_of_threads(gpu: FakeGpu) -> None:
    for many in (0, -1, 1.5, "2", True):
        with pytest.raises((ValueError, TypeError), match=r"^max_workers: expected None, or thr"):
            instances.load_all(INSTANCES, 0, max_workers=many)  # type: ignore[arg-type]
    assert gpu.compiled == []


def test_load_all_begins_nothing_after_a_failure(gpu: FakeGpu) -> None:
    def refuse_after_a_while(name: str) -> None:
        time.sleep(0.01)  # as compilers do; else all may be through before the first is heard of
        refuse(name)

    gpu.on_compile = refuse_after_a_while
    many = [Instance(SOURCE, f"k3cupy::mla_decode_epilogue<{i}>") for i in range(50)]
    with pytest.raises(k3cupy.CompileError):
        instances.load_all(many, 0, max_workers=1)
    assert len(gpu.compiled) < 50


def test_a_failure_of_one_is_the_failure_of_load_all(gpu: FakeGpu) -> None:
    def refuse_one(_: str) -> None:
        if gpu.compiled[-1] == ONE.name_expression:
            refuse("")

    gpu.on_compile = refuse_one
    with pytest.raises(k3cupy.CompileError, match=re.escape(ONE.name_expression)):
        instances.load_all(INSTANCES, 0, max_workers=1)


def test_case24_releases_that_differ_are_named(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.on_compile, gpu.nvrtc = refuse, (12, 2)
    with pytest.raises(k3cupy.CompileError) as caught:
        instances.load(ONE, 0)
    text = str(caught.value)
    assert "NVRTC 12.2 with CUDA 12.9 headers from /headers" in text
    assert "the releases differ" in text
    assert "install matching" in text
    monkeypatch.setattr(toolchain, "header_version", lambda: (12, 2))
    with pytest.raises(k3cupy.CompileError, match=r"NVRTC 12\.2 with CUDA 12\.2") as caught:
        instances.load(ONE, 0)
    assert "differ" not in str(caught.value)


def test_case24_nvrtc_newer_than_the_driver(gpu: FakeGpu) -> None:
    def refuse_binary(_: str) -> None:
        raise FakeDriverError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    gpu.on_compile, gpu.driver, gpu.nvrtc = refuse_binary, 11080, (13, 1)
    with pytest.raises(k3cupy.ToolchainError) as caught:
        instances.load(ONE, 0)
    text = str(caught.value)
    assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in text
    assert "Driver 11.8, NVRTC 13.1" in text
    assert "pip install" in text
    assert not instances.is_loaded(ONE, 0)


def test_no_driver_is_not_an_old_one(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA says of both that the driver is insufficient."""
    insufficient = FakeRuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insuff")

    def refuse_device(_: int) -> Any:
        raise insufficient

    monkeypatch.setattr(devices, "info", refuse_device)
    gpu.driver = 0
    with pytest.raises(k3cupy.ToolchainError) as caught:
        instances.load(ONE, 0)
    assert str(caught.value).startswith("GPU 0: there is no NVIDIA driver here; install one")
    assert "insuff" not in str(caught.value)
    gpu.driver = 11080
    with pytest.raises(k3cupy.ToolchainError, match=r"insuff.*Driver 11\.8, NVRTC 12\.9"):
        instances.load(ONE, 0)


@pytest.mark.parametrize(("driver", "told"), [(0, "no NVIDIA driver"), (11080, "insuff")])
def test_counting_gpus_tells_them_apart_too(
    driver: int, told: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_count() -> int:
        raise FakeRuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insuff")

    cupy = gpu.cupy()
    cupy.cuda.runtime.getDeviceCount = refuse_count
    monkeypatch.setattr(toolchain, "cupy", lambda: cupy)
    gpu.driver = driver
    with pytest.raises(k3cupy.ToolchainError, match=f"the driver gives no GPU .*{told}"):
        devices.count()


@pytest.mark.parametrize("own_arch", [False, True])
def test_a_gpu_that_is_too_old(gpu: FakeGpu, own_arch: bool) -> None:
    """Before it is compiled: the assembler's complaints are long."""
    gpu.gpu = DeviceInfo(0, "Tesla T4", (7, 5), 40, 65_536)
    with pytest.raises(k3cupy.ToolchainError) as caught:
        instances.load(Instance(SOURCE, ONE.name_expression, own_arch), 0)
    assert str(caught.value) == (
        "GPU 0: expected sm_80 or newer, got Tesla T4, which is sm_75. Use a newer GPU, or tensors "
        "on the CPU"
    )
    assert gpu.compiled == []


WITHOUT_NVRTC = r"""
import importlib
pathfinder = importlib.import_module("cuda.pathfinder")
loader = importlib.import_module("cuda.pathfinder._dynamic_libs.load_nvidia_dynamic_lib")

def load(name):
    if name == "nvrtc":
        raise pathfinder.DynamicLibNotFoundError("libnvrtc is nowhere\nsearched in many places")
    return real(name)

real, pathfinder.load_nvidia_dynamic_lib, loader.load_nvidia_dynamic_lib = (
    loader.load_nvidia_dynamic_lib, load, load
)
from k3cupy.runtime import instances, offline
from k3cupy.runtime.errors import ToolchainError
for ask in (
    lambda: instances.load(instances.Instance("mla_decode.cu", "k3cupy::any"), 0),
    lambda: offline.compile_cubin("mla_decode.cu", ["k3cupy::any"], "sm_90"),
):
    try:
        ask()
    except ToolchainError as error:
        print(error)
"""


def test_a_missing_nvrtc_is_named_with_its_pip_line() -> None:
    """By both compilers, at a call."""
    pytest.importorskip("cupy")
    pytest.importorskip("cuda.core")
    lines = run_program(WITHOUT_NVRTC).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("NVRTC, the compiler of CUDA sources, does not load (libnvrtc is ")
        assert 'pip install "k3cupy[cu12]"' in line


# A disk cache that cannot be used (case 21)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        IsADirectoryError(errno.EISDIR, "Is a directory", "/cache/entry.cubin"),
        PermissionError(errno.EACCES, "Permission denied", "/cache/tmp1"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
    ids=lambda error: errno.errorcode[error.errno],
)
def test_case21_unusable_cache_warns_once_and_compiles_in_memory(
    error: OSError, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))

    def fail_on_disk(_: str) -> None:
        if "CUPY_CACHE_IN_MEMORY" not in os.environ:
            raise error

    gpu.on_compile = fail_on_disk
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        instances.load(ONE, 0)
    (warning,) = caught
    assert warning.category is RuntimeWarning
    text = str(warning.message)
    assert str(tmp_path / "kernels") in text
    assert error.strerror in text
    assert "CUPY_CACHE_DIR" in text
    assert gpu.in_memory == [None, "1"]
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ
    assert instances.is_loaded(ONE, 0)


def test_case21_a_full_disk_is_told_once(gpu: FakeGpu) -> None:
    def fail_on_disk(_: str) -> None:
        if "CUPY_CACHE_IN_MEMORY" not in os.environ:
            raise OSError(errno.ENOSPC, "No space left on device")

    gpu.on_compile = fail_on_disk
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for instance in INSTANCES[:3]:
            instances.load(instance, 0)
    assert len(caught) == 1


def test_case21_the_callers_in_memory_setting_stays(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")

    def fail_on_disk(_: str) -> None:
        if os.environ["CUPY_CACHE_IN_MEMORY"] == "0":
            raise OSError(errno.ENOSPC, "No space left on device")

    gpu.on_compile = fail_on_disk
    with pytest.warns(RuntimeWarning, match="kernel cache"):
        instances.load(ONE, 0)
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "0"


def test_case21_an_error_in_memory_too_is_not_hidden(gpu: FakeGpu) -> None:
    def fail(code: str) -> None:
        if os.environ.get("CUPY_CACHE_IN_MEMORY"):
            refuse(code)
        raise OSError(errno.ENOSPC, "No space left on device")

    gpu.on_compile = fail
    with pytest.warns(RuntimeWarning), pytest.raises(k3cupy.CompileError):
        instances.load(ONE, 0)
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ
    assert not instances.is_loaded(ONE, 0)


# What is missing


@pytest.fixture
def fresh_toolchain() -> Iterator[None]:
    """What toolchain found before is forgotten, before the test and after it."""

    def forget() -> None:
        for question in ("cupy", "cuda_core", "include_directory", "header_version"):
            getattr(toolchain, question).cache_clear()

    forget()
    yield
    forget()


@pytest.mark.parametrize(
    ("module", "ask", "name"),
    [("cupy", toolchain.cupy, "CuPy"), ("cuda.core", toolchain.cuda_core, "cuda-core")],
)
def test_a_missing_package_is_named_with_its_pip_line(
    module: str, ask: Any, name: str, fresh_toolchain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(k3cupy.ToolchainError) as caught:
        ask()
    assert str(caught.value).startswith(f"{name} does not import (")
    assert 'pip install "k3cupy[cu12]"' in str(caught.value)
    assert 'pip install "k3cupy[cu13]"' in str(caught.value)


@pytest.mark.parametrize("module", ["cupy", "cuda.core"])
def test_an_empty_folder_that_pip_left_is_no_package(
    module: str, fresh_toolchain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"cupy": toolchain.cupy, "cuda.core": toolchain.cuda_core}[module]
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(k3cupy.ToolchainError, match=r"does not import \(.*has no attribute"):
        ask()


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError", "OSError", "AttributeError"])
def test_a_package_that_fails_while_it_is_imported(
    error: str, fresh_toolchain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was built for another NumPy does."""
    write(tmp_path / "cupy/__init__.py", f"raise {error}('of another release')\n")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(k3cupy.ToolchainError, match=r"^CuPy does not import \(of another release"):
        toolchain.cupy()


def no_wheel_with_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda _: None)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)


def test_case24_no_headers(fresh_toolchain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    no_wheel_with_headers(monkeypatch)
    with pytest.raises(k3cupy.ToolchainError) as caught:
        toolchain.include_directory()
    assert "cuda_bf16.h" in str(caught.value)
    assert 'pip install "cuda-toolkit[cudart]==12.*"' in str(caught.value)


@pytest.mark.parametrize("variable", ["CUDA_PATH", "CUDA_HOME"])
def test_headers_of_a_cuda_installation(
    variable: str, fresh_toolchain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_wheel_with_headers(monkeypatch)
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_bf16.h").touch()
    write(tmp_path / "include/cuda_runtime_api.h", "#define CUDART_VERSION  12060\n")
    monkeypatch.setenv(variable, str(tmp_path))
    assert toolchain.include_directory() == str(tmp_path / "include")
    toolchain.include_directory.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, ".")  # the same for whoever finds the binary, elsewhere
    assert toolchain.include_directory() == str(tmp_path / "include")
    assert toolchain.header_version() == (12, 6)
    assert toolchain.options(Path("/src")) == (
        "--std=c++17",
        "-I/src",
        f"-I{tmp_path / 'include'}",
    )


# Shared memory


def test_the_limit_of_shared_memory_only_grows(gpu: FakeGpu) -> None:
    loaded = instances.load(ONE, 0)
    for size, limit in ((1024, 49_152), (100_000, 100_000), (60_000, 100_000), (0, 100_000)):
        loaded.allow_shared_memory(size)
        assert loaded.function.max_dynamic_shared_size_bytes == limit
    assert gpu.current_device == 0
