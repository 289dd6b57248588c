"""A process that starts: stubs for the compilers and the driver, all else is the package's own.

It imports neither PyTorch nor pytest, so that many of them start in little time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pwd
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from k3cupy.runtime import binaries, devices, instances, offline, sources, toolchain
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance
from k3cupy.runtime.offline import Cubin

SOURCE = "mla_decode.cu"
COMPILE_SECONDS = 0.05


class Process:
    """What this process compiled, and what it loaded."""

    def __init__(self, stall: str) -> None:
        self.stall = stall
        self.compiled: list[str] = []
        self.loaded: list[str] = []
        self.own_cache: dict[str, bytes] = {}
        self.compiler = SimpleNamespace(
            CompileException=KeyError,
            _kernel_cache_backend=SimpleNamespace(load=self.own_cache.get, save=None),
        )

    def wait_if(self, moment: str) -> None:
        """Stay in a moment until killed."""
        if self.stall == moment:
            print(moment, flush=True)
            time.sleep(60)

    def compile(self, name: str) -> bytes:
        """As NVRTC: some time, and other bytes whenever it is asked."""
        self.compiled.append(name)
        self.wait_if("compiling")
        time.sleep(COMPILE_SECONDS)
        return f"{name} {sources.load(SOURCE).digest} {os.urandom(20_000).hex()}".encode()

    def cubin(self, _: str, names: list[str], arch: str) -> Cubin:
        assert arch == "sm_90a"
        return Cubin(self.compile(names[0]), {names[0]: "symbol"})

    def module(self) -> Any:
        kernel = SimpleNamespace(ptr=1)
        return SimpleNamespace(load=self.note, get_function=lambda _: kernel)

    def note(self, code: bytes) -> None:
        self.loaded.append(code.decode()[:-40_000])

    def raw_module(self, *, code: str, options: Any, name_expressions: tuple[str, ...]) -> Any:
        def get_function(name: str) -> Any:
            key = hashlib.sha1(repr((code, options, name)).encode()).hexdigest() + ".cubin"
            backend = self.compiler._kernel_cache_backend
            in_memory = os.environ.get("CUPY_CACHE_IN_MEMORY") == "1"
            binary = None if in_memory else backend.load(key)
            if binary is None and in_memory:
                binary = self.compile(name)
            elif binary is None:
                with tempfile.TemporaryDirectory():  # CuPy compiles what it has written there
                    binary = self.compile(name)
                backend.save(key, binary, code)
            self.note(binary)
            return SimpleNamespace(num_regs=32, kernel=SimpleNamespace(ptr=1))

        return SimpleNamespace(get_function=get_function)

    def install(self) -> None:
        self.compiler._set_kernel_cache_backend = lambda backend: setattr(
            self.compiler, "_kernel_cache_backend", backend
        )
        cuda = SimpleNamespace(
            Module=self.module,
            compiler=self.compiler,
            driver=SimpleNamespace(
                CUDADriverError=KeyError,
                CU_FUNC_ATTRIBUTE_NUM_REGS=1,
                funcGetAttribute=lambda *_: 32,
            ),
            nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
            runtime=SimpleNamespace(
                CUDARuntimeError=KeyError, getDevice=lambda: 0, setDevice=lambda _: None
            ),
        )
        stub: Any = SimpleNamespace(RawModule=self.raw_module, cuda=cuda)
        core: Any = SimpleNamespace(Kernel=SimpleNamespace(from_handle=lambda ptr: ptr))
        toolchain.cupy = lambda: stub
        toolchain.cuda_core = lambda: core
        toolchain.include_directory = lambda: "/headers"
        devices.info = lambda _: DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
        offline.compile_cubin = self.cubin  # type: ignore[assignment]
        rename = os.replace

        def replace(old: Any, new: Any) -> None:
            self.wait_if("renaming")
            rename(old, new)

        os.replace = replace  # type: ignore[assignment]


def wanted(count: int) -> list[Instance]:
    """Some instances of either compiler."""
    return [Instance(SOURCE, f"kernel<{i}>", own_arch=i % 2 == 1) for i in range(count)]


def start(*, count: int = 2, stall: str = "", threads: int = 4) -> None:
    """Load instances, and print as JSON what was compiled, loaded and said."""
    process = Process(stall)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if "cupy" in sys.argv:
            toolchain.cupy()
        process.install()
        instances.load_all(wanted(count), 0, max_workers=threads)
    said = [str(w.message) for w in caught if "kernel cache" in str(w.message)]
    names = ("CUPY_CACHE_DIR", "CUPY_CACHE_IN_MEMORY")
    found = {"compiled": process.compiled, "loaded": process.loaded, "said": said}
    print(json.dumps(found | {name: os.environ.get(name) for name in names}))


def forget_home() -> None:
    """Neither HOME nor an entry of the user database, as for a user number in a container."""

    def nobody(_: Any) -> Any:
        raise KeyError

    os.environ.pop("HOME", None)
    pwd.getpwuid = pwd.getpwnam = nobody


def forbid_writing() -> None:
    """Every folder is read-only, those for temporary files too."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        is_new = event == "os.mkdir" and not Path(arguments[0]).exists()
        is_written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if is_new or event == "os.rename" or (is_written and arguments[0] != os.devnull):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), arguments[0])

    sys.addaudithook(refuse)


def forbid_locks() -> None:
    """As a network's file system may have it."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.lockf = refuse


if __name__ == "__main__":
    if "no locks" in sys.argv:
        forbid_locks()
    if "no patience" in sys.argv:
        binaries._LONGEST_WAIT = 0.2
    if "no home" in sys.argv:
        forget_home()
    if "read-only" in sys.argv:
        forbid_writing()
    threading.stack_size(256 * 1024)
    start(**json.loads(sys.argv[1]))
