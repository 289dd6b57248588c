from typing import Any

import torch

from vllm.model_executor.layers.utils import default_unquantized_gemm


class ModelWeightParameter(torch.nn.Parameter):
    """Each look at an attribute goes through Python; ``looks`` counts them."""

    looks = 0

    def __new__(cls, data: torch.Tensor) -> Any:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor) -> None:
        self.tp_rank = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            cls.looks += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class UnquantizedLinearMethod:
    def __init__(self) -> None:
        self._gemm_impl = default_unquantized_gemm

    def apply(self, layer: torch.nn.Module, x: Any, bias: Any = None) -> Any:
        return self._gemm_impl(layer, x, layer.weight, bias)


class LinearBase(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, bias: Any = None, quant_method: Any = None) -> None:
        super().__init__()
        self.weight = ModelWeightParameter(weight)
        self.bias = bias
        self.quant_method = quant_method or UnquantizedLinearMethod()

    def forward(self, x: torch.Tensor) -> Any:
        return self.quant_method.apply(self, x, self.bias)


class MergedColumnParallelLinear(LinearBase):
    pass


class ColumnParallelLinear(LinearBase):
    pass


class RowParallelLinear(LinearBase):
    pass


class ReplicatedLinear(LinearBase):
    pass
