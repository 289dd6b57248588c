"""The environment variables that k3cupy reads, all of them, in one place.

| variable               | meaning                                                    | read      |
| ---------------------- | ---------------------------------------------------------- | --------- |
| K3CUPY_SOURCE_DIR      | an edited copy of ``cuda_src``, compiled in place of ours  | each call |
| K3CUPY_CHECK           | on: verify slots and positions on the device (waits)       | each call |
| K3CUPY_BATCH_INVARIANT | on: batch-invariant products in low-latency linear         | each call |
| K3CUPY_CACHE_DIR       | where measurements of this machine's GPUs are kept         | once      |
| K3CUPY_BUNDLE          | folders of binaries made by ``k3cupy bundle``              | each load |
| K3CUPY_NO_COMPILE      | on: what is not ready is an error                          | each load |
| K3CUPY_VLLM            | on, or the targets of vLLM that we stand in for            | at start  |
| K3CUPY_VLLM_KV_READY   | on: the promise ``kv_inputs_ready`` for vLLM's decode      | at start  |
| K3CUPY_SGLANG          | on, or the targets of SGLang that we stand in for          | at start  |

``1``, ``true``, ``on`` and ``yes`` are on; ``0``, ``false``, ``off``, ``no`` and an empty text off,
in any case and with blanks around them.
Compiled binaries are kept in CuPy's cache folder, which CUPY_CACHE_DIR names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from k3cupy.runtime.errors import reject, shown

# The dictionary behind os.environ, where it has one (CPython on POSIX, keys in bytes): two absent
# names cost 0.1 us here and 2 us through os.environ, on every call.
values: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
SOURCE_DIR = os.environ.encodekey("K3CUPY_SOURCE_DIR")
CHECK = os.environ.encodekey("K3CUPY_CHECK")
BATCH_INVARIANT = os.environ.encodekey("K3CUPY_BATCH_INVARIANT")
BUNDLE, NO_COMPILE = "K3CUPY_BUNDLE", "K3CUPY_NO_COMPILE"
VLLM, SGLANG = "K3CUPY_VLLM", "K3CUPY_SGLANG"
_KV_READY = "K3CUPY_VLLM_KV_READY"

_FLAGS = ("K3CUPY_CHECK", "K3CUPY_BATCH_INVARIANT", NO_COMPILE, _KV_READY)
_OTHERS = ("K3CUPY_SOURCE_DIR", "K3CUPY_CACHE_DIR", BUNDLE, VLLM, SGLANG)
_MISSPELT = 0.85
"""How alike a name that was meant is, of 1."""

_OURS = f"{__name__.partition('.')[0].upper()}_"
_OFF, _ON = ("0", "false", "off", "no"), ("1", "true", "on", "yes")


def source_dir() -> str | None:
    """Return the directory named by K3CUPY_SOURCE_DIR, or None."""
    return _folder("K3CUPY_SOURCE_DIR") if SOURCE_DIR in values else None


def check_enabled() -> bool:
    """Return whether K3CUPY_CHECK asks for device-side checks.

    Raises:
        ValueError: it is neither on nor off.
    """
    return CHECK in values and _flag("K3CUPY_CHECK")


def batch_invariant() -> bool:
    """Return whether K3CUPY_BATCH_INVARIANT asks for batch-invariant products.

    Raises:
        ValueError: it is neither on nor off.
    """
    return BATCH_INVARIANT in values and _flag("K3CUPY_BATCH_INVARIANT")


def no_compile() -> bool:
    """Return whether K3CUPY_NO_COMPILE forbids to compile.

    Raises:
        ValueError: it is neither on nor off.
    """
    return _flag(NO_COMPILE)


def bundles() -> tuple[str, ...]:
    """Return the folders named by K3CUPY_BUNDLE, which are written as PATH's are."""
    named = os.environ.get(BUNDLE, "").split(os.pathsep)
    return tuple(os.path.abspath(os.path.expanduser(folder)) for folder in named if folder)


def settings() -> dict[str, str]:
    """Return the variables of k3cupy's own that are set."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_OURS)}


def problems() -> Iterator[str]:
    """Yield what is wrong with these: flags that are neither on nor off, misspelt names."""
    import difflib

    for name in settings():
        if name not in (*_FLAGS, *_OTHERS):
            # Others begin so too, as those of the tests.
            for meant in difflib.get_close_matches(name, (*_FLAGS, *_OTHERS), 1, _MISSPELT):
                yield f"{name} is no variable of k3cupy: {meant} is"
        elif name in _FLAGS:
            try:
                _flag(name)
            except ValueError as error:
                yield str(error)


def cache_dir() -> str | None:
    """Return the directory named by K3CUPY_CACHE_DIR, or None."""
    return _folder("K3CUPY_CACHE_DIR")


def vllm_targets() -> tuple[str, ...] | None:
    """Return what K3CUPY_VLLM names, () for everything, None for nothing."""
    return _names(VLLM)


def vllm_kv_ready() -> bool:
    """Return whether K3CUPY_VLLM_KV_READY makes the promise.

    Raises:
        ValueError: it is neither on nor off.
    """
    return _flag(_KV_READY)


def sglang_targets() -> tuple[str, ...] | None:
    """Return what K3CUPY_SGLANG names, () for everything, None for nothing."""
    return _names(SGLANG)


def _names(name: str) -> tuple[str, ...] | None:
    value = os.environ.get(name, "").strip()
    if value.lower() in ("", *_OFF):
        return None
    names = (part.strip() for part in value.split(","))
    return () if value.lower() in _ON else tuple(filter(None, names))


def _folder(name: str) -> str | None:
    return os.path.expanduser(os.environ.get(name, "")) or None


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    text = value.strip().lower()
    if text not in _ON and text and text not in _OFF:
        reject(name, f"{', '.join(_OFF)} or {', '.join(_ON)}", shown(value))
    return text in _ON
