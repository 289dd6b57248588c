"""k3cupy inside transformers: DeepSeek-V3's attention in the absorbed form, and the linear layers.

``install(model)`` exchanges the classes of a built model's layers, ``uninstall(model)`` undoes it,
``report()`` says what became of the calls. Importing this imports neither transformers nor PyTorch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from k3cupy.accept import checks
from k3cupy.engines.report import EngineReport, Target
from k3cupy.ops.warmup import warmup as compile_for
from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import pytorch
from k3cupy.torch.modules import enable_low_latency_gemm

if TYPE_CHECKING:
    from torch import nn

_ENGINE = "transformers"
_KNOWN = ("hidden_states", "position_embeddings", "attention_mask")
_CACHE = ("past_key_values", "cache")
"""What the attention's fourth argument is called; the second in newer versions."""

_MARK = "_enabled_by_engine"
"""In linear layers that ``install`` has enabled."""


def __getattr__(name: str) -> Any:
    """Find ``LatentCache``, whose base class is transformers'."""
    if name == "LatentCache":
        _check_engine()
        from k3cupy.engines.transformers_cache import LatentCache

        return LatentCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install(
    model: nn.Module | None = None,
    *,
    tokens: int | Sequence[int] | None = None,
    warmup: bool = True,
) -> EngineReport:
    """Let a DeepSeek-V3 model decode in the absorbed form, and its linear layers run our kernels.

    Each ``DeepseekV3Attention`` in it then decodes over a ``LatentCache`` without expanding keys
    and values: one product for q_a and kv_a, the norms, q_b, W_UK into the query, the decode
    epilogue with RoPE into the cache, attention over the latents, W_UV, o_proj. Prompts, other
    caches, training and whatever else does not fit go to transformers' own forward, and the report
    says how often and why. ``enable_low_latency_gemm`` is called for the linear layers.

    The state dict keeps its keys and values. The weights of q_a and kv_a lie in one tensor from now
    on, of which both parameters are views. Calling it again brings layers up to date.

    Args:
        model: a model of transformers, or any module that holds such layers; None for the layers
            that transformers makes from now on: their attention alone. ``install(model)``, once
            such a model has its weights, adds the rest.
        tokens: as for ``enable_low_latency_gemm``: the numbers of sequences that will be decoded.
        warmup: as for it.

    Returns:
        ``report()``.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it.
        ImportError: transformers is missing, or its attention is not the one that we know.
        CompileError, ToolchainError: the kernels cannot be built here.
    """
    checks.check_flags(locals(), "warmup")
    _check_model(model)
    _check_engine()
    from k3cupy.engines import transformers_attention as ours
    from k3cupy.engines import transformers_later

    if model is None:
        transformers_later.exchange_later(_exchange)
        return report()
    from k3cupy.torch.torch_linear import LowLatencyLinear

    theirs = ours.AbsorbedAttention.__base__
    found = {name: m for name, m in model.named_modules() if isinstance(m, theirs)}
    if not found:
        hint = "it is for models such as transformers' DeepseekV3ForCausalLM"
        reject("model", "a module with DeepseekV3Attention layers", type(model).__name__, hint)
    enabled = {m for m in model.modules() if type(m) is LowLatencyLinear}
    try:
        enable_low_latency_gemm(model, tokens=tokens, warmup=warmup)
        for layer in model.modules():
            if type(layer) is LowLatencyLinear and layer not in enabled:
                layer.__dict__[_MARK] = True
        for layer, target in zip(found.values(), _targets_of(found, ours), strict=True):
            if _exchange(layer, target):
                layer.join(tokens, warmup=warmup)
        if warmup:
            _warm_up(found.values(), ours)
    except BaseException:  # also an interrupted compilation
        uninstall(model)
        raise
    return report()


def uninstall(model: nn.Module | None = None) -> int:
    """Undo ``install``: the layers have transformers' own classes, weights and forwards again.

    Linear layers that were enabled before ``install`` stay enabled.

    Args:
        model: as for ``install``; None for everything that was installed, and its copies.

    Returns:
        The number of attention layers that were given back.

    Raises:
        TypeError: it is no module.
    """
    _check_model(model)
    _check_engine()
    from k3cupy.engines import transformers_attention as ours
    from k3cupy.engines import transformers_later
    from k3cupy.torch import torch_linear

    if model is None:
        transformers_later.exchange_no_more()
        modules = [*ours.layers, *torch_linear.exchanged]
    else:
        modules = list(model.modules())
    for layer in modules:
        if layer.__dict__.pop(_MARK, False):
            torch_linear.exchange_back(layer)
    given_back = sum(_give_back(layer) for layer in modules)
    in_use = {ours.LATER} | ours.in_use()
    for target in ours.targets.values():
        if target.installed and (model is None or target.name not in in_use):
            target.leave("it was uninstalled")
    return given_back


