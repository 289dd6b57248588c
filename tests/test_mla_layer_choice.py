"""Norms, query front and value: what is chosen, by tables and without, and compiled ahead."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fake_device import A100
from helpers import BF16, refused
from test_mla_prefill_choice import gpu, only
from toolchain_helpers import FakeGpu, fake_h200

import k3cupy
from k3cupy.choose import cache
from k3cupy.choose.mla import choose, configs, size_of
from k3cupy.choose.table import Entry, Table, entry_of, measured, parts_of, table_text
from k3cupy.cli import main
from k3cupy.kernels import mla_decode, mla_norm, mla_query, mla_value
from k3cupy.ops.warmup import wanted_of
from k3cupy.runtime.devices import named

__all__ = ["fake_h200"]

KERNELS = (mla_norm, mla_query, mla_value)
KINDS: dict[str, tuple[str, ...]] = {
    "mla_norm": ("norm",),
    "mla_query": ("16bit+same", "fp8+fp8", "16bit+ds_mla"),
    "mla_value": ("value", "value+gate", "absorb"),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=KINDS)
by_kind = pytest.mark.parametrize("kernel", (mla_norm, mla_value), ids=("mla_norm", "mla_value"))
SAME = mla_query.Variant.of_kind("16bit+same")
ONE, TWO, OTHER = mla_query.UNTUNED, mla_query.TWO_AN_SM, mla_query.CANDIDATES[0]


def table_of(*entries: Entry, name: str = "X", sms: int = 100) -> Table:
    header = {"schema": 2, "gpu": name, "num_sms": sms}
    return Table("shipped", *parts_of(table_text(header, entries)))


def query_of(heads: int, tokens: int, fused: float, separate: float, config: Any = OTHER) -> Entry:
    times = {"mla_query": {config: fused, ONE: fused + 1}, "separate": {None: separate}}
    return measured(f"{heads} heads", tokens, times)


@by_kind
def test_the_nearest_entry_by_size(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens for the norms, tokens times heads for the value."""
    name, (few, many) = kernel.KERNEL, kernel.CANDIDATES[:2]
    for kind in KINDS[name]:
        variant = kernel.Variant.of_kind(kind)
        assert variant.kind == kind
        sizes = [size_of(name, tokens, 12) for tokens in (1, 16)]
        assert sizes == ([1, 16] if kernel is mla_norm else [12, 192])
        entries = [
            measured(kind, s, {name: {c: 1.0}}) for s, c in zip(sizes, (few, many), strict=True)
        ]
        only(monkeypatch, table_of(*entries))
        found = choose(name, variant, 1, 12, gpu())
        assert (found.kernel, found.config, found.origin) == (name, few, "shipped")
        assert found.reason == f"measured on X at {sizes[0]} rows, here {sizes[0]}"
        wide = choose(name, variant, 1, 12, gpu("Y", 5))  # as many rows on each as X has at 20
        assert wide.origin == "rule"
        assert "take the choice of X" in wide.reason
        assert f"at {sizes[1]} rows" in wide.reason
        assert set(configs(name, kind, gpu())) >= {few, many}


