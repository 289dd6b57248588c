"""Which instances ``k3cupy.compile`` looks at: what is asked for, or what an edit touches."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from k3cupy.constants import CTYPES
from k3cupy.kernels import (
    fused_a_gemm,
    mla_decode,
    mla_norm,
    mla_prefill,
    mla_query,
    mla_value,
    skinny_gemm,
)
from k3cupy.ops.warmup import OPERATIONS, tokens_of, wanted_of
from k3cupy.projections import MODELS, preset_shapes
from k3cupy.runtime import devices, sources
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import ToolchainError, reject, shown
from k3cupy.runtime.instances import Instance

Options = dict[str, Any]
_Feature = tuple[Any, ...]
"""A kernel; and of its template's arguments one that is no number, or two, with their places."""


class Look(NamedTuple):
    """An operation, and the instances by which it is looked at.

    Attributes:
        op: as ``warmup`` names it.
        options: of the instances that are all compiled.
        beside: options of others. Of theirs so many are compiled that every kernel, and every two
            values of flags, types and formats, are seen together.
    """

    op: str
    options: Options
    beside: tuple[Options, ...] = ()

    def instances(self, gpu: DeviceInfo) -> list[Instance]:
        """Return what is compiled for a GPU, each once."""
        found = list(dict.fromkeys(wanted_of(self.op, self.options)(gpu)))
        others = {instance: _features(instance, 2) for instance in self._others(gpu)}
        seen = set().union(*(_features(instance, 2) for instance in found))
        while others:
            best = max(others, key=lambda instance: len(others[instance] - seen))
            if others[best] <= seen:
                break
            seen |= others[best]
            found.append(best)
        return found

    def left_out(self, gpu: DeviceInfo) -> list[str]:
        """Return what no instance for a GPU has, in words; those for an H200 have everything."""
        here, all_of_them = (
            set().union(*(_features(each, 1) for each in self._others(of)))
            for of in (gpu, devices.named("h200"))
        )
        lacking = sorted(all_of_them - here, key=str)
        kernels = {kernel for kernel, *value in lacking if not value}
        return sorted(kernels) + [
            f"{kernel} with {value[0][1]}"
            for kernel, *value in lacking
            if value and kernel not in kernels
        ]

    def why_none(self, gpu: DeviceInfo) -> str:
        """Return why there is no instance for a GPU."""
        if self.op == "mla_query":
            fewest = min(tokens_of(self.options.get("tokens") or 1, 1 << 31))
            why = mla_query.why_not(fewest, None, gpu)
            return f"{self.op}: {why}; separate kernels run in its place"
        return f"{self.op}: the framework's own linear is taken for all that is asked"

    def _others(self, gpu: DeviceInfo) -> Iterator[Instance]:
        for options in self.beside:
            yield from wanted_of(self.op, options)(gpu)


def _features(instance: Instance, most: int) -> set[_Feature]:
    kernel, _, told = instance.name_expression.replace("k3cupy::", "").partition("<")
    arguments = enumerate(told.removesuffix(">").split(", "))
    named = [(place, value) for place, value in arguments if not value.lstrip("-").isdigit()]
    return {(kernel, *each) for n in range(most + 1) for each in itertools.combinations(named, n)}


_BOTH = (False, True)
_STATIC = {"weight_is_static": True}
_PRODUCT = {"shapes": ((2112, 7168),), "tokens": (1, 16), **_STATIC}


def _both(*flags: str, **options: Any) -> Options:
    return {**dict.fromkeys(flags, _BOTH), **options}


def _formats(options: Options) -> tuple[Options, ...]:
    """An fp8_ds_mla cache has no fp8 query."""
    either = {"kv_cache": ("same", "fp8"), "query_fp8": _BOTH}
    return options, {**options, **either}


def _outputs(options: Options) -> tuple[Options, ...]:
    return options, {**options, "out_dtype": "float32"}


_TYPES = tuple(CTYPES)
_GEMM = _both("residual", "weight_is_static", "vector")
_WITH_A_REST = (*preset_shapes(MODELS[0]), (2112, 7176))
"""The last has a K that is no multiple of a step."""

