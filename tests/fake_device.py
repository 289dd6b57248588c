"""GPUs that are none: tensors that say they are on one, launches that are written down.

Everything is patched at the seams of ``k3cupy.runtime`` and where PyTorch makes a tensor, so that
what lies above them is free to change. A ``CudaTensor`` says that it is on a GPU and is read as
such tensors are; its memory is the CPU's, never touched. Plain CPU tensors count as tensors of
GPU 0.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from k3cupy.runtime import devices, instances, launch, producers, streams, tensor_maps, toolchain
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance, LoadedKernel
from k3cupy.runtime.tensor_maps import Box

H200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
H100 = DeviceInfo(1, "NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448)
A100 = DeviceInfo(2, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912)
RTX_4090 = DeviceInfo(3, "NVIDIA GeForce RTX 4090", (8, 9), 128, 101_376)
B200 = DeviceInfo(4, "NVIDIA B200", (10, 0), 148, 232_448)
GB300 = DeviceInfo(5, "NVIDIA GB300", (10, 3), 152, 232_448)
RTX_5090 = DeviceInfo(6, "NVIDIA GeForce RTX 5090", (12, 0), 170, 101_376)
GPUS = (H200, H100, A100, RTX_4090, B200, GB300, RTX_5090)
"""Each at its ordinal, so that the plans of one are not taken for another's."""

T4 = DeviceInfo(0, "Tesla T4", (7, 5), 40, 65_536)
TOO_OLD = "GPU 0: expected sm_80 or newer, got Tesla T4, which is sm_75"
"""What is said of that one wherever a kernel would run."""

STREAM = 77


HANDLE = 0x5EED
"""Of every kernel."""

DRIVER_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_MAKE_PACKED_LAUNCHER = launch.make_packed_launcher
_CTYPES: dict[type, Any] = {
    np.uint32: ctypes.c_uint32,
    np.int64: ctypes.c_int64,
    np.float32: ctypes.c_float,
    int: ctypes.c_int64,
}


class Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` of cuda.h, written again for the tests."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h, written again for the tests."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


def grid_of(
    *, grid: int, block: int, pdl: bool, shared_bytes: int = 0, cluster: int = 1
) -> tuple[Any, ...]:
    """What the driver must find: grid, block, shared memory, and the attributes."""
    attributes = {6: (1,)} if pdl else {}
    if cluster > 1:
        attributes[4] = (cluster, 1, 1)
    return (grid * cluster, 1, 1, block, 1, 1, shared_bytes), attributes


def read_config(address: int, expected: tuple[Any, ...]) -> int:
    """Check a launch's configuration, and return its stream."""
    found = Config.from_address(address)
    numbers, attributes = expected
    assert tuple(getattr(found, name) for name, _ in Config._fields_[:7]) == numbers
    read = {found.attributes[i].id: found.attributes[i].value for i in range(found.count)}
    assert {i: tuple(value[: len(attributes[i])]) for i, value in read.items()} == attributes
    return found.stream or 0


def read_arguments(address: int, like: Sequence[Any]) -> list[Any]:
    """Read a kernel's arguments as its parameters' types say."""
    pointers = (ctypes.c_void_p * len(like)).from_address(address)
    return [
        type(argument)(_CTYPES[type(argument)].from_address(pointers[i]).value)
        for i, argument in enumerate(like)
    ]


class CudaTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    ordinal: int
    kept_for: list[int]
    """Streams on which PyTorch's allocator was told that it is in use."""

    made_on: int
    """The stream that was current when it was made."""

    @classmethod
    def of(cls, tensor: torch.Tensor, ordinal: int, made_on: int = STREAM) -> CudaTensor:
        found = tensor.as_subclass(cls)
        found.ordinal, found.kept_for, found.made_on = ordinal, [], made_on
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.ordinal)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def get_device(self) -> int:
        return self.ordinal

    def record_stream(self, stream: int) -> None:  # type: ignore[override]
        self.kept_for.append(stream)

    def expand(self, *shape: Any) -> CudaTensor:  # type: ignore[override]
        return CudaTensor.of(super().expand(*shape), self.ordinal)

    def view(self, *shape: Any) -> CudaTensor:  # type: ignore[override]
        return CudaTensor.of(super().view(*shape), self.ordinal)

    def reshape(self, *shape: Any) -> CudaTensor:  # type: ignore[override]
        return CudaTensor.of(super().reshape(*shape), self.ordinal)

    def __getitem__(self, index: Any) -> CudaTensor:
        return CudaTensor.of(super().__getitem__(index), self.ordinal)


class TensorMap(NamedTuple):
    """What stands for the map of a matrix."""

    box: Box
    address: int


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        device: GPU ordinal of the launcher.
        loaded_for: the one that the kernel was loaded for.
        instance: what is launched.
        grid: clusters; with ``cluster`` 1 that is blocks.
        block: threads a block.
        pdl: with the attribute for programmatic dependent launch.
        shared_bytes: dynamic shared memory a block.
        shared_limit: what the kernel was allowed of it when it was launched.
        cluster: blocks a cluster.
        stream: handle.
        arguments: the kernel's, typed.
    """

    device: int
    loaded_for: int
    instance: Instance
    grid: int
    block: int
    pdl: bool
    shared_bytes: int
    shared_limit: int
    cluster: int
    stream: int
    arguments: list[Any]


class FakeDevice:
    """Takes tensors for CUDA tensors and writes down what would be launched.

    Attributes:
        loads: instances in the order in which plans asked for them.
        limits: each limit on shared memory that was set.
        launchers: how many were made.
        records: the launches.
        capturing: whether every stream is capturing a graph.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[Instance] = []
        self.limits: list[int] = []
        self.launchers = 0
        self.records: list[Launch] = []
        self.capturing = False
        self._current_stream = STREAM
        view = producers.view
        monkeypatch.setattr(producers, "view", lambda t, n: replace(view(t, n), device_type="cuda"))
        monkeypatch.setattr(producers, "is_on_cpu", lambda _: False)
        producers.handlers(CudaTensor.of(torch.empty(0), 0))  # its class is known from now on
        monkeypatch.setattr(devices, "info", lambda index: GPUS[index])
        monkeypatch.setattr(devices, "count", lambda: len(GPUS))
        monkeypatch.setattr(devices, "current", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(streams, "current_of", lambda *_: lambda: STREAM)
        monkeypatch.setattr(streams, "of_torch", lambda handle, _: handle)
        monkeypatch.setattr(streams, "is_capturing", lambda _: self.capturing)
        monkeypatch.setattr(instances, "is_loaded", lambda instance, _: instance in self.loads)
        monkeypatch.setattr(instances, "load", self._load)
        monkeypatch.setattr(launch, "make_launcher", self._make_launcher)
        monkeypatch.setattr(launch, "make_packed_launcher", self._make_packed_launcher)
        monkeypatch.setattr(producers, "likeness", _likeness(producers.likeness))
        monkeypatch.setattr(
            tensor_maps, "mapper", lambda box, _: lambda address: TensorMap(box, address)
        )
        monkeypatch.setattr(torch.cuda, "stream", self._on_stream)
        monkeypatch.setattr(torch, "empty", self._allocator(torch.empty))
        monkeypatch.setattr(torch, "empty_like", self._like(torch.empty_like))

    @property
    def loaded(self) -> list[str]:
        """The names of what was loaded."""
        return [instance.name_expression for instance in self.loads]

    @property
    def launches(self) -> list[tuple[int, list[Any]]]:
        """Stream and arguments of each launch."""
        return [(record.stream, record.arguments) for record in self.records]

    @property
    def settings(self) -> dict[str, Any]:
        """How the last launch was configured."""
        names = ("grid", "block", "pdl", "shared_bytes", "cluster")
        return {name: getattr(self.records[-1], name) for name in names}

    def _load(self, instance: Instance, device: int) -> LoadedKernel:
        self.loads.append(instance)
        function = _Watched(self.limits)
        return LoadedKernel(
            kernel=(instance, function, device),
            device=device,
            function=function,
            module=None,
        )

    def _make_launcher(
        self,
        device: int,
        kernel: Any,
        *,
        grid: int,
        block: int,
        pdl: bool,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> launch.Launcher:
        self.launchers += 1
        instance, function, loaded_for = kernel

        def run(stream: int, arguments: Sequence[Any]) -> None:
            limit = function.max_dynamic_shared_size_bytes
            self.records.append(
                Launch(
                    *(device, loaded_for, instance, grid, block, pdl, shared_bytes, limit, cluster),
                    stream=stream,
                    arguments=list(arguments),
                )
            )

        return run

    def _make_packed_launcher(
        self, device: int, kernel: Any, arguments: list[Any], places: list[int], **config: Any
    ) -> launch.PackedLauncher:
        """The real one, with a driver that reads what it is given as the kernel would."""
        run = self._make_launcher(device, kernel, **config)
        settings = grid_of(**config)

        def queue(config_at: int, handle: int, parameters_at: int, extra: Any) -> int:
            stream = read_config(config_at, settings)
            assert handle == HANDLE
            assert extra is None
            run(stream, read_arguments(parameters_at, arguments))
            return 0

        runtime = SimpleNamespace(getDevice=lambda: device)
        cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(toolchain, "cupy", lambda: cupy)
            patch.setattr(launch, "make_launcher", lambda *_, **__: run)
            patch.setattr(launch, "driver_launch", lambda: DRIVER_LAUNCH(queue))
            return _MAKE_PACKED_LAUNCHER(
                device, SimpleNamespace(handle=HANDLE), arguments, places, **config
            )

    @contextlib.contextmanager
    def _on_stream(self, stream: int) -> Iterator[None]:
        before, self._current_stream = self._current_stream, stream
        try:
            yield
        finally:
            self._current_stream = before

    def _allocator(self, empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*shape: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            place = None if device is None else torch.device(device)
            if place is None or place.type != "cuda":
                return empty(*shape, device=device, **kwargs)
            return CudaTensor.of(empty(*shape, **kwargs), place.index, self._current_stream)

        return allocate

    def _like(self, empty_like: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(model: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            made = empty_like(model, **kwargs)
            if type(model) is not CudaTensor:
                return made
            return CudaTensor.of(made, model.ordinal, self._current_stream)

        return allocate


def _likeness(of: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor's GPU too, which is here in the fake tensor alone."""

    def likeness(given: tuple[Any, ...]) -> Any:
        check, gpus = of(given), [t.get_device() for t in given]
        return check and (lambda *ts: check(*ts) and [t.get_device() for t in ts] == gpus)

    return likeness


class _Watched:
    """What stands for CuPy's function object: it writes down each limit that is set."""

    def __init__(self, limits: list[int]) -> None:
        self._limits, self._limit = limits, 0

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self._limits.append(size)
        self._limit = size