@by_kind
def test_the_rule_without_a_table(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    for kind in KINDS[kernel.KERNEL]:
        variant = kernel.Variant.of_kind(kind)
        found = choose(kernel.KERNEL, variant, 4, 12, gpu())
        assert (found.kernel, found.config) == (kernel.KERNEL, kernel.UNTUNED)
        assert found.origin == "rule"
        assert found.reason.startswith("no measured table has this operation; ")
        assert kernel.UNTUNED in configs(kernel.KERNEL, kind)
        last = kernel.CANDIDATES[-1]
        assert choose(kernel.KERNEL, variant, 4, 12, gpu(), last).config == last
        slow = choose(kernel.KERNEL, replace(variant, vector=False), 4, 12, gpu())
        assert slow.config == kernel.UNTUNED
        assert "element-wise" in slow.reason


def test_what_a_gpu_has_no_shared_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight whose columns are contiguous, which lies there; the other lies in registers."""
    large, small = k3cupy.MlaValueConfig(32, 64, 8), "rtx-4090"
    only(monkeypatch, table_of(measured("value", 192, {"mla_value": {large: 1.0}})))
    latent, w_uv = torch.zeros(64, 3, 512, dtype=BF16), torch.zeros(3, 512, 128, dtype=BF16)
    ask = functools.partial(k3cupy.explain_mla_decode_value, latent)
    assert ask(w_uv, gpu="h200").config == large
    assert ask(w_uv.mT.contiguous().mT, gpu=small).config == large
    found, told = ask(w_uv, gpu=small), f"{large} takes 139264 bytes of shared memory a block, "
    assert (found.config, found.origin) == (mla_value.UNTUNED, "rule")
    assert f"; but {told}NVIDIA GeForce RTX 4090 has 101376" in found.reason
    with pytest.raises(ValueError, match=f"config: expected one that fits the GPU, got {told}"):
        ask(w_uv, gpu=small, config=large)
    least = named(small).shared_memory_optin
    assert mla_value.UNTUNED.shared_bytes(mla_value.Variant("bfloat16")) <= least
    absorbed = mla_value.Variant("bfloat16", absorb=True)
    assert all(each.shared_bytes(absorbed) <= least for each in mla_value.CANDIDATES)


# The query front: by heads, beside the separate kernels

choose_query = functools.partial(choose, "mla_query", SAME)
LARGE = gpu("X", 132)
"""It runs 15 clusters at once."""


def test_heads_whose_clusters_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block a multiprocessor for these, and two for more, without a table."""
    only(monkeypatch)
    assert LARGE.clusters_at_once(mla_query.CLUSTER) == 15
    for heads, wanted in ((1, ONE), (15, ONE), (16, TWO), (30, TWO), (96, TWO)):
        for tokens in (1, 16):
            found = choose_query(tokens, heads, LARGE)
            assert (found.kernel, found.config, found.origin) == ("mla_query", wanted, "rule")
            told = f"no measured table has {heads} heads, a cluster each; X runs 15 at once"
            assert found.reason == told
        assert choose_query(4, heads, LARGE, OTHER).config == OTHER
    few = gpu("Y", 20)  # two of eight blocks
    assert [choose_query(1, heads, few).config for heads in (2, 3)] == [ONE, TWO]


def test_a_table_speaks_for_heads_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose clusters run at once or do not; of these the nearest, then the nearest tokens."""
    entries = [
        query_of(12, 1, 3.0, 4.5),
        query_of(12, 16, 3.5, 4.6, mla_query.CANDIDATES[3]),
        query_of(24, 4, 5.0, 6.0, TWO),
        query_of(96, 4, 9.0, 8.0),
    ]
    only(monkeypatch, table_of(*entries, sms=132))
    for tokens, heads, config in (
        (1, 12, OTHER),
        (3, 6, OTHER),
        (9, 15, mla_query.CANDIDATES[3]),
        (1, 16, TWO),
        (16, 30, TWO),
        (1, 90, None),
    ):
        found = choose_query(tokens, heads, LARGE)
        assert (found.config, found.origin) == (config, "shipped"), (tokens, heads)
        assert f"here {tokens} of {heads}: one launch " in found.reason
    only(monkeypatch, table_of(*entries[:2], sms=132))
    told = choose_query(4, 24, LARGE)
    assert (told.config, told.origin) == (TWO, "rule")
    assert "no measured table has 24 heads" in told.reason


def test_entries_of_other_kernels_and_names_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the user's file: one of another version has no entries, and any name may stand there."""
    only(monkeypatch)
    want = choose_query(4, 12, LARGE)
    monkeypatch.undo()
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path))
    old = replace(query_of(12, 4, 3.0, 4.5), sources="0123456789abcdef")
    names = ("16bit+same", "0 heads", "many heads", "", "-12 heads")
    odd = [measured(name, 4, {"mla_query": {OTHER: 1.0}}) for name in names]
    assert cache.add("mla_query", [old, *odd], LARGE) is not None
    cache.reload()
    monkeypatch.setattr("k3cupy.choose.mla.measured_elsewhere", lambda *_: ())
    assert choose_query(4, 12, LARGE) == want
    assert cache.add("mla_query", [query_of(12, 4, 3.0, 4.5)], LARGE) is not None
    cache.reload()
    assert choose_query(4, 12, LARGE).origin == "user"
    monkeypatch.undo()
    cache.reload()


