"""Variables are read when they are asked for, as vLLM does it."""

import os
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "VLLM_BATCH_INVARIANT":
        return bool(int(os.getenv(name, "0")))
    raise AttributeError(name)


def compile_factors() -> dict[str, object]:
    return {"VLLM_BATCH_INVARIANT": os.getenv("VLLM_BATCH_INVARIANT", "0")}
