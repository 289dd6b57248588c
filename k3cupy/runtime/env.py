"""The environment variables that k3cupy reads, all of them, in one place.

| variable            | meaning                                                        | read      |
| ------------------- | -------------------------------------------------------------- | --------- |
| K3CUPY_SOURCE_DIR   | an edited copy of ``cuda_src`` to compile instead of the shipped | each call |
| K3CUPY_CHECK        | 1: verify slots and positions on the device, at a synchronise  | each call |

Compiled binaries are kept by CuPy, in the directory that CUPY_CACHE_DIR names.
"""

from __future__ import annotations

import os


def source_dir() -> str | None:
    """Return the directory named by K3CUPY_SOURCE_DIR, or None."""
    return os.environ.get("K3CUPY_SOURCE_DIR") or None


def check_enabled() -> bool:
    """Return whether K3CUPY_CHECK asks for device-side checks."""
    return os.environ.get("K3CUPY_CHECK", "0") not in ("", "0")
