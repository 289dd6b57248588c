"""DeepSeek-V3's attention with an absorbed decode: keys and values are never expanded.

A token's scores against the cache are those of its query in the space of the latents, so W_UK is
multiplied into the query and W_UV into the output, once a token instead of once a cached row. This
module needs transformers; ``k3cupy.engines.transformers`` installs what is here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.linear import Linear
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RMSNorm,
    rotate_half,
)

from k3cupy.constants import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from k3cupy.engines.report import Target
from k3cupy.engines.transformers_cache import LatentCache, LatentLayer, bias_of
from k3cupy.ops.mla_decode import fused_mla_decode_q_concat_kv_cache_insert
from k3cupy.torch.modules import enable_low_latency_gemm
from k3cupy.torch.torch_linear import LowLatencyLinear

LATER = "attention of models made later"
"""The target of layers that are exchanged when they are made."""

JOINED = "q_a and kv_a in one product"
"""The target of the product behind which the two of transformers stand."""

COPIED = "the weights were copied: install again"
"""Why those of a copy are not joined, whose source's are."""

targets: dict[str, Target] = {}
"""By name; a layer holds only the name, for a layer is copied and its counts are not."""

layers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Layers whose calls come to us, copies too, which are to be given back."""

_PLAIN = (Tensor, nn.Parameter)
EPILOGUE = (torch.bfloat16, torch.float16)
"""Types that the decode epilogue takes; others go through PyTorch's operations."""

_TYPES = (*EPILOGUE, torch.float32, torch.float64)
_HAS_OUT_DTYPE = hasattr(torch.ops.aten.bmm, "dtype")
"""PyTorch 2.8 and newer: products of 16-bit numbers, not rounded to 16 bits."""


def target_of(name: str) -> Target:
    """Return the target of a name, which is made where there is none."""
    return targets.setdefault(name, Target(name))


def in_use(besides: Collection[nn.Module] = ()) -> set[str]:
    """Return the names of the targets to which a layer's calls come, of layers besides these."""
    others = [layer for layer in layers if layer not in besides]
    joined = {JOINED for layer in others if layer._joined is not None}
    return joined | {layer.target_name for layer in others}


def leave(target: Target, reason: str) -> None:
    """Say that calls do not come to us, and why, unless those of other layers still do."""
    if target.name not in in_use():
        target.leave(reason)


def why_not(layer: nn.Module) -> str:
    """Return in words why a layer's decode cannot be absorbed, or ``""``."""
    if type(layer) not in (DeepseekV3Attention, AbsorbedAttention):
        return f"it is a {type(layer).__name__}, not DeepseekV3Attention itself"
    if "forward" in vars(layer):
        return "its forward was replaced, by a wrapper or a hook: install before that is done"
    widths = layer.kv_lora_rank, layer.qk_rope_head_dim
    if widths != (KV_LORA_RANK, QK_ROPE_HEAD_DIM):
        return (
            f"kv_lora_rank and qk_rope_head_dim are {widths[0]} and {widths[1]}: the decode "
            f"epilogue takes {KV_LORA_RANK} and {QK_ROPE_HEAD_DIM}"
        )
    if layer.num_key_value_groups != 1:
        return f"{layer.num_key_value_groups} heads share a key: latent attention has one a head"
    return _why_not_read(layer.kv_b_proj, "kv_b_proj")


def _why_not_read(linear: nn.Module, name: str) -> str:
    """Return why the weight of a linear layer cannot stand for its forward, or ``""``."""
    if type(linear) not in (Linear, LowLatencyLinear):
        return f"{name} is a {type(linear).__name__}, not an nn.Linear itself"
    weight = linear._parameters.get("weight")
    if type(weight) not in _PLAIN:
        return f"the weight of {name} is no plain tensor"
    if linear._parameters.get("bias") is not None:
        return f"{name} has a bias"
    if _is_watched(linear):
        return f"{name} has a hook or a forward of its own, which would not be called"
    return ""


