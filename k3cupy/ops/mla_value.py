"""The value up-projection behind MLA attention, with its gate, in one launch."""

from __future__ import annotations

from typing import Any

from k3cupy.accept import checks, mla_value
from k3cupy.accept.checks import OPTIONAL_BOOL
from k3cupy.accept.mla_value import HeadProblem
from k3cupy.call.arguments import Values
from k3cupy.call.choice import Choice
from k3cupy.call.operation import Given, Operation, check_options
from k3cupy.choose.mla import choose
from k3cupy.kernels import mla_value as kernel
from k3cupy.kernels.mla_value import MlaValueConfig
from k3cupy.reference.mla_value import mla_value_reference
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import reject


def fused_mla_decode_value(
    latent: Any,
    w_uv: Any,
    gate: Any = None,
    *,
    out: Any = None,
    weight_is_static: bool = False,
    stream: Any = None,
    pdl: bool | None = None,
    config: MlaValueConfig | None = None,
) -> Any:
    """Make values of attention's latent output, and gate them, in one launch.

    ``out[b, h * 128 : (h + 1) * 128] = (latent[b, h] @ w_uv[h]) * sigmoid(gate[b, the same])``;
    without a gate the product alone. fp32 accumulation and gate, one rounding, at the store.

    Tensors may come from PyTorch, CuPy, NumPy, JAX or any DLPack producer, all on one CUDA device,
    or all on the CPU, where the same function runs in NumPy. B is num_tokens, H is num_heads.

    Args:
        latent: [B, H, 512], bfloat16 or float16. Inner stride 1, other strides free.
        w_uv: [H, 512, 128], same type. One of the last two axes has stride 1, other strides are
            free. The real case is ``kv_b_proj.weight.view(H, 256, 512)[:, 128:].transpose(1, 2)``.
        gate: [B, H * 128], same type. Inner stride 1, row stride free.
        out: [B, H * 128], contiguous, to be written and returned instead of a new tensor.
        weight_is_static: a promise: w_uv was complete before the preceding kernel began. It is then
            fetched before the wait for it.
        stream: an int handle or an object with ``__cuda_stream__``. By default PyTorch's current
            stream, or CuPy's where no argument is a PyTorch tensor.
        pdl: programmatic dependent launch. None: on, where the GPU has it (sm_90 and newer).
            False: the launch waits for the end of the preceding kernel. The kernel itself waits for
            its predecessor before it reads, so both are safe.
        config: how a head is shared out; None takes the measured one.

    Returns:
        [B, H * 128], contiguous, in the inputs' type, a tensor of latent's framework: what the
        output projection takes.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it. Nothing was written.
        CaptureError: the instance is not loaded and the stream is capturing a graph.
        CompileError, ToolchainError: the kernel cannot be built here; the text says why.

    Source: vLLM's ``_v_up_proj``, a batched matmul, and the gate of Kimi-K3 behind it.

    Example:
        >>> import torch, k3cupy
        >>> B, H = 2, 12
        >>> latent = torch.ones(B, H, 512, dtype=torch.bfloat16)
        >>> kv_b_proj = torch.ones(H * 256, 512, dtype=torch.bfloat16)
        >>> w_uv = kv_b_proj.view(H, 256, 512)[:, 128:].transpose(1, 2)
        >>> out = k3cupy.fused_mla_decode_value(latent, w_uv, latent.new_zeros(B, H * 128))
        >>> out.shape, out[0, 0]
        (torch.Size([2, 1536]), tensor(256., dtype=torch.bfloat16))
    """
    if config is not None or type(weight_is_static) is not bool or type(pdl) not in OPTIONAL_BOOL:
        check_options(_OPERATION, (weight_is_static, pdl, config))
    return _OPERATION((latent, w_uv, gate, out), (weight_is_static, pdl, config), stream)


def explain_mla_decode_value(*args: Any, **kwargs: Any) -> Choice:
    """Say what ``fused_mla_decode_value`` would run, and why; launch nothing.

    Takes the arguments of that function, and raises the same errors. ``gpu=`` asks for a
    GPU that need not be here, as ``explain_mla_decode`` does.

    Example:
        >>> import torch, k3cupy
        >>> latent, w_uv = torch.zeros(2, 12, 512).bfloat16(), torch.zeros(12, 512, 128).bfloat16()
        >>> print(k3cupy.explain_mla_decode_value(latent, w_uv))
        mla_value on the CPU: the tensors are on the CPU
    """
    return _OPERATION.explain(args, kwargs)


def _check(given: Given) -> None:
    checks.check_flags(given, "weight_is_static", "pdl")
    checks.check_config(given["config"], MlaValueConfig)


def _accept(values: Values, given: Given) -> HeadProblem:
    return mla_value.accept(values, weight_is_static=given["weight_is_static"])


def _choose(problem: HeadProblem, gpu: DeviceInfo, given: Given) -> Choice:
    tokens, heads, config = problem.num_tokens, problem.num_heads, given["config"]
    found = choose(kernel.KERNEL, problem.variant, tokens, heads, gpu, config)
    needed = found.config.shared_bytes(problem.variant)
    why = checks.lack_of_shared_memory(found.config, needed, gpu)
    if why is None:
        return found
    if config is not None:
        reject("config", "one that fits the GPU", why, "Take a smaller tile")
    return Choice(kernel.KERNEL, kernel.UNTUNED, f"{found.reason}; but {why}")


def _compute(_: HeadProblem, arrays: dict[str, Any]) -> None:
    mla_value_reference(**arrays)


_OPERATION = Operation(
    function=fused_mla_decode_value,
    kernel=kernel,
    arguments=mla_value.ARGUMENTS,
    options=("weight_is_static", "pdl", "config"),
    accept=_accept,
    choose=_choose,
    reference=_compute,
    check=_check,
)
