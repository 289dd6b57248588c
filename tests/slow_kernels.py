"""vLLM's operators with slow kernels: what the fake vLLM of the tests loads as its binary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import torch

from k3cupy.engines import vllm_facts as facts

SCHEMAS: dict[str, str] = dict(facts.OPERATORS)
"""What the binary declares; a test may change it before it is loaded."""

KEYS: list[str] = ["CPU"]
"""For which dispatch keys it has kernels."""

CALLS: Counter[str] = Counter()
"""How often each kernel ran."""


def load() -> torch.library.Library:
    library = torch.library.Library(facts.NAMESPACE, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(schema)
        for key in KEYS:
            library.impl(name, _counted(name, KERNELS[name]), key)
    return library


def _counted(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        CALLS[name] += 1
        kernel(*args)

    return run


def _host(tensors: Sequence[Any]) -> list[Any]:
    return [t.cpu() if isinstance(t, torch.Tensor) else t for t in tensors]


def _put(out: torch.Tensor, values: torch.Tensor) -> None:
    oracle.codes(out).copy_(values)


def _whole(rows: oracle.Rows, like: torch.dtype) -> torch.Tensor:
    """The rows' bits, with what RoPE gives in place of their last 64 values."""
    found = rows.bits.clone()
    if rows.rotated is not None:
        values = rows.rotated.exact.to(torch.float32)
        turned = oracle.e4m3_codes(values) if found.dtype == torch.uint8 else oracle.bits(
            values.to(like)
        )  # fmt: skip
        if found.shape[-1] == oracle.DS_MLA_BYTES:
            turned = values.to(like).view(torch.uint8)
        found[..., -turned.shape[-1] :] = turned
    return found


def _insert(cache: torch.Tensor, slots: torch.Tensor, rows: oracle.Rows, like: Any) -> None:
    codes, values = oracle.codes(cache), _whole(rows, like)
    for row, slot in zip(values, slots.tolist(), strict=False):
        if slot >= 0:
            codes[slot // cache.shape[1], slot % cache.shape[1]] = row.to(cache.device)


def gemm(output: Any, mat_a: Any, mat_b: Any, enable_pdl: bool = False) -> None:
    output.copy_((mat_a.float() @ mat_b.float()).to(output.dtype))


def decode(scaled: bool = False, ds_mla: bool = False) -> Callable[..., None]:
    def run(*args: Any) -> None:
        *first, mqa_q, cache, slots = args[:7]
        ql_nope, q_pe, kv_c, k_pe, slots = _host((*first, slots))
        q_scale, cache_scale = _host(args[7:9]) if scaled else (None, None)
        positions, table = (*_host(args[10 if scaled else 8 :]), None, None)[:2]
        rows = oracle.joined_rows(ql_nope, q_pe, q_scale, positions, table)
        _put(mqa_q, _whole(rows, ql_nope.dtype))
        rows = oracle.cache_rows(kv_c, k_pe, cache_scale, positions, table, ds_mla=ds_mla)
        _insert(cache, slots, rows, kv_c.dtype)

    return run


def key_concat(ds_mla: bool = False) -> Callable[..., None]:
    def run(*args: Any) -> None:
        q, *first, k_out, cache, slots, _ = args[:8]
        k_nope, k_pe, kv_c, slots = _host((*first, slots))
        positions, table = (*_host(args[8:]), None, None)[:2]
        wide = k_pe[:, None].expand(*k_nope.shape[:2], -1)
        _put(k_out, _whole(oracle.joined_rows(k_nope, wide, None, positions, table), k_nope.dtype))
        if positions is not None:
            q[..., -64:] = oracle.rotate(q[..., -64:].cpu(), positions, table).exact.to(q.dtype)
        rows = oracle.cache_rows(kv_c, k_pe, None, positions, table, ds_mla=ds_mla)
        _insert(cache, slots, rows, kv_c.dtype)

    return run


def qkv_quant(*args: Any) -> None:
    *first, q8, k8, v8, cache, slots = args[:10]
    q, k_nope, k_pe, kv_c, v, slots, q_scale, k_scale, v_scale, cache_scale = _host(
        (*first, slots, *args[10:14])
    )
    positions, table = (*_host(args[15:]), None, None)[:2]
    wide = k_pe[:, None].expand(*k_nope.shape[:2], -1)
    for out, nope, rope, scale in (
        (q8, q[..., :128], q[..., 128:], q_scale),
        (k8, k_nope, wide, k_scale),
    ):
        _put(out, _whole(oracle.joined_rows(nope, rope, scale, positions, table), q.dtype))
    _put(v8, oracle.scaled_codes(v, v_scale))
    _insert(
        cache, slots, oracle.cache_rows(kv_c, k_pe, cache_scale, positions, table, ds_mla=False), 0
    )


def kv_concat(k_nope: Any, k_pe: Any, k_out: Any) -> None:
    k_out.copy_(torch.cat((k_nope, k_pe[:, None].expand(*k_nope.shape[:2], -1)), -1))


def kv_concat_quant(k_nope: Any, k_pe: Any, v: Any, k_fp8: Any, v_fp8: Any) -> None:
    nope, rope, value = _host((k_nope, k_pe, v))
    rope = oracle.bits(rope) if rope.dtype == oracle.E4M3 else oracle.plain_codes(rope)
    wide = rope[:, None].expand(*nope.shape[:2], -1)
    _put(k_fp8, torch.cat((oracle.plain_codes(nope), wide), -1))
    _put(v_fp8, oracle.plain_codes(value))


KERNELS: dict[str, Callable[..., None]] = {
    "dsv3_fused_a_gemm": gemm,
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert": decode(),
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert": decode(scaled=True),
    "fused_kimi_k3_mla_decode_q_concat_ds_mla_insert": decode(ds_mla=True),
    "fused_kimi_k3_mla_key_concat_kv_cache_insert": key_concat(),
    "fused_kimi_k3_mla_key_concat_ds_mla_insert": key_concat(ds_mla=True),
    "fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert": qkv_quant,
    "fused_kimi_k3_mla_kv_concat": kv_concat,
    "fused_kimi_k3_mla_kv_concat_quant_fp8": kv_concat_quant,
}