def test_separate_kernels_run_where_they_are_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both times stand in the reason; of equal ones the separate kernels are taken."""
    entries = [query_of(12, 1, 3.0, 4.5), query_of(12, 8, 6.0, 5.0), query_of(12, 16, 7.0, 7.0)]
    only(monkeypatch, table_of(*entries, sms=132))
    few, more, most = (choose_query(tokens, 12, LARGE) for tokens in (1, 8, 16))
    assert (few.kernel, few.config, few.origin) == ("mla_query", OTHER, "shipped")
    assert few.reason.endswith("here 1 of 12: one launch 3.00 us, separate kernels 4.50 us")
    assert (more.kernel, more.config, more.origin) == ("separate", None, "shipped")
    assert more.reason.endswith("here 8 of 12: one launch 6.00 us, separate kernels 5.00 us")
    assert str(more).startswith("separate: measured on X with 8 tokens of 12 heads")
    assert (most.kernel, most.config) == ("separate", None)
    elsewhere = choose_query(8, 12, gpu("Y", 132))
    assert (elsewhere.kernel, elsewhere.origin) == ("separate", "rule")
    assert elsewhere.reason.startswith("Y has no measured table; measured on X")


def test_a_table_of_separate_kernels_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the user's cache, too; and one as good as the fastest is preferred beside them."""
    entry = query_of(12, 8, 6.0, 5.0)
    fields = json.loads(json.dumps(entry.fields()))
    assert fields["us"]["separate"] == 5.0
    assert entry_of("12 heads", fields) == entry
    both = {"mla_query": {ONE: 3.02, OTHER: 3.0}, "separate": {None: 4.0}}
    preferred = measured("12 heads", 8, both, preferred=ONE)
    assert preferred.fields()["preferred"] == "8/2/1"
    assert entry_of("12 heads", preferred.fields()) == preferred
    assert entry_of("12 heads", {"size": 1, "kernel": "separate", "config": None}).config is None
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path))
    assert cache.add("mla_query", [entry], gpu("X", 132)) is not None
    cache.reload()
    found = choose_query(8, 12, LARGE)
    assert (found.kernel, found.config, found.origin) == ("separate", None, "user")
    monkeypatch.undo()
    cache.reload()


# Warm-ups


def names_in(op: str, machine: Any = None, **options: Any) -> list[str]:
    wanted = wanted_of(op, options)(machine or gpu())
    return [instance.name_expression for instance in wanted]


def test_warmup_of_the_norms_and_the_value(fake_h200: FakeGpu) -> None:
    def compiled(op: str, *arguments: str, **options: Any) -> set[str]:
        fake_h200.compiled.clear()
        if arguments:
            done = CliRunner().invoke(main, ["warmup", "--op", op, *arguments])
            assert done.exit_code == 0, done.output
        else:
            k3cupy.warmup(op, progress=False, **options)
        return set(fake_h200.compiled)

    def names(kernel: Any, variants: Sequence[Any]) -> set[str]:
        return {c.name_expression(v) for v in variants for c in configs(kernel.KERNEL, v.kind)}

    norm, value = mla_norm.Variant, mla_value.Variant
    assert compiled("mla_norm") == names(mla_norm, [norm("bfloat16")])
    every = [norm("float16", static) for static in (False, True)]
    both = {"dtype": "float16", "weight_is_static": [False, True]}
    assert compiled("mla_norm", **both) == names(mla_norm, every)
    assert compiled("mla_norm", vector=False) == {
        mla_norm.UNTUNED.name_expression(norm("bfloat16", vector=False))
    }
    assert compiled("mla_value") == names(
        mla_value, [value("bfloat16", False, turned) for turned in (False, True)]
    )
    gated = [value("bfloat16", True, turned, True) for turned in (False, True)]
    assert compiled("mla_value", gate=True, transposed=False, weight_is_static=True) == names(
        mla_value, gated[:1]
    )
    flags = ("--gate", "--transposed", "--weight-is-static")
    assert compiled("mla_value", *flags) == names(mla_value, gated[1:])


