"""The fused MLA decode epilogue: concatenate the absorbed query, write the latent cache row."""

from __future__ import annotations

from typing import Any

from k3cupy.accept import checks, mla, mla_decode
from k3cupy.accept.checks import OPTIONAL_BOOL
from k3cupy.call.arguments import Values
from k3cupy.call.choice import Choice
from k3cupy.call.operation import Given, Operation, check_options
from k3cupy.choose.mla import choose
from k3cupy.kernels import mla_decode as kernel
from k3cupy.kernels.mla_decode import MlaDecodeConfig
from k3cupy.reference.mla_decode import mla_decode_reference
from k3cupy.runtime.devices import DeviceInfo


def fused_mla_decode_q_concat_kv_cache_insert(
    ql_nope: Any,
    q_pe: Any,
    kv_c_normed: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    *,
    ds_mla: bool = False,
    q_scale_inv: Any = None,
    cache_scale_inv: Any = None,
    positions: Any = None,
    cos_sin_cache: Any = None,
    out: Any = None,
    stream: Any = None,
    pdl: bool | None = None,
    kv_inputs_ready: bool = False,
    config: MlaDecodeConfig | None = None,
) -> Any:
    """Join the absorbed decode query and write the latent row into the paged cache, in one launch.

    ``mqa_q[b, h] = [ql_nope[b, h] | rope(q_pe[b, h])]`` and, for every slot that is not negative,
    ``cache[slot_mapping[b]] = [kv_c_normed[b] | rope(k_pe[b])]``. ``rope`` turns neighbouring pairs
    (GPT-J style) in fp32 and is the identity without positions. fp8 is e4m3 with round-to-nearest-
    even of ``x * scale_inv``: what does not fit saturates to +-448, NaN stays NaN (code 0x7F).

    Tensors may come from PyTorch, CuPy, NumPy, JAX or any DLPack producer, all on one CUDA device,
    or all on the CPU, where the same function runs in NumPy. B is num_tokens, H is num_heads.

    Args:
        ql_nope: [B, H, 512], bfloat16 or float16. Inner stride 1, other strides free.
        q_pe: [B, H, 64], same type. Inner stride 1, other strides free.
        kv_c_normed: [B, 512], same type. Inner stride 1, row stride free.
        k_pe: [B, 64] or [B, 1, 64], same type. Inner stride 1, row stride free.
        kv_cache: written in place. [num_blocks, block_size, 576] of the inputs' type or of
            float8_e4m3fn (uint8 is taken as its bytes); with ``ds_mla`` [.., .., 656] of either.
            Inner stride 1, block and token strides free. Bytes of other slots stay as they were.
            With B = 0 any tensor will do.
        slot_mapping: [>= B] int64 or int32, slot = block * block_size + offset. Negative slots are
            padding; slots past the cache are skipped like it. Entries past B are not read.
        ds_mla: the cache has 656-byte rows: 512 e4m3 bytes in tiles of 128, four fp32 tile scales,
            64 RoPE values in the inputs' type. The query keeps the inputs' type.
        q_scale_inv: makes mqa_q e4m3. One fp32 element on the device, or a number above 0.
        cache_scale_inv: the same for an fp8 cache, which needs it; other caches refuse it.
        positions: [>= B] int64 or int32, clamped to the table. With cos_sin_cache or not at all.
        cos_sin_cache: [max_position, 64] float32: 32 cosines, then 32 sines.
        out: [B, H, 576], contiguous, to be written and returned instead of a new tensor.
        stream: an int handle or an object with ``__cuda_stream__``. By default PyTorch's current
            stream, or CuPy's where no argument is a PyTorch tensor. PyTorch tensors used on another
            stream are recorded with its allocator; CuPy arrays must outlive the kernel.
        pdl: programmatic dependent launch. None: on, where the GPU has it (sm_90 and newer).
            False: the launch waits for the end of the preceding kernel. The kernel itself waits for
            its predecessor before it reads, so both are safe.
        kv_inputs_ready: a promise: kv_c_normed, k_pe, slot_mapping, the cache scale, positions and
            the table were complete before the preceding kernel began, and the preceding kernel does
            not touch the cache rows written here. The cache blocks then skip the wait.
        config: how threads are mapped to a row; None takes the measured one. All give the same
            bits.

    Returns:
        mqa_q, [B, H, 576] contiguous, in the inputs' type, or e4m3 with ``q_scale_inv``: a tensor
        of ql_nope's framework. CuPy has no float8 and gets the codes as uint8.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it. Nothing was written.
        CaptureError: the instance is not loaded and the stream is capturing a graph.
        CompileError, ToolchainError: the kernel cannot be built here; the text says why.

    Source: the public Kimi-K3 decode epilogue of vLLM, whose name and arguments these are.

    Example:
        >>> import torch, k3cupy
        >>> B, H = 2, 12
        >>> rand = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16)
        >>> cache = torch.zeros(8, 64, 576, dtype=torch.bfloat16)
        >>> mqa_q = k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
        ...     rand(B, H, 512), rand(B, H, 64), rand(B, 512), rand(B, 64),
        ...     cache, torch.tensor([5, 70]))
        >>> mqa_q.shape
        torch.Size([2, 12, 576])
    """
    values = (
        ql_nope,
        q_pe,
        kv_c_normed,
        k_pe,
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
        or type(ds_mla) is not bool
        or type(kv_inputs_ready) is not bool
        or type(pdl) not in OPTIONAL_BOOL
    ):
        check_options(_OPERATION, (ds_mla, kv_inputs_ready, pdl, config))
    return _OPERATION(values, (ds_mla, kv_inputs_ready, pdl, config), stream)


def explain_mla_decode(*args: Any, **kwargs: Any) -> Choice:
    """Say what ``fused_mla_decode_q_concat_kv_cache_insert`` would run, and why; launch nothing.

    Takes the arguments of that function, and raises the same errors. ``gpu=`` asks for a
    GPU that need not be here, whatever device the tensors are on: ``"h200"``, the name that its
    driver gives, or an architecture.
    """
    return _OPERATION.explain(args, kwargs)


def _check(given: Given) -> None:
    checks.check_flags(given, "ds_mla", "kv_inputs_ready", "pdl")
    checks.check_config(given["config"], MlaDecodeConfig)


def _accept(values: Values, given: Given) -> mla.MlaProblem:
    ready = given["kv_inputs_ready"]
    return mla_decode.accept(values, ds_mla=given["ds_mla"], kv_inputs_ready=ready)


def _choose(problem: mla.MlaProblem, gpu: DeviceInfo, given: Given) -> Choice:
    tokens, heads = problem.num_tokens, problem.num_heads
    return choose(kernel.KERNEL, problem.variant, tokens, heads, gpu, given["config"])


def _compute(problem: mla.MlaProblem, arrays: dict[str, Any]) -> None:
    mla_decode_reference(
        **mla.reference_arrays(problem, arrays), ds_mla=problem.variant.cache == "ds_mla"
    )


_OPERATION = Operation(
    function=fused_mla_decode_q_concat_kv_cache_insert,
    kernel=kernel,
    arguments=mla_decode.ARGUMENTS,
    options=("ds_mla", "kv_inputs_ready", "pdl", "config"),
    accept=_accept,
    choose=_choose,
    reference=_compute,
    check=_check,
    verify=mla.verify,
)
