"""What we know of vLLM's source, read in version 0.33.0: the names that we stand in for.

What an installed vLLM has is compared with this before anything is changed, and what differs is
left alone. A dotted name is ``module:name in it``.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "0.33.0"
"""Of the vLLM that was read."""

NAMESPACE = "_C"
"""Of the operators, in ``torch.ops``."""

OPERATORS_FILE = "csrc/torch_bindings.cpp"
"""Where the operators are declared, from the root of the source archive."""

OPERATORS: Mapping[str, str] = {
    "dsv3_fused_a_gemm": (
        "dsv3_fused_a_gemm(Tensor! output, Tensor mat_a, Tensor mat_b, bool enable_pdl=False) -> ()"
    ),
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert": (
        "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(Tensor ql_nope, Tensor q_pe, "
        "Tensor kv_c_normed, Tensor k_pe, Tensor! mqa_q, Tensor! k_cache, Tensor slot_mapping, "
        "int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()"
    ),
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert": (
        "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert(Tensor ql_nope, Tensor q_pe, "
        "Tensor kv_c_normed, Tensor k_pe, Tensor! mqa_q, Tensor! k_cache, Tensor slot_mapping, "
        "Tensor q_scale_inv, Tensor cache_scale_inv, int cache_block_size, "
        "Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()"
    ),
    "fused_kimi_k3_mla_decode_q_concat_ds_mla_insert": (
        "fused_kimi_k3_mla_decode_q_concat_ds_mla_insert(Tensor ql_nope, Tensor q_pe, "
        "Tensor kv_c_normed, Tensor k_pe, Tensor! mqa_q, Tensor! k_cache, Tensor slot_mapping, "
        "int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()"
    ),
    "fused_kimi_k3_mla_key_concat_kv_cache_insert": (
        "fused_kimi_k3_mla_key_concat_kv_cache_insert(Tensor! q, Tensor k_nope, Tensor k_pe, "
        "Tensor kv_c_normed, Tensor! k_out, Tensor! k_cache, Tensor slot_mapping, "
        "int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()"
    ),
    "fused_kimi_k3_mla_key_concat_ds_mla_insert": (
        "fused_kimi_k3_mla_key_concat_ds_mla_insert(Tensor! q, Tensor k_nope, Tensor k_pe, "
        "Tensor kv_c_normed, Tensor! k_out, Tensor! k_cache, Tensor slot_mapping, "
        "int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()"
    ),
    "fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert": (
        "fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(Tensor q, Tensor k_nope, Tensor k_pe, "
        "Tensor kv_c_normed, Tensor v, Tensor! q_fp8, Tensor! k_fp8, Tensor! v_fp8, "
        "Tensor! k_cache, Tensor slot_mapping, Tensor q_scale_inv, Tensor k_scale_inv, "
        "Tensor v_scale_inv, Tensor cache_scale_inv, int cache_block_size, "
        "Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()"
    ),
    "fused_kimi_k3_mla_kv_concat": (
        "fused_kimi_k3_mla_kv_concat(Tensor k_nope, Tensor k_pe, Tensor! k_out) -> ()"
    ),
    "fused_kimi_k3_mla_kv_concat_quant_fp8": (
        "fused_kimi_k3_mla_kv_concat_quant_fp8(Tensor k_nope, Tensor k_pe, Tensor v, "
        "Tensor! k_fp8, Tensor! v_fp8) -> ()"
    ),
}
"""By name the schema in the words of vLLM's source, with its pieces joined to one line."""

GEMM = "dsv3_fused_a_gemm"

CUSTOM_OPS = "vllm._custom_ops"
"""The module whose import loads the operators' binary."""

RUN_PLAN = "vllm.models.kimi_k3.nvidia.low_latency_gemm:_run_plan"
WITH_RESIDUAL = (
    "vllm.models.kimi_k3.nvidia.low_latency_gemm:KimiK3LowLatencyLinearMethod.apply_with_residual"
)
DECODE_CONCAT = "vllm.models.kimi_k3.nvidia.mla:MultiHeadLatentAttention._decode_concat_cache"
LINEAR = "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply"
LM_HEAD = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply"
KERNEL_WARMUP = "vllm.model_executor.warmup.kernel_warmup:kernel_warmup"
COMPILE_FACTORS = "vllm.envs:compile_factors"

FUNCTIONS: Mapping[str, str] = {
    RUN_PLAN: "(plan, x, weight)",
    WITH_RESIDUAL: "(self, layer, x, residual)",
    DECODE_CONCAT: (
        "(self, ql_nope, q_pe, kv_c_normed, k_pe, positions, cos_sin_cache, slot_mapping)"
    ),
    LINEAR: "(self, layer, x, bias=None)",
    LM_HEAD: "(self, layer, x, bias=None)",
    KERNEL_WARMUP: "(worker, *, process_local_only=False)",
    COMPILE_FACTORS: "()",
}
"""By dotted name the parameters, without their types. The file is the module's."""

IMPORTERS: Mapping[str, tuple[str, ...]] = {
    RUN_PLAN: (),
    KERNEL_WARMUP: ("vllm.v1.worker.gpu_worker", "vllm.distributed.elastic_ep.elastic_execute"),
    COMPILE_FACTORS: (),
}
"""By dotted name of a function the modules that import it by value: a name of their own."""

WORDS: Mapping[str, tuple[str, ...]] = {
    "vllm.envs": ("VLLM_BATCH_INVARIANT",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("ParallelLMHead",),
    "vllm.model_executor.models.deepseek_v2": ("_use_min_latency_gemm",),
    "vllm.models.kimi_k3.nvidia.low_latency_gemm": ("_plan", "_residual_plan", "dsv3_fused_a"),
    "vllm.models.kimi_k3.nvidia.mla": (
        "kv_cache_dtype",
        "_k_scale_inv",
        "supports_quant_query_input",
        "rotary_emb",
        "_gate_events",
        "fused_qkv_a_g_proj",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
    ),
    "vllm.model_executor.layers.linear": ("_gemm_impl", "quant_method"),
    "vllm.model_executor.layers.utils": ("default_unquantized_gemm",),
    "vllm.model_executor.warmup.kernel_warmup": ("cudagraph_capture_sizes", "get_model"),
}
"""By module the names in it that we read, of objects that it makes or is given."""


def target_of(dotted: str) -> str:
    """Return the name under which a function is a target: that in its module."""
    return dotted.partition(":")[2]


TARGETS = (
    *OPERATORS,
    *map(target_of, (RUN_PLAN, WITH_RESIDUAL, DECODE_CONCAT, LINEAR, LM_HEAD)),
)
"""What users name, in the order of the report."""
