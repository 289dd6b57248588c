"""Loads the binary with the operators: here, makes them."""

import slow_kernels
import torch

LIBRARY = slow_kernels.load()


def dsv3_fused_a_gemm(
    output: torch.Tensor, mat_a: torch.Tensor, mat_b: torch.Tensor, enable_pdl: bool = False
) -> None:
    torch.ops._C.dsv3_fused_a_gemm(output, mat_a, mat_b, enable_pdl)
