"""Which kernel a linear layer gets, asked by the numbers of a product alone."""

from __future__ import annotations

from typing import Any

from k3cupy.call.choice import Choice
from k3cupy.choose.gemm import ALL, choose
from k3cupy.ops import batch_invariance
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import ToolchainError, reject, shown
from k3cupy.runtime.tensors import is_integer


def select_backend(
    num_tokens: int,
    n: int,
    k: int,
    *,
    device: Any = None,
    gpu: Any = None,
    has_residual: bool = False,
) -> str | None:
    """Return the kernel that the plans have for a product: ``"fused_a"``, ``"skinny"`` or None.

    Args:
        num_tokens: rows of x.
        n: rows of the weight.
        k: its columns.
        device: ordinal, ``"cuda:1"``, ``torch.device`` or ``DeviceInfo``; None: the current GPU.
        gpu: in place of a device a GPU that need not be here: ``"h200"``, the name that its driver
            gives, an architecture, or a ``DeviceInfo``.
        has_residual: a residual is added.

    Returns:
        None: the framework's linear; also where there is no GPU, and for no tokens. The reason is
        told by ``explain_low_latency_gemm``, and by ``k3cupy explain`` for weights by their size.

    Raises:
        ValueError: a number is negative or no tensor's, or there is no such device or GPU.
        TypeError: both a device and a GPU are named.

    Example:
        >>> import k3cupy
        >>> k3cupy.select_backend(16, 2112, 7168, gpu="h200")
        'fused_a'
        >>> k3cupy.select_backend(300, 2112, 7168, gpu="h200") is None
        True
    """
    for name, value in (("num_tokens", num_tokens), ("n", n), ("k", k)):
        if not is_integer(value) or not 0 <= value < 1 << 63:
            reject(name, "an integer from 0 to 2^63 - 1", shown(value))
    if gpu is not None and device is not None:
        reject("gpu", "None where a device is named", shown(gpu), error=TypeError)
    try:
        named = device if isinstance(device, DeviceInfo) else gpu
        there = devices.info(devices.ordinal_of(device)) if named is None else devices.named(named)
    except ToolchainError:
        return None
    if 0 in (num_tokens, n, k):
        return None
    found = choice_of(int(num_tokens), int(n), int(k), there, has_residual=has_residual)
    return None if found.is_fallback else found.kernel


def choice_of(
    num_tokens: int, n: int, k: int, gpu: DeviceInfo, *, has_residual: bool = False
) -> Choice:
    """Return what a linear layer runs for a product on a GPU, and why; in the mode that holds."""
    invariant = batch_invariance.is_batch_invariant()
    return choose(ALL, n, k, num_tokens, gpu, residual=has_residual, batch_invariant=invariant)
