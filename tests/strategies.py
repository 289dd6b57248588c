"""Calls that nobody would think of, for property tests: any size, layout, slot, scale and value.

A case is drawn with its tensors on the CPU and then placed on a device. The values come from pools
of ready numbers, at a drawn place, so that a case costs little and repeats exactly.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from gemm_helpers import FUSED_A, SKINNY
from helpers import BF16, E4M3, FP16, Guarded, guarded, moved
from hypothesis import strategies as st
from mla_helpers import INPUTS, ROPE, Form, MlaCall, width_of
from mla_layer_helpers import LayerForm

import k3cupy

# --- Values --------------------------------------------------------------------------------------

_POOL = 1 << 19
_EDGES = {
    BF16: (2.0**-133, 2.0**-127, 2.0**-126, 3.3895313892515355e38),
    FP16: (2.0**-24, 2.0**-15, 2.0**-14, 65504.0),
}
"""The least and a large subnormal number, the least normal one, the largest one."""

_FOR_E4M3 = (2.0**-10, 2.0**-9, 1.0625, 1.1875, 440.0, 448.0, 456.0, 464.0, 466.0)
"""Ties of its rounding, its own least and largest number, and what saturates."""

_TINY = {BF16: 2.0**-129, FP16: 2.0**-20}
VALUES = ("ordinary", "bits", "edges", "tiny")


@functools.cache
def _pool(kind: str, dtype: torch.dtype) -> torch.Tensor:
    rng = torch.Generator().manual_seed(len(kind))
    if kind == "bits":
        codes = torch.randint(-(2**15), 2**15, (_POOL,), generator=rng, dtype=torch.int16)
        return codes.view(dtype)
    numbers = torch.randn(_POOL, generator=rng) * 3
    if kind == "tiny":
        return (numbers.double() * _TINY[dtype]).to(dtype)
    if kind == "edges":
        edges = (0.0, math.inf, math.nan, 1.0, *_EDGES[dtype], *_FOR_E4M3)
        signed = torch.tensor([sign * edge for edge in edges for sign in (1, -1)])
        chosen = signed[torch.randint(len(signed), (_POOL,), generator=rng)]
        numbers = torch.where(torch.rand(_POOL, generator=rng) < 0.5, chosen, numbers)
    return numbers.to(dtype)


def values(kind: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers of a kind, from the place in their pool that the seed names."""
    count = math.prod(shape)
    start = seed * 7919 % (_POOL - count)
    return _pool(kind, dtype)[start : start + count].view(shape)


# --- Layouts -------------------------------------------------------------------------------------

_ODD_GAPS, _EVEN_GAPS = (0, 1, 7, 8, 9, 64), (0, 8, 16, 24, 32, 64)
_SHIFTS = 9
_FREE_STRIDES = (0, 1, 3, 1 << 40)
"""Of an axis of one element nobody asks for the stride."""

FLAT, SPREAD, OUTER, ONE_HEAD, ONE_TOKEN = range(5)
"""Packed rows; rows apart; one head after the other; one head, or one token, stands for all."""


