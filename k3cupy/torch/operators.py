"""PyTorch operators for every operation, ``torch.ops.k3cupy.*``: importing this registers them.

Each takes the arguments of the public function of its name, but for ``stream`` and ``config``, and
runs that function, on the CPU and on a GPU. An output that is to be written goes to the overload
``out``. A scale that is a number has an argument of its own beside that for a tensor. What is
written stands in the schema.

They have no derivatives and no rule for ``vmap``: both are refused. ``low_latency_linear``, which
has both, is in ``torch_library``, and comes with the others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

import k3cupy
from k3cupy.call.arguments import Problem
from k3cupy.call.operation import Operation, operations
from k3cupy.constants import V_HEAD_DIM
from k3cupy.kernels import fused_a_gemm, mla_query, mla_value, skinny_gemm
from k3cupy.runtime import tracing
from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import ALIGNMENT, TensorView
from k3cupy.torch.compiled import NONE_BY_DEFAULT, OUT_BY_PLACE, OUTPUTS
from k3cupy.torch.torch_library import LIBRARY, TAGS, refuse_forward_mode

_GEMM = (
    "Tensor x, Tensor weight, Tensor? residual=None, *, "
    "bool? pdl=None, {}ScalarType? out_dtype=None"
)
_LATENT = "Tensor k_nope, Tensor k_pe, Tensor kv_c_normed"
_PLACES = "Tensor(a!) kv_cache, Tensor slot_mapping"
_ROPE = "Tensor? positions=None, Tensor? cos_sin_cache=None"
_KEY = f"Tensor(b!) q, {_LATENT}, {_PLACES}, {_ROPE}, *, bool? pdl=None"

SCHEMAS = {
    "fused_a_gemm": _GEMM.format("bool weight_is_static=False, bool batch_invariant=False, "),
    "skinny_gemm": _GEMM.format("bool weight_is_static=False, "),
    "fused_mla_decode_q_concat_kv_cache_insert": (
        f"Tensor ql_nope, Tensor q_pe, Tensor kv_c_normed, Tensor k_pe, {_PLACES}, *, "
        f"bool ds_mla=False, Tensor? q_scale_inv=None, Tensor? cache_scale_inv=None, {_ROPE}, "
        "bool? pdl=None, bool kv_inputs_ready=False, "
        "float? q_scale_inv_value=None, float? cache_scale_inv_value=None"
    ),
    "fused_mla_key_concat_kv_cache_insert": _KEY,
    "fused_mla_key_concat_ds_mla_insert": _KEY,
    "fused_mla_qkv_quant_kv_cache_fp8_insert": (
        f"Tensor q, {_LATENT}, Tensor v, {_PLACES}, Tensor? q_scale_inv=None, "
        "Tensor? k_scale_inv=None, Tensor? v_scale_inv=None, Tensor? cache_scale_inv=None, "
        f"{_ROPE}, *, bool? pdl=None, float? q_scale_inv_value=None, "
        "float? k_scale_inv_value=None, float? v_scale_inv_value=None, "
        "float? cache_scale_inv_value=None"
    ),
    "fused_mla_decode_query": (
        "Tensor qkv_a, Tensor q_norm_weight, Tensor kv_norm_weight, Tensor w_q_b, Tensor w_uk, "
        f"{_PLACES}, *, float eps, bool ds_mla=False, Tensor? q_scale_inv=None, "
        f"Tensor? cache_scale_inv=None, {_ROPE}, bool weight_is_static=False, bool? pdl=None, "
        "float? q_scale_inv_value=None, float? cache_scale_inv_value=None"
    ),
    "fused_q_kv_rmsnorm": (
        "Tensor qkv_a, Tensor q_weight, Tensor kv_weight, *, float eps, "
        "bool weight_is_static=False, bool? pdl=None"
    ),
    "fused_mla_decode_value": (
        "Tensor latent, Tensor w_uv, Tensor? gate=None, *, bool weight_is_static=False, "
        "bool? pdl=None"
    ),
    "fused_mla_kv_concat": "Tensor k_nope, Tensor k_pe, *, bool? pdl=None",
    "fused_mla_kv_concat_quant_fp8": "Tensor k_nope, Tensor k_pe, Tensor v, *, bool? pdl=None",
}
"""The arguments of each operator, by the name of its function; its overload ``out`` has the outputs
besides."""

_DSV3 = "dsv3_fused_a_gemm"
_DSV3_ARGUMENTS = "Tensor(a!) output, Tensor mat_a, Tensor mat_b, bool enable_pdl=False"
"""vLLM's own: it returns nothing, and has no overload."""

_SCALE = "_value"
"""What the name of a scale ends with where it is a number."""

STORES_SUMS = "dtype" in torch.ops.aten.mm.overloads()
"""Whether a product of PyTorch can store float32, which traced code cannot ask."""


