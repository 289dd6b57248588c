"""The skinny GEMM: the product of one to 16 tokens with a weight, straight from registers.

Source: the skinny GEMM of the public dispatch of Kimi-K3 in vLLM, whose template parameters it
names. M is the number of tokens, K the width of one, N that of the output.
"""

from __future__ import annotations

from typing import Any

from k3cupy.accept import checks, gemm
from k3cupy.accept.checks import OPTIONAL_BOOL
from k3cupy.accept.gemm import GemmProblem, check_skinny_config
from k3cupy.call.arguments import Values
from k3cupy.call.choice import Choice
from k3cupy.call.operation import Given, Operation, check_options
from k3cupy.choose.gemm import SKINNY, choose
from k3cupy.kernels import skinny_gemm as kernel
from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig
from k3cupy.reference.skinny_gemm import skinny_gemm_reference
from k3cupy.runtime.devices import DeviceInfo


def skinny_gemm(
    x: Any,
    weight: Any,
    residual: Any = None,
    *,
    out: Any = None,
    pdl: bool | None = None,
    weight_is_static: bool = False,
    out_dtype: Any = None,
    stream: Any = None,
    config: SkinnyGemmConfig | None = None,
) -> Any:
    """Multiply one to 16 tokens with a weight, and add a residual where there is one.

    ``out[m, n] = sum over k of x[m, k] * weight[n, k] (+ residual[m, n])``. bfloat16 or float16,
    float32 sums, the residual added in float32, one rounding, with ``out_dtype=float32`` none. The
    same inputs give the same bits, run after run. Tensors may come from PyTorch, CuPy, NumPy, JAX
    or any DLPack producer, all on one CUDA device, or all on the CPU, where the same function runs
    in NumPy.

    Two kernels compute it, one as dot products, for up to 8 tokens, one on tensor cores, for up to
    16: the configuration says which. Where nothing was measured the first takes 1 and 2 tokens.

    Args:
        x: [M, K] bfloat16 or float16, M from 0 to 16, K a multiple of 8. Inner stride 1, row stride
            free: x may be a column slice of a wider tensor. Rows that begin at multiples of 16
            bytes are read by the fast path, all others element by element.
        weight: [N, K], same type, contiguous, at a multiple of 16 bytes.
        residual: [M, N], same type, inner stride 1, row stride free. It may be ``out`` itself: then
            the product is added in place.
        out: [M, N], same type, to be written and returned instead of a new tensor. Inner stride 1,
            rows apart from one another.
        pdl: programmatic dependent launch. None: on, where the GPU has it (sm_90 and newer).
            False: the launch waits for the end of the preceding kernel. The kernel itself waits for
            its predecessor before it reads x and residual, so both are safe.
        weight_is_static: a promise: the preceding kernel does not write the weight, which may then
            be fetched before that kernel has ended.
        out_dtype: None for that of x, or float32: the sums as they are, without a rounding. ``out``
            is of that type; it may then not be the residual.
        stream: an int handle or an object with ``__cuda_stream__``. By default PyTorch's current
            stream, or CuPy's where no argument is a PyTorch tensor. PyTorch tensors used on another
            stream are recorded with its allocator; CuPy arrays must outlive the kernel.
        config: how the work is cut; None lets the package choose. Configurations of one ``order``
            give the same bits for a row, also for other M.

    Returns:
        ``out``, or a new contiguous [M, N] tensor of x's framework. With M = 0 nothing is launched.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it. Nothing was written.
        CaptureError: the instance is not loaded and the stream is capturing a graph.
        CompileError, ToolchainError: the kernel cannot be built here; the text says why.

    Example:
        >>> import torch, k3cupy
        >>> x = torch.ones(2, 6288, dtype=torch.float16)
        >>> weight, residual = torch.ones(1536, 128).half(), torch.ones(2, 1536).half()
        >>> k3cupy.skinny_gemm(x[:, 6144:6272], weight, residual)[0, 0]
        tensor(129., dtype=torch.float16)
    """
    if (
        config is not None
        or type(weight_is_static) is not bool
        or type(pdl) not in OPTIONAL_BOOL
        or out_dtype is not None
    ):
        check_options(OPERATION, (pdl, weight_is_static, config, out_dtype))
    return OPERATION((x, weight, residual, out), (pdl, weight_is_static, config, out_dtype), stream)


def explain_skinny_gemm(*args: Any, **kwargs: Any) -> Choice:
    """Say what ``skinny_gemm`` would run, and why; launch nothing.

    Takes the arguments of that function, and raises the same errors. ``gpu=`` asks for a
    GPU that need not be here, whatever device the tensors are on: ``"h200"``, the name that its
    driver gives, or an architecture.

    Example:
        >>> import torch, k3cupy
        >>> x, weight = torch.ones(4, 128).bfloat16(), torch.ones(256, 128).bfloat16()
        >>> print(k3cupy.explain_skinny_gemm(x, weight))
        skinny on the CPU: the tensors are on the CPU
    """
    return OPERATION.explain(args, kwargs)


def _check(given: Given) -> None:
    checks.check_flags(given, "pdl", "weight_is_static")
    check_skinny_config(given["config"])
    if given["out_dtype"] is not None:
        gemm.out_dtype_of(given["out_dtype"])


def _accept(values: Values, given: Given) -> GemmProblem:
    asked = {name: given[name] for name in ("weight_is_static", "out_dtype")}
    problem = gemm.accept(gemm.OURS, gemm.SKINNY, values, **asked)
    check_skinny_config(given["config"], problem.num_tokens)
    return problem


def _choose(problem: GemmProblem, gpu: DeviceInfo, given: Given) -> Choice:
    return choose(
        (SKINNY,),
        *problem.size,
        gpu,
        residual=problem.residual is not None,
        config=check_skinny_config(given["config"], gpu=gpu),
        measured_as=problem.measured_as,
    )


def _compute(problem: GemmProblem, arrays: dict[str, Any]) -> None:
    skinny_gemm_reference(arrays["x"], arrays["weight"], arrays["out"], arrays.get(gemm.RESIDUAL))


OPERATION = Operation(
    function=skinny_gemm,
    kernel=kernel,
    arguments=gemm.OURS.arguments,
    options=("pdl", "weight_is_static", "config", "out_dtype"),
    accept=_accept,
    choose=_choose,
    reference=_compute,
    check=_check,
)
