"""Small DeepSeek-V3 models of transformers, and greedy decoding with any cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, StaticCache

VOCABULARY, ROOM = 97, 64
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}


def config_of(**changes: Any) -> DeepseekV3Config:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
        "q_lora_rank": 48,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # so that tokens decide what comes next
    }
    return DeepseekV3Config(**sizes | changes)


def model_of(dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> Any:
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config_of(**changes)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:  # ones would not tell one norm from another
            parameter.uniform_(0.5, 1.5)
    return with_weights_of(dtype, model.to(device))


def with_weights_of(dtype: torch.dtype, model: Any) -> Any:
    """The model with its weights in another type; angles stay float32, as in a loaded model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def static_cache(model: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=ROOM)


def prompt_of(batch: int, device: str = "cpu") -> tuple[Tensor, Tensor | None]:
    """Tokens, and for more than one sequence a mask: the others are padded on the left."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (batch, 7))
    if batch == 1:
        return tokens.to(device), None
    mask = torch.ones_like(tokens)
    for i in range(1, batch):
        mask[i, : 1 + i % 5] = 0
    return tokens.to(device), mask.to(device)


@torch.no_grad()
def decode(
    model: Any,
    cache: Any,
    batch: int,
    steps: int = 8,
    given: Tensor | None = None,
    forward: Any = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [batch, steps], the most likely ones or those given, and float32 logits of each."""
    device = str(model.device)
    tokens, mask = prompt_of(batch, device)
    position = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=position,
        past_key_values=cache,
        use_cache=True,
    )
    found, logits = [], []
    for i in range(steps):
        logits.append(out.logits[:, -1].float())
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        found.append(token if given is None else given[:, i : i + 1])
        if mask is None:
            position = torch.full((1, 1), tokens.shape[1] + i, device=device)
        else:
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=-1)
            position = mask.sum(-1, keepdim=True) - 1
        out = (forward or model)(
            input_ids=found[-1],
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
    return torch.cat(found, dim=1), torch.stack(logits)


def relative_error(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())
