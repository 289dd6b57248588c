"""What the warm-ups of the MLA operations share: the caches by their public names."""

from __future__ import annotations

from collections.abc import Sequence

from k3cupy.constants import CTYPES
from k3cupy.ops import checks
from k3cupy.ops.warmup_options import WarmupOptions, dtypes_of, several

_CACHES = {"bf16": "same", "fp16": "same", "same": "same", "fp8": "fp8", "fp8_ds_mla": "ds_mla"}


def caches_and_dtypes(options: WarmupOptions) -> tuple[Sequence[str], Sequence[str]]:
    """Return the cache formats as variants name them, and the types of the inputs.

    Raises:
        ValueError: an option names one that does not exist.
    """
    caches = several(options.kv_cache)
    for name in caches:
        if name not in _CACHES:
            checks.reject("kv_cache", " or ".join(map(repr, _CACHES)), repr(name))
    return [_CACHES[name] for name in caches], dtypes_of(options, CTYPES.__contains__)
