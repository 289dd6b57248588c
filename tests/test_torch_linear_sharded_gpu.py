"""Layers on a GPU that others wrap, offload or shard, before they are enabled and after."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_helpers import assert_product, normal
from helpers import BF16, run_child
from pdl_helpers import CopyLate, copy_late, wrong_values
from torch import nn
from torch_linear_helpers import RELEASE, Calls, process_group

import k3cupy
from k3cupy.call.choice import LINEAR

pytestmark = pytest.mark.gpu

__all__ = ["copy_late"]

N, K = 528, 1536
BOTH_ORDERS = pytest.mark.parametrize("enabled_first", [True, False], ids=["first", "after"])
GATHERED = "FSDP gathers its weight for each call, which waits for it"


class Pair(nn.Module):
    """Two layers, as tensor parallelism cuts them: by rows, and by columns."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.up = nn.Linear(K, N, bias=False, dtype=BF16, device=device)
        self.down = nn.Linear(N, K, bias=False, dtype=BF16, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def made(device: str = "cuda") -> Pair:
    torch.manual_seed(3)
    return Pair(device)


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """As far apart as two orders of sums are, in each of two layers."""
    error = (whole(got).float() - want.float()).norm() / want.float().norm()
    assert error < 2**-7, float(error)


def planned(tokens: int) -> list[str]:
    """The kernels of the two layers, as the report sorts them."""
    sizes = ((N, K), (K, N))
    return sorted(k3cupy.select_backend(tokens, n, k) or LINEAR for n, k in sizes)


def kernels(run: Callable[[], Any]) -> list[str]:
    k3cupy.reset_dispatch_report()
    run()
    return sorted(row.choice.kernel for row in k3cupy.dispatch_report())


def enabled(model: nn.Module) -> k3cupy.LinearReport:
    return k3cupy.enable_low_latency_gemm(model, tokens=(4, 16))


# Accelerate


def offloaded(model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, execution_device=torch.device("cuda", 0))


def dispatched(model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    places: dict[str, Any] = {"up": 0, "down": "cpu"}
    return accelerate.dispatch_model(model, places, main_device=0, force_hooks=True)


@BOTH_ORDERS
@pytest.mark.parametrize("around", [offloaded, dispatched])
def test_case50_accelerate(around: Any, enabled_first: bool, calls: Calls) -> None:
    """Kernels of ours run on weights that come to the GPU for a call, never promised."""
    model, plain = made("cpu").requires_grad_(False), made("cpu").cuda()
    if enabled_first:
        enabled(model)
    model = around(model)
    report = enabled(model)
    assert [(row.installed, row.device) for row in report] == [(True, "cuda:0")] * 2
    assert all("accelerate.hooks put on it" in row.reason for row in report)
    x = normal((4, K), 1, "cuda")
    with torch.no_grad():
        for _ in range(3):
            calls.clear()
            close(model(x), plain(x))
            assert len(calls) == 2
            assert calls.promises[1] is False
            assert around is dispatched or calls.promises[0] is False
        assert kernels(lambda: model(x)) == planned(4)
        k3cupy.disable_low_latency_gemm(model)
        assert kernels(lambda: model(x)) == []
        close(model(x), plain(x))


@BOTH_ORDERS
def test_weights_that_are_offloaded_and_changed(enabled_first: bool) -> None:
    """Many in a row, each in memory that another has just left."""
    accelerate = pytest.importorskip("accelerate")
    layers = nn.ModuleList(nn.Linear(K, K, bias=False, dtype=BF16) for _ in range(20))
    layers.requires_grad_(False)
    weights = [layer.weight.clone().cuda() for layer in layers]
    if enabled_first:
        enabled(layers)
    for layer in layers:
        accelerate.cpu_offload(layer, execution_device=torch.device("cuda", 0))
    assert enabled(layers).installed == 20
    for seed in range(3):
        x = normal((4, K), seed, "cuda")
        for layer, weight in zip(layers, weights, strict=True):
            assert_product(layer(x), x, weight)


# Adapters


class Adapter(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x)


@BOTH_ORDERS
def test_case50_a_merge_that_nobody_counts(copy_late: CopyLate, enabled_first: bool) -> None:
    """Its writer lets the layer's kernel begin early, and PyTorch is not told of the write."""
    layer = nn.Linear(K, N, bias=False, dtype=BF16, device="cuda").requires_grad_(False)
    if enabled_first:
        enabled(layer)
    model, x = Adapter(layer), normal((4, K), 1, "cuda")
    enabled(model)
    weights = [normal((N, K), seed, "cuda") for seed in (2, 3)]

    def step(i: int) -> torch.Tensor:
        copy_late(weights[i], layer.weight.data)
        return model(x)

    wants = [k3cupy.low_latency_linear(x, weight) for weight in weights]
    for _ in range(3):  # the kernels are loaded before the capture
        model(x)
    assert wrong_values(step, wants) == 0


# Shards


@pytest.fixture
def mesh() -> Iterator[Any]:
    import torch.distributed as dist

    if not dist.is_nccl_available():
        pytest.skip("PyTorch without NCCL")
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    with process_group("nccl", 0, 1, dist.HashStore()):
        yield init_device_mesh("cuda", (1,))


def fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh)


def parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@BOTH_ORDERS
@pytest.mark.parametrize("shard", [fsdp, parallel])
def test_case50_sharded(mesh: Any, calls: Calls, shard: Any, enabled_first: bool) -> None:
    """Kernels of ours run on what a rank holds, right behind writes of the sharded weights."""
    model, plain = made(), made()
    if enabled_first:
        enabled(model)
    model = shard(model, mesh)
    report = enabled(model)
    told = [GATHERED] * 2
    if shard is parallel:
        told = [
            f"a share of {N} x {K}, split by rows over 1 ranks",
            f"a share of {K} x {N}, split by columns over 1 ranks",
        ]
    assert [row.reason for row in report] == told
    assert report.installed == 2
    with torch.no_grad():
        for seed in range(10):
            x = normal((4, K), seed, "cuda")
            close(model(x), plain(x))
            if shard is fsdp:
                model.reshard()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                ours.mul_(-1.5)
                theirs.mul_(-1.5)
        assert not any(calls.promises)
        assert kernels(lambda: model(x)) == planned(4)
        if shard is fsdp:
            model.reshard()
    for each in (model, plain):
        whole(each(x)).float().square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours.grad, theirs.grad)


