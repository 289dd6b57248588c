"""k3cupy inside a package that stands for SGLang: see ``sglang_helpers``."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from dispatch_helpers import DispatchDevice
from fake_device import H200, CudaTensor
from gemm_helpers import assert_product, normal
from helpers import BF16
from sglang_helpers import (
    DECODE,
    DECODE_FP8,
    F_B,
    GEMM,
    NOT_ASKED,
    TARGETS,
    Decode,
    Engine,
    engine,
    load,
)
from torch import nn

import k3cupy
from k3cupy.engines import sglang, sglang_facts
from k3cupy.ops import warmup

N, K = 48, 256
__all__ = ["engine"]


def serve() -> None:
    """What SGLang does at the start of a process: run its plug-ins, then apply their hooks."""
    sglang.register()
    load("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()


class Layer(nn.Linear):
    """A linear layer as SGLang's: the output is the first of two."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def layer(n: int = N, k: int = K, **options: Any) -> Layer:
    return Layer(k, n, **{"bias": False, "dtype": BF16, **options})


# --- Switched on and off -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_off_unless_asked_for(
    value: str | None, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    if value is not None:
        monkeypatch.setenv("K3CUPY_SGLANG", value)
    serve()
    assert sglang.report().installed == 0
    assert load("sglang.srt.plugins.hook_registry").HookRegistry._hooks == {}
    assert sglang.report()["kimi_k3_tiny_gemm"].why_not == NOT_ASKED


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("1", TARGETS),
        ("ON", TARGETS),
        (" kimi_k3_tiny_gemm, dsv3_fused_a_gemm,", TARGETS[2::-2]),
        ("*concat_q*", TARGETS[3:]),
    ],
)
def test_the_variable_names_targets(
    value: str, names: tuple[str, ...], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    monkeypatch.setenv("K3CUPY_SGLANG", value)
    serve()
    assert {row.name for row in sglang.report() if row.installed} == set(names)


def test_a_target_that_does_not_exist(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine()
    monkeypatch.setenv("K3CUPY_SGLANG", "kimi_k3")
    expected = f"K3CUPY_SGLANG: expected names of targets: {', '.join(TARGETS)}, got 'kimi_k3'"
    expected += ". 1 stands for all of them, 0 for none"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        sglang.register()
    for wrong in ("all", ["dsv3_fused_a_gemm", "all"], [None]):
        with pytest.raises(ValueError, match=r"^targets: expected names of .*, got ('all'|None)$"):
            sglang.install(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^targets: expected names of .*, got 5$"):
        sglang.install(5)  # type: ignore[arg-type]
    assert sglang.report().installed == 0


def test_registering_imports_nothing_of_sglang_but_its_registry(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    monkeypatch.setenv("K3CUPY_SGLANG", "1")
    sglang.register()
    loaded = {name for name in sys.modules if name.startswith("sglang.")}
    assert loaded == {"sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"}
    why_not = sglang.report()["dsv3_fused_a_gemm"].why_not
    assert why_not == "SGLang has not applied the hook; where it failed to, its log says why"


def test_without_sglang(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    found = sglang.install()
    assert {row.why_not for row in found} == {"SGLang is not installed here"}


def test_a_pytorch_for_other_gpus(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    engine()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert {row.why_not for row in sglang.install()} == {"this PyTorch is built for ROCm"}


def test_registering_twice_hooks_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine()
    monkeypatch.setenv("K3CUPY_SGLANG", "1")
    serve()
    serve()
    assert sglang.install().installed == len(TARGETS)
    x, weight = normal((4, K), 0), normal((N, K), 1)
    load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm(x, weight.T)
    assert sglang.report()["dsv3_fused_a_gemm"].served == 1
    hooks = load("sglang.srt.plugins.hook_registry").HookRegistry._hooks
    assert {target: len(each) for target, each in hooks.items()} == {
        dotted.replace(":", "."): 1 for dotted in sglang_facts.TARGETS.values()
    }


def test_uninstalled_and_installed_again(engine: Engine) -> None:
    calls = engine().calls
    sglang.install()
    x, weight = normal((4, K), 0), normal((N, K), 1)
    run = load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm
    run(x, weight.T)
    sglang.uninstall()
    assert {row.why_not for row in sglang.report()} == {"it was uninstalled"}
    run(x, weight.T)
    assert (calls["dsv3_fused_a_gemm"], sglang.report().served) == (1, 1)
    assert sglang.install("dsv3_fused_a_gemm").installed == 1
    run(x, weight.T)
    assert (calls["dsv3_fused_a_gemm"], sglang.report().served) == (1, 2)


def test_the_engine_says_what_it_did(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine(kimi_k3=("w: torch.Tensor", "weight: torch.Tensor"))
    x, weight = normal((4, K), 0), normal((N, K), 1)
    with caplog.at_level(logging.INFO, "sglang.k3cupy"):
        sglang.install(["kimi_k3_tiny_gemm", "dsv3_fused_a_gemm"])
        for _ in range(2):
            load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm(x, weight.T)
            load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm(x, weight.T.contiguous())
    *of_start, served, handed_back = caplog.messages
    assert served == "SGLang: dsv3_fused_a_gemm: the first call is served by k3cupy"
    assert handed_back.startswith(
        "SGLang: dsv3_fused_a_gemm: the first call is handed back: weight: expected a packed"
    )
    assert of_start == [
        "SGLang: kimi_k3_tiny_gemm is left alone: sglang.kernels.ops.gemm.kimi_k3:"
        "kimi_k3_tiny_gemm: expected (x, w), got (x, weight)",
        "SGLang: k3cupy stands in for dsv3_fused_a_gemm",
    ]


def test_the_package_names_the_plug_in() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    group = text.partition('[project.entry-points."sglang.srt.plugins"]\n')[2]
    assert group.startswith('k3cupy = "k3cupy.engines.sglang:register"\n')


# --- Another SGLang ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "target", "why_not"),
    [
        (
            {"fused_a_gemm": ("def dsv3_fused_a_gemm", "def fused_a")},
            "dsv3_fused_a_gemm",
            "got no such function",
        ),
        (
            {"fused_a_gemm": ("        *,\n", "        *,\n        scale=None,\n")},
            "linear_with_fused_a_gemm",
            "got (layer, hidden_states, *, scale=None, backend=FusedAGemmBackend.AUTO)",
        ),
        (
            {"trtllm_mla_backend": ("k_rope: torch.Tensor,\n", "k_rope, q_lora,\n")},
            DECODE,
            "got (self, layer, loc, k, k_rope, q_lora, q, q_rope)",
        ),
    ],
)
def test_what_differs_is_left_alone(
    edit: dict[str, tuple[str, str]], target: str, why_not: str, engine: Engine
) -> None:
    name, (old, new) = next(iter(edit.items()))
    if "\n" in old:  # of the text as it is written, without the indentation of this package
        old, new = (part.replace("        ", "    ", 1) for part in (old, new))
    engine(**{name: (old, new)})
    found = sglang.install()
    assert not found[target].installed
    assert found[target].why_not.endswith(why_not)
    assert found["kimi_k3_tiny_gemm"].installed
    hooks = load("sglang.srt.plugins.hook_registry").HookRegistry._hooks
    assert sglang_facts.TARGETS[target].replace(":", ".") not in hooks


def test_other_plumbing_leaves_everything_alone(engine: Engine) -> None:
    engine(hook_registry=("*, source=None", "source=None"))
    found = sglang.install()
    assert found.installed == 0
    assert {row.why_not.partition(":")[2] for row in found} == {
        "HookRegistry.register: expected (cls, target, hook, hook_type=HookType.AFTER, *, "
        "source=None), got (cls, target, hook, hook_type=HookType.AFTER, source=None)"
    }


def test_a_module_that_cannot_be_imported(engine: Engine) -> None:
    """SGLang logs it and goes on; the report says that the hook is not applied."""
    engine(kimi_k3=("import sglang\n", "import sglang, no_such_module\n"))
    found = sglang.install()
    assert "has not applied" in found["kimi_k3_tiny_gemm"].why_not
    assert found.installed == len(TARGETS) - 1


def test_beside_another_plug_in(engine: Engine) -> None:
    """One that registers with us is below ours; behind one that was applied is no place."""
    engine()
    hooks = load("sglang.srt.plugins.hook_registry")
    register, seen = hooks.HookRegistry.register, []
    register(f"{GEMM}.kimi_k3.kimi_k3_tiny_gemm", lambda x, w: seen.append("theirs") or x,
             hooks.HookType.REPLACE)  # fmt: skip
    hooks.HookRegistry.apply_hooks()
    register(f"{GEMM}.fused_a_gemm.dsv3_fused_a_gemm",
             lambda mat_a, mat_b, output=None, backend=None: seen.append("theirs"),
             hooks.HookType.REPLACE)  # fmt: skip
    found = sglang.install()
    assert found["kimi_k3_tiny_gemm"].why_not.startswith("SGLang has applied other hooks")
    assert found["dsv3_fused_a_gemm"].installed
    load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm(normal((4, K), 0), normal((N, K), 1).T)
    assert seen == []
    load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm(normal((4, K), 0), normal((N, K), 1))
    assert seen == ["theirs"]


# --- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("given", [False, True])
def test_the_fused_a_gemm(tokens: int, given: bool, device: str, engine: Engine) -> None:
    calls = engine().calls
    sglang.install()
    x, weight = normal((tokens, 2 * K), 0, device)[:, :K], normal((N, K), 1, device)
    output = torch.full((tokens, N), float("nan"), dtype=BF16, device=device) if given else None
    result = load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm(x, weight.T, output, backend="auto")
    assert_product(result, x, weight)
    assert (result is output) is given
    assert (calls.total(), sglang.report().served) == (0, 1)


def test_a_layer(engine: Engine) -> None:
    """On the CPU SGLang's function gets the call, and calls the GEMM, which is ours."""
    calls = engine().calls
    model = load("sglang.srt.models.deepseek_v2")  # has the function by value, before any hook
    sglang.install()
    x, linear = normal((4, K), 0), layer()
    assert_product(model.prepare_qkv_latent(linear, x), x, linear.weight)
    assert dict(calls) == {"linear_with_fused_a_gemm": 1}
    found = sglang.report()
    assert found["linear_with_fused_a_gemm"].handed_back == {
        "x: expected a CUDA tensor, got one on the cpu": 1
    }
    assert found["dsv3_fused_a_gemm"].served == 1


@pytest.mark.parametrize("tokens", [1, 5, 0])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("row", "joined"), [(576, False), (640, False), (576, True)])
def test_the_decode_epilogue(
    tokens: int, fp8: bool, row: int, joined: bool, device: str, engine: Engine
) -> None:
    calls = engine().calls
    sglang.install()
    batch = Decode(tokens, fp8=fp8, row=row, joined=joined, device=device)
    before = batch.storage.clone()
    batch.check(batch.run(), before)
    assert (calls.total(), sglang.report().served) == (0, 1)


def test_slots_of_32_bits_and_a_cache_of_bytes(engine: Engine) -> None:
    engine()
    sglang.install()
    batch = Decode(fp8=True)
    batch.pool, batch.loc = batch.storage.unsqueeze(1), batch.loc.int()
    before = batch.storage.clone()
    batch.check(batch.run(), before)
    assert sglang.report().served == 1


# --- Handed back ---------------------------------------------------------------------------------


def test_a_gemm_that_we_do_not_take(engine: Engine) -> None:
    calls = engine().calls
    sglang.install()
    run = load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm
    x, weight = normal((4, K), 0), normal((N, K), 1)
    for given in (
        (x, weight.T.contiguous()),
        (normal((65, K), 0), weight.T),
        (x[:, :8], weight.T[:8]),
    ):
        assert_product(run(*given), given[0], given[1].T)
    row = sglang.report()["dsv3_fused_a_gemm"]
    assert (calls["dsv3_fused_a_gemm"], row.served) == (3, 0)
    of_layout, of_rows, of_k = row.handed_back
    assert of_layout.startswith("weight: expected a packed weight")
    assert of_rows.startswith("x: expected at most 64 rows, got 65")
    assert of_k.startswith("x: expected K a multiple of 16")


def test_layers_that_are_not_ours(engine: Engine) -> None:
    calls = engine().calls
    sglang.install(["linear_with_fused_a_gemm"])
    run = load(f"{GEMM}.fused_a_gemm").linear_with_fused_a_gemm
    x, lora = normal((4, K), 0), layer()
    lora.set_lora = True  # type: ignore[assignment]
    run(lora, x)
    run(layer(bias=True), x)
    run(layer(), normal((65, K), 0))
    assert sglang.report()["linear_with_fused_a_gemm"].handed_back == {
        "a LoRA adapter is active in the layer": 1,
        "the layer has a bias": 1,
        "more than 64 tokens": 1,
    }
    assert calls["linear_with_fused_a_gemm"] == 3


def test_decode_context_parallelism(engine: Engine) -> None:
    """Its slots are virtual, and a rank writes only its own: SGLang's kernel knows which."""
    calls = engine().calls
    sglang.install()
    load("sglang.srt.runtime_context").get_parallel().dcp_enabled = True
    Decode(fp8=True).run()
    row = sglang.report()[DECODE_FP8]
    assert row.handed_back == {
        "decode context parallelism: a rank writes only the slots that it owns": 1
    }
    assert calls["set_kv_and_concat_q_fp8"] == 1


def test_an_epilogue_that_we_do_not_take(engine: Engine) -> None:
    """What SGLang's function says to it is what the backend gets: here the other way, None."""
    engine()
    sglang.install()
    batch = Decode()
    batch.loc = batch.loc.float()
    before = batch.storage.clone()
    assert batch.run() is None
    assert torch.equal(batch.storage, before)
    (reason,) = sglang.report()[DECODE].handed_back
    assert reason.startswith("slot_mapping: expected ")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (("return _parallel", "raise RuntimeError('not written')"), "not known: not written"),
        (("(dcp_enabled=False)", "()"), "has no attribute 'dcp_enabled'"),
    ],
)
def test_a_context_that_does_not_answer(edit: tuple[str, str], reason: str, engine: Engine) -> None:
    engine(runtime_context=edit, trtllm_mla_backend=("not get_parallel().dcp_enabled", "True"))
    sglang.install()
    batch = Decode()
    before = batch.storage.clone()
    batch.check(batch.run(), before)
    (told,) = sglang.report()[DECODE].handed_back
    assert told.endswith(reason)


def test_wrong_arguments_are_sglangs_to_tell(engine: Engine) -> None:
    engine()
    sglang.install()
    with pytest.raises(TypeError, match=r"kimi_k3_tiny_gemm\(\) got an unexpected"):
        load(f"{GEMM}.kimi_k3").kimi_k3_tiny_gemm(normal((4, K), 0), w=normal((N, K), 1), out=None)


@pytest.mark.parametrize("error", [k3cupy.CompileError, k3cupy.ToolchainError])
def test_a_kernel_that_cannot_be_built_ends_it(
    error: type[Exception], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = engine().calls
    sglang.install()
    tried = []

    def fail(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise error("no compiler")

    monkeypatch.setattr(sglang, "fused_a_gemm", fail)
    run = load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm
    x, weight = normal((4, K), 0), normal((N, K), 1)
    for _ in range(2):
        assert_product(run(x, weight.T), x, weight)
    row = sglang.report()["dsv3_fused_a_gemm"]
    assert (len(tried), calls["dsv3_fused_a_gemm"]) == (1, 2)
    assert (row.why_not, row.handed_back) == (
        "our kernel cannot run here: no compiler",
        {"no compiler": 1},
    )


def test_a_compiler_that_traces_gets_sglangs_function(engine: Engine) -> None:
    calls = engine().calls
    sglang.install()
    tiny = load(f"{GEMM}.kimi_k3").kimi_k3_tiny_gemm
    compiled = torch.compile(lambda x, w: tiny(x, w) + 1, backend="eager", fullgraph=True)
    x, weight = normal((4, K), 0), normal((N, K), 1)
    torch.testing.assert_close(compiled(x, weight), nn.functional.linear(x, weight) + 1)
    assert sglang.report()["kimi_k3_tiny_gemm"].handed_back == {}
    assert calls["kimi_k3_tiny_gemm"]


# --- On a GPU that is none -----------------------------------------------------------------------


@pytest.fixture
def gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[DispatchDevice, ModuleType]:
    return DispatchDevice(monkeypatch), engine()


def cuda(*shape: int, dtype: torch.dtype = BF16) -> Any:
    return CudaTensor.of(torch.zeros(shape, dtype=dtype), 0)


def test_the_tiny_gemm_of_k3(gpu: tuple[DispatchDevice, ModuleType]) -> None:
    """x is a column slice, of row stride 144; the name in the package looks up at each call."""
    device, package = gpu
    sglang.install()
    x = cuda(4, 144)[:, :128]
    out = load(GEMM).kimi_k3_tiny_gemm(x, cuda(*F_B))
    assert out.shape == (4, 1536)
    assert (len(device.records), package.calls.total()) == (1, 0)
    assert sglang.report()["kimi_k3_tiny_gemm"].served == 1


def test_a_layer_with_more_tokens_than_sglangs_kernel_takes(
    gpu: tuple[DispatchDevice, ModuleType],
) -> None:
    device, package = gpu
    sglang.install()
    linear = SimpleNamespace(weight=cuda(*F_B))
    out = load(f"{GEMM}.fused_a_gemm").linear_with_fused_a_gemm(linear, cuda(32, 128))
    assert out.shape == (32, 1536)
    assert (len(device.records), package.calls.total()) == (1, 0)


def test_a_first_call_compiles_for_every_number_of_tokens(
    gpu: tuple[DispatchDevice, ModuleType],
) -> None:
    """So that no capture of another size has to."""
    device, package = gpu
    sglang.install()
    tiny, weight = load(GEMM).kimi_k3_tiny_gemm, cuda(*F_B)
    tiny(cuda(32, 128), weight)
    options = {"shapes": [F_B], "weight_is_static": True}
    expected = set(warmup.wanted_of("low_latency_linear", options)(H200))
    assert set(device.loads) == expected
    device.capturing = True
    for tokens in range(1, 65):
        tiny(cuda(tokens, 128), weight)
    row = sglang.report()["kimi_k3_tiny_gemm"]
    assert set(device.loads) == expected
    assert not any("capturing" in reason for reason in row.handed_back)
    assert row.served + package.calls["kimi_k3_tiny_gemm"] == 65


def test_a_capture_without_a_warm_up_is_handed_back(
    gpu: tuple[DispatchDevice, ModuleType],
) -> None:
    device, package = gpu
    sglang.install()
    device.capturing = True
    x, weight = cuda(4, 128), cuda(*F_B)
    load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm(x, weight.T)
    load(GEMM).kimi_k3_tiny_gemm(x, weight)
    assert (device.records, device.loads) == ([], [])
    assert package.calls == {"dsv3_fused_a_gemm": 1, "kimi_k3_tiny_gemm": 1}
    for name in ("dsv3_fused_a_gemm", "kimi_k3_tiny_gemm"):
        (reason,) = sglang.report()[name].handed_back
        assert "capturing" in reason


@pytest.mark.parametrize("deterministic", [False, True])
def test_batch_invariance_is_the_servers(
    deterministic: bool, gpu: tuple[DispatchDevice, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every function, and for every number of tokens: a row's bits do not change at 64."""
    engine_calls = gpu[1].calls
    seen = []
    for name in ("fused_a_gemm", "try_low_latency_gemm"):
        run = getattr(k3cupy, name)

        def spy(*args: Any, run: Any = run, **modes: Any) -> Any:
            seen.append((modes["batch_invariant"], modes["weight_is_static"]))
            return run(*args, **modes)

        monkeypatch.setattr(sglang, name, spy)
    sglang.install()
    load("sglang.srt.runtime_context").publish(deterministic)
    weight = cuda(*F_B)
    load(f"{GEMM}.fused_a_gemm").dsv3_fused_a_gemm(cuda(4, 128), weight.T)
    for tokens in (4, 100):
        load(GEMM).kimi_k3_tiny_gemm(cuda(tokens, 128), weight)
    assert seen == [(deterministic, True)] * (3 if deterministic else 2)
    assert engine_calls.total() == (0 if deterministic else 1)


def test_a_reason_is_asked_once(
    gpu: tuple[DispatchDevice, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    explain = sglang.explain_low_latency_gemm
    monkeypatch.setattr(
        sglang, "explain_low_latency_gemm", lambda *a, **k: asked.append(1) or explain(*a, **k)
    )
    sglang.install()
    x, weight = cuda(4, 128, dtype=torch.float32), cuda(*F_B)
    for _ in range(3):
        load(GEMM).kimi_k3_tiny_gemm(x, weight.float())
    (reason,) = sglang.report()["kimi_k3_tiny_gemm"].handed_back.items()
    assert reason == ("x: expected bfloat16, got float32", 3)
    assert len(asked) == 1
