"""Probing a call's tensors: a function generated for the arguments of one operation.

A probe gives what the plan cache needs: the addresses, and a hashable signature of everything else.
PyTorch's tensors on a GPU are the everyday case and a good part of a call's host time, so they are
read in line, without a loop over arguments. Whatever else comes goes through
``producers.probe_all``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from k3cupy.runtime import producers, streams
from k3cupy.runtime.tensors import ALIGNMENT

Probe = Callable[[tuple[Any, ...], Any], tuple[list[int], tuple[Any, ...], Any]]
"""(values, stream) -> addresses, signature, and what must live until the memory has been used."""


def make_prober(
    names: Sequence[str], required: Collection[str], describe: Callable[[tuple[Any, ...]], Any]
) -> Probe:
    """Return the probe of an operation.

    Args:
        names: its tensor arguments in order.
        required: those that a call must give.
        describe: raises an error that names the argument, for values that cannot be read.
    """

    def any_producer(values: tuple[Any, ...], stream: Any) -> Any:
        handle = None if stream is None else streams.handle_of(stream)
        addresses, signature, owners = producers.probe_all(values, handle)
        return addresses, tuple(signature), owners

    scope: dict[str, Any] = {}
    exec(compile(_code(names, required), "<k3cupy prober>", "exec"), producers.torch_names, scope)
    return cast(Probe, scope["make"](any_producer, describe))


def _code(names: Sequence[str], required: Collection[str]) -> str:
    """Return the source of what makes ``probe``: every tensor in line, ``t0`` the first one."""
    short = {name: f"t{i}" for i, name in enumerate(names)}
    given = [short[name] for name in names if name in required]
    optional = [short[name] for name in names if name not in required]
    follows = [f"{name} is not None and {name}.requires_grad" for name in short.values()]
    body = [
        f"{', '.join(short.values())}, = values",
        f"if (like := type({given[0]})) not in torch_types or {_any_of(_NO_TENSOR, given[1:])}:",
        "    return any_producer(values, stream)",
        # Off the GPU an ordinal says too little: a tensor without memory has -1 as well.
        f"gpu = {given[0]}.get_device()",
        f"if gpu < 0 or {_any_of('{}.is_neg()', given)} or {_any_of(_ELSEWHERE, given[1:])}:",
        "    return any_producer(values, stream)",
        *(f"at_{name} = {name}.data_ptr()" for name in given),
    ]
    for name in optional:
        body += [
            f"if {name} is None:",
            f"    at_{name} = 0",
            f"    like_{name} = None",
            f"elif {_NO_TENSOR.format(name)} or {name}.is_neg() or {_ELSEWHERE.format(name)}:",
            "    return any_producer(values, stream)",
            "else:",
            f"    at_{name} = {name}.data_ptr()",
            f"    like_{name} = ({_layout(name)}, {_past(name)})",
        ]
    at = [f"at_{name}" for name in given]
    addresses = ", ".join(f"at_{name}" for name in short.values())
    signature = ", ".join(
        _layout(name) if name in given else f"like_{name}" for name in short.values()
    )
    body += [
        f"if forward_ad._current_level >= 0 or (is_grad_enabled() and ({' or '.join(follows)})):",
        "    return any_producer(values, stream)",
        f"past = 0 if {' and '.join(at)} and not ({' | '.join(at)}) % {ALIGNMENT} else (",
        f"    {', '.join(map(_past, given))},)",
        f"return [{addresses}], ({signature}, gpu, past), None",
    ]
    lines = [
        "def make(any_producer, describe):",
        "    def probe(values, stream):",
        "        try:",
        *(f"            {line}" for line in body),
        "        except Exception:",
        "            describe(values)",
        "            raise",
        "    return probe",
    ]
    return "\n".join(lines)


_NO_TENSOR = "((kind := type({})) is not like and kind not in torch_types)"
_ELSEWHERE = "{}.get_device() != gpu"


def _any_of(test: str, names: Sequence[str]) -> str:
    return " or ".join(map(test.format, names))


def _layout(name: str) -> str:
    return f"{name}.shape, {name}.stride(), {name}.dtype"


def _past(name: str) -> str:
    """Say what of an address belongs to a signature; None is no memory at all."""
    return f"at_{name} % {ALIGNMENT} if at_{name} else None"
