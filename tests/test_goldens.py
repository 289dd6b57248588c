"""Every call launches what its golden says, argument by argument, on a GPU that is none.

``golden_calls.py`` has the calls, and says how to record anew.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_signatures import Parameter, ctype_of, signatures, template_arguments
from fake_device import H200, CudaTensor, Launch
from golden_calls import (
    DECODE,
    FOLDER,
    KEY_CONCAT,
    OPERATIONS,
    PREFILLS,
    goldens,
    record_all,
)
from golden_recording import (
    GoldenCall,
    Recording,
    Shipped,
    Signatures,
    Twice,
    described,
    differences,
    shipped_signatures,
    signature_of,
    wrong_types,
)

from k3cupy.runtime import sources
from k3cupy.runtime.instances import Instance

# Together in one worker, which records once.
pytestmark = pytest.mark.xdist_group("goldens")

KERNELS = (
    ("mla_decode.cu", "mla_decode_epilogue"),
    ("mla_prefill.cu", "mla_key_concat"),
    ("mla_prefill.cu", "mla_qkv_quant"),
    ("mla_prefill.cu", "mla_kv_concat"),
    ("mla_prefill.cu", "mla_kv_concat_quant"),
    ("mla_norm.cu", "q_kv_rms_norms"),
    ("mla_query.cu", "mla_decode_query"),
    ("mla_value.cu", "head_product"),
    ("fused_a_gemm.cu", "fused_a_gemm"),
    ("fused_a_gemm.cu", "fused_a_gemm_mapped_x"),
    ("skinny_gemm.cu", "skinny_gemm"),
    ("skinny_gemm.cu", "skinny_gemm_mma"),
)
SHIPPED = Shipped()


@dataclass(frozen=True)
class Recorded:
    """All calls with what they did."""

    calls: tuple[tuple[GoldenCall, Twice], ...]

    def of(self, *operations: str) -> Iterator[tuple[GoldenCall, Twice]]:
        return ((c, twice) for c, twice in self.calls if c.operation in operations)

    def of_kernel(self, kernel: str) -> Iterator[tuple[GoldenCall, Recording]]:
        for call, (first, _) in self.calls:
            if any(kernel_of(launch) == kernel for launch in first.launches):
                yield call, first


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded(tuple(record_all()))


golden_of = functools.cache(goldens)


def kernel_of(launch: Launch) -> str:
    return template_arguments(launch.instance.name_expression)[0]


def against_golden(call: GoldenCall, now: Recording, known: Signatures = SHIPPED) -> list[str]:
    """Where a call differs from its golden, a line each."""
    golden = golden_of(call.operation)[call.key]
    return [f"{call.key}: {line}" for line in differences(golden, described(now, known))]


def report(lines: list[str]) -> str:
    return "\n".join(["", f"{len(lines)} differences from the goldens", *lines[:40]])


# The goldens hold


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_launches_what_its_golden_says(operation: str, recorded: Recorded) -> None:
    made = list(recorded.of(operation))
    assert [call.key for call, _ in made] == list(golden_of(operation)), "calls without a golden"
    lines = [line for call, (first, _) in made for line in against_golden(call, first)]
    assert not lines, report(lines)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_repeated_call_launches_with_its_own_addresses(
    operation: str, recorded: Recorded
) -> None:
    """A second call with other tensors makes no plan, and its golden is that of the first."""
    made = list(recorded.of(operation))
    lines = [line for call, (_, second) in made for line in against_golden(call, second)]
    assert not lines, report(lines)
    assert [call.key for call, (_, second) in made if second.launchers] == []


def test_the_files_are_those_of_the_operations() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(OPERATIONS)
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    assert size < 800_000, "a repository is no place for more"


def test_arguments_have_the_types_of_the_parameters(recorded: Recorded) -> None:
    found = [
        f"{call.operation}, {call.key}: {line}"
        for call, (first, _) in recorded.calls
        for launch in first.launches
        for line in wrong_types(launch, SHIPPED)
    ]
    assert not found, "\n".join(found[:40])


def test_every_kernel_of_the_operations_is_launched(recorded: Recorded) -> None:
    launched = {
        (launch.instance.source, kernel_of(launch))
        for _, (first, _) in recorded.calls
        for launch in first.launches
    }
    assert launched == set(KERNELS)
    assert launched == {
        (source, kernel) for source in dict(KERNELS) for kernel in shipped_signatures(source)
    }


def test_every_kernel_is_launched_on_several_gpus(recorded: Recorded) -> None:
    for _, kernel in KERNELS:
        gpus = {call.gpu.name for call, _ in recorded.of_kernel(kernel)}
        assert len(gpus) >= 3, f"{kernel} only on {gpus}"


# What the comparison can see


def changed(recording: Recording, change: Callable[[int, str, Any], Any]) -> Recording:
    """A recording with other arguments: ``change`` gets the launch's number, a name, a value."""
    return replace(
        recording,
        launches=tuple(
            replace(
                launch,
                arguments=[
                    change(number, parameter.name, value)
                    for parameter, value in zip(
                        signature_of(launch, SHIPPED).parameters, launch.arguments, strict=True
                    )
                ],
            )
            for number, launch in enumerate(recording.launches)
        ),
    )


