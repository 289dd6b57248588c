"""Models that PyTorch shards, before they are enabled and after: right, and what is served."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_helpers import normal
from helpers import run_child
from torch import nn
from torch_linear_helpers import RELEASE, Calls, K, N, linear, process_group

import k3cupy
from k3cupy.torch import shards, torch_linear
from k3cupy.torch.torch_linear import LowLatencyLinear

if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("PyTorch before 2.6", allow_module_level=True)
if not torch.distributed.is_gloo_available():
    pytest.skip("PyTorch without gloo", allow_module_level=True)

import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

of_now = pytest.mark.skipif(
    RELEASE < (2, 13), reason="PyTorch 2.11 keeps its own product here, or cannot compute it at all"
)
BOTH_ORDERS = pytest.mark.parametrize("enabled_first", [True, False], ids=["first", "after"])
ON_CPU = "on the CPU: framework linear until it moves to a GPU"
GATHERED = f"{ON_CPU}; FSDP gathers its weight for each call, which waits for it"
ALONE = "sharded on its own: shard the module around it instead"


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    with process_group("gloo", 0, 1, dist.HashStore()):
        yield init_device_mesh("cpu", (1,))


class Block(nn.Module):
    """A norm and two layers, as tensor parallelism cuts them."""

    def __init__(self, width: int = N) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K, bias=False, dtype=torch.bfloat16)
        self.up, self.down = linear(width), linear(K, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def made(width: int = N) -> Block:
    torch.manual_seed(5)
    return Block(width)


X = normal((2, 4, K), 1)


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


# Ways to shard a model


def fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh)


def fsdp_by_layer(model: Any, mesh: Any) -> nn.Module:
    fully_shard(model.up, mesh=mesh)
    fully_shard(model.down, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_over_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    both = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("data", "tensor"))
    return fully_shard(parallel(model, both["tensor"]), mesh=both["data"])


def parallel(model: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def gathering(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def by_tokens(model: nn.Module, mesh: Any) -> nn.Module:
    """Activations are split by tokens around the layers, which is how x comes."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


def replicated(model: nn.Module, mesh: Any) -> nn.Module:
    def take(_: Any, given: Any) -> Any:
        return distribute_tensor(given[0], mesh, [Shard(1)])

    return distribute_module(model, mesh, input_fn=lambda module, given, _: take(module, given))


def local_parts(model: Any, mesh: Any) -> nn.Module:
    """As transformers' plans do it without gradients: local tensors for the length of a call."""
    parallel(model, mesh)
    for layer, rows in ((model.up, True), (model.down, False)):
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
        layer.forward = on_local_parts(layer, layer.forward, rows, mesh)
    return model


def on_local_parts(layer: Any, own: Any, rows: bool, mesh: Any) -> Any:
    """A forward in the place of a layer's own, which it keeps in its closure."""

    def forward(x: Any) -> Any:
        if torch.is_grad_enabled():
            out = own(DTensor.from_local(x, mesh, [Replicate() if rows else Shard(-1)]))
            return out.to_local() if rows else out.full_tensor()
        weight = layer.weight
        layer._parameters["weight"] = weight.to_local()
        try:
            out = own(x)
        finally:
            layer._parameters["weight"] = weight
        if not rows:
            dist.all_reduce(out)
        return out

    return forward


def transformed(model: Any, mesh: Any) -> nn.Module:
    """By transformers itself."""
    library = pytest.importorskip("transformers.distributed.tensor_parallel")
    for name, style in (("up", "colwise"), ("down", "rowwise")):
        layer, made = getattr(model, name), library.ALL_PARALLEL_STYLES[style]
        weight = layer.weight.detach()
        made.shard_param(layer, "weight", mesh)
        with torch.no_grad():
            layer.weight.copy_(distribute_tensor(weight, mesh, layer.weight.placements))
        made.install_forward(layer, mesh)
    return model


def data_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


@dataclass(frozen=True)
class Way:
    """How a model is sharded.

    Attributes:
        shard: does it.
        told: what the report says of both layers afterwards; {} is for the share of one.
        served: calls that come to our dispatcher, of two layers.
    """

    shard: Callable[[Any, Any], nn.Module]
    told: str
    served: int = 2


