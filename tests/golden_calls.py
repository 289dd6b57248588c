"""The calls whose launches are kept in ``goldens/``, a file an operation and a line a call.

What a call launches may change only on purpose. Then record anew, look at what changed line by
line, and say why in the commit::

    python tests/golden_calls.py --record

"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import A100, B200, GB300, GPUS, H100, H200, RTX_4090, RTX_5090, FakeDevice
from golden_layer_calls import LAYER_OPERATIONS, layer_calls
from golden_query_calls import QUERY, query_calls
from golden_recording import GoldenCall, Shipped, Tensors, Twice, described, record_twice

import k3cupy

FOLDER = Path(__file__).parent / "goldens"
DECODE_CONFIG = "config"
"""How the decode epilogue calls its configuration."""

BF16, FP16, E4M3, U8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8
I64, I32, F32 = torch.int64, torch.int32, torch.float32
OTHER_STREAM = 99
Make = Callable[[Tensors], dict[str, Any]]

DECODE = "fused_mla_decode_q_concat_kv_cache_insert"
KEY_CONCAT = "fused_mla_key_concat_kv_cache_insert"
KEY_CONCAT_DS_MLA = "fused_mla_key_concat_ds_mla_insert"
QKV_QUANT = "fused_mla_qkv_quant_kv_cache_fp8_insert"
KV_CONCAT = "fused_mla_kv_concat"
KV_CONCAT_QUANT = "fused_mla_kv_concat_quant_fp8"
PREFILLS = (KEY_CONCAT, KEY_CONCAT_DS_MLA, QKV_QUANT, KV_CONCAT, KV_CONCAT_QUANT)
INSERTS = PREFILLS[:3]
OPERATIONS = (
    DECODE,
    *PREFILLS,
    *LAYER_OPERATIONS,
    QUERY,
    "fused_a_gemm",
    "dsv3_fused_a_gemm",
    "skinny_gemm",
    "try_low_latency_gemm",
    "low_latency_linear",
)


def calls() -> list[GoldenCall]:
    """Every call, each with a key of its own."""
    found = [
        *_decode_calls(),
        *_prefill_calls(),
        *layer_calls(),
        *query_calls(),
        *_fused_a_calls(),
        *_dsv3_calls(),
        *_skinny_calls(),
        *_linear_calls(),
    ]
    keys = [(call.operation, call.key) for call in found]
    assert len(keys) == len(set(keys)), "two calls of one name"
    return found


def record_all() -> list[tuple[GoldenCall, Twice]]:
    """Run every call twice on GPUs that are none."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        device = FakeDevice(patch)
        found = [(c, record_twice(device, getattr(k3cupy, c.operation), c)) for c in calls()]
    k3cupy.reset_dispatch_report()
    return found


def goldens(operation: str) -> dict[str, Any]:
    """The goldens of an operation, by the keys of its calls."""
    found: dict[str, Any] = json.loads((FOLDER / f"{operation}.json").read_text(encoding="utf-8"))
    return found


# --- The decode epilogue --------------------------------------------------------------------------


def _decode(
    tokens: int = 4,
    heads: int = 12,
    *,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | str = "same",
    q_scale: float | str | None = None,
    cache_scale: float | str | None = None,
    rope: torch.dtype | None = None,
    slots: torch.dtype = I64,
    slot_stride: int = 1,
    paging: tuple[int, int] = (300, 64),
    out: torch.dtype | None = None,
    config: tuple[int, int, int] | None = None,
    tensors: Make = lambda _: {},
    **options: Any,
) -> Make:
    """A call; scales are numbers, or ``"tensor"``; ``tensors`` replaces some by others."""

    def make(tensor: Tensors) -> dict[str, Any]:
        width, kind = {"same": (576, dtype), "ds_mla": (656, U8)}.get(cache, (576, cache))
        found = {
            "ql_nope": tensor(tokens, heads, 512, dtype=dtype),
            "q_pe": tensor(tokens, heads, 64, dtype=dtype),
            "kv_c_normed": tensor(tokens, 512, dtype=dtype),
            "k_pe": tensor(tokens, 64, dtype=dtype),
            "kv_cache": tensor(*paging, width, dtype=kind),
            "slot_mapping": tensor(tokens, dtype=slots, strides=(slot_stride,)),
        }
        if cache == "ds_mla":
            found["ds_mla"] = True
        for name, scale in (("q_scale_inv", q_scale), ("cache_scale_inv", cache_scale)):
            if scale is not None:
                found[name] = tensor(1, dtype=F32) if scale == "tensor" else scale
        if rope is not None:
            found["positions"] = tensor(tokens, dtype=rope)
            found["cos_sin_cache"] = tensor(8192, 64, dtype=F32)
        if out is not None:
            found["out"] = tensor(tokens, heads, 576, dtype=out)
        if config is not None:
            found[DECODE_CONFIG] = k3cupy.MlaDecodeConfig(*config)
        return {**found, **tensors(tensor), **options}

    return make


