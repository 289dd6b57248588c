"""Entries of GEMM tables, and a user cache of the test's own."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_device import H200

from k3cupy.call.choice import SHIPPED
from k3cupy.choose import cache, table
from k3cupy.choose.gemm import candidates, problem_of
from k3cupy.choose.table import Entry, Table, shipped

N, K = 2112, 7168


def measured_table() -> Table:
    """The H200's."""
    (found,) = (t for t in shipped("gemm") if t.origin == SHIPPED)
    return found


def product_of(entry: Entry) -> tuple[int, int]:
    n, k = map(int, re.findall(r"\d+", entry.problem.partition(" ")[2]))
    return n, k


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
) -> Entry:
    """An entry in which the second candidate of each kernel is the fastest."""
    times: dict[str, dict[Any, float]] = {"linear": {None: linear_us}}
    for kernel, us in (("fused_a", fused_us), ("skinny", skinny_us)):
        if us is not None:
            first, second = candidates(kernel, n, k, tokens, H200)[:2]
            times[kernel] = {first: us + 1, second: us}
    return table.measured(problem_of(n, k, residual=residual), tokens, times, **more)


def second(tokens: int, kernel: str = "fused_a", n: int = N, k: int = K) -> Any:
    """The configuration that ``measured`` makes the fastest."""
    return candidates(kernel, n, k, tokens, H200)[1]


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
def user_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> Iterator[Path]:
    """A user cache in a folder; tables are read anew inside, and after it."""
    with monkeypatch.context() as patch:
        patch.setenv("K3CUPY_CACHE_DIR", str(folder))
        path = cache.path_of("gemm", H200.name)
        if entries:
            assert cache.add("gemm", entries, H200) == path
        cache.reload()
        yield path
    cache.reload()
