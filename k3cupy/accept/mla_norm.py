"""What the RMSNorms behind the first projection of an MLA layer accept."""

from __future__ import annotations

from k3cupy.accept import checks, mla
from k3cupy.call.arguments import Output, Values
from k3cupy.constants import KV_LORA_RANK, Q_LORA_RANK, QK_ROPE_HEAD_DIM
from k3cupy.kernels.mla_norm import Variant
from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import TensorView

SIGNATURE = mla.Signature(
    "fused_q_kv_rmsnorm",
    ("qkv_a", "q_weight", "kv_weight"),
    {"q": Q_LORA_RANK, "kv_c_normed": KV_LORA_RANK},
)

_WIDTH = Q_LORA_RANK + KV_LORA_RANK + QK_ROPE_HEAD_DIM
_MAX_TOKENS = 1 << 31
"""Blocks of one launch: their number must fit 31 bits."""


def check_first_projection(v: TensorView) -> int:
    """Check the shape of ``qkv_a``, and return num_tokens."""
    checks.check_shape("qkv_a", v, ("num_tokens", f">= {_WIDTH}"))
    if v.shape[1] < _WIDTH:
        what = f"at least {_WIDTH} columns, {Q_LORA_RANK} q_a | {KV_LORA_RANK} kv_c | "
        reject("qkv_a", f"{what}{QK_ROPE_HEAD_DIM} k_pe", f"{v.shape[1]}")
    return v.shape[0]


def accept(values: Values, *, eps: float, weight_is_static: bool) -> mla.MlaProblem:
    """Check everything that the host can see of values in the order of ``SIGNATURE``."""
    views = SIGNATURE.arguments.views(values)
    dtype = mla.check_alike(views, (*SIGNATURE.inputs, *SIGNATURE.out_names))
    num_tokens = check_first_projection(views["qkv_a"])
    if num_tokens >= _MAX_TOKENS:
        reject("qkv_a", f"num_tokens below {_MAX_TOKENS}", f"{num_tokens}", "Split the tokens")
    widths = {"q_weight": Q_LORA_RANK, "kv_weight": KV_LORA_RANK}
    for name, width in widths.items():
        checks.check_shape(name, views[name], (width,))
    outputs = []
    for argument, (name, width) in zip(SIGNATURE.out_names, SIGNATURE.outputs.items(), strict=True):
        if argument in views:
            checks.check_shape(argument, views[argument], (num_tokens, width))
        outputs.append(Output(argument, name, (num_tokens, width), dtype))
    variant = Variant(dtype, weight_is_static)
    return mla.problem_of(views, variant, tuple(outputs), epsilon=checks.epsilon_of(eps))
