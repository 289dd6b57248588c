"""Steps of an MLA layer around its epilogue, and whether what a kernel wrote of them is right.

The norms, the query front and the products with a matrix of each head stand between a small kernel
that writes their input and one that waits and reads their output. Weights come from the caller, one
piece of memory a layer, so that layers can take turns and find theirs cold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import k3cupy
from k3cupy.choose.gemm import FUSED_A, SKINNY
from k3cupy.constants import (
    DS_MLA_ROPE_OFFSET,
    DS_MLA_ROW_BYTES,
    DS_MLA_SCALE_OFFSET,
    DS_MLA_TILE,
    KV_LORA_RANK,
    LATENT_DIM,
    Q_LORA_RANK,
    QK_HEAD_DIM,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    V_HEAD_DIM,
)
from k3cupy.kernels import mla_value
from k3cupy.kernels.mla_query import Variant
from k3cupy.ops.mla_separate import Product, absorbed_query, in_steps
from k3cupy.timing import cold
from k3cupy.timing.chain import Chain, consumer_of, producer_of
from k3cupy.timing.decode_step import BLOCK_SIZE
from k3cupy.timing.graphs import in_turns

QKV_A_WIDTH = Q_LORA_RANK + LATENT_DIM
EPSILON = 1e-6

_HIDDEN = 7168

_KV_B_DIM = QK_NOPE_HEAD_DIM + V_HEAD_DIM
_LEAST_BLOCKS = 64
_Q_GAIN = 0.05
"""Of weights about 1 wide it makes a query of 2 and an absorbed query of about 20."""

_Q_SCALE_INV, _CACHE_SCALE_INV = 0.05, 2.0
_ROUNDING = {1: 2.0**-4, 2: 2.0**-8}
"""Bytes of a stored value -> how far a rounding takes it off, relative."""

_OF_SUMS, _OF_SMALL, _OF_CHAIN = 2.0**-12, 2.0**-9, 0.03
"""How far an element may be off, of its row's size: by sums in fp32, by e4m3 where it is nearly 0,
by roundings on the way."""


def kv_b_shape(heads: int) -> tuple[int, int]:
    """Return the shape of the projection whose halves are W_UK and W_UV."""
    return heads * _KV_B_DIM, KV_LORA_RANK


def layer_shape(heads: int) -> tuple[int, int]:
    """Return rows of 512 values that hold q_b and behind it that projection."""
    rows, width = kv_b_shape(heads)
    return heads * QK_HEAD_DIM * (Q_LORA_RANK // width) + rows, width


def halves(kv_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W_UK [H, 128, 512] and W_UV [H, 512, 128] as engines have them, two views."""
    both = kv_b.view(-1, _KV_B_DIM, KV_LORA_RANK)
    return both[:, :QK_NOPE_HEAD_DIM], both[:, QK_NOPE_HEAD_DIM:].transpose(1, 2)


