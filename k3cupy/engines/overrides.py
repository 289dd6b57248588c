"""Standing in for an engine's operators and functions, with the engine's own kept at hand."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

Call = Callable[..., Any]


class NotOverridableError(RuntimeError):
    """What we would stand in for is missing, or differs, or PyTorch cannot; the text says which."""


class Override:
    """A kernel of ours in place of the one that an operator has for a dispatch key.

    Whoever calls the operator, by whatever name, then calls ours. It holds until ``undo``.

    Args:
        name: with its namespace, ``"_C::dsv3_fused_a_gemm"``.
        schema: name, arguments and result without the namespace, in the words of the engine's
            source: an operator whose schema differs in anything is left alone.
        make: (the engine's own kernel) -> ours. Both take the dispatch keys, then the operator's
            arguments; trailing arguments that have their default values may be left out.
        key: the dispatch key, ``"CUDA"`` or, in tests, ``"CPU"``.

    Raises:
        NotOverridableError: see there. Nothing was changed.
    """

    def __init__(self, name: str, schema: str, make: Callable[[Call], Call], key: str) -> None:
        import torch

        _check_torch(torch)
        namespace, _, plain = name.partition("::")
        _check_schema(torch, name, f"{namespace}::{schema}")
        try:
            own = torch.library.get_kernel(name, key)
        except RuntimeError as error:
            raise NotOverridableError(f"it has no kernel for {key}: {error}") from error
        self._library = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():  # that a kernel was overridden, which is the purpose
            warnings.simplefilter("ignore")
            self._library.impl(
                plain, make(own.call_boxed), key, with_keyset=True, allow_override=True
            )

    def undo(self) -> None:
        """Give the operator its own kernel back."""
        self._library._destroy()


def _check_torch(torch: Any) -> None:
    impl = inspect.signature(torch.library.Library.impl).parameters
    missing = [f"the argument {a}" for a in ("with_keyset", "allow_override") if a not in impl]
    if not hasattr(torch.library, "get_kernel"):
        missing.insert(0, "torch.library.get_kernel")
    if missing:
        raise NotOverridableError(f"PyTorch {torch.__version__} has no {missing[0]}")


def _check_schema(torch: Any, name: str, expected: str) -> None:
    try:
        found = str(torch._C._get_schema(name, ""))
    except RuntimeError as error:
        raise NotOverridableError(
            "the engine, as it is built here, has no such operator"
        ) from error
    if found != str(torch._C.parse_schema(expected)):  # both in the words of this PyTorch
        raise NotOverridableError(f"its schema is not the one that we know: {found}")


class Replacement:
    """A function of ours in place of one in a module or a class of an engine.

    Args:
        owner: the module or class.
        name: of the function in it.
        parameters: its parameters without their types, ``"(self, layer, x, bias=None)"``: a
            function with other ones is left alone.
        make: (the engine's own function) -> ours.
        importers: names of modules that import the function by value, before or after.

    Raises:
        NotOverridableError: see there. Nothing was changed.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        parameters: str,
        make: Callable[[Call], Call],
        importers: Sequence[str] = (),
    ) -> None:
        self._name, self._own = name, vars(owner).get(name)
        if not callable(self._own):
            raise NotOverridableError(f"{owner.__name__} has no function {name}")
        found = parameters_of(self._own)
        if found != parameters:
            raise NotOverridableError(f"its parameters are not those that we know: {found}")
        self._ours = functools.wraps(self._own)(make(self._own))
        self._owner, self._importers = owner, importers
        self._exchange(self._own, self._ours)

    def undo(self) -> None:
        """Put the engine's own function back wherever ours still stands."""
        self._exchange(self._ours, self._own)

    def _exchange(self, now: Call, then: Call) -> None:
        modules = [sys.modules.get(name) for name in self._importers]
        for owner in (self._owner, *modules):
            if owner is not None and vars(owner).get(self._name) is now:
                setattr(owner, self._name, then)


def parameters_of(function: Callable[..., Any]) -> str:
    """Return a function's parameters without their types."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(plain))
