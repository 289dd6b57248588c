"""Guarded memory, ready-made calls, DLPack producers and child processes for the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

import k3cupy

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, oracle.E4M3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CACHE_KINDS = ("same", "fp8", "uint8", "ds_mla")
CASES: Counter[tuple[str, str]] = Counter()
"""Generated cases that ran in this process, by what was asked of them and by device."""

NAN_BYTE = 0xFF
GUARD_BYTES = 256


def op(*args: Any, **kwargs: Any) -> Any:
    """The operation under test, looked up at call time."""
    return k3cupy.fused_mla_decode_q_concat_kv_cache_insert(*args, **kwargs)


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Guarded:
    """A strided tensor inside a larger allocation; the whole allocation can be compared.

    The bytes outside the tensor (guard bands, and gaps between its rows) hold a pattern, or one
    fixed byte. `shift` moves the tensor that many bytes away from a 256-byte boundary.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        strides: Sequence[int] | None = None,
        shift: int = 0,
        fill: int | None = None,
    ) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.strides = packed_strides(shape) if strides is None else tuple(strides)
        itemsize = torch.empty((), dtype=dtype).element_size()
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        content = max(span, 0) * itemsize if 0 not in self.shape else 0
        total = 2 * GUARD_BYTES + (shift + content + 7) // 8 * 8
        if fill is None:
            self.storage = (torch.arange(total, device=device) % 251).to(torch.uint8)
        else:
            self.storage = torch.full((total,), fill, dtype=torch.uint8, device=device)
        assert shift % itemsize == 0
        self.offset = (GUARD_BYTES + shift) // itemsize
        self.tensor = self.view_of(self.storage)

    def view_of(self, storage: torch.Tensor) -> torch.Tensor:
        """The same strided view into another copy of the allocation."""
        return storage.view(self.dtype).as_strided(self.shape, self.strides, self.offset)

    def snapshot(self) -> torch.Tensor:
        """All bytes of the allocation, on the CPU."""
        return self.storage.cpu().clone()


def guarded(values: torch.Tensor, device: str = "cpu", **layout: Any) -> torch.Tensor:
    """A copy of `values` as an input whose surroundings are NaN in every floating-point type."""
    box = Guarded(values.shape, values.dtype, device, fill=NAN_BYTE, **layout)
    if values.numel():
        integers = oracle.bits(values)
        box.tensor.view(integers.dtype).copy_(integers)
    return box.tensor


def random_values(
    shape: Sequence[int], dtype: torch.dtype, seed: int, *, any_bits: bool = False
) -> torch.Tensor:
    """Normal values (times 3), or any bit pattern at all: NaN, infinities and subnormals too."""
    rng = torch.Generator().manual_seed(seed)
    if any_bits:
        codes = torch.randint(-(2**15), 2**15, tuple(shape), generator=rng, dtype=torch.int16)
        return codes.view(dtype)
    return (torch.randn(*shape, generator=rng) * 3).to(dtype)


def rope_table(rows: int, seed: int = 5) -> torch.Tensor:
    """A [rows, 64] fp32 table of cosines and sines."""
    rng = torch.Generator().manual_seed(seed)
    angle = torch.rand(rows, 32, generator=rng) * 6.2831853
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def default_slots(tokens: int, capacity: int, seed: int) -> torch.Tensor:
    """Distinct slots in random order, about one in six of them negative."""
    rng = torch.Generator().manual_seed(seed)
    slots = torch.randperm(capacity, generator=rng)[:tokens]
    if tokens > 2:
        slots[torch.rand(tokens, generator=rng) < 1 / 6] = -1
    return slots


