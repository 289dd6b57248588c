"""Every prefill kernel that a call can reach compiles for every architecture, to sound code."""

from __future__ import annotations

import itertools
import re

import pytest
from toolchain_helpers import (
    OTHERS,
    Inspected,
    Instruction,
    code_of,
    in_programs,
    inspect,
    needs_disassembler,
    share_of,
)

import k3cupy
from k3cupy.accept.mla_prefill import SIGNATURES
from k3cupy.choose.mla import configs
from k3cupy.kernels.mla_prefill import (
    CANDIDATES,
    FEW_ROWS,
    INSERTS,
    KEY_CONCAT,
    KEY_CONCAT_DS_MLA,
    KV_CONCAT,
    KV_CONCAT_QUANT,
    OPS,
    QKV_QUANT,
    SOURCE,
    MlaPrefillConfig,
    Variant,
)
from k3cupy.runtime.errors import CompileError
from k3cupy.runtime.offline import compile_cubin

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC and cuda-core")
pytestmark = pytest.mark.compiles

MAX_REGISTERS = 120
"""A block has 512 threads at most. With 120 registers one of them lives on a multiprocessor, with
512 times six pieces of 32 bytes under way, which is more than the memory needs."""

MAX_SHARED = 12 * 1024
"""The hash table of the cache blocks, and what the driver keeps for itself."""

VARIANTS = [
    variant
    for variant in itertools.starmap(
        Variant,
        itertools.product(OPS, ("bfloat16", "float16"), *([(False, True)] * 3)),
    )
    if variant.is_valid()
]


def inspected(variant: Variant, config: MlaPrefillConfig) -> Inspected:
    shared = MAX_SHARED if variant.op in INSERTS else 0
    return Inspected(config.name_expression(variant), MAX_REGISTERS, shared)


def configs_of(variant: Variant) -> tuple[MlaPrefillConfig, ...]:
    return configs("mla_prefill", variant.kind) if variant.vector else (FEW_ROWS,)


# A dictionary, because the copy of 16-bit values is one instance for both types.
SHIPPED = list(
    {
        instance.name: instance
        for variant in VARIANTS
        for instance in (inspected(variant, config) for config in configs_of(variant))
    }.values()
)


@in_programs(sm_90=2, everything=2)
def test_every_instance(arch: str, part: slice) -> None:
    """It compiles, nothing spills, the registers stay within bounds, and PDL is used in order.

    For sm_90 that is every instance of bf16, and else the commit's share.
    """
    always = [i for i in SHIPPED if arch == "sm_90" and "__half" not in i.name]
    share = share_of(SHIPPED, f"mla_prefill for {arch}", OTHERS)
    inspect(SOURCE, list(dict.fromkeys((*always, *share)))[part], arch)


def test_every_candidate_compiles() -> None:
    """What the tables may come to name, and what `config=` accepts."""
    assert all(config.is_valid() for config in CANDIDATES)
    variants = [
        Variant(KEY_CONCAT_DS_MLA, rope=True),
        Variant(QKV_QUANT, "float16", rope=True),
        Variant(KV_CONCAT),
        Variant(KV_CONCAT_QUANT, k_pe_fp8=True),
        Variant(QKV_QUANT, rope=True, vector=False),
    ]
    wanted = [inspected(variant, config) for variant in variants for config in CANDIDATES]
    inspect(SOURCE, share_of(wanted, "candidates of mla_prefill", 6), "sm_90")


@pytest.mark.parametrize("tasks", [4, 12])
def test_the_compiler_refuses_what_is_not_valid(tasks: int) -> None:
    """The static assertions of the kernels and `is_valid` agree."""
    config = MlaPrefillConfig(tasks, 1)
    assert not config.is_valid()
    for op in OPS:
        with pytest.raises(CompileError):
            compile_cubin(SOURCE, [config.name_expression(Variant(op))], "sm_90")


# Width and order of the accesses