WRAPPED = "; called by the forward that {} put on it"
SHARE = f"{ON_CPU}; a share of {{}} over 1 ranks"
WAYS: dict[str, Way] = {
    "fully_shard": Way(fsdp, GATHERED),
    "fully_shard by layer": Way(fsdp_by_layer, ALONE, 0),
    "fully_shard over parallel": Way(fsdp_over_parallel, GATHERED),
    "parallel": Way(parallel, SHARE),
    "gathering": Way(gathering, SHARE),
    "by tokens": Way(by_tokens, SHARE),
    "replicated": Way(replicated, f"{ON_CPU}; a copy on each of 1 ranks"),
    "local parts": Way(local_parts, SHARE + WRAPPED.format(__name__)),
    "transformers": Way(
        transformed, SHARE + WRAPPED.format("transformers.distributed.tensor_parallel")
    ),
    "DistributedDataParallel": Way(data_parallel, ON_CPU),
}


def sharded(way: Way, mesh: Any, enabled_first: bool | None) -> nn.Module:
    """A model that was enabled before it was sharded, after that, or (None) never."""
    model: nn.Module = made()
    if enabled_first:
        assert k3cupy.enable_low_latency_gemm(model).installed == 2
    model = way.shard(model, mesh)
    if enabled_first is False:
        k3cupy.enable_low_latency_gemm(model)
    return model


def given_to(way: Way, mesh: Any) -> Any:
    return distribute_tensor(X, mesh, [Shard(1)]) if way.shard is by_tokens else X


@of_now
@BOTH_ORDERS
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", WAYS)
def test_case50_a_sharded_model_in_either_order(
    mesh: Any, calls: Calls, name: str, enabled_first: bool
) -> None:
    way = WAYS[name]
    x = given_to(way, mesh)
    plain, mine = (sharded(way, mesh, first) for first in (None, enabled_first))
    with torch.no_grad():
        for _ in range(2):
            calls.clear()
            assert torch.equal(whole(mine(x)), whole(plain(x)))
            assert len(calls) == way.served
            if way.shard is not data_parallel:
                assert calls.promises == [False] * way.served
        before = whole(plain(x))
        for model in (mine, plain):
            if hasattr(model, "reshard"):
                model.reshard()
            for parameter in model.parameters():
                parameter.mul_(-2)
        calls.clear()
        assert not torch.equal(whole(plain(x)), before)
        assert torch.equal(whole(mine(x)), whole(plain(x)))
        assert not any(calls.promises)
        if hasattr(mine, "reshard"):
            mine.reshard()
    report = k3cupy.enable_low_latency_gemm(mine)
    shares = {"up": f"{N} x {K}, split by rows", "down": f"{K} x {N}, split by columns"}
    for row in report:
        told = way.told.format(shares[row.name.removeprefix("module.")])
        assert row.installed == bool(way.served)
        assert row.reason == told or (way.told is ALONE and row.reason.endswith(told))
    for model in (mine, plain):
        whole(model(x)).float().square().sum().backward()
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(ours.grad), whole(theirs.grad))
    k3cupy.disable_low_latency_gemm(mine)
    calls.clear()
    with torch.no_grad():
        assert torch.equal(whole(mine(x)), whole(plain(x)))
    assert calls == []


