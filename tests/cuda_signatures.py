"""The parameters of the kernels, read from the CUDA sources: names and types of arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r"template\s*<([^<>]*)>\s*__global__\s+void\b")
_LAUNCH_BOUNDS = "__launch_bounds__"
_CLOSING = {"(": ")", "<": ">", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: its name and its C++ type, blanks made one."""

    name: str
    ctype: str


@dataclass(frozen=True)
class Signature:
    """A kernel template.

    Attributes:
        kernel: its name, without the namespace.
        template: names of the template's parameters.
        parameters: of the kernel, in order.
        defaults: how many of the template's parameters, the last ones, may be left out.
    """

    kernel: str
    template: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    defaults: int = 0

    def swapped(self, first: int, second: int) -> Signature:
        """The kernel with two parameters in each other's place."""
        changed = list(self.parameters)
        changed[first], changed[second] = changed[second], changed[first]
        return replace(self, parameters=tuple(changed))


def signatures(source: str) -> dict[str, Signature]:
    """Every kernel template of a source text, by name."""
    text = _COMMENT.sub(" ", source)
    found = {}
    for match in _KERNEL.finditer(text):
        rest = text[match.end() :].lstrip()
        if rest.startswith(_LAUNCH_BOUNDS):
            bounds = rest.index("(")
            rest = rest[_end_of(rest, bounds) + 1 :].lstrip()
        start = rest.index("(")
        parameters = rest[start + 1 : _end_of(rest, start)]
        signature = Signature(
            kernel=rest[:start].strip(),
            template=tuple(_parameter(part.split("=")[0]).name for part in match[1].split(",")),
            parameters=tuple(_parameter(part) for part in _split(parameters)),
            defaults=match[1].count("="),
        )
        found[signature.kernel] = signature
    return found


def template_arguments(name_expression: str) -> tuple[str, tuple[str, ...]]:
    """The kernel's name without its namespaces, and the arguments of its template."""
    name, _, arguments = name_expression.partition("<")
    return name.rpartition("::")[2], tuple(_split(arguments.removesuffix(">")))


def ctype_of(parameter: Parameter, flags: dict[str, str]) -> str:
    """The type of a parameter in one instance, given its template's arguments by name."""
    stride = re.fullmatch(r"typename StrideOf<(\w+)>::Type", parameter.ctype)
    if stride is None:
        return parameter.ctype
    return {"true": "unsigned int", "false": "long long"}[flags[stride[1]]]


def _parameter(text: str) -> Parameter:
    words = " ".join(text.split())
    match = re.fullmatch(r"(.*?)(\w+)", words)
    assert match is not None, f"no parameter: {words!r}"
    return Parameter(match[2], match[1].strip())


def _split(text: str) -> list[str]:
    """Cut at the commas that no bracket holds."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in _CLOSING) - (char in _CLOSING.values())
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _end_of(text: str, start: int) -> int:
    """The place of the bracket that closes the round one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError("a bracket that is never closed")
