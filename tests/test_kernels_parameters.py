"""The parameters that the host names are those of the CUDA sources: names, order and types."""

from __future__ import annotations

import itertools
from dataclasses import astuple, fields, replace
from typing import Any

import numpy as np
import pytest
from cuda_signatures import Signature
from golden_recording import shipped_signatures

from k3cupy.call.launch import Parameters
from k3cupy.choose.table import KERNELS as MODULES
from k3cupy.kernels import (
    fused_a_gemm,
    mla_decode,
    mla_norm,
    mla_prefill,
    mla_query,
    mla_value,
    skinny_gemm,
)

KERNELS = {
    "mla_decode_epilogue": (mla_decode.SOURCE, mla_decode.PARAMETERS),
    **{name: (mla_prefill.SOURCE, ours) for name, ours in mla_prefill.PARAMETERS.items()},
    "q_kv_rms_norms": (mla_norm.SOURCE, mla_norm.PARAMETERS),
    "mla_decode_query": (mla_query.SOURCE, mla_query.PARAMETERS),
    "head_product": (mla_value.SOURCE, mla_value.PARAMETERS),
    "fused_a_gemm": (fused_a_gemm.SOURCE, fused_a_gemm.PARAMETERS),
    "fused_a_gemm_mapped_x": (fused_a_gemm.SOURCE, fused_a_gemm.MAPPED_PARAMETERS),
    "skinny_gemm": (skinny_gemm.SOURCE, skinny_gemm.PARAMETERS),
    "skinny_gemm_mma": (skinny_gemm.SOURCE, skinny_gemm.MMA_PARAMETERS),
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


# Configurations

CONFIGS: dict[str, Any] = {
    "mla_decode": mla_decode.UNTUNED,
    "mla_prefill": mla_prefill.MANY_ROWS,
    "mla_norm": mla_norm.UNTUNED,
    "mla_query": mla_query.UNTUNED,
    "mla_value": mla_value.UNTUNED,
    "fused_a": fused_a_gemm.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2),
    "skinny": skinny_gemm.SkinnyGemmConfig(1, 32, 1, 1, 8),
}


def test_every_kernel_has_a_configuration_here() -> None:
    assert {name: type(config) for name, config in CONFIGS.items()} == {
        name: module.Config for name, module in MODULES.items()
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_field_of_another_type_is_not_valid(config: Any) -> None:
    """Floats and bools are equal to integers, and no numbers of a kernel."""
    assert config.is_valid()
    for field in fields(config):
        value = getattr(config, field.name)
        equal = [float(value), str(value)] if field.type == "int" else [str(value).encode(), None]
        equal += [bool(value)] if value in (0, 1) and field.type == "int" else []
        equal += [int(value), np.bool_(value)] if field.type == "bool" else []
        for wrong in equal:
            changed = replace(config, **{field.name: wrong})
            assert not changed.is_valid(), changed
            assert not replace(changed).is_valid(), changed
            assert replace(changed, **{field.name: value}).is_valid()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_class_of_ones_own_inherits_the_fields(config: Any) -> None:
    own = type("Own", (type(config),), {})
    assert own(*astuple(config)).is_valid()
    assert not own(*map(str, astuple(config))).is_valid()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_case42_integers_of_numpy_are_integers(config: Any) -> None:
    for kind in (np.int64, np.int32, np.uint16):
        values = [kind(v) if type(v) is int else v for v in astuple(config)]
        same = type(config)(*values)
        assert same.is_valid()
        assert same == config and hash(same) == hash(config) and repr(same) == repr(config)