@pytest.mark.parametrize(("source", "kernel"), KERNELS)
def test_two_swapped_parameters_are_seen(source: str, kernel: str, recorded: Recorded) -> None:
    """In the CUDA source or in the order of the arguments, which is the same to a kernel."""
    signature = shipped_signatures(source)[kernel]
    made = list(recorded.of_kernel(kernel))
    unseen = []
    for i, j in itertools.combinations(range(len(signature.parameters)), 2):
        swapped = {**shipped_signatures(source), kernel: signature.swapped(i, j)}
        known = Shipped({source: swapped})
        if not any(against_golden(call, now, known) for call, now in made):
            unseen.append((signature.parameters[i].name, signature.parameters[j].name))
    assert unseen == []


def test_a_swap_in_the_text_of_a_kernel_is_seen(recorded: Recorded) -> None:
    """The decode kernel with two counts in each other's place."""
    text = (sources.directory() / "mla_decode.cu").read_text(encoding="utf-8")
    before = "unsigned int num_slots,\n        unsigned int block_size,"
    assert text.count(before) == 1
    swapped = text.replace(before, "unsigned int block_size,\n        unsigned int num_slots,")
    known = Shipped({"mla_decode.cu": signatures(swapped)})
    for call, (first, _) in recorded.of(DECODE):
        lines = against_golden(call, first, known)
        seen = {name for line in lines for name in ("num_slots", "block_size") if name in line}
        assert len(seen) == (2 if first.launches else 0), call.key


def test_a_wrong_offset_of_a_slice_is_seen(recorded: Recorded) -> None:
    """The outputs of every slice at the first one's place, or a row too far."""
    sliced = [(c, first) for c, (first, _) in recorded.of(DECODE) if len(first.launches) > 1]
    assert len(sliced) > 10
    for call, first in sliced:
        start = argument_of(first.launches[0], "mqa_q")
        wrong = changed(first, lambda _, name, v, s=start: s if name == "mqa_q" else v)
        lines = against_golden(call, wrong)
        assert len(lines) == len(first.launches) - 1
        assert "launches[1] arguments mqa_q: golden " in lines[0]
        late = changed(first, lambda n, name, v: v + 1152 * n if name == "mqa_q" else v)
        assert against_golden(call, late)


def test_wrong_input_addresses_are_seen(recorded: Recorded) -> None:
    """Two bytes too far, every input of prefill by itself."""
    for call, (first, _) in recorded.of(*PREFILLS):
        starts = {name: start for name, start, _ in first.places}
        inputs = {name for name in starts if not name.startswith(("out", "new output"))}
        for launch in first.launches:
            parameters = [p.name for p in signature_of(launch, SHIPPED).parameters]
            for name in inputs.intersection(parameters):
                wrong = changed(first, lambda _, p, v, n=name: v + 2 if p == n and v else v)
                assert any(
                    f" {name}: golden {name}+0, now" in s for s in against_golden(call, wrong)
                )


