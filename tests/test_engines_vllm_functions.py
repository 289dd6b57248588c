"""vLLM's linear layers, its plans and its decode run our kernels, in a fake vLLM."""

from __future__ import annotations

import logging
from typing import Any

import oracle
import pytest
import slow_kernels
import torch
from dispatch_helpers import DispatchDevice, gpu
from vllm_helpers import E4M3, Worker, call_of, imported, vllm

import k3cupy
from k3cupy.engines import vllm_facts as facts
from k3cupy.engines import vllm_targets, vllm_warmup
from k3cupy.runtime.errors import CompileError, ToolchainError

__all__ = ["gpu", "vllm"]  # the fixtures
N, K = 2304, 1536
"""A weight for which the H200's table has a kernel of ours."""

DECODE_FP8 = "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert"
LINEAR, LM_HEAD = map(facts.target_of, (facts.LINEAR, facts.LM_HEAD))
RUN_PLAN, WITH_RESIDUAL = map(facts.target_of, (facts.RUN_PLAN, facts.WITH_RESIDUAL))
DECODE_CONCAT = facts.target_of(facts.DECODE_CONCAT)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def counts(engine: Any, name: str) -> tuple[int, dict[str, int]]:
    row = engine.report()[name]
    return row.served, dict(row.handed_back)


def layers() -> Any:
    return imported(facts.LINEAR)


# --- Linear layers -------------------------------------------------------------------------------

