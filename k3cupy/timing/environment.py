"""Where a number was measured: a result without this is not kept."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

from k3cupy.runtime import devices, toolchain
from k3cupy.runtime.config import config_info


def describe(device: int, commit: str | None = None) -> dict[str, Any]:
    """Return GPU, driver, versions, commit and date.

    Args:
        device: GPU ordinal.
        commit: of the sources, where they are not in a git checkout.
    """
    info = config_info()
    gpu = devices.info(device)
    return {
        "gpu": gpu.name,
        "compute_capability": list(gpu.compute_capability),
        "num_sms": gpu.num_sms,
        "shared_memory_optin": gpu.shared_memory_optin,
        "driver": _driver(),
        "nvrtc": info["nvrtc"],
        "cuda_headers": toolchain.header_version(),
        "python": info["python"],
        "packages": info["packages"],
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def _driver() -> str:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else "unknown"


def _commit() -> str:
    """Return the checkout's commit, marked where the tree differs; "unknown" outside one."""
    package = Path(__file__).resolve().parent.parent
    git = ("git", "-C", str(package.parent))
    if _output(*git, "rev-parse", "--show-toplevel") != str(package.parent):
        return "unknown"  # an installed package may lie inside somebody else's checkout
    commit = _output(*git, "rev-parse", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--", package.name, "cuda_src")
    return f"{commit}{'-dirty' if changed else ''}" if commit else "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
