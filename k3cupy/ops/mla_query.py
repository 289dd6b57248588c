"""The MLA query front of a decode step: from the first projection to attention, in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3cupy.accept import checks, mla, mla_query
from k3cupy.accept.checks import OPTIONAL_BOOL
from k3cupy.call.arguments import Values
from k3cupy.call.choice import Choice
from k3cupy.call.operation import Given, Operation, check_options
from k3cupy.choose.mla import choose
from k3cupy.kernels import mla_query as kernel
from k3cupy.kernels.mla_query import MlaQueryConfig
from k3cupy.ops import mla_separate
from k3cupy.reference.mla_query import mla_query_reference
from k3cupy.runtime.devices import DeviceInfo


def fused_mla_decode_query(
    qkv_a: Any,
    q_norm_weight: Any,
    kv_norm_weight: Any,
    w_q_b: Any,
    w_uk: Any,
    kv_cache: Any,
    slot_mapping: Any,
    *,
    eps: float,
    ds_mla: bool = False,
    q_scale_inv: Any = None,
    cache_scale_inv: Any = None,
    positions: Any = None,
    cos_sin_cache: Any = None,
    out: Any = None,
    weight_is_static: bool = False,
    stream: Any = None,
    pdl: bool | None = None,
    config: MlaQueryConfig | None = None,
) -> Any:
    """Make attention's query of the first projection's output, and write the latent cache row.

    With ``norm(x) = x * rsqrt(mean(x^2) + eps)``, for each token b and head h::

        q[b]           = (norm(qkv_a[b, :1536]) * q_norm_weight) @ w_q_b.T      192 values a head
        mqa_q[b, h]    = [q[b, h, :128] @ w_uk[h] | rope(q[b, h, 128:])]
        cache[slot(b)] = [norm(qkv_a[b, 1536:2048]) * kv_norm_weight | rope(qkv_a[b, 2048:2112])]

    Formats of query and cache, slots, scales and RoPE are those of
    ``fused_mla_decode_q_concat_kv_cache_insert``, and so are the bits of a cache row. Sums are
    fp32. Two roundings to the inputs' type come before that of the store: of the normed query, for
    which one launch has w_q_b times q_norm_weight, and of the product with w_q_b.

    One launch computes up to 16 tokens on GPUs with clusters of blocks (sm_90 and newer). Whatever
    it cannot compute, and what is measured to be slower so, runs in separate kernels:
    ``fused_q_kv_rmsnorm``, ``low_latency_linear``, the absorbed product and the decode epilogue,
    which round once more, before the epilogue. ``explain_mla_decode_query`` says which, and why.

    Tensors may come from PyTorch, CuPy, NumPy, JAX or any DLPack producer, all on one CUDA device,
    or all on the CPU, where the same function runs in NumPy. B is num_tokens, H is num_heads.

    Args:
        qkv_a: [B, >= 2112], bfloat16 or float16: columns 0..1535 of the query, 1536..2047 of the
            latent row, 2048..2111 k_pe. Inner stride 1, row stride free.
        q_norm_weight: [1536], same type, contiguous.
        kv_norm_weight: [512], same type, contiguous.
        w_q_b: [H * 192, 1536], same type, contiguous.
        w_uk: [H, 128, 512], same type. Inner stride 1, other strides free. The real case is
            ``kv_b_proj.weight.view(H, 256, 512)[:, :128]``.
        kv_cache: written in place. [num_blocks, block_size, 576] of the inputs' type or of
            float8_e4m3fn (uint8 is taken as its bytes); with ``ds_mla`` [.., .., 656] of either.
            Inner stride 1, block and token strides free. Bytes of other slots stay as they were.
            With B = 0 any tensor will do.
        slot_mapping: [>= B] int64 or int32, slot = block * block_size + offset. Negative slots are
            padding; slots past the cache are skipped like it. Entries past B are not read.
        eps: added to the mean of the squares of both norms, a finite number of at least 0.
        ds_mla: the cache has 656-byte rows: 512 e4m3 bytes in tiles of 128, four fp32 tile scales,
            64 RoPE values in the inputs' type. The query keeps the inputs' type.
        q_scale_inv: makes mqa_q e4m3. One fp32 element on the device, or a number above 0.
        cache_scale_inv: the same for an fp8 cache, which needs it; other caches refuse it.
        positions: [>= B] int64 or int32, clamped to the table. With cos_sin_cache or not at all.
        cos_sin_cache: [max_position, 64] float32: 32 cosines, then 32 sines.
        out: [B, H, 576], contiguous, to be written and returned instead of a new tensor.
        weight_is_static: a promise: the four weights were complete before the preceding kernel
            began. They are then fetched before the wait for it, which is most of the time.
        stream: an int handle or an object with ``__cuda_stream__``. By default PyTorch's current
            stream, or CuPy's where no argument is a PyTorch tensor. Tensors between separate
            kernels are new ones of qkv_a's framework, on that stream.
        pdl: programmatic dependent launch. None: on, where the GPU has it (sm_90 and newer).
            False: each launch waits for the end of the preceding kernel; but those of
            ``low_latency_linear``, one of the separate kernels, have it wherever the GPU does. A
            kernel itself waits for its predecessor before it reads, so both are safe.
        config: how a head is shared out; None takes the measured one. It is an error where the call
            cannot be one launch.

    Returns:
        mqa_q, [B, H, 576] contiguous, in the inputs' type, or e4m3 with ``q_scale_inv``: a tensor
        of qkv_a's framework. CuPy has no float8 and gets the codes as uint8.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it. Nothing was written.
        CaptureError: a kernel is not loaded and the stream is capturing a graph, or separate
            kernels would need tensors of CuPy in one.
        CompileError, ToolchainError: a kernel cannot be built here; the text says why.

    Source: the public Kimi-K3 decode step of vLLM, in which these are two norms, two products and
    an epilogue.

    Example:
        >>> import torch, k3cupy
        >>> B, H = 2, 12
        >>> rand = lambda *shape: torch.randn(*shape).to(torch.bfloat16) / 32
        >>> kv_b_proj = rand(H * 256, 512)
        >>> cache = torch.zeros(8, 64, 576, dtype=torch.bfloat16)
        >>> mqa_q = k3cupy.fused_mla_decode_query(
        ...     rand(B, 2112), rand(1536), rand(512), rand(H * 192, 1536),
        ...     kv_b_proj.view(H, 256, 512)[:, :128], cache, torch.tensor([5, 70]), eps=1e-6)
        >>> mqa_q.shape
        torch.Size([2, 12, 576])
    """
    values = (
        qkv_a,
        q_norm_weight,
        kv_norm_weight,
        w_q_b,
        w_uk,
        kv_cache,
        slot_mapping,
        q_scale_inv,
        cache_scale_inv,
        positions,
        cos_sin_cache,
        out,
    )
    if (
        config is not None
        or type(eps) is not float
        or type(ds_mla) is not bool
        or type(weight_is_static) is not bool
        or type(pdl) not in OPTIONAL_BOOL
    ):
        check_options(_OPERATION, (eps, ds_mla, weight_is_static, pdl, config))
        eps = float(eps)
    return _OPERATION(values, (eps, ds_mla, weight_is_static, pdl, config), stream)


def explain_mla_decode_query(*args: Any, **kwargs: Any) -> Choice:
    """Say what ``fused_mla_decode_query`` would run, and why; launch nothing.

    Takes the arguments of that function, and raises the same errors. ``gpu=`` asks for a
    GPU that need not be here, as ``explain_mla_decode`` does.

    Returns:
        Of one launch its configuration. ``kernel`` is ``"separate"`` where several kernels run,
        ``config`` None, and the reason says what keeps them apart and what each of them is.

    Example:
        >>> import torch, k3cupy
        >>> zeros = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
        >>> print(k3cupy.explain_mla_decode_query(
        ...     zeros(2, 2112), zeros(1536), zeros(512), zeros(2304, 1536), zeros(12, 128, 512),
        ...     zeros(8, 64, 576), torch.tensor([5, 70]), eps=1e-6))
        mla_query on the CPU: the tensors are on the CPU
    """
    return _OPERATION.explain(args, kwargs)


def _check(given: dict[str, Any]) -> None:
    checks.check_flags(given, "ds_mla", "weight_is_static", "pdl")
    checks.check_config(given["config"], MlaQueryConfig)
    given["eps"] = checks.epsilon_of(given["eps"])


def _accept(values: Values, given: Given) -> mla.MlaProblem:
    return mla_query.accept(
        values,
        eps=given["eps"],
        ds_mla=given["ds_mla"],
        weight_is_static=given["weight_is_static"],
    )


def _choose(problem: mla.MlaProblem, gpu: DeviceInfo, given: Given) -> Choice:
    """One launch where it can be and is not measured to be slower; else separate kernels."""
    tokens, heads, config = problem.num_tokens, problem.num_heads, given["config"]
    if config is not None:
        mla_query.check_config(problem, config, gpu)
    why = kernel.why_not(tokens, problem.slow_reason, gpu)
    if why is None:
        found = choose(kernel.KERNEL, problem.variant, tokens, heads, gpu, config)
        if found.config is not None:
            why = mla_query.why_not(problem, found.config, gpu)
            if why is None:
                return found
    if why is not None:
        found = Choice(kernel.SEPARATE, None, why)
    pdl = gpu.has_pdl and given["pdl"] is not False
    return replace(found, reason=f"{found.reason}: {mla_separate.told(problem, pdl, gpu)}")


def _compute(problem: mla.MlaProblem, arrays: dict[str, Any]) -> None:
    mla_query_reference(
        **mla.reference_arrays(problem, arrays),
        epsilon=problem.epsilon,
        ds_mla=problem.variant.cache == "ds_mla",
    )


_OPERATION = Operation(
    function=fused_mla_decode_query,
    kernel=kernel,
    arguments=mla_query.ARGUMENTS,
    options=("eps", "ds_mla", "weight_is_static", "pdl", "config"),
    accept=_accept,
    choose=_choose,
    reference=_compute,
    check=_check,
    verify=mla.verify,
    separate=mla_separate.SEPARATE,
)