FP8 = {"cache": E4M3, "q_scale": 0.75, "cache_scale": 1.5}
FP8_CACHE = {"cache": E4M3, "cache_scale": 1.5}
DS_MLA = {"cache": "ds_mla"}


def _decode_calls() -> Iterator[GoldenCall]:
    def call(name: str, make: Make, gpu: Any = H200) -> GoldenCall:
        return GoldenCall(DECODE, name, gpu, make)

    for tokens, heads in itertools.product((1, 4, 16, 64, 512, 5000), (12, 96)):
        yield call(f"T={tokens} H={heads}", _decode(tokens, heads))
    for tokens, heads in itertools.product((4, 512), (1, 24)):
        yield call(f"T={tokens} H={heads}", _decode(tokens, heads))
    for tokens in (1, 4, 16, 64, 512, 5000):
        yield call(f"T={tokens} fp8 query and cache", _decode(tokens, **FP8))
        yield call(f"T={tokens} fp8 cache", _decode(tokens, **FP8_CACHE))
        yield call(f"T={tokens} ds_mla", _decode(tokens, **DS_MLA))
    for gpu, tokens in itertools.product(GPUS[1:], (4, 64, 512)):
        yield call(f"T={tokens} H=24", _decode(tokens, 24), gpu)
        yield call(f"T={tokens} fp8 query and cache", _decode(tokens, **FP8), gpu)
    for gpu in GPUS[1:]:
        yield call("T=16 ds_mla rope", _decode(16, rope=I64, **DS_MLA), gpu)
    for config in ((0, 288, 1), (1, 256, 3), (3, 256, 1), (0, 144, 4), (1, 64, 3), (3, 96, 1)):
        yield call(f"T=30 config {config}", _decode(30, config=config))
        yield call(f"T=30 fp8 config {config}", _decode(30, 24, config=config, **FP8))
    both, tensor_scale = {"rope": I64}, {"q_scale": "tensor", "cache_scale": "tensor"}
    for name, make in {
        "no tokens": _decode(0),
        "fp16": _decode(dtype=FP16),
        "fp16 ds_mla rope": _decode(dtype=FP16, rope=I64, **DS_MLA),
        "fp16 fp8 rope": _decode(dtype=FP16, rope=I64, **FP8),
        "rope": _decode(9, **both),
        "rope, int32 positions": _decode(9, rope=I32),
        "rope, 5000 tokens, all formats fp8": _decode(5000, **both, **{**FP8, **tensor_scale}),
        "rope, positions and table strided": _decode(
            9,
            rope=I64,
            tensors=lambda t: {
                "positions": t(9, dtype=I64, strides=(3,)),
                "cos_sin_cache": t(100, 64, dtype=F32, strides=(80, 1)),
            },
        ),
        "fp8 query alone": _decode(q_scale=0.5),
        "fp8 query alone, scale a tensor": _decode(q_scale="tensor"),
        "scales as tensors": _decode(**{**FP8, **tensor_scale}),
        "one scale a tensor": _decode(cache=E4M3, q_scale=0.25, cache_scale="tensor"),
        "the other scale a tensor": _decode(cache=U8, q_scale="tensor", cache_scale=0.125),
        "cache of bytes": _decode(cache=U8, cache_scale=2.0),
        "kv_inputs_ready": _decode(16, kv_inputs_ready=True),
        "kv_inputs_ready fp8 rope": _decode(16, kv_inputs_ready=True, **both, **FP8),
        "kv_inputs_ready, in slices": _decode(5000, kv_inputs_ready=True),
        "4096 tokens are one launch": _decode(4096),
        "4097 tokens are two": _decode(4097, 24, slots=I32, slot_stride=2, **DS_MLA),
        "9000 tokens are three": _decode(9000, 1, **both, **FP8),
        "int32 slots": _decode(16, slots=I32),
        "slots with a stride": _decode(16, slot_stride=5),
        "more slots than tokens": _decode(16, tensors=lambda t: {"slot_mapping": t(40, dtype=I32)}),
        "out given": _decode(16, out=BF16),
        "out given, bytes": _decode(16, out=U8, **FP8),
        "out given, in slices": _decode(5000, out=BF16),
        "pdl off": _decode(16, pdl=False),
        "another stream": _decode(16, stream=OTHER_STREAM),
        "another stream, out given, scales as tensors": _decode(
            16, stream=OTHER_STREAM, out=E4M3, **both, **{**FP8, **tensor_scale}
        ),
        "k_pe of three axes": _decode(7, tensors=lambda t: {"k_pe": t(7, 1, 64)}),
        "blocks of one token": _decode(16, paging=(500, 1)),
        "blocks of 100 tokens": _decode(16, paging=(7, 100)),
        "cache with gaps": _decode(
            16,
            tensors=lambda t: {"kv_cache": t(9, 32, 576, strides=(32 * 640 + 64, 640, 1))},
        ),
        "ds_mla cache with gaps": _decode(
            16,
            cache="ds_mla",
            tensors=lambda t: {"kv_cache": t(9, 32, 656, dtype=U8, strides=(22528, 704, 1))},
        ),
        "query by heads": _decode(
            16, tensors=lambda t: {"ql_nope": t(16, 12, 512, strides=(512, 16 * 512, 1))}
        ),
        "rows of a wider tensor": _decode(16, tensors=functools.partial(_latent_slices, 16)),
        "rows of a wider tensor, in slices": _decode(
            5000, tensors=functools.partial(_latent_slices, 5000)
        ),
        "query of a wider tensor": _decode(16, tensors=functools.partial(_query_slices, 16)),
        "query of a wider tensor, in slices": _decode(
            5000, tensors=functools.partial(_query_slices, 5000), **FP8
        ),
        "element by element, address": _decode(
            16, tensors=lambda t: {"q_pe": t(16, 12, 64, offset=1)}
        ),
        "element by element, stride": _decode(
            16, tensors=lambda t: {"kv_c_normed": t(16, 512, strides=(515, 1))}
        ),
        "element by element, fp8 rope": _decode(
            16, tensors=lambda t: {"k_pe": t(16, 64, strides=(65, 1))}, **both, **FP8
        ),
        "element by element, ds_mla": _decode(
            16, tensors=lambda t: {"ql_nope": t(16, 12, 512, offset=3)}, **DS_MLA
        ),
        "element by element, in slices": _decode(
            5000, tensors=lambda t: {"kv_c_normed": t(5000, 512, strides=(513, 1))}
        ),
        "element by element, config": _decode(
            16, config=(1, 128, 3), tensors=lambda t: {"k_pe": t(16, 64, offset=2)}
        ),
        "one token with any strides": _decode(
            1,
            1,
            tensors=lambda t: {
                "ql_nope": t(1, 1, 512, strides=(3, 5, 1)),
                "kv_c_normed": t(1, 512, strides=(7, 1)),
            },
        ),
    }.items():
        yield call(name, make)
    for gpu in (A100, RTX_5090):
        yield call("pdl on", _decode(16, pdl=True), gpu)
        yield call("in slices", _decode(5000, 96, **FP8_CACHE), gpu)


