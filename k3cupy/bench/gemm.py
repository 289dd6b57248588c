"""Benchmark of the fused-A GEMM: time over the time of reading the weight once.

In a model every layer has its own weight, so each launch finds it cold: weights of several hundred
megabytes take turns. Activations are warm, as they come from the preceding kernel. The floor is a
kernel that streams the same bytes and does nothing with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import k3cupy
from k3cupy.bench import environment, graphs
from k3cupy.ops.fused_a_gemm_choice import candidates, choose
from k3cupy.ops.fused_a_gemm_config import FusedAGemmConfig, FusedAGemmVariant
from k3cupy.ops.gemm_tables import TOKEN_CLASSES
from k3cupy.runtime import devices, instances, launch
from k3cupy.runtime.instances import Instance

_COLD_BYTES = 300 << 20
_MAX_WEIGHTS = 800
_LAUNCHES, _LAUNCHES_OF_LARGE = 60, 16
_LARGE_BYTES = 80 << 20
_GRAPHS_AT_ONCE = 16
_FLOOR_GRIDS = ((1, 512), (2, 256), (2, 512), (4, 256), (4, 512), (8, 256))
"""Blocks a multiprocessor and threads a block of the floor kernel; the fastest counts."""

_EXTRA_COLUMNS = 64
_MAX_ERROR = 2.5e-3


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
        candidates: time of every configuration measured, the dispatched one among them.
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


def weights_of(n: int, k: int, pool: torch.Tensor) -> list[torch.Tensor]:
    """Return weights that take turns, cut from one tensor; two at least."""
    size = n * k
    count = max(2, min(_MAX_WEIGHTS, -(-_COLD_BYTES // (2 * size))))
    return [pool[i * size : (i + 1) * size].view(n, k) for i in range(count)]


def pool_elements(shapes: Sequence[tuple[int, int]]) -> int:
    """Return how many elements the weights of the largest shape need."""
    return max(max(2 * n * k, _COLD_BYTES // 2 + n * k) for n, k in shapes)


class Timer:
    """Times bodies that take a weight; every launch gets the next one."""

    def __init__(
        self, weights: Sequence[torch.Tensor], *, rounds: int = 3, replays: int = 5
    ) -> None:
        self._rounds, self._replays = rounds, replays
        large = 2 * weights[0].numel() > _LARGE_BYTES
        self._weights = weights
        self._launches = max(_LAUNCHES_OF_LARGE if large else _LAUNCHES, len(weights))

    def cold(self, bodies: Sequence[Callable[[torch.Tensor], Any]]) -> list[float]:
        """Return the microseconds of one launch of each body."""
        return self._measure(bodies, self._weights)

    def hot(self, bodies: Sequence[Callable[[torch.Tensor], Any]]) -> list[float]:
        """The same with one weight, which stays in L2 where it fits."""
        return self._measure(bodies, self._weights[:1])

    def _measure(
        self, bodies: Sequence[Callable[[torch.Tensor], Any]], weights: Sequence[torch.Tensor]
    ) -> list[float]:
        times: list[float] = []
        for start in range(0, len(bodies), _GRAPHS_AT_ONCE):
            recorded = []
            for body in bodies[start : start + _GRAPHS_AT_ONCE]:
                turn = itertools.cycle(weights)
                recorded.append(
                    graphs.capture(lambda body=body, turn=turn: body(next(turn)), self._launches)  # type: ignore[misc]
                )
            times += graphs.measure(
                recorded, self._launches, rounds=self._rounds, replays=self._replays
            )
        return [round(us, 4) for us in times]


def floor_us(timer: Timer) -> float:
    """Return the time of streaming a weight, with the best of several grids."""
    device = torch.cuda.current_device()
    kernel = instances.load(Instance("bench_stream.cu", "k3cupy::stream_bytes"), device)
    sink = torch.zeros(1, device="cuda", dtype=torch.int32)

    def body(blocks_per_sm: int, block: int) -> Callable[[torch.Tensor], None]:
        queue = launch.make_launcher(
            device,
            kernel.kernel,
            grid=blocks_per_sm * devices.info(device).num_sms,
            block=block,
            pdl=True,
        )

        def stream(weight: torch.Tensor) -> None:
            arguments = [weight.data_ptr(), weight.numel() // 8, sink.data_ptr()]
            queue(torch.cuda.current_stream().cuda_stream, arguments)

        return stream

    return min(timer.cold([body(*grid) for grid in _FLOOR_GRIDS]))


class Problem:
    """One product with its tensors."""

    def __init__(self, n: int, k: int, tokens: int) -> None:
        random = torch.Generator(device="cuda").manual_seed(n + k + tokens)
        wide = torch.randn(
            tokens, k + _EXTRA_COLUMNS, device="cuda", dtype=torch.bfloat16, generator=random
        )
        self.n, self.k, self.tokens = n, k, tokens
        self.strided = wide[:, :k]
        self.x = self.strided.contiguous()
        self.out = torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16)
        self.device = devices.info(torch.cuda.current_device())

    def body(
        self,
        config: FusedAGemmConfig | None,
        *,
        x: torch.Tensor | None = None,
        static: bool = True,
        batch_invariant: bool = False,
    ) -> Callable[[torch.Tensor], Any]:
        """Return a call that takes the weight."""
        given = self.x if x is None else x
        return lambda weight: k3cupy.fused_a_gemm(
            given,
            weight,
            self.out,
            config=config,
            weight_is_static=static,
            batch_invariant=batch_invariant,
        )

    def check(self, config: FusedAGemmConfig, weight: torch.Tensor) -> None:
        """Compare with a product in float32.

        Raises:
            RuntimeError: it differs by more than rounding; nothing is timed.
        """
        self.out.fill_(float("nan"))
        self.body(config)(weight)
        want = self.x.float() @ weight.float().T
        error = float((self.out.float() - want).norm() / want.norm())
        if not error < _MAX_ERROR:
            raise RuntimeError(
                f"{self.n} x {self.k}, M = {self.tokens}, {config}: relative error {error}, not "
                "timed"
            )


def run_entry(
    problem: Problem, weights: Sequence[torch.Tensor], floor: float, *, all_candidates: bool
) -> Entry:
    """Check, then time one problem.

    Raises:
        RuntimeError: a configuration gives a wrong product.
    """
    n, k, tokens = problem.n, problem.k, problem.tokens
    dispatched, _ = choose(n, k, tokens, problem.device)
    measured = [dispatched]
    if all_candidates:
        measured += [c for c in candidates(n, k, tokens, problem.device) if c != dispatched]
    for config in measured:
        problem.check(config, weights[0])
    timer = Timer(weights, rounds=1, replays=4) if all_candidates else Timer(weights)

    def linear(weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(problem.x, weight)

    times = timer.cold(
        [
            linear,
            problem.body(dispatched, x=problem.strided),
            problem.body(dispatched, static=False),
            problem.body(None, batch_invariant=True),
            *(problem.body(config) for config in measured),
        ]
    )
    hot = timer.hot([linear, problem.body(dispatched)])
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
        candidates=[
            {**asdict(config), "us": us} for config, us in zip(measured, times[4:], strict=True)
        ],
    )


def run(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int] = TOKEN_CLASSES,
    *,
    all_candidates: bool = False,
) -> Iterator[Entry]:
    """Yield the entries of a whole run.

    Args:
        shapes: (n, k) of the weights.
        tokens: M.
        all_candidates: time every candidate, as a table needs it, not only the dispatched one.
    """
    device = devices.info(torch.cuda.current_device())
    wanted: list[Instance] = []
    for (n, k), count in itertools.product(shapes, tokens):
        config, _ = choose(n, k, count, device)
        invariant, _ = choose(n, k, count, device, batch_invariant=True)
        static = FusedAGemmVariant(packed=True, weight_is_static=True)
        wanted += [
            config.instance(static),
            config.instance(FusedAGemmVariant(packed=count == 1, weight_is_static=True)),
            config.instance(FusedAGemmVariant(packed=True)),
            invariant.instance(static),
        ]
        if all_candidates:
            wanted += [c.instance(static) for c in candidates(n, k, count, device)]
    instances.load_all(wanted, device.index)
    pool = torch.randn(pool_elements(shapes), device="cuda", dtype=torch.bfloat16)
    for n, k in shapes:
        weights = weights_of(n, k, pool)
        floor = floor_us(Timer(weights))
        for count in tokens:
            yield run_entry(Problem(n, k, count), weights, floor, all_candidates=all_candidates)


def host_time(n: int = 2112, k: int = 7168, tokens: int = 16) -> dict[str, float]:
    """Return the host's microseconds for one repeated eager call, ours and ``F.linear``'s."""
    problem = Problem(n, k, tokens)
    weight = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16)
    given = problem.body(None)
    return {
        "new output": graphs.host_us(lambda: k3cupy.fused_a_gemm(problem.x, weight)),
        "out given": graphs.host_us(lambda: given(weight)),
        "F.linear": graphs.host_us(lambda: torch.nn.functional.linear(problem.x, weight)),
    }


def as_document(entries: Sequence[Entry], commit: str | None = None) -> dict[str, Any]:
    """Return a run as the JSON document that is kept under ``benchmarks/results``."""
    return {
        "benchmark": "gemm",
        "environment": environment.describe(torch.cuda.current_device(), commit),
        "method": {
            "statistic": "median of 3 rounds of 5 replays of a CUDA graph, microseconds a launch; "
            "1 round of 4 where every candidate is measured",
            "weights": f"cold: {_COLD_BYTES >> 20} MiB of weights take turns; hot: one weight",
            "floor": "16-byte loads of the weight, the best of six grids, PDL on",
            "ours": "PDL on, weight_is_static promised, except waiting_us",
        },
        "host_us": {"fused_a_gemm": host_time()},
        "entries": [asdict(entry) for entry in entries],
    }
