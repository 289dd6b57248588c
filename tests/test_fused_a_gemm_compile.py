"""The fused-A GEMM compiles for every architecture, to sound machine code. No GPU is needed."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cuda_signatures import template_arguments
from toolchain_helpers import (
    OTHERS,
    Instruction,
    Resources,
    code_of,
    copy_of_sources,
    in_programs,
    inspect,
    order_problems,
    resources_and_code_of,
    share_of,
    spills,
    write,
)

from k3cupy import projections
from k3cupy.choose.gemm import FUSED_A, TOKENS, choose
from k3cupy.kernels.fused_a_gemm import SOURCE, FusedAGemmConfig, Variant
from k3cupy.runtime import sources
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import CompileError
from k3cupy.runtime.offline import ARCHITECTURES, compile_cubin

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC and cuda-core")
pytestmark = pytest.mark.compiles

SHARED_MEMORY = {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_120": 101_376}
VARIANTS = [
    Variant(aligned, static, residual, float32)
    for float32 in (False, True)
    for aligned, static, residual in itertools.product((True, False), repeat=3)
]
CONFIG = FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)
WARPGROUPS = [
    FusedAGemmConfig(64, 64, 128, 7, 7, 1, 4, 1, 2, "warpgroup"),
    FusedAGemmConfig(64, 64, 256, 3, 2, 2, 4, 2, 4, "warpgroup"),
    FusedAGemmConfig(32, 128, 64, 9, 9, 1, 8, 1, 2, "warpgroup"),
    FusedAGemmConfig(64, 192, 64, 7, 7, 1, 4, 1, 2, "warpgroup"),
    FusedAGemmConfig(64, 72, 128, 6, 6, 1, 4, 2, 2, "warpgroup_tokens"),
    FusedAGemmConfig(64, 112, 128, 5, 5, 2, 4, 1, 2, "warpgroup_tokens"),
    FusedAGemmConfig(64, 64, 128, 7, 7, 2, 4, 1, 2, "warpgroup", mapped_x=True),
    FusedAGemmConfig(64, 24, 64, 9, 9, 1, 4, 1, 2, "warpgroup_tokens", mapped_x=True),
]
MAPPED = replace(CONFIG, mapped_x=True)
REGISTERS = 65_536
SPILLS = FusedAGemmConfig(8, 32, 128, 2, 2, 4, 1, 1, 2)
"""For sm_86 and sm_89 the compiler gives this one 48 registers and keeps 16 bytes on the stack,
where x is aligned and no residual is added. No other instance may, and this one no more."""


@dataclass(frozen=True)
class Reached:
    """An instance that a call of some projection's shape can get."""

    config: FusedAGemmConfig
    variant: Variant

    @property
    def name(self) -> str:
        return self.config.name_expression(self.variant)

    def may_spill(self, arch: str) -> bool:
        plain = self.variant.aligned_x and not self.variant.has_residual
        return self.config == SPILLS and plain and arch in ("sm_86", "sm_89")

    def resource_problems(self, used: Resources, arch: str) -> list[str]:
        few = self.may_spill(arch) and used.stack <= 16
        problems = [] if few and not used.local else spills(used)
        if used.registers * self.config.block_size > REGISTERS:
            problems.append(f"{used.registers} registers for {self.config.block_size} threads")
        return problems

    def code_problems(self, program: list[Instruction], arch: str) -> list[str]:
        problems = code_problems(program, self.variant, arch)
        if self.may_spill(arch):
            problems = [problem for problem in problems if "local memory" not in problem]
        return problems


def capability(arch: str) -> tuple[int, int]:
    number = int(arch.removeprefix("sm_").removesuffix("a"))
    return number // 10, number % 10


