"""The kernels around an MLA layer's epilogue compile for every architecture, to sound code."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from toolchain_helpers import (
    Inspected,
    Instruction,
    code_of,
    in_programs,
    inspect,
    needs_disassembler,
    order_problems,
    reached,
    share_of,
)

from k3cupy.kernels import mla_norm, mla_query, mla_value
from k3cupy.runtime.errors import CompileError
from k3cupy.runtime.offline import compile_cubin

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC and cuda-core")
pytestmark = pytest.mark.compiles

DTYPES, FLAGS, CACHES = ("bfloat16", "float16"), (False, True), ("same", "fp8", "ds_mla")
RESERVED = 1024
"""Bytes of shared memory that the system has of a block's, from sm_90 on."""


@dataclass(frozen=True)
class LayerInstance(Inspected):
    """Releases its dependents behind the wait; only what is promised is loaded before it."""

    has_gate: bool = False

    def code_problems(self, program: list[Instruction], arch: str) -> list[str]:
        has_pdl = int(arch.removeprefix("sm_")) >= 90
        problems = [f"local memory: {i}" for i in program if i.is_local]
        problems += order_problems(
            program,
            has_pdl=has_pdl,
            may_skip_the_wait=self.may_skip_the_wait,
            may_release_early=True,
        )
        if has_pdl:
            early = reached(program, [0], lambda i: i.is_wait)
            problems += [f"a store before the wait: {i}" for i in early if i.is_store]
        return problems

    def may_flush(self, _: Instruction) -> bool:
        """A sigmoid may; that its product does not, `test_mla_value_gpu.py` shows."""
        return self.has_gate


def variants(module: ModuleType) -> list[Any]:
    """Every combination of flags that a kernel exists for."""
    if module is mla_query:
        combined = itertools.product(DTYPES, FLAGS, CACHES, FLAGS, FLAGS, mla_query.TILES)
    else:
        combined = itertools.product(DTYPES, *[FLAGS] * (2 if module is mla_norm else 5))
    found = itertools.starmap(module.Variant, combined)
    return [variant for variant in found if variant.is_valid()]


def instances(module: ModuleType) -> list[LayerInstance]:
    """Every variant with every candidate."""
    return [
        LayerInstance(
            config.name_expression(variant),
            max_registers=255,
            max_shared=RESERVED + 256,
            may_skip_the_wait=variant.weight_is_static,
            has_gate=getattr(variant, "gate", False),
        )
        for variant in variants(module)
        for config in module.CANDIDATES
    ]


KERNELS = {module.KERNEL: module for module in (mla_norm, mla_query, mla_value)}
FEW = 4
"""How many instances are looked at for each architecture, and for sm_90 beside all of bf16."""


@in_programs(sm_90=2, everything=4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_instance(kernel: str, arch: str, part: slice) -> None:
    """It compiles, nothing spills, and PDL is used in order, where there is such a thing."""
    module = KERNELS[kernel]
    every = instances(module)
    always = [i for i in every if arch == "sm_90" and "__nv_bfloat16" in i.name]
    wanted = dict.fromkeys((*always, *share_of(every, f"{kernel} for {arch}", FEW)))
    inspect(module.SOURCE, [*wanted][part], arch)


IMPOSSIBLE = [
    (mla_norm, mla_norm.MlaNormConfig(5), mla_norm.Variant("bfloat16")),
    (mla_query, mla_query.MlaQueryConfig(5, 0, 1), mla_query.Variant("bfloat16")),
    (mla_query, mla_query.MlaQueryConfig(8, 7, 1), mla_query.Variant("bfloat16")),
    (mla_value, mla_value.MlaValueConfig(12, 16, 8), mla_value.Variant("bfloat16")),
    (mla_value, mla_value.MlaValueConfig(8, 48, 8), mla_value.Variant("bfloat16")),
]


@pytest.mark.parametrize(("module", "config", "variant"), IMPOSSIBLE, ids=str)
def test_the_compiler_refuses_what_is_not_valid(
    module: ModuleType, config: Any, variant: Any
) -> None:
    """The static assertions of the kernels and `is_valid` agree."""
    assert not config.is_valid()
    with pytest.raises(CompileError):
        compile_cubin(module.SOURCE, [config.name_expression(variant)], "sm_90")


@needs_disassembler
@pytest.mark.parametrize("kernel", KERNELS)
def test_promised_weights_are_loaded_before_the_wait(kernel: str) -> None:
    """By 128 bits each, and nothing is when nobody promised."""
    module = KERNELS[kernel]
    kind = {"mla_norm": "norm", "mla_query": "16bit+same", "mla_value": mla_value.VALUE}[kernel]
    promised = module.Variant.of_kind(kind)
    names = [module.UNTUNED.name_expression(promised)]
    (code,) = code_of(module.SOURCE, names, "sm_90").values()
    early = [i for i in reached(code.program, [0], lambda i: i.is_wait) if i.is_load]
    assert early and all("128" in i.opcode for i in early), "weights are read in whole chunks"
