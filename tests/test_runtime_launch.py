"""The numbers behind a launch: divisions, overlap, streams, facts about a GPU, environment."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import k3cupy
from k3cupy.runtime import env, streams, tensors, toolchain
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.launch import divisor_constants, make_launcher
from k3cupy.runtime.tensors import TensorView

LIMIT = 2**31

# --- The attributes of a launch ------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [1, 4])
def test_launch_attributes(cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-core's grid counts clusters where there are any; single blocks are none."""
    configs = []

    def launch_config(**attributes: Any) -> SimpleNamespace:
        configs.append(attributes)
        return SimpleNamespace(**attributes)

    core = SimpleNamespace(launch=lambda *_: None, LaunchConfig=launch_config)
    runtime = SimpleNamespace(getDevice=lambda: 0)
    monkeypatch.setattr(toolchain, "cuda_core", lambda: core)
    monkeypatch.setattr(
        toolchain, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    )
    make_launcher(0, None, grid=7, block=96, pdl=True, shared_bytes=50_000, cluster=cluster)
    (attributes,) = configs
    assert attributes.pop("cluster", 1) == cluster
    assert attributes == {
        "grid": 7,
        "block": 96,
        "shmem_size": 50_000,
        "programmatic_stream_serialization": True,
    }


# --- Division by multiplication ------------------------------------------------------------------


def quotient(n: int, magic: int, shift: int) -> int:
    """As the kernel computes it (common/fast_divide.cuh): a 64-bit product, shifted."""
    product = n * magic
    assert product < 2**64
    return product >> shift


@given(st.integers(1, LIMIT - 1), st.data())
@settings(max_examples=200)
def test_division_is_exact(divisor: int, data: st.DataObject) -> None:
    magic, shift = divisor_constants(divisor)
    assert 0 < magic < 2**32, "an unsigned int of the kernel"
    assert shift < 64
    multiple = data.draw(st.integers(0, (LIMIT - 1) // divisor)) * divisor
    drawn = data.draw(st.integers(0, LIMIT - 1))
    near = (multiple - 1, multiple, multiple + 1, multiple + divisor - 1)
    for n in (0, 1, LIMIT - 1, drawn, *near):
        if 0 <= n < LIMIT:
            assert quotient(n, magic, shift) == n // divisor


def test_division_at_every_small_divisor_and_power_of_two() -> None:
    powers = [2**k + d for k in range(1, 31) for d in (-1, 0, 1)]
    for divisor in {*range(1, 2000), *powers, LIMIT - 1} - {0}:
        magic, shift = divisor_constants(divisor)
        last = (LIMIT - 1) // divisor * divisor
        for n in (0, divisor - 1, divisor, last - 1, last, LIMIT - 1):
            assert quotient(n, magic, shift) == n // divisor, (n, divisor)


# --- Memory: arrays over it, overlap -------------------------------------------------------------


def view_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> TensorView:
    dtype = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}[itemsize]
    return TensorView(
        address, shape, strides, dtype, itemsize, "cpu", 0, False, False, "numpy", None
    )


def bytes_of(v: TensorView) -> set[int]:
    starts = (
        v.address + v.itemsize * sum(i * s for i, s in zip(index, v.strides, strict=True))
        for index in itertools.product(*map(range, v.shape))
    )
    return {start + k for start in starts for k in range(v.itemsize)}


@st.composite
def small_views(draw: st.DrawFn) -> TensorView:
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank)))
    strides = tuple(draw(st.lists(st.integers(0, 9), min_size=rank, max_size=rank)))
    return view_at(4096 + draw(st.integers(0, 60)), shape, strides, draw(st.sampled_from([1, 2])))


@given(small_views(), small_views())
@settings(max_examples=200)
def test_overlap_is_exact_for_small_tensors(a: TensorView, b: TensorView) -> None:
    expected = bool(bytes_of(a) & bytes_of(b))
    assert tensors.may_overlap(a, b) == expected
    assert tensors.may_overlap(b, a) == expected


def test_overlap_of_real_layouts() -> None:
    """The two halves of the rows of one buffer interleave but share nothing."""
    left = view_at(1 << 40, (512, 512), (576, 1), 2)
    right = view_at((1 << 40) + 1024, (512, 64), (576, 1), 2)
    assert not tensors.may_overlap(left, right)
    assert tensors.may_overlap(left, view_at((1 << 40) + 1022, (512, 64), (576, 1), 2))
    # A size-1 axis may carry any stride.
    assert not tensors.may_overlap(view_at(4096, (1, 8), (-(2**40), 1), 2), right)


def test_overlap_that_is_too_hard_to_settle_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*_: Any) -> bool:
        raise np.exceptions.TooHardError("too hard")

    monkeypatch.setattr(tensors.np, "shares_memory", give_up)
    v = view_at(4096, (4, 4), (8, 1), 2)
    assert tensors.may_overlap(v, v)