def _latent_slices(tokens: int, tensor: Tensors) -> dict[str, Any]:
    wide = tensor(tokens, 2112)
    return {
        "kv_c_normed": tensor.columns(wide, 1536, 2048),
        "k_pe": tensor.columns(wide, 2048, 2112),
    }


def _query_slices(tokens: int, tensor: Tensors) -> dict[str, Any]:
    wide = tensor(tokens, 12, 640)
    return {"ql_nope": tensor.columns(wide, 0, 512), "q_pe": tensor.columns(wide, 512, 576)}


# --- The prefill and context epilogues -----------------------------------------------------------

_OUTPUTS = {
    KEY_CONCAT: (192,),
    KEY_CONCAT_DS_MLA: (192,),
    QKV_QUANT: (192, 192, 128),
    KV_CONCAT: (192,),
    KV_CONCAT_QUANT: (192, 128),
}
_SCALES = {"q_scale_inv": 0.5, "k_scale_inv": 0.75, "v_scale_inv": 1.25, "cache_scale_inv": 1.5}


def _prefill(
    operation: str,
    tokens: int = 16,
    heads: int = 12,
    *,
    dtype: torch.dtype = BF16,
    rope: torch.dtype | None = None,
    slots: torch.dtype = I64,
    slot_stride: int = 1,
    paging: tuple[int, int] = (100, 64),
    tensor_scales: Iterable[str] = (),
    out: torch.dtype | None = None,
    config: tuple[int, int] | None = None,
    tensors: Make = lambda _: {},
    **options: Any,
) -> Make:
    def make(tensor: Tensors) -> dict[str, Any]:
        kv = tensor(tokens, heads, 256, dtype=dtype)
        found: dict[str, Any] = {}
        if operation in INSERTS:
            found["q"] = tensor(tokens, heads, 192, dtype=dtype)
        found["k_nope"] = tensor.columns(kv, 0, 128)
        found["k_pe"] = tensor(tokens, 64, dtype=dtype)
        if operation in INSERTS:
            cache = {KEY_CONCAT: dtype, KEY_CONCAT_DS_MLA: U8, QKV_QUANT: E4M3}[operation]
            width = 656 if operation == KEY_CONCAT_DS_MLA else 576
            found["kv_c_normed"] = tensor(tokens, 512, dtype=dtype)
            found["kv_cache"] = tensor(*paging, width, dtype=cache)
            found["slot_mapping"] = tensor(tokens, dtype=slots, strides=(slot_stride,))
        if operation in (QKV_QUANT, KV_CONCAT_QUANT):
            found["v"] = tensor.columns(kv, 128, 256)
        if operation == QKV_QUANT:
            for name, number in _SCALES.items():
                found[name] = tensor(1, dtype=F32) if name in tensor_scales else number
        if rope is not None:
            found["positions"] = tensor(tokens, dtype=rope)
            found["cos_sin_cache"] = tensor(8192, 64, dtype=F32)
        if out is not None:
            outs = tuple(tensor(tokens, heads, w, dtype=out) for w in _OUTPUTS[operation])
            found["out"] = outs if len(outs) > 1 else outs[0]
        if config is not None:
            found["config"] = k3cupy.MlaPrefillConfig(*config)
        return {**found, **tensors(tensor), **options}

    return make


