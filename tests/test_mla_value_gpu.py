"""The value up-projection: layouts and gates; `test_mla_layer_gpu.py` has the rest."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from helpers import BF16, FP16
from memory_helpers import gibibytes
from mla_helpers import run_and_check, run_into_guarded_outs
from mla_layer_helpers import Change, heads_first, in_layout, make_value, rows_last

from k3cupy.kernels.mla_value import CANDIDATES

ALIGNED: dict[str, Change] = {
    "latent in 576 columns": in_layout("latent", 64),
    "latent heads first": heads_first("latent"),
    "gate in more columns": in_layout("gate", 512, 16),
    "w_uv apart": in_layout("w_uv", 8, 16),
}
ODD: dict[str, Change] = {
    "latent by 513": in_layout("latent", 1),
    "latent off 2": in_layout("latent", 0, 2),
    "latent heads first by 515": heads_first("latent", 3),
    "gate by one more": in_layout("gate", 1),
    "gate off 2": in_layout("gate", 0, 2),
    "w_uv by 129": in_layout("w_uv", 1),
    "w_uv off 2": in_layout("w_uv", 0, 2),
    "w_uv turned by 513": rows_last("w_uv", 1),
    "w_uv turned off 8": rows_last("w_uv", 0, 8),
}


@pytest.mark.parametrize("change", ALIGNED.values(), ids=ALIGNED)
def test_aligned_rows_give_the_bits_of_packed_ones(device: str, change: Change) -> None:
    call = make_value(5, 3, packed=True, device=device)
    got = run_into_guarded_outs(change(call))
    oracle.assert_same_bits(oracle.bits(got), oracle.bits(call.run()), "values")


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_case02_case03_rows_that_are_not_aligned(device: str, change: Change) -> None:
    for tokens in (1, 17):
        call = make_value(tokens, 3, device=device)
        run_into_guarded_outs(change(call))
        run_into_guarded_outs(call, shift=2)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_bits_depend_on_the_warps_alone(packed: bool) -> None:
    """Neither on the tiles nor on the other tokens."""
    call = make_value(70, 3, packed=packed, device="cuda")
    for warps in (4, 8):
        want = None
        for config in CANDIDATES[::3]:
            for tokens in (70, 17, 1):
                gate = call.args["gate"][:tokens]
                part = call.given(latent=call.first[:tokens], gate=gate)
                got = oracle.bits(part.run(config=replace(config, warps=warps)))
                want = got if want is None else want
                few = min(tokens, len(want))
                oracle.assert_same_bits(got[:few], want[:few], f"{config}, {tokens} tokens")


def test_both_orders_of_the_weight(device: str) -> None:
    """One product: one dimension or the other contiguous, and one value or one head alone."""
    for tokens, heads in ((1, 1), (5, 1), (5, 3)):
        for packed in (False, True):
            call = make_value(tokens, heads, packed=packed, device=device)
            run_and_check(call)
            alone = call.args["w_uv"][:1].expand(heads, -1, -1)
            run_and_check(call.given(w_uv=alone))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_gates_of_any_size(device: str, dtype: torch.dtype) -> None:
    """From what lets nothing through to what lets all through, in small steps."""
    call = make_value(8, 2, dtype=dtype, device=device)
    gate = torch.linspace(-100, 100, 8 * 256).view(8, 256).to(dtype).to(device)
    run_and_check(call.given(gate=gate))
    run_and_check(call.given(latent=(call.first.double() * 2.0**-20).to(dtype), gate=gate))


@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
def test_case47_subnormals_are_kept(device: str, gate: bool) -> None:
    """Of products, sums and results."""
    for packed in (False, True):
        call = make_value(5, 2, packed=packed, gate=gate, device=device)
        tiny = (call.first.double() * 2.0**-130).to(BF16)
        out = run_and_check(call.given(latent=tiny))
        assert out.count_nonzero() > out.numel() / 2


@pytest.mark.gpu
@gibibytes(10)
def test_strides_past_2_31(needs_memory: None) -> None:
    """Of tokens, of heads, of gates and of matrices."""
    far = 2**31 + 80
    call = make_value(2, 2, device="cuda")
    for name, strides in (
        ("latent", (far, 512, 1)),
        ("latent", (512, far, 1)),
        ("gate", (far, 1)),
        ("w_uv", (far, 128, 1)),
        ("w_uv", (far, 1, 512)),
    ):
        values = call.args[name]
        buffer = torch.empty(far + 2**17, dtype=BF16, device="cuda")
        wide = buffer.as_strided(values.shape, strides)
        wide.copy_(values)
        run_and_check(call.given(**{name: wide}))
        del buffer, wide
