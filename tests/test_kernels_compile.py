"""Every kernel that a call can reach compiles for every architecture, to sound machine code.

No GPU is needed: NVRTC compiles for any architecture, and the disassembler tells the registers, the
stack and the width of each access.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from toolchain_helpers import (
    Inspected,
    Instruction,
    inspect,
    needs_disassembler,
    order_problems,
    reached,
    resources_of,
    sass_of,
    share_of,
    shipped_instances,
    write,
)

from k3cupy.kernels.mla_decode import CANDIDATES, SOURCE, MlaDecodeConfig, MlaDecodeVariant
from k3cupy.runtime import sources
from k3cupy.runtime.errors import CompileError
from k3cupy.runtime.offline import ARCHITECTURES, Cubin, compile_cubin

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC and cuda-core")

MAX_REGISTERS = {True: 72, False: 96}
"""By `vector`. A multiprocessor has 65,536 registers for 2,048 threads (1,536 from sm_86 to sm_89
and on sm_120). 72 let 864 threads live on it in blocks of 288, each with all its loads under way;
the element-wise kernels hold twice as many pieces and are no fast path."""

GROUP = 40
"""Instances of one program: starting the compiler and reading the headers is paid once."""

FULL_PRODUCT = 400
"""Instances that two cores compile for all architectures in about two minutes. When the tables name
more, sm_90 still gets all of them and the others a share that moves on every day."""

SHIPPED = shipped_instances()
GROUPS = [SHIPPED[start : start + GROUP] for start in range(0, len(SHIPPED), GROUP)]


@pytest.mark.parametrize("group", range(len(GROUPS)))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_instance(arch: str, group: int) -> None:
    """It compiles, nothing spills, the registers stay within bounds, and PDL is used in order."""
    wanted = [
        Inspected(
            shipped.name,
            MAX_REGISTERS[shipped.variant.vector],
            may_skip_the_wait=shipped.variant.kv_inputs_ready,
        )
        for shipped in share_of(GROUPS[group], arch, -(-len(SHIPPED) // FULL_PRODUCT))
    ]
    # Reading every instruction takes as long as compiling: sm_90 stands for those that have PDL.
    inspect(SOURCE, wanted, arch, read_code=arch == "sm_90" or group == 0)


def test_the_kernels_of_the_benchmark_compile() -> None:
    names = [
        f"k3cupy::public_structure<__nv_bfloat16, {query}, {cache}, {split}>"
        for query in ("false", "true")
        for cache in ("false", "true")
        for split in (1, 3)
    ]
    assert len(compile_cubin("bench_public_structure.cu", names, "sm_90").symbols) == 8
    names = ["k3cupy::empty_kernel", "k3cupy::read_all"]
    assert len(compile_cubin("bench_chain.cu", names, "sm_90").symbols) == 2
    assert compile_cubin("bench_row_copy.cu", ["k3cupy::copy_rows"], "sm_90").symbols


def test_every_candidate_of_the_benchmark_compiles() -> None:
    """What the tables may come to name, and some more that `is_valid` allows."""
    variant = MlaDecodeVariant("bfloat16", cache="ds_mla", rope=True)
    more = [
        MlaDecodeConfig(0, 72, 1),
        MlaDecodeConfig(0, 936, 1),
        MlaDecodeConfig(0, 36, 2),
        MlaDecodeConfig(1, 32, 3),
        MlaDecodeConfig(1, 1024, 3),
        MlaDecodeConfig(3, 32, 1),
        MlaDecodeConfig(3, 1024, 1),
    ]
    assert all(config.is_valid() for config in (*CANDIDATES, *more))
    names = [config.name_expression(variant) for config in (*CANDIDATES, *more)]
    assert set(compile_cubin(SOURCE, names, "sm_90").symbols) == set(names)


@pytest.mark.parametrize(
    "config",
    [(0, 100, 1), (0, 144, 3), (1, 128, 1), (2, 256, 1), (3, 100, 1)],
    ids=str,
)
def test_the_compiler_refuses_what_is_not_valid(config: tuple[int, int, int]) -> None:
    """The static assertions of the kernel and `is_valid` agree."""
    impossible = MlaDecodeConfig(*config)
    assert not impossible.is_valid()
    name = impossible.name_expression(MlaDecodeVariant("bfloat16"))
    with pytest.raises(CompileError):
        compile_cubin(SOURCE, [name], "sm_90")


# The copy of bf16 rows by 128-bit accesses


def copy_instance(arch: str, *, kv_inputs_ready: bool = False) -> list[Instruction]:
    variant = MlaDecodeVariant("bfloat16", kv_inputs_ready=kv_inputs_ready)
    cubin = compile_cubin(SOURCE, [MlaDecodeConfig(3, 256, 1).name_expression(variant)], arch)
    (program,) = sass_of(cubin.code).values()
    return program


@needs_disassembler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_copy_moves_rows_by_128_bit_accesses(arch: str) -> None:
    program = copy_instance(arch)
    stores = [i for i in program if i.is_store]
    loads = [i for i in program if i.is_load]
    assert {i.opcode for i in stores} == {"STG.E.128"}
    # Rows are read past L1, slots are not; a slot is one or two words.
    rows = [i for i in loads if ".STRONG.GPU" in i.opcode]
    assert {i.opcode for i in rows} == {"LDG.E.128.STRONG.GPU"}
    assert {i.opcode for i in loads if i not in rows} <= {"LDG.E", "LDG.E.64", "LDG.E.CONSTANT"}
    # A lane has one chunk of a query row, and up to three of a cache row.
    assert len(rows) >= 4
    assert len(stores) >= 4


@needs_disassembler
def test_pdl_wait_is_there_where_the_gpu_has_it() -> None:
    assert not any(i.is_wait for i in copy_instance("sm_80"))
    plain, promised = copy_instance("sm_90"), copy_instance("sm_90", kv_inputs_ready=True)
    for program in (plain, promised):
        assert any(i.is_wait for i in program)
        assert not any(i.is_release for i in program)
    # With the promise the cache warps read, and store, without a wait; the query warps do not.
    before_wait = reached(promised, [0], lambda i: i.is_wait)
    assert any(i.is_load for i in before_wait)
    assert any(i.is_store for i in before_wait)
    assert not any(i.is_load for i in reached(plain, [0], lambda i: i.is_wait))


# The checks themselves find what they are for

WRONG = """
#include "common/pdl.cuh"

