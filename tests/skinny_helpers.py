"""The skinny GEMM under test, with the helpers of both GEMMs."""

from __future__ import annotations

from functools import partial
from typing import Any

import gemm_helpers
from helpers import BF16, FP16

import k3cupy

DTYPES = (BF16, FP16)
TOKENS = range(1, 9)
"""Of the dot products; tensor cores take up to 16."""


def op(*args: Any, **kwargs: Any) -> Any:
    """The operation under test, looked up at call time."""
    return k3cupy.skinny_gemm(*args, **kwargs)


run_and_check = partial(gemm_helpers.run_and_check, operation=op)
