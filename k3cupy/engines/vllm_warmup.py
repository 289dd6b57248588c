"""Compiling what a model will run before vLLM captures its graphs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from logging import Logger
from typing import Any

from k3cupy.constants import CTYPES
from k3cupy.engines import vllm_facts as facts
from k3cupy.engines.vllm_targets import FP8_CACHES, Call, Modes, planned
from k3cupy.kernels.fused_a_gemm import K_MULTIPLE, MAX_TOKENS
from k3cupy.ops.warmup import warmup
from k3cupy.runtime.errors import CompileError, ToolchainError

Need = tuple[str, dict[str, Any]]
"""An operation, and the options of its warm-up."""

_CACHES = {"auto": "same", "bfloat16": "same", **dict.fromkeys(FP8_CACHES, "fp8")}
_CACHES |= {"fp8_ds_mla": "fp8_ds_mla"}
"""By vLLM's name of a cache's type the one of the warm-up."""


def kernel_warmup(
    own: Call, installed: Callable[[], Collection[str]], modes: Callable[[], Modes], log: Logger
) -> Call:
    """Return vLLM's warm-up with ours behind it.

    Args:
        own: vLLM's own.
        installed: gives the names of the targets that are ours by then.
        modes: gives those of the process by then.
        log: gets a line; that something keeps kernels from being ready is a warning: a graph that
            is captured then has vLLM's own.
    """

    def ours(worker: Any, *, process_local_only: bool = False) -> None:
        own(worker, process_local_only=process_local_only)
        start, count = time.perf_counter(), 0
        try:
            for op, options in needs(worker, installed(), modes()):
                count += warmup(op, progress=False, **options)
        except (CompileError, ToolchainError) as error:
            log.warning("k3cupy: kernels cannot be built here, vLLM's own run: %s", error)
        except Exception:  # a model or a worker that we do not know is no reason not to start
            log.warning("k3cupy: not all kernels are ready, vLLM's own run instead", exc_info=True)
        else:
            log.info("k3cupy: %d kernels are ready, in %.1f s", count, time.perf_counter() - start)

    return ours


def needs(worker: Any, installed: Collection[str], modes: Modes) -> Iterator[Need]:
    """Yield what a worker's model will run.

    Tokens are those that graphs are captured of; without graphs, and in a head, whose rows are
    requests, all that one launch takes.
    """
    sizes = worker.vllm_config.compilation_config.cudagraph_capture_sizes or ()
    tokens = [size for size in sizes if 1 <= size <= MAX_TOKENS] or list(_ALL)
    modules = list(worker.get_model().modules())
    linears = _with_method(modules, facts.LINEAR)
    plans = [module for module in linears if hasattr(module.quant_method, "_plan")]
    embeddings = _with_method(modules, facts.LM_HEAD)
    heads = [m for m in embeddings if _is_head(m)] or embeddings
    attentions = [
        module for module in modules if isinstance(module, _class_of(facts.DECODE_CONCAT))
    ]
    for dotted, shapes, counts in (
        (facts.LINEAR, _shapes(linears), tokens),
        (facts.RUN_PLAN, [*_shapes(plans), *_slices(attentions)], tokens),
        (facts.LM_HEAD, _shapes(heads), list(_ALL)),
    ):
        if facts.target_of(dotted) in installed:
            yield from _products(shapes, counts, False, modes)
    if facts.target_of(facts.WITH_RESIDUAL) in installed:
        added = [m for m in plans if getattr(m.quant_method, "_residual_plan", None)]
        yield from _products(_shapes(added), tokens, True, modes)
    if facts.GEMM in installed:
        yield from _of_gemm(modules, plans, tokens, modes)
    yield from _of_epilogues(worker, attentions, installed, modes)


_ALL = range(1, MAX_TOKENS + 1)


def _class_of(dotted: str) -> Any:
    """Return the class that a target is a method of, or none where vLLM has not imported it."""
    home, _, path = dotted.partition(":")
    return getattr(sys.modules.get(home), path.partition(".")[0], ())


def _with_method(modules: Iterable[Any], dotted: str) -> list[Any]:
    """Return the modules whose method is of the class of a target."""
    kind = _class_of(dotted)
    return [module for module in modules if isinstance(getattr(module, "quant_method", None), kind)]


def _is_head(module: Any) -> bool:
    """Return whether a vocabulary's module computes logits alone.

    An embedding computes no product, unless it is the head too: then there is no other.
    """
    home = sys.modules[facts.LM_HEAD.partition(":")[0]]
    return isinstance(module, home.ParallelLMHead)


def _shapes(modules: Iterable[Any]) -> list[tuple[int, int]]:
    """Return (N, K) of each bfloat16 weight, once."""
    weights = [getattr(module, "weight", None) for module in modules]
    found = [w.shape for w in weights if w is not None and str(w.dtype) == "torch.bfloat16"]
    return list(dict.fromkeys((n, k) for n, k in (shape for shape in found if len(shape) == 2)))


def _slices(attentions: Iterable[Any]) -> list[tuple[int, int]]:
    """Return (N, K) of the two parts of one weight that an attention uses on two streams."""
    found: dict[tuple[int, int], None] = {}
    for layer in attentions:
        if layer._gate_events is not None:
            for n, k in _shapes([layer.fused_qkv_a_g_proj]):
                first = layer.q_lora_rank + layer.kv_lora_rank + layer.qk_rope_head_dim
                found |= {(first, k): None, (n - first, k): None}
    return list(found)


def _products(
    every: list[tuple[int, int]], tokens: list[int], residual: bool, modes: Modes
) -> Iterator[Need]:
    shapes = [shape for shape in every if planned(*shape, modes.batch_invariant)]
    if shapes:
        options: dict[str, Any] = {"shapes": shapes, "tokens": tokens, "residual": residual}
        options |= {"weight_is_static": True, "batch_invariant": modes.batch_invariant}
        yield "low_latency_linear", options


def _of_gemm(
    modules: list[Any], plans: list[Any], tokens: list[int], modes: Modes
) -> Iterator[Need]:
    """Yield what vLLM gives to the operator itself: layers of DeepSeek, and by plan of Kimi-K3."""
    latent = [module for module in modules if getattr(module, "_use_min_latency_gemm", False)]
    asked = [(latent, [count for count in tokens if count <= _MOST_OF_VLLM], False)]
    for module in plans:
        plan = module.quant_method._plan.items()
        asked.append(([module], [m for m, (backend, _) in plan if backend == "dsv3_fused_a"], True))
    for found, counts, static in asked:
        shapes = [shape for shape in _shapes(found) if not shape[1] % K_MULTIPLE]
        if shapes and counts:
            options: dict[str, Any] = {"shapes": shapes, "tokens": counts}
            options |= {"weight_is_static": static, "batch_invariant": modes.batch_invariant}
            yield "fused_a_gemm", options


_MOST_OF_VLLM = 16
"""Tokens up to which vLLM calls the operator of its own accord."""


def _of_epilogues(
    worker: Any, attentions: list[Any], installed: Collection[str], modes: Modes
) -> Iterator[Need]:
    dtype = str(worker.vllm_config.model_config.dtype).removeprefix("torch.")
    epilogues = [name for name in installed if name in facts.OPERATORS and name != facts.GEMM]
    decode = any("_decode_" in name for name in epilogues)
    prefill = any("_decode_" not in name for name in epilogues)
    concat = facts.target_of(facts.DECODE_CONCAT) in installed
    forms = dict.fromkeys(
        (layer.kv_cache_dtype, layer.rotary_emb is not None, layer.impl.supports_quant_query_input)
        for layer in attentions
    )
    for name, rope, fp8_query in forms:
        cache = _CACHES.get(name)
        if cache is None or dtype not in CTYPES:
            continue
        form = {"dtype": dtype, "kv_cache": cache, "rope": rope}
        if decode or concat:
            query = cache == "fp8" and (fp8_query or not concat)
            ready = modes.kv_inputs_ready
            yield "mla_decode", {**form, "query_fp8": query, "kv_inputs_ready": ready}
        if prefill:
            yield "mla_prefill", form
