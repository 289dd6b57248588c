"""Both GEMMs: every refusal. It names the argument, and nothing is written."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from array_helpers import numpy_of
from gemm_helpers import (
    FUSED_A,
    GEMMS,
    SKINNY,
    Gemm,
    assert_product,
    inputs,
    normal,
    residual_of,
    same_bits,
)
from helpers import BF16, E4M3, FP16, Guarded, every_other, moved, padded, refused

import k3cupy

M, N, K = 8, 48, 128
FUSED_A_CONFIG = k3cupy.FusedAGemmConfig(8, 16, 128, 4, 2, 2, 1, 1, 2)
SKINNY_CONFIG = k3cupy.SkinnyGemmConfig(M, 64, 4, 2, 8)

Change = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Refusal:
    """An argument, what takes its place, who is blamed and what the message must mention."""

    name: str
    change: Change
    found: str
    blamed: str


CASES: dict[tuple[Gemm, str], Refusal] = {}


def make(
    case: str, name: str, change: Change, found: str, blamed: str = "", only: Gemm | None = None
) -> None:
    for gemm in GEMMS.values() if only is None else (only,):
        CASES[gemm, case] = Refusal(name, change, found, blamed or name)


def put(
    case: str, name: str, value: Any, found: str, blamed: str = "", only: Gemm | None = None
) -> None:
    make(case, name, lambda _: value, found, blamed, only)


def exactly(value: Any) -> str:
    """The value itself is what the message got."""
    return f"^{re.escape(repr(value))}$"


# Types: a float16 x, where it may be one, makes the other tensors the wrong ones
for n in ("x", "weight", "residual", "out"):
    for wrong in (torch.float32, torch.float64, torch.int16, torch.uint8, E4M3):
        make(f"case23-{n}-{wrong}", n, lambda t, d=wrong: t.to(d), str(wrong)[6:])
    make(f"case23-{n}-half", n, lambda t: t.to(FP16), "float16", n, FUSED_A)
    blamed = "weight" if n == "x" else n
    make(f"case23-{n}-half", n, lambda t: t.to(FP16), "float16", blamed, SKINNY)
    make(f"meta-{n}", n, lambda t: t.to("meta"), "meta", ".*")
    make(f"sparse-{n}", n, lambda t: t.to_sparse(), "^layout torch.sparse_coo$")
    jagged = functools.partial(torch.nested.nested_tensor, layout=torch.jagged)
    make(f"jagged-{n}", n, lambda t, j=jagged: j([t]), "^a nested tensor$")
    put(f"list-{n}", n, [[1.0]], "list")
for n in ("x", "weight"):
    put(f"none-{n}", n, None, "None")
for n in ("x", "weight", "residual"):
    put(f"number-{n}", n, 1.0, "float")

# Shapes
make("x-1d", "x", lambda t: t[0], r"\[128\]")
make("x-3d", "x", lambda t: t[None], r"\[1, 8, 128\]")
make("weight-1d", "weight", lambda t: t[0], r"\[128\]")
make("weight-3d", "weight", lambda t: t[None], r"\[1, 48, 128\]")
for gemm in GEMMS.values():
    step = gemm.k_multiple
    make("weight-narrow", "weight", lambda t, s=step: t[:, :-s], str(K - step), only=gemm)
    make("weight-wide", "weight", lambda t, s=step: padded(t, s), str(K + step), only=gemm)
    too_many = torch.zeros(gemm.max_tokens + 1, K, dtype=BF16)
    put("too-many-rows", "x", too_many, rf"\b{gemm.max_tokens + 1}\b", only=gemm)
make("weight-transposed", "weight", lambda t: t.T.contiguous(), r"\[128, 48\]")
make("x-narrow", "x", lambda t: t[:, :112], "128", "weight")
make("no-columns", "weight", lambda t: t[:0], "N = 0")
for n in ("out", "residual"):
    for shape in ((M, N - 1), (M, N + 1), (M - 1, N), (M + 1, N), (M * N,), (1, M, N), (N, M)):
        put(f"{n}-{shape}", n, torch.zeros(shape, dtype=BF16), re.escape(str(list(shape))))
put("residual-row", "residual", torch.zeros(N, dtype=BF16), r"\[48\]")

# Strides
make("x-inner-stride", "x", every_other, "inner stride 2")
make("weight-inner-stride", "weight", every_other, "256, 2")
make("weight-row-stride", "weight", lambda t: padded(t, 8)[:, :K], "136, 1")
make("weight-expanded", "weight", lambda t: t[:1].expand(N, K), "0, 1")
for n in ("out", "residual"):
    make(f"{n}-inner-stride", n, every_other, "inner stride 2")
    make(f"{n}-transposed", n, lambda t: t.T.contiguous().T, "inner stride 8")
make("out-expanded", "out", lambda t: t[:1].expand(M, N), "0, 1")
make("out-rows-overlap", "out", lambda t: t.flatten().as_strided((M, N), (N - 1, 1)), "47, 1")

# Settings
for gemm in GEMMS.values():
    for flag in gemm.flags:
        for junk in ([1], "no", 1, 0):
            put(f"{flag}-{junk!r}", flag, junk, exactly(junk), only=gemm)
        if flag != "pdl":
            put(f"{flag}-None", flag, None, exactly(None), only=gemm)
for junk in (1, "fast", (8, 64, 4, 2, 8)):
    put(f"config-{junk!r}", "config", junk, exactly(junk))
for gemm, junk in ((FUSED_A, SKINNY_CONFIG), (SKINNY, FUSED_A_CONFIG)):
    put(f"config-{junk!r}", "config", junk, exactly(junk), only=gemm)
for changed in (
    {"tile_m": 24},
    {"tile_m": 128},
    {"tile_n": 24},
    {"tile_k": 32},
    {"stages": 1},
    {"warps_k": 0},
    {"split_k": 16},
    {"copy_warps": 40},
    {"product": "wmma"},
    {"block_rows": 17},
    {"block_rows": -1},
    {"stages": 4.0},
    {"block_rows": False},
    {"mapped_x": 0},
):
    wrong_config = replace(FUSED_A_CONFIG, **changed)
    put(f"config-{changed}", "config", wrong_config, "FusedAGemmConfig", only=FUSED_A)
for changed in (
    {"num_rows": 9},
    {"block_size": 80},
    {"block_size": 2048},
    {"outputs_per_block": 0},
    {"outputs_per_block": 9},
    {"k_unroll": 100},
    {"vector_width": 16},
    {"k_unroll": 2.0},
):
    wrong_config = replace(SKINNY_CONFIG, **changed)
    put(f"config-{changed}", "config", wrong_config, "SkinnyGemmConfig", only=SKINNY)
put("config-other-rows", "config", replace(SKINNY_CONFIG, num_rows=7), "^7$", only=SKINNY)


def arguments_on(device: str) -> tuple[dict[str, Any], Guarded]:
    """All tensors of a call by name, and the guarded memory of `out`."""
    x, weight = inputs(M, N, K, device)
    box = Guarded((M, N), BF16, device)
    residual = residual_of(M, N, device)
    return {"x": x, "weight": weight, "residual": residual, "out": box.tensor}, box


def refusals(gemm: Gemm, name: str) -> dict[str, Refusal]:
    """The cases in which an argument of a GEMM is wrong."""
    return {
        case: refusal
        for (of, case), refusal in CASES.items()
        if of is gemm and refusal.name == name
    }


WRONG_ARGUMENTS = list(dict.fromkeys((gemm, refusal.name) for (gemm, _), refusal in CASES.items()))


@pytest.mark.parametrize(
    ("gemm", "name"), [pytest.param(*key, id=f"{key[0].name}-{key[1]}") for key in WRONG_ARGUMENTS]
)
def test_refused(device: str, gemm: Gemm, name: str) -> None:
    """By a call and by its explanation; nothing is written, and a good call works behind them."""
    arguments, box = arguments_on(device)
    failed = []
    for case, refusal in refusals(gemm, name).items():
        value = moved(refusal.change(arguments.get(name)), device)
        for operation in (gemm, gemm.explain):
            try:
                wrong = {**arguments, name: value}
                refused(wrong, refusal.blamed, refusal.found, box=box, operation=operation)
            except (AssertionError, pytest.fail.Exception) as error:
                failed.append(f"{case}: {error}")
    assert not failed, "\n".join(failed)
    x, weight, residual, _ = arguments.values()
    gemm.run_and_check(x, weight, residual=residual)


def test_refused_after_a_good_call(device: str, gemm: Gemm) -> None:
    """A plan kept from an earlier call with the same shapes hides nothing."""
    x, weight = inputs(M, N, K, device)
    arguments = {"x": x, "weight": weight, **dict.fromkeys(gemm.flags, True)}
    gemm(**arguments)
    for case in ("case23-x-half", "x-inner-stride", "pdl-1", "weight_is_static-1", "none-x"):
        refusal = CASES[gemm, case]
        for _ in range(2):
            wrong = {**arguments, refusal.name: refusal.change(arguments[refusal.name])}
            refused(wrong, refusal.blamed, refusal.found, operation=gemm)


def test_k_that_is_no_multiple(device: str, gemm: Gemm) -> None:
    """Also none at all."""
    for k in (0, 1, 4, 7, 8, 9, 15, 17, 100, 136, 1540):
        if k and k % gemm.k_multiple == 0:
            continue
        x = torch.zeros(2, k, dtype=BF16, device=device)
        weight = torch.zeros(16, k, dtype=BF16, device=device)
        text = refused({"x": x, "weight": weight}, "x", f"K = {k}(?!\\d)", operation=gemm)
        if k:
            assert f"multiple of {gemm.k_multiple}" in text
            assert "zeros" in text


# Overlap


@pytest.mark.parametrize("name", ["x", "weight", "residual"])
def test_out_that_overlaps_an_input(device: str, gemm: Gemm, name: str) -> None:
    """Refused, also when a call of the same shapes and alignment was fine before."""
    x, weight = inputs(M, N, K, device)
    size = M * N
    other = {"x": x, "weight": weight, "residual": residual_of(M, N, device)}
    count = other[name].numel()
    buffer = torch.zeros(size + count, dtype=BF16, device=device)
    out, part = buffer[:size].view(M, N), buffer[size - 8 : size - 8 + count]
    part.copy_(other[name].flatten())
    arguments = {**other, name: part.view(other[name].shape)}
    gemm(**arguments, out=out.clone())
    text = refused({**arguments, "out": out}, "out", "overlap", operation=gemm)
    assert f"apart from {name}" in text
    assert not out.flatten()[:-8].any()


@pytest.mark.parametrize("in_place_before", [False, True])
def test_partial_overlap_with_the_residual(device: str, gemm: Gemm, in_place_before: bool) -> None:
    x, weight = inputs(M, N, K, device)
    buffer = torch.zeros(16 * N + 8, dtype=BF16, device=device)
    out = buffer[: M * N].view(M, N)
    if in_place_before:
        gemm(x, weight, residual=out, out=out)
        gemm(x, weight, residual=buffer[M * N : 16 * N].view(M, N), out=out)
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
        text = refused(arguments, "out", "overlap", operation=gemm)
        assert "apart from residual" in text
        assert not buffer.any()


def test_in_place_excuses_no_other_overlap(device: str, gemm: Gemm) -> None:
    weight = normal((K, K), 1).to(device)
    buffer = normal((9, K), 7).to(device)
    out, before = buffer[:8], buffer.clone()
    for part in (buffer[1:], out):
        arguments = {"x": part, "weight": weight, "out": out, "residual": out}
        text = refused(arguments, "out", "overlap", operation=gemm)
        assert "apart from x" in text
        same_bits(buffer, before)


def test_neighbours_in_one_buffer_do_not_overlap(device: str, gemm: Gemm) -> None:
    x, weight = inputs(M, N, K, device)
    buffer = torch.zeros(M * K + M * N + N * K, dtype=BF16, device=device)
    before, out, after = buffer.split((M * K, M * N, N * K))
    before.copy_(x.flatten())
    after.copy_(weight.flatten())
    x_there, weight_there = before.view(M, K), after.view(N, K)
    assert_product(gemm(x_there, weight_there, out=out.view(M, N)), x, weight)


def test_read_only_out(gemm: Gemm) -> None:
    x, weight = (numpy_of(t) for t in inputs(M, N, K))
    out = np.zeros((M, N), x.dtype)
    out.flags.writeable = False
    refused({"x": x, "weight": weight, "out": out}, "out", "read-only", operation=gemm)
    arguments = {"x": x, "weight": weight, "out": out, "residual": out}
    refused(arguments, "out", "read-only", operation=gemm)
    assert not out.any()
    assert gemm(x, weight, residual=out).any(), "as a residual it is only read"


# Gradients


@pytest.mark.parametrize("name", ["x", "weight", "residual", "out"])
def test_case25_tensors_that_require_grad(device: str, gemm: Gemm, name: str) -> None:
    x, weight = inputs(M, N, K, device)
    residual, out = residual_of(M, N, device), torch.zeros(M, N, dtype=BF16, device=device)
    arguments = {"x": x, "weight": weight, "residual": residual, "out": out}
    arguments[name] = arguments[name].clone().requires_grad_()
    for _ in range(2):
        text = refused(arguments, name, "grad", operation=gemm)
        assert "no_grad" in text
        assert not out.any()
        with torch.no_grad():
            gemm(**arguments)
        assert_product(arguments["out"].detach(), x, weight, residual)
        out.detach().zero_()
    with torch.inference_mode():
        gemm(**arguments)


def test_case25_a_parameter_as_the_weight(device: str, gemm: Gemm) -> None:
    x, weight = inputs(M, N, K, device)
    parameter = torch.nn.Parameter(weight.clone())
    refused({"x": x, "weight": parameter}, "weight", "grad", operation=gemm)
    with torch.no_grad():
        got = gemm(x, parameter)
    assert not got.requires_grad
    assert_product(got, x, weight)
    frozen = torch.nn.Parameter(weight.clone(), requires_grad=False)
    same_bits(gemm(x, frozen), got)


# Devices


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", ["x", "weight", "residual", "out"])
def test_case20_one_argument_on_the_cpu(gemm: Gemm, name: str, pinned: bool) -> None:
    arguments, box = arguments_on("cuda")
    there = arguments[name].cpu()
    wrong = {**arguments, name: there.pin_memory() if pinned else there}
    blamed = ".*" if name == "x" else name
    refused(wrong, blamed, "(?i)cpu|cuda", box=box, operation=gemm)
    x, weight, residual, _ = arguments.values()
    gemm.run_and_check(x, weight, residual=residual)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", "residual", "out"])
def test_case20_one_argument_on_the_gpu(gemm: Gemm, name: str) -> None:
    arguments, _ = arguments_on("cpu")
    refused({**arguments, name: arguments[name].cuda()}, name, "(?i)cuda|cpu", operation=gemm)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["weight", "residual", "out"])
def test_case19_mixed_devices_are_refused(gemm: Gemm, name: str) -> None:
    arguments, _ = arguments_on("cuda:0")
    refused({**arguments, name: arguments[name].to("cuda:1")}, name, "cuda:1", operation=gemm)


@pytest.mark.gpu
def test_a_stream_that_is_none_is_named(gemm: Gemm) -> None:
    x, weight = inputs(M, N, K, "cuda")
    for junk in ("side", 1.5, object()):
        arguments = {"x": x, "weight": weight, "stream": junk}
        refused(arguments, "stream", type(junk).__name__, operation=gemm)
    gemm.run_and_check(x, weight)
