"""The numbers behind a launch: divisions, overlap, streams, configurations, tables, environment."""

from __future__ import annotations

import ast
import itertools
import json
import re
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toolchain_helpers import variants

import k3cupy
from k3cupy.ops import mla_decode_config
from k3cupy.ops.measured_table import MeasuredTable
from k3cupy.kernels.mla_decode import (
    CANDIDATES,
    DEFAULTS,
    MlaDecodeConfig,
    MlaDecodeVariant,
    choose,
    dispatched_configs,
)
from k3cupy.runtime import env, streams, tensors, toolchain
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.launch import divisor_constants, make_launcher
from k3cupy.runtime.tensors import TensorView

KINDS = sorted({variant.kind for variant in variants()})
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
@settings(max_examples=500)
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
@settings(max_examples=400)
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
        (Protocol(), 77),
        (SimpleNamespace(__cuda_stream__=(0, 78)), 78),
        (SimpleNamespace(cuda_stream=79), 79),
        (SimpleNamespace(ptr=80), 80),
    ],
    ids=["default", "int", "method", "property", "PyTorch", "CuPy"],
)
def test_stream_handles(stream: Any, handle: int) -> None:
    assert streams.handle_of(stream) == handle


@pytest.mark.parametrize("stream", [None, True, "0", 1.0, object(), SimpleNamespace(ptr="1")])
def test_what_is_no_stream(stream: Any) -> None:
    with pytest.raises(TypeError) as caught:
        streams.handle_of(stream)
    assert str(caught.value) == (
        "stream: expected an int handle or an object with __cuda_stream__, got "
        f"{type(stream).__name__}"
    )


# --- Configurations ------------------------------------------------------------------------------


def test_candidates_and_defaults_are_valid() -> None:
    assert all(config.is_valid() for config in (*CANDIDATES, *DEFAULTS.values()))
    assert len(set(CANDIDATES)) == len(CANDIDATES)
    assert {split: config.split for split, config in DEFAULTS.items()} == {0: 0, 1: 1, 3: 3}


@pytest.mark.parametrize(
    "fields",
    [
        (0, 100, 1),
        (0, 144, 3),
        (0, 144, 8),
        (0, 18, 4),
        (0, 1080, 1),
        (0, 0, 1),
        (0, -72, 1),
        (1, 128, 1),
        (1, 100, 3),
        (2, 256, 1),
        (3, 256, 3),
        (3, 4096, 1),
        (-1, 256, 1),
    ],
)
def test_configurations_that_no_kernel_has(fields: tuple[int, int, int]) -> None:
    assert not MlaDecodeConfig(*fields).is_valid()


@given(st.sampled_from(CANDIDATES), st.integers(1, 200_000))
def test_blocks_cover_every_row_and_none_is_idle(config: MlaDecodeConfig, rows: int) -> None:
    chunks = 72 if config.split == 0 else 96
    threads_a_row = chunks // config.chunks_per_thread
    per_block = config.block_size // threads_a_row
    blocks = config.query_blocks(rows)
    if config.block_size % threads_a_row == 0:
        assert (blocks - 1) * per_block < rows <= blocks * per_block
    warps = config.block_size // 32
    if config.split:
        assert (blocks - 1) * warps < rows * config.split <= blocks * warps
    cache_blocks = config.cache_blocks(rows)
    assert (cache_blocks - 1) * warps < rows <= cache_blocks * warps


def test_name_expressions_are_unique() -> None:
    configs = {*CANDIDATES, *DEFAULTS.values()}
    names = [c.name_expression(v) for c, v in itertools.product(configs, variants())]
    assert len(set(names)) == len(names)


def test_name_expression_and_words() -> None:
    variant = MlaDecodeVariant("float16", True, "fp8", True, False, True)
    config = MlaDecodeConfig(1, 128, 3)
    assert config.name_expression(variant) == (
        "k3cupy::mla_decode_epilogue<__half, true, k3cupy::CacheFormat::kFp8, true, false, true, "
        "1, 128, 3>"
    )
    assert config.instance(variant).source == "mla_decode.cu"
    assert str(config) == "split 1, 128 threads, 3 chunks a thread"
    assert str(MlaDecodeConfig(3, 256, 1)) == "split 3, 256 threads, 1 chunk a thread"


def test_variants() -> None:
    assert len(variants()) == 2 * 5 * 8
    assert KINDS == ["16bit+ds_mla", "16bit+fp8", "16bit+same", "fp8+fp8", "fp8+same"]
    assert not MlaDecodeVariant("bfloat16", query_fp8=True, cache="ds_mla").is_valid()
    assert not MlaDecodeVariant("float32").is_valid()
    assert not MlaDecodeVariant("bfloat16", cache="fp4").is_valid()


# --- The table and the choice --------------------------------------------------------------------

TABLES = sorted(Path(str(resources.files("k3cupy.ops"))).joinpath("tables").rglob("*.json"))
TABLE = json.loads(resources.files("k3cupy.ops").joinpath("tables/mla_decode.json").read_text())
GPUS = list(TABLE["gpus"])


def gpu(name: str, num_sms: int) -> DeviceInfo:
    return DeviceInfo(0, name, (9, 0), num_sms, 232_448)


def entries(name: str, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in TABLE["gpus"][name]["entries"] if entry["kind"] == kind]


