"""The calls of ``golden_calls.py`` of the operations around the MLA epilogue."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fake_device import A100, GPUS, H200, RTX_5090
from golden_recording import GoldenCall, Tensors

import k3cupy

NORM, VALUE = "fused_q_kv_rmsnorm", "fused_mla_decode_value"
LAYER_OPERATIONS = (NORM, VALUE)

Make = Callable[[Tensors], dict[str, Any]]
FP16, OTHER_STREAM = torch.float16, 99


def layer_calls() -> Iterator[GoldenCall]:
    """Every call of those."""
    yield from _norm_calls()
    yield from _value_calls()


def _norm(
    tokens: int = 4,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row: tuple[int, int] = (2112, 0),
    tensors: Make = lambda _: {},
    **options: Any,
) -> Make:
    """A call; ``row`` is (elements between rows of qkv_a, offset)."""

    def make(tensor: Tensors) -> dict[str, Any]:
        return {
            "qkv_a": tensor(tokens, 2112, dtype=dtype, strides=(row[0], 1), offset=row[1]),
            "q_weight": tensor(1536, dtype=dtype),
            "kv_weight": tensor(512, dtype=dtype),
            "eps": 1e-6,
            **tensors(tensor),
            **options,
        }

    return make


def _norm_calls() -> Iterator[GoldenCall]:
    def call(name: str, make: Make, gpu: Any = H200) -> GoldenCall:
        return GoldenCall(NORM, name, gpu, make)

    for tokens in (1, 4, 64, 5000, 70_000):
        yield call(f"T={tokens}", _norm(tokens))
    for gpu, tokens in itertools.product(GPUS[1:], (1, 512)):
        yield call(f"T={tokens}", _norm(tokens), gpu)
    outs = {"tensors": lambda t: {"out": (t(4, 1536), t(4, 512))}}
    for name, make in {
        "no tokens": _norm(0),
        "fp16, another epsilon": _norm(dtype=FP16, eps=0.25),
        "static weights": _norm(weight_is_static=True),
        "rows of a wider tensor": _norm(row=(3648, 64)),
        "element by element, stride": _norm(row=(2113, 0)),
        "element by element, address": _norm(tensors=lambda t: {"kv_weight": t(512, offset=1)}),
        "element by element, fp16, static": _norm(dtype=FP16, row=(2112, 1), weight_is_static=True),
        "one token of any stride": _norm(1, row=(3, 0)),
        "out given": _norm(**outs),
        "another stream": _norm(stream=OTHER_STREAM),
        "another stream, out given": _norm(stream=OTHER_STREAM, **outs),
        "pdl off": _norm(pdl=False),
    }.items():
        yield call(name, make)
    for warps in (1, 2, 3, 6):
        yield call(f"config {warps}", _norm(config=k3cupy.MlaNormConfig(warps)))
    yield call("pdl on", _norm(pdl=True), A100)


def _value(
    tokens: int = 4,
    heads: int = 12,
    *,
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = False,
    gate: bool = False,
    tensors: Make = lambda _: {},
    **options: Any,
) -> Make:
    """A call; w_uv is a view of kv_b's weight, or ``packed``."""

    def make(tensor: Tensors) -> dict[str, Any]:
        rows = {"dtype": dtype, "strides": (256 * 512, 1, 512), "offset": 128 * 512}
        found = {
            "latent": tensor(tokens, heads, 512, dtype=dtype),
            "w_uv": tensor(heads, 512, 128, **({"dtype": dtype} if packed else rows)),
        }
        if gate:
            found["gate"] = tensor(tokens, heads * 128, dtype=dtype)
        return {**found, **tensors(tensor), **options}

    return make


def _value_calls() -> Iterator[GoldenCall]:
    def call(name: str, make: Make, gpu: Any = H200) -> GoldenCall:
        return GoldenCall(VALUE, name, gpu, make)

    for tokens, heads in itertools.product((1, 4, 16, 17, 64, 1000), (12, 96)):
        yield call(f"T={tokens} H={heads}", _value(tokens, heads))
        yield call(f"T={tokens} H={heads}, gate", _value(tokens, heads, gate=True))
    for gpu, tokens in itertools.product(GPUS[1:], (1, 16)):
        yield call(f"T={tokens} H=24, gate", _value(tokens, 24, gate=True), gpu)
    wide = lambda t: {"gate": t.columns(t(4, 4096), 512, 2048)}  # noqa: E731
    far = lambda t: {"latent": t(4, 12, 512, strides=(512, 4 * 520, 1))}  # noqa: E731
    odd = lambda t: {"latent": t(4, 12, 512, strides=(12 * 515, 515, 1))}  # noqa: E731
    turned = lambda t: {"w_uv": t(12, 512, 128, strides=(513 * 128, 1, 513))}  # noqa: E731
    rows = lambda t: {"w_uv": t(12, 512, 128, strides=(512 * 136, 136, 1))}  # noqa: E731
    for name, make in {
        "no tokens": _value(0),
        "packed weight": _value(packed=True),
        "packed weight, gate, fp16": _value(packed=True, gate=True, dtype=FP16),
        "weight in wider rows": _value(tensors=rows),
        "static weight": _value(weight_is_static=True),
        "static packed weight, gate": _value(packed=True, gate=True, weight_is_static=True),
        "gate of a wider tensor": _value(gate=True, tensors=wide),
        "latent by heads": _value(tensors=far),
        "element by element, stride": _value(gate=True, tensors=odd),
        "element by element, packed": _value(packed=True, tensors=odd),
        "element by element, weight": _value(tensors=turned),
        "element by element, gate": _value(
            gate=True, tensors=lambda t: {"gate": t(4, 1536, offset=1)}
        ),
        "one token and head": _value(1, 1, tensors=lambda t: {"latent": t(1, 1, 512)}),
        "out given": _value(tensors=lambda t: {"out": t(4, 1536)}),
        "another stream": _value(gate=True, stream=OTHER_STREAM),
        "pdl off": _value(pdl=False),
    }.items():
        yield call(name, make)
    for sizes in ((8, 16, 8), (64, 32, 8), (16, 128, 4)):
        config = k3cupy.MlaValueConfig(*sizes)
        yield call(f"config {sizes}", _value(20, config=config))
        yield call(
            f"config {sizes}, packed, gate", _value(20, packed=True, gate=True, config=config)
        )
    for gpu in (A100, RTX_5090):
        yield call("pdl on", _value(16, pdl=True), gpu)
