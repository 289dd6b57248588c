"""Warnings point at the caller's line, however deep in the package they come from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toolchain_helpers import fake_gpu

from k3cupy.kernels.mla_decode import UNTUNED, Variant
from k3cupy.runtime import instances
from k3cupy.runtime.warn import warn_user

_PROGRAM = """
def shallow():
    warn_user("look here", RuntimeWarning)

def deep():
    for _ in range(2):
        shallow()
"""


def functions_of(module: str) -> dict[str, Any]:
    variables: dict[str, Any] = {"__name__": module, "warn_user": warn_user}
    exec(compile(_PROGRAM, f"<{module}>", "exec"), variables)
    return variables


def user(call: Callable[[], Any]) -> Any:
    return call()


USERS_LINE = user.__code__.co_firstlineno + 1


@pytest.mark.parametrize("depth", ["shallow", "deep"])
def test_the_first_frame_outside_the_package(depth: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        user(functions_of("k3cupy.made_up")[depth])
    assert len(caught) == {"shallow": 1, "deep": 2}[depth]
    assert {(w.filename, w.lineno) for w in caught} == {(__file__, USERS_LINE)}
    assert {w.category for w in caught} == {RuntimeWarning}


def test_a_name_that_only_begins_like_ours_is_not_ours() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        user(functions_of("k3cupy_extras")["shallow"])
    assert caught[0].filename == "<k3cupy_extras>"


def test_what_runs_a_context_manager_is_not_the_caller() -> None:
    variables: dict[str, Any] = {"__name__": "k3cupy.made_up", "warn_user": warn_user}
    program = """
import contextlib

@contextlib.contextmanager
def opened():
    warn_user("look here")
    yield
    warn_user("and there")

def use():
    with opened():
        pass
"""
    exec(compile(program, "<k3cupy.made_up>", "exec"), variables)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        user(variables["use"])
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, USERS_LINE)] * 2


def test_a_line_is_warned_about_once_by_default() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        user(functions_of("k3cupy.made_up")["deep"])
    assert len(caught) == 1


def test_an_unusable_cache_is_told_to_the_one_who_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = fake_gpu(monkeypatch)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    failures = iter([OSError(28, "no space left"), None])

    def disk_is_full_once(_: str) -> None:
        if error := next(failures):
            raise error

    gpu.on_compile = disk_is_full_once
    instance = UNTUNED.instance(Variant("bfloat16"))
    with pytest.warns(RuntimeWarning, match="kernel cache") as caught:
        user(lambda: instances.load(instance, 0))
    assert [w.filename for w in caught] == [__file__]