def _prefill_calls() -> Iterator[GoldenCall]:
    for operation in PREFILLS:

        def call(name: str, gpu: Any = H200, *, op: str = operation, **given: Any) -> GoldenCall:
            return GoldenCall(op, name, gpu, _prefill(op, **given))

        inserts = operation in INSERTS
        fp8 = operation in (QKV_QUANT, KV_CONCAT_QUANT)
        for tokens in (1, 16, 256, 257, 4096):
            yield call(f"T={tokens}", tokens=tokens)
        for tokens, heads in ((1, 1), (300, 7), (64, 96)):
            yield call(f"T={tokens} H={heads}", tokens=tokens, heads=heads)
        for gpu in GPUS[1:]:
            yield call("T=64", gpu, tokens=64)
            yield call("T=2048 H=24", gpu, tokens=2048, heads=24)
        yield call("no tokens", tokens=0)
        yield call("fp16", dtype=FP16)
        yield call("out given", out=E4M3 if fp8 else BF16)
        yield call("another stream", stream=OTHER_STREAM)
        yield call("another stream, out given", stream=OTHER_STREAM, out=U8 if fp8 else BF16)
        yield call("pdl off", pdl=False)
        yield call("pdl on", A100, pdl=True)
        for config in ((8, 6), (16, 1)):
            yield call(f"config {config}", tokens=100, config=config)
        yield call("k_pe of three axes", tensors=lambda t: {"k_pe": t(16, 1, 64)})
        yield call(
            "keys packed, k_pe with a stride",
            tensors=lambda t: {
                "k_nope": t(16, 12, 128),
                "k_pe": t.columns(t(16, 2112), 2048, 2112),
            },
        )
        yield call(
            "keys by heads",
            tensors=lambda t: {"k_nope": t(16, 12, 128, strides=(128, 16 * 136, 1))},
        )
        yield call("element by element, address", tensors=lambda t: {"k_pe": t(16, 64, offset=1)})
        yield call(
            "element by element, stride",
            tensors=lambda t: {"k_nope": t(16, 12, 128, strides=(12 * 131, 131, 1))},
        )
        if fp8:
            yield call(
                "values packed", tensors=lambda t: {"v": t(16, 12, 128, strides=(1536, 128, 1))}
            )
        if inserts:
            yield call("rope", tokens=257, rope=I64)
            yield call("rope, int32", rope=I32, slots=I32)
            yield call("rope fp16", rope=I64, dtype=FP16)
            yield call("rope", B200, tokens=1000, heads=24, rope=I64)
            yield call(
                "rope, positions and table strided",
                rope=I64,
                tensors=lambda t: {
                    "positions": t(16, dtype=I64, strides=(3,)),
                    "cos_sin_cache": t(100, 64, dtype=F32, strides=(80, 1)),
                },
            )
            yield call(
                "rope, query of a wider tensor",
                rope=I64,
                tensors=lambda t: {"q": t(16, 12, 192, strides=(12 * 256, 256, 1))},
            )
            yield call(
                "rope, element by element",
                rope=I64,
                tensors=lambda t: {"q": t(16, 12, 192, offset=1)},
            )
            yield call(
                "query off alignment, no rope", tensors=lambda t: {"q": t(16, 12, 192, offset=1)}
            )
            yield call("int32 slots with a stride", tokens=300, slots=I32, slot_stride=3)
            yield call(
                "more slots than tokens", tensors=lambda t: {"slot_mapping": t(40, dtype=I64)}
            )
            yield call("blocks of one token", paging=(500, 1))
            yield call("blocks of 100 tokens", paging=(7, 100))
            yield call(
                "latent rows of a wider tensor",
                tensors=lambda t: {"kv_c_normed": t.columns(t(16, 2112), 1536, 2048)},
            )
        if operation == KEY_CONCAT:
            yield call(
                "cache with gaps",
                tensors=lambda t: {"kv_cache": t(9, 32, 576, strides=(32 * 640 + 64, 640, 1))},
            )
        if operation == QKV_QUANT:
            for name in _SCALES:
                yield call(f"{name} a tensor", tensor_scales=(name,))
            yield call("scales as tensors, rope", tensor_scales=tuple(_SCALES), rope=I64)
            yield call("cache of bytes", tensors=lambda t: {"kv_cache": t(9, 32, 576, dtype=U8)})
        if operation == KV_CONCAT_QUANT:
            for kind in (E4M3, U8):
                yield call(
                    f"k_pe of {kind}", tensors=lambda t, kind=kind: {"k_pe": t(16, 64, dtype=kind)}
                )


