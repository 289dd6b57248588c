"""The absorbed decode of DeepSeek-V3 on a GPU: our kernels, in eager mode and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_helpers import fresh_plans

from k3cupy.engines import transformers as engine
from k3cupy.runtime import instances

pytest.importorskip("transformers")

from transformers_helpers import (
    ROOM,
    decode,
    model_of,
    prompt_of,
    relative_error,
    static_cache,
    with_weights_of,
)

from k3cupy.engines import transformers_attention as ours
from k3cupy.engines.transformers_cache import LatentCache, LatentLayer

pytestmark = pytest.mark.gpu

# Wide enough, and of such widths, that the linear layers have kernels of ours too.
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "q_lora_rank": 512,
    "initializer_range": 0.05,
}
ROW = "attention of model.layers.*.self_attn"
each_batch = pytest.mark.parametrize("batch", [1, 4, 16])


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    ours.targets.clear()
    yield
    engine.uninstall()


def latent_cache(model: Any) -> LatentCache:
    return LatentCache(model.config, ROOM)


@each_batch
def test_greedy_tokens_in_float32(batch: int) -> None:
    model = model_of(device="cuda", **WIDE)
    expected, logits = decode(model, static_cache(model), batch, steps=32)
    engine.install(model)
    found, mine = decode(model, latent_cache(model), batch, steps=32)
    assert torch.equal(found, expected)
    assert float((mine - logits).abs().max()) < 1e-3


@each_batch
@pytest.mark.parametrize("interleave", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_lose_no_more_than_transformers_own(
    batch: int, interleave: bool, dtype: torch.dtype
) -> None:
    model = model_of(device="cuda", rope_interleave=interleave, **WIDE)
    tokens, expected = decode(model, static_cache(model), batch, steps=24)
    with_weights_of(dtype, model)
    own = relative_error(decode(model, static_cache(model), batch, 24, tokens)[1], expected)
    engine.install(model)
    error = relative_error(decode(model, latent_cache(model), batch, 24, tokens)[1], expected)
    assert error < 1.3 * own
    assert engine.report()[ROW].served == 2 * 24
    assert engine.report()[ours.JOINED].served == 2 * 24


@torch.no_grad()
def captured(model: Any, cache: LatentCache, batch: int, steps: int) -> list[torch.Tensor]:
    """Logits of greedy steps behind a prompt; all but the first are replays of a captured step."""
    tokens, mask = prompt_of(batch, "cuda")
    if mask is None:
        mask = torch.ones_like(tokens)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=position,
        past_key_values=cache,
        use_cache=True,
    )
    seen = torch.zeros(batch, ROOM, dtype=mask.dtype, device="cuda")
    seen[:, : mask.shape[1]] = mask
    seen[:, mask.shape[1] :] = 1  # what is not there yet is hidden by being later
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    position = mask.sum(-1, keepdim=True)
    found = [out.logits[:, -1].clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(
            input_ids=token,
            attention_mask=seen,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
        logits = out.logits[:, -1]
        token.copy_(logits.argmax(-1, keepdim=True))
        position.add_(1)
    for _ in range(steps - 1):
        graph.replay()
        found.append(logits.clone())
    return found


def test_install_loads_all_that_a_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(torch.bfloat16, "cuda", **WIDE)
    monkeypatch.setattr(instances, "_attempts", {})  # as in a process that has run nothing yet

    def compiles(_: Any, instance: Any, *__: Any) -> None:
        raise AssertionError(f"{instance} was not loaded")

    with fresh_plans(tmp_path):
        engine.install(model, tokens=(4, 28))  # a step, and the prompt
        monkeypatch.setattr(instances, "_kept_or_compiled", compiles)
        decode(model, latent_cache(model), 4, steps=2)
    assert engine.report()[ROW].served == 4


@each_batch
def test_replays_are_eager_steps(batch: int) -> None:
    """Lengths, positions and tokens live on the device."""
    model = model_of(torch.bfloat16, "cuda", **WIDE)
    engine.install(model, tokens=batch)
    decode(model, latent_cache(model), batch, steps=2)
    found = captured(model, latent_cache(model), batch, 24)
    tokens = torch.stack([logits.argmax(-1) for logits in found], dim=1)
    _, expected = decode(model, latent_cache(model), batch, 24, tokens)
    assert relative_error(torch.stack(found).float(), expected) < 2e-3


def test_a_graph_goes_on_where_the_cache_was_wound_back_to() -> None:
    model = model_of(torch.bfloat16, "cuda", **WIDE)
    engine.install(model)
    decode(model, latent_cache(model), 4, steps=2)
    cache = latent_cache(model)
    first = captured(model, cache, 4, 8)
    assert cache.get_seq_length().item() == 7 + 7
    layer: LatentLayer = cache.layers[0]
    assert layer.latent.shape == (4, 64, 576)
    address = layer.latent.data_ptr()
    cache.reset()
    again = captured(model, cache, 4, 8)
    assert layer.latent.data_ptr() == address
    assert torch.equal(torch.stack(first), torch.stack(again))


def test_generate_over_a_latent_cache() -> None:
    model = model_of(device="cuda", **WIDE)
    tokens, _ = prompt_of(1, "cuda")
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "disable_compile": True,
    }
    expected = model.generate(tokens, **options)
    engine.install(model)
    found = model.generate(tokens, past_key_values=latent_cache(model), **options)
    assert torch.equal(found, expected)
    assert engine.report()[ROW].served == 2 * 7


def test_a_model_that_moves_to_the_gpu_is_joined_there() -> None:
    model = model_of(torch.bfloat16, **WIDE)
    engine.install(model)
    model.to("cuda")
    layer = model.model.layers[0].self_attn
    assert layer._joined.weight.is_cuda
    decode(model, latent_cache(model), 4, steps=4)
    assert engine.report()[ours.JOINED].handed_back == {}
    assert engine.report()[ours.JOINED].served == 8
