"""Compiling ahead: before a graph capture, before serving, or once for a shared disk cache.

One function an operation gives the instances that its calls will need; its arguments are the
options that ``warmup`` takes for it. Types, formats and flags come to it as several, and all
combinations are compiled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from k3cupy import projections
from k3cupy.accept import checks
from k3cupy.accept.gemm import check_fused_a_config, check_skinny_config, out_dtype_of
from k3cupy.choose.gemm import ALL, FUSED_A, SKINNY, choose
from k3cupy.choose.mla import choose as choose_mla
from k3cupy.choose.mla import configs
from k3cupy.constants import CTYPES, Q_LORA_RANK, QK_HEAD_DIM
from k3cupy.kernels import (
    fused_a_gemm,
    mla_decode,
    mla_norm,
    mla_prefill,
    mla_query,
    mla_value,
    skinny_gemm,
)
from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig
from k3cupy.kernels.mla_decode import MlaDecodeConfig
from k3cupy.kernels.mla_norm import MlaNormConfig
from k3cupy.kernels.mla_prefill import INSERTS, KV_CONCAT, KV_CONCAT_QUANT, MlaPrefillConfig
from k3cupy.kernels.mla_query import MlaQueryConfig
from k3cupy.kernels.mla_value import MlaValueConfig
from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig
from k3cupy.ops import batch_invariance
from k3cupy.ops.fused_a_gemm import slices
from k3cupy.runtime import devices, instances
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.instances import Instance
from k3cupy.runtime.tensors import is_integer
from k3cupy.runtime.text import compiling

Flags = Sequence[bool]
Names = Sequence[str]
Numbers = int | Iterable[int] | None
Shapes = Iterable[tuple[int, int]] | str | None
Wanted = Callable[[DeviceInfo], Iterable[Instance]]
"""Gives the instances that calls will need on a GPU."""

EVERY_CACHE = ("bf16", "fp8", "fp8_ds_mla")
_CACHES = {"bf16": "same", "fp16": "same", "same": "same", "fp8": "fp8", "fp8_ds_mla": "ds_mla"}
_INSERTS = dict(zip(("same", "ds_mla", "fp8"), INSERTS, strict=True))
_NAMES = {"dtype": tuple(CTYPES), "kv_cache": tuple(_CACHES)}
_BF16, _NO, _YES, _BOTH = ("bfloat16",), (False,), (True,), (False, True)
_FEW, _MOST_ROWS = range(1, fused_a_gemm.MAX_TOKENS + 1), (1 << 31) - 1


def warmup(
    op: str = "mla_decode",
    *,
    device: Any = None,
    max_workers: int | None = None,
    progress: bool = True,
    **options: Any,
) -> int:
    """Compile and load what an operation will need, on threads, so that later calls need not.

    ``dtype``, ``kv_cache`` and the flags take one value or several, and all combinations are
    compiled; ``config``, ``out_dtype``, and the linear layer's ``batch_invariant``, take one:

    - ``"mla_decode"``: dtype, kv_cache, query_fp8 (None: with an fp8 cache), rope,
      kv_inputs_ready, vector (False: the element-wise instance), config.
    - ``"mla_norm"``: dtype, weight_is_static, vector, config.
    - ``"mla_query"``: dtype, kv_cache, query_fp8, rope, weight_is_static, heads (every H that will
      come), tokens (None: up to 64), config; without a config also the separate kernels that run
      in its place for some of these.
    - ``"mla_value"``: dtype, gate, transposed (None: weights with either axis contiguous),
      weight_is_static, vector, config.
    - ``"mla_prefill"``, for the caches named and both context operations, or the name of one of
      the five: dtype, kv_cache, rope, vector, config.
    - ``"fused_a_gemm"``: shapes, tokens, residual, weight_is_static, batch_invariant, strided
      (None: rows of x that follow one another, and apart), vector, out_dtype, config.
    - ``"skinny_gemm"``: shapes, tokens, residual, weight_is_static, dtype, vector, out_dtype,
      config.
    - ``"low_latency_linear"``: shapes, tokens, residual, weight_is_static, batch_invariant (None:
      as ``is_batch_invariant`` says), out_dtype, for x of both kinds.

    ``dtype`` is ``"bfloat16"`` or ``"float16"``; ``kv_cache`` ``"bf16"`` (or ``"fp16"``: the
    inputs' type), ``"fp8"``, ``"fp8_ds_mla"``, which has no fp8 query, or None for all that fit;
    ``shapes`` (N, K) of the weights, the name of a preset such as ``"deepseek-v3-tp8"``, or None
    for every projection of Kimi-K3; ``tokens`` every M that will come, None for all that one launch
    takes; ``out_dtype`` None or float32, of outputs of the GEMMs; ``config`` None for every
    configuration that a call may get.

    Args:
        op: which operation.
        device: GPU ordinal, ``"cuda:1"`` or a ``torch.device``; by default the current GPU.
        max_workers: compiling threads; by default one per CPU core, 16 at most.
        progress: show a progress bar on standard error.
        options: as above.

    Returns:
        The number of instances that are ready.

    Raises:
        TypeError, ValueError: an option names nothing that exists, or is for another operation.
        ToolchainError, CompileError: the kernels cannot be built here.

    Example:
        >>> k3cupy.warmup(kv_cache="fp8", rope=[False, True])    # doctest: +SKIP
        8
        >>> k3cupy.warmup("low_latency_linear", shapes=[(2112, 7168)], tokens=[1, 4])
        ... # doctest: +SKIP
        4
    """
    checks.check_flags(locals(), "progress")
    wanted = wanted_of(op, options)
    ordinal = devices.ordinal_of(device)
    chosen = wanted(devices.info(ordinal))
    with compiling(quiet=not progress) as (found, done):
        return instances.load_all(
            chosen, ordinal, max_workers=max_workers, on_found=found, on_done=done
        )


def wanted_of(op: str, options: dict[str, Any]) -> Wanted:
    """Check the options of a warm-up and return what it will compile."""
    if not isinstance(op, str) or op not in OPERATIONS:
        reject("op", " or ".join(map(repr, OPERATIONS)), shown(op))
    known = inspect.signature(OPERATIONS[op]).parameters
    read = dict(options)
    for name, value in options.items():
        if name not in known:
            expected = f"one of {', '.join(known)} with op={op!r}"
            hint = f"Leave it out: {op} has no option {name}"
            reject(name, expected, shown(value), hint, TypeError)
        if value is None and known[name].default is None:
            continue
        if name in _NAMES:
            read[name] = _names(name, value, _NAMES[name])
        elif str(known[name].annotation).startswith("Flags"):
            read[name] = _flags(name, value)
    wanted = OPERATIONS[op](**read)
    if op == "low_latency_linear":  # of which a GPU that is too old gets nothing
        return wanted
    return functools.partial(instances.supported, wanted)


# --- The kernels of an MLA layer -----------------------------------------------------------------


def _mla_decode(
    dtype: Names = _BF16,
    kv_cache: Names | None = None,
    query_fp8: Flags | None = None,
    rope: Flags = _NO,
    kv_inputs_ready: Flags = _NO,
    vector: Flags = _YES,
    config: MlaDecodeConfig | None = None,
) -> Wanted:
    checks.check_config(config, MlaDecodeConfig)
    flags = rope, kv_inputs_ready, vector
    variants = _of_formats(mla_decode.Variant, dtype, kv_cache, query_fp8, *flags)
    return _epilogue(mla_decode, mla_decode.UNTUNED, variants, config)


def _mla_query(
    dtype: Names = _BF16,
    kv_cache: Names | None = None,
    query_fp8: Flags | None = None,
    rope: Flags = _NO,
    weight_is_static: Flags = _NO,
    heads: int | Iterable[int] = 12,
    tokens: Numbers = None,
    config: MlaQueryConfig | None = None,
) -> Wanted:
    checks.check_config(config, MlaQueryConfig)
    counts = tokens_of(_FEW if tokens is None else tokens, _MOST_ROWS)
    shares = _counts_of("heads", heads, _MOST_ROWS)
    variants = _of_formats(mla_query.Variant, dtype, kv_cache, query_fp8, rope, weight_is_static)
    statics = product(dtype, weight_is_static)
    absorbed = [mla_value.Variant(k, weight_is_static=s, absorb=True) for k, s in statics]
    separate = (
        _mla_norm(dtype, weight_is_static),
        _epilogue(mla_value, None, absorbed, None),
        _mla_decode(dtype, kv_cache, query_fp8, rope),
    )

    def wanted(gpu: DeviceInfo) -> Iterator[Instance]:
        few = [n for n in counts if gpu.has_clusters and n <= mla_query.MAX_TOKENS]
        chosen = {
            n: [choose_mla(mla_query.KERNEL, None, n, share, gpu, config) for share in shares]
            for n in few
        }
        pairs = ((mla_query.tile_of(n), c.config) for n, of in chosen.items() for c in of)
        fused = [pair for pair in dict.fromkeys(pairs) if pair[1] is not None]
        for variant, (tile, each) in product(variants, fused):
            yield each.instance(replace(variant, tile_m=tile))
        one_launch = {n for n, of in chosen.items() if all(c.config for c in of)}
        apart = [n for n in counts if config is None and n not in one_launch]
        if apart:
            for part in separate:
                yield from part(gpu)
        if apart and "bfloat16" in dtype:
            q_b = [(share * QK_HEAD_DIM, Q_LORA_RANK) for share in shares]
            yield from _low_latency_linear(q_b, apart, weight_is_static=weight_is_static)(gpu)

    return wanted


def _of_formats(
    variant: Any, dtype: Names, kv_cache: Names | None, query_fp8: Flags | None, *flags: Flags
) -> list[Any]:
    """Return the variants of all combinations; the query is e4m3 where the cache is, by default."""
    caches = [_CACHES[name] for name in kv_cache or EVERY_CACHE]
    variants = [
        variant(kind, cache == "fp8" if query is None else query, cache, *rest)
        for kind, query, cache, *rest in product(dtype, query_fp8 or (None,), caches, *flags)
    ]
    valid = [variant for variant in variants if variant.is_valid()]
    if kv_cache and len(valid) < len(variants):
        reject("query_fp8", "False with an fp8_ds_mla cache", "True")
    return valid


def _mla_norm(
    dtype: Names = _BF16,
    weight_is_static: Flags = _NO,
    vector: Flags = _YES,
    config: MlaNormConfig | None = None,
) -> Wanted:
    checks.check_config(config, MlaNormConfig)
    every = product(dtype, weight_is_static, vector)
    return _epilogue(mla_norm, mla_norm.UNTUNED, [mla_norm.Variant(*v) for v in every], config)


def _mla_value(
    dtype: Names = _BF16,
    gate: Flags = _NO,
    transposed: Flags | None = None,
    weight_is_static: Flags = _NO,
    vector: Flags = _YES,
    config: MlaValueConfig | None = None,
) -> Wanted:
    checks.check_config(config, MlaValueConfig)
    every = product(dtype, gate, transposed or _BOTH, weight_is_static, vector)
    return _epilogue(mla_value, mla_value.UNTUNED, [mla_value.Variant(*v) for v in every], config)


def _mla_prefill(
    dtype: Names = _BF16,
    kv_cache: Names | None = None,
    rope: Flags = _NO,
    vector: Flags = _YES,
    config: MlaPrefillConfig | None = None,
) -> Wanted:
    inserts = [_INSERTS[_CACHES[name]] for name in kv_cache or EVERY_CACHE]
    return _some_prefill((*inserts, KV_CONCAT, KV_CONCAT_QUANT), dtype, rope, vector, config)


def _some_prefill(
    ops: Sequence[str],
    dtype: Names = _BF16,
    rope: Flags = _NO,
    vector: Flags = _YES,
    config: MlaPrefillConfig | None = None,
) -> Wanted:
    """The context operations have no RoPE, and one takes k_pe in e4m3 too."""
    checks.check_config(config, MlaPrefillConfig)
    variants = [
        mla_prefill.Variant(op, kind, turned and op in INSERTS, k_pe_fp8, wide)
        for op, kind, turned, wide, k_pe_fp8 in product(ops, dtype, rope, vector, _BOTH)
    ]
    valid = [variant for variant in variants if variant.is_valid()]
    return _epilogue(mla_prefill, mla_prefill.FEW_ROWS, valid, config)


def _epilogue(kernel: Any, element_wise: Any, variants: Sequence[Any], config: Any) -> Wanted:
    def wanted(gpu: DeviceInfo) -> Iterator[Instance]:
        for variant in variants:
            vector = getattr(variant, "vector", True)
            every = configs(kernel.KERNEL, variant.kind, gpu) if vector else [element_wise]
            for each in [config] if config else every:
                yield each.instance(variant)

    return wanted


# --- The GEMMs -----------------------------------------------------------------------------------


def _fused_a_gemm(
    shapes: Shapes = None,
    tokens: Numbers = None,
    residual: Flags = _NO,
    weight_is_static: Flags = _NO,
    batch_invariant: Flags = _NO,
    strided: Flags | None = None,
    vector: Flags = _YES,
    out_dtype: Any = None,
    config: FusedAGemmConfig | None = None,
) -> Wanted:
    pairs = shapes_of(shapes, fused_a_gemm.K_MULTIPLE)
    counts = tokens_of(tokens, fused_a_gemm.MAX_TOKENS)
    check_fused_a_config(config, max(counts))
    float32 = _is_float32(out_dtype)
    products = [*product(pairs, counts)]
    apart = strided or _BOTH

    def wanted(gpu: DeviceInfo) -> Iterator[Instance]:
        check_fused_a_config(config, max(counts), gpu)
        for adds, invariant in product(residual, batch_invariant):
            chosen = [config] if config else _chosen(FUSED_A, products, gpu, adds, invariant)
            for each, far, static, wide in product(chosen, apart, weight_is_static, vector):
                variant = fused_a_gemm.Variant(wide, static, adds, float32)
                yield from _fused_a_instances(each, variant, far)

    return wanted


def _chosen(kernel: str, products: Any, gpu: DeviceInfo, adds: bool, invariant: bool) -> Any:
    """Return every configuration that one of the products gets, each once."""
    return dict.fromkeys(
        choose((kernel,), n, k, count, gpu, residual=adds, batch_invariant=invariant).config
        for (n, k), count in products
    )


def _fused_a_instances(
    config: FusedAGemmConfig, variant: fused_a_gemm.Variant, strided: bool
) -> Iterator[Instance]:
    """Yield what calls run; the copy engine cannot fetch every x whose rows lie apart."""
    yield config.instance(variant)
    if strided and config.mapped_x:
        yield config.with_copy_warps().instance(variant)


def _skinny_gemm(
    shapes: Shapes = None,
    tokens: Numbers = None,
    residual: Flags = _NO,
    weight_is_static: Flags = _NO,
    dtype: Names = _BF16,
    vector: Flags = _YES,
    out_dtype: Any = None,
    config: SkinnyGemmConfig | None = None,
) -> Wanted:
    pairs = shapes_of(shapes, skinny_gemm.K_MULTIPLE)
    check_skinny_config(config)
    asked = config.num_rows if config is not None and tokens is None else tokens
    counts = tokens_of(asked, skinny_gemm.MAX_TOKENS)
    for count in counts:
        check_skinny_config(config, count)
    float32 = _is_float32(out_dtype)

    def wanted(gpu: DeviceInfo) -> Iterator[Instance]:
        check_skinny_config(config, gpu=gpu)
        for pair, adds in product(pairs, residual):
            products = product([pair], counts)
            chosen = [config] if config else _chosen(SKINNY, products, gpu, adds, False)
            for each, kind, wide, static in product(chosen, dtype, vector, weight_is_static):
                variant = skinny_gemm.Variant(kind, wide, adds, static, float32, pair[1])
                yield each.instance(variant)

    return wanted


def _low_latency_linear(
    shapes: Shapes = None,
    tokens: Numbers = None,
    residual: Flags = _NO,
    weight_is_static: Flags = _NO,
    batch_invariant: bool | None = None,
    out_dtype: Any = None,
) -> Wanted:
    pairs = shapes_of(shapes, k_multiple=1)
    counts = tokens_of(_FEW if tokens is None else tokens, _MOST_ROWS)
    invariant = batch_invariance.resolved(batch_invariant)
    float32 = _is_float32(out_dtype)
    if invariant:
        rows = (part for count in counts for part in slices(count))
        counts = tuple(dict.fromkeys(part.stop - part.start for part in rows))

    def wanted(gpu: DeviceInfo) -> Iterator[Instance]:
        for (n, k), count, adds in product(pairs, counts, residual):
            found = choose(ALL, n, k, count, gpu, residual=adds, batch_invariant=invariant)
            for static in weight_is_static:
                if found.kernel == SKINNY:
                    variant = skinny_gemm.Variant("bfloat16", True, adds, static, float32, k)
                    yield found.config.instance(variant)
                elif found.kernel == FUSED_A:
                    of_fused = fused_a_gemm.Variant(True, static, adds, float32)
                    yield from _fused_a_instances(found.config, of_fused, count > 1)

    return wanted


OPERATIONS: dict[str, Callable[..., Wanted]] = {
    "mla_decode": _mla_decode,
    "mla_norm": _mla_norm,
    "mla_query": _mla_query,
    "mla_value": _mla_value,
    "mla_prefill": _mla_prefill,
    **{op: functools.partial(_some_prefill, (op,)) for op in mla_prefill.OPS},
    "fused_a_gemm": _fused_a_gemm,
    "skinny_gemm": _skinny_gemm,
    "low_latency_linear": _low_latency_linear,
}


# --- Options -------------------------------------------------------------------------------------


def _several(
    option: str, value: Any, expected: str, is_one: Callable[[Any], bool]
) -> tuple[Any, ...]:
    """Return the values of an option that takes one or several; refuse others, and none at all."""
    try:
        found = (value,) if isinstance(value, str) or is_integer(value) else tuple(value)
    except TypeError:
        reject(option, expected, shown(value), error=TypeError)
    for each in found:
        if not is_one(each):
            reject(option, expected, shown(each))
    return found or reject(option, "at least one", "none")


def _flags(option: str, value: Any) -> Flags:
    flags = [value] if isinstance(value, bool) else value
    if not isinstance(flags, list | tuple) or not all(isinstance(flag, bool) for flag in flags):
        reject(option, "True, False or several of them", shown(value), error=TypeError)
    return flags or reject(option, "at least one", "none")


def _names(option: str, value: Any, known: Sequence[str]) -> Names:
    expected = " or ".join(map(repr, known))
    return _several(option, value, expected, lambda each: isinstance(each, str) and each in known)


def _counts_of(option: str, value: Any, most: int) -> tuple[int, ...]:
    expected = f"numbers from 1 to {most}"
    counts = _several(option, value, expected, lambda each: _is_count(each) and each <= most)
    return tuple(map(int, counts))


def _is_float32(out_dtype: Any) -> bool:
    """Return whether outputs are float32, and not of x's type; refuse all others."""
    return out_dtype is not None and out_dtype_of(out_dtype) == "float32"


def shapes_of(shapes: Shapes, k_multiple: int) -> tuple[tuple[int, int], ...]:
    """Return (N, K) of each weight, None for every projection of Kimi-K3; refuse wrong ones."""
    given = projections.MODELS[0] if shapes is None else shapes
    if isinstance(given, str):
        (name,) = _names("shapes", given, projections.preset_names())
        given = projections.preset_shapes(name)
    pairs = _several("shapes", given, "pairs (N, K) of integers above 0", _is_pair)
    for pair in pairs:
        if pair[1] % k_multiple:
            reject("shapes", f"K a multiple of {k_multiple}", shown(pair))
    return tuple((int(n), int(k)) for n, k in pairs)


def tokens_of(tokens: Numbers, most: int) -> tuple[int, ...]:
    """Return the numbers of tokens, None for all; refuse those that no call can have."""
    return _counts_of("tokens", range(1, most + 1) if tokens is None else tokens, most)


def _is_count(value: Any) -> bool:
    return is_integer(value) and bool(value > 0)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_count, value))
