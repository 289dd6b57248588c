from typing import Any

import torch

from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

PLANNED: list[tuple[int, ...]] = []
"""Shapes of x in calls that came to the plan of this module."""


def _run_plan(plan: dict[int, Any], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    PLANNED.append(tuple(x.shape))
    if x.shape[0] not in plan:
        return None
    output = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    ops.dsv3_fused_a_gemm(output, x, weight.t(), enable_pdl=True)
    return output


class _KimiK3LowLatencyApply:
    def __init__(self, plan: dict[int, Any]) -> None:
        super().__init__()
        self._plan = plan

    def apply(self, layer: torch.nn.Module, x: Any, bias: Any = None) -> Any:
        if bias is None:
            output = _run_plan(self._plan, x, layer.weight)
            if output is not None:
                return output
        return super().apply(layer, x, bias)


class KimiK3LowLatencyLinearMethod(_KimiK3LowLatencyApply, UnquantizedLinearMethod):
    def __init__(self, plan: dict[int, Any], residual_plan: dict[int, Any]) -> None:
        super().__init__(plan)
        self._residual_plan = residual_plan

    def apply_with_residual(
        self, layer: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        return torch.addmm(residual, x, layer.weight.t())


class KimiK3LowLatencyEmbeddingMethod(_KimiK3LowLatencyApply, UnquantizedEmbeddingMethod):
    pass
