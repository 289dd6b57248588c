"""The calls of ``golden_calls.py`` of the MLA query front: one launch, and separate kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fake_device import A100, B200, GB300, H100, H200, RTX_4090, RTX_5090
from golden_recording import GoldenCall, Tensors

import k3cupy

QUERY = "fused_mla_decode_query"

Make = Callable[[Tensors], dict[str, Any]]
BF16, FP16, F32, OTHER_STREAM = torch.bfloat16, torch.float16, torch.float32, 99
I64, I32, E4M3, U8 = torch.int64, torch.int32, torch.float8_e4m3fn, torch.uint8


def _query(
    tokens: int = 4,
    heads: int = 12,
    *,
    dtype: torch.dtype = BF16,
    row: tuple[int, int] = (2112, 0),
    cache: torch.dtype | str = "same",
    q_scale: float | str | None = None,
    cache_scale: float | str | None = None,
    rope: torch.dtype | None = None,
    slots: torch.dtype = I64,
    paging: tuple[int, int] = (300, 64),
    tensors: Make = lambda _: {},
    **options: Any,
) -> Make:
    """A call; ``row`` is (elements between rows of qkv_a, offset), w_uk a view of kv_b's weight."""

    def make(tensor: Tensors) -> dict[str, Any]:
        width, kind = {"same": (576, dtype), "ds_mla": (656, U8)}.get(cache, (576, cache))
        found: dict[str, Any] = {
            "qkv_a": tensor(tokens, 2112, dtype=dtype, strides=(row[0], 1), offset=row[1]),
            "q_norm_weight": tensor(1536, dtype=dtype),
            "kv_norm_weight": tensor(512, dtype=dtype),
            "w_q_b": tensor(heads * 192, 1536, dtype=dtype),
            "w_uk": tensor(heads, 128, 512, dtype=dtype, strides=(256 * 512, 512, 1)),
            "kv_cache": tensor(*paging, width, dtype=kind),
            "slot_mapping": tensor(tokens, dtype=slots),
            "eps": 1e-6,
        }
        if cache == "ds_mla":
            found["ds_mla"] = True
        for name, scale in (("q_scale_inv", q_scale), ("cache_scale_inv", cache_scale)):
            if scale is not None:
                found[name] = tensor(1, dtype=F32) if scale == "tensor" else scale
        if rope is not None:
            found["positions"] = tensor(tokens, dtype=rope)
            found["cos_sin_cache"] = tensor(8192, 64, dtype=F32)
        return {**found, **tensors(tensor), **options}

    return make


FP8 = {"cache": E4M3, "q_scale": 0.75, "cache_scale": 1.5}
DS_MLA = {"cache": "ds_mla"}
LAYOUTS: dict[str, Make] = {
    "w_uk packed": lambda t: {"w_uk": t(12, 128, 512)},
    "w_uk apart": lambda t: {"w_uk": t(12, 128, 512, strides=(256 * 520, 520, 1), offset=8)},
    "cache with gaps": lambda t: {"kv_cache": t(9, 32, 576, strides=(32 * 640 + 64, 640, 1))},
    "more slots than tokens": lambda t: {"slot_mapping": t(40, dtype=I32, strides=(3,))},
    "out given": lambda t: {"out": t(4, 12, 576)},
}
ODD: dict[str, Make] = {
    "a weight off alignment": lambda t: {"kv_norm_weight": t(512, offset=1)},
    "w_uk off alignment": lambda t: {"w_uk": t(12, 128, 512, strides=(256 * 513, 513, 1))},
    "cache off alignment": lambda t: {"kv_cache": t(9, 32, 576, strides=(32 * 577, 577, 1))},
}


def query_calls() -> Iterator[GoldenCall]:
    def call(name: str, make: Make, gpu: Any = H200) -> GoldenCall:
        return GoldenCall(QUERY, name, gpu, make)

    # One launch
    yield call("no tokens", _query(0))
    for tokens in (1, 3, 4, 5, 8, 9, 16):
        yield call(f"T={tokens}", _query(tokens))
    for heads in (1, 6, 16, 24, 96):
        yield call(f"T=2 H={heads}", _query(2, heads))
    for gpu, tokens in itertools.product((H100, B200, GB300, RTX_5090), (1, 16)):
        yield call(f"T={tokens}", _query(tokens), gpu)
    both = {"q_scale": "tensor", "cache_scale": "tensor"}
    wide = {"positions": lambda t: t(9, dtype=I64, strides=(3,))}
    for name, make in {
        "fp8 query and cache": _query(**FP8),
        "fp8 query and cache, rope, static": _query(16, **FP8, rope=I64, weight_is_static=True),
        "scales as tensors": _query(**{**FP8, **both}),
        "fp8 query alone": _query(q_scale=0.5),
        "cache of bytes": _query(cache=U8, cache_scale=2.0),
        "ds_mla": _query(**DS_MLA),
        "ds_mla, rope, static": _query(9, **DS_MLA, rope=I32, weight_is_static=True),
        "rope": _query(9, rope=I64),
        "rope, positions and table strided": _query(
            9,
            rope=I64,
            tensors=lambda t: {
                "positions": wide["positions"](t),
                "cos_sin_cache": t(100, 64, dtype=F32, strides=(80, 1)),
            },
        ),
        "fp16": _query(dtype=FP16),
        "another epsilon": _query(eps=0.25),
        "static weights": _query(weight_is_static=True),
        "rows of a wider tensor": _query(row=(3648, 64)),
        "one token of any stride": _query(1, row=(3, 0)),
        "int32 slots": _query(slots=I32),
        "blocks of 100 tokens": _query(paging=(7, 100)),
        "another stream": _query(stream=OTHER_STREAM),
        "pdl off": _query(pdl=False),
        **{name: _query(tensors=tensors) for name, tensors in LAYOUTS.items()},
    }.items():
        yield call(name, make)
    for numbers, tokens in (((16, 0, 1), 3), ((8, 5, 2), 3), ((8, 2, 1), 12)):
        config = k3cupy.MlaQueryConfig(*numbers)
        yield call(f"config {numbers}, T={tokens}", _query(tokens, config=config))
    # Separate kernels; where one of them is the framework's linear, the fake knows GPU 0 alone.
    for tokens in (17, 64, 300):
        yield call(f"T={tokens}", _query(tokens))
    for gpu, tokens in itertools.product((A100, RTX_4090), (1, 8)):
        yield call(f"T={tokens}", _query(tokens), gpu)
    yield call("no tokens", _query(0), A100)
    yield call("fp8, rope, static", _query(5, **FP8, rope=I64, weight_is_static=True), RTX_4090)
    yield call("T=5 ds_mla", _query(5, **DS_MLA), A100)
    for gpu in (H100, RTX_5090):
        yield call("T=17 H=6", _query(17, 6), gpu)
    for name, make in {
        "T=17 H=96": _query(17, 96),
        "T=20 fp8, rope, scales as tensors": _query(20, rope=I64, **{**FP8, **both}),
        "T=20 fp16": _query(20, dtype=FP16),
        "T=20 static weights, out given": _query(
            20, weight_is_static=True, tensors=lambda t: {"out": t(20, 12, 576)}
        ),
        "T=20 another stream": _query(20, stream=OTHER_STREAM),
        "T=20 pdl off": _query(20, pdl=False),
        "rows off alignment": _query(row=(2113, 0)),
        **{name: _query(tensors=tensors) for name, tensors in ODD.items()},
    }.items():
        yield call(name, make)
