"""The fused-A GEMM: odd shapes, subnormals, batch invariance and the public signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_helpers import (
    TOKENS,
    assert_product,
    inputs,
    normal,
    op,
    product,
    run_and_check,
    same_bits,
    transposed_op,
)
from helpers import BF16, Guarded, Producer, check_guards, refused

import k3cupy
from k3cupy import projections

ODD_SHAPES = [
    (16, 64),
    (48, 128),
    (2096, 192),
    (7, 8448),
    (16, 8448),
    (48, 16),
    (7, 80),
    (1, 16),
    (2096, 64),
    (33, 7168),
]
SMALL_PROJECTIONS = [(1536, 128), (768, 128), (1152, 1536)]


# Values: on the CPU, any shape is a property in the tests of both GEMMs


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS)
def test_odd_shapes(tokens: int) -> None:
    for n, k in ODD_SHAPES:
        x, weight = inputs(tokens, n, k, "cuda", seed=n + k)
        run_and_check(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_a_shape_that_no_tile_divides(tokens: int) -> None:
    x, weight = inputs(tokens, 2096, 8448, "cuda")
    run_and_check(x, weight)


@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_small_projections(device: str, tokens: int) -> None:
    for n, k in SMALL_PROJECTIONS:
        if device == "cpu" and tokens * n * k > 1 << 21:
            continue
        x, weight = inputs(tokens, n, k, device, seed=n)
        run_and_check(x, weight)


# Special values


def test_subnormal_and_tiny_values(device: str) -> None:
    """bf16 subnormals among the inputs."""
    x = torch.full((3, 64), 2.0**-130).to(BF16).to(device)
    weight = torch.full((16, 64), 2.0**20).to(BF16).to(device)
    assert torch.equal(op(x, weight).double(), product(x, weight))


# Bits


def test_batch_invariant(device: str) -> None:
    """A row's bits depend neither on M, nor on its place, nor on the other rows."""
    every = range(1, 65) if device == "cuda" else (1, 2, 8, 9, 33, 64)
    for n, k in ((528, 2048), (40, 7168)) if device == "cuda" else ((100, 512),):
        x, weight = inputs(64, n, k, device)
        alone = torch.cat([op(x[i : i + 1], weight, batch_invariant=True) for i in range(64)])
        for tokens in every:
            some = x[64 - tokens :]
            same_bits(op(some, weight, batch_invariant=True), alone[64 - tokens :], f"M = {tokens}")


@pytest.mark.gpu
@pytest.mark.parametrize("projection", projections.shapes()[::5], ids=lambda p: f"{p.n}x{p.k}")
def test_batch_invariant_projections(projection: projections.Projection) -> None:
    x = normal((64, projection.k), 1, "cuda")
    weight = normal((projection.n, projection.k), 2, "cuda")
    whole = op(x, weight, batch_invariant=True)
    assert_product(whole, x, weight)
    for tokens in TOKENS:
        same_bits(op(x[:tokens], weight, batch_invariant=True), whole[:tokens], f"M = {tokens}")


# The public signature


@pytest.mark.parametrize("tokens", [1, 16, 17])
def test_the_public_signature(device: str, tokens: int) -> None:
    n, k = (528, 1536) if device == "cuda" else (52, 256)
    x, weight = inputs(tokens, n, k, device)
    want = op(x, weight)
    for enable_pdl in (False, True):
        box = Guarded((tokens, n), BF16, device)
        before = box.snapshot()
        assert k3cupy.dsv3_fused_a_gemm(box.tensor, x, weight.T, enable_pdl) is None
        check_guards(box, before)
        same_bits(box.tensor, want)


def test_the_public_signature_has_its_own_plans(device: str) -> None:
    """A square weight fits both signatures, and means another product in each."""
    x, weight = inputs(4, 64, 64, device)
    out = torch.empty(4, 64, dtype=BF16, device=device)
    want = op(x, weight, out=out).clone()
    for _ in range(2):
        wrong = {"mat_a": x, "mat_b": weight, "output": out}
        refused(wrong, "mat_b", r"strides \(64, 1\)", operation=transposed_op)
    transposed_op(x, weight.T, out)
    same_bits(out, want)


