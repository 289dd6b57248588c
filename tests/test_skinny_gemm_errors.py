"""The skinny GEMM: every refusal. It names the argument, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import numpy_of
from gemm_helpers import assert_product, inputs, normal, residual_of, same_bits
from helpers import BF16, E4M3, FP16, Guarded, every_other, moved, padded, refused
from skinny_helpers import op, run_and_check

import k3cupy
from k3cupy.ops.skinny_gemm_validate import check_config

M, N, K = 8, 48, 128
CONFIG = k3cupy.SkinnyGemmConfig(M, 64, 4, 2, 8)

Change = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Refusal:
    """An argument, what takes its place, who is blamed and what the message must mention."""

    name: str
    change: Change
    found: str
    blamed: str


CASES: dict[str, Refusal] = {}


def make(case: str, name: str, change: Change, found: str, blamed: str = "") -> None:
    CASES[case] = Refusal(name, change, found, blamed or name)


def put(case: str, name: str, value: Any, found: str, blamed: str = "") -> None:
    make(case, name, lambda _: value, found, blamed)


# Types: a float16 x makes the other tensors the wrong ones
for n in ("x", "weight", "residual", "out"):
    for wrong in (torch.float32, torch.float64, torch.int16, torch.uint8, E4M3):
        make(f"case23-{n}-{wrong}", n, lambda t, d=wrong: t.to(d), str(wrong)[6:])
    blamed = "weight" if n == "x" else n
    make(f"case23-{n}-half", n, lambda t: t.to(FP16), "float16", blamed)
    make(f"meta-{n}", n, lambda t: t.to("meta"), "meta", ".*")
    make(f"sparse-{n}", n, lambda t: t.to_sparse(), "sparse|layout|stride")
    put(f"list-{n}", n, [[1.0]], "list")
for n in ("x", "weight"):
    put(f"none-{n}", n, None, "None")
    put(f"number-{n}", n, 1.0, "float")
put("number-residual", "residual", 1.0, "float")

# Shapes
make("x-1d", "x", lambda t: t[0], r"\[128\]")
make("x-3d", "x", lambda t: t[None], r"\[1, 8, 128\]")
make("weight-1d", "weight", lambda t: t[0], r"\[128\]")
make("weight-3d", "weight", lambda t: t[None], r"\[1, 48, 128\]")
make("weight-narrow", "weight", lambda t: t[:, :-8], "120")
make("weight-wide", "weight", lambda t: padded(t, 8), "136")
make("weight-transposed", "weight", lambda t: t.T.contiguous(), r"\[128, 48\]")
make("x-narrow", "x", lambda t: t[:, :112], "128", "weight")
make("no-columns", "weight", lambda t: t[:0], "N = 0")
put("too-many-rows", "x", torch.zeros(9, K, dtype=BF16), "9")
for name in ("out", "residual"):
    for shape in ((M, N - 1), (M, N + 1), (M - 1, N), (M + 1, N), (M * N,), (1, M, N), (N, M)):
        wrong_shape = torch.zeros(shape, dtype=BF16)
        put(f"{name}-{shape}", name, wrong_shape, re.escape(str(list(shape))))
put("residual-row", "residual", torch.zeros(N, dtype=BF16), r"\[48\]")

# Strides
make("x-inner-stride", "x", every_other, "inner stride 2")
make("weight-inner-stride", "weight", every_other, "256, 2")
make("weight-row-stride", "weight", lambda t: padded(t, 8)[:, :K], "136, 1")
make("weight-expanded", "weight", lambda t: t[:1].expand(N, K), "0, 1")
make("residual-inner-stride", "residual", every_other, "inner stride 2")
make("residual-transposed", "residual", lambda t: t.T.contiguous().T, "inner stride 8")
make("out-inner-stride", "out", every_other, "inner stride 2")
make("out-transposed", "out", lambda t: t.T.contiguous().T, "inner stride 8")
make("out-expanded", "out", lambda t: t[:1].expand(M, N), "0, 1")
make("out-rows-overlap", "out", lambda t: t.flatten().as_strided((M, N), (N - 1, 1)), "47, 1")

# Settings
for flag in ("pdl", "weight_is_static"):
    for junk in ([1], "no", 1, 0):
        put(f"{flag}-{junk!r}", flag, junk, re.escape(repr(junk)))
put("weight_is_static-None", "weight_is_static", None, "None")
for junk in (1, "fast", (8, 64, 4, 2, 8), k3cupy.FusedAGemmConfig(8, 16, 128, 4, 2, 2, 1, 1, 2)):
    put(f"config-{junk!r}", "config", junk, re.escape(repr(junk)))
for wrong_config in (
    replace(CONFIG, num_rows=9),
    replace(CONFIG, block_size=80),
    replace(CONFIG, block_size=2048),
    replace(CONFIG, outputs_per_block=0),
    replace(CONFIG, outputs_per_block=9),
    replace(CONFIG, k_unroll=100),
    replace(CONFIG, vector_width=16),
):
    put(f"config-{wrong_config!r}", "config", wrong_config, "SkinnyGemmConfig")
put("config-other-rows", "config", replace(CONFIG, num_rows=7), "7")


@pytest.mark.parametrize("name", CASES)
def test_refused(device: str, name: str) -> None:
    case = CASES[name]
    x, weight = inputs(M, N, K, device)
    out = Guarded((M, N), BF16, device)
    residual = residual_of(M, N, device)
    arguments = {"x": x, "weight": weight, "residual": residual, "out": out.tensor}
    for operation in (op, k3cupy.explain_skinny_gemm):
        value = moved(case.change(arguments.get(case.name)), device)
        wrong = {**arguments, case.name: value}
        refused(wrong, case.blamed, case.found, box=out, operation=operation)
    run_and_check(x, weight, residual=residual)


@pytest.mark.parametrize("name", ["case23-x-half", "x-inner-stride", "pdl-1", "none-x"])
def test_refused_after_a_good_call(device: str, name: str) -> None:
    """A plan kept from an earlier call with the same shapes hides nothing."""
    case = CASES[name]
    x, weight = inputs(M, N, K, device)
    arguments = {"x": x, "weight": weight, "pdl": True}
    op(**arguments)
    for _ in range(2):
        value = case.change(arguments[case.name])
        refused({**arguments, case.name: value}, case.blamed, case.found, operation=op)


@pytest.mark.parametrize("k", [1, 4, 7, 9, 100, 1540])
def test_k_that_is_no_multiple_of_8(device: str, k: int) -> None:
    x = torch.zeros(2, k, dtype=BF16, device=device)
    weight = torch.zeros(16, k, dtype=BF16, device=device)
    text = refused({"x": x, "weight": weight}, "x", f"K = {k}", operation=op)
    assert "multiple of 8" in text
    assert "zeros" in text


def test_k_of_zero(device: str) -> None:
    x, weight = (torch.zeros(rows, 0, dtype=BF16, device=device) for rows in (2, 16))
    refused({"x": x, "weight": weight}, "x", "K = 0", operation=op)


def test_too_many_tokens_says_what_to_do(device: str) -> None:
    x = torch.zeros(9, K, dtype=BF16, device=device)
    weight = normal((N, K), 1).to(device)
    text = refused({"x": x, "weight": weight}, "x", "9", operation=op)
    assert "at most 8 rows" in text
    assert "fused_a_gemm" in text
    assert_product(k3cupy.fused_a_gemm(x, weight), x, weight)


def test_another_type_says_which_it_should_be(device: str) -> None:
    x, weight = inputs(M, N, K, device, dtype=FP16)
    text = refused({"x": x, "weight": weight.to(BF16)}, "weight", "bfloat16", operation=op)
    assert "expected float16, got bfloat16" in text
    run_and_check(x, weight)


# Overlap


@pytest.mark.parametrize("name", ["x", "weight", "residual"])
def test_out_that_overlaps_an_input(device: str, name: str) -> None:
    """Refused, also when a call of the same shapes and alignment was fine before."""
    x, weight = inputs(M, N, K, device)
    size = M * N
    other = {"x": x, "weight": weight, "residual": residual_of(M, N, device)}
    count = other[name].numel()
    buffer = torch.zeros(size + count, dtype=BF16, device=device)
    out, part = buffer[:size].view(M, N), buffer[size - 8 : size - 8 + count]
    part.copy_(other[name].flatten())
    arguments = {**other, name: part.view(other[name].shape)}
    op(**arguments, out=out.clone())
    text = refused({**arguments, "out": out}, "out", "overlap", operation=op)
    assert f"apart from {name}" in text
    assert not out.flatten()[:-8].any()


@pytest.mark.parametrize("in_place_before", [False, True])
def test_partial_overlap_with_the_residual(device: str, in_place_before: bool) -> None:
    x, weight = inputs(M, N, K, device)
    buffer = torch.zeros(16 * N + 8, dtype=BF16, device=device)
    out = buffer[: M * N].view(M, N)
    if in_place_before:
        op(x, weight, out, out)
        op(x, weight, buffer[M * N : 16 * N].view(M, N), out)
        out.zero_()
    for part in (
        buffer[N : 9 * N].view(M, N),
        buffer[8 : M * N + 8].view(M, N),
        buffer[1 : M * N + 1].view(M, N),
        buffer.as_strided((M, N), (N + 1, 1)),
        out[:1].expand(M, N),
        out[7:].expand(M, N),
    ):
        arguments = {"x": x, "weight": weight, "out": out, "residual": part}
        text = refused(arguments, "out", "overlap", operation=op)
        assert "apart from residual" in text
        assert not buffer.any()


def test_in_place_excuses_no_other_overlap(device: str) -> None:
    weight = normal((K, K), 1).to(device)
    buffer = normal((9, K), 7).to(device)
    out, before = buffer[:8], buffer.clone()
    for part in (buffer[1:], out):
        arguments = {"x": part, "weight": weight, "out": out, "residual": out}
        text = refused(arguments, "out", "overlap", operation=op)
        assert "apart from x" in text
        same_bits(buffer, before)


def test_read_only_out() -> None:
    x, weight = (numpy_of(t) for t in inputs(M, N, K))
    out = np.zeros((M, N), x.dtype)
    out.flags.writeable = False
    refused({"x": x, "weight": weight, "out": out}, "out", "read-only", operation=op)
    arguments = {"x": x, "weight": weight, "out": out, "residual": out}
    refused(arguments, "out", "read-only", operation=op)
    assert not out.any()
    assert op(x, weight, out).any(), "as a residual it is only read"


# Gradients


@pytest.mark.parametrize("name", ["x", "weight", "residual", "out"])
def test_case25_tensors_that_require_grad(device: str, name: str) -> None:
    x, weight = inputs(M, N, K, device)
    residual, out = residual_of(M, N, device), torch.zeros(M, N, dtype=BF16, device=device)
    arguments = {"x": x, "weight": weight, "residual": residual, "out": out}
    arguments[name] = arguments[name].clone().requires_grad_()
    for _ in range(2):
        text = refused(arguments, name, "grad", operation=op)
        assert "no_grad" in text
        assert not out.any()
        with torch.no_grad():
            op(**arguments)
        assert_product(arguments["out"].detach(), x, weight, residual)
        out.detach().zero_()
    with torch.inference_mode():
        op(**arguments)


def test_case25_a_parameter_as_the_weight(device: str) -> None:
    x, weight = inputs(M, N, K, device)
    parameter = torch.nn.Parameter(weight.clone())
    refused({"x": x, "weight": parameter}, "weight", "grad", operation=op)
    with torch.no_grad():
        got = op(x, parameter)
    assert not got.requires_grad
    assert_product(got, x, weight)
    frozen = torch.nn.Parameter(weight.clone(), requires_grad=False)
    same_bits(op(x, frozen), got)


# Devices


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", ["x", "weight", "residual", "out"])
def test_case20_one_argument_on_the_cpu(name: str, pinned: bool) -> None:
    x, weight = inputs(M, N, K, "cuda")
    box, residual = Guarded((M, N), BF16, "cuda"), residual_of(M, N, "cuda")
    arguments = {"x": x, "weight": weight, "residual": residual, "out": box.tensor}
    there = arguments[name].cpu()
    wrong = {**arguments, name: there.pin_memory() if pinned else there}
    blamed = ".*" if name == "x" else name
    refused(wrong, blamed, "(?i)cpu|cuda", box=box, operation=op)
    run_and_check(x, weight, residual=residual)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", "residual", "out"])
def test_case20_one_argument_on_the_gpu(name: str) -> None:
    x, weight = inputs(M, N, K)
    out = torch.zeros(M, N, dtype=BF16)
    arguments = {"x": x, "weight": weight, "residual": residual_of(M, N), "out": out}
    refused({**arguments, name: arguments[name].cuda()}, name, "(?i)cuda|cpu", operation=op)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["weight", "residual", "out"])
def test_case19_mixed_devices_are_refused(name: str) -> None:
    x, weight = inputs(M, N, K, "cuda:0")
    out, residual = torch.zeros(M, N, dtype=BF16, device="cuda:0"), residual_of(M, N, "cuda:0")
    arguments = {"x": x, "weight": weight, "residual": residual, "out": out}
    refused({**arguments, name: arguments[name].to("cuda:1")}, name, "cuda:1", operation=op)


@pytest.mark.gpu
def test_a_stream_that_is_none_is_named() -> None:
    x, weight = inputs(M, N, K, "cuda")
    for junk in ("side", 1.5, object()):
        arguments = {"x": x, "weight": weight, "stream": junk}
        refused(arguments, "stream", type(junk).__name__, operation=op)
    run_and_check(x, weight)


# Configurations


def test_a_configuration_for_other_rows_is_refused(device: str) -> None:
    x, weight = inputs(M, N, K, device)
    for rows in (1, 7):
        arguments = {"x": x[:rows], "weight": weight, "config": CONFIG}
        text = refused(arguments, "config", "8", operation=op)
        assert f"exactly the {rows} rows of x" in text
        assert "dataclasses.replace" in text
        fitting = replace(CONFIG, num_rows=rows)
        assert_product(op(x[:rows], weight, config=fitting), x[:rows], weight)
    assert op(x[:0], weight, config=CONFIG).shape == (0, N), "no rows suit every configuration"


def test_check_config() -> None:
    assert check_config(None) is None
    assert check_config(CONFIG) is CONFIG
    assert check_config(CONFIG, M) is CONFIG
    assert check_config(CONFIG, 0) is CONFIG
