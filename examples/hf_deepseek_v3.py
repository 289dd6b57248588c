"""DeepSeek-V3 of transformers, as it comes and with k3cupy installed: the same tokens, sooner.

    python examples/hf_deepseek_v3.py
    python examples/hf_deepseek_v3.py --heads 12 --batch 1 --batch 4 --compile --json FILE

The model has few layers and random weights, at the widths of one GPU of eight. It runs in three
forms: as transformers makes it, with the low-latency linear in its linear layers
(`k3cupy.enable_low_latency_gemm`), and with the absorbed decode too:

    from k3cupy.engines import transformers as engine

    engine.install(model)
    cache = engine.LatentCache(model.config, max_cache_len=256)
    model.generate(prompt, past_key_values=cache)

First the weights are float32, and greedy decoding must give the same tokens with and without: then
the arithmetic is the same. Then they are bfloat16, so that the kernels run: the logits, of the same
tokens, must be as close to those of float32 as transformers' own are. With a GPU a token is timed
in eager mode, in a CUDA graph and, with --compile, as torch.compile has it; each form with a cache
of a fixed size, and all in turns. Without a GPU a tiny model goes through the checks.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from demo_tools import choose_device, describe, device_option, seed_option
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, StaticCache
from transformers import __version__ as transformers_version
from transformers.cache_utils import StaticLayer

import k3cupy
from k3cupy.engines import transformers as engine
from k3cupy.timing import environment

FORMS = ("unpatched", "linears", "installed")
MOST_ERROR = 1.5  # times transformers' own error; both are of roundings, in other places
TURNS, REPLAYS, WARM, EAGER_STEPS = 3, 12, 2, 12


@dataclass(frozen=True)
class Agreement:
    """What the checks found at one batch size."""

    batch: int
    equal_tokens: int
    tokens: int
    largest_difference: float  # of float32 logits, installed against unpatched
    error: dict[str, float]  # of bfloat16 logits, against float32

    @property
    def is_good(self) -> bool:
        return self.equal_tokens == self.tokens and all(
            e <= MOST_ERROR * self.error["unpatched"] for e in self.error.values()
        )


@dataclass(frozen=True)
class Timing:
    """Microseconds of one decode step, all layers and the head, by form."""

    batch: int
    mode: str
    us: dict[str, float]


def make_config(
    device: torch.device, heads: int | None, layers: int | None, dense: int | None
) -> DeepseekV3Config:
    if device.type == "cuda":  # one of eight GPUs, but for the number of layers and of experts
        widths = {
            "vocab_size": 129280 // 8,
            "hidden_size": 7168,
            "intermediate_size": 18432 // 8,
            "moe_intermediate_size": 2048 // 8,
            "n_routed_experts": 16,
            "num_experts_per_tok": 8,
            "q_lora_rank": 1536,
            "num_hidden_layers": layers or 6,
            "num_attention_heads": heads or 16,
            "first_k_dense_replace": 3 if dense is None else dense,
        }
    else:
        widths = {
            "vocab_size": 199,
            "hidden_size": 128,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "q_lora_rank": 64,
            "num_hidden_layers": layers or 2,
            "num_attention_heads": heads or 2,
            "first_k_dense_replace": 1 if dense is None else dense,
            "initializer_range": 0.1,  # so small a model would else hardly look at its tokens
        }
    return DeepseekV3Config(
        **widths,
        num_key_value_heads=widths["num_attention_heads"],
        n_group=1,
        topk_group=1,
        max_position_embeddings=4096,
    )


def cache_of(form: str, config: DeepseekV3Config, length: int) -> Any:
    if form == "installed":
        return engine.LatentCache(config, max_cache_len=length)
    return StaticCache(config=config, max_cache_len=length)


class Decoder:
    """A model with a cache, one token a sequence at a time; token and position lie still."""

    def __init__(self, model: Any, cache: Any, prompt: Tensor) -> None:
        self.model, self.cache = model, cache
        self.forward: Callable[..., Any] = model.forward
        logits = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits
        self.logits = logits[:, -1]
        self.token = self.logits.argmax(-1, keepdim=True)
        self.position = torch.full((1, 1), prompt.shape[1], device=prompt.device)
        self.advance: Callable[[], Any] = self.step

    def step(self) -> None:
        """Compute the logits behind the token, and take the most likely one as the next."""
        out = self.forward(
            input_ids=self.token,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits = out.logits[:, -1]
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    def decode(self, steps: int, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return tokens [B, steps] and logits [steps, B, vocabulary]; follow given tokens."""
        tokens, logits = [], []
        for i in range(steps):
            if given is not None:
                self.token.copy_(given[:, i : i + 1])
            tokens.append(self.token.clone())
            logits.append(self.logits.float())
            self.advance()
        return torch.cat(tokens, dim=1), torch.stack(logits)

    def record(self) -> torch.cuda.CUDAGraph:
        """Capture a step, as the next one, behind two that run and are forgotten."""
        first = self.logits, self.token.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.rewind(WARM)
        with torch.cuda.graph(graph):
            self.step()
        self.logits.copy_(first[0])
        self.token.copy_(first[1])
        return graph

    def rewind(self, tokens: int) -> None:
        """Forget the last tokens, in place: graphs know where the numbers lie."""
        self.position.sub_(tokens)
        for layer in self.cache.layers:
            if isinstance(layer, StaticLayer):
                layer.cumulative_length.sub_(tokens)
            else:
                layer.crop(-tokens)


