"""What products of a few tokens with a weight accept, whatever kernel computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from k3cupy.accept import checks
from k3cupy.call.arguments import Arguments, Output, Problem, Values
from k3cupy.constants import CTYPES
from k3cupy.kernels import fused_a_gemm, skinny_gemm
from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig
from k3cupy.kernels.skinny_gemm import SkinnyGemmConfig
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import reject, shown
from k3cupy.runtime.tensors import ALIGNMENT, TensorView

RESIDUAL = "residual"
_FLOAT32 = "float32"
_MEASURED_AS = {
    ("bfloat16", False): "",
    ("bfloat16", True): "with a bfloat16 output",
    **dict.fromkeys([("float16", False), ("float16", True)], "with bfloat16"),
}
"""By the type of the inputs, and whether the output is float32."""

_MAX_EXTENT = 1 << 31
_ALIGNED = f"an address that is a multiple of {ALIGNMENT} bytes"


class Signature:
    """How a public function names its tensors, and how it sees the weight.

    Attributes:
        x: name of the input.
        weight: name of the weight.
        out: name of the output.
        is_transposed: the weight comes as [K, N] with strides (1, K).
        arguments: those and the residual, in the order (x, weight, residual, out).
    """

    def __init__(self, x: str, weight: str, out: str, *, is_transposed: bool) -> None:
        self.x, self.weight, self.out, self.is_transposed = x, weight, out, is_transposed
        self.arguments = Arguments((x, weight, RESIDUAL, out), (x, weight))


OURS = Signature("x", "weight", "out", is_transposed=False)
DSV3 = Signature("mat_a", "mat_b", "output", is_transposed=True)


@dataclass(frozen=True)
class Limits:
    """What some kernels can compute.

    Attributes:
        dtypes: of x; the other tensors have its type.
        dtype_hint: what to say of any other.
        max_tokens: the most rows of x; None for any number.
        rows_hint: what to do with more.
        k_multiple: K is a multiple of this.
        on_gpu: only for CUDA tensors with rows of x at multiples of 16 bytes.
        anywhere: and of the CPU as if they were there.
    """

    dtypes: tuple[str, ...]
    dtype_hint: str
    max_tokens: int | None
    rows_hint: str
    k_multiple: int
    on_gpu: bool = False
    anywhere: bool = False


FUSED_A = Limits(
    dtypes=("bfloat16",),
    dtype_hint="The product is computed in bfloat16 only",
    max_tokens=fused_a_gemm.MAX_TOKENS,
    rows_hint="Call it for slices of the rows, or use your framework's linear, which is made for "
    "many rows",
    k_multiple=fused_a_gemm.K_MULTIPLE,
)
SKINNY = Limits(
    dtypes=tuple(CTYPES),
    dtype_hint="All tensors are bfloat16, or all are float16",
    max_tokens=skinny_gemm.MAX_TOKENS,
    rows_hint="Call fused_a_gemm, which takes up to 64, or your framework's linear",
    k_multiple=skinny_gemm.K_MULTIPLE,
)
LINEAR = replace(FUSED_A, dtype_hint="", max_tokens=None, rows_hint="", k_multiple=1, on_gpu=True)
"""What a linear layer may give to one of the two; the choice says which M and K a kernel takes."""


@dataclass(frozen=True)
class GemmProblem(Problem):
    """A product that passed validation.

    Attributes:
        signature: which function was called.
        n: N.
        k: K.
        weight_is_static: the promise.
        float32_out: the sums are stored as they are.
        measured_as: what is to be told of measurements, which are of bfloat16 in and out.
    """

    signature: Signature
    n: int
    k: int
    weight_is_static: bool
    float32_out: bool
    measured_as: str

    @property
    def size(self) -> tuple[int, int, int]:
        """What tables and rules ask for: N, K, and the number of tokens."""
        return self.n, self.k, self.num_tokens

    @property
    def x(self) -> TensorView:
        """The input."""
        return self.views[self.signature.x]

    @property
    def out(self) -> TensorView | None:
        """The output that the caller gave."""
        return self.views.get(self.signature.out)

    @property
    def residual(self) -> TensorView | None:
        """What is added."""
        return self.views.get(RESIDUAL)


def accept(
    signature: Signature,
    limits: Limits,
    values: Values,
    *,
    weight_is_static: bool,
    out_dtype: Any = None,
) -> GemmProblem:
    """Check everything that the host can see of values in the order of ``signature.arguments``."""
    views = signature.arguments.views(values)
    x = views[signature.x]
    checks.check_dtype(signature.x, x, limits.dtypes, limits.dtype_hint)
    out_type, hint = x.dtype, limits.dtype_hint
    if out_dtype is not None:
        out_type, hint = out_dtype_of(out_dtype), "That is out_dtype"
    for name, v in views.items():
        if name == signature.out:
            checks.check_dtype(name, v, (out_type,), hint)
        else:
            checks.check_dtype(name, v, (x.dtype,), limits.dtype_hint)
    float32_out = out_type != x.dtype
    num_tokens, n, k = _check_shapes(signature, views, limits)
    checks.check_strides(signature.x, x)
    _check_weight_layout(signature, views[signature.weight])
    if signature.out in views:
        out = views[signature.out]
        checks.check_writable(signature.out, out)
        checks.check_strides(signature.out, out)
        checks.check_rows_apart(signature.out, out)
    if RESIDUAL in views:
        checks.check_strides(RESIDUAL, views[RESIDUAL])
    checks.check_devices(views)
    if limits.on_gpu:
        _check_for_gpu(signature, limits, views, num_tokens)
    checks.check_grad(views)
    return GemmProblem(
        views=checks.without_owners(views),
        num_tokens=num_tokens,
        outputs=(Output(signature.out, "out", (num_tokens, n), out_type),),
        updated=(),
        in_place=() if float32_out else (RESIDUAL,),
        slow_reason=checks.misalignment(signature.x, x),
        signature=signature,
        n=n,
        k=k,
        weight_is_static=weight_is_static,
        float32_out=float32_out,
        measured_as=_MEASURED_AS[x.dtype, float32_out],
    )


def out_dtype_of(given: Any) -> str:
    """Accept float32 as an output's type, as PyTorch, NumPy, CuPy and JAX call it, or its name."""
    try:
        is_float32 = str(given) == "torch.float32" or np.dtype(given) == np.float32
    except (TypeError, ValueError):
        is_float32 = False
    if not is_float32:
        reject("out_dtype", "None or float32", shown(given), error=TypeError)
    return _FLOAT32


