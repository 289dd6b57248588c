"""The MLA prefill and context epilogues: join keys, cast to e4m3, write the latent cache rows.

T is num_tokens, H is num_heads. All five take the same keyword arguments:

- ``out``: a contiguous tensor, or a tuple of them, to be written and returned instead of new ones.
- ``stream``: an int handle or an object with ``__cuda_stream__``. By default PyTorch's current
  stream, or CuPy's where no argument is a PyTorch tensor.
- ``pdl``: programmatic dependent launch. None: on, where the GPU has it (sm_90 and newer). The
  kernel itself waits for its predecessor before it reads, so both are safe.
- ``config``: an ``MlaPrefillConfig``; None takes the measured table. All give the same bits.

And all raise the same:

- TypeError, ValueError: an argument does not fit; the text names it. Nothing was written.
- CaptureError: the instance is not loaded and the stream is capturing a graph.
- CompileError, ToolchainError: the kernel cannot be built here; the text says why.

With T = 0 nothing is launched, and any tensor will do as the cache.

Tensors may come from PyTorch, CuPy, NumPy, JAX or any DLPack producer, all on one CUDA device, or
all on the CPU, where the same function runs in NumPy. Outputs are tensors of the first input's
framework; CuPy has no float8 and gets the codes as uint8.

Source: the public Kimi-K3 prefill epilogues of vLLM, whose names and arguments these are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from k3cupy.accept import checks, mla
from k3cupy.accept.mla import Signature, split_out
from k3cupy.accept.mla_prefill import SIGNATURES, accept
from k3cupy.call.arguments import Values
from k3cupy.call.choice import Choice
from k3cupy.call.operation import Given, Operation, check_options
from k3cupy.choose.mla import choose
from k3cupy.kernels import mla_prefill as kernel
from k3cupy.kernels.mla_prefill import MlaPrefillConfig
from k3cupy.reference import mla_prefill as reference
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import reject, shown


def fused_mla_key_concat_kv_cache_insert(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c_normed: Any,
    kv_cache: Any,
    slot_mapping: Any,
    positions: Any = None,
    cos_sin_cache: Any = None,
    *,
    out: Any = None,
    stream: Any = None,
    pdl: bool | None = None,
    config: MlaPrefillConfig | None = None,
) -> Any:
    """Join the prefill keys, turn the query in place and write the latent rows, in one launch.

    ``k[t, h] = [k_nope[t, h] | rope(k_pe[t])]``. With positions ``q[..., 128:]`` is turned in
    place, without them q is neither read nor written. For every slot that is not negative
    ``cache[slot_mapping[t]] = [kv_c_normed[t] | rope(k_pe[t])]``. ``rope`` turns neighbouring pairs
    (GPT-J style) in fp32 and is the identity without positions.

    Args:
        q: [T, H, 192], bfloat16 or float16. Inner stride 1, other strides free.
        k_nope: [T, H, 128], same type, for example half of a [T, H, 256] GEMM output.
        k_pe: [T, 64] or [T, 1, 64], same type.
        kv_c_normed: [T, 512], same type.
        kv_cache: [num_blocks, block_size, 576] of the inputs' type, written in place. Inner stride
            1, block and token strides free. Bytes of other slots stay as they were.
        slot_mapping: [>= T] int64 or int32, slot = block * block_size + offset. Negative slots are
            padding; slots past the cache are skipped like it. Of tokens with one slot the last
            writes. Entries past T are not read.
        positions: [>= T] int64 or int32, clamped to the table. With cos_sin_cache or not at all.
        cos_sin_cache: [max_position, 64] float32: 32 cosines, then 32 sines.
        out: [T, H, 192], contiguous. For it, stream, pdl and config see the module.

    Returns:
        k, [T, H, 192] contiguous, in the inputs' type.

    Raises:
        TypeError, ValueError, CaptureError, CompileError, ToolchainError: see the module.

    Example:
        >>> import torch, k3cupy
        >>> T, H = 3, 12
        >>> rand = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16)
        >>> cache = torch.zeros(8, 64, 576, dtype=torch.bfloat16)
        >>> k = k3cupy.fused_mla_key_concat_kv_cache_insert(
        ...     rand(T, H, 192), rand(T, H, 128), rand(T, 64), rand(T, 512),
        ...     cache, torch.tensor([64, 65, 66]))
        >>> k.shape
        torch.Size([3, 12, 192])
    """
    inputs = (q, k_nope, k_pe, kv_c_normed, kv_cache, slot_mapping, positions, cos_sin_cache)
    return _run(kernel.KEY_CONCAT, inputs, out, stream, pdl, config)


def fused_mla_key_concat_ds_mla_insert(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c_normed: Any,
    kv_cache: Any,
    slot_mapping: Any,
    positions: Any = None,
    cos_sin_cache: Any = None,
    *,
    out: Any = None,
    stream: Any = None,
    pdl: bool | None = None,
    config: MlaPrefillConfig | None = None,
) -> Any:
    """Do what ``fused_mla_key_concat_kv_cache_insert`` does, with the 656-byte cache.

    A row of the cache is 512 e4m3 bytes in tiles of 128, four fp32 tile scales, and 64 RoPE values
    in the inputs' type.

    Arguments, result and errors are those of that function; the cache alone is another.

    Args:
        kv_cache: [num_blocks, block_size, 656] uint8 (or float8_e4m3fn), written in place. Inner
            stride 1, block and token strides free. Bytes of other slots stay as they were.

    Example:
        >>> import torch, k3cupy
        >>> T, H = 3, 12
        >>> rand = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16)
        >>> cache = torch.zeros(8, 64, 656, dtype=torch.uint8)
        >>> k = k3cupy.fused_mla_key_concat_ds_mla_insert(
        ...     rand(T, H, 192), rand(T, H, 128), rand(T, 64), rand(T, 512),
        ...     cache, torch.tensor([64, 65, 66]))
        >>> k.shape
        torch.Size([3, 12, 192])
    """
    inputs = (q, k_nope, k_pe, kv_c_normed, kv_cache, slot_mapping, positions, cos_sin_cache)
    return _run(kernel.KEY_CONCAT_DS_MLA, inputs, out, stream, pdl, config)


def fused_mla_qkv_quant_kv_cache_fp8_insert(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c_normed: Any,
    v: Any,
    kv_cache: Any,
    slot_mapping: Any,
    q_scale_inv: Any,
    k_scale_inv: Any,
    v_scale_inv: Any,
    cache_scale_inv: Any,
    positions: Any = None,
    cos_sin_cache: Any = None,
    *,
    out: Any = None,
    stream: Any = None,
    pdl: bool | None = None,
    config: MlaPrefillConfig | None = None,
) -> Any:
    """Cast prefill query, key and value to e4m3 and write e4m3 latent rows, in one launch.

    Each of the four is ``x * scale_inv`` in fp32, rounded once to nearest even; RoPE, with
    positions, comes before the scale. What does not fit saturates to +-448, NaN stays NaN (code
    0x7F). q itself is left alone.

    Args:
        q: [T, H, 192], bfloat16 or float16.
        k_nope: [T, H, 128], same type, for example half of a [T, H, 256] GEMM output.
        k_pe: [T, 64] or [T, 1, 64], same type.
        kv_c_normed: [T, 512], same type.
        v: [T, H, 128], same type, for example the other half.
        kv_cache: [num_blocks, block_size, 576] float8_e4m3fn (uint8 is taken as its bytes), written
            in place.
        slot_mapping: [>= T] int64 or int32; negative slots are padding.
        q_scale_inv: one fp32 element on the device, or a number above 0.
        k_scale_inv: the same for the key.
        v_scale_inv: the same for the value.
        cache_scale_inv: the same for the cache rows.
        positions: [>= T] int64 or int32. With cos_sin_cache or not at all.
        cos_sin_cache: [max_position, 64] float32.
        out: (q8, k8, v8), contiguous e4m3 or uint8. For it, stream, pdl and config see the module.

    Returns:
        (q8, k8, v8): [T, H, 192], [T, H, 192] and [T, H, 128] contiguous e4m3.

    Raises:
        TypeError, ValueError, CaptureError, CompileError, ToolchainError: see the module.

    Example:
        >>> import torch, k3cupy
        >>> T, H = 3, 12
        >>> rand = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16)
        >>> kv = rand(T, H, 256)
        >>> cache = torch.zeros(8, 64, 576, dtype=torch.uint8)
        >>> q8, k8, v8 = k3cupy.fused_mla_qkv_quant_kv_cache_fp8_insert(
        ...     rand(T, H, 192), kv[..., :128], rand(T, 64), rand(T, 512), kv[..., 128:],
        ...     cache, torch.tensor([64, 65, 66]), 1.0, 1.0, 1.0, 1.0)
        >>> v8.dtype
        torch.float8_e4m3fn
    """
    inputs = (
        *(q, k_nope, k_pe, kv_c_normed, v, kv_cache, slot_mapping),
        *(q_scale_inv, k_scale_inv, v_scale_inv, cache_scale_inv, positions, cos_sin_cache),
    )
    return _run(kernel.QKV_QUANT, inputs, out, stream, pdl, config)


def fused_mla_kv_concat(
    k_nope: Any,
    k_pe: Any,
    *,
    out: Any = None,
    stream: Any = None,
    pdl: bool | None = None,
    config: MlaPrefillConfig | None = None,
) -> Any:
    """Join the keys of context that was read back from the cache, where k_pe is turned already.

    Args:
        k_nope: [T, H, 128], bfloat16 or float16. Inner stride 1, other strides free.
        k_pe: [T, 64] or [T, 1, 64], same type.
        out: [T, H, 192], contiguous. For it, stream, pdl and config see the module.

    Returns:
        k with ``k[t, h] = [k_nope[t, h] | k_pe[t]]``, [T, H, 192] contiguous, bit by bit.

    Raises:
        TypeError, ValueError, CaptureError, CompileError, ToolchainError: see the module.

    Example:
        >>> import torch, k3cupy
        >>> kv = torch.randn(3, 12, 256, dtype=torch.bfloat16)
        >>> k3cupy.fused_mla_kv_concat(kv[..., :128], kv[:, 0, :64]).shape
        torch.Size([3, 12, 192])
    """
    return _run(kernel.KV_CONCAT, (k_nope, k_pe), out, stream, pdl, config)


def fused_mla_kv_concat_quant_fp8(
    k_nope: Any,
    k_pe: Any,
    v: Any,
    *,
    out: Any = None,
    stream: Any = None,
    pdl: bool | None = None,
    config: MlaPrefillConfig | None = None,
) -> Any:
    """Join the keys of context and cast keys and values to e4m3 without a scale.

    The cast is PyTorch's ``.to(torch.float8_e4m3fn)``: nearest even, what does not fit saturates to
    +-448, NaN stays NaN with its sign (0x7F or 0xFF).

    Args:
        k_nope: [T, H, 128], bfloat16 or float16. Inner stride 1, other strides free.
        k_pe: [T, 64] or [T, 1, 64], same type, or e4m3 (uint8 is taken as its bytes), which is
            copied.
        v: [T, H, 128], of k_nope's type.
        out: (k8, v8), contiguous e4m3 or uint8. For it, stream, pdl and config see the module.

    Returns:
        (k8, v8): [T, H, 192] and [T, H, 128] contiguous e4m3.

    Raises:
        TypeError, ValueError, CaptureError, CompileError, ToolchainError: see the module.

    Example:
        >>> import torch, k3cupy
        >>> kv = torch.randn(3, 12, 256, dtype=torch.bfloat16)
        >>> k8, v8 = k3cupy.fused_mla_kv_concat_quant_fp8(
        ...     kv[..., :128], kv[:, 0, :64], kv[..., 128:])
        >>> k8.shape, v8.shape
        (torch.Size([3, 12, 192]), torch.Size([3, 12, 128]))
    """
    return _run(kernel.KV_CONCAT_QUANT, (k_nope, k_pe, v), out, stream, pdl, config)


def explain_mla_prefill(op: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Choice:
    """Say what one of the five operations would run, and why; launch nothing.

    Takes the arguments of that operation, validates them as it does, and raises the same errors.

    Args:
        op: its name, or the function.
        args: its positional arguments.
        kwargs: its keyword arguments; and ``gpu``, to ask for a GPU that need not be here,
            whatever device the tensors are on: ``"h200"``, its driver's name, or an architecture.

    Example:
        >>> import torch, k3cupy
        >>> kv = torch.randn(3, 12, 256, dtype=torch.bfloat16)
        >>> print(k3cupy.explain_mla_prefill("fused_mla_kv_concat", kv[..., :128], kv[:, 0, :64]))
        mla_prefill on the CPU: the tensors are on the CPU
    """
    for name, operation in _OPERATIONS.items():
        if op is operation.function or (isinstance(op, str) and op == name):
            return operation.explain(args, kwargs)
    reject("op", " or ".join(map(repr, SIGNATURES)), shown(op), "Or give the function")


def _check(given: Given) -> None:
    checks.check_flags(given, "pdl")
    checks.check_config(given["config"], MlaPrefillConfig)


def _run(op: str, inputs: Values, out: Any, stream: Any, pdl: Any, config: Any) -> Any:
    if config is not None or pdl is not None:
        check_options(_OPERATIONS[op], (pdl, config))
    values = (*inputs, *split_out(SIGNATURES[op], out))
    return _OPERATIONS[op](values, (pdl, config), stream)


def _choose(problem: mla.MlaProblem, gpu: DeviceInfo, given: Given) -> Choice:
    tokens, heads = problem.num_tokens, problem.num_heads
    return choose(kernel.KERNEL, problem.variant, tokens, heads, gpu, given["config"])


_REFERENCES: dict[str, Callable[..., None]] = {
    kernel.KEY_CONCAT: reference.key_concat_reference,
    kernel.KEY_CONCAT_DS_MLA: functools.partial(reference.key_concat_reference, ds_mla=True),
    kernel.QKV_QUANT: reference.qkv_quant_reference,
    kernel.KV_CONCAT: reference.kv_concat_reference,
    kernel.KV_CONCAT_QUANT: reference.kv_concat_quant_reference,
}


def _compute(problem: mla.MlaProblem, arrays: dict[str, Any]) -> None:
    arrays = mla.reference_arrays(problem, arrays)
    for output in problem.outputs:
        arrays[output.name] = arrays.pop(output.argument)
    _REFERENCES[problem.variant.op](**arrays)


def _operation(signature: Signature) -> Operation:
    def check(given: dict[str, Any]) -> None:
        _check(given)
        given |= zip(signature.out_names, split_out(signature, given.get("out")), strict=True)

    return Operation(
        function=globals()[signature.op],
        kernel=kernel,
        arguments=signature.arguments,
        options=("pdl", "config"),
        accept=lambda values, _given: accept(signature, values),
        choose=_choose,
        reference=_compute,
        check=check,
        verify=mla.verify,
    )


_OPERATIONS = {op: _operation(signature) for op, signature in SIGNATURES.items()}
