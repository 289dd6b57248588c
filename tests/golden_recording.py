"""Running a call on a GPU that is none, and saying in JSON what it launched and where it differs.

A golden names each argument of a kernel as the CUDA source does, and carries its type: ``u32 4`` is
a ``numpy.uint32``, ``int 4`` a Python int. An address is that of a tensor of the call and bytes:
``ql_nope+4718592``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cuda_signatures import Signature, ctype_of, signatures, template_arguments
from fake_device import GPUS, STREAM, CudaTensor, FakeDevice, Launch, TensorMap

from k3cupy.runtime import sources
from k3cupy.runtime.devices import DeviceInfo

Golden = dict[str, Any]
Signatures = Mapping[str, Mapping[str, Signature]]
"""Of the kernels of each source file."""

_PREFIXES = {np.uint32: "u32", np.int64: "i64", np.float32: "f32", int: "int"}
_PYTHON_TYPES = {
    "unsigned int": (np.uint32,),
    "long long": (int, np.int64),
    "float": (np.float32,),
    "const __grid_constant__ TensorMap": (TensorMap,),
}


class Tensors:
    """Makes tensors on a GPU; nothing writes to their memory, so that it costs nothing."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def __call__(
        self,
        *shape: int,
        dtype: torch.dtype = torch.bfloat16,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> CudaTensor:
        """Return a tensor that begins ``offset`` elements past a multiple of 64 bytes."""
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if n > 1)
        memory = torch.empty(offset + reach + 1, dtype=dtype)
        return CudaTensor.of(memory.as_strided(shape, strides, offset), self._ordinal)

    def columns(self, tensor: CudaTensor, start: int, stop: int) -> CudaTensor:
        """Return some columns of a tensor."""
        return tensor[..., start:stop]

    def transposed(self, tensor: CudaTensor) -> CudaTensor:
        """Return a matrix seen from its other side."""
        return CudaTensor.of(tensor.t(), self._ordinal)


@dataclass(frozen=True)
class GoldenCall:
    """A call that goldens keep.

    Attributes:
        operation: name of the public function, and of the file of goldens.
        name: what is special about it.
        gpu: where it runs.
        arguments: makes the arguments, by name.
    """

    operation: str
    name: str
    gpu: DeviceInfo
    arguments: Callable[[Tensors], dict[str, Any]]

    @property
    def key(self) -> str:
        """What names it in its file."""
        return f"{self.gpu.name}: {self.name}"


@dataclass(frozen=True)
class Recording:
    """What a call did.

    Attributes:
        launches: in order.
        places: name, address and bytes of each tensor, the new ones behind those of the caller.
        made: shape and type of each new tensor that came back, and its stream if it was named.
        returned: their names; those of the caller's that came back; or None.
        kept: tensors that PyTorch's allocator keeps for a stream.
        launchers: how many were made for it; none where a plan was there.
        gpu: ordinal of the GPU that it was for.
    """

    launches: tuple[Launch, ...]
    places: tuple[tuple[str, int, int], ...]
    made: tuple[str, ...]
    returned: tuple[str, ...] | None
    kept: tuple[str, ...]
    launchers: int
    gpu: int


def record(
    device: FakeDevice, operation: Callable[..., Any], arguments: dict[str, Any], gpu: int
) -> tuple[Recording, Any]:
    """Run a call and return what it did, and its result, which has to live on.

    Args:
        device: the fake.
        operation: the public function.
        arguments: by name.
        gpu: ordinal of the GPU that the tensors say they are on.
    """
    launches, launchers = len(device.records), device.launchers
    result = operation(**arguments)
    tensors = dict(_tensors(arguments))
    new, returned = {}, None
    if result is not None:
        names = []
        for value in result if isinstance(result, tuple) else (result,):
            name = next((n for n, t in tensors.items() if t is value), None)
            if name is None:
                name = f"new output {len(new)}"
                new[name] = value
            names.append(name if isinstance(value, CudaTensor) else "of the framework")
        returned = tuple(names)
    ours = {name: t for name, t in new.items() if isinstance(t, CudaTensor)}
    every = tensors | ours
    recording = Recording(
        launches=tuple(device.records[launches:]),
        places=tuple((name, t.data_ptr(), _span(t)) for name, t in every.items()),
        made=tuple(
            f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            + (f" on stream {t.made_on}" if t.made_on != STREAM else "")
            for t in ours.values()
        ),
        returned=returned,
        kept=tuple(f"{name} for {s}" for name, t in every.items() for s in t.kept_for),
        launchers=device.launchers - launchers,
        gpu=gpu,
    )
    return recording, result


def record_twice(device: FakeDevice, operation: Callable[..., Any], call: GoldenCall) -> Twice:
    """Run a call, and once more with tensors elsewhere."""
    tensors = Tensors(call.gpu.index)
    arguments = call.arguments(tensors), call.arguments(tensors)
    first, _alive = record(device, operation, arguments[0], call.gpu.index)
    second, _ = record(device, operation, arguments[1], call.gpu.index)
    return first, second


Twice = tuple[Recording, Recording]


@functools.cache
def shipped_signatures(source: str) -> dict[str, Signature]:
    """The kernels of a source file of ours."""
    return signatures((sources.directory() / source).read_text(encoding="utf-8"))