def test_tables_are_json() -> None:
    for path in TABLES:
        text = path.read_text(encoding="utf-8")
        assert json.loads(text)
        assert text.endswith("}\n")


@pytest.mark.parametrize("name", GPUS)
def test_every_kind_has_entries(name: str) -> None:
    facts = TABLE["gpus"][name]
    assert isinstance(facts["num_sms"], int)
    assert facts["num_sms"] > 0
    assert sorted({entry["kind"] for entry in facts["entries"]}) == KINDS
    for kind in KINDS:
        rows = [entry["num_rows"] for entry in entries(name, kind)]
        assert all(isinstance(n, int) and n > 0 for n in rows)
        assert len(set(rows)) == len(rows), "one entry for a number of rows"


@pytest.mark.parametrize("name", GPUS)
def test_every_choice_is_a_candidate(name: str) -> None:
    for entry in TABLE["gpus"][name]["entries"]:
        config = MlaDecodeConfig(**entry["chosen"])
        assert config.is_valid()
        assert config in CANDIDATES
        assert config in dispatched_configs(entry["kind"])


@pytest.mark.parametrize("name", GPUS)
def test_a_table_says_where_its_numbers_come_from(name: str) -> None:
    facts = TABLE["gpus"][name]
    assert {"driver", "nvrtc", "commit", "packages"} <= set(facts)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])


@pytest.mark.parametrize("name", GPUS)
def test_every_choice_is_as_fast_as_any_candidate(name: str) -> None:
    """By the times that the table itself holds, one for every candidate, within 2 percent."""
    keys = {f"{c.split}/{c.block_size}/{c.chunks_per_thread}" for c in CANDIDATES}
    for entry in TABLE["gpus"][name]["entries"]:
        chosen, times = MlaDecodeConfig(**entry["chosen"]), entry["us"]
        assert set(times) == keys
        time = times[f"{chosen.split}/{chosen.block_size}/{chosen.chunks_per_thread}"]
        assert time <= 1.02 * min(times.values()), (entry["kind"], entry["num_rows"])


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_choice_for_a_listed_gpu(variant: MlaDecodeVariant) -> None:
    """At a measured number of rows it is the measured winner."""
    name = GPUS[0]
    for entry in entries(name, variant.kind):
        num_rows = entry["num_rows"]
        config, reason = choose(variant, num_rows, 0, gpu(name, TABLE["gpus"][name]["num_sms"]))
        assert config == MlaDecodeConfig(**entry["chosen"])
        assert reason == f"measured on {name} at {num_rows} rows, here {num_rows}"


def check_nearest(kind: str, rows: float, measured_rows: int) -> None:
    """No entry of the first listed GPU is nearer, as a ratio, than the one that was taken."""
    ratio = {
        entry["num_rows"]: max(entry["num_rows"] / rows, rows / entry["num_rows"])
        for entry in entries(GPUS[0], kind)
    }
    assert ratio[measured_rows] == pytest.approx(min(ratio.values()))


@given(st.sampled_from(variants()), st.integers(0, 70_000), st.integers(1, 128))
def test_choice_takes_the_nearest_entry(variant: MlaDecodeVariant, tokens: int, heads: int) -> None:
    name, rows = GPUS[0], tokens * (heads + 1)
    config, reason = choose(variant, tokens, heads, gpu(name, TABLE["gpus"][name]["num_sms"]))
    found = re.fullmatch(rf"measured on {name} at (\d+) rows, here {rows}", reason)
    assert found
    check_nearest(variant.kind, max(rows, 1), int(found[1]))
    assert config in dispatched_configs(variant.kind)


@given(st.sampled_from(variants()), st.integers(0, 70_000), st.integers(1, 300))
def test_choice_for_an_unknown_gpu(variant: MlaDecodeVariant, tokens: int, num_sms: int) -> None:
    """The rows a multiprocessor decide, and the reason says so."""
    known, known_sms = GPUS[0], TABLE["gpus"][GPUS[0]]["num_sms"]
    config, reason = choose(variant, tokens, 12, gpu("Some New GPU", num_sms))
    rows = tokens * 13
    found = re.fullmatch(
        rf"Some New GPU has no measured table; {rows} rows on {num_sms} SMs take the choice of "
        rf"{known} at (\d+) rows \({known_sms} SMs\)",
        reason,
    )
    assert found
    check_nearest(variant.kind, max(rows * known_sms / num_sms, 1), int(found[1]))
    assert config in dispatched_configs(variant.kind)


def test_dispatched_configs_follow_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests of the machine code see whatever a new table names."""
    wanted = [MlaDecodeConfig(0, 144, 1), MlaDecodeConfig(0, 288, 1)]
    found = [
        {"kind": "16bit+same", "num_rows": n, "chosen": vars(config)}
        for n, config in enumerate([*wanted, wanted[0]], start=1)
    ]
    text = json.dumps({"gpus": {"X": {"num_sms": 8, "entries": found}}})
    table = MeasuredTable(lambda: text, MlaDecodeConfig)
    monkeypatch.setattr(mla_decode_config, "TABLE", table)
    assert dispatched_configs("16bit+same") == tuple(wanted)
    assert dispatched_configs("fp8+fp8") == ()


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
