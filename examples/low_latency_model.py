"""Turn on the low-latency linear in a small model, and see which layer runs which kernel.

    python examples/low_latency_model.py
    python examples/low_latency_model.py --tokens 1 --tokens 32

The model has two blocks with the projections of Kimi-K3 at their real sizes (one GPU of eight) and
random weights. Each block has a layer that reads a column slice of a wider tensor. One line turns
the kernels on:

    report = k3cupy.enable_low_latency_gemm(model)

Then the same tokens go through the model and through a copy that was left as it was. The two must
agree, and each layer with `F.linear` on its own input, or the exit status is 1. With a GPU, CUDA
graphs of both models are timed. Without one the layers go on with PyTorch's own linear, and the
report says so. `explain_fallbacks.py`, beside this file, shows for single calls what keeps them
from the kernels.
"""

from __future__ import annotations

import copy

import click
import torch
import torch.nn.functional as F
from demo_tools import (
    TOLERANCE,
    all_agree,
    capture,
    choose_device,
    describe,
    device_option,
    median_us,
    random_hidden,
    relative_error,
    seed_option,
    show_error,
)
from mla_layer import (
    HIDDEN_SIZE,
    NOPE_DIM,
    NORM_EPS,
    NUM_HEADS,
    Q_LORA_RANK,
    QKV_A_WIDTH,
    ROPE_DIM,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import k3cupy

HEADS_WIDTH = NUM_HEADS * NOPE_DIM  # 1536
GATE_RANK = 128
BETA_WIDTH = 16  # one number a head, padded
IN_PROJ_WIDTH = 4 * HEADS_WIDTH + GATE_RANK + BETA_WIDTH  # 6288: q, k, v, g, f_a and beta

CALLS = 20  # passes through the model in one timed graph


def projection(width_in: int, width_out: int) -> nn.Linear:
    return nn.Linear(width_in, width_out, bias=False, dtype=torch.bfloat16)


class KdaLikeBlock(nn.Module):
    """The projections around KDA (linear attention); in place of the recurrence, a product.

    One wide GEMM makes everything that the heads need. `f_b` reads 128 columns of its 6288.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = projection(HIDDEN_SIZE, IN_PROJ_WIDTH)
        self.f_b = projection(GATE_RANK, HEADS_WIDTH)
        self.o_proj = projection(HEADS_WIDTH, HIDDEN_SIZE)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, 7168] -> [B, 7168]"""
        widths = [HEADS_WIDTH] * 4 + [GATE_RANK, BETA_WIDTH]
        q, k, v, g, f_a, _ = self.in_proj(hidden).split(widths, dim=-1)
        decay = torch.sigmoid(self.f_b(f_a))  # f_a is [:, 6144:6272] of the wide tensor
        return self.o_proj(F.silu(q) * torch.tanh(k) * v * decay * F.silu(g))


class MlaLikeBlock(nn.Module):
    """The projections around MLA, without the attention between them.

    `q_b` reads the first 1536 of the 2112 columns that `qkv_a` wrote.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv_a = projection(HIDDEN_SIZE, QKV_A_WIDTH)
        self.q_b = projection(Q_LORA_RANK, NUM_HEADS * (NOPE_DIM + ROPE_DIM))
        self.o_proj = projection(HEADS_WIDTH, HIDDEN_SIZE)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, 7168] -> [B, 7168]"""
        q = self.q_b(self.qkv_a(hidden)[:, :Q_LORA_RANK])
        heads = q.unflatten(-1, (NUM_HEADS, NOPE_DIM + ROPE_DIM))[..., :NOPE_DIM]
        return self.o_proj(heads.flatten(1))


class SmallModel(nn.Module):
    """Two blocks with residuals, and a head with a bias, which stays PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([KdaLikeBlock(), MlaLikeBlock()])
        self.head = nn.Linear(HIDDEN_SIZE, 64, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + block(F.rms_norm(hidden, [HIDDEN_SIZE], eps=NORM_EPS))
        return self.head(F.rms_norm(hidden, [HIDDEN_SIZE], eps=NORM_EPS))


@click.command()
@click.option(
    "--tokens",
    type=click.IntRange(1, 64),
    multiple=True,
    default=(1, 4, 16),
    show_default=True,
    help="Tokens in a batch; give it several times.",
)
@device_option
@seed_option
@click.pass_context
def main(ctx: click.Context, tokens: tuple[int, ...], device_name: str | None, seed: int) -> None:
    """Run a small model with and without the low-latency linear, and compare."""
    console = Console(soft_wrap=True)
    device = choose_device(device_name)
    torch.manual_seed(seed)
    plain = SmallModel().to(device).requires_grad_(False)
    model = copy.deepcopy(plain)

    report = k3cupy.enable_low_latency_gemm(model, tokens=sorted(tokens))
    console.print(report)

    table = Table(title=f"Against the same model in plain PyTorch, on {describe(device)}")
    headers = ["tokens", "error of the model", "of its worst layer"]
    headers += ["plain us", "low-latency us", "speed-up"] if device.type == "cuda" else []
    for header in headers:
        table.add_column(header, justify="right")
    errors = []
    generator = torch.Generator().manual_seed(seed)
    k3cupy.reset_dispatch_report()
    for count in tokens:
        hidden = random_hidden(count, generator, device)
        output, layer_error = run_and_check_layers(model, hidden)
        errors += [relative_error(output, plain(hidden)), layer_error]
        cells = [str(count), *map(show_error, errors[-2:])]
        if device.type == "cuda":
            cells += times(plain, model, hidden)
        table.add_row(*cells)
    console.print(table)

    console.print("What the layers' calls came to, and why:")
    console.print(str(k3cupy.dispatch_report()), markup=False, highlight=False)
    if not all_agree(errors):
        console.print(f"FAILED: an error is above {TOLERANCE:g} or NaN.", style="bold red")
        ctx.exit(1)
    console.print(f"All outputs agree with plain PyTorch to {TOLERANCE:g}.", style="green")


def run_and_check_layers(model: nn.Module, hidden: Tensor) -> tuple[Tensor, float]:
    """The model's output, and the largest relative error of any linear layer on its own input."""
    errors = []

    def check(layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> None:
        errors.append(relative_error(output, F.linear(inputs[0], layer.weight, layer.bias)))

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_hook(check) for layer in layers]
    output = model(hidden)
    for hook in hooks:
        hook.remove()
    # max() would drop NaN; sorting in a tensor puts it last.
    return output, float(torch.tensor(errors).sort().values[-1])


def times(plain: nn.Module, model: nn.Module, hidden: Tensor) -> list[str]:
    """Microseconds of one pass through each model, as replays of a CUDA graph, and their ratio."""
    found = []
    for each in (plain, model):
        graph, _ = capture(lambda each=each: each(hidden), CALLS)
        found.append(median_us(graph, CALLS))
    return [f"{found[0]:.1f}", f"{found[1]:.1f}", f"{found[0] / found[1]:.2f}x"]


if __name__ == "__main__":
    main()
