"""Entries of GEMM tables, and a user cache of the test's own."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_device import H200

from k3cupy.ops import gemm_cache, gemm_tables
from k3cupy.choose.fused_a_gemm import candidates
from k3cupy.ops.gemm_entry import GemmEntry, fastest_of
from k3cupy.choose.skinny_gemm import candidates as skinny_candidates

N, K = 2112, 7168


def measured(
    tokens: int = 8,
    *,
    n: int = N,
    k: int = K,
    fused_us: float | None = 5.0,
    skinny_us: float | None = None,
    linear_us: float = 9.0,
    residual: bool = False,
    **more: Any,
) -> GemmEntry:
    """An entry in which the second candidate of each backend is the fastest."""
    times: dict[str, dict[Any, float]] = {}
    if fused_us is not None:
        first, second = candidates(n, k, tokens, H200)[:2]
        times["fused_a"] = {first: fused_us + 1, second: fused_us}
    if skinny_us is not None:
        first_one, second_one = skinny_candidates(n, k, tokens, H200)[:2]
        times["skinny"] = {first_one: skinny_us + 1, second_one: skinny_us}
    return GemmEntry(n, k, tokens, residual, linear_us, times, fastest_of(linear_us, times), **more)


def second(tokens: int, backend: str = "fused_a", n: int = N, k: int = K) -> Any:
    """The configuration that ``measured`` makes the fastest."""
    make = {"fused_a": candidates, "skinny": skinny_candidates}[backend]
    return make(n, k, tokens, H200)[1]


def in_processes(count: int, work: Callable[[int], None]) -> None:
    """Do work(0), work(1), ... in forked processes at once; for a child that has no threads yet."""
    children = []
    for i in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(i)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    failed = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert failed == [0] * count, failed


@contextmanager
def user_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *entries: GemmEntry
) -> Iterator[Path]:
    """A user cache in a folder; tables are read anew inside, and after it."""
    with monkeypatch.context() as patch:
        patch.setenv("K3CUPY_CACHE_DIR", str(folder))
        path = gemm_cache.path_of(H200)
        if entries:
            assert gemm_cache.add(entries, H200) == path
        gemm_tables.reload()
        yield path
    gemm_tables.reload()
