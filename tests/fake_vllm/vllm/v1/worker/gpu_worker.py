"""Takes the warm-up's name by value."""

from typing import Any

from vllm.model_executor.warmup.kernel_warmup import kernel_warmup


def start(worker: Any) -> None:
    kernel_warmup(worker)