# --- The GEMMs ----------------------------------------------------------------------------------


def _gemm(
    tokens: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = BF16,
    row: tuple[int, int] | None = None,
    residual: int | None = None,
    out: int | None = None,
    in_place: bool = False,
    **options: Any,
) -> Make:
    """A product.

    Args:
        tokens: M.
        n: N.
        k: K.
        dtype: of all tensors.
        row: of x: (elements between rows, offset); None for packed.
        residual: elements between rows of the residual; None for none.
        out: the same of the output; None for a new one.
        in_place: the residual is the output, too.
        options: everything else.
    """

    def make(tensor: Tensors) -> dict[str, Any]:
        stride, offset = row or (k, 0)
        found = {
            "x": tensor(tokens, k, dtype=dtype, strides=(stride, 1), offset=offset),
            "weight": tensor(n, k, dtype=dtype),
        }
        if residual is not None:
            found["residual"] = tensor(tokens, n, dtype=dtype, strides=(residual, 1))
        if out is not None:
            kind = options.get("out_dtype") or dtype
            found["out"] = tensor(tokens, n, dtype=kind, strides=(out, 1), offset=8)
        if in_place:
            found["out"] = found["residual"]
        return {**found, **options}

    return make


_WARPS = k3cupy.FusedAGemmConfig(16, 32, 128, 8, 2, 4, 1, 1, 2)
_SPLIT = k3cupy.FusedAGemmConfig(16, 32, 128, 8, 2, 4, 1, 4, 2)
_FEWER_ROWS = k3cupy.FusedAGemmConfig(16, 32, 128, 8, 2, 4, 1, 1, 2, block_rows=27)
_MAPPED = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 3, 4, 1, 1, 2, mapped_x=True)
_SPLIT_MAPPED = k3cupy.FusedAGemmConfig(16, 32, 128, 4, 3, 4, 1, 2, 2, mapped_x=True)
_WARPGROUPS = k3cupy.FusedAGemmConfig(64, 64, 128, 4, 3, 1, 4, 1, 2, "warpgroup")
_WIDE_TOKENS = k3cupy.FusedAGemmConfig(
    64, 64, 128, 4, 3, 1, 4, 2, 2, "warpgroup_tokens", mapped_x=True
)
_CONFIGS = {
    "warps": _WARPS,
    "split": _SPLIT,
    "fewer rows": _FEWER_ROWS,
    "mapped": _MAPPED,
    "split, mapped": _SPLIT_MAPPED,
    "warpgroups": _WARPGROUPS,
    "tokens as the wide side": _WIDE_TOKENS,
}