def in_float32(model: Any, prompt: Tensor, steps: int, length: int) -> dict[str, Any]:
    """Decode greedily without and with the absorbed decode; return what is to be compared."""
    expected, logits = Decoder(model, cache_of("unpatched", model.config, length), prompt).decode(
        steps
    )
    engine.install(model, warmup=False)
    found, ours = Decoder(model, cache_of("installed", model.config, length), prompt).decode(steps)
    engine.uninstall(model)
    difference = float((ours - logits).abs().max())
    return {"expected": expected, "found": found, "logits": logits, "difference": difference}


def agreement(
    models: dict[str, Any], prompt: Tensor, reference: dict[str, Any], length: int
) -> Agreement:
    expected = reference["expected"]
    error = {}
    for form in ("unpatched", "installed"):
        decoder = Decoder(models[form], cache_of(form, models[form].config, length), prompt)
        error[form] = error_of(decoder, expected, reference["logits"])
        if form == "installed" and prompt.is_cuda:
            decoder = Decoder(models[form], cache_of(form, models[form].config, length), prompt)
            decoder.advance = decoder.record().replay
            error["installed, graph"] = error_of(decoder, expected, reference["logits"])
    equal = int((reference["found"] == expected).sum())
    return Agreement(len(prompt), equal, expected.numel(), reference["difference"], error)


def error_of(decoder: Decoder, tokens: Tensor, expected: Tensor) -> float:
    """The relative error of the logits of these tokens."""
    _, logits = decoder.decode(tokens.shape[1], tokens)
    return float((logits - expected).norm() / expected.norm())


def graph_times(graph: torch.cuda.CUDAGraph, decoder: Decoder) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for _ in range(WARM):
        graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    decoder.rewind(WARM + REPLAYS)
    return [a.elapsed_time(b) * 1000 for a, b in itertools.pairwise(marks)]


def step_times(decoder: Decoder) -> list[float]:
    """The host's time for a step, with the GPU's behind the last one."""
    for _ in range(WARM):
        decoder.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(EAGER_STEPS):
        decoder.step()
    torch.cuda.synchronize()
    us = (time.perf_counter() - start) / EAGER_STEPS * 1e6
    decoder.rewind(WARM + EAGER_STEPS)
    return [us]


