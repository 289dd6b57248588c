"""The skinny GEMM on CPU memory: the function of the fused-A GEMM, for bfloat16 and float16."""

from __future__ import annotations

from k3cupy.reference.fused_a_gemm import fused_a_gemm_reference as skinny_gemm_reference

__all__ = ["skinny_gemm_reference"]
