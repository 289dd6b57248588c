"""Compiling without a GPU: for CI, for reading the machine code, for other architectures.

CuPy's compiler asks the driver for a device, so this goes through cuda-core's ``Program``. Both get
their options from one list, in ``toolchain``.
"""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from k3cupy.runtime import sources, toolchain
from k3cupy.runtime.errors import ToolchainError, refused_by_nvrtc

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
"""What the kernels are compiled for in CI; only sm_90 has been run by us."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of some instances.

    Attributes:
        code: the ELF file.
        symbols: name expression -> symbol in the file.
        log: what the assembler says of each kernel, where it was asked.
    """

    code: bytes = field(repr=False)
    symbols: dict[str, str]
    log: str = field(default="", repr=False)


def compile_cubin(
    source: str, name_expressions: Sequence[str], arch: str, *, verbose: bool = False
) -> Cubin:
    """Compile instances of one source into one binary.

    Args:
        source: file name inside ``cuda_src``.
        name_expressions: the instances.
        arch: for example ``"sm_90"``.
        verbose: ask the assembler what each kernel takes.

    Raises:
        CompileError: NVRTC refused the source or does not know the architecture.
        ToolchainError: cuda-core, NVRTC or the headers are missing.

    Example:
        >>> from k3cupy.kernels.mla_decode import MlaDecodeConfig, Variant
        >>> name = MlaDecodeConfig(0, 288, 1).name_expression(Variant("bfloat16"))
        >>> compile_cubin("mla_decode.cu", [name], "sm_90").code[:4]    # doctest: +SKIP
        b'\x7fELF'
    """
    core = toolchain.cuda_core()
    loaded = sources.load(source)
    more = {"ptxas_options": ["-v"]} if verbose else {}
    options = toolchain.program_options(loaded.directory, arch, **more)
    log = io.StringIO()
    refusal = None
    try:
        program = core.Program(loaded.text, "c++", options)
        code = program.compile("cubin", name_expressions=list(name_expressions), logs=log)
    except Exception as error:  # cuda-core raises classes of packages that may be absent
        if type(error).__name__ == "DynamicLibNotFoundError":  # of cuda-pathfinder
            raise toolchain.no_nvrtc(error) from error
        told = str(error)
        refusal = refused_by_nvrtc(loaded.directory / source, f"it for {arch}", told)
    program = None  # which an error's traceback would keep beyond cuda-core's own end
    if refusal is not None:
        raise refusal
    symbols = {
        name: symbol.decode() if isinstance(symbol, bytes) else symbol
        for name, symbol in code.symbol_mapping.items()
    }
    return Cubin(code=bytes(code.code), symbols=symbols, log=log.getvalue())


def binary_of(source: str, name_expression: str, arch: str) -> bytes:
    """Return what is kept of one instance: its symbol, a zero byte, and the ELF file.

    Args and errors are those of ``compile_cubin``.
    """
    cubin = compile_cubin(source, [name_expression], arch)
    return cubin.symbols[name_expression].encode() + b"\0" + cubin.code


NO_DISASSEMBLER = (
    "machine code as text needs nvdisasm, NVIDIA's disassembler, which is neither in a wheel here "
    "nor on the PATH: pip install nvidia-cuda-nvdisasm"
)


def disassembled(code: bytes) -> str:
    """Return a binary's machine code as text (SASS), as nvdisasm writes it.

    Raises:
        ToolchainError: nvdisasm is not here, or does not know the architecture.
    """
    import shutil

    try:
        from cuda.pathfinder import find_nvidia_binary_utility  # knows the wheels' folders

        tool = find_nvidia_binary_utility("nvdisasm")
    except Exception:  # it is not installed, or fails in its own way
        tool = None
    tool = tool or shutil.which("nvdisasm")
    if tool is None:
        raise ToolchainError(NO_DISASSEMBLER)
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(code)
        command = [tool, "--print-code", os.fspath(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{tool} refused the binary: {done.stderr.strip()}")
    return done.stdout