template <int kCase>
__global__ void wrong(float* data, const int* index) {
  if (kCase == 0) data[1] = data[0];
  k3cupy::wait_for_predecessor(data, index);
  if (kCase == 1) k3cupy::release_dependents();
  if (kCase == 2) {
    float local[64];
    for (int i = 0; i < 64; ++i) local[i] = data[i];
    for (int i = 0; i < 64; ++i) data[64 + i] = local[index[i]];
  }
  data[threadIdx.x] += 1.0f;
  if (kCase == 3) k3cupy::release_dependents();
}
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Cubin:
    """Four kernels, of which only the last is right."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "common").mkdir()
    header = "common/pdl.cuh"
    write(folder / header, (sources.shipped() / header).read_text(encoding="utf-8"))
    write(folder / "wrong.cu", WRONG)
    with sources.source_dir(folder):
        return compile_cubin("wrong.cu", [f"wrong<{case}>" for case in range(4)], "sm_90")


@needs_disassembler
@pytest.mark.parametrize(
    ("case", "found"),
    [(0, ["before the wait"]), (1, ["a store after the release"]), (2, []), (3, [])],
)
def test_the_checks_see_a_wrong_order(wrong: Cubin, case: int, found: list[str]) -> None:
    program = sass_of(wrong.code)[wrong.symbols[f"wrong<{case}>"]]
    problems = order_problems(program, has_pdl=True, may_skip_the_wait=False)
    assert bool(problems) == bool(found)
    assert all(any(text in problem for problem in problems) for text in found)
    assert order_problems(program, has_pdl=False, may_skip_the_wait=False)


@needs_disassembler
def test_the_checks_see_local_memory(wrong: Cubin) -> None:
    resources, programs = resources_of(wrong.code), sass_of(wrong.code)
    for case in range(4):
        symbol = wrong.symbols[f"wrong<{case}>"]
        assert bool(resources[symbol].stack + resources[symbol].local) == (case == 2)
        assert any(i.is_local for i in programs[symbol]) == (case == 2)


# Errors


def test_case06_unknown_architecture() -> None:
    name = SHIPPED[0].name
    with pytest.raises(CompileError, match=r"NVRTC refused it for sm_999") as caught:
        compile_cubin(SOURCE, [name], "sm_999")
    assert SOURCE in str(caught.value)
    assert "architecture" in str(caught.value)


def test_case06_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    write(tmp_path / "broken.cu", "__global__ void ok() {}\n__global__ void broken( {}\n")
    with sources.source_dir(tmp_path), pytest.raises(CompileError) as caught:
        compile_cubin("broken.cu", ["ok"], "sm_90")
    text = str(caught.value)
    assert str(tmp_path.resolve() / "broken.cu") in text
    assert "(2): error" in text, "the compiler's own log, with the line of the file"
    write(tmp_path / "broken.cu", "template <int> __global__ void ok() {}\n")
    with sources.source_dir(tmp_path):
        assert set(compile_cubin("broken.cu", ["ok<1>"], "sm_90").symbols) == {"ok<1>"}


def test_unknown_name_expression() -> None:
    with pytest.raises(CompileError, match="mla_decode"):
        compile_cubin(SOURCE, ["k3cupy::no_such_kernel<1>"], "sm_90")