KINDS = (
    "MergedColumnParallelLinear",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ReplicatedLinear",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("fresh_counts")
def test_an_unquantised_layer_is_served(kind: str, vllm: Any, gpu: DispatchDevice) -> None:
    vllm.install(LINEAR)
    layer = getattr(layers(), kind)(rand(N, K))
    for _ in range(3):
        out = layer(rand(4, K))
    assert out.shape == (4, N)
    assert len(gpu.records) == 3
    assert counts(vllm, LINEAR) == (3, {})
    (row,) = k3cupy.dispatch_report()
    assert (row.n, row.k, row.num_tokens, row.calls) == (N, K, 4, 3)


def test_the_weights_class_costs_nothing(vllm: Any, gpu: DispatchDevice) -> None:
    """vLLM's weights answer each look at an attribute through Python."""
    vllm.install(LINEAR)
    layer, x = layers().LinearBase(rand(N, K)), rand(4, K)
    layer(x)
    layers().ModelWeightParameter.looks = 0
    layer(x)
    assert len(gpu.records) == 2
    assert layers().ModelWeightParameter.looks == 0


def test_the_head_is_served(vllm: Any, gpu: DispatchDevice) -> None:
    vllm.install(LM_HEAD)
    head = imported(facts.LM_HEAD).ParallelLMHead(rand(N, K))
    head.quant_method.apply(head, rand(2, K), bias=None)
    assert counts(vllm, LM_HEAD) == (1, {})
    assert len(gpu.records) == 1


def test_what_a_layer_hands_back(vllm: Any, gpu: DispatchDevice) -> None:
    """The layer's own product each time, with a reason each."""
    vllm.install(LINEAR)
    base, utils = layers().LinearBase, imported("vllm.model_executor.layers.utils")
    plain, small = base(rand(N, K)), base(rand(4608, 64))
    biased = base(rand(N, K), bias=rand(N))
    named = base(rand(N, K))
    named.quant_method._gemm_impl = utils.other_gemm
    for layer, x in (
        (biased, rand(2, K)),
        (named, rand(2, K)),
        (plain, rand(65, K)),
        (plain, rand(500, K)),
        (plain, rand(2, 2, K)),
        (small, rand(64, 64)),
    ):
        want = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert torch.equal(layer(x), want)
    served, back = counts(vllm, LINEAR)
    reasons = list(back)
    assert (served, list(back.values())) == (0, [1, 1, 2, 1, 1])
    assert reasons[:3] == [
        "the layer adds a bias",
        "another backend was asked for: --linear-backend",
        "more than 64 tokens",
    ]
    assert reasons[3].startswith("x: expected")
    assert "4608 x 64 with 33 to 64 rows" in reasons[4]
    assert not gpu.records


def test_what_is_faster_without_us_is_asked_for_the_reason_once(
    vllm: Any, gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained: list[int] = []
    explain = vllm_targets.linear.explain_low_latency_gemm

    def spy(*args: Any, **kwargs: Any) -> Any:
        explained.append(1)
        return explain(*args, **kwargs)

    monkeypatch.setattr(vllm_targets.linear, "explain_low_latency_gemm", spy)
    vllm.install(LINEAR)
    layer, x = layers().LinearBase(rand(4608, 64)), rand(64, 64)
    for _ in range(5):
        layer(x)
    assert len(explained) == 1
    assert sum(counts(vllm, LINEAR)[1].values()) == 5


def test_a_capture_without_warm_up(vllm: Any, gpu: DispatchDevice) -> None:
    vllm.install(LINEAR)
    layer, x = layers().LinearBase(rand(N, K)), rand(4, K)
    gpu.capturing = True
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
    served, back = counts(vllm, LINEAR)
    assert served == 0
    assert "k3cupy.warmup('low_latency_linear'" in next(iter(back))


def test_weights_are_promised_to_be_static(
    vllm: Any, gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    run = vllm_targets.linear.try_low_latency_gemm

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return run(*args, **options)

    monkeypatch.setattr(vllm_targets.linear, "try_low_latency_gemm", spy)
    vllm.install(LINEAR)
    layers().LinearBase(rand(N, K))(rand(4, K))
    assert seen == [{"weight_is_static": True, "batch_invariant": False}]


@pytest.mark.usefixtures("fresh_counts")
def test_batch_invariance_is_vllms(
    vllm: Any, gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel for all numbers of tokens, more than 64 too, or rows would differ between them."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    vllm.install(LINEAR)
    imported("vllm.envs")
    layer = layers().LinearBase(rand(N, K))
    for count in (1, 65):
        layer(rand(count, K))
    assert counts(vllm, LINEAR) == (2, {})
    assert {row.choice.kernel for row in k3cupy.dispatch_report() if row.calls} == {"fused_a"}


def test_uninstalling_restores_the_method(vllm: Any) -> None:
    own = layers().UnquantizedLinearMethod.apply
    vllm.install(LINEAR)
    assert layers().UnquantizedLinearMethod.apply is not own
    vllm.uninstall()
    assert layers().UnquantizedLinearMethod.apply is own


def test_a_method_of_other_parameters_is_left_alone(
    vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    method = layers().UnquantizedLinearMethod

    def apply(self: Any, layer: Any, x: Any, bias: Any = None, scale: float = 1.0) -> None:
        pass

    method.apply = apply
    vllm.install(LINEAR)
    assert method.apply is apply
    why = vllm.report()[LINEAR].why_not
    assert why == (
        "its parameters are not those that we know: (self, layer, x, bias=None, scale=1.0)"
    )
    assert LINEAR in caplog.text


def test_a_name_that_is_gone_is_left_alone(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    plans = imported(facts.RUN_PLAN)
    del plans._run_plan
    del plans.KimiK3LowLatencyLinearMethod
    vllm.install()
    assert vllm.report()[RUN_PLAN].why_not.endswith("low_latency_gemm has no function _run_plan")
    assert "has no KimiK3LowLatencyLinearMethod" in vllm.report()[WITH_RESIDUAL].why_not


def test_code_that_is_compiled_holds_the_operator(
    vllm: Any, gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a break in the graph; only where there are plans for the weight."""
    monkeypatch.setattr(vllm_targets.devices, "ordinal_of", lambda _: 0)
    vllm.install(LINEAR)
    module = layers()
    model = torch.nn.Sequential(module.LinearBase(rand(N, K)), module.LinearBase(rand(8, N)))
    monkeypatch.setattr(
        vllm_targets, "planned", lambda n, k, invariant: (n, k, invariant) == (N, K, False)
    )
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        compiled(rand(4, K))
    (code,) = graphs
    assert code.count("k3cupy.low_latency_linear") == 1
    assert "None, True, False)" in code, "no residual, a static weight, the fastest kernel"
    assert code.count("_nn.linear") == 1
    assert counts(vllm, LINEAR) == (0, {}), "the operator counts when it runs"


@pytest.mark.parametrize("what", ["a bias", "another backend", "another type"])
def test_compiled_code_leaves_to_vllm(
    what: str, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_targets, "planned", lambda *_: True)
    vllm.install(LINEAR)
    layer, x = layers().LinearBase(rand(64, 128)), rand(4, 128)
    if what == "a bias":
        layer = layers().LinearBase(rand(64, 128), bias=rand(64))
    elif what == "another backend":
        layer.quant_method._gemm_impl = imported("vllm.model_executor.layers.utils").other_gemm
    else:
        layer, x = layers().LinearBase(torch.randn(64, 128)), x.float()
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    with torch.inference_mode():
        out = torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert torch.equal(out, torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert len(graphs) == 1
    assert "k3cupy" not in graphs[0]


def test_which_weights_have_plans(gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_targets.devices, "ordinal_of", lambda _: 0)
    assert vllm_targets.planned(N, K, False)
    assert not vllm_targets.planned(N, 1535, False)

    def nothing(_: Any) -> int:
        raise ToolchainError("no GPU")

    monkeypatch.setattr(vllm_targets.devices, "ordinal_of", nothing)
    assert not vllm_targets.planned(N, K, False), "compiling goes on"


def test_compiled_code_of_another_process_is_not_taken(vllm: Any) -> None:
    """vLLM keeps compiled graphs on the disk: what is installed belongs to their key."""
    before = imported("vllm.envs").compile_factors()
    vllm.install([facts.GEMM, RUN_PLAN])
    assert imported("vllm.envs").compile_factors() == before, "of no use to compiled code"
    vllm.install(LINEAR)
    inside = imported("vllm.envs").compile_factors()
    vllm.uninstall()
    assert imported("vllm.envs").compile_factors() == before
    assert inside == {**before, "K3CUPY_VLLM": [k3cupy.__version__, LINEAR]}


# --- Kimi-K3's plans -----------------------------------------------------------------------------


def test_a_plan_is_ours_first(vllm: Any, gpu: DispatchDevice) -> None:
    """Rows that lie apart too, which vLLM's plan no longer takes for more than one token."""
    vllm.install([RUN_PLAN, LINEAR])
    plans = imported(facts.RUN_PLAN)
    method = plans.KimiK3LowLatencyLinearMethod({}, {})
    layer = layers().LinearBase(rand(N, K), quant_method=method)
    layer(rand(4, 2112)[:, :K])
    assert counts(vllm, RUN_PLAN) == (1, {})
    assert plans.PLANNED == []
    layer(rand(65, K))
    assert plans.PLANNED == [(65, K)]
    assert counts(vllm, RUN_PLAN) == (1, {"more than 64 tokens": 1})
    assert counts(vllm, LINEAR) == (0, {"more than 64 tokens": 1}), "vLLM went on to its base"


def test_the_residual_is_added_in_the_same_kernel(vllm: Any, gpu: DispatchDevice) -> None:
    """The layout of production: x and the residual are two parts of one buffer."""
    n, k = 7168, 3584
    vllm.install(WITH_RESIDUAL)
    method = imported(facts.WITH_RESIDUAL).KimiK3LowLatencyLinearMethod({}, {})
    layer, both = layers().LinearBase(rand(n, k)), rand(4, k + n)
    out = method.apply_with_residual(layer, both[:, :k], both[:, k:])
    assert out.shape == (4, n)
    assert counts(vllm, WITH_RESIDUAL) == (1, {})
    (record,) = gpu.records
    assert both[:, k:].data_ptr() in record.arguments
    x, residual = rand(65, k), rand(65, n)
    want = torch.addmm(residual, x, layer.weight.t())
    assert torch.equal(method.apply_with_residual(layer, x, residual), want)
    assert counts(vllm, WITH_RESIDUAL) == (1, {"more than 64 tokens": 1})


# --- Decode with an fp8 cache ------------------------------------------------------------------


def decode_of(layer: Any) -> Any:
    """A step of decode with three tokens, as vLLM's attention calls it."""
    ql_nope, q_pe, kv_c, k_pe, *_, slots = call_of(DECODE_FP8).args[:7]
    return layer._decode_concat_cache(ql_nope, q_pe, kv_c, k_pe.unsqueeze(1), None, None, slots)


def attention(name: str, **options: Any) -> Any:
    cache = torch.ones(2, 16, 576).to(E4M3).view(torch.uint8)
    return imported(facts.DECODE_CONCAT).MultiHeadLatentAttention(name, cache, **options)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_query_that_nobody_wants_in_fp8_is_not_cast(name: str, vllm: Any) -> None:
    """The same cache as vLLM's own way, and the query as it was: not rounded to fp8 and back."""
    imported()
    own = attention(name, fp8_query=False)
    rounded = decode_of(own)
    vllm.install()
    layer = attention(name, fp8_query=False)
    query = decode_of(layer)
    assert torch.equal(layer.kv_cache, own.kv_cache)
    ql_nope, q_pe = call_of(DECODE_FP8).args[:2]
    assert torch.equal(oracle.bits(query), oracle.bits(torch.cat((ql_nope, q_pe), -1)))
    assert query.dtype == rounded.dtype
    assert not torch.equal(query, rounded)
    torch.testing.assert_close(query, rounded, rtol=0.07, atol=0.02)
    assert counts(vllm, DECODE_CONCAT) == (1, {})
    assert slow_kernels.CALLS[DECODE_FP8] == 1


def test_other_decodes_are_the_operators(vllm: Any) -> None:
    imported()
    vllm.install()
    assert decode_of(attention("fp8")).dtype == E4M3
    decode_of(attention("fp8_e5m2", fp8_query=False))
    assert counts(vllm, DECODE_CONCAT) == (
        0,
        {
            "the backend takes an fp8 query: the operators serve it": 1,
            "the cache is not fp8 of e4m3: the operators serve it": 1,
        },
    )
    assert counts(vllm, DECODE_FP8) == (2, {})


# --- Warm-up -------------------------------------------------------------------------------------


@pytest.fixture
def model(vllm: Any, gpu: DispatchDevice, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """One layer of each kind that is warmed up, and some that are not."""
    monkeypatch.setattr(vllm_targets.devices, "ordinal_of", lambda _: 0)
    base, heads = layers().LinearBase, imported(facts.LM_HEAD)
    plans = imported(facts.RUN_PLAN).KimiK3LowLatencyLinearMethod
    plan = {1: ("cute", None), 3: ("dsv3_fused_a", None)}
    imported("vllm.v1.worker.gpu_worker")
    deepseek = base(rand(2112, 7168))
    deepseek._use_min_latency_gemm = True
    gated = attention("fp8", fp8_query=False, rope=True)
    gated._gate_events = (None, None)
    gated.fused_qkv_a_g_proj = base(rand(3648, 7168), quant_method=plans({}, {}))
    return torch.nn.ModuleList(
        [
            base(rand(N, K)),
            base(rand(N, K)),
            base(rand(N, K).float()),
            base(rand(N, 1535)),
            base(rand(1536, 128), quant_method=plans(plan, {1: None})),
            heads.VocabParallelEmbedding(rand(64, K)),
            heads.ParallelLMHead(rand(20480, 512)),
            deepseek,
            gated,
        ]
    )


def warmed(engine: Any, model: torch.nn.Module, sizes: Any) -> list[Any]:
    """What is compiled when vLLM's worker starts, through the name that it took by value."""
    found: list[Any] = []

    def warmup(op: str, **options: Any) -> int:
        assert options.pop("progress") is False
        found.append((op, options))
        return 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_warmup, "warmup", warmup)
        imported("vllm.v1.worker.gpu_worker").start(Worker(model, sizes))
    for op, options in found:
        k3cupy.ops.warmup.wanted_of(op, options)  # they are options of that operation
    return found


def test_what_is_warmed_up(vllm: Any, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm")
    vllm.install()
    found = warmed(vllm, model, [512, 256, 8, 4, 1])
    product = {"weight_is_static": True, "batch_invariant": False}
    linear = {**product, "tokens": [8, 4, 1], "residual": False}
    every = list(range(1, 65))
    form = {"dtype": "bfloat16", "kv_cache": "fp8", "rope": True}
    whole, parts = (3648, 7168), [(2112, 7168), (1536, 7168)]
    assert found == [
        ("low_latency_linear", {**linear, "shapes": [(N, K), (1536, 128), (2112, 7168), whole]}),
        ("low_latency_linear", {**linear, "shapes": [(1536, 128), whole, *parts]}),
        ("low_latency_linear", {**linear, "shapes": [(20480, 512)], "tokens": every}),
        ("low_latency_linear", {**linear, "shapes": [(1536, 128)], "residual": True}),
        (
            "fused_a_gemm",
            {**product, "shapes": [(2112, 7168)], "tokens": [8, 4, 1], "weight_is_static": False},
        ),
        ("fused_a_gemm", {**product, "shapes": [(1536, 128)], "tokens": [3]}),
        ("mla_decode", {**form, "query_fp8": False, "kv_inputs_ready": False}),
        ("mla_prefill", form),
    ]
    assert imported(facts.KERNEL_WARMUP).SEEN, "vLLM's own ran"
    assert "8 kernels are ready" in caplog.text


def test_a_head_that_is_the_embedding(vllm: Any, model: Any) -> None:
    """As in Gemma 2, whose logits are computed with the embedding itself."""
    vllm.install(LM_HEAD)
    heads = imported(facts.LM_HEAD)
    tied = torch.nn.ModuleList([heads.VocabParallelEmbedding(rand(20480, 512))])
    ((_, options),) = warmed(vllm, tied, [1])
    assert options["shapes"] == [(20480, 512)]


def test_without_graphs_every_number_of_tokens_is(vllm: Any, model: Any) -> None:
    vllm.install(LINEAR)
    ((_, options),) = warmed(vllm, model, None)
    assert options["tokens"] == list(range(1, 65))


def test_a_promise_that_comes_with_a_later_target(vllm: Any, model: Any) -> None:
    """What the epilogue is called with is what is compiled."""
    vllm.install(LM_HEAD)
    vllm.install("*_decode_*", kv_inputs_ready=True)
    *_, (op, options) = warmed(vllm, model, [1])
    assert (op, options["kv_inputs_ready"]) == ("mla_decode", True)


def test_a_query_of_fp8_for_the_operators(vllm: Any, model: Any) -> None:
    """Without our decode vLLM casts the query whatever its backend takes."""
    vllm.install("*_decode_q_*")
    ((op, options),) = warmed(vllm, model, [1])
    assert (op, options["query_fp8"]) == ("mla_decode", True)


def test_kernels_that_cannot_be_built_are_a_warning(
    vllm: Any, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warmup(*_: Any, **__: Any) -> int:
        raise CompileError("no compiler")

    monkeypatch.setattr(vllm_warmup, "warmup", warmup)
    vllm.install()
    imported("vllm.v1.worker.gpu_worker").start(Worker(model, [1]))
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "vLLM's own run: no compiler" in record.getMessage()


def test_the_warm_up_of_a_process_that_joins_later(vllm: Any, model: Any) -> None:
    vllm.install(LM_HEAD)
    home = imported(facts.KERNEL_WARMUP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_warmup, "warmup", lambda *_, **__: 1)
        home.kernel_warmup(Worker(model, [1]), process_local_only=True)
    assert [local for _, local in home.SEEN] == [True]


def test_a_worker_that_we_do_not_know_starts(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm.install()
    imported("vllm.v1.worker.gpu_worker").start(object())
    assert len(imported(facts.KERNEL_WARMUP).SEEN) == 1
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "not all kernels are ready" in record.getMessage()
    assert record.exc_info


@pytest.mark.parametrize("late", [False, True])
def test_the_workers_name_is_given_back(late: bool, vllm: Any) -> None:
    home = imported(facts.KERNEL_WARMUP)
    own = home.kernel_warmup
    if late:  # it imports what stands there, which is ours
        vllm.install()
    worker = imported("vllm.v1.worker.gpu_worker")
    vllm.install()
    assert worker.kernel_warmup is home.kernel_warmup is not own
    vllm.uninstall()
    assert worker.kernel_warmup is home.kernel_warmup is own