def check_cache_rows(
    cache: Guarded,
    before: torch.Tensor,
    rows: oracle.Rows,
    slots: torch.Tensor,
    rope_dtype: torch.dtype,
) -> None:
    """Compare every byte of a cache's allocation with the snapshot `before` and the rows.

    `slots` has one entry a token. Where tokens share a slot, the last one's row must be there.
    `rope_dtype` is the type of a row's last 64 values, which are judged apart when rotated.
    """
    num_blocks, block_size, width = cache.shape
    slots = slots.cpu().to(torch.int64)
    tokens = torch.nonzero((slots >= 0) & (slots < num_blocks * block_size)).flatten()
    winner = torch.full((num_blocks * block_size,), -1)
    winner.scatter_reduce_(0, slots[tokens], tokens, "amax")
    written = torch.nonzero(winner >= 0).flatten()
    tokens, place = winner[written], (written // block_size, written % block_size)

    got_all, want_all = cache.snapshot(), before.clone()
    got, want = (oracle.bits(cache.view_of(storage)) for storage in (got_all, want_all))
    want_rows = rows.bits[tokens]
    if rows.rotated is not None:
        start = oracle.DS_MLA_ROPE_AT if width == oracle.DS_MLA_BYTES else oracle.LATENT
        part = got[place][:, start:].contiguous()
        limits = oracle.Within(rows.rotated.exact[tokens], rows.rotated.error[tokens])
        oracle.assert_within(part.view(rope_dtype), limits, "cache rows by slot")
        want_rows[:, start:] = part
    want[place] = want_rows
    oracle.assert_same_bits(got_all, want_all, "bytes of the cache's allocation")


@dataclass
class Call:
    """One call: its tensors, and what the oracle needs to judge the result."""

    ql_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_c_normed: torch.Tensor
    k_pe: torch.Tensor
    cache: Guarded
    slot_mapping: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.ql_nope.shape[0]

    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return {
            "ql_nope": self.ql_nope,
            "q_pe": self.q_pe,
            "kv_c_normed": self.kv_c_normed,
            "k_pe": self.k_pe,
            "kv_cache": self.cache.tensor,
            "slot_mapping": self.slot_mapping,
            **self.options,
        }

    def run(self, **extra: Any) -> Any:
        return op(**{**self.arguments(), **extra})

    def on(self, device: str) -> Call:
        """The same call with every tensor copied to a device (layouts become packed)."""
        cache = Guarded(self.cache.shape, self.cache.dtype, device, strides=self.cache.strides)
        cache.storage.copy_(self.cache.storage)
        moved = {
            k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.options.items()
        }
        return Call(
            *(t.to(device) for t in (self.ql_nope, self.q_pe, self.kv_c_normed, self.k_pe)),
            cache,
            self.slot_mapping.to(device),
            moved,
        )

    def with_tensors(self, **changes: Any) -> Call:
        """The same call with other tensors."""
        return replace(self, **changes)

    def expected_query(self) -> oracle.Rows:
        positions, table = self._rope()
        return oracle.joined_rows(
            self.ql_nope.cpu(), self.q_pe.cpu(), self.options.get("q_scale_inv"), positions, table
        )

    def expected_rows(self) -> oracle.Rows:
        positions, table = self._rope()
        return oracle.cache_rows(
            self.kv_c_normed.cpu(),
            self.k_pe.cpu(),
            self.options.get("cache_scale_inv"),
            positions,
            table,
            ds_mla=bool(self.options.get("ds_mla")),
        )

    def check(self, before: torch.Tensor, mqa_q: torch.Tensor) -> None:
        """Compare the whole output and every byte of the cache's allocation."""
        self.check_query(mqa_q)
        self.check_cache(before)

    def check_query(self, mqa_q: torch.Tensor) -> None:
        want = self.expected_query()
        fp8 = self.options.get("q_scale_inv") is not None
        assert mqa_q.dtype == (E4M3 if fp8 else self.ql_nope.dtype)
        assert tuple(mqa_q.shape) == (self.tokens, self.ql_nope.shape[1], oracle.ROW)
        assert mqa_q.is_contiguous()
        assert mqa_q.device == self.ql_nope.device
        exact_columns = oracle.ROW
        if want.rotated is not None:
            exact_columns = oracle.LATENT
            oracle.assert_within(mqa_q.cpu()[..., oracle.LATENT :], want.rotated, "mqa_q")
        oracle.assert_same_bits(
            oracle.bits(mqa_q)[..., :exact_columns], want.bits[..., :exact_columns], "mqa_q"
        )

    def check_cache(self, before: torch.Tensor) -> None:
        fp8 = self.options.get("cache_scale_inv") is not None
        check_cache_rows(
            self.cache,
            before,
            self.expected_rows(),
            self.slot_mapping[: self.tokens],
            E4M3 if fp8 else self.ql_nope.dtype,
        )

    def _rope(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        positions, table = self.options.get("positions"), self.options.get("cos_sin_cache")
        if positions is None or table is None:
            return None, None
        return positions.cpu(), table.cpu()


def cache_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    return {"same": dtype, "fp8": E4M3, "uint8": torch.uint8, "ds_mla": torch.uint8}[kind]


def make_call(
    tokens: int = 8,
    heads: int = 3,
    *,
    dtype: torch.dtype = BF16,
    cache: str = "same",
    q_fp8: bool = False,
    rope: bool = False,
    block_size: int = 16,
    num_blocks: int | None = None,
    slots: Sequence[int] | torch.Tensor | None = None,
    slot_dtype: torch.dtype = torch.int64,
    any_bits: bool = False,
    device: str = "cpu",
    seed: int = 0,
    q_scale_inv: float = 0.75,
    cache_scale_inv: float = 1.5,
    scale_tensors: bool = False,
    cache_layout: dict[str, Any] | None = None,
) -> Call:
    """A call with packed random inputs inside NaN guard bands and a patterned cache."""
    if num_blocks is None:
        num_blocks = -(-(tokens + 5) // block_size) + 1
    if slots is None:
        slots = default_slots(tokens, num_blocks * block_size, seed)
    width = oracle.DS_MLA_BYTES if cache == "ds_mla" else oracle.ROW
    shapes = ((tokens, heads, 512), (tokens, heads, 64), (tokens, 512), (tokens, 64))
    inputs = [
        guarded(random_values(shape, dtype, 10 * seed + i, any_bits=any_bits), device)
        for i, shape in enumerate(shapes)
    ]
    options: dict[str, Any] = {}
    if cache == "ds_mla":
        options["ds_mla"] = True
    if q_fp8:
        options["q_scale_inv"] = q_scale_inv
    if cache in ("fp8", "uint8"):
        options["cache_scale_inv"] = cache_scale_inv
    if scale_tensors:
        for name in ("q_scale_inv", "cache_scale_inv"):
            if name in options:
                options[name] = guarded(torch.tensor([options[name]]), device)
    if rope:
        rng = torch.Generator().manual_seed(seed)
        options["positions"] = guarded(torch.randint(0, 128, (tokens,), generator=rng), device)
        options["cos_sin_cache"] = guarded(rope_table(128), device)
    box = Guarded(
        (num_blocks, block_size, width), cache_dtype(cache, dtype), device, **(cache_layout or {})
    )
    slot_tensor = guarded(torch.as_tensor(slots, dtype=slot_dtype), device)
    return Call(*inputs, box, slot_tensor, options)


def run_and_check(call: Call, **extra: Any) -> Any:
    """Run a call and compare everything, the inputs' own bits included."""
    before = call.cache.snapshot()
    names = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping")
    inputs = {name: oracle.bits(getattr(call, name)).clone() for name in names}
    mqa_q = call.run(**extra)
    call.check(before, mqa_q)
    for name, saved in inputs.items():
        oracle.assert_same_bits(oracle.bits(getattr(call, name)), saved, f"input {name}")
    return mqa_q


def check_guards(box: Guarded, before: torch.Tensor) -> None:
    """Every byte outside the tensor is as it was in the snapshot `before`."""
    want = before.clone()
    oracle.bits(box.view_of(want)).copy_(oracle.bits(box.tensor))
    oracle.assert_same_bits(box.snapshot(), want, "guard bands")


def refused(
    arguments: dict[str, Any],
    names: str,
    found: str,
    *,
    box: Guarded | None = None,
    operation: Callable[..., Any] = op,
) -> str:
    """The call raises a message of the agreed form and writes nothing; the message comes back.

    `names` is a regular expression for the argument that is blamed, `found` one for the offending
    type or value. It is looked for in what the message says it got, never in what it expected, and
    not in the advice behind that.
    """
    before = box.snapshot() if box is not None else None
    with pytest.raises((TypeError, ValueError)) as caught:
        operation(**arguments)
    text = str(caught.value)
    assert re.match(rf"(?:{names}): expected ", text), f"it does not start as agreed: {text!r}"
    assert re.search(found, got_in(text)), f"{found!r} is missing behind 'got' in {text!r}"
    if box is not None and before is not None:
        oracle.assert_same_bits(box.snapshot(), before, "cache after a refused call")
    return text


def got_in(text: str) -> str:
    """What a message says it got: behind the first ", got ", up to the advice."""
    _, separator, rest = text.partition(", got ")
    assert separator, f"it does not say what it got: {text!r}"
    return re.split(r"\. (?=[A-Z])", rest)[0]


def exactly(got: str) -> str:
    """The pattern of one text that a message may give as what it got, and of no other."""
    return rf"\A{re.escape(got)}\Z"


def padded(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    """The last dimension wider, or narrower, by `extra`."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + extra)
    return torch.zeros(shape, device=tensor.device).to(tensor.dtype)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with an inner stride of 2."""
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    return wide[..., ::2]


def whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor lies in, where they are."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def moved(value: Any, device: str) -> Any:
    """The same tensor on a device, strides and offset kept (`.to` would pack an expanded one)."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.device.type == device:
        return value
    flat = whole_memory(value).to(device).view(value.dtype)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


class Producer:
    """An object that knows nothing but the DLPack protocol."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._tensor.__dlpack_device__()
        return int(kind), int(index)


class OldProducer(Producer):
    """A producer from before DLPack 1.0, which knows no keyword but `stream`."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self._tensor.__dlpack__(stream=stream)


def run_child(function: Callable[..., None], *args: Any, env: dict[str, str] | None = None) -> str:
    """Run a module-level test function in a fresh interpreter and return what it printed."""
    module, name = function.__module__, function.__name__
    return run_program(f"from {module} import {name} as f; f(*{args!r})", env=env)


def run_program(code: str, *, env: dict[str, str] | None = None, timeout: float = 120) -> str:
    """Run Python source in a fresh interpreter; a crash or an error fails the test."""
    search = [str(Path(__file__).parent), *(entry for entry in sys.path if entry)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
