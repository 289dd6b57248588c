"""DeepSeek-V3 of transformers with k3cupy installed: the same tokens, and what stays as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import json
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import k3cupy
from k3cupy.engines import transformers as engine
from k3cupy.torch.torch_linear import LowLatencyLinear

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM, DynamicCache
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs
from transformers_helpers import (
    ROOM,
    YARN,
    config_of,
    decode,
    model_of,
    prompt_of,
    relative_error,
    static_cache,
    with_weights_of,
)

from k3cupy.engines import transformers_attention as ours
from k3cupy.engines import transformers_cache
from k3cupy.engines.transformers_cache import LatentCache, halves_of, pairs_of

ROW = "attention of model.layers.*.self_attn"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PREFILL = "more than one token a sequence: keys and values are expanded"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts": {"first_k_dense_replace": 1},
    "halves": {"rope_interleave": False},
    "queries not compressed": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "yarn": {"rope_parameters": YARN},
    "eager": {"attn_implementation": "eager"},
}
both_ropes = pytest.mark.parametrize("changes", [{}, VARIANTS["halves"]], ids=["pairs", "halves"])
each_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)


def refuses(message: str) -> Any:
    """A message of the agreed form, word for word up to the advice."""
    return pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    ours.targets.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    engine.uninstall()


def latent_cache(model: Any) -> LatentCache:
    return LatentCache(model.config, ROOM)


def attention(model: Any, layer: int = 0) -> Any:
    return model.model.layers[layer].self_attn


def handed_back() -> dict[str, int]:
    return dict(engine.report()[ROW].handed_back)


# The same tokens


@each_variant
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_tokens_are_those_of_the_model_as_it_was(
    changes: dict[str, Any], batch: int
) -> None:
    model = model_of(**changes)
    expected, logits = decode(model, static_cache(model), batch)
    engine.install(model)
    found, ours_ = decode(model, latent_cache(model), batch)
    assert torch.equal(found, expected)
    assert float((ours_ - logits).abs().max()) < 2e-4
    assert engine.report()[ROW].served == 2 * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "changes", [VARIANTS["plain"], VARIANTS["halves"]], ids=["pairs", "halves"]
)
def test_16_bits_go_through_our_epilogue_and_lose_no_more_than_theirs(
    dtype: torch.dtype, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(**changes)
    tokens, expected = decode(model, static_cache(model), 4, steps=8)
    with_weights_of(dtype, model)
    own = relative_error(decode(model, static_cache(model), 4, 8, tokens)[1], expected)
    calls = []
    run = ours.fused_mla_decode_q_concat_kv_cache_insert

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return run(*args, **kwargs)

    monkeypatch.setattr(ours, "fused_mla_decode_q_concat_kv_cache_insert", counted)
    engine.install(model)
    error = relative_error(decode(model, latent_cache(model), 4, 8, tokens)[1], expected)
    assert error < 1.3 * own
    assert len(calls) == 2 * 8
    assert all(("positions" in call) is (not changes) for call in calls)


def test_rope_by_sequence_and_rope_for_all_are_the_same() -> None:
    """One row of cosines for the batch, or a row a sequence: the table has as many."""
    model = model_of(torch.bfloat16)
    engine.install(model)
    given = torch.arange(12).view(2, 6)
    found = []
    for rows in (1, 2):
        cache = latent_cache(model)
        for step in range(6):
            position = torch.full((rows, 1), step)
            out = model(
                input_ids=given[:, step : step + 1],
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            )
        found.append(out.logits)
    assert torch.equal(*found)
    assert engine.report()[ROW].handed_back == {}


def test_a_cache_is_decoded_from_its_first_token_on() -> None:
    """No prompt: the first call is already one of ours, and makes the cache."""
    model = model_of()
    token = torch.tensor([[5], [7]])
    expected = model(input_ids=token).logits
    engine.install(model)
    with torch.no_grad():
        found = model(input_ids=token, past_key_values=latent_cache(model), use_cache=True).logits
    assert engine.report()[ROW].served == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate(beams: int) -> None:
    model = model_of()
    tokens, _ = prompt_of(1)
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "num_beams": beams,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    expected = model.generate(tokens, **options)
    engine.install(model)
    found = model.generate(tokens, past_key_values=latent_cache(model), **options)
    assert torch.equal(found, expected)
    assert engine.report()[ROW].served == 2 * 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_without_a_break(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        pytest.importorskip("k3cupy.torch.operators")
    model = model_of(dtype, num_hidden_layers=1)
    engine.install(model)
    expected, _ = decode(model, latent_cache(model), 1, steps=4)
    served = engine.report()[ROW].served
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager", dynamic=False)
    found, _ = decode(model, latent_cache(model), 1, steps=4, forward=compiled)
    assert torch.equal(found, expected)
    assert engine.report()[ROW].served == served  # compiled code does not count


# The cache


@pytest.mark.parametrize(
    "changes", [VARIANTS["plain"], VARIANTS["halves"]], ids=["pairs", "halves"]
)
def test_the_cache_holds_what_transformers_own_holds(changes: dict[str, Any]) -> None:
    model = model_of(**changes)
    theirs_, mine = static_cache(model), latent_cache(model)
    tokens, _ = decode(model, theirs_, 4, steps=5)
    engine.install(model)
    decode(model, mine, 4, 5, tokens)
    for own, layer in zip(theirs_.layers, mine.layers, strict=True):
        latent, keys = layer.by_sequence().split((512, 64), dim=-1)
        keys = halves_of(keys) if not changes else keys
        torch.testing.assert_close(latent, own.keys[:, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(keys, own.values[:, 0], rtol=1e-4, atol=1e-4)
        assert not layer.by_sequence()[:, 12:].any()
        assert layer.latent.shape == (4 * ROOM // 64, 64, 576)
        assert layer.slots.tolist() == [12 + ROOM * i for i in range(4)]


@each_variant
def test_transformers_own_attention_over_it_has_its_own_bits(
    changes: dict[str, Any],
) -> None:
    model = model_of(torch.bfloat16, **changes)
    _, expected = decode(model, static_cache(model), 4)
    assert torch.equal(decode(model, latent_cache(model), 4)[1], expected)


def test_pairs_and_halves() -> None:
    halves = torch.tensor([0, 2, 4, 1, 3, 5])
    assert pairs_of(halves).tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(halves_of(pairs_of(halves)), halves)


def test_a_full_cache_is_an_error_and_keeps_its_bits() -> None:
    model = model_of()
    engine.install(model)
    cache = LatentCache(model.config, 8, block_size=4)
    decode(model, cache, 1, steps=1)  # 7 tokens and one
    kept = cache.layers[0].latent.clone()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"max_cache_len: expected room for 9 tokens .* got 8"),
    ):
        model(input_ids=torch.tensor([[1]]), past_key_values=cache, use_cache=True)
    assert torch.equal(cache.layers[0].latent, kept)


def test_a_cache_is_used_again_in_place() -> None:
    model = model_of()
    engine.install(model)
    cache = latent_cache(model)
    assert int(cache.get_seq_length()) == 0
    expected, _ = decode(model, cache, 4)
    address = cache.layers[0].latent.data_ptr()
    assert int(cache.get_seq_length()) == 15
    cache.crop(-3)
    assert int(cache.get_seq_length()) == 12
    cache.crop(-99)
    assert cache.layers[0].slots.tolist() == [0, ROOM, 2 * ROOM, 3 * ROOM], "each in its own blocks"
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(decode(model, cache, 4)[0], expected)
    assert cache.layers[0].latent.data_ptr() == address


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 8), "config: expected that of a DeepSeek-V3 model, got NoneType"),
        ((config_of(), 0), "max_cache_len: expected a number of tokens, at least 1, got 0"),
        ((config_of(), 8, 2.0), "block_size: expected a number of tokens, at least 1, got 2.0"),
    ],
)
def test_what_a_cache_refuses(arguments: Any, message: str) -> None:
    config, length, *size = arguments
    with refuses(message):
        LatentCache(config, length, **({"block_size": size[0]} if size else {}))


def test_a_cache_refuses_another_batch() -> None:
    model = model_of()
    cache = latent_cache(model)
    decode(model, cache, 1, steps=1)
    with refuses("hidden_states: expected a batch of 1 as in the cache, got 2"):
        model(input_ids=torch.ones(2, 3, dtype=torch.int64), past_key_values=cache)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("changes", "installed"),
    [
        (VARIANTS["halves"], True),
        ({"kv_lora_rank": 256}, True),
        ({"kv_lora_rank": 256}, False),
        ({"qk_rope_head_dim": 32}, False),
    ],
)
def test_a_cache_of_another_config_is_refused(
    changes: dict[str, Any], installed: bool, tokens: int
) -> None:
    model, other = model_of(), config_of(**changes)
    if installed:
        engine.install(model)
    names = "kv_lora_rank {}, qk_rope_head_dim {} and rope_interleave {}"
    sizes = other.kv_lora_rank, other.qk_rope_head_dim, other.rope_interleave
    ids = torch.ones(1, tokens, dtype=torch.int64)
    expected = f"a LatentCache of the model's {names.format(512, 64, True)}"
    with torch.no_grad(), refuses(f"cache: expected {expected}, got one of {names.format(*sizes)}"):
        model(input_ids=ids, past_key_values=LatentCache(other, ROOM))


def test_layers_that_are_not_installed_need_no_cache_of_their_rotation() -> None:
    model, other = model_of(), config_of(**VARIANTS["halves"])
    expected, _ = decode(model, static_cache(model), 1)
    assert torch.equal(decode(model, LatentCache(other, ROOM), 1)[0], expected)


def test_the_same_tensors_written_again_are_a_new_step() -> None:
    """Layers by hand, whose cosines and mask lie in the same memory at every step."""
    model = model_of(torch.bfloat16)
    expected = []
    hidden = torch.randn(3, 2, 1, 64).bfloat16()
    rotations = [model.model.rotary_emb(hidden[0], torch.full((1, 1), step)) for step in range(3)]
    masks = [(torch.arange(ROOM) <= step).expand(2, 1, 1, ROOM) for step in range(3)]
    own = static_cache(model)
    for step in range(3):
        h = hidden[step]
        for layer in model.model.layers:
            h = layer.self_attn(h, rotations[step], masks[step], own)[0]
        expected.append(h)
    engine.install(model)
    cache = latent_cache(model)
    with torch.inference_mode():  # no counts of writes
        rotation = tuple(t.clone() for t in rotations[0])
        mask = masks[0].clone()
        for step in range(3):
            for mine, new in zip((*rotation, mask), (*rotations[step], masks[step]), strict=True):
                mine.copy_(new)
            h = hidden[step]
            for layer in model.model.layers:
                h = layer.self_attn(h, rotation, mask, cache)[0]
            assert relative_error(h.float(), expected[step].float()) < 0.03
    assert engine.report()[ROW].served == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_of_padding_alone_is_not_nan(dtype: torch.dtype) -> None:
    """A free place of a batch, whose logits a sampler still looks at."""
    model = model_of(dtype)
    engine.install(model)
    cache, mask = latent_cache(model), torch.tensor([[1, 1, 1], [0, 0, 0]])
    for tokens in (3, 1):
        ids = torch.ones(2, tokens, dtype=torch.int64)
        with torch.no_grad():
            out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        assert torch.isfinite(out.logits).all()
        mask = torch.cat((mask, mask[:, :1]), dim=-1)
    assert engine.report()[ROW].served == 2


def test_layers_share_what_is_the_same_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    table_of = transformers_cache._table_of
    monkeypatch.setattr(
        transformers_cache, "_table_of", lambda rotation: made.append(1) or table_of(rotation)
    )
    model = model_of(num_hidden_layers=3)
    engine.install(model)
    decode(model, latent_cache(model), 4, steps=5)
    assert len(made) == 5


def test_sequences_go_on_from_others() -> None:
    """As beams do, in place and in every layer."""
    model = model_of()
    engine.install(model)
    cache = latent_cache(model)
    decode(model, cache, 4, steps=1)
    before = [layer.by_sequence().clone() for layer in cache.layers]
    addresses = [layer.latent.data_ptr() for layer in cache.layers]
    order = torch.tensor([2, 2, 0, 3])
    cache.reorder_cache(order)
    for layer, rows, address in zip(cache.layers, before, addresses, strict=True):
        assert torch.equal(layer.by_sequence(), rows[order])
        assert not torch.equal(rows[0], rows[2])
        assert layer.latent.data_ptr() == address


def test_a_cache_may_wait_elsewhere() -> None:
    model = model_of()
    engine.install(model)
    cache = latent_cache(model)
    for layer in cache.layers:  # nothing is there yet
        layer.offload()
        layer.prefetch()
    decode(model, cache, 1, steps=1)
    rows = cache.layers[0].latent.clone()
    cache.offload(0)
    cache.layers[0].prefetch()
    assert torch.equal(cache.layers[0].latent, rows)
    cache.layers[1].device = torch.device("meta")
    cache.layers[1].prefetch()
    assert cache.layers[1].latent.is_meta
    assert cache.layers[1].latent.shape == rows.shape


def test_a_mask_that_is_written_within_a_step_is_made_anew() -> None:
    cache, rotation = LatentCache(config_of(), ROOM), (torch.ones(1, 1, 64), torch.ones(1, 1, 64))
    mask = torch.ones(1, 1, 1, ROOM, dtype=torch.bool)
    _, seen = cache.step(0, rotation, mask, torch.float32)
    mask[..., 1:] = False
    _, now = cache.step(1, rotation, mask, torch.float32)
    assert seen is not None
    assert now is not None
    assert (int((seen == 0).sum()), int((now == 0).sum())) == (ROOM, 1)


def test_layers_by_hand_may_leave_the_mask_away() -> None:
    model = model_of()
    engine.install(model)
    caches = latent_cache(model), latent_cache(model)
    hidden = torch.randn(3, 2, 1, 64)
    for step in range(3):
        rotation = model.model.rotary_emb(hidden[0], torch.full((1, 1), step))
        mask = (torch.arange(ROOM) <= step).expand(2, 1, 1, ROOM)
        layer = attention(model)
        found = [
            layer(hidden[step], rotation, m, cache)[0]
            for m, cache in zip((mask, None), caches, strict=True)
        ]
        assert torch.equal(*found)


# What stays


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_uninstall_restores_the_model_exactly() -> None:
    model = model_of(torch.bfloat16)
    parameters = dict(model.named_parameters())
    before, classes = bits(model), [type(m) for m in model.modules()]
    _, expected = decode(model, static_cache(model), 4)
    engine.install(model)
    assert type(attention(model)) is ours.AbsorbedAttention
    assert type(attention(model).o_proj) is LowLatencyLinear
    assert same_bits(bits(model), before)
    decode(model, latent_cache(model), 4)
    assert engine.uninstall(model) == 2
    assert [type(m) for m in model.modules()] == classes
    assert same_bits(bits(model), before)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    weight = attention(model).q_a_proj.weight
    assert weight.untyped_storage().nbytes() == weight.numel() * 2
    assert torch.equal(decode(model, static_cache(model), 4)[1], expected)
    assert vars(attention(model)).keys() == vars(model_of().model.layers[0].self_attn).keys()
    assert not engine.report()[ROW].installed
    assert engine.uninstall(model) == 0


def test_linear_layers_that_were_enabled_before_stay_enabled() -> None:
    model = model_of(torch.bfloat16)
    k3cupy.enable_low_latency_gemm(model.lm_head)
    engine.install(model)
    engine.uninstall(model)
    enabled = [name for name, m in model.named_modules() if type(m) is LowLatencyLinear]
    assert enabled == ["lm_head"]


def test_one_memory_for_both_weights_and_no_parameter_more() -> None:
    model = model_of(torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    engine.install(model)
    layer = attention(model)
    one, other = layer.q_a_proj.weight, layer.kv_a_proj_with_mqa.weight
    assert other.data_ptr() == one.data_ptr() + one.numel() * 2
    assert [name for name, _ in model.named_parameters()] == names
    assert type(layer._joined) is LowLatencyLinear
    engine.install(model)  # again: nothing moves
    assert one.data_ptr() == layer._joined.weight.data_ptr()
    decode(model, latent_cache(model), 1, steps=3)
    assert engine.report()[ours.JOINED].served == 6


@pytest.mark.parametrize("assign", [False, True])
def test_another_state_dict_may_be_loaded(assign: bool) -> None:
    model = model_of()
    other = model_of()
    for parameter in other.parameters():
        parameter.mul_(1.25)
    expected, _ = decode(other, static_cache(other), 4)
    engine.install(model)
    before, _ = decode(model, latent_cache(model), 4)
    model.load_state_dict(bits(other), assign=assign)
    found, _ = decode(model, latent_cache(model), 4)
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)
    reasons = engine.report()[ours.JOINED].handed_back
    assert list(reasons) == ["a weight of theirs was replaced: install again"] * assign
    engine.install(model)
    decode(model, latent_cache(model), 4, steps=1)
    assert engine.report()[ours.JOINED].handed_back == reasons


def test_a_write_to_a_part_takes_the_promise_from_the_whole() -> None:
    """The product of both may fetch its weight early only where nobody has just written it."""
    model = model_of(torch.bfloat16)
    engine.install(model)
    layer = attention(model)
    decode(model, latent_cache(model), 1, steps=1)
    version = layer._joined.weight._version
    decode(model, latent_cache(model), 1, steps=1)
    assert layer._joined.weight._version == version
    layer.kv_a_proj_with_mqa.weight.mul_(2)
    decode(model, latent_cache(model), 1, steps=1)
    assert layer._joined.weight._version > version


def test_a_model_may_change_its_type_and_be_copied() -> None:
    model = model_of()
    expected, _ = decode(model, static_cache(model), 4)
    engine.install(model)
    model.double().float()
    assert torch.equal(decode(model, latent_cache(model), 4)[0], expected)
    assert not engine.report()[ours.JOINED].handed_back
    twin = copy.deepcopy(model)
    attention(model).q_a_proj.weight.zero_()
    assert torch.equal(decode(twin, latent_cache(twin), 4)[0], expected)
    assert engine.uninstall(twin) == 2
    assert not any(type(m) is LowLatencyLinear for m in twin.modules())
    assert torch.equal(decode(twin, static_cache(twin), 4)[0], expected)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_are_installed_and_given_back_like_the_model(copied: Callable[[Any], Any]) -> None:
    model = model_of(torch.bfloat16)
    k3cupy.enable_low_latency_gemm(model.lm_head)
    classes = [type(m) for m in model.modules()]
    engine.install(model)
    twin = copied(model)
    engine.uninstall(model)
    row = engine.report()[ROW]
    assert row.installed, "calls of the copy still come"
    decode(twin, latent_cache(twin), 1, steps=2)
    assert engine.report()[ROW].served == row.served + 4
    assert engine.uninstall() == 2
    assert engine.report().installed == 0
    assert [type(m) for m in twin.modules()] == classes


def memory_of(model: Any) -> int:
    """Bytes of all weights, with that of the joined product."""
    joined = [getattr(m, "_joined", None) for m in model.modules()]
    weights = [*model.parameters(), *(linear.weight for linear in joined if linear)]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in weights}
    return sum(memory.values())


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [engine.install, engine.uninstall, nn.Module.double])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_copies_hold_each_weight_once(
    copied: Callable[[Any], Any], again: Callable[[Any], Any]
) -> None:
    model = model_of()
    expected, _ = decode(model, static_cache(model), 1)
    size = memory_of(model)
    engine.install(model)
    twin = copied(model)
    if copied is not pickled:
        assert memory_of(twin) == size
    assert torch.equal(decode(twin, latent_cache(twin), 1)[0], expected)
    assert list(engine.report()[ours.JOINED].handed_back) == [ours.COPIED]
    again(twin)
    assert memory_of(twin) == size * (2 if again is nn.Module.double else 1)
    weight = attention(twin).q_a_proj.weight
    is_joined = weight.untyped_storage().nbytes() > weight.nbytes
    assert is_joined is (again is not engine.uninstall)
    assert memory_of(model) == size
    assert attention(model)._joined_now() is attention(model)._joined


def test_a_part_whose_partner_was_replaced_gets_its_own_memory_back() -> None:
    model = model_of()
    size = memory_of(model)
    engine.install(model)
    layer = attention(model)
    layer.q_a_proj.weight.data = layer.q_a_proj.weight.clone()
    engine.uninstall(model)
    assert memory_of(model) == size


def test_what_was_pickled_is_installed_in_another_process() -> None:
    model = model_of()
    engine.install(model)
    text = pickle.dumps(model)
    engine.uninstall()
    ours.targets.clear()
    twin = pickle.loads(text)
    assert engine.report()[ROW].installed
    assert engine.uninstall(twin) == 2


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = model_of()
    engine.install(model)
    model.save_pretrained(tmp_path)
    loaded = DeepseekV3ForCausalLM.from_pretrained(tmp_path)
    assert same_bits(bits(loaded), bits(model))


def test_layers_that_are_made_later(tmp_path: Path) -> None:
    model = model_of()
    expected, _ = decode(model, static_cache(model), 4)
    model.save_pretrained(tmp_path)
    make = theirs.DeepseekV3DecoderLayer.__init__
    assert engine.install()[ours.LATER].installed
    engine.install()
    assert type(attention(model)) is theirs.DeepseekV3Attention
    later = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(decode(later, latent_cache(later), 4)[0], expected)
    assert engine.report()[ours.LATER].served == 16
    assert list(engine.report()[ours.JOINED].handed_back) == [
        "install(model) was not called for them"
    ]
    engine.install(later)
    assert torch.equal(decode(later, latent_cache(later), 4)[0], expected)
    assert engine.report()[ROW].served == engine.report()[ours.JOINED].served == 16
    assert engine.uninstall() == 2
    assert theirs.DeepseekV3DecoderLayer.__init__ is make
    assert type(attention(later)) is type(attention(model_of())) is theirs.DeepseekV3Attention


# What is handed back


@pytest.mark.parametrize(
    "changes", [{"kv_lora_rank": 256}, {"qk_rope_head_dim": 32}], ids=["latent", "key"]
)
def test_other_widths_stay_with_transformers(changes: dict[str, int]) -> None:
    model = model_of(**changes)
    _, expected = decode(model, static_cache(model), 4)
    row = engine.install(model)[ROW]
    assert not row.installed
    widths = (changes.get("kv_lora_rank", 512), changes.get("qk_rope_head_dim", 64))
    assert row.why_not == (
        f"kv_lora_rank and qk_rope_head_dim are {widths[0]} and {widths[1]}: the decode epilogue "
        "takes 512 and 64"
    )
    assert type(attention(model)) is theirs.DeepseekV3Attention
    assert torch.equal(decode(model, latent_cache(model), 4)[1], expected)


class Adapter(nn.Module):
    """What an adapter makes of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) * 1.5
        return out


