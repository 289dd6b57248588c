"""What every product of a few tokens with a weight accepts, whatever kernel computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3cupy.ops import checks
from k3cupy.ops.arguments import Arguments, Layout, Values
from k3cupy.runtime.tensors import ALIGNMENT, TensorView

X, WEIGHT, OUT, RESIDUAL = range(4)
"""Places of the tensors among a call's values, whatever the function calls them."""

RESIDUAL_NAME = "residual"
"""A function without one carries None in its place."""

_MAX_EXTENT = 1 << 31


class Form:
    """A public function: what it calls its tensors, and how it sees the weight.

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


@dataclass(frozen=True)
class Limits:
    """What the kernels of an operation can compute.

    Attributes:
        dtypes: of x; the other tensors have its type.
        dtype_hint: what to say of any other.
        max_tokens: the most rows of x.
        rows_hint: what to do with more.
        k_multiple: K is a multiple of this.
    """

    dtypes: tuple[str, ...]
    dtype_hint: str
    max_tokens: int
    rows_hint: str
    k_multiple: int


@dataclass(frozen=True)
class GemmProblem:
    """A call that passed validation.

    Attributes:
        form: which function was called.
        views: the tensors by argument name.
        num_tokens: M.
        n: N.
        k: K.
        slow_reason: why x is read element by element, or None.
    """

    form: Form
    views: dict[str, TensorView]
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


def validate_tensors(form: Form, values: Values, limits: Limits) -> GemmProblem:
    """Check everything that the host can see.

    Args:
        form: which function was called.
        values: its tensors, in the order of ``X``, ``WEIGHT``, ``OUT``, ``RESIDUAL``.
        limits: of the operation.

    Raises:
        TypeError, ValueError: the text names the argument, what was expected and what was found.
    """
    views = form.arguments.views(values)
    x = views[form.x]
    checks.check_dtype(form.x, x, limits.dtypes, limits.dtype_hint)
    for name, v in views.items():
        checks.check_dtype(name, v, (x.dtype,), limits.dtype_hint)
    num_tokens, n, k = _check_shapes(form, views, limits)
    checks.check_strides(form.x, x)
    _check_weight_layout(form, views[form.weight])
    if form.out in views:
        out = views[form.out]
        checks.check_writable(form.out, out)
        checks.check_strides(form.out, out)
        checks.check_rows_apart(form.out, out)
    if RESIDUAL_NAME in views:
        checks.check_strides(RESIDUAL_NAME, views[RESIDUAL_NAME])
    checks.check_devices(views)
    return GemmProblem(
        form=form,
        views={name: replace(v, owner=None) for name, v in views.items()},
        num_tokens=num_tokens,
        n=n,
        k=k,
        slow_reason=checks.misalignment(form.x, x, strides_are_64_bit=True),
    )


def _check_shapes(form: Form, views: dict[str, TensorView], limits: Limits) -> tuple[int, int, int]:
    x, weight = views[form.x], views[form.weight]
    checks.check_shape(form.x, x, ("M", "K"))
    num_tokens, k = x.shape
    wanted: tuple[int | str, ...] = (k, "N") if form.is_transposed else ("N", k)
    hint = "Pass the transpose of the weight [N, K]" if form.is_transposed else ""
    checks.check_shape(form.weight, weight, wanted, f" like {form.x}", hint)
    n = weight.shape[1 if form.is_transposed else 0]
    if num_tokens > limits.max_tokens:
        checks.reject(
            form.x, f"at most {limits.max_tokens} rows", str(num_tokens), limits.rows_hint
        )
    multiple = limits.k_multiple
    if k % multiple or not 0 < k < _MAX_EXTENT:
        checks.reject(
            form.x,
            f"K a multiple of {multiple}, at least {multiple}",
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