def outside(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function of ours: the compiler leaves its graph for that."""
    return function(*given)


tracing.untraced(
    outside,
    "an operator of k3cupy carries PyTorch's own tensors, Python's numbers as scales and eps, and "
    "bools as flags. A call with others, such as NumPy's scalars, with a stream or a config leaves "
    "the graph",
)


def refuse(name: str, argument: str) -> NoReturn:
    """Refuse a call that is exported, and that no operator can carry."""
    expected = "what an operator can carry, for the call is exported: tensors of PyTorch"
    hint = f"stream= and config= are for calls of {name} outside of a trace"
    reject(argument, expected, "something else", hint, TypeError)


# --- What an operator runs -----------------------------------------------------------------------


def _kernel(function: Callable[..., Any], schema: Any, outputs: Sequence[str]) -> Any:
    """Return what computes an operator: the public function, told outputs and scales its way."""
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    scales = _scales(schema)
    if not scales and not outputs:
        return function

    def kernel(*args: Any, **named: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | named
        _merge_scales(given, scales)
        if outputs:
            _check_given(given, outputs)
            out = tuple([given.pop(name) for name in outputs])
            given["out"] = out[0] if len(out) == 1 else out
        for name in scales:
            given.setdefault(name, None)
        result = function(**given)
        return None if outputs else result

    return kernel


def _scales(schema: Any) -> list[str]:
    names = [argument.name for argument in schema.arguments]
    return [name.removesuffix(_SCALE) for name in names if name.endswith(_SCALE)]


def _merge_scales(given: dict[str, Any], scales: Sequence[str]) -> None:
    """Put numbers where a function takes them: in the place of the tensors."""
    for name in scales:
        number = given.pop(name + _SCALE, None)
        if number is not None:
            if given.get(name) is not None:
                reject(name, f"None beside {name}{_SCALE}", "a tensor", "Pass one of the two")
            given[name] = number


def _check_given(given: Mapping[str, Any], outputs: Sequence[str]) -> None:
    """Refuse a call that leaves out an output, which some schemas allow."""
    for name in outputs:
        if given.get(name) is None:
            hint = "The operator without the overload makes a new one"
            reject(name, "a tensor", "None", hint, TypeError)


def _fake(operation: Operation, schema: Any, outputs: Sequence[str]) -> Any:
    """Return what makes an operator's results in a trace, and refuses what the operation would."""
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    scales, arguments = _scales(schema), operation.arguments
    # In the schema an output has the name of what it is; an operation calls it out[0].
    called = dict(zip(arguments.names[-max(len(outputs), 1) :], outputs, strict=False))

    def fake(*args: Any, **named: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | named
        _merge_scales(given, scales)
        _check_given(given, outputs)
        tensors = [given.get(called.get(name, name)) for name in arguments.names]
        options = {name: _hint(given.get(name, _default(name))) for name in operation.options}
        problem = _accepted(operation, tensors, options)
        if outputs:
            return None
        first: Any = tensors[0]
        made = []
        for output in problem.outputs:
            kind = getattr(torch, output.dtype)
            shape = _shape(operation, output.shape[-1], tensors)
            made.append(first.new_empty(shape, dtype=kind))
        return made[0] if len(made) == 1 else tuple(made)

    return fake


def _shape(operation: Operation, width: int, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape of an output, of symbols where the tensors of a call have such."""
    first = tensors[0]
    if operation.kernel in (fused_a_gemm, skinny_gemm):
        return first.shape[0], tensors[1].shape[0]
    if operation.kernel is mla_query:
        w_uk = tensors[operation.arguments.places["w_uk"]]
        return first.shape[0], w_uk.shape[0], width
    if operation.kernel is mla_value:
        return first.shape[0], first.shape[1] * V_HEAD_DIM
    return *first.shape[:-1], width


def _default(option: str) -> bool | None:
    return None if option in NONE_BY_DEFAULT else False


def _seen(value: Any, on_cpu: bool) -> Any:
    """Return what validation sees of a tensor of a trace: its layout, and an aligned address.

    A size that is a symbol has the value that it has in the call which is traced. So nothing is
    asked of the symbol, which would bind the graph to the answer.
    """
    if not isinstance(value, Tensor):
        return _hint(value)
    shape, strides = tuple(map(_hint, value.shape)), tuple(map(_hint, value.stride()))
    return TensorView(
        address=0 if 0 in shape else ALIGNMENT,
        shape=shape,
        strides=strides,
        dtype=str(value.dtype).removeprefix("torch."),
        itemsize=value.element_size(),
        device_type="cpu" if on_cpu else value.device.type,
        device_index=value.device.index or 0,
        readonly=False,
        requires_grad=value.requires_grad,
        framework="torch",
    )


def _hint(value: Any, unknown: int = 1) -> Any:
    """Return the number that a symbol stands for; for one of which nobody knows, some other."""
    if _is_known(value):
        node = getattr(value, "node", None)
        return value if node is None else node.hint
    expression = value.node.expr
    return max(int(expression.xreplace(dict.fromkeys(expression.free_symbols, unknown))), 0)


def _is_known(value: Any) -> bool:
    node = getattr(value, "node", None)
    return node is None or node.has_hint()


def _accepted(operation: Operation, tensors: Sequence[Any], options: Mapping[str, Any]) -> Problem:
    """Return the call of a trace, validated.

    Where nobody knows a size yet, as of tokens that the data count, it is no reason to refuse: it
    may come to be the size beside which it is held. It is looked at when the operator runs.
    """
    # Those of the meta device stand for tensors of any other, if there are no others.
    given = [t for t in tensors if isinstance(t, Tensor)]
    is_meta = any(t.is_meta for t in given) and all(t.is_meta or not t.dim() for t in given)
    views = tuple([_seen(t, is_meta) for t in tensors])
    try:
        return operation.accept(views, options)
    except (TypeError, ValueError):
        sizes = [size for t in given for size in t.shape]
        known = {_hint(size) for size in sizes if _is_known(size)}
        for number in () if all(map(_is_known, sizes)) else sorted(known):
            seen = tuple([_with(number, *pair) for pair in zip(tensors, views, strict=True)])
            with contextlib.suppress(TypeError, ValueError):
                return operation.accept(seen, options)
        raise


def _with(unknown: int, value: Any, view: Any) -> Any:
    """Return what validation sees of a tensor with another number for sizes that nobody knows."""
    if not isinstance(value, Tensor):
        return view
    shape = tuple([_hint(size, unknown) for size in value.shape])
    strides = tuple([_hint(stride, unknown) for stride in value.stride()])
    return replace(view, address=0 if 0 in shape else ALIGNMENT, shape=shape, strides=strides)


# --- What is refused before ----------------------------------------------------------------------


def _without_derivatives(operator: Any) -> Any:
    """Return what autograd calls: an error where it follows, for else gradients would be zero."""
    names = [argument.name for argument in operator._schema.arguments]
    redispatch, below = operator.redispatch, torch._C._after_autograd_keyset

    def check(keys: Any, *args: Any, **named: Any) -> Any:
        refuse_forward_mode(names[0])
        if torch.is_grad_enabled():
            for name, value in (*zip(names, args, strict=False), *named.items()):
                if isinstance(value, Tensor) and value.requires_grad:
                    found = "one that requires grad while grad mode is on"
                    hint = "Call inside torch.no_grad() or torch.inference_mode()"
                    reject(name, "a tensor without gradient", found, hint)
        return redispatch(keys & below, *args, **named)

    return check


def _without_vmap(operator: Any) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        hint = "Its rows are tokens: join the mapped dimension with them, or loop over it"
        first = operator._schema.arguments[0].name
        reject(first, "a call outside of torch.func.vmap", "one inside", hint, TypeError)

    return refuse


# --- Registration --------------------------------------------------------------------------------


def _define(name: str, arguments: str, returns: str, outputs: Sequence[str] = ()) -> None:
    """Register an operator, or an overload of it, with all that is called for it."""
    overload = f"{name}.out" if outputs else name
    LIBRARY.define(f"{overload}({arguments}) -> {returns}", tags=TAGS)
    packet = getattr(torch.ops.k3cupy, name)
    operator = packet.out if outputs else packet.default
    function, schema = getattr(k3cupy, name), operator._schema
    kernel = _dsv3 if name == _DSV3 else _kernel(function, schema, outputs)
    fake = _fake(operations[function], schema, ("output",) if name == _DSV3 else outputs)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(overload, kernel, device)
    torch.library.register_fake(f"k3cupy::{overload}", fake, lib=LIBRARY)
    LIBRARY.impl(overload, _without_derivatives(operator), "Autograd", with_keyset=True)
    LIBRARY.impl(overload, _without_vmap(operator), "FuncTorchBatched")


def _dsv3(output: Tensor, mat_a: Tensor, mat_b: Tensor, enable_pdl: bool = False) -> None:
    k3cupy.dsv3_fused_a_gemm(output=output, mat_a=mat_a, mat_b=mat_b, enable_pdl=enable_pdl)


def _register() -> None:
    for name, arguments in SCHEMAS.items():
        outputs = OUTPUTS.get(name, ("out",))
        several = ", ".join(["Tensor"] * len(outputs))
        _define(name, arguments, f"({several})" if len(outputs) > 1 else "Tensor")
        given = ", ".join(
            f"Tensor({mark}!) {name}" for mark, name in zip("xyz", outputs, strict=False)
        )
        with_outputs = f"{arguments}, {given}"
        if name in OUT_BY_PLACE:  # behind arguments with defaults only one with a default may be
            with_outputs = arguments.replace(", *", ", Tensor(x!)? out=None, *")
        _define(name, with_outputs, "()", outputs)
    _define(_DSV3, _DSV3_ARGUMENTS, "()")


_register()
if "torch._dynamo" in sys.modules:  # it may be just now that it meets a function of ours
    tracing.tell()
