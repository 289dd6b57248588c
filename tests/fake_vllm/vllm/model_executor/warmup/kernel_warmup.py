from typing import Any

SEEN: list[tuple[Any, bool]] = []


def kernel_warmup(worker: Any, *, process_local_only: bool = False) -> None:
    SEEN.append((worker, process_local_only))
