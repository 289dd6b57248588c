"""A soak: random calls on threads, streams and graphs, whether they stay right, what they leave."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from array_helpers import cupy_of, numpy_of, torch_of
from gemm_helpers import assert_product, inputs, residual_of
from helpers import BF16, FP16
from mla_helpers import FORMS, MlaCall, as_halves, as_list, run_and_check
from mla_layer_helpers import LAYER_FORMS
from oracle import codes
from stream_helpers import StreamLike
from torch import nn

import k3cupy

MIB = 2**20


def poison(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        codes(tensor).fill_(0x55)


def differing(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> torch.Tensor:
    """How many values differ in a bit, counted where the tensors are."""
    counts = []
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        counts.append((codes(a) != codes(b)).sum())
    return torch.stack(counts).sum()


# --- Calls ---------------------------------------------------------------------------------------


@dataclass
class Task:
    """A call on tensors of its own, made and checked once, and then run again and again.

    `call` takes options and returns the outputs; `refused` is a call that must raise; `boxes` are
    what a call writes in place, put back before each run.
    """

    call: Callable[..., list[torch.Tensor]]
    refused: Callable[[], Any] | None = None
    boxes: list[torch.Tensor] = field(default_factory=list)
    takes_options: bool = True
    can_be_captured: bool = True

    def __post_init__(self) -> None:
        self.before = [box.clone() for box in self.boxes]
        first = self.run()
        self.wants = [tensor.clone() for tensor in first]
        poison(first)
        assert not differing(self.run(), self.wants), "two runs differ"

    def put_back(self) -> None:
        for box, before in zip(self.boxes, self.before, strict=True):
            box.copy_(before)

    def run(self, **options: Any) -> list[torch.Tensor]:
        """Everything that the call writes."""
        self.put_back()
        return [*self.call(**options), *self.boxes]

    def refuse(self) -> torch.Tensor:
        """Make the wrong call; count what it wrote."""
        assert self.refused is not None
        self.put_back()
        try:
            self.refused()
        except (TypeError, ValueError):
            return differing(self.boxes, self.before)
        raise AssertionError("a wrong call was not refused")


Make = Callable[[str], Task]


def epilogue(
    form: str, tokens: int, heads: int, device: str, *, change: Any = None, **settings: Any
) -> Task:
    call: MlaCall = (FORMS | LAYER_FORMS)[form].make(tokens, heads, device=device, **settings)
    if change is not None:
        call = change(call)
    boxes = [box.storage for box in call.boxes.values()]
    before = [box.clone() for box in boxes]
    run_and_check(call)
    for box, saved in zip(boxes, before, strict=True):
        box.copy_(saved)
    narrow = "k_pe" if form in FORMS else call.names_first
    return Task(
        lambda **options: as_list(call.run(**options)),
        lambda: call.run(**{narrow: call.args[narrow][..., :63]}),
        boxes or [torch.zeros(0, device=device)],
    )


def product(
    name: str,
    tokens: int,
    n: int,
    k: int,
    device: str,
    *,
    stride: int | None = None,
    shift: int = 0,
    residual: bool = False,
    in_place: bool = False,
    dtype: torch.dtype = BF16,
    **given: Any,
) -> Task:
    operation = getattr(k3cupy, name)
    any_k = name == "low_latency_linear"  # what does not fit is the framework's to refuse
    x, weight = inputs(tokens, n, k, device, dtype=dtype, strides=(stride or k, 1), shift=shift)
    added = residual_of(tokens, n, device, dtype=dtype) if residual or in_place else None
    if tokens:
        out = operation(x, weight, added, **given)
        assert_product(out, x, weight, added)
    if in_place:
        assert added is not None
        given["out"] = added
    return Task(
        lambda **options: [operation(x, weight, added, **given, **options)],
        lambda: operation(x, None if any_k else weight[:, :-16], added, **given),
        [added] if in_place and added is not None else [torch.zeros(0, device=device)],
        takes_options=not any_k,
    )


def public_signature(tokens: int, n: int, k: int, device: str) -> Task:
    x, weight = inputs(tokens, n, k, device)
    out = torch.zeros(tokens, n, dtype=BF16, device=device)

    def call() -> list[torch.Tensor]:
        k3cupy.dsv3_fused_a_gemm(out, x, weight.T, True)
        return []

    def wrong() -> None:
        k3cupy.dsv3_fused_a_gemm(out[:, :-1], x, weight.T, True)

    return Task(call, wrong, [out], takes_options=False)


def layer(tokens: int, n: int, k: int, device: str) -> Task:
    """A layer that is enabled and disabled around each call."""
    linear = nn.Linear(k, n, bias=False, dtype=BF16, device=device).requires_grad_(False)
    x, _ = inputs(tokens, n, k, device)

    def call() -> list[torch.Tensor]:
        k3cupy.enable_low_latency_gemm(linear, warmup=False)
        out = linear(x)
        k3cupy.disable_low_latency_gemm(linear)
        return [out]

    return Task(call, takes_options=False)


def arrays(tokens: int, heads: int, device: str) -> Task:
    """Arrays of CuPy, or of NumPy on the CPU."""
    call = FORMS["concat"].make(tokens, heads, dtype=FP16, device=device)
    wrap = cupy_of if device == "cuda" else numpy_of
    given = {name: wrap(value) for name, value in call.args.items()}

    def run() -> list[torch.Tensor]:
        if device == "cpu":
            return [torch_of(call.run(**given), FP16)]
        import cupy

        stream = StreamLike(torch.cuda.current_stream().cuda_stream)
        with cupy.cuda.Stream.from_external(stream):
            return [torch.from_dlpack(call.run(**given))]

    return Task(run, takes_options=False, can_be_captured=False)


def odd_rows(call: MlaCall) -> MlaCall:
    """k_nope begins at no multiple of 16 bytes: the element-wise instance."""
    wide = call.args["k_nope"].new_zeros(call.tokens, call.heads, 129)
    wide[..., 1:].copy_(call.args["k_nope"])
    return call.given(k_nope=wide[..., 1:])


TASKS: dict[str, Make] = {
    f"{form} {tokens}x{heads} {settings or ''}".strip(): partial(
        lambda form, tokens, heads, settings, device: epilogue(
            form, tokens, heads, device, **settings
        ),
        form, tokens, heads, settings,
    )
    for form in FORMS
    for tokens, heads, settings in (
        (0, 3, {}),
        (1, 12, {"scale_tensors": True}),
        (33, 3, {"rope": True}),
        (300, 2, {}),
    )
}  # fmt: skip
TASKS |= {
    f"{form} {tokens}x{heads}": partial(
        lambda form, tokens, heads, device: epilogue(form, tokens, heads, device),
        form, tokens, heads,
    )
    for form, tokens, heads in (
        ("norm", 7, 1), ("query", 4, 12), ("query-fp8", 16, 3), ("query-ds_mla", 17, 3),
        ("value", 1, 12), ("value-packed-gate", 33, 3),
    )
}  # fmt: skip
TASKS |= {
    "insert, halves": lambda device: epilogue("insert", 17, 5, device, change=as_halves),
    "fp8, halves": lambda device: epilogue("fp8", 17, 5, device, change=as_halves),
    "insert, odd rows": lambda device: epilogue("insert", 17, 5, device, change=odd_rows),
    "concat of arrays": lambda device: arrays(16, 3, device),
    "dsv3_fused_a_gemm": lambda device: public_signature(4, 272, 1024, device),
    "a layer": lambda device: layer(4, 2304, 1536, device),
}
TASKS |= {
    f"{name} {tokens}x{n}x{k} {settings or ''}".strip(): partial(
        lambda name, tokens, n, k, settings, device: product(
            name, tokens, n, k, device, **settings
        ),
        name, tokens, n, k, settings,
    )
    for name, tokens, n, k, settings in (
        ("fused_a_gemm", 0, 48, 128, {}),
        ("fused_a_gemm", 1, 272, 1024, {"weight_is_static": True}),
        ("fused_a_gemm", 9, 272, 1024, {"stride": 2112}),
        ("fused_a_gemm", 3, 272, 1024, {"stride": 1027, "shift": 6}),
        ("fused_a_gemm", 16, 272, 1024, {"residual": True}),
        ("fused_a_gemm", 16, 272, 1024, {"in_place": True}),
        ("fused_a_gemm", 64, 528, 512, {"batch_invariant": True}),
        ("fused_a_gemm", 33, 528, 512, {"weight_is_static": True}),
        ("skinny_gemm", 1, 272, 1024, {}),
        ("skinny_gemm", 2, 272, 1024, {"residual": True, "dtype": FP16}),
        ("skinny_gemm", 7, 272, 1024, {"stride": 1027, "shift": 2}),
        ("skinny_gemm", 4, 272, 1024, {"in_place": True}),
        ("skinny_gemm", 12, 272, 1024, {"stride": 2112, "weight_is_static": True}),
        ("skinny_gemm", 16, 264, 1032, {"residual": True}),
        ("low_latency_linear", 4, 2304, 1536, {}),
        ("low_latency_linear", 4, 2304, 1536, {"residual": True}),
    )
}  # fmt: skip

# --- The soak ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What the process held when nothing was running."""

    seconds: float
    calls: int
    host: int
    objects: int
    torch: int
    reserved: int
    cupy: int
    device: int

    def __str__(self) -> str:
        sizes = " ".join(
            f"{name} {getattr(self, name) / MIB:.1f}"
            for name in ("host", "torch", "reserved", "cupy", "device")
        )
        return f"{self.seconds:7.1f} s {self.calls:9} calls, MiB: {sizes}, {self.objects} objects"