@functools.cache
def reached(arch: str) -> tuple[Reached, ...]:
    """What the model's products get: for sm_90 of all of them, else of the commit's share."""
    gpu = DeviceInfo(0, arch, capability(arch), 132, SHARED_MEMORY.get(arch, 232_448))
    shapes = projections.shapes()
    configs = dict.fromkeys(
        choose((FUSED_A,), p.n, p.k, tokens, gpu, batch_invariant=invariant).config
        for p in share_of(shapes, f"shapes for {arch}", len(shapes) if arch == "sm_90" else 8)
        for tokens in TOKENS
        for invariant in (False, True)
    )
    return tuple(Reached(config, variant) for config in configs for variant in VARIANTS)


@functools.cache
def shipped_configs() -> tuple[FusedAGemmConfig, ...]:
    """Every configuration that a shipped table leads to, those of batch invariance too."""
    h200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232_448)
    return tuple(
        dict.fromkeys(
            choose(
                (FUSED_A,), p.n, p.k, tokens, h200, residual=residual, batch_invariant=invariant
            ).config
            for p in projections.shapes()
            for tokens in TOKENS
            for residual, invariant in ((False, False), (True, False), (False, True))
        )
    )


def shared(arch: str) -> list[Reached]:
    """The commit's share of what a call can get, and for sm_90 what its tables name."""
    always = [Reached(config, VARIANTS[0]) for config in shipped_configs() if arch == "sm_90"]
    wanted = (*always, *share_of(reached(arch), f"fused_a_gemm for {arch}", OTHERS))
    # Configurations that differ in block_rows are one instance.
    by_name = {each.name: each for each in wanted if not each.config.needs_warpgroups}
    return list(by_name.values())


def code_problems(
    program: list[Instruction],
    variant: Variant,
    arch: str,
    product: str = "HMMA",
) -> list[str]:
    """What is wrong with a kernel's instructions."""
    problems = [f"local memory: {i}" for i in program if i.is_local]
    bases = {i.base for i in program}
    copies = [i.opcode for i in program if i.base == "LDGSTS"]
    if not copies or not all(".128" in opcode for opcode in copies):
        problems.append(f"the weight does not come by asynchronous 128-bit copies: {copies}")
    if bases & {"HMMA", "HGMMA"} != {product}:
        problems.append(f"other tensor-core instructions than {product}")
    loads = [i for i in program if i.base == "LDG"]
    if bool(loads) != (variant.has_residual or not variant.aligned_x):
        problems.append(f"ordinary loads: {loads}")
    waits, releases = (any(i.is_wait for i in program), any(i.is_release for i in program))
    has_pdl = capability(arch) >= (9, 0)
    if waits != has_pdl or releases != waits:
        problems.append(f"dependency wait: {waits}, release: {releases}")
    # Math warps have no wait of their own: what they read and store comes behind that of others.
    return problems + order_problems(
        program, has_pdl=has_pdl, may_skip_the_wait=True, may_release_early=True
    )


@in_programs(sm_90=2, everything=10)
def test_instances(arch: str, part: slice) -> None:
    """They compile, nothing spills, the registers suffice, the code is what it should be."""
    inspect(SOURCE, shared(arch)[part], arch)


# Single instances of sm_90, read closely

PLAIN, STATIC = (Variant(weight_is_static=static) for static in (False, True))
CLUSTERS = [Reached(replace(CONFIG, split_k=split), PLAIN) for split in (2, 4, 8)]
PROMISED = [Reached(CONFIG, variant) for variant in (PLAIN, STATIC)]
RESIDUALS = [
    Reached(config, replace(variant, has_residual=True))
    for variant in (PLAIN, STATIC)
    for config in (CONFIG, replace(CONFIG, split_k=4))
]
BY_THE_ENGINE = [Reached(replace(MAPPED, split_k=split), PLAIN) for split in (1, 4)]
one_worker = pytest.mark.xdist_group("code of fused_a_gemm")


def program_of(instance: Reached) -> list[Instruction]:
    looked_at = (*CLUSTERS, *PROMISED, *RESIDUALS, *BY_THE_ENGINE)
    return code_of(SOURCE, [each.name for each in looked_at], "sm_90")[instance.name].program