def report() -> EngineReport:
    """Say which attention layers come to us, and what became of their calls in this process.

    Linear layers are counted in ``k3cupy.dispatch_report()``. Calls inside code that
    ``torch.compile`` has made are not counted, nor are those that a CUDA graph replays.

    Returns:
        One row for the layers of a model that differ only in their numbers.
    """
    _check_engine()
    from k3cupy.engines import transformers_attention as ours

    return EngineReport(_ENGINE, [target.row() for target in ours.targets.values()])


def _targets_of(found: dict[str, Any], ours: Any) -> list[Target]:
    """Return the target of each layer: one for all whose names differ only in numbers.

    Where some of those can be exchanged and some cannot, one that cannot has a target of its own.
    So it has where the layers of another model are installed by the name of all.
    """

    def row(name: str) -> str:
        return f"attention of {name or 'the module itself'}"

    rows = {name: row(re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)) for name in found}
    fits = {name: not ours.why_not(layer) for name, layer in found.items()}
    served = {rows[name] for name in found if fits[name]} | ours.in_use(set(found.values()))
    own = {name for name in found if not fits[name] and rows[name] in served}
    return [ours.target_of(row(name) if name in own else rows[name]) for name in found]


def _warm_up(layers: Iterable[Any], ours: Any) -> None:
    """Load the epilogue for the layers that are on GPUs, so that a first call may be captured."""
    wanted = set()
    for layer in layers:
        if type(layer) is ours.AbsorbedAttention and layer.kv_b_proj.weight.is_cuda:
            weight = layer.kv_b_proj.weight
            kind = str(weight.dtype).removeprefix("torch.")
            if weight.dtype in ours.EPILOGUE:
                wanted.add((weight.device.index, kind, bool(layer.config.rope_interleave)))
    for device, kind, rope in wanted:
        compile_for("mla_decode", device=device, progress=False, dtype=kind, rope=rope)


def _exchange(layer: Any, target: Target) -> bool:
    """Let a layer's calls come to us, or give it back where they cannot; return which."""
    from k3cupy.engines import transformers_attention as ours

    reason = ours.why_not(layer)
    if reason:
        _give_back(layer)
        ours.leave(target, reason)
        return False
    layer.__class__ = ours.AbsorbedAttention
    layer.target_name = target.name
    target.install()
    ours.layers.add(layer)
    return True


def _give_back(layer: Any) -> bool:
    """Make a layer what it was, and return whether it was ours."""
    from k3cupy.engines import transformers_attention as ours

    if type(layer) is not ours.AbsorbedAttention:
        return False
    layer.part()
    for name in ("_joined", "_parts", "_apart", "_versions", "target_name"):
        layer.__dict__.pop(name, None)
    layer.__class__ = ours.AbsorbedAttention.__base__
    ours.layers.discard(layer)
    return True


def _check_model(model: Any) -> None:
    torch = pytorch()
    if model is not None and (torch is None or not isinstance(model, torch.nn.Module)):
        reject("model", "a torch.nn.Module, or None", type(model).__name__, error=TypeError)


def _check_engine() -> None:
    """Raise unless transformers is there, with an attention whose arguments we know."""
    try:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs
    except ImportError as error:
        raise ImportError(
            "transformers: expected 5.17 or newer, got none that has DeepSeek-V3. Install it: "
            "pip install 'transformers>=5.17'"
        ) from error
    names = list(inspect.signature(theirs.DeepseekV3Attention.forward).parameters)[1:]
    if tuple(names[:3]) != _KNOWN or not {*names[3:4]} & {*_CACHE}:
        raise ImportError(
            f"transformers: expected the attention of 5.17 to 5.24, with the arguments "
            f"{', '.join((*_KNOWN, _CACHE[0]))}, got {', '.join(names)}"
        )