GROWTH = {"host": 16 * MIB, "objects": 1000, "torch": 0, "reserved": 32 * MIB, "cupy": 0}
"""How much may be held more in the last third of a soak than in the first."""

ALONE = {"device": 64 * MIB}
"""The same, for a process that has the GPU to itself."""


def growth(samples: Sequence[Sample], what: str) -> int:
    values = [getattr(sample, what) for sample in samples]
    third = max(1, len(values) // 3)
    return int(statistics.median(values[-third:]) - statistics.median(values[:third]))


def resident() -> int:
    """Bytes of this process in memory, what the allocator could give back not counted."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Worker(threading.Thread):
    """One thread with tasks of its own, two streams, and a captured graph of each task.

    A graph is replayed often and captured anew only once a lap: PyTorch and the driver keep some
    50 KiB of each one for good, also of graphs without a kernel of ours.
    """

    capturing = threading.Lock()

    def __init__(self, soak: Soak, seed: int) -> None:
        super().__init__(name=f"soak {seed}", daemon=True)
        self.soak, self.random = soak, random.Random(seed)
        self.tasks: dict[str, Task] = {}
        self.wrong: dict[str, torch.Tensor] = {}
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}
        self.calls = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # reported by the soak
            self.error = error
            self.soak.made.abort()
            self.soak.meeting.abort()

    def work(self) -> None:
        on_gpu = self.soak.device == "cuda"
        self.streams = streams = [torch.cuda.Stream() for _ in range(2)] if on_gpu else []
        names = list(self.soak.tasks)
        self.random.shuffle(names)  # so that threads compile different kernels first
        with torch.no_grad(), torch.cuda.stream(streams[0] if on_gpu else None):
            for name in names:
                for device in dict.fromkeys((self.soak.device, "cpu")):
                    self.make(name, device)
            self.soak.made.wait(600)  # loading a kernel would spoil the capture of another thread
            self.pool = torch.cuda.graph_pool_handle() if on_gpu else None
            for name in list(self.tasks):
                self.step(name, "graph" if name.startswith("cuda") else "run")
        stream = streams[0] if on_gpu else None
        while not self.soak.over.is_set():
            if self.soak.pause.is_set():
                self.rest()
                continue
            if on_gpu:
                before, stream = stream, self.random.choice(streams)
                if before is not stream:
                    stream.wait_stream(before)
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(self.random.randrange(1, 40)):
                    self.step(*self.draw())
                if on_gpu:
                    torch.cuda.current_stream().synchronize()

    def make(self, name: str, device: str) -> None:
        if device == "cpu" and self.soak.device == "cuda" and len(self.tasks) % 5:
            return  # some calls on the CPU are enough
        self.tasks[f"{device}: {name}"] = self.soak.tasks[name](device)
        self.wrong[f"{device}: {name}"] = torch.zeros((), dtype=torch.int64, device=device)

    def draw(self) -> tuple[str, str]:
        name = self.random.choice(list(self.tasks))
        if name.startswith("cpu"):
            return name, self.random.choice(("run", "run", "refuse"))
        return name, self.random.choice(("run", "run", "options", "graph", "graph", "refuse"))

    def step(self, name: str, how: str) -> None:
        task = self.tasks[name]
        self.calls += 1
        if how == "refuse" and task.refused is not None:
            self.wrong[name] += task.refuse()
        elif how == "graph" and task.can_be_captured:
            if name not in self.graphs:
                self.capture(name, task)
            graph, outs = self.graphs[name]
            poison(outs)
            graph.replay()
            self.wrong[name] += differing(outs, task.wants)
        elif how == "options" and task.takes_options:
            options = self.random.choice(
                ({"pdl": False}, {"stream": torch.cuda.current_stream().cuda_stream})
            )
            self.wrong[name] += differing(task.run(**options), task.wants)
        else:
            self.wrong[name] += differing(task.run(), task.wants)

    def capture(self, name: str, task: Task) -> None:
        """Capture a run, now and then with a refused call in the middle of it."""
        graph = torch.cuda.CUDAGraph()
        with self.capturing:
            gc.disable()  # a graph that the collector frees during a capture would spoil it
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                if task.refused is not None and self.random.random() < 0.3:
                    task.refuse()
                outs = task.run()
            finally:
                graph.capture_end()
                gc.enable()
        self.graphs[name] = graph, outs

    def rest(self) -> None:
        """Wait until the soak has looked, then capture one graph anew."""
        for stream in self.streams:  # not the device, in which another thread may be capturing
            stream.synchronize()
        self.soak.meeting.wait()
        self.soak.meeting.wait()
        if self.graphs and not self.soak.over.is_set():
            name = self.random.choice(list(self.graphs))
            del self.graphs[name]
            with torch.no_grad(), torch.cuda.stream(self.streams[0]):
                self.capture(name, self.tasks[name])
                self.streams[0].synchronize()


class Soak:
    """Workers that run tasks for a time, and what was seen in between.

    Args:
        device: of the tasks; on a GPU some run on the CPU too.
        seconds: how long they run, without the first round, in which everything is made, and
            without the time in which they are looked at.
        laps: how often the workers stop to be looked at.
    """

    def __init__(
        self, tasks: dict[str, Make], device: str, *, threads: int, seconds: float, laps: int
    ) -> None:
        self.tasks, self.device, self.seconds, self.laps = tasks, device, seconds, laps
        self.over, self.pause = threading.Event(), threading.Event()
        self.made, self.meeting = threading.Barrier(threads), threading.Barrier(threads + 1)
        self.workers = [Worker(self, seed) for seed in range(threads)]
        self.samples: list[Sample] = []
        self.wrong: dict[str, int] = {}

    @property
    def calls(self) -> int:
        return sum(worker.calls for worker in self.workers)

    def run(self) -> Soak:
        # What is there by now, of all tests before, is not looked at again in each lap.
        gc.collect()
        gc.freeze()
        for worker in self.workers:
            worker.start()
        begin = time.monotonic()
        try:
            self.look(begin)
            begin = time.monotonic()
            for lap in range(1, self.laps + 1):
                ends = time.monotonic() + self.seconds / self.laps
                while time.monotonic() < ends and not self.meeting.broken:
                    time.sleep(min(0.2, max(0.0, ends - time.monotonic())))
                self.look(begin, last=lap == self.laps)
        except threading.BrokenBarrierError:
            errors = [worker.error for worker in self.workers if worker.error is not None]
            raise next(
                e for e in errors if not isinstance(e, threading.BrokenBarrierError)
            ) from None
        finally:
            self.over.set()
            self.meeting.abort()
            for worker in self.workers:
                worker.join(60)
        return self

    def look(self, begin: float, *, last: bool = False) -> None:
        """Stop all workers, take a sample and what was wrong, and let them go on."""
        self.pause.set()
        self.meeting.wait(600)
        gc.collect()
        allocated = reserved = pool = used = 0
        if self.device == "cuda":
            import cupy

            torch.cuda.empty_cache()
            cupy.get_default_memory_pool().free_all_blocks()
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            pool = cupy.get_default_memory_pool().total_bytes()
            free, total = torch.cuda.mem_get_info()
            used = total - free
        objects = len(gc.get_objects())
        seconds = time.monotonic() - begin
        sample = Sample(seconds, self.calls, resident(), objects, allocated, reserved, pool, used)
        self.samples.append(sample)
        print(sample, flush=True)
        for worker in self.workers:
            for name, count in worker.wrong.items():
                if int(count):
                    self.wrong[name] = self.wrong.get(name, 0) + int(count)
                    count.zero_()
                    if self.device == "cuda":
                        torch.cuda.synchronize()
        self.pause.clear()
        if last:
            self.over.set()
        self.meeting.wait(600)

    def problems(self, *, alone: bool = False) -> list[str]:
        """What was wrong, and what grew; the first samples are those of a process still warming."""
        found = [f"{name}: {count} wrong values" for name, count in self.wrong.items()]
        settled = self.samples[1 + len(self.samples) // 10 :]
        for what, most in {**GROWTH, **(ALONE if alone else {})}.items():
            grown = growth(settled, what)
            if grown > most:
                found.append(f"{what} grew by {grown}")
        return found