def _check_shapes(
    signature: Signature, views: dict[str, TensorView], limits: Limits
) -> tuple[int, int, int]:
    x, weight = views[signature.x], views[signature.weight]
    checks.check_shape(signature.x, x, ("M", "K"))
    num_tokens, k = x.shape
    wanted: tuple[int | str, ...] = (k, "N") if signature.is_transposed else ("N", k)
    hint = "Pass the transpose of the weight [N, K]" if signature.is_transposed else ""
    checks.check_shape(signature.weight, weight, wanted, f" like {signature.x}", hint)
    n = weight.shape[1 if signature.is_transposed else 0]
    most = limits.max_tokens
    if most is not None and num_tokens > most:
        reject(signature.x, f"at most {most} rows", str(num_tokens), limits.rows_hint)
    multiple = limits.k_multiple
    if k % multiple or not 0 < k < _MAX_EXTENT:
        expected = f"K a multiple of {multiple}, at least {multiple}"
        reject(signature.x, expected, f"K = {k}", "Pad x and the weight with zeros")
    if not 0 < n < _MAX_EXTENT:
        reject(signature.weight, f"N from 1 to {_MAX_EXTENT - 1}", f"N = {n}")
    for name in (signature.out, RESIDUAL):
        if name in views:
            checks.check_shape(name, views[name], (num_tokens, n))
    return num_tokens, n, k


