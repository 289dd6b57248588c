"""The parameters that the host names are those of the CUDA sources: names, order and types."""

from __future__ import annotations

import itertools

import pytest
from cuda_signatures import Signature
from golden_recording import shipped_signatures

from k3cupy.call.launch import Parameters
from k3cupy.kernels import fused_a_gemm, mla_decode, mla_prefill, skinny_gemm

KERNELS = {
    "mla_decode_epilogue": (mla_decode.SOURCE, mla_decode.PARAMETERS),
    **{name: (mla_prefill.SOURCE, ours) for name, ours in mla_prefill.PARAMETERS.items()},
    "fused_a_gemm": (fused_a_gemm.SOURCE, fused_a_gemm.PARAMETERS),
    "fused_a_gemm_mapped_x": (fused_a_gemm.SOURCE, fused_a_gemm.MAPPED_PARAMETERS),
    "skinny_gemm": (skinny_gemm.SOURCE, skinny_gemm.PARAMETERS),
}
TYPES = {"unsigned int": "u32", "long long": "i64", "float": "f32"}


def kind_of(ctype: str) -> str:
    """What the host calls a C++ type."""
    if ctype.endswith("*"):
        return "pointer"
    if ctype.endswith("TensorMap"):
        return "map"
    return TYPES.get(ctype, "stride")


def differs(kernel: Signature, ours: Parameters) -> bool:
    return [(p.name, kind_of(p.ctype)) for p in kernel.parameters] != list(ours.types.items())


@pytest.mark.parametrize("name", KERNELS)
def test_the_host_names_the_parameters_of_the_source(name: str) -> None:
    source, ours = KERNELS[name]
    kernel = shipped_signatures(source)[name]
    assert not differs(kernel, ours)
    strides = {p.ctype for p in kernel.parameters if kind_of(p.ctype) == "stride"}
    assert strides <= {"typename StrideOf<kVector>::Type"}, "a type that the host does not know"


@pytest.mark.parametrize("name", KERNELS)
def test_any_two_swapped_parameters_are_seen(name: str) -> None:
    source, ours = KERNELS[name]
    kernel = shipped_signatures(source)[name]
    for pair in itertools.combinations(range(len(kernel.parameters)), 2):
        assert differs(kernel.swapped(*pair), ours), pair


def test_every_kernel_of_the_sources_is_named() -> None:
    sources = {source for source, _ in KERNELS.values()}
    assert {name for source in sources for name in shipped_signatures(source)} == set(KERNELS)