@of_now
@BOTH_ORDERS
def test_case50_compiled_shares_are_the_operators(
    mesh: Any, calls: Calls, enabled_first: bool
) -> None:
    plain, mine = (sharded(WAYS["parallel"], mesh, first) for first in (None, enabled_first))
    run = torch.compile(mine, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(run(X), plain(X))
    assert calls.promises == [False] * 4
    torch._dynamo.reset()
    for model in (torch.compile(mine, backend="aot_eager"), plain):
        model(X).float().square().sum().backward()
    assert torch.equal(whole(mine.up.weight.grad), whole(plain.up.weight.grad))
    assert len(calls) == 4


class Restless(ModuleType):
    """A module that brings in another when it is looked at, as those of large packages do."""

    @property
    def __class__(self) -> Any:
        sys.modules.setdefault("restless.part", ModuleType("part"))
        return ModuleType


def test_case50_compiled_code_walks_through_no_list_of_modules(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "restless", Restless("restless"))
    plain, mine = (sharded(WAYS["parallel"], mesh, first) for first in (None, True))
    with torch.no_grad():
        assert torch.equal(torch.compile(mine, backend="eager", fullgraph=True)(X), plain(X))
    sys.modules.pop("restless.part", None)


@BOTH_ORDERS
def test_case50_compiled_a_gathered_weight_is_never_promised(
    mesh: Any, calls: Calls, enabled_first: bool
) -> None:
    plain, mine = (sharded(WAYS["fully_shard"], mesh, first) for first in (None, enabled_first))
    run = torch.compile(mine, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(run(X), plain(X))
    assert calls.promises == [False] * 4


def test_a_mode_that_counts_collectives_sees_the_whole_product(mesh: Any, calls: Calls) -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    plain, mine = (sharded(WAYS["parallel"], mesh, first) for first in (None, True))
    with torch.no_grad(), CommDebugMode():
        assert torch.equal(mine(X), plain(X))
    assert calls == []


# What a rank computes alone


@of_now
@pytest.mark.parametrize(
    ("of_x", "of_weight", "of_out"),
    [
        (Replicate(), Replicate(), Replicate()),
        (Replicate(), Shard(0), Shard(2)),
        (Shard(2), Shard(1), Partial()),
        (Shard(0), Replicate(), Shard(0)),
        (Shard(1), Replicate(), Shard(1)),
        (Replicate(), Shard(1), None),
        (Shard(2), Replicate(), None),
        (Shard(2), Shard(0), None),
        (Shard(1), Shard(0), None),
        (Partial(), Replicate(), None),
        (Replicate(), Partial(), None),
    ],
    ids=str,
)
def test_the_part_of_a_product(
    mesh: Any, calls: Calls, of_x: Any, of_weight: Any, of_out: Any
) -> None:
    """Where ranks would have to talk first, PyTorch's product of the whole runs."""
    layer = linear().requires_grad_(False)
    whole_weight = layer.weight
    k3cupy.enable_low_latency_gemm(layer)
    x = DTensor.from_local(X, mesh, [of_x])
    layer.weight = nn.Parameter(DTensor.from_local(whole_weight.data, mesh, [of_weight]), False)
    out = layer(x)
    assert torch.equal(out.full_tensor(), F.linear(X, whole_weight))
    assert len(calls) == (of_out is not None)
    if of_out is not None:
        assert out.placements == (of_out,)
        assert out.stride() == (4 * N, N, 1)
    assert (shards.part_of(X, layer.weight), shards.part_of(x, whole_weight)) == (None, None)


def test_a_product_of_wrong_shapes_is_pytorchs_error(mesh: Any) -> None:
    layer = parallel(made().requires_grad_(False), mesh).up
    k3cupy.enable_low_latency_gemm(layer)
    for shape in ((3, K + 1), ()):
        x = distribute_tensor(torch.ones(shape, dtype=torch.bfloat16), mesh)
        with pytest.raises(RuntimeError):
            torch_linear.LowLatencyLinear.forward(layer, x)


def test_a_collective_that_is_under_way_is_waited_for(mesh: Any) -> None:
    under_way = AsyncCollectiveTensor(X)
    with torch.no_grad():
        x = DTensor.from_local(under_way, mesh, [Replicate()], run_check=False)
    found = shards.local_of(x)
    assert type(found) is torch.Tensor
    assert torch.equal(found, X)


def test_the_local_tensor_of_a_share_is_never_promised(mesh: Any, calls: Calls) -> None:
    """Writes through the DTensor are not counted in it."""
    layer, x = linear().requires_grad_(False), normal((3, K), 1)
    share = distribute_tensor(layer.weight.data, mesh, [Shard(0)])
    local = share.to_local()
    k3cupy.enable_low_latency_gemm(layer)
    layer._parameters["weight"] = local
    for _ in range(3):
        assert torch.equal(layer(x), F.linear(x, share.full_tensor()))
        version = local._version
        share.mul_(-2)
        assert local._version == version
    assert calls.promises == [False] * 3


# Left alone


@pytest.mark.parametrize(
    ("placements", "reason"),
    [
        ([Partial()], "its weight is a DTensor with placement "),
        ([_StridedShard(0, split_factor=2)], "its weight is a DTensor with placement "),
        ([Shard(0), Replicate()], "its weight is a DTensor on a mesh of 2 dimensions, not of one"),
    ],
    ids=["partial", "strided", "two dimensions"],
)
def test_shares_that_are_left_alone(mesh: Any, placements: Any, reason: str) -> None:
    layer = linear().requires_grad_(False)
    on = init_device_mesh("cpu", (1,) * len(placements))
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.data, on, placements), False)
    (row,) = k3cupy.enable_low_latency_gemm(layer)
    assert not row.installed
    assert row.reason.startswith(reason)


