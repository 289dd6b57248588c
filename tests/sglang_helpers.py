"""A package ``sglang`` that stands for the real one: its names and signatures, and slow kernels.

``written`` writes it into a folder. Every kernel counts its calls in ``sglang.calls``. The
registry of hooks does what SGLang's does: hooks wait until they are applied, each target is applied
once, a failure is logged and passed over, a hook around a function gets what stood there before,
and modules that hold the function by value get the hook too.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from helpers import BF16, E4M3, random_values

from k3cupy.engines import sglang, sglang_facts
from k3cupy.engines.report import Target

_REGISTRY = """
    import enum
    import functools
    import logging
    import pkgutil
    import sys

    logger = logging.getLogger(__name__)


    class HookType(enum.Enum):
        AFTER = "after"
        AROUND = "around"
        REPLACE = "replace"


    class HookRegistry:
        _hooks = {}
        _patched = set()

        @classmethod
        def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
            cls._hooks.setdefault(target, []).append((hook_type, hook))

        @classmethod
        def apply_hooks(cls):
            for target in sorted(set(cls._hooks) - cls._patched):
                try:
                    cls._apply(target, cls._hooks[target])
                    cls._patched.add(target)
                except Exception:
                    logger.exception("Failed to apply hooks to %s", target)

        @classmethod
        def _apply(cls, target, hooks):
            owner, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(owner)
            first = found = getattr(owner, name)
            for kind, hook in sorted(hooks, key=lambda item: item[0] is not HookType.REPLACE):
                found = wrapped(found, hook, kind)
            setattr(owner, name, found)
            for module in list(sys.modules.values()):
                for key, value in list(vars(module).items()):
                    if value is first:
                        setattr(module, key, found)


    def wrapped(original, hook, kind):
        @functools.wraps(original)
        def run(*args, **kwargs):
            if kind is HookType.REPLACE:
                return hook(*args, **kwargs)
            if kind is HookType.AROUND:
                return hook(original, *args, **kwargs)
            return hook(original(*args, **kwargs), *args, **kwargs)

        return run
"""

_CONTEXT = """
    from types import SimpleNamespace

    _parallel = SimpleNamespace(dcp_enabled=False)
    published = {}


    def get_parallel():
        return _parallel


    def get_exec():
        if "exec" not in published:
            raise ValueError("config namespace 'exec' not published")
        return published["exec"]


    def publish(deterministic):
        mode = SimpleNamespace(enable_deterministic_inference=deterministic)
        published["exec"] = SimpleNamespace(deterministic=mode)
"""

_FUSED_A = """
    import enum

    import torch

    import sglang


    class FusedAGemmBackend(str, enum.Enum):
        AUTO = "auto"


    def fused_a_gemm_weight_eligible(layer: torch.nn.Module) -> bool:
        return layer.weight.dtype == torch.bfloat16


    def linear_with_fused_a_gemm(
        layer: torch.nn.Module,
        hidden_states: torch.Tensor,
        *,
        backend: "FusedAGemmBackend | str" = FusedAGemmBackend.AUTO,
    ) -> torch.Tensor:
        sglang.calls["linear_with_fused_a_gemm"] += 1
        if (
            not isinstance(hidden_states, tuple)
            and 1 <= hidden_states.shape[0] <= 16
            and not getattr(layer, "set_lora", False)
        ):
            return dsv3_fused_a_gemm(hidden_states, layer.weight.T, backend=backend)
        return layer(hidden_states)[0]


    def dsv3_fused_a_gemm(
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        output: torch.Tensor | None = None,
        backend: FusedAGemmBackend | str = FusedAGemmBackend.AUTO,
    ) -> torch.Tensor:
        sglang.calls["dsv3_fused_a_gemm"] += 1
        result = (mat_a.float() @ mat_b.float()).to(mat_a.dtype)
        return result if output is None else output.copy_(result)
"""

_TINY = """
    import torch

    import sglang


    def kimi_k3_tiny_gemm(
        x: torch.Tensor,
        w: torch.Tensor,
    ) -> torch.Tensor:
        sglang.calls["kimi_k3_tiny_gemm"] += 1
        return torch.nn.functional.linear(x, w)
