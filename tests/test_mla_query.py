"""The MLA query front: one launch or separate kernels, and what the separate ones do in a call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import mla_layer_oracle as layer_oracle
import oracle
import pytest
import torch
from fake_device import (
    A100,
    B200,
    GB300,
    GPUS,
    H100,
    H200,
    RTX_4090,
    RTX_5090,
    STREAM,
    T4,
    TOO_OLD,
    CudaTensor,
    FakeDevice,
    Launch,
)
from golden_recording import Shipped, signature_of
from helpers import BF16, E4M3
from mla_layer_helpers import QUERY_FORMS, LayerForm
from test_mla_prefill_choice import gpu as another
from test_mla_prefill_choice import only

import k3cupy
from k3cupy.accept import mla_query as accept
from k3cupy.call.separate import Separate, SeparatePlan
from k3cupy.choose import cache
from k3cupy.choose.table import Table, measured, parts_of, table_text
from k3cupy.kernels import mla_query
from k3cupy.ops import mla_separate
from k3cupy.runtime import devices, tensors
from k3cupy.runtime.devices import DeviceInfo

PARTS = ("q_kv_rms_norms", "fused_a_gemm", "head_product", "mla_decode_epilogue")
SHIPPED = Shipped()
I64, F32 = torch.int64, torch.float32


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Plans of before fit no more inside, nor those made inside afterwards."""
    cache.reload()
    with torch.no_grad():
        yield
    cache.reload()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def cuda(*shape: int, dtype: torch.dtype = BF16, gpu: DeviceInfo = H200) -> Any:
    return CudaTensor.of(torch.empty(shape, dtype=dtype), gpu.index)


def call_of(
    tokens: int = 4, heads: int = 12, gpu: DeviceInfo = H200, **more: Any
) -> dict[str, Any]:
    """The arguments of a call; w_uk a view of kv_b's weight."""
    kv_b = cuda(heads, 256, 512, gpu=gpu)
    return {
        "qkv_a": cuda(tokens, 2112, gpu=gpu),
        "q_norm_weight": cuda(1536, gpu=gpu),
        "kv_norm_weight": cuda(512, gpu=gpu),
        "w_q_b": cuda(heads * 192, 1536, gpu=gpu),
        "w_uk": kv_b[:, :128],
        "kv_cache": cuda(30, 64, 576, gpu=gpu),
        "slot_mapping": cuda(tokens, dtype=I64, gpu=gpu),
        "eps": 1e-6,
        **more,
    }


def run(given: dict[str, Any]) -> Any:
    return k3cupy.fused_mla_decode_query(**given)


def explained(given: dict[str, Any]) -> k3cupy.Choice:
    return k3cupy.explain_mla_decode_query(**given)


def only_of_query(monkeypatch: pytest.MonkeyPatch, known: Table) -> None:
    """Let the query kernel be chosen from this table alone, whichever GPU it is of."""
    name = known.header["gpu"]

    def of_a_gpu(family: str, gpu: DeviceInfo) -> tuple[Table, ...]:
        return (known,) if (family, name) == ("mla_query", gpu.name) else ()

    def elsewhere(family: str, gpu: DeviceInfo) -> tuple[Table, ...]:
        return (known,) if family == "mla_query" and name != gpu.name else ()

    monkeypatch.setattr("k3cupy.choose.mla.tables_of", of_a_gpu)
    monkeypatch.setattr("k3cupy.choose.mla.measured_elsewhere", elsewhere)


def kernel_of(launch: Launch) -> str:
    found = re.match(r"k3cupy::(\w+)<", launch.instance.name_expression)
    assert found is not None
    return found[1]


def arguments_of(launch: Launch) -> dict[str, Any]:
    names = [parameter.name for parameter in signature_of(launch, SHIPPED).parameters]
    return dict(zip(names, launch.arguments, strict=True))