@pytest.mark.parametrize("name", ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj"])
def test_adapters_are_called(name: str) -> None:
    model = model_of()
    engine.install(model)
    for layer in model.model.layers:
        setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    found, _ = decode(model, latent_cache(model), 4)
    reasons = {**engine.report()[ours.JOINED].handed_back, **handed_back()}
    assert (f"{name} is a Adapter, not an nn.Linear itself" in reasons) is (name != "q_b_proj")
    engine.uninstall(model)
    assert torch.equal(found, decode(model, static_cache(model), 4)[0])


@pytest.mark.parametrize(
    ("name", "hooked"),
    [
        ("q_a_proj", False),
        ("q_a_proj", True),
        ("kv_a_proj_with_mqa", True),
        ("kv_b_proj", False),
    ],
)
def test_compiled_code_calls_what_was_put_into_a_layer(name: str, hooked: bool) -> None:
    model = model_of(num_hidden_layers=1)
    engine.install(model)
    linear = getattr(attention(model, 0), name)
    if hooked:
        linear.register_forward_hook(lambda _module, _inputs, out: out + 1)
    else:
        adapter = Adapter(linear)
        adapter.weight = linear.weight  # as adapters of others have it: that of the layer below
        setattr(attention(model, 0), name, adapter)
    _, expected = decode(model, latent_cache(model), 1, steps=4)
    compiled = torch.compile(model.forward, backend="eager", dynamic=False)
    _, found = decode(model, latent_cache(model), 1, steps=4, forward=compiled)
    assert torch.allclose(found, expected, atol=1e-5)


def test_one_layer_that_does_not_fit_has_a_row_of_its_own() -> None:
    model = model_of()
    attention(model, 1).kv_b_proj = Adapter(attention(model, 1).kv_b_proj)
    report = engine.install(model)
    assert report[ROW].installed
    row = report["attention of model.layers.1.self_attn"]
    assert row.why_not == "kv_b_proj is a Adapter, not an nn.Linear itself"


def test_models_with_the_same_names_do_not_speak_for_each_other() -> None:
    model, other = model_of(), model_of(kv_lora_rank=256)
    engine.install(model)
    report = engine.install(other)
    assert report[ROW].installed
    row = report["attention of model.layers.1.self_attn"]
    assert row.why_not.startswith("kv_lora_rank and qk_rope_head_dim are 256 and 64")
    decode(model, latent_cache(model), 1, steps=2)
    assert engine.report()[ROW].served == 4
    engine.uninstall(model)
    assert not engine.report()[ROW].installed


def test_layers_made_later_do_not_speak_for_each_other() -> None:
    engine.install()
    later = model_of()
    model_of(kv_lora_rank=256)
    assert engine.report()[ours.LATER].installed
    assert isinstance(attention(later), ours.AbsorbedAttention)


def test_a_model_whose_weights_stay_apart_does_not_speak_for_one_whose_do_not() -> None:
    model, other = model_of(), model_of(q_lora_rank=None)
    engine.install(model)
    assert engine.install(other)[ours.JOINED].installed
    engine.uninstall(model)
    assert not engine.report()[ours.JOINED].installed
    assert engine.report()[ROW].installed


def one_step(model: Any, cache: Any, **options: Any) -> Any:
    return model(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True, **options)


def test_calls_that_are_handed_back_and_why() -> None:
    model = model_of()
    engine.install(model)
    with torch.no_grad():
        one_step(model, DynamicCache(config=model.config))
        one_step(model, static_cache(model))
        model(input_ids=torch.tensor([[5, 6]]), past_key_values=latent_cache(model))
        model.set_attn_implementation("eager")
        weights = one_step(model, latent_cache(model), output_attentions=True).attentions
        with torch.autocast("cpu", torch.bfloat16):
            one_step(model, latent_cache(model))
    assert weights[0].shape == (1, 2, 1, ROOM)
    model.requires_grad_(True)
    one_step(model, latent_cache(model)).logits.sum().backward()
    assert attention(model).q_a_proj.weight.grad is not None
    assert handed_back() == dict.fromkeys(
        (
            "cache: expected a LatentCache, got DynamicCache",
            "cache: expected a LatentCache, got StaticCache",
            PREFILL,
            "the weights of attention were asked for",
            "autocast is on",
            "autograd is recording: call the model under torch.no_grad()",
        ),
        2,
    )
    assert engine.report()[ROW].served == 0


def test_a_mask_of_another_shape_is_handed_back() -> None:
    """As flash attention has it, by tokens, or of fewer tokens than the cache has room for."""
    model = model_of(num_hidden_layers=1, attn_implementation="eager")
    engine.install(model)
    hidden = torch.randn(2, 1, 64)
    rotation = model.model.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.int64))
    for shape in ((2, ROOM), (2, 1, 1, 8), (2, 1, 1, 1)):
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # transformers' own
            attention(model)(hidden, rotation, torch.zeros(shape), latent_cache(model))
    assert handed_back() == {
        f"attention_mask: expected None or one of [batch, 1, 1, {ROOM}]": 3,
    }