"""

_GEMM = """
    def kimi_k3_tiny_gemm(x, w):
        from .kimi_k3 import kimi_k3_tiny_gemm as impl

        return impl(x, w)
"""

_BACKEND = """
    import torch

    import sglang
    from sglang.srt.runtime_context import get_parallel


    class TRTLLMMLABackend:
        def __init__(self, token_to_kv_pool):
            self.token_to_kv_pool = token_to_kv_pool
            self.fused = not get_parallel().dcp_enabled

        def _set_kv_and_concat_q_fused(
            self,
            layer,
            loc: torch.Tensor,
            k: torch.Tensor,
            k_rope: torch.Tensor,
            q: torch.Tensor,
            q_rope: torch.Tensor,
        ) -> torch.Tensor | None:
            sglang.calls["set_kv_and_concat_q"] += 1
            return slow(self, layer, loc, k, k_rope, q, q_rope)

        def _set_kv_and_concat_q_fp8_fused(
            self,
            layer,
            loc: torch.Tensor,
            q: torch.Tensor,
            q_rope: torch.Tensor,
            k: torch.Tensor,
            k_rope: torch.Tensor,
        ) -> torch.Tensor | None:
            sglang.calls["set_kv_and_concat_q_fp8"] += 1
            return slow(self, layer, loc, k, k_rope, q, q_rope, torch.float8_e4m3fn)


    def slow(backend, layer, loc, k, k_rope, q, q_rope, kind=torch.bfloat16):
        if loc.dtype not in (torch.int32, torch.int64):
            return None
        rows = torch.cat((k.view(len(k), -1), k_rope.view(len(k_rope), -1)), -1).to(kind)
        pool = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
        pool.view(len(pool), -1).view(rows.dtype)[loc.long()] = rows
        q = q.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        q_rope = q_rope.view(-1, layer.tp_q_head_num, layer.head_dim - layer.v_head_dim)
        return torch.cat((q, q_rope), -1).to(kind)
"""

_MODEL = """
    from sglang.kernels.ops.gemm.fused_a_gemm import linear_with_fused_a_gemm
    from sglang.srt.runtime_context import get_exec


    def prepare_qkv_latent(layer, hidden_states):
        # get_exec().deterministic.enable_deterministic_inference is looked at by the caller
        return linear_with_fused_a_gemm(layer, hidden_states)
"""

_OTHER_MODEL = """
    from sglang.kernels.ops.gemm.fused_a_gemm import (
        fused_a_gemm_weight_eligible,
        linear_with_fused_a_gemm,
    )