def in_turns(work: dict[str, Callable[[], list[float]]]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(TURNS):
        for name, measure in work.items():
            found[name] += measure()
    return {name: round(statistics.median(us), 2) for name, us in found.items()}


def timings(models: dict[str, Any], prompt: Tensor, length: int, compiled: bool) -> list[Timing]:
    decoders = {
        form: Decoder(model, cache_of(form, model.config, length), prompt)
        for form, model in models.items()
    }
    eager = {form: (lambda d=d: step_times(d)) for form, d in decoders.items()}
    found = [Timing(len(prompt), "eager", in_turns(eager))]
    graphs = {form: decoder.record() for form, decoder in decoders.items()}
    replays = {
        form: (lambda g=graphs[form], d=d: graph_times(g, d)) for form, d in decoders.items()
    }
    found.append(Timing(len(prompt), "graph", in_turns(replays)))
    if compiled:
        for form, decoder in decoders.items():
            decoder.forward = torch.compile(models[form].forward, dynamic=False)
        found.append(Timing(len(prompt), "compiled", in_turns(eager)))
    return found


def environment_of(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        found = environment.describe(torch.cuda.current_device())
    else:
        found = {"gpu": None, "packages": {"torch": torch.__version__}}
    return {**found, "transformers": transformers_version}


def show(console: Console, agreements: list[Agreement], times: list[Timing]) -> None:
    table = Table(title="Against transformers' own forward")
    names = list(agreements[0].error)
    headers = ["batch", "equal tokens, float32", "largest difference"]
    for header in (*headers, *(f"error of bfloat16, {name}" for name in names)):
        table.add_column(header, justify="right")
    for row in agreements:
        table.add_row(
            str(row.batch),
            f"{row.equal_tokens} of {row.tokens}",
            f"{row.largest_difference:.1e}",
            *(f"{row.error[name]:.2e}" for name in names),
        )
    console.print(table)
    if not times:
        return
    table = Table(title="Microseconds a token")
    for header in ("batch", "mode", *FORMS, "linears / unpatched", "installed / unpatched"):
        table.add_column(header, justify="left" if header == "mode" else "right")
    for timing in times:
        base = timing.us["unpatched"]
        ratios = (f"{timing.us[form] / base:.3f}" for form in FORMS[1:])
        us = (f"{timing.us[form]:.1f}" for form in FORMS)
        table.add_row(str(timing.batch), timing.mode, *us, *ratios)
    console.print(table)


@click.command()
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1, 64),
    multiple=True,
    default=(1, 4, 16),
    show_default=True,
    help="Sequences; give it several times.",
)
@click.option(
    "--heads", type=click.IntRange(1), default=None, help="Heads on this GPU. [default: 16]"
)
@click.option("--layers", type=click.IntRange(1), default=None, help="[default: 6]")
@click.option(
    "--dense",
    type=click.IntRange(0),
    default=None,
    help="How many of them, the first ones, have no experts. [default: 3]",
)
@click.option(
    "--prompt",
    "prompt_length",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Tokens of a prompt.",
)
@click.option(
    "--steps", type=click.IntRange(4), default=64, show_default=True, help="Tokens to compare."
)
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="Also time torch.compile: a minute or more a batch size.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write the results to this file.",
)
@device_option
@seed_option
@click.pass_context
@torch.no_grad()
def main(
    ctx: click.Context,
    batches: tuple[int, ...],
    heads: int | None,
    layers: int | None,
    dense: int | None,
    prompt_length: int,
    steps: int,
    compiled: bool,
    json_file: Path | None,
    device_name: str | None,
    seed: int,
) -> None:
    """Run DeepSeek-V3 of transformers with and without k3cupy, compare, and time it."""
    console = Console(soft_wrap=True)
    device = choose_device(device_name)
    config = make_config(device, heads, layers, dense)
    length = prompt_length + max(steps, 2 * WARM + max(REPLAYS, EAGER_STEPS)) + WARM
    length = -(-length // 64) * 64  # the same for both caches
    torch.manual_seed(seed)
    with torch.device(device):
        model = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    prompts = {
        batch: torch.randint(config.vocab_size, (batch, prompt_length), device=device)
        for batch in batches
    }
    references = {b: in_float32(model, prompt, steps, length) for b, prompt in prompts.items()}

    for parameter in model.parameters():  # not the buffers: angles and routing want float32
        parameter.data = parameter.data.to(torch.bfloat16)
    models = {form: copy.deepcopy(model) for form in FORMS}
    counts = sorted(set(batches))
    k3cupy.enable_low_latency_gemm(models["linears"], tokens=counts)
    engine.install(models["installed"], tokens=counts)
    agreements = [
        agreement(models, prompt, references[batch], length) for batch, prompt in prompts.items()
    ]
    times: list[Timing] = []
    if device.type == "cuda":
        for i, prompt in enumerate(prompts.values()):
            times += timings(models, prompt, length, compiled and i == 0)
    size = {
        "layers": config.num_hidden_layers,
        "dense": min(config.first_k_dense_replace, config.num_hidden_layers),
        "heads": config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "cache_length": length,
        "prompt": prompt_length,
    }
    console.print(f"{', '.join(f'{name} {n}' for name, n in size.items())}, on {describe(device)}")
    show(console, agreements, times)
    console.print(engine.report())
    if json_file is not None:
        document = {
            "benchmark": "hf_deepseek_v3",
            "environment": environment_of(device),
            "model": size,
            "method": {
                "graph": f"a captured step, median of {TURNS} turns of {REPLAYS} replays",
                "eager": f"median of {TURNS} turns of {EAGER_STEPS} steps, host and GPU",
                "turns": "the forms take turns",
            },
            "agreement": [asdict(row) for row in agreements],
            "entries": [asdict(timing) for timing in times],
        }
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if not all(row.is_good for row in agreements):
        console.print("[bold red]The model with k3cupy does not agree with transformers' own.[/]")
        ctx.exit(1)
    console.print("Tokens and logits agree with transformers' own.")


if __name__ == "__main__":
    main()
