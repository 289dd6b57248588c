"""What the skinny GEMM accepts. Runs once per set of shapes, strides, types and devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from k3cupy.constants import CTYPES
from k3cupy.ops import checks
from k3cupy.ops.arguments import Arguments, Layout, Values
from k3cupy.ops.skinny_gemm_config import (
    K_MULTIPLE,
    MAX_TOKENS,
    SkinnyGemmConfig,
    SkinnyGemmVariant,
)
from k3cupy.runtime.tensors import ALIGNMENT, TensorView

ARGUMENTS = Arguments(("x", "weight", "out", "residual"), ("x", "weight"))
X, WEIGHT, OUT, RESIDUAL = range(4)
"""Places of the tensors among a call's values."""

_MAX_EXTENT = 1 << 31


@dataclass(frozen=True)
class SkinnyGemmProblem:
    """A call that passed validation.

    Attributes:
        views: the tensors by argument name.
        variant: which kernel the arguments ask for.
        num_tokens: M.
        n: N.
        k: K.
        slow_reason: why x is read element by element, or None.
    """

    views: dict[str, TensorView]
    variant: SkinnyGemmVariant
    num_tokens: int
    n: int
    k: int
    slow_reason: str | None

    def layout(self) -> Layout:
        """Return the check of a call's addresses: the output apart from all but the residual."""
        return Layout(ARGUMENTS, self.views, ("out",), ("residual",))


def validate(values: Values, *, weight_is_static: bool) -> SkinnyGemmProblem:
    """Check everything that the host can see.

    Args:
        values: the tensors, in the order of ``X``, ``WEIGHT``, ``OUT``, ``RESIDUAL``.
        weight_is_static: the promise.

    Raises:
        TypeError, ValueError: the text names the argument, what was expected and what was found.
    """
    views = ARGUMENTS.views(values)
    x, weight = views["x"], views["weight"]
    checks.check_dtype("x", x, tuple(CTYPES))
    for name, v in views.items():
        checks.check_dtype(name, v, (x.dtype,), "All tensors have the type of x")
    num_tokens, n, k = _check_shapes(views)
    checks.check_strides("x", x)
    _check_weight_layout(weight)
    if "out" in views:
        checks.check_writable("out", views["out"])
        checks.check_strides("out", views["out"])
        checks.check_rows_apart("out", views["out"])
    if "residual" in views:
        checks.check_strides("residual", views["residual"])
    checks.check_devices(views)
    slow_reason = checks.misalignment("x", x, strides_are_64_bit=True)
    return SkinnyGemmProblem(
        views={name: replace(v, owner=None) for name, v in views.items()},
        variant=SkinnyGemmVariant(
            x.dtype, slow_reason is None, "residual" in views, weight_is_static
        ),
        num_tokens=num_tokens,
        n=n,
        k=k,
        slow_reason=slow_reason,
    )


def check_config(config: Any, num_tokens: int | None = None) -> SkinnyGemmConfig | None:
    """Accept None, or a configuration that can compute a call.

    Args:
        config: what the caller gave.
        num_tokens: M, where it is known and not 0.

    Raises:
        TypeError, ValueError: anything else.
    """
    if config is None:
        return None
    if not isinstance(config, SkinnyGemmConfig):
        checks.reject("config", "None or a SkinnyGemmConfig", repr(config), error=TypeError)
    if not config.is_valid():
        checks.reject("config", "a configuration that the kernel has", repr(config))
    if num_tokens and num_tokens != config.num_rows:
        checks.reject(
            "config",
            f"num_rows of exactly the {num_tokens} rows of x",
            str(config.num_rows),
            "Make one for each number of rows, for example with dataclasses.replace",
        )
    return config


def _check_shapes(views: dict[str, TensorView]) -> tuple[int, int, int]:
    x, weight = views["x"], views["weight"]
    checks.check_shape("x", x, ("M", "K"))
    num_tokens, k = x.shape
    checks.check_shape("weight", weight, ("N", k), " like x")
    n = weight.shape[0]
    if num_tokens > MAX_TOKENS:
        checks.reject(
            "x",
            f"at most {MAX_TOKENS} rows",
            str(num_tokens),
            "Call fused_a_gemm, which takes up to 64, or your framework's linear",
        )
    if k % K_MULTIPLE or not 0 < k < _MAX_EXTENT:
        checks.reject(
            "x",
            f"K a multiple of {K_MULTIPLE}, at least {K_MULTIPLE}",
            f"K = {k}",
            "Pad x and the weight with zeros",
        )
    if not 0 < n < _MAX_EXTENT:
        checks.reject("weight", f"N from 1 to {_MAX_EXTENT - 1}", f"N = {n}")
    for name in ("out", "residual"):
        if name in views:
            checks.check_shape(name, views[name], (num_tokens, n))
    return num_tokens, n, k


def _check_weight_layout(weight: TensorView) -> None:
    if not checks.is_packed(weight):
        checks.reject(
            "weight",
            f"a packed weight, strides {(weight.shape[1], 1)}",
            f"strides {weight.strides}",
            "Make a contiguous copy, once",
        )
    if weight.address % ALIGNMENT:
        checks.reject(
            "weight",
            f"an address that is a multiple of {ALIGNMENT} bytes",
            f"address 0x{weight.address:x}",
            "Make a copy of it, once",
        )
