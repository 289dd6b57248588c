"""The skinny GEMM compiles for every architecture, to sound machine code. No GPU is needed."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from toolchain_helpers import (
    OTHERS,
    Instruction,
    Resources,
    code_of,
    in_programs,
    inspect,
    needs_disassembler,
    reached,
    share_of,
    spills,
)

from k3cupy import projections
from k3cupy.choose.skinny_gemm import candidates
from k3cupy.kernels.skinny_gemm import SOURCE, SkinnyGemmConfig, Variant
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import CompileError
from k3cupy.runtime.offline import compile_cubin

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC and cuda-core")
pytestmark = pytest.mark.compiles

VARIANTS = [
    Variant(dtype, aligned, residual, static, float32)
    for float32, static, residual, aligned, dtype in itertools.product(
        (False, True), (True, False), (False, True), (True, False), ("bfloat16", "float16")
    )
]
CONFIG = SkinnyGemmConfig(1, 224, 2, 4, 8)
FOUR_ROWS = SkinnyGemmConfig(4, 128, 3, 1, 8)
NARROW = SkinnyGemmConfig(8, 96, 2, 2, 4)
MMA = SkinnyGemmConfig(4, 128, 18, 2, 8, "mma")


@dataclass(frozen=True)
class Reached:
    """An instance that a call of some projection's shape can get, or that a tuner can measure."""

    config: SkinnyGemmConfig
    variant: Variant

    @property
    def name(self) -> str:
        return self.config.name_expression(self.variant)

    @property
    def k_unroll(self) -> int:
        """With tensor cores half as much, where x comes element by element."""
        halved = self.config.is_mma and not self.variant.aligned_x
        return -(-self.config.k_unroll // 2) if halved else self.config.k_unroll

    @property
    def in_flight(self) -> int:
        """Loads of the weight in a thread's round; a lane of a product has one row of eight."""
        rows = self.config.outputs_per_block
        return self.k_unroll * (-(-rows // 8) if self.config.is_mma else rows)

    @property
    def weight_loads(self) -> int:
        """For the first round, and for the next where there is one."""
        at_once = 32 * replace(self.config, k_unroll=self.k_unroll).steps_of_round()
        one_round = self.config.is_mma and 0 < self.variant.k <= at_once
        return self.in_flight * (1 if one_round else 2)

    def resource_problems(self, used: Resources, arch: str) -> list[str]:
        problems = spills(used)
        fit = self.config.blocks_with_residual
        blocks = fit if self.variant.has_residual else self.config.blocks_per_sm
        blocks = blocks if self.variant.aligned_x else 1
        if arch == "sm_90" and fitting_blocks(used.registers, self.config) < blocks:
            problems.append(f"{used.registers} registers, too many for {blocks} blocks")
        if self.config.is_mma and used.shared - reserved(arch) != self.config.shared_bytes:
            problems.append(f"{used.shared} bytes of shared memory, not {self.config.shared_bytes}")
        return problems

    def code_problems(self, program: list[Instruction], arch: str) -> list[str]:
        return code_problems(program, self, arch)


def has_pdl(arch: str) -> bool:
    return int(arch.removeprefix("sm_")) >= 90


def reserved(arch: str) -> int:
    """Bytes of shared memory that a block of such a GPU has for the system."""
    return 1024 if has_pdl(arch) else 0


@functools.cache
def ranked(has_clusters: bool) -> dict[tuple[int, int], tuple[SkinnyGemmConfig, ...]]:
    """By K and tokens, of each projection, the likeliest first; tokens of a tile are alike."""
    gpu = DeviceInfo(0, "a GPU", (9, 0) if has_clusters else (8, 0), 132, 232_448)
    found: dict[tuple[int, int], tuple[SkinnyGemmConfig, ...]] = {}
    for p, tokens in itertools.product(projections.shapes(), (*range(1, 9), 16)):
        before = found.get((p.k, tokens), ())
        found[p.k, tokens] = (*before, *candidates(p.n, p.k, tokens, gpu))
    return found


def every(arch: str) -> dict[str, Reached]:
    """By name, of which the number of tokens is no part, and K only as far as it matters."""
    found: dict[str, Reached] = {}
    for (k, _), configs in ranked(has_pdl(arch)).items():
        for config, variant in itertools.product(dict.fromkeys(configs), VARIANTS):
            instance = Reached(config, replace(variant, k=k))
            found.setdefault(instance.name, instance)
    return found


def shared(arch: str) -> list[Reached]:
    """The commit's share of all of each form, and for sm_90 what the model puts first."""
    instances, gpu = every(arch), DeviceInfo(0, "a GPU", (9, 0), 132, 232_448)
    first = [
        Reached(candidates(p.n, p.k, tokens, gpu)[0], replace(VARIANTS[0], k=p.k))
        for p, tokens in itertools.product(projections.shapes(), (1, 8, 16))
        if arch == "sm_90"
    ]
    of_form = [[i for i in instances.values() if i.config.is_mma is mma] for mma in (False, True)]
    share = [share_of(some, f"skinny_gemm for {arch}", OTHERS) for some in of_form]
    return list({instance.name: instance for instance in itertools.chain(first, *share)}.values())


def weight_loads(program: list[Instruction]) -> list[Instruction]:
    """They leave no trace in L1, as all others do."""
    return [i for i in program if i.base == "LDG" and ".NA" in i.opcode]


def code_problems(program: list[Instruction], instance: Reached, arch: str) -> list[str]:
    """What is wrong with a kernel's instructions."""
    config, variant = instance.config, instance.variant
    problems = [f"local memory: {i}" for i in program if i.is_local]
    suffix = f".{16 * config.vector_width}"
    weights = weight_loads(program)
    if len(weights) != instance.weight_loads or not all(i.opcode.endswith(suffix) for i in weights):
        problems.append(f"the weight does not come by {suffix} loads: {list(map(str, weights))}")
    others = [i.opcode for i in program if i.base == "LDG" and i not in weights]
    single = [opcode for opcode in others if opcode.endswith(".U16")]
    wide = [opcode for opcode in others if opcode.endswith(suffix)]
    if len(single) + len(wide) != len(others) or bool(wide) != variant.aligned_x:
        problems.append(f"other loads: {others}")
    if variant.aligned_x and bool(single) != variant.has_residual:
        problems.append(f"loads of single values: {single}")
    arithmetic = {i.base for i in program} & {"FFMA", "HMMA"}
    if arithmetic != {"HMMA" if config.is_mma else "FFMA"}:
        problems.append(f"not the arithmetic that it should be: {arithmetic}")
    barriers = sum(i.base == "BAR" for i in program)
    if config.split_k == 1 and barriers != 1 and config.block_size > 32:
        problems.append(f"{barriers} block barriers")
    waits, releases = ([i for i in program if i.is_wait], [i for i in program if i.is_release])
    if bool(waits) != has_pdl(arch) or bool(releases) != has_pdl(arch):
        problems.append(f"dependency wait: {waits}, release: {releases}")
    if waits:
        at = program.index(waits[0])
        problems += [f"before the wait: {i}" for i in program[:at] if i.is_release or i.is_store]
        early = [i for i in program[:at] if i.is_load]
        wanted = instance.in_flight * variant.weight_is_static
        if len(early) != wanted or set(early) - set(weights):
            problems.append(f"loads before the wait: {list(map(str, early))}")
        if not variant.weight_is_static and config.split_k == 1:  # else places to meet look alike
            paths = reached(program, [0], lambda i: i.is_wait)
            problems += [f"there is a way past the wait to {i}" for i in paths if i.is_load]
    return problems


@in_programs(sm_90=2, everything=80)
def test_instances(arch: str, part: slice) -> None:
    """They compile, nothing spills, as many blocks fit as was counted on, the code is sound."""
    inspect(SOURCE, shared(arch)[part], arch)


def fitting_blocks(registers: int, config: SkinnyGemmConfig) -> int:
    """By a multiprocessor's four schedulers, of 512 registers a lane in steps of 8."""
    warps = 4 * (512 // (-(-registers // 8) * 8))
    return warps * 32 // config.block_size


LOOKED_AT = [
    Reached(config, Variant(dtype, weight_is_static=True))
    for config in (CONFIG, FOUR_ROWS, NARROW)
    for dtype in ("bfloat16", "float16")
]
WITH_TENSOR_CORES = [
    Reached(config, Variant(dtype, has_residual=True, weight_is_static=True, k=k))
    for config, dtype, k in (
        (MMA, "bfloat16", 7168),
        (MMA, "float16", 7160),
        (MMA, "bfloat16", 32 * MMA.steps_of_round()),
        (replace(MMA, num_rows=16, split_k=4), "bfloat16", 7168),
    )
]
EXCHANGES = {
    Reached(SkinnyGemmConfig(rows, 64, outputs, 1, 8), Variant()): exchanges
    for rows, outputs, exchanges in ((1, 1, 5), (1, 8, 9), (4, 2, 9), (8, 3, 24), (8, 4, 31))
}
one_worker = pytest.mark.xdist_group("code of skinny_gemm")


def program_of(instance: Reached) -> list[Instruction]:
    names = [each.name for each in (*LOOKED_AT, *WITH_TENSOR_CORES, *EXCHANGES)]
    return code_of(SOURCE, names, "sm_90")[instance.name].program


@one_worker
@needs_disassembler
@pytest.mark.parametrize("instance", LOOKED_AT, ids=lambda instance: instance.name)
def test_loads_and_arithmetic_of_one_kernel(instance: Reached) -> None:
    """Once for the first round and once for the next; two multiply-adds a pair of values."""
    config, program = instance.config, program_of(instance)
    assert not code_problems(program, instance, "sm_90")
    in_flight = config.k_unroll * config.outputs_per_block
    assert len(weight_loads(program)) == 2 * in_flight
    loads = [i for i in program if i.base == "LDG"]
    assert len(loads) == 2 * (in_flight + config.k_unroll * config.num_rows)
    products = config.vector_width * in_flight * config.num_rows
    assert sum(i.base == "FFMA" for i in program) == products


@one_worker
@needs_disassembler
@pytest.mark.parametrize("instance", WITH_TENSOR_CORES, ids=lambda instance: instance.name)
def test_loads_and_products_of_tensor_cores(instance: Reached) -> None:
    """All of a round before the wait; two products of 16 columns for each eight rows of a step."""
    config, program = instance.config, program_of(instance)
    assert not code_problems(program, instance, "sm_90")
    wait = next(i for i in program if i.is_wait)
    early = [i for i in weight_loads(program) if i.address < wait.address]
    assert len(early) == config.k_unroll * 3, "18 outputs are three times eight rows, not all full"
    assert all(".LTC128B" in i.opcode for i in early), "L2 is to fetch whole lines"
    assert sum(i.base == "HMMA" for i in program) == 2 * len(early)
    x_loads = sum(i.opcode == "LDG.E.128" for i in program)
    assert x_loads * 3 == len(weight_loads(program)) * (config.tile_m // 8)
    assert any(i.base == "STAS" for i in program) == (config.split_k > 1)
    assert not any(i.base == "SHFL" for i in program), "nothing is summed over lanes"


def at_the_limits() -> list[SkinnyGemmConfig]:
    """With tensor cores, the deepest that is valid of each number of warps and of outputs."""
    found = []
    sizes, outputs, splits = (32, 64, 96, 128, 512, 1024), (8, 24, 32, 64, 72, 160), (1, 2, 3)
    for cut in itertools.product((8, 16), sizes, outputs, splits):
        tokens, block_size, rows, split = cut
        drafts = [
            SkinnyGemmConfig(tokens, block_size, rows, unroll, 8, "mma", split)
            for unroll in range(1, 25)
        ]
        found += [draft for draft in drafts if draft.is_valid()][-1:]
    return found


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_what_is_valid_with_tensor_cores_does_not_spill(arch: str) -> None:
    """Not with a residual either, whose values wait in registers for the end."""
    assert not SkinnyGemmConfig(16, 32, 56, 1, 8, "mma").is_valid()
    assert not SkinnyGemmConfig(16, 64, 160, 1, 8, "mma").is_valid()
    assert all(1 <= c.blocks_with_residual <= c.blocks_per_sm for c in at_the_limits())
    instances = [
        Reached(config, Variant("bfloat16", aligned, True, True, k=7160))
        for config, aligned in itertools.product(at_the_limits(), (True, False))
    ]
    inspect(SOURCE, share_of(instances, f"limits of skinny_gemm_mma for {arch}", 8), arch)


def test_the_shared_memory_of_a_block_is_what_the_host_counts() -> None:
    """At the limit, too: what is valid compiles, and what has more is not valid."""
    largest = SkinnyGemmConfig(16, 384, 56, 1, 8, "mma", 3)
    assert largest.is_valid() and not replace(largest, block_size=416).is_valid()
    found = [MMA, replace(MMA, num_rows=9, split_k=3), replace(MMA, split_k=8), largest]
    names = {config.name_expression(Variant()): config for config in found}
    for name, code in code_of(SOURCE, names, "sm_90").items():
        assert code.used.shared == names[name].shared_bytes + reserved("sm_90"), names[name]
        assert not spills(code.used)


@one_worker
@needs_disassembler
def test_the_reduction_shares_its_exchanges() -> None:
    """Eight sums take 9 exchanges, 24 take 24, one takes 5."""
    for instance, exchanges in EXCHANGES.items():
        program = program_of(instance)
        assert sum(i.base == "SHFL" for i in program) == exchanges, instance.config


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 48},
        {"vector_width": 2},
        {"vector_width": 16},
        {"num_rows": 8, "outputs_per_block": 8, "block_size": 32, "k_unroll": 1},
        {"k_unroll": 0},
        {"product": "mma", "block_size": 48},
        {"product": "mma", "k_unroll": 0},
        {"product": "mma", "outputs_per_block": 0},
        {"product": "mma", "split_k": 9},
    ],
    ids=str,
)
def test_the_compiler_refuses_what_is_not_valid(changes: dict[str, Any]) -> None:
    """The static assertions of the kernel and `is_valid` agree."""
    impossible = replace(CONFIG, **changes)
    assert not impossible.is_valid()
    with pytest.raises(CompileError, match=r"static assertion|static_assert|zero size|zero-sized"):
        compile_cubin(SOURCE, [impossible.name_expression(Variant())], "sm_90")
