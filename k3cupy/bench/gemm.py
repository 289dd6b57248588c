"""Benchmark of the fused-A GEMM in its chain: time over the time of reading the weight once.

A producer writes x, the product runs, a consumer reads its output; what counts is the time that the
product adds. In a model every layer has its own weight, so each launch finds it cold: weights of
several hundred megabytes take turns. The floor is a kernel that streams the same bytes in the same
place and does nothing with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import k3cupy
from k3cupy.bench import document, floor
from k3cupy.choose.gemm import FUSED_A, TOKEN_CLASSES, choose
from k3cupy.kernels.fused_a_gemm import FusedAGemmConfig, Variant
from k3cupy.runtime import devices, instances
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.instances import Instance
from k3cupy.timing import graphs
from k3cupy.timing.chain import NEIGHBOURS, told
from k3cupy.timing.cold import COLD_BYTES, Body, Timer, pool_of, weights_of
from k3cupy.timing.products import Product


@dataclass
class Entry:
    """One row of results; microseconds added to the chain, weights cold, unless it says otherwise.

    Attributes:
        kind: the shape, ``"2112x7168"``.
        n: rows of the weight.
        k: its columns.
        tokens: M.
        floor_us: a kernel that only streams the weight.
        linear_us: ``torch.nn.functional.linear``.
        linear_hot_us: the same after itself, one weight again and again.
        hot_us: the dispatched configuration so.
        alone_us: the floor, ``"linear"`` and the dispatched configuration after themselves, cold.
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
    alone_us: dict[str, float]
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


def run_entry(
    product: Product,
    weights: Sequence[torch.Tensor],
    floors: Sequence[Body],
    around: tuple[str, str] = NEIGHBOURS,
) -> Entry:
    """Check, then time one product beside what streams its weight.

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
    chain, strided = product.chain(*around), product.chain(*around, x=product.strided)
    both = [product.linear, ours]
    beside = [*floors, *both, *others[1:]]
    *times, strided_us = timer.added([*beside, others[0]], [*[chain] * len(beside), strided])
    *streaming, linear_us, us, waiting_us, invariant_us = times
    *streaming_alone, linear_alone, alone = timer.alone([*floors, *both])
    hot = timer.hot(both)
    return Entry(
        kind=f"{n}x{k}",
        n=n,
        k=k,
        tokens=tokens,
        floor_us=min(streaming),
        linear_us=linear_us,
        linear_hot_us=hot[0],
        hot_us=hot[1],
        alone_us={"floor": min(streaming_alone), "linear": linear_alone, "ours": alone},
        strided_us=strided_us,
        waiting_us=waiting_us,
        invariant_us=invariant_us,
        dispatched=asdict(dispatched),
        candidates=[{**asdict(dispatched), "us": us}],
    )


def run(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int] = TOKEN_CLASSES,
    around: tuple[str, str] = NEIGHBOURS,
) -> Iterator[Entry]:
    """Yield the entries of a whole run.

    Args:
        shapes: (n, k) of the weights.
        tokens: M.
        around: kinds of the producer and of the consumer.
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
        products = [Product(n, k, count) for count in tokens]
        floors = floor.fastest(weights, products[0].chain(*around))
        for product in products:
            yield run_entry(product, weights, floors, around)


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


def remarks(entries: Sequence[Entry]) -> list[str]:
    """Return where ours was slower than the framework, and what was faster than the floor."""
    cells = {f"{e.kind} at M = {e.tokens}": (e, e.candidates[0]["us"]) for e in entries}
    over = {cell: us / e.linear_us for cell, (e, us) in cells.items()}
    fastest = (
        (cell, e.floor_us, min(us, e.linear_us, e.invariant_us)) for cell, (e, us) in cells.items()
    )
    return [document.slower_than("F.linear", over), floor.remark(fastest)]


def as_document(
    entries: Sequence[Entry], commit: str | None = None, around: tuple[str, str] = NEIGHBOURS
) -> dict[str, Any]:
    """Return a run as its document."""
    return document.of(
        "gemm",
        entries,
        commit,
        method={
            "chain": told(*around),
            "statistic": "median of 3 rounds of 5 replays of a CUDA graph, microseconds a launch",
            "weights": f"cold: {COLD_BYTES >> 20} MiB of weights take turns; hot: one weight",
            "floor": f"16-byte loads of the weight, the best of {len(floor.FORMS)} forms, PDL on",
            "ours": "PDL on, weight_is_static promised, except waiting_us",
        },
        host_us={"fused_a_gemm": host_time()},
        remarks=remarks(entries),
    )
