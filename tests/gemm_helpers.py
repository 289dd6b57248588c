"""The GEMMs under test: inputs in NaN guard bands, and the product in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from fake_device import H200, FakeDevice
from helpers import BF16, FP16, Guarded, check_guards, guarded
from toolchain_helpers import copy_of_sources, write

import k3cupy
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo

TOKENS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64)
FLOAT32 = torch.float32
ROUNDING = {BF16: 2**-8, FP16: 2**-11, FLOAT32: 2**-24}
FROBENIUS = {BF16: 0.64 * 2**-8, FP16: 0.64 * 2**-11, FLOAT32: 2**-18}
"""In float32 the error is that of the sums alone, far below a rounding to 16 bits."""

_ENOUGH_COLUMNS = 200
"""From here on the error of a row is an average: rounding alone gives 0.43 of its bound."""

_ROWS_AT_ONCE = 8192


def op(*args: Any, **kwargs: Any) -> Any:
    """The fused-A GEMM, looked up at call time."""
    return k3cupy.fused_a_gemm(*args, **kwargs)


def transposed_op(mat_a: Any, mat_b: Any, output: Any, enable_pdl: Any = False) -> None:
    """The public signature by name."""
    k3cupy.dsv3_fused_a_gemm(output, mat_a, mat_b, enable_pdl)


def unread(*shape: int) -> torch.Tensor:
    """A tensor of whose memory nobody reads anything, so that it costs nothing."""
    return torch.empty(shape, dtype=BF16)


@contextmanager
def taken_for(gpu: DeviceInfo) -> Iterator[FakeDevice]:
    """CPU tensors count as tensors of this GPU inside."""
    with pytest.MonkeyPatch.context() as patch:
        device = FakeDevice(patch)
        patch.setattr(devices, "info", lambda _: gpu)
        yield device


@contextmanager
def fresh_plans(folder: Path) -> Iterator[None]:
    """Calls inside make plans of their own: the kernels come from a copy that nobody else has."""
    tree = copy_of_sources(folder)
    for source in ("fused_a_gemm.cu", "skinny_gemm.cu"):
        write(tree / source, (tree / source).read_text(encoding="utf-8") + f"// {folder}\n")
    with k3cupy.source_dir(tree):
        yield


def normal(
    shape: Sequence[int], seed: int, device: str = "cpu", dtype: torch.dtype = BF16
) -> torch.Tensor:
    """Random values, made on the device."""
    rng = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=rng, device=device, dtype=torch.float32).to(dtype)


def inputs(
    tokens: int,
    n: int,
    k: int,
    device: str = "cpu",
    *,
    seed: int = 0,
    dtype: torch.dtype = BF16,
    **x_layout: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, weight) with NaN around them, x in the layout that `guarded` is given."""
    x = guarded(normal((tokens, k), 2 * seed, dtype=dtype), device, **x_layout)
    return x, guarded(normal((n, k), 2 * seed + 1, dtype=dtype), device)


def residual_of(
    tokens: int,
    n: int,
    device: str = "cpu",
    *,
    seed: int = 0,
    dtype: torch.dtype = BF16,
    **layout: Any,
) -> torch.Tensor:
    """A residual with NaN around it, of values as large as a sum over some hundred columns."""
    values = (normal((tokens, n), 1000 + seed).float() * 20).to(dtype)
    return guarded(values, device, **layout)


def poisoned_slice(values: torch.Tensor, width: int, offset: int, device: str) -> torch.Tensor:
    """The values as columns of a wider tensor that is NaN everywhere else."""
    storage = torch.full((values.shape[0], width), float("nan"), dtype=values.dtype, device=device)
    part = storage[:, offset : offset + values.shape[1]]
    part.copy_(values)
    return part


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The float64 product of the same values."""
    wide = x.double()
    parts = [wide @ part.double().T for part in weight.split(_ROWS_AT_ONCE)]
    return torch.cat(parts, dim=1)


def assert_product(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Finite, each row close as a whole, each element within rounding and accumulation."""
    added = torch.zeros_like(out) if residual is None else residual
    want, got = product(x, weight) + added, out.double()
    assert tuple(out.shape) == tuple(want.shape)
    assert out.dtype == (out_dtype or x.dtype)
    assert torch.isfinite(got).all(), "an element is not finite"
    error = (got - want).abs()
    # One error in fp32 for each of the K / 16 steps, and some for the sums of warps and blocks.
    steps = x.shape[1] / 16 + 64
    largest = product(x.abs(), weight.abs()) + added.abs()
    limit = want.abs() * ROUNDING[out.dtype] + largest * steps * 2**-23
    worst = int((error - limit).argmax())
    place = divmod(worst, want.shape[1])
    assert (error <= limit).all(), f"element {place}: {got[place]} for {want[place]}"
    if want.shape[1] >= _ENOUGH_COLUMNS:
        relative = error.norm(dim=1) / want.norm(dim=1)
        assert relative.max() < FROBENIUS[out.dtype], (
            f"row {int(relative.argmax())}: {relative.max()}"
        )


