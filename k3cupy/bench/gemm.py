"""Benchmark of the fused-A GEMM: time over the time of reading the weight once.

In a model every layer has its own weight, so each launch finds it cold: weights of several hundred
megabytes take turns. Activations are warm, as they come from the preceding kernel. The floor is a
kernel that streams the same bytes and does nothing with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import k3cupy
from k3cupy.bench import document
from k3cupy.bench.floor import floor_us
from k3cupy.choose.gemm import FUSED_A, TOKEN_CLASSES, choose
from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig, Variant
from k3cupy.runtime import devices, instances
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance
from k3cupy.timing import graphs
from k3cupy.timing.cold import COLD_BYTES, Body, Timer, pool_of, weights_of
from k3cupy.timing.products import Product


@dataclass
class Entry:
    """One row of results; times in microseconds a launch, weights cold unless it says hot.

    Attributes:
        kind: the shape, ``"2112x7168"``.
        n: rows of the weight.
        k: its columns.
        tokens: M.
        floor_us: a kernel that only streams the weight.
        linear_us: ``torch.nn.functional.linear``.
        linear_hot_us: the same, one weight again and again.
        hot_us: the dispatched configuration so.
        strided_us: the dispatched configuration on a column slice of a wider tensor.
        waiting_us: the dispatched configuration without the promise that the weight is static.
        invariant_us: the batch-invariant choice.
        dispatched: the configuration that a call would choose.
        candidates: the dispatched configuration with its time.
    """

    kind: str
    n: int
    k: int
    tokens: int
    floor_us: float
    linear_us: float
    linear_hot_us: float
    hot_us: float
    strided_us: float
    waiting_us: float
    invariant_us: float
    dispatched: dict[str, int]
    candidates: list[dict[str, Any]] = field(default_factory=list)


def chosen(
    n: int, k: int, tokens: int, gpu: DeviceInfo, *, batch_invariant: bool = False
) -> FusedAGemmConfig:
    """Return the configuration that a direct call of the fused-A GEMM gets."""
    found = choose((FUSED_A,), n, k, tokens, gpu, batch_invariant=batch_invariant).config
    assert isinstance(found, FusedAGemmConfig)
    return found


def body(
    product: Product,
    config: FusedAGemmConfig | None,
    *,
    x: torch.Tensor | None = None,
    static: bool = True,
    batch_invariant: bool = False,
) -> Body:
    """Return a call that takes the weight of a product; ``x`` in place of the packed one."""
    given = product.x if x is None else x
    return lambda weight: k3cupy.fused_a_gemm(
        given,
        weight,
        out=product.out,
        config=config,
        weight_is_static=static,
        batch_invariant=batch_invariant,
    )


def run_entry(product: Product, weights: Sequence[torch.Tensor], floor: float) -> Entry:
    """Check, then time one product.

    Raises:
        RuntimeError: it is wrong; nothing was timed.
    """
    n, k, tokens = product.n, product.k, product.tokens
    device = devices.info(torch.cuda.current_device())
    dispatched = chosen(n, k, tokens, device)
    ours = body(product, dispatched)
    others = (
        body(product, dispatched, x=product.strided),
        body(product, dispatched, static=False),
        body(product, None, batch_invariant=True),
    )
    for checked in (ours, *others):
        wrong = product.check(checked, weights[0])
        if wrong is not None:
            raise RuntimeError(f"{n} x {k}, M = {tokens}, {dispatched}: {wrong}, not timed")
    timer = Timer(weights)
    times = timer.cold([product.linear, *others, ours])
    hot = timer.hot([product.linear, ours])
    return Entry(
        kind=f"{n}x{k}",
        n=n,
        k=k,
        tokens=tokens,
        floor_us=floor,
        linear_us=times[0],
        linear_hot_us=hot[0],
        hot_us=hot[1],
        strided_us=times[1],
        waiting_us=times[2],
        invariant_us=times[3],
        dispatched=asdict(dispatched),
        candidates=[{**asdict(dispatched), "us": times[4]}],
    )


def run(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int] = TOKEN_CLASSES
) -> Iterator[Entry]:
    """Yield the entries of a whole run.

    Args:
        shapes: (n, k) of the weights.
        tokens: M.
    """
    device = devices.info(torch.cuda.current_device())
    wanted: list[Instance] = []
    for (n, k), count in itertools.product(shapes, tokens):
        config = chosen(n, k, count, device)
        invariant = chosen(n, k, count, device, batch_invariant=True)
        static = Variant(weight_is_static=True)
        wanted += [each.instance(static) for each in (config, invariant)]
        wanted.append(config.instance(Variant()))
    instances.load_all(wanted, device.index)
    pool = pool_of(shapes)
    for n, k in shapes:
        weights = weights_of(n, k, pool)
        floor = floor_us(Timer(weights))
        for count in tokens:
            yield run_entry(Product(n, k, count), weights, floor)


def host_time(n: int = 2112, k: int = 7168, tokens: int = 16) -> dict[str, float]:
    """Return the host's microseconds for one repeated eager call, ours and ``F.linear``'s."""
    product = Product(n, k, tokens)
    weight = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16)
    given = body(product, None)
    return {
        "new output": graphs.host_us(lambda: k3cupy.fused_a_gemm(product.x, weight)),
        "out given": graphs.host_us(lambda: given(weight)),
        "F.linear": graphs.host_us(lambda: torch.nn.functional.linear(product.x, weight)),
    }


def as_document(entries: Sequence[Entry], commit: str | None = None) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "gemm",
        entries,
        commit,
        method={
            "statistic": "median of 3 rounds of 5 replays of a CUDA graph, microseconds a launch",
            "weights": f"cold: {COLD_BYTES >> 20} MiB of weights take turns; hot: one weight",
            "floor": "16-byte loads of the weight, the best of six grids, PDL on",
            "ours": "PDL on, weight_is_static promised, except waiting_us",
        },
        host_us={"fused_a_gemm": host_time()},
    )
