"""Every kernel that a call can reach compiles for every architecture, to sound machine code.

No GPU is needed: NVRTC compiles for any architecture, and the disassembler tells the registers, the
stack and the width of each access.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from toolchain_helpers import (
    OTHERS,
    Code,
    Inspected,
    Instruction,
    code_of,
    in_programs,
    inspect,
    needs_disassembler,
    order_problems,
    reached,
    share_of,
    shipped_instances,
    spills,
    write,
)

from k3cupy.bench import floor, prefill
from k3cupy.kernels import mla_prefill
from k3cupy.kernels.mla_decode import CANDIDATES, SOURCE, MlaDecodeConfig, Variant
from k3cupy.runtime import sources
from k3cupy.runtime.errors import CompileError
from k3cupy.runtime.offline import compile_cubin

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC and cuda-core")
pytestmark = pytest.mark.compiles

MAX_REGISTERS = {True: 72, False: 96}
"""By `vector`. A multiprocessor has 65,536 registers for 2,048 threads (1,536 from sm_86 to sm_89
and on sm_120). 72 let 864 threads live on it in blocks of 288, each with all its loads under way;
the element-wise kernels hold twice as many pieces and are no fast path."""

SHIPPED = shipped_instances()


@in_programs(sm_90=2, everything=3)
def test_every_instance(arch: str, part: slice) -> None:
    """It compiles, nothing spills, the registers stay within bounds, and PDL is used in order.

    For sm_90 that is every instance of bf16 that a table or a rule chooses, and else the commit's
    share.
    """
    always = [s for s in SHIPPED if arch == "sm_90" and s.variant.dtype == "bfloat16" and s.chosen]
    share = share_of(SHIPPED, f"mla_decode for {arch}", OTHERS)
    wanted = [
        Inspected(
            shipped.name,
            MAX_REGISTERS[shipped.variant.vector],
            may_skip_the_wait=shipped.variant.kv_inputs_ready,
        )
        for shipped in dict.fromkeys((*always, *share))
    ]
    inspect(SOURCE, wanted[part], arch)


def test_the_kernels_of_the_benchmark_compile() -> None:
    names = [
        f"k3cupy::public_structure<__nv_bfloat16, {query}, {cache}, {split}>"
        for query in ("false", "true")
        for cache in ("false", "true")
        for split in (1, 3)
    ]
    assert len(compile_cubin("bench/public_structure.cu", names, "sm_90").symbols) == 8
    names = [
        f"k3cupy::sglang_structure<__nv_bfloat16, {codes}, {warps}>"
        for codes in ("false", "true")
        for warps in (4, 8)
    ]
    assert len(compile_cubin("bench/sglang_structure.cu", names, "sm_90").symbols) == 4
    names = [prefill.public_name(op) for op in mla_prefill.OPS]
    assert len(compile_cubin("bench/public_prefill.cu", names, "sm_90").symbols) == 5
    triggers = [f"k3cupy::Trigger::{name}" for name in ("kEnd", "kEarly", "kNone")]
    names = [f"k3cupy::{name}<{t}>" for name in ("write_rows", "read_all") for t in triggers]
    for arch in ("sm_80", "sm_90"):
        cubin = compile_cubin("tuning/chain.cu", ["k3cupy::empty_kernel", *names], arch)
        assert len(cubin.symbols) == 7
    names = list(dict.fromkeys(form.instance.name_expression for form in floor.FORMS))
    streams = compile_cubin("bench/stream.cu", names, "sm_90")
    assert len(streams.symbols) == len(names)
    assert compile_cubin("bench/row_copy.cu", ["k3cupy::copy_rows"], "sm_90").symbols
    names = ["k3cupy::public_gemm_arguments"]
    assert compile_cubin("bench/host_arguments.cu", names, "sm_90").symbols
    between = ["rms_norms<1536, 512>", "rms_norms<7168, 0>", "gate_heads<128>", "situ_and_multiply"]
    names = [f"k3cupy::{name}" for name in between]
    assert len(compile_cubin("bench/between_products.cu", names, "sm_90").symbols) == 4


def test_the_comparison_kernel_of_products_compiles() -> None:
    """Without spills, and with registers for as many blocks as its shared memory allows."""
    shapes = ("2112, 7168, 8, true", "2112, 7168, 16, true", "1536, 128, 16, false")
    names = [f"k3cupy::public_gemm<{shape}>" for shape in shapes]
    for code in code_of("bench/public_gemm.cu", names, "sm_90").values():
        assert not spills(code.used) and code.used.registers <= 64


def test_every_candidate_of_the_benchmark_compiles() -> None:
    """What the tables may come to name, and some more that `is_valid` allows."""
    variant = Variant("bfloat16", cache="ds_mla", rope=True)
    more = [
        MlaDecodeConfig(0, 72, 1),
        MlaDecodeConfig(0, 936, 1),
        MlaDecodeConfig(0, 36, 2),
        MlaDecodeConfig(1, 32, 3),
        MlaDecodeConfig(1, 1024, 3),
        MlaDecodeConfig(1, 32, 6),
        MlaDecodeConfig(3, 32, 1),
        MlaDecodeConfig(3, 1024, 1),
    ]
    assert all(config.is_valid() for config in (*CANDIDATES, *more))
    some = (*share_of(CANDIDATES, "candidates of mla_decode", 6), *more)
    names = [config.name_expression(variant) for config in some]
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
    name = impossible.name_expression(Variant("bfloat16"))
    with pytest.raises(CompileError):
        compile_cubin(SOURCE, [name], "sm_90")


# The copy of bf16 rows by 128-bit accesses


COPY, PROMISED = (
    MlaDecodeConfig(3, 256, 1).name_expression(Variant("bfloat16", kv_inputs_ready=kv_inputs_ready))
    for kv_inputs_ready in (False, True)
)
one_worker = pytest.mark.xdist_group("code of mla_decode")


def program_of(name: str, arch: str) -> list[Instruction]:
    return code_of(SOURCE, [COPY, PROMISED], arch)[name].program


@one_worker
@needs_disassembler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_copy_moves_rows_by_128_bit_accesses(arch: str) -> None:
    program = program_of(COPY, arch)
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


@one_worker
@needs_disassembler
def test_pdl_wait_is_there_where_the_gpu_has_it() -> None:
    assert not any(i.is_wait for i in program_of(COPY, "sm_80"))
    plain, promised = program_of(COPY, "sm_90"), program_of(PROMISED, "sm_90")
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
def wrong(tmp_path_factory: pytest.TempPathFactory) -> list[Code]:
    """Four kernels, of which only the last is right."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "common").mkdir()
    header = "common/pdl.cuh"
    write(folder / header, (sources.shipped() / header).read_text(encoding="utf-8"))
    write(folder / "wrong.cu", WRONG)
    with sources.source_dir(folder):
        return list(code_of("wrong.cu", [f"wrong<{case}>" for case in range(4)], "sm_90").values())