# One launch, or separate kernels


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_what_runs_and_why(
    gpu: DeviceInfo, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 16 tokens where there are clusters; an explanation launches nothing."""
    only(monkeypatch)
    has_clusters = gpu in (H200, H100, B200, GB300, RTX_5090)
    for tokens in (1, 3, 8, 16, 17, 64, 1000):
        for heads in (1, 6, 12, 16, 24, 96):
            found = explained(call_of(tokens, heads, gpu))
            if has_clusters and tokens <= 16:
                assert (found.kernel, found.pdl) == ("mla_query", True)
                assert isinstance(found.config, k3cupy.MlaQueryConfig)
                assert found.config.blocks_per_sm == 1 + (heads > gpu.clusters_at_once(8))
                tile = 8 if tokens <= 8 else 16
                assert f"::kSame, false, false, {tile}, " in str(found.name_expression)
                continue
            assert (found.kernel, found.config) == ("separate", None)
            assert (found.name_expression, found.pdl) == (None, has_clusters)
            why = f"{tokens} tokens are more than 16"
            if tokens <= 16:
                why = f"{gpu.name} has no clusters of blocks"
            assert re.match(f"{why}: norms by mla_norm, ", found.reason), found.reason
            for part in (
                "; q_b by ",
                "; absorbed query by mla_value, ",
                "; epilogue by mla_decode",
            ):
                assert part in found.reason
    nothing = explained(call_of(0, gpu=gpu))
    assert "nothing is launched" in nothing.reason
    assert device.records == []
    assert device.loads == []


def test_rows_off_alignment_run_separate_kernels(device: FakeDevice) -> None:
    wide = cuda(4, 2113)
    odd = {
        "qkv_a": wide[:, :2112],
        "q_norm_weight": cuda(1537)[1:],
        "w_q_b": CudaTensor.of(torch.empty(2304 * 1536 + 1, dtype=BF16)[1:].view(2304, 1536), 0),
        "w_uk": cuda(12, 128, 513)[..., :512],
        "kv_cache": cuda(30, 64, 577)[..., :576],
    }
    for name, tensor in odd.items():
        given = call_of(**{name: tensor})
        found = explained(given)
        assert (found.kernel, found.config) == ("separate", None)
        assert found.reason.startswith(f"{name} is not aligned: "), found.reason
    aligned = cuda(4, 2176)[:, 64:]
    assert explained(call_of(qkv_a=aligned)).kernel == "mla_query"
    assert explained(call_of(1, qkv_a=cuda(1, 2113)[:, :2112])).kernel == "mla_query", "one row"


def test_separate_kernels_that_are_measured_to_be_faster(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"mla_query": {mla_query.UNTUNED: 9.0}, "separate": {None: 8.0}}
    header = {"schema": 2, "gpu": another().name, "num_sms": another().num_sms}
    text = table_text(header, [measured("12 heads", 4, slow)])
    only_of_query(monkeypatch, Table("shipped", *parts_of(text)))
    monkeypatch.setattr("k3cupy.runtime.devices.info", lambda _: another())
    found = explained(call_of(4))
    assert (found.kernel, found.config, found.origin) == ("separate", None, "shipped")
    assert "one launch 9.00 us, separate kernels 8.00 us: norms by mla_norm" in found.reason
    run(call_of(4))
    assert len(device.records) == 4
    named = explained(call_of(4, config=mla_query.UNTUNED))
    assert (named.kernel, named.reason) == ("mla_query", "the caller named the configuration")


def test_a_configuration_that_cannot_compute_the_call(device: FakeDevice) -> None:
    large = k3cupy.MlaQueryConfig(16, 3, 1)
    needed, most = large.shared_bytes(8), RTX_5090.shared_memory_optin
    assert needed > most
    for given, why in (
        (call_of(17), "17 tokens are more than 16"),
        (call_of(4, gpu=A100), f"{A100.name} has no clusters of blocks"),
        (call_of(qkv_a=cuda(4, 2113)[:, :2112]), "qkv_a is not aligned"),
        (call_of(gpu=RTX_5090, config=large), f"{needed} bytes of shared memory .* has {most}"),
    ):
        named = {"config": mla_query.UNTUNED, **given}
        for ask in (run, explained):
            with pytest.raises(ValueError, match=f"config: expected None, .*, got .*{why}"):
                ask(named)
    assert device.records == []


def test_a_table_that_names_what_does_not_fit(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on a GPU with more shared memory: it runs separate kernels, and says so."""
    large = k3cupy.MlaQueryConfig(16, 3, 1)
    header = {"schema": 2, "gpu": "X", "num_sms": 100}
    text = table_text(header, [measured("12 heads", 4, {"mla_query": {large: 5.0}})])
    only_of_query(monkeypatch, Table("shipped", *parts_of(text)))
    found = explained(call_of(4, gpu=RTX_5090))
    assert found.kernel == "separate"
    assert re.match(r"16 warps, .* takes \d+ bytes of shared memory a block, ", found.reason)
    assert explained(call_of(4)).config == large


def test_a_gpu_that_is_too_old(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs no separate kernels either; the call says what its explanation says."""
    given = call_of(4)
    with pytest.raises(k3cupy.ToolchainError, match=f"^{TOO_OLD}"):
        explained({**given, "gpu": T4})
    monkeypatch.setattr(devices, "info", lambda _: T4)
    for ask in (run, explained):
        with pytest.raises(k3cupy.ToolchainError, match=f"^{TOO_OLD}"):
            ask(given)
    assert device.records == []


# Separate kernels


def launched(device: FakeDevice, given: dict[str, Any]) -> tuple[list[Launch], Any]:
    before = len(device.records)
    out = run(given)
    return device.records[before:], out


@pytest.mark.parametrize("more", [{}, {"ds_mla": True}, {"q_scale_inv": 0.5}], ids=str)
def test_what_one_kernel_writes_the_next_one_reads(
    device: FakeDevice, more: dict[str, Any]
) -> None:
    for tokens in (17, 20, 17):
        given = call_of(tokens, **more)
        if more.get("ds_mla"):
            given["kv_cache"] = cuda(30, 64, 656, dtype=torch.uint8)
        for _ in range(3):  # made, found, and repeated by the parts
            launches, out = launched(device, given)
            assert tuple(map(kernel_of, launches)) == PARTS
            norm, q_b, absorbed, epilogue = map(arguments_of, launches)
            assert norm["qkv_a"] == given["qkv_a"].data_ptr()
            assert norm["epsilon"] == pytest.approx(1e-6)
            assert (q_b["x"], q_b["weight"]) == (norm["q"], given["w_q_b"].data_ptr())
            assert (q_b["n"], q_b["k"], q_b["num_tokens"]) == (2304, 1536, tokens)
            assert (absorbed["x"], absorbed["weight"]) == (q_b["out"], given["w_uk"].data_ptr())
            assert epilogue["ql_nope"] == absorbed["out"]
            assert epilogue["q_pe"] == q_b["out"] + 2 * 128
            assert epilogue["kv_c_normed"] == norm["kv"]
            assert epilogue["k_pe"] == given["qkv_a"].data_ptr() + 2 * 2048
            assert epilogue["kv_cache"] == given["kv_cache"].data_ptr()
            assert epilogue["mqa_q"] == out.data_ptr()
            assert epilogue["q_scale_value"] == more.get("q_scale_inv", 1.0)
            assert len({norm["q"], norm["kv"], q_b["out"], absorbed["out"], out.data_ptr()}) == 5
            assert out.dtype == (E4M3 if "q_scale_inv" in more else BF16)


def test_what_is_explained_is_what_is_launched(device: FakeDevice) -> None:
    for gpu, tokens in ((H200, 17), (H200, 64), (A100, 1), (A100, 8), (RTX_4090, 4)):
        given = call_of(tokens, gpu=gpu)
        told = explained(given).reason
        launches, _ = launched(device, given)
        norms = given["qkv_a"], given["q_norm_weight"], given["kv_norm_weight"]
        latent = cuda(tokens, 512, gpu=gpu), cuda(tokens, 64, gpu=gpu)
        query = cuda(tokens, 12, 512, gpu=gpu), cuda(tokens, 12, 192, gpu=gpu)[..., 128:]
        places = given["kv_cache"], given["slot_mapping"]
        for part, found, launch in (
            ("norms", k3cupy.explain_q_kv_rmsnorm(*norms, eps=1e-6), launches[0]),
            (
                "q_b",
                k3cupy.explain_low_latency_gemm(cuda(tokens, 1536, gpu=gpu), given["w_q_b"]),
                launches[1],
            ),
            ("epilogue", k3cupy.explain_mla_decode(*query, *latent, *places), launches[3]),
        ):
            assert f"{part} by {found.what}" in told
            assert launch.instance.name_expression == found.name_expression
        (absorbed,) = re.findall(r"absorbed query by mla_value, tile of (\d+) .* and (\d+) ", told)
        assert f", {absorbed[0]}, {absorbed[1]}, " in launches[2].instance.name_expression


def test_stream_promise_and_dependent_launches(device: FakeDevice) -> None:
    plain, _ = launched(device, call_of(20))
    assert {(each.stream, each.pdl) for each in plain} == {(STREAM, True)}
    given = call_of(20, stream=99, weight_is_static=True, pdl=False)
    launches, out = launched(device, given)
    assert {each.stream for each in launches} == {99}
    assert [each.pdl for each in launches] == [False, True, False, False]
    assert out.made_on == 99
    assert set(out.kept_for) == {99}
    for name in ("qkv_a", "w_q_b", "w_uk", "kv_cache", "slot_mapping"):
        assert 99 in given[name].kept_for, name
    changed = [a.instance != b.instance for a, b in zip(plain, launches, strict=True)]
    assert changed == [True, True, True, False], "the weights of three are promised"
    on_a100, _ = launched(device, call_of(4, gpu=A100, pdl=True))
    assert not any(each.pdl for each in on_a100)


def test_what_is_written_is_counted_once(device: FakeDevice) -> None:
    for tokens in (4, 17):
        given = call_of(tokens, out=cuda(tokens, 12, 576))
        for _ in range(4):
            before = given["kv_cache"]._version, given["out"]._version
            assert run(given) is given["out"]
            assert (given["kv_cache"]._version, given["out"]._version) == tuple(
                version + 1 for version in before
            )


@pytest.mark.parametrize("tokens", [4, 17])
def test_in_a_capture_nothing_is_launched_before_all_is_loaded(
    tokens: int, device: FakeDevice
) -> None:
    """Whichever of the kernels is missing."""
    given = call_of(tokens)
    run(given)
    wanted, loads = list(device.records), device.loads
    assert {each.instance for each in wanted} == set(loads)
    device.capturing = True
    for missing in loads[:]:
        cache.reload()
        device.records.clear()
        device.loads = [instance for instance in loads if instance != missing]
        with pytest.raises(k3cupy.CaptureError, match=r"warmup\("):
            run(given)
        assert device.records == []
    cache.reload()
    device.loads = loads
    run(given)
    assert [each.instance for each in device.records] == [each.instance for each in wanted]


@pytest.mark.parametrize("tokens", [4, 17])
def test_prepared_calls(tokens: int, device: FakeDevice) -> None:
    given = call_of(tokens, weight_is_static=True)
    call = k3cupy.prepare(k3cupy.fused_mla_decode_query, **given)
    count = 1 if tokens == 4 else 4
    assert device.records == []
    assert len(device.loads) >= count
    assert call.choice == explained(given)
    loaded = len(device.loads)
    assert call.tensors == tuple(name for name in given if isinstance(given[name], CudaTensor))
    for _ in range(3):
        device.records.clear()
        fresh = call_of(tokens)
        out = call(*(fresh[name] for name in call.tensors))
        assert out.shape == (tokens, 12, 576)
        assert len(device.records) == count
        first = arguments_of(device.records[0])
        assert first["qkv_a"] == fresh["qkv_a"].data_ptr()
    assert set(device.loads[loaded:]) <= set(device.loads[:loaded]), "all was loaded ahead"
    with pytest.raises(TypeError):
        call(*(fresh[name] for name in call.tensors[:-1]))


def test_q_b_follows_the_mode_of_batch_invariance(device: FakeDevice) -> None:
    """It is a product of low-latency linear, counted as one."""
    k3cupy.reset_dispatch_report()
    usual, _ = launched(device, call_of(48))
    assert k3cupy.dispatch_report().rows[0].calls == 1
    with k3cupy.batch_invariant_mode():
        invariant, _ = launched(device, call_of(48))
        q_b = k3cupy.explain_low_latency_gemm(cuda(48, 1536), cuda(2304, 1536))
        assert q_b.what in explained(call_of(48)).reason
        assert invariant[1].instance.name_expression == q_b.name_expression
    assert usual[1].instance != invariant[1].instance
    assert [usual[i].instance == invariant[i].instance for i in (0, 2, 3)] == [True] * 3


# Tensors that are not PyTorch's


def plan_of(
    monkeypatch: pytest.MonkeyPatch, framework: str, compute: Any, **more: Any
) -> tuple[SeparatePlan, tuple[Any, ...]]:
    """A plan of tensors on a GPU some of which are another framework's, and their views."""
    given = call_of(20, **more)
    values = tuple(given.get(name) for name in accept.ARGUMENTS.names)
    views = accept.ARGUMENTS.views(values)
    foreign = {name: tensors.replace(v, framework=framework) for name, v in views.items()}
    told = tuple(foreign.get(name, given.get(name)) for name in accept.ARGUMENTS.names)
    problem = accept.accept(told, eps=1e-6, ds_mla=False, weight_is_static=False)
    monkeypatch.setattr(tensors, "as_cupy", lambda v, _: v)
    monkeypatch.setattr("k3cupy.runtime.streams.current_for_cupy", lambda *_: nullcontext())
    monkeypatch.setattr(
        "k3cupy.call.outputs.allocator",
        lambda *_: lambda: SimpleNamespace(data=SimpleNamespace(ptr=4096)),
    )
    loaded: list[Any] = []
    separate = Separate(lambda *asked: loaded.append(asked), compute)
    plan = SeparatePlan(accept.ARGUMENTS, problem, separate, pdl=True, verify=None, stream=None)
    assert loaded == [(problem, True, None)]
    return plan, values


def test_tensors_of_others_are_arrays_over_the_same_memory(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """e4m3 as its codes, numbers as they are; what was left out is None."""
    seen: list[Any] = []
    fp8 = {"kv_cache": cuda(30, 64, 576, dtype=E4M3), "cache_scale_inv": 1.5}
    plan, values = plan_of(monkeypatch, "cupy", lambda *told: seen.append(told), **fp8)
    addresses = [t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in values]
    out = plan.run(values, list(addresses), 5)
    ((problem, pdl, given, stream),) = seen
    assert (problem.num_tokens, pdl, stream) == (20, True, 5)
    assert [*given] == [*accept.ARGUMENTS.names]
    at = dict(zip(accept.ARGUMENTS.names, addresses, strict=True))
    for name, array in given.items():
        if name in ("q_scale_inv", "positions", "cos_sin_cache"):
            assert array is None
        elif name == "cache_scale_inv":
            assert array == 1.5
        elif name == "out":
            assert (array.address, array.shape, array.dtype) == (4096, (20, 12, 576), "bfloat16")
        else:
            assert array.address == at[name], name
            assert array.dtype == {"kv_cache": "uint8", "slot_mapping": "int64"}.get(
                name, "bfloat16"
            )
    assert out.data.ptr == 4096
    bad = tuple(
        -1.0 if name == "cache_scale_inv" else v for name, v in zip(given, values, strict=True)
    )
    with pytest.raises(ValueError, match="cache_scale_inv: expected a finite number above 0"):
        plan.run(bad, list(addresses), 5)
    assert len(seen) == 1


def test_arrays_between_kernels_cannot_be_kept_for_a_graph(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    plan, values = plan_of(monkeypatch, "cupy", lambda *told: seen.append(told))
    addresses = [t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in values]
    device.capturing = True
    with pytest.raises(k3cupy.CaptureError, match="Capture the call with PyTorch's tensors"):
        plan.run(values, addresses, 5)
    assert seen == []


# What they compute, on the CPU


@pytest.mark.parametrize("form", QUERY_FORMS, ids=str)
def test_separate_operations_compute_the_same(form: LayerForm) -> None:
    """The cache bit for bit; the query is as good as the steps of the oracle."""
    for tokens, heads in ((1, 1), (5, 3)):
        call, other = (form.make(tokens, heads, rope=True) for _ in range(2))
        call.run()
        values = tuple(other.args.get(name) for name in accept.ARGUMENTS.names)
        ds_mla = bool(other.args.get("ds_mla"))
        problem = accept.accept(values, eps=1e-6, ds_mla=ds_mla, weight_is_static=True)
        given = dict(zip(accept.ARGUMENTS.names, values, strict=True))
        got = mla_separate.compute(problem, True, given, None)
        exact, steps = (
            layer_oracle.query(other.args, got.dtype, in_steps=flag) for flag in (False, True)
        )
        layer_oracle.assert_as_good(got, exact, steps)
        caches = [each.cache.snapshot() for each in (other, call)]
        oracle.assert_same_bits(*caches, "the cache")
