"""k3cupy inside SGLang: its kernels for Kimi-K3 and DeepSeek answered by ours, through its hooks.

SGLang calls ``register``, its plug-in of this package, in each of its processes. With
``K3CUPY_SGLANG`` on, or naming targets, it registers a hook on each; SGLang applies them. A hook
computes what our kernels take and gives every other call to SGLang's own function, counted with the
reason. Nothing of SGLang is imported here: it replaces classes before it applies hooks, so its
modules must not be loaded earlier. What a hook needs is read in SGLang's source first, and a target
whose source differs from what we know is left alone.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from k3cupy.engines import sglang_facts as facts
from k3cupy.engines import sources
from k3cupy.engines.report import OF_VARIABLE, EngineReport, Target, TargetRow, named_targets
from k3cupy.kernels.fused_a_gemm import MAX_TOKENS
from k3cupy.ops import warmup
from k3cupy.ops.fused_a_gemm import fused_a_gemm
from k3cupy.ops.linear import explain_low_latency_gemm, try_low_latency_gemm
from k3cupy.ops.mla_decode import fused_mla_decode_q_concat_kv_cache_insert
from k3cupy.runtime import env, streams
from k3cupy.runtime.errors import CaptureError, CompileError, ToolchainError
from k3cupy.runtime.tensors import pytorch

logger = logging.getLogger("sglang.k3cupy")
"""Below SGLang's own, so that its lines stand where SGLang's do."""


def register() -> None:
    """Register our hooks where K3CUPY_SGLANG asks for them: the plug-in that SGLang calls.

    ``1`` asks for every target; names with commas between them, in which ``*`` stands for anything,
    for those; without it, or with ``0``, nothing happens. SGLang applies the hooks when all of its
    plug-ins have registered theirs.

    Raises:
        ValueError: the variable names nothing that exists; the text says what does.
    """
    wanted = env.sglang_targets()
    if wanted is not None:
        _register(named_targets(env.SGLANG, wanted or None, _targets, OF_VARIABLE))


def install(targets: str | Iterable[str] | None = None) -> EngineReport:
    """Let SGLang's functions come to us, in this process, now.

    For scripts that run SGLang's modules without its server, which calls ``register``. Calling it
    again installs what is not installed yet; the others stay as they are.

    Args:
        targets: names of them, in which ``*`` stands for anything; None for all.

    Returns:
        What is installed, and why the rest is not.

    Raises:
        TypeError: ``targets`` is no name and no names.
        ValueError: a name is none of the targets'.

    Example:
        >>> from k3cupy.engines import sglang
        >>> report = sglang.install("dsv3_fused_a_gemm")
        >>> report["dsv3_fused_a_gemm"].installed, report["kimi_k3_tiny_gemm"].why_not
        (False, 'it was not asked for')
    """
    registry = _register(named_targets("targets", targets, _targets))
    if registry is not None:
        registry.apply_hooks()
    return report()


def uninstall() -> None:
    """Give every call to SGLang's own functions again; the counts stay.

    Our hooks stay where SGLang has put them, for its registry knows no way back, and pass calls on.
    Graphs that were captured meanwhile keep our kernels.
    """
    for target in _targets.values():
        if target.installed:
            target.leave("it was uninstalled")


def report() -> EngineReport:
    """Return what is installed in this process, which calls were served or handed back, and why.

    A server runs the model in processes of its own: ask there.
    """
    return EngineReport("SGLang", [_row_of(target) for target in _targets.values()])


# --- Registering ---------------------------------------------------------------------------------

_targets = {name: Target(name, "it was not asked for") for name in facts.TARGETS}
_hooked: dict[str, Any] = {}
"""By a target's name the registry that has our hook."""


def _register(names: Iterable[str]) -> Any:
    """Register the hooks of targets, where nothing keeps us from it; return the registry."""
    wanted = [_targets[name] for name in names if not _targets[name].installed]
    root, why_not = _sglang()
    for dotted in facts.PLUMBING if root else ():
        why_not = why_not or sources.difference(root, dotted, facts.FUNCTIONS[dotted])
    registry: Any = None if why_not else import_module(facts.REGISTER.partition(":")[0])
    for target in wanted:
        dotted = facts.TARGETS[target.name]
        reason = why_not or sources.difference(root, dotted, facts.FUNCTIONS[dotted])
        if not reason and _hooked.get(target.name) is not registry.HookRegistry:
            reason = _hook(registry, target)
        if reason:
            target.leave(reason)
            logger.warning("SGLang: %s is left alone: %s", target.name, reason)
        else:
            target.install()
    installed = [target.name for target in wanted if target.installed]
    logger.info("SGLang: k3cupy stands in for %s", ", ".join(installed) or "nothing")
    return registry and registry.HookRegistry


