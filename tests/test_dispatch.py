"""Which kernel a linear layer gets: every rule with its reason, on descriptors, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_helpers import ADDRESS, K, N, decided, says, view
from fake_device import H200, T4, TOO_OLD
from gemm_table_helpers import measured, measured_table, second, user_cache
from helpers import BF16, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from toolchain_helpers import fake_gpu

import k3cupy
from k3cupy import Choice, projections
from k3cupy.choose import gemm
from k3cupy.choose.gemm import ALL, TOKENS, choose, problem_of
from k3cupy.choose.table import Entry
from k3cupy.ops.warmup import OPERATIONS, wanted_of
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.tensors import TensorView

H100 = DeviceInfo(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448)
A100 = DeviceInfo(0, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912)
B300 = DeviceInfo(0, "NVIDIA B300", (10, 3), 148, 232_448)

NOT_INVARIANT = "; so batch invariance does not hold for this call"

FOUNDING = [
    pytest.param(case, tokens, id=f"{case.name}-{tokens}")
    for case in projections.strided_cases()
    for tokens in (1, 4, 16)
]


# What our kernels take


@pytest.mark.parametrize(("case", "tokens"), FOUNDING)
def test_case01_the_founding_slices_reach_a_kernel(
    case: projections.StridedCase, tokens: int
) -> None:
    """A column slice of a wider tensor, one row or many, is no reason to fall back."""
    x = view(
        tokens,
        case.k,
        strides=(case.source_row_width, 1),
        address=ADDRESS + 2 * case.offset,
    )
    found = decided(x, view(case.n, case.k))
    assert found.kernel in ("fused_a", "skinny")
    assert found.origin == "shipped"
    assert found.config is not None
    assert not found.is_fallback


ACCEPTED: dict[str, dict[str, TensorView]] = {
    "one-row-of-any-stride": {"x": view(1, K, strides=(6285, 1))},
    "one-row-of-stride-0": {"x": view(1, K, strides=(0, 1))},
    "one-row-of-stride-1": {"x": view(1, K, strides=(1, 1))},
    "one-row-of-negative-stride": {"x": view(1, K, strides=(-3, 1))},
    "rows-of-stride-0": {"x": view(4, K, strides=(0, 1))},
    "rows-that-overlap": {"x": view(4, K, strides=(8, 1))},
    "rows-far-apart": {"x": view(4, K, strides=(2**40, 1))},
    "managed-memory": {"x": view(4, K, device_type="cuda_managed")},
    "read-only-inputs": {"x": view(4, K, readonly=True), "weight": view(N, K, readonly=True)},
    "another-producer": {"x": view(4, K, framework="cupy")},
    "residual": {"residual": view(4, N)},
    "residual-at-any-address": {"residual": view(4, N, address=ADDRESS + 2)},
    "case02-residual": {"residual": view(4, N, strides=(2119, 1))},
    "residual-of-one-row": {"x": view(1, K), "residual": view(1, N, strides=(7, 1))},
    "grad-without-grad-mode": {"weight": view(N, K, requires_grad=True)},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    assert not decided(**ACCEPTED[name]).is_fallback


# What falls back, and why


DECLINED: dict[str, tuple[dict[str, Any], str, str]] = {
    "x-1d": ({"x": view(K)}, "x", r"1-dimensional|\[7168\]"),
    "x-3d": ({"x": view(2, 2, K)}, "x", r"3-dimensional|\[2, 2, 7168\]"),
    "weight-1d": ({"weight": view(K)}, "weight", r"1-dimensional|\[7168\]"),
    "columns": ({"weight": view(N, 7184)}, "weight", "7184"),
    "empty-weight": ({"weight": view(0, K)}, "weight", r"\[0, 7168\]|N = 0"),
    "no-columns": (
        {"x": view(4, 0), "weight": view(N, 0)},
        "x",
        r"\[2112, 0\]|K = 0",
    ),
    "case23-x-fp16": ({"x": view(4, K, dtype="float16")}, "x", "float16"),
    "case23-weight-fp32": ({"weight": view(N, K, dtype="float32")}, "weight", "float32"),
    "case23-both-fp16": (
        {"x": view(4, K, dtype="float16"), "weight": view(N, K, dtype="float16")},
        "x",
        "float16",
    ),
    "case20-x-on-the-cpu": (
        {"x": view(4, K, device_type="cpu")},
        "x|weight",
        "(?i)on the CPU and the weight on cuda:0|device cuda:0",
    ),
    "case20-x-pinned": (
        {"x": view(4, K, device_type="cuda_host")},
        "x|weight",
        r"CPU \(pinned\)|device cuda",
    ),
    "case20-weight-on-the-cpu": (
        {"weight": view(N, K, device_type="cpu")},
        "weight",
        "(?i)weight on the CPU|device cpu",
    ),
    "both-on-the-cpu": (
        {"x": view(4, K, device_type="cpu"), "weight": view(N, K, device_type="cpu")},
        "x",
        "(?i)cpu",
    ),
    "meta": (
        {"x": view(4, K, device_type="meta"), "weight": view(N, K, device_type="meta")},
        "x",
        "meta",
    ),
    "case19-two-gpus": ({"weight": view(N, K, device_index=1)}, "weight", "cuda:1"),
    "inner-stride": ({"x": view(4, K, strides=(2 * K, 2))}, "x", r"inner stride 2\b"),
    "x-transposed": ({"x": view(4, K, strides=(1, 4))}, "x", r"inner stride 4\b"),
    "inner-stride-negative": ({"x": view(4, K, strides=(K, -1))}, "x", r"stride -1\b"),
    "rows-backwards": ({"x": view(4, K, strides=(-K, 1))}, "x", "-7168"),
    "case02-row-stride": ({"x": view(4, K, strides=(7175, 1))}, "x", "7175"),
    "founding-row-stride": (
        {"x": view(2, 128, strides=(6285, 1)), "weight": view(1536, 128)},
        "x",
        "6285",
    ),
    **{
        f"case03-x-{past}-bytes-off": (
            {"x": view(tokens, K, strides=(8192, 1), address=ADDRESS + past)},
            "x",
            f"{past} bytes past",
        )
        for past, tokens in ((2, 1), (4, 4), (8, 1), (14, 4))
    },
    "case03-weight": (
        {"weight": view(N, K, address=ADDRESS + 8)},
        "weight",
        f"address of weight .* 8 bytes past|0x{ADDRESS + 8:x}",
    ),
    "weight-transposed": ({"weight": view(N, K, strides=(1, N))}, "weight", r"\(1, 2112\)"),
    "case02-weight-padded": (
        {"weight": view(N, K, strides=(7175, 1))},
        "weight",
        r"\(7175, 1\)",
    ),
    "weight-expanded": ({"weight": view(N, K, strides=(0, 1))}, "weight", r"\(0, 1\)"),
    "x-without-memory": ({"x": view(4, K, address=0)}, "x", "without any"),
    "weight-without-memory": ({"weight": view(N, K, address=0)}, "weight", "without any"),
    "residual-shape": ({"residual": view(4, N - 1)}, "residual", r"\[4, 2111\]"),
    "residual-row": ({"residual": view(N)}, "residual", r"\[2112\]"),
    "residual-dtype": ({"residual": view(4, N, dtype="float32")}, "residual", "float32"),
    "case20-residual": (
        {"residual": view(4, N, device_type="cpu")},
        "residual",
        "(?i)residual on the CPU|device cpu",
    ),
    "case19-residual": ({"residual": view(4, N, device_index=1)}, "residual", "cuda:1"),
    "residual-without-memory": ({"residual": view(4, N, address=0)}, "residual", "without any"),
    **{
        f"case25-{name}": (
            {name: replace(v, requires_grad=True), "grad_mode": True},
            name,
            f"{name} requires grad|one that requires grad",
        )
        for name, v in (("x", view(4, K)), ("weight", view(N, K)), ("residual", view(4, N)))
    },
    "no-tokens": ({"x": view(0, K, address=0)}, "x", "^none"),
    "many-tokens": ({"x": view(65, K)}, "x", "^more$"),
    "k": ({"x": view(4, 7164), "weight": view(N, 7164)}, "x", "7164"),
    "k-of-many-tokens": ({"x": view(17, 7160), "weight": view(N, 7160)}, "x", "^7160$"),
    "old-gpu": ({"device": T4}, "device", "sm_75"),
}
"""What falls back: the argument that is to blame, and what a reason says of it."""


@pytest.mark.parametrize("name", DECLINED)
def test_declined_with_its_reason(name: str) -> None:
    arguments, blamed, what = DECLINED[name]
    found = decided(**arguments)
    assert any(says(found.reason, one, what) for one in blamed.split("|")), found.reason
    assert found.is_fallback
    assert (found.kernel, found.config, found.origin) == ("linear", None, "rule")
    assert str(found) == f"linear: {found.reason}"


def test_every_declined_call_without_batch_invariance_says_so() -> None:
    for name, (arguments, *_) in DECLINED.items():
        found = decided(**arguments, batch_invariant=True)
        if name == "many-tokens":
            assert found.kernel == "fused_a"
            continue
        reason = decided(**arguments).reason
        assert found.reason == reason + NOT_INVARIANT, name


def entry_of_h200(n: int, k: int, tokens: int) -> Entry:
    """What the shipped measurements of the H200 say."""
    key = problem_of(n, k), tokens
    return next(entry for entry in measured_table() if entry.key == key)


def test_measured_to_be_slower() -> None:
    """A fall-back is also what the framework's linear won."""
    entry = entry_of_h200(4608, 1536, 64)
    assert entry.kernel == "linear"
    times = f"{entry.us:.2f} against {min(entry.times['fused_a'].values()):.2f} us"
    found = choose(ALL, 4608, 1536, 60, H200)
    assert found.is_fallback
    assert found.origin == "shipped"
    assert found.reason == f"F.linear was faster on NVIDIA H200 at M = 64 ({times})"