def test_a_share_that_does_not_fit_says_why(mesh: Any) -> None:
    model = parallel(made().float(), mesh)
    rows = k3cupy.enable_low_latency_gemm(model)
    assert [row.reason for row in rows] == ["its weight is float32, not bfloat16"] * 2


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_flat_parameter_of_fsdp(is_parameter: bool) -> None:
    """As FullyShardedDataParallel keeps weights, which PyTorch has for GPUs alone."""
    layer = linear().requires_grad_(False)
    layer._is_fsdp_managed_module = True
    weight = layer._parameters.pop("weight")
    if is_parameter:
        layer.weight = nn.Parameter(weight.flatten(), False)
        told = "its weight is a part of FSDP's flat parameter: enable before it is sharded"
    else:
        layer.weight = weight.data
        told = "FSDP keeps its weight in a flat parameter: use_orig_params=True, or fully_shard"
    (row,) = k3cupy.enable_low_latency_gemm(layer)
    assert (row.installed, row.reason) == (False, told)


# Two ranks


def computed_by_two_ranks(rank: int, store: str) -> None:
    """Sharded by two, each in either order, with shares of equal sizes and of others."""
    warnings.simplefilter("ignore")
    with process_group("gloo", rank, 2, dist.FileStore(store, 2)):
        mesh = init_device_mesh("cpu", (2,))
        for way in (fsdp, parallel, gathering, by_tokens, replicated, local_parts):
            for width in (N, N + 1) if way in (fsdp, gathering, replicated) else (N,):
                plain = made(width)
                want = plain(X)
                want.float().square().sum().backward()
                for enabled_first in (True, False):
                    model: Any = made(width)
                    if enabled_first:
                        k3cupy.enable_low_latency_gemm(model)
                    model = way(model, mesh)
                    report = k3cupy.enable_low_latency_gemm(model)
                    x = distribute_tensor(X, mesh, [Shard(1)]) if way is by_tokens else X
                    k3cupy.reset_dispatch_report()
                    with torch.no_grad():
                        out = whole(model(x))
                    torch.testing.assert_close(out, want, rtol=2**-6, atol=2**-6)
                    calls = sum(row.calls for row in k3cupy.dispatch_report())
                    assert (report.installed, calls) == (2, 2), (way.__name__, width, report)
                    if way is gathering:
                        share = (width + 1 - rank) // 2
                        assert [row.shape for row in report] == [(share, K), (K, share)]
                    whole(model(x)).float().square().sum().backward()
                    if way is not local_parts:
                        for ours, theirs in zip(
                            model.parameters(), plain.parameters(), strict=True
                        ):
                            close = whole(ours.grad).float() - theirs.grad.float()
                            assert close.abs().max() <= 2**-4 * theirs.grad.abs().max()
        print("right", flush=True)


def two_processes(store: str) -> None:
    """A process imports all that is needed, and becomes two."""
    second = os.fork()
    computed_by_two_ranks(0 if second else 1, store)
    if not second:
        os._exit(0)
    assert os.waitpid(second, 0)[1] == 0


@of_now
def test_case50_two_ranks(tmp_path: Path) -> None:
    printed = run_child(two_processes, str(tmp_path / "store"), env={"OMP_NUM_THREADS": "1"})
    assert "".join(printed.split()) == "right" * 2, "one may print amid the other's line"


def test_copies_of_shares(mesh: Any) -> None:
    model = sharded(WAYS["parallel"], mesh, True)
    twin = copy.deepcopy(model)
    assert type(twin.up) is LowLatencyLinear
    with torch.no_grad():
        assert torch.equal(twin(X), model(X))