def _is_watched(module: nn.Module) -> bool:
    """Return whether somebody wants to see the calls of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


class AbsorbedAttention(DeepseekV3Attention):  # type: ignore[misc]
    """``DeepseekV3Attention`` that decodes over a ``LatentCache`` in the absorbed form.

    Whatever else comes goes to transformers' own forward: prompts, other caches, training. The
    weights of q_a and kv_a lie in one tensor, of which the two parameters are views, so that one
    product computes both; names, values and the state dict are as they were.
    """

    target_name = LATER
    _joined: nn.Linear | None = None
    _parts: tuple[Any, Any] = (None, None)
    _apart = "install(model) was not called for them"
    _versions: tuple[int, int] = (-1, -1)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: the weight of both products would be a second."""
        state = dict(self.__dict__)
        if state.pop("_joined", None) is not None:
            state.update(_parts=(None, None), _apart=COPIED)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy of a layer, or what was pickled: its calls come to us too."""
        super().__setstate__(state)
        layers.add(self)
        target_of(self.target_name).install()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output, [B, T, hidden], and the weights of attention or None."""
        cache = kwargs.pop("cache", None) if past_key_values is None else past_key_values
        reason = self._why_not_now(hidden_states, attention_mask, cache, kwargs)
        if not is_compiling():
            target = target_of(self.target_name)
            if reason:
                target.hand_back(reason)
            else:
                target.served += 1
        if not reason:
            return self._decode(hidden_states, position_embeddings, attention_mask, cache), None
        # By place: the argument is past_key_values in some versions and cache in others.
        rest = (hidden_states, position_embeddings, attention_mask, cache)
        out: tuple[Tensor, Tensor | None] = super().forward(*rest, **kwargs)
        return out

    def _why_not_now(
        self, hidden: Tensor, mask: Tensor | None, cache: Any, kwargs: dict[str, Any]
    ) -> str:
        """Return why a call goes to transformers' own forward, or ``""``.

        Raises:
            ValueError: the cache was made of another config: later steps would read it wrongly.
        """
        if not isinstance(cache, LatentCache):
            return f"cache: expected a LatentCache, got {type(cache).__name__}"
        layer = cache.layers[self.layer_idx]
        pairs = bool(self.config.rope_interleave)
        layer.check_model(self.kv_lora_rank, self.qk_rope_head_dim, pairs)
        if hidden.shape[1] != 1:
            return "more than one token a sequence: keys and values are expanded"
        if kwargs.get("output_attentions") or getattr(self.config, "output_attentions", False):
            return "the weights of attention were asked for"
        if torch.is_grad_enabled() and (
            hidden.requires_grad or any(p.requires_grad for p in self.parameters())
        ):
            return "autograd is recording: call the model under torch.no_grad()"
        if torch.is_autocast_enabled(hidden.device.type):
            return "autocast is on"
        if self.training and self.attention_dropout:
            return "the model is in training mode, and attention has dropout"
        reason = _why_not_read(self.kv_b_proj, "kv_b_proj") if is_compiling() else why_not(self)
        if reason:
            return reason
        if mask is not None:
            wanted = (1, 1, layer.shape.tokens)
            if not isinstance(mask, Tensor) or tuple(mask.shape[1:]) != wanted:
                return f"attention_mask: expected None or one of [batch, 1, 1, {wanted[2]}]"
        weight = self.kv_b_proj.weight
        if hidden.dtype not in _TYPES or weight.dtype != hidden.dtype:
            return f"hidden_states are {hidden.dtype} and the weights {weight.dtype}"
        if layer.is_initialized and (layer.dtype, layer.batch_size) != (
            hidden.dtype,
            hidden.shape[0],
        ):
            return "the cache is of another type or another batch"
        return ""

    def _decode(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: LatentCache,
    ) -> Tensor:
        """Compute one token a sequence: [B, 1, hidden] to the same."""
        batch = hidden.shape[0]
        layer: LatentLayer = cache.layers[self.layer_idx]
        if not layer.is_initialized:
            layer.initialize(batch, hidden.dtype, hidden.device)
        layer.check_room(1)
        of_scores = torch.float32 if hidden.dtype in EPILOGUE else hidden.dtype
        table, bias = cache.step(self.layer_idx, rotation, mask, of_scores)
        q, latent = self._projected(hidden.reshape(batch, -1))
        q = q.view(batch, -1, self.qk_head_dim)
        q_nope, q_pe = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
        kv_c, k_pe = latent.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        w_uk, w_uv = self.kv_b_proj.weight.view(
            -1, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank
        ).split((self.qk_nope_head_dim, self.v_head_dim), dim=1)
        ql_nope = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)  # [B, H, 512]
        row = _normed(self.kv_a_layernorm, kv_c)
        query = self._query_and_insert(ql_nope, q_pe, row, k_pe, layer, rotation, table)
        if bias is None:
            seen = torch.arange(layer.shape.tokens, device=hidden.device) <= layer.slots[0]
            bias = bias_of(seen, of_scores)
        layer.advance(1)
        out = _attend(query, layer.by_sequence(), bias, self.scaling, self.kv_lora_rank)
        projected: Tensor = self.o_proj(_values(out, w_uv))
        return projected.view(batch, 1, -1)

    def _query_and_insert(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        layer: LatentLayer,
        rotation: tuple[Tensor, Tensor],
        table: Tensor,
    ) -> Tensor:
        """Join the query, [B, H, 576], and write the token's row into the cache."""
        pairs = layer.shape.pairs
        if ql_nope.dtype in EPILOGUE and pairs:
            positions = layer.first if table.shape[0] == 1 else layer.rows
            out: Tensor = fused_mla_decode_q_concat_kv_cache_insert(
                ql_nope,
                q_pe,
                kv_c,
                k_pe,
                layer.latent,
                layer.slots,
                positions=positions,
                cos_sin_cache=table,
            )
            return out
        rotate = _rotate_pairs if pairs else _rotate_halves
        cos, sin = rotation  # [1 or B, 1, 64]
        q_pe, k_pe = rotate(q_pe, cos, sin), rotate(k_pe.unsqueeze(1), cos, sin).squeeze(1)
        if ql_nope.dtype in EPILOGUE:
            out = fused_mla_decode_q_concat_kv_cache_insert(
                ql_nope, q_pe, kv_c, k_pe, layer.latent, layer.slots
            )
            return out
        layer.insert(torch.cat((kv_c, k_pe), dim=-1))
        return torch.cat((ql_nope, q_pe), dim=-1)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries, [B, H * 192], and the latent with its key, [B, 576]."""
        if self.q_lora_rank is None:
            return self.q_proj(x), self.kv_a_proj_with_mqa(x)
        joined = self._joined_now()
        if joined is None:
            q_a, latent = self.q_a_proj(x), self.kv_a_proj_with_mqa(x)
        else:
            width = self.q_a_proj.weight.shape[0]
            q_a, latent = joined(x).split((width, joined.weight.shape[0] - width), dim=-1)
        return self.q_b_proj(_normed(self.q_a_layernorm, q_a)), latent

    # --- One weight for q_a and kv_a

    def join(self, tokens: int | Sequence[int] | None = None, *, warmup: bool = False) -> str:
        """Lay the weights of q_a and kv_a into one tensor, of which they become views.

        Args:
            tokens: as for ``enable_low_latency_gemm``.
            warmup: as for it.

        Returns:
            Why they stay apart, or ``""``.
        """
        if self._joined is not None and self._has_parts() and self._is_joined(self._joined):
            enable_low_latency_gemm(self._joined, tokens=tokens, warmup=warmup)
            return ""
        reason = self._why_apart()
        if reason:
            self._keep(None, reason)
            leave(target_of(JOINED), reason)
            return reason
        parts = [self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight]
        with torch.no_grad():
            whole = torch.cat([part.data for part in parts])
        for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = view
        joined = nn.Linear(1, 1, bias=False, device="meta")
        joined.in_features, joined.out_features = whole.shape[1], whole.shape[0]
        joined.weight = nn.Parameter(whole, requires_grad=False)
        self._keep(joined)
        target_of(JOINED).install()
        enable_low_latency_gemm(joined, tokens=tokens, warmup=warmup)
        return ""

    def part(self) -> None:
        """Give the weights of q_a and kv_a their own memory back."""
        joined, parts = self._joined, self._parts
        if joined is None and self._apart == COPIED:
            one, other = (self._modules.get(name) for name in ("q_a_proj", "kv_a_proj_with_mqa"))
            parts = getattr(one, "weight", None), getattr(other, "weight", None)
        for part in parts:
            if type(part) in _PLAIN and _is_part(part, joined):
                part.data = part.data.clone()
        self._keep(None)

    def _keep(self, joined: nn.Linear | None, apart: str = "") -> None:
        # Past PyTorch's registration: the state dict and `parameters()` know the parts already.
        parts = (None, None)
        if joined is not None:
            parts = self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight
        self.__dict__.update(_joined=joined, _parts=parts, _apart=apart, _versions=(-1, -1))

    def _why_apart(self) -> str:
        """Return why the two weights cannot lie in one tensor, or ``""``."""
        if self.q_lora_rank is None:
            return "the queries are not compressed"
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            if reason := _why_not_read(getattr(self, name), name):
                return reason
        one, other = self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight
        if one.is_meta or other.is_meta:
            return "the weights are on the meta device"
        if one.is_inference() or other.is_inference():
            return "the weights were made in inference mode"
        if (one.dtype, one.device, one.shape[1:]) != (other.dtype, other.device, other.shape[1:]):
            return "the weights of q_a_proj and kv_a_proj_with_mqa differ in type or device"
        return ""

    def _has_parts(self) -> bool:
        """Return whether the layer still has the two weights that were joined."""
        names = zip(("q_a_proj", "kv_a_proj_with_mqa"), self._parts, strict=True)
        return all(
            type(getattr(self, name)) in (Linear, LowLatencyLinear)
            and getattr(self, name).weight is part
            for name, part in names
        )

    def _is_joined(self, joined: nn.Linear) -> bool:
        """Return whether the two parts are still the views that they became."""
        (one, other), whole = self._parts, joined.weight
        address = whole.data_ptr()
        return (
            one.data_ptr() == address
            and other.data_ptr() == address + one.numel() * one.element_size()
            and one.dtype is other.dtype is whole.dtype
        )

    def _joined_now(self) -> nn.Linear | None:
        """Return the layer of both products, or None where each is to run by itself."""
        joined, reason = self._joined, self._apart
        if joined is not None:
            reason = _why_not_read(self.q_a_proj, "q_a_proj")
            reason = reason or _why_not_read(self.kv_a_proj_with_mqa, "kv_a_proj_with_mqa")
        if is_compiling():  # the compiler then watches that they stay the same
            return joined if not reason and self._has_parts() else None
        if joined and not (reason or (self._has_parts() and self._is_joined(joined))):
            reason = "a weight of theirs was replaced: install again"
        target = target_of(JOINED)
        if joined is None or reason:
            target.hand_back(reason)
            return None
        target.served += 1
        # A write to a part is a write to the whole, which PyTorch does not see: they were joined
        # through `data`. The promise that the weight is static must not outlive it.
        one, other = self._parts
        versions = one._version, other._version
        if versions != self._versions:
            self.__dict__["_versions"] = versions
            torch.autograd.graph.increment_version(joined.weight)
        return joined

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert or move the layer, as ``to`` does, and join the weights where they are then."""
        was_joined = self._joined is not None or self._apart == COPIED
        out = super()._apply(fn, recurse)
        if was_joined:
            self.join()
        return out