"""

FILES = {
    "sglang/__init__.py": "from collections import Counter\n\ncalls = Counter()\n",
    "sglang/kernels/__init__.py": "",
    "sglang/kernels/ops/__init__.py": "",
    "sglang/kernels/ops/gemm/__init__.py": _GEMM,
    "sglang/kernels/ops/gemm/fused_a_gemm.py": _FUSED_A,
    "sglang/kernels/ops/gemm/kimi_k3.py": _TINY,
    "sglang/srt/__init__.py": "",
    "sglang/srt/runtime_context.py": _CONTEXT,
    "sglang/srt/plugins/__init__.py": "",
    "sglang/srt/plugins/hook_registry.py": _REGISTRY,
    "sglang/srt/layers/__init__.py": "",
    "sglang/srt/layers/attention/__init__.py": "",
    "sglang/srt/layers/attention/trtllm_mla_backend.py": _BACKEND,
    "sglang/srt/models/__init__.py": "",
    "sglang/srt/models/deepseek_v2.py": _MODEL,
    "sglang/srt/models/nemotron_h.py": _OTHER_MODEL,
}


def written(folder: Path, **edits: tuple[str, str]) -> Path:
    """Write the package below a folder, and return that.

    Args:
        folder: where to.
        edits: by the last part of a file's name without ``.py``, a text in it and what comes there.
    """
    for name, text in FILES.items():
        text = textwrap.dedent(text).lstrip("\n")
        old, new = edits.get(Path(name).stem, ("", ""))
        assert old in text, f"{name} has no {old!r}"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(old, new) if old else text, encoding="utf-8")
    return folder


# --- For the tests -------------------------------------------------------------------------------

GEMM, TARGETS = "sglang.kernels.ops.gemm", tuple(sglang_facts.TARGETS)
DECODE, DECODE_FP8 = TARGETS[3:]
NOT_ASKED = "it was not asked for"
HEADS, PAGES = 3, 40
F_B = (1536, 128)
"""A weight that SGLang has a kernel for, and our table too: f_b of Kimi-K3."""


def load(name: str) -> Any:
    return importlib.import_module(name)


def forget_sglang() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


Engine = Callable[..., Any]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Writes the package, with edits, and imports it; what we know of it begins anew."""
    monkeypatch.setattr(sglang, "_targets", {n: Target(n, NOT_ASKED) for n in TARGETS})
    for name, empty in {"_hooked": {}, "_reasons": {}, "_compiled": set()}.items():
        monkeypatch.setattr(sglang, name, empty)
    monkeypatch.delenv("K3CUPY_SGLANG", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_sglang()

    def make(**edits: tuple[str, str]) -> Any:
        written(tmp_path, **edits)
        importlib.invalidate_caches()
        return load("sglang")

    with torch.no_grad():
        yield make
    forget_sglang()


class Decode:
    """A decode batch: what SGLang's backend is given, and what it must return and write.

    With ``joined`` the two parts of a key, and of a query, lie in one row, as SGLang's own test has
    them; else each is a tensor of its own, or a slice of what a projection gave.
    """

    def __init__(
        self,
        tokens: int = 5,
        *,
        fp8: bool = False,
        row: int = 576,
        joined: bool = False,
        device: str = "cpu",
    ) -> None:
        self.layer = SimpleNamespace(tp_q_head_num=HEADS, v_head_dim=512, head_dim=576, layer_id=7)
        q = random_values((tokens, HEADS, 576), BF16, 1).to(device)
        k = random_values((tokens, 1, 576), BF16, 2).to(device)
        wide = random_values((tokens, HEADS, 192), BF16, 3).to(device)
        self.q = q[..., :512] if joined else q[..., :512].reshape(tokens, HEADS * 512)
        self.q_rope = q[..., 512:] if joined else wide[..., 128:]
        self.k, self.k_rope = k.split([512, 64], -1)
        if not joined:
            self.k, self.k_rope = self.k.contiguous(), self.k_rope.contiguous()
        self.loc = torch.randperm(PAGES)[:tokens].to(device)
        self.kind = E4M3 if fp8 else BF16
        bits = torch.uint8 if fp8 else torch.int16
        self.storage = (torch.arange(PAGES * row, device=device) % 120).to(bits).view(PAGES, row)
        self.pool = self.storage.view(self.kind)[:, :576].unsqueeze(1)
        self.fp8 = fp8

    def run(self) -> Any:
        module = load("sglang.srt.layers.attention.trtllm_mla_backend")
        backend = module.TRTLLMMLABackend(SimpleNamespace(get_key_buffer=lambda _: self.pool))
        name = "_set_kv_and_concat_q_fp8_fused" if self.fp8 else "_set_kv_and_concat_q_fused"
        given = ("layer", "loc", "k", "k_rope", "q", "q_rope")
        return getattr(backend, name)(**{each: getattr(self, each) for each in given})

    def check(self, query: torch.Tensor, before: torch.Tensor) -> None:
        q = torch.cat((self.q.view(-1, HEADS, 512), self.q_rope), -1)
        rows = torch.cat((self.k, self.k_rope), -1).flatten(1)
        oracle.assert_same_bits(oracle.bits(query), oracle.bits(saturated(q, self.kind)), "query")
        want = before.clone()
        want[self.loc.long(), :576] = saturated(rows, self.kind).view(want.dtype)
        oracle.assert_same_bits(self.storage.cpu(), want.cpu(), "cache")


def saturated(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return values.clamp(-448, 448).to(kind) if kind is E4M3 else values
