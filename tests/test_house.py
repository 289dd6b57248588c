"""The house stands as it was drawn: who imports whom, what a call walks through, and how much."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from dispatch_helpers import DispatchDevice
from fake_device import CudaTensor
from helpers import BF16

import k3cupy
from k3cupy.choose import cache

PACKAGE = Path(k3cupy.__file__).parent
ROOMS = ("call", "accept", "choose", "kernels", "ops", "tuning")
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}

# --- Who imports whom ----------------------------------------------------------------------------

NEVER = {
    "call": {"kernels", "choose", "ops", "accept"},
    "kernels": {"choose", "ops", "accept"},
    "choose": {"ops", "accept"},
    "accept": {"choose", "ops"},
}
ALONE = ("runtime", "reference")
"""They import nothing of ours but themselves."""


def rooms_of(text: str) -> set[str]:
    """The rooms that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("k3cupy.")}
    return found


def wrong_imports(name: str, text: str) -> set[str]:
    room, imported = name.partition("/")[0], rooms_of(text)
    return imported - {room} if room in ALONE else imported & NEVER.get(room, set())


def test_no_room_imports_what_it_must_not_know() -> None:
    assert {name: wrong for name in TEXTS if (wrong := wrong_imports(name, TEXTS[name]))} == {}
    assert {name.partition("/")[0] for name in TEXTS} >= {*NEVER, *ALONE}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("call/plans.py", "from k3cupy.kernels import mla_decode"),
        ("call/plans.py", "def late():\n    import k3cupy.ops.linear"),
        ("kernels/mla_decode.py", "from k3cupy import choose"),
        ("choose/gemm.py", "if True:\n    from k3cupy.ops.linear import low_latency_linear"),
        ("runtime/env.py", "from k3cupy.constants import CTYPES"),
        ("reference/rope.py", "from k3cupy.runtime import env"),
    ],
)
def test_a_planted_import_is_seen(name: str, text: str) -> None:
    assert name in TEXTS
    assert not wrong_imports(name, TEXTS[name])
    assert wrong_imports(name, f"{TEXTS[name]}\n{text}\n")


def graph_of(texts: dict[str, str]) -> dict[str, set[str]]:
    """Room -> the rooms that it imports; the public names stand above all of them."""
    graph: dict[str, set[str]] = {}
    for name, text in texts.items():
        room = name.partition("/")[0].removesuffix(".py")
        if room != "__init__":
            graph.setdefault(room, set()).update(rooms_of(text) - {room})
    return graph


def test_no_circle_between_rooms() -> None:
    TopologicalSorter(graph_of(TEXTS)).prepare()
    with pytest.raises(CycleError):
        planted = {**TEXTS, "kernels/late.py": "from k3cupy.ops import linear"}
        TopologicalSorter(graph_of(planted)).prepare()


# --- What a call walks through -------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the Python frames of the package, generated code among them, as `file: function`."""
    frames: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        file = frame.f_code.co_filename
        if file.startswith(str(PACKAGE)):
            frames[f"{Path(file).relative_to(PACKAGE)}: {frame.f_code.co_name}"] += 1
        elif file.startswith("<k3cupy"):
            frames[f"{file}: {frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield frames
    finally:
        sys.setprofile(before)


def held(what: str, frames: Counter[str], most: int, most_modules: int | None = None) -> None:
    """Print what was counted and hold it to its bar; generated code is no module."""
    modules = {name.partition(":")[0] for name in frames if not name.startswith("<")}
    told = "\n".join(f"{count:4} {name}" for name, count in frames.most_common())
    print(f"{what}: {frames.total()} frames in {len(modules)} modules\n{told}")
    assert frames, "the profile saw nothing"
    assert frames.total() <= most, f"{what}: {frames.total()} frames, at most {most}:\n{told}"
    if most_modules is not None:
        assert len(modules) <= most_modules, f"{what}: {len(modules)}, {sorted(modules)}"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[DispatchDevice]:
    """Plans of before fit no more inside, nor those made inside afterwards."""
    cache.reload()
    yield DispatchDevice(monkeypatch)
    cache.reload()


def cuda(*shape: int, dtype: torch.dtype = BF16) -> Any:
    return CudaTensor.of(torch.empty(shape, dtype=dtype), 0)


def decode_tensors() -> tuple[Any, ...]:
    return (
        cuda(4, 16, 512),
        cuda(4, 16, 64),
        cuda(4, 512),
        cuda(4, 64),
        cuda(2, 64, 576),
        cuda(4, dtype=torch.int64),
    )


def query_tensors() -> tuple[Any, ...]:
    weights = cuda(1536), cuda(512), cuda(2304, 1536), cuda(12, 128, 512)
    return (cuda(4, 2112), *weights, cuda(2, 64, 576), cuda(4, dtype=torch.int64))


X, WEIGHT = (4, 1536), (2304, 1536)
HITS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], int]] = {
    "low_latency_linear": (
        k3cupy.low_latency_linear,
        lambda: (cuda(*X), cuda(*WEIGHT)),
        10,
    ),
    "fused_a_gemm": (k3cupy.fused_a_gemm, lambda: (cuda(*X), cuda(*WEIGHT)), 8),
    "skinny_gemm": (k3cupy.skinny_gemm, lambda: (cuda(*X), cuda(*WEIGHT)), 8),
    "decode": (k3cupy.fused_mla_decode_q_concat_kv_cache_insert, decode_tensors, 8),
    "query": (functools.partial(k3cupy.fused_mla_decode_query, eps=1e-6), query_tensors, 8),
    "norm": (
        functools.partial(k3cupy.fused_q_kv_rmsnorm, eps=1e-6),
        lambda: (cuda(4, 2112), cuda(1536), cuda(512)),
        8,
    ),
    "value": (
        k3cupy.fused_mla_decode_value,
        lambda: (cuda(4, 12, 512), cuda(12, 512, 128), cuda(4, 1536)),
        8,
    ),
}


