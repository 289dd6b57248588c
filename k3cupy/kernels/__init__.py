"""What a ``.cu`` sees: one module a source, of the same name.

Each has ``KERNEL`` (its name in choices and tables), ``SOURCE``, ``Variant`` (what a call decides),
``Config`` (what is tuned, with the rules of that), its parameters in the order of the source, and
``launches``: the grid and the arguments of a validated call. Nothing here chooses.
"""

from __future__ import annotations

from collections.abc import Iterator

from k3cupy.runtime.tensors import is_integer

FLOAT = ("float",)
"""The template argument ``Out`` of a product whose sums are stored as they are."""

Rules = Iterator[tuple[bool, str, str]]
"""Whether one holds; where it does not, the field or property to blame, and what that is to be."""

_TYPES = {"int": int, "bool": bool, "str": str}


class Tuned:
    """What every ``Config`` is beside its fields, a frozen dataclass of numbers, flags and names.

    Integers of NumPy become Python's.

    Attributes:
        is_typed: each field is of its type, and no float or bool stands for an integer.
    """

    is_typed = True
    _types: list[type]

    def __init_subclass__(cls) -> None:
        """Note the types of the fields, in order, inherited ones among them."""
        own = [_TYPES[kind] for kind in cls.__annotations__.values()]
        cls._types = [*getattr(cls, "_types", ()), *own]

    def __post_init__(self) -> None:
        """Look at the types once: a search makes thousands of configurations."""
        if list(map(type, vars(self).values())) != self._types:
            for name, value in vars(self).items():
                if is_integer(value):
                    object.__setattr__(self, name, int(value))
            typed = list(map(type, vars(self).values())) == self._types
            object.__setattr__(self, "is_typed", typed)

    def rules(self) -> Rules:
        """Give what fields of the right types must fulfil, each rule where those before it hold."""
        raise NotImplementedError

    def is_valid(self) -> bool:
        """Return whether the kernel can be compiled with these numbers."""
        return self.is_typed and all(holds for holds, _, _ in self.rules())

    def misfit(self) -> str | None:
        """Return what is expected of the first number that does not fit, or None."""
        for (name, value), kind in zip(vars(self).items(), self._types, strict=False):
            if type(value) is not kind:
                return f"{name} of type {kind.__name__}"
        for holds, name, expected in self.rules():
            if not holds:
                made = "" if name in vars(self) else f", not {getattr(self, name)}"
                return f"{name} {expected}{made}"
        return None