COPIES = [
    (variant, heads)
    for variant in (
        Variant(KV_CONCAT),
        Variant(KV_CONCAT_QUANT),
        Variant(KV_CONCAT_QUANT, "float16", k_pe_fp8=True),
    )
    for heads in (1, 4)
]
INSERTED = [Variant(op, rope=rope) for op in (KEY_CONCAT, QKV_QUANT) for rope in (False, True)]
one_worker = pytest.mark.xdist_group("code of mla_prefill")


def program_of(variant: Variant, heads: int) -> list[Instruction]:
    looked_at = [*COPIES, *((inserted, 4) for inserted in INSERTED)]
    names = [MlaPrefillConfig(8, count).name_expression(each) for each, count in looked_at]
    name = MlaPrefillConfig(8, heads).name_expression(variant)
    return code_of(SOURCE, names, "sm_90")[name].program


def is_row_load(instruction: Instruction) -> bool:
    """Only rows and angles are read by 128 bits, slots by 64 at most."""
    return instruction.is_load and ".128" in instruction.opcode


@one_worker
@needs_disassembler
@pytest.mark.parametrize(("variant", "heads"), COPIES, ids=str)
def test_rows_move_by_128_bit_accesses(variant: Variant, heads: int) -> None:
    program = program_of(variant, heads)
    loads = [i for i in program if i.is_load]
    stores = [i for i in program if i.is_store]
    # Single chunks are read past L1, neighbouring ones through it.
    assert {i.opcode for i in loads} <= {"LDG.E.128.STRONG.GPU", "LDG.E.128"}
    assert {i.opcode for i in stores} == {"STG.E.128"}
    # All loads of a thread come before its first store: no store stands between two loads of a
    # part, so that there are as many turns from loading to storing as there are parts.
    accesses = [i.is_load for i in program if i.is_load or i.is_store]
    turns = sum(before and not after for before, after in itertools.pairwise(accesses))
    assert turns <= (2 if variant.op == KV_CONCAT else 3)
    assert len(loads) >= heads + 1


@one_worker
@needs_disassembler
@pytest.mark.parametrize("variant", INSERTED, ids=str)
def test_inserts_move_rows_by_128_bit_accesses(variant: Variant) -> None:
    """The cache rows of 576 codes are written 8 bytes a lane; all else is 128 bits wide."""
    program = program_of(variant, 4)
    stores = {i.opcode for i in program if i.is_store}
    assert stores <= ({"STG.E.128"} if variant.op == KEY_CONCAT else {"STG.E.128", "STG.E.64"})
    rows = [i for i in program if is_row_load(i)]
    assert len(rows) >= 4 + 4 * (variant.op == QKV_QUANT)
    assert not any(re.search(r"\.[US](8|16)\b", i.opcode) for i in program if i.is_load)


# The grid


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.vector], ids=str)
def test_the_grid_covers_every_row_once(variant: Variant) -> None:
    for config, tokens, heads, sms in itertools.product(
        CANDIDATES, (0, 1, 7, 257, 4096, 4097, 65_536, 131_072), (1, 5, 12, 96), (1, 132)
    ):
        warps = config.threads(variant) // 32
        assert config.threads(variant) == 32 * warps <= 512
        blocks, numbers = config.grid(variant, tokens, heads, sms)
        groups, num_tasks = numbers["groups"], numbers["num_tasks"]
        assert groups * config.heads_per_task >= heads
        assert (groups - 1) * config.heads_per_task < heads
        assert num_tasks == tokens * groups
        cache_blocks = numbers.get("cache_blocks", 0)
        unused = (blocks - cache_blocks) * config.tasks_per_block - num_tasks
        assert 0 <= unused < config.tasks_per_block
        if variant.op in INSERTS:
            of_a_block = numbers["tokens_per_block"]
            assert (of_a_block == warps) == (tokens <= 4096), "the kernel goes by it"
            assert of_a_block <= 512
            assert 0 <= cache_blocks * of_a_block - tokens < of_a_block
        else:
            assert cache_blocks == 0


def test_public_names() -> None:
    assert all(callable(getattr(k3cupy, op)) for op in OPS)
    assert set(OPS) == set(SIGNATURES)
