"""The fused-A GEMM: the product of a few tokens with a weight, at the speed of reading the weight.

Source: the public fused-A GEMM of DeepSeek-V3 as vLLM and SGLang have it, whose two signatures
``dsv3_fused_a_gemm`` keeps. M is the number of tokens, K the width of one, N that of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from k3cupy.accept import checks, gemm
from k3cupy.accept.checks import OPTIONAL_BOOL
from k3cupy.accept.gemm import GemmProblem, Signature, check_fused_a_config
from k3cupy.call.arguments import Values
from k3cupy.call.choice import Choice
from k3cupy.call.launch import Launch
from k3cupy.call.operation import Given, Operation, check_options
from k3cupy.choose.gemm import FUSED_A, choose
from k3cupy.kernels import fused_a_gemm as kernel
from k3cupy.kernels.fused_a_gemm import MAX_TOKENS, FusedAGemmConfig
from k3cupy.reference.fused_a_gemm import fused_a_gemm_reference
from k3cupy.runtime import producers, tracing
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import reject


def fused_a_gemm(
    x: Any,
    weight: Any,
    residual: Any = None,
    *,
    out: Any = None,
    pdl: bool | None = None,
    weight_is_static: bool = False,
    batch_invariant: bool = False,
    out_dtype: Any = None,
    stream: Any = None,
    config: FusedAGemmConfig | None = None,
) -> Any:
    """Multiply up to 64 tokens with a weight: ``out[m, n] = sum over k of x[m, k] * weight[n, k]``.

    bfloat16 in and out, float32 sums, one rounding, before which a residual is added where given;
    with ``out_dtype=float32`` none.
    The same inputs give the same bits, run after run. Tensors may come from PyTorch, CuPy, NumPy,
    JAX or any DLPack producer, all on one CUDA device, or all on the CPU, where the same function
    runs in NumPy.

    Args:
        x: [M, K] bfloat16, M from 0 to 64, K a multiple of 16. Inner stride 1, row stride free: x
            may be a column slice of a wider tensor. Rows that begin at multiples of 16 bytes are
            read by the fast path, all others element by element.
        weight: [N, K] bfloat16, contiguous, at a multiple of 16 bytes.
        residual: [M, N] bfloat16, added to the sums in float32. Inner stride 1, row stride and
            address free. It may be ``out`` itself, to add in place; another overlap is refused.
        out: [M, N] bfloat16, to be written and returned instead of a new tensor. Inner stride 1,
            rows apart from one another.
        pdl: programmatic dependent launch. None: on, where the GPU has it (sm_90 and newer).
            False: the launch waits for the end of the preceding kernel. The kernel itself waits for
            its predecessor before it reads x or the residual, so both are safe.
        weight_is_static: a promise: the preceding kernel does not write the weight, which may then
            be fetched before that kernel has ended.
        batch_invariant: the bits of a row depend neither on M nor on the other rows.
        out_dtype: None for that of x, or float32: the sums as they are, without a rounding. ``out``
            is of that type; it may then not be the residual.
        stream: an int handle or an object with ``__cuda_stream__``. By default PyTorch's current
            stream, or CuPy's where no argument is a PyTorch tensor. PyTorch tensors used on another
            stream are recorded with its allocator; CuPy arrays must outlive the kernel.
        config: how the work is cut; None lets the package choose. Configurations of one ``order``
            give the same bits.

    Returns:
        ``out``, or a new contiguous [M, N] tensor of x's framework. With M = 0 nothing is launched.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it. Nothing was written.
        CaptureError: the instance is not loaded and the stream is capturing a graph.
        CompileError, ToolchainError: the kernel cannot be built here; the text says why.

    Example:
        >>> import torch, k3cupy
        >>> x = torch.randn(4, 2112, dtype=torch.bfloat16)
        >>> weight = torch.randn(2304, 1536, dtype=torch.bfloat16)
        >>> k3cupy.fused_a_gemm(x[:, :1536], weight).shape
        torch.Size([4, 2304])
        >>> residual = torch.randn(4, 2304, dtype=torch.bfloat16)
        >>> out = k3cupy.fused_a_gemm(x[:, :1536], weight, residual, out=residual)  # in place
        >>> out is residual
        True
    """
    options = (pdl, weight_is_static, batch_invariant, config, out_dtype)
    if (
        config is not None
        or type(weight_is_static) is not bool
        or type(batch_invariant) is not bool
        or type(pdl) not in OPTIONAL_BOOL
        or out_dtype is not None
    ):
        check_options(OPERATION, options)
    return OPERATION((x, weight, residual, out), options, stream)


@overload
def dsv3_fused_a_gemm(output: Any, mat_a: Any, mat_b: Any, enable_pdl: bool = False) -> None: ...
@overload
def dsv3_fused_a_gemm(
    mat_a: Any, mat_b: Any, output: Any = None, enable_pdl: bool = False
) -> Any: ...
def dsv3_fused_a_gemm(*args: Any, **kwargs: Any) -> Any:
    """Compute ``output = mat_a @ mat_b`` with the public signatures; see ``fused_a_gemm``.

    Both orders of arguments are taken: ``(output, mat_a, mat_b, enable_pdl=False)``, vLLM's, and
    ``(mat_a, mat_b, output=None)``, SGLang's. Of three tensors without names, shapes and the
    layout of mat_b tell which is meant: no call fits both. (A bare DLPack object has no shape to
    look at: with such it is vLLM's.)

    Args:
        output: [M, N] bfloat16, written. Inner stride 1, rows apart from one another. In SGLang's
            order it may be left out, for a new tensor.
        mat_a: [M, K] bfloat16, M from 0 to 64: x of ``fused_a_gemm``.
        mat_b: [K, N] bfloat16 with strides (1, K): the packed weight [N, K] seen transposed.
        enable_pdl: programmatic dependent launch where the GPU has it, and with it the promise of
            ``weight_is_static`` for mat_b, as the public function has it. False: a launch that
            waits for the end of the preceding kernel.

    Returns:
        output in SGLang's order; nothing in vLLM's, and where all three tensors are named.

    Raises:
        TypeError, ValueError, CaptureError, CompileError, ToolchainError: as ``fused_a_gemm``.

    Example:
        >>> import torch, k3cupy
        >>> x, weight = torch.ones(4, 128).bfloat16(), torch.ones(256, 128).bfloat16()
        >>> output = torch.empty(4, 256, dtype=torch.bfloat16)
        >>> k3cupy.dsv3_fused_a_gemm(output, x, weight.t())
        >>> output[0, 0]
        tensor(128., dtype=torch.bfloat16)
        >>> k3cupy.dsv3_fused_a_gemm(x, weight.t()).shape
        torch.Size([4, 256])
    """
    if len(args) >= 3:
        is_sglang = _ends_with_output(*args[:3])
    else:  # the names that follow tell
        is_sglang = ("output", "mat_a", "mat_b")[len(args)] not in kwargs
    return (_dsv3_of_sglang if is_sglang else _dsv3_of_vllm)(*args, **kwargs)


def _dsv3_of_vllm(output: Any, mat_a: Any, mat_b: Any, enable_pdl: Any = False) -> None:
    if output is None:
        hint = "In the order (mat_a, mat_b, output) it may be left out"
        reject("output", "a tensor", "None", hint, TypeError)
    _dsv3_of_sglang(mat_a, mat_b, output, enable_pdl)


def _dsv3_of_sglang(mat_a: Any, mat_b: Any, output: Any = None, enable_pdl: Any = False) -> Any:
    if type(enable_pdl) is not bool:
        _check_enable_pdl(enable_pdl)
    return _DSV3((mat_a, mat_b, None, output), (enable_pdl, enable_pdl, False, None, None), None)


@tracing.instead("check_enable_pdl")
def _check_enable_pdl(enable_pdl: Any) -> None:
    checks.check_flags({"enable_pdl": enable_pdl}, "enable_pdl")


@tracing.instead("ends_with_output")
def _ends_with_output(first: Any, second: Any, third: Any) -> bool:
    """Return whether three tensors are mat_a, mat_b and output, in this order."""
    try:
        (rows, k), (inner, n) = first.shape, second.shape
        if k != inner:
            return False
        if third is not None and third.shape != (rows, n):
            out_rows, _ = third.shape
            return bool(n != out_rows)  # of neither order: that of which one tensor is wrong
        # Three squares of one size fit either order; the weight is the one seen transposed.
        return rows != k or k != n or producers.view(second, "mat_b").strides == (1, k)
    except Exception:  # one that has no shape: told, by its name, where the call is checked
        return False


def explain_fused_a_gemm(*args: Any, **kwargs: Any) -> Choice:
    """Say what ``fused_a_gemm`` would run, and why; launch nothing.

    Takes the arguments of that function, and raises the same errors. ``gpu=`` asks for a
    GPU that need not be here, whatever device the tensors are on: ``"h200"``, the name that its
    driver gives, or an architecture.

    Example:
        >>> import torch, k3cupy
        >>> x, weight = torch.ones(4, 128).bfloat16(), torch.ones(256, 128).bfloat16()
        >>> print(k3cupy.explain_fused_a_gemm(x, weight))
        fused_a on the CPU: the tensors are on the CPU
    """
    return OPERATION.explain(args, kwargs)


def _check(given: Given) -> None:
    checks.check_flags(given, "pdl", "weight_is_static", "batch_invariant")
    check_fused_a_config(given["config"])
    if given["out_dtype"] is not None:
        gemm.out_dtype_of(given["out_dtype"])


def _choose(problem: GemmProblem, gpu: DeviceInfo, given: Given) -> Choice:
    return choose(
        (FUSED_A,),
        *problem.size,
        gpu,
        residual=problem.residual is not None,
        batch_invariant=given["batch_invariant"],
        config=check_fused_a_config(given["config"], problem.num_tokens, gpu),
        why_not_mapped=kernel.why_not_mapped(problem, slice(0, problem.num_tokens)),
        measured_as=problem.measured_as,
    )


def slices(num_tokens: int) -> list[slice]:
    """Return the rows of each launch; more than one only in batch-invariant mode."""
    starts = range(0, num_tokens, MAX_TOKENS)
    return [slice(start, min(start + MAX_TOKENS, num_tokens)) for start in starts]


def _launches(problem: GemmProblem, config: FusedAGemmConfig, gpu: DeviceInfo) -> list[Launch]:
    found = []
    for rows in slices(problem.num_tokens):
        count = rows.stop - rows.start
        if count < min(problem.num_tokens, MAX_TOKENS):  # the rest behind whole slices
            size, why_not = (problem.n, problem.k, count), kernel.why_not_mapped(problem, rows)
            rest = choose((FUSED_A,), *size, gpu, batch_invariant=True, why_not_mapped=why_not)
            config = rest.config
        found.append(kernel.launch(problem, config, rows))
    return found


def _compute(problem: GemmProblem, arrays: dict[str, Any]) -> None:
    names = problem.signature
    weight = arrays[names.weight]
    weight = weight.T if names.is_transposed else weight
    fused_a_gemm_reference(arrays[names.x], weight, arrays[names.out], arrays.get(gemm.RESIDUAL))


def _operation(function: Callable[..., Any], signature: Signature) -> Operation:
    def accept(values: Values, given: Given) -> GemmProblem:
        asked = {name: given[name] for name in ("weight_is_static", "out_dtype")}
        problem = gemm.accept(signature, gemm.FUSED_A, values, **asked)
        check_fused_a_config(given["config"], problem.num_tokens)
        return problem

    return Operation(
        function=function,
        kernel=kernel,
        arguments=signature.arguments,
        options=("pdl", "weight_is_static", "batch_invariant", "config", "out_dtype"),
        accept=accept,
        choose=_choose,
        reference=_compute,
        check=_check,
        launches=_launches,
    )


OPERATION = _operation(fused_a_gemm, gemm.OURS)
_DSV3 = _operation(dsv3_fused_a_gemm, gemm.DSV3)
# Of the public function, in what Python itself says of a wrong call.
_dsv3_of_vllm.__qualname__ = _dsv3_of_sglang.__qualname__ = "dsv3_fused_a_gemm"
