"""vLLM's operators run our kernels, in a fake vLLM with the schemas of the real one."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import slow_kernels
import torch
from fake_device import H200, CudaTensor, FakeDevice
from helpers import run_program
from vllm_helpers import FAKE, Call, call_of, imported, vllm

import k3cupy
from k3cupy.engines import imports, vllm_targets
from k3cupy.engines import vllm_facts as facts
from k3cupy.engines.report import Target
from k3cupy.runtime.errors import CompileError

__all__ = ["vllm"]  # the fixture
DECODE = "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert"
INSERTS = [name for name in facts.OPERATORS if name.endswith("insert")]
FORMS = [(name, False) for name in facts.OPERATORS] + [(name, True) for name in INSERTS]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def counts(engine: Any, name: str) -> tuple[int, dict[str, int]]:
    row = engine.report()[name]
    return row.served, dict(row.handed_back)


# --- Served --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rope"), FORMS)
def test_an_operator_is_served(name: str, rope: bool, vllm: Any) -> None:
    """The same bits as vLLM's own, over all outputs and the whole cache; its own does not run."""
    imported()
    want = call_of(name, rope=rope)()
    assert slow_kernels.CALLS[name] == 1
    assert any(bits.any() for bits in want), "the kernel did something"
    vllm.install(name)
    same(call_of(name, rope=rope)(), want)
    assert slow_kernels.CALLS[name] == 1, "vLLM's own did not run"
    assert counts(vllm, name) == (1, {})


def test_strided_rows_and_more_tokens_than_vllm_takes(vllm: Any) -> None:
    """x of row stride 144, as f_b has it, and 64 tokens."""
    imported()
    vllm.install()
    wide, weight = torch.randn(64, 144).bfloat16(), torch.randn(48, 128).bfloat16()
    output = torch.empty(64, 48).bfloat16()
    torch.ops._C.dsv3_fused_a_gemm(output, wide[:, :128], weight.t(), enable_pdl=True)
    torch.testing.assert_close(output, wide[:, :128] @ weight.t(), rtol=2**-7, atol=2**-4)
    assert counts(vllm, facts.GEMM) == (1, {})


@pytest.mark.parametrize("enable_pdl", [None, False, True])
def test_enable_pdl_is_the_promise_about_the_weight(
    enable_pdl: bool | None, vllm: Any, fake_device: FakeDevice
) -> None:
    imported()
    vllm.install()
    output, mat_a, mat_b, _ = call_of(facts.GEMM).args
    flag = () if enable_pdl is None else (enable_pdl,)
    torch.ops._C.dsv3_fused_a_gemm(output, mat_a, mat_b, *flag)
    (record,) = fake_device.records
    assert record.pdl is bool(enable_pdl)
    with pytest.MonkeyPatch.context() as patch:
        seen: dict[str, Any] = {}
        patch.setattr(vllm_targets, "fused_a_gemm", lambda *_, **options: seen.update(options))
        vllm_targets._gemm(vllm_targets.Modes(batch_invariant=True))(output, mat_a, mat_b, *flag)
    assert seen["weight_is_static"] is seen["pdl"] is bool(enable_pdl)
    assert seen["batch_invariant"] is True


