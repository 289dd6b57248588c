"""What a kernel needs to know of a GPU, and making it current for the length of a call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from k3cupy.runtime import toolchain
from k3cupy.runtime.errors import ToolchainError, reject, shown
from k3cupy.runtime.tensors import is_integer

OLDEST = (8, 0)
"""The compute capability from which on the kernels run."""

OLDEST_ARCH = "sm_{}{}".format(*OLDEST)
"""Its name, for messages."""


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about one GPU.

    Attributes:
        index: CUDA ordinal.
        name: as the driver gives it, for example ``"NVIDIA H200"``.
        compute_capability: (major, minor).
        num_sms: streaming multiprocessors.
        shared_memory_optin: bytes of shared memory that one block may have at most.

    Raises:
        TypeError, ValueError: a fact that no GPU has; the text names it.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    shared_memory_optin: int

    def __post_init__(self) -> None:
        """Refuse what no GPU has: it would fail wherever a choice computes with it."""
        pair = self.compute_capability
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(is_integer, pair))):
            expected = "a tuple (major, minor) of integers, as (9, 0)"
            reject("compute_capability", expected, shown(pair), error=TypeError)
        for name, least in (("index", 0), ("num_sms", 1), ("shared_memory_optin", 0)):
            value = getattr(self, name)
            if not is_integer(value) or value < least:
                kind = ValueError if is_integer(value) else TypeError
                reject(name, f"an integer of at least {least}", shown(value), error=kind)

    @property
    def arch(self) -> str:
        """The architecture in the field's notation, for example ``"sm_90"``."""
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"

    @functools.cached_property
    def has_pdl(self) -> bool:
        """Whether programmatic dependent launch exists (sm_90 and newer)."""
        return self.compute_capability >= (9, 0)

    @functools.cached_property
    def has_clusters(self) -> bool:
        """Whether blocks can form clusters (sm_90 and newer)."""
        return self.compute_capability >= (9, 0)

    @functools.cached_property
    def has_tensor_maps(self) -> bool:
        """Whether a copy engine fetches boxes of a matrix by a tensor map (sm_90 to sm_103).

        sm_120 has it too, but there the compiler leads its arguments through local memory.
        """
        return (9, 0) <= self.compute_capability < (12, 0)

    @functools.cached_property
    def has_warpgroups(self) -> bool:
        """Whether four warps issue a tensor-core product together (``wgmma``, sm_90 alone)."""
        return self.compute_capability == (9, 0)

    def clusters_at_once(self, size: int) -> int:
        """Return how many clusters of ``size`` blocks run at once, a block a multiprocessor.

        Larger clusters leave some multiprocessors out, as each lies within one part of the GPU: an
        H200 runs 30 clusters of four.
        """
        return (self.num_sms if size <= 2 else self.num_sms * 10 // 11) // size


NAMED = {
    "a100": DeviceInfo(0, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912),
    "h100": DeviceInfo(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448),
    "h200": DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448),
    "b200": DeviceInfo(0, "NVIDIA B200", (10, 0), 148, 232_448),
    "b300": DeviceInfo(0, "NVIDIA B300 SXM6 AC", (10, 3), 148, 232_448),
    "gb300": DeviceInfo(0, "NVIDIA GB300", (10, 3), 152, 232_448),
    "a10": DeviceInfo(0, "NVIDIA A10", (8, 6), 72, 101_376),
    "rtx-4090": DeviceInfo(0, "NVIDIA GeForce RTX 4090", (8, 9), 128, 101_376),
    "rtx-5090": DeviceInfo(0, "NVIDIA GeForce RTX 5090", (12, 0), 170, 101_376),
}
"""GPUs as their drivers describe them, for what is made or asked on a machine without one."""

_OF_ARCH = {NAMED[short].arch: short for short in NAMED if short not in ("h100", "gb300")}
"""Which of them an architecture means; of sm_90 it is the one that was measured."""