def _absorbed_by_bmm(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


def rms_norm(x: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """Return the norm of rows, in the type of x."""
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gains


def query_front(
    qkv_a: torch.Tensor, gains: torch.Tensor, w_q_b: torch.Tensor, w_uk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the absorbed query and the latent rows in float64, without a rounding on the way.

    Args:
        qkv_a: [B, 2112], of any type.
        gains: [2048], of the query and the latent part.
        w_q_b: [H * 192, 1536].
        w_uk: [H, 128, 512].
    """
    q_a, kv_c, k_pe = qkv_a.double().split([Q_LORA_RANK, KV_LORA_RANK, QK_ROPE_HEAD_DIM], 1)
    of_q, of_kv = gains.double().split([Q_LORA_RANK, KV_LORA_RANK])
    q = (rms_norm(q_a, of_q) @ w_q_b.double().T).view(len(q_a), -1, QK_HEAD_DIM)
    nope, rope = q.split([QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM], -1)
    absorbed = torch.einsum("bhd,hdr->bhr", nope, w_uk.double())
    return torch.cat([absorbed, rope], -1), torch.cat([rms_norm(kv_c, of_kv), k_pe], -1)


def _why_off(
    name: str, got: torch.Tensor, want: torch.Tensor, rounding: float, of_row: float
) -> str | None:
    """Say which element is off by more than its rounding and a share of its row's size, or None."""
    got = got.double()
    if not torch.isfinite(got).all():
        return f"an element of {name} is not finite"
    size = want.square().mean(-1, keepdim=True).sqrt()
    beyond = (got - want).abs() - want.abs() * rounding - size * of_row
    worst = int(beyond.argmax())
    if float(beyond.flatten()[worst]) <= 0:
        return None
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape))
    return f"element {place} of {name} is {got[place]:g}, not {want[place]:g}"


class NormStep:
    """The two RMSNorms behind the first projection.

    Attributes:
        inputs: of the call.
        outs: what it writes: q and kv_c_normed, side by side in memory.
    """

    def __init__(self, tokens: int, device: str = "cuda") -> None:
        normal = _normal(tokens, device)
        self._qkv_a = normal(tokens, QKV_A_WIDTH)
        self.gains = normal(Q_LORA_RANK + KV_LORA_RANK)
        q_weight, kv_weight = self.gains.split([Q_LORA_RANK, KV_LORA_RANK])
        self.inputs = {"qkv_a": self._qkv_a, "q_weight": q_weight, "kv_weight": kv_weight}
        self._written = normal(tokens * (Q_LORA_RANK + KV_LORA_RANK))
        q, kv = self._written.split([tokens * Q_LORA_RANK, tokens * KV_LORA_RANK])
        self.outs = q.view(tokens, -1), kv.view(tokens, -1)

    def run(self, config: Any = None) -> None:
        """Run the kernel; the weights are static."""
        options: dict[str, Any] = {"weight_is_static": True, "config": config}
        k3cupy.fused_q_kv_rmsnorm(**self.inputs, eps=EPSILON, out=self.outs, **options)

    def chain(self) -> Chain:
        """Return what writes qkv_a, and what reads both outputs."""
        return Chain(producer_of(self._qkv_a), consumer_of(self._written.view(-1, KV_LORA_RANK)))

    def check(self, body: Callable[[], Any]) -> str | None:
        """Let a body write the outputs, which held NaN, and say what is wrong, or None."""
        self._written.fill_(float("nan"))
        body()
        for name, got, want in zip(("q", "kv_c_normed"), self.outs, self._expected, strict=True):
            wrong = _why_off(name, got, want, _ROUNDING[2], _OF_SUMS)
            if wrong is not None:
                return wrong
        return None

    @functools.cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        wide = self._qkv_a.double()
        q, kv = wide[:, :Q_LORA_RANK], wide[:, Q_LORA_RANK : Q_LORA_RANK + KV_LORA_RANK]
        of_q, of_kv = (self.inputs[name].double() for name in ("q_weight", "kv_weight"))
        return rms_norm(q, of_q), rms_norm(kv, of_kv)


class QueryStep:
    """The query front: from qkv_a to mqa_q and the cache row, no RoPE.

    Attributes:
        arguments: of the call in one launch, weights and ``out`` aside.
        kv_cache: what it writes beside ``out``.
        out: mqa_q.
    """

    def __init__(self, kind: str, tokens: int, heads: int, device: str = "cuda") -> None:
        normal = _normal(tokens, device)
        variant = Variant.of_kind(kind)
        self._heads, self._cache = heads, variant.cache
        self._qkv_a = normal(tokens, QKV_A_WIDTH)
        self._gains = normal(Q_LORA_RANK + KV_LORA_RANK)
        self._gains[:Q_LORA_RANK] *= _Q_GAIN
        gains = self._gains.split([Q_LORA_RANK, KV_LORA_RANK])
        blocks = max(_LEAST_BLOCKS, -(-tokens // BLOCK_SIZE))
        width = DS_MLA_ROW_BYTES if variant.cache == "ds_mla" else LATENT_DIM
        cache_type = torch.bfloat16 if variant.cache == "same" else torch.uint8
        self.kv_cache = torch.zeros(blocks, BLOCK_SIZE, width, device=device, dtype=cache_type)
        random = torch.Generator(device=device).manual_seed(tokens)
        slots = torch.randperm(blocks * BLOCK_SIZE, device=device, generator=random)[:tokens]
        query_type = torch.float8_e4m3fn if variant.query_fp8 else torch.bfloat16
        self.out = torch.empty(tokens, heads, LATENT_DIM, device=device, dtype=query_type)
        self._epilogue: dict[str, Any] = {
            "kv_cache": self.kv_cache,
            "slot_mapping": slots,
            "ds_mla": variant.cache == "ds_mla",
        }
        if variant.query_fp8:
            self._epilogue["q_scale_inv"] = torch.tensor([_Q_SCALE_INV], device=device)
        if variant.cache == "fp8":
            self._epilogue["cache_scale_inv"] = torch.tensor([_CACHE_SCALE_INV], device=device)
        self.arguments = {
            "qkv_a": self._qkv_a,
            "q_norm_weight": gains[0],
            "kv_norm_weight": gains[1],
            "eps": EPSILON,
            **self._epilogue,
        }
        self._values = self._qkv_a.clone()
        self._expected: tuple[torch.Tensor, torch.Tensor] | None = None

    def cut(self, layer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the weights of a layer, a tensor of ``layer_shape``."""
        rows, _ = kv_b_shape(self._heads)
        w_uk, _ = halves(layer[-rows:])
        return {"w_q_b": layer[:-rows].view(-1, Q_LORA_RANK), "w_uk": w_uk}

    def run(self, layer: torch.Tensor, config: Any = None) -> None:
        """Run it as the public function does; the weights are static."""
        options: dict[str, Any] = {"weight_is_static": True, "config": config}
        k3cupy.fused_mla_decode_query(**self.arguments, **self.cut(layer), out=self.out, **options)

    def separate(self, layer: torch.Tensor, q_b: Product | None = None, bmm: bool = False) -> None:
        """Run the separate kernels.

        Args:
            layer: its weights.
            q_b: the second projection; None for a linear layer's.
            bmm: the absorbed product is the framework's.
        """
        given = {**self.arguments, **self.cut(layer), "out": self.out}
        options = {name: given.pop(name) for name in ("eps", "ds_mla")}
        absorbed = _absorbed_by_bmm if bmm else None
        in_steps(given, **options, weight_is_static=True, q_b=q_b, absorbed=absorbed)

    def chain(self) -> Chain:
        """Return what writes qkv_a, and what reads mqa_q."""
        return Chain(producer_of(self._qkv_a), consumer_of(self.out))

    def behind_projection(self) -> Chain:
        """Return the first projection, cold too and as a linear layer has it, and the consumer.

        That is where the query front sits: its weights stream while the projection still runs, as
        far as both find room on a multiprocessor.
        """
        x = torch.randn(len(self._qkv_a), _HIDDEN, device=self.out.device, dtype=torch.bfloat16)
        weights = cold.weights_of(QKV_A_WIDTH, _HIDDEN, cold.pool_of([(QKV_A_WIDTH, _HIDDEN)]))
        chosen = k3cupy.explain_low_latency_gemm(x, weights[0])
        product: Any = {FUSED_A: k3cupy.fused_a_gemm, SKINNY: k3cupy.skinny_gemm}.get(chosen.kernel)

        def project(weight: torch.Tensor) -> None:
            if product is None:
                torch.mm(x, weight.T, out=self._qkv_a)
            else:
                options = {"config": chosen.config, "weight_is_static": True}
                product(x, weight, out=self._qkv_a, **options)

        return Chain(in_turns(project, weights), consumer_of(self.out))

    def check(self, body: Callable[[torch.Tensor], Any], layer: torch.Tensor) -> str | None:
        """Let a body write ``out`` and the cache, and say what is wrong with them, or None.

        Args:
            body: a call that takes the weights of a layer.
            layer: the same in every check.
        """
        self._fill(body, layer)
        slots = self._epilogue["slot_mapping"]
        stored = self.kv_cache.view(torch.uint8).flatten(0, 1)
        rest = torch.ones(len(stored), device=stored.device, dtype=torch.bool)
        rest[slots] = False
        if stored[rest].any():
            return "kv_cache is written where it should not be"
        query, rows = self._wanted(layer)
        parts = (slice(KV_LORA_RANK), slice(KV_LORA_RANK, LATENT_DIM))
        rounding = _ROUNDING[self.out.element_size()]
        size = self.kv_cache.element_size()
        of_rows = _ROUNDING[size], _OF_SUMS if size > 1 else _OF_SMALL
        for part in parts:
            checked = (
                ("mqa_q", self._query(), query, (rounding, _OF_CHAIN)),
                ("kv_cache", self._rows(), rows, of_rows),
            )
            for name, got, want, limits in checked:
                wrong = _why_off(name, got[..., part], want[..., part], *limits)
                if wrong is not None:
                    return wrong
        return None

    def error(self, body: Callable[[torch.Tensor], Any], layer: torch.Tensor) -> float:
        """Return how far off mqa_q of a body is, relative (Frobenius), against float64."""
        self._fill(body, layer)
        want, _ = self._wanted(layer)
        return float((self._query() - want).norm() / want.norm())

    def _fill(self, body: Callable[[torch.Tensor], Any], layer: torch.Tensor) -> None:
        self._qkv_a.copy_(self._values)
        self.kv_cache.zero_()
        self.out.view(torch.uint8).fill_(0xFF)  # NaN in both types
        body(layer)

    def _query(self) -> torch.Tensor:
        """Return ``out`` as numbers of mqa_q's size."""
        found = self.out.float().double()
        return found / _Q_SCALE_INV if self.out.element_size() == 1 else found

    def _rows(self) -> torch.Tensor:
        """Return the rows of the tokens, as numbers."""
        stored = self.kv_cache.flatten(0, 1)[self._epilogue["slot_mapping"]]
        if self._cache == "same":
            return stored.double()
        codes = stored[:, : DS_MLA_SCALE_OFFSET if self._cache == "ds_mla" else LATENT_DIM]
        numbers = codes.contiguous().view(torch.float8_e4m3fn).float().double()
        if self._cache == "fp8":
            return numbers / _CACHE_SCALE_INV
        scales = stored[:, DS_MLA_SCALE_OFFSET:DS_MLA_ROPE_OFFSET].contiguous()
        tiles = numbers.unflatten(-1, (-1, DS_MLA_TILE))
        latent = tiles * scales.view(torch.float32).double()[..., None]
        rope = stored[:, DS_MLA_ROPE_OFFSET:].contiguous().view(torch.bfloat16).double()
        return torch.cat([latent.flatten(-2), rope], -1)

    def _wanted(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._expected is None:
            weights = self.cut(layer)
            self._expected = query_front(self._qkv_a, self._gains, **weights)
        return self._expected


class ValueStep:
    """A product with a matrix of each head: the value behind attention, or the absorbed query.

    Attributes:
        x: what is multiplied.
        out: what it writes.
    """

    def __init__(self, kind: str, tokens: int, heads: int, device: str = "cuda") -> None:
        normal = _normal(tokens, device)
        self._absorb = kind == mla_value.ABSORB
        self._written = normal(tokens, heads, QK_HEAD_DIM if self._absorb else KV_LORA_RANK)
        self.x = self._written[..., :QK_NOPE_HEAD_DIM] if self._absorb else self._written
        wide = normal(tokens, QKV_A_WIDTH + heads * V_HEAD_DIM)
        self._gate = wide[:, QKV_A_WIDTH:] if kind == mla_value.GATED else None
        shape = (heads, KV_LORA_RANK) if self._absorb else (heads * V_HEAD_DIM,)
        self.out = torch.empty(tokens, *shape, device=device, dtype=torch.bfloat16)
        self._expected: torch.Tensor | None = None

    def run(self, kv_b: torch.Tensor, config: Any = None) -> None:
        """Run the kernel; the weight is static."""
        w_uk, w_uv = halves(kv_b)
        options: dict[str, Any] = {"out": self.out, "weight_is_static": True, "config": config}
        if self._absorb:
            absorbed_query(self.x, w_uk, **options)
        else:
            k3cupy.fused_mla_decode_value(self.x, w_uv, self._gate, **options)

    def chain(self) -> Chain:
        """Return what writes x, and what reads the product."""
        return Chain(producer_of(self._written), consumer_of(self.out))

    def check(self, body: Callable[[torch.Tensor], Any], kv_b: torch.Tensor) -> str | None:
        """Let a body write ``out``, which held NaN, and say what is wrong with it, or None.

        Args:
            body: a call that takes the weight.
            kv_b: the same one in every check.
        """
        self.out.fill_(float("nan"))
        body(kv_b)
        if self._expected is None:
            w_uk, w_uv = (half.double() for half in halves(kv_b))
            weight = w_uk if self._absorb else w_uv
            product = torch.einsum("bhk,hkn->bhn", self.x.double(), weight)
            self._expected = product.reshape(self.out.shape)
            if self._gate is not None:
                self._expected *= self._gate.double().sigmoid()
        return _why_off("out", self.out, self._expected, _ROUNDING[2], _OF_SUMS)


def _normal(tokens: int, device: str) -> Callable[..., torch.Tensor]:
    """Return what makes random tensors, the same ones for the same number of tokens."""
    where: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    random = torch.Generator(device=device).manual_seed(tokens)
    return functools.partial(torch.randn, generator=random, **where)
