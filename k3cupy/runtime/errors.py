"""Errors that are not the caller's arguments. Bad arguments are ValueError or TypeError."""

from __future__ import annotations


class ToolchainError(RuntimeError):
    """CuPy, NVRTC, cuda-core, the CUDA headers or a usable GPU is missing; the text says which."""


class CompileError(RuntimeError):
    """NVRTC refused a source. The text holds the compiler's own log."""


class CaptureError(RuntimeError):
    """A call inside CUDA graph capture would have had to compile, load or synchronise."""