@dataclass(frozen=True)
class Layouts:
    """What the layouts of a call have in common: every row at a multiple of 16 bytes, or not.

    A layout is one number that is drawn, taken apart: a draw costs more than the arithmetic.
    """

    aligned: bool

    def draw(self, draw: st.DrawFn, *extents: int, itemsize: int = 2) -> tuple[int, int, list[int]]:
        """Bytes off a boundary, elements between two rows, and a number below each extent."""
        number = draw(st.integers(0, _SHIFTS * len(_ODD_GAPS) * math.prod(extents) - 1))
        rest = []
        for extent in extents:
            number, part = divmod(number, extent)
            rest.append(part)
        gap, shift = divmod(number, _SHIFTS)
        if self.aligned:
            return 16 * shift, _EVEN_GAPS[gap] * 2 // itemsize, rest
        return itemsize * shift, _ODD_GAPS[gap], rest

    def of_rows(
        self, draw: st.DrawFn, tokens: int, width: int, itemsize: int = 2
    ) -> dict[str, Any]:
        """Of a tensor [tokens, width] with an inner stride of 1."""
        choices = 2 * len(_FREE_STRIDES) if tokens == 1 else 1
        shift, gap, (free,) = self.draw(draw, choices, itemsize=itemsize)
        row = width + gap if free < choices / 2 else _FREE_STRIDES[free - choices // 2]
        return {"strides": (row, 1), "shift": shift}

    def of_heads(
        self, draw: st.DrawFn, shape: tuple[int, int, int], *, may_repeat: bool
    ) -> tuple[dict[str, Any], int]:
        """Of a tensor [tokens, heads, width], and which kind of layout it is."""
        tokens, heads, width = shape
        shift, gap, (kind, more) = self.draw(draw, 5 if may_repeat else 3, 2)
        row, apart = width + (0 if kind == FLAT else gap), 0 if kind == FLAT else 8 * more
        outer = (row, row * max(tokens, 1) + apart, 1)
        inner = (row * heads + apart, row, 1)
        return {"strides": outer if kind == OUTER else inner, "shift": shift}, kind


def repeated(values_there: torch.Tensor, kind: int, layout: dict[str, Any]) -> torch.Tensor:
    """An input in a layout, one head or one token of which may stand for all."""
    axis = {ONE_HEAD: 1, ONE_TOKEN: 0}.get(kind)
    if axis is None or not values_there.shape[0]:
        return guarded(values_there, **layout)
    return guarded(values_there.narrow(axis, 0, 1), **layout).expand(values_there.shape)


def placed(value: Any, device: str) -> Any:
    """A tensor, or a box with one, in the same layout on a device."""
    if not isinstance(value, Guarded):
        return moved(value, device)
    if value.device == device:
        return value
    box = copy.copy(value)
    box.device, box.storage = device, value.storage.to(device)
    box.tensor = box.view_of(box.storage)
    return box


# --- The MLA epilogues ---------------------------------------------------------------------------

_FEW = st.tuples(st.integers(0, 9), st.integers(1, 4))
_ENDS = st.tuples(
    st.sampled_from([n + d for n in (32, 64, 128, 256) for d in (-1, 0, 1)]), st.integers(1, 2)
)
_HEADS = st.tuples(st.integers(1, 3), st.sampled_from((8, 12, 16, 24, 31, 96, 128)))
_SIZES = st.sampled_from(8 * (_FEW,) + (_ENDS, _HEADS)).flatmap(lambda sizes: sizes)
_FAR = {
    torch.int32: (2**31 - 1, -(2**31)),
    torch.int64: (2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63)),
}
CONFIGS = {
    "decode": (
        None,
        k3cupy.MlaDecodeConfig(0, 288, 1),
        k3cupy.MlaDecodeConfig(1, 128, 3),
        k3cupy.MlaDecodeConfig(3, 192, 1),
    ),
    "prefill": (None, k3cupy.MlaPrefillConfig(8, 1), k3cupy.MlaPrefillConfig(16, 3)),
}
_EXACT_SCALES = st.floats(2.0**-149, 2.0**127, width=32)
_TURNED_SCALES = st.floats(2.0**-100, 2.0**100, width=32)
"""With RoPE: a sum that is too large for fp32 must stay so after the scale."""

_SPECIAL_SCALES = (math.nan, math.inf, -math.inf, 0.0, -1.5, 1.0)
"""What a scale on the device may hold, for nobody looks at it there."""

PDL = st.sampled_from((None, None, False, True))


@dataclass
class MlaCase:
    """A call, what it asks for beside its tensors, and where its outputs go."""

    form: Form | LayerForm
    call: MlaCall
    options: dict[str, Any]
    out_shift: int | None
    """Bytes by which the given outputs are off a boundary; None for new ones."""

    def on(self, device: str) -> MlaCase:
        """The same case on a device."""
        args = {name: placed(value, device) for name, value in self.call.args.items()}
        boxes = {name: placed(box, device) for name, box in self.call.boxes.items()}
        return replace(self, call=replace(self.call, args=args, boxes={}).boxed(**boxes))