@one_worker
@pytest.mark.parametrize("instance", CLUSTERS, ids=lambda instance: instance.config.split_k)
def test_clusters_have_a_barrier_and_remote_stores(instance: Reached) -> None:
    program = program_of(instance)
    assert not code_problems(program, instance.variant, "sm_90")
    bases = {i.base for i in program}
    assert {"UCGABAR_ARV", "UCGABAR_WAIT", "STAS"} <= bases
    full_barriers = [i for i in program if i.base == "MEMBAR" and "GPU" in i.opcode]
    assert not full_barriers, "sums that arrive by themselves need none"


@one_worker
def test_the_promise_moves_the_weight_before_the_wait() -> None:
    """With it one wait is left, that of x; without it the weight waits too."""
    waits = [sum(i.is_wait for i in program_of(instance)) for instance in PROMISED]
    assert waits == [2, 1]


@one_worker
@pytest.mark.parametrize("instance", RESIDUALS, ids=lambda instance: instance.name)
def test_a_residual_is_loaded_behind_a_wait(instance: Reached) -> None:
    """By the same code as without, but for the loads, their wait and the additions.

    Where quads of rows are at no multiple of their size, each value is loaded when it is added.
    """
    config, program = instance.config, program_of(instance)
    waits = [n for n, i in enumerate(program) if i.is_wait]
    barriers = [n for n, i in enumerate(program) if i.base == "BAR"]
    elements = config.tile_m * config.tile_n // config.split_k
    rows = 4 if elements >= 2 * config.block_size else 1
    every = [n for n, i in enumerate(program) if i.base == "LDG"]
    loads = [n for n in every if n < barriers[-1]]
    assert len(waits) == (2 if instance.variant.weight_is_static else 3)
    assert len(loads) == -(-elements // rows // config.block_size), "while others multiply"
    assert len(every) - len(loads) == (4 if rows == 4 else 0) * len(loads)
    assert waits[-1] < loads[0]
    for n in loads:
        loaded = program[n].operands.partition(",")[0]
        uses = [i for i in program[n + 1 : loads[-1]] if re.search(rf"\b{loaded}\b", i.operands)]
        assert not uses, f"{program[n]} is awaited before the last of them is asked for"


@one_worker
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
def test_x_by_the_copy_engine(arch: str) -> None:
    """One thread asks for boxes; no warp copies x."""
    for instance in BY_THE_ENGINE:
        if arch == "sm_90":
            program = program_of(instance)
        else:
            names = [each.name for each in BY_THE_ENGINE]
            program = code_of(SOURCE, names, arch)[instance.name].program
        config = instance.config
        assert not code_problems(program, instance.variant, arch)
        assert "UTMALDG" in {i.base for i in program}
        weight_copies = config.tile_n * config.tile_k // 8 // (32 * config.copy_warps)
        assert sum(i.base == "LDGSTS" for i in program) == weight_copies


@one_worker
@pytest.mark.parametrize(
    "instance", (*CLUSTERS, *RESIDUALS, *BY_THE_ENGINE), ids=lambda instance: instance.name
)
def test_case47_no_sum_is_flushed(instance: Reached) -> None:
    """The compilers are told to flush; the additions of sums and residual say that they do not."""
    program = program_of(instance)
    assert sum(i.base == "FADD" for i in program) >= 2
    assert not [str(i) for i in program if i.flushes]


# Products of a warpgroup


def check_products_of_a_warpgroup(wanted: list[Reached]) -> None:
    """They run on by themselves: no product waits for the one before it, where code is read."""
    used, found = resources_and_code_of(SOURCE, [each.name for each in wanted], "sm_90a")
    for instance in wanted:
        assert not instance.resource_problems(used[instance.name], "sm_90a"), instance.name
        if instance.name not in found:
            continue
        config, program = instance.config, found[instance.name].program
        assert not code_problems(program, instance.variant, "sm_90a", "HGMMA"), instance.name
        assert "LDSM" not in {i.base for i in program}
        assert not [str(i) for i in program if i.flushes], instance.name
        products = sum(i.base == "HGMMA" for i in program)
        waits = sum(i.opcode.startswith("WARPGROUP.DEPBAR") for i in program)
        rows = 16 if config.product == "warpgroup" else config.tile_n // (config.warps_n // 4) // 4
        per_stage = config.tile_k // 16 // config.warps_k * config.tile_n // rows // config.warps_n
        assert products % per_stage == 0, instance.name
        assert waits <= products // per_stage + 1, instance.name


def test_products_of_a_warpgroup() -> None:
    """Of each configuration with each variant, the commit's share."""
    assert all(config.is_valid() for config in WARPGROUPS)
    every = [Reached(*both) for both in itertools.product(WARPGROUPS, VARIANTS)]
    check_products_of_a_warpgroup(share_of(every, "products of a warpgroup", 9))


def test_products_of_a_warpgroup_that_the_table_names() -> None:
    named = [config for config in shipped_configs() if config.needs_warpgroups]
    by_name = {Reached(config, VARIANTS[0]).name: Reached(config, VARIANTS[0]) for config in named}
    assert by_name
    check_products_of_a_warpgroup(list(by_name.values()))


def test_products_of_a_warpgroup_need_their_architecture() -> None:
    name = WARPGROUPS[0].name_expression(Variant())
    with pytest.raises(CompileError, match="sm_90a"):
        compile_cubin(SOURCE, [name], "sm_90")


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_m": 16},
        {"warps_n": 2},
        {"tile_n": 96},
        {"tile_n": 32},
        {"tile_k": 64, "warps_k": 8},
        {"product": "warpgroup_tokens", "tile_m": 32},
    ],
    ids=str,
)
def test_the_compiler_refuses_what_a_warpgroup_cannot(changes: dict[str, Any]) -> None:
    impossible = replace(WARPGROUPS[0], **changes)
    assert not impossible.is_valid()
    with pytest.raises(CompileError, match=r"static assertion|static_assert"):
        compile_cubin(SOURCE, [impossible.name_expression(Variant())], "sm_90a")


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_m": 24},
        {"tile_n": 24},
        {"tile_k": 32, "warps_k": 1},
        {"warps_k": 3},
        {"warps_n": 4},
        {"split_k": 3},
        {"tile_k": 192},
    ],
    ids=str,
)
def test_the_compiler_refuses_what_is_not_valid(changes: dict[str, int]) -> None:
    """The static assertions of the kernel and `is_valid` agree."""
    impossible = replace(CONFIG, **changes)
    assert not impossible.is_valid()
    with pytest.raises(CompileError, match=r"static assertion|static_assert"):
        compile_cubin(SOURCE, [impossible.name_expression(Variant())], "sm_90")


def test_the_kernel_and_the_host_agree_on_shared_memory(tmp_path: Path) -> None:
    """Every configuration's size is stated beside the kernel's own layout and must be equal."""
    configs = dict.fromkeys(instance.config for arch in ARCHITECTURES for instance in reached(arch))
    checks = []
    others = (CONFIG, MAPPED, replace(CONFIG, split_k=8, tile_m=64), *WARPGROUPS)
    for config in (*configs, *others):
        told = template_arguments(config.name_expression(Variant()))[1]
        tile = ", ".join([*told[:11], str(config.mapped_x).lower()])
        checks.append(
            f'static_assert(Tile<{tile}>::kSharedBytes == {config.shared_bytes}, "{config}");'
        )
    lines = ['#include "fused_a_gemm.cu"', "namespace k3cupy {", *checks, "}"]
    folder = copy_of_sources(tmp_path)
    write(folder / "layout.cu", "\n".join([*lines, "__global__ void nothing() {}", ""]))
    with sources.source_dir(folder):
        assert compile_cubin("layout.cu", ["nothing"], "sm_90a").symbols