def _fused_a_calls() -> Iterator[GoldenCall]:
    def call(name: str, *shape: int, gpu: Any = H200, **given: Any) -> GoldenCall:
        return GoldenCall("fused_a_gemm", name, gpu, _gemm(*shape, **given))

    shapes = ((2112, 7168), (1536, 128), (2304, 1536), (7168, 768), (6288, 7168))
    for tokens, (n, k) in itertools.product((1, 4, 16, 32, 64), shapes):
        yield call(f"{n} x {k}, M={tokens}", tokens, n, k)
    for tokens, (n, k) in itertools.product((2, 40), ((2112, 7168), (7168, 768))):
        yield call(f"{n} x {k}, M={tokens}, residual", tokens, n, k, residual=n)
    for gpu, tokens in itertools.product(GPUS[1:], (1, 16, 64)):
        yield call(f"2112 x 7168, M={tokens}", tokens, 2112, 7168, gpu=gpu)
    for gpu in GPUS[1:]:
        yield call("7168 x 768, M=64, residual", 64, 7168, 768, gpu=gpu, residual=7168)
    for n, k in ((100, 16), (1, 48), (333, 272), (5000, 2064), (4096, 4096)):
        for tokens in (1, 9, 64):
            yield call(f"unlisted {n} x {k}, M={tokens}", tokens, n, k)
    for tokens in (1, 7, 64):
        yield call(
            f"f_b_proj, a slice, M={tokens}", tokens, 1536, 128, row=(6288, 6144), residual=1536
        )
        yield call(f"q_b_proj, a slice, M={tokens}", tokens, 2304, 1536, row=(2112, 0))
        yield call(f"element by element, stride, M={tokens}", tokens, 2112, 7168, row=(7171, 0))
        yield call(f"element by element, address, M={tokens}", tokens, 1536, 128, row=(128, 1))
        yield call(f"batch-invariant, M={tokens}", tokens, 2112, 7168, batch_invariant=True)
        yield call(
            f"batch-invariant, residual, M={tokens}",
            *(tokens, 7168, 768),
            residual=7168,
            batch_invariant=True,
        )
    plain = (9, 100, 128)
    yield call("no tokens", 0, 100, 128)
    yield call("one row of any stride", 1, 100, 128, row=(2**40, 0))
    yield call("rows that overlap", 9, 100, 128, row=(64, 0))
    yield call("static weight", *plain, weight_is_static=True)
    yield call("pdl off", *plain, pdl=False)
    yield call("pdl on", *plain, pdl=True, gpu=A100)
    yield call("another stream", *plain, stream=OTHER_STREAM, residual=100)
    yield call("another stream, out given", *plain, stream=OTHER_STREAM, out=100)
    yield call("out given", *plain, out=100)
    yield call("out with a row stride", *plain, out=160)
    yield call("residual with a row stride", *plain, residual=107)
    yield call("residual of one row", 1, 100, 128, residual=107, out=160)
    yield call("in place", *plain, residual=160, in_place=True)
    yield call("in place, 64 rows", 64, 7168, 768, residual=7168, in_place=True)
    for name, config in _CONFIGS.items():
        yield call(f"config, {name}", 9, 200, 512, config=config)
        yield call(f"config, {name}, a slice", 16, 200, 512, config=config, row=(640, 64))
        yield call(f"config, {name}, K=272", 16, 200, 272, config=config, residual=207, out=240)
        yield call(f"config, {name}, one row", 1, 200, 512, config=config, row=(3, 0))
        yield call(f"config, {name}, element by element", 5, 200, 512, config=config, row=(515, 0))
    yield call("float32", *plain, out_dtype=F32, residual=107)
    yield call("config, mapped, rows that overlap", 9, 200, 512, config=_MAPPED, row=(64, 0))
    for gpu in (A100, RTX_4090, RTX_5090):
        yield call("config, warps", 9, 200, 512, config=_WARPS, gpu=gpu)
    for gpu in (H100, B200, GB300):
        yield call("config, split, mapped", 9, 200, 512, config=_SPLIT_MAPPED, gpu=gpu)


def _dsv3(tokens: int, n: int, k: int, *, width: int | None = None, **options: Any) -> Make:
    def make(tensor: Tensors) -> dict[str, Any]:
        return {
            "output": tensor(tokens, n, strides=(width or n, 1)),
            "mat_a": tensor(tokens, k),
            "mat_b": tensor.transposed(tensor(n, k)),
            **options,
        }

    return make


def _dsv3_calls() -> Iterator[GoldenCall]:
    def call(name: str, make: Make, gpu: Any = H200) -> GoldenCall:
        return GoldenCall("dsv3_fused_a_gemm", name, gpu, make)

    for tokens, pdl in itertools.product((1, 16, 64), (False, True)):
        yield call(f"2112 x 7168, M={tokens}, pdl {pdl}", _dsv3(tokens, 2112, 7168, enable_pdl=pdl))
    yield call("output with a row stride", _dsv3(5, 1536, 128, width=1600))
    yield call("no tokens", _dsv3(0, 1536, 128))
    for gpu in (A100, B200, RTX_5090):
        yield call("2304 x 1536, M=8, pdl", _dsv3(8, 2304, 1536, enable_pdl=True), gpu)