@st.composite
def mla_cases(
    draw: st.DrawFn, form: Form, dtype: torch.dtype, *, to_be_spoiled: bool = False
) -> MlaCase:
    """A good call. One that is to be spoiled has something in each of its tensors."""
    sizes = st.tuples(st.integers(2, 5), st.integers(2, 3)) if to_be_spoiled else _SIZES
    tokens, heads = draw(sizes)
    layouts, seed = Layouts(draw(st.booleans())), draw(st.integers(0, 2**16))
    kind = draw(st.sampled_from(VALUES))
    args: dict[str, Any] = {}
    boxes: dict[str, Guarded] = {}
    for i, name in enumerate(INPUTS[form.kind]):
        width = width_of(name)
        flat = name in ("k_pe", "kv_c_normed")
        shape = (tokens, width) if flat else (tokens, heads, width)
        found = values(kind, dtype, shape, seed + 97 * i)
        if flat:
            if name == "k_pe" and form.kind == "concat_fp8" and draw(st.booleans()):
                codes = values("bits", dtype, (tokens, width // 2), seed).contiguous()
                found = codes.view(draw(st.sampled_from((E4M3, torch.uint8))))
            layout = layouts.of_rows(draw, tokens, width)
            args[name] = guarded(found, **layout)
            continue
        heads_layout, which = layouts.of_heads(draw, shape, may_repeat=name != "q")  # type: ignore[arg-type]
        if name == "q":
            boxes[name] = Guarded(shape, dtype, **heads_layout)
            boxes[name].tensor.view(torch.int16).copy_(found.view(torch.int16))
        else:
            args[name] = repeated(found, which, heads_layout)
    if draw(st.booleans()):
        args["k_pe"] = args["k_pe"][:, None]
    options: dict[str, Any] = {"pdl": draw(PDL)}
    options["config"] = draw(
        st.sampled_from(CONFIGS["decode" if form.kind == "decode" else "prefill"])
    )
    if form.kind == "decode":
        options["kv_inputs_ready"] = draw(st.booleans())
    if form.has_cache:
        rope = draw(st.booleans())
        boxes["kv_cache"] = _cache(draw, form, dtype, tokens, layouts, at_least=2 * to_be_spoiled)
        capacity = math.prod(boxes["kv_cache"].shape[:2])
        args["slot_mapping"] = _slots(draw, form, tokens, capacity, seed)
        if rope:
            args |= _rope(draw, tokens, seed, layouts, at_least=1 + to_be_spoiled)
        for name in form.scales:
            args[name] = _scale(draw, turned=rope and name != "v_scale_inv")
        if "ds_mla" in form.name and form.kind == "decode":
            args["ds_mla"] = True
    off = draw(st.integers(-_SHIFTS if not to_be_spoiled else 0, _SHIFTS - 1))
    out_shift = None if off < 0 else (16 if layouts.aligned else 2) * off
    return MlaCase(form, MlaCall(form.kind, args).boxed(**boxes), options, out_shift)


def _cache(
    draw: st.DrawFn,
    form: Form,
    dtype: torch.dtype,
    tokens: int,
    layouts: Layouts,
    at_least: int,
) -> Guarded:
    bytes_or_codes = (torch.uint8, E4M3)
    kinds = {"decode": (dtype,), "insert": (dtype,), "decode-uint8": (torch.uint8,)}
    cache_type = draw(st.sampled_from(kinds.get(form.name, bytes_or_codes)))
    block_size = draw(st.integers(1, 5)) if tokens < 10 else draw(st.sampled_from((16, 24, 64)))
    blocks = draw(st.integers(at_least, 3 if tokens < 10 else 2 + 2 * tokens // block_size))
    itemsize = torch.empty(0, dtype=cache_type).element_size()
    shift, gap, (more, blocks_inside) = layouts.draw(draw, 2, 2, itemsize=itemsize)
    row, apart = form.cache_width + gap, 16 * more
    strides = (row * block_size + apart, row, 1)
    if blocks_inside:
        strides = (row, row * max(blocks, 1) + apart, 1)
    shape = (blocks, block_size, form.cache_width)
    return Guarded(shape, cache_type, strides=strides, shift=shift)


def _slots(draw: st.DrawFn, form: Form, tokens: int, capacity: int, seed: int) -> torch.Tensor:
    """Inside and outside the cache; as a column of a table, and longer than the tokens."""
    dtype = draw(st.sampled_from((torch.int64, torch.int32)))
    count = tokens + draw(st.integers(0, 2))
    if tokens < 10:
        # Numbers past the cache stand for those that are far away.
        far = (-1, -2, *_FAR[dtype])
        number = st.integers(0, capacity + 1 + len(far))
        drawn = draw(st.lists(number, min_size=count, max_size=count))
        slots = [far[i - capacity - 2] if i > capacity + 1 else i for i in drawn]
    else:
        rng = torch.Generator().manual_seed(seed)
        crowded = draw(st.booleans())
        slots = torch.randint(-2, 4 if crowded else capacity + 3, (count,), generator=rng).tolist()
    if form.kind == "decode":
        seen: set[int] = set()  # which of two tokens wins a slot is not promised
        slots = [-1 if slot in seen or seen.add(slot) else slot for slot in slots]  # type: ignore[func-returns-value]
    return _column(draw, torch.tensor(slots, dtype=dtype))


def _column(draw: st.DrawFn, numbers: torch.Tensor) -> torch.Tensor:
    shift, stride = divmod(draw(st.integers(0, 15)), 4)
    return guarded(numbers, strides=(stride + 1,), shift=numbers.element_size() * shift)


def _rope(
    draw: st.DrawFn, tokens: int, seed: int, layouts: Layouts, at_least: int
) -> dict[str, torch.Tensor]:
    rows, count = draw(st.integers(at_least, 130)), tokens + draw(st.integers(0, 2))
    rng = torch.Generator().manual_seed(seed)
    angle = torch.rand(rows, ROPE // 2, generator=rng) * 6.2831853
    if draw(st.booleans()):
        angle = (angle * 2).round() / 2 * math.pi  # sines and cosines next to 0 and 1
    table = torch.cat((angle.cos(), angle.sin()), dim=-1)
    if draw(st.booleans()):
        special = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-140, math.nan])
        some = torch.rand(table.shape, generator=rng) < 0.05
        chosen = special[torch.randint(len(special), table.shape, generator=rng)]
        table = torch.where(some, chosen, table)
    dtype = draw(st.sampled_from((torch.int64, torch.int32)))
    positions = torch.randint(0, rows, (count,), generator=rng).to(dtype)
    if count and draw(st.booleans()):
        positions[draw(st.integers(0, count - 1))] = draw(st.sampled_from((-1, rows, *_FAR[dtype])))
    layout = layouts.of_rows(draw, rows, ROPE, 4)
    return {"positions": _column(draw, positions), "cos_sin_cache": guarded(table, **layout)}


def _scale(draw: st.DrawFn, *, turned: bool) -> Any:
    scale = draw(_TURNED_SCALES if turned else _EXACT_SCALES)
    if draw(st.booleans()):
        return scale
    if not turned and draw(st.booleans()):
        scale = draw(st.sampled_from(_SPECIAL_SCALES))
    shape: tuple[int, ...] = draw(st.sampled_from(((1,), (), (1, 1))))
    return guarded(torch.full(shape, scale), shift=4 * draw(st.integers(0, 3)))


# --- Products ------------------------------------------------------------------------------------

FUSED_A_CONFIGS = {
    "rule": None,
    "warp": k3cupy.FusedAGemmConfig(16, 16, 128, 4, 2, 2, 1, 1, 2),
    "mapped": k3cupy.FusedAGemmConfig(64, 32, 128, 4, 2, 4, 1, 2, 2, mapped_x=True),
    "warpgroup": k3cupy.FusedAGemmConfig(64, 64, 128, 3, 2, 1, 4, 1, 2, "warpgroup"),
}
"""A rule's choice; a warp's products; a split and the copy engine; a warpgroup's products."""

FUSED_A_OP, DSV3_OP, SKINNY_OP = "fused_a_gemm", "dsv3_fused_a_gemm", "skinny_gemm"
LINEAR_OPS = ("low_latency_linear", "try_low_latency_gemm")
_DSV3_NAMES = {"x": "mat_a", "weight": "mat_b", "out": "output"}
VLLM, SGLANG = ("output", "mat_a", "mat_b"), ("mat_a", "mat_b", "output")
_ORDERS: tuple[tuple[str, ...], ...] = ((), VLLM, VLLM[:2], SGLANG, SGLANG[:1])
_SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0)
_SIZES_OF_THE_RULE = ((4, 24, 64), (17, 65, 208), (64, 64, 64))
_SQUARES = ((16, 16, 16), (32, 32, 32), (64, 64, 64))
_MMA_CONFIGS = (
    k3cupy.SkinnyGemmConfig(1, 64, 8, 1, 8, "mma"),
    k3cupy.SkinnyGemmConfig(1, 96, 12, 2, 8, "mma"),
)
_SIZES_OF_LINEAR = ((0, 24, 64), (1, 24, 64), (4, 24, 64), (17, 24, 64), (4, 65, 208))
"""M, N and K on a GPU where a rule chooses the kernel, for each of its choices is compiled."""


@dataclass
class GemmCase:
    """A product: x, weight and maybe residual, what else it asks for, and where the output goes."""

    operation: str
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    out: Guarded | None = None
    order: tuple[str, ...] = ()
    """Of the arguments that come without a name."""

    def on(self, device: str) -> GemmCase:
        """The same case on a device; a residual that is the output stays it."""
        out = None if self.out is None else placed(self.out, device)
        tensors = {name: placed(tensor, device) for name, tensor in self.tensors.items()}
        if out is not None and self.in_place:
            tensors["residual"] = out.tensor
        return replace(self, tensors=tensors, out=out)

    @property
    def in_place(self) -> bool:
        """Whether the residual is the output."""
        return self.out is not None and self.tensors.get("residual") is self.out.tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the output."""
        return self.tensors["x"].shape[0], self.tensors["weight"].shape[0]

    def name_of(self, name: str) -> str:
        """What the operation calls an argument."""
        return _DSV3_NAMES.get(name, name) if self.operation == DSV3_OP else name

    def arguments(self) -> dict[str, Any]:
        """All that the operation is called with, by its own names."""
        given: dict[str, Any] = {**self.tensors, **self.options}
        if self.out is not None:
            given["out"] = self.out.tensor
        if self.operation == DSV3_OP:
            given["weight"] = given["weight"].T
        return {self.name_of(name): value for name, value in given.items()}

    def run(self) -> Any:
        """The operation's result; it is looked up at call time."""
        named = self.arguments()
        unnamed = [named.pop(name) for name in self.order if name in named]
        return getattr(k3cupy, self.operation)(*unnamed, **named)


@st.composite
def gemm_cases(
    draw: st.DrawFn,
    operation: str,
    dtype: torch.dtype,
    config: Any = None,
    *,
    device: str = "cpu",
    to_be_spoiled: bool = False,
) -> GemmCase:
    """A good product. One that is to be spoiled has all tensors, with something in each."""
    tokens, n, k = draw(_sizes_of(operation, config, device, to_be_spoiled))
    layouts, seed = Layouts(draw(st.booleans())), draw(st.integers(0, 2**16))
    x, weight, added = _factors(draw, dtype, (tokens, n, k), seed)
    tensors = {"x": guarded(x, **layouts.of_rows(draw, tokens, k))}
    if tokens > 1 and draw(st.integers(0, 9)) == 9:
        tensors["x"] = tensors["x"][:1].expand(x.shape)
    tensors["weight"] = guarded(weight, shift=16 * draw(st.integers(0, 2)))
    options, out = _options_of(draw, operation, config, device), None
    if operation == SKINNY_OP and tokens and not to_be_spoiled and draw(st.booleans()):
        options["config"] = replace(draw(st.sampled_from(_MMA_CONFIGS)), num_rows=tokens)
    order = draw(st.sampled_from(_ORDERS)) if operation == DSV3_OP else ()
    if (operation == DSV3_OP and (to_be_spoiled or order != SGLANG or draw(st.booleans()))) or (
        operation not in (*LINEAR_OPS, DSV3_OP) and (to_be_spoiled or draw(st.booleans()))
    ):
        kind = options.get("out_dtype") or dtype
        width = kind.itemsize
        out = Guarded((tokens, n), kind, **layouts.of_rows(draw, tokens, n, itemsize=width))
    if operation != DSV3_OP and (to_be_spoiled or draw(st.booleans())):
        may_be_it = out is not None and not to_be_spoiled and out.dtype == dtype
        if may_be_it and draw(st.booleans()):
            out.tensor.view(torch.int16).copy_(added.view(torch.int16))
            tensors["residual"] = out.tensor
        else:
            tensors["residual"] = guarded(added, **layouts.of_rows(draw, tokens, n))
    return GemmCase(operation, tensors, options, out, order)


def _sizes_of(
    operation: str, config: Any, device: str, to_be_spoiled: bool
) -> st.SearchStrategy[tuple[int, int, int]]:
    """M, N and K."""
    on_gpu, least = device == "cuda" and not to_be_spoiled, 2 if to_be_spoiled else 0
    if operation in LINEAR_OPS:
        if on_gpu:
            return st.sampled_from(_SIZES_OF_LINEAR)
        return st.tuples(st.integers(least, 70), st.integers(1, 40), st.integers(1, 300))
    if on_gpu and operation != SKINNY_OP and config is None:
        return st.sampled_from(_SIZES_OF_THE_RULE)
    gemm = SKINNY if operation == SKINNY_OP else FUSED_A
    most = gemm.max_tokens if config is None else config.tile_m
    tokens = st.integers(least, most)
    if on_gpu and operation == SKINNY_OP:
        tokens = st.sampled_from((0, 1, 4, 7, 16))
    depth = st.integers(1, 20).map(lambda steps: steps * gemm.k_multiple)
    any_size = st.tuples(tokens, st.integers(max(least, 1), 40), depth)
    if operation == DSV3_OP:  # whose order of arguments the shapes tell
        return st.one_of(any_size, st.sampled_from(_SQUARES))
    return any_size


def _options_of(draw: st.DrawFn, operation: str, config: Any, device: str) -> dict[str, Any]:
    if operation == DSV3_OP:
        return {"enable_pdl": draw(st.booleans())}
    by_rule = device == "cuda" and config is None and operation != SKINNY_OP
    options: dict[str, Any] = {"weight_is_static": not by_rule and draw(st.booleans())}
    if device == "cpu" and draw(st.booleans()):  # of a GPU's each is compiled
        options["out_dtype"] = torch.float32
    if operation in LINEAR_OPS:
        return options | {"batch_invariant": draw(st.sampled_from((None, False)))}
    options |= {"pdl": draw(PDL)}
    if config is not None:
        options["config"] = config
    elif operation == FUSED_A_OP:
        options["batch_invariant"] = draw(st.booleans())
    return options


def _factors(
    draw: st.DrawFn, dtype: torch.dtype, size: tuple[int, int, int], seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, the weight and what is added: ordinary, tiny, or with a few special numbers."""
    tokens, n, k = size
    shapes = ((tokens, k), (n, k), (tokens, n))
    x, weight, added = (values("ordinary", dtype, s, seed + 97 * i) for i, s in enumerate(shapes))
    kind = draw(st.sampled_from(("ordinary", "ordinary", "tiny", "special")))
    if kind == "tiny":  # products and sums below the least normal number
        small = 2.0**-66 if dtype == BF16 else 2.0**-12
        x, weight = ((t.double() * small).to(dtype) for t in (x, weight))
        added = values("tiny", dtype, shapes[2], seed)
    elif kind == "special":
        x, weight, added = (t.clone() for t in (x, weight, added))
        specials = (*_SPECIALS, *_EDGES[dtype], *(-edge for edge in _EDGES[dtype]))
        for _ in range(draw(st.integers(1, 3))):
            flat = draw(st.sampled_from((x, weight, added))).view(-1)
            if flat.numel():
                flat[draw(st.integers(0, flat.numel() - 1))] = draw(st.sampled_from(specials))
    return x, weight, added
