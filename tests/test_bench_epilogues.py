"""The benchmarks of the epilogues: small runs on a GPU, and what they make of times without one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_helpers import Small, on_no_gpu, timed_as
from cuda_signatures import signatures

from k3cupy.kernels import mla_decode, mla_prefill
from k3cupy.kernels.mla_prefill import INSERTS, OPS
from k3cupy.runtime import sources
from k3cupy.timing.decode_step import DecodeStep
from k3cupy.timing.prefill_step import PrefillStep


@pytest.mark.gpu
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_a_small_prefill_run_on_the_gpu(op: str, rope: bool) -> None:
    from k3cupy.bench import prefill

    if rope and op not in INSERTS:
        pytest.skip("context is turned already")
    some = mla_prefill.CANDIDATES[:2]
    found = prefill.run_entry(op, 16, 12, rope, some)
    times = [*(c["us"] for c in found.candidates), found.copy_us, found.row_copy_us]
    assert (found.public_us is None) == rope
    times += [] if rope else [found.public_us, found.alone_us["public"]]
    assert all(0 < time < 1000 for time in (*times, found.torch_us))


@pytest.mark.gpu
def test_a_wrong_prefill_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3cupy.bench import prefill

    monkeypatch.setattr(PrefillStep, "run", lambda step, config: None)
    with pytest.raises(RuntimeError, match="differs from the reference, not timed"):
        prefill.run_entry("fused_mla_kv_concat", 4, 12, False, mla_prefill.CANDIDATES[:1])


# What a benchmark makes of the times, on a GPU that is none


def in_the_chain(names: list[str]) -> float:
    """3 us for a producer and a consumer; alone nothing but what is between them."""
    between = [name for name in names if "read_all" not in name and "write_rows" not in name]
    return 3.0 * (len(between) < len(names)) + 0.5 * len(between) + 2.0


@pytest.mark.parametrize("scenario", ["chain", "alone"])
def test_the_decode_epilogue_is_what_it_adds_and_alone_beside_it(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3cupy.bench import decode

    small = on_no_gpu(monkeypatch)
    timed_as(monkeypatch, small, in_the_chain)
    monkeypatch.setattr(decode, "DecodeStep", functools.partial(DecodeStep, device="cpu"))
    some = mla_decode.CANDIDATES[:2]
    chosen = SimpleNamespace(config=some[1])
    monkeypatch.setattr(decode.k3cupy, "explain_mla_decode", lambda **_: chosen)
    found = decode.run_entry("16bit+ds_mla", 4, 2, scenario, True, some, ("early", "end"))
    base = 5.0 if scenario == "chain" else 0.0
    assert found.chain_us == base
    assert found.alone_us == {"ours": 2.0}
    assert found.empty_us == (0.5 if base else 2.5)
    assert [c["us"] for c in found.candidates] == [0.0 if base else 2.0] * 2
    assert found.dispatched == asdict(some[1])
    triggers = {each.name.partition("Trigger::")[2] for each in small}
    assert triggers == ({"", "kEarly>", "kEnd>"} if base else {""})


def test_a_prefill_epilogue_is_what_it_adds_and_alone_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from k3cupy.bench import prefill

    class Copies:
        def __init__(self, size: int) -> None:
            assert size > 0

        def device_to_device(self) -> None:
            small.append(Small("copy", 1, True, []))

        def one_warp_a_row(self) -> None:
            small.extend([Small("copy", 1, True, [])] * 2)

    small = on_no_gpu(monkeypatch)
    timed_as(monkeypatch, small, in_the_chain)
    monkeypatch.setattr(prefill, "PrefillStep", functools.partial(PrefillStep, device="cpu"))
    monkeypatch.setattr(prefill, "Copies", Copies)
    some = mla_prefill.CANDIDATES[:2]
    chosen = SimpleNamespace(config=some[1])
    monkeypatch.setattr(prefill.k3cupy, "explain_mla_prefill", lambda *_, **__: chosen)
    monkeypatch.setattr(prefill.graphs, "in_turns", lambda run, of: lambda: run(of[0]))
    monkeypatch.setattr(PrefillStep, "run", lambda *_: None)
    monkeypatch.setattr(PrefillStep, "check", lambda *_: None)
    found = prefill.run_entry("fused_mla_kv_concat", 5, 2, False, some)
    assert (found.copy_us, found.row_copy_us, found.torch_us) == (0.5, 1.0, 0.0)
    assert [c["us"] for c in found.candidates] == [0.0, 0.0]
    assert found.alone_us == {"ours": 2.0, "warp a row": 3.0, "public": 2.5}
    assert found.public_us == 0.5


def matches_of(arguments: Sequence[Any], source: str, kernel: str) -> list[str]:
    """What of a launch does not fit the parameters of a comparison kernel."""
    text = (sources.shipped() / "bench" / source).read_text(encoding="utf-8")
    parameters = signatures(text)[kernel].parameters
    assert len(arguments) == len(parameters)
    return [
        each.name
        for value, each in zip(arguments, parameters, strict=True)
        if (each.ctype == "unsigned int") != isinstance(value, np.uint32)
        or ("*" in each.ctype and 0 < int(value) < 1 << 20)
        or ("stride" in each.name and int(value) > 1 << 20)
    ]


@pytest.mark.parametrize("op", OPS)
def test_the_public_prefill_kernel_gets_what_it_takes(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3cupy.bench import prefill

    small = on_no_gpu(monkeypatch)
    step = PrefillStep(op, 5, 2, device="cpu")
    prefill.public_structure(step)()
    (launched,) = small
    assert matches_of(launched.arguments, "public_prefill.cu", "public_prefill") == []
    rows = {mla_prefill.QKV_QUANT: 3, mla_prefill.KV_CONCAT_QUANT: 2}.get(op, 1)
    assert launched.grid == -(-5 * (2 * rows + (op in INSERTS)) // 8)
    given = {int(value) for value in launched.arguments}
    unread = {"q"} if op != mla_prefill.QKV_QUANT else set()
    read = [t for name, t in step.arguments.items() if name not in unread]
    assert {t.data_ptr() for t in (*read, *step.outs)} <= given


@pytest.mark.parametrize(("tokens", "warps"), [(59, 4), (60, 8)])
def test_sglangs_kernel_gets_what_it_takes(
    tokens: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3cupy.bench import public

    small = on_no_gpu(monkeypatch)
    step = DecodeStep("fp8+fp8", tokens, 12, "cpu", scales=(1.0, 1.0))
    public.sglang_epilogue(step.inputs, step.out, step.kv_cache)()
    (launched,) = small
    assert launched.name == f"k3cupy::sglang_structure<__nv_bfloat16, true, {warps}>"
    assert launched.grid == -(-tokens * 13 // warps)
    assert matches_of(launched.arguments, "sglang_structure.cu", "sglang_structure") == []