@pytest.mark.parametrize("ready", [False, True])
def test_the_promise_of_ready_inputs_is_the_users(
    ready: bool, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def epilogue(*_: Any, kv_inputs_ready: bool, **__: Any) -> None:
        seen.append(kv_inputs_ready)

    monkeypatch.setattr(vllm_targets, "_DECODE", epilogue)
    imported()
    if ready:
        monkeypatch.setenv("K3CUPY_VLLM_KV_READY", "1")
    monkeypatch.setenv("K3CUPY_VLLM", "*decode*")
    vllm.register()
    for name in facts.OPERATORS:
        if "_decode_" in name:
            call_of(name)()
    assert seen == [ready] * 3


# --- Handed back ---------------------------------------------------------------------------------


def other_block(call: Call) -> Call:
    """The block size that vLLM tells is not the cache's."""
    args = list(call.args)
    args[next(i for i, a in enumerate(args) if type(a) is int)] = 4
    return call._replace(args=tuple(args))


@pytest.mark.parametrize("name", INSERTS)
def test_another_block_size_is_handed_back(
    name: str, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported()
    vllm.install()
    other_block(call_of(name))()
    assert slow_kernels.CALLS[name] == 1
    assert counts(vllm, name) == (0, {"cache_block_size is not that of the cache's shape": 1})


def test_what_we_do_not_take_is_handed_back_with_the_reason(vllm: Any) -> None:
    """Of a type that no kernel of ours has: the same numbers as without us, and counted."""
    imported()
    output, a, b = torch.zeros(2, 8), torch.randn(2, 16), torch.randn(8, 16)
    vllm.install()
    for _ in range(3):
        torch.ops._C.dsv3_fused_a_gemm(output, a, b.t(), True)
    torch.testing.assert_close(output, a @ b.t())
    served, back = counts(vllm, facts.GEMM)
    assert served == 0
    ((reason, count),) = back.items()
    assert count == 3
    assert re.search(r"mat_a: expected bfloat16.*got float32", reason)
    assert slow_kernels.CALLS[facts.GEMM] == 3


def test_a_capture_without_warm_up_is_handed_back(vllm: Any, fake_device: FakeDevice) -> None:
    """vLLM's own kernel is captured; once ours is loaded, that one is."""
    imported()
    vllm.install()
    call = call_of(DECODE)
    fake_device.capturing = True
    call()
    served, back = counts(vllm, DECODE)
    assert served == 0
    assert slow_kernels.CALLS[DECODE] == 1
    assert "captur" in next(iter(back))
    assert not fake_device.records
    fake_device.capturing = False
    call()
    fake_device.capturing = True
    call()
    assert counts(vllm, DECODE)[0] == len(fake_device.records) == 2


def test_what_cannot_be_built_is_tried_once(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def epilogue(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise CompileError("the compiler said no")

    monkeypatch.setattr(vllm_targets, "_DECODE", epilogue)
    imported()
    vllm.install()
    for _ in range(3):
        call_of(DECODE)()
    assert len(tried) == 1
    assert counts(vllm, DECODE) == (0, {"the compiler said no": 3})
    assert slow_kernels.CALLS[DECODE] == 3


def test_a_gpu_that_is_too_old(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    old = replace(H200, name="Tesla T4", compute_capability=(7, 5))
    monkeypatch.setattr(vllm_targets.devices, "info", lambda _: old)
    target, ran = Target("x"), []
    call = vllm_targets.serving(target, lambda *_: pytest.fail("ours ran"), ran.append)
    for _ in range(2):
        call(CudaTensor.of(torch.empty(1), 0))
    assert len(ran) == 2
    assert target.handed_back == {"Tesla T4 is sm_75; our kernels need sm_80": 2}


def test_a_gpu_is_looked_at_once(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(vllm_targets.devices, "info", lambda index: asked.append(index) or H200)
    target = Target("x")
    call = vllm_targets.serving(target, lambda *_: "ours", lambda *_: pytest.fail("vLLM's ran"))
    for ordinal in (0, 1, 0, 1):
        assert call(CudaTensor.of(torch.empty(1), ordinal)) == "ours"
    assert (asked, target.served) == ([0, 1], 4)


def test_an_error_of_vllms_own_is_raised(vllm: Any) -> None:
    imported()
    vllm.install()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ops._C.dsv3_fused_a_gemm(torch.zeros(2, 8), torch.ones(2, 3), torch.ones(4, 8))


def test_an_error_of_vllms_own_is_told_without_our_reason() -> None:
    """A traceback that began with a reason of ours would send its reader to us."""

    def refuse(_: Any) -> None:
        raise vllm_targets.NotTakenError("not for us")

    def fail(_: Any) -> None:
        raise RuntimeError("vLLM's own error")

    call = vllm_targets.serving(Target("x"), refuse, fail)
    with pytest.raises(RuntimeError, match="vLLM's own error") as raised:
        call(torch.empty(1))
    assert raised.value.__context__ is None


# --- Installing ----------------------------------------------------------------------------------


def test_off_unless_asked(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finders = list(sys.meta_path)
    for value in (None, "", "0", "off"):
        if value is not None:
            monkeypatch.setenv("K3CUPY_VLLM", value)
        vllm.register()
    assert sys.meta_path == finders
    imported()
    call_of(DECODE)()
    assert slow_kernels.CALLS[DECODE] == 1
    assert {row.why_not for row in vllm.report()} == {"it was not asked for"}


def test_the_variable_names_targets(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3CUPY_VLLM", " dsv3_fused_a_gemm, *ds_mla* ")
    vllm.register()
    imported()
    installed = {row.name for row in vllm.report() if row.installed}
    ds_mla = {name for name in facts.OPERATORS if "ds_mla" in name}
    assert installed == {facts.GEMM, *ds_mla}
    assert len(ds_mla) == 2


def test_a_promise_that_is_neither_on_nor_off(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3CUPY_VLLM", "1")
    monkeypatch.setenv("K3CUPY_VLLM_KV_READY", "maybe")
    with pytest.raises(ValueError, match=r"^K3CUPY_VLLM_KV_READY: expected .*, got 'maybe'$"):
        vllm.register()


def test_a_name_that_is_no_target(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3CUPY_VLLM", "dsv3_fused_a_gemm,decode")
    with pytest.raises(ValueError, match=r"K3CUPY_VLLM: expected names.*_run_plan.*got 'decode'"):
        vllm.register()
    monkeypatch.setenv("K3CUPY_VLLM", "2")
    with pytest.raises(ValueError, match=r"got '2'\. 1 stands for all of them, 0 for none$"):
        vllm.register()
    with pytest.raises(ValueError, match=r"targets: expected names.*got 3"):
        vllm.install([3])
    with pytest.raises(TypeError, match=r"^targets: expected names of targets: .*, got 5$"):
        vllm.install(5)
    with pytest.raises(TypeError, match="kv_inputs_ready: expected"):
        vllm.install(kv_inputs_ready=1)
    assert not any(row.installed for row in vllm.report())


def test_before_and_behind_the_import(vllm: Any) -> None:
    """Nothing of vLLM is imported for it, and what is imported later is taken then."""
    report = vllm.install()
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]
    assert report.installed == 0
    assert report[facts.GEMM].why_not == "vLLM has not imported vllm._custom_ops"
    module = imported()
    assert module.__loader__ is module.__spec__.loader
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(module.__loader__)
    assert all(vllm.report()[name].installed for name in facts.OPERATORS)
    call_of(DECODE)()
    assert slow_kernels.CALLS[DECODE] == 0
    assert imports.importlib.import_module("vllm.envs").compile_factors()


def test_registering_again_changes_nothing(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3CUPY_VLLM", "1")
    vllm.register()
    vllm.register()
    imported()
    vllm.register()
    vllm.install()
    call_of(DECODE)()
    assert counts(vllm, DECODE) == (1, {})
    assert len(vllm.report()) == len(facts.TARGETS)


def test_uninstalling_restores(vllm: Any) -> None:
    imported()
    want = call_of(DECODE)()
    for round_ in (1, 2):
        vllm.install()
        same(call_of(DECODE)(), want)
        assert slow_kernels.CALLS[DECODE] == round_
        vllm.uninstall()
        same(call_of(DECODE)(), want)
        assert slow_kernels.CALLS[DECODE] == round_ + 1
    row = vllm.report()[DECODE]
    assert (row.installed, row.why_not, row.served) == (False, "it was uninstalled", 2)


def test_uninstalling_before_the_import(vllm: Any) -> None:
    vllm.install()
    vllm.uninstall()
    imported()
    call_of(DECODE)()
    assert slow_kernels.CALLS[DECODE] == 1


FORK = """
import os, sys
sys.path.insert(0, {fake!r})
os.environ["K3CUPY_VLLM"] = "1"
from k3cupy.engines import vllm
from vllm_helpers import call_of, imported
import slow_kernels
vllm._KEY = "CPU"
vllm.register()

def is_served():
    vllm.register()
    imported()
    before = vllm.report()[{name!r}].served
    call_of({name!r})()
    assert vllm.report()[{name!r}].served == before + 1
    assert slow_kernels.CALLS[{name!r}] == 0

def forked():
    child = os.fork()
    is_served()
    if not child:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

forked()
forked()
print(vllm.report()[{name!r}].served)
"""


def test_a_forked_worker_is_served() -> None:
    """Whether it forks before vLLM was imported or behind it; each process counts for itself."""
    code = FORK.format(fake=str(FAKE), name=DECODE)
    assert run_program(code, env={"OMP_NUM_THREADS": "1"}).strip() == "2"


def test_importing_it_brings_no_torch_and_no_vllm() -> None:
    code = (
        "import sys, k3cupy.engines.vllm as v; v.register(); v.report(); v.install(); "
        "print(sorted({'torch', 'cupy', 'vllm'} & set(sys.modules)))"
    )
    assert run_program(code).strip() == "[]"


def test_vllm_finds_it() -> None:
    """The entry point of the group that vLLM loads in each process."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    point = re.search(r'"vllm\.general_plugins"\]\nk3cupy = "([\w.]+):(\w+)"', project)
    assert point is not None
    module = imports.importlib.import_module(point[1])
    assert inspect.signature(getattr(module, point[2])).parameters == {}


def test_one_line_in_the_log(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm")
    vllm.install()
    imported()
    vllm.install()
    (record,) = caplog.records
    assert record.name.startswith("vllm."), "vLLM's own handlers show it"
    text = record.getMessage()
    assert text == (
        f"k3cupy {k3cupy.__version__} in vLLM 0.33.0: 9 of 9 operators run our kernels, and 5 "
        "functions will"
    )


# --- What differs is left alone ------------------------------------------------------------------


def left_alone(engine: Any, name: str, caplog: pytest.LogCaptureFixture) -> str:
    """Why an operator was left alone, and that the others were not and the log says it."""
    engine.install()
    imported()
    rows = {row.name: row for row in engine.report()}
    assert not rows[name].installed
    assert all(rows[other].installed for other in facts.OPERATORS if other != name)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert name in warning.getMessage()
    return rows[name].why_not


def test_a_missing_operator(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(slow_kernels.SCHEMAS, facts.GEMM)
    assert left_alone(vllm, facts.GEMM, caplog) == (
        "the engine, as it is built here, has no such operator"
    )


CHANGES = {
    "another argument": ("int cache_block_size,", "int cache_block_size, bool extra=False,"),
    "another name": ("Tensor q_pe", "Tensor q_rope"),
    "another order": ("Tensor q_pe, Tensor kv_c_normed", "Tensor kv_c_normed, Tensor q_pe"),
    "written or not": ("Tensor! k_cache", "Tensor k_cache"),
    "a result": ("-> ()", "-> Tensor"),
    "optional or not": ("Tensor? position_ids=None", "Tensor position_ids"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_schema(
    change: str, vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = CHANGES[change]
    text = facts.OPERATORS[DECODE].replace(ours, theirs)
    if change == "optional or not":
        text = text.replace("Tensor? cos_sin_cache=None", "Tensor cos_sin_cache")
    assert text != facts.OPERATORS[DECODE]
    monkeypatch.setitem(slow_kernels.SCHEMAS, DECODE, text)
    why = left_alone(vllm, DECODE, caplog)
    assert why.startswith("its schema is not the one that we know: _C::fused_kimi_k3_mla_decode")


def test_no_kernel_for_the_gpu(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM builds the GEMM for some architectures only: nothing to hand back to."""
    monkeypatch.setattr(slow_kernels, "KEYS", [])
    vllm.install()
    imported()
    assert "it has no kernel for CPU" in vllm.report()[facts.GEMM].why_not


@pytest.mark.parametrize("lack", ["get_kernel", "allow_override"])
def test_a_pytorch_that_cannot(lack: str, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if lack == "get_kernel":
        monkeypatch.delattr(torch.library, "get_kernel")
    else:

        def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "") -> None:
            pytest.fail("it was called")

        make = torch.library.Library.impl
        imported()
        monkeypatch.setattr(torch.library.Library, "impl", impl)
        assert make is not impl
    report = vllm.install()
    imported()
    report = vllm.report()
    assert f"PyTorch {torch.__version__} has no" in report[facts.GEMM].why_not
    assert lack in report[facts.GEMM].why_not or lack == "allow_override"
    call_of(DECODE)()
    assert slow_kernels.CALLS[DECODE] == 1


# --- What it costs -------------------------------------------------------------------------------


def test_the_override_is_thin(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds less than what any kernel in Python costs that the dispatcher calls: 2 to 4 us."""
    monkeypatch.setattr(vllm_targets, "_DECODE", lambda *_, **__: None)
    monkeypatch.setitem(slow_kernels.KERNELS, DECODE, lambda *_: None)
    imported()
    call = call_of(DECODE)
    own = host_time(call)
    vllm.install()
    ours = host_time(call)
    print(f"a kernel in Python {own * 1e6:.1f} us, ours {ours * 1e6:.1f} us")
    assert ours < 2.5 * own
    assert counts(vllm, DECODE)[0] == 4000


def host_time(call: Call) -> float:
    """The least time of a call, in seconds."""
    operator, args, times = getattr(torch.ops._C, call.name), call.args, []
    for _ in range(40):
        start = time.process_time()
        for _ in range(100):
            operator(*args)
        times.append((time.process_time() - start) / 100)
    return min(times)