@needs_disassembler
def test_the_checks_see_a_wrong_order_and_local_memory(wrong: list[Code]) -> None:
    found = [["before the wait"], ["a store after the release"], [], []]
    for case, (code, expected) in enumerate(zip(wrong, found, strict=True)):
        problems = order_problems(code.program, has_pdl=True, may_skip_the_wait=False)
        assert bool(problems) == bool(expected)
        assert all(any(text in problem for problem in problems) for text in expected)
        assert order_problems(code.program, has_pdl=False, may_skip_the_wait=False)
        assert bool(spills(code.used)) == (case == 2)
        assert any(i.is_local for i in code.program) == (case == 2)
        told = Inspected("wrong", max_registers=255)
        assert bool(told.resource_problems(code.used, "sm_90")) == (case == 2)
        assert bool(told.code_problems(code.program, "sm_90")) == (case != 3)
        assert Inspected("wrong", max_registers=2).resource_problems(code.used, "sm_90")


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


EDITED = """
#include "cuda_fp16.h"
#include <common/number.cuh>
/*
#include "none.cuh"
*/
#if 0 || __has_include("none.cuh")
#include "none.cuh"
#endif
extern "C" __global__ void f(Number* x) { *x = 1.0f; }
"""


def test_case39_includes_of_edited_sources(tmp_path: Path) -> None:
    """The compiler decides which are needed, and takes the toolkit's too."""
    write(tmp_path / "edited.cu", EDITED)
    found = []
    with sources.source_dir(tmp_path):
        for number in ("float", "__half"):
            write(tmp_path / "common/number.cuh", f"using Number = {number};\n")
            found.append(compile_cubin("edited.cu", ["f"], "sm_90").code)
        assert found[0] != found[1]
        (tmp_path / "common/number.cuh").unlink()
        with pytest.raises(CompileError, match=r"edited\.cu\(3\): .*common/number\.cuh"):
            compile_cubin("edited.cu", ["f"], "sm_90")


def test_unknown_name_expression() -> None:
    with pytest.raises(CompileError, match="mla_decode"):
        compile_cubin(SOURCE, ["k3cupy::no_such_kernel<1>"], "sm_90")
