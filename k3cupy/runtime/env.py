"""The environment variables that k3cupy reads, all of them, in one place.

| variable               | meaning                                                    | read      |
| ---------------------- | ---------------------------------------------------------- | --------- |
| K3CUPY_SOURCE_DIR      | an edited copy of ``cuda_src``, compiled in place of ours  | each call |
| K3CUPY_CHECK           | 1: verify slots and positions on the device (waits for it) | each call |
| K3CUPY_BATCH_INVARIANT | 1: batch-invariant products in low-latency linear          | each call |
| K3CUPY_CACHE_DIR       | where measurements of this machine's GPUs are kept         | once      |

Compiled binaries are kept by CuPy, in the directory that CUPY_CACHE_DIR names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

# The dictionary behind os.environ, where it has one (CPython on POSIX, keys in bytes): two absent
# names cost 0.1 us here and 2 us through os.environ, on every call.
values: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
SOURCE_DIR = os.environ.encodekey("K3CUPY_SOURCE_DIR")
CHECK = os.environ.encodekey("K3CUPY_CHECK")
BATCH_INVARIANT = os.environ.encodekey("K3CUPY_BATCH_INVARIANT")


def source_dir() -> str | None:
    """Return the directory named by K3CUPY_SOURCE_DIR, or None."""
    return (os.environ.get("K3CUPY_SOURCE_DIR") or None) if SOURCE_DIR in values else None


def check_enabled() -> bool:
    """Return whether K3CUPY_CHECK asks for device-side checks."""
    return CHECK in values and os.environ.get("K3CUPY_CHECK", "0") not in ("", "0")


def batch_invariant() -> bool:
    """Return whether K3CUPY_BATCH_INVARIANT asks for batch-invariant products."""
    if BATCH_INVARIANT not in values:
        return False
    return os.environ.get("K3CUPY_BATCH_INVARIANT", "0") not in ("", "0")


def cache_dir() -> str | None:
    """Return the directory named by K3CUPY_CACHE_DIR, or None."""
    return os.environ.get("K3CUPY_CACHE_DIR") or None