@pytest.mark.parametrize("name", ["q_a_layernorm", "kv_a_layernorm"])
def test_hooks_of_norms_are_called(name: str) -> None:
    model = model_of()
    for layer in model.model.layers:
        norm = getattr(layer.self_attn, name)
        norm.register_forward_hook(lambda _module, _inputs, out: out * 3)
    expected = decode(model, static_cache(model), 4)[0]
    engine.install(model)
    _, logits = decode(model, latent_cache(model), 4, given=expected)
    assert engine.report()[ROW].served
    engine.uninstall(model)
    _, theirs_logits = decode(model, static_cache(model), 4, given=expected)
    assert torch.allclose(logits, theirs_logits, atol=1e-4)


def test_training_with_dropout_is_transformers_own() -> None:
    model = model_of(attention_dropout=0.5).train()
    engine.install(model)
    one_step(model, latent_cache(model))
    assert list(handed_back()) == ["the model is in training mode, and attention has dropout"]


# Arguments


def test_what_install_refuses() -> None:
    with refuses("model: expected a torch.nn.Module, or None, got int"):
        engine.install(3)  # type: ignore[arg-type]
    with refuses("model: expected a module with DeepseekV3Attention layers, got Linear"):
        engine.install(nn.Linear(2, 2))
    with refuses("warmup: expected True or False, got 1"):
        engine.install(nn.Linear(2, 2), warmup=1)  # type: ignore[arg-type]
    with refuses("model: expected a torch.nn.Module, or None, got str"):
        engine.uninstall("model")  # type: ignore[arg-type]
    assert engine.LatentCache is LatentCache
    with pytest.raises(AttributeError, match="has no attribute 'PagedCache'"):
        engine.PagedCache  # noqa: B018