def _sglang() -> tuple[Any, str]:
    """Return the folder that the package lies in, and why nothing can be installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None, "SGLang is not installed here"
    torch = pytorch()
    if torch is not None and torch.version.hip is not None:
        return None, "this PyTorch is built for ROCm"
    return Path(spec.submodule_search_locations[0]).parent, ""


def _path_of(target: Target) -> str:
    """Return a target as SGLang's registry names it."""
    return facts.TARGETS[target.name].replace(":", ".")


def _hook(registry: Any, target: Target) -> str:
    """Register the hook of a target; return what keeps us from it."""
    if _path_of(target) in registry.HookRegistry._patched:
        return "SGLang has applied other hooks to it before: install k3cupy earlier"
    hook = _hook_of(target, _TAKES[facts.TARGETS[target.name]])
    registry.HookRegistry.register(_path_of(target), hook, registry.HookType.AROUND)
    _hooked[target.name] = registry.HookRegistry
    return ""


def _row_of(target: Target) -> TargetRow:
    """Return a target's row, which says so where SGLang has our hook and did not apply it."""
    row, registry = target.row(), _hooked.get(target.name)
    if row.installed and registry is not None and _path_of(target) not in registry._patched:
        why_not = "SGLang has not applied the hook; where it failed to, its log says why"
        return replace(row, installed=False, why_not=why_not)
    return row


# --- A call --------------------------------------------------------------------------------------


class _NotOurs(ValueError):
    """A call that is SGLang's; the text says why."""


