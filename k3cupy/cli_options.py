"""Options that several commands take."""

from __future__ import annotations

import re
from typing import Any

import click


class _Shape(click.ParamType):
    """N x K of a weight, written ``2112x7168``."""

    name = "NxK"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        """Return (N, K)."""
        match = re.fullmatch(r"(\d+)x(\d+)", str(value))
        if match is None:
            self.fail(f"{value!r} is no shape; write N x K as 2112x7168", param, ctx)
        return int(match[1]), int(match[2])


SHAPE = _Shape()