def named(name: str | DeviceInfo) -> DeviceInfo:
    """Return the facts about a GPU that need not be here.

    Args:
        name: one of ``NAMED``, in any case, the name that its driver gives, or an architecture as
            ``"sm_90"``, for the H200. A ``DeviceInfo`` is returned as it is.

    Raises:
        ValueError: no such GPU is known.

    Example:
        >>> named("h200").num_sms
        132
    """
    if isinstance(name, DeviceInfo):
        return name
    if isinstance(name, str):
        wanted = _OF_ARCH.get(name.lower(), name.lower())
        for short, gpu in NAMED.items():
            if wanted in (short, gpu.name.lower()):
                return gpu
    known = f"{', '.join(NAMED)}, the name that its driver gives, or one of {', '.join(_OF_ARCH)}"
    hint = "Of another GPU describe what it has by a k3cupy.runtime.devices.DeviceInfo"
    kind = ValueError if isinstance(name, str) else TypeError
    reject("gpu", known, shown(name), hint, kind)


def option_of(gpu: DeviceInfo) -> str:
    """Return what ``named``, and with it ``--gpu``, takes for a GPU: a short name, or its arch."""
    return next((short for short, known in NAMED.items() if known.name == gpu.name), gpu.arch)


def check_supported(gpu: DeviceInfo) -> None:
    """Refuse a GPU on which no kernel runs, before anything is chosen or compiled for it.

    Raises:
        ToolchainError: it is older than ``OLDEST``.
    """
    if gpu.compute_capability < OLDEST:
        raise ToolchainError(
            f"GPU {gpu.index}: expected {OLDEST_ARCH} or newer, got {gpu.name}, which is "
            f"{gpu.arch}. Use a newer GPU, or tensors on the CPU"
        )


def count() -> int:
    """Return the number of GPUs.

    Raises:
        ToolchainError: CuPy is missing or the driver gives no GPU.
    """
    try:
        number = int(toolchain.cupy().cuda.runtime.getDeviceCount())
    except ToolchainError:
        raise
    except Exception as error:  # CuPy's own classes, which exist only once it is imported
        # CUDA's own words for no driver are those for an old one.
        why = error if toolchain.driver_release() else toolchain.NO_DRIVER
        raise ToolchainError(f"the driver gives no GPU ({why})") from error
    if number == 0:
        raise ToolchainError("the driver gives no GPU")
    return number


def ordinal_of(device: Any) -> int:
    """Return the ordinal of a GPU that a caller named.

    Args:
        device: an ordinal, ``"cuda"``, ``"cuda:1"`` or an object with ``type`` and ``index``, as
            PyTorch's; None, or no index: the current GPU.

    Raises:
        ValueError: there is no such GPU.
        ToolchainError: CuPy is missing or the driver gives no GPU.
    """
    kind, index = getattr(device, "type", "cuda"), getattr(device, "index", device)
    if isinstance(device, str):
        kind, _, text = device.partition(":")
        index = int(text) if text.isdigit() else text or None
    if kind != "cuda" or not (index is None or (is_integer(index) and index >= 0)):
        hint = "A GPU that is not here is named by gpu=, where a function has it"
        reject("device", "a GPU ordinal, as 0 or 'cuda:0'", shown(device), hint)
    number = count()
    if index is None:
        index = toolchain.cupy().cuda.runtime.getDevice()
    if index >= number:
        reject("device", f"a GPU ordinal below {number}", shown(device))
    return int(index)


@functools.cache
def info(index: int) -> DeviceInfo:
    """Return the facts about a GPU, asked of the driver once.

    Raises:
        ToolchainError: CuPy is missing.
    """
    properties = toolchain.cupy().cuda.runtime.getDeviceProperties(index)
    return DeviceInfo(
        index=index,
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),
        num_sms=properties["multiProcessorCount"],
        shared_memory_optin=properties["sharedMemPerBlockOptin"],
    )


@contextlib.contextmanager
def current(index: int) -> Iterator[None]:
    """Make a GPU current, with its context on this thread, and put the caller's back at the end."""
    runtime = toolchain.cupy().cuda.runtime
    before = runtime.getDevice()
    try:
        runtime.setDevice(index)
        yield
    finally:
        if before != index:
            runtime.setDevice(before)
