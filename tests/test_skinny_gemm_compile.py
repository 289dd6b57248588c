"""The skinny GEMM compiles for every architecture, to sound machine code. No GPU is needed."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Reached:
    """An instance that a call of some projection's shape can get, or that a tuner can measure."""

    config: SkinnyGemmConfig
    variant: Variant

    @property
    def name(self) -> str:
        return self.config.name_expression(self.variant)

    def resource_problems(self, used: Resources, arch: str) -> list[str]:
        problems = spills(used)
        blocks = self.config.blocks_per_sm if self.variant.aligned_x else 1
        if arch == "sm_90" and fitting_blocks(used.registers, self.config) < blocks:
            problems.append(f"{used.registers} registers, too many for {blocks} blocks")
        return problems

    def code_problems(self, program: list[Instruction], arch: str) -> list[str]:
        return code_problems(program, self, arch)


def has_pdl(arch: str) -> bool:
    return int(arch.removeprefix("sm_")) >= 90


@functools.cache
def configs() -> tuple[tuple[SkinnyGemmConfig, ...], ...]:
    """Of each projection and number of tokens, the likeliest first."""
    gpu = DeviceInfo(0, "a GPU", (9, 0), 132, 232_448)
    return tuple(
        candidates(p.n, p.k, tokens, gpu) for p in projections.shapes() for tokens in range(1, 9)
    )


def shared(arch: str) -> list[Reached]:
    """The commit's share of all, and for sm_90 what the model puts first."""
    every = dict.fromkeys(itertools.chain(*configs()))
    everything = [Reached(config, variant) for config in every for variant in VARIANTS]
    first = dict.fromkeys(ranked[0] for ranked in configs())
    always = [Reached(config, VARIANTS[0]) for config in first if arch == "sm_90"]
    share = share_of(everything, f"skinny_gemm for {arch}", OTHERS)
    return list(dict.fromkeys((*always, *share)))


def weight_loads(program: list[Instruction]) -> list[Instruction]:
    """They leave no trace in L1, as all others do."""
    return [i for i in program if i.base == "LDG" and ".NA" in i.opcode]


def code_problems(program: list[Instruction], instance: Reached, arch: str) -> list[str]:
    """What is wrong with a kernel's instructions."""
    config, variant = instance.config, instance.variant
    problems = [f"local memory: {i}" for i in program if i.is_local]
    suffix = f".{16 * config.vector_width}"
    weights, in_flight = weight_loads(program), config.k_unroll * config.outputs_per_block
    if len(weights) != 2 * in_flight or not all(i.opcode.endswith(suffix) for i in weights):
        problems.append(f"the weight does not come by {suffix} loads: {list(map(str, weights))}")
    others = [i.opcode for i in program if i.base == "LDG" and i not in weights]
    single = [opcode for opcode in others if opcode.endswith(".U16")]
    wide = [opcode for opcode in others if opcode.endswith(suffix)]
    if len(single) + len(wide) != len(others) or bool(wide) != variant.aligned_x:
        problems.append(f"other loads: {others}")
    if variant.aligned_x and len(single) != variant.has_residual:
        problems.append(f"loads of single values: {single}")
    if not any(i.base == "FFMA" for i in program) or any(i.base == "HMMA" for i in program):
        problems.append("not the arithmetic that it should be")
    waits, releases = ([i for i in program if i.is_wait], [i for i in program if i.is_release])
    if bool(waits) != has_pdl(arch) or bool(releases) != has_pdl(arch):
        problems.append(f"dependency wait: {waits}, release: {releases}")
    if waits:
        at = program.index(waits[0])
        problems += [f"before the wait: {i}" for i in program[:at] if i.is_release or i.is_store]
        early = [i for i in program[:at] if i.is_load]
        if len(early) != in_flight * variant.weight_is_static or set(early) - set(weights):
            problems.append(f"loads before the wait: {list(map(str, early))}")
        if not variant.weight_is_static:
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
EXCHANGES = {
    Reached(SkinnyGemmConfig(rows, 64, outputs, 1, 8), Variant()): exchanges
    for rows, outputs, exchanges in ((1, 1, 5), (1, 8, 9), (4, 2, 9), (8, 3, 24), (8, 4, 31))
}
one_worker = pytest.mark.xdist_group("code of skinny_gemm")


def program_of(instance: Reached) -> list[Instruction]:
    names = [each.name for each in (*LOOKED_AT, *EXCHANGES)]
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
    ],
    ids=str,
)
def test_the_compiler_refuses_what_is_not_valid(changes: dict[str, int]) -> None:
    """The static assertions of the kernel and `is_valid` agree."""
    impossible = replace(CONFIG, **changes)
    assert not impossible.is_valid()
    with pytest.raises(CompileError, match=r"static assertion|static_assert|zero size|zero-sized"):
        compile_cubin(SOURCE, [impossible.name_expression(Variant())], "sm_90")
