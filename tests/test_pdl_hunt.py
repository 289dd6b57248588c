"""The race hunt: late writers and late readers around every kernel, and faults that it must catch.

`make hunt` replays every chain thousands of times, the suite a hundred and fifty times.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_helpers import GEMMS, normal, residual_of
from helpers import BF16, FP16
from mla_helpers import FORMS, MlaCall, as_list, as_out
from mla_layer_helpers import LAYER_FORMS, WEIGHTS, in_one_launch
from pdl_helpers import Hunted, Neighbours, Tensors, hunt, neighbours
from toolchain_helpers import (
    MAPPINGS,
    copy_of_sources,
    edit,
    needs_disassembler,
    order_problems,
    sass_of,
    share_of,
)

import k3cupy
from k3cupy.kernels import (
    fused_a_gemm,
    mla_decode,
    mla_norm,
    mla_prefill,
    mla_query,
    mla_value,
    skinny_gemm,
)
from k3cupy.runtime.offline import compile_cubin

__all__ = ["neighbours"]

REPLAYS = int(os.environ.get("K3CUPY_HUNT_REPLAYS", "150"))

# --- Calls ---------------------------------------------------------------------------------------

WARPS = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)
MANY_ROWS = replace(WARPS, tile_n=64)
"""Who copies the weight stores a part of the tile here, too."""

WARPGROUP = k3cupy.FusedAGemmConfig(64, 64, 128, 7, 7, 1, 4, 1, 2, "warpgroup")
TOKENS_WIDE = k3cupy.FusedAGemmConfig(64, 72, 128, 6, 6, 1, 4, 2, 2, "warpgroup_tokens")
SKINNY = k3cupy.SkinnyGemmConfig(1, 224, 2, 4, 8)
MMA = k3cupy.SkinnyGemmConfig(4, 128, 16, 2, 8, "mma")
N, K = 272, 1024
ENDS_SOON = 512
"""Columns that fill no more than the ring of `WARPS`: who copies the weight is through at once."""


def product(
    name: str,
    config: Any,
    tokens: int,
    *,
    k: int = K,
    static: bool = False,
    residual: bool = False,
    in_place: bool = False,
    off: int | None = None,
    dtype: torch.dtype = BF16,
) -> Hunted:
    """A GEMM; with `off`, x is a column slice that begins so many elements into a wider tensor."""
    x = normal((tokens, k + (off or 0) + 8 * (off is not None)), 1, "cuda", dtype)
    inputs = {
        "x": x if off is None else x[:, off : off + k],
        "weight": normal((N, k), 2, "cuda", dtype),
    }
    outputs = {"out": torch.zeros(tokens, N, dtype=dtype, device="cuda")}
    if residual or in_place:
        inputs["residual"] = residual_of(tokens, N, "cuda", dtype=dtype)
    if in_place:
        outputs = {}

    def run(tensors: Tensors, **options: Any) -> None:
        given = {"out": tensors.get("residual"), **tensors} if in_place else tensors
        GEMMS[name](**given, config=config, weight_is_static=static, **options)

    return Hunted(run, inputs, outputs, older=("weight",) if static else ())


PROMISED = (
    "kv_c_normed", "k_pe", "slot_mapping", "cache_scale_inv", "positions", "cos_sin_cache",
)  # fmt: skip


def hunted(call: MlaCall, **fields: Any) -> Callable[..., Hunted]:
    """A call whose outputs come first; what it turns in place counts among the inputs."""
    found = as_list(call.run())
    outputs = {f"out{i}": torch.zeros_like(tensor) for i, tensor in enumerate(found)}
    inputs = {name: t for name, t in call.args.items() if isinstance(t, torch.Tensor)}
    rest = {name: value for name, value in call.args.items() if name not in inputs}
    if "kv_cache" in inputs:
        outputs["kv_cache"] = inputs.pop("kv_cache")

    def with_options(older: tuple[str, ...], **given: Any) -> Hunted:
        def run(tensors: Tensors, **options: Any) -> None:
            outs = [tensors[f"out{i}"] for i in range(len(found))]
            named = {name: t for name, t in tensors.items() if not name.startswith("out")}
            call.operation(**named, **rest, **given, out=as_out(outs), **options)

        return Hunted(run, inputs, outputs, tuple(n for n in older if n in inputs), **fields)

    return with_options


def epilogue(
    form: str, tokens: int = 24, heads: int = 3, *, ready: bool = False, **settings: Any
) -> Hunted:
    """An MLA epilogue."""
    config = settings.pop("config", None)
    call = FORMS[form].make(tokens, heads, device="cuda", scale_tensors=True, **settings)
    early = ("kv_cache",) if ready else ()
    with_options = hunted(call, early=early, ends_without_a_trigger=True)
    if call.kind != "decode":
        return with_options(())
    return with_options(PROMISED if ready else (), kv_inputs_ready=ready, config=config)


def of_layer(form: str, tokens: int, *, static: bool = False, **settings: Any) -> Hunted:
    """An operation around the epilogue."""
    is_query = form.startswith("query")
    config = settings.pop("config", in_one_launch("cuda") if is_query else None)
    more = {"scale_tensors": True} if is_query else {}
    call = LAYER_FORMS[form].make(tokens, 2, device="cuda", **more, **settings)
    with_options = hunted(call)
    older = WEIGHTS[call.kind] if static else ()
    return with_options(older, weight_is_static=static, config=config)


Make = Callable[..., Hunted]
FUSED_A: dict[str, Make] = {
    name: partial(product, "fused_a_gemm", config, tokens, **settings)
    for name, config, tokens, settings in (
        ("warps", WARPS, 4, {}),
        ("split", replace(WARPS, split_k=4), 16, {}),
        ("warpgroup", WARPGROUP, 64, {}),
        ("warpgroup of tokens", TOKENS_WIDE, 64, {}),
        ("mapped", replace(WARPS, mapped_x=True), 16, {}),
        ("warpgroup mapped", replace(WARPGROUP, mapped_x=True), 64, {"off": 128}),
        ("strided", WARPS, 9, {"off": 8}),
        ("element-wise", WARPS, 3, {"off": 3}),
        ("residual", MANY_ROWS, 16, {"residual": True, "k": ENDS_SOON}),
        ("in place", replace(WARPS, split_k=4), 16, {"in_place": True, "k": ENDS_SOON}),
    )
}
SKINNY_GEMM: dict[str, Make] = {
    name: partial(product, "skinny_gemm", replace(config, num_rows=tokens), tokens, **settings)
    for name, config, tokens, settings in (
        ("one", SKINNY, 1, {}),
        ("two of fp16", SKINNY, 2, {"residual": True, "dtype": FP16}),
        ("in place", SKINNY, 2, {"in_place": True}),
        ("element-wise", SKINNY, 1, {"off": 3}),
        ("tensor cores", MMA, 4, {}),
        ("tensor cores in place", MMA, 9, {"in_place": True}),
        ("tensor cores, one round", replace(MMA, k_unroll=8), 16, {"residual": True}),
        ("tensor cores, split", replace(MMA, split_k=4), 4, {"in_place": True, "dtype": FP16}),
        ("tensor cores, element-wise", MMA, 3, {"off": 3}),
    )
}
LAYER: dict[str, Make] = {
    "norm": partial(of_layer, "norm", 24),
    "norm, one warp": partial(of_layer, "norm", 3, config=mla_norm.MlaNormConfig(1)),
    "norm, element-wise": partial(of_layer, "norm", 3, width=2113),
    "query": partial(of_layer, "query", 4),
    "query, fp8 and RoPE": partial(of_layer, "query-fp8", 16, rope=True),
    "query, ds_mla and RoPE": partial(of_layer, "query-ds_mla", 8, rope=True),
    "query, separate": partial(of_layer, "query", 17, config=None),
    "value": partial(of_layer, "value-gate", 4),
    "value, packed": partial(of_layer, "value-packed-gate", 24),
}
WITH_WEIGHTS = (
    {f"fused_a {name}": make for name, make in FUSED_A.items()}
    | {f"skinny {name}": make for name, make in SKINNY_GEMM.items()}
    | LAYER
)
DECODE: dict[str, Make] = {
    "flat": partial(epilogue, "decode", config=MAPPINGS[0]),
    "one warp": partial(epilogue, "decode", config=MAPPINGS[1], rope=True),
    "three warps": partial(epilogue, "decode", config=MAPPINGS[2]),
    "fp8": partial(epilogue, "decode-fp8", rope=True),
    "uint8": partial(epilogue, "decode-uint8"),
    "ds_mla": partial(epilogue, "decode-ds_mla"),
    # Rows of the first launch that the second writes again: it waits, whatever was promised.
    "two launches": partial(epilogue, "decode", 4200, 1, slots=[i % 4100 for i in range(4200)]),
}
PREFILL: dict[str, Make] = {
    "insert": partial(epilogue, "insert"),
    "insert and turn": partial(epilogue, "insert", rope=True),
    "insert many": partial(epilogue, "insert", 4200, 1),
    "ds_mla": partial(epilogue, "ds_mla", rope=True),
    "ds_mla many": partial(epilogue, "ds_mla", 300),
    "fp8": partial(epilogue, "fp8"),
    "fp8 and turn": partial(epilogue, "fp8", rope=True),
    "fp8 many": partial(epilogue, "fp8", 4200, 1),
    "concat": partial(epilogue, "concat"),
    "concat_fp8": partial(epilogue, "concat_fp8"),
}

# --- What is shipped -----------------------------------------------------------------------------

counted = {"chains": 0, "replays": 0}
"""What this process hunted; printed, so that a long run says how long it was."""


def assert_nothing(hunted: Hunted, around: Neighbours, **options: Any) -> None:
    assert hunt(hunted, around, REPLAYS, **options) == {}
    counted["chains"] += 1
    counted["replays"] += REPLAYS
    print(f"{counted['chains']} chains, {counted['replays']} replays")


each_pdl = pytest.mark.parametrize("pdl", [None, True, False], ids=["default", "on", "off"])


@pytest.fixture
def has_pdl() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("has no programmatic dependent launch")


@pytest.mark.gpu
@pytest.mark.usefixtures("has_pdl")
@each_pdl
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_no_race_around_weights(
    name: str, static: bool, pdl: bool | None, neighbours: Neighbours
) -> None:
    """What is not promised is waited for, and nobody gets past it who was promised nothing."""
    assert_nothing(WITH_WEIGHTS[name](static=static), neighbours, pdl=pdl)


@pytest.mark.gpu
@pytest.mark.usefixtures("has_pdl")
@each_pdl
@pytest.mark.parametrize("ready", [False, True], ids=["", "ready"])
@pytest.mark.parametrize("name", DECODE)
def test_no_race_around_the_decode_epilogue(
    name: str, ready: bool, pdl: bool | None, neighbours: Neighbours
) -> None:
    assert_nothing(DECODE[name](ready=ready), neighbours, pdl=pdl)


@pytest.mark.gpu
@pytest.mark.usefixtures("has_pdl")
@each_pdl
@pytest.mark.parametrize("name", PREFILL)
def test_no_race_around_a_prefill_epilogue(
    name: str, pdl: bool | None, neighbours: Neighbours
) -> None:
    assert_nothing(PREFILL[name](), neighbours, pdl=pdl)


# --- Planted faults ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """An edit of a source."""

    name: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.name

    def plant(self, folder: Path) -> Path:
        """A copy of the sources with it."""
        tree = copy_of_sources(folder)
        assert (tree / self.file).read_text(encoding="utf-8").count(self.old) == 1
        edit(tree / self.file, self.old, self.new)
        return tree


@dataclass(frozen=True)
class Fault(Edit):
    """One that makes a race, and a call that runs into it."""

    make: Make


def without(name: str, file: str, line: str, make: Make, *, behind: str = "") -> Fault:
    """The fault that a wait is missing; `behind` tells it from others that read alike."""
    return Fault(f"no wait in {name}", file, line + behind, behind, make)


SKIPPING_COPY = "if constexpr (!kIsStatic) wait_for_predecessor(source, source);"
SKIPPING_INSERT = "if constexpr (!kKvInputsReady) wait_for_predecessor(nope_row, rope_row);"
SOURCE_TARGET = "wait_for_predecessor(source, target);"
PREFILL_FILE = "mla_prefill.cu"
NO_WAIT = [
    without("copy_weight", "gemm/copy_warps.cuh", SKIPPING_COPY, FUSED_A["warps"]),
    without(
        "PointedX", "gemm/copy_warps.cuh", "wait_for_predecessor(data, out);", FUSED_A["split"]
    ),
    without("MappedX", "gemm/copy_warps.cuh", "wait_for_predecessor(map, out);", FUSED_A["mapped"]),
    without(
        "StoredShare",
        "gemm/epilogue.cuh",
        "wait_for_predecessor(residual.data, out.data);",
        partial(FUSED_A["residual"], static=True),
    ),
    without(
        "skinny_gemm",
        "skinny_gemm.cu",
        "wait_for_predecessor(x, weight_row[0]);",
        SKINNY_GEMM["one"],
    ),
    without(
        "skinny_gemm_mma",
        "skinny_gemm.cu",
        "wait_for_predecessor(x_at[0], weight_at[0]);",
        SKINNY_GEMM["tensor cores"],
    ),
    without("decode's cache blocks", "mla_decode.cu", SKIPPING_INSERT, DECODE["flat"]),
    without(
        "decode's query blocks",
        "mla_decode.cu",
        "wait_for_predecessor(nope_row[0], rope_row[0]);",
        DECODE["flat"],
    ),
    without(
        "copy_nope",
        PREFILL_FILE,
        SOURCE_TARGET,
        PREFILL["concat"],
        behind="\n  Chunk chunk[kHeads]",
    ),
    without(
        "copy_rope",
        PREFILL_FILE,
        SOURCE_TARGET,
        PREFILL["insert"],
        behind="\n  if (task.count == 0) return;\n  Chunk chunk =",
    ),
    without(
        "turn_query",
        PREFILL_FILE,
        "wait_for_predecessor(place, place);",
        PREFILL["insert and turn"],
    ),
    without(
        "quant_rows",
        PREFILL_FILE,
        SOURCE_TARGET,
        PREFILL["concat_fp8"],
        behind="\n  if (task.count == 0) return;\n  Piece piece",
    ),
    without(
        "quant_k_pe",
        PREFILL_FILE,
        SOURCE_TARGET,
        PREFILL["fp8"],
        behind="\n  if (task.count == 0) return;\n  uint4 codes",
    ),
    without(
        "insert_block",
        PREFILL_FILE,
        "wait_for_predecessor(nope_row, rope_row);",
        PREFILL["ds_mla"],
    ),
    without(
        "insert_block of many",
        PREFILL_FILE,
        "wait_for_predecessor(kv_c_normed, slots.base);",
        PREFILL["fp8 many"],
    ),
    without(
        "norm's query warps", "mla_norm.cu", "wait_for_predecessor(row, q_weight);", LAYER["norm"]
    ),
    without(
        "norm's latent warp",
        "mla_norm.cu",
        "wait_for_predecessor(source, kv_weight);",
        LAYER["norm"],
    ),
    without(
        "query's products",
        "mla_query.cu",
        "wait_for_predecessor(qkv_a, weight_at);",
        LAYER["query"],
    ),
    without(
        "query's cache warp",
        "mla_query.cu",
        "wait_for_predecessor(qkv_a, slot_mapping);",
        LAYER["query"],
    ),
    without("head_product", "mla_value.cu", "wait_for_predecessor(x, matrix);", LAYER["value"]),
]


def early(name: str, file: str, line: str, make: Make) -> Fault:
    """The fault that the consumer is released before the kernel has waited."""
    return Fault(f"early release in {name}", file, line, f"release_dependents();\n  {line}", make)


COMPUTE_TILE = "extern __shared__ __align__(1024) char shared[];"
EVERY_BLOCK = "// Every block waits,"
KEY_CONCAT, QKV_QUANT = "constexpr unsigned int kKeyThreads", "constexpr unsigned int kRopeThreads"
KV_CONCAT = (
    "const TaskGrid grid = {num_tasks, num_heads, groups, groups_magic, groups_shift};\n  if"
)
KV_QUANT = "const auto plain ="
FIRST_LOADS = "if constexpr (kWeightIsStatic) for_first_round(load_weights);\n  "
EARLY = [
    *(
        early(f"fused_a_gemm, {name}", "fused_a_gemm.cu", COMPUTE_TILE, FUSED_A[name])
        for name in ("warps", "split", "warpgroup", "mapped")
    ),
    early("skinny_gemm", "skinny_gemm.cu", FIRST_LOADS + "wait", SKINNY_GEMM["one"]),
    early("skinny_gemm_mma", "skinny_gemm.cu", FIRST_LOADS + "if", SKINNY_GEMM["tensor cores"]),
    early("mla_decode_epilogue", "mla_decode.cu", EVERY_BLOCK, DECODE["flat"]),
    early("mla_key_concat", PREFILL_FILE, KEY_CONCAT, PREFILL["insert"]),
    early("mla_qkv_quant", PREFILL_FILE, QKV_QUANT, PREFILL["fp8"]),
    early("mla_kv_concat", PREFILL_FILE, KV_CONCAT, PREFILL["concat"]),
    early("mla_kv_concat_quant", PREFILL_FILE, KV_QUANT, PREFILL["concat_fp8"]),
    early("q_kv_rms_norms", "mla_norm.cu", "constexpr int kThreads =", LAYER["norm"]),
    early("mla_decode_query", "mla_query.cu", "using Layout =", LAYER["query"]),
    early("head_product", "mla_value.cu", "constexpr int kWarpsOfK =", LAYER["value"]),
]
PDL = "common/pdl.cuh"
WAIT = """  asm volatile("griddepcontrol.wait;" ::"l"(address0), "l"(address1) : "memory");
"""
LINGER = """  const long long begin = clock64();
  while (clock64() - begin < 20000) {
  }
