"""The MLA epilogues under test: ready-made calls in every form, and their judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import helpers
import oracle
import pytest
import torch
from helpers import (
    BF16,
    E4M3,
    NAN_BYTE,
    Guarded,
    check_cache_rows,
    check_guards,
    default_slots,
    guarded,
    random_values,
    rope_table,
)

import k3cupy

NOPE, ROPE, QK, V = 128, 64, 192, 128
INSERTS = ("insert", "ds_mla", "fp8")
CONCATS = ("concat", "concat_fp8")
KINDS = (*INSERTS, *CONCATS)
NAMES = {
    "decode": "fused_mla_decode_q_concat_kv_cache_insert",
    "insert": "fused_mla_key_concat_kv_cache_insert",
    "ds_mla": "fused_mla_key_concat_ds_mla_insert",
    "fp8": "fused_mla_qkv_quant_kv_cache_fp8_insert",
    "concat": "fused_mla_kv_concat",
    "concat_fp8": "fused_mla_kv_concat_quant_fp8",
}
OUTPUTS = {
    "decode": ("mqa_q",),
    "insert": ("k",),
    "ds_mla": ("k",),
    "fp8": ("q8", "k8", "v8"),
    "concat": ("k",),
    "concat_fp8": ("k8", "v8"),
}
SCALES = ("q_scale_inv", "k_scale_inv", "v_scale_inv", "cache_scale_inv")
_INSERT_INPUTS = ("q", "k_nope", "k_pe", "kv_c_normed")
INPUTS = {
    "decode": ("ql_nope", "q_pe", "kv_c_normed", "k_pe"),
    "insert": _INSERT_INPUTS,
    "ds_mla": _INSERT_INPUTS,
    "fp8": (*_INSERT_INPUTS, "v"),
    "concat": ("k_nope", "k_pe"),
    "concat_fp8": ("k_nope", "k_pe", "v"),
}
POSITIONAL = {
    "decode": (*INPUTS["decode"], "kv_cache", "slot_mapping"),
    "insert": (*_INSERT_INPUTS, "kv_cache", "slot_mapping", "positions", "cos_sin_cache"),
    "ds_mla": (*_INSERT_INPUTS, "kv_cache", "slot_mapping", "positions", "cos_sin_cache"),
    "fp8": (
        *INPUTS["fp8"], "kv_cache", "slot_mapping", *SCALES, "positions", "cos_sin_cache",
    ),
    "concat": INPUTS["concat"],
    "concat_fp8": INPUTS["concat_fp8"],
}  # fmt: skip
FIRST = {kind: names[0] for kind, names in INPUTS.items()}
"""The input whose type and shape the others must follow."""


WIDTHS = {
    "ql_nope": oracle.LATENT, "q_pe": ROPE, "kv_c_normed": oracle.LATENT, "k_pe": ROPE,
    "q": QK, "k_nope": NOPE, "v": V,
}  # fmt: skip


def width_of(name: str) -> int:
    return WIDTHS[name]


@dataclass
class MlaCall:
    """One call: its arguments by name, and the allocations around those that may be written."""

    kind: str
    args: dict[str, Any]
    boxes: dict[str, Guarded] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The operation's public name."""
        return NAMES[self.kind]

    @property
    def outputs(self) -> tuple[str, ...]:
        return OUTPUTS[self.kind]

    @property
    def names_first(self) -> str:
        return FIRST[self.kind]

    @property
    def first(self) -> torch.Tensor:
        """The input that the others follow."""
        tensor: torch.Tensor = self.args[self.names_first]
        return tensor

    @property
    def tokens(self) -> int:
        return self.first.shape[0]

    @property
    def heads(self) -> int:
        return self.first.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def device(self) -> str:
        return self.first.device.type

    @property
    def rope(self) -> bool:
        return self.args.get("positions") is not None

    @property
    def cache(self) -> Guarded:
        return self.boxes["kv_cache"]

    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return dict(self.args)

    def operation(self, *args: Any, **kwargs: Any) -> Any:
        """The operation under test, looked up at call time."""
        return getattr(k3cupy, self.name)(*args, **kwargs)

    def run(self, **extra: Any) -> Any:
        return self.operation(**{**self.args, **extra})

    def explain(self, **extra: Any) -> Any:
        if self.kind == "decode":
            return k3cupy.explain_mla_decode(**{**self.args, **extra})
        return k3cupy.explain_mla_prefill(NAMES[self.kind], **{**self.args, **extra})

    def given(self, **changes: Any) -> MlaCall:
        """The same call with other arguments; one that was in a box leaves it."""
        boxes = {name: box for name, box in self.boxes.items() if name not in changes}
        return replace(self, args={**self.args, **changes}, boxes=boxes)

    def boxed(self, **boxes: Guarded) -> MlaCall:
        """The same call with arguments inside allocations that are compared."""
        tensors = {name: box.tensor for name, box in boxes.items()}
        return replace(self, args={**self.args, **tensors}, boxes={**self.boxes, **boxes})

    def on(self, device: str) -> MlaCall:
        """The same call with every tensor copied to a device (inputs become packed)."""
        args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.args.items()}
        boxes = {}
        for name, box in self.boxes.items():
            boxes[name] = Guarded(box.shape, box.dtype, device, strides=box.strides)
            boxes[name].storage.copy_(box.storage)
        return replace(self, args=args, boxes={}).boxed(**boxes)

    # What must come out

    def host(self, name: str) -> torch.Tensor:
        """An input on the CPU; k_pe with two dimensions."""
        tensor: torch.Tensor = self.args[name].detach().cpu()
        return tensor.reshape(self.tokens, ROPE) if name == "k_pe" else tensor

    def angles(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self.rope:
            return None, None
        return self.host("positions")[: self.tokens], self.host("cos_sin_cache")

    def expected(self, name: str, q_before: torch.Tensor | None = None) -> oracle.Rows:
        """What an output must be; `q_before` is the query before the call."""
        scale = self.args.get("q_scale_inv" if name == "mqa_q" else f"{name[0]}_scale_inv")
        if name == "mqa_q":
            ql_nope, q_pe = self.host("ql_nope"), self.host("q_pe")
            return oracle.joined_rows(ql_nope, q_pe, scale, *self.angles())
        if name == "v8":
            v = self.host("v")
            codes = oracle.plain_codes(v) if scale is None else oracle.scaled_codes(v, scale)
            return oracle.Rows(codes, None)
        if name in ("q", "q8"):
            q = self.host("q") if q_before is None else q_before
            return oracle.joined_rows(q[..., :NOPE], q[..., NOPE:], scale, *self.angles())
        nope, rope = self.host("k_nope"), self.host("k_pe")[:, None].expand(-1, self.heads, -1)
        if self.kind == "concat_fp8":
            pe_codes = oracle.plain_codes(rope) if rope.element_size() == 2 else oracle.bits(rope)
            return oracle.Rows(torch.cat((oracle.plain_codes(nope), pe_codes), -1), None)
        return oracle.joined_rows(nope, rope, scale, *self.angles())

    def expected_rows(self) -> oracle.Rows:
        return oracle.cache_rows(
            self.host("kv_c_normed"),
            self.host("k_pe"),
            self.args.get("cache_scale_inv"),
            *self.angles(),
            ds_mla=self.kind == "ds_mla" or bool(self.args.get("ds_mla")),
        )

    # The judge

    def check(self, before: dict[str, torch.Tensor], result: Any) -> None:
        """Compare the whole outputs, the rotated query and every byte of the cache's allocation."""
        self.check_outputs(result)
        if "q" in before:
            self.check_query(before["q"])
        if "kv_cache" in before:
            self.check_cache(before["kv_cache"])

    def check_outputs(self, result: Any) -> None:
        names = self.outputs
        found = as_list(result)
        assert isinstance(result, tuple) == (len(names) > 1)
        assert len(found) == len(names)
        for name, tensor in zip(names, found, strict=True):
            self.check_output(name, tensor)

    def check_output(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.dtype == self.output_dtype(name), name
        assert tuple(tensor.shape) == self.output_shape(name), name
        assert tensor.is_contiguous(), name
        assert tensor.device == self.first.device, name
        exact = oracle.LATENT if name == "mqa_q" else NOPE
        check_joined(tensor.cpu(), self.expected(name), name, exact)

    def check_query(self, before: torch.Tensor) -> None:
        """With positions only the last 64 columns of q change, without them nothing does."""
        box = self.boxes["q"]
        got_all, want_all = box.snapshot(), before.clone()
        if self.rope and self.kind != "fp8":
            got, want = box.view_of(got_all), box.view_of(want_all)
            check_joined(got, self.expected("q", want.clone()), "q in place")
            oracle.bits(want)[..., NOPE:] = oracle.bits(got)[..., NOPE:]
        oracle.assert_same_bits(got_all, want_all, "bytes of q's allocation")

    def check_cache(self, before: torch.Tensor) -> None:
        slots = self.args["slot_mapping"][: self.tokens]
        dtype = E4M3 if "cache_scale_inv" in self.args else self.dtype
        check_cache_rows(self.cache, before, self.expected_rows(), slots, dtype)

    def output_shape(self, name: str) -> tuple[int, ...]:
        return self.tokens, self.heads, {"v8": V, "mqa_q": oracle.ROW}.get(name, QK)

    def output_dtype(self, name: str) -> torch.dtype:
        fp8 = name.endswith("8") or (name == "mqa_q" and self.args.get("q_scale_inv") is not None)
        return E4M3 if fp8 else self.dtype

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: box.snapshot() for name, box in self.boxes.items()}


def check_joined(got: torch.Tensor, want: oracle.Rows, what: str, nope: int = NOPE) -> None:
    """Compare `[nope | 64]`: bit for bit, but what was rotated within its error."""
    exact = got.shape[-1]
    if want.rotated is not None:
        exact = nope
        oracle.assert_within(got[..., nope:], want.rotated, what)
    oracle.assert_same_bits(oracle.bits(got)[..., :exact], want.bits[..., :exact], what)


def make_prefill(
    kind: str = "insert",
    tokens: int = 8,
    heads: int = 3,
    *,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
    k_pe: torch.dtype | None = None,
    rope: bool = False,
    block_size: int = 16,
    num_blocks: int | None = None,
    slots: Sequence[int] | torch.Tensor | None = None,
    slot_dtype: torch.dtype = torch.int64,
    any_bits: bool = False,
    device: str = "cpu",
    seed: int = 0,
    scales: Sequence[float] = (0.75, 1.25, 2.5, 1.5),
    scale_tensors: bool = False,
    cache_layout: dict[str, Any] | None = None,
) -> MlaCall:
    """A call with packed random inputs inside NaN guard bands and a patterned cache.

    `cache` is the type of an fp8 cache (e4m3, or uint8), `k_pe` that of k_pe where it is no longer
    16-bit; `scales` are those of q, k, v and the cache.
    """
    args: dict[str, Any] = {}
    boxes: dict[str, Guarded] = {}
    for i, name in enumerate(INPUTS[kind]):
        flat = name in ("k_pe", "kv_c_normed")
        shape = (tokens, width_of(name)) if flat else (tokens, heads, width_of(name))
        values = random_values(shape, dtype, 10 * seed + i, any_bits=any_bits)
        if name == "k_pe" and k_pe is not None:
            codes = random_values((tokens, ROPE // 2), BF16, seed + 7, any_bits=True)
            values = codes.view(torch.uint8).view(k_pe)
        if name == "q":
            boxes["q"] = Guarded(shape, dtype, device)
            boxes["q"].tensor.copy_(values)
        else:
            args[name] = guarded(values, device)
    if kind in CONCATS:
        return MlaCall(kind, args)

    if num_blocks is None:
        num_blocks = -(-(tokens + 5) // block_size) + 1
    if slots is None:
        slots = default_slots(tokens, num_blocks * block_size, seed)
    args["slot_mapping"] = guarded(torch.as_tensor(slots, dtype=slot_dtype), device)
    width = oracle.DS_MLA_BYTES if kind == "ds_mla" else oracle.ROW
    cache_dtype = {"insert": dtype, "ds_mla": torch.uint8, "fp8": cache or E4M3}[kind]
    boxes["kv_cache"] = Guarded(
        (num_blocks, block_size, width), cache_dtype, device, **(cache_layout or {})
    )
    if kind == "fp8":
        for name, scale in zip(SCALES, scales, strict=True):
            args[name] = guarded(torch.tensor([scale]), device) if scale_tensors else scale
    if rope:
        rng = torch.Generator().manual_seed(seed)
        args["positions"] = guarded(torch.randint(0, 128, (tokens,), generator=rng), device)
        args["cos_sin_cache"] = guarded(rope_table(128), device)
    return MlaCall(kind, args).boxed(**boxes)


def make_decode(
    tokens: int = 8, heads: int = 3, *, scales: Sequence[float] = (0.75, 1.5), **options: Any
) -> MlaCall:
    """The decode epilogue in the same form; `scales` are those of the query and the cache."""
    options = {"q_scale_inv": scales[0], "cache_scale_inv": scales[1], **options}
    call = helpers.make_call(tokens, heads, **options)
    return MlaCall("decode", call.arguments()).boxed(kv_cache=call.cache)


@dataclass(frozen=True)
class Form:
    """An operation with its formats: what the tests of the whole family run through."""

    name: str
    kind: str
    settings: dict[str, Any]

    @property
    def function(self) -> str:
        """The operation's public name."""
        return NAMES[self.kind]

    @property
    def inputs(self) -> tuple[str, ...]:
        return INPUTS[self.kind]

    @property
    def outputs(self) -> tuple[str, ...]:
        return OUTPUTS[self.kind]

    @property
    def has_cache(self) -> bool:
        """With a cache come slots, and positions may come."""
        return self.kind not in CONCATS

    @property
    def cache_width(self) -> int:
        return oracle.DS_MLA_BYTES if "ds_mla" in self.name else oracle.ROW

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales that it takes."""
        if self.kind == "fp8":
            return SCALES
        names = {"decode-fp8": ("q_scale_inv", "cache_scale_inv"), "decode-uint8": SCALES[3:]}
        return names.get(self.name, ())

    @property
    def tensors(self) -> tuple[str, ...]:
        """All arguments that can be tensors, but for `out`."""
        rest = ("kv_cache", "slot_mapping", "positions", "cos_sin_cache") if self.has_cache else ()
        return (*self.inputs, *rest, *self.scales)

    def make(
        self, tokens: int = 8, heads: int = 3, *, rope: bool = False, **options: Any
    ) -> MlaCall:
        """A call; RoPE is left out where the operation has none."""
        options = {**self.settings, **options, "rope": rope and self.has_cache}
        if self.kind == "decode":
            return make_decode(tokens, heads, **options)
        return make_prefill(self.kind, tokens, heads, **options)

    def written(self, *, rope: bool) -> tuple[str, ...]:
        """Arguments that a call writes."""
        turned = ("q",) if rope and self.kind in ("insert", "ds_mla") else ()
        return ("kv_cache", *turned) if self.has_cache else ()

    def __str__(self) -> str:
        return self.name


FORMS = {
    name: Form(name, kind, settings)
    for name, kind, settings in (
        ("decode", "decode", {}),
        ("decode-fp8", "decode", {"cache": "fp8", "q_fp8": True}),
        ("decode-uint8", "decode", {"cache": "uint8"}),
        ("decode-ds_mla", "decode", {"cache": "ds_mla"}),
        *((kind, kind, {}) for kind in KINDS),
    )
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=str)
each_form_with_a_cache = pytest.mark.parametrize(
    "form", [form for form in FORMS.values() if form.has_cache], ids=str
)


def run_and_check(call: MlaCall, **extra: Any) -> Any:
    """Run a call and compare everything, the inputs' own bits included."""
    before = call.snapshot()
    inputs = {
        name: oracle.bits(value).clone()
        for name, value in call.args.items()
        if isinstance(value, torch.Tensor) and name not in call.boxes
    }
    result = call.run(**extra)
    call.check(before, result)
    for name, saved in inputs.items():
        oracle.assert_same_bits(oracle.bits(call.args[name]), saved, f"input {name}")
    return result


def poisoned_outs(call: MlaCall, *, shift: int = 0, as_bytes: bool = False) -> list[Guarded]:
    """An `out=` buffer for each output, filled with a pattern, inside guard bands."""
    boxes = []
    for name in call.outputs:
        dtype = call.output_dtype(name)
        dtype = torch.uint8 if as_bytes and dtype == E4M3 else dtype
        boxes.append(Guarded(call.output_shape(name), dtype, call.device, shift=shift))
    return boxes


def as_list(result: Any) -> list[Any]:
    """One output or several, as a list."""
    return list(result) if isinstance(result, tuple) else [result]


def as_out(tensors: Sequence[Any]) -> Any:
    """Outputs as `out=` takes them: one tensor, or a tuple."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def run_into_guarded_outs(call: MlaCall, *, shift: int = 0, **extra: Any) -> Any:
    """Run with `out=` and compare everything, the bytes around the outputs included."""
    boxes = poisoned_outs(call, shift=shift)
    before = [box.snapshot() for box in boxes]
    given = as_out([box.tensor for box in boxes])
    result = run_and_check(call, out=given, **extra)
    assert all(a is b for a, b in zip(as_list(result), as_list(given), strict=True))
    for box, saved in zip(boxes, before, strict=True):
        check_guards(box, saved)
    return result


def as_halves(call: MlaCall) -> MlaCall:
    """The real layout: k_nope and v are the halves of one [T, H, 256] buffer."""
    both = Guarded(
        (call.tokens, call.heads, NOPE + V), call.dtype, call.device, fill=NAN_BYTE
    ).tensor
    halves = {"k_nope": both[..., :NOPE], "v": both[..., NOPE:]}
    for name in [name for name in halves if name in call.args]:
        halves[name].view(torch.int16).copy_(call.args[name].view(torch.int16))
        call = call.given(**{name: halves[name]})
    return call


def refused(call: MlaCall, names: str, found: str, **changes: Any) -> str:
    """The call is refused as agreed, and neither the cache nor q is written."""
    before = call.snapshot()
    text = helpers.refused({**call.args, **changes}, names, found, operation=call.operation)
    for name, saved in before.items():
        oracle.assert_same_bits(call.boxes[name].snapshot(), saved, f"{name} after a refused call")
    return text
