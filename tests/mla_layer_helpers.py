"""The operations around an MLA layer's epilogue under test: ready-made calls, and their judge."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import helpers
import mla_layer_oracle as layer_oracle
import oracle
import pytest
import torch
from helpers import BF16, guarded, random_values
from mla_helpers import NAMES, MlaCall
from mla_layer_oracle import HEAD_ROWS, KV_B_ROWS, NOPE, Q_RANK, QKV_A, V
from oracle import LATENT, ROPE

import k3cupy
from k3cupy.kernels import mla_query

EPS = 1e-6
NORM, QUERY, VALUE = "norm", "query", "value"
OPERATIONS = {
    NORM: "fused_q_kv_rmsnorm",
    QUERY: "fused_mla_decode_query",
    VALUE: "fused_mla_decode_value",
}
_EXPLAIN = {kind: name.replace("fused_", "explain_") for kind, name in OPERATIONS.items()}
_OUTPUTS = {NORM: ("q", "kv"), QUERY: ("mqa_q",), VALUE: ("out",)}
INPUTS = {
    NORM: ("qkv_a", "q_weight", "kv_weight"),
    QUERY: ("qkv_a", "q_norm_weight", "kv_norm_weight", "w_q_b", "w_uk"),
    VALUE: ("latent", "w_uv", "gate"),
}
WEIGHTS = {NORM: INPUTS[NORM][1:], QUERY: INPUTS[QUERY][1:], VALUE: ("w_uv",)}
"""What the promise of static weights is about."""


@dataclass
class LayerCall(MlaCall):
    """One call of an operation, with the judge of its outputs."""

    @property
    def name(self) -> str:
        return OPERATIONS[self.kind]

    @property
    def outputs(self) -> tuple[str, ...]:
        return _OUTPUTS[self.kind]

    @property
    def names_first(self) -> str:
        """The name of the input that comes from the kernel before."""
        return INPUTS[self.kind][0]

    @property
    def heads(self) -> int:
        weight = {NORM: "q_weight", QUERY: "w_uk", VALUE: "w_uv"}[self.kind]
        return int(self.args[weight].shape[0])

    def explain(self, **extra: Any) -> Any:
        return getattr(k3cupy, _EXPLAIN[self.kind])(**{**self.args, **extra})

    def output_shape(self, name: str) -> tuple[int, ...]:
        widths = {"q": (Q_RANK,), "kv": (LATENT,), "mqa_q": (self.heads, LATENT + ROPE)}
        return (self.tokens, *widths.get(name, (self.heads * V,)))

    def check_output(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.dtype == self.output_dtype(name), name
        assert tuple(tensor.shape) == self.output_shape(name), name
        assert tensor.is_contiguous(), name
        assert tensor.device == self.first.device, name
        if name == "mqa_q":
            exact, steps = (
                layer_oracle.query(self.args, tensor.dtype, in_steps=in_steps)
                for in_steps in (False, True)
            )
            by_framework = self.device == "cuda" and self.dtype is torch.float16
            if by_framework and self.tokens and self.explain().kernel == mla_query.SEPARATE:
                layer_oracle.assert_as_good(tensor, exact, steps, slack=layer_oracle.OF_FRAMEWORK)
            else:
                layer_oracle.assert_as_good(tensor, exact, steps)
            return
        want = self.expected_values() if name == "out" else self.expected_norm(name)
        oracle.assert_within(tensor.cpu(), oracle.Within(want.exact.cpu(), want.error.cpu()), name)

    def expected_values(self) -> oracle.Within:
        return layer_oracle.values(self.args["latent"], self.args["w_uv"], self.args.get("gate"))

    def expected_norm(self, name: str) -> oracle.Within:
        columns = slice(Q_RANK) if name == "q" else slice(Q_RANK, Q_RANK + LATENT)
        gain = self.args[f"{name}_weight"]
        return layer_oracle.normed(self.first[:, columns], gain, self.args["eps"])

    def check_cache(self, before: torch.Tensor) -> None:
        """Bit for bit the cache of the epilogue that is fed with the norm's output."""
        want = copy.copy(self.cache)
        want.storage = before.to(self.device)
        want.tensor = want.view_of(want.storage)
        if self.tokens:
            self.epilogue(kv_cache=want.tensor)
        text = "bytes of the cache's allocation"
        oracle.assert_same_bits(self.cache.snapshot(), want.snapshot(), text)

    def epilogue(self, **given: Any) -> torch.Tensor:
        """The epilogue behind separate kernels, for one head, whose query is zero if not given."""
        a = self.args
        _, kv = k3cupy.fused_q_kv_rmsnorm(
            self.first, a["q_norm_weight"], a["kv_norm_weight"], eps=a["eps"]
        )
        zeros = self.first.new_zeros(self.tokens, 1, LATENT)
        names = ("slot_mapping", "positions", "cos_sin_cache", "q_scale_inv", "cache_scale_inv")
        values = {
            "ql_nope": zeros,
            "q_pe": zeros[..., :ROPE],
            "kv_c_normed": kv,
            "k_pe": self.first[:, Q_RANK + LATENT : QKV_A],
            "ds_mla": a.get("ds_mla", False),
            **{name: a[name] for name in names if name in a},
            **given,
        }
        result: torch.Tensor = getattr(k3cupy, NAMES["decode"])(**values)
        return result


