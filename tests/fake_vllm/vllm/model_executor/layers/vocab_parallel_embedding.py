from typing import Any

import torch

from vllm.model_executor.layers.utils import default_unquantized_gemm


class UnquantizedEmbeddingMethod:
    def apply(self, layer: torch.nn.Module, x: Any, bias: Any = None) -> Any:
        return default_unquantized_gemm(layer, x, layer.weight, bias)


class VocabParallelEmbedding(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()


class ParallelLMHead(VocabParallelEmbedding):
    pass