"""
RELEASE = """  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
"""
BEFORE_THE_STORES = [
    Fault(f"release before the stores of {name}", PDL, WAIT, WAIT + RELEASE + LINGER, make)
    for name, make in (
        ("mla_decode_epilogue", DECODE["flat"]),
        ("mla_key_concat", PREFILL["insert many"]),
        ("mla_qkv_quant", PREFILL["fp8 many"]),
        ("mla_kv_concat", PREFILL["concat"]),
        ("mla_kv_concat_quant", PREFILL["concat_fp8"]),
    )
]
"""The stores come late besides; else those of three kernels are over before the consumer begins."""

FAULTS = [*NO_WAIT, *EARLY, *BEFORE_THE_STORES]


@pytest.mark.gpu
@pytest.mark.usefixtures("has_pdl")
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_hunt_catches(fault: Fault, tmp_path: Path, neighbours: Neighbours) -> None:
    with k3cupy.source_dir(fault.plant(tmp_path)):
        found = hunt(fault.make(), neighbours, 100, pdl=None)
    print(found)
    assert found, "the fault was not seen"


SLOW = Edit("stores that come late", PDL, WAIT, WAIT + LINGER)
SLOWED = {
    **{f"decode {name}": make for name, make in DECODE.items()},
    **{f"decode {name}, ready": partial(make, ready=True) for name, make in DECODE.items()},
    **PREFILL,
}


@pytest.mark.gpu
@pytest.mark.usefixtures("has_pdl")
@pytest.mark.parametrize("name", SLOWED)
def test_no_race_behind_stores_that_come_late(
    name: str, tmp_path: Path, neighbours: Neighbours
) -> None:
    """The consumer is not released before them, however long they take."""
    with k3cupy.source_dir(SLOW.plant(tmp_path)):
        assert_nothing(SLOWED[name](), neighbours)


# Without a GPU: the machine code tells some of them


def test_every_fault_can_be_planted(tmp_path: Path) -> None:
    """The sources still have the places that the faults edit."""
    for i, fault in enumerate([*FAULTS, SLOW]):
        fault.plant(tmp_path / str(i))


LAYER_FILES = {module.SOURCE for module in (mla_norm, mla_query, mla_value)}
CODE = {
    "fused_a_gemm, warps": ("fused_a_gemm.cu", WARPS, fused_a_gemm.Variant()),
    "fused_a_gemm, mapped": (
        "fused_a_gemm.cu",
        replace(WARPS, mapped_x=True),
        fused_a_gemm.Variant(),
    ),
    "skinny_gemm": ("skinny_gemm.cu", SKINNY, skinny_gemm.Variant()),
    "skinny_gemm_mma": ("skinny_gemm.cu", MMA, skinny_gemm.Variant()),
    "mla_decode_epilogue": ("mla_decode.cu", MAPPINGS[2], mla_decode.Variant("bfloat16")),
    **{
        name: (PREFILL_FILE, mla_prefill.FEW_ROWS, mla_prefill.Variant(operation))
        for operation, name in mla_prefill.FUNCTIONS.items()
    },
    "q_kv_rms_norms": ("mla_norm.cu", mla_norm.UNTUNED, mla_norm.Variant("bfloat16")),
    "mla_decode_query": ("mla_query.cu", mla_query.UNTUNED, mla_query.Variant("bfloat16")),
    "head_product": ("mla_value.cu", mla_value.UNTUNED, mla_value.Variant("bfloat16")),
}
"""Of each kernel an instance, whose order is looked at."""

SEEN_IN_CODE = [
    (kernel, fault)
    for fault in FAULTS
    for kernel in CODE
    if fault.name in (f"early release in {kernel}", f"release before the stores of {kernel}")
    or (kernel, fault.name)
    in (
        ("skinny_gemm", "no wait in skinny_gemm"),
        ("skinny_gemm_mma", "no wait in skinny_gemm_mma"),
        ("mla_decode_epilogue", "no wait in decode's query blocks"),
        ("mla_key_concat", "no wait in copy_rope"),
        ("mla_qkv_quant", "no wait in quant_k_pe"),
        ("q_kv_rms_norms", "no wait in norm's latent warp"),
        ("q_kv_rms_norms", "no wait in norm's query warps"),
        ("mla_decode_query", "no wait in query's products"),
        ("mla_decode_query", "no wait in query's cache warp"),
        ("head_product", "no wait in head_product"),
    )
]


@pytest.mark.compiles
@needs_disassembler
@pytest.mark.parametrize(
    ("kernel", "fault"), share_of(SEEN_IN_CODE, "faults that code tells", 9), ids=str
)
def test_the_machine_code_tells(kernel: str, fault: Fault, tmp_path: Path) -> None:
    """What is shipped passes the same look in the tests of each kernel's code."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC and cuda-core")
    source, config, variant = CODE[kernel]
    with k3cupy.source_dir(fault.plant(tmp_path)):
        cubin = compile_cubin(source, [config.name_expression(variant)], "sm_90")
    (program,) = sass_of(cubin.code).values()
    assert order_problems(
        program,
        has_pdl=True,
        may_skip_the_wait=source == "fused_a_gemm.cu",
        may_release_early=source.endswith("_gemm.cu") or source in LAYER_FILES,
    )
