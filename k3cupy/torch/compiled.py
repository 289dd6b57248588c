"""What PyTorch's compiler and its exporters trace in place of functions of ours.

``runtime.tracing`` hands them out. They put operators of ``k3cupy.torch.operators`` into the graph.
The compiler reads these functions, so they are plain, and import what they use when they are
traced: that is how a program that never imports the operators has them in time.
"""

from __future__ import annotations

from typing import Any

OUTPUTS = {
    "fused_mla_qkv_quant_kv_cache_fp8_insert": ("q8", "k8", "v8"),
    "fused_mla_kv_concat_quant_fp8": ("k8", "v8"),
    "fused_q_kv_rmsnorm": ("q", "kv_c_normed"),
}
"""What operators call outputs that are given, where there are several; one is ``out``."""

OUT_BY_PLACE = ("fused_a_gemm", "skinny_gemm")
"""Operators whose output may be a slice of a wider tensor, and so is given by its place: of an
argument that is named ``out`` the compiler demands that it be contiguous."""

NONE_BY_DEFAULT = ("pdl", "config", "out_dtype")
"""Options of operations that may be None; ``eps`` has no default, the others have False."""

_DSV3 = "dsv3_fused_a_gemm"


def operation(of: Any, values: tuple[Any, ...], options: tuple[Any, ...], stream: Any) -> Any:
    """Call the operator of an operation, in place of ``Operation.__call__``."""
    import torch

    from k3cupy.torch import operators, torch_linear

    name, wrong = of.function.__name__, "" if stream is None else "stream"
    tensors: dict[str, Any] = {}
    for argument, value in zip(of.arguments.names, values, strict=True):
        if value is None and argument not in of.arguments.required:
            continue
        if torch_linear.is_plain(value):
            tensors[argument] = value
        elif argument in of.arguments.scales and isinstance(value, float):
            tensors[f"{argument}_value"] = value
        elif argument in of.arguments.scales and type(value) is int:
            tensors[f"{argument}_value"] = float(value)
        else:
            wrong = argument
    flags, wrong_option = _flags(torch, of.options, options)
    wrong = wrong or wrong_option
    if name == _DSV3 and not wrong:
        x, weight, out = tensors["mat_a"], tensors["mat_b"], tensors.get("output")
        if x.dim() == 2 == weight.dim():
            if out is None:
                out = x.new_empty((x.shape[0], weight.shape[1]))
            torch.ops.k3cupy.dsv3_fused_a_gemm(out, x, weight, flags.get("pdl", False))
            return out
        wrong = "mat_a" if x.dim() != 2 else "mat_b"
    if wrong:
        if not torch.compiler.is_dynamo_compiling():
            operators.refuse(name, wrong)
        return operators.outside(of, values, options, stream)
    operator = getattr(torch.ops.k3cupy, name)
    outputs = OUTPUTS.get(name, ("out",))
    given = [tensors.pop(key) for key in of.arguments.names[-len(outputs) :] if key in tensors]
    if not given:
        return operator(**tensors, **flags)
    if name in OUT_BY_PLACE:
        operator.out(*[tensors.get(key) for key in of.arguments.names[:-1]], *given, **flags)
    else:
        operator.out(**tensors, **flags, **dict(zip(outputs, given, strict=True)))
    return given[0] if len(outputs) == 1 else tuple(given)


def _flags(torch: Any, names: tuple[str, ...], options: tuple[Any, ...]) -> tuple[Any, str]:
    """Return those options by name that are not their defaults, and one that cannot be carried.

    Without ``kv_inputs_ready``: a promise about the kernel before is one about an order of kernels,
    which in compiled code is the compiler's. The bits are the same.
    """
    flags: dict[str, Any] = {}
    wrong = ""
    for name, option in zip(names, options, strict=True):
        if option is None and name in NONE_BY_DEFAULT:
            continue
        if option is False and name not in ("eps", *NONE_BY_DEFAULT):
            continue
        if name == "eps":
            fits = isinstance(option, float | int) and not isinstance(option, bool)
            flags[name] = float(option) if fits else option
        elif name == "out_dtype":
            flags[name] = torch.float32 if _is_float32(torch, option) else option
            fits = isinstance(flags[name], torch.dtype)
        else:
            flags[name] = option
            fits = isinstance(option, bool) and name != "config"
        if not fits:
            wrong = name
    flags.pop("kv_inputs_ready", None)
    return flags, wrong


