"""What the value up-projection behind MLA attention accepts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3cupy.accept import checks, mla
from k3cupy.call.arguments import Arguments, Output, Values
from k3cupy.constants import KV_LORA_RANK, V_HEAD_DIM
from k3cupy.kernels.mla_value import Variant
from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import TensorView

_REQUIRED = ("latent", "w_uv")
ARGUMENTS = Arguments((*_REQUIRED, "gate", "out"), _REQUIRED)

ABSORBED = Arguments(("q_nope", "w_uk", "out"), ("q_nope", "w_uk"))
"""Of the absorbed query, one of the separate kernels of the query front."""

_MAX_ROWS = 1 << 28
"""Rows of one launch: the number of its blocks, at most eight a row, must fit 31 bits."""


@dataclass(frozen=True)
class HeadProblem(mla.MlaProblem):
    """A product with a matrix of each head that passed validation.

    Attributes:
        x: the name of what is multiplied.
        weight: that of the matrices.
    """

    x: str = "latent"
    weight: str = "w_uv"


def accept(values: Values, *, weight_is_static: bool) -> HeadProblem:
    """Check everything that the host can see of values in the order of ``ARGUMENTS``."""
    views = ARGUMENTS.views(values)
    dtype = mla.check_alike(views, ARGUMENTS.names)
    latent, weight = views["latent"], views["w_uv"]
    checks.check_shape("latent", latent, ("num_tokens", "num_heads", KV_LORA_RANK))
    num_tokens, num_heads, _ = latent.shape
    if num_heads == 0:
        reject("latent", "at least one head", f"shape {list(latent.shape)}")
    if num_tokens * num_heads >= _MAX_ROWS:
        expected = f"num_tokens * num_heads below {_MAX_ROWS}"
        reject("latent", expected, f"{num_tokens * num_heads}", "Split the batch")
    checks.check_shape("w_uv", weight, (num_heads, KV_LORA_RANK, V_HEAD_DIM), " like latent")
    shape = (num_tokens, num_heads * V_HEAD_DIM)
    for name in ("gate", "out"):
        if name in views:
            checks.check_shape(name, views[name], shape, " like latent")
    if 1 not in weight.strides[1:]:
        hint = "Make a contiguous copy first"
        reject("w_uv", "stride 1 at axis 1 or 2", f"strides {weight.strides}", hint)
    transposed = weight.strides[2] != 1
    variant = Variant(dtype, "gate" in views, transposed, weight_is_static)
    lying = {**views, "w_uv": _turned(weight)} if transposed else views
    problem = mla.problem_of(
        lying, variant, (Output("out", "out", shape, dtype),), num_heads=num_heads
    )
    return HeadProblem(**{**vars(problem), "views": checks.without_owners(views)})


def accept_absorbed(values: Values, *, weight_is_static: bool) -> HeadProblem:
    """Accept what the query front has checked already, in the order of ``ABSORBED``."""
    views = ABSORBED.views(values)
    q_nope = views["q_nope"]
    num_tokens, num_heads, _ = q_nope.shape
    variant = Variant(q_nope.dtype, weight_is_static=weight_is_static, absorb=True)
    out = Output("out", "out", (num_tokens, num_heads, KV_LORA_RANK), q_nope.dtype)
    problem = mla.problem_of(views, variant, (out,), num_heads=num_heads)
    return HeadProblem(**{**vars(problem), "x": "q_nope", "weight": "w_uk"})


def _turned(v: TensorView) -> TensorView:
    """Return a view whose last axis is that with stride 1."""
    (head, k, n), (of_head, of_k, of_n) = v.shape, v.strides
    return replace(v, shape=(head, n, k), strides=(of_head, of_n, of_k))
