"""Every kernel in each of its forms, once: what `make sanitize` runs by itself.

Small, so that a tool which watches each access takes minutes. Outputs and inputs end where their
allocations end, and what lies between their rows nobody has written: a tool sees what is read or
written beside them. `test_sanitize.py` compares what runs here with the sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import helpers
import numpy as np
import oracle
import pytest
import torch
from gemm_helpers import assert_product, normal
from helpers import BF16, FP16
from mla_helpers import FORMS, Form
from mla_layer_helpers import LAYER_FORMS, in_one_launch
from toolchain_helpers import MAPPINGS

import k3cupy
from k3cupy.kernels import mla_norm, mla_query, mla_value
from k3cupy.kernels.mla_prefill import MANY_ROWS, MlaPrefillConfig
from k3cupy.runtime import devices, instances, launch
from k3cupy.runtime.instances import Instance

pytestmark = pytest.mark.gpu

Judge = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A call. `launch` makes its tensors on a device, calls, and returns what judges the result."""

    name: str
    launch: Callable[[str], Judge]


@pytest.fixture(autouse=True)
def no_guard_bands(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An access past the end of a tensor is one past the end of its allocation."""
    monkeypatch.setattr(helpers, "GUARD_BYTES", 0)
    yield


def in_unwritten(values: torch.Tensor, device: str, before: int, behind: int) -> torch.Tensor:
    """The values as columns of a wider tensor of whose other columns nobody has written any."""
    width = values.shape[-1]
    shape = (*values.shape[:-1], before + width + behind)
    part = torch.empty(shape, dtype=values.dtype, device=device)[..., before : before + width]
    return part.copy_(values)


LAYOUTS = {"packed": (0, 0), "aligned": (64, 8), "element-wise": (3, 2)}
"""Columns of a wider tensor before and behind a row of x."""


# GEMMs

BASE = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 2, 4, 1, 1, 2)
ONE_TILE = k3cupy.FusedAGemmConfig(8, 16, 256, 3, 2, 4, 1, 1, 1)
WARPGROUP = k3cupy.FusedAGemmConfig(64, 64, 128, 3, 2, 2, 4, 1, 2, "warpgroup")
WIDE_TOKENS = k3cupy.FusedAGemmConfig(64, 24, 64, 4, 3, 1, 4, 1, 2, "warpgroup_tokens")
FUSED_A = {
    "one-tile": ONE_TILE,
    "warps": BASE,
    "warps-split": replace(BASE, split_k=4, warps_n=2),
    "warps-mapped": replace(BASE, mapped_x=True),
    "warps-mapped-split": replace(BASE, mapped_x=True, split_k=2),
    "warpgroup": WARPGROUP,
    "warpgroup-split": replace(WARPGROUP, split_k=2),
    "warpgroup-mapped": replace(WARPGROUP, mapped_x=True),
    "tokens": WIDE_TOKENS,
    "tokens-split": replace(WIDE_TOKENS, tile_n=72, tile_k=128, split_k=2, warps_k=2),
    "tokens-mapped": replace(WIDE_TOKENS, mapped_x=True),
}


def gemm_case(
    name: str,
    run: Callable[..., Any],
    shape: tuple[int, int, int],
    layout: str,
    *,
    residual: bool,
    dtype: torch.dtype = BF16,
    **options: Any,
) -> Case:
    """A product of `shape`, which is (tokens, n, k)."""
    tokens, n, k = shape

    def call(device: str) -> Judge:
        x = in_unwritten(normal((tokens, k), 1, dtype=dtype), device, *LAYOUTS[layout])
        weight = normal((n, k), 2, dtype=dtype).to(device)
        added = None
        if residual:
            added = in_unwritten(normal((tokens, n), 3, dtype=dtype) * 20, device, 5, 8)
        out = run(x, weight, residual=added, **options)

        def judge() -> None:
            there = None if added is None else added.cpu()
            assert_product(out.cpu(), x.cpu(), weight.cpu(), there, options.get("out_dtype"))

        return judge

    ending = "-residual" if residual else ""
    return Case(f"{name}-{layout}{ending}", call)


def fused_a_cases() -> Iterator[Case]:
    """The rings go round, the last stage and the last tile are not full."""
    for name, config in FUSED_A.items():
        shape = (config.tile_m - 3, 100, 1104)
        for layout, static, residual in (
            ("packed", False, False),
            ("aligned", True, True),
            ("element-wise", False, True),
        ):
            if config.mapped_x and layout == "element-wise":
                continue
            options = {"config": config, "weight_is_static": static, "residual": residual}
            yield gemm_case(f"fused_a-{name}", k3cupy.fused_a_gemm, shape, layout, **options)
    for name in ("warps-split", "warps-mapped"):
        float32 = {"config": FUSED_A[name], "residual": True, "out_dtype": torch.float32}
        shape = (5, 100, 1104)
        yield gemm_case(f"fused_a-{name}-float32", k3cupy.fused_a_gemm, shape, "aligned", **float32)
    for tokens in (1, 20, 64):
        for invariant in (False, True):
            yield gemm_case(
                f"fused_a-chosen-{tokens}{'-invariant' * invariant}",
                k3cupy.fused_a_gemm,
                (tokens, 144, 512),
                "aligned",
                residual=tokens == 20,
                batch_invariant=invariant,
            )


def skinny_cases() -> Iterator[Case]:
    """Rows and outputs that fill no block; columns that end inside a round."""
    settings = (
        (1, 64, 2, 2, 8, BF16, "packed", False),
        (1, 96, 8, 1, 4, FP16, "element-wise", True),
        (3, 64, 5, 2, 8, BF16, "aligned", True),
        (4, 32, 3, 1, 8, FP16, "packed", True),
        (5, 128, 4, 2, 4, BF16, "element-wise", False),
        (8, 64, 8, 1, 8, BF16, "aligned", True),
        (8, 256, 7, 2, 8, FP16, "aligned", False),
    )
    for tokens, block, outputs, unroll, width, dtype, layout, residual in settings:
        yield gemm_case(
            f"skinny-{tokens}x{block}x{outputs}-{str(dtype)[6:]}",
            k3cupy.skinny_gemm,
            (tokens, 51, 1096),
            layout,
            residual=residual,
            dtype=dtype,
            config=k3cupy.SkinnyGemmConfig(tokens, block, outputs, unroll, width),
            weight_is_static=residual,
        )
    float32 = {"residual": True, "dtype": FP16, "out_dtype": torch.float32}
    for tokens, name in ((1, "skinny-float32"), (3, "skinny-mma-float32")):
        shape = tokens, 51, 1096
        yield gemm_case(name, k3cupy.skinny_gemm, shape, "aligned", **float32)


def skinny_mma_cases() -> Iterator[Case]:
    """The same with tensor cores; besides, K of whole steps of 32, one round, and clusters."""
    settings = (
        (1, 64, 8, 1, 1, BF16, "packed", False, 1096),
        (4, 96, 14, 2, 1, FP16, "element-wise", True, 1096),
        (8, 128, 16, 3, 2, BF16, "aligned", True, 1088),
        (9, 64, 20, 2, 4, FP16, "packed", False, 1096),
        (12, 96, 14, 2, 1, BF16, "aligned", True, 1096),
        (13, 512, 12, 3, 1, BF16, "element-wise", False, 1088),
        (16, 160, 27, 1, 8, FP16, "aligned", True, 1096),
    )
    for tokens, block, outputs, unroll, split, dtype, layout, residual, k in settings:
        yield gemm_case(
            f"skinny-mma-{tokens}x{block}x{outputs}-{str(dtype)[6:]}",
            k3cupy.skinny_gemm,
            (tokens, 51, k),
            layout,
            residual=residual,
            dtype=dtype,
            config=k3cupy.SkinnyGemmConfig(tokens, block, outputs, unroll, 8, "mma", split),
            weight_is_static=residual,
        )


# MLA epilogues

_PREFILL_CONFIGS = (MlaPrefillConfig(8, 1), MANY_ROWS, MlaPrefillConfig(16, 3))
_MORE_FORMS = (
    Form("decode-fp8-query", "decode", {"q_fp8": True}),
    Form("decode-fp16", "decode", {"dtype": FP16, "cache": "ds_mla"}),
    Form("fp8-fp16", "fp8", {"dtype": FP16}),
    Form("concat_fp8-codes", "concat_fp8", {"k_pe": oracle.E4M3}),
)


def mla_case(form: Form, tokens: int, *, rope: bool = False, off: int = 0, **options: Any) -> Case:
    """A call with rows in wider tensors, `off` columns from alignment."""

    def call(device: str) -> Judge:
        scales = {"scale_tensors": True} if form.scales else {}
        heads = 5 if tokens < 100 else 1
        made = form.make(tokens, heads, rope=rope, device=device, **scales)
        inputs = [name for name in form.inputs if name not in made.boxes]
        made = made.given(
            **{name: in_unwritten(made.args[name], device, 8 + off, 24) for name in inputs}
        )
        before = made.snapshot()
        result = made.run(**options)
        return lambda: made.check(before, result)

    words = [str(form), str(tokens), *["rope"] * rope, *["element-wise"] * bool(off)]
    words += [re.sub(r"\D+", "-", f"{value}").strip("-") or name for name, value in options.items()]
    return Case("-".join(words), call)


def mla_cases() -> Iterator[Case]:
    """Each format with each mapping, and each way of looking through the later slots."""
    for form in (*FORMS.values(), *_MORE_FORMS):
        configs = MAPPINGS if form.kind == "decode" else _PREFILL_CONFIGS
        for rope in (False, True)[: 1 + form.has_cache]:
            for config in configs:
                yield mla_case(form, 9, rope=rope, config=config)
            yield mla_case(form, 9, rope=rope, off=1)
        if form.kind == "decode":
            yield mla_case(form, 140, rope=True, kv_inputs_ready=True)
            yield mla_case(form, 300, rope=True)
        elif form.has_cache:
            yield mla_case(form, 300, rope=True)
            yield mla_case(form, 4100, rope=True)


# Around the epilogue


def layer_case(
    form: str, tokens: int, ending: str, *, off: int = 0, static: bool = False, **settings: Any
) -> Case:
    """A call whose first input lies in a wider tensor, `off` columns from alignment."""
    config = settings.pop("config", None)

    def call(device: str) -> Judge:
        is_query = form.startswith("query")
        more = {"scale_tensors": True} if is_query else {}
        one = in_one_launch(device) if is_query and tokens <= mla_query.MAX_TOKENS else None
        made = LAYER_FORMS[form].make(tokens, 2, device=device, **more, **settings)
        first = in_unwritten(made.first, device, 8 + off, 24)
        made = made.given(**{made.names_first: first})
        before = made.snapshot()
        result = made.run(weight_is_static=static, config=config or one)
        return lambda: made.check(before, result)

    return Case("-".join([form, str(tokens), *[ending] * bool(ending)]), call)


def layer_cases() -> Iterator[Case]:
    """Each format with each configuration, or with one; tiles that are not full."""
    for config in mla_norm.CANDIDATES:
        static = config.query_warps % 2 == 0
        yield layer_case("norm", 5, f"{config.query_warps}", static=static, config=config)
    yield layer_case("norm", 3, "element-wise", off=1, dtype=FP16)
    for form in ("query", "query-fp8", "query-uint8", "query-ds_mla"):
        for tokens, rope in ((5, False), (11, True)):
            yield layer_case(form, tokens, "rope" if rope else "", rope=rope, static=rope)
    yield layer_case("query-ds_mla", 3, "fp16", dtype=FP16, static=True)
    for i, query in enumerate(mla_query.CANDIDATES):
        yield layer_case("query", 7 + i, f"candidate-{i}", rope=True, config=query)
    yield layer_case("query", 17, "separate")
    for form in ("value", "value-gate", "value-packed", "value-packed-gate"):
        for tokens, static in ((5, False), (21, True)):
            yield layer_case(form, tokens, "static" if static else "", static=static)
        yield layer_case(form, 3, "element-wise", off=1, dtype=FP16)
    for i, value in enumerate(mla_value.CANDIDATES):
        form = "value-packed-gate" if i % 2 else "value-gate"
        yield layer_case(form, 9, f"candidate-{i}", config=value)


# What the tuner launches beside them


def chain_case(name: str) -> Case:
    """A neighbour of what is measured: it writes rows anew, or nothing."""

    def call(device: str) -> Judge:
        loaded = instances.load(Instance("tuning/chain.cu", f"k3cupy::{name}"), 0)
        pdl = devices.info(0).has_pdl
        queue = launch.make_launcher(0, loaded.kernel, grid=4, block=96, pdl=pdl)
        data, sink = normal((8 * 301,), 1).to(device), torch.zeros(1, dtype=torch.int32).to(device)
        target = torch.zeros(7, 8 * 43 + 64, dtype=BF16).to(device)
        rows, numbers = data.view(7, 8 * 43), [np.uint32(301), np.uint32(43)]
        arguments = {
            "write_rows": [*numbers, target.data_ptr(), 2 * target.stride(0)],
            "read_all": [data.numel() // 8, sink.data_ptr()],
        }.get(name.partition("<")[0])
        queue(0, [data.data_ptr(), *arguments] if arguments else [])

        def judge() -> None:
            assert sink.item() == 0
            wrote = name.startswith("write_rows")
            assert target[:, : 8 * 43].equal(rows if wrote else torch.zeros_like(rows))
            assert not target[:, 8 * 43 :].any()

        return judge

    return Case(f"chain-{name.replace('k3cupy::Trigger::', '')}", call)


CASES = (
    *fused_a_cases(),
    *skinny_cases(),
    *skinny_mma_cases(),
    *mla_cases(),
    *layer_cases(),
    chain_case("empty_kernel"),
    *(
        chain_case(f"{name}<k3cupy::Trigger::{trigger}>")
        for name in ("write_rows", "read_all")
        for trigger in ("kEnd", "kEarly", "kNone")
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel(case: Case) -> None:
    judge = case.launch("cuda")
    torch.cuda.synchronize()
    judge()