def test_as_numpy_is_the_same_memory() -> None:
    memory = np.arange(60, dtype=np.int64)
    v = view_at(memory.ctypes.data + 8 * 2, (3, 4), (20, 2), 8)
    array = tensors.as_numpy(v, np.int64)
    np.testing.assert_array_equal(
        array, memory[2:].reshape(-1)[np.add.outer([0, 20, 40], [0, 2, 4, 6])]
    )
    array[1, 1] = -1
    assert memory[2 + 20 + 2] == -1
    assert tensors.as_numpy(v, np.uint64).dtype == np.uint64


def test_as_numpy_of_an_empty_tensor_reads_nothing() -> None:
    for shape in ((0, 3), (3, 0), (0,)):
        array = tensors.as_numpy(view_at(0, shape, (1,) * len(shape), 2), np.float16)
        assert array.shape == shape
        assert array.dtype == np.float16


def test_span_covers_the_elements_and_no_more() -> None:
    assert view_at(0, (2, 3), (10, 2), 2).span == (10 + 4 + 1) * 2
    assert view_at(0, (1, 1), (99, 99), 4).span == 4
    assert view_at(0, (), (), 8).span == 8
    assert view_at(0, (0, 3), (3, 1), 8).span == 0


# --- Streams -------------------------------------------------------------------------------------


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 77


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (2**47, 2**47),
        (np.int64(81), 81),
        (np.uint64(2**63), 2**63),
        (Protocol(), 77),
        (SimpleNamespace(__cuda_stream__=(0, 78)), 78),
        (SimpleNamespace(cuda_stream=79), 79),
        (SimpleNamespace(ptr=80), 80),
    ],
    ids=[
        "default",
        "int",
        "case42 NumPy",
        "case42 NumPy, wide",
        "method",
        "property",
        "PyTorch",
        "CuPy",
    ],
)
def test_stream_handles(stream: Any, handle: int) -> None:
    assert streams.handle_of(stream) == handle
    assert type(streams.handle_of(stream)) is int


@pytest.mark.parametrize(
    "stream",
    [
        *(None, True, "0", 1.0, object(), SimpleNamespace(ptr="1"), np.timedelta64(5, "s")),
        *(SimpleNamespace(__cuda_stream__=told) for told in ((), (7,), 7, (0, None))),
        pytest.param(torch.cuda.Stream, id="a class"),
    ],
)
def test_what_is_no_stream(stream: Any) -> None:
    with pytest.raises(TypeError) as caught:
        streams.handle_of(stream)
    assert str(caught.value) == (
        "stream: expected an int handle or an object with __cuda_stream__, got "
        f"{type(stream).__name__}"
    )


@pytest.mark.parametrize(
    "handle",
    [-5, -1, 2**64, pytest.param(np.int64(-5), id="NumPy"), pytest.param(10**5000, id="1e5000")],
)
def test_what_no_stream_can_be(handle: Any) -> None:
    for stream in (handle, SimpleNamespace(__cuda_stream__=(0, handle))):
        with pytest.raises(
            ValueError, match=r"\Astream: expected a handle from 0 to 2\^64 - 1, got "
        ):
            streams.handle_of(stream)


def test_streams_without_end_do_not_grow_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_wrapped", {})
    monkeypatch.setattr(streams, "_MOST_STREAMS", 3)
    core = SimpleNamespace(Stream=SimpleNamespace(from_handle=lambda handle: f"stream {handle}"))
    monkeypatch.setattr(streams.toolchain, "cuda_core", lambda: core)
    for handle in range(10):
        assert streams.wrap(handle) == f"stream {handle}"
        assert len(streams._wrapped) <= 3


# --- Facts about a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "arch", "has_pdl"),
    [((8, 0), "sm_80", False), ((8, 9), "sm_89", False), ((9, 0), "sm_90", True),
     ((10, 3), "sm_103", True), ((12, 0), "sm_120", True)],
)  # fmt: skip
def test_device_info(capability: tuple[int, int], arch: str, has_pdl: bool) -> None:
    info = DeviceInfo(1, "GPU", capability, 100, 101_376)
    assert (info.arch, info.has_pdl) == (arch, has_pdl)


# --- Environment variables -----------------------------------------------------------------------

PACKAGE = Path(k3cupy.__file__).parent
NAME = re.compile(r"K3CUPY_[A-Z0-9_]+")


def documented_variables() -> set[str]:
    rows = re.findall(r"^\| (K3CUPY_\w+)\s*\|", env.__doc__ or "", re.MULTILINE)
    assert rows
    return set(rows)


def test_every_environment_variable_is_in_the_table() -> None:
    """The names are literal, and nobody mentions one that is not read."""
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".cu", ".cuh", ".json"):
            unknown = set(NAME.findall(path.read_text(encoding="utf-8"))) - documented_variables()
            assert not unknown, f"{path.name} names {unknown}"


def test_only_one_module_reads_them() -> None:
    """Elsewhere the names stand in messages and docstrings only, never alone in a string."""
    for path in PACKAGE.rglob("*.py"):
        strings = [
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        alone = {text for text in strings if text.startswith("K3CUPY") and text.isidentifier()}
        expected = documented_variables() if path.samefile(env.__file__) else set()
        assert alone == expected, path.name