OF_SOURCES = {
    mla_decode.SOURCE: Look(
        "mla_decode",
        {"rope": _BOTH, "config": mla_decode.UNTUNED},
        _formats(
            _both("rope", "kv_inputs_ready", "vector", dtype=_TYPES, config=mla_decode.UNTUNED)
        ),
    ),
    mla_prefill.SOURCE: Look(
        "mla_prefill",
        {"rope": _BOTH, "config": mla_prefill.FEW_ROWS},
        (_both("rope", "vector", dtype=_TYPES, config=mla_prefill.FEW_ROWS),),
    ),
    mla_norm.SOURCE: Look(
        "mla_norm",
        {**_STATIC, "config": mla_norm.UNTUNED},
        (_both("weight_is_static", "vector", dtype=_TYPES, config=mla_norm.UNTUNED),),
    ),
    mla_query.SOURCE: Look(
        "mla_query",
        {**_STATIC, "config": mla_query.UNTUNED},
        _formats(_both("rope", "weight_is_static", dtype=_TYPES, config=mla_query.UNTUNED)),
    ),
    mla_value.SOURCE: Look(
        "mla_value",
        {**_STATIC, "config": mla_value.UNTUNED},
        (_both("gate", "weight_is_static", "vector", dtype=_TYPES, config=mla_value.UNTUNED),),
    ),
    fused_a_gemm.SOURCE: Look(
        "fused_a_gemm", _PRODUCT, _outputs({**_GEMM, "tokens": (1, 16, fused_a_gemm.MAX_TOKENS)})
    ),
    skinny_gemm.SOURCE: Look(
        "skinny_gemm",
        _PRODUCT,
        _outputs({**_GEMM, "shapes": _WITH_A_REST, "tokens": (1, 16), "dtype": _TYPES}),
    ),
}
"""Source -> how an edit of it is looked at."""

_FEW = 5
"""Files that a note names."""

_EXAMPLE = [Look("mla_decode", {})]
"""What is looked at where nothing is edited."""


def of_call(op: str | None, options: Options) -> tuple[list[Look], list[str]]:
    """Return what a call of ``compile`` looks at, and what is to be said of it.

    Raises:
        TypeError: no operation that would be looked at takes an option.
        ToolchainError: a source cannot be read, and none is edited.
    """
    if op is not None:
        return [Look(op, options)], []
    if sources.overridden() is None:
        return _taking(options, _EXAMPLE)
    edited, notes = _edited()
    if not edited:
        example = f"this is {_EXAMPLE[0].op}, for example"
        notes.append(f"no kernel differs from the package's: {example}")
    if unread := sources.unread_edits(OF_SOURCES):
        more = [f"and {len(unread) - _FEW} more"] if len(unread) > _FEW else []
        told = ", ".join(unread[:_FEW] + more)
        notes.append(f"not as in the package, and part of no operation: {told}")
    found, without = _taking(options, edited or _EXAMPLE)
    return found, [*notes, *without]


def _edited() -> tuple[list[Look], list[str]]:
    """Return how the edited sources are looked at, and what is to be said of missing ones."""
    found, missing = [], []
    for source, look in OF_SOURCES.items():
        try:
            if sources.is_edited(source):
                found.append(look)
        except ToolchainError as error:
            missing.append(error)
    if missing and not found:
        raise missing[0]
    return found, [f"not looked at: {error}" for error in missing]


def _taking(options: Options, looks: Sequence[Look]) -> tuple[list[Look], list[str]]:
    """Return those that take all options, with them, and in words which do not."""
    if not options:
        return list(looks), []
    known = {look.op: _options_of(look.op) for look in looks}
    ops = " or ".join(known)
    edited = "Those are edited" if looks != _EXAMPLE else "It is looked at where nothing is edited"
    hint = f"{edited}; op names another operation"
    for name, value in options.items():
        if not any(name in of for of in known.values()):
            reject(name, f"an option of {ops}", shown(value), hint, TypeError)
    taking = [look for look in looks if options.keys() <= known[look.op].keys()]
    if not taking:
        none = f"none, and none of them takes all of {', '.join(options)}"
        reject("op", f"{ops}, or another operation", none, error=TypeError)
    others = ", ".join(look.op for look in looks if look not in taking)
    told = f"edited, and not looked at, for want of an option {' or '.join(options)}: {others}"
    found = [Look(look.op, {**look.options, **options}) for look in taking]
    return found, [told] if others else []


def _options_of(op: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(OPERATIONS[op]).parameters


def instances_of(looks: Sequence[Look], gpu: DeviceInfo) -> tuple[dict[Instance, None], list[str]]:
    """Return the instances of operations for a GPU, and in words what they leave out.

    Raises:
        ValueError: there is none.
    """
    found: dict[Instance, None] = {}
    without, notes = [], []
    for look in looks:
        instances = look.instances(gpu)
        found |= dict.fromkeys(instances)
        if not instances:
            without.append(look.why_none(gpu))
        elif lacking := look.left_out(gpu):
            why = f"as no call on {gpu.name} is known to get it"
            notes.append(f"not looked at, {why}: {', '.join(lacking)}")
    if not found:
        ops = " or ".join(look.op for look in looks)
        reject("gpu", f"a GPU that has kernels of {ops}", gpu.name, "; ".join(without))
    return found, [*(f"not looked at: {why}" for why in without), *notes]