def _skinny_calls() -> Iterator[GoldenCall]:
    def call(name: str, *shape: int, gpu: Any = H200, **given: Any) -> GoldenCall:
        return GoldenCall("skinny_gemm", name, gpu, _gemm(*shape, **given))

    for tokens in range(1, 9):
        yield call(f"2112 x 7168, M={tokens}", tokens, 2112, 7168)
    for tokens, (n, k) in itertools.product((1, 5), ((1536, 128), (7168, 768), (6288, 7168))):
        yield call(f"{n} x {k}, M={tokens}", tokens, n, k, residual=n)
        yield call(f"fp16 {n} x {k}, M={tokens}", tokens, n, k, dtype=FP16)
    for gpu, tokens in itertools.product(GPUS[1:], (1, 8)):
        yield call(f"2112 x 7168, M={tokens}", tokens, 2112, 7168, gpu=gpu)
    plain = (5, 100, 128)
    yield call("K=8", 2, 100, 8)
    yield call("K=1000", 3, 1, 1000)
    yield call("no tokens", 0, 100, 128)
    yield call("a slice", *plain, row=(6288, 6144))
    yield call("element by element, stride", *plain, row=(6285, 0))
    yield call("element by element, address", *plain, row=(128, 3), dtype=FP16)
    yield call("one row of any stride", 1, 100, 128, row=(2**40, 0))
    yield call("static weight", *plain, weight_is_static=True)
    yield call("pdl off", *plain, pdl=False)
    yield call("another stream", *plain, stream=OTHER_STREAM, residual=107, out=160)
    yield call("out with a row stride", *plain, out=160)
    yield call("residual with a row stride, fp16", *plain, residual=107, dtype=FP16)
    yield call("in place", *plain, residual=160, in_place=True)
    yield call("float32", *plain, out_dtype=F32, residual=107, out=160)
    yield call("config", *plain, config=k3cupy.SkinnyGemmConfig(5, 64, 3, 2, 8))
    yield call("config, 64-bit loads", 8, 301, 512, config=k3cupy.SkinnyGemmConfig(8, 128, 2, 1, 4))
    dots = {"config": k3cupy.SkinnyGemmConfig(5, 64, 3, 2, 8), "residual": 107}
    yield call("config, a slice", *plain, row=(6288, 6144), weight_is_static=True, **dots)
    yield call("config, element by element", *plain, row=(128, 3), dtype=FP16, **dots)
    yield from _skinny_calls_of_tensor_cores(call)


def _skinny_calls_of_tensor_cores(call: Callable[..., GoldenCall]) -> Iterator[GoldenCall]:
    def config(tokens: int, split_k: int = 1) -> k3cupy.SkinnyGemmConfig:
        return k3cupy.SkinnyGemmConfig(tokens, 64, 12, 2, 8, "mma", split_k)

    for tokens in (9, 12, 16):
        yield call(f"2112 x 7168, M={tokens}", tokens, 2112, 7168)
    for tokens in (1, 2, 4, 7, 8, 9, 12, 15, 16):
        yield call(f"mma, M={tokens}", tokens, 100, 1024, config=config(tokens))
    for gpu, tokens in itertools.product(GPUS[::2], (5, 16)):
        plain = (tokens, 100, 1000)
        of = {"gpu": gpu, "config": config(tokens)}
        yield call(f"mma, K=1000, M={tokens}", *plain, **of)
        yield call(f"mma in place, M={tokens}", *plain, residual=160, in_place=True, **of)
    few, many = {"config": config(5)}, {"config": config(13)}
    yield call("mma, one round of K", 5, 100, 128, **few)
    yield call("mma, K=8", 5, 100, 8, **few)
    yield call("mma, element by element, stride", 5, 100, 128, row=(6285, 0), **few)
    yield call("mma, element by element, address", 5, 100, 160, row=(160, 3), dtype=FP16, **few)
    yield call("mma, a slice", 13, 100, 1024, row=(6288, 64), **many)
    yield call("mma, static weight, fp16", 13, 100, 1024, weight_is_static=True, dtype=FP16, **many)
    yield call(
        "mma, residual and out with row strides", 13, 100, 128, residual=107, out=160, **many
    )
    for split, shape in ((2, (5, 100, 1024)), (4, (16, 301, 1000)), (8, (9, 100, 1000))):
        of_split = config(shape[0], split)
        yield call(f"mma, split {split}, M={shape[0]}", *shape, residual=shape[1], config=of_split)


