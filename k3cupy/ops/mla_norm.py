"""The two RMSNorms behind the first projection of an MLA layer, in one launch."""

from __future__ import annotations

from typing import Any

from k3cupy.accept import checks, mla, mla_norm
from k3cupy.accept.checks import OPTIONAL_BOOL
from k3cupy.call.arguments import Values
from k3cupy.call.choice import Choice
from k3cupy.call.operation import Given, Operation, check_options
from k3cupy.choose.mla import choose
from k3cupy.kernels import mla_norm as kernel
from k3cupy.kernels.mla_norm import MlaNormConfig
from k3cupy.reference.mla_norm import q_kv_rmsnorm_reference
from k3cupy.runtime.devices import DeviceInfo


def fused_q_kv_rmsnorm(
    qkv_a: Any,
    q_weight: Any,
    kv_weight: Any,
    *,
    eps: float,
    out: Any = None,
    weight_is_static: bool = False,
    stream: Any = None,
    pdl: bool | None = None,
    config: MlaNormConfig | None = None,
) -> Any:
    """Norm the query and the latent part of the first projection's output, in one launch.

    ``q[b] = norm(qkv_a[b, :1536]) * q_weight`` and ``kv_c_normed[b] = norm(qkv_a[b, 1536:2048]) *
    kv_weight`` with ``norm(x) = x * rsqrt(mean(x^2) + eps)``: in fp32, rounded once, at the store.
    The other columns are not read. A row's bits depend on no other row, nor on how many there are.

    Tensors may come from PyTorch, CuPy, NumPy, JAX or any DLPack producer, all on one CUDA device,
    or all on the CPU, where the same function runs in NumPy. B is num_tokens.

    Args:
        qkv_a: [B, >= 2112], bfloat16 or float16: columns 0..1535 of the query, 1536..2047 of the
            latent row, then k_pe. Inner stride 1, row stride free.
        q_weight: [1536], same type, contiguous.
        kv_weight: [512], same type, contiguous.
        eps: added to the mean of the squares, a finite number of at least 0.
        out: (q, kv_c_normed), contiguous, to be written and returned instead of new tensors.
        weight_is_static: a promise: the weights were complete before the preceding kernel began.
            They are then fetched before the wait for it.
        stream: an int handle or an object with ``__cuda_stream__``. By default PyTorch's current
            stream, or CuPy's where no argument is a PyTorch tensor.
        pdl: programmatic dependent launch. None: on, where the GPU has it (sm_90 and newer).
            False: the launch waits for the end of the preceding kernel. The kernel itself waits for
            its predecessor before it reads, so both are safe.
        config: how a row is shared out; None takes the measured one. All give the same bits.

    Returns:
        (q, kv_c_normed): [B, 1536] and [B, 512], contiguous, in the inputs' type, tensors of
        qkv_a's framework.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it. Nothing was written.
        CaptureError: the instance is not loaded and the stream is capturing a graph.
        CompileError, ToolchainError: the kernel cannot be built here; the text says why.

    Source: vLLM's ``fused_q_kv_rmsnorm``, a Triton kernel, which takes the two parts by themselves.

    Example:
        >>> import torch, k3cupy
        >>> qkv_a = torch.full((2, 2112), 3.0, dtype=torch.bfloat16)
        >>> ones = torch.ones(1536, dtype=torch.bfloat16)
        >>> q, kv_c_normed = k3cupy.fused_q_kv_rmsnorm(qkv_a, ones, ones[:512], eps=1e-6)
        >>> q.shape, kv_c_normed.shape, q[0, 0]
        (torch.Size([2, 1536]), torch.Size([2, 512]), tensor(1., dtype=torch.bfloat16))
    """
    if (
        config is not None
        or type(eps) is not float
        or type(weight_is_static) is not bool
        or type(pdl) not in OPTIONAL_BOOL
    ):
        check_options(_OPERATION, (eps, weight_is_static, pdl, config))
        eps = float(eps)
    values = (qkv_a, q_weight, kv_weight, *mla.split_out(mla_norm.SIGNATURE, out))
    return _OPERATION(values, (eps, weight_is_static, pdl, config), stream)


def explain_q_kv_rmsnorm(*args: Any, **kwargs: Any) -> Choice:
    """Say what ``fused_q_kv_rmsnorm`` would run, and why; launch nothing.

    Takes the arguments of that function, and raises the same errors. ``gpu=`` asks for a
    GPU that need not be here, as ``explain_mla_decode`` does.

    Example:
        >>> import torch, k3cupy
        >>> qkv_a = torch.zeros(2, 2112, dtype=torch.bfloat16)
        >>> weights = qkv_a[0, :1536], qkv_a[1, :512]
        >>> print(k3cupy.explain_q_kv_rmsnorm(qkv_a, *weights, eps=1e-6))
        mla_norm on the CPU: the tensors are on the CPU
    """
    return _OPERATION.explain(args, kwargs)


def _check(given: dict[str, Any]) -> None:
    checks.check_flags(given, "weight_is_static", "pdl")
    checks.check_config(given["config"], MlaNormConfig)
    given["eps"] = checks.epsilon_of(given["eps"])
    outs = mla.split_out(mla_norm.SIGNATURE, given.get("out"))
    given |= zip(mla_norm.SIGNATURE.out_names, outs, strict=True)


def _accept(values: Values, given: Given) -> mla.MlaProblem:
    static = given["weight_is_static"]
    return mla_norm.accept(values, eps=given["eps"], weight_is_static=static)


def _choose(problem: mla.MlaProblem, gpu: DeviceInfo, given: Given) -> Choice:
    tokens, heads = problem.num_tokens, problem.num_heads
    return choose(kernel.KERNEL, problem.variant, tokens, heads, gpu, given["config"])


def _compute(problem: mla.MlaProblem, arrays: dict[str, Any]) -> None:
    outs = {output.name: arrays.pop(output.argument) for output in problem.outputs}
    q_kv_rmsnorm_reference(**arrays, **outs, epsilon=problem.epsilon)


_OPERATION = Operation(
    function=fused_q_kv_rmsnorm,
    kernel=kernel,
    arguments=mla_norm.SIGNATURE.arguments,
    options=("eps", "weight_is_static", "pdl", "config"),
    accept=_accept,
    choose=_choose,
    reference=_compute,
    check=_check,
)