def test_warmup_of_the_query_has_what_runs_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms, q_b, the absorbed product and the epilogue, where any of the calls is theirs."""
    kernels = ("mla_decode_query", "q_kv_rms_norms", "head_product", "mla_decode_epilogue", "q_b")

    def found(machine: Any = None, **options: Any) -> dict[str, set[str]]:
        machine = machine or LARGE
        every = names_in("mla_query", machine, kv_cache="fp8", weight_is_static=True, **options)
        of = {kernel: {n for n in every if f"::{kernel}<" in n} for kernel in kernels}
        of["q_b"] = set(every).difference(*of.values())
        return of

    only(monkeypatch)
    for heads, config in ((12, ONE), (24, TWO)):
        few = found(tokens=range(1, 17), heads=heads)
        assert not any(few[kernel] for kernel in kernels[1:])
        of_kind = mla_query.Variant.of_kind("fp8+fp8")
        assert few["mla_decode_query"] == {
            config.name_expression(replace(of_kind, tile_m=tile)) for tile in mla_query.TILES
        }
    both = found(tokens=(1, 16, 17), heads=(12, 24))
    assert len(both["mla_decode_query"]) == 4
    assert all(both.values())
    for of in (found(tokens=(1, 17)), found(A100, tokens=1)):
        plain = mla_decode.Variant.of_kind("fp8+fp8")
        for other in configs("mla_decode", "fp8+fp8"):
            assert other.name_expression(plain) in of["mla_decode_epilogue"]
        absorb = mla_value.Variant("bfloat16", weight_is_static=True, absorb=True)
        assert of["head_product"] == {
            c.name_expression(absorb) for c in configs("mla_value", "absorb")
        }
        assert of["q_kv_rms_norms"] and of["q_b"]
    assert not found(A100, tokens=1)["mla_decode_query"]
    slower = query_of(12, 8, 6.0, 5.0)
    only(monkeypatch, table_of(slower, sms=132))  # where they are the faster
    assert found(tokens=8)["head_product"]
    named = names_in("mla_query", kv_cache="bf16", config=OTHER)
    assert set(named) == {
        OTHER.name_expression(mla_query.Variant("bfloat16", tile_m=tile))
        for tile in mla_query.TILES
    }


@pytest.mark.parametrize(
    ("options", "name", "found"),
    [
        ({"op": "mla_norm", "rope": True}, "rope", "True"),
        ({"op": "mla_norm", "config": mla_value.UNTUNED}, "config", "MlaValueConfig"),
        ({"op": "mla_value", "gate": 1}, "gate", "1"),
        ({"op": "mla_value", "gate": []}, "gate", "none"),
        ({"op": "mla_value", "dtype": "float32"}, "dtype", "'float32'"),
        ({"op": "mla_query", "kv_cache": "fp4"}, "kv_cache", "'fp4'"),
        ({"op": "mla_query", "kv_cache": "fp8_ds_mla", "query_fp8": True}, "query_fp8", "True"),
        ({"op": "mla_query", "heads": None}, "heads", "None"),
        ({"op": "mla_query", "heads": 12.0}, "heads", r"12\.0"),
        ({"op": "mla_query", "heads": [12, 0]}, "heads", "0"),
        ({"op": "mla_query", "heads": []}, "heads", "none"),
    ],
    ids=str,
)
def test_warmup_arguments(
    options: dict[str, Any], name: str, found: str, fake_h200: FakeGpu
) -> None:
    refused({**options, "progress": False}, name, f"^{found}", operation=k3cupy.warmup)
    assert fake_h200.compiled == []


# Configurations


@each_kernel
def test_configurations(kernel: Any) -> None:
    assert all(config.is_valid() for config in (*kernel.CANDIDATES, kernel.UNTUNED))
    assert len(set(kernel.CANDIDATES)) == len(kernel.CANDIDATES)
    assert kernel.UNTUNED in kernel.CANDIDATES
    variants = [kernel.Variant.of_kind(kind, "float16") for kind in KINDS[kernel.KERNEL]]
    names = [c.name_expression(v) for v in variants for c in kernel.CANDIDATES]
    assert len(set(names)) == len(names)
    assert len(set(map(str, kernel.CANDIDATES))) == len(kernel.CANDIDATES)
    assert not kernel.Variant("float32").is_valid()


def test_a_value_that_is_both_gated_and_absorbed_does_not_exist() -> None:
    assert not mla_value.Variant("bfloat16", gate=True, absorb=True).is_valid()