def _check_weight_layout(signature: Signature, weight: TensorView) -> None:
    step = -1 if signature.is_transposed else 1
    rows = replace(weight, shape=weight.shape[::step], strides=weight.strides[::step])
    if not checks.is_packed(rows):
        seen = " [N, K] seen transposed" if signature.is_transposed else ""
        expected = f"a packed weight{seen}, strides {(rows.shape[1], 1)[::step]}"
        hint = "Make a contiguous copy, once"
        if signature.is_transposed:
            hint = "Pass the transpose of a contiguous copy"
        reject(signature.weight, expected, f"strides {weight.strides}", hint)
    if weight.address % ALIGNMENT:
        found = f"address 0x{weight.address:x}"
        reject(signature.weight, _ALIGNED, found, "Make a copy of it, once")


def _check_for_gpu(
    signature: Signature, limits: Limits, views: dict[str, TensorView], num_tokens: int
) -> None:
    """Accept what a linear layer leaves to our kernels: on a GPU, and their fast path."""
    x = views[signature.x]
    if not (x.is_cuda or limits.anywhere):
        reject(signature.x, "a CUDA tensor", f"one on the {x.device}")
    if num_tokens == 0:
        reject(signature.x, "at least one row", "none: there is nothing to compute")
    if num_tokens > 1 and x.strides[0] * x.itemsize % ALIGNMENT:
        multiple = ALIGNMENT // x.itemsize
        reject(signature.x, f"a row stride that is a multiple of {multiple}", str(x.strides[0]))
    if x.address % ALIGNMENT:
        reject(signature.x, _ALIGNED, f"one {x.address % ALIGNMENT} bytes past it")


def check_fused_a_config(
    given: Any, num_tokens: int | None = None, gpu: DeviceInfo | None = None
) -> FusedAGemmConfig | None:
    """Accept None, or a configuration that can compute a call, as far as M and GPU are known."""
    config = checks.check_config(given, FusedAGemmConfig)
    if config is None:
        return None
    if num_tokens is not None and num_tokens > config.tile_m:
        reject("config", f"tile_m of at least the {num_tokens} rows", str(config.tile_m))
    if gpu is None:
        return config
    most, arch = gpu.shared_memory_optin, gpu.arch
    if config.shared_bytes > most:
        expected = f"at most {most} bytes of shared memory a block, which {gpu.name} has"
        hint = "Take fewer stages or a smaller tile"
        reject("config", expected, f"{config.shared_bytes} bytes", hint)
    if config.needs_warpgroups and not gpu.has_warpgroups:
        expected = f"product 'warp' on {arch}, for products of a warpgroup exist on sm_90 alone"
        reject("config", expected, shown(config.product))
    _check_clusters(config.split_k, gpu)
    if config.mapped_x and not gpu.has_tensor_maps:
        expected = f"mapped_x of False on {arch}, for tensor maps are used from sm_90 to sm_103"
        reject("config", expected, str(config.mapped_x))
    return config


def check_skinny_config(
    given: Any, num_tokens: int | None = None, gpu: DeviceInfo | None = None
) -> SkinnyGemmConfig | None:
    """Accept None, or a configuration that can compute a call, as far as M and GPU are known."""
    config = checks.check_config(given, SkinnyGemmConfig)
    if config is not None and num_tokens and num_tokens != config.num_rows:
        expected = f"num_rows of exactly the {num_tokens} rows of x"
        hint = "Make one for each number of rows, for example with dataclasses.replace"
        reject("config", expected, str(config.num_rows), hint)
    if config is not None and gpu is not None:
        _check_clusters(config.split_k, gpu)
    return config


def _check_clusters(split_k: int, gpu: DeviceInfo) -> None:
    if split_k > 1 and not gpu.has_clusters:
        expected = f"split_k of 1 on {gpu.arch}, for clusters exist from sm_90 on"
        reject("config", expected, str(split_k))
