"""The soak: random calls stay right, and leave neither memory nor objects behind.

`make soak` runs it for half an hour, the suite for a minute on a GPU and for seconds without.
"""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch
from soak_helpers import TASKS, Make, Soak, Task

MINUTES = os.environ.get("K3CUPY_SOAK_MINUTES")
"""`make soak` sets it, and then the soak has the machine to itself."""


@pytest.mark.gpu
@pytest.mark.timeout(900 + 90 * float(MINUTES or 0))
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_soak_on_a_gpu() -> None:
    seconds = 60 * float(MINUTES or 1)
    soak = Soak(TASKS, "cuda", threads=4, seconds=seconds, laps=max(15, int(seconds / 30))).run()
    assert soak.problems(alone=MINUTES is not None) == []
    assert soak.calls > 50 * len(TASKS)


def on_cpu(tasks: dict[str, Make], seconds: float) -> Soak:
    return Soak(tasks, "cpu", threads=3, seconds=seconds, laps=max(6, int(seconds / 20))).run()


SMALL = {name: make for i, (name, make) in enumerate(TASKS.items()) if i % 4 == 1}


@pytest.mark.timeout(240 + 90 * float(MINUTES or 0))
def test_soak_on_the_cpu() -> None:
    long = MINUTES is not None and not torch.cuda.is_available()
    soak = on_cpu(TASKS if long else SMALL, 60 * float(MINUTES or 0) if long else 1.5)
    assert soak.problems() == []
    assert soak.calls > 2 * soak.samples[0].calls, "the first sample is of the first round"


# It sees what it is for


def planted(call: Make) -> list[str]:
    return on_cpu({"planted": call}, 0.2).problems()


def test_a_leak_is_seen() -> None:
    """Of memory and of Python objects, in some hundred calls."""
    kept: list[object] = []

    def call() -> list[torch.Tensor]:
        time.sleep(1e-3)
        kept.append([torch.ones(2**17), *([] for _ in range(20))])
        return [torch.zeros(4)]

    found = planted(lambda _: Task(call, takes_options=False))
    assert [problem.partition(" grew")[0] for problem in found] == ["host", "objects"]


def test_a_wrong_value_is_seen() -> None:
    numbers = itertools.count()
    task = lambda _: Task(lambda: [torch.full((4,), float(next(numbers) == 50))])  # noqa: E731
    assert planted(task) == ["cpu: planted: 4 wrong values"]


def test_an_error_in_a_thread_is_raised() -> None:
    numbers = itertools.count()

    def call() -> list[torch.Tensor]:
        if next(numbers) == 50:
            raise RuntimeError("planted")
        return [torch.zeros(4)]

    with pytest.raises(RuntimeError, match="planted"):
        planted(lambda _: Task(call))


def test_a_call_that_is_not_refused_is_seen() -> None:
    with pytest.raises(AssertionError, match="was not refused"):
        planted(lambda _: Task(lambda: [torch.zeros(4)], lambda: None, [torch.zeros(4)]))
