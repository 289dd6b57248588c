"""What the fused-A GEMM accepts. Runs once per set of shapes, strides, types and devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from k3cupy.ops import checks
from k3cupy.ops.arguments import Arguments, Layout, Values
from k3cupy.ops.fused_a_gemm_config import (
    K_MULTIPLE,
    MAX_TOKENS,
    FusedAGemmConfig,
    FusedAGemmVariant,
)
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.tensors import ALIGNMENT, TensorView

X, WEIGHT, OUT, RESIDUAL = range(4)
"""Places of the tensors among a call's values, whatever the function calls them."""

RESIDUAL_NAME = "residual"
"""The public signature has none: there a call's values carry None in its place."""

_MAX_EXTENT = 1 << 31


class Form:
    """One of the two public functions: what it calls its tensors, and how it sees the weight.

    Attributes:
        x: name of the input.
        weight: name of the weight.
        out: name of the output.
        is_transposed: the weight comes as [K, N] with strides (1, K).
        arguments: those and the residual, in the order of ``X``, ``WEIGHT``, ``OUT``, ``RESIDUAL``.
    """

    def __init__(self, x: str, weight: str, out: str, *, is_transposed: bool) -> None:
        self.x, self.weight, self.out = x, weight, out
        self.is_transposed = is_transposed
        self.arguments = Arguments(
            (x, weight, out, RESIDUAL_NAME), (x, weight, out) if is_transposed else (x, weight)
        )


FRIENDLY = Form("x", "weight", "out", is_transposed=False)
PUBLIC = Form("mat_a", "mat_b", "output", is_transposed=True)


@dataclass(frozen=True)
class FusedAGemmProblem:
    """A call that passed validation.

    Attributes:
        form: which function was called.
        views: the tensors by argument name.
        variant: which kernel the arguments ask for.
        num_tokens: M.
        n: N.
        k: K.
        slow_reason: why x is read element by element, or None.
    """

    form: Form
    views: dict[str, TensorView]
    variant: FusedAGemmVariant
    num_tokens: int
    n: int
    k: int
    slow_reason: str | None

    @property
    def x(self) -> TensorView:
        """The input."""
        return self.views[self.form.x]

    @property
    def out(self) -> TensorView | None:
        """The output that the caller gave."""
        return self.views.get(self.form.out)

    @property
    def residual(self) -> TensorView | None:
        """What is added."""
        return self.views.get(RESIDUAL_NAME)

    def layout(self) -> Layout:
        """Return the check of a call's addresses: the output apart from all but the residual."""
        return Layout(self.form.arguments, self.views, (self.form.out,), (RESIDUAL_NAME,))


def validate(form: Form, values: Values, *, weight_is_static: bool) -> FusedAGemmProblem:
    """Check everything that the host can see.

    Args:
        form: which function was called.
        values: its tensors, in the order of ``X``, ``WEIGHT``, ``OUT``, ``RESIDUAL``.
        weight_is_static: the promise.

    Raises:
        TypeError, ValueError: the text names the argument, what was expected and what was found.
    """
    views = form.arguments.views(values)
    for name, v in views.items():
        checks.check_dtype(name, v, ("bfloat16",), "The product is computed in bfloat16 only")
    num_tokens, n, k = _check_shapes(form, views)
    x = views[form.x]
    checks.check_strides(form.x, x)
    _check_weight_layout(form, views[form.weight])
    if form.out in views:
        out = views[form.out]
        checks.check_writable(form.out, out)
        checks.check_strides(form.out, out)
        checks.check_rows_apart(form.out, out)
    residual = views.get(RESIDUAL_NAME)
    if residual is not None:
        checks.check_strides(RESIDUAL_NAME, residual)
    checks.check_devices(views)
    slow_reason = checks.misalignment(form.x, x, strides_are_64_bit=True)
    packed = slow_reason is None and checks.is_packed(x)
    return FusedAGemmProblem(
        form=form,
        views={name: replace(v, owner=None) for name, v in views.items()},
        variant=FusedAGemmVariant(
            packed, slow_reason is None, weight_is_static, residual is not None
        ),
        num_tokens=num_tokens,
        n=n,
        k=k,
        slow_reason=slow_reason,
    )


