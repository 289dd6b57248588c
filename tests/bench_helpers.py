"""A document of results, as the benchmarks write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def document(*entries: dict[str, Any], gpu: str = "NVIDIA H200") -> dict[str, Any]:
    environment = {
        "gpu": gpu,
        "compute_capability": [9, 0],
        "num_sms": 132,
        "driver": "580.0",
        "nvrtc": "13.0",
        "packages": {"torch": "2.11.0"},
        "commit": "0123456789abcdef",
        "date": "2026-11-29",
    }
    return {"environment": environment, "entries": list(entries)}