# Plans


def test_a_measured_plan_says_its_times() -> None:
    entry = entry_of_h200(N, K, 4)
    found = choose(ALL, N, K, 4, H200)
    assert (found.kernel, found.config) == (entry.kernel, entry.config)
    assert found.reason == (
        f"measured on NVIDIA H200 at M = 4: {entry.us:.2f} us, F.linear {entry.linear_us:.2f} us"
    )


def test_a_plan_without_the_residual_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the residual was not measured, the reason says so."""
    with user_cache(tmp_path, monkeypatch, measured(16, n=3656)):
        found = choose(ALL, 3656, K, 16, H200, residual=True)
        assert found.config == choose(ALL, 3656, K, 16, H200).config
    assert "M = 16, without the residual: " in found.reason


def test_the_user_cache_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (
        measured(3, skinny_us=4.0),
        measured(8, skinny_us=4.0),
        measured(16, fused_us=9.5),
        measured(4, residual=True, fused_us=3.0),
    )
    with user_cache(tmp_path, monkeypatch, *entries):
        exact = choose(ALL, N, K, 3, H200)
        assert (exact.kernel, exact.origin) == ("skinny", "user")
        assert exact.config == second(3, "skinny")
        assert exact.reason == "measured on NVIDIA H200 at M = 3: 4.00 us, F.linear 9.00 us"
        next_one = choose(ALL, N, K, 5, H200)
        assert next_one.config == replace(second(8, "skinny"), num_rows=5)
        lost = choose(ALL, N, K, 10, H200)
        assert (lost.kernel, lost.origin) == ("linear", "user")
        assert lost.reason == "F.linear was faster on NVIDIA H200 at M = 16 (9.00 against 9.50 us)"
        residual = choose(ALL, N, K, 4, H200, residual=True)
        assert (residual.kernel, residual.config) == ("fused_a", second(4))
        assert "without the residual" not in residual.reason


def test_public_figures_are_marked() -> None:
    skinny = choose(ALL, 3072, 7168, 3, B300)
    assert (skinny.kernel, skinny.origin) == ("skinny", "public")
    assert skinny.reason == "public figures for sm_103, not measured by us, name skinny at M = 3"
    fused = choose(ALL, N, K, 4, B300)
    assert (fused.kernel, fused.origin) == ("fused_a", "public")
    assert fused.config == choose(("fused_a",), N, K, 4, B300).config
    assert "not measured by us" in fused.reason
    assert "cost model" in fused.reason
    none = choose(ALL, N, K, 40, B300)
    assert (none.kernel, none.origin) == ("linear", "public")
    assert none.reason == (
        "public figures for sm_103, not measured by us, name no kernel for 2112 x 7168 at M = 40"
    )


HEURISTICS = [
    (H100, 2112, 7168, {2: "skinny", 16: "skinny", 17: "fused_a", 64: "fused_a", 65: "linear"}),
    (H100, 7168, 8448, {2: "skinny", 17: "fused_a", 32: "fused_a", 33: "linear"}),
    (H100, 4223, 512, {64: "fused_a"}),
    (H100, 4224, 512, {64: "linear"}),
    (H100, 4224, 24, {1: "skinny"}),
    (H200, 48, 7168, {2: "skinny", 16: "skinny", 64: "fused_a"}),
    (H200, 48, 7160, {16: "skinny"}),
    (A100, 2112, 7168, {1: "skinny", 2: "skinny", 3: "fused_a", 8: "fused_a", 9: "linear"}),
    (replace(A100, compute_capability=(8, 9)), 2112, 7168, {2: "skinny", 9: "linear"}),
    (B300, 48, 128, {1: "skinny", 64: "fused_a"}),
    (B300, 4736, 128, {32: "fused_a", 33: "linear"}),
]


@pytest.mark.parametrize(("gpu", "n", "k", "wanted"), HEURISTICS)
def test_the_rule_of_thumb(gpu: DeviceInfo, n: int, k: int, wanted: dict[int, str]) -> None:
    for num_tokens, kernel in wanted.items():
        found = choose(ALL, n, k, num_tokens, gpu)
        assert (found.kernel, found.origin) == (kernel, "rule"), num_tokens
        if num_tokens <= 64:
            assert "not measured here" in found.reason
            assert "tune" in found.reason
        assert found.is_fallback == (found.config is None)


def test_another_gpu_of_the_architecture_is_told_apart() -> None:
    reason = choose(ALL, N, K, 1, H100).reason
    assert "NVIDIA H100 80GB HBM3 has no measured table" in reason
    assert "that of NVIDIA H200 does not hold for it" in reason


def can_run(p: projections.Projection, num_tokens: int, gpu: DeviceInfo) -> None:
    """What a plan names is valid on the GPU, for that very number of tokens."""
    found = choose(ALL, p.n, p.k, num_tokens, gpu)
    if found.kernel == "fused_a":
        assert found.config.tile_m >= num_tokens
        assert found.config.is_valid(gpu)
    elif found.kernel == "skinny":
        assert found.config.num_rows == num_tokens
        assert found.config.is_valid(gpu)


def test_every_measured_plan_can_run() -> None:
    """At every number of tokens that is listed, and at the first that takes the next one."""
    for p in projections.shapes():
        for num_tokens in {m for listed in TOKENS for m in (listed, listed + 1) if m <= 64}:
            can_run(p, num_tokens, H200)


SMALL = replace(H200, shared_memory_optin=101_376)


@given(
    st.sampled_from(projections.shapes()),
    st.integers(1, 64),
    st.sampled_from([SMALL, H100, A100, B300]),
)
@settings(max_examples=200)
def test_every_other_plan_can_run(
    p: projections.Projection, num_tokens: int, gpu: DeviceInfo
) -> None:
    can_run(p, num_tokens, gpu)


@pytest.mark.parametrize("gpu", [H200, H100, A100, B300], ids=lambda gpu: gpu.name)
def test_batch_invariance_is_always_fused_a_of_one_order(gpu: DeviceInfo) -> None:
    """On a GPU that has tables for every weight: their entries may be of older kernels."""
    every = [p for model in projections.MODELS for p in projections.shapes(model)]
    for p in every if gpu is H200 else every[:6]:
        found = [
            choose(ALL, p.n, p.k, m, gpu, residual=m % 2 == 0, batch_invariant=True)
            for m in (1, 2, 8, 16, 17, 33, 64, 65, 300)
        ]
        assert len({choice.origin for choice in found}) == 1
        assert {choice.kernel for choice in found} == {"fused_a"}
        assert len({choice.config.order for choice in found}) == 1
        assert all("batch-invariant" in choice.reason for choice in found)
        assert ["in slices of 64 rows" in d.reason for d in found] == [False] * 7 + [True] * 2


def test_batch_invariance_needs_k_of_16() -> None:
    found = choose(ALL, 64, 24, 4, H200, batch_invariant=True)
    assert found.reason == "x: expected K a multiple of 16, got 24" + NOT_INVARIANT


def test_each_kernel_has_candidates_where_it_can_run() -> None:
    assert gemm.OURS == ("fused_a", "skinny")
    assert (*gemm.OURS, "linear") == ALL
    for kernel in gemm.OURS:
        assert gemm.why_not(kernel, K, 4) is None
        assert gemm.candidates(kernel, N, K, 4, H200)
    assert gemm.why_not("skinny", K, 17) == "x: expected at most 16 rows, got 17"
    assert gemm.candidates("skinny", N, K, 17, H200) == ()
    assert all(config.is_mma for config in gemm.candidates("skinny", N, K, 9, H200))
    assert gemm.why_not("fused_a", 24, 4) == "x: expected K a multiple of 16, got 24"
    assert gemm.candidates("fused_a", N, 24, 4, H200) == ()


# select_backend


def test_select_backend() -> None:
    select = k3cupy.select_backend
    assert select(16, 2112, 7168, device=H200) == "fused_a"
    assert select(60, 4608, 1536, device=H200) is None
    assert select(3, 3072, 7168, device=B300) == "skinny"
    assert select(1, 2112, 7168, device=A100, has_residual=True) == "skinny"
    for numbers in ((0, 2112, 7168), (65, 2112, 7168), (1, 0, 7168), (1, 2112, 0)):
        assert select(*numbers, device=H200) is None
    with k3cupy.batch_invariant_mode():
        assert select(300, 7168, 3584, device=H200) == "fused_a"


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_case42_select_backend_takes_integers_of_numpy(kind: Any) -> None:
    for numbers in ((16, 2112, 7168), (60, 7168, 3584), (0, 2112, 7168)):
        want = k3cupy.select_backend(*numbers, device=H200)
        assert k3cupy.select_backend(*map(kind, numbers), device=H200) == want


@pytest.mark.parametrize("name", ["num_tokens", "n", "k"])
def test_select_backend_refuses(name: str) -> None:
    for junk in (-1, 1.0, True, None):
        arguments = {"num_tokens": 1, "n": 16, "k": 16, "device": H200, name: junk}
        refused(arguments, name, f"^{re.escape(repr(junk))}", operation=k3cupy.select_backend)


def test_devices_by_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    monkeypatch.setattr(devices, "info", lambda index: replace(H200, index=index))
    for device in (
        None,
        0,
        np.int64(0),
        "cuda",
        "cuda:0",
        torch.device("cuda"),
        torch.device("cuda:0"),
    ):
        assert k3cupy.select_backend(16, 2112, 7168, device=device) == "fused_a"
    for device in (1, -1, False, np.int64(1), "cuda:1", "cpu", "cuda:x", torch.device("cpu"), 0.5):
        arguments = {"num_tokens": 1, "n": 2112, "k": 7168, "device": device}
        found = f"^{re.escape(repr(device))}"
        refused(arguments, "device", found, operation=k3cupy.select_backend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_select_backend_without_a_gpu() -> None:
    assert k3cupy.select_backend(1, 2112, 7168) is None
    for name in ("sm_90", "NVIDIA H200", "nonsense"):
        with pytest.raises(ValueError, match=f"^device: expected a GPU ordinal.*{name}.* gpu="):
            k3cupy.select_backend(1, 2112, 7168, device=name)


H200_NAMES = ("h200", "NVIDIA H200", "sm_90", H200)


@pytest.mark.parametrize("gpu", H200_NAMES, ids=str)
def test_what_a_gpu_that_is_not_here_would_run(gpu: Any) -> None:
    """Whatever device the tensors are on: the choice, the configuration and the reason."""
    assert k3cupy.select_backend(16, 2112, 7168, gpu=gpu) == "fused_a"
    x, weight = torch.ones(16, 7168, dtype=BF16), torch.ones(2112, 7168, dtype=BF16)
    expected = choose(ALL, 2112, 7168, 16, H200)
    told = k3cupy.explain_low_latency_gemm(x, weight, gpu=gpu)
    assert (told.kernel, told.config, told.runs_on) == ("fused_a", expected.config, "cuda")
    assert told.reason == expected.reason
    assert told.name_expression is not None and told.pdl
    assert k3cupy.explain_fused_a_gemm(x, weight, gpu=gpu) == told
    assert k3cupy.explain_skinny_gemm(x, weight, gpu=gpu).kernel == "skinny"
    apart = torch.ones(16, 7169, dtype=BF16)[:, :7168]
    fallen = k3cupy.explain_low_latency_gemm(apart, weight, gpu=gpu)
    assert "row stride" in fallen.reason and fallen.runs_on == "cuda"
    assert k3cupy.explain_low_latency_gemm(x, weight).runs_on == "cpu", "without it nothing changes"


def test_a_gpu_that_is_too_old() -> None:
    """A linear layer has the framework's; the kernels alone are refused, and not compiled."""
    x, weight = torch.ones(4, 7168, dtype=BF16), torch.ones(2112, 7168, dtype=BF16)
    told = k3cupy.explain_low_latency_gemm(x, weight, gpu=T4)
    assert told.is_fallback and told.reason == "Tesla T4 is sm_75; our kernels need sm_80"
    for explain in (k3cupy.explain_fused_a_gemm, k3cupy.explain_skinny_gemm):
        with pytest.raises(k3cupy.ToolchainError, match=f"^{TOO_OLD}"):
            explain(x, weight, gpu=T4)
    one: dict[str, Any] = {"shapes": [(2112, 7168)], "tokens": 4}
    assert list(wanted_of("low_latency_linear", one)(T4)) == []
    for op in OPERATIONS.keys() - {"low_latency_linear"}:
        options = one if op.endswith("_gemm") else {}
        with pytest.raises(k3cupy.ToolchainError, match=f"^{TOO_OLD}"):
            k3cupy.compile(op, gpu=T4, progress=False, **options)