class Shipped(dict[str, Mapping[str, Signature]]):
    """The kernels of every source file, read when they are asked for; some may be given."""

    def __missing__(self, source: str) -> Mapping[str, Signature]:
        return shipped_signatures(source)


def signature_of(launch: Launch, known: Signatures) -> Signature:
    """The kernel that was launched."""
    kernel, _ = template_arguments(launch.instance.name_expression)
    return known[launch.instance.source][kernel]


def described(recording: Recording, known: Signatures) -> Golden:
    """What a call did, as JSON keeps it."""
    found: Golden = {
        "launches": [_launch(recording, launch, known) for launch in recording.launches],
        "returned": recording.returned and list(recording.returned),
    }
    if recording.made:
        found["made"] = list(recording.made)
    if recording.kept:
        found["kept"] = list(recording.kept)
    return found


def differences(golden: Any, now: Any, where: str = "") -> list[str]:
    """Say where two calls differ, a line each."""
    if isinstance(golden, dict) and isinstance(now, dict):
        return [
            line
            for name in dict.fromkeys((*golden, *now))
            for line in differences(
                golden.get(name, "(nothing)"), now.get(name, "(nothing)"), f"{where} {name}"
            )
        ]
    if isinstance(golden, list) and isinstance(now, list) and len(golden) == len(now):
        return [
            line
            for i, (before, after) in enumerate(zip(golden, now, strict=True))
            for line in differences(before, after, f"{where}[{i}]")
        ]
    if golden == now:
        return []
    if isinstance(golden, list) and isinstance(now, list):
        golden, now = f"{len(golden)} of them", f"{len(now)} of them"
    return [f"{where.strip()}: golden {golden}, now {now}"]


def wrong_types(launch: Launch, known: Signatures) -> list[str]:
    """Say which arguments of a launch do not have the types of the kernel's parameters."""
    signature = signature_of(launch, known)
    _, given = template_arguments(launch.instance.name_expression)
    assert 0 <= len(signature.template) - len(given) <= signature.defaults, "template arguments"
    flags = dict(zip(signature.template, given, strict=False))
    if len(launch.arguments) != len(signature.parameters):
        return [f"{len(launch.arguments)} arguments for {len(signature.parameters)} parameters"]
    found = []
    for parameter, value in zip(signature.parameters, launch.arguments, strict=True):
        ctype = ctype_of(parameter, flags)
        accepted = (int,) if ctype.endswith("*") else _PYTHON_TYPES[ctype]
        if type(value) not in accepted:
            found.append(f"{parameter.name}: {ctype}, got {type(value).__name__}")
    return found


def _launch(recording: Recording, launch: Launch, known: Signatures) -> Golden:
    parameters = signature_of(launch, known).parameters
    found: Golden = {
        "instance": launch.instance.name_expression,
        "source": launch.instance.source + (" for its own arch" * launch.instance.own_arch),
        "grid": launch.grid,
        "block": launch.block,
        "pdl": launch.pdl,
    }
    if launch.shared_bytes or launch.shared_limit:
        found |= {"shared": launch.shared_bytes, "limit": launch.shared_limit}
    if launch.cluster != 1:
        found["cluster"] = launch.cluster
    if launch.stream != STREAM:
        found["stream"] = launch.stream
    if {launch.device, launch.loaded_for} != {recording.gpu}:
        found["gpu"] = f"{GPUS[launch.device].name}, loaded for {GPUS[launch.loaded_for].name}"
    found["arguments"] = {
        "no parameter" if parameter is None else parameter.name: _value(
            value,
            is_pointer=parameter is not None and parameter.ctype.endswith("*"),
            places=recording.places,
        )
        for parameter, value in itertools.zip_longest(parameters, launch.arguments)
    }
    return found


def _value(value: Any, *, is_pointer: bool, places: Iterable[tuple[str, int, int]]) -> str:
    if isinstance(value, TensorMap):
        box = value.box
        return (
            f"map {box.rows} x {box.columns} by {box.row_stride}, box of {box.box_rows} rows, at "
            f"{_place(value.address, places)}"
        )
    if is_pointer and type(value) is int:
        return _place(value, places) if value else "null"
    prefix = _PREFIXES.get(type(value), type(value).__name__)
    return f"{prefix} {value.item() if isinstance(value, np.generic) else value}"


def _place(address: int, places: Iterable[tuple[str, int, int]]) -> str:
    """The tensor that begins there, else the last to begin among those that reach so far."""
    holding = [
        (address - start, name) for name, start, span in places if start <= address < start + span
    ]
    if not holding:
        return "outside of every tensor"
    offset, name = min(holding, key=lambda place: place[0])
    return f"{name}+{offset}"


def _tensors(arguments: Mapping[str, Any]) -> Iterable[tuple[str, CudaTensor]]:
    for name, value in arguments.items():
        if isinstance(value, tuple):
            yield from ((f"{name}[{i}]", each) for i, each in enumerate(value))
        elif isinstance(value, CudaTensor):
            yield name, value


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((n - 1) * step for n, step in axes) + 1) * tensor.element_size()