def test_case50_compiled_shares(mesh: Any) -> None:
    model, plain = parallel(made().requires_grad_(False), mesh), made()
    enabled(model)
    run, x = torch.compile(model), normal((4, K), 1, "cuda")
    with torch.no_grad():
        for _ in range(2):
            close(run(x), plain(x))
        ran = kernels(lambda: run(x))
    # PyTorch 2.11 keeps its own product in the graph: right, and not ours.
    assert ran == (planned(4) if RELEASE >= (2, 13) else [])


@BOTH_ORDERS
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_case50_the_older_fsdp(mesh: Any, use_orig_params: bool, enabled_first: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, plain = made().requires_grad_(False), made()
    if enabled_first:
        enabled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one rank shards nothing
        model = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=0)
    for _ in range(2):
        x = normal((4, K), 1, "cuda")
        with torch.no_grad():
            for _ in range(3):
                close(model(x), plain(x))
        report = enabled(model)
        assert all(row.reason or row.plan for row in report), report


def computed_by_two_gpus(rank: int, store: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(rank)
    with process_group("nccl", rank, 2, dist.FileStore(store, 2)):
        mesh = init_device_mesh("cuda", (2,))
        x, plain = normal((4, K), 1, "cuda"), made()
        for shard in (fsdp, parallel):
            for enabled_first in (True, False):
                model: Any = made().requires_grad_(False)
                if enabled_first:
                    enabled(model)
                model = shard(model, mesh)
                report = enabled(model)
                assert report.installed == 2, report
                with torch.no_grad():
                    for _ in range(3):
                        close(model(x), plain(x))
                if shard is parallel:
                    assert [row.shape for row in report] == [(N // 2, K), (K, N // 2)]
        print("right")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_case50_two_gpus(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with ThreadPoolExecutor(2) as threads:
        run = functools.partial(run_child, computed_by_two_gpus)
        printed = threads.map(lambda rank: run(rank, store), (0, 1))
    assert [text.split()[-1] for text in printed] == ["right", "right"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@BOTH_ORDERS
def test_data_parallel_replicas_run_the_frameworks_linear(enabled_first: bool) -> None:
    """Their weights are no parameters; the model itself goes on as it was."""
    model, plain = made().requires_grad_(False), made()
    if enabled_first:
        enabled(model)
    replicas, x = nn.DataParallel(model, device_ids=[0, 1]), normal((8, K), 1, "cuda")
    enabled(replicas)
    with torch.no_grad():
        assert kernels(lambda: close(replicas(x), plain(x))) == []
        assert kernels(lambda: model(x)) == planned(8)
        close(F.linear(model.up(x), model.down.weight), plain(x))
