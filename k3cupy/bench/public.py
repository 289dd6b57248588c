"""What ours is compared with: kernels in public structures, and what vLLM's own table would run.

They are written by us, so they tell what a structure costs, not what somebody's binary does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
import torch

import k3cupy
from k3cupy.call.choice import PUBLIC
from k3cupy.choose import gemm
from k3cupy.choose.gemm import SKINNY
from k3cupy.choose.table import Table, parts_of
from k3cupy.runtime import instances, launch
from k3cupy.runtime.instances import Instance, instantiation
from k3cupy.timing.cold import Body
from k3cupy.tuning.entries import LINEAR, Candidate

FUSED_A = Candidate(gemm.FUSED_A)
"""The public fused-A GEMM; ours always has a configuration."""

MOST_TOKENS = 16
"""Of the public fused-A GEMM."""

_THREADS = 256
_ROWS, _COLUMNS, _RING_BYTES, _BARRIER_BYTES = 16, (256, 128), 192 << 10, 1024
_SPLIT_3_TOKENS = 64
_SGLANG_FEW_ROWS = 768


def queue(
    source: str,
    name: str,
    grid: int,
    *,
    threads: int = _THREADS,
    shared_bytes: int = 0,
    pdl: bool = True,
) -> Callable[[Sequence[Any]], None]:
    """Return what launches a kernel of ``cuda_src/bench``.

    Args:
        source: file in ``cuda_src/bench``.
        name: of the kernel, with its template arguments.
        grid: blocks.
        threads: of a block.
        shared_bytes: dynamic shared memory a block.
        pdl: launch it with programmatic dependent launch.
    """
    device = torch.cuda.current_device()
    kernel = instances.load(Instance(f"bench/{source}", name), device)
    if shared_bytes:
        kernel.allow_shared_memory(shared_bytes)
    run = launch.make_launcher(
        device, kernel.kernel, grid=grid, block=threads, pdl=pdl, shared_bytes=shared_bytes
    )
    return lambda arguments: run(torch.cuda.current_stream().cuda_stream, arguments)


# --- The fused-A GEMM ----------------------------------------------------------------------------


def has_fused_a(n: int, k: int, tokens: int) -> bool:
    """Return whether the public fused-A GEMM can compute a product."""
    return n % _ROWS == 0 and k % min(_COLUMNS) == 0 and 1 <= tokens <= MOST_TOKENS


def fused_a(x: torch.Tensor, n: int, out: torch.Tensor) -> Body:
    """Return a call of the comparison kernel that takes the weight [n, k].

    Args:
        x: [tokens, k], rows may lie apart.
        n: rows of the weight.
        out: [tokens, n], packed.
    """
    tokens, k = x.shape
    tile = 8 if tokens <= 8 else 16
    columns = next(width for width in _COLUMNS if k % width == 0)
    stage_bytes = 2 * (_ROWS + tile) * columns
    stages = min(k // columns, _RING_BYTES // stage_bytes)
    name = instantiation("public_gemm", n, k, tile, x.is_contiguous())
    shared_bytes = _BARRIER_BYTES + stages * stage_bytes
    run = queue("public_gemm.cu", name, n // _ROWS, shared_bytes=shared_bytes)
    beside = [x.data_ptr(), x.stride(0), out.data_ptr(), np.int32(tokens)]
    return lambda weight: run([weight.data_ptr(), *beside])


# --- What vLLM runs on an H200 -------------------------------------------------------------------


@functools.cache
def _table() -> Table:
    text = resources.files("k3cupy").joinpath("bench/vllm_h200.json").read_text("utf-8")
    return Table(PUBLIC, *parts_of(text))


def planned(n: int, k: int, tokens: int, *, packed: bool = True) -> Candidate:
    """Return what vLLM's own table for an H200 names for a product.

    That is its skinny kernel with a configuration, its fused-A kernel (``FUSED_A``), or
    ``F.linear``, also for what the table does not list and for rows of x that lie apart.
    """
    entry, _ = gemm.entry_at(_table(), n, k, tokens, residual=False)
    if entry is None or not (packed or tokens == 1):
        return LINEAR
    return Candidate(entry.kernel, entry.config)


def call(candidate: Candidate, x: torch.Tensor, n: int, out: torch.Tensor) -> Body:
    """Return the call of what ``planned`` named, which writes ``out``; the weight is static.

    Its skinny kernel is ours with its configuration.
    """
    if candidate == FUSED_A:
        return fused_a(x, n, out)
    if candidate.kernel == SKINNY:
        options: dict[str, Any] = {"out": out, "config": candidate.config}
        return lambda weight: k3cupy.skinny_gemm(x, weight, weight_is_static=True, **options)
    return lambda weight: torch.mm(x, weight.T, out=out)


# --- The decode epilogue -------------------------------------------------------------------------


def decode_epilogue(
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    split: int | None = None,
    *,
    scales: Mapping[str, torch.Tensor] | None = None,
    pdl: bool = True,
) -> Callable[[], None]:
    """Return the launch of the comparison kernel of the decode epilogue.

    Args:
        inputs: ``ql_nope``, ``q_pe``, ``kv_c_normed``, ``k_pe`` [B, 64] and ``slot_mapping``.
        out: mqa_q, bf16 or e4m3.
        kv_cache: [blocks, block size, 576], bf16 or the bytes of e4m3.
        split: warps a row; None for the public rule.
        scales: of what is e4m3, by name.
        pdl: launch it with programmatic dependent launch.
    """
    tokens, heads, _ = out.shape
    if split is None:
        split = 3 if tokens <= _SPLIT_3_TOKENS else 1
    query_fp8, size = out.element_size() == 1, kv_cache.element_size()
    name = instantiation("public_structure", "__nv_bfloat16", query_fp8, size == 1, split)
    warps = tokens * (heads + 1) * split
    run = queue("public_structure.cu", name, -(-warps // (_THREADS // 32)), pdl=pdl)
    i, scale = inputs, scales or {}
    arguments = [
        *(i["ql_nope"].data_ptr(), i["ql_nope"].stride(0), i["ql_nope"].stride(1)),
        *(i["q_pe"].data_ptr(), i["q_pe"].stride(0), i["q_pe"].stride(1)),
        *(i["kv_c_normed"].data_ptr(), i["kv_c_normed"].stride(0)),
        *(i["k_pe"].data_ptr(), i["k_pe"].stride(0)),
        *(out.data_ptr(), kv_cache.data_ptr()),
        *(kv_cache.stride(0) * size, kv_cache.stride(1) * size),
        i["slot_mapping"].data_ptr(),
        *(
            scale[name].data_ptr() if name in scale else 0
            for name in ("q_scale_inv", "cache_scale_inv")
        ),
        *(np.int32(tokens), np.int32(heads), np.int32(kv_cache.shape[1])),
    ]
    return lambda: run(arguments)


def sglang_epilogue(
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    pdl: bool = True,
) -> Callable[[], None]:
    """Return the launch of the comparison kernel in the structure of SGLang's, scales aside.

    Args:
        inputs: ``ql_nope``, ``q_pe``, ``kv_c_normed``, ``k_pe`` [B, 64] and ``slot_mapping``.
        out: mqa_q, bf16 or e4m3.
        kv_cache: [blocks, block size, 576], of the same format.
        pdl: launch it with programmatic dependent launch.
    """
    tokens, heads, _ = out.shape
    rows = tokens * (heads + 1)
    warps = 4 if rows <= _SGLANG_FEW_ROWS else 8
    name = instantiation("sglang_structure", "__nv_bfloat16", out.element_size() == 1, warps)
    run = queue("sglang_structure.cu", name, -(-rows // warps), threads=32 * warps, pdl=pdl)
    arguments: list[Any] = []
    for each, dims in (("ql_nope", 2), ("q_pe", 2), ("kv_c_normed", 1), ("k_pe", 1)):
        tensor = inputs[each]
        arguments += [tensor.data_ptr(), *(2 * stride for stride in tensor.stride()[:dims])]
    step = kv_cache.stride(1) * kv_cache.element_size()
    arguments += [out.data_ptr(), kv_cache.data_ptr(), step, inputs["slot_mapping"].data_ptr()]
    return functools.partial(run, [*arguments, np.uint32(tokens), np.uint32(heads)])