def _linear_calls() -> Iterator[GoldenCall]:
    attempt, linear = OPERATIONS[-2:]

    def call(op: str, name: str, *shape: int, gpu: Any = H200, **given: Any) -> GoldenCall:
        return GoldenCall(op, name, gpu, _gemm(*shape, **given))

    listed = ((2112, 7168), (7168, 768), (1536, 128), (7168, 3584))
    for tokens, (n, k) in itertools.product((1, 4, 16, 64, 65), listed):
        yield call(attempt, f"{n} x {k}, M={tokens}", tokens, n, k)
        yield call(attempt, f"{n} x {k}, M={tokens}, residual", tokens, n, k, residual=n)
    for gpu, tokens in itertools.product(GPUS[1:], (1, 4, 16, 32, 64)):
        yield call(attempt, f"2112 x 7168, M={tokens}", tokens, 2112, 7168, gpu=gpu)
        if tokens in (4, 32):
            yield call(
                attempt, f"1000 x 1024, M={tokens}", tokens, 1000, 1024, gpu=gpu, residual=1000
            )
    for tokens in (1, 8, 30, 64):
        yield call(attempt, f"unlisted 1000 x 1024, M={tokens}", tokens, 1000, 1024)
        yield call(attempt, f"unlisted 20000 x 4096, M={tokens}", tokens, 20000, 4096)
    for name, shape, given in (
        ("K=24, no kernel of many rows has it", (16, 100, 24), {}),
        ("rows off alignment", (4, 1536, 128), {"row": (6285, 0)}),
        ("address off alignment", (4, 1536, 128), {"row": (128, 1)}),
        ("residual off packing", (4, 1536, 128), {"residual": 1600}),
        ("fp16", (4, 1536, 128), {"dtype": FP16}),
        ("no tokens", (0, 1536, 128), {}),
        ("a slice", (4, 1536, 128), {"row": (6288, 6144)}),
        ("a slice whose rows are 8 past K", (64, 1536, 7168), {"row": (7176, 0)}),
        ("static weight", (4, 1536, 128), {"weight_is_static": True}),
        ("another stream", (4, 1536, 128), {"stream": OTHER_STREAM, "residual": 1536}),
        ("pages of one row", (1, 2304, 1536), {"row": (2**40, 0)}),
        ("float32", (4, 1536, 128), {"out_dtype": F32, "residual": 1601}),
    ):
        yield call(attempt, name, *shape, **given)
    for tokens in (1, 16, 64, 65, 130, 200):
        for name, given in (
            ("", {}),
            (", residual, a slice", {"row": (6288, 64), "residual": 2304}),
        ):
            yield call(
                attempt,
                f"batch-invariant 2304 x 1536, M={tokens}{name}",
                *(tokens, 2304, 1536),
                batch_invariant=True,
                **given,
            )
    slices = (130, 1536, 128)
    yield call(attempt, "batch-invariant, float32", *slices, batch_invariant=True, out_dtype=F32)
    for gpu in (A100, B200, RTX_5090):
        yield call(attempt, "batch-invariant, M=100", 100, 1536, 128, gpu=gpu, batch_invariant=True)
    for tokens in (1, 16, 64):
        for n, k in listed[:3]:
            yield call(linear, f"{n} x {k}, M={tokens}, residual", tokens, n, k, residual=n)
    yield call(linear, "batch-invariant, M=70", 70, 2112, 7168, batch_invariant=True)
    yield call(linear, "static weight", 2, 2304, 1536, weight_is_static=True)
    yield call(linear, "the framework's", 4, 48, 128, dtype=FP16, residual=48)
    yield call(linear, "the framework's, many rows", 70, 48, 128)


# --- Recording ----------------------------------------------------------------------------------


def _record() -> None:
    nothing = Path(tempfile.gettempdir(), f"k3cupy-no-measurements-{os.getpid()}")
    os.environ["K3CUPY_CACHE_DIR"] = str(
        nothing
    )  # what was measured on this machine does not count
    os.environ.pop("K3CUPY_BATCH_INVARIANT", None)
    os.environ.pop("K3CUPY_SOURCE_DIR", None)
    lines: dict[str, list[str]] = {operation: [] for operation in OPERATIONS}
    known = Shipped()
    for call, (first, _) in record_all():
        text = json.dumps(described(first, known), separators=(",", ":"))
        lines[call.operation].append(f"{json.dumps(call.key)}: {text}")
    FOLDER.mkdir(exist_ok=True)
    for operation, found in lines.items():
        text = "{\n" + ",\n".join(found) + "\n}\n"
        (FOLDER / f"{operation}.json").write_text(text, encoding="utf-8")
        print(f"{operation}: {len(found)} calls, {len(text)} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the goldens anew")
    if parser.parse_args().record:
        _record()
    else:
        parser.error("nothing to do; did you mean --record?")
