from typing import Any

import torch


def default_unquantized_gemm(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    return torch.nn.functional.linear(x, weight, bias)


def other_gemm(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Of a backend that the user named."""
    return torch.nn.functional.linear(x, weight, bias)