def assert_any_product(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Each element is the rounding of a number within the error of its sum, whatever goes into it.

    NaN and infinities are where arithmetic puts them, in any order of the sum. Nothing is flushed.
    Where the sum of the sizes leaves fp32, the order decides, and anything may come out.
    """
    assert tuple(out.shape) == (x.shape[0], weight.shape[0])
    assert out.dtype == (out_dtype or x.dtype)
    out, x, weight = out.cpu(), x.cpu(), weight.cpu()
    added = torch.zeros_like(out) if residual is None else residual.cpu()
    finite_x, finite_w, finite_r = (
        t.double().nan_to_num(0.0, 0.0, 0.0) for t in (x, weight, added)
    )
    exact = finite_x @ finite_w.T + finite_r
    largest = finite_x.abs() @ finite_w.abs().T + finite_r.abs()
    error = (x.shape[1] / 16 + 64) * (largest * 2.0**-23 + 2.0**-149)
    nan, above, below = _not_finite(x, weight, added)
    free = (largest >= torch.finfo(torch.float32).max) & ~nan
    exact = torch.where(above, torch.inf, torch.where(below, -torch.inf, exact))
    low, high = (oracle.rounded(exact + sign * error, out.dtype) for sign in (-1, 1))
    got = out.double()
    right = torch.where(nan, got.isnan(), (got >= low) & (got <= high)) | free
    if not right.all():
        at = tuple((~right).nonzero()[0].tolist())
        want = "NaN" if nan[at] else f"{low[at]} to {high[at]}"
        raise AssertionError(f"element {at}: expected {want}, got {got[at]}")


def _not_finite(
    x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the sums are NaN, where they are above and where below every number.

    By counting the terms of each kind: a library's product may leave out what it multiplies by 0.
    """

    def kinds(t: torch.Tensor) -> dict[str, torch.Tensor]:
        signs = {"plus": t > 0, "minus": t < 0, "zero": t == 0}
        ends = {"top": t == torch.inf, "bottom": t == -torch.inf, "nan": t.isnan()}
        return {name: where.double() for name, where in (signs | ends).items()}

    a, b, r = kinds(x), kinds(weight), kinds(added)

    def any_of(*pairs: str) -> torch.Tensor:
        terms = (pair.split("*") for pair in pairs)
        return sum(a[left] @ b[right].T + (a[right] @ b[left].T) for left, right in terms) > 0

    above = any_of("top*plus", "bottom*minus") | (r["top"] > 0)
    below = any_of("top*minus", "bottom*plus") | (r["bottom"] > 0)
    some_nan = a["nan"].amax(1, keepdim=True) + b["nan"].amax(1)[None] + r["nan"] > 0
    nan = some_nan | any_of("top*zero", "bottom*zero") | (above & below)
    return nan, above & ~nan, below & ~nan


def same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "out") -> None:
    oracle.assert_same_bits(oracle.bits(got), oracle.bits(want), what)


def run_and_check(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    out_strides: Sequence[int] | None = None,
    shift: int = 0,
    operation: Callable[..., Any] = op,
    **options: Any,
) -> torch.Tensor:
    """Run twice, once into a guarded `out`; compare everything, the inputs' bits included."""
    shape = (x.shape[0], weight.shape[0])
    kind = options.get("out_dtype")
    box = Guarded(shape, kind or x.dtype, x.device.type, strides=out_strides, shift=shift)
    read = [x, weight] if residual is None else [x, weight, residual]
    before, saved = box.snapshot(), [oracle.bits(t).clone() for t in read]
    options["residual"] = residual
    assert operation(x, weight, out=box.tensor, **options) is box.tensor
    check_guards(box, before)
    out = operation(x, weight, **options)
    assert out.is_contiguous()
    assert out.device == x.device
    assert_product(out, x, weight, residual, kind)
    same_bits(box.tensor, out, "out= and a new output")
    for tensor, bits in zip(read, saved, strict=True):
        oracle.assert_same_bits(oracle.bits(tensor), bits, "input")
    return out