SGLANG: dict[str, Callable[[Any, Any, Any], Any]] = {
    "two": lambda a, b, _: k3cupy.dsv3_fused_a_gemm(a, b),
    "three": lambda a, b, out: k3cupy.dsv3_fused_a_gemm(a, b, out),
    "None": lambda a, b, _: k3cupy.dsv3_fused_a_gemm(a, b, None),
    "output by name": lambda a, b, out: k3cupy.dsv3_fused_a_gemm(a, b, output=out),
    "mat_b by name": lambda a, b, _: k3cupy.dsv3_fused_a_gemm(a, mat_b=b),
    "both by name": lambda a, b, _: k3cupy.dsv3_fused_a_gemm(mat_b=b, mat_a=a),
    "with PDL": lambda a, b, out: k3cupy.dsv3_fused_a_gemm(a, b, out, True),
}
VLLM: dict[str, Callable[[Any, Any, Any], Any]] = {
    "three": lambda a, b, out: k3cupy.dsv3_fused_a_gemm(out, a, b),
    "four": lambda a, b, out: k3cupy.dsv3_fused_a_gemm(out, a, b, True),
    "PDL by name": lambda a, b, out: k3cupy.dsv3_fused_a_gemm(out, a, b, enable_pdl=False),
    "mat_b by name": lambda a, b, out: k3cupy.dsv3_fused_a_gemm(out, a, mat_b=b),
    "mats by name": lambda a, b, out: k3cupy.dsv3_fused_a_gemm(out, mat_a=a, mat_b=b),
    "all by name": lambda a, b, out: k3cupy.dsv3_fused_a_gemm(output=out, mat_a=a, mat_b=b),
}
SIZES = [(4, 48, 128), (1, 1, 64), (1, 64, 64), (16, 16, 16), (48, 48, 48), (16, 48, 16)]
"""M, N, K; of equal ones the shapes do not tell the order."""


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("way", SGLANG)
def test_case49_the_order_of_sglang(device: str, way: str, size: tuple[int, int, int]) -> None:
    x, weight = inputs(*size, device)
    out = torch.empty(size[0], size[1], dtype=BF16, device=device)
    given = [t.clone() for t in (x, weight)]
    found = SGLANG[way](x, weight.T, out)
    same_bits(found, op(x, weight))
    assert (found is out) == (way in ("three", "output by name", "with PDL"))
    assert torch.equal(x, given[0]) and torch.equal(weight, given[1])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("way", VLLM)
def test_the_order_of_vllm(device: str, way: str, size: tuple[int, int, int]) -> None:
    x, weight = inputs(*size, device)
    out = torch.empty(size[0], size[1], dtype=BF16, device=device)
    assert VLLM[way](x, weight.T, out) is None
    same_bits(out, op(x, weight))


def test_bare_objects_come_in_the_order_of_vllm(device: str) -> None:
    """They have no shapes to look at; of the other order nothing is written by mistake."""
    x, weight = inputs(16, 16, 16, device)
    out = torch.zeros(16, 16, dtype=BF16, device=device)
    a, b, output = Producer(x), Producer(weight.T), Producer(out)
    k3cupy.dsv3_fused_a_gemm(output, a, b)
    same_bits(out, op(x, weight))
    kept = x.clone()
    refused({"mat_a": b, "mat_b": output, "output": a}, "mat_a", "16", operation=transposed_op)
    assert torch.equal(x, kept)


class Unreadable(torch.Tensor):
    """Of a class whose own code fails."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise KeyError("unreadable")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.nested.nested_tensor([x, x[:1]]),
        lambda _: torch.nn.UninitializedParameter(dtype=BF16),
        lambda x: x.as_subclass(Unreadable),
        lambda _: torch.Tensor,
    ],
    ids=["nested", "uninitialised", "failing", "a class"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_whose_shape_cannot_be_read_is_named(make: Callable[[Any], Any]) -> None:
    x, weight = inputs(4, 48, 128)
    out = torch.zeros(4, 48, dtype=BF16)
    good = (out, x, weight.T)
    for place, name in enumerate(("output", "mat_a", "mat_b")):
        bad = (*good[:place], make(x), *good[place + 1 :])
        with torch.no_grad(), pytest.raises(TypeError, match=rf"\A{name}: expected a tensor"):
            k3cupy.dsv3_fused_a_gemm(*bad)
    assert not out.any()


def test_a_public_call_that_is_no_call() -> None:
    x, weight = inputs(4, 48, 128)
    for args, kwargs in (((), {}), ((x,), {}), ((x, weight.T), {"out": x}), ((x,) * 5, {})):
        with pytest.raises(TypeError, match=r"^dsv3_fused_a_gemm\(\) "):
            k3cupy.dsv3_fused_a_gemm(*args, **kwargs)


@pytest.mark.parametrize(("n", "wrong"), [(48, (4, 47)), (48, (5, 48)), (4, (5, 4))])
def test_case49_an_output_of_another_shape_is_blamed(n: int, wrong: tuple[int, int]) -> None:
    """In either order, and not a weight that is right; nothing is written."""
    x, weight = inputs(4, n, 128)
    out = torch.zeros(wrong, dtype=BF16)
    for order in ((out, x, weight.T), (x, weight.T, out)):
        with pytest.raises(ValueError, match=rf"^output: .*got shape \[{wrong[0]}, {wrong[1]}\]"):
            k3cupy.dsv3_fused_a_gemm(*order)
    assert not out.any()


def test_case15_no_tokens_in_the_public_signature(device: str) -> None:
    weight = normal((48, 128), 0).to(device)
    x, out = (torch.empty(0, width, dtype=BF16, device=device) for width in (128, 48))
    assert transposed_op(x, weight.T, out) is None