def _is_float32(torch: Any, kind: Any) -> bool:
    return kind is torch.float32 or (isinstance(kind, str) and kind == "float32")


def linear(
    values: tuple[Any, ...],
    batch_invariant: Any,
    weight_is_static: Any,
    stream: Any,
    out_dtype: Any,
) -> Any:
    """Compute ``x @ weight.T (+ residual)``, in place of what low-latency linear asks for.

    By the operator, where a kernel of ours may run: which one, if any, is decided when it runs.
    Elsewhere by the framework's linear, as outside of compiled code.
    """
    import torch

    from k3cupy.ops import framework_linear, linear
    from k3cupy.torch import operators, torch_linear

    x, weight, residual, _ = values
    wrong = "" if stream is None else "stream"
    for argument, value in (("x", x), ("weight", weight), ("residual", residual)):
        if not torch_linear.is_plain(value) and (value is not None or argument != "residual"):
            wrong = argument
    if type(weight_is_static) is not bool:
        wrong = "weight_is_static"
    if batch_invariant is not None and type(batch_invariant) is not bool:
        wrong = "batch_invariant"
    if _is_float32(torch, out_dtype):
        out_dtype = torch.float32
    elif out_dtype is not None:
        wrong = "out_dtype"
    if wrong:
        if not torch.compiler.is_dynamo_compiling():
            operators.refuse("low_latency_linear", wrong)
        every = (values, batch_invariant, weight_is_static, stream, out_dtype)
        return operators.outside(linear._run, *every)
    follows = residual is not None and torch.is_grad_enabled() and residual.requires_grad
    if x.dim() == 2 and not follows and torch_linear.may_be_operator(x, weight):
        return torch.ops.k3cupy.low_latency_linear(
            x, weight, residual, weight_is_static, batch_invariant, out_dtype
        )
    if out_dtype is None:
        return framework_linear.torch_linear(torch, x, weight, residual)
    return framework_linear.torch_float32(torch, x, weight, residual, operators.STORES_SUMS)


def check_options(of: Any, options: tuple[Any, ...]) -> None:
    """Check outside of the graph what no operator can carry, and nothing else."""
    import torch

    from k3cupy.call import operation
    from k3cupy.torch import operators

    if _flags(torch, of.options, options)[1]:
        operators.outside(operation.check_options, of, options)


def check_enable_pdl(enable_pdl: Any) -> None:
    """Refuse outside of the graph what is no bool, for nothing else comes here."""
    from k3cupy.ops import fused_a_gemm
    from k3cupy.torch import operators

    operators.outside(fused_a_gemm._check_enable_pdl, enable_pdl)


def split_out(signature: Any, out: Any) -> tuple[Any, ...]:
    """Return one value an output; what does not fit is told outside of the graph."""
    from k3cupy.accept import mla
    from k3cupy.torch import operators

    count = len(signature.out_names)
    if out is None or count == 1:
        return (out,) + (None,) * (count - 1)
    if type(out) not in (tuple, list) or len(out) != count or any(t is None for t in out):
        refused: tuple[Any, ...] = operators.outside(mla.split_out, signature, out)
        return refused
    return tuple(out)


def ends_with_output(first: Any, second: Any, third: Any) -> bool:
    """Tell the two orders of ``dsv3_fused_a_gemm`` apart, as the function of this name does."""
    from k3cupy.ops import fused_a_gemm
    from k3cupy.torch import operators, torch_linear

    plain = torch_linear.is_plain
    if not (plain(first) and plain(second) and (third is None or plain(third))):
        told: bool = operators.outside(fused_a_gemm._ends_with_output, first, second, third)
        return told
    if first.dim() != 2 or second.dim() != 2:
        return False
    (rows, k), (inner, n) = first.shape, second.shape
    if k != inner:
        return False
    if third is not None:
        if third.dim() != 2:
            return False
        if third.shape[0] != rows or third.shape[1] != n:
            return bool(n != third.shape[0])
    return bool(rows != k or k != n or second.stride() == (1, k))