def check_config(
    config: Any, num_tokens: int | None = None, device: DeviceInfo | None = None
) -> FusedAGemmConfig | None:
    """Accept None, or a configuration that can compute a call.

    Args:
        config: what the caller gave.
        num_tokens: M, where it is known.
        device: the GPU, where it is known.

    Raises:
        TypeError, ValueError: anything else.
    """
    if config is None:
        return None
    if not isinstance(config, FusedAGemmConfig):
        checks.reject("config", "None or a FusedAGemmConfig", repr(config), error=TypeError)
    if not config.is_valid():
        checks.reject("config", "a configuration that the kernel has", repr(config))
    if num_tokens is not None and num_tokens > config.tile_m:
        checks.reject("config", f"tile_m of at least the {num_tokens} rows", str(config.tile_m))
    if device is None:
        return config
    if config.shared_bytes > device.shared_memory_optin:
        checks.reject(
            "config",
            f"at most {device.shared_memory_optin} bytes of shared memory a block, which "
            f"{device.name} has",
            f"{config.shared_bytes} bytes",
            "Take fewer stages or a smaller tile",
        )
    if not config.is_valid(device):
        checks.reject(
            "config",
            f"split_k of 1 on {device.arch}, for clusters exist from sm_90 on",
            str(config.split_k),
        )
    return config


def _check_shapes(form: Form, views: dict[str, TensorView]) -> tuple[int, int, int]:
    x, weight = views[form.x], views[form.weight]
    checks.check_shape(form.x, x, ("M", "K"))
    num_tokens, k = x.shape
    wanted: tuple[int | str, ...] = (k, "N") if form.is_transposed else ("N", k)
    hint = "Pass the transpose of the weight [N, K]" if form.is_transposed else ""
    checks.check_shape(form.weight, weight, wanted, f" like {form.x}", hint)
    n = weight.shape[1 if form.is_transposed else 0]
    if num_tokens > MAX_TOKENS:
        checks.reject(
            form.x,
            f"at most {MAX_TOKENS} rows",
            str(num_tokens),
            "Call it for slices of the rows, or use your framework's linear, which is made for many"
            " rows",
        )
    if k % K_MULTIPLE or not 0 < k < _MAX_EXTENT:
        checks.reject(
            form.x,
            f"K a multiple of {K_MULTIPLE}, at least {K_MULTIPLE}",
            f"K = {k}",
            "Pad x and the weight with zeros",
        )
    if not 0 < n < _MAX_EXTENT:
        checks.reject(form.weight, f"N from 1 to {_MAX_EXTENT - 1}", f"N = {n}")
    for name in (form.out, RESIDUAL_NAME):
        if name in views:
            checks.check_shape(name, views[name], (num_tokens, n))
    return num_tokens, n, k


def _check_weight_layout(form: Form, weight: TensorView) -> None:
    rows = weight
    if form.is_transposed:
        rows = replace(weight, shape=weight.shape[::-1], strides=weight.strides[::-1])
    if not checks.is_packed(rows):
        k = rows.shape[1]
        if form.is_transposed:
            expected = f"a packed weight [N, K] seen transposed, strides {(1, k)}"
            hint = "Pass the transpose of a contiguous copy"
        else:
            expected = f"a packed weight, strides {(k, 1)}"
            hint = "Make a contiguous copy, once"
        checks.reject(form.weight, expected, f"strides {weight.strides}", hint)
    if weight.address % ALIGNMENT:
        checks.reject(
            form.weight,
            f"an address that is a multiple of {ALIGNMENT} bytes",
            f"address 0x{weight.address:x}",
            "Make a copy of it, once",
        )
