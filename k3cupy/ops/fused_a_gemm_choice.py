"""Which configuration a fused-A GEMM gets."""

from __future__ import annotations

from dataclasses import replace

from k3cupy.ops.fused_a_gemm_config import FusedAGemmConfig
from k3cupy.runtime.devices import DeviceInfo


def choose(
    n: int, k: int, num_tokens: int, device: DeviceInfo, *, batch_invariant: bool = False
) -> tuple[FusedAGemmConfig, str]:
    """Return the configuration for a call and the reason in words.

    Args:
        n: rows of the weight.
        k: its columns.
        num_tokens: rows of x, from 1 to 64.
        device: the GPU.
        batch_invariant: only what sums in the same order for every number of tokens.
    """
    tile_m = next(tile for tile in (8, 16, 32, 64) if tile >= num_tokens)
    config = FusedAGemmConfig(
        tile_m=tile_m,
        tile_n=32 if tile_m >= 32 else 16,
        tile_k=64 if k < 256 else 256,
        stages=8,
        stages_x=3,
        warps_k=4,
        warps_n=1,
        split_k=1,
        copy_warps=2,
    )
    half = device.shared_memory_optin // 2
    while config.stages > 2 and config.shared_bytes > half:
        config = replace(config, stages=config.stages - 1)
    if not config.is_valid(device):
        config = replace(config, stages_x=2, tile_k=64)
    return config, "the tile follows from the number of tokens"