@dataclass(frozen=True)
class Gemm:
    """One of the GEMMs, looked up at call time, with what tells its limits from the other's.

    The two agree on the names of arguments, not on their order: tests of both name all that
    follows x and weight. `tokens` are some numbers of rows, the most at the end; `odd_tokens`
    fill no tile. `flags` are those of a call, `template_flags` those of an instance.
    """

    name: str
    tokens: tuple[int, ...]
    odd_tokens: int
    k_multiple: int
    dtypes: tuple[torch.dtype, ...]
    flags: tuple[str, ...]
    template_flags: tuple[str, ...]

    @property
    def max_tokens(self) -> int:
        return self.tokens[-1]

    def __call__(self, x: Any, weight: Any, **options: Any) -> Any:
        return getattr(k3cupy, self.name)(x, weight, **options)

    def explain(self, x: Any, weight: Any, **options: Any) -> Any:
        return getattr(k3cupy, f"explain_{self.name}")(x, weight, **options)

    def run_and_check(self, x: Any, weight: Any, **options: Any) -> torch.Tensor:
        return run_and_check(x, weight, operation=self, **options)

    def explain_on_a_gpu(self, x: Any, weight: Any, **options: Any) -> Any:
        """What a GPU runs for these tensors; an H200, where they are on the CPU."""
        if x.is_cuda:
            return self.explain(x, weight, **options)
        with taken_for(H200):
            return self.explain(x, weight, **options)

    def chosen(
        self, shape: tuple[int, int], tokens: int, gpu: DeviceInfo = H200, **options: Any
    ) -> Any:
        """What a call with packed tensors runs on a GPU that is none."""
        n, k = shape
        with taken_for(gpu):
            return self.explain(unread(tokens, k), unread(n, k), **options)

    def flags_of(self, name_expression: str) -> dict[str, bool]:
        """The flags among the template arguments of an instance, by name."""
        names = self.template_flags
        values = name_expression.removesuffix(">").removesuffix(", float").split(", ")
        values = values[-len(names) :]
        words = {"true": True, "false": False}
        return {name: words[value] for name, value in zip(names, values, strict=True)}


FUSED_A = Gemm(
    "fused_a_gemm",
    tokens=(1, 16, 33, 64),
    odd_tokens=9,
    k_multiple=16,
    dtypes=(BF16,),
    flags=("pdl", "weight_is_static", "batch_invariant"),
    template_flags=("aligned_x", "weight_is_static", "has_residual"),
)
SKINNY = Gemm(
    "skinny_gemm",
    tokens=(1, 5, 8, 16),
    odd_tokens=7,
    k_multiple=8,
    dtypes=(BF16, FP16),
    flags=("pdl", "weight_is_static"),
    template_flags=("aligned_x", "has_residual", "weight_is_static"),
)
GEMMS = {gemm.name: gemm for gemm in (FUSED_A, SKINNY)}
GEMMS_AND_DTYPES = [
    pytest.param(gemm, dtype, id=f"{name}-{str(dtype)[6:]}")
    for name, gemm in GEMMS.items()
    for dtype in gemm.dtypes
]


def gemms_and_tokens(fused_a: Iterable[int], skinny: Iterable[int]) -> list[Any]:
    """Parameters for each GEMM with some numbers of tokens of its own."""
    return [
        pytest.param(gemm, tokens, id=f"{gemm.name}-{tokens}")
        for gemm, numbers in ((FUSED_A, fused_a), (SKINNY, skinny))
        for tokens in numbers
    ]


def devices_and_tokens(fused_a: Iterable[int], skinny: Iterable[int]) -> list[Any]:
    """The same on each device, all of them on a GPU.

    On the CPU the first and the last: its reference takes every number of tokens alike.
    """
    return [
        pytest.param(device, gemm, tokens, id=f"{device}-{gemm.name}-{tokens}", marks=marks)
        for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
        for gemm, numbers in ((FUSED_A, tuple(fused_a)), (SKINNY, tuple(skinny)))
        for tokens in (numbers if device == "cuda" else dict.fromkeys((numbers[0], numbers[-1])))
    ]


GEMMS_AND_TOKENS = gemms_and_tokens(FUSED_A.tokens, SKINNY.tokens)