@pytest.mark.parametrize("name", HITS)
def test_a_repeated_call_is_few_frames(name: str, gpu: DispatchDevice) -> None:
    function, tensors, most = HITS[name]
    given = tensors()
    with torch.no_grad():
        for _ in range(2):  # the second one is found to come again
            function(*given)
        launched = len(gpu.records)
        with counted() as frames:
            function(*given)
    assert len(gpu.records) == launched + 1, "a kernel was launched"
    held(f"a hit of {name}", frames, most)


def test_another_layout_of_a_known_product_is_a_bounded_walk(gpu: DispatchDevice) -> None:
    """The tables have been read, the product has been chosen; the signature is a new one."""
    weight = cuda(*WEIGHT)
    wide = cuda(4, 2112)
    with torch.no_grad():
        k3cupy.low_latency_linear(cuda(*X), weight)
        launched = len(gpu.records)
        with counted() as frames:
            k3cupy.low_latency_linear(wide[:, :1536], weight)
    assert len(gpu.records) == launched + 1, "a kernel was launched"
    held("a miss of low_latency_linear", frames, 185, 16)


# --- How much ------------------------------------------------------------------------------------

_MOST_LINES, _MOST_LINES_OF_THE_ROOMS, _MOST_ARGUMENTS = 480, 10_350, 12
"""The rooms had 7,000 lines when the house was built. Since then came calls that are repeated and
prepared (some 600), the skinny GEMM's form with tensor cores and its model (300), outputs in
float32, tables of the chain beside those of kernels alone, three operations around the MLA
epilogue, with the separate kernels that one of them is measured against (some 1,850), and reports
by layer, in notebooks and as plain values, with explanations for a GPU that is elsewhere (250);
and refusals of configurations and of memory that say which rule does not hold (100)."""


def test_no_module_is_long() -> None:
    lines = {name: text.count("\n") for name, text in TEXTS.items()}
    assert {name: n for name, n in lines.items() if n > _MOST_LINES} == {}


def test_the_rooms_together_are_not_large() -> None:
    lines = {n: t.count("\n") for n, t in TEXTS.items() if n.partition("/")[0] in ROOMS}
    print(f"{sum(lines.values())} lines")
    assert sum(lines.values()) <= _MOST_LINES_OF_THE_ROOMS


def test_no_argument_list_is_long() -> None:
    """But those of the public functions and of their references: they are the operations' own."""
    long = set()
    for name, text in TEXTS.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and not name.startswith("reference/"):
                every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if len(every) > _MOST_ARGUMENTS and node.name not in k3cupy.__all__:
                    long.add(f"{name}: {node.name}")
    assert long == set()
    decode = inspect.signature(k3cupy.fused_mla_decode_q_concat_kv_cache_insert)
    assert len(decode.parameters) > _MOST_ARGUMENTS, "the bar would see it"
