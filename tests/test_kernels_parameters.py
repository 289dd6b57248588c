"""The parameters that the host names are those of the CUDA sources: names, order and types."""

from __future__ import annotations

import itertools
import re
from dataclasses import astuple, fields, replace
from typing import Any

import numpy as np
import pytest
from cuda_signatures import Signature
from golden_recording import shipped_signatures

from k3cupy.accept import checks
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


MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("mla_decode", {"split": 2}, "split 0, 1 or 3"),
    ("mla_decode", {"chunks_per_thread": 3}, "chunks_per_thread 1, 2 or 4 with split 0"),
    ("mla_decode", {"split": 1}, "chunks_per_thread 3 or 6 with split 1, 1 with split 3"),
    ("mla_prefill", {"heads_per_task": 5}, "heads_per_task 1, 2, 3, 4 or 6"),
    ("mla_norm", {"query_warps": 6.0}, "query_warps of type int"),
    ("mla_query", {"shared_steps": 7}, "shared_steps 0 to 48 / warps"),
    ("mla_value", {"warps": 2}, "warps 4 or 8"),
    ("fused_a", {"tile_m": 24}, "tile_m 8, 16, 32, 48 or 64"),
    ("fused_a", {"mapped_x": 0}, "mapped_x of type bool"),
    ("fused_a", {"copy_warps": 16}, "block_size at most 1024 threads, of all warps, not 1152"),
    ("fused_a", {"product": "warpgroup"}, "warps_n a multiple of 4 for products of a warpgroup"),
    ("skinny", {"product": "dot"}, "product 'fma' or 'mma'"),
    ("skinny", {"split_k": 2, "vector_width": 0}, "vector_width 4 or 8"),
    (
        "skinny",
        {"product": "mma", "num_rows": 16, "block_size": 512, "outputs_per_block": 56},
        "shared_bytes at most 49152, not 57344",
    ),
]


@pytest.mark.parametrize(("name", "change", "told"), MISFITS, ids=str)
def test_the_first_number_that_does_not_fit_is_told(
    name: str, change: dict[str, Any], told: str
) -> None:
    wrong = replace(CONFIGS[name], **change)
    with pytest.raises(
        ValueError, match=f"^config: expected {re.escape(f'{told}, got {wrong!r}')}$"
    ):
        checks.check_config(wrong, MODULES[name].Config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_whatever_is_not_valid_has_a_number_that_does_not_fit(config: Any) -> None:
    """Also where several are wrong at once, and of numbers that divide nothing."""
    odd: Any = {"int": (-8, 0, 1, 3, 64, 4096), "str": ("warpgroup", "mma", "?"), "bool": (True,)}
    names = [(field.name, odd[field.type]) for field in fields(config)]
    for (one, ones), (other, others) in itertools.combinations_with_replacement(names, 2):
        for values in itertools.product(ones, others):
            changed = replace(config, **dict(zip((one, other), values, strict=True)))
            assert (changed.misfit() is None) == changed.is_valid(), changed
