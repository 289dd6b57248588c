"""The latent cache of a DeepSeek-V3 model of transformers: 576 values a token and layer, in pages.

It needs transformers. ``k3cupy.engines.transformers`` has the name of the class, and does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.cache_utils import Cache, CacheLayerMixin

from k3cupy.runtime.errors import reject, shown


class Shape(NamedTuple):
    """What all layers of a latent cache have in common.

    Attributes:
        rank: values of the latent, 512.
        rope: values of the rotated key, 64.
        pairs: whether the model rotates neighbours; the cache then keeps them side by side.
        block_size: tokens in a block.
        tokens: of one sequence, a multiple of ``block_size``.
    """

    rank: int
    rope: int
    pairs: bool
    block_size: int
    tokens: int


class LatentLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer.

    Attributes:
        latent: [num_blocks, block_size, 576]; each sequence has a range of blocks of its own.
        slots: [batch], where the next token of each sequence goes: block * block_size + offset.
        rows: [batch], the numbers from 0 on.
        first: [batch], zeros.
    """

    is_compileable = True
    is_sliding = False
    is_croppable = True

    latent: Tensor
    slots: Tensor
    rows: Tensor
    first: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.batch_size = 0
        # Of calls that run now. What a graph replays or a compiler has made is not counted, for a
        # number that changes at each call would be compiled anew at each call.
        self._counted = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the tensors: sizes but the batch are known, type and device are those of a key."""
        self.initialize(key_states.shape[0], key_states.dtype, key_states.device)

    def initialize(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the tensors."""
        shape = self.shape
        self.batch_size, self.dtype, self.device = batch, dtype, device
        blocks = batch * shape.tokens // shape.block_size
        width = shape.rank + shape.rope
        self.latent = torch.zeros(blocks, shape.block_size, width, dtype=dtype, device=device)
        self.rows = torch.arange(batch, device=device)
        self.first = torch.zeros_like(self.rows)
        self.slots = self.rows * shape.tokens
        self._mark_static(self.latent, self.slots)
        self.is_initialized = True

    @staticmethod
    def _mark_static(*tensors: Tensor) -> None:
        """Let a compiled step write tensors in a CUDA graph."""
        if not is_compiling():
            for tensor in tensors:
                torch._dynamo.mark_static_address(tensor)

    def check_model(self, rank: int, rope: int, pairs: bool) -> None:
        """Refuse a model of another config than the one that the cache was made of."""
        shape = self.shape
        if (shape.rank, shape.rope, shape.pairs) != (rank, rope, pairs):
            names = "kv_lora_rank {}, qk_rope_head_dim {} and rope_interleave {}"
            expected = f"a LatentCache of the model's {names.format(rank, rope, pairs)}"
            got = f"one of {names.format(shape.rank, shape.rope, shape.pairs)}"
            reject("cache", expected, got, "Make it of the config of the model that it is for")

    def by_sequence(self) -> Tensor:
        """Return the cache as [batch, tokens, 576], a view."""
        return self.latent.view(self.batch_size, self.shape.tokens, -1)

    def insert(self, rows: Tensor) -> None:
        """Write one row a sequence, [batch, 576], at its slot."""
        self.latent.view(-1, rows.shape[-1]).index_copy_(0, self.slots, rows)

    def check_room(self, tokens: int) -> None:
        """Refuse tokens that do not fit, as far as the host knows how many there are."""
        if is_compiling() or (self.slots.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if self._counted + tokens > self.shape.tokens:
            raise ValueError(
                f"max_cache_len: expected room for {self._counted + tokens} tokens a sequence, got "
                f"{self.shape.tokens}. Make the LatentCache larger, or reset it"
            )
        self._counted += tokens

    def advance(self, tokens: int) -> None:
        """Let the next token of each sequence come behind these."""
        self.slots.add_(tokens)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write latents and rotated keys as transformers' own attention has them; return all.

        Args:
            key_states: [batch, 1, length, 512], the latents behind their norm.
            value_states: [batch, 1, length, 64], the rotated keys, first halves then second ones.
            *args: what other caches take.
            **kwargs: what other caches take.

        Returns:
            Both, [batch, 1, tokens, ...], in the order in which they came.

        Raises:
            ValueError: the cache is of other widths or another batch, or is full.
        """
        # How the key is rotated does not show in it, and is translated back where it was not.
        self.check_model(key_states.shape[-1], value_states.shape[-1], self.shape.pairs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, length, _ = key_states.shape
        if batch != self.batch_size:
            reject("hidden_states", f"a batch of {self.batch_size} as in the cache", f"{batch}")
        self.check_room(length)
        keys = value_states[:, 0]
        new = torch.cat((key_states[:, 0], pairs_of(keys) if self.shape.pairs else keys), dim=-1)
        slots = self.slots[:, None] + torch.arange(length, device=self.device)
        self.latent.view(-1, new.shape[-1]).index_copy_(0, slots.flatten(), new.flatten(0, 1))
        self.advance(length)
        latents, keys = self.by_sequence().split((self.shape.rank, self.shape.rope), dim=-1)
        return latents.unsqueeze(1), (halves_of(keys) if self.shape.pairs else keys).unsqueeze(1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens a mask has, and where it begins."""
        return self.shape.tokens, 0

    def get_seq_length(self) -> Any:
        """Return the tokens of a sequence: a tensor, which the host need not read."""
        return self.slots[0] if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return how many tokens of a sequence there is room for."""
        return self.shape.tokens

    def reset(self) -> None:
        """Forget all tokens; the tensors stay where they are."""
        self._counted = 0
        if self.is_initialized:
            self.latent.zero_()
            torch.mul(self.rows, self.shape.tokens, out=self.slots)

    def offload(self) -> None:
        """Move the rows to the host's memory; CUDA graphs that write them are to be made anew."""
        if self.is_initialized:
            self.latent = self.latent.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Move the rows back to where the model is, as is needed before the next step."""
        if self.is_initialized and self.latent.device != self.device:
            self.latent = self.latent.to(self.device, non_blocking=True)
            self._mark_static(self.latent)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each sequence go on from another's tokens, in place."""
        if self.is_initialized:
            rows = self.by_sequence()
            rows.copy_(rows.index_select(0, beam_idx.to(rows.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of each sequence, given as a negative number."""
        if tokens_to_remove > 0:
            reject("tokens_to_remove", "a number of at most 0", shown(tokens_to_remove))
        if self.is_initialized:
            self._counted = max(0, self._counted + tokens_to_remove)
            first = self.rows * self.shape.tokens
            torch.maximum(self.slots + tokens_to_remove, first, out=self.slots)


class Step(NamedTuple):
    """What the layers of one step share: made from these inputs, and last used by this layer."""

    rotation: Any
    mask: Tensor | None
    versions: tuple[int, ...]
    layer: int
    table: Tensor
    bias: Tensor | None


class LatentCache(Cache):  # type: ignore[misc]
    """A cache of DeepSeek-V3 latents, with which installed layers decode in the absorbed form.

    It is transformers' ``StaticCache`` in all that callers see: of a fixed size, made at the first
    call, fit for CUDA graphs and ``torch.compile``; layers that are not installed use it too. Each
    token is one row of 576 values: the latent, then the rotated key, neighbours side by side where
    the model rotates neighbours. Sequences of a batch have ranges of blocks of their own; shorter
    prompts are padded on the left, as ``generate`` has them.

    Args:
        config: of the model.
        max_cache_len: tokens of a sequence, prompt and answer; rounded up to whole blocks.
        block_size: tokens of a block.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it.
    """

    def __init__(self, config: Any, max_cache_len: int, *, block_size: int = 64) -> None:
        config = (
            config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        )
        if not isinstance(getattr(config, "kv_lora_rank", None), int):
            reject("config", "that of a DeepSeek-V3 model", type(config).__name__, error=TypeError)
        for name, value in (("max_cache_len", max_cache_len), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                reject(name, "a number of tokens, at least 1", shown(value))
        shape = Shape(
            rank=config.kv_lora_rank,
            rope=config.qk_rope_head_dim,
            pairs=bool(config.rope_interleave),
            block_size=block_size,
            tokens=-(-max_cache_len // block_size) * block_size,
        )
        super().__init__(layers=[LatentLayer(shape) for _ in range(config.num_hidden_layers)])
        self._step: Step | None = None

    def reset(self) -> None:
        """Forget all tokens; the tensors stay where they are."""
        super().reset()
        self._step = None

    def step(
        self, layer: int, rotation: tuple[Tensor, Tensor], mask: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return the RoPE table and the mask as numbers to add, made once for the layers of a step.

        A layer takes what an earlier one has made of the very same inputs. The first layer of a
        step makes them anew, also of the same inputs: those may have been written since.

        Args:
            layer: the number of the layer that asks.
            rotation: cosines and sines, [1 or batch, 1, 64] each.
            mask: [1 or batch, 1, 1, tokens], bool (True is seen) or numbers to add; or None.
            dtype: of the scores.

        Returns:
            The table, [1 or batch, 64] float32, cosines then sines; the mask, [1 or batch, 1,
            tokens], or None.
        """
        if is_compiling():  # the compiler finds what is computed twice
            return _table_of(rotation), _bias_of(mask, dtype)
        known, versions = self._step, _versions_of((*rotation, mask))
        if (
            known is None
            or known.rotation is not rotation
            or known.mask is not mask
            or known.versions != versions
            or known.layer >= layer
        ):
            made = (_table_of(rotation), _bias_of(mask, dtype))
            known = Step(rotation, mask, versions, layer, *made)
        self._step = known._replace(layer=layer)
        return known.table, known.bias


def pairs_of(x: Tensor) -> Tensor:
    """Return [.., 64] in neighbouring pairs, of first halves then second ones."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def halves_of(x: Tensor) -> Tensor:
    """Return [.., 64] as first halves then second ones, of neighbouring pairs."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _table_of(rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return float32 [rows, 64] of cosines and sines that each hold their 32 numbers twice."""
    cos, sin = (t[:, 0, : t.shape[-1] // 2] for t in rotation)
    return torch.cat((cos, sin), dim=-1).float()


def _bias_of(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[:, 0]
    return bias_of(mask, dtype) if mask.dtype == torch.bool else mask.to(dtype)


def bias_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add. They are finite: a row that sees nothing is not NaN."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def _versions_of(tensors: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """Return how often PyTorch saw each written; tensors of inference mode have no count."""
    return tuple(t._version for t in tensors if t is not None and not t.is_inference())
