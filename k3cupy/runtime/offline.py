"""Compiling without a GPU: for CI, for reading the machine code, for other architectures.

CuPy's compiler asks the driver for a device, so this goes through cuda-core's ``Program``. Both get
their options from one list, in ``toolchain``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3cupy.runtime import sources, toolchain
from k3cupy.runtime.errors import CompileError

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
"""What the kernels are compiled for in CI; only sm_90 has been run by us."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of some instances.

    Attributes:
        code: the ELF file.
        symbols: name expression -> symbol in the file.
    """

    code: bytes
    symbols: dict[str, str]


def compile_cubin(source: str, name_expressions: Sequence[str], arch: str) -> Cubin:
    """Compile instances of one source into one binary.

    Args:
        source: file name inside ``cuda_src``.
        name_expressions: the instances.
        arch: for example ``"sm_90"``.

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
    options = toolchain.program_options(loaded.directory, arch)
    try:
        program = core.Program(loaded.text, "c++", options)
        code = program.compile("cubin", name_expressions=list(name_expressions))
    except Exception as error:  # cuda-core raises classes of packages that may be absent
        if type(error).__name__ == "DynamicLibNotFoundError":  # of cuda-pathfinder
            raise toolchain.no_nvrtc(error) from error
        log = str(error).rstrip("\0 \n")
        raise CompileError(
            f"{loaded.directory / source}: NVRTC refused it for {arch}\n{log}"
        ) from error
    symbols = {
        name: symbol.decode() if isinstance(symbol, bytes) else symbol
        for name, symbol in code.symbol_mapping.items()
    }
    return Cubin(code=bytes(code.code), symbols=symbols)


def binary_of(source: str, name_expression: str, arch: str) -> bytes:
    """Return what is kept of one instance: its symbol, a zero byte, and the ELF file.

    Args and errors are those of ``compile_cubin``.
    """
    cubin = compile_cubin(source, [name_expression], arch)
    return cubin.symbols[name_expression].encode() + b"\0" + cubin.code
