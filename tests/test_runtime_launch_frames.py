"""What a launch costs in Python: one frame, once its stream and its thread are known."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

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


def test_the_module_keeps_one_table() -> None:
    assert streams.known.__self__ is streams._wrapped  # type: ignore[attr-defined]