@pytest.mark.parametrize(
    ("facts", "error", "told"),
    [
        ({"num_sms": 0}, ValueError, "num_sms: expected an integer of at least 1, got 0"),
        ({"num_sms": 1.5}, TypeError, "num_sms: expected an integer of at least 1, got 1.5"),
        ({"index": -1}, ValueError, "index: expected an integer of at least 0, got -1"),
        ({"shared_memory_optin": None}, TypeError, "shared_memory_optin: expected an integer of"),
        ({"compute_capability": "9.0"}, TypeError, "compute_capability: .*, got '9.0'"),
        ({"compute_capability": [9, 0]}, TypeError, r"compute_capability: .*, got \[9, 0\]"),
        ({"compute_capability": (9, "0")}, TypeError, r"compute_capability: .*, got \(9, '0'\)"),
        ({"compute_capability": (9,)}, TypeError, r"compute_capability: .*, got \(9,\)"),
    ],
    ids=str,
)
def test_facts_that_no_gpu_has(facts: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=f"^{told}"):
        replace(H200, **facts)


def test_a_gpu_that_nobody_knows_is_refused() -> None:
    for junk, kind in (("sm_42", ValueError), ("H2OO", ValueError), (0, TypeError)):
        with pytest.raises(kind, match=f"^gpu: expected a100, .*, got {junk!r}\\. Of another GPU"):
            k3cupy.select_backend(16, 2112, 7168, gpu=junk)
    with pytest.raises(TypeError, match=r"^gpu: expected None where a device"):
        k3cupy.select_backend(16, 2112, 7168, gpu="h200", device=0)


def test_a_choice_is_one_line() -> None:
    config = second(8)
    found = Choice("fused_a", config, "because")
    assert str(found) == f"fused_a, {config}: because"
    assert not found.is_fallback