# --- Calls ---------------------------------------------------------------------------------------


def _scaled(shape: Sequence[int], dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    """Normal values, as many columns summed as the last axis has giving about 1."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=rng) * shape[-1] ** -0.5).to(dtype).to(device)


@functools.lru_cache(maxsize=8)
def gains(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of both norms, around 1."""
    rng = torch.Generator().manual_seed(1)
    found = (1 + 0.2 * torch.randn(n, generator=rng) for n in (Q_RANK, LATENT))
    first, second = (guarded(gain.to(dtype), device) for gain in found)
    return first, second


@functools.lru_cache(maxsize=8)
def up_projections(
    heads: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """w_q_b, and the weight [H, 256, 512] of which w_uk and w_uv are views. Nobody writes them."""
    w_q_b = _scaled((heads * HEAD_ROWS, Q_RANK), dtype, 2, device)
    return w_q_b, _scaled((heads, KV_B_ROWS, LATENT), dtype, 3, device)


def qkv_a_of(
    tokens: int,
    dtype: torch.dtype,
    device: str,
    *,
    seed: int = 0,
    width: int = QKV_A,
    shift: int = 0,
) -> torch.Tensor:
    """Columns of a wider tensor that is NaN everywhere else; each token has a size of its own."""
    values = random_values((tokens, QKV_A), torch.float32, 10 * seed)
    values *= 0.2 + torch.arange(tokens)[:, None] % 5
    return guarded(values.to(dtype), device, strides=(width, 1), shift=shift)


def make_norm(
    tokens: int = 8,
    *,
    dtype: torch.dtype = BF16,
    device: str = "cpu",
    seed: int = 0,
    eps: float = EPS,
    **layout: Any,
) -> LayerCall:
    qkv_a = qkv_a_of(tokens, dtype, device, seed=seed, **layout)
    weights = zip(INPUTS[NORM][1:], gains(dtype, device), strict=True)
    return LayerCall(NORM, {"qkv_a": qkv_a, **dict(weights), "eps": eps})


def make_query(
    tokens: int = 8,
    heads: int = 3,
    *,
    dtype: torch.dtype = BF16,
    device: str = "cpu",
    seed: int = 0,
    eps: float = EPS,
    width: int = QKV_A,
    shift: int = 0,
    **settings: Any,
) -> LayerCall:
    """A call; the cache, its slots, RoPE and the scales are those of a call of the epilogue."""
    settings = {"q_scale_inv": 0.75, "cache_scale_inv": 1.5, **settings}
    call = helpers.make_call(tokens, 1, dtype=dtype, device=device, seed=seed, **settings)
    w_q_b, kv_b = up_projections(heads, dtype, device)
    args = {
        "qkv_a": qkv_a_of(tokens, dtype, device, seed=seed, width=width, shift=shift),
        **dict(zip(("q_norm_weight", "kv_norm_weight"), gains(dtype, device), strict=True)),
        "w_q_b": w_q_b,
        "w_uk": kv_b[:, :NOPE],
        "slot_mapping": call.slot_mapping,
        "eps": eps,
        **call.options,
    }
    return LayerCall(QUERY, args).boxed(kv_cache=call.cache)


def make_value(
    tokens: int = 8,
    heads: int = 3,
    *,
    dtype: torch.dtype = BF16,
    device: str = "cpu",
    seed: int = 0,
    gate: bool = True,
    packed: bool = False,
) -> LayerCall:
    """A call; `packed` has a weight of contiguous columns, else it is a view of kv_b's."""
    w_uv = up_projections(heads, dtype, device)[1][:, NOPE:].transpose(1, 2)
    latent = random_values((tokens, heads, LATENT), dtype, 10 * seed)
    args = {
        "latent": guarded(latent, device),
        "w_uv": guarded(w_uv.cpu().contiguous(), device) if packed else w_uv,
    }
    if gate:
        values = random_values((tokens, heads * V), dtype, 10 * seed + 1)
        args["gate"] = guarded(values, device, strides=(heads * V + 64, 1))
    return LayerCall(VALUE, args)


@dataclass(frozen=True)
class LayerForm:
    """An operation with its formats."""

    name: str
    kind: str
    settings: dict[str, Any]

    @property
    def function(self) -> str:
        """The operation's public name."""
        return OPERATIONS[self.kind]

    @property
    def inputs(self) -> tuple[str, ...]:
        without = () if self.settings.get("gate", True) else ("gate",)
        return tuple(name for name in INPUTS[self.kind] if name not in without)

    @property
    def outputs(self) -> tuple[str, ...]:
        return _OUTPUTS[self.kind]

    @property
    def has_cache(self) -> bool:
        """With a cache come slots, and positions may come."""
        return self.kind == QUERY

    @property
    def cache_width(self) -> int:
        return oracle.DS_MLA_BYTES if "ds_mla" in self.name else oracle.ROW

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales that it takes."""
        names = {"fp8": ("q_scale_inv", "cache_scale_inv"), "uint8": ("cache_scale_inv",)}
        found = names.get(self.settings.get("cache", ""), ())
        return ("q_scale_inv",) if self.name == "query-of-fp8" else found

    @property
    def tensors(self) -> tuple[str, ...]:
        """All arguments that can be tensors, but for `out`."""
        rest = ("kv_cache", "slot_mapping", "positions", "cos_sin_cache") if self.has_cache else ()
        return (*self.inputs, *rest, *self.scales)

    def written(self, *, rope: bool) -> tuple[str, ...]:
        """Arguments that a call writes."""
        return ("kv_cache",) if self.has_cache else ()

    def make(
        self, tokens: int = 8, heads: int = 3, *, rope: bool = False, **options: Any
    ) -> LayerCall:
        """A call; RoPE is left out where the operation has none."""
        if not self.has_cache:
            options = {n: v for n, v in options.items() if n not in ("num_blocks", "scale_tensors")}
        settings = {**self.settings, **options} | ({"rope": rope} if self.has_cache else {})
        if self.kind == NORM:
            return make_norm(tokens, **settings)
        make: Callable[..., LayerCall] = make_query if self.kind == QUERY else make_value
        return make(tokens, heads, **settings)

    def __str__(self) -> str:
        return self.name


LAYER_FORMS = {
    name: LayerForm(name, kind, settings)
    for name, kind, settings in (
        ("norm", NORM, {}),
        ("query", QUERY, {}),
        ("query-fp8", QUERY, {"cache": "fp8", "q_fp8": True}),
        ("query-of-fp8", QUERY, {"q_fp8": True}),
        ("query-uint8", QUERY, {"cache": "uint8"}),
        ("query-ds_mla", QUERY, {"cache": "ds_mla"}),
        ("value", VALUE, {"gate": False}),
        ("value-gate", VALUE, {}),
        ("value-packed", VALUE, {"packed": True, "gate": False}),
        ("value-packed-gate", VALUE, {"packed": True}),
    )
}
QUERY_FORMS = [form for form in LAYER_FORMS.values() if form.kind == QUERY]
each_layer_form = pytest.mark.parametrize("form", LAYER_FORMS.values(), ids=str)


def in_one_launch(device: str) -> Any:
    """The configuration that makes a query one launch, whatever tables say, where a GPU can."""
    if device == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        return None
    return mla_query.UNTUNED


# --- Layouts -------------------------------------------------------------------------------------

Change = Callable[[LayerCall], LayerCall]


def wider(values: torch.Tensor, gap: int, shift: int = 0) -> torch.Tensor:
    """The same rows, `gap` elements between two of them, in NaN."""
    strides, step = [1], values.shape[-1] + gap
    for size in values.shape[-2::-1]:
        strides.insert(0, step)
        step *= max(size, 1)
    return guarded(values.cpu(), values.device.type, strides=strides[-values.ndim :], shift=shift)


def in_layout(name: str, gap: int, shift: int = 0) -> Change:
    """Changes the layout of one input."""
    return lambda call: call.given(**{name: wider(call.args[name], gap, shift)})


def heads_first(name: str, gap: int = 0) -> Change:
    """The first two axes exchanged in memory, as a batched product leaves them."""
    return lambda call: call.given(
        **{name: wider(call.args[name].transpose(0, 1), gap).transpose(0, 1)}
    )


def rows_last(name: str, gap: int, shift: int = 0) -> Change:
    """The last two axes exchanged in memory."""
    return lambda call: call.given(
        **{name: wider(call.args[name].transpose(1, 2), gap, shift).transpose(1, 2)}
    )