def _hook_of(target: Target, take: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that computes what we take, and gives SGLang's function the rest.

    What keeps us from a call is told before anything is written. A compiler that traces the call
    gets SGLang's function, which it knows.
    """
    from torch.compiler import is_compiling

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not target.installed:
            return original(*args, **kwargs)
        try:
            out = take(*args, **kwargs)
        except (ValueError, TypeError, AttributeError, CaptureError) as error:
            _hand_back(target, error)
        except (CompileError, ToolchainError) as error:
            _hand_back(target, error)
            target.leave(f"our kernel cannot run here: {error}")
            logger.warning("SGLang: %s is left alone: %s", target.name, target.why_not)
        else:
            if not target.served:
                logger.info("SGLang: %s: the first call is served by k3cupy", target.name)
            target.served += 1
            return out
        return original(*args, **kwargs)

    return hook


def _hand_back(target: Target, error: Exception) -> None:
    if not target.handed_back:
        logger.info("SGLang: %s: the first call is handed back: %s", target.name, error)
    target.hand_back(str(error))


def _dsv3_fused_a_gemm(mat_a: Any, mat_b: Any, output: Any = None, backend: Any = None) -> Any:
    weight = mat_b.T
    modes: dict[str, Any] = {"weight_is_static": True, "batch_invariant": _is_deterministic()}
    shapes = (tuple(weight.shape),)
    _compile_once("fused_a_gemm", mat_a, shapes=shapes, tokens=_GUARD, **modes)
    return fused_a_gemm(mat_a, weight, out=output, **modes)


def _linear_with_fused_a_gemm(layer: Any, hidden_states: Any, *, backend: Any = None) -> Any:
    if isinstance(hidden_states, tuple):
        raise _NotOurs("hidden_states: expected a tensor, got a tuple")
    if getattr(layer, "set_lora", False):
        raise _NotOurs("a LoRA adapter is active in the layer")
    if getattr(layer, "bias", None) is not None:
        raise _NotOurs("the layer has a bias")
    return _kimi_k3_tiny_gemm(hidden_states, layer.weight)


def _kimi_k3_tiny_gemm(x: Any, w: Any) -> Any:
    """Compute a product, where a kernel of ours is the fastest that is known."""
    invariant = _is_deterministic()
    if x.shape[0] > MAX_TOKENS and not invariant:
        raise _NotOurs(f"more than {MAX_TOKENS} tokens")
    modes: dict[str, Any] = {"weight_is_static": True, "batch_invariant": invariant}
    _compile_once("low_latency_linear", x, shapes=(tuple(w.shape),), **modes)
    out = try_low_latency_gemm(x, w, **modes)
    if out is None:
        raise _NotOurs(_why_not(x, w, invariant))
    return out


def _decode(backend: Any, layer: Any, loc: Any, k: Any, k_rope: Any, q: Any, q_rope: Any) -> Any:
    return _epilogue(backend, layer, loc, k, k_rope, q, q_rope, None)


def _decode_fp8(
    backend: Any, layer: Any, loc: Any, q: Any, q_rope: Any, k: Any, k_rope: Any
) -> Any:
    return _epilogue(backend, layer, loc, k, k_rope, q, q_rope, 1.0)


def _epilogue(
    backend: Any, layer: Any, loc: Any, k: Any, k_rope: Any, q: Any, q_rope: Any, scale: Any
) -> Any:
    """Join the query and write the cache rows: a page of one token each, whose number is the slot.

    SGLang casts to fp8 without a scale.
    """
    try:
        sharded = import_module("sglang.srt.runtime_context").get_parallel().dcp_enabled
    except RuntimeError as error:
        raise _NotOurs(
            f"whether there is decode context parallelism is not known: {error}"
        ) from None
    if sharded:
        raise _NotOurs("decode context parallelism: a rank writes only the slots that it owns")
    width, rope = layer.v_head_dim, layer.head_dim - layer.v_head_dim
    cache = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    _compile_once("mla_decode", k, kv_cache="bf16" if scale is None else "fp8")
    return fused_mla_decode_q_concat_kv_cache_insert(
        q.view(-1, layer.tp_q_head_num, width),
        q_rope.view(-1, layer.tp_q_head_num, rope),
        k.view(-1, width),
        k_rope.view(-1, rope),
        cache.view(cache.shape[0], -1).unsqueeze(1),
        loc,
        q_scale_inv=scale,
        cache_scale_inv=scale,
    )


_TAKES: dict[str, Callable[..., Any]] = {
    facts.FUSED_A_GEMM: _dsv3_fused_a_gemm,
    facts.LINEAR: _linear_with_fused_a_gemm,
    facts.TINY_GEMM: _kimi_k3_tiny_gemm,
    facts.DECODE: _decode,
    facts.DECODE_FP8: _decode_fp8,
}

_GUARD = range(1, 17)
"""Numbers of tokens: SGLang gives its fused-A GEMM no more."""


def _is_deterministic() -> bool:
    """Return whether the server was started with ``--enable-deterministic-inference``."""
    try:
        published = import_module("sglang.srt.runtime_context").get_exec()
    except ValueError:
        return False  # no server was configured, as in SGLang's own tests
    return bool(published.deterministic.enable_deterministic_inference)


_reasons: dict[tuple[Any, ...], str] = {}


def _why_not(x: Any, weight: Any, invariant: bool) -> str:
    """Return why no kernel of ours is to run, which is asked once for calls that are alike."""
    key = (x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.dtype, invariant)
    if key not in _reasons:
        if len(_reasons) >= 1000:
            _reasons.clear()
        _reasons[key] = explain_low_latency_gemm(x, weight, batch_invariant=invariant).reason
    return _reasons[key]


# --- Compiling ahead -----------------------------------------------------------------------------

_compiled: set[tuple[Any, ...]] = set()


def _compile_once(op: str, tensor: Any, **options: Any) -> None:
    """Compile, when a first call comes, what calls like it need for every number of tokens.

    SGLang runs each size of batch before it captures it, the largest first. So all of them are
    compiled at once, on threads, and not one after the other. A call that a graph captures does not
    compile: it is SGLang's, if its kernel is not there.
    """
    if not tensor.is_cuda:
        return
    device = tensor.get_device()
    key = (op, device, *options.values())
    if key in _compiled or streams.is_capturing(streams.current_of("torch", device)()):
        return
    _compiled.add(key)
    warmup.warmup(op, device=device, progress=False, **options)
