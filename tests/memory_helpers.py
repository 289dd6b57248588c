"""Tensors that end where memory ends, and the rule for tests that need much of it."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

_GPU_PAGE = 2**21
_kept: list[mmap.mmap] = []


def before_a_forbidden_page(values: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is followed by a page that may not be touched.

    Its memory is never given back: leave the process by `os._exit`.
    """
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    size = values.numel() * values.element_size()
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + pages * page), page, 0) == 0
    tail = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=pages * page - size)
    return tail.view(values.dtype).view(values.shape).copy_(values)


def before_unmapped_gpu_memory(values: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last of a GPU allocation, which is never given back."""
    import cupy

    size = values.numel() * values.element_size()
    total = -(-size // _GPU_PAGE) * _GPU_PAGE
    memory = cupy.cuda.UnownedMemory(cupy.cuda.runtime.malloc(total), total, None)
    whole = cupy.ndarray(total, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    tail = torch.from_dlpack(whole)[total - size :]
    return tail.view(values.dtype).view(values.shape).copy_(values)


def gibibytes(size: int) -> pytest.MarkDecorator:
    """For a test with the fixture `needs_memory`: skip where the GPU has less memory free."""
    return pytest.mark.parametrize("needs_memory", [size], indirect=True, ids=[f"{size}GiB"])