def argument_of(launch: Launch, name: str) -> Any:
    names = [p.name for p in signature_of(launch, SHIPPED).parameters]
    return launch.arguments[names.index(name)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_addresses_of_an_earlier_call_are_seen(operation: str, recorded: Recorded) -> None:
    """A plan that launched with the tensors for which it was made."""
    for call, (first, second) in recorded.of(operation):
        if first.launches:
            assert against_golden(call, replace(second, launches=first.launches)), call.key


@pytest.mark.parametrize(
    "change",
    [
        {"grid": 1},
        {"block": 31},
        {"pdl": "neither"},
        {"shared_bytes": 1},
        {"shared_limit": 1},
        {"cluster": 3},
        {"stream": 5},
        {"device": 3},
        {"loaded_for": 3},
        {"instance": Instance("mla_prefill.cu", "k3cupy::mla_key_concat<float>")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_property_of_a_launch_is_seen(change: dict[str, Any], recorded: Recorded) -> None:
    call, (first, _) = next(iter(recorded.of(KEY_CONCAT)))
    assert call.gpu is H200
    wrong = replace(first, launches=(replace(first.launches[0], **change),))
    assert against_golden(call, wrong)


def test_launches_and_results_too_many_or_missing_are_seen(recorded: Recorded) -> None:
    _, (some, _) = next(iter(recorded.of(KEY_CONCAT)))
    for call, (first, _) in recorded.of(KEY_CONCAT):
        missing = [replace(first, launches=())] if first.launches else []
        for wrong in (
            *missing,
            replace(first, launches=first.launches + some.launches),
            replace(first, returned=("q",)),
            replace(first, made=("[1] float32",)),
            replace(first, kept=("q for 5",)),
        ):
            assert against_golden(call, wrong), call.key


def test_a_difference_names_the_argument(recorded: Recorded) -> None:
    call, (first, _) = next(iter(recorded.of(DECODE)))
    wrong = changed(first, lambda _, name, v: np.uint32(7) if name == "num_heads" else v)
    assert against_golden(call, wrong) == [
        "NVIDIA H200: T=1 H=12: launches[0] arguments num_heads: golden u32 12, now u32 7"
    ]
    other = changed(first, lambda _, name, v: int(v) if name == "num_heads" else v)
    assert against_golden(call, other) == [
        "NVIDIA H200: T=1 H=12: launches[0] arguments num_heads: golden u32 12, now int 12"
    ]
    assert wrong_types(other.launches[0], SHIPPED) == ["num_heads: unsigned int, got int"]


def test_an_argument_too_many_is_seen(recorded: Recorded) -> None:
    call, (first, _) = next(iter(recorded.of(DECODE)))
    (launch,) = first.launches
    for arguments in (launch.arguments[:-1], [*launch.arguments, np.uint32(1)]):
        wrong = replace(launch, arguments=arguments)
        assert wrong_types(wrong, SHIPPED) == [f"{len(arguments)} arguments for 35 parameters"]
        assert against_golden(call, replace(first, launches=(wrong,)))


# Reading signatures


def test_a_signature() -> None:
    text = """
        template <typename T, bool kVector>  // a remark, with (brackets
        __global__ void __launch_bounds__(kThreads<(1 + 2), T>, 1)
            kernel(const T* a,  // the first
                   typename StrideOf<kVector>::Type stride, unsigned  int n,
                   const __grid_constant__ TensorMap map) { other(1, 2); }
        template <int k> __device__ void helper(int x) {}
        template <int kN> __global__ void second(long long x) {}
    """
    found = signatures(text)
    assert list(found) == ["kernel", "second"]
    kernel = found["kernel"]
    assert kernel.template == ("T", "kVector")
    assert kernel.parameters == (
        Parameter("a", "const T*"),
        Parameter("stride", "typename StrideOf<kVector>::Type"),
        Parameter("n", "unsigned int"),
        Parameter("map", "const __grid_constant__ TensorMap"),
    )
    assert found["second"].parameters == (Parameter("x", "long long"),)
    assert kernel.swapped(0, 2).parameters[0].name == "n"
    stride = kernel.parameters[1]
    assert ctype_of(stride, {"kVector": "true"}) == "unsigned int"
    assert ctype_of(stride, {"kVector": "false"}) == "long long"
    assert template_arguments("k3cupy::kernel<__half, k3cupy::F<1, 2>, 3>") == (
        "kernel",
        ("__half", "k3cupy::F<1, 2>", "3"),
    )


def test_fake_tensors_say_that_they_are_on_a_gpu() -> None:
    tensor = CudaTensor.of(torch.empty(4, 6)[:, 2:], 3)
    assert (tensor.is_cuda, tensor.get_device(), str(tensor.device)) == (True, 3, "cuda:3")
    part = tensor[1:3]
    assert part.get_device() == 3
    assert part.data_ptr() == tensor.data_ptr() + 24