def _is_part(weight: Tensor, joined: nn.Linear | None) -> bool:
    """Return whether a weight lies in the one of both products, which is lost where it is None.

    What was pickled as a view of one has the memory of the whole.
    """
    memory = weight.untyped_storage()
    if joined is None:
        return bool(memory.nbytes() > weight.nbytes)
    return bool(memory.data_ptr() == joined.weight.untyped_storage().data_ptr())


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Return x behind its RMSNorm, in one kernel where the module is transformers' own."""
    if type(norm) is DeepseekV3RMSNorm and norm.weight.dtype == x.dtype and not _is_watched(norm):
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    out: Tensor = norm(x)
    return out


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours and leave them side by side; the cosines are twice 32 numbers."""
    cos, sin = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each number of the first half with its counterpart of the second."""
    out: Tensor = x * cos + rotate_half(x) * sin
    return out


def _values(out: Tensor, w_uv: Tensor) -> Tensor:
    """Return the heads' values side by side, [B, H * 128], of [B, H, 512] and [H, 128, 512]."""
    heads, weights = out.transpose(0, 1), w_uv.transpose(1, 2)
    if is_compiling():
        return torch.bmm(heads, weights).transpose(0, 1).flatten(1)
    values = out.new_empty(*out.shape[:2], w_uv.shape[1])
    torch.bmm(heads, weights, out=values.transpose(0, 1))  # in place: a copy would be a kernel
    return values.flatten(1)


def _attend(query: Tensor, cache: Tensor, bias: Tensor, scaling: float, rank: int) -> Tensor:
    """Return the means of the latents, [B, H, 512], weighted by scores against the rows.

    Args:
        query: [B, H, 576].
        cache: [B, tokens, 576].
        bias: added to the scaled scores, [1 or B, 1, tokens] or [tokens].
        scaling: of the scores.
        rank: how much of a row is its latent.
    """
    keys = cache.transpose(1, 2)
    if bias.dtype == query.dtype:
        scores = torch.bmm(query, keys)
    elif query.is_cuda and _HAS_OUT_DTYPE:
        scores = torch.bmm(query, keys, out_dtype=bias.dtype)
    else:
        scores = torch.bmm(query.to(bias.dtype), keys.to(bias.dtype))
    weights = torch.add(bias, scores, alpha=scaling).softmax(dim=-1)
    return torch.bmm(weights.to(query.dtype), cache[..., :rank])
