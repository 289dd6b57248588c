"""What we know of SGLang's source, read in version 0.5.23: the functions that we stand in for.

An installed SGLang is compared with ``FUNCTIONS`` before anything is hooked, and what differs is
left alone. A dotted name is ``module:name in it``.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "0.5.23"
"""Of the SGLang that was read."""

FUSED_A_GEMM = "sglang.kernels.ops.gemm.fused_a_gemm:dsv3_fused_a_gemm"
LINEAR = "sglang.kernels.ops.gemm.fused_a_gemm:linear_with_fused_a_gemm"
TINY_GEMM = "sglang.kernels.ops.gemm.kimi_k3:kimi_k3_tiny_gemm"
_BACKEND = "sglang.srt.layers.attention.trtllm_mla_backend:TRTLLMMLABackend"
DECODE = f"{_BACKEND}._set_kv_and_concat_q_fused"
DECODE_FP8 = f"{_BACKEND}._set_kv_and_concat_q_fp8_fused"
REGISTER = "sglang.srt.plugins.hook_registry:HookRegistry.register"
APPLY_HOOKS = "sglang.srt.plugins.hook_registry:HookRegistry.apply_hooks"
PARALLEL = "sglang.srt.runtime_context:get_parallel"
EXEC = "sglang.srt.runtime_context:get_exec"

PLUMBING = (REGISTER, APPLY_HOOKS, PARALLEL, EXEC)
"""What every hook needs beside its target."""

FUNCTIONS: Mapping[str, str] = {
    FUSED_A_GEMM: "(mat_a, mat_b, output=None, backend=FusedAGemmBackend.AUTO)",
    LINEAR: "(layer, hidden_states, *, backend=FusedAGemmBackend.AUTO)",
    TINY_GEMM: "(x, w)",
    DECODE: "(self, layer, loc, k, k_rope, q, q_rope)",
    DECODE_FP8: "(self, layer, loc, q, q_rope, k, k_rope)",
    REGISTER: "(cls, target, hook, hook_type=HookType.AFTER, *, source=None)",
    APPLY_HOOKS: "(cls)",
    PARALLEL: "()",
    EXEC: "()",
}
"""By dotted name the parameters, without their types. The file is the module's."""

IMPORTERS: Mapping[str, tuple[str, ...]] = {
    FUSED_A_GEMM: (),
    LINEAR: ("sglang.srt.models.deepseek_v2", "sglang.srt.models.nemotron_h"),
    TINY_GEMM: (),
}
"""By dotted name of a function the modules that import it by value: a name of their own. SGLang's
registry changes those that are loaded; later ones find the hook."""

WORDS: Mapping[str, tuple[str, ...]] = {
    "sglang.kernels.ops.gemm.fused_a_gemm": ("set_lora", "fused_a_gemm_weight_eligible"),
    "sglang.srt.layers.attention.trtllm_mla_backend": (
        "tp_q_head_num",
        "v_head_dim",
        "head_dim",
        "layer_id",
        "token_to_kv_pool",
        "get_key_buffer",
        "dcp_enabled",
    ),
    "sglang.srt.runtime_context": ("dcp_enabled",),
    "sglang.srt.models.deepseek_v2": ("deterministic", "enable_deterministic_inference"),
    "sglang.srt.plugins.hook_registry": ("_patched", "AROUND"),
}
"""By module the names in it that we read, of objects that it makes or is given."""


def target_of(dotted: str) -> str:
    """Return the name under which a function is a target: that in its module."""
    return dotted.partition(":")[2]


TARGETS: Mapping[str, str] = {
    target_of(dotted): dotted for dotted in (FUSED_A_GEMM, LINEAR, TINY_GEMM, DECODE, DECODE_FP8)
}
"""What users name, in the order of the report: by name what is hooked."""
