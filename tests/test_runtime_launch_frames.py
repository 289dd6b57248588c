"""What a launch costs in Python: one frame, once its stream and its thread are known.

And the block of arguments that the driver is given: who may write it, and when it is not used.
What stands in it is compared with every golden (``fake_device``).
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_device import DRIVER_LAUNCH, grid_of, read_arguments, read_config

from k3cupy.runtime import launch, streams, toolchain


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands for the GPU: what was queued, as (stream, config, kernel, arguments...)."""
    queued: list[tuple[Any, ...]] = []
    made: list[int] = []

    def from_handle(handle: int) -> Any:
        made.append(handle)
        return SimpleNamespace(handle=handle, number=len(made))

    core = SimpleNamespace(
        launch=lambda *given: queued.append(given),
        LaunchConfig=lambda **settings: settings,
        Stream=SimpleNamespace(from_handle=from_handle),
    )
    runtime = SimpleNamespace(getDevice=int, setDevice=lambda _: None)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(toolchain, "cuda_core", lambda: core)
    monkeypatch.setattr(toolchain, "cupy", lambda: cupy)
    wrapped: dict[int, Any] = {}
    monkeypatch.setattr(streams, "_wrapped", wrapped)
    monkeypatch.setattr(streams, "known", wrapped.get)
    return queued


def frames_of(call: Any, *arguments: Any) -> list[str]:
    found: list[str] = []

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)

    sys.setprofile(on_event)
    try:
        call(*arguments)
    finally:
        sys.setprofile(None)
    return [name for name in found if name != "<lambda>"]  # cuda-core's, which is no Python


def test_a_launch_on_a_known_stream_is_one_frame(launched: list[tuple[Any, ...]]) -> None:
    go = launch.make_launcher(0, "kernel", grid=1, block=32, pdl=False)
    assert "wrap" in frames_of(go, 5, [1])
    assert frames_of(go, 5, [2]) == ["launch"]
    assert "wrap" in frames_of(go, 6, [3]), "another stream is wrapped once"
    assert frames_of(go, 6, [4]) == ["launch"]
    assert [(stream.handle, *rest) for stream, _, *rest in launched] == [
        (5, "kernel", 1),
        (5, "kernel", 2),
        (6, "kernel", 3),
        (6, "kernel", 4),
    ]
    assert launched[0][0] is launched[1][0]
    assert launched[1][0] is streams.wrap(5)


ARGUMENTS = [np.uint32(7), 0, np.float32(0.5), np.int64(-9), 0]


def packed(driver: Any, monkeypatch: pytest.MonkeyPatch, arguments: Any = ARGUMENTS) -> Any:
    """A launcher whose second and last arguments come with each call, and its driver."""
    monkeypatch.setattr(launch, "driver_launch", lambda: driver and DRIVER_LAUNCH(driver))
    kernel = SimpleNamespace(handle=5)
    return launch.make_packed_launcher(0, kernel, arguments, [4, 1], grid=1, block=32, pdl=True)


def test_a_packed_launch_is_one_frame_and_another_in_it_has_its_own_block(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads outside Python's lock, while other threads call."""
    read: list[Any] = []

    def driver(config: int, handle: int, parameters: int, extra: Any) -> int:
        assert (handle, extra) == (5, None)
        before = read_arguments(parameters, ARGUMENTS)
        if len(read) == 0:
            read.append(None)
            go(6, 30, 31)
        assert read_arguments(parameters, ARGUMENTS) == before
        read.append((read_config(config, grid_of(grid=1, block=32, pdl=True)), before))
        return 0

    go = packed(driver, monkeypatch)
    go(5, 10, 11)
    assert [given[-5:] for given in launched] == [(7, 11, 0.5, -9, 10)], "the thread's first"
    go(5, 20, 21)
    assert read == [None, (6, [7, 31, 0.5, -9, 30]), (5, [7, 21, 0.5, -9, 20])]
    assert frames_of(go, 5, 1, 2)[:2] == ["launch", "driver"]
    assert len(launched) == 1
    thread = threading.Thread(target=go, args=(5, 40, 41))
    thread.start()
    thread.join()
    assert len(launched) == 2, "another thread's first is not packed either"


def test_threads_in_turns_share_no_block(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    problems: list[str] = []

    def driver(config: int, handle: int, parameters: int, extra: Any) -> int:
        before = read_arguments(parameters, ARGUMENTS)
        time.sleep(0)  # others may run
        if read_arguments(parameters, ARGUMENTS) != before:
            problems.append(f"{before} changed")
        read.append((before[4], before[1]))
        return 0

    go = packed(driver, monkeypatch)

    def work(first: int) -> None:
        try:
            for i in range(50):
                go(5, first + i, -first - i)
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(1, 9)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not problems
    assert sorted(read) == sorted(
        (1000 * k + i, -1000 * k - i) for k in range(1, 9) for i in range(1, 50)
    )


def test_what_the_driver_refuses_is_told_by_cuda_core(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late error, of a kernel before, comes out of any launch."""
    codes = [0, 719, 0]
    go = packed(lambda *_: codes.pop(0), monkeypatch)
    go(5, 1, 2)
    go(5, 1, 2)
    assert len(launched) == 1

    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    core = toolchain.cuda_core()
    monkeypatch.setattr(core, "launch", refuse)
    go = packed(lambda *_: 719, monkeypatch)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"):
        go(5, 1, 2)


@pytest.mark.parametrize("why", ["no driver by that name", "a tensor map"])
def test_what_cannot_be_packed(
    launched: list[tuple[Any, ...]], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = None if why.startswith("no") else lambda *_: pytest.fail("packed")
    arguments = [*ARGUMENTS[:4], None] if driver else ARGUMENTS
    go = packed(driver, monkeypatch, arguments)
    for _ in range(2):
        go(5, "map", 11)
    assert [given[-5:] for given in launched] == [(7, 11, 0.5, -9, "map")] * 2


def test_the_numbers_of_the_attributes_are_cudas() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    ids = driver.CUlaunchAttributeID
    name = "CU_LAUNCH_ATTRIBUTE_{}"
    assert int(getattr(ids, name.format("CLUSTER_DIMENSION"))) == launch._CLUSTER_DIMENSION
    number = launch._PROGRAMMATIC_STREAM_SERIALIZATION
    assert int(getattr(ids, name.format("PROGRAMMATIC_STREAM_SERIALIZATION"))) == number


def test_the_module_keeps_one_table() -> None:
    assert streams.known.__self__ is streams._wrapped  # type: ignore[attr-defined]