def test_a_failed_installation_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(torch.bfloat16)
    before = [type(m) for m in model.modules()]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise k3cupy.CompileError("no")

    monkeypatch.setattr(ours, "enable_low_latency_gemm", fail)
    with pytest.raises(k3cupy.CompileError):
        engine.install(model)
    assert [type(m) for m in model.modules()] == before


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.deepseek_v3", None)
    with pytest.raises(ImportError, match=r"expected 5.17 or newer, got none.* pip install"):
        engine.install()


def test_an_attention_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: Any, rotation: Any) -> None: ...

    monkeypatch.setattr(theirs.DeepseekV3Attention, "forward", forward)
    with pytest.raises(ImportError, match="got hidden_states, rotation"):
        engine.report()


# The example


def run_example(*arguments: str) -> tuple[int, str, str]:
    example = importlib.import_module("hf_deepseek_v3")
    options = ["--device", "cpu", "--prompt", "5", "--steps", "6", "--batch", "2"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        options += ["--json", str(file)]
        result = CliRunner().invoke(example.main, [*options, *arguments], catch_exceptions=False)
        return result.exit_code, result.output, file.read_text(encoding="utf-8")


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("examples")
def test_the_example_passes() -> None:
    status, printed, text = run_example()
    assert status == 0, printed
    assert "Tokens and logits agree" in printed
    document = json.loads(text)
    (row,) = document["agreement"]
    assert (row["equal_tokens"], row["tokens"]) == (12, 12)
    assert document["environment"]["transformers"]


def swapped(attend: Callable[..., Any], query: Any, cache: Any, *rest: Any) -> Any:
    return attend(query, cache.flip(-1), *rest)


@pytest.mark.usefixtures("examples")
def test_the_example_fails_where_the_attention_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_attend", functools.partial(swapped, ours._attend))
    status, printed, _ = run_example("--seed", "1")
    assert status == 1
    assert "does not agree" in printed
