"""The two RMSNorms: layouts and values; `test_mla_layer_gpu.py` has the rest."""

from __future__ import annotations

import oracle
import pytest
from helpers import BF16, FP16, random_values
from mla_helpers import as_list, run_into_guarded_outs
from mla_layer_helpers import Change, LayerCall, in_layout, make_norm

from k3cupy.kernels.mla_norm import CANDIDATES

LAYOUTS: dict[str, Change] = {
    "in 2176 columns": in_layout("qkv_a", 64, 128),
    "by 2113": in_layout("qkv_a", 1),
    "off 2": in_layout("qkv_a", 0, 2),
    "q_weight off 2": in_layout("q_weight", 0, 2),
    "kv_weight off 8": in_layout("kv_weight", 0, 8),
    "of 2048 rows apart": lambda call: call.given(qkv_a=call.args["qkv_a"][::2]),
}


def bits(call: LayerCall, shift: int = 0) -> list:
    return [oracle.bits(t) for t in as_list(run_into_guarded_outs(call, shift=shift))]


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
def test_case02_case03_every_layout_has_the_same_bits(
    device: str, change: Change, shift: int
) -> None:
    for tokens in (1, 6):
        call = change(make_norm(tokens, device=device))
        packed = call.given(
            **{name: call.args[name].contiguous() for name in ("qkv_a", "q_weight", "kv_weight")}
        )
        for got, want in zip(bits(call, shift), bits(packed), strict=True):
            oracle.assert_same_bits(got, want, "a norm")


@pytest.mark.gpu
def test_every_configuration_has_the_same_bits() -> None:
    """And so has a token among others."""
    call = make_norm(9, device="cuda")
    want = bits(call)
    for config in CANDIDATES:
        for tokens in (1, 9):
            part = call.given(qkv_a=call.first[:tokens])
            for got, whole in zip(as_list(part.run(config=config)), want, strict=True):
                oracle.assert_same_bits(oracle.bits(got), whole[:tokens], str(config))


def test_case01_one_token_has_no_row_stride(device: str) -> None:
    call = make_norm(1, device=device)
    for stride in (0, 1, 2113, 2**40):
        run_into_guarded_outs(call.given(qkv_a=call.first.as_strided((1, 2112), (stride, 1))))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-5, 1.0])
def test_any_epsilon_and_tiny_values(device: str, dtype, eps: float) -> None:
    """Also where the epsilon is most of the sum, and where squares are subnormal."""
    call = make_norm(4, dtype=dtype, device=device, eps=eps)
    run_into_guarded_outs(call)
    if eps:
        tiny = random_values((4, 2112), dtype, 3).double() * 2.0 ** (-60 if dtype == BF16 else -20)
        run_into_guarded_outs(call.given(qkv_a=tiny.to(dtype).to(device)))
    run_into_guarded_outs(call.given(qkv_a=call.first * 0 + (0 if eps else 1)))
